"""MarkedText: a text cut into its chunks and the texts between them; Marks: the chunks of one request.

Verbs: `split_marked` (at the separators of the server), `Marks.tag` and `Marks.split`. A mark of any kind becomes a
pair of *tags* around the chunk, which stay in the text while the request is joined and rendered, and are found again in
the result.

Promises: the pieces, put together, are the text without its marks. White space at either end of a chunk stays outside
of its tags, because templates strip it. Nothing that a client sends can be taken for a tag: tags have a random part,
drawn by this process.
"""

from __future__ import annotations

import re
import secrets
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from chunk_cache.errors import request_error
from chunk_cache.options.request_options import MAX_CHUNKS

_NONCE = secrets.token_hex(8)
_TAG = re.compile(rf"<\|(/?)chunk-{_NONCE}-(\d+)\|>")


@dataclass(frozen=True)
class Mark:
    """One chunk of a request.

    Attributes:
        path: where the client marked it, for messages.
        text: of a mark of ours, the text that must stand in the prompt; None = whatever stock SGLang makes of it.
        id: what the client calls it; None = nothing.
    """

    path: str
    text: str | None = None
    id: str | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether the mark is of another service, and so must not change anything in the prompt."""
        return self.text is None


@dataclass(frozen=True)
class MarkedText:
    """Pieces of one text, in order.

    Attributes:
        pieces: the texts that it is made of; those that are no chunks may be empty.
        marks: for each piece, its mark; None = it is no chunk.
    """

    pieces: tuple[str, ...]
    marks: tuple[Mark | None, ...]

    @property
    def text(self) -> str:
        """The text that the model is given."""
        return "".join(self.pieces)

    @property
    def chunks(self) -> tuple[str, ...]:
        """The chunks alone."""
        return tuple(piece for piece, mark in zip(self.pieces, self.marks, strict=True) if mark is not None)


def split_marked(text: str, separator: str, path: str) -> MarkedText | None:
    """Splits `text` at the separators; None where it has none.

    N + 1 separators mark N chunks: all pieces but the first and the last.

    Args:
        text: one text field of a request.
        separator: the separator of the server.
        path: the JSON path of the field, for messages.

    Raises:
        ChunkCacheRequestError: one separator alone, a chunk without visible text, too many chunks, or a separator
            without visible text, which no server has.
    """
    if not separator.strip():
        raise request_error("separator", "has no visible character", "give the server's --chunk-cache-separator")
    pieces = _pieces(text, separator) if separator in text else ()
    if len(pieces) < 2:
        return None
    if len(pieces) == 2:
        raise request_error(
            path, f"only one separator {separator!r}", "put one before and one after each chunk, or remove it"
        )
    if len(pieces) - 2 > MAX_CHUNKS:
        problem = f"{len(pieces) - 2} chunks between separators {separator!r}, and {MAX_CHUNKS} is the limit"
        raise request_error(path, problem, "mark longer chunks")
    for index, piece in enumerate(pieces[1:-1]):
        if is_blank(piece):
            problem = f"chunk {index} between two separators {separator!r} is empty"
            raise request_error(path, problem, "give it text, or remove one")
    marks = (Mark(f"{path}: chunk {index}", piece.strip()) for index, piece in enumerate(pieces[1:-1]))
    return MarkedText(pieces, (None, *marks, None))


def _pieces(text: str, separator: str) -> tuple[str, ...]:
    """`text.split(separator)`, but separators within tags do not count."""
    pieces, at = [""], 0
    for start, end in (*(tag.span() for tag in _TAG.finditer(text)), (len(text), len(text))):
        first, *others = text[at:start].split(separator)
        pieces[-1] += first
        pieces += others
        pieces[-1] += text[start:end]
        at = end
    return tuple(pieces)


@dataclass
class Marks:
    """The chunks of one request, numbered, while its texts are rendered.

    Attributes:
        unused: the marks of other services that are not used, by path, each with the reason.
    """

    unused: dict[str, str] = field(default_factory=dict)
    _marks: list[Mark] = field(default_factory=list)

    @property
    def own(self) -> list[Mark]:
        """The marks that must be found again."""
        return [mark for mark in self._marks if not mark.is_foreign]

    @property
    def foreign(self) -> list[Mark]:
        """The marks that may be left out."""
        return [mark for mark in self._marks if mark.is_foreign]

    @property
    def is_full(self) -> bool:
        """Whether the prompt has as many chunks as it may."""
        return len(self._marks) >= MAX_CHUNKS

    def copied(self) -> Marks:
        """The same chunks; what is added to the copy is not in the original."""
        return Marks(dict(self.unused), list(self._marks))

    def tags(self, mark: Mark) -> tuple[str, str]:
        """Adds a chunk, and returns the tags to put before and behind it."""
        self._marks.append(mark)
        number = len(self._marks) - 1
        return f"<|chunk-{_NONCE}-{number}|>", f"<|/chunk-{_NONCE}-{number}|>"

    def tag(self, text: str, mark: Mark) -> str:
        """`text` with tags around it; white space at either end stays outside."""
        lead, core, trail = trimmed(text)
        opening, closing = self.tags(mark)
        return f"{lead}{opening}{core}{closing}{trail}"

    def tag_pieces(self, marked: MarkedText) -> str:
        """A text with tags in the place of its separators."""
        pairs = zip(marked.pieces, marked.marks, strict=True)
        return "".join(piece if mark is None else self.tag(piece, mark) for piece, mark in pairs)

    def drop_foreign(self, reason: str, *, but: Iterable[Mark] = ()) -> None:
        """Notes that marks of other services are not used, except `but`; a reason that is noted already stays."""
        used = {id(mark) for mark in but}
        self.unused = {mark.path: reason for mark in self.foreign if id(mark) not in used} | self.unused

    def without(self, value: Any, *, foreign_only: bool = False) -> Any:
        """A copy of a JSON value, its texts without tags."""
        return map_texts(value, lambda text: self._without(text, foreign_only=foreign_only))

    def _without(self, text: str, *, foreign_only: bool) -> str:
        if _NONCE not in text:
            return text
        return _TAG.sub(lambda tag: tag[0] if foreign_only and not self._of(tag).is_foreign else "", text)

    def split(self, text: str) -> MarkedText | None:
        """Splits a text at its tags; None if tags, or the text between tags of ours, have changed since."""
        pieces, marks, number, end = [], [], None, 0
        for tag in _TAG.finditer(text):
            closes = bool(tag[1])
            if number != (tag[2] if closes else None):
                return None  # a tag is missing, or stands inside of another chunk
            pieces.append(text[end : tag.start()])
            marks.append(self._of(tag) if closes else None)
            number, end = None if closes else tag[2], tag.end()
        if number is not None:
            return None
        marked = MarkedText((*pieces, text[end:]), (*marks, None))
        ours = [(mark, piece) for mark, piece in zip(marked.marks, marked.pieces, strict=True)
                if mark is not None and not mark.is_foreign]  # fmt: skip
        kept = len(ours) == len(self.own) and all(mark.text == piece for mark, piece in ours)
        return marked if kept and len({id(mark) for mark, _ in ours}) == len(ours) else None

    def split_at(self, separator: str, text: str, path: str) -> MarkedText | None:
        """Splits a text, which nothing has changed since it was tagged, at separators and tags; None without any.

        Args:
            separator, text, path: as of `split_marked`.

        Raises:
            ChunkCacheRequestError: as `split_marked`.
        """
        marked = split_marked(text, separator, path)
        if not self.own:
            return marked
        found = self.split(text if marked is None else self.tag_pieces(marked))
        assert found is not None, "nothing has changed the text since"
        return found

    def _of(self, tag: re.Match[str]) -> Mark:
        return self._marks[int(tag[2])]


def trimmed(text: str) -> tuple[str, str, str]:
    """The white space before a text, the text, and the white space behind it."""
    core = text.strip()
    start = text.find(core)
    return text[:start], core, text[start + len(core) :]


def is_blank(text: str) -> bool:
    """Whether a text has nothing to see: white space, and signs such as the zero-width space (category Cf), or none."""
    # `isspace` alone tells less, but of long white space in a hundredth of the time.
    return text.isspace() or all(sign.isspace() or unicodedata.category(sign) == "Cf" for sign in text)


def word_end(core: str) -> int:
    """Where the last letter or digit of a text ends, behind which are signs only; its length where it has none."""
    return next((i for i in range(len(core), 0, -1) if core[i - 1].isalnum()), len(core))


def map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of a JSON value, nested as deep as it may be, with every string changed, in their order."""
    root = [value]
    waiting: list[tuple[Any, Any]] = [(root, 0)]  # a container that is a copy, and where the value to copy is in it
    while waiting:
        holder, place = waiting.pop()
        one = holder[place]
        if isinstance(one, str):
            holder[place] = change(one)
        elif isinstance(one, dict):
            holder[place] = dict(one)
            waiting += [(holder[place], key) for key in reversed(one)]
        elif isinstance(one, (list, tuple)):
            holder[place] = list(one)
            waiting += [(holder[place], i) for i in reversed(range(len(one)))]
    return root[0]


def texts_of(messages: list[Any]) -> Iterator[tuple[str, Any, str]]:
    """All texts of chat messages, as SGLang has parsed them.

    Yields:
        the JSON path, the object that has the text, and the name of its attribute.
    """
    for index, message in enumerate(messages):
        content = getattr(message, "content", None)
        if isinstance(content, str):
            yield f"messages[{index}].content", message, "content"
        elif isinstance(content, (list, tuple)):
            for part_index, part in enumerate(content):
                if isinstance(getattr(part, "text", None), str):
                    yield f"messages[{index}].content[{part_index}].text", part, "text"
