"""Removes GPU code of other architectures from shared libraries.

A CUDA library holds its kernels once per architecture, in fat binaries. `keep_only` rewrites each fat binary in place
with the code of one architecture and fills the rest with zeros: every address stays, the library loads as before and
compresses to a fraction.

NVIDIA does not document the layout. An unexpected layout raises an error.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = 0xBA55ED50
_FATBIN = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the entries
_ENTRY = struct.Struct("<HHIQ12xI")  # kind, version, bytes of this header, bytes of code, architecture (90 for sm_90*)
_PTX = 1  # kind: text that the driver compiles for its architecture or a later one


def keep_only(library: Path, architecture: int) -> int:
    """Removes from `library` the code that a GPU of `architecture` (90 for an H100) does not run.

    Returns:
        Bytes removed; 0 for a file that is no library or has no GPU code.

    Raises:
        ValueError: a fat binary has an unknown layout.
    """
    taken = 0
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as image:
        for begin, end in _fatbin_sections(image):
            for fatbin, first, after in _fatbins(image, begin, end):
                entries = list(_entries(image, first, after))
                fits = [code for kind, arch, code in entries if _runs(kind, arch, architecture)]
                # Drivers expect some code in a fat binary: if no entry fits, it keeps the smallest.
                kept = b"".join(fits or sorted((code for *_, code in entries), key=len)[:1])
                image[first:after] = kept + bytes(after - first - len(kept))
                struct.pack_into("<Q", image, fatbin + 8, len(kept))
                taken += after - first - len(kept)
    return taken


def _runs(kind: int, arch: int, architecture: int) -> bool:
    return arch == architecture or (kind == _PTX and arch < architecture)


def _fatbin_sections(image: mmap.mmap) -> Iterator[tuple[int, int]]:
    """Ranges [begin, end) of the file that hold fat binaries (of 64-bit ELF, little-endian)."""
    if image[:6] != b"\x7fELF\x02\x01":
        return
    (table,) = struct.unpack_from("<Q", image, 40)
    size, count, names = struct.unpack_from("<HHH", image, 58)
    sections = [struct.unpack_from("<I4x8x8xQQ", image, table + i * size) for i in range(count)]
    for name, offset, length in sections:
        start = sections[names][1] + name
        if image[start : image.find(b"\0", start)] in (b".nv_fatbin", b"__nv_relfatbin"):
            yield offset, offset + length


def _fatbins(image: mmap.mmap, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    """(place, begin of the entries, end of the entries) of every fat binary in [begin, end)."""
    while begin + _FATBIN.size <= end:
        magic, _, header, length = _FATBIN.unpack_from(image, begin)
        if magic == 0:  # padding
            begin += 8
            continue
        if magic != _MAGIC or begin + header + length > end:
            raise ValueError(f"no fat binary at byte {begin}")
        yield begin, begin + header, begin + header + length
        begin += header + length


def _entries(image: mmap.mmap, begin: int, end: int) -> Iterator[tuple[int, int, bytes]]:
    """(kind, architecture, header and code) of every entry in [begin, end)."""
    while begin < end:
        kind, _, header, length, arch = _ENTRY.unpack_from(image, begin)
        yield kind, arch, image[begin : begin + header + length]
        begin += header + length
    if begin != end:
        raise ValueError(f"an entry ends at byte {begin}, its fat binary at {end}")
