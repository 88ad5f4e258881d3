"""Crowd: many requests at once on one server, with a simulated clock: how much of the pool running requests hold.

    Crowd(trace, settings, Load(num_clients=16)).run() -> numbers by name
    crowd_report(...) -> Report

Scheduling follows SGLang and `host.prefill_adder` at their defaults: prefill before decoding, `STEP_LEN` rows a step,
first come first served. A request is admitted if its new tokens and `MAX_NEW` of output fit beside what the running
requests hold and may still decode, and leave the room kept for reused chunks. A request that reuses has private copies;
an exact one shares its prompt with the tree. If decoding finds no room, the request with the shortest output is
retracted.

*pool tokens each*: tokens that running requests keep from eviction, per running request. *no room*, *kept room*: share
of the requests that were refused at least once because tokens were short, or to keep room for reused chunks. *waiting*:
seconds until admission. *hit rate*: of the tokens of chunks. *tokens computed*: per request.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np
from benchmark.common.results import markdown_table
from benchmark.simulate.baselines import reordered
from benchmark.simulate.compare import WARM_UP
from benchmark.simulate.engine import Layout, Replay, Running
from benchmark.simulate.report import Report, Row
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.tally import Counts, Tally
from benchmark.simulate.trace import Request, Trace

from chunk_cache.tiers.cost import PrefillRecord

PREFILL = PrefillRecord(0.033, 1.34e-5, 8.3e-10)
"""Fitted to the twelve measurements of stock, full-reuse and epic in benchmark/results/gpu/long.md (8B, H100): all are
within 27 %, nine within 12 %."""
DECODE = PrefillRecord(0.0064, 0.0, 5.2e-8)
"""Computed, not measured: 16 GB of weights and 131,072 bytes for each token of KV at 2.5 TB/s."""
STEP_LEN, MIN_NEW, MAX_NEW = 8192, 32, 256
RATIO_FIRST, RATIO_LEAST, RATIO_DECAY = 0.7, 0.098, 0.602 / 600
"""Share of the remaining output limit that SGLang expects to be used; it falls with each step of decoding."""
RETRACT_STEPS = 20


@dataclass(frozen=True)
class Load:
    """Either clients that each ask again after an answer, or requests that arrive as a Poisson process."""

    num_clients: int = 0
    per_s: float = 0.0

    def __str__(self) -> str:
        return f"{self.per_s:g}/s" if self.per_s else f"{self.num_clients} clients"


@dataclass(slots=True)
class Job:
    """A request that waits or runs; times are seconds of the simulated clock."""

    request: Request
    layout: Layout
    output_len: int
    asked_s: float
    begun_s: float = math.nan
    first_s: float = math.nan
    rows_left: int = 0
    num_rows: int = 0
    num_out: int = 0
    obstacles: set[str] = field(default_factory=set)
    """Why it was ever refused: "room" (no room), "kept" (room kept for reused chunks)."""
    running: Running | None = None


class Crowd:
    """See the head of this file.

    Raises:
        SettingsError: the pool does not hold the longest prompt and its output.
    """

    def __init__(self, trace: Trace, settings: Settings, load: Load) -> None:
        if settings.pool_tokens <= trace.max_prompt_len + MAX_NEW:
            raise SettingsError(f"pool: {settings.pool_tokens} tokens do not hold the longest prompt; give more")
        if len(trace.requests) <= 2 * load.num_clients:
            problem = f"{len(trace.requests)} requests are too few for {load.num_clients} clients"
            raise SettingsError(f"clients: {problem}; give more than two for each, or fewer clients")
        self._load = load
        self.replay = Replay(trace, settings)
        self.pool = self.replay.pool
        self.running: list[Job] = []
        self.done: list[Job] = []
        self.now = 0.0
        self._counts: list[Counts] = []
        self.num_retracted = 0
        self._areas = np.zeros(2)  # integrals over time: running requests, tokens that they hold
        self._expected = RATIO_FIRST
        draw = np.random.default_rng(settings.seed)
        lens = draw.integers(MIN_NEW, MAX_NEW + 1, len(trace.requests)).tolist()
        self._next = iter(zip(trace.requests, lens, strict=True))
        self._num_last = len(trace.requests) - 2 * load.num_clients  # after these, clients may find no request left
        self.waiting = deque(self._ask(0.0) for _ in range(load.num_clients))
        gaps = draw.exponential(1 / load.per_s, len(trace.requests)) if load.per_s else np.zeros(0)
        self._arrivals = deque(np.cumsum(gaps).tolist())

    def run(self) -> dict[str, float]:
        first = round(WARM_UP * self._num_last)
        while len(self.done) < self._num_last:
            while self._arrivals and self._arrivals[0] <= self.now:
                self.waiting.append(self._ask(self._arrivals.popleft()))
            if not self._prefill():
                self._decode()
            if len(self.done) <= first:
                since, before = self.now, self._areas.copy()
                num_before = len(self.done)
        jobs, (running, held) = self.done[num_before:], (self._areas - before).tolist()
        mean, seconds, ttft = statistics.fmean, self.now - since, [job.first_s - job.asked_s for job in self.done]
        return {
            "requests/s": len(jobs) / seconds,
            "TTFT mean, s": mean(ttft[num_before:]),
            "TTFT p99": float(np.quantile(ttft[num_before:], 0.99)),
            "waiting": mean(job.begun_s - job.asked_s for job in jobs),
            "running": running / seconds,
            "pool tokens each": held / running,
            "no room": mean("room" in job.obstacles for job in jobs),
            "kept room": mean("kept" in job.obstacles for job in jobs),
            "retractions": self.num_retracted,
            "hit rate": Tally(*map(int, sum(self._counts[num_before:]))).chunk_token_hit_rate,
            "tokens computed": mean(job.num_rows for job in jobs),
        }

    def _ask(self, asked_s: float) -> Job:
        request, output_len = next(self._next)
        layout = Layout.of(self.replay.trace, request, self.replay.settings, self.replay.keys)
        return Job(request, layout, output_len, asked_s)

    def _obstacle(self, job: Job) -> str | None:
        """Why a request cannot run now; None if it can."""
        prefix = self.pool.match(job.layout.labels, job.layout.owner)
        num_tokens = job.layout.length - sum(node.length for node in prefix) + MAX_NEW
        self.pool.lock(prefix[-1:])
        num_free = self.pool.num_free
        self.pool.unlock(prefix[-1:])
        shares = ((MAX_NEW - one.num_out) * (self._expected if one.num_out else 1.0) for one in self.running)
        num_free -= math.ceil(sum(shares))
        if num_tokens >= num_free:
            return "room"
        takes = self.running and self.replay.manager.takes_kept_room(num_tokens, num_free, self.pool.capacity)
        return "kept" if takes else None

    def _prefill(self) -> bool:
        """Runs one prefill step; False if there was nothing to compute."""
        left, seconds = STEP_LEN, PREFILL.s_per_pass
        jobs = [job for job in self.running if job.rows_left]
        while self.waiting and sum(job.rows_left for job in jobs) < STEP_LEN:
            job = self.waiting[0]
            if obstacle := self._obstacle(job):
                job.obstacles.add(obstacle)
                break
            self.running.append(self.waiting.popleft())
            job.running = self.replay.begin(job.request, job.layout, job.num_out)
            job.rows_left = job.running.plan.num_rows
            job.num_rows += job.rows_left
            job.begun_s = self.now if math.isnan(job.begun_s) else job.begun_s
            jobs.append(job)
        for job in jobs:
            num_rows = min(left, job.rows_left)
            seconds += PREFILL.marginal(num_rows, job.layout.length)
            job.rows_left -= num_rows
            left -= num_rows
        if jobs:
            self._pass_time(seconds)
        for job in jobs:
            if not job.rows_left and job.running is not None:
                self.replay.note_computed(job.running)
                job.first_s = self.now if math.isnan(job.first_s) else job.first_s
                self._generate([job], 1)
        return bool(jobs)

    def _decode(self) -> None:
        """Decodes until a request ends, the pool is full, or (if none waits) the next request arrives."""
        if not self.running:
            self._pass_time(self._arrivals[0] - self.now)
            return
        while self.pool.num_free < len(self.running):
            self._retract()
        left = min(job.output_len - job.num_out for job in self.running)
        num_steps = min(left, self.pool.num_free // len(self.running))
        num_keys = sum(job.layout.length + job.num_out for job in self.running)
        if self._arrivals and not self.waiting:
            until_next = (self._arrivals[0] - self.now) / DECODE.estimate(1, num_keys)
            num_steps = min(num_steps, math.ceil(until_next))
        self._pass_time(num_steps * DECODE.estimate(1, num_keys + len(self.running) * num_steps / 2))
        self._expected = max(RATIO_LEAST, self._expected - num_steps * RATIO_DECAY)
        self._generate(list(self.running), num_steps)

    def _generate(self, jobs: Sequence[Job], num_steps: int) -> None:
        """Adds `num_steps` tokens to the output of each job."""
        for job in jobs:
            assert job.running is not None
            job.num_out += num_steps
            if job.num_out < job.output_len:
                has_room = self.pool.reserve(num_steps)
                assert has_room, "more was admitted than fits"
                job.running.num_private += num_steps
                continue
            self._counts.append(self.replay.end(job.running))
            self.running.remove(job)
            self.done.append(job)
            if self._load.num_clients:
                self.waiting.append(self._ask(self.now))

    def _retract(self) -> None:
        job = min(self.running, key=lambda one: (one.num_out, -one.layout.length))
        assert job.running is not None
        self.running.remove(job)
        self.pool.unlock(job.running.locked)
        self.pool.release(self.pool.num_reserved - job.running.num_private)
        self.waiting.append(job)
        self.num_retracted += 1
        num_out = sum(one.num_out + RETRACT_STEPS for one in self.running)
        self._expected = min(1.0, num_out / (1 + MAX_NEW * len(self.running)))

    def _pass_time(self, seconds: float) -> None:
        self.now += seconds
        held = self.pool.num_reserved + self.pool.num_locked
        self._areas += seconds * len(self.running), seconds * held


def crowd_report(
    make_trace: Callable[[int], Trace],
    *,
    pools: Sequence[int],
    loads: Sequence[Load],
    shares: Sequence[float],
    seeds: Sequence[int],
) -> Report:
    """The page; `shares` are values of `keep_share`, and all systems are compared with the first of them."""
    found: dict[tuple[int, Load, str], list[dict[str, float]]] = {}  # one dict for each seed
    rows: list[Row] = []
    for seed, pool_tokens in product(seeds, pools):
        trace, base = make_trace(seed), Settings(pool_tokens, alpha=None, seed=seed)
        stock = replace(base, reuse=False)
        systems = {"stock": (trace, stock), "reorder": (reordered(trace, pool_tokens), stock)}
        systems |= {f"keep_share {share:g}": (trace, replace(base, keep_share=share)) for share in shares}
        for load, (name, (one, settings)) in product(loads, systems.items()):
            numbers = Crowd(one, settings, load).run()
            found.setdefault((pool_tokens, load, name), []).append(numbers)
            where = {"corpus": len(trace.lengths), "seed": seed, "pool": pool_tokens, "load": str(load), "system": name}
            rows.append({**where, **{key: f"{value:.6g}" for key, value in numbers.items()}})
    lines = []
    for (pool_tokens, load, name), some in found.items():
        others = found[pool_tokens, load, f"keep_share {shares[0]:g}"]
        if some == others and some is not others:
            continue
        means = [_spelled(statistics.fmean(one[key] for one in some)) for key in some[0]]
        for key in ("requests/s", "TTFT p99"):
            ratios = [one[key] / other[key] for one, other in zip(some, others, strict=True)]
            means.append(f"{statistics.fmean(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")
        lines.append([f"{pool_tokens:,}", str(load), name, *means])
    names = [key for key in rows[0] if key not in ("corpus", "seed")]
    header = [*names, f"requests/s, of keep_share {shares[0]:g}", "the same of TTFT p99"]
    text = [f"{len(trace.lengths):,} passages of {sum(trace.lengths):,} tokens (last seed). Means over the seeds;"]
    text += ["a value of `keep_share` that changed nothing is left out."]
    return Report("crowd", "Many requests at once", rows, [*text, "", *markdown_table(header, lines)])


def _spelled(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == 0 else f"{value:.3f}"
