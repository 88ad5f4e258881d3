"""Routing of requests by their passages, for clients of several replicas behind a gateway.

Verbs: `routing_key` (of a request's passages), `ReplicaKeys` (keys that lead to a replica of one's choice).

A gateway that hashes a header consistently, as SGLang's does (`--policy consistent_hashing`), sends equal keys to the
same replica. `routing_key` is the least hash of the passages (min-wise hashing): the chance that two requests have the
same key is the share of passages that they have in common, so those that share passages meet, and nothing has to be
known of the replicas. Who does know which replica holds what steers by `ReplicaKeys`. Promises: no state but that of
`ReplicaKeys`; a key tells nothing of a passage to who does not have it already, and with a salt nothing at all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from chunk_cache.prompt.marks import trimmed, word_end

KEY_HEADER = "x-smg-routing-key"
"""Header of a request: where it goes."""

REPLICA_HEADER = "x-smg-routed-worker-id"
"""Header of a reply: where it went."""


def routing_key(passages: Iterable[str | bytes], salt: str = "") -> str:
    """The key of a request with these passages, whatever their order; empty where there are none.

    Args:
        passages: texts as they are marked, or keys of chunks; the same kind in all requests. White space at the ends
            of a text and signs behind its last word do not count, as in its chunk.
        salt: of those who may know which requests share passages.

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
    """Keys that lead to each replica, learned from replies.

    Where replicas come and go, a key may lead elsewhere: `note` every reply, and it is right again.
    """

    def __init__(self) -> None:
        self._key_to: dict[str, str] = {}
        self._num_asked = 0

    def note(self, key: str, reply_headers: Mapping[str, str]) -> None:
        """Learns from a reply to a request with this key."""
        self._key_to = {replica: one for replica, one in self._key_to.items() if one != key}
        if replica := reply_headers.get(REPLICA_HEADER):
            self._key_to[replica] = key

    def replicas(self) -> list[str]:
        """Those that are known, by their addresses."""
        return sorted(self._key_to)

    def key_to(self, replica: str) -> str:
        """The key that leads to a replica; one that was never sent where none is known to."""
        return self._key_to.get(replica) or self.new_key()

    def key_to_most(self, held: Mapping[str, int], otherwise: str) -> str:
        """The key that leads to the replica that holds most; `otherwise` where none holds anything, or is known.

        Args:
            held: tokens by replica, as `Holders.who_holds` tells.
        """
        most = max(held, key=lambda replica: held[replica], default="")
        return self._key_to.get(most, otherwise) if held.get(most) else otherwise

    def new_key(self) -> str:
        """A key that was never sent: it leads to one of the replicas."""
        self._num_asked += 1
        return f"any-{self._num_asked}"
