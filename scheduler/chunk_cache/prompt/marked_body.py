"""MarkedBody: what the body of a request asks of the chunk cache, read before SGLang drops what it does not know.

Verbs: `read_body` reads it, puts tags around the chunks that a client has marked for another service, and lists marks
that are not used in `Marks.unused`; `tag_passages`, `tag_documents` write passages that stand beside the messages.

These are chunks, in a message of the user, a tool or the system, except the last part of the prompt:
- a text with `prompt_cache_breakpoint` or `cache_control`, where server or request say so (`marks`);
- every text of a message with several parts, where server or request say so (`parts`);
- a block `search_result` or `document` of the Anthropic route.

Passages without visible text are left out, and listed too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chunk_cache.errors import request_error, show
from chunk_cache.prompt.chunk_cache_fields import (
    KEY,
    ROUTE_KEYS,
    ChunkCacheFields,
    check_text,
    document_id,
    read_asked,
    read_documents,
)
from chunk_cache.prompt.marks import Mark, Marks, is_blank, trimmed
from chunk_cache.prompt.passage import Passage, write_passage

_CACHE_MARKS = ("prompt_cache_breakpoint", "cache_control")
_ROLES = ("user", "tool", "function", "system", "developer")
_OFF = "off: --chunk-cache-marks"
BLANK = "no visible text"
_NO_TEXT = "not on a text of the prompt"
_HOLDERS = ("system", "messages", "content", "source", "tools", "function", "tool_calls")
"""Keys of a body under which marks are looked for; not the schemas and arguments of tools, whose keys are their own."""
_DOCUMENT_ROUTES = ("/v1/chat/completions", "/invocations", "/v1/rerank")
"""Routes that read `documents`."""
_TENANT_KEYS = ("extra_key", "cache_salt")
_TENANT_ROUTES = (
    *("/generate", "/v1/completions", "/v1/chat/completions", "/invocations", "/v1/responses"),
    *("/v1/messages", "/v1/messages/count_tokens"),
)
"""Routes that read `_TENANT_KEYS`; SGLang drops them on others, also on the last two, for which we read them."""
_MAX_DEPTH = 8
"""Objects inside each other that are searched for marks; a text of a document in the result of a tool is the sixth."""


@dataclass(frozen=True)
class MarkFlags:
    """What a server takes as marks.

    Attributes:
        separator: the string that marks chunks in texts.
        marks: whether texts that clients mark for the prefix cache of another service are chunks.
        parts: whether the text parts of a message with several parts are chunks.
    """

    separator: str
    marks: bool = False
    parts: bool = False


@dataclass
class MarkedBody:
    """See the head of this file.

    Attributes:
        asked: the `chunk_cache` object of the request.
        documents: the `documents` of a chat, by path.
        marks: the chunks that were not marked by spans; they are in tags where they stand.
        tenant: the fields of the partition, of a route on which SGLang drops them.
    """

    asked: ChunkCacheFields = field(default_factory=ChunkCacheFields)
    documents: dict[str, dict[str, Any]] = field(default_factory=dict)
    marks: Marks = field(default_factory=Marks)
    tenant: dict[str, str] = field(default_factory=dict)

    def tag_passages(self, passages: Iterable[Passage]) -> str:
        """Passages as they stand in the prompt, each in tags."""
        written = ((one, write_passage(one, self.asked.template)) for one in passages)
        return "".join(self.marks.tag(text, Mark(one.path, text.strip(), one.id or None)) for one, text in written)

    def tag_documents(self) -> list[dict[str, Any]]:
        """The documents for a chat template that has a place for them, each text in tags."""
        return [
            {**one, "text": self.marks.tag(one["text"], Mark(path, id=document_id(one) or None))}
            for path, one in self.documents.items()
        ]

    def check_one_way(self) -> None:
        """Checks that chunks are marked either by spans or in other ways.

        Raises:
            ChunkCacheRequestError: both.
        """
        marks = [*self.marks.own, *self.marks.foreign]
        if marks and self.asked.options and self.asked.options.get("spans"):
            problem = f"{marks[0].path} is marked too"
            raise request_error(f"{self.asked.path}.spans", problem, "mark chunks in one of the two ways")


def has_place_for_documents(template: object) -> bool:
    """Whether a chat template writes the documents of a request."""
    return re.search(r"\bdocuments\b", str(template)) is not None


def read_body(path: str, body: object, marked: MarkedBody, flags: MarkFlags) -> None:
    """Reads a decoded body; changes it in place.

    Args:
        path: that of the route.

    Raises:
        ChunkCacheRequestError: the request breaks the contract.
    """
    reader = _READERS.get(path)
    if reader is None:
        return
    if not isinstance(body, dict):  # which SGLang's own models cannot read either: a chat would be a 500
        raise request_error("body", f"{show(body)} is no object", "send a JSON object")
    reader(body, marked, flags)
    if body.get("documents") and path not in _DOCUMENT_ROUTES:
        _name_unused(marked, ("documents",), "this route does not read them")
    if path not in _TENANT_ROUTES:
        _name_unused(marked, _tenant_keys_in(body), "this route does not read it")


# What each route reads.


def _read_generate(body: dict[str, Any], marked: MarkedBody, _flags: MarkFlags) -> None:
    _refuse(body, (), "sampling_params.custom_params.chunk_cache")
    _refuse(body, ("custom_params",), "sampling_params.custom_params.chunk_cache")
    _name_unused(marked, _marks_in(body), _NO_TEXT)


def _read_completion(body: dict[str, Any], marked: MarkedBody, flags: MarkFlags) -> None:
    marked.asked = _asked(body, flags, ("chunks", "template"))
    _name_unused(marked, marked.asked.blank, BLANK)
    _name_unused(marked, _marks_in(body), _NO_TEXT)


def _read_chat(body: dict[str, Any], marked: MarkedBody, flags: MarkFlags) -> None:
    form = body.get("response_format")
    if form is not None and not isinstance(form, Mapping):  # a 500 of a stock server
        raise request_error("response_format", f"{show(form)} is not an object", 'give one such as {"type": "text"}')
    marked.asked = _asked(body, flags)
    marked.documents, blank = read_documents(body.get("documents"), "documents", flags.separator)
    _name_unused(marked, (*marked.asked.blank, *blank), BLANK)
    _mark(list(_marks_in(body)), list(_chat_parts(body)), marked, flags)


def _read_messages(body: dict[str, Any], marked: MarkedBody, flags: MarkFlags) -> None:
    _refuse(body, ("custom_params",), "chunk_cache")
    marked.asked = _asked(body, flags)
    for name in _tenant_keys_in(body):
        if not isinstance(body[name], str):
            raise request_error(name, f"{show(body[name])} is not a string", "give a string")
        marked.tenant[name] = body[name]
    _name_unused(marked, marked.asked.blank, BLANK)
    _mark(list(_marks_in(body)), list(_message_parts(body)), marked, flags)


def _read_unmarked(body: dict[str, Any], marked: MarkedBody, flags: MarkFlags) -> None:
    """A route that cannot mark chunks, or has no place for options; separators would reach the model as text."""
    _refuse(body, (), None)
    _refuse(body, ("custom_params",), None)
    path = _find_text(body, flags.separator)
    if path is not None:
        problem = f"this route cannot mark chunks with {flags.separator!r}"
        raise request_error(path, problem, "use /v1/chat/completions or /v1/completions, or remove the separators")
    _name_unused(marked, _marks_in(body), "this route cannot mark chunks")


def _read_vertex(body: dict[str, Any], _marked: MarkedBody, _flags: MarkFlags) -> None:
    place = "parameters.sampling_params.custom_params.chunk_cache"
    for outer in ((), ("parameters",), ("parameters", "custom_params"), ("parameters", "sampling_params")):
        _refuse(body, outer, place)
    for path, instance in _objects(body.get("instances"), "instances"):
        _refuse({path: instance}, (path,), place)


_READERS: dict[str, Callable[[dict[str, Any], MarkedBody, MarkFlags], None]] = {
    "/generate": _read_generate,
    "/v1/completions": _read_completion,
    "/v1/chat/completions": _read_chat,
    "/invocations": _read_chat,
    "/v1/messages": _read_messages,
    "/v1/messages/count_tokens": _read_messages,
    "/vertex_generate": _read_vertex,
    "/v1/responses": _read_unmarked,
    "/v1/score": _read_unmarked,
    "/v1/rerank": _read_unmarked,
    "/v1/decisions": _read_unmarked,
    "/v1/systemone": _read_unmarked,
    "/api/chat": _read_unmarked,
    "/api/generate": _read_unmarked,
}


def _tenant_keys_in(body: Mapping[str, Any]) -> list[str]:
    return [name for name in _TENANT_KEYS if body.get(name) is not None]


def _asked(body: Mapping[str, Any], flags: MarkFlags, keys: Sequence[str] = ROUTE_KEYS) -> ChunkCacheFields:
    """The object at the top of a body; `keys` as of `read_asked`."""
    _refuse(body, ("sampling_params", "custom_params"), "chunk_cache")
    return read_asked(body, flags.separator, keys)


def _refuse(body: Mapping[str, Any], outer: Sequence[str], remedy: str | None) -> None:
    """Refuses a `chunk_cache` where another route reads it, and this one would drop it."""
    holder: object = body
    for name in outer:
        holder = holder.get(name) if isinstance(holder, Mapping) else None
    if isinstance(holder, Mapping) and holder.get(KEY) is not None:
        path = ".".join((*outer, KEY))
        advice = "use /v1/chat/completions or /v1/completions" if remedy is None else f"put it into {remedy}"
        raise request_error(path, "this route does not read it there", advice)


def _find_text(body: object, needle: str) -> str | None:
    """The path of a text of a body that has the needle; None = there is none."""
    waiting: list[tuple[Any, object]] = [((), body)]  # a place is what it is in, and its name there: paths may be long
    while waiting:
        place, value = waiting.pop()
        if isinstance(value, str) and needle in value:
            names = []
            while place:
                place, name = place
                names.append(f"[{name}]" if isinstance(name, int) else f".{name}")
            return "".join(reversed(names)).removeprefix(".")
        inner: Iterable[tuple[Any, object]] = ()
        if isinstance(value, Mapping):
            inner = value.items()
        elif isinstance(value, list):
            inner = enumerate(value)
        waiting += [((place, name), one) for name, one in inner]
    return None


# The parts of a prompt.


class _Field:
    """A text in a body, and the place where it stands."""

    def __init__(self, holder: dict[str, Any], key: str) -> None:
        self._holder, self._key = holder, key

    @property
    def text(self) -> str:
        found: str = self._holder[self._key]
        return found

    @text.setter
    def text(self, text: str) -> None:
        self._holder[self._key] = text

    @property
    def has_text(self) -> bool:
        found = self._holder.get(self._key)
        return isinstance(found, str) and not is_blank(found)


@dataclass(frozen=True)
class _Part:
    """What stands at one place of the prompt.

    Attributes:
        path: of its text, for messages.
        fields: its texts that SGLang writes into the prompt, in order; empty = no text.
        mark: the path of the mark that the client has put on it; empty = none.
        is_passage: whether it is a passage by its kind, and not by a mark.
        role: of its message.
        is_several: whether its message has other parts too.
    """

    path: str
    fields: tuple[_Field, ...]
    mark: str
    role: str
    is_several: bool = False
    is_passage: bool = False


def _mark(paths: list[str], parts: list[_Part], marked: MarkedBody, flags: MarkFlags) -> None:
    """Tags the parts that are chunks, and lists the marks that are not used; `paths` are those of all marks."""
    asked = marked.asked
    takes_marks = flags.marks if asked.marks is None else asked.marks
    takes_parts = flags.parts if asked.parts is None else asked.parts
    has_spans = bool(asked.options and asked.options.get("spans"))
    for part in parts:
        is_asked = part.is_passage or (bool(part.mark) and takes_marks)
        if not is_asked and not (takes_parts and part.is_several):
            reason = _OFF
        else:
            reason = "spans are given" if has_spans else _why_not(part, part is parts[-1], marked)
        if not reason and is_asked and not any(field.has_text for field in part.fields):
            reason = BLANK
        elif not reason and is_asked:
            _check_part(part, flags.separator)
        if not reason and _is_markable(part, flags.separator):
            _tag(part, marked)
        elif part.mark:
            marked.marks.unused[part.mark] = reason
    holders = {part.mark.rpartition(".")[0] for part in parts if part.mark}
    passages = {part.path for part in parts if part.is_passage}
    others = [path for path in paths if path.rpartition(".")[0] not in holders and not _lies_in(path, passages)]
    _name_unused(marked, others, _NO_TEXT if takes_marks else _OFF)


def _lies_in(path: str, holders: Collection[str]) -> bool:
    """Whether one of the objects that the path goes through is among the holders."""
    return any(path[: dot.start()] in holders for dot in re.finditer(r"\.", path))


def _name_unused(marked: MarkedBody, paths: Iterable[str], reason: str) -> None:
    marked.marks.unused |= dict.fromkeys(paths, reason)


def _why_not(part: _Part, is_last: bool, marked: MarkedBody) -> str:
    if not part.fields:
        return "no text"
    if part.role not in _ROLES:
        return "not of the user, a tool or the system"
    if is_last:
        return "the last part of the prompt"
    return "too many chunks" if marked.marks.is_full else ""


def _check_part(part: _Part, separator: str) -> None:
    check_text("\n".join(field.text for field in part.fields), part.path, separator)


def _is_markable(part: _Part, separator: str) -> bool:
    """Whether a part can be a chunk: it has text, and no separators, which would mark chunks inside it."""
    return any(field.has_text for field in part.fields) and all(separator not in field.text for field in part.fields)


def _tag(part: _Part, marked: MarkedBody) -> None:
    opening, closing = marked.marks.tags(Mark(part.mark or part.path))
    lead, core, trail = trimmed(part.fields[0].text)
    part.fields[0].text = f"{lead}{opening}{core}{trail}"
    lead, core, trail = trimmed(part.fields[-1].text)
    part.fields[-1].text = f"{lead}{core}{closing}{trail}"


def _chat_parts(body: Mapping[str, Any]) -> Iterator[_Part]:
    for path, message in _objects(body.get("messages"), "messages"):
        role = str(message.get("role")).lower()
        content = message.get("content")
        if isinstance(content, list):
            for where, part in _objects(content, f"{path}.content"):
                fields = (_Field(part, "text"),) if _is_text(part) else ()
                yield _Part(f"{where}.text", fields, _mark_of(part, where), role, len(content) > 1)
        else:
            fields = (_Field(message, "content"),) if isinstance(content, str) else ()
            yield _Part(f"{path}.content", fields, _mark_of(message, path), role)


def _message_parts(body: Mapping[str, Any]) -> Iterator[_Part]:
    yield from _block_parts(body.get("system"), "system", "system")
    for path, message in _objects(body.get("messages"), "messages"):
        content, role = message.get("content"), str(message.get("role"))
        if isinstance(content, str):
            yield _Part(f"{path}.content", (_Field(message, "content"),), "", role)
        yield from _block_parts(content, f"{path}.content", role)


def _block_parts(blocks: object, path: str, role: str, *, is_in_result: bool = False) -> Iterator[_Part]:
    found = list(_objects(blocks, path))
    for where, block in found:
        kind = block.get("type")
        mark = _mark_of(block, where)
        if kind == "tool_result" and not is_in_result:
            content = block.get("content")
            if isinstance(content, str):
                yield _Part(f"{where}.content", (_Field(block, "content"),), mark, role)
            elif mark:
                yield _Part(where, (), mark, role)
            yield from _block_parts(content, f"{where}.content", role, is_in_result=True)
        elif kind in ("search_result", "document"):
            if kind == "document":
                _make_search_result(block, where)
            else:
                _name_texts(block)
            yield _Part(where, _search_fields(block), f"{where}.{kind}", role, is_passage=True)
        else:
            fields = (_Field(block, "text"),) if _is_text(block) else ()
            yield _Part(f"{where}.text", fields, mark, role, len(found) > 1)


def _make_search_result(block: dict[str, Any], path: str) -> None:
    """Turns a document into the block that SGLang can write into a prompt: title, source, content.

    Raises:
        ChunkCacheRequestError: it has no text.
    """
    source = block.pop("source", None)
    kind = source.get("type") if isinstance(source, Mapping) else None
    if kind not in ("text", "content"):
        problem = f"a document with a source of type {show(kind)} has no text"
        raise request_error(f"{path}.source", problem, 'give a source of type "text" or "content"')
    key = "data" if kind == "text" else "content"
    content = source.get(key)
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [part["text"] for part in parts if _is_text(part)]
    if len(texts) < len(parts):
        raise request_error(f"{path}.source.{key}", "the document is not of text", "give it text, or leave it out")
    context = block.pop("context", None)
    if context is not None and not isinstance(context, str):
        raise request_error(f"{path}.context", f"{show(context)} is no text", "give a string, or leave it out")
    block["type"] = "search_result"
    block["content"] = [{"type": "text", "text": text} for text in ([context] if context else []) + texts]


def _name_texts(block: dict[str, Any]) -> None:
    """Gives texts of a search result their type: SGLang's gateway drops it, and SGLang then drops the texts."""
    for _, part in _objects(block.get("content"), ""):
        if isinstance(part.get("text"), str):
            part.setdefault("type", "text")


def _search_fields(block: dict[str, Any]) -> tuple[_Field, ...]:
    """The title, the source and the texts of a search result that has a text."""
    texts = [_Field(part, "text") for _, part in _objects(block.get("content"), "") if _is_text(part)]
    texts = [field for field in texts if field.has_text]
    source = block.get("source")
    heads = [_Field(block, "title")]
    if isinstance(source, dict):
        heads.append(_Field(source, "url" if source.get("url") else "text"))
    else:
        heads.append(_Field(block, "source"))
    return (*(field for field in heads if field.has_text), *texts) if texts else ()


def _objects(value: object, path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for index, one in enumerate(value if isinstance(value, list) else ()):
        if isinstance(one, dict):
            yield f"{path}[{index}]", one


def _is_text(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _mark_of(holder: Mapping[str, Any], path: str) -> str:
    return next((f"{path}.{name}" for name in _CACHE_MARKS if holder.get(name) is not None), "")


def _marks_in(holder: Mapping[str, Any], path: str = "", depth: int = _MAX_DEPTH) -> Iterator[str]:
    """The paths of all marks of a body."""
    if not depth:
        return
    dot = f"{path}." if path else ""
    yield from (f"{dot}{name}" for name in _CACHE_MARKS if holder.get(name) is not None)
    for name in _HOLDERS if path else (*_HOLDERS, "input"):  # further inside, an `input` has the arguments of a tool
        inner = holder.get(name)
        if isinstance(inner, dict):
            yield from _marks_in(inner, f"{dot}{name}", depth - 1)
        for where, one in _objects(inner, f"{dot}{name}"):
            yield from _marks_in(one, where, depth - 1)
