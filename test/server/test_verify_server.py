"""`chunk-cache verify` on the trained model: with a server of its own, and on a running one."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmark.quality.tasks import TaskOptions, synthetic_task

from server.conftest import TRAINED_MODEL as MODEL
from server_fixture import Server

pytestmark = pytest.mark.server
NUM = 30  # the fewest prompts that decide anything


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sglang_chunk_cache.verify", *arguments]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=600, check=False)


def prompts_of(family: str, path: Path) -> Path:
    task = synthetic_task(family, TaskOptions(num=NUM))
    asked = zip(task.prompts(), task.questions, strict=True)
    lines = [json.dumps({"text": prompt.text, "answers": question.answers}) for prompt, question in asked]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def needles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Facts that stand in one chunk: reuse does not harm them."""
    return prompts_of("needle", tmp_path_factory.mktemp("prompts") / "needle.jsonl")


def table(folder: Path) -> dict[tuple[str, str], dict[str, str]]:
    with (folder / "verify.csv").open() as file:
        return {(row["method"], row["ratio"] or row["alpha"]): row for row in csv.DictReader(file)}


@pytest.mark.all
def test_a_server_of_its_own_ends_with_flags_and_its_replies_are_kept(needles: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    grid = ["--methods", "epic", "full-reuse", "--ratios", "0.5", "1", "--max-new-tokens", "4", "--out", str(out)]
    done = call(str(MODEL), str(needles), *grid, "--target", "0.2", "--", "--max-total-tokens", "16384")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok    layer 0 of reused chunks is right after the position shift" in done.stdout
    assert "ok    ratio 1.0 equals a full prefill" in done.stdout
    rows = table(out)
    assert {int(row["num_prompts"]) for row in rows.values()} == {NUM}
    exact = rows[("epic", "1")]
    assert abs(float(exact["own_loss"])) < 1e-4
    assert (float(exact["kl_mean"]), float(exact["same_first"])) == (pytest.approx(0, abs=1e-5), 1.0)
    assert float(exact["rows"]) == pytest.approx(1.0)
    chosen = [name for name, row in rows.items() if row["chosen"] == "yes"]
    assert chosen in ([("full-reuse", "0")], [("epic", "0.5")])
    assert (out / "flags.txt").read_text().startswith("--chunk-cache --chunk-cache-method ")
    # Nothing is missing, so nothing starts: the same replies are judged by another target.
    (out / "server.log").unlink()
    again = call(str(MODEL), str(needles), *grid, "--target", "1e-9", "--", "--max-total-tokens", "16384")
    assert again.returncode == 1, again.stdout + again.stderr
    assert "Serve with" not in again.stdout
    assert not (out / "server.log").exists()
    assert not (out / "flags.txt").exists()


@pytest.mark.all
def test_a_model_with_states_is_asked_for_its_seams(needles: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    model = str(MODEL.with_name("qa-hybrid-1m-seed0"))
    short = ("--ratios", "0.5", "--max-new-tokens", "4", "--out", str(out))
    config = ("--max-total-tokens", "16384", "--chunk-cache-config", '{"seam_len": 8}')
    done = call(model, str(needles), *short, "--", *config)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    assert "?     layer 0 of reused chunks is right after the position shift: not compared: " in done.stdout
    assert "ok    ratio 1.0 equals a full prefill" in done.stdout
    assert set(table(out)) == {("seams", "0"), ("seams", "0.5")}


def test_a_running_server_says_where_reuse_harms(trained_server: Server, tmp_path: Path) -> None:
    """Facts that only an earlier chunk explains, with alpha and two orders of the chunks; nothing is flushed."""
    before = trained_server.get("/chunk_cache/stats").json()["ranks"][0]["num_flushes"]
    file = prompts_of("carry", tmp_path / "carry.jsonl")
    out = tmp_path / "out"
    done = call(
        *(trained_server.url, str(file), "--methods", "full-reuse", "--alphas", "0.5", "--num", "30"),
        *("--stored", "alone"),
        *("--max-new-tokens", "4", "--out", str(out)),
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Do not reuse here" in done.stdout
    rows = table(out)
    assert float(rows[("full-reuse", "0")]["own_loss_low"]) > 0.2
    assert float(rows[("full-reuse", "0")]["gold_loss"]) > 0.2
    assert 0 < float(rows[("cache-craft", "0.5")]["rows"]) < 1
    assert trained_server.get("/chunk_cache/stats").json()["ranks"][0]["num_flushes"] == before
