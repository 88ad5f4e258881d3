"""The measurement of preparation, from its command to its table, on a trained model of the repository."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmark.quality import preparation

from server.conftest import TRAINED_MODEL as MODEL

pytestmark = [
    pytest.mark.server,
    pytest.mark.skipif(not MODEL.exists(), reason=f"no trained model in {MODEL.name}; see docs/benchmarks.md"),
]


@pytest.mark.all
def test_the_table_has_every_cell(tmp_path: Path) -> None:
    flags = ["--families", "carry", "--num", "3", "--neighbours", "4", "--ratios", "0.15", "1"]
    folders = ["--out", str(tmp_path / "out"), "--work", str(tmp_path / "work")]
    command = ["--model-path", str(MODEL), "--tasks", "synthetic", *flags, *folders]
    assert preparation.main(command) == 0
    report = json.loads((tmp_path / "out" / "preparation.json").read_text())
    (deviation,) = report["deviation"]
    assert min(deviation["alone"], deviation["prepared"]) > 0
    rows = {(row["method"], row["ratio"]): row for row in report["answers"]}
    assert list(rows) == [("full-reuse", 0.0), ("fusionrag", 0.15), ("fusionrag", 1.0)]
    whole = rows["fusionrag", 1.0]
    assert whole["score"] == {"alone": whole["full_score"], "prepared": whole["full_score"]}
    assert abs(whole["gold_gain"]["mean"]) < 1e-3, "ratio 1 is a full prefill, however chunks are stored"
    assert rows["full-reuse", 0.0]["gold_gain"]["mean"] != 0.0, "below it, preparation changes the answers"
    assert preparation.main([*command, "--resume"]) == 0, "without a server"
