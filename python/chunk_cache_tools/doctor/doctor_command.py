"""The command `chunk-cache doctor`: `main`.

Promises: the command changes nothing, neither here nor on the server; what it writes to a tier is deleted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from chunk_cache.advice import Level
from chunk_cache.errors import request_error
from chunk_cache_tools.command_line import (
    URL,
    CommandParser,
    add_json_flag,
    add_server_flags,
    add_tokenizer_flag,
    exit_code,
    progress,
)
from chunk_cache_tools.doctor.checks import Check, as_json, print_checks, refused_check
from chunk_cache_tools.server_client import ServerGone, ServerRefused
from sglang_chunk_cache.flags.server_args import StartRefused, add_flags, from_flags

if TYPE_CHECKING:
    from chunk_cache_tools.doctor.server_checks import DoctorClient

PROG = "chunk-cache doctor"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the checks and prints them; returns the exit code."""
    args = _parser().parse_args(argv)
    return exit_code(PROG, lambda: _run(args))


def _run(args: argparse.Namespace) -> int:
    _check_arguments(args)
    checks = list(_machine(args) if args.url is None else _server(args))
    if args.json:
        print(as_json(checks))
    else:
        print_checks(checks)
    return int(any(check.level is Level.FAILURE for check in checks))


def _parser() -> CommandParser:
    parser = CommandParser(
        PROG,
        "Say what is wrong with this machine, or with a running server, and what to do about it.",
        examples=(
            "",
            """--chunk-cache-config '{"tiers": {"host_bytes": "1GB"}}'""",
            f"--url {URL} --watch 60",
            f"--url {URL} --prompt first.txt --prompt second.txt",
        ),
        exit_codes={0: "nothing fails", 1: "something fails, or the server does not answer", 2: "the command is wrong"},
        page="docs/doctor.md",
    )
    add_server_flags(parser, default=None)
    add = parser.add_argument
    add("--prompt", action="append", default=[], metavar="FILE", help="a prompt, or JSON lines of requests; the last "
        "request of all files is the one that reuses nothing of those before it")  # fmt: skip
    add_tokenizer_flag(parser)
    add("--watch", type=float, default=0.0, metavar="S", help="judge only the requests of the next S seconds")
    add_json_flag(parser)
    add_flags(parser)
    return parser


def _check_arguments(args: argparse.Namespace) -> None:
    if args.url is None and (args.prompt or args.watch):
        name = "--prompt" if args.prompt else "--watch"
        raise request_error(name, "given without --url", "name the server that the requests were sent to")
    given = [name for name, value in vars(args).items() if name.startswith("chunk_cache") and value]
    if args.url is not None and given:
        flag = f"--{given[0].replace('_', '-')}"
        raise request_error(flag, "given with --url, and a running server has its flags", "leave one of them out")
    if not 0 <= args.watch < float("inf"):
        raise request_error("--watch", "not a number of seconds", "give 0 or more")


def _machine(args: argparse.Namespace) -> Iterator[Check]:
    from chunk_cache_tools.doctor.machine_checks import has_torch, machine_checks

    yield from machine_checks()
    args.chunk_cache = True  # the other flags are checked even without --chunk-cache
    try:
        options = from_flags(args)
    except StartRefused as error:
        yield Check("options", Level.FAILURE, str(error.code), "change the option that the sentence names")
        return
    assert options is not None, "the chunk cache is on"
    words = f"{options.method} at {options.ratio}, separator {options.separator!r}"
    yield Check("options", Level.OK, f"{words}, {len(options.config)} keys in --chunk-cache-config")
    if has_torch():
        from chunk_cache_tools.doctor.tier_checks import try_tiers

        yield from try_tiers(options.parsed_config)
    elif options.parsed_config.tiers is not None:
        yield Check("tiers", Level.WARNING, "not tried, for torch is not installed", "look on the server's machine")


def _server(args: argparse.Namespace) -> Iterator[Check]:
    from chunk_cache_tools.doctor.server_checks import DoctorClient, server_checks

    try:
        with DoctorClient(args.url, args.api_key) as client:
            counts = client.chunk_counts()
            if args.watch and counts is not None:
                _wait(args.watch)
                counts = (client.chunk_counts() or counts) - counts
            checks = [*server_checks(client, counts), *_prompts(client, args)]
    except (ServerGone, ServerRefused) as error:
        checks = [refused_check("server", error)]
    yield from checks


def _wait(seconds: float) -> None:
    end = time.monotonic() + seconds
    with progress(seconds, "watching", "s", bar_format="{desc}: {percentage:3.0f}%|{bar}| {remaining} left") as bar:
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(1.0, left))
            bar.update(min(1.0, left))


def _prompts(client: DoctorClient, args: argparse.Namespace) -> Iterator[Check]:
    if not args.prompt:
        return
    from chunk_cache.index.need import Need
    from chunk_cache.prompt.marked_body import MarkFlags
    from chunk_cache_tools.doctor.comparison import compare
    from chunk_cache_tools.doctor.request_checks import read_requests
    from chunk_cache_tools.local_tokenizer import load_tokenizer

    config = client.stats["config"]
    tokenizer = load_tokenizer(args.tokenizer or client.tokenizer_path())
    flags = MarkFlags(config["separator"], config["marks"], config["parts"])
    requests = read_requests(args.prompt, tokenizer, flags)
    if not requests:
        raise request_error(f"--prompt {args.prompt[0]}", "holds no request", "give a prompt")
    is_trust_limited = config["trust"] == "warmed"
    is_system_fixed = is_trust_limited or config["system_prompts"] == "same"
    yield from compare(
        requests[:-1],
        requests[-1],
        client.stored,
        Need(config["max_generation"], is_system_fixed=is_system_fixed, is_trust_limited=is_trust_limited),
        min_reuse_len=config["min_reuse_len"],
        page_size=client.info.get("page_size") or 1,
        discovers="discover" in client.stats["ranks"][0],
    )


if __name__ == "__main__":
    raise SystemExit(main())
