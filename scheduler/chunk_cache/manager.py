"""ChunkManager: the one place that decides what a prompt reuses and what is kept of it. It moves no KV.

    plan        decides what happens to every token of a prompt
    sources     names the variants that a plan brings in
    use         counts the use of variants that were brought in
    missing     names the chunks of a prompt to look for in the tiers below the pool
    accept      decides whether a variant from a tier goes into the pool
    remember_exact, remember_fused   decide what to keep of a prompt that was computed
    promote     decides which of the variants just used get a home of their own
    complete, complete_accept, complete_promote   note that an action was carried out
    evicted     notes that the store has evicted tokens

Decisions are frozen actions (`actions.py`). Whoever moves KV carries one out, reports it, and asks for the next, so
each is decided on the newest state. The manager asks its `Store` one question: how much of a variant is still there.
The server's radix tree and the simulator's pool both answer it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

from chunk_cache.actions import Accept, Arriving, Forgo, Keep, Missing, Promote
from chunk_cache.gate.controller import Decision
from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.lookup import NOTHING, Lookup
from chunk_cache.index.need import Need
from chunk_cache.index.reusability import use_weight
from chunk_cache.index.variant import Home, PathTokens, Variant
from chunk_cache.methods import METHODS, Ranking
from chunk_cache.options.config import Config
from chunk_cache.options.kept_tokens import KeptTokens, plan_kept
from chunk_cache.options.request_options import EXACT_MODES, RequestOptions
from chunk_cache.plan.chunk_plan import ChunkPlan
from chunk_cache.plan.planning import PlanSettings, make_plan, replan_without_load
from chunk_cache.plan.question_words import QuestionWords
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.plan.selection_plan import question_of
from chunk_cache.plan.selector_answer import NO_ANSWER, asks_selector
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.retention import SOUND, Retention, Soundness
from chunk_cache.tiers.variant_search import Held, is_better
from chunk_cache.types import Span

ROOM_PER_REUSED = 4
"""Tokens left to stored chunks per token that was reused: other chunks are used between two uses of one."""

_NO_REASONS: Mapping[bytes, str] = MappingProxyType({})


class Store(Protocol):
    """Where KV lies."""

    @property
    def version(self) -> int:
        """A number that changes whenever an answer of `resolve` may have changed."""

    def resolve(self, variant: Variant) -> int:
        """Leading tokens of the variant that are still stored; 0 = gone."""


class ChunkManager:
    """See the head of this file.

    Args:
        method, ratio: the server's, for requests that name none.
        page_size: tokens per page of the store.
        capacity: tokens that the store holds; None = any number.
        max_unknown_rows, step_len, has_states: as of `PlanSettings`.
        words: the words of the model's tokenizer, for methods that ask for them.
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
        self._settings = PlanSettings(
            default_method=method,
            default_ratio=ratio,
            default_options=config.options,
            page_size=page_size,
            min_reuse_len=config.min_reuse_len,
            alpha=config.alpha,
            max_cfo=config.max_cfo,
            max_unknown_rows=max_unknown_rows,
            step_len=step_len,
            seam_len=config.seam_len,
            has_states=has_states,
        )
        self._words = words or QuestionWords()
        self._max_unit_cfo = math.inf if config.max_cfo is None else config.max_cfo / (config.alpha or 1.0)
        self._is_system_fixed = config.system_prompts == "same" or config.is_trust_limited
        self._is_by_frequency = config.eviction == "frequency-reuse"
        self._retention = Retention(
            config, self.index, store.resolve, self.look_up, self._stored_len, capacity, has_states
        )

    # What a prompt reuses.

    def look_up(self, prompt: ChunkPrompt, chunk: int) -> Lookup:
        """The best stored variant of a chunk at its place in the prompt; remembered until index or store change."""
        memo = prompt.memo
        if memo.version != self._version:
            memo.lookups.clear()
        found = NOTHING["preparing"] if chunk == prompt.to_prepare else memo.lookups.get(chunk)
        if found is None:
            found = self.index.lookup(prompt.keys[chunk], self.store.resolve, self.need(prompt, chunk))
            memo.lookups[chunk] = found
        memo.version = self._version  # a lookup forgets variants of its own chunk only, so the others stay valid
        return found

    @property
    def _version(self) -> tuple[int, int]:
        return self.index.version, self.store.version

    def need(self, prompt: ChunkPrompt, chunk: int) -> Need:
        """Where a prompt needs a chunk, and which variants it may be given."""
        return Need(
            # A chunk is prepared behind exact variants only.
            max_generation=self.config.max_generation if prompt.to_prepare is None else 0,
            context=prompt.context(chunk),
            system=prompt.system,
            is_system_fixed=self._is_system_fixed,
            is_trust_limited=self.config.is_trust_limited,
            max_unit_cfo=self._max_unit_cfo,
        )

    def _stored_len(self, prompt: ChunkPrompt, chunk: int) -> int:
        """Most leading tokens of a chunk that one fitting variant has, whatever its CFO."""
        need = replace(self.need(prompt, chunk), max_generation=self.config.max_generation, max_unit_cfo=math.inf)
        return self.index.stored_len(prompt.keys[chunk], self.store.resolve, need)

    def missing(self, prompt: ChunkPrompt) -> Iterator[Missing]:
        """Yields the chunks of which the pool has no variant that is exact, complete and without CFO here."""
        if prompt.options.mode in ("off", *EXACT_MODES):
            return
        for i, key in enumerate(prompt.keys):
            if i == prompt.to_prepare or (self._settings.has_states and prompt.length(i) <= self.config.seam_len):
                continue
            found = self.look_up(prompt, i)
            if found.variant is None or found.share_to_compute or found.variant.generation:
                need = self.need(prompt, i)
                yield Missing(i, need, self._held(key, need, found))

    def _held(self, key: bytes, need: Need, found: Lookup) -> Held:
        """What the pool has of a chunk, to compare with the variants of tiers."""
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
        """Decides whether a variant from a tier goes into the pool; None = the pool has one as good, or refuses it.

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
        """Notes that an accepted variant lies in `home`; the index must not have changed since `accept`."""
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

    def awaits_scores(self, options: RequestOptions) -> bool:
        """Whether the process that tokenizes asks the selector for a request with these options."""
        return asks_selector(options, self._settings.default_method, self._settings.default_ratio)

    def has_prepared(self, prompt: ChunkPrompt, chunk: int) -> bool:
        return self._retention.has_prepared(prompt, chunk)

    def plan(
        self,
        prompt: ChunkPrompt,
        *,
        prompt_len: int,
        prefix_len: int,
        max_prefix_len: int,
        limit_reason: str = "prompt_end",
        decision: Decision | None = None,
        reasons: Mapping[bytes, str] = _NO_REASONS,
        num_generated: int = 0,
    ) -> RecomputePlan:
        """Decides what happens to every token of a prompt; the same plan until index, store or an argument change.

        Args:
            prefix_len, max_prefix_len, limit_reason: as in `make_plan`.
            decision: what the controller of the target chose, instead of the server's method and ratio.
            reasons: by chunk key, why a chunk that the pool does not have could not be loaded from a tier.
            num_generated: generated tokens at the end of the prompt, if the request was retracted.
        """
        settings, no_load = self._settings, "unsupported" if prompt.unsupported else None
        if decision is not None and decision.step is not None:
            settings = replace(settings, default_method=decision.step.method, default_ratio=decision.step.ratio)
        elif decision is not None:
            no_load = no_load or "target"
        method, ratio = settings.default_method, settings.default_ratio
        asked = prompt_len, prefix_len, max_prefix_len, limit_reason, method, ratio, reasons, prompt.answer, no_load
        memo = prompt.memo
        if memo.plan is not None and memo.plan_of == (self._version, asked):
            return memo.plan
        opts = prompt.options
        question = question_of(opts.spans, prompt_len - num_generated, opts.answer_tokens)
        if num_generated:  # not part of the question, so that the same rows are chosen as before
            opts = replace(opts, answer_tokens=opts.answer_tokens + num_generated)
        lookups: list[Lookup | None] = [
            self._look_up_below(prompt, i, reasons) if opts.mode != "off" and end > prefix_len else None
            for i, (_, end) in enumerate(opts.spans)
        ]
        memo.plan = make_plan(
            opts,
            settings,
            prompt_len=prompt_len,
            prefix_len=prefix_len,
            max_prefix_len=max_prefix_len,
            lookups=lookups,
            chunk_keys=prompt.keys,
            rankings=self._rankings(prompt, method, lookups, question),
            limit_reason=limit_reason,
            selector_reason=self._selector_reason(prompt, method),
            rope_starts=prompt.rope_starts,
            images=prompt.images,
        )
        if no_load is not None:
            memo.plan = replan_without_load(memo.plan, no_load)
        memo.plan_of = self._version, asked
        return memo.plan

    def plan_kept(self, prompt: ChunkPrompt, prompt_len: int) -> KeptTokens | None:
        """What decoding keeps of a prompt, by its own `keep_tokens` or the server's; None = all of it."""
        if prompt.unsupported:
            return None
        asked = prompt.options.keep_tokens
        return plan_kept(prompt.options.spans, self.config.keep_tokens if asked is None else asked, prompt_len)

    def without_load(self, plan: RecomputePlan, reason: str, begin: int | None = None) -> RecomputePlan:
        """The plan of a prompt whose chunks could not be brought in after all, or not from `begin` on."""
        return replan_without_load(plan, reason, begin)

    def is_stored(self, plan: RecomputePlan) -> bool:
        """Whether all that a plan of an earlier step brings in is still there."""
        hits = [(chunk, self.index.get(chunk.variant_id)) for chunk in plan.chunks if chunk.variant_id is not None]
        return all(v is not None and self.store.resolve(v) >= chunk.src_offset + chunk.num_reused for chunk, v in hits)

    def _look_up_below(self, prompt: ChunkPrompt, chunk: int, reasons: Mapping[bytes, str]) -> Lookup:
        found = self.look_up(prompt, chunk)
        reason = None if found.variant is not None else reasons.get(prompt.keys[chunk])
        return found if reason is None else NOTHING[reason]

    def _selector_reason(self, prompt: ChunkPrompt, default: str) -> str | None:
        """Why a method that asks the selector has no scores; None if it has, or does not ask."""
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
        """Rankings by words of the question; computed once, as all plans of a prompt have the same question."""
        memo = prompt.memo
        if memo.words is None and prompt.token_ids is not None:
            memo.words = self._words.rankings(prompt.token_ids, prompt.options.spans, question)
        return memo.words

    def sources(self, plan: RecomputePlan) -> list[tuple[ChunkPlan, Variant]]:
        """The hits of a plan, each with the variant that it brings in; the index must still have all of these."""
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
        """Eviction priority of the tree nodes that hold a variant; None where only the last use counts."""
        return int(self.index.worth(variant)) if self._is_by_frequency else None

    def new_priority(self, priority: int) -> int:
        """Eviction priority of new KV: by frequency it goes before KV reused lately, not before all ever reused.

        Args:
            priority: of the request; it counts only where that is the order of the tree.
        """
        return int(self.index.age) if self._is_by_frequency else priority

    def num_kept_tokens(self, capacity: int) -> int:
        """Tokens that requests leave to stored chunks: `ROOM_PER_REUSED` per reused one, at most `keep_share`."""
        return min(int(self.config.keep_share * capacity), ROOM_PER_REUSED * self.index.num_reused_tokens)

    def takes_kept_room(self, num_tokens: int, num_free: int, capacity: int) -> bool:
        """Whether a request of `num_tokens` has reused chunks evicted, if all requests have `num_free` tokens left.

        Without this a burst fills the KV pool with running requests, each finds fewer chunks, computes more, and stays
        longer: throughput falls where load is highest. A request that would have no room beside the chunks even if it
        ran alone is admitted: it would otherwise wait until the server is empty.
        """
        num_kept = self.num_kept_tokens(capacity)
        return num_tokens <= capacity - num_kept and num_free - num_tokens < num_kept

    # What is kept of it (see `Retention`).

    def remember_exact(
        self,
        prompt: ChunkPrompt,
        plan: RecomputePlan | None,
        *,
        in_tree: int,
        up_to: int,
        soundness: Soundness = SOUND,
    ) -> Iterator[Keep | Forgo]:
        actions = self._retention.remember_exact(prompt, plan, in_tree=in_tree, up_to=up_to)
        return self._retention.without_unsound(prompt, plan, actions, soundness)

    def remember_fused(
        self, prompt: ChunkPrompt, plan: RecomputePlan, *, up_to: int, soundness: Soundness = SOUND
    ) -> Iterator[Keep | Forgo]:
        actions = self._retention.remember_fused(prompt, plan, up_to=up_to)
        return self._retention.without_unsound(prompt, plan, actions, soundness)

    def complete(
        self, prompt: ChunkPrompt, keep: Keep, home: Home, statistics: ChunkStatistics | None = None
    ) -> Variant | None:
        return self._retention.complete(prompt, keep, home, statistics)

    def promote(self, plan: RecomputePlan) -> Iterator[Promote]:
        """Yields popular variants of this plan that lie in a cold path, to copy them to homes of their own.

        A path is cold for a variant if popular variants have less than half of its tokens up to the end of this one.
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
            is_cold = 2 * popular_lens[path] < variant.path_start + variant.length
            if is_cold and self.store.resolve(variant) == variant.length:
                yield Promote(variant, max(self.new_priority(0), self.priority(variant) or 0))
                popular_lens.clear()  # carrying it out may have moved or evicted others

    def complete_promote(self, promotion: Promote, home: Home) -> None:
        """Notes that the KV of a promoted variant lies in `home`."""
        self.index.move(promotion.variant, home)

    def evicted(self, num_tokens: int, capacity: int) -> None:
        """Notes that the store of `capacity` tokens has evicted `num_tokens`."""
        self.index.advance_age(num_tokens / capacity)
        self.index.sweep(self.store.resolve, num_tokens)

    def check_integrity(self) -> None:
        """Recomputes the index from scratch.

        Raises:
            AssertionError: it contradicts itself or the store.
        """
        self.index.check_integrity(self.store.resolve)
