"""What the process that answers HTTP and the schedulers say to each other about administration.

They travel as SGLang's own control requests do: over its sockets, to every scheduler process, one reply from rank 0.
All fields are numbers, bytes, text and containers of these, so both transports of SGLang carry them
(`SGLANG_USE_PICKLE_IPC` 0 and 1). Nothing of a client's is in them but checked numbers and keys.

Promise: importing this module makes the types known to SGLang's decoder in this process.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.io_struct import BaseReq, hook_custom_types


class ChunkCacheStatsReq(BaseReq, kw_only=True):
    """Counters and sizes of every rank."""


class ChunkCacheRequestsReq(BaseReq, kw_only=True):
    """What became of the latest requests, as rank 0 knows it."""


class ChunkCacheVariantsReq(BaseReq, kw_only=True):
    """Variants: `limit` of them, after the first `offset`; of one chunk where `key` is given; by id, or by uses."""

    key: bytes | None = None
    limit: int = 100
    offset: int = 0
    by_uses: bool = False


class ChunkCacheStoredReq(BaseReq, kw_only=True):
    """Which of these variants are stored, in the KV pool or in a tier below it."""

    names: dict[bytes, str]
    """One of each chunk, by its key (`variant_name`)."""
    is_again: bool = False
    """Whether a store was asked already for those that are not known to be stored."""


class ChunkCachePinReq(BaseReq, kw_only=True):
    """Keep these chunks. `until` is a name for the end, the same number on all ranks; no scheduler reads a clock."""

    keys: list[bytes]
    until: float


class ChunkCacheUnpinReq(BaseReq, kw_only=True):
    """Let go of these chunks, of those whose end is `until` or earlier, or, with neither, of all."""

    keys: list[bytes] | None = None
    until: float | None = None


class ChunkCacheEvictReq(BaseReq, kw_only=True):
    """Forget these chunks; where it says so, also all that was computed behind them, and overwrite what is freed."""

    keys: list[bytes]
    is_everywhere: bool = False


class ChunkCacheAdminReply(BaseReq, kw_only=True):
    """The answer to each of them.

    `ranks` has the result of every tensor-parallel rank for `ChunkCacheStatsReq`, otherwise that of rank 0, which all
    ranks must share, but for `ChunkCacheRequestsReq`: `agree` says whether they did. `dp_rank` is the replica.
    """

    ranks: list[dict[str, Any]]
    agree: bool = True
    dp_rank: int = 0


REQUESTS = (
    ChunkCacheStatsReq,
    ChunkCacheRequestsReq,
    ChunkCacheVariantsReq,
    ChunkCacheStoredReq,
    ChunkCachePinReq,
    ChunkCacheUnpinReq,
    ChunkCacheEvictReq,
)

hook_custom_types(*REQUESTS, ChunkCacheAdminReply)
