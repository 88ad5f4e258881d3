"""Workers: threads that move bytes for the scheduler, which never waits for them.

Verbs: `submit` (run this in a worker, then that in the scheduler's thread), `run_done` (run what has become due; the
scheduler's thread), `wait_done` (the same, but wait a little for something to become due), `close`.

Promises: everything that is not moving bytes happens in the scheduler's thread. A worker's unexpected error is raised
there too, so it is not lost. Jobs of the same `order` run one after another, as they were submitted.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Literal, TypeVar

Result = TypeVar("Result")
Lane = Literal["load", "stream", "write"]
LANES: tuple[Lane, ...] = ("load", "stream", "write")


class Workers:
    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self.num_running = 0
        """Jobs that were submitted and have not been run to their end."""
        self._lanes = {lane: ThreadPoolExecutor(num_threads, f"chunk-tier-{lane}") for lane in LANES}
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._last: dict[str, Future[Any]] = {}  # the last job of each order

    def submit(
        self,
        work: Callable[[], Result],
        then: Callable[[Result], None],
        order: str | None = None,
        *,
        lane: Lane = "load",
    ) -> None:
        """Runs `work` in a worker, then `then` on its result in the scheduler's thread.

        Args:
            order: jobs that share it do not overtake each other; None = they may.
            lane: a job waits for jobs of its own lane only. Requests wait for loads, a forward for streams.
        """
        self.num_running += 1
        before = None if order is None else self._last.get(order)

        def run() -> Result:
            if before is not None:
                wait([before])  # it was begun before this one, so it ends
            return work()

        def end(future: Future[Result]) -> None:
            self.num_running -= 1
            if order is not None and self._last.get(order) is future:
                del self._last[order]
            then(future.result())

        future = self._lanes[lane].submit(run)
        if order is not None:
            self._last[order] = future
        future.add_done_callback(lambda future: self._done.put(lambda: end(future)))

    def is_under_way(self, order: str) -> bool:
        """Whether a job of this order has not been run to its end."""
        return order in self._last

    def run_done(self) -> None:
        while not self._done.empty():  # nobody else takes from it
            self._done.get()()

    def wait_done(self, timeout_s: float) -> None:
        try:
            due = self._done.get(timeout=timeout_s)
        except queue.Empty:
            return
        due()
        self.run_done()

    def close(self) -> None:
        """Waits for what was submitted; at the end of the process the interpreter does so anyway."""
        for threads in self._lanes.values():
            threads.shutdown(wait=True)
