"""The pure parts of the benchmarks of tiers: prompts, draws, counts, summaries. No server is started."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from benchmark.common.models import LlamaShape
from benchmark.tiers.loading import LOADED, Round, completed
from benchmark.tiers.prompts import Corpus, Size
from benchmark.tiers.report import idle_rows, loading_markdown, other_row, queued_row, real_bytes_per_s
from benchmark.tiers.soak_report import shares, slope, soak_markdown, summarize
from benchmark.tiers.traffic import Zipf, difference, place_of

SIZE = Size(LlamaShape(2, 64, 2, 2, 128, 256), system_len=4, chunk_len=8, num_chunks=8, question_len=3)
RUN: dict[str, Any] = {
    "command": "python x.py",
    "machine": {"cpu": "a CPU", "cores": 2, "ram_gib": 4, "accelerator": None, "load_1min": 0.1},
    "versions": {"python": "3.11", "commit": "0", "date": "today"},
    "model": "a model",
    "prompt": str(SIZE),
    "flags": ["--x"],
    "load_1min_end": 0.2,
}


def test_a_prompt_loads_as_many_chunks_as_it_says() -> None:
    corpus = Corpus(SIZE, sum(LOADED))
    one, seen, fronts = Round(corpus), set(), []
    for num_loaded in LOADED:
        prompt = one.prompt(num_loaded)
        assert len(prompt.ids) == SIZE.prompt_len
        chunks = [tuple(prompt.ids[start:end]) for start, end in prompt.spans]
        assert len(set(chunks)) == SIZE.num_chunks
        assert len(set(chunks) - seen) == num_loaded
        seen |= set(chunks)
        fronts.append(chunks[0])
    assert len(set(fronts)) == len(fronts)


def test_bytes_of_a_chunk() -> None:
    assert SIZE.bytes_per_token == 2 * 2 * 64 * 4
    assert SIZE.num_bytes == 8 * 8 * SIZE.bytes_per_token


def test_zipf_draws_different_items_and_prefers_the_first() -> None:
    draw, counts = random.Random(0), Counter()
    zipf = Zipf(range(100), 1.0)
    for _ in range(2000):
        found = zipf.draw(draw, 3)
        assert len(set(found)) == 3
        counts.update(found)
    assert counts[0] > 3 * counts[9] > 9 * counts[99]


def test_requests_count_in_part_at_the_ends_of_a_window() -> None:
    assert completed([(0.0, 2.0), (2.0, 3.0), (3.5, 5.5), (9.0, 10.0)], 1.0, 4.0) == pytest.approx(0.5 + 1 + 0.25)


def test_slope() -> None:
    assert slope([0, 1, 2, 3], [5, 7, 9, 11]) == pytest.approx(2)
    assert slope([1], [1]) == 0


def test_place_and_difference() -> None:
    assert place_of({"status": "hit", "tier": "disk"}) == "disk"
    assert place_of({"status": "miss", "tier": None}) == "computed"
    assert place_of({"status": "prefix", "tier": "pool"}) == "prefix"

    def reply(*pairs: tuple[float, int]) -> dict[str, Any]:
        return {"meta_info": {"output_token_logprobs": [(value, token, None) for value, token in pairs]}}

    assert difference(reply((-1.0, 5), (-2.0, 6)), reply((-1.0, 5), (-2.5, 6))) == 0.5
    assert difference(reply((-1.0, 5), (-2.0, 6)), reply((-1.25, 4), (-9.0, 6))) == 0.25


def test_a_slower_tier_stands_for_a_slower_one() -> None:
    assert real_bytes_per_s(4.0, 4192, 4096, 0.15) == pytest.approx(real_bytes_per_s(1.0, 4192, 4096, 0.15) / 4)


def test_loading_report() -> None:
    report = {
        **RUN,
        "num_bytes": SIZE.num_bytes,
        "bytes_per_s": 1e6,
        "minutes": 1.0,
        "idle": idle_rows("prefetch", 0.5, {8: [5.0, 6.0], 0: [1.0, 1.0], 2: [2.0, 2.5], "compute": [9.0]}),
        "queued": [queued_row("prefetch", 1.5, 1.0, {"disk": [2.04, 2.0], "pool": [2.0, 2.0]})],
        "others": [other_row("prefetch", 4.0, [(10.0, 9.0), (10.0, 10.0)])],
    }
    assert [row["factor"] for row in report["idle"]] == [4.0, 0.0, 1.0, 0.0]
    assert report["queued"][0]["met"]
    assert "5 %: met" in "\n".join(loading_markdown(report))


def soaked(**changes: Any) -> dict[str, Any]:
    sample = {
        "at_s": 0.0,
        "rss": 10**9,
        "num_threads": 9,
        "num_fds": 50,
        "queued_write_bytes": 0,
        "host_entries": 3,
        "host_bytes": 30,
        "host_evictions": 1,
        "disk_entries": 5,
        "disk_bytes": 50,
        "disk_evictions": 2,
    }
    end = {
        "pool_capacity": 100,
        "pool_free": 60,
        "pool_evictable": 40,
        "pool_protected": 0,
        "held_requests": 0,
        "queued_write_bytes": 0,
        "disk_entries": 5,
        "disk_files": 5,
        "pool_free_after_flush": 100,
        "host_entries_after_flush": 0,
        "alive": True,
        "bad_log_lines": [],
    }
    return {
        **RUN,
        "minutes": 1.0,
        "chunk_bytes": 10,
        "num_chunks": 100,
        "num_chunks_seen": 90,
        "num_requests": 10,
        "num_errors": 0,
        "num_clients": 2,
        "exponent": 0.9,
        "interval_s": 20.0,
        "reasons": {"not_stored": 4},
        "tiers": {"loading": "prefetch", "controller": False},
        "budgets": {"pool": 100, "host": 30, "disk": 50},
        "checks": [{"kind": "single", "at_s": 1.0, "places": ("disk",), "difference": 1e-6}],
        "hits": [{"at_s": 0.0, "pool": 3, "computed": 1}, {"at_s": 20.0, "disk": 4}],
        "samples": [{**sample, "at_s": float(at_s)} for at_s in range(0, 60, 5)],
        "end": {**end, **changes},
    }


def test_soak_report() -> None:
    report = soaked()
    report["summary"] = summarize(report)
    assert all(row["met"] for row in report["summary"]["holds"])
    assert report["summary"]["shares"] == {"pool": 3 / 8, "disk": 4 / 8, "computed": 1 / 8}
    assert "**no**" not in "\n".join(soak_markdown(report))


@pytest.mark.parametrize(
    "changes",
    [{"pool_free": 59}, {"held_requests": 1}, {"disk_files": 6}, {"alive": False}, {"pool_free_after_flush": 99}],
    ids=lambda changes: next(iter(changes)),
)
def test_a_soak_that_leaves_something_behind_is_found(changes: dict[str, Any]) -> None:
    assert sum(not row["met"] for row in summarize(soaked(**changes))["holds"]) == 1


def test_a_wrong_reply_is_found() -> None:
    report = soaked()
    report["checks"][0]["difference"] = 1e-3
    assert [row["met"] for row in summarize(report)["holds"]].count(False) == 1


def test_shares_of_nothing() -> None:
    assert shares([]) == {}
