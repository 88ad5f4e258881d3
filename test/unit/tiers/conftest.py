"""What several tests of media need: the problems that were told, and a device that is soon full; no deadlines."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from sglang_chunk_cache.kv.stored_variant import TierError
from sglang_chunk_cache.tiers import medium as base
from unit.tiers.mounting import mount, unmount

settings.register_profile("chunk_cache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chunk_cache")


@pytest.fixture
def problems(monkeypatch: pytest.MonkeyPatch) -> list[TierError]:
    """What media have logged of entries that they skipped."""
    found: list[TierError] = []
    monkeypatch.setattr(base, "_log", found.append)
    return found


@pytest.fixture
def small_device() -> Iterator[Path]:
    """A file system of 1 MiB, mounted."""
    with tempfile.TemporaryDirectory() as folder:
        if not mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", folder):
            pytest.skip("file systems cannot be mounted here (needs root)")
        try:
            yield Path(folder)
        finally:
            unmount(folder)
