"""The docs list what the code knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from chunk_cache.config import STATISTICS_LAYERS, Config
from chunk_cache.methods import METHODS, NOT_BUILT
from chunk_cache.request_options import KEYS, MODES
from chunk_cache.types import REASONS, Status
from sglang_chunk_cache.host import refusals

DOCS = Path(__file__).parents[3] / "docs"


@pytest.mark.parametrize("word", [*REASONS, *Status, *METHODS, *MODES, *KEYS, *Config.__dataclass_fields__])
def test_api_doc_knows(word):
    assert f"`{word}`" in (DOCS / "api.md").read_text()


OPTIONS = sorted({option.name for method in METHODS.values() for option in method.options_schema})


@pytest.mark.parametrize("word", [*METHODS, *NOT_BUILT, *OPTIONS, *STATISTICS_LAYERS], ids=repr)
def test_methods_doc_knows(word):
    assert f"`{word}`" in (DOCS / "methods.md").read_text()


@pytest.mark.parametrize("rule", refusals.FLAG_RULES + refusals.BACKEND_RULES, ids=lambda rule: rule.name)
def test_compatibility_doc_knows(rule):
    assert f"--{rule.name.replace('_', '-')}" in (DOCS / "compatibility.md").read_text()


@pytest.mark.parametrize("word", [*refusals.ARCHITECTURES, *refusals.ROPE_TYPES, *refusals.ATTENTION_BACKENDS])
def test_compatibility_doc_lists_what_is_served(word):
    assert f"`{word}`" in (DOCS / "compatibility.md").read_text()
