"""Where a store keeps its files: one directory with subdirectories, here; by fsspec in `mmfact.store.remote`.

Names are relative, with "/" between their parts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from mmfact.factorize.errors import StoreError
from mmfact.store.publish import publish, without_links

LARGEST_SMALL_FILE = 1 << 16  # bytes of a ref, and of anything else that `read` returns


@dataclass(frozen=True)
class Stat:
    """Bytes, and seconds since the epoch when the file was written."""

    size: int
    modified: float


class Folder(Protocol):
    """Files that appear whole or not at all, and are never overwritten.

    Where a name is not there `FileNotFoundError` is raised; every other failure of the machine is a `StoreError`.
    """

    @property
    def location(self) -> str:
        """For messages."""
        ...

    def prepare(self) -> None:
        """Create what is needed and see that it can be written, before any long computation."""
        ...

    def publish(self, name: str, data: bytes) -> bool:
        """Put if absent; False when the name is taken."""
        ...

    def exists(self, name: str) -> bool:
        """Whether anything has that name, whatever it is."""
        ...

    def fetch(self, name: str, sha256: str, fresh: bool = False) -> Path:
        """A local file of this content, which the caller checks; if `fresh`, no copy from before."""
        ...

    def read(self, name: str) -> bytes:
        """A small file; of a larger one the beginning."""
        ...

    def names(self, below: str = "") -> list[str]:
        """The files in the folder or in one subfolder, without its name, sorted."""
        ...

    def stat(self, name: str) -> Stat: ...

    def take(self, name: str, target: str) -> None:
        """Give whatever has that name now another one, which nobody else uses."""
        ...

    def put_back(self, name: str, target: str) -> None:
        """Give a file, of a name that nobody else uses, another one, which must be free (`FileExistsError`)."""
        ...

    def remove(self, name: str) -> None: ...


class Directory:
    """A directory of this machine, or one that it mounts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            taken = path.exists() and not path.is_dir()
        except (OSError, ValueError) as error:
            raise StoreError(
                f"{str(path)!r:.200} cannot be a store ({error!r:.200}); choose another directory"
            ) from error
        if taken:
            raise StoreError(f"the store {path} is a file; a store is a directory, choose another with --store")

    @property
    def location(self) -> str:
        return str(self.path.absolute())

    def prepare(self) -> None:
        try:
            refs = self.path / "refs"
            refs.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.path, os.W_OK | os.X_OK) and os.access(refs, os.W_OK | os.X_OK)
        except OSError as error:
            raise StoreError(
                f"the store {self.path} cannot be created: {error.strerror}; choose another with --store"
            ) from error
        if not writable:
            raise StoreError(f"the store {self.path} is not writable; change its permissions or choose another")

    def publish(self, name: str, data: bytes) -> bool:
        return publish(self.path / name, data)

    def exists(self, name: str) -> bool:
        return os.path.lexists(self.path / name)

    def fetch(self, name: str, sha256: str, fresh: bool = False) -> Path:
        self.stat(name)
        return self.path / name

    def read(self, name: str) -> bytes:
        self.stat(name)
        with self._failing(name), (self.path / name).open("rb") as file:
            return file.read(LARGEST_SMALL_FILE)

    def names(self, below: str = "") -> list[str]:
        with self._failing(below):
            try:
                return sorted(path.name for path in (self.path / below).iterdir() if path.is_file())
            except FileNotFoundError:
                return []

    def stat(self, name: str) -> Stat:
        path = self.path / name
        with self._failing(name):
            if path.is_symlink() and not path.exists():
                raise StoreError(f"{path} is a broken link; remove it")
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):  # opening a pipe would wait for ever
            raise StoreError(f"{path} is no file; remove it")
        return Stat(found.st_size, found.st_mtime)

    def take(self, name: str, target: str) -> None:
        source, goal = self.path / name, self.path / target
        with self._failing(name):
            if source.is_symlink():
                raise StoreError(f"{source} is a link; replace it by a file of the store")
            goal.parent.mkdir(exist_ok=True)
            os.rename(source, goal)  # one step: a link and an unlink could remove what was saved in between

    def put_back(self, name: str, target: str) -> None:
        source, goal = self.path / name, self.path / target
        with self._failing(name):
            try:
                os.link(source, goal)
            except OSError as error:
                if not without_links(error):
                    raise
                if goal.exists():
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), goal) from error
                source.rename(goal)
            else:
                source.unlink()

    def remove(self, name: str) -> None:
        with self._failing(name):
            (self.path / name).unlink()

    @contextlib.contextmanager
    def _failing(self, name: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except OSError as error:
            raise StoreError(
                f"{self.path / name}: {error.strerror or error}; change its permissions or choose another store"
            ) from error
