"""Conditions of the harness: `built_methods` are all methods of the server, `composed_methods` those that select rows,
with early termination and with grouping; `conditions_of` makes one condition per method and ratio.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from chunk_cache.methods import METHODS, METHODS_OF_ANY_SERVER
from chunk_cache_tools.conditions import Condition, MethodSpec, grid
from chunk_cache_tools.jsonl import DataError

RATIOS = (0.0, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0)
NO_SHIFT_OPTIONS = (("shift", 0),)
COMPOSED_RATIOS = (0.15,)
# Three layers must agree (our choice: Cache-Craft, section 3.2.2, gives no number); more than 5 of 8 (CacheClip).
FOCUS_OPTIONS = (("focus_window", 3),)
GROUP_OPTIONS = (("group_size", 8), ("group_threshold", 5))
NO_SHIFT = MethodSpec("full-reuse", NO_SHIFT_OPTIONS)
"""Reuse with keys still rotated for the position where the chunk was computed, the weakest baseline of the papers."""
FULL_REUSE = MethodSpec("full-reuse")


def built_methods(*, has_selector: bool = False) -> list[MethodSpec]:
    """Every method that the server has with its defaults, and reuse without the position shift."""
    specs = [MethodSpec(name) for name in (METHODS if has_selector else METHODS_OF_ANY_SERVER)]
    return [NO_SHIFT, *specs] if has_no_shift() else specs


def composed_methods() -> list[MethodSpec]:
    """Every method that selects rows, with early termination and with grouping."""
    selecting = [name for name in METHODS_OF_ANY_SERVER if METHODS[name].effective_ratio(0.5, 0.5) == 0.5]
    return [MethodSpec(name, options) for name in selecting for options in (FOCUS_OPTIONS, GROUP_OPTIONS)]


def has_no_shift() -> bool:
    """Whether the position shift can be switched off."""
    names = {option.name for option in METHODS[NO_SHIFT.method].options_schema}
    return {name for name, _ in NO_SHIFT_OPTIONS} <= names


def conditions_of(methods: Iterable[MethodSpec], ratios: Sequence[float]) -> list[Condition]:
    """All methods x ratios, without conditions that equal another.

    Raises:
        DataError: a method has an option that replaces the ratio.
    """
    methods = list(methods)
    for spec in methods:
        if spec.budget is not None:
            remedy = f"leave {spec.budget} out, or name the method to chunk-cache verify"
            raise DataError(f"--methods: {spec.label} cannot be asked by ratio; {remedy}.")
    return grid(methods, ratios)
