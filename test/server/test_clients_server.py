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

from chunk_cache.prompt.passage import Passage, write_passage
from chunk_cache_tools.passages import PassageWriter
from drawn_requests import CHAT, COUNT, MESSAGES, without_marks
from server.client_libraries import PACKAGES, interpreter
from server.recorder import Recorder
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
DEGRADE = {
    ("openai", "with_breakpoints"),
    ("anthropic", "with_search_results"),
    ("anthropic", "with_cache_control"),
    ("anthropic", "in_a_stream"),
    ("litellm", "with_cache_control"),
    ("langchain", "with_parts"),
    ("langchain", "with_a_tool"),
    ("haystack", "with_parts"),
}
"""Those whose bodies say the same to stock SGLang, which knows no chunks."""
CALLS = """
import json, sys
program, name, url, orders, question = json.loads(sys.argv[1])
sys.path.insert(0, program[0])
ask = getattr(__import__(program[1]), name)
print(json.dumps([ask(url, order, question) for order in orders]))
"""


def run(url: str, client: str, name: str, orders: Sequence[Sequence[str]]) -> list[dict[str, int]]:
    """What a program says of prompts with passages in these orders."""
    python = interpreter(PACKAGES.get(client, client))
    if not python:
        pytest.skip(f"{client} is not installed: make clients")
    call = json.dumps([[str(PROGRAMS), f"{client}_client"], name, url, orders, "Who is it?"])
    done = subprocess.run([python, "-c", CALLS, call],
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("client", "name"), [(client, name) for client, names in CLIENTS.items() for name in names])
def test_a_client_reuses_chunks_and_sees_it(
    server: Server, stock: Server, passages: Any, client: str, name: str
) -> None:
    texts = [text.strip() for text in passages.several(3)]
    with Recorder(server.url) as recorder:
        first, second = run(recorder.url, client, name, [texts, texts[::-1]])
    assert first == {"reused": 0, "recomputed": 0}
    assert second["reused"] > 0, second
    assert 0 < second["recomputed"] < second["reused"], second
    assert len(recorder.asked) == 2
    for path, body in recorder.asked:
        marked = given_to_the_model(server, path, body)
        assert given_to_the_model(server, path, unmarked(body)) == marked, "marks change nothing"
        assert given_to_the_model(stock, path, unmarked(body)) == marked, "nor does the chunk cache"
        assert (given_to_the_model(stock, path, body) == marked) == ((client, name) in DEGRADE), "docs/clients.md"


def unmarked(body: dict[str, Any]) -> dict[str, Any]:
    """What the client would send without the chunk cache: the same text, in forms that stock SGLang reads."""
    chunks = (body.get("chunk_cache") or {}).get("chunks") or ()
    given = [Passage(one["text"], title=one.get("title") or "") for one in (*body.get("documents", ()), *chunks)]
    written = "".join(write_passage(one, None) for one in given)
    plain = without_marks({key: value for key, value in body.items() if key != "documents"})
    for message in plain.get("messages", ()):
        for block in message["content"] if isinstance(message["content"], list) else ():
            if block["type"] == "document":
                block |= {"type": "search_result", "content": [{"type": "text", "text": block.pop("source")["data"]}]}
    return PassageWriter("", template="{text}", knows_chunks=False).put(plain, [written] if written else [])


def given_to_the_model(server: Server, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The ids and the number of tokens of a prompt, as far as a route tells them; empty where it refuses the body."""
    body = {key: value for key, value in body.items() if key not in ("stream", "stream_options")}
    response = server.post(path, {**body, "temperature": 0, "return_token_ids": True}, check=False)
    if not response.is_success:
        return {}
    reply = response.json()
    if path == MESSAGES:
        usage = reply["usage"]
        used = usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
        counted = server.post(COUNT, {key: value for key, value in body.items() if key != "max_tokens"}).json()
        assert counted == {"input_tokens": used}
        return {"tokens": used}
    (choice,) = reply["choices"]
    assert reply["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"])
    return {"ids": choice["prompt_token_ids"]}


@pytest.mark.parametrize("is_stock", [False, True])
def test_passages_arrive_whatever_the_server_is(server: Server, stock: Server, passages: Any, is_stock: bool) -> None:
    """`PassageWriter` asks the server; the model reads the same."""
    one = stock if is_stock else server
    texts = passages.several(2)
    ask = {"model": "default", "messages": [{"role": "user", "content": "Who is it?"}], "max_tokens": 4}
    writer = PassageWriter(one.url)
    body = writer.put(ask, texts)
    assert ("chunk_cache" in body) != is_stock
    assert writer.arrived(body, one.post(CHAT, body).headers)
    expected = PassageWriter("", knows_chunks=False).put(ask, texts)
    assert given_to_the_model(one, CHAT, body) == given_to_the_model(one, CHAT, expected)
    lost = PassageWriter(one.url, knows_chunks=True)
    body = lost.put(ask, texts)
    assert lost.arrived(body, one.post(CHAT, body).headers) != is_stock


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
