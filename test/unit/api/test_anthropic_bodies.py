"""Bodies of /v1/messages: what is a chunk in them, and what is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chunk_cache.options.request_options import loads
from sglang_chunk_cache.flags import server_args as options
from unit.api.client_bodies import (
    ANTHROPIC_BODIES,
    CHUNKS,
    CONTROL,
    DOCUMENT,
    MESSAGES,
    SEARCH,
    SEP,
    messages,
    sent,
    text,
)
from unit.api.seen_requests import carried, chunks_of, text_of

UNUSED = "x-chunk-cache-unused"


def test_search_results_and_documents_are_chunks(service, seen, monkeypatch):
    body = messages(SEARCH, DOCUMENT, text("Who?"))
    response = sent(service, seen, MESSAGES, body)
    assert chunks_of(service, seen[0]) == [
        "Roses\nSource: http://a\nContent: the rose\nis red",
        "Tales\nContent: the tale",
    ]
    assert UNUSED not in response.headers
    found = text_of(service, seen[0])
    monkeypatch.setattr(options, "_current", None)  # as stock SGLang has it
    as_result = {"type": "search_result", "title": "Tales", "content": [text("the tale")]}
    sent(service, seen, MESSAGES, messages(SEARCH, as_result, text("Who?")))
    assert text_of(service, seen[0]) == found


def test_texts_of_a_search_result_need_no_type(service, seen):
    """As they come through SGLang's gateway."""
    untyped = {**SEARCH, "content": [{"text": part["text"]} for part in SEARCH["content"]]}
    response = sent(service, seen, MESSAGES, messages(untyped, text("Who?")))
    assert chunks_of(service, seen[0]) == ["Roses\nSource: http://a\nContent: the rose\nis red"]
    assert UNUSED not in response.headers


def test_documents_of_content_with_a_context(service, seen):
    source = {"type": "content", "content": [text("the rose"), text("the tale")]}
    sent(service, seen, MESSAGES, messages({"type": "document", "source": source, "context": "Read."}, text("Who?")))
    assert chunks_of(service, seen[0]) == ["Read.\nthe rose\nthe tale"]
    source = {"type": "content", "content": "the rose"}
    sent(service, seen, MESSAGES, messages({"type": "document", "source": source}, text("Who?")))
    assert chunks_of(service, seen[0]) == ["the rose"]


def test_results_of_tools(service, seen, use):
    use(marks=True)
    use_block = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
    results = [
        {"type": "tool_result", "tool_use_id": "t", "content": [SEARCH, text("more", **CONTROL)]},
        {"type": "tool_result", "tool_use_id": "t", "content": "plain", **CONTROL},
        text("Who?"),
    ]
    body = messages(text("Look."))
    body["messages"] += [{"role": "assistant", "content": [use_block]}, {"role": "user", "content": results}]
    sent(service, seen, MESSAGES, body)
    assert chunks_of(service, seen[0]) == ["Roses\nSource: http://a\nContent: the rose\nis red", "more", "plain"]


def test_cache_control_of_anthropic(service, seen, use):
    body = messages(
        text(" the rose\n", **CONTROL),
        text("Who?", **CONTROL),
        system=[text("Be brief."), text("the rule\n", **CONTROL)],
    )
    off = sent(service, seen, MESSAGES, body)
    stock = text_of(service, seen[0])
    assert "system[1].cache_control (off: --chunk-cache-marks)" in off.headers[UNUSED]
    assert "sglext" not in off.json()
    use(marks=True)
    response = sent(service, seen, MESSAGES, body)
    assert chunks_of(service, seen[0]) == ["the rule", "the rose"]
    assert text_of(service, seen[0]) == stock
    assert response.headers[UNUSED] == "messages[0].content[1].cache_control (the last part of the prompt)"


def test_options_of_anthropic(service, seen):
    asked = {"chunks": CHUNKS[:1], "method": "random"}
    sent(service, seen, MESSAGES, messages(text("Who?"), chunk_cache=asked))
    assert chunks_of(service, seen[0]) == ["the rose"]
    assert loads(carried(seen[0])).method == "random"


@pytest.mark.parametrize("has_limit", [False, True])
@pytest.mark.parametrize("name", ANTHROPIC_BODIES)
def test_counted_tokens_are_those_of_the_message(service, seen, name, has_limit):
    body = ANTHROPIC_BODIES[name]
    sent(service, seen, MESSAGES, body)
    expected = len(seen[0].input_ids)
    body = body if has_limit else {key: value for key, value in body.items() if key != "max_tokens"}
    assert sent(service, seen, f"{MESSAGES}/count_tokens", body).json() == {"input_tokens": expected}
    assert seen == []


IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


@pytest.mark.parametrize("on_gpu", [False, True])
def test_images_are_counted_as_the_model_reads_them(service, seen, monkeypatch, template, on_gpu):
    template("{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}", "openai")

    async def read(**_: Any) -> Any:
        return SimpleNamespace(input_ids=[5] * 44, token_type_ids=None, mm_items=[])

    processor = SimpleNamespace(prefer_tokenized_input=False, use_cuda_ipc=on_gpu, process_mm_data_async=read)
    monkeypatch.setattr(service.manager, "mm_processor", processor)
    monkeypatch.setattr(service.manager.model_config, "is_multimodal", True)
    counted = sent(service, seen, f"{MESSAGES}/count_tokens", messages(IMAGE, text("Who?"))).json()["input_tokens"]
    assert (counted == 44) is not on_gpu
    assert seen == []
    assert service.manager.rid_to_state == {}


def test_what_a_message_refuses_is_not_counted(service, seen):
    response = sent(service, seen, f"{MESSAGES}/count_tokens", messages(text(f"a{SEP}b")), status=400)
    assert "only one separator" in response.json()["error"]["message"]


def test_a_message_that_does_not_fit_is_counted(service, seen):
    long = f"{SEP}{'word ' * 20000}{SEP}"
    sent(service, seen, MESSAGES, messages(text(f"Read {long} Who?")), status=400)
    response = sent(service, seen, f"{MESSAGES}/count_tokens", messages(text(f"Read {long} Who?")))
    assert response.json()["input_tokens"] >= 20000
