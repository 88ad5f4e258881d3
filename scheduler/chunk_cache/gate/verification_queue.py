"""VerificationQueue: which fused requests are verified, and what became of each.

Verbs: `choose` (a fused request was admitted), `finish` (all of its answer was sent), `drop` (it cannot be verified),
`take` (the oldest that there may be room for), `put_back` (its verification was given up), `defer` (there was no room),
`complete`, `drop_all`.

Promise: every request that was chosen is in flight, waiting, verified, or dropped for a reason; one of these at a time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any

from chunk_cache.keys import Partition

MAX_WAITING = 32
"""Replies that wait to be verified; each keeps its prompt and one row of the vocabulary."""
MAX_TRIES = 4
"""Verifications of one reply that are given up, because requests came, before it is dropped."""

DROPPED = {
    "aborted": "The request was aborted, or ended by an error.",
    "busy": f"{MAX_TRIES} verifications of it were given up for requests that came.",
    "evicted": "Passages were evicted everywhere meanwhile, which its prompt may hold.",
    "full": f"More than {MAX_WAITING} replies waited.",
    "memory": "As `full`, and the KV pool never had so many free slots while it waited; nothing is evicted for it.",
    "not_fused": "Its chunks did not arrive, so that it was computed in full.",
    "retracted": "It lost its KV while it was answered.",
    "weights": "The weights were changed meanwhile.",
}
"""Reason -> one sentence for the docs."""


@dataclass(eq=False, slots=True)
class Candidate:
    """A fused request that is to be verified.

    Attributes:
        rid: its request id.
        prompt: its token ids.
        step: step of the controller that it was served at; None = the controller did not choose.
        first_logits: `[vocab_size]`, logits of the first token of its answer, before sampling; set by the executor.
        answer: the tokens that were sent.
        num_free: free slots of the KV pool when they were too few for it; -1 = they never were.
        drop_reason: why it cannot be verified although it is still in flight.
    """

    number: int
    rid: str
    prompt: array[int]
    partition: Partition
    method: str
    ratio: float
    step: int | None = None
    first_logits: Any = None
    answer: array[int] | None = None
    num_tries: int = 0
    num_free: int = -1
    drop_reason: str | None = None


class VerificationQueue:
    """See the head of this file.

    Args:
        share: of the fused requests that are chosen, in [0, 1].
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.num_verified = 0
        self.num_given_up = 0
        self.num_dropped: Counter[str] = Counter()
        self._num_seen = 0
        self._num_chosen = 0
        self._in_flight: dict[int, Candidate] = {}
        self._waiting: deque[Candidate] = deque()

    def __len__(self) -> int:
        """Number of candidates that wait."""
        return len(self._waiting)

    def choose(
        self, rid: str, prompt: array[int], partition: Partition, *, method: str, ratio: float, step: int | None
    ) -> Candidate | None:
        """The request as one to verify; None where it is not chosen.

        A hash of its number decides: every n-th request would always be of the same client if clients take turns.
        """
        self._num_seen += 1
        digest = hashlib.blake2b(self._num_seen.to_bytes(8, "little"), digest_size=8).digest()
        if int.from_bytes(digest, "little") >= self.share * 2**64:
            return None
        self._num_chosen += 1
        candidate = Candidate(self._num_chosen, rid, prompt, partition, method, ratio, step)
        self._in_flight[candidate.number] = candidate
        return candidate

    def finish(self, candidate: Candidate, answer: array[int]) -> str | None:
        """Makes a candidate wait for its verification; if too many wait, drops the oldest.

        Returns:
            Why one was dropped, if one was.
        """
        if candidate.drop_reason is not None:
            self.drop(candidate, candidate.drop_reason)
            return candidate.drop_reason
        del self._in_flight[candidate.number]
        candidate.answer = answer
        self._waiting.append(candidate)
        if len(self._waiting) <= MAX_WAITING:
            return None
        reason = "full" if self._waiting.popleft().num_free < 0 else "memory"
        self.num_dropped[reason] += 1
        return reason

    def drop(self, candidate: Candidate, reason: str) -> None:
        """Drops a candidate that is in flight, or was taken, and cannot be verified."""
        assert reason in DROPPED, f"unknown reason {reason!r}"
        del self._in_flight[candidate.number]
        self.num_dropped[reason] += 1

    def next(self, num_free: int) -> Candidate | None:
        """The oldest waiting candidate for which `num_free` slots may be enough."""
        return next((one for one in self._waiting if one.num_free < num_free), None)

    def take(self, num_free: int) -> Candidate | None:
        """Takes `next`, which is in flight again."""
        candidate = self.next(num_free)
        if candidate is not None:
            self._waiting.remove(candidate)
            self._in_flight[candidate.number] = candidate
        return candidate

    def defer(self, candidate: Candidate, num_free: int) -> None:
        """Puts a candidate back, in front of the others, when `num_free` slots were too few."""
        candidate.num_free = num_free
        del self._in_flight[candidate.number]
        self._waiting.appendleft(candidate)

    def put_back(self, candidate: Candidate) -> str | None:
        """Puts a candidate back whose verification was given up, behind the others; drops it after too many tries.

        Returns:
            Why it was dropped, if it was.
        """
        self.num_given_up += 1
        candidate.num_tries += 1
        if candidate.num_tries == MAX_TRIES:
            self.drop(candidate, "busy")
            return "busy"
        del self._in_flight[candidate.number]
        self._waiting.append(candidate)
        return None

    def complete(self, candidate: Candidate) -> None:
        """Notes that a candidate was verified."""
        del self._in_flight[candidate.number]
        self.num_verified += 1

    def drop_all(self, reason: str) -> None:
        """Drops the candidates that wait, and those in flight when they end."""
        self.num_dropped[reason] += len(self._waiting)
        self._waiting.clear()
        for candidate in self._in_flight.values():
            candidate.drop_reason = reason

    def stats(self) -> dict[str, Any]:
        """Numbers since the start, as JSON values."""
        return {
            "fused": self._num_seen,
            "chosen": self._num_chosen,
            "verified": self.num_verified,
            "waiting": len(self._waiting),
            "in_flight": len(self._in_flight),
            "given_up": self.num_given_up,
            "dropped": dict(sorted(self.num_dropped.items())),
        }

    def check_integrity(self) -> None:
        """Counts from scratch.

        Raises:
            AssertionError: a chosen request was lost, or counted twice.
        """
        ended = self.num_verified + self.num_dropped.total()
        assert self._num_chosen == ended + len(self._waiting) + len(self._in_flight), self.stats()
        assert not {candidate.number for candidate in self._waiting} & self._in_flight.keys(), self.stats()
