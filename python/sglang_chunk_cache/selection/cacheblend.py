"""CacheBlend's scores: how far a reused token's K and V are from what they should be (section 4.3, eq. 2)."""

from __future__ import annotations

import torch

from sgl_kernel_ext.kv_deviation import kv_deviation
from sglang_chunk_cache.selection.base import RowsAtLayer


def score(rows: RowsAtLayer) -> torch.Tensor:
    """`[num_rows]`: ||K_new - K_old||^2 + ||V_new - V_old||^2."""
    return kv_deviation(rows.k, rows.v, rows.k_buffer, rows.v_buffer, slots=rows.slots(), backend=rows.kernel)
