"""The command `chunk-cache doctor`: `main`.

    chunk-cache doctor                                          this machine
    chunk-cache doctor --chunk-cache-config @FILE               and these options of a server
    chunk-cache doctor --url http://127.0.0.1:30000             a running server
    chunk-cache doctor --url ... --prompt A.txt --prompt B.txt  why B reuses nothing of A

Promises: nothing is changed, neither here nor on the server; what is written to a tier is deleted. Exit codes: 0
nothing fails, 1 something does, 2 a mistake in the command.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from chunk_cache.advice import Level
from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache_tools.doctor.checks import Check, as_json, print_checks, refused_check
from chunk_cache_tools.server_client import ServerGone, ServerRefused, add_server_flags
from sglang_chunk_cache.flags.server_args import StartRefused, add_flags, from_flags

if TYPE_CHECKING:
    from chunk_cache_tools.doctor.server_checks import DoctorClient

PROG = "chunk-cache doctor"


def main(argv: Sequence[str] | None = None) -> int:
    """Looks, prints what was found; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        _check_arguments(args)
        checks = list(_machine(args) if args.url is None else _server(args))
    except ChunkCacheRequestError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(as_json(checks))
    else:
        print_checks(checks)
    return int(any(check.level is Level.FAILURE for check in checks))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Say what is wrong with this machine, or with a running server, and what to do about it.",
        epilog="docs/doctor.md",
    )
    add_server_flags(parser)
    parser.set_defaults(url=None)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="FILE", help="a prompt, or JSON lines of requests; the last "
        "request of all files is the one that reuses nothing of those before it")  # fmt: skip
    add("--model-path", metavar="DIR", help="where the tokenizer is (default: where the server has it from)")
    add("--watch", type=float, default=0.0, metavar="S", help="judge only the requests of the next S seconds")
    add("--json", action="store_true", help="print the checks as JSON")
    add_flags(parser)
    return parser


def _check_arguments(args: argparse.Namespace) -> None:
    if args.url is None and (args.prompt or args.watch):
        name = "--prompt" if args.prompt else "--watch"
        raise request_error(name, "given without --url", "name the server that the requests were sent to")
    if not 0 <= args.watch < float("inf"):
        raise request_error("--watch", "not a number of seconds", "give 0 or more")


def _machine(args: argparse.Namespace) -> Iterator[Check]:
    from chunk_cache_tools.doctor.machine_checks import machine_checks
    from chunk_cache_tools.doctor.tier_checks import try_tiers

    yield from machine_checks()
    args.chunk_cache = True  # whether or not it was given with the flags that need it
    try:
        options = from_flags(args)
    except StartRefused as error:
        yield Check("options", Level.FAILURE, str(error.code), "change the option that the sentence names")
        return
    assert options is not None, "the chunk cache is on"
    words = f"{options.method} at {options.ratio}, separator {options.separator!r}"
    yield Check("options", Level.OK, f"{words}, {len(options.config)} keys in --chunk-cache-config")
    yield from try_tiers(options.parsed_config)


def _server(args: argparse.Namespace) -> Iterator[Check]:
    from chunk_cache_tools.doctor.server_checks import DoctorClient, server_checks

    try:
        with DoctorClient(args.url, args.api_key) as client:
            counts = client.chunk_counts()
            if args.watch and counts is not None:
                time.sleep(args.watch)
                counts = (client.chunk_counts() or counts) - counts
            checks = [*server_checks(client, counts), *_prompts(client, args)]
    except (ServerGone, ServerRefused) as error:
        checks = [refused_check("server", error)]
    yield from checks


def _prompts(client: DoctorClient, args: argparse.Namespace) -> Iterator[Check]:
    if not args.prompt:
        return
    from chunk_cache_tools.doctor.compare import compare
    from chunk_cache_tools.doctor.request_checks import read_requests
    from chunk_cache_tools.explain.shown_prompt import load_tokenizer

    config = client.stats["config"]
    tokenizer = load_tokenizer(args.model_path or client.info["tokenizer_path"] or client.info["model_path"])
    requests = read_requests(args.prompt, tokenizer, config["separator"])
    if not requests:
        raise request_error(f"--prompt {args.prompt[0]}", "holds no request", "give a prompt")
    yield from compare(
        requests[:-1],
        requests[-1],
        client.stored,
        min_reuse_len=config["min_reuse_len"],
        page_size=client.info.get("page_size") or 1,
    )


if __name__ == "__main__":
    raise SystemExit(main())
