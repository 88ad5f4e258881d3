"""The page: what is put into it, and what its policy lets it do."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

import pytest

from chunk_cache.types import REASONS
from sglang_chunk_cache.admin.admin_page import page
from sglang_chunk_cache.admin.journal import KINDS
from sglang_chunk_cache.host.admin_routes import decide_request_auth


@dataclass(frozen=True)
class Facts:
    kinds: list[dict[str, str]]
    minutes: int
    reasons: dict[str, dict[str, str]]


@pytest.fixture(scope="module")
def facts() -> Facts:
    (text,) = re.findall(r'<script type="application/json" id="facts">(.*?)</script>', page()[0], re.DOTALL)
    return Facts(**json.loads(text))


def test_every_kind_has_words_and_a_colour(facts: Facts) -> None:
    assert tuple(kind["name"] for kind in facts.kinds) == KINDS
    assert all(re.fullmatch("#[0-9A-F]{6}", kind["colour"]) and kind["words"] for kind in facts.kinds)


def test_every_reason_has_a_remedy(facts: Facts) -> None:
    assert facts.reasons.keys() == REASONS.keys()
    assert all(one["what"] and one["remedy"] for one in facts.reasons.values())


def test_nothing_comes_from_elsewhere() -> None:
    html, policy = page()
    assert set(re.findall(r"https?://[^\"'\s]+", html)) == {"http://www.w3.org/2000/svg"}, "the name of SVG"
    assert not re.search(r"\b(src|href|style|on\w+)\s*=\s*[\"']|innerHTML|eval\(", html.split("<script>")[0])
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(", html)
    directives = dict(one.split(" ", 1) for one in policy.split("; "))
    assert directives["default-src"] == "'none'"
    assert directives["connect-src"] == "'self'"
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]+'", directives[name]), "one element, and no other"


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST"])
@pytest.mark.parametrize(
    "path", ["/chunk_cache", "/chunk_cache/", "/chunk_cache/stats", "/chunk_cache//", "/chunk_cache?", "/", ""]
)
def test_the_page_alone_is_open(method: str, path: str) -> None:
    asked = []

    def original(**kwargs: str) -> str:
        asked.append(kwargs)
        return "as SGLang decides"

    decision = decide_request_auth(original, method=method, path=path, api_key="k")  # type: ignore[arg-type]
    if path in ("/chunk_cache", "/chunk_cache/") and method != "POST":
        assert (decision.allowed, asked) == (True, [])
    else:
        assert decision == "as SGLang decides"
        assert asked == [{"method": method, "path": path, "api_key": "k"}]
