"""What the CPU platform changes in SGLang and torch: `patches.toml` has a row for all of it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import sglang_plain_cpu
import sglang_signatures as signatures
from sglang_plain_cpu import patches
from sglang_plain_cpu.patches import PATCHES
from sglang_signatures import TOUCHED_BY_PLATFORM as TOUCHED

PACKAGE = Path(sglang_plain_cpu.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path.name != "patches.py")

# Imports what the table names, looks at every name in SGLang and torch, applies the table, and looks again.
PROGRAM = """
import json, os, pkgutil, sys
import torch
from sglang_plain_cpu import activate, patches
activate()
from sglang.srt.platforms import current_platform
from sglang.srt.arg_groups import resolution_hooks
from sglang.srt.layers.attention import attention_registry
current_platform.is_pin_memory_available()
resolution_hooks._HOOKS.clear()
patches._applied.clear()

def names():
    found = {}
    for path, module in list(sys.modules.items()):
        if module is not None and path.partition(".")[0] in ("sglang", "torch"):
            for name, value in list(vars(module).items()):
                found[f"{path}.{name}"] = value
                if isinstance(value, type) and value.__module__.partition(".")[0] in ("sglang", "torch"):
                    owner = f"{value.__module__}.{value.__qualname__}"
                    found.update({f"{owner}.{key}": method for key, method in vars(value).items()})
    return found

for patch in patches.PATCHES:
    if patch.kind == "module":  # others cannot be imported without it
        patch.apply()
for patch in patches.PATCHES:
    pkgutil.resolve_name(patch.target.rpartition(".")[0])
    if patch.ours:
        patch.replacement()
before, variables = names(), dict(os.environ)
for when in dict.fromkeys(patch.when for patch in patches.PATCHES):
    patches.apply(when)
    patches.apply(when)
after = names()
is_ours = {}
for patch in patches.PATCHES:
    ours = patch.replacement()
    if patch.kind in ("put", "module"):
        is_ours[patch.target] = pkgutil.resolve_name(patch.target) is ours
    elif patch.kind == "wrap":
        call = pkgutil.resolve_name(patch.target)
        is_ours[patch.target] = call.__wrapped__ is before[patch.target] and call.__closure__ is not None
    elif patch.kind == "entry":
        is_ours[patch.target] = pkgutil.resolve_name(patch.target)[patch.key] is ours
    elif patch.kind == "variable":
        is_ours[patch.target] = os.environ[patch.target.rpartition(".")[2]] == patch.value
hooks = {key: [hook.__qualname__ for hook in hooks] for key, hooks in resolution_hooks._HOOKS.items()}
print("RESULT" + json.dumps({
    "is_ours": is_ours,
    "changed": sorted(name for name, value in after.items() if before.get(name) is not value),
    "variables": sorted(dict(os.environ).items() - variables.items()),
    "hooks": hooks,
    "backend": attention_registry.ATTENTION_BACKENDS["torch_native"].__qualname__,
}))
"""


@pytest.fixture(scope="module")
def applied() -> dict:
    """What a process looks like in which every row is applied."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "TORCH"))}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("RESULT"))[6:])


@pytest.mark.slow
def test_every_row_is_applied(applied):
    assert all(applied["is_ours"].values()), applied["is_ours"]
    assert applied["hooks"] == {
        "handle_cpu_backends": ["leave_backends_open"],
        "handle_gpu_memory_settings": ["fit_to_memory"],
    }
    assert applied["backend"] == "TreeAttention"
    assert set(applied["is_ours"]) == {patch.target for patch in PATCHES if patch.kind != "register"}


@pytest.mark.slow
def test_nothing_else_is_changed(applied):
    made = tuple(patch.target.rpartition(".")[0] for patch in PATCHES if patch.kind == "module")
    changed = {name for name in applied["changed"] if not name.startswith(made)}
    assert changed == {patch.target for patch in PATCHES if patch.kind in ("put", "wrap")}
    assert applied["variables"] == [["SGLANG_NATIVE_MOVE_KV_CACHE", "1"]]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.target}{patch.key}".removeprefix("sglang."))
def test_a_row_is_complete(patch):
    assert patch.kind in patches._KINDS
    assert bool(patch.ours) != (patch.value is not None)
    assert bool(patch.key) == (patch.kind in ("entry", "register"))
    assert patch.why
    assert patch.breaks
    if patch.ours:
        pkgutil.resolve_name(f"sglang_plain_cpu.{patch.ours}")


def test_rows_name_each_target_once():
    assert len({(patch.target, patch.key) for patch in PATCHES}) == len(PATCHES)


@pytest.mark.parametrize("handler", list(patches.OVERRIDES))
def test_the_table_has_what_a_class_overrides(handler):
    assert list(patches.OVERRIDES[handler]) == list(signatures.overrides(pkgutil.resolve_name(handler)))


def test_every_subclass_has_a_row():
    found = set()
    for path in FILES:
        module = "sglang_plain_cpu." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for value in vars(pkgutil.resolve_name(module.removesuffix(".__init__"))).values():
            if isinstance(value, type) and value.__module__ == module and signatures.overrides(value):
                found.add(f"{module}:{value.__qualname__}")
    assert found == set(patches.OVERRIDES)


@pytest.mark.parametrize("touch", TOUCHED, ids=lambda touch: touch.name)
def test_what_is_touched_is_touched_where_the_table_says(touch):
    assert touch.name.replace(":", ".").rpartition(".")[2] in (PACKAGE / touch.file).read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_names_are_changed_by_the_table_only(path):
    """No file but `patches.py` assigns to an imported name, and only touches go round that."""
    tree = ast.parse(path.read_text())
    touched = {touch.name.replace(":", ".").rpartition(".")[2] for touch in TOUCHED if PACKAGE / touch.file == path}
    imported = {
        alias.asname or alias.name.partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    for node in ast.walk(tree):
        targets = node.targets if isinstance(node, (ast.Assign, ast.Delete)) else [getattr(node, "target", None)]
        for target in targets:
            if isinstance(target, (ast.Attribute, ast.Subscript)):
                is_touched = bool(touched) and ast.unparse(target).startswith(("os.environ[", "config.disable"))
                assert is_touched or _root(target) not in imported - {"self"}, ast.unparse(node)
        if isinstance(node, ast.Call):
            call = ast.unparse(node.func)
            assert call not in ("setattr", "delattr", "exec", "vars"), ast.unparse(node)
            assert not call.rpartition(".")[2].startswith("register"), ast.unparse(node)
    assert touched or "sys.modules" not in path.read_text()


def _root(node: ast.expr) -> str:
    while isinstance(node, (ast.Attribute, ast.Subscript)):
        node = node.value
    return ast.unparse(node)


# Names that are read from SGLang's source.


@pytest.mark.parametrize("name", ["_softcap_logits", "_is_cpu", "assign_extend_cache_locs_cpu"])
def test_a_name_that_is_gone_is_named(monkeypatch, name):
    target = next(patch.target for patch in PATCHES if patch.target.endswith(f".{name}"))
    module = target.rpartition(".")[0]
    source = signatures._source
    monkeypatch.setattr(
        signatures, "_source", lambda one: source(one).replace(name, "other") if one == module else source(one)
    )
    assert any(sentence.startswith(f"{target}: gone") for sentence in signatures.check_signatures())


def test_a_call_that_changes_is_named(monkeypatch):
    target = "sglang.srt.managers.overlap_utils.gather_spec_extras"
    source = signatures._source
    monkeypatch.setattr(signatures, "_source", lambda one: source(one).replace("self.topk_p_buf", "self.other_buf", 99))
    (sentence,) = signatures.check_signatures()
    assert sentence.startswith(f"{target}: is gather_spec_extras(indices, self.other_buf")


def test_a_row_of_the_kind_module_is_a_file_of_sglang():
    for patch in PATCHES:
        if patch.kind == "module":
            assert signatures._file(patch.target.rpartition(".")[0])


def test_ours_takes_what_the_original_takes():
    """Functions in the place of a function with a definition have as many parameters."""
    for patch in PATCHES:
        if patch.kind in ("put", "module") and patch.ours and patch.target in signatures.READ:
            written = signatures.read_definition(patch.target)[0]
            if written and written.startswith("("):
                theirs = ast.parse(f"def f{written}: ...").body[0].args
                ours = inspect.signature(patch.replacement()).parameters
                assert len(ours) == len([*theirs.posonlyargs, *theirs.args, *theirs.kwonlyargs]), patch.target
