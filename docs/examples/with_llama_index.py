"""The four programs with llama-index and OpenAILike.

    python docs/examples/with_llama_index.py http://127.0.0.1:30000

A query engine writes the texts of its nodes with an empty line between them. So a separator in front of each, and one
behind the last, make chunks of them, whatever retrieves them.
"""

import sys
from typing import Any, Literal

import httpx
from llama_index.core import PromptTemplate, QueryBundle
from llama_index.core.llms import ChatMessage
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.retrievers import BaseRetriever
from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel
from shared import PASSAGES, QUESTIONS, read, search, tell

from chunk_cache_tools.passages import PassageWriter

writer = PassageWriter(sys.argv[1])
llm = OpenAILike(
    model="default",
    api_base=f"{sys.argv[1]}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    strict=True,
    max_tokens=64,
    temperature=0,
    http_client=httpx.Client(event_hooks={"response": [tell]}, timeout=300),
)
template = PromptTemplate("Answer from the passages.\n{context_str}\n\n<|chunk|>{query_str}")


class Retriever(BaseRetriever):
    def _retrieve(self, query: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(text=f"<|chunk|>{text}")) for text in search(query.query_str).values()]


class Document(BaseModel):
    document: Literal[*PASSAGES]


def chat(messages: list[ChatMessage], **asked: Any) -> str:
    return llm.chat(messages, **asked).message.content


def rag(question: str) -> str:
    return str(RetrieverQueryEngine.from_args(Retriever(), llm, text_qa_template=template).query(question))


def multi_hop(question: str) -> str:
    return rag(f"{question} {rag(question)}")


def map_documents(question: str) -> str:
    messages = [{"role": "system", "content": question}, {"role": "user", "content": "Answer in a few words."}]
    bodies = [writer.put({"messages": messages}, [text]) for text in PASSAGES.values()]
    notes = [chat([ChatMessage(**one) for one in body.pop("messages")], extra_body=body) for body in bodies]
    return chat([ChatMessage(f"{question} Answer from these notes: {'; '.join(notes)}")])


def agent(question: str) -> str:
    reader = FunctionTool.from_defaults(read, description="Returns a document.", fn_schema=Document)
    messages = [ChatMessage(question)]
    for _ in range(2):
        reply = llm.chat_with_tools([reader], chat_history=messages, tool_required=True)
        messages.append(reply.message)
        for call in llm.get_tool_calls_from_response(reply, error_on_no_tool_call=False):
            result = reader(**call.tool_kwargs).content
            messages.append(ChatMessage(result, role="tool", additional_kwargs={"tool_call_id": call.tool_id}))
    return chat([*messages, ChatMessage(f"Now answer in plain words: {question}")])


if __name__ == "__main__":
    for program in (rag, multi_hop, map_documents, agent):
        print(program.__name__)
        for question in QUESTIONS:
            print(program(question))
