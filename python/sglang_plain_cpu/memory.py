"""Memory: how much of a machine's memory the pools of KV and of states may take. Plain numbers in and out.

- `free_ram_bytes()` and `total_ram_bytes()` ask the machine, container limits included.
- `pool_token_limit(...)` turns free memory into a number of tokens, `state_limit(...)` into a number of states.
"""

from __future__ import annotations

from pathlib import Path

import psutil

# The KV pool may take this share of the memory that is free at start-up; the rest is for weights, activations, others.
POOL_FRACTION = 0.25
# Without this limit a tiny model would get millions of slots. SGLang copies its list of free slots when a request ends,
# so slots that no prompt will ever use cost time: 4 MB are copied at this limit.
MAX_POOL_TOKENS = 1 << 19
STATE_FRACTION = 0.125
"""Share of the free memory for states, for models with layers that keep a state."""
NUM_STATES = (16, 512)
"""Smallest and largest number of states; a running request holds up to three, the radix cache the others."""

# (limit, usage) files of control groups, version 2 and 1.
CGROUP_MEMORY_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def total_ram_bytes() -> int:
    """Memory of the machine, or the limit of the container when that is less."""
    total = int(psutil.virtual_memory().total)
    return min([total, *(limit for limit, _ in _cgroup_memory())])


def free_ram_bytes() -> int:
    """Memory that can be taken without swapping, or what the container still allows when that is less."""
    available = int(psutil.virtual_memory().available)
    return min([available, *(max(0, limit - used) for limit, used in _cgroup_memory())])


def pool_token_limit(
    *, free_bytes: int, token_bytes: int, num_processes: int, page_size: int, min_tokens: int = 0
) -> int:
    """Tokens per process so that all pools together take at most `POOL_FRACTION` of `free_bytes`.

    Args:
        token_bytes: K and V of one token over all layers, as one process stores them (its share of the heads).
        num_processes: processes on this machine that hold a pool each (tensor x pipeline x data parallel).
        min_tokens: raises `MAX_POOL_TOKENS` for a model with a longer context, but never the bound by memory.

    Returns:
        a multiple of `page_size`, at least one page.
    """
    by_memory = int(free_bytes * POOL_FRACTION) // (token_bytes * num_processes)
    tokens = min(by_memory, max(MAX_POOL_TOKENS, min_tokens))
    return max(page_size, tokens // page_size * page_size)


def state_limit(*, free_bytes: int, state_bytes: int, num_processes: int) -> int:
    """States per process so that all pools together take at most `STATE_FRACTION` of `free_bytes`, within `NUM_STATES`.

    Args:
        state_bytes: one state over all layers, as one process stores it.
        num_processes: as of `pool_token_limit`.
    """
    fewest, most = NUM_STATES
    return max(fewest, min(most, int(free_bytes * STATE_FRACTION) // (state_bytes * num_processes)))


def _cgroup_memory() -> list[tuple[int, int]]:
    """Limit and usage of the container, without what the system takes back by itself: files that were read."""
    found = []
    for limit_path, used_path in CGROUP_MEMORY_FILES:
        limit, used = _read_int(limit_path), _read_int(used_path)
        if limit is not None and used is not None:
            found.append((limit, max(0, used - _inactive_file_bytes(Path(used_path).with_name("memory.stat")))))
    return found


def _inactive_file_bytes(path: Path) -> int:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return 0
    return next((int(line[1]) for line in lines if line[0] in ("inactive_file", "total_inactive_file")), 0)


def _read_int(path: str) -> int | None:
    try:
        text = Path(path).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
