"""ChunkTiers: the tiers below the KV pool, as the radix cache and the scheduler see them.

Verbs: `note_stored`, `save_victims`, `want`, `poll`, `is_held`, `bring_in`
(see `writer` and `loader`), `observe`, `stored_lens`, `ask`, `known`, `evict`, `evict_behind`, `flush`,
`disable` (the model is no longer the one that was started), `stats`, `close`.

Order of the tiers: `host` (memory of this process), `disk`, `remote`. A chunk that is found in one of them goes into
the host tier and then into the pool, as a tree node of its own; from there on it is a variant like any other. So only
this package knows where a chunk has been, and a chunk whose load fails counts as not stored.

The disk is listed when a server starts. A store that servers share (`Tier.is_asked`) is asked for each chunk that a
request waits for, so its ledger knows only what this server wrote there or was told of.

Promises: pool and index change in the scheduler's thread alone, and alike on all tensor-parallel ranks. What comes from
a tier is used only after its tokens were compared, and outside of host memory also its checksums and fingerprint.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from chunk_cache.index.observer import Observer
from chunk_cache.index.variant import Variant
from chunk_cache.options.tier_config import TierConfig
from chunk_cache.tiers.cost import PrefillCost
from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.pool import ChunkPool
from sglang_chunk_cache.kv.ranks import ReduceMax
from sglang_chunk_cache.kv.stored_variant import EntrySummary, TierError, VariantInfo
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers.loader import TierLoader
from sglang_chunk_cache.tiers.search import Outcome, Wanted
from sglang_chunk_cache.tiers.tier import Tier
from sglang_chunk_cache.tiers.workers import Workers
from sglang_chunk_cache.tiers.worth import decode_worth, encode_worth
from sglang_chunk_cache.tiers.writer import TierWriter

logger = logging.getLogger(__name__)

NOTE_EVERY_S = 300.0
"""Seconds between two writes of what entries are worth: a server that is killed loses no more than that."""


class ChunkTiers:
    def __init__(
        self,
        config: TierConfig,
        tiers: Sequence[Tier],
        *,
        pool: ChunkPool,
        metrics: TierMetrics,
        fingerprint: Fingerprint,
        ratio: float,
        reduce_max: ReduceMax,
        prefill_cost: PrefillCost,
    ) -> None:
        self._config = config
        self._tiers = tuple(tiers)
        self._fingerprint = fingerprint
        self.reduce_max = reduce_max
        self._workers = Workers(config.num_threads)
        self._prefill_cost = prefill_cost
        self._disabled_reason: str | None = None
        self._writer = TierWriter(
            config, tiers, workers=self._workers, pool=pool, metrics=metrics, fingerprint=fingerprint
        )
        self._loader = TierLoader(
            config,
            tiers,
            workers=self._workers,
            writer=self._writer,
            pool=pool,
            metrics=metrics,
            fingerprint=fingerprint,
            prefill_cost=prefill_cost,
            ratio=ratio,
            reduce_max=self.reduce_max,
        )
        for tier in self._tiers:
            if not tier.is_host and not tier.is_asked:
                self._workers.submit(partial(_scanned, tier), self._adopt_all)
        self._noted_at = time.monotonic()

    def observe(self, observer_of: Callable[[str, Callable[[int], int]], Observer]) -> None:
        """Gives each tier's ledger an observer, made from the tier's name and a function of bytes to tokens."""
        for tier in self._tiers:
            tier.ledger.observer = observer_of(tier.name, self._fingerprint.num_tokens)

    def note_stored(self, variant: Variant) -> None:
        """See `TierWriter.note_stored`."""
        if self._disabled_reason is None:
            self._writer.note_stored(variant)

    def save_victims(self, variants: Iterable[Variant], num_tokens: int) -> None:
        """See `TierWriter.save_victims`."""
        if self._disabled_reason is None:
            self._writer.save_victims(variants, num_tokens)

    def want(
        self, rid: str, chunks: Sequence[Wanted], *, num_keys: int, num_rows: Callable[[], int], num_rows_ahead: int
    ) -> None:
        """See `TierLoader.want`."""
        if self._disabled_reason is None and chunks:
            self._loader.want(rid, chunks, num_keys=num_keys, num_rows=num_rows, num_rows_ahead=num_rows_ahead)

    def poll(self, queued: Sequence[str]) -> None:
        """Lets what workers have done take effect, then calls `TierLoader.poll`."""
        self._workers.run_done()
        self._loader.poll(queued)
        if time.monotonic() - self._noted_at > NOTE_EVERY_S:
            self._note_worth()

    def wait(self, timeout_s: float) -> None:
        """Waits for a worker, in a step that has nothing else to do: so the workers get the interpreter."""
        self._workers.wait_done(timeout_s)

    def is_held(self, rid: str) -> bool:
        """Whether a request waits for its loads, so that it must not be admitted."""
        return self._loader.is_held(rid)

    def has_found(self, rid: str) -> bool:
        """See `TierLoader.has_found`."""
        return self._loader.has_found(rid)

    def bring_in(self, rid: str) -> dict[bytes, Outcome]:
        """See `TierLoader.bring_in`; without the KV, which the request must not keep alive."""
        return {key: found.without_kv() for key, found in self._loader.bring_in(rid).items()}

    def stored_lens(self, names: Mapping[bytes, str]) -> dict[bytes, int]:
        """Length in tokens of each chunk of which the tiers of every rank are known to have the named variant.

        Args:
            names: of the variants, by chunk key.
        """
        if self._disabled_reason is not None or not names:
            return {}
        lens = np.array([self._known_len(key, name) for key, name in names.items()], dtype=np.int64)
        lens = -self.reduce_max(-lens)  # the ledgers of the ranks learn of it at different times
        return {key: length for key, length in zip(names, lens.tolist(), strict=True) if length}

    def ask(self, keys: Sequence[bytes], *, is_first: bool) -> bool:
        """Has shared stores searched for these chunks; returns whether some rank has no answer yet.

        Args:
            is_first: False = they were asked for already.
        """
        tiers = [tier for tier in self._tiers if tier.is_asked and self._disabled_reason is None]
        if not keys or not tiers:
            return False
        for tier in tiers if is_first else ():
            find = partial(_listed, tier, partial(_found, tier, keys), f"tier {tier.name} was not asked")
            self._workers.submit(find, self._adopt_found, _asking(tier))
        is_asked = np.array([any(self._workers.is_under_way(_asking(tier)) for tier in tiers)], dtype=np.int64)
        return bool(self.reduce_max(is_asked)[0])

    def _adopt_found(self, found: tuple[Tier, list[EntrySummary]]) -> None:
        tier, entries = found
        for listed in entries:
            self._writer.adopt(tier, listed)

    def _known_len(self, key: bytes, name: str) -> int:
        entries = ((tier.ledger, entry_id) for tier in self._tiers for entry_id in tier.ledger.entries_of(key))
        sizes = (ledger.num_bytes_of(entry_id) for ledger, entry_id in entries if entry_id.name == name)
        return self._fingerprint.num_tokens(max(sizes, default=0))

    def known(self, key: bytes) -> dict[str, int]:
        """How many variants of a chunk any rank knows of, by tier; stores are not asked."""
        is_off = self._disabled_reason is not None
        nums = [0 if is_off else len(tier.ledger.entries_of(key)) for tier in self._tiers]
        return self._by_tier(np.array([nums], dtype=np.int64))[0]

    def evict(self, keys: Sequence[bytes]) -> dict[bytes, dict[str, int]]:
        """Deletes all variants of these chunks, also those that other servers wrote, once a worker is free.

        Returns:
            By key and tier, how many variants any rank knew of; keys and tiers without any are left out.
        """
        num_known = np.zeros((len(keys), len(self._tiers)), dtype=np.int64)
        for i, key in enumerate(keys):
            for j, tier in enumerate(self._tiers):
                known = [*tier.ledger.entries_of(key), *(one for one in tier.writing if one.key == key)]
                num_known[i, j] = len(known)
                self._forget_all(tier, known)  # at once: from now on the chunk counts as gone
                if not tier.is_host:
                    problem = f"a chunk was not deleted from tier {tier.name}"
                    find = partial(_found, tier, [key])
                    self._workers.submit(partial(_listed, tier, find, problem), self._forget_found)
        return {key: known for key, known in zip(keys, self._by_tier(num_known), strict=True) if known}

    def evict_behind(self, keys: set[bytes]) -> None:
        """Deletes all variants that were computed behind these chunks; disk and store are looked through for them."""
        self._loader.note_deletion()
        for tier in self._tiers:
            self._forget_all(tier, [info.entry_id for info in tier.writing.values() if _is_behind(keys, info)])
            behind = partial(_behind, tier, keys, tier.ledger.keys())
            if tier.is_host:
                self._forget_found((tier, list(behind())))
            else:
                problem = f"chunks behind deleted ones were not deleted from tier {tier.name}"
                self._workers.submit(partial(_listed, tier, behind, problem), self._forget_found)

    def _by_tier(self, nums: np.ndarray) -> list[dict[str, int]]:
        """Each row as a dict by tier, without zeros; numbers are the largest of any rank, as ledgers may differ."""
        if nums.size:
            nums = self.reduce_max(nums.reshape(-1)).reshape(nums.shape)
        return [{tier.name: n for tier, n in zip(self._tiers, row, strict=True) if n} for row in nums.tolist()]

    def _forget_found(self, found: tuple[Tier, list[EntrySummary]]) -> None:
        tier, entries = found
        self._forget_all(tier, [listed.entry_id for listed in entries])

    def _forget_all(self, tier: Tier, entry_ids: Iterable[EntryId]) -> None:
        for entry_id in entry_ids:
            self._writer.forget(tier, entry_id)

    def flush(self) -> None:
        """SGLang's cache was flushed: the host tier is memory like the pool and goes with it, the others stay."""
        self._workers.run_done()
        self._writer.clear_host()

    def disable(self, reason: str) -> None:
        """Nothing is written or loaded from now on.

        Args:
            reason: end of a sentence, for the log and the statistics.
        """
        if self._disabled_reason is None:
            logger.warning("Chunk cache: the tiers below the KV pool are off from now on because %s", reason)
        self._disabled_reason = reason
        self._loader.clear()
        self._writer.clear_host()
        for tier in self._tiers:
            if tier.ledger.observer is not None:
                tier.ledger.observer.cleared()
                tier.ledger.observer = None

    def stats(self) -> dict[str, Any]:
        """JSON values: for each tier what its ledger counts and how long loads take, and how good estimates were."""
        estimates = self._loader.estimates
        return {
            "disabled": self._disabled_reason,
            "held_requests": self._loader.num_held,
            "queued_write_bytes": self._writer.num_queued_bytes,
            "staged_bytes": self._loader.num_staged_bytes,
            "tiers": {tier.name: _tier_stats(tier) for tier in self._tiers},
            "prefill": asdict(self._prefill_cost.record()),
            "estimates": {
                "num": estimates.num,
                "estimated_s": estimates.estimated_s,
                "actual_s": estimates.actual_s,
                "mean_error": estimates.mean_error(),
                "median_error": estimates.median_error(),
            },
        }

    def close(self) -> None:
        """Ends the workers, once what was submitted is done."""
        self._workers.close()
        for tier in self._tiers_to_note():
            _note(tier, encode_worth(tier.ledger))  # in this thread: the workers are closed
        for tier in self._tiers:
            tier.medium.close()

    def _note_worth(self) -> None:
        """Has workers write what entries are worth, in tiers that will have to evict some."""
        self._noted_at = time.monotonic()
        for tier in self._tiers_to_note():
            self._workers.submit(partial(_note, tier, encode_worth(tier.ledger)), lambda _: None, lane="write")

    def _tiers_to_note(self) -> list[Tier]:
        """Tiers that outlive this process and have a limit, so that they evict what is worth least."""
        bounded = [tier for tier in self._tiers if tier.ledger.max_bytes is not None and not tier.is_host]
        return bounded if self._disabled_reason is None else []

    def _adopt_all(self, found: tuple[Tier, list[EntrySummary], dict[EntryId, float]]) -> None:
        """Takes over what a tier holds, in the order of eviction: entries of unknown worth first."""
        tier, entries, worth = found
        places = {entry_id: place for place, entry_id in enumerate(worth)}
        for listed in sorted(entries, key=lambda listed: places.get(listed.entry_id, -1)):
            self._writer.adopt(tier, listed, worth.get(listed.entry_id, 0.0))
        logger.info(
            "Chunk cache: tier %s holds %d chunks, %d bytes", tier.name, len(tier.ledger), tier.ledger.num_bytes
        )


def _is_behind(keys: set[bytes], info: VariantInfo) -> bool:
    return not keys.isdisjoint(info.context)


def _behind(tier: Tier, keys: set[bytes], known: Sequence[bytes]) -> Iterator[EntrySummary]:
    """What a tier holds that was computed behind these chunks, whoever wrote it."""
    return (info.listed for info in tier.medium.scan(known) if _is_behind(keys, info))


def _found(tier: Tier, keys: Sequence[bytes]) -> Iterator[EntrySummary]:
    """What a tier holds of these chunks, whoever wrote it."""
    return (info.listed for key in keys for info in tier.medium.find(key))


def _asking(tier: Tier) -> str:
    """The `order` of the jobs that ask a tier (`Workers.submit`)."""
    return f"{tier.name} asked"


def _listed(tier: Tier, entries: Callable[[], Iterable[EntrySummary]], problem: str) -> tuple[Tier, list[EntrySummary]]:
    """What `entries` returns; if the tier fails, nothing, and the log tells the problem. Called by a worker."""
    try:
        return tier, list(entries())
    except TierError as error:
        logger.warning("Chunk cache: %s: %s", problem, error)
        return tier, []


def _scanned(tier: Tier) -> tuple[Tier, list[EntrySummary], dict[EntryId, float]]:
    """What a tier holds, and what that was worth as far as its note says. Called by a worker."""
    _, entries = _listed(
        tier, lambda: (info.listed for info in tier.medium.scan()), f"tier {tier.name} was not searched"
    )
    try:
        return tier, entries, decode_worth(tier.medium.read_note(), f"tier {tier.name}")
    except TierError as error:
        logger.warning("Chunk cache: all entries of tier %s count as unused: %s", tier.name, error)
        return tier, entries, {}


def _note(tier: Tier, note: bytes) -> None:
    try:
        tier.medium.write_note(note)
    except TierError as error:
        logger.warning("Chunk cache: what the entries of tier %s are worth was not kept: %s", tier.name, error)


def _tier_stats(tier: Tier) -> dict[str, Any]:
    reads = tier.reads.record()
    return {
        "entries": len(tier.ledger),
        "bytes": tier.ledger.num_bytes,
        "max_bytes": tier.ledger.max_bytes,
        "latency_s": reads.latency_s,
        "partitions": tier.ledger.quota.largest(),
        "bytes_per_s": 1.0 / reads.s_per_byte if reads.s_per_byte else None,
        **tier.ledger.stats(),
    }
