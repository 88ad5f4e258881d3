"""What a fused batch of each method launches, as a table of benchmark/results/gpu/launches.md.

    python test/unit/waits/launches_of_methods.py     counts, and writes table and launches.json anew

Verbs: `counts` (of parts of the traffic of `fake_scheduler`, case "methods"), `table` (of counts, beside those of an
earlier commit, which stay in launches.json). Test: test_nothing_waits.py.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from chunk_cache.methods import METHODS
from doc_pages import DOCS, write_made_part
from unit.waits.fake_scheduler import Part, run_apart

PROGRAM = "test/unit/waits/launches_of_methods.py"
PAGE = "../benchmark/results/gpu/launches.md"  # of docs
RESULTS = DOCS / "../benchmark/results/gpu/launches.json"
_IN_LAYERS = ("sparse_extend/", "attention_mass/", "kv_deviation/", "add_drift/triton", "LayerKV.keys")
_IN_LAYERS += ("Questions.take", "QuestionPass.observe")  # the latter where scores were made layer by layer


def counts(parts: Mapping[str, Part]) -> dict[str, dict[str, dict[str, int]]]:
    """By method and number of requests: all of ours but reserved memory, and those that run once a layer."""
    found: dict[str, dict[str, dict[str, int]]] = {}
    for method in METHODS:
        for size in ("1", "8"):
            own = {place: n for place, n in parts[f"{method} {size}"].launches.items() if "empty" not in place}
            in_layers = sum(n for place, n in own.items() if any(name in place for name in _IN_LAYERS))
            found.setdefault(method, {})[size] = {"all": sum(own.values()), "in_layers": in_layers}
    return found


def table(now: Mapping[str, dict[str, dict[str, int]]]) -> str:
    """Beside the earlier counts of launches.json."""
    earlier = json.loads(RESULTS.read_text())["before"]
    lines = [
        f"| method | one request: {earlier['commit']} | now | eight: {earlier['commit']} | now | "
        f"in the layers, eight: {earlier['commit']} | now |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for method, new in now.items():
        old = earlier["launches"][method]
        columns = [("1", "all"), ("8", "all"), ("8", "in_layers")]
        cells = [str(of[size][what]) for size, what in columns for of in (old, new)]
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        now = counts(run_apart("methods", Path(folder)))
    write_made_part(PAGE, PROGRAM, table(now))
    RESULTS.write_text(json.dumps(json.loads(RESULTS.read_text()) | {"now": now}, indent=1) + "\n")


if __name__ == "__main__":
    main()
