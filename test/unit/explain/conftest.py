"""Replies as the server writes them: made by its own plan, with what the forward would add."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from chunk_cache.index.lookup import Lookup
from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.planning import PlanSettings, make_plan
from chunk_cache.types import Span
from chunk_cache_tools.explain.shown_prompt import PromptTokens, tokenize
from chunk_cache_tools.explain.states import Explanation, explain
from tiny_models import make_tokenizer

TEXTS = ("Read.\n", "Paris is in France.\n", "Rome costs $5 <now> & then.\n", "東京 is \u202ein\nJapan\n", "Where?")
"""What stands before the chunks, three chunks, and the question."""


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture(scope="session")
def tokens(tokenizer: Any) -> PromptTokens:
    """The prompt of `TEXTS`."""
    from chunk_cache.prompt.marks import split_marked

    marked = split_marked("<|chunk|>".join(TEXTS), "<|chunk|>", "text")
    assert marked is not None
    return tokenize(tokenizer, marked)


MakeReply = Callable[..., dict[str, Any]]


@pytest.fixture
def make_reply() -> MakeReply:
    """`(spans, prompt_len, prefix_len=, missing=, method=, ratio=)` -> the object `chunk_cache` of a reply."""

    def make(
        spans: Sequence[Span],
        prompt_len: int,
        *,
        prefix_len: int = 0,
        missing: Sequence[int] = (),
        method: str = "epic",
        ratio: float = 0.2,
        page_size: int = 1,
    ) -> dict[str, Any]:
        plan = make_plan(
            RequestOptions(spans=tuple(spans), method=method, ratio=ratio, explain=True),
            PlanSettings(default_method="epic", default_ratio=0.15, page_size=page_size),
            prompt_len=prompt_len,
            prefix_len=prefix_len,
            max_prefix_len=prompt_len - 1,
            lookups=[_lookup(span, index in missing) for index, span in enumerate(spans)],
            chunk_keys=[bytes([index % 256]) * 16 for index in range(len(spans))],
        )
        return dict(plan.reply(explain=True))

    return make


def _lookup(span: Span, is_missing: bool) -> Lookup:
    if is_missing:
        return Lookup(None, 0, "not_stored")
    length = span[1] - span[0]
    home = NodeHome(array("q", range(length)), "chunk")
    return Lookup(Variant(7, b"k" * 16, length, 3, 0, (), 0, home), length, None)


@pytest.fixture
def layer_reply(tokens: PromptTokens, make_reply: MakeReply) -> dict[str, Any]:
    """All states at once: chunk 0 in the prefix, chunk 1 missing, rows of chunk 2 recomputed and dropped at a layer."""
    reply = make_reply(
        tokens.spans, len(tokens.texts), prefix_len=tokens.spans[0][1], missing=[1], method="cacheblend", ratio=0.4
    )
    start = tokens.spans[2][0]
    found = {
        "recomputed_positions": [start, start + 2, start + 3],
        "dropped": [{"layer": 2, "positions": [start + 2]}, {"layer": 3, "positions": [start + 3]}],
    }
    reply["chunks"][2] |= found
    reply["selection"] = {
        "stage": "layer",
        "rows_per_layer": [reply["reused_tokens"], 3, 2, 1],
        "scores": {
            "layer": 1,
            "min": 0.0,
            "median": 0.25,
            "mean": 0.5,
            "max": 2.0,
            "sum": 8.0,
            "selected_min": 1.0,
            "selected_sum": 4.0,
        },
        "focus": None,
        "seconds": 0.0015,
    }
    return reply


@pytest.fixture
def explanations(
    tokens: PromptTokens, make_reply: MakeReply, layer_reply: Mapping[str, Any]
) -> tuple[Explanation, Explanation]:
    """Two methods over the same prompt; label and answer hold what HTML and formulas would take for their own."""
    epic = make_reply(tokens.spans, len(tokens.texts), prefix_len=tokens.spans[0][1], missing=[1])
    return (
        explain('epic:"a"&<b>', "in <i>Japan</i> $x$\n[bold]", epic, "here"),
        explain("cacheblend", "in Rome", layer_reply, "here"),
    )
