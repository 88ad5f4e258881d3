"""Gate: verifies fused replies in idle time, keeps the results, and moves method and ratio if there is a target.

Verbs, in the life of a request: `steer` (it came), `admit` (it reuses chunks), `release` (it ends). While idle, for a
candidate of the `queue`: `complete` or `give_up`. At any time: `drop_replies`, `forget` (the weights changed), `save`,
`stats`.

Promises: all tensor-parallel ranks do the same, since they agree on each measure; no `verify_share`, no gate.
"""

from __future__ import annotations

import logging
from array import array
from collections import deque
from dataclasses import asdict
from typing import Any

import numpy as np

from chunk_cache.gate.controller import TargetController
from chunk_cache.gate.target import Target, describe
from chunk_cache.gate.verification_ledger import Kind, Measure, QualityLedger, band_of
from chunk_cache.gate.verification_queue import Candidate, VerificationQueue
from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.types import MAX_ID_LEN
from sglang_chunk_cache.kv.ranks import ReduceMax
from sglang_chunk_cache.request.chunk_request import ChunkRequest
from sglang_chunk_cache.telemetry.gate_metrics import GateMetrics
from sglang_chunk_cache.verification.measure import ExactAnswer, measure
from sglang_chunk_cache.verification.state_file import StateFile

logger = logging.getLogger(__name__)

NUM_NEWEST = 64
"""How many of the newest verified replies are shown one by one."""
MAX_NATS = 1000.0
"""Bound on each measure, in nats; a token that was impossible for the fused request would be infinitely far off, and
where its log-probabilities are no numbers nothing is known."""
_SCALE = 10**9
"""Scale of the measures that ranks agree on: billionths."""


class Gate:
    """See the head of this file.

    Args:
        share: of the fused requests that are verified.
        target: moves method and ratio of requests that name neither; None = such requests get the server's.
        state_file: keeps what is learned; None = it is not kept.

    Raises:
        ValueError: what the file holds cannot be read.
    """

    def __init__(
        self,
        share: float,
        target: Target | None,
        metrics: GateMetrics,
        *,
        reduce_max: ReduceMax,
        state_file: StateFile | None,
    ) -> None:
        self.queue = VerificationQueue(share)
        self.ledger = QualityLedger()
        self.controller = None if target is None else TargetController(target)
        self._metrics = metrics
        self._reduce_max = reduce_max
        self._file = state_file
        self._newest: deque[dict[str, Any]] = deque(maxlen=NUM_NEWEST)
        if state_file is not None:
            state_file.read(self.ledger, self.controller)

    # A request.

    def steer(self, state: ChunkRequest) -> None:
        """Decides, once, how a request reuses chunks, if it leaves that open."""
        if self.controller is None or state.verification.decision is not None or not state.prompt.leaves_method_open:
            return
        partition = self.ledger.partition_name(state.prompt.partition)
        decision = state.verification.decision = self.controller.decide(partition)
        self._metrics.set("step", decision.number, partition)

    def admit(self, rid: str, prompt: array[int], state: ChunkRequest, plan: RecomputePlan) -> None:
        """May choose an admitted request that reuses chunks; none with images, since a candidate has token ids only."""
        if state.prompt.images:
            return
        decision = state.verification.decision
        state.verification.candidate = self.queue.choose(
            rid[:MAX_ID_LEN],
            prompt,
            state.prompt.partition,
            method=plan.method,
            ratio=plan.ratio,
            step=None if decision is None else decision.number,
        )

    def release(self, state: ChunkRequest, answer: array[int], lost: str | None) -> None:
        """Queues a chosen request that ends, or drops it; also called if a request is retracted.

        Args:
            answer: the tokens that were sent.
            lost: why it cannot be verified; None = it can.
        """
        candidate, state.verification.candidate = state.verification.candidate, None
        if candidate is None:
            return
        plan = state.admission.plan
        if lost is None and (plan is None or not plan.num_reused):
            lost = "not_fused"
        if lost is not None:
            self.queue.drop(candidate, lost)
            self._metrics.add("verifications", lost)
            return
        assert candidate.first_logits is not None, f"{candidate.rid} has sent an answer, and its first row was not seen"
        dropped = self.queue.finish(candidate, answer)
        if dropped is not None:
            self._metrics.add("verifications", dropped)

    # While idle.

    def give_up(self, candidate: Candidate) -> None:
        """Puts a candidate back: a request came before its verification was complete."""
        dropped = self.queue.put_back(candidate)
        self._metrics.add("verifications", "given_up")
        if dropped is not None:
            self._metrics.add("verifications", dropped)

    def complete(self, candidate: Candidate, exact: ExactAnswer) -> None:
        """Measures a candidate whose exact prefill was computed, and lets the ledger and the target learn from it."""
        assert candidate.answer is not None
        found = self._agreed(measure(candidate.first_logits, exact, candidate.answer))
        self.queue.complete(candidate)
        self._metrics.add("verifications", "verified")
        partition = self.ledger.partition_name(candidate.partition)
        kind = Kind(candidate.method, partition, band_of(candidate.ratio))
        self._metrics.observe_reply(kind, found)
        shown = {name: getattr(candidate, name) for name in ("number", "rid", "method", "ratio")}
        self._newest.append({**shown, "partition": partition, **asdict(found)})
        drift = self.ledger.add(kind, found)
        if drift is not None:
            self._metrics.count_drift(kind)
            logger.warning("Chunk cache: %s", drift)
        if self.controller is not None and candidate.step is not None:
            move = self.controller.observe(partition, candidate.step, found.kl)
            if move is not None:
                self._metrics.add("moves", partition)
                logger.warning("Chunk cache: the target moves %s", move)
        self.save()

    def _agreed(self, found: Measure) -> Measure:
        """The measure made finite, and the same on all ranks: their rounding may differ, what follows must not."""
        values = (found.kl, found.agreement, found.nats_lost)
        bounded = np.clip([value or 0.0 for value in values], 0.0, MAX_NATS)
        votes = np.rint(np.nan_to_num(bounded, nan=MAX_NATS) * _SCALE).astype(np.int64)
        kl, agreement, nats_lost = (self._reduce_max(votes) / _SCALE).tolist()
        return Measure(
            kl, None if found.agreement is None else agreement, None if found.nats_lost is None else nats_lost
        )

    # At any time.

    def drop_replies(self, reason: str) -> None:
        """Drops the replies that wait, and those in flight when they end; `reason` is one of `DROPPED`."""
        waiting = len(self.queue)
        self.queue.drop_all(reason)
        self._metrics.add("verifications", reason, num=waiting)

    def forget(self) -> None:
        """Forgets what was learned and the replies that wait: the weights were changed."""
        self.drop_replies("weights")
        self.ledger.forget()
        self._newest.clear()
        if self.controller is not None:
            self.controller = TargetController(self.controller.target)
        if self._file is not None:
            logger.warning("Chunk cache: the weights were changed, what is learned from now on is not kept")
            self._file = None

    def save(self) -> None:
        """Writes what is known to the state file, for the next start."""
        if self._file is not None:
            self._file.write(self.ledger, self.controller)

    def stats(self) -> dict[str, Any]:
        """All that is known, as JSON values."""
        found: dict[str, Any] = {
            "share": self.queue.share,
            "requests": self.queue.stats(),
            "quality": self.ledger.rows(),
            "newest": list(self._newest),
        }
        if self.controller is not None:
            found["target"] = {**describe(self.controller.target), "partitions": self.controller.states()}
        return found
