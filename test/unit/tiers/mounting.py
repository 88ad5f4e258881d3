"""Mounting file systems, where the tests may."""

from __future__ import annotations

import shutil
import subprocess


def mount(*arguments: str) -> bool:
    """Whether `mount` did it."""
    if shutil.which("mount") is None:
        return False
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def unmount(folder: str) -> None:
    subprocess.run(["umount", folder], check=True)
