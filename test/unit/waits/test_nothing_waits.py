"""The host never waits for the GPU because of the chunk cache, and gives it little to do; by file and line.

SGLang's scheduler runs requests on a GPU that is not there (`fake_scheduler`), a process for each way to start it.
"""

from __future__ import annotations

import json
from functools import cache

import pytest

from doc_pages import DOCS, made_part
from unit.waits import launches_of_methods, launches_of_states
from unit.waits.fake_scheduler import CASES, OPTIONS, Part, run_apart
from unit.waits.launches_of_states import per_layer

ON_PURPOSE = {
    "Pending.read": "how many rows a layer has is what the layer in front of it found, with grouping and focus alone",
    "ExactPass.step": "a verification has the idle server to itself, and no more than one step is ever in flight",
    "measure": "the end of a verification",
}
# Launches of one batch, for prompts of six chunks, with bringing them in: of one request, of eight.
MOST_LAUNCHES = {"epic": (20, 40), "full-reuse": (20, 40), "cache-craft": (20, 40), "h2o": (20, 40), "random": (35, 55)}
# These choose in the forward, of four layers here, each request for itself.
MOST_LAUNCHES |= {"a3": (65, 240), "cacheblend": (85, 340), "fusionrag": (70, 180), "question-drift": (115, 320)}
NUM_LAYERS = 4


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory):
    """Of a case: what each part of its traffic has issued."""

    @cache
    def run(case: str) -> dict[str, Part]:
        return run_apart(case, tmp_path_factory.mktemp("waits"))

    return run


@pytest.mark.parametrize("case", CASES)
def test_nothing_waits(parts, case: str) -> None:
    waits = {
        (name, place): times
        for name, part in parts(case).items()
        for place, times in part.waits.items()
        if not any(place.split()[1].endswith(name) for name in ON_PURPOSE)
    }
    assert not waits


def test_the_traffic_is_what_it_should_be(parts) -> None:
    """Chunks are brought in and chosen from, in every way that the names of the parts say."""
    for name, part in parts("methods").items():
        if "observed" in name or name.startswith("full "):
            continue
        for reply in part.replies:
            assert reply["reused_tokens"] > 0, name
            assert reply["method"] == name.split(",")[0].split()[0] or "cacheclip" in name
    assert any("selection" in reply for part in parts("methods").values() for reply in part.replies)
    replies = [reply for part in parts("tiers").values() for reply in part.replies]
    assert {"disk", "host", "pool"} <= {chunk.get("tier") for reply in replies for chunk in reply["chunks"]}
    assert any("KVAssembler.pack" in place for place in parts("steps")["packed 0"].launches)
    assert any("verification/" in place for part in parts("store").values() for place in part.launches)


@pytest.mark.parametrize("method", MOST_LAUNCHES)
def test_a_fused_batch_launches_little(parts, method: str) -> None:
    for size, most in zip((1, 8), MOST_LAUNCHES[method], strict=True):
        launches = parts("methods")[f"{method} {size}"].launches
        assert sum(launches.values()) <= most, json.dumps(launches, indent=1)


@pytest.mark.parametrize(("method", "most"), [("epic", 0), ("fusionrag", 4), ("infoflow", 4), ("question-drift", 7)])
def test_a_layer_launches_as_much_for_a_batch_as_for_one(parts, method: str, most: int) -> None:
    """Of ours, over both forwards of a method that asks: two of attention, three of drift, one that keeps Q to score.

    What scores all layers at once counts for a fraction, as does what the last layer alone does.
    """
    places = ("question_mass/", "add_drift/triton", "sparse_extend/", "LayerKV.keys")
    for size in (1, 8):
        launches = parts("methods")[f"{method} {size}"].launches
        own = {
            place: n for place, n in launches.items() if "empty" not in place and any(one in place for one in places)
        }
        assert sum(own.values()) <= most * NUM_LAYERS, json.dumps(own, indent=1)


def test_a_layer_with_states_launches_as_much_for_many_passages_as_for_few(parts) -> None:
    """But for one multiplication a run and three copies a passage; SGLang waits once for each way to divide rows."""
    few, many = (parts("states")[f"{num} passages 1"] for num in (2, 12))
    assert few.state_kernels == many.state_kernels
    assert few.layouts == many.layouts == 2, "of all rows, and of those in front of other runs"
    assert per_layer(many)[0] - per_layer(few)[0] == 10 + 3 * 10


def test_the_page_of_launches_is_of_this_code(parts) -> None:
    page = (DOCS / launches_of_states.PAGE).read_text()
    assert made_part(launches_of_states.PROGRAM, launches_of_states.table(parts("states"))) in page
    now = launches_of_methods.counts(parts("methods"))
    assert made_part(launches_of_methods.PROGRAM, launches_of_methods.table(now)) in page
    assert json.loads(launches_of_methods.RESULTS.read_text())["now"] == now


def test_beside_rows_that_leave_the_backend_serves_all_others(parts) -> None:
    """For that, rows are taken apart and put together: five launches in each of four layers, a few before."""
    launches = parts("store")["beside others"].launches
    taken, joined = (sum(n for place, n in launches.items() if one in place) for one in ("Rows._taken", "Rows._joined"))
    assert 0 < taken <= 4 * 4 + 4, json.dumps(launches, indent=1)
    assert joined == 4


def test_only_grouping_and_focus_wait_for_a_layer(parts) -> None:
    """Once for each request, whatever the method."""
    for name, part in parts("methods").items():
        may_wait = any(option in name for option in list(OPTIONS)[3:])
        assert sum(part.waits.values()) <= (8 if may_wait else 0), (name, part.waits)


def test_slots_of_a_copy_are_held_until_the_stream_of_the_forwards_has_read_them(parts) -> None:
    """SGLang's scheduler makes them on a stream of its own, and would give their memory away before that."""
    part = parts("methods")["epic 8"]
    held = sum(n for place, n in part.views.items() if place.endswith(" hold record_stream"))
    brought_in = sum(chunk["status"] == "hit" for reply in part.replies for chunk in reply["chunks"])
    assert held == 2 * brought_in > 0, "from where and to where, for each chunk"
