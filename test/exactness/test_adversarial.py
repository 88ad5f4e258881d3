"""Prompts, queues and evictions that once stopped the scheduler or lost a chunk for ever."""

from __future__ import annotations

from typing import Any

import pytest

from exactness.adversarial import PolicyConfig
from exactness.runner import Config, run_cases


def outcome(config: Config, case: str, *, is_ours: bool = True) -> Any:
    result = run_cases(config, is_ours=is_ours, names=[case], module="exactness.adversarial")[case]
    assert not isinstance(result, str), result
    return result


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_refused_prompt_does_not_stop_the_scheduler(page_size: int) -> None:
    refused, served = outcome(Config(page_size=page_size), "prompt_replaced_by_the_scheduler")
    assert refused.finish["type"] == "abort"
    assert served.finish["type"] == "length"


@pytest.mark.slow
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_refused_turn_of_a_session_does_not_stop_the_scheduler(page_size: int) -> None:
    found = outcome(Config(page_size=page_size), "session_turns_refused")
    served = found.pop("served")
    assert {name: reply.finish["type"] for name, reply in found.items()} == dict.fromkeys(found, "abort")
    assert served.finish["type"] == "length"
    assert [chunk["status"] for chunk in served.info["chunks"]] == ["prefix", "prefix", "hit"]


@pytest.mark.slow
def test_a_turn_that_is_cut_is_computed_exactly() -> None:
    config = Config(server=(("allow_auto_truncate", True),))
    found = outcome(config, "session_turns_refused")["long"]
    assert found.finish["type"] == "length"
    assert (found.info["fallback_reason"], found.info["chunks"]) == ("unsupported", [])


@pytest.mark.slow
def test_chunks_of_a_session_are_limited() -> None:
    assert outcome(Config(), "session_of_many_chunks") == [[20, 30], [30, 20, 30], [30, 20, 30]]


@pytest.mark.slow
@pytest.mark.parametrize("step_len", [64, 96])
def test_others_do_not_cut_a_question_off(step_len: int) -> None:
    found = outcome(Config(layers=4, chunked=True, step_len=step_len), "question_beside_others")
    for method, (alone, crowded, methods) in found.items():
        assert any(alone)
        assert methods == [method, method]
        assert crowded == alone, method


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy", ["lpm", *(pytest.param(other, marks=pytest.mark.all) for other in ("dfs-weight", "hrrn"))]
)
def test_retracted_requests_under_cache_aware_policies(policy: str) -> None:
    config = PolicyConfig(policy=policy, max_total_tokens=2048, conservativeness=0.3, force_retract=True)
    ours = outcome(config, "retracted_behind_its_own_text")
    stock = outcome(config, "retracted_behind_its_own_text", is_ours=False)
    assert any(reply.retractions for reply in ours)
    for mine, theirs in zip(ours, stock, strict=True):
        assert mine.output_ids == theirs.output_ids
        assert mine.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)


@pytest.mark.slow
def test_a_chunk_inside_the_last_page_is_remembered() -> None:
    assert "miss" not in outcome(Config(page_size=16), "chunk_inside_the_last_page")


@pytest.mark.slow
def test_a_partly_evicted_chunk_is_remembered_again() -> None:
    assert outcome(Config(), "partly_evicted_path")[-1] == 100


@pytest.mark.slow
@pytest.mark.parametrize("eviction", ["lru", "frequency-reuse"])
def test_kv_of_another_prompt_that_begins_alike_is_no_hit(eviction: str) -> None:
    found = outcome(Config(options=(("eviction", eviction),)), "another_prompt_that_begins_alike")
    assert found == [[0, 0], [40, 40], [25, 0], [25, 40]]


QUOTA = (("partition_share", 0.5),)


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        {"tree_core": "python"},
        {"page_size": 16, "chunked": True},
        {"options": (*QUOTA, ("eviction", "frequency-reuse"))},
        pytest.param({"tp_size": 2}, marks=pytest.mark.all),
    ],
    ids=str,
)
def test_a_tenant_that_floods_makes_room_out_of_its_own(fields: dict[str, Any]) -> None:
    config = Config(**{"max_total_tokens": 1024, "options": QUOTA, **fields})
    found = outcome(config, "noisy_tenant")
    assert found["exact"] > 100
    assert found["statuses"] == ["hit", "hit"]
    assert 0 < found["held"]["quiet"] < found["held"]["noisy"]
    assert found["given_way"] > 1024


@pytest.mark.slow
def test_without_a_quota_a_tenant_that_floods_evicts_all_others() -> None:
    found = outcome(Config(max_total_tokens=1024), "noisy_tenant")
    assert (found["exact"], found["statuses"]) == (0, ["miss", "miss"])
    assert (found["held"], found["given_way"]) == ({"quiet": 0, "noisy": 0}, 0)
