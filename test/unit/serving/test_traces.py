"""Traces: shape and determinism of what is generated, answers that hold, and broken logs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.common.ragpulse import read_ragpulse
from benchmark.demo.corpus import cut_passages, read_corpus
from benchmark.quality.prompts import SEPARATOR
from benchmark.quality.question import DataError
from benchmark.quality.synthetic.vocabulary import ID_OF
from benchmark.serving import traces
from benchmark.serving.plan import STANDARD, VOCAB
from benchmark.serving.prompt import Chunk, Prompt
from benchmark.serving.systems import Writer, parse_systems

from pulse_files import write_pulse

ROOT = Path(__file__).resolve().parents[3]
SPEC = replace(STANDARD.spec, num_requests=300)


def test_generated_prompts_are_as_the_spec_says() -> None:
    prompts = traces.generated(SPEC, VOCAB)
    assert prompts == traces.generated(SPEC, VOCAB)
    assert prompts != traces.generated(replace(SPEC, seed=1), VOCAB)
    counts = {len(prompt.chunks) for prompt in prompts}
    assert counts == set(range(SPEC.chunks_per_request, SPEC.max_chunks_per_request + 1))
    assert len({prompt.head for prompt in prompts}) == 1
    assert len({prompt.tail for prompt in prompts}) == len(prompts)
    chunks = [chunk for prompt in prompts for chunk in prompt.chunks]
    assert all(3 <= token < VOCAB for chunk in chunks for token in chunk.content)
    new = [chunk for chunk in chunks if int(chunk.key) >= SPEC.num_chunks]
    assert len(new) == len({chunk.key for chunk in new})
    assert len(new) / len(chunks) == pytest.approx(SPEC.new_share, abs=0.015)
    by_key = Counter((chunk.key, chunk.content) for chunk in chunks)
    assert len(by_key) == len({chunk.key for chunk in chunks})
    lengths = [len(prompt.tail) for prompt in prompts]
    assert sum(lengths) / len(lengths) == pytest.approx(SPEC.question_len, rel=0.1)


def test_a_trace_without_repetition() -> None:
    prompts = traces.generated(replace(SPEC, num_requests=40, new_share=1.0), VOCAB)
    keys = [chunk.key for prompt in prompts for chunk in prompt.chunks]
    assert len(keys) == len(set(keys))


def test_documents_are_retrieved_best_first_and_mark_nothing() -> None:
    passages = cut_passages(read_corpus(ROOT), lambda text: len(text) // 4)
    prompts = traces.documents(passages, num=20)
    for prompt in prompts:
        assert 4 <= len(prompt.chunks) <= 6
        assert len({chunk.key for chunk in prompt.chunks}) == len(prompt.chunks)
        assert prompt.body({})["text"].count(SEPARATOR) == len(prompt.chunks) + 1
        assert SEPARATOR not in prompt.body(None)["text"]
    keys = Counter(chunk.key for prompt in prompts for chunk in prompt.chunks)
    assert max(keys.values()) > 2, "no passage comes again"


def test_notes_can_be_answered_from_the_prompt() -> None:
    prompts = traces.notes(traces.NotesSpec(400))
    families = Counter()
    for prompt in prompts:
        words = "".join(chunk.content for chunk in prompt.chunks).split()
        assert set(words) <= set(ID_OF)
        ask, what, name = prompt.tail.split()
        assert ask == "ask"
        told = [i for i, word in enumerate(words) if word == name]
        families[what] += 1
        if what == "owner":
            assert prompt.answer == words[told[0] + 1]
        elif what == "phone":
            assert prompt.answer == " ".join(words[told[0] + 1 : told[0] + 5])
        elif what == "visitor":
            assert prompt.answer == " ".join(words[i + 1] for i in told)
        else:
            role = words[told[0] - 1]
            later = [i for i, word in enumerate(words) if words[i - 1 : i + 1] == ["wearer", role]]
            assert told[0] < later[0], "what refers to a person stands before its introduction"
            assert prompt.answer == words[later[0] + 1]
    assert set(families) == {"owner", "phone", "visitor", "garb"}
    orders = Counter(tuple(chunk.key for chunk in prompt.chunks) for prompt in prompts)
    assert orders.most_common(1)[0][1] == 1, "an order came twice"


def test_a_log_becomes_prompts(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(
        '{"system": "S ", "chunks": ["a<|chunk|>", "b"], "question": "q?", "output_len": 5, "timestamp": 10}\n'
        '{"chunks": ["b"], "question": "r?", "session": 3, "timestamp": 12.5}\n'
    )
    first, second = traces.from_log(path, output_len=9)
    assert [chunk.content for chunk in first.chunks] == ["a(separator)", "b"]
    assert (first.head, first.output_len, first.arrival_s) == ("S ", 5, 0.0)
    assert (second.head, second.output_len, second.session, second.arrival_s) == ("", 9, 3, 2.5)
    assert second.chunks[0].key == first.chunks[1].key


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no request in it"),
        ('{"chunks": "a", "question": "q"}', r'log.jsonl:1: "chunks" is not a list of strings'),
        ('{"chunks": [" "], "question": "q"}', r'log.jsonl:1: "chunks" is not a list of strings'),
        ('{"chunks": ["a"]}', r'log.jsonl:1: "question" is missing'),
        ('{"chunks": ["a"], "question": "q", "output_len": 0}', '"output_len" is 0'),
        ('{"chunks": ["a"], "question": "q", "output_len": true}', '"output_len" is True'),
        ('{"chunks": ["a"], "question": "q", "timestamp": "x"}', "\"timestamp\" is 'x'"),
        ('{"chunks": ["a"], "question": "q", "time": 1}', "unknown field 'time'"),
        (
            '{"chunks": ["a"], "question": "q", "timestamp": 1}\n{"chunks": ["a"], "question": "q"}',
            '"timestamp" is missing in 1 lines',
        ),
        (
            '{"chunks": ["a"], "question": "q", "timestamp": 1}\n{"chunks": ["a"], "question": "q", "timestamp": 0}',
            'log.jsonl:2: "timestamp" is before',
        ),
    ],
)
def test_broken_logs_name_line_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        traces.from_log(path)


def test_ragpulse_gives_equal_texts_to_equal_ids(tmp_path: Path) -> None:
    pulse = read_ragpulse(write_pulse(tmp_path))
    prompts = traces.from_ragpulse(pulse, VOCAB)
    assert prompts == traces.from_ragpulse(pulse, VOCAB)
    assert [len(prompt.tokens) for prompt in prompts] == [pulse.prompt_len(one) for one in pulse.requests]
    assert prompts[0].chunks == prompts[1].chunks[::-1]
    assert prompts[0].head[:20] == prompts[1].head[:20]
    assert prompts[0].head[20:] != prompts[1].head[20:]
    assert prompts[0].tail == prompts[2].tail  # the same user input, and the template's tokens
    assert [prompt.arrival_s for prompt in prompts] == [0.0, 2.5, 4.0]
    behind = traces.from_ragpulse(pulse, VOCAB, 1)
    assert behind[0].head == prompts[0].head[:20]
    assert behind[0].tail == (*prompts[0].head[20:], *prompts[0].tail)
    marked = traces.from_ragpulse(pulse, VOCAB, marks_all=True)
    assert [prompt.tokens for prompt in marked] == [prompt.tokens for prompt in prompts]
    added = [len(one.history) + len(one.web) for one in pulse.requests]
    assert [len(more.chunks) - len(less.chunks) for more, less in zip(marked, prompts, strict=True)] == added
    assert sum(added)


def test_tokens_are_rebuilt_for_a_system_that_does_so(tmp_path: Path) -> None:
    prompts = traces.from_ragpulse(read_ragpulse(write_pulse(tmp_path)), VOCAB, 1)
    writer = Writer(parse_systems(["rebuild"])[0])
    first, second = (writer.body(prompt)["input_ids"] for prompt in prompts[:2])
    assert first == list(prompts[0].tokens)
    assert second[:90] == first[:90]  # system prompt and both passages, in the order of the first
    assert sorted(second) == sorted(prompts[1].tokens)
    with pytest.raises(DataError, match="a prompt of text where token ids are wanted"):
        writer.body(Prompt("system", (), "question", 1))


def test_set_cache_is_asked_in_the_order_of_an_earlier_prompt() -> None:
    first, second, third = (Chunk(key, (number,) * 3) for number, key in enumerate("ABC", 2))
    writer = Writer(parse_systems(["set-cache"])[0])
    prompts = [Prompt((1,), chunks, (9,), 1) for chunks in ((first, second), (second, first, third))]
    bodies = [writer.body(prompt) for prompt in prompts]
    assert bodies[0]["input_ids"] == [1, 2, 2, 2, 3, 3, 3, 9]
    assert bodies[1]["input_ids"] == [1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 9]
    assert "custom_params" not in bodies[1]["sampling_params"], "a stock server knows no marks"
