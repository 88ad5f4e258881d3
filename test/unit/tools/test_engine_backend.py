"""EngineBackend over an engine that is made up: what a program is told at and after its end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_chunk_cache.engine_backend import EngineBackend

CLOSED = "backend: it is closed; open another EngineBackend"


class MadeUpManager:
    """Answers every prompt by itself, but for `wait`, which it never answers."""

    def __init__(self) -> None:
        self.is_asked = threading.Event()
        self.num_ended = 0

    async def generate_request(self, request: Any, _: None) -> AsyncIterator[dict[str, Any]]:
        self.is_asked.set()
        try:
            if request.text == "wait":
                await asyncio.Event().wait()
            yield {"text": request.text, "meta_info": {}}
        finally:
            self.num_ended += 1

    async def flush_cache(self) -> None:
        pass


@pytest.fixture
def engine() -> Iterator[Any]:
    loop = asyncio.new_event_loop()
    server_args = SimpleNamespace(model_path="m")
    yield SimpleNamespace(loop=loop, server_args=server_args, tokenizer_manager=MadeUpManager())
    loop.close()


def test_a_backend_may_be_closed_twice_and_gives_the_engine_back(engine: Any) -> None:
    with EngineBackend(engine) as backend:
        backend.cache_prefix("a")
        backend.close()
    backend.close()
    assert engine.loop.run_until_complete(asyncio.sleep(0, "the engine itself")) == "the engine itself"
    for ask in (backend.flush_cache, lambda: backend.cache_prefix("a")):
        with pytest.raises(RuntimeError, match=CLOSED):
            ask()
    with EngineBackend(engine) as another:
        another.cache_prefix("a")


def test_a_program_that_waits_at_the_end_is_told(engine: Any) -> None:
    errors = []

    def program() -> None:
        try:
            backend.cache_prefix("wait")
        except RuntimeError as error:
            errors.append(str(error))

    with EngineBackend(engine) as backend:
        thread = threading.Thread(target=program)
        thread.start()
        assert engine.tokenizer_manager.is_asked.wait(10)
    thread.join(10)
    assert errors == [CLOSED]
    assert engine.tokenizer_manager.num_ended == 1, "nothing of it is left in the event loop"
