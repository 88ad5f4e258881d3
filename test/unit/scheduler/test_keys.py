from __future__ import annotations

import itertools
from array import array

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.keys import KEY_LEN, Partition, chunk_key, chunk_keys

TOKENS = st.lists(st.integers(0, 2**40), max_size=30)
FIELDS = st.none() | st.text(max_size=4)
PARTITIONS = st.builds(Partition, FIELDS, FIELDS)


@given(PARTITIONS, TOKENS)
def test_every_container_of_the_same_tokens_gives_the_same_key(partition: Partition, tokens: list[int]) -> None:
    key = chunk_key(partition, array("q", tokens))
    assert len(key) == KEY_LEN
    assert chunk_key(partition, tokens) == key
    assert chunk_key(partition, tuple(tokens)) == key
    assert chunk_key(partition, np.array(tokens, dtype=np.int64)) == key
    assert chunk_key(partition, np.repeat(np.array(tokens, dtype=np.int64), 2)[::2]) == key


def test_narrow_integer_arrays_are_widened() -> None:
    tokens = [1, 2, 70_000]
    assert chunk_key(Partition(), array("i", tokens)) == chunk_key(Partition(), tokens)
    assert chunk_key(Partition(), np.array(tokens, dtype=np.int32)) == chunk_key(Partition(), tokens)


@given(PARTITIONS, TOKENS, PARTITIONS, TOKENS)
def test_keys_are_equal_only_for_equal_input(a: Partition, x: list[int], b: Partition, y: list[int]) -> None:
    assert (chunk_key(a, x) == chunk_key(b, y)) == ((a, x) == (b, y))


def test_case_16_partitions_never_share_a_key() -> None:
    # every way to confuse the two fields, absence and the tokens behind them
    fields = (None, "", "a", "ab", "b", "\x00", "\x01", "\x01a")
    partitions = [Partition(x, y) for x, y in itertools.product(fields, fields)]
    keys = {chunk_key(p, tokens) for p in partitions for tokens in ([], [0], [0, 0], [1])}
    assert len(keys) == len(partitions) * 4


def test_a_lone_surrogate_in_a_salt_is_a_partition_like_any_other() -> None:
    assert chunk_key(Partition("\ud800"), [1]) != chunk_key(Partition("?"), [1])


@given(PARTITIONS, TOKENS, st.data())
def test_keys_of_a_prompt_are_the_keys_of_its_spans(
    partition: Partition, tokens: list[int], data: st.DataObject
) -> None:
    borders = sorted(data.draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    spans = [(a, b) for a, b in itertools.pairwise(borders) if a < b]
    expected = [chunk_key(partition, tokens[a:b]) for a, b in spans]
    assert chunk_keys(partition, array("q", tokens), spans) == expected
    assert chunk_keys(partition, np.array(tokens, dtype=np.int64), spans) == expected
    assert chunk_keys(partition, tokens, spans) == expected


def test_keys_do_not_change_between_versions() -> None:
    # pinned: ranks of different builds must agree
    assert chunk_key(Partition("lora", None), [1, 2, 3]).hex() == "bd691d841bbddd5abdf32b4291f1287f"
    assert chunk_key(Partition(), []).hex() == "a09f8e280d2371e797631ae9ec3255d1"


def test_tokens_that_are_not_integers_are_refused() -> None:
    with pytest.raises(TypeError):
        chunk_key(Partition(), np.array([1.0]))
    with pytest.raises(TypeError):
        chunk_key(Partition(), [1.0])  # type: ignore[list-item]
