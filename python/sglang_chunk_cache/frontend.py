"""chunk: marks a passage in an SGLang frontend program.

    @sgl.function
    def answer(s, passages, question):
        s += "Answer from the passages.\\n"
        for passage in passages:
            s += chunk(passage + "\\n")
        s += question
        s += sgl.gen("answer", max_tokens=32)

Promise: the program's text holds the separators of the server, N + 1 for N chunks that follow each other; the server
removes them. Text between two chunks becomes a chunk as well, so put the line break after a passage into its chunk.
"""

from __future__ import annotations

from sglang.lang.ir import SglConstantText

from chunk_cache.options.defaults import DEFAULT_SEPARATOR
from chunk_cache.prompt.marks import is_blank


class _MarkedText(str):
    """Text between two separators, which shares the first one with a chunk that ends right before it.

    A frontend program keeps its text as a string and appends with `+=`; only this class sees what comes before.
    """

    separator: str

    def __str__(self) -> str:
        return self

    def __radd__(self, before: str) -> str:
        head, separator, gap = before.rpartition(self.separator)
        if separator and not gap:
            return head + str.__str__(self)
        if separator and is_blank(gap):
            raise ValueError(
                f"chunk(): only white space {gap!r} stands between two separators; put it into one of the chunks"
            )
        return before + str.__str__(self)


def chunk(text: str, *, separator: str = DEFAULT_SEPARATOR) -> SglConstantText:
    """An expression that appends `text` to a program's state as one chunk.

    Args:
        text: the passage.
        separator: the value of `--chunk-cache-separator` of the server.

    Raises:
        ValueError: the passage has no visible text, or contains the separator.

    Example:
        >>> s += chunk("Paris is the capital of France.\\n") + "Which city is the capital?"
    """
    if is_blank(text):
        raise ValueError("chunk(): the text is empty; leave the chunk out")
    if separator in text:
        raise ValueError(f"chunk(): the text contains the separator {separator!r}; remove it from the text")
    marked = _MarkedText(f"{separator}{text}{separator}")
    marked.separator = separator
    return SglConstantText(marked)
