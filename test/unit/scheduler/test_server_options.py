"""Options of a server that do not go together, each told in one sentence."""

from __future__ import annotations

from typing import Any

import pytest

from chunk_cache.server_options import server_problem

FINE: dict[str, Any] = {
    "method": "near",
    "ratio": 0.15,
    "separator": "<|chunk|>",
    "config": {},
    "selector": None,
    "target": None,
}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"ratio": 1},
        {"method": "cacheclip", "selector": "DIR", "config": {"selector": {"timeout_s": 1}}},
        {"config": {"verify_share": 1}, "target": {"kl": 0.1}},
    ],
)
def test_what_goes_together_is_no_problem(given: dict[str, Any]) -> None:
    assert server_problem(**{**FINE, **given}) is None


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"method": ["near"]}, "--chunk-cache-method ['near'] is not known"),
        ({"ratio": True}, "--chunk-cache-ratio must be a number from 0 to 1, not True."),
        ({"separator": "\n"}, "--chunk-cache-separator must be a string"),
        ({"config": []}, "--chunk-cache-config must be a JSON object."),
        ({"config": {"alpha": -1}}, "--chunk-cache-config: alpha: "),
        ({"selector": 1}, "--chunk-cache-selector must be a Hugging Face folder or name, not 1."),
        ({"method": "cacheclip", "ratio": 2.0}, "--chunk-cache-ratio"),
        ({"target": {"kl": 0.1}}, '--chunk-cache-target needs "verify_share" above 0'),
        ({"config": {"verify_share": 1}, "target": {}}, "--chunk-cache-target"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(given: dict[str, Any], sentence: str) -> None:
    problem = server_problem(**{**FINE, **given})
    assert problem is not None
    assert problem.startswith(sentence)
    assert problem.endswith(".")
    assert not problem.endswith("..")
