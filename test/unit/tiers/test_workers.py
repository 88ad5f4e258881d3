"""Workers: what runs where, in which order, and what becomes of an error."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from sglang_chunk_cache.tiers.workers import Workers


@pytest.fixture
def workers() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


def drain(workers: Workers) -> None:
    deadline = time.monotonic() + 10
    while workers.num_running:
        assert time.monotonic() < deadline
        workers.wait_done(0.05)


def test_work_runs_in_a_worker_and_the_rest_in_the_caller(workers: Workers) -> None:
    seen: list[tuple[str, str]] = []
    workers.submit(threading.current_thread, lambda worker: seen.append((worker.name, threading.current_thread().name)))
    drain(workers)
    ((worker, caller),) = seen
    assert worker.startswith("chunk-tier")
    assert caller == threading.current_thread().name


def test_nothing_takes_effect_between_the_calls(workers: Workers) -> None:
    seen: list[int] = []
    workers.submit(lambda: 1, seen.append)
    time.sleep(0.05)
    assert (seen, workers.num_running) == ([], 1)
    workers.run_done()
    assert (seen, workers.num_running) == ([1], 0)
    workers.run_done()
    assert seen == [1]


def test_wait_done_returns_with_the_first_and_after_the_timeout(workers: Workers) -> None:
    gate = threading.Event()
    seen: list[str] = []
    workers.submit(lambda: gate.wait(10), lambda _: seen.append("late"))
    workers.submit(lambda: None, lambda _: seen.append("early"))
    began = time.monotonic()
    workers.wait_done(5.0)
    assert seen == ["early"]
    workers.wait_done(0.05)
    assert seen == ["early"]
    assert time.monotonic() - began < 3.0
    gate.set()
    drain(workers)
    assert seen == ["early", "late"]


def test_as_many_at_once_as_there_are_threads(workers: Workers) -> None:
    barrier = threading.Barrier(workers.num_threads, timeout=10)
    seen: list[int] = []
    for _ in range(workers.num_threads):
        workers.submit(barrier.wait, seen.append)
    drain(workers)
    assert sorted(seen) == list(range(workers.num_threads))


def test_what_is_done_may_submit_more(workers: Workers) -> None:
    seen: list[int] = []

    def more(number: int) -> None:
        seen.append(number)
        if number < 5:
            workers.submit(lambda: number + 1, more)

    workers.submit(lambda: 0, more)
    drain(workers)
    assert seen == [0, 1, 2, 3, 4, 5]


def test_an_unexpected_error_is_raised_in_the_caller_and_the_others_go_on(workers: Workers) -> None:
    seen: list[int] = []
    workers.submit(lambda: 1 // 0, lambda _: None)
    with pytest.raises(ZeroDivisionError):
        drain(workers)
    workers.submit(lambda: 1, seen.append)
    drain(workers)
    assert seen == [1]


def test_close_waits_for_what_was_submitted() -> None:
    workers = Workers(1)
    begun, gate, done = threading.Event(), threading.Event(), []
    workers.submit(lambda: (begun.set(), gate.wait(10), done.append("first")), lambda _: None)
    workers.submit(lambda: done.append("second"), lambda _: None)
    assert begun.wait(10)
    threading.Timer(0.1, gate.set).start()
    workers.close()
    assert done == ["first", "second"]


def test_jobs_of_the_same_order_run_one_after_another() -> None:
    workers, seen = Workers(4), []
    for i in range(20):
        pause = 0.02 if i % 3 == 0 else 0.0
        workers.submit(lambda i=i, pause=pause: (time.sleep(pause), seen.append(i)), lambda _: None, f"{i % 2}")
    drain(workers)
    assert [i for i in seen if i % 2] == list(range(1, 20, 2))
    assert [i for i in seen if not i % 2] == list(range(0, 20, 2))
    workers.close()


def test_an_order_goes_on_behind_an_error(workers: Workers) -> None:
    seen: list[int] = []
    workers.submit(lambda: 1 // 0, lambda _: None, "one")
    workers.submit(lambda: 1, seen.append, "one")
    with pytest.raises(ZeroDivisionError):
        drain(workers)
    drain(workers)
    assert seen == [1]
