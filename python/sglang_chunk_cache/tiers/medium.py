"""Medium: moves the KV of chunks to and from one kind of storage. It decides nothing.

    find          the variants of a chunk that are there now; other servers may write to the same place
    read          one variant, verified: checksums, fingerprint and tokens
    read_layers   the same, layer by layer, each verified before it is yielded
    write         visible whole or not at all; an entry of the same identity is replaced
    delete        whether it was there
    scan          all entries of the fingerprint
    close         its connections and files; nothing is called after it

Promises: every call may come from any thread, several at a time. What was read is bit for bit what was written. An
entry that was found corrupt is removed where that is possible, so that it is not found again. Whatever cannot be done
is a `TierError`, never another exception of the storage; asserts are mistakes of the caller.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Protocol, TypeAlias

import torch

from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.stored_variant import Layer, Parts, StoredVariant, TierError, VariantInfo, host_memory

logger = logging.getLogger(__name__)


class Medium(Protocol):
    name: str

    def find(self, key: bytes) -> list[VariantInfo]:
        """Variants ascending by (generation, name). Corrupt entries are skipped, told to `Problems` and removed.

        Raises:
            TierError: timeout, unavailable, unreadable.
        """

    def read(self, info: VariantInfo) -> StoredVariant:
        """`info` comes from `find` or `scan`. The tensors may be shared with other readers: do not write to them.

        Raises:
            TierError: any reason; full if host memory is, missing if the entry was deleted or replaced meanwhile.
        """

    def read_layers(self, info: VariantInfo) -> Iterator[Layer]:
        """Layers with KV in order; nothing is read, and nothing raised, before the first `next`. Raises as `read`."""

    def write(self, stored: StoredVariant) -> None:
        """Stores a variant; its tensors may change as soon as this returns.

        Raises:
            TierError: timeout, unavailable, full, unreadable; nothing of the entry is visible then.
        """

    def delete(self, entry_id: EntryId) -> bool:
        """Deletes an entry; returns whether it was there. A read under way succeeds, or raises missing.

        Raises:
            TierError: timeout, unavailable, unreadable.
        """

    def scan(self, known: Iterable[bytes] = ()) -> Iterator[VariantInfo]:
        """All entries, in no order; those that come and go meanwhile may be among them. Raises and skips as `find`.

        Args:
            known: chunks to look for if the medium cannot be listed.
        """

    def read_note(self) -> bytes | None:
        """What `write_note` has left here last, by this server or another; None = nothing.

        Raises:
            TierError: timeout, unavailable, unreadable.
        """

    def write_note(self, note: bytes) -> None:
        """Keeps a note beside the entries; it is no entry. A medium that does not outlive the process keeps none.

        Raises:
            TierError: timeout, unavailable, full, unreadable.
        """

    def close(self) -> None: ...


Target: TypeAlias = Callable[[int], Parts]
"""Tensors that the parts of a layer of an entry are put into."""


BATCH_LEN = 8 << 20
"""Bytes that one round trip to a store moves, and at least a layer; they take memory beside the tensors themselves."""


class LayerwiseMedium(ABC):
    """A medium that fetches layer after layer, for one fingerprint."""

    name: str

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self._problems = Problems()

    def read(self, info: VariantInfo) -> StoredVariant:
        states = self.fingerprint.states
        with host_memory(info.payload_len):
            k, v = self.fingerprint.empty(info.length)
            stored = StoredVariant(info, k, v, None if states is None else states.empty())
        for _ in self._layers(info, stored.layers.__getitem__):
            pass
        return stored

    def read_layers(self, info: VariantInfo) -> Iterator[Layer]:
        layers = self._layers(info, lambda _: self._empty_layer(info))
        for layer, (k, v) in islice(layers, self.fingerprint.num_layers):
            yield layer, k, v

    def batches(self, info: VariantInfo) -> list[range]:
        """Layers of an entry that go in one round trip each, in order; those of one batch have equal sizes."""
        found = []
        for group in self.fingerprint.layer_groups:
            step = max(1, BATCH_LEN // sum(self.fingerprint.part_lens(group.start, info.length)))
            found += [group[first : first + step] for first in range(0, len(group), step)]
        return found

    def _empty_layer(self, info: VariantInfo) -> tuple[torch.Tensor, torch.Tensor]:
        with host_memory(self.fingerprint.layer_len(info.length)):
            return self.fingerprint.empty_layer(info.length)

    @abstractmethod
    def _layers(self, info: VariantInfo, target: Target) -> Iterator[tuple[int, Parts]]:
        """Reads all layers of an entry into tensors of `target`, which is called once the description is verified."""


class Problems:
    """Reports entries that `find` or `scan` skip: each is logged once, however often it is met; the thread that met it
    learns of it each time, by `take_skipped`."""

    def __init__(self) -> None:
        self._told: set[str] = set()
        self._lock = threading.Lock()

    def tell(self, error: TierError) -> None:
        _met.reason = error.reason
        with self._lock:
            if error.where in self._told:
                return
            self._told.add(error.where)
        _log(error)


class _Met(threading.local):
    reason: str | None = None


_met = _Met()


def take_skipped() -> str | None:
    """Why `find` or `scan` last skipped an entry in this thread since the previous call; None if none was skipped."""
    reason, _met.reason = _met.reason, None
    return reason


def _log(error: TierError) -> None:
    logger.warning("Chunk cache: a stored entry is skipped (%s): %s", error.reason, error)


def in_order(infos: list[VariantInfo]) -> list[VariantInfo]:
    """The order that `find` promises."""
    return sorted(infos, key=lambda info: (info.generation, info.name))
