"""The demo's numbers, made by hand: time and quality of one condition stand in one row."""

from __future__ import annotations

import io

import pytest
from benchmark.demo.answers import DEFAULT, REUSED, Quality, count_right, make_notes, qualities_of
from benchmark.demo.report import cold_table, kinds_table, name_of, sooner, summarize, warm_table
from benchmark.demo.session import Clocked, Exchange
from rich.console import Console

from chunk_cache_tools.conditions import REFERENCE, Condition
from chunk_cache_tools.verify.reply_log import Forced, Reply


def reply(prompt: str, text: str, loss: float, kl: float | None = 0.5) -> Reply:
    return Reply(prompt, "epic", 0.15, text, 1, 10, 5, 1, kl, own=Forced(2, -0.1 - loss))


@pytest.fixture
def clocked() -> list[Clocked]:
    """Stock takes one and three seconds, everything else half of that, full recomputation the same."""
    found = []
    for stock_s in (1.0, 3.0, 1.0):
        found.append(Clocked(REFERENCE, stock_s, stock_s + 0.5))
        for condition in REUSED:
            share = 1.0 if condition.ratio == 1 else 0.5
            found.append(Clocked(condition, share * stock_s, share * stock_s + 0.5))
    return found


@pytest.fixture
def exchanges() -> list[Exchange]:
    def told(reused: int) -> dict[str, object]:
        tokens = {"prefix_tokens": 100, "reused_tokens": reused, "recomputed_tokens": reused // 10}
        return {**tokens, "computed_tokens": 900 - reused, "chunks": [{"status": "hit" if reused else "miss"}]}

    return [Exchange("q", 1, told(0), told(reused), 1.0, 0.25 if reused else 1.0) for reused in (0, *[500] * 11)]


QUALITIES = {condition: Quality(24, 20, 0.25, 0.125) for condition in REUSED}


def shown(table: object) -> list[list[str]]:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(table)
    return [line.split() for line in console.export_text().splitlines() if line.strip()]


def test_quality_is_that_of_full_prefills_own_answers() -> None:
    full = [reply("a", "x", 0.0, None), reply("b", "y", 0.0, None)]
    replies = {REFERENCE: full, **{condition: [reply("a", "x", 0.5), reply("b", "z", 1.5)] for condition in REUSED}}
    quality = qualities_of(replies)[DEFAULT]
    assert (quality.num, quality.num_same, quality.kl, quality.loss) == (2, 1, 0.5, pytest.approx(1.0))


def test_speed_and_quality_stand_in_one_row(clocked: list[Clocked]) -> None:
    assert sooner(clocked, DEFAULT) == pytest.approx(2.0)
    rows = shown(warm_table(clocked, QUALITIES))
    (row,) = [row for row in rows if "(default)" in row]
    assert row[-8:] == ["500", "1000", "2.0x", "20", "of", "24", "0.25", "0.12"]
    (stock,) = [row for row in rows if "stock" in row]
    assert stock[-3:] == ["1000", "1500", "1.0x"]


def test_the_cold_table_has_a_row_per_ten_questions(exchanges: list[Exchange]) -> None:
    first, second, everything = shown(cold_table(exchanges))[-3:]
    assert first == ["1-10", "10", "(1)", "10000", "45%", "4%", "1000", "250", "4.0x"]
    assert second[0] == "11-12"
    assert everything[:3] == ["all", "12", "(1)"]


def test_right_answers_are_counted_by_kind() -> None:
    questions, prompts = make_notes(2)
    answers = [question.answers[0] for question in questions]
    wrong = [*answers[:-1], "wrong"]
    replies: dict[Condition, list[Reply]] = {
        condition: [reply(p.key, text, 0.0) for p, text in zip(prompts, texts, strict=True)]
        for condition, texts in ((REFERENCE, answers), (DEFAULT, wrong))
    }
    right = count_right(questions, replies)
    assert right[REFERENCE] == {"needle": (2, 2), "multi": (2, 2), "carry": (2, 2)}
    assert right[DEFAULT]["carry"] == (1, 2)
    assert shown(kinds_table(right))[-1][-3:] == ["1", "of", "2"]


def test_the_summary_says_what_it_costs(clocked: list[Clocked], exchanges: list[Exchange]) -> None:
    lines = summarize(clocked, QUALITIES, exchanges)
    assert "2.0x sooner where every passage is known, and 4.0x over the first 12 questions" in lines[0]
    assert "4 of 24 answers are no longer those of full prefill, and 0.12 nats per token are lost" in lines[1]
    assert len({name_of(condition) for condition in (REFERENCE, *REUSED)}) == 1 + len(REUSED)
