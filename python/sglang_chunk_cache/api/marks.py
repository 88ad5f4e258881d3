"""MarkedText: a text that was cut at the separators.

Verbs: `split_marked`, `split_rendered` (what a chat template made of marked texts). Promise: the pieces, put together,
are the text without its separators; nothing is stripped, so a chunk between two separators is the same text wherever
it stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from chunk_cache.errors import request_error
from chunk_cache.request_options import MAX_CHUNKS


@dataclass(frozen=True)
class MarkedText:
    """Pieces of one text, in order: before the first chunk, the chunks, after the last chunk.

    Attributes:
        pieces: the texts between the separators; the first and the last may be empty.
        is_chunk: for each piece, whether it is a chunk.
    """

    pieces: tuple[str, ...]
    is_chunk: tuple[bool, ...]

    @property
    def text(self) -> str:
        """The text that the model is given."""
        return "".join(self.pieces)

    @property
    def chunks(self) -> tuple[str, ...]:
        """The chunks alone."""
        return tuple(piece for piece, chunk in zip(self.pieces, self.is_chunk, strict=True) if chunk)


def split_marked(text: str, separator: str, path: str) -> MarkedText | None:
    """Splits `text` at the separators; None where it has none.

    N + 1 separators mark N chunks: all pieces but the first and the last.

    Args:
        text: one text field of a request.
        separator: the separator of the server, not empty.
        path: the JSON path of the field, for messages.

    Raises:
        ChunkCacheRequestError: one separator alone, a chunk without visible text, or too many chunks.
    """
    if separator not in text:
        return None
    pieces = tuple(text.split(separator))
    if len(pieces) == 2:
        raise request_error(
            path, f"only one separator {separator!r}", "put one before and one after each chunk, or remove it"
        )
    if len(pieces) - 2 > MAX_CHUNKS:
        problem = f"{len(pieces) - 2} chunks between separators {separator!r}, and {MAX_CHUNKS} is the limit"
        raise request_error(path, problem, "mark longer chunks")
    for index, piece in enumerate(pieces[1:-1]):
        if not piece.strip():
            problem = f"chunk {index} between two separators {separator!r} is empty"
            raise request_error(path, problem, "give it text, or remove one")
    return MarkedText(pieces, (False, *(True for _ in pieces[1:-1]), False))


def split_rendered(rendered: str, texts: Sequence[MarkedText], separator: str) -> MarkedText | None:
    """Splits what a template rendered of marked texts; None where it changed the chunks.

    A piece is a chunk where the text that it comes from says so: each text marks its own.
    """
    pieces = tuple(rendered.split(separator))
    is_chunk = [False]
    for text in texts:
        is_chunk.extend((*(True for _ in text.chunks), False))
    expected = [chunk for text in texts for chunk in text.chunks]
    found = [piece for piece, chunk in zip(pieces, is_chunk, strict=False) if chunk]
    same = len(pieces) == len(is_chunk) and found == expected
    return MarkedText(pieces, tuple(is_chunk)) if same else None
