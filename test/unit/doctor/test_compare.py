"""Why a request reuses nothing of an earlier one, from the two and from what the server has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.advice import Level
from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.keys import Partition
from chunk_cache_tools.doctor.comparison import REMEDIES, Cause, compare
from chunk_cache_tools.doctor.request_checks import Request, read_requests
from chunk_cache_tools.doctor.server_checks import Stored
from tiny_models import make_tokenizer

SEP = "<|chunk|>"
PASSAGE = "Paris is in France.\n"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def read(tokenizer, tmp_path: Path):
    """A body -> a request."""

    def one(body: Mapping[str, Any]) -> Request:
        file = tmp_path / "request.json"
        file.write_text(json.dumps(body))
        (request,) = read_requests([str(file)], tokenizer, SEP)
        return replace(request, where="there")

    return one


def prompt(*chunks: str, head: str = "Read. ") -> dict[str, Any]:
    return {"text": SEP.join((head, *chunks, " Where?"))}


def found(
    earlier: list[Request], later: Request, stored: Stored | None = None, *, least: int = 1, page_size: int = 1
) -> dict[str, list[str]]:
    """The causes by the name of their check; chunks are stored unless the test says otherwise."""

    def ask(ids, _partition):
        return stored or Stored(tokens=len(ids))

    checks = list(compare(earlier, later, ask, min_reuse_len=least, page_size=page_size))
    assert all(bool(check.remedy) == bool(check.cause) for check in checks)
    causes: dict[str, list[str]] = {}
    for check in checks:
        causes.setdefault(check.name, []).extend([check.cause] if check.cause else [])
    return causes


def test_every_cause_has_a_remedy():
    assert set(REMEDIES) == set(Cause)


def test_the_same_chunk_has_no_cause(read):
    request = read(prompt(PASSAGE))
    assert found([request], request) == {"text in front": [], "chunk 0": []}


@pytest.mark.parametrize(
    ("other", "cause"),
    [
        (PASSAGE.rstrip(), Cause.WHITE_SPACE),
        (f"\n{PASSAGE}", Cause.WHITE_SPACE),
        (PASSAGE.replace(" is ", "  is\n"), Cause.WHITE_SPACE),
        (f"Geography: {PASSAGE}", Cause.BOUNDARIES),
        ("Paris is", Cause.BOUNDARIES),
        ("Rome is in Italy.\n", Cause.OTHER_TEXT),
    ],
)
def test_other_texts(read, other, cause):
    assert found([read(prompt(PASSAGE))], read(prompt(other)))["chunk 0"] == [cause]


def test_the_same_text_in_other_tokens(read, tokenizer):
    ids = [i for char in PASSAGE for i in tokenizer.encode(char, add_special_tokens=False)]
    custom = {"custom_params": {"chunk_cache": {"spans": [[1, 1 + len(ids)]]}}}
    later = read({"input_ids": [1, *ids, 5], "sampling_params": custom})
    assert found([read(prompt(PASSAGE, head="Read.\n"))], later)["chunk 0"] == [Cause.TOKENIZATION]


@pytest.mark.parametrize("field", ["extra_key", "cache_salt", "lora_path"])
def test_other_partitions(read, field):
    earlier, later = read(prompt(PASSAGE)), read({**prompt(PASSAGE), field: "a"})
    assert found([earlier], later)["chunk 0"] == [Cause.PARTITION]
    assert found([earlier, later], later)["chunk 0"] == [], "one that shares is enough"


def test_an_empty_partition_is_none(read):
    assert read({**prompt(PASSAGE), "extra_key": ""}).partition == Partition()


def test_another_system_prompt_is_no_reason_for_chunks(read):
    head, _ = compare(
        [read(prompt(PASSAGE))],
        read(prompt(PASSAGE, head="Think. ")),
        lambda *_: Stored(tokens=1),
        min_reuse_len=1,
        page_size=1,
    )
    assert head.level is Level.OK
    causes = found([read(prompt(PASSAGE))], read(prompt(PASSAGE, head="Think. ")))
    assert causes == {"text in front": [Cause.SYSTEM_PROMPT], "chunk 0": []}


def test_what_is_not_marked(read, tokenizer):
    text = f"Read. {PASSAGE} Where?"
    ids = tokenizer.encode(text)
    for plain in ({"text": text}, {"messages": [{"role": "user", "content": text}]}, {"input_ids": ids}):
        assert found([read(prompt(PASSAGE))], read(plain)) == {"prompt": [Cause.UNMARKED]}
        assert found([read(plain)], read(prompt(PASSAGE)))["chunk 0"] == [Cause.UNMARKED]
    assert found([read({"text": "Something else."})], read(prompt(PASSAGE)))["chunk 0"] == [Cause.OTHER_TEXT]
    inside = read(prompt("Rome is in Italy.\n", head=f"Read. {PASSAGE}"))
    assert found([inside], read(prompt(PASSAGE)))["chunk 0"] == [Cause.UNMARKED]


def test_what_is_not_marked_may_be_discovered(read):
    (check,) = compare([], read({"text": PASSAGE}), lambda *_: Stored(), min_reuse_len=1, page_size=1, discovers=True)
    assert (check.level, check.cause) == (Level.OK, "")
    assert "--chunk-cache-discover looks for" in check.found


@pytest.mark.parametrize("mode", ["off", "exact"])
def test_modes(read, mode):
    later = read({**prompt(PASSAGE), "chunk_cache": {"mode": mode}})
    assert found([], later)["prompt"] == [Cause.MODE]


def test_what_an_earlier_request_did_not_remember(read):
    forgetful = read({**prompt(PASSAGE), "chunk_cache": {"mode": "off"}})
    assert found([forgetful], read(prompt(PASSAGE)))["chunk 0"] == [Cause.MODE]
    assert found([forgetful, read(prompt(PASSAGE))], read(prompt(PASSAGE)))["chunk 0"] == []


@pytest.mark.parametrize("body", [{"extra_key": ["a"]}, {"sampling_params": {"custom_params": {"chunk_cache": "{"}}}])
def test_what_is_no_request_is_named(read, body):
    with pytest.raises(
        ChunkCacheRequestError, match=r"request.json:1: (extra_key: not a string|chunk_cache: not JSON); "
    ):
        read({**prompt(PASSAGE), **body})


def test_too_short(read):
    request = read(prompt(PASSAGE))
    assert found([], request, least=100)["chunk 0"] == [Cause.TOO_SHORT]
    assert found([], request, page_size=64)["chunk 0"] == [Cause.TOO_SHORT]
    named = read({**prompt(PASSAGE), "custom_params": {"chunk_cache": {"ratio": 0.5}}})
    assert found([], named, least=100)["chunk 0"] == []


@pytest.mark.parametrize(
    ("stored", "causes"),
    [
        (Stored(tokens=5), []),
        (Stored(below=True), []),
        (Stored(evicted=True), [Cause.EVICTED]),
        (Stored(), [Cause.NOT_STORED]),
    ],
)
def test_what_the_server_has(read, stored, causes):
    request = read(prompt(PASSAGE))
    assert found([request], request, stored)["chunk 0"] == causes


def test_what_cannot_be_known_is_said(read):
    later = read({**prompt(PASSAGE), "lora_path": "poet"})
    (check,) = compare([], later, lambda *_: pytest.fail("asked"), min_reuse_len=1, page_size=1)
    assert "unknown" in check.found


def test_files(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(prompt(PASSAGE)["text"] + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(prompt("B")) + "\n" + json.dumps(prompt("C", "D")) + "\n")
    requests = read_requests([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], tokenizer, SEP)
    assert [[chunk.text.lstrip() for chunk in request.chunks] for request in requests] == [[PASSAGE], ["B"], ["C", "D"]]
    with pytest.raises(ChunkCacheRequestError, match="--prompt nowhere: cannot be read"):
        read_requests(["nowhere"], tokenizer, SEP)
