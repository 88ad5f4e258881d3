"""Asked conditions: the methods that one prompt is explained under, with their ratios and options.

Verbs: `asked_conditions` (reads the flags of the command line), `parse_options` (reads the object of `--options`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from chunk_cache.errors import given, request_error, show
from chunk_cache.methods import METHODS, METHODS_OF_ANY_SERVER
from chunk_cache_tools.conditions import Condition, check_ratio, parse_method
from chunk_cache_tools.jsonl import object_in


def asked_conditions(texts: Sequence[str], ratio: float | None, options: Mapping[str, Any]) -> list[Condition]:
    """One condition per text; without texts, one per method that needs no selector.

    Args:
        texts: methods, as `parse_method` reads them.
        ratio: ratio of the methods whose text names none; None leaves it to the server.
        options: given to every method that knows them; options in a text win.

    Raises:
        ChunkCacheRequestError: a text is malformed or given twice, a method or an option is unknown, or a value is out
            of range.
    """
    check_ratio(ratio, "--ratio")
    specs = [parse_method(text, options) for text in texts or METHODS_OF_ANY_SERVER]
    known = {option.name for spec in specs for option in METHODS[spec.method].options_schema}
    for name in options:
        if name not in known:
            problem = f"no method that is asked knows {show(name)}"
            raise request_error("--options", problem, f"known options: {', '.join(sorted(known))}")
    for text in texts:
        if texts.count(text) > 1:
            raise request_error(f"--methods {text}", "given twice", "leave one of them out")
    return [Condition(spec, ratio if spec.ratio is None else spec.ratio) for spec in specs]


def parse_options(text: str) -> dict[str, Any]:
    """Reads the object of `--options`; null is not given.

    Raises:
        ChunkCacheRequestError: it is not a JSON object.
    """
    try:
        return given(object_in(text))
    except ValueError as error:
        raise request_error("--options", str(error), 'give an object such as {"top_k": "chunk"}') from None
