"""SelectorAnswer: what the auxiliary model found for one prompt, and which prompts ask for it.

`asks_selector` depends only on what all processes of a server share, so the one that asks and the one that waits agree.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunk_cache.methods import METHODS, Ranking
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.types import REASONS

NO_ANSWER = "selector_timeout"
"""The reason where a request was admitted before its answer came."""


@dataclass(frozen=True, slots=True, eq=False)
class SelectorAnswer:
    """Scores of all chunks of a prompt, or why there are none.

    Attributes:
        rankings: per span `[chunk length]`, of the tokens of the model that is served; None = see the reason.
        reason: one of `REASONS`.
        seconds: from asking the selector to its answer.
    """

    rankings: tuple[Ranking, ...] | None
    reason: str | None
    seconds: float

    def __post_init__(self) -> None:
        assert (self.rankings is None) == (self.reason in REASONS), f"{self.reason!r} with {self.rankings}"


def asks_selector(opts: RequestOptions, default_method: str, default_ratio: float) -> bool:
    """Whether the scores could change what is recomputed of a request, should its chunks be stored."""
    method = METHODS[opts.method or default_method]
    if not method.asks_selector or opts.mode != "auto" or not opts.has_marks:
        return False
    # The ratio of a request that names none may be raised above the server's, but is never lowered.
    return method.effective_ratio(opts.ratio, default_ratio) < 1.0 and opts.ratio != 0.0
