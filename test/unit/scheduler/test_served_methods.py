"""Whether a server can do what a method needs; each refusal names where the method stood."""

from __future__ import annotations

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS, STATE_METHODS
from chunk_cache.options.config import Config, parse_config
from chunk_cache.options.request_options import MODES, PREPARING, RequestOptions
from chunk_cache.plan.served_methods import check_method, check_preparing, check_rows, check_states, defaults_problem

NUM_LAYERS = 12


@pytest.mark.parametrize("method", METHODS)
def test_every_method_is_served_where_nothing_is_forbidden(method: str) -> None:
    check_method(method, {}, NUM_LAYERS, Config(statistics_layers="all"), None, "p")
    assert defaults_problem({method: "--flag"}, NUM_LAYERS, Config(statistics_layers="all"), None) is None


def test_a_method_that_ranks_by_statistics_needs_some() -> None:
    config = Config(statistics_layers=())
    with pytest.raises(
        ChunkCacheRequestError, match=r"^p.method: 'cache-craft' ranks by statistics, which this server"
    ):
        check_method("cache-craft", {}, NUM_LAYERS, config, None, "p")
    assert str(defaults_problem({"cache-craft": "--flag"}, NUM_LAYERS, config, None)).startswith("--flag: ")


def test_a_method_that_chooses_between_layers_needs_rows_that_may_leave() -> None:
    check_method("epic", {}, NUM_LAYERS, Config(), "is fixed", "p")
    for method, given in (("cacheblend", {}), ("epic", {"drift": 0.5})):
        with pytest.raises(ChunkCacheRequestError, match=r"^p.method: .* works between layers, which is fixed; choose"):
            check_method(method, given, NUM_LAYERS, Config(), "is fixed", "p")


def test_options_that_forbid_a_default_method_are_named_in_its_place() -> None:
    config = parse_config({"options": {"focus_window": 3}})
    assert str(defaults_problem({"epic": "--flag"}, NUM_LAYERS, config, "is fixed")).startswith(
        "--chunk-cache-config: options: "
    )
    config = parse_config({"options": {"layers": [0, 5], "check_layer": 1}})
    assert defaults_problem({}, 6, config, None) is None
    assert "fusionrag names layer 5" in str(defaults_problem({}, 5, config, None))


@pytest.mark.parametrize(
    ("method", "ratio", "most", "is_served"),
    [
        ("cacheblend", None, 29, False),
        ("cacheblend", None, 30, True),
        ("cacheblend", None, None, True),
        ("cacheblend", 1.0, 29, True),
        ("epic", None, 29, True),
        (None, None, 29, True),
    ],
)
def test_a_method_that_begins_with_all_rows_needs_room_for_them(
    method: str | None, ratio: float | None, most: int | None, is_served: bool
) -> None:
    opts = RequestOptions(spans=((0, 10), (20, 40)), method=method, ratio=ratio)
    if is_served:
        check_rows(opts, 0.15, most, "p")
    else:
        with pytest.raises(ChunkCacheRequestError, match=r"^p.method: .* all 30 tokens .* has room for 29; "):
            check_rows(opts, 0.15, most, "p")


@pytest.mark.parametrize(("key", "value"), [("trust", "warmed"), ("system_prompts", "same")])
def test_clients_store_nothing_for_others_where_these_are_not_trusted(key: str, value: str) -> None:
    config = parse_config({key: value})
    for mode in MODES:
        check_preparing(RequestOptions(mode=mode), Config(), "p")
        if mode not in PREPARING:
            check_preparing(RequestOptions(mode=mode), config, "p")
            continue
        with pytest.raises(
            ChunkCacheRequestError, match=rf"^p.mode: '{mode}' would store it .* against {key} {value}; "
        ):
            check_preparing(RequestOptions(mode=mode), config, "p")


def test_models_with_states_are_served_by_methods_of_whole_pieces() -> None:
    for method in (None, *STATE_METHODS):
        check_states(RequestOptions(method=method), "p")
    with pytest.raises(ChunkCacheRequestError, match=r"^p.method: 'epic' computes single tokens within passages"):
        check_states(RequestOptions(method="epic"), "p")
    with pytest.raises(ChunkCacheRequestError, match=r"^p.options: "):
        check_states(RequestOptions(options=(("drift", 0.5),)), "p")
