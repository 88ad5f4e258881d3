"""`chunk_cache` decides without the machinery: no module of it may need torch, a kernel library or sglang."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import chunk_cache

BLOCKED = ("torch", "triton", "flashinfer", "sglang", "transformers", "sglang_chunk_cache", "sgl_kernel_ext")

PROGRAM = """
import importlib, pkgutil, sys
for name in {blocked!r}:
    sys.modules[name] = None  # "import name" then raises ImportError
import chunk_cache
names = [m.name for m in pkgutil.walk_packages(chunk_cache.__path__, "chunk_cache.")]
for name in names:
    importlib.import_module(name)
loaded = sorted({{n.partition(".")[0] for n, m in sys.modules.items() if m is not None}} & set({blocked!r}))
assert not loaded, loaded
print(len(names))
"""


def test_every_module_imports_with_torch_and_sglang_blocked() -> None:
    root = Path(chunk_cache.__file__).parents[1]
    result = subprocess.run(
        [
            sys.executable,
            "-I",
            "-c",
            f"import sys; sys.path.insert(0, {str(root)!r})" + PROGRAM.format(blocked=BLOCKED),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    root = Path(chunk_cache.__file__).parent
    num_modules = len([path for path in root.rglob("*.py") if path != root / "__init__.py"])
    assert int(result.stdout) == num_modules


def test_no_module_names_a_wall_clock() -> None:
    for path in Path(chunk_cache.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        assert not any(f"import {name}" in text for name in ("time", "datetime", "random")), path
