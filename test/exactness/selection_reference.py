"""Selective recomputation, slow and obvious: what every method should give, in numpy fp64 from the papers' formulas.

`Store` replays requests in the order in which a server got them: it keeps every chunk that was computed, and `execute`
gives the next token's log-probabilities, what was selected, and what was dropped where.

Shares nothing with the server but the decisions of the host: which tokens were brought in, and how many rows run at a
layer (`chunk_cache`). Positions are prompt positions everywhere; ties go to the earlier one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from chunk_cache.keys import Partition, chunk_key
from chunk_cache.methods import METHODS, Stage, num_rows_at
from chunk_cache.methods.base import AllReused
from chunk_cache.plan.question_words import QuestionWords
from exactness.numpy_decoder import Array, Decoder, Forward
from local_scheduler import selector_scores

Scores: TypeAlias = dict[int, float]
"""Score of each candidate by its prompt position."""
Choose: TypeAlias = Callable[[int, Scores, int], frozenset[int]]
"""(layer, scores, count) -> the positions that stay."""

BEFORE_LAYERS = -1
"""The layer that a choice names which was made before layer 0, on the host or by a first pass of the question."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """A chunk as it was computed: at `start`, behind whatever stood there, which was exact or not."""

    start: int
    is_exact: bool
    k: Array  # [num_layers, chunk_len, num_kv_heads, head_dim], rotated at the positions it was computed at
    v: Array
    outside: Array  # [chunk_len]
    received: Array
    context: tuple[tuple[int, ...], ...]  # what stood in front of it, as `pieces_before` names it
    inter: Array  # [len(context)], of the whole chunk
    cci: float
    system: tuple[int, ...]  # tokens in front of the first chunk
    on_system: Array  # [len(system)], the mean over the chunk's tokens

    def cfo(self, new_context: Sequence[tuple[int, ...]], new_system: tuple[int, ...], alpha: float) -> float:
        """Cache-Craft eq. 6 to 8 and 12, from their words, and what the chunk gave to what is another system prompt.

        But what was computed alone costs 1 behind anything (`docs/variants.md`).
        """
        ends = [{1, *range(64, len(s), 64), len(s)} for s in (self.system, new_system)]  # of their pieces
        same = max((end for end in ends[0] & ends[1] if self.system[:end] == new_system[:end]), default=0)
        return alpha * (self.context_cfo(new_context) + float(self.on_system[same:].sum()))

    def context_cfo(self, new_context: Sequence[tuple[int, ...]]) -> float:
        if not self.context:
            return float(len(new_context) > 0)
        is_common = [chunk in new_context for chunk in self.context]
        beta = sum(self.inter[is_common]) / sum(self.inter)
        common = [chunk for chunk in dict.fromkeys(self.context) if chunk in new_context]
        pairs = [(a, b) for i, a in enumerate(common) for b in common[i + 1 :]]
        discordant = [(a, b) for a, b in pairs if new_context.index(a) > new_context.index(b)]
        gamma = len(discordant) / len(pairs) if pairs else 0.0
        return self.cci * (1.0 - beta * (1.0 - gamma))


def pieces_before(
    ids: Sequence[int], spans: Sequence[Sequence[int]], start: int
) -> list[tuple[tuple[int, ...], tuple[int, int]]]:
    """What stands between the system prompt and a position: chunks, and texts between them, each with the chunk before.

    Returns:
        tokens, and where it lies.
    """
    found = []
    earlier = [span for span in spans if span[1] <= start]
    starts = [span[0] for span in earlier] + [start]
    for (a, b), behind in zip(earlier, starts[1:], strict=True):
        found.append((tuple(ids[a:b]), (a, b)))
        if b < behind:
            found.append((tuple(ids[a:behind]), (b, behind)))
    return found


@dataclass(frozen=True)
class Hit:
    """The reused part `[dst_start, dst_end)` of the chunk at `[start, end)`."""

    start: int
    end: int
    dst_start: int
    dst_end: int

    @property
    def positions(self) -> range:
        return range(self.dst_start, self.dst_end)


@dataclass
class Result:
    """What one request gives."""

    log_probs: Array
    """Of the token behind the prompt."""
    k: Array
    """What the cache holds of the prompt afterwards; `[num_layers, prompt_len, num_kv_heads, head_dim]`, like V."""
    v: Array
    is_filtering: bool = False
    """Whether anything is chosen or dropped in the forward."""
    selected: frozenset[int] = frozenset()
    """Reused positions that were chosen, by the first choice where there are several."""
    rows_at: list[frozenset[int]] = field(default_factory=list)
    """Reused positions whose attention runs in the forward of the answer, by layer."""
    num_asked_layers: int = 0
    """The first layers, which a forward in front of it has run for all reused positions."""
    scores_at: dict[int, Scores] = field(default_factory=dict)
    """What a choice at a layer was made from."""
    settled_at: int | None = None
    """The layer after which the focus settled, and on which chunks."""
    focused: frozenset[int] | None = None
    chunk_mass_at: list[Array] = field(default_factory=list)
    """Per layer the mass of the question on each chunk of the prompt, summed up to that layer."""
    cfo: dict[int, float] = field(default_factory=dict)
    """CFO of the variant that each reused chunk came from, by the chunk's start."""
    lowest_cfo: dict[int, float] = field(default_factory=dict)
    """And the lowest of all exact variants, where the chunk is reused whole."""

    def dropped_at(self) -> dict[int, frozenset[int]]:
        """Selected positions that leave before the attention of a layer."""
        dropped, running = {}, self.selected
        for layer, rows in enumerate(self.rows_at):
            if running - rows and not rows - running:
                dropped[layer] = running - rows
                running = rows
        return dropped


def best(layer: int, scores: Scores, count: int) -> frozenset[int]:
    """The `count` best; ties go to the earlier position."""
    return frozenset(sorted(scores, key=lambda position: (-scores[position], position))[:count])


class Store:
    """Chunks as a server has computed them, and what it should answer."""

    def __init__(self, model: Decoder, *, statistics_layers: Sequence[int] | None = None, page_size: int = 1) -> None:
        self.model = model
        self.page_size = page_size  # without pages the server stores every chunk to its last token
        self._statistics_layers = range(model.num_layers) if statistics_layers is None else statistics_layers
        self._chunks: dict[tuple[int, ...], list[Chunk]] = {}

    def execute(
        self,
        ids: Sequence[int],
        request: dict[str, Any],
        info: dict[str, Any],
        choose: Choose = best,
        first_step_end: int | None = None,
    ) -> Result:
        """What one request gives; the chunks that it computes are kept.

        Args:
            ids: the prompt.
            request: the object of `custom_params.chunk_cache`; method and ratio are given.
            info: the server's reply object with `explain`, of which only the layout is read: exact prefix, and per
                chunk what was brought in from where.
            choose: replaces `best`, so that a near tie can be followed either way.
            first_step_end: how far the first step of chunked prefill came; None = to the end.
        """
        return _Execution(self, ids, request, info, choose, first_step_end).run()

    def full(self, ids: Sequence[int]) -> Result:
        """A full prefill."""
        k, v = self.empty(len(ids))
        return Result(self._run(ids, k, v, range(len(ids))), k, v)

    def decode(self, result: Result, ids: Sequence[int], token: int) -> Array:
        """Log-probabilities of the token behind `token`, which was generated behind the prompt `ids`."""
        k, v = self.empty(len(ids) + 1)
        k[:, :-1], v[:, :-1] = result.k, result.v
        return self._run([*ids, token], k, v, [len(ids)])

    def _run(self, ids: Sequence[int], k: Array, v: Array, rows: Sequence[int]) -> Array:
        forward = Forward(self.model, ids, k, v, rows)
        for _ in range(self.model.num_layers):
            forward.attend()
        return forward.log_probs()

    def empty(self, length: int) -> tuple[Array, Array]:
        """K and V with nothing in them: reading what was never written shows as NaN."""
        shape = (self.model.num_layers, length, self.model.num_kv_heads, self.model.head_dim)
        return np.full(shape, np.nan), np.full(shape, np.nan)

    def find(
        self,
        ids: Sequence[int],
        start: int | None,
        context: Sequence[tuple[int, ...]],
        system: tuple[int, ...],
        *,
        is_exact: bool,
    ) -> Chunk:
        """The chunk as computed at `start`, where it fits best; None = wherever it was computed."""
        stored = [c for c in self._chunks[tuple(ids)] if c.is_exact == is_exact and start in (c.start, None)]
        return min(stored, key=lambda c: c.cfo(context, system, 1.0))

    def exact_chunks(self, ids: Sequence[int]) -> list[Chunk]:
        """All that was computed of a chunk behind exact KV."""
        return [c for c in self._chunks[tuple(ids)] if c.is_exact]

    def keep(self, ids: Sequence[int], span: Sequence[int], spans: Sequence[Sequence[int]], run: _Execution) -> None:
        """Keeps the chunk at `span` of a prompt that was computed now; tokens in the exact prefix get no statistics."""
        start, end = span
        in_tree = (len(ids) + 1) // self.page_size * self.page_size  # the answers of the cases have two tokens
        if not run.hits and end > in_tree and tuple(ids[start:end]) in self._chunks:
            return  # the end of its path is not stored, and the chunk is
        if run.hits and self.page_size == 1 and tuple(ids[start:end]) in self._chunks:
            return  # another request of its batch has stored it meanwhile
        mean = np.mean([run.mean_weights[layer] for layer in self._statistics_layers], axis=0)
        rows = mean[start:end]
        earlier = pieces_before(ids, spans, start)
        places = [place for _, place in earlier]
        outside = sum((rows[:, a:b].sum(axis=1) for a, b in places or [(0, start)]), np.zeros(end - start))
        own = np.tril(rows[:, start:end], k=-1)
        received = np.where(np.isnan(outside), np.nan, own.sum(axis=0))
        k, v = run.k[:, start:end].copy(), run.v[:, start:end].copy()
        # An alpha that asks for every token leaves nothing reused.
        is_whole = "alpha" in run.options_given and run.result.selected == run.reused
        is_exact = is_whole or all(hit.start > start for hit in run.hits)
        computed = ~np.isnan(outside)
        # Sums over the tokens that were computed, as if the others were like them.
        scale = (end - start) / computed.sum()
        inter = np.array([rows[computed, a:b].sum() for a, b in places]) * scale
        intra = own[computed].sum() * scale
        outer = sum(mass / ((end - start) * (b - a)) for mass, (a, b) in zip(inter, places, strict=True))
        cci = 0.5 if not earlier else 1 / (1 + math.exp(-outer / (intra / (end - start) ** 2))) if intra else 1.0
        first = spans[0][0]
        system, on_system = tuple(ids[:first]), rows[computed, :first].mean(axis=0)
        context = tuple(tokens for tokens, _ in earlier)
        chunk = Chunk(start, is_exact, k, v, outside, received, context, inter, cci, system, on_system)
        stored = self._chunks.setdefault(tuple(ids[start:end]), [])
        if not any((c.start, c.is_exact, c.system, c.context) == (start, is_exact, system, context) for c in stored):
            stored.append(chunk)


class _Execution:
    """One request."""

    def __init__(
        self,
        store: Store,
        ids: Sequence[int],
        request: dict[str, Any],
        info: dict[str, Any],
        choose: Choose,
        first_step_end: int | None,
    ) -> None:
        self.store, self.model, self.ids = store, store.model, list(ids)
        self.method = METHODS[request["method"]]
        self.options = self.method.check_options(request.get("options", {}), "options")
        self.options_given = request.get("options", {})
        self.ratio = self.method.effective_ratio(request.get("ratio"), 0.0)
        self.spans: list[list[int]] = request["spans"]
        self.infos: list[dict[str, Any]] = info["chunks"]
        self.prefix_len: int = info["prefix_tokens"]
        self.choose = choose
        self.hits = [
            Hit(c["start"], c["end"], first, first + c["reused_tokens"])
            for c in self.infos
            if c["reused_tokens"]
            for first in [max(c["start"], self.prefix_len)]
        ]
        self.reused = frozenset(p for hit in self.hits for p in hit.positions)
        # Rows that no method may drop: missing chunks, unmarked text, the question.
        self.always = frozenset(range(self.prefix_len, len(ids))) - self.reused
        asked_end = first_step_end or len(ids)  # what chunked prefill leaves to later steps does not ask
        start = min(self.spans[-1][1] if self.spans else 0, len(ids) - 1)
        self._answer_start = max(len(ids) - request.get("answer_tokens", 0), start + 1)
        self.question = range(min(start, asked_end - 1), min(self._answer_start, asked_end))
        self.k, self.v = store.empty(len(ids))
        self.mean_weights = np.full((self.model.num_layers, len(ids), len(ids)), np.nan)
        self.result = Result(np.empty(0), self.k, self.v)
        self._leaving: dict[int, frozenset[int]] = {}
        self._focused_sets: list[frozenset[int]] = []
        self._chunk_mass = np.zeros(len(self.spans))

    def run(self) -> Result:
        self._assemble()
        segments = self._segments()
        budgets = [num_rows_at(self.ratio, len(segment)) for segment in segments]
        stage = self.method.stage
        if stage is Stage.BEFORE:
            rows = self.result.selected = self._ranked()
            is_filtering = 0 < len(rows) < len(self.reused)  # a budget below 1 may be rounded up to everything
        else:
            rows = self.reused if sum(budgets) else frozenset()
            is_filtering = 0 < sum(budgets) < len(self.reused)
            if not is_filtering:
                self.result.selected = rows
            elif stage is Stage.QUESTION:
                rows = self._ask(segments, budgets)
            elif self.method.name == "a3":
                rows = self._ask_with_all(segments, budgets)
        is_late = stage is not Stage.BEFORE or self._option("focus_window") > 0 or self._option("drift") > 0
        self.result.is_filtering = is_filtering and is_late
        forward = Forward(self.model, self.ids, self.k, self.v, sorted(rows | self.always))
        for layer in range(self.model.num_layers):
            forward.drop(self._leaving.pop(layer, frozenset()))
            if is_filtering and self.method.name == "cacheblend":
                self._filter(forward, segments)
            self.result.rows_at.append(forward.positions & self.reused)
            if is_filtering and self._option("drift"):
                self._correct(forward)
            if is_filtering and self._option("focus_window"):
                self._focus(forward)
            self.mean_weights[layer][forward.rows] = forward.attend().mean(axis=1)
        if is_filtering and not self.result.selected:  # fewer were left at the check layer than it wants to keep
            self.result.selected = self.result.rows_at[self._option("check_layer")]
        self.result.log_probs = forward.log_probs()
        for span, info in zip(self.spans, self.infos, strict=True):
            # A prompt with nothing brought in is exact: all its chunks are kept as they stand there.
            if info["status"] == "miss" or (not self.hits and span[1] > self.prefix_len):
                self.store.keep(self.ids, span, self.spans, self)
        return self.result

    def _option(self, name: str) -> Any:
        return self.method.option(self.options, name)

    def _assemble(self) -> None:
        """The exact prefix, and the reused part of every hit with K turned to its new positions."""
        prefix = self.ids[: self.prefix_len]
        if prefix:
            exact = self.store.full(prefix)
            self.k[:, : len(prefix)], self.v[:, : len(prefix)] = exact.k, exact.v
        for hit in self.hits:
            chunk = self._stored(hit)
            part = slice(hit.dst_start - hit.start, hit.dst_end - hit.start)
            shift = np.full(len(hit.positions), (hit.start - chunk.start) * self._option("shift"))
            for layer in range(self.model.num_layers):
                self.k[layer, hit.positions] = self.model.rotate(chunk.k[layer, part], shift)
                self.v[layer, hit.positions] = chunk.v[layer, part]
                self._round(layer)

    def _round(self, layer: int) -> None:
        """K and V as the cache holds them; what it held before stays."""
        self.k[layer], self.v[layer] = self.model.stored(layer, self.k[layer], self.v[layer])

    def _stored(self, hit: Hit) -> Chunk:
        info = next(info for info in self.infos if info["start"] == hit.start)
        start = hit.start - info["shift"] if self._option("shift") else None
        context = [tokens for tokens, _ in pieces_before(self.ids, self.spans, hit.start)]
        system, ids = tuple(self.ids[: self.spans[0][0]]), self.ids[hit.start : hit.end]
        found = self.store.find(ids, start, context, system, is_exact=info["generation"] == 0)
        if start is not None:  # without a shift the reply does not tell where the variant was computed
            alpha = self._option("alpha") if "alpha" in self.options_given else 1.0
            self.result.cfo[hit.start] = found.cfo(context, system, alpha)
            if self.store.page_size == 1 and info["reused_tokens"] == hit.end - hit.start:
                self.result.lowest_cfo[hit.start] = min(
                    (c.cfo(context, system, alpha) for c in self.store.exact_chunks(ids)), default=math.inf
                )
        return found

    def _segments(self) -> list[frozenset[int]]:
        """Reused positions that share one budget."""
        if self.method.stage is Stage.BEFORE or self._option("top_k") == "chunk":
            return [frozenset(hit.positions) for hit in self.hits]
        return [self.reused]

    def _block(self, position: int) -> tuple[int, int]:
        """The chunk and the block of it that a reused token lies in."""
        (hit,) = (hit for hit in self.hits if position in hit.positions)
        return hit.start, (position - hit.start) // (self._option("block_size") or 1)

    def _by_block(self, scores: Scores) -> Scores:
        """Ours: a token counts as much as those of its block that have a score, on average."""
        if not self._option("block_size") or self.method.name in ("epic", "lego-link"):
            return scores
        members: dict[tuple[int, int], list[float]] = {}
        for p, score in scores.items():
            members.setdefault(self._block(p), []).extend([score] if score > -math.inf else [])
        return {p: float(np.mean(members[self._block(p)] or -math.inf)) for p in scores}

    # Before the forward.

    def _ranked(self) -> frozenset[int]:
        selected: frozenset[int] = frozenset()
        if self.method.name in ("near", "near-words") and self.hits and "alpha" not in self.options_given:
            chosen = self._rows_of_all()
            for hit in self.hits:
                selected |= self._without_lonely(hit, chosen & frozenset(hit.positions))
            return selected
        if self.method.name == "cacheclip" and self._option("top_k") == "global":
            scores = {p: one for hit in self.hits for p, one in zip(hit.positions, self._ranking(hit), strict=True)}
            count = num_rows_at(self.ratio, len(scores))
            chosen = self.choose(BEFORE_LAYERS, self._by_block(scores), count) if scores else selected
            for hit in self.hits:
                selected |= self._without_lonely(hit, chosen & frozenset(hit.positions))
            return selected
        for hit in self.hits:
            count = num_rows_at(self._budget(hit), len(hit.positions))
            ranking = self._ranking(hit)
            scores = self._by_block(dict(zip(hit.positions, ranking, strict=True)))
            chosen = self.choose(BEFORE_LAYERS, scores, count)
            self.result.scores_at.setdefault(BEFORE_LAYERS, {}).update(zip(hit.positions, ranking, strict=True))
            selected |= self._without_lonely(hit, chosen)
        return selected

    def _without_lonely(self, hit: Hit, chosen: frozenset[int]) -> frozenset[int]:
        """What grouping leaves of a chunk; of one that is chosen whole all."""
        return chosen if len(chosen) == len(hit.positions) else chosen - self._lonely(hit, chosen)

    def _rows_of_all(self) -> frozenset[int]:
        """What the host decides for all chunks at once."""
        question = min(self.spans[-1][1], len(self.ids) - 1), self._answer_start
        each = QuestionWords().rankings(self.ids, [(a, b) for a, b in self.spans], question)
        worth = {a + i: one for (a, _), ranking in zip(self.spans, each, strict=True) for i, one in enumerate(ranking)}
        positions = [p for hit in self.hits for p in hit.positions]
        ranking = np.array([worth[p] for p in positions], dtype=np.float32)
        numbers: dict[tuple[int, int], int] = {}
        blocks = np.array([numbers.setdefault(self._block(p), len(numbers)) for p in positions])
        spans = [(hit.dst_start, hit.dst_end) for hit in self.hits]
        is_blocked = bool(self._option("block_size"))
        reused = AllReused(spans, question[0], ranking=ranking, blocks=blocks if is_blocked else None)
        return frozenset(positions[row] for row in self.method.rows_of_all(self.ratio, reused).tolist())

    def _budget(self, hit: Hit) -> float:
        """The share of a chunk that is recomputed, of a method that chooses before the forward."""
        if self.options_given.get("ends"):
            return min(1.0, 2 * self.options_given["ends"] / len(hit.positions))
        if not self.options_given.get("alpha"):
            return self.ratio
        self._stored(hit)
        return min(1.0, self.result.cfo[hit.start])

    def _ranking(self, hit: Hit) -> Sequence[float]:
        """A number per reused token of the chunk, the largest are taken."""
        part = slice(hit.dst_start - hit.start, hit.dst_end - hit.start)
        if self.method.name == "h2o":
            return _ranks(self._stored(hit).received[part])
        if self.method.name == "cache-craft":
            return _ranks(self._stored(hit).outside[part])
        if self.method.name == "cacheclip":
            return [float(one) for one in selector_scores(self.ids)[hit.dst_start : hit.dst_end]]
        if self.method.name == "random":
            key = chunk_key(Partition(), self.ids[hit.start : hit.end])
            drawn = self.method.rows_for_chunk(
                hit.dst_start - hit.start,
                len(hit.positions),
                self._budget(hit),
                seed=self._option("seed"),
                chunk_key=key,
                blocks=np.array([self._block(p)[1] - self._block(hit.dst_start)[1] for p in hit.positions]),
            )
            return [float(i in drawn) for i in range(len(hit.positions))]
        if self.method.name == "lego-link":  # in turns one of the front and one of the end
            return [-2.0 * min(i, len(hit.positions) - 1 - i + 0.5) for i in range(len(hit.positions))]
        return [0.0] * len(hit.positions)  # the first tokens

    # During the forward.

    def _filter(self, forward: Forward, segments: list[frozenset[int]]) -> None:
        """At the check layer and behind it: the best of the rows that are left stay."""
        layer, check_layer = forward.layer, self._option("check_layer")
        if layer < check_layer:
            return
        here = forward.positions & self.reused
        scores = self._deviation(forward)
        kept: frozenset[int] = frozenset()
        for segment in segments:
            count = self.method.layer_counts(len(segment), self.ratio, self.model.num_layers, self.options)[layer]
            left = segment & here
            if count < len(left):
                self.result.scores_at[layer] = {p: scores[p] for p in here}
                left = self.choose(layer, self._by_block({p: scores[p] for p in left}), count)
            kept |= left
        if kept != here and not self.result.selected:
            self.result.selected = kept
            self._group(layer, kept)
        forward.drop(here - kept)

    def _deviation(self, forward: Forward) -> Scores:
        """CacheBlend section 4.3: squared distance of the new K and V from the reused ones, over all heads."""
        _, k, v = forward.project()
        old_k, old_v = self.k[forward.layer, forward.rows], self.v[forward.layer, forward.rows]
        deviation = ((v - old_v) ** 2).sum(axis=(1, 2))
        if self._option("deviation") == "kv":
            deviation += ((k - old_k) ** 2).sum(axis=(1, 2))
        return {p: float(d) for p, d in zip(forward.rows.tolist(), deviation, strict=True) if p in self.reused}

    def _attended(self, forward: Forward, keys: Array | None = None) -> Array:
        """What the question gives each of the keys, `[num_question, num_heads, prompt_len]`.

        None = those of the cache, with the true K of all rows.
        """
        q, k, _ = forward.project()
        if keys is None:
            keys = self.k[forward.layer].copy()
            keys[forward.rows] = k
        is_asking = np.isin(forward.rows, self.question)
        return self.model.weights(forward.layer, q[is_asking], forward.rows[is_asking], keys)

    def _ask(self, segments: list[frozenset[int]], budgets: list[int]) -> frozenset[int]:
        """FusionRAG section 3.2: a first pass over the reused cache, of all that no method may drop.

        For InfoFlow KV by squares: the square of the norm over question, heads and layers.
        """
        forward = Forward(self.model, self.ids, self.k, self.v, sorted(self.always))
        scored_layers = self.method.scored_layers(self.options, self.model.num_layers)  # type: ignore[attr-defined]
        mass = np.zeros(len(self.ids))
        for layer in range(self.model.num_layers):
            if layer in scored_layers:
                weights = self._attended(forward)
                mass += (weights**2 if self.method.name == "infoflow" else weights).mean(axis=1).sum(axis=0)
            forward.attend()
        return self._chosen_by_question(mass, BEFORE_LAYERS, segments, budgets)

    def _ask_with_all(self, segments: list[frozenset[int]], budgets: list[int]) -> frozenset[int]:
        """A3 section 3: a first pass over all rows, up to the attention of the check layer.

        Equation 4: there and in front of it K and V of all of them are true, also when the chosen are computed again.
        """
        forward = Forward(self.model, self.ids, self.k, self.v, sorted(self.reused | self.always))
        check_layer = self.result.num_asked_layers = self._option("check_layer")
        for _ in range(check_layer):
            forward.attend()
        _, self.k[check_layer, forward.rows], self.v[check_layer, forward.rows] = forward.project()
        self._round(check_layer)
        mass = self._attended(forward, self.k[check_layer]).mean(axis=1).sum(axis=0)
        return self._chosen_by_question(mass, check_layer, segments, budgets)

    def _chosen_by_question(
        self, mass: Array, layer: int, segments: list[frozenset[int]], budgets: list[int]
    ) -> frozenset[int]:
        scores = {p: float(mass[p]) for p in self.reused}
        self.result.scores_at[layer] = scores
        chosen: frozenset[int] = frozenset()
        for segment, budget in zip(segments, budgets, strict=True):
            chosen |= self.choose(BEFORE_LAYERS, self._by_block({p: scores[p] for p in segment}), budget)
        self.result.selected = chosen
        self._group(BEFORE_LAYERS, chosen)
        return chosen

    def _correct(self, forward: Forward) -> None:
        """Ours: reused tokens that are not computed here change by the mean change of those that are.

        Of their own chunk, with 8 more rows that have the mean of all.
        """
        _, new_k, new_v = forward.project()
        layer, here = forward.layer, forward.positions & self.reused
        if not here:
            return
        zero_k = {p: self.model.rotate(self.k[layer, [p]], np.array([-p]))[0] for p in here}
        change = {
            p: (self.model.rotate(new_k[[i]], np.array([-p]))[0] - zero_k[p], new_v[i] - self.v[layer, p])
            for i, p in enumerate(forward.rows.tolist())
            if p in here
        }
        for part, cache in enumerate((self.k, self.v)):
            overall = np.mean([change[p][part] for p in here], axis=0)
            for hit in self.hits:
                own = [change[p][part] for p in hit.positions if p in here]
                mean = (np.sum(own, axis=0) + 8 * overall) / (len(own) + 8) * self._option("drift")
                for p in hit.positions:
                    if p not in here:
                        cache[layer, p] += self.model.rotate(mean[None], np.array([p]))[0] if part == 0 else mean
        self._round(layer)

    # Rows that leave early.

    def _lonely(self, hit: Hit, chosen: frozenset[int]) -> frozenset[int]:
        """CacheClip section 3.3: chosen tokens of windows in which too few were chosen."""
        size, threshold = self._option("group_size"), self._option("group_threshold")
        lonely: set[int] = set()
        for start in range(hit.start, hit.end, size) if size else ():
            window = range(start, min(start + size, hit.end))
            inside = chosen & frozenset(window)
            if not len(inside) / len(window) > threshold / size:
                lonely |= inside
        return frozenset(lonely)

    def _group(self, layer: int, chosen: frozenset[int]) -> None:
        """What grouping discards runs at the layer that chose it and leaves before the next one's attention."""
        for hit in self.hits:
            self._let_go(layer + 1, self._lonely(hit, chosen))

    def _let_go(self, layer: int, positions: frozenset[int]) -> None:
        """They leave before the attention of that layer."""
        self._leaving[layer] = self._leaving.get(layer, frozenset()) | positions

    def _focus(self, forward: Forward) -> None:
        """Cache-Craft algorithm 1, by the attention of a layer, behind which rows leave."""
        if self.result.settled_at is not None:
            return
        asking = self._attended(forward).mean(axis=1)
        self._chunk_mass = self._chunk_mass + [asking[:, a:b].sum() for a, b in self.spans]
        self.result.chunk_mass_at.append(self._chunk_mass)
        self._focused_sets.append(focused_chunks(self._chunk_mass.tolist()))
        window = self._option("focus_window")
        layer = forward.layer
        # Line 11: never before layer w, which counts from 1 in the paper and from 0 here.
        if layer + 1 < window or layer + 1 == self.model.num_layers or len(set(self._focused_sets[-window:])) > 1:
            return
        self.result.settled_at = layer
        self.result.focused = self._focused_sets[-1]
        kept = {p for i in self.result.focused for p in range(*self.spans[i])}
        self._let_go(layer + 1, self.reused - kept)


def _ranks(statistic: Array) -> list[float]:
    """Tokens without a statistic come last."""
    return np.where(np.isnan(statistic), -np.inf, statistic).tolist()


def focused_chunks(mass: Sequence[float]) -> frozenset[int]:
    """Lines 4 to 9 of Cache-Craft's algorithm 1: the chunks above the step whose entropy is the largest, but the first.

    All chunks where there are at most two, or where all masses are the same.
    """
    k = len(mass)
    order = sorted(range(k), key=lambda i: (-mass[i], i))
    diff = [mass[order[i]] - mass[order[i + 1]] for i in range(k - 1)]
    total = sum(diff)
    if k <= 2 or total == 0:
        return frozenset(range(k))
    p = [d / total for d in diff]
    h = [-sum(p[j] * math.log(p[j]) for j in range(i + 1) if p[j] > 0) for i in range(k - 1)]
    gains = [h[i + 1] - h[i] for i in range(k - 2)]
    num_focused = gains.index(max(gains)) + 2  # gains[i] is the entropy of diff[i + 1], behind i + 2 chunks
    return frozenset(order[:num_focused])
