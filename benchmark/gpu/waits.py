"""Where the host waits for the GPU because of the chunk cache: every synchronising call, by file and line.

    python benchmark/gpu/waits.py [--backend fa3] [--methods epic,fusionrag] [--out FOLDER]

SGLang's scheduler runs in this process on a small random model, with `torch.cuda.set_sync_debug_mode("warn")`. Chunks
are computed and remembered, then batches of one and of eight fused requests run, per method. A call counts as ours if
its innermost frame in SGLang or our packages is ours. On a CPU there is nothing to find: that is a rehearsal.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import sys
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "test"))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result

from local_scheduler import LocalScheduler, Request
from tiny_models import make_model

METHODS = ("epic", "cache-craft", "fusionrag", "cacheblend", "a3", "question-drift")
OURS = ("sglang_chunk_cache", "sgl_kernel_ext", "chunk_cache")


@contextmanager
def counting() -> Iterator[collections.Counter[str]]:
    """Counts synchronising calls in the body, by place."""
    found: collections.Counter[str] = collections.Counter()

    def note(message: Any, *args: Any, **kwargs: Any) -> None:
        if "called a synchronizing" not in str(message):
            return
        frames = [frame for frame in traceback.extract_stack() if "site-packages/torch" not in frame.filename]
        owners = [f for f in frames if "/sglang/" in f.filename or any(f"/{name}/" in f.filename for name in OURS)]
        last = owners[-1] if owners else frames[-1]
        own = any(f"/{name}/" in last.filename for name in OURS)
        name = "/".join(Path(last.filename).parts[-3:])
        found[f"{'ours' if own else 'sglang'} {name}:{last.lineno}"] += 1

    is_cuda = torch.cuda.is_available()
    shown, warnings.showwarning = warnings.showwarning, note
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        if is_cuda:
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            if is_cuda:
                torch.cuda.set_sync_debug_mode("default")
            warnings.showwarning = shown


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", help="attention backend (default: SGLang's choice)")
    parser.add_argument("--methods", default=",".join(METHODS), help="default: %(default)s")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "gpu", help="folder of the results")
    args = parser.parse_args()
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    model = make_model("llama", ROOT / ".cache" / "models" / "llama-default-256", hidden=256)
    flags = {"dtype": "bfloat16" if torch.cuda.is_available() else "float32", "max_total_tokens": 32768}
    flags |= {"attention_backend": args.backend} if args.backend else {}
    local = LocalScheduler(model, chunk_cache={}, sampling_backend="pytorch", **flags)
    draw = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(10, 500) for _ in range(count)]

    system, chunks = tokens(20), [tokens(120) for _ in range(12)]

    def request(number: int, **options: Any) -> Request:
        order = draw.sample(chunks, number)
        ids, spans = list(system), []
        for chunk in order:
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        return Request(ids + tokens(17), {"spans": spans, **options}, num_top=0, max_new_tokens=3)

    rows: list[tuple[str, str, int]] = []
    for name, requests in {
        "chunks are remembered": [[request(1)] for _ in range(40)],
        **{
            f"{method}, {size}": [[request(6, method=method, ratio=0.15) for _ in range(size)] for _ in range(3)]
            for method in args.methods.split(",")
            for size in (1, 8)
        },
    }.items():
        local.generate(requests[0])  # compiles what is compiled at first use
        with counting() as found:
            for batch in requests[1:]:
                local.generate(batch)
        rows += [(name, place, times) for place, times in sorted(found.items())] or [(name, "none", 0)]
    ours = [row for row in rows if row[1].startswith("ours")]
    report = {**describe_run(), "rows": rows, "met": not ours}
    lines = ["# Where the host waits", "", *run_markdown(report), ""]
    lines += markdown_table(("part", "place", "times"), rows)
    lines += ["", f"Ours: {len(ours)} of {len(rows)} rows."]
    write_result(args.out, "waits", report, lines)
    print("\n".join(lines), flush=True)
    os._exit(1 if ours else 0)


if __name__ == "__main__":
    main()
