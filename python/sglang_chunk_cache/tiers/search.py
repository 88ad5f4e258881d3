"""TierSearch: searches the tiers for a chunk and reads it; workers do this, except for host memory.

Verbs: `open` (a search whose steps `chunk_cache.tiers.variant_search` decides), `run` (to its end), `run_in_memory` (as
far as host memory goes).

Promises: nothing here changes what the scheduler sees; the result tells the ledgers what was tried and what is absent.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from chunk_cache.index.need import Need
from chunk_cache.index.reusability import use_weight
from chunk_cache.keys import Partition
from chunk_cache.tiers.agreement import ABSENT, UNKNOWN, vote_for
from chunk_cache.tiers.variant_search import NOTHING_HELD, Ask, Held, Read, TierView, VariantSearch
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.layer_stream import LayerStream
from sglang_chunk_cache.kv.stored_variant import EntrySummary, StoredVariant, TierError, VariantInfo, host_memory
from sglang_chunk_cache.tiers.medium import take_skipped
from sglang_chunk_cache.tiers.tier import Tier

logger = logging.getLogger(__name__)


BAD_ENTRY = ("corrupt", "mismatch", "missing")
"""Reasons for which an entry is forgotten; after any other, the same entry may be read later."""


@dataclass(frozen=True)
class Wanted:
    """A chunk that a waiting request needs."""

    key: bytes
    token_ids: array[int]
    partition: Partition
    need: Need
    """Where the chunk is needed, and which variants fit; if several requests wait for it, the first one's counts."""
    held: Held = NOTHING_HELD
    """What the pool has; only something better is of use."""


class Outcome(NamedTuple):
    """What a request keeps of `Found` once its chunks are in the pool; `tier` is empty if the chunk was not found."""

    tier: str
    reason: str | None


@dataclass(frozen=True)
class Found:
    """What became of one chunk: a variant, or why there is none; `reason` None = no tier has it.

    Attributes:
        tier: which tier it was found in, or which failed; empty if neither.
        seconds: that reading it took.
        weight: what this use adds to its reuse frequency.
        stream: brings the layers that are not there yet; None = all are.
        reads: variants that were tried, and why each could not be read; None = it was read.
        seen: variants of the chunk in tiers below host memory, whether tried or not.
        absent: tiers that were searched and have no variant of the chunk.
        is_held: no tier has anything better than the pool.
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
    is_held: bool = False

    @property
    def vote(self) -> int:
        """What this rank votes, for `agree`."""
        if self.stored is None:
            is_absent = self.reason in (None, *(f"tier_{reason}" for reason in BAD_ENTRY))
            return ABSENT if is_absent and not self.is_held else UNKNOWN
        info = self.stored.info
        statistics = b"" if info.statistics is None else info.statistics.tobytes()
        return vote_for(info.name, statistics, is_streamed=self.stream is not None)

    def without_kv(self) -> Outcome:
        return Outcome("" if self.stored is None else self.tier, self.reason)

    @property
    def outcome(self) -> str:
        """Label of the metric."""
        return self.reason or ("not_stored" if self.stored is None else "ok")


NOT_STORED = Found()


@dataclass
class OpenSearch:
    """A search, and what it has met so far."""

    chunk: Wanted
    steps: VariantSearch[VariantInfo]
    trouble: Found = NOT_STORED
    reads: list[tuple[Tier, VariantInfo, str | None]] = field(default_factory=list)
    seen: list[tuple[Tier, EntrySummary]] = field(default_factory=list)
    absent: list[Tier] = field(default_factory=list)


class TierSearch:
    """See the head of this file.

    Args:
        tiers: in the order in which they are asked.
    """

    def __init__(self, tiers: Sequence[Tier], fingerprint: Fingerprint) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._empty = fingerprint.empty

    def open(self, chunk: Wanted, load_shares: Mapping[str, float], *, is_memory: bool = False) -> OpenSearch:
        """Begins a search, from what the ledgers know of the chunk.

        Args:
            load_shares: by tier, as in `TierView`.
            is_memory: only host memory is searched.
        """
        views = []
        for tier in (tier for tier in self._tiers.values() if tier.is_host or not is_memory):
            entries = tier.ledger.peers_of(chunk.key)
            # The ledger of host memory knows all of it. If the pool has a variant, only known entries are searched.
            if entries or not (tier.is_host or chunk.held.is_of_use):
                named = {entry_id.name: traits for entry_id, traits in entries.items()}
                views.append(TierView(tier.name, named, load_shares.get(tier.name, 0.0)))
        steps = VariantSearch[VariantInfo](chunk.need, views, chunk.held)
        return OpenSearch(chunk, steps)

    def run_in_memory(self, search: OpenSearch) -> Found | None:
        """What is found in host memory alone; None if other tiers have to be asked or read."""
        return self._run(search, None, is_memory=True)

    def run(self, search: OpenSearch, num_layers: int | None) -> Found:
        """Runs a search to its end; called by a worker.

        Args:
            num_layers: read before this returns, while a stream brings the others; None = all, without a stream.
        """
        found = self._run(search, num_layers, is_memory=False)
        assert found is not None, "every tier may be asked"
        return found

    def _run(self, search: OpenSearch, num_layers: int | None, *, is_memory: bool) -> Found | None:
        while (step := search.steps.next()) is not None:
            tier = self._tiers[step.tier]
            if is_memory and not tier.is_host:
                return None
            if isinstance(step, Ask):
                self._ask(search, tier)
            else:
                found = self._read(search, tier, step, None if tier.is_host else num_layers)
                if found is not None:
                    return found
        trouble = search.trouble
        is_held = search.chunk.held.is_of_use and trouble.reason is None
        return _found(search, reason=trouble.reason, tier=trouble.tier, is_held=is_held)

    def _ask(self, search: OpenSearch, tier: Tier) -> None:
        take_skipped()
        infos: Sequence[VariantInfo] = ()
        try:
            infos = tier.medium.find(search.chunk.key)
        except TierError as error:
            logger.warning("Chunk cache: tier %s was not searched: %s", tier.name, error)
            search.trouble = Found(None, tier.name, f"tier_{error.reason}")
        else:
            skipped = None if infos else take_skipped()
            if skipped is not None:
                search.trouble = Found(None, tier.name, f"tier_{skipped}")
            if not infos and (skipped is None or skipped in BAD_ENTRY):
                search.absent.append(tier)
        if not tier.is_host:
            search.seen += [(tier, info.listed) for info in infos]
        search.steps.told(tier.name, infos)

    def _read(self, search: OpenSearch, tier: Tier, read: Read[VariantInfo], num_layers: int | None) -> Found | None:
        chunk, info = search.chunk, read.variant
        start = time.perf_counter()
        try:
            if info.token_ids != chunk.token_ids:
                raise TierError("mismatch", str(info.entry_id), "holds other tokens", "delete it")
            stored, stream = self._read_from(tier, info, num_layers)
        except TierError as error:
            logger.warning("Chunk cache: a chunk was not read from tier %s: %s", tier.name, error)
            search.reads.append((tier, info, error.reason))
            search.trouble = Found(None, tier.name, f"tier_{error.reason}")
            search.steps.failed(read)
            return None
        search.reads.append((tier, info, None))
        weight = use_weight(chunk.need.unit_cfo(info), info.length)
        seconds = time.perf_counter() - start
        return _found(search, stored=stored, tier=tier.name, seconds=seconds, weight=weight, stream=stream)

    def _read_from(
        self, tier: Tier, info: VariantInfo, num_layers: int | None
    ) -> tuple[StoredVariant, LayerStream | None]:
        if num_layers is None:
            return tier.medium.read(info), None
        with host_memory(info.payload_len):
            k, v = self._empty(info.length)
        stored = StoredVariant(info, k, v)
        stream = LayerStream(stored, tier.medium.read_layers(info), tier.name)
        stream.run_until(num_layers)
        if stream.reason is not None:
            raise TierError(stream.reason, str(info.entry_id), "its first layers were not read", "see the log")
        return stored, stream


def _found(search: OpenSearch, **outcome: Any) -> Found:
    return Found(reads=tuple(search.reads), seen=tuple(search.seen), absent=tuple(search.absent), **outcome)
