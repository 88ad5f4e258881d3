"""A tiny trace in RAGPulse's format, made up; the real one is not in this project."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmark.common.ragpulse import FILES, TRACE_FILE

LENGTHS: Mapping[str, Mapping[int, int]] = {
    "sys_prompt": {100: 20, 101: 10, 102: 10, 103: 10},
    "passages_ids": {0: 30, 1: 40, 2: 50},
    "history": {200: 5},
    "web_search": {300: 7},
    "user_input": {400: 3, 401: 4},
}


def request(
    system: Sequence[int],
    passages: Sequence[int],
    user: int,
    *,
    more: int = 8,
    time: str = "0",
    **others: Sequence[int],
) -> dict[str, Any]:
    """One line of the trace; `more` are the tokens of the template."""
    ids = {"history": [], "web_search": [], **others, "sys_prompt": system, "passages_ids": passages}
    ids["user_input"] = [user]
    lengths = {block: length for kind in LENGTHS.values() for block, length in kind.items()}
    return {
        "timestamp": time,
        "input_length": more + sum(lengths[block] for kind in ids.values() for block in kind),
        "output_length": 12,
        "hash_ids": ids,
        "session_id": f"session of {user}",
    }


REQUESTS = (
    request([100, 101], [0, 1], 400, time="5"),
    request([100, 102], [1, 0], 401, time="7.5", history=[200], web_search=[300]),
    request([100, 103], [2, 0, 2], 400, time="9"),
)


def write_pulse(folder: Path, requests: Sequence[object] = REQUESTS) -> Path:
    """Writes the files of a trace into a folder and returns it."""
    for kind, (name, field) in FILES.items():
        lines = [json.dumps({field: block, "token_length": length}) for block, length in LENGTHS[kind].items()]
        (folder / name).write_text("\n\n".join(lines) + "\n")
    (folder / TRACE_FILE).write_text("".join(json.dumps(one) + "\n" for one in requests))
    return folder
