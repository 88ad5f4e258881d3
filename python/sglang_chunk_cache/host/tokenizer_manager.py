"""ChunkTokenizerManager: where every request enters, and every reply leaves, the process that tokenizes.

All routes and `Engine.generate` call `generate_request`, which checks a request and tokenizes marked text. On the way
back the scheduler's reply, one JSON string in `customized_info`, becomes one object in `meta_info`, and stays in every
later output of a stream. The class also owns the administration of the server (`admin`), and asks the selector.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from sglang.srt.managers.communicator import FanOutCommunicator
from sglang.srt.managers.io_struct import GenerateReqInput, TokenizedGenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager, print_exception_wrapper
from sglang.srt.runtime_context import get_parallel
from sglang.utils import TypeBasedDispatcher

from chunk_cache.options.request_options import dumps, loads
from chunk_cache.prompt.chunk_cache_fields import KEY
from sglang_chunk_cache.admin.administration import Admin
from sglang_chunk_cache.admin.scheduler_side import ChunkCacheAdminReply
from sglang_chunk_cache.api.exchange import Exchange
from sglang_chunk_cache.api.image_marks import placed_beside_images
from sglang_chunk_cache.api.prepare import may_get_reply, note_own, prepare
from sglang_chunk_cache.flags.server_args import attached, set_args
from sglang_chunk_cache.host.disaggregation import own_fields
from sglang_chunk_cache.host.selector import ask, create_client
from sglang_chunk_cache.selector.selector_client import SelectorClient

_REPLY = "chunk_cache_reply"


class ChunkTokenizerManager(TokenizerManager):
    chunk_cache_admin: Admin
    chunk_cache_selector: SelectorClient | None = None
    _is_selector_watched = False

    def init_communicators(self) -> None:
        super().init_communicators()
        args = attached(self.server_args)
        set_args(args)  # in a tokenizer worker (--tokenizer-worker-num) nothing else sets them
        if args is not None:
            self.chunk_cache_selector = create_client(self, args)
        num_replicas = get_parallel().num_dp_ranks
        communicator = FanOutCommunicator(self._dispatch_to_scheduler, num_replicas)
        self._result_dispatcher += TypeBasedDispatcher([(ChunkCacheAdminReply, communicator.handle_recv)])
        self.chunk_cache_admin = Admin(self, communicator, num_replicas)

    def generate_request(self, obj: Any, request: Any = None) -> AsyncIterator[Any]:
        """A bad request is refused by this call itself, before the first output is asked for."""
        args = attached(self.server_args)
        if args is not None and isinstance(obj, GenerateReqInput):
            prepare(obj, self, args)
        outputs = super().generate_request(obj, request)
        is_noted = request is not None and may_get_reply(obj, args)
        return Exchange.of(request).noting(outputs) if is_noted else outputs

    def _create_tokenized_object(self, obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Moves the spans of chunks to where they stand once the image processor has put in the tokens of images."""
        tokenized = super()._create_tokenized_object(obj, *args, **kwargs)
        params, mm_inputs = tokenized.sampling_params.custom_params, tokenized.mm_inputs
        asked = params.get(KEY) if isinstance(params, dict) else None
        if mm_inputs is not None and obj.input_ids is not None and asked is not None:
            path = f"sampling_params.custom_params.{KEY}"
            opts = placed_beside_images(loads(asked), obj.input_ids, tokenized.input_ids, mm_inputs, path)
            tokenized.sampling_params.custom_params = {**params, KEY: dumps(opts)}
        return tokenized

    async def _send_one_request(self, tokenized_obj: Any) -> None:
        await super()._send_one_request(tokenized_obj)
        self._ask_selector([tokenized_obj])

    async def _send_batch_request(self, tokenized_objs: list[Any]) -> None:
        await super()._send_batch_request(tokenized_objs)
        self._ask_selector(tokenized_objs)

    def _ask_selector(self, requests: list[Any]) -> None:
        """Asks the selector about requests that were just sent, so their chunks are loaded meanwhile."""
        args, selector = attached(self.server_args), self.chunk_cache_selector
        if args is None or selector is None:
            return
        if not self._is_selector_watched:
            self._is_selector_watched = True
            self.asyncio_tasks.add(asyncio.get_running_loop().create_task(print_exception_wrapper(selector.watch)))
        for request in requests:
            if isinstance(request, TokenizedGenerateReqInput):
                ask(selector, args, request)

    async def compute_prompt(self, **fields: Any) -> None:
        """Serves a request that the server makes itself; `fields` are those of a `GenerateReqInput`."""
        request = GenerateReqInput(**fields, **own_fields(self.server_args))
        note_own(request)
        async for _ in self.generate_request(request):
            pass

    @property
    def keeps_images_on_gpu(self) -> bool:
        """Whether an image that is read takes a place on the GPU, which only the scheduler gives back."""
        return bool(getattr(self.mm_processor, "use_cuda_ipc", False))

    async def ids_with_images(self, obj: GenerateReqInput) -> Sequence[int]:
        """The token ids of a prompt with images, as the model would be given them; nothing is sent to it.

        Raises:
            ValueError: SGLang refuses the request, such as an image that it cannot read.
        """
        obj.normalize_batch_and_arguments()
        self._init_req_state(obj)
        try:
            tokenized = await self._tokenize_one_request(obj)
        finally:
            del self.rid_to_state[obj.rid]
        return tokenized.input_ids

    def update_request_meta_info(
        self,
        meta_info: dict[str, Any],
        state: Any,
        customized_info: Mapping[str, list[list[Any]]],
        index: int,
        finish_reason: Any,
    ) -> None:
        """SGLang joins the values of all outputs to one list; ours is one object."""
        values = customized_info.get(KEY)
        if values is not None:
            if values[index]:
                setattr(state, _REPLY, json.loads(values[index][-1]))
            customized_info = {key: others for key, others in customized_info.items() if key != KEY}
        super().update_request_meta_info(meta_info, state, customized_info, index, finish_reason)
        _add_reply(meta_info, state)

    def _stream_one_response(self, obj: Any, state: Any, request: Any = None) -> AsyncIterator[Any]:
        generator = super()._stream_one_response(obj, state, request)
        return _with_reply(generator, state) if may_get_reply(obj, attached(self.server_args)) else generator


def _add_reply(meta_info: dict[str, Any], state: Any) -> None:
    """Puts the reply of a request, once it is known, into an output."""
    reply = getattr(state, _REPLY, None)
    if reply is not None:
        meta_info[KEY] = reply


async def _with_reply(generator: AsyncIterator[Any], state: Any) -> AsyncIterator[Any]:
    async for out in generator:
        if isinstance(out, dict) and "meta_info" in out:
            _add_reply(out["meta_info"], state)
        yield out
