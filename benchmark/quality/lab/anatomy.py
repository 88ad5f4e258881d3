"""Anatomy: which tokens of reused chunks deviate, and which of them the question looks at, on a pretrained model.

    python benchmark/quality/lab/anatomy.py MODEL --data hotpotqa.jsonl --num 10

The counterpart of CacheBlend's figures 7 and 8, A3's 2 and Cache-Craft's 13: nothing is recomputed and no answer is
read. A token's deviation at a layer is the distance of its reused K and V from those of the full prefill. Result:
OUT/NAME.md.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from scipy.stats import spearmanr

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, mean_and_error, named, run_markdown
from benchmark.quality.lab.case import Case
from benchmark.quality.lab.choices import Reused
from benchmark.quality.lab.rows import KV, RowModel, attention_of
from benchmark.quality.lab.study import prompt_of, read

from chunk_cache.index.reusability import context_impact
from chunk_cache_tools.jsonl import DataError

CHECK_LAYER = 1
SHARE, LOOKED_AT = 0.15, 0.2
MEASURES = {
    "rank correlation of deviation, one layer to the next": "CacheBlend, figure 8",
    "squared deviation that the 15 % largest hold, mean of the layers": "CacheBlend, figure 7",
    "of the 20 % the question looks at most: among the 20 % of largest deviation": "A3, figure 2",
    "... among the first and last 10 % of each chunk": "A3, figure 2",
    "... among the 20 % by the question's attention at layer 1 over what is reused": "A3",
    "... among the 20 % by that of the last layer": "FusionRAG",
    "rank correlation of a chunk's deviation with its CCI": "Cache-Craft, figure 13",
}


@torch.no_grad()
def anatomy(case: Case) -> dict[str, float]:
    """`MEASURES` of one question."""
    reused = Reused(case)
    inside = slice(reused.start, reused.end)
    squares = _squared_deviation(case)[:, inside]  # [num_layers, num_reused]
    impact, looked_at = _of_full_prefill(case)
    num = math.ceil(LOOKED_AT * squares.shape[1])
    wanted = set(_best(looked_at[inside], num))
    ends = [i for a, b in reused.spans for i in _ends(a - reused.start, b - reused.start)]
    found = {
        "deviation": _best(squares[CHECK_LAYER], num),
        "ends": ends,
        "check layer": _best(reused.question_mass[CHECK_LAYER, inside], num),
        "last layer": _best(reused.question_mass[-1, inside], num),
    }
    held = squares.sort(1, descending=True).values[:, : math.ceil(SHARE * squares.shape[1])].sum(1) / squares.sum(1)
    by_chunk = [float(squares[1:, a - reused.start : b - reused.start].sqrt().mean()) for a, b in reused.spans]
    values = [
        statistics.mean(_correlation(squares[i], squares[i + 1]) for i in range(1, len(squares) - 1)),
        float(held[1:].mean()),
        *(len(wanted.intersection(tokens)) / num for tokens in found.values()),
        _correlation(torch.tensor(by_chunk), torch.tensor(impact)),
    ]
    return dict(zip(MEASURES, values, strict=True))


def _squared_deviation(case: Case) -> torch.Tensor:
    """`[num_layers, prompt_len]`, of K and V together."""
    parts = ((case.full.k - case.reused.k), (case.full.v - case.reused.v))
    return sum(part.square().sum((2, 3)) for part in parts)[:, : case.prompt_len]  # type: ignore[index]


def _of_full_prefill(case: Case) -> tuple[list[float], torch.Tensor]:
    """CCI of every chunk but the first, and what the question attends to `[prompt_len]`, means of layers and heads."""
    positions = torch.arange(case.prompt_len)
    total = torch.zeros(case.prompt_len, case.prompt_len)

    def observe(_layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        total.add_(attention_of(q, k, positions).mean(0) / case.model.num_layers)

    case.model.run(KV.empty(case.model, case.prompt_len), case.ids, positions, observe=observe)
    impact = []
    for i, (start, end) in enumerate(case.spans[1:], 1):
        inter = [float(total[start:end, a:b].sum()) for a, b in case.spans[:i]]
        intra = float(total[start:end, start:end].tril(-1).sum())
        lens = [b - a for a, b in case.spans[:i]]
        impact.append(context_impact(inter, lens, intra, end - start))  # type: ignore[arg-type]
    return impact, total[case.tail_start :].sum(0)


def _best(scores: torch.Tensor, num: int) -> list[int]:
    chosen: list[int] = scores.topk(num).indices.tolist()
    return chosen


def _ends(start: int, end: int) -> list[int]:
    num = math.ceil(LOOKED_AT / 2 * (end - start))
    return [*range(start, start + num), *range(end - num, end)]


def _correlation(one: torch.Tensor, other: torch.Tensor) -> float:
    return float(spearmanr(one.numpy(), other.numpy()).statistic)


def to_markdown(found: Sequence[Mapping[str, float]], about: Sequence[str]) -> list[str]:
    """A row a measure: mean, standard error, and whose figure has its counterpart."""
    rows = []
    for name, paper in MEASURES.items():
        mean, error = mean_and_error([one[name] for one in found])
        rows.append((name, f"{mean:.2f}", f"{error:.2f}", paper))
    return [*about, "", *markdown_table(("measure", "mean", "standard error", "in the papers"), rows)]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("model", help="Hugging Face folder or name, of Llama's shape")
    add("--data", nargs="+", required=True, metavar="FILE", help="JSONL as of evaluate.py")
    add("--num", type=int, default=10, help="questions of each file (default: %(default)s)")
    add("--half", choices=("even", "odd"), default="odd", help="of the lines (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "quality" / "lab", help="folder of the result")
    add("--name", help="of the result file (default: the model's, -anatomy)")
    args = parser.parse_args(argv)
    if args.num < 1:
        parser.error("--num: at least 1")
    name = args.name or Path(args.model).name + "-anatomy"
    about = describe_run()
    try:
        questions = [one for path in args.data for one in read(Path(path), args.half, args.num)]
    except DataError as error:
        print(error, file=sys.stderr)
        return 1
    model = RowModel(args.model)
    found = []
    for key, question, _ in questions:
        found.append(anatomy(Case.build(model, prompt_of(model, question, long=False), own_len=1)))
        print(key, flush=True)
    files = [named(Path(path)) for path in args.data]
    head = [
        f"# {Path(args.model).name}: which tokens deviate",
        "",
        f"{len(found)} questions ({args.half} lines of {', '.join(files)}), means over questions.",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.md").write_text("\n".join([*to_markdown(found, head), "", *run_markdown(about), ""]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
