"""Deviation: does Cache-Craft's CFO foresee how far a chunk's KV is off that was computed in an earlier prompt?

    python benchmark/quality/deviation.py MODEL --data hotpotqa.jsonl [--num N] [--out DIR]

The counterpart of Cache-Craft's figure 13, for chunks stored by a prompt that met them, in plain torch on transformers.
A question's passages, some left out and as many of another question in their place, stand in an earlier prompt in a
drawn order; then they are reused in the question's own. A chunk's deviation at a layer is the squared distance of its K
(turned to its new place) and V from those of the full prefill, over their squared size. Statistics are those of the
earlier prompt, means over all layers and heads. Results: OUT/deviation.*.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.stats import spearmanr
from transformers import AutoModelForCausalLM, AutoTokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, named, run_markdown, write_result
from benchmark.quality.question import read_questions
from benchmark.quality.table import interval

from chunk_cache.index.reusability import adjusted_overlap, context_impact, fix_overhead, order_penalty, prefix_overlap

CHECK_LAYER = 1


def cfo(chunk: Mapping[str, float]) -> float:
    return fix_overhead(1.0, chunk["cci"], chunk["adjusted"])


PREDICTORS: dict[str, Callable[[Mapping[str, float]], float]] = {
    "CFO = CCI (1 - beta')": cfo,
    "1 - beta'": lambda chunk: 1 - chunk["adjusted"],
    "1 - beta (order left out)": lambda chunk: 1 - chunk["beta"],
    "CCI": lambda chunk: chunk["cci"],
    "share of the earlier context that is gone, by tokens": lambda chunk: chunk["gone"],
    "shift of the position, tokens": lambda chunk: abs(chunk["shift"]),
    "fewer tokens in front, earlier prompt": lambda chunk: -chunk["start"],
}


class Prefill(NamedTuple):
    """A full prefill: `k`, `v` `[layers, heads, tokens, dim]`, `mass` `[tokens, tokens]`, where each chunk lies."""

    k: torch.Tensor
    v: torch.Tensor
    mass: torch.Tensor
    spans: dict[str, slice]


@torch.no_grad()
def prefill(model: Any, head: list[int], chunks: dict[str, list[int]]) -> Prefill:
    ids, spans = list(head), {}
    for name, tokens in chunks.items():
        spans[name] = slice(len(ids), len(ids) + len(tokens))
        ids += tokens
    out = model(torch.tensor([ids]), output_attentions=True, use_cache=True)
    mass = sum(layer[0].mean(0) for layer in out.attentions) / len(out.attentions)
    kv = [(layer.keys[0], layer.values[0]) for layer in out.past_key_values.layers]
    return Prefill(torch.stack([k for k, _ in kv]), torch.stack([v for _, v in kv]), mass, spans)


def turned(model: Any, k: torch.Tensor, by: int) -> torch.Tensor:
    """Keys moved by so many positions."""
    dim = k.shape[-1]
    inv_freq = model.model.rotary_emb.inv_freq
    angle = torch.cat((inv_freq, inv_freq)).double() * by
    rotated = torch.cat((-k[..., dim // 2 :], k[..., : dim // 2]), -1)
    return (k * angle.cos() + rotated * angle.sin()).to(k.dtype)


def compare(model: Any, before: Prefill, now: Prefill) -> list[dict[str, float]]:
    """Of each chunk that is in both prompts and not at the beginning of both: deviation and what foretells it."""
    names, new_names = list(before.spans), list(now.spans)
    found = []
    for place, name in enumerate(names):
        if name not in now.spans or not place:
            continue
        old, new = before.spans[name], now.spans[name]
        context = names[:place]
        inter = np.array([float(before.mass[old, before.spans[one]].sum()) for one in context])
        lens = [before.spans[one].stop - before.spans[one].start for one in context]
        length = old.stop - old.start
        intra = float(before.mass[old, old].tril(-1).sum())
        new_context = new_names[: new_names.index(name)]
        beta = prefix_overlap(context, inter, new_context)
        k, v = now.k[:, :, new], now.v[:, :, new]
        off = (turned(model, before.k[:, :, old], new.start - old.start) - k).square().sum((1, 3))
        off += (before.v[:, :, old] - v).square().sum((1, 3))
        share = off.sum(1) / (k.square() + v.square()).sum((1, 2, 3))
        common = sum(size for one, size in zip(context, lens, strict=True) if one in new_context)
        found.append(
            {
                "check": float(share[CHECK_LAYER]),
                "all": float(share[1:].mean()),
                "cci": context_impact(inter, lens, intra, length),
                "beta": beta,
                "adjusted": adjusted_overlap(beta, order_penalty(context, new_context)),
                "gone": 1 - common / sum(lens),
                "shift": new.start - old.start,
                "start": old.start,
            }
        )
    return found


def questions_of(paths: Sequence[Path], num: int, encode: Any) -> list[tuple[list[int], dict[str, list[int]]]]:
    """The head and the chunks of the last `num` questions of each file, in tokens."""
    found = []
    for path in paths:
        for question in read_questions(path)[-num:]:
            chunks = {text: encode(text + "\n") for text in question.chunks}
            found.append((encode(question.system + "\n"), chunks))
    return found


def earlier(
    number: int, questions: Sequence[tuple[list[int], dict[str, list[int]]]], kept: float
) -> dict[str, list[int]]:
    """Chunks of the earlier prompt: `kept` of the question's own and as many others of the next one, drawn order."""
    draw = random.Random(number)
    own, other = (list(questions[i % len(questions)][1].items()) for i in (number, number + 1))
    num_own = max(2, round(kept * len(own)))
    chosen = draw.sample(own, num_own) + draw.sample(other, min(len(other), len(own) - num_own))
    draw.shuffle(chosen)
    return dict(chosen)


def summary(found: Sequence[Sequence[dict[str, float]]]) -> list[list[str]]:
    """Rank correlations within a question, mean over the questions [95 % interval]."""
    rows = []
    for name, predict in PREDICTORS.items():
        cells = []
        for what in ("check", "all"):
            each = [
                float(spearmanr([predict(one) for one in chunks], [one[what] for one in chunks]).statistic)
                for chunks in found
            ]
            known = np.array([value for value in each if value == value])
            low, high = interval(known)
            cells.append(f"{known.mean():.2f} [{low:.2f}, {high:.2f}]")
        rows.append([name, *cells])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="Hugging Face folder of Llama's shape")
    add("--data", nargs="+", required=True, type=Path, metavar="FILE", help="JSONL as of evaluate.py")
    add("--num", type=int, default=20, help="questions at the end of each file (default: %(default)s)")
    add("--kept", type=float, default=0.7, help="share of the passages that were there before (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "quality", help="folder of the result files")
    args = parser.parse_args()
    report = describe_run()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    questions = questions_of(args.data, args.num, encode)
    found = []
    for number, (head, chunks) in enumerate(questions):
        before = prefill(model, head, earlier(number, questions, args.kept))
        found.append(compare(model, before, prefill(model, head, chunks)))
        print(f"{number + 1} of {len(questions)}", flush=True)
    found = [chunks for chunks in found if len(chunks) > 2]
    chunks = [one for question in found for one in question]
    by_quarter = [
        [f"{cfo(part[0]):.2f} to {cfo(part[-1]):.2f}"]
        + [f"{np.mean([one[what] for one in part]):.3f}" for what in ("check", "all")]
        for part in np.array_split(sorted(chunks, key=cfo), 4)
    ]
    lines = [
        "# Does CFO foresee how far a stored chunk is off?",
        "",
        *run_markdown(report),
        f"- {len(found)} questions, {len(chunks)} chunks of {', '.join(map(named, args.data))}",
        "",
        "Rank correlation with a chunk's deviation, within a question; mean over the questions [95 % interval].",
        "",
        *markdown_table(["foretold by", "second layer", "mean of the layers from the second"], summary(found)),
        "",
        "Deviation by quarters of CFO, a share of the squared size of K and V:",
        "",
        *markdown_table(["CFO", "second layer", "mean of the layers from the second"], by_quarter),
    ]
    for path in write_result(args.out, "deviation", {**report, "chunks": found}, lines):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
