"""Writer and loader over real media, with a KV pool that is a dictionary.

`Tiers` builds them and plays the scheduler: `step` is one scheduling step, `settle` steps until requests are no longer
held, `idle` until no worker has anything to do; `check` compares ledgers with what the media really hold. `Ranks` are
two tensor-parallel ranks in one process. `write` puts chunks into a folder as another server would, `file_of` finds one
there and `flip` damages it.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from chunk_cache.index.need import Need
from chunk_cache.index.variant import PathTokens, Variant
from chunk_cache.keys import Partition, chunk_key
from chunk_cache.options.tier_config import TierConfig
from chunk_cache.tiers.cost import PrefillCost
from chunk_cache.tiers.tier_ledger import TierLedger
from sglang_chunk_cache.kv.assembler import HostKV
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.ranks import ReduceMax, Votes, of_one_rank
from sglang_chunk_cache.kv.stored_variant import StoredVariant, VariantInfo
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.host import HostMedium
from sglang_chunk_cache.tiers.loader import TierLoader
from sglang_chunk_cache.tiers.medium import Medium
from sglang_chunk_cache.tiers.search import Found, TierSearch, Wanted
from sglang_chunk_cache.tiers.throttled import Throttled
from sglang_chunk_cache.tiers.tier import Tier
from sglang_chunk_cache.tiers.workers import Workers
from sglang_chunk_cache.tiers.writer import TierWriter
from unit.tiers.medium_suite import FINGERPRINT

PARTITION = Partition()
LENGTH = 5  # tokens of a chunk
SIZE = FINGERPRINT.payload_len(LENGTH)  # bytes of its KV
PATIENCE_S = 20.0


def wanted(number: int, length: int = LENGTH, max_generation: int = 3, context: tuple[bytes, ...] = ()) -> Wanted:
    """A chunk; equal numbers are equal chunks."""
    tokens = array("q", [1000 * number + i for i in range(length)])
    return Wanted(chunk_key(PARTITION, tokens), tokens, PARTITION, Need(max_generation, context))


def variant(
    number: int,
    start: int = 0,
    length: int = LENGTH,
    generation: int = 0,
    prepared_behind: tuple[bytes, ...] = (),
    context: tuple[bytes, ...] = (),
    system: bytes = b"",
) -> Variant:
    """One of the variants of that chunk."""
    chunk = wanted(number, length)
    path = PathTokens(array("q", [7] * start) + chunk.token_ids, PARTITION)
    context, is_prepared = prepared_behind or context, bool(prepared_behind)
    return Variant(
        1000 * number + start,
        chunk.key,
        length,
        start,
        generation,
        context,
        len(context),
        path,
        path_start=start,
        is_prepared=is_prepared,
        system=system,
    )


def kv_of(one: Variant, fingerprint: Fingerprint = FINGERPRINT) -> HostKV:
    """Its KV: other bits for each variant."""
    k, v = fingerprint.empty(one.length)
    rng = np.random.default_rng([one.start, one.generation, *one.token_ids.tolist()])
    for part in (k, v):
        raw = part.view(torch.uint8)
        raw.copy_(torch.from_numpy(rng.integers(0, 256, raw.shape, dtype=np.uint8)))
    return HostKV(k, v)


def stored(one: Variant, fingerprint: Fingerprint = FINGERPRINT) -> StoredVariant:
    """As a medium keeps it."""
    kv = kv_of(one, fingerprint)
    size = fingerprint.payload_len(one.length)
    info = VariantInfo(
        one.key,
        one.token_ids,
        one.start,
        one.generation,
        one.context,
        None,
        size,
        one.is_prepared,
        one.system,
    )
    return StoredVariant(info, kv.k, kv.v, None if fingerprint.states is None else fingerprint.states.empty())


class DictPool:
    """The KV pool: `variants` can be written down; what was brought in is in `brought`, by key."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.brought: dict[bytes, StoredVariant] = {}
        self.has_room = True
        self.num_gathered = 0

    def kv_of(self, one: Variant) -> HostKV | None:
        if one.variant_id in self.gone:
            return None
        self.num_gathered += 1
        return kv_of(one)

    def bring_in(self, found: StoredVariant, need: Need, partition: Partition, stream: Any = None) -> bool:
        assert partition == PARTITION
        if found.info.key in self.brought and need.fits(self.brought[found.info.key].info):
            return True
        if self.has_room:
            assert found.info.key not in self.brought, "brought in twice"
            self.brought[found.info.key] = found
        return self.has_room


class Tiers:
    """Writer and loader.

    Args:
        folders: name of a tier below the host's -> its folder.
        limits: bytes of each tier; one that is not named has no limit, and without `host` there is no host tier.
        slow: tier -> (bytes per second, latency).
        asked: tiers that are not listed.
        config: of `TierConfig`; the controller is off unless named.
    """

    def __init__(
        self,
        folders: Mapping[str, Path],
        *,
        limits: Mapping[str, int] | None = None,
        slow: Mapping[str, tuple[float, float]] | None = None,
        asked: Sequence[str] = (),
        reduce_max: ReduceMax = of_one_rank,
        fingerprint: Fingerprint = FINGERPRINT,
        eviction: str = "lru",
        **config: Any,
    ) -> None:
        limits, slow = limits or {}, slow or {}
        self.config = TierConfig(**{"host_bytes": limits.get("host", 0), "controller": False, **config})
        media: dict[str, Medium] = {"host": HostMedium(fingerprint)} if "host" in limits else {}
        media |= {name: DiskMedium(folder, fingerprint) for name, folder in folders.items()}
        self.tiers = [
            Tier(
                name,
                Throttled(medium, *slow[name]) if name in slow else medium,
                TierLedger(limits.get(name), eviction),
                is_asked=name in asked,
            )
            for name, medium in media.items()
        ]
        self.pool = DictPool()
        self.workers = Workers(self.config.num_threads)
        self.prefill_cost = PrefillCost()
        metrics = TierMetrics(enabled=False)
        self.counted: list[tuple[str, str]] = []
        metrics.count_load = lambda tier, outcome, *_: self.counted.append((tier, outcome))  # type: ignore[method-assign]
        metrics.count_write = lambda tier, outcome, *_: self.counted.append((tier, outcome))  # type: ignore[method-assign]
        self.writer = TierWriter(
            self.config,
            self.tiers,
            workers=self.workers,
            pool=self.pool,
            metrics=metrics,
            fingerprint=fingerprint,
        )
        self.loader = TierLoader(
            self.config,
            self.tiers,
            workers=self.workers,
            writer=self.writer,
            pool=self.pool,
            metrics=metrics,
            fingerprint=fingerprint,
            prefill_cost=self.prefill_cost,
            ratio=0.15,
            reduce_max=reduce_max,
        )

    def tier(self, name: str) -> Tier:
        return next(tier for tier in self.tiers if tier.name == name)

    def want(
        self, rid: str, *chunks: Wanted, num_keys: int = 100, num_rows: int = 100, num_rows_ahead: int = 0
    ) -> None:
        self.loader.want(rid, chunks, num_keys=num_keys, num_rows=lambda: num_rows, num_rows_ahead=num_rows_ahead)

    def step(self, *queued: str) -> None:
        """One scheduling step with these requests in the queue."""
        self.workers.wait_done(0.002)
        self.loader.poll(queued)

    def settle(self, *rids: str, queued: Sequence[str] = ()) -> None:
        """Until none of them is held; `queued` if there are others in the queue."""
        deadline = time.monotonic() + PATIENCE_S
        self.step(*(queued or rids))
        while any(self.loader.is_held(rid) for rid in rids):
            assert time.monotonic() < deadline, f"still held: {[rid for rid in rids if self.loader.is_held(rid)]}"
            self.step(*(queued or rids))

    def load(self, *chunks: Wanted, rid: str = "r") -> list[Found]:
        """What becomes of the chunks of a request that comes, waits and is admitted."""
        self.want(rid, *chunks)
        self.settle(rid)
        found = self.loader.bring_in(rid)
        self.loader.poll(())
        return [found[chunk.key] for chunk in chunks]

    def idle(self) -> None:
        """Until the workers have nothing to do."""
        deadline = time.monotonic() + PATIENCE_S
        while self.workers.num_running:
            assert time.monotonic() < deadline, f"{self.workers.num_running} jobs never end"
            self.workers.wait_done(0.02)

    def check(self) -> None:
        """Nothing runs: what a ledger lists is what its medium holds, within the budget."""
        self.idle()
        assert self.writer.num_queued_bytes == 0
        for tier in self.tiers:
            tier.ledger.check_integrity()
            held = {info.entry_id: info.payload_len for info in tier.medium.scan()}
            assert set(tier.ledger) == set(held), tier.name
            assert not tier.writing, tier.name
            assert tier.ledger.num_bytes == sum(held.values())
            assert tier.ledger.max_bytes is None or tier.ledger.num_bytes <= tier.ledger.max_bytes

    def check_nothing_waits(self) -> None:
        """No request is here, and nothing is kept for one."""
        self.idle()
        self.loader.poll(())
        assert self.loader.num_held == 0
        assert self.loader.num_staged_bytes == 0
        for kept in ("_waiting", "_searches", "_found", "_estimated_s", "_num_wanting", "_preload", "_staged"):
            assert not getattr(self.loader, kept), kept

    def close(self) -> None:
        self.workers.close()
        for tier in self.tiers:
            tier.medium.close()


@contextmanager
def open_tiers(*args: Any, **kwargs: Any) -> Any:
    """`Tiers`, closed at the end."""
    tiers = Tiers(*args, **kwargs)
    try:
        yield tiers
    finally:
        tiers.close()


class Ranks:
    """`reduce_max` of two ranks that are threads; a rank that stays away breaks the barrier instead of hanging."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_S)
        self._votes: list[Any] = [None, None]

    def reduce_of(self, rank: int) -> ReduceMax:
        def reduce_max(votes: Votes) -> Votes:
            assert votes.dtype == np.int64
            self._votes[rank] = votes.copy()
            self._barrier.wait()
            assert self._votes[0].shape == self._votes[1].shape, "ranks ask about different things"
            reduced: Votes = np.maximum(*self._votes)
            self._barrier.wait()
            return reduced

        return reduce_max


def write(folder: Path, *numbers: int, start: int = 0) -> None:
    """As another server would."""
    for number in numbers:
        DiskMedium(folder, FINGERPRINT).write(stored(variant(number, start=start)))


def file_of(folder: Path, number: int) -> Path:
    (path,) = folder.glob(f"*/*/{wanted(number).key.hex()}/*.kv")
    return path


def flip(path: Path) -> None:
    """A byte of the KV, which is at the end."""
    data = bytearray(path.read_bytes())
    data[-7] ^= 1
    path.write_bytes(data)


def search(tiers: Sequence[Tier], chunk: Wanted, num_layers: int | None = None) -> Found:
    """What is found of a chunk in these tiers, whatever loading takes."""
    found = TierSearch(tiers, FINGERPRINT)
    return found.run(found.open(chunk, {}), num_layers)


def result(found: Found) -> tuple[str, str | None]:
    return found.tier, found.reason
