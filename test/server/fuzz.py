"""Requests that nobody would send: our marks, options and routes, right and wrong ones mixed, from a seed.

    python test/server/fuzz.py [--num 10000] [--seed 1] [--at-once 16] [--url URL] [--out FOLDER]

Without `--url` a server of a tiny model is started, with SGLang's own checks of its KV pool after every step. What must
hold: no reply of 500 or more, none that is missing, every 400 says something, and afterwards the server answers, has
all its slots back, and its processes have not grown. A request that breaks this is printed with its number:
`request_of(seed, number)` makes it again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import httpx

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[2])]

import psutil
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result

from chunk_cache.methods import METHODS
from server_fixture import Server

SEP = "<|chunk|>"
WORDS = (
    "rose",
    "stone",
    "winter",
    "Rome",
    "Paris",
    "\n",
    "  ",
    "é",
    "日本",
    "\u200b",
    "\x00",
    "<s>",
    "</s>",
    "{text}",
    "",
)
NUMBERS = (
    0,
    1,
    -1,
    2,
    7,
    0.0,
    0.15,
    0.5,
    1.0,
    1.5,
    -0.1,
    1e308,
    -1e308,
    2**31,
    2**63,
    10**30,
    float("nan"),
    float("inf"),
)
OPTIONS = sorted({option.name for method in METHODS.values() for option in method.options_schema})
KEYS = (
    "spans",
    "mode",
    "method",
    "ratio",
    "options",
    "answer_tokens",
    "keep_tokens",
    "chunks",
    "template",
    "explain",
    "x",
)
ADMIN = ("stats", "variants", "pin", "unpin", "evict", "flush", "warm", "nothing")


class Draw(Random):
    """Values that a request may hold."""

    def text(self) -> str:
        return " ".join(self.choice(WORDS) for _ in range(self.choice((0, 3, 3, 20, 20, 40, 60))))

    def marked(self) -> str:
        return SEP.join(self.text() for _ in range(self.choice((1, 1, 3, 3, 4, 8))))

    def junk(self, depth: int = 0) -> Any:
        """Any JSON value."""
        kind = self.randrange(9 if depth < 3 else 6)
        if kind < 2:
            return self.choice(NUMBERS)
        if kind < 4:
            return self.choice((None, True, False, "", "auto", "epic", "off", "1", "[[0, 2]]", self.text()))
        if kind == 4:
            return []
        if kind == 5:
            return {}
        if kind == 6:
            return [self.junk(depth + 1) for _ in range(self.randrange(4))]
        if kind == 7:
            return {self.choice((*KEYS, "id", "text", "")): self.junk(depth + 1) for _ in range(self.randrange(4))}
        value: Any = 1
        for _ in range(self.choice((5, 60, 300))):
            value = [value]
        return value

    def spans(self) -> list[list[int]]:
        edges = sorted(self.sample(range(60), 2 * self.randrange(1, 4)))
        return [list(pair) for pair in zip(edges[::2], edges[1::2], strict=True)]

    def passages(self) -> list[Any]:
        ids = (None, "a", "b", "a")
        return [
            {"text": self.text(), **({"id": name} if (name := self.choice(ids)) else {})}
            for _ in range(self.randrange(4))
        ]

    def options(self) -> dict[str, Any]:
        """A `chunk_cache` object, most of it right."""
        right: dict[str, Callable[[], Any]] = {
            "spans": self.spans,
            "mode": lambda: self.choice(("auto", "exact", "off", "prepare")),
            "method": lambda: self.choice(sorted(METHODS)),
            "ratio": lambda: self.choice((0, 0.05, 0.15, 1, 1.0)),
            "options": lambda: {self.choice(OPTIONS): self.choice((0, 1, 3, 8, 0.5, "kv", [0]))},
            "answer_tokens": lambda: self.randrange(80),
            "keep_tokens": lambda: self.randrange(80),
            "chunks": self.passages,
            "template": lambda: self.choice(("{text}\n", "[{id}] {text}", "{title}{text}", "none", "{text}{text}")),
            "explain": lambda: self.choice((True, False)),
            "x": self.junk,
        }
        found = {}
        for key in self.sample(KEYS[:-1], self.choice((0, 1, 1, 2, 3))):
            found[key] = self.junk() if self.random() < 0.04 else right[key]()
        if self.random() < 0.02:
            found["x"] = self.junk()
        return found

    def custom(self) -> Any:
        return self.junk() if self.random() < 0.03 else self.options()

    def maybe(self, body: dict[str, Any], **values: Callable[[], Any]) -> dict[str, Any]:
        """Some of the values, now and then one of another kind."""
        for key, value in values.items():
            if self.random() < 0.4:
                body[key] = self.junk() if self.random() < 0.03 else value()
        return body

    def part(self) -> dict[str, Any]:
        part: dict[str, Any] = {"type": "text", "text": self.marked() if self.random() < 0.3 else self.text()}
        return self.maybe(
            part,
            cache_control=lambda: {"type": "ephemeral"},
            prompt_cache_breakpoint=lambda: self.choice((True, {"type": "ephemeral"})),
        )

    def content(self) -> Any:
        return self.marked() if self.random() < 0.5 else [self.part() for _ in range(self.randrange(1, 5))]


def _generate(draw: Draw) -> tuple[str, str, Any]:
    sampling = draw.maybe(
        {"max_new_tokens": draw.choice((0, 1, 3)), "temperature": 0},
        custom_params=lambda: {"chunk_cache": draw.custom()},
    )
    body: dict[str, Any] = {"sampling_params": sampling}
    if draw.random() < 0.4:
        body["input_ids"] = [draw.randrange(300) for _ in range(draw.choice((0, 1, 30, 60)))]
    else:
        body["text"] = [draw.marked() for _ in range(draw.randrange(1, 4))] if draw.random() < 0.2 else draw.marked()
    draw.maybe(body, stream=lambda: True, extra_key=lambda: draw.choice(("a", "b")), return_logprob=lambda: True)
    return "POST", "/generate", body


def _completions(draw: Draw) -> tuple[str, str, Any]:
    body: dict[str, Any] = {"model": "default", "prompt": draw.marked(), "max_tokens": draw.choice((1, 3))}
    if draw.random() < 0.2:
        body["prompt"] = draw.choice(
            ([draw.marked(), draw.marked()], [draw.randrange(300) for _ in range(20)], draw.junk())
        )
    draw.maybe(body, n=lambda: draw.randrange(1, 3), echo=lambda: True, stream=lambda: True, suffix=draw.text)
    draw.maybe(body, chunk_cache=draw.custom)
    return "POST", "/v1/completions", draw.maybe(body, custom_params=lambda: {"chunk_cache": draw.custom()})


def _chat(draw: Draw) -> tuple[str, str, Any]:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": draw.choice(roles), "content": draw.content()} for _ in range(draw.randrange(4))]
    body: dict[str, Any] = {"model": "default", "messages": [*messages, {"role": "user", "content": draw.content()}]}
    body["max_tokens"] = draw.choice((1, 3))
    draw.maybe(body, chunk_cache=draw.custom, documents=lambda: draw.choice((["a", "b"], draw.passages(), draw.junk())))
    draw.maybe(body, n=lambda: draw.randrange(1, 3), stream=lambda: True, cache_salt=lambda: draw.choice(("a", "b")))
    return "POST", "/v1/chat/completions", draw.maybe(body, custom_params=lambda: {"chunk_cache": draw.custom()})


def _messages(draw: Draw) -> tuple[str, str, Any]:
    def block() -> Any:
        source = {"type": "text", "media_type": "text/plain", "data": draw.text()}
        blocks = (
            draw.part(),
            {"type": "document", "source": source if draw.random() < 0.8 else draw.junk(), "title": draw.text()},
            {"type": "search_result", "source": "s", "title": "t", "content": [draw.part()]},
        )
        return draw.choice(blocks)

    content = draw.marked() if draw.random() < 0.3 else [block() for _ in range(draw.randrange(1, 5))]
    body: dict[str, Any] = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": content}]}
    draw.maybe(body, chunk_cache=draw.custom, stream=lambda: True, system=draw.content)
    return "POST", "/v1/messages", body


def _admin(draw: Draw) -> tuple[str, str, Any]:
    route = draw.choice(ADMIN)
    if draw.random() < 0.3:
        return (
            "GET",
            f"/chunk_cache/{route}?{draw.choice(('', 'limit=3', 'limit=-1', 'limit=x', 'offset=1'))}",
            None,
        )
    body: dict[str, Any] = {} if route == "flush" else {"texts": [draw.text() for _ in range(draw.randrange(1, 3))]}
    if draw.random() < 0.3:
        draw.maybe(body, keys=lambda: [draw.text()], input_ids=lambda: [[1, 2, 3]], extra_key=lambda: "a", x=draw.junk)
        draw.maybe(body, ttl_s=lambda: draw.choice(NUMBERS), neighbours=lambda: draw.randrange(3))
    return "POST", f"/chunk_cache/{route}", draw.junk() if draw.random() < 0.05 else body


ROUTES = (_generate, _generate, _completions, _chat, _chat, _messages, _admin)


def request_of(seed: int, number: int) -> tuple[str, str, Any]:
    """Method, path and body of one request; always the same."""
    draw = Draw(f"{seed}/{number}")
    return draw.choice(ROUTES)(draw)


def send(http: httpx.Client, seed: int, number: int) -> tuple[str, int, str]:
    """Route, status (0: no reply), and what is wrong with it."""
    method, path, body = request_of(seed, number)
    route = path.partition("?")[0]
    try:
        raw = None if body is None else json.dumps(body)
        response = http.request(method, path, content=raw, headers={"Content-Type": "application/json"})
    except httpx.HTTPError as error:
        return route, 0, f"no reply: {error!r}"
    if response.status_code >= 500:
        return route, response.status_code, response.text[:300]
    if response.status_code >= 400 and len(response.text) < 10:
        return route, response.status_code, f"says nothing: {response.text!r}"
    return route, response.status_code, ""


def run(url: str, seed: int, numbers: range, at_once: int) -> tuple[Counter[tuple[str, int]], list[str]]:
    """Counts by route and status, and one line for each request that broke what must hold."""
    counts: Counter[tuple[str, int]] = Counter()
    broken = []
    limits = httpx.Limits(max_connections=at_once)
    with (
        httpx.Client(base_url=url, timeout=120, limits=limits, trust_env=False) as http,
        ThreadPoolExecutor(at_once) as pool,
    ):
        for number, (route, status, wrong) in zip(
            numbers, pool.map(lambda n: send(http, seed, n), numbers), strict=True
        ):
            counts[route, status] += 1
            if wrong:
                broken.append(f"seed {seed}, number {number}: {route} {status}: {wrong}")
    return counts, broken


def memory(pid: int) -> float:
    """MB of a server's processes."""
    leader = psutil.Process(pid)
    return sum(one.memory_info().rss for one in (leader, *leader.children(recursive=True))) / 1e6


@contextlib.contextmanager
def tiny_server() -> Iterator[Server]:
    from server.conftest import FLAGS, STRICT
    from tiny_models import make_model

    with tempfile.TemporaryDirectory() as folder:
        model = make_model("llama", Path(folder) / "llama")
        with Server(model, *FLAGS, "--chunk-cache", "--chunk-cache-marks", "--chunk-cache-parts", env=STRICT) as server:
            yield server


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    statuses = sorted({int(status) for counts in report["counts"].values() for status in counts})
    rows = [
        (f"`{route}`", *(counts.get(str(s), "") for s in statuses))
        for route, counts in sorted(report["counts"].items())
    ]
    memory_mb = ", ".join(f"{value:.0f}" for value in report["memory_mb"])
    return [
        *("# Fuzz of all routes", "", *run_markdown(report)),
        f"{report['num']} requests, seed {report['seed']}, {report['at_once']} at once, in {report['seconds']:.0f} s.",
        f"Broken: {len(report['broken'])}. Memory of the server after each tenth, MB: {memory_mb}.",
        *("", *markdown_table(["route", *map(str, statuses)], rows), "", *report["broken"][:50]),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--at-once", type=int, default=16)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "fuzz", help="folder of the result files")
    args = parser.parse_args()
    report: dict[str, Any] = {**describe_run(), **{key: getattr(args, key) for key in ("num", "seed", "at_once")}}
    counts: Counter[tuple[str, int]] = Counter()
    broken, memory_mb, began = [], [], time.monotonic()
    with tiny_server() as server:
        for first in range(0, args.num, max(1, args.num // 10)):
            numbers = range(first, min(first + max(1, args.num // 10), args.num))
            found, wrong = run(server.url, args.seed, numbers, args.at_once)
            counts += found
            broken += wrong
            memory_mb.append(memory(server.pid))
            print(f"{numbers.stop} asked, {len(broken)} broken, {memory_mb[-1]:.0f} MB", flush=True)
            for line in wrong[:5]:
                print(line, flush=True)
        server.flush()
        server.generate("Still there?", max_new_tokens=2)
    by_route: dict[str, dict[str, int]] = {}
    for (route, status), num in counts.items():
        by_route.setdefault(route, {})[str(status)] = num
    report |= {"seconds": time.monotonic() - began, "counts": by_route, "broken": broken, "memory_mb": memory_mb}
    for path in write_result(args.out, "fuzz", report, to_markdown(report)):
        print(path)
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
