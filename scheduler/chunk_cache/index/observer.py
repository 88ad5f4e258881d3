"""Observer: is told what enters and leaves one place that keeps variants; the index and each tier's ledger have one."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Called in the thread of the scheduler, where the change is made, and after it."""

    def stored(self, key: bytes, name: str, partition: bytes, size: int) -> None:
        """A variant is found here from now on.

        Args:
            key: `chunk_key` of its chunk.
            name: `variant_name`, which tells it from other variants of the chunk.
            partition: `Partition.key` of its tenant.
            size: tokens in the index, bytes in a ledger.
        """

    def removed(self, key: bytes, name: str) -> None:
        """A variant is not found here any more."""

    def cleared(self) -> None:
        """Nothing is found here any more."""
