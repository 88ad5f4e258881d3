"""What one request asks for: its marked chunks and its options.

`parse_request` checks everything a client may send and is the only place that does; `dumps` and `loads` carry the
checked value between processes as one JSON string. A `RequestOptions` never changes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile, zip_longest

from chunk_cache.errors import given, known_names, request_error, show
from chunk_cache.methods import METHODS, Options, OptionValue, find_method
from chunk_cache.methods.method_options import budget_in
from chunk_cache.options.kept_tokens import check_room
from chunk_cache.types import Span

DEFAULT_PATH = "sampling_params.custom_params.chunk_cache"
MODES = ("auto", "exact", "off", "prepare", "warm")
PREPARING = ("prepare", "warm")
"""Modes in which the last chunk is kept for any prompt."""
EXACT_MODES = ("exact", "warm")
"""Modes in which only exact prefixes are reused."""
MAX_POSITION = 2**31 - 1
MAX_CHUNKS = 1024
"""Most chunks in one prompt: what is kept and compared for each grows with the number of chunks in front of it."""
KEYS = ("spans", "chunk_ids", "mode", "method", "ratio", "options", "explain", "answer_tokens", "keep_tokens")

_OPTION_NAMES = sorted({option.name for method in METHODS.values() for option in method.options_schema})


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """The checked options of one request; `None` means the server's default."""

    spans: tuple[Span, ...] = ()
    """Half-open ranges of prompt positions, ascending, disjoint, not empty."""
    chunk_ids: tuple[str | None, ...] = ()
    """The client's names of its chunks, in their order; the reply and the administration show them."""
    mode: str = "auto"
    """One of `MODES`. `exact`: only exact prefixes are reused; `off`: chunks are neither looked up nor remembered;
    `prepare`: the last chunk is computed behind the others, which are reused, and kept for any prompt; `warm`: the
    same, and all is computed exactly."""
    method: str | None = None
    """Name of the method that chooses which tokens of reused chunks are computed again."""
    ratio: float | None = None
    """Share of the tokens of reused chunks that is computed again, 0 to 1."""
    options: Options = ()
    """The method's own parameters by name, such as `{"drift": 0.5}`."""
    explain: bool = False
    """Whether the reply shows the plan as a table, and more about every chunk."""
    answer_tokens: int = 0
    """Tokens at the end of the prompt that begin the answer: they are computed, and are no part of the question."""
    keep_tokens: int | None = None
    """Slots per layer that the prompt takes once the first token of the answer is known; 0 = all are kept."""
    turn_tokens: int | None = None
    """For a turn of a session: its tokens at the end of the prompt, in which spans count; None = they count in all."""

    @property
    def named_spans(self) -> list[tuple[Span, str | None]]:
        """Each span with the client's name of it."""
        return list(zip_longest(self.spans, self.chunk_ids))

    def with_spans(self, spans: Sequence[Span], chunk_ids: Sequence[str | None] = ()) -> RequestOptions:
        """The same with other chunks, and the client's names of them; empty = there are none."""
        return replace(self, spans=tuple(spans), chunk_ids=tuple(chunk_ids) if any(chunk_ids) else ())

    @property
    def has_marks(self) -> bool:
        return bool(self.spans)

    @property
    def remembers(self) -> bool:
        """Whether the chunks of this request may enter the index."""
        return self.mode != "off"

    @property
    def names_method(self) -> bool:
        """Whether the client says how chunks are reused, which the server then must not change."""
        return self.method is not None or self.ratio is not None

    def option(self, name: str, default: OptionValue) -> OptionValue:
        """One of the method's parameters."""
        return dict(self.options).get(name, default)


def parse_request(
    value: object,
    *,
    path: str = DEFAULT_PATH,
    num_tokens: int | None = None,
    default_method: str | None = None,
    default_options: Options = (),
) -> RequestOptions:
    """Check what a client sent.

    Args:
        value: the decoded JSON value; null in it counts as not given.
        path: where it stood, for messages.
        num_tokens: length of the prompt when it is known; spans must end within it.
        default_method: the server's method, which checks `options` when the request names none, and is then
            written into the result, because options mean nothing without their method.
        default_options: the server's, which the request's must fit.

    Raises:
        ChunkCacheRequestError: anything that is not in the contract.
    """
    if not isinstance(value, Mapping):
        raise request_error(path, f"{show(value)} is not an object", 'give an object such as {"spans": [[0, 16]]}')
    for key in value:
        if key not in KEYS:
            raise request_error(path, f"unknown key {show(key)}", known_names(key, KEYS))
    value = given(value)
    method = find_method(value["method"], f"{path}.method").name if "method" in value else None
    options = _parse_options(value.get("options", {}), f"{path}.options", method or default_method, default_options)
    _check_budget(options, f"{path}.options", has_ratio="ratio" in value)
    opts = RequestOptions(
        spans=_parse_spans(value.get("spans", []), f"{path}.spans"),
        chunk_ids=_parse_chunk_ids(value.get("chunk_ids", []), f"{path}.chunk_ids"),
        mode=_parse_mode(value.get("mode", "auto"), f"{path}.mode"),
        method=method or (default_method if options else None),
        ratio=_parse_ratio(value["ratio"], f"{path}.ratio") if "ratio" in value else None,
        options=options,
        explain=_parse_bool(value.get("explain", False), f"{path}.explain"),
        answer_tokens=_parse_count(value.get("answer_tokens", 0), f"{path}.answer_tokens"),
        keep_tokens=_parse_count(value["keep_tokens"], f"{path}.keep_tokens") if "keep_tokens" in value else None,
    )
    if num_tokens is not None:
        check_fit(opts, num_tokens, path)
    return opts


def check_fit(opts: RequestOptions, num_tokens: int, path: str = DEFAULT_PATH) -> None:
    """Checks that spans, their ids, the answer behind them and what is kept fit a prompt; `path`: of the options.

    Raises:
        ChunkCacheRequestError: one does not.
    """
    for i, (_, end) in enumerate(opts.spans):
        if end > num_tokens:
            problem = f"{show(end)} is outside the prompt of {num_tokens} tokens"
            raise request_error(f"{path}.spans[{i}][1]", problem, "end the span within the prompt")
    if opts.chunk_ids and len(opts.chunk_ids) != len(opts.spans):
        problem = f"{len(opts.chunk_ids)} for {len(opts.spans)} chunks"
        raise request_error(f"{path}.chunk_ids", problem, "give one string or null for each chunk")
    room = num_tokens - (opts.spans[-1][1] if opts.spans else 0)
    if opts.answer_tokens > room:
        problem = f"{opts.answer_tokens}, and {room} tokens stand behind the last chunk"
        raise request_error(f"{path}.answer_tokens", problem, "count only the tokens that begin the answer")
    check_room(opts.spans, opts.keep_tokens, num_tokens, f"{path}.keep_tokens")


def with_earlier_turns(
    options: RequestOptions | None,
    before: RequestOptions | None,
    token_ids: Sequence[int],
    earlier_ids: Sequence[int] | None,
    *,
    num_uncut: int,
) -> RequestOptions | None:
    """The options of a turn of a session, with spans of the whole prompt; the chunks of earlier turns come first.

    A turn that says nothing but which its chunks are has the options of the turn in front of it, save what only that
    one can mean: its answer, and that its last chunk is prepared. An earlier chunk counts as long as its tokens are
    where they were: a turn may drop the end of the history. Of more chunks than a prompt may have, the newest count.

    Args:
        options, before: of this turn, and of the one in front of it; None = it has none.
        token_ids, earlier_ids: the whole prompts of the two.
        num_uncut: tokens of this prompt before it was cut.
    """
    own = [] if options is None else options.named_spans
    if options is not None and options.turn_tokens is not None:
        begin = num_uncut - options.turn_tokens
        own = [((begin + start, begin + end), name) for (start, end), name in own]
    own_start = own[0][0][0] if own else len(token_ids)

    def still_stands(named: tuple[Span, str | None]) -> bool:
        (start, end), _ = named
        return earlier_ids is not None and end <= own_start and token_ids[start:end] == earlier_ids[start:end]

    names_chunks_only = options is None or replace(options, turn_tokens=None).with_spans(()) == RequestOptions()
    if names_chunks_only and before is not None:
        options = replace(before, answer_tokens=0, mode="auto" if before.mode in PREPARING else before.mode)
    if options is None:
        return None
    earlier = [] if before is None else before.named_spans
    chunks = [*takewhile(still_stands, earlier), *own][-MAX_CHUNKS:]
    return replace(options, turn_tokens=None).with_spans([span for span, _ in chunks], [name for _, name in chunks])


def dumps(opts: RequestOptions) -> str:
    """One JSON string; `loads` gives back an equal value."""
    fields: dict[str, object] = {"spans": opts.spans, "mode": opts.mode, "explain": opts.explain}
    if opts.chunk_ids:
        fields["chunk_ids"] = opts.chunk_ids
    if opts.options:
        fields["options"] = dict(opts.options)
    for name in ("method", "ratio", "keep_tokens"):
        if getattr(opts, name) is not None:
            fields[name] = getattr(opts, name)
    if opts.answer_tokens:
        fields["answer_tokens"] = opts.answer_tokens
    if opts.turn_tokens is not None:
        fields["turn_tokens"] = opts.turn_tokens
    return json.dumps(fields, separators=(",", ":"))


def loads(text: str) -> RequestOptions:
    """The value that `dumps` wrote; what it holds was checked before and is not checked again.

    Raises:
        ChunkCacheRequestError: `dumps` did not write it.
    """
    try:
        fields = json.loads(text)
        options = fields.pop("options", {}).items()
        return RequestOptions(
            spans=tuple((start, end) for start, end in fields.pop("spans")),
            chunk_ids=tuple(fields.pop("chunk_ids", ())),
            options=tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in options),
            **fields,
        )
    except (ValueError, AttributeError, TypeError, KeyError) as error:
        raise request_error(
            DEFAULT_PATH, f"not an option string ({error})", "pass the string that dumps() wrote"
        ) from error


def _parse_chunk_ids(value: object, path: str) -> tuple[str | None, ...]:
    if not isinstance(value, (list, tuple)):
        raise request_error(path, f"{show(value)} is not a list", "give one string or null for each chunk")
    for i, one in enumerate(value):
        if one is not None and not (isinstance(one, str) and one):
            raise request_error(f"{path}[{i}]", f"{show(one)} is not a text", "name the chunk, or give null")
    return tuple(value) if any(value) else ()


def _parse_spans(value: object, path: str) -> tuple[Span, ...]:
    if not isinstance(value, (list, tuple)):
        raise request_error(path, f"{show(value)} is not a list", "give a list of [start, end] pairs")
    spans = []
    previous_end = 0
    for i, item in enumerate(value):
        span = _parse_span(item, f"{path}[{i}]")
        if span[0] < previous_end:
            problem = f"starts at {span[0]}, before the end {previous_end} of the span before it"
            raise request_error(f"{path}[{i}][0]", problem, "give ascending spans that do not overlap")
        previous_end = span[1]
        spans.append(span)
    if len(spans) > MAX_CHUNKS:
        problem = f"one of {len(spans)} chunks, and {MAX_CHUNKS} is the limit"
        raise request_error(f"{path}[{MAX_CHUNKS}]", problem, "mark longer chunks")
    return tuple(spans)


def _parse_span(item: object, path: str) -> Span:
    if not isinstance(item, (list, tuple)) or len(item) != 2:
        raise request_error(path, f"{show(item)} is not a [start, end] pair", "give a list of two integers")
    for j, bound in enumerate(item):
        if isinstance(bound, bool) or not isinstance(bound, int):
            raise request_error(f"{path}[{j}]", f"{show(bound)} is not an integer", "give a token position")
        if not 0 <= bound <= MAX_POSITION:
            raise request_error(f"{path}[{j}]", f"{show(bound)} is not a token position", "count positions from 0")
    start, end = item
    if start >= end:
        raise request_error(path, f"[{show(start)}, {show(end)}] is empty", "let the end lie behind the start")
    return start, end


def _parse_mode(value: object, path: str) -> str:
    if not isinstance(value, str) or value not in MODES:
        raise request_error(path, f"unknown mode {show(value)}", f"known modes: {', '.join(MODES)}")
    return value


def _parse_ratio(value: object, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1:
        raise request_error(path, f"{show(value)} is not a number in [0, 1]", "give a number from 0 to 1")
    return float(value) + 0.0  # -0.0 becomes 0.0


def _parse_count(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_POSITION:
        raise request_error(path, f"{show(value)} is not a number of tokens", "give an integer from 0")
    return value


def _check_budget(options: Options, path: str, *, has_ratio: bool) -> None:
    budget = budget_in(options)
    if budget is not None and has_ratio:
        problem = "given beside a ratio, which says the same budget"
        raise request_error(f"{path}.{budget}", problem, "give one of them")


def _parse_options(value: object, path: str, method: str | None, defaults: Options) -> Options:
    if not isinstance(value, Mapping):
        raise request_error(path, f"{show(value)} is not an object", "give an object with the method's parameters")
    for name in value:
        if value[name] is None and name not in _OPTION_NAMES:
            raise request_error(path, f"no method has the key {show(name)}", known_names(name, _OPTION_NAMES))
    value = given(value)
    if not value:
        return ()
    if method is None:
        raise request_error(path, "given without a method", 'name the method they belong to in "method"')
    found = find_method(method, path)
    checked = found.check_options(found.with_defaults(value, defaults), path)
    return tuple((name, one) for name, one in checked if name in value)


def _parse_bool(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise request_error(path, f"{show(value)} is not a boolean", "give true or false")
    return value
