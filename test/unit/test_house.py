"""The house: files are found by their names, and docstrings begin with the noun that they describe."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("scheduler/chunk_cache", "python/chunk_cache_tools", "python/sglang_chunk_cache", "python/sglang_plain_cpu")
KERNELS = "sgl-kernel-ext/sgl_kernel_ext"  # one folder an operation, one file of the same name for each backend
DANGLING = ("Of", "That", "As", "So")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_two_files_of_a_package_share_a_name(package):
    places = defaultdict(list)
    for file in (ROOT / package).rglob("*.py"):
        if file.name != "__init__.py":
            places[file.name].append(str(file.relative_to(ROOT)))
    assert [found for found in places.values() if len(found) > 1] == []


@pytest.mark.parametrize("package", [*PACKAGES, KERNELS])
def test_docstrings_begin_with_what_they_describe(package):
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for line, text in _docstrings(file)
        if text.split() and text.split()[0] in DANGLING
    ]
    assert found == [], "\n".join(found)


def _docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every string that stands alone: of modules, classes, functions and attributes."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
