"""What the chunk cache does not work with, decided before any process is started.

Verbs: `check_flags` (the flags as given), `check_port`, `check_folders` (of the disk tier and of `verify_file`),
`check_resolved` (the model, and the flags as SGLang resolved them), `refuse_missing_model`, `prepare_flags` (flags that
follow from the options). `model_refusals` checks the model's configuration; in a scheduler, `pool_check` checks its KV
pool.

Promise: a server that would give wrong answers, or silently reuse nothing, does not start; it ends with one sentence
that names the flag or the property of the model. What SGLang chooses by itself stands or is refused, except that two
KV pools become one.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from chunk_cache.options.config import Config
from chunk_cache.options.event_config import port_problem
from chunk_cache.prompt.chunk_cache_fields import KEY
from sglang_chunk_cache.api.capabilities import (
    check_default,
    divides_attention,
    has_states,
    what_fixes_rows,
    what_keeps_all,
)
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, attached, change, refuse
from sglang_chunk_cache.start.dp_attention_refusals import check_dp_attention
from sglang_chunk_cache.start.flag_rules import FlagRule, more_than_one, not_null, refuse_any, resolved
from sglang_chunk_cache.start.model_refusals import check_flashinfer, check_model, has_window_pool
from sglang_chunk_cache.start.state_refusals import check_states

logger = logging.getLogger(__name__)

ATTENTION_BACKENDS = ("torch_native", "triton", "flashinfer", "fa3", "fa4", "trtllm_mha")
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16", "fp8_e4m3", "fp8_e5m2")
SPECULATIVE_ALGORITHMS = ("NGRAM", "STANDALONE", "EAGLE", "EAGLE3", "NEXTN")


FLAG_RULES: tuple[FlagRule, ...] = (
    # Parallelism, topology and disaggregation, whose roles `check_role` knows.
    FlagRule("pp_size", "pipeline parallelism (--pp-size)", more_than_one),
    FlagRule("attn_cp_size", "context parallelism (--attn-cp-size)", more_than_one),
    FlagRule("dcp_size", "context parallelism (--dcp-size)", more_than_one),
    FlagRule("enable_prefill_cp", "context parallelism (--enable-prefill-cp)"),
    FlagRule("enable_kv_cache_sharding", "KV cache sharding (--enable-kv-cache-sharding)"),
    FlagRule("enable_layernorm_sp", "sequence parallelism (--enable-layernorm-sp)"),
    FlagRule("enable_attn_tp_input_scattered", "scattered attention input (--enable-attn-tp-input-scattered)"),
    FlagRule("moe_dense_tp_size", "dense layers on fewer ranks (--moe-dense-tp-size)", not_null),
    FlagRule("moe_a2a_backend", "experts that tokens are sent to (--moe-a2a-backend)", not_null),
    FlagRule("nnodes", "serving on several nodes (--nnodes)", more_than_one),
    FlagRule("use_ray", "Ray (--use-ray)"),
    FlagRule("enable_pdmux", "prefill/decode multiplexing (--enable-pdmux)"),
    FlagRule("encoder_only", "encoder disaggregation (--encoder-only)"),
    FlagRule("language_only", "encoder disaggregation (--language-only)"),
    # A forward that ends within a layer would leave its weights where they are.
    FlagRule("cpu_offload_gb", "weights in host memory (--cpu-offload-gb)", lambda value: value > 0),
    FlagRule("offload_group_size", "weights in host memory (--offload-group-size)", lambda value: value > 0),
    # Speculative decoding.
    FlagRule(
        "speculative_algorithm",
        f"speculative decoding other than {', '.join(SPECULATIVE_ALGORITHMS)} (--speculative-algorithm)",
        lambda value: not_null(value) and str(value).upper() not in SPECULATIVE_ALGORITHMS,
    ),
    FlagRule("enable_multi_layer_eagle", "several drafting models (--enable-multi-layer-eagle)"),
    FlagRule("decoupled_spec_role", "speculative decoding (--decoupled-spec-role)", not_null),
    # Other caches.
    FlagRule("disable_radix_cache", "--disable-radix-cache"),
    FlagRule("enable_hierarchical_cache", "HiCache (--enable-hierarchical-cache)"),
    FlagRule("hicache_storage_backend", "HiCache storage (--hicache-storage-backend)", not_null),
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
    FlagRule("kv_canary", "the KV canary (--kv-canary)", not_null),
    # They would publish the token ids of our nodes, under keys that no router can ask for.
    FlagRule("kv_events_config", 'KV events (--kv-events-config; here "events" of --chunk-cache-config)', not_null),
    # Front ends.
    FlagRule("smg_grpc_mode", "gRPC mode (--smg-grpc-mode)"),
    FlagRule("grpc_mode", "gRPC mode (--grpc-mode)"),
    FlagRule("grpc_port", "the gRPC server (--grpc-port)", lambda value: value is not None),
    FlagRule("enable_streaming_session", "streaming sessions (--enable-streaming-session)"),
    FlagRule(
        "radix_eviction_policy",
        "eviction by uses, of which SGLang counts none where chunks are reused (--radix-eviction-policy lfu or slru; "
        'the eviction "frequency-reuse" of --chunk-cache-config counts them)',
        lambda value: value in ("lfu", "slru"),
    ),
    # How batches are formed and what they return.
    FlagRule("enable_two_batch_overlap", "two-batch overlap (--enable-two-batch-overlap)"),
    FlagRule("enable_single_batch_overlap", "single-batch overlap (--enable-single-batch-overlap)"),
    FlagRule("enable_mis", "multi-item scoring (--enable-mis)"),
    FlagRule("enable_return_aux_hidden_states", "hidden states of several layers (--enable-return-aux-hidden-states)"),
    FlagRule("enable_return_routed_experts", "returned experts (--enable-return-routed-experts)"),
    FlagRule("prefill_only_disable_kv_cache", "--prefill-only-disable-kv-cache"),
    # Models and number formats.
    FlagRule("is_embedding", "an embedding model (--is-embedding)"),
    FlagRule("dllm_algorithm", "a diffusion language model (--dllm-algorithm)", not_null),
    FlagRule("model_impl", "--model-impl", lambda value: value not in ("auto", "sglang")),
    FlagRule("enable_nvidia_megakernel", "a kernel in the place of the model (--enable-nvidia-megakernel)"),
)

CHOICE_RULES: dict[str, tuple[str, ...]] = {
    "attention_backend": ATTENTION_BACKENDS,
    "prefill_attention_backend": ATTENTION_BACKENDS,
    "decode_attention_backend": ATTENTION_BACKENDS,
    "kv_cache_dtype": KV_CACHE_DTYPES,
}
"""Flags of which only these values are served, by their fields of `ServerArgs`."""

VARIABLE_RULES: tuple[FlagRule, ...] = tuple(
    FlagRule(name, f"{what} ({name})", lambda value: value is not None and value is not False)
    for name, what in (
        ("SGLANG_RUST_SERVER", "the Rust HTTP server"),
        ("SGLANG_GRPC_PORT", "the gRPC server"),
        ("SGLANG_USE_HND_KVCACHE", "the HND layout of the KV cache"),
    )
)


def prepare_flags(server_args: Any, config: Config) -> None:
    """Sets the flags that follow from the options: the radix tree evicts by priority if our `eviction` needs it. All
    layers share one KV pool, those with a window too: a passage that moves needs its KV in each of them.

    Raises:
        StartRefused: two policies of eviction are asked for.
    """
    if config.eviction == "frequency-reuse":
        policy = server_args.radix_eviction_policy
        if policy not in ("lru", "priority"):  # lru is SGLang's default
            refuse(
                f"--radix-eviction-policy {policy} cannot be combined with the eviction frequency-reuse of "
                "--chunk-cache-config; drop one of them."
            )
        server_args.radix_eviction_policy = "priority"
    server_args.disable_hybrid_swa_memory = True


def check_flags(server_args: Any) -> None:
    """Checks every flag and variable as it was given.

    Raises:
        StartRefused: one does not work with the chunk cache.
    """
    from sglang.srt.environ import envs

    refuse_any(FLAG_RULES, server_args, " cannot be combined with --chunk-cache; drop one of them.")
    check_role(server_args)
    for name, served in CHOICE_RULES.items():
        value = resolved(server_args, name)
        if value not in (None, *served):
            refuse(f"{_flag(name)} {value} does not work with --chunk-cache; use one of {', '.join(served)}.")
    for rule in VARIABLE_RULES:
        if rule.refused(getattr(envs, rule.name).get()):
            refuse(f"{rule.what} cannot be combined with --chunk-cache; unset the variable.")


def check_port(server_args: Any) -> None:
    """Checks the port of a server, which SGLang opens once the model is loaded.

    Raises:
        StartRefused: the port is taken.
    """
    host, port = resolved(server_args, "host"), resolved(server_args, "port")
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            refuse(f"--port {port} is used by another program; end it, or name another port.")


def check_folders(config: Config) -> None:
    """Checks the folder of `verify_file`, and that of the disk tier, which the tier opens once the model is loaded.

    Raises:
        StartRefused: the one cannot be written in, or the other cannot be made.
    """
    file = config.verify_file
    if file is not None:
        parent = os.path.dirname(os.path.abspath(file))
        if not (os.path.isdir(parent) and os.access(parent, os.W_OK)):
            problem = f"{file!r} cannot be written, since its folder is missing or read-only"
            refuse(f"--chunk-cache-config: verify_file: {problem}; make the folder, or name another file.")
    if config.tiers is None or config.tiers.disk is None:
        return
    folder = Path(config.tiers.disk.path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:  # ValueError: characters that no path may have
        what = "it is a file" if isinstance(error, FileExistsError) else getattr(error, "strerror", None) or error
        refuse(f"--chunk-cache-config: tiers.disk: {str(folder)!r} cannot be made a folder ({what}); name another.")


def refuse_missing_model(model_path: str, error: OSError) -> NoReturn:
    """Says in one sentence that a model is no folder here and that Hugging Face gives none of that name.

    Raises:
        StartRefused: always.
    """
    what = str(error).strip().partition("\n")[0].rstrip(".")
    refuse(
        f"--model-path {model_path}: there is no such folder, and as a name it was not found ({what}); name a model."
    )


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def check_resolved(server_args: Any) -> None:
    """Checks the model, and what SGLang made of the flags; `check_flags` has seen what was given.

    Raises:
        StartRefused: the model, or something that SGLang chose, does not work with the chunk cache.
    """
    from sglang.srt.arg_groups.model_override_base import model_config_of

    args = attached(server_args)
    assert args is not None, "nothing is checked where the chunk cache is off"
    kernel = args.parsed_config.kernel
    num_replicas = (resolved(server_args, "dp_size") or 1) * resolved(server_args, "attn_dp_size")
    check_replicas(args.parsed_config, num_replicas)
    if kernel in ("triton", "flashinfer") and resolved(server_args, "device") != "cuda":
        refuse(f'--chunk-cache-config: kernel: "{kernel}" needs a CUDA device; use "auto" or "torch".')
    _check_preferred(server_args)
    if str(server_args.model_path).lower() in ("none", "dummy"):
        return
    model_config = model_config_of(server_args)
    check_model(model_config)
    if has_window_pool(model_config):
        _tell_of_one_pool(model_config, server_args)
    _check_determinism(server_args, args)
    _check_chosen(server_args)
    if kernel == "flashinfer":
        check_flashinfer(model_config)
    if has_states(model_config):
        args = replace(args, method=check_states(server_args, args))
        change(server_args, args)
    if divides_attention(server_args):
        check_dp_attention(server_args, args, model_config)
    check_tokenizer_workers(args, server_args)
    _check_selector(args)
    _check_layers(args.parsed_config, model_config.num_hidden_layers)
    check_draft(server_args, args.parsed_config)
    check_default(args, model_config.num_hidden_layers, what_fixes_rows(server_args))
    what = what_keeps_all(server_args, model_config) if args.parsed_config.keep_tokens else None
    if what is not None:
        refuse(f'--chunk-cache-config: keep_tokens: {what} needs the KV of all tokens; drop "keep_tokens".')


def _check_preferred(server_args: Any) -> None:
    """Checks that options of requests are not given as sampling parameters that SGLang adds once they are checked."""
    preferred = resolved(server_args, "preferred_sampling_params") or {}
    if KEY in (preferred.get("custom_params") or {}):
        refuse(
            f"--preferred-sampling-params: custom_params.{KEY} is read of requests only; give defaults by "
            "--chunk-cache-method, --chunk-cache-ratio and --chunk-cache-config."
        )


def _tell_of_one_pool(model_config: Any, server_args: Any) -> None:
    """Logs what one pool costs a model for which SGLang would make two."""
    from sglang.srt.configs.model_config import get_hybrid_layer_ids

    found = get_hybrid_layer_ids(model_config.hf_config.architectures, model_config.hf_text_config)
    num_windows, num_others = (len(ids or ()) for ids in found)
    ratio = resolved(server_args, "swa_full_tokens_ratio")
    share = (num_others + ratio * num_windows) / max(1, num_others + num_windows)
    logger.info(
        "Chunk cache: all layers share one KV pool, since passages that move need the KV of layers with a window too; "
        "it holds %.0f %% of the tokens of SGLang's two pools (--swa-full-tokens-ratio %s)",
        100 * share,
        ratio,
    )
    if server_args.disaggregation_mode == "prefill":
        logger.warning("Chunk cache: start the decode server with --disable-hybrid-swa-memory too")


def _check_chosen(server_args: Any) -> None:
    """Checks what SGLang chose where nothing was given."""
    from sglang.srt.arg_groups.overrides import post_capture_kv_sizing_planned

    refuse_any(FLAG_RULES, server_args, ", which SGLang turned on by itself, cannot be combined with --chunk-cache.")
    for name, served in CHOICE_RULES.items():
        value = resolved(server_args, name)
        if value not in (None, *served):
            use = f"add {_flag(name)} with one of {', '.join(served)}"
            refuse(f"{_flag(name)} {value}, which SGLang chose by itself, does not work with --chunk-cache; {use}.")
    if post_capture_kv_sizing_planned(server_args):
        refuse(
            "KV sizing after capture (SGLANG_ENABLE_POST_CAPTURE_KV_SIZING) leaves no memory for forwards outside of "
            "captured graphs, and --chunk-cache runs such; unset the variable."
        )


def _check_determinism(server_args: Any, args: ChunkCacheArgs) -> None:
    """Checks that answers do not depend on the batch where that is asked for.

    SGLang's promise holds if its own backend attends for every request of every batch: our kernels split the keys of a
    row by the size of the batch.
    """
    if not resolved(server_args, "enable_deterministic_inference"):
        return
    flag = "--enable-deterministic-inference"
    if server_args.rl_on_policy_target is not None:
        flag = "--rl-on-policy-target"
    if resolved(server_args, "disable_radix_cache"):
        backend = resolved(server_args, "attention_backend")
        refuse(
            f"{flag} turns the radix cache off with the attention backend {backend}, and --chunk-cache stores chunks "
            "there; add --attention-backend triton."
        )
    if args.parsed_config.attention != "runs":
        refuse(f'{flag} needs SGLang\'s attention for every batch; add "attention": "runs" to --chunk-cache-config.')


def check_tokenizer_workers(args: ChunkCacheArgs, server_args: Any) -> None:
    """Checks that nothing that needs a single tokenizer process is asked for where there are several.

    Raises:
        StartRefused: such an option is given.
    """
    if not more_than_one(resolved(server_args, "tokenizer_worker_num")):
        return
    if args.selector is not None:
        refuse("--chunk-cache-selector belongs to the one process that tokenizes; drop it or --tokenizer-worker-num.")
    if resolved(server_args, "admin_api_key"):
        refuse("--admin-api-key is asked for by none of several tokenizer workers; drop it or --tokenizer-worker-num.")


def _check_selector(args: ChunkCacheArgs) -> None:
    if args.selector is None:
        return
    from sglang_chunk_cache.selector.auxiliary import SelectorModelError, check_selector_model

    try:
        check_selector_model(args.selector)
    except SelectorModelError as error:
        refuse(f"--chunk-cache-selector: {error}; name a small causal language model with a fast tokenizer.")


def check_replicas(config: Config, num_replicas: int) -> None:
    """Checks that replicas do not overwrite each other's file, nor share a port.

    Raises:
        StartRefused: they would.
    """
    if config.verify_file is not None and num_replicas > 1:
        refuse('--chunk-cache-config: verify_file: replicas (--dp-size) would overwrite it; drop "verify_file".')
    problem = None if config.events is None else port_problem(config.events, num_replicas)
    if problem is not None:
        refuse(f"--chunk-cache-config: events: {problem}.")


def check_role(server_args: Any) -> None:
    """Checks that a server is no decode server, and that a prefill server stays one and does not draft.

    Raises:
        StartRefused: it is a decode server, or a prefill server that may switch, drafts or uses staging buffers.
    """
    mode = server_args.disaggregation_mode
    if mode == "decode":
        refuse(
            "--disaggregation-mode decode: a decode server computes no prompts and has no chunks; start it without "
            "--chunk-cache, and its prefill server with it."
        )
    if mode != "prefill":
        return
    from sglang.srt.environ import envs

    if server_args.enable_pd_role_switch:
        refuse("--enable-pd-role-switch would make a decode server of one with --chunk-cache; drop one of them.")
    if envs.SGLANG_DISAGG_STAGING_BUFFER.get():
        refuse(
            "staging buffers (SGLANG_DISAGG_STAGING_BUFFER) have not been run with --chunk-cache; unset the variable."
        )
    if server_args.speculative_algorithm is not None:
        refuse(
            "speculative decoding (--speculative-algorithm) on a prefill server has not been run with --chunk-cache; "
            "drop one of them."
        )


_NOT_WITH_DRAFT = (
    FlagRule("enable_mixed_chunk", "mixed prefill and decode batches (--enable-mixed-chunk)"),
    FlagRule("enable_return_hidden_states", "returned hidden states (--enable-return-hidden-states)"),
    FlagRule("return_hidden_states_mode", "returned hidden states (--return-hidden-states-mode)", not_null),
)
"""Flags that a draft model rules out: it changes which rows have hidden states and how many tokens are decoded."""


def check_draft(server_args: Any, config: Config) -> None:
    """Checks speculative decoding with a draft model.

    Raises:
        StartRefused: there are tiers, which do not keep that model's KV; the device is untried, and `draft_on_gpu` is
            not set; or a flag is given that a draft model rules out.
    """
    algorithm = resolved(server_args, "speculative_algorithm")
    if algorithm in (None, "NGRAM"):
        return
    if config.tiers is not None:
        refuse(
            f"--speculative-algorithm {algorithm} drafts with a model, whose KV no tier keeps; drop "
            '"tiers" of --chunk-cache-config, or use NGRAM.'
        )
    if resolved(server_args, "device") != "cpu" and not config.draft_on_gpu:
        refuse(
            f"--speculative-algorithm {algorithm} together with --chunk-cache has been run on a CPU only; add "
            '"draft_on_gpu": true to --chunk-cache-config to try it, or use NGRAM.'
        )
    words = f" cannot be combined with --chunk-cache and {algorithm}; drop one of them."
    refuse_any(_NOT_WITH_DRAFT, server_args, words)


def _check_layers(config: Config, num_layers: int) -> None:
    layers = config.statistics_layers
    if not isinstance(layers, str) and any(layer >= num_layers for layer in layers):
        refuse(
            f"--chunk-cache-config: statistics_layers: layer {max(layers)}, but the model has layers 0 to "
            f"{num_layers - 1}; name layers of the model."
        )
