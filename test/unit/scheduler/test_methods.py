from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS, NOT_BUILT, Random, find_method, num_rows_at

ALL = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
RATIOS = st.floats(0, 1)
LENS = st.integers(0, 600)
KEYS = st.binary(min_size=16, max_size=16)


@given(st.integers(0, 1000), st.integers(0, 5000))
def test_rows_are_the_ceiling_of_the_ratio_as_it_was_written(thousandths: int, num_tokens: int) -> None:
    exact = Fraction(thousandths, 1000) * num_tokens
    assert num_rows_at(thousandths / 1000, num_tokens) == math.ceil(exact)


@pytest.mark.parametrize(
    ("ratio", "num_tokens", "expected"),
    [
        *[(0.1, 10, 1), (0.07, 100, 7), (0.1 + 0.2, 10, 3), (1 / 3, 3, 1), (2 / 3, 3, 2), (0.15, 400, 60)],
        *[(0.15, 401, 61), (0.0, 10, 0), (-0.0, 10, 0), (1.0, 10, 10), (0.5, 0, 0), (1e-12, 10, 1), (1 - 1e-16, 7, 7)],
    ],
)
def test_rows_at_awkward_ratios(ratio: float, num_tokens: int, expected: int) -> None:
    assert num_rows_at(ratio, num_tokens) == expected


@ALL
@given(offset=LENS, num=LENS, ratio=RATIOS, seed=st.integers(0, 2**63 - 1), key=KEYS)
def test_shared_promises(method, offset: int, num: int, ratio: float, seed: int, key: bytes) -> None:
    used = method.effective_ratio(ratio, 0.5)
    rows = method.rows_for_chunk(offset, num, used, seed=seed, chunk_key=key)
    assert rows.dtype == np.int64
    assert rows.ndim == 1
    assert len(rows) == num_rows_at(used, num)
    assert np.all(np.diff(rows) > 0)
    assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < num)
    again = method.rows_for_chunk(offset, num, used, seed=seed, chunk_key=bytes(bytearray(key)))
    np.testing.assert_array_equal(rows, again)


@ALL
def test_ratio_one_is_every_row_and_ratio_zero_none(method) -> None:
    np.testing.assert_array_equal(method.rows_for_chunk(0, 7, 1.0), np.arange(7))
    assert len(method.rows_for_chunk(0, 7, 0.0)) == 0


@pytest.mark.parametrize(
    ("name", "effective"),
    [("full-reuse", (0.0, 0.0)), ("full", (1.0, 1.0)), ("random", (0.3, 0.15)), ("epic", (0.3, 0.15))],
)
def test_effective_ratio(name: str, effective: tuple[float, float]) -> None:
    method = METHODS[name]
    assert (method.effective_ratio(0.3, 0.15), method.effective_ratio(None, 0.15)) == effective


def test_epic_takes_the_first_tokens() -> None:
    np.testing.assert_array_equal(METHODS["epic"].rows_for_chunk(3, 10, 0.25), [0, 1, 2])


@given(num=st.integers(2, 300), low=RATIOS, high=RATIOS, key=KEYS)
def test_random_with_a_larger_ratio_selects_a_superset(num: int, low: float, high: float, key: bytes) -> None:
    low, high = sorted((low, high))
    few = METHODS["random"].rows_for_chunk(0, num, low, seed=5, chunk_key=key)
    many = METHODS["random"].rows_for_chunk(0, num, high, seed=5, chunk_key=key)
    assert set(few) <= set(many)


def test_random_depends_on_seed_key_and_length_and_on_nothing_else() -> None:
    def draw(num: int, seed: int, key: bytes, offset: int = 0) -> tuple[int, ...]:
        return tuple(METHODS["random"].rows_for_chunk(offset, num, 0.2, seed=seed, chunk_key=key).tolist())

    base = draw(100, 0, b"a" * 16)
    assert base == (0, 4, 7, 11, 12, 14, 15, 20, 39, 41, 49, 52, 53, 59, 66, 91, 93, 95, 96, 99)
    assert base == draw(100, 0, b"a" * 16, offset=9)
    assert len({base, draw(100, 1, b"a" * 16), draw(100, 0, b"b" * 16), draw(101, 0, b"a" * 16)}) == 4


def test_random_is_uniform() -> None:
    num, ratio, num_draws = 50, 0.2, 4000
    counts = np.zeros(num)
    for seed in range(num_draws):
        counts[METHODS["random"].rows_for_chunk(0, num, ratio, seed=seed, chunk_key=b"k" * 16)] += 1
    expected = num_draws * ratio
    chi_squared = float(np.sum((counts - expected) ** 2 / (expected * (1 - ratio))))
    assert chi_squared < 85.4  # 0.1 % quantile of 49 degrees of freedom; the draws are fixed, so it never flakes


@pytest.mark.parametrize("name", [*sorted(NOT_BUILT), "", "Epic", None, 3, ["epic"]])
def test_unknown_and_unbuilt_methods_are_refused_alike(name: object) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        find_method(name, "p.method")
    assert str(caught.value) == f"p.method: unknown method {name!r}; known methods: full-reuse, random, epic, full"


def test_built_and_reserved_names_are_those_of_the_contract() -> None:
    assert set(METHODS) == {"full-reuse", "random", "epic", "full"}
    assert {"cacheblend", "cache-craft", "a3", "fusionrag", "cacheclip", "h2o"} == NOT_BUILT
    assert all(METHODS[name].name == name for name in METHODS)


def test_random_options() -> None:
    assert Random().check_options({}, "p") == ()
    assert Random().check_options({"seed": 7}, "p") == (("seed", 7),)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("random", {"seed": -1}, "p.seed: -1 is not an integer in [0, 9223372036854775807]; "),
        ("random", {"seed": True}, "p.seed: True is not an integer"),
        ("random", {"seed": 1.0}, "p.seed: 1.0 is not an integer"),
        ("random", {"seed": 2**63}, "p.seed: 9223372036854775808 is not an integer"),
        ("random", {"sed": 1}, "p: unknown key 'sed' for method 'random'; known keys: seed"),
        ("epic", {"seed": 1}, "p: unknown key 'seed' for method 'epic'; known keys: none"),
    ],
)
def test_bad_options(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        METHODS[name].check_options(options, "p")
    assert str(caught.value).startswith(message)
