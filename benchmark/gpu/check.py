"""Runs every check and measurement that needs a GPU, in order, and writes one report.

    python benchmark/gpu/check.py [--model DIR] [--backends fa3,triton] [--stages kernels,exactness] [--out FOLDER]
    python benchmark/gpu/check.py --rehearse        # small, on a CPU: what can be seen to work without a GPU

A stage is a command with a time limit. Its log and results lie in the folder of the results. A stage that held is not
run again by the same command, at the same commit, with the same SGLang, except with `--redo`, so an interrupted check
continues where it was; changes since a commit are not told apart. The report says of each such stage whether it held,
and contains its tables. Without `--model`, long prompts run on random weights of Llama-3.1-8B's shape.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT, describe_code
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown


@dataclass(frozen=True)
class Stage:
    """One command.

    Attributes:
        what: what it shows, for the tables.
        command: arguments of this Python; `--out FOLDER` is added.
        limit_s: seconds after which it is stopped.
    """

    name: str
    what: str
    command: tuple[str, ...]
    limit_s: int


def stages(args: argparse.Namespace) -> list[Stage]:
    """All stages, the most important first."""
    model = ("--model", str(args.model)) if args.model else ("--shape", "tiny" if args.rehearse else "llama-8b")
    long = ("--prompts", "1024", "--chunk-len", "64", "--repeats", "1") if args.rehearse else ()
    flags = ("--flags", "--max-total-tokens 80000") if args.rehearse else ("--flags", args.flags)
    bench = ("--quick",) if args.rehearse else ()
    on = ("--device", "cpu") if args.rehearse else ()
    few = ("--cases", "02_all_hits_in_another_order", "14_batch_of_hits_misses_and_plain") if args.rehearse else ()
    backends = "torch_native" if args.rehearse else args.backends
    return [
        Stage("kernels", "each kernel against its reference", ("-m", "sgl_kernel_ext.self_test"), 600),
        Stage("exactness", "ratio 1.0 against stock, in bf16",
              ("benchmark/gpu/exactness.py", "--backends", backends, *on, *few), 2400),
        Stage("waits", "where the host waits for the GPU", ("benchmark/gpu/waits.py",), 600),
        Stage("long", "time to first token of long prompts",
              ("benchmark/gpu/bench_long.py", *model, *long, *flags), 2400),
        Stage("kernel_times", "our kernels beside a full prefill's attention, by tile",
              ("benchmark/kernel/time_on_gpu.py", *bench), 900),
        Stage("serving", "stock, reordering and reuse under load",
              ("benchmark/serving/bench_serving.py", "--plan", "quick"), 1800),
        Stage("fp8", "ratio 1.0 against stock, with a KV cache in FP8",
              ("benchmark/gpu/exactness.py", "--fp8", "--backends", backends, *on, *few), 3600),
    ]  # fmt: skip


def run(stage: Stage, folder: Path) -> dict[str, object]:
    """Runs a stage; returns how it ended, and its seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, *stage.command, "--out", str(folder)]
    began = time.monotonic()
    with (folder / "log.txt").open("wb") as log:
        try:
            done = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=stage.limit_s, check=False
            )
            ended = "held" if done.returncode == 0 else f"did not hold (code {done.returncode})"
        except subprocess.TimeoutExpired:
            ended = f"was ended after {stage.limit_s} s"
    return {"ended": ended, "seconds": round(time.monotonic() - began)}


def report(args: argparse.Namespace, found: dict[str, dict[str, object]]) -> list[str]:
    """Lines of the report."""
    lines = ["# GPU check", "", *run_markdown(describe_run()), ""]
    if args.rehearse:
        lines += ["A rehearsal without a GPU: it shows that the check runs, not what a GPU does.", ""]
    cells = [
        (stage.name, stage.what, found[stage.name]["ended"], found[stage.name]["seconds"])
        for stage in stages(args)
        if stage.name in found
    ]
    lines += markdown_table(("stage", "shows", "", "s"), cells)
    for stage in stages(args):
        folder = args.out / stage.name
        if stage.name not in found:
            continue
        pages = sorted(folder.glob("**/*.md"))
        for page in pages:
            lines += ["", *("#" + line if line.startswith("#") else line for line in page.read_text().splitlines())]
        if not pages or found[stage.name]["ended"] != "held":
            tail = (folder / "log.txt").read_text(errors="replace").splitlines()[-30:]
            lines += ["", f"## End of the log of {stage.name}", "", "```", *tail, "```"]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face folder for long prompts")
    add("--backends", default="fa3,triton,flashinfer", help="attention backends to check (default: %(default)s)")
    add("--flags", default="", help="more flags of the server of long prompts, parted by spaces")
    add("--stages", help="only these, with commas")
    add("--redo", action="store_true", help="also stages that have ended well")
    add("--rehearse", action="store_true", help="small, on a CPU")
    add("--out", type=Path, help="folder of the results")
    args = parser.parse_args()
    args.out = (args.out or (ROOT / ".cache" / "gpu-check" if args.rehearse else RESULTS_DIR / "gpu")).resolve()
    chosen = stages(args)
    if args.stages:
        names = args.stages.split(",")
        if unknown := set(names) - {stage.name for stage in chosen}:
            known = ", ".join(stage.name for stage in chosen)
            parser.error(f"--stages: unknown {', '.join(sorted(unknown))}; known: {known}")
        chosen = [stage for stage in chosen if stage.name in names]
    args.out.mkdir(parents=True, exist_ok=True)
    state = args.out / "check.json"
    known: dict[str, dict[str, object]] = json.loads(state.read_text()) if state.exists() else {}
    code = {name: value for name, value in describe_code().items() if name in ("commit", "sglang")}
    origins = {stage.name: {"command": " ".join(stage.command), **code} for stage in stages(args)}
    found = {name: known[name] for name in known.keys() & origins if origins[name].items() <= known[name].items()}
    for stage in chosen:
        if not args.redo and found.get(stage.name, {}).get("ended") == "held":
            print(f"{stage.name}: held before", flush=True)
        else:
            print(f"{stage.name}: {stage.what} ...", flush=True)
            found[stage.name] = run(stage, args.out / stage.name) | origins[stage.name]
            print(f"{stage.name}: {found[stage.name]['ended']}, {found[stage.name]['seconds']} s", flush=True)
            state.write_text(json.dumps(known | found, indent=1))
        (args.out / "report.md").write_text("\n".join(report(args, found)) + "\n")
    print(f"written: {args.out / 'report.md'}")
    return 0 if all(found[stage.name]["ended"] == "held" for stage in chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
