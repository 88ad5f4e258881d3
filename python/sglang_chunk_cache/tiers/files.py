"""Files as the disk medium needs them: whole or not at all, and with errors that say what to do.

    write_whole        a file that nobody sees before all of it is there
    remove_abandoned   what killed writers left
    as_tier_errors     an error of the operating system becomes a `TierError`
    read_all           exactly as many bytes as asked for

A file is written in a folder for that, flushed to the device, and renamed. Until then the writer holds a lock (`flock`)
on it, which the kernel releases when the process ends. So another process can tell whether the writer lives, even from
another container, where process numbers mean something else.
"""

from __future__ import annotations

import errno
import fcntl
import io
import itertools
import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sglang_chunk_cache.kv.stored_variant import TierError
from sglang_chunk_cache.tiers.record import corrupt

_UNLOCKABLE_AGE_S = 3600.0
"""Age at which a file counts as abandoned on a file system without locks."""
_NUM_TRIES = 100
"""A try fails only if it loses a race against another process, so few are needed."""
_REASONS = {
    errno.ENOSPC: ("full", "no space left", "give the disk tier fewer bytes, or free some"),
    errno.EDQUOT: ("full", "the quota is used up", "give the disk tier fewer bytes, or raise the quota"),
    errno.EFBIG: ("full", "the file would be too large", "raise the limit of file sizes (ulimit -f)"),
    errno.EACCES: ("unreadable", "permission denied", "let the server's user read and write there"),
    errno.EPERM: ("unreadable", "not permitted", "let the server's user read and write there"),
    errno.EROFS: ("unreadable", "the folder is read-only", "mount it for writing, or name another"),
    errno.EEXIST: ("unreadable", "it is a file", "name a folder"),
    errno.ENOTDIR: ("unreadable", "a part of the path is a file", "name another folder"),
    errno.ENOENT: ("unavailable", "the folder is gone", "mount it again, or restart with another"),
    errno.ESTALE: ("unavailable", "the network file system has lost it", "mount it again"),
    errno.ETIMEDOUT: ("timeout", "the file system did not answer", "check the network file system"),
}
_numbers = itertools.count()  # of this process: two threads never write to the same name


def write_whole(path: Path, parts: Iterable[bytes | memoryview], *, via: Path) -> None:
    """Writes `path`, or replaces it; the device has it when this returns. Nobody but the owner may read it.

    Args:
        via: folder on the same file system in which it is written.

    Raises:
        OSError: it was not written; nothing is left of it.
    """
    file, temporary = _open_locked(via, path.stem)
    try:
        with file:
            for part in parts:
                source = memoryview(part)
                while source:  # one call writes at most 2 GiB
                    source = source[file.write(source) :]
            os.fsync(file.fileno())
            _rename(temporary, path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def make_folder(folder: Path) -> None:
    """Makes a folder that its owner alone may enter, unless it is there."""
    folder.mkdir(mode=0o700, exist_ok=True)


def remove_abandoned(folder: Path) -> None:
    """Removes files that have no writer any more from a folder that `write_whole` writes in."""
    for path in folder.iterdir():
        with suppress(OSError), path.open("rb", buffering=0) as file:
            if _is_abandoned(file):
                path.unlink()


@contextmanager
def as_tier_errors(path: Path) -> Iterator[None]:
    """An OSError inside becomes an error of the tier.

    Raises:
        TierError: it names `path`.
    """
    try:
        yield
    except OSError as error:
        unknown = ("unreadable", str(error), "check the disk and the system's log")
        reason, problem, remedy = _REASONS.get(error.errno or 0, unknown)
        raise TierError(reason, str(path), problem, remedy) from error


def read_all(file: io.FileIO, target: memoryview, path: Path) -> None:
    """Fills `target` from a file.

    Raises:
        TierError: corrupt if the file ends before.
    """
    while target:
        num_read = file.readinto(target)
        if not num_read:
            raise corrupt(str(path), "ends too early")
        target = target[num_read:]


def _open_locked(folder: Path, name: str) -> tuple[io.FileIO, Path]:
    """Opens a new file with a lock, so that nobody takes it for abandoned."""
    for _ in range(_NUM_TRIES):
        path = folder / f"{name}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:  # of a process that had the same number, for example in another container
            continue
        file = io.FileIO(descriptor, "w")
        with suppress(OSError):  # without locks, its age tells whether it is abandoned
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return file, path
        file.close()  # another process removed it before it was locked
    raise OSError(errno.EIO, f"no file could be made in {_NUM_TRIES} tries", str(folder))


def _rename(temporary: Path, path: Path) -> None:
    """Renames into a folder that others remove as soon as it is empty."""
    for _ in range(_NUM_TRIES):
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            temporary.stat()  # raises if this file is gone
            with suppress(FileNotFoundError):
                make_folder(path.parent.parent)
                make_folder(path.parent)
            path.parent.parent.parent.stat()
        else:
            return
    raise OSError(errno.EIO, f"its folder could not be made in {_NUM_TRIES} tries", str(path))


def _is_abandoned(file: io.FileIO) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(file.fileno()).st_mtime > _UNLOCKABLE_AGE_S
    return True


def _sync_folder(folder: Path) -> None:
    """Makes the names in it survive a crash of the machine."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:  # deleted already, and its folder with it
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
