"""Request: the parts of a request that decide what it may reuse; `read_requests` reads a user's files."""

from __future__ import annotations

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
from chunk_cache_tools.explain.shown_prompt import CONTINUED, read_text, token_texts
from chunk_cache_tools.verify.workload import read_prompt, requests_in

JSON_ENDINGS = (".json", ".jsonl", ".log")


@dataclass(frozen=True)
class Piece:
    """A part of a prompt: its token ids, and the text that they stand for."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """One request.

    Attributes:
        where: file, or file and line, that it came from.
        text: the whole prompt; for a chat without marks, the texts of its messages without the chat template.
        head: the part before the first chunk.
        chunks: the marked chunks; empty = nothing is marked, or the prompt is not read.
        prompt: the chunks as the server looks them up; the adapter is left out of the partition.
        adapter: the LoRA adapter; None = there is none.
        names_method: whether the request names a method, a ratio or options, so that no chunk is too short.
        mode: mode that the request asks for.
        unused: marks that are not used, by path, with the reason.
        unread: the part of the body for which only the server can write the prompt; empty = the prompt is read.
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
    """The requests in files, in order: a text file is one prompt, a JSON file has one request on each line.

    Args:
        tokenizer, flags: those of the server.

    Raises:
        ChunkCacheRequestError: a file cannot be read, or a request is malformed.
    """
    return [_request(where, value, tokenizer, flags) for path in paths for where, value in _values(path)]


def _values(path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if Path(path).suffix in JSON_ENDINGS:
        yield from requests_in(path)
    else:
        yield path, {"text": read_text(path)}


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
    """Checks that a prompt without marks has tokens, as the server does; a chat always has those of its template."""
    for name in ("text", "prompt", "input_ids"):
        found = value.get(name)
        ids = tokenizer.encode(found) if isinstance(found, str) else found
        if ids is not None and not ids:
            raise request_error(f"{where}: {name}", "a prompt without tokens", "give at least one token")


def _texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds."""
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
    """The value of a field that selects a part of the cache; None if it is empty, as in SGLang."""
    name = value.get(field) or None
    if name is not None and not isinstance(name, str):
        raise request_error(f"{where}: {field}", "not a string", "give one request per line")
    return name
