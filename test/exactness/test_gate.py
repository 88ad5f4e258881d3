"""The gate on SGLang's own scheduler: it finds what requests find, changes nothing, gives way, and loses nothing."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from exactness.gate_cases import CASES, FAULTS
from exactness.runner import Config, run_cases

pytestmark = pytest.mark.slow

ALL = (("verify_share", 1.0),)
ALONE = ("target", "learning", "tiers")  # with options of their own
UNREACHABLE = (("kl", 1e-6),)
CONFIGS = [
    Config(options=ALL),
    Config(options=ALL, page_size=16, chunked=True, overlap=False, tree_core="python"),
    pytest.param(Config(options=ALL, tp_size=2, chunked=True), marks=pytest.mark.all),
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=str)


@cache
def outcomes(config: Config) -> dict[str, Any]:
    names = ["target"] if config.target else [name for name in CASES if name not in ALONE]
    return run_cases(config, is_ours=True, names=names, module="exactness.gate_cases")


def outcome(config: Config, case: str) -> Any:
    value = outcomes(config)[case]
    assert not isinstance(value, str), value
    return value


def kl_of(exact: dict[int, float], fused: dict[int, float]) -> float:
    return sum(math.exp(p) * (p - fused[token]) for token, p in exact.items())


@each_config
def test_it_finds_what_requests_find(config: Config) -> None:
    found = outcome(config, "measures")
    measures = {one["rid"]: one for one in found["stats"]["newest"]}
    assert len(measures) == len(found["replies"]) == 8
    kls = []
    exact = iter(found["exact"])
    for reply in found["replies"]:
        first, teacher = next(exact), next(exact)
        measure = measures[reply.rid]
        kls.append(kl_of(first.top_logprobs[0], reply.top_logprobs[0]))
        assert measure["kl"] == pytest.approx(kls[-1], abs=1e-4)
        best = [max(first.top_logprobs[0], key=first.top_logprobs[0].get)]
        sent = [first.top_logprobs[0][reply.output_ids[0]], *teacher.input_logprobs[-len(reply.output_ids) + 1 :]]
        assert len(sent) == len(reply.output_ids)
        assert (best[0] == reply.output_ids[0]) <= (measure["agreement"] > 0)
        likeliest_at_first = max(first.top_logprobs[0].values())
        assert measure["nats_lost"] * len(sent) >= likeliest_at_first - sent[0] - 1e-4
    (row,) = found["stats"]["quality"]
    assert row["kl"]["count"] == 8
    assert row["kl"]["sum"] == pytest.approx(sum(kls), abs=1e-3)
    assert max(kls) > 1e-3, "nothing was approximate"


@each_config
def test_it_changes_nothing(config: Config) -> None:
    found = outcome(config, "measures")
    assert found["before"] == found["after"]


@each_config
def test_a_request_waits_for_one_step_at_most(config: Config) -> None:
    found = outcome(config, "arrivals")
    for wait, order in enumerate(found["orders"]):
        assert order[: wait + 2] == [*(["step"] * wait), "request", "forward"]
    assert found["stats"]["requests"]["given_up"] >= 3
    assert found["stats"]["requests"]["verified"] == 5


@each_config
def test_nothing_is_lost_or_counted_twice(config: Config) -> None:
    found = outcome(config, "faults")
    assert found["flushed"]
    waiting = {fault: found[fault][0] for fault in FAULTS}
    assert waiting == {"flush": 3, "evict": 3, "abort": 2, "weights_in_flight": 0, "weights": 3}
    after = found["weights"][1]
    assert after["chosen"] == 15
    assert after["verified"] == 8
    assert after["dropped"] == {"aborted": 1, "weights": 6}


@each_config
def test_nothing_is_evicted_for_it(config: Config) -> None:
    found = outcome(config, "full_pool")
    assert found["before"] == found["after"]
    assert found["stats"]["requests"]["waiting"] == 2
    assert found["room"]["verified"] == 2


@pytest.mark.parametrize("tp_size", [1, 2])
def test_what_cannot_be_met_is_computed_exactly(tp_size: int) -> None:
    *replies, named = outcome(Config(options=ALL, target=UNREACHABLE, tp_size=tp_size), "target")
    assert [replies[i]["ratio"] for i in (0, 2, 4)] == [0.15, 0.3, 0.6]
    assert [reply["target"]["step"] for reply in replies[:7]] == [0, 0, 1, 1, 2, 2, 3]
    for reply in replies[6:]:
        assert reply["reused_tokens"] == 0
        assert reply["fallback_reason"] == "target"
        assert reply["target"]["reason"].startswith("2 of the newest 2 replies of near-words at 0.6 had a KL above")
    assert named["ratio"] == 0.2
    assert named["reused_tokens"] > 0
    assert "target" not in named


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.all)])
def test_what_was_learned_survives_a_restart(tmp_path: Path, tp_size: int) -> None:
    options = (*ALL, ("verify_file", str(tmp_path / "gate.json")))

    def start(**fields: Any) -> dict[str, Any]:
        config = Config(options=options, target=UNREACHABLE, tp_size=tp_size, **fields)
        value = run_cases(config, is_ours=True, names=["learning"], module="exactness.gate_cases")["learning"]
        assert not isinstance(value, str), value
        return value

    first, second, other_model = start(), start(), start(kind="qwen2")
    assert first["known"]["quality"] == []
    assert first["reply"]["target"]["step"] == 0
    assert second["known"]["quality"] == first["learned"]["quality"]
    assert second["known"]["target"] == first["learned"]["target"]
    assert second["reply"]["target"]["step"] == 2
    assert other_model["known"]["quality"] == []
    assert other_model["reply"]["target"]["step"] == 0


@pytest.mark.parametrize("text", ["{", "[]", '{"version": 1}'])
def test_another_file_ends_the_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "notes.json"
    file.write_text(text)
    config = Config(options=(*ALL, ("verify_file", str(file))))
    with pytest.raises(RuntimeError, match=r"verify_file: .*; delete it, or name another"):
        run_cases(config, is_ours=True, names=["learning"], module="exactness.gate_cases")
    assert file.read_text() == text


def test_what_is_computed_exactly_is_not_loaded(tmp_path: Path) -> None:
    tiers = {"disk": str(tmp_path), "controller": False}
    config = Config(options=(*ALL, ("tiers", tiers)), target=UNREACHABLE)
    found = run_cases(config, is_ours=True, names=["tiers"], module="exactness.gate_cases")["tiers"]
    assert not isinstance(found, str), found
    assert {chunk["tier"] for chunk in found["loaded"]["chunks"]} == {"disk"}
    assert found["loaded"]["ratio"] == 0.15
    assert found["places"]["default"]["is_exact"]
    assert found["exact"]["target"]["step"] == 3
    assert found["exact"]["reused_tokens"] == 0
    before, after = found["disk"]
    assert after["hits"] == before["hits"] > 0
