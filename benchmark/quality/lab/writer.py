"""Writer: is an adapter that is on only while stored KV is computed worth more than what the KV is computed behind?

    python benchmark/quality/lab/writer.py MODEL --train hotpotqa.jsonl --data hotpotqa.jsonl 2wiki.jsonl --out DIR

SemPIC's idea. A LoRA (rank 8, on the projections of K and V) is on while a passage's KV is computed behind the head
alone; the question and the answer are computed without it. It is trained by KL(full prefill || reuse with nothing
recomputed) along full prefill's own answer, on short prompts: the question's supporting passages and one more. Held out
are the last lines of the files: of the first file those are in domain, of the others out of it. Result: OUT/writer.md.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.common.results import describe_run, markdown_table, named, run_markdown
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.choices import RULES, Reused
from benchmark.quality.lab.many import behind
from benchmark.quality.lab.rows import KV, RowModel, softmax_attention
from benchmark.quality.lab.storing import Contexts, prompt_of, read
from benchmark.quality.question import Question
from benchmark.quality.table import interval

from chunk_cache_tools.jsonl import read_jsonl

OWN_LEN = 24
RULE = (("nothing", 0.0), ("epic", 0.15))


class Writer(torch.nn.Module):
    """LoRA of K and V of every layer; `on` adds it to what the projections give."""

    def __init__(self, model: RowModel, rank: int = 8) -> None:
        super().__init__()
        self.is_on = False
        self.a, self.b = torch.nn.ParameterList(), torch.nn.ParameterList()
        for layer in model._layers:
            for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
                a = torch.randn(rank, projection.in_features) / projection.in_features**0.5
                self.a.append(torch.nn.Parameter(a))
                self.b.append(torch.nn.Parameter(torch.zeros(projection.out_features, rank)))
                projection.register_forward_hook(self._hook(len(self.a) - 1))

    def _hook(self, index: int) -> Any:
        def add(_module: Any, args: tuple[torch.Tensor], out: torch.Tensor) -> torch.Tensor:
            return out + args[0] @ self.a[index].T @ self.b[index].T if self.is_on else out

        return add

    @contextmanager
    def on(self) -> Iterator[None]:
        self.is_on = True
        yield
        self.is_on = False


@dataclass(frozen=True)
class Lesson:
    """A short prompt: the teacher's answer, its distributions `[own_len, vocab]` and the KV of the head."""

    case: Case
    head: KV


def lessons(model: RowModel, path: Path, held_out: int, num: int, max_tokens: int) -> Iterator[Question]:
    """So many short questions of the file's first lines: the supporting passages and one more."""
    lines = [value for _, value in read_jsonl(path)][:-held_out]
    draw = random.Random(0)
    made = 0
    while made < num:
        for value in lines:
            chunks, supporting = value["chunks"], value.get("supporting") or []
            kept = [chunks[i] if isinstance(i, int) else i for i in supporting] or draw.sample(chunks, 2)
            kept = [chunk for chunk in chunks if chunk in kept or any(str(one) in chunk[:80] for one in supporting)][:3]
            rest = [chunk for chunk in chunks if chunk not in kept]
            chosen = [*kept, *draw.sample(rest, min(len(rest), max(1, 3 - len(kept))))]
            draw.shuffle(chosen)
            question = Question(value["system"], tuple(chosen), value["question"], tuple(value["answers"]))
            if len(model.tokenizer.encode(prompt_of(model, question).text)) <= max_tokens and made < num:
                made += 1
                yield question


def through(model: RowModel, ids: torch.Tensor, start: int, front: list[tuple[torch.Tensor, torch.Tensor]]) -> Any:
    """Rows computed behind the K and V in `front`, with gradients: hidden states, and (k, v) of each layer."""
    positions = torch.arange(start, start + len(ids))
    mask = model.masks(positions, start + len(ids))
    rotations = model.rotations(positions)
    x, own = model.embed(ids), []
    for layer in range(model.num_layers):
        kind = model.kind(layer)
        q, k, v = model.project(layer, x, *rotations[kind])
        keys, values = torch.cat((front[layer][0], k)), torch.cat((front[layer][1], v))
        x = model.finish(layer, x, softmax_attention(q, keys, values, mask[kind]))
        own.append((k, v))
    return model.norm(x), own


def loss_of(model: RowModel, writer: Writer, case: Case) -> torch.Tensor:
    """KL along the teacher's answer, nats a token, of reuse with nothing recomputed."""
    head_len = case.head_len
    head = [(case.full.k[i, :head_len], case.full.v[i, :head_len]) for i in range(model.num_layers)]
    front = [list(pair) for pair in head]
    for start, end in case.spans:
        with writer.on():
            _, own = through(model, case.ids[start:end], head_len, head)
        by = torch.full((end - start,), start - head_len)
        for layer, (k, v) in enumerate(own):
            front[layer][0] = torch.cat((front[layer][0], model.turn_to(k, by, layer)))
            front[layer][1] = torch.cat((front[layer][1], v))
    ids = torch.cat((case.ids[case.tail_start :], case.own[:-1]))
    hidden, _ = through(model, ids, case.tail_start, [(k, v) for k, v in front])
    found = model.log_probs(hidden[-len(case.own) :])
    return (case.full_own.exp() * (case.full_own - found)).sum(1).mean()


def train(model: RowModel, writer: Writer, cases: list[Case], epochs: int, rate: float) -> Iterator[str]:
    optimizer = torch.optim.AdamW(writer.parameters(), lr=rate, weight_decay=0.0)
    steps = epochs * len(cases)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / 16) * (0.5 + 0.5 * math.cos(math.pi * step / steps))
    )
    for epoch in range(epochs):
        order = list(cases)
        random.Random(epoch).shuffle(order)
        seen = []
        for number, case in enumerate(order):
            optimizer.zero_grad()
            loss = loss_of(model, writer, case)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(writer.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            seen.append(float(loss.detach()))
            if (number + 1) % 32 == 0:
                yield f"epoch {epoch + 1}, {number + 1} of {len(order)}: KL {np.mean(seen[-32:]):.4f}"


def chunks_behind(model: RowModel, case: Case, context: torch.Tensor) -> KV:
    """K and V of the prompt's passages, each computed behind the head and the context, turned to where it stands."""
    head_len, cap = case.head_len, case.head_len + len(context)
    front = KV.empty(model, cap)
    front.k[:, :head_len], front.v[:, :head_len] = case.full.k[:, :head_len], case.full.v[:, :head_len]
    if len(context):
        model.run(front, context, torch.arange(head_len, cap))
    found = case.full.clone()
    found.k[:, head_len:], found.v[:, head_len:] = 0, 0
    for i in range(0, len(case.spans), 4):
        spans = case.spans[i : i + 4]
        chunks = [case.ids[start:end] for start, end in spans]
        for (start, end), kv in zip(spans, behind(model, front, [context[:0]] * len(chunks), chunks), strict=True):
            found.k[:, start:end] = model.turn(kv.k, start - cap)
            found.v[:, start:end] = kv.v
    return found


@torch.no_grad()
def stores(model: RowModel, writer: Writer, case: Case, contexts: Contexts) -> Iterator[tuple[str, Case]]:
    yield "alone", case
    yield "filler", replace(case, reused=chunks_behind(model, case, contexts.filler[0]))
    first, second = (chunks_behind(model, case, context) for context in contexts.foreign[:2])
    yield "mean of two foreign", replace(case, reused=KV((first.k + second.k) / 2, (first.v + second.v) / 2))
    for name, context in (("writer, alone", contexts.filler[0][:0]), ("writer, behind filler", contexts.filler[0])):
        with writer.on():
            found = chunks_behind(model, case, context)
        yield name, replace(case, reused=found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model")
    add("--train", required=True, type=Path, metavar="FILE")
    add("--data", nargs="+", required=True, type=Path, metavar="FILE", help="the first one is in domain")
    add("--lessons", type=int, default=128)
    add("--epochs", type=int, default=2)
    add("--rate", type=float, default=1e-3)
    add("--num", type=int, default=12, help="held-out questions of each file (default: %(default)s)")
    add("--max-lesson", type=int, default=520, help="tokens of a lesson's prompt, at most (default: %(default)s)")
    add("--max-tokens", type=int, default=2200)
    add("--out", type=Path, required=True)
    args = parser.parse_args()
    about = describe_run()
    torch.manual_seed(0)
    model = RowModel(args.model)
    writer = Writer(model)
    began = time.monotonic()
    cases = []
    for question in lessons(model, args.train, args.num, args.lessons, args.max_lesson):
        cases.append(Case.build(model, prompt_of(model, question), own_len=OWN_LEN))
        if len(cases) % 16 == 0:
            print(f"{len(cases)} lessons, {time.monotonic() - began:.0f} s", flush=True)
    curve = []
    for line in train(model, writer, cases, args.epochs, args.rate):
        curve.append(line)
        print(f"{line}, {time.monotonic() - began:.0f} s", flush=True)
    hours = (time.monotonic() - began) / 3600
    args.out.mkdir(parents=True, exist_ok=True)
    torch.save(writer.state_dict(), args.out / "writer.pt")
    found: dict[str, dict[tuple[str, str], list[tuple[float, float]]]] = {}
    for path in args.data:
        domain = found.setdefault(path.name, {})
        for asked in read(path, args.num):
            prompt = prompt_of(model, asked.question)
            if len(model.tokenizer.encode(prompt.text)) > args.max_tokens:
                continue
            case = Case.build(model, prompt, own_len=OWN_LEN)
            contexts = Contexts(model, asked, 2)
            for name, stored in stores(model, writer, case, contexts):
                reused = Reused(stored, 1 if name == "alone" else 0)
                for rule, ratio in RULE:
                    (judged,) = reused.judge([RULES[rule](reused, ratio)])
                    domain.setdefault((name, rule), []).append((judged.own_kl, judged.gold_loss))
            print(f"{asked.key}, {time.monotonic() - began:.0f} s", flush=True)
    lines = ["# A writer", "", *run_markdown(about)]
    lines += [f"- trained on {args.train.name}: {len(cases)} lessons, {args.epochs} epochs, {hours:.2f} hours", ""]
    lines += [f"- {line}" for line in curve]
    for file, domain in found.items():
        rows = []
        for (name, rule), values in domain.items():
            cells = []
            for measure in (0, 1):
                mine = np.array([value[measure] for value in values])
                mean = np.array([value[measure] for value in domain["mean of two foreign", rule]])
                low, high = interval(mine - mean)
                cells += [f"{mine.mean():.3f}", f"{(mine - mean).mean():+.3f} [{low:+.3f}, {high:+.3f}]"]
            rows.append([name, rule, *cells])
        heads = [
            "stored",
            "recomputed",
            "KL along own answer",
            "minus mean of two",
            "right answer lost",
            "minus mean of two",
        ]
        lines += ["", f"## {named(next(p for p in args.data if p.name == file))}: {len(values)} questions", ""]
        lines += markdown_table(heads, rows)
    (args.out / "writer.md").write_text("\n".join([*lines, ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
