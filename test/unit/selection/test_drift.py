"""Drift: what rows show of a change that all tokens share is given to the others; rows are written after it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from sgl_kernel_ext.add_drift import PRIOR
from sgl_kernel_ext.backend import FP8
from sgl_kernel_ext.rotary import RotarySpec, default_inv_freq, rotate, rotation_table
from sglang_chunk_cache.forward.selection.drift import DriftCorrection, LeftRows, Reused
from sglang_chunk_cache.forward.selection.scorer import RowsAtLayer
from sglang_chunk_cache.kv.layer_kv import LayerKV

HEADS, DIM, NUM_SLOTS = 2, 16, 64
SPEC = RotarySpec(12, True, default_inv_freq(10000.0, 12))  # the last four dimensions are not rotated
REUSED = [*range(4, 20), *range(24, 34)]
CHUNK = [0] * 16 + [1] * 10
KV_LEN, QUESTION = 36, [34, 35]


def turned(keys: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    cos, sin = rotation_table(SPEC, positions)
    out = torch.empty_like(keys)
    rotate(keys, out, cos[:, None], sin[:, None], SPEC)
    return out


def make(rows: list[int], change_k: torch.Tensor, change_v: torch.Tensor, seed: int = 0) -> RowsAtLayer:
    """Rows whose K and V differ from the buffers by `change` `[KV_LEN, HEADS, DIM]`, K's as seen at position 0."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randperm(NUM_SLOTS, generator=rng)[:KV_LEN]
    k_buffer, v_buffer = (torch.randn(NUM_SLOTS, HEADS, DIM, generator=rng) for _ in range(2))
    positions = torch.tensor([*rows, *QUESTION])
    k = k_buffer[slots[positions]] + turned(change_k[positions], positions)
    v = v_buffer[slots[positions]] + change_v[positions]
    q = torch.zeros(len(positions), HEADS, DIM)
    return RowsAtLayer(q, k, v, positions, len(QUESTION), 0, slots, LayerKV(k_buffer, v_buffer), 1.0, 0.0, 1)


def reused_and_left(given: RowsAtLayer, rows: list[int], strength: float) -> tuple[Reused, LeftRows]:
    """As the first request of a batch."""
    chunk_of = dict(zip(REUSED, CHUNK, strict=True))
    row_chunk = torch.tensor([chunk_of.get(p, -1) for p in [*rows, *QUESTION]])
    reused = Reused(0, torch.tensor(REUSED), torch.tensor(CHUNK), 2, given.kv_slots, strength)
    return reused, LeftRows(0, given.positions, row_chunk, len(rows))


def correct(given: RowsAtLayer, rows: list[int], strength: float = 1.0) -> None:
    reused, left = reused_and_left(given, rows, strength)
    correction = DriftCorrection([reused], "torch")
    correction.follow([left])
    correction.apply(given.k, given.v, given.stored, SPEC)


def test_a_change_that_all_share_is_found_wherever_the_rows_are() -> None:
    change_k, change_v = torch.randn(2, 1, HEADS, DIM, generator=torch.Generator().manual_seed(3)).expand(
        2, KV_LEN, -1, -1
    )
    rows = [5, 17, 26]
    given = make(rows, change_k, change_v)
    before_k, before_v = given.stored.k.clone(), given.stored.v.clone()
    correct(given, rows)
    others = torch.tensor([p for p in REUSED if p not in rows])
    slots = given.kv_slots[others]
    torch.testing.assert_close(given.stored.k[slots], before_k[slots] + turned(change_k[others], others))
    torch.testing.assert_close(given.stored.v[slots], before_v[slots] + change_v[others])
    half = make(rows, change_k, change_v)
    correct(half, rows, strength=0.5)
    torch.testing.assert_close(half.stored.v[slots], before_v[slots] + change_v[others] / 2)
    untouched = torch.ones(NUM_SLOTS, dtype=torch.bool)
    untouched[given.kv_slots[torch.tensor(REUSED)]] = False
    assert torch.equal(given.stored.k[untouched], before_k[untouched])
    assert torch.equal(given.stored.v[untouched], before_v[untouched])


def test_a_chunk_follows_its_own_rows_and_one_without_follows_all() -> None:
    change = torch.zeros(KV_LEN, HEADS, DIM)
    rows = [4, 5, 6, 7]
    change[rows] = 2.0
    given = make(rows, torch.zeros_like(change), change)
    before = given.stored.v.clone()
    correct(given, rows)
    moved = (given.stored.v - before)[given.kv_slots]
    torch.testing.assert_close(moved[8:20], torch.full((12, HEADS, DIM), 2.0))
    torch.testing.assert_close(moved[24:34], torch.full((10, HEADS, DIM), 2.0))  # the mean of all rows

    rows = [4, 5, 6, 24]
    change = torch.zeros(KV_LEN, HEADS, DIM)
    change[:20] = 4.0
    given = make(rows, torch.zeros_like(change), change)
    before = given.stored.v.clone()
    correct(given, rows)
    moved = (given.stored.v - before)[given.kv_slots]
    overall = 3 / 4 * 4.0
    torch.testing.assert_close(moved[8], torch.full((HEADS, DIM), (3 * 4.0 + PRIOR * overall) / (3 + PRIOR)))
    torch.testing.assert_close(moved[30], torch.full((HEADS, DIM), PRIOR * overall / (1 + PRIOR)))


def test_requests_that_are_corrected_at_once_are_as_each_by_itself() -> None:
    """One shows nothing, so it gets nothing."""
    shown = [5, 17, 26], [], [4, 30, 31, 33]
    changes = torch.randn(3, 2, KV_LEN, HEADS, DIM, generator=torch.Generator().manual_seed(4))
    apart = [make(rows, *change, seed=i) for i, (rows, change) in enumerate(zip(shown, changes, strict=True))]
    pools = [torch.cat([getattr(one.stored, part) for one in apart]) for part in ("k", "v")]
    requests, left, begin = [], [], 0
    for i, (one, rows) in enumerate(zip(apart, shown, strict=True)):
        reused, own = reused_and_left(one, rows, 0.5)
        requests.append(dataclasses.replace(reused, request=i, kv_slots=one.kv_slots + i * NUM_SLOTS))
        left.append(dataclasses.replace(own, begin=begin))
        begin += len(one.positions)
        correct(one, rows, strength=0.5)
    k, v = (torch.cat([getattr(one, part) for one in apart]) for part in ("k", "v"))
    correction = DriftCorrection(requests, "torch")
    assert correction.requests == [0, 1, 2]
    correction.follow(left)
    correction.apply(k, v, LayerKV(*pools), SPEC)
    for part, found in zip(("k", "v"), pools, strict=True):
        torch.testing.assert_close(found, torch.cat([getattr(one.stored, part) for one in apart]))


def test_a_forward_that_is_run_again_corrects_nothing_twice() -> None:
    """It was stopped behind this layer: rows are written, and their new K and V are the same again."""
    rows = [5, 17, 26]
    given = make(rows, *torch.randn(2, KV_LEN, HEADS, DIM, generator=torch.Generator().manual_seed(3)))
    correct(given, rows, strength=0.5)
    slots = given.kv_slots[given.positions]
    given.stored.k[slots], given.stored.v[slots] = given.k, given.v
    once = given.stored.k.clone(), given.stored.v.clone()
    correct(given, rows, strength=0.5)
    for found, expected in zip((given.stored.k, given.stored.v), once, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("rows", [[], REUSED])
def test_nothing_happens_without_rows_and_with_all(rows: list[int]) -> None:
    change = torch.ones(KV_LEN, HEADS, DIM)
    given = make(rows, change, change)
    before = given.stored.k.clone(), given.stored.v.clone()
    correct(given, rows)
    assert torch.equal(given.stored.k, before[0])
    assert torch.equal(given.stored.v, before[1])


def test_buffers_of_fewer_bits_are_rounded_once() -> None:
    change = torch.full((KV_LEN, HEADS, DIM), 0.25)
    given = make([5, 26], torch.zeros_like(change), change)
    half = dataclasses.replace(given, stored=LayerKV(given.stored.k.bfloat16(), given.stored.v.bfloat16()))
    before = half.stored.v.clone()
    half = dataclasses.replace(half, v=before[half.slots()].float() + 0.25)
    correct(half, [5, 26])
    slots = half.kv_slots[torch.tensor([p for p in REUSED if p not in (5, 26)])]
    assert torch.equal(half.stored.v[slots], (before[slots].float() + 0.25).bfloat16())


@pytest.mark.parametrize("dtype", FP8)
def test_buffers_of_fp8_are_scaled_and_saturate(dtype: torch.dtype) -> None:
    scale, largest = 0.5, torch.finfo(dtype).max
    change = torch.full((KV_LEN, HEADS, DIM), 3.0)
    given = make([5, 26], torch.zeros_like(change), change)
    others = torch.tensor([p for p in REUSED if p not in (5, 26)])
    slots = given.kv_slots[others]
    v = given.stored.v.div(scale).to(dtype)
    v.view(torch.uint8)[slots[0]] = torch.full((HEADS, DIM), largest).to(dtype).view(torch.uint8)
    k = given.stored.k.div(scale).to(dtype)
    stored = LayerKV(k, v, scale, scale)
    before = v.clone()
    given = dataclasses.replace(given, stored=stored, v=before[given.slots()].float() * scale + 3.0)
    correct(given, [5, 26])
    expected = (before[slots].float() + 3.0 / scale).clamp(-largest, largest).to(dtype)
    assert torch.equal(v[slots].view(torch.uint8), expected.view(torch.uint8))
    assert (v[slots[0]].float() == largest).all()
