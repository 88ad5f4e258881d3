"""haystack: parts of a message, or passages beside the messages."""

import os
import sys
from typing import Any

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")  # nothing is told to the internet

from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage, TextContent
from haystack.utils import Secret


def ask(url: str, message: ChatMessage, asked: dict[str, Any]) -> dict[str, int]:
    generator = OpenAIChatGenerator(api_key=Secret.from_token("none"), model="default", api_base_url=f"{url}/v1")
    kwargs = {"max_tokens": 8, "extra_body": {"chunk_cache": asked}}
    (reply,) = generator.run([message], generation_kwargs=kwargs)["replies"]
    details = reply.meta["usage"]["prompt_tokens_details"]
    return {"reused": details["chunk_reused_tokens"], "recomputed": details["chunk_recomputed_tokens"]}


def with_parts(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Without `extra_body` the server needs --chunk-cache-parts."""
    parts = [TextContent(f"\n{text}") for text in (*passages, question)]
    return ask(url, ChatMessage.from_user(content_parts=parts), {"parts": True})


def with_chunks(url: str, passages: list[str], question: str) -> dict[str, int]:
    return ask(url, ChatMessage.from_user(question), {"chunks": [{"text": passage} for passage in passages]})


if __name__ == "__main__":
    for order in (["Paris is in France.", "Rome is in Italy."], ["Rome is in Italy.", "Paris is in France."]):
        print(with_chunks(sys.argv[1], order, "Where is Rome?"))
