"""Marks, options and replies on /generate, /v1/completions and /v1/chat/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chunk_cache.options.request_options import loads
from unit.api.client_bodies import chat
from unit.api.seen_requests import carried, chunks_of

SEP = "<|chunk|>"
REPLY = {"prefix_tokens": 1, "reused_tokens": 5, "computed_tokens": 3, "recomputed_tokens": 2, "chunks": []}


def marked(text: str, *chunks: str, question: str = "Who?") -> str:
    return text + SEP + SEP.join(chunks) + SEP + question


def params(options: Any, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 3, "custom_params": {"chunk_cache": options}, **more}


def test_plain_requests_carry_nothing(service, seen):
    assert service.post("/generate", {"text": "hello", "sampling_params": {"max_new_tokens": 3}}).status_code == 200
    own = {"max_new_tokens": 3, "custom_params": {"mine": 1}}
    assert service.post("/generate", {"text": "hello", "sampling_params": own}).status_code == 200
    assert [request.sampling_params.custom_params for request in seen] == [None, {"mine": 1}]
    assert list(seen[0].input_ids) == service.manager.tokenizer.encode("hello")


def test_spans_travel_as_one_json_string(service, seen):
    body = {"input_ids": [5, 6, 7, 8], "sampling_params": params({"spans": [[1, 3]], "ratio": 0.5, "method": "epic"})}
    body["sampling_params"]["custom_params"]["mine"] = 1
    response = service.post("/generate", body)
    assert response.status_code == 200
    assert response.json()["meta_info"]["chunk_cache"] == REPLY
    (request,) = seen
    assert isinstance(carried(request), str)
    assert loads(carried(request)).spans == ((1, 3),)
    assert loads(carried(request)).ratio == 0.5
    assert request.sampling_params.custom_params["mine"] == 1


@pytest.mark.parametrize("mode", [None, "auto", "exact", "off"])
def test_text_marks_on_generate_in_every_mode(service, seen, mode):
    body: dict[str, Any] = {"text": marked("Read. ", "the rose ", "the tale ")}
    body["sampling_params"] = params({"mode": mode}) if mode else {"max_new_tokens": 0}
    response = service.post("/generate", body)
    assert response.status_code == 200
    assert response.json()["meta_info"]["chunk_cache"] == REPLY
    (request,) = seen
    tokenizer = service.manager.tokenizer
    ids = list(request.input_ids)
    assert tokenizer.decode(ids[1:]) == "Read. the rose the tale Who?"
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert chunks_of(service, request) == ["the rose", "the tale"]
    assert loads(carried(request)).mode == (mode or "auto")
    assert response.json()["meta_info"]["prompt_tokens"] == len(ids)


def test_batch_with_and_without_marks(service, seen):
    plain = "In the end"
    texts = [marked("s ", "aa"), plain]
    response = service.post("/generate", {"text": texts, "sampling_params": {"max_new_tokens": 3}})
    assert response.status_code == 200
    by_marks = sorted(seen, key=lambda request: carried(request) is None)
    assert chunks_of(service, by_marks[0]) == ["aa"]
    assert carried(by_marks[1]) is None
    assert list(by_marks[1].input_ids) == service.manager.tokenizer.encode(plain)
    assert [("chunk_cache" in out["meta_info"]) for out in response.json()] == [True, False]


def test_several_samples_carry_the_same_marks(service, seen):
    body = {"text": marked("s", "aa", "bb"), "sampling_params": {"max_new_tokens": 3, "n": 2}}
    response = service.post("/generate", body)
    assert response.status_code == 200
    assert len(response.json()) == 2
    assert all(out["meta_info"]["chunk_cache"] == REPLY for out in response.json())
    assert {carried(request) for request in seen} == {carried(seen[0])}


def test_every_output_of_a_stream_has_the_reply(service, seen):
    events = service.events("/generate", {"text": marked("s", "aa"), "sampling_params": {"max_new_tokens": 3}})
    assert events[-1]["meta_info"]["finish_reason"] is not None
    assert all(event["meta_info"]["chunk_cache"] == REPLY for event in events)


def test_spans_on_text_prompts(service, seen):
    response = service.post("/generate", {"text": "In the end", "sampling_params": params({"spans": [[1, 3]]})})
    assert response.status_code == 200
    assert list(seen[0].input_ids) == service.manager.tokenizer.encode("In the end")
    assert loads(carried(seen[0])).spans == ((1, 3),)


def test_the_callers_objects_stay_as_they_are(service, seen):
    from sglang.srt.managers.io_struct import GenerateReqInput

    sampling_params = params({"mode": "exact"})
    before = json.dumps(sampling_params)

    async def call() -> Any:
        obj = GenerateReqInput(text=marked("s", "aa"), sampling_params=sampling_params)
        return await service.manager.generate_request(obj, None).__anext__()

    assert service.run(call())["meta_info"]["chunk_cache"] == REPLY
    assert json.dumps(sampling_params) == before


def test_completion(service, seen):
    prompt = marked("Read. ", "the rose ")
    body = {"model": "m", "prompt": prompt, "max_tokens": 3, "echo": True}
    response = service.post("/v1/completions", body).json()
    assert response["choices"][0]["text"].startswith("Read. the rose Who?")
    assert SEP not in response["choices"][0]["text"]
    assert response["sglext"] == {"chunk_cache": REPLY}
    assert response["usage"]["prompt_tokens"] == len(seen[0].input_ids)
    assert chunks_of(service, seen[0]) == ["the rose"]


def test_completion_with_several_prompts_gets_a_list(service, seen):
    body = {"model": "m", "prompt": [marked("s", "aa"), marked("s", "bb")], "max_tokens": 3}
    assert service.post("/v1/completions", body).json()["sglext"] == {"chunk_cache": [REPLY, REPLY]}


def test_completion_stream_ends_with_the_reply(service, seen):
    events = service.events("/v1/completions", {"model": "m", "prompt": marked("s", "aa"), "max_tokens": 3})
    assert events[-1]["sglext"] == {"chunk_cache": REPLY}
    assert events[-1]["choices"] == []
    assert events[-1]["id"] == events[0]["id"]
    assert all("sglext" not in event for event in events[:-1])


def test_plain_openai_replies_have_no_sglext(service, seen):
    assert "sglext" not in service.post("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 3}).json()
    events = service.events("/v1/completions", {"model": "m", "prompt": "a", "max_tokens": 3})
    assert all("sglext" not in event for event in events)


def test_chat(service, seen):
    body = chat(("system", "Be brief."), ("user", marked("Read. ", "the rose ", "the tale ")))
    response = service.post("/v1/chat/completions", body).json()
    assert response["sglext"] == {"chunk_cache": REPLY}
    (request,) = seen
    tokenizer = service.manager.tokenizer
    ids = list(request.input_ids)
    expected = "<|bos|><|system|>Be brief.<|user|>Read. the rose the tale Who?<|assistant|>"
    assert tokenizer.decode(ids) == expected
    assert ids.count(tokenizer.bos_token_id) == 1
    assert chunks_of(service, request) == ["the rose", "the tale"]
    assert response["usage"]["prompt_tokens"] == len(ids)


def test_chat_chunks_have_the_ids_of_generate(service, seen):
    service.post("/v1/chat/completions", chat(("user", marked("x", "the rose"))))
    service.post("/generate", {"text": marked("y", "other", "the rose"), "sampling_params": {"max_new_tokens": 3}})
    ids = [list(request.input_ids)[slice(*loads(carried(request)).spans[-1])] for request in seen]
    assert ids[0] == ids[1]


def test_chat_turns_mark_their_own_chunks(service, seen):
    body = chat(
        ("user", marked("Read. ", "aa", "bb", question="One?")),
        ("assistant", "Yes."),
        ("user", [{"type": "text", "text": marked("", "cc", question="Two?")}]),
    )
    assert service.post("/v1/chat/completions", body).status_code == 200
    assert chunks_of(service, seen[0]) == ["aa", "bb", "cc"]


def test_chat_stream_ends_with_the_reply(service, seen):
    events = service.events(
        "/v1/chat/completions", chat(("user", marked("s", "aa")), stream_options={"include_usage": True})
    )
    assert events[-1]["sglext"] == {"chunk_cache": REPLY}
    assert events[-1]["object"] == "chat.completion.chunk"


def test_chat_samples_get_a_list(service, seen):
    body = chat(("user", marked("s", "aa")), n=2)
    assert service.post("/v1/chat/completions", body).json()["sglext"] == {"chunk_cache": [REPLY, REPLY]}


def test_chat_with_spans_and_token_ids(service, seen):
    body = chat(("user", "unused"), input_ids=[5, 6, 7], custom_params={"chunk_cache": {"spans": [[0, 2]]}})
    assert service.post("/v1/chat/completions", body).status_code == 200
    assert list(seen[0].input_ids) == [5, 6, 7]
    assert loads(carried(seen[0])).spans == ((0, 2),)


def test_chat_template_that_changes_chunks_is_refused(service, seen):
    template = "{{ bos_token }}{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    body = chat(("user", marked("s", "aa")))
    tokenizer = service.manager.tokenizer
    before = tokenizer.chat_template
    tokenizer.chat_template = template.replace("bos_token", "'x'")
    try:
        response = service.post("/v1/chat/completions", body)
    finally:
        tokenizer.chat_template = before
    assert response.status_code == 400
    assert "messages[0].content: " in response.text
    assert seen == []


def test_chat_template_that_strips_contents(service, seen, monkeypatch):
    template = "{% for m in messages %}[{{ m['content'] | trim }}]{% endfor %}"
    monkeypatch.setattr(service.manager.tokenizer, "chat_template", template)
    text = f"{SEP}\n The rose.\n{SEP}The tale.\n\n{SEP}"
    for content in (text, text.replace(SEP, "")):
        assert service.post("/v1/chat/completions", chat(("user", content))).status_code == 200
    assert list(seen[0].input_ids) == list(seen[1].input_ids)
    assert chunks_of(service, seen[0]) == ["The rose", "The tale"]


def test_chat_final_message_that_is_continued(service, seen):
    body = chat(("user", "a"), ("assistant", marked("s", "aa")), continue_final_message=True)
    response = service.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "messages[1].content: " in response.text
    plain = chat(("user", marked("s ", "aa")), ("assistant", "So"), continue_final_message=True)
    assert service.post("/v1/chat/completions", plain).status_code == 200
    assert service.manager.tokenizer.decode(list(seen[0].input_ids)).endswith("Who?<|assistant|>So")
    assert chunks_of(service, seen[0]) == ["aa"]
