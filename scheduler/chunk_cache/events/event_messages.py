"""Messages that tell what a replica holds, in the framing of SGLang's KV events.

Verbs: `message_of` (an `Event` as it travels), `read_batch` (a payload). A batch is `[ts, events, attn_dp_rank,
instance]` in msgpack, and travels as topic, sequence number (8 bytes, big-endian) and payload. Readers of SGLang's
events read it too: they pass over the fields that they do not know.

Promise: no token id is in it. `block_hashes` has one number per chunk, which only those who have the salt can make.
"""

from __future__ import annotations

import msgspec

from chunk_cache.events.event_log import POOL, Event
from chunk_cache.options.tier_config import EVENT_MEDIA

MEDIA = {POOL: "GPU", **EVENT_MEDIA}
"""Names of pool and tiers in SGLang's events; the pool has that of the GPU wherever it is."""

TOPIC = "chunks"
END_SEQ = b"\xff" * 8
"""Stands in place of a sequence number when a replay is over."""


class BlockStored(msgspec.Struct, tag=True, frozen=True, gc=False):
    """A variant is held from now on; or is still held, which is told now and then."""

    block_hashes: list[int]
    """The chunk's (`EventKeys.chunk`)."""
    block_size: int
    """Tokens of the chunk."""
    medium: str
    """One of `MEDIA`."""
    partition: int
    variant: int
    parent_block_hash: None
    token_ids: list[int]
    """Always empty."""
    lora_id: None


class BlockRemoved(msgspec.Struct, tag=True, frozen=True, gc=False):
    """A variant is held no more."""

    block_hashes: list[int]
    block_size: int
    medium: str
    partition: int
    variant: int


class AllBlocksCleared(msgspec.Struct, tag=True, frozen=True, gc=False):
    """Nothing is held any more."""

    medium: str | None
    """In one tier; None = in all."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """What has changed since the last batch."""

    ts: float
    """Seconds since 1970."""
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None
    instance: str
    """Different at every start of a server."""


def message_of(event: Event) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """An event as it travels."""
    medium = None if event.tier is None else MEDIA[event.tier]
    if medium is None or event.kind == "cleared":
        return AllBlocksCleared(medium)
    if event.kind == "removed":
        return BlockRemoved([event.chunk], event.num_tokens, medium, event.partition, event.variant)
    return BlockStored([event.chunk], event.num_tokens, medium, event.partition, event.variant, None, [], None)


_BATCH = msgspec.msgpack.Decoder(Batch)


def read_batch(payload: bytes) -> Batch:
    """Reads a payload.

    Raises:
        msgspec.DecodeError: it is no batch of ours.
    """
    return _BATCH.decode(payload)
