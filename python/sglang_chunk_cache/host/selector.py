"""Scores of the selector on their way from the process that tokenizes to the schedulers.

Verbs: `create_client` (starts the selector), `ask` (for a request that was just sent), `take_answer` (in a scheduler).

An answer follows its request through SGLang's own sockets, so all tensor-parallel ranks get the same answer in the same
step, without a vote. A scheduler in which the request does not wait drops the answer.

Promise: importing this module makes the message known to SGLang's decoder in this process.
"""

from __future__ import annotations

import atexit
import dataclasses
from functools import partial
from typing import Any

import numpy as np
from sglang.srt.managers.io_struct import BaseReq, hook_custom_types
from sglang.utils import TypeBasedDispatcher

from chunk_cache.keys import Partition
from chunk_cache.options.request_options import loads
from chunk_cache.plan.selector_answer import SelectorAnswer, asks_selector
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, refuse
from sglang_chunk_cache.host.disaggregation import waiting
from sglang_chunk_cache.request.chunk_request import PARAM_NAME, state_of
from sglang_chunk_cache.selector.selector_client import SELECTOR_METERS, SelectorClient, SelectorStartError
from sglang_chunk_cache.selector.selector_messages import SCORES
from sglang_chunk_cache.telemetry.meters import Meters


class ChunkCacheScores(BaseReq, kw_only=True):  # type: ignore[call-arg]  # a msgspec.Struct
    """A `SelectorAnswer` for the request `rid`; rankings as bytes."""

    rankings: list[bytes] | None
    reason: str | None
    seconds: float


hook_custom_types(ChunkCacheScores)


def scores_message(rid: str, answer: SelectorAnswer) -> ChunkCacheScores:
    """What is sent to the schedulers."""
    rankings = None if answer.rankings is None else [one.tobytes() for one in answer.rankings]
    return ChunkCacheScores(rid=rid, rankings=rankings, reason=answer.reason, seconds=answer.seconds)


def create_client(manager: Any, args: ChunkCacheArgs) -> SelectorClient | None:
    """Starts the selector of a server; None if it has none.

    Args:
        manager: the tokenizer manager, which sends the answers.

    Raises:
        StartRefused: the selector did not start.
    """
    if args.selector is None:
        return None
    server_args = manager.server_args
    client = SelectorClient(
        args.selector,
        args.parsed_config.selector,
        tokenizer=server_args.tokenizer_path or server_args.model_path,
        trust_remote_code=server_args.trust_remote_code,
        revision=server_args.revision,
        answer=lambda rid, answer: manager._dispatch_to_scheduler(scores_message(rid, answer)),
        metrics=Meters(SELECTOR_METERS, enabled=bool(manager.enable_metrics)),
    )
    try:
        client.start()
    except SelectorStartError as error:
        refuse(f"--chunk-cache-selector {args.selector}: {error}.")
    atexit.register(client.close)
    return client


def ask(client: SelectorClient, args: ChunkCacheArgs, request: Any) -> None:
    """Asks for the scores of a tokenized request, where its method wants some."""
    params = getattr(request.sampling_params, "custom_params", None)
    text = params.get(PARAM_NAME) if isinstance(params, dict) else None
    if text is None or request.input_ids is None:
        return
    opts = loads(text)
    fits = opts.turn_tokens is None and all(end <= len(request.input_ids) for _, end in opts.spans)
    if fits and asks_selector(opts, args.method, args.ratio):
        client.ask(request.rid, opts, request.input_ids, Partition(request.extra_key, request.cache_salt))


def add_selector_answers(scheduler: Any) -> None:
    """Lets a scheduler take answers; called once its dispatcher is there."""
    scheduler._request_dispatcher += TypeBasedDispatcher([(ChunkCacheScores, partial(take_answer, scheduler))])


def take_answer(scheduler: Any, message: ChunkCacheScores) -> None:
    """Gives an answer to the request that waits for it, if one still does."""
    reqs = [*waiting(scheduler), *scheduler.grammar_manager.grammar_queue]
    req = next((req for req in reqs if req.rid == message.rid), None)
    state = None if req is None else state_of(req)
    if state is not None:
        found = message.rankings
        rankings = None if found is None else tuple(np.frombuffer(one, dtype=SCORES) for one in found)
        answer = SelectorAnswer(rankings, message.reason, message.seconds)
        state.prompt = dataclasses.replace(state.prompt, answer=answer)
