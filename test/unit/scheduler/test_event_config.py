"""Where events are published: what is wrong is told with its key."""

from __future__ import annotations

import pytest

from chunk_cache.errors import ChunkCacheConfigError
from chunk_cache.options.config import describe, parse_config
from chunk_cache.options.event_config import EventConfig, port_problem

GIVEN = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "salt": "secret"}


def events(**changes: object) -> EventConfig:
    found = parse_config({"events": {**GIVEN, **changes}}).events
    assert found is not None
    return found


def test_what_is_given_and_what_is_not() -> None:
    assert parse_config({}).events is parse_config({"events": None}).events is None
    assert events() == EventConfig("tcp://*:5557", "secret", "tcp://*:5558")
    for endpoint in ("tcp://127.0.0.1:1", "tcp://[::1]:65535", "tcp://a-b.c:5557", "ipc:///run/x", "ipc://@x"):
        assert events(endpoint=endpoint, replay_endpoint=None).endpoint == endpoint


def test_the_salt_is_not_shown() -> None:
    config = parse_config({"events": GIVEN})
    assert "secret" not in str(config)
    assert describe(config)["events"] == {
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, "events: 5 is not an object; give an object with endpoint, salt, replay_endpoint"),
        ({**GIVEN, "port": 1}, "events.port: unknown key 'port'; known keys: endpoint, "),
        ({"salt": "x"}, "events.endpoint: null is not an address of ZMQ; give one such as tcp://*:5557 or ipc://"),
        ({"endpoint": "tcp://*:1"}, "events.salt: null is not a salt; give a secret text, the same to all replicas"),
        ({**GIVEN, "salt": ""}, "events.salt: '' is not a salt; "),
        ({**GIVEN, "salt": "\ud800"}, "events.salt: '\\ud800' is not a salt; "),
        ({**GIVEN, "replay_endpoint": "tcp://*:5557"}, "events.replay_endpoint: is that of endpoint; give another"),
        *[
            ({**GIVEN, key: value}, f"events.{key}: {value!r} is not an address of ZMQ; ")
            for key in ("endpoint", "replay_endpoint")
            for value in (
                5557,
                "",
                "ipc://",
                "*:5557",
                "tcp://*",
                "tcp://*:0",
                "tcp://*:65536",
                "tcp://:1",
                "udp://*:1",
            )
        ],
    ],
)
def test_bad_values_name_the_key_and_the_remedy(value: object, message: str) -> None:
    with pytest.raises(ChunkCacheConfigError) as caught:
        parse_config({"events": value})
    assert f"--chunk-cache-config: {message}" in str(caught.value)


def test_data_parallel_ranks_have_ports_of_their_own() -> None:
    assert port_problem(events(), 1) is port_problem(events(endpoint="ipc://x"), 1) is None
    assert port_problem(events(replay_endpoint="tcp://*:5559"), 2) is None
    assert port_problem(events(replay_endpoint=None), 8) is None
    assert port_problem(events(), 2) == "replay_endpoint: ports of 2 ranks overlap; leave 2 from one to the other"
    none = "has no 2 ports for as many ranks; give one such as tcp://*:5557"
    assert port_problem(events(endpoint="ipc://x"), 2) == f"endpoint: 'ipc://x' {none}"
    assert port_problem(events(replay_endpoint="tcp://*:65535"), 2) == f"replay_endpoint: 'tcp://*:65535' {none}"
