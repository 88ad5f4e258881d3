"""Samples of a profiler are sorted by their innermost known frame."""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmark.serving.stacks import IDLE, OTHER, read_collapsed, shares, stage_of

LOOP = ("process 7:sglang::scheduler", "Scheduler.event_loop_overlap (scheduler.py:2109)")


@pytest.mark.parametrize(
    ("frames", "stage"),
    [
        ((), "scheduling"),
        (("LlamaMLP.forward (llama.py:132)", "UnquantizedLinearMethod.apply (unquant.py:614)"), "linear layers"),
        (
            ("backend_forward (sglang_chunk_cache/attention/rows.py:195)", "Backend.forward_decode (native.py:376)"),
            "attention of decode",
        ),
        (
            ("ChunkRadixCache._fill (sglang_chunk_cache/radix_cache.py:351)", "rotate (sgl_kernel_ext/rotary.py:98)"),
            "assemble: copy and rotate stored KV",
        ),
        (("sparse_extend (sgl_kernel_ext/sparse_extend/__init__.py:137)",), "attention of fused rows"),
        (("_watchdog_once (utils/watchdog.py:147)",), IDLE),
    ],
)
def test_stages(frames: tuple[str, ...], stage: str) -> None:
    assert stage_of((*LOOP, *frames)) == stage


def test_an_unknown_stack_is_other() -> None:
    assert stage_of(("main (x.py:1)", "work (y.py:2)")) == OTHER


def test_counts_of_one_process(tmp_path: Path) -> None:
    path = tmp_path / "raw.txt"
    linear = "UnquantizedLinearMethod.apply (unquant.py:614)"
    loop = ";".join(LOOP)
    marks = "prepare (sglang_chunk_cache/api/prepare.py:80)"
    path.write_text(
        f"{loop};{linear} 30\n{loop} 5\n{loop};poll (x.py:1) 9\nprocess 8:other;{linear} 4\nprocess 8:other;{marks} 2\n"
    )
    found = shares(read_collapsed(path), "sglang::scheduler")
    assert dict(found) == {"linear layers": 30, "scheduling": 5, "parse: marks, tokens": 2}
