"""Passages in prompts without marks: what is found is there, and what repeats is found."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from chunk_cache.keys import Partition, chunk_key
from chunk_cache.prompt import discover as module
from chunk_cache.prompt.discover import MAX_PEERS, MIN_LEN, TRIM, Discoverer

P, OTHER = Partition(), Partition("tenant")
SEPARATOR = [1, 2, 3]


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


def text(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(10, 30000) for _ in range(length)]


def prompt(rng: random.Random, passages: Sequence[Sequence[int]], system: Sequence[int] = ()) -> array[int]:
    """Passages between separators, behind a system prompt whose end is new, in front of a new question."""
    tokens = array("q", [*system, *text(rng, 20)])
    for passage in passages:
        tokens.extend([*SEPARATOR, *passage])
    tokens.extend(text(rng, 30))
    return tokens


def inside(span: tuple[int, int], tokens: array[int], passage: Sequence[int]) -> bool:
    """Whether the span is a part of a passage but for a separator around it."""
    found = list(tokens[span[0] : span[1]])
    whole = [*SEPARATOR, *passage, *SEPARATOR]
    return any(whole[i : i + len(found)] == found for i in range(len(whole) - len(found) + 1))


def test_what_was_marked_is_found_wherever_it_stands(rng: random.Random) -> None:
    found, passages = Discoverer(), [text(rng, length) for length in (90, 400, 150)]
    for passage in passages:
        found.note(P, array("q", passage))
    for _ in range(5):
        order = rng.sample(passages, 3)
        tokens = prompt(rng, order)
        spans = found.find(P, tokens)
        assert [list(tokens[start:end]) for start, end in spans] == order


def test_what_repeats_is_learnt_at_its_second_sight_and_found_at_the_third(rng: random.Random) -> None:
    found, passages = Discoverer(), [text(rng, 200) for _ in range(12)]
    shown: dict[int, int] = dict.fromkeys(range(12), 0)
    hits = possible = 0
    for _ in range(40):
        chosen = rng.sample(range(12), 4)
        tokens = prompt(rng, [passages[i] for i in chosen])
        known = {bytes(one.tokens) for one in found._known.values()}
        spans = found.find(P, tokens)
        assert list(spans) == sorted(spans)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
        for span in spans:
            assert any(inside(span, tokens, passages[i]) for i in chosen), "nothing but what repeats"
        hits += sum(bytes(np.array(tokens[s:e], dtype=np.int32)) in known for s, e in spans)
        possible += sum(shown[i] >= 2 for i in chosen)
        for i in chosen:
            shown[i] += 1
    assert hits >= 0.9 * possible > 50
    assert found.counters.num_found_tokens >= hits * (200 - 2 * TRIM - 2 * len(SEPARATOR))


def test_the_beginning_of_prompts_is_left_to_the_exact_prefix(rng: random.Random) -> None:
    found, system = Discoverer(), text(rng, 500)
    for _ in range(4):
        assert found.find(P, array("q", system + text(rng, 300))) == ()
    assert found.num_chunks == 0


def test_another_partition_sees_nothing(rng: random.Random) -> None:
    found, passage = Discoverer(), text(rng, 300)
    found.note(P, array("q", passage))
    for _ in range(2):
        found.find(P, prompt(rng, [passage]))
    assert found.find(OTHER, prompt(rng, [passage])) == ()
    assert len(found.find(P, prompt(rng, [passage]))) == 1


def test_every_match_is_verified(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all hashes are equal nothing is found that is not there, and a look is bounded."""
    monkeypatch.setattr(module, "_hashes", lambda _, tokens: np.zeros(len(tokens) - module.WINDOW + 1, dtype=np.uint64))
    found = Discoverer()
    for _ in range(700):
        found.note(P, array("q", text(rng, 70)))
    for _ in range(3):
        assert found.find(P, array("q", text(rng, 400))) == ()
    known = text(rng, 70)
    found.note(P, array("q", known))
    (span,) = found.find(P, array("q", known + text(rng, 70)))
    assert span == (0, 70)


@pytest.mark.parametrize("tokens", [[], [5], [5] * 15, [5] * 4000, [5, 6] * 2000, list(range(16))])
def test_prompts_of_any_kind(tokens: list[int]) -> None:
    found = Discoverer()
    for _ in range(3):
        for start, end in found.find(P, array("q", tokens)):
            assert 0 <= start < end <= len(tokens)


def test_memory_is_bounded(rng: random.Random) -> None:
    found = Discoverer(max_tokens=20_000)
    kept = [text(rng, 250) for _ in range(100)]
    for i in range(300):
        found.note(P, array("q", text(rng, 200)))
        found.find(P, prompt(rng, [kept[i % 100], text(rng, 100)]))
        assert found.num_tokens <= 20_000
        assert found._known_len == sum(len(one.tokens) for one in found._known.values())
        assert sum(map(len, found._by_value.values())) == found.num_chunks
        assert {past for past, _ in found._anchors.values()} <= set(found._past)
    found.note(P, array("q", text(rng, 10_001)))
    assert found.num_tokens <= 20_000, "one that is longer than all there is room for"


def test_of_passages_that_begin_alike_the_longest_are_known(rng: random.Random) -> None:
    found, passage = Discoverer(), text(rng, 500)
    for length in range(100, 300):
        found.note(P, array("q", passage[:length]))
    assert found.num_chunks == MAX_PEERS
    (span,) = found.find(P, prompt(rng, [passage[:299]]))
    assert span[1] - span[0] == 299


def test_what_is_forgotten_is_found_no_more(rng: random.Random) -> None:
    found, passage = Discoverer(), text(rng, 300)
    for _ in range(2):
        found.find(P, prompt(rng, [passage]))
    (key,) = found._known
    found.forget(key)
    assert found.num_tokens == 0
    assert found.find(P, prompt(rng, [passage])) == (), "the prompts that had it are forgotten too"
    found.clear()
    assert found.stats()["num_kept_tokens"] == 0


def test_what_was_learnt_of_a_passage_shares_a_window_with_it(rng: random.Random) -> None:
    found, passage, others = Discoverer(), text(rng, 300), [text(rng, 300) for _ in range(3)]
    for other in others:
        found.note(P, array("q", other))
    for _ in range(2):
        found.find(P, prompt(rng, [passage]))
    (learnt,) = set(found.keys()) - {chunk_key(P, other) for other in others}
    wider = [*text(rng, 70), *passage, *text(rng, 70)]
    found.note(P, array("q", passage))
    found.note(P, array("q", wider))
    found.note(OTHER, array("q", passage))
    assert set(found.sharing(chunk_key(P, passage))) == {learnt, chunk_key(P, wider)}
    assert found.sharing(chunk_key(P, [1, 2])) == []


def test_equal_calls_give_equal_results() -> None:
    def spans(seed: int) -> Iterator[Any]:
        rng, found = random.Random(seed), Discoverer(max_tokens=30_000)
        passages = [text(rng, 150) for _ in range(30)]
        for _ in range(60):
            yield found.find(P, prompt(rng, rng.choices(passages, k=3)))

    assert list(spans(1)) == list(spans(1))


def test_a_short_repetition_is_no_passage(rng: random.Random) -> None:
    found, phrase = Discoverer(), text(rng, MIN_LEN + 2 * TRIM - 2 * len(SEPARATOR) - 1)
    for _ in range(4):
        assert found.find(P, prompt(rng, [phrase])) == ()
