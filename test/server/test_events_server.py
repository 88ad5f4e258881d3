"""A listener learns what a real server stores, loses and forgets, and what it still has when it is started anew."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from benchmark.common.server import free_port

from chunk_cache_tools.holders import Holders, Source
from doc_pages import blocks, section
from server.admin_server import KEY, AdminServer
from server.conftest import FLAGS, STRICT
from server.contract import chunk_ids, marked
from server.tier_contract import PATIENCE_S, fill_pool

pytestmark = [pytest.mark.all, pytest.mark.server]

SALT = "known-to-routers"
NAME = "replica"


def events_of(*ports: int) -> dict[str, str]:
    endpoint, replay_endpoint = (f"tcp://127.0.0.1:{port}" for port in ports)
    return {"endpoint": endpoint, "replay_endpoint": replay_endpoint, "salt": SALT}


def eventually(ask: Callable[[], object], expected: object) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while (found := ask()) != expected and time.monotonic() < deadline:
        time.sleep(0.02)
    assert found == expected


@pytest.fixture
def launch(model_dir: Path, tmp_path: Path) -> Iterator[Callable[[], AdminServer]]:
    """Starts the server, always with the same addresses and folder."""
    config = {
        "events": events_of(free_port(), free_port()),
        "tiers": {"disk": str(tmp_path / "chunks"), "controller": False},
    }
    flags = ("--enable-metrics", "--api-key", KEY, "--chunk-cache", "--chunk-cache-config", json.dumps(config))
    started: list[AdminServer] = []

    def start() -> AdminServer:
        started.append(AdminServer(model_dir, *FLAGS, *flags, env=STRICT))
        started[-1].start()
        started[-1].config = config  # type: ignore[attr-defined]
        return started[-1]

    yield start
    for server in started:
        server.stop()


def run_page(server: AdminServer, model_dir: Path) -> Any:
    """What the program of docs/fleet.md prints, with the addresses and salt of this server."""
    program = blocks(section("fleet.md", "Events"), "python")[0]
    events = server.config["events"]  # type: ignore[attr-defined]
    own = {
        "tcp://127.0.0.1:5557": events["endpoint"],
        "tcp://127.0.0.1:5558": events["replay_endpoint"],
        "http://127.0.0.1:30001": server.url,
        "SECRET": SALT,
        '"MODEL"': f'"{model_dir}"',
    }
    for text, value in own.items():
        assert text in program
        program = program.replace(text, value)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    return ast.literal_eval(done.stdout)


def test_what_is_stored_evicted_flushed_and_there_again(launch, passages, tokenizer: Any, model_dir: Path) -> None:
    server = launch()
    source = {NAME: Source(*(server.config["events"][key] for key in ("endpoint", "replay_endpoint")))}
    chunks = passages.several(3)
    first, second, third = (len(chunk_ids(tokenizer, chunk)) for chunk in chunks)
    with (
        Holders(source, SALT, encode=partial(chunk_ids, tokenizer)) as holders,
        Holders(source, "another", encode=partial(chunk_ids, tokenizer)) as stranger,
    ):

        def held(who: Holders = holders) -> Sequence[dict[str, int]]:
            return [who.who_holds(chunks, tiers=[tier]) for tier in ("pool", "disk")]

        assert holders.wait(PATIENCE_S)
        assert held() == [{NAME: 0}] * 2
        server.generate(marked(chunks).text, max_new_tokens=1)
        eventually(held, [{NAME: first + second + third}] * 2)

        assert server.ask("evict", texts=chunks[:1])["evicted"]
        eventually(held, [{NAME: second + third}] * 2)

        server.flush()
        eventually(held, [{NAME: 0}, {NAME: second + third}])
        assert stranger.wait(PATIENCE_S)
        assert held(stranger) == [{NAME: 0}] * 2

        counted = server.get("/metrics").text
        assert 'sglang:chunk_cache_events_total{kind="stored"' in counted
        assert 'kind="dropped"' not in counted
        assert run_page(server, model_dir) == {server.url: 0}, "its passages are not stored"
        assert SALT not in server.log
        assert SALT not in json.dumps(server.stats())

        server.stop()
        eventually(held, [{}, {}])
        server = launch()
        eventually(held, [{NAME: 0}, {NAME: second + third}])
        server.generate(marked(chunks[::-1], head="Again.\n").text, max_new_tokens=1)
        eventually(held, [{NAME: first + second + third}] * 2)
        fill_pool(server)
        eventually(held, [{NAME: 0}, {NAME: first + second + third}])
        assert server.alive()


def test_data_parallel_ranks_publish_each_for_itself(model_dir: Path, passages, tokenizer: Any) -> None:
    ports = free_port(), free_port()
    flags = ("--dp-size", "2", "--chunk-cache", "--chunk-cache-config", json.dumps({"events": events_of(*ports)}))
    sources = {f"{NAME} {rank}": Source(*(f"tcp://127.0.0.1:{port + rank}" for port in ports)) for rank in range(2)}
    chunks = passages.several(2)
    lens = [len(chunk_ids(tokenizer, chunk)) for chunk in chunks]
    with (
        AdminServer(model_dir, *FLAGS, "--api-key", KEY, *flags, env=STRICT) as server,
        Holders(sources, SALT, encode=partial(chunk_ids, tokenizer)) as holders,
    ):
        for rank, chunk in enumerate(chunks):
            server.generate(marked([chunk]).text, max_new_tokens=1, routed_dp_rank=rank)
        for rank in range(2):
            held = {f"{NAME} {rank}": lens[rank], f"{NAME} {1 - rank}": 0}
            eventually(partial(holders.who_holds, chunks[rank : rank + 1]), held)


def test_of_tensor_parallel_ranks_the_first_publishes(model_dir: Path, passages, tokenizer: Any) -> None:
    events = events_of(free_port(), free_port())
    flags = ("--tp", "2", "--chunk-cache", "--chunk-cache-config", json.dumps({"events": events}))
    source = {NAME: Source(events["endpoint"], events["replay_endpoint"])}
    chunks = passages.several(2)
    lens = [len(chunk_ids(tokenizer, chunk)) for chunk in chunks]
    with (
        AdminServer(model_dir, *FLAGS, "--api-key", KEY, *flags, env=STRICT) as server,
        Holders(source, SALT, encode=partial(chunk_ids, tokenizer)) as holders,
    ):
        server.generate(marked(chunks).text, max_new_tokens=1)
        eventually(partial(holders.who_holds, chunks), {NAME: sum(lens)})
        assert server.ask("evict", texts=chunks[:1])["evicted"]
        eventually(partial(holders.who_holds, chunks), {NAME: lens[1]})
