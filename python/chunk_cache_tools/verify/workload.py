"""Workload: the prompts that a model is verified with.

Verbs: `read_prompts` (reads a user's file), `requests_in` and `read_prompt` (the same, one by one), `generate_prompts`
(makes prompts of random ids).

A file holds one JSON object per line, and each line may be any of these:

    {"text": "Read.<|chunk|>A<|chunk|>B<|chunk|>Q"}                          as for /generate; `prompt`: /v1/completions
    {"messages": [{"role": "user", "content": "<|chunk|>A<|chunk|>Q"}]}      for /v1/chat/completions, /v1/messages
    {"input_ids": [...], "sampling_params": {"custom_params": {"chunk_cache": {"spans": [[1, 9]]}}}}
    {"system": "...", "chunks": ["A", "B"], "question": "Q"}                 as for the quality harness
    {"event": "request.received", "obj": {one of the above}}                 a log by --log-requests-format json

Any line may also have `answers`, a list of right answers. Chunks may be marked in any way that the server accepts.
Prompts without marks are passed over, and in a log all other events.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, given, is_unicode, request_error, user_error
from chunk_cache.options.request_options import parse_request
from chunk_cache.prompt.marked_body import BLANK, MarkedBody, MarkFlags, read_body
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import MarkedText, is_blank
from chunk_cache.types import Span
from chunk_cache_tools.jsonl import DataError, object_in, read_jsonl
from chunk_cache_tools.verify.chat_prompt import NotRead, write_chat
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
        prompts: the different prompts, in order.
        passed_over: number of prompts that were passed over, by reason.
        unused: number of passages and marks of the prompts that are not used, by reason.
    """

    prompts: tuple[TokenPrompt, ...]
    passed_over: Mapping[str, int] = field(default_factory=dict)
    unused: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """The request in a line of a file.

    Attributes:
        prompt: None if it has no chunk, or cannot be read.
        unused: marks that are not used, by path, with the reason.
        options: the object `chunk_cache` of the request.
        unread: the part of the body for which only the server can write the prompt; empty = the prompt is read.
    """

    prompt: TokenPrompt | None
    unused: Mapping[str, str]
    options: Mapping[str, Any]
    unread: str = ""

    @property
    def why(self) -> str:
        """Why there is no prompt."""
        if self.unread:
            return f"that only a server can write ({self.unread}; its log has them as token ids)"
        reasons = ", ".join(sorted(set(self.unused.values())))
        return f"whose marks are not used ({reasons})" if reasons else "without marks"


def read_prompts(path: str | Path, tokenizer: Any, flags: MarkFlags, *, chat: bool = False) -> Workload:
    """The prompts in a file; see the head of this file.

    Args:
        flags: what counts as a mark.
        chat: questions go through the chat template of the tokenizer, with `system` as the system message.

    Raises:
        DataError: the file cannot be read or marks nothing, or a line has none of the formats above; the message names
            line and remedy.
    """
    found: dict[str, TokenPrompt] = {}
    passed_over, unused = Counter[str](), Counter[str]()
    for where, value in requests_in(path):
        line = read_prompt(value, tokenizer, flags, where, chat=chat)
        if line.prompt is None:
            passed_over[line.why] += 1
        elif line.prompt.key in found:
            passed_over["that came before"] += 1
        else:
            found[line.prompt.key] = line.prompt
            unused.update(line.unused.values())
    if not found:
        counts = ", ".join(f"{num} prompts {why}" for why, num in passed_over.items()) or "it is empty"
        remedy = f"put {flags.separator!r} before and after each passage, or name the server's separator by --separator"
        raise user_error(DataError, str(path), f"marks no chunk ({counts})", remedy)
    return Workload(tuple(found.values()), passed_over, unused)


def read_prompt(value: Mapping[str, Any], tokenizer: Any, flags: MarkFlags, where: str, *, chat: bool = False) -> Line:
    """Reads one request.

    Args:
        where: where the request came from, for messages.

    Raises:
        DataError: as `read_prompts`.
    """
    marked, prompt, unread, value = MarkedBody(), None, "", given(value)
    try:
        if not is_unicode(json.dumps(value, ensure_ascii=False)):
            problem = "half of a surrogate pair, which is no character"
            raise request_error("not a prompt", problem, "cut texts between characters")
        options = _options_of(value)
        prompt = _Reader(tokenizer, flags, chat, options, marked).read(value)
    except NotRead as error:
        unread = str(error)
    except ChunkCacheRequestError as error:
        raise DataError(f"{where}: {error}.") from error
    except RecursionError:
        raise DataError(f"{where}: objects or lists are nested too deep; nest fewer.") from None
    return Line(prompt, marked.marks.unused, options, unread)


def pick(prompts: Sequence[TokenPrompt], num: int) -> list[TokenPrompt]:
    """At most `num` of the prompts, spread evenly, because neighbours in a log are alike."""
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
    """(`file:line`, request) of every prompt in a file, with the `answers` of its line."""
    for where, value in read_jsonl(path):
        if value.get("event", RECEIVED) != RECEIVED:
            continue
        wrapper = next((name for name in WRAPPERS if isinstance(value.get(name), dict)), None)
        beside = {"answers": value["answers"]} if "answers" in value else {}
        for one in _each(value if wrapper is None else value[wrapper]):
            yield where, {**one, **beside}


def _each(value: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The request, split into one request per prompt, each with its own sampling parameters."""
    for kind, item in (("text", str), ("prompt", str), ("input_ids", list)):
        prompts = value.get(kind)
        if isinstance(prompts, list) and prompts and all(isinstance(prompt, item) for prompt in prompts):
            params = value.get("sampling_params")
            own = params if isinstance(params, list) and len(params) == len(prompts) else [params] * len(prompts)
            for prompt, param in zip(prompts, own, strict=True):
                yield {**value, kind: prompt, "sampling_params": param}
            return
    yield value


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31  # the server knows how many


def _options_of(value: Mapping[str, Any]) -> Mapping[str, Any]:
    """The object `chunk_cache` of a request, wherever a route accepts it; empty if there is none.

    Raises:
        ChunkCacheRequestError: it is a string, but no object in JSON.
    """
    params = value.get("sampling_params")
    holders = (value, value.get("custom_params"), params, isinstance(params, dict) and params.get("custom_params"))
    for holder in holders:
        options = holder.get("chunk_cache") if isinstance(holder, dict) else None
        if isinstance(options, str):  # the form in which the server passes it on, and logs it
            try:
                options = object_in(options)
            except ValueError as error:
                raise request_error("chunk_cache", str(error), "give an object") from None
        if isinstance(options, dict):
            return options
    return {}


@dataclass(frozen=True)
class _Reader:
    """Reads one request; every method raises `ChunkCacheRequestError`.

    Attributes:
        options: the object `chunk_cache` of the request.
        marked: receives what the request asks for.
    """

    tokenizer: Any
    flags: MarkFlags
    chat: bool
    options: Mapping[str, Any]
    marked: MarkedBody

    def read(self, value: Mapping[str, Any]) -> TokenPrompt | None:
        """The prompt of the request; None if nothing is marked."""
        kind = next((name for name in KINDS if value.get(name) is not None), None)
        if kind is None:
            problem = f"it has none of {', '.join(KINDS)}"
            raise request_error("not a prompt", problem, "see docs/verify.md for what a line may hold")
        answer = self._answer(value)
        if kind == "input_ids":
            return self._of_ids(value["input_ids"], answer)
        if kind == "chunks":
            kind, value = self._question(value)
        if kind == "messages":
            return self._encoded(write_chat(value, self.tokenizer, self.flags, self.marked), _PLAIN, answer)
        text = value[kind]
        if not isinstance(text, str):
            raise request_error(kind, "not a string", "give one prompt per line")
        if kind == "prompt":
            read_body("/v1/completions", dict(value), self.marked, self.flags)
            text = self.marked.tag_passages(self.marked.asked.passages) + text
        marked = self.marked.marks.split_at(self.flags.separator, text, kind)
        return self._encoded(marked or MarkedText((text,), (None,)), {}, answer)

    def _question(self, value: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Turns a line with chunks and a question into a request: its kind, and its body."""
        chunks, separator = value["chunks"], self.flags.separator
        if not isinstance(chunks, list) or not chunks or not all(isinstance(chunk, str) for chunk in chunks):
            raise request_error("chunks", "not a list of strings", 'give one such as ["passage", "passage"]')
        system, question = (value.get(name, "") for name in ("system", "question"))
        for name, text in (("system", system), ("question", question)):
            if not isinstance(text, str):
                raise request_error(name, "not a string", "give a text")
        blank = (i for i, chunk in enumerate(chunks) if is_blank(chunk))
        self.marked.marks.unused |= {f"chunks[{i}]": BLANK for i in blank}
        chunks = [chunk for chunk in chunks if not is_blank(chunk)]
        system, question, *texts = (text.replace(separator, " ") for text in (system, question, *chunks))
        separator = separator if texts else ""
        written = (PLAIN.chunk.replace("{chunk}", text) for text in texts)
        tail = PLAIN.question.replace("{question}", question)
        if self.chat:
            messages = [{"role": "system", "content": system}] if system.strip() else []
            body = separator.join(("", *written, tail))
            return "messages", {"messages": [*messages, {"role": "user", "content": body}]}
        head = PLAIN.system.replace("{system}", system) if system else ""
        return "text", {"text": separator.join((head, *written, tail))}

    def _of_ids(self, ids: object, answer: str) -> TokenPrompt | None:
        if not isinstance(ids, list) or not all(map(_is_id, ids)):
            raise request_error("input_ids", "not a list of token ids", "give one prompt per line")
        if not self.options.get("spans"):
            return None
        asked = {"spans": self.options["spans"]}
        spans = parse_request(asked, path="custom_params.chunk_cache", num_tokens=len(ids)).spans
        return TokenPrompt(tuple(ids), spans, self._ids(answer))

    def _encoded(self, marked: MarkedText, kwargs: Mapping[str, Any], answer: str) -> TokenPrompt | None:
        """The prompt of a text whose chunks are marked in it, or by spans of tokens in the options."""
        text = marked.text
        answer = f"{'' if not text or text[-1].isspace() else ' '}{answer}" if answer else ""
        if not marked.chunks:
            has_spans = self.options.get("spans")
            return self._of_ids(list(self.tokenizer.encode(text, **kwargs)), answer) if has_spans else None
        encoded = encode_marked(self.tokenizer, marked, kwargs)
        self.marked.marks.drop_foreign("the chat template leaves it out", but=encoded.marks)
        return TokenPrompt(tuple(encoded.ids), encoded.spans, self._ids(answer)) if encoded.spans else None

    def _answer(self, value: Mapping[str, Any]) -> str:
        answers = value.get("answers", [])
        if not isinstance(answers, list) or not all(isinstance(answer, str) for answer in answers):
            raise request_error("answers", "not a list of strings", 'give one such as ["Rome"], or leave it out')
        return next((answer for answer in answers if answer.strip()), "")

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False)) if text else ()
