"""Map and reduce: one fork reads each document, then one answer is made of their notes; an SGLang frontend program.

    python docs/examples/map_documents.py http://localhost:30000

The question stands in front of the document: another question shares no prefix with it, and every document is reused.
"""

import sys
from typing import Any

import sglang as sgl
from shared import PASSAGES

from sglang_chunk_cache.frontend import chunk

QUESTIONS = ("Which names of people occur?", "Which years occur, and what happened in them?")


@sgl.function
def read_all(s: Any, question: str, documents: dict[str, str]) -> list[dict[str, Any]]:
    """What was reused in each fork."""
    s += f"{question}\n"
    readers = s.fork(len(documents))
    for reader, text in zip(readers.states, documents.values(), strict=True):
        reader += chunk(f"{text}\n\n") + "The document answers, in a few words: "
        reader += sgl.gen("note", max_tokens=24, temperature=0, stop="\n")
    for name, reader in zip(documents, readers.states, strict=True):
        s += f"The document {name} answers: {reader['note']}\n"
    s += "So the whole answer, in one sentence, is: " + sgl.gen("answer", max_tokens=48, temperature=0, stop="\n")
    return [reader.get_meta_info("note")["chunk_cache"] for reader in readers.states]


def main(url: str) -> None:
    backend = sgl.RuntimeEndpoint(url)
    for question in QUESTIONS:
        state = read_all.run(question, PASSAGES, backend=backend)
        reused = sum(found["reused_tokens"] for found in state.ret_value)
        recomputed = sum(found["recomputed_tokens"] for found in state.ret_value)
        print(f"{question}\n{state['answer']}\n   reused={reused}, recomputed={recomputed}")


if __name__ == "__main__":
    main(sys.argv[1])
