"""Cases to verify a model with: `generate_cases` (random token ids), `read_cases` (a user's JSONL).

A case is one prompt with marked chunks, and the short prompts that compute each chunk alone behind the same beginning.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, user_error


@dataclass(frozen=True)
class Ask:
    """One prompt: `fields` of `Engine.generate` (`text` or `input_ids`), and the spans of its chunks if by token."""

    fields: Mapping[str, Any]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Case:
    """A prompt and what primes its chunks."""

    prompt: Ask
    priming: tuple[Ask, ...]


def generate_cases(
    num: int, vocab_size: int, *, num_chunks: int = 5, chunk_len: int = 96, edge_len: int = 24, seed: int = 0
) -> list[Case]:
    """Prompts of random token ids: `edge_len` tokens, chunks of about `chunk_len`, `edge_len` tokens of question."""
    draw = random.Random(seed)
    low, high = min(vocab_size // 10, 1000), vocab_size  # the first ids are often special tokens

    def tokens(length: int) -> list[int]:
        return [draw.randrange(low, high) for _ in range(length)]

    cases = []
    for _ in range(num):
        head, question = tokens(edge_len), tokens(edge_len)
        chunks = [tokens(draw.randint(chunk_len // 2, chunk_len * 3 // 2)) for _ in range(num_chunks)]
        ids, spans = list(head), []
        for chunk in chunks:
            spans.append((len(ids), len(ids) + len(chunk)))
            ids += chunk
        priming = tuple(Ask({"input_ids": head + chunk}, ((edge_len, edge_len + len(chunk)),)) for chunk in chunks)
        cases.append(Case(Ask({"input_ids": ids + question}, tuple(spans)), priming))
    return cases


def read_cases(path: str | Path, separator: str, num: int) -> list[Case]:
    """At most `num` cases of a JSONL file with objects `{"system": ..., "chunks": [...], "question": ...}`.

    Raises:
        ChunkCacheRequestError: the file cannot be read or has no case, or a line is not such an object.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise _error("--prompts", f"{path} cannot be read ({error})", "give the path of a UTF-8 JSONL file") from error
    cases: list[Case] = []
    for number, line in enumerate(lines, start=1):
        if line.strip() and len(cases) < num:
            cases.append(_case_of(line, f"{path}:{number}", separator))
    if not cases:
        raise _error("--prompts", f"{path} holds no prompt", "give one JSON object per line")
    return cases


def _error(where: str, problem: str, remedy: str) -> ChunkCacheRequestError:
    return user_error(ChunkCacheRequestError, where, problem, remedy)


def _case_of(line: str, where: str, separator: str) -> Case:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise _error(where, f"not JSON ({error})", "give one object per line") from error
    chunks = value.get("chunks") if isinstance(value, dict) else None
    texts = [value.get(name, "") for name in ("system", "question")] if isinstance(value, dict) else []
    if not isinstance(chunks, list) or len(chunks) < 2 or not all(isinstance(t, str) for t in (*chunks, *texts)):
        raise _error(
            where, "not a prompt", 'give an object with "system", "chunks" (two or more strings) and "question"'
        )
    if any(not chunk.strip() or separator in chunk for chunk in chunks):
        raise _error(where, f'a chunk in "chunks" is empty or holds the separator {separator!r}', "change it")
    system, question = (text.replace(separator, " ") for text in texts)
    priming = tuple(Ask({"text": separator.join((system, chunk, ""))}) for chunk in dict.fromkeys(chunks))
    return Case(Ask({"text": separator.join((system, *chunks, question))}), priming)
