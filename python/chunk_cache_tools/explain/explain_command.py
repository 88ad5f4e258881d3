"""The command `chunk-cache explain`: `main`.

Promise: a user's mistake is one sentence on the standard error, and exit code 2.
"""

from __future__ import annotations

import argparse
import importlib.util
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
from chunk_cache_tools.explain import replies
from chunk_cache_tools.explain.ask import ExplainClient
from chunk_cache_tools.explain.shown_prompt import PromptTokens, load_tokenizer, read_prompt, tokenize
from chunk_cache_tools.explain.specs import MethodSpec, make_specs, parse_options
from chunk_cache_tools.explain.states import Explanation, differing
from chunk_cache_tools.explain.summary import print_tables, unranked
from chunk_cache_tools.server_client import ServerGone, add_server_flags

PROG = "chunk-cache explain"
EXTRA_PACKAGES = ("matplotlib", "rich")
ENDINGS = (".png", ".svg", ".html")


def main(argv: Sequence[str] | None = None) -> int:
    """Asks, prints the table, writes the pictures; returns the exit code."""
    args = _parser().parse_args(argv)
    try:
        _run(args)
    except ChunkCacheRequestError as error:
        print(f"{PROG}: {error}", file=sys.stderr)
        return 2
    except ServerGone as error:
        print(f"{PROG}: --url {args.url}: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROG,
        description="Show what became of every token of one prompt, under several methods.",
        epilog="docs/explain.md",
    )
    add = parser.add_argument
    add_server_flags(parser)
    add("--prompt", metavar="FILE", help="a text with separators around its chunks; - reads the standard input")
    add(
        *("--method", "-m"),
        action="append",
        default=[],
        metavar="NAME[:OPTION=VALUE,...]",
        help=f"may be given several times; {', '.join(METHODS)} (default: all but those that need a selector)",
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
    add("--model-path", metavar="DIR", help="where the tokenizer is (default: where the server has it from)")
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
    add("--json", metavar="FILE.jsonl", help="draw kept replies instead of asking a server")
    return parser


def _run(args: argparse.Namespace) -> None:
    _need_packages()
    from rich.console import Console

    outputs = [_output(path) for path in args.out or ["explain.png"]]
    notes: list[str] = []
    if args.json is not None:
        read_tokens = None if args.prompt is None or args.model_path is None else lambda: _local_tokens(args)
        tokens, explanations = replies.load(args.json, read_tokens)
    else:
        tokens, explanations, notes = _ask(args)
    shown = _range(args.tokens, len(tokens.texts))
    print_tables(explanations, Console())
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
    print(f"Wrote {', '.join(map(str, outputs))}.")


def _need_packages() -> None:
    missing = [name for name in EXTRA_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise request_error(", ".join(missing), "not installed", 'run `pip install "sglang-chunk-cache[bench]"`')


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
    return tokenize(load_tokenizer(args.model_path), marked)


def _ask(args: argparse.Namespace) -> tuple[PromptTokens, list[Explanation], list[str]]:
    """Prompt, one explanation per method, and notes."""
    if args.prompt is None:
        raise request_error("--prompt", "missing", "give a text file, or kept replies by --json")
    if args.max_new_tokens < 1:
        raise request_error("--max-new-tokens", "below 1", "give 1 or more")
    specs = make_specs(args.method, args.ratio, parse_options(args.options))
    marked = read_prompt(args.prompt, args.separator)
    # What earlier requests left behind would give the methods a prompt that is known already.
    extra_key = uuid.uuid4().hex if args.prime and args.extra_key is None else args.extra_key
    with ExplainClient(args.url, args.api_key, args.separator, extra_key) as client:
        tokenizer = load_tokenizer(args.model_path or client.tokenizer_path())
        tokens = tokenize(tokenizer, marked)
        if args.prime:
            client.prime(marked)
        answers, notes = _ask_all(client, marked, specs, args)
    explanations = [replies.explain_reply(label, reply, tokens, f"--url {args.url}") for label, reply in answers]
    if args.save is not None:
        _save(args.save, answers, tokens)
    return tokens, explanations, notes


def _ask_all(
    client: ExplainClient, marked: MarkedText, specs: Sequence[MethodSpec], args: argparse.Namespace
) -> tuple[list[tuple[str, dict[str, Any]]], list[str]]:
    """Labelled replies. A method that the user did not name may be refused, and is then only noted."""
    answers = []
    refused: list[str] = []
    for spec in specs:
        try:
            answers.append((spec.label, client.explain(marked, spec, args.max_new_tokens)))
        except ChunkCacheRequestError as error:
            if args.method:
                raise
            refused.append(f"{spec.label} is left out: {error}")
            last = error
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
    from chunk_cache_tools.explain import explain_page as page
    from chunk_cache_tools.explain import picture

    try:
        if path.suffix == ".html":
            page.write(path, tokens, explanations, shown)
            return []
        return picture.draw(path, tokens, explanations, shown)
    except OSError as error:
        problem = f"cannot be written ({error.strerror})"
        raise request_error(f"--out {path}", problem, "name another file") from None


if __name__ == "__main__":
    raise SystemExit(main())
