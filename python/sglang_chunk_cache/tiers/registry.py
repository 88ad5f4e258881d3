"""The tiers of a configuration, opened: `open_tiers`. A new tier is a line of `MEDIA`, and one of `TierConfig`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import psutil

from chunk_cache.options.config import Config
from chunk_cache.options.tier_config import DiskConfig, RemoteConfig
from chunk_cache.tiers.placing import HOST
from chunk_cache.tiers.tier_ledger import TierLedger
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.tiers.disk import DiskMedium
from sglang_chunk_cache.tiers.host import HostMedium
from sglang_chunk_cache.tiers.medium import Medium
from sglang_chunk_cache.tiers.mooncake import MooncakeMedium
from sglang_chunk_cache.tiers.redis_medium import RedisMedium
from sglang_chunk_cache.tiers.throttled import Throttled
from sglang_chunk_cache.tiers.tier import REMOTE, Tier


def open_tiers(config: Config, fingerprint: Fingerprint, num_replicas: int = 1) -> list[Tier]:
    """Opens the tiers that the configuration asks for, the fastest first.

    Args:
        num_replicas: data-parallel replicas on this machine, each with the ranks that `fingerprint` counts.

    Raises:
        TierError: a tier cannot be opened.
        ImportError, ValueError: its client is not installed, its name is not known, or memory for it is not there.
    """
    assert config.tiers is not None, "no tier is asked for"
    throttles = dict(config.tiers.throttle)
    media = MEDIA | {HOST: partial(_open_host, num_replicas=num_replicas)}
    tiers = []
    for name, value in config.tiers.asked_for().items():
        medium, max_bytes = media[name](value, fingerprint)
        if name in throttles:
            medium = Throttled(medium, throttles[name].bytes_per_s, throttles[name].latency_s)
        ledger = TierLedger(max_bytes, config.eviction, config.ageing, config.partition_share)
        tiers.append(Tier(name, medium, ledger, is_asked=name == REMOTE))
    return tiers


def _open_host(num_bytes: int, fingerprint: Fingerprint, num_replicas: int = 1) -> tuple[Medium, int | None]:
    num_processes, available = fingerprint.tp_size * num_replicas, psutil.virtual_memory().available
    if num_bytes * num_processes > available:
        raise ValueError(
            f"host_bytes: {num_bytes} bytes for each scheduler process, of which --tp-size and --dp-size make "
            f"{num_processes}, but {available} are free for all; give fewer, or free memory"
        )
    return HostMedium(fingerprint), num_bytes


def _open_disk(disk: DiskConfig, fingerprint: Fingerprint) -> tuple[Medium, int | None]:
    max_bytes = None if disk.max_bytes is None else disk.max_bytes // fingerprint.tp_size
    return DiskMedium(disk.path, fingerprint), max_bytes


def _open_remote(remote: RemoteConfig, fingerprint: Fingerprint) -> tuple[Medium, int | None]:
    medium = MooncakeMedium if remote.url.startswith("mooncake:") else RedisMedium
    return medium(remote.url, fingerprint), None


MEDIA: dict[str, Callable[[Any, Fingerprint], tuple[Medium, int | None]]] = {
    HOST: _open_host,
    "disk": _open_disk,
    REMOTE: _open_remote,
}
"""How the medium of each tier is opened, from the value of its key: the medium, and the bytes of this rank in it."""
