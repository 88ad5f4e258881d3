"""The four programs with haystack.

python docs/examples/with_haystack.py http://127.0.0.1:30000
"""

import os
import sys
from typing import Any

os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")  # nothing is told to the internet

from haystack import Document
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.components.retrievers.in_memory import InMemoryBM25Retriever
from haystack.dataclasses import ChatMessage
from haystack.document_stores.in_memory import InMemoryDocumentStore
from haystack.tools import Tool
from haystack.utils import Secret
from shared import DOCUMENT, PASSAGES, QUESTIONS, read, tell

from chunk_cache_tools.passages import PassageWriter

writer = PassageWriter(sys.argv[1])
generator = OpenAIChatGenerator(
    api_key=Secret.from_token("none"),
    model="default",
    api_base_url=f"{sys.argv[1]}/v1",
    tools_strict=True,
    generation_kwargs={"max_tokens": 64, "temperature": 0},
    http_client_kwargs={"event_hooks": {"response": [tell]}, "timeout": 300},
)
DOCUMENTS = [Document(content=text) for text in PASSAGES.values()]
store = InMemoryDocumentStore()
store.write_documents(DOCUMENTS)
retriever = InMemoryBM25Retriever(store, top_k=3)


def complete(messages: list[ChatMessage], tools: list[Tool] | None = None, **asked: Any) -> ChatMessage:
    return generator.run(messages, generation_kwargs=asked, tools=tools)["replies"][0]


def ask(question: str, documents: list[Document], task: str = "Answer from the passages.") -> str:
    messages = [{"role": "system", "content": task}, {"role": "user", "content": question}]
    chunks = [{"id": document.id, "text": document.content} for document in documents]
    body = writer.put({"messages": messages}, chunks)
    return complete(list(map(ChatMessage.from_openai_dict_format, body.pop("messages"))), extra_body=body).text


def rag(question: str) -> str:
    return ask(question, retriever.run(question)["documents"])


def multi_hop(question: str) -> str:
    return ask(question, retriever.run(f"{question} {rag(question)}")["documents"])


def map_documents(question: str) -> str:
    notes = [ask("Answer in a few words.", [document], question) for document in DOCUMENTS]
    return complete([ChatMessage.from_user(f"{question} Answer from these notes: {'; '.join(notes)}")]).text


def agent(question: str) -> str:
    reader = Tool(name="read", description="Returns a document.", parameters=DOCUMENT, function=read)
    messages = [ChatMessage.from_user(question)]
    for _ in range(2):
        message = complete(messages, [reader], tool_choice="required", parallel_tool_calls=False)
        results = [ChatMessage.from_tool(reader.invoke(**call.arguments), call) for call in message.tool_calls]
        messages += [message, *results]
    return complete([*messages, ChatMessage.from_user(f"Now answer in plain words: {question}")]).text


if __name__ == "__main__":
    for program in (rag, multi_hop, map_documents, agent):
        print(program.__name__)
        for question in QUESTIONS:
            print(program(question))
