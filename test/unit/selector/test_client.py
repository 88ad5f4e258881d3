"""The selector's process, as the process that tokenizes sees it: answers, and everything that may go wrong with it."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import psutil
import pytest
from transformers import AutoTokenizer

from chunk_cache.keys import Partition
from chunk_cache.options.admin_bodies import parse_evict
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.options.selector_config import SelectorConfig
from chunk_cache.plan.selector_answer import SelectorAnswer
from sglang_chunk_cache.admin import scheduler_side as messages
from sglang_chunk_cache.admin.administration import Admin
from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel
from sglang_chunk_cache.selector.chunk_scorer import ChunkScorer
from sglang_chunk_cache.selector.selector_client import SelectorClient, SelectorStartError
from unit.selector.conftest import TEXT

pytestmark = pytest.mark.slow

CHUNKS = (TEXT, TEXT[20:60], TEXT[5:])
DEADLINE_S = 120.0


class Prompts:
    """Prompts in the main model's tokens."""

    def __init__(self, main_dir: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(main_dir)

    def ids(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def make(self, question: str = "Where is Rome?") -> tuple[RequestOptions, array[int]]:
        ids, spans = self.ids("Read. "), []
        for chunk in CHUNKS:
            spans.append((len(ids), len(ids) + len(self.ids(chunk))))
            ids += self.ids(chunk)
        return RequestOptions(spans=tuple(spans), method="cacheclip"), array("q", ids + self.ids(question))


class Asked:
    """A client, and what came of each request: exactly one answer."""

    def __init__(self, model: Path, main_dir: Path, **config: Any) -> None:
        self.answers: dict[str, list[SelectorAnswer]] = {}
        self.prompts = Prompts(main_dir)
        self.client = SelectorClient(
            str(model), SelectorConfig(num_threads=1, **config), tokenizer=str(main_dir), answer=self.note
        )

    @property
    def pid(self) -> int | None:
        """Id of the selector's process, while there is one."""
        process = self.client._process
        return None if process is None else process.popen.pid

    @property
    def is_ready(self) -> bool:
        """Whether it would look at a question now."""
        process = self.client._process
        return process is not None and process.is_ready

    def note(self, rid: str, answer: SelectorAnswer) -> None:
        self.answers.setdefault(rid, []).append(answer)

    def ask(self, rid: str, question: str = "Where is Rome?") -> None:
        opts, ids = self.prompts.make(question)
        self.client.ask(rid, opts, ids, Partition())

    async def until(self, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not is_so():
            assert time.monotonic() < deadline, "did not happen"
            await asyncio.sleep(0.01)

    async def answer(self, rid: str, question: str = "Where is Rome?") -> SelectorAnswer:
        self.ask(rid, question)
        await self.until(lambda: rid in self.answers)
        return self.answers[rid][0]

    async def scored(self, rid: str) -> SelectorAnswer:
        """Asks again and again: the first answer of a fresh process may be late on a busy machine."""
        for i in range(100):
            answer = await self.answer(f"{rid}-{i}")
            if answer.rankings is not None:
                return answer
        raise AssertionError(f"{answer}")

    def run(self, test: Callable[[], Awaitable[None]]) -> None:
        """Runs a test beside the client's own task, and sees that every request had one answer."""

        async def both() -> None:
            watching = asyncio.ensure_future(self.client.watch())
            try:
                await test()
                assert not watching.done()
            finally:
                watching.cancel()

        self.client.start()
        try:
            asyncio.run(both())
        finally:
            self.client.close()
        assert {len(answers) for answers in self.answers.values()} == {1}


@pytest.fixture
def asked(auxiliary_dir: Path, main_dir: Path) -> Asked:
    return Asked(auxiliary_dir, main_dir, timeout_s=20.0)


def test_answers_are_the_scores(asked: Asked, auxiliary_dir: Path, main_dir: Path) -> None:
    scorer = ChunkScorer(AuxiliaryModel.load(str(auxiliary_dir)), asked.prompts.tokenizer, 10**9)
    read = []
    for chunk in CHUNKS:
        *_, one = scorer.prepare(chunk.encode(), asked.prompts.ids(chunk), b"S", asked.prompts.ids("Read. "))
        assert one is not None
        read.append(one)
    expected = scorer.score(asked.prompts.ids("Where is Rome?"), read)

    async def test() -> None:
        for rid in ("cold", "warm"):
            answer = await asked.scored(rid)
            assert answer.rankings is not None
            for found, wanted in zip(answer.rankings, expected, strict=True):
                np.testing.assert_allclose(found, wanted, rtol=1e-5)
        other = await asked.answer("other", "What was built?")
        assert other.rankings is not None
        assert not np.allclose(other.rankings[0], expected[0])

    asked.run(test)


def test_a_request_that_takes_the_id_of_one_that_is_gone_gets_its_own_answer_only(asked: Asked) -> None:
    async def test() -> None:
        await asked.scored("warm")
        asked.ask("r")
        again = await asked.answer("r", "What was built?")
        other = await asked.answer("other", "What was built?")
        assert again.rankings is not None
        assert other.rankings is not None
        np.testing.assert_array_equal(again.rankings[0], other.rankings[0])

    asked.run(test)


def test_a_process_that_is_killed_under_load_is_started_again(asked: Asked) -> None:
    async def test() -> None:
        await asked.scored("before")
        pid = asked.pid
        assert pid is not None
        for i in range(30):
            asked.ask(f"r{i}")
            if i == 10:
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.002)
        await asked.until(lambda: all(f"r{i}" in asked.answers for i in range(30)))
        reasons = {answers[0].reason for rid, answers in asked.answers.items() if rid.startswith("r")}
        assert "selector_unavailable" in reasons <= {None, "selector_unavailable"}
        await asked.until(lambda: asked.is_ready)
        assert asked.pid != pid
        assert (await asked.scored("after")).reason is None

    asked.run(test)


def test_a_process_that_is_stopped_is_found_out_and_started_again(auxiliary_dir: Path, main_dir: Path) -> None:
    asked = Asked(auxiliary_dir, main_dir, timeout_s=1.0)

    async def test() -> None:
        await asked.scored("before")
        pid = asked.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        late = await asked.answer("late")
        assert late.reason == "selector_timeout"
        await asked.until(lambda: not asked.is_ready)
        assert (await asked.answer("meanwhile")).reason == "selector_unavailable"
        await asked.until(lambda: asked.is_ready)
        assert asked.pid != pid
        await asked.scored("after")

    asked.run(test)


def test_a_passage_that_is_evicted_everywhere_ends_the_process_and_nothing_else(asked: Asked) -> None:
    async def schedulers(request: Any) -> list[messages.ChunkCacheAdminReply]:
        numbers = {"behind": {"variants": 0, "freed_tokens": 0}, "emptied_tokens": 0, "in_use_tokens": 0}
        return [messages.ChunkCacheAdminReply(ranks=[{"evicted": {}, **numbers}], agree=True, dp_rank=0)]

    manager = SimpleNamespace(chunk_cache_selector=asked.client, auto_create_handle_loop=lambda: None)
    admin = Admin(manager, schedulers, num_replicas=1)

    async def test() -> None:
        await asked.scored("before")
        pid = asked.pid
        assert pid is not None
        await asyncio.sleep(0.05)  # the watching task waits for the process
        asked.ask("during")
        await admin.evict(parse_evict({"keys": ["00" * 16], "everywhere": True}))
        assert not psutil.pid_exists(pid), "what it has read is gone when the call answers"
        assert (await asked.answer("behind")).reason == "selector_unavailable"
        await asked.until(lambda: asked.is_ready)
        assert asked.pid != pid
        await asked.scored("after")

    asked.run(test)


@pytest.mark.parametrize(("module", "name"), [(tempfile, "mkdtemp"), (subprocess, "Popen")])
def test_a_process_that_cannot_be_started_again_is_tried_again(
    asked: Asked, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, module: Any, name: str
) -> None:
    def no_room(*args: Any, **kwargs: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    async def test() -> None:
        await asked.scored("before")
        assert asked.pid is not None
        with monkeypatch.context() as patch:
            patch.setattr(module, name, no_room)
            os.kill(asked.pid, signal.SIGKILL)
            await asked.until(lambda: caplog.text.count("could not be started: [Errno 28] No space left on device") > 1)
            assert (await asked.answer("meanwhile")).reason == "selector_unavailable"
        await asked.until(lambda: asked.is_ready)
        await asked.scored("after")

    asked.run(test)


def test_a_process_that_cannot_come_back_leaves_requests_alone(
    auxiliary_dir: Path, main_dir: Path, tmp_path: Path
) -> None:
    """Its tokenizer is another model's when it is started again, and then it is the right one again."""
    folder = shutil.copytree(auxiliary_dir, tmp_path / "model")
    asked = Asked(folder, main_dir, timeout_s=20.0)
    right = (folder / "tokenizer.json").read_text()

    async def test() -> None:
        await asked.scored("before")
        (folder / "tokenizer.json").write_text((main_dir / "tokenizer.json").read_text())
        pid = asked.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        await asked.until(lambda: asked.pid not in (None, pid))
        second = asked.pid
        await asked.until(lambda: asked.pid != second)  # it has ended
        for i in range(5):
            assert (await asked.answer(f"r{i}")).reason == "selector_unavailable"
        (folder / "tokenizer.json").write_text(right)
        await asked.until(lambda: asked.is_ready)
        await asked.scored("after")

    asked.run(test)


def test_a_process_whose_server_ends_while_it_starts_ends_too(asked: Asked, tmp_path: Path) -> None:
    folder = tmp_path / "sockets"
    folder.mkdir()
    with subprocess.Popen(["true"]) as server:
        pass
    settings = msgspec.structs.replace(
        asked.client._settings, replies=f"ipc://{folder}/replies", questions=f"ipc://{folder}/q", server_pid=server.pid
    )
    command = [sys.executable, "-m", "sglang_chunk_cache.selector", msgspec.json.encode(settings).decode()]
    assert subprocess.run(command, timeout=DEADLINE_S).returncode == 3
    assert not folder.exists()


def test_a_start_without_room_is_a_sentence_and_leaves_nothing(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    with tempfile.TemporaryDirectory() as folder:  # the path of a socket must be short
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setattr(sys, "executable", f"{folder}/none")
        with pytest.raises(SelectorStartError, match=r"its process could not be started: .*No such file"):
            asked.client.start()
        assert list(Path(folder).iterdir()) == []


def test_a_start_that_fails_is_a_sentence(main_dir: Path, auxiliary_dir: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(auxiliary_dir, tmp_path / "broken")
    (folder / "model.safetensors").write_bytes(b"no weights")
    asked = Asked(folder, main_dir)
    with pytest.raises(SelectorStartError, match="its process ended with code 1; see the log above"):
        asked.client.start()
    assert asked.pid is None
