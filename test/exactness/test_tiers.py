"""A disk tier below SGLang's own scheduler, pool and radix tree: what came from it, and what had to give way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exactness.runner import Config, run_cases
from exactness.tier_cases import CASES
from local_scheduler import Reply

pytestmark = pytest.mark.slow

PAGES = ["pages", "a_chunk_whose_last_page_is_not_stored", "prepared"]
STATES = ["states", "states_without_room"]
TOLERANCE = 1e-5


def outcomes(folder: Path, names: list[str], *, page_size: int, loading: str, **options: Any) -> dict[str, Any]:
    tiers = {"disk": {"path": str(folder)}, "loading": loading, "controller": False}
    config = Config(page_size=page_size, options=(("tiers", tiers), *options.items()))
    return run_cases(config, is_ours=True, names=names, module="exactness.tier_cases")


def checked(value: Any) -> Any:
    assert not isinstance(value, str), value
    return value


def same(reply: Reply, other: Reply) -> None:
    assert reply.output_ids == other.output_ids
    assert reply.logprobs == pytest.approx(other.logprobs, abs=TOLERANCE)


def tiers(reply: Reply) -> list[str | None]:
    assert reply.info is not None
    return [chunk.get("tier") for chunk in reply.info["chunks"]]


@pytest.fixture(scope="module", params=["prefetch", "layerwise"])
def paged(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcomes(tmp_path_factory.mktemp("paged"), PAGES, page_size=16, loading=request.param)


@pytest.mark.parametrize("ratio", ["0", "1"])
def test_chunks_that_end_within_a_page_come_from_disk_as_they_were(paged: dict[str, Any], ratio: str) -> None:
    found = checked(paged["pages"])
    pool, disk, again = found[ratio]
    assert [tiers(reply) for reply in (pool, disk, again)] == [["pool"] * 3, ["disk"] * 3, ["pool"] * 3]
    for reply in (disk, again):
        assert reply.info["reused_tokens"] == pool.info["reused_tokens"]
        same(reply, pool)
    if ratio == "1":
        same(disk, found["off"][0])
    else:
        assert disk.info["reused_tokens"] > 60


def test_what_the_pool_has_in_part_is_not_written_down(paged: dict[str, Any]) -> None:
    found = checked(paged["a_chunk_whose_last_page_is_not_stored"])
    assert found["pool"].info["chunks"][1]["status"] == "hit"
    assert found["num_files"] == 1, "the five tokens in front of it alone"
    assert found["disk"].info["chunks"][1]["status"] == "miss"


def test_a_prepared_chunk_comes_up_before_an_exact_one_and_replaces_another(paged: dict[str, Any]) -> None:
    found = checked(paged["prepared"])
    for reply in found["prepares"]:
        assert tiers(reply) == ["disk", "disk", None], "neighbours come up as they were computed alone"
        assert [chunk["generation"] for chunk in reply.info["chunks"]] == [0, 0, None]
    chunk = found["used"].info["chunks"][1]
    assert (chunk["tier"], chunk["generation"], chunk["kind"]) == ("disk", 1, "prepared")
    assert found["prepared"] == [False, True, False], "of two the newer one is left"
    assert found["entries"] == [(0, False), (1, True)]


def outcome_with_states(case: str, tp_size: int = 1, **tiers: Any) -> Any:
    options = (("seam_len", 8), ("tiers", {"controller": False, **tiers}))
    model = {"kind": "qwen3_5", "layers": 4, "tree_core": "python", "method": "seams"}
    config = Config(tp_size=tp_size, chunked=True, options=options, **model)
    return checked(run_cases(config, is_ours=True, names=[case], module="exactness.tier_cases")[case])


@pytest.mark.parametrize("tp_size", [1, pytest.param(2, marks=pytest.mark.all)])
def test_what_a_chunk_does_to_states_comes_from_disk_with_it(tmp_path: Path, tp_size: int) -> None:
    found = outcome_with_states("states", tp_size, disk={"path": str(tmp_path)})
    for ratio, one in found.items():
        pool, disk, again, off = one["replies"]
        assert one["num_files"] == 3 * tp_size, "what is no longer than its seam is not written"
        assert [tiers(reply) for reply in (pool, disk, again)] == [["pool"] * 3, ["disk"] * 3, ["pool"] * 3]
        for reply in (disk, again):
            assert reply.info["recomputed_tokens"] == pool.info["recomputed_tokens"]
            same(reply, pool)
        if ratio == "1":
            same(disk, off)
        else:
            assert disk.info["reused_tokens"] - disk.info["recomputed_tokens"] > 30


def test_what_a_chunk_does_to_states_comes_back_although_its_kv_is_in_the_pool() -> None:
    found = outcome_with_states("states_without_room", host_bytes="1MB", write="evict")
    pool, host = found["replies"]
    assert [tiers(reply) for reply in (pool, host)] == [["pool"], ["host"]]
    same(host, pool)


@pytest.fixture(scope="module")
def layerwise(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    names = [name for name in CASES if name not in (*PAGES, *STATES)]
    return outcomes(tmp_path_factory.mktemp("layerwise"), names, page_size=1, loading="layerwise")


@pytest.mark.parametrize(
    ("case", "num_open"),
    [
        ("room_is_needed_for_the_load_itself", [2, 0]),
        ("room_is_needed_between_admission_and_forward", [1, 0]),
    ],
)
def test_what_gave_way_is_computed(layerwise: dict[str, Any], case: str, num_open: list[int]) -> None:
    found = checked(layerwise[case])
    assert found["num_open"] == num_open, "the case is not what it should be"
    reply, off = found["replies"]
    assert reply.info["fallback_reason"] == "memory"
    assert reply.info["reused_tokens"] == 0
    same(reply, off)


def test_without_host_memory_nothing_goes_down_or_comes_up(layerwise: dict[str, Any]) -> None:
    found = checked(layerwise["host_memory_is_used_up"])
    assert found["written"] == [0, 1]
    reply, off = found["replies"]
    assert reply.info["chunks"][1]["reason"] == "tier_full"
    same(reply, off)


def test_the_forward_is_judged_by_the_rows_that_it_computes(layerwise: dict[str, Any]) -> None:
    """All of what comes up, half of the chunk in the pool, the question; the system prompt is an exact prefix."""
    assert checked(layerwise["rows_beside_a_load"]) == [100 + 60 + 9]


def test_a_better_variant_on_disk_is_used_although_the_pool_has_another(layerwise: dict[str, Any]) -> None:
    from_disk, again, off = checked(layerwise["a_better_variant_below"])
    assert [tiers(reply)[-2:] for reply in (from_disk, again)] == [["disk", "disk"], ["pool", "pool"]]
    same(from_disk, off)
    same(again, off)


def test_an_update_that_loaded_nothing_leaves_the_tiers_on(layerwise: dict[str, Any]) -> None:
    found = checked(layerwise["weights_that_were_not_changed"])
    assert found["success"] == [False, False, False]
    assert found["disabled"] is None
    assert tiers(found["reply"])[1] == "disk"


def test_nothing_of_other_weights_is_used_or_written(layerwise: dict[str, Any]) -> None:
    found = checked(layerwise["weights"])
    reply, off = found["replies"]
    assert off.output_ids != found["old"].output_ids or off.logprobs != pytest.approx(found["old"].logprobs, abs=1e-2)
    assert "weights" in found["disabled"]
    assert tiers(reply) == [None] * 3
    assert [chunk["status"] for chunk in reply.info["chunks"]] == ["miss"] * 3
    same(reply, off)
    assert found["written"] == 0


def test_a_stricter_server_reads_nothing_that_one_without_its_rule_has_written(tmp_path: Path) -> None:
    """Its clients could prepare passages behind texts of their own."""
    name, found = "what_another_server_stored", []
    for options in ({}, {"system_prompts": "same"}, {"system_prompts": "same"}):
        (reply,) = checked(outcomes(tmp_path, [name], page_size=1, loading="prefetch", **options)[name])
        found.append(reply.info["chunks"][0]["status"])
    assert found == ["miss", "miss", "hit"]


def test_chunks_of_an_adapter_come_from_disk_for_that_adapter(tmp_path: Path) -> None:
    tiers = {"disk": {"path": str(tmp_path)}, "controller": False}
    config = Config(num_adapters=2, options=(("tiers", tiers),))
    replies = checked(run_cases(config, is_ours=True, names=["adapters"], module="exactness.tier_cases")["adapters"])
    assert [reply.info["chunks"][0]["status"] for reply in replies] == ["hit", "miss"]
