"""Random Llama models for measurements, written as Hugging Face folders on the spot.

- `LlamaShape` says how large; `make_llama` writes one and returns its folder. The same shape and seed give the same
  weights, and a folder that already holds them is left as it is.
- `train_tokenizer` makes a byte-level BPE tokenizer from texts.

The weights have the spread of a fresh initialisation: time and memory do not depend on them, answers mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
SPECIAL_TOKENS = (PAD, BOS, EOS)
FIRST_PLAIN_ID = len(SPECIAL_TOKENS)


@dataclass(frozen=True)
class LlamaShape:
    """Size of a model; `hidden` is a multiple of `heads`, `heads` of `kv_heads`."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    max_position: int = 16384

    @property
    def num_parameters(self) -> int:
        """All weights but the norms."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocab * self.hidden

    def __str__(self) -> str:
        return (
            f"Llama, {self.layers} layers x {self.hidden}, {self.heads} heads of {self.hidden // self.heads}, "
            f"{self.num_parameters / 1e6:.0f} M parameters"
        )


def make_llama(
    out_dir: str | Path, shape: LlamaShape, *, tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 0
) -> Path:
    """Writes a random fp32 model as safetensors into `out_dir`, with `tokenizer` if given, and returns the folder."""
    out_dir = Path(out_dir)
    recipe = json.dumps([asdict(shape), seed, 1])
    mark = out_dir / ".recipe.json"
    if not (mark.exists() and mark.read_text() == recipe):
        out_dir.mkdir(parents=True, exist_ok=True)
        _write_weights(out_dir, shape, seed)
        mark.write_text(recipe)
    if tokenizer is not None:
        tokenizer.save_pretrained(out_dir)
    return out_dir


def _write_weights(out_dir: Path, shape: LlamaShape, seed: int) -> None:
    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.max_position,
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).to(torch.float32)
    transformers_logging.disable_progress_bar()
    model.save_pretrained(out_dir, safe_serialization=True)


def train_tokenizer(texts: Iterable[str], vocab: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of at most `vocab` tokens, trained on `texts`; it puts BOS in front of a prompt."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A {BOS} $B", special_tokens=[(BOS, SPECIAL_TOKENS.index(BOS))]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=BOS, eos_token=EOS, pad_token=PAD)
