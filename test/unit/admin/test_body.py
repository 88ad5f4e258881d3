"""What a client may send to the admin routes, and what the message of a mistake names."""

from __future__ import annotations

from typing import Any

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.options import admin_bodies as body

KEY = "0123456789abcdef" * 2

BAD_SELECTIONS: list[tuple[Any, str]] = [
    (None, "body: "),
    ([], "body: "),
    ({}, "texts: missing"),
    ({"texts": []}, "texts: "),
    ({"texts": "a"}, "texts: "),
    ({"texts": ["a", 3]}, "texts[1]: "),
    ({"texts": ["a", None]}, "texts[1]: "),
    ({"texts": ["a"] * (body.MAX_ITEMS + 1)}, "texts: "),
    ({"texts": ["a"], "keys": [KEY]}, "keys: given beside texts"),
    ({"input_ids": [[1], []]}, "input_ids[1]: "),
    ({"input_ids": [1, 2]}, "input_ids[0]: "),
    ({"input_ids": [[1, True]]}, "input_ids[0][1]: "),
    ({"input_ids": [[1, -1]]}, "input_ids[0][1]: "),
    ({"input_ids": [[1, 2**40]]}, "input_ids[0][1]: "),
    ({"keys": ["xyz"]}, "keys[0]: "),
    ({"keys": [KEY, KEY[:-1] + " "]}, "keys[1]: "),
    ({"keys": [7]}, "keys[0]: "),
    ({"keys": [KEY], "extra_key": "a"}, "extra_key: "),
    ({"texts": ["a"], "cache_salt": 1}, "cache_salt: "),
    ({"texts": ["a"], "spam": 1}, "spam: unknown field"),
    ({"texts": ["a"], "\ud800": 1}, "'\\ud800': unknown field"),
    ({"texts": ["a", "cut \ud83d"]}, "texts[1]: has half of a surrogate pair"),
    ({"texts": ["a"], "extra_key": "\udc00"}, "extra_key: has half of a surrogate pair"),
]


@pytest.mark.parametrize(("value", "start"), BAD_SELECTIONS)
def test_bad_selection_is_named(value, start):
    with pytest.raises(ChunkCacheRequestError) as raised:
        body.parse_evict(value)
    assert str(raised.value).startswith(start)
    assert "; " in str(raised.value), "a remedy"


@pytest.mark.parametrize("ttl", [None, 0, -1, True, "5", body.MAX_TTL_S + 1, float("nan"), float("inf")])
def test_bad_ttl_is_named(ttl):
    with pytest.raises(ChunkCacheRequestError, match=r"^ttl_s: "):
        body.parse_pin({"keys": [KEY], "ttl_s": ttl})


def test_pin_needs_a_ttl():
    with pytest.raises(ChunkCacheRequestError, match=r"^ttl_s: missing"):
        body.parse_pin({"keys": [KEY]})
    assert body.parse_pin({"keys": [KEY], "ttl_s": 5}) == body.Pin(body.ChunkNames(keys=(bytes.fromhex(KEY),)), 5.0)


@pytest.mark.parametrize(
    ("value", "start"),
    [
        ({"keys": [KEY]}, "keys: unknown field"),
        ({"texts": ["a"], "batch": 0}, "batch: "),
        ({"texts": ["a"], "batch": True}, "batch: "),
        ({"texts": ["a"], "batch": body.MAX_BATCH + 1}, "batch: "),
        ({"texts": ["a"], "prefix_text": 3}, "prefix_text: "),
        ({"texts": ["a"], "prefix_ids": [1, "a"]}, "prefix_ids[1]: "),
        ({"texts": ["a"], "prefix_ids": [1], "prefix_text": "a"}, "prefix_ids: given beside prefix_text"),
        ({"texts": ["a"], "messages": [], "prefix_text": "a"}, "messages: given beside prefix_text; "),
        ({"texts": ["a"], "messages": [], "prefix_ids": []}, "messages: given beside prefix_ids; "),
        ({"texts": ["a"], "messages": "Read."}, "messages: 'Read.' is not a list; "),
        ({"texts": ["a"], "messages": ["Read."]}, "messages[0]: 'Read.' is not a message of text; "),
        ({"texts": ["a"], "messages": [{"role": "system"}]}, "messages[0]: "),
        ({"texts": ["a"], "messages": [{"role": "user", "content": [], "name": "a"}]}, "messages[0]: "),
        ({"texts": ["a"], "messages": [{"role": "user", "content": []}]}, "messages[0].content: [] is not a string; "),
        ({"texts": ["a"], "messages": [{"role": None, "content": "a"}]}, "messages[0].role: unknown value"),
        ({"texts": ["a"], "messages": [{"role": ["user"], "content": "a"}]}, "messages[0].role: unknown value"),
        ({"texts": ["a"], "messages": [{"role": "user", "content": None}]}, "messages[0].content: null "),
        ({"texts": ["a"], "neighbours": 0}, "neighbours: 0 is not a legal number; give an integer from 1 to 32"),
        ({"texts": ["a"], "neighbours": 33}, "neighbours: "),
        ({"texts": ["a"], "neighbours": True}, "neighbours: "),
        ({"texts": ["a"], "neighbours": "10"}, "neighbours: "),
        ({"texts": ["a"], "neighbours": []}, "neighbours: 0 lists, and there are 1 chunks; "),
        ({"texts": ["a"], "neighbours": [[], []]}, "neighbours: 2 lists"),
        ({"texts": ["a", "b"], "neighbours": [[1], 0]}, "neighbours[1]: 0 is not a list of up to 32 chunks; "),
        ({"texts": ["a", "b"], "neighbours": [[1] * 33]}, "neighbours[0]: "),
        ({"texts": ["a", "b"], "neighbours": [[2]]}, "neighbours[0][0]: 2 is none of the 2 chunks; name one of them"),
        ({"texts": ["a", "b"], "neighbours": [[1], [0, -1]]}, "neighbours[1][1]: -1 is none of the 2 chunks"),
        ({"texts": ["a", "b"], "neighbours": [[True]]}, "neighbours[0][0]: "),
        ({"texts": ["a", "b"], "neighbours": [["b"]]}, "neighbours[0][0]: "),
        ({"texts": ["a", "b"], "neighbours": [[0]]}, "neighbours[0][0]: the chunk itself is no neighbour; remove it"),
        ({"texts": ["a"], "retriever": "tfidf"}, "retriever: given without a number of neighbours"),
        ({"texts": ["a", "b"], "neighbours": [[1]], "retriever": "tfidf"}, "retriever: given without"),
        ({"texts": ["a"], "neighbours": 2, "retriever": 3}, "retriever: 3 is not a string"),
        ({"texts": ["a"], "neighbours": 2, "retriever": "some/model"}, "retriever: the server does not load 'some/mod"),
        ({"texts": ["a"], "dry_run": 1}, "dry_run: 1 is neither true nor false; give one of them"),
    ],
)
def test_bad_warm_is_named(value, start):
    with pytest.raises(ChunkCacheRequestError) as raised:
        body.parse_warm(value)
    assert str(raised.value).startswith(start)


def test_warm_with_all_fields():
    warm = body.parse_warm({"input_ids": [[3], [4, 5]], "extra_key": "", "prefix_ids": [], "batch": 2})
    assert warm == body.Warm(body.ChunkNames(input_ids=((3,), (4, 5))), None, (), 2)
    warm = body.parse_warm({"texts": ["a", "b"], "neighbours": 3, "retriever": "tfidf", "dry_run": True})
    assert (warm.neighbours, warm.dry_run) == (3, True)
    front = {"role": "system", "content": "Read."}
    assert body.parse_warm({"texts": ["a"], "messages": [front], "prefix_text": None}).messages == (front,)
    assert (body.parse_warm({"texts": ["a"], "messages": []}).messages, warm.messages) == ((), None)
    warm = body.parse_warm({"texts": ["a", "b", "c"], "neighbours": [[1, 2], []]})
    assert (warm.neighbours, warm.dry_run) == (((1, 2), ()), False)


@pytest.mark.parametrize("value", [{"all": False}, {"all": 1}, {"all": True, "keys": [KEY]}])
def test_bad_unpin_of_all(value):
    with pytest.raises(ChunkCacheRequestError, match=r"^all: "):
        body.parse_unpin(value)


def test_unpin_of_all():
    assert body.parse_unpin({"all": True}) is None


@pytest.mark.parametrize("value", [-1, "1", True, False, body.MAX_FLUSH_S + 1])
def test_bad_timeout_of_flush(value):
    with pytest.raises(ChunkCacheRequestError, match=r"^timeout_s: "):
        body.parse_flush({"timeout_s": value})


def test_flush():
    assert (body.parse_flush({}), body.parse_flush({"timeout_s": 0}), body.parse_flush({"timeout_s": 2})) == (0, 0, 2)


@pytest.mark.parametrize(
    ("query", "start"),
    [
        ({"limit": "0"}, "limit: "),
        ({"limit": "1001"}, "limit: "),
        ({"limit": "²"}, "limit: "),
        ({"offset": "-1"}, "offset: "),
        ({"offset": "9" * 5000}, "offset: "),
        ({"key": "abc"}, "key: "),
        ({"page": "1"}, "page: unknown field"),
    ],
)
def test_bad_listing_is_named(query, start):
    with pytest.raises(ChunkCacheRequestError) as raised:
        body.parse_listing(query)
    assert str(raised.value).startswith(start)


def test_listing():
    assert body.parse_listing({}) == body.Listing(None, 100, 0, "id")
    assert body.parse_listing({"key": KEY, "limit": "7", "offset": "3"}) == body.Listing(bytes.fromhex(KEY), 7, 3, "id")
