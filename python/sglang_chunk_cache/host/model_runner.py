"""ModelRunner: one forward, in which rows stand in front of ordinary extends.

Verb: `forward` (handler of a hook: has the rows attended to for the time of one forward, of one part after another
where a step has no room for all).

Promises: a batch of which nothing was announced is SGLang's alone; nothing announced outlives its forward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

from sglang_chunk_cache.forward.attending import Attention, attending
from sglang_chunk_cache.forward.forward_changes import ForwardChanges, Part, announced
from sglang_chunk_cache.forward.selection.executor import LayerwiseForward, divide_adapters
from sglang_chunk_cache.kv.partial_load import LayerFailed, LayerLoads

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def forward(
    original: Callable[..., Any], model_runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `ModelRunner.forward`."""
    extras = announced(forward_batch)
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


def _give_hidden(logits_output: Any, before: list[torch.Tensor], extras: ForwardChanges) -> None:
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
