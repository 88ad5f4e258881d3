"""EventKeys: 64-bit numbers that stand for chunks, tenants and variants outside of the process.

Verbs: `chunk`, `partition`, `variant`. Promise: who does not know the salt cannot tell from a number whether it is that
of a text, a tenant or a variant, nor whether two chunks of different tenants have one text; equal salts give equal
numbers, in every replica and at every start. They are signed, as the hashes of blocks in SGLang's KV events.
"""

from __future__ import annotations

import hashlib


class EventKeys:
    """See the head of this file.

    Args:
        salt: of those who may ask.
    """

    def __init__(self, salt: str) -> None:
        self._secret = hashlib.blake2b(salt.encode()).digest()

    def chunk(self, partition: bytes, key: bytes) -> int:
        """The number of a chunk, from its `Partition.key` and `chunk_key`."""
        return self._hash(b"chunk", partition + key)

    def partition(self, partition: bytes) -> int:
        """The number of a tenant, from its `Partition.key`."""
        return self._hash(b"partition", partition)

    def variant(self, key: bytes, name: str) -> int:
        """The number of a variant, from the `chunk_key` of its chunk and its `variant_name`."""
        return self._hash(b"variant", key + name.encode())

    def _hash(self, kind: bytes, data: bytes) -> int:
        digest = hashlib.blake2b(data, digest_size=8, key=self._secret, person=kind).digest()
        return int.from_bytes(digest, "big", signed=True)
