"""A fleet on one store: services apart, what is stored and what comes of it, bytes through pipes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from benchmark.simulate.fleet import RATIO
from benchmark.simulate.scale import POLICIES_SHOWN, scale_report, serve
from benchmark.simulate.services import Keys, Services, multiply
from benchmark.simulate.settings import Settings, SettingsError
from benchmark.simulate.shared_store import Hardware, Pipe, SharedStore, StoreReplay
from benchmark.simulate.trace import PRESETS, Trace, generate

SPEC = replace(PRESETS["sessions"], num_requests=100, num_chunks=40, chunk_len=60, chunks_per_request=3)
SETTINGS = Settings(3_000, alpha=None, ratio=RATIO)


@pytest.fixture(scope="module")
def one() -> Trace:
    return generate(SPEC)


@pytest.fixture(scope="module")
def services(one: Trace) -> Services:
    return multiply(one, 200, 300)


def replica_on(services: Services, hardware: Hardware | None = None) -> StoreReplay:
    store = SharedStore(services, hardware or Hardware())
    return StoreReplay(services.trace, SETTINGS, keys=Keys(len(services.trace.lengths)), store=store)


def test_services_go_on_from_where_they_are_and_share_nothing(one: Trace, services: Services) -> None:
    following = services.points.tolist()
    for request in services.trace.requests:
        service = request.chunks[0] // len(one.lengths)
        original = one.requests[following[service] % len(one.requests)]
        assert [chunk % len(one.lengths) for chunk in request.chunks] == list(original.chunks)
        assert {chunk // len(one.lengths) for chunk in request.chunks} == {service}
        assert services.trace.prompt_len(request) == one.prompt_len(original)
        following[service] += 1
    assert len(set(services.points.tolist())) > 1


def test_what_was_asked_for_before_is_stored(one: Trace, services: Services) -> None:
    numbers = range(len(services.points) * len(one.lengths))
    asked = [number for number in numbers if number % len(one.lengths) in services.first]
    firsts = {number: found for number in asked if (found := services.first_request(number)) is not None}
    assert len(firsts) == services.num_stored >= 200
    assert all(request.chunks[place] == number for number, (request, place) in firsts.items())


def test_what_is_stored_is_loaded_once_and_what_is_new_is_written(services: Services) -> None:
    replica = replica_on(services)
    request = next(one for one in services.trace.requests if any(map(services.first_request, one.chunks)))
    old = {chunk for chunk in request.chunks if services.first_request(chunk) is not None}
    length = services.trace.lengths[request.chunks[0]]
    replica.answer(request)
    assert replica.num_tokens_loaded == sum(services.trace.lengths[chunk] for chunk in old)
    new = set(request.chunks) - old
    expected = sum(services.trace.lengths[chunk] for chunk in new) * replica.store.hardware.token_bytes
    assert replica.store.num_bytes_written == expected
    assert len(replica.ledger) == len(set(request.chunks)), "it knows what it was told of and what it wrote"
    assert replica.events.num >= len(set(request.chunks)) * 2, f"in pool and store, of {length} tokens"
    replica.reset_flow()
    replica.answer(request)
    assert (replica.num_tokens_loaded, replica.waits) == (0, []), "the pool has it"
    replica.check_integrity()


def test_a_slow_store_is_not_waited_for(services: Services) -> None:
    replica = replica_on(services, Hardware(replica_bytes_per_s=1e6))
    for request in services.trace.requests[:20]:
        replica.answer(request)
    assert (replica.num_tokens_loaded, replica.waits) == (0, [])
    assert replica.num_tokens_slow > 0


def test_bytes_wait_for_those_before_them() -> None:
    pipe = Pipe(10.0)
    assert [pipe.take(20, 1.0), pipe.take(10, 2.0), pipe.take(10, 9.0)] == [3.0, 4.0, 10.0]
    assert (pipe.wait_s(9.5), pipe.wait_s(11.0)) == (0.5, 0.0)


def test_the_half_that_fills_the_pools_is_not_counted(services: Services) -> None:
    served = serve(services, 2, "passages", SETTINGS, Hardware())
    assert served.tally.num_requests == len(services.trace.requests) // 2
    assert 0 < served.loaded <= served.tally.chunk_tokens * Hardware().token_bytes
    assert served.wait_ms(0.99) >= served.wait_ms(0.5) > 1.0, "the latency at least"
    with pytest.raises(SettingsError, match="pool_tokens: 10 tokens do not hold the longest prompt"):
        serve(services, 2, "random", Settings(10), Hardware())


def test_the_page_has_a_column_for_each_policy(one: Trace) -> None:
    report = scale_report(one, num_stored=200, seconds=0.2, num_replicas=2, pool_tokens=3_000, pulse_rate=0.5)
    assert [row["policy"] for row in report.rows] == list(POLICIES_SHOWN)
    assert f"| {' | '.join(POLICIES_SHOWN)} |" in "\n".join(report.text)
