"""Prompts of a user's file as token ids: every way to write one, and every way to write one wrong."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.prompt.marked_body import MarkFlags
from chunk_cache_tools.jsonl import DataError
from chunk_cache_tools.verify.reply_log import Reply
from chunk_cache_tools.verify.token_prompt import TokenPrompt
from chunk_cache_tools.verify.workload import Workload, generate_prompts, pick, read_prompts
from tiny_models import make_tokenizer

FLAGS = MarkFlags("<|chunk|>", marks=True)
TEXT = "Read.<|chunk|>Paris is in France.\n<|chunk|>Rome is in Italy.\n<|chunk|>Where is Rome?"
SPANS = {"chunk_cache": {"spans": [[1, 3], [3, 5]]}}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(300)


def write(path: Path, *values: Any) -> Path:
    lines = [value if isinstance(value, str) else json.dumps(value) for value in values]
    path.write_text("\n".join(lines) + "\n")
    return path


def read(tmp_path: Path, tokenizer: Any, *values: Any, **options: Any) -> Workload:
    return read_prompts(write(tmp_path / "prompts.jsonl", *values), tokenizer, FLAGS, **options)


def pieces(prompt: TokenPrompt, tokenizer: Any) -> list[str]:
    """What stands before, in and behind the chunks."""
    ends = [0, *(place for span in prompt.spans for place in span), len(prompt.ids)]
    found = [prompt.ids[a:b] for a, b in pairwise(ends)]
    return [tokenizer.decode(list(ids)) for ids in found if ids]


def test_a_text_is_cut_at_its_separators(tmp_path: Path, tokenizer: Any) -> None:
    (prompt,) = read(tmp_path, tokenizer, {"text": TEXT, "sampling_params": {"max_new_tokens": 4}}).prompts
    head, *chunks, tail = pieces(prompt, tokenizer)
    assert head.endswith("Read.")
    assert (chunks, tail) == (["Paris is in France", ".\n", "Rome is in Italy"], ".\nWhere is Rome?")
    assert prompt.ids == tuple(tokenizer(head.removeprefix("<|bos|>"))["input_ids"]) + prompt.ids[len(prompt.head) :]
    assert read(tmp_path, tokenizer, {"prompt": TEXT}).prompts == (prompt,)


def test_every_turn_of_a_chat_marks_its_own_chunks(tmp_path: Path, tokenizer: Any) -> None:
    """What stands between two turns is no chunk: spans can say so, separators in one text could not."""
    messages = [
        {"role": "user", "content": "<|chunk|>First passage.<|chunk|>One?"},
        {"role": "assistant", "content": "Yes."},
        {"role": "user", "content": [{"type": "text", "text": "<|chunk|>Second passage.<|chunk|>Two?"}]},
    ]
    (prompt,) = read(tmp_path, tokenizer, {"messages": messages, "model": "m"}).prompts
    marked = [tokenizer.decode(list(prompt.ids[start:end])) for start, end in prompt.spans]
    assert marked == ["First passage", "Second passage"]
    whole = tokenizer.decode(list(prompt.ids))
    assert whole.count("<|bos|>") == 1
    assert "One?<|assistant|>Yes.<|user|>" in whole


def test_token_ids_come_with_their_spans(tmp_path: Path, tokenizer: Any) -> None:
    body = {"input_ids": list(range(10, 20))}
    in_params = {**body, "sampling_params": {"custom_params": SPANS}}
    in_custom = {**body, "custom_params": SPANS}
    at_top = {**body, **SPANS}
    logged = {**body, "sampling_params": {"custom_params": {"chunk_cache": json.dumps(SPANS["chunk_cache"])}}}
    for value in (in_params, in_custom, at_top, logged):
        (prompt,) = read(tmp_path, tokenizer, value).prompts
        assert prompt == TokenPrompt(tuple(range(10, 20)), ((1, 3), (3, 5)))


def test_a_question_is_written_as_the_harness_writes_it(tmp_path: Path, tokenizer: Any) -> None:
    value = {"system": "Read.", "chunks": ["A<|chunk|>B", "C"], "question": "Q?", "answers": ["x", "y"]}
    (plain,) = read(tmp_path, tokenizer, value).prompts
    _, *chunks, tail = pieces(plain, tokenizer)
    assert (chunks, tail) == (["A B", "\n\n", "C"], "\n\nQ?\nAnswer:")
    assert tokenizer.decode(list(plain.gold)) == " x"
    (chat,) = read(tmp_path, tokenizer, value, chat=True).prompts
    assert tokenizer.decode(list(chat.ids)).startswith("<|bos|><|system|>Read.<|user|>")
    assert tokenizer.decode(list(chat.ids)).endswith("Answer:<|assistant|>")


def test_a_log_of_the_server_is_read_and_the_rest_of_it_passed_over(tmp_path: Path, tokenizer: Any) -> None:
    asked = {"event": "request.received", "obj": {"text": TEXT}}
    work = read(
        tmp_path,
        tokenizer,
        asked,
        {"event": "request.finished", "obj": {"text": TEXT}, "out": {}},
        {"event": "request.received", "obj": {"text": "no marks"}},
        {"custom_id": "1", "body": {"prompt": TEXT + " Now!"}, "answers": ["Italy"]},
        asked,
    )
    assert len(work.prompts) == 2
    assert work.passed_over == {"without marks": 1, "that came before": 1}
    assert work.prompts[1].gold


def test_what_a_server_printed_is_read_by_its_events(tmp_path: Path, tokenizer: Any) -> None:
    """The time stands in front of every line, requests come as batches, and other lines are between them."""
    params = [{"custom_params": {"chunk_cache": json.dumps({"spans": spans})}} for spans in ([[1, 3]], [[2, 5]])]
    batch = {"input_ids": [list(range(10, 18)), list(range(20, 28))], "text": None, "sampling_params": params}
    event = json.dumps({"timestamp": "t", "event": "request.received", "rid": ["a", "b"], "obj": batch})
    finished = json.dumps({"timestamp": "t", "event": "request.finished", "obj": batch})
    lines = [
        "warnings.warn(",
        "[2026-01-01 00:00:00] Prefill batch",
        f"[2026-01-01 00:00:00] {event}",
        f"[x] {finished}",
    ]
    work = read(tmp_path, tokenizer, *lines)
    assert work.prompts == (
        TokenPrompt(tuple(range(10, 18)), ((1, 3),)),
        TokenPrompt(tuple(range(20, 28)), ((2, 5),)),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ({"question": "q"}, "it has none of messages, chunks, text, prompt, input_ids"),
        ({"chunks": ["a", 3]}, "chunks: not a list of strings"),
        ('{"text": "a", "n": ' + "1" * 5000 + "}", "not JSON (Exceeds the limit"),
        ('{"text": "a", "n": ' + "[" * 10**5 + "]" * 10**5 + "}", "nested too deep; give one object per line"),
        ('{"messages": [{"content": ' + "[" * 900 + "]" * 900 + "}]}", "nested too deep; nest fewer"),
        ({"text": "a\ud800" + TEXT}, "not a prompt: half of a surrogate pair"),
        ({"messages": []}, "messages: not a list of messages"),
        ({"chunks": ["a", "b"], "question": 7}, "question: not a string"),
        ({"text": 3}, "text: not a string; give one prompt per line"),
        ({"text": ["a", 3]}, "text: not a string; give one prompt per line"),
        ({"text": "one<|chunk|>separator"}, "text: only one separator"),
        ({"messages": "hello"}, "messages: not a list of messages"),
        ({"input_ids": [1, "x"]}, "input_ids: not a list of token ids"),
        ({"input_ids": [1, 2**70]}, "input_ids: not a list of token ids"),
        (
            {"messages": [{"role": "user", "content": [{"type": "search_result", "content": 5}, {"text": TEXT}]}]},
            "search_result.content: 5 is not a list of texts",
        ),
        ({"input_ids": [1, 2], "custom_params": SPANS}, "custom_params.chunk_cache.spans"),
        ({"input_ids": [1, 2], "custom_params": {"chunk_cache": "{"}}, "chunk_cache: not JSON (Expecting"),
        ({"text": TEXT, "answers": "Italy"}, "answers: not a list of strings"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, tokenizer: Any, line: Any, words: str) -> None:
    with pytest.raises(DataError) as caught:
        read(tmp_path, tokenizer, {"text": TEXT}, line)
    assert str(caught.value).startswith(f"{tmp_path / 'prompts.jsonl'}:2")
    assert words in str(caught.value)


def test_a_separator_that_cannot_be_seen_is_named(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match="separator: has no visible character; give the server's"):
        read_prompts(write(tmp_path / "prompts.jsonl", {"text": TEXT}), tokenizer, MarkFlags(""))


def test_null_is_not_given_and_blank_passages_are_left_out_and_counted(tmp_path: Path, tokenizer: Any) -> None:
    line: dict[str, Any] = {"chunks": ["A.", "B."], "question": "Q?"}
    plain = read(tmp_path, tokenizer, line)
    line |= {"system": None, "answers": None, "chunks": ["A.", " ", "B.", ""]}
    more = read(tmp_path, tokenizer, line, {"chunks": [" "], "question": "Q?"})
    assert more.prompts == plain.prompts
    assert more.unused == {"no visible text": 2}
    assert more.passed_over == {"whose marks are not used (no visible text)": 1}


def test_a_template_that_is_missing_or_changes_chunks_is_told(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(300)
    chat = {"messages": [{"role": "user", "content": "<|chunk|>A passage.<|chunk|>Q"}]}
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] | upper }}{% endfor %}"
    with pytest.raises(DataError, match="changes the marked chunks"):
        read(tmp_path, tokenizer, chat)
    tokenizer.chat_template = None
    with pytest.raises(DataError, match="has no chat template; give the prompts as text"):
        read(tmp_path, tokenizer, chat)


def test_a_file_without_marks_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"marks no chunk .* or name the server's separator by --separator"):
        read(tmp_path, tokenizer, {"text": "no marks"})


def test_prompts_are_picked_from_the_whole_file() -> None:
    prompts = generate_prompts(10, 500, chunk_len=10)
    assert pick(prompts, 20) == prompts
    assert pick(prompts, 3) == [prompts[0], prompts[3], prompts[6]]


# Token prompts.


def test_generated_prompts_are_the_same_every_time() -> None:
    prompts = generate_prompts(3, 500, num_chunks=4, chunk_len=20, edge_len=6, seed=1)
    assert prompts == generate_prompts(3, 500, num_chunks=4, chunk_len=20, edge_len=6, seed=1)
    assert prompts != generate_prompts(3, 500, num_chunks=4, chunk_len=20, edge_len=6, seed=2)
    for prompt in prompts:
        assert (len(prompt.spans), len(prompt.head), prompt.question_len) == (4, 6, 6)
        assert 0 <= min(prompt.ids) <= max(prompt.ids) < 500


def test_chunks_are_primed_alone_or_in_another_order() -> None:
    prompt = TokenPrompt((9, 1, 2, 3, 1, 2, 4, 8), ((1, 3), (3, 4), (4, 6), (6, 7)))
    assert prompt.chunks == ((1, 2), (3,), (4,))
    alone = prompt.priming(1)
    assert [(body.content, body.spans) for body in alone] == [
        ((9, 1, 2), ((1, 3),)),
        ((9, 3), ((1, 2),)),
        ((9, 4), ((1, 2),)),
    ]
    assert prompt.priming(4)[1].content == (9, 3, 3, 3, 3, 3), "a full page follows"
    shuffled = prompt.shuffled(1)
    found = tuple(shuffled.content[start:end] for start, end in shuffled.spans)
    assert sorted(found) == sorted(prompt.chunks)
    assert found != prompt.chunks
    assert prompt.shuffled(1) == shuffled


def test_answers_follow_the_prompt_as_token_ids() -> None:
    prompt = TokenPrompt((9, 1, 2, 8), ((1, 3),), gold=(5,))
    reference = Reply("p", "off", None, "text", 6, 4, 0, 0, ids=(6, 7))
    answered = prompt.answered(reference)
    assert {name: body.content for name, body in answered.items()} == {
        "gold": (9, 1, 2, 8, 5),
        "own": (9, 1, 2, 8, 6, 7),
    }
    assert all(body.spans == prompt.spans for body in answered.values())


def test_prompts_that_differ_in_their_marks_have_other_keys() -> None:
    ids = tuple(range(8))
    assert len({TokenPrompt(ids, spans).key for spans in (((1, 3),), ((1, 4),), ((1, 3), (3, 4)))}) == 3
    assert TokenPrompt(ids, ((1, 3),)).partition == TokenPrompt((0, 7, 6), ((1, 2),)).partition
