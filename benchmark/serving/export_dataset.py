"""Writes a trace as a `custom` dataset of `python -m sglang.benchmark.serving`, so that its users can repeat ours.

    python benchmark/serving/export_dataset.py documents --model DIR --out documents.jsonl
    python benchmark/serving/export_dataset.py documents --model DIR --out documents-stock.jsonl --plain
    python benchmark/serving/export_dataset.py MY_LOG.jsonl --model DIR --out my.jsonl --reorder

    python -m sglang.benchmark.serving --backend sglang --dataset-name custom --dataset-path documents.jsonl \\
        --num-prompts 50 --request-rate 0.5 --port 30000

Passages are marked with separators, which a server with `--chunk-cache` reads; `--plain` leaves them out, for stock
SGLang, and `--reorder` (plain too) writes the order of the exact baseline. Answers in the file are as long as those
that are to be generated. SGLang's tool shuffles the lines with its `--seed`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.demo.corpus import cut_passages, read_corpus
from benchmark.quality.question import DataError
from benchmark.serving import traces
from benchmark.serving.prompt import Prompt
from benchmark.serving.systems import BASELINES, REORDER, STOCK, System, Writer
from transformers import AutoTokenizer, PreTrainedTokenizerBase

MARKED = System("marked", "chunk", {})
MIN_OUTPUT_LEN = 4  # SGLang's tool takes no shorter fixed length, and drops answers of one token


def write_dataset(
    path: Path, prompts: Iterable[Prompt], system: System, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, int]:
    """Writes one conversation per line; returns how many lines there are and the longest prompt in characters.

    Raises:
        DataError: a prompt consists of token ids, which such a file cannot hold.
    """
    writer = Writer(system)
    num, longest = 0, 0
    with path.open("w", encoding="utf-8") as file:
        for prompt in prompts:
            body = writer.body(prompt)
            if "text" not in body:
                raise DataError("a prompt of token ids cannot be exported; give documents or a log of texts.")
            turns = (("user", body["text"]), ("assistant", answer_of_len(prompt.output_len, tokenizer)))
            line = {"conversations": [{"role": role, "content": content} for role, content in turns]}
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
            num, longest = num + 1, max(longest, len(body["text"]))
    return num, longest


def answer_of_len(num_tokens: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """A text that the tokenizer, with the special tokens it adds, turns into so many tokens."""
    num_tokens = max(num_tokens, MIN_OUTPUT_LEN)
    words = ["a"]
    while len(tokenizer.encode(" ".join(words))) < num_tokens:
        words.append("a")
    return " ".join(words)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("trace", help="documents, or a JSONL log (docs/benchmarks.md)")
    parser.add_argument("--model", type=Path, required=True, help="folder with the tokenizer of the server's model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--num", type=int, default=100, help="prompts of documents")
    parser.add_argument("--seed", type=int, default=0)
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--plain", action="store_true", help="no separators: for stock SGLang")
    kind.add_argument("--reorder", action="store_true", help="no separators, in the order of the exact baseline")
    args = parser.parse_args()
    if args.num < 1:
        parser.error("--num: at least 1")
    try:
        tokenizer = AutoTokenizer.from_pretrained(args.model, local_files_only=True)
    except (OSError, ValueError) as error:
        parser.error(f"--model: no tokenizer can be loaded from {args.model} ({error})")
    try:
        if args.trace == "documents":
            passages = cut_passages(read_corpus(ROOT), lambda text: len(tokenizer.tokenize(text)))
            prompts = traces.documents(passages, num=args.num, output_len=traces.OUTPUT_LEN, seed=args.seed)
        else:
            prompts = traces.from_log(args.trace, traces.OUTPUT_LEN)
        system = BASELINES[REORDER] if args.reorder else BASELINES[STOCK] if args.plain else MARKED
        num, longest = write_dataset(args.out, prompts, system, tokenizer)
    except (DataError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{args.out}: {num} prompts of up to {longest} characters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
