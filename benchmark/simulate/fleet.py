"""Fleet: several replicas behind a gateway, each with its own index and pool, under different routing policies.

    route(trace, num_replicas, policy, settings) -> Routed
    fleet_report(trace, numbers, pool_tokens) -> Report

Policies, as SGLang's gateway has them (docs/fleet.md):

    random, round robin
    cache-aware   the replica that was sent the longest beginning of this prompt before, if that is at least 0.3 of
                  the prompt; else the replica that got the fewest tokens
    session       a hash of the session chooses the replica
    passages      a hash of `chunk_cache_tools.routing.routing_key` chooses it, whatever the replicas hold; a prompt
                  without passages goes to a random replica
    held          the replica that holds most tokens of the prompt's passages, as an index of events would tell; a
                  replica that got more than `MAX_SHARE` times the mean of the latest requests is passed over
    held, prefix  as held, plus the tokens of the prompt's beginning that were sent to the replica before

Time is not modelled: requests follow each other, so load is what was sent, and an event is known at once.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from benchmark.common.results import markdown_table
from benchmark.simulate.engine import Replay
from benchmark.simulate.report import Report, Row, percent
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.tally import FIELDS, Tally
from benchmark.simulate.trace import Request, Trace

from chunk_cache_tools.routing import routing_key

NUMBERS = (1, 2, 4, 8)
POOL_TOKENS = 100_000
RATIO = 0.15
MATCH_SHARE = 0.3
"""Least share of the prompt at which the prefix decides; the gateway's `--cache-threshold`."""
MAX_SHARE = 1.25
WINDOW = 32
"""Latest requests that `is_busy` counts, per replica."""


@dataclass(frozen=True)
class Routed:
    """Where the requests of a trace went.

    Attributes:
        choices: the replica of each request.
        tallies: the tally of each replica.
    """

    choices: tuple[int, ...]
    tallies: tuple[Tally, ...]

    @property
    def total(self) -> Tally:
        return Tally(*(sum(getattr(tally, name) for tally in self.tallies) for name in FIELDS))

    @property
    def busiest(self) -> float:
        """Rows of the busiest replica, divided by the mean over all replicas."""
        rows = [tally.computed_tokens + tally.recomputed_tokens for tally in self.tallies]
        return max(rows) * len(rows) / sum(rows)


class Sent:
    """What a gateway sent to each replica, which is all that it knows.

    `note` a request; `matched`: tokens of a prompt's beginning that were sent there before; `is_busy`: see "held".
    """

    def __init__(self, trace: Trace, num_replicas: int) -> None:
        self.trace = trace
        self.num_tokens = [0] * num_replicas
        self._tries: list[dict[int, object]] = [{} for _ in range(num_replicas)]
        self._latest: deque[int] = deque()
        self._num_latest = [0] * num_replicas

    def note(self, request: Request, at: int) -> None:
        self._latest.append(at)
        self._num_latest[at] += 1
        if len(self._latest) > WINDOW * len(self.num_tokens):
            self._num_latest[self._latest.popleft()] -= 1
        self.num_tokens[at] += self.trace.prompt_len(request)
        node = self._tries[at]
        for number, _ in request.blocks:
            node = node.setdefault(number, {})  # type: ignore[assignment]

    def matched(self, request: Request, at: int) -> int:
        node, num_tokens = self._tries[at], self.trace.system_len
        if not node:
            return 0
        for number, _ in request.blocks:
            if number not in node:
                break
            num_tokens += self.trace.lengths[number]
            node = node[number]  # type: ignore[assignment]
        return num_tokens

    def num_latest(self, at: int) -> int:
        return self._num_latest[at]

    def is_busy(self, at: int) -> bool:
        return self.num_latest(at) > MAX_SHARE * max(1.0, len(self._latest) / len(self.num_tokens))


Policy = Callable[[Request, Sent, Sequence[Replay]], int]


def _random() -> Policy:
    rng = random.Random(0)
    return lambda request, sent, replicas: rng.randrange(len(replicas))


def _round_robin() -> Policy:
    turns = iter(range(10**12))
    return lambda request, sent, replicas: next(turns) % len(replicas)


def _cache_aware() -> Policy:
    def choose(request: Request, sent: Sent, replicas: Sequence[Replay]) -> int:
        places = range(len(replicas))
        best = max(places, key=lambda at: sent.matched(request, at))
        if sent.matched(request, best) >= MATCH_SHARE * sent.trace.prompt_len(request):
            return best
        return min(places, key=lambda at: sent.num_tokens[at])

    return choose


def _session() -> Policy:
    return lambda request, sent, replicas: _hashed(f"session {request.session}", len(replicas))


def _passages() -> Policy:
    otherwise = _random()

    def choose(request: Request, sent: Sent, replicas: Sequence[Replay]) -> int:
        if not request.chunks:
            return otherwise(request, sent, replicas)
        return _hashed(routing_key(str(chunk) for chunk in request.chunks), len(replicas))

    return choose


def _held(counts_prefix: bool) -> Policy:
    def choose(request: Request, sent: Sent, replicas: Sequence[Replay]) -> int:
        def saved(at: int) -> float:
            prefix = sent.matched(request, at) if counts_prefix else 0
            return prefix + (1 - RATIO) * held_tokens(replicas[at], request)

        places = [at for at in range(len(replicas)) if not sent.is_busy(at)]
        return max(places, key=lambda at: (saved(at), -sent.num_latest(at)))

    return choose


POLICIES: dict[str, Callable[[], Policy]] = {
    "random": _random,
    "round robin": _round_robin,
    "cache-aware": _cache_aware,
    "session": _session,
    "passages": _passages,
    "held": partial(_held, False),
    "held, prefix": partial(_held, True),
}

BY_CHUNKS = ("passages", "held", "held, prefix")


def _hashed(key: str, num: int) -> int:
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) % num


def held_tokens(replica: Replay, request: Request) -> int:
    """Tokens of a request's passages that a replica holds, in any variant."""
    found = 0
    for chunk in set(request.chunks):
        variants = replica.manager.index.variants_of(replica.keys[chunk])
        found += max(map(replica.pool.resolve, variants), default=0)
    return found


def route(trace: Trace, num_replicas: int, policy: str, settings: Settings) -> Routed:
    """Replays a trace over replicas that share nothing.

    Raises:
        SettingsError: a replica's memory is smaller than the longest prompt.
    """
    if settings.pool_tokens < trace.max_prompt_len:
        problem = f"{settings.pool_tokens} tokens do not hold the longest prompt, which has {trace.max_prompt_len}"
        raise SettingsError(f"pool_tokens: {problem}; give at least as many")
    replicas = [Replay(trace, settings) for _ in range(num_replicas)]
    sent = Sent(trace, num_replicas)
    choose = POLICIES[policy]()
    rows = np.zeros((num_replicas, len(FIELDS)), dtype=np.int64)
    choices = []
    for request in trace.requests:
        at = choose(request, sent, replicas)
        sent.note(request, at)
        rows[at] += replicas[at].answer(request)
        choices.append(at)
    return Routed(tuple(choices), tuple(Tally(*map(int, row)) for row in rows))


def fleet_report(trace: Trace, numbers: Sequence[int] = NUMBERS, pool_tokens: int = POOL_TOKENS) -> Report:
    """The page: rows and hits by policy and number of replicas, with chunks and without."""
    ours = Settings(pool_tokens, alpha=None, ratio=RATIO)
    found = {
        (system, policy, number): route(trace, number, policy, settings)
        for system, settings in (("chunks", ours), ("prefix cache", replace(ours, reuse=False)))
        for policy in POLICIES
        for number in numbers
        if system == "chunks" or policy not in BY_CHUNKS
    }
    rows: list[Row] = [
        {
            "system": system,
            "policy": policy,
            "replicas": number,
            "pool_tokens": pool_tokens,
            "rows": one.total.computed_tokens + one.total.recomputed_tokens,
            "computed_share": f"{one.total.computed_share:.5f}",
            "chunk_token_hit_rate": f"{one.total.chunk_token_hit_rate:.5f}",
            "prefix_share": f"{one.total.prefix_tokens / max(1, one.total.prompt_tokens):.5f}",
            "busiest": f"{one.busiest:.3f}",
        }
        for (system, policy, number), one in found.items()
    ]

    def table(title: str, system: str, value: Callable[[Routed], str]) -> list[str]:
        lines = [
            [policy, *(value(found[system, policy, number]) for number in numbers)]
            for policy in POLICIES
            if (system, policy, numbers[0]) in found
        ]
        return ["", *markdown_table([title, *(f"{number} replicas" for number in numbers)], lines)]

    text = [
        f"{trace.name}, {len(trace.requests):,} requests, {trace.num_chunks:,} passages, of these",
        f"{len(trace.distinct):,} different with {trace.distinct_tokens:,} tokens.",
        f"Each replica has a KV pool of {pool_tokens:,} tokens and an index of its own; nothing is",
        "shared between them. The policies: the head of `benchmark/simulate/fleet.py`.",
        f"*Rows*: prompt tokens that a prefill computes, because they were not found, or again (ratio {RATIO:g}).",
        *(["", *trace.source] if trace.source else []),
        *table("rows, of the prompt tokens", "chunks", lambda one: percent(one.total.computed_share)),
        *table("passage tokens hit", "chunks", lambda one: percent(one.total.chunk_token_hit_rate)),
        *table("rows of the busiest replica, in means", "chunks", lambda one: f"{one.busiest:.2f}"),
        "",
        "The same without chunks, as stock SGLang:",
        *table("rows, of the prompt tokens", "prefix cache", lambda one: percent(one.total.computed_share)),
    ]

    return Report("fleet", "Policies of a gateway", rows, text)
