"""A store that fsspec reaches: S3, Google Cloud Storage, Azure, memory and others, by the URL's protocol.

What is put there appears whole or not at all, as object stores do it. Artifacts are read through a cache on this
machine, named and checked by their digests like the originals: what a cache holds is never believed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from mmfact.factorize.errors import StoreError
from mmfact.store import format
from mmfact.store.folder import LARGEST_SMALL_FILE, Stat
from mmfact.store.publish import TEMPORARY_PREFIX, publish

CACHE_VARIABLE = "MMFACT_CACHE"


def is_remote(location: str) -> bool:
    """Whether it is a URL, and not a path (of which one letter before the colon is a drive)."""
    scheme, found, _ = location.partition("://")
    return bool(found) and len(scheme) > 1


def cache_directory() -> Path:
    """Where copies of remote artifacts are kept: MMFACT_CACHE, or the user's cache directory. It may be emptied."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    import platformdirs

    return platformdirs.user_cache_path("mmfact") / "artifacts"


class Remote:
    """Files below a URL.

    Parameters
    ----------
    url : str
        As fsspec reads it: ``s3://bucket/prefix``, ``memory://name``.
    storage_options : mapping, optional
        For fsspec's file system. Secrets belong into the environment or there, not into the URL.

    Raises
    ------
    StoreError
        fsspec, or the package that this protocol needs, is not installed, or the URL or the options do not fit it.
    """

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._url, self._options = url.rstrip("/"), dict(storage_options or {})
        self._process, self._system = 0, None
        try:
            parts = urlsplit(self._url)
        except ValueError as error:
            raise StoreError(f"{url!r:.100} is not a URL ({error}); write s3://bucket/prefix") from error
        if ":" in parts.netloc.rpartition("@")[0] or parts.query or parts.fragment:
            raise StoreError(
                f"the URL of {self.location} holds a password or a query, which messages and logs would show: put "
                "secrets into the environment or into storage_options"
            )
        _ = self._files

    def __repr__(self) -> str:
        return f"Remote({self.location!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": 0, "_system": None}

    @property
    def location(self) -> str:
        parts = urlsplit(self._url)  # a user's password or a signature in it is nobody else's business
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def _files(self) -> Any:
        """This process's file system: its connections and threads do not survive a fork."""
        if self._process != os.getpid():
            try:
                import fsspec
                import platformdirs  # noqa: F401 - for the cache: better known now than at the first read
            except ImportError as error:
                raise StoreError(
                    f"the store {self.location} is remote, which needs fsspec: pip install 'mmfact[remote]'"
                ) from error
            with self._failing("opened"):
                self._system, self._root = fsspec.url_to_fs(self._url, skip_instance_cache=True, **self._options)
            self._process = os.getpid()
        return self._system

    def prepare(self) -> None:
        probe = self._path(f"{TEMPORARY_PREFIX}probe-{secrets.token_hex(8)}")  # a prefix needs no making
        with self._failing("written"):
            try:
                self._files.pipe_file(probe, b"", mode="create")
                self._files.rm_file(probe)
            except FileNotFoundError as error:
                raise ValueError(f"no such place: {error}") from error

    def publish(self, name: str, data: bytes) -> bool:
        path = self._path(name)
        with self._failing("written"):
            try:
                self._files.makedirs(self._files._parent(path), exist_ok=True)
                self._files.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except Exception:  # services differ in how they say that another was first
                if self._files.exists(path):
                    return False
                raise
        return True

    def exists(self, name: str) -> bool:
        with self._failing("read"):
            self._files.invalidate_cache()
            return bool(self._files.exists(self._path(name)))

    def fetch(self, name: str, sha256: str, fresh: bool = False) -> Path:
        copy = cache_directory() / name
        try:
            if not fresh and copy.is_file() and hashlib.sha256(copy.read_bytes()).hexdigest() == sha256:
                return copy
            copy.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise StoreError(
                f"the copy {copy} of an artifact cannot be read: {error.strerror}; remove it, or choose another "
                f"directory for copies with {CACHE_VARIABLE}"
            ) from error
        data = self._whole(name)
        try:
            copy.parent.mkdir(parents=True, exist_ok=True)
            publish(copy, data)  # whoever comes first with the right bytes
        except (OSError, StoreError) as error:
            raise StoreError(
                f"the copy {copy} of an artifact cannot be written ({error.__cause__ or error}); free some space, "
                f"or choose another directory with {CACHE_VARIABLE}"
            ) from error
        return copy

    def read(self, name: str) -> bytes:
        with self._failing("read"):
            return bytes(self._files.cat_file(self._path(name), end=LARGEST_SMALL_FILE))

    def names(self, below: str = "") -> list[str]:
        with self._failing("listed"):
            try:
                self._files.invalidate_cache()  # others write there too
                entries = self._files.ls(self._path(below), detail=True)
            except FileNotFoundError:
                return []
        return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")

    def stat(self, name: str) -> Stat:
        with self._failing("read"):
            self._files.invalidate_cache()
            path = self._path(name)
            return Stat(self._files.size(path), self._files.modified(path).timestamp())

    def take(self, name: str, target: str) -> None:
        data = self._whole(name)
        self.publish(target, data)
        if self._whole(name) != data:  # object stores cannot rename; this leaves a moment only
            self.remove(target)
            raise FileNotFoundError(self._said(name))
        self.remove(name)

    def put_back(self, name: str, target: str) -> None:
        if not self.publish(target, self._whole(name)):
            raise FileExistsError(self._said(target))
        self.remove(name)

    def remove(self, name: str) -> None:
        with self._failing("removed"):
            if not self._files.exists(self._path(name)):
                raise FileNotFoundError(self._said(name))
            self._files.rm_file(self._path(name))

    def _whole(self, name: str) -> bytes:
        size = self.stat(name).size
        if size > format.LARGEST_FILE:
            raise StoreError(f"{self._said(name)} has {size} bytes; no artifact is larger than {format.LARGEST_FILE}")
        with self._failing("read"):
            return bytes(self._files.cat_file(self._path(name)))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}".rstrip("/")

    def _said(self, name: str) -> str:
        return f"{self.location}/{name}"

    @contextlib.contextmanager
    def _failing(self, done: str) -> Iterator[None]:
        """Every library behind fsspec has errors of its own."""
        try:
            yield
        except (FileNotFoundError, FileExistsError):
            raise
        except Exception as error:
            needs = isinstance(error, ImportError)
            advice = "install what it names" if needs else "check the address, the network and your credentials"
            said = str(error).replace(self._url, self.location)[:200]
            raise StoreError(
                f"the store {self.location} cannot be {done} ({type(error).__name__}: {said!r}); {advice}"
            ) from error
