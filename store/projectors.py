"""The projector cache: a directory with one file for each projector, bounded in bytes.

<cache>/<scope>_<step>_<part>_<file digest>.h5    never changed; when it was last used is its mtime
<cache>/.lock                                     held by the one writer

One file for each, because then a reader beside a writer, a writer that is killed and space given back are a rename
or an unlink each; inside one HDF5 file none of them can be had.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from mmfact.factorize.errors import ArtifactError, ArtifactNotFound, StoreError
from mmfact.store.projector_format import (
    NAME,
    Array,
    ProjectorKey,
    ProjectorSummary,
    StoredProjector,
    is_of,
    lay_out,
    read,
    summarize,
)
from mmfact.store.publish import TEMPORARY_PREFIX, publish_pieces
from mmfact.store.store import DEFAULT_STORE

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

_LOCK = ".lock"
_TEMPORARY_PREFIX = f"{TEMPORARY_PREFIX}projector-"  # artifacts may be in the writing beside
_PATIENCE = 60.0  # seconds that a writer waits for another one; writing a gigabyte takes less

_Found = TypeVar("_Found", bound=ProjectorSummary)


@dataclass(frozen=True, eq=False)
class ProjectorEntry:
    """One line of a listing: a file with what it holds, or with what is wrong with it."""

    path: Path
    scope: str
    step: int
    part: str
    size: int
    used: float
    projector: ProjectorSummary | None
    error: str | None


@dataclass(frozen=True)
class _File:
    """A file with the name of an entry."""

    path: Path
    scope: str
    step: int
    part: str
    size: int
    used: int  # nanoseconds

    @property
    def address(self) -> str:
        return f"{self.scope}_{self.step}_{self.part}"


class ProjectorCache:
    """Projectors in a directory: any number of readers, one writer at a time, never more than so many bytes.

    Writers exclude each other by a lock on a file. Where there are none (Windows), a cache is for one writing process.

    Parameters
    ----------
    path : str or Path, optional
        Default: ``projectors`` in the store (the environment variable MMFACT_STORE, or ``artifacts``). It is created by
        the first `put`.
    max_bytes : int
        What the entries may take, one that is being written included; those unused for longest make room.

    Raises
    ------
    StoreError
        The path is a file or no path at all, or `max_bytes` no positive whole number.
    """

    def __init__(self, path: str | Path | None = None, *, max_bytes: int = 1 << 30) -> None:
        store = os.environ.get("MMFACT_STORE") or DEFAULT_STORE
        self.path = Path(path) if path is not None else Path(store) / "projectors"
        self.max_bytes = max_bytes
        if not isinstance(max_bytes, int) or isinstance(max_bytes, bool) or max_bytes < 1:
            raise StoreError(f"max_bytes is {max_bytes!r:.40}; it must be a positive whole number of bytes")
        self._gave_up = False  # waiting for another writer, and has not been one since
        try:
            occupied = self.path.exists() and not self.path.is_dir()
        except OSError as error:
            raise _unreadable(self.path, error) from error
        if occupied:
            raise StoreError(f"the projector cache {self.path} is a file; a cache is a directory, choose another path")

    def put(
        self, key: ProjectorKey, basis: Sequence[Array], values: Mapping[str, Array], record: Mapping[str, Any]
    ) -> Path:
        """Keep a projector in place of any other at its scope, step and part; the file that holds it.

        Parameters
        ----------
        basis : sequence of arrays of shape (k, p_i), of the dtype that the key names
            Side by side the k vectors. They are written as they are: no copy of them is made.
        values : mapping of str to float64 arrays
            "eigenvalues", for example.
        record : mapping of str to str, bool, int, float or None
            Whatever else is known.

        Raises
        ------
        ProjectorError
            Arrays that do not fit the key or are not finite, or a record of anything else.
        StoreError
            It is larger than the cache, or the machine failed (no space, no permission); nothing is left behind.
        """
        layout = lay_out(key, basis, values, record)
        if layout.size > self.max_bytes:
            raise StoreError(
                f"a projector of {layout.size} bytes does not fit into the cache {self.path}, which holds at most "
                f"{self.max_bytes}; raise max_bytes, or take fewer vectors or storage='float16'"
            )
        path = self.path / f"{key.address}_{layout.digest}.h5"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with self._writing():
                self._remove_leftovers()
                if not _is_whole(path):
                    self._make_room(layout.size, key.address)
                    publish_pieces(path, layout.pieces(), layout.size, _TEMPORARY_PREFIX)
                _touch(path)
                for file in self._files():
                    if file.address == key.address and file.path != path:
                        with contextlib.suppress(OSError):  # open in a reader, on Windows; `get` takes the right one
                            file.path.unlink()
        except OSError as error:
            raise StoreError(
                f"the projector cache {self.path} cannot be written: {error.strerror or error}; free some space, "
                "change its permissions, or choose another path"
            ) from error
        return path

    def get(self, key: ProjectorKey) -> StoredProjector | None:
        """The projector of this key, which counts as a use; None when nothing is kept at its scope, step and part.

        Raises
        ------
        ProjectorStale
            What is kept there depends on something else; the message says what differs.
        ArtifactCorrupt, ArtifactVersionError
            What is kept there cannot be trusted or read.
        StoreError
            It cannot be read from the disk.
        """
        problem = None
        for file in sorted(self._files(), key=lambda file: (-file.used, file.path.name)):
            if file.address != key.address:
                continue
            try:
                found = read(file.path, key)
            except FileNotFoundError:  # evicted meanwhile
                continue
            except OSError as error:
                raise _unreadable(file.path, error) from error
            except ArtifactError as error:  # a writer that died may have left a second one, which may be the right one
                problem = problem or error
                continue
            with contextlib.suppress(OSError):  # a cache that may only be read, or evicted meanwhile
                _touch(file.path)
            return found
        if problem is not None:
            raise problem
        return None

    def use(self, key: ProjectorKey) -> bool:
        """Whether a projector of this very key is kept, which counts as a use; its vectors are not looked at.

        Raises
        ------
        StoreError
            The cache cannot be read from the disk.
        """
        for file in self._files():
            if file.address != key.address:
                continue
            try:
                if not is_of(file.path, key):
                    continue
            except (FileNotFoundError, ArtifactError):  # evicted meanwhile, or no file any more
                continue
            except OSError as error:
                raise _unreadable(file.path, error) from error
            with contextlib.suppress(OSError):  # a cache that may only be read
                _touch(file.path)
            return True
        return False

    def entries(self) -> Iterator[ProjectorEntry]:
        """Every entry, by scope, step and part; a damaged one is listed with its error, never hidden."""
        for file in sorted(self._files(), key=lambda file: (file.scope, file.step, file.part, file.used)):
            summary, problem = None, None
            try:
                summary = summarize(file.path)
            except FileNotFoundError:  # evicted meanwhile
                continue
            except (ArtifactError, OSError) as error:
                problem = str(error)
            yield ProjectorEntry(**{**vars(file), "used": file.used / 1e9}, projector=summary, error=problem)

    def _files(self) -> list[_File]:
        files = []
        try:
            with os.scandir(self.path) as found:
                for entry in found:
                    named = NAME.fullmatch(entry.name)
                    if named is None or not entry.is_file(follow_symlinks=False):
                        continue
                    with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                        status = os.stat(entry.path)
                        whose, step, part = named["scope"], int(named["step"]), named["part"]
                        files.append(_File(Path(entry.path), whose, step, part, status.st_size, status.st_mtime_ns))
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unreadable(self.path, error) from error
        return files

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        """Be the only writer."""
        handle = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if fcntl is not None:
                self._wait_for(handle)
            yield
        finally:
            if fcntl is not None:
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child holds it as well
            os.close(handle)

    def _wait_for(self, handle: int) -> None:
        """Get the lock. Who has waited in vain once only tries, until it is free: a training run puts at every step."""
        end = time.monotonic() + (0 if self._gave_up else _PATIENCE)
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._gave_up = False
                return
            except BlockingIOError as error:
                if time.monotonic() >= end:
                    self._gave_up = True
                    raise StoreError(
                        f"another process has been writing into the projector cache {self.path} for {_PATIENCE:g} s or "
                        "longer; wait for it, end it, or choose another path"
                    ) from error
            time.sleep(0.005)

    def _remove_leftovers(self) -> None:
        """What writers that were killed have left: with the lock held, no other is at work."""
        for path in self.path.glob(f"{_TEMPORARY_PREFIX}*"):
            with contextlib.suppress(OSError):  # a directory of that name is nobody's leftover
                path.unlink()

    def _make_room(self, size: int, address: str) -> None:
        """Evict until `size` more bytes fit: first what is to be replaced, then what was unused for longest."""
        files = self._files()
        total = sum(file.size for file in files)
        for file in sorted(files, key=lambda file: (file.address != address, file.used, file.path.name)):
            if total + size <= self.max_bytes:
                return
            file.path.unlink(missing_ok=True)
            total -= file.size


def read_projector(path: str | Path) -> StoredProjector:
    """Read and check the file of one cached projector.

    Raises
    ------
    ArtifactNotFound
        There is no such file.
    ArtifactCorrupt, ArtifactVersionError
        It cannot be trusted or read.
    StoreError
        It cannot be read from the disk.
    """
    return _from_disk(read, Path(path))


def summarize_projector(path: str | Path) -> ProjectorSummary:
    """`read_projector` without taking the vectors into memory; the file's digest, which is checked, covers them."""
    return _from_disk(summarize, Path(path))


def _from_disk(reader: Callable[[Path], _Found], path: Path) -> _Found:
    try:
        return reader(path)
    except FileNotFoundError as error:
        raise ArtifactNotFound(f"no projector at {path}; `mmfact projector inspect` shows what is kept") from error
    except OSError as error:
        raise _unreadable(path, error) from error


def _is_whole(path: Path) -> bool:
    """Whether this very file is there; a damaged one is removed, since it stands in the way, and so is a link."""
    if path.is_symlink():  # readers do not follow it
        path.unlink()
        return False
    try:
        summarize(path)
    except FileNotFoundError:
        return False
    except ArtifactError:
        path.unlink()
        return False
    return True


def _touch(path: Path) -> None:
    """Used now, to the nanosecond: the file system's own clock stands still for milliseconds."""
    now = time.time_ns()
    os.utime(path, ns=(now, now))


def _unreadable(path: Path, error: OSError) -> StoreError:
    return StoreError(
        f"{path} cannot be read: {error.strerror or error}; change its permissions or choose another cache"
    )
