"""chunk(...) in a frontend program, run by SGLang's interpreter."""

from __future__ import annotations

import pytest
import sglang as sgl
from sglang.lang.backend.base_backend import BaseBackend
from sglang.lang.chat_template import get_chat_template

from chunk_cache.prompt.marks import split_marked
from sglang_chunk_cache.frontend import chunk

SEP = "<|chunk|>"


class PromptBackend(BaseBackend):
    """A backend that answers with a fixed text and keeps the prompts it was given, as the runtime would send them."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts: list[str] = []

    def get_chat_template(self):
        return get_chat_template("default")

    def generate(self, s, sampling_params):
        assert type(s.text_) is str
        self.prompts.append(s.text_)
        return "An answer.", {}


@sgl.function
def answer(s, passages, question):
    s += "Read.\n"
    for passage in passages:
        s += chunk(passage)
    s += question
    s += sgl.gen("answer", max_tokens=4)


def test_neighbouring_chunks_share_a_separator():
    backend = PromptBackend()
    state = answer.run(passages=["One.\n", "Two.\n", "Three.\n"], question="Who?", backend=backend)
    assert state["answer"] == "An answer."
    marked = split_marked(backend.prompts[0], SEP, "text")
    assert marked is not None
    assert marked.chunks == ("One.\n", "Two.\n", "Three.\n")
    assert marked.text == "Read.\nOne.\nTwo.\nThree.\nWho?"


def test_chunks_in_one_expression_and_in_a_role():
    backend = PromptBackend()

    @sgl.function
    def program(s):
        s += sgl.user("Read " + chunk("One. ") + chunk("Two. ") + "Who?")
        s += sgl.assistant(sgl.gen("answer"))

    program.run(backend=backend).sync()
    marked = split_marked(backend.prompts[0], SEP, "text")
    assert marked is not None
    assert marked.chunks == ("One. ", "Two. ")
    assert "Read One. Two. Who?" in marked.text


def test_white_space_between_chunks_is_an_error():
    backend = PromptBackend()

    @sgl.function
    def program(s):
        s += chunk("One.") + "\n" + chunk("Two.")
        s += sgl.gen("answer")

    state = program.run(backend=backend)
    state.sync()
    assert isinstance(state.error(), ValueError)
    assert "only white space" in str(state.error())


@pytest.mark.parametrize("text", ["", "  \n", f"a{SEP}b"])
def test_bad_text_is_refused(text):
    with pytest.raises(ValueError, match="chunk"):
        chunk(text)


def test_other_separator():
    backend = PromptBackend()

    @sgl.function
    def program(s):
        s += "x" + chunk("One", separator="##") + chunk("Two", separator="##")
        s += sgl.gen("answer")

    program.run(backend=backend).sync()
    assert backend.prompts == ["x##One##Two##"]
