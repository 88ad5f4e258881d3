"""ChunkManager: the one place that decides what a prompt reuses and what is kept of it. It moves no KV.

    plan        what happens to every token of a prompt
    sources     the variants that a plan brings in
    use         they were brought in
    missing     chunks of a prompt that the tiers below the pool may have, or have better
    accept      whether what a tier had goes into the pool
    remember_exact, remember_fused   what to keep of a prompt that was computed
    promote     which of the variants just used deserve a home of their own
    complete, complete_accept, complete_promote   what was to be kept, taken or promoted lies in its home now
    evicted     the store has made room

Decisions are frozen actions: whoever moves KV carries one out, reports it, and asks for the next, so each is made on
the newest state. The manager asks its `Store` one question, how much of a variant is still there; the server's radix
tree and the simulator's pool both answer it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from chunk_cache.index.chunk_index import ChunkIndex, Lookup
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.need import Described, Need
from chunk_cache.index.reusability import use_weight
from chunk_cache.index.system_prompt import num_pieces
from chunk_cache.index.variant import Home, PathTokens, Variant
from chunk_cache.methods import METHODS, Ranking
from chunk_cache.options.config import Config
from chunk_cache.options.request_options import EXACT_MODES
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.planning import make_plan, replan_without_load
from chunk_cache.plan.question_words import QuestionWords
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.plan.selection_plan import question_of
from chunk_cache.plan.selector_answer import NO_ANSWER
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.tiers.variant_search import Held, is_better
from chunk_cache.types import Span

MAX_DERIVED_SHARE = 0.25
"""Share of the KV pool that derived variants may have before no fixed chunks are remembered."""
ROOM_PER_REUSED = 4
"""Tokens of room for each that was reused: between two uses of a chunk others come by, some to be used again."""

_PREPARING = Lookup(None, 0, "preparing")
_NO_REASONS: Mapping[bytes, str] = MappingProxyType({})


class Store(Protocol):
    """Where KV lies."""

    @property
    def version(self) -> int:
        """A number that changes whenever an answer of `resolve` may have changed."""

    def resolve(self, variant: Variant) -> int:
        """Leading tokens of the variant that are still stored; 0 = gone."""


@dataclass(frozen=True, slots=True)
class Keep:
    """A chunk of a prompt to remember: where it lies in its path, or in a home of its own."""

    chunk: int
    generation: int
    in_path: bool
    is_prepared: bool = False
    fixed: int | None = None
    """The variant that was fixed for the prompt; None where the chunk was computed."""


@dataclass(frozen=True, slots=True)
class Forgo:
    """A chunk that was computed and is not remembered, and why."""

    chunk: int
    reason: str


@dataclass(frozen=True, slots=True)
class Promote:
    """A variant at the end of a cold path to copy to a home of its own."""

    variant: Variant
    priority: int
    """Eviction priority of the home."""


class Arriving(Described, Protocol):
    """A variant that comes up from a tier."""

    @property
    def key(self) -> bytes: ...
    @property
    def length(self) -> int: ...
    @property
    def start(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Accept:
    """A variant from a tier that goes into the pool, in a home of its own."""

    variant: Arriving
    priority: int
    """Eviction priority of the home."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A chunk of a prompt that is looked for in the tiers below the pool."""

    chunk: int
    need: Need
    held: Held
    """What the pool has; only something better is of use."""


class ChunkManager:
    """See the head of this file.

    Args:
        method, ratio: the server's, for prompts that name none.
        page_size: tokens per page of the store.
        capacity: tokens that the store holds; None = any number.
        max_unknown_rows, step_len: as in `make_plan`.
        words: of the model's tokenizer.
        has_states: as in `make_plan`.
    """

    def __init__(
        self,
        config: Config,
        store: Store,
        *,
        method: str,
        ratio: float,
        page_size: int = 1,
        capacity: int | None = None,
        max_unknown_rows: int | None = None,
        step_len: int | None = None,
        words: QuestionWords | None = None,
        has_states: bool = False,
    ) -> None:
        self.config = config
        self.store = store
        self.index = ChunkIndex(
            max_variants=config.max_variants,
            max_variants_per_chunk=config.max_variants_per_chunk,
            max_path_tokens=config.max_path_tokens,
            eviction=config.eviction,
            ageing=config.ageing,
            partition_share=config.partition_share,
        )
        self._method = method
        self._ratio = ratio
        self._page_size = page_size
        self._max_unknown_rows, self._step_len = max_unknown_rows, step_len
        self._words = words or QuestionWords()
        self._has_states = has_states
        self._max_derived = math.inf if capacity is None else MAX_DERIVED_SHARE * capacity
        self._is_trust_limited = config.trust == "warmed"
        self._is_system_fixed = config.system_prompts == "same" or self._is_trust_limited
        self._is_by_frequency = config.eviction == "frequency-reuse"

    # What a prompt reuses.

    def look_up(self, prompt: ChunkPrompt, chunk: int) -> Lookup:
        """What is stored of a chunk behind those in front of it; asked once per state of index and store."""
        memo = prompt.memo
        if memo.version != self._version:
            memo.lookups.clear()
        found = _PREPARING if chunk == prompt.to_prepare else memo.lookups.get(chunk)
        if found is None:
            found = self.index.lookup(prompt.keys[chunk], self.store.resolve, self.need(prompt, chunk))
            memo.lookups[chunk] = found
        memo.version = self._version  # what a lookup finds to be gone are variants of its own chunk alone
        return found

    @property
    def _version(self) -> tuple[int, int]:
        return self.index.version, self.store.version

    def max_generation(self, prompt: ChunkPrompt) -> int:
        """Variants above it are not used; what is prepared is computed behind exact ones alone."""
        return self.config.max_generation if prompt.to_prepare is None else 0

    def need(self, prompt: ChunkPrompt, chunk: int) -> Need:
        """Where a prompt needs a chunk, and which variants it may be given."""
        max_unit_cfo, alpha = math.inf, self.config.alpha or 1.0
        if self.config.max_cfo is not None:
            max_unit_cfo = self.config.max_cfo / alpha
        return self._need(prompt, chunk, self.max_generation(prompt), max_unit_cfo)

    def _need(self, prompt: ChunkPrompt, chunk: int, max_generation: int, max_unit_cfo: float = math.inf) -> Need:
        return Need(
            max_generation=max_generation,
            context=prompt.context(chunk),
            system=prompt.system,
            is_system_fixed=self._is_system_fixed,
            is_trust_limited=self._is_trust_limited,
            max_unit_cfo=max_unit_cfo,
        )

    def missing(self, prompt: ChunkPrompt) -> Iterator[Missing]:
        """Chunks that the pool has not, or only as a variant that does not fit a prompt perfectly."""
        if prompt.options.mode in ("off", *EXACT_MODES):
            return
        for i, key in enumerate(prompt.keys):
            if i == prompt.to_prepare or (self._has_states and prompt.length(i) <= self.config.seam_len):
                continue
            need = self.need(prompt, i)
            found = self.index.best(key, self.store.resolve, need)
            if found.variant is None or found.share_to_compute or found.variant.generation:
                yield Missing(i, need, self._held(key, need, found))

    def _held(self, key: bytes, need: Need, found: Lookup) -> Held:
        """What the pool would give where a chunk is needed."""
        peers = self.index.variants_of(key)
        fits = found.variant is not None and need.fits(found.variant)
        return Held(
            found.share_to_compute if fits else math.inf,
            0 if found.variant is None else found.variant.generation,
            has_prepared=any(one.is_prepared and need.obstacle(one) is None for one in peers),
            names=frozenset(one.name for one in peers),
            worst_rank=self.index.worst_rank(key),
        )

    def accept(self, variant: Arriving, need: Need) -> Accept | None:
        """A variant from a tier that goes into the pool; None = the pool has one as good by now, or would not keep it.

        Args:
            need: where it is needed.
        """
        held = self._held(variant.key, need, self.index.best(variant.key, self.store.resolve, need))
        if not is_better(variant, need, held):
            return None
        is_wanted = self.index.wants(
            variant.key,
            start=variant.start,
            generation=variant.generation,
            context=variant.context,
            system=variant.system,
            is_prepared=variant.is_prepared,
        )
        return Accept(variant, self.new_priority(0)) if is_wanted else None

    def complete_accept(self, accept: Accept, home: Home) -> Variant:
        """What was accepted lies in `home`; nothing came between."""
        arrived = accept.variant
        variant = self.index.add(
            arrived.key,
            length=arrived.length,
            start=arrived.start,
            generation=arrived.generation,
            context=arrived.context,
            system=arrived.system,
            home=home,
            statistics=arrived.statistics,
            is_prepared=arrived.is_prepared,
        )
        assert variant is not None, "the index wanted it"
        return variant

    def has_whole(self, prompt: ChunkPrompt, chunk: int) -> bool:
        """Whether the whole of a chunk is stored for a prompt."""
        return self._stored_len(prompt, chunk) == prompt.length(chunk)

    def has_prepared(self, prompt: ChunkPrompt, chunk: int) -> bool:
        """Whether the whole of a chunk is stored as prepared behind what stands in front of it."""
        variant = self.index.prepared(prompt.keys[chunk], prompt.system, prompt.context(chunk))
        return variant is not None and self.store.resolve(variant) == variant.length

    def plan(
        self,
        prompt: ChunkPrompt,
        *,
        prompt_len: int,
        prefix_len: int,
        max_prefix_len: int,
        limit_reason: str = "prompt_end",
        method: str | None = None,
        ratio: float | None = None,
        reasons: Mapping[bytes, str] = _NO_REASONS,
        num_generated: int = 0,
        no_load: str | None = None,
    ) -> RecomputePlan:
        """What happens to every token of a prompt; the same plan until index, store or an argument change.

        Args:
            prefix_len, max_prefix_len, limit_reason: as in `make_plan`.
            method, ratio: in the place of the server's.
            reasons: by key, why a chunk that is not stored could not be brought up from below the store.
            num_generated: tokens at the end of the prompt that were generated, of a request that was retracted.
            no_load: why nothing may be brought in, a reason of `chunk_cache.types`; None = it may be.
        """
        method = method or self._method
        asked = prompt_len, prefix_len, max_prefix_len, limit_reason, method, ratio, reasons, prompt.answer, no_load
        memo = prompt.memo
        if memo.plan is not None and memo.plan_of == (self._version, asked):
            return memo.plan
        opts = prompt.options
        question = question_of(opts.spans, prompt_len - num_generated, opts.answer_tokens)
        if num_generated:  # they are no part of the question, by which rows are chosen as before
            opts = replace(opts, answer_tokens=opts.answer_tokens + num_generated)
        lookups: list[Lookup | None] = [
            self._look_up_below(prompt, i, reasons) if opts.mode != "off" and end > prefix_len else None
            for i, (_, end) in enumerate(opts.spans)
        ]
        memo.plan = make_plan(
            opts=opts,
            default_method=method,
            default_ratio=self._ratio if ratio is None else ratio,
            default_options=self.config.options,
            prompt_len=prompt_len,
            prefix_len=prefix_len,
            max_prefix_len=max_prefix_len,
            page_size=self._page_size,
            lookups=lookups,
            min_reuse_len=self.config.min_reuse_len,
            chunk_keys=prompt.keys,
            rankings=self._rankings(prompt, method, lookups, question),
            selector_reason=self._selector_reason(prompt, method),
            alpha=self.config.alpha,
            max_cfo=self.config.max_cfo,
            limit_reason=limit_reason,
            max_unknown_rows=self._max_unknown_rows,
            step_len=self._step_len,
            seam_len=self.config.seam_len,
            has_states=self._has_states,
        )
        if no_load is not None:
            memo.plan = replan_without_load(memo.plan, no_load)
        memo.plan_of = self._version, asked
        return memo.plan

    def without_load(self, plan: RecomputePlan, reason: str, begin: int | None = None) -> RecomputePlan:
        """The plan of a prompt whose chunks could not be brought in after all, or not from `begin` on."""
        return replan_without_load(plan, reason, begin)

    def is_stored(self, plan: RecomputePlan) -> bool:
        """Whether all that a plan of an earlier step brings in is still there."""
        hits = [chunk for chunk in plan.chunks if chunk.variant_id is not None]
        variants = [self.index.get(chunk.variant_id) for chunk in hits if chunk.variant_id is not None]
        return all(
            variant is not None and self.store.resolve(variant) >= chunk.src_offset + chunk.num_reused
            for chunk, variant in zip(hits, variants, strict=True)
        )

    def _look_up_below(self, prompt: ChunkPrompt, chunk: int, reasons: Mapping[bytes, str]) -> Lookup:
        found = self.look_up(prompt, chunk)
        reason = None if found.variant is not None else reasons.get(prompt.keys[chunk])
        return found if reason is None else Lookup(None, 0, reason)

    def _selector_reason(self, prompt: ChunkPrompt, default: str) -> str | None:
        """Why a method that asks the selector has no scores; None where it has, and for all others."""
        if not METHODS[prompt.options.method or default].asks_selector:
            return None
        return NO_ANSWER if prompt.answer is None else prompt.answer.reason

    def _rankings(
        self, prompt: ChunkPrompt, default: str, lookups: Sequence[Lookup | None], question: Span
    ) -> Sequence[Ranking | None] | None:
        """What the method ranks by: the selector's scores, words, or a statistic of each variant that was found."""
        method = METHODS[prompt.options.method or default]
        if method.asks_selector:
            return None if prompt.answer is None else prompt.answer.rankings
        if method.asks_words:
            is_stored = any(lookup is not None and lookup.variant is not None for lookup in lookups)
            return self._word_rankings(prompt, question) if is_stored else None
        statistic = method.statistic
        if statistic is None:
            return None
        variants = [None if lookup is None else lookup.variant for lookup in lookups]
        return [None if v is None or v.statistics is None else v.statistics.of(statistic) for v in variants]

    def _word_rankings(self, prompt: ChunkPrompt, question: Span) -> tuple[Ranking, ...] | None:
        """By words of the question, which is the same in every plan of a prompt."""
        memo = prompt.memo
        if memo.words is None and prompt.token_ids is not None:
            memo.words = self._words.rankings(prompt.token_ids, prompt.options.spans, question)
        return memo.words

    def sources(self, plan: RecomputePlan) -> list[tuple[ChunkPlan, Variant]]:
        """The hits of a plan, each with the variant that it brings in; nothing was forgotten since it was made."""
        found = []
        for chunk in plan.chunks:
            if chunk.num_reused:
                variant = None if chunk.variant_id is None else self.index.get(chunk.variant_id)
                assert variant is not None, f"{chunk} of a plan that is out of date"
                found.append((chunk, variant))
        return found

    def use(self, sources: Sequence[tuple[ChunkPlan, Variant]]) -> None:
        """Counts the use of variants that were brought in."""
        for chunk, variant in sources:
            self.index.touch(variant, 1.0 if chunk.unit_cfo is None else use_weight(chunk.unit_cfo, variant.length))

    def priority(self, variant: Variant) -> int | None:
        """Eviction priority of what a variant lies in; None where only the last use counts."""
        return int(self.index.worth(variant)) if self._is_by_frequency else None

    def new_priority(self, priority: int) -> int:
        """Priority of what is new: it goes before what was reused lately, not before everything that ever was.

        Args:
            priority: that it was given.
        """
        return max(priority, int(self.index.age)) if self._is_by_frequency else priority

    def num_kept_tokens(self, capacity: int) -> int:
        """Tokens that running requests leave to stored chunks: by how much is reused, at most a share of `capacity`."""
        return min(int(self.config.keep_share * capacity), ROOM_PER_REUSED * self.index.num_reused_tokens)

    # What is kept of it.

    def remember_exact(
        self, prompt: ChunkPrompt, plan: RecomputePlan | None, *, in_tree: int, up_to: int
    ) -> Iterator[Keep | Forgo]:
        """Every chunk of an exact prompt is a span in its path; in mode off none is remembered.

        In modes prepare and warm only the last is, in a home of its own.

        Args:
            in_tree: leading tokens of the prompt that its path holds.
            up_to: leading tokens of the prompt that were computed.
        """
        if prompt.to_prepare is not None:
            yield from self._remember_prepared(prompt, prompt.to_prepare, up_to)
            return
        spans = prompt.options.spans if prompt.options.remembers else ()
        exceeds_share = bool(spans) and self._exceeds_share(spans[-1][1])
        for i, (start, end) in enumerate(spans):
            covered_len = min(end, in_tree) - start
            is_whole = covered_len == end - start
            if exceeds_share:
                yield Forgo(i, "partition_share")
            elif is_whole or (2 * covered_len >= end - start and not self._has_states):
                # A path that holds a part of the chunk may hold no more of it than is stored already; with states one
                # variant of it is enough, of whatever context.
                if (is_whole and not self._has_states) or self._stored_len(prompt, i) < covered_len:
                    yield Keep(i, generation=0, in_path=True)
            elif end <= up_to and self._is_new(prompt, i, 0, plan):
                # The last page of a path is not stored: a short chunk at its end would be lost.
                yield Keep(i, generation=0, in_path=False)

    def remember_fused(self, prompt: ChunkPrompt, plan: RecomputePlan, *, up_to: int) -> Iterator[Keep | Forgo]:
        """Chunks that a fused prompt had to compute become derived variants in homes of their own.

        So do those that it fixed for its context, where these are remembered and not too much is derived already. In
        mode prepare only the last chunk does, and is a prepared one.
        """
        if prompt.to_prepare is not None:
            yield from self._remember_prepared(prompt, prompt.to_prepare, up_to)
            return
        generation = 0
        # What a chunk does to states is known of one that was computed whole.
        fixes = self.config.remember == "contexts" and plan.num_recomputed > 0 and not self._has_states
        for i, chunk in enumerate(plan.chunks):
            if chunk.generation is not None and plan.ratio < 1.0:
                generation = max(generation, 1 + chunk.generation)
            is_fixed = fixes and bool(chunk.unit_cfo)
            if chunk.end > up_to or not (chunk.is_to_remember or is_fixed):
                continue
            if generation > self.config.max_generation:
                yield Forgo(i, "generation_limit")
            elif is_fixed and self._is_wanted(prompt, i, generation):
                if self.index.num_derived_tokens + prompt.length(i) <= self._max_derived:
                    yield Keep(i, generation, in_path=False, fixed=chunk.variant_id)
                else:
                    yield Forgo(i, "memory")
            elif not is_fixed and self._is_new(prompt, i, generation, plan):
                yield Keep(i, generation, in_path=False)

    def _exceeds_share(self, path_len: int) -> bool:
        """Whether a path alone is more than a partition may have."""
        return path_len > self.index.quota.path_tokens.most

    def _stored_len(self, prompt: ChunkPrompt, chunk: int) -> int:
        need = self._need(prompt, chunk, self.config.max_generation)
        return self.index.stored_len(prompt.keys[chunk], self.store.resolve, need)

    def _remember_prepared(self, prompt: ChunkPrompt, chunk: int, up_to: int) -> Iterator[Keep | Forgo]:
        """The chunk behind what stands in front of it, where it is not stored so already."""
        generation = int(prompt.options.mode == "prepare")  # at any ratio
        if prompt.options.spans[chunk][1] > up_to or self.has_prepared(prompt, chunk):
            return
        if self.config.max_generation < generation:
            yield Forgo(chunk, "generation_limit")
        elif self._is_wanted(prompt, chunk, generation, is_prepared=True):
            yield Keep(chunk, generation, in_path=False, is_prepared=True)

    def _is_new(self, prompt: ChunkPrompt, chunk: int, generation: int, plan: RecomputePlan | None) -> bool:
        """Not stored meanwhile by another request, or by an earlier occurrence in this one, and wanted by the index.

        A chunk that was computed because its variants do not fit this context is new if none of this context is stored.
        """
        found = self.look_up(prompt, chunk)
        if found.covered_len == prompt.length(chunk):
            is_costly = plan is not None and plan.chunks[chunk].reason == "high_cfo"
            if not is_costly or found.unit_cfo == 0.0:
                return False
        return self._is_wanted(prompt, chunk, generation)

    def _is_wanted(self, prompt: ChunkPrompt, chunk: int, generation: int, *, is_prepared: bool = False) -> bool:
        return self.index.wants(
            prompt.keys[chunk],
            start=prompt.options.spans[chunk][0],
            generation=generation,
            context=prompt.context(chunk),
            system=prompt.system,
            is_prepared=is_prepared,
        )

    def complete(
        self, prompt: ChunkPrompt, keep: Keep, home: Home, statistics: ChunkStatistics | None = None
    ) -> Variant | None:
        """What was to be kept lies in `home`; None where the index did not take it after all.

        Args:
            statistics: None = of a chunk that was fixed, those of what it was; of others there are none.
        """
        source = None if keep.fixed is None else self.index.get(keep.fixed)
        if statistics is None and source is not None and source.statistics is not None:
            statistics = source.statistics.behind(len(prompt.context(keep.chunk)), num_pieces(prompt.system))
        start, end = prompt.options.spans[keep.chunk]
        return self.index.add(
            prompt.keys[keep.chunk],
            length=end - start,
            start=start,
            generation=keep.generation,
            context=prompt.context(keep.chunk),
            prompt_keys=prompt.all_pieces,
            system=prompt.system,
            home=home,
            statistics=statistics,
            is_prepared=keep.is_prepared,
        )

    def promote(self, plan: RecomputePlan) -> Iterator[Promote]:
        """Popular variants that this plan used and that keep a cold path alive.

        A path is cold for a variant where a home of its own would let more than half of it go.
        """
        min_uses = self.config.promote_uses
        popular_lens: dict[PathTokens, int] = {}
        for chunk in plan.chunks:
            variant = None if chunk.variant_id is None else self.index.get(chunk.variant_id)
            if variant is None or not min_uses or variant.num_uses < min_uses:
                continue
            path = variant.holder
            if not isinstance(path, PathTokens):
                continue
            if path not in popular_lens:
                popular_lens[path] = self.index.popular_len(path, min_uses)
            is_cold = 2 * popular_lens[path] < variant.start + variant.length
            if is_cold and self.store.resolve(variant) == variant.length:
                yield Promote(variant, self.new_priority(self.priority(variant) or 0))
                popular_lens.clear()  # carrying it out may have moved or evicted others

    def complete_promote(self, promotion: Promote, home: Home) -> None:
        """The KV of what was promoted lies in `home`."""
        self.index.move(promotion.variant, home)

    def evicted(self, num_tokens: int, capacity: int) -> None:
        """The store of `capacity` tokens has evicted so many."""
        self.index.advance_age(num_tokens / capacity)
        self.index.sweep(self.store.resolve, num_tokens)

    def check_integrity(self) -> None:
        """Recomputes the index from scratch.

        Raises:
            AssertionError: it does not fit itself or the store.
        """
        self.index.check_integrity(self.store.resolve)
