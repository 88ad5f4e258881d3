"""The page: what is put into it, and what its policy lets it do."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from chunk_cache.types import REASONS
from sglang_chunk_cache.admin.admin_page import page
from sglang_chunk_cache.admin.journal import KINDS
from sglang_chunk_cache.host.admin_routes import decide_request_auth


@dataclass(frozen=True)
class Facts:
    kinds: list[dict[str, str]]
    minutes: int
    forwards: int
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


STUB = """
class Node {
  constructor() { this.children = []; this.dataset = {}; this.style = {}; }
  append(...more) { this.children.push(...more); }
  replaceChildren(...others) { this.children = others; }
  setAttribute() {}
  get words() { return this.textContent ?? this.children.map(one => one.words ?? one).join("|"); }
}
const nodes = {facts: Object.assign(new Node(), {textContent: JSON.stringify(FACTS)})};
globalThis.document = {hidden: true, activeElement: {dataset: {}}, getElementById: id => nodes[id] ??= new Node(),
  createElement: () => new Node(), createElementNS: () => new Node()};
globalThis.sessionStorage = {getItem: () => ""};
globalThis.location = {host: "here"};
globalThis.setTimeout = () => {};
const replies = REPLIES;
globalThis.fetch = async path => ({ok: true, json: async () => replies[path.split("/")[1].split("?")[0]]});
SCRIPT
update().then(() => console.log(JSON.stringify(Object.fromEntries(
  Object.entries(nodes).map(([id, node]) => [id, node.words])))));
"""
"""A document in which the script of the page runs in Node.js, and tells the texts of all elements by their ids."""


def shown(stats: dict[str, Any], journal: dict[str, Any], variants: Sequence[dict[str, Any]] = ()) -> dict[str, str]:
    """The texts of a page with these replies."""
    if shutil.which("node") is None:
        pytest.skip("no Node.js here")
    html = page()[0]
    (facts,) = re.findall(r'id="facts">(.*?)</script>', html, re.DOTALL)
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    replies = {"stats": stats, "requests": journal, "variants": {"total": len(variants), "variants": list(variants)}}
    parts = {"FACTS": facts, "REPLIES": json.dumps(replies), "SCRIPT": script}
    program = re.sub("FACTS|REPLIES|SCRIPT", lambda found: parts[found[0]], STUB)
    done = subprocess.run(["node", "-"], input=program, capture_output=True, text=True, timeout=60)
    assert not done.returncode, done.stderr
    texts: dict[str, str] = json.loads(done.stdout)
    assert not texts["problem"]
    return texts


def test_what_is_shown() -> None:
    pool = {"variants": 1, "tokens": 30, "capacity_tokens": 2000, "bytes": 1}
    rank = {"tp_rank": 0, "dp_rank": 0, "tiers": {"pool": pool}, "index": {"num_gone": 0}}
    rank["partitions"] = {"variants": {"default": 2, "a1": 1}, "path_tokens": {"default": 50}}
    steps = {"a1": {"serves": "epic@0.3", "above": 1, "replies": 9, "reason": "it fits", "step": 1, "is_exact": False}}
    gate = {
        "requests": {"chosen": 4, "waiting": 1, "verified": 3, "given_up": 0, "dropped": {}},
        "target": {"kl": 0.1, "partitions": steps},
    }
    config = {"method": "epic", "ratio": 0.15, "target": {"kl": 0.1}}
    chunks = [{"status": "miss", "reason": "not_stored", "start": 0, "end": 9} for _ in range(2)]
    request = {
        "at": 60,
        "id": "r",
        "partition": "default",
        "method": "epic",
        "ratio": 0.15,
        "picture": [[1, 0, 0, 1]],
        "saved_s": 0,
        "chunks": chunks,
        "fallback_reason": None,
    }
    totals = {"requests": 1, "prefix": 10, "reused": 31, "recomputed": 9, "computed": 50, "saved_s": 0, "estimated": 0}
    journal = {"since": 0, "totals": totals, "minutes": [], "requests": [request]}
    texts = shown({"config": config, "ranks": [{**rank, "gate": gate}]}, journal)
    assert texts["server"] == "method epic, ratio 0.15, target kl 0.1, 3 replies verified"
    assert "From chunks|40 %|of 100 prompt tokens; 9 % computed again" in texts["tiles"]
    assert "Exact prefix|10 %" in texts["tiles"]
    assert "Computed|50 %" in texts["tiles"], "the three are all tokens"
    assert texts["requests"].endswith("0 of 2|not_stored")
    assert "Prefill saved|-|" in texts["tiles"], "too few forwards were timed"
    assert texts["tenants"] == "default|0|2|50|||||a1|0|1|||epic@0.3|1 of 9|it fits"
    assert texts["gate"].endswith("the gate: 4 chosen, 1 waiting, 3 verified, 0 given up")
    totals |= {"saved_s": 1.25, "estimated": 1}
    assert (
        "Prefill saved|1.3 s|estimated, for 1 of 1 requests"
        in shown({"config": config, "ranks": [rank]}, journal)["tiles"]
    )
    request["fallback_reason"] = "off"
    texts = shown({"config": {**config, "target": None}, "ranks": [rank]}, journal)
    assert texts["server"] == "method epic, ratio 0.15"
    assert texts["requests"].endswith("0 of 2|off")


def test_a_passage_is_shown_by_its_words_or_its_id_or_its_key() -> None:
    variant = dict(id=0, key="f" * 32, length=9, num_uses=1, reuse_frequency=1.0, cci=None)
    variant |= dict(generation=0, kind="met", stored_tokens=9, pinned_until=None, chunk_id=None)
    named = {**variant, "chunk_id": "Paris"}
    listed = [{**named, "words": "Paris is"}, named, variant]
    totals = dict.fromkeys(("requests", "prefix", "reused", "recomputed", "computed", "saved_s", "estimated"), 0)
    journal = {"since": 0, "totals": totals, "minutes": [], "requests": []}
    texts = shown({"config": {"method": "epic", "ratio": 0.15}, "ranks": []}, journal, listed)
    assert re.findall(r"(?:^|\|)([^|]+)\|9\|1\|1\.00", texts["chunks"]) == ["Paris is", "Paris", "f" * 12]
