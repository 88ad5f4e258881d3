"""Check: the result of one check; `print_checks`, `as_json`, `refused_check` (turns an error into a check)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from chunk_cache.advice import Level
from chunk_cache.errors import one_line


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        name: what was checked.
        found: one sentence.
        remedy: one sentence; empty = there is nothing to do.
        cause: why something is not reused: a `comparison.Cause`, or one of `chunk_cache.types.REASONS`; empty if the
            check does not say that.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""
    cause: str = ""


def refused_check(name: str, error: Exception) -> Check:
    """A failed check; `error` has a message of the form `<problem>; <remedy>`, like all errors of this project."""
    message = one_line(error)
    problem, separator, remedy = message.rpartition("; ")
    return Check(name, Level.FAILURE, problem if separator else message, remedy if separator else "")


def print_checks(checks: Sequence[Check]) -> None:
    """Prints one line per check, and a second one if it has a remedy."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        cause = f"{check.cause}: " if check.cause else ""
        print(f"{check.level:7}  {check.name:{width}}  {cause}{check.found}")
        if check.remedy:
            print(f"{'':7}  {'':{width}}  -> {check.remedy}")


def as_json(checks: Sequence[Check]) -> str:
    """The checks as a JSON list."""
    return json.dumps([asdict(check) for check in checks], indent=2, ensure_ascii=False)
