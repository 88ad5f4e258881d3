"""The four programs with the openai package.

python docs/examples/with_openai.py http://127.0.0.1:30000
"""

import json
import sys
from typing import Any

import httpx
from openai import OpenAI
from shared import PASSAGES, QUESTIONS, READ, read, search, tell

from chunk_cache_tools.passages import PassageWriter

writer = PassageWriter(sys.argv[1])
client = OpenAI(
    base_url=f"{sys.argv[1]}/v1",
    api_key="none",
    http_client=httpx.Client(event_hooks={"response": [tell]}, timeout=300),
)


def complete(messages: list[Any], **asked: Any) -> Any:
    reply = client.chat.completions.create(model="default", messages=messages, max_tokens=64, temperature=0, **asked)
    return reply.choices[0].message


def ask(question: str, passages: dict[str, str], task: str = "Answer from the passages.") -> str:
    messages = [{"role": "system", "content": task}, {"role": "user", "content": question}]
    chunks = [{"id": name, "text": text} for name, text in passages.items()]
    body = writer.put({"messages": messages}, chunks)
    return complete(body.pop("messages"), extra_body=body).content


def rag(question: str) -> str:
    return ask(question, search(question))


def multi_hop(question: str) -> str:
    return ask(question, search(f"{question} {rag(question)}"))


def map_documents(question: str) -> str:
    notes = [ask("Answer in a few words.", {name: PASSAGES[name]}, question) for name in PASSAGES]
    return complete([{"role": "user", "content": f"{question} Answer from these notes: {'; '.join(notes)}"}]).content


def agent(question: str) -> str:
    messages: list[Any] = [{"role": "user", "content": question}]
    for _ in range(2):
        message = complete(messages, tools=[READ], tool_choice="required", parallel_tool_calls=False)
        messages.append(message)
        for call in message.tool_calls or ():
            result = read(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    messages.append({"role": "user", "content": f"Now answer in plain words: {question}"})
    return complete(messages).content


if __name__ == "__main__":
    for program in (rag, multi_hop, map_documents, agent):
        print(program.__name__)
        for question in QUESTIONS:
            print(program(question))
