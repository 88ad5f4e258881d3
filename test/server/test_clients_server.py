"""Client libraries against a real server: how each marks chunks, and what it keeps of the reply (docs/clients.md).

The programs are those of docs/examples/clients. They run in `.venv-clients`, which `make clients` makes, since their
packages do not fit the versions that SGLang pins; where that is missing, in this environment, which has some of them.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import pytest
from benchmark.common.machine import ROOT

from server.client_libraries import PACKAGES, interpreter
from server_fixture import Server

pytestmark = pytest.mark.server
PROGRAMS = ROOT / "docs" / "examples" / "clients"
CLIENTS = {
    "openai": ("with_breakpoints", "with_chunks", "with_documents", "in_a_completion"),
    "anthropic": ("with_search_results", "with_documents", "with_cache_control", "in_a_stream"),
    "litellm": ("with_cache_control", "with_chunks"),
    "langchain": ("with_parts", "with_a_tool", "with_chunks", "in_a_stream"),
    "llama_index": ("with_chunks",),
    "haystack": ("with_parts", "with_chunks"),
}
CALLS = """
import json, sys
program, name, url, orders, question = json.loads(sys.argv[1])
sys.path.insert(0, program[0])
ask = getattr(__import__(program[1]), name)
print(json.dumps([ask(url, order, question) for order in orders]))
"""


def run(server: Server, client: str, name: str, orders: Sequence[Sequence[str]]) -> list[dict[str, int]]:
    """What a program says of prompts with passages in these orders."""
    python = interpreter(PACKAGES.get(client, client))
    if not python:
        pytest.skip(f"{client} is not installed: make clients")
    call = json.dumps([[str(PROGRAMS), f"{client}_client"], name, server.url, orders, "Who is it?"])
    done = subprocess.run([python, "-c", CALLS, call],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("client", "name"), [(client, name) for client, names in CLIENTS.items() for name in names])
def test_a_client_reuses_chunks_and_sees_it(server: Server, passages: Any, client: str, name: str) -> None:
    texts = [text.strip() for text in passages.several(3)]
    first, second = run(server, client, name, [texts, texts[::-1]])
    assert first == {"reused": 0, "recomputed": 0}
    assert second["reused"] > 0, second
    assert 0 < second["recomputed"] < second["reused"], second


def test_curl(server: Server, passages: Any) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    texts = passages.several(2)
    headers = ""
    for order in (texts, texts[::-1]):
        chunks = [{"id": text[-8:-2], "text": text} for text in order]
        messages = [{"role": "user", "content": "Who?"}]
        body = {"model": "default", "messages": messages, "max_tokens": 4, "chunk_cache": {"chunks": chunks}}
        command = ["curl", "-sS", "-i", f"{server.url}/v1/chat/completions", "-H", "Content-Type: application/json"]
        done = subprocess.run([*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=60)
        headers, _, reply = done.stdout.partition("\n\n")
        found = json.loads(reply)["sglext"]["chunk_cache"]["chunks"]
        assert [chunk["id"] for chunk in found] == [chunk["id"] for chunk in chunks]
    told = re.search(r"^x-chunk-cache: reused=(\d+), recomputed=(\d+)\s*$", headers, re.MULTILINE)
    assert told is not None, headers
    assert int(told[1]) > int(told[2]) > 0


def test_every_program_is_told_and_run() -> None:
    assert {path.stem.removesuffix("_client") for path in PROGRAMS.glob("*.py")} == set(CLIENTS)
    page = (ROOT / "docs" / "clients.md").read_text(encoding="utf-8")
    for client, names in CLIENTS.items():
        source = (PROGRAMS / f"{client}_client.py").read_text(encoding="utf-8")
        assert all(f"def {name}(" in source for name in names)
        assert f"examples/clients/{client}_client.py" in page
        assert all(f"`{name}`" in page for name in names), client
