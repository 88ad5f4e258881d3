"""Chat prompt: a body of `/v1/chat/completions` or `/v1/messages`, marked and written as the server does it.

Verb: `write_chat`. The server's own rules find the chunks (`chunk_cache.prompt.marked_body`). What SGLang does with
the messages before it applies the chat template is repeated here, but only for messages of text. Any other body raises
`NotRead`: only the server can say what its prompt is.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, request_error, show
from chunk_cache.prompt.chunk_cache_fields import as_passages
from chunk_cache.prompt.marked_body import MarkedBody, MarkFlags, has_place_for_documents, read_body
from chunk_cache.prompt.marks import MarkedText, Marks, split_marked
from chunk_cache_tools.passages import put_in_front

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
_PASSAGES = ("search_result", "document")  # types of Anthropic's blocks
_FIELDS = ("tools", "thinking", "continue_final_message")
_ITERATES = re.compile(r"\bfor \w+ in (message|msg|m)(\.content|\[['\"]content['\"]\])|image|audio|video|vision")
"""Matches a chat template that takes the parts of a message, which SGLang detects too; for others it joins them."""


class NotRead(ChunkCacheRequestError):
    """Only the server can write the prompt of this body; the message names the part of the body that is the reason."""


def write_chat(request: Mapping[str, Any], tokenizer: Any, flags: MarkFlags, marked: MarkedBody) -> MarkedText:
    """The prompt of a chat.

    Args:
        request: body of the chat.
        marked: a new `MarkedBody`; it receives what the body asks for, even if the prompt cannot be written.

    Raises:
        NotRead: see above.
        ChunkCacheRequestError: the server would refuse the body, or the tokenizer has no chat template.
    """
    body = copy.deepcopy(dict(request))
    messages = body["messages"]
    if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
        raise request_error(
            "messages", "not a list of messages", 'give one such as [{"role": "user", "content": ".."}]'
        )
    is_anthropic = bool(body.get("system")) or any(part.get("type") in _PASSAGES for part in _parts(body))
    read_body(MESSAGES if is_anthropic else CHAT, body, marked, flags)
    if what := next(_unwritable(body), None):
        raise NotRead(what)
    template = getattr(tokenizer, "chat_template", None)
    if template is None:
        problem = "the model's tokenizer has no chat template"
        raise request_error("messages", problem, "give the prompts as text with separators")
    if is_anthropic:
        body["messages"] = _as_chat(body)
    marks, kwargs = marked.marks, dict(body.get("chat_template_kwargs") or {})
    for index, message in enumerate(body["messages"]):
        message["content"] = _tagged(message.get("content") or "", marks, flags.separator, f"messages[{index}].content")
    passages = marked.asked.passages
    if marked.documents and marked.asked.template is None and has_place_for_documents(template):
        kwargs["documents"] = marked.tag_documents()
    else:
        passages = (*as_passages(marked.documents), *passages)
    if passages:
        body = put_in_front(marked.tag_passages(passages), body)
    marked.check_one_way()
    messages = [_joined(message, bool(_ITERATES.search(str(template)))) for message in body["messages"]]

    def render(messages: Any, kwargs: Any) -> str:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **kwargs))

    text = render(messages, kwargs)
    if marks.foreign:
        plain = render(marks.without(messages, foreign_only=True), marks.without(kwargs, foreign_only=True))
        if marks.without(text, foreign_only=True) != plain:
            marks.drop_foreign("the chat template changes it")
            text = plain
    found = None if flags.separator in text else marks.split(text)
    if found is None:
        raise request_error("messages", "the chat template of the model changes the marked chunks", "give spans of ids")
    return found


def _parts(body: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """All parts of messages whose content is a list."""
    for index, message in enumerate(body["messages"]):
        content = message.get("content") or []
        parts = [] if isinstance(content, str) else content
        if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
            raise request_error(f"messages[{index}].content", "neither a text nor a list of parts", "give one of them")
        yield from parts


def _unwritable(body: Mapping[str, Any]) -> Iterator[str]:
    """The fields and parts of a body that SGLang does not turn into text alone."""
    yield from (name for name in _FIELDS if body.get(name))
    yield from ("tool_calls" for message in body["messages"] if message.get("tool_calls"))
    yield from (f"parts of type {part.get('type')}" for part in _parts(body) if _text_of(part) is None)


def _text_of(part: Mapping[str, Any]) -> str | None:
    """The text that SGLang makes of a part of a message, or None; documents have been made search results before."""
    if part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if part.get("type") != "search_result":
        return None
    source, content = part.get("source"), part.get("content")
    if isinstance(source, dict):
        source = source.get("url") or source.get("text")
    blocks = [{"text": content}] if isinstance(content, str) else content or []
    if not isinstance(blocks, list) or not all(isinstance(one, dict) for one in blocks):
        raise request_error("search_result.content", f"{show(content)} is not a list of texts", "give one")
    texts = [str(one["text"]) for one in blocks if one.get("text")]
    lines = (("Title", part.get("title")), ("Source", source), ("Content", "\n".join(texts)))
    return "\n".join(f"{name}: {line}" for name, line in lines if line)


def _as_chat(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The chat messages that SGLang makes of a body of the Anthropic route."""
    system = body.get("system") or ""
    if not isinstance(system, str):
        system = "\n".join(block["text"] for block in system if block.get("text"))
    messages = [{"role": "system", "content": system}] if system.strip() else []
    for message in body["messages"]:
        content = message.get("content")
        if isinstance(content, list):
            content = [{"type": "text", "text": _text_of(part)} for part in content]
            content = content[0]["text"] if len(content) == 1 else content
        messages.append({**message, "content": content})
    return messages


def _tagged(content: Any, marks: Marks, separator: str, path: str) -> Any:
    """The content of a message, with tags instead of separators."""
    if not isinstance(content, str):
        return [
            {"type": "text", "text": _tagged(part["text"], marks, separator, f"{path}[{index}].text")}
            for index, part in enumerate(content)
        ]
    marked = split_marked(content, separator, path)
    return content if marked is None else marks.tag_pieces(marked)


def _joined(message: Mapping[str, Any], takes_parts: bool) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list) and (not takes_parts or message.get("role") == "tool"):
        content = " ".join(part["text"] for part in content)
    return {**{key: value for key, value in message.items() if value is not None}, "content": content}
