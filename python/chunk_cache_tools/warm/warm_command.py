"""The command `chunk-cache warm`: `main`.

Promises: the command can be interrupted at any time, and then continues where it was; run again after it has finished,
it only asks whether the server is still the same; a dry run changes nothing.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chunk_cache.errors import request_error
from chunk_cache.options.warming_limits import DEFAULT_RETRIEVER, MAX_BATCH, MAX_ITEMS, MAX_NEIGHBOURS
from chunk_cache_tools.command_line import URL, CommandParser, add_json_flag, add_server_flags, exit_code, progress
from chunk_cache_tools.server_client import ServerGone, secret_digest, without_user
from chunk_cache_tools.warm import corpus_neighbours as neighbours
from chunk_cache_tools.warm.corpus import Corpus, Line, open_corpus
from chunk_cache_tools.warm.corpus_neighbours import Neighbourhood
from chunk_cache_tools.warm.estimate import Estimate, problem_of
from chunk_cache_tools.warm.warm_server import WarmServer
from chunk_cache_tools.warm.warm_state import WarmState, load

PROG = "chunk-cache warm"
LINES_PER_REQUEST = 256
GIVEN = "file"
"""Value of `--neighbours` if each line of the file names its own."""
MAX_WAIT_S = 10.0
NUM_SHOWN_FAILURES = 20


def main(argv: Sequence[str] | None = None) -> int:
    """Warms the corpus and prints a summary; returns the exit code."""
    args = _parser().parse_args(argv)
    return exit_code(PROG, lambda: _run(args), interrupted="interrupted; the same command goes on from here")


def _parser() -> CommandParser:
    parser = CommandParser(
        PROG,
        "Have a server compute the chunks of a corpus ahead of time.",
        examples=(
            f"corpus.jsonl --url {URL} --api-key KEY",
            "corpus.jsonl --field passage --system 'Answer from the passages.' --dry-run",
            "corpus.jsonl --neighbours 10",
        ),
        exit_codes={
            0: "all is stored",
            1: "a line failed, or the server stayed away",
            2: "the command is wrong",
        },
        page="docs/admin.md",
    )
    add = parser.add_argument
    add("corpus", type=Path, metavar="FILE.jsonl", help="one JSON object per line")
    add("--field", default="text", help="the field with the chunk (default: %(default)s)")
    add_server_flags(parser)
    add("--batch", type=int, default=8, metavar="NUM", help="chunks that are computed at a time (default: %(default)s)")
    add("--system", default=None, metavar="TEXT", help="system prompt of your chats; '' if they have none")
    add("--user", default=None, metavar="TEXT", help="how the user's message of your chats begins, if not by a passage")
    add("--prefix", default=None, metavar="TEXT", help="text in front of the passages of your prompts, if no chats")
    add("--extra-key", default=None, metavar="KEY", help="partition of the cache")
    add("--cache-salt", default=None, metavar="SALT", help="partition of the cache")
    add("--alone", action="store_true", help="compute each chunk behind nothing but the system prompt; costs answers")
    neighbours_help = f"compute each chunk behind so many similar ones; {GIVEN}: behind those that its line names"
    add("--neighbours", default=None, metavar=f"NUM|{GIVEN}", help=neighbours_help)
    retriever_help = "finds them: %(default)s, or the name or folder of a sentence-transformers model"
    add("--retriever", default=DEFAULT_RETRIEVER, metavar="NAME", help=f"{retriever_help} (default: %(default)s)")
    add("--dry-run", action="store_true", help="compute nothing, say what it would cost")
    add("--state", type=Path, default=None, metavar="FILE", help="progress (default: FILE.jsonl.warm-state)")
    add("--fresh", action="store_true", help="begin at the first line, whatever was done before")
    add_json_flag(parser)
    add("--retry-s", type=float, default=300.0, metavar="S", help="wait so long for the server (default: %(default)s)")
    return parser


def _run(args: argparse.Namespace) -> int:
    if not 1 <= args.batch <= MAX_BATCH:
        raise request_error(f"--batch {args.batch}", f"not from 1 to {MAX_BATCH}", "give another number")
    if not 0 <= args.retry_s < math.inf:
        raise request_error(f"--retry-s {args.retry_s}", "not a number of seconds", "give one from 0")
    try:
        corpus = open_corpus(args.corpus, args.field)
    except OSError as error:
        raise request_error(str(args.corpus), f"cannot be read ({error.strerror})", "name a file") from None
    neighbourhood = _neighbourhood(args, corpus)
    path = args.state or args.corpus.with_name(f"{args.corpus.name}.warm-state")
    try:
        with WarmServer(args.url, args.api_key) as server:
            task = Task(args, corpus, server, path, neighbourhood)
            if args.dry_run:
                estimate = task.estimate()
                _name_failures(args.corpus, estimate.failures.items(), estimate.num_failed)
                print(json.dumps(estimate.numbers) if args.json else estimate)
                return 1 if estimate.num_failed else 0
            state = task.run()
    except ServerGone as error:
        _note(f"--url {without_user(args.url)}: {error.problem}; start the server and run the command again")
        return 1
    _print_summary(args.corpus, corpus, state, as_json=args.json)
    return 1 if state.num_failed else 0


def _neighbourhood(args: argparse.Namespace, corpus: Corpus) -> Neighbourhood | None:
    if args.alone and args.neighbours is not None:
        raise request_error("--alone", "given beside --neighbours", "give one of them")
    if args.neighbours is None:
        if args.retriever != DEFAULT_RETRIEVER:
            raise request_error(f"--retriever {args.retriever}", "given without --neighbours", "give a number of them")
        return None
    if args.neighbours == GIVEN:
        found = neighbours.read(corpus)
    elif args.neighbours.isascii() and args.neighbours.isdigit() and 1 <= int(args.neighbours) <= MAX_NEIGHBOURS:
        found = neighbours.find(corpus, int(args.neighbours), args.retriever)
    else:
        problem = f"neither a number from 1 to {MAX_NEIGHBOURS} nor {GIVEN!r}"
        raise request_error(f"--neighbours {args.neighbours}", problem, "give one of them")
    for number, first in sorted(found.repeated.items())[:NUM_SHOWN_FAILURES]:
        _note(f"{args.corpus}:{number}: the same chunk as line {first}, which is prepared once")
    return found


def _front(args: argparse.Namespace) -> dict[str, Any]:
    """What stands in front of every chunk, as a field of a request."""
    texts = {"system": args.system, "user": args.user}
    asked = [role for role, text in texts.items() if text is not None]
    if not asked:
        return {"prefix_text": args.prefix}
    if args.prefix is not None:
        raise request_error(f"--{asked[0]}", "given beside --prefix", "give --prefix only where prompts are no chats")
    return {"messages": [{"role": role, "content": text} for role, text in texts.items() if text]}


class Task:
    """The work of one command."""

    def __init__(
        self,
        args: argparse.Namespace,
        corpus: Corpus,
        server: WarmServer,
        path: Path,
        neighbourhood: Neighbourhood | None,
    ) -> None:
        self._corpus = corpus
        self._neighbourhood = neighbourhood
        self._server = server
        self._path = path
        self._is_fresh: bool = args.fresh
        self._patience_s: float = args.retry_s
        self._deadline: float | None = None  # end of the wait for a server that is gone
        self._wait_s = 0.5
        partition = {"extra_key": args.extra_key, "cache_salt": args.cache_salt, **_front(args)}
        self._body = {name: value for name, value in partition.items() if value is not None} | {"batch": args.batch}
        if args.alone:
            self._body["alone"] = True
        asked = secret_digest((args.url, partition))
        self._task = {"alone": args.alone, "corpus": corpus.digest, "field": corpus.field, "asked": asked}
        self._lines_per_request = LINES_PER_REQUEST
        if neighbourhood is not None:
            self._task |= {"neighbours": args.neighbours, "retriever": args.retriever}
            most = max(map(len, neighbourhood.of.values()), default=0)
            self._lines_per_request = min(LINES_PER_REQUEST, MAX_ITEMS // (1 + most))

    def run(self) -> WarmState:
        """Warms the remaining lines; returns the state at the end.

        Raises:
            ChunkCacheRequestError: the server refuses, or the state file cannot be used.
            ServerGone: the server was gone for longer than `--retry-s`.
        """
        state: WarmState | None = None
        with progress(self._corpus.num_lines, "warming", "lines") as bar:
            while True:
                try:
                    state = self._begin(state)
                    bar.n = state.line
                    bar.refresh()
                    for block in self._blocks(state):
                        self._warm(block, state, bar)
                        self._deadline = None
                    if self._server.epoch() == state.epoch:
                        break  # otherwise it was restarted or flushed meanwhile
                except ServerGone as error:
                    self._wait(error)
        state.advance(self._corpus.num_lines, state.offset)
        bar.n = state.line
        self._save(state)
        return state

    def _begin(self, state: WarmState | None) -> WarmState:
        """The state to continue from: the current one, the saved one, or a new one."""
        epoch = self._server.epoch()
        if state is None and not self._is_fresh:
            state = self._load()
        if state is not None and state.epoch == epoch:
            return state
        if state is not None:
            _note("the server was restarted or flushed since; beginning again")
        return WarmState(self._task, epoch)

    def _load(self) -> WarmState | None:
        try:
            state = load(self._path)
        except OSError as error:
            problem = f"cannot be read ({error.strerror})"
            raise request_error(f"--state {self._path}", problem, "name another file") from None
        if state is None and self._path.exists():
            problem = "not a state of this command"
            raise request_error(f"--state {self._path}", problem, "remove it, or name another file")
        if state is not None and state.task != self._task:
            _note(f"{self._path} is of another corpus or of other options; beginning again")
            return None
        return state

    def _blocks(self, state: WarmState) -> Iterator[list[Line]]:
        block: list[Line] = []
        for line in self._corpus.lines(state.line, state.offset):
            block.append(line if self._neighbourhood is None else self._neighbourhood.check(line))
            if len(block) == self._lines_per_request:
                yield block
                block = []
        if block:
            yield block

    def _warm(self, block: list[Line], state: WarmState, bar: Any) -> None:
        """Warms some lines, saving the state after every line of progress."""
        good = [line for line in block if line.text is not None]
        bad = [line for line in block if line.text is None]
        done = before_stored = before_already = 0
        if good:
            for progress in self._server.warm({**self._body, **self._texts(good)[0]}):
                for failure in progress["failed"]:
                    state.fail(good[failure["index"]].number, problem_of(failure))
                done = progress["done"]
                last = good[done - 1] if done < len(good) else block[-1]
                stored, already = progress["stored"] - before_stored, progress["already"] - before_already
                before_stored, before_already = progress["stored"], progress["already"]
                self._advance(state, last, bad, bar, stored=stored, already=already)
        if bad:
            self._advance(state, block[-1], bad, bar)

    def _texts(self, lines: list[Line]) -> tuple[dict[str, Any], list[int]]:
        """Fields of the request that warms these good lines, and the line number of each of its texts."""
        if self._neighbourhood is not None:
            return self._neighbourhood.body(lines)
        return {"texts": [line.text for line in lines]}, [line.number for line in lines]

    def estimate(self) -> Estimate:
        """What warming the corpus would still cost, by dry runs of the server.

        Raises:
            ChunkCacheRequestError: the server refuses.
            ServerGone: the server does not answer.
        """
        estimate = Estimate(self._corpus.num_lines)
        for block in self._blocks(WarmState(self._task, "")):
            good = [line for line in block if line.text is not None]
            estimate.failures |= {line.number: str(line.problem) for line in block if line.text is None}
            if good:
                fields, numbers = self._texts(good)
                estimate.add(self._server.estimate({**self._body, **fields}), numbers)
        return estimate

    def _advance(
        self, state: WarmState, last: Line, bad: list[Line], bar: Any, *, stored: int = 0, already: int = 0
    ) -> None:
        while bad and bad[0].number <= last.number:
            line = bad.pop(0)
            state.fail(line.number, str(line.problem))
        state.advance(last.number, last.end, stored=stored, already=already)
        self._save(state)
        bar.update(last.number - bar.n)

    def _save(self, state: WarmState) -> None:
        try:
            state.save(self._path)
        except OSError as error:
            problem = f"cannot be written ({error.strerror})"
            raise request_error(f"--state {self._path}", problem, "name another") from None

    def _wait(self, error: ServerGone) -> None:
        now = time.monotonic()
        if self._deadline is None:
            self._deadline, self._wait_s = now + self._patience_s, 0.5
            _note(f"{error.problem}; trying again for {self._patience_s:g} s")
        if now >= self._deadline:
            raise error
        time.sleep(min(self._wait_s, max(0.0, self._deadline - now)))
        self._wait_s = min(2 * self._wait_s, MAX_WAIT_S)


def _note(sentence: str) -> None:
    tqdm.write(f"{PROG}: {sentence}", file=sys.stderr)


def _name_failures(path: Path, failures: Iterable[tuple[int, str]], num_failed: int) -> None:
    for number, problem in sorted(failures)[:NUM_SHOWN_FAILURES]:
        print(f"{path}:{number}: {problem}", file=sys.stderr)
    if num_failed > NUM_SHOWN_FAILURES:
        print(f"... and {num_failed - NUM_SHOWN_FAILURES} more that failed", file=sys.stderr)


def _print_summary(path: Path, corpus: Corpus, state: WarmState, *, as_json: bool) -> None:
    _name_failures(path, state.failures, state.num_failed)
    if as_json:
        counts = {"stored": state.num_stored, "already": state.num_already, "failed": state.num_failed}
        print(json.dumps({"lines": corpus.num_lines, **counts}))
        return
    print(
        f"{corpus.num_lines} lines: {state.num_stored} stored, {state.num_already} already there, "
        f"{state.num_failed} failed."
    )


if __name__ == "__main__":
    raise SystemExit(main())
