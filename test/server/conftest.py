"""Servers for this folder, started once: with the chunk cache, as SGLang was released, and of a trained model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from benchmark.common.machine import ROOT
from benchmark.common.server import offline_env

from server.contract import Passages
from server_fixture import Server
from tiny_models import make_model

MAX_TOTAL_TOKENS = 4096
FLAGS = (
    *("--dtype", "float32", "--max-total-tokens", str(MAX_TOTAL_TOKENS)),
    *("--sleep-on-idle", "--enable-cache-report"),  # two servers share two cores; usage names cached tokens
)
TRAINED_MODEL = Path(os.environ.get("QUALITY_GATE_MODEL", ROOT / "benchmark" / "quality" / "models" / "qa-1m-seed0"))
# SGLang's own checks of its KV pool, after every step: leaks and double frees end the server.
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}


@pytest.fixture(scope="package")
def model_dir(model_root: Path) -> Path:
    return make_model("llama", model_root / "llama")


@pytest.fixture(scope="package")
def server(model_dir: Path) -> Iterator[Server]:
    """The chunk cache with its defaults."""
    with Server(model_dir, *FLAGS, "--enable-metrics", "--chunk-cache", env=STRICT) as server:
        yield server


@pytest.fixture(scope="package")
def stock(model_dir: Path) -> Iterator[Server]:
    """The same model without `--chunk-cache`."""
    with Server(model_dir, *FLAGS) as server:
        yield server


@pytest.fixture(scope="package")
def trained_server() -> Iterator[Server]:
    """A model that answers, with the chunk cache. The modules that use it are one group in `test/conftest.py`."""
    with Server(TRAINED_MODEL, "--chunk-cache", "--dtype", "float32", env=offline_env()) as server:
        yield server


@pytest.fixture(scope="package")
def tokenizer(model_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture
def passages(request: pytest.FixtureRequest) -> Passages:
    """Texts of this test alone: what it finds stored, it has stored itself."""
    return Passages(request.node.nodeid)
