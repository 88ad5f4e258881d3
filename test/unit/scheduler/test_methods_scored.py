"""Methods that choose during the forward: the shared suite, and how many rows each keeps at which layer."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS, Stage, num_rows_at
from chunk_cache.methods.method_options import layers_of
from chunk_cache.methods.scored import LayerMethod, QuestionMethod, gradual_ratios
from unit.scheduler.method_suite import LENS, RATIOS, MethodSuite, models, shared


class TestA3(MethodSuite):
    method = METHODS["a3"]

    @shared
    @given(model=models(METHODS["a3"]), num=LENS, ratio=RATIOS)
    def test_one_budget_from_the_check_layer_on(self, model: Any, num: int, ratio: float) -> None:
        options, num_layers = model
        check_layer = dict(options).get("check_layer", 1)
        kept = num_rows_at(ratio, num)
        counts = self.method.layer_counts(num, ratio, num_layers, options)
        assert counts == tuple(num if layer < check_layer else kept for layer in range(num_layers))

    def test_as_in_the_paper_by_default(self) -> None:
        assert self.method.stage is Stage.LAYER
        assert self.method.layer_counts(100, 0.15, 4, ()) == (100, 15, 15, 15)
        assert self.method.layer_counts(100, 0.15, 4, (("check_layer", 0),)) == (15, 15, 15, 15)


class TestFusionRAG(MethodSuite):
    method = METHODS["fusionrag"]

    @shared
    @given(model=models(METHODS["fusionrag"]), num=LENS, ratio=RATIOS)
    def test_one_budget_at_every_layer(self, model: Any, num: int, ratio: float) -> None:
        options, num_layers = model
        counts = self.method.layer_counts(num, ratio, num_layers, options)
        assert counts == (num_rows_at(ratio, num),) * num_layers

    def test_as_in_the_paper_by_default(self) -> None:
        assert self.method.stage is Stage.QUESTION
        assert self.scored((), 12) == (11,)

    def test_scored_layers(self) -> None:
        assert self.scored((("layers", "last"),), 3) == (2,)
        assert self.scored((("layers", "all"),), 3) == (0, 1, 2)
        assert self.scored((("layers", (0, 2)),), 3) == (0, 2)

    def scored(self, options: Any, num_layers: int) -> tuple[int, ...]:
        assert isinstance(self.method, QuestionMethod)
        return self.method.scored_layers(options, num_layers)


class TestCacheBlend(MethodSuite):
    method = METHODS["cacheblend"]

    def test_as_decided_by_default(self) -> None:
        """Linear from 1.3 r to 0.94 r over the first third of the layers, the mean over all but the first is r."""
        assert self.method.stage is Stage.LAYER
        counts = self.method.layer_counts(10_000, 0.15, 32, ())
        assert counts[0] == 10_000
        shares = [count / 10_000 / 0.15 for count in counts[1:]]
        assert sum(shares) / len(shares) == pytest.approx(1, abs=1e-3)
        assert shares[0] / shares[-1] == pytest.approx(1.3 / 0.94, rel=1e-3)
        num_filtering = round(32 / 3)
        assert shares[num_filtering - 1 :] == [shares[-1]] * (31 - num_filtering + 1)
        steps = [a - b for a, b in itertools.pairwise(shares[:num_filtering])]
        assert min(steps) == pytest.approx(max(steps), abs=2e-3)
        assert min(steps) > 0

    def test_twelve_layers_as_documented(self) -> None:
        assert self.method.layer_counts(1000, 0.15, 12, ()) == (1000, 194, 177, 159, *[141] * 8)

    def test_constant_where_first_and_last_are_equal(self) -> None:
        options = self.method.check_options({"first_ratio": 1.0, "last_ratio": 1}, "p")
        assert self.method.layer_counts(200, 0.1, 5, options) == (200, 20, 20, 20, 20)

    def test_in_a_model_of_one_layer_or_at_its_last_one_the_ratio_is_r(self) -> None:
        assert self.method.layer_counts(200, 0.1, 2, ()) == (200, 20)
        assert self.method.layer_counts(200, 0.1, 1, (("check_layer", 0),)) == (20,)
        assert self.method.layer_counts(200, 0.1, 9, (("check_layer", 8),)) == (200,) * 8 + (20,)

    def test_two_filtering_layers_by_hand(self) -> None:
        options = self.method.check_options({"first_ratio": 3, "last_ratio": 1, "filter_share": 0.5}, "p")
        # weights 3, 1, 1 with the mean 5/3: shares of r = 0.1 are 0.18, 0.06, 0.06
        assert self.method.layer_counts(1000, 0.1, 4, options) == (1000, 180, 60, 60)

    def test_shares_that_would_exceed_one_are_clipped_and_the_rest_grows(self) -> None:
        options = self.method.check_options({"first_ratio": 3, "last_ratio": 1, "filter_share": 0.5}, "p")
        # 3 layers at mean 0.8: the first is clipped to 1, the two others take (2.4 - 1) / 2
        assert self.method.layer_counts(1000, 0.8, 4, options) == (1000, 1000, 700, 700)

    @given(
        ratio=RATIOS,
        num_layers=st.integers(1, 80),
        check_share=st.floats(0, 1),
        first=st.floats(0.01, 100),
        fall=st.floats(0, 1),
        share=RATIOS,
    )
    def test_gradual_ratios(
        self, ratio: float, num_layers: int, check_share: float, first: float, fall: float, share: float
    ) -> None:
        check_layer = min(num_layers - 1, int(check_share * num_layers))
        last = max(0.01, first * fall)
        ratios = gradual_ratios(ratio, num_layers, check_layer, first, last, share)
        assert len(ratios) == num_layers - check_layer
        assert all(0 <= r <= 1 for r in ratios)
        assert all(a >= b for a, b in itertools.pairwise(ratios))
        assert math.fsum(ratios) / len(ratios) == pytest.approx(ratio, abs=1e-9)

    @pytest.mark.parametrize(
        "options", [{"first_ratio": 0.9}, {"first_ratio": 1, "last_ratio": 2}, {"last_ratio": 1.5}, {"first_ratio": 0}]
    )
    def test_shares_may_not_grow(self, options: dict[str, object]) -> None:
        with pytest.raises(ChunkCacheRequestError, match=r"^p\.first_ratio: .* is smaller than last_ratio .*; give at"):
            self.method.check_options(options, "p")


LAYERWISE = [name for name, method in METHODS.items() if isinstance(method, LayerMethod)]


@pytest.mark.parametrize("name", LAYERWISE)
@pytest.mark.parametrize(("options", "fewest"), [({}, 2), ({"check_layer": 0}, 1), ({"check_layer": 31}, 32)])
def test_check_layer_must_be_in_the_model(name: str, options: dict[str, object], fewest: int) -> None:
    method = METHODS[name]
    checked = method.check_options(options, "p")
    method.check_model(checked, fewest, "p")
    if fewest > 1:
        with pytest.raises(ChunkCacheRequestError) as caught:
            method.check_model(checked, fewest - 1, "p")
        field = "p.options.check_layer" if options else "p.method"
        assert str(caught.value) == (
            f"{field}: {name} names layer {fewest - 1}, but the model has layers 0 to {fewest - 2}; "
            "name a layer of the model, or choose another method"
        )


@pytest.mark.parametrize(("layers", "fewest"), [("last", 1), ("all", 1), ([0], 1), ([3, 7], 8)])
def test_scored_layers_must_be_in_the_model(layers: object, fewest: int) -> None:
    method = METHODS["fusionrag"]
    checked = method.check_options({"layers": layers}, "p")
    method.check_model(checked, fewest, "p")
    if fewest > 1:
        with pytest.raises(ChunkCacheRequestError, match=r"^p\.options\.layers: fusionrag names layer 7, but"):
            method.check_model(checked, fewest - 1, "p")


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.stage is Stage.BEFORE])
def test_methods_that_choose_before_the_forward_serve_any_model(name: str) -> None:
    METHODS[name].check_model((), 1, "p")


def test_layers_of() -> None:
    assert [layers_of(value, 4) for value in ("last", "all", (1, 3))] == [(3,), (0, 1, 2, 3), (1, 3)]


class TestInfoFlow(MethodSuite):
    method = METHODS["infoflow"]

    def test_the_last_layer_by_default(self) -> None:
        assert self.method.stage is Stage.QUESTION
        assert self.method.scored_layers((), 4) == (3,)


class TestQuestionDrift(MethodSuite):
    method = METHODS["question-drift"]

    def test_all_layers_and_half_of_the_drift_by_default(self) -> None:
        assert self.method.stage is Stage.QUESTION
        assert self.method.scored_layers((), 4) == (0, 1, 2, 3)
        assert self.method.option((), "drift") == 0.5
        assert METHODS["fusionrag"].option((), "drift") == 0
