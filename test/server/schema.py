"""Requests from the OpenAPI document of our routes (`openapi.py`), right and wrong ones, by schemathesis.

    python test/server/schema.py [--num 2000] [--seed 1] [--out FOLDER]

A server of a tiny model with an API key is started, with SGLang's own checks of its KV pool after every step. What
must hold: no reply of 500 or more, none that is missing, a body whose part of ours the schema refuses is a 4xx, and
afterwards the server answers and holds nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import hypothesis
import jsonschema_rs
import requests
import schemathesis
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from hypothesis import HealthCheck, Phase
from schemathesis.generation import GenerationMode

from server.admin_server import KEY, AdminServer
from server.fuzz import left_behind
from server.openapi import OURS, document

FLAGS = ("--chunk-cache", "--chunk-cache-marks", "--chunk-cache-parts", "--api-key", KEY)
TIMEOUT_S = 60


def is_refused(path: str, raw: bytes) -> bool:
    """Whether our part of a body stands there and breaks its schema; of other JSON nothing is said.

    Nor of a batch without prompts, which nobody looks at.
    """
    where, schema = OURS[path]
    try:
        body = value = json.loads(raw or b"{}")
        for key in where:
            value = value[key]
    except (ValueError, KeyError, TypeError):
        return False
    if isinstance(body, dict) and body.get("text") == []:
        return False
    return not jsonschema_rs.validator_for(schema).is_valid(value)


def wrong(case: Any, session: requests.Session, url: str, counts: Counter[tuple[str, str, int]]) -> str:
    """What is wrong with the reply; empty: nothing."""
    try:
        response = case.call(base_url=url, session=session, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        counts[case.path, "", 0] += 1
        return f"no reply: {error!r}"
    raw = response.request.body or b""
    raw = raw.encode() if isinstance(raw, str) else raw
    refused = case.path in OURS and is_refused(case.path, raw)
    counts[case.path, "wrong" if refused else "other", response.status_code] += 1
    if response.status_code >= 500 or (refused and response.status_code < 400):
        return f"{response.status_code} to {raw[:400]!r}: {response.text[:300]}"
    return ""


def run(url: str, seed: int, num: int) -> tuple[Counter[tuple[str, str, int]], list[str]]:
    """Up to so many requests, as many of each route and kind; their counts, a line for each broken promise."""
    counts: Counter[tuple[str, str, int]] = Counter()
    broken: list[str] = []
    session = requests.Session()
    session.trust_env = False
    session.headers["Authorization"] = f"Bearer {KEY}"
    operations = [found.ok() for found in schemathesis.openapi.from_dict(document()).get_all_operations()]
    each = max(1, num // (2 * len(operations)))
    bounds = hypothesis.settings(
        max_examples=each,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    for operation in operations:
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and not (operation.body or operation.query):
                continue

            @hypothesis.seed(seed)
            @bounds
            @hypothesis.given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: Any) -> None:
                if found := wrong(case, session, url, counts):
                    broken.append(f"seed {seed}: {case.method} {case.path}: {found}")

            ask()
    return counts, broken


def held_by(server: AdminServer) -> dict[str, Any]:
    """What the server still holds when all is unpinned and flushed."""
    server.ask("unpin", all=True)
    return left_behind(server)


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    statuses = sorted({int(status) for counts in report["counts"].values() for status in counts})
    rows = [
        (*name.split(" "), *(counts.get(str(s), "") for s in statuses)) for name, counts in report["counts"].items()
    ]
    return [
        *("# Requests from the schema of our routes", "", *run_markdown(report), ""),
        f"{report['asked']} requests by schemathesis {schemathesis.__version__}, seed {report['seed']}, one at a time, "
        f"in {report['seconds']:.0f} s. Broken: {len(report['broken'])}.",
        *("", "Wrong: our part of the body breaks its schema, so that the reply must be a 4xx.", ""),
        *(*markdown_table(["route", "body", *map(str, statuses)], rows), "", *report["broken"][:50]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=2000, help="most requests")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "fuzz", help="folder of the result files")
    args = parser.parse_args()
    from server.conftest import FLAGS as COMMON
    from server.conftest import STRICT
    from tiny_models import make_model

    report: dict[str, Any] = {**describe_run(), "seed": args.seed, "num": args.num}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "llama")
        with AdminServer(model, *COMMON, *FLAGS, env=STRICT) as server:
            began = time.monotonic()
            counts, broken = run(server.url, args.seed, args.num)
            seconds = time.monotonic() - began
            server.generate("Still there?", max_new_tokens=2)
            if held := held_by(server):
                broken.append(f"left behind: {held}")
    by_route: dict[str, dict[str, int]] = {}
    for (path, kind, status), num in sorted(counts.items()):
        by_route.setdefault(f"`{path}` {kind}", {})[str(status)] = num
    report |= {"asked": counts.total(), "seconds": seconds, "counts": by_route, "broken": broken}
    for path in write_result(args.out, "schema", report, to_markdown(report)):
        print(path)
    print(*broken[:10], sep="\n")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
