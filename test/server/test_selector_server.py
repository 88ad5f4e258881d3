"""cacheclip on a real server, with an auxiliary model of another class and tokenizer: scores while the request waits,
and a selector that is killed, stopped or given a wrong tokenizer while requests come.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from server.conftest import FLAGS, STRICT
from server.contract import Passages, check_reply, marked, prime, same_logprobs
from server.tier_contract import wait_until
from server_fixture import Server
from tiny_models import make_model
from unit.selector.conftest import other_tokenizer

pytestmark = pytest.mark.server

TIMEOUT_S = 3.0
PATIENCE_S = 180.0
CLIP = {"method": "cacheclip", "ratio": 0.5, "explain": True}
REASONS = {None, "selector_timeout", "selector_unavailable"}


@pytest.fixture(scope="module")
def selector_dir(model_root: Path) -> Path:
    folder = make_model("qwen2", model_root / "selector", layers=3, vocab=400, tokenizer=False, seed=3)
    other_tokenizer(380).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def clip(model_dir: Path, selector_dir: Path) -> Iterator[Server]:
    config = f'{{"selector": {{"timeout_s": {TIMEOUT_S}, "num_threads": 1}}}}'
    flags = ("--chunk-cache", "--chunk-cache-selector", str(selector_dir), "--chunk-cache-config", config)
    with Server(model_dir, *FLAGS, "--enable-metrics", *flags, env=STRICT) as server:
        yield server


def selector_of(server: Server) -> psutil.Process:
    """Its process."""
    found = [
        child
        for child in psutil.Process(server.pid).children(recursive=True)
        if "sglang_chunk_cache.selector" in child.cmdline()
    ]
    assert len(found) == 1, found
    return found[0]


def counted(server: Server, name: str) -> float:
    """A counter of the selector."""
    lines = (line.split() for line in server.get("/metrics").text.splitlines())
    return sum(float(words[1]) for words in lines if words and words[0] == f"sglang:chunk_cache_selector_{name}")


def ask(server: Server, chunks: list[str], **options: Any) -> tuple[Any, Any]:
    """Output and reply."""
    out = server.generate(marked(chunks).text, chunk_cache={**CLIP, **options}, logprobs=True)
    return out, check_reply(out["meta_info"]["chunk_cache"], out["meta_info"]["prompt_tokens"])


def scored(server: Server, chunks: list[str], **options: Any) -> Any:
    """A reply with scores of the selector, once it is there and this machine has time for it."""
    replies = []

    def has_scores() -> bool:
        replies.append(ask(server, chunks, **options)[1])
        return replies[-1]["method"] == "cacheclip"

    wait_until(has_scores, "the selector gave no scores", PATIENCE_S)
    return replies[-1]


def test_scores_choose_and_the_question_matters(clip: Server, passages: Passages) -> None:
    chunks = passages.several(3, 20)
    prime(clip, chunks)
    reply = scored(clip, [chunks[i] for i in (2, 0, 1)], options={"group_size": 0})
    assert reply["fallback_reason"] is None
    assert reply["recomputed_tokens"] == -(-reply["reused_tokens"] // 2)
    assert 0 < reply["selector_seconds"] < TIMEOUT_S + 1
    rows = [chunk["recomputed_positions"] for chunk in reply["chunks"]]
    starts = [chunk["start"] for chunk in reply["chunks"]]
    first = [list(range(start, start + len(row))) for start, row in zip(starts, rows, strict=True)]
    assert rows != first, "these are the first tokens, which epic and near would choose"
    grouped = scored(clip, [chunks[i] for i in (1, 0, 2)])
    assert grouped["recomputed_tokens"] <= -(-grouped["reused_tokens"] // 2)
    assert counted(clip, 'answers_total{reason="none"}') >= 2


def test_the_same_by_token_ids_in_a_chat_and_in_a_stream(clip: Server, passages: Passages, tokenizer: Any) -> None:
    chunks = passages.several(3, 20)
    prime(clip, chunks)
    order = [chunks[i] for i in (2, 0, 1)]
    wanted = scored(clip, order, options={"group_size": 0})
    prompt = marked(order)
    options = {**CLIP, "options": {"group_size": 0}, "spans": prompt.spans(tokenizer)}
    out = clip.generate(prompt.ids(tokenizer), chunk_cache=options)
    reply = out["meta_info"]["chunk_cache"]
    assert [chunk.get("recomputed_positions") for chunk in reply["chunks"]] == [
        chunk["recomputed_positions"] for chunk in wanted["chunks"]
    ]
    several = clip.generate([prompt.text, prompt.text], chunk_cache={**CLIP}, sampling={"n": 2})
    assert {out["meta_info"]["chunk_cache"]["method"] for out in several} <= {"cacheclip", "near"}
    body = {"messages": prompt.text, "custom_params": {"chunk_cache": CLIP}}
    chat = clip.chat(body.pop("messages"), **body)["sglext"]["chunk_cache"]
    assert chat["fallback_reason"] in REASONS


def test_ratio_one_is_a_full_prefill_and_needs_no_scores(clip: Server, passages: Passages) -> None:
    chunks = passages.several(3, 20)
    prime(clip, chunks)
    order = [chunks[i] for i in (2, 0, 1)]
    out, reply = ask(clip, order, ratio=1.0)
    assert (reply["method"], reply["fallback_reason"]) == ("cacheclip", None)
    assert reply["recomputed_tokens"] == reply["reused_tokens"] > 0
    assert "selector_seconds" not in reply
    exact = clip.generate(marked(order).text, chunk_cache={"mode": "off"}, logprobs=True)
    same_logprobs(out, exact)


def kill(process: psutil.Process, selector_dir: Path) -> None:
    process.send_signal(signal.SIGKILL)


def stop(process: psutil.Process, selector_dir: Path) -> None:
    process.send_signal(signal.SIGSTOP)


def start_with_a_wrong_tokenizer(process: psutil.Process, selector_dir: Path) -> None:
    other_tokenizer(600).save_pretrained(selector_dir)
    process.send_signal(signal.SIGKILL)


@pytest.mark.parametrize(
    "fault", [*(pytest.param(one, marks=pytest.mark.all) for one in (kill, stop)), start_with_a_wrong_tokenizer]
)
def test_faults_under_load_lose_nothing(
    clip: Server, passages: Passages, selector_dir: Path, fault: Callable[[psutil.Process, Path], None]
) -> None:
    chunks = passages.several(4, 20)
    prime(clip, chunks)
    scored(clip, chunks[::-1])
    kept = Path(shutil.copytree(selector_dir, f"{selector_dir}-{fault.__name__}"))
    process = selector_of(clip)

    def one(i: int) -> str | None:
        if i == 6:
            fault(process, selector_dir)
        order = [chunks[(i + k) % 4] for k in (2, 0, 3)]
        out, reply = ask(clip, order)
        assert len(out["output_ids"]) == 8
        assert (reply["method"] == "near") == (reply["fallback_reason"] is not None), reply
        return reply["fallback_reason"]

    with ThreadPoolExecutor(4) as pool:
        reasons = Counter(pool.map(one, range(24)))
    assert set(reasons) <= REASONS
    assert reasons.total() - reasons[None] > 0, "the fault was not felt"
    assert all(f"is recomputed by near ({reason})" in clip.log for reason in reasons if reason)
    for name in os.listdir(kept):
        shutil.copy(kept / name, selector_dir / name)
    scored(clip, [chunks[i] for i in (1, 3, 0)])
    assert selector_of(clip).pid != process.pid
    exact, _ = ask(clip, chunks, ratio=1.0)
    same_logprobs(exact, clip.generate(marked(chunks).text, chunk_cache={"mode": "off"}, logprobs=True))
    assert counted(clip, "restarts_total") >= 1
    assert clip.alive()


@pytest.mark.all
def test_it_goes_with_the_server(model_dir: Path, selector_dir: Path) -> None:
    with Server(model_dir, *FLAGS, "--chunk-cache", "--chunk-cache-selector", str(selector_dir)) as server:
        process = selector_of(server)
    wait_until(lambda: not process.is_running(), "the selector outlived its server", PATIENCE_S)
