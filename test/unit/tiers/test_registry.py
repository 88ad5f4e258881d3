"""Tiers are opened only if their memory is there for every scheduler process."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from chunk_cache.options.config import parse_config
from sglang_chunk_cache.tiers import registry
from unit.tiers.medium_suite import FINGERPRINT


def test_memory_is_needed_by_the_ranks_of_all_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.psutil, "virtual_memory", lambda: SimpleNamespace(available=1000))
    config, fingerprint = parse_config({"tiers": {"host_bytes": 200}}), replace(FINGERPRINT, tp_size=2)
    (tier,) = registry.open_tiers(config, fingerprint, num_replicas=2)
    assert tier.name == "host"
    expected = "^host_bytes: 200 bytes for each .* --tp-size and --dp-size make 6, but 1000 are free for all; give"
    with pytest.raises(ValueError, match=expected):
        registry.open_tiers(config, fingerprint, num_replicas=3)
