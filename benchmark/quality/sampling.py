"""What is lost when statistics of chunks are taken at some layers and heads only.

    python benchmark/quality/sampling.py [--model-path DIR ...] [--num 60] [--out FOLDER]

Reads prompts of the synthetic families with the whole attention written out (transformers, eager), and compares what
would be stored of each chunk, by sampled layers and heads, with the mean over all: its context impact (CCI), and which
tokens stand among the highest of the ranking. Result: `benchmark/results/statistics/`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.quality.prompts import Prompt
from benchmark.quality.tasks import TRAINED, TaskOptions, synthetic_task

from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.options.config import Config

SHARES = (0.05, 0.15, 0.3)
MODELS = [ROOT / "benchmark" / "quality" / "models" / f"qa-1m-seed{seed}" for seed in range(3)]
Weights = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sample:
    """Which layers and query heads are looked at."""

    name: str
    layers: tuple[int, ...]
    heads: tuple[int, ...]


def samples(num_layers: int, num_heads: int) -> list[Sample]:
    """The whole first, which is what the others are compared with."""
    layers, heads = tuple(range(num_layers)), tuple(range(num_heads))
    sampled = Config().layers_with_statistics(num_layers)
    return [
        Sample("all layers, all heads", layers, heads),
        Sample("sampled layers, all heads", sampled, heads),
        Sample("all layers, every second head", layers, heads[::2]),
        Sample("all layers, first head", layers, heads[:1]),
        Sample("sampled layers, every second head", sampled, heads[::2]),
        Sample("sampled layers, first head", sampled, heads[:1]),
        Sample("last layer, all heads", layers[-1:], heads),
    ]


def statistics_of(weights: Weights, spans: Sequence[tuple[int, int]]) -> list[ChunkStatistics]:
    """Statistics of all chunks but the first, of `weights` `[prompt_len, prompt_len]`, a mean over layers and heads."""
    found = []
    for i in range(1, len(spans)):
        start, end = spans[i]
        inter = np.array([weights[start:end, a:b].sum() for a, b in spans[:i]], dtype=np.float32)
        outside = sum(weights[start:end, a:b].sum(axis=1) for a, b in spans[:i])
        own = np.tril(weights[start:end, start:end], k=-1)
        lens = [b - a for a, b in spans[:i]]
        found.append(ChunkStatistics.taken(outside, own.sum(axis=0), inter, float(own.sum()), lens))
    return found


def read_prompt(tokenizer: Any, prompt: Prompt) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and the spans of the chunks."""
    ids = list(tokenizer(prompt.head)["input_ids"])
    spans = []
    for chunk in prompt.chunks:
        piece = tokenizer(chunk, add_special_tokens=False)["input_ids"]
        spans.append((len(ids), len(ids) + len(piece)))
        ids += piece
    return ids + list(tokenizer(prompt.tail, add_special_tokens=False)["input_ids"]), spans


def overlap(mine: Weights, whole: Weights, share: float) -> float:
    """The share of the highest tokens that both rankings name."""
    count = max(1, round(share * len(whole)))
    return len(set(np.argsort(-mine)[:count]) & set(np.argsort(-whole)[:count])) / count


def measure(model_path: Path, num: int) -> list[dict[str, Any]]:
    """One row per sample, means over all chunks of all prompts."""
    import torch
    from scipy.stats import spearmanr
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path, attn_implementation="eager", dtype=torch.float32)
    options = samples(model.config.num_hidden_layers, model.config.num_attention_heads)
    by_sample: dict[str, list[ChunkStatistics]] = {sample.name: [] for sample in options}
    for family in TRAINED:
        for prompt in synthetic_task(family, TaskOptions(num=num)).prompts():
            ids, spans = read_prompt(tokenizer, prompt)
            with torch.inference_mode():
                attentions = model(torch.tensor([ids]), output_attentions=True).attentions
            layers = np.stack([layer[0].numpy() for layer in attentions])  # [layers, heads, rows, keys]
            for sample in options:
                weights = layers[list(sample.layers)][:, list(sample.heads)].mean(axis=(0, 1))
                by_sample[sample.name] += statistics_of(weights, spans)
    whole = by_sample[options[0].name]
    rows = []
    for sample in options:
        mine = by_sample[sample.name]
        cci, whole_cci = ([one.cci for one in some] for some in (mine, whole))
        rows.append(
            {
                "model": model_path.name,
                "sample": sample.name,
                "layers": list(sample.layers),
                "heads": list(sample.heads),
                "chunks": len(mine),
                "cci_mean": float(np.mean(cci)),
                "cci_difference": float(np.mean(np.abs(np.subtract(cci, whole_cci)))),
                "cci_rank_correlation": float(spearmanr(cci, whole_cci).statistic),
                "overlap": {
                    str(share): float(
                        np.mean([overlap(a.outside, b.outside, share) for a, b in zip(mine, whole, strict=True)])
                    )
                    for share in SHARES
                },
            }
        )
    return rows


def to_markdown(report: dict[str, Any]) -> list[str]:
    header = ("model", "layers and heads", "mean CCI", "mean difference", "rank correlation")
    header += tuple(f"same tokens, best {100 * share:g} %" for share in SHARES)
    cells = [
        (
            row["model"],
            row["sample"],
            f"{row['cci_mean']:.3f}",
            f"{row['cci_difference']:.3f}",
            f"{row['cci_rank_correlation']:.2f}",
            *(f"{100 * row['overlap'][str(share)]:.0f} %" for share in SHARES),
        )
        for row in report["rows"]
    ]
    return [
        "# Statistics from some layers and heads",
        "",
        *run_markdown(report),
        "",
        f"Chunks behind the first of {report['num']} prompts per synthetic family. Compared with the mean over all",
        "layers and heads: CCI of each chunk, and which of its tokens rank highest by what they gave to the chunks in",
        "front of it.",
        "",
        *markdown_table(header, cells),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, nargs="+", default=MODELS, help="Hugging Face folders")
    parser.add_argument("--num", type=int, default=60, help="prompts per family")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "statistics", help="folder of the result files")
    args = parser.parse_args()
    report: dict[str, Any] = {**describe_run(), "num": args.num}
    report["rows"] = [row for path in args.model_path for row in measure(path, args.num)]
    markdown = to_markdown(report)
    write_result(args.out, "sampling", report, markdown)
    print("\n".join(markdown))


if __name__ == "__main__":
    main()
