"""TierLoader: finds chunks that are not in the KV pool in the tiers below it, for requests that wait.

Verbs: `want` (a request begins to wait), `poll` (once per scheduling step: which loads have ended, on all ranks),
`is_held` (it must not be admitted yet), `bring_in` (what was found for it goes into the pool; just before admission),
`clear`.

Promises: a request is held until each of its loads has ended, in one way or another, and not for longer than
`timeout_s`. One load serves all requests that want the chunk. Tensor-parallel ranks take the same steps: whether a
request is held, and what was found for it, is what all of them have found. What was found stays referenced here until
its request leaves the queue, whatever the tiers evict meanwhile.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from chunk_cache.tiers.cost import Estimates, LoadingController, LoadOption, PrefillCost, preload_depth
from chunk_cache.tiers.prefetch import PrefetchQueue, State, Votes
from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.layer_stream import LayerStream, run_all
from sglang_chunk_cache.kv.stored_variant import StoredVariant, VariantInfo
from sglang_chunk_cache.tiers.pool_view import Pool
from sglang_chunk_cache.tiers.search import BAD_ENTRY, NOT_STORED, Found, TierSearch, Wanted
from sglang_chunk_cache.tiers.tier import HOST, Tier

if TYPE_CHECKING:
    from chunk_cache.options.tier_config import TierConfig
    from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
    from sglang_chunk_cache.tiers.workers import Workers
    from sglang_chunk_cache.tiers.writer import TierWriter

MAX_STAGED_BYTES = 2 << 30
"""Bytes of chunks for requests that wait; while there are more, no further load is begun."""

MIN_PATIENCE_S = 0.25
"""A load that takes this long is not given up for being slow: the first loads have no estimate."""

LATE = Found(reason="tier_timeout")


@dataclass
class _Waiting:
    """A request: `decided` needs no load, by key, and `outcome` is for all chunks, once all loads have ended."""

    chunks: tuple[Wanted, ...]
    decided: dict[bytes, Found] = field(default_factory=dict)
    outcome: dict[bytes, Found] | None = None


class TierLoader:
    """See the head of this file.

    Args:
        tiers: in the order in which they are asked.
        prefill_cost: how long computing takes.
        ratio: of the tokens that are brought in, how many a request usually computes again while layers arrive.
        reduce_max: `int64 -> int64`, the element-wise maximum over the ranks; None where there is one.
    """

    def __init__(
        self,
        config: TierConfig,
        tiers: Sequence[Tier],
        *,
        workers: Workers,
        writer: TierWriter,
        pool: Pool,
        metrics: TierMetrics,
        prefers_prepared: bool,
        fingerprint: Fingerprint,
        prefill_cost: PrefillCost,
        ratio: float,
        reduce_max: Callable[[Votes], Votes] | None,
    ) -> None:
        self._config = config
        self._tiers = tuple(tiers)
        self._workers = workers
        self._writer = writer
        self._pool = pool
        self._metrics = metrics
        self._search = TierSearch(tiers, fingerprint, prefers_prepared)
        self._bytes_per_token = fingerprint.payload_len(1)
        self._num_layers = fingerprint.num_layers
        self._ratio = ratio
        self._prefill_cost = prefill_cost
        self._reduce_max = reduce_max
        self._overlaps = config.loading == "layerwise"
        self._controller = LoadingController(overlaps=self._overlaps)
        self._queue = PrefetchQueue()
        self._waiting: dict[str, _Waiting] = {}
        # All by chunk key:
        self._wanted: dict[bytes, Wanted] = {}  # what is to be loaded, under way or there
        self._found: dict[bytes, Found] = {}
        self._estimated_s: dict[bytes, float] = {}
        self._preload: dict[bytes, int] = {}
        self._staged: dict[bytes, int] = {}
        self._num_wanting: dict[bytes, int] = {}  # requests; workers look at it
        self.num_staged_bytes = 0
        """Bytes of chunks that are there or under way, for requests that were not admitted yet."""
        self.estimates = Estimates()
        """What the loads that this rank estimated have taken."""

    # Requests.

    def want(
        self, rid: str, chunks: Sequence[Wanted], *, num_keys: int, num_rows: Callable[[], int], num_rows_ahead: int = 0
    ) -> None:
        """A request that begins to wait needs chunks that the pool does not have.

        Args:
            num_keys: tokens of its prompt.
            num_rows: gives the rows that it would compute without these chunks; called where layers load beside it.
            num_rows_ahead: rows that the requests in front of it will compute, at most.
        """
        if rid in self._waiting:  # it was admitted or aborted, and is back before anybody looked
            self._forget(rid)
            self._drop_unwanted()
        now = time.monotonic()
        waiting = _Waiting(tuple({chunk.key: chunk for chunk in chunks}.values()))
        self._waiting[rid] = waiting
        for chunk in waiting.chunks:
            self._num_wanting[chunk.key] = self._num_wanting.get(chunk.key, 0) + 1
            if self._tiers[0].is_host and self._tiers[0].ledger.entries_of(chunk.key):
                found = self._search.find_in(self._tiers[0], chunk, None)
                self._note_reads(chunk.key, found)
                waiting.decided[chunk.key] = found
        patience = self._config.timeout_s
        if self._config.controller:
            hidden_s = self._prefill_cost.estimate(num_rows_ahead, num_keys) if num_rows_ahead else 0.0
            worth_s = self._compute_what_is_faster(waiting, num_keys, hidden_s)
            patience = min(patience, hidden_s + max(MIN_PATIENCE_S, worth_s))
        to_load = {chunk.key: chunk for chunk in waiting.chunks if chunk.key not in waiting.decided}
        if self._overlaps:
            self._choose_preload(waiting, num_rows(), num_keys)
        self._wanted |= to_load
        self._queue.want(rid, to_load, now, now + patience)
        self._begin_loads()
        while self._config.loading == "sync" and self._queue.state_of(rid) is State.WAITING:
            self._workers.wait_done(0.01)
            self._queue.poll(time.monotonic())

    def poll(self, queued: Sequence[str]) -> None:
        """Settles what has become of the requests that wait.

        Args:
            queued: ids of the requests in the queue, in order; others that wait here are gone.
        """
        for rid in self._waiting.keys() - set(queued):
            self._forget(rid)
        undecided = [rid for rid in queued if rid in self._queue]
        if undecided:
            self._queue.poll(time.monotonic())
            votes = self._queue.votes(undecided)
            if self._reduce_max is not None:
                votes = self._reduce_max(votes)
            self._settle(self._queue.apply(undecided, votes))
        self._drop_unwanted()
        self._begin_loads()

    def is_held(self, rid: str) -> bool:
        return rid in self._queue

    def has_found(self, rid: str) -> bool:
        """Whether the loads of a request have ended and brought a chunk, which `bring_in` puts into the pool."""
        waiting = self._waiting.get(rid)
        return waiting is not None and any(found.stored is not None for found in (waiting.outcome or {}).values())

    @property
    def num_held(self) -> int:
        return len(self._queue)

    def bring_in(self, rid: str) -> Mapping[bytes, Found]:
        """Puts into the pool what was found for a request and is not there; what became of its chunks, by key."""
        waiting = self._waiting.get(rid)
        if waiting is None or waiting.outcome is None:
            return {}
        for chunk in waiting.chunks:
            found = waiting.outcome[chunk.key]
            if found.stored is None or self._pool.has(chunk.key, chunk.need):
                continue
            if not self._pool.bring_in(found.stored, chunk.partition, found.stream):
                waiting.outcome[chunk.key] = Found(None, found.tier, "memory")
        return waiting.outcome

    def _forget(self, rid: str) -> None:
        """It was admitted, or is gone."""
        self._queue.cancel(rid)
        for chunk in self._waiting.pop(rid).chunks:
            self._num_wanting[chunk.key] -= 1
            if not self._num_wanting[chunk.key]:
                del self._num_wanting[chunk.key]
                self.num_staged_bytes -= self._staged.pop(chunk.key, 0)

    def clear(self) -> None:
        """Nobody waits any more."""
        self.poll(())

    # Loads.

    def _compute_what_is_faster(self, waiting: _Waiting, num_keys: int, hidden_s: float) -> float:
        """Decides for chunks that are computed sooner than loaded; how many seconds the others are worth waiting for.

        Twice what they were estimated to take, loaded and computed: an estimate may be wrong, but not for ever. What
        only a store that is asked may have is asked for in any case, and worth as much.
        """
        candidates, unknown = [], []
        for chunk in waiting.chunks:
            tier = self._expected_tier(chunk)
            if tier is not None and chunk.key not in waiting.decided and chunk.key not in self._wanted:
                option = LoadOption(tier.name, self._num_bytes(chunk), len(chunk.token_ids), num_keys)
                if self._tier_of(chunk) is None:
                    unknown.append(option)
                else:
                    candidates.append((chunk, option))
        channels = {tier.name: tier.reads.record() for tier in self._tiers}
        prefill = self._prefill_cost.record()
        if self._overlaps:  # the forward computes some rows of these chunks in any case
            num_rows = round(self._ratio * sum(option.num_rows for _, option in candidates))
            hidden_s += prefill.estimate(num_rows, num_keys)
        decisions = self._controller.decide(
            [option for _, option in candidates],
            channels,
            prefill,
            queued_bytes=self._queued_bytes(),
            hidden_s=hidden_s,
        )
        worth_s = 0.0
        for (chunk, option), decision in zip(candidates, decisions, strict=True):
            if decision.action == "compute":
                waiting.decided[chunk.key] = Found(None, option.tier, "tier_slow")
            else:
                self._estimated_s[chunk.key] = channels[option.tier].estimate(option.num_bytes)
                worth_s = max(worth_s, decision.load_s) + decision.compute_s
        for option in unknown:
            load_s = channels[option.tier].estimate(option.num_bytes)
            worth_s += load_s + prefill.marginal(option.num_rows, option.num_keys)
        return 2.0 * worth_s

    def _choose_preload(self, waiting: _Waiting, num_rows: int, num_keys: int) -> None:
        """How many layers must be there before the forward begins, so that it never waits for one: L_p."""
        load_s, to_load = 0.0, []
        for chunk in waiting.chunks:
            found, tier = waiting.decided.get(chunk.key), self._expected_tier(chunk)
            is_brought = tier is not None if found is None else found.stored is not None
            num_rows -= round((1.0 - self._ratio) * len(chunk.token_ids)) if is_brought else 0
            if found is None:
                to_load.append(chunk)
                load_s += 0.0 if tier is None else tier.reads.estimate(self._num_bytes(chunk))
        depth = preload_depth(self._num_layers, load_s, self._prefill_cost.estimate(max(num_rows, 1), num_keys))
        self._preload |= {chunk.key: depth for chunk in to_load if chunk.key not in self._wanted}

    def _tier_of(self, chunk: Wanted) -> Tier | None:
        """The first that is known to have it; another server may have written it where we share a tier."""
        return next((tier for tier in self._tiers if tier.ledger.entries_of(chunk.key)), None)

    def _expected_tier(self, chunk: Wanted) -> Tier | None:
        """The same, or one that may have it."""
        return self._tier_of(chunk) or next((tier for tier in self._tiers if tier.is_asked), None)

    def _num_bytes(self, chunk: Wanted) -> int:
        return len(chunk.token_ids) * self._bytes_per_token

    def _queued_bytes(self) -> dict[str, int]:
        """Bytes asked for and not there yet, by tier; each worker reads a share of them."""
        queued = {tier.name: 0 for tier in self._tiers}
        for key, chunk in self._wanted.items():
            tier = None if key in self._found else self._tier_of(chunk)
            if tier is not None:
                queued[tier.name] += self._num_bytes(chunk) // self._workers.num_threads
        return queued

    def _begin_loads(self) -> None:
        # As many as there is room for: they go on while a forward keeps this thread. One by one where there is none: a
        # single request may want more.
        while self.num_staged_bytes < MAX_STAGED_BYTES or not self._queue.num_loading:
            key = self._queue.take()
            if key is None:
                return
            if key not in self._staged:  # else another request still holds what an earlier load has found
                self._staged[key] = self._num_bytes(self._wanted[key])
                self.num_staged_bytes += self._staged[key]
            find = partial(self._find, self._wanted[key], self._preload.get(key))
            listed = {tier.name: tier.ledger.entries_of(key) for tier in self._tiers}
            self._workers.submit(find, partial(self._end, key, listed))

    def _end(self, key: bytes, listed: Mapping[str, Sequence[EntryId]], found: Found) -> None:
        for tier in found.absent:  # what was listed since then has been written since then
            for entry_id in filter(tier.ledger.contains, listed[tier.name]):
                self._writer.forget(tier, entry_id)
        self._note_reads(key, found)
        self._found[key] = dataclasses.replace(found, reads=(), seen=(), absent=())
        self._queue.complete(key)  # it has ended; how, is what was found
        self._drop_unwanted()
        self._begin_loads()

    def _run_streams(self, streams: Mapping[bytes, LayerStream]) -> None:
        """Reads to their end those that a forward is about to wait for, before what only a queue waits for."""
        begun = {key: stream for key, stream in streams.items() if not stream.has_begun}
        for stream in begun.values():
            stream.has_begun = True
        if begun:
            run = partial(run_all, list(begun.values()))
            self._workers.submit(run, partial(self._end_streams, begun), lane="stream")

    def _end_streams(self, streams: Mapping[bytes, LayerStream], _: None) -> None:
        for key, stream in streams.items():
            if stream.is_complete:
                self._note_seconds(key, stream.tier, stream.stored.info, stream.seconds)
                self._keep_in_host(stream.stored)
            elif stream.reason in BAD_ENTRY:
                self._writer.forget(stream.tier, stream.stored.info.entry_id)

    def _note_seconds(self, key: bytes, tier: Tier, info: VariantInfo, seconds: float) -> None:
        tier.reads.observe(info.payload_len, seconds)
        if key in self._estimated_s:
            self.estimates.add(self._estimated_s[key], seconds)
            self._metrics.count_estimate(tier.name, self._estimated_s[key], seconds)

    def _note_reads(self, key: bytes, found: Found) -> None:
        """The ledgers learn what is there; the estimates, what it took."""
        for tier, listed in found.seen:
            self._writer.adopt(tier, listed)
        for tier, info, reason in found.reads:
            tier.ledger.note_read(info.entry_id, is_corrupt=reason in BAD_ENTRY)
            if reason in BAD_ENTRY:
                self._writer.forget(tier, info.entry_id)
            elif reason is None:
                tier.ledger.touch(info.entry_id, found.weight)
                if found.stream is None:
                    self._note_seconds(key, tier, info, found.seconds)

    def _drop_unwanted(self) -> None:
        for key in self._queue.drain():
            self._found.pop(key, None)
            self._wanted.pop(key, None)
            self._estimated_s.pop(key, None)
            self._preload.pop(key, None)

    def _find(self, chunk: Wanted, num_layers: int | None) -> Found:
        """A worker's part: nobody may want it any more."""
        return self._search.find(chunk, num_layers) if self._num_wanting.get(chunk.key) else NOT_STORED

    def _settle(self, rids: Sequence[str]) -> None:
        """The loads of these requests have ended, or are late, on all ranks."""
        pairs = [(self._waiting[rid], chunk.key) for rid in rids for chunk in self._waiting[rid].chunks]
        outcomes = [waiting.decided.get(key) or self._found.get(key, LATE) for waiting, key in pairs]
        if self._reduce_max is not None and outcomes:
            outcomes = self._agree(outcomes, self._reduce_max)
        for rid in rids:
            self._waiting[rid].outcome = {}
        for (waiting, key), found in zip(pairs, outcomes, strict=True):
            assert waiting.outcome is not None
            waiting.outcome[key] = found
        for found in {(key, found.outcome): found for (_, key), found in zip(pairs, outcomes, strict=True)}.values():
            self._note_outcome(found)
        found_by_key = [(key, found) for (_, key), found in zip(pairs, outcomes, strict=True)]
        self._run_streams({key: found.stream for key, found in found_by_key if found.stream is not None})

    def _agree(self, outcomes: Sequence[Found], reduce_max: Callable[[Votes], Votes]) -> list[Found]:
        """What not all ranks found is not used, and forgotten where it cannot be completed: all write it anew then."""
        votes = np.array([found.vote for found in outcomes], dtype=np.int64)
        reduced = reduce_max(np.concatenate([votes, -votes]))
        largest, least = reduced[: len(votes)], -reduced[len(votes) :]
        is_agreed = largest == least
        is_of_no_use = (least > 0) & (largest // 2 != least // 2)
        agreed = []
        for found, same, of_no_use in zip(outcomes, is_agreed.tolist(), is_of_no_use.tolist(), strict=True):
            agreed.append(found if same else Found(None, found.tier, found.reason or "tier_ranks"))
            if of_no_use and found.stored is not None:
                entry_id = found.stored.info.entry_id
                for tier in self._tiers:
                    if tier.ledger.knows(entry_id):
                        self._writer.forget(tier, entry_id)
        return agreed

    def _note_outcome(self, found: Found) -> None:
        num_bytes = 0 if found.stored is None else found.stored.info.payload_len
        self._metrics.count_load(found.tier or "none", found.outcome, num_bytes, found.seconds)
        if found.stored is not None and found.stream is None and found.tier != HOST:
            self._keep_in_host(found.stored)

    def _keep_in_host(self, stored: StoredVariant) -> None:
        host = self._tiers[0]
        if host.is_host:
            self._writer.put(host, stored)
