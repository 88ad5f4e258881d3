"""A hybrid of states and attention (Qwen3.5's class) on the CPU: stock SGLang computes it as our own forward does, and
reused passages are put together as `reference_hybrid` does in plain torch.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from benchmark.quality.synthetic.vocabulary import WORDS

from reference_hybrid import HybridConfig, Prompt, Reused, Run, random_hybrid, read_model, write_model
from server.tier_contract import tiers, wait_until
from server_fixture import Server, output_logprobs

pytestmark = pytest.mark.server

CONFIG = HybridConfig(len(WORDS), hidden_size=64, num_layers=4, full_every=2, num_states=2, state_size=16, mlp_size=96)
CLOSE = 1e-4
SAME = 1e-5  # what is loaded was composed in another order
SEAM_LEN = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    write_model(random_hybrid(CONFIG, seed=0), folder)
    return folder


@pytest.fixture
def hybrid(folder, servers):
    flags = ("--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "512")
    return servers.use("hybrid", lambda: Server(folder, *flags))


def reusing_server(folder, **config):
    flags = ("--dtype", "float32", "--max-total-tokens", "8192", "--chunked-prefill-size", "128", "--chunk-cache")
    return Server(folder, *flags, "--chunk-cache-config", json.dumps({"seam_len": SEAM_LEN, **config}))


@pytest.fixture
def reusing(folder, servers):
    return servers.use("reusing", lambda: reusing_server(folder))


def worst_difference(model, server, prompts, num_generated):
    """Of the log probabilities of generated tokens, all prompts at once; and how many tokens were cached."""

    def ask(ids):
        body = {"input_ids": ids, "return_logprob": True}
        body["sampling_params"] = {"temperature": 0, "max_new_tokens": num_generated, "ignore_eos": True}
        return server.post("/generate", body).json()

    with ThreadPoolExecutor(len(prompts)) as pool:
        replies = list(pool.map(ask, prompts))
    worst = 0.0
    for ids, reply in zip(prompts, replies, strict=True):
        expected = Prompt(model, [Run([*ids, *reply["output_ids"]])]).logits.log_softmax(-1)
        for place, (found, token, _) in enumerate(reply["meta_info"]["output_token_logprobs"], start=len(ids) - 1):
            worst = max(worst, abs(found - float(expected[place, token])))
    return worst, [reply["meta_info"]["cached_tokens"] for reply in replies]


@pytest.mark.parametrize("name", ["reusing", pytest.param("hybrid", marks=pytest.mark.all)])
def test_prompts_chunks_of_prompts_and_continued_prompts(folder, request, name):
    """Six at once, one longer than a step; then again with more behind, from states that the radix cache kept."""
    server, model = request.getfixturevalue(name), read_model(folder, CONFIG)
    draw = torch.Generator().manual_seed(2)
    prompts = [
        torch.randint(2, len(WORDS), (length,), generator=draw).tolist() for length in (5, 64, 130, 300, 301, 900)
    ]
    worst, cached = worst_difference(model, server, prompts, 12)
    assert worst < CLOSE
    assert not any(cached)
    longer = [[*prompt, *prompts[0]] for prompt in prompts]
    worst, cached = worst_difference(model, server, longer, 4)
    assert worst < CLOSE
    assert max(cached) >= 256, "SGLang keeps states at multiples of its interval"


# Reused passages.


def draw(generator, length):
    return torch.randint(2, len(WORDS), (length,), generator=generator).tolist()


def ask(server, system, chunks, question, **options):
    ids, spans = list(system), []
    for chunk in chunks:
        spans.append([len(ids), len(ids) + len(chunk)])
        ids += chunk
    return server.generate([*ids, *question], max_new_tokens=4, logprobs=True, chunk_cache={"spans": spans, **options})


def composed(model, system, chunks, stored, reply, question):
    """Log probabilities of the answer, the passages put together as the reply says that they were."""
    info, parts = reply["meta_info"]["chunk_cache"], [Run(system)]
    for chunk, piece, told in zip(chunks, stored, info["chunks"], strict=True):
        is_reused = told["status"] == "hit" and len(told["recomputed_positions"]) < len(chunk)
        parts += [Run(chunk[:SEAM_LEN]), piece] if is_reused else [Run(chunk)]
    answer = reply["output_ids"]
    prompt = Prompt(model, [*parts, Run([*question, *answer[:-1]])])
    logits = prompt.logits[-len(answer) :].log_softmax(-1)
    return sum(isinstance(part, Reused) for part in parts), [
        float(row[token]) for row, token in zip(logits, answer, strict=True)
    ]


@pytest.mark.parametrize(("ratio", "num_reused"), [(0.0, 10), (0.6, 5), (1.0, 0)])
def test_passages_are_put_together_as_by_the_reference(folder, reusing, ratio, num_reused):
    """One longer than a step, one twice in a prompt; with more than seams whole passages are computed."""
    reusing.post("/flush_cache", {})
    model, generator = read_model(folder, CONFIG), torch.Generator().manual_seed(3)
    system, chunks = draw(generator, 20), [draw(generator, length) for length in (40, 33, 51, 200)]
    for chunk in chunks:
        ask(reusing, system, [chunk], draw(generator, 3))
    stored = [
        Prompt(model, [Run(system + chunk)]).piece(len(system) + SEAM_LEN, len(system) + len(chunk)) for chunk in chunks
    ]
    found = 0
    for order in ((3, 1, 0, 2), (2, 0, 1), (1, 1, 3), (0, 3)):
        own, question = [chunks[i] for i in order], draw(generator, 9)
        reply = ask(reusing, system, own, question, ratio=ratio, explain=True)
        num, expected = composed(model, system, own, [stored[i] for i in order], reply, question)
        assert [one for one, *_ in reply["meta_info"]["output_token_logprobs"]] == pytest.approx(expected, abs=CLOSE)
        assert reply["meta_info"]["chunk_cache"]["method"] == "seams"
        found += num
    assert found >= num_reused
    assert found == 0 or ratio < 1.0


def test_what_is_stored_is_counted(reusing):
    reusing.post("/flush_cache", {})
    pool = reusing.get("/chunk_cache/stats").json()["ranks"][0]["tiers"]["pool"]
    assert (pool["state_variants"], pool["state_bytes"]) == (0, 0)
    generator = torch.Generator().manual_seed(4)
    ask(reusing, draw(generator, 20), [draw(generator, 30), draw(generator, 40)], draw(generator, 3))
    pool = reusing.get("/chunk_cache/stats").json()["ranks"][0]["tiers"]["pool"]
    size = CONFIG.state_size
    rule, tail = 2 * CONFIG.num_states * size**2, 3 * CONFIG.num_states * size * (CONFIG.conv_size - 1)
    assert pool["state_variants"] == 2
    assert pool["state_bytes"] == 2 * (CONFIG.num_layers // 2) * 4 * (rule + tail)


@pytest.mark.parametrize(
    ("method", "status"), [("seams", 200), ("full", 200), ("full-reuse", 200), ("near-words", 400), ("fusionrag", 400)]
)
def test_a_method_of_single_tokens_is_refused(reusing, method, status):
    body = {"input_ids": [5] * 30, "sampling_params": {"max_new_tokens": 1}}
    body["sampling_params"]["custom_params"] = {"chunk_cache": {"spans": [[2, 20]], "method": method}}
    reply = reusing.post("/generate", body, check=False)
    assert reply.status_code == status
    assert status == 200 or "choose seams or full or full-reuse" in reply.text


def test_options_of_methods_are_refused(reusing):
    params = {"max_new_tokens": 1, "custom_params": {"chunk_cache": {"spans": [[2, 20]], "options": {"drift": 0.5}}}}
    reply = reusing.post("/generate", {"input_ids": [5] * 30, "sampling_params": params}, check=False)
    assert reply.status_code == 400
    assert "chunk_cache.options: this model keeps states" in reply.text


# Tiers.


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    return tmp_path_factory.mktemp("disk")


def with_tiers(folder, disk, **config):
    tiers = {"disk": {"path": str(disk)}, "host_bytes": "50MB", "controller": False}
    return reusing_server(folder, tiers=tiers, **config)


@pytest.fixture
def below(folder, servers, disk):
    """Has little room for what passages do to states."""
    return servers.use("below", lambda: with_tiers(folder, disk, state_bytes="100KB"))


def store(server, disk, generator, lengths):
    """Passages that are in the pool and on disk."""
    chunks = [draw(generator, length) for length in lengths]
    num_files = len(list(disk.glob("*/*/*/*.kv"))) + len(chunks)
    for chunk in chunks:
        ask(server, draw(generator, 20), [chunk], draw(generator, 3))
    wait_until(lambda: len(list(disk.glob("*/*/*/*.kv"))) >= num_files, "not written")
    return chunks


def from_pool(server, disk, seed, lengths, ratio):
    """A question over passages that were stored so, behind another system prompt, and its reply."""
    generator = torch.Generator().manual_seed(seed)
    chunks = store(server, disk, generator, lengths)
    question = draw(generator, 20), chunks[::-1], draw(generator, 9)
    reply = ask(server, *question, ratio=ratio, explain=True)
    assert tiers(reply["meta_info"]["chunk_cache"]) == ["pool"] * len(chunks)
    return question, reply


def assert_same(found, expected, tier):
    assert set(tiers(found["meta_info"]["chunk_cache"])) == {tier}
    assert found["output_ids"] == expected["output_ids"]
    assert output_logprobs(found) == pytest.approx(output_logprobs(expected), abs=SAME)


@pytest.mark.parametrize("ratio", [0.0, 0.6, 1.0])
def test_passages_from_disk_answer_as_those_from_the_pool(folder, below, disk, ratio):
    """One is longer than a step: what it does to states has parts in the pool, and is one on disk."""
    question, expected = from_pool(below, disk, int(10 * ratio), (40, 33, 51, 200), ratio)
    below.post("/flush_cache", {})
    reply = ask(below, *question, ratio=ratio, explain=True)
    assert_same(reply, expected, "disk")
    if ratio == 1.0:
        assert output_logprobs(reply) == pytest.approx(output_logprobs(ask(below, *question, mode="off")), abs=CLOSE)


def test_what_has_left_host_memory_for_others_comes_from_the_host_tier(below, disk):
    question, expected = from_pool(below, disk, 20, (47,), 0.0)
    store(below, disk, torch.Generator().manual_seed(21), (30,) * 10)
    pool = below.get("/chunk_cache/stats").json()["ranks"][0]["tiers"]["pool"]
    assert pool["state_variants"] < 11
    assert_same(ask(below, *question, ratio=0.0, explain=True), expected, "host")


@pytest.mark.all
@pytest.mark.parametrize("ratio", [0.0, 0.6])
def test_passages_outlive_a_restart(folder, below, servers, disk, ratio):
    question, expected = from_pool(below, disk, 30 + int(10 * ratio), (40, 33, 200), ratio)
    again = servers.use("again", lambda: with_tiers(folder, disk))
    assert_same(ask(again, *question, ratio=ratio, explain=True), expected, "disk")
