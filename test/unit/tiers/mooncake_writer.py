"""Another replica, for `test_mooncake.py`: writes one variant into a Mooncake store, says so, and stays.

python mooncake_writer.py URL [FOLDER TO IMPORT FROM ...]
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace

if __name__ == "__main__":
    sys.path[:0] = sys.argv[2:]

from unit.tiers.medium_suite import FINGERPRINT, StoredVariant, make_stored

LARGE = replace(FINGERPRINT, num_layers=8, kv_heads=8, head_dim=128, v_head_dim=128)


def stored() -> StoredVariant:
    """What it writes."""
    return make_stored(LARGE, length=100)


if __name__ == "__main__":
    from sglang_chunk_cache.tiers.mooncake import MooncakeMedium

    medium = MooncakeMedium(sys.argv[1], LARGE)
    medium.write(stored())
    print("written", flush=True)
    time.sleep(60)
