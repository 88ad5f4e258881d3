from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chunk_cache.errors import ChunkCacheRequestError
from chunk_cache.index.variant import shown_id
from chunk_cache.token_kinds import COLOURS, Kind
from chunk_cache_tools.explain.palette import colour_of, legend, num_layers_of, words_of
from chunk_cache_tools.explain.states import TokenState, classify, differing, explain
from chunk_cache_tools.explain.summary import chunk_words, tables, unranked


def kinds(states):
    return "".join(
        {"prefix": "#", "reused": "=", "recomputed": "R", "dropped": "D", "computed": "."}[s.kind] for s in states
    )


def test_the_picture_of_a_plan(make_reply):
    reply = make_reply([(2, 12), (14, 20), (20, 25)], 28, missing=[1])
    assert kinds(classify(reply)) == "..RR========........R====..."


def test_a_chunk_that_begins_in_the_prefix_and_a_load_of_whole_pages(make_reply):
    reply = make_reply([(2, 12), (12, 22)], 25, prefix_len=8, page_size=4)
    assert kinds(classify(reply)) == "########R===RR======....."
    assert reply["chunks"][1]["reused_tokens"] == 8  # up to the page at 20


def test_all_states(tokens, layer_reply):
    states = classify(layer_reply)
    start = tokens.spans[2][0]
    assert Counter(state.kind for state in states) == {
        Kind.PREFIX: layer_reply["prefix_tokens"],
        Kind.COMPUTED: layer_reply["computed_tokens"],
        Kind.REUSED: layer_reply["reused_tokens"] - 3,
        Kind.RECOMPUTED: 1,
        Kind.DROPPED: 2,
    }
    assert states[start : start + 4] == (
        TokenState(Kind.RECOMPUTED),
        TokenState(Kind.REUSED),
        TokenState(Kind.DROPPED, 2),
        TokenState(Kind.DROPPED, 3),
    )


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_states_agree_with_the_counts_of_any_plan(make_reply, data):
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=5))
    gaps = data.draw(st.lists(st.integers(0, 3), min_size=len(lengths), max_size=len(lengths)))
    spans, position = [], 0
    for gap, length in zip(gaps, lengths, strict=True):
        spans.append((position + gap, position + gap + length))
        position += gap + length
    prompt_len = position + data.draw(st.integers(0, 4))
    page_size = data.draw(st.sampled_from([1, 4]))
    reply = make_reply(
        spans,
        prompt_len,
        prefix_len=data.draw(st.integers(0, (prompt_len - 1) // page_size)) * page_size,
        missing=data.draw(st.sets(st.integers(0, len(spans) - 1))),
        ratio=data.draw(st.sampled_from([0.0, 0.3, 1.0])),
        page_size=page_size,
    )
    count = Counter(state.kind for state in classify(reply))
    assert count.total() == prompt_len
    assert count[Kind.PREFIX] == reply["prefix_tokens"]
    assert count[Kind.COMPUTED] == reply["computed_tokens"]
    assert count[Kind.RECOMPUTED] == reply["recomputed_tokens"]
    assert count[Kind.REUSED] == reply["reused_tokens"] - reply["recomputed_tokens"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda reply: reply["chunks"][0].pop("recomputed_positions"), "no field 'recomputed_positions'"),
        (lambda reply: reply.pop("prefix_tokens"), "no field 'prefix_tokens'"),
        (lambda reply: reply["chunks"][0].update(recomputed_positions=[0]), "chunks[0]: position 0 was not brought in"),
        (lambda reply: reply["chunks"][0].update(reused_tokens=99), "chunks[0] reaches behind the prompt"),
        (lambda reply: reply.update(reused_tokens=1, computed_tokens=19), "bring in 10 tokens"),
        (lambda reply: reply.update(chunks=3), "damaged"),
    ],
)
def test_a_reply_that_contradicts_itself_is_refused(make_reply, change, words):
    reply = make_reply([(5, 15)], 20)
    change(reply)
    with pytest.raises(ChunkCacheRequestError) as caught:
        explain("epic", "", reply, "replies.jsonl:3")
    assert str(caught.value).startswith("replies.jsonl:3: ")
    assert words in str(caught.value)


def test_a_reply_without_the_object_is_refused():
    with pytest.raises(
        ChunkCacheRequestError, match='no object chunk_cache in the reply; ask /generate with "explain"'
    ):
        explain("epic", "", None, "here")


def test_methods_that_found_different_chunks_are_named(make_reply):
    spans = [(5, 15), (15, 25)]
    replies = {
        "a": make_reply(spans, 30),
        "b": make_reply(spans, 30, ratio=0.9),
        "c": make_reply(spans, 30, missing=[1]),
    }
    assert differing([explain(label, "", reply, "here") for label, reply in replies.items()]) == ["c"]


def test_shades_grow_with_the_layer_and_the_legend_names_some_of_them():
    shades = [colour_of(TokenState(Kind.DROPPED, layer), 32) for layer in range(32)]
    assert len(set(shades)) == 32
    assert shades == sorted(shades, reverse=True)  # blue falls, and red and green never grow
    assert not set(shades) & set(COLOURS.values())
    assert words_of(TokenState(Kind.DROPPED, 4)) == "dropped at layer 4"


def test_legend_has_what_occurs(explanations, make_reply):
    assert [words_of(state) for state in legend(explanations, (0, 999))] == [
        "exact prefix",
        "reused",
        "reused, recomputed",
        "dropped at layer 2",
        "dropped at layer 3",
        "computed",
    ]
    assert num_layers_of(explanations) == 4
    full_reuse = explain("full-reuse", "", make_reply([(0, 5)], 6, ratio=0.0), "here")
    assert [state.kind for state in legend([full_reuse], (0, 6))] == [Kind.REUSED, Kind.COMPUTED]
    assert [state.kind for state in legend([full_reuse], (5, 6))] == [Kind.COMPUTED]


def test_legend_of_many_layers_shows_four(make_reply):
    reply = make_reply([(0, 40)], 41, ratio=1.0)
    reply["chunks"][0]["dropped"] = [{"layer": layer, "positions": [layer]} for layer in range(2, 30)]
    layers = [
        state.layer for state in legend([explain("cacheblend", "", reply, "here")], (0, 41)) if state.layer is not None
    ]
    assert layers == [2, 11, 20, 29]


def test_tables_hold_the_figures_of_the_replies(explanations):
    tokens, choice = tables(explanations)
    assert tokens.rows[0][:2] == ('epic:"a"&<b>', "0.2")
    assert tokens.rows[1][-1] == "in Rome"
    assert choice.rows == (
        (
            "cacheblend",
            f"{explanations[1].reply['reused_tokens']} (0), 3 (1), \u2026, 1 (3)",
            "layer 1: median 0.25, max 2, kept from 1, 50% of the sum",
            "1.5 ms",
        ),
    )


def test_chunk_words_tell_what_the_methods_agree_on(explanations):
    assert chunk_words(explanations, 0) == "prefix"
    assert chunk_words(explanations, 1) == "miss (not_stored)"
    shift = explanations[0].spans[2][0] - 3
    assert chunk_words(explanations, 2) == f"hit, shift +{shift}, variant {shown_id(7)} of generation 0"


def test_methods_without_statistics_are_named(make_reply):
    reply = make_reply([(0, 5), (5, 10)], 12)
    reply["chunks"][1]["ranked_by"] = "position"
    reply["chunks"][0]["ranked_by"] = "outside"
    sentence = "h2o found no statistics of chunks 1 and took their first tokens"
    assert unranked([explain("h2o", "", reply, "here")]) == [sentence]
