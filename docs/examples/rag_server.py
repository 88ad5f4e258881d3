"""A RAG service: retrieves passages, asks an SGLang server with them as chunks, says what was reused.

    python -m sglang.launch_server --model-path DIR --chunk-cache --port 30000
    uvicorn --app-dir docs/examples rag_server:app --port 8000
    curl -G 127.0.0.1:8000/ask --data-urlencode 'question=Who rings the bell in fog?'

SGLANG_URL names another server.
"""

import os
from typing import Any

import httpx
from fastapi import FastAPI
from shared import search

from chunk_cache_tools.passages import PassageWriter

app = FastAPI()
URL = os.environ.get("SGLANG_URL", "http://127.0.0.1:30000")
sglang = httpx.AsyncClient(base_url=URL, timeout=300)
writer = PassageWriter(URL)


@app.get("/ask")
async def ask(question: str) -> dict[str, Any]:
    passages = search(question)
    chunks = [{"id": name, "text": text} for name, text in passages.items()]
    asked = {
        "model": "default",
        "messages": [
            {"role": "system", "content": "Answer from the passages, in one sentence."},
            {"role": "user", "content": question},
        ],
        "max_tokens": 48,
        "temperature": 0,
    }
    body = writer.put(asked, chunks)
    response = await sglang.post("/v1/chat/completions", json=body)
    response.raise_for_status()
    if not writer.arrived(body, response.headers):  # a server that has lost its chunk cache meanwhile
        response = await sglang.post("/v1/chat/completions", json=writer.put(asked, chunks))
    reply = response.json()
    told = (reply.get("sglext") or {}).get("chunk_cache") or {}
    return {
        "answer": reply["choices"][0]["message"]["content"],
        "passages": {chunk["id"]: chunk["status"] for chunk in told.get("chunks", ())},
        "reused": told.get("reused_tokens", 0),
        "recomputed": told.get("recomputed_tokens", 0),
        "prompt": reply["usage"]["prompt_tokens"],
    }
