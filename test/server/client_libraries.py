"""Where client libraries are: in `.venv-clients`, which `make clients` makes, or, some of them, in this environment."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path

from benchmark.common.machine import ROOT

PACKAGES = {"langchain": "langchain_openai"}
"""Packages to import, where they have another name than the library."""


@functools.cache
def interpreter(package: str) -> str:
    """One that has a package; empty where there is none."""
    for python in (str(ROOT / ".venv-clients" / "bin" / "python"), sys.executable):
        probe = f"import importlib.util as u, sys; sys.exit(u.find_spec({package!r}) is None)"
        if Path(python).exists() and subprocess.run([python, "-c", probe]).returncode == 0:
            return python
    return ""
