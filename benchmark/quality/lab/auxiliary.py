"""A small model's attention beside the main one's: the counterpart of CacheClip's figure 2.

    python benchmark/quality/lab/auxiliary.py MAIN SELECTOR --data hotpotqa.jsonl --num 10

What the question attends to in the main model's last layer, over all chunk tokens, is compared with the last layer of
the auxiliary model, which reads each chunk alone, as when it serves, and with the main model's own first layer. Result:
OUT/NAME.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, mean_and_error, named, run_markdown

from sglang_chunk_cache.selector.auxiliary import ATTENTION, AuxiliaryModel
from sglang_chunk_cache.selector_training import (
    Score,
    TrainError,
    compare,
    load,
    make_examples,
    predict,
    read_prompts,
)


def first_layer_of(path: str) -> AuxiliaryModel:
    """The model without the layers behind its first."""
    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation=ATTENTION, num_hidden_layers=1)
    return AuxiliaryModel(model.eval(), AutoTokenizer.from_pretrained(path))


def shown(scores: Sequence[Score], name: str) -> str:
    """Mean and standard error of one of the fields."""
    mean, error = mean_and_error([getattr(score, name) for score in scores])
    return f"{mean:.3f} ({error:.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("main", help="Hugging Face folder or name of the main model")
    add("selector", help="of the auxiliary one")
    add("--data", required=True, type=Path, metavar="FILE", help="JSON lines with system, chunks, question")
    add("--num", type=int, default=10, help="questions (default: %(default)s)")
    add("--out", type=Path, default=RESULTS_DIR / "quality" / "lab", help="folder of the result")
    add("--name", help="of the result file (default: those of the models, and -attention)")
    args = parser.parse_args(argv)
    if args.num < 2:
        parser.error("--num: at least 2")
    about = describe_run()
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        prompts = read_prompts(args.data)[: args.num]
        whole, auxiliary = load(args.main, "main", "cpu"), load(args.selector, "selector", "cpu")
    except TrainError as error:
        print(error, file=sys.stderr)
        return 1
    first = first_layer_of(args.main)
    found: dict[str, list[Score]] = {"the auxiliary model's last layer": [], "the main model's first layer": []}
    with torch.no_grad():
        for prompt in prompts:
            for example, own in zip(
                make_examples([prompt], whole, auxiliary), make_examples([prompt], first, auxiliary), strict=True
            ):
                for scores, predicted in zip(found.values(), (predict(auxiliary, example), own.target), strict=True):
                    scores.append(compare(example.target, predicted))
    num = len(next(iter(found.values())))
    names = Path(args.main).name, Path(args.selector).name
    page = [
        f"# What {names[1]} attends to, beside {names[0]}",
        "",
        f"{num} questions of {named(args.data)}, means and standard errors: how close each is to what the question",
        f"attends to in {names[0]}'s last layer, over all chunk tokens. KL in nats, Jaccard index of the best 20 %.",
        "",
        *markdown_table(
            ("", "KL", "Jaccard"), [(name, shown(some, "kl"), shown(some, "jaccard")) for name, some in found.items()]
        ),
        "",
        *run_markdown(about),
        "",
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{args.name or '-'.join(names) + '-attention'}.md").write_text("\n".join(page))
    print("\n".join(page))
    return 0


if __name__ == "__main__":
    sys.exit(main())
