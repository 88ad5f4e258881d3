"""Compares stock SGLang, an exact baseline that reorders chunks, and the chunk cache under load, on one trace.

    python benchmark/serving/bench_serving.py                     # 17 to 30 minutes on two cores (make bench)
    python benchmark/serving/bench_serving.py --plan long         # more methods and queries, a larger model
    python benchmark/serving/bench_serving.py --plan quick        # to see that it works
    python benchmark/serving/bench_serving.py --plan ragpulse --ragpulse FOLDER     # a real RAG service's requests
    python benchmark/serving/bench_serving.py --plan ragpulse-steady --ragpulse FOLDER    # behind 3,640 of them
    python benchmark/serving/bench_serving.py --parts serve --systems stock,epic@0.15 --log MY.jsonl --model DIR
    python benchmark/serving/bench_serving.py --parts serve --log MY.jsonl --model DIR --timestamps MY.csv:Timestamp:s

Parts: `serve` (cold, closed loop with 4 clients, Poisson rates up to saturation), `documents` (cold and closed loop
over this repository's prose, with a real retriever), `crowd` (more clients than the KV pool has room for), `fresh` (a
trace without a repeated chunk), `shared` (SGLang's own tool with its shared prefixes), `pulse` (requests of RAGPulse,
scaled down), `trained` (right answers and speed of the trained model), `orders` (thousands of queries, all with their
chunks in a new order). Each kind of system has a server, which is paused while another is measured. Results:
`benchmark/results/serving/NAME.{json,md}`, or `.cache/serving/` with `--plan quick`; docs/benchmarks.md explains.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.ragpulse import RagPulse, read_ragpulse
from benchmark.common.results import RESULTS_DIR, describe_run, write_result
from benchmark.common.server import ServerError, leave_on_sigterm
from benchmark.demo.corpus import Passage
from benchmark.quality.question import DataError
from benchmark.quality.synthetic.vocabulary import WORDS
from benchmark.serving import traces
from benchmark.serving.arrivals import recorded
from benchmark.serving.bench import Bench, MeasurementError, Tape, Tick
from benchmark.serving.fleet import Fleet
from benchmark.serving.models import CACHE_DIR, SMALL_POOL_LEN, TRAINED_DIR, TRAINED_FLAGS, documents_model
from benchmark.serving.parts import ask_trained, compare_fresh, compare_shared, crowd, order_anew, pulse, replay, serve
from benchmark.serving.plan import MAIN_PARTS, ORDERS_SPEC, PARTS, PLANS, SMALL_PARTS, VOCAB, Load, Plan, changed
from benchmark.serving.prompt import Prompt
from benchmark.serving.report import OURS, targets, to_markdown
from benchmark.serving.systems import REORDER, STOCK, System, ablated, parse_systems, split_names
from benchmark.simulate.trace import TraceError
from rich.console import Console

COMPARED = (STOCK, OURS)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="standard", choices=sorted(PLANS))
    parser.add_argument("--parts", help=f"any of {', '.join(PARTS)} (default: the plan's, with --log: serve)")
    parser.add_argument(
        "--systems", help="swept ones, such as stock,reorder,epic@0.15, and no others (default: the plan's)"
    )
    parser.add_argument("--bound-s", type=float, help="of the p99 of the time to first token (default: from stock)")
    parser.add_argument("--base-rate", type=float, help="requests/s that rates are shares of (default: from stock)")
    parser.add_argument("--log", type=Path, help="JSONL of prompts in the place of the generated trace; needs --model")
    parser.add_argument("--model", type=Path, help="folder of a model with its tokenizer, for --log")
    parser.add_argument("--ragpulse", type=Path, metavar="FOLDER", help="of RAGPulse's files, for part pulse")
    parser.add_argument("--timestamps", help="FILE:COLUMN:UNIT of recorded arrivals, unit s or ms; replayed, not swept")
    parser.add_argument("--speed", type=float, default=1.0, help="recorded arrivals come so many times as fast")
    parser.add_argument("--trace", help="of the generated one, such as 'chunk_len=300,zipf=1,session_len=4'")
    parser.add_argument("--load", help="of the runs, such as 'clients=8,warmup=40,closed=60'")
    parser.add_argument("--server-flags", default="", help="further flags of every server, such as '--tp 2'")
    parser.add_argument("--pool", type=int, help="tokens of every KV pool (default: the plan's)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", help="of the result files (default: the plan's)")
    parser.add_argument("--out", type=Path, help="folder of the result files")
    parser.add_argument("--add", action="store_true", help="keep what the result file has of other parts")
    parser.add_argument("--strict", action="store_true", help="exit code 1 when a target is missed")
    args = parser.parse_args()
    _check(parser, args)
    return args


def _check(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    args.plan = _changed_plan(parser, args)
    args.parts = tuple((args.parts or ("serve" if args.log else ",".join(args.plan.parts))).split(","))
    if unknown := sorted(set(args.parts) - set(PARTS)):
        parser.error(f"--parts: {unknown[0]} is not one of {', '.join(PARTS)}")
    if (args.log is None) != (args.model is None):
        parser.error("--log, --model: give both or none; prompts of a log need a model that can read them")
    if args.log and args.parts != ("serve",):
        parser.error("--parts: with --log there is only serve")
    if args.timestamps and args.timestamps.count(":") < 2:
        parser.error("--timestamps: give FILE:COLUMN:UNIT, such as burst.csv:Timestamp:s")
    if (args.ragpulse is None) == ("pulse" in args.parts):
        parser.error("--ragpulse: part pulse needs the folder of RAGPulse, and no other part reads it")
    try:
        swept = split_names(args.systems) if args.systems else args.plan.swept
        closed = () if args.systems else args.plan.closed_only
        args.swept, args.closed_systems = parse_systems(swept), parse_systems(closed)
        parse_systems([*swept, *closed])
    except DataError as error:
        parser.error(f"--systems: {error}")
    if args.swept[0].name != STOCK and not (args.bound_s and args.base_rate):
        parser.error("--systems: name stock first, or give --bound-s and --base-rate")
    if args.systems and not {"serve", "pulse"} & set(args.parts):
        parser.error("--systems: they are of part serve, which --parts leaves out")
    if len(set(args.parts)) < len(args.parts):
        parser.error("--parts: name each part once")
    if args.speed != 1.0 and not (args.timestamps or args.log):
        parser.error("--speed: there are no recorded arrivals; give --timestamps, or --log with timestamps")
    _check_numbers(parser, args)
    if args.name is not None and not re.fullmatch(r"[\w.-]+", args.name):
        parser.error(f"--name: {args.name!r} is no name of a file; use letters, digits, '.', '_' and '-'")
    args.name = args.name or args.plan.name
    args.out = args.out or (CACHE_DIR if args.plan.name == "quick" else RESULTS_DIR / "serving")


def _check_numbers(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    for flag in ("bound_s", "base_rate", "speed"):
        value = getattr(args, flag)
        if value is not None and not 0 < value < math.inf:
            parser.error(f"--{flag.replace('_', '-')}: {value:g}; give a number above 0")
    if args.pool is not None and args.pool < 1:
        parser.error(f"--pool: {args.pool}; give the tokens of a KV pool, such as 49152")
    if args.seed < 0:
        parser.error(f"--seed: {args.seed}; give a whole number from 0")


def _changed_plan(parser: argparse.ArgumentParser, args: argparse.Namespace) -> Plan:
    """The named plan, changed by `--trace` and `--load`."""
    plan = PLANS[args.plan]
    try:
        if args.trace:
            plan = dataclasses.replace(plan, spec=changed(plan.spec, args.trace, "--trace"))
            traces.generated(dataclasses.replace(plan.spec, num_requests=1, seed=max(0, args.seed)), VOCAB, 1)
        if args.load:
            plan = dataclasses.replace(plan, load=changed(plan.load, args.load, "--load"))
    except DataError as error:
        parser.error(str(error))
    except TraceError as error:
        parser.error(f"--trace: {error}")
    return plan


class Runner:
    """Runs the parts one after the other; after each of them `report` can be written.

    Parts with the same model share servers, since starts are slow.
    """

    def __init__(self, args: argparse.Namespace, tick: Tick) -> None:
        self.args, self.plan, self.tick = args, args.plan, tick
        self.report: dict[str, Any] = _earlier(args) | {"plan": args.plan.name}
        self._passages: list[Passage] = []
        # Read before any server starts, so that a mistake in these files shows at once.
        self._log = traces.from_log(args.log, args.plan.output_len) if args.log else None
        self._ragpulse = _read_ragpulse(args.ragpulse, self.plan) if args.ragpulse else None
        self._recorded = _recorded(args.timestamps, args.speed) if args.timestamps else None
        if self._log is not None and self._arrivals(self._log) is None:
            _check_length(args.log, len(self._log), self.plan.load)

    def run(self) -> Iterator[None]:
        """Yields after each part."""
        for servers, names in ((self._main_fleet, MAIN_PARTS), (self._small_fleet, SMALL_PARTS)):
            wanted = [name for name in self.args.parts if name in names]
            if not wanted:
                continue
            about = describe_run()  # before the servers start, since that is load too
            with servers() as fleet:
                for name in wanted:
                    self.tick(f"starting servers for {name}")
                    fleet.keep(system.kind for system in self._systems_of(name))
                    self.tick(f"servers started: {fleet.start_s}")
                    began = time.monotonic()
                    found = getattr(self, f"_{name}")(fleet)
                    self.report[name] = found | {"run": about, "seconds": round(time.monotonic() - began)}
                    yield

    def _main_fleet(self) -> Fleet:
        model = self.args.model
        if model is None:
            model, self._passages = documents_model(self.plan.shape)
        return self._fleet(model, self.args.pool or self.plan.pool_len)

    def _small_fleet(self) -> Fleet:
        return self._fleet(TRAINED_DIR, SMALL_POOL_LEN, TRAINED_FLAGS)

    def _fleet(self, model: Path, pool_len: int, flags: Sequence[str] = ()) -> Fleet:
        return Fleet(model, pool_len, CACHE_DIR, flags=[*flags, *shlex.split(self.args.server_flags)])

    def _systems_of(self, part: str) -> Sequence[System]:
        """Systems that a part measures, in this order."""
        if part in ("serve", "pulse"):
            return (*self.args.swept, *self.args.closed_systems)
        if part == "trained":
            return parse_systems(self.plan.trained)
        if part == "orders":
            return parse_systems(COMPARED)
        stock, reorder, ours = parse_systems((STOCK, REORDER, OURS))
        if part == "documents":
            return stock, reorder, ours
        if part == "shared":
            return stock, ours
        return stock, ours, ablated(ours, "no-room-kept" if part == "crowd" else "no-statistics")

    def _serve(self, fleet: Fleet) -> dict[str, Any]:
        """The main part: a generated trace or a user's log."""
        args, plan = self.args, self.plan
        about: dict[str, Any] = {"pool_len": fleet.pool_len, "load": dataclasses.asdict(plan.load)}
        if self._log is not None:
            prompts = self._log
            about["model"] = args.model.name
        else:
            spec = dataclasses.replace(plan.spec, seed=args.seed)
            prompts = traces.generated(spec, VOCAB, plan.output_len)
            about |= {"model": self._model_text(), "spec": dataclasses.asdict(spec)}
        bench = Bench(fleet, Tape(prompts), self.tick)
        arrivals = self._arrivals(prompts)
        if arrivals is not None:
            found: dict[str, Any] = {"replay": replay(bench, self._systems_of("serve"), arrivals, args.bound_s)}
        else:
            found = serve(
                bench,
                args.swept,
                args.closed_systems,
                plan.load,
                bound_s=args.bound_s,
                base_rate=args.base_rate,
                seed=args.seed,
            )
        return about | found | {"trace": describe_trace(prompts), "runs": bench.runs}

    def _documents(self, fleet: Fleet) -> dict[str, Any]:
        """Real text and a real retriever."""
        load = self.plan.load
        num = load.warmup + load.closed
        prompts = traces.documents(self._passages, num=num, output_len=self.plan.output_len, seed=self.args.seed)
        bench = Bench(fleet, Tape(prompts), self.tick)
        for system in self._systems_of("documents"):
            subject = bench.begin(system)
            subject.closed("documents, cold", load.warmup, load.clients)
            subject.closed("documents", load.closed, load.clients)
        return {
            "model": self._model_text(),
            "num_passages": len(self._passages),
            "trace": describe_trace(prompts),
            "runs": bench.runs,
        }

    def _crowd(self, fleet: Fleet) -> dict[str, Any]:
        """How much is still reused when running requests fill the KV pool."""
        plan = self.plan
        num = plan.load.warmup + plan.crowd_num
        spec = dataclasses.replace(plan.spec, name="crowd", num_requests=num, seed=self.args.seed)
        prompts = traces.generated(spec, VOCAB, plan.output_len)
        bench = Bench(fleet, Tape(prompts), self.tick)
        rows = crowd(bench, self._systems_of("crowd"), plan.load, plan.crowd_num, plan.crowd_clients)
        about = {"model": self._model_text(), "pool_len": fleet.pool_len, "clients": plan.crowd_clients}
        return about | {"trace": describe_trace(prompts), "rows": rows}

    def _fresh(self, fleet: Fleet) -> dict[str, Any]:
        """What the chunk cache costs when no chunk is ever repeated."""
        plan = self.plan
        num = (plan.fresh_blocks + 1) * plan.fresh_len
        spec = dataclasses.replace(plan.spec, name="fresh", num_requests=num, new_share=1.0, seed=self.args.seed)
        bench = Bench(fleet, Tape(traces.generated(spec, VOCAB, plan.output_len)), self.tick)
        rows = compare_fresh(bench, self._systems_of("fresh"), plan.fresh_blocks, plan.fresh_len, plan.load.clients)
        return {"rows": rows, "block_len": plan.fresh_len, "runs": bench.runs}

    def _shared(self, fleet: Fleet) -> dict[str, Any]:
        """SGLang's own tool with shared prefixes: SGLang's cache finds them, and the chunk cache must not cost any."""
        kinds = [system.kind for system in self._systems_of("shared")]
        found = compare_shared(fleet, fleet.model_dir, kinds, self.plan.shared, self.tick)
        return {"model": self._model_text(), "scale": dataclasses.asdict(self.plan.shared)} | found

    def _pulse(self, fleet: Fleet) -> dict[str, Any]:
        """Requests of a real RAG service."""
        plan, trace = self.plan, self._ragpulse
        assert trace is not None, "part pulse without its trace"
        num_closed, layouts = plan.load.warmup + plan.load.closed, []
        for number, behind in enumerate(plan.pulse.behind):
            prompts = traces.from_ragpulse(trace, VOCAB, behind, marks_all=plan.pulse.marks_all)
            bench = Bench(fleet, Tape(prompts), self.tick)
            times_s = [] if number else [one.time_s for one in trace.requests[num_closed:]]
            systems, scale = self._systems_of("pulse"), plan.pulse
            rows = pulse(bench, systems, plan.load, times_s, scale.rate, scale.warmup_output_len)
            layouts.append({"behind": behind, "trace": describe_trace(prompts), "rows": rows})
        return {
            "model": self._model_text(),
            "pool_len": fleet.pool_len,
            "load": dataclasses.asdict(plan.load),
            "scale": dataclasses.asdict(plan.pulse),
            "sha256": dict(trace.sha256),
            "layouts": layouts,
        }

    def _trained(self, fleet: Fleet) -> dict[str, Any]:
        """Quality and speed of the small trained model."""
        plan = self.plan
        prompts = traces.notes(traces.NotesSpec(plan.trained_warmup + plan.trained_num, seed=self.args.seed))
        bench = Bench(fleet, Tape(prompts), self.tick)
        rows = ask_trained(bench, self._systems_of("trained"), plan.trained_warmup, plan.trained_num, plan.load.clients)
        return {"model": TRAINED_DIR.name, "trace": describe_trace(prompts), "rows": rows}

    def _orders(self, fleet: Fleet) -> dict[str, Any]:
        """Whether throughput decays when every request has a new order."""
        plan = self.plan
        spec = dataclasses.replace(ORDERS_SPEC, num_requests=plan.orders_num, seed=self.args.seed)
        prompts = traces.generated(spec, len(WORDS), 1)
        bench = Bench(fleet, Tape(prompts), self.tick)
        rows = order_anew(bench, self._systems_of("orders"), plan.orders_num, plan.orders_block, plan.load.clients)
        return {"model": TRAINED_DIR.name, "trace": describe_trace(prompts), "rows": rows}

    def _model_text(self) -> str:
        return f"{self.plan.shape}, fp32, random weights"

    def _arrivals(self, prompts: Sequence[Prompt]) -> list[float] | None:
        """Arrival times: those of `--timestamps`, one per prompt, else the log's own; None without either."""
        if self._recorded is not None:
            return self._recorded[: len(prompts)]
        own = [prompt.arrival_s for prompt in prompts if prompt.arrival_s is not None]
        return [time / self.args.speed for time in own] if own else None


def _read_ragpulse(folder: Path, plan: Plan) -> RagPulse:
    """The requests of RAGPulse that a plan needs, scaled."""
    num = plan.load.warmup + plan.load.closed + plan.pulse.num_timed
    pulse = read_ragpulse(folder, num)
    if len(pulse.requests) < num:
        raise DataError(f"{folder}: {len(pulse.requests)} requests, this plan needs {num}; give a smaller --load.")
    return pulse.scaled(plan.pulse.share, plan.pulse.output_share)


def _recorded(timestamps: str, speed: float) -> list[float]:
    """Arrivals named on the command line as FILE:COLUMN:UNIT."""
    path, column, unit = timestamps.rsplit(":", 2)
    return recorded(path, column, unit, speed)


def _check_length(path: Path, num: int, load: Load) -> None:
    """Raises DataError if a log that is not replayed is too short for warm-up, closed loop and a few rates."""
    wanted = load.warmup + load.closed + load.point_num[0] * len(load.fractions)
    if num < wanted:
        raise DataError(f"{path}: {num} prompts, this plan needs {wanted} at least; give more, or timestamps.")


def _earlier(args: argparse.Namespace) -> dict[str, Any]:
    """With `--add`: the report of the earlier run that this one adds to."""
    path = args.out / f"{args.name}.json"
    if not args.add or not path.is_file():
        return {}
    try:
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"--add: {path} is no JSON ({error}); leave --add out, or give another --name.") from error
    if earlier["plan"] != args.plan.name:
        raise DataError(f"--add: {path} is of plan {earlier['plan']}; give another --name.")
    return earlier


def describe_trace(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Prompts, distinct chunks, chunks per prompt, and lengths: in characters for prompts of text, else in tokens."""
    chunks = [chunk for prompt in prompts for chunk in prompt.chunks]
    lengths = sorted(len(chunk.content) for chunk in chunks) or [0]  # a log may have prompts without passages only
    whole = [len(p.head) + sum(len(chunk.content) for chunk in p.chunks) + len(p.tail) for p in prompts]
    return {
        "unit": "characters" if isinstance(prompts[0].head, str) else "tokens",
        "num_prompts": len(prompts),
        "num_chunks": len({chunk.key for chunk in chunks}),
        "chunks_per_prompt": [min(len(p.chunks) for p in prompts), max(len(p.chunks) for p in prompts)],
        "chunk_len_p5_p50_p95": [lengths[int(q * (len(lengths) - 1))] for q in (0.05, 0.5, 0.95)],
        "mean_prompt_len": round(sum(whole) / len(whole)),
        "max_prompt_len": max(whole),
        "mean_output_len": round(sum(p.output_len for p in prompts) / len(prompts), 1),
    }


def main() -> int:
    args = parse_args()
    leave_on_sigterm()
    console = Console()
    began = time.monotonic()

    def tick(what: str) -> None:
        console.print(f"{time.monotonic() - began:6.0f} s  {what}", highlight=False, soft_wrap=True, markup=False)

    args.out.mkdir(parents=True, exist_ok=True)
    try:
        runner = Runner(args, tick)
        for _ in runner.run():
            # After each part, so that what was measured is kept when a later part fails.
            paths = write_result(args.out, args.name, runner.report, to_markdown(runner.report))
    except (ServerError, DataError, MeasurementError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    print(f"\nwritten: {', '.join(os.path.relpath(path) for path in paths)}")
    missed = [row for row in targets(runner.report) if not row["met"]]
    for row in missed:
        console.print(
            f"target {'missed' if row['met'] is False else 'not decided'}: {row['what']}: {row['value']}, "
            f"wanted {row['wanted']}",
            style="red",
            highlight=False,
        )
    return 1 if missed and args.strict else 0


if __name__ == "__main__":
    sys.exit(main())
