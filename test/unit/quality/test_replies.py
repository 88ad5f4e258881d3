"""The reply log and the conditions: what a run that was cut off can go on with."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from benchmark.quality.conditions import (
    built_methods,
    conditions_of,
)
from benchmark.quality.question import DataError

from chunk_cache.methods import METHODS, METHODS_OF_ANY_SERVER
from chunk_cache_tools.conditions import REFERENCE, Condition, MethodSpec, check_likelihood, parse_method
from chunk_cache_tools.verify.reply_log import Forced, Reply, ReplyLog

SETTINGS = {"model": "abc", "asking": {"max_new_tokens": 4, "stop": ()}}
EPIC = Condition(MethodSpec("epic"), 0.3)


def reply(prompt: str, condition: Condition = EPIC, text: str = "a") -> Reply:
    top = ((3, -0.5), (4, -1.5)) if condition == REFERENCE else ()
    return Reply(prompt, condition.label, condition.ratio, text, 3, 100, 60, 20, None if top else 0.25, top)


def test_replies_come_back_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "model" / "needle.jsonl"
    given = {"gold": Forced(3, -0.25), "own": Forced(1, -2.0)}
    kept = [replace(reply("p1", REFERENCE), **given), replace(reply("p1"), gold=Forced(3, -0.5)), reply("p2")]
    with ReplyLog(path, SETTINGS) as log:
        log.append(kept[:1])
        log.append(kept[1:])
    with ReplyLog(path, SETTINGS, resume=True) as log:
        assert list(log) == kept
        assert log.find("p1", REFERENCE) == kept[0]
        assert log.find("p2", REFERENCE) is None
        assert log.find("p1", Condition(MethodSpec("epic"), 0.5)) is None
        log.append([reply("p3")])
    with ReplyLog(path, SETTINGS, resume=True) as log:
        assert len(log) == 4


def test_a_second_writer_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ReplyLog(path, SETTINGS) as log:
        log.append([reply("p1")])
        before = path.read_bytes()
        for resume in (True, False):
            with pytest.raises(DataError, match="another run writes to it"):
                ReplyLog(path, SETTINGS, resume=resume)
        assert path.read_bytes() == before
    with ReplyLog(path, SETTINGS, resume=True) as log:
        assert len(log) == 1


def test_a_log_that_cannot_be_written_anew_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log.jsonl"
    with ReplyLog(path, SETTINGS) as log:
        log.append([reply("p1"), reply("p2")])
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        ReplyLog(path, SETTINGS, resume=True)
    assert path.read_bytes() == before


def test_a_line_that_was_cut_off_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ReplyLog(path, SETTINGS) as log:
        log.append([reply("p1"), reply("p2")])
    path.write_text(path.read_text()[:-20])
    with ReplyLog(path, SETTINGS, resume=True) as log:
        assert [r.prompt for r in log] == ["p1"]


def test_without_resume_nothing_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ReplyLog(path, SETTINGS) as log:
        log.append([reply("p1")])
    with ReplyLog(path, SETTINGS) as log:
        assert len(log) == 0
    assert len(path.read_text().splitlines()) == 1


def test_dropped_methods_are_gone_for_good(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ReplyLog(path, SETTINGS) as log:
        log.append([reply("p1", REFERENCE), reply("p1"), reply("p1", Condition(MethodSpec("random"), 0.3))])
        log.drop(["epic"])
        log.append([reply("p2")])
    with ReplyLog(path, SETTINGS, resume=True) as log:
        assert [(r.prompt, r.method) for r in log] == [("p1", "off"), ("p1", "random"), ("p2", "epic")]


def test_other_settings_are_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ReplyLog(path, SETTINGS):
        pass
    with pytest.raises(DataError, match=r"log\.jsonl: begun with other settings \(model\)"):
        ReplyLog(path, {**SETTINGS, "model": "abd"}, resume=True)


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    with ReplyLog(path, SETTINGS) as log:
        log.append([reply("p1")])
    path.write_text(path.read_text() + '{"prompt": "p2"}\n')
    with pytest.raises(DataError, match=r"log\.jsonl:3: not a reply"):
        ReplyLog(path, SETTINGS, resume=True)


def test_methods_are_read_as_they_are_written() -> None:
    assert parse_method("epic") == MethodSpec("epic")
    assert Condition(parse_method("random:seed=7"), 0.3).request["options"] == {"seed": 7}
    assert parse_method("fusionrag:top_k=chunk,layers=[0,2]").label == "fusionrag:layers=[0,2],top_k=chunk"
    specs = map(
        parse_method, ("cacheblend:first_ratio=1.5,last_ratio=0.5", "a3:group_size=8", "fusionrag:layers=[0,2]")
    )
    for spec in (*built_methods(), *specs):
        assert parse_method(spec.label) == spec


def test_what_decoding_keeps_is_of_the_request() -> None:
    spec = parse_method("a3:group_size=8,keep_tokens=512")
    assert parse_method(spec.label) == spec
    request = Condition(spec, 0.15).request
    assert request == {"method": "a3", "ratio": 0.15, "options": {"group_size": 8}, "keep_tokens": 512}
    with pytest.raises(DataError, match="keep_tokens of 'a3:group_size=8,keep_tokens=512' changes no likelihood"):
        check_likelihood([MethodSpec("epic"), spec])


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("best", "unknown method 'best'"),
        ("epic:seed=1", "unknown key"),
        ("random:seed=-1", "-1 is not an integer in"),
        ("a3:keep_tokens=0", "keep_tokens=0 is no number of tokens"),
        ("a3:keep_tokens=true", "is no number of tokens"),
        ("random:seed", "random:seed: 'seed' is not OPTION=VALUE"),
    ],
)
def test_a_wrong_method_is_refused(text: str, problem: str) -> None:
    with pytest.raises(DataError) as error:
        parse_method(text)
    assert str(error.value).startswith("--methods")
    assert problem in str(error.value)


def test_every_built_method_is_asked_at_every_ratio_once() -> None:
    assert {spec.method for spec in built_methods()} == set(METHODS_OF_ANY_SERVER)
    assert {spec.method for spec in built_methods(has_selector=True)} == set(METHODS)
    conditions = conditions_of([parse_method(name) for name in ("epic", "full-reuse", "full")], [0.0, 0.3, 1.0])
    assert [(c.label, c.ratio) for c in conditions] == [
        ("epic", 0.0),
        ("epic", 0.3),
        ("epic", 1.0),
        ("full-reuse", 0.0),
        ("full", 1.0),
    ]
    assert conditions[1].request == {"method": "epic", "ratio": 0.3}
    assert REFERENCE.request == {"mode": "off"}
