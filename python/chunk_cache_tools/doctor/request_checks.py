"""Request: one request as far as it decides what it may reuse; `read_requests` (of a user's files)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunk_cache.errors import request_error
from chunk_cache.keys import Partition
from chunk_cache.prompt.marks import map_texts
from chunk_cache_tools.explain.shown_prompt import CONTINUED, token_texts
from chunk_cache_tools.verify.workload import options_of, read_prompt, requests_in

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
        chunks: the marked chunks; empty = nothing is marked.
        partition: of the cache, without what an adapter adds.
        adapter: the LoRA adapter; None = there is none.
        names_method: whether it names a method, a ratio or options, so that no length is too short.
        mode: that it asks for.
    """

    where: str
    text: str
    head: Piece
    chunks: tuple[Piece, ...]
    partition: Partition
    adapter: str | None = None
    names_method: bool = False
    mode: str = "auto"


def read_requests(paths: Sequence[str], tokenizer: Any, separator: str) -> list[Request]:
    """The requests of files, in their order: a text is one prompt, a JSON file has one request on each line.

    Args:
        tokenizer: the server's.

    Raises:
        ChunkCacheRequestError: a file cannot be read, or a request is not one.
    """
    return [_request(where, value, tokenizer, separator) for path in paths for where, value in _values(path)]


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


def _request(where: str, value: Mapping[str, Any], tokenizer: Any, separator: str) -> Request:
    prompt = read_prompt(value, tokenizer, separator, where)
    options = options_of(value, where)
    extra_key, cache_salt, adapter = (_name(value, name, where) for name in ("extra_key", "cache_salt", "lora_path"))
    common: dict[str, Any] = {
        "partition": Partition(extra_key, cache_salt),
        "adapter": adapter,
        "names_method": any(options.get(name) is not None for name in ("method", "ratio", "options")),
        "mode": options.get("mode") or "auto",
    }
    if prompt is None:
        return Request(where, _unmarked_text(value, tokenizer), Piece("", ()), (), **common)
    texts = _texts(tokenizer, prompt.ids)

    def piece(start: int, end: int) -> Piece:
        return Piece("".join(texts[start:end]), prompt.ids[start:end])

    chunks = tuple(piece(*span) for span in prompt.spans)
    return Request(where, "".join(texts), piece(0, prompt.spans[0][0]), chunks, **common)


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
