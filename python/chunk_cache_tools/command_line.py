"""CommandLine: what the subcommands of `chunk-cache` have in common.

Verbs: `CommandParser` (a --help with examples and exit codes), `add_server_flags`, `add_tokenizer_flag` and
`add_json_flag` (the same name means the same everywhere), `exit_code` (runs a command; a user's mistake is one sentence
on the standard error), `progress` (a bar with the time left; where the output is no terminal, one line at the end).
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
"""Shorter work is not spoken of where the output is no terminal."""


class CommandParser(argparse.ArgumentParser):
    """The parser of a subcommand.

    Attributes:
        exit_codes: exit code -> when the command ends with it.
    """

    def __init__(
        self, prog: str, about: str, *, examples: Sequence[str], exit_codes: Mapping[int, str], page: str
    ) -> None:
        """
        Args:
            prog: `chunk-cache SUBCOMMAND`, whatever it was called by.
            about: what it does, as --help says it.
            examples: command lines without `prog`.
            page: of the documentation.
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
    """Adds `--url` and `--api-key`; the key is taken from the environment where it is not given."""
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
    """Adds `--json`; everything that is no JSON then goes to the standard error."""
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def exit_code(
    prog: str, run: Callable[[], int], *mistakes: type[Exception], where: str = "", interrupted: str = "interrupted"
) -> int:
    """The exit code of a command: its own, 2 where it ends with an error that a user can mend, 130 interrupted.

    Args:
        mistakes: further errors of one sentence.
        where: in front of the sentence where the server does not answer.
        interrupted: what is said then.
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
    """A bar on the standard error with the time left, to be told of progress by `update`.

    Args:
        total: in `unit`s.
        options: further ones of tqdm.
    """
    began = time.monotonic()
    options = {"desc": what, "unit": unit, "disable": None, "dynamic_ncols": True, "smoothing": 0.1, **options}
    with tqdm(total=total, **options) as bar:
        yield bar
        is_quiet = bar.disable
    if is_quiet and time.monotonic() - began >= NOTED_S:
        print(f"{what}: done in {time.monotonic() - began:.0f} s", file=sys.stderr)
