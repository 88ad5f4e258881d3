"""Workload: the prompts that a model is verified with.

Verbs: `read_prompts` (a user's file), `requests_in` and `read_prompt` (the same, one by one), `generate_prompts` (of
random ids).

A file holds one JSON object per line, and each line may be any of these:

    {"text": "Read.<|chunk|>A<|chunk|>B<|chunk|>Q"}                          as for /generate; `prompt`: /v1/completions
    {"messages": [{"role": "user", "content": "<|chunk|>A<|chunk|>Q"}]}      as for /v1/chat/completions
    {"input_ids": [...], "sampling_params": {"custom_params": {"chunk_cache": {"spans": [[1, 9]]}}}}
    {"system": "...", "chunks": ["A", "B"], "question": "Q"}                 as for the quality harness
    {"event": "request.received", "obj": {one of the above}}                 a log by --log-requests-format json

`answers`, a list of right answers, may stand beside any of them. Of a log other events and prompts without marks are
passed over.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, user_error
from chunk_cache.options.request_options import parse_request
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import MarkedText, Marks, map_texts, split_marked
from chunk_cache.types import Span
from chunk_cache_tools.jsonl import DataError, read_jsonl
from chunk_cache_tools.verify.token_prompt import TokenPrompt

RECEIVED = "request.received"
WRAPPERS = ("obj", "body")
KINDS = ("messages", "chunks", "text", "prompt", "input_ids")
_PLAIN = {"add_special_tokens": False}  # a chat template writes BOS itself


@dataclass(frozen=True)
class PromptFormat:
    """How the parts of a question are written; each field holds its own name in braces once.

    An empty system prompt stays empty.
    """

    system: str = "{system}\n\n"
    chunk: str = "{chunk}\n\n"
    question: str = "{question}\nAnswer:"


PLAIN = PromptFormat()


@dataclass(frozen=True)
class Workload:
    """The prompts of a file.

    Attributes:
        prompts: different ones, in their order.
        num_unmarked: lines that mark no chunk.
        num_again: prompts that came before.
    """

    prompts: tuple[TokenPrompt, ...]
    num_unmarked: int = 0
    num_again: int = 0


def read_prompts(path: str | Path, tokenizer: Any, separator: str, *, chat: bool = False) -> Workload:
    """The prompts of a file; see above.

    Args:
        chat: questions go through the chat template of the tokenizer, with `system` as the system message.

    Raises:
        DataError: the file cannot be read, marks nothing, or a line is none of the above; it names line and remedy.
    """
    found: dict[str, TokenPrompt] = {}
    num_unmarked = num_again = 0
    for where, value in requests_in(path):
        prompt = read_prompt(value, tokenizer, separator, where, chat=chat)
        if prompt is None:
            num_unmarked += 1
        elif prompt.key in found:
            num_again += 1
        else:
            found[prompt.key] = prompt
    if not found:
        problem = f"marks no chunk ({num_unmarked} prompts without marks)"
        remedy = f"put {separator!r} before and after each passage, or name the server's separator by --separator"
        raise _error(str(path), problem, remedy)
    return Workload(tuple(found.values()), num_unmarked, num_again)


def read_prompt(
    value: Mapping[str, Any], tokenizer: Any, separator: str, where: str, *, chat: bool = False
) -> TokenPrompt | None:
    """The prompt of one request; None where it marks no chunk.

    Args:
        where: it came from, for messages.

    Raises:
        DataError: as `read_prompts`.
    """
    try:
        return _Reader(tokenizer, separator, where, chat).read(value)
    except DataError:
        raise
    except ChunkCacheRequestError as error:
        raise DataError(f"{error}.") from error


def pick(prompts: Sequence[TokenPrompt], num: int) -> list[TokenPrompt]:
    """At most `num` of them, spread evenly: neighbours in a log are alike."""
    num = min(num, len(prompts))
    return [prompts[i * len(prompts) // num] for i in range(num)]


def generate_prompts(
    num: int, vocab_size: int, *, num_chunks: int = 5, chunk_len: int = 96, edge_len: int = 24, seed: int = 0
) -> list[TokenPrompt]:
    """Prompts of random token ids: `edge_len` tokens, chunks of about `chunk_len`, `edge_len` tokens of question."""
    draw = random.Random(seed)
    low, high = min(vocab_size // 10, 1000), vocab_size  # the first ids are often special tokens

    def tokens(length: int) -> list[int]:
        return [draw.randrange(low, high) for _ in range(length)]

    head = tokens(edge_len)
    prompts = []
    for _ in range(num):
        ids: list[int] = list(head)
        spans: list[Span] = []
        for _ in range(num_chunks):
            chunk = tokens(draw.randint(chunk_len // 2, chunk_len * 3 // 2))
            spans.append((len(ids), len(ids) + len(chunk)))
            ids += chunk
        prompts.append(TokenPrompt(tuple(ids + tokens(edge_len)), tuple(spans)))
    return prompts


def requests_in(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(`file:line`, what was asked) of every prompt; `answers` of the line go along."""
    for where, value in read_jsonl(path):
        if value.get("event", RECEIVED) != RECEIVED:
            continue
        wrapper = next((name for name in WRAPPERS if isinstance(value.get(name), dict)), None)
        beside = {"answers": value["answers"]} if "answers" in value else {}
        for one in _each(value if wrapper is None else value[wrapper]):
            yield where, {**one, **beside}


def _each(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The prompts of a request, one by one, each with its own sampling parameters."""
    for kind, item in (("text", str), ("prompt", str), ("input_ids", list)):
        prompts = value.get(kind)
        if isinstance(prompts, list) and prompts and all(isinstance(prompt, item) for prompt in prompts):
            params = value.get("sampling_params")
            own = params if isinstance(params, list) and len(params) == len(prompts) else [params] * len(prompts)
            for prompt, param in zip(prompts, own, strict=True):
                yield {**value, kind: prompt, "sampling_params": param}
            return
    yield value


def options_of(value: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The object `chunk_cache` of a request, wherever a route takes it; empty where there is none.

    Args:
        where: it came from, for messages.

    Raises:
        DataError: it is a string, and not JSON.
    """
    params = value.get("sampling_params")
    holders = (value, value.get("custom_params"), params, isinstance(params, dict) and params.get("custom_params"))
    for holder in holders:
        options = holder.get("chunk_cache") if isinstance(holder, dict) else None
        if isinstance(options, str):  # as the server passes it on, and logs it
            try:
                options = json.loads(options)
            except json.JSONDecodeError:
                raise _error(f"{where}: chunk_cache", "not JSON", "give an object") from None
        if isinstance(options, dict):
            return options
    return {}


@dataclass(frozen=True)
class _Reader:
    """Reads one line; every verb raises `ChunkCacheRequestError`."""

    tokenizer: Any
    separator: str
    where: str
    chat: bool

    def read(self, value: Mapping[str, Any]) -> TokenPrompt | None:
        """None where nothing is marked."""
        kind = next((name for name in KINDS if value.get(name) is not None), None)
        if kind is None:
            problem = f"not a prompt: it has none of {', '.join(KINDS)}"
            raise _error(self.where, problem, "see docs/verify.md for what a line may hold")
        answer = self._answer(value)
        if kind == "input_ids":
            return self._of_ids(value, answer)
        if kind == "messages":
            return self._of_messages(value["messages"], answer)
        if kind == "chunks":
            return self._of_question(value, answer)
        if not isinstance(value[kind], str):
            raise _error(self._path(kind), "not a string", "give one prompt per line")
        marked = split_marked(value[kind], self.separator, self._path(kind))
        return None if marked is None else self._encoded(marked, {}, answer)

    def _of_question(self, value: Mapping[str, Any], answer: str) -> TokenPrompt | None:
        chunks = value["chunks"]
        if not isinstance(chunks, list) or not chunks or not all(isinstance(chunk, str) for chunk in chunks):
            raise _error(self._path("chunks"), "not a list of strings", 'give one such as ["passage", "passage"]')
        system, question = (value.get(name, "") for name in ("system", "question"))
        for name, text in (("system", system), ("question", question)):
            if not isinstance(text, str):
                raise _error(self._path(name), "not a string", "give a text")
        for i, chunk in enumerate(chunks):
            if not chunk.strip():
                raise _error(self._path(f"chunks[{i}]"), "empty", "leave it out")
        system, question, *texts = (text.replace(self.separator, " ") for text in (system, question, *chunks))
        written = (PLAIN.chunk.replace("{chunk}", text) for text in texts)
        tail = PLAIN.question.replace("{question}", question)
        if self.chat:
            messages = [{"role": "system", "content": system}] if system.strip() else []
            body = self.separator.join(("", *written, tail))
            return self._of_messages([*messages, {"role": "user", "content": body}], answer)
        head = PLAIN.system.replace("{system}", system) if system else ""
        marked = split_marked(self.separator.join((head, *written, tail)), self.separator, self._path("chunks"))
        return None if marked is None else self._encoded(marked, {}, answer)

    def _of_messages(self, messages: object, answer: str) -> TokenPrompt | None:
        path = self._path("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise _error(path, "not a list of messages", 'give one such as [{"role": "user", "content": "..."}]')
        if getattr(self.tokenizer, "chat_template", None) is None:
            remedy = "give the prompts as text with separators" + (", or leave out --chat" if self.chat else "")
            raise _error(path, "the model's tokenizer has no chat template", remedy)
        marks = Marks()

        def tag(text: str) -> str:
            marked = split_marked(text, self.separator, path)
            return text if marked is None else marks.tag_pieces(marked)

        joined = [{**message, "content": _joined(map_texts(message.get("content"), tag))} for message in messages]
        if not marks.own:
            return None
        rendered = self.tokenizer.apply_chat_template(joined, tokenize=False, add_generation_prompt=True)
        whole = marks.split(rendered)
        if whole is None:
            raise _error(path, "the chat template of the model changes the marked chunks", "give input_ids and spans")
        return self._encoded(whole, _PLAIN, answer)

    def _of_ids(self, value: Mapping[str, Any], answer: str) -> TokenPrompt | None:
        ids = value["input_ids"]
        if not isinstance(ids, list) or not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise _error(self._path("input_ids"), "not a list of token ids", "give one prompt per line")
        options = options_of(value, self.where)
        if not options.get("spans"):
            return None
        path = self._path("custom_params.chunk_cache")
        spans = parse_request({"spans": options["spans"]}, path=path, num_tokens=len(ids)).spans
        return TokenPrompt(tuple(ids), spans, self._ids(answer))

    def _encoded(self, marked: MarkedText, kwargs: Mapping[str, Any], answer: str) -> TokenPrompt:
        encoded = encode_marked(self.tokenizer, marked, kwargs)
        gap = "" if not marked.pieces[-1] or marked.pieces[-1][-1].isspace() else " "
        return TokenPrompt(tuple(encoded.ids), encoded.spans, self._ids(gap + answer if answer else ""))

    def _answer(self, value: Mapping[str, Any]) -> str:
        answers = value.get("answers", [])
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise _error(self._path("answers"), "not a list of strings", 'give one such as ["Rome"], or leave it out')
        return next((answer for answer in answers if answer.strip()), "")

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()

    def _path(self, field: str) -> str:
        return f"{self.where}: {field}"


def _texts(content: object) -> list[str]:
    """All texts of a message: its content, or the text parts of it."""
    if isinstance(content, str):
        return [content]
    parts = content if isinstance(content, list) else []
    return [part["text"] for part in parts if isinstance(part, dict) and isinstance(part.get("text"), str)]


def _joined(content: object) -> object:
    return "".join(_texts(content)) if isinstance(content, list) else content


def _error(where: str, problem: str, remedy: str) -> DataError:
    return user_error(DataError, where, problem, remedy)
