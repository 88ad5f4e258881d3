"""TierSearch: finds a chunk in the tiers and reads it; a worker's part of loading.

Verbs: `find` (in the first tier below the host's that has a usable variant), `find_in` (in one tier).

Promises: nothing here changes what the scheduler sees; what was tried and what is absent is told, for the ledgers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from chunk_cache.index.reusability import use_weight
from chunk_cache.index.variant import Rank
from sglang_chunk_cache.kv.layer_stream import LayerStream
from sglang_chunk_cache.kv.stored_variant import EntrySummary, StoredVariant, TierError, VariantInfo, host_memory
from sglang_chunk_cache.tiers.medium import take_skipped
from sglang_chunk_cache.tiers.tier import Tier

if TYPE_CHECKING:
    from chunk_cache.index.need import Need
    from chunk_cache.keys import Partition
    from sglang_chunk_cache.kv.fingerprint import Fingerprint

logger = logging.getLogger(__name__)


BAD_ENTRY = ("corrupt", "mismatch", "missing")
"""Reasons for which an entry is forgotten; for the others the same one may be read later."""


@dataclass(frozen=True)
class Wanted:
    """A chunk that a waiting request needs."""

    key: bytes
    token_ids: array[int]
    partition: Partition
    need: Need
    """Where, and which variants fit; the first of several requests that wait for it says so for all."""


class Outcome(NamedTuple):
    """What a request keeps of `Found` once its chunks are in the pool; `tier` is empty where it was not found."""

    tier: str
    reason: str | None


@dataclass(frozen=True)
class Found:
    """What became of one chunk: a variant, or why there is none; `reason` None = no tier has it.

    Attributes:
        tier: where it was found, or where the trouble was; empty where it was not found.
        seconds: that reading it took.
        weight: what this use adds to its reuse frequency.
        stream: brings the layers that are not there yet; None = all are.
        reads: what was tried to be read, and why it could not be; None = it could.
        seen: variants of it that tiers below the host's have, whether tried or not.
        absent: tiers that were searched and have no variant of it.
    """

    stored: StoredVariant | None = None
    tier: str = ""
    reason: str | None = None
    seconds: float = 0.0
    weight: float = 1.0
    stream: LayerStream | None = None
    reads: tuple[tuple[Tier, VariantInfo, str | None], ...] = ()
    seen: tuple[tuple[Tier, EntrySummary], ...] = ()
    absent: tuple[Tier, ...] = ()

    @property
    def vote(self) -> int:
        """Equal on ranks that found the same, and in the same way; 1 = there is none, 0 = that is not known."""
        if self.stored is None:
            return int(self.reason in (None, *(f"tier_{reason}" for reason in BAD_ENTRY)))
        # The statistics too: rows are chosen by them, and all ranks must choose the same.
        info = self.stored.info
        hasher = hashlib.blake2b(info.name.encode(), digest_size=7)
        if info.statistics is not None:
            hasher.update(info.statistics.tobytes())
        return 2 * (1 + int.from_bytes(hasher.digest(), "big")) + (self.stream is not None)

    def without_kv(self) -> Outcome:
        return Outcome("" if self.stored is None else self.tier, self.reason)

    @property
    def outcome(self) -> str:
        """Label of the metric."""
        return self.reason or ("not_stored" if self.stored is None else "ok")


NOT_STORED = Found()


class TierSearch:
    """See the head of this file.

    Args:
        tiers: in the order in which they are asked.
        prefers_prepared: prepared variants are read before exact ones.
    """

    def __init__(self, tiers: Sequence[Tier], fingerprint: Fingerprint, prefers_prepared: bool) -> None:
        self._tiers = tuple(tiers)
        self._empty = fingerprint.empty
        self._prefers_prepared = prefers_prepared

    def find(self, chunk: Wanted, num_layers: int | None) -> Found:
        """The best variant of the first tier below the host's that has one; in a worker.

        Args:
            num_layers: that are there when this returns, and a stream brings the others; None = all, without one.
        """
        trouble = NOT_STORED
        reads: list[tuple[Tier, VariantInfo, str | None]] = []
        seen: list[tuple[Tier, EntrySummary]] = []
        absent: list[Tier] = []
        for tier in self._tiers:
            if tier.is_host:
                continue
            found = self.find_in(tier, chunk, num_layers)
            reads += found.reads
            seen += found.seen
            absent += found.absent
            trouble = found if found.stored is not None or found.reason is not None else trouble
            if found.stored is not None:
                break
        return dataclasses.replace(trouble, reads=tuple(reads), seen=tuple(seen), absent=tuple(absent))

    def find_in(self, tier: Tier, chunk: Wanted, num_layers: int | None) -> Found:
        take_skipped()
        try:
            infos = tier.medium.find(chunk.key)
        except TierError as error:
            logger.warning("Chunk cache: tier %s was not searched: %s", tier.name, error)
            return Found(None, tier.name, f"tier_{error.reason}")
        if not infos:
            skipped = take_skipped()
            if skipped is None:
                return Found(absent=(tier,))
            return Found(None, tier.name, f"tier_{skipped}", absent=(tier,) if skipped in BAD_ENTRY else ())
        seen = () if tier.is_host else tuple((tier, info.listed) for info in infos)
        reads: list[tuple[Tier, VariantInfo, str | None]] = []
        for info in self._ranked(infos, chunk.need):
            start = time.perf_counter()
            try:
                if info.token_ids != chunk.token_ids:
                    raise TierError("mismatch", str(info.entry_id), "holds other tokens", "delete it")
                stored, stream = self._read(tier, info, num_layers)
            except TierError as error:
                logger.warning("Chunk cache: a chunk was not read from tier %s: %s", tier.name, error)
                reads.append((tier, info, error.reason))
                continue
            reads.append((tier, info, None))
            weight = use_weight(chunk.need.unit_cfo(info), len(info.token_ids))
            return Found(stored, tier.name, None, time.perf_counter() - start, weight, stream, tuple(reads), seen)
        return Found(None, tier.name, f"tier_{reads[-1][2]}" if reads else None, reads=tuple(reads), seen=seen)

    def _ranked(self, infos: Sequence[VariantInfo], need: Need) -> list[VariantInfo]:
        """Those that fit, the best first: fewest tokens to fix, as a lookup in the pool chooses.

        Beside a prepared one other derived ones are passed over. Equal ones come in the order of the medium.
        """
        fitting = [info for info in infos if need.fits(info)]
        if any(info.is_prepared for info in fitting):
            fitting = [info for info in fitting if info.is_prepared or not info.generation]
        return sorted(fitting, key=lambda info: self._rank(info, need))

    def _rank(self, info: VariantInfo, need: Need) -> tuple[bool, float, Rank]:
        is_preferred = info.is_prepared and self._prefers_prepared
        return not is_preferred, need.unit_cfo(info), info.rank

    def _read(self, tier: Tier, info: VariantInfo, num_layers: int | None) -> tuple[StoredVariant, LayerStream | None]:
        if num_layers is None:
            return tier.medium.read(info), None
        with host_memory(info.payload_len):
            k, v = self._empty(len(info.token_ids))
        stored = StoredVariant(info, k, v)
        stream = LayerStream(stored, tier.medium.read_layers(info), tier)
        stream.run_until(num_layers)
        if stream.reason is not None:
            raise TierError(stream.reason, str(info.entry_id), "its first layers were not read", "see the log")
        return stored, stream
