"""Warming for chats: the ids in front of what is warmed are those in front of the first chunk of a real chat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chunk_cache.options.admin_bodies import parse_warm
from chunk_cache.options.request_options import loads
from sglang_chunk_cache.admin import offline
from sglang_chunk_cache.admin.warming import Warming
from unit.api.client_bodies import CHAT, MESSAGES, SEP, chat, messages, sent, text

SYSTEM = {"role": "system", "content": "Answer from the passages.\n"}
PASSAGES = f"{SEP}Paris is in France.\n{SEP}Rome is in Italy.\n{SEP}Which?"


def in_front(request: Any) -> tuple[int, ...]:
    """The ids in front of the first chunk of a request."""
    start, _ = loads(request.sampling_params.custom_params["chunk_cache"]).spans[0]
    return tuple(request.input_ids[:start])


def warmed(service, *front: Any) -> tuple[int, ...]:
    """The ids in front of what is warmed with these messages."""
    body = parse_warm({"texts": ["Rome is in Italy.\n"], "messages": list(front)})
    serving = service.app.state.openai_serving_chat
    return Warming(service.manager.chunk_cache_admin, body, None, serving)._prefix


@pytest.mark.parametrize("front", ["", "\n", "Passages:\n\n", "Read: ", "Read:"], ids=repr)
def test_the_front_of_a_chat(service, seen, front):
    user = [{"role": "user", "content": front}] if front else []
    sent(service, seen, CHAT, chat(SYSTEM, ("user", front + PASSAGES)))
    assert warmed(service, SYSTEM, *user) == in_front(seen[0])
    sent(service, seen, CHAT, chat(("user", front + PASSAGES)))
    assert warmed(service, *user) == in_front(seen[0]), "without a system prompt"
    assert warmed(service, *user) != warmed(service, SYSTEM, *user)


PARTS = (text("\nParis is in France."), text("\nRome is in Italy."), text("\nWhich?"))


@pytest.mark.parametrize(
    ("route", "body", "front"),
    [
        (CHAT, chat(SYSTEM, ("user", "Which?"), chunk_cache={"chunks": [{"text": "Paris is in France.\n"}]}), ""),
        (CHAT, chat(SYSTEM, ("user", list(PARTS)), chunk_cache={"parts": True}), "\n"),
        (MESSAGES, messages(*PARTS, system=SYSTEM["content"], chunk_cache={"parts": True}), "\n"),
        (MESSAGES, messages(text(PASSAGES), system=SYSTEM["content"]), ""),
    ],
    ids=["chunks", "parts", "parts of Anthropic's", "separators of Anthropic's"],
)
def test_the_front_however_chunks_are_marked(service, seen, route, body, front):
    sent(service, seen, route, body)
    assert warmed(service, SYSTEM, {"role": "user", "content": front}) == in_front(seen[0])


def test_passages_of_a_later_turn(service, seen):
    turns = [SYSTEM, {"role": "user", "content": "Hi."}, {"role": "assistant", "content": "Hello."}]
    sent(service, seen, CHAT, chat(*turns, ("user", PASSAGES)))
    assert warmed(service, *turns) == in_front(seen[0])


def test_an_engine_renders_them_too(service, monkeypatch):
    fronts = []

    async def warm(admin: Any, body: Any, chat: Any = None) -> Any:
        fronts.append(Warming(admin, body, None, chat)._prefix)
        return summary()

    async def summary() -> Any:
        yield {}

    monkeypatch.setattr(offline, "warm", warm)
    loop = SimpleNamespace(run_until_complete=service.run)
    templates = service.app.state.openai_serving_chat.template_manager
    engine = SimpleNamespace(tokenizer_manager=service.manager, template_manager=templates, loop=loop)
    offline.EngineAdmin(engine).warm(texts=["a"], messages=[SYSTEM])
    assert fronts == [warmed(service, SYSTEM)]


def refused(service, **fields: Any) -> str:
    response = service.post("/chunk_cache/warm", {"texts": ["a"], **fields})
    assert response.status_code == 400
    return response.json()["error"]["message"]


def test_what_is_no_front_is_named(service, seen, monkeypatch):
    message = refused(service, messages=[SYSTEM, {"role": "user", "content": SEP}])
    assert message.startswith("messages[1].content: has a separator")
    template = "{{ raise_exception('no system role') }}"
    monkeypatch.setattr(service.manager.tokenizer, "chat_template", template)
    assert refused(service, messages=[SYSTEM]).startswith("messages: the chat template refuses them (no system role); ")
    monkeypatch.setattr(service.manager.tokenizer, "chat_template", "{{ messages[0].content }}")
    assert "the chat template of this model" in refused(service, messages=[SYSTEM]), "it drops the passages"
    assert seen == []
