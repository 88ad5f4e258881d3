"""Multi-hop: ask, retrieve again with what was answered, ask again; an SGLang frontend program.

python docs/examples/multi_hop.py http://127.0.0.1:30000
"""

import sys
from typing import Any

import sglang as sgl
from shared import QUESTIONS, search

from sglang_chunk_cache.frontend import chunk


@sgl.function
def answer(s: Any, question: str, passages: dict[str, str]) -> None:
    s += sgl.system("Answer from the passages, in one sentence.")
    with s.user():
        for text in passages.values():
            s += chunk(f"{text}\n\n")
        s += question
    s += sgl.assistant(sgl.gen("answer", max_tokens=48, temperature=0, stop="\n"))


def main(url: str) -> None:
    backend = sgl.RuntimeEndpoint(url)
    for question in QUESTIONS:
        print(question)
        wanted = question
        for hop in (1, 2):
            passages = search(wanted)
            state = answer.run(question, passages, backend=backend)
            found = state.get_meta_info("answer")["chunk_cache"]
            print(f"{hop}. from {', '.join(passages)}: {state['answer']}")
            print(f"   reused={found['reused_tokens']}, recomputed={found['recomputed_tokens']}")
            wanted = f"{question} {state['answer']}"


if __name__ == "__main__":
    main(sys.argv[1])
