"""The command without a server: wrong calls, and what is written for a user."""

from __future__ import annotations

import csv
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from chunk_cache.options.config import parse_config
from chunk_cache_tools.conditions import Condition, parse_method
from chunk_cache_tools.local_tokenizer import Shape
from chunk_cache_tools.verify import verify_command
from chunk_cache_tools.verify.fit import Check
from chunk_cache_tools.verify.plot import draw
from chunk_cache_tools.verify.recommendation import Measured, judge, recommend
from chunk_cache_tools.verify.results import Findings, as_json, sentences, write_results
from chunk_cache_tools.verify.session import SetupError
from chunk_cache_tools.verify.verify_command import Model, conditions_of, main, parse_args
from tiny_models import make_tokenizer

OUT = Path("out")
FITS = [Check("ratio 1.0 equals a full prefill", True, "log-probabilities differ by at most 1e-6")]


def findings_of(losses: dict[str, float], num: int = 60, target: float = 0.05) -> Findings:
    """One condition per `method@ratio`, with this mean loss."""
    measured = []
    for name, loss in losses.items():
        method, _, ratio = name.partition("@")
        values = loss + 0.002 * np.linspace(-1, 1, num)
        condition = Condition(parse_method(method), float(ratio) if ratio else None)
        measured.append(Measured(condition, values, values, values[:0], 0.9, 0.05 + float(ratio or 0.4)))
    judged = judge(measured, target)
    return Findings({"model": "m"}, FITS, target, judged, recommend(judged, target))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["m", "p", "--num", "0"], "--num: at least 1"),
        (["m", "p", "--target", "0"], "--target: 0 is not above 0"),
        (["m", "p", "--target", "nan"], "--target: nan is not above 0"),
        (["m", "p", "--tolerance", "nan"], "--tolerance: nan is not above 0 and finite; "),
        (["m", "p", "--tolerance", "inf"], "--tolerance: inf is not above 0 and finite; "),
        (["m", "p", "--tolerance", "-1"], "--tolerance: -1 is not above 0"),
        (["m", "p", "--ratios", "0.1", "1.5"], "--ratios: 1.5 is not in [0, 1]"),
        (["m", "p", "--alphas", "0"], "--alphas: 0 is not above 0"),
        (["m", "p", "--", "--port", "30000"], "-- --port: this command sets it itself; leave it out"),
        (["m", "p", "--", "--api-key=K"], "-- --api-key=K: this command sets it itself; leave it out"),
        (["http://x", "p", "--", "--tp", "2"], "-- --tp: a running server has its flags"),
        (["--url", "http://x", "m", "p"], "--url http://x: m is named too"),
        ([], "the following arguments are required: MODEL_OR_URL"),
        (["m", "p", "--tp", "2"], "unrecognized arguments: --tp"),
    ],
)
def test_a_wrong_flag_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["nowhere", "broken.jsonl"], "broken.jsonl:1: not JSON"),
        (["nowhere", "good.jsonl"], "MODEL: no model in 'nowhere'"),
        (["nowhere", "good.jsonl", "--methods", "best"], "--methods best: unknown method 'best'"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "broken.jsonl").write_text("{\n")
    (tmp_path / "good.jsonl").write_text('{"text": "a<|chunk|>b<|chunk|>c"}\n')
    assert main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


def test_replies_of_another_version_are_not_used_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"text": "Read.<|chunk|>Rome.<|chunk|>Paris.<|chunk|>Where?"}\n')
    versions = {"sglang": "0.5", "sglang-chunk-cache": "1"}

    def model(_: object) -> Model:
        return Model("m", "m", versions["sglang"], Shape(2, has_states=False), make_tokenizer())

    def reached(*_: object) -> None:
        raise SetupError("a server is asked")

    monkeypatch.setattr(verify_command, "_model_here", model)
    monkeypatch.setattr(verify_command, "reached", reached)
    monkeypatch.setattr(verify_command.importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(verify_command, "all_flags", tuple)
    config = '{"tiers": {"remote": "redis://:SECRET@host"}}'
    command = ["m", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path), "--", "--chunk-cache-config", config]

    def told() -> str:
        assert main(command) == 2
        return capsys.readouterr().err

    assert "a server is asked" in told()
    assert "a server is asked" in told(), "the same command goes on"
    for name, version in list(versions.items()):
        versions[name] = "2"
        assert "replies.jsonl: begun with other settings (versions); add --fresh, or name another --out." in told()
        versions[name] = version
    assert "SECRET" not in (tmp_path / "replies.jsonl").read_text()
    command[-1] = config.replace("SECRET", "OTHER")
    assert "begun with other settings (server flags)" in told()


def test_the_grid_asks_for_ratio_zero_once_and_for_alphas_beside_it() -> None:
    args, flags = parse_args(["m", "p", "--ratios", "0", "0.3", "--alphas", "2", "1", "--", "--tp", "2"])
    found = conditions_of(args)
    assert flags == ["--tp", "2"]
    assert args.stored == "shuffled"
    assert [(c.label, c.ratio) for c in found] == [
        ("full-reuse", 0.0),
        ("near-words", 0.3),
        ("cacheblend", 0.3),
        ("fusionrag", 0.3),
        ("question-drift", 0.3),
        ("cache-craft:alpha=1.0", None),
        ("cache-craft:alpha=2.0", None),
    ]
    assert parse_args(["m", "p"])[0].stored == "warmed"


def test_a_recommendation_is_written_with_its_flags(tmp_path: Path) -> None:
    findings = findings_of({"full-reuse@0": 0.8, "epic@0.15": 0.2, "epic@0.3": 0.01, "epic@0.5": 0.0})
    assert sentences(findings)[0].startswith("Reuse: epic at ratio 0.3. It computes 35 % of the rows")
    write_results(tmp_path, findings)
    draw(tmp_path / "verify.png", findings)
    assert {path.name for path in tmp_path.iterdir()} == {*("verify.md", "verify.csv", "verify.png", "flags.txt")}
    flags = "--chunk-cache --chunk-cache-method epic --chunk-cache-ratio 0.3"
    assert (tmp_path / "flags.txt").read_text() == flags + "\n"
    page = (tmp_path / "verify.md").read_text()
    assert f"Serve with: {flags}" in page
    assert "| yes * |" in page
    with (tmp_path / "verify.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["method"], row["ratio"], row["holds"], row["chosen"]) for row in rows] == [
        ("full-reuse", "0", "no", "no"),
        ("epic", "0.15", "no", "no"),
        ("epic", "0.3", "yes", "yes"),
        ("epic", "0.5", "yes", "no"),
    ]
    assert float(rows[2]["own_loss"]) == pytest.approx(0.01)


def test_flags_of_an_earlier_run_do_not_outlive_a_refusal(tmp_path: Path) -> None:
    write_results(tmp_path, findings_of({"epic@0.5": 0.0}))
    assert (tmp_path / "flags.txt").exists()
    findings = findings_of({"epic@0.15": 0.9, "epic@0.5": 0.6})
    write_results(tmp_path, findings)
    assert not (tmp_path / "flags.txt").exists()
    assert sentences(findings)[0].startswith("Do not reuse here: nothing that was tried costs less than 0.05 nats")
    assert "epic at ratio 0.5, costs 0.60" in sentences(findings)[0]


def test_too_few_prompts_are_counted() -> None:
    (line,) = sentences(findings_of({"epic@0.5": 0.0495}, num=10))
    assert line.startswith("Not decided: 10 prompts are too few.")
    assert ", above the target of 0.05. About 20 more prompts like these would decide." in line


def test_a_pass_by_too_few_prompts_reads_as_a_pass() -> None:
    (line,) = sentences(findings_of({"epic@0.5": 0.0}, num=10))
    assert line.startswith("Passes so far: epic at ratio 0.5 costs 0 nats per token, surely at most 0.00")
    assert line.endswith("target of 0.05. It is not recommended yet: that takes 30 prompts, and 10 were asked.")


def test_what_was_found_is_json() -> None:
    found = json.loads(json.dumps(as_json(findings_of({"epic@0.15": 0.2, "epic@0.3": 0.01}), OUT)))
    assert found["outcome"] == "reuse"
    assert found["flags"] == "--chunk-cache --chunk-cache-method epic --chunk-cache-ratio 0.3"
    assert [(row["ratio"], row["holds"]) for row in found["conditions"]] == [(0.15, False), (0.3, True)]
    assert json.loads(json.dumps(as_json(findings_of({"epic@0.5": 0.0}, num=1), OUT), allow_nan=False))["flags"] is None


def test_a_server_may_be_named_as_everywhere() -> None:
    args, _ = parse_args(["--url", "http://x", "prompts.jsonl"])
    assert (args.model, args.prompts, args.is_url) == ("http://x", "prompts.jsonl", True)
    assert parse_args(["http://x", "prompts.jsonl"])[0].model == "http://x"


def test_luck_is_told() -> None:
    *_, line = sentences(findings_of({"epic@0.15": 0.0, "epic@0.5": 0.6}))
    assert line.startswith("Passed over: epic at ratio 0.15 would hold alone")


@pytest.mark.parametrize(
    ("chosen", "ratio", "config"),
    [
        ("cache-craft:alpha=1.5", None, {"alpha": 1.5}),
        ("lego-link:ends=20", None, {"options": {"ends": 20}}),
        ("epic:group_size=8", 0.3, {"options": {"group_size": 8}}),
        ("cacheclip:group_threshold=5", 0.3, {"options": {"group_size": 8, "group_threshold": 5}}),
        ("cacheblend:deviation=v", 0.3, {"options": {"deviation": "v"}}),
    ],
)
def test_what_has_no_flag_is_served_from_a_file(
    chosen: str, ratio: float | None, config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flags name it from any folder, and a server takes what is in it."""
    monkeypatch.chdir(tmp_path)
    assert conditions_of(parse_args(["m", "p", "--methods", chosen, "--ratios", "0.3"])[0])[0].ratio == ratio
    write_results(Path("my results"), findings_of({chosen if ratio is None else f"{chosen}@{ratio}": 0.0}))
    words = shlex.split(Path("my results/flags.txt").read_text())
    assert words[-2:] == ["--chunk-cache-config", f"@{tmp_path}/my results/chunk_cache.json"]
    found = json.loads(Path("my results/chunk_cache.json").read_text())
    assert found == config
    parsed = parse_config(found)
    assert (parsed.alpha, dict(parsed.options)) == (config.get("alpha"), config.get("options", {}))


def test_conditions_that_differ_in_their_budget_are_told_apart(tmp_path: Path) -> None:
    write_results(tmp_path, findings_of({"lego-link:ends=5": 0.1, "lego-link:ends=10": 0.0, "epic@0.3": 0.0}))
    with (tmp_path / "verify.csv").open() as file:
        rows = [(row["method"], row["ratio"], row["alpha"], row["ends"]) for row in csv.DictReader(file)]
    assert rows == [("lego-link", "", "", "5"), ("lego-link", "", "", "10"), ("epic", "0.3", "", "")]
