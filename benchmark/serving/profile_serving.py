"""Where the time of a request goes: a sampling profile of the scheduler process under load, as table and flame graph.

    python benchmark/serving/profile_serving.py                       # stock and epic@0.15, plan long
    python benchmark/serving/profile_serving.py --systems epic@0.15,cacheblend@0.15 --plan standard --num 60
    python benchmark/serving/profile_serving.py --new-share 1 --name profile-fresh    # what remembering costs
    python benchmark/serving/profile_serving.py --trained --num 300 --name profile-trained    # a tiny model
    git worktree add ../before COMMIT    # an earlier server, asked by this benchmark
    python benchmark/serving/profile_serving.py --source ../before --systems epic@0.15 --name profile-before

py-spy (a dependency of SGLang) samples the processes of the server 50 times a second while clients work in a closed
loop: once for the table, once more for the flame graph. The server is not stopped for a sample, so a few are lost that
were read while it moved on; sampling takes time all the same, so no speed is reported. Stages are those of `stacks.py`.
Linux lets py-spy read another process where it belongs to the same user and `kernel.yama.ptrace_scope` is 0, or as
root. Results: `benchmark/results/serving/profile.{json,md}` and `profile-SYSTEM.svg`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT, commit_of
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import ServerError, leave_on_sigterm
from benchmark.quality.question import DataError
from benchmark.serving import traces
from benchmark.serving.client import closed_loop
from benchmark.serving.fleet import Fleet
from benchmark.serving.models import CACHE_DIR, SMALL_POOL_LEN, TRAINED_DIR, TRAINED_FLAGS, documents_model
from benchmark.serving.plan import PLANS, VOCAB
from benchmark.serving.prompt import Prompt
from benchmark.serving.stacks import RULES, read_collapsed, shares
from benchmark.serving.systems import System, Writer, parse_systems, split_names
from rich.console import Console

RATE = 50  # samples a second
ATTACH_S = 3.0
SCHEDULER = "sglang::scheduler"


class ProfilerError(RuntimeError):
    """py-spy is missing, or may not read the server's processes."""


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="long", choices=sorted(PLANS))
    parser.add_argument("--systems", default="stock,epic@0.15")
    parser.add_argument("--num", type=int, default=30, help="queries per profile, behind the plan's warm-up")
    parser.add_argument("--new-share", type=float, help="of chunks that are never repeated (default: the plan's)")
    parser.add_argument(
        "--trained", action="store_true", help="questions to the trained model in the place of the plan's"
    )
    parser.add_argument("--source", type=Path, help="another checkout of this project, whose server is profiled")
    parser.add_argument("--name", default="profile", help="of the result files")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "serving")
    args = parser.parse_args()
    try:
        args.systems = parse_systems(split_names(args.systems))
    except DataError as error:
        parser.error(f"--systems: {error}")
    if args.num < 1:
        parser.error("--num: at least 1")
    if args.new_share is not None and not 0 <= args.new_share <= 1:
        parser.error("--new-share: give a number in [0, 1]")
    if args.new_share is not None and args.trained:
        parser.error("--new-share: with --trained the chunks are those of its notes; leave one of the two out")
    if args.source is not None and not (args.source / "python" / "sglang_chunk_cache").is_dir():
        parser.error(f"--source: {args.source} is no checkout of this project: it has no python/sglang_chunk_cache")
    return args


def profile(system: System, fleet: Fleet, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Samples by stage, beside how many prompts and rows they were taken of."""
    load = PLANS[args.plan].load
    server = fleet.use(system.kind)
    server.flush()
    writer = Writer(system, fleet.pool_len)
    warmup, clients = load.warmup, load.clients
    bodies = [writer.body(prompt) for prompt in _prompts(args, warmup + 2 * args.num)]
    closed_loop(server.url, bodies[:warmup], clients)
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw.txt"
        with _Sampling(server.pid, "raw", raw):
            run = closed_loop(server.url, bodies[warmup : warmup + args.num], clients)
        counts = shares(read_collapsed(raw), SCHEDULER)
    picture = args.out / f"{args.name}-{system.name.replace('@', '-')}.svg"
    picture.parent.mkdir(parents=True, exist_ok=True)
    with _Sampling(server.pid, "flamegraph", picture):
        closed_loop(server.url, bodies[warmup + args.num :], clients)
    # Frames name the commands of the processes; where these trees lie is nobody's business.
    drawn = picture.read_text(encoding="utf-8")
    for tree in filter(None, (ROOT, args.source)):
        drawn = drawn.replace(f"{tree.resolve()}/", "")
    picture.write_text(drawn, encoding="utf-8")
    failed = [record.error for record in run.records if record.error is not None]
    if failed:
        raise ProfilerError(f"{len(failed)} requests to {system.name} failed: {failed[0]}")
    console.print(f"{system.name}: {sum(counts.values())} samples", highlight=False)
    return {
        "system": system.name + (f", commit {commit_of(args.source)}" if args.source else ""),
        "samples": dict(counts),
        "num_requests": len(run.records),
        "mean_prompt_len": sum(record.prompt_len for record in run.records) / len(run.records),
        "mean_rows": sum(record.rows for record in run.records) / len(run.records),
        "mean_output_len": sum(record.output_len for record in run.records) / len(run.records),
        "flame_graph": picture.name,
    }


def _prompts(args: argparse.Namespace, num: int) -> list[Prompt]:
    """The first prompts of the trace."""
    if args.trained:
        return traces.notes(traces.NotesSpec(num))
    plan = PLANS[args.plan]
    new_share = plan.spec.new_share if args.new_share is None else args.new_share
    spec = dataclasses.replace(plan.spec, num_requests=max(num, plan.spec.num_requests), new_share=new_share)
    return traces.generated(spec, VOCAB, plan.output_len)[:num]


class _Sampling:
    """py-spy beside the body of a `with`; its file is complete afterwards."""

    def __init__(self, pid: int, kind: str, path: Path) -> None:
        # Beside this interpreter in a virtual environment, which need not be on the PATH.
        found = shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")
        if found is None:
            raise ProfilerError("py-spy is not installed; it comes with SGLang, see make install")
        self._path = path
        self._command = [
            *(found, "record", "--subprocesses", "--pid", str(pid), "--rate", str(RATE)),
            *("--duration", "3600", "--format", kind, "--output", str(path), "--nonblocking"),
        ]

    def __enter__(self) -> None:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        time.sleep(ATTACH_S)
        if self._process.poll() is not None:
            said = self._process.stdout.read() if self._process.stdout else ""
            raise ProfilerError(f"py-spy may not sample the server: {said.strip()[:500]}")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._process.send_signal(signal.SIGINT)
        said, _ = self._process.communicate(timeout=120)
        if error is None and not self._path.exists():
            raise ProfilerError(f"py-spy wrote no file: {said.strip()[:500]}")


def to_markdown(report: Mapping[str, Any]) -> list[str]:
    """A table with a column per system: samples per request and their share."""
    rows = report["rows"]
    stages = [stage for stage, _ in RULES] + ["other"]
    cells = [
        (stage, *(_cell(row, stage, report["rate"]) for row in rows))
        for stage in stages
        if any(row["samples"].get(stage) for row in rows)
    ]
    totals = [_time(row, sum(row["samples"].values()), report["rate"]) for row in rows]
    about = [
        f"`{row['system']}`: {row['num_requests']} requests, on average {row['mean_rows']:.0f} rows of "
        f"{row['mean_prompt_len']:.0f} prompt tokens and {row['mean_output_len']:.1f} tokens of output; "
        f"[flame graph]({row['flame_graph']})."
        for row in rows
    ]
    return [
        "# Where the time of a request goes",
        "",
        *run_markdown(report),
        f"- model: {report['model']}; plan {report['plan']}, {report['clients']} clients in a closed loop"
        + ("" if report["new_share"] is None else f"; share of new chunks {report['new_share']:g}"),
        "",
        f"Samples of the scheduler process, {report['rate']} a second while clients work: ms per request, and",
        "the share of all that were not waiting. Sampling slows the server down; shares are what counts.",
        "",
        *markdown_table(("stage", *(f"`{row['system']}`" for row in rows)), [*cells, ("all", *totals)]),
        "",
        *about,
    ]


def _cell(row: Mapping[str, Any], stage: str, rate: int) -> str:
    count, total = row["samples"].get(stage, 0), sum(row["samples"].values())
    return f"{_time(row, count, rate)}, {100 * count / total:.1f} %"


def _time(row: Mapping[str, Any], count: int, rate: int) -> str:
    """What so many samples are per request."""
    return f"{1000 * count / rate / row['num_requests']:.0f} ms"


def _importing(source: Path | None) -> dict[str, str]:
    """Variables with which a server imports the packages of another checkout, not those that are installed."""
    if source is None:
        return {}
    folders = [source.resolve() / name for name in ("python", "scheduler", "sgl-kernel-ext")]
    return {"PYTHONPATH": os.pathsep.join(map(str, folders))}


def main() -> int:
    args = parse_args()
    leave_on_sigterm()
    console = Console()
    plan = PLANS[args.plan]
    report: dict[str, Any] = {
        **describe_run(),
        "plan": plan.name,
        "model": TRAINED_DIR.name if args.trained else f"{plan.shape}, fp32, random weights",
        "rate": RATE,
        "clients": plan.load.clients,
        "new_share": args.new_share,
    }
    model = TRAINED_DIR if args.trained else documents_model(plan.shape)[0]
    pool_len, flags = (SMALL_POOL_LEN, TRAINED_FLAGS) if args.trained else (plan.pool_len, ())
    try:
        with Fleet(model, pool_len, CACHE_DIR, env=_importing(args.source), flags=flags) as fleet:
            fleet.keep(system.kind for system in args.systems)
            report["rows"] = [profile(system, fleet, args, console) for system in args.systems]
    except (ServerError, ProfilerError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    markdown = to_markdown(report)
    write_result(args.out, args.name, report, markdown)
    print("\n".join(markdown))
    return 0


if __name__ == "__main__":
    sys.exit(main())
