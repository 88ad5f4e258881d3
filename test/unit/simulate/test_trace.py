"""Traces: what a spec promises is in the trace; a bad file is told with file, line and remedy."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.simulate.jsonl import read_jsonl, write_jsonl
from benchmark.simulate.trace import PRESETS, TraceError, TraceSpec, generate

from chunk_cache_tools.jsonl import DataError

SPEC = TraceSpec(num_requests=300, num_chunks=200)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_is_drawn_the_same_each_time(name: str) -> None:
    spec = replace(PRESETS[name], num_requests=200)
    first, second, other = generate(spec), generate(spec), generate(replace(spec, seed=1))
    assert (first.requests, first.lengths) == (second.requests, second.lengths)
    assert first.requests != other.requests
    assert all(len(set(request.chunks)) == spec.chunks_per_request for request in first.requests)
    assert all(0 <= chunk < spec.num_chunks for chunk in first.distinct)


def test_new_orders_are_new() -> None:
    orders = [request.chunks for request in generate(replace(SPEC, num_chunks=8, chunks_per_request=4)).requests]
    assert len(set(orders)) == len(orders)


def test_sorted_orders_are_sorted_and_repeats_repeat() -> None:
    trace = generate(replace(SPEC, order="sorted", repeat_share=0.5))
    orders = [request.chunks for request in trace.requests]
    assert all(list(order) == sorted(order) for order in orders)
    assert len(set(orders)) < 0.65 * len(orders)


def test_popularity_follows_the_exponent() -> None:
    def share_of_top(zipf: float, drift_every: int = 0) -> float:
        spec = TraceSpec(num_requests=1000, num_chunks=500, zipf=zipf, topic_share=0, drift_every=drift_every)
        chunks = [chunk for request in generate(spec).requests for chunk in request.chunks]
        return sum(num for _, num in Counter(chunks).most_common(25)) / len(chunks)

    flat, steep, drifting = share_of_top(0.0), share_of_top(1.0), share_of_top(1.0, drift_every=100)
    assert flat < 0.1
    assert flat < drifting < 0.8 * steep


def test_a_growing_corpus_grows() -> None:
    trace = generate(replace(SPEC, initial_share=0.1))
    assert len({chunk for request in trace.requests[:30] for chunk in request.chunks}) <= 40
    assert len(trace.distinct) > 100


def test_sessions_bring_their_own_chunks_again() -> None:
    def repeated(share: float) -> float:
        trace = generate(replace(SPEC, num_chunks=5000, session_len=10, session_share=share, zipf=0.2, topic_share=0))
        seen: dict[int, set[int]] = {}
        num = 0
        for request in trace.requests:
            known = seen.setdefault(request.session, set())
            num += sum(chunk in known for chunk in request.chunks)
            known.update(request.chunks)
        return num / trace.num_chunks

    assert repeated(0.0) < 0.02
    assert repeated(0.6) > 0.3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"order": "random"}, "order: unknown order 'random'; known orders: new, drawn, sorted"),
        ({"chunks_per_request": 201}, "chunks_per_request: 201 of a corpus that begins with 200"),
        ({"topic_share": 1.5}, r"topic_share: 1.5 is not in \[0, 1\]; give such a number"),
        ({"topic_share": 1.0, "topic_size": 3}, "topic_share: 1 lets a request have chunks of one topic only"),
        ({"num_requests": 0}, "num_requests: 0 is not at least 1"),
        ({"repeat_share": 0.1}, "repeat_share: no order is new"),
    ],
)
def test_a_spec_says_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        replace(SPEC, **changes)


def test_too_few_orders_are_told() -> None:
    with pytest.raises(TraceError, match="order: found no new order"):
        generate(TraceSpec(num_requests=10, num_chunks=2, chunks_per_request=2))


def test_a_written_trace_is_read_back(tmp_path: Path) -> None:
    trace = generate(replace(SPEC, num_requests=20))
    path = tmp_path / "requests.jsonl"
    write_jsonl(trace, path)
    read = read_jsonl(path, system_len=trace.system_len)
    names = {chunk: number for number, chunk in enumerate(dict.fromkeys(c for r in trace.requests for c in r.chunks))}
    assert [tuple(names[c] for c in r.chunks) for r in trace.requests] == [r.chunks for r in read.requests]
    assert [trace.prompt_len(r) for r in trace.requests] == [read.prompt_len(r) for r in read.requests]


def test_texts_are_their_own_ids_and_give_their_length(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    chunks = [{"text": "nine char"}, {"id": "nine char", "length": 7}, {"text": "nine char"}]
    path.write_text(json.dumps({"chunks": chunks, "question_len": 5}) + "\n\n" + json.dumps({"chunks": []}) + "\n")
    trace = read_jsonl(path, system_len=1, chars_per_token=4)
    assert [request.chunks for request in trace.requests] == [(0, 1, 0), ()]
    assert trace.lengths == (3, 7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r":2: not JSON .*; give one object per line"),
        ("[]", r":2: not an object; give one object per line"),
        ("[" * 10**5 + "]" * 10**5, r":2: objects or lists are nested too deep; give one object per line"),
        ('{"chunks": [{"id": "a", "length": ' + "1" * 5000 + "}]}", r":2: not JSON .*; give one object per line"),
        ('{"chunk": []}', r":2: unknown key 'chunk'; known keys: chunks, question_len, session"),
        ('{"chunks": 3}', r":2: chunks: 3 is not a list; give a list"),
        ('{"chunks": [7]}', r":2: chunks\[0\]: 7 is not an object; give an object with id, text, length"),
        ('{"chunks": [{"length": 7}]}', r":2: chunks\[0\]: has not exactly one of id and text; give"),
        ('{"chunks": [{"id": "a"}, {"id": 1.5}]}', r":2: chunks\[1\]\.id: 1\.5 is not a string or an integer; give"),
        ('{"chunks": [{"id": "new"}]}', r':2: chunks\[0\]: has no length, .*; add "length"'),
        ('{"chunks": [{"id": "a", "length": 0}]}', r":2: chunks\[0\]\.length: 0 is not an integer of at least 1; give"),
        ('{"chunks": [{"id": "a", "length": 8}]}', r":2: chunks\[0\]\.length: 8, but the same chunk had 9 .*; give"),
        ('{"chunks": [], "question_len": true}', r":2: question_len: true is not an integer of at least 1; give"),
    ],
)
def test_a_bad_line_is_told_with_file_line_and_remedy(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"chunks": [{"id": "a", "length": 9}]}\n' + line + "\n")
    with pytest.raises((TraceError, DataError), match=r"requests\.jsonl" + message):
        read_jsonl(path, system_len=0)


def test_a_file_that_is_missing_or_empty_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="cannot be read"):
        read_jsonl(tmp_path / "none.jsonl", system_len=0)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(TraceError, match="holds no request; give one JSON object per line"):
        read_jsonl(tmp_path / "empty.jsonl", system_len=0)
