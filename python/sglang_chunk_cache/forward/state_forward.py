"""StateForward: layers with states, in one forward of a batch that reuses chunks or computes chunks to be reused later.

Verbs: `StateForward.of` (on the host), `set_up` (once per forward), `forward` (one layer), `finish`.

Rows of a request stand in runs; in the gap between two runs lie reused tokens. SGLang's kernels know no gaps, so each
run is a sequence of its own, and all are computed together. That takes as many launches for many runs as for few: the
kernel first finds the transition of each run, then one multiplication per run moves the states of its request over that
run and over the gap behind it, and from there the kernel computes all rows. Transitions of runs take memory, so those
of a large batch are computed in rounds. A batch without a gap is one round, which is SGLang's own forward.

Chunks that will be remembered have their transition taken. For that the kernel runs over their rows again, with further
rows below each state: these begin as the identity and see values of zero, so they end as the operator. The state above
them begins with zero and ends as the offset.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from sgl_kernel_ext.transfer import upload
from sglang_chunk_cache.forward.runs import view_of
from sglang_chunk_cache.forward.state_rounds import TRACKING, Chain, RequestRows, Round, round_of, runs_of
from sglang_chunk_cache.kv.state_layers import StateLayers
from sglang_chunk_cache.kv.transition import LayerTransition, Rule, Transition, on_host

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


_FindStarts = Callable[[Callable[..., Any], dict[str, Any]], None]
MOST_RUNS = 32
"""Most runs of requests with gaps that are computed at once; if there are more such requests, one run of each."""


class StateForward:
    """See the head of this file.

    Args:
        layers: of the model.
        rounds: at least one.
        are_plain: for each request, whether its rows are one run with no gap in front.
    """

    def __init__(self, layers: StateLayers, rounds: Sequence[Round], are_plain: Sequence[bool]) -> None:
        self._layers = layers
        self._rounds = rounds
        self._are_plain = are_plain

    @classmethod
    def of(
        cls, layers: StateLayers, requests: Sequence[RequestRows], device: Any, *, is_fused: bool
    ) -> StateForward | None:
        """What layers with states compute of a batch; None = SGLang's own, as there is no gap and nothing to take.

        Args:
            is_fused: whether our code attends instead of SGLang's; the result is not None then.
        """
        runs, first = [], 0
        for one in requests:
            runs.append(runs_of(one, first))
            first += len(one.positions)
        are_plain = [len(own) == 1 and own[0].gap is None for own in runs]
        is_stock = all(is_plain or not own for own, is_plain in zip(runs, are_plain, strict=True))
        if is_stock and not is_fused and not any(one.wanted for one in requests):
            return None
        if is_stock:
            return cls(layers, [round_of([own[0] for own in runs if own], device, is_stock=True)], are_plain)
        plain = [own[0] for own, is_plain in zip(runs, are_plain, strict=True) if is_plain]
        made = [round_of(plain, device)] if plain else []
        chained = sorted((own for own, is_plain in zip(runs, are_plain, strict=True) if not is_plain), key=len)[::-1]
        num_steps = max(1, MOST_RUNS // len(chained))
        for step in range(0, len(chained[0]), num_steps):
            part = [own[step : step + num_steps] for own in chained if len(own) > step]
            steps = [[own[k] for own in part if len(own) > k] for k in range(len(part[0]))]
            made.append(round_of(list(itertools.chain(*steps)), device, [len(one) for one in steps]))
        return cls(layers, made, are_plain)

    @property
    def _is_stock(self) -> bool:
        return self._rounds[0].rows is None

    def for_metadata(self, batch: ForwardBatch) -> ForwardBatch:
        """`batch` as SGLang's backend can prepare it, even if its entries are runs: without fields of `TRACKING`."""
        if self._is_stock:
            return batch
        return view_of(batch, dict.fromkeys(TRACKING))

    def set_up(self, batch: ForwardBatch, *, is_prepared: bool) -> None:
        """Prepares the layers with states; `is_prepared`: SGLang's backend was prepared before, since it attends."""
        if self._is_stock:
            if not is_prepared:
                self._layers.backend.init_forward_metadata(batch)
            return
        if any(self._are_plain) and batch.mamba_track_mask is not None:
            plain = np.flatnonzero(self._are_plain)
            (places,) = upload([plain], batch.mamba_track_mask.device)
            for name in TRACKING:
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
        """Computes one layer for all rows, in the place of `stock`: `[1, rows, value heads, value size]`."""
        mixed_qkv = inputs["mixed_qkv"]
        if self._is_stock:
            with self._extending(self._rounds[0], mixed_qkv):
                return stock(layer=layer, forward_batch=forward_batch, **inputs)
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
        """Hands the transitions of chunks to their requests; all layers were computed."""
        for taking in (taking for one in self._rounds for taking in one.takings):
            wanted = taking.wanted
            wanted.known.note(wanted.chunk, wanted.begin, wanted.end, Transition(tuple(taking.layers)))

    @contextmanager
    def _chained(self, chain: Chain, layer_id: int) -> Iterator[_FindStarts]:
        """Inside, each run has states of its own, set by the function that is yielded; the pools get the last ones."""
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
    def _extending(self, one: Round, mixed_qkv: torch.Tensor, find_starts: _FindStarts | None = None) -> Iterator[None]:
        """Takes the transitions of a round's chunks, while the rows of the round are computed inside."""
        if not one.takings and find_starts is None:
            yield
            return
        dispatcher = self._layers.backend.kernel_dispatcher
        stock = dispatcher.extend

        def extend(**given: Any) -> Any:
            if find_starts is not None:
                find_starts(stock, given)
            result = stock(**given)
            rules = iter([rule for rows, borders in one.rule_groups for rule in _rules(rows, borders, stock, given)])
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
    chain: Chain,
    crossed: Sequence[LayerTransition],
    states: torch.Tensor,
    stock: Callable[..., Any],
    given: dict[str, Any],
) -> None:
    """Sets the states that each run of a chain begins with: `given["ssm_states"]`."""
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
    """Operators and offsets of the parts of chunks that lie behind seams."""
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
    """Turns the identities at these places into what sequences of rows do to states, by the kernel for rows."""
    own = {name: given[name].index_select(1, rows) for name in ("q", "k", "v", "g", "beta")}
    own["v"] = F.pad(own["v"], (0, maps.shape[3]))
    stock(**own, ssm_states=maps, cache_indices=places, query_start_loc=borders, layer_id=given["layer_id"])


def _on_device(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Tensors of host memory side by side, in float32."""
    made = like.new_empty((len(parts), *parts[0].shape), dtype=torch.float32)
    for place, part in zip(made, parts, strict=True):
        place.copy_(part, non_blocking=True)
    return made
