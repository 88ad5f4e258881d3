"""EngineBackend: an engine in this process as the backend of SGLang frontend programs.

    llm = engine(model_path="models/llama")
    with EngineBackend(llm) as backend:
        state = answer.run(passages=passages, question="Who?", backend=backend)

Promises: programs, their forks and batches ask from threads of their own, at the same time. An engine answers in one
event loop, which runs in a thread of the backend until `close`; until then the engine is asked in no other way. A
program that asks at or after `close` fails.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING, Any, Self

from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.chat_template import get_chat_template, get_chat_template_by_model_path
from sglang.lang.global_config import global_config

if TYPE_CHECKING:
    from sglang import Engine
    from sglang.lang.interpreter import StreamExecutor
    from sglang.lang.ir import SglSamplingParams

_LOGPROBS = ("return_logprob", "logprob_start_len", "top_logprobs_num", "return_text_in_logprobs")
_CLOSED = "backend: it is closed; open another EngineBackend"


class EngineBackend(BaseBackend):
    """See the head of this file; a context manager, which closes it and leaves the engine running.

    Args:
        engine: of `sglang_chunk_cache.plugin.engine`, or an `sglang.Engine`.
        chat_template_name: SGLang's name of the template of roles; None = by the path of the model.
    """

    # What of a server's backend is not about HTTP; `select` asks through `_generate_http_request`.
    select = RuntimeEndpoint.select
    _handle_dtype_to_regex = RuntimeEndpoint._handle_dtype_to_regex
    _add_images = RuntimeEndpoint._add_images

    def __init__(self, engine: Engine, chat_template_name: str | None = None) -> None:
        super().__init__()
        self._engine = engine
        named = get_chat_template(chat_template_name) if chat_template_name else None
        self.chat_template = named or get_chat_template_by_model_path(self.get_model_name())
        self._lock = threading.Lock()
        self._is_closed = False
        self._asking: set[asyncio.Task[Any]] = set()
        self._thread = threading.Thread(target=engine.loop.run_forever, name="engine backend", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives the event loop back: `engine.generate` works again, and programs do not; a second call does nothing."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        asyncio.run_coroutine_threadsafe(self._give_up(), self._engine.loop).result()
        self._engine.loop.call_soon_threadsafe(self._engine.loop.stop)
        self._thread.join()

    def get_model_name(self) -> str:
        return str(self._engine.server_args.model_path)

    def generate(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> tuple[str, dict[str, Any]]:
        output = self._generate_http_request(s, self._request(s, sampling_params))
        return output["text"], output["meta_info"]

    def generate_stream(
        self, s: StreamExecutor, sampling_params: SglSamplingParams
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        data = {**self._request(s, sampling_params), "stream": True}
        self._add_images(s, data)
        outputs = self._outputs(data)
        told = 0
        while (output := self._run(_next(outputs))) is not None:
            yield output["text"][told:], output["meta_info"]
            told = len(output["text"])

    def commit_lazy_operations(self, s: StreamExecutor) -> None:
        self._generate_http_request(s, {"text": s.text_, "sampling_params": {"max_new_tokens": 0}})

    fill_image = commit_lazy_operations

    def cache_prefix(self, prefix_str: str) -> None:
        self._run(_next(self._outputs({"text": prefix_str, "sampling_params": {"max_new_tokens": 0}})))

    def flush_cache(self) -> None:
        self._run(self._engine.tokenizer_manager.flush_cache())

    def _request(self, s: StreamExecutor, sampling_params: SglSamplingParams) -> dict[str, Any]:
        """The body of a request to /generate."""
        self._handle_dtype_to_regex(sampling_params)
        params = {
            "skip_special_tokens": global_config.skip_special_tokens_in_output,
            "spaces_between_special_tokens": global_config.spaces_between_special_tokens_in_out,
            **sampling_params.to_srt_kwargs(),
        }
        asked = {name: getattr(sampling_params, name) for name in _LOGPROBS}
        return {
            "text": s.text_,
            "sampling_params": params,
            **{name: value for name, value in asked.items() if value is not None},
        }

    def _generate_http_request(self, s: StreamExecutor, data: dict[str, Any]) -> Any:
        """The output of a request, or the outputs of a batch; SGLang's name, though nothing goes over HTTP."""
        self._add_images(s, data)
        return self._run(_next(self._outputs(data)))

    def _outputs(self, data: dict[str, Any]) -> AsyncIterator[Any]:
        from sglang.srt.managers.io_struct import GenerateReqInput

        return self._engine.tokenizer_manager.generate_request(GenerateReqInput(**data), None)

    def _run(self, asked: Coroutine[Any, Any, Any]) -> Any:
        with self._lock:
            if self._is_closed:
                asked.close()
                raise RuntimeError(_CLOSED)
            answer = asyncio.run_coroutine_threadsafe(self._ask(asked), self._engine.loop)
        try:
            return answer.result()
        except CancelledError:
            raise RuntimeError(_CLOSED) from None

    async def _ask(self, asked: Coroutine[Any, Any, Any]) -> Any:
        task = asyncio.current_task()
        assert task is not None, "runs in the event loop"
        self._asking.add(task)
        try:
            return await asked
        finally:
            self._asking.discard(task)

    async def _give_up(self) -> None:
        """Ends what programs still wait for."""
        tasks = list(self._asking)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _next(outputs: AsyncIterator[Any]) -> Any:
    """The next output; None where there is none."""
    return await anext(outputs, None)
