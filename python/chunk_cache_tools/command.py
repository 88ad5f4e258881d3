"""The command `chunk-cache`: runs the subcommands for work beside a server.

Each subcommand has an entry in `COMMANDS`. It is imported only when it is called, so that the others run even if its
packages are not installed.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import pkgutil
import sys
from collections.abc import Sequence

from chunk_cache_tools.requirements import DISTRIBUTION, install_sglang

BEFORE, RUNNING, TRAINING = "before you serve", "with a running server", "training"
COMMANDS = {
    "verify": (
        BEFORE,
        "chunk_cache_tools.verify.verify_command:main",
        "which method and ratio can be trusted with a model and prompts of yours",
    ),
    "doctor": (
        BEFORE,
        "chunk_cache_tools.doctor.doctor_command:main",
        "what is wrong with this machine or a running server, and what to do about it",
    ),
    "explain": (
        RUNNING,
        "chunk_cache_tools.explain.explain_command:main",
        "pictures of what became of every token of one prompt",
    ),
    "warm": (
        RUNNING,
        "chunk_cache_tools.warm.warm_command:main",
        "have the server compute passages ahead of time",
    ),
    "train-selector": (
        TRAINING,
        "chunk_cache_tools.train_selector.train_selector_command:main",
        "fine-tune the small model of the method cacheclip (needs the server's packages)",
    ),
}
"""Subcommand -> its group, the function that takes its arguments and returns an exit code, and what it is for."""
OF_THE_SERVER = ("sglang", "torch", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand and returns its exit code; 2 if there is no such subcommand or its packages are missing."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(_version())
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        remedy = f"did you mean `chunk-cache {near[0]}`?" if near else f"known: {', '.join(COMMANDS)}"
        print(f"chunk-cache: {name!r} is no command; {remedy}", file=sys.stderr)
        return 2
    try:
        run = pkgutil.resolve_name(COMMANDS[name][1])
    except ModuleNotFoundError as error:
        if error.name not in OF_THE_SERVER:
            raise
        print(f"chunk-cache {name}: {error.name} is not installed; run `{install_sglang()}`", file=sys.stderr)
        return 2
    return int(run(rest) or 0)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = ["usage: chunk-cache COMMAND ...", "", "Tools for an SGLang server with the chunk cache."]
    for group in dict.fromkeys(group for group, *_ in COMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:{width}}  {what}" for name, (of, _, what) in COMMANDS.items() if of == group]
    return "\n".join([*lines, "", "`chunk-cache COMMAND --help` has examples, flags and exit codes; --version."])


def _version() -> str:
    try:
        beside = f"SGLang {importlib.metadata.version('sglang')}"
    except importlib.metadata.PackageNotFoundError:
        beside = "the tools alone, without SGLang"
    return f"chunk-cache {importlib.metadata.version(DISTRIBUTION)} ({beside})"


if __name__ == "__main__":
    sys.exit(main())
