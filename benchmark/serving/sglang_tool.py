"""SGLang's own serving benchmark, `sglang.benchmark.serving`, against a running server: `ask_shared`.

Its generator `generated-shared-prefix` makes groups of prompts: all prompts of a group begin with the same text.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.common.server import ServerError, offline_env
from benchmark.serving.models import CACHE_DIR

DATASET = "generated-shared-prefix"


@dataclass(frozen=True)
class SharedScale:
    """Arguments of SGLang's generator; lengths in tokens.

    Attributes:
        groups, per_group: groups of prompts, and prompts of each.
        system_len: length of the text that all prompts of a group begin with.
        question_len: length of the text behind it, which differs in each prompt.
        clients: clients of the closed loop.
        pairs: runs of each server that count; one more comes first, while code is cold.
    """

    groups: int = 4
    per_group: int = 6
    system_len: int = 600
    question_len: int = 100
    output_len: int = 8
    clients: int = 4
    pairs: int = 5


def ask_shared(url: str, model_dir: Path, scale: SharedScale, seed: int) -> dict[str, Any]:
    """Runs the tool once and returns its own figures; the same seed gives the same prompts.

    Raises:
        ServerError: the tool or a request failed; the message has the end of its output, or the number answered.
    """
    out = CACHE_DIR / f"{DATASET}-{seed}.jsonl"
    out.unlink(missing_ok=True)  # the tool appends
    values = {
        "backend": "sglang",
        "base-url": url,
        "model": model_dir,
        "dataset-name": DATASET,
        "gsp-num-groups": scale.groups,
        "gsp-prompts-per-group": scale.per_group,
        "gsp-system-prompt-len": scale.system_len,
        "gsp-question-len": scale.question_len,
        "gsp-output-len": scale.output_len,
        "num-prompts": scale.groups * scale.per_group,
        "max-concurrency": scale.clients,
        "seed": seed,
        "output-file": out,
    }
    given = [text for name, value in values.items() for text in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "sglang.benchmark.serving", *given, "--flush-cache", "--cache-report"]
    env = {**os.environ, **offline_env(), "HOME": str(CACHE_DIR)}  # the tool keeps what it generated in the home folder
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode or not out.is_file():
        raise ServerError(f"{DATASET}: rc {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")
    found: dict[str, Any] = json.loads(out.read_text(encoding="utf-8").splitlines()[-1])
    if found["completed"] != values["num-prompts"]:
        raise ServerError(f"{DATASET}: {found['completed']} of {values['num-prompts']} requests were answered.")
    return {
        "seconds": found["duration"],
        "requests_per_s": found["request_throughput"],
        "ttft_p50_s": found["median_ttft_ms"] / 1000,
        "ttft_p99_s": found["p99_ttft_ms"] / 1000,
        "prompt_tokens": found["total_input_tokens"],
        "cached_tokens": found["cache_report"]["total_cached_tokens"],
    }
