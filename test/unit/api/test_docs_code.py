"""Python in the documents: the method that `docs/methods.md` adds is added and tested, other code uses what there is.

The other examples need a server. The blocks of a page are one program, which is read and not run: its imports are made,
its names are bound, attributes of what it imports and creates exist, and calls of them have arguments that they take.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import sglang

from doc_pages import blocks

ROOT = Path(__file__).parents[3]
METHODS_PAGE = ROOT / "docs" / "methods.md"


def python_of(page: Path) -> list[str]:
    return blocks(page.read_text(encoding="utf-8"), "python")


PAGES = [
    page for page in (*ROOT.glob("*.md"), *sorted(ROOT.glob("docs/*.md"))) if python_of(page) and page != METHODS_PAGE
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_names_and_calls_are_those_of_the_code(page: Path) -> None:
    _Reader().visit(ast.parse("\n".join(python_of(page)), page.name))


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("print(missing)", "missing"),
        ("from chunk_cache_tools.routing import missing", "missing"),
        ("from chunk_cache_tools import routing\nrouting.missing", "missing"),
        ("from chunk_cache_tools.routing import ReplicaKeys\nkeys = ReplicaKeys()\nkeys.missing()", "missing"),
        ("from chunk_cache_tools.routing import ReplicaKeys\nkeys = ReplicaKeys()\nkeys.key_to()", "replica"),
        ("from sglang_chunk_cache.plugin import engine\nllm = engine(1)", "too many positional"),
    ],
)
def test_a_name_that_is_not_there_is_found(code: str, error: str) -> None:
    with pytest.raises((ImportError, AttributeError, NameError, TypeError), match=error):
        _Reader().visit(ast.parse(code))


@dataclass(frozen=True)
class _Instance:
    """An object that a program would have."""

    cls: type


class _Reader(ast.NodeVisitor):
    """Goes through a program in its order; `known` has what its names mean, None where nobody knows."""

    def __init__(self) -> None:
        self.known: dict[str, Any] = dict(vars(builtins)) | {"__name__": "__main__"}

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            module = importlib.import_module(alias.name)
            self.known[alias.asname or alias.name.partition(".")[0]] = (
                module if alias.asname else sys.modules[alias.name.partition(".")[0]]
            )

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            module = importlib.import_module(str(node.module))
            self.known[alias.asname or alias.name] = getattr(module, alias.name)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self.known |= {node.name: None} | {one.arg: None for one in node.args.args}
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            self._bind(target, self.meaning(node.value))

    def visit_For(self, node: ast.For) -> None:
        self.visit(node.iter)
        self._bind(node.target, None)
        for statement in node.body:
            self.visit(statement)

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, self.meaning(item.context_expr))
        for statement in node.body:
            self.visit(statement)

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id not in self.known:
            raise NameError(node.id)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        self.meaning(node)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        function = self.meaning(node.func)
        is_plain = not any(isinstance(one, ast.Starred) for one in node.args) and all(one.arg for one in node.keywords)
        if not is_plain or not (inspect.isfunction(function) or inspect.isclass(function)):
            return
        if function.__module__ in ("builtins", "functools"):  # without a signature
            return
        is_method = isinstance(node.func, ast.Attribute) and isinstance(self.meaning(node.func.value), _Instance)
        given = [None] * (len(node.args) + is_method)
        inspect.signature(function).bind(*given, **{str(one.arg): None for one in node.keywords})

    def meaning(self, node: ast.expr) -> Any:
        """The object that an expression gives, an `_Instance` of its class, or None.

        Raises:
            AttributeError: there is no such attribute.
        """
        match node:
            case ast.Name(id=name):
                return self.known.get(name)
            case ast.Attribute(value=owner, attr=name):
                found = self.meaning(owner)
                if isinstance(found, _Instance):
                    is_set = not hasattr(found.cls, name) and f"self.{name} = " in inspect.getsource(found.cls.__init__)
                    return None if is_set else getattr(found.cls, name)
                return None if found is None else getattr(found, name)
            case ast.Call(func=function):
                return self._result(self.meaning(function))
        return None

    def _result(self, function: Any) -> Any:
        if inspect.isclass(function):
            return _Instance(function) if function.__module__ != "builtins" else None
        if not inspect.isfunction(function):
            return None
        names = vars(sys.modules[function.__module__]) | {"Engine": sglang.Engine}  # imported there for types only
        cls = names.get(str(function.__annotations__.get("return")))
        return _Instance(cls) if inspect.isclass(cls) else None

    def _bind(self, target: ast.expr, meaning: Any) -> None:
        for node in ast.walk(target):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self.known[node.id] = meaning


@pytest.mark.slow
def test_the_method_of_the_page_is_added_and_passes_the_suites(tmp_path: Path) -> None:
    """The three steps of docs/methods.md in a copy of the code, where the tests of methods and scorers run."""
    for folder in ("python", "scheduler", "sgl-kernel-ext", "test"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    page = METHODS_PAGE.read_text(encoding="utf-8").partition("## Adding a method")[2]
    scorer, test = python_of(METHODS_PAGE)
    paths = re.findall(r"`((?:python|scheduler|test)/[\w/-]+\.py)`", page)
    scorer_file, registry, test_file = (tmp_path / path for path in paths)
    (line,) = re.findall(r"`(LayerMethod\(.*\),)`", page)
    scorer_file.write_text(scorer)
    text, head = registry.read_text(), "_ALL: tuple[Method, ...] = (\n"
    assert head in text
    added = text.replace(head, f"from chunk_cache.methods.scored import LayerMethod\n\n{head}    {line}\n")
    registry.write_text(added)
    test_file.write_text(f"{test_file.read_text()}\n\n{test}")
    folders = os.pathsep.join(str(tmp_path / folder) for folder in ("python", "scheduler", "sgl-kernel-ext"))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "ValueTurn or value-turn"]
    command += [str(test_file), str(tmp_path / "test" / "unit" / "selection" / "test_scorers.py")]
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": folders}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 10
