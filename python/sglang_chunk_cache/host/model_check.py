"""ModelCheck: forwards of the loaded model itself, when a server starts, that show that its KV can be moved and that
rows can be computed by themselves.

Verb: `check_loaded_model`. Four forwards of one prompt of random tokens, longer than any window of the model:

    whole      as SGLang serves it: K of every layer and the logits are what the others are compared with
    moved      SGLang's again, at the last positions of the context: K must be that of `whole`, turned by our rotation.
               Attention sees distances only, so K of *every* layer must
    rows       by what attends in fused batches: all rows by our kernel, over the KV of `moved`, copied and turned back;
               and, where SGLang's own backend serves runs, all but a gap, which keeps the KV of `whole`
    leaving    rows leave between layers, over the KV of `whole`; those that stay must be as if nobody had left

A layer is compared by the median over rows of their relative differences: wrong angles or misplaced rows are about as
large as the keys, rounding is not, and a router of experts that flips for a row is no fault of ours.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.distributed import get_tp_group
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_chunk_cache.host.forward import announce
from sglang_chunk_cache.host.own_batch import OwnPrompt, take_slots
from sglang_chunk_cache.kv.assembler import kv_buffers
from sglang_chunk_cache.kv.rows import FusedRows
from sglang_chunk_cache.kv.runs import BackendRuns, Runs
from sglang_chunk_cache.selection.executor import LayerwiseForward
from sglang_chunk_cache.server_args import refuse

if TYPE_CHECKING:
    from sglang.srt.managers.scheduler import Scheduler

    from sglang_chunk_cache.host.attention_backend import Attention
    from sglang_chunk_cache.host.runtime import ChunkRuntime

logger = logging.getLogger(__name__)

TAIL_LEN = 32
"""Rows at the end, beyond any window, that are compared."""
HEAD_LEN = 64
"""Rows in front of them where the model has no window."""
TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""Relative difference of keys that is rounding, by dtype of the model; of logits five times as much."""
_ANGLE_ULPS = 4


@dataclass(frozen=True)
class _Pass:
    """What a forward left behind.

    Attributes:
        keys: `[num_layers]`, each `[num_tokens, num_kv_heads, dim]`, fp32: what of K is rotated, of every position.
        logits: `[vocab]` fp32 behind the last token.
    """

    keys: list[torch.Tensor]
    logits: torch.Tensor


def check_loaded_model(scheduler: Scheduler, chunks: ChunkRuntime) -> None:
    """Returns where chunks of this model can be reused.

    Raises:
        StartRefused: they cannot; the sentence names what was compared, the layer and the difference.
    """
    began = time.perf_counter()
    window = max(0, *(attention.sliding_window_size for attention in chunks.layers.attentions))
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
        check = _Check(scheduler, chunks, num_tokens)
        try:
            check.run()
        finally:
            check.close()
    logger.info("Chunk cache: the model was checked in %.1f s (%d tokens)", time.perf_counter() - began, num_tokens)


class _Check:
    def __init__(self, scheduler: Scheduler, chunks: ChunkRuntime, num_tokens: int) -> None:
        self._runner = scheduler.tp_worker.model_runner
        self._chunks = chunks
        self._num_tokens = num_tokens
        self._positions = np.arange(num_tokens)
        rng = np.random.default_rng(0)
        ids = array("q", rng.integers(0, scheduler.model_config.vocab_size, num_tokens).tolist())
        self._prompts = []
        for name in ("whole", "moved"):
            taken = take_slots(scheduler, num_tokens)
            assert taken is not None, "an idle server has room for two short prompts"
            self._prompts.append(OwnPrompt(scheduler, f"check of the model, {name}", ids, *taken))
        self._shift = scheduler.model_config.context_len - num_tokens
        self._tolerance = TOLERANCES[self._runner.dtype]

    def close(self) -> None:
        for prompt in self._prompts:
            prompt.close()

    def run(self) -> None:
        whole, moved = self._prompts
        chunks, num_tokens = self._chunks, self._num_tokens
        tail = slice(num_tokens - TAIL_LEN, num_tokens)
        expected = self._forward(whole, self._positions)
        there = self._forward(moved, self._positions, shift=self._shift)
        whole_slots, moved_slots = (prompt.slots[:num_tokens].to(torch.int64) for prompt in self._prompts)
        # Turned to where `moved` computed them, and compared there; then back, as a request would bring them in.
        delta = torch.full_like(whole_slots, self._shift)
        chunks.assembler.copy(whole_slots, moved_slots, delta)
        turned = self._keys(moved)
        what = f"keys moved by {self._shift} positions differ from those that it computes there"
        self._compare(turned, there.keys, what, slice(0, num_tokens), angle=self._shift + num_tokens)
        chunks.assembler.copy(whole_slots, moved_slots, torch.zeros_like(delta))

        rows = self._rows(moved, self._positions)
        found = self._forward(moved, self._positions, rows)
        self._compare(found.keys, expected.keys, "rows attended by our kernel differ from its own forward", tail)
        self._compare_logits(found, expected, "attended by our kernel")
        chunks.assembler.copy(whole_slots, moved_slots, torch.zeros_like(delta))
        if chunks.min_run_len is not None:
            gap = np.delete(self._positions, np.arange(num_tokens // 4, num_tokens // 2))
            found = self._forward(moved, gap, self._runs(moved, gap))
            self._compare(found.keys, expected.keys, "rows attended in runs differ from its own forward", tail)
            self._compare_logits(found, expected, "attended in runs")
            chunks.assembler.copy(whole_slots, moved_slots, torch.zeros_like(delta))
        leaving = _Leaving(rows.row_positions, len(chunks.layers.modules))
        layerwise = LayerwiseForward(rows, [leaving], [None], None, chunks.layers, get_tp_group().world_size)
        found = self._forward(moved, self._positions, layerwise)
        self._compare(found.keys, expected.keys, "rows that stay while others leave differ from its own forward", tail)
        self._compare_logits(found, expected, "where rows leave")

    # Forwards.

    def _forward(
        self, prompt: OwnPrompt, positions: npt.NDArray[np.int64], attention: Attention | None = None, shift: int = 0
    ) -> _Pass:
        """One forward of some rows of a prompt, by SGLang's backend or by `attention`."""
        batch = ForwardBatch.init_new(
            prompt.batch(positions), self._runner, return_hidden_states_before_norm=False
        )
        at = torch.from_numpy(positions + shift).to(batch.positions)
        batch.positions = at
        if attention is not None:
            announce(batch, attention)
        output = self._runner.forward(batch).logits_output
        return _Pass(self._keys(prompt), output.next_token_logits[0].float().clone())

    def _keys(self, prompt: OwnPrompt) -> list[torch.Tensor]:
        buffers, _ = kv_buffers(self._runner.token_to_kv_pool)
        slots = prompt.slots[: self._num_tokens].to(torch.int64)
        return [buffer[slots].float() for buffer in buffers]

    def _rows(self, prompt: OwnPrompt, positions: npt.NDArray[np.int64]) -> FusedRows:
        return FusedRows.build(
            req_to_token=self._runner.req_to_token_pool.req_to_token,
            req_pool_indices=[prompt.row],
            kv_lens=[self._num_tokens],
            row_lens=[len(positions)],
            row_positions=torch.from_numpy(positions).to(prompt.slots.device),
            kv_pool=self._runner.token_to_kv_pool,
            kernel=self._chunks.kernel,
        )

    def _runs(self, prompt: OwnPrompt, positions: npt.NDArray[np.int64]) -> BackendRuns:
        device = prompt.slots.device
        runs = Runs.of([positions], [prompt.row])
        uploaded = [torch.from_numpy(one).to(device) for one in runs.arrays()]
        at = torch.from_numpy(positions).to(device)
        runner = self._runner
        return BackendRuns(runs, uploaded, at, [len(positions)], runner.token_to_kv_pool, runner.attn_backend.forward)

    # Comparisons.

    def _compare(
        self, found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], what: str, rows: slice, angle: int = 0
    ) -> None:
        """The keys of `rows`, layer by layer; `angle` is the largest position of which a table of cosines was used."""
        allowed = self._tolerance + _ANGLE_ULPS * 2.0**-24 * angle
        for layer, (mine, theirs) in enumerate(zip(found, expected, strict=True)):
            difference = (mine[rows] - theirs[rows]).flatten(1).norm(dim=1)
            error = float((difference / theirs[rows].flatten(1).norm(dim=1)).median())
            if not error <= allowed:
                refuse(
                    f"this model cannot be served with --chunk-cache: at layer {layer} {what} by {error:.2g} of their "
                    f"size ({allowed:.2g} is rounding)."
                )

    def _compare_logits(self, found: _Pass, expected: _Pass, how: str) -> None:
        error = float((found.logits - expected.logits).norm() / expected.logits.norm())
        if not error <= 5 * self._tolerance:
            refuse(
                f"this model cannot be served with --chunk-cache: behind its last layer logits {how} differ from those "
                f"of its own forward by {error:.2g} of their size ({5 * self._tolerance:.2g} is rounding)."
            )


class _Leaving:
    """A request of which every second row in front of the tail leaves at the second layer, all others at the last."""

    asks_first = corrects = observes = False
    report = None
    num_question = num_answer = 0

    def __init__(self, positions: torch.Tensor, num_layers: int) -> None:
        self.positions = positions
        self._num_layers = num_layers

    def leave(self, layer_id: int) -> torch.Tensor | None:
        """As of `RequestProgress`."""
        num_rows = len(self.positions)
        index = torch.arange(num_rows, device=self.positions.device)
        if layer_id == min(1, self._num_layers - 1):
            index = torch.cat([index[: num_rows - TAIL_LEN : 2], index[num_rows - TAIL_LEN :]])
        elif layer_id == self._num_layers - 1:
            index = index[num_rows - TAIL_LEN :]
        else:
            return None
        self.positions = self.positions[index]
        return index

    def selects_at(self, layer_id: int) -> bool:
        return False

    def finish_layer(self) -> None:
        """Nothing is decided."""
