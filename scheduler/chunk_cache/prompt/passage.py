"""Passage: a text that stands beside the messages, or the prompt, of a request.

Verb: `write_passage`, which says how it stands in the prompt; `PLACEHOLDER` finds the names in a template.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

PLACEHOLDER = re.compile(r"\{(id|title|text)\}")
_TEMPLATE, _TITLED_TEMPLATE = "{text}\n\n", "{title}\n{text}\n\n"


@dataclass(frozen=True)
class Passage:
    """See the head of this file.

    Attributes:
        text: what it says.
        path: where the client gave it.
        id, title: empty = none.
    """

    text: str
    path: str = ""
    id: str = ""
    title: str = ""


def write_passage(passage: Passage, template: str | None) -> str:
    """A passage as it stands in the prompt; without a template: a line with its title, if it has one, and its text."""
    if template is None:
        template = _TITLED_TEMPLATE if passage.title else _TEMPLATE
    return PLACEHOLDER.sub(lambda name: str(getattr(passage, name[1])), template)
