"""A store: a directory of artifacts and of refs that name them.

<store>/<logical digest>-<file digest>.h5    artifacts, never changed
<store>/refs/<ref>.json                      {"artifact": file name, "created": time}
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mmfact.factorize.errors import ArtifactCorrupt, ArtifactError, ArtifactNotFound, RefError, StoreError
from mmfact.store import format
from mmfact.store.artifact import Artifact
from mmfact.store.publish import publish

if TYPE_CHECKING:
    from mmfact.factorize.compiler import Factorization

DEFAULT_STORE = "artifacts"
_NAME = re.compile(r"([0-9a-f]{64})-([0-9a-f]{64})\.h5")
_REF = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
_DIGEST = re.compile(r"[0-9a-f]{8,64}")


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
    """Artifacts in a directory.

    Parameters
    ----------
    path : str or Path, optional
        Default: the environment variable MMFACT_STORE, or ``artifacts`` in the working directory. It
        is created by the first `save`.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        self.path = Path(path if path is not None else os.environ.get("MMFACT_STORE") or DEFAULT_STORE)
        if self.path.exists() and not self.path.is_dir():
            raise StoreError(f"the store {self.path} is a file; a store is a directory, choose another with --store")

    @property
    def _refs(self) -> Path:
        return self.path / "refs"

    def prepare(self) -> None:
        """Create the directory and see that it can be written, before any long computation.

        Raises
        ------
        StoreError
            It cannot be created or written.
        """
        try:
            self._refs.mkdir(parents=True, exist_ok=True)
            writable = os.access(self.path, os.W_OK | os.X_OK) and os.access(self._refs, os.W_OK | os.X_OK)
        except OSError as error:
            raise StoreError(
                f"the store {self.path} cannot be created: {error.strerror}; choose another with --store"
            ) from error
        if not writable:
            raise StoreError(f"the store {self.path} is not writable; change its permissions or choose another")

    def save(self, factorization: Factorization, ref: str) -> Artifact:
        """Publish a factorization under `ref`; the same content again under the same ref is no error.

        Raises
        ------
        RefError
            `ref` is not a valid name, or names something else.
        StoreError
            The file system failed; nothing is left behind.
        """
        check_ref(ref)
        self.prepare()
        artifact = format.from_factorization(factorization)
        data = format.encode(artifact)
        path = self.path / f"{artifact.digest}-{hashlib.sha256(data).hexdigest()}.h5"
        format.decode(data, path, artifact.digest)  # what cannot be read back is never published
        if self.has(ref) and self._file(ref) != path:
            return self._same(ref, artifact)
        created = publish(path, data)
        if not created and path.read_bytes() != data:
            raise ArtifactCorrupt(
                f"{path} is damaged and stands in the way of the same artifact; remove it and save again"
            )
        entry = {"artifact": path.name, "created": datetime.now(UTC).isoformat(timespec="seconds")}
        try:
            named = publish(self._ref_path(ref), (json.dumps(entry, sort_keys=True) + "\n").encode())
            return replace(artifact, path=path) if named else self._same(ref, artifact)
        except BaseException:
            if created and path.name not in self._named():  # another process may have named it meanwhile
                path.unlink(missing_ok=True)
            raise

    def _named(self) -> set[str]:
        """The files that refs name."""
        named = set()
        for ref in self.refs():
            with contextlib.suppress(ArtifactCorrupt):
                named.add(self._entry(ref)["artifact"])
        return named

    def _same(self, ref: str, artifact: Artifact) -> Artifact:
        """What `ref` names, if that answers the same request as `artifact`.

        Its digits may differ in the last place: linear algebra rounds differently with other libraries and threads.
        """
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

        Raises
        ------
        ArtifactNotFound
            Nothing has that name; the message offers close ones.
        ArtifactCorrupt, ArtifactVersionError
            The file cannot be trusted or read.
        """
        return read(self.resolve(ref))

    def resolve(self, ref: str | os.PathLike[str]) -> Path:
        """The file that `ref`, a digest or a path stands for."""
        ref = os.fspath(ref)
        if _REF.fullmatch(ref) and _is_file(self._ref_path(ref)):
            return self._file_of(ref)
        if _DIGEST.fullmatch(ref):
            matches = [path for path in self._files() if path.name.startswith(ref)]
            if len(matches) == 1:
                return matches[0]
            if matches:
                raise ArtifactNotFound(f"digest {ref!r} fits {len(matches)} artifacts; give more of its digits")
        if ref.endswith(".h5") and _is_file(Path(ref)):
            return Path(ref)
        longer = [name for name in self.refs() if name.startswith(ref)]
        close = (longer or difflib.get_close_matches(ref, self.refs(), n=3))[:3]
        hint = f"did you mean {' or '.join(close)}?" if close else "`mmfact list` shows what is there"
        raise ArtifactNotFound(f"no artifact {ref!r} in the store {self.path.absolute()}; {hint}")

    def has(self, ref: str) -> bool:
        check_ref(ref)
        return _is_file(self._ref_path(ref))

    def refs(self) -> list[str]:
        """The names of all refs, sorted."""
        if not self._refs.is_dir():
            return []
        return sorted(path.stem for path in self._refs.glob("*.json") if _REF.fullmatch(path.stem))

    def entries(self) -> Iterator[Entry]:
        """Every ref with its artifact; a damaged one is listed with its error, never hidden."""
        for ref in self.refs():
            created, file, size = "", "", 0
            try:
                entry = self._entry(ref)
                created, file = entry["created"], entry["artifact"]
                size = (self.path / file).stat().st_size if (self.path / file).is_file() else 0
                yield Entry(ref, created, file, size, read(self._file_of(ref)), None)
            except ArtifactError as error:
                yield Entry(ref, created, file, size, None, str(error))

    def _files(self) -> list[Path]:
        return sorted(path for path in self.path.glob("*.h5") if _NAME.fullmatch(path.name))

    def _ref_path(self, ref: str) -> Path:
        return self._refs / f"{ref}.json"

    def _entry(self, ref: str) -> dict[str, str]:
        path = self._ref_path(ref)
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            if not _NAME.fullmatch(entry["artifact"]) or not isinstance(entry["created"], str):
                raise ValueError("not a ref")
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise ArtifactCorrupt(
                f"the ref file {path} is damaged ({error}); remove it and compile again under the same name"
            ) from error
        return {"artifact": entry["artifact"], "created": entry["created"]}

    def _file(self, ref: str) -> Path:
        return self.path / self._entry(ref)["artifact"]

    def _file_of(self, ref: str) -> Path:
        path = self._file(ref)
        if not path.is_file():
            raise ArtifactNotFound(
                f"ref {ref!r} names {path.name[:16]}.., which is not in the store {self.path}; restore the file or "
                f"remove {self._ref_path(ref)} and compile again"
            )
        return path


def read(path: Path) -> Artifact:
    """Read one artifact file. Its digest is checked against its name before the HDF5 library sees it."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ArtifactCorrupt(
            f"{path} is not named <logical digest>-<file digest>.h5, so its content cannot be checked; "
            "restore the name it had in its store"
        )
    try:
        size = path.stat().st_size
        if size > format.LARGEST_FILE:
            raise ArtifactCorrupt(f"{path} has {size} bytes; no artifact is larger than {format.LARGEST_FILE}")
        data = path.read_bytes()
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != match[2]:
        raise ArtifactCorrupt(
            f"{path} is damaged: its {len(data)} bytes have SHA-256 {digest[:16]}.. but its name says "
            f"{match[2][:16]}..; restore the file, or remove it and its ref and compile again"
        )
    return format.decode(data, path, match[1])


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
