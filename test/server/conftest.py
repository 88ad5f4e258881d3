"""Servers for this folder, started once: with the chunk cache, as SGLang was released, and of a trained model.

A server's processes have 2.5 GB of memory, so it lives as long as the tests of one group (`conftest.group_of`) run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark.common.machine import ROOT
from benchmark.common.server import offline_env

from conftest import group_of
from server.contract import Passages
from server_fixture import OneAtATime, Server
from tiny_models import make_model

MAX_TOTAL_TOKENS = 4096
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", str(MAX_TOTAL_TOKENS)),
    *("--sleep-on-idle", "--enable-cache-report"),  # two servers share two cores; usage names cached tokens
)
TRAINED_MODEL = Path(os.environ.get("QUALITY_GATE_MODEL", ROOT / "benchmark" / "quality" / "models" / "qa-1m-seed0"))
# With them a tool call of a random model comes to its end, and is found.
TOOL_FLAGS = ("--tool-call-parser", "pythonic", "--constrained-json-disable-any-whitespace")
# SGLang's own checks of its KV pool, after every step: leaks and double frees end the server.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


@pytest.fixture(scope="package")
def model_dir(model_root: Path) -> Path:
    return make_model("llama", model_root / "llama")


@pytest.fixture(scope="module")
def servers() -> Iterator[OneAtATime]:
    """For the servers of a module of which no two need to run at once."""
    with OneAtATime() as one:
        yield one


_started: dict[str, Server] = {}


def _shared(name: str, model: Path, *flags: str, env: dict[str, str] | None = None) -> Server:
    """Started by the first test of a group that wants it."""
    if name not in _started:
        server = Server(model, *flags, env=env)
        server.start()
        _started[name] = server
    return _started[name]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Stops the servers behind the last test of a group, when the fixtures that still ask them are gone."""
    if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
        _stop_all()


def pytest_sessionfinish() -> None:
    """Also where the tests were interrupted."""
    _stop_all()


def _stop_all() -> None:
    while _started:
        _started.popitem()[1].stop()


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Server:
    """The chunk cache with its defaults."""
    return _shared("server", model_dir, *FLAGS, *TOOL_FLAGS, "--enable-metrics", "--chunk-cache", env=STRICT)


@pytest.fixture(scope="module")
def stock(model_dir: Path) -> Server:
    """The same model without `--chunk-cache`."""
    return _shared("stock", model_dir, *FLAGS)


@pytest.fixture(scope="module")
def trained_server() -> Server:
    """A model that answers, with the chunk cache. The modules that use it are one group in `test/conftest.py`."""
    return _shared("trained", TRAINED_MODEL, "--chunk-cache", "--dtype", "float32", env=offline_env())


@pytest.fixture(scope="package")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture
def passages(request: pytest.FixtureRequest) -> Passages:
    """Texts of this test alone: what it finds stored, it has stored itself."""
    return Passages(request.node.nodeid)
