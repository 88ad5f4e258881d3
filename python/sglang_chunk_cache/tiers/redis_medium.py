"""RedisMedium: a Redis or Valkey server that many machines share (`pip install 'redis>=5'`).

    chunk_cache:<fingerprint>:fingerprint            string: what the fingerprint stands for, for people
    chunk_cache:<fingerprint>:<key>                  hash: name of a variant -> its description (`record`)
    chunk_cache:<fingerprint>:<key>:<name>:<place>   hash: k0, v0, k1, v1, ... -> KV of a layer, and "layers";
                                                     a9, b9, t9, ... -> operator, offset, tail of one with states

The payload is complete before a description names it, and lies at a new place each time: a reader finds all of the old
payload, all of the new one, or nothing. It is one key of the server, so it is evicted and expires as a whole. Until a
description names it, it expires by itself, so a writer that dies leaves nothing. The server may evict entries
(`maxmemory-policy allkeys-lru`): they are then not found. One server, or a primary that fails over: not Redis Cluster.

Nothing that comes from the server is trusted: JSON and checksums, no pickle. Redis itself does not encrypt: `rediss://`
does. Commands are of Redis 4. Tested: servers Redis 6.2.5 and Valkey 9.1.2, clients redis 5.0.0 and 8.1.0.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any

from chunk_cache.errors import show
from chunk_cache.options.tier_config import shown_url
from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.stored_variant import Parts, StoredVariant, TierError, VariantInfo
from sglang_chunk_cache.tiers.medium import LayerwiseMedium, Target, in_order
from sglang_chunk_cache.tiers.record import (
    Record,
    check_wanted,
    checksums_of,
    corrupt,
    decode,
    encode,
    fill_layer,
    layer_bytes,
    missing,
)
from sglang_chunk_cache.tiers.redis_client import as_tier_errors, connect

TIMEOUT_S = 5.0
"""Seconds for connecting, and for waiting for the next bytes; the worst case of a call is a small multiple."""
UNNAMED_S = 600
"""Seconds for which a payload is kept that no description names; a write may not take longer."""


class RedisMedium(LayerwiseMedium):
    """See the head of this file. Nothing is sent before the first call; it works on after a restart of the server.

    Args:
        url: `redis://[[user]:password@]host[:port][/db]`, `rediss://` for TLS, `unix:///socket`.

    Raises:
        ImportError: the client is not installed.
        ValueError: `url` is not one.
    """

    name = "remote"

    def __init__(self, url: str, fingerprint: Fingerprint) -> None:
        super().__init__(fingerprint)
        self._where = shown_url(url)
        self._client: Any = connect(url, TIMEOUT_S)  # typed for the asynchronous client too
        self._prefix = f"chunk_cache:{fingerprint.digest}:"
        self._num_fields = len(self._fields(range(fingerprint.num_stored_layers))) + 1

    def find(self, key: bytes) -> list[VariantInfo]:
        with self._as_tier_errors():
            return in_order(list(self._infos_of(key.hex())))

    def write(self, stored: StoredVariant) -> None:
        stored.check_fits(self.fingerprint)
        info = stored.info
        place = secrets.token_hex(8)
        payload = self._payload_key(info, place)
        raw = encode(self.fingerprint, info, checksums_of(stored), place)
        with self._as_tier_errors():
            with self._client.pipeline() as pipe:
                pipe.hset(payload, "layers", self.fingerprint.num_layers)
                pipe.expire(payload, UNNAMED_S)
                pipe.hget(self._key(info), info.name)
                before = pipe.execute()[-1]
            parts_of = stored.layers
            for layers in self.batches(info):
                parts = (part for layer in layers for part in parts_of[layer])
                with self._client.pipeline(transaction=False) as pipe:
                    for field, part in zip(self._fields(layers), parts, strict=True):
                        pipe.hset(payload, field, layer_bytes(part))
                    pipe.execute()
            self._publish(info, raw, payload, before)

    def delete(self, entry_id: EntryId) -> bool:
        with self._as_tier_errors():
            raw = self._client.hget(self._key(entry_id), entry_id.name)
            return raw is not None and self._forget(self._key(entry_id), entry_id.name, raw)

    def scan(self, known: Iterable[bytes] = ()) -> Iterator[VariantInfo]:
        with self._as_tier_errors():
            digits = "?" * 32
            for name in self._client.scan_iter(match=f"{self._prefix}{digits}", count=1000):
                yield from self._infos_of(name.decode(errors="replace").removeprefix(self._prefix))

    def read_note(self) -> bytes | None:
        with self._as_tier_errors():
            return self._client.get(f"{self._prefix}note")

    def write_note(self, note: bytes) -> None:
        with self._as_tier_errors():
            self._client.set(f"{self._prefix}note", note)

    def close(self) -> None:
        self._client.close()

    def _layers(self, info: VariantInfo, target: Target) -> Iterator[tuple[int, Parts]]:
        key, where = self._key(info), f"{self._where} {info.entry_id}"
        with self._as_tier_errors():
            raw = self._client.hget(key, info.name)
        if raw is None:
            raise missing(where)
        try:
            record = decode(raw, self.fingerprint, where)
            check_wanted(record.info, info, where)
            for layers in self.batches(info):
                for layer, raws in zip(layers, self._fetch(record, layers, where), strict=True):
                    yield fill_layer(layer, target(layer), raws, record, where)
        except TierError as error:
            if error.reason in ("corrupt", "missing"):
                with suppress(TierError), self._as_tier_errors():
                    self._forget(key, info.name, raw)
            raise

    def _infos_of(self, key_hex: str) -> Iterator[VariantInfo]:
        """Variants with a sound description and a payload; other descriptions are removed."""
        key = self._prefix + key_hex
        found = []
        for field, raw in self._client.hgetall(key).items():
            name = field.decode(errors="replace")
            where = f"{self._where} {key} {show(name)}"
            try:
                record = decode(raw, self.fingerprint, where)
                if (record.info.key.hex(), record.info.name) != (key_hex, name):
                    raise corrupt(where, f"holds the entry {record.info.entry_id}")
            except TierError as error:
                self._problems.tell(error)
                self._forget(key, name, raw)
            else:
                found.append((name, raw, record))
        with self._client.pipeline(transaction=False) as pipe:
            for _, _, record in found:
                pipe.hlen(self._payload_key(record.info, record.place))
            lengths = pipe.execute()
        for (name, raw, record), length in zip(found, lengths, strict=True):
            if length == self._num_fields:
                yield record.info
            else:  # expired or evicted by the server
                self._forget(key, name, raw)

    def _publish(self, info: VariantInfo, raw: bytes, payload: str, before: bytes | None) -> None:
        """Writes the description, so that its payload is found; the payload of `before`, the old one, expires."""
        key = self._key(info)
        old_payload = self._named_by(key, info.name, before)
        with self._client.pipeline() as pipe:
            pipe.hget(key, info.name)
            pipe.hset(key, info.name, raw)
            if old_payload is not None:  # in this transaction: it may take effect although its reply never comes
                pipe.expire(old_payload, UNNAMED_S)
            pipe.persist(key)
            pipe.persist(payload)
            pipe.set(f"{self._prefix}fingerprint", json.dumps(self.fingerprint.describe()), nx=True)
            pipe.hlen(payload)
            results = pipe.execute()
        if results[-1] != self._num_fields:
            self._forget(key, info.name, raw)
            problem = "the payload was gone before it was complete"
            raise TierError("timeout", self._where, problem, "check the server's memory, and the connection's speed")
        replaced = self._named_by(key, info.name, results[0])
        if replaced not in (None, payload):  # it is its own where the client tried twice
            self._client.unlink(replaced)

    def _forget(self, key: str, name: str, raw: bytes) -> bool:
        """Removes a description, if it is still `raw`, and the payload that it names; returns whether it did."""
        from redis.exceptions import WatchError

        payload = self._named_by(key, name, raw)
        with self._client.pipeline() as pipe:
            try:
                pipe.watch(key)
                if pipe.hget(key, name) != raw:
                    return False
                pipe.multi()
                pipe.hdel(key, name)
                if payload is not None:
                    pipe.unlink(payload)
                pipe.execute()
            except WatchError:  # somebody else has just written to it
                return False
        return True

    def _named_by(self, key: str, name: str, raw: bytes | None) -> str | None:
        """The payload that a description names; None if it is not sound, or is of another variant."""
        if raw is not None:
            with suppress(TierError):
                record = decode(raw, self.fingerprint, self._where)
                if (self._key(record.info), record.info.name) == (key, name):
                    return self._payload_key(record.info, record.place)
        return None

    def _fetch(self, record: Record, layers: range, where: str) -> list[tuple[bytes, ...]]:
        fields = self._fields(layers)
        with self._as_tier_errors():
            values: list[Any] = self._client.hmget(self._payload_key(record.info, record.place), fields)
        if None in values:
            raise missing(where)
        return list(zip(*[iter(values)] * (len(fields) // len(layers)), strict=True))

    def _fields(self, layers: range) -> list[str]:
        """Fields of the parts of these layers."""
        num_layers = self.fingerprint.num_layers
        return [f"{part}{layer}" for layer in layers for part in ("kv" if layer < num_layers else "abt")]

    def _key(self, entry: VariantInfo | EntryId) -> str:
        return self._prefix + entry.key.hex()

    def _payload_key(self, info: VariantInfo, place: str) -> str:
        return f"{self._key(info)}:{info.name}:{place}"

    def _as_tier_errors(self) -> AbstractContextManager[None]:
        return as_tier_errors(self._where)
