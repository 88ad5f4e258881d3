"""Offline with `engine`; replicas, also those of data-parallel attention; tensor parallelism 2 behind HTTP with another
separator and another configuration."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from server.conftest import FLAGS, STRICT
from server.contract import SEP, check_reply, completed, generated, marked, same_logprobs, statuses
from server.own_process import ask
from server_fixture import Server
from tiny_models import make_model

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def offline_chunks() -> list[str]:
    return ["the rose of the old winter\n", "a tale of stone in her hand, long ago\n", "this road led to nothing\n"]


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.all)], ids=["one-rank", "two-ranks"])
def offline(request: Any, model_dir: Path, tokenizer: Any, offline_chunks: list[str]) -> dict[str, Any]:
    """What `offline.py` printed."""
    a, b, c = offline_chunks
    prompt = marked([c, a, b], head="Offline. ")
    task = {
        "model": str(model_dir),
        "tp_size": request.param,
        "primes": [marked([a]).text, marked([b]).text],
        "prompt": prompt.text,
        "ids": prompt.ids(tokenizer),
        "spans": prompt.spans(tokenizer),
        "lone": f"a{SEP}b",
    }
    return {**ask("offline", task), "task": task}


def test_case_09_offline_equals_stock(offline, stock):
    task = offline["task"]
    expected = stock.generate(task["ids"], logprobs=True)
    for name, expected_statuses in (("text", ["miss", "hit", "hit"]), ("ids", ["hit", "hit", "hit"])):
        reply = generated(offline[name], task["spans"])
        assert (statuses(reply), reply["method"], reply["ratio"]) == (expected_statuses, "random", 1.0)
        same_logprobs(offline[name], expected)


def test_offline_batch_stream_and_async(offline):
    task, expected = offline["task"], offline["text"]["output_ids"]
    assert [("chunk_cache" in out["meta_info"]) for out in offline["batch"]] == [True, False]
    assert offline["batch"][0]["output_ids"] == offline["async"]["output_ids"] == expected
    assert len(offline["stream"]) > 1
    for out in (offline["batch"][0], offline["async"], offline["after"], *offline["stream"]):
        check_reply(out["meta_info"]["chunk_cache"], len(task["ids"]), task["spans"])
    assert offline["after"]["output_ids"] == expected
    assert offline["params"]["custom_params"] == {"chunk_cache": {}}, "the caller's object was written to"


def test_offline_bad_input_is_a_value_error_that_names_the_path(offline):
    starts = (
        "chunk cache: --chunk-cache-ratio must be a number from 0 to 1",
        "chunk cache: --disable-radix-cache cannot be combined",
        "sampling_params.custom_params.chunk_cache.spans[0]: [3, 1] is empty",
        "sampling_params[1].custom_params.chunk_cache.spans[0]: [3, 1] is empty",
        "sampling_params.custom_params.chunk_cache.spans[0]: [3, 1] is empty",
        "text: only one separator",
        "text: only one separator",
    )
    assert len(offline["refused"]) == len(starts)
    for text, start in zip(offline["refused"], starts, strict=True):
        assert text.startswith(start)


# Replicas.


@pytest.fixture(scope="module")
def replicas(model_dir: Path) -> Iterator[Server]:
    with Server(model_dir, *FLAGS, "--chunk-cache", "--dp-size", "2", "--chunk-cache-ratio", "1", env=STRICT) as server:
        yield server


def each_replica(server: Server, of: Callable[[Any], int]) -> list[int]:
    """A number of each replica's, from its stats."""
    ranks = server.get("/chunk_cache/stats").json()["ranks"]
    assert [rank["dp_rank"] for rank in ranks] == [0, 1]
    return [of(rank) for rank in ranks]


@pytest.fixture(scope="module")
def ranks(model_root: Path, model_dir: Path) -> Iterator[Server]:
    """Data-parallel attention, of a class that SGLang has it for."""
    flags = ("--tp-size", "2", "--attn-dp-size", "2", "--tokenizer-path", str(model_dir))
    model = make_model("qwen3", model_root / "qwen3-ranks")
    with Server(model, *FLAGS, *flags, "--chunk-cache", "--chunk-cache-ratio", "1", env=STRICT) as server:
        yield server


@pytest.mark.all
def test_replicas_have_chunks_of_their_own(replicas, stock, tokenizer, passages):
    assert_chunks_of_their_own(replicas, stock, tokenizer, passages)


@pytest.mark.all
def test_ranks_that_attend_apart_have_chunks_of_their_own(ranks, tokenizer, passages):
    """Against the same server without marks; `exactness/test_dp_attention.py` has stock's answers."""
    assert_chunks_of_their_own(ranks, ranks, tokenizer, passages)


@pytest.mark.all
def test_methods_that_ranks_which_attend_apart_do_not_follow(ranks, passages):
    text = marked(passages.several(2)).text
    params = {"custom_params": {"chunk_cache": {"method": "cacheblend"}}}
    refused = ranks.post("/generate", {"text": text, "sampling_params": params}, check=False)
    assert refused.status_code == 400
    assert "chunk_cache.method: 'cacheblend'" in refused.text
    assert "choose near" in refused.text
    for method in ("near", "epic", "cache-craft"):
        ranks.generate(text, chunk_cache={"method": method, "ratio": 0.15})


def assert_chunks_of_their_own(replicas: Server, stock: Server, tokenizer: Any, passages: Any) -> None:
    replicas.flush()
    a, b = passages.several(2)

    def variants() -> list[int]:
        return each_replica(replicas, lambda rank: rank["index"]["num_variants"])

    def send(order: list[str], head: str, replica: int) -> Any:
        prompt = marked(order, head=head)
        out = replicas.generate(prompt.text, logprobs=True, routed_dp_rank=replica)
        same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))
        return statuses(generated(out, prompt.spans(tokenizer)))

    assert send([a, b], "first ", 0) == ["miss", "miss"]
    assert variants() == [2, 0]
    assert send([b, a], "second ", 1) == ["miss", "miss"]
    assert send([b, a], "third ", 0) == ["hit", "hit"]
    assert replicas.post("/chunk_cache/flush", {}).json()["flushed"]
    assert variants() == [0, 0]
    assert json.loads(replicas.post("/chunk_cache/warm", {"texts": [a]}).text.splitlines()[-1])["stored"] == 1
    assert variants() == [1, 1]
    assert replicas.post("/chunk_cache/evict", {"texts": [a]}).json()["evicted"][0]["variants"] == 2
    assert variants() == [0, 0]


@pytest.mark.all
def test_administration_reaches_all_replicas(replicas, passages):
    assert_administration_reaches_all(replicas, passages)


@pytest.mark.all
def test_administration_reaches_all_ranks_that_attend_apart(ranks, passages):
    assert_administration_reaches_all(ranks, passages)


def assert_administration_reaches_all(replicas: Server, passages: Any) -> None:
    replicas.flush()
    chunks = passages.several(3)
    lines = [json.loads(line) for line in replicas.post("/chunk_cache/warm", {"texts": chunks[:2]}).text.splitlines()]
    assert (lines[-1]["stored"], lines[-1]["already"], lines[-1]["present"]) == (2, 0, 2)
    prompt = marked([chunks[2]])
    replicas.generate(prompt.text, routed_dp_rank=1)

    listed = replicas.get("/chunk_cache/variants").json()
    assert listed["total"] == len(listed["variants"]) == 5
    assert [variant["dp_rank"] for variant in listed["variants"]] == [0, 0, 1, 1, 1]
    alone = listed["variants"][-1]["key"]
    assert [v["dp_rank"] for v in replicas.get(f"/chunk_cache/variants?key={alone}").json()["variants"]] == [1]

    def num_pins() -> list[int]:
        return each_replica(replicas, lambda rank: rank["pins"]["num_pins"])

    pinned = replicas.post("/chunk_cache/pin", {"texts": chunks, "ttl_s": 600}).json()
    assert [entry["index"] for entry in pinned["pinned"]] == [0, 1, 2]
    assert num_pins() == [2, 3]
    assert pinned["pinned_tokens"] == max(each_replica(replicas, lambda rank: rank["pins"]["num_tokens"]))
    unpinned = replicas.post("/chunk_cache/unpin", {"texts": [chunks[0], chunks[2]]}).json()
    assert [entry["index"] for entry in unpinned["unpinned"]] == [0, 1]
    assert num_pins() == [1, 1]

    requests = replicas.get("/chunk_cache/requests").json()["requests"]
    assert [[chunk["key"] for chunk in one["chunks"]] for one in requests].count([alone]) == 1
    evicted = replicas.post("/chunk_cache/evict", {"texts": chunks}).json()["evicted"]
    assert [entry["variants"] for entry in evicted] == [2, 2, 1]
    assert num_pins() == [0, 0]
    assert replicas.get("/chunk_cache/variants").json()["total"] == 0
    again = json.loads(replicas.post("/chunk_cache/warm", {"texts": chunks}).text.splitlines()[-1])
    assert (again["stored"], again["present"]) == (3, 3)
    assert replicas.post("/chunk_cache/flush", {}).json() == {"flushed": True}
    assert each_replica(replicas, lambda rank: rank["index"]["num_variants"]) == [0, 0]


@pytest.mark.all
def test_replicas_take_turns_and_errors_are_those_of_one(replicas, stock, tokenizer, passages):
    """Without a wish the requests are spread, and the second round finds what the first has left on either."""
    replicas.flush()
    chunks = passages.several(2)
    found = []
    for i in range(8):
        prompt = marked(chunks[:: 1 if i % 2 else -1], head=f"Turn {i}. ")
        out = replicas.generate(prompt.text, logprobs=True, chunk_cache={"ratio": 1.0, "method": "random"})
        same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))
        found += statuses(generated(out, prompt.spans(tokenizer)))
    assert 0 < found.count("miss") <= 4, "each replica computes them once"
    assert found[-4:] == ["hit"] * 4
    assert each_replica(replicas, lambda rank: rank["index"]["num_variants"]) == [2, 2]
    refused = replicas.post("/generate", {"text": f"a{SEP}b", "sampling_params": {}}, check=False)
    assert refused.status_code == 400
    assert "only one separator" in refused.text


# The full matrix: TP 2 behind HTTP, another separator, another configuration.


@pytest.fixture(scope="module")
def parallel(model_dir: Path) -> Iterator[Server]:
    config = json.dumps({"max_generation": 0, "min_reuse_len": 12, "kernel": "torch"})
    flags = ("--chunk-cache", "--chunk-cache-separator", "[[§]]", "--chunk-cache-config", config)
    with Server(model_dir, *FLAGS, *flags, "--chunk-cache-ratio", "1", "--tp-size", "2", env=STRICT) as server:
        yield server


@pytest.mark.all
def test_case_09_two_ranks_and_another_separator_equal_stock(parallel, stock, tokenizer, passages):
    chunks = [*passages.several(3), "short."]
    for order in ([0, 1], [1, 0, 3], [3, 2, 0], [2, 0, 1, 3]):
        prompt = marked([chunks[i] for i in order], head=f"{order} ")
        out = parallel.generate(prompt.text.replace(SEP, "[[§]]"), logprobs=True)
        reply = generated(out, prompt.spans(tokenizer))
        assert reply["ratio"] == 1.0
        same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))
    assert statuses(reply)[:3] == ["hit"] * 3
    assert reply["chunks"][3]["reason"] == "too_short"
    # The default separator is ordinary text here.
    out = parallel.generate(prompt.text)
    assert "chunk_cache" not in out["meta_info"]
    assert out["meta_info"]["prompt_tokens"] == len(tokenizer.encode(prompt.text))


@pytest.mark.all
def test_chat_with_two_ranks(parallel, passages):
    a, b = passages.several(2)
    for order, expected in (([a, b], "miss"), ([b, a], "hit")):
        content = marked(order, head=expected).text.replace(SEP, "[[§]]")
        assert statuses(completed(parallel.chat(content))) == [expected] * 2
