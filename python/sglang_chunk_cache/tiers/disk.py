"""DiskMedium: one file per variant in a folder that several servers may share.

    <root>/<fingerprint>/fingerprint.json       for people
    <root>/<fingerprint>/<kk>/<key>/<name>.kv   kk: the first two digits of the key
    <root>/<fingerprint>/note                   what entries are worth (`worth`)
    <root>/<fingerprint>/writing/               not complete yet; what a killed writer left is removed at the next start

A file is the description (`record`), then K and V of layer 0, K and V of layer 1, ..., then operator, offset and tail
of each layer that keeps states, nothing else; so its length is known from its description. A reader always sees a whole
file (`files`), and keeps the one that it has open even if that is replaced or deleted.

A read-only folder serves reads: each write raises `unreadable`, and damaged entries stay. Token ids and KV are not
encrypted, but no file is readable for other users.
"""

from __future__ import annotations

import errno
import io
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from chunk_cache.tiers.tier_ledger import EntryId
from sglang_chunk_cache.kv.fingerprint import Fingerprint
from sglang_chunk_cache.kv.stored_variant import Parts, StoredVariant, TierError, VariantInfo
from sglang_chunk_cache.tiers.files import as_tier_errors, make_folder, read_all, remove_abandoned, write_whole
from sglang_chunk_cache.tiers.medium import LayerwiseMedium, Target, in_order
from sglang_chunk_cache.tiers.record import (
    PREFIX,
    Record,
    check_layer,
    check_wanted,
    checksums_of,
    corrupt,
    decode,
    encode,
    encoded_len,
    layer_bytes,
    missing,
)

logger = logging.getLogger(__name__)

_SUFFIX = ".kv"
_NOTE = "note"


class DiskMedium(LayerwiseMedium):
    """See the head of this file.

    Args:
        root: made if it does not exist.

    Raises:
        TierError: `root` is no folder and cannot be made one.
    """

    name = "disk"

    def __init__(self, root: str | Path, fingerprint: Fingerprint) -> None:
        super().__init__(fingerprint)
        self._root = Path(root)
        self._folder = self._root / fingerprint.digest
        self._writing = self._folder / "writing"
        with as_tier_errors(self._root):
            self._root.mkdir(parents=True, exist_ok=True)
            self._device = self._root.stat().st_dev
        try:
            self._make_folders()
            remove_abandoned(self._writing)
        except OSError as error:
            logger.warning("chunk cache: %s can only be read: %s", self._folder, error)

    def find(self, key: bytes) -> list[VariantInfo]:
        with as_tier_errors(self._root):
            found = in_order(list(self._infos_in(self._folder_of(key))))
            if not found:
                self._root.stat()  # nothing stored, unless the root itself is gone
            return found

    def write(self, stored: StoredVariant) -> None:
        stored.check_fits(self.fingerprint)
        path = self._path(stored.info)
        header = encode(self.fingerprint, stored.info, checksums_of(stored))
        with as_tier_errors(path):
            if self._root.stat().st_dev != self._device:
                # The disk was unmounted: a write would fill the file system that it was mounted on.
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._root))
            if not self._writing.is_dir():
                self._make_folders()
            write_whole(path, _parts(header, stored), via=self._writing)

    def delete(self, entry_id: EntryId) -> bool:
        path = self._path(entry_id)
        with as_tier_errors(path):
            try:
                path.unlink()
            except FileNotFoundError:
                return False
            with suppress(OSError):  # other variants are in it, or somebody else was faster
                path.parent.rmdir()
            return True

    def scan(self, known: Iterable[bytes] = ()) -> Iterator[VariantInfo]:
        for first in _subfolders(self._folder):
            if first != self._writing:
                for folder in _subfolders(first):
                    yield from self._infos_in(folder)

    def read_note(self) -> bytes | None:
        path = self._folder / _NOTE
        with as_tier_errors(path):
            try:
                return path.read_bytes()
            except FileNotFoundError:
                return None

    def write_note(self, note: bytes) -> None:
        path = self._folder / _NOTE
        with as_tier_errors(path):
            write_whole(path, [note], via=self._writing)

    def close(self) -> None:
        pass

    def _layers(self, info: VariantInfo, target: Target) -> Iterator[tuple[int, Parts]]:
        path = self._path(info)
        with self._opened(path) as file:
            record = self._record(file, path)
            check_wanted(record.info, info, str(path))
            for layer in range(self.fingerprint.num_stored_layers):
                parts = target(layer)
                with as_tier_errors(path):
                    for part in parts:
                        read_all(file, layer_bytes(part), path)
                check_layer(layer, parts, record, str(path))
                yield layer, parts

    def _infos_in(self, folder: Path) -> Iterator[VariantInfo]:
        """The variants in a key's folder; entries that cannot be read are reported."""
        for path in _paths_in(folder, lambda entry: entry.name.endswith(_SUFFIX) and entry.is_file()):
            try:
                with self._opened(path) as file:
                    info = self._record(file, path).info
                    if path != self._path(info):
                        raise corrupt(str(path), f"holds the entry {info.entry_id}")
            except TierError as error:
                if error.reason != "missing":
                    self._problems.tell(error)
            else:
                yield info

    @contextmanager
    def _opened(self, path: Path) -> Iterator[io.FileIO]:
        """Opens a file, and removes it if what is read inside is corrupt."""
        with as_tier_errors(path):
            try:
                file = path.open("rb", buffering=0)
            except FileNotFoundError as error:
                raise missing(str(path)) from error
        with file:
            try:
                yield file
            except TierError as error:
                if error.reason == "corrupt":
                    _remove(path, file)
                raise

    def _record(self, file: io.FileIO, path: Path) -> Record:
        """Reads the description and checks the length of the file by it; the next read begins behind it."""
        with as_tier_errors(path):
            actual_len = os.fstat(file.fileno()).st_size
            raw = file.read(PREFIX.size)
            raw += file.read(min(actual_len, encoded_len(raw, str(path))) - len(raw))
        record = decode(raw, self.fingerprint, str(path))
        if actual_len != len(raw) + record.info.payload_len:
            raise corrupt(str(path), f"{actual_len} bytes instead of {len(raw) + record.info.payload_len}")
        return record

    def _folder_of(self, key: bytes) -> Path:
        return self._folder / key.hex()[:2] / key.hex()

    def _path(self, entry: VariantInfo | EntryId) -> Path:
        return self._folder_of(entry.key) / (entry.name + _SUFFIX)

    def _make_folders(self) -> None:
        make_folder(self._folder)
        make_folder(self._writing)
        path = self._folder / "fingerprint.json"
        if not path.exists():
            text = json.dumps(self.fingerprint.describe(), indent=2).encode()
            write_whole(path, [text], via=self._writing)


def _subfolders(folder: Path) -> list[Path]:
    return _paths_in(folder, lambda entry: entry.is_dir(follow_symlinks=False))


def _paths_in(folder: Path, wants: Callable[[os.DirEntry[str]], bool]) -> list[Path]:
    """The wanted entries of a folder; none if it is not there."""
    with as_tier_errors(folder):
        try:
            with os.scandir(folder) as entries:
                return [Path(entry.path) for entry in entries if wants(entry)]
        except FileNotFoundError:
            return []


def _parts(header: bytes, stored: StoredVariant) -> Iterator[bytes | memoryview]:
    yield header
    for parts in stored.layers:
        yield from map(layer_bytes, parts)


def _remove(path: Path, file: io.FileIO) -> None:
    """Removes a file, unless it was replaced since it was opened, or the folder is read-only."""
    with suppress(OSError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            path.unlink()
