"""The packages that this project requires, from its own metadata: `requirements`, `pinned`, `install_sglang`."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DISTRIBUTION = "sglang-chunk-cache"
SERVER = "server"
"""Name of the extra with the packages that a server needs."""


def requirements(extra: str) -> list[Requirement]:
    """The requirements of this project, with those of an extra; "" = without any."""
    found = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or ())
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})]


def pinned(name: str) -> SpecifierSet:
    """The versions of a package that a server needs."""
    return next(one.specifier for one in requirements(SERVER) if one.name == name)


def install_sglang() -> str:
    """The command that installs what a server needs: SGLang, which brings the rest."""
    return f"pip install 'sglang{pinned('sglang')}'"
