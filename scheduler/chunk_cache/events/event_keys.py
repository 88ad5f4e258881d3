"""EventKeys: 64-bit numbers that stand for chunks, tenants and variants outside of the process.

Verbs: `chunk`, `partition`, `variant`. Promises: without the salt nobody can tell whether a number stands for a given
text, tenant or variant, nor whether two chunks of different tenants have the same text; equal salts give equal numbers,
in every replica and at every start. The numbers are signed, like the hashes of blocks in SGLang's KV events.
"""

from __future__ import annotations

import hashlib


class EventKeys:
    """See the head of this file.

    Args:
        salt: the secret of those who may ask.
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
