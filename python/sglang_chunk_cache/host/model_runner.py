"""ModelRunner: one forward, in which rows stand in front of ordinary extends.

Verbs: `announce` (what the forward of a batch does differently), `forward` (handler of a hook: has the rows attended to
for the time of one forward, of one part after another where a step has no room for all).

Promises: a batch of which nothing was announced is SGLang's alone; nothing announced outlives its forward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

from chunk_cache.gate.selection import Candidate
from sglang_chunk_cache.host.attention_backend import Attention, Observer, attending
from sglang_chunk_cache.selection.executor import LayerwiseForward, divide_adapters
from sglang_chunk_cache.tiers.landing import LayerFailed, LayerLoads

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

_EXTRAS = "chunk_cache_extras"


@dataclass(frozen=True)
class Part:
    """A forward of some of the rows of a batch; a batch with more rows than a step may have is computed in parts.

    Attributes:
        batch: as the model sees it.
        attention: in the place of SGLang's backend; None = that one.
        observers: look on.
    """

    batch: ForwardBatch
    attention: Attention | None
    observers: tuple[Observer, ...] = ()


@dataclass(frozen=True)
class Extras:
    """What one forward does differently from stock SGLang.

    Attributes:
        attention, observers: as of a `Part`.
        timing: measures the forward; None = nobody asks.
        before: parts that are computed first, each forgotten then; their logits mean nothing.
        loads: KV that arrives during the forward; None = all is there.
        again: what is done instead where it does not arrive, with the reason.
        tail_lens: rows of each request's ordinary extend; None = of all rows the hidden states are wanted.
        first_rows: requests to verify whose first token follows from this forward, with their places in the batch.
    """

    attention: Attention | None = None
    observers: tuple[Observer, ...] = ()
    timing: contextlib.AbstractContextManager[None] | None = None
    before: list[Part] = field(default_factory=list)
    loads: LayerLoads | None = None
    again: Callable[[str], ForwardBatch] | None = None
    tail_lens: tuple[int, ...] | None = None
    first_rows: tuple[tuple[int, Candidate], ...] = ()

    @classmethod
    def of(cls, parts: Sequence[Part], **more: Any) -> Extras:
        """Of a batch that is computed in `parts`, with `more` of the attributes."""
        *before, last = parts
        return cls(last.attention, last.observers, before=before, **more)

    @property
    def changes_anything(self) -> bool:
        """Whether the forward is not simply SGLang's."""
        extras = (self.attention, self.observers or None, self.timing, self.first_rows or None)
        return any(one is not None for one in extras)


def announce(forward_batch: ForwardBatch, extras: Extras) -> None:
    """Has the forward of a batch differ from stock SGLang's."""
    setattr(forward_batch, _EXTRAS, extras)


def forward(
    original: Callable[..., Any], model_runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `ModelRunner.forward`."""
    extras: Extras | None = getattr(forward_batch, _EXTRAS, None)
    if extras is None:
        return original(model_runner, forward_batch, *args, **kwargs)
    stock = partial(original, model_runner)
    hidden: list[torch.Tensor] = []
    with extras.timing or contextlib.nullcontext():
        try:
            is_cut = bool(extras.before)
            while extras.before:  # what its attention has made of the whole prompt is not kept for the next
                part = extras.before.pop(0)
                divide_adapters(model_runner.lora_manager, part.batch)
                done = _forward_part(part, extras.loads, partial(stock, part.batch, *args, **kwargs), model_runner)
                hidden_states = done.logits_output.hidden_states
                # The buffer of a graph, which the next part writes over.
                hidden.append(None if hidden_states is None else hidden_states.clone())
            if is_cut:
                divide_adapters(model_runner.lora_manager, forward_batch)
            last = Part(forward_batch, extras.attention, extras.observers)
            output = _forward_part(last, extras.loads, partial(stock, forward_batch, *args, **kwargs), model_runner)
            if extras.attention is not None and forward_batch.capture_hidden_mode.is_full():
                _give_hidden(output.logits_output, hidden, extras)
        except LayerFailed as failure:
            assert extras.again is not None
            output = forward(original, model_runner, extras.again(failure.reason), *args, **kwargs)
    for place, candidate in extras.first_rows:  # sampling writes over them
        candidate.first_logits = output.logits_output.next_token_logits[place].float().clone()
    return output


def _give_hidden(logits_output: Any, before: list[torch.Tensor], extras: Extras) -> None:
    """Leaves the hidden states that SGLang expects: of all rows for a draft of EAGLE, else of the ordinary extends."""
    own = logits_output.hidden_states
    if extras.tail_lens is None:
        logits_output.hidden_states = torch.cat([*before, own])
        return
    assert extras.attention is not None
    ends = itertools.accumulate(extras.attention.row_lens)  # those that are left; rows of an extend never leave
    tails = [own[end - tail_len : end] for end, tail_len in zip(ends, extras.tail_lens, strict=True)]
    logits_output.hidden_states = torch.cat(tails)


def _forward_part(part: Part, loads: LayerLoads | None, stock: Callable[[], Any], model_runner: ModelRunner) -> Any:
    attention = part.attention
    if attention is None and not part.observers:
        return stock()
    layerwise: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(attention, LayerwiseForward):
        layerwise = attention.run()
    with (
        _graphs_that_fit(model_runner, attention, loads),
        attending(model_runner.attn_backend, attention, part.observers, loads),
        layerwise,
    ):
        output = stock()
    for observer in part.observers:
        observer.finish()
    return output


@contextlib.contextmanager
def _graphs_that_fit(
    model_runner: ModelRunner, attention: Attention | None, loads: LayerLoads | None
) -> Iterator[None]:
    """Inside the scope a prefill graph is replayed only where it calls the backend for every layer.

    A breakable graph does. No graph can replay a forward in which rows leave, nor one that brings in layers: what some
    models captured writes K and V of the rows before the backend is called, and what comes in then lies over them.
    """
    runner = model_runner.prefill_cuda_graph_runner
    calls_backend = isinstance(getattr(runner, "backend", None), BreakableCudaGraphBackend)
    if runner is None or (calls_backend and loads is None and not isinstance(attention, LayerwiseForward)):
        yield
        return
    model_runner.prefill_cuda_graph_runner = None
    try:
        yield
    finally:
        model_runner.prefill_cuda_graph_runner = runner
