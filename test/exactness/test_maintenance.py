"""What the store does by itself: popular variants are promoted, made exact while idle, and outlive what is not used."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from exactness.maintenance_cases import CASES
from exactness.numpy_decoder import Decoder, Forward
from exactness.runner import Config, run_cases
from exactness.selection_reference import Store
from sglang_chunk_cache.host.refresh import is_refresh

pytestmark = pytest.mark.slow

EVERYTHING = (("eviction", "frequency-reuse"), ("promote_uses", 2), ("refresh_uses", 2))
BY_FREQUENCY = (("eviction", "frequency-reuse"), ("promote_uses", 2))
BY_RECENCY = (("promote_uses", 2), ("refresh_uses", 2))
NOTHING = (("promote_uses", 0),)
CONTEXTS = (("remember", "contexts"), ("refresh_uses", 0))
APART = (("system_prompts", "same"),)
TRUSTING = (("trust", "warmed"),)


@cache
def outcomes(config: Config, names: tuple[str, ...]) -> dict[str, Any]:
    return run_cases(config, is_ours=True, names=list(names), module="exactness.maintenance_cases")


def outcome(case: str, options: tuple[tuple[str, Any], ...], **fields: Any) -> Any:
    """Of one case; all cases of a configuration are run at once, but of those that one case is about."""
    names = (case,) if options in (CONTEXTS, APART, TRUSTING) else tuple(CASES)
    value = outcomes(Config(max_total_tokens=2048, options=options, **fields), names)[case]
    assert not isinstance(value, str), value
    return value


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (EVERYTHING, {}),
        (BY_FREQUENCY, {"page_size": 16}),
        pytest.param(BY_RECENCY, {"tp_size": 2}, marks=pytest.mark.all),
    ],
)
def test_a_popular_variant_is_promoted_and_its_path_goes(options: Any, fields: dict[str, Any]) -> None:
    found = outcome("promotion", options, **fields)
    assert found["homes"] == [False, False, True, True]
    first, *others = found["replies"]
    for reply in others:
        assert reply.info["chunks"][1]["status"] == "hit"
        assert reply.info["chunks"][1]["variant"] == found["variant"]
        assert reply.output_ids == first.output_ids
        assert reply.logprobs == pytest.approx(first.logprobs, abs=1e-5)
    assert sum(found["left_of_path"]) == 0


def test_without_promotion_the_path_stays_as_long_as_the_variant_is_used() -> None:
    found = outcome("promotion", NOTHING)
    assert found["homes"] == [False] * 4
    assert found["left_of_path"] == [60, 60, 60]


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (EVERYTHING, {}),
        (BY_FREQUENCY, {"page_size": 16}),
        pytest.param(BY_RECENCY, {"tp_size": 2}, marks=pytest.mark.all),
    ],
)
def test_what_is_evicted_everywhere_leaves_no_bytes(options: Any, fields: dict[str, Any]) -> None:
    found = outcome("forgotten", options, **fields)
    before, after = found["traces"]
    num_rows, num_variants = found["num"]
    assert (before >= num_rows, after) == (True, 0)
    assert found["left"] == [0, 0]
    result = found["result"]
    assert result["behind"]["variants"] + result["evicted"][found["key"]]["variants"] == num_variants
    assert result["in_use_tokens"] == 0
    assert [chunk["status"] for chunk in found["again"].info["chunks"]] == ["miss", "miss"]


def test_nothing_is_erased_in_memory_that_is_given_away() -> None:
    """On a GPU a write there ends the server."""
    found = outcome("memory_that_is_given_away", NOTHING)
    assert found["result"]["emptied_tokens"] == found["result"]["in_use_tokens"] == 0
    assert not found["is_written"]
    assert found["again"].info["chunks"][0]["status"] == "miss"


@pytest.mark.parametrize(("options", "tp_size"), [(EVERYTHING, 1), pytest.param(BY_RECENCY, 2, marks=pytest.mark.all)])
def test_a_popular_derived_variant_is_computed_exactly_while_idle(options: Any, tp_size: int) -> None:
    found = outcome("refresh", options, tp_size=tp_size)
    assert found["generations"] == [1]
    assert found["after"] == [(0, found["context"])]
    chunk = found["hit"].info["chunks"][1]
    assert (chunk["status"], chunk["generation"]) == ("hit", 0)


@pytest.mark.parametrize(
    ("options", "fields"),
    [
        (EVERYTHING, {}),
        pytest.param(NOTHING, {"page_size": 16}, marks=pytest.mark.all),
        pytest.param(NOTHING, {"tp_size": 2}, marks=pytest.mark.all),
    ],
)
def test_a_chunk_is_prepared_behind_its_neighbours(options: Any, fields: dict[str, Any]) -> None:
    found = outcome("prepared", options, **fields)
    assert found["place"] == (20 + 40 + 33, 1, True, True)
    assert [chunk["reason"] for chunk in found["prepare"].info["chunks"]][2] == "preparing"
    assert found["added by the same"] == 0
    assert found["after uses"] == [(1, True)], "it is not refreshed"
    assert found["contexts"] == [True], "the one behind other neighbours goes"
    for reply in found["replies"]:
        assert (reply.info["chunks"][1]["generation"], reply.info["chunks"][1]["kind"]) == (1, "prepared")
    assert found["with an exact one"].info["chunks"][1]["kind"] == "prepared", "the exact one was computed alone"
    assert found["exact prefix"] <= 0, "only what was computed exactly is in the exact cache"


def test_prepared_kv_is_that_behind_the_exact_kv_of_the_neighbours() -> None:
    """Equation 10 of FusionRAG in numpy: KV of [system, neighbour] each, K turned to its place, then the chunk."""
    found = outcome("prepared", NOTHING, layers=4)
    system, *neighbours, chunk = found["ids"]
    store = Store(Decoder(Config(layers=4).model_dir))
    ids = [*system, *(token for neighbour in neighbours for token in neighbour), *chunk]
    k, v = store.empty(len(ids))
    place = len(system)
    for neighbour in neighbours:
        alone = store.full([*system, *neighbour])
        k[:, : len(system)], v[:, : len(system)] = alone.k[:, : len(system)], alone.v[:, : len(system)]
        own = slice(place, place + len(neighbour))
        shift = np.full(len(neighbour), place - len(system))
        for layer in range(store.model.num_layers):
            k[layer, own] = store.model.rotate(alone.k[layer, len(system) :], shift)
        v[:, own] = alone.v[:, len(system) :]
        place += len(neighbour)
    forward = Forward(store.model, ids, k, v, range(place, len(ids)))
    for _ in range(store.model.num_layers):
        forward.attend()
    for mine, theirs in zip(found["kv"], (k, v), strict=True):
        assert np.abs(mine - theirs[:, place:]).max() < 1e-4
    full = store.full(ids)
    assert np.abs(full.k[1:, place:] - k[1:, place:]).max() > 1e-3, "and it is not that of a full prefill"


def test_a_refresh_that_waits_keeps_nobody_from_flushing() -> None:
    found = outcome("flush_before_a_refresh", EVERYTHING)
    assert [is_refresh(rid) for rid in found["waiting"]] == [True]
    assert (found["flushed"], found["left"]) == (True, 0)


def test_nothing_is_refreshed_unless_asked_for() -> None:
    found = outcome("refresh", NOTHING)
    assert [generation for generation, _ in found["after"]] == [1]


def test_eviction_by_frequency_keeps_what_is_reused() -> None:
    assert outcome("frequency", EVERYTHING) == ["miss", "hit"]
    assert outcome("frequency", NOTHING) == ["miss", "miss"]


def test_a_crowd_of_requests_leaves_reused_chunks_their_room() -> None:
    assert outcome("crowd", (*BY_FREQUENCY, ("keep_share", 0.25))) == ["miss", "hit"]
    assert outcome("crowd", (*BY_FREQUENCY, ("keep_share", 0.0))) == ["miss", "miss"]


def test_sources_that_are_evicted_in_the_step_that_reads_them_were_read_before() -> None:
    found = outcome("sources_that_go", (*NOTHING, ("keep_share", 0.0)))
    (read, _), (_, written), *_ = found["copies together"]
    assert read & written, "slots that the first has read from are given to the second"
    assert not any(source & target for source, target in found["copies together"]), "no copy reads what it writes"
    for together, alone in zip(found["together"], found["alone"], strict=True):
        assert together.info["chunks"][1]["status"] == "hit"
        assert together.output_ids == alone.output_ids
        assert together.logprobs == pytest.approx(alone.logprobs, abs=1e-5)


@pytest.mark.parametrize(("options", "page_size"), [(CONTEXTS, 1), (CONTEXTS, 16), (EVERYTHING, 1)])
def test_what_was_fixed_for_a_context_is_remembered_there(options: Any, page_size: int) -> None:
    found = outcome("contexts", options, page_size=page_size)
    first, second, unfixed = (reply.info["chunks"] for reply in found["replies"])
    remembers = options is CONTEXTS
    assert [chunk["status"] for chunk in first] == ["miss", "hit", "hit"]
    assert [chunk["generation"] for chunk in second[1:]] == ([1, 1] if remembers else [0, 0])
    assert [chunk["cfo"] == 0.0 for chunk in second[1:]] == [remembers] * 2
    assert [chunk["cfo"] > 0.0 for chunk in first[1:]] == [True] * 2
    assert found["variants"] == ([[(0, 0), (1, 1)], [(0, 0), (1, 2)]] if remembers else [[(0, 0)]] * 2)
    assert all(found["have statistics"]), "those of what was fixed"
    assert unfixed[1]["status"] == "hit"


def test_another_system_prompt_costs_what_the_chunk_gave_to_what_differs() -> None:
    end, other, own, behind = (reply.info["chunks"] for reply in outcome("other_system", EVERYTHING))
    assert 0.0 < end[0]["other_system"] < other[0]["other_system"] <= 1.0
    assert end[0]["cfo"] == end[0]["other_system"], "it was computed behind no chunk, and none is in front of it"
    assert own[0]["other_system"] == end[0]["other_system"], "three tokens more are another last piece"
    assert "other_system" not in behind[1]
    assert behind[1]["cfo"] == 1.0, "what was computed alone is worth least"


def test_a_strangers_passage_reaches_another_request_unless_the_server_trusts_the_warmed_only() -> None:
    met, beside_alone, warmed, _ = (reply.info["chunks"][-1] for reply in outcome("trust", EVERYTHING))
    assert [(chunk["status"], chunk["kind"]) for chunk in (met, beside_alone)] == [("hit", "met")] * 2
    assert (warmed["status"], warmed["kind"]) == ("hit", "prepared"), "it is preferred anyway"
    met, alone, *warmed = (reply.info["chunks"][-1] for reply in outcome("trust", TRUSTING))
    assert (met["status"], met["reason"]) == ("miss", "untrusted")
    assert (alone["status"], alone["kind"]) == ("hit", "alone")
    assert [(chunk["status"], chunk["kind"]) for chunk in warmed] == [("hit", "prepared")] * 2


def test_a_private_turn_between_passages_is_context_and_can_be_kept_apart() -> None:
    _, shared, _, other, _ = (reply.info["chunks"][-1] for reply in outcome("conversation", EVERYTHING))
    assert [(chunk["status"], chunk["kind"]) for chunk in (shared, other)] == [("hit", "met")] * 2
    assert min(shared["cfo"], other["cfo"]) > 0, "what it owes to the turn is charged"
    _, shared, _, other, last = (reply.info["chunks"] for reply in outcome("conversation", APART))
    assert [chunks[-1]["reason"] for chunks in (shared, other)] == ["other_system"] * 2
    assert [chunk["status"] for chunk in last[1:]] == ["hit", "hit"], "the same blanks are nobody's"


def test_system_prompts_can_be_kept_apart() -> None:
    replies = [reply.info["chunks"] for reply in outcome("other_system", APART)]
    assert [chunks[0]["status"] for chunks in replies[:3]] == ["miss"] * 3
    assert [chunks[0]["reason"] for chunks in replies[:3]] == ["other_system"] * 3
    assert replies[3][1]["status"] == "hit"


def test_all_ranks_answer_administration_alike() -> None:
    assert set(outcome("administration", APART, tp_size=2).values()) == {True}
