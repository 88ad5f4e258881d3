"""What a tier's entries are worth to its users, kept beside them, so that it survives a restart.

encode_worth   of a ledger, as the bytes of a medium's note
decode_worth   back, by entry id, in the order of eviction
"""

from __future__ import annotations

import json

from chunk_cache.tiers.tier_ledger import EntryId, TierLedger
from sglang_chunk_cache.tiers.record import corrupt


def encode_worth(ledger: TierLedger) -> bytes:
    """Ids and reuse frequencies f_r of stored entries, in the order of eviction."""
    listed = [[entry_id.key.hex(), entry_id.name, ledger.frequency_of(entry_id)] for entry_id in ledger]
    return json.dumps(listed, separators=(",", ":")).encode()


def decode_worth(raw: bytes | None, where: str) -> dict[EntryId, float]:
    """f_r by entry id, in the order of eviction; empty if `raw` is None, which means that there was no note.

    Raises:
        TierError: corrupt.
    """
    try:
        listed = json.loads(raw or b"[]")
        return {EntryId(bytes.fromhex(key), str(name)): max(0.0, float(worth)) for key, name, worth in listed}
    except (ValueError, TypeError, RecursionError) as error:
        raise corrupt(where, f"the note of what entries are worth is not one ({type(error).__name__})") from error
