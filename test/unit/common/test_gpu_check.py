"""The check of a GPU skips what held before, unless another command, code or SGLang gave that result."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark.gpu import check

CODE = {"commit": "a", "sglang": "1"}


@pytest.fixture
def check_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[str]]:
    """The stages that a check runs, by the values of flags and the code that it meets; each holds."""

    def checked(stages: str = "kernels,exactness,long", code: dict[str, str] = CODE, **flags: str) -> list[str]:
        ran = []

        def run(stage: check.Stage, folder: Path) -> dict[str, Any]:
            ran.append(stage.name)
            folder.mkdir(exist_ok=True)
            (folder / "page.md").write_text(f"Page of {stage.name}")
            return {"ended": "held", "seconds": 1}

        given = [text for name, value in flags.items() for text in (f"--{name}", value)]
        monkeypatch.setattr(sys, "argv", ["check.py", "--out", str(tmp_path), "--stages", stages, *given])
        monkeypatch.setattr(check, "run", run)
        monkeypatch.setattr(check, "describe_code", lambda: code)
        assert check.main() == 0
        return ran

    return checked


def test_a_stage_is_run_again_where_its_result_is_of_something_else(check_gpu, tmp_path):
    every = ["kernels", "exactness", "long"]
    assert check_gpu() == every
    assert check_gpu() == []
    assert check_gpu(backends="triton") == ["exactness"]
    assert check_gpu(backends="triton", model="/other") == ["long"]
    assert check_gpu(code=CODE | {"commit": "b"}, backends="triton", model="/other") == every
    assert check_gpu(code=CODE | {"sglang": "2"}, backends="triton", model="/other") == every
    (tmp_path / "check.json").write_text(json.dumps({"kernels": {"ended": "held", "seconds": 1}}))
    assert check_gpu("kernels") == ["kernels"], "nobody knows what that was"


def test_the_report_holds_what_ran_on_this_code_and_is_written_again(check_gpu, tmp_path):
    report = tmp_path / "report.md"
    check_gpu("kernels,long")
    report.unlink()
    assert check_gpu("kernels,long") == []
    assert "Page of long" in report.read_text()
    check_gpu("kernels", code=CODE | {"commit": "b"})
    assert "Page of kernels" in report.read_text()
    assert "Page of long" not in report.read_text()
