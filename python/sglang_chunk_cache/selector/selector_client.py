"""SelectorClient: asks the selector's process, and keeps it alive; runs in the process that tokenizes.

Verbs: `start` (waits until the model is loaded), `ask` (asks for a prompt; `answer` is called once with the result),
`watch` (a task of the event loop: receives, answers what is late, starts the process again), `forget` (all that the
process has read), `close`.

Promises: every question is answered, by scores within `timeout_s` or by a reason. A process that ended, or gave no sign
of life for `SILENT_S`, is ended and started again. The questions that it had are answered at once with a reason, and so
are those that come until a process is ready, even if none can be started. Only `start` waits for the process. Except
for `close`, only `watch` closes the sockets that it waits on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import zmq
import zmq.asyncio

from chunk_cache.keys import Partition, TokenIds, chunk_key, chunk_keys
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.options.selector_config import SelectorConfig
from chunk_cache.plan.selection_plan import question_of
from chunk_cache.plan.selector_answer import SelectorAnswer
from chunk_cache.types import REASONS
from sglang_chunk_cache.selector.selector_messages import (
    IDS,
    SCORES,
    Question,
    Scores,
    Settings,
    Text,
    dumps,
    loads_reply,
)
from sglang_chunk_cache.telemetry.meters import Meters, counter

logger = logging.getLogger(__name__)

START_S = 600.0
"""Seconds in which the model must be downloaded and loaded; otherwise the server does not start."""
SILENT_S = 5.0
"""Seconds without a sign of life after which a process is ended; one that runs gives ten in this time."""
MAX_PAUSE_S = 60.0
"""Most seconds before a process that ends again and again is started once more."""
_WATCH_MS = 200

SELECTOR_METERS = {
    "answers": counter(
        "selector_answers_total",
        "Prompts that were shown to the selector, by reason; none where it gave scores.",
        "reason",
    ),
    "seconds": counter("selector_seconds_total", "Seconds from such a question to its answer."),
    "restarts": counter("selector_restarts_total", "Times that the selector's process was started again."),
}
"""Metrics of the process that asks the selector."""


class SelectorStartError(RuntimeError):
    """The process was not started or did not become ready; the message is a sentence."""


@dataclass
class _Process:
    """One run of the process; `heard_at`: its last sign of life."""

    popen: subprocess.Popen[bytes]
    questions: zmq.Socket[bytes]
    replies: zmq.Socket[bytes]
    folder: str
    began: float
    heard_at: float
    is_ready: bool = False
    killed_why: str | None = None
    """Why it was ended to be started again, as the end of a sentence about the process; None = it was not."""

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def end(self) -> None:
        self.kill()
        self.questions.close(linger=0)
        self.replies.close(linger=0)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclass(frozen=True)
class _Asked:
    rid: str
    began: float
    lens: tuple[int, ...] = field(repr=False)
    """Tokens of each chunk."""


class SelectorClient:
    """See the head of this file.

    Args:
        model: the auxiliary model.
        tokenizer, trust_remote_code, revision: of the main model, as SGLang loads it.
        answer: called in the event loop with a request's id and its answer.
    """

    def __init__(
        self,
        model: str,
        config: SelectorConfig,
        *,
        tokenizer: str,
        trust_remote_code: bool = False,
        revision: str | None = None,
        answer: Callable[[str, SelectorAnswer], None],
        metrics: Meters | None = None,
    ) -> None:
        self._config = config
        self._settings = Settings(
            model=model,
            tokenizer=tokenizer,
            trust_remote_code=trust_remote_code,
            revision=revision,
            max_bytes=config.max_bytes,
            num_threads=config.num_threads or max(1, len(os.sched_getaffinity(0)) // 2),
            questions="",
            replies="",
            server_pid=0,
        )
        self._answer = answer
        self._metrics = metrics or Meters(SELECTOR_METERS, enabled=False)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._numbers = itertools.count()
        self._asked: dict[int, _Asked] = {}
        self._process: _Process | None = None
        self._pause_s = 0.0
        self._start_at = 0.0
        self._swept_at = time.monotonic()

    def start(self) -> None:
        """Starts the process and waits until it can answer.

        Raises:
            SelectorStartError: it cannot be started, ended, or took too long.
        """
        self._process = process = self._spawn()
        while not process.is_ready:
            if process.replies.poll(_WATCH_MS):
                self._receive(process)
            elif process.popen.poll() is not None:
                self.close()
                raise SelectorStartError(f"its process ended with code {process.popen.returncode}; see the log above")
            elif time.monotonic() - process.began > START_S:
                self.close()
                raise SelectorStartError(f"its process was not ready within {START_S:.0f} s")
        logger.info("Chunk cache: selector %s runs as process %d", self._settings.model, process.popen.pid)

    def close(self) -> None:
        """Ends the process; open questions are not answered any more."""
        if self._process is not None:
            self._process.end()
            self._process = None

    def forget(self) -> None:
        """Ends the process, and with it all that it has read; `watch` starts another."""
        process = self._process
        if process is not None:
            process.killed_why = "had to forget passages"
            process.is_ready = False
            process.kill()

    def ask(self, rid: str, opts: RequestOptions, token_ids: TokenIds, partition: Partition) -> None:
        """Asks for the scores of all chunks of a prompt.

        Args:
            rid: name of the request.
            opts: its options, with at least one chunk.
            token_ids: the whole prompt.
        """
        for stale in [number for number, asked in self._asked.items() if asked.rid == rid]:
            del self._asked[stale]  # of a request that is gone: its id is used again
        number = next(self._numbers)
        lens = tuple(end - start for start, end in opts.spans)
        self._asked[number] = _Asked(rid, time.monotonic(), lens)
        process = self._process
        if process is None or not process.is_ready:
            self._settle(number, None, "selector_unavailable")
            return
        try:
            process.questions.send(dumps(self._question(number, opts, token_ids, partition)), zmq.NOBLOCK)
        except zmq.Again:  # the process reads nothing, and its socket is full
            self._settle(number, None, "selector_unavailable")

    def _question(self, number: int, opts: RequestOptions, token_ids: TokenIds, partition: Partition) -> Question:
        ids = np.array(token_ids, dtype=IDS)
        prefix = token_ids[: opts.spans[0][0]]
        prefix_key = chunk_key(partition, prefix)
        start, end = question_of(opts.spans, len(ids), opts.answer_tokens)
        return Question(
            number=number,
            timeout_s=self._config.timeout_s,
            prefix=Text(prefix_key, ids[: opts.spans[0][0]].tobytes()),
            chunks=[
                Text(prefix_key + key, ids[first:last].tobytes())
                for key, (first, last) in zip(chunk_keys(partition, token_ids, opts.spans), opts.spans, strict=True)
            ],
            question=ids[start:end].tobytes(),
        )

    async def watch(self) -> None:
        """Receives answers and looks after the process, as long as the event loop runs."""
        while True:
            process = self._process
            waiting = None if process is None else zmq.asyncio.Socket.shadow(process.replies.underlying)
            if waiting is not None and await waiting.poll(_WATCH_MS):
                assert process is not None
                self._receive(process)
            elif waiting is None:
                await asyncio.sleep(_WATCH_MS / 1000)
            self._sweep(time.monotonic())

    def _receive(self, process: _Process) -> None:
        """Handles all that has come from the process."""
        while process.replies.poll(0):
            reply = loads_reply(process.replies.recv())
            process.heard_at = time.monotonic()
            if isinstance(reply, Scores):
                self._settle(reply.number, reply.rankings, reply.reason)
            elif reply.is_ready and not process.is_ready:
                process.is_ready = True
                self._pause_s = 0.0

    def _sweep(self, now: float) -> None:
        """Answers what is late, ends a process that hangs, starts one where there is none."""
        for number in [n for n, asked in self._asked.items() if now - asked.began >= self._config.timeout_s]:
            self._settle(number, None, "selector_timeout")
        process, was_away = self._process, now - self._swept_at > 1.0
        self._swept_at = now
        if process is None:
            if now >= self._start_at:
                self._start_again()
            return
        if was_away:  # this loop did not run: nothing can be said of the process
            process.heard_at = now
        code = process.popen.poll()
        if code is not None:
            self._restart(process, process.killed_why or f"has ended with code {code}")
        elif now - process.heard_at > (SILENT_S if process.is_ready else START_S):
            self._restart(process, f"has given no sign of life for {now - process.heard_at:.0f} s")

    def _restart(self, process: _Process, what: str) -> None:
        """Ends the process and has another started; requests that wait go on without it.

        Args:
            what: end of a sentence about the process, for the log.
        """
        self._process = None
        pause_s = self._put_off_start()
        logger.warning(
            "Chunk cache: the selector's process %d %s; it is started again in %.1f s, %d requests go on without it",
            process.popen.pid,
            what,
            pause_s,
            len(self._asked),
        )
        self._metrics.add("restarts")
        process.end()
        for number in list(self._asked):
            self._settle(number, None, "selector_unavailable")

    def _start_again(self) -> None:
        try:
            self._process = self._spawn()
        except SelectorStartError as error:
            logger.warning("Chunk cache: the selector: %s; tried again in %.1f s", error, self._put_off_start())

    def _put_off_start(self) -> float:
        """Puts the next start off; returns by how many seconds: each time more, until a process is ready."""
        pause_s = self._pause_s
        self._start_at = time.monotonic() + pause_s
        self._pause_s = min(MAX_PAUSE_S, 2 * pause_s + 1.0)
        return pause_s

    def _settle(self, number: int, rankings: Sequence[bytes] | None, reason: str | None) -> None:
        asked = self._asked.pop(number, None)
        if asked is None:
            return  # the question was late, and has its answer
        found = None
        if rankings is not None:
            found = tuple(np.frombuffer(one, dtype=SCORES) for one in rankings)
            if tuple(len(one) for one in found) != asked.lens:
                logger.error("Chunk cache: selector: %s got scores for other chunks", asked.rid)
                found, reason = None, "selector_failed"
        assert found is not None or reason in REASONS, f"{reason!r} from the selector's process"
        seconds = time.monotonic() - asked.began
        self._metrics.add("answers", reason or "none")
        self._metrics.add("seconds", num=seconds)
        self._answer(asked.rid, SelectorAnswer(found, reason, seconds))

    def _spawn(self) -> _Process:
        try:
            with contextlib.ExitStack() as undo:
                process = self._spawn_undoing(undo)
                undo.pop_all()
                return process
        except (OSError, zmq.ZMQError) as error:  # no folder for its sockets, no memory, too many files
            raise SelectorStartError(f"its process could not be started: {error}") from error

    def _spawn_undoing(self, undo: contextlib.ExitStack) -> _Process:
        folder = tempfile.mkdtemp(prefix="chunk-cache-selector-")
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        questions = undo.enter_context(self._context.socket(zmq.PUSH))
        replies = undo.enter_context(self._context.socket(zmq.PULL))
        settings = msgspec.structs.replace(
            self._settings,
            questions=f"ipc://{folder}/questions",
            replies=f"ipc://{folder}/replies",
            server_pid=os.getpid(),
        )
        questions.bind(settings.questions)
        replies.bind(settings.replies)
        command = [sys.executable, "-m", "sglang_chunk_cache.selector", msgspec.json.encode(settings).decode()]
        # It needs no accelerator, and must not be counted as one that uses it.
        env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TOKENIZERS_PARALLELISM": "false"}
        popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=env)
        now = time.monotonic()
        return _Process(popen, questions, replies, folder, now, now)
