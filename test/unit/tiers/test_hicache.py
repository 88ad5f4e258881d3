"""HiCacheMedium over SGLang's own file backend."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from sglang_chunk_cache.tiers.base import Medium, TierError
from sglang_chunk_cache.tiers.hicache import NUM_SLOTS, HiCacheMedium
from sglang_chunk_cache.tiers.hicache_backend import BACKENDS
from unit.tiers.medium_suite import (
    FINGERPRINT,
    KEY,
    MediumSuite,
    OpenMedium,
    assert_same,
    assert_sound,
    make_stored,
)


class TestHiCacheFile(MediumSuite):
    lists = False

    @pytest.fixture
    def open_medium(self, tmp_path: Path) -> OpenMedium:
        settings = {"file_storage_path": str(tmp_path)}
        return lambda fingerprint, **kwargs: HiCacheMedium("file", fingerprint, settings=settings, **kwargs)

    def test_scan_knows_what_was_found(self, open_medium: OpenMedium) -> None:
        stored = make_stored()
        open_medium(FINGERPRINT).write(stored)
        medium = open_medium(FINGERPRINT)
        assert list(medium.scan()) == []
        medium.find(KEY)
        assert list(medium.scan()) == [stored.info]

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
    def test_damaged_payload(self, open_medium: OpenMedium, tmp_path: Path, damage: str) -> None:
        medium, stored = open_medium(FINGERPRINT), make_stored()
        medium.write(stored)
        break_file(file_of(tmp_path, ".1"), damage)
        MediumSuite.assert_fails(medium, stored.info, "corrupt")
        assert medium.find(KEY) == []
        medium.write(stored)
        assert_sound(medium, stored)

    @pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
    @pytest.mark.parametrize("part", [".about", f"{KEY.hex()}.0"])
    def test_damaged_description(
        self, open_medium: OpenMedium, tmp_path: Path, problems: list[TierError], part: str, damage: str
    ) -> None:
        medium, stored = open_medium(FINGERPRINT, on_problem=problems.append), make_stored()
        medium.write(stored)
        break_file(file_of(tmp_path, part), damage)
        for _ in range(2):
            assert medium.find(KEY) == []
        MediumSuite.assert_fails(medium, stored.info, "missing")
        assert [error.reason for error in problems] == ["corrupt"]
        medium.write(stored)
        assert_sound(medium, stored)

    @pytest.mark.parametrize("part", [".0", ".2", ".about"])
    def test_evicted_in_part(self, open_medium: OpenMedium, tmp_path: Path, part: str) -> None:
        medium, stored = open_medium(FINGERPRINT), make_stored()
        medium.write(stored)
        other = make_stored(start=1)
        name = file_of(tmp_path, part)
        medium.write(other)
        name.unlink()
        assert_sound(medium, other)
        MediumSuite.assert_fails(medium, stored.info, "missing")

    def test_slots(self, open_medium: OpenMedium, tmp_path: Path) -> None:
        """What is there is not written again; each change takes a slot; then the chunk is full, and still readable."""
        medium, stored = open_medium(FINGERPRINT), make_stored()
        for _ in range(3):
            medium.write(stored)
        assert len(slots_of(tmp_path)) == 1
        for _ in range(NUM_SLOTS // 2 - 1):
            medium.delete(stored.info)
            medium.write(stored)
        assert len(slots_of(tmp_path)) == NUM_SLOTS - 1
        medium.write(make_stored(start=1))
        with pytest.raises(TierError, match="slots") as caught:
            medium.delete(stored.info)
        assert caught.value.reason == "full"
        assert_sound(medium, stored, make_stored(start=1))

    def test_its_own_eviction(self, tmp_path: Path) -> None:
        """Its limit holds a few variants; what it evicts is not found, and what is found can be read."""
        settings = {"file_storage_path": str(tmp_path), "max_size": 16384}
        medium = HiCacheMedium("file", FINGERPRINT, settings=settings)
        variants = [make_stored(key=bytes([i]) * 16, seed=i) for i in range(30)]
        for stored in variants:
            medium.write(stored)
        found = [stored for stored in variants if medium.find(stored.info.key)]
        assert 0 < len(found) < 30
        for stored in found:
            assert_same(medium.read(stored.info), stored)

    def test_too_large_for_it(self, tmp_path: Path) -> None:
        medium = HiCacheMedium("file", FINGERPRINT, settings={"file_storage_path": str(tmp_path), "max_size": 4096})
        with pytest.raises(TierError) as caught:
            medium.write(make_stored(length=2000))
        assert caught.value.reason == "unavailable"
        assert medium.find(KEY) == []

    def test_full_device(self, small_device: Path) -> None:
        fingerprint = replace(FINGERPRINT, kv_heads=8, head_dim=64, v_head_dim=64)
        medium = HiCacheMedium("file", fingerprint, settings={"file_storage_path": str(small_device)})
        stored = make_stored(fingerprint, length=4)
        medium.write(stored)
        with pytest.raises(TierError) as caught:
            medium.write(make_stored(fingerprint, length=1024, start=1))
        assert caught.value.reason == "unavailable"
        assert_sound(medium, stored)

    def test_hicache_itself_may_use_the_folder(self, medium: Medium, tmp_path: Path) -> None:
        stored = make_stored()
        (tmp_path / "0123abcd_model_0_1.bin").write_bytes(b"a page of HiCache")
        medium.write(stored)
        assert_sound(medium, stored)


@pytest.mark.parametrize("backend", ["mooncake", "nixl", "shm", "nonsense"])
def test_backends_that_cannot_be_used(backend: str) -> None:
    with pytest.raises(ValueError, match=f"{backend}.*use {', '.join(BACKENDS)}"):
        HiCacheMedium(backend, FINGERPRINT)


def file_of(folder: Path, part: str) -> Path:
    """The one of a description, a layer (".1") or a slot (key and ".0")."""
    others = set() if KEY.hex() in part else set(slots_of(folder))
    (path,) = (path for path in set(folder.iterdir()) - others if f"{part}_" in path.name)
    return path


def slots_of(folder: Path) -> list[Path]:
    return [path for path in folder.iterdir() if f".{KEY.hex()}." in path.name]


def break_file(path: Path, damage: str) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes({"flip": bytes(raw), "cut": bytes(raw[:-1]), "empty": b""}[damage])
