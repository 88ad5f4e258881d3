"""Baselines: what other systems find in the same trace.

    single_copies       an LRU store that holds one copy of each chunk and nothing else

The prefix cache needs no function here: it is `simulate` with ``reuse=False``. `ORDERS` are functions that change a
trace so that more of its prompts begin alike; `simulate` replays the changed trace:

    reordered      a client puts chunks into an order in which earlier prompts began (ContextPilot's idea)
    by_frequency   the chunks that the whole trace has most often stand first; no real system knows this in advance
    rebuilt        the whole prompt, with system prompt and history, is put into the order in which an earlier one
                   began, without marks (LMCache's idea)
    as_sets        Set-Cache, a baseline of Cache-Craft (section 5.1): see `SetOrderer`. It answers as full reuse does;
                   the answers of all others are exact.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType

from benchmark.serving.reorder import Rebuilder, Reorderer, SetOrderer
from benchmark.simulate.trace import Request, Trace


def single_copies(trace: Trace, size: int) -> float:
    """Share of the tokens of chunks that an LRU store of `size` tokens holds when a request brings them."""
    store: OrderedDict[int, int] = OrderedDict()
    num_stored = num_found = num_asked = 0
    for request in trace.requests:
        for chunk in request.chunks:
            length = trace.lengths[chunk]
            num_asked += length
            if chunk in store:
                num_found += length
                store.move_to_end(chunk)
                continue
            store[chunk] = length
            num_stored += length
            while num_stored > size:
                num_stored -= store.popitem(last=False)[1]
    return num_found / num_asked if num_asked else 0.0


def reordered(trace: Trace, pool_tokens: int) -> Trace:
    """See the head of this file; a chunk that a prompt brings twice is sent once."""
    reorderer: Reorderer[int] = Reorderer(pool_tokens)
    seen: set[int] = set()

    def reorder(request: Request) -> Request:
        head = tuple(number for place, number in request.plain if place == 0)
        plain = [number for _, number in request.plain]
        rest_len = request.question_len + sum(trace.lengths[number] for number in plain if number not in seen)
        seen.update(plain)
        return _with_chunks(request, reorderer.order(request.chunks, trace.lengths.__getitem__, rest_len, head))

    return replace(trace, requests=tuple(map(reorder, trace.requests)))


def by_frequency(trace: Trace, pool_tokens: int) -> Trace:
    """See the head of this file."""
    uses = Counter(chunk for request in trace.requests for chunk in request.chunks)
    return replace(
        trace,
        requests=tuple(
            _with_chunks(request, sorted(set(request.chunks), key=lambda chunk: (-uses[chunk], chunk)))
            for request in trace.requests
        ),
    )


def rebuilt(trace: Trace, pool_tokens: int) -> Trace:
    """See the head of this file; the question stays at the end."""
    rebuilder = Rebuilder(pool_tokens, min_run=1)

    def rebuild(request: Request) -> Request:
        blocks = request.blocks
        numbers = [number for number, _ in blocks]
        order = rebuilder.order(numbers, trace.lengths.__getitem__, request.question_len)
        return Request.of_blocks((blocks[place] for place in order), request.question_len, request.session)

    return replace(trace, requests=tuple(map(rebuild, trace.requests)))


def as_sets(trace: Trace, pool_tokens: int) -> Trace:
    """See the head of this file; the exact prefix of each new prompt is what Set-Cache would find."""
    orderer: SetOrderer[int] = SetOrderer()

    def look_up(request: Request) -> Request:
        head = tuple(number for place, number in request.plain if place == 0)
        return replace(request, chunks=orderer.order(request.chunks, head))

    return replace(trace, requests=tuple(map(look_up, trace.requests)))


ORDERS: Mapping[str, Callable[[Trace, int], Trace]] = MappingProxyType(
    {"reorder": reordered, "frequency order": by_frequency, "rebuilt": rebuilt, "set-cache": as_sets}
)
"""Functions that change a trace, by their name in tables; the second argument: tokens that the prefix cache holds."""


def _with_chunks(request: Request, chunks: Iterable[int]) -> Request:
    """The request with these chunks, in this order; text that stood between two of them stands behind all of them."""
    chunks = tuple(chunks)
    plain = tuple((0 if place == 0 else len(chunks), number) for place, number in request.plain)
    return replace(request, chunks=chunks, plain=plain)
