"""Unpacks a bundle on a host without internet. Run it with the server's Python; it needs only the standard library.

    python3 unpack.py PARTS TARGET      # PARTS holds part00, part01, ...; prints the environment to run in

The packages go to TARGET, for PYTHONPATH. NVIDIA libraries that the bundle left out are linked from this Python's own.
"""

from __future__ import annotations

import hashlib
import lzma
import os
import sys
import sysconfig
import tarfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path


class Joined:
    """Joins blocks into one readable file for `tarfile`."""

    def __init__(self, blocks: Iterable[bytes]) -> None:
        self._blocks = iter(blocks)
        self._rest = memoryview(b"")

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end."""
        taken = []
        while size > 0:
            if not self._rest:
                self._rest = memoryview(next(self._blocks, b""))
                if not self._rest:
                    break
            piece, self._rest = self._rest[:size], self._rest[size:]
            taken.append(piece)
            size -= len(piece)
        return b"".join(taken)


def unpack(parts: Path, target: Path) -> None:
    """Checks every block of `parts` against the manifest and extracts them into `target`."""
    manifest = dict(reversed(line.split()) for line in (parts / "part00" / "manifest.txt").read_text().splitlines())
    if missing := [name for name in manifest if not (parts / name).is_file()]:
        sys.exit(f"{len(missing)} of {len(manifest)} blocks are missing: {' '.join(missing)}")

    def block(name: str) -> bytes:
        packed = (parts / name).read_bytes()
        if hashlib.sha256(packed).hexdigest() != manifest[name]:
            sys.exit(f"{name} is damaged")
        return lzma.decompress(packed)

    target.mkdir(parents=True, exist_ok=True)
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        tarfile.open(fileobj=Joined(pool.map(block, manifest)), mode="r|") as tar,
    ):
        tar.extractall(target, filter="tar")


def link_libraries(target: Path) -> None:
    """Links this Python's NVIDIA libraries where the unpacked torch looks for them, unless they were unpacked."""
    for folder in (Path(sysconfig.get_paths()["purelib"]) / "nvidia").glob("*"):
        link = target / "nvidia" / folder.name
        if folder.is_dir() and not link.exists():
            link.parent.mkdir(exist_ok=True)
            link.symlink_to(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    target = Path(sys.argv[2]).absolute()
    unpack(Path(sys.argv[1]), target)
    link_libraries(target)
    print(f"export PYTHONPATH={target}")
    # torch wants the cuDNN that it was built with, or a later one; text models do not use cuDNN.
    print("export PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK=1")
