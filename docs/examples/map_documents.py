"""Map and reduce: one fork reads each document, then one answer is made of their notes; an SGLang frontend program.

    python docs/examples/map_documents.py http://127.0.0.1:30000

The question stands in front of the document: another question shares no prefix with it, and every document is reused.
"""

import sys
from typing import Any

import sglang as sgl
from shared import PASSAGES

from sglang_chunk_cache.frontend import chunk

QUESTIONS = ("Which people are named?", "Which years are named?")


@sgl.function
def read_all(s: Any, question: str, documents: dict[str, str]) -> list[dict[str, Any]]:
    """What was reused in each fork."""
    s += sgl.system(f"{question} Answer in a few words.")
    readers = s.fork(len(documents))
    for reader, text in zip(readers.states, documents.values(), strict=True):
        reader += sgl.user(chunk(f"{text}\n\n") + question)
        reader += sgl.assistant(sgl.gen("note", max_tokens=24, temperature=0, stop="\n"))
    notes = "".join(f"{reader['note']}\n" for reader in readers.states)
    s += sgl.user(f"{notes}{question} Make one list of these notes.")
    s += sgl.assistant(sgl.gen("answer", max_tokens=64, temperature=0))
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
