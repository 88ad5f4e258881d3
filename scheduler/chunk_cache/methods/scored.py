"""Methods that score tokens during the forward; this file says only where, and how many rows stay.

The scores themselves are made by `sglang_chunk_cache.forward.selection` (`scorer.scorer_of`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import ClassVar

from chunk_cache.errors import request_error
from chunk_cache.methods.base import TOP_K, Method, Stage, field_of, need_layers, num_rows_at
from chunk_cache.methods.method_options import (
    DRIFT,
    MAX_LAYER,
    ChoiceOption,
    FloatOption,
    IntOption,
    LayersOption,
    Option,
    Options,
    layers_of,
)

CHECK_LAYER = IntOption("check_layer", default=1, minimum=0, maximum=MAX_LAYER)
"""The layer at which all rows are scored; the layers before it run on all rows, its own attention on those kept."""

LAYERS = LayersOption("layers")
"""Layers at which the question's attention is summed up."""
FIRST_RATIO = FloatOption("first_ratio", default=1.3, minimum=0.0, maximum=100.0)
"""Share of rows behind the check layer, in units of the ratio."""
LAST_RATIO = FloatOption("last_ratio", default=0.94, minimum=0.01, maximum=100.0)
"""Share of rows at the last layers, in units of the ratio."""
FILTER_SHARE = FloatOption("filter_share", default=1 / 3, minimum=0.0, maximum=1.0)
"""Share of the layers over which rows leave."""
DEVIATION = ChoiceOption("deviation", ("kv", "v"))
"""What of a token is compared: K and V, or V alone."""


class LayerMethod(Method):
    """Scores all rows at `check_layer` and keeps the best ceil(ratio n) from then on."""

    stage = Stage.LAYER
    own_options: ClassVar[tuple[Option, ...]] = (CHECK_LAYER, TOP_K)

    def __init__(self, name: str) -> None:
        self.name = name

    def layer_counts(self, num_tokens: int, ratio: float, num_layers: int, options: Options) -> tuple[int, ...]:
        check_layer = self.check_layer(options)
        return (num_tokens,) * check_layer + (num_rows_at(ratio, num_tokens),) * (num_layers - check_layer)

    def check_layer(self, options: Options) -> int:
        """See `CHECK_LAYER`."""
        value = self.option(options, CHECK_LAYER.name)
        assert isinstance(value, int)
        return value

    def check_model(self, options: Options, num_layers: int, path: str) -> None:
        need_layers(self.name, self.check_layer(options), num_layers, field_of(options, CHECK_LAYER.name, path))


class A3(LayerMethod):
    """A3, "Attention Recovery" (equation 3): the rows that the question attends to most at `check_layer`.

    That layer attends to true K and V of all tokens (equation 4), which stay.
    """

    reads_question = True

    def last_asked_layer(self, options: Options) -> int | None:
        return self.check_layer(options)


class QuestionMethod(Method):
    """Runs the question over the reused cache, scores at `layers`, then computes the best ceil(ratio n) rows.

    FusionRAG (section 3.2) is this with the question's attention as the score.
    """

    stage = Stage.QUESTION
    reads_question = True
    own_options: ClassVar[tuple[Option, ...]] = (LAYERS, TOP_K)

    def __init__(self, name: str) -> None:
        self.name = name

    def layer_counts(self, num_tokens: int, ratio: float, num_layers: int, options: Options) -> tuple[int, ...]:
        return (num_rows_at(ratio, num_tokens),) * num_layers

    def scored_layers(self, options: Options, num_layers: int) -> tuple[int, ...]:
        """The layers whose attention is scored while the question asks."""
        return layers_of(self.option(options, "layers"), num_layers)

    def check_model(self, options: Options, num_layers: int, path: str) -> None:
        need_layers(
            self.name, max(self.scored_layers(options, num_layers)), num_layers, field_of(options, "layers", path)
        )


class InfoFlow(QuestionMethod):
    """InfoFlow KV (arXiv 2603.05353): the tokens with the largest norm of the question's attention.

    The attention is taken at their positions in the prompt, which that paper calls the right geometry. The paper also
    reorders the chunks; here their order is the client's.
    """


class QuestionDrift(QuestionMethod):
    """Computes what the question attends to at any layer (ProphetKV), and adds half of the change to the rest (drift).

    Half, because all of it harms some answers. docs/quality.md has the experiments.
    """

    own_options = (replace(LAYERS, default="all"), TOP_K, replace(DRIFT, default=0.5))


class CacheBlend(LayerMethod):
    """CacheBlend section 4.3: the rows whose K and V (or V alone: `deviation`) deviate most, filtered gradually.

    The share of rows falls linearly from `first_ratio` r to `last_ratio` r over the first `filter_share` of the
    layers, then stays; shares are clipped to 1 and scaled so that the mean from the check layer on is r.
    """

    own_options = (
        CHECK_LAYER,
        TOP_K,
        DEVIATION,
        FIRST_RATIO,
        LAST_RATIO,
        FILTER_SHARE,
    )

    def check_options(self, options: Mapping[str, object], path: str) -> Options:
        checked = super().check_options(options, path)
        first, last, _ = self._schedule(checked)
        if first < last:
            problem = f"{first:g} is smaller than last_ratio {last:g}, but rows that left do not come back"
            raise request_error(f"{path}.first_ratio", problem, "give at least last_ratio")
        return checked

    def layer_counts(self, num_tokens: int, ratio: float, num_layers: int, options: Options) -> tuple[int, ...]:
        check_layer = self.check_layer(options)
        ratios = gradual_ratios(ratio, num_layers, check_layer, *self._schedule(options))
        return (num_tokens,) * check_layer + tuple(num_rows_at(one, num_tokens) for one in ratios)

    def _schedule(self, options: Options) -> tuple[float, float, float]:
        values = [self.option(options, name) for name in ("first_ratio", "last_ratio", "filter_share")]
        first, last, share = (value for value in values if isinstance(value, float))
        return first, last, share


@lru_cache(maxsize=1024)
def gradual_ratios(
    ratio: float, num_layers: int, check_layer: int, first: float, last: float, share: float
) -> tuple[float, ...]:
    """The share of rows at each layer from `check_layer` on: never growing, at most 1, with mean `ratio`."""
    num = num_layers - check_layer
    if ratio == 0.0:
        return (0.0,) * num
    num_filtering = min(num, max(1, round(share * num_layers)))
    step = (last - first) / (num_filtering - 1) if num_filtering > 1 else 0.0
    weights = [max(last, first + i * step) if i < num_filtering else last for i in range(num)]
    # Bisection finds the scale at which the clipped shares have the wanted mean, which grows with the scale.
    low, high = 0.0, 1.0 / min(weights)
    for _ in range(80):
        middle = (low + high) / 2
        if sum(min(1.0, middle * weight) for weight in weights) < ratio * num:
            low = middle
        else:
            high = middle
    return tuple(min(1.0, high * weight) for weight in weights)
