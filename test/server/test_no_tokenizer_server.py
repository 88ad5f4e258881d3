"""`--skip-tokenizer-init` on a folder without any tokenizer file, page size 16, typed messages between processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.conftest import FLAGS, STRICT
from server.contract import FULL, check_reply, events, generated, marked, same_logprobs, statuses
from server_fixture import Server
from tiny_models import make_model

pytestmark = [pytest.mark.all, pytest.mark.server]


@pytest.fixture(scope="module")
def bare(model_root: Path) -> Iterator[Server]:
    """The weights of `stock`, so that its log-probabilities are the reference."""
    folder = make_model("llama", model_root / "llama-without-tokenizer", tokenizer=False)
    assert not list(folder.glob("*token*"))
    flags = (*FLAGS, "--chunk-cache", "--skip-tokenizer-init", "--page-size", "16")
    with Server(folder, *flags, env={**STRICT, "SGLANG_USE_PICKLE_IPC": "0"}) as server:
        yield server


def test_spans_without_a_tokenizer_equal_stock(bare, stock, tokenizer, passages):
    chunks = passages.several(3, num_words=20)
    for chunk in chunks:
        prompt = marked([chunk])
        ids, spans = prompt.ids(tokenizer), prompt.spans(tokenizer)
        assert statuses(generated(bare.generate(ids, max_new_tokens=0, chunk_cache={"spans": spans}))) == ["miss"]
    for order in ([2, 0, 1], [1, 2, 0], [0]):
        prompt = marked([chunks[i] for i in order], head="Bare.\n")
        ids, spans = prompt.ids(tokenizer), prompt.spans(tokenizer)
        out = bare.generate(ids, logprobs=True, chunk_cache={"spans": spans, **FULL})
        reply = generated(out, spans)
        assert set(statuses(reply)) == {"hit"}
        assert (reply["prefix_tokens"] + reply["reused_tokens"]) > 0
        same_logprobs(out, stock.generate(ids, logprobs=True))


@pytest.mark.parametrize("stream", [False, True])
def test_text_marks_without_a_tokenizer_are_refused(bare, stream):
    text = marked(["one", "two"]).text
    response = bare.post("/generate", {"text": text, "stream": stream}, check=False)
    assert response.status_code == 400
    assert "text: " in response.text
    assert "--skip-tokenizer-init" in response.text
    options = {"spans": [[3, 2]]}
    params = {"custom_params": {"chunk_cache": options}}
    response = bare.post(
        "/generate", {"input_ids": [5, 6, 7, 8], "sampling_params": params, "stream": stream}, check=False
    )
    assert response.status_code == 400
    assert "sampling_params.custom_params.chunk_cache.spans[0]" in response.text


def test_typed_messages_carry_options_and_replies(bare):
    ids = list(range(10, 90))
    options = {"spans": [[16, 48], [48, 70]], "method": "random", "ratio": 0.5, "options": {"seed": 2**62}}
    first = generated(bare.generate(ids, chunk_cache={**options, "explain": True}), options["spans"])
    assert "explain" in first
    assert statuses(first) == ["miss", "miss"]
    moved = ids[:16] + ids[48:70] + ids[16:48] + [7] * 20
    options["spans"] = [[16, 38], [38, 70]]
    params = {
        "max_new_tokens": 4,
        "ignore_eos": True,
        "custom_params": {"chunk_cache": options, "mine": [1, "a", None]},
    }
    outs = events(bare, "/generate", {"input_ids": moved, "sampling_params": params})
    for out in outs:
        reply = check_reply(out["meta_info"]["chunk_cache"], len(moved), options["spans"])
        assert statuses(reply) == ["hit", "hit"]
        assert (reply["prefix_tokens"], reply["method"], reply["ratio"]) == (16, "random", 0.5)
