"""The key `tiers` of `--chunk-cache-config`: where chunks are kept below the KV pool, and how they come back.

    {"tiers": {"host_bytes": "4GB", "disk": {"path": "/var/cache/chunks", "max_bytes": "200GB"}}}

`parse_tiers` checks it and is the only place that does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlsplit

from chunk_cache.errors import ChunkCacheConfigError, show, user_error

TIERS = ("host", "disk", "remote")
WRITES = ("through", "evict")
LOADINGS = ("prefetch", "layerwise", "sync")
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True, slots=True)
class DiskConfig:
    """A folder with one file per variant."""

    path: str
    max_bytes: int | None = None
    """None = as much as the file system takes."""


def shown_url(url: str) -> str:
    """The url for messages: without user, password and options."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A store for several machines; exactly one of `url` and `hicache` is given."""

    url: str | None = None
    """`redis://host:port/db` of a Redis or Valkey server."""
    hicache: str | None = None
    """Name of a HiCache storage backend of SGLang."""
    settings: tuple[tuple[str, Any], ...] = ()
    """Of the backend, as SGLang's `--hicache-storage-backend-extra-config` takes them."""


@dataclass(frozen=True, slots=True)
class ThrottleConfig:
    """Slows a tier down, to see what a slower one would cost."""

    bytes_per_s: float
    latency_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Tiers below the KV pool; the defaults are the documentation's."""

    host_bytes: int = 0
    """Memory of each scheduler process for chunks; 0 = none are kept there."""
    disk: DiskConfig | None = None
    remote: RemoteConfig | None = None
    write: str = "through"
    """When a chunk is written down: one of `WRITES`, as soon as it is computed or before it is evicted."""
    loading: str = "prefetch"
    """When a chunk is brought up: one of `LOADINGS`, while its request waits, also while its forward runs, or at once
    while everything waits."""
    max_variants_per_chunk: int = 2
    """Variants of one chunk that each tier keeps."""
    timeout_s: float = 30.0
    """A request waits no longer for a load; its chunks are computed then."""
    controller: bool = True
    """Whether a chunk is computed where that is estimated to be faster than loading it."""
    hide_ratio: bool = False
    """Whether requests that name neither method nor ratio recompute as much as hides behind loading, at least the
    server's ratio."""
    costs: tuple[tuple[str, float], ...] = ()
    """Of a GB for a month in each tier, in any currency: each variant is kept in the cheapest tier whose load hides
    behind what is recomputed, and in no other. Empty = in all tiers."""
    num_threads: int = 2
    """Workers that read and write, per scheduler process."""
    throttle: tuple[tuple[str, ThrottleConfig], ...] = ()
    """Per tier, `host`, `disk` or `remote`: for benchmarks."""

    def costs_of(self, tiers: Iterable[str]) -> dict[str, float]:
        """Of those among `tiers` that have one."""
        costs = dict(self.costs)
        return {tier: costs[tier] for tier in tiers if tier in costs}

    def throttle_of(self, tier: str) -> ThrottleConfig | None:
        return dict(self.throttle).get(tier)


def parse_tiers(value: object, path: str) -> TierConfig | None:
    """Check the value of the key; None where it is null or asks for no tier.

    Args:
        path: where it stood, for messages.

    Raises:
        ChunkCacheConfigError: an unknown key, or a value outside its range.
    """
    if value is None:
        return None
    known = [field.name for field in fields(TierConfig)]
    items = _object(value, path, known)
    checked: dict[str, Any] = {key: _PARSERS[key](item, f"{path}.{key}") for key, item in items.items()}
    config = TierConfig(**checked)
    named = [name for name, tier in zip(TIERS, (config.host_bytes, config.disk, config.remote), strict=True) if tier]
    if not named:
        raise _error(path, "names no tier", "give host_bytes, disk or remote")
    if config.costs and set(config.costs_of(named)) != set(named):
        raise _error(f"{path}.costs", f"has not all of {', '.join(named)}", "give the cost of each tier, or none")
    return config


def parse_bytes(value: object, path: str) -> int:
    """A number of bytes: an integer, or a string like `"4GB"` (10^9) or `"4GiB"` (2^30).

    Raises:
        ChunkCacheConfigError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, str):
        number = value.strip().rstrip("BKMGTIbkmgti")
        unit = value.strip()[len(number) :].upper()
        try:
            parsed = float(number)
        except ValueError:
            parsed = -1.0
        if unit in _UNITS and 0 <= parsed < float("inf"):
            return int(parsed * _UNITS[unit])
    raise _error(path, f"{show(value)} is not a number of bytes", 'give an integer, or a string like "4GB"')


def _parse_disk(value: object, path: str) -> DiskConfig | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = {"path": value}
    items = _object(value, path, ["path", "max_bytes"])
    folder = items.get("path")
    if not isinstance(folder, str) or not folder:
        raise _error(f"{path}.path", f"{show(folder)} is not a folder", "give the path of a folder")
    max_bytes = items.get("max_bytes")
    return DiskConfig(folder, None if max_bytes is None else parse_bytes(max_bytes, f"{path}.max_bytes"))


def _parse_remote(value: object, path: str) -> RemoteConfig | None:
    if value is None:
        return None
    if isinstance(value, str):
        value = {"url": value}
    items = _object(value, path, ["url", "hicache", "settings"])
    names = [name for name in ("url", "hicache") if items.get(name) is not None]
    if len(names) != 1:
        raise _error(path, f"has {len(names)} of url and hicache", "give exactly one of them")
    name = names[0]
    if not isinstance(items[name], str) or not items[name]:
        raise _error(f"{path}.{name}", f"{show(items[name])} is not a name", "give a string")
    settings = items.get("settings", {})
    if not isinstance(settings, Mapping) or (settings and name == "url"):
        raise _error(f"{path}.settings", f"{show(settings)} does not fit", "give an object, beside hicache only")
    return RemoteConfig(**{name: items[name]}, settings=tuple(sorted(settings.items())))


def _parse_costs(value: object, path: str) -> tuple[tuple[str, float], ...]:
    items = _object(value, path, list(TIERS))
    return tuple((tier, _number(item, f"{path}.{tier}", least=0.0)) for tier, item in sorted(items.items()))


def _parse_throttle(value: object, path: str) -> tuple[tuple[str, ThrottleConfig], ...]:
    found = []
    for tier, item in sorted(_object(value, path, list(TIERS)).items()):
        items = _object(item, f"{path}.{tier}", ["bytes_per_s", "latency_s"])
        bytes_per_s = _number(items.get("bytes_per_s"), f"{path}.{tier}.bytes_per_s", least=1.0)
        latency_s = _number(items.get("latency_s", 0.0), f"{path}.{tier}.latency_s", least=0.0)
        found.append((tier, ThrottleConfig(bytes_per_s, latency_s)))
    return tuple(found)


def _object(value: object, path: str, known: list[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise _error(path, f"{show(value)} is not an object", f"give an object with some of {', '.join(known)}")
    for key in value:
        if key not in known:
            raise _error(f"{path}.{key}", f"unknown key {show(key)}", f"known keys: {', '.join(known)}")
    return value


def _number(value: object, path: str, least: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value < float("inf"):
        raise _error(path, f"{show(value)} is not a number of at least {least:g}", "give such a number")
    return float(value)


def _integer(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise _error(path, f"{show(value)} is not an integer of at least 1", "give such an integer")
    return value


def _boolean(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise _error(path, f"{show(value)} is not a boolean", "give true or false")
    return value


def _one_of(value: object, path: str, choices: tuple[str, ...]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise _error(path, f"unknown value {show(value)}", f"give one of {', '.join(choices)}")
    return value


def _error(path: str, problem: str, remedy: str) -> ChunkCacheConfigError:
    return user_error(ChunkCacheConfigError, path, problem, remedy)


_PARSERS = {
    "host_bytes": parse_bytes,
    "disk": _parse_disk,
    "remote": _parse_remote,
    "write": lambda value, path: _one_of(value, path, WRITES),
    "loading": lambda value, path: _one_of(value, path, LOADINGS),
    "max_variants_per_chunk": _integer,
    "timeout_s": lambda value, path: _number(value, path, 0.001),
    "controller": _boolean,
    "hide_ratio": _boolean,
    "costs": _parse_costs,
    "num_threads": _integer,
    "throttle": _parse_throttle,
}
