"""Acceptance of drafted tokens where chunks are reused, and where they are not.

    python benchmark/speculation/bench_acceptance.py [--num N] [--out FOLDER]

A trained model of a million parameters answers questions about notes; every note is a chunk that was stored before. An
answer goes on to a fixed length, past the end that the model would give it, so that there is something to draft. For
n-grams, another model that drafts, and an EAGLE head (trained here, a minute): tokens per verification, per method and
ratio, and in stock SGLang. The answers themselves are compared with those of stock SGLang without speculation.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, leave_on_sigterm, offline_env
from benchmark.gate.live import prime
from benchmark.gate.questions import TokenPrompt, make_prompts
from benchmark.speculation.eagle_draft import train_draft

MODELS = ROOT / "benchmark" / "quality" / "models"
FLAGS = ("--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "131072")
CHAIN = ("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
FAMILIES = ("needle", "carry")
TRAINING_SEED = 4001
ANSWER_LEN = 48
CONDITIONS: dict[str, dict[str, Any]] = {
    "every token computed": {"mode": "off"},
    "epic, ratio 1.0": {"method": "epic", "ratio": 1.0},
    "epic, ratio 0.5": {"method": "epic", "ratio": 0.5},
    "epic, ratio 0.15": {"method": "epic", "ratio": 0.15},
    "full-reuse": {"method": "full-reuse"},
}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODELS / "qa-1m-seed0")
    parser.add_argument("--draft", type=Path, default=MODELS / "qa-1m-seed1", help="the other model, which drafts")
    parser.add_argument("--num", type=int, default=40, metavar="N", help="questions per family")
    parser.add_argument("--epochs", type=int, default=5, help="of the training of the EAGLE head")
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "speculation", help="folder of the result files")
    return parser.parse_args()


def ask(server: Server, prompts: list[TokenPrompt], options: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Replies, all sent at once; `options` of the chunk cache, None = the prompts are not marked."""
    params: list[dict[str, Any]] = [
        {"max_new_tokens": ANSWER_LEN, "temperature": 0.0, "ignore_eos": True} for _ in prompts
    ]
    if options is not None:
        for one, prompt in zip(params, prompts, strict=True):
            one["custom_params"] = {"chunk_cache": {"spans": prompt.spans, **options}}
    ids = [list(prompt.ids) for prompt in prompts]
    replies: list[dict[str, Any]] = server.post("/generate", {"input_ids": ids, "sampling_params": params}).json()
    return replies


def measured(replies: list[dict[str, Any]], expected: list[list[int]]) -> dict[str, Any]:
    """Tokens per verification, the share of prompt tokens that were reused, and of answers that are the model's own."""
    metas = [reply["meta_info"] for reply in replies]
    same = [reply["output_ids"] == ids for reply, ids in zip(replies, expected, strict=True)]
    reused = [meta.get("chunk_cache", {}).get("reused_tokens", 0) for meta in metas]
    return {
        "accept_length": sum(meta["completion_tokens"] for meta in metas)
        / sum(meta["spec_verify_ct"] for meta in metas),
        "reused": sum(reused) / sum(meta["prompt_tokens"] for meta in metas),
        "same": sum(same) / len(same),
    }


def run_algorithm(model: Path, flags: tuple[str, ...], prompts: list[TokenPrompt], expected: list[list[int]]) -> Any:
    rows = {}
    with Server(model, *FLAGS, *flags, env=offline_env()) as server:
        rows["stock SGLang"] = measured(ask(server, prompts, None), expected)
    with Server(model, *FLAGS, *flags, "--chunk-cache", env=offline_env()) as server:
        for name, options in CONDITIONS.items():
            server.post("/flush_cache", {})  # n-grams too
            prime(server, prompts)
            rows[name] = measured(ask(server, prompts, options), expected)
    return rows


def main() -> None:
    args = parse_args()
    leave_on_sigterm()
    run = describe_run()
    prompts = [prompt for family in FAMILIES for prompt in make_prompts(args.model, family, args.num)]
    with Server(args.model, *FLAGS, env=offline_env()) as server:
        expected = [reply["output_ids"] for reply in ask(server, prompts, None)]
    with tempfile.TemporaryDirectory() as folder:
        own = [
            list(p.ids) for family in FAMILIES for p in make_prompts(args.model, family, 4 * args.num, TRAINING_SEED)
        ]
        eagle = train_draft(args.model, Path(folder), own, answer_len=ANSWER_LEN, epochs=args.epochs)
        algorithms = {
            "NGRAM": ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"),
            f"STANDALONE, {args.draft.name}": (
                *("--speculative-algorithm", "STANDALONE", "--speculative-draft-model-path", str(args.draft)),
                *CHAIN,
            ),
            "EAGLE": (*("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(eagle)), *CHAIN),
        }
        results = {name: run_algorithm(args.model, flags, prompts, expected) for name, flags in algorithms.items()}
    report = {"run": run, "num": len(prompts), "answer_len": ANSWER_LEN, "results": results}
    write_result(args.out, "acceptance", report, markdown(report, args.model))
    print(json.dumps(results, indent=1))


def markdown(report: dict[str, Any], model: Path) -> list[str]:
    rows = [
        [name, condition, f"{row['accept_length']:.2f}", f"{100 * row['reused']:.0f} %", f"{100 * row['same']:.0f} %"]
        for name, conditions in report["results"].items()
        for condition, row in conditions.items()
    ]
    header = ["drafts", "chunks", "tokens per verification", "of the prompt reused", "answers as without reuse"]
    return [
        "# Acceptance of drafted tokens, with chunks reused and not",
        "",
        *run_markdown(report["run"]),
        f"- {report['num']} questions to {model.name}, {report['answer_len']} tokens each, greedy, past the end",
        "- NGRAM: 8 tokens; the others: chains of 4, the first of which is no draft",
        "",
        *markdown_table(header, rows),
        "",
        "Past its end an answer often repeats itself, which is easy to draft: compare rows, not heights. "
        "*Tokens per verification*: `completion_tokens / spec_verify_ct` over all answers; 1 = no draft was accepted. "
        "*Answers as without reuse*: all tokens equal those of stock SGLang without speculation; what differs there is "
        "what reuse changes, since a draft changes nothing.",
    ]


if __name__ == "__main__":
    main()
