"""Record: what stands in front of an entry's KV wherever it leaves the process.

    encode        description and checksums to bytes
    decode        back, or a `TierError`: the bytes are not trusted
    layer_bytes   a part of a layer as bytes, without a copy
    fill_layer    bytes to the parts of a layer, verified
    checksum      of one layer: K then V, or operator, offset, then tail

    magic 8 | version 4 | length of the JSON 4 | CRC-32 of version, length and JSON 4 | JSON, padded with spaces

Numbers are little-endian. The JSON is one object; token ids and statistics are base64 of little-endian int64 and
float32. Checksums are zlib's CRC-32, because it is in the standard library, runs without the GIL, and at 2.9 GiB/s is
faster than the disks it is for (one core of an x86-64 server; blake2b: 0.6). It detects damage, but not forgery by
somebody who may write to the store.
"""

from __future__ import annotations

import base64
import functools
import json
import re
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from chunk_cache.errors import show
from chunk_cache.index.chunk_statistics import ChunkStatistics
from chunk_cache.index.system_prompt import num_pieces
from chunk_cache.keys import KEY_LEN, TEXT_LEN
from sglang_chunk_cache.kv.fingerprint import FORMAT_VERSION, Fingerprint
from sglang_chunk_cache.kv.stored_variant import Parts, StoredVariant, TierError, VariantInfo

MAGIC = b"ChunkKV\n"
PREFIX = struct.Struct("<8sIII")
ALIGNMENT = 64
_MAX_JSON_LEN = 64 << 20
_MAX_NUMBER = 2**62  # of positions and generations
_PLACE = re.compile("[0-9a-f]*")
_STATISTICS = ("outside", "received", "inter", "system")
_REMEDY = "it was damaged or written by something else: it is removed, and computed again when it is needed"


@dataclass(frozen=True, slots=True)
class Record:
    """A decoded description."""

    info: VariantInfo
    checksums: tuple[int, ...]
    """One of each layer of the entry."""
    place: str
    """Place of the payload, for media that need to know."""


def encode(fingerprint: Fingerprint, info: VariantInfo, checksums: Sequence[int], place: str = "") -> bytes:
    """The description as bytes, whose number is a multiple of `ALIGNMENT`."""
    s, f, length = info.statistics, fingerprint, len(info.token_ids)
    fields = {
        "fingerprint": fingerprint.digest,
        "key": info.key.hex(),
        "start": info.start,
        "generation": info.generation,
        "context": [key.hex() for key in info.context],
        "prepared": info.is_prepared,
        "system": info.system.hex(),
        "partition": info.partition.hex(),
        "dtype": fingerprint.dtype,
        "k_shape": [f.num_layers, length, f.kv_heads, f.head_dim],
        "v_shape": [f.num_layers, length, f.kv_heads, f.v_head_dim],
        "checksums": list(checksums),
        "place": place,
        "statistics": s and {name: _pack(getattr(s, name)) for name in _STATISTICS},
        "cci": s and s.cci,
        "tokens": _pack(np.frombuffer(info.token_ids, dtype=np.int64)),
    }
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-(PREFIX.size + len(text)) % ALIGNMENT)
    return PREFIX.pack(MAGIC, FORMAT_VERSION, len(text), _text_checksum(FORMAT_VERSION, text)) + text


def encoded_len(prefix: bytes, where: str) -> int:
    """Bytes of the record that begins with `prefix`.

    Raises:
        TierError: corrupt.
    """
    if len(prefix) < PREFIX.size:
        raise corrupt(where, f"only {len(prefix)} bytes")
    magic, version, text_len, _ = PREFIX.unpack(prefix[: PREFIX.size])
    if magic != MAGIC or version != FORMAT_VERSION or text_len > _MAX_JSON_LEN:
        raise corrupt(where, "does not begin as an entry does")
    return PREFIX.size + int(text_len)


def decode(raw: bytes, fingerprint: Fingerprint, where: str) -> Record:
    """The record that `encode` made; its shapes and dtype are those of `fingerprint`.

    Raises:
        TierError: corrupt, or mismatch where it is of another fingerprint.
    """
    if len(raw) != encoded_len(raw, where):
        raise corrupt(where, f"the description has {len(raw)} bytes instead of {encoded_len(raw, where)}")
    text = raw[PREFIX.size :]
    if PREFIX.unpack(raw[: PREFIX.size])[3] != _text_checksum(FORMAT_VERSION, text):
        raise corrupt(where, "wrong checksum of the description")
    try:
        fields = json.loads(text)
        if fields["fingerprint"] != fingerprint.digest:
            raise mismatch(where, "another fingerprint")
        record = Record(_info(fields, fingerprint), tuple(map(int, fields["checksums"])), str(fields["place"]))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise corrupt(where, f"the description is not one ({type(error).__name__}: {error})") from error
    if not _PLACE.fullmatch(record.place):
        raise corrupt(where, f"{show(record.place)} is no place of a payload")
    if len(record.checksums) != fingerprint.num_stored_layers:
        raise corrupt(where, f"{len(record.checksums)} checksums for {fingerprint.num_stored_layers} layers")
    return record


def check_wanted(found: VariantInfo, wanted: VariantInfo, where: str) -> None:
    """Checks that an entry is the one that was asked for.

    Raises:
        TierError: mismatch.
    """
    if found.identity() != wanted.identity():
        differ = "tokens" if found.token_ids != wanted.token_ids else "position or context"
        raise mismatch(where, f"{differ} of another variant")


def layer_bytes(part: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, writable."""
    return part.view(torch.uint8).numpy().data.cast("B")


def checksum(parts: Parts) -> int:
    """CRC-32 of the parts of one layer, in order."""
    return functools.reduce(lambda so_far, part: zlib.crc32(layer_bytes(part), so_far), parts, 0)


def checksums_of(stored: StoredVariant) -> list[int]:
    """One checksum of every layer of the entry."""
    return [checksum(parts) for parts in stored.layers]


def check_layer(layer: int, parts: Parts, record: Record, where: str) -> None:
    """Checks that a layer is what was written, by its checksum.

    Raises:
        TierError: corrupt.
    """
    if checksum(parts) != record.checksums[layer]:
        raise corrupt(where, f"wrong checksum of layer {layer}")


def fill_layer(
    layer: int, parts: Parts, raws: Sequence[bytes | memoryview], record: Record, where: str
) -> tuple[int, Parts]:
    """Copies the bytes of a layer into its parts, and verifies them; returns layer and parts.

    Raises:
        TierError: corrupt.
    """
    if [len(raw) for raw in raws] != [part.nbytes for part in parts]:
        raise corrupt(where, f"layer {layer} of {' and '.join(str(len(raw)) for raw in raws)} bytes")
    for part, raw in zip(parts, raws, strict=True):
        layer_bytes(part)[:] = raw
    check_layer(layer, parts, record, where)
    return layer, parts


def mismatch(where: str, problem: str) -> TierError:
    return TierError("mismatch", where, problem, "it is not used; a folder or database per model avoids this")


def missing(where: str) -> TierError:
    return TierError("missing", where, "is not there any more", "another server or the store itself has evicted it")


def corrupt(where: str, problem: str) -> TierError:
    return TierError("corrupt", where, problem, _REMEDY)


def _info(fields: dict[str, Any], fingerprint: Fingerprint) -> VariantInfo:
    tokens = array("q", _unpack(fields["tokens"], "<i8").astype(np.int64).tobytes())
    length = len(tokens)
    f = fingerprint
    shapes = ([f.num_layers, length, f.kv_heads, f.head_dim], [f.num_layers, length, f.kv_heads, f.v_head_dim])
    if (fields["k_shape"], fields["v_shape"]) != shapes or fields["dtype"] != f.dtype or not length:
        raise ValueError(f"KV of {fields['k_shape']} and {fields['v_shape']} {fields['dtype']}, not of {shapes}")
    start, generation = int(fields["start"]), int(fields["generation"])
    if not (0 <= start < _MAX_NUMBER and 0 <= generation < _MAX_NUMBER):
        raise ValueError(f"position {start} or generation {generation}")
    key, context = bytes.fromhex(fields["key"]), tuple(bytes.fromhex(key) for key in fields["context"])
    partition = bytes.fromhex(fields["partition"])
    if not {len(one) for one in (key, partition)} == {KEY_LEN} >= {len(one) for one in context} - {KEY_LEN + TEXT_LEN}:
        raise ValueError("a key of another length")
    system = bytes.fromhex(fields["system"])
    statistics = None
    if fields["statistics"] is not None:
        parts = {name: _unpack(value, "<f4").astype(np.float32) for name, value in fields["statistics"].items()}
        if not length == len(parts["outside"]) == len(parts["received"]):
            raise ValueError("statistics of another length")
        cci = float(fields["cci"])
        sizes = len(parts["inter"]), len(parts["system"])
        if sizes != (len(context), num_pieces(system)) or not 0.5 <= cci <= 1.0:
            raise ValueError(f"statistics of {sizes[0]} chunks of {len(context)}, {sizes[1]} pieces, CCI {cci}")
        statistics = ChunkStatistics(parts["outside"], parts["received"], parts["inter"], cci, parts["system"])
    is_prepared = bool(fields["prepared"])
    num_bytes = f.payload_len(length)
    return VariantInfo(key, tokens, start, generation, context, statistics, num_bytes, is_prepared, system, partition)


def _pack(values: np.ndarray) -> str:
    return base64.b64encode(values.astype(values.dtype.newbyteorder("<")).tobytes()).decode()


def _unpack(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(base64.b64decode(text, validate=True), dtype=dtype)


def _text_checksum(version: int, text: bytes) -> int:
    return zlib.crc32(text, zlib.crc32(struct.pack("<II", version, len(text))))
