"""Checks of the tiers of a configuration: whether this machine can write and read them, and how fast; `try_tiers`."""

from __future__ import annotations

import shutil
import time
from array import array
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from chunk_cache.advice import Level
from chunk_cache.keys import KEY_LEN
from chunk_cache.tiers.placing import HOST
from chunk_cache_tools.doctor.checks import Check, refused_check
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.stored_variant import StoredVariant, TierError, VariantInfo
from sglang_chunk_cache.tiers.medium import Medium
from sglang_chunk_cache.tiers.redis_client import connect
from sglang_chunk_cache.tiers.registry import MEDIA

if TYPE_CHECKING:
    from chunk_cache.options.config import Config

NUM_TOKENS = 256
FINGERPRINT = Fingerprint("doctor", "uint8", num_layers=8, kv_heads=8, head_dim=128, v_head_dim=128, rotary="doctor")
"""Fingerprint that no model has, so that no server finds what is written here."""
TIMEOUT_S = 5.0


def try_tiers(config: Config) -> list[Check]:
    """One check for each configured tier; 4 MiB are written to it, read back and deleted."""
    asked_for = {} if config.tiers is None else config.tiers.asked_for()
    return [_check(name, value) for name, value in asked_for.items()]


def _check(name: str, value: Any) -> Check:
    label = f"tier {name}"
    try:
        with _leaving_nothing(name, value):
            medium, _ = MEDIA[name](value, FINGERPRINT)
            try:
                write_s, read_s = _try(medium)
            finally:
                medium.close()
    except (TierError, ImportError, ValueError) as error:
        return refused_check(label, error)
    if name == HOST:
        return Check(label, Level.OK, f"{value / 1e9:.1f} GB for each rank are free")
    size = FINGERPRINT.payload_len(NUM_TOKENS)
    written, read = (f"{size / seconds / 1e6:.0f} MB/s" for seconds in (write_s, read_s))
    cached = " (from the page cache)" if name == "disk" else ""
    return Check(label, Level.OK, f"{size >> 20} MiB written with {written}, read back with {read}{cached}")


def _try(medium: Medium) -> tuple[float, float]:
    """Writes, reads and deletes one variant; returns the seconds of the write and of the read."""
    shape = (FINGERPRINT.num_layers, NUM_TOKENS, FINGERPRINT.kv_heads, FINGERPRINT.head_dim)
    k, v = (torch.randint(256, shape, dtype=torch.uint8) for _ in range(2))
    info = VariantInfo(
        key=bytes(KEY_LEN),
        token_ids=array("q", range(NUM_TOKENS)),
        start=0,
        generation=0,
        context=(),
        statistics=None,
        payload_len=k.nbytes + v.nbytes,
    )
    began = time.perf_counter()
    medium.write(StoredVariant(info, k, v))
    written = time.perf_counter()
    medium.read(info)
    read = time.perf_counter()
    medium.delete(info.entry_id)
    return written - began, read - written


@contextmanager
def _leaving_nothing(name: str, value: Any) -> Iterator[None]:
    """Removes on exit what a medium makes beside its entries: folders, and a description of the fingerprint."""
    root = Path(value.path) if name == "disk" else None
    made = [] if root is None else [folder for folder in (root, *root.parents) if not folder.exists()]
    try:
        yield
    finally:
        if root is not None:
            shutil.rmtree(root / FINGERPRINT.digest, ignore_errors=True)
            with suppress(OSError):  # another process uses the folder by now, or it was not made
                for folder in made:
                    folder.rmdir()
        elif name == "remote":
            with suppress(Exception):  # the check already says why the store cannot be reached
                connect(value.url, TIMEOUT_S).delete(f"chunk_cache:{FINGERPRINT.digest}:fingerprint")
