"""DiskMedium, and what can happen to files: real kills, limits, permissions, mounts and damage."""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.stored_variant import StoredVariant, TierError
from sglang_chunk_cache.tiers import medium as base
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.medium import Medium
from unit.tiers.medium_suite import (
    FINGERPRINT,
    KEY,
    STATES,
    MediumSuite,
    OpenMedium,
    act_at_random,
    assert_same,
    assert_sound,
    make_stored,
    reason_of,
)
from unit.tiers.mounting import mount

LARGE = replace(FINGERPRINT, num_layers=8, kv_heads=8, head_dim=64, v_head_dim=64)
NOBODY = 65534


class TestDisk(MediumSuite):
    @pytest.fixture
    def open_medium(self, tmp_path: Path) -> OpenMedium:
        return lambda fingerprint, **kwargs: DiskMedium(tmp_path / "chunks", fingerprint, **kwargs)

    def test_folder_is_described(self, open_medium: OpenMedium, tmp_path: Path) -> None:
        open_medium(FINGERPRINT)
        text = (tmp_path / "chunks" / FINGERPRINT.digest / "fingerprint.json").read_text()
        assert json.loads(text) == FINGERPRINT.describe()

    def test_nobody_else_may_read(self, open_medium: OpenMedium, tmp_path: Path) -> None:
        open_medium(FINGERPRINT).write(make_stored())
        assert file_of(tmp_path).stat().st_mode & 0o077 == 0
        assert (tmp_path / "chunks" / FINGERPRINT.digest).stat().st_mode & 0o077 == 0

    @pytest.mark.parametrize("kept", [0, 1, 19, 20, 40, 63, 64, 500, -1, -200, -400])
    def test_truncated(self, open_medium: OpenMedium, tmp_path: Path, problems: list[TierError], kept: int) -> None:
        medium, stored = open_medium(FINGERPRINT), make_stored()
        for read_first in (True, False):
            medium.write(stored)
            path = file_of(tmp_path)
            os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
            if read_first:
                MediumSuite.assert_fails(medium, stored.info, "corrupt")
            assert medium.find(KEY) == list(medium.scan()) == []
            assert not path.exists()
        assert [error.reason for error in problems] == ["corrupt"]
        assert str(path) in str(problems[0])
        medium.write(stored)
        assert_sound(medium, stored)

    @pytest.mark.parametrize("fingerprint", [FINGERPRINT, replace(FINGERPRINT, states=STATES)])
    def test_one_flipped_bit_anywhere(self, open_medium: OpenMedium, tmp_path: Path, fingerprint: Fingerprint) -> None:
        medium, stored = open_medium(fingerprint), make_stored(fingerprint)
        medium.write(stored)
        path = file_of(tmp_path)
        sound = path.read_bytes()
        header_len = len(sound) - stored.info.payload_len
        for at in [*range(24), *range(24, header_len, 13), header_len - 1, *range(header_len, len(sound), 17)]:
            path.write_bytes(sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :])
            assert bool(medium.find(KEY)) == (at >= header_len), at
            if at >= header_len:
                MediumSuite.assert_fails(medium, stored.info, "corrupt")
            assert not path.exists()

    def test_layers_before_the_damage_are_good(self, open_medium: OpenMedium, tmp_path: Path) -> None:
        medium, stored = open_medium(FINGERPRINT), make_stored()
        medium.write(stored)
        path = file_of(tmp_path)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
        layers = medium.read_layers(stored.info)
        for expected in range(FINGERPRINT.num_layers - 1):
            layer, k, _ = next(layers)
            assert layer == expected
            assert torch.equal(k.view(torch.uint8), stored.k[layer].view(torch.uint8))
        with pytest.raises(TierError, match="layer 2"):
            next(layers)

    def test_file_of_another_fingerprint_or_name(
        self, open_medium: OpenMedium, tmp_path: Path, problems: list[TierError]
    ) -> None:
        other = replace(FINGERPRINT, weights="other")
        stored = make_stored()
        open_medium(other).write(stored)
        medium = open_medium(FINGERPRINT)
        path = Path(str(file_of(tmp_path)).replace(other.digest, FINGERPRINT.digest))
        path.parent.mkdir(parents=True)
        shutil.copy(file_of(tmp_path), path)
        assert medium.find(KEY) == medium.find(KEY) == list(medium.scan()) == []
        assert [error.reason for error in problems] == ["mismatch"]
        MediumSuite.assert_fails(medium, stored.info, "mismatch")
        medium.write(stored)
        shutil.copy(path, path.with_name("0" * 16 + ".kv"))
        assert medium.find(KEY) == [stored.info]
        assert [error.reason for error in problems] == ["mismatch", "corrupt"]

    def test_foreign_files_are_left_alone(self, open_medium: OpenMedium, tmp_path: Path) -> None:
        medium, stored = open_medium(FINGERPRINT), make_stored()
        medium.write(stored)
        for folder in (file_of(tmp_path).parent, tmp_path / "chunks"):
            (folder / "README").write_text("mine")
            (folder / "folder.kv").mkdir()
        assert_sound(medium, stored)
        assert list(medium.scan()) == [stored.info]

    def test_removed_while_it_runs(self, open_medium: OpenMedium, tmp_path: Path) -> None:
        """Of the cache's own folder a new one is made; the root may have been a mount, so it is not."""
        medium, stored = open_medium(FINGERPRINT), make_stored()
        medium.write(stored)
        shutil.rmtree(tmp_path / "chunks" / FINGERPRINT.digest)
        assert medium.find(KEY) == list(medium.scan()) == []
        medium.write(stored)
        assert_sound(medium, stored)
        shutil.rmtree(tmp_path / "chunks")
        for call in (lambda: medium.find(KEY), lambda: medium.write(stored)):
            assert reason_of(call) == "unavailable"
        assert not (tmp_path / "chunks").exists()

    def test_root_is_no_folder(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(TierError, match="file"):
            DiskMedium(tmp_path / "file", FINGERPRINT)


class TestKilled:
    def test_writers_killed_at_random(self, tmp_path: Path, problems: list[TierError]) -> None:
        """After each kill everything that is found is whole, and what was left is removed by the next that opens."""
        rng, context = random.Random(0), multiprocessing.get_context("fork")
        num_left = num_found = 0
        for round_ in range(80):
            writer = context.Process(target=write_forever, args=(tmp_path, round_))
            writer.start()
            wait_until(lambda: any(tmp_path.glob("*/writing/*.*")))
            time.sleep(rng.uniform(0.0, 0.03))
            assert writer.pid is not None
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            num_left += len(list(tmp_path.glob("*/writing/*")))
            medium = DiskMedium(tmp_path, LARGE)
            assert not list(tmp_path.glob("*/writing/*"))
            for info in medium.scan():
                assert_same(medium.read(info), large(info.start))
                num_found += 1
                medium.delete(info.entry_id)
            assert not problems
            if round_ > 15 and min(num_left, num_found) > 5:
                return
        pytest.fail(f"{num_left} kills hit a write, and {num_found} writes were over before")

    def test_a_living_writer_keeps_its_file(self, tmp_path: Path) -> None:
        context = multiprocessing.get_context("fork")
        writer = context.Process(target=write_forever, args=(tmp_path, 0))
        writer.start()
        try:
            deadline, seen = time.monotonic() + 3, 0
            while time.monotonic() < deadline and seen < 20:
                seen += len(list(tmp_path.glob("*/writing/*.*")))
                DiskMedium(tmp_path, LARGE)
            assert seen
            assert writer.is_alive(), "a write failed because its file was removed"
        finally:
            writer.kill()
            writer.join()

    def test_two_processes_in_one_folder(self, tmp_path: Path, problems: list[TierError]) -> None:
        """Both write, read and delete the same few entries: nothing fails, nothing mixes."""
        context = multiprocessing.get_context("fork")
        workers = [context.Process(target=work, args=(tmp_path, seed)) for seed in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(timeout=60)
        assert [worker.exitcode for worker in workers] == [0, 0, 0]
        medium = DiskMedium(tmp_path, LARGE)
        for info in medium.scan():
            medium.read(info)
        assert not problems
        assert not list(tmp_path.glob("*/writing/*"))


class TestFull:
    def test_full_device(self, small_device: Path) -> None:
        medium, large_one = DiskMedium(small_device, LARGE), large(0)
        small_one = make_stored(LARGE, length=2, start=1)
        medium.write(small_one)
        assert reason_of(lambda: medium.write(large_one)) == "full"
        assert not list(small_device.glob("*/writing/*"))
        assert_sound(medium, small_one)
        assert medium.delete(small_one.info.entry_id)
        medium.write(small_one)
        assert_sound(medium, small_one)

    def test_limit_of_file_sizes(self, tmp_path: Path) -> None:
        medium = DiskMedium(tmp_path, LARGE)
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # Python ignores the signal
        try:
            assert reason_of(lambda: medium.write(large(0))) == "full"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert not list(tmp_path.glob("*/writing/*"))
        assert medium.find(KEY) == []


class TestPermissions:
    def test_read_only_device(self, small_device: Path) -> None:
        stored = make_stored()
        DiskMedium(small_device, FINGERPRINT).write(stored)
        mount("-o", "remount,ro", str(small_device))
        medium = DiskMedium(small_device, FINGERPRINT)
        assert_sound(medium, stored)
        for call in (lambda: medium.write(make_stored(start=1)), lambda: medium.delete(stored.info.entry_id)):
            assert reason_of(call) == "unreadable"
        assert DiskMedium(small_device, LARGE).find(KEY) == []  # it has no folder, and cannot have one
        mount("-o", "remount,rw", str(small_device))
        medium.write(make_stored(start=1))

    def test_folder_of_somebody_else(self, public_folder: Path) -> None:
        stored = make_stored()
        DiskMedium(public_folder, FINGERPRINT).write(stored)
        let_everybody_read(public_folder)
        with as_nobody():
            medium = DiskMedium(public_folder, FINGERPRINT)
            assert_sound(medium, stored)
            for call in (lambda: medium.write(stored), lambda: medium.delete(stored.info.entry_id)):
                assert reason_of(call) == "unreadable"

    def test_unreadable_and_damaged_files_are_told_once(self, public_folder: Path, problems: list[TierError]) -> None:
        secret, damaged, sound = (make_stored(start=start) for start in range(3))
        mine = DiskMedium(public_folder, FINGERPRINT)
        for stored in (secret, damaged, sound):
            mine.write(stored)
        let_everybody_read(public_folder)
        files = {path.stem: path for path in public_folder.rglob("*.kv")}
        files[secret.info.name].chmod(0o600)
        os.truncate(files[damaged.info.name], 100)
        with as_nobody():
            medium = DiskMedium(public_folder, FINGERPRINT)
            for _ in range(2):
                assert medium.find(KEY) == list(medium.scan()) == [sound.info]
            MediumSuite.assert_fails(medium, secret.info, "unreadable")
        assert sorted(error.reason for error in problems) == ["corrupt", "unreadable"]

    def test_folder_that_may_not_be_entered(self, public_folder: Path) -> None:
        DiskMedium(public_folder, FINGERPRINT).write(make_stored())
        with as_nobody():
            assert reason_of(lambda: DiskMedium(public_folder, FINGERPRINT).find(KEY)) == "unreadable"


@pytest.fixture
def public_folder() -> Iterator[Path]:
    """A folder that every user may enter, which pytest's are not."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def let_everybody_read(folder: Path) -> None:
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)


@contextlib.contextmanager
def as_nobody() -> Iterator[None]:
    """This thread opens files as user nobody would; of threads only the kernel's own interface knows."""
    if os.geteuid():
        pytest.skip("only root can be somebody else")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.setfsuid(NOBODY)
    libc.setfsgid(NOBODY)
    try:
        yield
    finally:
        libc.setfsuid(0)
        libc.setfsgid(0)


def file_of(folder: Path) -> Path:
    (path,) = (path for path in folder.rglob("*.kv") if path.is_file())
    return path


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline, "the other process does nothing"


def large(start: int) -> StoredVariant:
    """4 MiB; `start` is in every byte."""
    stored = make_stored(LARGE, length=256, start=start)
    stored.k.view(torch.uint8).fill_(start % 251)
    stored.v.view(torch.uint8).fill_(start % 251)
    return stored


def write_forever(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)  # the threads of the parent do not exist here, and OpenMP would wait for them
    medium, stored = DiskMedium(folder, LARGE), large(seed)
    for start in range(seed, 10**9):
        info = replace(stored.info, start=start)
        stored.k.view(torch.uint8).fill_(start % 251)
        stored.v.view(torch.uint8).fill_(start % 251)
        medium.write(StoredVariant(info, stored.k, stored.v))


def work(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    base._log = pytest.fail  # type: ignore[assignment]  # in this process; what is skipped was damaged
    medium: Medium = DiskMedium(folder, LARGE)
    for _ in range(25):
        for found in act_at_random(medium, rng, large(rng.randrange(3))):
            assert_same(found, large(found.info.start))
    os._exit(0)  # the parent's tests are not this process' business
