"""litellm: `cache_control` as for other providers, or passages beside the messages."""

import os
import sys
from typing import Any

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # nothing is asked of the internet

import litellm


def ask(url: str, content: Any, asked: dict[str, Any]) -> dict[str, int]:
    reply = litellm.completion(
        model="openai/default",
        api_base=f"{url}/v1",
        api_key="none",
        messages=[{"role": "user", "content": content}],
        max_tokens=8,
        extra_body={"chunk_cache": asked},
    )
    assert reply.sglext["chunk_cache"]["chunks"], "what became of each"
    details = reply.usage.prompt_tokens_details
    return {"reused": details.chunk_reused_tokens, "recomputed": details.chunk_recomputed_tokens}


def with_cache_control(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Without `extra_body` the server needs --chunk-cache-marks."""
    mark = {"cache_control": {"type": "ephemeral"}}
    parts = [{"type": "text", "text": f"\n{passage}", **mark} for passage in passages]
    return ask(url, [*parts, {"type": "text", "text": question}], {"marks": True})


def with_chunks(url: str, passages: list[str], question: str) -> dict[str, int]:
    return ask(url, question, {"chunks": [{"text": passage} for passage in passages]})


if __name__ == "__main__":
    for order in (["Paris is in France.", "Rome is in Italy."], ["Rome is in Italy.", "Paris is in France."]):
        print(with_chunks(sys.argv[1], order, "Where is Rome?"))
