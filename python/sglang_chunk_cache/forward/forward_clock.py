"""ForwardClock: measures how long forwards take, without waiting for any.

Verbs: `measuring` (a forward runs inside), `harvest` (`cost` learns from forwards whose time is known).
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch

from chunk_cache.tiers.cost import PrefillCost


class ForwardClock:
    """See the head of this file.

    Args:
        device: of the model; on a GPU the time is that between two events of its stream.

    Attributes:
        cost: estimates the time of a forward from those measured.
    """

    def __init__(self, device: torch.device) -> None:
        self._device_module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self.cost = PrefillCost()
        self._running: deque[tuple[int, int, Any, Any]] = deque(maxlen=1024)

    @contextlib.contextmanager
    def measuring(self, num_rows: int, num_keys: int) -> Iterator[None]:
        """Measures the forward that runs inside.

        Args:
            num_rows: of all requests of the batch.
            num_keys: of the longest of them.
        """
        if self._device_module is None:
            start = time.perf_counter()
            yield
            self.cost.observe(num_rows, num_keys, time.perf_counter() - start)
            return
        begin, end = (self._device_module.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._running.append((num_rows, num_keys, begin, end))

    def harvest(self) -> None:
        """Tells `cost` of the forwards that have ended: each once, in order."""
        while self._running and self._running[0][3].query():
            num_rows, num_keys, begin, end = self._running.popleft()
            self.cost.observe(num_rows, num_keys, begin.elapsed_time(end) / 1e3)
