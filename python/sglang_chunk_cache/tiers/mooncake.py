"""MooncakeMedium: Mooncake's distributed store, memory of many machines (package `mooncake-transfer-engine`).

    chunk_cache/<fingerprint>/<key>/<slot>           description of a variant (`record`), slot 0 to 31
    chunk_cache/<fingerprint>/<key>/<name>/<place>   its KV: K of all layers, then V of all layers; then operators,
                                                     offsets and tails of all layers that keep states

The store has keys and values, but no lists and no compare-and-swap; of two writers of one key, the first wins. So the
variants of a chunk lie in numbered slots, and each writer takes the first that is free. The payload is complete before
a description names it, and lies at a new place each time: a reader finds all of the old payload, all of the new one, or
nothing. The store evicts objects one by one; a description without payload is removed when it is met, and a payload
without description is evicted when the store needs room.

The client moves bytes between the store and registered memory without a copy. Each call has memory of its own, since a
call that times out is abandoned but may still use its memory, and no memory can be registered twice.
"""

from __future__ import annotations

import operator
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import torch

from chunk_cache.options.tier_config import parse_bytes, shown_url
from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.stored_variant import Parts, StoredVariant, TierError, VariantInfo, host_memory
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

TIMEOUT_S = 5.0
"""Seconds that one call of the client may take; a call to a master that was stopped never ends."""
AGAIN_S = 2.0
"""Seconds between two attempts to reach a store that was unreachable."""
NUM_SLOTS = 32
"""Variants of one chunk that a store holds."""
LOCAL_BUFFER_LEN = 16 << 20
"""Bytes of the client's own buffer; only descriptions go through it."""
DEFAULT_SEGMENT = "4GB"
_MAX_UNANSWERED = 8
"""Calls without an answer, beyond which no further one is made until one of them ends, as all do once the master goes
on or the connection breaks."""

_FULL, _OUTSIDE = -200, -600
_ABSENT = (-704, -703)  # not found; still being written by somebody
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Entry:
    """A variant that the store describes."""

    slot: str
    raw: bytes
    """The description as it is in the slot."""
    record: Record
    payload: str
    """Where its KV is, if it was not evicted."""


class MooncakeMedium(LayerwiseMedium):
    """See the head of this file. Nothing is sent before the first call; it works on after a restart of the master.

    Args:
        url: `mooncake://master:port?segment=4GB&protocol=tcp&device=&host=&metadata=P2PHANDSHAKE&replicas=1`. `segment`
            is the memory that this process gives to the store, 0 = none; `host` the address under which others reach
            it, by default the one that reaches the master.

    Raises:
        ImportError: the client is not installed, or a library that it needs.
        ValueError: `url` is not one.
    """

    name = "remote"

    def __init__(self, url: str, fingerprint: Fingerprint) -> None:
        super().__init__(fingerprint)
        _import_client()
        self._where = shown_url(url)
        self._address = _Address(url)
        self._replication = self._address.replication()
        self._prefix = f"chunk_cache/{fingerprint.digest}/"
        self._lock = threading.Lock()
        self._store: Any = None
        self._try_again = 0.0
        self._unanswered: list[threading.Thread] = []  # calls that were given up; each keeps what it was given
        self._unanswered_lock = threading.Lock()

    def find(self, key: bytes) -> list[VariantInfo]:
        found: dict[str, _Entry] = {}
        for entry in self._entries(key):
            if found.setdefault(entry.record.info.name, entry) is not entry:  # two writers at once
                self._forget(entry)
        exist = self._exist([entry.payload for entry in found.values()])
        infos = []
        for entry, is_there in zip(found.values(), exist, strict=True):
            if is_there:
                infos.append(entry.record.info)
            else:  # evicted by the store
                self._forget(entry)
        return in_order(infos)

    def write(self, stored: StoredVariant) -> None:
        stored.check_fits(self.fingerprint)
        info, place = stored.info, secrets.token_hex(8)
        raw, payload = encode(self.fingerprint, info, checksums_of(stored), place), self._payload_key(info, place)
        self._put_payload(payload, stored)
        try:
            replaced = self._publish(info, raw)
        except TierError:
            with suppress(TierError):
                self._remove([payload])
            raise
        if replaced is not None:
            self._remove([replaced])

    def delete(self, entry_id: EntryId) -> bool:
        of_it = [entry for entry in self._entries(entry_id.key) if entry.record.info.name == entry_id.name]
        self._remove([key for entry in of_it for key in (entry.slot, entry.payload)])
        return bool(of_it)

    def scan(self, known: Iterable[bytes] = ()) -> Iterator[VariantInfo]:
        """The variants of known chunks: the store cannot be listed."""
        for key in known:
            yield from self.find(key)

    def read_note(self) -> bytes | None:
        key = f"{self._prefix}note"
        return self._get([key]).get(key)

    def write_note(self, note: bytes) -> None:
        self._check(self._call(lambda store: store.upsert(f"{self._prefix}note", note, self._replication)))

    def close(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            with suppress(TierError):
                self._in_time(store.close)

    def _layers(self, info: VariantInfo, target: Target) -> Iterator[tuple[int, Parts]]:
        where = f"{self._where} {info.entry_id}"
        entry = self._entry_of(info)
        if entry is None:
            raise missing(where)
        try:
            check_wanted(entry.record.info, info, where)
            for layers in self.batches(info):
                lens = self.fingerprint.part_lens(layers.start, info.length)
                all_raw = self._read_ranges(entry.payload, self._ranges(info, layers), where)
                for i, layer in enumerate(layers):
                    raws = [raw[i * num : (i + 1) * num] for raw, num in zip(all_raw, lens, strict=True)]
                    yield fill_layer(layer, target(layer), raws, entry.record, where)
        except TierError as error:
            if error.reason in ("corrupt", "missing"):
                with suppress(TierError):
                    self._forget(entry)
            raise

    def _entries(self, key: bytes) -> list[_Entry]:
        """The chunk's variants with sound descriptions; other descriptions are reported and removed."""
        entries = []
        for slot, raw in self._get(self._slots(key)).items():
            where = f"{self._where} {slot}"
            try:
                record = decode(raw, self.fingerprint, where)
                if record.info.key != key:
                    raise corrupt(where, f"holds the entry {record.info.entry_id}")
            except TierError as error:
                self._problems.tell(error)
                self._remove([slot])
            else:
                entries.append(_Entry(slot, raw, record, self._payload_key(record.info, record.place)))
        return entries

    def _entry_of(self, info: VariantInfo) -> _Entry | None:
        return next((entry for entry in self._entries(info.key) if entry.record.info.name == info.name), None)

    def _slots(self, key: bytes) -> list[str]:
        return [f"{self._prefix}{key.hex()}/{number}" for number in range(NUM_SLOTS)]

    def _payload_key(self, info: VariantInfo, place: str) -> str:
        return f"{self._prefix}{info.key.hex()}/{info.name}/{place}"

    def _publish(self, info: VariantInfo, raw: bytes) -> str | None:
        """Replaces the variant's description and returns the payload of the old one; without one, takes a free slot."""
        entries = {entry.slot: entry for entry in self._entries(info.key)}
        old = next((entry for entry in entries.values() if entry.record.info.name == info.name), None)
        for slot in self._slots(info.key):
            if old is not None:
                break
            if slot not in entries:
                self._check(self._call(operator.methodcaller("put", slot, raw, self._replication)))
                if self._get([slot]).get(slot) == raw:
                    return None
                old = self._entry_of(info)  # another writer was faster, perhaps with this very variant
        if old is None:
            remedy = "delete some (`evict`), or keep fewer variants (max_variants_per_chunk)"
            raise TierError("full", self._where, f"holds {NUM_SLOTS} variants of the chunk", remedy)
        slot = old.slot
        self._check(self._call(lambda store: store.upsert(slot, raw, self._replication)))
        return old.payload

    def _forget(self, entry: _Entry) -> None:
        """Removes an entry, unless its slot has another description by now."""
        if self._get([entry.slot]).get(entry.slot) == entry.raw:
            self._remove([entry.slot, entry.payload])

    def _ranges(self, info: VariantInfo, layers: range) -> list[tuple[int, int]]:
        """(start, length) of each part of these layers in the payload."""
        start, ranges = 0, []
        for group in self.fingerprint.layer_groups:
            for part_len in self.fingerprint.part_lens(group.start, info.length):
                if layers.start in group:
                    ranges.append((start + (layers.start - group.start) * part_len, len(layers) * part_len))
                start += len(group) * part_len
        return ranges

    def _put_payload(self, key: str, stored: StoredVariant) -> None:
        with host_memory(stored.info.payload_len):
            staged = torch.empty(stored.info.payload_len, dtype=torch.uint8)
        raw, layers, start = layer_bytes(staged), stored.layers, 0
        for group in self.fingerprint.layer_groups:
            for parts in zip(*layers[group.start : group.stop], strict=True):
                for part in map(layer_bytes, parts):
                    raw[start : start + len(part)] = part
                    start += len(part)

        def put(store: Any) -> int:
            with _registered(store, [staged]):
                return int(store.put_from(key, staged.data_ptr(), staged.nbytes, self._replication))

        self._check(self._call(put))

    def _read_ranges(self, key: str, ranges: Sequence[tuple[int, int]], where: str) -> list[memoryview]:
        """The bytes of an object at each (start, length)."""
        with host_memory(sum(length for _, length in ranges)):
            parts = [torch.empty(length, dtype=torch.uint8) for _, length in ranges]

        def get(store: Any) -> list[int]:
            with _registered(store, parts):
                starts, lengths = [[[start]] for start, _ in ranges], [[[length]] for _, length in ranges]
                pointers = [part.data_ptr() for part in parts]
                found = store.get_into_ranges(pointers, [[key]] * len(ranges), [[[0]]] * len(ranges), starts, lengths)
                return [int(one[0][0]) for one in found]

        for got, (_, length) in zip(self._call(get), ranges, strict=True):
            if got in _ABSENT:
                raise missing(where)
            if got == _OUTSIDE:
                raise corrupt(where, "the payload is shorter than its description says")
            self._check(got)
            if got != length:
                raise corrupt(where, f"{got} bytes instead of {length}")
        return [layer_bytes(part) for part in parts]

    def _get(self, keys: list[str]) -> dict[str, bytes]:
        """The values of those keys that exist."""
        there = [key for key, exists in zip(keys, self._exist(keys), strict=True) if exists]
        if not there:
            return {}
        buffers = self._call(lambda store: [b and bytes(b) for b in store.batch_get_buffer(there)])
        return {key: raw for key, raw in zip(there, buffers, strict=True) if raw is not None}

    def _exist(self, keys: list[str]) -> list[bool]:
        if not keys:
            return []
        found = self._call(lambda store: store.batch_is_exist(keys))
        for one in found:
            self._check(one)
        return [one == 1 for one in found]

    def _remove(self, keys: list[str]) -> None:
        """Removes keys, even while somebody reads them: what is read is verified."""
        if keys:
            for code in self._call(lambda store: store.batch_remove(keys, True)):
                if code not in _ABSENT:
                    self._check(code)

    def _check(self, code: int) -> None:
        """Raises a `TierError` if a call failed, that is, returned a negative number."""
        if code >= 0:
            return
        if code == _FULL:
            remedy = "give it more segments, or let it evict earlier (eviction_high_watermark_ratio of the master)"
            raise TierError("full", self._where, "no segment has room", remedy)
        raise TierError("unavailable", self._where, f"Mooncake's error {code}", "check the master and its segments")

    def _call(self, function: Callable[[Any], _T]) -> _T:
        """What `function` of the client returns.

        Raises:
            TierError: timeout, unavailable.
        """
        return self._in_time(lambda: function(self._connected()))

    def _in_time(self, function: Callable[[], _T]) -> _T:
        with self._unanswered_lock:
            self._unanswered = [one for one in self._unanswered if one.is_alive()]
            if len(self._unanswered) >= _MAX_UNANSWERED:
                problem = f"{len(self._unanswered)} earlier calls have no answer yet"
                raise TierError("timeout", self._where, problem, "check the master")
        box: list[tuple[_T | None, Exception | None]] = []

        def run() -> None:
            try:
                box.append((function(), None))
            except Exception as error:  # noqa: BLE001  # raised below, by the thread that asked
                box.append((None, error))

        # A daemon thread of its own, which need not end: the process can exit while it waits.
        thread = threading.Thread(target=run, daemon=True, name="mooncake")
        thread.start()
        thread.join(TIMEOUT_S)
        if not box:
            with self._unanswered_lock:
                self._unanswered.append(thread)
            raise TierError("timeout", self._where, f"no answer in {TIMEOUT_S} s", "check the master's load")
        result, error = box[0]
        if isinstance(error, TierError):
            raise error
        if error is not None:
            raise TierError("unavailable", self._where, str(error), "check the master and its segments") from error
        return result  # type: ignore[return-value]

    def _connected(self) -> Any:
        with self._lock:
            if self._store is None:
                if time.monotonic() < self._try_again:
                    raise self._address.unreachable(self._where)
                try:
                    self._store = self._address.connect(self._where)
                except TierError:
                    self._try_again = time.monotonic() + AGAIN_S
                    raise
            return self._store


class _Address:
    """The parsed url.

    Raises:
        ValueError: it names no master, or an option or value that is not known.
    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        known = {"segment": DEFAULT_SEGMENT, "protocol": "tcp", "device": "", "host": ""}
        known |= {"metadata": "P2PHANDSHAKE", "replicas": "1"}
        if unknown := set(options) - set(known):
            raise ValueError(f"{shown_url(url)}: unknown option {min(unknown)!r}; known: {', '.join(known)}")
        if not parts.hostname or not parts.port:
            raise ValueError(f"{shown_url(url)}: no master is named; write mooncake://host:port")
        self._master = (parts.hostname, parts.port)
        self._options = {**known, **options}
        self._segment = parse_bytes(self._options["segment"], "tiers.remote.url: segment")
        replicas = self._options["replicas"]
        if not replicas.isdecimal() or int(replicas) < 1:
            raise ValueError(f"{shown_url(url)}: replicas={replicas} is not an integer of at least 1")

    def replication(self) -> Any:
        """How often an object is kept."""
        config = _import_client().ReplicateConfig()
        config.replica_num = int(self._options["replicas"])
        return config

    def unreachable(self, where: str, problem: str = "the master is not there") -> TierError:
        return TierError("unavailable", where, problem, "start mooncake_master, or check the url")

    def connect(self, where: str) -> Any:
        """A client, with its segment mounted.

        Raises:
            TierError: unavailable.
        """
        try:  # the client itself would try for 90 seconds
            with socket.create_connection(self._master, timeout=TIMEOUT_S / 2) as probe:
                own_host = probe.getsockname()[0]
        except OSError as error:
            raise self.unreachable(where, str(error)) from error
        options = self._options
        store = _import_client().MooncakeDistributedStore()
        host, port = self._master
        code = store.setup(
            *(options["host"] or own_host, options["metadata"], self._segment, LOCAL_BUFFER_LEN),
            *(options["protocol"], options["device"], f"{host}:{port}"),
        )
        if code != 0:
            raise self.unreachable(where, f"the client was not set up (error {code})")
        return store


@contextmanager
def _registered(store: Any, parts: Sequence[torch.Tensor]) -> Iterator[None]:
    """Lets the store read and write this memory inside."""
    done = []
    try:
        for part in parts:
            if store.register_buffer(part.data_ptr(), part.nbytes) != 0:
                raise RuntimeError(f"{part.nbytes} bytes of memory were not registered")
            done.append(part.data_ptr())
        yield
    finally:
        for pointer in done:
            store.unregister_buffer(pointer)


def _import_client() -> Any:
    try:
        from mooncake import store
    except ImportError as error:
        packages = "mooncake-transfer-engine-non-cuda (with CUDA: mooncake-transfer-engine)"
        remedy = f"pip install {packages}, and the system's libibverbs (Debian: libibverbs1)"
        raise ImportError(f"the remote tier mooncake:// needs Mooncake's client ({error}): {remedy}") from error
    return store
