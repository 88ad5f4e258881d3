"""langchain-openai: parts of a message, results of a tool, or passages beside the messages."""

import sys
from typing import Any

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def model(url: str, **asked: Any) -> ChatOpenAI:
    return ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="default", max_tokens=8, extra_body={"chunk_cache": asked}
    )


def found(reply: AIMessage) -> dict[str, int]:
    """LangChain drops `sglext`; the counts of `usage` are in the metadata of the response."""
    details = reply.response_metadata["token_usage"]["prompt_tokens_details"]
    return {"reused": details["chunk_reused_tokens"], "recomputed": details["chunk_recomputed_tokens"]}


def with_parts(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Without `extra_body` the server needs --chunk-cache-parts."""
    parts = [{"type": "text", "text": f"\n{text}"} for text in (*passages, question)]
    return found(model(url, parts=True).invoke([HumanMessage(parts)]))


def with_a_tool(url: str, passages: list[str], question: str) -> dict[str, int]:
    """What a retriever returned as a tool; of its parts LangChain keeps type, text and breakpoint."""
    mark = {"prompt_cache_breakpoint": {"mode": "explicit"}}
    results = [{"type": "text", "text": f"\n{passage}", **mark} for passage in passages]
    call = AIMessage("", tool_calls=[{"id": "1", "name": "search", "args": {}}])
    turns = [HumanMessage(question), call, ToolMessage(results, tool_call_id="1"), HumanMessage("Answer.")]
    return found(model(url, marks=True).invoke(turns))


def with_chunks(url: str, passages: list[str], question: str) -> dict[str, int]:
    chunks = [{"text": passage} for passage in passages]
    return found(model(url, chunks=chunks).invoke(question))


def in_a_stream(url: str, passages: list[str], question: str) -> dict[str, int]:
    """Of a stream LangChain keeps the header, where it is asked to."""
    llm = model(url, chunks=[{"text": passage} for passage in passages])
    llm.include_response_headers = True
    first, *others = llm.stream(question)
    reply = sum(others, first)
    counts = (pair.split("=") for pair in reply.response_metadata["headers"]["x-chunk-cache"].split(", "))
    return {name: int(count) for name, count in counts}


if __name__ == "__main__":
    for order in (["Paris is in France.", "Rome is in Italy."], ["Rome is in Italy.", "Paris is in France."]):
        print(with_chunks(sys.argv[1], order, "Where is Rome?"))
