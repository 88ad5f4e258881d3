"""Hypothesis without deadlines: nothing here asserts a time, and the machine may be busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("chunk_cache", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("chunk_cache")
