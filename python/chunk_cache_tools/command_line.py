"""CommandLine: what the subcommands of `chunk-cache` have in common.

Verbs: `CommandParser` (a --help with examples and exit codes), `add_server_flags`, `add_tokenizer_flag` and
`add_json_flag` (a flag means the same in every subcommand), `exit_code` (runs a command, and prints a user's mistake as
one sentence on standard error), `progress` (a bar with the time left; without a terminal, one line at the end).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache_tools.server_client import KEY_ENV, ServerGone

URL = "http://127.0.0.1:30000"
INTERRUPTED = 130
NOTED_S = 5.0
"""Without a terminal, work that takes less than this prints no line at its end."""


class CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand.

    Attributes:
        exit_codes: meaning of each exit code, for --help.
    """

    def __init__(
        self, prog: str, about: str, *, examples: Sequence[str], exit_codes: Mapping[int, str], page: str
    ) -> None:
        """
        Args:
            prog: `chunk-cache SUBCOMMAND`, however it was started.
            about: description in --help.
            examples: command lines without `prog`.
            page: page of the documentation.
        """
        self.exit_codes = {**exit_codes, INTERRUPTED: "interrupted"}
        shown = [f"  {prog} {example}".rstrip() for example in examples]
        codes = [f"  {code:<4} {meaning}" for code, meaning in self.exit_codes.items()]
        super().__init__(
            prog=prog,
            description=about,
            epilog="\n".join(["examples:", *shown, "", "exit codes:", *codes, "", f"documentation: {page}"]),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )


def add_server_flags(parser: argparse.ArgumentParser, default: str | None = URL) -> None:
    """Adds `--url` and `--api-key`; without the flag the key is read from the environment (`KEY_ENV`)."""
    add = parser.add_argument
    add("--url", default=default, help=f"address of a running server (default: {default or 'none'})")
    add("--api-key", default=os.environ.get(KEY_ENV), metavar="KEY", help=f"of the server (default: ${KEY_ENV})")


def add_tokenizer_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--tokenizer`, whose older name is `--model-path`."""
    parser.add_argument(
        *("--tokenizer", "--model-path"),
        metavar="DIR",
        help="folder of the model's tokenizer (default: the path that the server names)",
    )


def add_json_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--json`; with it a command prints everything else to standard error."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def exit_code(
    prog: str, run: Callable[[], int], *mistakes: type[Exception], where: str = "", interrupted: str = "interrupted"
) -> int:
    """Runs a command and returns its exit code; 2 after an error that the user can fix, 130 if interrupted.

    Args:
        mistakes: further exceptions that a user can fix; their message is one sentence.
        where: printed in front of the message if the server does not answer.
        interrupted: message after an interrupt.
    """
    try:
        return run()
    except ServerGone as error:
        print(f"{prog}: {where}{error}", file=sys.stderr)
    except (ChunkCacheRequestError, *mistakes) as error:  # type: ignore[misc]
        print(f"{prog}: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print(f"{prog}: {interrupted}", file=sys.stderr)
        return INTERRUPTED
    return 2


@contextmanager
def progress(total: float, what: str, unit: str, **options: Any) -> Iterator[Any]:
    """Shows a bar with the time left on standard error; call `update` on it.

    Args:
        total: amount of work, in `unit`s.
        options: further options of tqdm.
    """
    began = time.monotonic()
    options = {"desc": what, "unit": unit, "disable": None, "dynamic_ncols": True, "smoothing": 0.1, **options}
    with tqdm(total=total, **options) as bar:
        yield bar
        is_quiet = bar.disable
    if is_quiet and time.monotonic() - began >= NOTED_S:
        print(f"{what}: done in {time.monotonic() - began:.0f} s", file=sys.stderr)
