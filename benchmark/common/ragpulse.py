"""RAGPulse: a trace of a real RAG service. It has ids and lengths of blocks of text; equal ids mean equal text.

    read_ragpulse    reads the requests of a folder, in the order of their arrival
    block_tokens     makes up the text of a block, as token ids: equal ids give equal text

The folder holds `trace.jsonl` and one file of lengths per kind of block, `FILES`. A prompt is laid out as

    | system | passages | history | web | user | template |

The trace does not state this order; the names of its fields suggest it. `template` is `input_length` less the blocks: a
few tokens of the chat template. The trace itself, RAGPulse under the MIT licence, is not in this project.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from chunk_cache_tools.jsonl import DataError, read_jsonl

TRACE_FILE = "trace.jsonl"
FILES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "sys_prompt": ("1_sys_prompt.jsonl", "sys_prompt_id"),
        "passages_ids": ("2_passages.jsonl", "passage_id"),
        "history": ("3_history.jsonl", "history_id"),
        "user_input": ("4_user_input.jsonl", "user_input_id"),
        "web_search": ("5_web_search.jsonl", "web_search_id"),
    }
)
"""For each kind of block, as the trace names it: its file of lengths, and the field of the id in that file."""


@dataclass(frozen=True, slots=True)
class PulseRequest:
    """One request; blocks are ids."""

    time_s: float
    """Arrival, since the first request."""
    session: int
    output_len: int
    system: tuple[int, ...]
    passages: tuple[int, ...]
    history: tuple[int, ...]
    web: tuple[int, ...]
    user: tuple[int, ...]
    template_len: int
    """Tokens of the prompt that are in no block."""

    @property
    def blocks(self) -> tuple[int, ...]:
        return (*self.system, *self.passages, *self.history, *self.web, *self.user)


@dataclass(frozen=True, slots=True, eq=False)
class RagPulse:
    """A trace as read from a folder."""

    requests: tuple[PulseRequest, ...]
    lengths: Mapping[int, int]
    """Tokens of each block, by its id."""
    sha256: Mapping[str, str]
    """Digests of the files of the trace, by their names."""

    def prompt_len(self, request: PulseRequest) -> int:
        return sum(self.lengths[block] for block in request.blocks) + request.template_len

    def scaled(self, share: float, output_share: float) -> RagPulse:
        """The same requests with blocks and answers cut to these shares of their length, at least one token each."""
        assert 0 < min(share, output_share) <= max(share, output_share) <= 1, f"shares {share}, {output_share}"
        requests = tuple(
            replace(
                request,
                output_len=max(1, round(output_share * request.output_len)),
                template_len=round(share * request.template_len),
            )
            for request in self.requests
        )
        lengths = {block: max(1, round(share * length)) for block, length in self.lengths.items()}
        return RagPulse(requests, lengths, self.sha256)

    def markdown(self) -> list[str]:
        """Lines that name the files."""
        return [f"- {name}: sha256 `{digest}`" for name, digest in self.sha256.items()]


def read_ragpulse(folder: Path, num: int | None = None) -> RagPulse:
    """The first `num` requests of a folder; None = all.

    Raises:
        DataError: a file is missing or broken, or the files contradict each other; the message names file, line, field
            and remedy.
    """
    lengths: dict[int, int] = {}
    kinds: dict[int, str] = {}
    for kind, (name, id_field) in FILES.items():
        for where, value in read_jsonl(folder / name):
            block, length = _integer(value, id_field, where, 0), _integer(value, "token_length", where, 1)
            if kinds.setdefault(block, kind) != kind:
                raise DataError(
                    f"{where}: {id_field}: {block} is in {FILES[kinds[block]][0]} too; give ids of one kind."
                )
            if lengths.setdefault(block, length) != length:
                raise DataError(
                    f"{where}: token_length: {length}, but {lengths[block]} before; give one length per id."
                )
    sessions: dict[str, int] = {}
    requests: list[PulseRequest] = []
    for where, value in read_jsonl(folder / TRACE_FILE):
        if num is not None and len(requests) == num:
            break
        requests.append(_request(value, where, lengths, kinds, sessions))
    if not requests:
        raise DataError(f"{folder / TRACE_FILE}: no request in it; give the trace of RAGPulse.")
    begin = requests[0].time_s
    requests = [replace(request, time_s=request.time_s - begin) for request in requests]
    names = (TRACE_FILE, *(name for name, _ in FILES.values()))
    digests = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}
    return RagPulse(tuple(requests), MappingProxyType(lengths), MappingProxyType(digests))


def _request(
    value: Mapping[str, Any],
    where: str,
    lengths: Mapping[int, int],
    kinds: Mapping[int, str],
    sessions: dict[str, int],
) -> PulseRequest:
    hash_ids = value.get("hash_ids")
    if not isinstance(hash_ids, dict):
        raise DataError(f"{where}: hash_ids: missing or no object; give one with {', '.join(FILES)}.")
    blocks: dict[str, tuple[int, ...]] = {}
    for kind, (name, _) in FILES.items():
        ids = hash_ids.get(kind)
        if not isinstance(ids, list) or not all(isinstance(one, int) and not isinstance(one, bool) for one in ids):
            raise DataError(f"{where}: hash_ids.{kind}: missing or no list of ids; give one, [] for none.")
        unknown = next((one for one in ids if kinds.get(one) != kind), None)
        if unknown is not None:
            raise DataError(f"{where}: hash_ids.{kind}: {unknown} is not in {name}; add its length there.")
        blocks[kind] = tuple(ids)
    known_len = sum(lengths[block] for ids in blocks.values() for block in ids)
    template_len = _integer(value, "input_length", where, 1) - known_len
    if template_len < 0:
        raise DataError(f"{where}: input_length: less than its blocks have, {known_len}; give their sum at least.")
    try:
        time_s = float(value["timestamp"])
    except (KeyError, TypeError, ValueError):
        raise DataError(f"{where}: timestamp: missing or no number; give seconds.") from None
    return PulseRequest(
        time_s=time_s,
        session=sessions.setdefault(str(value.get("session_id", "")), len(sessions)),
        output_len=_integer(value, "output_length", where, 0),
        system=blocks["sys_prompt"],
        passages=blocks["passages_ids"],
        history=blocks["history"],
        web=blocks["web_search"],
        user=blocks["user_input"],
        template_len=template_len,
    )


def _integer(value: Mapping[str, Any], field: str, where: str, least: int) -> int:
    number = value.get(field)
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise DataError(f"{where}: {field}: {number!r} is not an integer of at least {least}; give one.")
    return number


TEMPLATE = 2**40
"""The id given to `block_tokens` for the template's tokens."""


def block_tokens(block: int, length: int, vocab: range) -> tuple[int, ...]:
    """Token ids of a block, drawn with its id as the seed: equal ids give equal tokens, whatever was drawn before.

    Args:
        vocab: the ids to draw from.
    """
    rng = np.random.default_rng((vocab.start, vocab.stop, block))
    return tuple(rng.integers(vocab.start, vocab.stop, length).tolist())
