"""RAGPulse: what the files say is in the trace; equal ids are equal texts; a broken file is told with its line."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmark.common.ragpulse import FILES, TRACE_FILE, block_tokens, read_ragpulse

from chunk_cache_tools.jsonl import DataError
from pulse_files import REQUESTS, write_pulse


def test_requests_are_as_given(tmp_path: Path) -> None:
    pulse = read_ragpulse(write_pulse(tmp_path))
    first, second, third = pulse.requests
    assert (first.system, first.passages, first.history, first.web, first.user) == ((100, 101), (0, 1), (), (), (400,))
    assert (second.history, second.web, second.output_len, second.template_len) == ((200,), (300,), 12, 8)
    assert third.passages == (2, 0, 2)
    assert [one.time_s for one in pulse.requests] == [0.0, 2.5, 4.0]
    assert [one.session for one in pulse.requests] == [0, 1, 0]
    assert [pulse.prompt_len(one) for one in pulse.requests] == [one["input_length"] for one in REQUESTS]
    assert len(read_ragpulse(tmp_path, 2).requests) == 2


def test_results_can_name_the_files(tmp_path: Path) -> None:
    pulse = read_ragpulse(write_pulse(tmp_path))
    assert pulse.sha256 == {
        name: hashlib.sha256((tmp_path / name).read_bytes()).hexdigest()
        for name in (TRACE_FILE, *(name for name, _ in FILES.values()))
    }
    assert any(pulse.sha256[TRACE_FILE] in line for line in pulse.markdown())


def test_a_scaled_trace_keeps_ids_and_times(tmp_path: Path) -> None:
    pulse = read_ragpulse(write_pulse(tmp_path))
    scaled = pulse.scaled(0.1, 0.05)
    assert [one.blocks for one in scaled.requests] == [one.blocks for one in pulse.requests]
    assert (scaled.lengths[1], scaled.lengths[400], scaled.requests[0].output_len) == (4, 1, 1)
    assert pulse.scaled(0.1, 0.5).requests[0].output_len == 6
    assert scaled.requests[2].time_s == 4.0


def test_equal_ids_are_equal_texts_whatever_was_asked_before() -> None:
    vocab = range(10, 500)
    text = block_tokens(7, 200, vocab)
    assert block_tokens(8, 200, vocab) != text
    assert block_tokens(7, 200, vocab) == text
    assert len(text) == 200
    assert all(token in vocab for token in text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda one: one.pop("hash_ids"), "hash_ids: missing or no object; give one with sys_prompt"),
        (lambda one: one["hash_ids"].pop("history"), r"hash_ids\.history: missing or no list of ids; give one"),
        (
            lambda one: one["hash_ids"].update(passages_ids=[9]),
            r"hash_ids\.passages_ids: 9 is not in 2_passages\.jsonl; add",
        ),
        (
            lambda one: one["hash_ids"].update(passages_ids=[100]),
            r"hash_ids\.passages_ids: 100 is not in 2_passages\.jsonl",
        ),
        (lambda one: one.update(input_length=9), "input_length: less than its blocks have, 103; give their sum"),
        (lambda one: one.update(output_length=True), "output_length: True is not an integer of at least 0; give one"),
        (lambda one: one.update(timestamp="noon"), "timestamp: missing or no number; give seconds"),
    ],
)
def test_a_broken_request_is_told(tmp_path: Path, change: Callable[[Any], object], message: str) -> None:
    broken = copy.deepcopy(REQUESTS[0])
    change(broken)
    write_pulse(tmp_path, [REQUESTS[1], broken])
    with pytest.raises(DataError, match=r"trace\.jsonl:2: " + message):
        read_ragpulse(tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"passage_id": 0}', "token_length: None is not an integer of at least 1; give one"),
        ('{"passage_id": 100, "token_length": 3}', r"passage_id: 100 is in 1_sys_prompt\.jsonl too; give ids of one"),
        ('{"passage_id": 0, "token_length": 3}', "token_length: 3, but 30 before; give one length per id"),
    ],
)
def test_a_broken_length_is_told(tmp_path: Path, line: str, message: str) -> None:
    write_pulse(tmp_path)
    with (tmp_path / "2_passages.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(DataError, match=r"2_passages\.jsonl:6: " + message):
        read_ragpulse(tmp_path)


def test_a_folder_without_the_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"1_sys_prompt\.jsonl: cannot be read"):
        read_ragpulse(tmp_path)
    write_pulse(tmp_path, [])
    with pytest.raises(DataError, match=r"trace\.jsonl: no request in it"):
        read_ragpulse(tmp_path)
