"""The key `events` of `--chunk-cache-config`: where a server tells what it holds.

{"events": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "salt": "..."}}
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from chunk_cache.errors import config_error, is_unicode, show
from chunk_cache.options.config_object import parsed_fields

_TCP = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9_.-]+):(\d{1,5})")


def _endpoint(value: object, path: str) -> str:
    if isinstance(value, str) and (port_of(value) is not None or value.removeprefix("ipc://") not in ("", value)):
        return value
    problem = f"{show(value)} is not an address of ZMQ"
    raise config_error(path, problem, "give one such as tcp://*:5557 or ipc:///run/chunks")


def _salt(value: object, path: str) -> str:
    if not isinstance(value, str) or not value or not is_unicode(value):
        remedy = "give a secret text, the same to all replicas and to those who may ask what they hold"
        raise config_error(path, f"{show(value)} is not a salt", remedy)
    return value


@dataclass(frozen=True, slots=True)
class EventConfig:
    """How events are published."""

    endpoint: str = field(metadata={"parse": _endpoint})
    """Where the server publishes: `tcp://*:port` (data-parallel rank N: port + N), or `ipc://path`."""
    salt: str = field(repr=False, metadata={"parse": _salt})
    """Secret of the replicas and of those who may ask what they hold; without it the hashes tell nothing."""
    replay_endpoint: str | None = field(default=None, metadata={"parse": _endpoint})
    """Where missed events can be asked for; null = nowhere. Ports as of `endpoint`."""


def port_of(endpoint: str) -> int | None:
    """The port of a `tcp://host:port`; None where it is no such thing."""
    found = _TCP.fullmatch(endpoint)
    return int(found[2]) if found and 0 < int(found[2]) < 2**16 else None


def parse_events(value: object, path: str) -> EventConfig:
    """Check the value of the key.

    Args:
        path: where it stood, for messages.

    Raises:
        ChunkCacheConfigError: not an object, an unknown or missing key, or a bad value.
    """
    config = EventConfig(**parsed_fields(EventConfig, value, path, asks_for="", endpoint=None, salt=None))
    if config.replay_endpoint == config.endpoint:
        raise config_error(f"{path}.replay_endpoint", "is that of endpoint", "give another")
    return config


def port_problem(config: EventConfig, num_replicas: int) -> str | None:
    """Why the data-parallel ranks of a server have no addresses of their own, port + rank; None = they have."""
    if num_replicas == 1:
        return None
    ports = {}
    for name in ("endpoint", "replay_endpoint"):
        endpoint = getattr(config, name)
        if endpoint is None:
            continue
        port = port_of(endpoint)
        if port is None or port + num_replicas > 2**16:
            return (
                f"{name}: {show(endpoint)} has no {num_replicas} ports for as many ranks; give one such as tcp://*:5557"
            )
        ports[name] = port
    if len(ports) == 2 and abs(ports["endpoint"] - ports["replay_endpoint"]) < num_replicas:
        return f"replay_endpoint: ports of {num_replicas} ranks overlap; leave {num_replicas} from one to the other"
    return None
