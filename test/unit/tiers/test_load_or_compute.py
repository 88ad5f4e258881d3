"""TierLoader over real media: what is loaded and what computed, by what either was measured to take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_chunk_cache.tiers.disk import DiskMedium
from unit.tiers.medium_suite import FINGERPRINT, STATES
from unit.tiers.tier_harness import SIZE, Tiers, open_tiers, result, stored, variant, wanted, write


def learned(tiers: Tiers, load_s: float, s_per_row: float) -> None:
    """As if a chunk of `LENGTH` tokens took so long, and computing a row."""
    for i in range(40):
        tiers.tier("disk").reads.observe(SIZE * (1 + i % 3), load_s * (1 + i % 3))
        rows = 50 * (1 + i % 4)
        tiers.prefill_cost.observe(rows, rows, s_per_row * rows)


@pytest.fixture
def controlled(tmp_path: Path) -> Iterator[Tiers]:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
        yield tiers


def test_what_is_computed_sooner_is_not_loaded(controlled: Tiers) -> None:
    learned(controlled, load_s=1.0, s_per_row=1e-5)
    assert [result(found) for found in controlled.load(wanted(1))] == [("disk", "tier_slow")]
    assert ("disk", "tier_slow") in controlled.counted
    assert controlled.tier("disk").ledger.stats()["hits"] == 0
    assert controlled.tier("disk").ledger.contains(stored(variant(1)).info.entry_id), "it stays"


def test_what_is_loaded_sooner_is_loaded(controlled: Tiers) -> None:
    learned(controlled, load_s=1e-4, s_per_row=1e-2)
    assert [result(found) for found in controlled.load(wanted(1))] == [("disk", None)]
    assert controlled.loader.estimates.num == 1


def test_what_a_chunk_does_to_states_is_loaded_with_it(tmp_path: Path) -> None:
    """It takes 30 times as much as the KV of a chunk, which is computed in 50 ms and whose KV is loaded in 5."""
    found = {}
    for states in (None, replace(STATES, heads=64)):
        fingerprint = replace(FINGERPRINT, states=states)
        one = stored(variant(1), fingerprint)
        DiskMedium(tmp_path, fingerprint).write(one)
        with open_tiers({"disk": tmp_path}, controller=True, fingerprint=fingerprint) as tiers:
            tiers.writer.adopt(tiers.tier("disk"), one.info.listed)
            learned(tiers, load_s=5e-3, s_per_row=1e-2)
            found[states] = [result(one) for one in tiers.load(wanted(1))]
    assert list(found.values()) == [[("disk", None)], [("disk", "tier_slow")]]


def test_a_load_hides_behind_the_queue(controlled: Tiers) -> None:
    learned(controlled, load_s=1.0, s_per_row=1e-3)
    controlled.want("r", wanted(1), num_rows_ahead=5000)
    controlled.settle("r")
    assert result(controlled.loader.bring_in("r")[wanted(1).key]) == ("disk", None)


def test_what_nobody_knew_of_is_loaded(tmp_path: Path) -> None:
    """Another server has written it: there is nothing to estimate with."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True) as tiers:
        learned(tiers, load_s=1.0, s_per_row=1e-5)
        assert [result(found) for found in tiers.load(wanted(1))] == [("disk", None)]


@pytest.mark.parametrize(("asked", "reason"), [(("disk",), None), ((), "tier_late")])
def test_what_a_store_may_have_is_waited_for(tmp_path: Path, asked: tuple[str, ...], reason: str | None) -> None:
    """As long as a load that was estimated; where it is known what is there, nothing is expected of it."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True, asked=asked, slow={"disk": (1e9, 0.3)}) as tiers:
        learned(tiers, load_s=1.0, s_per_row=1e-5)
        assert [found.reason for found in tiers.load(wanted(1), wanted(2))] == [reason, reason]


def test_layerwise_loads_hide_behind_the_forward(tmp_path: Path) -> None:
    """Each chunk is computed in 0.05 s and loaded in 0.1 s. Computing the first hides half of loading the second."""
    write(tmp_path, 1, 2)
    outcomes = {}
    for loading in ("prefetch", "layerwise"):
        with open_tiers({"disk": tmp_path}, controller=True, loading=loading) as tiers:
            for number in (1, 2):
                tiers.writer.adopt(tiers.tier("disk"), stored(variant(number)).info.listed)
            learned(tiers, load_s=0.1, s_per_row=0.01)
            outcomes[loading] = [result(found) for found in tiers.load(wanted(1), wanted(2))]
    assert outcomes["prefetch"] == [("disk", "tier_slow"), ("disk", "tier_slow")]
    assert outcomes["layerwise"] == [("disk", "tier_slow"), ("disk", None)]


@pytest.mark.parametrize(("loading", "reason"), [("prefetch", "tier_slow"), ("layerwise", None)])
def test_layerwise_loads_hide_behind_rows_that_are_computed_again(
    tmp_path: Path, loading: str, reason: str | None
) -> None:
    """A chunk is computed in 1 s; of 100 tokens that are loaded, 15 are computed again, in 0.15 s."""
    chunk, one = wanted(1, length=100), variant(1, length=100)
    DiskMedium(tmp_path, FINGERPRINT).write(stored(one))
    with open_tiers({"disk": tmp_path}, controller=True, loading=loading) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(one).info.listed)
        learned(tiers, load_s=1.07 / 20, s_per_row=0.01)
        assert [result(found) for found in tiers.load(chunk)] == [("disk", reason)]


def test_patience_is_what_the_load_is_worth(tmp_path: Path) -> None:
    """A load that was estimated to be quick is not waited for until the timeout."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True, slow={"disk": (1e9, 1.0)}, timeout_s=30.0) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
        learned(tiers, load_s=1e-4, s_per_row=1e-3)
        began = time.monotonic()
        assert [found.reason for found in tiers.load(wanted(1))] == ["tier_late"]
        assert time.monotonic() - began < 0.9


def test_a_timeout_that_is_shorter_than_the_load_is_worth_is_named(tmp_path: Path) -> None:
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True, slow={"disk": (1e9, 1.0)}, timeout_s=0.1) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
        learned(tiers, load_s=1e-4, s_per_row=1e-3)
        assert [found.reason for found in tiers.load(wanted(1))] == ["tier_timeout"]


def test_one_request_finds_it_slow_and_another_has_loaded_it(tmp_path: Path) -> None:
    """Each gets what was decided for it, also where both are settled in the same step."""
    write(tmp_path, 1)
    with open_tiers({"disk": tmp_path}, controller=True) as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(variant(1)).info.listed)
        learned(tiers, load_s=1.0, s_per_row=1e-3)
        tiers.want("alone", wanted(1))
        tiers.want("behind", wanted(1), num_rows_ahead=5000)
        tiers.idle()
        tiers.settle("alone", "behind")
        found = {rid: tiers.loader.bring_in(rid)[wanted(1).key] for rid in ("alone", "behind")}
        assert result(found["alone"]) == ("disk", "tier_slow")
        assert result(found["behind"]) == ("disk", None)


@pytest.mark.parametrize(
    ("num_rows", "num_ready"),
    [
        (2000, 1),  # 1830 rows: longer than the load
        (570, 2),  # 400 rows: half as long
        (200, 3),  # 30 rows
    ],
)
def test_a_forward_with_fewer_rows_needs_more_layers_before_it_begins(
    tmp_path: Path, num_rows: int, num_ready: int
) -> None:
    """It computes what is in neither prefix nor chunk; a chunk that comes up spares all but 15 % of its tokens.

    Of two wanted chunks of 200 tokens one is stored nowhere, so its rows are all computed. Loading takes 0.8 s.
    """
    chunk, nowhere, one = wanted(1, length=200), wanted(2, length=200), variant(1, length=200)
    DiskMedium(tmp_path, FINGERPRINT).write(stored(one))
    with open_tiers({"disk": tmp_path}, loading="layerwise") as tiers:
        tiers.writer.adopt(tiers.tier("disk"), stored(one).info.listed)
        learned(tiers, load_s=0.02, s_per_row=0.001)
        tiers.want("r", chunk, nowhere, num_keys=4000, num_rows=num_rows)
        tiers.idle()  # the worker stops here until it is admitted
        stream = tiers.loader._found[chunk.key].stream
        assert stream is not None
        assert (stream.num_ready, stream.num_layers) == (num_ready, 3)
