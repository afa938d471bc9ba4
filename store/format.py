"""The file format: what an artifact's HDF5 file holds, written and read as bytes.

One file holds, in its root group, only these datasets:

    spec              uint8, the JSON of everything that is not an array
    learning_rates    <f8 (n,)           structured workloads
    matrix            <f8 (n(n+1)/2,)    custom workloads: the rows of the lower triangle
    multipliers       <f8 (n,)

and the strategy's coefficients, all <f4 or all <f8; the spec's strategy entry gives its kind and buffers r, or
bandwidth K and rank R:

    dense             strategy.packed (n(n+1)/2,): the rows of the lower triangle
    buffered          strategy.c (n,), strategy.g, strategy.decay, strategy.q (n, r)
    banded-low-rank   strategy.band (n, K), strategy.left, strategy.right (n, R)

All are chunked, with shuffle, gzip and fletcher32. The spec lists every other dataset with shape,
dtype and SHA-256; the logical digest is the SHA-256 of the spec's bytes, so it covers them all.
"""

from __future__ import annotations

import hashlib
import json
import math
import zlib
from collections.abc import Callable
from dataclasses import asdict, fields
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import h5py
import numpy as np
import numpy.typing as npt

from mmfact.factorize.certificate import Certificate
from mmfact.factorize.errors import ArtifactCorrupt, ArtifactVersionError, MmfactError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import LARGEST_ARRAY, BufferedStrategy, largest_buffers
from mmfact.factorize.strategy.dense import DenseStrategy, order
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.workload import LARGEST_DENSE, LARGEST_STRUCTURED, Workload
from mmfact.store.artifact import Artifact

if TYPE_CHECKING:
    from pathlib import Path

    from mmfact.factorize.compiler import Factorization

FORMAT = "mmfact-artifact"
SCHEMA_VERSION = 2  # 1 knew the dense strategy only; such files are read for ever

LARGEST_SPEC = 1 << 20  # bytes
_LARGEST_DATASET = 8 * LARGEST_ARRAY  # bytes; the dense strategy's packed triangle needs a quarter of it
# A buffered strategy has three such arrays and a few of n numbers; HDF5's own structures fit into the rest.
LARGEST_FILE = 4 * _LARGEST_DATASET
_CHUNK = 1 << 16  # elements: half a megabyte, so that no read or checksum needs much memory
# The whole numbers that, with n, give every shape of a strategy, and the least value of each.
_PARAMETERS: dict[str, dict[str, int]] = {
    "dense": {},
    "buffered": {"buffers": 1},
    "banded-low-rank": {"bandwidth": 1, "rank": 0},
}
_FILTERS = {h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32}


def from_factorization(factorization: Factorization) -> Artifact:
    """The artifact of a fresh factorization, in memory."""
    provenance = {
        "versions": {name: version(name) for name in ("mmfact", "numba", "numpy", "scipy")},
        "options": factorization.options.spec(),
        "origin": factorization.origin,
    }
    artifact = Artifact(
        workload=factorization.workload,
        participation=factorization.participation,
        strategy=factorization.strategy,
        certificate=factorization.certificate,
        multipliers=factorization.optimum.multipliers,
        provenance=provenance,
        digest="",
    )
    spec, _ = _describe(artifact)
    object.__setattr__(artifact, "digest", hashlib.sha256(spec).hexdigest())
    return artifact


def encode(artifact: Artifact) -> bytes:
    """The HDF5 file of an artifact, as bytes; equal artifacts give equal bytes."""
    spec, arrays = _describe(artifact)
    with h5py.File("artifact.h5", "w", driver="core", backing_store=False, track_order=False) as file:
        for name, array in {"spec": np.frombuffer(spec, np.uint8), **arrays}.items():
            file.create_dataset(
                name,
                data=array,
                chunks=_chunks(array.shape),
                shuffle=True,
                compression="gzip",
                compression_opts=4,
                fletcher32=True,
                track_times=False,
            )
        file.flush()
        return bytes(file.id.get_file_image())


def decode(data: bytes, path: Path, logical_digest: str | None = None) -> Artifact:
    """Read an artifact from the bytes of its file, trusting nothing.

    Raises
    ------
    ArtifactCorrupt
        Not such a file, or content that contradicts itself or `logical_digest`; the message says what.
    ArtifactVersionError
        A format newer than this version.
    """
    spec_bytes, raw = _read(data, path)
    spec = _parse(spec_bytes, path)
    digest = hashlib.sha256(spec_bytes).hexdigest()
    if logical_digest is not None and digest != logical_digest:
        raise _corrupt(path, f"its content has digest {digest[:16]}.. but its name says {logical_digest[:16]}..")
    try:
        arrays = {name: _load(raw, name, entry, path) for name, entry in spec["datasets"].items()}
        return _assemble(spec, arrays, digest, path)
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError, MmfactError) as error:
        if isinstance(error, ArtifactCorrupt | ArtifactVersionError):
            raise
        raise _corrupt(path, f"its spec does not describe an artifact ({error})") from error


def _describe(artifact: Artifact) -> tuple[bytes, dict[str, npt.NDArray[Any]]]:
    workload, arrays = artifact.workload, {}
    if workload.matrix is None:
        arrays["learning_rates"] = workload.learning_rates.astype("<f8")
    else:
        arrays["matrix"] = workload.matrix[np.tril_indices(workload.n)].astype("<f8")
    arrays["multipliers"] = artifact.multipliers.astype("<f8")
    for name, array in artifact.strategy.coefficients().items():
        if not array.size:
            continue
        arrays[f"strategy.{name}"] = array.astype(array.dtype.newbyteorder("<"))
    certificate = {**asdict(artifact.certificate), "excess": artifact.certificate.excess}
    spec = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "workload": workload.spec(),
        "participation": asdict(artifact.participation),
        "strategy": {"kind": artifact.strategy.kind, **artifact.strategy.parameters()},
        "certificate": certificate,
        "provenance": artifact.provenance,
        "datasets": {
            name: {
                "shape": list(array.shape),
                "dtype": array.dtype.str,
                "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            }
            for name, array in sorted(arrays.items())
        },
    }
    return spec_text(spec), dict(sorted(arrays.items()))


def spec_text(spec: dict[str, Any]) -> bytes:
    """The bytes of a spec: equal specs give equal ones."""
    text = json.dumps(spec, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode()


def _read(data: bytes, path: Path) -> tuple[bytes, dict[str, npt.NDArray[Any]]]:
    """Spec bytes and every other dataset, after structural checks and before any number is believed."""
    try:
        with h5py.File(h5py.h5f.open_file_image(data)) as file:
            if file.userblock_size:
                raise _corrupt(path, "it has a user block, which no artifact has")
            if len(file.attrs):
                raise _corrupt(path, "it has attributes, which no artifact has")
            names = list(file)
            if "spec" not in names:
                raise _corrupt(path, "it is an HDF5 file but holds no spec; mmfact did not write it")
            spec_bytes = _dataset(file, "spec", None, path).tobytes()
            listed = _shapes(_parse(spec_bytes, path), path)
            if set(listed) != set(names) - {"spec"}:
                raise _corrupt(path, "its datasets are not those that its spec calls for")
            return spec_bytes, {name: _dataset(file, name, shape, path) for name, shape in listed.items()}
    except (OSError, RuntimeError, KeyError, ValueError, TypeError, zlib.error) as error:
        raise _corrupt(path, f"it cannot be read as HDF5 ({error})") from error


def _shapes(spec: dict[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every dataset that a spec calls for: known before anything large is read."""
    workload, strategy = spec.get("workload"), spec.get("strategy")
    if not isinstance(workload, dict) or not isinstance(strategy, dict):
        raise _corrupt(path, "its spec has no workload or no strategy")
    custom, kind = workload.get("kind") == "custom", strategy.get("kind")
    if kind not in _PARAMETERS or (spec["schema_version"] == 1 and kind != "dense"):
        raise _corrupt(path, f"its strategy {kind!r:.40} is not known")
    linear = kind == "buffered" and not custom
    n = _count(workload.get("n"), LARGEST_STRUCTURED if linear else LARGEST_DENSE, "horizon", path)
    if set(strategy) != {"kind", *_PARAMETERS[kind]}:
        raise _corrupt(path, f"its strategy {kind} has other parameters than it should")
    limit = largest_buffers(n) if kind == "buffered" else n
    sizes = {name: _count(strategy[name], limit, name, path, least) for name, least in _PARAMETERS[kind].items()}
    triangle = n * (n + 1) // 2
    shapes: dict[str, tuple[int, ...]] = {"matrix": (triangle,)} if custom else {"learning_rates": (n,)}
    shapes["multipliers"] = (n,)
    if kind == "dense":
        shapes["strategy.packed"] = (triangle,)
    elif kind == "buffered":
        shapes["strategy.c"] = (n,)
        shapes |= dict.fromkeys(("strategy.g", "strategy.decay", "strategy.q"), (n, sizes["buffers"]))
    else:
        shapes["strategy.band"] = (n, sizes["bandwidth"])
        if sizes["rank"]:  # a band as wide as the matrix leaves nothing, and HDF5 has no chunks of nothing
            shapes |= dict.fromkeys(("strategy.left", "strategy.right"), (n, sizes["rank"]))
    if 8 * max(math.prod(shape) for shape in shapes.values()) > _LARGEST_DATASET:
        raise _corrupt(path, "its spec calls for more data than any artifact holds")
    if not isinstance(spec.get("datasets"), dict) or set(spec["datasets"]) != set(shapes):
        raise _corrupt(path, "its spec lists other datasets than its workload and strategy need")
    return shapes


def _count(value: Any, most: int, what: str, path: Path, least: int = 1) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise _corrupt(path, f"its {what} is {value!r:.20}")
    return value


def _chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Whole rows, as many as make half a megabyte."""
    row = math.prod(shape[1:])
    return (min(shape[0], max(1, _CHUNK // row)), *shape[1:])


def _dataset(file: h5py.File, name: str, shape: tuple[int, ...] | None, path: Path) -> npt.NDArray[Any]:
    """Read one dataset of that shape (the spec: any number of bytes up to its limit), after checking its form."""
    dataset = plain_dataset(file, name, path, _corrupt)
    plist = dataset.id.get_create_plist()
    filters = {plist.get_filter(i)[0] for i in range(plist.get_nfilters())}
    repeated = len(filters) != plist.get_nfilters()
    if repeated or filters - _FILTERS or plist.get_layout() != h5py.h5d.CHUNKED:
        raise _corrupt(path, f"{name!r} uses filters or a layout that artifacts do not use")
    allowed = ("|u1",) if shape is None else ("<f8", "<f4") if name.startswith("strategy.") else ("<f8",)
    fits = dataset.shape == shape or (shape is None and dataset.ndim == 1 and 1 <= dataset.size <= LARGEST_SPEC)
    if not fits or dataset.dtype.str not in allowed or math.prod(dataset.chunks) > max(_CHUNK, *dataset.shape[1:], 1):
        raise _corrupt(
            path, f"{name!r} has shape {dataset.shape} and dtype {dataset.dtype}, which does not fit its spec"
        )
    needed = math.prod(-(-size // chunk) for size, chunk in zip(dataset.shape, dataset.chunks, strict=True))
    if dataset.id.get_num_chunks() != needed:
        raise _corrupt(path, f"{name!r} lacks some of its {needed} chunks")
    if h5py.h5z.FILTER_DEFLATE in filters:
        _check_chunks(dataset, h5py.h5z.FILTER_FLETCHER32 in filters, path)
    return dataset[...]


def plain_dataset(file: h5py.File, name: str, path: Path, corrupt: Callable[[Path, str], Exception]) -> h5py.Dataset:
    """The dataset of that name, if it is one, stands in this file and has no attributes."""
    if not isinstance(file.get(name, getlink=True), h5py.HardLink):
        raise corrupt(path, f"{name!r} is a link to somewhere else")
    dataset = file[name]
    if not isinstance(dataset, h5py.Dataset) or len(dataset.attrs):
        raise corrupt(path, f"{name!r} is not a plain dataset")
    return dataset


def _check_chunks(dataset: h5py.Dataset, checksum: bool, path: Path) -> None:
    """See that each chunk unpacks to the size it should: the HDF5 library would unpack it to any."""
    expected = math.prod(dataset.chunks) * dataset.dtype.itemsize
    for index in range(dataset.id.get_num_chunks()):
        info = dataset.id.get_chunk_info(index)
        if info.filter_mask or info.size > expected + expected // 100 + 1024:
            raise _corrupt(path, f"a chunk of {dataset.name!r} is not packed as artifacts are")
        _, packed = dataset.id.read_direct_chunk(info.chunk_offset)
        packed = packed[:-4] if checksum else packed
        if len(zlib.decompressobj().decompress(packed, expected + 1)) != expected:
            raise _corrupt(path, f"a chunk of {dataset.name!r} unpacks to another size than it should")


def _parse(spec_bytes: bytes, path: Path) -> dict[str, Any]:
    return parse_spec(spec_bytes, path, FORMAT, SCHEMA_VERSION, _corrupt)


def parse_spec(
    spec_bytes: bytes, path: Path, kind: str, newest: int, corrupt: Callable[[Path, str], Exception]
) -> dict[str, Any]:
    """The spec of a file of that format, in a version that can be read; nothing else in it is believed yet."""
    try:
        spec = json.loads(spec_bytes, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"its spec is not JSON ({error})") from error
    if not isinstance(spec, dict) or spec.get("format") != kind:
        raise corrupt(path, f"its spec is not that of an {kind.replace('-', ' ')}")
    found = spec.get("schema_version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise corrupt(path, f"its schema version is {found!r}")
    if found > newest:
        raise ArtifactVersionError(
            f"{path} has schema version {found}; this mmfact reads up to {newest}. Upgrade mmfact to read it"
        )
    return spec


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number that an artifact may hold")


def _load(raw: dict[str, npt.NDArray[Any]], name: str, entry: dict[str, Any], path: Path) -> npt.NDArray[Any]:
    array = raw[name]
    if list(array.shape) != entry["shape"] or array.dtype.str != entry["dtype"]:
        raise _corrupt(path, f"{name!r} has another shape or dtype than its spec says")
    if hashlib.sha256(array.tobytes()).hexdigest() != entry["sha256"]:
        raise _corrupt(path, f"the values of {name!r} have changed: their SHA-256 is not the one in the spec")
    return array


def _assemble(spec: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], digest: str, path: Path) -> Artifact:
    described = dict(spec["workload"])
    n = described["n"]
    matrix = None
    if described["kind"] == "custom":
        packed = arrays.pop("matrix")
        if order(packed) != n:
            raise _corrupt(path, f"its matrix is not {n} x {n}")
        matrix = np.zeros((n, n))
        matrix[np.tril_indices(n)] = packed
    rates = arrays.pop("learning_rates") if matrix is None else np.ones(n)
    workload = Workload(learning_rates=rates, matrix=matrix, **described)
    multipliers = arrays.pop("multipliers").astype(np.float64)
    if multipliers.shape != (n,) or not (np.isfinite(multipliers) & (multipliers > 0)).all():
        raise _corrupt(path, f"its multipliers are not {n} positive numbers")
    strategy = _strategy(
        spec["strategy"], {name.removeprefix("strategy."): array for name, array in arrays.items()}, workload, path
    )
    if strategy.n != n or {"kind": strategy.kind, **strategy.parameters()} != spec["strategy"]:
        raise _corrupt(path, "its strategy has another horizon than its workload, or it holds data nothing refers to")
    participation = Participation(**spec["participation"])
    certificate = _certificate(spec["certificate"], path)
    actual = strategy.sensitivity(participation)
    if certificate.n != n or not abs(certificate.sensitivity / actual - 1) <= 1e-9:
        raise _corrupt(
            path, f"its certificate says sensitivity {certificate.sensitivity!r} but its coefficients have {actual!r}"
        )
    return Artifact(
        workload=workload,
        participation=participation,
        strategy=strategy,
        certificate=certificate,
        multipliers=multipliers,
        provenance=dict(spec["provenance"]),
        digest=digest,
        path=path,
    )


def _strategy(entry: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], workload: Workload, path: Path) -> Strategy:
    kind = entry["kind"]
    if kind == "dense":
        return DenseStrategy(**arrays)
    if kind == "buffered":
        return BufferedStrategy(**arrays)
    if kind == "banded-low-rank":
        nothing = np.zeros((workload.n, 0), arrays["band"].dtype)
        arrays = {"left": nothing, "right": nothing, **arrays}
        return BandedLowRankStrategy(**arrays, workload=workload)
    raise _corrupt(path, f"its strategy {kind!r} is not known")


def _certificate(entry: dict[str, Any], path: Path) -> Certificate:
    values = dict(entry)
    excess = values.pop("excess")
    for field in fields(Certificate):
        expected = {"float": float, "int": int, "str": str, "bool": bool}[str(field.type)]
        if type(values[field.name]) is not expected:
            raise _corrupt(path, f"its certificate's {field.name} is {values[field.name]!r}, not of type {field.type}")
    certificate = Certificate(**values)
    numbers = [value for value in (*values.values(), excess) if isinstance(value, float)]
    if not all(math.isfinite(value) for value in numbers):
        raise _corrupt(path, "its certificate holds a number that is not finite")
    if not 0 < certificate.lower_bound <= certificate.loss or excess != certificate.excess:
        raise _corrupt(path, "its certificate contradicts itself (lower bound, loss and excess do not agree)")
    return certificate


def _corrupt(path: Path, what: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"{path} cannot be trusted: {what}. Nothing was used from it; restore the file, or remove it and its ref "
        "and compile again"
    )
