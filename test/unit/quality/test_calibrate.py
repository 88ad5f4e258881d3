"""Calibration: the rule on hand-made curves, the command with a server that is made up."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from benchmark.common.results import describe_run
from benchmark.quality import calibrate
from benchmark.quality.calibration.asking import condition_of
from benchmark.quality.calibration.curve import Answers, Point, choose, point_of, share_interval
from benchmark.quality.calibration.report import Calibration, flags, table, to_markdown, verdict, write_report
from benchmark.quality.conditions import MethodSpec, parse_method
from benchmark.quality.prompts import SEPARATOR, Prompt
from benchmark.quality.session import ALONE, SHUFFLED, Session, SetupError
from benchmark.quality.tasks import TaskOptions, synthetic_task

CRAFT = MethodSpec("cache-craft")
MODEL = "model"


def curve(shares: Mapping[float, float], width: float = 0.02) -> list[Point]:
    """Points with these shares, and intervals of that width to each side."""
    return [
        Point(value, 0.9 * share, share, share - width, share + width, value / 4, 1 - share, {"carry": share})
        for value, share in shares.items()
    ]


def result_of(points: Sequence[Point], keep: float = 0.95, **changes: Any) -> Calibration:
    choice = choose(points, keep)
    result = Calibration("cache-craft", "alpha", keep, "exact match", 0.9, 150, 450, 0, points, choice)
    return replace(result, **changes)


# The rule.


def test_the_smallest_that_suffices() -> None:
    choice = choose(curve({0.5: 0.6, 1: 0.8, 2: 0.96, 3: 0.99, 4: 1.0}), 0.95)
    assert (choice.value, choice.sure) == (2, 3)
    assert not choice.dips
    assert choice.passed_over == ()


def test_a_lucky_value_is_passed_over() -> None:
    points = curve({0.5: 0.6, 1: 0.96, 2: 0.94, 3: 0.96, 4: 0.98})
    choice = choose(points, 0.95)
    assert (choice.value, choice.sure) == (3, 4)
    assert choice.passed_over == (points[1],)
    assert choice.dips == ((points[1], points[2]),)
    lines = verdict(result_of(points))
    assert "The curve is not monotone: alpha 1 keeps 96.0 %, but alpha 2 keeps 94.0 %, so 1 is passed over." in lines
    assert lines[0].startswith("alpha 3 is the smallest of the grid that keeps 95.0 %")


def test_a_dip_that_does_not_matter_is_told() -> None:
    points = curve({1: 0.5, 2: 0.4, 3: 0.97, 4: 0.96})
    choice = choose(points, 0.95)
    assert (choice.value, choice.sure, choice.passed_over) == (3, None, ())
    assert [(a.value, b.value) for a, b in choice.dips] == [(1, 2), (3, 4)]
    lines = verdict(result_of(points))
    assert (
        "The curve is not monotone: alpha 1 keeps 50.0 %, alpha 2 keeps 40.0 %. That does not change the choice."
        in lines
    )
    assert any(line.startswith("No value of the grid keeps it with the lower end") for line in lines)


def test_none_suffices() -> None:
    points = curve({1: 0.5, 2: 0.9, 3: 0.8})
    choice = choose(points, 0.95)
    assert (choice.value, choice.sure) == (None, None)
    lines = verdict(result_of(points))
    assert lines[0] == "No alpha of the grid keeps 95.0 % of the full prefill's score, together with all larger ones."
    assert lines[1].startswith("The best is alpha 2 (90.0 %); try larger --values")
    assert len(lines) == 3  # and the dip
    assert flags(result_of(points), "c.json") is None


def test_alpha_that_reaches_no_further_is_told() -> None:
    """Chunks with a CFO of 0 stay as they are, so the recomputed share stands still below 1."""
    points = [replace(point, recomputed=0.9) for point in curve({1: 0.5, 2: 0.9})]
    line = "Even alpha 2 recomputes only 90.0 % of the reused tokens"
    assert [text.startswith(line) for text in verdict(result_of(points))] == [False, False, True]
    for other in (result_of(curve({1: 0.5, 2: 0.9})), result_of(points, by="ratio")):
        assert not any("CFO" in text for text in verdict(other))


def test_the_largest_fails_though_a_smaller_suffices() -> None:
    points = curve({1: 0.5, 2: 0.97, 3: 0.9})
    assert choose(points, 0.95).value is None
    lines = verdict(result_of(points))
    assert lines[1].startswith("The largest does not suffice: alpha 3 (90.0 %)")
    assert lines[2].startswith("The curve is not monotone: alpha 2 keeps 97.0 %, but alpha 3 keeps 90.0 %")


def test_all_suffice() -> None:
    points = curve({1: 0.98, 2: 0.99})
    choice = choose(points, 0.95)
    assert (choice.value, choice.sure) == (1, 1)
    lines = verdict(result_of(points))
    assert "Smaller ones were not tried; give some in --values to find out." in lines
    assert "The lower end of its interval keeps it too." in lines


def test_exactly_the_wanted_share_suffices() -> None:
    """133 of 140 right answers are 95 %, whatever the rounding."""
    full = {"carry": Answers(np.ones(140), np.empty(0), 0, 0)}
    scores = np.repeat([1.0, 0.0], [133, 7])
    point = point_of(1.0, full, {"carry": Answers(scores, np.zeros(140), 100, 20)})
    assert choose([point], 0.95).value == 1.0
    assert choose([point], 0.951).value is None


# One point.


def test_a_point_is_over_all_prompts_of_all_families() -> None:
    full = {
        "a": Answers(np.array([1.0, 1.0, 0.0]), np.empty(0), 0, 0),
        "b": Answers(np.array([0.0]), np.empty(0), 0, 0),
    }
    mine = {
        "a": Answers(np.array([1.0, 0.0, 0.0]), np.array([0.1, 0.5, 0.2]), 300, 30),
        "b": Answers(np.array([1.0]), np.array([0.0]), 100, 50),
    }
    point = point_of(0.5, full, mine)
    assert (point.score, point.share) == (0.5, 1.0)
    assert (point.recomputed, point.kl) == pytest.approx((0.2, 0.2))
    assert point.families == {"a": 0.5, "b": None}


def test_the_interval_is_paired() -> None:
    """Prompts that are hard for both sides widen no interval: the share is exactly a half in every resample."""
    full = np.linspace(0.1, 1.0, 50)
    assert share_interval([full], [full / 2]) == pytest.approx((0.5, 0.5))


def test_the_interval_is_about_right() -> None:
    """Of 100 right answers 80 are kept: a binomial interval, 0.8 -+ 1.96 sqrt(0.8 0.2 / 100)."""
    scores = np.repeat([1.0, 0.0], [80, 20])
    low, high = share_interval([np.ones(100)], [scores])
    assert (low, high) == pytest.approx((0.72, 0.88), abs=0.02)
    assert share_interval([np.ones(50), np.ones(50)], [scores[:50], scores[50:]])[0] > low  # half of them cannot vary


def test_an_interval_without_a_right_answer_in_some_resamples() -> None:
    low, high = share_interval([np.array([1.0, 0.0])], [np.array([1.0, 0.0])])
    assert (low, high) == (1.0, 1.0)


# How values are asked.


def test_alpha_is_asked_without_a_ratio() -> None:
    request = condition_of(parse_method("cache-craft:focus_window=3"), "alpha", 1.5).request
    assert request == {"method": "cache-craft", "options": {"alpha": 1.5, "focus_window": 3}}
    assert condition_of(MethodSpec("epic"), "ratio", 0.3).request == {"method": "epic", "ratio": 0.3}


def test_a_shuffled_prompt_has_another_order() -> None:
    for number in range(50):
        prompt = Prompt(f"head {number}", ("a", "b", "a", "c"), "tail")
        head, *chunks, tail = prompt.shuffled(" x").split(SEPARATOR)
        assert (head, tail) == (prompt.head, " x")
        assert sorted(chunks) == ["a", "b", "c"]
        assert chunks != ["a", "b", "c"]
        assert prompt.shuffled(" x") == prompt.shuffled(" x")
    assert Prompt("", ("a",), "").shuffled() == SEPARATOR.join(("", "a", ""))


class MadeUpServer:
    """Answers what a server would, without a model.

    Right are the first `rate(request)` of the prompts. Everything that it is asked is kept in `asked` and `primed`.
    """

    def __init__(self, right: Mapping[str, str], rate: Any) -> None:
        self.answers = dict(right)
        self.rate = rate
        self.primed: list[tuple[str, Any]] = []
        self.asked: list[Any] = []
        self.starts = 0
        self.change: dict[str, Any] = {}

    def __call__(self, *flags: str, **_: Any) -> MadeUpServer:
        self.starts += 1
        self.flags = flags
        return self

    def __enter__(self) -> MadeUpServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def flush(self) -> None:
        pass

    def get(self, path: str) -> httpx.Response:
        values = {"/v1/loads": {"loads": [{"max_total_num_tokens": 100_000}]}, "/server_info": {"page_size": 1}}
        return httpx.Response(200, json=values[path])

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        params = body["sampling_params"]
        if isinstance(params, dict):
            self.primed += [(text, params.get("custom_params")) for text in body["text"]]
            return httpx.Response(200, json=[{} for _ in body["text"]])
        return httpx.Response(200, json=[self._out(*each) for each in zip(body["text"], params, strict=True)])

    def _out(self, text: str, params: dict[str, Any]) -> dict[str, Any]:
        request = params["custom_params"]["chunk_cache"]
        self.asked.append(request)
        is_reference = request.get("mode") == "off"
        number = list(self.answers).index(text)
        is_right = is_reference or number < self.rate(request) * len(self.answers)
        alpha = request.get("options", {}).get("alpha", 0)
        chunks = [
            {"status": "hit", "reason": None, "ranked_by": "outside", "cfo": alpha / 2}
            for _ in text.split(SEPARATOR)[1:-1]
        ]
        return {
            "text": self.answers[text] if is_right else "wrong",
            "meta_info": {
                "prompt_tokens": 200,
                "output_token_logprobs": [[-0.1, 7, None]],
                "output_top_logprobs": [[[-0.1, 7, None], [-3.0, 8, None]]],
                "output_token_ids_logprobs": [[[-0.1, 7, None], [-3.0, 8, None]]],
                "chunk_cache": {
                    "method": request.get("method"),
                    "ratio": request.get("ratio"),
                    "reused_tokens": 0 if is_reference else 100,
                    "recomputed_tokens": min(100, int(50 * alpha)),
                    "chunks": chunks,
                    **self.change,
                },
            },
        }


def made_up(rate: Any, num: int = 20) -> MadeUpServer:
    task = synthetic_task("carry", TaskOptions(num=num, seed=calibrate.VALIDATION_SEED))
    prompts = zip(task.prompts(), task.questions, strict=True)
    return MadeUpServer({prompt.text: question.answers[0] for prompt, question in prompts}, rate)


def by_alpha(request: Mapping[str, Any]) -> float:
    """A quarter right at alpha 0.5, half at 1, all from 2 on."""
    return min(1.0, request["options"]["alpha"] / 2)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with something that passes for a model; the process works in it."""
    (tmp_path / MODEL).mkdir()
    (tmp_path / MODEL / "config.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    return tmp_path


def call(*arguments: str, num: int = 20) -> int:
    own = ("--model-path", f"./{MODEL}", "--data", "synthetic", "--families", "carry", "--num", str(num))
    return calibrate.main([*own, "--work", "work", "--out", "out", *arguments])


def test_the_chosen_alpha_is_written(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = made_up(by_alpha)
    monkeypatch.setattr(calibrate, "Server", server)
    (folder / "c.json").write_text('{"min_reuse_len": 8}')
    assert call("--values", "2", "0.5", "1", "--config", "c.json") == 0
    assert json.loads((folder / "c.json").read_text()) == {"min_reuse_len": 8, "alpha": 2.0}
    printed = capsys.readouterr().out
    assert "alpha 2 is the smallest of the grid that keeps 95.0 %" in printed
    assert "full prefill           100.0       100.0" in printed
    assert "Serve with --chunk-cache --chunk-cache-method cache-craft --chunk-cache-config @c.json" in printed
    assert {path.name for path in (folder / "out").iterdir()} == {
        f"calibration.{e}" for e in ("csv", "json", "md", "png")
    }
    with (folder / "out" / "calibration.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["value"], row["share"], row["recomputed"], row["chosen"]) for row in rows] == [
        ("", "1", "", ""),
        ("0.5", "0.25", "0.25", "no"),
        ("1", "0.5", "0.5", "no"),
        ("2", "1", "1", "yes"),
    ]
    alphas = [request["options"]["alpha"] for request in server.asked if "options" in request]
    assert sorted(set(alphas)) == [0.5, 1.0, 2.0]
    assert not any("ratio" in request for request in server.asked)
    assert server.starts == 1


def test_chunks_are_stored_in_another_order_and_exactly(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made_up(by_alpha, num=5)
    monkeypatch.setattr(calibrate, "Server", server)
    assert call("--values", "2", num=5) == 0
    asked = {frozenset(text.split(SEPARATOR)[:-1]): text for text in server.answers}
    assert len(server.primed) == len(asked) == 5
    for text, params in server.primed:
        assert params == {"chunk_cache": {"mode": "exact"}}
        pieces = text.split(SEPARATOR)[:-1]
        assert asked[frozenset(pieces)].split(SEPARATOR)[:-1] != pieces


def test_chunks_are_stored_alone_by_ratio(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = made_up(lambda request: request["ratio"], num=5)
    monkeypatch.setattr(calibrate, "Server", server)
    assert call("--values", "0.2", "1", "--by", "ratio", "--method", "epic", num=5) == 0
    assert all(text.count(SEPARATOR) == 2 and params is None for text, params in server.primed)
    assert "Serve with --chunk-cache --chunk-cache-method epic --chunk-cache-ratio 1" in capsys.readouterr().out


def test_nothing_is_written_where_none_suffices(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "Server", made_up(by_alpha))
    assert call("--values", "0.5", "1", "--config", "c.json") == 1
    assert not (folder / "c.json").exists()
    printed = capsys.readouterr().out
    assert "No alpha of the grid keeps 95.0 %" in printed
    assert "c.json is left as it was" in printed


def test_kept_replies_are_not_asked_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = made_up(by_alpha)
    monkeypatch.setattr(calibrate, "Server", server)
    assert call("--values", "1", "2") == 0
    num_asked = len(server.asked)
    assert call("--values", "1", "2", "--resume") == 0
    assert (server.starts, len(server.asked)) == (1, num_asked)
    assert "- replies: 0 of this run, 60 kept from earlier ones" in (folder / "out" / "calibration.md").read_text()
    assert call("--values", "1", "2", "3", "--resume") == 0
    assert len(server.asked) == num_asked + 20
    assert "- replies: 20 of this run, 60 kept from earlier ones" in (folder / "out" / "calibration.md").read_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "epic"}, "and answered with epic"),
        ({"chunks": [{"status": "miss", "reason": "not_stored"}]}, r"was not reused but miss \(not_stored\)"),
        (
            {"chunks": [{"status": "hit", "cfo": 0.5, "ranked_by": "position"}]},
            "No statistics were stored with chunk 1",
        ),
        ({"chunks": [{"status": "hit", "cfo": None}]}, "The CFO of chunk 1 of prompt .* is unknown"),
    ],
)
def test_a_reply_that_is_not_what_was_asked_ends_the_run(change: dict[str, Any], message: str) -> None:
    server = made_up(by_alpha, num=1)
    task = synthetic_task("carry", TaskOptions(num=1, seed=calibrate.VALIDATION_SEED))
    session = Session(server, task.asking, SHUFFLED)
    prompts = task.prompts()
    references = {reply.prompt: reply for replies in session.ask_reference(prompts) for reply in replies}
    asks = [(prompts[0], condition_of(CRAFT, "alpha", 1.0))]
    (reply,) = [reply for replies in session.ask(asks, references) for reply in replies]
    assert (reply.ratio, reply.recomputed_len, reply.reused_len, reply.kl) == (None, 50, 100, 0.0)
    server.change = change
    with pytest.raises(SetupError, match=message):
        list(session.ask(asks, references))


# The command line.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--keep", "0"], "--keep: 0 is not in (0, 1]"),
        (["--keep", "95"], "--keep: 95 is not in (0, 1]"),
        (["--values", "0", "1"], "--values: 0 is no alpha above 0"),
        (["--values", "nan"], "--values: nan is no alpha above 0"),
        (["--by", "ratio", "--values", "1.5"], "--values: 1.5 is no ratio in [0, 1]"),
        (["--by", "ratio", "--config", "c.json"], "--config: a ratio has a flag of its own, --chunk-cache-ratio"),
        (["--num", "0"], "--num: at least 1"),
        (["--by", "both"], "invalid choice: 'both'"),
    ],
)
def test_a_wrong_flag_is_refused(
    folder: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        call(*arguments)
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "best"], "--method: unknown method 'best'"),
        (["--method", "cacheblend"], "--method: cacheblend has no option alpha; choose one of "),
        (["--method", "cache-craft:alpha=1"], "--method: leave alpha out of cache-craft:alpha=1"),
        (["--by", "ratio", "--method", "full-reuse"], "--method: full-reuse does not follow the ratio"),
        (["--data", "squad"], "--data: 'squad' is not one of synthetic, ruler"),
        (["--data", "jsonl:none.jsonl"], "none.jsonl: cannot be read"),
        (["--model-path", "./none"], "--model-path: ./none holds no config.json"),
        (["--config", "bad.json"], "bad.json:1: not JSON"),
    ],
)
def test_a_mistake_is_one_sentence_before_a_server_starts(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = made_up(by_alpha, num=1)
    monkeypatch.setattr(calibrate, "Server", server)
    (folder / "bad.json").write_text("{")
    assert call(*arguments) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert server.starts == 0


def test_the_grid_and_the_way_chunks_are_stored_depend_on_what_is_calibrated() -> None:
    own = ["--model-path", "m", "--data", "ruler"]
    args = calibrate.parse_args(own)
    assert (args.by, args.method, args.keep, args.stored) == ("alpha", "cache-craft", 0.95, SHUFFLED)
    assert args.values == [0.25, 0.5, 1, 1.5, 2, 3, 4]
    args = calibrate.parse_args([*own, "--by", "ratio"])
    assert (args.values[0], args.values[-1], args.stored) == (0.05, 1.0, ALONE)
    assert calibrate.parse_args([*own, "--values", "2", "1", "2"]).values == [1, 2]


def test_a_full_prefill_that_answers_nothing_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = made_up(by_alpha, num=3)
    server.answers = dict.fromkeys(server.answers, "nonsense")
    monkeypatch.setattr(calibrate, "Server", server)
    assert call("--values", "1", num=3) == 2
    assert "--data: the full prefill scores 0 on all prompts" in capsys.readouterr().err


# The report.


@pytest.fixture
def about() -> dict[str, Any]:
    return {**describe_run(), "settings": {"wanted": "95 %"}}


def test_the_page_holds_the_curve_and_the_choice(tmp_path: Path, about: dict[str, Any]) -> None:
    points = curve({1: 0.8, 2: 0.96})
    result = result_of(points)
    page = to_markdown(result, about, "c.json")
    assert "| full prefill | 90.0 | 100.0 |  |  |  |  |" in page
    assert "| 1 | 72.0 | 80.0 | 78.0 to 82.0 | 25.0 | 0.2 | no |" in page
    assert "| 2 | 86.4 | 96.0 | 94.0 to 98.0 | 50.0 | 0.04 | yes * |" in page
    assert "Serve with `--chunk-cache --chunk-cache-method cache-craft --chunk-cache-config @c.json`." in page
    assert not any("family by family" in line for line in page)
    paths = write_report(tmp_path, result, about)
    assert [path.name for path in paths] == [f"calibration.{ending}" for ending in ("csv", "json", "md", "png")]
    assert paths[-1].stat().st_size > 10_000
    assert json.loads(paths[1].read_text())["curve"]["choice"]["value"] == 2


def test_several_families_are_shown_one_by_one(about: dict[str, Any]) -> None:
    points = [replace(point, families={"a": 0.5, "b": None}) for point in curve({1: 0.8, 2: 0.96})]
    page = to_markdown(result_of(points), about)
    assert page[-4:] == ["| alpha | a | b |", "| --- | ---: | ---: |", "| 1 | 50.0 | - |", "| 2 | 50.0 | - |"]


def test_flags_without_a_file_hold_the_value() -> None:
    result = result_of(curve({1: 0.8, 2: 0.96}), method="cache-craft:focus_window=3")
    assert (
        flags(result, None) == """--chunk-cache --chunk-cache-method cache-craft --chunk-cache-config '{"alpha": 2}'"""
    )


def test_nothing_reused_is_no_share() -> None:
    points = [replace(point, recomputed=None) for point in curve({1: 0.8})]
    assert table(result_of(points))[1][1][4] == "-"


def test_the_command_says_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        calibrate.main(["--help"])
    assert "usage: python benchmark/quality/calibrate.py" in capsys.readouterr().out
