"""An agent with a tool: the model reads two documents of its choice, then answers; what it reads are chunks.

    python -m sglang.launch_server --model-path DIR --chunk-cache --tool-call-parser NAME
    python docs/examples/agent.py http://127.0.0.1:30000

A model that is good with tools decides itself when it has read enough: `"tool_choice": "auto"`.
"""

import json
import sys
from typing import Any

import httpx
from shared import QUESTIONS, READ, read, tell


def complete(server: httpx.Client, messages: list[Any], **asked: Any) -> dict[str, Any]:
    body = {"model": "default", "messages": messages, "max_tokens": 64, "temperature": 0, **asked}
    response = server.post("/v1/chat/completions", json=body).raise_for_status()
    return response.json()["choices"][0]["message"]


def answer(server: httpx.Client, question: str) -> str:
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    for _ in range(2):
        message = complete(server, messages, tools=[READ], tool_choice="required", parallel_tool_calls=False)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            document = json.loads(call["function"]["arguments"])["document"]
            print(f"reads {document}")
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": read(document)})
    messages.append({"role": "user", "content": f"Now answer in plain words: {question}"})
    return complete(server, messages)["content"]


def main(url: str) -> None:
    with httpx.Client(base_url=url, timeout=300, event_hooks={"response": [tell]}) as server:
        for question in QUESTIONS:
            print(question)
            print(answer(server, question))


if __name__ == "__main__":
    main(sys.argv[1])
