"""Time of a selection by `cacheclip`, beside what could hide it: loading the chunks, or prefilling. One core, alone.

    python benchmark/host/bench_selector.py --model DIR --selector DIR2      # 10 to 20 minutes

Everything runs on one core, one thing after the other: first the selector's model in this process (reading a chunk,
once; scoring a question over chunks that were read, each time), then a server with the main model and a disk tier: the
time to the first token with everything computed, with chunks from disk, and with chunks from the KV pool, there also
with `cacheclip`, whose selection is part of that time; and what its workers took to read from disk. Prompts are
RULER-like needles. Also how many tokens the paper's windows leave of each budget. Results: `benchmark/results/host/`.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.results import RESULTS_DIR, Spread, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.quality.loaders.ruler import RULER_FAMILIES, Size, make_ruler
from benchmark.quality.question import Question

from chunk_cache.methods import METHODS
from chunk_cache.methods.grouping import group_rows
from chunk_cache.options.defaults import DEFAULT_SEPARATOR
from chunk_cache.plan.selection_plan import question_of
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import split_marked
from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel
from sglang_chunk_cache.selector.chunk_scorer import ChunkScorer, ReadChunk

RATIOS = (0.1, 0.2, 0.3)
MAX_BYTES = 8_000_000_000


def marked_text(question: Question) -> str:
    """A prompt with separators."""
    return DEFAULT_SEPARATOR.join((question.system, *question.chunks, question.question))


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


class Selecting:
    """The selector's work on some prompts, in this process."""

    def __init__(self, selector: str, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._scorer = ChunkScorer(AuxiliaryModel.load(selector), tokenizer, MAX_BYTES)
        self.read_s: list[float] = []
        self.read_lens: list[int] = []
        self.score_s: list[float] = []
        self.kept: dict[float, list[float]] = {ratio: [] for ratio in RATIOS}

    def measure(self, question: Question, repeats: int) -> int:
        """Reads its chunks and scores it; the length of its prompt."""
        marked = split_marked(marked_text(question), DEFAULT_SEPARATOR, "text")
        assert marked is not None
        encoded = encode_marked(self._tokenizer, marked)
        prefix = encoded.ids[: encoded.spans[0][0]]
        chunks = []
        for i, (start, end) in enumerate(encoded.spans):
            prepare = self._scorer.prepare(f"{question.id} {i}".encode(), encoded.ids[start:end], b"S", prefix)
            seconds, (*_, chunk) = timed(lambda prepare=prepare: list(prepare))
            assert isinstance(chunk, ReadChunk)
            chunks.append(chunk)
            self.read_s.append(seconds)
            self.read_lens.append(end - start)
        first, last = question_of(encoded.spans, len(encoded.ids))
        for _ in range(repeats):
            seconds, scores = timed(lambda: self._scorer.score(encoded.ids[first:last], chunks))
            self.score_s.append(seconds)
        self._note_kept(scores)
        return len(encoded.ids)

    def _note_kept(self, scores: Sequence[Any]) -> None:
        """What the method's own windows leave of each budget, as a share of all chunk tokens."""
        method = METHODS["cacheclip"]
        joined, starts = np.concatenate(scores), np.cumsum([0, *map(len, scores)])
        for ratio, shares in self.kept.items():
            rows = method.rows_for_chunk(0, len(joined), ratio, ranking=joined)
            left = 0
            for start, end in itertools.pairwise(starts):
                inside = rows[(rows >= start) & (rows < end)] - start
                left += len(group_rows(inside, offset_len=0, chunk_len=int(end - start), size=8, threshold=5))
            shares.append(left / len(joined))


SELECTED = {"whole budget": {"group_size": 0}, "the paper's windows": {}}
"""Options of `cacheclip`."""


def measure_server(
    model: str, selector: str, questions: Sequence[Question], ratio: float, repeats: int
) -> dict[str, list[float]]:
    """Seconds to the first token by where the chunks are, and by what `cacheclip` selects."""
    found: dict[str, list[float]] = {name: [] for name in ("computed", "disk", "pool", "read", *SELECTED)}
    with tempfile.TemporaryDirectory() as folder:
        config = f'{{"tiers":{{"disk":"{folder}","controller":false}},"selector":{{"timeout_s":600}}}}'
        flags = ("--chunk-cache", "--chunk-cache-config", config, "--sleep-on-idle", "--enable-metrics")
        flags += ("--chunk-cache-selector", selector)
        dtype = () if torch.cuda.is_available() else ("--dtype", "float32")
        with Server(model, *dtype, *flags, env=offline_env()) as server:
            for question in questions:
                text = marked_text(question)
                for chunk in question.chunks:
                    alone = DEFAULT_SEPARATOR.join((question.system, chunk, ""))
                    server.generate(alone, chunk_cache={"mode": "auto"})
                wait_for_files(Path(folder), len(question.chunks))
                for _ in range(repeats):
                    # A partition of its own keeps the exact prefix away.
                    off = server.stream(text, chunk_cache={"mode": "off"}, extra_key=f"{time.monotonic_ns()}")
                    found["computed"].append(off.first_s)
                    server.flush()
                    before = load_seconds(server)
                    for where in ("disk", "pool"):
                        reply = server.stream(text, chunk_cache={"method": "epic", "ratio": ratio})
                        tiers = {chunk.get("tier") for chunk in reply.chunk_cache["chunks"]}
                        assert tiers == {where}, reply.chunk_cache
                        found[where].append(reply.first_s)
                    found["read"].append(load_seconds(server) - before)
                for number in range(repeats + 1):
                    for name, options in SELECTED.items():
                        how = {"method": "cacheclip", "ratio": ratio, "options": options}
                        reply = server.stream(text, chunk_cache=how)
                        assert reply.chunk_cache["method"] == "cacheclip", reply.chunk_cache
                        if number:  # the selector has read the chunks
                            found[name].append(reply.first_s)
                for path in Path(folder).rglob("*.kv"):
                    path.unlink()
                server.flush()
    return found


def load_seconds(server: Server) -> float:
    """What the workers of the server have spent on reading from disk."""
    name = 'sglang:chunk_cache_tier_load_seconds_total{tier="disk"}'
    lines = server.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


def wait_for_files(folder: Path, num: int) -> None:
    """Until so many chunks are on disk."""
    deadline = time.monotonic() + 120
    while len(list(folder.rglob("*.kv"))) < num:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{folder} has fewer than {num} chunks after 120 s")
        time.sleep(0.1)


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    rows = [(name, f"{1000 * s['median']:.0f}", f"{1000 * s['min']:.0f}", f"{1000 * s['max']:.0f}", s["num"])
            for name, s in report["seconds"].items()]  # fmt: skip
    kept = [(f"{ratio:.0%}", f"{share:.1%}") for ratio, share in report["kept"].items()]
    return [
        *("# Time of a selection", "", *run_markdown(report), ""),
        f"- {report['prompts']}",
        *("", "Milliseconds, on one core, alone:", ""),
        *markdown_table(("what", "median", "least", "most", "times"), rows),
        *("", "Share of the chunk tokens that the paper's windows (8, more than 5) leave of a budget:", ""),
        *markdown_table(("budget", "left"), kept),
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="the main model")
    add("--selector", required=True, metavar="DIR", help="the auxiliary model")
    add("--num", type=int, default=3, help="prompts (default: %(default)s)")
    add("--repeats", type=int, default=3, help="of each measurement (default: %(default)s)")
    add("--words", type=int, default=Size.num_words, help="of a prompt (default: %(default)s)")
    add("--passage-words", type=int, default=Size.passage_words, help="of a chunk (default: %(default)s)")
    add("--ratio", type=float, default=0.2, help="recompute ratio of the server (default: %(default)s)")
    add("--core", type=int, help="the core (default: the first that may be used)")
    add("--out", type=Path, default=RESULTS_DIR / "host")
    args = parser.parse_args()
    for name in ("num", "repeats", "words", "passage_words"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')}: at least 1")
    if not 0 <= args.ratio <= 1:
        parser.error(f"--ratio: {args.ratio:g} is not in [0, 1]")
    cores = sorted(os.sched_getaffinity(0))
    if args.core is not None and args.core not in cores:
        parser.error(f"--core: {args.core} is not one of {', '.join(map(str, cores))}")
    leave_on_sigterm()
    report: dict[str, Any] = describe_run()
    os.sched_setaffinity(0, {cores[0] if args.core is None else args.core})  # the server inherits it
    torch.set_num_threads(1)
    size = Size(num_words=args.words, passage_words=args.passage_words)
    families = [family for family in RULER_FAMILIES if family != "variables"]
    questions = [make_ruler(families[i % len(families)], num=1, seed=i, size=size)[0] for i in range(args.num)]
    selecting = Selecting(args.selector, AutoTokenizer.from_pretrained(args.model))
    lens = [selecting.measure(question, args.repeats) for question in questions]
    server = measure_server(args.model, args.selector, questions, args.ratio, args.repeats)
    seconds = {
        "selector reads a chunk, once": selecting.read_s,
        "selector scores a prompt whose chunks it has read": selecting.score_s,
        "reading its chunks from disk": server["read"],
        f"first token, chunks in the pool, `epic` at {args.ratio:.0%}": server["pool"],
        f"first token, chunks on disk, `epic` at {args.ratio:.0%}": server["disk"],
        **{f"first token, chunks in the pool, `cacheclip` at {args.ratio:.0%}, {one}": server[one] for one in SELECTED},
        "first token, everything computed": server["computed"],
    }
    num_chunks = sum(len(question.chunks) for question in questions)
    report |= {
        "prompts": f"{args.num} prompts of {min(lens)} to {max(lens)} tokens in {num_chunks} chunks of "
        f"{sum(selecting.read_lens) // num_chunks} tokens on average; ratio {args.ratio:g}",
        "seconds": {name: Spread.of(values).as_dict() for name, values in seconds.items()},
        "kept": {ratio: sum(shares) / len(shares) for ratio, shares in selecting.kept.items()},
    }
    markdown = to_markdown(report)
    write_result(args.out, "selector", report, markdown)
    print("\n".join(markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
