"""A fleet under load in which one process after the other is killed: nothing wrong, nothing lost, all comes back.

    python test/server/soak_fleet.py --store valkey [--minutes 20] [--out FOLDER]

Two replicas, a store and the gateway, all real processes on this machine; four clients send without a pause. Killed
with SIGKILL, in turn: a replica, the gateway, the store, the other replica; the next as soon as the last is recovered
from, that is, when hits come back where it was. A request counts as lost where it was answered with an error; only
those may be that were in flight at a killed replica. Whoever finds no gateway asks again. Answers, at ratio 1.0, are
compared with mode off. Exit code 1 where something does not hold. Results: `benchmark/results/fleet/soak-<store>.*`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import leave_on_sigterm

from gateway import QUICK, Gateway, find_gateway
from server.contract import Passages
from server.fleet_load import NUM_THREADS, Load
from server.tier_contract import tier_flags, tier_server, wait_until
from server_fixture import Server
from tiny_models import make_model
from unit.tiers.mooncake_master import library_env
from unit.tiers.store_process import StoreProcess
from unit.tiers.stores import HOW_TO_GET, STORES, find_store

NUM_SETS, SET_LEN = 60, 3
"""Of passages that requests ask for together: more tokens than the KV pool of a replica."""
PATIENCE_S = 180.0
"""For a recovery: a replica starts in a minute while the other is under load."""
NUM_COMPARED = 600


@dataclass(frozen=True)
class Fault:
    """One process that was killed: when, counted from the first request, what it took until hits came back there."""

    at_s: float
    what: str
    recovered_s: float
    num_lost: int
    num_answers: int


@dataclass(frozen=True)
class Fleet:
    """The processes, and the load on them."""

    store: StoreProcess
    replicas: Sequence[Server]
    gateway: Gateway
    load: Load


@contextmanager
def fleet(store: StoreProcess, url: str, folder: Path) -> Iterator[Fleet]:
    """Two replicas on a store behind a gateway; all are gone when it is left."""
    model = make_model("llama", folder / "llama")
    flags = (*tier_flags(remote={"url": url}, timeout_s=10), "--chunk-cache-ratio", "1")
    replicas = [tier_server(model, *flags, variables=library_env()) for _ in range(2)]
    store.start()
    try:
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(Server.start, replicas))
        passages = Passages("soak")
        sets = [passages.several(SET_LEN) for _ in range(NUM_SETS)]
        policy = ("--policy", "consistent_hashing", *QUICK)
        with Gateway([server.url for server in replicas], *policy) as gateway:
            yield Fleet(store, replicas, gateway, Load(gateway, sets, retries=True))
    finally:
        for server in replicas:
            server.stop()
        store.kill()


def kill_replica(one: Fleet, number: int) -> Callable[[], bool]:
    """What is true once it has recovered; so for all of these."""
    victim = one.replicas[number]
    os.killpg(victim.pid, signal.SIGKILL)
    victim.start()
    back = time.monotonic()
    return lambda: one.load.has_hits(victim, back)


def kill_gateway(one: Fleet) -> Callable[[], bool]:
    one.gateway.kill()
    one.gateway.start()
    back = time.monotonic()
    return lambda: all(one.load.has_hits(server, back) for server in one.replicas)


def kill_store(one: Fleet) -> Callable[[], bool]:
    one.store.kill()
    killed = time.monotonic()
    wait_until(lambda: all(one.load.statuses_of(s.url, killed) for s in one.replicas), "nobody answers", PATIENCE_S)
    one.store.start()
    back = time.monotonic()
    return lambda: one.load.has_loaded(back)


FAULTS: tuple[tuple[str, Callable[[Fleet], Callable[[], bool]]], ...] = (
    ("replica 1", lambda one: kill_replica(one, 0)),
    ("gateway", kill_gateway),
    ("store", kill_store),
    ("replica 2", lambda one: kill_replica(one, 1)),
)


def soak(one: Fleet, seconds: float) -> tuple[list[Fault], list[float]]:
    """The faults, and when requests were sent that were lost though no replica died while they ran."""
    faults, innocent = [], []
    with one.load as load:
        wait_until(lambda: all(load.has_hits(server) for server in one.replicas), "no hits", PATIENCE_S)
        began = time.monotonic()
        for what, kill in itertools.cycle(FAULTS):
            num_lost, num_answers, killed = len(load.lost), len(load.answers), time.monotonic()
            wait_until(kill(one), f"{what} was killed, and hits do not come back", PATIENCE_S)
            now = time.monotonic()
            lost = load.lost[num_lost:]
            innocent += [at - began for at in lost if "replica" not in what or at > killed]
            fault = Fault(killed - began, what, now - killed, len(lost), len(load.answers) - num_answers)
            faults.append(fault)
            print(asdict(fault), flush=True)
            if now - began > seconds:
                return faults, innocent
    raise AssertionError("the faults go round")


def problems_of(one: Fleet, faults: Sequence[Fault], innocent: Sequence[float]) -> list[str]:
    """What does not hold, as sentences."""
    found = [f"lost, and no replica died: {len(innocent)} requests"] if innocent else []
    found += [f"{fault.what}: {fault.num_lost} requests lost" for fault in faults if fault.num_lost > NUM_THREADS]
    return found + [line for server in one.replicas for line in server.bad_log_lines]


def report_of(
    store_name: str, one: Fleet, faults: Sequence[Fault], problems: Sequence[str], num_compared: int
) -> dict[str, Any]:
    statuses = Counter(status for answer in one.load.answers for status in answer.statuses)
    tiers = Counter(tier for answer in one.load.answers for tier in answer.tiers if tier)
    return {
        "store": store_name,
        "minutes": (faults[-1].at_s + faults[-1].recovered_s) / 60,
        "num_answers": len(one.load.answers),
        "num_lost": len(one.load.lost),
        "num_compared": num_compared,
        "statuses": dict(statuses),
        "tiers": dict(tiers),
        "faults": [asdict(fault) for fault in faults],
        "problems": list(problems),
    }


def page_of(report: dict[str, Any], origin: dict[str, Any]) -> list[str]:
    by_name: dict[str, list[dict[str, Any]]] = {}
    for fault in report["faults"]:
        by_name.setdefault(fault["what"], []).append(fault)
    rows = []
    for name, found in by_name.items():
        seconds = sorted(fault["recovered_s"] for fault in found)
        lost, answered = (sum(fault[which] for fault in found) for which in ("num_lost", "num_answers"))
        rows.append([name, str(len(found)), f"{seconds[len(seconds) // 2]:.1f} ({seconds[0]:.1f}-{seconds[-1]:.1f})"])
        rows[-1] += [str(lost), str(answered)]
    total = sum(report["statuses"].values())
    shares = ", ".join(f"{100 * n / total:.1f} % {status}" for status, n in sorted(report["statuses"].items()))
    return [
        f"# Soak of a fleet on {report['store']}",
        "",
        *run_markdown(origin),
        "",
        f"Two replicas and the gateway, {report['minutes']:.1f} minutes, {report['num_answers']:,} requests answered,",
        f"{report['num_lost']} lost, {len(report['faults'])} processes killed with SIGKILL, the next as soon as hits",
        "came back.",
        f"Chunks: {shares}; {sum(report['tiers'].values()):,} of the hits came from the store.",
        f"{report['num_compared']} answers were compared with mode off: all equal.",
        "",
        *markdown_table(
            ["killed", "times", "until hits came back there, s", "requests lost", "answered meanwhile"], rows
        ),
        "",
        *([f"- does not hold: {problem}" for problem in report["problems"]] or ["All holds."]),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", choices=STORES, default="valkey")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "fleet", help="folder of the results")
    args = parser.parse_args(argv)
    leave_on_sigterm()
    with tempfile.TemporaryDirectory(prefix="soak-fleet-") as folder:
        found = find_store(args.store, Path(folder))
        if found is None or find_gateway() is None:
            missing = "make gateway" if found else HOW_TO_GET[args.store]
            print(f"error: not installed; run `{missing}`", file=sys.stderr)
            return 2
        origin = describe_run()
        with fleet(*found, Path(folder)) as one:
            faults, innocent = soak(one, 60 * args.minutes)
            problems = problems_of(one, faults, innocent)
            num_compared = one.load.check_answers(one.replicas[0], NUM_COMPARED)
            report = report_of(args.store, one, faults, problems, num_compared)
    page = page_of(report, origin)
    write_result(args.out, f"soak-{args.store}", {**origin, **report}, page)
    print("\n".join(page))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
