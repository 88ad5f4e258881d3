"""Parts of the benchmark; each function returns what the report shows of its part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmark.common.paired import loss_of_pairs
from benchmark.serving.bench import Bench, MeasurementError, Subject, Tick, TraceTooShort
from benchmark.serving.client import Run
from benchmark.serving.fleet import Fleet, machine_speed
from benchmark.serving.measures import share_right, summarize
from benchmark.serving.plan import Load
from benchmark.serving.sglang_tool import SharedScale, ask_shared
from benchmark.serving.sweep import NothingLeft, Sweep, sweep
from benchmark.serving.systems import STOCK, System

MAX_SHARED_LEN = 128  # tokens that prompts without a common chunk share: the system prompt
T = TypeVar("T")
TRAINED_RUNS = 3  # runs that the questions to the trained model are split into
MAX_LOSS = 2.0  # percent of throughput on a trace without a repeated chunk, or with nothing but shared prefixes


def serve(
    bench: Bench,
    swept: Sequence[System],
    closed_only: Sequence[System],
    load: Load,
    *,
    bound_s: float | None = None,
    base_rate: float | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Runs warm-up, closed loop and, for `swept`, rates. Stock goes first: its numbers set the rates and the bound.

    Args:
        bound_s: bound of the p99 of TTFT; by default `load.bound_factor` times stock's median at the low rate.
        base_rate: requests a second that `load.fractions` are shares of; by default stock's in the closed loop.
    """
    assert (swept[0].name == STOCK) or (bound_s and base_rate), "without stock, give bound and base rate"
    sweeps: dict[str, Sweep] = {}
    for system in swept:
        subject = bench.begin(system)
        closed = _warm_and_close(subject, load)
        if base_rate is None:
            _check_answered(closed)
            base_rate = closed["requests_per_s"]
        rates = [share * base_rate for share in load.fractions]
        measured: dict[float, dict[str, Any]] = {}
        if bound_s is None:
            low, run = _at_rate(subject, load, rates[0], None, seed)
            _check_answered(low)
            bound_s = load.bound_factor * low["ttft_p50_s"]
            low |= summarize(run, bound_s)  # now there is a bound for goodput
            bench.tick(f"bound of the p99 of the time to first token: {bound_s:.2f} s")
            measured[rates[0]] = low  # a second run of these prompts would find them in stock's exact cache
        sweeps[system.name] = _sweep(subject, load, rates, bound_s, seed, measured)
    for system in closed_only:
        _warm_and_close(bench.begin(system), load)
    return {
        "bound_s": bound_s,
        "base_rate": base_rate,
        "highest_rate": {name: found.highest for name, found in sweeps.items()},
        "ended_early": [name for name, found in sweeps.items() if not found.is_complete],
        "points": {name: list(found.points) for name, found in sweeps.items()},
    }


def _check_answered(summary: Mapping[str, Any]) -> None:
    """Raises MeasurementError if a request failed in a run that sets the rates or the bound."""
    if summary["num_failed"]:
        raise MeasurementError(
            f"{summary['system']}, {summary['phase']}: {summary['num_failed']} of {summary['num_requests']} requests "
            f"failed, no rate or bound can be taken from it: {summary['first_error']}"
        )


def _warm_and_close(subject: Subject, load: Load) -> dict[str, Any]:
    subject.closed("cold", load.warmup, load.clients)
    return subject.closed("closed", load.closed, load.clients, load.closed_runs)[0]


def _sweep(
    subject: Subject,
    load: Load,
    rates: Sequence[float],
    bound_s: float,
    seed: int,
    measured: Mapping[float, dict[str, Any]],
) -> Sweep:
    def measure(rate: float, number: int) -> dict[str, Any]:
        if rate in measured and number == 0:
            return measured[rate]
        try:
            return _at_rate(subject, load, rate, bound_s, seed, number)[0]
        except TraceTooShort as error:
            subject.bench.tick(f"{subject.system.name}: the sweep ends early: {error}")
            raise NothingLeft from error

    return sweep(measure, rates, bound_s, refinements=load.refinements, tries=load.tries)


def _at_rate(
    subject: Subject, load: Load, rate: float, bound_s: float | None, seed: int, number: int = 0
) -> tuple[dict[str, Any], Run]:
    # One label per rate and try: systems measured at the same rate get the same prompts and gaps.
    label = f"rate {rate:.4g}" + (", again" if number else "")
    return subject.poisson(label, load.num_at(rate), rate, seed + number, bound_s)


def crowd(bench: Bench, systems: Sequence[System], load: Load, num: int, clients: int) -> list[dict[str, Any]]:
    """Runs a warm-up with few clients, then a closed loop of more than the KV pool has room for; one row per system."""
    rows = []
    for system in systems:
        subject = bench.begin(system)
        subject.closed("cold", load.warmup, load.clients)
        rows.append(subject.closed("crowd", num, clients)[0])
    return rows


def _in_turns(items: Sequence[T], number: int) -> Sequence[T]:
    """The items, rotated by the number of the block, so that a machine that slows down affects all alike."""
    shift = number % len(items)
    return (*items[shift:], *items[:shift])


def _losses(seconds: Mapping[str, Sequence[float]], column: str) -> list[dict[str, Any]]:
    """The loss of each key against the first, over pairs of blocks; the rows name the key in `column`."""
    base, *others = seconds
    return [
        {column: name, "against": base}
        | loss_of_pairs(list(zip(seconds[name], seconds[base], strict=True)), target=MAX_LOSS)
        for name in others
    ]


def compare_fresh(bench: Bench, systems: Sequence[System], num_blocks: int, block_len: int, clients: int) -> list[Any]:
    """What systems with a chunk cache lose against the first system, over pairs of blocks without a repeated chunk.

    The first pair does not count, since code is still cold. Caches are emptied before each block: systems that share a
    server get the same prompts, and would find them in its cache.
    """
    seconds: dict[str, list[float]] = {system.name: [] for system in systems}
    for number in range(num_blocks + 1):
        for system in _in_turns(systems, number):
            summary, run = bench.begin(system).closed(f"fresh {number}", block_len, clients)
            if summary["num_failed"]:
                raise MeasurementError(f"{system.name}, fresh {number}: a request failed: {summary['first_error']}")
            if any(record.prefix_len + record.reused_len > MAX_SHARED_LEN for record in run.records):
                raise MeasurementError(f"{system.name} found a prompt of the trace without repetition in its cache")
            if number:
                seconds[system.name].append(run.seconds)
    return _losses(seconds, "system")


def compare_shared(
    fleet: Fleet, model_dir: Path, kinds: Sequence[str], scale: SharedScale, tick: Tick
) -> dict[str, Any]:
    """SGLang's own tool with shared prefixes, unmarked: all runs, and what servers lose against the first kind."""
    runs: list[dict[str, Any]] = []
    for number in range(scale.pairs + 1):
        for kind in _in_turns(kinds, number):
            server, speed = fleet.use(kind), machine_speed()
            run = {"kind": kind, "pair": number, "machine_gflops": speed}
            run |= ask_shared(server.url, model_dir, scale, seed=number)
            runs.append(run)
            tick(f"{kind}, shared {number}: {run['requests_per_s']:.2f}/s, TTFT {run['ttft_p50_s']:.3f} s")
    seconds = {kind: [run["seconds"] for run in runs if run["kind"] == kind and run["pair"]] for kind in kinds}
    return {"runs": runs, "rows": _losses(seconds, "kind")}


def ask_trained(bench: Bench, systems: Sequence[System], warmup: int, num: int, clients: int) -> list[dict[str, Any]]:
    """Right answers of the trained model beside the speed of the same requests, one row per system."""
    rows = []
    for system in systems:
        subject = bench.begin(system)
        subject.closed("warm-up", warmup, clients)
        summary, run = subject.closed("questions", num, clients, TRAINED_RUNS)
        # Prompts as sent: the right answer may depend on the order of the passages.
        rows.append(summary | {"right": share_right(subject.writer.sent[-num:], run.records)})
    return rows


def order_anew(bench: Bench, systems: Sequence[System], num: int, block: int, clients: int) -> list[dict[str, Any]]:
    """Throughput and reuse by block of requests, when every request has a new order of chunks; they must not decay.

    Systems without a chunk cache answer only the first two blocks, for comparison.
    """
    rows = []
    for system in systems:
        subject = bench.begin(system)
        num_blocks = num // block if system.options is not None else min(2, num // block)
        for number in range(num_blocks):
            rows.append(subject.closed(f"orders {number}", block, clients)[0] | {"block": number})
    return rows


def pulse(
    bench: Bench,
    systems: Sequence[System],
    load: Load,
    times_s: Sequence[float] = (),
    rate: float = 1.0,
    warmup_output_len: int | None = None,
) -> list[dict[str, Any]]:
    """Warm-up and closed loop, then recorded arrivals, from empty caches: three rows per system, two without times.

    Args:
        times_s: arrival times of the requests after the closed loop, ascending.
        rate: mean rate of these requests, as a share of what the first system reached in the closed loop.
        warmup_output_len: tokens of an answer in the warm-up; None: as recorded.
    """
    rows: list[dict[str, Any]] = []
    base_rate = None
    for system in systems:
        subject = bench.begin(system)
        rows.append(subject.closed("cold", load.warmup, load.clients, output_len=warmup_output_len)[0])
        closed = subject.closed("closed", load.closed, load.clients, load.closed_runs)[0]
        rows.append(closed)
        if base_rate is None:
            _check_answered(closed)
            base_rate = closed["requests_per_s"]
        if times_s:
            span = max(times_s[-1] - times_s[0], 1e-9)
            scale = len(times_s) / (rate * base_rate) / span
            rows.append(subject.at("recorded times", [scale * (time - times_s[0]) for time in times_s], None)[0])
    return rows


def replay(
    bench: Bench, systems: Sequence[System], arrivals_s: Sequence[float], bound_s: float | None
) -> list[dict[str, Any]]:
    """A recorded log at its own times, from empty caches, one row per system."""
    return [bench.begin(system).at("replay", arrivals_s, bound_s)[0] for system in systems]
