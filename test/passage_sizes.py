"""Bytes that a passage's KV takes, calculated from the configurations of models.

Verbs: `token_bytes` (of a published checkpoint), `table` (of docs/tiers.md). `python test/passage_sizes.py` writes it
anew. Test: unit/kv/test_passage_sizes.py. Of models with states: state_costs.py.
"""

from __future__ import annotations

from doc_pages import write_made_part
from stock_choices import checkpoints

PROGRAM, PAGE = "test/passage_sizes.py", "tiers.md"
MODELS = (
    "Qwen/Qwen2.5-7B-Instruct",
    "deepseek-ai/DeepSeek-V3",
    "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Llama-3.1-70B-Instruct",
)
PASSAGE_LEN, STORE = 400, 100 * 10**9


def token_bytes(name: str) -> int:
    """KV of a token in bf16, in all layers; with latent attention the latent and the rotated part of its key."""
    config = checkpoints()[name]["config"]
    if "kv_lora_rank" in config:
        size = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        head = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        size = 2 * config["num_key_value_heads"] * head
    return 2 * config["num_hidden_layers"] * size


def table() -> str:
    """Lines by model."""
    lines = [
        f"| model | bytes a token | passage of {PASSAGE_LEN} tokens | such passages in {STORE // 10**9} GB |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in MODELS:
        size = token_bytes(name)
        passage = PASSAGE_LEN * size
        short = name.partition("/")[2].removesuffix("-Instruct")
        lines.append(f"| {short} | {size:,} | {passage / 1e6:.0f} MB | {STORE // passage:,} |")
    return "\n".join(lines)


if __name__ == "__main__":
    write_made_part(PAGE, PROGRAM, table())
