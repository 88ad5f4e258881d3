"""Requests that nobody would send (`test/drawn_requests.py`), from a seed, against real servers of tiny models.

    python test/server/fuzz.py [--num 10000] [--seed 1] [--at-once 16] [--out FOLDER]

The requests are shared by servers with other tokenizers and other modes (`KINDS`), with SGLang's own checks of the KV
pool after every step. What must hold: no reply of 500 or more that stock SGLang would not give, none that is missing,
every 400 says something, `/v1/messages/count_tokens` counts what `/v1/messages` uses, and afterwards the server
answers, has all its slots back, and its processes have not grown. A request that breaks this is printed with its
number: `request_of(seed, number)` makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import psutil
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import leave_on_sigterm

from drawn_requests import COUNT, FOLLOWED, MESSAGES, MODEL, request_of
from server_fixture import Server
from tiny_models import make_model, make_tokenizer

ONE_BY_ONE, _one = ("/update_weights_from_disk", *FOLLOWED), threading.Lock()
"""Two updates of the weights at once, while generation is paused, end stock SGLang."""
NUM_ABORTED = 160
OURS = ("--chunk-cache", "--chunk-cache-marks", "--chunk-cache-parts")


@dataclass(frozen=True)
class Kind:
    """A server that is asked.

    Attributes:
        model: its kind in `tiny_models`.
        flags: beside those of all.
        is_spaced: whether its tokenizer puts a space in front of a text.
    """

    model: str
    flags: tuple[str, ...] = ()
    is_spaced: bool = False


KINDS = {
    "BOS, marks and parts": Kind("llama", OURS),
    "no BOS, discovered": Kind("qwen2", (*OURS, "--chunk-cache-discover", "--page-size", "16")),
    "a space in front, tiers": Kind(
        "llama",
        (*OURS, "--chunk-cache-config", '{"tiers": {"host_bytes": "8MB"}, "system_prompts": "same"}'),
        is_spaced=True,
    ),
    "one string, only warmed, short steps": Kind(
        "qwen3",
        ("--chunk-cache", "--chunk-cache-config", '{"trust": "warmed"}', "--chunked-prefill-size", "64"),
    ),
}


def send(http: httpx.Client, model: str, request: tuple[str, str, Any]) -> tuple[str, int, str]:
    """Route, status (0: no reply), and what is wrong with it; `model` is the folder of the server's."""
    method, path, body = request
    route = path.partition("?")[0]
    try:
        with _one if path in ONE_BY_ONE else contextlib.nullcontext():
            response = _ask(http, method, path, body, model)
            if path in FOLLOWED:
                _ask(http, method, FOLLOWED[path], {}, model)
        counted = _ask(http, method, COUNT, body, model) if path == MESSAGES and response.status_code == 200 else None
    except httpx.HTTPError as error:
        return route, 0, f"no reply: {error!r}"
    wrong = ""
    if response.status_code >= 500:
        wrong = response.text[:300]
    elif response.status_code >= 400 and len(response.text) < 10:
        wrong = f"says nothing: {response.text!r}"
    elif counted is not None and not body.get("stream"):
        usage = response.json()["usage"]
        used = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
        # An aborted one says 0.
        if used and (counted.status_code != 200 or counted.json() != {"input_tokens": used}):
            wrong = f"usage has {used} tokens, {COUNT} says {counted.text[:200]}"
    return route, response.status_code, wrong


def _client(url: str) -> httpx.Client:
    """Behind a 500 a server closes the connection, and the next request on it would have no reply: each has its own."""
    return httpx.Client(base_url=url, timeout=120, limits=httpx.Limits(max_keepalive_connections=0), trust_env=False)


def _ask(http: httpx.Client, method: str, path: str, body: Any, model: str) -> httpx.Response:
    raw = None if body is None else json.dumps(body).replace(MODEL, model)
    return http.request(method, path, content=raw, headers={"Content-Type": "application/json"})


def run(url: str, seed: int, numbers: range, at_once: int) -> tuple[Counter[tuple[str, int]], dict[int, str]]:
    """Counts by route and status, and by its number what is wrong with each reply that broke what must hold."""
    counts: Counter[tuple[str, int]] = Counter()
    broken = {}
    with (
        _client(url) as http,
        ThreadPoolExecutor(at_once) as pool,
    ):
        model = http.get("/model_info").json()["model_path"]
        replies = pool.map(lambda number: send(http, model, request_of(seed, number)), numbers)
        for number, (route, status, wrong) in zip(numbers, replies, strict=True):
            counts[route, status] += 1
            if wrong:
                broken[number] = f"{route} {status}: {wrong}"
    return counts, broken


def like_stock(url: str, seed: int, broken: dict[int, str]) -> dict[int, str]:
    """Those that a stock server at `url` answers with 500 or more too, or not at all.

    Each is sent alone, and one that is answered then `NUM_ABORTED` times while all that runs or waits is aborted: stock
    answers 500 to a score that was aborted before it was computed.
    """
    found = {}
    with _client(url) as http, ThreadPoolExecutor(16) as pool:
        model = http.get("/model_info").json()["model_path"]
        for number, wrong in broken.items():
            request = request_of(seed, number)
            failure = _first_failure([send(http, model, request)])
            if failure is None:
                with _aborting(url):
                    replies = list(pool.map(lambda one: send(http, model, one), [request] * NUM_ABORTED))
                failure = _first_failure(replies)
            if failure is not None:
                found[number] = f"{wrong}; stock {failure}"
    return found


def _first_failure(replies: Iterable[tuple[str, int, str]]) -> str | None:
    return next((f"{status}: {wrong}" for _, status, wrong in replies if status == 0 or status >= 500), None)


@contextlib.contextmanager
def _aborting(url: str) -> Iterator[None]:
    """Everything that runs meanwhile is aborted, again and again."""
    is_over = threading.Event()

    def abort() -> None:
        with _client(url) as http:
            while not is_over.wait(0.002):
                http.post("/abort_request", json={"abort_all": True})

    thread = threading.Thread(target=abort)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def left_behind(server: Server) -> dict[str, Any]:
    """What a flushed server still holds, of what should be nothing."""
    server.flush()
    rank = server.get("/chunk_cache/stats").json()["ranks"][0]
    pool = rank["tiers"]["pool"]
    held = {
        "variants": rank["index"]["num_variants"],
        "path tokens": rank["index"]["num_path_tokens"],
        "waiting requests": rank.get("held_requests", 0),
        "protected slots": pool["protected_tokens"],
        "slots": pool["capacity_tokens"] - pool["free_tokens"],
    }
    return {name: num for name, num in held.items() if num}


def memory(pid: int) -> float:
    """MB of a server's processes."""
    leader = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (leader, *leader.children(recursive=True))) / 1e6


@contextlib.contextmanager
def server_of(kind: Kind, folder: Path, *, is_stock: bool = False) -> Iterator[Server]:
    """A server of this kind; `is_stock`: of its model, without the chunk cache."""
    from server.conftest import FLAGS, STRICT

    model = make_model(kind.model, folder / f"{kind.model}{kind.is_spaced}", vocab=1024)
    if kind.is_spaced:
        make_tokenizer(1024, add_prefix_space=True).save_pretrained(model)
    with Server(model, *FLAGS, *(() if is_stock else kind.flags), env=STRICT) as server:
        yield server


def shares(num: int) -> dict[str, range]:
    """The numbers of the requests of each kind of server."""
    edges = [num * i // len(KINDS) for i in range(len(KINDS) + 1)]
    return {name: range(edges[i], edges[i + 1]) for i, name in enumerate(KINDS)}


def ask_kind(name: str, folder: Path, numbers: range, seed: int, at_once: int) -> dict[str, Any]:
    """What one server made of its share of the requests."""
    counts: Counter[tuple[str, int]] = Counter()
    broken, memory_mb, left = dict[int, str](), [], dict[str, Any]()
    began = time.monotonic()
    with server_of(KINDS[name], folder) as server:
        for first in range(numbers.start, numbers.stop, max(1, len(numbers) // 5)):
            part = range(first, min(first + max(1, len(numbers) // 5), numbers.stop))
            found, wrong = run(server.url, seed, part, at_once)
            counts += found
            broken |= wrong
            if not server.alive():
                print(server.log[-5000:])
                left = {"server": "lost"}
                break
            memory_mb.append(round(memory(server.pid)))
        else:
            server.generate("Still there?", max_new_tokens=2)
            left = left_behind(server)
        seconds = time.monotonic() - began
    stocks: dict[int, str] = {}
    if broken:
        with server_of(KINDS[name], folder, is_stock=True) as server:
            stocks = like_stock(server.url, seed, broken)
    ours = {number: wrong for number, wrong in broken.items() if number not in stocks}
    by_route: dict[str, dict[str, int]] = {}
    for (route, status), num in counts.items():
        by_route.setdefault(route, {})[str(status)] = num
    found_by = {"counts": by_route, "broken": ours, "stock": stocks, "left": left, "memory_mb": memory_mb}
    return {"num": len(numbers), "seconds": seconds, **found_by}


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    statuses = sorted(
        {int(status) for one in report["servers"].values() for c in one["counts"].values() for status in c}
    )
    routes = sorted({route for one in report["servers"].values() for route in one["counts"]})
    rows = []
    for route in routes:
        counts = [one["counts"].get(route, {}) for one in report["servers"].values()]
        rows.append((f"`{route}`", *(sum(c.get(str(s), 0) for c in counts) or "" for s in statuses)))
    servers = [
        (name, one["num"], f"{one['seconds']:.0f}", len(one["broken"]), len(one["stock"]), one["left"] or "nothing",
         ", ".join(map(str, one["memory_mb"])))
        for name, one in report["servers"].items()
    ]  # fmt: skip
    header = ["server", "requests", "seconds", "broken", "as stock", "left behind", "MB after each fifth"]
    wrong = [
        f"- seed {report['seed']}, number {number}{said}: `{text}`"
        for one in report["servers"].values()
        for said, numbers in (("", one["broken"]), (" (stock too)", one["stock"]))
        for number, text in list(numbers.items())[:20]
    ]
    return [
        *("# Fuzz of all routes", "", *run_markdown(report), ""),
        f"{report['num']} requests, seed {report['seed']}, {report['at_once']} at once. Broken: a reply of 500 or "
        "more, or none, that stock SGLang does not give; a 400 that says nothing; a count that is not the usage.",
        *("", *markdown_table(header, servers), "", *markdown_table(["route", *map(str, statuses)], rows), "", *wrong),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=10_000, help="requests of all servers together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "fuzz", help="folder of the result files")
    args = parser.parse_args()
    leave_on_sigterm()
    report: dict[str, Any] = {**describe_run(), **{key: getattr(args, key) for key in ("num", "seed", "at_once")}}
    report["servers"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, numbers in shares(args.num).items():
            found = ask_kind(name, Path(folder), numbers, args.seed, args.at_once)
            report["servers"][name] = found
            print(f"{name}: {len(numbers)} asked, broken {found['broken']}, left {found['left']}", flush=True)
    for path in write_result(args.out, "fuzz", report, to_markdown(report)):
        print(path)
    return any(one["broken"] or one["left"] for one in report["servers"].values())


if __name__ == "__main__":
    sys.exit(main())
