"""Time to first token of a model with states (Qwen3.5's class), by the length of its passages, against stock SGLang.

    python benchmark/ttft/bench_states.py [--quick] [--repeats N] [--out FOLDER]

Prompts are 4,096 tokens in passages of equal length, in a random order, with new text in front and a new question. Each
passage was computed once behind the system prompt before. Stock is `"mode": "off"` on the same server, with SGLang's
prefix cache on. For new passages, computing and remembering is compared with computing only: the cost if nothing
repeats. Weights are random: time does not depend on them. Results: `benchmark/results/ttft/states.*`.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmark.common.machine import CACHE_DIR
from benchmark.common.models import make_random
from benchmark.common.results import Spread, describe_run, markdown_table, result_dir, run_markdown, write_result
from benchmark.common.server import Server, ServerError, leave_on_sigterm, offline_env

VOCAB, STATE_SIZE = 2048, 128
SYSTEM_LEN, GREETING_LEN, QUESTION_LEN = 96, 16, 32
STOCK = "stock (prefix cache on)"
SYSTEMS: dict[str, dict[str, Any]] = {
    STOCK: {"mode": "off"},
    "seams alone": {"method": "seams", "ratio": 0.0},
    "seams, ratio 0.3": {"method": "seams", "ratio": 0.3},
    "seams, ratio 1.0": {"method": "seams", "ratio": 1.0},
}


def model_config(layers: int, hidden: int) -> dict[str, Any]:
    """Configuration of Qwen3.5's text class: three in four layers have states, of their real size; one attends."""
    return {
        "model_type": "qwen3_5_text",
        "torch_dtype": "float32",
        "vocab_size": VOCAB,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "layer_types": ["full_attention" if (i + 1) % 4 == 0 else "linear_attention" for i in range(layers)],
        "full_attention_interval": 4,
        "linear_num_key_heads": hidden // STATE_SIZE,
        "linear_num_value_heads": hidden // STATE_SIZE,
        "linear_key_head_dim": STATE_SIZE,
        "linear_value_head_dim": STATE_SIZE,
        "max_position_embeddings": 16384,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }


class Bench:
    """One server, and prompts of random tokens for it."""

    def __init__(self, server: Server, seed: int) -> None:
        self._server = server
        self._draw = random.Random(seed)
        self._system = self._tokens(SYSTEM_LEN)

    def _tokens(self, length: int) -> list[int]:
        return [self._draw.randrange(3, VOCAB) for _ in range(length)]

    def _ask(self, chunks: list[list[int]], options: dict[str, Any]) -> Any:
        ids, spans = [*self._system, *self._tokens(GREETING_LEN)], []  # so that no passage is in the exact prefix
        for chunk in chunks:
            spans.append([len(ids), len(ids) + len(chunk)])
            ids += chunk
        ids += self._tokens(QUESTION_LEN)
        return self._server.generate(ids, chunk_cache={"spans": spans, **options})

    def measure(self, length: int, num: int, repeats: int) -> dict[str, Any]:
        """Seconds and tokens by system, seconds of new passages by mode, bytes of a passage's transition and KV."""
        self._server.post("/flush_cache", {})
        chunks = [self._tokens(length) for _ in range(num + 1)]
        for chunk in chunks:
            self._ask([chunk], {})
        seconds: dict[str, list[float]] = {name: [] for name in SYSTEMS}
        replies = {}
        pool = self._server.get("/chunk_cache/stats").json()["ranks"][0]["tiers"]["pool"]
        assert pool["state_variants"] == num + 1, "every passage has its transition"
        for _ in range(repeats):
            for name in self._draw.sample(list(SYSTEMS), len(SYSTEMS)):
                timed = self._ask(self._draw.sample(chunks, num), SYSTEMS[name])
                seconds[name].append(timed.total_s)
                replies[name] = timed.chunk_cache
                assert timed.chunk_cache["reused_tokens"] == (0 if name == STOCK else num * length)
        new: dict[str, list[float]] = {"off": [], "auto": []}
        for _ in range(repeats):
            for mode in self._draw.sample(list(new), 2):
                new[mode].append(self._ask([self._tokens(length) for _ in range(num)], {"mode": mode}).total_s)
        return {
            "length": length,
            "num": num,
            "seconds": {name: Spread.of(values).as_dict() for name, values in seconds.items()},
            "reused": {name: reply["reused_tokens"] for name, reply in replies.items()},
            "recomputed": {name: reply["recomputed_tokens"] for name, reply in replies.items()},
            "new": {mode: Spread.of(values).as_dict() for mode, values in new.items()},
            "state_bytes": pool["state_bytes"] // pool["state_variants"],
            "kv_bytes": pool["bytes"] // pool["tokens"] * length,
        }


def to_markdown(report: dict[str, Any]) -> list[str]:
    """The page of the result."""
    lines = ["# Passages in a model with states", "", *run_markdown(report), f"- model: {report['model']}", ""]
    lines += ["Seconds of a whole request of one token: median (min-max), and against stock on the same server.", ""]
    rows = []
    for one in report["rows"]:
        stock = one["seconds"][STOCK]["median"]
        for name, spread in one["seconds"].items():
            shown = f"{spread['median']:.3f} ({spread['min']:.3f}-{spread['max']:.3f})"
            tokens = f"{one['reused'][name]} ({one['recomputed'][name]})"
            rows.append((one["length"], one["num"], name, shown, f"{stock / spread['median']:.2f}x", tokens))
    names = ["tokens of a passage", "passages", "system", "seconds", "", "reused (of these recomputed)"]
    lines += [*markdown_table(names, rows), "", "New passages, and what one takes:", ""]
    rows = [
        (
            one["length"],
            *(f"{one['new'][mode]['median']:.3f}" for mode in ("off", "auto")),
            f"{one['new']['auto']['median'] / one['new']['off']['median'] - 1:+.1%}",
            *(f"{one[name] / 1e6:.2f}" for name in ("state_bytes", "kv_bytes")),
        )
        for one in report["rows"]
    ]
    names = ["tokens of a passage", "computed, s", "computed and remembered, s", "", "transition, MB", "KV, MB"]
    return [*lines, *markdown_table(names, rows)]


def main() -> int:
    leave_on_sigterm()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model and short prompts: a check, no result")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--lengths", nargs="+", type=int, default=[256, 512, 1024, 2048], metavar="TOKENS")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    run = describe_run()
    layers, hidden, total = (4, 256, 512) if args.quick else (12, 768, 4096)
    config = model_config(layers, hidden)
    folder = make_random(CACHE_DIR / f"states-{layers}x{hidden}", config)
    flags = ["--chunk-cache", "--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "65536"]
    with Server(folder, *flags, env=offline_env(), log_path=CACHE_DIR / "server-states.log") as server:
        bench = Bench(server, 0)
        rows = []
        for length in (128, 256) if args.quick else args.lengths:
            rows.append(bench.measure(length, total // length, args.repeats))
            print(json.dumps(rows[-1]["seconds"]), flush=True)
    about = (
        f"{layers} layers x {hidden}, one in four attends; {hidden // STATE_SIZE} states of {STATE_SIZE} x {STATE_SIZE}"
    )
    report = {**run, "model": f"Qwen3.5's class, {about}, fp32, random weights; seams of 64 tokens", "rows": rows}
    for path in write_result(result_dir(args, "ttft"), "states", report, to_markdown(report)):
        print(path)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ServerError as error:
        sys.exit(f"error: {error}")
