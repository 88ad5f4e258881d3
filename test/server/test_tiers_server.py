"""Tiers below the KV pool on real servers: what comes back from them, for whom, and who waits for it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from chunk_cache.keys import Partition
from chunk_cache.tiers.cost import MIN_OBSERVATIONS
from server import contract
from server.contract import FULL, Passages, chunk_ids, generated, marked, prime, reasons, same_logprobs, statuses
from server.tier_contract import (
    REQUEST_TIMEOUT_S,
    Folder,
    assert_right,
    fill_pool,
    flip_a_byte,
    metric,
    reuse,
    tier_flags,
    tier_server,
    tiers,
    wait_until,
)
from server_fixture import OneAtATime, Server, output_logprobs
from tiny_models import make_model
from trace_collector import TraceCollector, attributes, seconds

pytestmark = pytest.mark.server

EXACTLY = 5e-6  # log-probabilities of KV that is the same bit for bit; what is left is rounding of other slots
SLOW = {"bytes_per_s": 20e3, "latency_s": 0.25}  # a passage of the default length takes about 1.5 s
TIMEOUT_S = 6.0  # a long passage takes longer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Folder:
    """Shared by all servers of this module but the last."""
    return Folder(tmp_path_factory.mktemp("tiers"), tokenizer)


@pytest.fixture(scope="module")
def through(model_dir: Path, folder: Folder) -> Iterator[Server]:
    """Writes every chunk down as soon as it is computed."""
    with tier_server(model_dir, *tier_flags(host_bytes="50MB", disk={"path": str(folder.path)})) as server:
        yield server


@pytest.fixture
def evicting(servers: OneAtATime, model_dir: Path, folder: Folder) -> Server:
    """Writes what leaves the pool to the host tier, and what leaves that to disk; pages of 16."""
    flags = tier_flags(host_bytes="200KB", disk={"path": str(folder.path)}, write="evict")
    return servers.use("evicting", lambda: tier_server(model_dir, *flags, "--page-size", "16"))


@pytest.fixture(scope="module")
def collector() -> Iterator[TraceCollector]:
    """Gets the traces of `slow`."""
    with closing(TraceCollector()) as one:
        yield one


@pytest.fixture
def slow(servers: OneAtATime, model_dir: Path, folder: Folder, collector: TraceCollector) -> Server:
    """Reads the folder as if it were far away, and traces."""
    flags = (
        *tier_flags(disk={"path": str(folder.path)}, throttle={"disk": SLOW}, timeout_s=TIMEOUT_S),
        *("--enable-trace", "--otlp-traces-endpoint", collector.endpoint),
    )
    return servers.use("slow", lambda: tier_server(model_dir, *flags))


@pytest.fixture
def stored(through: Server, folder: Folder) -> Callable[..., None]:
    """Puts chunks into the folder, and out of the memory of the server that did it."""

    def store(*chunks: str, **body: Any) -> None:
        prime(through, list(chunks), **body)
        folder.wait_for(*chunks, partition=Partition(**body))
        through.flush()

    return store


# Right answers.


def test_reuse_from_disk_equals_off(through, tokenizer, passages, stored):
    chunks = passages.several(3)
    stored(*chunks)
    prompt = marked(chunks[::-1], head="From disk. ")
    out, reply = reuse(through, prompt, tokenizer)
    assert (statuses(reply), tiers(reply)) == (["hit"] * 3, ["disk"] * 3)
    assert_right(through, prompt, out)
    _, reply = reuse(through, marked(chunks, head="Now it is there. "), tokenizer)
    assert tiers(reply) == ["pool"] * 3


@pytest.mark.parametrize("method", ["epic", "full-reuse"])
def test_ratio_0_from_disk_equals_that_from_the_pool(through, tokenizer, folder, passages, method):
    chunks = passages.several(3)
    prompt = marked([chunks[2], chunks[0], chunks[1]], head="Zero. ")
    prime(through, chunks)
    folder.wait_for(*chunks)
    found = {}
    for source in ("pool", "disk"):
        if source == "disk":
            through.flush()
        through.generate(prompt.head, max_new_tokens=0)  # the exact prefix is the same for both
        out = through.generate(prompt.text, logprobs=True, chunk_cache={"method": method, "ratio": 0})
        reply = generated(out, prompt.spans(tokenizer))
        assert (tiers(reply), reply["recomputed_tokens"]) == ([source] * 3, 0)
        found[source] = out
    assert found["disk"]["output_ids"] == found["pool"]["output_ids"]
    assert output_logprobs(found["disk"]) == pytest.approx(output_logprobs(found["pool"]), abs=EXACTLY)


def test_some_chunks_in_the_pool_some_on_disk_some_nowhere(through, tokenizer, passages, stored):
    chunks = passages.several(4)
    stored(*chunks[:2])
    prime(through, chunks[2:3])
    prompt = marked([chunks[i] for i in (3, 0, 2, 1)], head="Mixed. ")
    out, reply = reuse(through, prompt, tokenizer)
    assert statuses(reply) == ["miss", "hit", "hit", "hit"]
    assert (tiers(reply)[1:], reasons(reply)[0]) == (["disk", "pool", "disk"], "not_stored")
    assert_right(through, prompt, out)


def test_the_host_tier_serves_what_has_left_the_pool(through, tokenizer, folder, passages):
    chunks = passages.several(2)
    prime(through, chunks)
    folder.wait_for(*chunks)
    fill_pool(through)
    prompt = marked(chunks[::-1], head="From the host. ")
    out, reply = reuse(through, prompt, tokenizer)
    assert (statuses(reply), tiers(reply)) == (["hit"] * 2, ["host"] * 2)
    assert_right(through, prompt, out)


def test_a_mode_that_looks_nothing_up_loads_nothing(through, passages, stored):
    chunk = passages()
    stored(chunk)
    before = metric(through, "loads_total")
    for mode in ("off", "exact"):
        through.generate(marked([chunk], head=f"{mode} ").text, chunk_cache={"mode": mode})
    assert metric(through, "loads_total") == before


def test_metrics_name_tier_and_outcome(through, tokenizer, passages, stored):
    chunks = passages.several(2)
    stored(*chunks)
    names = {"ok": {"tier": "disk", "outcome": "ok"}, "not_stored": {"tier": "none", "outcome": "not_stored"}}
    before = {name: metric(through, "loads_total", **labels) for name, labels in names.items()}
    bytes_before = metric(through, "load_bytes_total", tier="disk")
    reuse(through, marked([*chunks, passages()], head="Count. "), tokenizer)
    grown = {name: metric(through, "loads_total", **labels) - before[name] for name, labels in names.items()}
    assert grown == {"ok": 2, "not_stored": 1}
    assert metric(through, "load_bytes_total", tier="disk") > bytes_before
    for tier in ("host", "disk"):
        assert metric(through, "writes_total", tier=tier, outcome="ok") > 0
        assert metric(through, "entries", tier=tier) > 0
        assert metric(through, "bytes", tier=tier) > 0


def test_what_is_on_disk_is_not_warmed_again(through, tokenizer, passages, folder):
    chunks = passages.several(2)
    through.post("/chunk_cache/warm", {"texts": chunks[:1]})
    folder.wait_for(chunks[0])
    through.flush()
    lines = through.post("/chunk_cache/warm", {"texts": chunks}).text.splitlines()
    summary = json.loads(lines[-1])
    assert (summary["stored"], summary["already"], summary["present"]) == (1, 1, 2)
    assert summary["computed_tokens"] == len(chunk_ids(tokenizer, chunks[1]))
    _, reply = reuse(through, marked(chunks, head="Warm. "), tokenizer)
    assert tiers(reply) == ["disk", "pool"]
    through.post("/chunk_cache/evict", {"texts": chunks})
    lines = through.post("/chunk_cache/warm", {"texts": chunks}).text.splitlines()
    assert json.loads(lines[-1])["stored"] == 2, "what is being deleted is not stored"


def test_evict_tells_what_was_in_the_tiers_alone(through, passages, stored):
    chunk = passages()
    stored(chunk)
    through.flush()
    reply = through.post("/chunk_cache/evict", {"texts": [chunk, passages()]}).json()
    (evicted,) = reply["evicted"]
    assert (evicted["index"], evicted["variants"], evicted["freed_tokens"], evicted["tiers"]) == (0, 0, 0, {"disk": 1})
    assert [one["index"] for one in reply["not_stored"]] == [1]
    assert through.post("/chunk_cache/evict", {"texts": [chunk]}).json()["evicted"] == []


# Whose chunks.


@pytest.mark.parametrize("field", ["extra_key", "cache_salt"])
def test_a_tenant_never_loads_what_another_has_stored(through, tokenizer, passages, stored, field):
    chunk = passages()
    stored(chunk, **{field: "mine"})
    prompt = marked([chunk], head="Whose? ")
    for tenant in ({}, {field: "yours"}, {"extra_key" if field == "cache_salt" else "cache_salt": "mine"}):
        out, reply = reuse(through, prompt, tokenizer, **tenant)
        assert (statuses(reply), reasons(reply)) == (["miss"], ["not_stored"])
        through.flush()
    out, reply = reuse(through, prompt, tokenizer, **{field: "mine"})
    assert tiers(reply) == ["disk"]
    assert_right(through, prompt, out, **{field: "mine"})


# Two servers on one folder.


def test_what_one_server_writes_another_reads(through, evicting, tokenizer, passages, stored):
    chunks = passages.several(3)
    assert reasons(reuse(evicting, marked(chunks, head="Not yet. "), tokenizer)[1]) == ["not_stored"] * 3
    evicting.flush()
    stored(*chunks)
    prompt = marked(chunks[::-1], head="Pages of 16. ")
    out, reply = reuse(evicting, prompt, tokenizer)
    assert (statuses(reply), tiers(reply)) == (["hit"] * 3, ["disk"] * 3)
    assert_right(evicting, prompt, out)


@pytest.mark.all
def test_prepared_chunks_outlive_a_restart(through, servers, model_dir, folder, tokenizer, passages):
    a, b, c = passages.several(3)
    body = {"texts": [c, a, b], "neighbours": [[1, 2]]}
    assert json.loads(through.post("/chunk_cache/warm", body).text.splitlines()[-1])["stored"] == 1
    folder.wait_for(a, b, c)
    config = {"tiers": {"controller": False, "disk": {"path": str(folder.path)}}}
    flags = ("--chunk-cache", "--chunk-cache-config", json.dumps(config))
    server = servers.use("restarted", lambda: tier_server(model_dir, *flags))

    def is_known() -> bool:
        return json.loads(server.post("/chunk_cache/warm", {**body, "dry_run": True}).text)["already"] == 1

    wait_until(is_known, "the folder was not searched")
    prompt = marked([b, c], head="Restarted. ")
    out, reply = reuse(server, prompt, tokenizer)
    assert ([chunk.get("kind") == "prepared" for chunk in reply["chunks"]], tiers(reply)) == (
        [False, True],
        ["disk"] * 2,
    )
    assert_right(server, prompt, out)


def prime_in_full(server: Server, chunks: list[str], passages: Passages) -> None:
    """With enough text behind each chunk that its last page is whole: what the pool has in part is not written down."""
    for chunk in chunks:
        server.generate(marked([chunk], question=passages()).text, max_new_tokens=0)


def test_evicted_chunks_go_down_tier_by_tier(through, evicting, tokenizer, folder, passages):
    chunks = passages.several(2)
    prime_in_full(evicting, chunks, passages)
    fill_pool(evicting)
    assert not any(folder.files(chunk) for chunk in chunks)
    prompt = marked(chunks[::-1], head="Down one tier. ")
    from_host, reply = reuse(evicting, prompt, tokenizer)
    assert (statuses(reply), tiers(reply)) == (["hit"] * 2, ["host"] * 2)
    prime_in_full(evicting, passages.several(12), passages)  # more than the host tier keeps
    fill_pool(evicting)
    folder.wait_for(*chunks)
    from_disk, reply = reuse(evicting, prompt, tokenizer)
    assert tiers(reply) == ["disk"] * 2
    for out in (from_host, from_disk):
        assert_right(evicting, prompt, out)
    assert tiers(reuse(through, prompt, tokenizer)[1]) == ["disk"] * 2
    assert metric(evicting, "evictions_total", tier="host") > 0
    assert metric(evicting, "bytes", tier="host") <= 200_000


# A tier that is slow.


@pytest.mark.all
def test_the_first_request_of_a_new_server_is_served_from_the_folder(slow, stock, tokenizer, passages, stored):
    chunk = passages()
    stored(chunk)
    prompt = marked([chunk], head="New. ")
    out, reply = reuse(slow, prompt, tokenizer)
    assert tiers(reply) == ["disk"]
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))


STAGES = ("planning", "loading", "assembling")


@pytest.mark.all
def test_stages_are_spans_and_histograms(slow, collector, tokenizer, passages, stored):
    a = passages()
    stored(a)
    for _ in range(MIN_OBSERVATIONS):  # before, no saving is stated
        b = passages()
        slow.generate(marked([b]).text, max_new_tokens=1)
    before = [contract.metric(slow, f"{name}_seconds_sum") for name in STAGES]
    num_saved = contract.metric(slow, "saved_seconds_count")
    prompt = marked([b, a], head="Traced. ")
    reply = slow.generate(prompt.text, rid="traced", max_new_tokens=1)["meta_info"]["chunk_cache"]
    assert statuses(reply) == ["hit", "hit"]
    names = [f"chunk_cache_{name}" for name in STAGES]
    planning, loading, assembling = collector.spans_of("traced", names)
    assert SLOW["latency_s"] <= seconds(loading)
    assert max(planning.end_time_unix_nano, loading.end_time_unix_nano) <= assembling.start_time_unix_nano
    tokens = {name: count for name, count in reply.items() if name.endswith("_tokens")}
    assert attributes(planning).items() >= tokens.items()
    planned, loaded, assembled = (
        contract.metric(slow, f"{name}_seconds_sum") - then for name, then in zip(STAGES, before, strict=True)
    )
    assert loaded == pytest.approx(seconds(loading), abs=1e-6)
    assert assembled == pytest.approx(seconds(assembling), abs=1e-6)
    assert planned >= seconds(planning) - 1e-9
    assert contract.metric(slow, "saved_seconds_count") == num_saved + 1


@pytest.mark.all
def test_nobody_waits_for_the_loads_of_others(slow, tokenizer, passages, stored):
    chunks = passages.several(2)
    stored(*chunks)
    prompt = marked(chunks, head="Slow. ")
    with ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        waiting = pool.submit(reuse, slow, prompt, tokenizer)
        time.sleep(0.2)
        for _ in range(5):
            slow.generate(passages(), max_new_tokens=2)
        assert not waiting.done(), "five short requests took longer than the load"
        out, reply = waiting.result(timeout=REQUEST_TIMEOUT_S)
        took = time.monotonic() - began
    assert tiers(reply) == ["disk"] * 2
    assert took > 1.0, "the tier is not slow"
    assert_right(slow, prompt, out)


@pytest.mark.all
def test_requests_for_the_same_chunk_wait_for_one_load(slow, tokenizer, passages, stored):
    chunk = passages()
    stored(chunk)
    before = metric(slow, "load_bytes_total", tier="disk")
    with ThreadPoolExecutor(3) as pool:
        prompts = [marked([chunk], head=f"Together {i}. ") for i in range(3)]
        outs = list(pool.map(lambda prompt: reuse(slow, prompt, tokenizer), prompts))
    assert all(tiers(reply)[0] in ("disk", "pool") for _, reply in outs)
    assert "disk" in [tiers(reply)[0] for _, reply in outs]
    size = folder_size(slow, before)
    for prompt, (out, _) in zip(prompts, outs, strict=True):
        assert_right(slow, prompt, out)
    assert size <= 2 * 512 * len(tokenizer.encode(chunk)), "read more than once"


def folder_size(server: Server, before: float) -> float:
    return metric(server, "load_bytes_total", tier="disk") - before


@pytest.mark.all
@pytest.mark.parametrize("how", ["by id", "by closing the connection"])
def test_abort_while_loading(slow, tokenizer, passages, stored, how):
    chunks = passages.several(2)
    stored(*chunks)
    prompt = marked(chunks, head=f"Aborted {how}. ")
    params = {"max_new_tokens": 8, "custom_params": {"chunk_cache": FULL}}
    body = {"text": prompt.text, "rid": f"abort {how}", "sampling_params": params}
    if how == "by id":
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(slow.post, "/generate", body, check=False)
            time.sleep(0.3)
            assert not running.done()
            slow.post("/abort_request", {"rid": body["rid"]})
            answer = running.result(timeout=5).json()
        assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    else:
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{slow.url}/generate", json=body, timeout=0.4, trust_env=False)
    other = marked([chunks[1]], head="Another. ")
    out, reply = reuse(slow, other, tokenizer)
    assert tiers(reply) == ["disk"]
    assert_right(slow, other, out)
    slow.flush()  # refused while anything is left of a request
    assert slow.alive()


@pytest.mark.all
def test_a_load_that_takes_too_long_is_given_up(slow, stock, tokenizer, passages, stored):
    chunk = passages(150)
    stored(chunk)
    prompt = marked([chunk], head="Too late. ")
    before = metric(slow, "loads_total", outcome="tier_timeout")
    began = time.monotonic()
    out, reply = reuse(slow, prompt, tokenizer)
    assert time.monotonic() - began >= TIMEOUT_S
    assert (statuses(reply), reasons(reply)) == (["miss"], ["tier_timeout"])
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))
    assert metric(slow, "loads_total", outcome="tier_timeout") == before + 1
    # It was computed, so it is there now; and the tier is good for others once the load has ended.
    assert tiers(reuse(slow, marked([chunk], head="In time. "), tokenizer)[1]) == ["pool"]
    short = passages()
    stored(short)
    wait_until(lambda: _from_disk(slow, short, tokenizer), "the tier never came back", 60.0)


def _from_disk(server: Server, chunk: str, tokenizer: Any) -> bool:
    server.flush()
    return tiers(reuse(server, marked([chunk], head="Again. "), tokenizer)[1]) == ["disk"]


# Other models in the same folder.


@pytest.fixture(
    params=[
        "seed",
        pytest.param("rope", marks=pytest.mark.all),
        pytest.param("dtype", marks=pytest.mark.all),
    ],
)
def other(
    request: pytest.FixtureRequest, servers: OneAtATime, model_root: Path, model_dir: Path, folder: Folder
) -> Server:
    """A server for which the KV of the others is wrong."""
    model, flags = model_dir, tier_flags(host_bytes="50MB", disk={"path": str(folder.path)})
    if request.param == "seed":
        model = make_model("llama", model_root / "llama-other-seed", seed=1)
    elif request.param == "rope":
        model = make_model("llama", model_root / "llama-other-rope", rope="linear")
    else:
        flags = (*flags, "--dtype", "bfloat16")
    return servers.use(request.param, lambda: tier_server(model, *flags))


@pytest.mark.all
def test_another_model_never_matches(through, other, tokenizer, folder, passages, stored):
    chunks = passages.several(2)
    stored(*chunks)
    prompt = marked(chunks[::-1], head="Another model. ")
    out, reply = reuse(other, prompt, tokenizer)
    assert (statuses(reply), reasons(reply)) == (["miss"] * 2, ["not_stored"] * 2)
    folder.wait_for(*chunks, num=2)  # side by side
    for server in (other, through):
        server.flush()
        again = server.generate(prompt.text, logprobs=True, chunk_cache={"ratio": 0})
        assert tiers(generated(again, prompt.spans(tokenizer))) == ["disk"] * 2
    if "bfloat16" not in other.flags:  # which rounds differently from one batch to the next
        assert_right(other, prompt, out)
        other.flush()
        out, reply = reuse(other, prompt, tokenizer)
        assert tiers(reply) == ["disk"] * 2
        assert_right(other, prompt, out)


# Two ranks, each with files of its own.


@pytest.fixture(scope="module")
def ranks_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Folder:
    return Folder(tmp_path_factory.mktemp("ranks"), tokenizer)


@pytest.fixture
def ranks(servers: OneAtATime, model_dir: Path, ranks_folder: Folder) -> Server:
    flags = tier_flags(host_bytes="50MB", disk={"path": str(ranks_folder.path)})
    return servers.use("ranks", lambda: tier_server(model_dir, *flags, "--tp-size", "2", start_deadline_s=800.0))


def rank_of(path: Path) -> int:
    """Of the rank that has written a file."""
    text = (path.parents[2] / "fingerprint.json").read_text()
    return int(text.split('"tp_rank": ')[1].split(",")[0])


@pytest.mark.all
def test_two_ranks_reuse_from_disk(ranks, ranks_folder, stock, tokenizer, passages):
    chunks = passages.several(3)
    prime(ranks, chunks)
    assert sorted(map(rank_of, ranks_folder.wait_for(*chunks, num=2))) == [0] * 3 + [1] * 3
    ranks.flush()
    prompt = marked(chunks[::-1], head="Two ranks. ")
    out, reply = reuse(ranks, prompt, tokenizer)
    assert (statuses(reply), tiers(reply)) == (["hit"] * 3, ["disk"] * 3)
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))
    fill_pool(ranks)
    out, reply = reuse(ranks, prompt, tokenizer)
    assert tiers(reply) == ["host"] * 3
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))


@pytest.mark.all
@pytest.mark.parametrize("damage", [flip_a_byte, Path.unlink], ids=["damaged", "missing"])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_lacks_no_rank_uses(ranks, ranks_folder, stock, tokenizer, passages, rank, damage):
    chunks = passages.several(2)
    prime(ranks, chunks)
    ranks_folder.wait_for(*chunks, num=2)
    ranks.flush()
    (path,) = [path for path in ranks_folder.files(chunks[0]) if rank_of(path) == rank]
    damage(path)
    prompt = marked(chunks, head="One rank. ")
    out, reply = reuse(ranks, prompt, tokenizer)
    assert (statuses(reply), tiers(reply)) == (["miss", "hit"], [None, "disk"])
    # Rank 0 writes the reply: it names its own trouble, else that the ranks differ.
    assert reasons(reply)[0] == ("tier_corrupt" if rank == 0 and damage is flip_a_byte else "tier_ranks")
    same_logprobs(out, stock.generate(prompt.ids(tokenizer), logprobs=True))
    # It was computed, so it is stored anew; from then on all ranks find the same.
    wait_until(lambda: {rank_of(path) for path in ranks_folder.files(chunks[0])} == {0, 1}, "not stored again")
    wait_until(lambda: _from_disk(ranks, chunks[0], tokenizer), "the ranks never find the same again", 20.0)
