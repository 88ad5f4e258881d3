"""Transitions: parts in a row, and a store of a few bytes that forgets what was not used for longest."""

from __future__ import annotations

import pytest
import torch

from sglang_chunk_cache.kv.state_layout import StateLayout
from sglang_chunk_cache.kv.transition import ChunkTransitions, LayerTransition, Rule, Transition
from sglang_chunk_cache.kv.transition_store import TransitionStore
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


def test_a_chunk_that_begins_anew_forgets_its_parts():
    known = ChunkTransitions()
    known.note(0, 10, 20, transition(rule_of(*tokens(5, 0))))
    known.note(0, 10, 40, transition(rule_of(*tokens(5, 1))))
    assert known.reaches(0) == 40
    assert known.of(0, 40).num_rules == 1


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


@pytest.fixture
def known():
    return set(range(10))


def test_beyond_its_bytes_the_one_not_used_for_longest_goes(known):
    one, changes = transition(rule_of(*tokens(5, 0))), []
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: changes.append(1))
    for variant in (0, 1):
        store.put(variant, one)
    store.use(0)
    store.put(2, one)
    assert [variant in store for variant in range(3)] == [True, False, True]
    assert store.num_bytes == 2 * one.num_bytes
    assert len(changes) == 3
    known.discard(0)
    store.use(0)
    store.put(3, one)
    assert [variant in store for variant in range(4)] == [False, False, True, True], "unknown variants go first"
    store.clear()
    assert (len(store), store.num_bytes) == (0, 0)


def test_who_keeps_it_elsewhere_is_told_before_it_goes(known):
    one, told = transition(rule_of(*tokens(5, 0))), []
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: None)
    store.note_leaving = lambda variant: told.append((variant, variant in store))
    for variant in (0, 1, 2):
        store.put(variant, one)
    assert told == [(0, True)]


def test_what_is_pinned_stays_and_what_has_no_room_beside_it_does_not_fit(known):
    one = transition(rule_of(*tokens(5, 0)))
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: None)
    store.is_kept = {0}.__contains__
    for variant in (0, 1, 2):
        store.put(variant, one)
    assert [variant in store for variant in range(3)] == [True, False, True]
    store.is_kept = {0, 2}.__contains__
    assert not store.fits(one)


def test_running_requests_have_no_more_than_is_stored(known):
    one = transition(rule_of(*tokens(5, 0)))
    store = TransitionStore(2 * one.num_bytes, is_known=known.__contains__, note_change=lambda: None)
    requests = [store.of_request() for _ in range(2)]
    for request in requests:
        assert store.may_take(one.num_bytes)
        request.note(0, 10, 20, one)
    assert not store.may_take(1)
    requests[0].drop(0)
    assert store.may_take(one.num_bytes)
    del request, requests
    assert store.may_take(2 * one.num_bytes), "what a request had that is gone counts no more"


def test_what_is_larger_than_the_store_does_not_fit(known):
    one = transition(rule_of(*tokens(5, 0)))
    store = TransitionStore(one.num_bytes - 1, is_known=known.__contains__, note_change=lambda: None)
    assert not store.fits(one)
    assert TransitionStore(one.num_bytes, is_known=known.__contains__, note_change=lambda: None).fits(one)
