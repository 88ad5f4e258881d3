"""Services: RAGPulse multiplied to many services like it, so that their passages fill a large store.

    multiply(trace, num_stored, num_requests) -> Services

Each service has the trace's requests with passages and texts of its own, and is at another point of it, drawn at
random. What it has asked for before that point is stored. As many services are taken as fill the store; the requests
that follow come from all of them in random order, so each is faster than the real one in proportion to the rate. A
service that comes to the end of the trace begins anew, with passages that are stored by then.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from benchmark.simulate.engine import key_of
from benchmark.simulate.trace import Request, Trace


class Copies(Sequence[int]):
    """Lengths of the copies of a trace's chunks and texts; number n of copy c is c * len(lengths) + n."""

    def __init__(self, lengths: Sequence[int], num_copies: int) -> None:
        self._lengths = lengths
        self._num = num_copies * len(lengths)

    def __getitem__(self, number: int) -> int:  # type: ignore[override]
        return self._lengths[number % len(self._lengths)]

    def __len__(self) -> int:
        return self._num

    def __iter__(self) -> Iterator[int]:
        """Each length once: nobody asks for more than the least."""
        return iter(self._lengths)


class Keys(Sequence[bytes]):
    """Keys of all chunks, made when they are asked for."""

    def __init__(self, num: int) -> None:
        self._num = num

    def __getitem__(self, number: int) -> bytes:  # type: ignore[override]
        return key_of(number)

    def __len__(self) -> int:
        return self._num


@dataclass(frozen=True)
class Services:
    """The requests of all services, and what is stored of theirs.

    Attributes:
        trace: of all of them; session and numbers are those of no two services.
        one: the trace of each.
        first: of each chunk of it, the request that has it first, and the place in that.
        points: of each service, how many requests it has sent before.
        num_stored: passages that are stored.
    """

    trace: Trace
    one: Trace
    first: dict[int, tuple[int, int]]
    points: np.ndarray
    num_stored: int

    def first_request(self, number: int) -> tuple[Request, int] | None:
        """The request that had a passage first, with its place there; None = it was not asked for yet."""
        service, own = divmod(number, len(self.one.lengths))
        index, place = self.first[own]
        if index >= self.points[service]:
            return None
        return shifted(self.one, index, service), place


def shifted(one: Trace, index: int, service: int) -> Request:
    """A request of a service."""
    request, offset = one.requests[index], service * len(one.lengths)
    return Request(
        tuple(offset + chunk for chunk in request.chunks),
        request.question_len,
        service * len(one.requests) + request.session,
        tuple((place, offset + number) for place, number in request.plain),
    )


def multiply(one: Trace, num_stored: int, num_requests: int, seed: int = 0) -> Services:
    """So many services that at least `num_stored` passages are stored, and the requests that they send next."""
    rng = np.random.default_rng(seed)
    first: dict[int, tuple[int, int]] = {}
    num_known = []  # passages that were asked for before each request
    for index, request in enumerate(one.requests):
        num_known.append(len(first))
        for place, chunk in enumerate(request.chunks):
            first.setdefault(chunk, (index, place))
    known = np.array(num_known)
    points = rng.integers(0, len(known), size=1 + 4 * num_stored // max(1, len(first)))
    stored = np.cumsum(known[points])
    num_services = 1 + int(np.searchsorted(stored, num_stored))
    assert num_services <= len(points), f"{len(points)} services do not fill the store"
    points = points[:num_services]
    following = points.copy()
    requests = []
    for service in rng.integers(0, num_services, size=num_requests).tolist():
        requests.append(shifted(one, int(following[service]) % len(one.requests), service))
        following[service] += 1
    name = f"{num_services:,} services like {one.name}"
    trace = Trace(name, tuple(requests), Copies(one.lengths, num_services), one.system_len, source=one.source)  # type: ignore[arg-type]
    return Services(trace, one, first, points, int(stored[num_services - 1]))
