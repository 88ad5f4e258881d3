"""The calculated costs of models with states: against published sizes, and the page that shows them."""

from __future__ import annotations

import pytest

from doc_pages import DOCS, made_part
from state_costs import LINKS, MODELS, PAGE, PROGRAM, SEAM_LEN, Costs, table


@pytest.mark.parametrize(("name", "active"), zip(MODELS, (3e9, 3e9, 27e9), strict=True))
def test_a_token_takes_what_the_active_parameters_say(name: str, active: float) -> None:
    """Their number is in the model's name, with embeddings, which are not multiplied."""
    assert Costs.of(name).flops / 2 == pytest.approx(active, rel=0.2)


def test_sizes_of_qwen3_next() -> None:
    """36 layers with 32 states of 128 x 128, operator and offset in float32; 12 that attend, 2 heads of 256."""
    costs = Costs.of("Qwen/Qwen3-Next-80B-A3B-Instruct")
    assert costs.transition == 36 * (2 * 32 * 128 * 128 * 4 + (2 * 16 + 32) * 128 * 3 * 2)
    assert costs.kv == 24 * 1024


@pytest.mark.parametrize("link", LINKS)
def test_at_the_break_even_the_transfer_takes_as_long_as_computing(link: str) -> None:
    costs = Costs.of(MODELS[0])
    computed_s = (costs.break_even(8192, link) - SEAM_LEN) * costs.token_s(8192)
    assert computed_s == pytest.approx(costs.transition / LINKS[link], rel=0.01)


def test_the_page_shows_them() -> None:
    assert made_part(PROGRAM, table()) in (DOCS / PAGE).read_text(encoding="utf-8")
