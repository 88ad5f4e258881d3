"""Verifies a model against itself before you trust it with reused chunks.

    python -m sglang_chunk_cache.verify --model-path DIR [--prompts FILE.jsonl] [flags of launch_server]

Starts an engine with the chunk cache, computes prompts in full and with reuse, prints a table and a verdict. The method
and ratio that are judged are those of --chunk-cache-method and --chunk-cache-ratio; all flags of the server work.
Exit code 0: all checks hold; 1: one does not; 2: the call is wrong.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError
from sglang_chunk_cache.server_args import ChunkCacheArgs, StartRefused, attached
from sglang_chunk_cache.verify.measure import MeasureError, verify_model
from sglang_chunk_cache.verify.verdict import Thresholds, judge, table
from sglang_chunk_cache.verify.workload import Case, generate_cases, read_cases

TOLERANCE_FP32 = 1e-3
TOLERANCE_16_BIT = 0.25  # other kernels round differently; the deviation of layer 0 is the sharper check there


def parse_args(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the flags that are the server's."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang_chunk_cache.verify",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--model-path", required=True, help="as for launch_server")
    parser.add_argument("--prompts", help='JSONL with "system", "chunks", "question"; default: random token ids')
    parser.add_argument("--num", type=int, default=16, help="prompts (default: 16)")
    parser.add_argument("--chunk-len", type=int, default=96, help="mean tokens of a generated chunk (default: 96)")
    parser.add_argument("--seed", type=int, default=0, help="of generated prompts (default: 0)")
    parser.add_argument("--tolerance", type=float, help="log-probabilities at ratio 1.0 (default: by number format)")
    parser.add_argument("--min-top1", type=float, default=0.8, help="default: 0.8")
    parser.add_argument("--max-kl", type=float, default=0.5, help="nats (default: 0.5)")
    args, server_flags = parser.parse_known_args(argv)
    if args.num < 1 or args.chunk_len < 2:
        parser.error("--num must be at least 1 and --chunk-len at least 2")
    return args, server_flags


def start_engine(model_path: str, server_flags: list[str]) -> tuple[Any, ChunkCacheArgs]:
    """An engine as `launch_server --chunk-cache` would start it."""
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    parser = argparse.ArgumentParser(prog="python -m sglang_chunk_cache.verify", allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    flags = ["--model-path", model_path, "--chunk-cache", "--log-level", "error", *server_flags]
    server_args = ServerArgs.from_cli_args(parser.parse_args(flags))
    chunk_cache_args = attached(server_args)
    assert chunk_cache_args is not None, "--chunk-cache was given"
    return Engine(server_args=server_args), chunk_cache_args


def make_cases(args: argparse.Namespace, engine: Any, separator: str) -> list[Case]:
    if args.prompts:
        return read_cases(args.prompts, separator, args.num)
    vocab_size = engine.tokenizer_manager.model_config.vocab_size
    return generate_cases(args.num, vocab_size, chunk_len=args.chunk_len, seed=args.seed)


def main(argv: list[str] | None = None) -> int:
    args, server_flags = parse_args(sys.argv[1:] if argv is None else argv)
    if args.prompts:
        try:
            read_cases(args.prompts, "\0", 1)  # before the minute that an engine takes to start
        except ChunkCacheRequestError as error:
            print(error, file=sys.stderr)
            return 2
    try:
        engine, options = start_engine(args.model_path, server_flags)
    except StartRefused as refused:
        print(refused, file=sys.stderr)
        return 2  # nothing was checked; 1 is for checks that do not hold
    try:
        cases = make_cases(args, engine, options.separator)
        findings = verify_model(engine, cases)
        is_fp32 = "float32" in str(engine.tokenizer_manager.model_config.dtype)
    except (ChunkCacheRequestError, MeasureError) as error:
        print(error, file=sys.stderr)
        return 2
    finally:
        engine.shutdown()
    default = TOLERANCE_FP32 if is_fp32 else TOLERANCE_16_BIT
    tolerance = default if args.tolerance is None else args.tolerance
    source = args.prompts or "random token ids, which say little about quality; give --prompts"
    print(f"{args.model_path}: {len(cases)} prompts ({source}), first token against a full prefill\n")
    print("\n".join(table(findings, f"{options.method}, ratio {options.ratio:g}")))
    checks = judge(findings, Thresholds(tolerance, args.min_top1, args.max_kl))
    print()
    for check in checks:
        print(f"{'ok  ' if check.holds else 'FAIL'}  {check.statement}: {check.numbers}")
    return 0 if all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
