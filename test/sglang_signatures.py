"""The signatures of SGLang that our code is written against, and what differs from them in the installed SGLang.

Verbs: `check_signatures` (the differences, one sentence each; runs with any version of SGLang), `current_signatures`
(what `sglang_signatures.json` holds, computed), `overrides` (methods that a class of ours overrides), `tables` (of
docs/touched.md). `python test/sglang_signatures.py` writes `sglang_signatures.json` and that page's section anew.

`sglang_signatures.json` says for each dotted path what `inspect.signature` gave; null for what has none. Names that the
CPU platform puts something in the place of are read from SGLang's source instead: some exist only with another CPU
engine, or in a module that needs a GPU. Where the source imports such a name, its signature is how it is called there.
"""

from __future__ import annotations

import ast
import functools
import importlib.util
import inspect
import json
import pkgutil
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from doc_pages import write_made_part
from sglang_chunk_cache.start import hook_table
from sglang_chunk_cache.start.hook_table import FLAG_HOOKS, HOOKS
from sglang_plain_cpu import patches
from sglang_plain_cpu.patches import PATCHES

FILE = Path(__file__).with_name("sglang_signatures.json")
OVERRIDES = hook_table.OVERRIDES | patches.OVERRIDES
READ = frozenset(patch.target for patch in PATCHES if patch.kind in ("put", "module") and patch.target[:5] != "torch")
"""Names that are read from SGLang's source."""


@dataclass(frozen=True)
class Touch:
    """A name of SGLang that a file of ours uses in a way that SGLang does not offer, without a hook or a patch.

    Attributes:
        name: dotted path, whose last part may be an attribute that instances get; or `"module:VARIABLE"`, an
            environment variable and the module that reads it.
        file: below the folder of our package.
        why: one line.
        breaks: as for a hook.
    """

    name: str
    file: str
    why: str
    breaks: str


def _touches(package: str, table: str) -> tuple[Touch, ...]:
    rows = tomllib.loads((Path(__file__).parents[1] / "python" / package / table).read_text())["touch"]
    return tuple(Touch(**row) for row in rows)


TOUCHED_BY_CACHE = _touches("sglang_chunk_cache", "start/hooks.toml")
TOUCHED_BY_PLATFORM = _touches("sglang_plain_cpu", "patches.toml")
TOUCHED = TOUCHED_BY_CACHE + TOUCHED_BY_PLATFORM


def check_signatures() -> list[str]:
    """What differs between `sglang_signatures.json` and the SGLang that is installed; empty = nothing."""
    differences = []
    for path, written in json.loads(FILE.read_text()).items():
        try:
            found = _signature(path)
        except (ImportError, AttributeError) as error:
            differences.append(f"{path}: gone ({error})")
            continue
        if found != written:
            differences.append(f"{path}: is {found or 'no callable'}, and was {written or 'no callable'}")
    return differences + [f"{touch.name}: gone" for touch in TOUCHED if not _exists(touch.name)]


def current_signatures() -> dict[str, str | None]:
    """The signature of each target of a hook or patch, and of each method that a class of ours overrides."""
    paths = [hook.target for hook in FLAG_HOOKS + HOOKS]
    paths += [patch.target for patch in PATCHES]
    paths += [path for ours in our_classes() for path in overrides(ours).values()]
    return {path: _signature(path) for path in sorted(set(paths))}


def our_classes() -> Iterator[type]:
    """The classes that stand in the place of one of SGLang's."""
    return map(pkgutil.resolve_name, OVERRIDES)


def overrides(ours: type) -> dict[str, str]:
    """The names that a class of ours takes from SGLang's classes, each with the dotted path of what it overrides."""
    found = {}
    for name in (name for cls in ours.__mro__ if _is_ours(cls) for name in vars(cls)):
        base = next((base for base in ours.__mro__ if not _is_ours(base) and name in vars(base)), object)
        if base is not object and base.__module__.startswith("sglang.") and not _is_of_python(name):
            found[name] = f"{_path(base)}.{name}"
    return dict(sorted(found.items()))


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith(("sglang_chunk_cache.", "sglang_plain_cpu."))


def _is_of_python(name: str) -> bool:
    return (name.startswith("__") and name != "__init__") or name in ("_abc_impl", "_is_protocol")


def _signature(path: str) -> str | None:
    """The text of a signature.

    Raises:
        ImportError, AttributeError: there is no such name.
    """
    if path in READ:
        return read_definition(path)[0]
    found = _original(path)
    if path.startswith("torch."):
        return None  # written in C
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    return str(inspect.signature(found)) if callable(found) else None


def read_definition(path: str) -> tuple[str | None, str]:
    """The signature of a name as its module's source gives it, and the text that defines it.

    Raises:
        ImportError: there is no such module.
        AttributeError: the module does not bind the name, under any condition.
    """
    module, *names = _split(path)
    tree = ast.parse(_source(module))
    bodies = [tree]
    for name in names:
        bodies = [node for body in bodies for node in _statements(body) if name in _bound(node)]
    if not bodies:
        raise AttributeError(f"{module} has no {'.'.join(names)}")
    text = "\n".join(map(ast.unparse, bodies))
    found = bodies[-1]
    if isinstance(found, ast.FunctionDef):
        return f"({ast.unparse(found.args)})", text
    return "; ".join(sorted(set(_calls(tree, names[-1])))) or None, text


def _calls(tree: ast.AST, name: str) -> Iterator[str]:
    """How a module calls a name, also by another name that it is assigned to."""
    aliases = {name}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id == name:
            aliases |= _bound(node)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in aliases:
            yield ast.unparse(node)


def _split(path: str) -> list[str]:
    """The module of a dotted path, and the names in it."""
    parts = path.split(".")
    for end in range(len(parts) - 1, 1, -1):
        if _file(".".join(parts[:end])) is not None:
            return [".".join(parts[:end]), *parts[end:]]
    raise ImportError(f"no module of {path}")


def _file(module: str) -> Path | None:
    """The file of a module, which is not imported."""
    package, *names = module.split(".")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    place = Path(spec.submodule_search_locations[0], *names)
    return next((file for file in (place.with_suffix(".py"), place / "__init__.py") if file.exists()), None)


@functools.cache
def _source(module: str) -> str:
    file = _file(module)
    return "" if file is None else file.read_text()


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module or class, also those under a condition."""
    for child in ast.iter_child_nodes(node):
        yield child
        if isinstance(child, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from _statements(child)


def _bound(node: ast.AST) -> set[str]:
    """The names that a statement binds."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {alias.asname or alias.name for alias in names}
        case ast.Assign(targets=targets):
            return {target.id for target in targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
    return set()


def _original(path: str) -> Any:
    """What SGLang has under a dotted path, also where it is replaced by ours in this process."""
    parent_path, _, name = path.rpartition(".")
    parent = _without_ours(pkgutil.resolve_name(parent_path))
    return inspect.getattr_static(parent, name) if isinstance(parent, type) else _without_ours(getattr(parent, name))


def _without_ours(value: Any) -> Any:
    return next(base for base in value.__mro__ if not _is_ours(base)) if isinstance(value, type) else value


def _exists(path: str) -> bool:
    """Whether a name is there, an attribute that instances of a class get, or a variable that a module reads."""
    module, _, variable = path.partition(":")
    if variable:
        return variable in _source(module)
    parent_path, _, name = path.rpartition(".")
    try:
        parent = _without_ours(pkgutil.resolve_name(parent_path))
    except (ImportError, AttributeError):
        return False
    return hasattr(parent, name) or (isinstance(parent, type) and name in _attributes(parent))


@functools.cache
def _attributes(cls: type) -> frozenset[str]:
    """What instances of a class get, by its source."""
    bases = [base for base in cls.__mro__ if base.__module__.startswith("sglang.")]
    assigned = {name for base in bases for name in re.findall(r"\bself\.(\w+)", inspect.getsource(base))}
    return frozenset(assigned.union(*(vars(base).get("__annotations__", ()) for base in bases)))


# docs/touched.md


def tables() -> str:
    """The tables as Markdown."""
    hooks = [(_short(hook.target), hook.kind.value, hook.why, hook.breaks.rstrip(".")) for hook in FLAG_HOOKS + HOOKS]
    puts = [(_short(patch.target), _how(patch), patch.why, patch.breaks.rstrip(".")) for patch in PATCHES]
    return "\n".join(
        [
            "## By the chunk cache\n",
            f"### Replaced and wrapped ({len(hooks)})\n",
            *_table(("in `sglang.srt`", "how", "why", "what a change of its meaning would break in silence"), hooks),
            *_overridden(hook_table.OVERRIDES),
            *_touched(TOUCHED_BY_CACHE),
            "\n## By the CPU platform\n",
            f"### Replaced, wrapped and registered ({len(puts)})\n",
            *_table(("in `sglang.srt`", "ours", "why", "what a change of its meaning would break in silence"), puts),
            *_overridden(patches.OVERRIDES),
            *_touched(TOUCHED_BY_PLATFORM),
        ]
    )


def _overridden(handlers: Iterable[str]) -> Iterator[str]:
    classes = [pkgutil.resolve_name(handler) for handler in handlers]
    rows = [
        (f"`{ours.__name__}`", _short(_path(_without_ours(ours))), ", ".join(f"`{name}`" for name in overrides(ours)))
        for ours in classes
    ]
    yield f"\n### Overridden methods ({sum(len(overrides(ours)) for ours in classes)})\n"
    yield from _table(("class", "of", "overrides"), rows)


def _touched(touches: Iterable[Touch]) -> Iterator[str]:
    rows = [(_short(touch.name), f"`{touch.file}`", touch.why, touch.breaks.rstrip(".")) for touch in touches]
    yield f"\n### Touched otherwise ({len(rows)})\n"
    yield from _table(("in `sglang.srt`", "by", "why", "what a change of its meaning would break in silence"), rows)


def _how(patch: patches.Patch) -> str:
    ours = f"`{patch.ours.replace(':', '.') or json.dumps(patch.value)}`"
    return f"{patch.kind} {f'`{patch.key}` ' if patch.key else ''}{ours}"


def _short(path: str) -> str:
    return f"`{path.removeprefix('sglang.srt.')}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


PROGRAM = "test/sglang_signatures.py"


def main() -> None:
    FILE.write_text(json.dumps(current_signatures(), indent=1) + "\n")
    write_made_part("touched.md", PROGRAM, tables())


if __name__ == "__main__":
    main()
