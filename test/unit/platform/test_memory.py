"""The KV pool's size on a CPU: a quarter of free memory over all processes, whole pages, no absurd pools."""

from __future__ import annotations

import psutil
import pytest

from sglang_plain_cpu import memory

GIB = 1 << 30


def limit(**changes: int) -> int:
    values = {"free_bytes": 16 * GIB, "token_bytes": 128 * 1024, "num_processes": 1, "page_size": 1, **changes}
    return memory.pool_token_limit(**values)


def test_takes_a_quarter_of_the_free_memory():
    assert limit() == 4 * GIB // (128 * 1024)


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_all_processes_together_stay_within_the_quarter(num_processes: int, page_size: int):
    tokens = limit(num_processes=num_processes, page_size=page_size)
    assert tokens % page_size == 0
    assert tokens * num_processes * 128 * 1024 <= 4 * GIB
    assert (tokens + page_size) * num_processes * 128 * 1024 > 4 * GIB


def test_a_tiny_model_gets_no_more_slots_than_the_limit():
    assert limit(token_bytes=512) == memory.MAX_POOL_TOKENS


def test_a_long_context_raises_the_limit_but_not_the_memory_bound():
    assert limit(token_bytes=512, min_tokens=1 << 20) == 1 << 20
    assert limit(min_tokens=1 << 20) == 4 * GIB // (128 * 1024)


@pytest.mark.parametrize(("state_bytes", "expected"), [(1 << 20, 512), (16 << 20, 64), (1 << 30, 16)])
def test_states_take_an_eighth_within_their_bounds(state_bytes: int, expected: int):
    assert memory.state_limit(free_bytes=16 * GIB, state_bytes=state_bytes, num_processes=2) == expected


def test_one_page_at_least():
    assert limit(free_bytes=0, page_size=16) == 16


def test_free_memory_is_what_the_machine_reports_where_no_container_limits_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory, "CGROUP_MEMORY_FILES", ())
    assert memory.total_ram_bytes() == psutil.virtual_memory().total
    assert 0 < memory.free_ram_bytes() < memory.total_ram_bytes()


def test_a_container_limit_counts(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "max").write_text(f"{300 << 20}\n")
    (tmp_path / "current").write_text(f"{200 << 20}\n")
    monkeypatch.setattr(memory, "CGROUP_MEMORY_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert memory.total_ram_bytes() == 300 << 20
    assert memory.free_ram_bytes() == 100 << 20


def test_files_that_were_read_take_no_memory_of_a_container(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "max").write_text(f"{300 << 20}\n")
    (tmp_path / "current").write_text(f"{250 << 20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 1\ninactive_file {200 << 20}\nactive_file 1\n")
    monkeypatch.setattr(memory, "CGROUP_MEMORY_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert memory.free_ram_bytes() == 250 << 20


def test_a_container_without_limit_does_not(tmp_path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "max").write_text("max\n")
    (tmp_path / "current").write_text("1\n")
    monkeypatch.setattr(memory, "CGROUP_MEMORY_FILES", ((str(tmp_path / "max"), str(tmp_path / "current")),))
    assert memory.total_ram_bytes() == psutil.virtual_memory().total
