"""Throttled: any medium, slowed down by real sleeping, for benchmarks and tests."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.stored_variant import Layer, StoredVariant, VariantInfo
from sglang_chunk_cache.tiers.medium import Medium


class Throttled:
    """A medium behind one pipe of `bytes_per_s` that all threads share; each call first waits for `latency_s`.

    The time the medium itself takes counts. Only payload takes bandwidth; scan is not slowed down.
    """

    def __init__(self, medium: Medium, bytes_per_s: float, latency_s: float = 0.0) -> None:
        assert bytes_per_s > 0 <= latency_s, f"{bytes_per_s} bytes/s, {latency_s} s"
        self.name = medium.name
        self._medium = medium
        self._bytes_per_s = bytes_per_s
        self._latency_s = latency_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def find(self, key: bytes) -> list[VariantInfo]:
        time.sleep(self._latency_s)
        return self._medium.find(key)

    def read(self, info: VariantInfo) -> StoredVariant:
        time.sleep(self._latency_s)
        done_at = self._take(info.payload_len)
        stored = self._medium.read(info)
        _sleep_until(done_at)
        return stored

    def read_layers(self, info: VariantInfo) -> Iterator[Layer]:
        time.sleep(self._latency_s)
        begun_at = time.monotonic()
        for layer, k, v in self._medium.read_layers(info):
            _sleep_until(self._take(k.nbytes + v.nbytes, begun_at))
            yield layer, k, v
            begun_at = time.monotonic()

    def write(self, stored: StoredVariant) -> None:
        time.sleep(self._latency_s)
        done_at = self._take(stored.info.payload_len)
        self._medium.write(stored)
        _sleep_until(done_at)

    def delete(self, entry_id: EntryId) -> bool:
        time.sleep(self._latency_s)
        return self._medium.delete(entry_id)

    def scan(self, known: Iterable[bytes] = ()) -> Iterator[VariantInfo]:
        return self._medium.scan(known)

    def read_note(self) -> bytes | None:
        return self._medium.read_note()

    def write_note(self, note: bytes) -> None:
        self._medium.write_note(note)

    def close(self) -> None:
        self._medium.close()

    def _take(self, num_bytes: int, begun_at: float | None = None) -> float:
        """The time at which `num_bytes` are through the pipe, behind what was sent before."""
        begun_at = time.monotonic() if begun_at is None else begun_at
        with self._lock:
            self._free_at = max(self._free_at, begun_at) + num_bytes / self._bytes_per_s
            return self._free_at


def _sleep_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))
