"""Page: `page.html` of this folder, filled in with facts from the code, and its Content-Security-Policy.

Verb: `page`. The page holds no data of a server: its script asks the routes of administration, with the key that a
person enters. It loads nothing from elsewhere, and the policy lets no other script run.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import re
from pathlib import Path

from chunk_cache.advice import ADVICE
from chunk_cache.tiers.cost import MIN_OBSERVATIONS
from chunk_cache.token_kinds import COLOURS, WORDS, Kind
from chunk_cache.types import REASONS
from sglang_chunk_cache.admin.journal import KINDS, NUM_MINUTES

_FILE = Path(__file__).with_name("page.html")


@functools.cache
def page() -> tuple[str, str]:
    """The HTML, and its Content-Security-Policy."""
    facts = {
        "kinds": [{"name": kind, "words": WORDS[Kind(kind)], "colour": COLOURS[Kind(kind)]} for kind in KINDS],
        "minutes": NUM_MINUTES,
        "forwards": MIN_OBSERVATIONS,
        "reasons": {name: {"what": what, "remedy": ADVICE[name][1]} for name, what in REASONS.items()},
    }
    html = _FILE.read_text(encoding="utf-8").replace("FACTS", json.dumps(facts).replace("<", "\\u003c"))
    sources = {"script-src": _hashes(html, "script"), "style-src": _hashes(html, "style")}
    closed = "default-src 'none'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    return html, "; ".join([closed, *(f"{name} {hashes}" for name, hashes in sources.items())])


def _hashes(html: str, tag: str) -> str:
    """Digests of the inline elements of one tag, as a Content-Security-Policy names them."""
    texts = re.findall(f"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
    digests = (hashlib.sha256(text.encode()).digest() for text in texts)
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
