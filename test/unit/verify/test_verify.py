"""Verification of a model: cases, distances and the verdict (with an engine: test/server/test_verify_engine.py)."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from sglang_chunk_cache.verify.__main__ import main
from sglang_chunk_cache.verify.measure import Distance, Findings, kl_divergence
from sglang_chunk_cache.verify.verdict import Thresholds, judge, table
from sglang_chunk_cache.verify.workload import generate_cases, read_cases

GOOD = Distance(mean_kl=0.0, max_kl=0.0, top1=1.0, max_logprob=1e-6, recomputed=0.8, reused=0.8)
LOOSE = Thresholds(tolerance=1e-3, min_top1=0.8, max_kl=0.5)


def test_generated_prompts_prime_exactly_their_chunks() -> None:
    cases = generate_cases(3, 500, num_chunks=4, chunk_len=20, edge_len=6, seed=1)
    assert cases == generate_cases(3, 500, num_chunks=4, chunk_len=20, edge_len=6, seed=1)
    assert cases != generate_cases(3, 500, num_chunks=4, chunk_len=20, edge_len=6, seed=2)
    for case in cases:
        ids = case.prompt.fields["input_ids"]
        assert len(case.prompt.spans) == len(case.priming) == 4
        for (start, end), ask in zip(case.prompt.spans, case.priming, strict=True):
            ((own_start, own_end),) = ask.spans
            assert ask.fields["input_ids"][own_start:own_end] == ids[start:end]
            assert ask.fields["input_ids"][:own_start] == ids[:6]
        assert 0 <= min(ids) <= max(ids) < 500


def test_prompts_of_a_file_are_marked_text(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    value = {"system": "S ", "chunks": ["A ", "B ", "A "], "question": "Q"}
    path.write_text("\n" + json.dumps(value) + "\n" + json.dumps(value) + "\n")
    (case,) = read_cases(path, "|", 1)
    assert case.prompt.fields == {"text": "S |A |B |A |Q"}
    assert [ask.fields["text"] for ask in case.priming] == ["S |A |", "S |B |"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[]", '"chunks"'),
        ('{"chunks": ["a"]}', "two or more"),
        ('{"chunks": ["a", 3]}', '"chunks"'),
        ('{"chunks": ["a", " "]}', "empty"),
        ('{"chunks": ["a", "b|c"]}', "separator"),
        ('{"chunks": ["a", "b"], "question": 7}', '"question"'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"chunks": ["a", "b"], "question": "q"}\n' + line + "\n")
    with pytest.raises(ChunkCacheRequestError) as caught:
        read_cases(path, "|", 5)
    assert f"{path}:2" in str(caught.value)
    assert words in str(caught.value)


def test_a_missing_file_ends_the_call_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model-path", "nowhere", "--prompts", "missing.jsonl"]) == 2
    assert "--prompts: missing.jsonl" in capsys.readouterr().err


def test_kl_divergence_of_known_distributions() -> None:
    p, q = {1: math.log(0.5), 2: math.log(0.25)}, {1: math.log(0.25), 2: math.log(0.25)}
    expected = 0.5 * math.log(2) + 0.25 * math.log(0.25 / 0.5)
    assert kl_divergence(p, q) == pytest.approx(expected)
    assert kl_divergence(p, p) == 0.0


def test_a_model_that_holds_passes_every_check() -> None:
    findings = Findings(4, layer0=1e-12, ratio_one=GOOD, full_reuse=GOOD, configured=GOOD)
    assert all(check.holds for check in judge(findings, LOOSE))
    assert len(table(findings, "epic, ratio 0.15")) == 4


@pytest.mark.parametrize(
    ("findings", "words"),
    [
        (Findings(4, 0.5, GOOD, GOOD, GOOD), "layer 0"),
        (Findings(4, 0.0, Distance(0, 0, 1, 0.1, 1, 1), GOOD, GOOD), "ratio 1.0"),
        (Findings(4, 0.0, GOOD, GOOD, Distance(0, 0, 0.5, 0, 1, 1)), "likeliest"),
        (Findings(4, 0.0, GOOD, GOOD, Distance(0.9, 1, 1, 0, 1, 1)), "distribution"),
    ],
)
def test_each_check_fails_by_itself(findings: Findings, words: str) -> None:
    (failed,) = [check for check in judge(findings, LOOSE) if not check.holds]
    assert words in failed.statement
