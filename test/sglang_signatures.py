"""The signatures of SGLang that our code is written against, and what differs from them in the installed SGLang.

Verbs: `check_signatures` (the differences, one sentence each; runs with any version of SGLang), `current_signatures`
(what `sglang_signatures.json` holds, computed), `overrides` (methods that a class of ours overrides), `tables` (of
docs/compatibility.md). `python test/sglang_signatures.py` writes `sglang_signatures.json` and that page's section anew.

`sglang_signatures.json` says for each dotted path what `inspect.signature` gave; null for what has none.
"""

from __future__ import annotations

import functools
import inspect
import json
import pkgutil
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sglang_chunk_cache.start.hook_table import FLAG_HOOKS, HOOKS, OVERRIDES, TOUCHED

FILE = Path(__file__).with_name("sglang_signatures.json")


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
    """The signature of each hook's target and of each method that a class of ours overrides."""
    paths = [hook.target for hook in FLAG_HOOKS + HOOKS]
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
    found = _original(path)
    if isinstance(found, property):
        found = found.fget
    elif isinstance(found, (classmethod, staticmethod)):
        found = found.__func__
    return str(inspect.signature(found)) if callable(found) else None


def _original(path: str) -> Any:
    """What SGLang has under a dotted path, also where it is replaced by ours in this process."""
    parent_path, _, name = path.rpartition(".")
    parent = _without_ours(pkgutil.resolve_name(parent_path))
    return inspect.getattr_static(parent, name) if isinstance(parent, type) else _without_ours(getattr(parent, name))


def _without_ours(value: Any) -> Any:
    return next(base for base in value.__mro__ if not _is_ours(base)) if isinstance(value, type) else value


def _exists(path: str) -> bool:
    """Whether a name is there, or an attribute that instances of a class get."""
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


# docs/compatibility.md


def tables() -> str:
    """The tables as Markdown."""
    hooks = [(_short(hook.target), hook.kind.value, hook.why, hook.breaks.rstrip(".")) for hook in FLAG_HOOKS + HOOKS]
    classes = [
        (f"`{ours.__name__}`", _short(_path(_without_ours(ours))), ", ".join(f"`{name}`" for name in overrides(ours)))
        for ours in our_classes()
    ]
    touched = [(_short(touch.name), f"`{touch.file}`", touch.why, touch.breaks.rstrip(".")) for touch in TOUCHED]
    return "\n".join(
        [
            f"### Replaced and wrapped ({len(hooks)})\n",
            *_table(("in `sglang.srt`", "how", "why", "what a change of its meaning would break in silence"), hooks),
            f"\n### Overridden methods ({sum(len(overrides(ours)) for ours in our_classes())})\n",
            *_table(("class", "of", "overrides"), classes),
            f"\n### Touched without a hook ({len(touched)})\n",
            *_table(("in `sglang.srt`", "by", "why", "what a change of its meaning would break in silence"), touched),
        ]
    )


def _short(path: str) -> str:
    return f"`{path.removeprefix('sglang.srt.')}`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + " --- |" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


BEGIN, END = "<!-- made by python test/sglang_signatures.py -->\n", "<!-- end -->\n"


def main() -> None:
    FILE.write_text(json.dumps(current_signatures(), indent=1) + "\n")
    page = Path(__file__).parents[1] / "docs" / "compatibility.md"
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(f"{before}{BEGIN}{tables()}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
