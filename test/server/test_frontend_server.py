"""`chunk(...)` in frontend programs: forks, batches, roles, streams and choices, over a server and over an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import sglang as sgl

from server.contract import Passages, check_reply, marked, statuses
from server.frontend_programs import CHOICES, HEAD, run_all
from server.own_process import ask
from server_fixture import Server

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def texts() -> list[str]:
    return Passages(__name__).several(4)


@pytest.fixture(scope="module", params=["server", pytest.param("engine", marks=pytest.mark.all)])
def found(request: pytest.FixtureRequest, model_dir: Path, texts: list[str]) -> dict[str, Any]:
    """What `run_all` says of the backend."""
    if request.param == "engine":
        return by_engine(model_dir, texts)
    server = request.getfixturevalue("server")
    return run_all(sgl.RuntimeEndpoint(server.url), texts)


def by_engine(model_dir: Path, texts: list[str]) -> dict[str, Any]:
    result = ask("frontend_programs", {"model": str(model_dir), "texts": texts})
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
