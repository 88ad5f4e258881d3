"""Engine: replays a trace through the project's own index, planner and reusability functions, without model or KV.

    simulate(trace, settings) -> Outcome

One request at a time, as the server handles it (`sglang_chunk_cache.host.radix_cache`): match the exact prefix; look up
every chunk behind it with its new context; `make_plan`; make room; count the uses. Then it remembers chunks. If the
prompt reused none, its chunks are stored as exact spans of its path. From a fused prompt it stores

    remember "misses"     the chunks that were computed in full, as nodes of their own, of kind derived
    remember "contexts"   also the chunks that were reused and fixed, as variants of their new context (Cache-Craft 3.3)

and promotes popular variants of cold paths. The KV memory (`store`) and the attention statistics (`attention`) are
models. `simulate` has no clock: requests follow each other, so a chunk is known as soon as the request that computed
it is over.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import TypeAlias

import numpy as np
from benchmark.simulate.attention import SyntheticAttention, cci_quantiles
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.store import SYSTEM, Node, Pool
from benchmark.simulate.tally import FIELDS, Counts, Outcome
from benchmark.simulate.trace import Request, Trace

from chunk_cache.actions import Forgo, Keep
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.system_prompt import marks_of, piece_starts
from chunk_cache.index.variant import Home, NodeHome, PathHome, PathTokens, Variant
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.manager import ChunkManager
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.types import Status

METHOD = "cache-craft"

Observe: TypeAlias = Callable[[ChunkPrompt, Sequence[tuple[ChunkPlan, Variant]]], None]
"""Called for every prompt, with the variants that it reuses."""


def simulate(trace: Trace, settings: Settings, *, check_every: int = 0, observe: Observe | None = None) -> Outcome:
    """Replays a trace.

    Args:
        observe: called with what each request reuses.
        check_every: check index and pool against a recount every so many requests (slow; for tests). 0 = never.

    Raises:
        SettingsError: the memory is smaller than the longest prompt, or chunk, that it must hold.
    """
    needed = trace.max_prompt_len if settings.holds == "prompts" else max(trace.lengths, default=1)
    if settings.pool_tokens < needed:
        problem = f"{settings.pool_tokens} tokens do not hold the longest of {settings.holds}, which has {needed}"
        raise SettingsError(f"pool_tokens: {problem}; give at least {needed}")
    replay = Replay(trace, settings)
    rows = np.zeros((len(trace.requests), len(FIELDS)), dtype=np.int64)
    replay.observe = observe
    for i, request in enumerate(trace.requests):
        rows[i] = replay.answer(request)
        if check_every and i % check_every == 0:
            replay.check_integrity()
    return replay.outcome(rows)


def key_of(number: int) -> bytes:
    """The key of a chunk of a trace."""
    return chunk_key(Partition(), array("q", [number]))


@dataclass(slots=True)
class Replay:
    """The state of one simulation."""

    trace: Trace
    settings: Settings
    reasons: Counter[str] = field(default_factory=Counter)
    cci: list[float] = field(default_factory=list)
    num_computed: Counter[int] = field(default_factory=Counter)
    peak_stored: int = 0
    num_answered: int = 0
    num_paths: int = 0
    num_promoted: int = 0
    observe: Observe | None = None
    manager: ChunkManager = field(init=False)
    pool: Pool = field(init=False)
    attention: SyntheticAttention = field(init=False)
    keys: Sequence[bytes] = ()
    """Keys of the trace's chunks; computed here if not given."""

    def __post_init__(self) -> None:
        settings = self.settings
        self.pool = Pool(
            settings.pool_tokens,
            settings.policy,
            share=settings.partition_share,
            age=lambda: self.manager.index.age,
            on_evicted=self._note_evicted,
        )
        self.manager = ChunkManager(
            settings.config, self.pool, method=METHOD, ratio=settings.ratio, capacity=settings.pool_tokens
        )
        self.attention = SyntheticAttention(settings.seed)
        self.keys = self.keys or list(map(key_of, range(len(self.trace.lengths))))

    @property
    def _holds_prompts(self) -> bool:
        return self.settings.holds == "prompts"

    def _note_evicted(self, num_tokens: int) -> None:
        self.manager.evicted(num_tokens, self.pool.capacity)

    def _is_known(self, variant: Variant) -> bool:
        return self.manager.index.get(variant.variant_id) is variant

    def check_integrity(self) -> None:
        self.manager.check_integrity()
        self.pool.check_integrity()

    def answer(self, request: Request) -> Counts:
        """One request, from its lookup to what it leaves behind; returns `[len(FIELDS)]`."""
        running = self.begin(request, Layout.of(self.trace, request, self.settings, self.keys))
        self.note_computed(running)
        return self.end(running)

    def begin(self, request: Request, layout: Layout, num_generated: int = 0) -> Running:
        """Plans a request, makes room for it and counts what it reuses.

        Args:
            num_generated: tokens that it had generated before it was retracted.
        """
        prefix = self.pool.match(layout.labels, layout.owner) if self._holds_prompts else []
        prefix_len = sum(node.length for node in prefix)
        self.pool.lock(prefix[-1:])
        length = layout.length + num_generated
        plan = self.manager.plan(
            layout.prompt,
            prompt_len=length,
            prefix_len=prefix_len,
            max_prefix_len=length - 1,
            num_generated=num_generated,
        )
        sources = self.manager.sources(plan)
        nodes = [self._node_of(variant) for _, variant in sources]
        self.pool.lock(nodes)
        num_private = length - prefix_len if self._holds_prompts else 0
        has_room = self.pool.reserve(num_private)
        self.pool.unlock(nodes)
        if not has_room:
            plan, sources, nodes = self.manager.without_load(plan, "memory"), [], []
            has_room = self.pool.reserve(num_private)
            assert has_room, f"{self.pool.capacity} tokens do not hold a prompt of {layout.length}"
        if self.observe is not None:
            self.observe(layout.prompt, sources)
        self.pool.use_prefix(prefix)
        self.manager.use(sources)
        for (_, variant), node in zip(sources, nodes, strict=True):
            if node.is_stored:
                self.pool.use(node, self.manager.index.worth(variant))
        return Running(request, layout, plan, prefix[-1:], num_private)

    def note_computed(self, running: Running) -> None:
        """Called when a prompt was computed: puts an exact one into the tree, locked while its request runs."""
        if running.plan.num_reused or not self._holds_prompts:
            return
        num_others = self.pool.num_reserved - running.num_private
        nodes = self._remember_exact(running.layout, running.plan)
        self.pool.lock(nodes[-1:])
        self.pool.unlock(running.locked)
        running.locked, running.num_private = nodes[-1:], running.plan.prompt_len - running.layout.length
        self.pool.release(num_others + running.num_private)  # part of it may have been in the tree already

    def end(self, running: Running) -> Counts:
        """Ends a request and stores what is kept of it; returns `[len(FIELDS)]`."""
        request, layout, plan = running.request, running.layout, running.plan
        num_others = self.pool.num_reserved - running.num_private
        if plan.num_reused:
            self._remember_fused(layout, plan)
        elif not self._holds_prompts:
            keeps = self.manager.remember_exact(layout.prompt, plan, in_tree=0, up_to=layout.length)
            self._keep_own(layout, keeps)
        self.pool.unlock(running.locked)
        self.pool.release(num_others)
        self.num_answered += 1
        self.peak_stored = max(self.peak_stored, self.pool.num_stored)
        self.num_computed.update(
            chunk for chunk, planned in zip(request.chunks, plan.chunks, strict=True) if _is_in_full(planned)
        )
        return self._count(plan)

    def outcome(self, rows: Counts) -> Outcome:
        stored = [variant for variant in self.manager.index if self.pool.resolve(variant)]
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
            index=self.manager.index.stats(),
            peak_stored=self.peak_stored,
            end_stored=self.pool.num_stored,
            end_dead=self.pool.num_dead(self._is_known),
            num_evicted=self.pool.num_evicted,
            num_promoted=self.num_promoted,
            num_computed=dict(self.num_computed),
        )

    def _statistics(self, prompt: ChunkPrompt, chunk: int) -> ChunkStatistics:
        """Statistics that the server would take of a chunk when it computes it in this prompt."""
        context_lens = [prompt.length(i) for i in range(chunk)]
        num_pieces = len(piece_starts(prompt.options.spans[0][0])) if prompt.system else 0
        context = prompt.context(chunk)
        return self.attention.statistics(prompt.keys[chunk], prompt.length(chunk), context, context_lens, num_pieces)

    def _node_of(self, variant: Variant) -> Node:
        node = self.pool.node_of(variant)
        assert node is not None, f"the lookup found {variant}, but it is gone"
        return node

    def _remember_exact(self, layout: Layout, plan: RecomputePlan) -> list[Node]:
        """Stores an exact prompt and returns its nodes; its question is taken as unlike any other."""
        self.num_paths += 1
        nodes = self.pool.add_path([*layout.labels, SYSTEM - self.num_paths], layout.part_lens, layout.owner)
        spans = layout.prompt.options.spans
        path = PathTokens(_tokens(spans[-1][1] if spans else 0), layout.partition)
        keeps = self.manager.remember_exact(layout.prompt, plan, in_tree=layout.length, up_to=layout.length)
        for keep in keeps:
            if isinstance(keep, Keep):
                self._keep(layout, keep, PathHome(path, spans[keep.chunk][0]), nodes[layout.places[keep.chunk]])
        return nodes

    def _remember_fused(self, layout: Layout, plan: RecomputePlan) -> None:
        self._keep_own(layout, self.manager.remember_fused(layout.prompt, plan, up_to=layout.length))
        for promotion in self.manager.promote(plan):
            variant, source = promotion.variant, self._node_of(promotion.variant)
            self.pool.lock([source])
            if self.pool.reserve(variant.length):
                node = self.pool.add_own(variant.length, promotion.priority, layout.owner)
                self.manager.complete_promote(promotion, layout.home(variant.length))
                self.pool.settle(node, variant)
                self.num_promoted += 1
            self.pool.unlock([source])

    def _keep_own(self, layout: Layout, actions: Iterable[Keep | Forgo]) -> None:
        for action in actions:
            if not isinstance(action, Keep):
                continue
            length = layout.prompt.length(action.chunk)
            if self._holds_prompts or self.pool.reserve(length):
                self._keep(layout, action, layout.home(length), self.pool.add_own(length, owner=layout.owner))

    def _keep(self, layout: Layout, keep: Keep, home: Home, node: Node) -> None:
        prompt, i = layout.prompt, keep.chunk
        statistics = None
        if keep.fixed is None:  # the server takes no new statistics of a fixed chunk
            statistics = self._statistics(prompt, i)
            self.cci.append(statistics.cci)
        variant = self.manager.complete(prompt, keep, home, statistics)
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
            "unmoved_tokens": sum(chunk.num_reused for chunk in plan.chunks if not chunk.shift),
            "recomputed_tokens": plan.num_recomputed,
            "chunk_tokens": sum(chunk.end - chunk.start for chunk in plan.chunks),
            "chunk_prefix_tokens": sum(max(0, min(c.end, plan.prefix_len) - c.start) for c in plan.chunks),
            "stored_tokens": self.pool.num_stored,
        }
        return np.array([row[name] for name in FIELDS], dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Layout:
    """The parts of a request's prompt: system prompt, chunks and what stands between them, question."""

    prompt: ChunkPrompt
    labels: tuple[int, ...]
    """Labels in the pool of all parts except the question."""
    part_lens: tuple[int, ...]
    """Tokens of each part; the last is the question."""
    places: tuple[int, ...]
    """Indices of the parts that are chunks."""
    partition: Partition

    @classmethod
    def of(cls, trace: Trace, request: Request, settings: Settings, keys: Sequence[bytes]) -> Layout:
        blocks = request.blocks
        head = 1 if trace.system_len else 0
        labels = (*[SYSTEM] * head, *(number for number, _ in blocks))
        part_lens = (*[trace.system_len] * head, *(trace.lengths[number] for number, _ in blocks), request.question_len)
        places = tuple(head + i for i, (_, is_chunk) in enumerate(blocks) if is_chunk)
        starts = (0, *accumulate(part_lens))
        spans = tuple((starts[place], starts[place + 1]) for place in places)
        options = RequestOptions(spans=spans, mode="auto" if settings.reuse else "off")
        system = b""
        if settings.counts_system and places:
            system = _marks(labels[: places[0]], part_lens[: places[0]])
        prompt = ChunkPrompt(options, tuple(keys[chunk] for chunk in request.chunks), system)
        return cls(prompt, labels, part_lens, places, _partition(request.tenant))

    @property
    def owner(self) -> bytes:
        return self.partition.key

    def home(self, length: int) -> NodeHome:
        """A new home for a chunk of this prompt."""
        return NodeHome(_tokens(length), "", partition=self.partition)

    @property
    def length(self) -> int:
        return sum(self.part_lens)


@dataclass(slots=True)
class Running:
    """A request that was admitted."""

    request: Request
    layout: Layout
    plan: RecomputePlan
    locked: Sequence[Node]
    """The last node that it shares with the tree, if any."""
    num_private: int
    """Its private tokens of the pool, which are in no node."""


@lru_cache(maxsize=1 << 12)
def _marks(labels: tuple[int, ...], lengths: tuple[int, ...]) -> bytes:
    """Marks of a system prompt that is made of these blocks; prompts with equal first blocks have equal first marks."""
    return marks_of(array("q", [label for label, length in zip(labels, lengths, strict=True) for _ in range(length)]))


@lru_cache(maxsize=1 << 10)
def _partition(tenant: int) -> Partition:
    return Partition(f"tenant {tenant}") if tenant else Partition()


def _is_in_full(chunk: ChunkPlan) -> bool:
    return chunk.status in (Status.MISS, Status.SKIPPED)


@lru_cache(maxsize=1 << 12)
def _tokens(length: int) -> array[int]:
    """Stands for a prompt's tokens: the index only asks for their number."""
    return array("b", bytes(length))
