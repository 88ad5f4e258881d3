"""Discoverer: finds passages in prompts that nobody marked (`--chunk-cache-discover`).

    note    learns a marked chunk: it is found in later prompts wherever it stands
    find    finds the passages of a prompt that were there before, and learns the prompt

Every window of `WINDOW` tokens is hashed, and about one in `SPACING` is a *boundary*, by its hash alone: so a text has
the same boundaries wherever it stands (content-defined boundaries). A known chunk is found by its first boundary.
Other text is compared with earlier prompts at about every second boundary; the longest run of equal tokens around it
is a passage, which is known from then on. Both ends of the run are cut by `TRIM` tokens, since separators of passages,
and tokens across their ends, may change. A common beginning of two prompts is left to the exact prefix cache.

Promises: every match is verified token by token; prompts of another partition are never looked at; memory is bounded by
`max_tokens`; equal calls give equal results on every rank. A call is a few passes of numpy over the prompt.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort_left
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from chunk_cache.keys import Partition, TokenIds, chunk_key, int64_buffer
from chunk_cache.types import Span

WINDOW = 16
"""Tokens of a window; at least so many must be equal for a passage to be found."""
SPACING = 16
"""One window in so many is a boundary; a power of two. A chunk without a boundary is not found: 4 % of those of 64
tokens, fewer of longer ones."""
MIN_LEN = 64
"""Tokens of the shortest passage that is learnt."""
TRIM = 8
"""Tokens at either end of a run of equal tokens that are not part of the passage."""
MAX_TOKENS = 16_000_000
"""Tokens that are kept at most: 4 bytes each, and about as much again to find them."""
MAX_PEERS = 64
"""Most known passages with the same first boundary; of more the shortest is forgotten, of equal ones the oldest."""
MAX_CHECKS = 512
"""Most known chunks that are compared with one prompt; a prompt that repeats one token meets many."""

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_BASE = 0x9E3779B97F4A7C55

Tokens: TypeAlias = npt.NDArray[np.int32]
Boundary: TypeAlias = tuple[int, int]
"""Where the window of a boundary begins, and its hash."""


@dataclass(eq=False, slots=True)
class _Known:
    """A known chunk: its tokens, `[length]`, and its first boundary, at `offset` with the hash `value`."""

    key: bytes
    partition: Partition
    tokens: Tokens
    offset: int
    value: int


@dataclass(eq=False, slots=True)
class _Past:
    """A prompt that was seen: its tokens, and the hashes of windows that lead to it."""

    partition: Partition
    tokens: Tokens
    anchors: list[int] = field(default_factory=list)


@dataclass(slots=True)
class DiscoverCounters:
    """What happened so far; counts only grow."""

    num_prompts: int = 0
    num_tokens: int = 0
    num_found_tokens: int = 0
    """In chunks that were known."""
    num_learnt_tokens: int = 0
    """In passages that became known."""


class Discoverer:
    """See the head of this file.

    Args:
        max_tokens: half of them for known chunks, the least recently seen forgotten first; half for the newest prompts.
    """

    def __init__(self, max_tokens: int = MAX_TOKENS) -> None:
        self._max_len = max_tokens // 2
        self._known: OrderedDict[bytes, _Known] = OrderedDict()
        self._known_len = 0
        self._by_value: dict[int, list[_Known]] = {}
        self._past: deque[_Past] = deque()
        self._past_len = 0
        self._anchors: dict[int, tuple[_Past, int]] = {}
        self.counters = DiscoverCounters()

    @property
    def num_chunks(self) -> int:
        """Number of known chunks."""
        return len(self._known)

    def keys(self) -> Iterable[bytes]:
        """Keys of the known chunks."""
        return self._known.keys()

    @property
    def num_tokens(self) -> int:
        """Tokens that are kept, of known chunks and of prompts."""
        return self._known_len + self._past_len

    def stats(self) -> dict[str, int]:
        """Sizes and counters."""
        return {"num_chunks": self.num_chunks, "num_kept_tokens": self.num_tokens} | asdict(self.counters)

    def note(self, partition: Partition, token_ids: TokenIds) -> None:
        """Learns a chunk."""
        tokens = _as_tokens(token_ids)
        if WINDOW <= len(tokens) <= self._max_len:
            self._note(partition, tokens)

    def find(self, partition: Partition, token_ids: TokenIds) -> tuple[Span, ...]:
        """Finds passages of a prompt that were there before, ascending, disjoint; learns the prompt."""
        tokens = _as_tokens(token_ids)
        self.counters.num_prompts += 1
        self.counters.num_tokens += len(tokens)
        if len(tokens) < WINDOW:
            return ()
        hashes = _hashes(partition, tokens)
        boundaries = _boundaries(hashes)
        known = self._find_known(partition, tokens, boundaries)
        sparse = [(at, value) for at, value in boundaries if not value & SPACING]
        learnt = self._learn(partition, tokens, sparse, known)
        spans = sorted((*known, *learnt))
        self._remember(partition, tokens, sparse, spans)
        self.counters.num_found_tokens += sum(end - start for start, end in known)
        self.counters.num_learnt_tokens += sum(end - start for start, end in learnt)
        return tuple(spans)

    def sharing(self, key: bytes) -> list[bytes]:
        """Keys of the other known chunks that share a window with a known one: passages are learnt without their ends.

        A chunk that lies within it has its first boundary there; another that it overlaps has its first or its last.
        """
        one = self._known.get(key)
        if one is None:
            return []
        boundaries = _boundaries(_hashes(one.partition, one.tokens))
        inner = {value for _, value in boundaries}
        ends = [one.tokens[at : at + WINDOW].tobytes() for at, _ in (boundaries[0], boundaries[-1])]
        return [
            other.key
            for other in self._known.values()
            if other is not one
            and other.partition == one.partition
            and (other.value in inner or any(window in other.tokens.tobytes() for window in ends))
        ]

    def forget(self, key: bytes) -> None:
        """Forgets a chunk, and all prompts, since it may be in them."""
        one = self._known.pop(key, None)
        if one is not None:
            self._drop(one)
        self._past.clear()
        self._anchors.clear()
        self._past_len = 0

    def clear(self) -> None:
        """Forgets everything but the counters."""
        self._known.clear()
        self._by_value.clear()
        self._past.clear()
        self._anchors.clear()
        self._known_len = self._past_len = 0

    # What is known.

    def _find_known(self, partition: Partition, tokens: Tokens, boundaries: Sequence[Boundary]) -> list[Span]:
        spans: list[Span] = []
        end, num_checks = 0, 0
        for at, value in boundaries:
            for one in self._by_value.get(value, ()) if at >= end else ():
                start, stop = at - one.offset, at - one.offset + len(one.tokens)
                num_checks += 1
                if start >= end and one.partition == partition and np.array_equal(tokens[start:stop], one.tokens):
                    end = stop
                    spans.append((start, stop))
                    self._known.move_to_end(one.key)
                    break
            if num_checks >= MAX_CHECKS:
                break
        return spans

    def _note(self, partition: Partition, tokens: Tokens) -> None:
        key = chunk_key(partition, tokens)
        if key in self._known:
            self._known.move_to_end(key)
            return
        boundaries = _boundaries(_hashes(partition, tokens))
        if not boundaries:
            return
        one = _Known(key, partition, tokens.copy(), *boundaries[0])
        self._known[key] = one
        self._known_len += len(tokens)
        peers = self._by_value.setdefault(one.value, [])
        insort_left(peers, one, key=lambda peer: -len(peer.tokens))  # longest first: the longest that matches counts
        if len(peers) > MAX_PEERS:
            self._drop(self._known.pop(peers[-1].key))
        while self._known_len > self._max_len:
            self._drop(self._known.popitem(last=False)[1])

    def _drop(self, gone: _Known) -> None:
        self._known_len -= len(gone.tokens)
        self._by_value[gone.value].remove(gone)
        if not self._by_value[gone.value]:
            del self._by_value[gone.value]

    # What is learnt from earlier prompts.

    def _learn(
        self,
        partition: Partition,
        tokens: Tokens,
        boundaries: Sequence[Boundary],
        known: Sequence[Span],
    ) -> list[Span]:
        learnt: list[Span] = []
        places = [at for at, _ in boundaries]
        gaps = zip([0, *(end for _, end in known)], [*(start for start, _ in known), len(tokens)], strict=True)
        for begin, end in gaps:
            for at, value in boundaries[bisect_left(places, begin) : bisect_right(places, end - WINDOW)]:
                if at < begin:
                    continue  # in what was learnt a moment ago
                match = self._match(partition, tokens, value, at, begin, end)
                if match is not None:
                    start, begin, is_beginning = match
                    if not is_beginning and begin - start >= MIN_LEN + 2 * TRIM:
                        learnt.append((start + TRIM, begin - TRIM))
                        self._note(partition, tokens[start + TRIM : begin - TRIM])
        return learnt

    def _match(
        self, partition: Partition, tokens: Tokens, value: int, at: int, begin: int, end: int
    ) -> tuple[int, int, bool] | None:
        """The run of tokens around `at`, within [begin, end), that an earlier prompt has too, and whether both prompts
        begin with it; None where there is none."""
        found = self._anchors.get(value)
        if found is None or found[0].partition != partition:
            return None
        past, place = found[0].tokens, found[1]
        left = _num_equal(tokens[begin:at][::-1], past[:place][::-1])
        right = _num_equal(tokens[at:end], past[place:])
        return (at - left, at + right, at == place == left) if right >= WINDOW else None

    def _remember(
        self,
        partition: Partition,
        tokens: Tokens,
        boundaries: Sequence[Boundary],
        spans: Sequence[Span],
    ) -> None:
        """Keeps a prompt if it has boundaries outside of known passages."""
        past = _Past(partition, tokens.copy())
        spans_left = iter((*spans, (len(tokens), len(tokens))))
        start, end = next(spans_left)
        for at, value in boundaries:
            while at >= end:
                start, end = next(spans_left)
            if at < start:
                past.anchors.append(value)
                self._anchors[value] = past, at
        if not past.anchors:
            return
        self._past.append(past)
        self._past_len += len(tokens)
        while self._past_len > self._max_len:
            gone = self._past.popleft()
            self._past_len -= len(gone.tokens)
            for value in gone.anchors:
                if self._anchors.get(value, (None, 0))[0] is gone:
                    del self._anchors[value]


def _as_tokens(token_ids: TokenIds) -> Tokens:
    return np.frombuffer(int64_buffer(token_ids), dtype=np.int64).astype(np.int32)


def _hashes(partition: Partition, tokens: Tokens) -> npt.NDArray[np.uint64]:
    """The hash of each window, `[len(tokens) - WINDOW + 1]`; other partitions have other hashes."""
    seed = np.frombuffer(chunk_key(partition, ())[:8], dtype=np.uint64)
    up, down = _powers(len(tokens))
    sums = np.zeros(len(tokens) + 1, dtype=np.uint64)
    np.cumsum((tokens + 1).astype(np.uint64) * up, out=sums[1:])
    windows = (sums[WINDOW:] - sums[:-WINDOW]) * down[: len(sums) - WINDOW]
    mixed = (windows ^ seed) * _FACTOR
    mixed ^= mixed >> np.uint64(29)
    mixed *= _FACTOR
    return mixed ^ (mixed >> np.uint64(32))


def _boundaries(hashes: npt.NDArray[np.uint64]) -> list[Boundary]:
    places = np.flatnonzero((hashes & np.uint64(SPACING - 1)) == 0)
    return list(zip(places.tolist(), hashes[places].tolist(), strict=True))


def _powers(length: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Powers of `_BASE` and of its inverse modulo 2^64, at least `length` of each."""
    return _powers_up_to(1 << max(12, (length - 1).bit_length()))[:, :length]  # type: ignore[return-value]


@lru_cache(maxsize=4)
def _powers_up_to(length: int) -> npt.NDArray[np.uint64]:
    bases = np.array([_BASE, pow(_BASE, -1, 1 << 64)], dtype=np.uint64)[:, None]
    return np.cumprod(np.concatenate([np.ones_like(bases), np.repeat(bases, length - 1, axis=1)], axis=1), axis=1)


def _num_equal(a: Tokens, b: Tokens) -> int:
    """Number of leading tokens that are equal; looks at no more than about twice as many."""
    length, done, step = min(len(a), len(b)), 0, 64
    while done < length:
        end = min(done + step, length)
        differ = a[done:end] != b[done:end]
        if differ.any():
            return done + int(differ.argmax())
        done, step = end, 2 * step
    return length
