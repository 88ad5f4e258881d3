"""How well an attacker can tell from response times whether somebody else has stored a passage: the AUC.

    python benchmark/isolation/bench_timing.py [--num N] [--passage TOKENS] [--out FOLDER]

A victim stores a passage, or another one; then an attacker sends the passage in a prompt of its own and measures the
time. Within one partition time tells (AUC near 1), since reuse is faster. Between partitions (`extra_key`) it must not
(AUC 0.5). The cases run in random order. Results: `benchmark/results/isolation/`.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap
from sklearn.metrics import roc_auc_score

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import FIRST_PLAIN_ID, cached_llama
from benchmark.common.results import RESULTS_DIR, Spread, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.ttft.workload import QUICK

PARTITIONS = {"the same": "victim", "another": "attacker"}


class Attack:
    """The requests of victim and attacker to a server."""

    def __init__(self, server: Server, passage: int) -> None:
        self._server = server
        self._passage = passage
        self._draw = random.Random(5)

    def seconds(self, is_stored: bool, partition: str) -> float:
        """Seconds of the attacker's request with a passage that the victim has stored, or nobody has."""
        passage, other = self._tokens(self._passage), self._tokens(self._passage)
        self._ask(passage if is_stored else other, "victim")
        began = time.perf_counter()
        self._ask(passage, partition)
        return time.perf_counter() - began

    def _ask(self, passage: list[int], partition: str) -> None:
        head = self._tokens(16)
        span = [len(head), len(head) + len(passage)]
        options = {"spans": [span], "method": "epic", "ratio": 0.15}
        self._server.generate(head + passage + self._tokens(16), chunk_cache=options, extra_key=partition)

    def _tokens(self, length: int) -> list[int]:
        return [self._draw.randrange(FIRST_PLAIN_ID, QUICK.shape.vocab) for _ in range(length)]


def judge(stored: Sequence[float], fresh: Sequence[float]) -> tuple[float, float, float]:
    """AUC of "it was fast, so it is stored", with its 95 % interval."""

    def auc(fast: Any, slow: Any) -> float:
        return float(roc_auc_score([1] * len(fast) + [0] * len(slow), -np.concatenate([fast, slow])))

    found = bootstrap((stored, fresh), auc, vectorized=False, n_resamples=2000, method="percentile", rng=1)
    return auc(np.asarray(stored), np.asarray(fresh)), *map(float, found.confidence_interval)


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    rows = [
        (
            row["partition"],
            Spread(**row["stored_s"]).text(3),
            Spread(**row["fresh_s"]).text(3),
            f"{row['auc']:.3f} ({row['low']:.3f} to {row['high']:.3f})",
        )
        for row in report["rows"]
    ]
    head = ["partition of the attacker", "stored by the victim, s", "stored by nobody, s", "AUC, 95 % interval"]
    text = (
        f"{report['num']} passages of {report['passage']} tokens in each cell; seconds of a request, median (min-max)."
    )
    return [
        "# What time tells of another tenant's passages",
        "",
        *run_markdown(report),
        text,
        "",
        *markdown_table(head, rows),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    leave_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=400, help="passages of each kind")
    parser.add_argument("--passage", type=int, default=320, metavar="TOKENS")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "isolation", help="folder of the result files")
    args = parser.parse_args(argv)
    report: dict[str, Any] = {**describe_run(), "num": args.num, "passage": args.passage, "rows": []}
    cases = [(name, is_stored) for name in PARTITIONS for is_stored in (True, False)] * args.num
    random.Random(1).shuffle(cases)
    seconds: dict[tuple[str, bool], list[float]] = {case: [] for case in cases}
    model = cached_llama(QUICK.shape)
    flags = ("--chunk-cache", "--skip-tokenizer-init", "--max-total-tokens", "32768")
    with Server(model, *flags, env=offline_env(), log_path=CACHE_DIR / "server-timing.log") as server:
        attack = Attack(server, args.passage)
        for partition in tuple(PARTITIONS.values()) * 5:  # the server warms up
            attack.seconds(True, partition)
        for name, is_stored in cases:
            seconds[name, is_stored].append(attack.seconds(is_stored, PARTITIONS[name]))
    for name in PARTITIONS:
        stored, fresh = seconds[name, True], seconds[name, False]
        auc, low, high = judge(stored, fresh)
        spreads = {"stored_s": Spread.of(stored).as_dict(), "fresh_s": Spread.of(fresh).as_dict()}
        report["rows"].append({"partition": name, **spreads, "auc": auc, "low": low, "high": high})
    for path in write_result(args.out, "timing", report, to_markdown(report)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
