"""The demo's corpus: this repository's own prose, cut into passages, and questions about it.

`read_corpus`: files -> sections; `cut_passages`: sections -> passages of similar length; `train_on_corpus`: both, with
a tokenizer trained on the text; `ask_questions`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from benchmark.common.machine import ROOT
from benchmark.common.models import train_tokenizer
from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS
from transformers import PreTrainedTokenizerFast

# Missing files are skipped.
PATTERNS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/**/*.md", "LICENSE")
_HEADING = re.compile(r"^(#{1,4})\s+(.+?)\s*$")
_SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+")
_WORD = re.compile(r"[A-Za-z][a-z]{4,}")


@dataclass(frozen=True)
class Section:
    """A heading of a file with the paragraphs under it; `title` is `file: heading`."""

    title: str
    paragraphs: tuple[str, ...]


@dataclass(frozen=True)
class Passage:
    """A text that is retrieved as a whole: one chunk of a prompt."""

    title: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question, and how many passages are retrieved for it."""

    text: str
    num_passages: int


def read_corpus(root: Path) -> list[Section]:
    """All sections of the files that exist, in a fixed order.

    Raises:
        FileNotFoundError: none of the files has any text.
    """
    files = sorted({path for pattern in PATTERNS for path in root.glob(pattern) if path.is_file()})
    sections = [
        section
        for path in files
        for section in _sections(path.stem, path.read_text(encoding="utf-8", errors="replace"))
    ]
    if not sections:
        raise FileNotFoundError(f"no text found: {root} has none of {', '.join(PATTERNS)}")
    return sections


def _sections(name: str, text: str) -> list[Section]:
    found, title, lines = [], name, []
    in_code = False
    for line in [*text.splitlines(), "# end"]:
        in_code ^= line.lstrip().startswith("```")
        heading = None if in_code else _HEADING.match(line)
        if heading is None:
            lines.append(line)
            continue
        paragraphs = tuple(p.strip("\n") for p in re.split(r"\n\s*\n", "\n".join(lines)) if p.strip())
        if paragraphs:
            found.append(Section(title, paragraphs))
        title, lines = f"{name}: {heading[2].strip('`# ')}", []
    return found


def cut_passages(
    sections: Iterable[Section], count_tokens: Callable[[str], int], *, min_len: int = 150, max_len: int = 300
) -> list[Passage]:
    """Passages of about `min_len` to `max_len` tokens; only paragraphs longer than `max_len` are cut.

    Args:
        count_tokens: length of a text in tokens.
    """
    passages: list[Passage] = []
    title, parts, length = "", list[str](), 0
    for section in sections:
        for piece in _pieces(section, count_tokens, max_len):
            piece_len = count_tokens(piece)
            if parts and length + piece_len > max_len:
                passages.append(_passage(title, parts))
                parts, length = [], 0
            title = title if parts else section.title
            parts.append(piece)
            length += piece_len
        if length >= min_len:
            passages.append(_passage(title, parts))
            parts, length = [], 0
    if parts:
        passages.append(_passage(title, parts))
    return passages


def _passage(title: str, parts: Sequence[str]) -> Passage:
    return Passage(title, f"[{title}]\n" + "\n\n".join(parts) + "\n")


def _pieces(section: Section, count_tokens: Callable[[str], int], max_len: int) -> list[str]:
    """The paragraphs of a section; long ones are cut at line breaks or at the ends of sentences."""
    pieces = []
    for paragraph in section.paragraphs:
        if count_tokens(paragraph) <= max_len:
            pieces.append(paragraph)
            continue
        separator = "\n" if paragraph.count("\n") > 2 else " "
        units = paragraph.split("\n") if separator == "\n" else _SENTENCE_END.split(paragraph)
        taken: list[str] = []
        for unit in units:
            if taken and count_tokens(separator.join([*taken, unit])) > max_len:
                pieces.append(separator.join(taken))
                taken = []
            taken.append(unit)
        pieces.append(separator.join(taken))
    return pieces


def train_on_corpus(vocab: int) -> tuple[PreTrainedTokenizerFast, list[Passage]]:
    """A tokenizer trained on this repository's prose, and the prose cut into passages."""
    sections = read_corpus(ROOT)
    tokenizer = train_tokenizer((text for section in sections for text in section.paragraphs), vocab)
    return tokenizer, cut_passages(sections, lambda text: len(tokenizer.tokenize(text)))


def ask_questions(passages: Sequence[Passage], num_questions: int, num_topics: int, seed: int) -> list[Question]:
    """Questions about `num_topics` topics in turns, so that passages are retrieved again in other combinations.

    A topic is a pair of neighbouring passages of the corpus; each question quotes random words of both.
    """
    draw = random.Random(seed)
    pairs = list(pairwise(passages)) or [(passages[0], passages[0])]
    topics = draw.sample(pairs, min(num_topics, len(pairs)))
    questions = []
    for i in range(num_questions):
        first, second = draw.sample(topics[i % len(topics)], 2)
        words = list(dict.fromkeys(_quote(draw, first, 4) + _quote(draw, second, 2)))
        heading = first.title.rpartition(": ")[2]
        text = f"What does '{heading}' say about {', '.join(words)}?\nAnswer:"
        questions.append(Question(text, draw.randint(4, 6)))
    return questions


def _quote(draw: random.Random, passage: Passage, num_words: int) -> list[str]:
    """Up to `num_words` random distinct words of the passage, without stop words."""
    words = dict.fromkeys(word.lower() for word in _WORD.findall(passage.text))
    words = [word for word in words if word not in ENGLISH_STOP_WORDS] or ["it"]
    return draw.sample(words, min(num_words, len(words)))
