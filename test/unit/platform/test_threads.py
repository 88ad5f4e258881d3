"""CPUs per rank: split evenly, shared when there are too few, and only where the user has not decided."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from sglang_plain_cpu import threads


@pytest.mark.parametrize("num_cpus", range(1, 12))
@pytest.mark.parametrize("num_ranks", range(1, 12))
def test_split_gives_every_rank_a_fair_share(num_cpus: int, num_ranks: int):
    groups = threads.split_cpus(range(num_cpus), num_ranks)
    sizes = [len(group) for group in groups]
    assert len(groups) == num_ranks
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    used = [cpu for group in groups for cpu in group]
    if num_ranks <= num_cpus:
        assert used == list(range(num_cpus))
    else:
        shares = [used.count(cpu) for cpu in range(num_cpus)]
        assert max(shares) - min(shares) <= 1


def test_binding_text_is_what_sglang_reads():
    assert threads.format_binding([[0, 1], [4]]) == "0,1|4"


@pytest.mark.parametrize(("text", "cpus"), [("3", [3]), ("0-2,5", [0, 1, 2, 5]), ("7,1", [7, 1])])
def test_parse(text: str, cpus: list[int]):
    assert threads.parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "0,,2", "-3"])
def test_parse_names_the_variable(text: str):
    with pytest.raises(ValueError, match=threads.BIND_VARIABLE):
        threads.parse_cpus(text)


@pytest.fixture
def unbound(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv(threads.BIND_VARIABLE, "")  # so that it is restored afterwards
    monkeypatch.delenv(threads.BIND_VARIABLE)
    monkeypatch.setattr(threads, "_last_set", None)
    monkeypatch.setattr(threads, "usable_cpus", lambda: [0, 1, 2, 3])
    return monkeypatch


def test_publish_fills_in_and_follows_a_second_server(unbound: pytest.MonkeyPatch):
    threads.publish_binding(2)
    assert os.environ[threads.BIND_VARIABLE] == "0,1|2,3"
    threads.publish_binding(1)
    assert os.environ[threads.BIND_VARIABLE] == "0,1,2,3"


def test_publish_leaves_a_users_binding_alone(unbound: pytest.MonkeyPatch):
    unbound.setenv(threads.BIND_VARIABLE, "3|2")
    threads.publish_binding(2)
    assert os.environ[threads.BIND_VARIABLE] == "3|2"


def test_quota_of_a_container_cuts_the_cpus(tmp_path, monkeypatch: pytest.MonkeyPatch):
    quota = tmp_path / "cpu.max"
    quota.write_text("50000 100000\n")
    monkeypatch.setattr(threads, "CGROUP_CPU_MAX", str(quota))
    assert threads.usable_cpus() == sorted(os.sched_getaffinity(0))[:1]
    quota.write_text("max 100000\n")
    assert threads.usable_cpus() == sorted(os.sched_getaffinity(0))


def run_bound(rank: int, **env: str) -> list[str]:
    """Binds a fresh process and returns its CPUs and torch's number of threads."""
    code = (
        "import os, torch; from sglang_plain_cpu import threads;"
        f"threads.bind_rank({rank}); print(sorted(os.sched_getaffinity(0)), torch.get_num_threads())"
    )
    base = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", threads.BIND_VARIABLE)}
    done = subprocess.run([sys.executable, "-c", code], env={**base, **env}, capture_output=True, text=True, check=True)
    return done.stdout.rsplit(" ", 1)


def test_bind_rank_sets_affinity_and_threads():
    cpu = max(os.sched_getaffinity(0))
    cpus, num_threads = run_bound(1, **{threads.BIND_VARIABLE: f"0|{cpu}"})
    assert cpus == f"[{cpu}]"
    assert int(num_threads) == 1


def test_bind_rank_respects_omp_num_threads():
    cpu = min(os.sched_getaffinity(0))
    _, unbound_threads = run_bound(0, OMP_NUM_THREADS="2")
    cpus, num_threads = run_bound(0, **{threads.BIND_VARIABLE: f"{cpu}", "OMP_NUM_THREADS": "2"})
    assert cpus == f"[{cpu}]"
    assert num_threads == unbound_threads


def test_bind_rank_without_binding_changes_nothing():
    cpus, _ = run_bound(0)
    assert cpus == str(sorted(os.sched_getaffinity(0)))
