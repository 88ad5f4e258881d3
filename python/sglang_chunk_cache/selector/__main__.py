"""The process of the selector: `python -m sglang_chunk_cache.selector SETTINGS`, started by `selector_client` alone.

It ends when its parent does, when a step takes longer than `STEP_LIMIT_S`, or with an error message if its model or the
main model's tokenizer cannot be used.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import sys
import threading
import time

import msgspec
import torch
import zmq
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from chunk_cache.errors import one_line
from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel, SelectorModelError
from sglang_chunk_cache.selector.chunk_scorer import ChunkScorer
from sglang_chunk_cache.selector.desk import QuestionDesk
from sglang_chunk_cache.selector.selector_messages import Alive, Settings, dumps, loads_question

BEAT_S = 0.5
"""Seconds between two signs of life."""
STEP_LIMIT_S = 120.0
"""Seconds after which a step of work ends the process; a step that works takes a fraction of them."""


class _Heart:
    """Gives signs of life, from a thread of its own, since the main thread may compute."""

    def __init__(self, settings: Settings, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.is_ready = False
        self.step_began: float | None = None
        self._server_pid = settings.server_pid  # not `getppid()`: the server may have ended while torch was imported
        self._context = context
        self._endpoint = settings.replies
        self._folder = os.path.dirname(settings.replies.removeprefix("ipc://"))
        threading.Thread(target=self._beat, name="heart", daemon=True).start()

    def _beat(self) -> None:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, 4)
        socket.connect(self._endpoint)
        while True:
            began = self.step_began
            if os.getppid() != self._server_pid:
                shutil.rmtree(self._folder, ignore_errors=True)  # nobody else is left to do it
                os._exit(3)
            if began is not None and time.monotonic() - began > STEP_LIMIT_S:
                os._exit(4)
            with contextlib.suppress(zmq.Again):  # nobody listens just now
                socket.send(dumps(Alive(self.is_ready)), zmq.NOBLOCK)
            time.sleep(BEAT_S)


def serve(settings: Settings) -> None:
    """Answers questions until the process is ended.

    Raises:
        SelectorModelError: the model or the tokenizer cannot be used.
    """
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    heart = _Heart(settings, context)
    torch.set_num_threads(settings.num_threads)
    desk = QuestionDesk(ChunkScorer(AuxiliaryModel.load(settings.model), _main_tokenizer(settings), settings.max_bytes))
    questions, replies = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    questions.setsockopt(zmq.RCVHWM, 0)
    questions.connect(settings.questions)
    replies.connect(settings.replies)
    heart.is_ready = True
    replies.send(dumps(Alive(is_ready=True)))
    while True:
        while questions.poll(0 if desk.has_work else 1000):
            desk.take(loads_question(questions.recv()), time.monotonic())
        heart.step_began = time.monotonic()
        for answer in desk.step(time.monotonic()):
            replies.send(dumps(answer))
        heart.step_began = None


def _main_tokenizer(settings: Settings) -> object:
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            settings.tokenizer, trust_remote_code=settings.trust_remote_code, revision=settings.revision
        )
    except (OSError, ValueError, KeyError) as error:
        raise SelectorModelError(f"the tokenizer of the main model, {settings.tokenizer!r}: {error}") from error
    if not tokenizer.is_fast:
        problem = "does not say where its tokens lie (it is not a fast one)"
        raise SelectorModelError(f"the tokenizer of the main model, {settings.tokenizer!r}, {problem}")
    return tokenizer


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="[%(asctime)s selector] %(message)s")
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        serve(msgspec.json.decode(sys.argv[1], type=Settings))
    except SelectorModelError as error:
        sys.exit(f"Chunk cache: selector: {one_line(error)}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
