"""What a batch of a model with states launches, as a table of benchmark/results/gpu/launches.md.

    python test/unit/waits/launches_of_states.py     writes it anew

Verb: `table` (of parts of the traffic of `fake_scheduler`, case "states"). Test: test_nothing_waits.py.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from doc_pages import write_made_part
from unit.waits.fake_scheduler import PASSAGES, Part, run_apart

PROGRAM = "test/unit/waits/launches_of_states.py"
PAGE = "../benchmark/results/gpu/launches.md"  # of docs
NUM_LAYERS = 2
"""Of the model's four, with states."""
_ONCE = ("StateForward.set_up",)


def per_layer(part: Part) -> tuple[int, int]:
    """Launches of ours for one layer with states, and those of them that copy transitions from host memory."""
    own = {
        place: num
        for place, num in part.launches.items()
        if "state_forward.py" in place and "empty" not in place and not any(name in place for name in _ONCE)
    }
    copies = sum(num for place, num in own.items() if "_on_device" in place or "_chained copy_" in place)
    return sum(own.values()) // NUM_LAYERS, copies // NUM_LAYERS


def table(parts: Mapping[str, Part]) -> str:
    lines = [
        "| passages reused | requests | runs | ours, all | ours, in one layer with states | of these, copies from host "
        "memory | SGLang's kernels in that layer | the host waits in these, for all layers |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for num_passages in PASSAGES:
        for size in (1, 8):
            part = parts[f"{num_passages} passages {size}"]
            ours, copies = per_layer(part)
            cells = [num_passages, size, size * (num_passages + 1), sum(part.launches.values()), ours, copies]
            cells += [part.state_kernels // NUM_LAYERS, part.layouts]
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = run_apart("states", Path(folder))
    write_made_part(PAGE, PROGRAM, table(parts))


if __name__ == "__main__":
    main()
