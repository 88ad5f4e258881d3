"""The key `tiers`: what is read, and that each mistake is named with its path."""

from __future__ import annotations

import pytest

from chunk_cache.errors import ChunkCacheConfigError
from chunk_cache.options.config import parse_config
from chunk_cache.options.tier_config import (
    DiskConfig,
    RemoteConfig,
    ThrottleConfig,
    TierConfig,
    parse_bytes,
    parse_tiers,
)


def test_everything_can_be_given():
    found = parse_config(
        {
            "tiers": {
                "host_bytes": "1.5GiB",
                "disk": {"path": "/chunks", "max_bytes": "2TB"},
                "remote": {"url": "redis://host"},
                "write": "through",
                "loading": "layerwise",
                "max_variants_per_chunk": 3,
                "timeout_s": 2,
                "controller": False,
                "num_threads": 4,
                "throttle": {"disk": {"bytes_per_s": 1e6, "latency_s": 0.5}},
            }
        }
    ).tiers
    assert found == TierConfig(
        host_bytes=3 * 2**29,
        disk=DiskConfig("/chunks", 2 * 10**12),
        remote=RemoteConfig("redis://host"),
        write="through",
        loading="layerwise",
        max_variants_per_chunk=3,
        timeout_s=2.0,
        controller=False,
        num_threads=4,
        throttle=(("disk", ThrottleConfig(1e6, 0.5)),),
    )
    assert list(found.asked_for()) == ["host", "disk", "remote"], "the fastest first"
    assert TierConfig(disk=DiskConfig("/chunks")).asked_for() == {"disk": DiskConfig("/chunks")}


def test_short_forms():
    assert parse_tiers({"disk": "/chunks"}, "tiers") == TierConfig(disk=DiskConfig("/chunks"))
    assert parse_tiers({"remote": "redis://host"}, "tiers") == TierConfig(remote=RemoteConfig("redis://host"))
    assert parse_tiers({"disk": "/chunks", "write": "evict"}, "tiers") == TierConfig(
        disk=DiskConfig("/chunks"), write="evict"
    )


@pytest.mark.parametrize(
    ("value", "num_bytes"), [(0, 0), (17, 17), ("17", 17), ("4GB", 4 * 10**9), ("4 GiB", 2**32), ("0.5kb", 500)]
)
def test_bytes(value, num_bytes):
    assert parse_bytes(value, "host_bytes") == num_bytes


@pytest.mark.parametrize("value", [-1, True, 1.5, "", "GB", "4XB", "-4GB", "nanGB", "infGB", "1e300TB", None, []])
def test_no_bytes(value):
    with pytest.raises(ChunkCacheConfigError, match=r"host_bytes: .* is not a number of bytes; give"):
        parse_bytes(value, "host_bytes")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "tiers: names no tier; give host_bytes, disk or remote"),
        ({"host_bytes": 0}, "tiers: names no tier"),
        ([], "tiers: [] is not an object"),
        ({"hosts": 1}, "tiers.hosts: unknown key 'hosts'; known keys: host_bytes, "),
        ({"disk": {"path": ""}}, "tiers.disk.path: '' is not a folder"),
        ({"disk": {"path": "/x", "size": 1}}, "tiers.disk.size: unknown key 'size'"),
        ({"disk": 3}, "tiers.disk: 3 is not an object"),
        ({"remote": {}}, "tiers.remote.url: null is not a url; give one such as redis://host:port/0"),
        ({"remote": {"url": 3}}, "tiers.remote.url: 3 is not a url"),
        ({"remote": {"url": "a", "settings": {}}}, "tiers.remote.settings: unknown key 'settings'; known keys: url"),
        (
            {"remote": {"hicache": "file", "settings": {}}},
            "tiers.remote.hicache: storage backends of HiCache are not supported any more; "
            "give the url of a Redis or Valkey server, or a folder as disk",
        ),
        ({"disk": "/x", "write": "back"}, "tiers.write: unknown value 'back'; give one of through, evict"),
        ({"disk": "/x", "loading": []}, "tiers.loading: unknown value []; give one of prefetch, layerwise, sync"),
        (
            {"disk": "/x", "max_variants_per_chunk": 0},
            "tiers.max_variants_per_chunk: 0 is not an integer of at least 1",
        ),
        ({"disk": "/x", "num_threads": True}, "tiers.num_threads: true is not an integer"),
        ({"remote": "redis://[::1"}, "tiers.remote.url: not a url (Invalid IPv6 URL); give one such as redis://"),
        ({"disk": "/x", "timeout_s": 1e10}, "tiers.timeout_s: 10000000000.0 is more than a day; give at most 86400"),
        ({"disk": "/x", "timeout_s": 0}, "tiers.timeout_s: 0 is not a number of at least 0.001"),
        ({"disk": "/x", "timeout_s": float("nan")}, "tiers.timeout_s: nan is not a number"),
        ({"disk": "/x", "controller": 1}, "tiers.controller: 1 is not a boolean"),
        ({"disk": "/x", "throttle": {"tape": {}}}, "tiers.throttle.tape: unknown key 'tape'"),
        (
            {"disk": "/x", "throttle": {"disk": {"bytes_per_s": 10**400}}},
            "tiers.throttle.disk.bytes_per_s: a huge integer is not",
        ),
        ({"disk": "/x", "throttle": {"disk": {}}}, "tiers.throttle.disk.bytes_per_s: null is not a number"),
    ],
)
def test_mistakes_are_named(value, message):
    with pytest.raises(ChunkCacheConfigError) as error:
        parse_config({"tiers": value})
    assert str(error.value).startswith(f"--chunk-cache-config: {message}")
