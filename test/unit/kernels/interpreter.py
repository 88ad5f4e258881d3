"""Triton's interpreter: `passes_in_the_interpreter` runs a file of tests in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def passes_in_the_interpreter(*cases: Path) -> None:
    """Asserts that all tests of `cases` pass there, and none is skipped."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *map(str, cases)],
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout
