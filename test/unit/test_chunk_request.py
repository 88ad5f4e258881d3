"""One request in the scheduler process: what a retraction leaves of it, and what a draft is told of its rows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from chunk_cache.options.kept_tokens import KeptTokens
from chunk_cache.options.request_options import RequestOptions, dumps
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.prompt.discover import Discoverer
from sglang_chunk_cache.forward.added_rows import AddedRows
from sglang_chunk_cache.forward.forward import Forward, Part, TargetForwards, announce, announced
from sglang_chunk_cache.kv.pool import Load
from sglang_chunk_cache.request.chunk_request import (
    PARAM_NAME,
    Admission,
    ChunkRequest,
    discover,
    leave_images_exact,
    state_of,
)


def admitted() -> tuple[ChunkRequest, Any]:
    plan: Any = SimpleNamespace(load_len=3)
    request = ChunkRequest(ChunkPrompt(RequestOptions(spans=((0, 3),)), (b"",)))
    request.admission.propose(plan)
    request.admission.bring_in(Load(plan, torch.arange(3), ()))
    request.report(plan)
    return request, plan


def test_a_load_is_taken_once_and_the_prompt_stays_fused() -> None:
    request, plan = admitted()
    load = request.admission.take_load()
    assert load is not None
    assert load.plan is plan
    assert request.admission.take_load() is None
    assert request.admission.fused_plan is plan


def test_a_retraction_leaves_what_outlives_the_kv() -> None:
    request, plan = admitted()
    request.packing.plan(KeptTokens(0, 3, 1))
    request.packing.choose(torch.zeros(1, 1, 1, dtype=torch.int64))
    request.restart()
    assert request.admission == Admission()
    assert (request.packing.kept, request.packing.chosen, request.sums) == (None, None, None)
    assert request.reported is not None
    assert request.reported.plan is plan


def test_a_reply_speaks_of_the_plan_without_the_load_that_failed() -> None:
    request, _ = admitted()
    without: Any = SimpleNamespace(load_len=0)
    request.fail_load(without)
    assert request.reported is not None
    assert request.reported.plan is request.admission.fused_plan is without
    assert request.admission.load_plan is None


def test_nothing_that_was_announced_outlives_its_forward() -> None:
    batch: Any = SimpleNamespace()
    forward = Forward((Part(batch, attention=SimpleNamespace()),))  # type: ignore[arg-type]
    assert announce(forward) is batch
    assert announced(batch) is forward
    assert vars(batch) == {}, "or the batch would hold itself"


def test_a_draft_is_told_the_rows_of_the_same_batch_once() -> None:
    forwards, added = TargetForwards(), (AddedRows(np.arange(2)),)
    batch: Any
    other: Any
    batch, other = object(), object()
    forward = Forward((Part(SimpleNamespace()),), added)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="not just computed"):
        forwards.take(batch)
    forwards.note(batch, forward)
    assert forwards.take(batch) is added
    with pytest.raises(RuntimeError, match="not just computed"):
        forwards.take(batch)
    forwards.note(batch, forward)
    with pytest.raises(RuntimeError, match="not just computed"):
        forwards.take(other)


def req_of(
    ids: list[int], options: RequestOptions | None, rid: str = "r", session: Any = None, images: Any = None
) -> Any:
    return SimpleNamespace(
        rid=rid,
        session=session,
        sampling_params=SimpleNamespace(custom_params=None if options is None else {PARAM_NAME: dumps(options)}),
        origin_input_ids=ids,
        origin_input_ids_unpadded=ids,
        extra_key=None,
        cache_salt=None,
        input_embeds=None,
        positional_embed_overrides=None,
        multimodal_inputs=images,
        beam_group=None,
        return_routed_experts=False,
    )


def turn(session: Any, rid: str, ids: list[int], options: RequestOptions, parent: str | None = None) -> ChunkRequest:
    req = req_of(ids, options, rid, session)
    session.req_nodes[rid] = SimpleNamespace(parent=session.req_nodes.get(parent), req=req)
    state = state_of(req)
    assert state is not None
    return state


def test_where_nothing_is_reused_beside_images_only_texts_are_reused() -> None:
    image = SimpleNamespace(is_image=lambda: True, offsets=[(2, 5)])
    images = SimpleNamespace(mm_items=[image], mrope_positions=torch.arange(10).repeat(3, 1), vision_position_ids=None)
    options = RequestOptions(spans=((6, 9),))
    for inputs in (images, None):
        req = req_of([*range(10)], options, images=inputs)
        state = state_of(req)
        assert state is not None
        assert (state.prompt.unsupported, state.may_await_scores) == (False, True)
        leave_images_exact(req)
        assert (state.prompt.unsupported, state.may_await_scores) == (inputs is images, inputs is None)


def test_a_prompt_is_searched_once_whoever_asked_for_its_state_before() -> None:
    discoverer, passage = Discoverer(), [*range(100, 300)]
    for i in range(3):
        req = req_of([i, *passage, 50 + i], None)
        assert state_of(req) is None
        for _ in range(2):  # the second time it comes back from retraction
            discover(req, discoverer)
        state = state_of(req)
        assert (state is not None and bool(state.prompt.keys)) is (i > 0)
    assert discoverer.counters.num_prompts == 3


@pytest.mark.parametrize(
    ("mode", "known"),
    [("auto", (1, 1)), ("exact", (1, 1)), ("warm", (0, 1)), ("prepare", (0, 1)), ("off", (0, 0))],
)
def test_what_is_warmed_is_found_without_marks(mode: str, known: tuple[int, int]) -> None:
    discoverer, filler, passage = Discoverer(), [*range(1000, 1200)], [*range(100, 300)]
    options = RequestOptions(mode=mode, spans=((1, 201), (201, 401)))
    discover(req_of([1, *filler, *passage, 2], options), discoverer)
    for text, is_known in zip((filler, passage), known, strict=True):
        asked = req_of([7, *text, 8], None)
        discover(asked, discoverer)
        assert (state_of(asked) is not None) == bool(is_known)


def test_a_chunk_keeps_its_name_in_later_turns() -> None:
    session = SimpleNamespace(req_nodes={})
    first = RequestOptions(spans=((1, 3), (3, 5)), chunk_ids=("a", None))
    assert turn(session, "1", [*range(8)], first).options == first
    second = RequestOptions(spans=((1, 4),), chunk_ids=("c",), turn_tokens=6)
    told = turn(session, "2", [*range(14)], second, parent="1").options
    assert (told.spans, told.chunk_ids) == (((1, 3), (3, 5), (9, 12)), ("a", None, "c"))
    unnamed = RequestOptions(spans=((0, 2),), turn_tokens=4)
    told = turn(session, "3", [*range(14), 1, 2, 3, 4], unnamed, parent="2").options
    assert told.chunk_ids == ("a", None, "c", None)
