"""A draft of one layer for a small Llama: `train_draft` fits an EAGLE head to what the model itself answers.

It is given, at each position, the token behind it and the model's hidden state, and learns the model's next hidden
state and the token that the model takes then.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

BATCH = 8


class _Head(torch.nn.Module):
    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.layer = LlamaDecoderLayer(config, 0)
        self.layer.input_layernorm = torch.nn.Identity()  # EAGLE has none
        self.rotary = LlamaRotaryEmbedding(config)

    def forward(self, ahead: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Embeddings of the tokens behind, and hidden states, both `[1, length, hidden]`; the next hidden states."""
        inputs = self.fc(torch.cat([ahead, hidden], -1))
        positions = torch.arange(inputs.shape[1])[None]
        mask = torch.full((inputs.shape[1],) * 2, float("-inf")).triu(1)[None, None]
        turned = self.rotary(inputs, positions)
        out = self.layer(inputs, attention_mask=mask, position_ids=positions, position_embeddings=turned)
        return out if isinstance(out, torch.Tensor) else out[0]


def train_draft(
    model_dir: Path, out_dir: Path, prompts: Sequence[Sequence[int]], *, answer_len: int, epochs: int
) -> Path:
    """Writes the draft as a checkpoint that SGLang loads with `--speculative-draft-model-path`, and returns its folder.

    Args:
        prompts: token ids that the model answers; none of them should be measured.
        answer_len: tokens of each answer.
    """
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    model.config._attn_implementation = "eager"
    texts = [_answered(model, prompt, answer_len) for prompt in prompts]
    head = _Head(model.config)
    head.layer.load_state_dict(model.model.layers[-1].state_dict(), strict=False)
    steps = epochs * len(texts) // BATCH
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        for i in torch.randint(len(texts), (BATCH,)).tolist():
            ids, hidden, taken = texts[i]
            embedded = model.model.embed_tokens(ids).detach()
            out = head(embedded[:, 1:], hidden[:, :-1])
            told = torch.nn.functional.cross_entropy(model.lm_head(out)[0], taken[0, 1:])
            near = torch.nn.functional.smooth_l1_loss(out, hidden[:, 1:])
            ((told + near) / BATCH).backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return _save(head, model_dir, out_dir)


@torch.no_grad()
def _answered(
    model: torch.nn.Module, prompt: Sequence[int], length: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids of prompt and answer, hidden states behind the last norm, and the token that the model takes at each."""
    ids, cache = torch.tensor([prompt]), None
    new = ids
    for _ in range(length):
        out = model(new, past_key_values=cache, use_cache=True)
        cache, new = out.past_key_values, out.logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], 1)
    out = model(ids, output_hidden_states=True)
    return ids, out.hidden_states[-1], out.logits.argmax(-1)


def _save(head: _Head, model_dir: Path, out_dir: Path) -> Path:
    out_dir.mkdir(parents=True, exist_ok=True)
    config = json.loads((model_dir / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle"], "num_hidden_layers": 1, "torch_dtype": "float32"}
    config["tie_word_embeddings"] = False  # SGLang gives it those of the model
    (out_dir / "config.json").write_text(json.dumps(config, indent=2))
    tensors = {f"layers.0.{name}": value for name, value in head.layer.state_dict().items()}
    tensors |= {f"fc.{name}": value for name, value in head.fc.state_dict().items()}
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        out_dir / "model.safetensors",
        metadata={"format": "pt"},
    )
    return out_dir
