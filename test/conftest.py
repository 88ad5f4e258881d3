"""Options and fixtures for all tests: `--all` for the full matrix, and a folder for models made on the spot.

Also which tests stay together when several processes share the work (`pytest -n 2`, `make test`): all that use the
servers of `server/conftest.py`, and otherwise the tests of a module, which share what it has started.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

TEST_DIR = Path(__file__).parent
# Helper modules of the tests (tiny_models, server_fixture) are imported by their plain name.
sys.path.insert(0, str(TEST_DIR))
_STATUS = pytest.StashKey[int]()
# The others share the servers of server/conftest.py.
OWN_SERVER = (
    *("test_admin_server.py", "test_page_server.py", "test_gate_server.py", "test_tiers_server.py"),
    *("test_tier_faults_server.py", "test_selector_server.py", "test_doctor_server.py", "test_package.py"),
    *("test_replicas_server.py", "test_fuzz_server.py", "test_schema_server.py", "test_pair_server.py"),
    *("test_gateway_server.py", "test_fleet_server.py", "test_connections_server.py", "test_events_server.py"),
    "test_images_server.py",
)
# These share the server of a trained model.
TRAINED_SERVER = ("test_quality_server.py", "test_serving_client.py", "test_verify_server.py")
SHARES_NOTHING = ("test_stress.py",)  # each test has a scheduler of its own
# Long, and beside others of `make test` that cover most of the same: as those marked `all`.
LONG = (
    *("server/test_quality_server.py", "exactness/test_simulator_agrees.py"),
    *("server/test_images_server.py", "server/test_serving_client.py", "server/test_gate_server.py"),
    *(f"server/test_states_server.py::test_{name}" for name in ("passages_from_disk", "what_has_left_host_memory")),
    "exactness/test_dp_attention.py::test_equals_stock[page1-tp2-whole-dp2-overlap-qwen3",
    "exactness/test_together.py::test_mixed_batches[page1-tp2",
    *(f"exactness/test_stress.py::test_{name}[page1-tp1-whole-overlap-deepseek_v2"
      for name in ("random_requests_under_pressure", "case_22_retraction")),
    "exactness/test_speculation.py::test_equals_stock[page16-tp1-chunked64-normal-llama-self-drafts",
    "exactness/test_ratio_one.py::test_equals_stock[page1-tp2-chunked64-normal-pythoncore-typed",
    "exactness/test_ratio_one.py::test_equals_stock[page1-tp1-whole-normal-pythoncore",
    "exactness/test_speculation.py::test_answers_that_are_drafted_equal_stock",
    *("exactness/test_speculation.py::test_retraction", "exactness/test_speculation.py::test_the_draft_follows"),
    "exactness/test_kept_tokens.py::test_dropped_tokens_are_not_seen[page16",
    "exactness/test_kept_tokens.py::test_all_packed_equals_stock_on_other_models",
    *("exactness/test_fp8.py::test_moved_keys", "exactness/test_fp8.py::test_methods_lose_no_more"),
    "exactness/test_gate.py::test_it_finds_what_requests_find[page16",
    *(f"exactness/test_model_check.py::test_a_wrong_layer_is_named[{how}]"
      for how in ("score_mod", "interleaved", "another_base")),
    *(f"exactness/test_model_check.py::test_what_the_check_would_find_if_ours_were_broken[{how}"
      for how in ("columns_that_stay", "positions_that_are_shared", "rows_of_the_decoder")),
    *(f"exactness/test_model_check.py::test_a_text_of_a_model_that_sees_images_is_no_difference[{kind}]"
      for kind in ("mistral3", "kimi_k25", "qwen2_5_vl")),
    "exactness/test_model_check.py::test_a_decoder_may_be_called_by_keyword",
    "exactness/test_maintenance.py::test_a_popular_variant_is_promoted_and_its_path_goes[options1",
    "exactness/test_adversarial.py::test_retracted_requests_under_cache_aware_policies",
    *(f"unit/selector/test_client.py::test_a_{name}"
      for name in ("process_that_cannot", "process_that_is_stopped", "passage_that_is_evicted_everywhere")),
    "unit/api/test_starts.py::test_model_that_is_refused_once_it_is_loaded[--skip-tokenizer-init",
    "unit/kernels/test_triton.py::test_in_the_interpreter[sparse_extend",
    *(f"unit/kernels/test_budgets.py::test_no_spills_and_tensor_cores[{arch}-32/8 heads x 128, bfloat16]"
      for arch in (80, 100)),
)  # fmt: skip
if "PYTEST_XDIST_WORKER" in os.environ:  # one core for each
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(autouse=True, scope="module")
def environment() -> Iterator[None]:
    """What a module sets is gone for the next, whose processes would inherit it: SGLang sets variables of its own."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--summary", default=None, metavar="FILE", help="write the matrix of the exactness tests")
    parser.addoption("--fuzz-num", type=int, default=10_000, help="requests of test_fuzz_server.py")
    parser.addoption("--fuzz-seed", type=int, default=1, help="which requests those are")
    parser.addoption("--all", action="store_true", default=False, help="also the full matrix of configurations")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Writes the matrix of the exactness tests: one row per case, one column per configuration."""
    target = config.getoption("--summary")
    if target is None:
        return
    results: dict[str, dict[str, str]] = {}
    for outcome in ("passed", "failed", "error"):
        for report in terminalreporter.stats.get(outcome, []):
            match = re.search(r"test_equals_stock(?:_everywhere)?\[(page[\w-]+)-llama-(\w+)\]", report.nodeid)
            if match:
                results.setdefault(match[2], {})[match[1]] = outcome
    columns = sorted({column for row in results.values() for column in row})
    counts = ", ".join(
        f"{len(terminalreporter.stats.get(k, []))} {k}" for k in ("passed", "failed", "error", "skipped")
    )
    lines = [
        "# Recompute ratio 1.0 against stock SGLang",
        "",
        f"{counts}. Written by `make test-all` on commit {_commit()}, {platform.machine()}, Python "
        f"{platform.python_version()}, {datetime.date.today()}.",
        "",
        "| case | " + " | ".join(columns) + " |",
        "| --- |" + " --- |" * len(columns),
        *(f"| {case} | " + " | ".join(row.get(c, "") for c in columns) + " |" for case, row in sorted(results.items())),
    ]
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    Path(target).write_text("\n".join(lines) + "\n")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """Leaves without tearing the interpreter down, once everything is reported.

    Of the native libraries that SGLang loads, one has been seen to crash there, after all tests had passed.
    """
    status = config.stash.get(_STATUS, None)
    if status is None:
        return  # nothing was run: --help, --version
    config.get_terminal_writer().flush()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=TEST_DIR)
    return done.stdout.strip() or "unknown"


@pytest.hookimpl(tryfirst=True)  # before pytest looks at marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="full matrix only: pytest --all")
    for item in items:
        if item.nodeid.removeprefix("test/").startswith(LONG):
            item.add_marker(pytest.mark.all)
        if item.get_closest_marker("all") is not None:
            item.add_marker(skip)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Which tests stay together when processes share the work; the group with most tests begins."""
    from xdist.scheduler import LoadScopeScheduling

    class ByWhatIsShared(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByWhatIsShared(config, log)


def group_of(nodeid: str) -> str:
    """Tests of one group share what one of them has started."""
    path = Path(nodeid.partition("::")[0])
    if path.parent.name == "server" and path.name in TRAINED_SERVER:
        return "trained"
    if path.parent.name == "server" and path.name not in OWN_SERVER:
        return "servers"
    return nodeid if path.name in SHARES_NOTHING else str(path)


@pytest.fixture(scope="session")
def full_matrix(request: pytest.FixtureRequest) -> bool:
    """Whether `--all` was given."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `make_model` writes in this session."""
    return tmp_path_factory.mktemp("models")
