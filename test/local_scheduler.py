"""LocalScheduler: SGLang's own scheduler and event loop in this process, with requests of token ids.

Verbs: `generate` (submit all, run to the end, return the replies), `run` (submit at chosen steps of the event loop,
abort, look at the scheduler after every step).

Nothing is mocked: the model, the KV pool, the radix tree, admission, the event loop (overlap or not) are SGLang's. Only
the two sockets are replaced, by a list of requests and a list of replies, which are encoded and decoded as there
(`SGLANG_USE_PICKLE_IPC`). A start costs the construction of the
scheduler, not the minute that a whole server takes, and a test can stand between two steps of the loop. One process
holds one scheduler at a time; tests start a child per configuration (`test/scheduler_child.py`).
"""

from __future__ import annotations

import json
import pickle
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch


@dataclass
class Request:
    """One request; `chunk_cache` is the object of `custom_params.chunk_cache`."""

    ids: Sequence[int]
    chunk_cache: dict[str, Any] | None = None
    max_new_tokens: int = 4
    logprobs: bool = True
    logprob_start: int = -1
    hidden_states: bool | str = False  # as `return_hidden_states`
    session: dict[str, Any] | None = None  # as `session_params`
    adapter: int | None = None  # of those that the server was started with
    extra_key: str | None = None
    cache_salt: str | None = None
    priority: int | None = None
    rid: str = ""
    ignore_eos: bool = True
    num_top: int = 5
    stop_ids: Sequence[int] = ()
    stream: bool = False
    mm_inputs: Any = None  # what SGLang's tokenizer process makes of images


@dataclass
class Reply:
    """What the server would answer."""

    rid: str
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    input_logprobs: list[float | None] = field(default_factory=list)
    hidden_states: list[Any] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    cached_tokens: int = 0
    cached_details: Any = None
    retractions: int = 0
    first_step_end: int | None = None
    """Tokens of the prompt behind the first step of chunked prefill; None where it was not cut."""
    num_verified: int = 0
    """Drafts that the model looked at, each of several tokens; 0 without speculative decoding."""
    finish: dict[str, Any] | None = None
    info: dict[str, Any] | None = None


class LocalScheduler:
    """See the head of this file.

    Args:
        model_path: Hugging Face folder.
        chunk_cache: None for stock SGLang without any hook; else values for `ChunkCacheArgs`.
        tp_rank, nccl_port: place among the processes of one tensor-parallel group.
        **flags: fields of `ServerArgs`. With `attn_dp_size` each rank has requests of its own; each `run` ends on all
            ranks at once, and who has no more of them calls `drain`.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        chunk_cache: dict[str, Any] | None,
        tp_rank: int = 0,
        nccl_port: int | None = None,
        **flags: Any,
    ) -> None:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.runtime_context import SpawnRanks, get_lora, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        flags = {"skip_tokenizer_init": True, "log_level": "warning", "random_seed": 1, **flags}
        server_args = ServerArgs(model_path=str(model_path), nccl_port=nccl_port, **flags)
        if chunk_cache is not None:
            from sglang_chunk_cache import plugin
            from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, set_args

            args = ChunkCacheArgs(**chunk_cache)
            plugin.enable(server_args, args)
            set_args(args)
        server_args.resolve_once()
        server_args.check_server_args()
        has_replicas = flags.get("attn_dp_size", 1) > 1
        dp_rank = tp_rank * flags["attn_dp_size"] // flags["tp_size"] if has_replicas else None
        # Of the ports that replicas have, nobody listens to that in the list.
        port_args = PortArgs.init_new(server_args, dp_rank, [9] * flags["attn_dp_size"] if has_replicas else None)
        publish(server_args, role="scheduler", ranks=SpawnRanks(world_rank=tp_rank, dp_rank=dp_rank, gpu_id=tp_rank))
        from sglang.srt.managers.scheduler import Scheduler  # ours where the chunk cache was enabled

        self.scheduler = Scheduler(server_args, port_args)
        self.scheduler.idle_sleeper = None  # it would wait for a socket
        self.cache = self.scheduler.tree_cache
        self.adapters = get_lora().lora_paths or []
        self._num_requests = 0
        self._replies: dict[str, Reply] = {}
        self._unfinished: set[str] = set()
        self.scheduler.ipc_channels.send_to_detokenizer.send_output = self._receive
        self.scheduler.ipc_channels.send_to_tokenizer.send_output = self._receive
        self.scheduler.ingest_requests = self._step
        self.scheduler._has_arrivals = self._has_arrivals
        self._arrived: list[Any] = []
        self._on_step: Callable[[int], Sequence[Any] | None] | None = None
        self._step_count = 0
        self._agreeing = self.scheduler.tp_cpu_group if has_replicas else None
        self._drains = self._all_drain = False

    def num_used_slots(self) -> int:
        """Of the KV pool, by requests and by what is cached."""
        allocator = self.scheduler.token_to_kv_pool_allocator
        return int(allocator.size - allocator.available_size())

    # Requests.

    def generate(self, requests: Sequence[Request]) -> list[Reply]:
        """Runs all requests, submitted together, and returns their replies in order."""
        batch = [self.prepare(request) for request in requests]
        batch += [self.answer(request) for request in requests if self.asks_selector(request)]
        return self.run(lambda step: batch if step == 0 else None)

    def prepare(self, request: Request) -> Any:
        """The message that SGLang's tokenizer process would send."""
        from sglang.srt.managers.io_struct import SessionParams, TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        params = None
        if request.chunk_cache is not None:
            from chunk_cache.options.request_options import dumps, parse_request

            options = parse_request(request.chunk_cache, num_tokens=len(request.ids))
            if request.session is not None:
                options = replace(options, turn_tokens=len(request.ids))
            params = {"chunk_cache": dumps(options)}
        sampling = SamplingParams(
            max_new_tokens=request.max_new_tokens,
            temperature=0.0,
            custom_params=params,
            ignore_eos=request.ignore_eos and not request.stop_ids,
            stop_token_ids=list(request.stop_ids) or None,
        )
        sampling.normalize(None)
        if not request.rid:
            request.rid = f"r{self._num_requests}"
            self._num_requests += 1
        return TokenizedGenerateReqInput(
            rid=request.rid,
            input_text=None,
            input_ids=array("q", request.ids),
            input_embeds=None,
            mm_inputs=request.mm_inputs,
            token_type_ids=None,
            sampling_params=sampling,
            return_logprob=request.logprobs,
            return_hidden_states=request.hidden_states,
            logprob_start_len=request.logprob_start,
            top_logprobs_num=request.num_top,
            token_ids_logprob=None,
            stream=request.stream,
            session_params=None if request.session is None else SessionParams(**request.session),
            lora_id=None if request.adapter is None else self.adapters[request.adapter].lora_id,
            extra_key=request.extra_key,
            cache_salt=request.cache_salt,
            priority=request.priority,
        )

    def asks_selector(self, request: Request) -> bool:
        """Whether SGLang's tokenizer process would ask the selector, so that the request may wait for an answer."""
        if request.chunk_cache is None:
            return False
        from chunk_cache.options.request_options import parse_request

        return self.cache.chunks.manager.awaits_scores(parse_request(request.chunk_cache))

    def answer(self, request: Request, reason: str | None = None) -> Any:
        """The message of that process, once the selector has answered: scores that follow from the ids, or a reason."""
        from chunk_cache.plan.selector_answer import SelectorAnswer
        from sglang_chunk_cache.host.selector import scores_message

        assert request.chunk_cache is not None
        scores = selector_scores(request.ids)
        rankings = tuple(scores[start:end] for start, end in request.chunk_cache["spans"])
        return scores_message(request.rid, SelectorAnswer(None if reason else rankings, reason, 0.0))

    def run(self, on_step: Callable[[int], Sequence[Any] | None], *, max_steps: int = 100_000) -> list[Reply]:
        """Runs the event loop until `on_step` has nothing more to submit and every request has finished.

        Args:
            on_step: called before every step with its number; returns messages to submit, `[]` to wait, or None when
                nothing more will come.
        """
        self._on_step, self._step_count, self._max_steps = on_step, 0, max_steps
        self._order: list[str] = []
        self._exhausted = False
        self.scheduler.gracefully_exit = False
        self._idle_steps = 0
        self.scheduler.run_event_loop()
        return [self._replies.pop(rid) for rid in self._order]

    def drain(self) -> None:
        """Takes part in what the other ranks still run; returns on all ranks at once."""
        self._drains = True
        while self._agreeing is not None and not self._all_drain:
            self.run(lambda _: None)

    def flush(self) -> bool:
        """`/flush_cache`."""
        return bool(self.scheduler.flush_cache())

    def abort(self, rid: str) -> Any:
        """The message of `/abort_request`."""
        from sglang.srt.managers.io_struct import AbortReq

        return AbortReq(rid=rid)

    # The two sockets.

    def _step(self, stop_at_pause: bool = False) -> list[Any]:
        cut = self.scheduler.chunked_req
        if cut is not None and cut.rid in self._replies and self._has_load(cut):
            reply = self._replies[cut.rid]
            reply.first_step_end = reply.first_step_end or cut.extend_end
        assert self._step_count < self._max_steps, f"still running after {self._max_steps} steps: {self._unfinished}"
        messages, self._arrived = self._arrived or self._next_messages(), []
        for message in messages:
            if hasattr(message, "sampling_params"):
                self._order.append(message.rid)
                self._unfinished.add(message.rid)
                self._replies[message.rid] = Reply(message.rid)
        self.scheduler.process_input_requests([_through_the_socket(message) for message in messages])
        # Some steps more let the loop process the last batch and run its idle checks.
        has_ended = self._exhausted and not self._unfinished
        if self._agree(has_ended and (self._idle_steps < 3 or self.scheduler.is_fully_idle())):
            self._idle_steps += 1
            self.scheduler.gracefully_exit = self._idle_steps > 3
        return list(messages)

    def _agree(self, has_ended: bool) -> bool:
        """Whether all ranks with requests of their own have ended."""
        if self._agreeing is None:
            return has_ended
        votes = torch.tensor([has_ended, self._drains], dtype=torch.int64)
        torch.distributed.all_reduce(votes, torch.distributed.ReduceOp.MIN, group=self._agreeing)
        all_ended, self._all_drain = map(bool, votes.tolist())
        return all_ended

    def _has_load(self, req: Any) -> bool:
        """Whether all that a request brings in is there."""
        if not hasattr(self.cache, "chunks"):
            return True
        from sglang_chunk_cache.request.chunk_request import state_of

        state = state_of(req)
        plan = None if state is None else state.admission.load_plan
        return plan is None or req.extend_end > plan.load_end

    def _next_messages(self) -> list[Any]:
        messages = None if self._exhausted else self._on_step(self._step_count)
        self._step_count += 1
        self._exhausted = messages is None
        return list(messages or [])

    def _has_arrivals(self) -> bool:
        """In the place of ours, which looks into the sockets: asks `on_step` between steps of a verification too."""
        self._arrived = self._arrived or self._next_messages()
        return bool(self._arrived)

    def _receive(self, output: Any, _request: Any = None) -> None:
        from sglang.srt.constants import HEALTH_CHECK_RID_PREFIX
        from sglang.srt.managers.io_struct import AbortReq, BatchTokenIDOutput, unwrap_from_pickle

        if isinstance(output, AbortReq):
            self._replies[output.rid].finish = {"type": "abort"}
            self._unfinished.discard(output.rid)
        if not isinstance(output, BatchTokenIDOutput):
            return
        output = _through_the_socket(output)
        infos = unwrap_from_pickle(output.customized_info) if output.customized_info is not None else {}
        for i, rid in enumerate(output.rids):
            if rid.startswith(HEALTH_CHECK_RID_PREFIX) and rid not in self._replies:
                continue  # as SGLang's tokenizer process does
            reply = self._replies[rid]
            reply.output_ids += list(output.output_ids[i])
            reply.cached_tokens = output.cached_tokens[i]
            if output.cached_tokens_details:
                reply.cached_details = output.cached_tokens_details[i]
            if output.retraction_counts:
                reply.retractions = output.retraction_counts[i]
            if output.spec_verify_ct:
                reply.num_verified = output.spec_verify_ct[i]
            if output.output_token_logprobs_val:
                reply.logprobs += list(output.output_token_logprobs_val[i])
                for values, indices in zip(
                    output.output_top_logprobs_val[i], output.output_top_logprobs_idx[i], strict=True
                ):
                    reply.top_logprobs.append(dict(zip(indices, values, strict=True)))
            if output.output_hidden_states and output.output_hidden_states[i]:
                reply.hidden_states = output.output_hidden_states[i]
            if output.input_token_logprobs_val and output.input_token_logprobs_val[i]:
                reply.input_logprobs = list(output.input_token_logprobs_val[i])
            values = (infos or {}).get("chunk_cache")
            if values and values[i]:
                reply.info = json.loads(values[i][0])
            if output.finished_reasons[i] is not None:
                reply.finish = output.finished_reasons[i]
                self._unfinished.discard(rid)


def selector_scores(ids: Sequence[int]) -> np.ndarray:
    """`[len(ids)]` what a selector might say of these tokens; it follows from ids and positions."""
    return np.sin(np.array(ids, dtype=np.float32) * 12.9898 + np.arange(len(ids)) * 0.618).astype(np.float32)


def _through_the_socket(message: Any) -> Any:
    """As the other process would receive it."""
    from sglang.srt.managers import io_struct

    if io_struct.envs.SGLANG_USE_PICKLE_IPC.get():
        return pickle.loads(pickle.dumps(message))
    return io_struct.msgpack_decode(io_struct.msgpack_encode(message))
