"""Programs that own the process that they run in, as an engine does: a task goes in as JSON, a result comes out.

- `ask` runs `server/NAME.py` with a task and returns its result.
- `answer` is the program's end of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

MARK = "result: "
TEST_DIR = Path(__file__).parents[1]


def ask(name: str, task: dict[str, Any]) -> dict[str, Any]:
    path = os.pathsep.join([str(TEST_DIR), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(TEST_DIR / "server" / f"{name}.py")],
        input=json.dumps(task),
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert done.returncode == 0, done.stderr[-4000:]
    assert lines, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(lines[0].removeprefix(MARK))
    return result


def answer(main: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    print(MARK + json.dumps(main(json.load(sys.stdin))), flush=True)
