"""Fine-tunes an auxiliary model to the attention of the main one (CacheClip section 3.5).

`--data` has one object per line: {"system": "...", "chunks": ["...", ...], "question": "..."}; other keys are ignored.
The folder that is written is a value for --chunk-cache-selector.

Loss: KL(main || auxiliary). Each is a distribution over all chunk tokens of a prompt: the attention of the question in
the last layer, as a mean over its tokens and the heads. The main model reads the whole prompt; the auxiliary one reads
[S, chunk, question] for each chunk, as when it serves. Where the paper gives no detail: all weights are trained (AdamW,
cosine, warm-up of a tenth, gradients clipped at 1); the main model's mass goes to the auxiliary tokens by characters.
The gain is measured on held-out questions: KL, and Jaccard index of the best 20 % of tokens (figure 2).
"""

from __future__ import annotations

import argparse
import logging
import math
import random
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from chunk_cache.errors import given, is_unicode
from chunk_cache.prompt.marked_body import BLANK
from chunk_cache.prompt.marks import is_blank
from chunk_cache_tools.command_line import CommandParser, exit_code, progress
from chunk_cache_tools.jsonl import read_jsonl
from chunk_cache_tools.verify.recommendation import Floats, bounds_of
from sglang_chunk_cache.selector.alignment import Tokens, tokens_of
from sglang_chunk_cache.selector.auxiliary import AuxiliaryModel, SelectorModelError

TOP_SHARE = 0.2
EPSILON = 1e-9


PROG = "chunk-cache train-selector"


class TrainError(ValueError):
    """An input cannot be used; the message names the flag and the remedy."""


@dataclass(frozen=True)
class Prompt:
    """One line of the data."""

    system: str
    chunks: tuple[str, ...]
    question: str


@dataclass(frozen=True)
class Example:
    """A prompt as the auxiliary model sees it, and what the main model attends to in it.

    Attributes:
        rows: for each chunk the ids of [S, chunk, question], and the range of the chunk in them.
        num_question: number of tokens of the question, at the end of each row.
        target: `[tokens of all chunks]` attention of the main model, sums to 1.
    """

    rows: tuple[tuple[list[int], tuple[int, int]], ...]
    num_question: int
    target: torch.Tensor


@dataclass(frozen=True)
class Score:
    """How close predictions are to their targets: `kl` and `jaccard` are `[questions]`."""

    kl: Floats
    jaccard: Floats

    def __str__(self) -> str:
        return f"KL {self.kl.mean():.4f}, Jaccard of the best {TOP_SHARE:.0%} {self.jaccard.mean():.3f}"

    def gain_over(self, before: Score) -> str:
        """The means of what was gained question by question, each with its 95 % interval."""
        kl, jaccard = _mean_with_bounds(before.kl - self.kl), _mean_with_bounds(self.jaccard - before.jaccard)
        return f"KL {kl} nats, Jaccard {jaccard}"


def _mean_with_bounds(gains: Floats) -> str:
    low, high = bounds_of(gains, 0.025)
    return f"{gains.mean():+.4f} [{low:.4f}, {high:.4f}]"


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a JSONL file.

    Raises:
        DataError: the file cannot be read, or a line is no object.
        TrainError: a line is no prompt, or there are fewer than two.
    """
    prompts = [_prompt(given(value), where) for where, value in read_jsonl(path)]
    if len(prompts) < 2:
        raise TrainError(f"--data: {path} has {len(prompts)} prompts; give at least two, one of them is held out")
    return prompts


def _prompt(value: Mapping[str, Any], where: str) -> Prompt:
    system, chunks, question = value.get("system", ""), value.get("chunks"), value.get("question")
    if not isinstance(system, str):
        raise TrainError(f"{where}: system: not a text; give one, or leave it out")
    if not isinstance(chunks, list) or not all(isinstance(c, str) for c in chunks) or all(map(is_blank, chunks)):
        raise TrainError(f"{where}: chunks: not a list of texts; give at least one")
    if not isinstance(question, str) or not question.strip():
        raise TrainError(f"{where}: question: not a text; give one")
    if not all(map(is_unicode, (system, *chunks, question))):
        raise TrainError(f"{where}: half of a surrogate pair, which is no character; cut texts between characters")
    for i in (i for i, chunk in enumerate(chunks) if is_blank(chunk)):
        print(f"{PROG}: {where}: chunks[{i}] is not used ({BLANK})", file=sys.stderr)
    return Prompt(system, tuple(chunk for chunk in chunks if not is_blank(chunk)), question)


def make_examples(prompts: Iterable[Prompt], main: AuxiliaryModel, auxiliary: AuxiliaryModel) -> Iterator[Example]:
    """The training example of each prompt; prompts that are too long for either model are left out."""
    for prompt in prompts:
        example = _example(prompt, main, auxiliary)
        if example is not None:
            yield example


def _example(prompt: Prompt, main: AuxiliaryModel, auxiliary: AuxiliaryModel) -> Example | None:
    ids = main.sink_of(prompt.system)
    first = len(ids)
    encoded = [main.tokenizer(c, add_special_tokens=False, return_offsets_mapping=True) for c in prompt.chunks]
    ids = ids + [one for chunk in encoded for one in chunk["input_ids"]]
    columns, question = (first, len(ids)), main.tokenizer(prompt.question, add_special_tokens=False)["input_ids"]
    if not question or len(ids) + len(question) > main.max_len:
        return None
    with torch.no_grad():
        weights = main.attend_within(ids + question, columns, len(question)).cpu().numpy()
    targets, rows, at = [], [], 0
    sink = auxiliary.sink_of(prompt.system)
    own_question = auxiliary.tokenizer(prompt.question, add_special_tokens=False)["input_ids"]
    for text, chunk in zip(prompt.chunks, encoded, strict=True):
        length = len(chunk["input_ids"])
        own = auxiliary.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        source, target = tokens_of(text, chunk["offset_mapping"]), tokens_of(text, own["offset_mapping"])
        targets.append(share_by_overlap(weights[at : at + length], source, target))
        end = len(sink) + len(target)
        rows.append(([*sink, *own["input_ids"], *own_question], (len(sink), end)))
        if end + len(own_question) > auxiliary.max_len:
            return None
        at += length
    joined = np.concatenate(targets)
    return Example(tuple(rows), len(own_question), torch.from_numpy(joined / max(joined.sum(), EPSILON)))


def share_by_overlap(values: npt.NDArray[np.float32], source: Tokens, target: Tokens) -> npt.NDArray[np.float32]:
    """Moves values from source tokens to target tokens: a token's value is split evenly over its characters, and each
    target token gets the sum over its own.

    The sum of all values is kept, except for characters that are in no target token.

    Args:
        values: `[len(source)]`.

    Returns:
        `[len(target)]`.
    """
    num = int(max(source.ends.max(initial=0), target.ends.max(initial=0)))
    lens = source.ends - source.starts
    owner = np.repeat(np.arange(len(source)), lens)
    at = np.arange(len(owner)) - np.repeat(np.cumsum(lens) - lens, lens) + source.starts[owner]
    per_char = np.bincount(at, weights=(values / lens)[owner], minlength=num)
    taken = np.bincount(_chars(target), minlength=num).clip(min=1)
    cumulated = np.concatenate([[0.0], np.cumsum(per_char / taken)])
    return (cumulated[target.ends] - cumulated[target.starts]).astype(np.float32)


def _chars(tokens: Tokens) -> npt.NDArray[np.int64]:
    """The positions of all characters of all tokens, `[sum of lengths]`."""
    lens = tokens.ends - tokens.starts
    return np.arange(lens.sum()) - np.repeat(np.cumsum(lens) - lens, lens) + np.repeat(tokens.starts, lens)


def predict(auxiliary: AuxiliaryModel, example: Example) -> torch.Tensor:
    """Prediction of the auxiliary model, `[tokens of all chunks]`, sums to 1; has a gradient if torch records one."""
    parts = [auxiliary.attend_within(ids, columns, example.num_question) for ids, columns in example.rows]
    scores = torch.cat(parts)
    return scores / scores.sum().clamp(min=EPSILON)


def kl_divergence(target: torch.Tensor, predicted: torch.Tensor) -> torch.Tensor:
    """KL(target || predicted), in nats."""
    target = target.to(predicted.device)
    ratio = (target + EPSILON).log() - (predicted + EPSILON).log()
    return (target * ratio).sum()


def compare(target: torch.Tensor, predicted: torch.Tensor) -> tuple[float, float]:
    """KL and Jaccard index of `predicted` to `target`, both distributions over the tokens."""
    num = max(1, math.ceil(TOP_SHARE * len(target)))
    mine, theirs = (set(values.topk(num).indices.tolist()) for values in (predicted, target))
    return float(kl_divergence(target, predicted)), len(mine & theirs) / len(mine | theirs)


def measure(auxiliary: AuxiliaryModel, examples: Sequence[Example]) -> Score:
    """How close the auxiliary model is to the main one, question by question."""
    scores = []
    with torch.no_grad(), progress(len(examples), "measuring", "questions") as bar:
        for example in examples:
            scores.append(compare(example.target, predict(auxiliary, example).cpu()))
            bar.update()
    kl, jaccard = np.array(scores).T
    return Score(kl, jaccard)


def fine_tune(
    auxiliary: AuxiliaryModel,
    examples: Sequence[Example],
    *,
    steps: int,
    batch: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Trains the weights of `auxiliary` in place.

    Args:
        batch: prompts per step.
    """
    rng = random.Random(seed)
    model = auxiliary.model
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    warm_up = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / warm_up, 0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps))),
    )
    with progress(steps, "training", "steps") as bar:
        for _ in range(steps):
            total = 0.0
            for example in (rng.choice(examples) for _ in range(batch)):
                loss = kl_divergence(example.target, predict(auxiliary, example)) / batch
                loss.backward()
                total += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            bar.set_postfix(kl=f"{total:.3f}", refresh=False)
            bar.update()


def save(auxiliary: AuxiliaryModel, path: str, out: Path) -> None:
    """Writes the whole causal model, with the new weights of its body, and its tokenizer."""
    whole = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    whole.base_model.load_state_dict(auxiliary.model.state_dict())
    whole.to(torch.bfloat16).save_pretrained(out)
    auxiliary.tokenizer.save_pretrained(out)


def load(path: str, flag: str, device: str) -> AuxiliaryModel:
    """Loads one of the two models.

    Raises:
        TrainError: the model cannot be used.
    """
    try:
        return AuxiliaryModel.load(path, device=device)
    except SelectorModelError as error:
        raise TrainError(f"{flag}: {error}; name a causal language model with a fast tokenizer") from error


def train(args: argparse.Namespace) -> tuple[Score, Score]:
    """Runs the whole training; returns the scores on held-out questions before and after.

    Raises:
        TrainError: an input cannot be used.
    """
    prompts = read_prompts(args.data)
    random.Random(args.seed).shuffle(prompts)
    main, auxiliary = load(args.model, "--model", args.device), load(args.selector, "--selector", args.device)
    examples: list[Example] = []
    with progress(len(prompts), "reading by the main model", "prompts") as bar:
        for prompt in prompts:
            examples += make_examples([prompt], main, auxiliary)
            bar.update()
    del main
    num_held_out = max(1, round(args.held_out * len(examples)))
    if len(examples) <= num_held_out:
        raise TrainError(f"--data: {len(examples)} prompts fit into both models; give more, or shorter ones")
    held_out, examples = examples[:num_held_out], examples[num_held_out:]
    before = measure(auxiliary, held_out)
    fine_tune(auxiliary, examples, steps=args.steps, batch=args.batch, learning_rate=args.learning_rate, seed=args.seed)
    after = measure(auxiliary, held_out)
    try:
        save(auxiliary, args.selector, args.out)
    except OSError as error:
        raise TrainError(f"--out: {args.out} cannot be written ({error.strerror}); nothing is kept") from None
    print(f"trained on {len(examples)} questions, {args.steps} steps; on {num_held_out} others:")
    print(f"before: {before}")
    print(f"after:  {after}")
    print(f"gain:   {after.gain_over(before)}; written: {args.out}")
    return before, after


def _parser() -> CommandParser:
    parser = CommandParser(
        PROG,
        "Fine-tune the small model of the method cacheclip to the attention of the main model.",
        examples=(
            "--model MAIN --selector SMALL --data questions.jsonl --out DIR",
            "--model MAIN --selector SMALL --data questions.jsonl --out DIR --steps 1000 --device cuda",
        ),
        exit_codes={0: "the trained model is written", 2: "the command, the data or a model is wrong"},
        page="docs/methods.md",
    )
    add = parser.add_argument
    add("--model", required=True, metavar="DIR", help="the main model: Hugging Face folder or name")
    add("--selector", required=True, metavar="DIR", help="the auxiliary model to start from")
    add("--data", required=True, type=Path, metavar="FILE", help="JSON lines with system, chunks, question")
    add("--out", required=True, type=Path, metavar="DIR", help="where the trained model goes")
    add("--steps", type=int, default=200, metavar="N", help="of the optimizer (default: %(default)s)")
    add("--batch", type=int, default=4, metavar="N", help="prompts per step (default: %(default)s)")
    add("--learning-rate", type=float, default=2e-5, metavar="RATE", help="largest (default: %(default)s)")
    add("--held-out", type=float, default=0.2, metavar="SHARE", help="of the questions (default: %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="of what is drawn (default: %(default)s)")
    add("--device", default="cpu", help="of torch (default: %(default)s)")
    return parser


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses and checks the command line."""
    parser = _parser()
    args = parser.parse_args(argv)
    for name in ("steps", "batch"):
        if getattr(args, name) < 1:
            parser.error(f"--{name}: {getattr(args, name)}; give at least 1")
    if not 0 < args.held_out < 1:
        parser.error(f"--held-out: {args.held_out:g} is not between 0 and 1; give such a share")
    if not 0 < args.learning_rate < 1:
        parser.error(f"--learning-rate: {args.learning_rate:g} is not between 0 and 1; give such a rate")
    if args.out.exists() and (not args.out.is_dir() or any(args.out.iterdir())):
        parser.error(f"--out: {args.out} is there already; name a new folder")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out: {args.out} cannot be made ({error.strerror}); name another folder")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as error:
        parser.error(f"--device: {args.device!r} cannot be used ({str(error).splitlines()[0]}); give cpu, or cuda")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    args: Any = parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()

    def run() -> int:
        train(args)
        return 0

    return exit_code(PROG, run, TrainError)
