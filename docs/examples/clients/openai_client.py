"""The openai package: three ways to mark, and what its classes keep of the reply."""

import sys
from typing import Any

from openai import OpenAI


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none")


def found(usage: Any) -> dict[str, int]:
    details = usage.prompt_tokens_details
    return {"reused": details.chunk_reused_tokens, "recomputed": details.chunk_recomputed_tokens}


def with_breakpoints(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Parts marked as for OpenAI's prompt cache; without `extra_body` the server needs --chunk-cache-marks."""
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    parts = [{"type": "text", "text": f"\n{passage}", **mark} for passage in passages]
    reply = client(url).chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": [*parts, {"type": "text", "text": question}]}],
        max_tokens=8,
        extra_body={"chunk_cache": {"marks": True}},
    )
    return found(reply.usage)


def with_chunks(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Passages beside the messages; `reply.sglext` says what became of each."""
    reply = client(url).chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=8,
        extra_body={"chunk_cache": {"chunks": [{"text": passage} for passage in passages]}},
    )
    told = reply.sglext["chunk_cache"]
    return {"reused": told["reused_tokens"], "recomputed": told["recomputed_tokens"]}


def with_documents(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Passages as vLLM takes them, here in a stream: the last event but one has the usage."""
    events = client(url).chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": question}],
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"documents": [{"title": "Notes", "text": passage} for passage in passages]},
    )
    return next(found(event.usage) for event in events if event.usage)


def in_a_completion(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Separators in a prompt; the header of the response, where a program looks at nothing else."""
    text = "<|chunk|>".join(["", *passages, question])
    response = client(url).completions.with_raw_response.create(model="default", prompt=text, max_tokens=8)
    counts = (pair.split("=") for pair in response.headers["x-chunk-cache"].split(", "))
    return {name: int(count) for name, count in counts}


if __name__ == "__main__":
    for order in (["Paris is in France.", "Rome is in Italy."], ["Rome is in Italy.", "Paris is in France."]):
        print(with_chunks(sys.argv[1], order, "Where is Rome?"))
