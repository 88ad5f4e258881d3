"""Many rows at once: chunks behind contexts, and conditions of one case, computed side by side.

The forward of `RowModel`, with one more dimension: on a GPU a condition takes a tenth of the time that it takes alone.

Verbs: `run_many`, `behind` (chunks, each behind a context of its own), `judge_many` (as `Case.judge`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from benchmark.quality.lab.case import Judged
from benchmark.quality.lab.choices import DRIFT_PRIOR, Pick, Reused
from benchmark.quality.lab.rows import KV, RowModel


def padded(parts: Sequence[torch.Tensor], fill: int) -> torch.Tensor:
    """`[num, longest]` int64."""
    return torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True, padding_value=fill)


Change = Callable[[int, KV, torch.Tensor, torch.Tensor], None]
"""`change(layer, cache, k, v)`: may change the cache before the rows' new K and V are written into it."""


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
        q, keys, values = (part.transpose(1, 2) for part in (q, keys, values))
        out = F.scaled_dot_product_attention(q, keys, values, attn_mask=masks[kind][:, None], enable_gqa=True)
        x = model.finish(index, x, out.transpose(1, 2))
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


@torch.no_grad()
def judge_many(reused: Reused, picks: Sequence[Pick]) -> list[Judged]:
    """As `Case.judge(**reused.arguments(pick))` of each."""
    case, num = reused.case, len(picks)
    model, tail = case.model, torch.arange(case.tail_start, case.prompt_len)
    room = max(len(case.gold), len(case.own))
    kv_len, dummy = case.prompt_len, case.prompt_len + room
    base = case.reused
    shape = (model.num_layers, num, dummy + 1, model.num_kv_heads, model.head_dim)
    cache = KV(torch.zeros(shape), torch.zeros(shape))
    cache.k[:, :, : case.tail_start] = base.k[:, None, : case.tail_start]
    cache.v[:, :, : case.tail_start] = base.v[:, None, : case.tail_start]
    for i, pick in enumerate(picks):
        if pick.early:
            cache.k[:2, i, : case.tail_start] = case.full.k[:2, : case.tail_start]
            cache.v[:2, i, : case.tail_start] = case.full.v[:2, : case.tail_start]
    rows = padded([pick.rows for pick in picks], dummy)
    positions = torch.cat([rows, tail.expand(num, -1)], 1)
    ids = torch.nn.functional.pad(case.ids, (0, room + 1))[positions]
    change = _drift_of(reused, picks, rows, dummy) if any(pick.drift for pick in picks) else None
    hidden = run_many(model, cache, ids, positions, kv_len, change=change)[:, -1:]
    read = []
    for answer in (case.gold, case.own):
        states = hidden
        if len(answer) > 1:
            where = torch.arange(kv_len, kv_len + len(answer) - 1).expand(num, -1)
            behind_it = run_many(model, cache, answer[:-1].expand(num, -1), where, kv_len + len(answer) - 1)
            states = torch.cat([hidden, behind_it], 1)
        read.append(states)
    return [case.judged(*(model.log_probs(one[i]) for one in read), len(pick.rows)) for i, pick in enumerate(picks)]


def _drift_of(reused: Reused, picks: Sequence[Pick], rows: torch.Tensor, dummy: int) -> Change:
    """As `Reused.with_drift`, of every pick its own strength."""
    model, width = reused.case.model, rows.shape[1]
    starts = torch.tensor([start for start, _ in reused.spans])
    others = torch.arange(reused.start, reused.end)
    other_chunk = torch.bucketize(others, starts, right=True) - 1
    row_chunk = torch.bucketize(rows, starts, right=True) - 1
    is_row = rows < dummy
    is_of = (row_chunk[:, None] == torch.arange(len(starts))[None, :, None]) & is_row[:, None]
    count = is_row.sum(1).clamp_min(1)[:, None, None]
    weights = (is_of + DRIFT_PRIOR / count * is_row[:, None]) / (is_of.sum(2, keepdim=True) + DRIFT_PRIOR)
    weights = weights * torch.tensor([pick.drift for pick in picks])[:, None, None]
    at = torch.where(is_row, rows, 0)
    each = torch.arange(len(picks))[:, None]
    is_kept = torch.ones(len(picks), dummy + 1)
    is_kept[each, rows] = 0.0
    is_kept = is_kept[:, reused.start : reused.end, None, None]

    def change(layer: int, cache: KV, k: torch.Tensor, v: torch.Tensor) -> None:
        drift_k = model.turn_to(k[:, :width] - cache.k[layer][each, at], -at, layer)
        drift_v = v[:, :width] - cache.v[layer][each, at]
        mean_k, mean_v = (torch.einsum("bcr,brhd->bchd", weights, drift) for drift in (drift_k, drift_v))
        there = slice(reused.start, reused.end)
        cache.k[layer][:, there] += model.turn_to(mean_k[:, other_chunk], others, layer) * is_kept
        cache.v[layer][:, there] += mean_v[:, other_chunk] * is_kept

    return change
