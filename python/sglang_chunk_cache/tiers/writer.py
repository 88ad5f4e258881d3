"""TierWriter: writes chunks of the KV pool down, and keeps every tier within its budget.

Verbs: `note_stored` (a variant is in the pool), `save_victims` (some are about to be evicted), `put` (a variant into
the tiers that take it), `clear_host`. Which tiers these are is decided by `chunk_cache.tiers.placing`.

Promises: the KV is copied out of the pool before the call returns (or, on a GPU, in the order of the stream), so the
slots may be freed at once. What does not fit is counted and not written; nothing waits for a slow tier.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import islice

from chunk_cache.index.variant import Variant
from chunk_cache.options.tier_config import TierConfig
from chunk_cache.tiers.placing import Known, Moment, Placing, Write, place, targets
from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.assembler import HostKV
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.pool import ChunkPool
from sglang_chunk_cache.kv.stored_variant import EntrySummary, StoredVariant, TierError, VariantInfo, host_memory
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers.tier import Tier
from sglang_chunk_cache.tiers.workers import Workers

logger = logging.getLogger(__name__)

MAX_QUEUED_BYTES = 2 << 30
"""Bytes that wait to be written, a variant counted once per tier; while there are more, nothing is added to them."""

MAX_LOOKS = 64
"""Variants that one eviction looks at."""

MAX_PASSED = 1024
"""Variants that one eviction passes over at most, with those that it looks at."""


class TierWriter:
    """See the head of this file.

    Args:
        tiers: from the fastest down.
        fingerprint: of this rank.
    """

    def __init__(
        self,
        config: TierConfig,
        tiers: Sequence[Tier],
        *,
        workers: Workers,
        pool: ChunkPool,
        metrics: TierMetrics,
        fingerprint: Fingerprint,
    ) -> None:
        self._config = config
        self._tiers = {tier.name: tier for tier in tiers}
        self._workers = workers
        self._pool = pool
        self._metrics = metrics
        self._fingerprint = fingerprint
        self.num_queued_bytes = 0
        self._saved: set[int] = set()
        """Ids of the variants that the last eviction took for victims or passed over, and that tiers have."""

    def note_stored(self, variant: Variant) -> None:
        """Writes down a variant that the pool has stored, in tiers that take it at that moment."""
        self._save(variant, Moment.STORED)

    def save_victims(self, variants: Iterable[Variant], num_tokens: int) -> None:
        """Writes down variants that are about to be evicted from the pool, to tiers that lack them.

        The tree has an order of its own: a variant that was saved for one eviction and is still there at the next (a
        pinned one, one of a prompt that is often found) is passed over, so that it does not stand for all that go.

        Args:
            variants: in the order of eviction.
            num_tokens: that are about to be evicted.
        """
        if not self._targets(Moment.LEAVES_POOL):
            return
        saved, num_looks = set(), 0
        for variant in islice(variants, MAX_PASSED):
            if num_tokens <= 0 or num_looks == MAX_LOOKS:
                break
            is_saved = variant.variant_id in self._saved
            if not is_saved:
                num_looks += 1
                num_freed, is_saved = self._save(variant, Moment.LEAVES_POOL)
                num_tokens -= num_freed
            if is_saved:
                saved.add(variant.variant_id)
        self._saved = saved

    def put(self, stored: StoredVariant, moment: Moment) -> None:
        """Writes a variant into the tiers that take it at this moment.

        Args:
            moment: as in `place`.
        """
        for action in self._actions(stored.info, moment):
            if isinstance(action, Write):
                self._write(action, stored.info, lambda: stored)

    def _write(
        self, action: Write, info: VariantInfo, make: Callable[[], StoredVariant], frequency: float = 0.0
    ) -> bool:
        """Has a worker call `make` and write what it returns; False where the tier takes nothing now.

        Args:
            frequency: f_r of the variant so far.
        """
        tier = self._tiers[action.tier]
        is_busy = self.num_queued_bytes > MAX_QUEUED_BYTES
        if not is_busy and tier.ledger.refusal(info.entry_id, info.payload_len, info.partition) is None:
            for other in action.replaces:
                self.forget(tier, other)
        gone = None if is_busy else self._prepare(tier, info.listed, frequency)
        if gone is None:
            self._metrics.count_write(tier.name, "busy" if is_busy else "refused")
            return False
        for entry_id in gone:
            self._drop(tier, entry_id)
        tier.writing[info.entry_id] = info
        self.num_queued_bytes += info.payload_len

        def write() -> tuple[TierError | None, float]:
            try:
                stored = make()
                start = time.perf_counter()
                tier.medium.write(stored)
            except TierError as error:
                return error, 0.0
            return None, time.perf_counter() - start

        def written(result: tuple[TierError | None, float]) -> None:
            self.num_queued_bytes -= info.payload_len
            self._complete(tier, info, *result)

        self._workers.submit(write, written, _order(tier, info.entry_id), lane="write")
        return True

    def adopt(self, tier: Tier, listed: EntrySummary, frequency: float = 0.0) -> None:
        """Takes over an entry that a tier has although this server did not write it; others may be evicted for it.

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
        """Deletes an entry that is unusable or unwanted."""
        tier.ledger.discard(entry_id)
        self._delete(tier, entry_id)

    def clear_host(self) -> None:
        """Empties the host tier."""
        for tier in self._tiers.values():
            if tier.is_host:
                for entry_id in tier.ledger:
                    tier.medium.delete(entry_id)
                tier.ledger.clear()
                self._metrics.set_size(tier.name, 0, 0)

    def _targets(self, moment: Moment) -> tuple[str, ...]:
        return targets(tuple(self._tiers), moment, write=self._config.write)

    def _actions(self, info: VariantInfo, moment: Moment) -> tuple[Placing, ...]:
        ledgers = {name: self._tiers[name].ledger for name in self._targets(moment)}
        return place(info.entry_id, info.traits, ledgers, self._config.max_variants_per_chunk)

    def _save(self, variant: Variant, moment: Moment) -> tuple[int, bool]:
        """Writes a variant to the tiers that take it.

        Returns:
            Its length, or 0 if the pool has lost it; whether those tiers have it or are about to.
        """
        if not self._targets(moment):
            return variant.length, True
        info = _info_of(variant, self._fingerprint)
        actions = self._actions(info, moment)
        for action in actions:
            if isinstance(action, Known):
                self._tiers[action.tier].ledger.note_frequency(info.entry_id, variant.reuse_frequency)
        writes = [action for action in actions if isinstance(action, Write)]
        if not writes:
            return variant.length, True
        try:
            kv = self._pool.kv_of(variant)
        except TierError as error:
            logger.warning("Chunk cache: a chunk of %d tokens was not written down: %s", variant.length, error)
            for action in writes:
                self._metrics.count_write(action.tier, error.reason)
            return variant.length, False
        if kv is None:
            return 0, False
        make = partial(_stored, info, kv, self._fingerprint)
        return variant.length, all([self._write(action, info, make, variant.reuse_frequency) for action in writes])

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
        """Deletes an entry that the ledger has evicted; from host memory it goes down one tier if chunks do so then."""
        self._metrics.add("evictions", tier.name)
        if tier.is_host and self._targets(Moment.LEAVES_HOST):
            (info,) = (info for info in tier.medium.find(entry_id.key) if info.name == entry_id.name)
            self.put(tier.medium.read(info), Moment.LEAVES_HOST)
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


def _stored(info: VariantInfo, kv: HostKV, fingerprint: Fingerprint) -> StoredVariant:
    """A variant, once its KV has arrived in host memory. Called by a worker.

    Raises:
        TierError: full, host memory is used up.
    """
    kv.wait()
    if fingerprint.states is None or kv.transition is None:
        return StoredVariant(info, kv.k, kv.v)
    with host_memory(info.payload_len):
        return StoredVariant(info, kv.k, kv.v, fingerprint.states.composed(kv.transition))


def _info_of(variant: Variant, fingerprint: Fingerprint) -> VariantInfo:
    """What is written beside the KV of a variant of the pool."""
    return VariantInfo(
        key=variant.key,
        token_ids=variant.token_ids,
        start=variant.start,
        generation=variant.generation,
        context=variant.context,
        statistics=variant.statistics,
        payload_len=fingerprint.payload_len(variant.length),
        is_prepared=variant.is_prepared,
        system=variant.system,
        partition=variant.holder.partition.key,
    )


def _order(tier: Tier, entry_id: EntryId) -> str:
    """The `order` of an entry's jobs (`Workers.submit`): it is written and deleted in the order that was decided."""
    return f"{tier.name} {entry_id}"
