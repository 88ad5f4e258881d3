from __future__ import annotations

import dataclasses
import json
import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.methods import METHODS
from chunk_cache.options.request_options import (
    DEFAULT_PATH,
    KEYS,
    MAX_CHUNKS,
    MODES,
    RequestOptions,
    dumps,
    loads,
    parse_request,
    with_earlier_turns,
)
from unit.scheduler.method_suite import given_options


@st.composite
def span_lists(draw: st.DrawFn) -> list[list[int]]:
    position, spans = 0, []
    for gap, length in draw(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 500)), max_size=8)):
        spans.append([position + gap, position + gap + length])
        position = spans[-1][1]
    return spans


@st.composite
def legal_requests(draw: st.DrawFn) -> dict[str, Any]:
    method = draw(st.sampled_from(sorted(METHODS)))
    options = draw(given_options(METHODS[method]))
    value = {
        "spans": (spans := draw(span_lists())),
        "chunk_ids": [draw(st.none() | st.text(min_size=1, max_size=3)) for _ in spans],
        "mode": draw(st.sampled_from(MODES)),
        "method": method,
        "ratio": draw(st.floats(0, 1) | st.sampled_from([0, 1])),
        "options": options,
        "explain": draw(st.booleans()),
        "answer_tokens": draw(st.integers(0, 300)),
        "keep_tokens": draw(st.integers(0, 2000)),
    }
    dropped = draw(st.sets(st.sampled_from(sorted(set(value) - ({"method"} if options else set())))))
    if options.get("alpha") or options.get("ends"):
        dropped.add("ratio")  # the budget is one or the other
    return {key: item for key, item in value.items() if key not in dropped}


@given(legal_requests())
def test_round_trip_is_exact(value: dict[str, Any]) -> None:
    opts = parse_request(value)
    text = dumps(opts)
    assert loads(text) == opts
    assert dumps(loads(text)) == text
    assert parse_request(json.loads(json.dumps(value))) == opts
    assert opts.spans == tuple(tuple(span) for span in value.get("spans", []))
    assert not opts.spans or opts.chunk_ids in ((), tuple(value.get("chunk_ids", ())))
    assert opts.has_marks == bool(value.get("spans"))
    for name in ("mode", "method", "ratio", "explain"):
        if name in value:
            assert getattr(opts, name) == value[name]
    assert hash(opts) == hash(loads(text))


def test_ratio_and_alpha_are_two_budgets() -> None:
    path = re.escape(
        f"{DEFAULT_PATH}.options.alpha: given beside a ratio, which says the same budget; give one of them"
    )
    with pytest.raises(ChunkCacheRequestError, match=path):
        parse_request({"method": "cache-craft", "ratio": 0.5, "options": {"alpha": 1.0}})
    assert parse_request({"method": "cache-craft", "ratio": 0.5, "options": {"alpha": 0}}).ratio == 0.5


def test_ratio_and_ends_are_two_budgets() -> None:
    with pytest.raises(ChunkCacheRequestError, match=r"options\.ends: given beside a ratio, .* give one of them"):
        parse_request({"method": "lego-link", "ratio": 0.5, "options": {"ends": 20}})
    assert parse_request({"method": "lego-link", "options": {"ends": 20}}).options == (("ends", 20),)


def test_options_must_fit_those_of_the_server() -> None:
    server = (("group_size", 8), ("group_threshold", 3))

    def parsed(**options: int) -> object:
        return parse_request({"method": "epic", "options": options}, default_options=server).options

    assert parsed(group_threshold=6) == (("group_threshold", 6),)  # of windows of 8
    assert parsed(group_size=0) == (("group_size", 0),)
    with pytest.raises(ChunkCacheRequestError, match=r"group_threshold: no window of 8 tokens has more than 8 of them"):
        parsed(group_threshold=8)


def test_empty_object_means_the_defaults() -> None:
    assert parse_request({}) == RequestOptions()
    assert RequestOptions() == RequestOptions(spans=(), mode="auto", method=None, ratio=None, options=(), explain=False)
    assert not RequestOptions().has_marks


def test_options_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        parse_request({}).mode = "off"  # type: ignore[misc]


def test_only_mode_off_remembers_nothing() -> None:
    assert [mode for mode in MODES if not parse_request({"mode": mode}).remembers] == ["off"]


def test_ratio_is_a_float_without_a_sign() -> None:
    opts = parse_request({"ratio": 1})
    assert isinstance(opts.ratio, float)
    assert math.copysign(1.0, parse_request({"ratio": -0.0}).ratio or 0.0) == 1.0


def test_option_falls_back_to_the_default() -> None:
    assert parse_request({"method": "random", "options": {"seed": 3}}).option("seed", 0) == 3
    assert parse_request({"method": "random"}).option("seed", 9) == 9


@pytest.mark.parametrize(
    ("method", "given_options", "checked"),
    [
        ("fusionrag", {"layers": [0, 3, 11]}, (("layers", (0, 3, 11)),)),
        ("fusionrag", {"layers": "all", "top_k": "chunk"}, (("layers", "all"), ("top_k", "chunk"))),
        ("cacheblend", {"filter_share": 1 / 3, "first_ratio": 2}, (("filter_share", 1 / 3), ("first_ratio", 2.0))),
        ("epic", {"shift": 0, "focus_window": 3}, (("focus_window", 3), ("shift", 0))),
        ("random", {"seed": 2**63 - 1}, (("seed", 2**63 - 1),)),
    ],
)
def test_lists_numbers_and_words_come_through(method: str, given_options: dict[str, Any], checked: object) -> None:
    opts = parse_request({"method": method, "options": given_options})
    assert opts.options == checked
    assert loads(dumps(opts)) == opts
    assert [type(value) for _, value in loads(dumps(opts)).options] == [type(value) for _, value in opts.options]
    assert {opts: 1}[loads(dumps(opts))] == 1


def test_options_without_a_method_belong_to_the_default_method() -> None:
    opts = parse_request({"options": {"seed": 3}}, default_method="random")
    assert (opts.method, opts.options) == ("random", (("seed", 3),))
    assert loads(dumps(opts)) == opts
    assert parse_request({}, default_method="random").method is None


@given(legal_requests())
def test_null_is_not_given(value: dict[str, Any]) -> None:
    method = METHODS[value.get("method", "epic")]
    options = dict.fromkeys(option.name for option in method.options_schema) | value.get("options", {})
    assert parse_request({**dict.fromkeys(KEYS), **value, "options": options}) == parse_request(value)


P = DEFAULT_PATH
BAD = [
    (None, f"{P}: null is not an object; "),
    ([], f"{P}: [] is not an object; "),
    ("{}", f"{P}: '{{}}' is not an object; "),
    (True, f"{P}: true is not an object; "),
    ({"span": []}, f"{P}: unknown key 'span'; did you mean spans? known keys: {', '.join(KEYS)}"),
    ({"answer_tokens": -1}, f"{P}.answer_tokens: -1 is not a number of tokens; give an integer from 0"),
    ({"answer_tokens": 1.0}, f"{P}.answer_tokens: 1.0 is not a number of tokens; "),
    ({"answer_tokens": True}, f"{P}.answer_tokens: true is not a number of tokens; "),
    ({"answer_tokens": 2**31}, f"{P}.answer_tokens: 2147483648 is not a number of tokens; "),
    ({"keep_tokens": -1}, f"{P}.keep_tokens: -1 is not a number of tokens; give an integer from 0"),
    ({"keep_tokens": 2**31}, f"{P}.keep_tokens: 2147483648 is not a number of tokens; "),
    (
        {"spans": [[10, 90]], "keep_tokens": 42},
        f"{P}.keep_tokens: 42, and 42 tokens are kept in any case: what stands in front of the first chunk and "
        "behind the last, and the last 32; give more, or 0 to keep all",
    ),
    ({"answer_tokens": 101}, f"{P}.answer_tokens: 101, and 100 tokens stand behind the last chunk; "),
    (
        {"spans": [[0, 90]], "answer_tokens": 11},
        f"{P}.answer_tokens: 11, and 10 tokens stand behind the last chunk; count only the tokens that begin",
    ),
    ({"chunks": []}, f"{P}: unknown key 'chunks'; known keys: "),
    ({3: 1}, f"{P}: unknown key 3; "),
    ({"spans": {}}, f"{P}.spans: {{}} is not a list; "),
    ({"spans": "ab"}, f"{P}.spans: 'ab' is not a list; "),
    ({"spans": [0, 4]}, f"{P}.spans[0]: 0 is not a [start, end] pair; "),
    ({"spans": [[0]]}, f"{P}.spans[0]: [0] is not a [start, end] pair; "),
    ({"spans": [[0, 1, 2]]}, f"{P}.spans[0]: [0, 1, 2] is not a [start, end] pair; "),
    ({"spans": [[0, 1, 10**5000]]}, f"{P}.spans[0]: [0, 1, a huge integer] is not a [start, end] pair; "),
    ({"spans": [[0, 1], {}]}, f"{P}.spans[1]: {{}} is not a [start, end] pair; "),
    ({"spans": [[0, True]]}, f"{P}.spans[0][1]: true is not an integer; "),
    ({"spans": [[0, 1], [2.0, 3]]}, f"{P}.spans[1][0]: 2.0 is not an integer; "),
    ({"spans": [["0", 3]]}, f"{P}.spans[0][0]: '0' is not an integer; "),
    ({"spans": [[None, 3]]}, f"{P}.spans[0][0]: null is not an integer; "),
    ({"spans": [[-1, 3]]}, f"{P}.spans[0][0]: -1 is not a token position; "),
    ({"spans": [[0, 2**31]]}, f"{P}.spans[0][1]: 2147483648 is not a token position; "),
    ({"spans": [[0, 10**5000]]}, f"{P}.spans[0][1]: a huge integer is not a token position; "),
    ({"spans": [[3, 3]]}, f"{P}.spans[0]: [3, 3] is empty; "),
    ({"spans": [[3, 2]]}, f"{P}.spans[0]: [3, 2] is empty; "),
    ({"spans": [[0, 4], [3, 6]]}, f"{P}.spans[1][0]: starts at 3, before the end 4 of the span before it; "),
    ({"spans": [[5, 6], [0, 2]]}, f"{P}.spans[1][0]: starts at 0, before the end 6 of the span before it; "),
    ({"spans": [[0, 2], [0, 2]]}, f"{P}.spans[1][0]: starts at 0, before the end 2 of the span before it; "),
    ({"spans": [[0, 101]]}, f"{P}.spans[0][1]: 101 is outside the prompt of 100 tokens; "),
    ({"chunk_ids": "a"}, f"{P}.chunk_ids: 'a' is not a list; "),
    ({"chunk_ids": [None, ""]}, f"{P}.chunk_ids[1]: '' is not a text; "),
    ({"spans": [[0, 2]], "chunk_ids": ["a", "b"]}, f"{P}.chunk_ids: 2 for 1 chunks; "),
    ({"mode": "fast"}, f"{P}.mode: unknown mode 'fast'; known modes: auto, exact, off, prepare"),
    ({"mode": []}, f"{P}.mode: unknown mode []; "),
    ({"method": "best"}, f"{P}.method: unknown method 'best'; known methods: {', '.join(METHODS)}"),
    ({"method": "cache_blend"}, f"{P}.method: unknown method 'cache_blend'; known methods: full-reuse, "),
    ({"ratio": 1.01}, f"{P}.ratio: 1.01 is not a number in [0, 1]; "),
    ({"ratio": -0.1}, f"{P}.ratio: -0.1 is not a number in [0, 1]; "),
    ({"ratio": True}, f"{P}.ratio: true is not a number in [0, 1]; "),
    ({"ratio": "0.5"}, f"{P}.ratio: '0.5' is not a number in [0, 1]; "),
    ({"ratio": math.nan}, f"{P}.ratio: nan is not a number in [0, 1]; "),
    ({"ratio": math.inf}, f"{P}.ratio: inf is not a number in [0, 1]; "),
    ({"ratio": 10**5000}, f"{P}.ratio: a huge integer is not a number in [0, 1]; "),
    ({"options": []}, f"{P}.options: [] is not an object; "),
    ({"options": {"seed": 1}}, f"{P}.options: given without a method; "),
    ({"method": "epic", "options": {"k": 1}}, f"{P}.options: unknown key 'k' for method 'epic'; "),
    ({"method": "epic", "options": {"k": None}}, f"{P}.options: no method has the key 'k'; "),
    ({"options": {"ratios": None}}, f"{P}.options: no method has the key 'ratios'; "),
    ({"method": "random", "options": {"seed": "x"}}, f"{P}.options.seed: 'x' is not an integer in [0, "),
    ({"method": "a3", "options": {"check_layer": True}}, f"{P}.options.check_layer: true is not an integer in [0, "),
    ({"method": "a3", "options": {"top_k": "all"}}, f"{P}.options.top_k: unknown value 'all'; known values: global, "),
    ({"method": "fusionrag", "options": {"layers": [2, 1]}}, f"{P}.options.layers: [2, 1] does not ascend; "),
    ({"method": "epic", "options": {"group_threshold": 3}}, f"{P}.options.group_threshold: given without group_size; "),
    ({"explain": 1}, f"{P}.explain: 1 is not a boolean; "),
]


@pytest.mark.parametrize(("value", "message"), BAD, ids=[message[:70] for _, message in BAD])
def test_bad_requests_name_the_path_and_the_remedy(value: object, message: str) -> None:
    with pytest.raises(ChunkCacheRequestError) as caught:
        parse_request(value, num_tokens=100)
    text = str(caught.value)
    assert text.startswith(message)
    assert "\n" not in text
    assert len(text) < 300


def test_the_path_is_the_callers() -> None:
    with pytest.raises(ChunkCacheRequestError, match=r"^sampling_params\[2\]\.x\.ratio: 2 is not"):
        parse_request({"ratio": 2}, path="sampling_params[2].x")


def test_spans_may_end_with_the_prompt_and_touch_each_other() -> None:
    value = {"spans": [[0, 40], [40, 100]]}
    assert parse_request(value, num_tokens=100).spans == ((0, 40), (40, 100))
    assert parse_request({"spans": [(0, 40)]}).spans == ((0, 40),)  # in-process callers may use tuples


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=3), inner),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from([*KEYS, "other"]), JSON) | JSON)
def test_anything_is_either_legal_or_one_kind_of_error(value: object) -> None:
    try:
        opts = parse_request(value)
    except ChunkCacheRequestError as error:
        assert str(error).startswith(P)  # noqa: PT017
    else:
        assert loads(dumps(opts)) == opts


@pytest.mark.parametrize("text", ["", "{", "[]", '{"a": 1}'])
def test_loads_refuses_what_dumps_did_not_write(text: str) -> None:
    with pytest.raises(ChunkCacheRequestError):
        loads(text)


def test_the_number_of_chunks_is_bounded() -> None:
    spans = [[i, i + 1] for i in range(MAX_CHUNKS + 1)]
    assert len(parse_request({"spans": spans[1:]}).spans) == MAX_CHUNKS
    with pytest.raises(ChunkCacheRequestError, match=r"\.spans\[1024\]: one of 1025 chunks, and 1024 is the limit;"):
        parse_request({"spans": spans})


def test_a_turn_has_the_chunks_of_earlier_turns_that_still_stand() -> None:
    before = RequestOptions(spans=((1, 3), (3, 5)), chunk_ids=("a", None), ratio=0.5)
    ids, earlier_ids = [*range(14)], [*range(9)]
    assert with_earlier_turns(None, None, ids, None, num_uncut=14) is None
    assert with_earlier_turns(None, before, ids, earlier_ids, num_uncut=14) == before
    own = RequestOptions(spans=((1, 4),), chunk_ids=("c",), turn_tokens=6, ratio=0.3)
    told = with_earlier_turns(own, before, ids, earlier_ids, num_uncut=14)
    assert told == RequestOptions(spans=((1, 3), (3, 5), (9, 12)), chunk_ids=("a", None, "c"), ratio=0.3)
    assert with_earlier_turns(own, before, ids, [0, 1, 2, 9, 9], num_uncut=14) == RequestOptions(
        spans=((1, 3), (9, 12)), chunk_ids=("a", "c"), ratio=0.3
    ), "the second was dropped from the history"


@pytest.mark.parametrize("own", [None, RequestOptions(spans=((0, 2),), turn_tokens=4)])
def test_a_turn_that_names_chunks_at_most_has_the_options_of_the_turn_before(own: RequestOptions | None) -> None:
    ids = [*range(9)]
    for before, inherited in (
        (RequestOptions(mode="exact", explain=True), RequestOptions(mode="exact", explain=True)),
        (RequestOptions(mode="off"), RequestOptions(mode="off")),
        (RequestOptions(ratio=1.0, method="epic"), RequestOptions(ratio=1.0, method="epic")),
        (RequestOptions(mode="warm"), RequestOptions()),
        (RequestOptions(mode="prepare", ratio=0.2), RequestOptions(ratio=0.2)),
        (RequestOptions(answer_tokens=3), RequestOptions()),
    ):
        told = with_earlier_turns(own, before, ids, ids[:5], num_uncut=9)
        assert told == inherited.with_spans([] if own is None else [(5, 7)])


def test_of_more_chunks_than_a_prompt_may_have_the_newest_count() -> None:
    before = RequestOptions(spans=tuple((i, i + 1) for i in range(MAX_CHUNKS)))
    ids = [*range(MAX_CHUNKS + 2)]
    own = RequestOptions(spans=((0, 2),), turn_tokens=2)
    told = with_earlier_turns(own, before, ids, ids, num_uncut=len(ids))
    assert told is not None
    assert (len(told.spans), told.spans[0], told.spans[-1]) == (MAX_CHUNKS, (1, 2), (MAX_CHUNKS, MAX_CHUNKS + 2))
