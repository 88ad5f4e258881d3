"""What layers with states compute of a batch: gaps between the rows of each request, and chunks to remember.

Verb: `state_forward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from chunk_cache.index.transition_store import TransitionStore
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from sglang_chunk_cache.forward.added_rows import AddedRows
from sglang_chunk_cache.forward.state_forward import StateForward
from sglang_chunk_cache.forward.state_rounds import Gap, RequestRows, Wanted
from sglang_chunk_cache.forward.statistics_taker import computed_ranges
from sglang_chunk_cache.kv.state_layers import StateLayers
from sglang_chunk_cache.kv.transition import Transition
from sglang_chunk_cache.request.chunk_request import state_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

IsStored = Callable[[ChunkPrompt, int], bool]


def state_forward(
    layers: StateLayers,
    store: TransitionStore[Transition],
    is_stored: IsStored,
    batch: ScheduleBatch,
    added: Sequence[AddedRows],
    positions: Sequence[npt.NDArray[np.int64]],
) -> StateForward | None:
    """What layers with states compute of a batch; None if it is SGLang's own and nothing is taken.

    Args:
        store: of transitions.
        is_stored: whether the whole of a prompt's chunk is stored.
        added, positions: of each request, the rows that are added, and the positions of all its rows.
    """
    wanted_of = partial(_wanted, layers, store, is_stored)
    pool_rows, requests, num_wanted = batch.req_pool_indices_cpu.tolist(), [], 0
    for i, (req, one) in enumerate(zip(batch.reqs, added, strict=True)):
        own = positions[i]
        # SGLang may go on with a prompt by no token, if requests that decode in the same step fill it.
        wanted = wanted_of(req, int(own[0]), int(own[-1]) + 1, num_wanted) if len(own) else []
        num_wanted += len(wanted)
        begin = batch.prefix_lens[i] if one.begin is None else one.begin
        requests.append(RequestRows(pool_rows[i], own, begin, _gaps(one), wanted))
    is_fused = any(one.load is not None for one in added)
    return StateForward.of(layers, requests, batch.device, is_fused=is_fused)


def _gaps(one: AddedRows) -> list[Gap]:
    if one.load is None:
        return []
    found = ((chunk.dst_end, one.load.transitions.get(chunk.variant_id)) for chunk in one.load.plan.chunks)
    return [Gap(end, transition) for end, transition in found if transition is not None]


def _wanted(
    layers: StateLayers,
    store: TransitionStore[Transition],
    is_stored: IsStored,
    req: Any,
    begin: int,
    end: int,
    num_wanted: int,
) -> list[Wanted]:
    """Chunks to remember that this forward computes, from their first token or from where they are known on.

    Args:
        num_wanted: how many the requests in front have.
    """
    state = state_of(req)
    if state is None:
        return []
    found: list[Wanted] = []
    for chunk, first, last in computed_ranges(state, begin, end):
        start, _ = state.options.spans[chunk]
        known = state.transitions = state.transitions or store.of_request()
        if first != start and known.reaches(chunk) != first:
            continue
        is_new = state.prompt.to_prepare is not None or not is_stored(state.prompt, chunk)
        if is_new and store.may_take((1 + num_wanted + len(found)) * layers.layout.num_bytes):
            found.append(Wanted(chunk, first, last, start + layers.layout.seam_len, known))
    return found
