"""What clients send, as bodies of the routes that they use."""

from __future__ import annotations

from typing import Any

SEP = "<|chunk|>"
CHAT, MESSAGES, COMPLETIONS = "/v1/chat/completions", "/v1/messages", "/v1/completions"
CHUNKS = [{"id": "a", "text": "the rose\n"}, {"id": "b", "text": "the tale"}, {"id": "a", "text": "the rose\n"}]


def text(value: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": value, **more}


def chat(*messages: Any, **more: Any) -> dict[str, Any]:
    found = [m if isinstance(m, dict) else {"role": m[0], "content": m[1]} for m in messages]
    return {"model": "m", "max_tokens": 3, "messages": found, **more}


def sent(service, seen, route: str, body: Any, status: int = 200) -> Any:
    """The response, and the request that reached the scheduler."""
    seen.clear()
    response = service.post(route, body)
    assert response.status_code == status, response.text
    return response


def messages(*content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "m", "max_tokens": 3, "messages": [{"role": "user", "content": list(content)}], **more}


SEARCH = {
    "type": "search_result",
    "source": "http://a",
    "title": "Roses",
    "content": [text("the rose"), text("is red.\n")],
    "citations": {"enabled": True},
}

DOCUMENT = {
    "type": "document",
    "source": {"type": "text", "media_type": "text/plain", "data": "the tale"},
    "title": "Tales",
    "citations": {"enabled": True},
}

CONTROL = {"cache_control": {"type": "ephemeral"}}

ANTHROPIC_BODIES = {
    "separators": messages(text(f"Now.{SEP}the rose{SEP}the tale{SEP}Who?")),
    "string": {**messages(), "messages": [{"role": "user", "content": f"{SEP}the rose{SEP}Who?"}]},
    "chunks": messages(text("Who?"), chunk_cache={"chunks": [{"text": "the rose"}, {"text": "the tale"}]}),
    "search result": messages(SEARCH, text("Who?")),
    "document": messages(DOCUMENT, text("Who?", **CONTROL)),
    "marks": messages(
        text("the rose.\n", **CONTROL),
        text("Who?"),
        system=[text("Be brief.\n"), text("the rule.\n", **CONTROL), text("And so on.")],
        chunk_cache={"marks": True},
    ),
    "plain": messages(text("Who?"), system="Be brief."),
}
"""By what is marked in them, and how."""
