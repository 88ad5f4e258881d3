"""NamedBlobs: what a storage backend of HiCache can do with bytes under a name, with errors as `TierError`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from sglang_chunk_cache.tiers.base import TierError
from sglang_chunk_cache.tiers.fingerprint import Fingerprint
from sglang_chunk_cache.tiers.record import corrupt

BACKENDS = ("file", "seaweedfs", "dynamic")
"""Those of SGLang 0.5.23 that take a tensor by name."""


class NamedBlobs:
    """See the head of this file.

    Args:
        prefix: of all names.

    Raises:
        ValueError: `backend` is none of `BACKENDS`; whatever else the backend itself raises.
    """

    def __init__(self, backend: str, fingerprint: Fingerprint, settings: Mapping[str, Any], prefix: str) -> None:
        if backend not in BACKENDS:
            raise ValueError(f"HiCache backend {backend!r}: it takes no tensors by name; use {', '.join(BACKENDS)}")
        self.where = f"hicache:{backend}"
        self._prefix = prefix
        self._backend = _make_backend(backend, fingerprint, dict(settings))

    def set(self, name: str, value: torch.Tensor) -> None:
        """Stores uint8 `[num_bytes]`; some backends leave what is there already under that name.

        Raises:
            TierError: unavailable.
        """
        with self._told():
            done = self._backend.set(self._prefix + name, value)
        if not done:
            raise self._failed("it refused to store, for lack of room perhaps")

    def get(self, name: str, num_bytes: int) -> torch.Tensor | None:
        """uint8 `[num_bytes]`, or None where it is not there.

        Raises:
            TierError: corrupt where it is there with fewer bytes; unavailable.
        """
        if not self.exists(name):
            return None
        target = torch.empty(num_bytes, dtype=torch.uint8)
        with self._told():
            try:
                found: torch.Tensor | None = self._backend.get(self._prefix + name, target)
            except OSError as error:
                if error.errno is not None:
                    raise
                # A backend's own way to say that there are too few bytes; the system's errors have a number.
                raise corrupt(f"{self.where} {name}", str(error)) from error
        if found is None and self.exists(name):
            raise corrupt(f"{self.where} {name}", f"is there, but not with {num_bytes} bytes")
        return found

    def exists(self, name: str) -> bool:
        """Raises TierError: unavailable."""
        with self._told():
            return bool(self._backend.exists(self._prefix + name))

    def close(self) -> None:
        close = getattr(self._backend, "close", None)  # not a part of the interface
        if close is not None:
            close()

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError, ValueError) as error:  # what the backends of SGLang raise; none has its own
            raise self._failed(str(error)) from error

    def _failed(self, problem: str) -> TierError:
        return TierError("unavailable", self.where, problem, "see what the backend has logged")


def _make_backend(backend: str, fingerprint: Fingerprint, settings: dict[str, Any]) -> Any:
    # Imported here: half a minute in a process that has not loaded SGLang yet.
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
    from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory

    config = HiCacheStorageConfig(
        tp_rank=fingerprint.tp_rank,
        tp_size=fingerprint.tp_size,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=False,  # every rank stores its own heads
        enable_storage_metrics=False,
        is_page_first_layout=False,
        model_name="chunk_cache",  # the model itself is in the fingerprint, which is in our names
        extra_config=settings,
    )
    return StorageBackendFactory.create_backend(backend, config, None)
