"""How often a passage has the same token ids wherever it stands, by kind of tokenizer.

    python benchmark/index/bench_chunk_ids.py DATA.jsonl ... [--tokenizers FOLDER ...] [--passages N]

Passages of the data are marked in some places; each is a hit where it has the ids that `warm` computes. Beside the
tokenizers of models, small ones are trained on the data, of the kinds that models have. `outside`: of the tokens that a
passage has by itself, those that are no part of its chunk. That marks change no token of the prompt is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, trainers
from tokenizers import pre_tokenizers as pre
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from chunk_cache.prompt.marked_ids import encode_chunk, encode_marked
from chunk_cache.prompt.marks import Mark, MarkedText

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from benchmark.common.results import RESULTS_DIR, describe_run, markdown_table, named, run_markdown, write_result

PLACES: Mapping[str, tuple[str, str, str]] = {
    "first": ("Answer from the passages.\n\n", "{}", "\n\nWhat is it?"),
    "behind another": ("{}\n\n", "{}", "\n\nWhat is it?"),
    "last": ("{}\n\n", "{}", " \nAnswer:"),
    "a line": ("{}\n", "{}\n", "What is it?"),
    "a line, then an empty one": ("{}\n", "{}\n", "\nWhat is it?"),
    "behind a sign": ("Passage:", "{}", "(end)"),
    "in front of all": ("", "{}", "\n\nWhat is it?"),
    "behind a blank": ("Context: ", "{}", "\n\nWhat is it?"),
}
"""The text in front of a chunk, perhaps with another passage; the chunk, as it is warmed too; the text behind it."""
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
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.pre_tokenizer = pre.Metaspace(prepend_scheme=scheme)
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=_SIZE, special_tokens=["<unk>", *byte_tokens], limit_alphabet=300)
    core.train_from_iterator([line for text in texts for line in text.split("\n")], trainer)
    trained = json.loads(core.to_str())
    trained["added_tokens"] = trained["added_tokens"][:1]  # a byte's token is no text that one could write
    core = Tokenizer.from_str(json.dumps(trained))
    core.decoder = decoders.Sequence([decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    if by_normalizer:
        core.pre_tokenizer = None  # type: ignore[assignment]
        core.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    return core


FAMILIES: Mapping[str, Callable[[Sequence[str]], Tokenizer]] = {
    "like Llama 2": lambda texts: of_words(texts, "always", by_normalizer=True),
    "Metaspace first": lambda texts: of_words(texts, "first"),
    "Metaspace always": lambda texts: of_words(texts, "always"),
    "like Mistral": lambda texts: of_words(texts, "never"),
    "like Llama 3": lambda texts: of_bytes(texts, LLAMA_3),
    "like GPT-2": of_bytes,
    "like GPT-2, a space in front": lambda texts: of_bytes(texts, add_prefix_space=True),
    "like DeepSeek": lambda texts: of_bytes(texts, *DEEPSEEK),
}


def measure(tokenizer: Any, texts: Sequence[str]) -> list[float]:
    """The share of hits in each place, the mean number of tokens outside, and of those of a chunk."""
    same, num_outside, num_inside = dict.fromkeys(PLACES, 0), 0, 0
    for i, text in enumerate(texts):
        for place, (front, form, behind) in PLACES.items():
            chunk = form.format(text)
            pieces = (front.format(texts[i - 1]), chunk, behind)
            encoded = encode_marked(tokenizer, MarkedText(pieces, (None, Mark(place, chunk), None)))
            assert encoded.ids == tokenizer.encode("".join(pieces)), "marks have changed the prompt"
            ((start, end),) = encoded.spans
            length = len(tokenizer.encode(f"\n{chunk}")) - len(tokenizer.encode("\n"))
            same[place] += encoded.ids[start:end] == encode_chunk(tokenizer, chunk, place)[0]
            num_inside, num_outside = num_inside + end - start, num_outside + length - (end - start)
    num = len(texts)
    return [*(count / num for count in same.values()), *(n / num / len(PLACES) for n in (num_outside, num_inside))]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", nargs="+", type=Path, help="JSON lines with `chunks`")
    parser.add_argument("--tokenizers", nargs="*", type=Path, default=[], help="folders of models")
    parser.add_argument("--passages", type=int, default=500)
    parser.add_argument("--out", type=Path, default=RESULTS_DIR / "index")
    args = parser.parse_args()
    run = describe_run()
    lines = [line for path in args.data for line in path.read_text(encoding="utf-8").splitlines()]
    texts = list(dict.fromkeys(chunk.strip() for line in lines for chunk in json.loads(line)["chunks"]))
    chosen = texts[:: -(-len(texts) // args.passages)]
    found = {path.name: measure(AutoTokenizer.from_pretrained(path), chosen) for path in args.tokenizers}
    for family, train in FAMILIES.items():
        found[family] = measure(PreTrainedTokenizerFast(tokenizer_object=train(texts)), chosen)
    rows = [
        [name, *(f"{one:.0%}" for one in row[:-2]), f"{row[-2]:.1f}", f"{row[-1]:.0f}"] for name, row in found.items()
    ]
    header, data = ["tokenizer", *PLACES, "outside", "in the chunk"], [named(path) for path in args.data]
    told = (
        f"{len(chosen)} passages of {', '.join(data)}: how many have the ids that `warm` computes, by their place in a "
        "prompt; tokens that a passage has by itself and its chunk has not; tokens of the chunk. Behind a blank, or in "
        "front of all where the tokenizer puts one there, a passage is another chunk, of which the same holds."
    )
    head = ["# The ids of a passage in different places", "", *run_markdown(run), ""]
    report = {"run": run, "data": data, "columns": header[1:], "found": found}
    table = markdown_table(header, rows)
    write_result(args.out, "chunk_ids", report, [*head, told, "", *table])
    print("\n".join(table))
