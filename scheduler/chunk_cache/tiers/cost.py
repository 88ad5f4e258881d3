"""What loading and computing take, in seconds, and which of the two a chunk deserves.

    Throughput         seconds of a load, learnt from loads: latency + bytes / bandwidth
    PrefillCost        seconds of computing rows, learnt from forward passes: a + b rows + c rows keys
    Estimates          whether such estimates came true
    LoadingController  load or compute, chunk by chunk (extends CacheBlend section 5.1 to whole chunks)
    preload_depth      L_p: layers to have loaded before the forward pass starts (Cache-Craft eq. 16); `layers_to_await`
                       of the forward of one request

Ranks measure different times, so they would decide differently: decide by the frozen records of one rank, sent to all.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

NUM_ERRORS = 256
FORGET = 0.97  # weight of an observation after each later one: the last 33 or so count
MIN_OBSERVATIONS = 8
MAX_SURPRISE = 4.0
"""After `MIN_OBSERVATIONS`, an observation counts as at most so many times its estimate: a stall is no trend."""
PRIOR_LATENCY_S, PRIOR_BYTES_PER_S, PRIOR_S_PER_ROW = 1e-4, 1e10, 1e-4
"""Latency, bandwidth and seconds per row before the first observation: a fast device and a slow model."""
MIN_PATIENCE_S = 0.25
"""A load that takes this long is not given up for being slow: the first loads have no estimate."""
PROBE_EVERY = 100
"""Chunks of a tier in a row that would be computed sooner, of which the last is loaded: costs are learnt from loads."""


@dataclass(frozen=True, slots=True)
class ThroughputRecord:
    """What is known of one channel; plain numbers, to be sent to other ranks."""

    latency_s: float = PRIOR_LATENCY_S
    s_per_byte: float = 1.0 / PRIOR_BYTES_PER_S

    def estimate(self, num_bytes: int, queued_bytes: int = 0) -> float:
        """Seconds until a load is complete that waits behind `queued_bytes`; latencies overlap."""
        return self.latency_s + (num_bytes + queued_bytes) * self.s_per_byte


Channels: TypeAlias = Mapping[str, ThroughputRecord]  # by tier


@dataclass(frozen=True, slots=True)
class PrefillRecord:
    """What is known of the model's forward pass; plain numbers, to be sent to other ranks."""

    s_per_pass: float = 0.0
    s_per_row: float = PRIOR_S_PER_ROW
    s_per_pair: float = 0.0

    def marginal(self, num_rows: int, num_keys: int) -> float:
        """Seconds that rows add to a pass that runs anyway."""
        return num_rows * (self.s_per_row + num_keys * self.s_per_pair)

    def estimate(self, num_rows: int, num_keys: int) -> float:
        """Seconds of a pass over rows that see up to `num_keys` keys."""
        return self.s_per_pass + self.marginal(num_rows, num_keys)


class _Fit:
    """seconds = coefficients . features, by non-negative least squares with exponential forgetting.

    An error counts relative to the prior's estimate, so that small and large observations count alike. `pull`
    regularizes each coefficient to its prior; it decides only what the observations leave open, such as latency at a
    single size.
    """

    def __init__(self, prior: Sequence[float], pull: Sequence[float]) -> None:
        self.num = 0
        self.coefficients = self._prior = np.array(prior)
        self._pull = np.array(pull)
        self._gram = np.zeros((len(prior), len(prior)))
        self._moment = np.zeros(len(prior))

    def observe(self, features: Sequence[float], seconds: float, subsets: Sequence[Sequence[int]]) -> None:
        """`subsets`: sets of coefficients that may be above 0 together; the set of all, if allowed, first. At least one
        set must be a single one."""
        assert 0.0 <= seconds < math.inf, f"it took {seconds} s"
        x = np.array(features)
        unit = float(x @ self._prior)
        if self.num >= MIN_OBSERVATIONS:
            seconds = min(seconds, MAX_SURPRISE * max(float(x @ self.coefficients), 1e-3 * unit))
        self.num += 1
        self._gram = FORGET * self._gram + np.outer(x, x) / unit**2
        self._moment = FORGET * self._moment + x * (seconds / unit**2)
        scale = np.sqrt(np.maximum(self._gram.diagonal(), 1e-300))
        gram = self._gram / np.outer(scale, scale) + np.diag(self._pull)
        moment = self._moment / scale + self._pull * self._prior * scale
        best = math.inf
        for subset in map(list, subsets):  # so few that all are tried
            solution = np.linalg.solve(gram[np.ix_(subset, subset)], moment[subset])
            loss = -float(moment[subset] @ solution)
            if solution.min() >= 0.0 and loss < best:
                best = loss
                self.coefficients = np.zeros(len(x))
                self.coefficients[subset] = solution / scale[subset]
                if len(subset) == len(x):  # fewer coefficients cannot fit better
                    break


class Throughput:
    """Learns the seconds of a load; the prior holds before the first one, and its latency while all have one size."""

    def __init__(self) -> None:
        self._fit = _Fit((PRIOR_LATENCY_S, 1.0 / PRIOR_BYTES_PER_S), (1e-3, 1e-6))

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A load of `num_bytes` took `seconds` from its start, waiting in the queue not included."""
        assert num_bytes > 0, f"a load of {num_bytes} bytes"
        self._fit.observe((1.0, num_bytes), seconds, ((0, 1), (0,), (1,)))

    def record(self) -> ThroughputRecord:
        latency_s, s_per_byte = self._fit.coefficients.tolist()
        return ThroughputRecord(latency_s, s_per_byte)

    def estimate(self, num_bytes: int) -> float:
        return self.record().estimate(num_bytes)


class PrefillCost:
    """Learns the seconds of a forward pass: proportional to rows until `MIN_OBSERVATIONS`, then as the record says."""

    def __init__(self) -> None:
        self._fit = _Fit((0.0, PRIOR_S_PER_ROW, 0.0), (1e-3, 1e-6, 1e-4))

    def observe(self, num_rows: int, num_keys: int, seconds: float) -> None:
        """A pass over `num_rows` rows that see up to `num_keys` keys each took `seconds`."""
        assert num_rows > 0 <= num_keys, f"{num_rows} rows, {num_keys} keys"
        will_know = self._fit.num + 1 >= MIN_OBSERVATIONS
        subsets = ((0, 1, 2), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2)) if will_know else ((1,),)
        self._fit.observe((1.0, num_rows, num_rows * num_keys), seconds, subsets)

    @property
    def is_known(self) -> bool:
        """Whether enough passes were seen to state a saving."""
        return self._fit.num >= MIN_OBSERVATIONS

    def saved_s(self, num_rows: int, num_keys: int) -> float | None:
        """Seconds that a pass took less because of `num_rows` rows less; None = too few passes were seen."""
        return self.record().marginal(num_rows, num_keys) if self.is_known else None

    def record(self) -> PrefillRecord:
        s_per_pass, s_per_row, s_per_pair = self._fit.coefficients.tolist()
        return PrefillRecord(s_per_pass, s_per_row, s_per_pair)

    def estimate(self, num_rows: int, num_keys: int) -> float:
        return self.record().estimate(num_rows, num_keys)


class Estimates:
    """Pairs of estimated and actual seconds: totals, and relative errors of the last `NUM_ERRORS`.

    An error is (estimated - actual) / actual: 1 = twice as much was expected, -0.5 = half as much.
    """

    def __init__(self) -> None:
        self.num = 0
        self.estimated_s = self.actual_s = 0.0
        self._errors: deque[float] = deque(maxlen=NUM_ERRORS)

    def add(self, estimated_s: float, actual_s: float) -> None:
        assert min(estimated_s, actual_s) >= 0.0, f"{estimated_s} s estimated, {actual_s} s actual"
        error = (estimated_s - actual_s) / max(actual_s, 1e-9)
        self.num += 1
        self.estimated_s += estimated_s
        self.actual_s += actual_s
        self._errors.append(error)

    def mean_error(self) -> float:
        """Mean of the last errors; 0 without any. Its sign says on which side the estimates are wrong."""
        return float(np.mean(self._errors)) if self._errors else 0.0

    def median_error(self) -> float:
        """Size of error that half of the last do not exceed; 0 without any."""
        return float(np.quantile(np.abs(self._errors), 0.5, method="higher")) if self._errors else 0.0


@dataclass(frozen=True, slots=True)
class LoadOption:
    """A chunk that could be loaded: the rows that this spares, and the keys that the last of them sees.

    Attributes:
        is_anyway: it is looked for whatever that costs: only asking a store tells whether it has it, or a tier has a
            variant that is better than another one by more than its load.
    """

    tier: str
    num_bytes: int
    num_rows: int
    num_keys: int
    is_anyway: bool = False


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What becomes of the chunks of a request, and how long it waits for all of them.

    Attributes:
        decisions: one for each option; None = it is looked for anyway.
        is_short: it waits for less than the configured time, so a chunk that is late was slower than computing it.
    """

    decisions: tuple[LoadDecision | None, ...]
    patience_s: float
    is_short: bool


@dataclass(frozen=True, slots=True)
class LoadDecision:
    """Action ("load", "compute") and reason: nobody waits for the load ("hidden"); it delays less ("faster") or more
    ("slower") than computing; it is tried ("probe").

    Attributes:
        load_s: seconds from now on until the load would be complete.
        compute_s: seconds that computing adds to the forward pass.
    """

    action: str
    reason: str
    load_s: float
    compute_s: float


class LoadingController:
    """Decides for each chunk whether it is loaded or computed.

    Args:
        overlaps: loads go on during the forward pass, layer by layer, so what it computes hides them too; otherwise
            the pass waits for the last load.
    """

    def __init__(self, *, overlaps: bool) -> None:
        self._overlaps = overlaps
        self._num_slower: dict[str, int] = {}

    def load_or_compute(
        self,
        asked: Sequence[LoadOption],
        channels: Channels,
        prefill: PrefillRecord,
        *,
        queued_bytes: Mapping[str, int],
        hidden_s: float,
        ratio: float,
        timeout_s: float,
    ) -> LoadPlan:
        """Decides for a request that begins to wait.

        After `hidden_s`, it waits for up to twice the estimated time of loads and computing, since estimates may be
        wrong.

        Args:
            hidden_s: seconds that the request waits in the queue anyway.
            ratio: share of the loaded tokens that the pass computes again while layers arrive.
            timeout_s: the most that it waits.
        """
        options = [option for option in asked if not option.is_anyway]
        free_s = hidden_s
        if self._overlaps:  # the forward computes some rows of these chunks in any case
            num_rows = round(ratio * sum(option.num_rows for option in options))
            free_s += prefill.estimate(num_rows, max((option.num_keys for option in asked), default=0))
        decisions = self.decide(options, channels, prefill, queued_bytes=queued_bytes, hidden_s=free_s)
        loads = [decision for decision in decisions if decision.action == "load"]
        worth_s = max((load.load_s for load in loads), default=0.0) + sum(load.compute_s for load in loads)
        for option in asked:
            if option.is_anyway:
                worth_s += channels[option.tier].estimate(option.num_bytes)
                worth_s += prefill.marginal(option.num_rows, option.num_keys)
        patience_s = hidden_s + max(MIN_PATIENCE_S, 2.0 * worth_s)
        decided = iter(decisions)
        by_option = tuple(None if option.is_anyway else next(decided) for option in asked)
        return LoadPlan(by_option, min(timeout_s, patience_s), patience_s < timeout_s)

    def decide(
        self,
        options: Sequence[LoadOption],
        channels: Channels,
        prefill: PrefillRecord,
        *,
        queued_bytes: Mapping[str, int],
        hidden_s: float,
    ) -> tuple[LoadDecision, ...]:
        """Decides for the chunks of a request, greedily in order, as they share the channels.

        A chunk is loaded if that delays the first token by no more than computing it would. A load is complete after
        T_load = (queued bytes + its bytes) / throughput (footnote 6, with a latency), behind those decided before it.

        Args:
            channels: by tier.
            queued_bytes: by tier, wanted by others before these.
            hidden_s: seconds that pass anyway before the KV is needed: in the queue, or, where loads overlap with the
                pass, computing rows other than those of `options`.
        """
        queued = dict(queued_bytes)
        busy_s, last_s = hidden_s, 0.0  # until when the pass computes anyway, and the last load is there
        decisions = []
        for option in options:
            load_s = channels[option.tier].estimate(option.num_bytes, queued.get(option.tier, 0))
            compute_s = prefill.marginal(option.num_rows, option.num_keys)
            free_s = max(busy_s, last_s)
            limit_s = (busy_s if self._overlaps else free_s) + compute_s
            reason = "hidden" if load_s <= free_s else "faster" if load_s <= limit_s else "slower"
            num_slower = self._num_slower.get(option.tier, 0) + 1 if reason == "slower" else 0
            if num_slower == PROBE_EVERY:
                reason, num_slower = "probe", 0
            self._num_slower[option.tier] = num_slower
            if reason == "slower":
                busy_s += compute_s if self._overlaps else 0.0
            else:
                queued[option.tier] = queued.get(option.tier, 0) + option.num_bytes
                last_s = max(last_s, load_s)
            decisions.append(LoadDecision("compute" if reason == "slower" else "load", reason, load_s, compute_s))
        return tuple(decisions)


def load_share(load_s: float, compute_s: float, hidden_s: float) -> float:
    """What loading a chunk costs, as a share of what computing it costs; what `hidden_s` hides costs nothing."""
    return max(0.0, load_s - hidden_s) / max(compute_s, 1e-12)


def layers_to_await(
    num_layers: int,
    load_s: float,
    prefill: PrefillRecord,
    *,
    num_rows: int,
    num_keys: int,
    spared_lens: Iterable[int],
    ratio: float,
) -> int:
    """Layers that must be there before the forward of a request begins, so that it never waits for one.

    Args:
        load_s: seconds that loading its chunks takes, one after another.
        num_rows: rows that it would compute if no chunk were brought in.
        spared_lens: tokens of each chunk that is brought in instead of computed.
        ratio: share of these tokens that is computed again.
    """
    num_left = num_rows - sum(round((1.0 - ratio) * length) for length in spared_lens)
    return preload_depth(num_layers, load_s, prefill.estimate(max(num_left, 1), num_keys))


def preload_depth(num_layers: int, load_s: float, compute_s: float) -> int:
    """L_p = (L - 1)(1 - T_prefill / T_load) + 1, rounded up and at least 1 (Cache-Craft eq. 16, algorithm 2).

    With so many layers there at the start, a forward pass never waits for the next; the seconds are of all L layers.
    """
    assert min(load_s, compute_s, num_layers - 1) >= 0.0, f"{num_layers} layers, {load_s} s and {compute_s} s"
    if load_s <= compute_s:
        return 1
    return num_layers - math.floor((num_layers - 1) * compute_s / load_s + 1e-9)  # not one more for a rounding error
