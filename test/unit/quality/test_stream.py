"""The stream of questions that share passages: what a prompt has, and how its table is made."""

from __future__ import annotations

from collections import Counter

from benchmark.quality.question import Question
from benchmark.quality.stream import FULL, Met, Shape, stream, table

MET = [
    Met(Question("s", tuple(f"{q}/{i}" for i in range(10)), f"q{q}", ("a",), id=str(q)), (f"{q}/3", f"{q}/7"))
    for q in range(4)
]
SHAPE = Shape(group=2, stock=9, num_chunks=5, rounds=3)


def test_prompts_have_what_their_question_needs_and_share_the_rest() -> None:
    asked = list(stream(MET, SHAPE))
    assert asked == list(stream(MET, SHAPE))
    assert [number for number, _ in asked] == [0, 0, 1, 1, 2, 2] * 2
    for first in (0, 6):
        block = [question for _, question in asked[first : first + 6]]
        stock = {passage for question in block for passage in question.chunks}
        assert len(stock) <= SHAPE.stock
        assert Counter(question.id for question in block).most_common()[0][1] == SHAPE.rounds
        for question in block:
            assert len(set(question.chunks)) == len(question.chunks) == SHAPE.num_chunks
            assert set(MET[int(question.id)].needed) <= set(question.chunks)
        assert len({question.chunks for question in block}) == len(block), "ever new orders"


def test_rounds_of_a_question_are_one_value_and_the_first_round_is_none() -> None:
    column = [9.0, 0.0, 0.2, 0.4, 9.0, 0.6]
    ours = {name: column for name in ("f1", "rows", "hits", "cfo", "own", "right")}
    lines = table({FULL.name: {"f1": [1.0] * 6}, "epic@0.15": ours}, [None, "a", "a", "b", None, "b"])
    assert "| 0.300 [0.100, 0.500] |" in lines[-1], "0.1 and 0.5 are the means of the two questions"
    assert "| -70.0 [" in lines[-1]
