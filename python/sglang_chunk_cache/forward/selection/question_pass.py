"""QuestionPass: questions look at the reused cache in a forward of their own, before rows are chosen.

That forward has the rows that are computed in any case, and is one of SGLang's like any other; the next one writes
their K and V again. For a method of stage LAYER it has all rows and ends at the check layer; rows that are not chosen
keep the K and V that it has written. A `QuestionPass` looks on and keeps the questions' Q of each scored layer. When
the forward has ended, all layers of all requests with the same method and layers are scored at once, and each request
gets its own scores.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from sgl_kernel_ext.question_mass import Questions, layout_of
from sglang_chunk_cache.forward.attending import ObservedRows
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.selection.progress import RequestProgress
from sglang_chunk_cache.forward.selection.scorer import AskedLayers, scorer_of
from sglang_chunk_cache.kv.layer_kv import LayerKV
from sglang_chunk_cache.kv.ranks import sum_over_ranks

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention

MAX_BYTES = 256 << 20
"""The most that Q and scores of layers scored at once may take: for an 8B model 32 questions of 32 rows."""


class _ScoredTogether:
    """Requests whose questions are scored alike.

    Args:
        requests: in the order of `questions`.
        method: that scores them.
        layers: at which they are scored.
        kv_pool: SGLang's KV pool.
        kernel: backend of the operations.
    """

    def __init__(
        self,
        requests: Sequence[RequestProgress],
        questions: Questions,
        method: str,
        layers: frozenset[int],
        kv_pool: Any,
        kernel: str,
    ) -> None:
        self.requests, self.questions, self.layers = requests, questions, layers
        self.scores: torch.Tensor | None = None  # of the layers so far, [sum of kv_lens] fp32
        self._score = scorer_of(method)
        self._kv_pool, self._kernel = kv_pool, kernel
        self._waiting: list[tuple[RadixAttention, LayerKV, torch.Tensor | None]] = []  # layers that are not scored yet
        self._q = torch.empty(0)  # [num_layers, num_rows, num_q_heads, head_dim], with room for more layers

    def add(self, q: torch.Tensor, layer: RadixAttention, sinks: torch.Tensor | None) -> None:
        """Keeps the questions' rows of `q` `[num_rows of the forward, num_q_heads, head_dim]` of one layer."""
        stored = LayerKV.of(self._kv_pool, layer)
        if self._waiting and (len(self._waiting) == len(self._q) or not self._is_alike(q, layer, stored, sinks)):
            self.score()
        if not self._waiting and self._q.shape[2:] != q.shape[1:]:
            num_rows, num_keys = self.questions.num_rows, len(self.questions.kv_slots)
            num_bytes = num_rows * q[0].numel() * q.element_size() + 4 * num_keys
            num_layers = max(1, min(len(self.layers), MAX_BYTES // num_bytes))
            self._q = q.new_empty(num_layers, num_rows, *q.shape[1:])
        self.questions.take(q, out=self._q[len(self._waiting)])
        self._waiting.append((layer, stored, sinks))

    def _is_alike(self, q: torch.Tensor, layer: RadixAttention, stored: LayerKV, sinks: torch.Tensor | None) -> bool:
        """Whether the layer can be scored with those that wait."""
        other, its, its_sinks = self._waiting[0]
        return (q.shape[1:], layer.scaling, layer.logit_cap, layout_of(stored.k), sinks is None) == (
            *(self._q.shape[2:], other.scaling, other.logit_cap, layout_of(its.k), its_sinks is None),
        )

    def score(self) -> None:
        """Scores the layers that wait."""
        if not self._waiting:
            return
        layers, stored, sinks = zip(*self._waiting, strict=True)
        self.scores = self._score(
            AskedLayers(
                q=self._q[: len(layers)],
                questions=self.questions,
                stored=stored,
                sm_scale=layers[0].scaling,
                logit_cap=layers[0].logit_cap,
                sinks=None if sinks[0] is None else sinks,
                so_far=self.scores,
                kernel=self._kernel,
            )
        )
        self._waiting.clear()


class QuestionPass:
    """Observer of the forward in which questions ask.

    Args:
        requests: of the batch.
        asking: places in the batch of those whose question asks.
        row_lens: rows of each request in the forward; the last ones are its question's, then its answer's.
        rows: of the forward that computes the answers; they say where the keys of each request lie.
        tp_size: ranks among which the heads are divided.
    """

    def __init__(
        self,
        requests: Sequence[RequestProgress],
        asking: Collection[int],
        row_lens: Sequence[int],
        rows: FusedRows,
        tp_size: int,
    ) -> None:
        self._tp_size = tp_size
        of_scoring: dict[tuple[str, frozenset[int]], list[int]] = {}
        for i in asking:
            of_scoring.setdefault(requests[i].question_scoring, []).append(i)
        ends = np.cumsum(row_lens).tolist()
        self._alike: list[_ScoredTogether] = []
        for (method, layers), members in of_scoring.items():
            own = [requests[i] for i in members]
            backs = [one.num_question + one.num_answer for one in own]
            questions = Questions(
                [ends[i] - back for i, back in zip(members, backs, strict=True)],
                [one.num_question for one in own],
                [rows.kv_lens[i] - back for i, back in zip(members, backs, strict=True)],
                [rows.kv_lens[i] for i in members],
                rows.kv_indices if len(members) == len(requests) else torch.cat([rows.slots_of(i) for i in members]),
            )
            self._alike.append(_ScoredTogether(own, questions, method, layers, rows.kv_pool, rows.kernel))

    def observes(self, layer_id: int) -> bool:
        """Whether a question is scored at this layer."""
        return any(layer_id in one.layers for one in self._alike)

    def observe(self, seen: ObservedRows) -> None:
        """Keeps the questions' Q of one layer."""
        layer, began = seen.layer, time.perf_counter()
        q = seen.q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        for one in self._alike:
            if layer.layer_id in one.layers:
                one.add(q, layer, seen.sinks)
        self._count_seconds(time.perf_counter() - began)

    def finish(self) -> None:
        """Scores what is left, and gives each request its scores; the forward has ended."""
        began = time.perf_counter()
        for one in self._alike:
            one.score()
            assert one.scores is not None, "no layer was scored"
            total = one.scores if self._tp_size == 1 else one.scores / self._tp_size
            scores = sum_over_ranks(total, self._tp_size).split(one.questions.kv_lens)
            for request, own in zip(one.requests, scores, strict=True):
                request.question_scores = own
        self._count_seconds(time.perf_counter() - began)

    def _count_seconds(self, seconds: float) -> None:
        for one in self._alike:
            for request in one.requests:
                request.count_seconds(seconds)
