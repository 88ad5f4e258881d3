"""Why a request reuses nothing of an earlier one, from the two and from what the server has."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.advice import ADVICE, Level
from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.index.need import Need
from chunk_cache.keys import Partition
from chunk_cache.prompt.chunk_prompt import ChunkPrompt
from chunk_cache.prompt.marked_body import MarkFlags
from chunk_cache.types import REASONS
from chunk_cache_tools.doctor.comparison import REMEDIES, Cause, compare
from chunk_cache_tools.doctor.request_checks import Request, read_requests
from chunk_cache_tools.doctor.server_checks import Stored, ToldVariant, stored_of
from tiny_models import make_tokenizer

SEP = "<|chunk|>"
PASSAGE = "Paris is in France.\n"
ANY = Need(8)
SAME = replace(ANY, is_system_fixed=True)
WARMED = replace(SAME, is_trust_limited=True)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


@pytest.fixture
def read(tokenizer, tmp_path: Path):
    """A body -> a request."""

    def one(body: Mapping[str, Any]) -> Request:
        file = tmp_path / "request.json"
        file.write_text(json.dumps(body))
        (request,) = read_requests([str(file)], tokenizer, MarkFlags(SEP))
        return replace(request, where="there")

    return one


def prompt(*chunks: str, head: str = "Read. ") -> dict[str, Any]:
    return {"text": SEP.join((head, *chunks, " Where?"))}


def has(stored: Stored) -> Callable[[bytes, Need], Stored]:
    return lambda _key, _need: stored


def left_by(*sent: Request) -> Callable[[bytes, Need], Stored]:
    """A server that has what these prompts computed."""

    def told(prompt: ChunkPrompt, chunk: int) -> dict[str, Any]:
        context = [key.hex() for key in prompt.context(chunk)]
        kind = {"kind": "met" if context else "alone", "generation": 0, "stored_tokens": prompt.length(chunk)}
        return {**kind, "system": prompt.system.hex(), "context": context}

    def ask(key: bytes, need: Need) -> Stored:
        found = [(one.prompt, i) for one in sent for i, name in enumerate(one.prompt.keys) if name == key]
        return stored_of([ToldVariant.of(told(*one)) for one in found], (), need) if found else Stored()

    return ask


def found(
    earlier: list[Request],
    later: Request,
    ask: Callable[[bytes, Need], Stored] = lambda _key, _need: Stored(tokens=5, kinds=("met",)),
    *,
    least: int = 1,
    page_size: int = 1,
    need: Need = ANY,
) -> dict[str, list[str]]:
    """The causes by the name of their check; chunks are stored unless the test says otherwise."""
    checks = list(compare(earlier, later, ask, need, min_reuse_len=least, page_size=page_size))
    assert all(bool(check.remedy) == bool(check.cause) for check in checks)
    causes: dict[str, list[str]] = {}
    for check in checks:
        causes.setdefault(check.name, []).extend([check.cause] if check.cause else [])
    return causes


def test_every_cause_has_a_remedy():
    assert set(REMEDIES) == set(Cause)


@pytest.mark.parametrize("behind", ["", "\n", " ", "\n\n"])
def test_the_same_chunk_has_no_cause(read, behind):
    request = read(prompt(PASSAGE))
    assert found([request], read(prompt(PASSAGE.rstrip() + behind))) == {"text in front": [], "chunk 0": []}


@pytest.mark.parametrize(
    ("other", "cause"),
    [
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
    ids = [i for char in PASSAGE.rstrip(".\n") for i in tokenizer.encode(char, add_special_tokens=False)]
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
        has(Stored(tokens=1)),
        ANY,
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
    (check,) = compare([], read({"text": PASSAGE}), has(Stored()), ANY, min_reuse_len=1, page_size=1, discovers=True)
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
        ChunkCacheRequestError, match=r"request.json:1: (extra_key: not a string|chunk_cache: not JSON .*); "
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
        (Stored(below=("disk",)), []),
        (Stored(reason="evicted"), ["evicted"]),
        (Stored(), [Cause.NOT_STORED]),
    ],
)
def test_what_the_server_has(read, stored, causes):
    request = read(prompt(PASSAGE))
    assert found([request], request, has(stored))["chunk 0"] == causes


def test_what_cannot_be_known_is_said(read):
    later = read({**prompt(PASSAGE), "lora_path": "poet"})
    (check,) = compare([], later, lambda *_: pytest.fail("asked"), ANY, min_reuse_len=1, page_size=1)
    assert "unknown" in check.found
    *_, check = compare([], read(prompt(PASSAGE)), has(Stored(below=("disk",))), SAME, min_reuse_len=1, page_size=1)
    assert "unknown" in check.found, "a tier does not say what its variants were computed behind"


def test_files(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(prompt(PASSAGE)["text"] + "\n")
    (tmp_path / "b.jsonl").write_text(json.dumps(prompt("B")) + "\n" + json.dumps(prompt("C", "D")) + "\n")
    requests = read_requests([str(tmp_path / "a.txt"), str(tmp_path / "b.jsonl")], tokenizer, MarkFlags(SEP))
    assert [[chunk.text.lstrip() for chunk in request.chunks] for request in requests] == [
        [PASSAGE.rstrip(".\n")],
        ["B"],
        ["C", "D"],
    ]
    with pytest.raises(ChunkCacheRequestError, match="--prompt nowhere: cannot be read"):
        read_requests(["nowhere"], tokenizer, MarkFlags(SEP))


def test_line_breaks_of_a_file_are_as_the_client_sends_them(tokenizer, tmp_path):
    text = prompt("Paris is\r\nin France.")["text"]
    (tmp_path / "a.txt").write_bytes(f"{text}\r\n".encode())
    (request,) = read_requests([str(tmp_path / "a.txt")], tokenizer, MarkFlags(SEP))
    assert "is\r\nin" in request.chunks[0].text
    assert request.text.endswith("Where?")


# Other forms of marks.

CONTROL = {"cache_control": {"type": "ephemeral"}}
OTHER = "Rome is in Italy.\n"


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def chat(*contents: Any, **more: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": one} for i, one in enumerate(contents)], **more}


@pytest.mark.parametrize(
    "body",
    [
        chat([text(PASSAGE, **CONTROL), text("\nWhere?")], chunk_cache={"marks": True}),
        chat([text(PASSAGE), text("\nWhere?")], chunk_cache={"parts": True}),
        chat("Where?", chunk_cache={"chunks": [{"text": PASSAGE}]}),
        chat("Where?", documents=[PASSAGE]),
        {"prompt": "Where?", "chunk_cache": {"chunks": [{"text": PASSAGE}]}},
        chat([{"type": "document", "title": "a", "source": {"type": "text", "data": PASSAGE}}, text("\nWhere?")]),
    ],
)
def test_other_forms_of_marks_are_read(read, body):
    request = read(body)
    assert [chunk.text.strip(".\n ").endswith("Paris is in France") for chunk in request.chunks] == [True]
    assert found([request], request, left_by(request)) == {"text in front": [], "chunk 0": []}


def test_marks_that_are_off_are_named(read):
    off = chat([text(PASSAGE, **CONTROL), text("\nWhere?")])
    on = {**off, "chunk_cache": {"marks": True}}
    assert found([read(on)], read(off)) == {"prompt": [Cause.UNUSED, Cause.UNMARKED]}
    *_, check, _ = compare([read(off)], read(on), has(Stored(tokens=1)), ANY, min_reuse_len=1, page_size=1)
    assert (check.name, check.cause) == ("chunk 0", Cause.UNMARKED)
    assert "messages[0].content[0].cache_control is not used (off: --chunk-cache-marks)" in check.found


def test_what_only_the_server_can_read_is_said(read):
    image = read(chat([text(PASSAGE), {"type": "image_url", "image_url": {"url": "a"}}, text("Where?")]))
    assert found([], image) == {"prompt": [Cause.UNREAD]}
    assert found([image], read(prompt(PASSAGE))) == {"prompt": [Cause.UNREAD], "chunk 0": []}


# Inputs that failed once, made on purpose: the rows F1 to F10 that a doctor can see.

TURNS = chat(f"{SEP}{OTHER}{SEP}secret", "So.", f"{SEP}{PASSAGE}{SEP}go")
BLANK = chat([text(" ", **CONTROL), text("Where?")], chunk_cache={"marks": True})
ALONE, EVIL = (prompt(*chunks, head="Read.\n") for chunks in ((PASSAGE,), ("Evil.\n", PASSAGE)))
IN_FRONT, CHUNK = "text in front", "chunk 0"


@pytest.mark.parametrize(
    ("need", "earlier", "later", "causes"),
    [
        pytest.param(SAME, TURNS, chat(f"{SEP}{OTHER}{SEP}{PASSAGE}{SEP}Q"), {"chunk 1": ["other_system"]}, id="F3"),
        pytest.param(ANY, TURNS, chat(f"{SEP}{OTHER}{SEP}{PASSAGE}{SEP}Q"), {}, id="F3-any"),
        pytest.param(WARMED, EVIL, ALONE, {CHUNK: ["untrusted"]}, id="F4"),
        pytest.param(WARMED, ALONE, ALONE, {}, id="F4-alone"),
        pytest.param(ANY, EVIL, ALONE, {}, id="F4-any"),
        pytest.param(
            SAME,
            prompt(PASSAGE),
            prompt(PASSAGE, head="Think. "),
            {IN_FRONT: [Cause.SYSTEM_PROMPT], CHUNK: ["other_system"]},
            id="F8",
        ),
        pytest.param(ANY, BLANK, BLANK, {"prompt": [Cause.UNUSED, Cause.UNMARKED]}, id="F9"),
        pytest.param(ANY, TURNS, {**TURNS, **CONTROL}, {"prompt": [Cause.UNUSED]}, id="F10"),
    ],
)
def test_failures_are_answered(read, need, earlier, later, causes):
    first, last = read(earlier), read(later)
    checks = found([first], last, left_by(first), need=need)
    assert {name: one for name, one in checks.items() if one} == causes


def test_strict_servers_say_that_another_system_prompt_is_a_reason(read):
    ends = []
    for need in (ANY, SAME, WARMED):
        first, last = read(prompt(PASSAGE)), read(prompt(PASSAGE, head="Think. "))
        head, _ = compare([first], last, left_by(first), need, min_reuse_len=1, page_size=1)
        ends.append((head.level, "no reason" in head.remedy))
    assert ends == [(Level.OK, True), (Level.WARNING, False), (Level.WARNING, False)]


@pytest.mark.parametrize("reason", ["evicted", pytest.param("weights_changed", id="F6"), "partition_share"])
def test_what_is_gone_has_its_own_advice(read, reason):
    first = read(prompt(PASSAGE))
    *_, check = compare([first], first, has(Stored(reason=reason)), ANY, min_reuse_len=1, page_size=1)
    assert (check.level, check.remedy) == ADVICE[reason]
    assert check.found == REASONS[reason].rstrip(".")


@pytest.mark.parametrize(
    "body", [{"text": ""}, {"text": ["", ""]}, {"prompt": ""}, {"input_ids": []}], ids="F1-{}".format
)
def test_an_empty_prompt_of_a_model_without_bos_is_named(tmp_path, body):
    (tmp_path / "a.json").write_text(json.dumps(body))
    with pytest.raises(ChunkCacheRequestError, match=r"a.json:1: \w+: a prompt without tokens; give at least one"):
        read_requests([str(tmp_path / "a.json")], make_tokenizer(add_bos=False), MarkFlags(SEP))
