"""The command line: a user's mistake is one sentence and an exit code, before any server starts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from benchmark.quality.campaign import Plan, _open
from benchmark.quality.evaluate import find_models, load, main, parse_args, server_flags
from benchmark.quality.question import DataError

from chunk_cache_tools.verify.reply_log import HASHED_EVERY, fingerprint


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes for a model as long as no server starts."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "best"], "--methods best: unknown method 'best'"),
        (
            ["--methods", "cache-craft:alpha=1"],
            "leave alpha out, or name the method to chunk-cache verify",
        ),
        (["--families", "carry", "cary"], "--families: no family 'cary'; choose from needle"),
        (["--resume", "--redo", "epicc"], "--redo: unknown method 'epicc'; did you mean epic? known methods: off, "),
        (["--tasks", "squad"], "--tasks: 'squad' is not one of synthetic, ruler, longbench:FILE,"),
        (["--tasks", "jsonl:{folder}/none.jsonl"], "{folder}/none.jsonl: cannot be read"),
        (["--tasks", "longbench:{folder}/broken.jsonl"], "{folder}/broken.jsonl:2: not JSON"),
        (["--prompt-template", "{folder}/none.json"], "{folder}/none.json: cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence(
    model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model.parent
    good = json.dumps({"input": "q", "context": "c", "answers": ["a"]})
    (folder / "broken.jsonl").write_text(good + "\n{\n")
    given = [argument.format(folder=folder) for argument in arguments]
    assert main(["--model", str(model), *given, "--work", str(folder), "--out", str(folder)]) == 1
    printed = capsys.readouterr()
    assert message.format(folder=folder) in printed.out.replace("\n", " ") + printed.out
    assert "Traceback" not in printed.out + printed.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ratios", "0.1", "1.5"], "--ratios: 1.5 is not in [0, 1]"),
        (["--num", "0"], "--num: at least 1"),
        (["--redo", "epic"], "--redo: give it together with --resume"),
    ],
)
def test_a_wrong_flag_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse_args(arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


def test_models_have_names_of_their_own(model: Path, tmp_path: Path) -> None:
    assert find_models([str(model), "org/name-7b"]) == {"model": str(model), "name-7b": "org/name-7b"}
    with pytest.raises(DataError, match="two folders have the same name"):
        find_models([str(model), "other/model"])
    with pytest.raises(DataError, match=r"holds no config\.json"):
        find_models([str(tmp_path)])


def test_a_fingerprint_changes_with_the_weights(model: Path) -> None:
    first = fingerprint(model)
    assert first == fingerprint(model)
    (model / "model.safetensors").write_bytes(b"weightz")
    assert fingerprint(model) != first
    large = bytearray(3 * HASHED_EVERY)
    found = set()
    for place in (0, HASHED_EVERY, 2 * HASHED_EVERY):
        large[place] = 1
        (model / "model.safetensors").write_bytes(large)
        found.add(fingerprint(model))
    assert len(found) == 3, "training may leave the embedding, which comes first, as it was"
    assert fingerprint("org/name-7b") == "org/name-7b"


def test_replies_of_a_server_with_another_file_of_options_are_not_kept(model: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    tasks = load(parse_args(["--families", "needle", "--num", "1"]))
    plan = Plan(tasks, [], tmp_path, resume=True, flags=("--chunk-cache-config", f"@{config}"))
    for content in ("{}", "{}", '{"alpha": 1}'):
        config.write_text(content)
        with ExitStack() as stack:
            if content == "{}":
                _open("m", str(model), plan, stack)
                continue
            with pytest.raises(DataError, match=r"begun with other settings \(flags\)"):
                _open("m", str(model), plan, stack)


def test_the_command_line_changes_the_tasks(tmp_path: Path) -> None:
    style = tmp_path / "format.json"
    style.write_text('{"question": "Q {question}"}')
    arguments = ["--families", "needle", "--num", "3", "--max-new-tokens", "9", "--stop", ";", "--metric", "substring"]
    (task,) = load(parse_args([*arguments, "--prompt-template", str(style), "--top-logprobs", "5"]))
    assert (task.family, len(task.questions), task.metric) == ("needle", 3, "substring")
    assert (task.asking.max_new_tokens, task.asking.stop, task.asking.num_top) == (9, (";",), 5)
    assert task.prompts()[0].tail.startswith("Q ")


def test_a_given_dtype_is_kept() -> None:
    assert server_flags("--dtype bfloat16 --tp 2") == ("--chunk-cache", "--dtype", "bfloat16", "--tp", "2")
    assert server_flags("--dtype=bfloat16") == ("--chunk-cache", "--dtype=bfloat16")
