from __future__ import annotations

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS_OF_ANY_SERVER
from chunk_cache.options.request_options import parse_request
from chunk_cache_tools.explain.asked_conditions import make_specs, parse_options, parse_spec


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("epic", {"method": "epic"}),
        ("epic:ratio=0.3", {"method": "epic", "ratio": 0.3}),
        ("a3:check_layer=2,top_k=chunk", {"method": "a3", "options": {"check_layer": 2, "top_k": "chunk"}}),
        ('a3:top_k="chunk"', {"method": "a3", "options": {"top_k": "chunk"}}),
        (
            "fusionrag:layers=[2,5],top_k=chunk",
            {"method": "fusionrag", "options": {"layers": [2, 5], "top_k": "chunk"}},
        ),
        ("fusionrag:layers=all,ratio=0.1", {"method": "fusionrag", "ratio": 0.1, "options": {"layers": "all"}}),
    ],
)
def test_parse_spec(text, params):
    spec = parse_spec(text)
    assert spec.label == text
    assert spec.params() == {**params, "explain": True}
    parse_request(spec.params())  # the server takes it


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("best", "unknown method 'best'; known methods: full-reuse"),
        ("", "unknown method ''"),
        ("a3:", "'' is not OPTION=VALUE"),
        ("a3:check_layer", "'check_layer' is not OPTION=VALUE"),
        ("a3:check_layer=", "is not OPTION=VALUE"),
        ("a3:check_layer=1,check_layer=2", "check_layer is given twice"),
        ("a3:check_layer=-1", "-1 is not an integer in [0, 1023]"),
        ("a3:seed=1", "unknown key 'seed' for method 'a3'"),
        ("a3:ratio=2", "2 is not a number from 0 to 1"),
        ("a3:ratio=high", "'high' is not a number from 0 to 1"),
    ],
)
def test_a_bad_spec_is_named(text, words):
    with pytest.raises(ChunkCacheRequestError) as caught:
        parse_spec(text)
    assert str(caught.value).startswith(f"--method {text}")
    assert words in str(caught.value)


def test_all_methods_by_default_with_the_options_they_know():
    specs = make_specs([], 0.25, {"check_layer": 2, "seed": 5})
    assert [spec.name for spec in specs] == list(METHODS_OF_ANY_SERVER)
    assert {spec.ratio for spec in specs} == {0.25}
    by_name = {spec.name: dict(spec.options) for spec in specs}
    assert by_name["random"] == {"seed": 5}
    assert by_name["a3"] == {"check_layer": 2}
    assert by_name["epic"] == {}


def test_a_method_overrules_what_is_common():
    one, other = make_specs(["a3:check_layer=3,ratio=0.5", "cacheblend"], 0.1, {"check_layer": 2})
    assert (one.ratio, dict(one.options)) == (0.5, {"check_layer": 3})
    assert (other.ratio, dict(other.options)) == (0.1, {"check_layer": 2})


@pytest.mark.parametrize(
    ("texts", "ratio", "options", "words"),
    [
        (["epic"], 1.5, {}, "--ratio: 1.5 is not a number from 0 to 1; give"),
        (["epic"], float("nan"), {}, "--ratio: nan is not a number"),
        (["epic"], None, {"check_layer": 1}, "--options: no method that is asked knows 'check_layer'; known options: "),
        (["epic", "epic"], None, {}, "--method epic: given twice"),
        (["a3"], None, {"check_layer": "x"}, "--method a3.check_layer: 'x' is not an integer"),
    ],
)
def test_bad_common_values_are_named(texts, ratio, options, words):
    with pytest.raises(ChunkCacheRequestError) as caught:
        make_specs(texts, ratio, options)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_options_are_a_json_object(text):
    with pytest.raises(ChunkCacheRequestError, match=r"^--options: "):
        parse_options(text)
    assert parse_options('{"top_k": "chunk"}') == {"top_k": "chunk"}
