"""TierWriter: writes chunks of the KV pool down, and keeps every tier within its budget.

Verbs: `note_stored` (a variant is in the pool), `save_victims` (some are about to be evicted), `put` (a variant into
one tier), `clear_host`.

Promises: the KV is copied out of the pool before the call returns (or, on a GPU, in the order of the stream), so the
slots may go at once. What does not fit is not written, and counted; nothing waits for a slow tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from chunk_cache.keys import partition_key
from sglang_chunk_cache.kv.stored_variant import EntrySummary, StoredVariant, TierError, VariantInfo
from sglang_chunk_cache.tiers.pool_view import Pool
from sglang_chunk_cache.tiers.tier import Tier

if TYPE_CHECKING:
    from chunk_cache.index.variant import Variant
    from chunk_cache.options.tier_config import TierConfig
    from chunk_cache.tiers.tier_ledger import EntryId
    from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
    from sglang_chunk_cache.tiers.workers import Workers

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 2 << 30
"""Bytes that wait to be written, in each tier counted; what comes while there are more is not written for now."""

MAX_LOOKS = 64
"""Variants that one eviction looks at."""


class TierWriter:
    """See the head of this file.

    Args:
        tiers: from the fastest down.
        place: names the one tier that a variant is kept in, None = none; given where tiers have costs.
        bytes_per_token: KV of this rank, all layers.
    """

    def __init__(
        self,
        config: TierConfig,
        tiers: Sequence[Tier],
        *,
        workers: Workers,
        pool: Pool,
        metrics: TierMetrics,
        bytes_per_token: int,
        place: Callable[[Variant], str | None] | None = None,
    ) -> None:
        self._config = config
        self._tiers = tuple(tiers)
        self._workers = workers
        self._pool = pool
        self._metrics = metrics
        self._bytes_per_token = bytes_per_token
        self._place = place
        self.num_queued_bytes = 0

    def note_stored(self, variant: Variant) -> None:
        """A variant is in the pool; with `write: through` it is written down."""
        if self._config.write == "through":
            self._save(variant, self._tiers if self._place is None else self._tiers_named(self._place(variant)))

    def save_victims(self, variants: Iterable[Variant], num_tokens: int) -> None:
        """Writes down what is about to be evicted from the pool, so many tokens, where it is not yet.

        Args:
            variants: in the order in which they go.
        """
        tiers = self._tiers[:1] if self._config.write == "evict" else self._tiers
        if self._place is not None:
            return  # what was not kept before is worth it nowhere
        for _, variant in zip(range(MAX_LOOKS), variants, strict=False):
            if num_tokens <= 0:
                return
            num_tokens -= self._save(variant, tiers)

    def put(
        self,
        tier: Tier,
        stored: StoredVariant,
        wait: Callable[[], None] = lambda: None,
        frequency: float = 0.0,
    ) -> None:
        """Writes a variant into one tier, if it takes it.

        Args:
            wait: returns once the tensors hold what they shall; called where they are read, by a worker.
            frequency: its f_r so far.
        """
        info = stored.info
        replaced = None if tier.has(info) else tier.goes_for(info, self._config.max_variants_per_chunk)
        if replaced is None:
            return
        for other in replaced:
            self.forget(tier, other)
        is_busy = self.num_queued_bytes > MAX_QUEUED_BYTES
        gone = None
        if not is_busy:
            gone = self._prepare(tier, info.listed, frequency)
        if gone is None:
            self._metrics.count_write(tier.name, "busy" if is_busy else "refused")
            return
        for entry_id in gone:
            self._drop(tier, entry_id)
        tier.writing[info.entry_id] = info
        self.num_queued_bytes += info.payload_len

        def write() -> tuple[TierError | None, float]:
            wait()
            start = time.perf_counter()
            try:
                tier.medium.write(stored)
            except TierError as error:
                return error, 0.0
            return None, time.perf_counter() - start

        def written(result: tuple[TierError | None, float]) -> None:
            self.num_queued_bytes -= info.payload_len
            self._complete(tier, info, *result)

        self._workers.submit(write, written, _order(tier, info.entry_id), lane="write")

    def adopt(self, tier: Tier, listed: EntrySummary, frequency: float = 0.0) -> None:
        """A tier has it although nobody here has written it: it counts, and makes others go.

        Args:
            frequency: its f_r, where that is known.
        """
        if tier.ledger.knows(listed.entry_id):
            return
        if self._workers.is_under_way(_order(tier, listed.entry_id)):
            return  # it is being deleted
        gone = self._prepare(tier, listed, frequency)
        if gone is None:
            return
        tier.ledger.complete_store(listed.entry_id, True)
        for entry_id in gone:
            self._drop(tier, entry_id)
        self._metrics.set_size(tier.name, len(tier.ledger), tier.ledger.num_bytes)

    def forget(self, tier: Tier, entry_id: EntryId) -> None:
        """It was found to be unusable, or is unwanted."""
        tier.ledger.discard(entry_id)
        self._delete(tier, entry_id)

    def clear_host(self) -> None:
        """The cache was flushed."""
        for tier in self._tiers:
            if tier.is_host:
                for entry_id in tier.ledger:
                    tier.medium.delete(entry_id)
                tier.ledger.clear()
                self._metrics.set_size(tier.name, 0, 0)

    def _tiers_named(self, name: str | None) -> list[Tier]:
        return [tier for tier in self._tiers if tier.name == name]

    def _save(self, variant: Variant, tiers: Sequence[Tier]) -> int:
        """How many tokens of the pool the variant holds; 0 where it is gone already."""
        info = _info_of(variant, self._bytes_per_token)
        for tier in tiers:
            if tier.has(info):
                tier.ledger.note_frequency(info.entry_id, variant.reuse_frequency)
        most = self._config.max_variants_per_chunk
        takers = [tier for tier in tiers if not tier.has(info) and tier.goes_for(info, most) is not None]
        if not takers:
            return variant.length
        try:
            kv = self._pool.kv_of(variant)
        except TierError as error:
            logger.warning("Chunk cache: a chunk of %d tokens was not written down: %s", variant.length, error)
            for tier in takers:
                self._metrics.count_write(tier.name, error.reason)
            return variant.length
        if kv is None:
            return 0
        for tier in takers:
            self.put(tier, StoredVariant(info, kv.k, kv.v), kv.wait, variant.reuse_frequency)
        return variant.length

    def _prepare(self, tier: Tier, listed: EntrySummary, frequency: float) -> tuple[EntryId, ...] | None:
        entry_id, payload_len, partition, traits = listed
        return tier.ledger.prepare_store(entry_id, payload_len, frequency, partition, traits)

    def _complete(self, tier: Tier, info: VariantInfo, error: TierError | None, seconds: float) -> None:
        del tier.writing[info.entry_id]
        is_kept = tier.ledger.complete_store(info.entry_id, error is None)
        if error is not None:
            logger.warning("Chunk cache: a chunk was not written to tier %s: %s", tier.name, error)
        elif not is_kept:
            self._delete(tier, info.entry_id)  # discarded while it was written
        outcome = "ok" if error is None else error.reason
        self._metrics.count_write(tier.name, outcome, info.payload_len if error is None else 0, seconds)
        self._metrics.set_size(tier.name, len(tier.ledger), tier.ledger.num_bytes)

    def _drop(self, tier: Tier, entry_id: EntryId) -> None:
        """The ledger has evicted it: down one tier, where chunks go down only then."""
        self._metrics.count_eviction(tier.name)
        below = self._tiers[self._tiers.index(tier) + 1 :][:1]
        if tier.is_host and below and self._config.write == "evict":
            (info,) = (info for info in tier.medium.find(entry_id.key) if info.name == entry_id.name)
            self.put(below[0], tier.medium.read(info))
        self._delete(tier, entry_id)

    def _delete(self, tier: Tier, entry_id: EntryId) -> None:
        if tier.is_host:
            tier.medium.delete(entry_id)
            return

        def delete() -> None:
            try:
                tier.medium.delete(entry_id)
            except TierError as error:
                logger.warning("Chunk cache: a chunk was not deleted from tier %s: %s", tier.name, error)

        self._workers.submit(delete, lambda _: None, _order(tier, entry_id), lane="write")


def _info_of(variant: Variant, bytes_per_token: int) -> VariantInfo:
    """What is written beside the KV of a variant of the pool."""
    return VariantInfo(
        key=variant.key,
        token_ids=variant.token_ids,
        start=variant.start,
        generation=variant.generation,
        context=variant.context,
        statistics=variant.statistics,
        payload_len=variant.length * bytes_per_token,
        is_prepared=variant.is_prepared,
        system=variant.system,
        partition=partition_key(variant.holder.partition),
    )


def _order(tier: Tier, entry_id: EntryId) -> str:
    """An entry is written and deleted in the order in which that was decided."""
    return f"{tier.name} {entry_id}"
