"""Routing of requests by their passages, for clients of several replicas behind a gateway.

Verbs: `routing_key` (the key for a request's passages), `ReplicaKeys` (keys that lead to a given replica).

A gateway that hashes a header consistently, as SGLang's does (`--policy consistent_hashing`), sends equal keys to the
same replica. `routing_key` is the smallest hash of the passages (min-wise hashing). Two requests have the same key with
a probability equal to the share of passages that they have in common, so requests that share passages tend to meet on a
replica, and the client need not know what replicas hold. A client that does know can use `ReplicaKeys`.
Promises: only `ReplicaKeys` has state; a key tells nothing about a passage to those who do not have it already, and
with a secret salt not even to those who do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from chunk_cache.prompt.marks import trimmed, word_end

KEY_HEADER = "x-smg-routing-key"
"""Request header with the routing key."""

REPLICA_HEADER = "x-smg-routed-worker-id"
"""Reply header with the address of the replica that answered."""


def routing_key(passages: Iterable[str | bytes], salt: str = "") -> str:
    """The key of a request with these passages, whatever their order; empty if there are none.

    Args:
        passages: texts as they are marked, or keys of chunks; the same kind in all requests. White space at the ends
            of a text and punctuation behind its last word do not count, as in its chunk.
        salt: a secret, without which nobody can compute the key of known passages.

    Example:
        >>> routing_key(["Paris is in France.", "Rome is in Italy."]) == routing_key(["Rome is in Italy."])
        True
    """
    secret = hashlib.blake2b(salt.encode()).digest()
    hashes = (hashlib.blake2b(_bytes(one), digest_size=16, key=secret).hexdigest() for one in passages)
    return min(hashes, default="")


def _bytes(passage: str | bytes) -> bytes:
    if isinstance(passage, bytes):
        return passage
    _, core, _ = trimmed(passage)
    return core[: word_end(core)].encode()


class ReplicaKeys:
    """A key that leads to each replica, learned from replies.

    When replicas come or go, a key may lead elsewhere; call `note` for every reply, which corrects this.
    """

    def __init__(self) -> None:
        self._key_to: dict[str, str] = {}
        self._num_asked = 0

    def note(self, key: str, reply_headers: Mapping[str, str]) -> None:
        """Learns from a reply which replica this key leads to; the empty key, of no passages, leads to none."""
        self._key_to = {replica: one for replica, one in self._key_to.items() if one != key}
        if key and (replica := reply_headers.get(REPLICA_HEADER)):
            self._key_to[replica] = key

    def replicas(self) -> list[str]:
        """Addresses of the replicas for which a key is known."""
        return sorted(self._key_to)

    def key_to(self, replica: str) -> str:
        """The key that leads to a replica; if none is known, one that was never sent."""
        return self._key_to.get(replica) or self.new_key()

    def key_to_most(self, held: Mapping[str, int], otherwise: str) -> str:
        """The key that leads to the replica that holds most; `otherwise` if none holds anything, or no key is known.

        Args:
            held: number of tokens by replica, as `Holders.who_holds` returns it.
        """
        most = max(held, key=lambda replica: held[replica], default="")
        return self._key_to.get(most, otherwise) if held.get(most) else otherwise

    def new_key(self) -> str:
        """A key that was never sent: it leads to one of the replicas."""
        self._num_asked += 1
        return f"any-{self._num_asked}"
