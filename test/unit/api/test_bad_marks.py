"""Marks of clients and passages beside messages that are wrong: a 400 names the place."""

from __future__ import annotations

import pytest

from unit.api.client_bodies import CHAT, CHUNKS, COMPLETIONS, CONTROL, MESSAGES, SEARCH, SEP, chat, messages, sent, text
from unit.api.seen_requests import chunks_of

BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}


USER = ("user", "Who?")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        (CHAT, chat(USER, chunk_cache={"chunk": []}), "chunk_cache: unknown key 'chunk'; did you mean chunks? known"),
        (CHAT, chat(USER, chunk_cache=[]), "chunk_cache: [] is not an object"),
        (CHAT, chat(USER, chunk_cache={"marks": 1}), "chunk_cache.marks: 1 is not a boolean"),
        (CHAT, chat(USER, chunk_cache={"method": "best"}), "chunk_cache.method: unknown method 'best'"),
        (
            CHAT,
            chat(USER, chunk_cache={}, custom_params={"chunk_cache": {}}),
            "chunk_cache: given in custom_params.chunk_cache too",
        ),
        (CHAT, chat(USER, chunk_cache={"chunks": {}}), "chunk_cache.chunks: {} is not a list"),
        (CHAT, chat(USER, chunk_cache={"chunks": ["a"]}), "chunk_cache.chunks[0]: 'a' is no chunk"),
        (CHAT, chat(USER, chunk_cache={"chunks": [{"id": "a"}]}), "chunk_cache.chunks[0].text: no text"),
        (
            CHAT,
            chat(USER, chunk_cache={"chunks": [{"text": "a", "title": "b"}]}),
            "chunk_cache.chunks[0]: unknown key 'title'; known keys: id, text",
        ),
        (
            CHAT,
            chat(USER, chunk_cache={"chunks": [{"id": "a", "text": "b"}, {"id": "a", "text": "c"}]}),
            "chunk_cache.chunks[1].id: 'a' is the id of another text too",
        ),
        (
            COMPLETIONS,
            {"model": "m", "prompt": "a", "chunk_cache": {"chunks": [{"text": f"a{SEP}b"}]}},
            "chunk_cache.chunks[0].text: the separator '<|chunk|>' stands inside of a passage",
        ),
        (COMPLETIONS, {"model": "m", "prompt": [5, 6], "chunk_cache": {"chunks": CHUNKS}}, "chunk_cache.chunks: the p"),
        (
            CHAT,
            chat(("system", "a"), chunk_cache={"chunks": CHUNKS}),
            "chunk_cache.chunks[0]: no message of the user",
        ),
        (CHAT, chat(USER, chunk_cache={"template": "{id}"}), "chunk_cache.template: {text} does not stand in it once"),
        (CHAT, chat(USER, chunk_cache={"chunks": CHUNKS, "spans": [[0, 1]]}), "chunk_cache.spans: chunk_cache.chunks["),
        (
            CHAT,
            chat(("user", f"{SEP}a{SEP}b"), min_tokens=1, stop_token_ids=[10**6]),
            "stop_token_ids: with a minimal length",
        ),
        (CHAT, chat(USER, documents={}), "documents: {} is not a list"),
        (CHAT, chat(USER, documents=[{"title": "a"}]), "documents[0].text: no text"),
        (CHAT, chat(USER, documents=[7]), "documents[0]: 7 is no document"),
        (CHAT, chat(USER, documents=[{"text": "a", "id": {"a": 1}}]), "documents[0].id: {'a': 1} is neither a string"),
        (CHAT, chat(USER, documents=["b", {"text": "a", "id": True}]), "documents[1].id: true is neither a string nor"),
        (CHAT, chat(USER, documents=[{"text": "a", "id": SEP}]), "documents[0].id: the separator '<|chunk|>' stands"),
        (
            CHAT,
            chat(("user", [text(f"a{SEP}b", **CONTROL), text("c")]), chunk_cache={"marks": True}),
            "messages[0].content[0].text: the separator '<|chunk|>' stands inside of a passage",
        ),
        (
            CHAT,
            chat(("user", [text("a b " * 9000, **CONTROL), text("c")]), chunk_cache={"marks": True}),
            "messages[0].content[0].cache_control: the chunk has ",
        ),
        (
            CHAT,
            chat(USER, chunk_cache={"chunks": [{"text": "a b " * 9000}]}),
            "chunk_cache.chunks[0]: the chunk has ",
        ),
        (MESSAGES, messages(text("a"), chunk_cache={"spam": 1}), "chunk_cache: unknown key 'spam'"),
        (MESSAGES, messages(text("a"), custom_params={"chunk_cache": {}}), "custom_params.chunk_cache: this route"),
        (
            MESSAGES,
            messages({"type": "document", "source": {"type": "base64", "data": "AA"}}, text("a")),
            "messages[0].content[0].source: a document with a source of type 'base64' has no text",
        ),
        (
            MESSAGES,
            messages({"type": "document", "source": {"type": "text", "data": 7}}, text("a")),
            "messages[0].content[0].source.data: the document is not of text",
        ),
        (
            MESSAGES,
            messages({"type": "document", "context": 5, "source": {"type": "text", "data": "ab"}}, text("a")),
            "messages[0].content[0].context: 5 is no text",
        ),
        (
            MESSAGES,
            messages({**SEARCH, "title": f"a{SEP}"}, text("a")),
            "messages[0].content[0]: the separator '<|chunk|>' stands inside of a passage",
        ),
    ],
)  # fmt: skip
def test_bad_marks_are_named(service, seen, route, body, message, stream):
    response = sent(service, seen, route, {**body, "stream": stream}, status=400)
    answer = response.json()
    assert (answer["error"] if route == MESSAGES else answer)["message"].startswith(message), response.text
    assert seen == []


@pytest.mark.parametrize("route", [CHAT, MESSAGES, COMPLETIONS, "/generate"])
@pytest.mark.parametrize("body", [[], [{}], "text", 3])
def test_a_body_that_is_no_object_is_a_400(service, route, body):
    reply = service.post(route, body)
    assert reply.status_code == 400, reply.text
    assert "object" in reply.text


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_null_beside_marks_is_not_given(service, seen, route):
    body = {**chat(("user", f"Read.\n{SEP}the rose\n{SEP}Who?")), "prompt": f"Read.\n{SEP}the rose\n{SEP}Who?"}
    sent(service, seen, route, {**body, "custom_params": {"chunk_cache": None}})
    assert chunks_of(service, seen[0]) == ["the rose"]
