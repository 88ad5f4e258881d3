"""TierLoader: finds chunks that are not in the KV pool in the tiers below it, for requests that wait.

Verbs: `want` (a request begins to wait), `poll` (once per scheduling step: which loads have ended, on all ranks),
`is_held` (whether a request must not be admitted yet), `bring_in` (puts what was found for a request into the pool,
just before its admission), `clear`.

Promises: a request is held until each of its loads has succeeded or failed, but not for longer than `timeout_s`. One
load serves all requests that want the chunk. All tensor-parallel ranks hold the same requests, and use only what all of
them have found. What was found stays referenced here until its request leaves the queue, even if the tiers evict it.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from chunk_cache.options.tier_config import TierConfig
from chunk_cache.tiers.agreement import Verdict, agree
from chunk_cache.tiers.cost import Estimates, LoadingController, LoadOption, PrefillCost, layers_to_await, load_share
from chunk_cache.tiers.placing import HOST, Moment
from chunk_cache.tiers.prefetch import PrefetchQueue, State
from chunk_cache.tiers.tier_ledger import EntryId
from chunk_cache.tiers.variant_search import Expected
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.layer_stream import LayerStream, run_all
from sglang_chunk_cache.kv.pool import ChunkPool
from sglang_chunk_cache.kv.ranks import ReduceMax
from sglang_chunk_cache.kv.stored_variant import VariantInfo
from sglang_chunk_cache.telemetry.tier_metrics import TierMetrics
from sglang_chunk_cache.tiers.search import BAD_ENTRY, Found, OpenSearch, TierSearch, Wanted
from sglang_chunk_cache.tiers.tier import Tier
from sglang_chunk_cache.tiers.workers import Workers
from sglang_chunk_cache.tiers.writer import TierWriter

MAX_STAGED_BYTES = 2 << 30
"""Bytes of chunks for requests that wait; once there are as many, a load begins only when no other is running."""

TOO_LATE = Found(reason="tier_timeout")
OUTRUN = Found(reason="tier_late")
UNWANTED = Found()
"""A load that nobody wanted any more when its turn came; no tier was asked."""


@dataclass
class _Waiting:
    """A request that waits.

    Attributes:
        late: outcome of a chunk that has not come when the request stops waiting.
        decided: outcomes of chunks that need no load, by key.
        outcome: outcomes of all chunks, by key, once the request does not wait any more.
    """

    chunks: tuple[Wanted, ...]
    late: Found = TOO_LATE
    decided: dict[bytes, Found] = field(default_factory=dict)
    outcome: dict[bytes, Found] = field(default_factory=dict)


class TierLoader:
    """See the head of this file.

    Args:
        tiers: in the order in which they are asked.
        prefill_cost: how long computing takes.
        ratio: share of the loaded tokens that a request usually recomputes while layers arrive.
    """

    def __init__(
        self,
        config: TierConfig,
        tiers: Sequence[Tier],
        *,
        workers: Workers,
        writer: TierWriter,
        pool: ChunkPool,
        metrics: TierMetrics,
        fingerprint: Fingerprint,
        prefill_cost: PrefillCost,
        ratio: float,
        reduce_max: ReduceMax,
    ) -> None:
        self._config = config
        self._tiers = tuple(tiers)
        self._workers = workers
        self._writer = writer
        self._pool = pool
        self._metrics = metrics
        self._search = TierSearch(tiers, fingerprint)
        self._payload_len = fingerprint.payload_len
        self._num_layers = fingerprint.num_layers
        self._ratio = ratio
        self._prefill_cost = prefill_cost
        self._reduce_max = reduce_max
        self._overlaps = config.loading == "layerwise"
        self._controller = LoadingController(overlaps=self._overlaps)
        self._queue = PrefetchQueue()
        self._waiting: dict[str, _Waiting] = {}
        # All by chunk key:
        self._searches: dict[bytes, OpenSearch] = {}  # of chunks that will be loaded, are being loaded or were loaded
        self._found: dict[bytes, Found] = {}
        self._estimated_s: dict[bytes, float] = {}
        self._preload: dict[bytes, int] = {}
        self._staged: dict[bytes, int] = {}
        self._num_wanting: dict[bytes, int] = {}  # requests; workers look at it
        self._num_deletions = 0  # what began before the last one may bring what was deleted
        self.num_staged_bytes = 0
        """Bytes of chunks that are there or under way, for requests that were not admitted yet."""
        self.estimates = Estimates()
        """Estimated and actual seconds of this rank's loads."""

    # Requests.

    def want(
        self, rid: str, chunks: Sequence[Wanted], *, num_keys: int, num_rows: Callable[[], int], num_rows_ahead: int = 0
    ) -> None:
        """Begins to load chunks for a request: those that the pool lacks, or has only as a variant that fits worse.

        Args:
            num_keys: tokens of its prompt.
            num_rows: returns the rows that it would compute without these chunks; called if layers load in forwards.
            num_rows_ahead: most rows that the requests in front of it will compute.
        """
        if rid in self._waiting:  # it was admitted or aborted, and was queued again before the next `poll`
            self._forget(rid)
            self._drop_unwanted()
        now = time.monotonic()
        hidden_s = self._prefill_cost.estimate(num_rows_ahead, num_keys) if num_rows_ahead else 0.0
        searches = self._open_searches(chunks, num_keys, hidden_s)
        if not searches:
            return
        waiting = _Waiting(tuple(search.chunk for search in searches.values()))
        self._waiting[rid] = waiting
        for key, search in searches.items():
            self._num_wanting[key] = self._num_wanting.get(key, 0) + 1
            found = self._search.run_in_memory(search)
            if found is not None:
                self._note_reads(key, found)
                waiting.decided[key] = found
        patience = self._config.timeout_s
        if self._config.controller:
            patience = self._compute_what_is_faster(waiting, searches, num_keys, hidden_s)
        to_load = {key: search for key, search in searches.items() if key not in waiting.decided}
        if self._overlaps:
            self._choose_preload(waiting, searches, num_rows(), num_keys)
        for key, search in to_load.items():
            other = self._searches.get(key)
            if other is None or (other.chunk.held.is_of_use and not search.chunk.held.is_of_use):
                self._searches[key] = search  # the pool has nothing for this request; a search that runs goes on
        self._queue.want(rid, to_load, now, now + patience)
        self._begin_loads()
        while self._config.loading == "sync" and self._queue.state_of(rid) is State.WAITING:
            self._workers.wait_done(0.01)
            self._queue.poll(time.monotonic())

    def _open_searches(self, chunks: Sequence[Wanted], num_keys: int, hidden_s: float) -> dict[bytes, OpenSearch]:
        """Searches by key. A chunk that the pool has is left out, unless some rank may find a better variant of it."""
        chunks = tuple({chunk.key: chunk for chunk in chunks}.values())
        is_held = any(chunk.held.is_of_use for chunk in chunks)
        shares = np.zeros((len(chunks), len(self._tiers)))
        if self._config.controller and (is_held or len(self._tiers) > 1):
            channels, queued = {tier.name: tier.reads.record() for tier in self._tiers}, self._queued_bytes()
            prefill = self._prefill_cost.record()
            for i, chunk in enumerate(chunks):
                compute_s = prefill.marginal(len(chunk.token_ids), num_keys)
                for j, tier in enumerate(self._tiers):
                    load_s = channels[tier.name].estimate(self._num_bytes(chunk), queued[tier.name])
                    shares[i, j] = load_share(load_s, compute_s, hidden_s)
            shares = self._agreed(shares * 1000) / 1000
        searches = {}
        for chunk, row in zip(chunks, shares.tolist(), strict=True):
            names = (tier.name for tier in self._tiers)
            searches[chunk.key] = self._search.open(chunk, dict(zip(names, row, strict=True)))
        if not is_held:
            return searches
        of_use = [not search.chunk.held.is_of_use or search.steps.next() is not None for search in searches.values()]
        agreed = self._agreed(np.array(of_use, dtype=float)).tolist()
        return {key: search for (key, search), is_of_use in zip(searches.items(), agreed, strict=True) if is_of_use}

    def _agreed(self, values: np.ndarray) -> np.ndarray:
        """The largest value of any rank, rounded up, so that all ranks decide alike."""
        votes = np.minimum(np.ceil(values), 1 << 40).astype(np.int64)
        return self._reduce_max(votes.reshape(-1)).reshape(votes.shape)

    def poll(self, queued: Sequence[str]) -> None:
        """Settles requests whose loads have ended or are late, and begins further loads.

        Args:
            queued: ids of the requests in the queue, in order; others that wait here are forgotten.
        """
        for rid in self._waiting.keys() - set(queued):
            self._forget(rid)
        undecided = [rid for rid in queued if rid in self._queue]
        if undecided:
            self._queue.poll(time.monotonic())
            votes = self._reduce_max(self._queue.votes(undecided))
            self._settle(self._queue.apply(undecided, votes))
        self._drop_unwanted()
        self._begin_loads()

    def is_held(self, rid: str) -> bool:
        return rid in self._queue

    def has_found(self, rid: str) -> bool:
        """Whether the loads of a request have ended and brought a chunk, which `bring_in` puts into the pool."""
        waiting = self._waiting.get(rid)
        return waiting is not None and any(found.stored is not None for found in waiting.outcome.values())

    @property
    def num_held(self) -> int:
        return len(self._queue)

    def bring_in(self, rid: str) -> Mapping[bytes, Found]:
        """Puts what was found for a request into the pool, if it is not there; returns what became of its chunks."""
        waiting = self._waiting.get(rid)
        if waiting is None or not waiting.outcome:
            return {}
        for chunk in waiting.chunks:
            found, need = waiting.outcome[chunk.key], chunk.need
            if found.stream is not None and found.stream.is_given_up:
                waiting.outcome[chunk.key] = Found(None, found.tier, f"tier_{found.stream.reason}")
            elif found.stored and not self._pool.bring_in(found.stored, need, chunk.partition, found.stream):
                waiting.outcome[chunk.key] = Found(None, found.tier, "memory")
        return waiting.outcome

    def _forget(self, rid: str) -> None:
        """Forgets a request that was admitted or is gone."""
        self._queue.cancel(rid)
        for chunk in self._waiting.pop(rid).chunks:
            self._num_wanting[chunk.key] -= 1
            if not self._num_wanting[chunk.key]:
                del self._num_wanting[chunk.key]
                num_bytes = self._staged.pop(chunk.key, None)
                if num_bytes is None:  # its load never began, so the queue will not drain it
                    self._drop(chunk.key)
                else:
                    self.num_staged_bytes -= num_bytes

    def clear(self) -> None:
        """Forgets all requests."""
        self.poll(())

    def note_deletion(self) -> None:
        """Something was deleted for good: nobody waits any longer, and what is being read by now is not used."""
        self._num_deletions += 1
        for found in (found for waiting in self._waiting.values() for found in waiting.outcome.values()):
            if found.stream is not None:
                found.stream.fail("unavailable")
        self.clear()

    # Loads.

    def _compute_what_is_faster(
        self, waiting: _Waiting, searches: Mapping[bytes, OpenSearch], num_keys: int, hidden_s: float
    ) -> float:
        """Marks chunks that are computed sooner than loaded; returns how many seconds the request waits for others."""
        options: dict[bytes, LoadOption] = {}
        for key, search in searches.items():
            expected, chunk = self._expected(search), search.chunk
            if expected is None or key in waiting.decided or key in self._searches:
                continue
            num_rows, is_anyway = expected.num_rows(len(chunk.token_ids)), search.steps.goes_on_anyway
            options[key] = LoadOption(expected.tier, self._num_bytes(chunk), num_rows, num_keys, is_anyway)
        channels = {tier.name: tier.reads.record() for tier in self._tiers}
        plan = self._controller.load_or_compute(
            list(options.values()),
            channels,
            self._prefill_cost.record(),
            queued_bytes=self._queued_bytes(),
            hidden_s=hidden_s,
            ratio=self._ratio,
            timeout_s=self._config.timeout_s,
        )
        for (key, option), decision in zip(options.items(), plan.decisions, strict=True):
            if decision is not None and decision.action == "compute":
                waiting.decided[key] = Found(None, option.tier, "tier_slow")
            elif decision is not None:
                self._estimated_s[key] = channels[option.tier].estimate(option.num_bytes)
        waiting.late = OUTRUN if plan.is_short else TOO_LATE
        return plan.patience_s

    def _choose_preload(
        self, waiting: _Waiting, searches: Mapping[bytes, OpenSearch], num_rows: int, num_keys: int
    ) -> None:
        """Sets how many layers are loaded before the forward begins, so that it never waits for one: L_p."""
        load_s, to_load, spared_lens = 0.0, [], []
        for key, search in searches.items():
            found, expected, chunk = waiting.decided.get(key), self._expected(search), search.chunk
            is_brought = expected is not None if found is None else found.stored is not None
            if is_brought and not chunk.held.is_of_use:
                spared_lens.append(len(chunk.token_ids))
            if found is None:
                to_load.append(key)
                load_s += 0.0 if expected is None else self._tier(expected.tier).reads.estimate(self._num_bytes(chunk))
        depth = layers_to_await(
            self._num_layers,
            load_s,
            self._prefill_cost.record(),
            num_rows=num_rows,
            num_keys=num_keys,
            spared_lens=spared_lens,
            ratio=self._ratio,
        )
        self._preload |= {key: depth for key in to_load if key not in self._searches}

    def _expected(self, search: OpenSearch) -> Expected | None:
        return search.steps.likely(tier.name for tier in self._tiers if tier.is_asked)

    def _tier(self, name: str) -> Tier:
        return next(tier for tier in self._tiers if tier.name == name)

    def _num_bytes(self, chunk: Wanted) -> int:
        return self._payload_len(len(chunk.token_ids))

    def _queued_bytes(self) -> dict[str, int]:
        """Bytes of loads that have not ended, by tier, divided by the number of workers."""
        queued = {tier.name: 0 for tier in self._tiers}
        for key, search in self._searches.items():
            tier = None if key in self._found else self._tier_that_has(key)
            if tier is not None:
                queued[tier.name] += self._num_bytes(search.chunk) // self._workers.num_threads
        return queued

    def _tier_that_has(self, key: bytes) -> Tier | None:
        """The first tier below host memory that is known to have the chunk."""
        return next((tier for tier in self._tiers if not tier.is_host and tier.ledger.entries_of(key)), None)

    def _begin_loads(self) -> None:
        # As many as there is room for, since they run while a forward keeps this thread busy; without room, one at a
        # time, since a single request may want more than there is room for.
        while self.num_staged_bytes < MAX_STAGED_BYTES or not self._queue.num_loading:
            key = self._queue.take()
            if key is None:
                return
            self._load(key)

    def _load(self, key: bytes) -> None:
        if key not in self._staged:  # otherwise another request still holds what an earlier load found
            self._staged[key] = self._num_bytes(self._searches[key].chunk)
            self.num_staged_bytes += self._staged[key]
        find = partial(self._find, self._searches[key], self._preload.get(key))
        listed = {tier.name: tier.ledger.entries_of(key) for tier in self._tiers}
        self._workers.submit(find, partial(self._end, key, listed, self._num_deletions))

    def _end(self, key: bytes, listed: Mapping[str, Sequence[EntryId]], num_deletions: int, found: Found) -> None:
        if num_deletions != self._num_deletions:
            found = UNWANTED
        # By a request that came since the worker looked; one that does without this load has no search.
        if found is UNWANTED and key in self._searches and self._num_wanting.get(key):
            self._load(key)
            return
        for tier in found.absent:  # `listed` is from before the search: later entries were written meanwhile
            for entry_id in filter(tier.ledger.contains, listed[tier.name]):
                self._writer.forget(tier, entry_id)
        self._note_reads(key, found)
        self._found[key] = dataclasses.replace(found, reads=(), seen=(), absent=())
        self._queue.complete(key)  # the load has ended; `found` says how
        self._drop_unwanted()
        self._begin_loads()

    def _run_streams(self, streams: Mapping[bytes, LayerStream]) -> None:
        """Reads streams to their end, in a lane of their own: a forward needs them sooner than queued requests do."""
        begun = {key: stream for key, stream in streams.items() if not stream.has_begun}
        for stream in begun.values():
            stream.has_begun = True
        if begun:
            run = partial(run_all, list(begun.values()))
            self._workers.submit(run, partial(self._end_streams, begun, self._num_deletions), lane="stream")

    def _end_streams(self, streams: Mapping[bytes, LayerStream], num_deletions: int, _: None) -> None:
        for key, stream in streams.items():
            if stream.is_complete:
                self._note_seconds(key, self._tier(stream.tier), stream.stored.info, stream.seconds)
                if num_deletions == self._num_deletions:
                    self._writer.put(stream.stored, Moment.LOADED)
            elif stream.reason in BAD_ENTRY:
                self._writer.forget(self._tier(stream.tier), stream.stored.info.entry_id)

    def _note_seconds(self, key: bytes, tier: Tier, info: VariantInfo, seconds: float) -> None:
        tier.reads.observe(info.payload_len, seconds)
        if key in self._estimated_s:
            self.estimates.add(self._estimated_s[key], seconds)
            self._metrics.count_estimate(tier.name, self._estimated_s[key], seconds)

    def _note_reads(self, key: bytes, found: Found) -> None:
        """Tells the ledgers what is there, and the estimates how long it took to read."""
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
            self._drop(key)

    def _drop(self, key: bytes) -> None:
        self._found.pop(key, None)
        self._searches.pop(key, None)
        self._estimated_s.pop(key, None)
        self._preload.pop(key, None)

    def _find(self, search: OpenSearch, num_layers: int | None) -> Found:
        """Runs a search unless nobody wants its chunk any more; called by a worker."""
        return self._search.run(search, num_layers) if self._num_wanting.get(search.chunk.key) else UNWANTED

    def _settle(self, rids: Sequence[str]) -> None:
        """Sets the outcome of requests whose loads have ended, or are late, on all ranks."""
        if not rids:
            return
        settled = [(self._waiting[rid], chunk) for rid in rids for chunk in self._waiting[rid].chunks]
        outcomes = self._agree([self._outcome(waiting, chunk) for waiting, chunk in settled])
        noted: dict[tuple[bytes, str], Found] = {}  # once per chunk, however many requests wanted it
        streams: dict[bytes, LayerStream] = {}
        for (waiting, chunk), found in zip(settled, outcomes, strict=True):
            waiting.outcome[chunk.key] = noted[chunk.key, found.outcome] = found
            if found.stream is not None:
                streams[chunk.key] = found.stream
        for found in noted.values():
            self._note_outcome(found)
        self._run_streams(streams)

    def _outcome(self, waiting: _Waiting, chunk: Wanted) -> Found:
        """What was decided or found for a chunk; if that came too late, what host memory has of it."""
        found = waiting.decided.get(chunk.key) or self._found.get(chunk.key)
        # Another request's search may have ended because the pool has a variant for it, but none for this request.
        if found is not None and (chunk.held.is_of_use or not found.is_held):
            return found
        in_memory = self._search.run_in_memory(self._search.open(chunk, {}, is_memory=True))
        if in_memory is None or in_memory.stored is None:
            return waiting.late
        self._note_reads(chunk.key, in_memory)
        return in_memory

    def _agree(self, outcomes: Sequence[Found]) -> list[Found]:
        """Drops what not all ranks found, and deletes entries of which a rank has no part: all write them anew then."""
        agreed = []
        for found, verdict in zip(outcomes, agree([found.vote for found in outcomes], self._reduce_max), strict=True):
            is_same = verdict is Verdict.SAME
            agreed.append(found if is_same else Found(None, found.tier, found.reason or "tier_ranks"))
            if verdict is Verdict.OF_NO_USE and found.stored is not None:
                entry_id = found.stored.info.entry_id
                for tier in self._tiers:
                    if tier.ledger.knows(entry_id):
                        self._writer.forget(tier, entry_id)
        return agreed

    def _note_outcome(self, found: Found) -> None:
        if found.is_held:
            return
        num_bytes = 0 if found.stored is None else found.stored.info.payload_len
        self._metrics.count_load(found.tier or "none", found.outcome, num_bytes, found.seconds)
        if found.stored is not None and found.stream is None and found.tier != HOST:
            self._writer.put(found.stored, Moment.LOADED)
