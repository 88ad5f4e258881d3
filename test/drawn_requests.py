"""Requests that nobody would send: our marks, options and routes, right and wrong ones mixed, from a seed.

- `request_of(seed, number)` is method, path and body of one, always the same; `MODEL` in it stands for the folder of
  the model that the server has.
- `without_marks` is a body as a client sends it that knows nothing of chunks, `is_comparable` whether both must give
  the same tokens to the model.

`Draw` has the values: texts with white space at every border, nulls, blanks, numbers at the bounds, other types.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from typing import Any

from chunk_cache.methods import METHODS

SEP, MODEL = "<|chunk|>", "<model>"
CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
COUNT = f"{MESSAGES}/count_tokens"
Request = tuple[str, str, Any]

WORDS = (
    *("rose", "stone", "winter", "Rome", "Paris", "prob", "ably", "é", "e\u0301", "日本", "\u200b", "\x00", "🙂"),
    *("<s>", "</s>", "<|end|>", "{text}", "it's", "405", "(so)", ".", "?", "\\"),
)
SPACE = ("", "", " ", " ", " ", "  ", "\n", "\n\n", "\t", "\u00a0", "\r\n", " \n")
MARKS = ("cache_control", "prompt_cache_breakpoint")
NUMBERS = (
    *(0, 1, -1, 2, 7, 0.0, 0.15, 0.5, 1.0, 1.5, -0.1, 1e308, -1e308, 2**31, 2**63, 10**30),
    *(float("nan"), float("inf")),
)
MOST_CHOICES = 4
OPTIONS = sorted({option.name for method in METHODS.values() for option in method.options_schema})
KEYS = (
    *("spans", "mode", "method", "ratio", "options", "answer_tokens", "keep_tokens", "explain"),
    *("chunk_ids", "chunks", "template", "marks", "parts"),
)
ADMIN = ("stats", "variants", "pin", "unpin", "evict", "flush", "warm", "nothing")


class Draw(Random):
    """Values that a request may hold."""

    def text(self) -> str:
        num = self.choice((0, 1, 3, 3, 20, 40, 60))
        return "".join(self.choice(WORDS) + self.choice(SPACE) for _ in range(num))

    def visible(self) -> str:
        return f"{self.choice(SPACE)}{self.choice(WORDS[:5])}{self.choice(SPACE)}{self.text()}"

    def marked(self) -> str:
        """Now and then a chunk is blank, or a separator alone."""
        num = self.choice((1, 1, 3, 3, 4, 8))
        return SEP.join(self.text() if self.random() < 0.1 else self.visible() for _ in range(num))

    def junk(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.randrange(9 if depth < 3 else 6)
        if kind < 2:
            return self.choice(NUMBERS)
        if kind < 4:
            return self.choice((None, None, True, False, "", " ", "auto", "epic", "off", "1", "[[0, 2]]", self.text()))
        if kind == 4:
            return []
        if kind == 5:
            return {}
        if kind == 6:
            return [self.junk(depth + 1) for _ in range(self.randrange(4))]
        if kind == 7:
            return {self.choice((*KEYS, "id", "text", "")): self.junk(depth + 1) for _ in range(self.randrange(4))}
        value: Any = 1
        for _ in range(self.choice((5, 60, 300))):
            value = [value]
        return value

    def ids(self) -> list[int]:
        return [self.randrange(300) for _ in range(self.choice((0, 1, 30, 60)))]

    def spans(self) -> list[list[int]]:
        edges = sorted(self.sample(range(60), 2 * self.randrange(1, 4)))
        return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]

    def passages(self) -> list[Any]:
        ids = (None, "a", "b", "a")
        return [
            {"text": self.visible() if self.random() < 0.8 else self.text(), "id": self.choice(ids)}
            for _ in range(self.randrange(4))
        ]

    def options(self) -> dict[str, Any]:
        """A `chunk_cache` object, most of it right."""
        right: dict[str, Callable[[], Any]] = {
            "spans": self.spans,
            "chunk_ids": lambda: [self.choice(("a", "b", None)) for _ in range(self.randrange(4))],
            "mode": lambda: self.choice(("auto", "exact", "off", "prepare")),
            "method": lambda: self.choice(sorted(METHODS)),
            "ratio": lambda: self.choice((0, 0.05, 0.15, 1, 1.0)),
            "options": lambda: {self.choice(OPTIONS): self.choice((0, 1, 3, 8, 0.5, "kv", [0]))},
            "answer_tokens": lambda: self.randrange(80),
            "keep_tokens": lambda: self.randrange(80),
            "chunks": self.passages,
            "template": lambda: self.choice(("{text}\n", "[{id}] {text}", "{title}{text}", "none", "{text}{text}")),
        }
        found = {}
        for key in self.sample(KEYS, self.choice((0, 1, 1, 2, 3))):
            value = right.get(key, lambda: self.choice((True, False)))
            found[key] = self.choice((None, self.junk())) if self.random() < 0.06 else value()
        if self.random() < 0.02:
            found["x"] = self.junk()
        return found

    def custom(self) -> Any:
        return self.junk() if self.random() < 0.05 else self.options()

    def maybe(self, body: dict[str, Any], **values: Callable[[], Any]) -> dict[str, Any]:
        """Some of the values, now and then one of another kind."""
        for key, value in values.items():
            if self.random() < 0.4:
                body[key] = self.choice((None, self.junk())) if self.random() < 0.05 else value()
        return body

    def part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "text", "text": self.marked() if self.random() < 0.3 else self.text()}
        return self.maybe(part, **dict.fromkeys(MARKS, lambda: self.choice((True, {"type": "ephemeral"}))))

    def content(self) -> Any:
        return self.marked() if self.random() < 0.5 else [self.part() for _ in range(self.randrange(1, 5))]

    def block(self) -> dict[str, Any]:
        """One of the Anthropic route."""
        source = {"type": "text", "media_type": "text/plain", "data": self.text()}
        blocks = (
            self.part(),
            {"type": "document", "source": source if self.random() < 0.8 else self.junk(), "title": self.text()},
            {"type": "search_result", "source": "s", "title": "t", "content": [self.part()]},
            {"type": "tool_result", "tool_use_id": "1", "content": self.content()},
        )
        return self.choice(blocks)

    def blocks(self) -> Any:
        return self.marked() if self.random() < 0.3 else [self.block() for _ in range(self.randrange(1, 5))]

    def spoilt(self, body: Any) -> Any:
        """The body with one value somewhere in it that is null, blank, left out or of another type."""
        if not isinstance(body, (dict, list)) or not body:
            return self.choice((None, "", " ", "\ud800", [], {}, self.junk()))
        places = list(body) if isinstance(body, dict) else list(range(len(body)))
        place = self.choice(places)
        if self.random() < 0.15:
            del body[place]
        else:
            deeper = isinstance(body[place], (dict, list)) and self.random() < 0.7
            body[place] = self.spoilt(body[place]) if deeper else self.spoilt(None)
        return body


def _generate(draw: Draw) -> Request:
    sampling = draw.maybe(
        {"max_new_tokens": draw.choice((0, 1, 3)), "temperature": 0},
        custom_params=lambda: {"chunk_cache": draw.custom()},
    )
    body: dict[str, Any] = {"sampling_params": sampling}
    if draw.random() < 0.4:
        body["input_ids"] = draw.ids()
    else:
        body["text"] = [draw.marked() for _ in range(draw.randrange(1, 4))] if draw.random() < 0.2 else draw.marked()
    if draw.random() < 0.1:
        body["sampling_params"] = [sampling] * draw.randrange(4)
    draw.maybe(body, stream=lambda: True, extra_key=lambda: draw.choice(("a", "b")), return_logprob=lambda: True)
    return "POST", "/generate", body


def _completions(draw: Draw) -> Request:
    body: dict[str, Any] = {"model": "default", "prompt": draw.marked(), "max_tokens": draw.choice((1, 3))}
    if draw.random() < 0.2:
        body["prompt"] = draw.choice(([draw.marked(), draw.marked()], draw.ids(), draw.junk()))
    draw.maybe(body, n=lambda: draw.randrange(1, 3), echo=lambda: True, stream=lambda: True, suffix=draw.text)
    draw.maybe(body, chunk_cache=draw.custom)
    return "POST", COMPLETIONS, draw.maybe(body, custom_params=lambda: {"chunk_cache": draw.custom()})


def _chat(draw: Draw) -> Request:
    roles = ("system", "user", "assistant", "user", "tool", "developer")
    messages = [{"role": draw.choice(roles), "content": draw.content()} for _ in range(draw.randrange(4))]
    body: dict[str, Any] = {"model": "default", "messages": [*messages, {"role": "user", "content": draw.content()}]}
    body["max_tokens"] = draw.choice((1, 3))
    draw.maybe(body, chunk_cache=draw.custom)
    if draw.random() < 0.2:
        draw.maybe(body, documents=lambda: draw.choice((["a", "b"], draw.passages(), draw.junk())), input_ids=draw.ids)
        draw.maybe(body, continue_final_message=lambda: True)
    draw.maybe(body, n=lambda: draw.randrange(1, 3), stream=lambda: True, cache_salt=lambda: draw.choice(("a", "b")))
    return "POST", CHAT, draw.maybe(body, custom_params=lambda: {"chunk_cache": draw.custom()})


def _messages(draw: Draw) -> Request:
    messages = [
        {"role": draw.choice(("user", "assistant")), "content": draw.blocks()} for _ in range(draw.randrange(2))
    ]
    body: dict[str, Any] = {"model": "default", "messages": [*messages, {"role": "user", "content": draw.blocks()}]}
    draw.maybe(body, chunk_cache=draw.custom, stream=lambda: True, system=draw.content)
    return "POST", MESSAGES, {**body, "max_tokens": 2}


def _count(draw: Draw) -> Request:
    body = _messages(draw)[2]
    return "POST", COUNT, {key: value for key, value in body.items() if key not in ("max_tokens", "stream")}


def _responses(draw: Draw) -> Request:
    content = draw.choice((draw.text, draw.marked, draw.content))()
    given = content if isinstance(content, str) else [{"type": "message", "role": "user", "content": content}]
    body = {"model": MODEL, "input": given, "max_output_tokens": 2, "store": False}
    return "POST", "/v1/responses", draw.maybe(body, chunk_cache=draw.custom, stream=lambda: True)


def _ollama(draw: Draw) -> Request:
    body: dict[str, Any] = {"model": "m", "stream": draw.random() < 0.3, "options": {"num_predict": 2}}
    if draw.random() < 0.5:
        return "POST", "/api/generate", draw.maybe({**body, "prompt": draw.marked()}, system=draw.text)
    return "POST", "/api/chat", {**body, "messages": [{"role": "user", "content": draw.marked()}]}


def _others(draw: Draw) -> Request:
    """Routes that generate nothing, or that this model does not have."""
    path, body = draw.choice(
        (
            ("/v1/embeddings", {"model": "default", "input": draw.marked()}),
            ("/v1/classify", {"model": "default", "input": draw.marked()}),
            ("/v1/rerank", {"query": draw.text(), "documents": [draw.marked()]}),
            ("/v1/score", {"model": "default", "query": draw.marked(), "items": [draw.text()], "label_token_ids": [1]}),
            ("/v1/tokenize", {"model": "default", "prompt": draw.marked()}),
            ("/v1/detokenize", {"model": "default", "tokens": draw.ids()}),
            ("/vertex_generate", {"instances": [{"text": draw.marked()}], "parameters": {"sampling_params": {}}}),
            ("/invocations", _chat(draw)[2]),
        )
    )
    return "POST", path, body


def _updates(draw: Draw) -> Request:
    """What changes weights, empties caches, or stops for a while (`FOLLOWED`)."""
    path, body = draw.choice(
        (
            ("/update_weights_from_disk", {"model_path": MODEL, "flush_cache": draw.choice((True, False))}),
            ("/update_weights_from_disk", {"model_path": "no/such/folder", "flush_cache": False}),
            ("/flush_cache", {}),
            ("/abort_request", {"abort_all": True}),
            ("/abort_request", {"rid": draw.text()}),
            ("/pause_generation", {"mode": draw.choice(("abort", "retract", "in_place"))}),
            ("/chunk_cache/flush", {}),
        )
    )
    return "POST", path, body


FOLLOWED = {"/pause_generation": "/continue_generation"}
"""What must be asked behind a request, so that the server goes on."""


def _admin(draw: Draw) -> Request:
    route = draw.choice(ADMIN)
    if draw.random() < 0.3:
        query = draw.choice(("", "limit=3", "limit=-1", "limit=x", "offset=1"))
        return "GET", f"/chunk_cache/{route}?{query}", None
    body: dict[str, Any] = {} if route == "flush" else {"texts": [draw.text() for _ in range(draw.randrange(1, 3))]}
    if draw.random() < 0.3:
        draw.maybe(body, keys=lambda: [draw.text()], input_ids=lambda: [[1, 2, 3]], extra_key=lambda: "a", x=draw.junk)
        draw.maybe(body, ttl_s=lambda: draw.choice(NUMBERS), neighbours=lambda: draw.randrange(3))
        draw.maybe(body, system_prompts=lambda: [draw.text()], everywhere=lambda: True)
    return "POST", f"/chunk_cache/{route}", draw.junk() if draw.random() < 0.05 else body


TEXT_ROUTES = (_generate, _completions, _chat, _messages, _count)
ROUTES = (*TEXT_ROUTES * 6, *(_admin,) * 5, *(_responses,) * 2, _ollama, *(_others,) * 2, _updates)


def request_of(seed: int, number: int, routes: tuple[Callable[[Draw], Request], ...] = ROUTES) -> Request:
    """Method, path and body of one request; every tenth has one value that is spoilt."""
    draw = Draw(f"{seed}/{number}")
    method, path, body = draw.choice(routes)(draw)
    if body is not None and draw.random() < 0.1:
        body = draw.spoilt(body)
    _bound(body)
    return method, path, body


def _bound(body: Any) -> None:
    """SGLang makes as many copies of a request as its `n` says, so a large one ends any server."""
    holders = [body, body.get("sampling_params")] if isinstance(body, dict) else []
    for holder in holders:
        if isinstance(holder, dict) and isinstance(holder.get("n"), int) and holder["n"] > MOST_CHOICES:
            holder["n"] = MOST_CHOICES


def without_marks(value: Any) -> Any:
    """What stock SGLang would be sent: no separators, no marks of other services, no `chunk_cache`."""
    if isinstance(value, str):
        return value.replace(SEP, "")
    if isinstance(value, list):
        return [without_marks(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {key: without_marks(one) for key, one in value.items() if key not in (*MARKS, "chunk_cache")}


def is_comparable(body: Any) -> bool:
    """Whether a body without its marks has the same text; not where passages stand beside it."""
    return not any(f'"{key}"' in json.dumps(body) for key in ("chunks", "documents"))
