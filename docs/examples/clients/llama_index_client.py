"""llama-index with OpenAILike: passages beside the messages."""

import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike


def with_chunks(url: str, passages: list[str], question: str) -> dict[str, int]:
    """`extra_body` of one call; `additional_kwargs` of the model take it for all. Parts arrive as one text."""
    llm = OpenAILike(model="default", api_base=f"{url}/v1", api_key="none", is_chat_model=True, max_tokens=8)
    chunks = [{"text": passage} for passage in passages]
    reply = llm.chat([ChatMessage(role="user", content=question)], extra_body={"chunk_cache": {"chunks": chunks}})
    told = reply.raw.sglext["chunk_cache"]
    assert told["reused_tokens"] == reply.raw.usage.prompt_tokens_details.chunk_reused_tokens
    return {"reused": told["reused_tokens"], "recomputed": told["recomputed_tokens"]}


if __name__ == "__main__":
    for order in (["Paris is in France.", "Rome is in Italy."], ["Rome is in Italy.", "Paris is in France."]):
        print(with_chunks(sys.argv[1], order, "Where is Rome?"))
