"""MethodSuite: what every method promises. The test of a new method inherits it and names the method.

    class TestMine(MethodSuite):
        method = METHODS["mine"]

Everything here is drawn from the method's own schema of options, so a new option is tested without a word.
"""

from __future__ import annotations

import itertools
import json
import math
from array import array
from functools import cache, partial
from typing import ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.index.chunk_statistics import STATISTICS
from chunk_cache.index.lookup import Lookup
from chunk_cache.index.variant import NodeHome, Variant
from chunk_cache.methods import METHODS, Method, Options, Stage, num_rows_at
from chunk_cache.methods.method_options import ChoiceOption, FloatOption, IntOption, LayersOption, Option
from chunk_cache.methods.scored import LayerMethod
from chunk_cache.options.request_options import RequestOptions, dumps, loads, parse_request
from chunk_cache.plan.planning import PlanSettings, make_plan
from chunk_cache.plan.recompute_plan import RecomputePlan

RATIOS = st.floats(0, 1)
LENS = st.integers(0, 600)
KEYS = st.binary(min_size=16, max_size=16)
SEEDS = st.integers(0, 2**63 - 1)
MOST_LAYERS = 80

# Several classes run the same test function, which Hypothesis takes for a mistake; the classes hold no state.
shared = settings(suppress_health_check=[HealthCheck.differing_executors], max_examples=50)


def values_of(option: Option) -> st.SearchStrategy[object]:
    """Legal values of one option, as a client sends them; integers stay small, for models of few layers."""
    if isinstance(option, IntOption):
        return st.integers(option.minimum, min(option.maximum, 12)) | st.just(option.default)
    if isinstance(option, FloatOption):
        return st.floats(option.minimum, option.maximum) | st.sampled_from((option.minimum, option.maximum))
    if isinstance(option, ChoiceOption):
        return st.sampled_from(option.choices)
    assert isinstance(option, LayersOption), f"unknown kind of option {option}"
    return st.sampled_from(("last", "all")) | st.sets(st.integers(0, 12), min_size=1).map(sorted)


def accepts(method: Method, given_object: dict[str, object]) -> bool:
    """Whether these options fit together."""
    try:
        method.check_options(given_object, "p")
    except ChunkCacheRequestError:
        return False
    return True


def fits(method: Method, options: Options, num_layers: int) -> bool:
    """Whether a model of so many layers can be served."""
    try:
        method.check_model(options, num_layers, "p")
    except ChunkCacheRequestError:
        return False
    return True


@cache
def given_options(method: Method) -> st.SearchStrategy[dict[str, object]]:
    """Option objects that the method accepts."""
    each = {option.name: values_of(option) for option in method.options_schema}
    return st.fixed_dictionaries({}, optional=each).filter(partial(accepts, method))


@cache
def models(method: Method) -> st.SearchStrategy[tuple[Options, int]]:
    """Checked options, and the number of layers of a model that can be served with them."""

    def of_options(given_object: dict[str, object]) -> st.SearchStrategy[tuple[Options, int]]:
        options = method.check_options(given_object, "p")
        fewest = next(n for n in range(1, MOST_LAYERS) if fits(method, options, n))
        return st.tuples(st.just(options), st.just(fewest) | st.integers(fewest, MOST_LAYERS))

    return given_options(method).flatmap(of_options)


class MethodSuite:
    """Inherit it, set `method`."""

    method: ClassVar[Method]

    # What it is.

    def test_it_is_registered_and_says_what_it_does(self) -> None:
        assert METHODS[self.method.name] is self.method
        assert type(self.method).__doc__
        assert self.method.statistic is None or self.method.statistic in STATISTICS
        assert self.method.statistic is None or self.method.stage is Stage.BEFORE

    def test_the_ratio_of_the_request_wins_or_neither_counts(self) -> None:
        given_ratio, default = self.method.effective_ratio(0.3, 0.15), self.method.effective_ratio(None, 0.15)
        assert (given_ratio, default) in {(0.3, 0.15), (0.0, 0.0), (1.0, 1.0)}

    # Its options.

    def test_defaults_are_legal(self) -> None:
        names = [option.name for option in self.method.options_schema]
        assert len(set(names)) == len(names)
        assert self.method.check_options({}, "p") == ()
        for option in self.method.options_schema:
            assert option.check(option.default, "p") == option.default
            assert self.method.option((), option.name) == option.default
        assert any(fits(self.method, (), num_layers) for num_layers in range(1, 5)), "small models need options"

    @shared
    @given(st.data())
    def test_options_come_through_a_request(self, data: st.DataObject) -> None:
        value = data.draw(given_options(self.method))
        opts = parse_request({"method": self.method.name, "options": value})
        assert opts.options == self.method.check_options(value, "p")
        assert loads(dumps(opts)) == opts
        assert hash(loads(dumps(opts))) == hash(opts)
        assert [name for name, _ in opts.options] == sorted(value)
        for name, item in value.items():
            assert self.method.option(opts.options, name) == (tuple(item) if isinstance(item, list) else item)

    def test_unknown_option_is_refused(self) -> None:
        with pytest.raises(ChunkCacheRequestError) as caught:
            self.method.check_options({"no_such": 1}, "p")
        known = ", ".join(option.name for option in self.method.options_schema)
        assert str(caught.value) == f"p: unknown key 'no_such' for method {self.method.name!r}; known keys: {known}"

    # What it chooses before the forward.

    @shared
    @given(offset=LENS, num=LENS, ratio=RATIOS, seed=SEEDS, key=KEYS)
    def test_rows_of_a_chunk(self, offset: int, num: int, ratio: float, seed: int, key: bytes) -> None:
        used = self.method.effective_ratio(ratio, 0.5)
        num_rows = num_rows_at(used, num)
        if type(self.method)._select is Method._select and num_rows not in (0, num):
            with pytest.raises(NotImplementedError, match="does not choose from one chunk before"):
                self.method.rows_for_chunk(offset, num, used, seed=seed, chunk_key=key)
            return
        rows = self.method.rows_for_chunk(offset, num, used, seed=seed, chunk_key=key)
        assert rows.dtype == np.int64
        assert rows.shape == (num_rows,)
        assert np.all(np.diff(rows) > 0)
        assert len(rows) == 0 or (rows[0] >= 0 and rows[-1] < num)
        again = self.method.rows_for_chunk(offset, num, used, seed=seed, chunk_key=bytes(bytearray(key)))
        np.testing.assert_array_equal(rows, again)

    def test_ratio_one_is_every_row_and_ratio_zero_none(self) -> None:
        np.testing.assert_array_equal(self.method.rows_for_chunk(0, 7, 1.0), np.arange(7))
        assert len(self.method.rows_for_chunk(0, 7, 0.0)) == 0

    # How many rows run at each layer.

    @shared
    @given(data=st.data(), num=LENS, ratio=RATIOS)
    def test_layer_counts(self, data: st.DataObject, num: int, ratio: float) -> None:
        if self.method.stage is Stage.BEFORE:
            with pytest.raises(NotImplementedError, match="chooses before the forward"):
                self.method.layer_counts(num, ratio, 8, ())
            return
        options, num_layers = data.draw(models(self.method))
        counts = self.method.layer_counts(num, ratio, num_layers, options)
        first = self.method.check_layer(options) if isinstance(self.method, LayerMethod) else 0
        assert len(counts) == num_layers
        assert all(type(count) is int for count in counts)
        assert set(counts[:first]) <= {num}, "rows left before they were scored"
        assert all(a >= b for a, b in itertools.pairwise(counts)), "rows that left came back"
        assert all(0 <= count <= num for count in counts)
        assert all((count > 0) == (ratio > 0 and num > 0) for count in counts[first:])
        mean = sum(counts[first:]) / (num_layers - first)
        # A budget is rounded up at each layer, so the mean is off by less than one row.
        assert -1e-6 <= mean - ratio * num < 1 + 1e-6

    @shared
    @given(data=st.data(), num=LENS)
    def test_layer_counts_at_ratio_one_are_all_rows(self, data: st.DataObject, num: int) -> None:
        if self.method.stage is not Stage.BEFORE:
            options, num_layers = data.draw(models(self.method))
            assert self.method.layer_counts(num, 1.0, num_layers, options) == (num,) * num_layers

    @shared
    @given(data=st.data(), num=LENS, low=RATIOS, high=RATIOS)
    def test_a_larger_ratio_keeps_no_fewer_rows(self, data: st.DataObject, num: int, low: float, high: float) -> None:
        if self.method.stage is not Stage.BEFORE:
            options, num_layers = data.draw(models(self.method))
            few, many = (self.method.layer_counts(num, r, num_layers, options) for r in sorted((low, high)))
            assert all(a <= b for a, b in zip(few, many, strict=True))

    # What a plan makes of it.

    @shared
    @given(data=st.data(), ratio=RATIOS | st.sampled_from((0.0, 1.0)))
    def test_plan(self, data: st.DataObject, ratio: float) -> None:
        options = self.method.check_options(data.draw(given_options(self.method)), "p")
        plan = self.plan(options, ratio)
        reply = plan.reply(explain=True)
        assert json.loads(json.dumps(reply)) == reply
        assert (plan.method, plan.num_reused, plan.num_late_rows > 0) == (
            self.method.name,
            64,
            self.method.stage is Stage.QUESTION and plan.selection is not None,
        )
        assert plan.num_recomputed <= math.ceil(plan.ratio * 64) + 1  # rounded up in each of the two chunks
        if plan.ratio == 1.0:
            assert plan.row_positions.tolist() == list(range(4, 68))
        if plan.ratio == 0.0:
            assert plan.row_positions.tolist() == []
        if plan.ratio in (0.0, 1.0):
            assert (plan.selection, plan.num_late_rows, plan.num_recomputed) == (None, 0, int(64 * plan.ratio))
        assert plan == self.plan(options, ratio)

    def plan(self, options: Options, ratio: float) -> RecomputePlan:
        """The plan of a prompt of 4 exact tokens, two chunks of 32 that are both found, and a question of 12."""
        lookups: list[Lookup | None] = []
        for i in range(2):
            home = NodeHome(array("q", range(32)), "chunk")
            lookups.append(Lookup(Variant(i, bytes([i]) * 16, 32, 9, 0, (), 0, home), 32, None))
        return make_plan(
            RequestOptions(
                spans=((4, 36), (36, 68)), method=self.method.name, ratio=ratio, options=options, explain=True
            ),
            PlanSettings(default_method="full", default_ratio=0.5, page_size=4),
            prompt_len=80,
            prefix_len=4,
            max_prefix_len=79,
            lookups=lookups,
            chunk_keys=[b"a" * 16, b"b" * 16],
        )
