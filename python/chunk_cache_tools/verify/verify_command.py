"""The command `chunk-cache verify`: `main`."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import math
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from chunk_cache.errors import request_error
from chunk_cache.methods.method_options import ALPHA
from chunk_cache.options.defaults import DEFAULT_SEPARATOR
from chunk_cache.prompt.marked_body import MarkFlags
from chunk_cache_tools.command_line import (
    URL,
    CommandParser,
    add_json_flag,
    add_server_flags,
    add_tokenizer_flag,
    exit_code,
    progress,
)
from chunk_cache_tools.conditions import REFERENCE, Condition, MethodSpec, check_likelihood, grid, parse_method
from chunk_cache_tools.jsonl import read_jsonl
from chunk_cache_tools.local_tokenizer import Shape, load_shape, load_tokenizer
from chunk_cache_tools.own_server import OWN_FLAGS, OwnServer, ServerError, leave_on_sigterm, offline_env
from chunk_cache_tools.requirements import DISTRIBUTION, install_sglang
from chunk_cache_tools.server_client import ServerClient, secret_digest, without_user
from chunk_cache_tools.verify.fit import NUM_STEPS, TOLERATED, Check, check_fit, tolerance_of
from chunk_cache_tools.verify.measurement import measure
from chunk_cache_tools.verify.recommendation import MIN_PROMPTS, Outcome, judge, recommend
from chunk_cache_tools.verify.reply_log import ReplyLog, files_in, fingerprint
from chunk_cache_tools.verify.results import (
    Findings,
    as_json,
    check_lines,
    flags_of,
    rows_of_table,
    sentences,
    text_table,
    write_results,
)
from chunk_cache_tools.verify.session import ALONE, PREPARED, SHUFFLED, STORED, WARMED, Asking, Session, SetupError
from chunk_cache_tools.verify.token_prompt import TokenPrompt
from chunk_cache_tools.verify.workload import Workload, generate_prompts, pick, read_prompts

PROG = "chunk-cache verify"
METHODS = ("full-reuse", "near-words", "cacheblend", "fusionrag", "question-drift")
METHODS_WITH_STATES = ("seams",)  # at ratio 0 too: nothing but the seams is computed
RATIOS = (0.05, 0.15, 0.3, 0.5)
TARGET = 0.05
NUM_FIT = 8  # prompts that the implementation is checked with
PATIENCE_S = 1800.0  # large models load for long, and answer a call of many prompts late
ABOUT = """\
Say on a model and your own prompts which method and ratio can be trusted, or that none can.

Every prompt is computed in full by stock SGLang, and then with reused chunks under every method and ratio; what is
measured is how much less likely full prefill's own answer becomes. No right answers are needed. The same command goes
on where it was ended."""


def _parser() -> CommandParser:
    parser = CommandParser(
        PROG,
        ABOUT,
        examples=(
            "MODEL prompts.jsonl",
            "MODEL requests.log --num 300 -- --tp-size 2       # flags of launch_server",
            f"{URL} prompts.jsonl --target 0.02 --methods epic fusionrag",
            "MODEL                                             # only whether the implementation fits the model",
        ),
        exit_codes={
            0: "a recommendation (without prompts: the implementation fits)",
            1: "do not reuse here, too few prompts to decide, or the implementation does not fit",
            2: "the command is wrong, or a server failed",
        },
        page="docs/verify.md",
    )
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL_OR_URL", help="Hugging Face folder or name, or address of a running server")
    add("prompts", nargs="?", metavar="PROMPTS.jsonl", help="your prompts, or a log of requests")
    add_server_flags(parser, default=None)
    add("--target", type=float, default=TARGET, metavar="NATS", help="lost per token, at most (default: %(default)s)")
    default = f"default: {_words(METHODS)}; of a model with states {_words(METHODS_WITH_STATES)}"
    add("--methods", nargs="+", metavar="NAME[:OPTION=VALUE,...]", help=default)
    add("--ratios", nargs="+", type=float, default=RATIOS, metavar="R", help=f"default: {_words(RATIOS)}")
    add("--alphas", nargs="+", type=float, default=(), metavar="A", help="also cache-craft by these alphas")
    add(
        "--stored",
        choices=STORED,
        help=f"how chunks are computed first. {WARMED}: behind filler, as `warm` does; {PREPARED}: behind similar "
        f"chunks; {ALONE}: behind the system prompt; {SHUFFLED}: by an earlier prompt that has them in another order "
        f"(default: {WARMED}, with --alphas {SHUFFLED})",
    )
    add("--num", type=int, default=100, help="prompts, at most, spread over the file (default: %(default)s)")
    add("--max-new-tokens", type=int, default=32, metavar="NUM", help="of full prefill's answer (default: %(default)s)")
    add("--chat", action="store_true", help="put lines with chunks and a question through the model's chat template")
    add("--separator", default=DEFAULT_SEPARATOR, metavar="TEXT", help="in the prompts (default: %(default)s)")
    add_tokenizer_flag(parser)
    add_json_flag(parser)
    add("--tolerance", type=float, help="of log-probabilities at ratio 1.0 (default: by number format)")
    add("--out", type=Path, default=Path("chunk-cache-verify"), metavar="DIR", help="default: %(default)s")
    add("--fresh", action="store_true", help="forget the replies that an earlier run has left in --out")
    return parser


def parse_args(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options of this command, and the flags of the server behind `--`."""
    parser, given = _parser(), list(argv)
    cut = given.index("--") if "--" in given else len(given)
    args, flags = parser.parse_args(given[:cut]), given[cut + 1 :]
    if args.url is not None:  # the first argument is then the prompts
        if args.prompts is not None:
            parser.error(
                f"--url {without_user(args.url)}: {without_user(args.model)} is named too; leave one of them out"
            )
        args.model, args.prompts = args.url, args.model
    if args.model is None:
        parser.error("the following arguments are required: MODEL_OR_URL")
    args.is_url = args.model.startswith(("http://", "https://"))
    args.stored = args.stored or (SHUFFLED if args.alphas else WARMED)
    for problem in _problems(args, flags):
        parser.error(problem)
    return args, flags


def _problems(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[str]:
    """Yields what is wrong with the values of options."""
    for name in ("num", "max_new_tokens"):
        if getattr(args, name) < 1:
            yield f"--{name.replace('_', '-')}: at least 1"
    if not 0 < args.target < math.inf:
        yield f"--target: {args.target:g} is not above 0; 0.05 is the default"
    if args.tolerance is not None and not 0 < args.tolerance < math.inf:
        yield f"--tolerance: {args.tolerance:g} is not above 0 and finite; leave it out to have it by number format"
    yield from (f"--ratios: {ratio:g} is not in [0, 1]" for ratio in args.ratios if not 0 <= ratio <= 1)
    bad_alphas = [alpha for alpha in args.alphas if not 0 < alpha <= ALPHA.maximum]
    yield from (f"--alphas: {alpha:g} is not above 0 and at most {ALPHA.maximum:g}" for alpha in bad_alphas)
    if args.is_url and flags:
        yield f"-- {flags[0]}: a running server has its flags; leave them out, or name the model"
    own = [flag for flag in flags if flag.partition("=")[0] in OWN_FLAGS]
    yield from (f"-- {flag}: this command sets it itself; leave it out" for flag in own)


def conditions_of(args: argparse.Namespace, default: Sequence[str] = METHODS) -> list[Condition]:
    """The conditions to ask. With full-reuse, ratio 0 is left out for other methods, as all do the same at ratio 0."""
    specs = [parse_method(text) for text in args.methods or default]
    check_likelihood(specs)
    craft = [MethodSpec("cache-craft", ((ALPHA.name, float(alpha)),)) for alpha in sorted(set(args.alphas))]
    ratios = sorted(set(args.ratios))
    found = grid([*specs, *craft], ratios)
    if any(c.method == MethodSpec("full-reuse") for c in found):
        found = [c for c in found if c.ratio != 0 or c.method == MethodSpec("full-reuse")]
    return found


@dataclass(frozen=True)
class Model:
    """The model that is verified, the version of SGLang that computes it, and its tokenizer on this machine."""

    path: str
    name: str
    sglang: str
    shape: Shape
    tokenizer: Any


def load_model(path: str, name: str, sglang: str) -> Model:
    """Loads the tokenizer and the shape of a model.

    Raises:
        ChunkCacheRequestError: they are not there.
    """
    return Model(path, name, sglang, load_shape(path, "MODEL"), load_tokenizer(path))


@contextmanager
def reached(args: argparse.Namespace, flags: Sequence[str]) -> Iterator[ServerClient]:
    """The server at the URL; without a URL, a server that is started here.

    Raises:
        ServerError, ChunkCacheRequestError, ServerGone: there is no server, or it does not start.
    """
    if args.is_url:
        with ServerClient(args.model, args.api_key, PATIENCE_S) as client:
            yield client
        return
    print("starting a server; its log: " + str(args.out / "server.log"), file=sys.stderr)
    env = offline_env() if Path(args.model).is_dir() else {}
    patience = {"start_deadline_s": PATIENCE_S, "request_timeout_s": PATIENCE_S}
    log_path = args.out / "server.log"
    with OwnServer(args.model, "--chunk-cache", *flags, env=env, log_path=log_path, **patience) as server:
        yield server.client


def all_flags(given: Sequence[str]) -> tuple[str, ...]:
    """Flags of a server that is started here; on a CPU it computes in fp32, unless the user names a dtype."""
    import torch

    keep = torch.cuda.is_available() or any(flag.partition("=")[0] == "--dtype" for flag in given)
    return (*(() if keep else ("--dtype", "float32")), *given)


def run(args: argparse.Namespace, given: Sequence[str]) -> int:
    """Runs the whole command; returns the exit code."""
    if not args.is_url and importlib.util.find_spec("sglang") is None:
        remedy = f"run `{install_sglang()}`, or name the URL of a running server"
        raise request_error("MODEL", "SGLang is not installed here, so no server can be started", remedy)
    flags = () if args.is_url else all_flags(given)
    conditions = conditions_of(args)
    if args.prompts is not None:
        list(read_jsonl(args.prompts))  # reports a broken file before the slow imports
    model = _model_of_server(args) if args.is_url else _model_here(args)
    if model.shape.has_states:
        if any(c.method == MethodSpec("full-reuse") for c in conditions) and args.methods:
            remedy = "name seams, which is asked at ratio 0 too"
            raise request_error("--methods", "full-reuse of a model with states is seams at ratio 0", remedy)
        args.ratios = (0.0, *args.ratios)
        conditions = conditions_of(args, METHODS_WITH_STATES)
    workload = None
    if args.prompts is not None:
        # Marks of clients count here even if the server ignores them as yet.
        marks = MarkFlags(args.separator, marks=True, parts="--chunk-cache-parts" in flags)
        workload = read_prompts(args.prompts, model.tokenizer, marks, chat=args.chat)
    prompts = [] if workload is None else pick(workload.prompts, args.num)
    told = sys.stderr if args.json else sys.stdout
    for line in _told(workload, prompts, conditions):
        print(line, file=told)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        problem = f"cannot make {str(args.out)!r} ({error.strerror})"
        raise request_error("--out", problem, "name another folder") from None
    asking = Asking(args.max_new_tokens, likelihood=True, first_only=True, tolerated=TOLERATED)
    settings = {
        "model": secret_digest(model.name),
        "server flags": secret_digest([*flags, *files_in(flags)]),
        "versions": [model.sglang, importlib.metadata.version(DISTRIBUTION)],
        "--max-new-tokens": args.max_new_tokens,
        "--stored": args.stored,
    }
    log_path = args.out / "replies.jsonl"
    with ReplyLog(log_path, settings, resume=not args.fresh, anew="add --fresh, or name another --out") as log:
        asked = [(p, c) for c in (REFERENCE, *conditions) for p in prompts if log.find(p.key, c) is None]
        checks: Sequence[Check] = []
        if 0 < len(prompts) < MIN_PROMPTS:
            print(_too_few(len(prompts), len(asked)), file=told, flush=True)
        if asked or not prompts:
            salt = uuid.uuid4().hex[:8]  # a running server serves others too, so its caches are not flushed
            with reached(args, flags) as client:
                began = time.monotonic()
                checks, checked = _check(args, client, model, prompts, salt)
                print("\n".join(check_lines(checks)), file=told, flush=True)
                if asked:
                    speed = (time.monotonic() - began) / (NUM_STEPS * sum(len(prompt.ids) for prompt in checked))
                    print(f"{len(asked)} replies to ask: {_minutes(asked, speed)}", file=told, flush=True)
                if prompts and all(check.holds is not False for check in checks):
                    _ask(Session(client, asking, args.stored, salt if args.is_url else ""), prompts, conditions, log)
        if any(check.holds is False for check in checks):
            _say_fit(args, checks, "Do not use this model: the implementation does not fit it; please report it.")
            return 1
        if not prompts:
            _say_fit(args, checks, "The implementation fits the model. Give prompts to learn which method to use.")
            return 0
        return _report(args, model, prompts, conditions, log, checks)


def _check(
    args: argparse.Namespace, client: ServerClient, model: Model, prompts: Sequence[TokenPrompt], salt: str
) -> tuple[Sequence[Check], Sequence[TokenPrompt]]:
    """The checks, and the prompts that they used."""
    own = [prompt for prompt in prompts if len(prompt.spans) > 1][:NUM_FIT]
    tolerance = tolerance_of(client) if args.tolerance is None else args.tolerance
    used = own or generate_prompts(NUM_FIT, len(model.tokenizer))
    with progress(NUM_STEPS, "checking the implementation", "steps") as bar:
        return check_fit(client, used, salt, tolerance, bar.update), used


def _say_fit(args: argparse.Namespace, checks: Sequence[Check], sentence: str) -> None:
    print(json.dumps({"sentences": [sentence], "checks": [asdict(one) for one in checks]}) if args.json else sentence)


def _too_few(num: int, num_replies: int) -> str:
    return (
        f"{num} prompts are too few for a recommendation, which takes {MIN_PROMPTS}: the {num_replies} replies that "
        "are still to be asked will only show where it leads"
    )


def _minutes(asked: Sequence[tuple[TokenPrompt, Condition]], token_s: float) -> str:
    """How long these replies will take, at `token_s` seconds per token of a prompt."""
    # Each reply takes one prefill for the first token, and one for the likelihood of each answer.
    seconds = token_s * sum((2 + bool(prompt.gold)) * len(prompt.ids) for prompt, _ in asked)
    return f"about {seconds / 60:.0f} minutes" if seconds >= 90 else f"about {seconds:.0f} seconds"


def _ask(session: Session, prompts: Sequence[TokenPrompt], conditions: Sequence[Condition], log: ReplyLog) -> None:
    """Asks for the replies that the log lacks, references first."""
    references = [prompt for prompt in prompts if log.find(prompt.key, REFERENCE) is None]
    missing = [(p, c) for c in conditions for p in prompts if log.find(p.key, c) is None]
    with progress(len(references) + len(missing), "full prefill", "replies") as bar:
        for replies in session.ask_reference(references) if references else ():
            log.append(replies)
            bar.update(len(replies))
        known = {p.key: reply for p in prompts if (reply := log.find(p.key, REFERENCE)) is not None}
        bar.set_description("reuse")
        for block in session.blocks(prompts, {key: reply.prompt_len for key, reply in known.items()}):
            asks = [(p, c) for c in conditions for p in block if log.find(p.key, c) is None]
            if asks:
                session.prime(block)
                for replies in session.ask(asks, known):
                    log.append(replies)
                    bar.update(len(replies))


def _report(
    args: argparse.Namespace,
    model: Model,
    prompts: Sequence[TokenPrompt],
    conditions: Sequence[Condition],
    log: ReplyLog,
    checks: Sequence[Check],
) -> int:
    measured = [measure(condition, prompts, log, model.shape.num_layers) for condition in conditions]
    judged = judge(measured, args.target)
    verdict = recommend(judged, args.target)
    name = "a running server" if args.is_url else Path(args.model).name
    about = {
        "model": f"{name} ({model.shape.num_layers} layers)",
        "prompts": f"{len(prompts)} of {Path(args.prompts).name}, {_mean_len(prompts):.0f} tokens on average",
        "chunks stored": args.stored,
        "target": f"{args.target:g} nats per token of full prefill's own answer",
        "answers": f"of at most {args.max_new_tokens} tokens",
    }
    findings = Findings(about, checks, args.target, judged, verdict)
    if args.json:
        print(json.dumps(as_json(findings, args.out), indent=2))
    else:
        print("\n" + "\n".join([*text_table(*rows_of_table(findings)), "", *sentences(findings)]))
        if verdict.chosen is not None:
            print(f"Serve with: {flags_of(verdict.chosen.measured.condition, args.out)}")
    written = write_results(args.out, findings)
    if importlib.util.find_spec("matplotlib") is None:
        print("No plot: matplotlib is not installed; run `pip install matplotlib`.", file=sys.stderr)
    else:
        from chunk_cache_tools.verify.plot import draw

        plot = args.out / "verify.png"
        draw(plot, findings)
        written.append(plot)
    print("written: " + ", ".join(map(str, written)), file=sys.stderr if args.json else sys.stdout)
    return 0 if verdict.outcome is Outcome.REUSE else 1


def _told(workload: Workload | None, prompts: Sequence[TokenPrompt], conditions: Sequence[Condition]) -> Iterator[str]:
    if workload is None:
        yield "No prompts are given: only whether the implementation fits the model is checked."
        return
    yield f"{len(prompts)} of {len(workload.prompts)} prompts under {len(conditions)} conditions and in full"
    yield from (f"passed over: {num} prompts {why}" for why, num in workload.passed_over.items())
    yield from (f"not used: {num} passages or marks ({why})" for why, num in workload.unused.items())


def _model_here(args: argparse.Namespace) -> Model:
    return load_model(args.tokenizer or args.model, fingerprint(args.model), importlib.metadata.version("sglang"))


def _model_of_server(args: argparse.Namespace) -> Model:
    """Its name says address and path, and what a server that is started there anew may compute differently."""
    with ServerClient(args.model, args.api_key) as client:
        path = args.tokenizer or client.tokenizer_path()
        model, server = client.ask("GET", "/model_info"), client.ask("GET", "/server_info", has=("page_size",))
    how = f"{server.get('dtype')} {server.get('kv_cache_dtype')} {model.get('weight_version')}"
    return load_model(path, f"{args.model} {path} {how}", str(server.get("version")))


def _mean_len(prompts: Sequence[TokenPrompt]) -> float:
    return sum(len(prompt.ids) for prompt in prompts) / len(prompts)


def _words(values: Sequence[object]) -> str:
    return " ".join(map(str, values))


def main(argv: Sequence[str] | None = None) -> int:
    args, flags = parse_args(sys.argv[1:] if argv is None else argv)
    leave_on_sigterm()
    interrupted = "interrupted; the same command goes on from here"
    return exit_code(PROG, lambda: run(args, flags), SetupError, ServerError, interrupted=interrupted)


if __name__ == "__main__":
    sys.exit(main())
