"""ADVICE: what to do about each reason for which a chunk was not reused, and whether there is something to do."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Level(StrEnum):
    """How bad something is, from good to bad."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"


_ASKED = Level.OK
_MEND, _BROKEN = Level.WARNING, Level.FAILURE
_TIER = "run `chunk-cache doctor --chunk-cache-config ...` on the server's machine, and look into the server's log"
_SELECTOR = "look into the server's log for what the selector says"

ADVICE: Mapping[str, tuple[Level, str]] = MappingProxyType(
    {
        "off": (_ASKED, 'the clients ask for it; leave out "mode": "off" to reuse'),
        "exact_mode": (_ASKED, 'the clients ask for it; leave out "mode": "exact" to reuse'),
        "not_stored": (
            _ASKED,
            "normal when a chunk is seen for the first time; if it was sent before, compare the two prompts with "
            "`chunk-cache doctor --prompt FILE --prompt FILE`",
        ),
        "evicted": (_MEND, "enlarge the KV pool (--mem-fraction-static), keep chunks below it (tiers), or pin them"),
        "weights_changed": (_ASKED, "normal after an update of the weights; it is stored anew once it was computed"),
        "partition_share": (
            _MEND,
            "expected of a tenant that floods; if this one needs more, raise partition_share of the server",
        ),
        "too_short": (_MEND, "mark longer chunks, or lower min_reuse_len or --page-size of the server"),
        "other_system": (
            _MEND,
            "send the same text around the passages, warm them behind it, or start the server with system_prompts any "
            "and trust any",
        ),
        "untrusted": (_MEND, "warm the chunk behind this system prompt, or start the server with trust any"),
        "cut": (_ASKED, "normal where a prompt begins as another one did, up to within the chunk; it is computed"),
        "states": (_MEND, "raise state_bytes of the server"),
        "high_cfo": (_MEND, "raise max_cfo of the server"),
        "preparing": (_ASKED, 'the clients ask for it by "mode": "prepare" or "warm"'),
        "target": (_MEND, "loosen --chunk-cache-target, or choose another method; stats of the gate say what it sees"),
        "logprobs": (_ASKED, "the clients ask for log-probabilities of the prompt; raise logprob_start_len"),
        "memory": (_MEND, "enlarge the KV pool (--mem-fraction-static), run fewer requests at once, or unpin chunks"),
        "tier_slow": (_MEND, "use a faster tier, or set controller to false to load all the same"),
        "tier_late": (
            _ASKED,
            "normal for a chunk that was never sent; set controller to false to wait until timeout_s",
        ),
        "tier_timeout": (_MEND, "use a faster tier, or raise timeout_s of the tiers"),
        "tier_corrupt": (_BROKEN, f"check the storage of the tier; {_TIER}"),
        "tier_mismatch": (_BROKEN, f"give each model a place of its own; {_TIER}"),
        "tier_missing": (_MEND, "raise max_bytes or the memory of the tier; something else deletes its entries"),
        "tier_unavailable": (_BROKEN, f"start the store or mount the folder; {_TIER}"),
        "tier_unreadable": (_BROKEN, f"give the server the right to read and write there; {_TIER}"),
        "tier_full": (_MEND, "raise max_bytes of the tier, or give it or the host more room"),
        "tier_ranks": (
            _MEND,
            "normal once in a while with tensor parallelism; if often, give all ranks the same tiers",
        ),
        "unsupported": (_MEND, "leave out of these requests what docs/compatibility.md lists"),
        "selector_timeout": (_MEND, "give the selector more threads or more time (selector in the configuration)"),
        "selector_unavailable": (_BROKEN, _SELECTOR),
        "selector_failed": (_BROKEN, _SELECTOR),
        "selector_too_long": (_MEND, "mark shorter chunks, or take a selector with a longer context"),
        "too_many_rows": (_MEND, "raise --max-prefill-tokens, or take a method that chooses before the forward"),
        "question_in_parts": (
            _MEND,
            "put chunks that are often new in front of others, raise --chunked-prefill-size, or take another method",
        ),
        "images": (_ASKED, "choose near or another method that chooses before the forward for prompts with images"),
        "short_answer": (_ASKED, "nothing to do; leave out keep_tokens where answers are that short"),
        "generation_limit": (_MEND, "warm the chunks so that they are stored exactly, or raise max_generation"),
        "prompt_end": (_ASKED, "put the question behind the last chunk: a prompt's last token is always computed"),
    }
)
"""Reason of `chunk_cache.types.REASONS` -> how bad it is, and one sentence."""
