"""What a server of a model with states refuses, and what it does differently.

Verb: `check_states` (flags and options of such a server).
"""

from __future__ import annotations

from typing import Any

from chunk_cache.methods import STATE_METHODS
from chunk_cache.options.config import Config
from chunk_cache.options.defaults import DEFAULT_METHOD
from chunk_cache.plan.served_methods import state_problem
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, refuse
from sglang_chunk_cache.start.flag_rules import FlagRule, not_null, refuse_any, resolved

_RULES = (
    FlagRule("speculative_algorithm", "speculative decoding (--speculative-algorithm)"),
    FlagRule("enable_linear_replayssm", "states that are replayed (--enable-linear-replayssm)"),
    FlagRule("enable_linear_replayssm_spec", "states that are replayed (--enable-linear-replayssm-spec)"),
    FlagRule("enable_int8_mamba_checkpoint", "states in eight bits (--enable-int8-mamba-checkpoint)"),
    FlagRule("enable_tf32_matmul", "float32 rounded to 10 bits (--enable-tf32-matmul)"),  # states would be too
)
_OPTIONS: tuple[tuple[str, str], ...] = (
    ("verify_share", "a verification computes a prompt where no states are kept"),
    ("partition_share", "what passages do to states is stored for all partitions together"),
    ("keep_tokens", "decoding goes on from states of all tokens"),
    ("options", "which rows are computed is up to seam_len and the ratio"),
)


def check_states(server_args: Any, args: ChunkCacheArgs) -> str:
    """Checks a server of a model with states; returns its default method.

    Raises:
        StartRefused: a method, a flag or an option does not work with states.
    """
    from sglang.srt.environ import envs

    words = " cannot be combined with --chunk-cache for a model with states; drop one of them."
    refuse_any(_RULES, server_args, words)
    if not_null(resolved(server_args, "disaggregation_mode")):
        refuse("--disaggregation-mode has not been run with --chunk-cache for a model with states; drop one of them.")
    for name, why in _OPTIONS:
        if getattr(args.parsed_config, name) != getattr(Config(), name):
            refuse(f"--chunk-cache-config: {name}: this model keeps states, and {why}; leave it out.")
    tiers = args.parsed_config.tiers
    if tiers is not None and tiers.loading == "layerwise":
        why = "what a passage does to them must be there before its first layer"
        refuse(f"--chunk-cache-config: tiers.loading: this model keeps states, and {why}; give prefetch or sync.")
    core = envs.SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND
    if core.is_set() and core.get() != "python":
        refuse("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND: a model with states needs SGLang's tree in Python; unset it.")
    core.set("python")  # the other tree has no nodes without a state
    method = STATE_METHODS[0] if args.method == DEFAULT_METHOD else args.method
    if method not in STATE_METHODS:
        refuse(f"--chunk-cache-method {method}: {state_problem(method)}; choose {' or '.join(STATE_METHODS)}.")
    return method
