"""QuestionPass: questions look at the reused cache in a forward of their own, before rows are chosen.

That forward has the rows that are computed in any case, and is one of SGLang's like any other; its K and V are written
again by the next one. A `QuestionPass` looks on and adds up scores, those of requests with the same method and layers
at once; when the forward has ended, each request gets its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.attending import ObservedRows
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.selection.progress import RequestProgress
from sglang_chunk_cache.forward.selection.scorer import QuestionAtLayer, Scorer, scorer_of
from sglang_chunk_cache.kv.layer_kv import LayerKV
from sglang_chunk_cache.kv.ranks import sum_over_ranks

MAX_KEYS = 1 << 17
"""Keys that are scored at once: a layer's keys are copied for it, at 2 KiB each in bf16 with 8 KV heads of 128."""


@dataclass
class _ScoredTogether:
    """Requests whose questions are scored alike.

    Attributes:
        layers: at which they are.
        index: `[num_rows]` int64, their questions' rows in the forward.
        positions, firsts, row_lens, kv_lens, kv_slots: as of `QuestionAtLayer`.
        scores: of the layers so far, `[sum of kv_lens]` fp32.
    """

    requests: list[RequestProgress]
    score: Scorer
    layers: frozenset[int]
    index: torch.Tensor
    positions: torch.Tensor
    firsts: torch.Tensor
    row_lens: list[int]
    kv_lens: list[int]
    kv_slots: torch.Tensor
    scores: torch.Tensor | None = None


class QuestionPass:
    """Observer of the forward in which questions ask.

    Args:
        requests: of the batch.
        row_lens: rows of each in the forward; those of its question stand in front of its answer's, which are last.
        rows: of the forward that computes the answers: where the keys of each request lie.
        tp_size: ranks among which the heads are divided.
    """

    def __init__(
        self, requests: Sequence[RequestProgress], row_lens: Sequence[int], rows: FusedRows, tp_size: int
    ) -> None:
        self._kv_pool, self._kernel, self._tp_size = rows.kv_pool, rows.kernel, tp_size
        alike: list[tuple[tuple[str, frozenset[int]], list[int]]] = []
        of_scoring: dict[tuple[str, frozenset[int]], list[int]] = {}
        for i, request in enumerate(requests):
            if request.asks_first:
                members = of_scoring.get(request.question_scoring)
                if members is None or sum(rows.kv_lens[one] for one in (*members, i)) > MAX_KEYS:
                    members = of_scoring[request.question_scoring] = []
                    alike.append((request.question_scoring, members))
                members.append(i)
        ends = np.cumsum(row_lens)
        arrays: list[np.ndarray] = []
        for _, members in alike:
            first, own = 0, []
            for i in members:
                request = requests[i]
                back = np.arange(request.num_question) - request.num_question - request.num_answer
                firsts = np.full(len(back), first)
                first += rows.kv_lens[i]
                own.append((ends[i] + back, first + back, firsts))
            arrays += [np.concatenate(one).astype(np.int64) for one in zip(*own, strict=True)]
        uploaded = iter(upload(arrays, rows.row_positions.device))
        self._alike = [
            _ScoredTogether(
                [requests[i] for i in members],
                scorer_of(method),
                layers,
                *(next(uploaded), next(uploaded), next(uploaded)),
                [requests[i].num_question for i in members],
                [rows.kv_lens[i] for i in members],
                rows.kv_indices if len(members) == len(requests) else torch.cat([rows.slots_of(i) for i in members]),
            )
            for (method, layers), members in alike
        ]

    def observes(self, layer_id: int) -> bool:
        """Whether a question is scored at this layer."""
        return any(layer_id in one.layers for one in self._alike)

    def observe(self, seen: ObservedRows) -> None:
        """Adds one layer."""
        layer, began = seen.layer, time.perf_counter()
        q = seen.q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        for one in self._alike:
            if layer.layer_id not in one.layers:
                continue
            scores = one.score(
                QuestionAtLayer(
                    q=q[one.index],
                    positions=one.positions,
                    firsts=one.firsts,
                    row_lens=one.row_lens,
                    kv_lens=one.kv_lens,
                    kv_slots=one.kv_slots,
                    stored=LayerKV.of(self._kv_pool, layer),
                    sm_scale=layer.scaling,
                    logit_cap=layer.logit_cap,
                    tp_size=self._tp_size,
                    sinks=seen.sinks,
                    kernel=self._kernel,
                )
            )
            one.scores = scores if one.scores is None else one.scores + scores
        for one in self._alike:
            for request in one.requests:
                request.count_seconds(time.perf_counter() - began)

    def finish(self) -> None:
        """The forward has ended: each request is told its scores."""
        for one in self._alike:
            assert one.scores is not None, "no layer was scored"
            scores = sum_over_ranks(one.scores, self._tp_size).split(one.kv_lens)
            for request, own in zip(one.requests, scores, strict=True):
                request.question_scores = own
