"""Method: how and when the tokens of reused chunks are chosen that are computed again.

    Stage.BEFORE     before the forward, on the host: `rows_for_chunk`
    Stage.LAYER      at a layer, from what all rows computed there; from then on the others are left out: `layer_counts`
    Stage.QUESTION   by a forward of the question over the reused cache, before that of the answer: `layer_counts`

A method of the last two stages says here only how many rows are kept; the scores are tensors, and the server's
`forward.selection.scorer.scorer_of` knows the function that makes them. Whatever a method does depends on its arguments
only, so every tensor-parallel rank and every retry agrees.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from chunk_cache.errors import request_error, show
from chunk_cache.methods.method_options import (
    ALPHA,
    COMMON_OPTIONS,
    GROUP_SIZE,
    GROUP_THRESHOLD,
    ChoiceOption,
    Option,
    Options,
    OptionValue,
    check_options,
)
from chunk_cache.types import Span

ValueT = TypeVar("ValueT")
Rows: TypeAlias = npt.NDArray[np.int64]
Ranking: TypeAlias = npt.NDArray[np.float32]

_INTEGER_TOLERANCE = 1e-9  # far above the rounding of ratio * n (1e-16 relative), far below one token

TOP_K = ChoiceOption("top_k", ("global", "chunk"))
"""Whether a budget is one for all reused tokens of the prompt, or one for each chunk."""


class Stage(StrEnum):
    """When a method chooses."""

    BEFORE = "before"
    LAYER = "layer"
    QUESTION = "question"


class Basis(NamedTuple):
    """The arguments of `rows_for_chunk` that a method chooses by."""

    seed: int
    chunk_key: bytes
    ranking: Ranking | None
    blocks: Rows | None


class AllReused(NamedTuple):
    """What `rows_of_all` chooses by: the reused parts of all chunks of a prompt, side by side.

    Attributes:
        spans: their positions in the prompt, ascending, at least one.
        question_start: position of the question's first token.
        seed, ranking, blocks: as of `rows_for_chunk`, `[num_tokens]`.
        cfos: of each chunk, None where none is known.
        seam_len: tokens at the beginning of a chunk that `seams` computes.
    """

    spans: Sequence[Span]
    question_start: int
    seed: int = 0
    ranking: Ranking | None = None
    blocks: Rows | None = None
    cfos: Sequence[float | None] = ()
    seam_len: int = 0

    @property
    def lens(self) -> list[int]:
        return [end - start for start, end in self.spans]

    @property
    def num_tokens(self) -> int:
        return sum(self.lens)


class Method:
    """A way to choose rows. Stateless; one instance serves all requests."""

    name: str
    stage: ClassVar[Stage] = Stage.BEFORE
    own_options: ClassVar[tuple[Option, ...]] = ()
    statistic: ClassVar[str | None] = None
    """The statistic of a stored chunk that it ranks by; one of `chunk_cache.index.chunk_statistics.STATISTICS`."""
    reads_question: ClassVar[bool] = False
    """Whether it chooses in the forward by the question, which must then be computed in the same step as the rows."""
    asks_selector: ClassVar[bool] = False
    """Whether it ranks by scores of an auxiliary model, for which a request waits (`plan.selector_answer`)."""
    asks_words: ClassVar[bool] = False
    """Whether it ranks by how near a token stands to words of the question (`plan.question_words`)."""

    @cached_property
    def options_schema(self) -> tuple[Option, ...]:
        """All parameters, its own first; one of its own replaces the common one of the same name."""
        own = {option.name for option in self.own_options}
        return (*self.own_options, *(option for option in COMMON_OPTIONS if option.name not in own))

    def effective_ratio(self, requested: float | None, default: float) -> float:
        """The recompute ratio in [0, 1] that is really used: the request's, else the server's."""
        return default if requested is None else requested

    def rows_for_chunk(
        self,
        offset_len: int,
        num_reused: int,
        ratio: float,
        *,
        seed: int = 0,
        chunk_key: bytes = b"",
        ranking: Ranking | None = None,
        blocks: Rows | None = None,
    ) -> Rows:
        """The tokens of one reused chunk that are computed again (`Stage.BEFORE`).

        Args:
            offset_len: tokens of the chunk in front of the reused part (they lie in the exact prefix).
            num_reused: tokens of the chunk that are brought in.
            ratio: the effective ratio; 1.0 selects all rows whatever the method.
            seed: the request's ``options.seed``, for methods that draw lots.
            chunk_key: the chunk's key, so that different chunks draw differently.
            ranking: [num_reused] the statistic or score of each reused token, NaN where it has none; None = none has.
            blocks: [num_reused] the block that each reused token lies in, from 0, ascending; a method that does not
                choose runs of tokens anyway chooses whole blocks, the last one in part. None = token by token.

        Returns:
            Sorted offsets in ``[0, num_reused)``, counted from the first reused token; shape [num_selected].
        """
        assert min(offset_len, num_reused) >= 0, f"negative length: {offset_len}, {num_reused}"
        num_rows = num_rows_at(ratio, num_reused)
        if num_rows in (0, num_reused):
            return np.arange(num_rows, dtype=np.int64)
        return self._select(num_reused, num_rows, Basis(seed, chunk_key, ranking, blocks))

    def _select(self, num_reused: int, num_rows: int, basis: Basis) -> Rows:
        """`num_rows` sorted offsets, 0 < num_rows < num_reused."""
        raise NotImplementedError(f"{self.name} does not choose from one chunk before the forward")

    def shares_budget(self, options: Options) -> bool:
        """Whether the ratio is one budget for all reused chunks, so that `rows_of_all` chooses (`Stage.BEFORE`)."""
        return TOP_K in self.own_options and self.option(options, TOP_K.name) == "global"

    def rows_of_all(self, ratio: float, reused: AllReused) -> Rows:
        """The tokens of all reused chunks that are computed again: sorted offsets, counted through all chunks."""
        num_rows = num_rows_at(ratio, reused.num_tokens)
        if num_rows in (0, reused.num_tokens):
            return np.arange(num_rows, dtype=np.int64)
        return self._select_of_all(num_rows, reused)

    def _select_of_all(self, num_rows: int, reused: AllReused) -> Rows:
        """`num_rows` sorted offsets, 0 < num_rows < reused.num_tokens."""
        return self._select(reused.num_tokens, num_rows, Basis(reused.seed, b"", reused.ranking, reused.blocks))

    def layer_counts(self, num_tokens: int, ratio: float, num_layers: int, options: Options) -> tuple[int, ...]:
        """How many of `num_tokens` reused rows run at each layer (`Stage.LAYER` and `Stage.QUESTION`).

        Returns:
            `num_layers` numbers that never grow; each counts from its layer's attention on. All are `num_tokens` at
            ratio 1.
        """
        raise NotImplementedError(f"{self.name} chooses before the forward")

    def check_options(self, options: Mapping[str, object], path: str) -> Options:
        """The given parameters, checked and sorted; those left out keep their default.

        Raises:
            ChunkCacheRequestError: a name this method does not have, or a value outside its range.
        """
        return check_options(options, self.options_schema, path, f"method {self.name!r}")

    def option(self, options: Options, name: str) -> OptionValue:
        """One parameter of checked `options`, or its default."""
        given = dict(options)
        return given[name] if name in given else next(o.default for o in self.options_schema if o.name == name)

    def alpha_of(self, options: Options, ratio: float | None, default: float | None) -> float | None:
        """The alpha whose CFO is the budget of each chunk; None where the budget is the ratio.

        Args:
            ratio: the request's; where it names one, the server's alpha does not apply.
            default: the server's alpha.
        """
        if ALPHA not in self.own_options:
            return None
        given = dict(options).get(ALPHA.name)  # 0 means by ratio, whatever the server's alpha is
        if given is None:
            return (default if ratio is None else None) or None
        assert isinstance(given, float)
        return given or None

    def last_asked_layer(self, options: Options) -> int | None:
        """The layer at which an extra forward ends, which runs all rows and scores them by the question before the one
        that computes the kept rows; None = there is none."""
        return None

    def tokens_per_chunk(self, options: Options) -> int | None:
        """The budget of each chunk as a number of tokens, at most; None where it is a share."""
        return None

    def with_defaults(self, options: Mapping[str, ValueT], defaults: Options) -> dict[str, ValueT | OptionValue]:
        """A request's parameters, and those of `defaults` that the method has and the request leaves out."""
        if not defaults:
            return dict(options)
        schema = {option.name for option in self.options_schema}
        merged = {name: value for name, value in defaults if name in schema} | dict(options)
        if merged.get(GROUP_SIZE.name) == 0 and GROUP_THRESHOLD.name not in options:
            merged.pop(GROUP_THRESHOLD.name, None)  # the request turns windows off
        return merged

    def check_model(self, options: Options, num_layers: int, path: str) -> None:
        """Checks that a model of `num_layers` can be served with these options; `path` is where both stand.

        Raises:
            ChunkCacheRequestError: it cannot.
        """


def field_of(options: Options, name: str, path: str) -> str:
    """JSON path at which a client would change the option: its own if it was given, else that of the method."""
    return f"{path}.options.{name}" if name in dict(options) else f"{path}.method"


def need_layers(name: str, layer: int, num_layers: int, path: str) -> None:
    """Raises a `ChunkCacheRequestError` at `path` where a model has no layer of that number."""
    if layer >= num_layers:
        problem = f"{name} names layer {show(layer)}, but the model has layers 0 to {num_layers - 1}"
        raise request_error(path, problem, "name a layer of the model, or choose another method")


def num_rows_at(ratio: float, num_tokens: int) -> int:
    """ceil(ratio * num_tokens) without floating-point surprises: 0.07 of 100 is 7, not 8; above 0 at least one."""
    assert 0.0 <= ratio <= 1.0, f"ratio {ratio} outside [0, 1]"
    if ratio == 0.0 or num_tokens == 0:
        return 0
    exact = ratio * num_tokens
    nearest = round(exact)
    close = abs(exact - nearest) <= _INTEGER_TOLERANCE * max(1.0, exact)
    return min(num_tokens, max(1, nearest if close else math.ceil(exact)))
