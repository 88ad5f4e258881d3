from __future__ import annotations

import json

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS_OF_ANY_SERVER
from chunk_cache.options.request_options import parse_request
from chunk_cache_tools.conditions import parse_method
from chunk_cache_tools.explain.asked_conditions import asked_conditions, parse_options


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
def test_a_method_is_asked_as_it_is_written(text, params):
    (condition,) = asked_conditions([text], None, {})
    assert condition.label == text.replace('"', "")
    sent = json.loads(json.dumps(condition.request))
    assert sent == params
    parse_request(sent)  # the server takes it


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
def test_a_bad_method_is_named(text, words):
    with pytest.raises(ChunkCacheRequestError) as caught:
        parse_method(text)
    assert str(caught.value).startswith(f"--methods {text}")
    assert words in str(caught.value)


def test_all_methods_by_default_with_the_options_they_know():
    conditions = asked_conditions([], 0.25, {"check_layer": 2, "seed": 5})
    assert [condition.method.method for condition in conditions] == list(METHODS_OF_ANY_SERVER)
    assert {condition.ratio for condition in conditions} == {0.25}
    by_name = {condition.method.method: dict(condition.method.options) for condition in conditions}
    assert by_name["random"] == {"seed": 5}
    assert by_name["a3"] == {"check_layer": 2}
    assert by_name["epic"] == {}


def test_a_method_overrules_what_is_common():
    one, other = asked_conditions(["a3:check_layer=3,ratio=0.5", "cacheblend"], 0.1, {"check_layer": 2})
    assert (one.ratio, dict(one.method.options)) == (0.5, {"check_layer": 3})
    assert (other.ratio, dict(other.method.options)) == (0.1, {"check_layer": 2})


@pytest.mark.parametrize(
    ("texts", "ratio", "options", "words"),
    [
        (["epic"], 1.5, {}, "--ratio: 1.5 is not a number from 0 to 1; give"),
        (["epic"], float("nan"), {}, "--ratio: nan is not a number"),
        (["epic"], None, {"check_layer": 1}, "--options: no method that is asked knows 'check_layer'; known options: "),
        (["epic", "epic"], None, {}, "--methods epic: given twice"),
        (["a3"], None, {"check_layer": "x"}, "--methods a3.check_layer: 'x' is not an integer"),
    ],
)
def test_bad_common_values_are_named(texts, ratio, options, words):
    with pytest.raises(ChunkCacheRequestError) as caught:
        asked_conditions(texts, ratio, options)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_options_are_a_json_object(text):
    with pytest.raises(ChunkCacheRequestError, match=r"^--options: "):
        parse_options(text)
    assert parse_options('{"top_k": "chunk", "drift": null}') == {"top_k": "chunk"}
