from __future__ import annotations

import json

import pytest

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache_tools.explain import replies


def generated(chunk_cache, text="Rome"):
    """A reply of /generate."""
    return {"text": text, "output_ids": [1], "meta_info": {"id": "x", "chunk_cache": chunk_cache}}


def write(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    return str(path)


def test_saved_replies_come_back(tmp_path, tokens, layer_reply, make_reply):
    path = str(tmp_path / "replies.jsonl")
    epic = make_reply(tokens.spans, len(tokens.texts))
    replies.save(path, [("epic", generated(epic)), ("mine", generated(layer_reply, "東京\u2028"))], tokens)
    found, explanations = replies.load(path, None)
    assert found == tokens
    assert [(one.label, one.answer) for one in explanations] == [("epic", "Rome"), ("mine", "東京\u2028")]
    assert explanations[1].reply == layer_reply


def test_bare_replies_need_the_prompt_and_are_named_after_their_method(tmp_path, tokens, layer_reply):
    path = write(tmp_path / "replies.jsonl", generated(layer_reply))
    with pytest.raises(ChunkCacheRequestError, match=r"replies.jsonl:1: .* give --prompt and --tokenizer too$"):
        replies.load(path, None)
    _, (one,) = replies.load(path, lambda: tokens)
    assert (one.label, one.answer) == ("cacheblend 0.4", "Rome")


def test_replies_of_another_prompt_are_refused(tmp_path, tokens, make_reply):
    shifted = [(start + 1, end) for start, end in tokens.spans]
    longer = write(tmp_path / "longer.jsonl", generated(make_reply(tokens.spans, len(tokens.texts) + 1)))
    elsewhere = write(tmp_path / "elsewhere.jsonl", generated(make_reply(shifted, len(tokens.texts))))
    with pytest.raises(ChunkCacheRequestError, match=r"speaks of .* tokens, the prompt has"):
        replies.load(longer, lambda: tokens)
    with pytest.raises(ChunkCacheRequestError, match="has its chunks at"):
        replies.load(elsewhere, lambda: tokens)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no replies; save some with --save FILE"),
        ("{}", ":1: the reply does not hold the prompt's tokens"),
        ("[]", ":1: not an object"),
        ("\n{oops", ":2: not JSON"),
        ('{"n": ' + "1" * 5000 + "}", ":1: not JSON"),
        ("[" * 10**5 + "]" * 10**5, ":1: objects or lists are nested too deep; give one object per line"),
        ('{"tokens": ["a"], "reply": 3}', ":1: not a reply"),
        ('{"tokens": ["a"], "reply": {}}', ":1: no object chunk_cache"),
        ('{"tokens": ["a"], "reply": {"meta_info": [1]}}', ":1: no object chunk_cache"),
        ('{"tokens": 5, "reply": {}}', ":1: tokens: 5 is not a list; save replies with --save"),
        (None, ": cannot be read ([Errno 2] No such file or directory"),
    ],
)
def test_a_bad_file_is_named(tmp_path, text, words):
    path = tmp_path / "replies.jsonl"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ChunkCacheRequestError) as caught:
        replies.load(str(path), None)
    assert str(caught.value).removeprefix("--replies ").startswith(str(path))
    assert words in str(caught.value)
