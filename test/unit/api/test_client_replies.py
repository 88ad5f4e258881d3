"""Headers, usage and details of the replies that clients get."""

from __future__ import annotations

import dataclasses
import json

import pytest

from sglang_chunk_cache.flags import server_args as options
from unit.api.client_bodies import CHAT, CHUNKS, COMPLETIONS, MESSAGES, SEARCH, SEP, chat, messages, sent, text

COUNTS = {"chunk_reused_tokens": 5, "chunk_recomputed_tokens": 2}


def test_headers_usage_and_ids_of_a_chat(service, seen):
    response = sent(service, seen, CHAT, chat(("user", "Who?"), chunk_cache={"chunks": CHUNKS[:1]}))
    assert response.headers["x-chunk-cache"] == "reused=5, recomputed=2"
    assert response.json()["usage"]["prompt_tokens_details"] == COUNTS


def test_choices_are_added_up(service, seen):
    response = sent(service, seen, CHAT, chat(("user", "Who?"), chunk_cache={"chunks": CHUNKS[:1]}, n=3))
    assert response.headers["x-chunk-cache"] == "reused=15, recomputed=6"
    assert response.json()["usage"]["prompt_tokens_details"]["chunk_reused_tokens"] == 5
    body = {"model": "m", "prompt": [f"{SEP}a{SEP}", "plain", f"{SEP}b{SEP}"], "max_tokens": 3}
    response = sent(service, seen, COMPLETIONS, body)
    assert response.headers["x-chunk-cache"] == "reused=10, recomputed=4"
    assert response.json()["usage"]["prompt_tokens_details"]["chunk_reused_tokens"] == 10
    body = {"text": [f"{SEP}a{SEP}", "plain"], "sampling_params": {"max_new_tokens": 3}}
    assert sent(service, seen, "/generate", body).headers["x-chunk-cache"] == "reused=5, recomputed=2"


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat(("user", f"{SEP}a{SEP}b"))),
        (COMPLETIONS, {"model": "m", "prompt": f"{SEP}a{SEP}b", "max_tokens": 3}),
        ("/generate", {"text": f"{SEP}a{SEP}b", "sampling_params": {"max_new_tokens": 3}}),
        (MESSAGES, messages(SEARCH, text("Who?"))),
    ],
)
def test_streams_have_the_header_too(service, seen, route, body):
    response = sent(service, seen, route, {**body, "stream": True})
    assert response.headers["x-chunk-cache"] == "reused=5, recomputed=2"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat(("user", "a"))),
        (COMPLETIONS, {"model": "m", "prompt": "a", "max_tokens": 3}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3}}),
        (MESSAGES, messages(text("a"))),
    ],
)
def test_what_was_discovered_has_the_header_too(service, seen, monkeypatch, route, body, stream):
    monkeypatch.setattr(service.scheduler, "discovers", True)
    options.attach(service.manager.server_args, dataclasses.replace(options._current, discover=True))
    try:
        response = sent(service, seen, route, {**body, "stream": stream})
    finally:
        options.attach(service.manager.server_args, options._current)
    assert response.headers["x-chunk-cache"] == "reused=5, recomputed=2"


@pytest.mark.parametrize("cached", [{}, {"cached_tokens": 1}])
def test_cached_tokens_are_those_of_stock(service, seen, cached):
    from sglang.srt.runtime_context import get_serving

    with get_serving().override(enable_cache_report=bool(cached)):
        for route, body in (
            (CHAT, chat(("user", f"{SEP}a{SEP}b"))),
            (COMPLETIONS, {"model": "m", "prompt": f"{SEP}a{SEP}b", "max_tokens": 3}),
        ):
            assert sent(service, seen, route, body).json()["usage"]["prompt_tokens_details"] == {**cached, **COUNTS}
            events = service.events(route, {**body, "stream_options": {"include_usage": True}})
            (usage,) = [event["usage"] for event in events if event.get("usage")]
            assert usage["prompt_tokens_details"] == {**cached, **COUNTS}
        body = messages(SEARCH, text("Who?"))
        message = sent(service, seen, MESSAGES, body).json()
        start = sent(service, seen, MESSAGES, {**body, "stream": True}).text.partition("data: ")[2].partition("\n")[0]
        for usage in (message["usage"], json.loads(start)["message"]["usage"]):
            assert usage.get("cache_read_input_tokens", 0) == len(cached)
            assert usage["input_tokens"] == len(seen[0].input_ids) - len(cached)
            assert usage.items() >= COUNTS.items()


def test_the_reply_of_anthropic(service, seen):
    body = messages(SEARCH, text("Who?"))
    message = sent(service, seen, MESSAGES, body).json()
    assert message["sglext"]["chunk_cache"]["reused_tokens"] == 5
    usage = message["usage"]
    assert (usage["chunk_reused_tokens"], usage["chunk_recomputed_tokens"]) == (5, 2)
    assert "cache_read_input_tokens" not in usage
    assert usage["input_tokens"] == len(seen[0].input_ids)
    events = sent(service, seen, MESSAGES, {**body, "stream": True}).text
    assert events.count('"sglext"') == 1
    assert '"chunk_reused_tokens": 5' in events.partition("event: content_block_start")[0]


def test_plain_requests_get_nothing(service, seen):
    for route, body in (
        (CHAT, chat(("user", "a"))),
        (MESSAGES, messages(text("a"))),
        (COMPLETIONS, {"model": "m", "prompt": "a", "max_tokens": 3}),
        ("/generate", {"text": "a", "sampling_params": {"max_new_tokens": 3}}),
    ):
        response = sent(service, seen, route, body)
        assert not [name for name in response.headers if name.startswith("x-chunk-cache")]
        assert "chunk_" not in response.text
