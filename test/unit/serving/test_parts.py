"""The main part, against systems whose times are known: who sets rates and bound, and what is asked once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from benchmark.serving.bench import MeasurementError, TraceTooShort
from benchmark.serving.client import Record, Run
from benchmark.serving.measures import summarize
from benchmark.serving.parts import pulse, serve
from benchmark.serving.plan import RAGPULSE, STEADY, Load, Plan
from benchmark.serving.systems import System, parse_systems

LOAD = Load(fractions=(0.3, 0.7, 1.0), bound_factor=3.0, refinements=1, tries=1)
CLOSED_RATE = 2.0


@dataclass
class FakeBench:
    """Its systems answer with the same time to first token up to their capacity, and ten times later above it.

    Attributes:
        slowest: the slowest request of a run, in times of the others.
        num_left: rates for which there are prompts.
        asked: rates by system.
        output_lens: that were asked for in the place of the trace's, by phase.
    """

    capacity: dict[str, float]
    slowest: float = 1.0
    num_left: int | None = None
    asked: dict[str, list[float]] = field(default_factory=dict)
    output_lens: dict[str, int | None] = field(default_factory=dict)
    tick: Callable[[str], None] = print

    def begin(self, system: System) -> FakeSubject:
        self.asked[system.name] = []
        return FakeSubject(self, system.name)


@dataclass
class FakeSubject:
    bench: FakeBench
    name: str

    @property
    def system(self) -> System:
        return parse_systems([self.name])[0]

    def closed(
        self, phase: str, num: int, num_clients: int, repeats: int = 1, output_len: int | None = None
    ) -> tuple[dict[str, Any], Run]:
        self.bench.output_lens[phase] = output_len
        return self._measure([0.5] * num, num / CLOSED_RATE, None)

    def poisson(
        self, phase: str, num: int, rate: float, seed: int, bound_s: float | None
    ) -> tuple[dict[str, Any], Run]:
        if len(self.bench.asked[self.name]) == self.bench.num_left:
            raise TraceTooShort("no prompts left")
        self.bench.asked[self.name].append(rate)
        ttft_s = 0.5 if rate <= self.bench.capacity[self.name] else 5.0
        summary, run = self._measure([ttft_s] * (num - 1) + [ttft_s * self.bench.slowest], num / rate, bound_s)
        return {"rate": round(rate, 4), **summary}, run

    def _measure(self, ttfts_s: list[float], seconds: float, bound_s: float | None) -> tuple[dict[str, Any], Run]:
        run = Run(tuple(Record(0.0, ttft_s, ttft_s, prompt_len=9, output_len=1) for ttft_s in ttfts_s), seconds, ())
        return summarize(run, bound_s), run


def test_stock_sets_rates_and_bound_and_is_asked_once_at_each_rate() -> None:
    bench = FakeBench({"stock": 1.5, "epic@0.15": 9.0})
    found = serve(bench, parse_systems(["stock", "epic@0.15"]), (), LOAD)  # type: ignore[arg-type]
    assert (found["base_rate"], found["bound_s"]) == (CLOSED_RATE, 1.5)
    stock, ours = bench.asked["stock"], bench.asked["epic@0.15"]
    assert stock == pytest.approx([0.6, 1.4, 2.0, (1.4 * 2.0) ** 0.5])
    assert ours[:3] == stock[:3]
    for name, asked in bench.asked.items():
        points = found["points"][name]
        assert [point["rate"] for point in points] == pytest.approx(asked, abs=1e-4)
        assert [point["bound_s"] for point in points] == [1.5] * len(asked)
        good = [0.0 if rate > bench.capacity[name] else rate for rate in asked]
        assert [point["goodput_per_s"] for point in points] == pytest.approx(good, abs=1e-3)
    assert found["highest_rate"]["stock"] == stock[1] < found["highest_rate"]["epic@0.15"] <= 9.0


def test_a_low_rate_beyond_the_bound_ends_the_sweep() -> None:
    bench = FakeBench({"stock": 1.5}, slowest=30.0)
    found = serve(bench, parse_systems(["stock"]), (), LOAD)  # type: ignore[arg-type]
    assert bench.asked["stock"] == pytest.approx([0.6])
    assert [point["kept"] for point in found["points"]["stock"]] == [False]
    assert found["highest_rate"] == {"stock": None}


def test_the_end_of_the_trace_ends_the_sweep_and_keeps_what_was_measured() -> None:
    bench = FakeBench({"stock": 9.0}, num_left=2)
    found = serve(bench, parse_systems(["stock"]), (), LOAD)  # type: ignore[arg-type]
    assert len(found["points"]["stock"]) == 2
    assert found["ended_early"] == ["stock"]


def test_no_rate_is_taken_from_a_run_of_which_requests_failed() -> None:
    class Broken(FakeSubject):
        def _measure(self, ttfts_s: list[float], seconds: float, bound_s: float | None) -> tuple[dict[str, Any], Run]:
            run = Run((Record(0.0, error="500: no"), Record(0.0, 1.0, 1.0, prompt_len=9, output_len=1)), seconds, ())
            return {"system": self.name, "phase": "closed", **summarize(run, bound_s)}, run

    bench = FakeBench({"stock": 9.0})
    bench.begin = lambda system: Broken(bench, system.name)  # type: ignore[method-assign]
    with pytest.raises(MeasurementError, match=r"stock, closed: 1 of 2 requests failed.*500: no"):
        serve(bench, parse_systems(["stock"]), (), LOAD)  # type: ignore[arg-type]


def test_only_answers_of_the_warm_up_are_cut_short() -> None:
    bench = FakeBench({"stock": 9.0})
    pulse(bench, parse_systems(["stock"]), LOAD, warmup_output_len=1)  # type: ignore[arg-type]
    assert bench.output_lens == {"cold": 1, "closed": None}


@pytest.mark.parametrize("plan", [RAGPULSE, STEADY])
def test_plans_take_no_more_than_the_trace_has(plan: Plan) -> None:
    assert plan.load.warmup + plan.load.closed + plan.pulse.num_timed <= 4000  # requests of RAGPulse
