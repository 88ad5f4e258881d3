"""ModelRunner: one forward, in which rows stand in front of ordinary extends.

Verb: `forward` (handler of a hook: lets our code attend during one forward; the forward runs in several parts if a step
has no room for all rows, or if a question must first choose some).

Promises: SGLang alone computes a batch without an announced forward; an announcement ends with its forward.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import BreakableCudaGraphBackend

from sglang_chunk_cache.forward.attending import Attention, attending
from sglang_chunk_cache.forward.forward import Forward, Part, announced
from sglang_chunk_cache.forward.selection.executor import LayerwiseForward, divide_adapters
from sglang_chunk_cache.host.attention_backend import writes_kv_early
from sglang_chunk_cache.kv.partial_load import LayerFailed, LayerLoads

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


def forward(
    original: Callable[..., Any], model_runner: ModelRunner, forward_batch: ForwardBatch, *args: Any, **kwargs: Any
) -> Any:
    """AROUND `ModelRunner.forward`."""
    announced_forward = announced(forward_batch)
    if announced_forward is None:
        return original(model_runner, forward_batch, *args, **kwargs)

    assert announced_forward.batch is forward_batch, "SGLang computes the batch that it was given"

    def stock(batch: ForwardBatch) -> Any:
        return original(model_runner, batch, *args, **kwargs)

    output = _compute(announced_forward, stock, model_runner)
    for place, candidate in announced_forward.first_rows:  # sampling writes over them
        candidate.first_logits = output.logits_output.next_token_logits[place].float().clone()
    return output


def _compute(forward: Forward, stock: Callable[[ForwardBatch], Any], model_runner: ModelRunner) -> Any:
    """Computes all parts, or another forward instead if KV does not arrive; returns the output of the last part."""
    *before, last = forward.parts
    hidden: list[torch.Tensor] = []
    with forward.timing or contextlib.nullcontext():
        try:
            for part in before:
                divide_adapters(model_runner.lora_manager, part.batch)
                done = _compute_part(part, forward.loads, stock, model_runner)
                if not part.is_question and (hidden_states := done.logits_output.hidden_states) is not None:
                    hidden.append(hidden_states.clone())  # the buffer of a graph, which the next part writes over
            if before:
                last = last.ready()
                divide_adapters(model_runner.lora_manager, last.batch)
            output = _compute_part(last, forward.loads, stock, model_runner)
            if last.attention is not None and last.batch.capture_hidden_mode.is_full():
                _give_hidden(output.logits_output, hidden, last.attention, forward.tail_lens)
            return output
        except LayerFailed as failure:
            assert forward.instead is not None, "a forward without loads waits for no layer"
            return _compute(forward.instead(failure.reason), stock, model_runner)


def _give_hidden(
    logits_output: Any, before: list[torch.Tensor], attention: Attention, tail_lens: tuple[int, ...] | None
) -> None:
    """Sets the hidden states that SGLang expects: of all rows for EAGLE, else of the ordinary extends only."""
    own = logits_output.hidden_states
    if tail_lens is None:
        logits_output.hidden_states = torch.cat([*before, own])
        return
    ends = itertools.accumulate(attention.row_lens)  # rows that are left; those of an extend never leave
    tails = [own[end - tail_len : end] for end, tail_len in zip(ends, tail_lens, strict=True)]
    logits_output.hidden_states = torch.cat(tails)


def _compute_part(
    part: Part, loads: LayerLoads | None, stock: Callable[[ForwardBatch], Any], model_runner: ModelRunner
) -> Any:
    """Computes one part; returns the output of SGLang's forward, or None if the part ends at an earlier layer."""
    attention, output = part.attention, None
    if attention is None and not part.observers and part.states is None:
        return stock(part.batch)
    # For observers of stock attention; a copy, because some models change their positions in place.
    stock_positions = part.batch.positions.clone() if attention is None else None
    layerwise: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if isinstance(attention, LayerwiseForward) and attention.rows_leave:
        layerwise = attention.run()
    with (
        _graphs_that_fit(model_runner, part, loads),
        attending(
            model_runner.attn_backend, attention, part.observers, loads, stock_positions, part.states, part.last_layer
        ),
        layerwise,
    ):
        output = stock(part.batch)
    for observer in part.observers:
        observer.finish()
    return output


@contextlib.contextmanager
def _graphs_that_fit(model_runner: ModelRunner, part: Part, loads: LayerLoads | None) -> Iterator[None]:
    """Inside the scope a prefill graph is replayed only if it calls the backend for every layer, as breakable ones do.

    SGLang decides by the attribute `prefill_cuda_graph_runner` alone, so the attribute is None meanwhile where no graph
    fits. A model's forwards do not nest.

    No graph fits a forward in which rows leave, one that ends before its last layer, or one with states, whose layers
    are computed in rounds or twice. Graphs of some models write K and V of the rows before they call the backend: KV
    that is brought in for a layer then would lie over the rows, and a correction could not read what stood there.
    """
    runner = model_runner.prefill_cuda_graph_runner
    fits = isinstance(getattr(runner, "backend", None), BreakableCudaGraphBackend)
    fits = fits and loads is None and part.states is None and part.last_layer is None
    if isinstance(part.attention, LayerwiseForward):
        fits = fits and not part.attention.rows_leave and not writes_kv_early(model_runner.attn_backend)
    if runner is None or fits:
        yield
        return
    model_runner.prefill_cuda_graph_runner = None
    try:
        yield
    finally:
        model_runner.prefill_cuda_graph_runner = runner
