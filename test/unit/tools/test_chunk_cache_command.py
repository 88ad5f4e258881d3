"""The command `chunk-cache`: its door, and what all subcommands have in common."""

from __future__ import annotations

import importlib
import pkgutil
import re
import subprocess
import sys

import pytest

import chunk_cache_tools
from chunk_cache_tools.command import COMMANDS, main
from chunk_cache_tools.command_line import CommandParser, exit_code, progress
from chunk_cache_tools.server_client import ServerGone

OLDER = {"train-selector": "selector.train"}


def parser_of(name: str) -> CommandParser:
    return importlib.import_module(COMMANDS[name][1].partition(":")[0])._parser()


def test_the_door_says_what_is_behind_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    for name, (group, _, what) in COMMANDS.items():
        assert f"{group}:" in told
        assert re.search(rf"^  {name} +{re.escape(what)}$", told, re.MULTILINE)
    assert main([]) == 0
    assert main(["--version"]) == 0
    assert re.search(r"^chunk-cache \d\S* \(SGLang \d", capsys.readouterr().out, re.MULTILINE)


@pytest.mark.parametrize(
    ("name", "words"), [("verfy", "did you mean `chunk-cache verify`?"), ("x", "known: verify, doctor, explain, ")]
)
def test_an_unknown_command_is_told_the_nearest(name: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name]) == 2
    assert words in capsys.readouterr().err


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def missing(_: str) -> None:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(pkgutil, "resolve_name", missing)
    assert main(["train-selector"]) == 2
    assert capsys.readouterr().err == (
        "chunk-cache train-selector: torch is not installed; run `pip install 'sglang==0.5.23'`\n"
    )


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_and_exit_codes(name: str) -> None:
    told = parser_of(name).format_help()
    assert f"usage: chunk-cache {name} " in told
    _, _, end = told.partition("\nexamples:\n")
    assert end.startswith(f"  chunk-cache {name}")
    codes = [int(code) for code in re.findall(r"^  (\d+) ", end.partition("exit codes:")[2], re.MULTILINE)]
    assert codes == sorted(codes) == list(parser_of(name).exit_codes)
    assert {0, 2, 130} <= set(codes)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_examples_of_a_help_are_taken(name: str) -> None:
    told = parser_of(name).format_help().partition("\nexamples:\n")[2].partition("\n\n")[0]
    for line in told.splitlines():
        words = re.findall(r"'[^']*'|\S+", line.partition(" # ")[0])[2:]
        parser_of(name).parse_args(words[: words.index("--")] if "--" in words else words)


def test_one_name_means_one_thing() -> None:
    """A flag of two subcommands has one help text, but for what is said of its default."""
    shared = ("--url", "--api-key", "--json", "--tokenizer")
    for flag in shared:
        texts = {
            re.sub(r" \(default.*", "", str(action.help))
            for name in COMMANDS
            for action in parser_of(name)._actions
            if flag in action.option_strings
        }
        assert len(texts) == 1, flag


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "verify" else pytest.mark.all) for name in COMMANDS]
)
def test_the_older_way_to_call_it(name: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"sglang_chunk_cache.{OLDER.get(name, name)}", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(f"usage: chunk-cache {name} ")


def test_errors_are_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    def fail(error: BaseException) -> int:
        def run() -> int:
            raise error

        return exit_code("chunk-cache x", run, OSError, where="--url u: ", interrupted="bye")

    assert exit_code("chunk-cache x", lambda: 1) == 1
    assert [fail(ServerGone("gone", "look")), fail(OSError("full")), fail(KeyboardInterrupt())] == [2, 2, 130]
    told = capsys.readouterr().err.splitlines()
    assert told == ["chunk-cache x: --url u: gone; look", "chunk-cache x: full", "chunk-cache x: bye"]
    with pytest.raises(ZeroDivisionError):
        fail(ZeroDivisionError())


def test_a_pipe_gets_no_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with progress(2, "asking", "methods") as bar:
        bar.update()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("chunk_cache_tools.command_line.NOTED_S", 0.0)
    with progress(2, "asking", "methods"):
        pass
    assert capsys.readouterr().err == "asking: done in 0 s\n"


def test_the_tools_import_nothing_of_a_server() -> None:
    modules = [name for _, name, _ in pkgutil.walk_packages(chunk_cache_tools.__path__, "chunk_cache_tools.")]
    assert len(modules) > 35
    tries_tiers, trains = "doctor.tier_checks", "train_selector.train_selector_command"  # what a server runs
    left_out = {f"chunk_cache_tools.{name}" for name in (tries_tiers, trains)}
    program = f"import sys, importlib; [importlib.import_module(one) for one in {sorted(set(modules) - left_out)}]\n"
    program += "print(sorted({'sglang', 'torch', 'transformers', 'fastapi'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
