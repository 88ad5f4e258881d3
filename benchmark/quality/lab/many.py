"""Many rows at once: the forward of `RowModel` over several caches, side by side.

On a GPU a condition takes a tenth of the time that it takes alone. `run_many` is the forward, `behind` computes chunks,
each behind a context of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from benchmark.quality.lab.rows import KV, Change, RowModel, softmax_attention


def padded(parts: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    """`[num, longest]` int64."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=fill)


def run_many(
    model: RowModel,
    cache: KV,
    ids: torch.Tensor,
    positions: torch.Tensor,
    kv_len: int,
    *,
    change: Change | None = None,
) -> torch.Tensor:
    """Computes rows over caches, one to each, and writes their K and V into them.

    Args:
        cache: `[num_layers, num, capacity, num_kv_heads, head_dim]`.
        ids, positions: `[num, num_rows]` int64; a row at a position from `kv_len` on is computed for nothing.

    Returns:
        Hidden states behind the last norm, `[num, num_rows, hidden_size]`.
    """
    masks = model.masks(positions, kv_len)
    rotations = model.rotations(positions)
    each = torch.arange(len(ids))[:, None]
    x = model.embed(ids)
    for index in range(model.num_layers):
        kind = model.kind(index)
        q, k, v = model.project(index, x, *rotations[kind])
        if change is not None:
            change(index, cache, k, v)
        cache.k[index][each, positions], cache.v[index][each, positions] = k, v
        keys, values = cache.k[index][:, :kv_len], cache.v[index][:, :kv_len]
        x = model.finish(index, x, softmax_attention(q, keys, values, masks[kind]))
    return model.norm(x)


@torch.no_grad()
def behind(model: RowModel, head: KV, contexts: Sequence[torch.Tensor], chunks: Sequence[torch.Tensor]) -> list[KV]:
    """KV of chunks `[num_layers, len, ...]`, each computed behind `head` and the context of the same number.

    Args:
        head: `[num_layers, head_len, ...]`.
        contexts, chunks: ids.
    """
    head_len = head.k.shape[1]
    at = [head_len + len(context) for context in contexts]
    kv_len = max(start + len(chunk) for start, chunk in zip(at, chunks, strict=True))
    shape = (model.num_layers, len(chunks), kv_len + 1, model.num_kv_heads, model.head_dim)
    cache = KV(torch.zeros(shape), torch.zeros(shape))
    cache.k[:, :, :head_len], cache.v[:, :, :head_len] = head.k[:, None], head.v[:, None]
    for ids, starts in ((contexts, [head_len] * len(chunks)), (chunks, at)):
        if max(map(len, ids)):
            where = [torch.arange(start, start + len(part)) for start, part in zip(starts, ids, strict=True)]
            run_many(model, cache, padded(ids, 0), padded(where, kv_len), kv_len)
    return [
        KV(cache.k[:, i, start : start + len(chunk)], cache.v[:, i, start : start + len(chunk)])
        for i, (start, chunk) in enumerate(zip(at, chunks, strict=True))
    ]
