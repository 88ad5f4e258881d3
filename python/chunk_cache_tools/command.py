"""The command `chunk-cache`: one door to everything that is run from a shell beside a server.

    chunk-cache verify ...     each subcommand has its own --help

A subcommand is a line of `COMMANDS`; it is imported when it is asked for, so one that needs more packages than are
installed does not keep the others from running.
"""

from __future__ import annotations

import pkgutil
import sys
from collections.abc import Sequence

from chunk_cache_tools import __doc__ as _about

COMMANDS = {
    "verify": (
        "chunk_cache_tools.verify.verify_command:main",
        "which method and ratio can be trusted with a model and prompts of yours",
    ),
    "doctor": (
        "chunk_cache_tools.doctor.doctor_command:main",
        "what is wrong with this machine, or with a running server, and what to do about it",
    ),
    "explain": (
        "chunk_cache_tools.explain.explain_command:main",
        "pictures of what became of every token of one prompt",
    ),
    "warm": ("chunk_cache_tools.warm.warm_command:main", "have a running server compute passages ahead of time"),
    "train-selector": (
        "sglang_chunk_cache.selector_training.train_selector:main",
        "fine-tune the small model of the method cacheclip; needs the server's packages",
    ),
}
"""Subcommand -> the function that takes its arguments and returns an exit code, and what it is for."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a subcommand; the exit code is its own, 2 where there is no such subcommand."""
    name, *rest = (sys.argv[1:] if argv is None else argv) or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name not in COMMANDS:
        print(f"chunk-cache: {name!r} is no command; known: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    run = pkgutil.resolve_name(COMMANDS[name][0])
    return int(run(rest) or 0)


def _help() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in COMMANDS.items()]
    return "\n".join(["usage: chunk-cache COMMAND ...", "", str(_about), "", *lines])


if __name__ == "__main__":
    sys.exit(main())
