"""Mirror: an observer that knows what it was told is there, and believes nothing else."""

from __future__ import annotations


class Mirror:
    """What is held: its partition and size, by key and name."""

    def __init__(self) -> None:
        self.held: dict[tuple[bytes, str], tuple[bytes, int]] = {}

    def stored(self, key: bytes, name: str, partition: bytes, size: int) -> None:
        assert (key, name) not in self.held, "it is there already"
        self.held[key, name] = (partition, size)

    def removed(self, key: bytes, name: str) -> None:
        del self.held[key, name]

    def cleared(self) -> None:
        self.held.clear()
