"""The key `tiers` of `--chunk-cache-config`: where chunks are kept below the KV pool, and how they come back.

    {"tiers": {"host_bytes": "4GB", "disk": {"path": "/var/cache/chunks", "max_bytes": "200GB"}}}

`parse_tiers` checks it and is the only place that does. Each key is one field of `TierConfig`, with its parser and,
where it asks for a tier, the tier's name and its name in SGLang's events. `sglang_chunk_cache.tiers.registry` opens the
medium of each tier.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from os.path import expanduser
from typing import Any
from urllib.parse import urlsplit

from chunk_cache.errors import config_error, show
from chunk_cache.options.config_object import checked_object, parse_number, parse_seconds, parsed_fields

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


@dataclass(frozen=True, slots=True)
class RemoteConfig:
    """A store for several machines."""

    url: str
    """`redis://host:port/db` of a Redis or Valkey server, `mooncake://host:port` of a Mooncake master."""


@dataclass(frozen=True, slots=True)
class ThrottleConfig:
    """Slows a tier down, to see what a slower one would cost."""

    bytes_per_s: float
    latency_s: float = 0.0


def shown_url(url: str) -> str:
    """The url for messages: without user, password and options."""
    parts = urlsplit(url)
    try:
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        port = ""
    return f"{parts.scheme}://{parts.hostname or ''}{port}{parts.path}"


def parse_bytes(value: object, path: str) -> int:
    """A number of bytes: an integer, or a string like `"4GB"` (10^9) or `"4GiB"` (2^30).

    Raises:
        ChunkCacheConfigError: it is neither.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= sys.maxsize:
        return value
    if isinstance(value, str):
        number = value.strip().rstrip("BKMGTIbkmgti")
        unit = value.strip()[len(number) :].upper()
        try:
            parsed = float(number)
        except ValueError:
            parsed = -1.0
        num_bytes = parsed * _UNITS.get(unit, 0)
        if unit in _UNITS and 0 <= num_bytes <= sys.maxsize:
            return int(num_bytes)
    raise config_error(path, f"{show(value)} is not a number of bytes", 'give an integer, or a string like "4GB"')


def _parse_disk(value: object, path: str) -> DiskConfig:
    if isinstance(value, str):
        value = {"path": value}
    items = checked_object(value, path, ["path", "max_bytes"])
    folder = items.get("path")
    if not isinstance(folder, str) or not folder:
        raise config_error(f"{path}.path", f"{show(folder)} is not a folder", "give the path of a folder")
    max_bytes = items.get("max_bytes")
    return DiskConfig(expanduser(folder), None if max_bytes is None else parse_bytes(max_bytes, f"{path}.max_bytes"))


def _parse_remote(value: object, path: str) -> RemoteConfig:
    if isinstance(value, str):
        value = {"url": value}
    if isinstance(value, Mapping) and "hicache" in value:
        problem = "storage backends of HiCache are not supported any more"
        raise config_error(f"{path}.hicache", problem, "give the url of a Redis or Valkey server, or a folder as disk")
    url = checked_object(value, path, ["url"]).get("url")
    if not isinstance(url, str) or not url:
        raise config_error(f"{path}.url", f"{show(url)} is not a url", "give one such as redis://host:port/0")
    try:
        shown_url(url)
    except ValueError as error:
        raise config_error(f"{path}.url", f"not a url ({error})", "give one such as redis://host:port/0") from None
    return RemoteConfig(url)


def _parse_throttle(value: object, path: str) -> tuple[tuple[str, ThrottleConfig], ...]:
    found = []
    for tier, item in sorted(checked_object(value, path, list(TIERS)).items()):
        items = checked_object(item, f"{path}.{tier}", ["bytes_per_s", "latency_s"])
        bytes_per_s = parse_number(items.get("bytes_per_s"), f"{path}.{tier}.bytes_per_s", least=1.0)
        latency_s = parse_number(items.get("latency_s", 0.0), f"{path}.{tier}.latency_s", least=0.0)
        found.append((tier, ThrottleConfig(bytes_per_s, latency_s)))
    return tuple(found)


def _integer(value: object, path: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise config_error(path, f"{show(value)} is not an integer of at least 1", "give such an integer")
    return value


def _boolean(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise config_error(path, f"{show(value)} is not a boolean", "give true or false")
    return value


def _one_of(choices: tuple[str, ...]) -> Callable[[object, str], str]:
    def parse(value: object, path: str) -> str:
        if not isinstance(value, str) or value not in choices:
            raise config_error(path, f"unknown value {show(value)}", f"give one of {', '.join(choices)}")
        return value

    return parse


@dataclass(frozen=True, slots=True)
class TierConfig:
    """Tiers below the KV pool, the fastest first, and how they are used; the defaults are the documentation's."""

    host_bytes: int = field(default=0, metadata={"parse": parse_bytes, "tier": "host", "medium": "CPU_PINNED"})
    """Memory of each scheduler process for chunks; 0 = none are kept there."""
    disk: DiskConfig | None = field(default=None, metadata={"parse": _parse_disk, "tier": "disk", "medium": "DISK"})
    """Folder with one file per variant: its path, or `{"path": ..., "max_bytes": "200GB"}`."""
    remote: RemoteConfig | None = field(
        default=None, metadata={"parse": _parse_remote, "tier": "remote", "medium": "EXTERNAL"}
    )
    """Store for several machines: `redis://host:port/db` of a Redis or Valkey server, `mooncake://host:port` of a
    Mooncake master."""
    write: str = field(default="through", metadata={"parse": _one_of(WRITES)})
    """When a chunk is written down. `through`: as soon as it is computed; `evict`: before it is evicted."""
    loading: str = field(default="prefetch", metadata={"parse": _one_of(LOADINGS)})
    """When a chunk is brought up. `prefetch`: while its request waits; `layerwise`: its later layers while the forward
    runs; `sync`: at once, and all requests wait."""
    max_variants_per_chunk: int = field(default=2, metadata={"parse": _integer})
    """Variants of one chunk that each tier keeps."""
    timeout_s: float = field(default=30.0, metadata={"parse": parse_seconds})
    """Longest time that a request waits for a load; then its chunks are computed."""
    controller: bool = field(default=True, metadata={"parse": _boolean})
    """Whether a chunk is computed where that is estimated to be faster than loading it."""
    num_threads: int = field(default=2, metadata={"parse": _integer})
    """Workers that read and write, per scheduler process."""
    throttle: tuple[tuple[str, ThrottleConfig], ...] = field(default=(), metadata={"parse": _parse_throttle})
    """Slows single tiers down, for benchmarks."""

    def asked_for(self) -> dict[str, Any]:
        """Tier -> value of its key, the fastest first; those that are not asked for are left out."""
        return {tier: value for tier, key in _TIER_KEYS.items() if (value := getattr(self, key))}


_KEYS_OF_TIERS = [key for key in fields(TierConfig) if "tier" in key.metadata]
_TIER_KEYS = {key.metadata["tier"]: key.name for key in _KEYS_OF_TIERS}
TIERS = tuple(_TIER_KEYS)
EVENT_MEDIA = {key.metadata["tier"]: key.metadata["medium"] for key in _KEYS_OF_TIERS}
"""Names of the tiers in SGLang's events."""


def parse_tiers(value: object, path: str) -> TierConfig:
    """Checks the value of the key.

    Args:
        path: where it stood, for messages.

    Raises:
        ChunkCacheConfigError: an unknown key, a value outside its range, or no tier is asked for.
    """
    config = TierConfig(**parsed_fields(TierConfig, value, path))
    asked_for = config.asked_for()
    if not asked_for:
        *others, last = _TIER_KEYS.values()
        raise config_error(path, "names no tier", f"give {', '.join(others)} or {last}")
    return config
