"""Reordering: the exact way to more prefix hits, the baseline that reuse has to beat.

Chunks of a prompt are put into an order in which earlier prompts began, and repeated ones are dropped, so that stock
SGLang's prefix cache finds more. A client can do this without any change of the server; the idea is ContextPilot's,
which searches an index of contexts. Nothing is approximated, but the model reads the passages in another order than the
retriever's, which ranks them.

    tree of orders sent so far          a request of {C, A, D}           is sent as A C D
        A -> C -> B
          -> D
        B -> A                          the longest path whose chunks are all asked for comes first,
                                        the others behind it, the most wanted one first
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Node:
    children: dict[str, _Node] = field(default_factory=dict)
    used_at: int = 0


class Reorderer:
    """Remembers every order it has given out. One per server, for requests in the order in which they are sent."""

    def __init__(self, pool_len: int | None = None) -> None:
        """`pool_len`: tokens that the server's prefix cache holds; None = it forgets nothing."""
        self._root = _Node()
        self._wanted: Counter[str] = Counter()
        self._pool_len = pool_len
        self._clock = 0  # tokens that were new to the prefix cache so far; it evicts what was not used for longest

    def order(self, keys: Sequence[str], length: Callable[[str], int], rest_len: int = 0) -> tuple[str, ...]:
        """The keys in the order to send them, each once.

        Args:
            keys: of the chunks that were retrieved, best first.
            length: tokens, or characters, of a chunk; the path with the longest text wins, then the one last used.
            rest_len: of what follows the chunks and is always new: question and answer.
        """
        wanted = list(dict.fromkeys(keys))
        self._wanted.update(wanted)
        path = self._longest(self._root, frozenset(wanted), length)[2]
        # What many prompts want stands in front, so that later ones share it; the sort is stable, by rank of retrieval.
        rest = sorted((key for key in wanted if key not in path), key=lambda key: -self._wanted[key])
        order = (*path, *rest)
        self._clock += sum(length(key) for key in rest) + rest_len + 1
        self._remember(order)
        return order

    def _longest(
        self, node: _Node, wanted: frozenset[str], length: Callable[[str], int]
    ) -> tuple[int, int, tuple[str, ...]]:
        """(length, clock, keys) of the best path from `node` downwards over `wanted` keys only."""
        best: tuple[int, int, tuple[str, ...]] = (0, node.used_at, ())
        for key in wanted & node.children.keys():
            child = node.children[key]
            if self._pool_len is not None and self._clock - child.used_at > self._pool_len:
                continue
            below, used_at, keys = self._longest(child, wanted - {key}, length)
            best = max(best, (length(key) + below, used_at, (key, *keys)))
        return best

    def _remember(self, order: Sequence[str]) -> None:
        node = self._root
        for key in order:
            node = node.children.setdefault(key, _Node())
            node.used_at = self._clock
