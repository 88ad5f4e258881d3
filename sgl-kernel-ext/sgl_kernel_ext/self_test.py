"""Self-test: every kernel compiled and compared with its definition, on the device at hand.

    python -m sgl_kernel_ext.self_test [--device cuda] [--out FOLDER]

    check_kernels   results for the shapes of one model; what a server runs at its start

The cases of a model (`self_test_cases`) meet every compile key that its requests can meet, so that nothing compiles
later. Triton compiles a key in one to two seconds, and only once, since it keeps them on disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from sgl_kernel_ext.self_test_cases import Case, ModelShape, cases, common_shapes


@dataclass(frozen=True, kw_only=True)
class Result:
    """One case of one implementation.

    Attributes:
        error: the largest difference from the definition, as a share of what is allowed; above 1 the case fails.
        seconds: of the first call, which compiles, with the copy of its result to the host.
        failure: what was raised instead of a result.
    """

    kernel: str
    case: str
    implementation: str
    error: float
    seconds: float
    failure: str = ""

    @property
    def holds(self) -> bool:
        """Whether the implementation agrees with the definition."""
        return not self.failure and self.error <= 1

    def __str__(self) -> str:
        what = self.failure or f"off by {self.error:.2g} of what is allowed"
        return f"{self.kernel}, {self.implementation}, {self.case}: {what} ({self.seconds:.1f} s)"


def check_kernels(
    shape: ModelShape, device: torch.device | str, implementations: Sequence[str] = ("triton", "torch")
) -> list[Result]:
    """Every case of `cases` by every implementation; an exception is a result.

    An implementation that an operation does not have is left out: FlashInfer has `sparse_extend` only.
    """
    results = []
    with torch.inference_mode():
        for case in cases(shape, torch.device(device)):
            for implementation in implementations:
                if implementation == "flashinfer" and case.kernel != "sparse_extend":
                    continue
                results.append(_check(case, implementation))
    return results


def _check(case: Case, implementation: str) -> Result:
    start = time.perf_counter()
    error, failure = float("nan"), ""
    try:
        found = case.run(implementation)
        if found[0].device.type == "cuda":
            torch.cuda.synchronize(found[0].device)
        seconds = time.perf_counter() - start
        error = case.error(found)
    except Exception as problem:  # noqa: BLE001  compilers and drivers raise of all kinds, and each is an answer
        seconds = time.perf_counter() - start
        lines = str(problem).strip().splitlines()
        failure = f"{type(problem).__name__}: {lines[0] if lines else ''}"
    return Result(
        kernel=case.kernel,
        case=case.case,
        implementation=implementation,
        error=error,
        seconds=round(seconds, 3),
        failure=failure,
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--implementations", nargs="+", help="default: triton and torch on a GPU, else torch")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write self_test.json and self_test.md there")
    args = parser.parse_args(argv)
    has_triton = args.device.startswith("cuda") and importlib.util.find_spec("triton") is not None
    implementations = args.implementations or (["triton", "torch"] if has_triton else ["torch"])
    lines = [
        "| model | kernel | case | implementation | error / allowed | s | |",
        "| --- | --- | --- | --- | ---: | ---: | --- |",
    ]
    report, has_failed = [], False
    for shape in common_shapes():
        for result in check_kernels(shape, args.device, implementations):
            has_failed |= not result.holds
            report.append({"model": str(shape), **asdict(result)})
            cells = (str(shape), result.kernel, result.case, result.implementation, f"{result.error:.2g}")
            verdict = "holds" if result.holds else result.failure or "DISAGREES"
            lines.append(f"| {' | '.join(cells)} | {result.seconds:.2f} | {verdict} |")
            print(lines[-1], flush=True)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "self_test.json").write_text(json.dumps(report, indent=1))
        (args.out / "self_test.md").write_text("\n".join(["# Kernels against their definitions", "", *lines, ""]))
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
