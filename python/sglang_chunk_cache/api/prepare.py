"""From a request to token ids and one JSON string of options.

Verbs: `prepare` (rewrites a `GenerateReqInput`), `may_get_reply` (of a request that was prepared).

Promises: everything is checked before anything is tokenized, and everything is tokenized before the scheduler hears of
the request; a request without marks and options stays unchanged; the caller's dicts and lists are never changed. What
leaves this process is `custom_params["chunk_cache"]` = one JSON string of
`chunk_cache.options.request_options.dumps`, a type that every transport of SGLang can carry.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from chunk_cache.errors import ChunkCacheRequestError, request_error, show, user_error
from chunk_cache.options.request_options import MAX_CHUNKS, RequestOptions, check_fit, dumps, parse_request
from chunk_cache.plan.served_methods import check_preparing, check_rows
from chunk_cache.prompt.chunk_cache_fields import KEY
from chunk_cache.prompt.marked_ids import MarkedIds, encode_marked
from chunk_cache.prompt.marks import Mark, MarkedText, Marks
from chunk_cache.types import Span
from sglang_chunk_cache.api.capabilities import check_read_once, check_served, keeps_all_error
from sglang_chunk_cache.api.stock_checks import GENERATE_NAMES, Names, check_parameters, check_vocabulary, each
from sglang_chunk_cache.flags.server_args import ChunkCacheArgs
from sglang_chunk_cache.flags.step_limits import most_unknown_rows

_PREPARED = "_chunk_cache_prepared"
_OWN = "_chunk_cache_own"
_BEGIN_LEN = 16
"""Characters at the beginning of a text that are tried first: they nearly always give tokens."""


@dataclass(frozen=True)
class Item:
    """One prompt of a request, checked as far as it can be without a tokenizer.

    Attributes:
        text: its text, or None where token ids were given.
        ids: its token ids, or None where text was given.
        marked: the text, split at its separators or tags; None where it has none.
        opts: its options; None where the request has neither marks nor options.
        path: JSON path of the text or the ids.
        opts_path: JSON path of the options.
        marks: the marks of its chunks, once they are known.
    """

    text: str | None
    ids: Sequence[int] | None
    marked: MarkedText | None
    opts: RequestOptions | None
    path: str
    opts_path: str
    marks: tuple[Mark, ...] = ()

    @property
    def is_tokenized_here(self) -> bool:
        """Whether its text must be tokenized here: it is split, or has marks to compare with its length."""
        return self.ids is None and self.opts is not None and (self.marked is not None or self.opts.has_marks)


def _parse_items(
    text: object, input_ids: object, sampling_params: object, args: ChunkCacheArgs, names: Names, tags: Marks
) -> list[Item]:
    """Checks all prompts of a request.

    Args:
        text: a string, a list of strings, or None.
        input_ids: a list of ids, a list of such lists, or None; of a request with text too, `prepare` checks them.
        sampling_params: an object, a list with one object per prompt, or None.
        args: the options of the server.
        names: the names of the fields, for messages.
        tags: the chunks that stand in tags in the texts.
    """
    prompts, is_batch = _prompts(text, input_ids)
    per_prompt = isinstance(sampling_params, (list, tuple))
    params_of: Sequence[object] = [sampling_params] * len(prompts)
    if isinstance(sampling_params, (list, tuple)):
        _check_number(prompts, is_batch, sampling_params, names)
        params_of = sampling_params
    items = []
    for index, (prompt, params) in enumerate(zip(prompts, params_of, strict=True)):
        name = names.text if isinstance(prompt, str) or text is not None else names.ids
        path = f"{name}[{index}]" if is_batch else name
        if is_batch and (prompt is None or isinstance(prompt, (int, float, Mapping))):
            raise request_error(path, f"{show(prompt)} is no prompt", "give texts, or lists of token ids")
        items.append(
            _parse_item(
                prompt,
                _custom_params(params).get(KEY),
                args,
                tags,
                path=path,
                opts_path=_opts_path(names, index if per_prompt else None),
            )
        )
    return items


def _check_number(prompts: list[object], is_batch: bool, params: Sequence[object], names: Names) -> None:
    """Checks that a list of sampling parameters has one entry per prompt; stock SGLang fails where it has not."""
    if not is_batch or len(params) != len(prompts):
        expected = f"{len(prompts)} prompts" if is_batch else "one prompt that is no list"
        raise request_error(
            names.sampling_params,
            f"a list of {len(params)} for {expected}",
            "give one object for all prompts, or a list with one for each prompt of a list",
        )


def _prompts(text: object, input_ids: object) -> tuple[list[object], bool]:
    value = text if text is not None else input_ids
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        return [value], False
    if text is None and (not value or not isinstance(value[0], (list, tuple))):
        return [value], False
    return list(value), True


def _opts_path(names: Names, index: int | None) -> str:
    if names.options:
        return names.options
    parent = names.sampling_params + ("" if index is None else f"[{index}]")
    return f"{parent}.custom_params.{KEY}" if parent else f"custom_params.{KEY}"


def _custom_params(params: object) -> Mapping[str, Any]:
    custom_params = params.get("custom_params") if isinstance(params, Mapping) else None
    return custom_params if isinstance(custom_params, Mapping) else {}


def _parse_item(prompt: object, raw: object, args: ChunkCacheArgs, tags: Marks, *, path: str, opts_path: str) -> Item:
    text = prompt if isinstance(prompt, str) else None
    ids = prompt if isinstance(prompt, (list, tuple)) else None
    marked = None if text is None else tags.split_at(args.separator, text, path)
    if raw is None:
        return Item(text, ids, marked, None if marked is None else RequestOptions(), path, opts_path)
    opts = parse_request(
        raw,
        path=opts_path,
        num_tokens=None if ids is None else len(ids),
        default_method=args.method,
        default_options=args.parsed_config.options,
    )
    if opts.spans and marked is not None:
        raise request_error(
            f"{opts_path}.spans", f"{path} has separators {args.separator!r} too", "mark chunks in one of the two ways"
        )
    if opts.spans and text is None and ids is None:
        raise request_error(f"{opts_path}.spans", "spans need a text or token ids as the prompt", "give one")
    return Item(text, ids, marked, opts, path, opts_path)


def prepare(
    obj: Any, manager: Any, args: ChunkCacheArgs, names: Names = GENERATE_NAMES, tags: Marks | None = None
) -> None:
    """Checks a `GenerateReqInput`, tokenizes marked text, and puts the options into their JSON string.

    Args:
        obj: the request, before its own normalization; changed in place.
        manager: the tokenizer manager.
        args: the options of the server.
        names: the names of the fields, for messages.
        tags: the chunks that stand in tags in the texts; None = there are none.

    Raises:
        ChunkCacheRequestError: the request breaks the contract.
    """
    if getattr(obj, _PREPARED, False):
        return
    items = _parse_items(obj.text, obj.input_ids, obj.sampling_params, args, names, tags or Marks())
    has_both = obj.text is not None and obj.input_ids is not None
    given = [(item.path, item.ids) for item in items if item.ids is not None]
    for path, ids in _ids_beside(obj) if has_both else given:
        _check_not_empty(ids, obj, path)
        check_vocabulary(ids, manager, path)
    for item in items:
        if item.text is not None and item.marked is None and not has_both:
            _check_has_tokens(item.text, obj, manager, item.path)
        if item.opts is not None and not getattr(obj, _OWN, False):
            check_preparing(item.opts, args.parsed_config, item.opts_path)
    check_parameters(obj, manager, names)
    if any(item.opts is not None for item in items):
        _rewrite(obj, items, manager, args)
    setattr(obj, _PREPARED, True)


def _ids_beside(obj: Any) -> list[tuple[str, Sequence[int]]]:
    """The ids of a request that has texts too, of which SGLang reads the ids; each with its path.

    Raises:
        ChunkCacheRequestError: there is not a list of ids for each text.
    """
    texts, is_batch = _prompts(obj.text, None)
    given = obj.input_ids if is_batch else [obj.input_ids]
    if len(given) != len(texts) or not all(isinstance(ids, (list, tuple)) for ids in given):
        raise request_error("input_ids", "no list of token ids for each text", "give one, or send one of the two")
    return [(f"input_ids[{index}]" if is_batch else "input_ids", ids) for index, ids in enumerate(given)]


def note_own(obj: Any) -> None:
    """Marks a `GenerateReqInput` as made by the server itself, not by a client."""
    setattr(obj, _OWN, True)


def _rewrite(obj: Any, items: list[Item], manager: Any, args: ChunkCacheArgs) -> None:
    preferred = manager.preferred_sampling_params or {}
    _check_combinations(obj, items, preferred)
    for item in items:
        opts = item.opts
        check_served(opts, manager, args, item.opts_path)
        if item.marked is not None:
            check_read_once(manager, item.path)
        elif item.text is not None and opts and (opts.answer_tokens or opts.chunk_ids) and manager.tokenizer:
            check_fit(opts, len(manager.tokenizer.encode(item.text)), item.opts_path)
    if any(item.is_tokenized_here for item in items):
        items = [_tokenize(item, manager) for item in items]
        for item in items:
            _check_not_empty(item.ids or (), obj, item.path)
        ids = [item.ids for item in items]
        is_batch = _prompts(obj.text, obj.input_ids)[1]
        obj.text, obj.input_ids = None, ids if is_batch else ids[0]
    if _is_turn(obj):
        for item in items:
            if item.opts is not None and item.opts.keep_tokens:
                raise keeps_all_error("a turn of a session", item.opts_path)
        items = [_as_turn(item, obj.session_params, manager) for item in items]
    for item in items:
        _check_ids(item, manager)
        if item.opts is not None:
            check_rows(item.opts, args.ratio, most_unknown_rows(), item.opts_path)
    obj.sampling_params = _with_options(obj.sampling_params, [item.opts for item in items], preferred)


def _check_combinations(obj: Any, items: list[Item], preferred: Mapping[str, Any]) -> None:
    has_marks = any(item.marked or (item.opts and item.opts.spans) for item in items)
    if has_marks and obj.text is not None and obj.input_ids is not None:
        raise request_error("input_ids", "chunks are marked and there is a text too", "send one of the two")
    if obj.mm_hashes:  # the keys of chunks follow from them, so a chunk could be stored under the name of another image
        problem = "hashes of images cannot be combined with marked chunks or chunk_cache options"
        raise request_error("mm_hashes", problem, "leave them out; the server computes them")
    for one in each(obj.sampling_params):
        if {**preferred, **(one if isinstance(one, Mapping) else {})}.get("beam_width") not in (None, 1):
            problem = "beam search cannot be combined with marked chunks or chunk_cache options"
            raise request_error("sampling_params.beam_width", problem, "drop one of the two")


def _tokenize(item: Item, manager: Any) -> Item:
    """The item with its ids; in a batch every text gets ids, since SGLang takes either texts or ids."""
    if item.text is None:
        return item
    if manager.tokenizer is None:
        problem = "the server runs with --skip-tokenizer-init and cannot split text"
        raise request_error(item.path, problem, f"send input_ids and {item.opts_path}.spans")
    if item.marked is not None:
        assert item.opts is not None
        encoded = encode_marked(manager.tokenizer, item.marked)
        check_named_once(encoded, item.opts.chunk_ids, item.opts_path)
        opts = item.opts.with_spans(encoded.spans, encoded.chunk_ids or item.opts.chunk_ids)
        if len(encoded.spans) > MAX_CHUNKS:
            problem = f"{len(encoded.spans)} chunks, and {MAX_CHUNKS} is the limit"
            raise request_error(item.path, problem, "mark longer chunks")
        check_fit(opts, len(encoded.ids), item.opts_path)
        return dataclasses.replace(item, ids=encoded.ids, opts=opts, marks=encoded.marks)
    ids = manager.tokenizer.encode(item.text)
    if item.opts is not None:
        check_fit(item.opts, len(ids), item.opts_path)
    return dataclasses.replace(item, ids=ids)


def check_named_once(encoded: MarkedIds, chunk_ids: object, opts_path: str) -> None:
    """Checks that a client names its chunks in one way.

    Args:
        chunk_ids: those of the options, of any type.
        opts_path: of the options.

    Raises:
        ChunkCacheRequestError: chunks have an id of their own, and one of the options too.
    """
    named = next((mark.path for mark in encoded.marks if mark.id), None)
    if named is not None and chunk_ids not in (None, [], ()):
        raise request_error(
            f"{opts_path}.chunk_ids", f"{named} has an id of its own", "name chunks in one of the two ways"
        )


def _as_turn(item: Item, session_params: Mapping[str, Any], manager: Any) -> Item:
    """The item with spans that count from the first of its tokens that SGLang appends to the session.

    `Session.create_req` leaves out a BOS where there is something in front of it.
    """
    if item.ids is None or item.opts is None or not item.opts.spans:
        return item
    tokenizer = manager.tokenizer
    is_cut = session_params.get("rid") is not None and tokenizer is not None and item.ids[0] == tokenizer.bos_token_id
    num_cut = int(is_cut)
    spans = tuple((max(start - num_cut, 0), end - num_cut) for start, end in item.opts.spans)
    if spans[0][1] == 0:
        problem = "the first chunk is the BOS token, which is left out of a turn that continues a session"
        raise request_error(item.path, problem, "mark it without that token")
    opts = dataclasses.replace(item.opts, spans=spans, turn_tokens=len(item.ids) - num_cut)
    return dataclasses.replace(item, opts=opts)


def _check_ids(item: Item, manager: Any) -> None:
    """Refuses a marked prompt that is too long; it is never truncated, since its spans would be wrong."""
    if item.ids is not None and item.opts is not None and item.opts.spans:
        spans = item.opts.spans
        paths = [mark.path for mark in item.marks] or [f"{item.opts_path}.spans[{i}]" for i in range(len(spans))]
        check_length(len(item.ids), spans, paths, manager, item.path)


def _check_not_empty(ids: Sequence[int], obj: Any, path: str) -> None:
    """Checks that a prompt, also an unmarked one, has tokens: an empty one crashes stock SGLang.

    A turn may be empty: SGLang puts the history of the session in front of it, and refuses it if all is empty.
    """
    if not ids and not _is_turn(obj):
        raise request_error(path, "a prompt without tokens", "give at least one token")


def _check_has_tokens(text: str, obj: Any, manager: Any, path: str) -> None:
    """Checks that an unmarked text has tokens: without a BOS the tokenizer may make none of it."""
    if manager.tokenizer is None:
        return
    begin = text[:_BEGIN_LEN]
    ids = manager.tokenizer.encode(begin) or (manager.tokenizer.encode(text) if begin != text else [])
    if not text and manager.mm_processor is not None and obj.contains_mm_input():
        ids = []  # a text without a place for the image is no prompt, even behind a BOS
    _check_not_empty(ids, obj, path)


def _is_turn(obj: Any) -> bool:
    """Whether a request is a turn of a session."""
    params = obj.session_params
    return isinstance(params, Mapping) and params.get("id") is not None


class PromptTooLong(ChunkCacheRequestError):
    """A marked prompt does not fit into the context."""

    num_tokens: int


def check_length(num_tokens: int, spans: Sequence[Span], paths: Sequence[str], manager: Any, path: str) -> None:
    """Checks that a marked prompt fits into the context, also with --allow-auto-truncate.

    Args:
        spans, paths: of its chunks.
        path: of the prompt.

    Raises:
        PromptTooLong: it does not; a chunk that does not fit by itself is named.
    """
    for (start, end), where in zip(spans, paths, strict=True):
        if end - start >= manager.context_len:
            raise _too_long(where, "chunk", end - start, num_tokens, manager)
    if num_tokens + manager.num_reserved_tokens >= manager.context_len:
        raise _too_long(path, "prompt", num_tokens, num_tokens, manager)


def _too_long(path: str, what: str, length: int, num_tokens: int, manager: Any) -> PromptTooLong:
    problem = f"the {what} has {length} tokens and the context length of the model is {manager.context_len}"
    error = user_error(PromptTooLong, path, problem, f"shorten the {what}")
    error.num_tokens = num_tokens
    return error


def _with_options(sampling_params: Any, opts: list[RequestOptions | None], preferred: Mapping[str, Any]) -> Any:
    """A copy of `sampling_params` that carries the options of each prompt; one object where all are equal.

    Args:
        preferred: of the server (`--preferred-sampling-params`), for parameters that a request leaves out.
    """
    if not isinstance(sampling_params, (list, tuple)):
        if all(other == opts[0] for other in opts):
            return _with_one(sampling_params, opts[0], preferred)
        sampling_params = [sampling_params] * len(opts)
    return [_with_one(params, one, preferred) for params, one in zip(sampling_params, opts, strict=False)]


def _with_one(
    params: Mapping[str, Any] | None, opts: RequestOptions | None, preferred: Mapping[str, Any]
) -> dict[str, Any]:
    copied = dict(params or {})
    if opts is not None:
        others = _custom_params(copied if "custom_params" in copied else preferred)
        copied["custom_params"] = {**others, KEY: dumps(opts)}
    return copied


def may_get_reply(obj: Any, args: ChunkCacheArgs | None) -> bool:
    """Whether a prepared request may get a reply: a prompt of it has marks or options, or is a turn of a session.

    With `--chunk-cache-discover` every request may: the server may find chunks in it that nobody marked.
    """
    if args is not None and args.discover:
        return True
    has_options = any(KEY in _custom_params(one) for one in each(getattr(obj, "sampling_params", None)))
    return has_options or getattr(obj, "session_params", None) is not None
