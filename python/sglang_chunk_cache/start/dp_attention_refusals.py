"""What a server with data-parallel attention refuses: forwards that not all ranks run, rows that only a forward finds.

Verb: `check_dp_attention` (flags and options of such a server). Methods that work between layers are refused by
`api/capabilities`, as on every server.
"""

from __future__ import annotations

import logging
from typing import Any

from sglang_chunk_cache.api.capabilities import has_states
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, refuse
from sglang_chunk_cache.start.flag_rules import FlagRule, more_than_one, not_null, refuse_any, resolved

logger = logging.getLogger(__name__)

_RULES = (
    FlagRule("speculative_algorithm", "speculative decoding (--speculative-algorithm)", not_null),
    FlagRule("disaggregation_mode", "prefill and decode apart (--disaggregation-mode)", not_null),
    FlagRule("enable_lora", "LoRA (--enable-lora)"),
    FlagRule("lora_paths", "LoRA (--lora-paths)"),
    FlagRule("elastic_ep_backend", "ranks that come and go (--elastic-ep-backend)", not_null),
    FlagRule("dwdp_size", "weights that ranks fetch (--dwdp-size)", more_than_one),
)


def check_dp_attention(server_args: Any, args: ChunkCacheArgs, model_config: Any) -> None:
    """Checks the flags and options of a server with `--attn-dp-size`.

    Raises:
        StartRefused: one does not work there.
    """
    from sglang.srt.environ import envs
    from sglang.srt.model_executor.cuda_graph_config import Backend

    words = " cannot be combined with --chunk-cache and data-parallel attention (--attn-dp-size); drop one of them."
    refuse_any(_RULES, server_args, words)
    tp_size, num_replicas = resolved(server_args, "tp_size"), resolved(server_args, "attn_dp_size")
    if tp_size != num_replicas:
        refuse(
            f"--attn-dp-size {num_replicas} with --tp-size {tp_size} has several ranks attend together, which pads "
            "their rows; give both flags the same number."
        )
    if envs.SGLANG_SCHEDULER_SKIP_ALL_GATHER.get():
        refuse(
            "ranks that do not tell each other what they compute (SGLANG_SCHEDULER_SKIP_ALL_GATHER) cannot be combined "
            "with --chunk-cache; unset the variable."
        )
    graphs = resolved(server_args, "cuda_graph_config")
    if graphs is not None and graphs.prefill.backend != Backend.DISABLED:
        refuse(
            "prefill graphs, which pad what all ranks compute, cannot be combined with --chunk-cache and data-parallel "
            "attention (--attn-dp-size); add --disable-prefill-cuda-graph."
        )
    if has_states(model_config):
        refuse("data-parallel attention (--attn-dp-size) has not been run with --chunk-cache for a model with states.")
    config = args.parsed_config
    if config.verify_share or args.target is not None:
        refuse(
            "--chunk-cache-config: verify_share: with data-parallel attention (--attn-dp-size) a rank cannot verify "
            'while others serve; drop "verify_share" and --chunk-cache-target.'
        )
    if config.tiers is not None and config.tiers.loading == "layerwise":
        refuse(
            "--chunk-cache-config: tiers.loading: with data-parallel attention (--attn-dp-size) the rows of a forward "
            "are known before it, also where KV does not arrive; give prefetch or sync."
        )
    if resolved(server_args, "device") != "cpu":
        logger.warning("Chunk cache: with data-parallel attention (--attn-dp-size) it has been run on a CPU only")
