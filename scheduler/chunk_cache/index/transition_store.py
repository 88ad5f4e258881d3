"""TransitionStore: what stored chunks do to states, in host memory, by variant.

A variant without its transition is of no use, so for the index it is gone (`kv/store`). Above `max_bytes` the least
recently used transitions go, but none of a pinned variant. Running requests may hold as many bytes again that are not
stored yet. All tensor-parallel ranks store equally many bytes in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, Protocol, Self, TypeVar
from weakref import WeakSet


class Transition(Protocol):
    """What a stretch of tokens does to states."""

    @property
    def num_bytes(self) -> int: ...

    def then(self, later: Self) -> Self:
        """Both stretches in a row."""


T = TypeVar("T", bound=Transition)


class ChunkTransitions(Generic[T]):
    """Transitions of the chunks of one request, as far as they were computed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, T]] = {}  # by chunk: up to which position

    @property
    def num_bytes(self) -> int:
        return sum(transition.num_bytes for _, transition in self._known.values())

    def drop(self, chunk: int) -> None:
        """Forgets a chunk, which was stored, or will not be."""
        self._known.pop(chunk, None)

    def reaches(self, chunk: int) -> int | None:
        """Position up to which the transition of a chunk is known; None = not at all."""
        known = self._known.get(chunk)
        return None if known is None else known[0]

    def note(self, chunk: int, begin: int, end: int, transition: T) -> None:
        """Notes that tokens [begin, end) of a chunk were computed: its first ones, or the next after those known."""
        if self.reaches(chunk) == begin:
            transition = self._known[chunk][1].then(transition)
        self._known[chunk] = end, transition

    def of(self, chunk: int, end: int) -> T | None:
        """The transition of a chunk up to `end`; None if it was not computed to exactly there."""
        known = self._known.get(chunk)
        return None if known is None or known[0] != end else known[1]


class TransitionStore(Generic[T]):
    """See the head of this file.

    Args:
        is_known: whether the index still has the variant of an id.
        note_change: told when a variant has lost its transition, or has one now.
    """

    def __init__(self, max_bytes: int, *, is_known: Callable[[int], bool], note_change: Callable[[], None]) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._is_known = is_known
        self._note_change = note_change
        self.is_kept: Callable[[int], bool] = lambda variant_id: False
        """Whether a variant is pinned."""
        self.note_leaving: Callable[[int], None] = lambda variant_id: None
        """Told of a variant that is about to lose its transition, for the tiers below."""
        self._stored: OrderedDict[int, T] = OrderedDict()  # the most recently used last
        self._of_requests: WeakSet[ChunkTransitions[T]] = WeakSet()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, variant_id: int) -> bool:
        return variant_id in self._stored

    def of_request(self) -> ChunkTransitions[T]:
        """Transitions of a new request."""
        made: ChunkTransitions[T] = ChunkTransitions()
        self._of_requests.add(made)
        return made

    def may_take(self, num_bytes: int) -> bool:
        """Whether running requests may have `num_bytes` more than they have together."""
        return sum(one.num_bytes for one in self._of_requests) + num_bytes <= self.max_bytes

    def fits(self, transition: T) -> bool:
        """Whether a transition has room beside those of pinned variants."""
        kept = sum(one.num_bytes for variant_id, one in self._stored.items() if self.is_kept(variant_id))
        return kept + transition.num_bytes <= self.max_bytes

    def put(self, variant_id: int, transition: T) -> None:
        """Stores a transition that `fits`."""
        assert self.fits(transition), f"{transition.num_bytes} bytes of at most {self.max_bytes}"
        self._drop(variant_id)
        if self.num_bytes + transition.num_bytes > self.max_bytes:
            victims = sorted(self._stored, key=self._is_known)  # unknown ones first, else as they were used
            for victim in (one for one in victims if not self.is_kept(one)):
                if self.num_bytes + transition.num_bytes <= self.max_bytes:
                    break
                self.note_leaving(victim)
                self._drop(victim)
        self._stored[variant_id] = transition
        self.num_bytes += transition.num_bytes
        self._note_change()

    def get(self, variant_id: int) -> T:
        """The stored transition of a variant; does not count as a use."""
        return self._stored[variant_id]

    def use(self, variant_id: int) -> T:
        """The stored transition of a variant, which becomes the most recently used."""
        self._stored.move_to_end(variant_id)
        return self.get(variant_id)

    def clear(self) -> None:
        """Forgets everything that is stored."""
        self._stored.clear()
        self.num_bytes = 0
        self._note_change()

    def _drop(self, variant_id: int) -> None:
        dropped = self._stored.pop(variant_id, None)
        if dropped is not None:
            self.num_bytes -= dropped.num_bytes
