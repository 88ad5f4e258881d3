"""Prompts as bodies, systems by name, and the tape that gives every system the same prompts."""

from __future__ import annotations

import pytest
from benchmark.quality.question import DataError
from benchmark.serving.bench import Tape, TraceTooShort
from benchmark.serving.prompt import Chunk, Prompt
from benchmark.serving.systems import BASELINES, STOCK, Writer, parse_systems, split_names

IDS = Prompt((1, 2), (Chunk("a", (3, 4, 5)), Chunk("b", (6,))), (7,), output_len=4)
TEXT = Prompt("S ", (Chunk("a", "A "), Chunk("b", "B ")), "q?", output_len=4, ends_at_eos=True)


def test_ids_with_spans() -> None:
    body = IDS.body({"method": "epic"})
    assert body["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
    params = body["sampling_params"]
    assert params["custom_params"] == {"chunk_cache": {"method": "epic", "spans": [[2, 5], [5, 6]]}}
    assert (params["max_new_tokens"], params["ignore_eos"]) == (4, True)
    assert "custom_params" not in IDS.body(None)["sampling_params"]
    assert IDS.body(None)["input_ids"] == body["input_ids"]


def test_text_with_separators() -> None:
    assert TEXT.body({})["text"] == "S <|chunk|>A <|chunk|>B <|chunk|>q?"
    assert TEXT.body(None)["text"] == "S A B q?"
    assert TEXT.body(None)["sampling_params"]["ignore_eos"] is False


def test_reordering_keeps_everything_else() -> None:
    prompt = IDS.reordered(("b", "a"))
    assert prompt.body(None)["input_ids"] == [1, 2, 6, 3, 4, 5, 7]
    assert prompt.body({})["sampling_params"]["custom_params"]["chunk_cache"]["spans"] == [[2, 3], [3, 6]]


def test_the_reordering_system_sends_known_orders_first() -> None:
    writer = Writer(BASELINES["reorder"])
    assert writer.body(IDS)["input_ids"] == [1, 2, 3, 4, 5, 6, 7]
    assert writer.body(IDS.reordered(("b", "a")))["input_ids"] == [1, 2, 3, 4, 5, 6, 7]


def test_an_answer_that_lists_what_passages_say_follows_their_order() -> None:
    prompt = Prompt("S", (Chunk("a", "rome"), Chunk("b", "oslo")), "q?", 4, answer="rome oslo", answer_of=" ".join)
    assert prompt.reordered(("b", "a")).answer == "oslo rome"
    writer = Writer(BASELINES["reorder"])
    writer.body(prompt.reordered(("b", "a")))
    writer.body(prompt)
    assert [sent.answer for sent in writer.sent] == ["oslo rome", "oslo rome"]


def test_commas_between_options_belong_to_the_name() -> None:
    text = "stock,cacheblend:focus_window=3,group_size=8@0.15, epic@0.3"
    assert split_names(text) == ["stock", "cacheblend:focus_window=3,group_size=8@0.15", " epic@0.3"]


def test_names_of_systems() -> None:
    stock, epic, default, alpha = parse_systems((STOCK, "epic@0.3", "cacheblend", "cache-craft:alpha=1"))
    assert (stock.kind, stock.options) == ("plain", None)
    assert (epic.name, epic.kind, epic.options) == ("epic@0.3", "chunk", {"method": "epic", "ratio": 0.3})
    assert default.name == "cacheblend@0.15"
    assert alpha.options == {"method": "cache-craft", "options": {"alpha": 1}}


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("vllm",), "vllm"),
        (("epic@2",), "not in \\[0, 1\\]"),
        (("epic@x",), "epic@x"),
        (("stock", "stock"), "given twice"),
    ],
)
def test_wrong_names_say_what_there_is(names: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        parse_systems(names)


def test_a_label_always_gives_the_same_prompts() -> None:
    prompts = [Prompt((i,), (), (), 1) for i in range(10)]
    tape = Tape(prompts)
    assert list(tape.take("warm-up", 3)) == prompts[:3]
    assert list(tape.take("closed", 4)) == prompts[3:7]
    assert list(tape.take("warm-up", 3)) == prompts[:3]
    with pytest.raises(TraceTooShort, match="rate: 4 prompts wanted, 3"):
        tape.take("rate", 4)
