"""The messages survive both transports of SGLang."""

from __future__ import annotations

import pickle

import pytest
from sglang.srt.managers import io_struct

from sglang_chunk_cache.admin import scheduler_side as messages

KEY = bytes(range(16))

MESSAGES = [
    messages.ChunkCacheStatsReq(),
    messages.ChunkCacheVariantsReq(key=KEY, limit=5, offset=2),
    messages.ChunkCacheVariantsReq(),
    messages.ChunkCacheStoredReq(names={KEY: "one", bytes(16): "other"}),
    messages.ChunkCachePinReq(keys=[KEY], until=1790000000.123456),
    messages.ChunkCacheUnpinReq(keys=[KEY]),
    messages.ChunkCacheUnpinReq(until=1790000000.123456),
    messages.ChunkCacheEvictReq(keys=[]),
    messages.ChunkCacheAdminReply(
        ranks=[{"total": 1, "variants": [{"cci": 0.25, "key": "ab", "pinned_until": None, "ok": True}]}], agree=False
    ),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_round_trip(message):
    decoded = io_struct.msgpack_decode(io_struct.msgpack_encode(message))
    assert type(decoded) is type(message)
    assert decoded == message
    assert pickle.loads(pickle.dumps(message)) == message


def test_every_request_is_answered():
    from sglang_chunk_cache.admin import scheduler_side

    assert set(scheduler_side._HANDLERS) == set(messages.REQUESTS)
