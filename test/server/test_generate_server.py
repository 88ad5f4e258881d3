"""/generate on a real server: marks, replies, ratio 1.0 against stock SGLang, isolation, concurrency, aborts."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.conftest import MAX_TOTAL_TOKENS
from server.contract import (
    FULL,
    Marked,
    Passages,
    check_reply,
    events,
    generated,
    marked,
    prime,
    reasons,
    same_logprobs,
    statuses,
    values,
)
from server_fixture import Server

pytestmark = pytest.mark.server

# Marks in text.


def test_priming_with_no_new_tokens_then_hits_in_another_order(server, tokenizer, passages):
    chunks = passages.several(3)
    for chunk in chunks:
        prompt = marked([chunk])
        out = server.generate(prompt.text, max_new_tokens=0)
        assert out["output_ids"] == []
        assert statuses(generated(out, prompt.spans(tokenizer))) == ["miss"]
    prompt = marked(chunks[::-1], head="Look here.\n")
    reply = generated(server.generate(prompt.text), prompt.spans(tokenizer))
    assert statuses(reply) == ["hit"] * 3
    assert reply["reused_tokens"] == sum(end - start for start, end in prompt.spans(tokenizer))
    assert 0 < reply["recomputed_tokens"] < reply["reused_tokens"]
    assert (reply["method"], reply["ratio"], reply["fallback_reason"]) == ("near-words", 0.15, None)


def test_turns_of_a_session_equal_stock(server, stock, tokenizer, passages):
    a, b, c = passages.several(3)
    prime(server, [a, b, c])
    session = {"id": server.post("/open_session", {"capacity_of_str_len": 1000}).json()}
    first, second = marked([b, a], head="First. "), marked([c], head="And? ")
    history: list[int] = []
    spans: list[list[int]] = []
    for turn, options in ((first, FULL), (second, FULL), (marked([], head="So? "), None)):
        own = turn.ids(tokenizer) if not history else turn.ids(tokenizer)[1:]
        begin = len(history) - (1 if history else 0)
        spans += [[begin + start, begin + end] for start, end in turn.spans(tokenizer)]
        text = turn.text if turn.chunks else turn.plain
        out = server.generate(text, chunk_cache=options, logprobs=True, session_params=session)
        history += own
        assert statuses(generated(out, spans)) == ["hit"] * len(spans)
        same_logprobs(out, stock.generate(history, logprobs=True))
        history += out["output_ids"]
        session["rid"] = out["meta_info"]["id"]
    body = {"text": "Who? ", "sampling_params": {"max_new_tokens": 1}, "session_params": session}
    assert server.post("/generate", body).headers["x-chunk-cache"].startswith("reused=")
    server.post("/close_session", {"session_id": session["id"]})


@pytest.mark.parametrize("max_new_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_chunk_is_there_for_any_request_after_the_reply(server, passages, max_new_tokens, stream):
    for _ in range(8):
        chunk = passages()
        if stream:
            params = {"max_new_tokens": max_new_tokens, "ignore_eos": True}
            events(server, "/generate", {"text": marked([chunk]).text, "sampling_params": params})
        else:
            server.generate(marked([chunk]).text, max_new_tokens=max_new_tokens)
        reply = generated(server.generate(marked([chunk], head="Elsewhere: ").text, max_new_tokens=1))
        assert statuses(reply) == ["hit"]


def test_a_list_of_texts_each_with_its_own_marks(server, tokenizer, passages):
    a, b, c = passages.several(3)
    prime(server, [a])
    prompts = [marked([a, b], head="One. "), marked([c], head="Two. ")]
    plain = "The old stone."
    outs = server.generate([prompts[0].text, plain, prompts[1].text])
    assert "chunk_cache" not in outs[1]["meta_info"]
    assert outs[1]["meta_info"]["prompt_tokens"] == len(tokenizer.encode(plain))
    assert statuses(generated(outs[0], prompts[0].spans(tokenizer))) == ["hit", "miss"]
    assert statuses(generated(outs[2], prompts[1].spans(tokenizer))) == ["miss"]


def test_options_per_prompt_of_a_batch(server, passages):
    a, b = passages.several(2)
    prime(server, [a, b])
    prompt = marked([b, a], head="Order. ").text
    options = [{"method": "full-reuse"}, {"ratio": 0.5, "method": "random", "options": {"seed": 3}}, {"mode": "off"}]
    params = [{"max_new_tokens": 2, "custom_params": {"chunk_cache": one}} for one in options]
    outs = server.post("/generate", {"text": [prompt] * 3, "sampling_params": params}).json()
    replies = [generated(out) for out in outs]
    assert [(reply["method"], reply["ratio"]) for reply in replies] == [
        ("full-reuse", 0.0),
        ("random", 0.5),
        ("near-words", 0.15),
    ]
    assert replies[0]["recomputed_tokens"] == 0


@pytest.mark.parametrize("n", [1, 2])
def test_every_output_of_a_stream_has_the_reply(server, tokenizer, passages, n):
    a, b = passages.several(2)
    prime(server, [b])
    prompt = marked([a, b])
    body = {"text": prompt.text, "sampling_params": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True, "n": n}}
    outs = events(server, "/generate", body)
    assert {out.get("index", 0) for out in outs} == set(range(n))
    for index in range(n):
        mine = [out for out in outs if out.get("index", 0) == index]
        assert len(mine) > 1
        reply = generated(mine[-1], prompt.spans(tokenizer))
        assert all(out["meta_info"]["chunk_cache"] == reply for out in mine)
        if n == 1:
            assert statuses(reply) == ["miss", "hit"]


@pytest.mark.parametrize("how", [{"regex": "(yes|no)( [a-f]{3}){2}"}, {"json_schema": '{"type": "boolean"}'}])
def test_a_grammar_equals_stock(server, stock, tokenizer, passages, how):
    chunks = passages.several(2)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Grammar. ")
    sampling = {**how, "ignore_eos": False}
    out = server.generate(prompt.text, chunk_cache=FULL, logprobs=True, sampling=sampling)
    assert statuses(generated(out, prompt.spans(tokenizer))) == ["hit", "hit"]
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True, sampling=sampling))


def test_samples_equal_stock(server, stock, tokenizer, passages):
    chunks = passages.several(2)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Samples. ")
    outs = server.generate(prompt.text, chunk_cache=FULL, logprobs=True, sampling={"n": 3})
    expected = stock.generate(prompt.ids(tokenizer), logprobs=True, sampling={"n": 3})
    for out, one in zip(outs, expected, strict=True):
        assert generated(out)["reused_tokens"] > 0
        same_logprobs(out, one)


@pytest.mark.parametrize("n", [1, 3])
def test_decoding_over_a_part_of_the_prompt(server, stock, tokenizer, passages, n):
    chunks = passages.several(4)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Kept. ")
    num_tokens, (start, _) = len(prompt.ids(tokenizer)), prompt.spans(tokenizer)[0]
    keep_tokens = start + 32 + 20
    assert keep_tokens < num_tokens
    # At ratio 1 the first token is stock's; with samples each is packed for itself.
    options = {**FULL, "keep_tokens": keep_tokens}
    sampling = {"n": n, "max_new_tokens": 20}
    outs = server.generate(prompt.text, chunk_cache=options, logprobs=True, sampling=sampling)
    expected = stock.generate(prompt.ids(tokenizer), logprobs=True, sampling=sampling)
    for out, one in zip(outs if n > 1 else [outs], expected if n > 1 else [expected], strict=True):
        reply = generated(out, prompt.spans(tokenizer))
        assert reply["kept_tokens"] == keep_tokens
        assert reply["reused_tokens"] > 0
        mine, theirs = (values(each["meta_info"]["output_token_logprobs"]) for each in (out, one))
        assert len(mine) == 20
        assert mine[0] == pytest.approx(theirs[0], abs=1e-4)
        assert mine[1:] != pytest.approx(theirs[1:], abs=1e-4)
    # What was stored of it is what it was; nothing is dropped where all fits.
    whole = server.generate(prompt.text, chunk_cache={**FULL, "keep_tokens": num_tokens}, logprobs=True)
    assert generated(whole)["kept_tokens"] == num_tokens
    same_logprobs(whole, stock.generate(prompt.ids(tokenizer), logprobs=True))


def test_no_reply_without_marks_and_options(server, passages):
    out = server.generate(passages())
    assert "chunk_cache" not in out["meta_info"]
    out = server.generate(passages(), sampling={"custom_params": {"mine": 1}})
    assert "chunk_cache" not in out["meta_info"]
    assert all("chunk_cache" not in event["meta_info"] for event in events(server, "/generate", {"text": passages()}))


def test_options_alone_get_a_reply(server, passages):
    for options in ({}, {"mode": "off"}, {"mode": "exact"}, {"ratio": 0}, {"explain": True}):
        reply = generated(server.generate(passages(), chunk_cache=options))
        assert reply["chunks"] == []
        assert reply["reused_tokens"] == 0


@pytest.mark.parametrize("ids_only", [False, True])
def test_spans(server, tokenizer, passages, ids_only):
    chunks = passages.several(2)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Spans. ")
    if ids_only:
        ids, spans = prompt.ids(tokenizer), prompt.spans(tokenizer)
        out = server.generate(ids, chunk_cache={"spans": spans})
        assert statuses(generated(out, spans)) == ["hit", "hit"]
    else:
        num_tokens = len(tokenizer.encode(prompt.plain))
        out = server.generate(prompt.plain, chunk_cache={"spans": [[1, 9], [9, num_tokens]]})
        assert statuses(generated(out, [[1, 9], [9, num_tokens]])) == ["miss", "miss"]


def test_case_20_separators_never_leak(server, tokenizer, passages):
    """Neither the model nor the reply sees one; with input log-probabilities every prompt token is visible."""
    prompt = marked(passages.several(2), head="", question="")
    for mode in ("auto", "exact", "off"):
        for max_new_tokens in (0, 4):
            out = server.generate(
                prompt.text,
                max_new_tokens=max_new_tokens,
                chunk_cache={"mode": mode},
                return_logprob=True,
                logprob_start_len=0,
                return_text_in_logprobs=True,
            )
            seen = [entry[1] for entry in out["meta_info"]["input_token_logprobs"]]
            assert seen == prompt.ids(tokenizer)
            assert "chunk|" not in json.dumps(out)


def test_case_19_marks_change_no_token(server, stock, tokenizer):
    """A chunk whose first letters merge with what stands in front of it; behind a line break it has the same ids."""
    chunk = "e other stone is the nearer one.\n"
    for i, head in enumerate(["Read.\n", "th", "The ", "t", "\n", "Look.\n"]):
        prompt = Marked(head, (chunk,), "Who?")
        out = server.generate(prompt.text, chunk_cache=FULL, logprobs=True)
        reply = generated(out, prompt.spans(tokenizer))
        assert not head.endswith("\n") or statuses(reply) == ["hit" if i else "miss"], head
        same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))


def test_special_and_unicode_text_in_chunks(server, stock, tokenizer):
    chunks = ["Ünïcödé – 漢字 🎉🏽\n", "<|user|>not a role<|bos|>\u200b", " \u00a0x\r\n\t", "a" * 300, "< |chunk| >"]
    for order in (chunks, chunks[::-1]):
        prompt = marked(order, head="日本", question="🙂?")
        out = server.generate(prompt.text, chunk_cache=FULL, logprobs=True)
        generated(out, prompt.spans(tokenizer))
        same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))


# Exactness.


@pytest.mark.parametrize("method", ["epic", "random", "full"])
def test_ratio_one_equals_stock(server, stock, tokenizer, passages, method):
    chunks = passages.several(4)
    prime(server, chunks[:3])
    for order in ([2, 0, 1], [1, 3, 0], [3, 2, 1, 0], [0, 0, 2], [0]):
        prompt = marked([chunks[i] for i in order], head="Compare.\n")
        out = server.generate(prompt.text, max_new_tokens=12, logprobs=True, chunk_cache={"method": method, **FULL})
        reply = generated(out, prompt.spans(tokenizer))
        assert "hit" in statuses(reply)
        assert reply["recomputed_tokens"] == reply["reused_tokens"] > 0
        assert reply["ratio"] == 1.0
        same_logprobs(out, stock.generate(prompt.ids(tokenizer), max_new_tokens=12, logprobs=True))


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_modes_without_reuse_equal_stock(server, stock, tokenizer, passages, mode):
    chunks = passages.several(3)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Modes.\n")
    out = server.generate(prompt.text, logprobs=True, chunk_cache={"mode": mode})
    reply = generated(out, prompt.spans(tokenizer))
    assert (statuses(reply), reasons(reply)) == (["skipped"] * 3, ["off" if mode == "off" else "exact_mode"] * 3)
    assert reply["fallback_reason"] == reasons(reply)[0]
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))


def test_mode_off_remembers_nothing_and_exact_remembers(server, passages):
    for mode, status in (("off", "miss"), ("exact", "hit")):
        chunk = passages()
        server.generate(marked([chunk]).text, chunk_cache={"mode": mode})
        reply = generated(server.generate(marked([chunk], head="Again. ").text))
        assert statuses(reply) == [status], mode


@pytest.mark.parametrize("start", [0, 20, -1])
def test_logprobs_of_the_prompt(server, stock, tokenizer, passages, start):
    chunks = passages.several(3)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Log.\n")
    out = server.generate(prompt.text, logprobs=True, logprob_start_len=start, chunk_cache=FULL)
    reply = generated(out, prompt.spans(tokenizer))
    limited = [start >= 0 and begin >= start for begin, _ in prompt.spans(tokenizer)]
    assert reasons(reply) == ["logprobs" if is_limited else None for is_limited in limited]
    assert start < 0 or reply["prefix_tokens"] + reply["reused_tokens"] <= start
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True, logprob_start_len=start))


def test_full_reuse_does_less_and_gives_something_else(server, tokenizer, passages):
    chunks = passages.several(3)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Reuse.\n").text
    reused = server.generate(prompt, logprobs=True, chunk_cache={"method": "full-reuse"})
    exact = server.generate(prompt, logprobs=True, chunk_cache={"mode": "off"})
    assert generated(reused)["recomputed_tokens"] == 0
    first, second = (out["meta_info"]["output_token_logprobs"][0][0] for out in (reused, exact))
    assert abs(first - second) > 1e-3


def test_prefix_and_chunks_together(server, passages):
    """Case 8: what the exact prefix holds is counted as cached, and only that."""
    a, b, c = passages.several(3)
    prime(server, [c])
    server.generate(marked([a, b]).text)
    reply = generated(server.generate(marked([a, c]).text))
    assert statuses(reply) == ["prefix", "hit"]
    assert reply["prefix_tokens"] >= reply["chunks"][0]["end"]
    again = generated(server.generate(marked([a, c]).text, chunk_cache={"mode": "exact"}))
    assert again["prefix_tokens"] == reply["prefix_tokens"], "a fused request left something in the exact cache"


def test_case_01_the_same_prompt_twice(server, stock, tokenizer, passages):
    chunks = passages.several(2)
    prime(server, chunks)
    prompt = marked(chunks[::-1], head="Twice.\n")
    expected = stock.generate(prompt.ids(tokenizer), logprobs=True)
    for _ in range(3):
        same_logprobs(server.generate(prompt.text, logprobs=True, chunk_cache=FULL), expected)


# Tenants, flush, aborts, many at once.


def test_case_16_two_tenants(server, passages):
    chunk = passages()
    tenants: list[dict[str, Any]] = [{}, {"extra_key": "a"}, {"extra_key": "b"}, {"cache_salt": "a"}]
    for number, tenant in enumerate(tenants):
        first = generated(server.generate(marked([chunk], head="First ").text, **tenant))
        assert statuses(first) == ["miss"], tenant
        second = generated(server.generate(marked([chunk], head=f"Second {number} ").text, **tenant))
        assert statuses(second) == ["hit"], tenant


def test_flush_forgets_the_chunks(server, passages):
    chunk = passages()
    prime(server, [chunk])
    server.flush()
    reply = generated(server.generate(marked([chunk], head="Flushed. ").text))
    assert (statuses(reply), reply["prefix_tokens"]) == (["miss"], 0)
    assert statuses(generated(server.generate(marked([chunk], head="Back. ").text))) == ["hit"]


def fill_pool(server: Server, tokenizer: Any, passages: Passages) -> None:
    """One request that needs nearly all slots: it is served only if none was lost."""
    server.flush()
    words = passages(1800)
    ids = tokenizer.encode(words)[: MAX_TOTAL_TOKENS - 40]
    assert len(ids) == MAX_TOTAL_TOKENS - 40
    half = len(ids) // 2
    reply = generated(server.generate(ids, max_new_tokens=8, chunk_cache={"spans": [[1, half], [half, len(ids) - 9]]}))
    assert reply["computed_tokens"] == len(ids)
    server.flush()


def test_case_23_abort_by_closing_the_connection(server, tokenizer, passages):
    chunks = passages.several(3)
    prime(server, chunks)
    for i in range(6):
        params = {"max_new_tokens": 400, "ignore_eos": True, "custom_params": {"chunk_cache": {"ratio": i / 5}}}
        text = marked([chunks[i % 3], passages(), chunks[(i + 1) % 3]], head=f"Abort {i}. ").text
        body = {"text": text, "sampling_params": params, "stream": True}
        with httpx.stream("POST", f"{server.url}/generate", json=body, timeout=60, trust_env=False) as response:
            lines = response.iter_lines()
            for _ in range(1 + 2 * i):
                next(lines)
    reply = generated(server.generate(marked(chunks[::-1], head="After. ").text))
    assert statuses(reply) == ["hit"] * 3
    fill_pool(server, tokenizer, passages)


def test_abort_by_id(server, tokenizer, passages):
    chunks = passages.several(2)
    prime(server, chunks)
    body = {
        "text": marked(chunks[::-1], head="Long. ").text,
        "rid": "to-be-aborted",
        "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True},
    }
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.post, "/generate", body)
        deadline = time.monotonic() + 60
        while not running.done() and time.monotonic() < deadline:
            server.post("/abort_request", {"rid": "to-be-aborted"})
            time.sleep(0.05)
        out = running.result(timeout=60).json()
    assert out["meta_info"]["finish_reason"]["type"] == "abort"
    if "chunk_cache" in out["meta_info"]:  # absent where the abort came before the admission
        check_reply(out["meta_info"]["chunk_cache"], out["meta_info"]["prompt_tokens"])
    fill_pool(server, tokenizer, passages)


def test_case_14_sixteen_mixed_requests_at_once(server, stock, tokenizer, passages):
    chunks = passages.several(6)
    prime(server, chunks[:4])

    def prompt(i: int) -> Marked:
        return marked([chunks[(i * k + k) % 6] for k in (1, 2, 3)], head=f"Mixed {i}.\n")

    def ask(i: int) -> Any:
        kind = i % 4
        if kind == 0:
            return server.generate(prompt(i).text, logprobs=True, chunk_cache=FULL)
        if kind == 1:
            return server.generate(prompt(i).ids(tokenizer), logprobs=True)
        if kind == 2:
            return server.generate(prompt(i).text, max_new_tokens=20, chunk_cache={"ratio": 0.2})
        options = {"spans": [[5, 2]]} if i % 8 == 3 else {"mode": "off"}
        params = {"max_new_tokens": 4, "custom_params": {"chunk_cache": options}}
        return server.post("/generate", {"text": prompt(i).plain, "sampling_params": params}, check=False)

    with ThreadPoolExecutor(16) as pool:
        outs = list(pool.map(ask, range(16)))
    for i, out in enumerate(outs):
        if i % 4 in (0, 1):
            same_logprobs(out, stock.generate(prompt(i).ids(tokenizer), logprobs=True))
        if i % 4 in (0, 2):
            generated(out, prompt(i).spans(tokenizer))
        if i % 4 == 3:
            assert out.status_code == (400 if i % 8 == 3 else 200)
    fill_pool(server, tokenizer, passages)
