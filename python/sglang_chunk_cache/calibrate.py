"""Calibrates alpha or the recompute ratio on your questions: the smallest that keeps a wanted share of the quality.

    python -m sglang_chunk_cache.calibrate --model-path DIR --data jsonl:own.jsonl --keep 0.95 --config chunk_cache.json

The work is done by the quality harness of the source checkout, `benchmark/quality/calibrate.py`, which is no part of
the wheel: clone the repository and run `pip install -e ".[bench]"` in it. docs/calibrate.md describes the command.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

PROG = "python -m sglang_chunk_cache.calibrate"
HARNESS = Path("benchmark", "quality", "calibrate.py")
EXTRA_PACKAGES = ("httpx", "matplotlib", "rich", "rouge_score", "scipy")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the harness of the checkout that this package is installed from; returns the exit code."""
    root = find_checkout(Path(__file__))
    if root is None:
        return _refuse('needs the quality harness; clone the repository and run `pip install -e ".[bench]"` in it')
    missing = [name for name in EXTRA_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(f'{", ".join(missing)}: not installed; run `pip install -e ".[bench]"` in {root}')
    sys.path.insert(0, str(root))
    from benchmark.quality.calibrate import main as calibrate

    return calibrate(argv)


def find_checkout(module: Path) -> Path | None:
    """The checkout that `module` lies in, two folders deep; None in an installed wheel."""
    root = module.resolve().parents[2]
    return root if (root / HARNESS).is_file() else None


def _refuse(sentence: str) -> int:
    print(f"{PROG}: {sentence}.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
