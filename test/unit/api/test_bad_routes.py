"""Bad input on /generate, the OpenAI routes and others: a 400 that names the place, and what is served all the same."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chunk_cache.options.request_options import MAX_CHUNKS
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, attach, attached
from unit.api.client_bodies import chat
from unit.api.seen_requests import chunks_of

SEP = "<|chunk|>"
OPTS = "sampling_params.custom_params.chunk_cache"


MARKED = "Read.<|chunk|>the rose<|chunk|>Who?"


def marked(text: str, *chunks: str, question: str = "Who?") -> str:
    return text + SEP + SEP.join(chunks) + SEP + question


def params(options: Any, **more: Any) -> dict[str, Any]:
    return {"max_new_tokens": 3, "custom_params": {"chunk_cache": options}, **more}


BAD_OPTIONS: list[tuple[Any, str]] = [
    (7, ""),
    ('{"spans": []}', ""),
    ({"spans": [[0, 2], [1, 3]]}, ".spans[1]"),
    ({"spans": [[2, 3], [0, 1]]}, ".spans[1]"),
    ({"spans": [[1, 1]]}, ".spans[0]"),
    ({"spans": [[2, 1]]}, ".spans[0]"),
    ({"spans": [[0, 99]]}, ".spans[0]"),
    ({"spans": [[-1, 2]]}, ".spans[0]"),
    ({"spans": [[0, 1.5]]}, ".spans[0]"),
    ({"spans": [[False, True]]}, ".spans[0]"),
    ({"spans": "all"}, ".spans"),
    ({"ratio": 1.1}, ".ratio"),
    ({"ratio": -0.1}, ".ratio"),
    ({"ratio": "0.1"}, ".ratio"),
    ({"method": "best"}, ".method"),
    ({"method": "cacheclip"}, ".method"),
    ({"method": "cacheblend", "options": {"check_layer": 99}}, "check_layer"),
    ({"method": "a3", "options": {"top_k": "best"}}, ".options.top_k"),
    ({"options": {"group_threshold": 3}}, ".options.group_threshold"),
    ({"mode": "fast"}, ".mode"),
    ({"spam": 1}, "spam"),
    ({"options": []}, ".options"),
    ({"explain": 1}, ".explain"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "path"), BAD_OPTIONS)
def test_bad_options_on_generate(service, seen, options, path, stream):
    body = {"input_ids": [5, 6, 7], "sampling_params": params(options), "stream": stream}
    response = service.post("/generate", body)
    assert response.status_code == 400
    assert OPTS in response.text
    assert path in response.text
    assert seen == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("options", "path"), BAD_OPTIONS)
def test_bad_options_on_the_openai_routes(service, seen, options, path, stream):
    common = {"model": "m", "max_tokens": 3, "stream": stream, "custom_params": {"chunk_cache": options}}
    for route, prompt in (
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ):
        response = service.post(route, {**common, **prompt})
        assert response.status_code == 400, response.text
        assert f"custom_params.chunk_cache{path}" in response.text or "custom_params.chunk_cache" in response.text
        assert path in response.text
        assert "sampling_params" not in response.json()["message"]
    assert seen == []


@pytest.mark.parametrize("stream", [False, True])
def test_bad_item_of_a_batch_is_named(service, seen, stream):
    body = {
        "input_ids": [[5, 6, 7], [5, 6]],
        "sampling_params": [params({"spans": [[0, 3]]}), params({"spans": [[0, 3]]})],
        "stream": stream,
    }
    response = service.post("/generate", body)
    assert response.status_code == 400
    assert "sampling_params[1].custom_params.chunk_cache.spans[0]" in response.text
    assert seen == []


@pytest.mark.parametrize("stream", [False, True])
def test_spans_behind_a_text_prompt(service, seen, stream):
    body = {"text": "ab", "sampling_params": params({"spans": [[0, 90]]}), "stream": stream}
    response = service.post("/generate", body)
    assert response.status_code == 400
    assert f"{OPTS}.spans[0]" in response.text
    response = service.post("/v1/completions", {
        "model": "m", "prompt": "ab", "stream": stream, "custom_params": {"chunk_cache": {"spans": [[0, 90]]}},
    })  # fmt: skip
    assert response.status_code == 400
    assert "custom_params.chunk_cache.spans[0]" in response.text
    assert seen == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "path"),
    [
        ("/generate", {"text": f"a{SEP}b"}, "text: "),
        ("/generate", {"text": ["fine", f"a{SEP}b"]}, "text[1]: "),
        ("/generate", {"text": f"a{SEP}{SEP}b"}, "text: chunk 0"),
        ("/v1/completions", {"prompt": f"a{SEP}b"}, "prompt: "),
        ("/v1/completions", {"prompt": ["fine", f"a{SEP} {SEP}b"]}, "prompt[1]: chunk 0"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": f"a{SEP}b"}]}, "messages[0].content: "),
        (
            "/v1/chat/completions",
            {
                "messages": [
                    {"role": "system", "content": "s"},
                    {"role": "user", "content": [{"type": "text", "text": f"a{SEP}b"}]},
                ]
            },
            "messages[1].content[0].text: ",
        ),
    ],
)
def test_bad_marks(service, seen, route, body, path, stream):
    response = service.post(
        route, {"model": "m", **body, "stream": stream} if "v1" in route else {**body, "stream": stream}
    )
    assert response.status_code == 400
    assert path in response.text
    assert seen == []


@pytest.mark.parametrize(("route", "name"), [("/generate", "text"), ("/v1/completions", "prompt")])
def test_empty_text_beside_a_marked_one(service, seen, monkeypatch, route, name):
    """With a tokenizer that puts no token in front of a text."""
    encode = service.manager.tokenizer.encode
    monkeypatch.setattr(service.manager.tokenizer, "encode", lambda text, **how: encode(text, **how) if text else [])
    response = service.post(route, {"model": "m", name: [marked("", "a", "b"), ""]})
    assert response.status_code == 400
    assert f"{name}[1]: a prompt without tokens" in response.text
    assert seen == []


@pytest.fixture
def without_bos(service, monkeypatch):
    """A tokenizer that puts no token in front of a text, and a chat template that may write nothing."""
    tokenizer = service.manager.tokenizer
    encode = tokenizer.encode

    def encode_bare(text, **how):
        return encode(text, **{**how, "add_special_tokens": False})

    monkeypatch.setattr(tokenizer, "encode", encode_bare)
    monkeypatch.setattr(tokenizer, "chat_template", "{% for m in messages %}{{ m.content }}{% endfor %}")


EMPTY = [
    ("/generate", {"text": ""}, "text"),
    ("/generate", {"text": ["", ""]}, "text[0]"),
    ("/generate", {"text": ["a", ""]}, "text[1]"),
    ("/generate", {"text": "", "image_data": "x"}, "text"),  # which a model that sees none leaves out
    ("/generate", {"text": ["a", ""], "image_data": ["x", "y"]}, "text[1]"),
    ("/generate", {"input_ids": []}, "input_ids"),
    ("/v1/completions", {"prompt": ""}, ""),  # "Prompt cannot be empty", says SGLang
    ("/v1/completions", {"prompt": ["", "a"]}, "prompt[0]"),
    ("/v1/completions", {"prompt": [[5], []]}, ""),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": ""}]}, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}]}]}, "messages"),
    ("/invocations", {"messages": [{"role": "user", "content": ""}]}, "messages"),
    ("/v1/messages", {"messages": [{"role": "user", "content": ""}], "max_tokens": 3}, "messages"),
    ("/v1/responses", {"input": ""}, ""),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body", "path"), EMPTY, ids=[f"{one[0]}-{one[1]}" for one in EMPTY])
def test_prompts_without_tokens(service, seen, without_bos, route, body, path, stream):
    """They end stock SGLang: a forward of no rows."""
    response = service.post(route, {"model": service.manager.served_model_name, **body, "stream": stream})
    is_begun = stream and route == "/v1/responses"  # SGLang begins that stream first: it ends by response.failed
    assert response.status_code == (200 if is_begun else 400), response.text
    assert not is_begun or "a prompt without tokens" in response.text
    assert f"{path}: a prompt without tokens" in response.text or not path
    assert seen == []


@pytest.mark.parametrize(("route", "body"), [("/generate", {"text": " "}), ("/v1/completions", {"prompt": ["a", " "]})])
def test_prompts_of_white_space_are_served(service, seen, without_bos, route, body):
    assert service.post(route, {"model": "m", **body}).status_code == 200
    assert all(len(request.input_ids) for request in seen)


@pytest.mark.parametrize(("key", "value"), [("trust", "warmed"), ("system_prompts", "same")])
@pytest.mark.parametrize("mode", ["prepare", "warm"])
def test_a_client_stores_nothing_for_others_against_a_setting(service, seen, key, value, mode):
    options = {"custom_params": {"chunk_cache": {"mode": mode}}}
    body = {"text": "Head. <|chunk|>A passage.<|chunk|>", "sampling_params": options}
    assert service.post("/generate", body).status_code == 200
    before = attached(service.manager.server_args)
    attach(service.manager.server_args, ChunkCacheArgs(config={key: value}))
    response = service.post("/generate", body)
    attach(service.manager.server_args, before)
    assert response.status_code == 400
    assert "custom_params.chunk_cache.mode" in response.text
    assert f"{key} {value}" in response.text


@pytest.mark.parametrize(
    "prompt", [{"text": "No mark."}, {"text": "Head. <|chunk|>One.<|chunk|>"}, {"input_ids": [5, 6, 7]}], ids=str
)
def test_every_chunk_has_an_id_or_null(service, seen, prompt):
    options = {"custom_params": {"chunk_cache": {"chunk_ids": ["a", "b"]}}}
    response = service.post("/generate", {**prompt, "sampling_params": options})
    assert response.status_code == 400
    assert "custom_params.chunk_cache.chunk_ids: 2 for" in response.text
    assert seen == []


def test_empty_text_behind_a_bos_is_served(service, seen):
    assert service.post("/generate", {"text": ""}).status_code == 200


def test_turn_without_tokens_is_left_to_sglang(service, seen):
    body = {"input_ids": [], "sampling_params": {"max_new_tokens": 3}}
    assert service.post("/generate", {**body, "session_params": {"id": "s", "rid": "r"}}).status_code == 200
    assert len(seen) == 1
    assert service.post("/generate", {**body, "session_params": {}}).status_code == 400


EVEN_EXACT = {"custom_params": {"chunk_cache": {"mode": "exact"}}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({"text": "a", "input_ids": [10**6]}, "input_ids: a token id is not in the vocabulary"),
        ({"text": "a", "input_ids": [10**6], "sampling_params": EVEN_EXACT}, "input_ids: a token id is not in the voc"),
        ({"text": "a", "input_ids": []}, "input_ids: a prompt without tokens"),
        ({"text": ["a", "b"], "input_ids": [[5], [10**6]]}, "input_ids[1]: a token id is not in the vocabulary"),
        ({"text": ["a", "b"], "input_ids": [[5], []]}, "input_ids[1]: a prompt without tokens"),
        ({"text": ["a", "b"], "input_ids": [[5]]}, "input_ids: no list of token ids for each text"),
        ({"text": ["a", "b"], "input_ids": [5, 6]}, "input_ids: no list of token ids for each text"),
        ({"text": "a", "input_ids": [[5]]}, "input_ids: a token id is not in the vocabulary"),
    ],
    ids=str,
)
def test_token_ids_beside_text_are_checked(service, seen, prompt, words, stream):
    """SGLang reads the ids then."""
    response = service.post("/generate", {**prompt, "stream": stream})
    assert response.status_code == 400
    assert words in response.text
    assert seen == []


def test_token_ids_beside_text_are_the_prompt(service, seen):
    assert service.post("/generate", {"text": "", "input_ids": [5, 6]}).status_code == 200
    assert list(seen[0].input_ids) == [5, 6]


def test_chunks_of_both_ways_together_are_limited(service, seen):
    text, chunks = marked("", *["a"] * MAX_CHUNKS), [{"text": "b"}] * MAX_CHUNKS
    body = {"model": "m", "prompt": text, "chunk_cache": {"chunks": chunks}}
    response = service.post("/v1/completions", body)
    assert response.status_code == 400
    assert f"prompt: {2 * MAX_CHUNKS} chunks, and {MAX_CHUNKS} is the limit" in response.text
    assert seen == []


def test_answer_behind_a_plain_text(service, seen):
    body = {"text": "hello", "sampling_params": params({"answer_tokens": 1_000_000, "keep_tokens": 5})}
    response = service.post("/generate", body)
    assert response.status_code == 400
    assert f"{OPTS}.answer_tokens: 1000000, and " in response.text
    assert seen == []
    assert service.post("/generate", {**body, "sampling_params": params({"answer_tokens": 1})}).status_code == 200


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"marks": True}, "unknown key 'marks'"),
        ({"parts": False}, "unknown key 'parts'"),
        ({"template": "{text}"}, "chunk_cache.template: there are no passages to write"),
        ({"template": "{text}{text}"}, "chunk_cache.template: {text} does not stand in it once"),
        ({"template": "{id}{text}{id}"}, "chunk_cache.template: a name stands in it twice"),
        ({"template": "{text}" + " " * 4096}, "chunk_cache.template: it has 4102 characters, and 4096 is the limit"),
    ],
)
def test_options_that_completions_do_not_read(service, seen, options, message):
    response = service.post("/v1/completions", {"model": "m", "prompt": "a", "chunk_cache": options})
    assert response.status_code == 400
    assert message in response.json()["message"]
    assert seen == []


def test_custom_params_of_the_server_stay_beside_marks(service, seen, monkeypatch):
    """`--preferred-sampling-params`, such as what a custom logit processor reads: for requests that give none."""
    monkeypatch.setattr(service.manager, "preferred_sampling_params", {"custom_params": {"budget": 5}})
    for text, own in (("Who?", {}), (MARKED, {}), (MARKED, {"custom_params": {"other": 1}})):
        service.post("/generate", {"text": text, "sampling_params": {"max_new_tokens": 3, **own}})
    found = [request.sampling_params.custom_params for request in seen]
    others = [{name: value for name, value in one.items() if name != "chunk_cache"} for one in found]
    assert others == [{"budget": 5}, {"budget": 5}, {"other": 1}]


@pytest.mark.parametrize("stream", [False, True])
def test_separators_and_spans_together(service, seen, stream):
    text, options = marked("s", "a", "b"), {"spans": [[0, 1]]}
    chat = {"messages": [{"role": "user", "content": text}]}
    for route, body in (
        ("/generate", {"text": text, "sampling_params": params(options)}),
        ("/v1/completions", {"model": "m", "prompt": text, "custom_params": {"chunk_cache": options}}),
        ("/v1/chat/completions", {"model": "m", **chat, "custom_params": {"chunk_cache": options}}),
    ):
        response = service.post(route, {**body, "stream": stream})
        assert response.status_code == 400
        assert "custom_params.chunk_cache.spans: " in response.text
    assert seen == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("/generate", {"text": "a"}),
        ("/vertex_generate", {"instances": [{"text": "a"}]}),
        ("/v1/responses", {"model": "m", "input": "a"}),
        ("/v1/score", {"model": "m", "query": "a", "items": ["b"], "label_token_ids": [1]}),
        ("/v1/rerank", {"query": "a", "documents": ["b"]}),
        ("/v1/decisions", {"model": "m", "input": "a"}),
        ("/v1/systemone", {"model": "m", "input": "a"}),
        ("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_top_level_field_where_it_is_not_read(service, seen, route, body, stream):
    response = service.post(route, {**body, "stream": stream, "chunk_cache": {"mode": "off"}})
    assert response.status_code == 400
    assert "chunk_cache: this route does not read it there; " in response.text
    assert seen == []


@pytest.mark.parametrize(
    ("route", "body", "path"),
    [
        ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "text", "text": MARKED}]}]}, "input[0]"),
        ("/v1/score", {"query": "a", "items": ["b", MARKED], "label_token_ids": [1]}, "items[1]: "),
        ("/v1/rerank", {"query": "a", "documents": [MARKED]}, "documents[0]: "),
        ("/v1/decisions", {"input": MARKED}, "input: "),
        ("/v1/systemone", {"task": {"message": MARKED}}, "task.message: "),
        ("/api/chat", {"messages": [{"role": "user", "content": c} for c in ("a", MARKED)]}, "messages[1].content: "),
        ("/api/generate", {"prompt": "a", "system": MARKED}, "system: "),
    ],
)
def test_routes_that_do_not_mark_chunks(service, seen, route, body, path):
    response = service.post(route, {"model": "m", **body})
    assert response.status_code == 400
    assert path in response.text
    assert "use /v1/chat/completions" in response.text
    assert seen == []


@pytest.mark.parametrize("route", ["/v1/messages", "/v1/chat/completions"])
def test_tenants_are_kept_apart_on_every_route_with_marks(service, seen, route):
    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": marked("", "the rose")}]}
    response = service.post(route, {**body, "extra_key": "a", "cache_salt": "b"})
    assert response.status_code == 200, response.text
    assert (seen[-1].extra_key, seen[-1].cache_salt) == ("a", "b")
    assert chunks_of(service, seen[-1]) == ["the rose"]
    service.post(route, body)
    assert (seen[-1].extra_key, seen[-1].cache_salt) == (None, None)


def test_a_tenant_that_is_no_text_is_refused(service, seen):
    body = {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": "a"}], "cache_salt": 7}
    response = service.post("/v1/messages", body)
    assert response.status_code == 400
    assert "cache_salt: 7 is not a string" in response.text
    assert seen == []


def test_a_route_that_does_not_read_the_tenant_says_so(service):
    response = service.post("/api/generate", {"model": "m", "prompt": "a", "cache_salt": "b"})
    assert response.headers["x-chunk-cache-unused"] == "cache_salt (this route does not read it)"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"options": {"top_k": 2**31}}, "options.top_k: 2147483648 cannot be used: it must be below 2**31; "),
        ({"options": {"temperature": "hot"}}, "options.temperature: 'hot' cannot be used: "),
        ({"options": {"stop": [3]}}, "options.stop: [3] cannot be used: "),
        ({"options": {"num_predict": "x"}}, "options.num_predict: 'x' cannot be used: "),
        ({"options": {"num_predict": -1}}, "options.num_predict: -1 cannot be used: max_new_tokens must be at least 0"),
        ({"options": {"seed": 1}}, "options.seed: 1 cannot be used: "),
        ({"options": {"num_predict": 10**6}}, "Requested token count exceeds the model's maximum context length"),
        ({"messages": []}, "Cannot apply chat template to an empty conversation"),
    ],
)
def test_bad_requests_on_the_routes_of_ollama(service, seen, fields, message, stream):
    for route, prompt in (
        ("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}),
        ("/api/generate", {"prompt": "hi"}),
    ):
        if "messages" in fields and "messages" not in prompt:
            continue
        response = service.post(route, {"model": "m", **prompt, **fields, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"].startswith(message)
    assert seen == []


def test_a_chat_that_the_template_refuses_on_the_route_of_ollama(service, seen, monkeypatch):
    monkeypatch.setattr(service.manager.tokenizer, "chat_template", "{{ raise_exception('the roles must alternate') }}")
    response = service.post("/api/chat", {"model": "m", "messages": [{"role": "user", "content": "hi"}]})
    assert (response.status_code, response.json()) == (400, {"error": "the roles must alternate"})
    assert seen == []


@pytest.mark.parametrize(
    ("route", "prompt"),
    [("/api/chat", {"messages": [{"role": "user", "content": "hi"}]}), ("/api/generate", {"prompt": "hi"})],
)
def test_good_requests_on_the_routes_of_ollama(service, seen, route, prompt):
    body = {"model": "m", **prompt, "options": {"temperature": 0, "num_predict": 3}}
    assert service.post(route, {**body, "stream": False}).json()["eval_count"] == 3
    lines = [json.loads(line) for line in service.post(route, body).text.splitlines()]
    assert [one["done"] for one in lines[-2:]] == [False, True]
    assert len(seen) == 2


def test_the_route_of_vertex_under_another_name(service, seen, monkeypatch):
    monkeypatch.setenv("AIP_PREDICT_ROUTE", "/generate")  # one that exists
    response = service.post("/generate", {"instances": [{"text": "a"}], "chunk_cache": {"mode": "off"}})
    assert "put it into parameters.sampling_params.custom_params.chunk_cache" in response.text
    assert seen == []


def test_a_route_of_ollama_under_another_name(service, seen, monkeypatch):
    monkeypatch.setenv("SGLANG_OLLAMA_GENERATE_ROUTE", "/v1/completions")
    response = service.post("/v1/completions", {"model": "m", "prompt": marked("s", "a")})
    assert "prompt: this route cannot mark chunks" in response.text
    assert seen == []


def test_text_marks_without_a_tokenizer(service, seen, monkeypatch):
    monkeypatch.setattr(service.manager, "tokenizer", None)
    response = service.post("/generate", {"text": marked("s", "a"), "stream": True})
    assert response.status_code == 400
    assert "text: " in response.text
    assert "--skip-tokenizer-init" in response.text
    assert seen == []


def test_a_prompt_longer_than_the_context_is_refused(service, seen):
    response = service.post("/generate", {"text": marked("s", "a b " * 9000), "sampling_params": {"max_new_tokens": 3}})
    assert response.status_code == 400
    assert "context length" in response.text
    assert seen == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "path"),
    [
        ("/generate", {"input_ids": [1, 2], "custom_params": {"chunk_cache": {}}}, "custom_params.chunk_cache"),
        (
            "/v1/completions",
            {"prompt": "a", "sampling_params": {"custom_params": {"chunk_cache": {"mode": "off"}}}},
            "sampling_params.custom_params.chunk_cache",
        ),
        (
            "/v1/chat/completions",
            {
                "messages": [{"role": "user", "content": "a"}],
                "sampling_params": {"custom_params": {"chunk_cache": {"mode": "off"}}},
            },
            "sampling_params.custom_params.chunk_cache",
        ),
        ("/v1/responses", {"input": "a", "custom_params": {"chunk_cache": {}}}, "custom_params.chunk_cache"),
        ("/vertex_generate", {"instances": [{"text": "a", "chunk_cache": {}}]}, "instances[0].chunk_cache"),
        (
            "/vertex_generate",
            {"instances": [{"text": "a"}], "parameters": {"chunk_cache": {}}},
            "parameters.chunk_cache",
        ),
        (
            "/vertex_generate",
            {"instances": [{"text": "a"}], "parameters": {"sampling_params": {"chunk_cache": {}}}},
            "parameters.sampling_params.chunk_cache",
        ),
    ],
)
def test_options_where_another_route_has_them(service, seen, route, body, path, stream):
    response = service.post(route, {"model": "default", **body, "stream": stream})
    assert response.status_code == 400, response.text
    assert f"{path}: this route does not read it there; " in response.text
    assert not seen


@pytest.mark.parametrize("spans", ["", 0, False, {}])
def test_spans_of_another_type_beside_separators(service, seen, spans):
    """What counts as false in Python is no empty list."""
    text, options = marked("Read. ", "the rose ", "the tale "), {"chunk_cache": {"spans": spans}}
    for route, body in (
        ("/generate", {"text": text, "sampling_params": {"custom_params": options}}),
        ("/v1/completions", {"model": "m", "prompt": text, **options}),
        ("/v1/chat/completions", {**chat(("user", text)), **options}),
    ):
        response = service.post(route, body)
        assert response.status_code == 400, (route, response.text)
        assert "chunk_cache.spans: " in response.text
        assert " is not a list; " in response.text
    assert not seen
    options = {"chunk_cache": {"spans": []}}
    assert service.post("/v1/chat/completions", {**chat(("user", text)), **options}).status_code == 200
    assert chunks_of(service, seen[0]) == ["the rose", "the tale"]


@pytest.mark.parametrize("chunk_ids", [["x", "y"], ["x"], [None, "y"], 5, "ab", {}])
def test_chunks_are_named_in_one_way(service, seen, chunk_ids):
    options = {"chunks": [{"text": "the rose"}, {"id": "b", "text": "the tale"}], "chunk_ids": chunk_ids}
    for route, body in (
        ("/v1/completions", {"model": "m", "prompt": "Who?"}),
        ("/v1/chat/completions", chat(("user", "Who?"))),
    ):
        response = service.post(route, {**body, "chunk_cache": options})
        assert response.status_code == 400, (route, response.text)
        assert "chunk_cache.chunk_ids: " in response.text
    assert not seen
    body = {"model": "m", "prompt": "Who?", "chunk_cache": {**options, "chunk_ids": []}}
    assert service.post("/v1/completions", body).status_code == 200


@pytest.mark.parametrize("form", [True, "x", [1], 5, 1.5])
def test_a_response_format_that_is_no_object(service, seen, form):
    response = service.post("/v1/chat/completions", {**chat(("user", "a")), "response_format": form})
    assert response.status_code == 400, response.text
    assert "response_format: " in response.text
    assert not seen


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"top_logprobs_num": "x", "return_logprob": True}, "parameters.top_logprobs_num: "),
        ({"logprob_start_len": "x"}, "parameters.logprob_start_len: "),
        ({"priority": "x"}, "parameters.priority: "),
        ({"routed_dp_rank": "x"}, "parameters.routed_dp_rank: "),
        ({"nope": 1}, "parameters.nope: unknown parameter; known parameters: "),
        ({"text": "x"}, "parameters.text: each instance has its own; "),
        ({"image_data": ["x"]}, "parameters.image_data: each instance has its own; "),
    ],
    ids=str,
)
def test_parameters_of_vertex_that_end_a_stock_server(service, seen, parameters, message):
    response = service.post("/vertex_generate", {"instances": [{"text": "a"}], "parameters": parameters})
    assert response.status_code == 400, response.text
    assert message in response.text
    assert not seen


def test_parameters_of_vertex_are_those_of_generate(service, seen):
    parameters = {"return_logprob": True, "priority": 3, "sampling_params": {"max_new_tokens": 2}}
    response = service.post("/vertex_generate", {"instances": [{"text": "a"}], "parameters": parameters})
    assert response.status_code == 200, response.text
    assert seen


@pytest.mark.parametrize("where", ["chat_template_kwargs", "documents"])
def test_json_nested_deep_is_read_as_by_stock(service, seen, where):
    deep: list[object] = []
    for _ in range(600):
        deep = [deep]
    content = [{"type": "text", "text": "A passage.", "cache_control": {"type": "ephemeral"}}]
    nested = (
        {"chat_template_kwargs": {"x": deep}} if where != "documents" else {"documents": [{"text": "a", "x": deep}]}
    )
    body = {"messages": [{"role": "user", "content": content}], "chunk_cache": {"marks": True}, **nested}
    response = service.post("/v1/chat/completions", {"model": "m", **body})
    assert response.status_code == 200, response.text
    assert seen


def test_instances_without_a_prompt(service, seen):
    for instances, path in (([{"text": "a"}, {}], "text[1]: null"), ([{"text": "a"}, {"text": -1}], "text[1]: -1")):
        response = service.post("/vertex_generate", {"instances": instances})
        assert response.status_code == 400, response.text
        assert f"{path} is no prompt; " in response.text
    assert not seen


@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_are_not_one_per_prompt(service, seen, stream):
    text = marked("S", "A", "B")
    bodies = (
        {"text": text, "sampling_params": [params({})]},
        {"text": [text, text], "sampling_params": [params({})]},
        {"text": ["plain", "plain"], "sampling_params": [{}, {}, params({"method": "best"})]},
    )
    for body in bodies:
        response = service.post("/generate", {**body, "stream": stream})
        assert response.status_code == 400, response.text
        assert "sampling_params: a list of " in response.text
        assert "; give one object for all prompts" in response.text
    assert not seen
