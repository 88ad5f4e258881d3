"""What this project asks for of other packages, by its own metadata: `requirements`, `pinned`, `install_sglang`."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

DISTRIBUTION = "sglang-chunk-cache"
SERVER = "server"
"""The extra with what a server needs."""


def requirements(extra: str) -> list[Requirement]:
    """What it needs anyway, and with this extra; "" = without."""
    found = map(Requirement, importlib.metadata.requires(DISTRIBUTION) or ())
    return [one for one in found if one.marker is None or one.marker.evaluate({"extra": extra})]


def pinned(name: str) -> SpecifierSet:
    """The versions of a package that a server needs."""
    return next(one.specifier for one in requirements(SERVER) if one.name == name)


def install_sglang() -> str:
    """The command that installs what a server needs: SGLang brings the rest."""
    return f"pip install 'sglang{pinned('sglang')}'"
