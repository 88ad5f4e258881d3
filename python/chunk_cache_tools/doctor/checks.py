"""Check: one thing that was looked at; `print_checks`, `as_json`, `refused_check` (an error as a check)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from chunk_cache.advice import Level
from chunk_cache.errors import one_line


@dataclass(frozen=True)
class Check:
    """What was found.

    Attributes:
        name: what was looked at.
        found: one sentence.
        remedy: one sentence; empty = there is nothing to do.
        cause: one of `compare.Cause`, or a reason of `chunk_cache.types`, where the check says why something is not
            reused; else empty.
    """

    name: str
    level: Level
    found: str
    remedy: str = ""
    cause: str = ""


def refused_check(name: str, error: Exception) -> Check:
    """A failure; the message of `error` is `<problem>; <remedy>`, as all of ours are."""
    message = one_line(error)
    problem, separator, remedy = message.rpartition("; ")
    return Check(name, Level.FAILURE, problem if separator else message, remedy if separator else "")


def print_checks(checks: Sequence[Check]) -> None:
    """One line each, and one below it for the remedy."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        cause = f"{check.cause}: " if check.cause else ""
        print(f"{check.level:7}  {check.name:{width}}  {cause}{check.found}")
        if check.remedy:
            print(f"{'':7}  {'':{width}}  -> {check.remedy}")


def as_json(checks: Sequence[Check]) -> str:
    """The list of them."""
    return json.dumps([asdict(check) for check in checks], indent=2, ensure_ascii=False)
