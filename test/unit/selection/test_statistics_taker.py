"""StatisticsTaker: the ranks' parts add up to what one rank finds, also where a rank has none of the sampled heads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sgl_kernel_ext.attention_mass.naive import attention_mass_reference
from sglang_chunk_cache.forward import statistics_taker as module
from sglang_chunk_cache.forward.attending import ObservedRows
from sglang_chunk_cache.forward.statistics_taker import StatisticsTaker, observed_heads
from sglang_chunk_cache.kv.chunk_sums import ChunkSums

NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 4, 16
SPANS = ((2, 8), (9, 15), (15, 21))
KV_LEN = 24


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Q of every position, the pool's K, the slots."""
    rng = torch.Generator().manual_seed(0)
    q = torch.randn(KV_LEN, NUM_Q_HEADS, HEAD_DIM, generator=rng)
    k = torch.randn(40, NUM_KV_HEADS, HEAD_DIM, generator=rng)
    return q, k, torch.randperm(40, generator=rng)[:KV_LEN]


def totals(
    monkeypatch: pytest.MonkeyPatch,
    tensors: tuple[torch.Tensor, ...],
    tp_size: int,
    *,
    one_by_one: bool = False,
    max_heads: int = module.MAX_HEADS,
    sinks: torch.Tensor | None = None,
) -> tuple[list[torch.Tensor], list[ChunkSums]]:
    """What each rank would give to the sum, and the requests' sums."""
    q, k, slots = tensors
    monkeypatch.setattr(module, "MAX_HEADS", max_heads)
    parts: list[torch.Tensor] = []
    found = []
    for rank in range(tp_size):
        group = SimpleNamespace(world_size=tp_size, rank_in_group=rank)
        monkeypatch.setattr(module, "ranks_of_batch", lambda group=group: group)
        monkeypatch.setattr(module, "sum_over_ranks", lambda total, _: parts.append(total) or total)
        q_heads, kv_heads = (slice(rank * n // tp_size, (rank + 1) * n // tp_size) for n in (NUM_Q_HEADS, NUM_KV_HEADS))
        own_k = k[:, kv_heads]
        pool = SimpleNamespace(
            device="cpu",
            dtype=k.dtype,
            get_key_buffer=lambda _, own_k=own_k: own_k,
            get_value_buffer=lambda _, own_k=own_k: own_k,
        )
        sums = ChunkSums(SPANS, 1)
        jobs = [module._Job(SPANS, sums, 0, i, a, b, slots[:b]) for i, (a, b) in enumerate(SPANS)]
        taker = StatisticsTaker(jobs, [1], pool)
        if one_by_one:
            taker._groups = [[job] for job in jobs]
        own = q[:, q_heads].flatten(1)
        layer: Any = SimpleNamespace(
            layer_id=1,
            tp_q_head_num=NUM_Q_HEADS // tp_size,
            tp_k_head_num=NUM_KV_HEADS // tp_size,
            qk_head_dim=HEAD_DIM,
            scaling=0.25,
            logit_cap=0.0,
        )
        own_sinks = None if sinks is None else sinks[q_heads]
        taker.observe(ObservedRows(layer, own, torch.arange(KV_LEN), [KV_LEN], own_sinks))
        taker.finish()
        found.append(sums)
    return parts, found


def test_two_heads_are_sampled_of_a_model_with_many() -> None:
    assert observed_heads(NUM_Q_HEADS) == [0, 4]
    assert observed_heads(32) == [0, 16]
    assert [observed_heads(n) for n in (1, 2, 4)] == [[0], [0, 1], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("max_heads", "expected"), [(4, [True, True]), (4, [True, False, True, False]), (NUM_Q_HEADS, [True] * 4)]
)
def test_ranks_add_up(
    monkeypatch: pytest.MonkeyPatch, tensors: tuple[torch.Tensor, ...], max_heads: int, expected: list[bool]
) -> None:
    sinks = torch.linspace(-1, 4, NUM_Q_HEADS)
    (whole,), _ = totals(monkeypatch, tensors, 1, max_heads=max_heads, sinks=sinks)
    parts, _ = totals(monkeypatch, tensors, len(expected), max_heads=max_heads, sinks=sinks)
    torch.testing.assert_close(sum(parts), whole, atol=1e-6, rtol=1e-6)
    assert [bool(part.any()) for part in parts] == expected


def test_chunks_of_a_request_together_give_what_they_give_one_by_one(
    monkeypatch: pytest.MonkeyPatch, tensors: tuple[torch.Tensor, ...]
) -> None:
    (together,), _ = totals(monkeypatch, tensors, 1)
    (apart,), _ = totals(monkeypatch, tensors, 1, one_by_one=True)
    assert together.abs().sum() > 1
    torch.testing.assert_close(together, apart, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 4, NUM_Q_HEADS)], ids=["", "sinks"])
@pytest.mark.parametrize(("max_heads", "heads"), [(4, [0, 4]), (NUM_Q_HEADS, list(range(NUM_Q_HEADS)))])
def test_the_sums_are_those_of_the_definition(
    monkeypatch: pytest.MonkeyPatch,
    tensors: tuple[torch.Tensor, ...],
    max_heads: int,
    heads: list[int],
    sinks: torch.Tensor | None,
) -> None:
    q, k, slots = tensors
    _, (sums,) = totals(monkeypatch, tensors, 1, max_heads=max_heads, sinks=sinks)
    start, end = SPANS[2]
    rows = torch.arange(start, end)
    # Parts of the keys: the first token, the rest in front of the first chunk, each chunk, and the text between.
    bounds = [0, 1, 2, 8, 9, 15]
    kv_heads = [head // (NUM_Q_HEADS // NUM_KV_HEADS) for head in heads]
    options = {"sm_scale": 0.25, "segment_starts": bounds, "sinks": None if sinks is None else sinks[heads]}
    received, by_segment = attention_mass_reference(
        q[rows][:, heads], k[slots[:end]][:, kv_heads], rows, **options, skip_self=True
    )
    assert by_segment is not None
    found = sums.statistics(2)
    torch.testing.assert_close(torch.tensor(found.outside).double(), by_segment[:, 2:5].sum(1))
    torch.testing.assert_close(torch.tensor(found.received).double(), received[start:], check_dtype=False)
    torch.testing.assert_close(torch.tensor(found.inter).double(), by_segment[:, 2:5].sum(0))
    torch.testing.assert_close(torch.tensor(found.system).double(), by_segment[:, :2].mean(0))
