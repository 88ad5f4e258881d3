"""What the chunk cache does not work with, decided before any process is started.

Verbs: `check_flags` (the flags as given), `check_resolved` (the flags as SGLang resolved them, and the model),
`check_model` (one resolved model configuration), `prepare_flags` (fills in what was left to us).

Promise: a server that would give wrong answers, or silently reuse nothing, does not start; it ends with one sentence
that names the flag or the property of the model. A model class is supported when it is in `ARCHITECTURES`: reuse
depends on how a model writes and rotates its keys, so an unknown class is refused and not tried.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from chunk_cache.config import Config
from sglang_chunk_cache.api.served import check_default
from sglang_chunk_cache.server_args import ChunkCacheArgs, attached, refuse

if TYPE_CHECKING:
    from chunk_cache.config import Config

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer")
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16")
ROPE_TYPES = ("default", "linear", "llama3", "yarn")


def _more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def _not_null(value: object) -> bool:
    return value not in (None, "null", "none")


@dataclass(frozen=True)
class FlagRule:
    """A flag that is refused.

    Attributes:
        name: the field of `ServerArgs`.
        what: subject of the sentence, with the flag.
        refused: whether a value is refused.
    """

    name: str
    what: str
    refused: Callable[[Any], bool] = bool


FLAG_RULES: tuple[FlagRule, ...] = (
    # Parallelism and topology.
    FlagRule("pp_size", "pipeline parallelism (--pp-size)", _more_than_one),
    FlagRule("attn_dp_size", "data-parallel attention (--attn-dp-size)", _more_than_one),
    FlagRule("enable_dp_attention", "data-parallel attention (--enable-dp-attention)"),
    FlagRule("attn_cp_size", "context parallelism (--attn-cp-size)", _more_than_one),
    FlagRule("dcp_size", "context parallelism (--dcp-size)", _more_than_one),
    FlagRule("enable_prefill_cp", "context parallelism (--enable-prefill-cp)"),
    FlagRule("enable_kv_cache_sharding", "KV cache sharding (--enable-kv-cache-sharding)"),
    FlagRule("enable_layernorm_sp", "sequence parallelism (--enable-layernorm-sp)"),
    FlagRule("enable_attn_tp_input_scattered", "scattered attention input (--enable-attn-tp-input-scattered)"),
    FlagRule("nnodes", "serving on several nodes (--nnodes)", _more_than_one),
    FlagRule("use_ray", "Ray (--use-ray)"),
    # Disaggregation.
    FlagRule("disaggregation_mode", "prefill/decode disaggregation (--disaggregation-mode)", _not_null),
    FlagRule("enable_pdmux", "prefill/decode multiplexing (--enable-pdmux)"),
    FlagRule("encoder_only", "encoder disaggregation (--encoder-only)"),
    FlagRule("language_only", "encoder disaggregation (--language-only)"),
    # Speculative decoding.
    FlagRule("speculative_algorithm", "speculative decoding (--speculative-algorithm)", _not_null),
    FlagRule("decoupled_spec_role", "speculative decoding (--decoupled-spec-role)", _not_null),
    # Other caches.
    FlagRule("disable_radix_cache", "--disable-radix-cache"),
    FlagRule("enable_hierarchical_cache", "HiCache (--enable-hierarchical-cache)"),
    FlagRule("hicache_storage_backend", "HiCache storage (--hicache-storage-backend)", _not_null),
    FlagRule(
        "disaggregation_decode_retraction_backup",
        "host-pool retraction (--disaggregation-decode-retraction-backup host_pool)",
        lambda value: value == "host_pool",
    ),
    FlagRule("enable_lmcache", "LMCache (--enable-lmcache)"),
    FlagRule("enable_flexkv", "FlexKV (--enable-flexkv)"),
    FlagRule("enable_unified_cache_external_linker", "an external linker (--enable-unified-cache-external-linker)"),
    FlagRule("enable_session_radix_cache", "the session radix cache (--enable-session-radix-cache)"),
    FlagRule("enable_hisparse", "hierarchical sparse attention (--enable-hisparse)"),
    FlagRule("enable_unified_memory", "the unified memory pool (--enable-unified-memory)"),
    FlagRule("enable_page_major_kv_layout", "the page-major KV layout (--enable-page-major-kv-layout)"),
    FlagRule("kv_canary", "the KV canary (--kv-canary)", _not_null),
    # They would announce our nodes, whose keys no router can ask for.
    FlagRule("kv_events_config", "KV events (--kv-events-config)", _not_null),
    # Front ends.
    FlagRule("smg_grpc_mode", "gRPC mode (--smg-grpc-mode)"),
    FlagRule("grpc_mode", "gRPC mode (--grpc-mode)"),
    FlagRule("grpc_port", "the gRPC server (--grpc-port)", lambda value: value is not None),
    FlagRule("tokenizer_worker_num", "several tokenizer workers (--tokenizer-worker-num)", _more_than_one),
    FlagRule("enable_streaming_session", "streaming sessions (--enable-streaming-session)"),
    # How batches are formed and what they return.
    FlagRule("enable_two_batch_overlap", "two-batch overlap (--enable-two-batch-overlap)"),
    FlagRule("enable_single_batch_overlap", "single-batch overlap (--enable-single-batch-overlap)"),
    FlagRule("enable_mixed_chunk", "mixed prefill and decode batches (--enable-mixed-chunk)"),
    FlagRule("enable_mis", "multi-item scoring (--enable-mis)"),
    FlagRule("enable_return_hidden_states", "returned hidden states (--enable-return-hidden-states)"),
    FlagRule("return_hidden_states_mode", "returned hidden states (--return-hidden-states-mode)", _not_null),
    FlagRule("enable_return_routed_experts", "returned experts (--enable-return-routed-experts)"),
    FlagRule("prefill_only_disable_kv_cache", "--prefill-only-disable-kv-cache"),
    # Models and number formats.
    FlagRule("is_embedding", "an embedding model (--is-embedding)"),
    FlagRule("dllm_algorithm", "a diffusion language model (--dllm-algorithm)", _not_null),
    FlagRule("model_impl", "--model-impl", lambda value: value not in ("auto", "sglang")),
    FlagRule("kv_cache_dtype", "a quantized KV cache (--kv-cache-dtype)", lambda value: value not in KV_CACHE_DTYPES),
)


def _refused_backend(value: object) -> bool:
    return value is not None and value not in ATTENTION_BACKENDS


BACKEND_RULES: tuple[FlagRule, ...] = tuple(
    FlagRule(name, f"--{name.replace('_', '-')}", _refused_backend)
    for name in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
)


def prepare_flags(server_args: Any, config: Config) -> None:
    """Sets the flags that follow from the options.

    The radix tree's victims follow the reuse frequency through their priorities. And a supported attention backend is
    chosen where the user left the choice open and there is a CUDA device: SGLang's own default there may be one that we
    do not serve. Without CUDA the platform chooses.

    Raises:
        StartRefused: two policies of eviction are asked for.
    """
    import torch

    if config.eviction == "frequency-reuse":
        policy = server_args.radix_eviction_policy
        if policy not in ("lru", "priority"):  # lru is SGLang's default
            refuse(
                f"--radix-eviction-policy {policy} cannot be combined with the eviction frequency-reuse of "
                "--chunk-cache-config; drop one of them."
            )
        server_args.radix_eviction_policy = "priority"

    if any(getattr(server_args, rule.name) is not None for rule in BACKEND_RULES) or not torch.cuda.is_available():
        return
    has_flashinfer = importlib.util.find_spec("flashinfer") is not None
    server_args.attention_backend = "flashinfer" if has_flashinfer else "triton"


def check_flags(server_args: Any) -> None:
    """Checks every flag; before resolution the given values, after it the resolved ones.

    Raises:
        StartRefused: a flag does not work with the chunk cache.
    """
    from sglang.srt.arg_groups.overrides import resolution_result
    from sglang.srt.environ import envs

    for rule in FLAG_RULES:
        if rule.refused(resolution_result(server_args, rule.name)):
            refuse(f"{rule.what} cannot be combined with --chunk-cache; drop one of them.")
    for rule in BACKEND_RULES:
        value = resolution_result(server_args, rule.name)
        if rule.refused(value):
            refuse(f"{rule.what} {value} does not work with --chunk-cache; use one of {', '.join(ATTENTION_BACKENDS)}.")
    if envs.SGLANG_RUST_SERVER.get():
        refuse("the Rust HTTP server (SGLANG_RUST_SERVER) cannot be combined with --chunk-cache; unset the variable.")
    if envs.SGLANG_GRPC_PORT.get() is not None:
        refuse("the gRPC server (SGLANG_GRPC_PORT) cannot be combined with --chunk-cache; unset the variable.")


def check_resolved(server_args: Any) -> None:
    """Checks the flags once more as they were resolved, and the model.

    Raises:
        StartRefused: a flag or the model does not work with the chunk cache.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of
    from sglang.srt.arg_groups.overrides import resolution_result

    check_flags(server_args)
    args = attached(server_args)
    kernel = None if args is None else args.parsed_config.kernel
    if args is not None:
        check_replicas(args.parsed_config, resolution_result(server_args, "dp_size"))
    if kernel in ("triton", "flashinfer") and resolution_result(server_args, "device") != "cuda":
        refuse(f'--chunk-cache-config: kernel: "{kernel}" needs a CUDA device; use "auto" or "torch".')
    if str(server_args.model_path).lower() in ("none", "dummy"):
        return
    model_config = model_config_of(server_args)
    check_model(model_config)
    if kernel == "flashinfer":
        check_flashinfer(model_config)
    if args is not None:
        _check_selector(args)
        _check_layers(args.parsed_config, model_config.num_hidden_layers)
        check_default(args, model_config.num_hidden_layers, bool(resolution_result(server_args, "enable_lora")))
    if resolution_result(server_args, "kv_cache_dtype") == "auto" and quantizes_kv_cache(model_config.hf_quant_config):
        refuse("the checkpoint asks for an FP8 KV cache, which --chunk-cache cannot move; add --kv-cache-dtype bf16.")


def _check_selector(args: ChunkCacheArgs) -> None:
    if args.selector is None:
        return
    from sglang_chunk_cache.selector.auxiliary import SelectorModelError, check_selector_model

    try:
        check_selector_model(args.selector)
    except SelectorModelError as error:
        refuse(f"--chunk-cache-selector: {error}; name a small causal language model with a fast tokenizer.")


def check_replicas(config: Config, dp_size: int | None) -> None:
    """Checks that replicas do not overwrite each other's file.

    Raises:
        StartRefused: they would.
    """
    if config.verify_file is not None and _more_than_one(dp_size):
        refuse('--chunk-cache-config: verify_file: replicas (--dp-size) would overwrite it; drop "verify_file".')


def _check_layers(config: Config, num_layers: int) -> None:
    layers = config.statistics_layers
    if not isinstance(layers, str) and any(layer >= num_layers for layer in layers):
        refuse(
            f"--chunk-cache-config: statistics_layers: layer {max(layers)}, but the model has layers 0 to "
            f"{num_layers - 1}; name layers of the model."
        )


def check_flashinfer(model_config: Any) -> None:
    """Checks that the FlashInfer version of sparse_extend can serve a model, before a request finds that it cannot.

    Raises:
        StartRefused: it cannot; the sentence says why.
    """
    import torch

    from sgl_kernel_ext.sparse_extend.flashinfer import HEAD_DIMS

    problem = None
    if importlib.util.find_spec("flashinfer") is None:
        problem = "flashinfer is not installed"
    elif model_config.dtype not in (torch.float16, torch.bfloat16):
        problem = f"it computes in float16 and bfloat16, and this model runs in {model_config.dtype}"
    elif model_config.head_dim not in HEAD_DIMS or model_config.v_head_dim != model_config.head_dim:
        dims = ", ".join(map(str, HEAD_DIMS))
        problem = f"it has heads of {dims}, and this model's have {model_config.head_dim}, {model_config.v_head_dim}"
    if problem is not None:
        refuse(f'--chunk-cache-config: kernel: "flashinfer": {problem}; use "auto" or "triton".')


def quantizes_kv_cache(quant_config: object) -> bool:
    """Whether a checkpoint's quantization settings turn `--kv-cache-dtype auto` into FP8."""
    if not isinstance(quant_config, dict):
        return False
    if str(quant_config.get("kv_cache_quant_algo")).upper() == "FP8":
        return True
    return any(quantizes_kv_cache(value) for value in quant_config.values())


def check_model(model_config: Any) -> None:
    """Checks a model by its resolved `ModelConfig`.

    Raises:
        StartRefused: the model does not work with the chunk cache.
    """
    reason = model_reason(model_config)
    if reason is not None:
        refuse(f"this model cannot be served with --chunk-cache because {reason}.")


def model_reason(model_config: Any) -> str | None:
    """Why a model cannot be served, as the end of a sentence, or None."""
    for check in (_kind_reason, _attention_reason, _rope_reason, _architecture_reason):
        reason = check(model_config)
        if reason is not None:
            return reason
    return None


def _kind_reason(model_config: Any) -> str | None:
    if model_config.is_encoder_decoder:
        return "it is an encoder-decoder model"
    if model_config.is_multimodal or model_config.is_audio_model:
        return "it is a multimodal model"
    if not model_config.is_generation:
        return "it is an embedding, reward or classification model"
    return None


def _attention_reason(model_config: Any) -> str | None:
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    text_config = model_config.hf_text_config
    layer_types = set(getattr(text_config, "layer_types", None) or ())
    if model_config.attention_arch == AttentionArch.MLA:
        return "it uses multi-head latent attention (MLA)"
    if model_config.attention_arch == AttentionArch.SSM or mambaish_config(model_config) is not None:
        return "it has state-space or linear-attention layers"
    if layer_types & {"linear_attention", "mamba", "recurrent", "conv"}:
        return "it has state-space or linear-attention layers"
    if model_config.is_hybrid_swa or "sliding_attention" in layer_types or _sliding_window(text_config) is not None:
        return "it uses sliding-window attention (sliding_window in its config.json)"
    if model_config.attention_chunk_size or model_config.is_local_attention_model:
        return "it uses local attention (attention_chunk_size in its config.json)"
    if model_config.has_attention_sinks:
        return "it uses attention sinks"
    return None


def _sliding_window(text_config: Any) -> int | None:
    """The window that is really used: Qwen2 configurations name one and switch it off."""
    if not getattr(text_config, "use_sliding_window", True):
        return None
    values = (getattr(text_config, name, None) for name in ("sliding_window", "sliding_window_size", "window_size"))
    return next((value for value in values if value is not None), None)


def _rope_reason(model_config: Any) -> str | None:
    """Keys can be moved only where each rotary dimension turns by a fixed angle per position."""
    text_config = model_config.hf_text_config
    rope = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    if model_config.model_is_mrope or "mrope_section" in rope:
        return "it uses multimodal rope (mrope_section in its config.json)"
    if getattr(text_config, "dual_chunk_attention_config", None) is not None:
        return "it uses dual-chunk attention (dual_chunk_attention_config in its config.json)"
    if any(isinstance(value, dict) for value in rope.values()):
        return "it uses a rope of its own per kind of layer"
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "dynamic":
        return "it uses dynamic NTK rope (rope_type dynamic in its config.json)"
    if rope_type not in ROPE_TYPES or rope.get("use_fope"):
        return f"its rope type is {'fope' if rope.get('use_fope') else rope_type}, not {', '.join(ROPE_TYPES)}"
    return None


def _architecture_reason(model_config: Any) -> str | None:
    architectures = model_config.hf_config.architectures or ["unknown"]
    if architectures[0] not in ARCHITECTURES:
        return f"its architecture {architectures[0]} is not one of {', '.join(ARCHITECTURES)}"
    return None
