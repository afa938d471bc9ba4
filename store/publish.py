"""Atomic publication: a file appears whole, under its final name, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from mmfact.factorize.errors import StoreError

TEMPORARY_PREFIX = ".tmp-"
_ATTEMPTS = 5


class _TemporaryGone(StoreError):  # noqa: N818
    """Somebody took the temporary file for the leftover of a killed writer."""


def publish(path: Path, data: bytes) -> bool:
    """Write `data` to a new file `path`, mode 0444, without ever overwriting.

    A temporary file in the same directory is written, closed and synced, linked to its name, and the
    directory synced: after a crash the name is either absent or complete.

    Returns
    -------
    bool
        False when the name already existed; the existing file is left as it is.

    Raises
    ------
    StoreError
        No space, no permission, or another failure of the file system. Nothing is left behind.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(_TemporaryGone):
            return publish_pieces(path, [data], len(data))
    raise StoreError(f"{path} could not be written: its temporary file is removed by others as fast as it is written")


def publish_pieces(path: Path, pieces: Iterable[bytes | memoryview], size: int, prefix: str = TEMPORARY_PREFIX) -> bool:
    """`publish` for what need not be in memory at once: `size` bytes in all, written piece by piece.

    `prefix` begins the temporary file's name.
    """
    directory = path.parent
    temporary = None
    try:
        free = shutil.disk_usage(directory).free
        if free < size:
            raise OSError(errno.ENOSPC, f"{size} bytes are needed and {free} are free")
        handle, temporary = tempfile.mkstemp(dir=directory, prefix=prefix)
        with os.fdopen(handle, "wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fchmod(file.fileno(), 0o444)
            os.fsync(file.fileno())
        return _claim(temporary, path)
    except OSError as error:
        gone = isinstance(error, FileNotFoundError) and temporary is not None and directory.is_dir()
        raise (_TemporaryGone if gone else StoreError)(
            f"{path} could not be written: {error.strerror or error}. Nothing was stored; "
            "free some space or choose another store with --store (or MMFACT_STORE)"
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def _claim(temporary: str, path: Path) -> bool:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if not without_links(error):
            raise
        # A file system without hard links. Between the look and the rename another writer may come first, with
        # the same bytes for an artifact; a name that readers could see empty would be worse.
        if path.exists():
            return False
        os.replace(temporary, path)
    try:
        sync_directory(path.parent)
    except OSError:
        os.unlink(path)  # what might not survive a crash is not published
        raise
    return True


def without_links(error: OSError) -> bool:
    """Whether a link failed because the file system has none."""
    return error.errno in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK)


def sync_directory(directory: Path) -> None:
    """Make a new name in `directory` survive a crash of the machine."""
    if os.name == "nt":
        return
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
