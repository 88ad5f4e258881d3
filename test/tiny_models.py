"""Small seeded models with their tokenizers, written as Hugging Face folders on the spot.

- `make_model(kind, out_dir, ...)` writes one and returns its folder; the same arguments give the same weights.
- `make_tokenizer(vocab_size, add_bos=...)` is the tokenizer it comes with: byte-level, so any text has ids.

The weights are random, but wider than a fresh initialisation: attention is peaked and log-probabilities differ by
whole units between contexts. A test that compares them would pass on near-uniform logits whatever was computed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

Kind = Literal["llama", "qwen2", "qwen3", "mistral"]
KINDS: tuple[Kind, ...] = ("llama", "qwen2", "qwen3", "mistral")

_CLASSES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}

# Parameters of `rope` by name; the original context is a quarter of the model's, so that tests cross it.
_ROPE: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0},
}

BOS, EOS, PAD = "<|bos|>", "<|eos|>", "<|pad|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, "<|user|>", "<|assistant|>", "<|system|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_model(
    kind: Kind,
    out_dir: str | Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    dtype: torch.dtype = torch.float32,
    rope: str | None = None,
    tokenizer: bool = True,
    seed: int = 0,
    max_position: int = 8192,
) -> Path:
    """Writes a random model of class `kind` as safetensors into `out_dir` and returns the folder.

    Args:
        hidden, heads, kv_heads: `hidden` must be a multiple of `heads`, `heads` of `kv_heads`.
        vocab: at least 262 (256 bytes and the special tokens) when a tokenizer is made.
        rope: None, "linear", "llama3" or "yarn"; the original context is `max_position // 4`.
        tokenizer: False leaves the folder without any tokenizer file (`--skip-tokenizer-init`).

    A folder that already holds exactly this model is left as it is.
    """
    out_dir = Path(out_dir)
    recipe = json.dumps(
        [kind, layers, hidden, heads, kv_heads, vocab, str(dtype), rope, tokenizer, seed, max_position, 1]
    )
    mark = out_dir / ".recipe.json"
    if mark.exists() and mark.read_text() == recipe:
        return out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    config_class, model_class = _CLASSES[kind]
    config = config_class(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=max_position,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        rope_parameters=_rope_parameters(rope, max_position),
        **({"sliding_window": None} if kind == "mistral" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config).to(torch.float32)
        _widen(model)
    model.to(dtype).save_pretrained(out_dir, safe_serialization=True)
    if tokenizer:
        make_tokenizer(vocab, add_bos=kind in ("llama", "mistral")).save_pretrained(out_dir)
    mark.write_text(recipe)
    return out_dir


def make_tokenizer(vocab_size: int = 512, *, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with special tokens, filler up to `vocab_size`, a chat template and, if wanted, BOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*SPECIAL_TOKENS, *alphabet]
    if vocab_size < len(tokens):
        raise ValueError(f"vocab: {vocab_size} is too small for a byte-level tokenizer; use at least {len(tokens)}")
    merges, fillers = _merges(alphabet, vocab_size - len(tokens))
    vocab = {token: index for index, token in enumerate([*tokens, *fillers])}
    core = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    if add_bos:
        core.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, vocab[BOS])]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD, chat_template=CHAT_TEMPLATE
    )


def _merges(alphabet: list[str], count: int) -> tuple[list[tuple[str, str]], list[str]]:
    """`count` merges of two characters, frequent English pairs first: a text tokenizes differently at a cut."""
    space = "\u0120"
    pairs = [(space, letter) for letter in "taoswcbpfmdrhiulgeny"]
    pairs += [(a, b) for a in "etaoinsrhl" for b in "etaoinsrhldc" if a != b or a in "tels"]
    pairs += [(a, b) for a in alphabet for b in alphabet if (a, b) not in set(pairs)] if count > len(pairs) else []
    chosen = pairs[:count]
    return chosen, [a + b for a, b in chosen]


def _rope_parameters(name: str | None, max_position: int) -> dict[str, Any]:
    base: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    if name is None:
        return base
    extra = _ROPE[name]
    original = {} if name == "linear" else {"original_max_position_embeddings": max_position // 4}
    return {**base, "rope_type": name, **extra, **original}


def _widen(model: torch.nn.Module) -> None:
    """Scales the matrices so that signals keep unit size and attention logits spread over several units."""
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.2)
            elif "q_norm" in name or "k_norm" in name:  # they undo the scale of the projections, so give it here
                torch.nn.init.uniform_(parameter, 1.2, 2.0)
            else:  # norms: not all one, so that a forgotten norm shows
                torch.nn.init.uniform_(parameter, 0.7, 1.3)
            continue
        fan_in = parameter.shape[1]
        if "embed_tokens" in name:
            std = 1.0
        elif "q_proj" in name or "k_proj" in name:
            std = 1.6 / fan_in**0.5
        elif "lm_head" in name:
            std = 2.0 / fan_in**0.5
        else:
            std = 1.0 / fan_in**0.5
        torch.nn.init.normal_(parameter, std=std)
