"""From the tokens of one tokenizer to those of another, against a look at every pair."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache_tools.train_selector.train_selector_command import share_by_overlap
from sglang_chunk_cache.selector.alignment import Tokens, best_of_overlap, decode, tokens_of
from tiny_models import make_tokenizer
from unit.selector.conftest import TEXT, other_tokenizer


@st.composite
def cuts(draw: st.DrawFn, num_chars: int) -> Tokens:
    """A text cut into tokens, all of it."""
    inner = draw(st.sets(st.integers(1, num_chars - 1)))
    bounds = [0, *sorted(inner), num_chars]
    return tokens_of("x" * num_chars, list(itertools.pairwise(bounds)))


def overlap(one: Tokens, i: int, other: Tokens, j: int) -> int:
    return max(0, int(min(one.ends[i], other.ends[j]) - max(one.starts[i], other.starts[j])))


@given(st.data(), st.integers(2, 40))
def test_values_go_to_what_shares_a_character(data: st.DataObject, num_chars: int) -> None:
    source, target = data.draw(cuts(num_chars)), data.draw(cuts(num_chars))
    drawn = data.draw(st.lists(st.floats(0, 1, width=32), min_size=len(source), max_size=len(source)))
    values = np.array(drawn, dtype=np.float32)
    best = best_of_overlap(values, source, target)
    shared = share_by_overlap(values, source, target)
    for j in range(len(target)):
        touched = [i for i in range(len(source)) if overlap(source, i, target, j)]
        assert best[j] == max(values[i] for i in touched)
        lens = source.ends - source.starts
        assert shared[j] == pytest.approx(sum(values[i] * overlap(source, i, target, j) / lens[i] for i in touched))
    assert shared.sum() == pytest.approx(values.sum(), abs=1e-4)


def test_tokens_that_share_a_character_share_its_value() -> None:
    source = tokens_of("ab", [(0, 1), (1, 2)])
    target = tokens_of("ab", [(0, 1), (1, 2), (1, 2)])  # b is two bytes
    values = np.array([0.25, 0.5], dtype=np.float32)
    assert best_of_overlap(values, source, target).tolist() == [0.25, 0.5, 0.5]
    assert share_by_overlap(values, source, target).tolist() == [0.25, 0.25, 0.25]


def test_gaps_and_nothing_at_all() -> None:
    source = tokens_of("a b", [(0, 1), (2, 3)])
    target = tokens_of("a b", [(0, 1), (1, 2), (2, 3)])
    assert best_of_overlap(np.array([1.0, 3.0], dtype=np.float32), source, target).tolist() == [1.0, 3.0, 3.0]
    nothing, no_values = tokens_of("", []), np.empty(0, dtype=np.float32)
    assert best_of_overlap(no_values, nothing, target).tolist() == [0.0, 0.0, 0.0]
    assert len(best_of_overlap(np.array([1.0, 2.0], dtype=np.float32), source, nothing)) == 0


def test_offsets_of_ids_are_those_of_their_text() -> None:
    tokenizer = make_tokenizer(512)
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    tokens = decode(tokenizer, ids)
    assert tokens.text == TEXT
    assert len(tokens) == len(ids)
    for one, start, end in zip(ids, tokens.starts, tokens.ends, strict=True):
        alone = tokenizer.decode([one])
        assert "\ufffd" in alone or alone == TEXT[start:end]


def test_ids_that_the_tokenizer_would_not_make_get_their_share() -> None:
    tokenizer = make_tokenizer(512)
    ids = [tokenizer.convert_tokens_to_ids(letter) for letter in "there"]
    assert tokenizer.encode("there", add_special_tokens=False) != ids
    tokens = decode(tokenizer, ids)
    assert (tokens.text, tokens.starts.tolist(), tokens.ends.tolist()) == ("there", [0, 1, 2, 3, 4], [1, 2, 3, 4, 5])
    euro = decode(tokenizer, tokenizer.encode("€", add_special_tokens=False)[:2])  # two of its three bytes
    assert len(euro) == 2
    assert decode(tokenizer, []).text == ""


def test_ids_of_another_tokenizer_are_refused() -> None:
    with pytest.raises(ValueError, match="id 511 is not one of the 300 of the main model's tokenizer"):
        decode(make_tokenizer(300), [5, 511])


def test_a_number_is_found_in_both_tokenizers() -> None:
    main, own = make_tokenizer(512), other_tokenizer(380)
    target = decode(main, main.encode(TEXT, add_special_tokens=False))
    encoded = own(TEXT, return_offsets_mapping=True)
    source = tokens_of(TEXT, encoded["offset_mapping"])
    year = TEXT.index("1889")
    inside = (source.starts < year + 4) & (source.ends > year)
    found = best_of_overlap(inside.astype(np.float32), source, target) > 0
    first, last = target.starts[found][0], target.ends[found][-1]
    assert first <= year
    assert last >= year + 4
    assert last - first <= 8
