"""/v1/completions and /v1/chat/completions on a real server, and the counters at /metrics."""

from __future__ import annotations

import re
from typing import Any

import pytest

from chunk_cache.options.config import KERNELS
from chunk_cache.types import REASONS, Status
from server.contract import (
    FULL,
    SEP,
    TOLERANCE,
    check_reply,
    completed,
    encode,
    events,
    generated,
    marked,
    prime,
    reasons,
    statuses,
    values,
)
from server_fixture import Server

pytestmark = pytest.mark.server


def complete(server: Server, prompt: Any, options: Any = None, **body: Any) -> Any:
    request = {"model": "default", "prompt": prompt, "max_tokens": 6, "temperature": 0, **body}
    if options is not None:
        request["custom_params"] = {"chunk_cache": options}
    return server.post("/v1/completions", request).json()


# Completions.


def test_completion_equals_stock(server, stock, tokenizer, passages):
    chunks = passages.several(3)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Completion. ")
    response = complete(server, prompt.text, FULL, logprobs=3)
    reply = completed(response, prompt.spans(tokenizer))
    assert statuses(reply) == ["hit"] * 3
    expected = stock.generate(prompt.ids(tokenizer), max_new_tokens=6, sampling={"ignore_eos": False}, logprobs=True)
    (choice,) = response["choices"]
    assert choice["text"] == expected["text"]
    logprobs = values(expected["meta_info"]["output_token_logprobs"])
    assert choice["logprobs"]["token_logprobs"] == pytest.approx(logprobs, abs=TOLERANCE)


def test_case_20_the_echo_has_no_separators(server, passages):
    prompt = marked(passages.several(2))
    for body in ({}, {"logprobs": 1}, {"stream": True}):
        if "stream" in body:
            request = {"model": "default", "prompt": prompt.text, "echo": True, "max_tokens": 3, "temperature": 0}
            text = "".join(c["text"] for e in events(server, "/v1/completions", request) for c in e["choices"])
        else:
            text = complete(server, prompt.text, echo=True, **body)["choices"][0]["text"]
        assert text.startswith(prompt.plain)
        assert SEP not in text


def test_completion_of_a_list_gets_a_list(server, tokenizer, passages):
    a, b = passages.several(2)
    prime(server, [a])
    prompts = [marked([a], head="L1 "), marked([b], head="L2 ")]
    response = complete(server, [prompts[0].text, "plain", prompts[1].text])
    replies = response["sglext"]["chunk_cache"]
    assert len(response["choices"]) == len(replies) == 3
    assert [reply and statuses(reply) for reply in replies] == [["hit"], None, ["miss"]]
    for prompt, reply in ((prompts[0], replies[0]), (prompts[1], replies[2])):
        check_reply(reply, len(prompt.ids(tokenizer)), prompt.spans(tokenizer))


def test_completion_stream_of_a_list_ends_with_a_list(server, passages):
    a, b = passages.several(2)
    prime(server, [b])
    for prompts, expected in (
        ([marked([a]).text, "plain", marked([b], head="S ").text], [["miss"], None, ["hit"]]),
        (["plain", marked([b], head="T ").text], [None, ["hit"]]),
    ):
        *_, last = events(server, "/v1/completions", {"model": "default", "prompt": prompts, "max_tokens": 3})
        assert [reply and statuses(reply) for reply in last["sglext"]["chunk_cache"]] == expected


def test_completion_with_several_samples(server, tokenizer, passages):
    prompt = marked(passages.several(2))
    response = complete(server, prompt.text, n=2)
    assert [choice["index"] for choice in response["choices"]] == [0, 1]
    assert response["choices"][0]["text"] == response["choices"][1]["text"]
    replies = response["sglext"]["chunk_cache"]
    assert len(replies) == 2
    for reply in replies:
        check_reply(reply, len(prompt.ids(tokenizer)), prompt.spans(tokenizer))


@pytest.mark.parametrize("usage", [False, True])
def test_completion_stream_ends_with_the_reply(server, tokenizer, passages, usage):
    chunk = passages()
    prime(server, [chunk])
    prompt = marked([chunk], head="Stream. ")
    request = {"model": "default", "prompt": prompt.text, "max_tokens": 4, "stream_options": {"include_usage": usage}}
    *others, last = events(server, "/v1/completions", request)
    assert last["choices"] == []
    reply = check_reply(last["sglext"]["chunk_cache"], len(prompt.ids(tokenizer)), prompt.spans(tokenizer))
    assert statuses(reply) == ["hit"]
    assert all("sglext" not in event for event in others)
    assert any(event.get("usage") for event in others) == usage


def test_completion_of_token_ids_with_spans(server, tokenizer, passages):
    prompt = marked(passages.several(2))
    ids, spans = prompt.ids(tokenizer), prompt.spans(tokenizer)
    assert statuses(completed(complete(server, ids, {"spans": spans}), spans)) == ["miss", "miss"]
    replies = complete(server, [ids, ids[:-1]], {"spans": spans, "mode": "off"})["sglext"]["chunk_cache"]
    for reply, num_tokens in zip(replies, (len(ids), len(ids) - 1), strict=True):
        check_reply(reply, num_tokens, spans)


def test_plain_openai_replies_have_no_object(server, passages):
    assert "sglext" not in complete(server, passages())
    assert "sglext" not in server.chat(passages())


# Chats.


def chat_ids(tokenizer: Any, *pieces: str) -> list[int]:
    """What the template of the test models renders, every piece tokenized alone."""
    return [i for piece in pieces for i in encode(tokenizer, piece)]


def test_case_13_chat_over_http_equals_stock(server, stock, tokenizer, passages):
    a, b, c = passages.several(3)
    prime(server, [a, c])
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": marked([c, b, a], head="Look:").text},
    ]
    response = server.chat(messages, custom_params={"chunk_cache": FULL}, logprobs=True, top_logprobs=3)
    reply = completed(response)
    assert statuses(reply) == ["hit", "miss", "hit"]
    ids = chat_ids(tokenizer, "<|bos|><|system|>Be brief.<|user|>Look:\n", c, b, a, "Who is it?<|assistant|>")
    assert response["usage"]["prompt_tokens"] == len(ids)
    check_equals_stock(response, stock, ids)


@pytest.mark.parametrize(
    ("asked", "mark"),
    [
        ({"marks": True}, {"prompt_cache_breakpoint": {"mode": "explicit"}}),
        ({"marks": True}, {"cache_control": {"type": "ephemeral"}}),
        ({"parts": True}, {}),
    ],
)
def test_marks_of_clients_equal_stock(server, stock, passages, asked, mark):
    a, b, c = passages.several(3)
    prime(server, [a.strip(), c.strip()])
    # The parts are joined with spaces, behind which a passage would be another chunk.
    parts = [{"type": "text", "text": f"\n{text}", **mark} for text in (c, b, a)]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [*parts, {"type": "text", "text": "Who is it?"}]},
    ]
    response = server.chat(messages, chunk_cache={**asked, **FULL}, logprobs=True, return_input_ids_in_sglext=True)
    assert statuses(completed(response)) == ["hit", "miss", "hit"]
    ids = response["sglext"]["input_ids"]
    plain = stock.chat(messages, return_input_ids_in_sglext=True)
    assert ids == plain["sglext"]["input_ids"]
    check_equals_stock(response, stock, ids)


def check_equals_stock(response: Any, stock: Server, ids: list[int]) -> None:
    """A chat with log-probabilities has the text and the numbers of stock SGLang."""
    expected = stock.generate(ids, sampling={"ignore_eos": False}, logprobs=True)
    (choice,) = response["choices"]
    assert choice["message"]["content"] == expected["text"]
    mine = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert mine == pytest.approx(values(expected["meta_info"]["output_token_logprobs"]), abs=TOLERANCE)


def test_search_results_equal_stock(server, stock, passages):
    texts = passages.several(3)
    for order in (texts, texts[::-1]):
        parts = [{"type": "text", "text": text} for text in order]
        blocks = [{"type": "search_result", "source": "notes", "title": "A", "content": [part]} for part in parts]
        content = [*blocks, {"type": "text", "text": "Who is it?"}]
        messages = [{"role": "user", "content": content}]
        body = {"model": "default", "max_tokens": 8, "temperature": 0, "messages": messages}
        found = server.post("/v1/messages", {**body, "chunk_cache": FULL}).json()
        expected = stock.post("/v1/messages", body).json()
        assert found["content"] == expected["content"]
    assert found["usage"]["chunk_reused_tokens"] > 0
    assert found["usage"]["input_tokens"] == expected["usage"]["input_tokens"]


def test_a_conversation_keeps_the_chunks_of_every_turn(server, passages):
    a, b, c = passages.several(3)
    turns = [{"role": "user", "content": marked([a, b], head="").text}]
    assert statuses(completed(server.chat(turns))) == ["miss", "miss"]
    turns += [{"role": "assistant", "content": "It is the rose."}, {"role": "user", "content": marked([c]).text}]
    assert statuses(completed(server.chat(turns))) == ["prefix", "prefix", "miss"]
    moved = [{"role": "system", "content": marked([c], question="").text}, *turns]
    assert statuses(completed(server.chat(moved))) == ["hit"] * 4


def test_chat_parts_and_unmarked_parts(server, passages):
    a, b = passages.several(2)
    content = [{"type": "text", "text": marked([a]).text}, {"type": "text", "text": marked([b]).text}]
    assert statuses(completed(server.chat([{"role": "user", "content": content}]))) == ["miss", "miss"]
    message = {"role": "user", "content": marked([b, a]).text}
    assert statuses(completed(server.chat([message]))) == ["hit", "hit"]


@pytest.mark.parametrize("n", [1, 2])
def test_chat_stream_ends_with_the_reply(server, passages, n):
    chunk = passages()
    prime(server, [chunk])
    request = {
        "model": "default",
        "messages": [{"role": "user", "content": marked([chunk]).text}],
        "max_tokens": 4,
        "n": n,
        "stream_options": {"include_usage": True},
    }
    *others, last = events(server, "/v1/chat/completions", request)
    assert last["choices"] == []
    found = last["sglext"]["chunk_cache"]
    (usage,) = [event["usage"] for event in others if event.get("usage")]
    for reply in found if n > 1 else [found]:
        check_reply(reply, usage["prompt_tokens"] if n == 1 else sum_of(reply))
    assert n == 1 or len(found) == n
    assert SEP not in str(others)


def sum_of(reply: Any) -> int:
    return sum(reply[f"{kind}_tokens"] for kind in ("prefix", "reused", "computed"))


def test_chat_with_several_samples_and_with_tools(server, passages):
    chunk = passages()
    message = {"role": "user", "content": marked([chunk]).text}
    replies = server.chat([message], n=2)["sglext"]["chunk_cache"]
    assert [statuses(reply) for reply in replies] in ([["miss"], ["prefix"]], [["prefix"]] * 2, [["miss"]] * 2)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    response = server.chat([{"role": "user", "content": marked([chunk], head="Tool. ").text}], tools=[tool])
    assert statuses(completed(response)) == ["hit"]


def test_case_16_tenants_on_the_openai_routes(server, passages):
    chunk = passages()
    for number, tenant in enumerate(({"extra_key": "oa"}, {"cache_salt": "oa"}, {})):
        for status in ("miss", "hit"):
            prompt = marked([chunk], head=f"{number}{status} ").text
            assert statuses(completed(complete(server, prompt, **tenant))) == [status], tenant
        chat = server.chat([{"role": "user", "content": prompt}], **tenant)
        assert statuses(completed(chat)) == ["hit"], tenant


# Counters.

COUNTER = re.compile(r"^(sglang:chunk_cache_\w+?)\{([^}]*)\} (\S+)$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="([^"]*)"')
LABELS = ("status", "reason", "kind", "kernel")


def counters(server: Server) -> dict[tuple[str, ...], float]:
    """`(name, label values...) -> value`; no times."""
    found: dict[tuple[str, ...], float] = {}
    for name, labels, value in COUNTER.findall(server.get("/metrics").text):
        if not name.endswith("_created") and "_seconds" not in name:
            given = dict(LABEL.findall(labels))
            key = (name.removeprefix("sglang:chunk_cache_"), *(given[label] for label in LABELS if label in given))
            found[key] = found.get(key, 0) + float(value)
    return found


def cached_tokens(server: Server) -> float:
    """SGLang's own counter of prompt tokens that were found in the cache."""
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith("sglang:cached_tokens_total{"))


def change(before: dict[tuple[str, ...], float], after: dict[tuple[str, ...], float]) -> dict[tuple[str, ...], float]:
    return {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key, 0)}


def test_case_18_counters_move_as_the_replies_say(server, passages):
    a, b, c = passages.several(3)
    before, cached_before = counters(server), cached_tokens(server)
    replies = [
        generated(server.generate(marked([a, b]).text)),
        generated(server.generate(marked([b, c], head="Other. ").text)),
        generated(server.generate(marked([b, a], head="Off. ").text, chunk_cache={"mode": "off"})),
        generated(server.generate(marked([a, b], head="Exact. ").text, chunk_cache={"mode": "exact"})),
        generated(server.generate(marked([a]).text, return_logprob=True, logprob_start_len=0)),
    ]
    expected: dict[tuple[str, ...], float] = {}
    for reply in replies:
        for status, reason in zip(statuses(reply), reasons(reply), strict=True):
            add(expected, 1, "chunks_total", status, reason or "none")
        for kind in ("prefix", "reused", "computed", "recomputed"):
            add(expected, reply[f"{kind}_tokens"], "tokens_total", kind)
        if reply["fallback_reason"]:
            add(expected, 1, "fallbacks_total", reply["fallback_reason"])
        if reply["reused_tokens"]:
            add(expected, 1, "fused_batches_total", "torch")
    assert {key[1:] for key in expected if key[0] == "chunks_total"} == {
        ("miss", "not_stored"),
        ("hit", "none"),
        ("skipped", "off"),
        ("skipped", "exact_mode"),
        ("skipped", "logprobs"),
    }
    assert change(before, counters(server)) == expected
    assert cached_tokens(server) - cached_before == sum(reply["prefix_tokens"] for reply in replies)


def add(counts: dict[tuple[str, ...], float], value: float, *key: str) -> None:
    if value:
        counts[key] = counts.get(key, 0) + value


def test_labels_come_from_the_fixed_lists(server, passages):
    server.generate(marked([passages()]).text, extra_key="a-secret", chunk_cache={"mode": "exact"})
    found = counters(server)
    assert {key[0] for key in found} >= {"chunks_total", "tokens_total"}
    for name, *labels in found:
        for label in labels:
            known = {*REASONS, *Status, *KERNELS, "none", "prefix", "reused", "computed", "recomputed"}
            known |= {"prepared", "promoted", "refreshed"}
            assert label in known, (name, label)
