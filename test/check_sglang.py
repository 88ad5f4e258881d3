"""Whether the chunk cache fits another SGLang: `make check-sglang VERSION=x.y.z`; docs/upgrading.md reads the answer.

    environment   .cache/sglang-x.y.z: the project and its requirements, with that version in the place of the pin
    names         each that is replaced, wrapped, overridden or touched: its signature, and its body against the pin's
    exactness     recompute ratio 1.0 against stock SGLang of that version, in one configuration

Exit codes: 0 nothing changed; 1 a name changed, or a test failed; 2 there is no such environment.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
import pkgutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
CONFIG = "page16-tp1-chunked64-overlap"
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
    verdicts = Counter(compare(installed(sys.executable), installed(python)))
    took("names", start, ", ".join(f"{num} {verdict}" for verdict, num in verdicts.items()))
    start = time.monotonic()
    tests = ROOT / "test" / "exactness" / "test_ratio_one.py"
    done = subprocess.run([python, "-m", "pytest", "-qx", "--tb=short", tests, "-k", CONFIG], cwd=ROOT)
    took("exactness", start, "failed" if done.returncode else "passed")
    return int(done.returncode != 0 or set(verdicts) > {"unchanged"})


def took(step: str, start: float, result: str = "made") -> None:
    print(f"{step}: {result} ({time.monotonic() - start:.0f} s)", flush=True)


def uv() -> str:
    """The command that .ci/install uses: its own, where there was none on PATH."""
    own = ROOT / ".tools" / "uv" / "bin" / "uv"
    return str(own if own.exists() else "uv")


def make_environment(folder: Path, requirements: list[str]) -> bool:
    """Our own requirements, those of `requirements` overridden."""
    overrides = folder.parent / f"{folder.name}.txt"
    overrides.parent.mkdir(exist_ok=True)
    overrides.write_text("\n".join(requirements) + "\n")
    into = ["--python", folder, "--override", overrides]
    install = [uv(), "pip", "install", *into, "--editable", ".[server,dev,bench]"]
    steps = ([uv(), "venv", "--quiet", "--allow-existing", "--python", sys.executable, folder], install)
    return all(subprocess.run(step, cwd=ROOT).returncode == 0 for step in steps)


def installed(python: Path | str) -> dict[str, Any]:
    """What `describe` finds in an environment."""
    done = subprocess.run([python, __file__, "describe"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def compare(old: dict[str, Any], new: dict[str, Any]) -> Iterator[str]:
    """The verdict of each name, printed with it."""
    differences = dict(sentence.split(": ", 1) for sentence in new["differences"])
    for name, body in old["bodies"].items():
        verdict = "unchanged" if new["bodies"][name] == body else "body changed"
        detail = differences.get(name, "")
        if detail:
            verdict = "missing" if detail.startswith("gone") else "signature changed"
        print(f"{verdict:18} {name} {detail}".rstrip(), flush=True)
        yield verdict


# In either environment.


def describe() -> dict[str, Any]:
    """What `check_signatures` says, and a digest of the source of each name that it looks at."""
    import sglang_signatures

    names = [*json.loads(sglang_signatures.FILE.read_text()), *(touch.name for touch in sglang_signatures.TOUCHED)]
    return {"differences": sglang_signatures.check_signatures(), "bodies": {name: body_of(name) for name in names}}


def body_of(name: str) -> str | None:
    """None where there is none: a name that is missing, an attribute; a class has rows for what is overridden of it."""
    import sglang_signatures

    try:
        if name in sglang_signatures.READ:
            text = sglang_signatures.read_definition(name)[1]
        else:
            value = pkgutil.resolve_name(name)
            value = value.fget if isinstance(value, property) else value
            text = inspect.getsource(value) if inspect.isfunction(value) or inspect.ismethod(value) else ""
    except (ImportError, AttributeError):
        return None
    return hashlib.sha256(text.encode()).hexdigest() if text else None


if __name__ == "__main__":
    if sys.argv[1:] != ["describe"]:
        sys.exit(main())
    print(json.dumps(describe()))
