"""Traces: which chunks each request of a stream has, in which order. `generate` draws one, `PRESETS` names a few.

    popularity   Zipf: the chunk of rank r is drawn with weight r^-zipf; ranks are given to chunks at random
    sessions     a share of a request's chunks comes from earlier requests of its session; many are open at once
    new chunks   a share of the chunks appears in one request only
    topics       a share of the chunks lies near the request's first chunk, as sections of one manual do
    growth       the corpus grows while the trace runs; a new chunk enters at a rank that is drawn by the Zipf weights
    drift        every few requests a share of the ranks is given to chunks anew
    orders       "new": no two requests have the same chunks in the same order; "drawn": as drawn, so that popular
                 chunks tend to stand in front; "sorted": by number, like systems that reorder for the prefix cache

The same spec gives the same trace: every draw comes from one generator seeded with `TraceSpec.seed`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

ORDERS = ("new", "drawn", "sorted")
MIN_CHUNK_LEN = 16
_TRIES = 200  # draws in which a request must find a new order

Floats: TypeAlias = npt.NDArray[np.float64]


class TraceError(ValueError):
    """A trace that cannot be read or drawn; the message says which field or line, what is wrong, what to do."""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt: the system prompt, these chunks in this order, a question that appears only here."""

    chunks: tuple[int, ...]
    """Numbers of the chunks; a drawn request has each at most once."""
    question_len: int
    session: int = 0
    plain: tuple[tuple[int, int], ...] = ()
    """Text that is not marked, in the order of the prompt: (how many chunks stand in front, number of the text)."""
    tenant: int = 0
    """Whose prompt it is; chunks of tenants have numbers of their own."""

    @property
    def blocks(self) -> tuple[tuple[int, bool], ...]:
        """Chunks and unmarked text between system prompt and question, in order: (number, whether it is a chunk)."""
        found: list[tuple[int, bool]] = []
        for i in range(len(self.chunks) + 1):
            found += [(number, False) for place, number in self.plain if place == i]
            found += [(chunk, True) for chunk in self.chunks[i : i + 1]]
        return tuple(found)

    @classmethod
    def of_blocks(cls, blocks: Iterable[tuple[int, bool]], question_len: int, session: int = 0) -> Request:
        """Makes the request whose `blocks` are these."""
        chunks: list[int] = []
        plain: list[tuple[int, int]] = []
        for number, is_chunk in blocks:
            if is_chunk:
                chunks.append(number)
            else:
                plain.append((len(chunks), number))
        return cls(tuple(chunks), question_len, session, tuple(plain))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in the order in which they are answered."""

    name: str
    requests: tuple[Request, ...]
    lengths: tuple[int, ...]
    """Tokens of each chunk, and of each text that is not marked, by its number."""
    system_len: int
    """Tokens of the shared system prompt."""
    source: tuple[str, ...] = ()
    """Lines of Markdown that name the files it was read from, for result pages."""

    def __post_init__(self) -> None:
        assert min(self.lengths, default=1) >= 1, "a chunk without tokens"

    @property
    def num_chunks(self) -> int:
        """Number of chunks in all prompts, with repetition."""
        return sum(len(request.chunks) for request in self.requests)

    @property
    def distinct(self) -> set[int]:
        """Numbers of the chunks that appear in a prompt."""
        return {chunk for request in self.requests for chunk in request.chunks}

    @property
    def distinct_tokens(self) -> int:
        """Tokens of one copy of every chunk that appears."""
        return sum(self.lengths[chunk] for chunk in self.distinct)

    def prompt_len(self, request: Request) -> int:
        return self.system_len + sum(self.lengths[number] for number, _ in request.blocks) + request.question_len

    @property
    def max_prompt_len(self) -> int:
        return max((self.prompt_len(request) for request in self.requests), default=self.system_len)


@dataclass(frozen=True, slots=True)
class TraceSpec:
    """What `generate` draws. Shares are in [0, 1], lengths in tokens."""

    name: str = "zipf"
    num_requests: int = 10_000
    num_chunks: int = 2_000
    """Chunks of the corpus, once it has grown."""
    chunks_per_request: int = 5
    max_chunks_per_request: int = 0
    """Each request has from `chunks_per_request` to so many chunks, drawn uniformly; 0 = all have the same number."""
    zipf: float = 1.0
    new_share: float = 0.0
    """Share of the chunks in prompts that appear once and are not in the corpus."""
    chunk_len: int = 500
    """Mean length of a chunk."""
    length_spread: float = 0.4
    """Standard deviation of the logarithm of the length; 0 = all chunks are equally long."""
    system_len: int = 64
    question_len: int = 32
    order: str = "new"
    session_len: float = 1.0
    """Mean number of requests in a session; 1 = no sessions."""
    session_share: float = 0.0
    open_sessions: int = 20
    topic_size: int = 20
    topic_share: float = 0.3
    initial_share: float = 1.0
    """Share of the corpus that exists when the trace begins; the corpus grows evenly until the end."""
    drift_every: int = 0
    """Requests between two drifts; 0 = popularity never changes."""
    drift_share: float = 1.0
    repeat_share: float = 0.0
    """Share of the requests that equal an earlier one."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            _check(name, getattr(self, name), least, None)
        for name in ("session_share", "topic_share", "initial_share", "drift_share", "repeat_share", "new_share"):
            _check(name, getattr(self, name), 0.0, 1.0)
        if self.order not in ORDERS:
            raise TraceError(f"order: unknown order {self.order!r}; known orders: {', '.join(ORDERS)}")
        if self.max_chunks_per_request and self.max_chunks_per_request < self.chunks_per_request:
            raise TraceError(
                f"max_chunks_per_request: {self.max_chunks_per_request} is less than chunks_per_request, "
                f"{self.chunks_per_request}; give a larger number, or 0"
            )
        if self.num_initial < self.most_chunks:
            raise TraceError(
                f"chunks_per_request: {self.most_chunks} of a corpus that begins with {self.num_initial}; "
                "give a smaller number, or raise num_chunks or initial_share"
            )
        smallest = self.num_chunks % self.topic_size or self.topic_size
        if self.topic_share == 1.0 and smallest < self.most_chunks:
            problem = f"1 lets a request have chunks of one topic only, and one has {smallest}"
            raise TraceError(f"topic_share: {problem}; give a share below 1, or fewer chunks_per_request")
        if self.order == "new" and self.repeat_share:
            raise TraceError("repeat_share: no order is new when requests repeat; use order drawn or sorted")

    @property
    def num_initial(self) -> int:
        return max(1, round(self.initial_share * self.num_chunks))

    @property
    def most_chunks(self) -> int:
        """Most chunks that a request has."""
        return self.max_chunks_per_request or self.chunks_per_request


_LEAST: Mapping[str, float] = MappingProxyType(
    {
        "num_requests": 1,
        "num_chunks": 1,
        "chunks_per_request": 1,
        "max_chunks_per_request": 0,
        "chunk_len": 1,
        "open_sessions": 1,
        "zipf": 0,
        "length_spread": 0,
        "system_len": 0,
        "question_len": 1,
        "session_len": 1,
        "topic_size": 1,
        "drift_every": 0,
        "seed": 0,
    }
)


def _check(name: str, value: float, least: float, most: float | None) -> None:
    if value >= least and (most is None or value <= most):  # NaN fails
        return
    allowed = f"at least {least:g}" if most is None else f"in [{least:g}, {most:g}]"
    raise TraceError(f"{name}: {value!r} is not {allowed}; give such a number")


PRESETS: Mapping[str, TraceSpec] = MappingProxyType(
    {
        "zipf": TraceSpec("zipf"),
        "sessions": TraceSpec("sessions", session_len=6.0, session_share=0.55, order="drawn", repeat_share=0.05),
        "growing": TraceSpec("growing", initial_share=0.2),
        "drift": TraceSpec("drift", drift_every=1_000),
        "orders": TraceSpec("orders", num_chunks=1_000, chunks_per_request=8),
    }
)
"""Named traces; `dataclasses.replace` changes them."""


def spec_fields() -> dict[str, type]:
    """Name and type of every field of a `TraceSpec` but its name."""
    kinds = {"int": int, "float": float, "str": str}
    return {item.name: kinds[str(item.type)] for item in fields(TraceSpec) if item.name != "name"}


def generate(spec: TraceSpec) -> Trace:
    """Draws a trace."""
    rng = np.random.default_rng(spec.seed)
    lengths = _draw_lengths(rng, spec.num_chunks, spec.chunk_len, spec.length_spread)
    drawing = _Drawing(spec, rng)
    requests = tuple(drawing.requests())
    lengths += _draw_lengths(rng, drawing.num_new, spec.chunk_len, spec.length_spread)
    return Trace(spec.name, requests, lengths, spec.system_len)


def _draw_lengths(rng: np.random.Generator, num: int, mean: int, spread: float) -> tuple[int, ...]:
    drawn = mean * np.exp(spread * rng.standard_normal(num) - spread**2 / 2)
    return tuple(int(length) for length in np.clip(np.rint(drawn), min(MIN_CHUNK_LEN, mean), 8 * mean))


class _Zipf:
    """Ranks from 0, drawn with weight (rank + 1)^-exponent."""

    def __init__(self, rng: np.random.Generator, num: int, exponent: float) -> None:
        self._rng = rng
        self._sums: Floats = np.cumsum(np.arange(1, num + 1, dtype=np.float64) ** -exponent)

    def draw(self, num: int | None = None) -> int:
        """One of the first `num` ranks."""
        sums = self._sums[:num]
        return int(np.searchsorted(sums, self._rng.random() * sums[-1], side="right"))


@dataclass(slots=True)
class _Session:
    number: int
    seen: list[int] = field(default_factory=list)


class _Drawing:
    """The state of one `generate`."""

    def __init__(self, spec: TraceSpec, rng: np.random.Generator) -> None:
        self._spec = spec
        self._rng = rng
        self._zipf = _Zipf(rng, spec.num_chunks, spec.zipf)
        order = rng.permutation(spec.num_chunks)
        self._by_rank: list[int] = order[: spec.num_initial].tolist()
        self._waiting: list[int] = order[spec.num_initial :].tolist()  # the last one enters next
        self._sessions = [_Session(i) for i in range(spec.open_sessions)]
        self._num_sessions = spec.open_sessions
        self._is_seen: set[tuple[int, ...]] = set()
        self.num_new = 0
        """Number of chunks that appear once; their numbers follow those of the corpus."""

    def requests(self) -> Iterator[Request]:
        spec, made = self._spec, list[Request]()
        num_growing = spec.num_chunks - spec.num_initial
        for i in range(spec.num_requests):
            while len(self._by_rank) < spec.num_initial + num_growing * i // spec.num_requests:
                self._by_rank.insert(self._zipf.draw(len(self._by_rank)), self._waiting.pop())
            if spec.drift_every and i and i % spec.drift_every == 0:
                self._drift()
            if made and spec.repeat_share and self._rng.random() < spec.repeat_share:
                request = made[self._rng.integers(len(made))]
            else:
                request = self._request()
            made.append(request)
            yield request

    def _drift(self) -> None:
        num = round(self._spec.drift_share * len(self._by_rank))
        places = self._rng.choice(len(self._by_rank), size=num, replace=False)
        chunks = [self._by_rank[place] for place in places]
        for place, i in zip(places, self._rng.permutation(num), strict=True):
            self._by_rank[place] = chunks[i]

    def _request(self) -> Request:
        place = int(self._rng.integers(len(self._sessions)))
        session = self._sessions[place]
        for _ in range(_TRIES):
            chunks = self._order(self._draw_chunks(session))
            if self._spec.order != "new":
                break
            if chunks not in self._is_seen:
                self._is_seen.add(chunks)
                break
        else:
            problem = f"found no new order in {_TRIES} draws of up to {self._spec.most_chunks} chunks"
            raise TraceError(f"order: {problem}; raise chunks_per_request or num_chunks, or use order drawn")
        known = self._spec.num_chunks
        session.seen.extend(chunk for chunk in chunks if chunk < known and chunk not in session.seen)
        if self._rng.random() < 1.0 / self._spec.session_len:
            self._sessions[place] = _Session(self._num_sessions)
            self._num_sessions += 1
        return Request(chunks, self._spec.question_len, session.number)

    def _draw_chunks(self, session: _Session) -> list[int]:
        spec, rng = self._spec, self._rng
        num = spec.chunks_per_request
        if spec.max_chunks_per_request:
            num = int(rng.integers(num, spec.max_chunks_per_request + 1))
        chunks: list[int] = []
        while len(chunks) < num:
            if spec.new_share and rng.random() < spec.new_share:
                chunks.append(spec.num_chunks + self.num_new)
                self.num_new += 1
                continue
            chunk = self._draw_chunk(session, next((chunk for chunk in chunks if chunk < spec.num_chunks), None))
            if chunk not in chunks:
                chunks.append(chunk)
        return chunks

    def _draw_chunk(self, session: _Session, first: int | None) -> int:
        spec, rng = self._spec, self._rng
        if session.seen and rng.random() < spec.session_share:
            return session.seen[rng.integers(len(session.seen))]
        if first is not None and rng.random() < spec.topic_share:
            begin = first - first % spec.topic_size
            chunk = begin + int(rng.integers(min(spec.topic_size, spec.num_chunks - begin)))
            if not self._waiting or chunk in self._by_rank:
                return chunk
        return self._by_rank[self._zipf.draw(len(self._by_rank))]

    def _order(self, chunks: Sequence[int]) -> tuple[int, ...]:
        if self._spec.order == "sorted":
            return tuple(sorted(chunks))
        if self._spec.order == "new":
            return tuple(chunks[i] for i in self._rng.permutation(len(chunks)))
        return tuple(chunks)
