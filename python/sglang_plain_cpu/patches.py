"""Patches: what the platform changes in SGLang and torch; `patches.toml` lists them, and only `apply` applies them.

Verb: `apply(when)` applies the rows of one moment, once per process.
"""

from __future__ import annotations

import functools
import os
import pkgutil
import sys
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

_TABLE = tomllib.loads(Path(__file__).with_name("patches.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Patch:
    """A name of SGLang or torch that we replace; the head of `patches.toml` says what each field means."""

    when: str
    kind: str
    target: str
    why: str
    breaks: str
    key: str = ""
    ours: str = ""
    value: Any = None

    def replacement(self) -> Any:
        """Our object, which is imported now, or the value."""
        return pkgutil.resolve_name(f"{__package__}.{self.ours}") if self.ours else self.value

    def apply(self) -> None:
        """Puts the replacement in place, as `kind` says."""
        _KINDS[self.kind](self)


PATCHES = tuple(Patch(target=target, **{k: v for k, v in row.items() if k != "targets"})
                for row in _TABLE["patch"] for target in row["targets"])  # fmt: skip
OVERRIDES: dict[str, tuple[str, ...]] = {
    f"{__package__}.{row['ours']}": tuple(row["overrides"]) for row in _TABLE["subclass"]
}
"""Names that each class of ours overrides in SGLang's class, by `"package.module:class"`."""
_applied: set[str] = set()


def apply(when: str) -> None:
    """Applies the patches of one moment, in the order of the table; a second call does nothing."""
    if when in _applied:
        return
    for patch in PATCHES:
        if patch.when == when:
            patch.apply()
    _applied.add(when)


def _put(patch: Patch) -> None:
    parent, name = _place(patch)
    setattr(parent, name, patch.replacement())


def _wrap(patch: Patch) -> None:
    parent, name = _place(patch)
    setattr(parent, name, _wrapped(getattr(parent, name), patch.replacement()))


def _wrapped(original: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        return ours(original, *args, **kwargs)

    return call


def _put_module(patch: Patch) -> None:
    path, _, name = patch.target.rpartition(".")
    module = ModuleType(path)
    setattr(module, name, patch.replacement())
    sys.modules[path] = module


def _put_entry(patch: Patch) -> None:
    pkgutil.resolve_name(patch.target)[patch.key] = patch.replacement()


def _register(patch: Patch) -> None:
    pkgutil.resolve_name(patch.target)(patch.key)(patch.replacement())


def _set_variable(patch: Patch) -> None:
    os.environ[patch.target.rpartition(".")[2]] = patch.value


def _place(patch: Patch) -> tuple[Any, str]:
    path, _, name = patch.target.rpartition(".")
    return pkgutil.resolve_name(path), name


_KINDS: dict[str, Callable[[Patch], None]] = {
    "put": _put,
    "wrap": _wrap,
    "module": _put_module,
    "entry": _put_entry,
    "register": _register,
    "variable": _set_variable,
}
