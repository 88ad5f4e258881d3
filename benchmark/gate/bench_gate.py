"""The gate on a real server: how it moves the ratio, whether it measures right, what it costs others.

    python benchmark/gate/bench_gate.py [--quick] [--model DIR] [--out FOLDER]

A trained model of a million parameters, Poisson traffic. First `needle` questions, which reuse does not harm, then
`carry` questions, which it does: the ratio over time. Then the same replies measured without the gate. Then plain
requests beside requests with chunks, on a server that verifies and one that does not, in pairs.
About 7 minutes on two cores; results: `benchmark/results/gate/`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.paired import loss_of_pairs
from benchmark.common.results import RESULTS_DIR, describe_run, write_result
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.gate.live import Served, prime, serve
from benchmark.gate.offline import compare, measure_offline
from benchmark.gate.questions import TokenPrompt, make_prompts
from benchmark.gate.report import markdown, over_time
from benchmark.serving.arrivals import poisson
from benchmark.serving.client import open_loop

from chunk_cache.gate.verification_ledger import MEASURES

MODELS = ROOT / "benchmark" / "quality" / "models"
TARGET = {"kl": 0.1, "percentile": 95, "steps": [["epic", 0.15], ["epic", 0.3], ["cacheblend", 0.6]]}
FLAGS = ("--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "131072")
SHARE, OTHERS_SHARE = 1.0, 0.2
TOLERANCE = 1e-3
INTERVAL_S = 10.0
MAX_NEW_TOKENS = 3
PLAIN_LEN = 200


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODELS / "qa-1m-seed0")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second")
    parser.add_argument("--needle", type=int, default=90, metavar="N", help="questions that reuse does not harm")
    parser.add_argument("--carry", type=int, default=180, metavar="N", help="questions that it harms")
    parser.add_argument(
        "--pairs", type=int, default=8, metavar="N", help="of blocks with and without verification; 0 = none"
    )
    parser.add_argument("--seconds", type=float, default=12.0, help="of a block")
    parser.add_argument(
        "--others-rate", type=float, default=6.0, help="requests a second in a block, half of them plain"
    )
    parser.add_argument("--quick", action="store_true", help="a rehearsal: shows that all of it runs, measures nothing")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "gate", help="folder of the result files")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when a check does not hold")
    args = parser.parse_args()
    if args.quick:
        args.needle, args.carry, args.pairs, args.seconds = 12, 24, min(args.pairs, 2), 3.0
    return args


def flags(*, share: float, target: dict[str, Any] | None = None) -> tuple[str, ...]:
    found = ("--chunk-cache", "--chunk-cache-config", json.dumps({"verify_share": share}))
    return (*FLAGS, *found) if target is None else (*FLAGS, *found, "--chunk-cache-target", json.dumps(target))


def gate_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = server.get("/chunk_cache/stats").json()["ranks"][0]["gate"]
    return found


def run_live(args: argparse.Namespace, vocab_size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Needle, then carry, then the same replies offline: on one server."""
    served: list[Served] = []
    found: dict[str, dict[str, Any]] = {}
    begins = 0.0
    with Server(args.model, *flags(share=SHARE, target=TARGET), env=offline_env()) as server:
        print(f"started in {server.start_s:.0f} s", flush=True)
        for family, num in (("needle", args.needle), ("carry", args.carry)):
            prompts = make_prompts(args.model, family, num)
            prime(server, prompts)
            some, measures = serve(
                server, prompts, rate=args.rate, vocab_size=vocab_size, max_new_tokens=MAX_NEW_TOKENS
            )
            served += [Served(**{**vars(one), "at_s": begins + one.at_s}) for one in some]
            begins = max(one.at_s for one in served) + 1.0
            found |= measures
            print(f"{family}: {len(some)} served, {len(found)} verified, {gate_of(server)['target']}", flush=True)
        stats = gate_of(server)
        verified = [one for one in served if one.rid in found]
        server.flush()
        offline = measure_offline(server, verified, vocab_size)
        moves = [line.split("the target moves ")[1] for line in server.log.splitlines() if "the target moves" in line]
    gate = [found[one.rid] for one in verified]
    rows = [
        {
            "rid": one.rid,
            "family": one.prompt.family,
            "at_s": one.at_s,
            "step": one.info["target"]["step"],
            "method": one.info["method"],
            "ratio": one.info["ratio"],
            "is_exact": one.info["fallback_reason"] == "target",
        }
        for one in served
    ]
    live = {
        "served": rows,
        "over_time": over_time(rows, INTERVAL_S),
        "steps": [*(f"{i} {method} at {ratio:g}" for i, (method, ratio) in enumerate(TARGET["steps"])), "then exact"],
        "moves": moves,
        "requests": stats["requests"],
        "state": stats["target"]["partitions"],
        "quality": stats["quality"],
        "num_compared": len(verified),
    }
    return live, compare(gate, offline, MEASURES)


def run_others(args: argparse.Namespace, vocab_size: int) -> dict[str, Any]:
    """Plain requests beside requests with chunks, on two servers of which one is stopped at a time."""
    draw = random.Random(5)
    num = round(args.seconds * args.others_rate)
    prompts = make_prompts(args.model, "needle", 40)
    pairs: dict[str, list[tuple[float, float]]] = {"p50": [], "p99": []}
    with (
        Server(args.model, *flags(share=OTHERS_SHARE), env=offline_env()) as verifying,
        Server(args.model, *flags(share=0.0), env=offline_env()) as other,
    ):
        servers = {"with": verifying, "without": other}
        for server in servers.values():
            prime(server, prompts)
            open_loop(
                server.url,
                [_body(draw, prompts, vocab_size, i) for i in range(num)],
                poisson(num, args.others_rate, 99),
            )
            server.pause()
        for pair in range(args.pairs):
            bodies = [_body(draw, prompts, vocab_size, i) for i in range(num)]
            times = poisson(num, args.others_rate, pair)
            quantiles = {}
            for name in ("with", "without") if pair % 2 else ("without", "with"):
                server = servers[name]
                server.resume()
                run = open_loop(server.url, bodies, times)
                server.pause()
                assert len(run.answered) == num, "a request failed"
                plain = [record.ttft_s for record in run.records[::2]]
                quantiles[name] = {"p50": float(np.quantile(plain, 0.5)), "p99": float(np.quantile(plain, 0.99))}
            for name, values in pairs.items():
                values.append((quantiles["with"][name], quantiles["without"][name]))
            print(f"pair {pair}: {quantiles}", flush=True)
        for server in servers.values():
            server.resume()
        requests = gate_of(verifying)["requests"]
    return {
        "num_pairs": args.pairs,
        "seconds": args.seconds,
        "rate": args.others_rate,
        "share": OTHERS_SHARE,
        "verified": requests["verified"],
        "given_up": requests["given_up"],
        **{name: loss_of_pairs(values, target=5.0) for name, values in pairs.items()},
    }


def _body(draw: random.Random, prompts: list[TokenPrompt], vocab_size: int, number: int) -> dict[str, Any]:
    """Plain tokens, or a question, in turns."""
    params: dict[str, Any] = {"max_new_tokens": 4, "temperature": 0.0, "ignore_eos": True}
    ids = [draw.randrange(10, vocab_size) for _ in range(PLAIN_LEN)]
    if number % 2:
        prompt = draw.choice(prompts)
        ids = list(prompt.ids)
        params["custom_params"] = {"chunk_cache": {"spans": prompt.spans}}
    return {"input_ids": ids, "sampling_params": params, "stream": True}


def checks_of(live: dict[str, Any], offline: dict[str, Any]) -> list[dict[str, Any]]:
    """What must hold."""
    needle = [one for one in live["served"] if one["family"] == "needle"]
    last = [one for one in live["served"] if one["family"] == "carry"][-20:]
    requests = live["requests"]
    ended = requests["verified"] + sum(requests["dropped"].values()) + requests["waiting"] + requests["in_flight"]
    return [
        {"what": "`needle` keeps the least ratio", "holds": all(one["step"] == 0 for one in needle)},
        {
            "what": "`carry` drives it up until the target holds, or to exact prefill",
            "holds": bool(live["moves"]) and (all(one["step"] > 0 for one in last)),
        },
        *(
            {
                "what": f"{name} of each reply is that of an offline computation to {TOLERANCE:g}",
                "holds": one["largest_difference"] <= TOLERANCE,
            }
            for name, one in offline.items()
        ),
        {
            "what": "the server's histograms are those of the offline computation, every verified reply in them",
            "holds": live["num_compared"] == requests["verified"]
            and all(_histogram(live["quality"], name) == one["offline"] for name, one in offline.items()),
        },
        {"what": "every chosen request is accounted for", "holds": requests["chosen"] == ended},
    ]


def _histogram(quality: list[dict[str, Any]], name: str) -> list[int]:
    """Of all kinds of replies together."""
    return np.sum([list(row[name]["buckets"].values()) for row in quality], axis=0).tolist()


def main() -> int:
    args = parse_args()
    leave_on_sigterm()
    run = describe_run()
    vocab_size = json.loads((args.model / "config.json").read_text())["vocab_size"]
    live, offline = run_live(args, vocab_size)
    report = {
        "run": run,
        "model": args.model.name,
        "traffic": f"{args.needle} needle and {args.carry} carry questions, {args.rate:g} requests a second, "
        f"verify_share {SHARE:g}, target {json.dumps(TARGET)}",
        "live": live,
        "offline": offline,
        "checks": checks_of(live, offline),
        "others": run_others(args, vocab_size) if args.pairs else None,
    }
    lines = markdown(report)
    print("\n".join(lines))
    write_result(args.out, "gate", report, lines)
    return int(args.strict and not all(check["holds"] for check in report["checks"]))


if __name__ == "__main__":
    sys.exit(main())
