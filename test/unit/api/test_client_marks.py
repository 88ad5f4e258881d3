"""Marks that clients send for other services, and passages beside messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chunk_cache.options.request_options import MAX_CHUNKS, loads
from chunk_cache.prompt.marked_body import MarkedBody, MarkFlags, read_body
from chunk_cache_tools.verify.workload import read_prompt
from sglang_chunk_cache.host.chat import ChunkServingChat
from unit.api.client_bodies import (
    ANTHROPIC_BODIES,
    CHAT,
    CHUNKS,
    COMPLETIONS,
    CONTROL,
    MESSAGES,
    SEARCH,
    SEP,
    chat,
    messages,
    sent,
    text,
)
from unit.api.seen_requests import carried, chunks_of, text_of

BREAKPOINT = {"prompt_cache_breakpoint": {"mode": "explicit"}}
UNUSED = "x-chunk-cache-unused"
NOT_READ = "documents (this route does not read them)"


MARKED = chat(
    ("system", [text("Be brief."), text(" the old rule\n", **CONTROL)]),
    ("user", [text("the rose\n", **BREAKPOINT), text("the tale", **CONTROL), text("Who?", **CONTROL)]),
)


# Marks on text parts.


def test_marks_are_off_unless_asked_for_and_named(service, seen):
    response = sent(service, seen, CHAT, MARKED)
    assert carried(seen[0]) is None
    assert "x-chunk-cache" not in response.headers
    named = response.headers[UNUSED]
    assert "messages[0].content[1].cache_control (off: --chunk-cache-marks)" in named
    assert "messages[1].content[0].prompt_cache_breakpoint (off" in named


@pytest.mark.parametrize("how", ["server", "request"])
def test_marked_parts_are_chunks_and_the_text_is_that_of_stock(service, seen, use, how):
    sent(service, seen, CHAT, MARKED)
    stock = list(seen[0].input_ids)
    use(marks=how == "server")
    body = MARKED if how == "server" else {**MARKED, "chunk_cache": {"marks": True}}
    response = sent(service, seen, CHAT, body)
    assert chunks_of(service, seen[0]) == ["the old rule", "the rose", "the tale"]
    assert list(seen[0].input_ids) == stock
    assert response.headers[UNUSED] == "messages[1].content[2].cache_control (the last part of the prompt)"


def test_a_request_may_decline_the_marks_that_the_server_takes(service, seen, use):
    use(marks=True)
    sent(service, seen, CHAT, {**MARKED, "chunk_cache": {"marks": False}})
    assert chunks_of(service, seen[0]) == []


def test_roles_strings_and_other_kinds_of_content(service, seen, use):
    use(marks=True)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    body = chat(
        {"role": "developer", "content": "the rule", **CONTROL},
        {"role": "assistant", "content": [text("so", **CONTROL)]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": [text("found it", **BREAKPOINT)]},
        {"role": "user", "content": "Who?", **CONTROL},
    )
    response = sent(service, seen, CHAT, body)
    assert chunks_of(service, seen[0]) == ["the rule", "found it"]
    assert response.headers[UNUSED] == (
        "messages[1].content[0].cache_control (not of the user, a tool or the system), "
        "messages[4].cache_control (the last part of the prompt)"
    )


def test_parts_are_chunks_where_that_is_asked_for(service, seen, use):
    body = chat(("system", [text("alone")]), ("user", [text("the rose"), text(" "), text("the tale"), text("Who?")]))
    sent(service, seen, CHAT, body)
    stock = text_of(service, seen[0])
    sent(service, seen, CHAT, {**body, "custom_params": {"chunk_cache": {"parts": True, "mode": "exact"}}})
    assert chunks_of(service, seen[0]) == ["the rose", "the tale"]
    assert loads(carried(seen[0])).mode == "exact"
    assert text_of(service, seen[0]) == stock
    use(parts=True)
    sent(service, seen, CHAT, body)
    assert chunks_of(service, seen[0]) == ["the rose", "the tale"]


def test_separators_and_marks_together(service, seen, use):
    use(marks=True)
    body = chat(("system", [text("the rule", **CONTROL), text("Go.")]), ("user", f"Read. {SEP}the rose{SEP}Who?"))
    sent(service, seen, CHAT, body)
    assert chunks_of(service, seen[0]) == ["the rule", "the rose"]


def test_marks_are_not_mixed_with_spans(service, seen, use):
    use(marks=True)
    response = sent(service, seen, CHAT, {**MARKED, "chunk_cache": {"spans": [[0, 2]]}})
    assert loads(carried(seen[0])).spans == ((0, 2),)
    assert "prompt_cache_breakpoint (spans are given)" in response.headers[UNUSED]


def test_only_so_many_marks_are_named(service, seen):
    parts = [text(f"part {i}", **CONTROL) for i in range(20)]
    assert sent(service, seen, CHAT, chat(("user", parts))).headers[UNUSED].endswith(", and 12 more")


def test_more_marks_than_chunks_may_be(service, seen, use):
    use(marks=True)
    parts = [text("a", **CONTROL) for _ in range(MAX_CHUNKS + 2)]
    response = sent(service, seen, CHAT, chat(("user", parts)))
    assert len(chunks_of(service, seen[0])) == MAX_CHUNKS
    assert f"messages[0].content[{MAX_CHUNKS}].cache_control (too many chunks)" in response.headers[UNUSED]


# Exactness: whatever a template does with a text, the prompt is that of stock SGLang.

ALL = ["the old rule", "the rose", "the tale"]
LOOP = "{{ '<|bos|>' }}{% for m in messages %}<|{{ m.role }}|>WRITTEN{% endfor %}<|assistant|>"


@pytest.mark.parametrize(
    ("written", "content_format", "chunks"),
    [
        ("{{ m.content | trim }}", "string", ALL),
        ("{{ m.content | tojson }}", "string", ALL),
        ("{% for p in m.content %}[{{ p.text | trim }}]{% endfor %}", "openai", ALL),
        ("{{ m.content if m.role == 'user' }}", "string", ["the rose", "the tale"]),
        ("{{ m.content }}{{ m.content }}", "string", ALL),
        ("{{ m.content[:1] }}", "string", []),
        ("{{ m.content }}{{ m.content | length }}", "string", []),
    ],
)  # fmt: skip
def test_the_text_is_that_of_stock_with_any_template(service, seen, template, written, content_format, chunks):
    template(LOOP.replace("WRITTEN", written), content_format)
    sent(service, seen, CHAT, MARKED)
    stock = text_of(service, seen[0])
    response = sent(service, seen, CHAT, {**MARKED, "chunk_cache": {"marks": True}})
    assert text_of(service, seen[0]) == stock
    assert list(dict.fromkeys(chunks_of(service, seen[0]))) == chunks
    named = response.headers[UNUSED]
    assert ("messages[0].content[1].cache_control (the chat template" in named) == ("the old rule" not in chunks)


def test_a_built_in_template(service, seen, monkeypatch):
    from sglang.srt.entrypoints.http_server import app

    body = chat(("system", "Be brief."), ("user", [text("the rose\n", **CONTROL), text("Who?")]))
    monkeypatch.setattr(app.state.openai_serving_chat.template_manager, "_chat_template_name", "chatml")
    sent(service, seen, CHAT, body)
    stock = text_of(service, seen[0])
    sent(service, seen, CHAT, {**body, "chunk_cache": {"marks": True}})
    assert chunks_of(service, seen[0]) == ["the rose"]
    assert text_of(service, seen[0]) == stock


# Passages beside the messages.


def test_chunks_stand_in_front_of_the_last_message_of_the_user(service, seen):
    body = chat(("user", "Hi."), ("assistant", "Yes."), ("user", "Who?"))
    sent(service, seen, CHAT, {**body, "chunk_cache": {"chunks": CHUNKS, "ratio": 0.5}})
    assert chunks_of(service, seen[0]) == ["the rose", "the tale", "the rose"]
    assert loads(carried(seen[0])).ratio == 0.5
    assert "<|user|>the rose\n\n\nthe tale\n\nthe rose\n\n\nWho?<|assistant|>" in text_of(service, seen[0])


def test_the_template_of_chunks(service, seen):
    asked = {"chunks": CHUNKS[:2], "template": "[{id}] {text} {end}\n"}
    sent(service, seen, CHAT, chat(("user", [text("Who?")]), chunk_cache=asked))
    assert chunks_of(service, seen[0]) == ["[a] the rose\n {end", "[b] the tale {end"]
    assert text_of(service, seen[0]).endswith("[b] the tale {end}\nWho?<|assistant|>")


@pytest.mark.parametrize("path", [CHAT, MESSAGES])
def test_marks_are_looked_for_as_deep_as_they_may_stand(path):
    content: list[Any] = [{"type": "text", "text": "a"}]
    for _ in range(100):
        content = [{"type": "tool_result", "content": content, "cache_control": {"type": "ephemeral"}}]
    marked = MarkedBody()
    read_body(path, {"messages": [{"role": "user", "content": content}]}, marked, MarkFlags(SEP, marks=True))
    assert next(iter(marked.marks.unused)) == "messages[0].content[0].cache_control"
    assert len(marked.marks.unused) == 6


def test_a_chat_that_comes_again_to_a_model_that_sees_images(service, seen, monkeypatch):
    """SGLang keeps the token ids of such a model's chats."""
    original = ChunkServingChat._render_and_encode_chat_template

    def as_for_images(self, messages, **options):
        return original(self, messages, **{**options, "use_cache": True})

    monkeypatch.setattr(ChunkServingChat, "_render_and_encode_chat_template", as_for_images)
    cached = [text("the tale", cache_control={"type": "ephemeral"}), text("Who?")]
    for _ in range(2):
        sent(service, seen, CHAT, chat(("user", f"Read.{SEP}the rose{SEP}Who?")))
        assert chunks_of(service, seen[0]) == ["the rose"]
        sent(service, seen, CHAT, chat(("user", cached), chunk_cache={"marks": True}))
        assert chunks_of(service, seen[0]) == ["the tale"]


def test_chunks_in_front_of_a_completion(service, seen):
    body = {"model": "m", "prompt": f"Now{SEP}the end{SEP}?", "max_tokens": 3, "echo": True}
    response = sent(service, seen, COMPLETIONS, {**body, "chunk_cache": {"chunks": CHUNKS[:1]}})
    assert chunks_of(service, seen[0]) == ["the rose", "the end"]
    assert response.json()["choices"][0]["text"].startswith("the rose\n\n\nNowthe end?")


DOCUMENTS = ["the rose\n", {"title": "Tales", "text": "the tale", "doc_id": 7}]


def test_documents_without_a_place_in_the_template(service, seen):
    sent(service, seen, CHAT, chat(("user", "Who?"), documents=DOCUMENTS))
    assert chunks_of(service, seen[0]) == ["the rose", "Tales\nthe tale"]
    assert text_of(service, seen[0]).endswith("<|user|>the rose\n\n\nTales\nthe tale\n\nWho?<|assistant|>")


def test_documents_in_the_models_own_template(service, seen, template):
    template(
        "{% for d in documents or () %}<{{ d.title }}: {{ d.text | trim }}>{% endfor %}"
        + LOOP.replace("WRITTEN", "{{ m.content }}")
    )
    stock = [{"text": DOCUMENTS[0]}, DOCUMENTS[1]]
    sent(service, seen, CHAT, chat(("user", "Who?"), chat_template_kwargs={"documents": stock}))
    expected = text_of(service, seen[0])
    sent(service, seen, CHAT, chat(("user", "Who?"), documents=DOCUMENTS))
    assert text_of(service, seen[0]) == expected
    assert chunks_of(service, seen[0]) == ["the rose", "the tale"]
    asked = {"template": "<{text}>"}
    sent(service, seen, CHAT, chat(("user", "Who?"), documents=DOCUMENTS, chunk_cache=asked))
    assert chunks_of(service, seen[0]) == ["<the rose", "<the tale"]


@pytest.mark.parametrize("has_place", [False, True])
def test_ids_of_documents_are_those_of_their_chunks(service, seen, template, has_place):
    if has_place:
        template(
            "{% for d in documents or () %}<{{ d.id + 1 if d.id is number else d.id }} {{ d.text }}>{% endfor %}"
            + LOOP.replace("WRITTEN", "{{ m.content }}")
        )
    documents = [{"id": 0, "text": "the rose"}, {"id": "z", "text": "the tale"}, "the end", {"id": 1.5, "text": "so"}]
    sent(service, seen, CHAT, chat(("user", "Who?"), documents=documents))
    assert loads(carried(seen[0])).chunk_ids == ("0", "z", None, "1.5")
    assert ("<1 the rose>" in text_of(service, seen[0])) == has_place  # the template gets the number


@pytest.mark.parametrize(
    "kept",
    [
        "{% if tools %}{{ documents }}{% endif %}WRITTEN",
        "{# documents are not supported #}WRITTEN",
        {"default": "WRITTEN", "rag": "{{ documents }}"},
    ],
    ids=["with tools only", "in a comment", "in another template"],
)
def test_documents_that_the_template_leaves_out_are_written_by_the_server(service, seen, template, kept):
    loop = LOOP.replace("WRITTEN", "{{ m.content }}")
    template(
        {k: v.replace("WRITTEN", loop) for k, v in kept.items()}
        if isinstance(kept, dict)
        else kept.replace("WRITTEN", loop)
    )
    marked = chat(("user", f"{SEP}the end{SEP}Who?"), documents=DOCUMENTS)
    response = sent(service, seen, CHAT, marked)
    assert chunks_of(service, seen[0]) == ["the rose", "Tales\nthe tale", "the end"]
    assert "the rose\n\n\nTales\nthe tale\n\nthe endWho?" in text_of(service, seen[0])
    assert UNUSED not in response.headers


def test_documents_of_the_client_for_the_template_are_left_to_it(service, seen, template):
    template("{% if tools %}{{ documents }}{% endif %}" + LOOP.replace("WRITTEN", "{{ m.content }}"))
    own = {"chat_template_kwargs": {"documents": [{"text": "the rose"}]}}
    sent(service, seen, CHAT, chat(("user", [text("the tale", **CONTROL), text("Who?")]), **own, chunk_cache=MARKS))
    assert chunks_of(service, seen[0]) == ["the tale"]
    assert "the rose" not in text_of(service, seen[0])


def test_documents_are_left_to_a_template_whose_text_is_not_seen(service, seen, template, monkeypatch):
    template("{% for d in documents or () %}<{{ d.text }}>{% endfor %}" + LOOP.replace("WRITTEN", "{{ m.content }}"))
    monkeypatch.setattr(service.app.state.openai_serving_chat, "_prompt_text_round_trip_is_lossy", True)
    response = sent(service, seen, CHAT, chat(("user", "Who?"), documents=["the rose"]))
    assert text_of(service, seen[0]).count("<the rose>") == 1
    assert response.headers[UNUSED] == "documents[0] (the chat template changes it)"


def test_documents_that_the_template_writes_in_part_are_named(service, seen, template):
    template("{{ documents[0].text }}" + LOOP.replace("WRITTEN", "{{ m.content }}"))
    response = sent(service, seen, CHAT, chat(("user", "Who?"), documents=DOCUMENTS))
    assert chunks_of(service, seen[0]) == ["the rose"]
    assert response.headers[UNUSED] == "documents[1] (the chat template leaves it out)"


# Templates that look at how a text begins or ends, as those of Qwen3 do to find the last question.
BY_BEGINNING = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{{ 'tool: ' if m.content.startswith('<tool>') and m.content.endswith('</tool>') }}{{ m.content }}{% endfor %}"
)


@pytest.mark.parametrize("text", [f"{SEP}<tool>the rose</tool>{SEP}", f"<tool>the rose {SEP}the tale</tool>{SEP}"])
def test_marks_that_would_change_the_prompt_are_refused(service, seen, template, text):
    template(BY_BEGINNING)
    response = service.post(CHAT, chat(("user", text)))
    assert response.status_code == 400
    assert "changes the marked chunks" in response.text
    assert seen == []
    sent(service, seen, CHAT, chat(("user", f"<tool>{SEP}the rose{SEP}</tool>")))
    assert text_of(service, seen[0]).endswith("tool: <tool>the rose</tool>")


# Blank passages, and marks that stand elsewhere.

MARKS = {"marks": True}
BLANK = [
    (CHAT, chat(("user", [text(" \n", **CONTROL), text("Who?")]), chunk_cache=MARKS), "messages[0].content[0].cache_"),
    (CHAT, chat(("user", [text("", **BREAKPOINT), text("Who?")]), chunk_cache=MARKS), "messages[0].content[0].prompt_"),
    (CHAT, chat(("user", "Who?"), chunk_cache={"chunks": [{"id": "a", "text": " "}]}), "chunk_cache.chunks[0]"),
    (CHAT, chat(("user", "Who?"), custom_params={"chunk_cache": {"chunks": [{"text": ""}]}}), "custom_params.chunk_c"),
    (CHAT, chat(("user", "Who?"), documents=["", {"text": "\n"}]), "documents[0] (no visible text), documents[1]"),
    (MESSAGES, messages(text(" ", **CONTROL), text("Who?"), chunk_cache=MARKS), "messages[0].content[0].cache_contro"),
    (MESSAGES, messages(text("Who?"), system=[text("", **CONTROL)], chunk_cache=MARKS), "system[0].cache_control"),
    (MESSAGES, messages(text("Who?"), chunk_cache={"chunks": [{"text": "\t"}]}), "chunk_cache.chunks[0]"),
    (MESSAGES, messages({**SEARCH, "content": [text(" ")]}, text("Who?")), "messages[0].content[0].search_result"),
    (
        MESSAGES,
        messages({"type": "document", "source": {"type": "text", "data": " "}}, text("Who?")),
        "messages[0].content[0].document",
    ),
    (COMPLETIONS, {"model": "m", "prompt": "Who?", "chunk_cache": {"chunks": [{"text": " "}]}}, "chunk_cache.chunks"),
    (CHAT, chat(("user", "Who?"), chunk_cache={"chunks": [{"text": "\u200b\n"}, {"text": "\ufeff"}]}), "chunks[1]"),
    (CHAT, chat(("user", "Who?"), documents=["\u2060", "\xad"]), "documents[0] (no visible text), documents[1]"),
    (MESSAGES, messages(text("\u200b", **CONTROL), text("Who?"), chunk_cache=MARKS), "messages[0].content[0].cache_"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("route", "body", "named"), BLANK, ids=[f"{i}-{one[2]}" for i, one in enumerate(BLANK)])
def test_blank_passages_are_skipped_and_named(service, seen, route, body, named, stream):
    response = sent(service, seen, route, {**body, "stream": stream})
    assert chunks_of(service, seen[0]) == []
    assert named in response.headers[UNUSED]
    assert "Who?" in text_of(service, seen[0])


@pytest.mark.parametrize("passages", [{"documents": []}, {"chunk_cache": {"chunks": []}}])
def test_a_template_may_have_no_passage_to_write(service, seen, passages):
    asked = {**passages.get("chunk_cache", {}), "template": "{text}"}
    sent(service, seen, CHAT, chat(("user", "Who?"), **{**passages, "chunk_cache": asked}))
    assert chunks_of(service, seen[0]) == []


def test_passages_beside_a_blank_one_keep_their_places(service, seen):
    asked = {"chunks": [{"text": " "}, {"id": "b", "text": "the tale"}]}
    response = sent(service, seen, CHAT, chat(("user", "Who?"), documents=["", "the rose"], chunk_cache=asked))
    assert chunks_of(service, seen[0]) == ["the rose", "the tale"]
    assert response.headers[UNUSED] == "chunk_cache.chunks[0] (no visible text), documents[0] (no visible text)"
    assert [chunk.get("id") for chunk in json.loads(carried(seen[0])).get("chunks", [])] == []


TOOL = {"name": "look", "description": "d", "input_schema": {"type": "object", "properties": {"cache_control": {}}}}
FUNCTION = {"type": "function", "function": {"name": "look", "parameters": TOOL["input_schema"]}}


@pytest.mark.parametrize("is_on", [False, True])
@pytest.mark.parametrize(
    ("route", "body", "paths"),
    [
        (MESSAGES, messages(text("Who?"), tools=[TOOL, {**TOOL, **CONTROL}]), ["tools[1].cache_control"]),
        (MESSAGES, messages(text("Who?"), **CONTROL), ["cache_control"]),
        (
            CHAT,
            chat(("user", "Who?"), tools=[{**FUNCTION, **CONTROL}], **CONTROL),
            ["cache_control", "tools[0].cache_"],
        ),
        (CHAT, chat({"role": "user", "content": [text("a"), text("Who?")], **CONTROL}), ["messages[0].cache_control"]),
        (COMPLETIONS, {"model": "m", "prompt": "Who?", **CONTROL}, ["cache_control"]),
        ("/v1/responses", {"model": "m", "input": "Who?", **CONTROL}, ["cache_control"]),
        ("/generate", {"text": "Who?", **CONTROL}, ["cache_control"]),
    ],
)
def test_marks_elsewhere_are_named(service, seen, use, route, body, paths, is_on):
    use(marks=is_on)
    named = service.post(route, body).headers[UNUSED].split(", ")
    assert len(named) == len(paths), named
    for path, one in zip(paths, named, strict=True):
        assert one.startswith(path)


def test_an_argument_of_a_tool_is_no_mark(service, seen):
    call = {"type": "tool_use", "id": "t", "name": "look", "input": {**CONTROL, "content": [text("a", **CONTROL)]}}
    body = messages(text("Look."))
    body["messages"] += [
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "plain"}, text("Who?")]},
    ]
    assert UNUSED not in sent(service, seen, MESSAGES, body).headers


@pytest.mark.parametrize(
    ("route", "body"),
    [
        (COMPLETIONS, {"model": "m", "prompt": "Who?"}),
        (MESSAGES, messages(text("Who?"))),
        (f"{MESSAGES}/count_tokens", messages(text("Who?"))),
        ("/v1/responses", {"model": "m", "input": "Who?"}),
        ("/generate", {"text": "Who?"}),
    ],
)
def test_documents_where_they_are_not_read_are_named(service, seen, route, body):
    assert service.post(route, {**body, "documents": DOCUMENTS}).headers[UNUSED] == NOT_READ
    assert UNUSED not in service.post(route, {**body, "documents": []}).headers


def test_a_mark_is_named_once(service, seen, use):
    use(marks=True)
    both = {**CONTROL, **BREAKPOINT}
    marked_text = {**SEARCH, "content": [text("the rose", **CONTROL)], **CONTROL}
    response = sent(service, seen, MESSAGES, messages(text("a", **both), marked_text, text("Who?")))
    assert UNUSED not in response.headers
    assert len(chunks_of(service, seen[0])) == 2


# The tools read what the server reads.

BY_TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
BY_PARTS = (
    "{% for message in messages %}<{{ message.role }}>{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)
WITH_DOCUMENTS = "{% for d in documents or [] %}[{{ d.title }}] {{ d.text }}\n{% endfor %}" + BY_TEMPLATE
READ = [
    *((MESSAGES, body) for body in ANTHROPIC_BODIES.values()),
    *((route, body) for route, body, _ in BLANK),
    (CHAT, MARKED),
    (CHAT, {**MARKED, "chunk_cache": {"parts": True, "marks": False}}),
    (CHAT, chat({"role": "developer", "content": "the rule", **CONTROL}, ("assistant", "so"), ("user", "Who?"))),
    (
        CHAT,
        chat(("user", f"{SEP}the rose{SEP}"), ("assistant", None), ("user", [text(f"{SEP}a b{SEP}"), text("Who?")])),
    ),
    (CHAT, chat(("tool", [text("found", **CONTROL), text("it")]), ("user", "Who?"))),
    (CHAT, chat(("user", [text("Who?")]), chunk_cache={"chunks": CHUNKS, "template": "[{id}] {text}\n"})),
    (CHAT, chat(("user", "Who?"), documents=["the rose", {"title": "T", "text": "the tale\n"}], **CONTROL)),
    (CHAT, chat(("user", "Who said what?"), chunk_cache={"spans": [[1, 3]]})),
    (CHAT, chat(("user", "Who?"), chunk_cache=None, documents=None)),
    (COMPLETIONS, {"model": "m", "prompt": f"Read.{SEP}a b{SEP}c", "chunk_cache": {"chunks": CHUNKS}}),
    (COMPLETIONS, {"model": "m", "prompt": "Who said what?", "chunk_cache": {"spans": [[1, 3]]}}),
    ("/generate", {"text": "Who?", "sampling_params": {"custom_params": {"chunk_cache": {"spans": [[0, 2]]}}}}),
]


@pytest.mark.parametrize("form", [BY_TEMPLATE, BY_PARTS, WITH_DOCUMENTS], ids=["string", "parts", "documents"])
@pytest.mark.parametrize(("route", "body"), READ)
def test_the_tools_read_what_the_server_reads(service, seen, use, template, route, body, form):
    use(marks=True)
    template(form, "openai" if form == BY_PARTS else "string")
    response = sent(service, seen, route, body)
    line = read_prompt(body, service.manager.tokenizer, MarkFlags(SEP, marks=True), "there")
    assert ", ".join(f"{path} ({reason})" for path, reason in line.unused.items()) == response.headers.get(UNUSED, "")
    spans = () if carried(seen[0]) is None else loads(carried(seen[0])).spans
    found = (list(line.prompt.ids), line.prompt.spans) if line.prompt else (list(seen[0].input_ids), ())
    assert found == (list(seen[0].input_ids), spans)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (chat(("user", "Who?"), tools=[FUNCTION]), "tools"),
        (chat({"role": "assistant", "content": "", "tool_calls": [{}]}), "tool_calls"),
        (chat(("user", [{"type": "image_url", "image_url": {"url": "a"}}, text("Who?")])), "parts of type image_url"),
        (messages(SEARCH, {"type": "tool_result", "tool_use_id": "t", "content": "a"}), "parts of type tool_result"),
    ],
)
def test_the_tools_say_what_only_the_server_reads(service, body, what):
    line = read_prompt(body, service.manager.tokenizer, MarkFlags(SEP), "there")
    assert (line.prompt, line.unread) == (None, what)


# Null is not given.


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("route", "body"),
    [
        (CHAT, chat(("user", "Who?"), chunk_cache=None, documents=None)),
        (CHAT, chat(("user", "Who?"), custom_params={"chunk_cache": None})),
        (CHAT, chat(("user", "Who?"), custom_params={"chunk_cache": None}, chunk_cache=None)),
        (MESSAGES, messages(text("Who?"), chunk_cache=None, custom_params={"chunk_cache": None})),
        (COMPLETIONS, {"model": "m", "prompt": "Who?", "chunk_cache": None}),
        ("/generate", {"text": "Who?", "sampling_params": {"custom_params": {"chunk_cache": None}}}),
        ("/generate", {"text": "Who?", "sampling_params": {"custom_params": None}, "chunk_cache": None}),
        ("/generate", {"text": ["a", "b"], "sampling_params": [{"custom_params": {"chunk_cache": None}}, {}]}),
    ],
)
def test_a_null_object_is_not_given(service, seen, route, body, stream):
    response = sent(service, seen, route, {**body, "stream": stream})
    assert "sglext" not in response.text
    assert "x-chunk-cache" not in response.headers
    assert carried(seen[0]) is None


NULLS = dict.fromkeys(("mode", "ratio", "method", "options", "explain", "answer_tokens", "keep_tokens", "spans"))
ROUTE_NULLS = dict.fromkeys(("chunks", "template", "marks", "parts"))


@pytest.mark.parametrize("route", [CHAT, MESSAGES, COMPLETIONS, "/generate"])
def test_null_fields_are_not_given(service, seen, route):
    if route == "/generate":
        body = {"text": "Who?", "sampling_params": {"custom_params": {"chunk_cache": NULLS}}}
    else:
        asked = {**NULLS, **{key: None for key in ROUTE_NULLS if route != COMPLETIONS or key not in ("marks", "parts")}}
        bodies = {CHAT: chat(("user", "Who?")), MESSAGES: messages(text("Who?"))}
        body = bodies.get(route, {"model": "m", "prompt": "a"})
        body = {**body, "chunk_cache": asked}
    sent(service, seen, route, body)
    assert loads(carried(seen[0])) == loads('{"spans":[],"mode":"auto","explain":false}')


def test_null_fields_of_a_passage_are_not_given(service, seen):
    asked = {"chunks": [{"id": None, "text": "the rose"}], "template": None}
    documents = [{"title": None, "id": None, "text": "the tale"}]
    sent(service, seen, CHAT, chat(("user", "Who?"), chunk_cache=asked, documents=documents))
    assert chunks_of(service, seen[0]) == ["the tale", "the rose"]
    response = sent(service, seen, CHAT, chat(("user", "Who?"), chunk_cache={"marks": [None, True]}), status=400)
    assert "chunk_cache.marks: [null, true] is not a boolean" in response.text


# Routes that cannot mark chunks.


def test_marks_on_other_routes_are_named(service, seen):
    body = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_text", "text": "a", **BREAKPOINT}]}]}
    response = service.post("/v1/responses", body)
    assert response.headers[UNUSED] == "input[0].content[0].prompt_cache_breakpoint (this route cannot mark chunks)"
