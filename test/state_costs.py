"""What reuse of passages costs and saves in models with states, calculated from their configurations.

Verbs: `Costs.of` (a published checkpoint), `table` (of docs/hybrids.md). `python test/state_costs.py` writes it anew.
Test: unit/kv/test_state_costs.py. Nothing here was measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from doc_pages import write_made_part
from sglang_chunk_cache.kv.state_layout import StateLayout
from stock_choices import checkpoints

PROGRAM, PAGE = "test/state_costs.py", "hybrids.md"
MODELS = ("Qwen/Qwen3.5-35B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "Qwen/Qwen3.5-27B")
PROMPTS, PASSAGES = (8192, 32768), (512, 1024, 2048)
SEAM_LEN, BLOCK = 64, 64
FLOPS = 400e12
"""Of a prefill a second, on one GPU: 40 % of what an H100 is said to do in bf16."""
LINKS = {"PCIe 4": 25e9, "PCIe 5": 50e9}
"""Bytes a second from page-locked host memory, about 80 % of what the link is said to do."""


@dataclass(frozen=True)
class Costs:
    """Of one model on one GPU.

    Attributes:
        transition: bytes, of a passage of any length.
        kv: bytes of a token.
        flops: of a token, but for attention; `attention_flops` of a token for each one in front of it.
    """

    transition: int
    kv: int
    flops: int
    attention_flops: int

    @classmethod
    def of(cls, name: str) -> Costs:
        """Of a checkpoint of checkpoints.json, whose weights and KV are bf16."""
        found = checkpoints()[name]["config"]
        config: dict[str, Any] = found.get("text_config", found)
        hidden, heads, kv_heads, head = (
            config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        )
        value_heads, value_size, key_size = (
            config[f"linear_{key}"] for key in ("num_value_heads", "value_head_dim", "key_head_dim")
        )
        keys, values = config["linear_num_key_heads"] * key_size, value_heads * value_size
        types = config["layer_types"]
        with_states = tuple(i for i, kind in enumerate(types) if kind == "linear_attention")
        width, num_full = config["linear_conv_kernel_dim"] - 1, len(types) - len(with_states)
        layout = StateLayout(
            with_states, value_heads, key_size, value_size, 2 * keys + values, width, "bfloat16", "float32", SEAM_LEN
        )
        if "num_experts" in config:
            used = config["num_experts_per_tok"] * config["moe_intermediate_size"]
            mlp = hidden * (3 * (used + config["shared_expert_intermediate_size"]) + config["num_experts"])
        else:
            mlp = 3 * hidden * config["intermediate_size"]
        full = hidden * head * (3 * heads + 2 * kv_heads)  # queries have gates
        linear = hidden * (2 * keys + 3 * values + 2 * value_heads)
        rule = value_heads * (3 * key_size * value_size + BLOCK * 2 * (key_size + value_size))
        weights = num_full * full + len(with_states) * (linear + rule) + len(types) * mlp
        return cls(layout.num_bytes, 4 * num_full * kv_heads * head, 2 * weights, 4 * num_full * heads * head)

    def token_s(self, prompt_len: int) -> float:
        """Seconds that an average token of a prompt is computed."""
        return (self.flops + self.attention_flops * prompt_len / 2) / FLOPS

    def break_even(self, prompt_len: int, link: str) -> int:
        """Tokens from which on a passage is reused sooner than computed: its seam, and what a transfer takes."""
        return SEAM_LEN + round(self.transition / LINKS[link] / self.token_s(prompt_len))


def table() -> str:
    """Lines by model; times in ms."""
    lines = [
        "| model | transition of a passage | as much as the KV of | its KV, of 512, 1,024, 2,048 tokens | "
        "transfer, PCIe 4, 5 | prompt | computing these, without seams | break-even, PCIe 4, 5 |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in MODELS:
        costs = Costs.of(name)
        sizes = [f"{costs.transition / 1e6:.0f} MB", f"{round(costs.transition / costs.kv, -2):,.0f} tokens"]
        kv = ", ".join(f"{costs.kv * length / 1e6:.0f}" for length in PASSAGES)
        transfer = ", ".join(f"{1e3 * costs.transition / rate:.1f}" for rate in LINKS.values())
        for prompt_len in PROMPTS:
            saved = ", ".join(f"{1e3 * (length - SEAM_LEN) * costs.token_s(prompt_len):.0f}" for length in PASSAGES)
            least = ", ".join(str(costs.break_even(prompt_len, link)) for link in LINKS)
            cells = [name.partition("/")[2].removesuffix("-Instruct"), *sizes, f"{kv} MB"]
            cells += [f"{transfer} ms", f"{prompt_len:,}", f"{saved} ms", f"{least} tokens"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    write_made_part(PAGE, PROGRAM, table())
