"""`/v1/chat/completions`: marks inside message contents.

The chat template is applied to the messages with their separators; the rendered text is then
split at them, and its pieces are tokenized one by one. Each text of a message marks its own chunks, so that a
conversation whose earlier turns are sent again keeps the chunks of every turn.

Promise: the chunks in the rendered prompt are, letter by letter, the chunks that were sent. A template that drops,
repeats or escapes them is noticed, and the request gets a 400.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from chunk_cache.errors import request_error
from chunk_cache.request_options import RequestOptions, parse_request
from sglang_chunk_cache.api.marks import MarkedText, split_marked, split_rendered
from sglang_chunk_cache.api.prepare import CHAT_NAMES, KEY, check_length, mark_prepared, prepare, with_options
from sglang_chunk_cache.api.served import check_rows, check_served
from sglang_chunk_cache.api.tokens import MarkedIds, encode_marked
from sglang_chunk_cache.host import sglext
from sglang_chunk_cache.host.generate import misplaced_options
from sglang_chunk_cache.server_args import ChunkCacheArgs, attached, get_args

_OPTS_PATH = f"custom_params.{KEY}"


@dataclass
class Rendering:
    """One request on its way through the template; lives in the thread that renders it.

    Attributes:
        separator: the separator of the server.
        texts: the marked texts of its messages, in order.
        paths: the JSON path of each.
        encoded: the tokenized prompt, once it is known.
    """

    separator: str
    texts: tuple[MarkedText, ...]
    paths: tuple[str, ...]
    encoded: MarkedIds | None = None

    @property
    def path(self) -> str:
        """Where a message about the whole rendering points to."""
        return self.paths[0] if self.paths else "messages"

    def split(self, rendered: str) -> MarkedText:
        """Splits the rendered prompt.

        Raises:
            ChunkCacheRequestError: the template changed the chunks.
        """
        found = split_rendered(rendered, self.texts, self.separator)
        if found is None:
            reason = "the chat template of this model, or a separator outside message contents,"
            remedy = f"apply the template yourself and send input_ids with {_OPTS_PATH}.spans"
            raise request_error(self.path, f"{reason} changes the marked chunks", remedy)
        return found


_thread = threading.local()


def _current() -> Rendering | None:
    return getattr(_thread, "rendering", None)


def _text_fields(messages: Sequence[Any]) -> Iterator[tuple[str, str]]:
    """All texts of the messages, with their JSON paths."""
    for index, message in enumerate(messages):
        content = getattr(message, "content", None)
        if isinstance(content, str):
            yield f"messages[{index}].content", content
        elif isinstance(content, (list, tuple)):
            for part_index, part in enumerate(content):
                text = getattr(part, "text", None)
                if isinstance(text, str):
                    yield f"messages[{index}].content[{part_index}].text", text


def _marked_texts(request: Any, args: ChunkCacheArgs) -> list[tuple[str, MarkedText]]:
    found = ((path, split_marked(text, args.separator, path)) for path, text in _text_fields(request.messages))
    return [(path, marked) for path, marked in found if marked is not None]


class ChunkServingChat(OpenAIServingChat):
    """See the head of this file."""

    async def handle_request(self, request: Any, raw_request: Any) -> Any:
        error = await misplaced_options(self, raw_request)
        return await super().handle_request(request, raw_request) if error is None else error

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
        """Runs in a thread of SGLang's pool."""
        manager = self.tokenizer_manager
        args = attached(manager.server_args)
        if args is None:
            return super()._convert_to_internal_request(request, raw_request)
        marked = [] if request.input_ids is not None else _marked_texts(request, args)
        opts = _marked_options(request, marked, manager, args) if marked else RequestOptions()
        rendering = Rendering(args.separator, tuple(text for _, text in marked), tuple(path for path, _ in marked))
        _thread.rendering = rendering
        try:
            adapted, request = super()._convert_to_internal_request(request, raw_request)
        finally:
            _thread.rendering = None
        if marked:
            _finish(adapted, rendering, opts, manager)
        else:
            prepare(adapted, manager, args, CHAT_NAMES)
        return adapted, request

    def _apply_conversation_template(self, request: Any, is_multimodal: bool) -> Any:
        """With a built-in template SGLang tokenizes here."""
        result = super()._apply_conversation_template(request, is_multimodal)
        rendering = _current()
        if rendering is not None and rendering.separator in result.prompt:
            result.prompt_ids = _encode(rendering, self.tokenizer_manager.tokenizer, result.prompt, None)
        return result

    def _build_chat_response(self, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
        return sglext.add_reply(super()._build_chat_response(request, ret, created), ret)

    def _generate_chat_stream(self, adapted_request: Any, request: Any, raw_request: Any) -> AsyncIterator[str]:
        events = super()._generate_chat_stream(adapted_request, request, raw_request)
        return sglext.end_with_reply(events, adapted_request, "chat.completion.chunk", request.model)


def _marked_options(
    request: Any, marked: list[tuple[str, MarkedText]], manager: Any, args: ChunkCacheArgs
) -> RequestOptions:
    """The options of a request with separators, so far without spans.

    Raises:
        ChunkCacheRequestError: they are bad, mark chunks too, or chunks are marked where they cannot be.
    """
    opts = RequestOptions()
    if KEY in (request.custom_params or {}):
        opts = parse_request(request.custom_params[KEY], path=_OPTS_PATH, default_method=args.method)
        check_served(opts, manager, args, _OPTS_PATH)
    if opts.spans:
        problem = f"{marked[0][0]} has separators too"
        raise request_error(f"{_OPTS_PATH}.spans", problem, "mark chunks in one of the two ways")
    last = f"messages[{len(request.messages) - 1}].content"
    if request.continue_final_message and marked[-1][0] == last:
        problem = "chunks cannot be marked in the message that is continued (continue_final_message)"
        raise request_error(last, problem, "remove the separators")
    return opts


def _finish(adapted: Any, rendering: Rendering, opts: RequestOptions, manager: Any) -> None:
    encoded = rendering.encoded
    if encoded is None:
        problem = "the tokenizer of this model renders chats in a way in which chunks cannot be marked"
        raise request_error(rendering.path, problem, f"send input_ids with {_OPTS_PATH}.spans")
    check_length(len(adapted.input_ids), manager, "messages")
    opts = dataclasses.replace(opts, spans=encoded.spans)
    args = get_args()
    assert args is not None
    check_rows(opts, args, _OPTS_PATH)
    adapted.sampling_params = with_options(adapted.sampling_params, [opts])
    mark_prepared(adapted)


def _encode(rendering: Rendering, tokenizer: Any, rendered: str, encode_kwargs: Any) -> list[int]:
    marked = rendering.split(rendered)
    rendering.encoded = encode_marked(tokenizer, marked, rendering.path, encode_kwargs)
    return rendering.encoded.ids


def _encode_marked_rendering(tokenizer: Any, text: str, encode_kwargs: Any) -> list[int] | None:
    """The ids of a rendered prompt with separators; None where it has none.

    Raises:
        ChunkCacheRequestError: it has some on a route that does not mark chunks (/v1/responses).
    """
    args = get_args()
    if args is None or args.separator not in text:
        return None
    rendering = _current()
    if rendering is None:
        remedy = f"use /v1/chat/completions, or remove {args.separator!r}"
        raise request_error("input", "chunks cannot be marked on this route", remedy)
    return _encode(rendering, tokenizer, text, encode_kwargs)


def parallel_prompt_encode(
    original: Callable[..., list[int]], tokenizer: Any, text: Any, encode_kwargs: Any = None
) -> list[int]:
    """AROUND the function that tokenizes a rendered chat prompt."""
    encoded = _encode_marked_rendering(tokenizer, text, encode_kwargs) if isinstance(text, str) else None
    return original(tokenizer, text, encode_kwargs) if encoded is None else encoded


def encode_prompt_segments(
    original: Callable[..., list[int]], tokenizer: Any, segments: Any, encode_kwargs: Any = None
) -> list[int]:
    """AROUND the function that tokenizes the segments of a template written in Python."""
    encoded = _encode_marked_rendering(tokenizer, "".join(segments), encode_kwargs)
    return original(tokenizer, segments, encode_kwargs) if encoded is None else encoded
