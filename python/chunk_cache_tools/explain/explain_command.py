"""The command `chunk-cache explain`: `main`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, request_error, show
from chunk_cache.methods import METHODS
from chunk_cache.options.defaults import DEFAULT_SEPARATOR
from chunk_cache.prompt.marks import MarkedText
from chunk_cache.types import Span
from chunk_cache_tools.command_line import (
    URL,
    CommandParser,
    add_json_flag,
    add_server_flags,
    add_tokenizer_flag,
    exit_code,
    progress,
)
from chunk_cache_tools.conditions import Condition
from chunk_cache_tools.explain import explain_page, replies
from chunk_cache_tools.explain.asked_conditions import asked_conditions, parse_options
from chunk_cache_tools.explain.explain_client import ExplainClient
from chunk_cache_tools.explain.shown_prompt import PromptTokens, read_prompt, tokenize
from chunk_cache_tools.explain.states import Explanation, differing
from chunk_cache_tools.explain.summary import print_tables, unranked
from chunk_cache_tools.local_tokenizer import load_tokenizer
from chunk_cache_tools.server_client import without_user

PROG = "chunk-cache explain"
PAGE = ".html"
ENDINGS = (".png", ".svg", PAGE)


def main(argv: Sequence[str] | None = None) -> int:
    """Asks the server, prints the table, writes the pictures; returns the exit code."""
    args = _parser().parse_args(argv)
    return exit_code(PROG, lambda: _run(args), where=f"--url {without_user(args.url)}: ")


def _parser() -> CommandParser:
    parser = CommandParser(
        PROG,
        "Show what became of every token of one prompt, under several methods.",
        examples=(
            f"--url {URL} --prompt prompt.txt --out explain.html",
            "--prompt prompt.txt --ratio 0.2 --methods epic epic:ratio=0.5 a3:check_layer=2",
            "--replies kept.jsonl --out explain.svg",
        ),
        exit_codes={0: "the pictures are written", 2: "the command is wrong, or the server does not answer"},
        page="docs/doctor.md#what-became-of-each-token",
    )
    add = parser.add_argument
    add_server_flags(parser)
    add("--prompt", metavar="FILE", help="a text with separators around its chunks; - reads the standard input")
    add(
        *("--methods", "--method", "-m"),
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"any of {', '.join(METHODS)} (default: all but those that need a selector)",
    )
    add("--ratio", type=float, help="recompute ratio, 0 to 1 (default: the server's)")
    add("--options", default="{}", metavar="JSON", help="options for all methods that know them")
    add(
        "--out",
        action="append",
        metavar="FILE",
        help="a picture: .png, .svg or .html; may be given several times (default: explain.png)",
    )
    add("--tokens", metavar="START:END", help="show only these positions of the prompt")
    add_tokenizer_flag(parser)
    add("--separator", default=DEFAULT_SEPARATOR, help="the server's --chunk-cache-separator (default: %(default)s)")
    add(
        "--prime",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="first have each chunk computed behind the text before the first one, in a partition of their own",
    )
    add("--extra-key", metavar="KEY", help="partition of the cache (default: a new one, or none with --no-prime)")
    add("--max-new-tokens", type=int, default=8, metavar="NUM", help="tokens of each answer (default: %(default)s)")
    add("--save", metavar="FILE.jsonl", help="keep the replies")
    add("--replies", metavar="FILE.jsonl", help="draw kept replies instead of asking a server")
    add_json_flag(parser)
    return parser


def _run(args: argparse.Namespace) -> int:
    outputs = [_output(path) for path in args.out or ["explain.png"]]
    if args.replies is not None:
        asking = {"--methods": args.methods, "--ratio": args.ratio, "--save": args.save, "--options": args.options}
        for flag, value in asking.items():
            if value not in (None, [], "{}"):
                raise request_error(flag, "is for asking a server, and --replies asks none", "leave one of them out")
    if any(path.suffix != PAGE for path in outputs) and importlib.util.find_spec("matplotlib") is None:
        remedy = f"run `pip install matplotlib`, or write a page by --out explain{PAGE}"
        raise request_error("matplotlib", "not installed", remedy)
    notes: list[str] = []
    if args.replies is not None:
        read_tokens = None if args.prompt is None or args.tokenizer is None else lambda: _local_tokens(args)
        tokens, explanations = replies.load(args.replies, read_tokens)
    else:
        tokens, explanations, notes = _ask(args)
    shown = _range(args.tokens, len(tokens.texts))
    if args.json:
        found = [{"label": one.label, "answer": one.answer, "chunk_cache": one.reply} for one in explanations]
        print(json.dumps(found, indent=2, ensure_ascii=False))
    else:
        print_tables(explanations)
    others = differing(explanations)
    if others:
        notes.append(
            f"{', '.join(others)} found other chunks in the store than {explanations[0].label}; to compare methods, "
            "prime the chunks and ask again"
        )
    notes += unranked(explanations)
    for path in outputs:
        notes += _write(path, tokens, explanations, shown)
    for note in notes:
        print(f"Note: {note}.", file=sys.stderr)
    print(f"Wrote {', '.join(map(str, outputs))}.", file=sys.stderr if args.json else sys.stdout)
    return 0


def _output(path: str) -> Path:
    target = Path(path)
    if target.suffix not in ENDINGS:
        problem = f"unknown ending {show(target.suffix)}"
        raise request_error(f"--out {path}", problem, f"known endings: {', '.join(ENDINGS)}")
    if not target.parent.is_dir():
        raise request_error(f"--out {path}", "no such folder", "make it, or name another")
    return target


def _local_tokens(args: argparse.Namespace) -> PromptTokens:
    marked = read_prompt(args.prompt, args.separator)
    return tokenize(load_tokenizer(args.tokenizer), marked)


def _ask(args: argparse.Namespace) -> tuple[PromptTokens, list[Explanation], list[str]]:
    """Asks the server; returns the prompt, one explanation per method, and notes."""
    if args.prompt is None:
        raise request_error("--prompt", "missing", "give a text file, or kept replies by --replies")
    if args.save is not None and not (Path(args.save).parent.is_dir() and not Path(args.save).is_dir()):
        raise request_error(f"--save {args.save}", "not a file in a folder that exists", "name another file")
    if args.max_new_tokens < 1:
        raise request_error("--max-new-tokens", "below 1", "give 1 or more")
    conditions = asked_conditions(args.methods, args.ratio, parse_options(args.options))
    marked = read_prompt(args.prompt, args.separator)
    # In a new partition the methods do not find KV that earlier requests left there.
    extra_key = uuid.uuid4().hex if args.prime and args.extra_key is None else args.extra_key
    with ExplainClient(args.url, args.api_key, args.separator, extra_key) as client:
        tokenizer = load_tokenizer(args.tokenizer or client.tokenizer_path())
        tokens = tokenize(tokenizer, marked)
        _range(args.tokens, len(tokens.texts))
        with progress(len(conditions), "asking", "methods") as bar:
            if args.prime:
                client.prime(marked)
            answers, notes = _ask_all(client, marked, conditions, args, bar)
    where = f"--url {without_user(args.url)}"
    explanations = [replies.explain_reply(label, reply, tokens, where) for label, reply in answers]
    if args.save is not None:
        _save(args.save, answers, tokens)
    return tokens, explanations, notes


def _ask_all(
    client: ExplainClient, marked: MarkedText, conditions: Sequence[Condition], args: argparse.Namespace, bar: Any
) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Labelled replies, and notes about refused methods; raises if the user named them, or if all are refused."""
    answers = []
    refused: list[str] = []
    for condition in conditions:
        try:
            answers.append((condition.label, client.explain(marked, condition, args.max_new_tokens)))
        except ChunkCacheRequestError as error:
            if args.methods:
                raise
            refused.append(f"{condition.label} is left out: {error}")
            last = error
        bar.update()
    if not answers:
        raise last
    return answers, refused


def _save(path: str, answers: Sequence[tuple[str, dict[str, Any]]], tokens: PromptTokens) -> None:
    try:
        replies.save(path, answers, tokens)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise request_error(f"--save {path}", problem, "name another file") from None


def _range(text: str | None, num_tokens: int) -> Span:
    """The positions of `--tokens`; either end may be left out."""
    if text is None:
        return 0, num_tokens
    start, colon, end = text.partition(":")
    try:
        shown = int(start or 0), min(int(end or num_tokens), num_tokens)
    except ValueError:
        shown = 0, 0
    if not colon or not 0 <= shown[0] < shown[1]:
        problem = f"{show(text)} is no range of the prompt of {num_tokens} tokens"
        raise request_error("--tokens", problem, "give START:END with START below END")
    return shown


def _write(path: Path, tokens: PromptTokens, explanations: Sequence[Explanation], shown: Span) -> list[str]:
    """Writes one picture; returns notes."""
    try:
        if path.suffix == PAGE:
            explain_page.write(path, tokens, explanations, shown)
            return []
        from chunk_cache_tools.explain import picture

        return picture.draw(path, tokens, explanations, shown)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise request_error(f"--out {path}", problem, "name another file") from None


if __name__ == "__main__":
    raise SystemExit(main())
