"""Selection: what the forward of one fused request still has to choose or to drop. A frozen value.

The host knows how many rows run at each layer (`layer_counts`), the device which ones. Only two things depend on what
the device finds: windows that grouping discards, and chunks that lose the focus.
"""

from __future__ import annotations

from dataclasses import dataclass

from chunk_cache.methods import METHODS, Method, Options, Stage
from chunk_cache.types import Span


@dataclass(frozen=True, slots=True)
class Selection:
    """Part of a `RecomputePlan`."""

    method: str
    options: Options
    ratio: float
    segment_lens: tuple[int, ...] = ()
    """Reused tokens that share a budget, in the order of the prompt: all of them (one segment), or each chunk's."""
    question: Span = (0, 0)
    """Prompt positions that are the question."""

    @property
    def stage(self) -> Stage:
        return METHODS[self.method].stage

    @property
    def asks_first(self) -> bool:
        """Whether the question finds the rows in an extra forward, before the one that computes the answer."""
        return self.stage is Stage.QUESTION or self.last_asked_layer is not None

    @property
    def last_asked_layer(self) -> int | None:
        """The layer at which the extra forward ends; None = it runs all layers, or there is none."""
        return METHODS[self.method].last_asked_layer(self.options)

    @property
    def group_size(self) -> int:
        return self._int("group_size")

    @property
    def group_threshold(self) -> int:
        return self._int("group_threshold")

    @property
    def block_size(self) -> int:
        return self._int("block_size")

    @property
    def focus_window(self) -> int:
        return self._int("focus_window")

    @property
    def drift(self) -> float:
        """How much of the change by recomputing is added to reused tokens that are not recomputed."""
        value = METHODS[self.method].option(self.options, "drift")
        assert isinstance(value, float)
        return value

    def layer_counts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Rows of each segment that run at each layer: `[num_layers][num_segments]`."""
        method = METHODS[self.method]
        counts = [method.layer_counts(length, self.ratio, num_layers, self.options) for length in self.segment_lens]
        return tuple(zip(*counts, strict=True))

    def _int(self, name: str) -> int:
        value = METHODS[self.method].option(self.options, name)
        assert isinstance(value, int)
        return value


def question_of(spans: tuple[Span, ...], prompt_len: int, answer_tokens: int = 0) -> Span:
    """The question: what lies behind the last chunk and in front of the answer; at least one token.

    If nothing lies there, it is the first token of the answer, or the last token of a prompt that ends in a chunk.
    """
    start = min(spans[-1][1] if spans else 0, prompt_len - 1)
    return start, max(prompt_len - answer_tokens, start + 1)


def is_selecting(method: Method, options: Options) -> bool:
    """Whether a request with these options has something to choose, drop or correct in its forward."""
    return method.stage is not Stage.BEFORE or any(method.option(options, name) for name in ("focus_window", "drift"))
