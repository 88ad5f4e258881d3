"""Frontend programs with chunks, run over a server and over an engine in the same way: `run_all`.

As a process of its own it is asked by `test_frontend_server.py` with a model's folder and the texts, over an engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sglang as sgl

from server.own_process import answer as answer_task
from sglang_chunk_cache.engine_backend import EngineBackend
from sglang_chunk_cache.frontend import chunk
from sglang_chunk_cache.plugin import engine

HEAD = "Answer from the passages, one of which is always the right one to answer from.\n"
CHOICES = ("the rose", "a stone")


@sgl.function
def answer(s: Any, texts: Sequence[str], question: str) -> None:
    s += HEAD
    for text in texts:
        s += chunk(text)
    s += question
    s += sgl.gen("answer", max_tokens=6)


@sgl.function
def fork(s: Any, shared: str, texts: Sequence[str]) -> list[Any]:
    """One passage for all forks, and one for each."""
    s += HEAD + chunk(shared)
    forks = s.fork(len(texts))
    for one, text in zip(forks.states, texts, strict=True):
        one += chunk(text) + "Who?"
        one += sgl.gen("answer", max_tokens=6)
    forks.join()
    return [one.get_meta_info("answer") for one in forks.states]


@sgl.function
def roles(s: Any, rule: str, first: Sequence[str], second: str) -> None:
    s += sgl.system("Obey.\n" + chunk(rule) + "Be brief.")
    with s.user():
        for text in first:
            s += chunk(text)
        s += "Who?"
    s += sgl.assistant(sgl.gen("first", max_tokens=6))
    s += sgl.user("And here:\n" + chunk(second) + "Why?")
    s += sgl.assistant(sgl.gen("second", max_tokens=6))


@sgl.function
def choose(s: Any, texts: Sequence[str]) -> None:
    for text in texts:
        s += chunk(text)
    s += "Who is it?"
    s += sgl.gen("choice", choices=list(CHOICES))


def run_all(backend: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Every program over four texts that nobody has sent before: answers, and `meta_info` of each request."""
    a, b, c, d = texts
    asked: dict[str, Any] = {"backend": backend, "temperature": 0}
    plain = []
    for order in ((a, b), (c, b, a)):
        plain.append(answer.run(texts=order, question="Who?", **asked))
        plain[-1].sync()  # a program runs in a thread of its own
    batch = answer.run_batch([{"texts": [x, y], "question": "When?"} for x, y in ((b, d), (a, c))], **asked)
    forked = fork.run(shared=c, texts=[a, b, d], **asked)
    talk = roles.run(rule=d, first=[b, a], second=c, **asked)
    stream = answer.run(texts=[d, a], question="Where?", stream=True, **asked)
    # The iterator of one variable gives nothing where the program has ended before; that of the whole text waits.
    pieces = list(stream.text_iter())
    chosen = choose.run(texts=[d, b], **asked)
    chosen.sync()
    states = [*plain, *batch, forked, talk, stream, chosen]
    assert [state.error() for state in states] == [None] * len(states)
    return {
        "answers": [state["answer"] for state in plain],
        "plain": [state.get_meta_info("answer") for state in plain],
        "batch": [state.get_meta_info("answer") for state in batch],
        "fork": forked.ret_value,
        "roles": [talk.get_meta_info(name) for name in ("first", "second")],
        "talk": talk.messages(),
        "stream": stream.get_meta_info("answer"),
        "pieces": pieces,
        "streamed": stream.text(),
        "choice": chosen["choice"],
    }


def main(task: dict[str, Any]) -> dict[str, Any]:
    llm = engine(model_path=task["model"], dtype="float32", max_total_tokens=4096)
    with EngineBackend(llm) as backend:
        found = run_all(backend, task["texts"])
    found["after"] = llm.generate("The engine itself.", {"max_new_tokens": 2})["text"]
    llm.shutdown()
    return found


if __name__ == "__main__":
    answer_task(main)
