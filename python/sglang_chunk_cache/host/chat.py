"""`/v1/chat/completions`: marks inside message contents.

Verb: `convert_chat`. The chat template is applied to the messages with their separators; the rendered text is then
split at them, and its pieces are tokenized one by one. Each text of a message marks its own chunks, so that a
conversation whose earlier turns are sent again keeps the chunks of every turn.

Promise: the chunks in the rendered prompt are, letter by letter, the chunks that were sent. A template that drops,
repeats or escapes them is noticed, and the request gets a 400.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.request_options import RequestOptions, parse_request
from sglang_chunk_cache import server_args as options
from sglang_chunk_cache.api.marks import MarkedText, split_marked
from sglang_chunk_cache.api.prepare import CHAT_NAMES, KEY, mark_prepared, prepare, with_options
from sglang_chunk_cache.api.served import check_served
from sglang_chunk_cache.api.tokens import MarkedIds, encode_marked
from sglang_chunk_cache.server_args import ChunkCacheArgs

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
        """Splits the rendered prompt; a piece is a chunk where the message that it comes from says so.

        Raises:
            ChunkCacheRequestError: the template changed the chunks.
        """
        pieces = tuple(rendered.split(self.separator))
        is_chunk = [False]
        for text in self.texts:
            is_chunk.extend((*(True for _ in text.chunks), False))
        expected = [chunk for text in self.texts for chunk in text.chunks]
        found = [piece for piece, chunk in zip(pieces, is_chunk, strict=False) if chunk]
        if len(pieces) != len(is_chunk) or found != expected:
            raise ChunkCacheRequestError(
                f"{self.path}: the chat template of this model, or a separator outside message contents, changes "
                f"the marked chunks; apply the template yourself and send input_ids with {_OPTS_PATH}.spans"
            )
        return MarkedText(pieces, tuple(is_chunk))


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


def convert_chat(
    original: Callable[..., tuple[Any, Any]], serving: Any, request: Any, raw_request: Any = None
) -> tuple[Any, Any]:
    """AROUND `OpenAIServingChat._convert_to_internal_request`; runs in a thread of its own pool."""
    manager = serving.tokenizer_manager
    args = options.attached(manager.server_args)
    if args is None:
        return original(serving, request, raw_request)
    opts = _opts(request, args)
    check_served(opts, manager, args, _OPTS_PATH)
    marked = [] if request.input_ids is not None else _marked_texts(request, args)
    if marked:
        _check_marked(request, opts, marked)
    rendering = Rendering(args.separator, tuple(text for _, text in marked), tuple(path for path, _ in marked))
    _thread.rendering = rendering
    try:
        adapted, request = original(serving, request, raw_request)
    finally:
        _thread.rendering = None
    if marked:
        _finish(adapted, rendering, opts or RequestOptions(), manager)
    else:
        prepare(adapted, manager, args, CHAT_NAMES)
    return adapted, request


def _opts(request: Any, args: ChunkCacheArgs) -> RequestOptions | None:
    custom_params = request.custom_params or {}
    if KEY not in custom_params:
        return None
    return parse_request(custom_params[KEY], path=_OPTS_PATH, default_method=args.method)


def _check_marked(request: Any, opts: RequestOptions | None, marked: list[tuple[str, MarkedText]]) -> None:
    if opts is not None and opts.spans:
        raise ChunkCacheRequestError(
            f"{_OPTS_PATH}.spans: {marked[0][0]} has separators too; mark chunks in one of the two ways"
        )
    last = f"messages[{len(request.messages) - 1}].content"
    if request.continue_final_message and marked[-1][0] == last:
        raise ChunkCacheRequestError(
            f"{last}: chunks cannot be marked in the message that is continued (continue_final_message); remove the "
            "separators"
        )


def _finish(adapted: Any, rendering: Rendering, opts: RequestOptions, manager: Any) -> None:
    if rendering.encoded is None:
        raise ChunkCacheRequestError(
            f"{rendering.path}: the tokenizer of this model renders chats in a way in which chunks cannot be "
            f"marked; send input_ids with {_OPTS_PATH}.spans"
        )
    if len(adapted.input_ids) + manager.num_reserved_tokens >= manager.context_len:
        raise ChunkCacheRequestError(
            f"messages: the prompt has {len(adapted.input_ids)} tokens and the context length of the model is "
            f"{manager.context_len}; shorten the prompt"
        )
    opts = dataclasses.replace(opts, spans=rendering.encoded.spans)
    adapted.sampling_params = with_options(adapted.sampling_params, [opts])
    mark_prepared(adapted)


def _encode(rendering: Rendering, tokenizer: Any, rendered: str, encode_kwargs: Any) -> list[int]:
    marked = rendering.split(rendered)
    rendering.encoded = encode_marked(tokenizer, marked, rendering.path, encode_kwargs)
    return list(rendering.encoded.ids)


def _encode_marked_rendering(tokenizer: Any, text: str, encode_kwargs: Any) -> list[int] | None:
    """The ids of a rendered prompt with separators; None where it has none.

    Raises:
        ChunkCacheRequestError: it has some on a route that does not mark chunks (/v1/responses).
    """
    args = options.get_args()
    if args is None or args.separator not in text:
        return None
    rendering = _current()
    if rendering is None:
        raise ChunkCacheRequestError(
            f"input: chunks cannot be marked on this route; use /v1/chat/completions, or remove {args.separator!r}"
        )
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


def apply_conversation_template(original: Callable[..., Any], serving: Any, request: Any, is_multimodal: bool) -> Any:
    """AROUND `OpenAIServingChat._apply_conversation_template`, which tokenizes by itself."""
    result = original(serving, request, is_multimodal)
    rendering = _current()
    if rendering is not None and rendering.separator in result.prompt:
        result.prompt_ids = _encode(rendering, serving.tokenizer_manager.tokenizer, result.prompt, None)
    return result
