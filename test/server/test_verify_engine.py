"""`python -m sglang_chunk_cache.verify` on a small random model, as a user would call it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tiny_models import make_model

pytestmark = pytest.mark.server


def test_verify_prints_a_table_and_judges(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model", layers=3)
    command = [sys.executable, "-m", "sglang_chunk_cache.verify", "--model-path", str(model), "--num", "4"]
    flags = ["--chunk-cache-method", "cacheblend", "--chunk-cache-ratio", "0.3", "--max-total-tokens", "8192"]
    # A model of random weights keeps nothing by 30 %: what the first two checks say is what counts here.
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [*command, *flags, "--max-kl", "0"], capture_output=True, text=True, env=env, timeout=400, check=False
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("cacheblend, ratio 0.3") for line in lines), done.stdout
    assert any(line.startswith("ok    layer 0 of reused chunks") for line in lines), done.stdout
    assert any(line.startswith("ok    ratio 1.0 equals a full prefill") for line in lines), done.stdout
    assert any(line.startswith("FAIL  the configured method keeps the distribution") for line in lines), done.stdout
