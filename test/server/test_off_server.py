"""Without `--chunk-cache` a server is SGLang as it was released."""

from __future__ import annotations

import pytest

from server.contract import SEP, events, marked

pytestmark = pytest.mark.server


def test_options_and_marks_mean_nothing(stock, tokenizer, passages):
    text = marked(passages.several(2)).text
    plain = stock.generate(text, logprobs=True)
    assert plain["meta_info"]["prompt_tokens"] == len(tokenizer.encode(text)), "separators are ordinary text"
    for options in ({"spans": [[1, 5]]}, {"spans": "junk"}, {"no": "such key"}):
        out = stock.generate(text, chunk_cache=options)
        assert out["output_ids"] == plain["output_ids"]
        assert "chunk_cache" not in out["meta_info"]
    assert stock.generate(f"a{SEP}b")["output_ids"]
    out = stock.generate(text, chunk_cache={}, sampling={"custom_params": {"chunk_cache": "a string"}})
    assert "chunk_cache" not in out["meta_info"]


def test_streams_and_openai_routes(stock, passages):
    body = {"text": marked([passages()]).text, "chunk_cache": {"chunks": []}, "sampling_params": {"max_new_tokens": 3}}
    assert all("chunk_cache" not in event["meta_info"] for event in events(stock, "/generate", body))
    options = {"custom_params": {"chunk_cache": {"spans": [[5, 1]]}}}
    chat = stock.chat(marked([passages()]).text, **options)
    assert "sglext" not in chat
    response = stock.post("/v1/completions", {"model": "default", "prompt": "x", "max_tokens": 2, **options}).json()
    assert "sglext" not in response


def test_the_tree_is_sglangs_own(stock, server):
    assert stock.get("/server_info").json()["radix_cache_backend"] is None
    assert server.get("/server_info").json()["radix_cache_backend"] == "chunk_cache"
    assert "Chunk cache:" not in stock.log
    assert "Chunk cache:" in server.log
