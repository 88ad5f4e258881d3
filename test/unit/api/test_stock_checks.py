"""What would end a stock server, or be a 500 of it: a 400 names the field, also where a request has no marks."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_chunk_cache.api import stock_checks

ODD_PARAMS = [
    {"stop_regex": "("},
    {"stop_regex": ["a", "*"]},
    {"stop_regex": 3},
    {"stop": [3]},
    {"stop": {"a": 1}},
    {"stop_token_ids": ["a"]},
    {"stop_token_ids": 5},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": "x"}},
    {"logit_bias": [1]},
    {"temperature": "hot"},
    {"temperature": [1]},
    {"top_p": {}},
    {"top_k": "all"},
    {"max_new_tokens": "5"},
    {"max_new_tokens": 1.5},
    {"min_new_tokens": []},
    {"json_schema": {"type": "object"}},
    {"regex": ["a"]},
    {"ebnf": 1},
    {"structural_tag": {"a": 1}},
    {"sampling_seed": 2**64},
    {"ignore_eos": "yes"},
    {"repetition_penalty": "x"},
    {"frequency_penalty": "x"},
    {"stream_interval": "x"},
    {"no_such_parameter": 1},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("odd", ODD_PARAMS, ids=str)
def test_sampling_parameters_that_stock_cannot_use(service, seen, odd, stream):
    (name,) = odd
    body = {"text": "a", "sampling_params": {"max_new_tokens": 3, **odd}, "stream": stream}
    response = service.post("/generate", body)
    assert response.status_code == 400, response.text
    # SGLang's own reader of bodies is in front of some.
    assert name in response.text or "invalid type" in response.text
    assert seen == []
    response = service.post("/generate", {"text": ["a", "b"], "sampling_params": [{}, odd], "stream": stream})
    assert response.status_code == 400, response.text


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_a_pattern_that_is_none(service, seen, route):
    body = {"model": "m", "prompt": "a", "messages": [{"role": "user", "content": "a"}], "stop_regex": "("}
    for stream in (False, True):
        response = service.post(route, {**body, "stream": stream})
        assert response.status_code == 400, response.text
        assert "stop_regex: '(' cannot be used: missing ), unterminated subpattern" in response.text
    assert seen == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"sampling_params": {"n": None}}, "sampling_params.n: null is not a number; "),
        ({"sampling_params": {"n": 0}}, "sampling_params.n: 0 answers; give at least 1"),
        (
            {"sampling_params": {"logit_bias": {"5": 1e39}}},
            "sampling_params.logit_bias: {'5': 1e+39} cannot be used: a ",
        ),
        ({"sampling_params": {"logit_bias": {"5": -1e39}}}, "a bias must be from -1e+30 to 1e+30"),
        ({"sampling_params": {"n": 2**31}}, "sampling_params.n: 2147483648 answers; give at most 4096"),
        ({"sampling_params": {"repetition_penalty": 1e-40}}, "sampling_params.repetition_penalty: 1e-40 cannot be "),
        ({"token_indices_to_pool": [99]}, "token_indices_to_pool: only the server sets it"),
        ({"token_indices_to_pool": []}, "token_indices_to_pool: only the server sets it"),
        ({"text": None, "input_embeds": [[]]}, "input_embeds: a prompt without tokens; "),
        ({"text": ["a", "b"], "sampling_params": [{}, {"n": None}]}, "sampling_params[1].n: null is not a number; "),
        ({"positional_embed_overrides": "x"}, "positional_embed_overrides: 'x' is no PositionalEmbeds; leave it out"),
        ({"positional_embed_overrides": [{}]}, "positional_embed_overrides: [{}] is no PositionalEmbeds; leave it out"),
        ({"text": ["a", "b"], "return_logprob": [True]}, "return_logprob: a list of 1 for 2 prompts; "),
        ({"text": ["a", "b"], "logprob_start_len": [0]}, "logprob_start_len: a list of 1 for 2 prompts; "),
        ({"text": None, "input_ids": [[5], [6]], "top_logprobs_num": []}, "top_logprobs_num: a list of 0 for 2 "),
        ({"text": ["a", "b"], "token_ids_logprob": [[1]]}, "token_ids_logprob: a list of 1 for 2 prompts; "),
        ({"text": ["a", "b"], "lora_path": ["x"]}, "lora_path: a list of 1 for 2 prompts; "),
        ({"text": ["a", "b"], "bootstrap_room": []}, "bootstrap_room: a list of 0 for 2 prompts; "),
        ({"text": ["a", "b"], "modalities": ["image"]}, "modalities: a list of 1 for 2 prompts; "),
        ({"rid": ["a"]}, "rid: a list for one prompt that is no list; "),
        ({"return_hidden_states": []}, "return_hidden_states: a list for one prompt that is no list; "),
        ({"positional_embed_overrides": []}, "positional_embed_overrides: [] is no PositionalEmbeds; "),
        ({"lora_id": "b"}, "lora_id: only the server sets it; name the adapter in lora_path"),
        ({"lora_id": []}, "lora_id: only the server sets it; "),
        ({"sampling_params": {"top_k": 2**31}}, "sampling_params.top_k: 2147483648 cannot be used: it must be below "),
        ({"session_params": {"name": "s"}}, "session_params: "),
        ({"session_params": {"id": ["s"]}}, "session_params.id: "),
        ({"session_params": {"id": "s", "rid": {}}}, "session_params.rid: "),
        ({"session_params": {"id": "s", "offset": 1.5}}, "session_params.offset: "),
        ({"session_params": {"id": "s", "replace": "x"}}, "session_params.replace: "),
        ({"session_params": {"id": "s", "replace": True}}, "session_params.replace: "),
    ],
    ids=str,
)
def test_what_is_a_500_of_stock(service, seen, body, message, stream):
    response = service.post("/generate", {"text": "a", **body, "return_logprob": True, **body, "stream": stream})
    assert response.status_code == 400, response.text
    assert message in response.text
    assert not seen


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ({"n": 0}, "n: 0 answers; give at least 1, or leave it out"),
        ({"n": -1}, "n: -1 answers; "),
        ({"n": 4097}, "n: 4097 answers; give at most 4096"),
        ({"logit_bias": {"5": 1e39}}, "logit_bias: "),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs.add_generation_prompt: "),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs.tokenize: only the server sets it; "),
    ],
    ids=str,
)
def test_what_is_a_500_of_stock_in_a_chat(service, seen, field, message, stream):
    body = {"model": "m", "messages": [{"role": "user", "content": "a"}], "stream": stream}
    response = service.post("/v1/chat/completions", {**body, "stream_options": {"include_usage": True}, **field})
    assert response.status_code == 400, response.text
    assert message in response.text
    assert not seen


@pytest.mark.parametrize(("has_metrics", "status"), [(True, 400), (False, 200)])
def test_labels_of_metrics_that_nobody_allowed(service, seen, monkeypatch, has_metrics, status):
    flags = SimpleNamespace(enable_metrics=has_metrics, tokenizer_metrics_allowed_custom_labels=["team"])
    monkeypatch.setattr(stock_checks, "get_observability", lambda: flags)
    assert service.post("/generate", {"text": "a", "custom_labels": {"team": "b"}}).status_code == 200
    response = service.post("/generate", {"text": "a", "custom_labels": {"a": "b"}})
    assert response.status_code == status, response.text
    assert ("custom_labels.a: the server has no such label; " in response.text) == has_metrics


@pytest.mark.parametrize("extra_key", ["ID", "tenant-ID", ["a", "ID"]])
def test_a_tenant_that_would_be_taken_for_an_adapter(service, seen, monkeypatch, extra_key):
    adapters = {"poet": SimpleNamespace(lora_id="ID")}
    monkeypatch.setattr(service.manager.lora_registry, "get_all_adapters", lambda: adapters)
    text = ["a", "b"] if isinstance(extra_key, list) else "a"
    response = service.post("/generate", {"text": text, "extra_key": extra_key})
    assert response.status_code == 400, response.text
    assert "extra_key: ends with the id of a LoRA adapter; " in response.text
    assert seen == []
    body = {"text": "a", "extra_key": "ID-tenant", "sampling_params": {"max_new_tokens": 3}}
    assert service.post("/generate", body).status_code == 200
