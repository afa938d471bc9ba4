"""The file of one cached projector: laid out in memory around its vectors, and read back trusting nothing.

A file holds, in its root group, only

    spec              uint8, the JSON of everything that is not an array
    basis             <f4 or <f2 (k, p)    the vectors
    values.<name>     <f8, any shape

contiguous and unpacked, since the vectors do not compress. The spec lists every other dataset with shape, dtype and
SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from io import BufferedReader
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import ArtifactCorrupt, ProjectorError, ProjectorStale
from mmfact.store.format import LARGEST_SPEC, parse_spec, spec_text
from mmfact.store.schema import shown

FORMAT = "mmfact-projector"
SCHEMA_VERSION = 1

_SCOPE, _PART = r"(?:tag-)?[0-9a-f]{32}", r"(?:0|[1-9][0-9]{0,5})-of-[1-9][0-9]{0,5}"
_ADDRESS = rf"(?P<scope>{_SCOPE})_(?P<step>0|[1-9][0-9]{{0,17}})_(?P<part>{_PART})"
NAME = re.compile(rf"(?P<address>{_ADDRESS})_(?P<digest>[0-9a-f]{{64}})\.h5")
_VALUES = re.compile(r"values\.[a-z][a-z_]{0,40}")
_RULES = {
    "scope": (_SCOPE, "a run's nonce, 32 hexadecimal digits, or 'tag-' and 32 of them"),
    "part": (_PART, "'0-of-1' for a whole model, or '2-of-4' for the third of four parts"),
    "kind": (r"[a-z][a-z-]{0,30}", "a word in small letters"),
    "storage": (r"float(32|16)", "float32 or float16"),
    "public": (r"[0-9a-f]{64}", "a SHA-256 in hexadecimal digits"),
    "parameters": (r"([0-9a-f]{64})?", "a SHA-256 in hexadecimal digits, or nothing where a tag stands for it"),
}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class ProjectorKey:
    """Where a projector is kept (scope, step, part), and what it depends on (all the rest).

    Parameters
    ----------
    scope : str
        Whose parameters these are: a run's nonce in hex (32 digits), or "tag-" and 32 hex digits.
    step : int
        Of the run, at the refresh.
    part : str
        Which part of the model's elements: "0-of-1", or "2-of-4" for the third of four processes.
    kind : str
        "eigen".
    k, m, p : int
        Vectors, public examples, and the elements that this part holds.
    storage : str
        float32 or float16.
    public : str
        SHA-256 of the public examples, in hex.
    parameters : str
        SHA-256 of the parameters at the refresh, in hex; empty where a tag stands for them.

    Raises
    ------
    ProjectorError
        A field is none of these.
    """

    scope: str
    step: int
    part: str
    kind: str
    k: int
    m: int
    p: int
    storage: str
    public: str
    parameters: str

    def __post_init__(self) -> None:
        for name, (pattern, rule) in _RULES.items():
            value = getattr(self, name)
            if not isinstance(value, str) or not re.fullmatch(pattern, value):
                raise ProjectorError(f"a projector's {name} is {value!r:.80}; it must be {rule}")
        for name, least in (("step", 0), ("k", 1), ("m", 1), ("p", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 10**18:
                raise ProjectorError(
                    f"a projector's {name} is {value!r:.40}; it must be a whole number from {least} on"
                )
        index, count = self.part.split("-of-")
        if int(index) >= int(count):
            raise ProjectorError(f"a projector's part is {self.part!r}; the first of {count} parts is 0-of-{count}")

    @property
    def address(self) -> str:
        """How the names of its files begin."""
        return f"{self.scope}_{self.step}_{self.part}"


@dataclass(frozen=True, eq=False)
class ProjectorSummary:
    """A verified entry without its vectors; `used` is when it was last used, in seconds since 1970."""

    key: ProjectorKey
    values: dict[str, npt.NDArray[np.float64]]
    record: dict[str, Any]
    path: Path
    size: int
    used: float


@dataclass(frozen=True, eq=False)
class StoredProjector(ProjectorSummary):
    """A verified entry; `basis`, k x p in the storage's dtype, belongs to the caller."""

    basis: Array


# --- writing ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layout:
    """A file before it is written: its length, its digest, and its bytes in order."""

    size: int
    digest: str
    pieces: Callable[[], Iterator[bytes | memoryview]]


def lay_out(
    key: ProjectorKey, basis: Sequence[Array], values: Mapping[str, Array], record: Mapping[str, Any]
) -> Layout:
    """Let HDF5 lay a file out in memory, around a hole that the vectors fill when it is written.

    The library itself sees neither the vectors, which it would copy, nor the disk: when that is full, HDF5 cannot
    close its file any more, and ends the process badly.
    """
    _check_basis(key, basis)
    _check_record(record)
    dtype = np.dtype(key.storage).newbyteorder("<")

    def rows() -> Iterator[memoryview]:
        for row in range(key.k):
            for part in basis:
                yield _bytes(np.ascontiguousarray(part[row], dtype))

    arrays = {f"values.{name}": np.array(array, "<f8", order="C") for name, array in sorted(values.items())}
    for name, array in arrays.items():
        if not _VALUES.fullmatch(name) or not np.isfinite(array).all():
            raise ProjectorError(f"{name!r:.60} is not finite, or not named by small letters; it cannot be kept")
    shape = (key.k, key.p)
    datasets = {name: _description(array.shape, array.dtype, [_bytes(array)]) for name, array in arrays.items()}
    spec = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "key": asdict(key),
        "record": dict(record),
        "datasets": {"basis": _description(shape, dtype, rows()), **datasets},
    }
    text = spec_text(spec)
    if len(text) > LARGEST_SPEC:
        raise ProjectorError(f"a projector's record takes {len(text)} bytes as JSON; at most {LARGEST_SPEC} are kept")
    head, tail = _frame({"spec": np.frombuffer(text, np.uint8), **arrays}, shape, dtype)

    def pieces() -> Iterator[bytes | memoryview]:
        yield head
        yield from rows()
        yield tail

    digest = hashlib.sha256()
    for piece in pieces():
        digest.update(piece)
    return Layout(len(head) + math.prod(shape) * dtype.itemsize + len(tail), digest.hexdigest(), pieces)


def _frame(arrays: dict[str, Array], shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[bytes, bytes]:
    """What stands in the file before the vectors and after them."""
    image = io.BytesIO()
    with h5py.File(image, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array, track_times=False)
        hole = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        hole.set_layout(h5py.h5d.CONTIGUOUS)
        hole.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        hole.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
        start = file.create_dataset("basis", shape, dtype, dcpl=hole, track_times=False).id.get_offset()
    written = image.getvalue()
    return written[:start].ljust(start, b"\0"), written[start + math.prod(shape) * dtype.itemsize :]


def _check_basis(key: ProjectorKey, basis: Sequence[Array]) -> None:
    shapes = [part.shape for part in basis]
    if any(len(shape) != 2 or shape[0] != key.k for shape in shapes) or sum(shape[1] for shape in shapes) != key.p:
        raise ProjectorError(
            f"a basis of {key.k} vectors of {key.p} elements cannot be made of parts of shapes {shapes!s:.200}"
        )
    if any(part.dtype != key.storage for part in basis):
        found = sorted({str(part.dtype) for part in basis})
        raise ProjectorError(f"a basis in {', '.join(found)} does not fit the key, which says {key.storage}")
    if not all(np.isfinite(row).all() for part in basis for row in part):
        raise ProjectorError("a basis with elements that are not finite cannot be kept")


def _check_record(record: Mapping[str, Any]) -> None:
    for name, value in record.items():
        plain = value is None or isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
        if not isinstance(name, str) or not plain:
            raise ProjectorError(
                f"a projector's record has {name!r:.60}: {value!r:.60}; it may hold text, finite numbers, truth values "
                "and None, under names"
            )


def _description(shape: tuple[int, ...], dtype: np.dtype[Any], pieces: Iterable[memoryview]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return {"shape": list(shape), "dtype": dtype.str, "sha256": digest.hexdigest()}


def _bytes(array: Array) -> memoryview:
    """The bytes of a contiguous array, not copied."""
    return array.ravel().view(np.uint8).data


# --- reading ---------------------------------------------------------------------------------------


def read(path: Path, expected: ProjectorKey | None = None) -> StoredProjector:
    """A projector, which is to have that key.

    Raises
    ------
    ProjectorStale
        It has another one.
    ArtifactCorrupt, ArtifactVersionError
        It cannot be trusted or read.
    OSError
        It is not there, or the disk fails.
    """
    summary, basis = _open(path, expected, vectors=True)
    return StoredProjector(**vars(summary), basis=basis)


def summarize(path: Path) -> ProjectorSummary:
    """`read`, but the vectors, which the file's digest covers, are not taken into memory."""
    return _open(path, None, vectors=False)[0]


def is_of(path: Path, key: ProjectorKey) -> bool:
    """Whether a file that `lay_out` made says in its first bytes, where the spec stands, that it is of this key.

    That takes no digest of the vectors, without which the HDF5 library is not to see the file: the bytes are compared.
    No other part of a spec holds them, since JSON escapes the quotes in a text.

    Raises
    ------
    ArtifactCorrupt
        It is no regular file.
    OSError
        It is not there, or the disk fails.
    """
    with _opened(path) as file:
        return b'"key":' + spec_text(asdict(key)) in file.read(2 * LARGEST_SPEC)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[BufferedReader]:
    """A regular file: opening a pipe would wait for its writer, and a device may have no end."""
    with open(path, "rb", opener=_without_waiting) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise _corrupt(path, "it is no regular file")
        yield file


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))  # Windows has no such flag


def _open(path: Path, expected: ProjectorKey | None, *, vectors: bool) -> tuple[ProjectorSummary, Array]:
    """A file's content, its digest checked against its name before the HDF5 library sees it; no vectors if so asked.

    The file is opened once: what happens to its name after that does not matter.
    """
    named = NAME.fullmatch(path.name)
    if named is None:
        raise _corrupt(path, "it is not named <scope>_<step>_<part>_<file digest>.h5, so its content cannot be checked")
    with _opened(path) as file:
        status = os.fstat(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != named["digest"]:
            raise _corrupt(
                path,
                f"its {status.st_size} bytes have SHA-256 {digest[:16]}.. but its name says {named['digest'][:16]}..",
            )
        try:
            with h5py.File(file, "r") as content:
                key, record, described = _describe(content, path)
                if key.address != named["address"]:
                    raise _corrupt(path, f"it holds what belongs at {key.address}")
                if expected is not None and key != expected:
                    raise _stale(path, key, expected)
                arrays = {"basis": np.zeros((0, 0))}
                for name, entry in described.items():
                    dataset = _dataset(content, name, tuple(entry["shape"]), entry["dtype"], status.st_size, path)
                    if vectors or name != "basis":
                        arrays[name] = _load(dataset, entry, path)
        except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, ProjectorError) as error:
            raise _corrupt(path, f"it cannot be read as a projector ({error!r:.200})") from error
    basis = arrays.pop("basis")
    values = {name.removeprefix("values."): array for name, array in arrays.items()}
    return ProjectorSummary(key, values, record, path, status.st_size, status.st_mtime), basis


def _describe(file: h5py.File, path: Path) -> tuple[ProjectorKey, dict[str, Any], dict[str, dict[str, Any]]]:
    """Key, record, and what every dataset should be, before anything large is read."""
    if file.userblock_size or len(file.attrs):
        raise _corrupt(path, "it has a user block or attributes, which no projector has")
    names = set(file)
    if "spec" not in names:
        raise _corrupt(path, "it is an HDF5 file but holds no spec; mmfact did not write it")
    length = _plain(file, "spec", path).size or 0
    text = _dataset(file, "spec", (min(length, LARGEST_SPEC),), "|u1", LARGEST_SPEC, path)[...].tobytes()
    spec = parse_spec(text, path, FORMAT, SCHEMA_VERSION, _corrupt)
    if set(spec["key"]) != {field.name for field in fields(ProjectorKey)}:
        raise _corrupt(path, "its key has other fields than a projector's")
    key, record, described = ProjectorKey(**spec["key"]), spec["record"], spec["datasets"]
    _check_record(record)
    if names != {"spec", *described} or not all(name == "basis" or _VALUES.fullmatch(name) for name in described):
        raise _corrupt(path, "its datasets are not those that its spec calls for")
    if described["basis"]["shape"] != [key.k, key.p]:
        raise _corrupt(path, "its basis has another shape than its key")
    for name, entry in described.items():
        expected = np.dtype(key.storage if name == "basis" else "float64").newbyteorder("<").str
        if entry["dtype"] != expected:
            raise _corrupt(path, f"its {name!r} should be of dtype {expected}")
    return key, record, described


def _plain(file: h5py.File, name: str, path: Path) -> h5py.Dataset:
    """The dataset of that name, if it is one, stands in this file and has no attributes."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise _corrupt(path, f"{shown(name)} is a link to somewhere else")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset):
        raise _corrupt(path, f"{shown(name)} is not a plain dataset")
    if len(dataset.attrs):
        raise _corrupt(path, f"{shown(name)} has attributes; it is not a plain dataset")
    return dataset


def _dataset(file: h5py.File, name: str, shape: tuple[int, ...], dtype: str, limit: int, path: Path) -> h5py.Dataset:
    """A dataset whose form has been checked, so that reading it takes no more memory than its file has bytes."""
    dataset = _plain(file, name, path)
    form = dataset.id.get_create_plist()
    if form.get_layout() != h5py.h5d.CONTIGUOUS or form.get_nfilters() or form.get_external_count():
        raise _corrupt(path, f"{name!r} has a layout that projectors do not have")
    if dataset.shape != shape or dataset.dtype.str != dtype:
        found = f"shape {dataset.shape} and dtype {str(dataset.dtype)!r:.80}"
        raise _corrupt(path, f"{name!r} has {found}, which its spec denies")
    size = math.prod(shape) * dataset.dtype.itemsize
    if size > limit or dataset.id.get_storage_size() != size:
        raise _corrupt(path, f"{name!r} takes {size} bytes, which its file does not have")
    return dataset


def _load(dataset: h5py.Dataset, entry: dict[str, Any], path: Path) -> Array:
    array = np.asarray(dataset[...])
    if _description(array.shape, array.dtype, [_bytes(array)]) != entry:
        raise _corrupt(path, f"{dataset.name!r} has another shape, dtype or SHA-256 than its spec says")
    if not all(np.isfinite(row).all() for row in np.atleast_1d(array)):
        raise _corrupt(path, f"{dataset.name!r} is not finite")
    return array


def _stale(path: Path, found: ProjectorKey, expected: ProjectorKey) -> ProjectorStale:
    differences = [
        f"its {field.name} is {_short(getattr(found, field.name))}, not {_short(getattr(expected, field.name))}"
        for field in fields(ProjectorKey)
        if getattr(found, field.name) != getattr(expected, field.name)
    ]
    return ProjectorStale(
        f"{path} depends on something else: {'; '.join(differences)}. It was not used; it is replaced when a new one "
        "is made; to go on from a checkpoint, give the cache it was made with, or recompute=True"
    )


def _short(value: Any) -> str:
    return f"{value[:16]}.." if isinstance(value, str) and len(value) > 40 else repr(value)


def _corrupt(path: Path, what: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"{path} cannot be trusted: {what}. Nothing was used from it; remove it, and the projector is computed again"
    )
