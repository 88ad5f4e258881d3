"""Methods whose scores come from another model: a small auxiliary one reads the text while the request waits."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from chunk_cache.methods.base import TOP_K
from chunk_cache.methods.method_options import GROUP_BUDGET, GROUP_SIZE, Option
from chunk_cache.methods.ranked import RankedMethod


class CacheClip(RankedMethod):
    """CacheClip section 3.3: the reused tokens that the question attends to most in the auxiliary model's last layer.

    Selects the best of all reused tokens of the prompt; then windows of 8 keep their tokens if more than 5 were
    selected. `group_budget` says which of these a ratio counts. Where the paper is silent: windows are counted in the
    main model's tokens, from a chunk's first one; `top_k` makes the budget one for each chunk.
    """

    name = "cacheclip"
    own_options = (TOP_K, GROUP_BUDGET)
    asks_selector = True

    @cached_property
    def options_schema(self) -> tuple[Option, ...]:
        grouping = replace(GROUP_SIZE, default=8)
        return tuple(grouping if option is GROUP_SIZE else option for option in super().options_schema)


STAND_IN = "near"
"""The method that serves a request where its own cannot choose: no scores, or rows that do not fit its step."""
