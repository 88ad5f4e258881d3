"""Server and simulator remember the same: 300 random prompts through SGLang's own scheduler, and through the simulator.

Both drive `ChunkManager`, each with a store of its own. Prompts come one at a time, page size 1. A chunk is a list of
tokens there and a number here; what a model's attention would say of it is `SyntheticAttention` on both sides.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import pytest
from benchmark.simulate.attention import SyntheticAttention
from benchmark.simulate.engine import Replay
from benchmark.simulate.settings import Settings
from benchmark.simulate.tally import FIELDS
from benchmark.simulate.trace import TraceSpec, generate

from chunk_cache.keys import Partition, chunk_key
from chunk_cache.variant import PathHome
from exactness.cases import Prompt, Session
from exactness.runner import Config, run_cases
from local_scheduler import Request

__all__ = ["CASES", "Session"]

SPEC = TraceSpec(
    num_requests=300,
    num_chunks=40,
    chunks_per_request=1,
    max_chunks_per_request=5,
    chunk_len=40,
    system_len=20,
    question_len=9,
    order="drawn",
    repeat_share=0.1,
)
TRACE = generate(SPEC)
ROOM = 65536
"""Tokens; more than all prompts together."""
LITTLE_ROOM = 1500


@dataclass(frozen=True)
class Step:
    """What one prompt found, and all that is remembered behind it."""

    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    variants: frozenset[tuple[Any, ...]]


@cache
def pieces() -> tuple[list[int], list[list[int]], list[list[int]]]:
    """Tokens of the system prompt, of the chunks, of the questions.

    All begin differently: two that begin alike would share a node of the tree, and the simulator's are told by number.
    """
    rng = random.Random(0)
    first = iter(range(10, 512))
    lens = (TRACE.system_len, *TRACE.lengths, *(request.question_len for request in TRACE.requests))
    system, *rest = ([next(first), *rng.choices(range(10, 512), k=length - 1)] for length in lens)
    return system, rest[: len(TRACE.lengths)], rest[len(TRACE.lengths) :]


def variants_of(index: Any) -> frozenset[tuple[Any, ...]]:
    """Key, start, length, generation, context and kind of home of each."""
    return frozenset(
        (v.key, v.start, v.length, v.generation, v.context, "path" if isinstance(v.home, PathHome) else "node")
        for v in index
    )


def case_served(s: Session) -> list[Step]:
    manager, attention = s.local.cache.chunks.manager, SyntheticAttention(0)
    complete = manager.complete

    def with_synthetic_attention(prompt: Any, keep: Any, home: Any, statistics: Any = None) -> Any:
        i = keep.chunk
        context_lens = [prompt.length(j) for j in range(i)]
        statistics = attention.statistics(prompt.keys[i], prompt.length(i), prompt.context(i), context_lens)
        return complete(prompt, keep, home, statistics)

    manager.complete = with_synthetic_attention
    system, chunks, questions = pieces()
    steps = []
    for request, question in zip(TRACE.requests, questions, strict=True):
        prompt = Prompt().text(system)
        for chunk in request.chunks:
            prompt.chunk(chunks[chunk])
        message = Request(prompt.text(question).ids, {"spans": prompt.spans}, max_new_tokens=1)
        (reply,) = s.local.generate([message])
        found = (reply.info[field.name] for field in fields(Step)[:3])
        steps.append(Step(*found, variants_of(manager.index)))
        s.local.cache.chunks.check_integrity()
    return steps


CASES: dict[str, Callable[[Session], Any]] = {"served": case_served}


def simulated(settings: Settings) -> list[Step]:
    replay = Replay(TRACE, settings)
    replay.keys = [chunk_key(Partition(), array("q", chunk)) for chunk in pieces()[1]]
    steps = []
    for request in TRACE.requests:
        counts = dict(zip(FIELDS, replay.answer(request).tolist(), strict=True))
        found = (counts[field.name] for field in fields(Step)[:3])
        steps.append(Step(*found, variants_of(replay.manager.index)))
        replay.check_integrity()
    return steps


def served(settings: Settings) -> list[Step]:
    names = [field.name for field in fields(settings.config) if hasattr(settings, field.name)]
    options = {name: getattr(settings.config, name) for name in names}
    options |= {"eviction": settings.config.eviction, "keep_share": 0.0, "statistics_layers": "none"}
    config = Config(options=tuple(options.items()), max_total_tokens=settings.pool_tokens)
    steps = run_cases(config, is_ours=True, names=["served"], module="exactness.test_simulator_agrees")["served"]
    assert not isinstance(steps, str), steps
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Settings(ROOM),
        Settings(ROOM, alpha=None, max_generation=1, max_variants_per_chunk=2, policy="frequency-reuse"),
        Settings(ROOM, max_cfo=0.5, max_variants=60, max_path_tokens=2000, promote_uses=2),
    ],
    ids=["defaults", "by-ratio", "bounds"],
)
def test_server_and_simulator_remember_the_same(settings: Settings) -> None:
    for i, (ours, theirs) in enumerate(zip(served(settings), simulated(settings), strict=True)):
        assert ours.variants == theirs.variants, f"behind prompt {i}"
        assert ours == theirs, f"prompt {i}"
