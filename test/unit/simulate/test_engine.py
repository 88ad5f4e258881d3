"""Engine: one tiny trace by hand, sums that must agree, and runs that must repeat."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from benchmark.simulate.attention import SyntheticAttention
from benchmark.simulate.engine import Replay, simulate
from benchmark.simulate.settings import REMEMBER, Settings, SettingsError
from benchmark.simulate.store import POLICIES
from benchmark.simulate.tally import FIELDS
from benchmark.simulate.trace import Request, Trace, TraceSpec, generate

from chunk_cache.index.reusability import share_to_fix, unit_cfo
from chunk_cache.methods import num_rows_at

SMALL = TraceSpec(num_requests=150, num_chunks=60, chunk_len=40, topic_share=0.2, seed=3)
ROOMY = Settings(10**6)


def trace_of(*prompts: tuple[int, ...], length: int = 10) -> Trace:
    num_chunks = 1 + max(chunk for prompt in prompts for chunk in prompt)
    return Trace("by hand", tuple(Request(prompt, 2) for prompt in prompts), (length,) * num_chunks, 4)


def test_a_tiny_trace_by_hand() -> None:
    # 0 1: computed exactly. 1 0: both come from the path; 1 stands in another context, 0 too.
    # 0 1 again: wholly exact. 1 2: 2 is computed behind a hit and remembered as derived. 3 2: 3 has nothing in front
    # of it that was reused, so it is exact; 2 is a hit of generation 1.
    trace = trace_of((0, 1), (1, 0), (0, 1), (1, 2), (3, 2))
    outcome = simulate(trace, ROOMY, check_every=1)
    columns = [FIELDS.index(name) for name in ("num_prefix", "num_hit", "num_miss", "prefix_tokens", "reused_tokens")]
    assert outcome.per_request[:, columns].tolist() == [
        [0, 0, 2, 0, 0],
        [0, 2, 0, 4, 20],
        [2, 0, 0, 24, 0],
        [0, 1, 1, 4, 10],
        [0, 1, 1, 4, 10],
    ]
    assert outcome.generations == {0: 3, 1: 1}
    assert outcome.num_computed == {0: 1, 1: 1, 2: 1, 3: 1}
    # system + 0 + 1 + two questions (of the exact prompts), and 2 and 3 as nodes of their own
    assert outcome.end_stored == 4 + 20 + 2 + 2 + 20


def test_the_budget_is_the_cfo_of_the_synthetic_attention() -> None:
    trace = trace_of((0, 1), (1, 0), length=100)
    attention = SyntheticAttention(seed=7)
    outcome = simulate(trace, Settings(10**6, alpha=1.5, seed=7))
    key0, key1 = Replay(trace, Settings(10**6, seed=7)).keys  # the keys are the engine's own
    statistics = attention.statistics(key1, 100, [key0], [100])
    moved = 1.5 * unit_cfo(statistics.cci, [key0], statistics.inter, [], {})
    expected = sum(num_rows_at(share_to_fix(cfo), 100) for cfo in (moved, 1.5))
    assert outcome.tally().recomputed_tokens == expected


@pytest.mark.parametrize(
    ("policy", "pool_tokens", "is_kept"),
    [
        # 60: the fourth prompt needs 8 tokens more than are free. The first question goes (2), then
        ("lru", 60, True),  # 8, which came before the last use of 0
        ("fifo", 60, False),  # 0, which came before 8 and 7
        ("lfu", 60, True),  # 8, which was never used
        ("frequency-reuse", 60, True),  # likewise
        # 50: question and 8 went for the third prompt; for the fourth goes
        ("lru", 50, False),  # 0: 7 was stored after it was used
        ("fifo", 50, False),
        ("lfu", 50, True),  # 7, which was never used
        ("frequency-reuse", 50, True),
    ],
)
def test_each_policy_by_hand(policy: str, pool_tokens: int, is_kept: bool) -> None:
    """0 is used by prompts 2 and 3. Prompt 4 brings other chunks; prompt 5 shows whether 0 is still there."""
    trace = trace_of((9, 0), (8, 0), (7, 0), (1, 2), (3, 0))
    outcome = simulate(trace, Settings(pool_tokens, policy, promote_uses=0), check_every=1)
    assert outcome.per_request[:, FIELDS.index("num_hit")].tolist() == [0, 1, 1, 0, int(is_kept)]


@pytest.mark.parametrize("remember", REMEMBER)
@pytest.mark.parametrize("policy", POLICIES)
def test_sums_agree_and_the_bound_holds(policy: str, remember: str) -> None:
    trace = generate(SMALL)
    capacity = max(trace.max_prompt_len, trace.distinct_tokens // 4)
    settings = Settings(capacity, policy, remember=remember, max_variants=40, max_variants_per_chunk=3, max_cfo=0.9)
    outcome = simulate(trace, settings, check_every=7)
    assert outcome.peak_stored <= capacity
    for row in [*outcome.windows(1), outcome.tally()]:
        assert row.num_prefix + row.num_hit + row.num_miss + row.num_skipped == row.num_chunks
        assert 0 <= row.recomputed_tokens <= row.reused_tokens <= row.prompt_tokens - row.prefix_tokens
        assert 0.0 <= row.recomputed_share <= row.computed_share <= 1.0
    tally = outcome.tally()
    assert tally.num_chunks == trace.num_chunks == sum(outcome.reasons.values())
    assert tally.num_hit > 0
    assert sum(size * num for size, num in outcome.variants_per_chunk.items()) <= 40
    assert max(outcome.variants_per_chunk) <= 3


def test_the_same_seed_gives_the_same_run_and_another_does_not() -> None:
    trace = generate(SMALL)
    settings = Settings(trace.distinct_tokens // 3, "frequency-reuse", remember="contexts")
    first, second = simulate(trace, settings), simulate(generate(SMALL), settings)
    assert np.array_equal(first.per_request, second.per_request)
    assert first.index == second.index
    other = simulate(trace, replace(settings, seed=1))
    assert not np.array_equal(first.per_request, other.per_request)


def test_a_fixed_ratio_recomputes_that_share() -> None:
    tally = simulate(generate(SMALL), Settings(10**6, alpha=None, ratio=0.25)).tally()
    assert 0.25 <= tally.mean_fix_share < 0.28  # each chunk is rounded up


def test_without_reuse_only_prefixes_are_found() -> None:
    outcome = simulate(trace_of((0, 1), (1, 0), (0, 1, 2)), Settings(10**6, reuse=False), check_every=1)
    assert [tally.num_prefix for tally in outcome.windows(1)] == [0, 0, 2]
    assert outcome.tally().num_hit == 0
    assert dict(outcome.reasons) == {"prefix": 2, "skipped, off": 5}


def test_more_contexts_mean_less_to_fix() -> None:
    trace = generate(replace(SMALL, num_requests=300))
    unbounded = Settings(10**7, max_generation=10**6, max_variants_per_chunk=10**6)
    missed = simulate(trace, unbounded).tally()
    contexts = simulate(trace, replace(unbounded, remember="contexts")).tally()
    assert contexts.mean_fix_share < missed.mean_fix_share


def test_frequency_reuse_beats_lru_on_zipf_and_needs_its_ageing_when_popularity_drifts() -> None:
    def computed(policy: str, drift_every: int, **changes: float) -> float:
        spec = TraceSpec(num_requests=800, num_chunks=300, chunk_len=50, drift_every=drift_every)
        trace = generate(spec)
        settings = Settings(round(0.2 * trace.distinct_tokens), policy, **changes)
        return simulate(trace, settings).tally(100).computed_share

    assert computed("frequency-reuse", 0) < computed("lru", 0)
    without_ageing = computed("frequency-reuse", 100, ageing=0.0)
    assert without_ageing > computed("lru", 100)
    assert computed("frequency-reuse", 100) < without_ageing


def test_reuse_does_not_decay_under_new_orders() -> None:
    trace = generate(TraceSpec(num_requests=800, num_chunks=100, chunk_len=40, chunks_per_request=6))
    for policy in ("lru", "frequency-reuse"):
        windows = simulate(trace, Settings(round(0.2 * trace.distinct_tokens), policy)).windows(160)
        assert windows[-1].chunk_hit_rate > windows[1].chunk_hit_rate - 0.03


def test_a_memory_that_is_too_small_is_refused_with_the_size_needed() -> None:
    trace = trace_of((0, 1))
    with pytest.raises(SettingsError, match=r"pool_tokens: 25 .* has 26; give at least 26"):
        simulate(trace, Settings(25))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "random"}, "policy: unknown 'random'; known: lru, lfu, fifo, frequency-reuse"),
        ({"remember": "all"}, "remember: unknown 'all'; known: misses, contexts"),
        ({"max_variants": 0}, "max_variants: 0 is too small; give at least 1"),
        ({"alpha": float("nan")}, "alpha: nan is not a number of at least 0; give one, 1 for example"),
        ({"ratio": 1.5}, "ratio: 1.5 is not in"),
    ],
)
def test_settings_say_what_is_wrong(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        replace(ROOMY, **changes)


def test_statistics_depend_on_chunk_context_and_seed_alone() -> None:
    keys = [bytes([i]) * 16 for i in range(4)]
    one, two = SyntheticAttention(0), SyntheticAttention(0)
    two.statistics(keys[3], 10, [], [])  # asked in another order
    context = keys[1:]
    first = one.statistics(keys[0], 50, context, [50, 60, 70])
    second = two.statistics(keys[0], 50, context, [50, 60, 70])
    assert np.array_equal(first.inter, second.inter)
    assert first.cci == second.cci
    assert 0.5 < first.cci < 1.0
    assert one.statistics(keys[0], 50, [], []).cci == 0.5
    assert not np.array_equal(first.inter, SyntheticAttention(1).statistics(keys[0], 50, context, [50, 60, 70]).inter)


def test_attention_falls_with_distance() -> None:
    keys = [bytes([i]) * 16 for i in range(3)]
    attention = SyntheticAttention(0)
    near, far = attention.inter(keys[0], 10, keys[1:2]), attention.inter(keys[0], 10, keys[1:])
    assert far[0] == pytest.approx(near[0] * 2**-0.5)
