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
import numpy.typing as npt

from chunk_cache.cost import Estimates, LoadingController, LoadOption, PrefillCost, preload_depth
from chunk_cache.prefetch import PrefetchQueue, State
from sglang_chunk_cache.tiers.base import StoredVariant, VariantInfo
from sglang_chunk_cache.tiers.fingerprint import Fingerprint
from sglang_chunk_cache.tiers.level import HOST, Level, Pool
from sglang_chunk_cache.tiers.search import BAD_ENTRY, NOT_STORED, Found, TierSearch, Wanted
from sglang_chunk_cache.tiers.stream import LayerStream, run_all

if TYPE_CHECKING:
    from chunk_cache.tier_config import TierConfig
    from sglang_chunk_cache.tiers.metrics import TierMetrics
    from sglang_chunk_cache.tiers.workers import Workers
    from sglang_chunk_cache.tiers.writer import TierWriter

Votes = npt.NDArray[np.int64]

MAX_STAGED_BYTES = 2 << 30
"""Of chunks for requests that wait; while there are more, no further load is begun."""

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
        levels: in the order in which they are asked.
        prefill_cost: how long computing takes.
        ratio: of the tokens that are brought in, how many a request usually computes again.
        reduce_max: `int64 -> int64`, the element-wise maximum over the ranks; None where there is one.
    """

    def __init__(
        self,
        config: TierConfig,
        levels: Sequence[Level],
        *,
        workers: Workers,
        writer: TierWriter,
        pool: Pool,
        metrics: TierMetrics,
        max_generation: int,
        fingerprint: Fingerprint,
        prefill_cost: PrefillCost,
        ratio: float,
        reduce_max: Callable[[Votes], Votes] | None,
    ) -> None:
        self._config = config
        self._levels = tuple(levels)
        self._workers = workers
        self._writer = writer
        self._pool = pool
        self._metrics = metrics
        self._search = TierSearch(levels, fingerprint, max_generation)
        self._bytes_per_token = fingerprint.payload_len(1)
        self._num_layers = fingerprint.num_layers
        self._ratio = ratio
        self._prefill_cost = prefill_cost
        self._reduce_max = reduce_max
        self._overlaps = config.loading == "layerwise"
        self._controller = LoadingController(overlaps=self._overlaps)
        self._queue = PrefetchQueue()
        self._waiting: dict[str, _Waiting] = {}
        self._wanted: dict[str, Wanted] = {}  # what is to be loaded, under way or there, by key in hex
        self._found: dict[str, Found] = {}
        self._estimated_s: dict[str, float] = {}
        self._preload: dict[str, int] = {}
        self._staged: dict[str, int] = {}
        self.num_staged_bytes = 0
        """Of chunks that are loaded, or under way, and wanted by a request that was not admitted yet."""
        self._num_wanting: dict[bytes, int] = {}  # requests, by chunk key; workers look at it
        self.estimates = Estimates()
        """Of the loads that were estimated, by this rank."""

    # Requests.

    def want(self, rid: str, chunks: Sequence[Wanted], *, num_keys: int, num_rows_ahead: int = 0) -> None:
        """A request that begins to wait needs chunks that the pool does not have.

        Args:
            num_keys: tokens of its prompt.
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
            if self._levels[0].is_host and self._levels[0].ledger.entries_of(chunk.key.hex()):
                found = self._search.find_in(self._levels[0], chunk, None)
                self._note_reads(chunk.key.hex(), found)
                waiting.decided[chunk.key] = found
        patience = self._config.timeout_s
        if self._config.controller:
            hidden_s = self._prefill_cost.estimate(num_rows_ahead, num_keys) if num_rows_ahead else 0.0
            worth_s = self._compute_what_is_faster(waiting, num_keys, hidden_s)
            patience = min(patience, hidden_s + max(MIN_PATIENCE_S, worth_s))
        to_load = {chunk.key.hex(): chunk for chunk in waiting.chunks if chunk.key not in waiting.decided}
        if self._overlaps:
            self._choose_preload(list(to_load.values()), num_keys)
        self._wanted |= to_load
        self._queue.want(rid, to_load, now, now + patience)
        self._begin_loads()
        while self._config.loading == "sync" and self._state_of(rid) is State.WAITING:
            self._workers.wait_done(0.01)

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
                votes = self._reduce_max(votes.astype(np.int64)).astype(np.int8)
            progress = self._queue.apply(undecided, votes)
            self._settle([one.request_id for one in progress if one.state is not State.WAITING])
        self._drop_unwanted()
        self._begin_loads()

    def is_held(self, rid: str) -> bool:
        return rid in self._queue

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
            if found.stored is None or self._pool.has(chunk.key):
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
                self.num_staged_bytes -= self._staged.pop(chunk.key.hex(), 0)

    def clear(self) -> None:
        """Nobody waits any more."""
        self.poll(())

    # Loads.

    def _compute_what_is_faster(self, waiting: _Waiting, num_keys: int, hidden_s: float) -> float:
        """Decides for chunks that are computed sooner than loaded; how many seconds the others are worth waiting for.

        Twice what they were estimated to take, loaded and computed: an estimate may be wrong, but not for ever.
        """
        candidates = []
        for chunk in waiting.chunks:
            level = self._level_of(chunk)
            if level is not None and chunk.key not in waiting.decided and chunk.key.hex() not in self._wanted:
                option = LoadOption(level.name, self._num_bytes(chunk), len(chunk.token_ids), num_keys)
                candidates.append((chunk, option))
        channels = {level.name: level.reads.record() for level in self._levels}
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
                self._estimated_s[chunk.key.hex()] = channels[option.tier].estimate(option.num_bytes)
                worth_s = max(worth_s, decision.load_s) + decision.compute_s
        return 2.0 * worth_s

    def _choose_preload(self, chunks: Sequence[Wanted], num_keys: int) -> None:
        """How many layers must be there before the forward begins, so that it never waits for one: L_p."""
        levels = [self._level_of(chunk) for chunk in chunks]
        num_tokens = sum(len(chunk.token_ids) for chunk in chunks)
        load_s = sum(
            level.reads.estimate(self._num_bytes(chunk))
            for chunk, level in zip(chunks, levels, strict=True)
            if level is not None
        )
        num_rows = num_keys - num_tokens + round(self._ratio * num_tokens)
        depth = preload_depth(self._num_layers, load_s, self._prefill_cost.estimate(max(num_rows, 1), num_keys))
        self._preload |= {chunk.key.hex(): depth for chunk in chunks if chunk.key.hex() not in self._wanted}

    def _level_of(self, chunk: Wanted) -> Level | None:
        """The first that is known to have it; another server may have written it where we share a tier."""
        key_hex = chunk.key.hex()
        return next((level for level in self._levels if level.ledger.entries_of(key_hex)), None)

    def _num_bytes(self, chunk: Wanted) -> int:
        return len(chunk.token_ids) * self._bytes_per_token

    def _queued_bytes(self) -> dict[str, int]:
        """That were asked for and are not there yet, by tier; each worker reads a share of them."""
        queued = {level.name: 0 for level in self._levels}
        for key_hex, chunk in self._wanted.items():
            level = None if key_hex in self._found else self._level_of(chunk)
            if level is not None:
                queued[level.name] += self._num_bytes(chunk) // self._workers.num_threads
        return queued

    def _state_of(self, rid: str) -> State:
        return next(one.state for one in self._queue.poll(time.monotonic()) if one.request_id == rid)

    def _begin_loads(self) -> None:
        # As many as there is room for: they go on while a forward keeps this thread. One by one where there is none: a
        # single request may want more.
        while (self.num_staged_bytes < MAX_STAGED_BYTES or not self._queue.num_loading) and (
            taken := self._queue.take(1)
        ):
            (key_hex,) = taken
            if key_hex not in self._staged:  # else another request still holds what an earlier load has found
                self._staged[key_hex] = self._num_bytes(self._wanted[key_hex])
                self.num_staged_bytes += self._staged[key_hex]
            find = partial(self._find, self._wanted[key_hex], self._preload.get(key_hex))
            listed = {level.name: level.ledger.entries_of(key_hex) for level in self._levels}
            self._workers.submit(find, partial(self._end, key_hex, listed))

    def _end(self, key_hex: str, listed: Mapping[str, Sequence[str]], found: Found) -> None:
        for level in found.absent:  # what was listed since then has been written since then
            for entry_id in listed[level.name]:
                if entry_id in level.infos:
                    self._writer.forget(level, level.infos[entry_id])
        self._note_reads(key_hex, found)
        self._found[key_hex] = dataclasses.replace(found, reads=(), absent=())
        self._queue.complete(key_hex, True)  # it has ended; how, is what was found
        self._drop_unwanted()
        self._begin_loads()

    def _run_streams(self, streams: list[tuple[str, LayerStream]]) -> None:
        """Reads to their end those that a forward is about to wait for, before what only a queue waits for."""
        streams = [(key_hex, stream) for key_hex, stream in dict(streams).items() if not stream.has_begun]
        for _, stream in streams:
            stream.has_begun = True
        if streams:
            run = partial(run_all, [stream for _, stream in streams])
            self._workers.submit(run, partial(self._end_streams, streams), lane="stream")

    def _end_streams(self, streams: list[tuple[str, LayerStream]], _: None) -> None:
        for key_hex, stream in streams:
            if stream.is_complete:
                self._note_seconds(key_hex, stream.level, stream.stored.info, stream.seconds)
                self._keep_in_host(stream.stored)
            elif stream.reason in BAD_ENTRY:
                self._writer.forget(stream.level, stream.stored.info)

    def _note_seconds(self, key_hex: str, level: Level, info: VariantInfo, seconds: float) -> None:
        level.reads.observe(info.payload_len, seconds)
        if key_hex in self._estimated_s:
            self.estimates.add(self._estimated_s[key_hex], seconds)
            self._metrics.count_estimate(level.name, self._estimated_s[key_hex], seconds)

    def _note_reads(self, key_hex: str, found: Found) -> None:
        """The ledgers learn what is there; the estimates, what it took."""
        for level, info, reason in found.reads:
            self._writer.adopt(level, info)
            if level.ledger.prepare_load(info.entry_id):
                level.ledger.complete_load(info.entry_id, reason not in BAD_ENTRY)
            if reason in BAD_ENTRY:
                self._writer.forget(level, info)
            elif reason is None:
                level.ledger.touch(info.entry_id)
                if found.stream is None:
                    self._note_seconds(key_hex, level, info, found.seconds)

    def _drop_unwanted(self) -> None:
        for key_hex in self._queue.drain():
            self._found.pop(key_hex, None)
            self._wanted.pop(key_hex, None)
            self._estimated_s.pop(key_hex, None)
            self._preload.pop(key_hex, None)

    def _find(self, chunk: Wanted, num_layers: int | None) -> Found:
        """In a worker."""
        return self._search.find(chunk, num_layers) if self._num_wanting.get(chunk.key) else NOT_STORED

    def _settle(self, rids: Sequence[str]) -> None:
        """The loads of these requests have ended, or are late, on all ranks."""
        pairs = [(self._waiting[rid], chunk.key) for rid in rids for chunk in self._waiting[rid].chunks]
        outcomes = [waiting.decided.get(key) or self._found.get(key.hex(), LATE) for waiting, key in pairs]
        if self._reduce_max is not None and outcomes:
            outcomes = self._agree(outcomes, self._reduce_max)
        for rid in rids:
            self._waiting[rid].outcome = {}
        for (waiting, key), found in zip(pairs, outcomes, strict=True):
            assert waiting.outcome is not None
            waiting.outcome[key] = found
        for found in {(key, found.outcome): found for (_, key), found in zip(pairs, outcomes, strict=True)}.values():
            self._note_outcome(found)
        found_by_key = [(key.hex(), found) for (_, key), found in zip(pairs, outcomes, strict=True)]
        self._run_streams([(key_hex, found.stream) for key_hex, found in found_by_key if found.stream is not None])

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
                info = found.stored.info
                for level in self._levels:
                    if info.entry_id in level.infos:
                        self._writer.forget(level, info)
        return agreed

    def _note_outcome(self, found: Found) -> None:
        num_bytes = 0 if found.stored is None else found.stored.info.payload_len
        self._metrics.count_load(found.tier or "none", found.outcome, num_bytes, found.seconds)
        if found.stored is not None and found.stream is None and found.tier != HOST:
            self._keep_in_host(found.stored)

    def _keep_in_host(self, stored: StoredVariant) -> None:
        host = self._levels[0]
        if host.is_host:
            self._writer.put(host, stored)
