"""Exported data sets, which SGLang's own tool reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark.common.machine import ROOT
from benchmark.quality.question import DataError
from benchmark.serving import traces
from benchmark.serving.export_dataset import MARKED, answer_of_len, write_dataset
from benchmark.serving.prompt import Prompt
from benchmark.serving.systems import BASELINES
from transformers import AutoTokenizer

MODEL = ROOT / "benchmark" / "quality" / "models" / "qa-1m-seed1"


def test_a_custom_dataset_as_sglang_reads_it(tmp_path: Path) -> None:
    from sglang.benchmark.datasets.custom import sample_custom_requests

    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = traces.notes(traces.NotesSpec(12))
    path = tmp_path / "notes.jsonl"
    assert write_dataset(path, prompts, MARKED, tokenizer)[0] == 12
    rows = sample_custom_requests(str(path), 12, tokenizer)
    assert sorted(row.prompt for row in rows) == sorted(prompt.body({})["text"] for prompt in prompts)
    assert {row.output_len for row in rows} == {traces.NOTES_OUTPUT_LEN}

    write_dataset(path, prompts, BASELINES["stock"], tokenizer)
    rows = sample_custom_requests(str(path), 12, tokenizer)
    assert sorted(row.prompt for row in rows) == sorted(prompt.body(None)["text"] for prompt in prompts)


def test_a_prompt_of_ids_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="token ids cannot be exported"):
        write_dataset(tmp_path / "x.jsonl", [Prompt((1, 2), (), (3,), 4)], MARKED, AutoTokenizer.from_pretrained(MODEL))


def test_length_of_answers() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for num in (1, 4, 9):
        assert len(tokenizer.encode(answer_of_len(num, tokenizer))) == max(4, num)


def test_exported_lines_are_conversations(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    write_dataset(path, traces.notes(traces.NotesSpec(2)), BASELINES["reorder"], AutoTokenizer.from_pretrained(MODEL))
    for line in path.read_text().splitlines():
        user, assistant = json.loads(line)["conversations"]
        assert (user["role"], assistant["role"]) == ("user", "assistant")
        assert "<|chunk|>" not in user["content"]
