"""`chunk(...)` in frontend programs: forks, batches, roles, streams and choices, over a server and over an engine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sglang as sgl

from server.contract import Passages, check_reply, marked, statuses
from server.frontend_programs import CHOICES, HEAD, MARK, run_all
from server_fixture import Server

pytestmark = pytest.mark.server
TEST_DIR = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return Passages(__name__).several(4)


@pytest.fixture(scope="module", params=["server", pytest.param("engine", marks=pytest.mark.all)])
def found(request: pytest.FixtureRequest, model_dir: Path, texts: list[str]) -> dict[str, Any]:
    """What `run_all` says of the backend."""
    if request.param == "engine":
        return by_engine({"model": str(model_dir), "texts": texts})
    server = request.getfixturevalue("server")
    return run_all(sgl.RuntimeEndpoint(server.url), texts)


def by_engine(task: dict[str, Any]) -> dict[str, Any]:
    path = os.pathsep.join([str(TEST_DIR), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(TEST_DIR / "server" / "frontend_programs.py")],
        input=json.dumps(task),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(lines[0].removeprefix(MARK))
    assert result["after"], "the engine answers again once the backend is closed"
    return result


def became(meta: Any) -> list[str]:
    return statuses(check_reply(meta["chunk_cache"], meta["prompt_tokens"]))


def test_a_program(found: dict[str, Any], texts: list[str], stock: Server) -> None:
    assert [became(meta) for meta in found["plain"]] == [["miss", "miss"], ["miss", "hit", "hit"]]
    # Nothing was reused in the first, so it is what stock SGLang says of the text without separators.
    assert found["plain"][0]["chunk_cache"]["reused_tokens"] == 0
    prompt = marked(texts[:2], head=HEAD, question="Who?").plain
    assert found["answers"][0] == stock.generate(prompt, max_new_tokens=6)["text"]


def test_a_batch(found: dict[str, Any]) -> None:
    assert [became(meta) for meta in found["batch"]] == [["hit", "miss"], ["prefix", "hit"]]


def test_forks(found: dict[str, Any]) -> None:
    assert [became(meta) for meta in found["fork"]] == [["hit", "hit"]] * 3


def test_roles(found: dict[str, Any]) -> None:
    """What stands between two chunks, the ends of messages too, is a chunk as well."""
    first, second = (became(meta) for meta in found["roles"])
    assert first == ["hit", "miss", "hit", "hit"]
    assert second == ["hit", "hit", "hit", "hit", "miss", "hit"]
    assert [message["role"] for message in found["talk"]] == ["system", "user", "assistant", "user", "assistant"]


def test_a_stream(found: dict[str, Any]) -> None:
    assert became(found["stream"]) == ["hit", "hit"]
    assert "".join(found["pieces"]) == found["streamed"]


def test_a_choice(found: dict[str, Any]) -> None:
    assert found["choice"] in CHOICES
