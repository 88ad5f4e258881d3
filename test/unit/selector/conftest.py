"""An auxiliary model of another class and tokenizer than the main model's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from tiny_models import make_model

TEXT = "The tower in Paris was built in 1889; it is 330 m tall. In Rome, says the guide, the café costs 12 €. "


def other_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level like the main one, but with longer tokens, and without BOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    core.train_from_iterator([TEXT] * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core)


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Several wait for each other where cores are shared, which costs tiny models most of their time."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def main_dir(model_root: Path) -> Path:
    return make_model("llama", model_root / "selector-main")


@pytest.fixture(scope="session")
def auxiliary_dir(model_root: Path) -> Path:
    folder = make_model("qwen2", model_root / "selector-auxiliary", layers=3, vocab=400, tokenizer=False, seed=3)
    other_tokenizer(380).save_pretrained(folder)
    return folder
