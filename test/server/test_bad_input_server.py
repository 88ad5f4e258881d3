"""Bad input on a real server: HTTP 400 that names the JSON path, before any work; the server goes on."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from server.contract import SEP, Passages, completed, generated, marked, statuses
from server_fixture import Server

pytestmark = pytest.mark.server

IDS = [1, 306, 364, 440, 501, 132, 273]
ROUTES = ("/generate", "/v1/completions", "/v1/chat/completions")
PATH = {
    "/generate": "sampling_params.custom_params.chunk_cache",
    "/v1/completions": "custom_params.chunk_cache",
    "/v1/chat/completions": "custom_params.chunk_cache",
}


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


BAD_OPTIONS: dict[str, tuple[Any, str]] = {
    "string": ("string", ""),
    "serialised": ('{"mode":"auto","spans":[[0,2]],"explain":false}', ""),
    "number": (7, ""),
    "list": ([], ""),
    "true": (True, ""),
    "descending": ({"spans": [[2, 3], [0, 1]]}, ".spans[1][0]"),
    "overlapping": ({"spans": [[0, 2], [1, 3]]}, ".spans[1][0]"),
    "empty-span": ({"spans": [[1, 1]]}, ".spans[0]"),
    "backwards": ({"spans": [[3, 1]]}, ".spans[0]"),
    "outside": ({"spans": [[0, 99]]}, ".spans[0][1]"),
    "far-outside": ({"spans": [[0, 2**31 - 1]]}, ".spans[0][1]"),
    "huge": ({"spans": [[0, 10**30]]}, ".spans[0][1]"),
    "negative": ({"spans": [[-1, 2]]}, ".spans[0][0]"),
    "float": ({"spans": [[0, 1.0]]}, ".spans[0][1]"),
    "bools": ({"spans": [[False, True]]}, ".spans[0][0]"),
    "strings": ({"spans": [["0", "1"]]}, ".spans[0][0]"),
    "null-bound": ({"spans": [[None, 1]]}, ".spans[0][0]"),
    "triple": ({"spans": [[0, 1, 2]]}, ".spans[0]"),
    "flat": ({"spans": [0, 2]}, ".spans[0]"),
    "nested": ({"spans": [nested(40)]}, ".spans[0]"),
    "spans-object": ({"spans": {"0": 1}}, ".spans"),
    "spans-string": ({"spans": "[[0, 1]]"}, ".spans"),
    "ten-thousand": ({"spans": [[i, i + 1] for i in range(10_000)]}, ".spans["),
    "ten-thousand-empty": ({"spans": [[0, 1]] * 10_000}, ".spans[1][0]"),
    "ratio-above": ({"ratio": 1.0001}, ".ratio"),
    "ratio-below": ({"ratio": -1e-9}, ".ratio"),
    "ratio-huge": ({"ratio": 10**300}, ".ratio"),
    "ratio-string": ({"ratio": "0.5"}, ".ratio"),
    "ratio-bool": ({"ratio": True}, ".ratio"),
    "ratio-list": ({"ratio": [0.5]}, ".ratio"),
    "method-unknown": ({"method": "best"}, ".method"),
    "method-without-selector": ({"method": "cacheclip"}, ".method"),
    "layer-outside": ({"method": "cacheblend", "options": {"check_layer": 99}}, ".check_layer"),
    "method-case": ({"method": "EPIC"}, ".method"),
    "method-object": ({"method": {}}, ".method"),
    "mode-unknown": ({"mode": "on"}, ".mode"),
    "mode-list": ({"mode": ["auto"]}, ".mode"),
    "explain-number": ({"explain": 1}, ".explain"),
    "explain-string": ({"explain": "true"}, ".explain"),
    "options-list": ({"options": []}, ".options"),
    "options-unknown": ({"method": "random", "options": {"sede": 1}}, ".options"),
    "options-of-another": ({"method": "epic", "options": {"seed": 1}}, ".options"),
    "options-type": ({"method": "random", "options": {"seed": 1.5}}, ".options.seed"),
    "options-huge": ({"method": "random", "options": {"seed": 2**70}}, ".options.seed"),
    "key-unknown": ({"span": [[0, 1]]}, "'span'"),
    "chunk-number": ({"chunks": [{"id": "a", "text": 3}]}, "chunks"),
    "key-empty": ({"": 1}, "''"),
    "key-unicode": ({"späns🎉": 1}, "späns"),
    "long-string": ({"mode": "x" * 100_000}, ".mode"),
}

BAD_TEXTS = {
    "one": (f"a {SEP} b", ""),
    "only-one": (SEP, ""),
    "only-separators": (SEP * 4, "chunk 0"),
    "two": (SEP * 2, "chunk 0"),
    "white-space": (f"a{SEP} \n\t{SEP}b", "chunk 0"),
    "unicode-space": (f"a{SEP}x{SEP}\u3000\u00a0{SEP}", "chunk 1"),
    "last-empty": (f"a{SEP}x{SEP}{SEP}b", "chunk 1"),
}


CLIENT = httpx.Client(timeout=60, trust_env=False)  # one for all requests: to make one takes longer than to send one


def send(server: Server, route: str, body: Any) -> httpx.Response:
    """`body` is what `json.dumps` takes, or the text itself."""
    content = body if isinstance(body, str) else json.dumps(body)
    headers = {"content-type": "application/json"}
    return CLIENT.post(server.url + route, content=content, headers=headers)


def request(route: str, prompt: Any, options: Any = ..., *, stream: bool) -> dict[str, Any]:
    """A body for any route; `prompt` is text or token ids, which a chat cannot have."""
    params: dict[str, Any] = {} if options is ... else {"custom_params": {"chunk_cache": options}}
    if route == "/generate":
        field = "text" if isinstance(prompt, str) else "input_ids"
        return {field: prompt, "sampling_params": {"max_new_tokens": 2, **params}, "stream": stream}
    body = {"model": "default", "max_tokens": 2, "stream": stream, **params}
    if route == "/v1/completions":
        return {**body, "prompt": prompt}
    text = prompt if isinstance(prompt, str) else "hi"
    return {**body, "messages": [{"role": "system", "content": "s"}, {"role": "user", "content": text}]}


def message(response: httpx.Response) -> str:
    """The error's text, which every route wraps in its own way."""
    assert response.status_code == 400, (response.status_code, response.text[:500])
    body = response.json()
    error = body.get("error", body)
    text = error if isinstance(error, str) else error["message"]
    assert len(text) < 1000
    return str(text)


def chunk_counters(server: Server) -> list[str]:
    lines = server.get("/metrics").text.splitlines()
    return sorted(line for line in lines if line.startswith("sglang:chunk_cache") and "_created" not in line)


@pytest.fixture(scope="module", autouse=True)
def untouched(server: Server) -> Any:
    """Whatever this module refuses never reaches the scheduler, and the server still works."""
    before = chunk_counters(server)
    yield
    assert chunk_counters(server) == before
    prompt = marked(Passages("after bad input").several(2)).text
    assert statuses(generated(server.generate(prompt))) == ["miss", "miss"]
    assert len(completed(server.chat(prompt))["chunks"]) == 2
    server.flush()  # would be refused if a request were still known to the scheduler


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options(server, name, route, stream):
    options, where = BAD_OPTIONS[name]
    text = message(send(server, route, request(route, IDS, options, stream=stream)))
    assert text.startswith(PATH[route]), text
    assert where in text, text
    assert "; " in text, "a remedy follows"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", '"\\ud800"', "0.5.5", "1" + "0" * 5000])
def test_values_that_json_does_not_have(server, value, route, stream):
    """SGLang's parser refuses most of them by itself; it does not name a path."""
    body = json.dumps(request(route, IDS, {"ratio": "here"}, stream=stream)).replace('"here"', value)
    message(send(server, route, body))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("name", BAD_TEXTS)
def test_bad_marks(server, name, route, stream):
    marks, where = BAD_TEXTS[name]
    paths = {"/generate": "text: ", "/v1/completions": "prompt: ", "/v1/chat/completions": "messages[1].content: "}
    text = message(send(server, route, request(route, marks, stream=stream)))
    assert text.startswith(paths[route]), text
    assert where in text, text


@pytest.mark.parametrize("stream", [False, True])
def test_the_bad_item_of_a_batch_is_named(server, stream):
    good = {"max_new_tokens": 2, "custom_params": {"chunk_cache": {"spans": [[0, 3]]}}}
    bad = {"max_new_tokens": 2, "custom_params": {"chunk_cache": {"spans": [[0, 99]]}}}
    for prompts in ({"input_ids": [IDS, IDS, IDS]}, {"text": ["one", "two", "three"]}):
        for position in range(3):
            params = [good, good, good]
            params[position] = bad
            body = {**prompts, "sampling_params": params, "stream": stream}
            text = message(send(server, "/generate", body))
            assert text.startswith(f"sampling_params[{position}].custom_params.chunk_cache.spans[0][1]"), text


@pytest.mark.parametrize("stream", [False, True])
def test_the_bad_text_of_a_batch_is_named(server, stream):
    texts = [marked(["one", "two"]).text, "plain", f"a{SEP}b"]
    assert message(send(server, "/generate", {"text": texts, "stream": stream})).startswith("text[2]: ")
    body = {"model": "default", "prompt": texts, "stream": stream}
    assert message(send(server, "/v1/completions", body)).startswith("prompt[2]: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_separators_and_spans_together(server, route, stream):
    body = request(route, marked(["one", "two"]).text, {"spans": [[0, 1]]}, stream=stream)
    assert message(send(server, route, body)).startswith(f"{PATH[route]}.spans: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_spans_behind_a_text_prompt(server, route, stream):
    body = request(route, "a short text", {"spans": [[0, 2], [2, 90]]}, stream=stream)
    assert message(send(server, route, body)).startswith(f"{PATH[route]}.spans[1][1]: ")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("value", [{"spans": [[0, 1]]}, [], "x"])
def test_a_field_at_the_top_where_it_is_not_read(server, value, stream):
    body = {**request("/generate", IDS, stream=stream), "chunk_cache": value}
    text = message(send(server, "/generate", body))
    assert text.startswith("chunk_cache: ")
    assert PATH["/generate"] in text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", BAD_OPTIONS)
@pytest.mark.parametrize("route", ROUTES[1:])
def test_bad_options_at_the_top(server, name, route, stream):
    options, where = BAD_OPTIONS[name]
    text = message(send(server, route, {**request(route, IDS, stream=stream), "chunk_cache": options}))
    assert text.startswith("chunk_cache"), text
    assert where in text, text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_a_marked_prompt_longer_than_the_context(server, route, stream):
    body = request(route, marked(["a b c d " * 3000, "two"]).text, stream=stream)
    assert "context length" in message(send(server, route, body))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bad_id", [-1, 512, 2**31, 2**62])
def test_a_marked_token_id_that_the_model_does_not_have(server, bad_id, stream):
    ids, options = [*IDS, bad_id], {"spans": [[0, 2]]}
    for route, path in (("/generate", "input_ids: "), ("/v1/completions", "")):
        response = send(server, route, request(route, ids, options, stream=stream))
        assert message(response).startswith(path)
        assert "vocabulary" in message(response)


@pytest.mark.parametrize("stream", [False, True])
def test_a_mark_that_a_session_leaves_out(server, stream):
    body = request("/generate", IDS, {"spans": [[0, 1], [1, 3]]}, stream=stream)
    refused = message(send(server, "/generate", {**body, "session_params": {"id": "s", "rid": "r"}}))
    assert refused.startswith("input_ids: the first chunk is the BOS token")


@pytest.mark.parametrize("stream", [False, True])
def test_a_part_of_a_prompt_is_kept_where_that_is_possible(server, stream):
    ids = [IDS[0], *range(10, 110)]
    body = request("/generate", ids, {"spans": [[1, 90]], "keep_tokens": 33}, stream=stream)
    path = "sampling_params.custom_params.chunk_cache.keep_tokens: "
    assert message(send(server, "/generate", body)).startswith(f"{path}33, and 33 tokens are kept in any case")
    body = request("/generate", ids, {"spans": [[1, 90]], "keep_tokens": 50}, stream=stream)
    body["session_params"] = {"id": "s", "rid": "r"}
    assert message(send(server, "/generate", body)).startswith(f"{path}a turn of a session needs")


@pytest.mark.parametrize("stream", [False, True])
def test_separators_in_odd_places_of_a_chat(server, stream):
    text = marked(["one", "two"]).text
    tool = {"type": "function", "function": {"name": "f", "description": text, "parameters": {"type": "object"}}}
    user = {"role": "user", "content": "hi"}
    lone_part = [{"type": "text", "text": "x"}, {"type": "text", "text": f"a{SEP}b"}]
    bodies: dict[str, dict[str, Any]] = {
        "messages[0].content": {"messages": [{"role": "system", "content": f"a{SEP}b"}, user]},
        "messages[1].content[1].text": {"messages": [user, {"role": "user", "content": lone_part}]},
        "messages[1].content: chunks cannot": {
            "messages": [user, {"role": "assistant", "content": text}],
            "continue_final_message": True,
        },
    }
    for path, body in bodies.items():
        response = send(server, "/v1/chat/completions", {"model": "default", "stream": stream, **body})
        assert message(response).startswith(path)
    # A template that ignores tools leaves nothing of their separators.
    body = {"model": "default", "messages": [user], "tools": [tool], "max_tokens": 2}
    assert send(server, "/v1/chat/completions", body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_marks_in_one_of_two_prompts(server, stream):
    for text, options in ((marked(["one", "two"]).text, ...), ("plain", {"spans": [[0, 1]]})):
        body = {**request("/generate", text, options, stream=stream), "input_ids": IDS}
        assert message(send(server, "/generate", body)).startswith("input_ids: ")


@pytest.mark.parametrize("stream", [False, True])
def test_beam_search(server, stream):
    body = request("/generate", marked(["one", "two"]).text, stream=stream)
    body["sampling_params"] |= {"beam_width": 2, "n": 2}
    assert message(send(server, "/generate", body)).startswith("sampling_params.beam_width: ")


@pytest.mark.parametrize("stream", [False, True])
def test_hashes_of_images_that_a_client_gives(server, stream):
    """A chunk would be stored under the name of another image."""
    body = {**request("/generate", marked(["one", "two"]).text, stream=stream), "mm_hashes": ["ff"]}
    assert message(send(server, "/generate", body)).startswith("mm_hashes: ")


@pytest.mark.parametrize("stream", [False, True])
def test_a_route_that_does_not_mark_chunks(server, model_dir, stream):
    body = {"model": str(model_dir), "input": marked(["one", "two"]).text, "max_output_tokens": 4, "stream": stream}
    assert "/v1/chat/completions" in message(send(server, "/v1/responses", body))


@pytest.mark.parametrize("stream", [False, True])
def test_routes_of_ollama_do_not_mark_chunks(server, stream):
    text = marked(["one", "two"]).text
    bodies = {
        "/api/chat": ("messages[1].content: ", {"messages": [{"role": "user", "content": c} for c in ("hi", text)]}),
        "/api/generate": ("prompt: ", {"prompt": text}),
    }
    for route, (path, body) in bodies.items():
        refused = message(send(server, route, {"model": "m", **body, "stream": stream}))
        assert refused.startswith(path), refused
        assert "use /v1/chat/completions" in refused
    plain = {"model": "m", "prompt": "hi", "stream": stream, "options": {"num_predict": 2}}
    assert send(server, "/api/generate", plain).status_code == 200


PLAIN_IDS: dict[str, tuple[Any, str]] = {
    "above": ([*IDS, 10**6], "input_ids: "),
    "far above": ([2**40], "input_ids: "),
    "negative": ([-1, *IDS], "input_ids: "),
    "in a batch": ([IDS, [10**6]], "input_ids[1]: "),
    "int32": ([2**31], "input_ids: "),
}
# SGLang's own words.
ODD_PROMPTS: tuple[Any, ...] = ([1.5], [None], [[1], "x"], [[1], [2.5]], [[[1]]], [[1], None], [[]], [], 5, {"a": 1})
LOGPROBS = {"return_logprob": True}
KILLERS: dict[str, tuple[dict[str, Any], str]] = {
    "no tokens": ({"input_ids": []}, "input_ids: "),
    "no tokens in a batch": ({"input_ids": [IDS, []]}, "input_ids[1]: "),
    "more best tokens than there are": ({**LOGPROBS, "top_logprobs_num": 513}, "top_logprobs_num: 513, and"),
    "the same in a batch": ({**LOGPROBS, "input_ids": [IDS] * 2, "top_logprobs_num": [1, 10**6]}, "top_logprobs_num: "),
    "a start below -1": ({**LOGPROBS, "logprob_start_len": -2}, "logprob_start_len: -2 is"),
    "a stop behind a minimal length": (
        {"sampling_params": {"min_new_tokens": 1, "stop_token_ids": [512]}},
        "sampling_params.stop_token_ids: ",
    ),
    "more best tokens than 32 bits hold": ({"sampling_params": {"top_k": 2**31}}, "sampling_params.top_k: 2147483648 "),
    "hidden states as a list": ({"return_hidden_states": []}, "return_hidden_states: a list for one prompt"),
    "embeddings as a list": ({"positional_embed_overrides": []}, "positional_embed_overrides: [] is no"),
    "an adapter's id": ({"lora_id": []}, "lora_id: only the server sets it"),
    "a session's id as a list": ({"session_params": {"id": ["s"]}}, "session_params.id: Expected"),
    "all turns of a session replaced": (
        {"session_params": {"id": "s", "replace": True}},
        "session_params.replace: SGLang cannot",
    ),
}
"""What ends a stock server, or did."""


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PLAIN_IDS)
def test_plain_ids_outside_of_the_vocabulary(server, name, stream):
    """They end a stock server."""
    ids, path = PLAIN_IDS[name]
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 2}, "stream": stream}
    assert message(send(server, "/generate", body)).startswith(path)
    body = {"model": "default", "prompt": ids, "max_tokens": 2, "stream": stream}
    assert message(send(server, "/v1/completions", body)).startswith(path.replace("input_ids", "prompt"))
    plain = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}}
    assert send(server, "/generate", plain).status_code == 200


@pytest.mark.parametrize("route", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("prompt", ODD_PROMPTS, ids=str)
def test_prompts_that_are_none(server, route, prompt):
    assert send(server, route, {"model": "default", "input_ids": prompt, "prompt": prompt}).status_code == 400


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", KILLERS)
def test_what_ends_a_stock_server(server, name, stream):
    body, path = KILLERS[name]
    plain = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2}, "stream": stream}
    assert message(send(server, "/generate", {**plain, **body})).startswith(path)
    assert send(server, "/generate", plain).status_code == 200


def test_the_same_on_routes_of_openai(server):
    prompt = {"model": "default", "max_tokens": 2}
    chat = {**prompt, "messages": [{"role": "user", "content": "hi"}]}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        ("/v1/completions", {**prompt, "prompt": "hi", "logprobs": 513}, "logprobs: "),
        ("/v1/completions", {**prompt, "prompt": "hi", "min_tokens": 1, "stop_token_ids": [-1]}, "stop_token_ids: "),
        ("/v1/chat/completions", {**chat, "logprobs": True, "top_logprobs": 513}, "top_logprobs: "),
        ("/v1/chat/completions", {**chat, "input_ids": [512]}, "input_ids: "),
        ("/v1/score", {"model": "default", "query": [512], "items": [[2]], "label_token_ids": [1]}, "input_ids[0]: "),
    ]
    for route, body, path in bodies:
        assert message(send(server, route, body)).startswith(path)


ODD_SAMPLING: tuple[dict[str, Any], ...] = (
    {"stop_regex": "("},
    {"stop_regex": ["a", 3]},
    {"stop": [3]},
    {"logit_bias": {"a": 1}},
    {"logit_bias": {"1": "x"}},
    {"temperature": "hot"},
    {"max_new_tokens": "5"},
    {"json_schema": {"type": "object"}},
    {"json_schema": "{"},
    {"regex": ["a"]},
    {"regex": "("},
    {"ebnf": 1},
    {"ebnf": "no ::="},
    {"structural_tag": {"a": 1}},
    {"structural_tag": "{"},
    {"no_such_parameter": 1},
    {"custom_params": [1]},
    {"custom_params": {"a": {"b": {"c": 1}}}},
)


@pytest.mark.parametrize("odd", ODD_SAMPLING, ids=str)
def test_sampling_parameters_that_stock_cannot_use(server, odd):
    """Some are a 500 of stock SGLang, of either process."""
    body = {"input_ids": IDS, "sampling_params": {"max_new_tokens": 2, **odd}}
    (name,) = odd
    refused = message(send(server, "/generate", body))
    assert name in refused or "invalid type" in refused or refused.startswith("Failed to compile")
    assert send(server, "/generate", {**body, "sampling_params": {"max_new_tokens": 2}}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_null_is_not_given(server, route, stream):
    assert send(server, route, request(route, "hi", None, stream=stream)).status_code == 200
    assert send(server, route, {**request(route, "hi", stream=stream), "chunk_cache": None}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_list_of_sampling_parameters_for_one_prompt(server, stream):
    body = {"text": "hi", "sampling_params": [{"max_new_tokens": 2}], "stream": stream}
    refused = message(send(server, "/generate", body))
    assert refused.startswith("sampling_params: a list of 1 for one prompt")
    body = {"text": ["hi", "ho"], "sampling_params": [{"max_new_tokens": 2}], "stream": stream}
    assert "for 2 prompts" in message(send(server, "/generate", body))
