"""StateForward: layers with states in one forward of a batch that reuses chunks, or computes some that will be.

Verbs: `StateForward.of` (on the host), `set_up` (once per forward), `forward` (one layer), `finish`.

Rows of a request stand in runs, and between two of them lies what is reused. SGLang's kernels know no gap, so each run
is a sequence of its own, and all are computed together, which takes as many launches for many runs as for few: the
kernel first says what each run does to states, then one multiplication a run moves the states of its request over that
run and over the gap behind it, and from there the kernel computes all rows. What runs do takes memory, so those of a
large batch are computed in rounds. A batch without a gap is one round, which is SGLang's own forward.

Chunks that will be remembered have their transition taken: the kernel runs over their rows again, with states that have
further rows below: these begin as the identity and see values of zero, so they end as the operator, and what stands
above them begins with zero and ends as the offset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
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

_FindStarts = Callable[[Callable[..., Any], dict[str, Any]], None]
MOST_TAKEN = 16
"""Chunks whose transitions are taken at once, by what memory their states need meanwhile."""
MOST_RUNS = 32
"""Runs beside gaps that are computed at once, if there are not more requests, by the same."""
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
class _Chain:
    """Runs of requests with gaps, one of each request behind the other; those that come first in theirs stand first.

    Attributes:
        step_lens: how many are the first of their request here, how many the second, and so on: ever fewer.
        rows: of those that have a next one here, on the device.
        borders: where each of these begins among `rows`, and where the last ends, on the device.
        next_runs: of each of these, on the device.
        last_runs: of each request, in the order of the first ones, on the device.
        gaps: in front of runs, with the place of the run.
        gap_runs: by part of a transition, the runs in front of which there is one, on the device.
        slots: of the requests in the pools.
    """

    step_lens: Sequence[int]
    rows: torch.Tensor
    borders: torch.Tensor
    next_runs: torch.Tensor
    last_runs: torch.Tensor
    gaps: Sequence[tuple[int, Gap]]
    gap_runs: Sequence[torch.Tensor]
    slots: torch.Tensor | None = None


@dataclass
class _Round:
    """Runs that are computed together.

    Attributes:
        takings: of its rows.
        rule_groups: by `MOST_TAKEN` of its takings, rows behind their seams, and where each of these sequences ends,
            on the device.
        rows: `[n]` int64 of the forward, on the device; None = all, as SGLang does.
        fields: of the batch as SGLang's backend sees it.
        chain: None = of each run the states lie in the pools.
        metadata: of the backend, once it has made them.
    """

    takings: list[_Taking]
    rule_groups: list[tuple[torch.Tensor, torch.Tensor]]
    rows: torch.Tensor | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    chain: _Chain | None = None
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
        if all(are_plain):
            return cls(layers, [_round_of([own[0] for own in runs], device, is_stock=True)], are_plain)
        plain = [own[0] for own, is_plain in zip(runs, are_plain, strict=True) if is_plain]
        made = [_round_of(plain, device)] if plain else []
        chained = sorted((own for own, is_plain in zip(runs, are_plain, strict=True) if not is_plain), key=len)[::-1]
        num_steps = max(1, MOST_RUNS // len(chained))
        for step in range(0, len(chained[0]), num_steps):
            part = [own[step : step + num_steps] for own in chained if len(own) > step]
            steps = [[own[k] for own in part if len(own) > k] for k in range(len(part[0]))]
            made.append(_round_of(list(itertools.chain(*steps)), device, [len(one) for one in steps]))
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
        if any(self._are_plain) and batch.mamba_track_mask is not None:
            plain = np.flatnonzero(self._are_plain)
            (places,) = upload([plain], batch.mamba_track_mask.device)
            for name in _TRACKING:
                value = getattr(batch, name)
                if isinstance(value, torch.Tensor):
                    self._rounds[0].fields[name] = value.index_select(0, places.to(value.device))
                elif value is not None:
                    self._rounds[0].fields[name] = [value[i] for i in plain]
        backend = self._layers.backend
        for one in self._rounds:
            backend.init_forward_metadata(view_of(batch, one.fields))
            one.metadata = backend.forward_metadata
            if one.chain is not None:
                slots = one.metadata.mamba_cache_indices
                one.chain.slots = slots[: one.chain.step_lens[0]].long()
                one.metadata.mamba_cache_indices = torch.arange(len(slots), dtype=torch.int32, device=slots.device)

    def forward(
        self, stock: Callable[..., Any], *, layer: RadixLinearAttention, forward_batch: ForwardBatch, **inputs: Any
    ) -> torch.Tensor:
        """One layer of all rows, in the place of `stock`: `[1, rows, value heads, value size]`."""
        mixed_qkv = inputs["mixed_qkv"]
        if self._is_stock:
            with self._extending(self._rounds[0], mixed_qkv):
                computed: torch.Tensor = stock(layer=layer, forward_batch=forward_batch, **inputs)
            return computed
        backend = self._layers.backend
        out = mixed_qkv.new_zeros((1, len(mixed_qkv), layer.num_v_heads, layer.head_v_dim))
        for one in self._rounds:
            backend.forward_metadata = one.metadata
            own = {name: inputs[name].index_select(0, one.rows) for name in ("mixed_qkv", "a", "b")}
            chained = nullcontext() if one.chain is None else self._chained(one.chain, layer.layer_id)
            with chained as find_starts, self._extending(one, own["mixed_qkv"], find_starts):
                part = backend.forward_extend(layer=layer, forward_batch=view_of(forward_batch, one.fields), **own)
            out.index_copy_(1, one.rows, part)
        return out

    def finish(self) -> None:
        """All layers were computed: the requests know the transitions of their chunks."""
        for taking in (taking for one in self._rounds for taking in one.takings):
            wanted = taking.wanted
            wanted.known.note(wanted.chunk, wanted.begin, wanted.end, Transition(tuple(taking.layers)))

    @contextmanager
    def _chained(self, chain: _Chain, layer_id: int) -> Iterator[_FindStarts]:
        """Inside, each run has states of its own, found by what is yielded; the pools get the last ones."""
        backend, number = self._layers.backend, self._layers.layout.layer_ids.index(layer_id)
        conv, states = self._layers.pools(layer_id)
        num_first, num_runs = chain.step_lens[0], sum(chain.step_lens)
        tails = conv.new_empty((num_runs, *conv.shape[1:]))
        tails[:num_first] = conv.index_select(0, chain.slots)
        crossed = [gap.transition.layers[number] for _, gap in chain.gaps]
        for (run, _), transition in zip(chain.gaps, crossed, strict=True):
            tails[run].copy_(transition.tail(self._layers.layout.width, conv.device), non_blocking=True)
        starts = states.new_empty((num_runs, *states.shape[1:]), dtype=torch.float32)

        pool, own = backend.req_to_token_pool, SimpleNamespace(conv=[tails], temporal=starts)
        backend.req_to_token_pool = SimpleNamespace(mamba2_layer_cache=lambda _: own)
        try:
            yield partial(_find_starts, chain, crossed, states)
        finally:
            backend.req_to_token_pool = pool
        conv.index_copy_(0, chain.slots, tails.index_select(0, chain.last_runs))
        states.index_copy_(0, chain.slots, starts.index_select(0, chain.last_runs).to(states.dtype))

    @contextmanager
    def _extending(
        self, one: _Round, mixed_qkv: torch.Tensor, find_starts: _FindStarts | None = None
    ) -> Iterator[None]:
        """While the rows of a round are computed inside, transitions of its chunks are taken."""
        if not one.takings and find_starts is None:
            yield
            return
        dispatcher = self._layers.backend.kernel_dispatcher
        stock = dispatcher.extend

        def extend(**given: Any) -> Any:
            if find_starts is not None:
                find_starts(stock, given)
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


def _find_starts(
    chain: _Chain,
    crossed: Sequence[LayerTransition],
    states: torch.Tensor,
    stock: Callable[..., Any],
    given: dict[str, Any],
) -> None:
    """Where each run of a chain begins: what `given` has as states."""
    starts = given["ssm_states"]
    value_size, key_size = starts.shape[2:]
    maps = _identities(len(starts), starts)  # over the run in front, then over the gap behind that
    if len(chain.next_runs):
        _run_over(maps, chain.rows, chain.borders, chain.next_runs, stock, given)
    for part, runs in enumerate(chain.gap_runs):
        rules = [one.rules[part] for one in crossed if len(one.rules) > part]
        operators, offsets = (_on_device(parts, starts) for parts in zip(*rules, strict=True))
        over = maps.index_select(0, runs) @ operators
        over[:, :, :value_size] += offsets
        maps.index_copy_(0, runs, over)
    before, first = states.index_select(0, chain.slots).float().flatten(0, 1), 0
    for length in chain.step_lens:
        step = slice(first, first + length)
        offset, operator = maps[step].flatten(0, 1).split([value_size, key_size], dim=1)
        before = torch.baddbmm(offset, before[: len(offset)], operator, out=starts[step].flatten(0, 1))
        first += length


def _rules(
    rule_rows: torch.Tensor, borders: torch.Tensor, stock: Callable[..., Any], given: dict[str, Any]
) -> list[Rule]:
    """Operators and offsets of the parts behind seams."""
    maps = _identities(len(borders) - 1, given["ssm_states"])
    sequences = torch.arange(len(maps), dtype=torch.int32, device=maps.device)
    _run_over(maps, rule_rows, borders, sequences, stock, given)
    offsets, operators = maps.split([maps.shape[2] - maps.shape[3], maps.shape[3]], dim=2)
    return [Rule(on_host(operator), on_host(offset)) for operator, offset in zip(operators, offsets, strict=True)]


def _identities(num: int, states: torch.Tensor) -> torch.Tensor:
    """`[num, heads, value size + key size, key size]` float32: offsets of zero above operators that change nothing."""
    heads, value_size, key_size = states.shape[1:]
    made = torch.zeros((num, heads, value_size + key_size, key_size), dtype=torch.float32, device=states.device)
    made[:, :, value_size:] = torch.eye(key_size, device=states.device)
    return made


def _run_over(
    maps: torch.Tensor,
    rows: torch.Tensor,
    borders: torch.Tensor,
    places: torch.Tensor,
    stock: Callable[..., Any],
    given: dict[str, Any],
) -> None:
    """Makes identities at these places what sequences of rows do to states, by the kernel that computes the rows."""
    own = {name: given[name].index_select(1, rows) for name in ("q", "k", "v", "g", "beta")}
    own["v"] = F.pad(own["v"], (0, maps.shape[3]))
    stock(**own, ssm_states=maps, cache_indices=places, query_start_loc=borders, layer_id=given["layer_id"])


def _runs_of(request: RequestRows, first: int) -> list[_Run]:
    runs = Runs.of([request.positions], [request.pool_row])
    gaps, known, found = {gap.end: gap for gap in request.gaps}, request.begin, []
    for start, length in zip(runs.starts.tolist(), runs.lens.tolist(), strict=True):
        found.append(_Run(request, first, start, length, gaps[start] if start > known else None))
        first, known = first + length, start + length
    return found


def _round_of(
    own: Sequence[_Run], device: Any, step_lens: Sequence[int] | None = None, *, is_stock: bool = False
) -> _Round:
    """Some runs as a round; as a chain, where `step_lens` says how many are the first of their request, and so on."""
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
    chained: list[npt.NDArray[Any]] = []
    if step_lens is not None:
        gaps = [(i, run.gap) for i, run in enumerate(own) if run.gap is not None]
        chained = _chain_arrays([run.length for run in own], step_lens)
        num_parts = max((gap.transition.num_rules for _, gap in gaps), default=0)
        for part in range(num_parts):
            chained.append(np.array([i for i, gap in gaps if gap.transition.num_rules > part]))
    uploaded = iter(upload([*of_rules, rows, *chained, *runs.arrays()], device))
    made = _Round(takings, [(next(uploaded), next(uploaded)) for _ in range(num_groups)], next(uploaded))
    if step_lens is not None:
        chain_rows, borders, next_runs, last_runs = itertools.islice(uploaded, 4)
        gap_runs = [next(uploaded) for _ in range(num_parts)]
        made.chain = _Chain(step_lens, chain_rows, borders, next_runs, last_runs, gaps, gap_runs)
    made.fields = run_fields(runs, list(uploaded)) | dict.fromkeys(_TRACKING)
    return made


def _chain_arrays(lens: Sequence[int], step_lens: Sequence[int]) -> list[npt.NDArray[Any]]:
    """`rows`, `borders`, `next_runs` and `last_runs` of a chain of runs of these lengths."""
    firsts, begins = np.cumsum([0, *step_lens]), np.cumsum([0, *lens])
    next_of = {firsts[k] + i: firsts[k + 1] + i for k, num in enumerate(step_lens[1:]) for i in range(num)}
    last_runs = [max(firsts[k] + i for k, num in enumerate(step_lens) if i < num) for i in range(step_lens[0])]
    rows = [np.arange(begins[run], begins[run + 1]) for run in next_of]
    borders = np.cumsum([0, *(len(one) for one in rows)]).astype(np.int32)
    none = np.empty(0, dtype=np.int64)
    return [np.concatenate([none, *rows]), borders, np.array([*next_of.values()], dtype=np.int32), np.array(last_runs)]


def _on_device(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Tensors of host memory side by side, in float32."""
    made = like.new_empty((len(parts), *parts[0].shape), dtype=torch.float32)
    for place, part in zip(made, parts, strict=True):
        place.copy_(part, non_blocking=True)
    return made
