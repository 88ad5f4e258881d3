"""Random models for measurements, written as Hugging Face folders on the spot.

- `LlamaShape` is the size of a model. `make_llama` writes a Llama of a shape and returns its folder; `cached_llama`
  returns the Llama that all measurements of a shape share. The same shape and seed give the same weights; a folder that
  already holds them is not written again.
- `make_random` writes a model of any class, given its configuration.
- `train_tokenizer` makes a byte-level BPE tokenizer from texts.

The weights are freshly initialised: time and memory do not depend on them, but answers mean nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from benchmark.common.machine import CACHE_DIR
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
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
        """All weights except the norms."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + 2 * self.vocab * self.hidden

    def __str__(self) -> str:
        return (
            f"Llama, {self.layers} layers x {self.hidden}, {self.heads} heads of {self.hidden // self.heads}, "
            f"{self.num_parameters / 1e6:.0f} M parameters"
        )


def cached_llama(shape: LlamaShape) -> Path:
    """Folder of the model that all measurements of this shape share; it has no tokenizer."""
    return make_llama(CACHE_DIR / f"llama-{shape.layers}x{shape.hidden}", shape)


def make_llama(
    out_dir: str | Path, shape: LlamaShape, *, tokenizer: PreTrainedTokenizerFast | None = None, seed: int = 0
) -> Path:
    """Writes a random fp32 model as safetensors into `out_dir`, with `tokenizer` if given, and returns the folder."""
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
    out_dir = _write_once(Path(out_dir), [asdict(shape), seed, 1], lambda: LlamaForCausalLM(config).float(), seed)
    if tokenizer is not None:
        tokenizer.save_pretrained(out_dir)
    return out_dir


def make_random(out_dir: Path, config: Mapping[str, Any]) -> Path:
    """Writes a random model of this `config.json`, in its number format; made on a GPU if there is one."""

    def make() -> Any:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
            return AutoModelForCausalLM.from_config(
                AutoConfig.for_model(**config), dtype=getattr(torch, config["torch_dtype"])
            )

    return _write_once(out_dir, [dict(config)], make)


def _write_once(out_dir: Path, recipe: list[Any], make: Callable[[], Any], seed: int = 0) -> Path:
    """Makes a model and writes it, unless the folder already holds the model of this recipe."""
    text, mark = json.dumps(recipe), out_dir / ".recipe.json"
    if mark.exists() and mark.read_text() == text:
        return out_dir
    out_dir.mkdir(parents=True, exist_ok=True)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make()
    transformers_logging.disable_progress_bar()
    model.save_pretrained(out_dir, safe_serialization=True, max_shard_size="4GB")
    mark.write_text(text)
    return out_dir


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
