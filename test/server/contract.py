"""The contract of a reply, checked on every one, and what a test expects a marked prompt to become.

- `Marked` is a prompt in pieces: its text with separators, and the token ids and spans that the server must make of it.
- `Passages` makes texts that no other test has sent.
- `prime` stores chunks, `events` reads a stream.
- `check_reply` holds for any `chunk_cache` object; `same_logprobs` compares a reply with one of a stock server.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from chunk_cache.methods import METHODS
from chunk_cache.prompt.marked_ids import encode_marked
from chunk_cache.prompt.marks import split_marked
from chunk_cache.types import REASONS, Status
from server_fixture import Server

SEP = "<|chunk|>"
FULL = {"ratio": 1.0}
TOLERANCE = 1e-4  # log-probabilities, fp32
WORDS = (
    *("the", "rose", "and", "a", "tale", "of", "old", "stone", "in", "her", "hand", "on", "this", "long", "winter"),
    *("road", "that", "led", "to", "nothing", "at", "all"),
)


class Passages:
    """Random texts of a test; another seed gives others."""

    def __init__(self, seed: str) -> None:
        self._rng = random.Random(seed)

    def __call__(self, num_words: int = 14) -> str:
        return " ".join(self._rng.choice(WORDS) for _ in range(num_words)) + f" {self._rng.randrange(10**6)}.\n"

    def several(self, count: int, num_words: int = 14) -> list[str]:
        return [self(num_words) for _ in range(count)]


@dataclass(frozen=True)
class Marked:
    """A prompt with chunks between a text in front and a question behind."""

    head: str
    chunks: tuple[str, ...]
    question: str

    @property
    def text(self) -> str:
        return SEP.join((self.head, *self.chunks, self.question))

    @property
    def plain(self) -> str:
        return "".join((self.head, *self.chunks, self.question))

    def ids(self, tokenizer: Any) -> list[int]:
        """Those of the text without marks."""
        return list(tokenizer.encode(self.plain))

    def spans(self, tokenizer: Any) -> list[list[int]]:
        """Where the chunks lie in `ids`."""
        found = split_marked(self.text, SEP, "text") if self.chunks else None
        return [] if found is None else [list(span) for span in encode_marked(tokenizer, found).spans]


def marked(chunks: Sequence[str], head: str = "Read.", question: str = "Who is it?") -> Marked:
    """The chunks behind a text and a line break."""
    return Marked(f"{head.rstrip()}\n", tuple(chunks), question)


def encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def chunk_ids(tokenizer: Any, text: str) -> list[int]:
    """Of a passage, without the signs and the white space at its end."""
    return encode(tokenizer, text.rstrip(".\n"))


def check_reply(reply: Any, prompt_tokens: int, spans: Sequence[Sequence[int]] | None = None) -> Mapping[str, Any]:
    """Everything that holds for any reply; returns it."""
    assert isinstance(reply, dict), reply
    prefix, reused, computed = (reply[f"{kind}_tokens"] for kind in ("prefix", "reused", "computed"))
    assert min(prefix, reused, computed) >= 0
    assert prefix + reused + computed == prompt_tokens, reply
    assert computed >= 1, "the last token of a prompt is always computed"
    assert 0 <= reply["recomputed_tokens"] <= reused, reply
    assert 0.0 <= reply["ratio"] <= 1.0
    assert reply["method"] in METHODS
    assert reply["fallback_reason"] is None or reply["fallback_reason"] in REASONS
    for chunk in reply["chunks"]:
        assert chunk["status"] in list(Status), chunk
        assert chunk["reason"] is None or chunk["reason"] in REASONS, chunk
        assert (chunk["reason"] is None) == (chunk["status"] in ("prefix", "hit")), chunk
        assert chunk["status"] != "prefix" or chunk["end"] <= prefix
    assert (reused > 0) == ("hit" in statuses(reply)), reply
    if spans is not None:
        assert [[chunk["start"], chunk["end"]] for chunk in reply["chunks"]] == [list(span) for span in spans]
    return reply


def statuses(reply: Mapping[str, Any]) -> list[str]:
    return [chunk["status"] for chunk in reply["chunks"]]


def reasons(reply: Mapping[str, Any]) -> list[str | None]:
    return [chunk["reason"] for chunk in reply["chunks"]]


def generated(out: Mapping[str, Any], spans: Sequence[Sequence[int]] | None = None) -> Mapping[str, Any]:
    """The checked chunk cache object of an output of /generate; `cached_tokens` counts exact tokens only."""
    meta = out["meta_info"]
    reply = check_reply(meta["chunk_cache"], meta["prompt_tokens"], spans)
    assert meta["cached_tokens"] == reply["prefix_tokens"]
    details = meta.get("cached_tokens_details") or {"device": 0, "host": 0}
    assert details == {"device": reply["prefix_tokens"], "host": 0}
    return reply


def completed(response: Mapping[str, Any], spans: Sequence[Sequence[int]] | None = None) -> Mapping[str, Any]:
    """The same for a reply of an OpenAI route with one choice."""
    usage = response["usage"]
    reply = check_reply(response["sglext"]["chunk_cache"], usage["prompt_tokens"], spans)
    cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
    assert cached == reply["prefix_tokens"]
    return reply


def same_logprobs(ours: Mapping[str, Any], stock: Mapping[str, Any]) -> None:
    """Two outputs of /generate with `logprobs=True`: the same tokens, and log-probabilities as close as fp32 allows."""
    mine, theirs = ours["meta_info"], stock["meta_info"]
    assert ours["output_ids"] == stock["output_ids"]
    assert mine["prompt_tokens"] == theirs["prompt_tokens"]
    for name in ("output_token_logprobs", "input_token_logprobs"):
        assert values(mine.get(name)) == approx(values(theirs.get(name))), name
    for my_top, their_top in zip(mine["output_top_logprobs"], theirs["output_top_logprobs"], strict=True):
        assert values(my_top) == approx(values(their_top))


def values(entries: Sequence[Sequence[Any]] | None) -> list[float | None]:
    return [entry[0] for entry in entries or ()]


def approx(expected: list[float | None]) -> list[Any]:
    return [None if value is None else pytest.approx(value, abs=TOLERANCE) for value in expected]


def events(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """The JSON events of a stream, without the final mark."""
    lines = server.post(path, {**body, "stream": True}).text.split("\n\n")
    data = [line.removeprefix("data: ") for line in lines if line]
    assert data[-1] == "[DONE]"
    return [json.loads(event) for event in data[:-1]]


def metric(server: Server, name: str, **labels: str) -> float:
    """Sum of the samples of `sglang:chunk_cache_<name>` with these labels; 0 where nothing was counted."""
    total = 0.0
    for line in server.get("/metrics").text.splitlines():
        match = re.match(rf"sglang:chunk_cache_{name}(?:\{{(.*)\}})? (\S+)$", line)
        if match and labels.items() <= dict(re.findall(r'(\w+)="([^"]*)"', match[1] or "")).items():
            total += float(match[2])
    return total


def prime(server: Server, chunks: list[str], **body: Any) -> None:
    """Stores chunks one by one, without generating anything."""
    for chunk in chunks:
        server.generate(marked([chunk]).text, max_new_tokens=0, **body)
