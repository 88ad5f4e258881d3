"""Transitions: parts in a row, and in one."""

from __future__ import annotations

import torch

from chunk_cache.index.transition_store import ChunkTransitions
from sglang_chunk_cache.kv.state_layout import StateLayout
from sglang_chunk_cache.kv.transition import LayerTransition, Rule, Transition
from sglang_plain_cpu.delta_rule import delta_rule, unit

HEADS, SIZE, WIDTH = 2, 4, 3


def tokens(length, seed):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, HEADS, length, SIZE, generator=generator) for _ in range(3))
    g, beta = (torch.rand(1, HEADS, length, generator=generator) for _ in range(2))
    return unit(q), unit(k), v, -g, beta


def rule_of(q, k, v, g, beta):
    """Operator and offset as the kernel gives them, transposed against `delta_rule`."""
    _, offset, _ = delta_rule(q, k, v, g, beta, torch.zeros(1, HEADS, SIZE, SIZE))
    _, operator, _ = delta_rule(q, k, torch.zeros_like(v), g, beta, torch.eye(SIZE).expand(1, HEADS, -1, -1))
    return Rule(operator[0].mT, offset[0].mT)


def transition(*rules, tails=((0.0,),)):
    return Transition((LayerTransition(tuple(rules), tuple(torch.tensor([tail]) for tail in tails)),))


def test_parts_of_a_chunk_are_the_chunk():
    """The state behind 70 tokens, from any state, by the rules of 40 and 30."""
    parts = [tokens(40, 0), tokens(30, 1)]
    known = ChunkTransitions()
    known.note(2, 100, 140, transition(rule_of(*parts[0])))
    assert known.of(2, 170) is None
    known.note(2, 140, 170, transition(rule_of(*parts[1])))
    (layer,) = known.of(2, 170).layers
    state = torch.randn(1, HEADS, SIZE, SIZE)
    _, expected, _ = delta_rule(*(torch.cat(both, dim=2) for both in zip(*parts, strict=True)), state)
    found = state[0].mT
    for operator, offset in layer.rules:
        found = found @ operator + offset
    torch.testing.assert_close(found, expected[0].mT, atol=1e-5, rtol=1e-5)


def test_the_tail_reaches_over_short_parts():
    one, other = transition(tails=([1.0, 2.0, 3.0],)), transition(tails=([4.0],))
    (layer,) = one.then(other).layers
    assert layer.tail(WIDTH, torch.device("cpu")).tolist() == [[2.0, 3.0, 4.0]]


def test_in_one_part_it_is_the_same_map():
    """Parts of 7, 1 and 2 tokens, the first within the seam; what is in one part already is not copied."""
    layout = StateLayout((0,), HEADS, SIZE, SIZE, 1, WIDTH, "float32", "float32", seam_len=7)
    rules = [rule_of(*tokens(length, seed)) for seed, length in ((0, 1), (1, 2))]
    parts = transition(*rules, tails=([1.0, 2.0, 3.0], [4.0], [5.0, 6.0]))
    (layer,) = layout.composed(parts).layers
    operator, offset, tail = layer.parts
    state = torch.randn(HEADS, SIZE, SIZE)
    expected = (state @ rules[0].operator + rules[0].offset) @ rules[1].operator + rules[1].offset
    torch.testing.assert_close(state @ operator + offset, expected, atol=1e-6, rtol=1e-6)
    assert tail.tolist() == [[4.0, 5.0, 6.0]]
    assert layer.num_bytes == layout.num_bytes == layout.empty().num_bytes
    assert layout.composed(Transition((layer,))).layers[0] is layer
