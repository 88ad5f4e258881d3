"""Real processes that must end at once, with one sentence and a non-zero exit code."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tiny_models import make_model

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]
SOURCES = [ROOT / "python", ROOT / "scheduler", ROOT / "sgl-kernel-ext"]


@pytest.fixture(scope="session")
def environment(tmp_path_factory) -> dict[str, str]:
    """Makes the entry points of `pyproject.toml` known to a child, also in a checkout that is not installed."""
    path = [*SOURCES]
    installed = {entry.name for entry in importlib.metadata.entry_points(group="sglang.srt.plugins")}
    if "chunk_cache" not in installed:
        folder = tmp_path_factory.mktemp("site")
        info = folder / "sglang_chunk_cache-0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang-chunk-cache\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[sglang.srt.plugins]\nchunk_cache = sglang_chunk_cache.plugin:register\n"
            "[sglang.srt.platforms]\nchunk_cache_cpu = sglang_plain_cpu:activate\n"
        )
        path.append(folder)
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}


def launch(environment: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    """Waits for its end, and for that of all that it has started."""
    return run(environment, "-m", "sglang.launch_server", *argv)


def run(environment: dict[str, str], *argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *argv]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)
    try:
        out, err = process.communicate(timeout=500)
        psutil.wait_procs(in_group(process.pid), timeout=5)
        assert in_group(process.pid) == []
    finally:
        for left in in_group(process.pid):
            left.kill()
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def in_group(group: int) -> list[psutil.Process]:
    """The processes of a group that have not ended."""
    found = []
    for process in psutil.process_iter(["status"]):
        try:
            if os.getpgid(process.pid) == group and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


@pytest.mark.all
@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--chunk-cache", "--pp-size", "2"], "chunk cache: pipeline parallelism (--pp-size) cannot be combined"),
        (["--chunk-cache-ratio", "0.5"], "chunk cache: --chunk-cache-ratio is given without --chunk-cache"),
        (["--chunk-cache", "--chunk-cache-method", "best"], "chunk cache: --chunk-cache-method 'best' is not known"),
    ],
)
def test_refused_flag(environment, argv, sentence):
    done = launch(environment, "--model-path", "no-such-model", *argv)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(sentence)


def test_refused_model(environment, tmp_path):
    from transformers import LlamaConfig

    config = LlamaConfig(
        vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attention_chunk_size=64,
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    done = launch(environment, "--model-path", str(tmp_path), "--skip-tokenizer-init", "--chunk-cache")
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "because it uses local attention" in done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize(
    "flags",
    [
        ("--skip-tokenizer-init",),
        *(
            pytest.param(flags, marks=pytest.mark.all)
            for flags in (
                (),
                ("--dp-size", "2"),
                ("--tp-size", "2"),
                ("--tp-size", "2", "--skip-tokenizer-init", "--tokenizer-worker-num", "2"),
                ("--tokenizer-worker-num", "2"),
                ("--chunk-cache-selector", "LLAMA"),
            )
        ),
    ],
    ids=" ".join,
)
def test_model_that_is_refused_once_it_is_loaded(environment, tmp_path, flags):
    """By a child, in whose place SGLang would report that it died, or by children that their controller waits for."""
    model = make_model("gemma2", tmp_path / "model")
    flags = tuple(str(make_model("llama", tmp_path / "llama")) if flag == "LLAMA" else flag for flag in flags)
    done = launch(environment, "--model-path", str(model), "--max-total-tokens", "2048", "--chunk-cache", *flags)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    sentence = "chunk cache: this model caps its attention's logits"
    # A replica whose controller has ended may write a line more before it ends too.
    assert any(line.startswith(sentence) for line in done.stderr.splitlines())
    assert (done.stdout + done.stderr).count(sentence) == 1


REFUSED_BY_A_CHILD = """
import atexit, gc, multiprocessing, sys, time, types
import zmq
from sglang_chunk_cache.flags import server_args as options

def child():
    options.refuse("it is not served.")

def launch_subprocesses(cls, server_args):
    manager = types.SimpleNamespace(context=zmq.Context())
    manager.itself = manager  # collected, and not freed
    manager.socket = manager.context.socket(zmq.PUSH)
    manager.socket.connect(sys.argv[2])
    manager.socket.send(b"to a scheduler that never came")
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=child)
    process.start()
    spawn.Process(target=time.sleep, args=(1000,)).start()
    process.join()
    raise RuntimeError("Rank 0 scheduler died")

if __name__ == "__main__":
    from sglang_chunk_cache import plugin

    atexit.register(gc.collect)
    record = types.SimpleNamespace(tokenizer_worker_num=1)
    options.attach(record, options.ChunkCacheArgs())
    if sys.argv[1] == "engine":
        setattr(record, plugin._BY_ENGINE, True)
        worker = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(1000,))
        worker.start()  # of the program, not of the engine
    try:
        plugin.launch_subprocesses(launch_subprocesses, object, server_args=record)
    except options.StartRefused as error:
        if sys.argv[1] != "engine":
            raise
        assert worker.is_alive()
        worker.kill()
        print(error.code, "raised", file=sys.stderr)
"""


@pytest.mark.parametrize(("kind", "ends"), [("server", 1), ("engine", 0)])
def test_refused_by_a_child_while_messages_wait(environment, tmp_path, kind, ends):
    """For the scheduler, which is not there: whoever tears the sockets down would wait for ever."""
    script = tmp_path / "launch.py"
    script.write_text(REFUSED_BY_A_CHILD)
    done = run(environment, str(script), kind, f"ipc://{tmp_path}/nobody")
    assert done.returncode == ends, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert (done.stdout + done.stderr).count("chunk cache: it is not served.") == 1


@pytest.mark.all
def test_refused_selector(environment, tmp_path):
    """One that is none is seen before anything starts, one whose weights cannot be read when its process has ended."""
    model, selector = make_model("llama", tmp_path / "model"), make_model("llama", tmp_path / "selector", seed=1)
    (selector / "model.safetensors").write_bytes(b"no weights")
    for path, sentence in (
        (tmp_path / "none", "is neither a Hugging Face folder nor a name with model and tokenizer"),
        (selector, "its process ended with code 1; see the log above."),
    ):
        done = launch(environment, "--model-path", str(model), "--chunk-cache", "--chunk-cache-selector", str(path))
        assert done.returncode == 1
        told = [line for line in done.stderr.splitlines() if line.startswith("chunk cache: --chunk-cache-selector")]
        assert len(told) == 1
        assert sentence in told[0]
        assert str(path) in told[0]
