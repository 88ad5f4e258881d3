"""Hypothesis without deadlines: nothing here asserts a time, and the machine may be busy."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("chunk_cache", deadline=None)
settings.load_profile("chunk_cache")
