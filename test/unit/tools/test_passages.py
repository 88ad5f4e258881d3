"""PassageWriter: what becomes of passages where the server knows chunks, and where it does not."""

from __future__ import annotations

import logging
from typing import Any

import httpx
import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache_tools import server_client
from chunk_cache_tools.passages import PassageWriter
from chunk_cache_tools.server_client import ServerGone

URL = "http://server"
PASSAGES = ["Paris is in France.", {"text": "Rome is in Italy.", "id": "it"}, " \n"]
WRITTEN = "Paris is in France.\n\nRome is in Italy.\n\n"
CHAT = {"messages": [{"role": "user", "content": "Where is Rome?"}]}
PAGE = "<html><title>Chunk cache</title></html>"


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server that answers each path so; the paths that were asked."""
    paths: list[str] = []
    replies = {"/chunk_cache": httpx.Response(404)}

    def answer(request: httpx.Request) -> httpx.Response:
        paths.append(request.url.path)
        return replies[request.url.path]

    client = httpx.Client

    def over(**kwargs: Any) -> httpx.Client:
        return client(transport=httpx.MockTransport(answer), **kwargs)

    monkeypatch.setattr(server_client.httpx, "Client", over)
    return paths, replies


def test_a_server_that_knows_chunks_gets_them_beside_the_messages(asked: Any) -> None:
    paths, replies = asked
    replies["/chunk_cache"] = httpx.Response(200, text=PAGE)
    writer = PassageWriter(URL, template="{text}\n")
    body = writer.put({**CHAT, "chunk_cache": {"mode": "exact"}}, PASSAGES)
    chunks = [{"text": "Paris is in France."}, PASSAGES[1]]
    assert body == {**CHAT, "chunk_cache": {"mode": "exact", "chunks": chunks, "template": "{text}\n"}}
    assert writer.arrived(body, httpx.Headers({"X-Chunk-Cache": "reused=0, recomputed=0"}))
    writer.put(CHAT, PASSAGES)
    assert paths == ["/chunk_cache"], "it is asked once"


@pytest.mark.parametrize("reply", [httpx.Response(404), httpx.Response(401), httpx.Response(200, text="a proxy")])
def test_another_server_gets_them_in_the_text_and_the_log_says_so(asked: Any, caplog: Any, reply: Any) -> None:
    _, replies = asked
    replies["/chunk_cache"] = reply
    writer = PassageWriter(URL)
    with caplog.at_level(logging.WARNING):
        body = writer.put({**CHAT, "chunk_cache": {"mode": "exact"}}, PASSAGES)
        writer.put(CHAT, PASSAGES)
    assert body == {"messages": [{"role": "user", "content": f"{WRITTEN}Where is Rome?"}]}
    assert writer.arrived(body, {})
    (told,) = caplog.messages
    assert told.startswith(f"{URL} does not know chunks")
    assert CHAT["messages"][0]["content"] == "Where is Rome?", "the caller's own stays"


def test_a_server_that_has_lost_the_plugin_meanwhile(asked: Any) -> None:
    writer = PassageWriter(URL, knows_chunks=True)
    body = writer.put(CHAT, PASSAGES)
    assert not writer.arrived(body, {"content-type": "application/json"})
    assert writer.put(CHAT, PASSAGES)["messages"][0]["content"].startswith(WRITTEN)
    assert asked[0] == []


def test_where_they_are_written(asked: Any) -> None:
    writer = PassageWriter(URL)
    parts = [{"type": "image_url"}, {"type": "text", "text": "Who?", "cache_control": {}}]
    found = writer.put({"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "x"}]}, ["a"])
    assert found["messages"][0]["content"] == [parts[0], {**parts[1], "text": "a\n\nWho?"}]
    found = writer.put({"messages": [{"role": "user", "content": parts[:1]}]}, ["a"])
    assert found["messages"][0]["content"] == [{"type": "text", "text": "a\n\n"}, parts[0]]
    assert writer.put({"prompt": "Who?"}, ["a"]) == {"prompt": "a\n\nWho?"}
    assert writer.put(CHAT, [" "]) == CHAT
    with pytest.raises(ChunkCacheRequestError, match=r"^messages: no message of the user"):
        writer.put({"messages": []}, ["a"])


def test_a_server_that_fails_is_not_taken_for_one_without_chunks(asked: Any) -> None:
    asked[1]["/chunk_cache"] = httpx.Response(503)
    with pytest.raises(ServerGone, match="503"):
        PassageWriter(URL).put(CHAT, PASSAGES)


def test_separators_are_taken_out_for_a_server_that_would_read_them(asked: Any) -> None:
    _, replies = asked
    parts = [{"type": "text", "text": "<|chunk|>a<|chunk|>b"}, {"type": "image_url", "image_url": "<|chunk|>"}]
    messages = [{"role": "system", "content": "s<|chunk|>"}, {"role": "user", "content": parts}]
    body = {"messages": messages, "prompt": ["x<|chunk|>y", "z"], "stop": "<|chunk|>", "chunk_cache": {"ratio": 0.5}}
    found = PassageWriter(URL).without_separators(body)
    assert found["messages"][0]["content"] == "s"
    assert found["messages"][1]["content"] == [{"type": "text", "text": "ab"}, parts[1]]
    assert (found["prompt"], found["stop"], "chunk_cache" in found) == (["xy", "z"], "<|chunk|>", False)
    assert body["messages"] is messages
    assert messages[0]["content"] == "s<|chunk|>", "the caller's own stays"
    assert PassageWriter(URL).without_separators({"text": "a#b"}, "#") == {"text": "ab"}
    replies["/chunk_cache"] = httpx.Response(200, text=PAGE)
    assert PassageWriter(URL).without_separators(body) == body
