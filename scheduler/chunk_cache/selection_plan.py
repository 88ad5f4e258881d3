"""Selection: what the forward of one fused request still has to choose or to drop. A frozen value.

The host knows how many rows run at each layer (`layer_counts`), the device which ones. Only two things depend on what
the device finds: windows that grouping discards, and chunks that lose the focus.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from chunk_cache.methods import METHODS, Method, Options, Rows, Stage
from chunk_cache.methods.scored import QuestionMethod
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
    def group_size(self) -> int:
        return self._int("group_size")

    @property
    def group_threshold(self) -> int:
        return self._int("group_threshold")

    @property
    def focus_window(self) -> int:
        return self._int("focus_window")

    @property
    def corrects_drift(self) -> bool:
        """Whether reused tokens that are not recomputed are changed by what recomputing changed."""
        return bool(self._int("drift"))

    def layer_counts(self, num_layers: int) -> tuple[tuple[int, ...], ...]:
        """Rows of each segment that run at each layer: `[num_layers][num_segments]`."""
        method = METHODS[self.method]
        counts = [method.layer_counts(length, self.ratio, num_layers, self.options) for length in self.segment_lens]
        return tuple(zip(*counts, strict=True))

    def probes(self, num_layers: int) -> Rows:
        """Reused tokens that are computed whatever their score, by their number among all reused tokens; ascending.

        In the middle of equal parts of each budget.
        """
        method = METHODS[self.method]
        if not isinstance(method, QuestionMethod):
            return np.empty(0, dtype=np.int64)
        found, at = [], 0
        for length, count in zip(self.segment_lens, self.layer_counts(num_layers)[0], strict=True):
            num = method.num_probes(count, self.options)
            found.append(at + (2 * np.arange(num, dtype=np.int64) + 1) * length // max(1, 2 * num))
            at += length
        return np.concatenate(found)

    def _int(self, name: str) -> int:
        value = METHODS[self.method].option(self.options, name)
        assert isinstance(value, int)
        return value


def question_of(spans: tuple[Span, ...], prompt_len: int, answer_tokens: int = 0) -> Span:
    """The question: what lies behind the last chunk and in front of the answer; at least one token.

    Where nothing lies there, it is the first token of the answer; in a prompt that ends in a chunk the last one.
    """
    start = min(spans[-1][1] if spans else 0, prompt_len - 1)
    return start, max(prompt_len - answer_tokens, start + 1)


def is_selecting(method: Method, options: Options) -> bool:
    """Whether a request with these options has something to choose, drop or correct in its forward."""
    return method.stage is not Stage.BEFORE or any(method.option(options, name) for name in ("focus_window", "drift"))
