"""CacheBlend's scores: how far a reused token's K and V are from what they should be (section 4.1)."""

from __future__ import annotations

import torch

from chunk_cache.methods.scored import DEVIATION
from sgl_kernel_ext.kv_deviation import kv_deviation
from sglang_chunk_cache.forward.selection.scorer import RowsAtLayer


def score(rows: RowsAtLayer) -> torch.Tensor:
    """`[num_rows]`: ||K_new - K_old||^2 + ||V_new - V_old||^2; of V alone where the option says so."""
    return kv_deviation(
        rows.k,
        rows.v,
        rows.stored.k,
        rows.stored.v,
        slots=rows.slots(),
        k_scale=rows.stored.k_scale,
        v_scale=rows.stored.v_scale,
        only_v=dict(rows.options).get(DEVIATION.name) == "v",
        backend=rows.kernel,
    )
