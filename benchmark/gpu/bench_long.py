"""Time to first token of long prompts on a GPU: every method against stock SGLang, on a model given by folder.

    python benchmark/gpu/bench_long.py --model DIR [--prompts 8192,16384,32768] [--ratios 0.05,0.15] [--repeats 5]
    python benchmark/gpu/bench_long.py --shape llama-8b         # random weights of that shape, made in place

Prompts are as in benchmark/ttft: random token ids; every chunk is primed alone behind the system prompt; each
measured prompt has a new order and a new question. Stock is `"mode": "off"` on the same server, with its prefix cache
on. `--flags` goes to the server.

Weights of `--shape` are freshly initialised. SGLang's dummy weights have a twentieth of that spread: all scores would
be equal, and methods would choose the earliest rows. The run fails if the rows of a method that scores do not spread
over the prompt. Needs disk for the weights (16 GB for `llama-8b`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import ROOT
from benchmark.common.models import LlamaShape, make_random
from benchmark.common.results import RESULTS_DIR, Spread, describe_run, markdown_table, run_markdown, write_result
from benchmark.common.server import Server, offline_env
from benchmark.ttft.measure import STOCK, System, time_reuse
from benchmark.ttft.workload import Size, Workload

from chunk_cache.methods import METHODS, Stage

SHAPES = {
    # Llama-3.1-8B by its config.json: 32 layers, 32 heads and 8 for keys and values, 128 each.
    "llama-8b": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2,
        "tie_word_embeddings": False, "rope_scaling": {
            "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "hidden_size": 128,
        "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
        "initializer_range": 0.11,  # as sharp as 0.02 of a hidden size of 4,096
    },
}  # fmt: skip
MIN_LATE, MAX_FIRST = 0.1, 0.99
"""Least share of the chosen rows in the second half of the chunks, and most at the beginnings of chunks."""
MEASURED = ("epic", "near", "near-words", "cache-craft", "fusionrag", "cacheblend", "a3", "question-drift")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="Hugging Face folder")
    add("--shape", choices=SHAPES, help="random weights of this shape")
    add("--prompts", default="8192,16384,32768", help="lengths in tokens (default: %(default)s)")
    add("--chunk-len", type=int, default=512, help="tokens of a chunk (default: %(default)s)")
    add("--methods", default=",".join(MEASURED), help="default: %(default)s")
    add("--ratios", default="0.05,0.15", help="default: %(default)s")
    add("--repeats", type=int, default=5, help="measurements per system (default: %(default)s)")
    add("--flags", default="", help="more flags of the server, in one string, parted by spaces")
    add("--out", type=Path, default=RESULTS_DIR / "gpu", help="folder of the results")
    add("--name", default="long", help="of the result files (default: %(default)s)")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("give one of --model and --shape")
    return args


def model_of(args: argparse.Namespace) -> tuple[Path, dict[str, Any]]:
    """Folder of the model, and its configuration."""
    folder = args.model
    if folder is None:
        folder = make_random(ROOT / ".cache" / "bench" / args.shape, SHAPES[args.shape])
    return folder, json.loads((folder / "config.json").read_text())


def size_of(prompt_len: int, chunk_len: int, config: dict[str, Any]) -> Size:
    """The size of a prompt of about `prompt_len` tokens."""
    num_chunks = (prompt_len - 128) // chunk_len
    heads = config["num_attention_heads"]
    shape = LlamaShape(
        config["num_hidden_layers"], config["hidden_size"], heads, config.get("num_key_value_heads", heads),
        config["intermediate_size"], config["vocab_size"],
    )  # fmt: skip
    return Size(shape, system_len=96, chunk_len=chunk_len, num_chunks=num_chunks, question_len=32)


def systems_of(methods: str, ratios: str) -> list[System]:
    """The systems to measure; stock is the first."""
    return [
        STOCK,
        System("full-reuse", {"method": "full-reuse"}),
        *(
            System(f"{method}, ratio {float(ratio):g}", {"method": method, "ratio": float(ratio)})
            for ratio in ratios.split(",")
            for method in methods.split(",")
        ),
    ]


def measure(server: Server, args: argparse.Namespace, config: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One part per prompt length."""
    systems = systems_of(args.methods, args.ratios)
    for number, prompt_len in enumerate(map(int, args.prompts.split(","))):
        size = size_of(prompt_len, args.chunk_len, config)
        server.flush()
        work = Workload(size, seed=number)
        began = time.perf_counter()
        # A round that does not count: kernels are compiled, and graphs captured, at their first use.
        time_reuse(server, work, systems, 1, lambda what: None)
        rows = time_reuse(server, work, systems, args.repeats, lambda what: None)
        spread = {system.name: spread_of(server, work, system) for system in systems if scores(system)}
        yield {"prompt": str(size), "prompt_len": size.prompt_len, "rows": rows, "spread": spread}
        print(f"{size.prompt_len} tokens: {time.perf_counter() - began:.0f} s", flush=True)
        for row in rows:
            print(f"  {row['system']:28} {row['seconds']['median'] * 1e3:8.1f} ms {row['speedup']:6.2f}x", flush=True)


def scores(system: System) -> bool:
    """Whether its method chooses rows by scores, in the forward or from a stored statistic."""
    if system is STOCK:
        return False
    method = METHODS[system.options["method"]]
    return method.stage is not Stage.BEFORE or method.statistic is not None


def spread_of(server: Server, work: Workload, system: System) -> dict[str, float]:
    """Shares of the chosen rows of one prompt in its second half, and at the beginnings of chunks.

    Raises:
        RuntimeError: the rows stand at the beginning of the prompt, or of each chunk, as with equal scores.
    """
    prompt = work.fresh()
    options = {"spans": prompt.spans, "explain": True, **system.options}
    chunks = [one for one in server.generate(prompt.ids, chunk_cache=options).chunk_cache["chunks"] if "variant" in one]
    positions = [(at - one["start"], at) for one in chunks for at in one["recomputed_positions"]]
    middle = chunks[len(chunks) // 2]["start"]
    late = sum(at >= middle for _, at in positions) / len(positions)
    first_len = system.options["ratio"] * work.size.chunk_len
    first = sum(within < first_len for within, _ in positions) / len(positions)
    if late < MIN_LATE or first > MAX_FIRST:
        problem = f"{late:.0%} of its rows are in the second half, {first:.0%} at the beginnings of chunks"
        raise RuntimeError(f"{system.name}: {problem}: are all scores equal?")
    return {"late": late, "first": first}


def main() -> int:
    args = parse_args()
    folder, config = model_of(args)
    flags = ["--skip-tokenizer-init", *args.flags.split()]
    log_path = ROOT / ".cache" / "bench" / "server-long.log"
    with Server(folder, "--chunk-cache", *flags, env=offline_env(), log_path=log_path) as server:
        print(f"server started in {server.start_s:.0f} s", flush=True)
        parts = list(measure(server, args, config))
    report = {**describe_run(), "model": str(size_of(8192, 512, config).shape), "flags": flags, "repeats": args.repeats}
    report["parts"] = parts
    lines = [
        "# Long prompts",
        "",
        *run_markdown(report),
        f"- model: {report['model']}",
        f"- flags: `{shlex.join(flags)}`",
    ]
    lines.append(f"- {args.repeats} requests per system, in turns; whole request of one token, on the client's side")
    header = ("system", "recomputed", "computed", "ms: median (min-max)", "speed-up")
    for part in parts:
        cells = [
            (
                row["system"],
                row["recomputed_tokens"],
                row["computed_tokens"],
                Spread(**{k: v if k == "num" else v * 1e3 for k, v in row["seconds"].items()}).text(1),
                f"{row['speedup']:.1f}x",
            )
            for row in part["rows"]
        ]
        lines += ["", f"## {part['prompt']}", "", *markdown_table(header, cells)]
        where = [(name, f"{one['late']:.0%}", f"{one['first']:.0%}") for name, one in part["spread"].items()]
        lines += ["", *markdown_table(("chosen rows", "in the second half", "at chunks' beginnings"), where)]
    write_result(args.out, args.name, report, lines)
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
