#!/usr/bin/env python3
"""Packs SGLang and this project, with all their packages, for a CUDA host without internet (docs/gpu.md).

    benchmark/gpu/bundle.py [--python 3.12] [--assume FREEZE] [--without @benchmark/gpu/unneeded.txt] [--gpu 90]
    benchmark/gpu/bundle.py --folder MODEL --out build/model      # packs a folder instead, such as a model's

The packages are installed for the host's Python into a folder, and the folder is packed into parts of `--part-size`.
On the host: python3 part00/unpack.py PARTS TARGET.
"""

from __future__ import annotations

import argparse
import hashlib
import lzma
import os
import re
import shutil
import subprocess
import tarfile
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from fatbin import keep_only

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
BLOCK_BYTES = 16 * MIB  # each block is compressed alone, so that all cores of the host unpack
PLATFORM = "x86_64-manylinux_2_34"
STRIPPED_FROM = 64 * MIB  # from this size on libraries lose symbols that only a debugger reads


class Parts:
    """A writable file that is cut into blocks, compressed, and stored in folders part00, ... of up to `part_bytes`."""

    def __init__(self, out: Path, part_bytes: int) -> None:
        self._out, self._part_bytes = out, part_bytes
        self._part, self._used, self._count = 0, MIB, 0  # the first holds the manifest and unpack.py too
        self._buffer = bytearray()
        self._pool = ThreadPoolExecutor(os.cpu_count())
        self._pending: deque[Future[bytes]] = deque()
        self._manifest: list[str] = []
        shutil.rmtree(out, ignore_errors=True)
        (out / "part00").mkdir(parents=True)

    def write(self, data: bytes) -> int:
        """Takes the next bytes."""
        self._buffer += data
        while len(self._buffer) >= BLOCK_BYTES:
            self._cut()
        return len(data)

    def close(self) -> None:
        """Writes the rest, the manifest and unpack.py."""
        self._cut()
        while self._pending:
            self._store(self._pending.popleft().result())
        (self._out / "part00" / "manifest.txt").write_text("\n".join(self._manifest) + "\n")
        shutil.copy(Path(__file__).with_name("unpack.py"), self._out / "part00")

    def _cut(self) -> None:
        block = bytes(self._buffer[:BLOCK_BYTES])
        del self._buffer[:BLOCK_BYTES]
        self._pending.append(self._pool.submit(lzma.compress, block))
        if len(self._pending) > 2 * (os.cpu_count() or 1):
            self._store(self._pending.popleft().result())

    def _store(self, packed: bytes) -> None:
        if self._used + len(packed) > self._part_bytes:
            self._part, self._used = self._part + 1, 0
        name = f"part{self._part:02d}/{self._count:05d}.xz"
        self._manifest.append(f"{hashlib.sha256(packed).hexdigest()} {name}")
        (self._out / name).parent.mkdir(exist_ok=True)
        (self._out / name).write_bytes(packed)
        self._used, self._count = self._used + len(packed), self._count + 1


def pack(folder: Path, out: Path, part_bytes: int) -> None:
    """Packs what is in `folder` into parts in `out`."""
    parts = Parts(out, part_bytes)
    with tarfile.open(fileobj=parts, mode="w|") as tar:  # type: ignore[call-overload]  # it only writes
        tar.add(folder, arcname=".")
    parts.close()


def install(uv: str, args: argparse.Namespace, tree: Path) -> None:
    """Installs what the project requires, for the host, except what the host has (`--assume`) and `--without`."""
    pins = args.out.with_name("requirements.txt")
    pins.parent.mkdir(parents=True, exist_ok=True)
    assumed = args.assume.read_text() if args.assume else ""
    pins.write_text(assumed)  # uv keeps the versions that it finds there if they fit
    host = ("--python-version", args.python, "--python-platform", PLATFORM)
    quiet, extras = ("--quiet", "--no-header", "--no-annotate"), ("--extra", "server", "--extra", "bench")
    subprocess.run(
        [uv, "pip", "compile", *quiet, *host, *extras, "--output-file", pins, ROOT / "pyproject.toml"],
        check=True,
    )
    there, without = set(assumed.split()), {_normal(name) for name in args.without}
    carried = [
        pin
        for pin in pins.read_text().splitlines()
        if pin.split(";")[0].strip() not in there and _normal(pin.split("==")[0]) not in without
    ]
    pins.write_text("\n".join([*carried, f"sglang-chunk-cache @ {ROOT.as_uri()}", ""]))
    shutil.rmtree(tree, ignore_errors=True)
    to = ("--target", tree, "--no-deps", "--link-mode", "copy", "--requirement", pins)
    subprocess.run([uv, "pip", "install", "--quiet", *host, *to], check=True)


def shrink(tree: Path, architecture: int) -> None:
    """Removes static libraries from `tree`, and from shared ones the GPU code of other architectures."""
    for archive in tree.rglob("*.a"):
        archive.unlink()
    for library in (path for path in tree.rglob("*.so*") if path.is_file() and not path.is_symlink()):
        library.chmod(0o755)
        if library.stat().st_size >= STRIPPED_FROM and shutil.which("strip"):
            subprocess.run(["strip", "--strip-unneeded", library], check=True)
        keep_only(library, architecture)


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower().split("[")[0].strip()


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, fromfile_prefix_chars="@"
    )
    add = parser.add_argument
    add("--python", default="3.12", help="the host's")
    add("--assume", type=Path, metavar="FREEZE", help="`pip freeze` of the host: what it has as asked for stays out")
    add("--without", nargs="+", default=[], metavar="NAME", help="packages to leave out, or @FILE")
    add("--gpu", type=int, metavar="90", help="the architecture of the host's GPUs: code for others is taken out")
    add("--part-size", type=int, default=1024, metavar="MIB", help="the largest part")
    add("--folder", type=Path, help="pack this folder and no packages")
    add("--out", type=Path, default=ROOT / "build" / "bundle" / "parts", help="folder of the parts, emptied first")
    args = parser.parse_args()
    tree = args.folder
    if tree is None:
        tree = args.out.with_name("tree")
        install(shutil.which("uv") or str(ROOT / ".tools" / "uv" / "bin" / "uv"), args, tree)
        if args.gpu:
            shrink(tree, args.gpu)
    pack(tree, args.out, args.part_size * MIB)
    for part in sorted(args.out.iterdir()):
        print(part, f"{sum(file.stat().st_size for file in part.iterdir()) / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
