"""What a client may send to the admin routes, checked.

Verbs: `parse_evict`, `parse_pin`, `parse_unpin`, `parse_warm`, `parse_flush`, `parse_listing`; each turns decoded
JSON (a query string for the listing) into a frozen value. Promise: what is wrong is one sentence with the JSON path and
the remedy, before anything is asked of a scheduler.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from chunk_cache.errors import given, is_unicode, known_names, request_error, show
from chunk_cache.keys import KEY_LEN
from chunk_cache.options.warming_limits import (
    DEFAULT_BATCH,
    DEFAULT_RETRIEVER,
    MAX_BATCH,
    MAX_ITEMS,
    MAX_NEIGHBOURS,
)

MAX_TTL_S = 86400.0
"""Most seconds of a pin: a pin that nobody renews must not take room for ever."""

MAX_LIMIT = 1000
"""Most variants in one page of the listing."""

ORDERS = ("id", "uses")
"""Orders of the listing; by uses, the most used come first."""

MAX_FLUSH_S = 600.0

_SELECTORS = ("texts", "input_ids", "keys")
_PARTITION = ("extra_key", "cache_salt")
_FRONTS = ("prefix_text", "prefix_ids", "messages")
"""Ways to say what stands in front of the chunks to warm."""
_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True)
class ChunkNames:
    """Chunks, in one of three ways.

    Attributes:
        texts: passages.
        input_ids: their token ids.
        keys: keys as the listing shows them, which name the partition already.
        extra_key, cache_salt: the partition of texts and ids.
    """

    texts: tuple[str, ...] | None = None
    input_ids: tuple[tuple[int, ...], ...] | None = None
    keys: tuple[bytes, ...] | None = None
    extra_key: str | None = None
    cache_salt: str | None = None


@dataclass(frozen=True)
class Pin:
    """Chunks to keep, and for how many seconds."""

    selection: ChunkNames
    ttl_s: float


@dataclass(frozen=True)
class Eviction:
    """Chunks to forget, and whether to forget also everything that may hold a part of them."""

    selection: ChunkNames
    everywhere: bool


@dataclass(frozen=True)
class Warm:
    """Chunks to compute, what stands in front of each, and how many at a time.

    Attributes:
        prefix_text, prefix_ids: the text in front of prompts of text, or its ids.
        messages: with which chats begin, each a role and a text. Chunks stand behind the text of the last one if it is
            of the user, else in a message of the user behind them. None = prompts are no chats.
        alone: nothing but the prefix stands in front of a chunk; else the filler does, or neighbours.
        neighbours: how many similar chunks each is computed behind; or a list of them for each, by their places in the
            selection. Chunks without a list are there only to be neighbours. None = behind none.
        dry_run: only say what it would take.
    """

    selection: ChunkNames
    prefix_text: str | None
    prefix_ids: tuple[int, ...] | None
    batch: int
    neighbours: int | tuple[tuple[int, ...], ...] | None = None
    dry_run: bool = False
    alone: bool = False
    messages: tuple[dict[str, str], ...] | None = None


@dataclass(frozen=True)
class Listing:
    """Which variants to list."""

    key: bytes | None
    limit: int
    offset: int
    order: str


def parse_evict(body: object) -> Eviction:
    """The body of `evict`.

    Raises:
        ChunkCacheRequestError: anything that is not in the contract, as for all of these.
    """
    fields = _object(body, (*_SELECTORS, *_PARTITION, "everywhere"))
    return Eviction(_selection(fields, _SELECTORS), _boolean(fields.get("everywhere", False), "everywhere"))


def parse_pin(body: object) -> Pin:
    """The body of `pin`."""
    fields = _object(body, (*_SELECTORS, *_PARTITION, "ttl_s"))
    if "ttl_s" not in fields:
        raise request_error("ttl_s", "missing", f"give the seconds to keep the chunks, up to {MAX_TTL_S:g}")
    return Pin(_selection(fields, _SELECTORS), _positive(fields["ttl_s"], "ttl_s", MAX_TTL_S))


def parse_unpin(body: object) -> ChunkNames | None:
    """The body of `unpin`; None where it is `{"all": true}`."""
    fields = _object(body, (*_SELECTORS, *_PARTITION, "all"))
    if "all" not in fields:
        return _selection(fields, _SELECTORS)
    if fields["all"] is not True:
        raise request_error("all", f"{show(fields['all'])} is not true", "give true, or name chunks instead")
    if len(fields) > 1:
        raise request_error("all", "given beside other fields", "drop it, or the others")
    return None


def parse_warm(body: object) -> Warm:
    """The body of `warm`."""
    ways = _SELECTORS[:2]
    fields = _object(body, (*ways, *_PARTITION, *_FRONTS, "batch", "alone", "neighbours", "retriever", "dry_run"))
    fronts = [name for name in _FRONTS if name in fields]
    if len(fronts) > 1:
        raise request_error(fronts[1], f"given beside {fronts[0]}", "give one of them")
    prefix_ids = fields.get("prefix_ids")
    selection = _selection(fields, ways)
    neighbours = _neighbours(fields.get("neighbours"), len(selection.texts or selection.input_ids or ()))
    retriever = _text(fields.get("retriever"), "retriever")
    if retriever is not None and not isinstance(neighbours, int):
        raise request_error("retriever", "given without a number of neighbours to find", "drop it, or give neighbours")
    if retriever not in (None, DEFAULT_RETRIEVER):  # clients choose no model that the server downloads and runs
        remedy = f"name {DEFAULT_RETRIEVER}, or find them by `chunk-cache warm --neighbours N --retriever MODEL`"
        raise request_error("retriever", f"the server does not load {show(retriever)}", remedy)
    alone = _boolean(fields.get("alone", False), "alone")
    if alone and neighbours is not None:
        raise request_error("alone", "given beside neighbours", "give one of them")
    return Warm(
        selection=selection,
        alone=alone,
        prefix_text=_text(fields.get("prefix_text"), "prefix_text"),
        prefix_ids=None if prefix_ids is None else _ids(prefix_ids, "prefix_ids"),
        batch=_integer(fields.get("batch", DEFAULT_BATCH), "batch", 1, MAX_BATCH),
        neighbours=neighbours,
        dry_run=_boolean(fields.get("dry_run", False), "dry_run"),
        messages=_messages(fields["messages"]) if "messages" in fields else None,
    )


def parse_flush(body: object) -> float:
    """The body of `flush`: for how many seconds to wait until the server is idle."""
    fields = _object(body, ("timeout_s",))
    if fields.get("timeout_s", 0) == 0 and not isinstance(fields.get("timeout_s"), bool):
        return 0.0
    return _positive(fields["timeout_s"], "timeout_s", MAX_FLUSH_S)


def parse_listing(query: Mapping[str, str]) -> Listing:
    """The query string of `variants`."""
    _object(query, ("key", "limit", "offset", "order"))
    numbers = {}
    for name, default, lowest, highest in (("limit", 100, 1, MAX_LIMIT), ("offset", 0, 0, 2**31 - 1)):
        text = query.get(name, str(default))
        is_number = text.isascii() and text.isdigit() and len(text) < 20
        numbers[name] = _integer(int(text) if is_number else text, name, lowest, highest)
    order = query.get("order", ORDERS[0])
    if order not in ORDERS:
        raise request_error("order", f"unknown value {show(order)}", f"known values: {', '.join(ORDERS)}")
    return Listing(None if "key" not in query else _key(query["key"], "key"), **numbers, order=order)


def _selection(fields: Mapping[str, Any], ways: tuple[str, ...]) -> ChunkNames:
    given = [way for way in ways if fields.get(way) is not None]
    if not given:
        raise request_error(ways[0], "missing", f"name the chunks by one of {', '.join(ways)}")
    if len(given) > 1:
        raise request_error(given[1], f"given beside {given[0]}", "name the chunks in one way")
    way, items = given[0], fields[given[0]]
    if not isinstance(items, list) or not items:
        raise request_error(way, f"{show(items)} is not a list with one entry or more", "give a list of chunks")
    if len(items) > MAX_ITEMS:
        raise request_error(way, f"{len(items)} chunks, and {MAX_ITEMS} is the limit", "send several requests")
    extra_key, cache_salt = (_text(fields.get(name), name) or None for name in _PARTITION)  # as SGLang, empty is none
    if way == "keys":
        for name, value in zip(_PARTITION, (extra_key, cache_salt), strict=True):
            if value is not None:
                raise request_error(name, "given beside keys, which name the partition already", "drop it")
        return ChunkNames(keys=tuple(_key(item, f"keys[{i}]") for i, item in enumerate(items)))
    if way == "input_ids":
        ids = tuple(_ids(item, f"input_ids[{i}]", is_chunk=True) for i, item in enumerate(items))
        return ChunkNames(input_ids=ids, extra_key=extra_key, cache_salt=cache_salt)
    texts = tuple(_chunk_text(item, f"texts[{i}]") for i, item in enumerate(items))
    return ChunkNames(texts=texts, extra_key=extra_key, cache_salt=cache_salt)


def _object(value: object, known: Iterable[str]) -> Mapping[str, Any]:
    known = tuple(known)
    if not isinstance(value, Mapping):
        raise request_error("body", f"{show(value)} is not an object", f"give an object with {', '.join(known)}")
    for name in value:
        if name not in known:
            shown = str(name)[:40] if is_unicode(str(name)) else show(name)
            raise request_error(shown, "unknown field", known_names(name, known, "fields"))
    return given(value)


def _chunk_text(value: object, path: str) -> str:
    text = _text(value, path)
    if text is None:
        raise request_error(path, "null is not a text", "give the passage")
    return text


def _text(value: object, path: str) -> str | None:
    if value is not None and not isinstance(value, str):
        raise request_error(path, f"{show(value)} is not a string", "give a string")
    if value is not None and not is_unicode(value):
        raise request_error(
            path, "has half of a surrogate pair, which is no character", "cut the text between characters"
        )
    return value


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise request_error("messages", f"{show(value)} is not a list", "give the messages in front of the chunks")
    for i, message in enumerate(value):
        if not isinstance(message, Mapping) or message.keys() != {"role", "content"}:
            remedy = "give an object with role and content only, or prefix_ids instead of messages"
            raise request_error(f"messages[{i}]", f"{show(message)} is not a message of text", remedy)
        role, content = message["role"], message["content"]
        if role not in _ROLES:
            problem, remedy = f"unknown value {show(role)}", f"known values: {', '.join(_ROLES)}"
            raise request_error(f"messages[{i}].role", problem, remedy)
        if _text(content, f"messages[{i}].content") is None:
            raise request_error(f"messages[{i}].content", "null is not a text", "give a string")
    return tuple(dict(message) for message in value)


def _ids(value: object, path: str, *, is_chunk: bool = False) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise request_error(path, f"{show(value)} is not a list", "give a list of token ids")
    if is_chunk and not value:
        raise request_error(path, "the chunk is empty", "give it token ids, or remove it")
    for i, token in enumerate(value):
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < 2**31:
            raise request_error(f"{path}[{i}]", f"{show(token)} is not a token id", "give integers from 0")
    return tuple(value)


def _neighbours(value: object, num_chunks: int) -> int | tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        return _integer(value, "neighbours", 1, MAX_NEIGHBOURS)
    if not 0 < len(value) <= num_chunks:
        problem = f"{len(value)} lists, and there are {num_chunks} chunks"
        raise request_error("neighbours", problem, "give a list for each chunk that is to be stored")
    return tuple(_places(item, i, num_chunks) for i, item in enumerate(value))


def _places(value: object, chunk: int, num_chunks: int) -> tuple[int, ...]:
    path = f"neighbours[{chunk}]"
    if not isinstance(value, list) or len(value) > MAX_NEIGHBOURS:
        remedy = "give a list of places of chunks in this request, counted from 0"
        raise request_error(path, f"{show(value)} is not a list of up to {MAX_NEIGHBOURS} chunks", remedy)
    for j, place in enumerate(value):
        if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < num_chunks:
            problem = f"{show(place)} is none of the {num_chunks} chunks"
            raise request_error(f"{path}[{j}]", problem, f"name one of them, from 0 to {num_chunks - 1}")
        if place == chunk:
            raise request_error(f"{path}[{j}]", "the chunk itself is no neighbour", "remove it")
    return tuple(value)


def _key(value: object, path: str) -> bytes:
    try:
        key = bytes.fromhex(value) if isinstance(value, str) else b""
    except ValueError:
        key = b""
    if len(key) != KEY_LEN or not isinstance(value, str) or len(value) != 2 * KEY_LEN:
        remedy = f"give {2 * KEY_LEN} hexadecimal digits, as GET /chunk_cache/variants shows them"
        raise request_error(path, f"{show(value)} is not a chunk key", remedy)
    return key


def _positive(value: object, path: str, highest: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= highest:
        raise request_error(
            path, f"{show(value)} is not a number of seconds", f"give a number above 0, up to {highest:g}"
        )
    return float(value)


def _boolean(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise request_error(path, f"{show(value)} is neither true nor false", "give one of them")
    return value


def _integer(value: object, path: str, lowest: int, highest: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
        raise request_error(path, f"{show(value)} is not a legal number", f"give an integer from {lowest} to {highest}")
    return value
