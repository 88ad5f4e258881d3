"""Chunk keys: equal keys mean equal tokens in the same partition.

`chunk_key` names one chunk, `chunk_keys` those of a prompt, a `Partition` a tenant. A chunk's key depends on its tokens
alone: its position and context belong to the variant. Tenants never share a key, because the partition is hashed first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from chunk_cache.types import Span

KEY_LEN = 16
"""Bytes of a key: 128 bits, so that accidental collisions do not happen."""
TEXT_LEN = 8
"""Additional bytes in the name of a text between chunks: a hash of the text alone."""

_PERSON = b"chunk-cache-1"  # separates our keys from any other use of the hash; the number is the encoding's version

TokenIds: TypeAlias = "array[int] | Sequence[int] | npt.NDArray[np.integer[Any]]"


@dataclass(frozen=True)
class Partition:
    """Who may share chunks: the fields by which the radix tree is partitioned.

    `None` and the empty string are different partitions. A LoRA adapter is already inside `extra_key`.
    """

    extra_key: str | None = None
    cache_salt: str | None = None

    @cached_property
    def key(self) -> bytes:
        """`KEY_LEN` bytes that stand for the partition in counters and outside of the process."""
        return chunk_key(self, ())

    @property
    def name(self) -> str:
        """`default`, or a digest, which does not show a client's salt."""
        return name_of_partition(self.key)


def name_of_partition(key: bytes) -> str:
    """The name of the partition that has this key."""
    return "default" if key == DEFAULT_PARTITION else key.hex()[:12]


def chunk_key(partition: Partition, token_ids: TokenIds) -> bytes:
    """The key of one chunk.

    Args:
        token_ids: int64 ``array('q')`` (fastest), any sequence of ints or an integer numpy array, shape [length].

    Returns:
        `KEY_LEN` bytes.

    Raises:
        TypeError: a token is not an integer.
    """
    state = _partition_state(partition)
    state.update(int64_buffer(token_ids))
    return state.digest()


def chunk_keys(partition: Partition, token_ids: TokenIds, spans: Sequence[Span]) -> list[bytes]:
    """The keys of all spans of one prompt, without copying its tokens.

    Args:
        token_ids: the whole prompt, shape [prompt_len].
        spans: half-open ranges of it.
    """
    base = _partition_state(partition)
    tokens = memoryview(int64_buffer(token_ids))
    keys = []
    for start, end in spans:
        state = base.copy()
        state.update(tokens[start:end])
        keys.append(state.digest())
    return keys


def chunks_among(pieces: Iterable[bytes]) -> list[bytes]:
    """The keys of chunks among `pieces` (`chunk_cache.prompt.chunk_prompt`), in their order."""
    return [piece for piece in pieces if len(piece) == KEY_LEN]


def text_names(pieces: Iterable[bytes]) -> frozenset[bytes]:
    """Hashes of the texts between chunks among `pieces` (`chunk_cache.prompt.chunk_prompt`)."""
    return frozenset(piece[KEY_LEN:] for piece in pieces if len(piece) > KEY_LEN)


def _partition_state(partition: Partition) -> hashlib.blake2b:
    """A hash that has read the partition."""
    state = hashlib.blake2b(digest_size=KEY_LEN, person=_PERSON)
    for field in (partition.extra_key, partition.cache_salt):
        # length first: ("ab", "c") and ("a", "bc") must differ; absent is neither empty nor any string
        if field is None:
            state.update(b"\x00")
        else:
            text = field.encode("utf-8", "surrogatepass")
            state.update(b"\x01" + len(text).to_bytes(8, "little") + text)
    return state


def int64_buffer(token_ids: TokenIds) -> array[int] | memoryview:
    """Token ids as a buffer that a hash can read: int64, `[length]`.

    Raises:
        TypeError: a token is not an integer.
    """
    if isinstance(token_ids, array):
        return token_ids if token_ids.typecode == "q" else array("q", token_ids)
    if isinstance(token_ids, np.ndarray):
        if token_ids.dtype.kind not in "iu":
            raise TypeError(f"token ids must be integers, not {token_ids.dtype}")
        return np.ascontiguousarray(token_ids, dtype=np.int64).data
    return array("q", token_ids)


DEFAULT_PARTITION = Partition().key
"""Key of the partition of requests that name no tenant."""
