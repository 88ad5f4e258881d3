"""The anthropic package: search results, documents, `cache_control`, and a stream."""

import sys
from typing import Any

from anthropic import Anthropic


def ask(url: str, blocks: list[Any], question: str, **body: Any) -> dict[str, int]:
    content = [*blocks, {"type": "text", "text": question}]
    message = Anthropic(base_url=url, api_key="none").messages.create(
        model="default", max_tokens=8, messages=[{"role": "user", "content": content}], **body
    )
    return found(message)


def found(message: Any) -> dict[str, int]:
    """Chunks are counted in `input_tokens`, and never in `cache_read_input_tokens`."""
    assert message.sglext["chunk_cache"]["chunks"], "what became of each"
    return {"reused": message.usage.chunk_reused_tokens, "recomputed": message.usage.chunk_recomputed_tokens}


def search_result(passage: str) -> dict[str, Any]:
    texts = [{"type": "text", "text": passage}]
    return {"type": "search_result", "source": "notes", "title": "Notes", "content": texts}


def with_search_results(url: str, passages: list[str], question: str) -> dict[str, int]:
    return ask(url, [search_result(passage) for passage in passages], question)


def with_documents(url: str, passages: list[str], question: str) -> dict[str, int]:
    source = {"type": "text", "media_type": "text/plain"}
    blocks = [{"type": "document", "title": "Notes", "source": {**source, "data": passage}} for passage in passages]
    return ask(url, blocks, question)


def with_cache_control(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Without `extra_body` the server needs --chunk-cache-marks."""
    mark = {"cache_control": {"type": "ephemeral"}}
    blocks = [{"type": "text", "text": f"\n{passage}", **mark} for passage in passages]
    return ask(url, blocks, question, extra_body={"chunk_cache": {"marks": True}})


def in_a_stream(url: str, passages: list[str], question: str) -> dict[str, int]:
    content = [*map(search_result, passages), {"type": "text", "text": question}]
    messages = Anthropic(base_url=url, api_key="none").messages
    with messages.stream(model="default", max_tokens=8, messages=[{"role": "user", "content": content}]) as stream:
        return found(stream.get_final_message())


if __name__ == "__main__":
    for order in (["Paris is in France.", "Rome is in Italy."], ["Rome is in Italy.", "Paris is in France."]):
        print(with_search_results(sys.argv[1], order, "Where is Rome?"))
