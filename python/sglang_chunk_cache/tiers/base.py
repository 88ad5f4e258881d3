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
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias

import torch

from chunk_cache.chunk_statistics import ChunkStatistics
from chunk_cache.keys import DEFAULT_PARTITION
from chunk_cache.tier_ledger import EntryId, Traits, context_digest
from chunk_cache.variant import Rank, rank_of, variant_name
from sglang_chunk_cache.tiers.fingerprint import Fingerprint, weights_digest

__all__ = [
    "TIER_REASONS",
    "Fingerprint",
    "LayerwiseMedium",
    "Medium",
    "Problems",
    "StoredVariant",
    "TierError",
    "VariantInfo",
    "host_memory",
    "weights_digest",
]

logger = logging.getLogger(__name__)

TIER_REASONS = ("corrupt", "mismatch", "missing", "timeout", "unavailable", "full", "unreadable")
"""Checksum, truncated or bad header; fingerprint or tokens differ; gone since it was found, which is no fault of the
medium; too slow; server or folder gone; no space, quota or host memory; permission or I/O error."""

Layer: TypeAlias = tuple[int, torch.Tensor, torch.Tensor]
"""Index, K `[length, kv_heads, head_dim]`, V `[length, kv_heads, v_head_dim]`, CPU."""


class TierError(Exception):
    """Storage that failed; the message is ``<path or url>: <problem>; <remedy>``."""

    def __init__(self, reason: str, where: str, problem: str, remedy: str) -> None:
        assert reason in TIER_REASONS, f"unknown reason {reason!r}"
        super().__init__(f"{where}: {problem}; {remedy}")
        self.reason = reason
        self.where = where


@contextmanager
def host_memory(num_bytes: int) -> Iterator[None]:
    """Tensors of so many bytes in host memory are made inside, and nothing else.

    Raises:
        TierError: full.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch has no error class of its own for host memory
        remedy = "give the host tier fewer bytes, let fewer requests wait, or give the machine more"
        raise TierError("full", "host memory", f"no {num_bytes} bytes left ({error})", remedy) from error


class Listed(NamedTuple):
    """What a ledger keeps in mind of a stored variant."""

    entry_id: EntryId
    payload_len: int
    partition: bytes
    traits: Traits


@dataclass(frozen=True, slots=True, eq=False)
class VariantInfo:
    """One stored variant without its KV. Equal where all fields are, the statistics bit for bit."""

    key: bytes
    """`chunk_key` of the chunk."""
    token_ids: array[int]
    """int64, `[length]`; must not change."""
    start: int
    """Rotary position of the first token in the stored K."""
    generation: int
    context: tuple[bytes, ...]
    """Keys of the chunks in front of it."""
    statistics: ChunkStatistics | None
    payload_len: int
    """Bytes of its KV; media take about 500 more for the description, and 11 per token, 22 with statistics."""
    is_prepared: bool = False
    """Whether `context` are neighbours that it was computed behind ahead of time."""
    system: bytes = b""
    """Marks of the system prompt in front of these (`chunk_cache.system_prompt`)."""
    partition: bytes = DEFAULT_PARTITION
    """`partition_key` of the tenant; its digest is in `key` too, from which nobody gets it back."""

    def __post_init__(self) -> None:
        assert self.token_ids.typecode == "q", "token ids are an array('q')"
        assert len(self.token_ids), "a chunk without tokens"
        assert min(self.start, self.generation, self.payload_len) >= 0, f"{self.start}, {self.generation}"

    @property
    def name(self) -> str:
        """See `variant_name`."""
        return variant_name(self.start, self.generation, self.is_prepared, self.system, self.context)

    @property
    def rank(self) -> Rank:
        """As of a `Variant`."""
        return rank_of(self.generation, self.is_prepared)

    @property
    def entry_id(self) -> EntryId:
        return EntryId(self.key, self.name)

    @property
    def listed(self) -> Listed:
        traits = Traits(self.generation, self.is_prepared, context_digest(self.context))
        return Listed(self.entry_id, self.payload_len, self.partition, traits)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, VariantInfo):
            return NotImplemented
        return self._values() == other._values()

    def __hash__(self) -> int:
        return hash((self.key, self.start, self.generation, self.system, self.context))

    def _values(self) -> tuple[object, ...]:
        return (*self.identity(), self.partition, self.payload_len, self.statistics and self.statistics.tobytes())

    def identity(self) -> tuple[object, ...]:
        """What must agree for a stored entry to be the one that was asked for."""
        return (self.key, self.token_ids, self.start, self.generation, self.system, self.context, self.is_prepared)


@dataclass(frozen=True, slots=True, eq=False)
class StoredVariant:
    """A variant with its KV, CPU and contiguous; whoever holds it does not change it."""

    info: VariantInfo
    k: torch.Tensor
    """`[num_layers, length, kv_heads, head_dim]`, rotated to position `info.start`."""
    v: torch.Tensor
    """`[num_layers, length, kv_heads, v_head_dim]`."""

    def __post_init__(self) -> None:
        k, v = self.k, self.v
        assert k.ndim == v.ndim == 4, f"{k.ndim} and {v.ndim} dimensions"
        assert (k.shape[:3], k.dtype) == (v.shape[:3], v.dtype), f"{k.dtype} {k.shape}, {v.dtype} {v.shape}"
        assert all(part.device.type == "cpu" and part.is_contiguous() for part in (k, v)), "not contiguous on the CPU"
        assert k.shape[1] == len(self.info.token_ids), f"{k.shape[1]} rows, {len(self.info.token_ids)} tokens"
        assert k.nbytes + v.nbytes == self.info.payload_len, f"{k.nbytes + v.nbytes} bytes, {self.info.payload_len}"

    def check_fits(self, fingerprint: Fingerprint) -> None:
        """Asserts that it has the layers, heads, dimensions and dtype of `fingerprint`."""
        f, (num_layers, _, kv_heads, head_dim) = fingerprint, self.k.shape
        mine = (num_layers, kv_heads, head_dim, self.v.shape[3], self.k.dtype)
        theirs = (f.num_layers, f.kv_heads, f.head_dim, f.v_head_dim, f.torch_dtype)
        assert mine == theirs, f"a variant of {mine} in a medium for {theirs}"


class Medium(Protocol):
    """See the head of this file."""

    name: str

    def find(self, key: bytes) -> list[VariantInfo]:
        """Ascending by (generation, name). Corrupt entries are skipped, told to `Problems` and removed, never raised.

        Raises:
            TierError: timeout, unavailable, unreadable.
        """

    def read(self, info: VariantInfo) -> StoredVariant:
        """`info` comes from `find` or `scan`. The tensors may be shared with other readers: do not write to them.

        Raises:
            TierError: any reason, full where host memory is; missing where it was deleted or replaced meanwhile.
        """

    def read_layers(self, info: VariantInfo) -> Iterator[Layer]:
        """Layers in order; nothing is read, and nothing raised, before the first `next`. Raises as `read`."""

    def write(self, stored: StoredVariant) -> None:
        """The tensors may change as soon as it returns.

        Raises:
            TierError: timeout, unavailable, full, unreadable; nothing of it is visible then.
        """

    def delete(self, entry_id: EntryId) -> bool:
        """Whether it was there. Reads that run end well, or with missing.

        Raises:
            TierError: timeout, unavailable, unreadable.
        """

    def scan(self, known: Iterable[bytes] = ()) -> Iterator[VariantInfo]:
        """All entries, in no order; those that come and go meanwhile may be among them. Raises and skips as `find`.

        Args:
            known: chunks that are looked for where the medium cannot be listed.
        """

    def read_note(self) -> bytes | None:
        """What `write_note` has left here last, by this server or another; None = nothing.

        Raises:
            TierError: timeout, unavailable, unreadable.
        """

    def write_note(self, note: bytes) -> None:
        """Keeps a note beside the entries; it is no entry. What does not outlive the process keeps none.

        Raises:
            TierError: timeout, unavailable, full, unreadable.
        """

    def close(self) -> None: ...


Target: TypeAlias = Callable[[int], tuple[torch.Tensor, torch.Tensor]]
"""Tensors that K and V of a layer are put into."""


BATCH_LEN = 8 << 20
"""Bytes that one round trip to a store moves, and at least a layer: what is in flight beside the tensors themselves."""


class LayerwiseMedium(ABC):
    """A medium that fetches layer after layer, for one fingerprint."""

    name: str

    def __init__(self, fingerprint: Fingerprint) -> None:
        self.fingerprint = fingerprint
        self._problems = Problems()

    def read(self, info: VariantInfo) -> StoredVariant:
        with host_memory(info.payload_len):
            k, v = self.fingerprint.empty(len(info.token_ids))
        for _ in self._layers(info, lambda layer: (k[layer], v[layer])):
            pass
        return StoredVariant(info, k, v)

    def read_layers(self, info: VariantInfo) -> Iterator[Layer]:
        return self._layers(info, lambda _: self._empty_layer(info))

    def batches(self, info: VariantInfo) -> list[range]:
        """Layers of a variant that go in one round trip each, in order."""
        num_layers = self.fingerprint.num_layers
        step = max(1, BATCH_LEN * num_layers // info.payload_len)
        return [range(first, min(first + step, num_layers)) for first in range(0, num_layers, step)]

    def _empty_layer(self, info: VariantInfo) -> tuple[torch.Tensor, torch.Tensor]:
        length = len(info.token_ids)
        with host_memory(self.fingerprint.layer_len(length)):
            return self.fingerprint.empty_layer(length)

    @abstractmethod
    def _layers(self, info: VariantInfo, target: Target) -> Iterator[Layer]:
        """`read_layers` into tensors of `target`; the description is verified before the first is asked for."""


class Problems:
    """Entries that `find` or `scan` skip: each is logged once, however often it is met, and told each time to the
    thread that met it: `take_skipped`."""

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
    """Why this thread has skipped an entry last, in `find` or `scan`, since it was asked; None where it has not."""
    reason, _met.reason = _met.reason, None
    return reason


def _log(error: TierError) -> None:
    logger.warning("Chunk cache: a stored entry is skipped (%s): %s", error.reason, error)


def in_order(infos: list[VariantInfo]) -> list[VariantInfo]:
    """The order that `find` promises."""
    return sorted(infos, key=lambda info: (info.generation, info.name))
