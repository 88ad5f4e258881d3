"""What the benchmark of policies sends, and where its client that knows what is held sends it."""

from __future__ import annotations

from benchmark.fleet.bench_policies import POLICIES, body_of
from benchmark.serving.prompt import Chunk, Prompt

from chunk_cache_tools.routing import REPLICA_HEADER


def prompt_of(*keys: str) -> Prompt:
    chunks = tuple(Chunk(key, (ord(key), 50, 51)) for key in keys)
    return Prompt(head=(7, 8), chunks=chunks, tail=(9,), output_len=1)


def test_spans_are_the_passages() -> None:
    body = body_of(prompt_of("a", "b"))
    spans = body["sampling_params"]["custom_params"]["chunk_cache"]["spans"]
    assert [body["input_ids"][start:end] for start, end in spans] == [[97, 50, 51], [98, 50, 51]]
    assert body["input_ids"][1:3] + body["input_ids"][-1:] == [7, 8, 9]


def test_equal_passages_have_one_key() -> None:
    run = POLICIES["consistent_hashing, by routing_key"]()
    assert run.key_of(run, prompt_of("a", "b")) == run.key_of(run, prompt_of("b", "a"))
    assert POLICIES["random"]().key_of(run, prompt_of("a")) == ""


def test_who_holds_most_is_asked_unless_it_is_busy() -> None:
    run = POLICIES["consistent_hashing, by what is held"]()
    for replica in ("http://a", "http://b"):
        run.keys.note(run.keys.new_key(), {REPLICA_HEADER: replica})
        run.replicas[replica] = 10
    run.held.update({"a": "http://a", "b": "http://b", "c": "http://b"})
    assert run.key_of(run, prompt_of("a", "b", "c")) == run.keys.key_to("http://b")
    assert run.key_of(run, prompt_of("a", "x")) == run.keys.key_to("http://a")
    run.replicas["http://b"] = 40
    assert run.key_of(run, prompt_of("b", "c")) == run.keys.key_to("http://a")
    unknown = run.key_of(run, prompt_of("x"))
    assert unknown not in {run.keys.key_to("http://a"), run.keys.key_to("http://b")}
