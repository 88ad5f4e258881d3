"""Prompts: from a question to the marked text that a user of the server would send.

- `read_format` reads from a file how system prompt, chunks and question become text.
- `build_prompt` applies it, `build_chat_prompt` puts the result through a model's chat template as well.
- `Prompt.text` is the whole prompt. `Prompt.priming()` are short prompts that each store one chunk behind the system
  prompt, `Prompt.shuffled()` is a prompt that stores all chunks in another order.

A chunk must be written the same way wherever it stands, so its format cannot contain its number.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from benchmark.quality.question import DataError, Question

from chunk_cache_tools.verify.reply_log import Reply
from chunk_cache_tools.verify.session import Body
from chunk_cache_tools.verify.workload import PLAIN, PromptFormat

SEPARATOR = "<|chunk|>"


VERBATIM = PromptFormat("{system} ", "{chunk} ", "{question}")
"""Adds only spaces between the parts."""


@dataclass(frozen=True)
class Prompt:
    """A marked prompt: the text in front of the chunks, the chunks, and the text behind them.

    `answer` is the right answer, as written behind the tail; it is no part of the prompt.
    """

    head: str
    chunks: tuple[str, ...]
    tail: str
    answer: str = ""

    @property
    def text(self) -> str:
        """The prompt with its separators."""
        return SEPARATOR.join((self.head, *self.chunks, self.tail))

    @property
    def body(self) -> Body:
        return Body(self.text)

    def front(self, filler: str) -> Body:
        return Body(self.head + filler)

    def priming(self, page_size: int = 1, filler: str | None = None) -> tuple[Body, ...]:
        """One marked prompt per distinct chunk: head, filler if given, the chunk, and a page of text behind it.

        The last page of a path is stored only when it is full, so a chunk must not end in it.
        """
        tail = _tail(page_size)
        front = (self.head,) if filler is None else (self.head, filler)
        return tuple(Body(SEPARATOR.join((*front, chunk, tail))) for chunk in dict.fromkeys(self.chunks))

    def shuffled(self, page_size: int = 1) -> Body:
        """The marked prompt with its distinct chunks in another, reproducible order, and a page of text at the end."""
        chunks = list(dict.fromkeys(self.chunks))
        before = list(chunks)
        draw = random.Random(self.key)
        while len(chunks) > 1 and chunks == before:  # in the same order the prompt would be an exact prefix
            draw.shuffle(chunks)
        return Body(SEPARATOR.join((self.head, *chunks, _tail(page_size))))

    def answered(self, reference: Reply) -> dict[str, Body]:
        """The prompt followed by the right answer ("gold"), and by the reference's own reply ("own")."""
        answers = {"gold": self.answer, "own": reference.text}
        return {name: Body(self.text + answer) for name, answer in answers.items() if answer}

    @property
    def partition(self) -> str:
        """The `extra_key`: one per head, so that chunks are reused only behind the head they were computed behind."""
        return _digest(self.head)

    @property
    def key(self) -> str:
        """Names this prompt in result files."""
        return _digest(self.text)


def build_prompt(question: Question, style: PromptFormat = PLAIN) -> Prompt:
    """The prompt of a question; separators inside its texts become spaces."""
    system, question_text = _clean(question.system), _clean(question.question)
    tail = style.question.replace("{question}", question_text)
    return Prompt(
        head=style.system.replace("{system}", system) if system else "",
        chunks=tuple(style.chunk.replace("{chunk}", _clean(chunk)) for chunk in question.chunks),
        tail=tail,
        answer=_behind(tail, question),
    )


def build_chat_prompt(
    question: Question, render: Callable[[list[dict[str, str]]], str], style: PromptFormat = PLAIN
) -> Prompt:
    """Like `build_prompt`, with the system prompt as the system message and the rest as the user's message.

    Args:
        render: messages -> text, by a chat template with its generation prompt.

    Raises:
        DataError: the template changes the chunks or moves them.
    """
    prompt = build_prompt(question, style)
    system = [{"role": "system", "content": prompt.head.strip()}] if prompt.head.strip() else []
    body = SEPARATOR.join(("", *prompt.chunks, prompt.tail))
    head, *chunks, tail = render([*system, {"role": "user", "content": body}]).split(SEPARATOR)
    if tuple(chunks) != prompt.chunks:
        raise DataError("The chat template of the model changes the chunks of a prompt; run without --chat.")
    return Prompt(head, prompt.chunks, tail, _behind(tail, question))


def read_format(path: str | Path) -> PromptFormat:
    """A format from a JSON file such as `{"chunk": "{chunk}\\n", "question": "Q: {question}\\nA:"}`.

    Raises:
        DataError: the file cannot be read, or a field is unknown or lacks its part.
    """
    try:
        value = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give the path of a JSON file.") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{path}:{error.lineno}: not JSON ({error.msg}).") from error
    known = [field.name for field in fields(PromptFormat)]
    if not isinstance(value, dict) or not set(value) <= set(known):
        raise DataError(f"{path}: give one object with any of the fields {', '.join(known)}.")
    for name, text in value.items():
        if not isinstance(text, str) or text.count(f"{{{name}}}") != 1:
            raise DataError(f'{path}: "{name}" must be a string that holds {{{name}}} once.')
    return PromptFormat(**value)


def _behind(tail: str, question: Question) -> str:
    """The text of the first answer, or of all if all are required, as it follows a prompt; "" if there is none."""
    if not question.answers:
        return ""
    answer = _clean(", ".join(question.answers) if question.require_all else question.answers[0])
    return answer if not tail or tail[-1].isspace() else f" {answer}"


def _tail(page_size: int) -> str:
    return " x" * page_size if page_size > 1 else ""


def _clean(text: str) -> str:
    return text.replace(SEPARATOR, " ")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
