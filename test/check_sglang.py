"""Whether the chunk cache fits another SGLang: `make check-sglang VERSION=x.y.z`; docs/upgrading.md reads the answer.

    environment   .cache/sglang-x.y.z: the project and its requirements, with that version in the place of the pin
    names         each that is hooked or overridden: its signature and its body there, against those of the pin
    exactness     recompute ratio 1.0 against stock SGLang of that version, in one configuration

Exit codes: 0 nothing changed; 1 a name changed, or a test failed; 2 there is no such environment.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "page16-tp1-chunked-overlap"
MEANING = ("it fits", "something changed; docs/upgrading.md says what to do", "the environment could not be made")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("version", help="of SGLang")
    parser.add_argument("--with", nargs="*", default=[], help="requirements that replace what that SGLang asks for")
    options = vars(parser.parse_args())
    folder = ROOT / ".cache" / f"sglang-{options['version']}"
    code = check(folder, [f"sglang=={options['version']}", *options["with"]])
    print(f"exit code {code}: {MEANING[code]}")
    return code


def check(folder: Path, requirements: list[str]) -> int:
    python = folder / "bin" / "python"
    start = time.monotonic()
    if not make_environment(folder, requirements):
        return 2
    took("environment", start)
    start = time.monotonic()
    pinned = describe_in(sys.executable)
    verdicts = Counter(compare(pinned, describe_in(python, list(pinned))))
    took("names", start, ", ".join(f"{num} {verdict}" for verdict, num in verdicts.items()))
    start = time.monotonic()
    tests = ROOT / "test" / "exactness" / "test_ratio_one.py"
    done = subprocess.run([python, "-m", "pytest", "-qx", "--tb=short", tests, "-k", CONFIG], cwd=ROOT)
    took("exactness", start, "failed" if done.returncode else "passed")
    return int(done.returncode != 0 or set(verdicts) > {"unchanged"})


def took(step: str, start: float, result: str = "made") -> None:
    print(f"{step}: {result} ({time.monotonic() - start:.0f} s)", flush=True)


def make_environment(folder: Path, requirements: list[str]) -> bool:
    """Our own requirements, those of `requirements` overridden."""
    uv = ROOT / ".tools" / "uv" / "bin" / "uv"  # as .ci/install leaves it where there is none on PATH
    command = str(uv if uv.exists() else "uv")
    overrides = folder.with_suffix(".txt")
    overrides.parent.mkdir(exist_ok=True)
    overrides.write_text("\n".join(requirements) + "\n")
    install = [
        command,
        "pip",
        "install",
        "--python",
        folder,
        "--override",
        overrides,
        "--editable",
        f"{ROOT}[dev,bench]",
    ]
    steps = ([command, "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder], install)
    return all(subprocess.run(step, cwd=ROOT).returncode == 0 for step in steps)


def describe_in(python: Path | str, names: Sequence[str] = ()) -> dict[str, Any]:
    """What `describe` says in an environment, of all names that are listed there or of those given."""
    given = json.dumps(names)
    done = subprocess.run([python, __file__, "describe"], cwd=ROOT, input=given, stdout=-1, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """The verdict of each name, printed with it; a module of ours that is imported there is passed over."""
    for name, (signature, body) in old.items():
        there, body_there = new[name]
        verdict, detail = "unchanged", ""
        if body_there is None:
            verdict, detail = "missing", f": {there}"
        elif there != signature:
            verdict, detail = "signature changed", f": {signature} -> {there}"
        elif body_there != body:
            verdict = "body changed"
        if verdict != "unchanged" or not name.startswith("sglang_chunk_cache."):
            print(f"{verdict:18} {name}{detail}", flush=True)
            yield verdict


# In either environment.


def list_names() -> Iterator[str]:
    """What is hooked; what a subclass of ours overrides; and our own modules, which import what they need."""
    import sglang_chunk_cache
    from sglang_chunk_cache.host import hooks

    yield from (hook.target for hook in (*hooks.FLAG_HOOKS, *hooks.HOOKS))
    for module in pkgutil.walk_packages(sglang_chunk_cache.__path__, "sglang_chunk_cache."):
        if not module.name.endswith("__main__"):
            yield module.name
            for value in vars(importlib.import_module(module.name)).values():
                if inspect.isclass(value) and value.__module__ == module.name:
                    yield from overridden_by(value)


def overridden_by(ours: type) -> Iterator[str]:
    methods = [name for name, value in vars(ours).items() if inspect.isfunction(value) and name != "__subclasshook__"]
    for name in methods:
        for base in ours.__mro__[1:]:
            if name in vars(base) and base.__module__.startswith("sglang."):
                yield f"{base.__module__}.{base.__qualname__}.{name}"
                break


def describe(name: str) -> tuple[str, str | None]:
    """Signature and digest of the body; None in its place where there is no such name, and why."""
    try:
        value = pkgutil.resolve_name(name)
    except (ImportError, AttributeError) as error:
        return f"{type(error).__name__}: {error}", None
    if inspect.ismodule(value):
        return "module", ""
    if inspect.isclass(value):  # it has a row for each method that ours overrides
        return str(inspect.signature(value)), ""
    kind = "async " if inspect.iscoroutinefunction(value) else ""
    return f"{kind}{inspect.signature(value)}", hashlib.sha256(inspect.getsource(value).encode()).hexdigest()


if __name__ == "__main__":
    if sys.argv[1:] != ["describe"]:
        sys.exit(main())
    print(json.dumps({name: describe(name) for name in json.load(sys.stdin) or dict.fromkeys(list_names())}))
