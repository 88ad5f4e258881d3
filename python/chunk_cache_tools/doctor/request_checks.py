"""Request: one request as far as it decides what it may reuse; `read_requests` (of a user's files)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chunk_cache.errors import request_error
from chunk_cache.keys import Partition
from chunk_cache.options.request_options import RequestOptions
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.prompt.marked_body import MarkFlags
from chunk_cache.prompt.marks import map_texts
from chunk_cache_tools.explain.shown_prompt import CONTINUED, token_texts
from chunk_cache_tools.verify.workload import read_prompt, requests_in

JSON_ENDINGS = (".json", ".jsonl", ".log")


@dataclass(frozen=True)
class Piece:
    """A part of a prompt: its text, as its tokens spell it, and their ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        where: it came from.
        text: the whole prompt; of a chat that marks nothing, its texts before the template.
        head: what stands before the first chunk.
        chunks: the marked chunks; empty = nothing is marked, or it is not read.
        prompt: these as the server looks them up, in a partition of the cache without what an adapter adds.
        adapter: the LoRA adapter; None = there is none.
        names_method: whether it names a method, a ratio or options, so that no length is too short.
        mode: that it asks for.
        unused: its marks that are not used, by path, each with the reason.
        unread: what it has for which only the server can write its prompt; empty = it is read.
    """

    where: str
    text: str
    head: Piece
    chunks: tuple[Piece, ...]
    prompt: ChunkPrompt
    adapter: str | None = None
    names_method: bool = False
    mode: str = "auto"
    unused: Mapping[str, str] = field(default_factory=dict)
    unread: str = ""

    @property
    def partition(self) -> Partition:
        return self.prompt.partition


def read_requests(paths: Sequence[str], tokenizer: Any, flags: MarkFlags) -> list[Request]:
    """The requests of files, in their order: a text is one prompt, a JSON file has one request on each line.

    Args:
        tokenizer, flags: the server's.

    Raises:
        ChunkCacheRequestError: a file cannot be read, or a request is not one.
    """
    return [_request(where, value, tokenizer, flags) for path in paths for where, value in _values(path)]


def _values(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if Path(path).suffix in JSON_ENDINGS:
        yield from requests_in(path)
        return
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        problem = f"cannot be read ({error.strerror if isinstance(error, OSError) else 'not UTF-8'})"
        raise request_error(f"--prompt {path}", problem, "give a text, a JSON file of requests, or -") from None
    yield path, {"text": text.removesuffix("\n")}


def _request(where: str, value: Mapping[str, Any], tokenizer: Any, flags: MarkFlags) -> Request:
    line = read_prompt(value, tokenizer, flags, where)
    extra_key, cache_salt, adapter = (_name(value, name, where) for name in ("extra_key", "cache_salt", "lora_path"))
    ids, spans = ((), ()) if line.prompt is None else (line.prompt.ids, line.prompt.spans)
    common: dict[str, Any] = {
        "prompt": ChunkPrompt.of(RequestOptions(spans), ids, Partition(extra_key, cache_salt)),
        "adapter": adapter,
        "names_method": any(line.options.get(name) is not None for name in ("method", "ratio", "options")),
        "mode": line.options.get("mode") or "auto",
        "unused": line.unused,
        "unread": line.unread,
    }
    if line.prompt is None:
        _check_not_empty(value, tokenizer, where)
        return Request(where, _unmarked_text(value, tokenizer), Piece("", ()), (), **common)
    texts = _texts(tokenizer, ids)

    def piece(start: int, end: int) -> Piece:
        return Piece("".join(texts[start:end]), ids[start:end])

    chunks = tuple(piece(*span) for span in spans)
    return Request(where, "".join(texts), piece(0, spans[0][0]), chunks, **common)


def _check_not_empty(value: Mapping[str, Any], tokenizer: Any, where: str) -> None:
    """Checks that a prompt without marks has tokens, as the server does; a chat has those of its template."""
    for name in ("text", "prompt", "input_ids"):
        found = value.get(name)
        ids = tokenizer.encode(found) if isinstance(found, str) else found
        if ids is not None and not ids:
            raise request_error(f"{where}: {name}", "a prompt without tokens", "give at least one token")


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """What each token adds to the text."""
    return [text if text != CONTINUED else "" for text in token_texts(tokenizer, ids)]


def _unmarked_text(value: Mapping[str, Any], tokenizer: Any) -> str:
    if value.get("input_ids") is not None:
        return "".join(_texts(tokenizer, value["input_ids"]))
    texts: list[str] = []

    def remember(text: str) -> str:
        texts.append(text)
        return text

    map_texts([value.get(kind) for kind in ("text", "prompt", "messages")], remember)
    return "\n".join(texts)


def _name(value: Mapping[str, Any], field: str, where: str) -> str | None:
    """A field that names a part of the cache; as in SGLang, an empty one is none."""
    name = value.get(field) or None
    if name is not None and not isinstance(name, str):
        raise request_error(f"{where}: {field}", "not a string", "give one request per line")
    return name
