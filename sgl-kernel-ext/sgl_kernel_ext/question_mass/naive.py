"""question_mass by its definition: the `attention_mass` of each question and layer by itself, added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sgl_kernel_ext.attention_mass.naive import attention_mass_reference
from sgl_kernel_ext.question_mass import Questions


def question_mass_reference(
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
    dtype: torch.dtype = torch.float64,
) -> torch.Tensor:
    """`question_mass`, everything computed in `dtype`."""
    received, row = [], 0
    slots = questions.kv_slots.split(questions.kv_lens)
    for own, start, row_len in zip(slots, questions.starts, questions.row_lens, strict=True):
        positions = torch.arange(start, start + row_len, device=q.device)
        masses = [
            attention_mass_reference(
                q[layer, row : row + row_len],
                buffer[own],
                positions,
                sm_scale=sm_scale,
                logit_cap=logit_cap,
                k_scale=1.0 if k_scales is None else k_scales[layer],
                squared=squared,
                sinks=None if sinks is None else sinks[layer],
                dtype=dtype,
            )[0]
            for layer, buffer in enumerate(k_buffers)
        ]
        received.append(torch.stack(masses).sum(0))
        row += row_len
    total = torch.cat(received)
    return total if added_to is None else added_to.to(dtype) + total
