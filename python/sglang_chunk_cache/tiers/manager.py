"""ChunkTiers: the tiers below the KV pool, as the radix cache and the scheduler see them.

Verbs: `create_tiers` (from the configuration), `note_stored`, `save_victims`, `want`, `poll`, `is_held`, `bring_in`
(see `writer` and `loader`), `clock` (forwards are measured by it), `stored_lens`, `evict`, `flush`, `disable` (the
model is no longer the one that was started), `stats`, `close`.

Order of the tiers: `host` (memory of this process), `disk`, `remote`. A chunk that is found in one of them goes into
the host tier and then into the pool, as a tree node of its own; from there on it is a variant like any other. So only
this package knows where a chunk has been, and a load that fails is a chunk that is not stored.

Promises: pool and index change in the scheduler's thread alone, and alike on all tensor-parallel ranks. What comes from
a tier is used after its checksums, fingerprint and tokens were compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from chunk_cache.cost import PrefillCost, Throughput, hidden_ratio, placement
from chunk_cache.tier_ledger import TierLedger
from sglang_chunk_cache.tiers.base import Medium, TierError, VariantInfo
from sglang_chunk_cache.tiers.clock import ForwardClock
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.fingerprint import Fingerprint
from sglang_chunk_cache.tiers.host import HostMedium
from sglang_chunk_cache.tiers.level import HOST, Level, Pool
from sglang_chunk_cache.tiers.loader import TierLoader, Wanted
from sglang_chunk_cache.tiers.metrics import TierMetrics
from sglang_chunk_cache.tiers.search import Outcome
from sglang_chunk_cache.tiers.stream import LayerStream
from sglang_chunk_cache.tiers.throttled import Throttled
from sglang_chunk_cache.tiers.workers import Workers
from sglang_chunk_cache.tiers.writer import TierWriter

if TYPE_CHECKING:
    from chunk_cache.config import Config
    from chunk_cache.tier_config import RemoteConfig, TierConfig
    from chunk_cache.variant import Variant

logger = logging.getLogger(__name__)


class ChunkTiers:
    """See the head of this file."""

    def __init__(
        self,
        config: TierConfig,
        levels: Sequence[Level],
        *,
        pool: Pool,
        metrics: TierMetrics,
        max_generation: int,
        fingerprint: Fingerprint,
        ratio: float,
        tp_group: torch.distributed.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        self._config = config
        self._levels = tuple(levels)
        self._tp_group = tp_group
        self._bytes_per_token = fingerprint.payload_len(1)
        self._ratio = ratio
        self._max_generation = max_generation
        self.reduce_max = None if tp_group is None else self._reduce_max
        self._workers = Workers(config.num_threads)
        self._prefill_cost = PrefillCost()
        self.clock = ForwardClock(device)
        self._disabled_reason: str | None = None
        self._writer = TierWriter(
            config,
            levels,
            workers=self._workers,
            pool=pool,
            metrics=metrics,
            bytes_per_token=fingerprint.payload_len(1),
            place=self._place if config.costs else None,
        )
        self._loader = TierLoader(
            config,
            levels,
            workers=self._workers,
            writer=self._writer,
            pool=pool,
            metrics=metrics,
            max_generation=max_generation,
            fingerprint=fingerprint,
            prefill_cost=self._prefill_cost,
            ratio=ratio,
            reduce_max=self.reduce_max,
        )
        for level in self._levels:
            if not level.is_host:
                problem = f"tier {level.name} was not searched"
                self._workers.submit(partial(_listed, level, level.medium.scan, problem), self._adopt_all)

    def note_stored(self, variant: Variant) -> None:
        """See `TierWriter.note_stored`."""
        if self._disabled_reason is None:
            self._writer.note_stored(variant)

    def save_victims(self, variants: Iterable[Variant], num_tokens: int) -> None:
        """See `TierWriter.save_victims`."""
        if self._disabled_reason is None:
            self._writer.save_victims(variants, num_tokens)

    def want(self, rid: str, chunks: Sequence[Wanted], *, num_keys: int, num_rows_ahead: int) -> None:
        """See `TierLoader.want`."""
        if self._disabled_reason is None and chunks:
            self._loader.want(rid, chunks, num_keys=num_keys, num_rows_ahead=num_rows_ahead)

    def poll(self, queued: Sequence[str]) -> None:
        """What workers have done takes effect, and `TierLoader.poll`."""
        for forward in self.clock.harvest():
            self._prefill_cost.observe(forward.num_rows, forward.num_keys, forward.seconds)
        self._workers.run_done()
        self._loader.poll(queued)

    def wait(self, timeout_s: float) -> None:
        """For a worker to be done; where a step has nothing else to do, so that the workers get the interpreter."""
        self._workers.wait_done(timeout_s)

    def is_held(self, rid: str) -> bool:
        """Whether a request waits for its loads, so that it must not be admitted."""
        return self._loader.is_held(rid)

    def bring_in(self, rid: str) -> dict[bytes, Outcome]:
        """See `TierLoader.bring_in`; without the KV, which the request must not keep alive."""
        return {key: found.without_kv() for key, found in self._loader.bring_in(rid).items()}

    def hidden_ratio(self, streams: Sequence[LayerStream], num_tokens: int, num_keys: int, least: float) -> float:
        """The recompute ratio whose work hides behind the layers that are still to come (CacheBlend section 5.1).

        Args:
            streams: that the forward will wait for.
            num_tokens: of all chunks that are brought in.
            num_keys: of the prompt.
            least: the ratio that quality asks for.
        """
        if not self._config.hide_ratio:
            return least
        left = [(stream, num_bytes) for stream in streams if (num_bytes := stream.num_bytes_left)]
        ratio = least
        if left:
            load_s = sum(stream.level.reads.estimate(num_bytes) for stream, num_bytes in left)
            share_left = max(num_bytes / stream.stored.info.payload_len for stream, num_bytes in left)
            ratio = hidden_ratio(load_s, share_left * self._prefill_cost.estimate(num_tokens, num_keys), least)
        # Every rank votes, whatever is left of its own streams; in thousandths, as each has its own estimates.
        if self.reduce_max is not None:
            ratio = float(self.reduce_max(np.array([round(1000 * ratio)], dtype=np.int64))[0]) / 1000
        return max(least, min(1.0, ratio))

    def stored_lens(self, keys: Sequence[bytes]) -> dict[bytes, int]:
        """Tokens of those of these chunks of which the tiers of every rank are known to have a usable variant."""
        if self._disabled_reason is not None or not keys:
            return {}
        lens = np.array([self._stored_len(key) for key in keys], dtype=np.int64)
        if self.reduce_max is not None:  # the ledgers of the ranks learn of it at different times
            lens = -self.reduce_max(-lens)
        return {key: length for key, length in zip(keys, lens.tolist(), strict=True) if length}

    def _stored_len(self, key: bytes) -> int:
        infos = (level.infos[entry_id] for level in self._levels for entry_id in level.ledger.entries_of(key.hex()))
        return max((len(info.token_ids) for info in infos if info.generation <= self._max_generation), default=0)

    def evict(self, keys: Sequence[bytes]) -> dict[bytes, dict[str, int]]:
        """Deletes all variants of these chunks, also those that other servers wrote, as soon as workers come to it.

        Returns:
            By key and tier, how many variants any rank knew of; keys and tiers without any are left out.
        """
        num_known = np.zeros((len(keys), len(self._levels)), dtype=np.int64)
        for i, key in enumerate(keys):
            for j, level in enumerate(self._levels):
                known = [level.infos[entry_id] for entry_id in level.ledger.entries_of(key.hex())]
                num_known[i, j] = len(known)
                self._forget_all((level, known))  # at once: whoever asks from now on is told that it is gone
                if not level.is_host:
                    problem = f"a chunk was not deleted from tier {level.name}"
                    find = partial(level.medium.find, key)
                    self._workers.submit(partial(_listed, level, find, problem), self._forget_all)
        if self.reduce_max is not None and keys:  # the ledgers of the ranks learn of it at different times
            num_known = self.reduce_max(num_known.reshape(-1)).reshape(num_known.shape)
        return {
            key: {level.name: num for level, num in zip(self._levels, row, strict=True) if num}
            for key, row in zip(keys, num_known.tolist(), strict=True)
            if any(row)
        }

    def _forget_all(self, found: tuple[Level, list[VariantInfo]]) -> None:
        level, infos = found
        for info in infos:
            self._writer.forget(level, info)

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

    def stats(self) -> dict[str, Any]:
        """Plain JSON values: per tier what the ledger counts and what loads take, and whether estimates were true."""
        estimates = self._loader.estimates
        prefill = self._prefill_cost.record()
        return {
            "disabled": self._disabled_reason,
            "held_requests": self._loader.num_held,
            "queued_write_bytes": self._writer.num_queued_bytes,
            "staged_bytes": self._loader.num_staged_bytes,
            "tiers": {level.name: _level_stats(level) for level in self._levels},
            "prefill": {
                "s_per_pass": prefill.s_per_pass,
                "s_per_row": prefill.s_per_row,
                "s_per_pair": prefill.s_per_pair,
            },
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
        for level in self._levels:
            level.medium.close()

    def _place(self, variant: Variant) -> str | None:
        """Where a variant is kept: the cheapest tier whose load hides behind what is recomputed of it."""
        channels = {level.name: level.reads.record() for level in self._levels}
        costs = self._config.costs_of(channels)
        compute_s = self._prefill_cost.record().marginal(variant.length, variant.start + variant.length)
        return placement(costs, channels, variant.length * self._bytes_per_token, self._ratio * compute_s)

    def _adopt_all(self, found: tuple[Level, list[VariantInfo]]) -> None:
        level, infos = found
        for info in infos:
            self._writer.adopt(level, info)
        logger.info(
            "Chunk cache: tier %s holds %d chunks, %d bytes", level.name, len(level.ledger), level.ledger.num_bytes
        )

    def _reduce_max(self, votes: np.ndarray) -> np.ndarray:
        tensor = torch.from_numpy(votes)
        torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=self._tp_group)
        return votes


def create_tiers(
    config: Config,
    fingerprint: Fingerprint,
    *,
    pool: Pool,
    ratio: float,
    tp_group: torch.distributed.ProcessGroup | None,
    device: torch.device,
    is_counting: bool,
) -> ChunkTiers | None:
    """The tiers of the configuration; None where it names none.

    Args:
        ratio: the server's.
        tp_group: for agreements of the tensor-parallel ranks, on the CPU; None where there is one rank.
        is_counting: whether this rank counts for the metrics.

    Raises:
        TierError: a tier cannot be opened.
        ImportError, ValueError: its client is not installed, its name is not known, or memory for it is not there.
    """
    tiers = config.tiers
    if tiers is None:
        return None
    levels = []
    if tiers.costs and fingerprint.tp_size > 1:
        raise ValueError("costs: each rank would place by its own estimates; leave them out with tensor parallelism")
    if tiers.host_bytes:
        _check_host_memory(tiers.host_bytes * fingerprint.tp_size)
        levels.append(_level(HOST, HostMedium(fingerprint), tiers.host_bytes, config))
    if tiers.disk is not None:
        disk = DiskMedium(tiers.disk.path, fingerprint)
        max_bytes = None if tiers.disk.max_bytes is None else tiers.disk.max_bytes // fingerprint.tp_size
        levels.append(_level("disk", disk, max_bytes, config))
    if tiers.remote is not None:
        levels.append(_level("remote", _remote(tiers.remote, fingerprint), None, config))
    return ChunkTiers(
        tiers,
        levels,
        pool=pool,
        metrics=TierMetrics(enabled=is_counting),
        max_generation=config.max_generation,
        fingerprint=fingerprint,
        ratio=ratio,
        tp_group=tp_group,
        device=device,
    )


def _level(name: str, medium: Medium, max_bytes: int | None, config: Config) -> Level:
    assert config.tiers is not None
    throttle = config.tiers.throttle_of(name)
    if throttle is not None:
        medium = Throttled(medium, throttle.bytes_per_s, throttle.latency_s)
    return Level(name, medium, TierLedger(max_bytes, config.eviction, config.ageing), Throughput())


def _check_host_memory(num_bytes: int) -> None:
    """
    Raises:
        ValueError: the machine does not have them.
    """
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ValueError(
            f"host_bytes: {num_bytes} bytes for all ranks, but {available} are free; give fewer, or free memory"
        )


def _remote(remote: RemoteConfig, fingerprint: Fingerprint) -> Medium:
    # Imported here: each needs a package that few servers have.
    if remote.url is not None:
        from sglang_chunk_cache.tiers.remote import RemoteMedium

        return RemoteMedium(remote.url, fingerprint)
    from sglang_chunk_cache.tiers.hicache import HiCacheMedium

    assert remote.hicache is not None
    return HiCacheMedium(remote.hicache, fingerprint, settings=dict(remote.settings))


def _listed(
    level: Level, list_infos: Callable[[], Iterable[VariantInfo]], problem: str
) -> tuple[Level, list[VariantInfo]]:
    """In a worker: what `list_infos` gives, or nothing, with the problem in the log, where the tier cannot say."""
    try:
        return level, list(list_infos())
    except TierError as error:
        logger.warning("Chunk cache: %s: %s", problem, error)
        return level, []


def _level_stats(level: Level) -> dict[str, Any]:
    reads = level.reads.record()
    return {
        "entries": len(level.ledger),
        "bytes": level.ledger.num_bytes,
        "max_bytes": level.ledger.max_bytes,
        "latency_s": reads.latency_s,
        "bytes_per_s": 1.0 / reads.s_per_byte if reads.s_per_byte else None,
        **level.ledger.stats(),
    }
