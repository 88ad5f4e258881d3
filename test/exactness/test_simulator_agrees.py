"""Server and simulator remember the same: 300 random prompts through SGLang's own scheduler, and through the simulator.

Both drive `ChunkManager`, each with a store of its own. Prompts come one at a time, page size 1. A chunk is a list of
tokens there and a number here; what a model's attention would say of it is `SyntheticAttention` on both sides.

What is evicted is the server's choice, and the simulator is told. It would not choose the same: SGLang's tree has one
node for all that no other prompt shares, chunks, question and answer together, which goes at once; the simulator's has
one for each chunk, of which the last goes first and often alone. So there is room for all, and SGLang evicts half of
what it can between two prompts. As chunks begin differently, no node of the tree ends within one: each is there, or
gone.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache, partial
from itertools import accumulate
from typing import Any

import pytest
from benchmark.simulate.attention import SyntheticAttention
from benchmark.simulate.engine import Replay
from benchmark.simulate.settings import Settings
from benchmark.simulate.store import SYSTEM
from benchmark.simulate.tally import FIELDS
from benchmark.simulate.trace import TraceSpec, generate

from chunk_cache.index.variant import PathHome
from chunk_cache.keys import Partition, chunk_key
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
NOWHERE = 1 << 60
"""A label that no node has."""
EVICT_EVERY = 25


@dataclass(frozen=True)
class Eviction:
    """What SGLang's tree evicted between two prompts."""

    num_tokens: int
    capacity: int
    gone: frozenset[int]
    """Ids of variants."""
    prefix_lens: tuple[int, ...]
    """Tokens that are left of each prompt so far."""


@dataclass(frozen=True)
class Step:
    """What one prompt found, and all that is remembered behind it."""

    prefix_tokens: int
    reused_tokens: int
    recomputed_tokens: int
    variants: frozenset[tuple[Any, ...]]
    eviction: Eviction | None = field(default=None, compare=False)
    """Behind it."""


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


def case_served(s: Session, *, is_evicting: bool = False) -> list[Step]:
    manager, attention = s.local.cache.chunks.manager, SyntheticAttention(0)
    complete = manager.complete

    def with_synthetic_attention(prompt: Any, keep: Any, home: Any, statistics: Any = None) -> Any:
        i = keep.chunk
        context_lens = [prompt.length(j) for j in range(i)]
        statistics = attention.statistics(prompt.keys[i], prompt.length(i), prompt.context(i), context_lens)
        return complete(prompt, keep, home, statistics)

    manager.complete = with_synthetic_attention
    system, chunks, questions = pieces()
    steps, prompts = [], []
    for request, question in zip(TRACE.requests, questions, strict=True):
        prompt = Prompt().text(system)
        for chunk in request.chunks:
            prompt.chunk(chunks[chunk])
        message = Request(prompt.text(question).ids, {"spans": prompt.spans}, max_new_tokens=1)
        (reply,) = s.local.generate([message])
        found = (reply.info[field.name] for field in fields(Step)[:3])
        remembered = variants_of(manager.index)
        prompts.append(prompt.ids)
        is_due = is_evicting and len(prompts) % EVICT_EVERY == 0
        steps.append(Step(*found, remembered, evict_half(s, prompts) if is_due else None))
        s.local.cache.chunks.check_integrity()
    return steps


def evict_half(s: Session, prompts: list[list[int]]) -> Eviction:
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tree, chunks = s.local.cache, s.local.cache.chunks
    variants = list(chunks.manager.index)
    evicted = tree.evict(EvictParams(num_tokens=tree.evictable_size() // 2))
    left = {variant.variant_id: chunks.store.resolve(variant) for variant in variants}
    assert all(left[variant.variant_id] in (0, variant.length) for variant in variants)
    matches = (tree.tree_core.match_full_device_prefix(RadixKey(array("q", ids))) for ids in prompts)
    return Eviction(
        num_tokens=evicted.num_tokens_evicted,
        capacity=tree.token_to_kv_pool_allocator.size,
        gone=frozenset(variant_id for variant_id, num_tokens in left.items() if not num_tokens),
        prefix_lens=tuple(match[0] for match in matches),
    )


CASES: dict[str, Callable[[Session], Any]] = {
    "served": case_served,
    "evicted": partial(case_served, is_evicting=True),
}


def simulated(settings: Settings, evictions: list[Eviction | None]) -> list[Step]:
    replay = Replay(TRACE, settings)
    replay.keys = [chunk_key(Partition(), array("q", chunk)) for chunk in pieces()[1]]
    steps, questions = [], []
    for request, eviction in zip(TRACE.requests, evictions, strict=True):
        num_paths = replay.num_paths
        counts = dict(zip(FIELDS, replay.answer(request).tolist(), strict=True))
        questions.append(SYSTEM - replay.num_paths if replay.num_paths > num_paths else NOWHERE)
        found = (counts[field.name] for field in fields(Step)[:3])
        steps.append(Step(*found, variants_of(replay.manager.index)))
        if eviction is not None:
            evict_the_same(replay, eviction, questions)
        replay.check_integrity()
    return steps


def evict_the_same(replay: Replay, eviction: Eviction, questions: list[int]) -> None:
    """Nodes behind what is left of each prompt, and nodes of variants' own, each with what stands behind it.

    Args:
        questions: labels of the prompts' last nodes, of those in the tree.
    """
    pool = replay.pool
    variants = [variant for variant in replay.manager.index if variant.variant_id in eviction.gone]
    nodes = {node: None for variant in variants if (node := pool.node_of(variant)) is not None}
    for i, prefix_len in enumerate(eviction.prefix_lens):
        matched = pool.match([SYSTEM, *TRACE.requests[i].chunks, questions[i]])
        ends = accumulate(node.length for node in matched)
        nodes |= {node: None for node, end in zip(matched, ends, strict=True) if end > prefix_len}
    for node in sorted(nodes, key=lambda node: len(list(node.behind())), reverse=True):
        pool.evict(node)
    assert {v.variant_id for v in replay.manager.index if not pool.resolve(v)} == eviction.gone
    replay.manager.evicted(eviction.num_tokens, eviction.capacity)


def served(settings: Settings, case: str) -> list[Step]:
    names = [field.name for field in fields(settings.config) if hasattr(settings, field.name)]
    options = {name: getattr(settings.config, name) for name in names}
    options |= {"eviction": settings.config.eviction, "keep_share": 0.0, "statistics_layers": "none"}
    # Without statistics; as many rows of each chunk as by the simulator's method.
    config = Config(method="epic", options=tuple(options.items()), max_total_tokens=settings.pool_tokens)
    steps = run_cases(config, is_ours=True, names=[case], module="exactness.test_simulator_agrees")[case]
    assert not isinstance(steps, str), steps
    return steps


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "case"),
    [
        (Settings(ROOM), "served"),
        (Settings(ROOM, alpha=None, max_generation=1, max_variants_per_chunk=2, policy="frequency-reuse"), "served"),
        (Settings(ROOM, max_cfo=0.5, max_variants=60, max_path_tokens=2000, promote_uses=2), "served"),
        (Settings(ROOM, promote_uses=2, max_variants=80, policy="frequency-reuse"), "evicted"),
    ],
    ids=["defaults", "by-ratio", "bounds", "evicted"],
)
def test_server_and_simulator_remember_the_same(settings: Settings, case: str) -> None:
    expected = served(settings, case)
    evictions = [step.eviction for step in expected]
    for i, (ours, theirs) in enumerate(zip(expected, simulated(settings, evictions), strict=True)):
        assert ours.variants == theirs.variants, f"behind prompt {i}"
        assert ours == theirs, f"prompt {i}"
    if case == "evicted":  # and some of it mattered
        assert sum(len(eviction.gone) for eviction in evictions if eviction is not None) > 20
