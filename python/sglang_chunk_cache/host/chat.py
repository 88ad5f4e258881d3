"""`/v1/chat/completions`: chunks inside messages, and beside them.

Every mark of a chunk (separators in a text, a mark of another service, an entry of `chunks` or `documents`) becomes a
pair of tags in the messages (`chunk_cache/prompt/marks.py`) before the chat template is applied; the rendered text is
split at the tags and tokenized as a whole. So a conversation whose earlier turns are sent again keeps the chunks of
every turn.

Promises: chunks that were marked for us are in the rendered prompt, letter by letter, as they were sent; a template
that drops, repeats or escapes them is noticed, and the request gets a 400. No mark changes the prompt: it is rendered
without marks too. If the two texts differ, the request gets a 400, or marks of other services are not used, and a
header of the response names them. Documents that the model's own template leaves out are written by the server.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang.srt.entrypoints.openai.protocol import ChatCompletionMessageContentTextPart, ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from chunk_cache.errors import ChunkCacheRequestError, request_error
from chunk_cache.options.request_options import MAX_CHUNKS, loads
from chunk_cache.prompt.chunk_cache_fields import KEY, as_passages
from chunk_cache.prompt.marked_body import has_place_for_documents
from chunk_cache.prompt.marked_ids import MarkedIds, encode_marked
from chunk_cache.prompt.marks import Mark, Marks, map_texts, split_marked, texts_of
from chunk_cache.prompt.passage import Passage
from sglang_chunk_cache.api.capabilities import check_read_once, is_read_twice
from sglang_chunk_cache.api.exchange import Exchange
from sglang_chunk_cache.api.prepare import check_length, check_named_once, may_get_reply, prepare
from sglang_chunk_cache.api.stock_checks import CHAT_NAMES
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs, attached, get_args
from sglang_chunk_cache.host import sglext

_PROBE = "7"
"""Stands where the first chunk would: no tokenizer joins a digit to the signs in front of it."""

_SPANS_REMEDY = f"apply the template yourself and send input_ids with custom_params.{KEY}.spans"


@dataclass
class Rendering:
    """One request on its way through the template.

    Attributes:
        marks: of its chunks, which stand in tags.
        separator: the server's separator, which must not stand in the rendered text.
        asks_template: whether the template is given the documents of the request.
        encoded: the tokenized prompt; None = not tokenized yet, or it has no chunks.
        is_without_documents: whether it leaves all of them out.
    """

    marks: Marks
    separator: str
    asks_template: bool = False
    encoded: MarkedIds | None = None
    is_without_documents: bool = False

    @property
    def path(self) -> str:
        """JSON path for an error about the whole rendering."""
        return self.marks.own[0].path if self.marks.own else "messages"

    @property
    def found(self) -> tuple[Mark, ...]:
        """The marks of the chunks in the tokenized prompt."""
        return () if self.encoded is None else self.encoded.marks

    def changed_error(self) -> ChunkCacheRequestError:
        """For a template that does not write marked chunks as they are, or writes another prompt around them."""
        problem = "the chat template of this model, or a separator outside message contents,"
        return request_error(self.path, f"{problem} changes the marked chunks", _SPANS_REMEDY)

    def encode(self, tokenizer: Any, rendered: str, encode_kwargs: Any) -> list[int] | None:
        """The ids of a rendered prompt; None where it has no chunks.

        Raises:
            ChunkCacheRequestError: the template changed the chunks.
        """
        marked = self.marks.split(rendered)
        if marked is None or any(self.separator in piece for piece in marked.pieces):
            raise self.changed_error()
        if not marked.chunks:
            return None
        self.encoded = encode_marked(tokenizer, marked, encode_kwargs)
        return self.encoded.ids


class MarkedEncoding(dict[str, Any]):
    """SGLang's `encode_kwargs`, which it passes to the function that tokenizes, with the `rendering` of the request."""

    def __init__(self, encode_kwargs: Mapping[str, Any], rendering: Rendering) -> None:
        super().__init__(encode_kwargs)
        self.rendering = rendering


@dataclass
class TextWanted:
    """Passed in the place of `encode_kwargs` to get the rendered text, and no token ids."""

    text: str | None = None


class ChunkServingChat(OpenAIServingChat):
    rendering: Rendering | None = None
    """The rendering of the request that this copy converts; None = this object is no copy."""

    def _convert_to_internal_request(self, request: Any, raw_request: Any = None) -> tuple[Any, Any]:
        """Runs in a thread of SGLang's pool, or in the event loop for the Anthropic route."""
        manager = self.tokenizer_manager
        args = attached(manager.server_args)
        if args is None:
            return super()._convert_to_internal_request(request, raw_request)
        exchange = Exchange.of(raw_request)
        exchange.give_options(request)
        untouched, marks = request, exchange.marks
        asks_template = bool(exchange.documents) and exchange.asked.template is None and self._renders_documents()
        if asks_template:
            untouched, exchange.marks = request.model_copy(deep=True), marks.copied()
        adapted, request, rendering = self._converted(request, raw_request, exchange, args, asks_template)
        if rendering.is_without_documents:
            exchange.marks = marks
            adapted, request, rendering = self._converted(untouched, raw_request, exchange, args, False)
        if adapted.input_ids is None and rendering.encoded is not None:
            if manager.model_config.model_is_mrope and _has_images_only(adapted, request):
                adapted.text, adapted.input_ids = None, rendering.encoded.ids
            else:  # the processor makes other ids than those that were encoded
                rendering.encoded = None
        exchange.marks.drop_foreign("the chat template leaves it out", but=rendering.found)
        if rendering.encoded is not None:
            _give_spans(adapted, rendering.encoded, manager, exchange.asked.path)
        elif exchange.marks.own:
            problem = "the tokenizer or the image processor of this model reads chats in its own way"
            raise request_error(rendering.path, problem, _SPANS_REMEDY)
        ids = CHAT_NAMES.ids if request.input_ids is None else "input_ids"
        names = dataclasses.replace(CHAT_NAMES, ids=ids, options=exchange.asked.path)
        prepare(adapted, manager, args, names)
        exchange.awaits_reply = may_get_reply(adapted, args)
        return adapted, request

    def _converted(
        self, request: Any, raw_request: Any, exchange: Exchange, args: ChunkCacheArgs, asks_template: bool
    ) -> tuple[Any, Any, Rendering]:
        """What SGLang makes of a request with its chunks in tags.

        Args:
            asks_template: whether the model's own template is given the documents.
        """
        self._place(request, exchange, args, asks_template)
        converting = copy.copy(self)
        converting.rendering = Rendering(exchange.marks, args.separator, asks_template)
        converted = super(ChunkServingChat, converting)._convert_to_internal_request(request, raw_request)
        return (*converted, converting.rendering)

    def ids_in_front(self, messages: Sequence[Mapping[str, str]]) -> tuple[int, ...]:
        """The ids in front of the first chunk of a chat that begins with these messages, which have no separators.

        Chunks stand behind the text of the last message if it is of the user, else in a message of the user behind it.

        Raises:
            ChunkCacheRequestError: chats of this server cannot begin so, or cannot have chunks.
        """
        args = attached(self.tokenizer_manager.server_args)
        assert args is not None, "only the chunk cache asks"
        asked = [dict(message) for message in messages]
        if not asked or asked[-1]["role"] != "user":
            asked.append({"role": "user", "content": ""})
        asked[-1]["content"] += f"{args.separator}{_PROBE}{args.separator}"
        try:
            adapted, _ = self._convert_to_internal_request(ChatCompletionRequest(model="", messages=asked))
        except ChunkCacheRequestError:
            raise
        except ValueError as error:  # what the template raises
            problem = f"the chat template refuses them ({' '.join(str(error).split())})"
            raise request_error("messages", problem, "send what stands in front of passages in your chats") from None
        start, _ = loads(adapted.sampling_params["custom_params"][KEY]).spans[0]
        return tuple(adapted.input_ids[:start])

    def _place(self, request: Any, exchange: Exchange, args: ChunkCacheArgs, asks_template: bool) -> None:
        """Puts all chunks of a request into its messages, in tags.

        Raises:
            ChunkCacheRequestError: a mark is bad, or chunks are marked where they cannot be, or in two ways.
        """
        if request.input_ids is not None:
            ignore_marks(exchange)
            return
        marks, asked = exchange.marks, exchange.asked
        reason = None
        if self.chat_encoding_spec is not None:
            reason = "the chat encoding of this model cannot mark chunks"
        elif is_read_twice(self.tokenizer_manager):
            reason = "the decode server tokenizes the chat as a whole"
        if reason is not None:
            marks.drop_foreign(reason)
            for _, holder, name in texts_of(request.messages):
                setattr(holder, name, marks.without(getattr(holder, name)))
        for path, holder, name in texts_of(request.messages):
            marked = split_marked(getattr(holder, name), args.separator, path)
            if marked is not None:
                _check_not_continued(request, path)
                setattr(holder, name, marks.tag_pieces(marked))
        passages = asked.passages
        if asks_template:
            _put_documents(request, exchange)
        else:
            passages = (*as_passages(exchange.documents), *passages)
        if passages:
            _put_in_front(request.messages, passages, exchange)
        exchange.check_one_way()
        if marks.own:
            check_read_once(self.tokenizer_manager, marks.own[0].path)

    def _renders_documents(self) -> bool:
        """Whether the model's own template has a place for documents."""
        tokenizer = self.tokenizer_manager.tokenizer
        is_jinja = self.template_manager.chat_template_name is None and self.chat_encoding_spec is None
        return is_jinja and has_place_for_documents(getattr(tokenizer, "chat_template", None))

    def _render_and_encode_chat_template(self, messages: Any, **options: Any) -> tuple[list[int], str | None]:
        rendering = self.rendering
        if rendering is None:
            return super()._render_and_encode_chat_template(messages, **options)
        marks = rendering.marks
        options["encode_kwargs"] = MarkedEncoding(options["encode_kwargs"], rendering)
        if not marks.own and not marks.foreign:
            return super()._render_and_encode_chat_template(messages, **options)
        asked = {"messages": messages, **options, "use_cache": False}  # it has the ids of a chat, and no chunks
        text = self._rendered(**asked)
        if marks.foreign:
            without = _untagged(asked, marks, foreign_only=True)
            expected = self._rendered(**without)
            if rendering.asks_template and expected is not None:
                rendering.is_without_documents = expected == self._rendered(**_with_other_documents(without))
            if text is None or marks.without(text, foreign_only=True) != expected:
                marks.drop_foreign("the chat template changes it")
                asked, text = without, expected
        if text is None:
            return super()._render_and_encode_chat_template(**asked)
        if marks.own and marks.without(text) != self._rendered(**_untagged(asked, marks)):
            raise rendering.changed_error()
        ids = rendering.encode(self.tokenizer_manager.tokenizer, text, options["encode_kwargs"])
        return super()._render_and_encode_chat_template(**asked) if ids is None else (ids, None)

    def _rendered(self, messages: Any, **options: Any) -> str | None:
        """The text that the template makes of messages; None where it makes token ids at once."""
        wanted = TextWanted()
        super()._render_and_encode_chat_template(messages, **{**options, "encode_kwargs": wanted, "use_cache": False})
        return wanted.text

    def _apply_conversation_template(self, request: Any, is_multimodal: bool) -> Any:
        """Encodes the chunks of a chat with a built-in template, which SGLang tokenizes here."""
        result = super()._apply_conversation_template(request, is_multimodal)
        rendering = self.rendering
        if rendering is None:
            return result
        text = result.prompt
        if rendering.marks.foreign:
            for _, holder, name in texts_of(request.messages):
                setattr(holder, name, rendering.marks.without(getattr(holder, name), foreign_only=True))
            result = super()._apply_conversation_template(request, is_multimodal)
            if rendering.marks.without(text, foreign_only=True) != result.prompt:
                rendering.marks.drop_foreign("the chat template changes it")
                text = result.prompt
        result.prompt = rendering.marks.without(text)
        result.prompt_ids = rendering.encode(self.tokenizer_manager.tokenizer, text, None) or result.prompt_ids
        return result

    def _build_chat_response(self, request: Any, ret: list[dict[str, Any]], created: int) -> Any:
        return sglext.add_reply(super()._build_chat_response(request, ret, created), ret, request.n)

    def _generate_chat_stream(self, adapted_request: Any, request: Any, raw_request: Any) -> AsyncIterator[str]:
        events = super()._generate_chat_stream(adapted_request, request, raw_request)
        return sglext.end_with_reply(events, Exchange.of(raw_request).replies, "chat.completion.chunk", request)


def _untagged(asked: Mapping[str, Any], marks: Marks, *, foreign_only: bool = False) -> dict[str, Any]:
    """What is asked of a template, without tags."""
    texts = {name: marks.without(asked[name], foreign_only=foreign_only) for name in ("messages", "template_kwargs")}
    return {**asked, **texts}


def _with_other_documents(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What is asked of a template, every text of its documents a little longer."""
    documents = map_texts(asked["template_kwargs"]["documents"], lambda text: text + _PROBE)
    return {**asked, "template_kwargs": {**asked["template_kwargs"], "documents": documents}}


def _has_images_only(adapted: Any, request: Any) -> bool:
    """Whether a chat has images and no other media, and all of its text is in the rendered prompt."""
    others = (adapted.video_data, adapted.audio_data, request.continue_final_message)
    return bool(adapted.image_data) and not any(others)


def ignore_marks(exchange: Exchange) -> None:
    """Ignores marks in a request whose prompt is given as token ids; passages in `chunks` are an error there."""
    asked, marks = exchange.asked, exchange.marks
    if asked.passages:
        raise request_error(f"{asked.path}.chunks", "input_ids are given too", "send one of the two")
    marks.drop_foreign("input_ids are given")
    if exchange.documents:
        marks.unused["documents"] = "input_ids are given"
    exchange.marks = Marks(unused=marks.unused)


def _check_not_continued(request: Any, path: str) -> None:
    last = f"messages[{len(request.messages) - 1}].content"
    if request.continue_final_message and path.startswith(last):
        problem = "chunks cannot be marked in the message that is continued (continue_final_message)"
        raise request_error(last, problem, "remove the separators")


def _put_documents(request: Any, exchange: Exchange) -> None:
    """Hands the documents to the model's own template."""
    kwargs = request.chat_template_kwargs or {}
    if "documents" in kwargs:
        raise request_error("documents", "given in chat_template_kwargs too", "give one of the two")
    request.chat_template_kwargs = {**kwargs, "documents": exchange.tag_documents()}


def _put_in_front(messages: list[Any], passages: tuple[Passage, ...], exchange: Exchange) -> None:
    """Writes passages in front of the last message of the user."""
    message = next((one for one in reversed(messages) if one.role == "user"), None)
    if message is None:
        raise request_error(passages[0].path, "no message of the user, to stand in front of", "send one")
    written = exchange.tag_passages(passages)
    if isinstance(message.content, str):
        message.content = written + message.content
        return
    first = next((part for part in message.content if getattr(part, "type", None) == "text"), None)
    if first is None:
        message.content = [ChatCompletionMessageContentTextPart(type="text", text=written), *message.content]
    else:
        first.text = written + first.text


def _give_spans(adapted: Any, encoded: MarkedIds, manager: Any, opts_path: str) -> None:
    """Writes spans and ids of the chunks into the options of a request, where a client would give them.

    Spans of the client that are no list stay, and are refused when the options are checked.
    """
    if len(encoded.spans) > MAX_CHUNKS:
        problem = f"{len(encoded.spans)} chunks, and {MAX_CHUNKS} is the limit"
        raise request_error("messages", problem, "mark longer chunks")
    paths = [mark.path for mark in encoded.marks]
    check_length(len(adapted.input_ids), encoded.spans, paths, manager, "messages")
    params = adapted.sampling_params
    custom_params = params.get("custom_params") or {}
    options = dict(custom_params.get(KEY) or {})
    check_named_once(encoded, options.get("chunk_ids"), opts_path)
    if options.get("spans") in (None, []):
        options["spans"] = encoded.spans
    if encoded.chunk_ids:
        options["chunk_ids"] = encoded.chunk_ids
    adapted.sampling_params = {**params, "custom_params": {**custom_params, KEY: options}}


def _encode_rendered(tokenizer: Any, text: str, encode_kwargs: Any) -> list[int] | None:
    """The ids of a rendered prompt with chunks; None where it has none.

    Raises:
        ChunkCacheRequestError: it has separators on a route that does not mark chunks (/v1/responses).
    """
    args = get_args()
    if args is None:
        return None
    if isinstance(encode_kwargs, TextWanted):
        encode_kwargs.text = text
        return []
    if isinstance(encode_kwargs, MarkedEncoding):
        return encode_kwargs.rendering.encode(tokenizer, text, encode_kwargs)
    if args.separator in text:
        remedy = f"use /v1/chat/completions, or remove {args.separator!r}"
        raise request_error("input", "chunks cannot be marked on this route", remedy)
    return None


def parallel_prompt_encode(
    original: Callable[..., list[int]], tokenizer: Any, text: Any, encode_kwargs: Any = None
) -> list[int]:
    """AROUND the function that tokenizes a rendered chat prompt."""
    encoded = _encode_rendered(tokenizer, text, encode_kwargs) if isinstance(text, str) else None
    return original(tokenizer, text, encode_kwargs) if encoded is None else encoded


def encode_prompt_segments(
    original: Callable[..., list[int]], tokenizer: Any, segments: Any, encode_kwargs: Any = None
) -> list[int]:
    """AROUND the function that tokenizes the segments of a template written in Python."""
    encoded = _encode_rendered(tokenizer, "".join(segments), encode_kwargs)
    return original(tokenizer, segments, encode_kwargs) if encoded is None else encoded
