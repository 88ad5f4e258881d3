"""KeptChooser chooses what SnapKV's definition says, also where the window comes in parts; the packer packs it."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from chunk_cache.options.kept_tokens import KeptTokens
from sglang_chunk_cache.forward import kept_chooser as module
from sglang_chunk_cache.forward.attending import ObservedRows
from sglang_chunk_cache.forward.kept_chooser import KeptChooser, choose_kept
from sglang_chunk_cache.kv import packer
from sglang_chunk_cache.kv.assembler import KVAssembler
from sglang_chunk_cache.kv.packing import Packing

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 2, 6, 2, 8
PROMPT_LEN, WINDOW = 90, 32
KEPT = KeptTokens(begin=7, end=55, room=11)


class Pool:
    """K of two layers, in slots that are in no order; perhaps sinks."""

    def __init__(self, has_sinks: bool = False) -> None:
        rng = torch.Generator().manual_seed(0)
        self.k = [2 * torch.randn(120, NUM_KV_HEADS, HEAD_DIM, generator=rng) for _ in range(NUM_LAYERS)]
        self.q = torch.randn(NUM_LAYERS, PROMPT_LEN, NUM_Q_HEADS, HEAD_DIM, generator=rng)
        self.slots = torch.randperm(120, generator=rng)[:PROMPT_LEN]
        self.sinks = 4 * torch.randn(NUM_LAYERS, NUM_Q_HEADS, generator=rng) if has_sinks else [None] * NUM_LAYERS

    dtype = torch.float32

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        return self.k[layer]

    get_value_buffer = get_key_buffer


def observe(pool: Pool, packing: Packing, begin: int, end: int) -> None:
    """A forward of the rows [begin, end) of the prompt, behind 3 rows of another request."""
    num_rows = min(end - begin, end - (PROMPT_LEN - WINDOW))
    job = module._Job(packing, KEPT, 1, num_rows, pool.slots[:end], end == PROMPT_LEN)
    chooser = KeptChooser([job], pool, "torch", NUM_LAYERS)
    for layer_id in range(NUM_LAYERS):
        layer: Any = SimpleNamespace(
            layer_id=layer_id,
            tp_q_head_num=NUM_Q_HEADS,
            tp_k_head_num=NUM_KV_HEADS,
            qk_head_dim=HEAD_DIM,
            scaling=0.3,
            logit_cap=0.0,
        )
        q = torch.cat([torch.full_like(pool.q[layer_id, :3], 9.0), pool.q[layer_id, begin:end]]).flatten(1)
        positions = torch.cat([torch.arange(3), torch.arange(begin, end)])
        chooser.observe(ObservedRows(layer, q, positions, [3, end - begin], pool.sinks[layer_id]))
    chooser.finish()


def reference(pool: Pool, layer: int, head: int) -> list[int]:
    """One token at a time."""
    scores = [0.0] * PROMPT_LEN
    group = NUM_Q_HEADS // NUM_KV_HEADS
    for row in range(PROMPT_LEN - WINDOW, PROMPT_LEN):
        for q_head in range(head * group, (head + 1) * group):
            keys = pool.k[layer][pool.slots[: row + 1], head].double()
            weights = (keys @ pool.q[layer, row, q_head].double() * 0.3).exp()
            sink = 0.0 if pool.sinks[layer] is None else pool.sinks[layer][q_head].double().exp()
            for i, weight in enumerate((weights / (weights.sum() + sink)).tolist()):
                scores[i] += weight
    own = scores[KEPT.begin : KEPT.end]
    pooled = [max(own[max(i - 3, 0) : i + 4]) for i in range(len(own))]
    best = sorted(range(len(own)), key=lambda i: (-pooled[i], i))[: KEPT.room]
    return sorted(KEPT.begin + i for i in best)


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("cuts", [[40], [40, 70], [58], [57, 59, 89]])
def test_the_choice_is_that_of_the_definition(cuts: list[int], has_sinks: bool) -> None:
    pool, packing = Pool(has_sinks), Packing()
    bounds = [*cuts, PROMPT_LEN]
    for begin, end in itertools.pairwise(bounds):
        if end > PROMPT_LEN - WINDOW:
            assert packing.chosen is None
            observe(pool, packing, begin, end)
    chosen: Any = packing.chosen
    expected = [[reference(pool, layer, head) for head in range(NUM_KV_HEADS)] for layer in range(NUM_LAYERS)]
    assert chosen.tolist() == expected
    assert len({tuple(head) for layer in expected for head in layer}) == 4  # all differ
    assert packing.take_scores() is None


def test_of_equal_scores_the_earlier_are_kept() -> None:
    assert choose_kept(torch.zeros(2, 20), 5).tolist() == [[0, 1, 2, 3, 4]] * 2
    scores = torch.zeros(20)
    scores[10] = 1.0
    assert choose_kept(scores, 7).tolist() == [7, 8, 9, 10, 11, 12, 13]
    assert choose_kept(scores, 20).tolist() == list(range(20))


def test_each_head_has_its_own_tokens_in_the_packed_slots() -> None:
    num_slots = PROMPT_LEN + 2  # two tokens of the answer
    rng = torch.Generator().manual_seed(1)
    order = torch.rand(NUM_LAYERS, NUM_KV_HEADS, KEPT.end - KEPT.begin, generator=rng).argsort(dim=-1)
    chosen = order[..., : KEPT.room].sort(dim=-1).values + KEPT.begin
    places = packer._kept_places(KEPT, chosen, num_slots)
    assert places.shape == (NUM_LAYERS, NUM_KV_HEADS, num_slots - KEPT.num_dropped)
    row = torch.randperm(200, generator=rng)[:num_slots].to(torch.int32)
    slots = torch.tensor([slot for slot in range(200) if slot not in row.tolist()][: places.shape[2]])
    k, v = ([torch.randn(200, NUM_KV_HEADS, HEAD_DIM, generator=rng) for _ in range(NUM_LAYERS)] for _ in range(2))
    before_k, before_v, old = [one.clone() for one in k], [one.clone() for one in v], row.tolist()
    assembler = object.__new__(KVAssembler)
    assembler._k_buffers, assembler._v_buffers, assembler._is_cpu = k, v, True
    assembler.pack(row, places, slots)
    assert row[: len(slots)].tolist() == slots.tolist()
    for layer in range(NUM_LAYERS):
        for head in range(NUM_KV_HEADS):
            tokens = [*range(KEPT.begin), *chosen[layer, head].tolist(), *range(KEPT.end, num_slots)]
            for slot, token in zip(slots.tolist(), tokens, strict=True):
                assert k[layer][slot, head].equal(before_k[layer][old[token], head])
                assert v[layer][slot, head].equal(before_v[layer][old[token], head])
        assert k[layer][old].equal(before_k[layer][old])
