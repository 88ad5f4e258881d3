"""Replicas behind a gateway: each is a simulation of its own; a policy chooses as one that reads everything would."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.simulate import fleet
from benchmark.simulate.engine import Replay, simulate
from benchmark.simulate.fleet import MATCH_SHARE, POLICIES, route
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.simulate import main
from benchmark.simulate.tally import FIELDS
from benchmark.simulate.trace import PRESETS, Request, Trace, generate

SPEC = replace(PRESETS["sessions"], num_requests=250, num_chunks=40, chunk_len=60, chunks_per_request=3)
TIGHT = Settings(3_000, alpha=None)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return generate(SPEC)


@pytest.mark.parametrize("policy", POLICIES)
def test_two_replicas_are_two_simulations(trace: Trace, policy: str) -> None:
    routed = route(trace, 2, policy, TIGHT)
    assert set(routed.choices) == {0, 1}
    for at in range(2):
        own = tuple(one for one, choice in zip(trace.requests, routed.choices, strict=True) if choice == at)
        assert routed.tallies[at] == simulate(replace(trace, requests=own), TIGHT).tally()
    assert routed.total.num_requests == len(trace.requests)
    assert all(getattr(routed.total, name) == sum(getattr(t, name) for t in routed.tallies) for name in FIELDS)


def test_one_replica_is_the_same_for_all(trace: Trace) -> None:
    assert len({route(trace, 1, policy, TIGHT).total for policy in POLICIES}) == 1


def test_the_prefix_policy_against_all_prompts_that_were_sent(trace: Trace) -> None:
    routed = route(trace, 2, "cache-aware", TIGHT)
    prompts: list[list[list[int]]] = [[], []]
    tokens = [0, 0]
    for request, choice in zip(trace.requests, routed.choices, strict=True):
        prompt = [number for number, _ in request.blocks]
        shared = [max((_shared(trace, prompt, other) for other in prompts[at]), default=0) for at in range(2)]
        is_match = max(shared) >= MATCH_SHARE * trace.prompt_len(request)
        assert choice == (shared.index(max(shared)) if is_match else tokens.index(min(tokens)))
        prompts[choice].append(prompt)
        tokens[choice] += trace.prompt_len(request)


def _shared(trace: Trace, prompt: list[int], other: list[int]) -> int:
    same = 0
    while same < min(len(prompt), len(other)) and prompt[same] == other[same]:
        same += 1
    return trace.system_len + sum(trace.lengths[number] for number in prompt[:same])


def test_what_is_held_against_all_variants(trace: Trace, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Counter[str]()
    quick = fleet.held_tokens

    def slow(replica: Replay, request: Request) -> int:
        best = dict.fromkeys((replica.keys[chunk] for chunk in request.chunks), 0)
        for variant in replica.manager.index:
            if variant.key in best:
                best[variant.key] = max(best[variant.key], replica.pool.resolve(variant))
        asked["held" if any(best.values()) else "nothing"] += 1
        assert sum(best.values()) == quick(replica, request)
        return sum(best.values())

    monkeypatch.setattr(fleet, "held_tokens", slow)
    routed = route(trace, 2, "held", TIGHT)
    assert min(asked["held"], asked["nothing"]) > 0
    monkeypatch.undo()
    assert route(trace, 2, "held", TIGHT).choices == routed.choices
    counts = Counter(routed.choices)
    assert max(counts.values()) <= 0.65 * len(trace.requests), "nobody gets all"


def test_equal_passages_go_to_one_place() -> None:
    requests = tuple(
        Request(chunks, 5, session) for session, chunks in enumerate([(1, 2, 3), (3, 1, 2), (2, 3, 1)] * 5)
    )
    trace = Trace("by hand", requests, (10,) * 4, 0)
    assert len(set(route(trace, 4, "passages", Settings(1_000, alpha=None)).choices)) == 1
    assert len(set(route(trace, 4, "session", Settings(1_000, alpha=None)).choices)) > 1


def test_a_replica_must_hold_a_prompt(trace: Trace) -> None:
    with pytest.raises(SettingsError, match="pool_tokens: 10 tokens do not hold the longest prompt"):
        route(trace, 2, "random", Settings(10))


def test_the_command_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["fleet", "--trace", "zipf", "--set", "num_requests=60", "num_chunks=30", "chunk_len=50"]
    assert main([*command, "--replicas", "1", "2", "--pool", "2000", "--out", str(tmp_path)]) == 0
    page = (tmp_path / "fleet.md").read_text()
    assert all(f"| {policy} |" in page for policy in POLICIES)
    assert len((tmp_path / "fleet.csv").read_text().splitlines()) == 1 + 2 * (7 + 4)
    assert main([*command, "--replicas", "0"]) == 2
    assert "--replicas: 0 is not at least 1" in capsys.readouterr().err
