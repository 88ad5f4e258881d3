"""HiCacheMedium: a storage backend of SGLang's HiCache, so that a store that is run for HiCache can be used.

Tested: the `file` backend of SGLang 0.5.23, on a CPU; nothing else. `seaweedfs` and `dynamic` (a class of your own)
take tensors by name as `file` does and are let through. All others are refused: `mooncake`, `simm`, `mori`, `eic`,
`aibrix` and `npu_memcache` move pages of HiCache's own host pool by address, `nixl`, `hf3fs` and `tensorcast` by slot,
and `sim` and `shm` keep no bytes.

The interface can store, fetch and ask for a name; it can neither list, replace nor delete. So:

    cc.<fingerprint>.<key>.<slot>      64 bytes: the variants of a chunk, in slots 0, 1, ... up to the first empty one
    cc.<fingerprint>.<place>.about     description (`record`)
    cc.<fingerprint>.<place>.<layer>   K, then V

A slot names a place, or says that one was deleted. What is in a place never changes.

Limits:
    - `scan` yields what this process has written or found, so nothing at start-up; `find` finds what others wrote.
    - `delete` hides an entry and frees nothing. Bytes are freed by the backend's own eviction (`max_size` of `file`).
    - A chunk has `NUM_SLOTS` slots, and each write or deletion uses one up; then writes are refused as full. Writing
      what is there already uses none.
    - Where slot i was evicted before slot i + 1, later ones are not found until it is written again.
    - Of two servers that write a variant of one chunk in the same instant, one may be lost; they never mix.
    - The interface does not say why it failed: `unavailable` stands for all of it.
"""

from __future__ import annotations

import secrets
import struct
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from sglang_chunk_cache.tiers.base import (
    Layer,
    LayerwiseMedium,
    OnProblem,
    StoredVariant,
    Target,
    TierError,
    VariantInfo,
    in_order,
)
from sglang_chunk_cache.tiers.fingerprint import Fingerprint
from sglang_chunk_cache.tiers.hicache_backend import NamedBlobs
from sglang_chunk_cache.tiers.record import (
    Record,
    check_layer,
    check_wanted,
    checksums_of,
    corrupt,
    decode,
    encode,
    layer_bytes,
    missing,
)

NUM_SLOTS = 64
_SLOT = struct.Struct("<8s8sqI4xI28x")  # magic, place, time in ns, length of the description (0: deleted), CRC-32
_MAGIC = b"ChunkIx\n"


class _Entry(NamedTuple):
    written_at: int
    place: str
    about_len: int
    """0 = deleted."""


class HiCacheMedium(LayerwiseMedium):
    """See the head of this file.

    Args:
        backend: one of `hicache_backend.BACKENDS`.
        settings: as `--hicache-storage-backend-extra-config` takes them; of `file`: "file_storage_path", "max_size".
        on_problem: see `LayerwiseMedium`.

    Raises:
        ValueError: a backend that cannot be used; whatever else the backend itself raises.
    """

    name = "hicache"

    def __init__(
        self,
        backend: str,
        fingerprint: Fingerprint,
        *,
        settings: Mapping[str, Any] | None = None,
        on_problem: OnProblem | None = None,
    ) -> None:
        super().__init__(fingerprint, on_problem)
        self._blobs = NamedBlobs(backend, fingerprint, settings or {}, f"cc.{fingerprint.digest}.")
        self._seen: dict[str, VariantInfo] = {}
        self._lock = threading.Lock()
        """Of `_seen`, and of this process' search for an empty slot."""

    def find(self, key: bytes) -> list[VariantInfo]:
        records = self._records_of(key)
        with self._lock:
            self._seen |= {record.info.entry_id: record.info for record in records}
        return in_order([record.info for record in records])

    def write(self, stored: StoredVariant) -> None:
        stored.check_fits(self.fingerprint)
        info, checksums = stored.info, checksums_of(stored)
        for record in self._records_of(info.key):
            if record.info == info and list(record.checksums) == checksums:
                return  # saves a slot
        place = secrets.token_hex(8)
        about = encode(self.fingerprint, info, checksums, place)
        for layer, (k, v) in enumerate(zip(stored.k, stored.v, strict=True)):
            self._blobs.set(f"{place}.{layer}", torch.cat((_flat(k), _flat(v))))
        self._blobs.set(f"{place}.about", _tensor(about))
        self._add_slot(info.key, _Entry(time.time_ns(), place, len(about)))
        with self._lock:
            self._seen[info.entry_id] = info

    def delete(self, info: VariantInfo) -> bool:
        with self._lock:
            self._seen.pop(info.entry_id, None)
        for record in self._records_of(info.key):
            if record.info.name == info.name:
                self._add_slot(info.key, _Entry(time.time_ns(), record.place, 0))
                return True
        return False

    def scan(self) -> Iterator[VariantInfo]:
        with self._lock:
            seen = list(self._seen.values())
        yield from seen

    def close(self) -> None:
        self._blobs.close()

    def _layers(self, info: VariantInfo, target: Target) -> Iterator[Layer]:
        where = f"{self._blobs.where} {info.entry_id}"
        found = next((record for record in self._records_of(info.key) if record.info.name == info.name), None)
        if found is None:
            raise missing(where)
        check_wanted(found.info, info, where)
        try:
            for layer in range(self.fingerprint.num_layers):
                k, v = target(layer)
                raw = self._blobs.get(f"{found.place}.{layer}", k.nbytes + v.nbytes)
                if raw is None:
                    raise missing(where)
                layer_bytes(k)[:] = layer_bytes(raw[: k.nbytes])
                layer_bytes(v)[:] = layer_bytes(raw[k.nbytes :])
                check_layer(layer, k, v, found, where)
                yield layer, k, v
        except TierError as error:
            if error.reason == "corrupt":
                self._hide(info.key, found.place)
            raise

    def _records_of(self, key: bytes) -> list[Record]:
        """The latest of each variant that is there in full; damaged ones are told and hidden."""
        entries = self._entries_of(key)
        deleted = {entry.place for entry in entries if not entry.about_len}
        records: dict[str, Record] = {}
        for entry in sorted(entries):
            if entry.place in deleted:
                continue
            where = f"{self._blobs.where} {key.hex()} {entry.place}"
            try:
                raw = self._blobs.get(f"{entry.place}.about", entry.about_len)
                layers = range(self.fingerprint.num_layers)
                if raw is None or not all(self._blobs.exists(f"{entry.place}.{layer}") for layer in layers):
                    continue  # evicted by the backend
                record = decode(bytes(layer_bytes(raw)), self.fingerprint, where)
                if (record.info.key, record.place) != (key, entry.place):
                    raise corrupt(where, f"holds the entry {record.info.entry_id}")
            except TierError as error:
                if error.reason not in ("corrupt", "mismatch"):
                    raise
                self._problems.tell(error)
                self._hide(key, entry.place)
            else:
                records[record.info.name] = record
        return list(records.values())

    def _entries_of(self, key: bytes) -> list[_Entry]:
        """What the slots of a chunk say."""
        entries = []
        for slot in range(NUM_SLOTS):
            try:
                raw = self._blobs.get(f"{key.hex()}.{slot}", _SLOT.size)
                if raw is None:
                    break
                magic, place, written_at, about_len, checksum = _SLOT.unpack(layer_bytes(raw))
                if magic != _MAGIC or checksum != _slot_checksum(place, written_at, about_len):
                    raise corrupt(f"{self._blobs.where} {key.hex()}.{slot}", "is no slot")
            except TierError as error:
                if error.reason != "corrupt":
                    raise
                self._problems.tell(error)  # and stays: nothing can be put in its place
            else:
                entries.append(_Entry(written_at, place.hex(), about_len))
        return entries

    def _add_slot(self, key: bytes, entry: _Entry) -> None:
        place = bytes.fromhex(entry.place)
        crc = _slot_checksum(place, entry.written_at, entry.about_len)
        raw = _tensor(_SLOT.pack(_MAGIC, place, entry.written_at, entry.about_len, crc))
        with self._lock:
            for slot in range(NUM_SLOTS):
                name = f"{key.hex()}.{slot}"
                if self._blobs.exists(name):
                    continue
                self._blobs.set(name, raw)
                found = self._blobs.get(name, _SLOT.size)
                if found is not None and torch.equal(found, raw):
                    return  # otherwise another server was faster
        remedy = "it was written and deleted too often; let the backend evict, or name another folder"
        raise TierError("full", f"{self._blobs.where} {key.hex()}", f"all {NUM_SLOTS} slots are taken", remedy)

    def _hide(self, key: bytes, place: str) -> None:
        with suppress(TierError):  # full or read-only: it is found damaged again
            self._add_slot(key, _Entry(time.time_ns(), place, 0))


def _flat(part: torch.Tensor) -> torch.Tensor:
    return part.view(torch.uint8).flatten()


def _tensor(raw: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(raw), dtype=torch.uint8)


def _slot_checksum(place: bytes, written_at: int, about_len: int) -> int:
    return zlib.crc32(place + struct.pack("<qI", written_at, about_len))
