"""Bench: runs parts of a trace against the systems of a fleet, and keeps every run.

    system:    flush | warm-up: cold | closed loop | rates ... | flush | next system ...
    prompts:           0 ... 19        20 ... 59     each rate has its own prompts, the same for all systems

Between two flushes a system gets no prompt twice: the exact cache would hold the whole prompt.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from benchmark.quality.question import DataError
from benchmark.serving.arrivals import poisson
from benchmark.serving.client import Run, closed_loop, joined, open_loop
from benchmark.serving.fleet import Fleet, machine_speed
from benchmark.serving.measures import summarize
from benchmark.serving.prompt import Prompt
from benchmark.serving.systems import System, Writer

Tick = Callable[[str], None]


class MeasurementError(RuntimeError):
    """A run cannot be used; the message says which, and why."""


class TraceTooShort(DataError):
    """The trace has too few prompts left; the message says how many were wanted."""


class Tape:
    """Hands out the prompts of a trace; all systems that ask with one label get the same prompts."""

    def __init__(self, prompts: Sequence[Prompt]) -> None:
        self._prompts = prompts
        self._slices: dict[str, slice] = {}
        self._used = 0

    def take(self, label: str, num: int) -> Sequence[Prompt]:
        """The `num` prompts of a label; no other label gets them.

        Raises:
            TraceTooShort: fewer prompts are left.
        """
        if label not in self._slices:
            if self._used + num > len(self._prompts):
                left = len(self._prompts) - self._used
                raise TraceTooShort(f"{label}: {num} prompts wanted, {left} of the trace left; give a longer trace")
            self._slices[label] = slice(self._used, self._used + num)
            self._used += num
        taken = self._prompts[self._slices[label]]
        assert len(taken) == num, f"{label} was taken with another length"
        return taken


@dataclass
class Bench:
    """A fleet and a trace, and the runs so far.

    Attributes:
        runs: one summary per run: system, phase, clients or rate, the machine's speed just before, measures.
    """

    fleet: Fleet
    tape: Tape
    tick: Tick
    runs: list[dict[str, Any]] = field(default_factory=list)

    def begin(self, system: System) -> Subject:
        """Starts with a system: its caches are empty, and its `Writer` has sent nothing."""
        self.fleet.use(system.kind).flush()
        return Subject(self, system, Writer(system, self.fleet.pool_len))


@dataclass(frozen=True)
class Subject:
    """One system under test, from one flush to the next."""

    bench: Bench
    system: System
    writer: Writer

    def closed(
        self, phase: str, num: int, num_clients: int, repeats: int = 1, output_len: int | None = None
    ) -> tuple[dict[str, Any], Run]:
        """Sends the next `num` prompts from `num_clients` clients in a closed loop; `output_len` replaces their own.

        `repeats` splits the prompts into so many runs of equal length, one after the other. The summary is of all
        together; it also has the requests a second of each run.
        """
        prompts = self.bench.tape.take(phase, num)
        if output_len is not None:
            prompts = [replace(prompt, output_len=output_len) for prompt in prompts]
        bodies = [self.writer.body(prompt) for prompt in prompts]
        edges = [i * num // repeats for i in range(repeats + 1)]
        runs: list[Run] = []

        def load(url: str) -> Run:
            runs.extend(closed_loop(url, bodies[a:b], num_clients) for a, b in itertools.pairwise(edges))
            return joined(runs)

        summary, run = self._measure(phase, load, clients=num_clients)
        if repeats > 1:
            summary["requests_per_s_runs"] = [round(len(one.answered) / one.seconds, 4) for one in runs]
        return summary, run

    def poisson(
        self, phase: str, num: int, rate: float, seed: int, bound_s: float | None
    ) -> tuple[dict[str, Any], Run]:
        """Sends the next `num` prompts at a rate; all systems get the same arrivals."""
        return self.at(phase, poisson(num, rate, seed), bound_s, rate=round(rate, 4))

    def at(
        self, phase: str, arrivals_s: Sequence[float], bound_s: float | None, **about: Any
    ) -> tuple[dict[str, Any], Run]:
        """Sends the next prompts at given times; `about` goes into the summary."""
        bodies = [self.writer.body(prompt) for prompt in self.bench.tape.take(phase, len(arrivals_s))]
        return self._measure(phase, lambda url: open_loop(url, bodies, arrivals_s), bound_s=bound_s, **about)

    def _measure(
        self, phase: str, load: Callable[[str], Run], bound_s: float | None = None, **about: Any
    ) -> tuple[dict[str, Any], Run]:
        server = self.bench.fleet.use(self.system.kind)
        speed = machine_speed()
        run = load(server.url)
        summary = {
            "system": self.system.name,
            "phase": phase,
            **about,
            "machine_gflops": speed,
            **summarize(run, bound_s),
        }
        self.bench.runs.append(summary)
        self.bench.tick(
            f"{self.system.name}, {phase}: {summary['requests_per_s']:.2f}/s, TTFT {_text(summary['ttft_p50_s'])} / "
            f"{_text(summary['ttft_p99_s'])} s, rows {summary['mean_rows']:.0f} of {summary['mean_prompt_len']:.0f}"
        )
        if summary["num_failed"]:
            self.bench.tick(f"  {summary['num_failed']} failed: {summary['first_error']}")
        return summary, run


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
