"""The four programs with langchain-openai.

python docs/examples/with_langchain.py http://127.0.0.1:30000
"""

import sys

import httpx
from langchain_core.messages import BaseMessage, HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from shared import DOCUMENT, PASSAGES, QUESTIONS, read, search, tell

from chunk_cache_tools.passages import PassageWriter

writer = PassageWriter(sys.argv[1])
llm = ChatOpenAI(
    base_url=f"{sys.argv[1]}/v1",
    api_key="none",
    model="default",
    max_tokens=64,
    temperature=0,
    http_client=httpx.Client(event_hooks={"response": [tell]}, timeout=300),
)


def ask(question: str, passages: dict[str, str], task: str = "Answer from the passages.") -> str:
    messages = [{"role": "system", "content": task}, {"role": "user", "content": question}]
    chunks = [{"id": name, "text": text} for name, text in passages.items()]
    body = writer.put({"messages": messages}, chunks)
    return llm.invoke(body.pop("messages"), extra_body=body).text


def rag(question: str) -> str:
    return ask(question, search(question))


def multi_hop(question: str) -> str:
    return ask(question, search(f"{question} {rag(question)}"))


def map_documents(question: str) -> str:
    notes = [ask("Answer in a few words.", {name: PASSAGES[name]}, question) for name in PASSAGES]
    return llm.invoke(f"{question} Answer from these notes: {'; '.join(notes)}").text


def agent(question: str) -> str:
    reader = tool("read", description="Returns a document.", args_schema=DOCUMENT)(read)
    caller = llm.bind_tools([reader], tool_choice="required", parallel_tool_calls=False, strict=True)
    messages: list[BaseMessage] = [HumanMessage(question)]
    for _ in range(2):
        message = caller.invoke(messages)
        messages += [message, *(reader.invoke(call) for call in message.tool_calls)]
    return llm.invoke([*messages, HumanMessage(f"Now answer in plain words: {question}")]).text


if __name__ == "__main__":
    for program in (rag, multi_hop, map_documents, agent):
        print(program.__name__)
        for question in QUESTIONS:
            print(program(question))
