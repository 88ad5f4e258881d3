"""Options of methods: each kind against every kind of wrong value, and options that do not fit together."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError, show
from chunk_cache.methods import METHODS
from chunk_cache.methods.method_options import ChoiceOption, FloatOption, IntOption, LayersOption, Option, check_options

COUNT = IntOption("count", default=3, minimum=1, maximum=9)
SHARE = FloatOption("share", default=0.5, minimum=0.25, maximum=2.0)
WORD = ChoiceOption("word", ("first", "second"))
LAYERS = LayersOption("layers")
SCHEMA = (COUNT, SHARE, WORD, LAYERS)
HUGE = 10**5000  # Python refuses to print it, and it does not fit into a float

INTEGERS = "give an integer in that range"
NUMBERS = "give a number in that range"


@pytest.mark.parametrize(
    ("option", "value", "checked"),
    [
        *[(COUNT, value, value) for value in (1, 5, 9)],
        *[(SHARE, value, value) for value in (0.25, 0.3, 2.0)],
        *[(WORD, value, value) for value in ("first", "second")],
        *[(LAYERS, value, value) for value in ("last", "all")],
        (SHARE, 1, 1.0),
        (LAYERS, [0], (0,)),
        (LAYERS, [1, 4, 31], (1, 4, 31)),
        (LAYERS, (2, 3), (2, 3)),
    ],
    ids=repr,
)
def test_good_values(option: Option, value: object, checked: object) -> None:
    result = option.check(value, "p")
    assert (result, type(result)) == (checked, type(checked))
    assert option.check(result, "p") == checked
    hash(result)


BAD = [
    *[(COUNT, value, f"{show(value)} is not an integer in [1, 9]; {INTEGERS}") for value in (0, 10, -1, True, False)],
    *[(COUNT, value, f"{show(value)} is not an integer in [1, 9]; {INTEGERS}") for value in (2.0, math.nan, math.inf)],
    *[(COUNT, value, f"{show(value)} is not an integer in [1, 9]; {INTEGERS}") for value in ("3", None, [3], {"a": 1})],
    *[(COUNT, value, f"a huge integer is not an integer in [1, 9]; {INTEGERS}") for value in (HUGE, -HUGE)],
    *[(SHARE, value, f"{show(value)} is not a number in [0.25, 2]; {NUMBERS}") for value in (0.2, 2.1, -1, 3, True)],
    *[
        (SHARE, value, f"{show(value)} is not a number in [0.25, 2]; {NUMBERS}")
        for value in (math.nan, math.inf, -math.inf)
    ],
    *[(SHARE, value, f"{show(value)} is not a number in [0.25, 2]; {NUMBERS}") for value in ("0.5", None, [0.5], {})],
    *[(SHARE, value, f"a huge integer is not a number in [0.25, 2]; {NUMBERS}") for value in (HUGE, -HUGE)],
    *[
        (WORD, value, f"unknown value {show(value)}; known values: first, second")
        for value in ("third", "", "First", None)
    ],
    *[
        (WORD, value, f"unknown value {show(value)}; known values: first, second")
        for value in (0, True, None, ["f"], {})
    ],
    (WORD, math.nan, "unknown value nan; known values: first, second"),
    (WORD, HUGE, "unknown value a huge integer; known values: first, second"),
    *[
        (LAYERS, value, f'{show(value)} is neither "last", "all" nor a list of layer numbers; count layers from 0')
        for value in ("first", "", "1", 3, True, None, 1.0, math.nan, {}, [], [-1], [0, True], [0, 1.0], ["0"], [[0]])
    ],
    (LAYERS, HUGE, 'a huge integer is neither "last", "all" nor a list of layer numbers; count layers from 0'),
    *[
        (LAYERS, value, f"{show(value)} does not ascend; name each layer once")
        for value in ([1, 0], [0, 0], [0, 2, 1], [1, 2, 2])
    ],
]


@pytest.mark.parametrize(("option", "value", "message"), BAD, ids=[f"{b[0].name}-{i}" for i, b in enumerate(BAD)])
def test_bad_values_name_the_path_and_the_remedy(option: Option, value: object, message: str) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        option.check(value, f"p.options.{option.name}")
    assert str(caught.value) == f"p.options.{option.name}: {message}"
    with pytest.raises(ChunkCacheRequestError) as caught:
        check_options({option.name: value}, SCHEMA, "p", "this test")
    assert str(caught.value) == f"p.{option.name}: {message}"


@pytest.mark.parametrize("value", [[HUGE], [0, HUGE], [HUGE, 0], [0, -HUGE], [0, [HUGE]], {"a": HUGE}])
def test_a_huge_integer_inside_a_value_is_an_error_like_any_other(value: object) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        LAYERS.check(value, "p")
    assert len(str(caught.value)) < 300


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(option=st.sampled_from(SCHEMA), value=JSON | st.lists(st.integers(-1, 40), max_size=4))
def test_anything_is_either_legal_or_one_kind_of_error(option: Option, value: object) -> None:
    try:
        checked = option.check(value, "p")
    except ChunkCacheRequestError as error:
        assert re.fullmatch("p: .+; .+", str(error))  # noqa: PT017
    else:
        assert option.check(checked, "p") == checked
        assert checked == (tuple(value) if isinstance(value, list) else value)


# A whole object.


def check(options: dict[Any, object]) -> tuple[tuple[str, object], ...]:
    return check_options(options, SCHEMA, "p", "this test")


def test_checked_options_are_sorted_and_hold_only_what_was_given() -> None:
    assert check({}) == ()
    assert check({"word": "second", "count": 2}) == (("count", 2), ("word", "second"))
    assert check({"layers": [0, 2], "share": 1}) == (("layers", (0, 2)), ("share", 1.0))


@pytest.mark.parametrize(
    ("name", "hint"),
    [("counts", "did you mean count? "), ("", ""), ("Count", "did you mean count? "), (3, ""), (None, "")],
)
def test_unknown_keys_are_named_with_the_known_ones(name: object, hint: str) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        check({name: 1})
    assert (
        str(caught.value) == f"p: unknown key {show(name)} for this test; {hint}known keys: count, share, word, layers"
    )


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("random", {"seed": -1}, "p.seed: -1 is not an integer in [0, 9223372036854775807]; "),
        ("random", {"seed": True}, "p.seed: true is not an integer"),
        ("random", {"seed": 1.0}, "p.seed: 1.0 is not an integer"),
        ("random", {"seed": 2**63}, "p.seed: 9223372036854775808 is not an integer"),
        (
            "random",
            {"sed": 1},
            "p: unknown key 'sed' for method 'random'; did you mean seed? known keys: seed, alpha",
        ),
        (
            "epic",
            {"seed": 1},
            "p: unknown key 'seed' for method 'epic'; known keys: alpha, group_size, group_threshold, ",
        ),
        ("epic", {"layers": "last"}, "p: unknown key 'layers' for method 'epic'; "),
        ("a3", {"layers": "last"}, "p: unknown key 'layers' for method 'a3'; known keys: check_layer, top_k, "),
        ("a3", {"first_ratio": 2}, "p: unknown key 'first_ratio' for method 'a3'; "),
        ("a3", {"top_k": "prompt"}, "p.top_k: unknown value 'prompt'; known values: global, chunk"),
        ("a3", {"check_layer": -1}, "p.check_layer: -1 is not an integer in [0, 1023]; "),
        ("fusionrag", {"check_layer": 1}, "p: unknown key 'check_layer' for method 'fusionrag'; known keys: layers, "),
        ("fusionrag", {"layers": [3, 2]}, "p.layers: [3, 2] does not ascend; name each layer once"),
        ("cacheblend", {"deviation": "k"}, "p.deviation: unknown value 'k'; known values: kv, v"),
        ("a3", {"deviation": "v"}, "p: unknown key 'deviation' for method 'a3'; "),
        ("lego-link", {"ends": -1}, "p.ends: -1 is not an integer in [0, 2147483647]; "),
        ("epic", {"ends": 20}, "p: unknown key 'ends' for method 'epic'; "),
        ("cacheblend", {"last_ratio": 0}, "p.last_ratio: 0 is not a number in [0.01, 100]; "),
        ("cacheblend", {"first_ratio": 101}, "p.first_ratio: 101 is not a number in [0, 100]; "),
        ("cacheblend", {"filter_share": 1.5}, "p.filter_share: 1.5 is not a number in [0, 1]; "),
        ("cacheblend", {"filter_share": math.nan}, "p.filter_share: nan is not a number in [0, 1]; "),
    ],
)
def test_options_of_a_method(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        METHODS[name].check_options(options, "p")
    assert str(caught.value).startswith(message)


def test_a_threshold_needs_windows() -> None:
    with pytest.raises(ChunkCacheRequestError, match=r"p\.group_threshold: given without group_size; give group_size"):
        METHODS["epic"].check_options({"group_threshold": 5}, "p")
    assert METHODS["cacheclip"].check_options({"group_threshold": 5}, "p") == (("group_threshold", 5),)
    with pytest.raises(ChunkCacheRequestError, match="no window of 8 tokens has more than 8 of them"):
        METHODS["cacheclip"].check_options({"group_threshold": 8}, "p")


EVERY_METHOD = pytest.mark.parametrize("name", METHODS)


@EVERY_METHOD
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": -1}, "p.group_size: -1 is not an integer in [0, 4096]; "),
        ({"group_size": 4097}, "p.group_size: 4097 is not an integer in [0, 4096]; "),
        ({"group_size": 8.0}, "p.group_size: 8.0 is not an integer"),
        ({"group_size": 0, "group_threshold": 5}, "p.group_threshold: given without group_size; give group_size too"),
        (
            {"group_size": 8, "group_threshold": 8},
            "p.group_threshold: no window of 8 tokens has more than 8 of them; give a group_threshold below 8",
        ),
        (
            {"group_size": 5},
            "p.group_threshold: no window of 5 tokens has more than 5 of them; give a group_threshold below 5",
        ),
        ({"group_size": 8, "group_threshold": -1}, "p.group_threshold: -1 is not an integer in [0, 4095]; "),
        ({"focus_window": -1}, "p.focus_window: -1 is not an integer in [0, 1024]; "),
        ({"focus_window": True}, "p.focus_window: true is not an integer"),
        ({"shift": 2}, "p.shift: 2 is not an integer in [0, 1]; "),
        ({"shift": False}, "p.shift: false is not an integer"),
    ],
)
def test_options_that_all_methods_share(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        METHODS[name].check_options(options, "p")
    assert str(caught.value).startswith(message)


@EVERY_METHOD
@pytest.mark.parametrize(
    "options",
    [
        {"group_size": 0},
        {"group_size": 6},
        {"group_size": 1, "group_threshold": 0},
        {"group_size": 4096, "group_threshold": 4095},
        {"group_size": 8, "group_threshold": 5, "focus_window": 3, "shift": 0},
    ],
)
def test_grouping_focus_and_shift_go_with_any_method(name: str, options: dict[str, object]) -> None:
    assert METHODS[name].check_options(options, "p") == tuple(sorted(options.items()))


@pytest.mark.parametrize(
    ("options", "defaults", "expected"),
    [
        ({}, {"seed": 3}, {}),  # of other methods
        ({}, {"group_size": 8, "group_threshold": 3}, {"group_size": 8, "group_threshold": 3}),
        ({"group_size": 4}, {"group_size": 8, "group_threshold": 3}, {"group_size": 4, "group_threshold": 3}),
        ({"group_size": 0}, {"group_size": 8, "group_threshold": 3}, {"group_size": 0}),
        ({"focus_window": 0}, {"focus_window": 3, "drift": 0.5}, {"focus_window": 0, "drift": 0.5}),
    ],
)
def test_what_a_request_says_counts_before_what_the_server_says(
    options: dict[str, Any], defaults: dict[str, Any], expected: dict[str, Any]
) -> None:
    method = METHODS["epic"]
    merged = method.with_defaults(options, tuple(defaults.items()))
    assert merged == expected
    assert method.check_options(merged, "p") == tuple(sorted(expected.items()))


@pytest.mark.parametrize("name", ["epic", "cache-craft", "random", "h2o"])
def test_a_request_overrules_the_alpha_of_the_server(name: str) -> None:
    method = METHODS[name]
    assert method.alpha_of((), None, 1.0) == 1.0
    assert method.alpha_of((("alpha", 0.5),), None, 1.0) == 0.5
    assert method.alpha_of((("alpha", 0.0),), None, 1.0) is None
    assert method.alpha_of((), 0.2, 1.0) is None
    assert method.alpha_of((), None, None) is None
