"""PassageWriter: puts passages into requests to a server that may or may not have the chunk cache.

A server without `--chunk-cache` (after a rollback, or in a mixed fleet) drops the passages in `chunk_cache` and answers
without them, with status 200. So the server is asked once; if it has no chunk cache, passages go into the text.

Verbs: `put` (puts passages into a body), `arrived` (tells from the headers of a reply whether the model has read them),
`without_separators` (removes the separators from a body, for a server that would read them as text).
Promises: the model reads the same text in both ways; a warning is logged when passages go into the text.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from http import HTTPStatus
from typing import Any

from chunk_cache.errors import request_error
from chunk_cache.options.defaults import DEFAULT_SEPARATOR
from chunk_cache.prompt.marks import is_blank
from chunk_cache.prompt.passage import Passage, write_passage
from chunk_cache_tools.server_client import ServerClient, without_user

logger = logging.getLogger(__name__)

_PAGE, _TITLE = "/chunk_cache", "<title>Chunk cache</title>"
_HEADER = "x-chunk-cache"
_TEXTS = ("text", "prompt", "messages", "content", "system")
"""Keys of a body whose values hold text that the model reads."""


class PassageWriter:
    """See the head of this file; threads may share it.

    Args:
        url: address of the server, without a path.
        template: how passages are written, as `chunk_cache.template` of a request; None = the default.
        knows_chunks: whether the server has the chunk cache, if it cannot be asked (a gateway); None = it is asked.

    Example:
        >>> writer = PassageWriter("http://127.0.0.1:30000", knows_chunks=False)
        >>> body = {"messages": [{"role": "user", "content": "Where is Rome?"}]}
        >>> writer.put(body, ["Rome is in Italy."])["messages"]
        [{'role': 'user', 'content': 'Rome is in Italy.\\n\\nWhere is Rome?'}]
    """

    def __init__(self, url: str, *, template: str | None = None, knows_chunks: bool | None = None) -> None:
        self._url = url
        self._template = template
        self._knows_chunks = knows_chunks

    def put(self, body: Mapping[str, Any], passages: Sequence[str | Mapping[str, str]]) -> dict[str, Any]:
        """A copy of a body of `/v1/chat/completions`, `/v1/completions` or `/v1/messages`, with the passages.

        Args:
            passages: texts, or objects with a `text` and an `id`, as in `chunk_cache.chunks` of a request.

        Raises:
            ChunkCacheRequestError: malformed URL, or of no SGLang server; or passages go into text, and there is no
                prompt or user message.
            ServerGone: the server is asked, and does not answer.
        """
        given = [{"text": one} if isinstance(one, str) else dict(one) for one in passages]
        given = [one for one in given if not is_blank(one["text"])]
        if not given:
            return dict(body)
        if self._knows():
            asked = {**(body.get("chunk_cache") or {}), "chunks": given}
            return {**body, "chunk_cache": asked if self._template is None else {**asked, "template": self._template}}
        written = (write_passage(Passage(one["text"], id=one.get("id") or ""), self._template) for one in given)
        return put_in_front("".join(written), _without_options(body))

    def without_separators(self, body: Mapping[str, Any], separator: str = DEFAULT_SEPARATOR) -> dict[str, Any]:
        """A copy of a body of any route; if the server has no chunk cache, without the separators in its texts.

        Args:
            separator: `--chunk-cache-separator` of the server.

        Raises:
            ChunkCacheRequestError: the URL is malformed, or of no SGLang server.
            ServerGone: the server is asked, and does not answer.
        """
        if self._knows():
            return dict(body)
        stripped: dict[str, Any] = _stripped(_without_options(body), separator)
        return stripped

    def arrived(self, body: Mapping[str, Any], reply_headers: Mapping[str, str]) -> bool:
        """Whether the model has read the passages that `put` gave to this body.

        If not, the server has no chunk cache any more: call `put` with the passages again, and send its result.

        Args:
            reply_headers: headers of a reply with status 200, with names in lower case, or in a mapping that ignores
                case, such as httpx's.
        """
        if not (body.get("chunk_cache") or {}).get("chunks") or _HEADER in reply_headers:
            return True
        self._note(False)
        return False

    def _knows(self) -> bool:
        if self._knows_chunks is None:
            with ServerClient(self._url) as client:
                reply = client.look(_PAGE)
            self._note(reply.status_code == HTTPStatus.OK and _TITLE in reply.text)
        return bool(self._knows_chunks)

    def _note(self, knows_chunks: bool) -> None:
        if not knows_chunks:
            logger.warning(
                "%s does not know chunks: passages are written into the text, and not reused; start it with "
                "--chunk-cache",
                without_user(self._url),
            )
        self._knows_chunks = knows_chunks


def _without_options(body: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "chunk_cache"}


def _stripped(value: Any, separator: str) -> Any:
    if isinstance(value, str):
        return value.replace(separator, "")
    if isinstance(value, list):
        return [_stripped(each, separator) for each in value]
    if isinstance(value, Mapping):
        return {key: _stripped(each, separator) if key in _TEXTS else each for key, each in value.items()}
    return value


def put_in_front(text: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body with a text in front of its prompt, or of the last message of the user.

    Raises:
        ChunkCacheRequestError: the body has neither a prompt nor a message of the user.
    """
    if isinstance(body.get("prompt"), str):
        return {**body, "prompt": text + body["prompt"]}
    messages = list(body.get("messages") or ())
    of_user = [index for index, one in enumerate(messages) if one.get("role") == "user"]
    if not of_user:
        raise request_error("messages", "no message of the user, to stand in front of", "give one")
    last = of_user[-1]
    messages[last] = {**messages[last], "content": _in_front(text, messages[last]["content"])}
    return {**body, "messages": messages}


def _in_front(text: str, content: Any) -> Any:
    if isinstance(content, str):
        return text + content
    first = next((index for index, part in enumerate(content) if part.get("type") == "text"), None)
    if first is None:
        return [{"type": "text", "text": text}, *content]
    part = content[first]
    return [*content[:first], {**part, "text": text + part["text"]}, *content[first + 1 :]]
