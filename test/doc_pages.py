"""Doc pages: what tests read of the documents, and the parts of them that are made from code.

section, blocks             the text below a heading; the fenced blocks of a language
made_part, write_made_part  a part that a program makes, between two comments
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def section(page: str, heading: str) -> str:
    """The text below a heading of a page, with the sections in it."""
    text = (DOCS / page).read_text(encoding="utf-8")
    level, below = re.findall(rf"^(#+) {re.escape(heading)}\n(.*)", text, re.MULTILINE | re.DOTALL)[0]
    return re.split(rf"^#{{1,{len(level)}}} ", below, maxsplit=1, flags=re.MULTILINE)[0]


def blocks(text: str, language: str) -> list[str]:
    """The fenced blocks of a language, without the indentation that they have in a list."""
    found = re.findall(rf"^ *```{language}\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL)
    return [textwrap.dedent(block) for block in found]


def made_part(program: str, text: str) -> str:
    """The part as it stands in a page.

    Args:
        program: by which it is made, from the root of the project.
    """
    return f"{_begin(program)}{text}\n{_END}"


def write_made_part(page: str, program: str, text: str) -> None:
    """Puts it in the place of the part that the program made before."""
    path = DOCS / page
    before, _, rest = path.read_text(encoding="utf-8").partition(_begin(program))
    path.write_text(f"{before}{made_part(program, text)}{rest.partition(_END)[2]}", encoding="utf-8")


_END = "<!-- end -->\n"


def _begin(program: str) -> str:
    return f"<!-- made by python {program} -->\n"
