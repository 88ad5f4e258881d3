"""No request ends a server because another one took what it needs."""

from __future__ import annotations

from typing import Any

import pytest

from exactness.runner import Config, run_cases

pytestmark = pytest.mark.slow


def run(name: str, **config: Any) -> Any:
    found = run_cases(Config(**config), is_ours=True, names=[name], module="exactness.room_cases")[name]
    assert not isinstance(found, str), found
    return found


@pytest.mark.parametrize(("method", "room"), [("near", 1090), ("fusionrag", 1024)])
def test_later_steps_of_a_request_have_their_memory(method: str, room: int) -> None:
    replies = run(f"beside_steps_{method}", chunked=True, max_total_tokens=room)
    assert [len(reply.output_ids) for reply in replies] == [4, 8]


def test_a_pin_leaves_a_prompt_in_steps_its_memory() -> None:
    found = run("pin_between_steps", chunked=True, max_total_tokens=1024)
    assert len(found["reply"].output_ids) == 4
    assert found["refused"][0]


def test_beams_beside_a_packed_request() -> None:
    replies = run("beam_beside_packed")
    assert [reply.finish["length"] for reply in replies] == [30, 6]
    assert replies[0].info["kept_tokens"] == 120


@pytest.mark.parametrize("num_in_front", [0, 80])
def test_requests_that_decode_cut_no_question_off(num_in_front: int) -> None:
    server = (("enable_mixed_chunk", True), ("max_prefill_tokens", 4096))
    replies = run(f"question_beside_decoding {num_in_front}", chunked=True, server=server)
    assert {reply.info["method"] for reply in replies} == {"fusionrag"}
    alone, beside = ([chunk["recomputed_positions"] for chunk in reply.info["chunks"]] for reply in replies)
    assert beside == alone
