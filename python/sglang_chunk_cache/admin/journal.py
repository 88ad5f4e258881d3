"""Journal: what became of the latest requests with marks or options, and sums of each minute, for the page.

Verbs: `note` (a request has ended), `chunk_id`, `forget_chunk_id`, `contents` (all that is known), `merge` (of several
replicas).

Promises: its size is bounded. Only people read it and nothing is decided by it, so ranks may differ, except in the ids
of chunks, which depend only on the requests and their order. It holds numbers, ids of requests and chunks, keys of
chunks and reasons of the fixed list, never a text or a token.
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import numpy as np

from chunk_cache.plan.recompute_plan import RecomputePlan
from chunk_cache.types import MAX_ID_LEN
from sglang_chunk_cache.request.chunk_request import ChunkRequest, Reported
from sglang_chunk_cache.request.reply import reply_of

NUM_REQUESTS = 50
NUM_MINUTES = 120
NUM_COLUMNS = 160
NUM_CHUNK_IDS = 4096
KINDS = ("prefix", "reused", "recomputed", "computed")
"""What becomes of a token; `recomputed` is not in `reused` here."""
SUMS = ("requests", *KINDS, "estimated", "saved_s")
"""Sums over requests: their number, tokens by kind, how many have an estimate of the time saved, seconds saved."""

Contents: TypeAlias = dict[str, Any]


class Journal:
    """See the head of this file.

    Args:
        now: seconds since 1970.
    """

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._since = now()
        self._totals: Contents = dict.fromkeys(SUMS, 0)
        self._minutes: deque[Contents] = deque(maxlen=NUM_MINUTES)
        self._requests: deque[Contents] = deque(maxlen=NUM_REQUESTS)
        self._chunk_ids: OrderedDict[bytes, str] = OrderedDict()

    def note(self, rid: str, partition: str, state: ChunkRequest, reported: Reported, saved_s: float | None) -> None:
        """Notes a request that was admitted and has ended.

        Args:
            reported: the state's.
            partition: its name, which tells nothing of a client's salt.
            saved_s: estimated seconds of prefill that reuse saved it; None = too few forwards were timed.
        """
        plan, reply = reported.plan, reply_of(state, reported)
        at = self._now()
        minute = int(at // 60) * 60
        if not self._minutes or self._minutes[-1]["at"] != minute:
            self._minutes.append({"at": minute, **dict.fromkeys(SUMS, 0)})
        numbers = {
            "requests": 1,
            "prefix": plan.prefix_len,
            "reused": plan.num_reused - plan.num_recomputed,
            "recomputed": plan.num_recomputed,
            "computed": plan.num_computed,
            "estimated": int(saved_s is not None),
            "saved_s": saved_s or 0.0,
        }
        self._totals = _added(numbers, self._totals)
        self._minutes[-1] |= _added(numbers, self._minutes[-1])
        for chunk, key in zip(reply["chunks"], state.prompt.keys, strict=True):
            chunk["key"] = key.hex()
            if "id" in chunk:
                chunk["id"] = chunk["id"][:MAX_ID_LEN]
                self._note_chunk_id(key, chunk["id"])
        self._requests.append(
            {
                "at": at,
                "id": rid[:MAX_ID_LEN],
                "partition": partition,
                "saved_s": saved_s,
                **reply,
                "picture": picture_of(plan),
            }
        )

    def _note_chunk_id(self, key: bytes, chunk_id: str) -> None:
        self._chunk_ids[key] = chunk_id
        self._chunk_ids.move_to_end(key)
        if len(self._chunk_ids) > NUM_CHUNK_IDS:
            self._chunk_ids.popitem(last=False)

    def chunk_id(self, key: bytes) -> str | None:
        """The last id that a client gave the chunk; None where it is not known."""
        return self._chunk_ids.get(key)

    def forget_chunk_id(self, key: bytes) -> None:
        """Forgets the id of a chunk that a client evicted. Requests in the journal still show it."""
        self._chunk_ids.pop(key, None)

    def contents(self) -> Contents:
        """Plain JSON values: `totals` since `since`, `minutes` from old to new, `requests` from new to old."""
        return {
            "since": self._since,
            "totals": self._totals,
            "minutes": [dict(minute) for minute in self._minutes],
            "requests": list(reversed(self._requests)),
        }


def picture_of(plan: RecomputePlan) -> list[list[int]]:
    """The prompt in at most `NUM_COLUMNS` slices, in order: the tokens of each, by `KINDS`.

    Tokens that a method chose during the forward are `reused` here: only `explain` tells where they stand.
    """
    kinds = np.full(plan.prompt_len, KINDS.index("computed"), dtype=np.int8)
    kinds[: plan.prefix_len] = KINDS.index("prefix")
    for chunk in plan.chunks:
        if chunk.num_reused:
            kinds[chunk.dst_start : chunk.dst_end] = KINDS.index("reused")
            kinds[plan.recomputed_in(chunk)] = KINDS.index("recomputed")
    num_columns = min(NUM_COLUMNS, plan.prompt_len)
    starts = np.arange(num_columns) * plan.prompt_len // num_columns
    of_kind = [np.add.reduceat(kinds == kind, starts, dtype=np.int64) for kind in range(len(KINDS))]
    return np.stack(of_kind, axis=1).tolist()


def merge(journals: Iterable[Contents]) -> Contents:
    """The contents of the journals of several replicas, as if there were one."""
    journals = list(journals)
    minutes: dict[float, Contents] = {}
    for journal in journals:
        for minute in journal["minutes"]:
            known = minutes.get(minute["at"])
            minutes[minute["at"]] = minute if known is None else {**_added(known, minute), "at": minute["at"]}
    totals = journals[0]["totals"]
    for journal in journals[1:]:
        totals = _added(totals, journal["totals"])
    requests = sorted((one for journal in journals for one in journal["requests"]), key=lambda one: -one["at"])
    return {
        "since": min(journal["since"] for journal in journals),
        "totals": totals,
        "minutes": [minutes[at] for at in sorted(minutes)][-NUM_MINUTES:],
        "requests": requests[:NUM_REQUESTS],
    }


def _added(one: Contents, other: Contents) -> Contents:
    return {name: number + other[name] for name, number in one.items()}
