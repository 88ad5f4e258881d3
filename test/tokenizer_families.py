"""Small tokenizers of the kinds that models have: `FAMILIES` trains each on given texts.

How often passages keep their ids in other places of a prompt, by these kinds: benchmark/results/index/chunk_ids.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u30ff]+",
    r"[!-/:-~]?[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_SIZE = 8000
_SPACE = "\u2581"


def of_bytes(texts: Sequence[str], *splits: str, add_prefix_space: bool = False) -> Tokenizer:
    """Trains a byte-level tokenizer that splits as GPT-2 does, or by these patterns."""
    core = Tokenizer(models.BPE())
    last = pre.ByteLevel(add_prefix_space=add_prefix_space, use_regex=not splits)
    core.pre_tokenizer = pre.Sequence([*(pre.Split(Regex(split), "isolated") for split in splits), last])
    core.decoder = decoders.ByteLevel()
    alphabet = pre.ByteLevel.alphabet()
    core.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=_SIZE, initial_alphabet=alphabet))
    return core


def of_words(texts: Sequence[str], scheme: str, *, by_normalizer: bool = False) -> Tokenizer:
    """Trains one like SentencePiece's, with bytes for line breaks and what else it does not know.

    Args:
        scheme: which words get a space in front, as of `Metaspace`.
        by_normalizer: a normalizer puts one in front of the text instead, and nothing splits it.
    """
    core = _of_signs([line for text in texts for line in text.split("\n")], pre.Metaspace(prepend_scheme=scheme))
    if by_normalizer:
        core.pre_tokenizer = None  # type: ignore[assignment]
        core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    return core


def of_text(texts: Sequence[str]) -> Tokenizer:
    """Trains one like Gemma's: no space in front, nothing splits the text, line breaks are tokens, also several."""
    split = pre.Split(Regex(rf"\n+|{_SPACE}*[^{_SPACE}\n]+|{_SPACE}+"), "isolated")
    core = _of_signs(texts, split, normalizers.Replace(" ", _SPACE))
    core.pre_tokenizer = pre.Split(" ", "merged_with_previous")  # behind the normalizer there is none
    return core


def _of_signs(
    texts: Sequence[str], split: pre.PreTokenizer, normalizer: normalizers.Normalizer | None = None
) -> Tokenizer:
    """Trains one that writes spaces as a sign, with bytes for what it does not know."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = split
    if normalizer is not None:
        core.normalizer = normalizer
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=["<unk>", *byte_tokens], limit_alphabet=300)
    core.train_from_iterator(texts, trainer)
    trained = json.loads(core.to_str())
    trained["added_tokens"] = trained["added_tokens"][:1]  # a byte's token is no text that one could write
    core = Tokenizer.from_str(json.dumps(trained))
    core.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return core


FAMILIES: Mapping[str, Callable[[Sequence[str]], Tokenizer]] = {
    "like Llama 2": lambda texts: of_words(texts, "always", by_normalizer=True),
    "Metaspace first": lambda texts: of_words(texts, "first"),
    "Metaspace always": lambda texts: of_words(texts, "always"),
    "like Mistral": lambda texts: of_words(texts, "never"),
    "like Gemma": of_text,
    "like Llama 3": lambda texts: of_bytes(texts, LLAMA_3),
    "like GPT-2": of_bytes,
    "like GPT-2, a space in front": lambda texts: of_bytes(texts, add_prefix_space=True),
    "like DeepSeek": lambda texts: of_bytes(texts, *DEEPSEEK),
}
