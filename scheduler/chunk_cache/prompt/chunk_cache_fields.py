"""ChunkCacheFields: the `chunk_cache` object of a request on the OpenAI and Anthropic routes.

Verb: `read_asked`. Beside the options of every request (`chunk_cache.options.request_options`) it may hold
what only these routes read: `chunks` and the `template` that writes them into the prompt, `marks` and `parts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any

from chunk_cache.errors import given, is_unicode, known_names, request_error, show
from chunk_cache.options.request_options import KEYS, MAX_CHUNKS
from chunk_cache.prompt.marks import is_blank
from chunk_cache.prompt.passage import PLACEHOLDER, Passage

KEY = "chunk_cache"
ROUTE_KEYS = ("chunks", "template", "marks", "parts")
MAX_TEMPLATE_LEN = 4096
_CHUNK_KEYS = ("id", "text")


@dataclass(frozen=True)
class ChunkCacheFields:
    """What a request asks for.

    Attributes:
        options: the object without the keys of these routes, not yet checked; None = there is no object.
        path: JSON path of that object.
        marks, parts: whether marks of other services, and parts of messages, are chunks; None = as the server says.
        passages: `chunks`.
        template: how passages are written; None = the default.
        blank: the paths of those of `chunks` that have no visible text.
    """

    options: Mapping[str, Any] | None = None
    path: str = f"custom_params.{KEY}"
    marks: bool | None = None
    parts: bool | None = None
    passages: tuple[Passage, ...] = ()
    template: str | None = None
    blank: tuple[str, ...] = ()


def read_asked(body: Mapping[str, Any], separator: str, keys: Sequence[str] = ROUTE_KEYS) -> ChunkCacheFields:
    """Reads the object at the top of a body, or in its `custom_params`.

    Args:
        keys: those that the route reads beside the options of every request.

    Raises:
        ChunkCacheRequestError: there are two, or one breaks the contract; the options of every request are not checked.
    """
    custom_params = body.get("custom_params")
    inner = custom_params if isinstance(custom_params, Mapping) else {}
    holders = ((KEY, body), (ChunkCacheFields.path, inner))
    found = [(path, holder[KEY]) for path, holder in holders if holder.get(KEY) is not None]
    if not found:
        return ChunkCacheFields()
    if len(found) > 1:
        raise request_error(KEY, f"given in {ChunkCacheFields.path} too", "give one of the two")
    ((path, value),) = found
    if not isinstance(value, Mapping):
        raise request_error(path, f"{show(value)} is not an object", 'give an object such as {"mode": "exact"}')
    _check_keys(value, (*KEYS, *keys), path)
    value = given(value)
    passages, blank = _read_passages(value.get("chunks", []), f"{path}.chunks", separator)
    asked = ChunkCacheFields(
        options={key: one for key, one in value.items() if key in KEYS},
        path=path,
        marks=_read_bool(value, "marks", path),
        parts=_read_bool(value, "parts", path),
        passages=passages,
        template=_read_template(value.get("template"), f"{path}.template", separator),
        blank=blank,
    )
    if asked.template is not None and "chunks" not in value and body.get("documents") is None:
        raise request_error(f"{path}.template", "there are no passages to write", f"give {path}.chunks too")
    return asked


def read_documents(value: object, path: str, separator: str) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The `documents` of a chat: strings, or objects with a text, as vLLM and Hugging Face take them.

    Returns:
        the documents by path, as objects with a `text` (other fields are for the model's own template), and the paths
        of those without visible text, which are left out.

    Raises:
        ChunkCacheRequestError: it is no such list, or a document has no text, or an id that is no name.
    """
    documents, blank = dict[str, dict[str, Any]](), list[str]()
    if value is None:
        return documents, blank
    if not isinstance(value, (list, tuple)):
        raise request_error(path, f"{show(value)} is not a list", "give a list of strings, or of objects with a text")
    _check_number(value, path)
    for index, one in enumerate(value):
        document = {"text": one} if isinstance(one, str) else one
        where = f"{path}[{index}]"
        if not isinstance(document, Mapping):
            raise request_error(where, f"{show(one)} is no document", 'give a string, or {"title": ..., "text": ...}')
        text = check_text(document.get("text"), f"{where}.text" if document is one else where, separator)
        if document.get("title") is not None:
            check_text(document["title"], f"{where}.title", separator)
        if type(document.get("id")) not in (str, int, float, NoneType):  # True is an int, and no number
            problem = f"{show(document['id'])} is neither a string nor a number"
            raise request_error(f"{where}.id", problem, "give one of the two, or leave it out")
        check_text(document_id(document), f"{where}.id", separator)
        if is_blank(text):
            blank.append(where)
        else:
            documents[where] = dict(document)
    return documents, blank


def as_passages(documents: Mapping[str, Mapping[str, Any]]) -> tuple[Passage, ...]:
    """Documents as passages, for a model whose own template has no place for documents."""
    return tuple(
        Passage(document["text"], path, document_id(document), document.get("title") or "")
        for path, document in documents.items()
    )


def document_id(document: Mapping[str, Any]) -> str:
    """The id of a document as the chunk's name, which is a text; empty = it has none."""
    return "" if document.get("id") is None else str(document["id"])


def check_text(text: object, path: str, separator: str) -> str:
    """Checks the text of a passage that a client marked as a whole.

    Raises:
        ChunkCacheRequestError: it is no text, has a separator, or cannot be tokenized.
    """
    if not isinstance(text, str):
        raise request_error(path, "no text" if text is None else f"{show(text)} is not a string", "give it text")
    if separator in text:
        problem = f"the separator {separator!r} stands inside of a passage"
        raise request_error(path, problem, "remove it, or start the server with another --chunk-cache-separator")
    if not is_unicode(text):
        raise request_error(path, "half of a character stands in it, which cannot be tokenized", "send whole ones")
    return text


def _check_keys(value: Mapping[str, object], known: Sequence[str], path: str) -> None:
    for key in value:
        if key not in known:
            raise request_error(path, f"unknown key {show(key)}", known_names(key, known))


def _check_number(value: Sequence[object], path: str) -> None:
    if len(value) > MAX_CHUNKS:
        raise request_error(path, f"{len(value)} passages, and {MAX_CHUNKS} is the limit", "send fewer, longer ones")


def _read_bool(value: Mapping[str, Any], key: str, path: str) -> bool | None:
    found = value.get(key)
    if found is not None and not isinstance(found, bool):
        raise request_error(f"{path}.{key}", f"{show(found)} is not a boolean", "give true or false")
    return found


def _read_passages(value: object, path: str, separator: str) -> tuple[tuple[Passage, ...], tuple[str, ...]]:
    """The chunks, and the paths of those without visible text."""
    if not isinstance(value, (list, tuple)):
        raise request_error(path, f"{show(value)} is not a list", 'give a list such as [{"id": "a", "text": "..."}]')
    _check_number(value, path)
    passages, blank, texts = list[Passage](), list[str](), dict[str, str]()
    for index, one in enumerate(value):
        where = f"{path}[{index}]"
        if not isinstance(one, Mapping):
            raise request_error(where, f"{show(one)} is no chunk", 'give an object such as {"id": "a", "text": "..."}')
        _check_keys(one, _CHUNK_KEYS, where)
        one = given(one)
        text = check_text(one.get("text"), f"{where}.text", separator)
        name = check_text(one.get("id", ""), f"{where}.id", separator)
        if name and texts.setdefault(name, text) != text:
            problem = f"{show(name)} is the id of another text too"
            raise request_error(f"{where}.id", problem, "give each text an id of its own")
        if is_blank(text):
            blank.append(where)
        else:
            passages.append(Passage(text, where, name))
    return tuple(passages), tuple(blank)


def _read_template(value: object, path: str, separator: str) -> str | None:
    if value is None:
        return None
    template = check_text(value, path, separator)
    names = [name[1] for name in PLACEHOLDER.finditer(template)]
    remedy = 'give one such as "[{id}]\\n{text}\\n"; {id} and {title} may stand in it, once'
    if names.count("text") != 1:
        raise request_error(path, "{text} does not stand in it once", remedy)
    if len(set(names)) < len(names):
        raise request_error(path, "a name stands in it twice", remedy)
    if len(template) > MAX_TEMPLATE_LEN:  # each passage is written with it
        problem = f"it has {len(template)} characters, and {MAX_TEMPLATE_LEN} is the limit"
        raise request_error(path, problem, "put what is said once into the prompt")
    return template
