"""Reordering: the exact way to more prefix hits, the baseline that reuse has to beat.

    Reorderer    puts marked chunks into an order in which earlier prompts began
    Piloted      asks the package ContextPilot for the order of the chunks
    Rebuilder    uses no marks: moves runs of the prompt's tokens so that it begins like an earlier prompt
    SetOrderer   follows an earlier prompt whose first chunks were the same set: it has the hits of Set-Cache

`Reorderer` puts the chunks of a prompt into an order in which earlier prompts began, and drops repeated ones, so that
stock SGLang's prefix cache finds more. A client can do this without any change of the server; the idea is
ContextPilot's, which searches an index of contexts. Nothing is approximated, but the model reads the passages in
another order than the retriever's ranking.

    tree of orders sent so far          a request of {C, A, D}           is sent as A C D
        A -> C -> B
          -> D
        B -> A                          first the longest path whose chunks are all in the request,
                                        then the other chunks, the most often requested one first

`Piloted` does the same with ContextPilot's own index (0.5.0, `make peers`), one prompt at a time, as its documentation
recommends for serving. It does not know what the server evicts; that would need a hook in the server.

`Rebuilder` is the idea of LMCache's reordering in our own code. It looks for the earlier prompt whose beginning can be
rebuilt furthest with runs of this prompt's tokens, sends these runs first, and appends the other tokens in their order.
It may move any text, even the system prompt.

`SetOrderer` is the lookup of Set-Cache, a baseline of Cache-Craft (section 5.1): it looks for an earlier prompt that
began with the same chunks in any order. Set-Cache moves their KV to the new places and fixes nothing. A prompt sent in
the earlier order finds and computes as much, but its answer is the exact one for that order.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from benchmark.common.machine import ROOT
from benchmark.quality.question import DataError

Key = TypeVar("Key", str, int)
MIN_RUN = 16
"""Tokens of the shortest run that a `Rebuilder` moves."""
PIECE_LEN = 900
"""Most contexts that ContextPilot compares at once."""
PEERS_DIR = ROOT / ".cache" / "peers"
"""Where `make peers` puts packages; installed in the environment, they would hook into SGLang."""


@dataclass(slots=True)
class _Node(Generic[Key]):
    children: dict[Key, _Node[Key]] = field(default_factory=dict)
    used_at: int = 0


class Reorderer(Generic[Key]):
    """Remembers every order it has given out. One per server, for requests in the order in which they are sent."""

    def __init__(self, pool_len: int | None = None) -> None:
        """`pool_len`: tokens that the server's prefix cache holds; None = it forgets nothing."""
        self._roots: dict[Hashable, _Node[Key]] = {}
        self._wanted: Counter[Key] = Counter()
        self._pool_len = pool_len
        self._clock = 0  # tokens that were new to the prefix cache so far; it evicts the least recently used

    def order(
        self, keys: Sequence[Key], length: Callable[[Key], int], rest_len: int = 0, head: Hashable = None
    ) -> tuple[Key, ...]:
        """The keys in the order to send them, each once.

        Args:
            keys: keys of the retrieved chunks, best first.
            length: length of a chunk; the longest path wins, of equal ones the last used.
            rest_len: length of what follows the chunks and is always new: question and answer.
            head: what stands in front of the chunks; only orders behind the same head are followed.
        """
        root = self._roots.setdefault(head, _Node())
        wanted = list(dict.fromkeys(keys))
        self._wanted.update(wanted)
        path = self._longest(root, frozenset(wanted), length)[2]
        # Chunks of many prompts go first, so that later prompts share them; the sort keeps the order of equal ones.
        rest = sorted((key for key in wanted if key not in path), key=lambda key: -self._wanted[key])
        order = (*path, *rest)
        self._clock += sum(length(key) for key in rest) + rest_len + 1
        self._remember(root, order)
        return order

    def _longest(
        self, node: _Node[Key], wanted: frozenset[Key], length: Callable[[Key], int]
    ) -> tuple[int, int, tuple[Key, ...]]:
        """(length, clock, keys) of the best path from `node` downwards over `wanted` keys only."""
        best: tuple[int, int, tuple[Key, ...]] = (0, node.used_at, ())
        for key in wanted & node.children.keys():
            child = node.children[key]
            if self._pool_len is not None and self._clock - child.used_at > self._pool_len:
                continue
            below, used_at, keys = self._longest(child, wanted - {key}, length)
            best = max(best, (length(key) + below, used_at, (key, *keys)))
        return best

    def _remember(self, node: _Node[Key], order: Sequence[Key]) -> None:
        for key in order:
            node = node.children.setdefault(key, _Node())
            node.used_at = self._clock


class Piloted:
    """See the head of this file. One per server, for requests in the order in which they are sent."""

    def __init__(self) -> None:
        """Raises DataError if the package is not installed."""
        if str(PEERS_DIR) not in sys.path:
            sys.path.append(str(PEERS_DIR))
        try:
            from contextpilot.context_index.compute_distance_cpu import compute_distances_batch
            from contextpilot.server import live_index
        except ImportError as error:
            raise DataError(f"system contextpilot: {error}; `make peers` installs it.") from error
        # Version 0.5.0 fails with 1,000 contexts or more at once: it hands a local function to a pool.
        live_index.compute_distances_batch = _in_pieces(compute_distances_batch)
        self._pilot = live_index.ContextPilot(use_gpu=False)

    def order(self, keys: Sequence[str]) -> list[str]:
        """The keys in the order to send them, each once."""
        with contextlib.redirect_stdout(io.StringIO()):  # it prints every index that it builds
            orders, _ = self._pilot.reorder([list(dict.fromkeys(keys))])
        return list(orders[0])


def _in_pieces(compute: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
    """Wraps `compute`: the same distances, with at most `PIECE_LEN` contexts at a time."""

    def computed(queries: list[Any], targets: list[Any], *args: Any) -> np.ndarray:
        pieces = [targets[i : i + PIECE_LEN] for i in range(0, max(1, len(targets)), PIECE_LEN)]
        return np.concatenate([compute(queries, piece, *args) for piece in pieces], axis=1)

    return computed


class SetOrderer(Generic[Key]):
    """See the head of this file. It forgets nothing."""

    def __init__(self) -> None:
        self._orders: dict[tuple[Hashable, tuple[Key, ...]], tuple[Key, ...]] = {}  # by head and sorted first chunks

    def order(self, keys: Sequence[Key], head: Hashable = None) -> tuple[Key, ...]:
        """The keys; as many first ones as possible stand in the order in which a prompt behind `head` began."""
        order = tuple(keys)
        for i in range(len(order), 0, -1):
            found = self._orders.get((head, tuple(sorted(order[:i]))))
            if found is not None:
                order = (*found, *order[i:])
                break
        for i in range(1, len(order) + 1):
            self._orders[head, tuple(sorted(order[:i]))] = order[:i]
        return order


class Rebuilder:
    """See the head of this file. One per server, for requests in the order in which they are sent."""

    def __init__(self, pool_len: int | None = None, min_run: int = MIN_RUN) -> None:
        """`pool_len`: tokens that the server's prefix cache holds; None = it forgets nothing."""
        self._min_run = min_run
        self._pool_len = pool_len
        self._sent: dict[tuple[int, ...], int] = {}  # each prompt -> the clock at its last use; the newest is last
        self._clock = 0  # as in `Reorderer`

    def order(
        self, tokens: Sequence[int], length: Callable[[int], int] = lambda token: 1, rest_len: int = 0
    ) -> tuple[int, ...]:
        """The places of the tokens in the order to send them.

        Args:
            length: length of a token; 1, unless it stands for a whole text.
            rest_len: length of what follows and is always new.
        """
        starts: dict[tuple[int, ...], list[int]] = {}
        for place in range(len(tokens) - self._min_run + 1):
            starts.setdefault(tuple(tokens[place : place + self._min_run]), []).append(place)
        best: list[int] = []
        best_len, origin = 0, None
        for sent in reversed(self._sent):
            places = self._rebuild(sent, tokens, starts)
            rebuilt_len = sum(length(tokens[place]) for place in places)
            if rebuilt_len > best_len:
                best, best_len, origin = places, rebuilt_len, sent
        moved = set(best)
        order = (*best, *(place for place in range(len(tokens)) if place not in moved))
        self._clock += sum(map(length, tokens)) - best_len + rest_len
        for used in (origin, tuple(tokens[place] for place in order)):
            if used is not None:
                self._sent.pop(used, None)
                self._sent[used] = self._clock
        while self._pool_len is not None and self._clock - next(iter(self._sent.values())) > self._pool_len:
            del self._sent[next(iter(self._sent))]
        return order

    def _rebuild(
        self, sent: Sequence[int], tokens: Sequence[int], starts: dict[tuple[int, ...], list[int]]
    ) -> list[int]:
        """Places of the tokens that rebuild the beginning of `sent`, run by run, each time with the longest run."""
        places: list[int] = []
        is_used = bytearray(len(tokens))
        while True:
            at = len(places)
            best = range(0)
            for start in starts.get(tuple(sent[at : at + self._min_run]), ()):
                end, most = start, start + len(sent) - at
                while end < min(most, len(tokens)) and not is_used[end] and sent[at + end - start] == tokens[end]:
                    end += 1
                if end - start >= self._min_run and end - start > len(best):
                    best = range(start, end)
            if not best:
                return places
            places += best
            is_used[best.start : best.stop] = bytes([1]) * len(best)
