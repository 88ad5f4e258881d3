"""An OpenAPI document of the routes we add or change, from the constants that the server checks requests with.

Verb: `document`. `OURS` says which part of a route's body is ours: what its schema refuses, the server must refuse.
"""

from __future__ import annotations

from typing import Any

from chunk_cache.keys import KEY_LEN
from chunk_cache.methods import METHODS
from chunk_cache.options import admin_bodies as body
from chunk_cache.options.request_options import KEYS, MAX_CHUNKS, MAX_POSITION, MODES
from chunk_cache.prompt.chunk_cache_fields import KEY, ROUTE_KEYS
from sglang_chunk_cache.admin.routes import PREFIX, ROUTES

Schema = dict[str, Any]

STRING: Schema = {"type": "string"}
TEXT: Schema = {"type": ["string", "null"]}
FLAG: Schema = {"type": ["boolean", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_POSITION}
KEY_TEXT: Schema = {"type": "string", "pattern": f"^[0-9a-fA-F]{{{2 * KEY_LEN}}}$"}
PARTITION: Schema = {"extra_key": TEXT, "cache_salt": TEXT}


def integer(lowest: int, highest: int) -> Schema:
    return {"type": "integer", "minimum": lowest, "maximum": highest}


def items(of: Schema, lowest: int = 0, highest: int | None = None) -> Schema:
    bound = {} if highest is None else {"maxItems": highest}
    return {"type": "array", "items": of, "minItems": lowest, **bound}


def closed(required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object without other keys."""
    return {
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
        **({"required": list(required)} if required else {}),
    }


def one_of(*ways: str, required: tuple[str, ...] = (), **properties: Schema) -> Schema:
    """An object that names chunks in one of these ways."""
    chunks = {"texts": items(STRING, 1, body.MAX_ITEMS), "input_ids": items(items(COUNT, 1), 1, body.MAX_ITEMS)}
    chunks["keys"] = items(KEY_TEXT, 1, body.MAX_ITEMS)
    return {"anyOf": [closed((way, *required), **{way: chunks[way]}, **properties) for way in ways]}


NEIGHBOURS = {
    "anyOf": [
        {"type": "null"},
        integer(1, body.MAX_NEIGHBOURS),
        items(items(integer(0, body.MAX_ITEMS - 1), 0, body.MAX_NEIGHBOURS), 1, body.MAX_ITEMS),
    ]
}
TTL: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": body.MAX_TTL_S}
SELECTED = {"anyOf": [one_of("texts", "input_ids", **PARTITION), one_of("keys")]}
BODIES: dict[str, Schema] = {
    "evict": SELECTED,
    "pin": {
        "anyOf": [
            one_of("texts", "input_ids", required=("ttl_s",), ttl_s=TTL, **PARTITION),
            one_of("keys", required=("ttl_s",), ttl_s=TTL),
        ]
    },
    "unpin": {"anyOf": [SELECTED, closed(("all",), all={"const": True})]},
    "flush": closed(timeout_s={"type": "number", "minimum": 0, "maximum": body.MAX_FLUSH_S}),
    "warm": one_of(
        *("texts", "input_ids"),
        **PARTITION,
        prefix_text=TEXT,
        batch=integer(1, body.MAX_BATCH),
        neighbours=NEIGHBOURS,
        dry_run={"type": "boolean"},
    ),
}
LISTING: dict[str, Schema] = {
    "key": KEY_TEXT,
    "limit": integer(1, body.MAX_LIMIT),
    "offset": integer(0, MAX_POSITION),
    "order": {"enum": list(body.ORDERS)},
}
OPTIONS: dict[str, Schema] = {
    "spans": items({"type": "array", "items": COUNT, "minItems": 2, "maxItems": 2}, 0, MAX_CHUNKS),
    "mode": {"enum": list(MODES)},
    "method": {"enum": sorted(METHODS)},
    "chunk_ids": items({"type": ["string", "null"], "minLength": 1}, 0, 4),
    "ratio": {"type": "number", "minimum": 0, "maximum": 1},
    "options": {"type": "object"},
    "explain": {"type": "boolean"},
    "answer_tokens": COUNT,
    "keep_tokens": COUNT,
}
OF_ROUTES: dict[str, Schema] = {
    "chunks": items(closed(("text",), id=STRING, text={"type": "string", "minLength": 1}), 0, MAX_CHUNKS),
    "template": {"anyOf": [{"type": "null"}, {"type": "string", "pattern": r"\{text\}"}]},
    "marks": FLAG,
    "parts": FLAG,
}
assert (tuple(sorted(OPTIONS)), tuple(OF_ROUTES)) == (tuple(sorted(KEYS)), ROUTE_KEYS), "a key has no schema"

PROMPT = {"enum": ["A rose is a rose is a rose. " * 4, "Winter in Rome<|chunk|>stone upon stone<|chunk|>Which city?"]}
MESSAGES = items({"type": "object", "properties": {"role": {"const": "user"}, "content": PROMPT}}, 1, 2)
MESSAGES["items"]["required"] = ["role", "content"]
FEW = {"enum": [1, 2]}
WITH_OBJECT: dict[str, Schema] = {
    "/v1/completions": {"prompt": PROMPT},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES},
}


def _of_route(path: str) -> dict[str, Schema]:
    unread = ("marks", "parts") if path == "/v1/completions" else ()
    return {key: schema for key, schema in OF_ROUTES.items() if key not in unread}


def _inference(path: str) -> Schema:
    if path == "/generate":
        params = closed((KEY,), **{KEY: closed(**OPTIONS)})
        sampling = closed(("max_new_tokens", "custom_params"), max_new_tokens=FEW, custom_params=params)
        return closed(("text", "sampling_params"), text=PROMPT, sampling_params=sampling)
    fields = {"model": {"const": "default"}, "max_tokens": FEW, **WITH_OBJECT[path]}
    return closed((*fields, KEY), **fields, **{KEY: closed(**OPTIONS, **_of_route(path))})


OURS: dict[str, tuple[tuple[str, ...], Schema]] = {
    "/generate": (("sampling_params", "custom_params", KEY), closed(**OPTIONS)),
    **{path: ((KEY,), closed(**OPTIONS, **_of_route(path))) for path in WITH_OBJECT},
    **{f"{PREFIX}/{name}": ((), schema) for name, schema in BODIES.items()},
}
"""By path: where in the body our part stands, and its schema."""


def _operation(schema: Schema | None = None, query: dict[str, Schema] | None = None) -> Schema:
    found: Schema = {"responses": {"default": {"description": "any"}}}
    if schema is not None:
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    if query:
        found["parameters"] = [{"name": name, "in": "query", "schema": one} for name, one in query.items()]
    return found


def document() -> Schema:
    """The whole; a new route of administration without a schema is a KeyError."""
    paths: Schema = {}
    for method, path, _ in ROUTES:
        name = path.removeprefix(f"{PREFIX}/")
        operation = (
            _operation(BODIES[name]) if method == "POST" else _operation(None, LISTING if name == "variants" else {})
        )
        paths[path] = {method.lower(): operation}
    paths |= {path: {"post": _operation(_inference(path))} for path in ("/generate", *WITH_OBJECT)}
    return {"openapi": "3.1.0", "info": {"title": "chunk cache", "version": "0"}, "paths": paths}
