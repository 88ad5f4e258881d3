"""A RAG service: retrieves passages, asks an SGLang server with them as chunks, says what was reused.

    python -m sglang.launch_server --model-path DIR --chunk-cache --port 30000
    uvicorn --app-dir docs/examples rag_server:app --port 8000
    curl -G localhost:8000/ask --data-urlencode 'question=Who rings the bell in fog?'

SGLANG_URL names another server.
"""

import os
from typing import Any

import httpx
from fastapi import FastAPI
from shared import search

app = FastAPI()
sglang = httpx.AsyncClient(base_url=os.environ.get("SGLANG_URL", "http://localhost:30000"), timeout=300)


@app.get("/ask")
async def ask(question: str) -> dict[str, Any]:
    passages = search(question)
    body = {
        "model": "default",
        "messages": [
            {"role": "system", "content": "Answer from the passages, in one sentence."},
            {"role": "user", "content": question},
        ],
        "max_tokens": 48,
        "temperature": 0,
        "chunk_cache": {"chunks": [{"id": name, "text": text} for name, text in passages.items()]},
    }
    response = await sglang.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    reply = response.json()
    told = reply["sglext"]["chunk_cache"]
    return {
        "answer": reply["choices"][0]["message"]["content"],
        "passages": {chunk["id"]: chunk["status"] for chunk in told["chunks"]},
        "reused": told["reused_tokens"],
        "recomputed": told["recomputed_tokens"],
        "prompt": reply["usage"]["prompt_tokens"],
    }
