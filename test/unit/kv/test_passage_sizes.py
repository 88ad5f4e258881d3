"""The calculated sizes of passages: against sizes worked out by hand, and the page that shows them."""

from __future__ import annotations

import pytest

from doc_pages import DOCS, made_part
from passage_sizes import MODELS, PAGE, PROGRAM, table, token_bytes

BY_HAND = (28 * 2 * 4 * 128 * 2, 61 * (512 + 64) * 2, 32 * 2 * 8 * 128 * 2, 80 * 2 * 8 * 128 * 2)
"""Layers x K and V x KV heads x head x bytes; of DeepSeek-V3 layers x (latent + rotated) x bytes."""


@pytest.mark.parametrize(("name", "num_bytes"), zip(MODELS, BY_HAND, strict=True))
def test_bytes_of_a_token(name: str, num_bytes: int) -> None:
    assert token_bytes(name) == num_bytes


def test_the_page_shows_them() -> None:
    assert made_part(PROGRAM, table()) in (DOCS / PAGE).read_text(encoding="utf-8")
