"""StateForward: layers with states in one forward of a batch that reuses chunks, or computes some that will be.

Verbs: `StateForward.of` (on the host), `set_up` (once per forward), `forward` (one layer), `finish`.

Rows of a request stand in runs, and between two of them lies what is reused. SGLang's kernels know no gap, so runs are
computed in rounds, the first of all requests, then the second, and so on: in front of each its states are moved over
the gap by the transition of what lies there. A batch without a gap is one round, which is SGLang's own forward.

Chunks that will be remembered have their transition taken: the kernel runs over their rows again, with states that have
further rows below: these begin as the identity and see values of zero, so they end as the operator, and what stands
above them begins with zero and ends as the offset.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.runs import Runs, run_fields, view_of
from sglang_chunk_cache.kv.state_layers import StateLayers
from sglang_chunk_cache.kv.transition import LayerTransition, Rule, Transition, on_host

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    from chunk_cache.index.transition_store import ChunkTransitions

MOST_TAKEN = 16
"""Chunks whose transitions are taken at once, by what memory their states need meanwhile."""
_TRACKING = (
    "mamba_track_indices",
    "mamba_track_mask",
    "mamba_track_seqlens",
    "mamba_prefill_track_mask_cpu",
    "mamba_track_seqlens_cpu",
)
"""Fields of a batch by which SGLang keeps states for its tree, of requests whose states are exact."""


@dataclass(frozen=True)
class Gap:
    """What is reused in front of a row: `end` is the position of the row."""

    end: int
    transition: Transition


@dataclass(frozen=True)
class Wanted:
    """A chunk that is computed in a forward and will be remembered, or a part of it.

    Attributes:
        chunk: its place in the prompt.
        begin, end: positions of the part.
        seam_end: position from which on the transition is wanted.
        known: gets the transition.
    """

    chunk: int
    begin: int
    end: int
    seam_end: int
    known: ChunkTransitions[Transition]


@dataclass(frozen=True)
class RequestRows:
    """Rows of one request in a forward.

    Attributes:
        pool_row: its row of `req_to_token`.
        positions: `[num_rows]` int64, ascending.
        begin: position up to which its states are known.
        gaps: in front of rows.
        wanted: chunks, each within one run.
    """

    pool_row: int
    positions: npt.NDArray[np.int64]
    begin: int
    gaps: Sequence[Gap] = ()
    wanted: Sequence[Wanted] = ()


@dataclass(frozen=True)
class _Run:
    """Rows [first, first + length) of the forward, which stand at `start` and behind."""

    request: RequestRows
    first: int
    start: int
    length: int
    gap: Gap | None


@dataclass(frozen=True)
class _Taking:
    """Rows [begin, end) of a round, a part of a chunk, and what was taken of them so far, by layer."""

    wanted: Wanted
    begin: int
    end: int
    layers: list[LayerTransition] = field(default_factory=list)

    @property
    def rule_begin(self) -> int:
        """The first row behind the seam."""
        return min(self.end, self.begin + max(0, self.wanted.seam_end - self.wanted.begin))


@dataclass
class _Round:
    """Runs that are computed together.

    Attributes:
        takings: of its rows.
        rule_groups: by `MOST_TAKEN` of its takings, rows behind their seams, and where each of these sequences ends,
            on the device.
        rows: `[n]` int64 of the forward, on the device; None = all, as SGLang does.
        fields: of the batch as SGLang's backend sees it.
        gaps: in front of its runs.
        gap_runs: by part of a transition, the runs in front of which there is one, on the device.
        metadata: of the backend, once it has made them.
    """

    takings: list[_Taking]
    rule_groups: list[tuple[torch.Tensor, torch.Tensor]]
    rows: torch.Tensor | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    gap_runs: list[torch.Tensor] = field(default_factory=list)
    metadata: Any = None


class StateForward:
    """See the head of this file.

    Args:
        layers: of the model.
        rounds: at least one.
        are_plain: of each request, whether its rows are one run with no gap in front.
    """

    def __init__(self, layers: StateLayers, rounds: Sequence[_Round], are_plain: Sequence[bool]) -> None:
        self._layers = layers
        self._rounds = rounds
        self._are_plain = are_plain

    @classmethod
    def of(
        cls, layers: StateLayers, requests: Sequence[RequestRows], device: Any, *, is_fused: bool
    ) -> StateForward | None:
        """What layers with states compute of a batch; None = as SGLang does, where it attends and nothing is taken.

        Args:
            is_fused: what attends is ours.
        """
        runs, first = [], 0
        for one in requests:
            runs.append(_runs_of(one, first))
            first += len(one.positions)
        are_plain = [len(own) == 1 and own[0].gap is None for own in runs]
        if all(are_plain) and not is_fused and not any(one.wanted for one in requests):
            return None
        rounds = [[own[k] for own in runs if len(own) > k] for k in range(max(map(len, runs)))]
        made = [_round_of(own, device, is_stock=all(are_plain)) for own in rounds]
        return cls(layers, made, are_plain)

    @property
    def _is_stock(self) -> bool:
        return self._rounds[0].rows is None

    def for_metadata(self, batch: ForwardBatch) -> ForwardBatch:
        """`batch` as SGLang's backend can prepare a forward of it, however many entries it has."""
        if self._is_stock:
            return batch
        return view_of(batch, dict.fromkeys(_TRACKING))

    def set_up(self, batch: ForwardBatch, *, is_prepared: bool) -> None:
        """Behind that preparation, which is left out where SGLang's backend does not attend."""
        if self._is_stock:
            if not is_prepared:
                self._layers.backend.init_forward_metadata(batch)
            return
        if batch.mamba_track_mask is not None:  # of the first round, which has one run of each request
            (are_plain,) = upload([np.array(self._are_plain)], batch.mamba_track_mask.device)
            tracking = {name: getattr(batch, name) for name in _TRACKING}
            tracking["mamba_track_mask"] = batch.mamba_track_mask & are_plain
            masks = batch.mamba_prefill_track_mask_cpu
            if masks is not None:
                both = zip(masks, self._are_plain, strict=True)
                tracking["mamba_prefill_track_mask_cpu"] = [mask and is_plain for mask, is_plain in both]
            self._rounds[0].fields |= tracking
        backend = self._layers.backend
        for one in self._rounds:
            backend.init_forward_metadata(view_of(batch, one.fields))
            one.metadata = backend.forward_metadata

    def forward(
        self, stock: Callable[..., Any], *, layer: RadixLinearAttention, forward_batch: ForwardBatch, **inputs: Any
    ) -> torch.Tensor:
        """One layer of all rows, in the place of `stock`: `[1, rows, value heads, value size]`."""
        mixed_qkv = inputs["mixed_qkv"]
        if self._is_stock:
            with self._taking(self._rounds[0], mixed_qkv):
                computed: torch.Tensor = stock(layer=layer, forward_batch=forward_batch, **inputs)
            return computed
        backend = self._layers.backend
        out = mixed_qkv.new_zeros((1, len(mixed_qkv), layer.num_v_heads, layer.head_v_dim))
        for one in self._rounds:
            self._cross_gaps(layer.layer_id, one)
            backend.forward_metadata = one.metadata
            own = {name: inputs[name].index_select(0, one.rows) for name in ("mixed_qkv", "a", "b")}
            with self._taking(one, own["mixed_qkv"]):
                part = backend.forward_extend(layer=layer, forward_batch=view_of(forward_batch, one.fields), **own)
            out.index_copy_(1, one.rows, part)
        return out

    def finish(self) -> None:
        """All layers were computed: the requests know the transitions of their chunks."""
        for taking in (taking for one in self._rounds for taking in one.takings):
            wanted = taking.wanted
            wanted.known.note(wanted.chunk, wanted.begin, wanted.end, Transition(tuple(taking.layers)))

    def _cross_gaps(self, layer_id: int, one: _Round) -> None:
        if not one.gaps:
            return
        number = self._layers.layout.layer_ids.index(layer_id)
        conv, states = self._layers.pools(layer_id)
        crossed = [gap.transition.layers[number] for gap in one.gaps]
        for part, runs in enumerate(one.gap_runs):
            slots = one.metadata.mamba_cache_indices.index_select(0, runs).long()
            rules = [layer.rules[part] for layer in crossed if len(layer.rules) > part]
            operators, offsets = (_stack(parts, states) for parts in zip(*rules, strict=True))
            after = states.index_select(0, slots).float() @ operators + offsets
            states.index_copy_(0, slots, after.to(states.dtype))
            if not part:
                tails = [layer.tail(self._layers.layout.width, conv.device) for layer in crossed]
                conv.index_copy_(0, slots, _stack(tails, conv).to(conv.dtype))

    @contextmanager
    def _taking(self, one: _Round, mixed_qkv: torch.Tensor) -> Iterator[None]:
        """While the rows of a round are computed inside, transitions of its chunks are taken."""
        if not one.takings:
            yield
            return
        dispatcher = self._layers.backend.kernel_dispatcher
        stock = dispatcher.extend

        def extend(**given: Any) -> Any:
            result = stock(**given)
            rules = iter([rule for group in one.rule_groups for rule in _rules(*group, stock, given)])
            for taking in one.takings:
                tail = mixed_qkv[max(taking.begin, taking.end - self._layers.layout.width) : taking.end].T
                rule = () if taking.rule_begin == taking.end else (next(rules),)
                taking.layers.append(LayerTransition(rule, (on_host(tail),)))
            return result

        dispatcher.extend = extend
        try:
            yield
        finally:
            del dispatcher.extend


def _rules(
    rule_rows: torch.Tensor, borders: torch.Tensor, stock: Callable[..., Any], given: dict[str, Any]
) -> list[Rule]:
    """Operators and offsets of the parts behind seams, by the kernel that computes their rows."""
    num, states = len(borders) - 1, given["ssm_states"]
    heads, value_size, key_size = states.shape[1:]
    scratch = torch.zeros((num, heads, value_size + key_size, key_size), dtype=torch.float32, device=states.device)
    scratch[:, :, value_size:] = torch.eye(key_size, device=states.device)
    rows = {name: given[name].index_select(1, rule_rows) for name in ("q", "k", "v", "g", "beta")}
    rows["v"] = F.pad(rows["v"], (0, key_size))
    stock(
        **rows,
        ssm_states=scratch,
        cache_indices=torch.arange(num, dtype=torch.int32, device=states.device),
        query_start_loc=borders,
        layer_id=given["layer_id"],
    )
    offsets, operators = scratch.split([value_size, key_size], dim=2)
    return [Rule(on_host(operator), on_host(offset)) for operator, offset in zip(operators, offsets, strict=True)]


def _runs_of(request: RequestRows, first: int) -> list[_Run]:
    runs = Runs.of([request.positions], [request.pool_row])
    gaps, known, found = {gap.end: gap for gap in request.gaps}, request.begin, []
    for start, length in zip(runs.starts.tolist(), runs.lens.tolist(), strict=True):
        found.append(_Run(request, first, start, length, gaps[start] if start > known else None))
        first, known = first + length, start + length
    return found


def _round_of(own: Sequence[_Run], device: Any, *, is_stock: bool) -> _Round:
    takings, first = [], 0
    for run in own:
        for wanted in run.request.wanted:
            if run.start <= wanted.begin and wanted.end <= run.start + run.length:
                at = first - run.start
                takings.append(_Taking(wanted, at + wanted.begin, at + wanted.end))
        first += run.length
    ranges = [(taking.rule_begin, taking.end) for taking in takings if taking.rule_begin < taking.end]
    of_rules: list[npt.NDArray[Any]] = []
    for group in (ranges[i : i + MOST_TAKEN] for i in range(0, len(ranges), MOST_TAKEN)):
        of_rules.append(np.concatenate([np.arange(*one) for one in group]))
        of_rules.append(np.cumsum([0, *(end - begin for begin, end in group)]).astype(np.int32))
    num_groups = len(of_rules) // 2
    if is_stock:
        uploaded = iter(upload(of_rules, device) if of_rules else [])
        return _Round(takings, [(next(uploaded), next(uploaded)) for _ in range(num_groups)])
    runs = Runs(
        np.array([run.request.pool_row for run in own]),
        np.array([run.start for run in own]),
        np.array([run.length for run in own]),
    )
    rows = np.concatenate([np.arange(run.first, run.first + run.length) for run in own])
    gaps = [run.gap for run in own if run.gap is not None]
    parts = range(max((gap.transition.num_rules for gap in gaps), default=0))
    gap_runs = [
        np.array([i for i, run in enumerate(own) if run.gap is not None and run.gap.transition.num_rules > part])
        for part in parts
    ]
    uploaded = iter(upload([*of_rules, rows, *gap_runs, *runs.arrays()], device))
    made = _Round(takings, [(next(uploaded), next(uploaded)) for _ in range(num_groups)], next(uploaded))
    made.gaps = gaps
    made.gap_runs = [next(uploaded) for _ in parts]
    made.fields = run_fields(runs, list(uploaded)) | dict.fromkeys(_TRACKING)
    return made


def _stack(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.stack([part.to(like.device, non_blocking=True) for part in parts])
