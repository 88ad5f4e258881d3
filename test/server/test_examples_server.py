"""The programs of docs/examples against a real server: what they print is what it replied, and passages were reused.

Those with client libraries run in `.venv-clients`, as the programs of test_clients_server.py.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from benchmark.common.machine import ROOT
from benchmark.common.server import free_port

from server.client_libraries import PACKAGES, interpreter
from server.recorder import Recorder
from server_fixture import Server

pytestmark = pytest.mark.server
EXAMPLES = ROOT / "docs" / "examples"
PLAIN = ("multi_hop", "map_documents", "agent")
PASSAGES = [path.read_text("utf-8").strip() for path in sorted((EXAMPLES / "corpus").glob("*.txt"))]
NUM_QUESTIONS = 2
LIBRARIES = ("openai", "langchain", "llama_index", "haystack")
PROGRAMS = ("rag", "multi_hop", "map_documents", "agent")
TOLD = re.compile(r"^   reused=(\d+), recomputed=(\d+)$", re.MULTILINE)


@pytest.fixture
def recorder(server: Server) -> Iterator[Recorder]:
    server.flush()
    with Recorder(server.url) as recorder:
        yield recorder


def run(python: str, name: str, recorder: Recorder) -> str:
    """What a program prints."""
    env = {**os.environ, "PYTHONUTF8": "1", "OMP_NUM_THREADS": "1"}
    command = [python, str(EXAMPLES / f"{name}.py"), recorder.url]
    done = subprocess.run(command, capture_output=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr.decode()[-3000:]
    return done.stdout.decode()


def told(printed: str) -> list[int]:
    """Tokens that were reused and recomputed, as printed, added up."""
    return [sum(map(int, counts)) for counts in zip(*TOLD.findall(printed), strict=True)]


@pytest.mark.parametrize("name", PLAIN)
def test_a_program(server: Server, recorder: Recorder, name: str) -> None:
    if name == "agent":  # which documents a random model reads, nobody knows
        server.post("/chunk_cache/warm", {"texts": PASSAGES})
    printed = run(sys.executable, name, recorder)
    assert recorder.answers[-1] in printed
    assert told(printed) == [recorder.total("reused"), recorder.total("recomputed")]
    assert recorder.total("reused") > recorder.total("recomputed") > 0


def test_the_rag_service(recorder: Recorder) -> None:
    port = free_port()
    command = [sys.executable, "-m", "uvicorn", "--app-dir", str(EXAMPLES), "rag_server:app", "--port", str(port)]
    env = {**os.environ, "SGLANG_URL": recorder.url, "OMP_NUM_THREADS": "1"}
    service = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=env)
    try:
        transport = httpx.HTTPTransport(retries=10)  # of connections, for about a minute: until it listens
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", transport=transport, timeout=300) as client:
            replies = [
                client.get("/ask", params={"question": question}).raise_for_status().json()
                for question in ("Who rings the bell in fog?", "Who made the bell?")
            ]
    finally:
        service.terminate()
        service.wait()
    assert [reply["answer"] for reply in replies] == recorder.answers
    assert set(replies[0]["passages"].values()) == {"miss"}
    assert "hit" in replies[1]["passages"].values()
    assert replies[1]["reused"] == recorder.total("reused") > replies[1]["recomputed"] > 0


@pytest.mark.all
@pytest.mark.parametrize("library", LIBRARIES)
def test_the_programs_with_a_library(recorder: Recorder, library: str) -> None:
    """Each program is followed by those that find its passages stored."""
    python = interpreter(PACKAGES.get(library, library))
    if not python:
        pytest.skip(f"{library} is not installed: make clients")
    printed = run(python, f"with_{library}", recorder)
    assert told(printed) == [recorder.total("reused"), recorder.total("recomputed")]
    sections = re.split(rf"^({'|'.join(PROGRAMS)})$", printed, flags=re.MULTILINE)[1:]
    assert tuple(sections[::2]) == PROGRAMS
    for section in sections[1::2]:
        reused, recomputed = told(section)
        assert reused > recomputed > 0, section
        assert sum(answer in section for answer in recorder.answers) >= NUM_QUESTIONS, section


def test_every_program_is_named_in_the_documentation() -> None:
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    for path in EXAMPLES.glob("*.py"):
        assert f"(examples/{path.name})" in page, path.name
