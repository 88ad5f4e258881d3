"""ModelCheck: forwards of the loaded model, when a server starts, that show whether its KV can be moved and whether
rows can be computed by themselves.

Verb: `check_loaded_model`. Forwards of one prompt of random tokens, longer than any window of the model:

    whole      by SGLang: K of every layer and the logits, with which the other forwards are compared
    moved      by SGLang again, at later positions: right behind, and at the end of the context. K must be that of
               `whole`, turned by our rotation, at *every* layer, since attention sees distances only; V should be that
               of `whole`, and its difference is taken as what rounding does to this model
    rows       by the attention of fused batches: all rows by our kernel; and, where SGLang's own backend serves runs,
               all but a gap, which keeps the KV of `whole`
    leaving    rows leave between layers, over the KV of `whole`; those that stay must be as if none had left

A layer is compared by the median over rows of their relative differences. Wrong angles or misplaced rows make it about
1, rounding does not, and a few rows that a router sends to other experts do not change the median. The difference
allowed is a number for each dtype, plus a multiple of the one between SGLang's own forwards `whole` and `moved`: where
attention looks at single tokens, a small difference of one layer becomes a larger one at the next. Layers where the one
of SGLang is too large are not compared; the log names the first. Every difference is the largest of all tensor-parallel
ranks, which compute these forwards together, so that all decide alike.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.runtime_context import get_parallel

from chunk_cache.index.transition_store import ChunkTransitions
from sglang_chunk_cache.flags.server_args import refuse
from sglang_chunk_cache.forward.attending import Attention
from sglang_chunk_cache.forward.forward import Forward, Part, announce
from sglang_chunk_cache.forward.own_batch import OwnPrompt, take_slots
from sglang_chunk_cache.forward.positions import stand_at
from sglang_chunk_cache.forward.rows import FusedRows
from sglang_chunk_cache.forward.runs import BackendRuns, Runs
from sglang_chunk_cache.forward.selection.executor import LayerwiseForward
from sglang_chunk_cache.forward.selection.progress import RequestProgress
from sglang_chunk_cache.forward.state_forward import StateForward
from sglang_chunk_cache.forward.state_rounds import Gap, RequestRows, Wanted
from sglang_chunk_cache.forward.whole_rows import AttentionNotServed
from sglang_chunk_cache.kv.layer_kv import kv_buffers
from sglang_chunk_cache.kv.ranks import max_over_ranks, of_one_rank, ranks_of_batch
from sglang_chunk_cache.kv.transition import Transition
from sglang_chunk_cache.start.runtime import ChunkRuntime

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler


logger = logging.getLogger(__name__)

TAIL_LEN = 32
"""Rows at the end, beyond any window, that are compared."""
HEAD_LEN = 64
"""Rows in front of them; more where the model has a longer window."""
TOLERANCES = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Relative difference that counts as rounding in rows of the first layer, by dtype of the model; it grows with the
square root of the layer's number."""
_MOVED = 3
"""Factor for keys that were moved: in bfloat16, by 4,000 positions, Qwen2.5-0.5B and SmolLM2-135M show 0.004 at
the first layer, 0.008 at the fourth and at most 0.017; models of random weights and peaked attention up to 0.04 at the
fourth. A window of 8 tokens at one layer of Qwen2.5-0.5B shows as 0.04 behind it."""
_QUANTIZED = 8
"""Further factor for a model with quantized weights: all rows of a forward may share a scale of activations, which
changes when rows leave. Not measured."""
_STORED = {torch.float8_e4m3fn: 2.0**-3, torch.float8_e5m2: 2.0**-2}
"""Added where K and V are stored in FP8: twice the most that rounding changes a number by, relative to it. Moved keys
are rounded three times and show 0.044 in e4m3 at the first layer of a random Llama and 0.08 at the fourth, in e5m2 0.24
at the third of a random Gemma 3; SGLang's kernels may also round Q and the softmax, or use new K and V unrounded."""
_ANGLE_ULPS = 4
_OWN = 3
"""Factor of the difference between SGLang's own forwards, which is added to the difference allowed."""
_MOST_OWN = 0.2
"""Largest such difference at a layer that is compared; a larger one could not be told from wrong angles."""


class _Unsound(Exception):
    """A comparison failed; the message says what was compared, and by how much it differs."""


@dataclass(frozen=True)
class _Pass:
    """What a forward left behind.

    Attributes:
        keys: `[num_layers]`, each `[num_tokens, num_kv_heads, dim]`, fp32: the part of the KV that is rotated.
        values: the part that is not, likewise.
        logits: `[vocab]` fp32 behind the last token.
    """

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    logits: torch.Tensor


def check_loaded_model(scheduler: Scheduler, chunks: ChunkRuntime) -> None:
    """Checks that chunks of the loaded model can be reused.

    Raises:
        StartRefused: they cannot; the sentence names what was compared, the layer and the difference. With `models`
            "any" a failed comparison is logged instead.
    """
    began = time.perf_counter()
    window = max(0, *chunks.layers.windows)
    model_config = scheduler.model_config
    num_tokens = min(TAIL_LEN + max(HEAD_LEN, window + 1), model_config.context_len // 2)
    num_free = scheduler.token_to_kv_pool_allocator.available_size() - 2 * scheduler.tree_cache.page_size
    if 2 * num_tokens > num_free:
        logger.warning(
            "Chunk cache: the KV pool is too small for a prompt longer than the window of the model (%d tokens), so "
            "the check of the model does not see beyond it; raise --max-total-tokens.",
            window,
        )
        num_tokens = num_free // 2
    num_tokens = max(num_tokens, TAIL_LEN + 2)
    with torch.no_grad(), scheduler.forward_stream_ctx:
        scheduler.forward_stream.wait_stream(scheduler.schedule_stream)
        _check_cap(scheduler, chunks)
        _check_rule(chunks)
        check = _Check(scheduler, chunks, num_tokens)
        try:
            check.run()
        except _Unsound as problem:
            if chunks.manager.config.models != "any":
                way_out = 'if you know better, "models": "any" in --chunk-cache-config serves it'
                refuse(f"this model cannot be served with --chunk-cache: {problem}; {way_out}.")
            logger.warning(
                'Chunk cache: %s; "models" is "any", so the model is served: answers may be wrong, also at ratio 1.0.',
                problem,
            )
        except AttentionNotServed as problem:
            refuse(f"this model cannot be served with --chunk-cache: {problem}.")
        finally:
            check.close()
    logger.info("Chunk cache: the model was checked in %.1f s (%d tokens)", time.perf_counter() - began, num_tokens)


def _check_rule(chunks: ChunkRuntime) -> None:
    """Checks the kernel of layers with states, which SGLang chooses once it has the model."""
    if chunks.states is None:
        return
    kernel = type(chunks.states.backend.kernel_dispatcher.extend_kernel).__name__
    if "Triton" not in kernel:
        refuse(
            f"layers with states would be computed by SGLang's {kernel}, which has not been run with --chunk-cache; "
            "add --linear-attn-prefill-backend triton."
        )


def _check_cap(scheduler: Scheduler, chunks: ChunkRuntime) -> None:
    backend = scheduler.tp_worker.model_runner.attn_backend
    if isinstance(backend, TorchNativeAttnBackend) and any(layer.logit_cap > 0 for layer in chunks.layers.attentions):
        refuse(
            "this model caps its attention's logits, and SGLang's attention backend torch_native leaves that out; name "
            "another with --attention-backend."
        )


class _Check:
    def __init__(self, scheduler: Scheduler, chunks: ChunkRuntime, num_tokens: int) -> None:
        self._runner = scheduler.tp_worker.model_runner
        self._chunks = chunks
        self._num_tokens = num_tokens
        self._positions = np.arange(num_tokens)
        rng = np.random.default_rng(0)
        self._ids = rng.integers(0, scheduler.model_config.vocab_size, num_tokens)
        taken = take_slots(scheduler, num_tokens)
        assert taken is not None, "an idle server has room for a short prompt"
        self._prompt = OwnPrompt(scheduler, "check of the model", array("q", self._ids.tolist()), *taken)
        self._allocator = scheduler.token_to_kv_pool_allocator
        self._others = self._allocator.alloc(len(self._prompt.slots))
        assert self._others is not None, "an idle server has room for two short prompts"
        self._shift = scheduler.model_config.context_len - num_tokens
        self._tolerance = TOLERANCES[self._runner.dtype] * (_QUANTIZED if scheduler.model_config.quantization else 1)
        self._stored = _STORED.get(self._runner.token_to_kv_pool.dtype, 0.0)
        self._known: ChunkTransitions[Transition] = ChunkTransitions()
        self._own: list[float] = []  # by layer, and of the logits: what rounding does to the model's own forward
        ranks = get_parallel().tp_group  # all, also where each attends alone: they share other layers
        self._reduce_max = max_over_ranks(ranks.cpu_group) if ranks.world_size > 1 else of_one_rank

    def close(self) -> None:
        self._prompt.close()
        self._allocator.free(self._others)

    def run(self) -> None:
        expected = self.compute()
        for shift in dict.fromkeys((self._shift, self._num_tokens)):
            keys, there = self.moved_keys(shift)
            self._own = self._differences(
                [*zip(there.values, expected.values, strict=True), (there.logits[None], expected.logits[None])]
            )
            self._compare_keys(keys, there.keys, shift)
        for how, positions, attention in self._attentions():
            self._bring_in(0)
            self._compare_forward(self._forward(positions, attention, states=self._over_gap(positions)), expected, how)
        first = next((layer for layer in range(len(self._own)) if not self._is_compared(layer)), None)
        if first is not None:
            logger.warning(
                "Chunk cache: rounding alone moves what this model computes from layer %d on by %.2g of its size, so "
                "the check of the model cannot see whether reused KV is right from there on.",
                first,
                self._own[first],
            )

    def compute(self) -> _Pass:
        """Computes the prompt by SGLang's own forward, then gives it other slots; the KV stays in the old ones."""
        begin, end = self._gap  # what it does to states is taken too
        states = self._states(self._positions, wanted=[Wanted(0, begin, end, begin, self._known)])
        computed = self._forward(self._positions, states=states)
        slots = self._prompt.slots
        self._prompt.move(self._others)
        self._others = slots
        return computed

    def moved_keys(self, shift: int) -> tuple[list[torch.Tensor], _Pass]:
        """The keys that `compute` left, by layer, moved by `shift` positions; and SGLang's own forward there."""
        there = self._forward(self._positions, shift=shift)
        self._bring_in(shift)
        keys, _ = self._kv()
        return keys, there

    @property
    def _gap(self) -> tuple[int, int]:
        """The positions `[begin, end)` that are reused while the rows around them are computed."""
        return self._num_tokens // 4, self._num_tokens // 2

    def _over_gap(self, positions: npt.NDArray[np.int64]) -> StateForward | None:
        transition = self._known.of(0, self._gap[1])
        assert (transition is None) == (self._chunks.states is None)
        return self._states(positions, gaps=() if transition is None else [Gap(self._gap[1], transition)])

    def _states(
        self, positions: npt.NDArray[np.int64], gaps: Sequence[Gap] = (), wanted: Sequence[Wanted] = ()
    ) -> StateForward | None:
        layers = self._chunks.states
        if layers is None:
            return None
        rows = RequestRows(self._prompt.row, positions, 0, gaps, wanted)
        return StateForward.of(layers, [rows], self._prompt.slots.device, is_fused=True)

    def _bring_in(self, shift: int) -> None:
        """Copies the KV of SGLang's own forward to the slots of the prompt, with keys turned by `shift` positions."""
        source, target = (slots[: self._num_tokens].to(torch.int64) for slots in (self._others, self._prompt.slots))
        self._chunks.assembler.copy(source, target, torch.full_like(source, shift))

    def _attentions(self) -> Iterator[tuple[str, npt.NDArray[np.int64], Attention]]:
        """Yields each attention of fused batches: how rows are computed, in words; their positions; the attention."""
        layers, has_states = self._chunks.layers, self._chunks.states is not None
        rows, gap = self._rows(self._positions), np.delete(self._positions, np.arange(*self._gap))
        yield "computed by our kernel", self._positions, rows
        if self._chunks.min_run_len is not None:
            yield "computed in runs", gap, self._runs(gap)
        elif has_states:
            yield "computed around a gap", gap, self._rows(gap)
        if has_states or get_parallel().attn_dp_enabled:
            return  # no row leaves
        leaving = _Leaving(rows.row_positions, num_layers=len(layers.modules))
        tp_size, adapters = ranks_of_batch().world_size, self._runner.lora_manager
        layerwise = LayerwiseForward(rows, [leaving], layers, tp_size, adapters)
        yield "computed while others leave", self._positions, layerwise

    # Forwards.

    def _forward(
        self,
        positions: npt.NDArray[np.int64],
        attention: Attention | None = None,
        shift: int = 0,
        states: StateForward | None = None,
    ) -> _Pass:
        """One forward of some rows of a prompt, by SGLang's backend or by `attention`."""
        batch = ForwardBatch.init_new(
            self._prompt.batch(positions), self._runner, return_hidden_states_before_norm=False
        )
        if attention is None:
            stand_at(batch, torch.from_numpy(positions + shift).to(batch.positions.device))
        else:
            stand_at(batch, attention.row_positions)  # the same tensor by which rows are masked, as in serving
        if attention is not None or states is not None:
            announce(Forward((Part(batch, attention, states=states),)))
        output = self._runner.forward(batch).logits_output
        return _Pass(*self._kv(), output.next_token_logits[0].float().clone())

    def _kv(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        slots = self._prompt.slots[: self._num_tokens].to(torch.int64)
        k, v = ([buffer[slots].float() for buffer in part] for part in kv_buffers(self._runner.token_to_kv_pool))
        return k, v

    def _rows(self, positions: npt.NDArray[np.int64]) -> FusedRows:
        return FusedRows.build(
            req_to_token=self._runner.req_to_token_pool.req_to_token,
            req_pool_indices=[self._prompt.row],
            kv_lens=[self._num_tokens],
            row_lens=[len(positions)],
            row_positions=torch.from_numpy(positions).to(self._prompt.slots.device),
            kv_pool=self._runner.token_to_kv_pool,
            kernel=self._chunks.kernel,
        )

    def _runs(self, positions: npt.NDArray[np.int64]) -> BackendRuns:
        device = self._prompt.slots.device
        runs = Runs.of([positions], [self._prompt.row])
        uploaded = [torch.from_numpy(one).to(device) for one in runs.arrays()]
        at = torch.from_numpy(positions).to(device)
        runner = self._runner
        return BackendRuns(runs, uploaded, at, [len(positions)], runner.token_to_kv_pool, runner.attn_backend.forward)

    # Comparisons.

    def _is_compared(self, layer: int) -> bool:
        return self._own[layer] <= _MOST_OWN

    def _compare_keys(self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], shift: int) -> None:
        """Compares moved keys with those that the model computed at these positions, layer by layer."""
        # The model's table of cosines is fp32, so angles have an error of this size.
        of_table = _ANGLE_ULPS * 2.0**-24 * (shift + self._num_tokens)
        for layer, error in enumerate(self._differences(zip(found, expected, strict=True))):
            allowed = self._allowed(layer, _MOVED) + of_table
            if self._is_compared(layer) and not error <= allowed:
                raise _Unsound(
                    f"keys of layer {layer}, moved by {shift} positions, differ from those that the model "
                    f"computes there by {error:.2g} of their size ({allowed:.2g} is rounding)"
                )

    def _compare_forward(self, found: _Pass, expected: _Pass, how: str) -> None:
        """Compares rows of the tail with those of the model's own forward; a layer's error shows in the next layer."""
        tails = [(a[-TAIL_LEN:], b[-TAIL_LEN:]) for a, b in zip(found.keys, expected.keys, strict=True)]
        for layer, error in enumerate(self._differences([*tails, (found.logits[None], expected.logits[None])])):
            allowed = self._allowed(layer) * (1.0 if layer < len(tails) else 3.0)  # no median over rows of logits
            if self._is_compared(layer) and not error <= allowed:
                where = f"behind layer {layer - 1}" if layer else "in front of the first layer"
                raise _Unsound(
                    f"{where} rows {how} differ from those of the model's own forward by {error:.2g} of their size "
                    f"({allowed:.2g} is rounding)"
                )

    def _differences(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
        """The `_difference` of each pair, the largest of all ranks."""
        own = np.abs([_difference(*pair) for pair in pairs])
        # Numbers that are not negative have the order of their bits, and NaN is the last of them.
        return self._reduce_max(own.view(np.int64)).view(np.float64).tolist()

    def _allowed(self, layer: int, moved: int = 1) -> float:
        return float((moved * self._tolerance + self._stored) * (1 + layer) ** 0.5 + _OWN * self._own[layer])


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Median over rows of their relative differences."""
    found, expected = found.flatten(1), expected.flatten(1)
    return float(((found - expected).norm(dim=1) / expected.norm(dim=1)).median())


class _Leaving(RequestProgress):
    """A request of which every second row in front of the tail leaves at the second layer, all others at the last."""

    @property
    def rows_leave(self) -> bool:
        return True

    def leave(self, layer_id: int) -> torch.Tensor | None:
        index = torch.arange(self.num_rows, device=self.positions.device)
        if layer_id == min(1, self._num_layers - 1):
            index = torch.cat([index[:-TAIL_LEN:2], index[-TAIL_LEN:]])
        elif layer_id == self._num_layers - 1:
            index = index[-TAIL_LEN:]
        else:
            return None
        self.positions = self.positions[index]
        return index
