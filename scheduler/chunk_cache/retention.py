"""Retention: what is kept of a prompt that was computed.

    remember_exact, remember_fused   decide which of its chunks, and where
    complete                         notes that a chunk lies in its home now

The deciding ones are generators: the caller carries out and reports one action before it asks for the next.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from chunk_cache.actions import Forgo, Keep
from chunk_cache.index.chunk_index import ChunkIndex
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.lookup import Lookup, Resolve
from chunk_cache.index.system_prompt import num_pieces
from chunk_cache.index.variant import Home, Variant, usable_len
from chunk_cache.options.config import Config
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.prompt.chunk_prompt import ChunkPrompt

MAX_DERIVED_SHARE = 0.25
"""Share of the KV pool that derived variants may have; beyond it no fixed chunks are remembered."""


@dataclass(frozen=True)
class Soundness:
    """What the store knows about the KV of a prompt that was computed.

    Attributes:
        lacks_states: for a model with states, whether the effect of a chunk on them is unknown or has no room.
        has_old_prefixes: whether an exact prefix may be KV that was computed with other weights.
    """

    lacks_states: Callable[[int], bool] = lambda chunk: False
    has_old_prefixes: bool = False


SOUND = Soundness()


@dataclass(frozen=True, eq=False)
class Retention:
    """See the head of this file.

    Attributes:
        look_up, stored_len: `look_up` and `_stored_len` of `ChunkManager`.
        capacity: tokens that the store holds; None = any number.
        has_states: as of `PlanSettings`.
    """

    config: Config
    index: ChunkIndex
    resolve: Resolve
    look_up: Callable[[ChunkPrompt, int], Lookup]
    stored_len: Callable[[ChunkPrompt, int], int]
    capacity: int | None
    has_states: bool

    def has_prepared(self, prompt: ChunkPrompt, chunk: int) -> bool:
        """Whether the whole of a chunk is stored as a variant that was prepared in this context."""
        variant = self.index.prepared(prompt.keys[chunk], prompt.system, prompt.context(chunk))
        return variant is not None and self.resolve(variant) == variant.length

    def remember_exact(
        self, prompt: ChunkPrompt, plan: RecomputePlan | None, *, in_tree: int, up_to: int
    ) -> Iterator[Keep | Forgo]:
        """Yields which chunks of an exact prompt to keep, and which not: where possible as spans of its path.

        In mode off none is kept; in modes prepare and warm only the last, in a home of its own.

        Args:
            in_tree: leading tokens of the prompt that its path holds.
            up_to: leading tokens of the prompt that were computed.
        """
        if prompt.to_prepare is not None:
            yield from self._remember_prepared(prompt, prompt.to_prepare, up_to)
            return
        spans = prompt.options.spans if prompt.options.remembers else ()
        exceeds_share = bool(spans) and spans[-1][1] > self.index.quota.path_tokens.most  # the path alone
        for i, (start, end) in enumerate(spans):
            if self._is_untrusted(prompt, i):
                continue
            covered_len = min(end, in_tree) - start
            is_whole = covered_len == end - start
            if exceeds_share:
                yield Forgo(i, "partition_share")
            elif is_whole or (usable_len(covered_len, end - start) and not self.has_states):
                # A part of a chunk is kept only if it is longer than what is stored already; with states one variant
                # is enough, in whatever context.
                if (is_whole and not self.has_states) or self.stored_len(prompt, i) < covered_len:
                    yield Keep(i, generation=0, in_path=True)
            elif end <= up_to and self._is_new(prompt, i, 0, plan):
                # The last page of a path is not stored: a short chunk at its end would be lost.
                yield Keep(i, generation=0, in_path=False)

    def remember_fused(self, prompt: ChunkPrompt, plan: RecomputePlan, *, up_to: int) -> Iterator[Keep | Forgo]:
        """Yields which chunks of a fused prompt to keep, in homes of their own: those that it had to compute.

        With `remember: contexts` also those that it fixed for its context, unless too much of the pool is derived
        already. In mode prepare only the last chunk, as a prepared variant.

        Of a prompt whose keys are not at their positions (`shift` 0) nothing approximate is kept. Nor of one with
        `drift`, where others must not steer by texts: all chunks learn from the texts behind them, too.
        """
        if prompt.to_prepare is not None:
            yield from self._remember_prepared(prompt, prompt.to_prepare, up_to)
            return
        generation = 0
        # The effect of a chunk on states is known only if it was computed whole.
        fixes = self.config.remember == "contexts" and plan.num_recomputed > 0 and not self.has_states
        learns_from_behind = plan.selection is not None and plan.selection.drift > 0.0
        is_own_only = not plan.is_shifted or (learns_from_behind and self.config.system_prompts == "same")
        for i, chunk in enumerate(plan.chunks):
            if chunk.generation is not None and plan.ratio < 1.0:
                generation = max(generation, 1 + chunk.generation)
            is_fixed = fixes and bool(chunk.unit_cfo)
            if chunk.end > up_to or not (chunk.is_to_remember or is_fixed) or (generation and is_own_only):
                continue
            if self._is_untrusted(prompt, i):
                continue
            if generation > self.config.max_generation:
                yield Forgo(i, "generation_limit")
            elif is_fixed and self._is_wanted(prompt, i, generation):
                derived_len = self.index.num_derived_tokens + prompt.length(i)
                if self.capacity is None or derived_len <= MAX_DERIVED_SHARE * self.capacity:
                    yield Keep(i, generation, in_path=False, fixed=chunk.variant_id)
                else:
                    yield Forgo(i, "memory")
            elif not is_fixed and self._is_new(prompt, i, generation, plan):
                yield Keep(i, generation, in_path=False)

    def without_unsound(
        self,
        prompt: ChunkPrompt,
        plan: RecomputePlan | None,
        actions: Iterable[Keep | Forgo],
        soundness: Soundness,
    ) -> Iterator[Keep | Forgo]:
        """The same actions, but chunks whose KV would be of no use, or wrong, are not kept."""
        for action in actions:
            start, _ = prompt.options.spans[action.chunk]
            if isinstance(action, Forgo):
                yield action
            elif soundness.lacks_states(action.chunk):
                yield Forgo(action.chunk, "states")
            elif soundness.has_old_prefixes and (plan is None or start < plan.prefix_len):
                yield Forgo(action.chunk, "weights_changed")
            else:
                yield action

    def complete(
        self, prompt: ChunkPrompt, keep: Keep, home: Home, statistics: ChunkStatistics | None = None
    ) -> Variant | None:
        """Notes that a kept chunk lies in `home`; returns its variant, or None if the index refused it after all.

        Args:
            statistics: None = none were taken; a fixed chunk then has those of the variant that was fixed.
        """
        source = None if keep.fixed is None else self.index.get(keep.fixed)
        if statistics is None and source is not None and source.statistics is not None:
            statistics = source.statistics.behind(len(prompt.context(keep.chunk)), num_pieces(prompt.system))
        return self.index.add(
            prompt.keys[keep.chunk],
            length=prompt.length(keep.chunk),
            start=prompt.rope_start(keep.chunk),
            generation=keep.generation,
            context=prompt.context(keep.chunk),
            prompt_keys=prompt.all_pieces,
            system=prompt.system,
            home=home,
            statistics=statistics,
            is_prepared=keep.is_prepared,
        )

    def _remember_prepared(self, prompt: ChunkPrompt, chunk: int, up_to: int) -> Iterator[Keep | Forgo]:
        """Keeps the chunk as prepared in this context, unless it is stored so already."""
        generation = int(prompt.options.mode == "prepare")  # at any ratio
        if prompt.options.spans[chunk][1] > up_to or self.has_prepared(prompt, chunk):
            return
        if self.config.max_generation < generation:
            yield Forgo(chunk, "generation_limit")
        elif self._is_wanted(prompt, chunk, generation, is_prepared=True):
            yield Keep(chunk, generation, in_path=False, is_prepared=True)

    def _is_new(self, prompt: ChunkPrompt, chunk: int, generation: int, plan: RecomputePlan | None) -> bool:
        """Whether the index wants a chunk, and no other request or earlier occurrence has stored it meanwhile.

        A chunk that was computed because of its CFO is new unless a variant without CFO in this context is stored.
        """
        found = self.look_up(prompt, chunk)
        if found.covered_len == prompt.length(chunk):
            is_costly = plan is not None and plan.chunks[chunk].reason == "high_cfo"
            if not is_costly or found.unit_cfo == 0.0:
                return False
        return self._is_wanted(prompt, chunk, generation)

    def _is_untrusted(self, prompt: ChunkPrompt, chunk: int) -> bool:
        """Whether no request may use a chunk as it stands in this prompt (`trust`), and it is stored already: the first
        such variant is kept only so that replies say why the chunk is not used."""
        is_behind = self.config.is_trust_limited and bool(prompt.context(chunk))
        return is_behind and bool(self.index.variants_of(prompt.keys[chunk]))

    def _is_wanted(self, prompt: ChunkPrompt, chunk: int, generation: int, *, is_prepared: bool = False) -> bool:
        return self.index.wants(
            prompt.keys[chunk],
            start=prompt.rope_start(chunk),
            generation=generation,
            context=prompt.context(chunk),
            system=prompt.system,
            is_prepared=is_prepared,
        )
