"""How a flag of SGLang is refused.

Type: `FlagRule`. Verbs: `refuse_any` (the first flag that a rule refuses), `resolved` (a flag as SGLang resolved it),
and what rules ask of a value: `more_than_one`, `not_null`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from sglang_chunk_cache.flags.server_args import refuse


def more_than_one(value: object) -> bool:
    return isinstance(value, int) and value > 1


def not_null(value: object) -> bool:
    return value not in (None, "null", "none")


@dataclass(frozen=True)
class FlagRule:
    """A flag that is refused.

    Attributes:
        name: the field of `ServerArgs`.
        what: subject of the error's sentence, with the flag or the variable.
        refused: whether a value is refused.
    """

    name: str
    what: str
    refused: Callable[[Any], bool] = bool


def resolved(server_args: Any, name: str) -> Any:
    """A field as SGLang resolved it, or before that as it was given."""
    from sglang.srt.arg_groups.overrides import resolution_result

    return resolution_result(server_args, name)


def refuse_any(rules: Iterable[FlagRule], server_args: Any, words: str) -> None:
    """Refuses the first flag that a rule refuses; the sentence is the rule's `what`, then `words`.

    Raises:
        StartRefused: a rule refuses a flag.
    """
    for rule in rules:
        if rule.refused(resolved(server_args, rule.name)):
            refuse(f"{rule.what}{words}")
