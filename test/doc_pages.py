"""Doc pages: what tests run of the documents."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def section(page: str, heading: str) -> str:
    """The text below a heading of a page, with the sections in it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    level, below = re.findall(rf"^(#+) {re.escape(heading)}\n(.*)", text, re.MULTILINE | re.DOTALL)[0]
    return re.split(rf"^#{{1,{len(level)}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    """Its fenced blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
