"""Attention deviation: how far recomputed tokens bring the question's attention back to that of a full prefill.

    python benchmark/quality/attention_deviation.py MODEL --data musique.jsonl [--num N] [--out DIR]

The counterpart of CacheBlend's figure 6 and A3's figure 3, in plain torch on transformers. Passages are stored alone
behind the system prompt and reused at their places in the question's prompt; a share of their tokens, chosen by each
rule, is computed again through all layers. The deviation at a layer is the L2 norm of the difference between the
question's attention (all heads, all its tokens) and that of the full prefill. Results: OUT/attention-deviation.*.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, named, run_markdown, write_result
from benchmark.quality.question import read_questions
from benchmark.quality.table import interval

CHECK_LAYER = 1
RATIOS = (0.05, 0.1, 0.15, 0.3, 0.5)
Layers = list[tuple[torch.Tensor, torch.Tensor]]  # K and V of each layer, each [heads, tokens, dim]


@dataclass(frozen=True)
class Case:
    """One prompt: its tokens, where the question begins, and where each passage lies."""

    ids: torch.Tensor
    tail: int
    spans: list[tuple[int, int]]

    @property
    def head(self) -> int:
        return self.spans[0][0]


class Runner:
    """Runs tokens at given places behind given KV."""

    def __init__(self, path: str) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.inv_freq = self.model.model.rotary_emb.inv_freq

    @torch.no_grad()
    def run(self, ids: torch.Tensor, places: torch.Tensor, past: Layers, past_places: torch.Tensor, look: bool) -> Any:
        """(KV of past and new tokens, their places, attention [layers, heads, new, all] by place or None)."""
        self.model.set_attn_implementation("eager" if look else "sdpa")
        cache = DynamicCache()
        for layer, (k, v) in enumerate(past):
            cache.update(k[None], v[None], layer)
        all_places = torch.cat((past_places, places))
        mask = torch.zeros(len(places), len(all_places))
        mask[all_places[None] > places[:, None]] = float("-inf")
        out = self.model.model(
            input_ids=ids[None],
            position_ids=places[None],
            attention_mask=mask[None, None],
            past_key_values=cache,
            use_cache=True,
            output_attentions=look,
        )
        kv = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
        attention = torch.stack([one[0] for one in out.attentions])[..., all_places.argsort()] if look else None
        return kv, all_places, attention

    def turned(self, k: torch.Tensor, by: int) -> torch.Tensor:
        """Keys moved by so many positions."""
        dim = k.shape[-1]
        angle = torch.cat((self.inv_freq, self.inv_freq)).double() * by
        rotated = torch.cat((-k[..., dim // 2 :], k[..., : dim // 2]), -1)
        return (k * angle.cos() + rotated * angle.sin()).to(k.dtype)


def stored(runner: Runner, case: Case) -> Layers:
    """KV of head and passages at their places, each passage computed alone behind the head."""
    nothing = torch.zeros(0, dtype=torch.long)
    head_places = torch.arange(case.head)
    head, _, _ = runner.run(case.ids[: case.head], head_places, [], nothing, look=False)
    parts = [head]
    for start, end in case.spans:
        places = torch.arange(case.head, case.head + end - start)
        kv, _, _ = runner.run(case.ids[start:end], places, head, head_places, look=False)
        parts.append([(runner.turned(k[:, case.head :], start - case.head), v[:, case.head :]) for k, v in kv])
    return [tuple(torch.cat([part[i][j] for part in parts], 1) for j in (0, 1)) for i in range(len(head))]  # type: ignore[misc]


def look(runner: Runner, case: Case, kv: Layers, chosen: torch.Tensor) -> torch.Tensor:
    """The question's attention [layers, heads, question, all] with these tokens computed again."""
    keep = torch.ones(case.tail, dtype=torch.bool)
    keep[chosen] = False
    places = torch.arange(case.tail)[keep]
    past: Layers = [(k[:, keep], v[:, keep]) for k, v in kv]
    if len(chosen):
        past, places, _ = runner.run(case.ids[chosen], chosen, past, places, look=False)
    tail = torch.arange(case.tail, len(case.ids))
    attention: torch.Tensor = runner.run(case.ids[case.tail :], tail, past, places, look=True)[2]
    return attention


def measure(runner: Runner, case: Case, draw: torch.Generator) -> dict[str, dict[float, np.ndarray]]:
    """Deviation of each layer by rule and ratio; ratio 0 under every rule."""
    nothing = torch.zeros(0, dtype=torch.long)
    full_kv, _, _ = runner.run(case.ids[: case.tail], torch.arange(case.tail), [], nothing, look=False)
    full = look(runner, case, full_kv, nothing)
    kv = stored(runner, case)
    reused = look(runner, case, kv, nothing)
    tokens = torch.arange(case.head, case.tail)
    within = torch.cat([torch.arange(end - start) for start, end in case.spans])
    length = torch.cat([torch.full((end - start,), float(end - start)) for start, end in case.spans])
    off = sum((a - b).square().sum((0, 2)) for a, b in zip(kv[CHECK_LAYER], full_kv[CHECK_LAYER], strict=True))
    worth = {
        "high KV deviation at the second layer (CacheBlend)": off[tokens],
        "attention of the question (A3)": reused[..., tokens].sum((0, 1, 2)),
        "beginning of each passage (EPIC)": -within / length,
        "random": torch.rand(len(tokens), generator=draw),
    }

    def deviation(attention: torch.Tensor) -> np.ndarray:
        return np.asarray((attention - full).square().sum((1, 2, 3)).sqrt().numpy())

    found = {}
    for rule, score in worth.items():
        order = tokens[score.argsort(descending=True)]
        by_ratio = {0.0: deviation(reused)}
        for ratio in RATIOS:
            chosen = order[: round(ratio * len(tokens))].sort().values
            by_ratio[ratio] = deviation(look(runner, case, kv, chosen))
        found[rule] = by_ratio
    assert np.allclose(deviation(look(runner, case, kv, tokens)), 0, atol=1e-2), "all recomputed is a full prefill"
    return found


def cases(path: Path, num: int, encode: Callable[[str], list[int]]) -> list[Case]:
    """The last `num` questions of a file."""
    found = []
    for question in read_questions(path)[-num:]:
        ids, spans = encode(question.system + "\n"), []
        for text in question.chunks:
            chunk = encode(text + "\n")
            spans.append((len(ids), len(ids) + len(chunk)))
            ids = ids + chunk
        found.append(Case(torch.tensor(ids + encode(question.question)), len(ids), spans))
    return found


def table(found: Sequence[dict[str, dict[float, np.ndarray]]], layers: slice) -> list[list[str]]:
    """Share of ratio 0's deviation that is left, mean over layers, then over questions [95 % interval]."""
    rows = []
    for rule in found[0]:
        cells = []
        for ratio in RATIOS:
            left = np.array([100 * one[rule][ratio][layers].mean() / one[rule][0.0][layers].mean() for one in found])
            low, high = interval(left)
            cells.append(f"{left.mean():.0f} [{low:.0f}, {high:.0f}]")
        rows.append([rule, *cells])
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="Hugging Face folder of Llama's shape")
    add("--data", nargs="+", required=True, type=Path, metavar="FILE", help="JSONL as of evaluate.py")
    add("--num", type=int, default=10, help="questions at the end of each file (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "quality", help="folder of the result files")
    args = parser.parse_args()
    report = describe_run()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    runner, draw = Runner(args.model), torch.Generator().manual_seed(1)

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    asked = [case for path in args.data for case in cases(path, args.num, encode)]
    found = []
    for number, case in enumerate(asked, 1):
        found.append(measure(runner, case, draw))
        print(f"{number} of {len(asked)}: {len(case.ids)} tokens", flush=True)
    num_layers = len(found[0]["random"][0.0])
    thirds = [slice(num_layers * i // 3, num_layers * (i + 1) // 3) for i in range(3)]
    heads = ["chosen by", *(f"{100 * ratio:g} %" for ratio in RATIOS)]
    lines = ["# Attention deviation", "", *run_markdown(report)]
    lines.append(
        f"- {len(asked)} questions, {Path(args.model).name}, {named(Path(args.model) / 'model.safetensors')}; "
        + ", ".join(map(named, args.data))
    )
    for title, layers in [
        ("All layers", slice(None)),
        *((f"Layers {part.start} to {part.stop - 1}", part) for part in thirds),
    ]:
        lines += ["", f"{title}: left of the deviation with nothing recomputed, % [95 % interval]:", ""]
        lines += markdown_table(heads, table(found, layers))
    saved = [{rule: {str(r): v.tolist() for r, v in by.items()} for rule, by in one.items()} for one in found]
    for path in write_result(args.out, "attention-deviation", {**report, "questions": saved}, lines):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
