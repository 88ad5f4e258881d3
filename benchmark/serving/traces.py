"""Traces: where the prompts of a benchmark come from. Each source returns prompts in the order of their arrival.

- `generated`: random token ids, by a `TraceSpec` (popularity, sessions, order, share of new chunks).
- `documents`: this repository's prose, passages retrieved by TF-IDF.
- `notes`: questions to a small trained model about shared sets of notes, with known answers.
- `from_ragpulse`: requests of a real RAG service; token ids are made up from the ids of its texts.
- `from_log`: a JSONL log of a user.

`generated` draws the lengths of questions and answers around their means.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

import numpy as np
from benchmark.common.models import FIRST_PLAIN_ID
from benchmark.common.ragpulse import TEMPLATE, RagPulse, block_tokens
from benchmark.demo.corpus import Passage, ask_questions
from benchmark.demo.retriever import Retriever
from benchmark.demo.session import SYSTEM, unmarked
from benchmark.quality.question import DataError, read_jsonl
from benchmark.quality.synthetic.notes import Asked, Notes, Shape, make_notes, places_of
from benchmark.quality.synthetic.vocabulary import SYSTEM as NOTES_SYSTEM
from benchmark.serving.prompt import Chunk, Piece, Prompt
from benchmark.simulate.trace import TraceSpec, generate

OUTPUT_LEN = 8
LENGTH_SPREAD = 0.4  # standard deviation of the logarithm of question and answer lengths
NOTES_SHAPE = Shape(num_chunks=(8, 8), num_distractors=4, apart=True)
NOTES_FAMILIES = ("needle", "multi", "carry", "number")
NOTES_OUTPUT_LEN = 6
LOG_KEYS = ("system", "chunks", "question", "output_len", "session", "timestamp", "answers", "family", "id")


def generated(spec: TraceSpec, vocab: int, output_len: int = OUTPUT_LEN) -> list[Prompt]:
    """Prompts of random token ids; the same arguments give the same prompts.

    Args:
        vocab: token ids are drawn below it.
        output_len: mean length of an answer.
    """
    trace = generate(spec)
    rng = np.random.default_rng((spec.seed, 1))

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(rng.integers(FIRST_PLAIN_ID, vocab, length).tolist())

    def around(mean: int) -> int:
        return max(1, round(mean * float(np.exp(LENGTH_SPREAD * rng.standard_normal() - LENGTH_SPREAD**2 / 2))))

    head = tokens(spec.system_len)
    chunks = [Chunk(str(number), tokens(length)) for number, length in enumerate(trace.lengths)]
    return [
        Prompt(
            head=head,
            chunks=tuple(chunks[number] for number in request.chunks),
            tail=tokens(around(request.question_len)),
            output_len=around(output_len),
            session=request.session,
        )
        for request in trace.requests
    ]


def documents(
    passages: list[Passage],
    *,
    num: int,
    num_topics: int = 8,
    per_question: tuple[int, int] = (4, 6),
    output_len: int = OUTPUT_LEN,
    seed: int = 0,
) -> list[Prompt]:
    """Questions about this repository's documents, with the retrieved passages, best first."""
    retriever = Retriever(passages)
    draw = random.Random(seed)
    prompts = []
    for question in ask_questions(passages, num, num_topics, seed):
        found = retriever.find(question.text, draw.randint(*per_question))
        chunks = tuple(Chunk(passage.text, unmarked(passage.text)) for passage in found)
        prompts.append(Prompt(SYSTEM, chunks, unmarked(question.text), output_len))
    return prompts


def from_ragpulse(pulse: RagPulse, vocab: int, num_behind: int = 0, *, marks_all: bool = False) -> list[Prompt]:
    """Prompts of token ids that are made up from ids of texts: equal ids give equal tokens.

    Args:
        vocab: token ids are drawn below it.
        num_behind: how many of the last blocks of each system prompt stand behind the passages.
        marks_all: history and results from the web are chunks too, not only passages.
    """
    ids = range(FIRST_PLAIN_ID, vocab)

    @cache
    def tokens(block: int) -> tuple[int, ...]:
        return block_tokens(block, pulse.lengths[block], ids)

    def joined(*blocks: int) -> tuple[int, ...]:
        return tuple(token for block in blocks for token in tokens(block))

    prompts = []
    for one in pulse.requests:
        cut = max(0, len(one.system) - num_behind)
        template = block_tokens(TEMPLATE, one.template_len, ids)
        others = (*one.history, *one.web)
        marked = (*one.passages, *(others if marks_all else ()))
        prompts.append(
            Prompt(
                head=joined(*one.system[:cut]),
                chunks=tuple(Chunk(str(block), tokens(block)) for block in marked),
                tail=(*joined(*one.system[cut:], *(() if marks_all else others), *one.user), *template),
                output_len=one.output_len,
                session=one.session,
                arrival_s=one.time_s,
            )
        )
    return prompts


@dataclass(frozen=True)
class NotesSpec:
    """A trace of questions to a trained model.

    Attributes:
        num_sets: sets of notes; all passages of a prompt come from one set, as from one manual.
        num_chunks: fewest and most passages of a prompt, including those that the question needs.
        zipf: exponent of the popularity of the sets.
    """

    num_requests: int
    num_sets: int = 40
    num_chunks: tuple[int, int] = (5, 8)
    zipf: float = 0.8
    seed: int = 0


def notes(spec: NotesSpec) -> list[Prompt]:
    """Prompts with known answers; each draws its passages and their order anew from one set.

    The order is drawn so that the answer exists: a passage that introduces a person stands in front of one that refers
    to them. The answer lists places in the order in which the passages tell them.
    """
    # Training draws from other generators ("question SEED ..."), so no note here was trained on.
    stock = [make_notes(random.Random(f"serving {spec.seed} {i}"), NOTES_SHAPE) for i in range(spec.num_sets)]
    draw = random.Random(f"serving {spec.seed}")
    weights = [(rank + 1) ** -spec.zipf for rank in range(spec.num_sets)]
    prompts = []
    while len(prompts) < spec.num_requests:
        number = draw.choices(range(spec.num_sets), weights)[0]
        asked = draw.choice([asked for asked in stock[number].asked if asked.family in NOTES_FAMILIES])
        prompts.append(_ask_notes(draw, stock[number], f"{number}", asked, draw.randint(*spec.num_chunks)))
    return prompts


def _ask_notes(draw: random.Random, own: Notes, name: str, asked: Asked, num_chunks: int) -> Prompt:
    needed = needed_chunks(own, asked)
    others = [i for i in range(len(own.chunks)) if i not in needed]
    chosen = [*needed, *draw.sample(others, max(0, num_chunks - len(needed)))]
    draw.shuffle(chosen)
    if asked.family == "carry":
        first, second = sorted(chosen.index(i) for i in needed)
        chosen[first], chosen[second] = needed
    answer, answer_of = asked.answer, None
    if asked.family == "multi":
        answer_of = partial(_places, asked.question.split()[-1])
        answer = answer_of([own.chunks[i] for i in chosen])
    # The space keeps words apart where pieces are joined without a separator; it is no token.
    chunks = tuple(Chunk(f"{name}/{i}", own.chunks[i] + " ") for i in chosen)
    return Prompt(
        NOTES_SYSTEM + " ",
        chunks,
        asked.question,
        NOTES_OUTPUT_LEN,
        answer=answer,
        answer_of=answer_of,
        ends_at_eos=True,
    )


def _places(name: str, texts: Sequence[Piece]) -> str:
    """Places where a person was, in the order in which the passages tell them."""
    return " ".join(places_of(name, [text for text in texts if isinstance(text, str)]))


def needed_chunks(own: Notes, asked: Asked) -> list[int]:
    """Indices of the chunks that the answer to a question needs, in the order of the notes."""
    name = asked.question.split()[-1]
    needed = [i for i, text in enumerate(own.chunks) if name in text.split()]
    if asked.family == "carry":
        needed += [i for i, text in enumerate(own.chunks) if _wears(text, asked.answer) and i not in needed]
    return needed


def _wears(text: str, colour: str) -> bool:
    words = text.split()
    return any(words[i] == "wearer" and words[i + 2] == colour for i in range(len(words) - 2))


def from_log(path: str | Path, output_len: int = OUTPUT_LEN) -> list[Prompt]:
    """Prompts of a user's log: one object per line, in the order of arrival.

    `{"system": "...", "chunks": ["...", ...], "question": "...", "output_len": 40, "session": 3, "timestamp": 12.5}`;
    all but `chunks` and `question` may be left out. `timestamp` is in seconds; give it on every line or on none. The
    lines of the quality harness (`answers`, `family`, `id`) are read too.

    Raises:
        DataError: the file cannot be read or is empty, or a line lacks something; the message names file and line.
    """
    prompts = list(_log_prompts(Path(path), output_len))
    if not prompts:
        raise DataError(f"{path}: no request in it; give one JSON object per line.")
    timed = [prompt.arrival_s is not None for prompt in prompts]
    if any(timed) and not all(timed):
        raise DataError(f'{path}: "timestamp" is missing in {timed.count(False)} lines; give it on every line or none.')
    return prompts


def _log_prompts(path: Path, output_len: int) -> Iterator[Prompt]:
    begin: float | None = None
    last = 0.0
    for where, value in read_jsonl(path):
        if unknown := sorted(set(value) - set(LOG_KEYS)):
            raise DataError(f"{where}: unknown field {unknown[0]!r}; there are {', '.join(LOG_KEYS)}.")
        texts = value.get("chunks")
        if not isinstance(texts, list) or not all(isinstance(text, str) and text.strip() for text in texts):
            raise DataError(f'{where}: "chunks" is not a list of strings with text; give one such list.')
        for name, kind, default in (("system", str, ""), ("question", str, None), ("session", int, 0)):
            if not isinstance(value.get(name, default), kind):
                raise DataError(f'{where}: "{name}" is missing or no {kind.__name__}.')
        length = value.get("output_len", output_len)
        if not isinstance(length, int) or isinstance(length, bool) or length < 1:
            raise DataError(f'{where}: "output_len" is {length!r}; give a whole number from 1.')
        time = value.get("timestamp")
        if time is not None:
            if isinstance(time, bool) or not isinstance(time, int | float) or not np.isfinite(time):
                raise DataError(f'{where}: "timestamp" is {time!r}; give seconds as a number.')
            begin, last = (time, time) if begin is None else (begin, last)
            if time < last:
                raise DataError(f'{where}: "timestamp" is before that of the line above; sort the log by time.')
            last = time
        yield Prompt(
            head=unmarked(value.get("system", "")),
            chunks=tuple(Chunk(text, unmarked(text)) for text in texts),
            tail=unmarked(value["question"]),
            output_len=length,
            session=value.get("session", 0),
            arrival_s=None if time is None or begin is None else float(time - begin),
        )
