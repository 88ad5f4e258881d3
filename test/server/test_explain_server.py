"""`chunk-cache explain` against a real server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from chunk_cache.methods import METHODS_OF_ANY_SERVER
from chunk_cache.token_kinds import Kind
from chunk_cache_tools.explain import replies
from chunk_cache_tools.explain.explain_command import main
from chunk_cache_tools.explain.states import Explanation
from server.contract import Marked, Passages, marked
from server_fixture import Server

pytestmark = pytest.mark.server


@pytest.fixture
def prompt(passages: Passages) -> Marked:
    return marked(passages.several(3))


@pytest.fixture
def ask(server: Server, prompt: Marked, tmp_path: Path) -> Any:
    """`(arguments) -> (exit code, explanations by label)` for the prompt of this test."""
    (tmp_path / "prompt.txt").write_text(prompt.text, encoding="utf-8")

    def run(*argv: str) -> tuple[int, dict[str, Explanation]]:
        kept = str(tmp_path / "replies.jsonl")
        common = ("--url", server.url, "--prompt", str(tmp_path / "prompt.txt"), "--save", kept)
        code = main([*common, "--out", str(tmp_path / "out.png"), "--out", str(tmp_path / "out.html"), *argv])
        if code:
            return code, {}
        tokens, explanations = replies.load(kept, None)
        assert "".join(tokens.texts).endswith(prompt.plain)
        return code, {one.label: one for one in explanations}

    return run


def positions(one: Explanation, *kinds: Kind) -> set[int]:
    return {position for position, state in enumerate(one.states) if state.kind in kinds}


def test_every_method_is_drawn(ask, prompt, tokenizer, tmp_path, capsys):
    code, found = ask("--ratio", "0.3")
    captured = capsys.readouterr()
    assert (code, captured.err) == (0, "")
    assert list(found) == list(METHODS_OF_ANY_SERVER)
    spans = prompt.spans(tokenizer)
    reused = {place for start, end in spans[1:] for place in range(start, end)}  # the first was primed where it stands
    for label, one in found.items():
        assert [chunk["status"] for chunk in one.reply["chunks"]] == ["prefix", "hit", "hit"], label
        prefix = positions(one, Kind.PREFIX)
        assert prefix == set(range(len(prefix))), label
        assert spans[0][1] <= len(prefix) <= spans[1][0], label
        assert positions(one, Kind.COMPUTED) == set(range(len(one.states))) - prefix - reused, label
        recomputed = positions(one, Kind.RECOMPUTED, Kind.DROPPED)
        if label in ("full-reuse", "full", "seams"):  # the passages are no longer than a seam
            assert recomputed == (set() if label == "full-reuse" else reused)
        else:
            assert 0 < len(recomputed) < len(reused), label
            assert recomputed <= reused
    assert positions(found["epic"], Kind.RECOMPUTED) != positions(found["cacheblend"], Kind.RECOMPUTED)
    for label in ("cacheblend", "a3", "fusionrag"):
        selection = found[label].reply["selection"]
        assert selection["scores"]["selected_sum"] <= selection["scores"]["sum"]
        assert len(found[label].rows_per_layer) == 2
    assert (tmp_path / "out.png").stat().st_size > 10_000
    assert "cacheblend" in (tmp_path / "out.html").read_text(encoding="utf-8")


def test_without_priming_nothing_is_stored(ask, capsys):
    code, found = ask("--no-prime", "--methods", "epic", "--extra-key", "never used before")
    assert code == 0
    assert [chunk["status"] for chunk in found["epic"].reply["chunks"]] == ["miss"] * 3
    assert positions(found["epic"], Kind.REUSED, Kind.RECOMPUTED) == set()


def test_what_the_server_refuses_is_one_sentence(ask, capsys):
    assert ask("--methods", "a3:check_layer=9")[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "/generate was answered with 400" in line
    assert "names layer 9, but the model has layers 0 to 1" in line


def test_another_separator_than_the_servers(ask, prompt, server, tmp_path, capsys):
    (tmp_path / "prompt.txt").write_text(prompt.text.replace("<|chunk|>", "@@"), encoding="utf-8")
    assert ask("--methods", "epic", "--separator", "@@")[0] == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "--separator: the server found 0 chunks instead of 1; name the server's --chunk-cache-separator" in line
