"""Samples of a profiler are sorted by their innermost known frame."""

from __future__ import annotations

from pathlib import Path

import pytest
import sglang
from benchmark.common.machine import ROOT, packages_of
from benchmark.serving.stacks import IDLE, OTHER, RULES, stage_of

LOOP = ("Scheduler.event_loop_overlap (sglang/srt/managers/scheduler.py:2109)",)


@pytest.mark.parametrize(
    ("frames", "stage"),
    [
        ((), "scheduling"),
        (("build (sglang_chunk_cache/forward/batch/fused_batch.py:9)",), "build the batch"),
        (
            ("build (sglang_chunk_cache/forward/rows.py:60)", "rotate (sgl_kernel_ext/rotary.py:98)"),
            "assemble: copy and rotate stored KV",
        ),
        (("leave (sglang_chunk_cache/forward/selection/progress.py:90)", "upload (transfer.py:3)"), "select rows"),
        (("StatisticsTaker.take (sglang_chunk_cache/forward/statistics_taker.py:40)",), "statistics"),
        (("ChunkIndex.get (chunk_cache/index/chunk_index.py:7)",), "look up"),
        (("ChunkManager.remember_exact (chunk_cache/manager.py:379)",), "remember, promote"),
        (("_watchdog_once (utils/watchdog.py:147)",), IDLE),
    ],
)
def test_stages(frames: tuple[str, ...], stage: str) -> None:
    assert stage_of((*LOOP, *frames)) == stage


def test_an_unknown_stack_is_other() -> None:
    assert stage_of(("main (x.py:1)", "work (y.py:2)")) == OTHER


def test_every_stage_has_a_file() -> None:
    folders = [*packages_of(ROOT), Path(sglang.__path__[0]).parent]
    packages = ("sglang/srt", "sglang_chunk_cache", "chunk_cache", "sgl_kernel_ext")
    files = [
        file.relative_to(folder)
        for folder in folders
        for package in packages
        for file in (folder / package).rglob("*.py")
    ]
    assert {stage for stage, _ in RULES} <= {stage_of([f"function ({file}:1)"]) for file in files}
