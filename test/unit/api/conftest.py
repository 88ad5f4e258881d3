"""service: SGLang's HTTP app and tokenizer manager, hooked, with the scheduler's end of its sockets in our hands.

The scheduler's end notes every request that arrives and answers it with fixed text and a fixed reply, through the same
sockets and types as the real one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from sglang_chunk_cache.flags import server_args as options
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs
from unit.api.seen_requests import carried

REPLY = {"prefix_tokens": 1, "reused_tokens": 5, "computed_tokens": 3, "recomputed_tokens": 2, "chunks": []}


class SchedulerEnd:
    """Receives tokenized requests and answers them; `seen` holds all of them.

    With `discovers` it has a reply for requests without marks too.
    """

    discovers = False

    def __init__(self, port_args: Any) -> None:
        self.seen: list[Any] = []
        context = zmq.Context(1)
        self._requests = context.socket(zmq.PULL)
        self._requests.connect(port_args.scheduler_input_ipc_name)
        self._answers = context.socket(zmq.PUSH)
        self._answers.connect(port_args.tokenizer_ipc_name)
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        from sglang.srt.managers import io_struct

        while True:
            message = io_struct.sock_recv(self._requests)
            batch = isinstance(message, io_struct.BatchTokenizedGenerateReqInput)
            for request in message.batch if batch else [message]:
                if isinstance(request, io_struct.TokenizedGenerateReqInput):
                    self.seen.append(request)
                    self._answer(request)

    def _answer(self, request: Any) -> None:
        from sglang.srt.managers import io_struct

        has_reply = self.discovers or carried(request) is not None
        if request.stream:
            io_struct.sock_send(self._answers, _output(request, 1, finished=False, reply=has_reply))
            io_struct.sock_send(self._answers, _output(request, 2, finished=False, reply=False))
        reply = has_reply and not request.stream
        io_struct.sock_send(self._answers, _output(request, 3, finished=True, reply=reply))


def _output(request: Any, num_tokens: int, *, finished: bool, reply: bool) -> Any:
    import msgspec
    from sglang.srt.managers.io_struct import BatchStrOutput, wrap_as_pickle

    names = [name for name in msgspec.structs.fields(BatchStrOutput) if name.required]
    values: dict[str, Any] = {field.name: None for field in names}
    for name in values:
        if "logprobs" in name:
            values[name] = [[]]
    info = {"chunk_cache": [[json.dumps(REPLY)]]} if reply else None
    values.update(
        rids=[request.rid],
        finished_reasons=[{"type": "length", "length": num_tokens} if finished else None],
        output_strs=["x"],
        output_ids=[[7]],
        prompt_tokens=[len(request.input_ids)],
        completion_tokens=[num_tokens],
        reasoning_tokens=[0],
        cached_tokens=[REPLY["prefix_tokens"]],
        retraction_counts=[0],
        customized_info=wrap_as_pickle(info) if reply else None,
    )
    return BatchStrOutput(**values)


class Service:
    """HTTP calls to the app, in its own event loop."""

    def __init__(self, manager: Any, app: Any, scheduler: SchedulerEnd) -> None:
        self.manager = manager
        self.scheduler = scheduler
        self.app = app
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=60)

    def post(self, path: str, body: Any) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app=self.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as client:
                headers = {"content-type": "application/json"}
                return await client.post(path, content=json.dumps(body), headers=headers)

        return self.run(call())

    def events(self, path: str, body: Any) -> list[Any]:
        """The JSON events of a stream, without the final mark."""
        response = self.post(path, {**body, "stream": True})
        assert response.status_code == 200, response.text
        lines = [line for line in response.text.splitlines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]"
        return [json.loads(line[len("data: ") :]) for line in lines[:-1]]


@pytest.fixture(scope="session")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.anthropic import serving
    from sglang.srt.entrypoints.engine import init_tokenizer_manager
    from sglang.srt.entrypoints.ollama import serving as ollama
    from sglang.srt.entrypoints.openai import serving_chat, serving_completions, serving_responses
    from sglang.srt.runtime_context import publish, restore_context, snapshot_context
    from sglang.srt.server_args import PortArgs, ServerArgs

    from sglang_chunk_cache.host import admin_routes
    from sglang_chunk_cache.start import hooks
    from tiny_models import make_model

    args = ChunkCacheArgs()
    folder: Path = make_model("llama", tmp_path_factory.mktemp("api") / "llama")
    server_args = ServerArgs(
        model_path=str(folder), device="cpu", attention_backend="torch_native", sampling_backend="pytorch"
    )
    options.attach(server_args, args)
    hooks.apply_hooks(hooks.API_HOOKS)
    server_args.resolve_once()
    before = snapshot_context()
    publish(server_args, role="tokenizer")
    port_args = PortArgs.init_new(server_args)
    manager, templates = init_tokenizer_manager(server_args, port_args)
    manager.create_abort_task = lambda obj: None  # SGLang's takes two seconds behind each stream
    http_server.set_global_state(
        http_server._GlobalState(tokenizer_manager=manager, template_manager=templates, scheduler_info={})
    )
    state = http_server.app.state
    state.openai_serving_completion = serving_completions.OpenAIServingCompletion(manager, templates)
    state.openai_serving_chat = serving_chat.OpenAIServingChat(manager, templates)
    state.openai_serving_responses = serving_responses.OpenAIServingResponses(manager, templates)
    state.anthropic_serving = serving.AnthropicServing(state.openai_serving_chat)
    state.ollama_serving = ollama.OllamaServing(manager)
    admin_routes.add_routes()
    options.set_args(args)
    yield Service(manager, http_server.app, SchedulerEnd(port_args))
    options.set_args(None)
    restore_context(before)


@pytest.fixture
def seen(service: Service) -> list[Any]:
    """Requests that reach the scheduler's end from now on."""
    service.scheduler.seen.clear()
    return service.scheduler.seen


@pytest.fixture
def use(monkeypatch):
    """Changes the flags of the server."""

    def change(**flags: Any) -> None:
        monkeypatch.setattr(options, "_current", dataclasses.replace(options._current, **flags))

    return change


@pytest.fixture
def template(service, monkeypatch):
    """Gives the model another chat template."""

    def change(text: str, content_format: str = "string") -> None:
        monkeypatch.setattr(service.manager.tokenizer, "chat_template", text)
        from sglang.srt.entrypoints.http_server import app

        manager = app.state.openai_serving_chat.template_manager
        monkeypatch.setattr(manager, "_jinja_template_content_format", content_format)

    return change
