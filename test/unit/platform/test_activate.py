"""When our CPU platform serves, and what it fills in. The real SGLang decides in a fresh process each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sglang_plain_cpu as platform_cpu
from tiny_models import make_model

pytestmark = pytest.mark.skipif(
    platform_cpu.has_accelerator(), reason="an accelerator is here: SGLang's own platform serves"
)

FIELDS = (
    "device",
    "attention_backend",
    "sampling_backend",
    "dtype",
    "mem_fraction_static",
    "max_total_tokens",
    "page_size",
)

OPEN: tuple[str, ...] = ()
TWO_RANKS = ("--tp", "2")
APART = (*TWO_RANKS, "--attn-dp-size", "2")
APART_BY_THE_OLD_FLAG = (*TWO_RANKS, "--dp-size", "2", "--enable-dp-attention")
GIVEN = (
    *("--device", "cpu", "--tp", "2", "--dtype", "bfloat16", "--max-total-tokens", "4096", "--page-size", "16"),
    *("--mem-fraction-static", "0.5", "--sampling-backend", "ascend", "--attention-backend", "torch_native"),
)

# Resolves several command lines one after the other, because importing SGLang takes most of the time.
PROGRAM = f"""
import json, os, sys
from sglang.srt.server_args import prepare_server_args
from sglang.srt.arg_groups.overrides import resolution_result
for flags, env in json.loads(sys.argv[2]):
    os.environ.update(env)
    args = prepare_server_args(["--model-path", sys.argv[1], *flags])
    args.resolve_once()
    found = {{name: str(resolution_result(args, name)) for name in {FIELDS!r}}}
    found["bind"] = os.environ.get("SGLANG_CPU_OMP_THREADS_BIND")
    found["compiler_off"] = os.environ.get("TORCHDYNAMO_DISABLE")
    print("RESULT" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def resolved(model_root: Path) -> dict[tuple[str, ...], dict[str, str]]:
    """What SGLang makes of command lines: the fields above and two variables for its children."""
    model = make_model("llama", model_root / "platform-llama")
    cases = [
        (OPEN, {}),
        (TWO_RANKS, {}),
        (APART, {}),
        (APART_BY_THE_OLD_FLAG, {}),
        (GIVEN, {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}),
    ]
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SGLANG_", "TORCH"))}
    command = [sys.executable, "-c", PROGRAM, str(model), json.dumps(cases)]
    done = subprocess.run(command, env=clean, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.removeprefix("RESULT") for line in done.stdout.splitlines() if line.startswith("RESULT")]
    return {flags: json.loads(line) for (flags, _), line in zip(cases, lines, strict=True)}


def test_activate_names_a_class_that_sglang_can_load(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        monkeypatch.setenv(name, "0")  # the user's word: activate leaves it
    assert platform_cpu.activate() == platform_cpu.PLATFORM_CLASS
    assert os.environ["TORCHDYNAMO_DISABLE"] == "0"


def test_activate_gives_way_to_sglangs_own_cpu_engine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert platform_cpu.activate() is None


def test_activate_gives_way_to_an_accelerator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert platform_cpu.activate() is None


@pytest.mark.slow
def test_fills_in_what_was_left_open(resolved: dict[tuple[str, ...], dict[str, str]]):
    found = resolved[OPEN]
    assert found["device"] == "cpu"
    assert found["attention_backend"] == "torch_native"
    assert found["sampling_backend"] == "pytorch"
    assert found["dtype"] == "float32"
    assert int(found["max_total_tokens"]) > 0
    assert found["bind"] == ",".join(map(str, sorted(os.sched_getaffinity(0))))
    assert found["compiler_off"] == "1"


@pytest.mark.slow
def test_a_given_flag_or_variable_wins(resolved: dict[tuple[str, ...], dict[str, str]]):
    assert resolved[GIVEN] == {
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "ascend",
        "dtype": "bfloat16",
        "mem_fraction_static": "0.5",
        "max_total_tokens": "4096",
        "page_size": "16",
        "bind": "0|0",
        "compiler_off": "1",
    }


@pytest.mark.slow
@pytest.mark.parametrize("flags", [TWO_RANKS, APART, APART_BY_THE_OLD_FLAG])
def test_two_ranks_share_the_cpus(resolved: dict[tuple[str, ...], dict[str, str]], flags: tuple[str, ...]):
    groups = resolved[flags]["bind"].split("|")
    assert len(groups) == 2
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) > 1:
        assert sorted(int(cpu) for group in groups for cpu in group.split(",")) == cpus
