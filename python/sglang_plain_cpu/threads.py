"""Threads: which CPUs a rank computes on. SGLang starts a process per rank; two that share cores wait for each other.

- `usable_cpus()` asks the machine which CPUs this process may use, cut to a container's quota.
- `split_cpus(cpus, num_ranks)` and `format_binding(groups)` give the value of `SGLANG_CPU_OMP_THREADS_BIND`.
- `parse_cpus(text)` reads one rank's part of this value.
- `publish_binding(num_ranks)` sets the variable; `bind_rank(rank)` applies it to this process: CPU affinity and torch's
  number of threads.

SGLang reads the variable too, but applies it only if its AMX or Arm kernels are installed.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

BIND_VARIABLE = "SGLANG_CPU_OMP_THREADS_BIND"
CGROUP_CPU_MAX = "/sys/fs/cgroup/cpu.max"
_last_set: str | None = None


def usable_cpus() -> list[int]:
    """CPU numbers that this process may use, ascending, at least one; a container's quota limits how many."""
    cpus = sorted(os.sched_getaffinity(0))
    quota = _cpu_quota()
    return cpus if quota is None else cpus[: max(1, math.ceil(quota))]


def split_cpus(cpus: Sequence[int], num_ranks: int) -> list[list[int]]:
    """One group of neighbouring CPUs per rank, sizes differing by at most one.

    With more ranks than CPUs, ranks share CPUs: rank i gets the CPU at index i modulo their number.
    """
    if num_ranks >= len(cpus):
        return [[cpus[rank % len(cpus)]] for rank in range(num_ranks)]
    borders = [rank * len(cpus) // num_ranks for rank in range(num_ranks + 1)]
    return [list(cpus[start:end]) for start, end in itertools.pairwise(borders)]


def format_binding(groups: Sequence[Sequence[int]]) -> str:
    """`[[0, 1], [2, 3]]` -> `"0,1|2,3"`."""
    return "|".join(",".join(map(str, group)) for group in groups)


def parse_cpus(text: str) -> list[int]:
    """CPU numbers of one rank: `"0-2,5"` -> `[0, 1, 2, 5]`.

    Raises:
        ValueError: not a list of numbers and ranges.
    """
    cpus: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        try:
            cpus.extend(range(int(first), int(last or first) + 1))
        except ValueError:
            raise ValueError(
                f"{BIND_VARIABLE}: {part!r} is not a CPU number or a range such as 0-3; unset it to let the "
                "platform choose"
            ) from None
    return cpus


def publish_binding(num_ranks: int) -> None:
    """Sets `SGLANG_CPU_OMP_THREADS_BIND` for processes that start later, unless the user has set it."""
    global _last_set
    current = os.environ.get(BIND_VARIABLE)
    if current and current != _last_set:
        return
    _last_set = format_binding(split_cpus(usable_cpus(), num_ranks))
    os.environ[BIND_VARIABLE] = _last_set


def bind_rank(rank: int) -> None:
    """Binds this process to its CPUs and gives torch one thread per CPU, unless OMP_NUM_THREADS is set.

    Does nothing if the variable is unset or "all", or has no entry for this rank.
    """
    groups = os.environ.get(BIND_VARIABLE, "all").split("|")
    if groups == ["all"] or rank >= len(groups):
        return
    import torch

    cpus = parse_cpus(groups[rank])
    os.sched_setaffinity(0, cpus)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(len(cpus))


def _cpu_quota() -> float | None:
    try:
        quota, period = Path(CGROUP_CPU_MAX).read_text().split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)
