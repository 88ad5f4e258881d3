"""Engine: replays a trace through the project's own index, planner and reusability functions; no model, no KV.

    simulate(trace, settings) -> Outcome

One request at a time, as the server handles it (`sglang_chunk_cache.host.radix_cache`): match the exact prefix; look up
every chunk behind it with its new context; `make_plan`; make room; count the uses. Then remember: the chunks of a
prompt that brought nothing in are spans of its path, exact; of a fused prompt

    remember "missed"     those that it had to compute become nodes of their own, derived
    remember "contexts"   also those that it brought in and fixed, as variants of their new context (Cache-Craft 3.3)

and popular variants of cold paths are promoted. What is modelled instead of run: the KV memory (`store`), the attention
statistics (`attention`), and time, of which there is none: requests follow each other, so a chunk is known as soon as
the request that computed it is over.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np
from benchmark.simulate.attention import SyntheticAttention, cci_quantiles
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.store import SYSTEM, Node, Pool
from benchmark.simulate.tally import FIELDS, Counts, Outcome
from benchmark.simulate.trace import Request, Trace

from chunk_cache.index import ChunkIndex, Lookup
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.plan import ChunkPlan, RecomputePlan, make_plan, replan_without_load
from chunk_cache.request_options import RequestOptions
from chunk_cache.reusability import use_weight
from chunk_cache.types import Span, Status
from chunk_cache.variant import Home, NodeHome, PathHome, PathTokens, Variant

METHOD = "cache-craft"
_PARTITION = Partition()


def simulate(trace: Trace, settings: Settings, *, check_every: int = 0) -> Outcome:
    """Replay a trace.

    Args:
        check_every: recompute index and pool from scratch after so many requests (slow; for tests). 0 = never.

    Raises:
        SettingsError: the memory is smaller than the longest prompt.
    """
    needed = trace.max_prompt_len
    if settings.pool_tokens < needed:
        problem = f"{settings.pool_tokens} tokens do not hold the longest prompt, which has {needed}"
        raise SettingsError(f"pool_tokens: {problem}; give at least {needed}")
    replay = _Replay(trace, settings)
    for chunk in trace.preloaded:
        replay.answer(Request((chunk,), 1))
    rows = np.zeros((len(trace.requests), len(FIELDS)), dtype=np.int64)
    replay.reset_counts()
    for i, request in enumerate(trace.requests):
        rows[i] = replay.answer(request)
        if check_every and i % check_every == 0:
            replay.check_integrity()
    return replay.outcome(rows)


@dataclass(slots=True)
class _Replay:
    """The state of one simulation."""

    trace: Trace
    settings: Settings
    reasons: Counter[str] = field(default_factory=Counter)
    cci: list[float] = field(default_factory=list)
    num_computed: Counter[int] = field(default_factory=Counter)
    peak_stored: int = 0
    num_answered: int = 0
    num_promoted: int = 0
    index: ChunkIndex = field(init=False)
    pool: Pool = field(init=False)
    attention: SyntheticAttention = field(init=False)
    keys: list[bytes] = field(init=False)

    def __post_init__(self) -> None:
        settings = self.settings
        self.index = ChunkIndex(
            settings.max_variants,
            settings.max_variants_per_chunk,
            settings.max_path_tokens,
            eviction=settings.index_eviction,
            ageing=settings.ageing,
        )
        self.pool = Pool(
            settings.pool_tokens, settings.policy, age=lambda: self.index.age, on_evicted=self._note_evicted
        )
        self.attention = SyntheticAttention(settings.seed)
        self.keys = [chunk_key(_PARTITION, array("q", [chunk])) for chunk in range(len(self.trace.lengths))]

    def _note_evicted(self, num_tokens: int) -> None:
        self.index.advance_age(num_tokens / self.pool.capacity)
        self.index.sweep(self.pool.resolve, num_tokens)

    def _is_known(self, variant: Variant) -> bool:
        return self.index.get(variant.variant_id) is variant

    def reset_counts(self) -> None:
        """What was counted so far belonged to the preparation."""
        self.reasons.clear()
        self.num_computed.clear()
        self.peak_stored = 0

    def check_integrity(self) -> None:
        self.index.check_integrity(self.pool.resolve)
        self.pool.check_integrity()

    def answer(self, request: Request) -> Counts:
        """One request, from its lookup to what it leaves behind; returns `[len(FIELDS)]`."""
        prompt = _Prompt.of(self.trace, request, self.keys)
        prefix = self.pool.match([SYSTEM, *request.chunks])
        prefix_len = sum(node.length for node in prefix)
        lookups = self._look_up(prompt, prefix_len)
        plan = self._plan(prompt, prefix_len, lookups)
        self.pool.lock(prefix[-1:])
        sources = [(variant, cfo, self._node_of(variant)) for variant, cfo in _used(plan, lookups)]
        self.pool.lock(node for *_, node in sources)
        has_room = self.pool.reserve(prompt.length - prefix_len)
        self.pool.unlock(node for *_, node in sources)
        if not has_room:
            plan, sources = replan_without_load(plan, "memory"), []
            has_room = self.pool.reserve(prompt.length - prefix_len)
            assert has_room, f"{self.pool.capacity} tokens do not hold a prompt of {prompt.length}"
        self.pool.use_prefix(prefix)
        for variant, cfo, node in sources:
            if self.index.touch(variant, use_weight(cfo, variant.length)) and node.is_stored:
                self.pool.use(node, self.index.worth(variant))
        if not self.settings.reuse:
            self.pool.add_path(self._labels(prompt), prompt.part_lens)
        elif plan.num_reused:
            self._remember_derived(prompt, plan)
            self._promote(plan)
        else:
            self._remember_exact(prompt)
        self.pool.unlock(prefix[-1:])
        self.pool.release()
        self.num_answered += 1
        self.peak_stored = max(self.peak_stored, self.pool.num_stored)
        self.num_computed.update(
            chunk for chunk, planned in zip(request.chunks, plan.chunks, strict=True) if _is_in_full(planned)
        )
        return self._count(plan)

    def outcome(self, rows: Counts) -> Outcome:
        stored = [variant for variant in self.index if self.pool.resolve(variant)]
        number = {key: chunk for chunk, key in enumerate(self.keys)}
        by_chunk = Counter(number[variant.key] for variant in stored)
        return Outcome(
            trace=self.trace.name,
            settings=self.settings,
            per_request=rows,
            reasons=dict(sorted(self.reasons.items())),
            variants_per_chunk=dict(sorted(Counter(by_chunk.values()).items())),
            variants_by_chunk=dict(by_chunk.most_common()),
            generations=dict(sorted(Counter(variant.generation for variant in stored).items())),
            cci=cci_quantiles(self.cci),
            index=self.index.stats(),
            peak_stored=self.peak_stored,
            end_stored=self.pool.num_stored,
            end_dead=self.pool.num_dead(self._is_known),
            num_evicted=self.pool.num_evicted,
            num_promoted=self.num_promoted,
            num_computed=dict(self.num_computed),
        )

    def _look_up(self, prompt: _Prompt, prefix_len: int) -> list[Lookup | None]:
        return [
            self.index.lookup(
                key, self.pool.resolve, context=prompt.keys[:i], max_generation=self.settings.max_generation
            )
            if self.settings.reuse and prompt.spans[i][1] > prefix_len
            else None
            for i, key in enumerate(prompt.keys)
        ]

    def _plan(self, prompt: _Prompt, prefix_len: int, lookups: Sequence[Lookup | None]) -> RecomputePlan:
        return make_plan(
            opts=RequestOptions(spans=prompt.spans, mode="auto" if self.settings.reuse else "off"),
            default_method=METHOD,
            default_ratio=self.settings.ratio,
            alpha=self.settings.alpha,
            max_cfo=self.settings.max_cfo,
            prompt_len=prompt.length,
            prefix_len=prefix_len,
            max_prefix_len=prompt.length - 1,
            page_size=1,
            lookups=lookups,
            min_reuse_len=1,
            chunk_keys=prompt.keys,
        )

    def _node_of(self, variant: Variant) -> Node:
        node = self.pool.node_of(variant)
        assert node is not None, f"the lookup found {variant}, but it is gone"
        return node

    def _labels(self, prompt: _Prompt) -> list[int]:
        """No two questions are alike."""
        return [SYSTEM, *prompt.chunks, SYSTEM - 1 - self.num_answered]

    def _remember_exact(self, prompt: _Prompt) -> None:
        nodes = self.pool.add_path(self._labels(prompt), prompt.part_lens)
        if not prompt.keys:
            return
        path = PathTokens(_tokens(prompt.spans[-1][1]), _PARTITION)
        for i, (start, _) in enumerate(prompt.spans):
            self._add(prompt, i, generation=0, home=PathHome(path, start), node=nodes[1 + i])

    def _remember_derived(self, prompt: _Prompt, plan: RecomputePlan) -> None:
        generation = 0
        for i, chunk in enumerate(plan.chunks):
            if chunk.generation is not None and not _is_computed_again(chunk, self.settings):
                generation = max(generation, 1 + chunk.generation)
            if generation <= self.settings.max_generation and self._is_new(prompt, i, generation, chunk):
                length = chunk.end - chunk.start
                node = self.pool.add_own(length)
                self._add(prompt, i, generation=generation, home=NodeHome(_tokens(length), ""), node=node)

    def _promote(self, plan: RecomputePlan) -> None:
        """Popular variants at the end of cold paths are copied to nodes of their own."""
        for chunk in plan.chunks:
            variant = None if chunk.variant_id is None else self.index.get(chunk.variant_id)
            if variant is None or not self.index.is_worth_promoting(variant, self.settings.promote_uses):
                continue
            source = self.pool.node_of(variant)
            if source is None:
                continue
            self.pool.lock([source])
            if self.pool.reserve(variant.length):
                node = self.pool.add_own(variant.length, self.index.worth(variant))
                self.index.move(variant, NodeHome(_tokens(variant.length), ""))
                self.pool.settle(node, variant)
                self.num_promoted += 1
            self.pool.unlock([source])

    def _is_new(self, prompt: _Prompt, i: int, generation: int, chunk: ChunkPlan) -> bool:
        """Whether what this prompt leaves of chunk i is remembered."""
        key, context, (start, end) = prompt.keys[i], prompt.keys[:i], prompt.spans[i]
        if chunk.is_to_remember:
            found = self.index.lookup(key, self.pool.resolve, context=context)
            if found.covered_len == end - start and (chunk.status is Status.MISS or found.unit_cfo == 0.0):
                return False  # it stands in the prompt twice
        elif self.settings.remember != "contexts" or not chunk.cfo:
            return False
        return self.index.wants(key, start=start, generation=generation, context=context)

    def _add(self, prompt: _Prompt, i: int, *, generation: int, home: Home, node: Node) -> None:
        key, context, length = prompt.keys[i], prompt.keys[:i], prompt.lengths[i]
        statistics = self.attention.statistics(key, length, context, prompt.lengths[:i])
        self.cci.append(statistics.cci)
        variant = self.index.add(
            key,
            length=length,
            start=prompt.spans[i][0],
            generation=generation,
            context=context,
            prompt_keys=prompt.keys,
            home=home,
            statistics=statistics,
        )
        if variant is not None:
            self.pool.settle(node, variant)

    def _count(self, plan: RecomputePlan) -> Counts:
        by_status = Counter(chunk.status for chunk in plan.chunks)
        for chunk in plan.chunks:
            self.reasons[chunk.status.value + (f", {chunk.reason}" if chunk.reason else "")] += 1
        num_found = by_status[Status.PREFIX] + by_status[Status.HIT]
        row = {
            "num_requests": 1,
            "num_chunks": len(plan.chunks),
            "num_prefix": by_status[Status.PREFIX],
            "num_hit": by_status[Status.HIT],
            "num_miss": by_status[Status.MISS],
            "num_skipped": by_status[Status.SKIPPED],
            "num_all_hit": int(num_found == len(plan.chunks)),
            "prompt_tokens": plan.prompt_len,
            "prefix_tokens": plan.prefix_len,
            "reused_tokens": plan.num_reused,
            "recomputed_tokens": plan.num_recomputed,
            "stored_tokens": self.pool.num_stored,
        }
        return np.array([row[name] for name in FIELDS], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """One request laid out: system prompt, chunks, question."""

    chunks: tuple[int, ...]
    keys: tuple[bytes, ...]
    lengths: tuple[int, ...]
    spans: tuple[Span, ...]
    part_lens: tuple[int, ...]
    """Of system prompt, each chunk, question."""

    @classmethod
    def of(cls, trace: Trace, request: Request, keys: Sequence[bytes]) -> _Prompt:
        lengths = tuple(trace.lengths[chunk] for chunk in request.chunks)
        part_lens = (trace.system_len, *lengths, request.question_len)
        bounds = list(accumulate(part_lens))
        spans = tuple(pairwise(bounds[:-1]))
        return cls(request.chunks, tuple(keys[chunk] for chunk in request.chunks), lengths, spans, part_lens)

    @property
    def length(self) -> int:
        return sum(self.part_lens)


def _used(plan: RecomputePlan, lookups: Sequence[Lookup | None]) -> list[tuple[Variant, float]]:
    """The variants that are brought in, each with its CFO."""
    used = []
    for chunk, lookup in zip(plan.chunks, lookups, strict=True):
        if chunk.num_reused:
            assert lookup is not None, "a hit without a lookup"
            assert lookup.variant is not None, "a hit without a variant"
            assert chunk.cfo is not None, "the context was given"
            used.append((lookup.variant, chunk.cfo))
    return used


def _is_in_full(chunk: ChunkPlan) -> bool:
    return chunk.status in (Status.MISS, Status.SKIPPED)


def _is_computed_again(chunk: ChunkPlan, settings: Settings) -> bool:
    """Whether a hit is recomputed in full, so that its approximation is in nothing behind it."""
    share = settings.ratio if settings.alpha is None else chunk.cfo
    return share is not None and share >= 1.0


@lru_cache(maxsize=1 << 12)
def _tokens(length: int) -> array[int]:
    """Stands for a prompt's tokens: the index asks for nothing but their number."""
    return array("b", bytes(length))
