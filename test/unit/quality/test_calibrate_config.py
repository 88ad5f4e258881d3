"""Calibration: the config file that it writes into."""

from __future__ import annotations

import argparse
import json
import os
import stat
from pathlib import Path

import pytest
from benchmark.quality.calibration.config_file import read_config, write_config
from benchmark.quality.question import DataError

from sglang_chunk_cache import server_args


def test_other_keys_and_permissions_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"kernel": "torch", "alpha": 3, "max_generation": 0}')
    path.chmod(0o640)
    write_config(path, "alpha", 1.5)
    assert list(json.loads(path.read_text()).items()) == [("kernel", "torch"), ("alpha", 1.5), ("max_generation", 0)]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_the_server_takes_the_file(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    write_config(path, "alpha", 1.5)
    parser = argparse.ArgumentParser()
    server_args.add_flags(parser)
    args = server_args.from_flags(parser.parse_args(["--chunk-cache", "--chunk-cache-config", f"@{path}"]))
    assert args is not None
    assert args.parsed_config.alpha == 1.5


def test_a_new_file_and_a_link(tmp_path: Path) -> None:
    path, link = tmp_path / "new" / "c.json", tmp_path / "link.json"
    link.symlink_to(path)
    write_config(link, "alpha", 2.0)
    assert link.is_symlink()
    assert json.loads(path.read_text()) == {"alpha": 2.0}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "c.json"
    path.write_text('{"kernel": "torch"}')

    def fail(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(DataError, match=r"c\.json: cannot be written \(no space\)"):
        write_config(path, "alpha", 2.0)
    assert path.read_text() == '{"kernel": "torch"}'
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"c\.json:1: not JSON"),
        ("[1]", r"c\.json: holds no JSON object"),
        ('{"no_such_key": 1}', r"c\.json: .*no_such_key: unknown key"),
    ],
)
def test_a_bad_file_is_refused_with_its_name(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    for refused in (lambda: read_config(path), lambda: write_config(path, "alpha", 1.0)):
        with pytest.raises(DataError, match=message):
            refused()
    assert path.read_text() == text


def test_a_value_that_the_server_refuses_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    with pytest.raises(DataError, match=r"c\.json: .*alpha"):
        write_config(path, "alpha", -1.0)
    assert list(tmp_path.iterdir()) == []
