"""Options and fixtures for all tests: `--all` for the full matrix, and a folder for models made on the spot."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

TEST_DIR = Path(__file__).parent
# Helper modules of the tests (tiny_models, server_fixture) are imported by their plain name.
sys.path.insert(0, str(TEST_DIR))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", default=False, help="also the full matrix of server configurations (hours)"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="full matrix only: pytest --all")
    for item in items:
        if "all" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def full_matrix(request: pytest.FixtureRequest) -> bool:
    """Whether `--all` was given."""
    return bool(request.config.getoption("--all"))


@pytest.fixture(scope="session")
def model_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where `make_model` writes in this session."""
    return tmp_path_factory.mktemp("models")
