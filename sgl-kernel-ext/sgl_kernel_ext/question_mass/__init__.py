"""Question mass: how much attention the questions of several requests give to each key, summed over layers.

    Questions       which rows ask, and which keys each of them sees; made once for all layers
    question_mass   the mass that each key receives from the question of its request

K is read where it lies, by slot. On a GPU three launches score all layers, heads and requests; on a CPU one request and
layer at a time is scored as by `attention_mass`. What a key receives does not depend on the other requests.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch

from sgl_kernel_ext.attention_mass import mass_by_torch
from sgl_kernel_ext.backend import Backend, check_sinks, resolve_backend
from sgl_kernel_ext.transfer import upload

__all__ = ["Questions", "question_mass"]


class Questions:
    """Questions of some requests: each is consecutive rows, and a row sees its request's keys up to its own position.

    Args:
        first_rows: the first row of each question among those of the forward.
        row_lens: rows of each question, at least one.
        starts: position of the first row of each question.
        kv_lens: keys of each request.
        kv_slots: [sum of kv_lens] int64, the slot of each key, one request behind the other.

    Raises:
        ValueError: a question reaches past the keys of its request, or lengths do not fit together.
    """

    def __init__(
        self,
        first_rows: Sequence[int],
        row_lens: Sequence[int],
        starts: Sequence[int],
        kv_lens: Sequence[int],
        kv_slots: torch.Tensor,
    ) -> None:
        for start, row_len, kv_len in zip(starts, row_lens, kv_lens, strict=True):
            if start < 0 or row_len < 1 or start + row_len > kv_len:
                raise ValueError(f"starts, row_lens: rows [{start}, {start + row_len}) do not lie in {kv_len} keys")
        if kv_slots.shape != (sum(kv_lens),) or kv_slots.dtype != torch.int64:
            raise ValueError(f"kv_slots: {kv_slots.dtype} {tuple(kv_slots.shape)}, need int64 ({sum(kv_lens)},)")
        self.row_lens, self.starts, self.kv_lens, self.kv_slots = row_lens, starts, kv_lens, kv_slots
        self._first_rows = first_rows

    @property
    def num_rows(self) -> int:
        """Rows of all questions."""
        return sum(self.row_lens)

    @cached_property
    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[num_rows] int64, the questions' rows in the forward, and [num_requests, 5] int64, what a kernel must know.

        That is, for each request: its first row among those of all questions, its number of rows, the position of its
        first row, its first key among those of all requests, its number of keys.
        """
        rows = [np.arange(first, first + n) for first, n in zip(self._first_rows, self.row_lens, strict=True)]
        begins = [[0, *itertools.accumulate(lens[:-1])] for lens in (self.row_lens, self.kv_lens)]
        requests = np.array([begins[0], self.row_lens, self.starts, begins[1], self.kv_lens], dtype=np.int64).T
        index, table = upload([np.concatenate(rows).astype(np.int64), requests.copy()], self.kv_slots.device)
        return index, table

    def take(self, q: torch.Tensor, out: torch.Tensor) -> None:
        """Copies the questions' rows of `q` [num rows of the forward, ...] into `out` [num_rows, ...]."""
        torch.index_select(q, 0, self.on_device[0], out=out)


def question_mass(
    q: torch.Tensor,
    k_buffers: Sequence[torch.Tensor],
    questions: Questions,
    *,
    sm_scale: float,
    logit_cap: float = 0.0,
    k_scales: Sequence[float] | None = None,
    squared: bool = False,
    sinks: Sequence[torch.Tensor] | None = None,
    added_to: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """The softmax mass that questions give to the keys of their requests: mean over heads, sum over rows and layers.

    Used for the scores of FusionRAG (section 3.2), ProphetKV and, squared, of InfoFlow KV.

    Args:
        q: [num_layers, questions.num_rows, num_q_heads, head_dim], dense.
        k_buffers: one per layer, [num_slots, num_kv_heads, head_dim], all of one shape but for the slots, one dtype
            (fp8 too) and equal strides; query head h reads key head h // (num_q_heads // num_kv_heads).
        sm_scale, logit_cap: as in `attention_mass`.
        k_scales: of each layer: K is this times what is stored; None = 1.
        squared: sum the squares of the softmax instead.
        sinks: of each layer [num_q_heads], as in `attention_mass`; None = no layer has any.
        added_to: [sum of kv_lens] fp32, the result for earlier layers. These layers are added to it one after the
            other, so that sums do not depend on how layers are divided into calls.

    Returns:
        [sum of kv_lens] fp32; 0 behind the last row of a question.

    Raises:
        ValueError: shapes, dtypes or strides do not fit together; the message names the argument.

    Example:
        >>> q, k = torch.randn(1, 2, 8, 64), torch.randn(10, 2, 64)
        >>> asked = Questions([0], [2], [8], [10], torch.arange(10))
        >>> received = question_mass(q, [k], asked, sm_scale=0.125)
        >>> received.shape, round(float(received.sum()), 3)
        (torch.Size([10]), 2.0)
    """
    k_scales = [1.0] * len(k_buffers) if k_scales is None else k_scales
    _check(q, k_buffers, questions, k_scales, sinks, added_to)
    if resolve_backend(backend, q.device, "question_mass") == "triton":
        from sgl_kernel_ext.question_mass.triton import question_mass_triton

        return question_mass_triton(
            q,
            k_buffers,
            questions,
            sm_scales=[sm_scale * scale for scale in k_scales],
            logit_cap=logit_cap,
            squared=squared,
            sinks=sinks,
            added_to=added_to,
        )
    received = []
    slots, so_far = (None if one is None else one.split(questions.kv_lens) for one in (questions.kv_slots, added_to))
    rows = q.split(questions.row_lens, dim=1)
    for i, (start, row_len) in enumerate(zip(questions.starts, questions.row_lens, strict=True)):
        own = None if so_far is None else so_far[i]
        positions = torch.arange(start, start + row_len, device=q.device)
        for layer, (buffer, scale) in enumerate(zip(k_buffers, k_scales, strict=True)):
            mass, _ = mass_by_torch(
                rows[i][layer],
                buffer[slots[i]],
                positions,
                sm_scale=sm_scale * scale,
                logit_cap=logit_cap,
                squared=squared,
                sinks=None if sinks is None else sinks[layer],
            )
            own = mass if own is None else own + mass
        received.append(own)
    return torch.cat(received)


def _check(
    q: torch.Tensor,
    k_buffers: Sequence[torch.Tensor],
    questions: Questions,
    k_scales: Sequence[float],
    sinks: Sequence[torch.Tensor] | None,
    added_to: torch.Tensor | None,
) -> None:
    if q.ndim != 4 or not q.is_contiguous() or not len(q) or q.shape[1] != questions.num_rows:
        raise ValueError(f"q: shape {tuple(q.shape)}, need dense [num_layers, {questions.num_rows}, heads, head_dim]")
    for name, values in (("k_buffers", k_buffers), ("k_scales", k_scales), ("sinks", sinks)):
        if values is not None and len(values) != len(q):
            raise ValueError(f"{name}: {len(values)} layers, but q has {len(q)}")
    first = k_buffers[0]
    if first.ndim != 3 or first.shape[2] != q.shape[3] or not first.shape[1] or q.shape[2] % first.shape[1]:
        raise ValueError(f"q, k_buffers: shapes {tuple(q.shape)} and {tuple(first.shape)} do not fit together")
    for layer, buffer in enumerate(k_buffers):
        if layout_of(buffer) != layout_of(first):
            raise ValueError(f"k_buffers[{layer}]: another layout than k_buffers[0]; score it by another call")
    for one in sinks or ():
        check_sinks(one, q.shape[2])
    if added_to is not None and (added_to.shape != questions.kv_slots.shape or added_to.dtype != torch.float32):
        raise ValueError(f"added_to: {added_to.dtype} {tuple(added_to.shape)}, need float32, one of each key")


def layout_of(buffer: torch.Tensor) -> tuple[object, ...]:
    """What the K of all layers that one call scores must have in common."""
    return buffer.dtype, buffer.shape[1:], buffer.stride()
