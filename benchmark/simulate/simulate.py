"""What the chunk cache does with a trace of requests: hit rates, recomputed share, storage. Real index, no model.

    python benchmark/simulate/simulate.py run --jsonl requests.jsonl --pool 200000 400000 --out DIR
    python benchmark/simulate/simulate.py run --trace sessions --set num_chunks=5000 zipf=0.9 --policies lru lfu
    python benchmark/simulate/simulate.py trace --trace zipf --set num_requests=100 --out requests.jsonl
    python benchmark/simulate/simulate.py ragpulse FOLDER                  # a real RAG service; the trace is not here
    python benchmark/simulate/simulate.py fleet --ragpulse FOLDER          # replicas, by policy of their gateway
    python benchmark/simulate/simulate.py crowd --set chunks_per_request=16   # many at once, by keep_share

`run` compares policies and memory sizes; `trace` writes a drawn trace as JSONL, which shows the format. Each writes
NAME.csv and NAME.md. More: docs/simulator.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.ragpulse import read_ragpulse
from benchmark.simulate.jsonl import read_jsonl, write_jsonl
from benchmark.simulate.pulse import trace_of_pulse
from benchmark.simulate.settings import REMEMBER, Settings, SettingsError
from benchmark.simulate.trace import PRESETS, Trace, TraceError, TraceSpec, generate, spec_fields

from chunk_cache.index.victims import AGEING
from chunk_cache_tools.jsonl import DataError

if TYPE_CHECKING:
    from benchmark.simulate.report import Report


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="simulate.py"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="compare policies and sizes on one trace")
    _add_trace_arguments(run)
    add = run.add_argument
    policies = ("lru", "lfu", "fifo", "frequency-reuse")
    add("--policies", nargs="+", default=policies, metavar="POLICY", help=f"default: {' '.join(policies)}")
    add("--ageing", type=float, default=AGEING, help="of frequency-reuse (default: %(default)g, as the server)")
    add("--pool", nargs="+", type=int, metavar="TOKENS", help="sizes of the KV memory")
    add(
        "--pool-share",
        nargs="+",
        type=float,
        metavar="SHARE",
        help="the same in copies of all chunks (default: 0.1 0.3)",
    )
    add("--seeds", nargs="+", type=int, default=[0], help="of a drawn trace and of the attention (default: 0)")
    defaults = {item.name: item.default for item in fields(Settings)}
    for name in ("max_variants", "max_variants_per_chunk", "max_path_tokens", "max_generation", "promote_uses"):
        flag = "--" + name.replace("_", "-")
        add(flag, type=int, default=defaults[name], help="as in --chunk-cache-config (default: %(default)s)")
    budget = run.add_mutually_exclusive_group()
    budget.add_argument("--alpha", type=float, default=1.0, help="budget by CFO (default: %(default)s)")
    budget.add_argument("--ratio", type=float, help="a fixed share of each reused chunk instead")
    add("--max-cfo", type=float, help="compute chunks with a higher CFO instead")
    add("--remember", choices=REMEMBER, default=REMEMBER[0], help="as in --chunk-cache-config (default: %(default)s)")
    add("--name", default="run", help="of the result files (default: run)")
    add("--out", type=Path, default=Path("."), help="folder of the result files (default: here)")

    pulse = commands.add_parser("ragpulse", help="stores, policies and systems on RAGPulse")
    pulse.add_argument("folder", type=Path, metavar="FOLDER", help="of RAGPulse: trace.jsonl and its files of lengths")
    pulse.add_argument("--requests", type=int, help="so many, the first ones (default: all)")
    pulse.add_argument(
        "--sizes", nargs="+", type=int, metavar="TOKENS", help="of the stores (default: 20000 to 400000)"
    )
    pulse.add_argument("--out", type=Path, help="folder (default: benchmark/results/simulate)")

    fleet = commands.add_parser("fleet", help="replicas behind a gateway, by its policy")
    _add_trace_arguments(fleet)
    fleet.add_argument("--replicas", nargs="+", type=int, metavar="N", help="default: 1 2 4 8")
    fleet.add_argument("--pool", type=int, default=100_000, metavar="TOKENS", help="of each replica (default: 100000)")
    fleet.add_argument("--out", type=Path, help="folder (default: benchmark/results/simulate)")

    crowd = commands.add_parser("crowd", help="many requests at once: what running ones cost, by keep_share")
    _add_trace_arguments(crowd)
    for name, kind, few in (
        ("pool", int, [128_000, 256_000, 512_000]),
        ("clients", int, [8, 16, 32]),
        ("rates", float, [2.0, 2.5, 3.0, 3.5, 4.0, 5.0]),
        ("keep-shares", float, [defaults["keep_share"], 0.0, 0.25, 0.5]),
        ("seeds", int, [0, 1, 2]),
    ):
        crowd.add_argument(f"--{name}", nargs="+", type=kind, default=few, help="default: %(default)s")
    crowd.add_argument("--out", type=Path, default=Path("."), help="folder (default: here)")

    trace = commands.add_parser("trace", help="write a drawn trace as JSONL")
    _add_trace_arguments(trace)
    trace.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


def _add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--trace", default="zipf", metavar="NAME", help=f"drawn: {', '.join(PRESETS)} (default: zipf)")
    source.add_argument("--ragpulse", type=Path, metavar="FOLDER", help="RAGPulse (benchmark/common/ragpulse.py)")
    source.add_argument("--jsonl", type=Path, metavar="FILE", help="yours (format: benchmark/simulate/jsonl.py)")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="NAME=VALUE", help=f"of a drawn trace: {', '.join(spec_fields())}"
    )
    parser.add_argument("--system-len", type=int, help="tokens of the system prompt (default: 64)")
    parser.add_argument("--chars-per-token", type=float, default=4.0, help="of texts in a JSONL file without a length")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = make_parser().parse_args(argv)
    try:
        if args.command != "trace" and args.out is not None:
            _check_folder(args.out)
        if args.command == "trace":
            write_jsonl(_TraceMaker(args)(0), args.out)
            print(f"written: {args.out}")
        elif args.command == "run":
            _run(args)
        elif args.command == "ragpulse":
            _run_ragpulse(args)
        elif args.command == "crowd":
            _run_crowd(args)
        else:
            _run_fleet(args)
    except (TraceError, SettingsError, DataError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _check_folder(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--out: cannot make {str(out)!r} ({error.strerror}); name another folder") from None


class _TraceMaker:
    """Returns the trace of a seed; a trace from a file is the same for all seeds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._file: Trace | None = None
        self._spec = TraceSpec()
        if (args.jsonl or args.ragpulse) and args.set:
            raise TraceError("--set: changes a drawn trace, not a file; leave it out")
        if args.ragpulse is not None:
            if args.system_len is not None:
                raise TraceError("--system-len: RAGPulse has its own system prompts; leave it out")
            self._file = trace_of_pulse(read_ragpulse(args.ragpulse))
            return
        if args.jsonl is not None:
            system_len = 64 if args.system_len is None else args.system_len
            if system_len < 0 or not args.chars_per_token > 0:
                raise TraceError("--system-len, --chars-per-token: must not be negative; give at least 0, above 0")
            self._file = read_jsonl(args.jsonl, system_len=system_len, chars_per_token=args.chars_per_token)
            return
        if args.trace not in PRESETS:
            raise TraceError(f"--trace: unknown trace {args.trace!r}; known: {', '.join(PRESETS)}")
        changes = dict(_parse_setting(item) for item in args.set)
        if args.system_len is not None:
            changes["system_len"] = args.system_len
        self._spec = replace(PRESETS[args.trace], **changes)  # type: ignore[arg-type]
        self._has_seed = "seed" in changes

    def __call__(self, seed: int) -> Trace:
        if self._file is not None:
            return self._file
        return generate(self._spec if self._has_seed else replace(self._spec, seed=seed))


def _parse_setting(item: str) -> tuple[str, object]:
    name, _, value = item.partition("=")
    kinds = spec_fields()
    if name not in kinds:
        raise TraceError(f"--set {item}: unknown name {name!r}; known: {', '.join(kinds)}")
    try:
        return name, kinds[name](value)
    except ValueError as error:
        raise TraceError(f"--set {item}: {value!r} is not of type {kinds[name].__name__}; give one") from error


def _run(args: argparse.Namespace) -> None:
    from benchmark.simulate.compare import POLICY_SETTINGS, compare_policies

    for policy in args.policies:
        if policy not in POLICY_SETTINGS:
            raise SettingsError(f"--policies: unknown policy {policy!r}; known: {', '.join(POLICY_SETTINGS)}")
    if args.pool and args.pool_share:
        raise SettingsError("--pool, --pool-share: two sizes of the KV memory; give one of them")
    make_trace = _TraceMaker(args)
    trace = make_trace(args.seeds[0])
    copy = max(1, trace.distinct_tokens)
    shares = [tokens / copy for tokens in args.pool] if args.pool else args.pool_share or [0.1, 0.3]
    for share in args.pool_share or ():
        if not 0 < share * copy < float("inf"):
            raise SettingsError(f"--pool-share: {share:g} is not a share above 0; give one, 0.1 for example")
    names = ("max_variants", "max_variants_per_chunk", "max_path_tokens", "max_generation", "promote_uses")
    base = Settings(
        max(1, round(min(shares) * copy)),
        **{name: getattr(args, name) for name in names},
        alpha=None if args.ratio is not None else args.alpha,
        ratio=0.15 if args.ratio is None else args.ratio,
        max_cfo=args.max_cfo,
        remember=args.remember,
        ageing=args.ageing,
    )
    if base.pool_tokens < trace.max_prompt_len:
        problem = f"{base.pool_tokens} tokens do not hold the longest prompt, which has {trace.max_prompt_len}"
        raise SettingsError(f"--pool: {problem}; give at least as many")
    intro = [
        f"Trace {trace.name}: {len(trace.requests):,} requests, {trace.num_chunks:,} chunks, of these",
        f"{len(trace.distinct):,} different with {trace.distinct_tokens:,} tokens. The first tenth of the requests is",
        "not counted.",
        *([] if not trace.source else ["", *trace.source]),
    ]
    origin = _origin()
    report = compare_policies(
        *(args.name, f"Policies on the trace {trace.name}", make_trace, base),
        seeds=args.seeds,
        pool_shares=shares,
        labels=args.policies,
        intro=intro,
    )
    print("\n".join(report.text))
    _write(report, args.out, origin)


def _run_ragpulse(args: argparse.Namespace) -> None:
    from benchmark.common.results import RESULTS_DIR
    from benchmark.simulate.pulse_report import SIZES, pulse_report

    if args.requests is not None and args.requests < 1:
        raise TraceError(f"--requests: {args.requests} is not at least 1; give such a number, or leave it out")
    origin = _origin()
    report = pulse_report(read_ragpulse(args.folder, args.requests), args.sizes or SIZES)
    print("\n".join([f"# {report.title}", "", *report.text]))
    _write(report, args.out or RESULTS_DIR / "simulate", origin)


def _run_fleet(args: argparse.Namespace) -> None:
    from benchmark.common.results import RESULTS_DIR
    from benchmark.simulate.fleet import NUMBERS, fleet_report

    if args.replicas and min(args.replicas) < 1:
        raise SettingsError(f"--replicas: {min(args.replicas)} is not at least 1; give such numbers")
    origin = _origin()
    report = fleet_report(_TraceMaker(args)(0), args.replicas or NUMBERS, args.pool)
    print("\n".join([f"# {report.title}", "", *report.text]))
    _write(report, args.out or RESULTS_DIR / "simulate", origin)


def _run_crowd(args: argparse.Namespace) -> None:
    from benchmark.simulate.crowd import Load, crowd_report

    for rate in args.rates:
        if not 0 < rate < float("inf"):
            raise SettingsError(f"--rates: {rate:g} is not a rate above 0; give requests a second")
    origin = _origin()
    loads = [*(Load(num_clients=number) for number in args.clients), *(Load(per_s=rate) for rate in args.rates)]
    chosen = {"pools": args.pool, "loads": loads, "shares": args.keep_shares, "seeds": args.seeds}
    _write(crowd_report(_TraceMaker(args), **chosen), args.out, origin)


def _origin() -> list[str]:
    """Lines that say how the numbers are made; called before the run, so that its load is not in the load average."""
    from benchmark.common.results import describe_run, run_markdown

    return run_markdown(describe_run())


def _write(report: Report, folder: Path, origin: Sequence[str]) -> None:
    from benchmark.simulate.report import write_report

    for path in write_report(report, folder, origin):
        print(f"written: {path}")


if __name__ == "__main__":
    sys.exit(main())
