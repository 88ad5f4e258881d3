"""Marks change nothing but what is reused, whatever tokenizer, marks and white space: thousands of bodies from a seed.

The model gets the tokens of the same body without marks, `usage` counts them, and `/v1/messages/count_tokens` says so.
"""

from __future__ import annotations

import copy
import dataclasses
from functools import cache
from typing import Any

import pytest
from tokenizers import processors
from transformers import PreTrainedTokenizerFast

import drawn_requests as drawn
from sglang_chunk_cache.flags import server_args as options
from tiny_models import CHAT_TEMPLATE, make_tokenizer
from tokenizer_families import FAMILIES

SEED = 1
TEXTS = [" ".join(drawn.WORDS), "Answer from the passages.\nRome's river is 405 km long (probably).\n"] * 3
TOKENIZERS = (*FAMILIES, "no BOS", "bytes")


@cache
def tokenizer_of(name: str) -> Any:
    if name in ("bytes", "no BOS"):
        return make_tokenizer(add_bos=name == "bytes")
    core = FAMILIES[name](TEXTS)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="<|end|>", chat_template=CHAT_TEMPLATE
    )
    added = [("<s>", tokenizer.convert_tokens_to_ids("<s>"))]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=added)
    return tokenizer


def used(path: str, reply: Any) -> int:
    """The tokens of the prompt, as a reply counts them."""
    if path == "/generate":
        return sum(one["meta_info"]["prompt_tokens"] for one in (reply if isinstance(reply, list) else [reply]))
    usage = reply["usage"]
    if path == drawn.MESSAGES:
        return usage["input_tokens"] + (usage.get("cache_read_input_tokens") or 0)
    return usage["prompt_tokens"]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_marks_change_no_token(service, monkeypatch, full_matrix, name):
    num = 4000 if full_matrix else 300
    monkeypatch.setattr(service.manager, "tokenizer", tokenizer_of(name))
    monkeypatch.setattr(options, "_current", dataclasses.replace(options._current, marks=True, parts=True))
    num_marked = 0
    for number in range(num):
        _, path, body = drawn.request_of(SEED, number, drawn.TEXT_ROUTES)
        if not isinstance(body, dict) or body.get("stream") or path == drawn.COUNT:
            continue
        plain = drawn.without_marks(body)
        found = []
        for one in (body, plain):
            service.scheduler.seen.clear()
            response = service.post(path, copy.deepcopy(one))
            assert response.status_code < 500, (number, response.text)
            ids = sorted(list(request.input_ids) for request in service.scheduler.seen)
            found.append((response, ids))
            if response.status_code == 200 and path in (drawn.MESSAGES, "/generate") and body.get("n", 1) == 1:
                assert used(path, response.json()) == sum(map(len, ids)), number
            if response.status_code == 200 and path == drawn.MESSAGES:
                count = service.post(drawn.COUNT, copy.deepcopy(one))
                assert count.json() == {"input_tokens": len(ids[0])}, number
        (marked, ids), (unmarked, stock_ids) = found
        if marked.status_code == unmarked.status_code == 200 and drawn.is_comparable(body):
            num_marked += body != plain
            assert ids == stock_ids, number
    assert num_marked > num / 8
