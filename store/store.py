"""A store: artifacts, and refs that name them, in a directory or behind a URL.

<store>/<logical digest>-<file digest>.h5    artifacts, never changed
<store>/refs/<ref>.json                      {"artifact": file name, "created": time}
<store>/quarantine/                          damaged artifacts, as they were found
<store>/PROTECTED                            if it is there: nothing may be removed
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmfact.factorize.errors import ArtifactCorrupt, ArtifactError, ArtifactNotFound, RefError, StoreError
from mmfact.store import format
from mmfact.store.artifact import Artifact
from mmfact.store.folder import LARGEST_SMALL_FILE, Directory, Folder
from mmfact.store.publish import TEMPORARY_PREFIX
from mmfact.store.remote import Remote, is_remote

if TYPE_CHECKING:
    from mmfact.factorize.compiler import Factorization

DEFAULT_STORE = "artifacts"
PROTECTED = "PROTECTED"
QUARANTINE = "quarantine"
ASIDE = f"{TEMPORARY_PREFIX}removed-"  # begins the name of an artifact that is about to be removed
_LENGTH = 132  # of an artifact's file name
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.h5")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")
_MENDING = "restore it from a copy, or compile it again under the same name"
_ATTEMPTS = 20  # of steps that another process can undo meanwhile; each fails by bad luck only
_PAUSE = 0.02  # seconds


class _Damaged(ArtifactCorrupt):
    """The bytes are not those that the file's name stands for."""


@dataclass(frozen=True)
class Entry:
    """One line of a listing: a ref with its artifact, or with what is wrong with it."""

    ref: str
    created: str
    file: str
    size: int
    artifact: Artifact | None
    error: str | None


class ArtifactStore:
    """Artifacts in a directory, or behind a URL.

    Any number of processes may use a store at once, with or without locks in the file system: everything appears whole
    under a name that says what it must hold, and nothing that has a name is changed.

    Parameters
    ----------
    path : str or Path, optional
        A directory, created by the first `save`; or the URL of a place that fsspec reaches (``s3://bucket/prefix``; see
        `mmfact.store.remote`). Default: the environment variable MMFACT_STORE, or ``artifacts`` in the working
        directory.
    storage_options : mapping, optional
        For fsspec's file system. Without them it takes its own settings and the usual environment variables.

    Raises
    ------
    StoreError
        It is no directory, or this URL cannot be used.
    """

    def __init__(self, path: str | Path | None = None, *, storage_options: Mapping[str, Any] | None = None) -> None:
        chosen = path if path is not None else os.environ.get("MMFACT_STORE") or DEFAULT_STORE
        if not str(chosen):
            raise StoreError("the name of the store is empty; give a directory or a URL")
        local = str(chosen).removeprefix("file://")
        remote = isinstance(chosen, str) and is_remote(local)
        if storage_options and not remote:
            raise StoreError(f"storage options are for remote stores; {chosen} is a directory, leave them out")
        self.folder: Folder = Remote(local, storage_options) if remote else Directory(Path(local))

    @property
    def path(self) -> Path:
        """The directory of a local store."""
        if not isinstance(self.folder, Directory):
            raise StoreError(f"the store {self.location} is remote and has no path")
        return self.folder.path

    @property
    def location(self) -> str:
        """The directory or the URL, without secrets."""
        return self.folder.location

    def prepare(self) -> None:
        """See that it can be written, before any long computation; create the directory.

        Raises
        ------
        StoreError
            It cannot be created or written.
        """
        self.folder.prepare()

    def save(self, factorization: Factorization, ref: str) -> Artifact:
        """Publish a factorization under `ref`; the same content again under the same ref is no error.

        Raises
        ------
        RefError
            `ref` is not a valid name, or names something else.
        StoreError
            The file system failed; nothing is left behind.
        """
        return self.publish(format.from_factorization(factorization), ref)

    def publish(self, artifact: Artifact, ref: str) -> Artifact:
        """`save` for what is an artifact already."""
        check_ref(ref)
        self.prepare()
        data = format.encode(artifact)
        name = f"{artifact.digest}-{hashlib.sha256(data).hexdigest()}.h5"
        format.decode(data, Path(name), artifact.digest)  # what cannot be read back is never published
        entry = {"artifact": name, "created": datetime.now(UTC).isoformat(timespec="seconds")}
        damaged, created = None, False
        for _ in range(_ATTEMPTS):
            # Whatever another process removes between two steps is published again in the next round.
            with contextlib.suppress(ArtifactNotFound):
                if self.has(ref) and self._entry(ref)["artifact"] != name:
                    return self._same(ref, artifact)
                created = self.folder.publish(name, data)
                if not created:
                    try:
                        self._read(name, fresh=True)
                    except ArtifactCorrupt as error:  # it has made way for this one, if it could be moved
                        damaged = error
                        continue
                try:
                    self.folder.publish(self._ref_name(ref), (json.dumps(entry, sort_keys=True) + "\n").encode())
                except BaseException:
                    if created:
                        with contextlib.suppress(ArtifactError, FileNotFoundError):
                            self.discard(name)
                    raise
                if self._entry(ref)["artifact"] != name:
                    if created:
                        self.discard(name)
                    return self._same(ref, artifact)
                return replace(artifact, path=self._fetch(name))
        if created:
            self.discard(name)
        raise damaged or StoreError(
            f"{ref!r} is removed from {self.location} as fast as it is saved; save it again later"
        )

    def _same(self, ref: str, artifact: Artifact) -> Artifact:
        """What `ref` names, if that answers the same request as `artifact`.

        Its digits may differ in the last place: linear algebra rounds differently with other libraries and threads.
        """
        if self.lost(ref):
            raise RefError(
                f"ref {ref!r} names {self._entry(ref)['artifact'][:16]}.., which is lost, and this is not the same: "
                f"choose another name with --name, or remove the ref (mmfact remove {ref})"
            )
        existing = self.load(ref)
        if existing.digest != artifact.digest and not (
            existing.workload.same_as(artifact.workload)
            and existing.provenance.get("origin") == artifact.provenance["origin"] == "compiled"
            and existing.provenance.get("options") == artifact.provenance["options"]
        ):
            raise RefError(
                f"ref {ref!r} already names another artifact ({existing.digest[:16]}..); refs are never moved, "
                "choose another name with --name"
            )
        return existing

    def load(self, ref: str | os.PathLike[str]) -> Artifact:
        """Read and check an artifact by ref, by digest (at least 8 digits) or by path of its file.

        A file of the store whose bytes are not those that its name stands for is moved to the store's quarantine.

        Raises
        ------
        ArtifactNotFound
            Nothing has that name; the message offers close ones.
        ArtifactCorrupt, ArtifactVersionError
            The file cannot be trusted or read.
        StoreError
            The file system failed.
        """
        found = self._find(os.fspath(ref))
        return read(found) if isinstance(found, Path) else self._read(found)

    def resolve(self, ref: str | os.PathLike[str]) -> Path:
        """The file that `ref`, a digest or a path stands for; a copy, if the store is remote."""
        found = self._find(os.fspath(ref))
        return found if isinstance(found, Path) else self._fetch(found)

    def _find(self, ref: str) -> str | Path:
        """The name in this store, or the path of a file anywhere."""
        if _REF.fullmatch(ref) and self.has(ref):
            return self._file_of(ref)
        if _DIGEST.fullmatch(ref):
            matches = [name for name in self.files() if name.startswith(ref)]
            if len(matches) == 1:
                return matches[0]
            if matches:
                raise ArtifactNotFound(f"digest {ref!r} fits {len(matches)} artifacts; give more of its digits")
        if ref.endswith(".h5") and _is_file(Path(ref)):
            return Path(ref)
        raise self._no_artifact(ref)

    def _no_artifact(self, ref: str) -> ArtifactNotFound:
        longer = [name for name in self.refs() if name.startswith(ref)]
        close = (longer or difflib.get_close_matches(ref, self.refs(), n=3))[:3]
        hint = f"did you mean {' or '.join(close)}?" if close else "`mmfact list` shows what is there"
        return ArtifactNotFound(f"no artifact {ref!r:.200} in the store {self.location}; {hint}")

    def has(self, ref: str) -> bool:
        """Whether a ref has that name."""
        check_ref(ref)
        try:
            self.folder.stat(self._ref_name(ref))
        except FileNotFoundError:
            return False
        return True

    def lost(self, ref: str) -> bool:
        """Whether `ref` names an artifact that is not in the store any more: saving the same again brings it back."""
        try:
            return bool(_REF.fullmatch(ref)) and self.has(ref) and not self._file_of(ref)
        except ArtifactNotFound:
            return True

    def created(self, ref: str) -> str:
        """When `ref` was saved, in UTC."""
        return self._entry(ref)["created"]

    def refs(self) -> list[str]:
        """The names of all refs, sorted."""
        found = (name.removesuffix(".json") for name in self.folder.names("refs") if name.endswith(".json"))
        return sorted(ref for ref in found if _REF.fullmatch(ref))

    def files(self) -> list[str]:
        """The file names of all artifacts, sorted, whether refs name them or not."""
        return [name for name in self.folder.names() if _NAME.fullmatch(name)]

    def entries(self) -> Iterator[Entry]:
        """Every ref with its artifact; a damaged one is listed with its error, never hidden, and stays in its place."""
        for ref in self.refs():
            created, file, size = "", "", 0
            try:
                entry = self._entry(ref)
                created, file = entry["created"], entry["artifact"]
                path = self._fetch(self._file_of(ref))
                size = path.stat().st_size
                yield Entry(ref, created, file, size, read(path), None)
            except (ArtifactError, OSError) as error:
                if self.has(ref):  # not removed meanwhile
                    yield Entry(ref, created, file, size, None, str(error))

    def remove(self, ref: str) -> str:
        """Remove a ref. Its artifact stays until `mmfact.store.gc.collect` finds that no other ref names it.

        Returns
        -------
        str
            The file name of the artifact, or "" if the ref was damaged.

        Raises
        ------
        ArtifactNotFound
            No ref has that name.
        StoreError
            The store is protected, or its file system failed.
        """
        self.check_removable()
        if not _REF.fullmatch(ref) or not self.has(ref):
            raise self._no_artifact(ref)
        named = ""
        with contextlib.suppress(ArtifactError):
            named = self._entry(ref)["artifact"]
        try:
            self.folder.remove(self._ref_name(ref))
        except FileNotFoundError as error:
            raise self._no_artifact(ref) from error
        return named

    def check_removable(self) -> None:
        """Raise `StoreError` if the store is protected."""
        if self.folder.exists(PROTECTED):
            raise StoreError(
                f"the store {self.location} is protected: nothing is removed from it. If that is no longer wanted, "
                f"delete its file {PROTECTED}"
            )

    def named(self) -> set[str]:
        """The file names of all artifacts that refs name.

        Raises
        ------
        ArtifactCorrupt
            A ref is damaged: nobody knows what it named.
        """
        found = set()
        for ref in self.refs():
            with contextlib.suppress(ArtifactNotFound):  # removed meanwhile
                found.add(self._entry(ref)["artifact"])
        return found

    def discard(self, name: str) -> bool:
        """Remove an artifact that no ref names; False if one does, or by now did.

        It is put aside first, and put back if another process has named it meanwhile: a process that saves looks again
        after it has named it.

        Raises
        ------
        ArtifactCorrupt
            A ref is damaged.
        """
        if name in self.named():
            return False
        aside = f"{ASIDE}{secrets.token_hex(8)}-{name}"
        try:
            self.folder.take(name, aside)
        except FileNotFoundError:  # another process was first
            return True
        return self.finish_discard(aside)

    def finish_discard(self, aside: str) -> bool:
        """The second half of `discard`, also for what a killed process has left aside."""
        name = aside[-_LENGTH:]
        with contextlib.suppress(FileNotFoundError):
            if name in self.named():
                try:
                    self.folder.put_back(aside, name)
                except FileExistsError:
                    self.folder.remove(aside)
                return False
            self.folder.remove(aside)
        return True

    def _fetch(self, name: str, fresh: bool = False) -> Path:
        match = _NAME.fullmatch(name.rpartition("/")[2])
        if match is None:
            raise ArtifactNotFound(f"{name!r:.150} is not the name of an artifact")
        try:
            return self.folder.fetch(name, match[2], fresh)
        except FileNotFoundError as error:
            raise ArtifactNotFound(f"artifact {name[:16]}.. is not in the store {self.location}") from error

    def _read(self, name: str, fresh: bool = False) -> Artifact:
        """Read an artifact of this store; move it to the quarantine if it is damaged."""
        with contextlib.suppress(_Damaged):
            return read(self._fetch(name, fresh))
        path = self._fetch(name, fresh)
        try:
            return read(path)  # it was the reading that failed, or another process has mended it
        except _Damaged as error:
            raise ArtifactCorrupt(f"{error}. {_difference(path, name)}. {self._quarantined(name)}") from error

    def _quarantined(self, name: str) -> str:
        """Move it; say what was done."""
        target = f"{QUARANTINE}/{name}.{secrets.token_hex(4)}"
        try:
            self.folder.take(name, target)
            if _whole(self.folder.fetch(target, name[65:129]), name):  # another process had mended it
                try:
                    self.folder.put_back(target, name)
                except FileExistsError:
                    self.folder.remove(target)
                return "It is whole again: load it once more"
        except FileNotFoundError:
            return "Another process has moved it meanwhile"
        except StoreError as error:
            return f"It could not be moved to the quarantine: {error}"
        return f"Nothing was used from it; it was moved to {self.location}/{QUARANTINE}"

    def _ref_name(self, ref: str) -> str:
        return f"refs/{ref}.json"

    def _entry(self, ref: str) -> dict[str, str]:
        name = self._ref_name(ref)
        try:
            text = self.folder.read(name)
            if len(text) == LARGEST_SMALL_FILE:
                raise ValueError("too large")
            entry = json.loads(text)
            created = entry["created"]
            if not (_NAME.fullmatch(entry["artifact"]) and created.isascii() and datetime.fromisoformat(created)):
                raise ValueError("not a ref")
        except FileNotFoundError as error:
            raise self._no_artifact(ref) from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ArtifactCorrupt(
                f"the ref file {self.location}/{name} is damaged ({error!r:.120}); remove it (mmfact remove {ref}) and "
                "compile again under the same name"
            ) from error
        return {"artifact": entry["artifact"], "created": created}

    def _file_of(self, ref: str) -> str:
        """The file that a ref names, which is there."""
        for _ in range(_ATTEMPTS):
            name = self._entry(ref)["artifact"]
            with contextlib.suppress(FileNotFoundError):
                self.folder.stat(name)
                return name
            if not any(file.startswith(ASIDE) and file.endswith(name) for file in self.folder.names()):
                break
            time.sleep(_PAUSE)  # it was about to be removed when it got this name, and comes back
        damaged = any(file.startswith(name) for file in self.folder.names(QUARANTINE))
        where = (
            f"was damaged and is in the quarantine of {self.location}"
            if damaged
            else (f"is not in the store {self.location}")
        )
        raise ArtifactNotFound(
            f"ref {ref!r} names {name[:16]}.., which {where}; restore the file, compile it again under the same name, "
            f"or remove the ref (mmfact remove {ref})"
        )


def read(path: Path) -> Artifact:
    """Read one artifact file. Its digest is checked against its name before anything in it is believed."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ArtifactCorrupt(
            f"{path} is not named <logical digest>-<file digest>.h5, so its content cannot be checked; "
            "restore the name it had in its store"
        )
    try:
        size = path.stat().st_size
        if size > format.LARGEST_FILE:
            raise _Damaged(f"{path} has {size} bytes; no artifact is larger than {format.LARGEST_FILE}; {_MENDING}")
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ArtifactNotFound(f"{path} is not there any more") from error
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != match[2]:
        raise _Damaged(
            f"{path} is damaged: its {len(data)} bytes have SHA-256 {digest[:16]}.. but its name says "
            f"{match[2][:16]}..; {_MENDING}"
        )
    return format.decode(data, path, match[1])


def _difference(path: Path, name: str) -> str:
    """What the damage has hit: reading goes on to where the content is not what the artifact's name stands for."""
    if path.stat().st_size > format.LARGEST_FILE:
        return "It was not looked into"
    try:
        format.decode(path.read_bytes(), path, name[:64])
    except ArtifactCorrupt as error:
        return f"What differs: {error.reason}"
    except ArtifactError as error:
        return str(error)
    return "All its datasets are as they were, only what HDF5 keeps about them differs"


def _whole(path: Path, name: str) -> bool:
    """Whether the bytes are those that an artifact's name stands for."""
    return hashlib.sha256(path.read_bytes()).hexdigest() == name[65:129]


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name longer than the file system allows, or a null character
        return False


def check_ref(ref: str) -> None:
    """Raise `RefError` unless `ref` may name an artifact."""
    if not _REF.fullmatch(ref):
        raise RefError(
            f"{ref!r} cannot be a ref: use 1 to 200 letters, digits, '.', '_', '+' and '-', not starting with a sign"
        )


def load(ref: str | os.PathLike[str], store: str | Path | None = None) -> Artifact:
    """Read an artifact by ref, digest or path: ``mmfact.load("momentum-n2048")``."""
    return ArtifactStore(store).load(ref)
