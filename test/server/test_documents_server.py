"""The documents as they stand: every block of shell commands is run, by a shell, in a folder with what it names.

Blocks that start a server are run until it is healthy; the others are asked of one server, page by page, in order.
Those of `ELSEWHERE` take hours, install something, or are run by the test that stands there.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from benchmark.common.machine import ROOT
from benchmark.common.server import free_port, offline_env, signal_group

from doc_pages import blocks
from server.conftest import FLAGS, TRAINED_MODEL
from server.contract import prime
from server_fixture import Server

pytestmark = [
    pytest.mark.all,
    pytest.mark.server,
    pytest.mark.skipif(not TRAINED_MODEL.exists(), reason=f"no trained model in {TRAINED_MODEL.name}"),
    pytest.mark.skipif(shutil.which("curl") is None, reason="no curl here"),
]

ELSEWHERE = {
    "make ": "of the project itself: CI runs install and test",
    "git clone": "of the project itself",
    "pip install": "test_package.py installs the wheel with its extras",
    "valkey-server": "test_fleet_server.py",
    "smg launch": "test_fleet_server.py",
    "redis://": "test_fleet_server.py",
    "mooncake": "test_replicas_server.py",
    "train-selector": "test/unit/selector/test_train.py",
    "benchmark/": "hours, or machines of their own; those of results were run",
    "-m pytest": "tests",
}
PLACEHOLDERS = {"DIR", "MODEL"}
SMALLER = {
    "HuggingFaceTB/SmolLM2-135M": str(TRAINED_MODEL),
    "8GB": "8MB",
    "500GB": "5MB",
    "--watch 60": "--watch 2",
    "check_layer=2": "check_layer=1",
    "layers=[2,5]": "layers=[0,1]",
}
KEY = re.compile(r"\b[0-9a-f]{32}\b")
"""Of a chunk, as an example has it."""


def shell_blocks() -> list[tuple[str, int, str]]:
    """(page, number, commands) of every fenced block of a shell that is run here."""
    found = []
    for page in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        text = page.read_text(encoding="utf-8")
        for number, block in enumerate(blocks(text, "bash")):
            kept = [line for line in _lines(block) if not any(what in line for what in ELSEWHERE)]
            if kept:
                found.append((page.name, number, "\n".join(kept)))
    return found


def _lines(block: str) -> list[str]:
    """Commands, each with the lines that belong to it."""
    lines: list[str] = []
    for line in block.splitlines():
        is_open = bool(lines) and (lines[-1].endswith("\\") or lines[-1].count("'") % 2)
        lines[-1:] = [lines[-1] + "\n" + line] if is_open else [*lines[-1:], line]
    return [line for line in lines if line.strip() and not line.startswith("#")]


BLOCKS = shell_blocks()
STARTS = [one for one in BLOCKS if "sglang.launch_server" in one[2]]
ASKS = {page: [one for one in BLOCKS if one[0] == page and one not in STARTS] for page, _, _ in BLOCKS}


def name_of(one: tuple[str, int, str]) -> str:
    return f"{one[0]}-{one[1]}"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What the commands name is in it."""
    (tmp_path / ".venv").symlink_to(Path(sys.executable).parents[1])
    (tmp_path / "benchmark").symlink_to(ROOT / "benchmark")
    (tmp_path / "corpus.jsonl").write_text('{"text": "Paris is in France.\\n"}\n{"text": "Oslo is in Norway.\\n"}\n')
    for name in ("prompt.txt", "first.txt", "second.txt"):
        (tmp_path / name).write_text(
            "Read.\n<|chunk|>Paris is in France.\n<|chunk|>Rome is in Italy.\n<|chunk|>Where is Rome?"
        )
    return tmp_path


def shell(commands: str, folder: Path) -> list[str]:
    """A shell that runs them, and fails where a command does, or a reply is an error."""
    rules = f"set -eu; export PATH={folder}/.venv/bin:$PATH\n"
    return ["bash", "-c", rules + 'curl() { command curl --fail-with-body -sS "$@"; }\n' + commands]


def smaller(commands: str, folder: Path) -> str:
    """The same for models of two layers, folders of the test, and little time."""
    for shown, small in SMALLER.items():
        commands = commands.replace(shown, small)
    return commands.replace("/var/cache", str(folder))


@pytest.mark.parametrize("block", STARTS, ids=name_of)
def test_a_server_starts_as_the_page_says(block: tuple[str, int, str], folder: Path):
    port = free_port()
    words = " ".join((*FLAGS, "--port", str(port)))
    commands = re.sub(r" #.*| --port \d+", "", block[2])
    for name in PLACEHOLDERS:
        commands = re.sub(rf"\b{name}\b", str(TRAINED_MODEL), commands)
    commands = smaller(commands, folder).replace("sglang.launch_server", f"sglang.launch_server {words}")
    log = folder / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            shell(commands, folder),
            cwd=folder,
            env={**os.environ, **offline_env()},
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 240
        while not _is_healthy(port):
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.5)
        stats = httpx.get(f"http://127.0.0.1:{port}/chunk_cache/stats", timeout=30, trust_env=False)
        assert stats.status_code == 200
    finally:
        signal_group(process.pid, 9)
        process.wait(10)


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[Server]:
    """With a chat template, which the trained model lacks; it takes any key."""
    with Server(model_dir, *FLAGS, "--chunk-cache", "--enable-metrics", "--served-model-name", "default") as server:
        yield server


@pytest.mark.parametrize("page", [page for page, found in ASKS.items() if found])
def test_a_page_is_run_from_top_to_bottom(page: str, server: Server, folder: Path):
    prime(server, ["Paris is in France.\n", "Rome is in Italy.\n"])
    listed = server.get("/chunk_cache/variants").json()["variants"]
    commands = KEY.sub(listed[0]["key"], "\n".join(block for _, _, block in ASKS[page]))
    commands = commands.replace("http://127.0.0.1:30000", server.url)
    commands = smaller(commands.replace("explain --prompt", f"explain --url {server.url} --prompt"), folder)
    done = subprocess.run(
        shell(commands, folder),
        cwd=folder,
        env={**os.environ, **offline_env()},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, (done.stdout[-1500:], done.stderr[-3000:])


def test_each_exception_is_one():
    shown = "\n".join(page.read_text(encoding="utf-8") for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")))
    assert [what for what in ELSEWHERE if what not in shown] == []
