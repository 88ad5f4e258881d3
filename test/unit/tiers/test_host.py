"""HostMedium."""

from __future__ import annotations

import resource
from dataclasses import replace

import pytest
import torch

from sglang_chunk_cache.kv.stored_variant import TierError
from sglang_chunk_cache.tiers.host import HostMedium
from unit.tiers.medium_suite import FINGERPRINT, MediumSuite, OpenMedium, make_stored


class TestHost(MediumSuite):
    survives = False

    @pytest.fixture
    def open_medium(self) -> OpenMedium:
        return HostMedium

    def test_memory_of_the_process_is_used_up(self) -> None:
        """The limit is a real one, of this process, for the time of one allocation."""
        fingerprint = replace(FINGERPRINT, kv_heads=16, head_dim=128, v_head_dim=128)
        medium, stored = HostMedium(fingerprint), make_stored(fingerprint, length=8192)
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        soft, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20), hard))
        try:
            with pytest.raises(TierError) as caught:
                medium.write(stored)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        assert caught.value.reason == "full"
        assert medium.find(stored.info.key) == []
        medium.write(stored)
        assert medium.find(stored.info.key) == [stored.info]

    @pytest.mark.skipif(not torch.cuda.is_available(), reason="page-locked memory needs CUDA")
    def test_is_pinned(self) -> None:
        medium, stored = HostMedium(FINGERPRINT), make_stored()
        medium.write(stored)
        assert medium.read(stored.info).k.is_pinned()
