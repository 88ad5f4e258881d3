"""TransitionStore: what stored chunks do to states, in host memory, by variant.

A variant without its transition is of no use, so for the index it is gone (`kv/store`). Beyond `max_bytes` those that
were not used for longest go, but none that is kept; what running requests have computed and not stored yet may be as
much again. All tensor-parallel ranks store as many bytes in the same order.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakSet

from sglang_chunk_cache.kv.transition import ChunkTransitions, Transition


class TransitionStore:
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
        self._stored: OrderedDict[int, Transition] = OrderedDict()  # the last one used last
        self._of_requests: WeakSet[ChunkTransitions] = WeakSet()

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, variant_id: int) -> bool:
        return variant_id in self._stored

    def of_request(self) -> ChunkTransitions:
        """Transitions of a new request."""
        made = ChunkTransitions()
        self._of_requests.add(made)
        return made

    def may_take(self, num_bytes: int) -> bool:
        """Whether a running request may have so many bytes more, beside what all of them have."""
        return sum(one.num_bytes for one in self._of_requests) + num_bytes <= self.max_bytes

    def fits(self, transition: Transition) -> bool:
        """Whether there is room beside those that are kept."""
        kept = sum(one.num_bytes for variant_id, one in self._stored.items() if self.is_kept(variant_id))
        return kept + transition.num_bytes <= self.max_bytes

    def put(self, variant_id: int, transition: Transition) -> None:
        """Stores one that `fits`."""
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

    def get(self, variant_id: int) -> Transition:
        """The transition of a variant that is stored; no use of it."""
        return self._stored[variant_id]

    def use(self, variant_id: int) -> Transition:
        """The transition of a variant that is stored, which is the last one used now."""
        self._stored.move_to_end(variant_id)
        return self.get(variant_id)

    def clear(self) -> None:
        """Nothing is stored any more."""
        self._stored.clear()
        self.num_bytes = 0
        self._note_change()

    def _drop(self, variant_id: int) -> None:
        dropped = self._stored.pop(variant_id, None)
        if dropped is not None:
            self.num_bytes -= dropped.num_bytes
