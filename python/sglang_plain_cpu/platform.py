"""The CPU as an SGLang platform: stock models in plain PyTorch, no AMX kernels, no compiler.

`TorchCpuPlatform` is found by name through the entry point. It fills in what the user left open:
- device `cpu`, attention `torch_native`, sampling `pytorch`, no compilation, no graphs;
- a float32 checkpoint stays float32;
- one KV pool for layers with and without a window;
- a KV pool of at most a quarter of the free memory, and a pool of states of an eighth (`memory`);
- states of convolutions are kept in the model's dtype;
- CPUs per rank (`threads`).
A flag or an environment variable of the user wins over these defaults. It also puts operations in place that SGLang has
for accelerators only (`patches`).

SGLang imports this file in the middle of its own first imports, so further modules of SGLang are imported in functions.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_plain_cpu import memory, patches, threads
from sglang_plain_cpu.compiler import switch_compiler_on

# Weights and KV pool together may take this share of the memory that is free at start-up. The pool has its own, much
# lower bound in tokens; SGLang applies the smaller one.
STATIC_MEMORY_FRACTION = 0.9
SPECULATIVE_ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3")
CONVOLUTION_VARIABLE = "SGLANG_MAMBA_CONV_DTYPE"
_convolutions: dict[str, str] = {}  # value that an earlier engine of this process gave to the variable


class TorchCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Plain PyTorch on the CPU. Seen by SGLang as an out-of-tree device of torch type `cpu`."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def __init__(self) -> None:
        patches.apply("platform")

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fills in the backends and the CPUs per rank if the user has not, and sets what serving on a CPU needs."""
        if server_args.device != "cpu":
            return
        if server_args.attention_backend is None:
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.attention_backend == "torch_native":  # it reads the KV of all layers by the slots of one pool
            server_args.disable_hybrid_swa_memory = True
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"
        if server_args.lora_backend == "csgmv":  # SGLang's default, in Triton
            server_args.lora_backend = "torch_native"
        server_args.disable_custom_all_reduce = True  # a CUDA kernel; if it is on, each rank warns that it failed
        server_args.sleep_on_idle = True  # an idle scheduler would keep a core busy that the others need
        patches.apply("flags")
        if server_args.enable_torch_compile:
            switch_compiler_on()
        threads.publish_binding(_num_processes(server_args))

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_dispatch_key_name(self) -> str:
        return "native"

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS

    def support_mamba_cache_extra_buffer(self) -> bool:
        """True: a forward of `delta_rule` returns the states inside a prompt, which the radix cache keeps."""
        return True

    def get_speculative_worker_cls(self, algorithm: str) -> type | None:
        """None: SGLang's own class. Also applies patches, as only this call tells that the process speculates."""
        patches.apply("drafting")
        return None

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_device(self, device_id: int | None = 0) -> str:
        return "cpu"  # a string and not a torch.device, because SGLang splits it like a flag's value

    def get_device_total_memory(self, device_id: int = 0) -> int:
        return memory.total_ram_bytes()

    def get_current_memory_usage(self, device: torch.device | None = None) -> float:
        return float(memory.total_ram_bytes() - memory.free_ram_bytes())

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        return memory.free_ram_bytes(), memory.total_ram_bytes()

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_group_coordinator_device(self, local_rank: int) -> torch.device:
        """The CPU. Also binds the process to its CPUs: only this call tells the rank before weights are loaded."""
        threads.bind_rank(local_rank)
        patches.apply("rank")
        return torch.device("cpu")

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_torch_profiler_activity(self) -> torch.profiler.ProfilerActivity:
        return torch.profiler.ProfilerActivity.CPU


def leave_backends_open(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Replaces, on a CPU, a step that would choose AMX attention and overwrite the user's sampling backend."""
    from sglang.srt.arg_groups.model_override_base import resolving_view

    if resolving_view(server_args).device != "cpu":
        previous(server_args)


def fit_to_memory(server_args: Any, previous: Callable[[Any], None]) -> None:
    """Sets the defaults of `_model_defaults` before SGLang's own memory settings, which keep what is set."""
    from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
    from sglang.srt.arg_groups.overrides import declare_resolution

    cfg = resolving_view(server_args)
    if cfg.device == "cpu":
        chosen = _model_defaults(cfg, model_config_of(server_args))
        if chosen:
            declare_resolution(server_args, "platform:chunk_cache_cpu", **chosen)
    previous(server_args)


def keep_overlap(_server_args: Any) -> None:
    """Leaves the overlap schedule on; only SGLang's own CPU engine does not speculate with it."""


def _model_defaults(cfg: Any, model_config: Any) -> dict[str, Any]:
    """Fields that depend on the model and that the user left open."""
    chosen: dict[str, Any] = {}
    dtype = model_config.dtype
    if cfg.dtype == "auto" and _is_float32_checkpoint(model_config):
        # SGLang would take 16 bits, which on a CPU is slower and less exact.
        dtype = torch.float32
        chosen["dtype"] = "float32"
    if (states := _config_of_states(model_config)) is not None:
        _keep_convolutions_in(dtype)
        if cfg.max_mamba_cache_size is None:
            chosen["max_mamba_cache_size"] = memory.state_limit(
                free_bytes=memory.free_ram_bytes(),
                state_bytes=_state_bytes(states, dtype, cfg.tp_size),
                num_processes=_num_processes(cfg),
            )
    if cfg.mem_fraction_static is None:
        chosen["mem_fraction_static"] = STATIC_MEMORY_FRACTION
        if cfg.max_total_tokens is None:
            chosen["max_total_tokens"] = memory.pool_token_limit(
                free_bytes=memory.free_ram_bytes(),
                token_bytes=_token_bytes(model_config, dtype, cfg.tp_size // cfg.attn_dp_size),
                num_processes=_num_processes(cfg),
                page_size=cfg.page_size or 1,
                min_tokens=model_config.context_len,
            )
    return chosen


def _is_float32_checkpoint(model_config: Any) -> bool:
    stored = getattr(model_config.hf_text_config, "dtype", None)
    return model_config.quantization is None and stored in (None, "float32", torch.float32)


def _keep_convolutions_in(dtype: torch.dtype) -> None:
    """Sets the dtype of SGLang's states of convolutions, which is bf16 for every model, unless the user has set it."""
    if os.environ.get(CONVOLUTION_VARIABLE, "") == _convolutions.get("dtype", ""):
        _convolutions["dtype"] = os.environ[CONVOLUTION_VARIABLE] = str(dtype).removeprefix("torch.")


def _token_bytes(model_config: Any, dtype: torch.dtype, tp_size: int) -> int:
    """Bytes of K and V of one token in one rank over all layers; too many, which is safe, if KV has a smaller dtype."""
    width = model_config.get_num_kv_heads(tp_size) * (model_config.head_dim + model_config.v_head_dim)
    states = _config_of_states(model_config)
    num_layers = model_config.num_hidden_layers if states is None else len(states.full_attention_layer_ids)
    return int(width * num_layers * dtype.itemsize)


def _config_of_states(model_config: Any) -> Any:
    """The configuration of a model with layers of the gated delta rule; None for others."""
    from sglang.srt.configs.hybrid_arch import hybrid_gdn_config

    config = hybrid_gdn_config(model_config)
    return config if hasattr(config, "linear_num_value_heads") else None


def _state_bytes(config: Any, dtype: torch.dtype, tp_size: int) -> int:
    """Bytes of one state in one rank over all layers: fp32 matrices, and states of convolutions."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    values = config.linear_num_value_heads * config.linear_value_head_dim
    matrices = values * config.linear_key_head_dim * torch.float32.itemsize
    rows = (2 * keys + values) * (config.linear_conv_kernel_dim - 1) * dtype.itemsize
    return int((matrices + rows) // tp_size * len(config.linear_layer_ids))


def _num_processes(cfg: Any) -> int:
    replicas = 1 if cfg.enable_dp_attention else cfg.dp_size  # with that flag dp_size divides the ranks
    return cfg.tp_size * cfg.pp_size * replicas
