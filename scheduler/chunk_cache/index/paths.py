"""PathLedger: which prompts' tokens are remembered, for which variants, and in what order they are evicted.

`hold` adds a variant to its path, `release` takes it away; a path is forgotten with its last variant. `total_tokens`
never counts a path twice. The ledger chooses the least recently used path; dropping its variants is the index's work.
"""

from __future__ import annotations

from collections import OrderedDict

from chunk_cache.index.variant import PathTokens


class PathLedger:
    """The paths that variants live in, least recently used first."""

    def __init__(self) -> None:
        self._holders: OrderedDict[PathTokens, dict[int, None]] = OrderedDict()  # a dict keeps the order of its keys
        self.total_tokens = 0

    def __len__(self) -> int:
        return len(self._holders)

    def __contains__(self, path: PathTokens) -> bool:
        return path in self._holders

    def hold(self, path: PathTokens, variant_id: int) -> None:
        """Adds a variant to the path, which becomes the most recently used."""
        holders = self._holders.get(path)
        if holders is None:
            holders = self._holders[path] = {}
            self.total_tokens += len(path)
        holders[variant_id] = None
        self._holders.move_to_end(path)

    def release(self, path: PathTokens, variant_id: int) -> None:
        """Takes a variant away from the path; the path is forgotten with its last variant."""
        holders = self._holders[path]
        del holders[variant_id]
        if not holders:
            del self._holders[path]
            self.total_tokens -= len(path)

    def touch(self, path: PathTokens) -> None:
        """The path becomes the most recently used."""
        self._holders.move_to_end(path)

    def oldest(self) -> PathTokens:
        """The least recently used path; there must be one."""
        return next(iter(self._holders))

    def holders(self, path: PathTokens) -> list[int]:
        """Ids of the variants that live in the path, in the order they came; empty when it is not remembered."""
        return list(self._holders.get(path, ()))

    def clear(self) -> None:
        self._holders.clear()
        self.total_tokens = 0

    def check_integrity(self, expected: dict[PathTokens, set[int]]) -> None:
        """Compare with holders counted from scratch.

        Raises:
            AssertionError: they differ.
        """
        held = {path: set(ids) for path, ids in self._holders.items()}
        assert held == expected, f"path holders are {held}, variants say {expected}"
        total = sum(len(path) for path in expected)
        assert self.total_tokens == total, f"total_tokens is {self.total_tokens}, the paths hold {total}"
