"""MooncakeMedium against a real master, which is killed, frozen and restarted, and clients of other processes."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest

from unit.tiers.mooncake_master import MooncakeMaster, is_there, library_env

if not is_there():
    pytest.skip("no Mooncake here (make mooncake)", allow_module_level=True)

from sglang_chunk_cache.kv.stored_variant import TierError
from sglang_chunk_cache.tiers import mooncake
from sglang_chunk_cache.tiers.medium import Medium
from sglang_chunk_cache.tiers.mooncake import NUM_SLOTS, MooncakeMedium
from unit.tiers import mooncake_writer
from unit.tiers.medium_suite import (
    FINGERPRINT,
    KEY,
    MediumSuite,
    OpenMedium,
    assert_same,
    assert_sound,
    make_stored,
    reason_of,
)

TIMEOUT_S = 1.0
OPTIONS = "?segment=64MiB"


@pytest.fixture(scope="module")
def running() -> Iterator[MooncakeMaster]:
    master = MooncakeMaster()
    master.start()
    yield master
    master.kill()


@pytest.fixture
def opened(running: MooncakeMaster) -> Iterator[OpenMedium]:
    """Opens media at one store, and closes them: what it holds lies in their memory."""
    media: list[MooncakeMedium] = []

    def open_medium(fingerprint: Any = FINGERPRINT, options: str = OPTIONS) -> MooncakeMedium:
        media.append(MooncakeMedium(running.url + options, fingerprint))
        return media[-1]

    yield open_medium
    for medium in media:
        medium.close()
    raw = MooncakeMedium(running.url + "?segment=0", FINGERPRINT)
    raw._call(lambda store: store.remove_all(True))
    raw.close()


class TestMooncake(MediumSuite):
    lists: ClassVar[bool] = False

    @pytest.fixture
    def open_medium(self, opened: OpenMedium) -> OpenMedium:
        """The memory is one medium's, which stays when others are closed."""
        opened(FINGERPRINT)._call(lambda store: None)
        return lambda fingerprint: opened(fingerprint, "?segment=0")

    def test_replaced_and_deleted_payloads_are_freed(self, medium: Medium, running: MooncakeMaster) -> None:
        stored = make_stored()
        for _ in range(3):
            medium.write(stored)
        assert len(running.held()) == 2  # description and payload
        medium.delete(stored.info.entry_id)
        assert running.held() == []

    def test_damaged_payload(self, medium: MooncakeMedium, running: MooncakeMaster) -> None:
        stored = make_stored()
        for damage in ("flip", "cut", "empty"):
            medium.write(stored)
            payload = next(key for key in running.held() if stored.info.name in key)
            value = bytearray(medium._call(lambda store, key=payload: store.get(key)))
            value[3] ^= 1
            new = {"flip": bytes(value), "cut": bytes(value[: len(value) // 2]), "empty": b"x"}[damage]
            assert medium._call(lambda store, key=payload, new=new: store.upsert(key, new)) == 0
            MediumSuite.assert_fails(medium, stored.info, "corrupt")
            assert medium.find(KEY) == []
            assert running.held() == []

    def test_damaged_description(self, medium: MooncakeMedium, problems: list[TierError]) -> None:
        stored, sound = make_stored(), make_stored(start=1)
        medium.write(sound)
        medium.write(stored)
        (slot,) = (entry.slot for entry in medium._entries(KEY) if entry.record.info == stored.info)
        for damage in (b"\x80\x04K\x01.", b"{}", b"ChunkKV\n" + b"\xff" * 100):
            assert medium._call(lambda store, damage=damage: store.upsert(slot, damage)) == 0
            MediumSuite.assert_fails(medium, stored.info, "missing")
            assert medium.find(KEY) == [sound.info]
        assert {error.reason for error in problems} == {"corrupt"}

    def test_evicted_by_the_store(self, medium: MooncakeMedium, running: MooncakeMaster) -> None:
        stored, other = make_stored(), make_stored(start=1)
        medium.write(stored)
        payload = next(key for key in running.held() if stored.info.name in key)
        medium.write(other)
        medium._remove([payload])
        MediumSuite.assert_fails(medium, stored.info, "missing")
        assert_sound(medium, other)

    def test_what_was_evicted_frees_its_slot(self, medium: MooncakeMedium, running: MooncakeMaster) -> None:
        stored, other = make_stored(), make_stored(start=1)
        for one in (stored, other):
            medium.write(one)
        medium._remove([key for key in running.held() if stored.info.name in key])
        assert medium.find(KEY) == [other.info]
        assert len(running.held()) == 2, "description and payload of the other"

    def test_more_variants_than_slots(self, medium: Medium) -> None:
        written = [make_stored(start=start) for start in range(NUM_SLOTS)]
        for stored in written:
            medium.write(stored)
        with pytest.raises(TierError, match="holds 32 variants") as caught:
            medium.write(make_stored(start=NUM_SLOTS))
        assert caught.value.reason == "full"
        assert_sound(medium, *written)
        medium.delete(written[3].info.entry_id)
        medium.write(make_stored(start=NUM_SLOTS))

    def test_no_room(self, opened: OpenMedium) -> None:
        medium = opened(mooncake_writer.LARGE, "?segment=16MiB")
        with pytest.raises(TierError) as caught:
            medium.write(make_stored(mooncake_writer.LARGE, length=4000))
        assert caught.value.reason == "full"
        assert medium.find(KEY) == []

    def test_of_another_process(self, opened: OpenMedium, running: MooncakeMaster) -> None:
        """A replica writes, and is killed: what lay in its memory is gone, what lay in ours is there."""
        stored = mooncake_writer.stored()
        for segment in ("0", "64MiB"):
            mine = opened(mooncake_writer.LARGE, OPTIONS if segment == "0" else "?segment=0")
            assert mine.find(KEY) == []
            command = [sys.executable, mooncake_writer.__file__, f"{running.url}?segment={segment}", *sys.path]
            with subprocess.Popen(command, stdout=subprocess.PIPE, env={**library_env()}) as other:
                assert other.stdout is not None
                while b"written" not in (line := other.stdout.readline()):
                    assert line, "the other process ended"
                assert_sound(mine, stored)
                other.kill()
            if segment == "0":
                assert_sound(mine, stored)
                mine.delete(stored.info.entry_id)
                mine.close()
            else:
                until(lambda mine=mine: mine.find(KEY) == [])
                until(lambda mine=mine: problem_of(lambda: mine.write(stored)) == "full")  # its memory is given up

    def test_killed_and_restarted(self, opened: OpenMedium, running: MooncakeMaster) -> None:
        medium, stored = opened(), make_stored()
        medium.write(stored)
        running.kill()
        for call in (lambda: medium.find(KEY), lambda: medium.read(stored.info), lambda: medium.write(stored)):
            assert reason_of(call) in ("unavailable", "timeout")
        running.start()
        until(lambda: comes_back(medium, stored))

    def test_not_there_at_first(self, running: MooncakeMaster) -> None:
        master = MooncakeMaster()
        medium = MooncakeMedium(master.url + OPTIONS, FINGERPRINT)
        began = time.monotonic()
        assert reason_of(lambda: medium.find(KEY)) == "unavailable"
        assert time.monotonic() - began < 2 * mooncake.TIMEOUT_S
        master.start()
        try:
            until(lambda: not problem_of(lambda: medium.write(make_stored())))
        finally:
            medium.close()
            master.kill()

    def test_frozen(self, opened: OpenMedium, running: MooncakeMaster, monkeypatch: pytest.MonkeyPatch) -> None:
        medium, stored = opened(), make_stored()
        medium.write(stored)
        monkeypatch.setattr(mooncake, "TIMEOUT_S", TIMEOUT_S)
        running.freeze()
        try:
            assert reason_of(lambda: medium.find(KEY)) == "timeout"
            monkeypatch.setattr(mooncake, "TIMEOUT_S", 0.01)
            for _ in range(20):
                assert reason_of(lambda: medium.find(KEY)) == "timeout"
            assert sum(thread.name == "mooncake" for thread in threading.enumerate()) <= mooncake._MAX_UNANSWERED
            monkeypatch.setattr(mooncake, "TIMEOUT_S", TIMEOUT_S)
        finally:
            running.go_on()
        assert isinstance(medium, MooncakeMedium)
        until(lambda: not any(thread.is_alive() for thread in medium._unanswered))
        until(lambda: medium.find(KEY) == [stored.info])


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("mooncake://host", "no master"),
        ("mooncake://:1", "no master"),
        ("mooncake://host:1?segments=1GB", "unknown option 'segments'"),
        ("mooncake://host:1?segment=much", "not a number of bytes"),
        ("mooncake://host:1?replicas=0", "replicas=0"),
    ],
)
def test_bad_urls(url: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        MooncakeMedium(url, FINGERPRINT)


def problem_of(call: Callable[[], Any]) -> str:
    """Why it fails; empty where it does not."""
    try:
        call()
    except TierError as error:
        return error.reason
    return ""


def comes_back(medium: Medium, stored: Any) -> bool:
    """A restarted master learns of its segments one by one; until then a transfer may fail."""
    if problem_of(lambda: medium.write(stored)) or problem_of(lambda: medium.read(stored.info)):
        return False
    assert_same(medium.read(stored.info), stored)
    return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.2)
