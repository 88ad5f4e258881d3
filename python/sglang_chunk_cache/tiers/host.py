"""HostMedium: memory of this process. Nothing of it outlives the process, and no other process sees it.

It has no checksums, since the bytes never leave this process. A read returns the stored tensors themselves, not copies;
they stay alive as long as somebody holds them, even if the entry is deleted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.stored_variant import Layer, StoredVariant, VariantInfo, host_memory
from sglang_chunk_cache.tiers.medium import in_order
from sglang_chunk_cache.tiers.record import check_wanted, missing

_WHERE = "host memory"


class HostMedium:
    """See the head of this file. With CUDA the memory is page-locked, so entries take up to twice their bytes."""

    name = "host"

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self._entries: dict[bytes, dict[str, StoredVariant]] = {}
        self._lock = threading.Lock()

    def find(self, key: bytes) -> list[VariantInfo]:
        with self._lock:
            return in_order([stored.info for stored in self._entries.get(key, {}).values()])

    def read(self, info: VariantInfo) -> StoredVariant:
        with self._lock:
            stored = self._entries.get(info.key, {}).get(info.name)
        if stored is None:
            raise missing(f"{_WHERE} {info.entry_id}")
        check_wanted(stored.info, info, f"{_WHERE} {info.entry_id}")
        return stored

    def read_layers(self, info: VariantInfo) -> Iterator[Layer]:
        stored = self.read(info)
        for layer, (k, v) in enumerate(zip(stored.k, stored.v, strict=True)):
            yield layer, k, v

    def write(self, stored: StoredVariant) -> None:
        """A copy of the KV is kept; a transition, which nobody changes, is shared with whoever has it."""
        stored.check_fits(self.fingerprint)
        info = stored.info
        with host_memory(info.payload_len):
            k, v = self.fingerprint.empty(len(info.token_ids))
        k.copy_(stored.k)
        v.copy_(stored.v)
        with self._lock:
            self._entries.setdefault(info.key, {})[info.name] = StoredVariant(info, k, v, stored.transition)

    def delete(self, entry_id: EntryId) -> bool:
        with self._lock:
            variants = self._entries.get(entry_id.key, {})
            found = variants.pop(entry_id.name, None) is not None
            if found and not variants:
                del self._entries[entry_id.key]
            return found

    def scan(self, known: Iterable[bytes] = ()) -> Iterator[VariantInfo]:
        with self._lock:
            infos = [stored.info for variants in self._entries.values() for stored in variants.values()]
        yield from infos

    def read_note(self) -> bytes | None:
        return None

    def write_note(self, note: bytes) -> None:
        pass

    def close(self) -> None:
        with self._lock:
            self._entries.clear()
