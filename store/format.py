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
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from mmfact.factorize.certificate import Certificate
from mmfact.factorize.errors import ArtifactCorrupt, ArtifactVersionError, MmfactError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import LARGEST_ARRAY, BufferedStrategy, largest_buffers
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.workload import LARGEST_DENSE, LARGEST_STRUCTURED, Workload
from mmfact.store import hdf5, schema
from mmfact.store.artifact import SCHEMA_VERSION, Artifact
from mmfact.store.schema import shown

if TYPE_CHECKING:
    from pathlib import Path

    from mmfact.factorize.compiler import Factorization

FORMAT = "mmfact-artifact"

LARGEST_SPEC = 1 << 20  # bytes
_LARGEST_DATASET = 8 * LARGEST_ARRAY  # bytes; the dense strategy's packed triangle needs a quarter of it
# A buffered strategy has three such arrays and a few of n numbers; HDF5's own structures fit into the rest.
LARGEST_FILE = 4 * _LARGEST_DATASET
_CHUNK = 1 << 16  # elements: half a megabyte, so that no read or checksum needs much memory

# How far a figure may lie from the recomputed one: other linear algebra rounds otherwise, most where C^-1 is needed.
_ROOM_SENSITIVITY = 1e-9
_ROOM_ERRORS = 1e-6
# Loss and max error are recomputed at load up to here, 0.7 s and 20 ms; beyond, `mmfact verify` does it.
_QUICK_RECURSION = 1 << 25  # n (r + 3)^2: steps of a recursion over the buffers and the optimizer's states
_QUICK_DENSE = 512


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
    return _sealed(artifact)


def renewed(artifact: Artifact) -> Artifact:
    """The same content in the newest version of the format; its provenance says what it was before."""
    before = {"digest": artifact.digest, "schema_version": artifact.schema_version}
    provenance = {**artifact.provenance, "migrated_from": before}
    return _sealed(replace(artifact, provenance=provenance, schema_version=SCHEMA_VERSION, path=None))


def _sealed(artifact: Artifact) -> Artifact:
    """With the digest that its content has."""
    return replace(artifact, digest=hashlib.sha256(_describe(artifact)[0]).hexdigest())


def encode(artifact: Artifact) -> bytes:
    """The HDF5 file of an artifact, as bytes; equal artifacts give equal bytes."""
    import h5py  # whoever only reads does without

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
    spec, digest, arrays = _read(data, path, logical_digest)
    try:
        return _assemble(spec, arrays, digest, path)
    except (ValueError, ArithmeticError, MmfactError) as error:
        if isinstance(error, ArtifactCorrupt):
            raise
        raise _corrupt(path, f"its content makes no artifact ({shown(str(error), 300)})") from error


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


def _read(
    data: bytes, path: Path, logical_digest: str | None
) -> tuple[dict[str, Any], str, dict[str, npt.NDArray[Any]]]:
    """Spec, its digest, and every other dataset: nothing is read before the rules for its form have been checked."""
    try:
        found = hdf5.datasets(data, "spec")
        text = _spec_bytes(data, found["spec"], path)
        digest = hashlib.sha256(text).hexdigest()
        if logical_digest is not None and digest != logical_digest:
            raise _corrupt(path, f"its content has digest {digest[:16]}.. but its name says {logical_digest[:16]}..")
        spec = _parse(text, path)
        listed = spec["datasets"]
        if set(found) != {"spec", *listed}:
            strays = sorted(set(found) ^ {"spec", *listed})
            raise _corrupt(path, f"its datasets are not those that its spec calls for: {shown(strays)}")
        for name, entry in listed.items():
            _check_form(found[name], entry, path)
        return spec, digest, {name: _values(data, found[name], entry, path) for name, entry in listed.items()}
    except hdf5.LayoutError as error:
        raise _corrupt(path, str(error)) from error


def _spec_bytes(data: bytes, dataset: hdf5.Dataset, path: Path) -> bytes:
    if dataset.dtype != "|u1" or len(dataset.shape) != 1 or not 1 <= dataset.shape[0] <= LARGEST_SPEC:
        raise _corrupt(
            path,
            f"its spec has shape {dataset.shape} and dtype {dataset.dtype}, not that of a row of 1 to {LARGEST_SPEC} "
            "bytes",
        )
    _check_chunks(dataset, path)
    return hdf5.read(data, dataset).tobytes()


def _check_form(dataset: hdf5.Dataset, entry: dict[str, Any], path: Path) -> None:
    """See that a dataset is what the spec says, before memory is taken for it."""
    if list(dataset.shape) != entry["shape"] or dataset.dtype != entry["dtype"]:
        raise _corrupt(
            path,
            f"{shown(dataset.name)} has shape {dataset.shape} and dtype {dataset.dtype}, which does not fit its spec: "
            f"{entry['shape']} and {entry['dtype']}",
        )
    _check_chunks(dataset, path)


def _check_chunks(dataset: hdf5.Dataset, path: Path) -> None:
    expected = _chunks(dataset.shape)
    if dataset.chunks != expected:
        raise _corrupt(path, f"{shown(dataset.name)} has chunks of {dataset.chunks}; artifacts have {expected}")


def _values(data: bytes, dataset: hdf5.Dataset, entry: dict[str, Any], path: Path) -> npt.NDArray[Any]:
    array = hdf5.read(data, dataset)
    if hashlib.sha256(array.data).hexdigest() != entry["sha256"]:
        raise _corrupt(
            path, f"the values of {shown(dataset.name)} have changed: their SHA-256 is not the one in the spec"
        )
    return array


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    """A spec that keeps the schema and calls for no other datasets than it lists."""
    spec = parse_spec(text, path, FORMAT, SCHEMA_VERSION, _corrupt)
    broken = schema.breach(spec)
    if broken is not None:
        raise _corrupt(path, broken)
    listed = {name: tuple(entry["shape"]) for name, entry in spec["datasets"].items()}
    needed = _shapes(spec, path)
    if listed != needed:
        raise _corrupt(
            path,
            "its spec lists other datasets than its workload and strategy need: "
            f"{shown(sorted(listed.items() ^ needed.items()))}",
        )
    return spec


def parse_spec(
    text: bytes, path: Path, kind: str, newest: int, corrupt: Callable[[Path, str], Exception]
) -> dict[str, Any]:
    """The spec of a file of that format, in a version that can be read; nothing else in it is believed yet."""
    try:
        spec = schema.parse(text)
    except ValueError as error:
        raise corrupt(path, f"its spec is not JSON as artifacts have it ({error})") from error
    if not isinstance(spec, dict) or spec.get("format") != kind:
        raise corrupt(path, f"its spec is not that of an {kind.replace('-', ' ')}")
    found = spec.get("schema_version")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise corrupt(path, f"its schema version is {shown(found)}")
    if found > newest:
        raise ArtifactVersionError(
            f"{path} has schema version {found}; this mmfact reads up to {newest}. Upgrade mmfact to read it"
        )
    return spec


def _shapes(spec: dict[str, Any], path: Path) -> dict[str, tuple[int, ...]]:
    """Shape of every dataset that a spec calls for: known before anything large is read."""
    custom, kind, n = spec["workload"]["kind"] == "custom", spec["strategy"]["kind"], spec["workload"]["n"]
    longest = LARGEST_STRUCTURED if kind == "buffered" and not custom else LARGEST_DENSE
    if n > longest:
        raise _corrupt(path, f"its horizon is {n}; with its workload and strategy at most {longest} is possible")
    sizes = {name: value for name, value in spec["strategy"].items() if name != "kind"}
    most = largest_buffers(n) if kind == "buffered" else n
    for name, value in sizes.items():
        if value > most:
            raise _corrupt(path, f"its {name} is {value}; with {n} steps at most {most} is possible")
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
    return shapes


def _chunks(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Whole rows, as many as make half a megabyte."""
    row = math.prod(shape[1:])
    return (min(shape[0], max(1, _CHUNK // row)), *shape[1:])


def _assemble(spec: dict[str, Any], arrays: dict[str, npt.NDArray[Any]], digest: str, path: Path) -> Artifact:
    described = dict(spec["workload"])
    n = described["n"]
    matrix = None
    if described["kind"] == "custom":
        matrix = np.zeros((n, n))
        matrix[np.tril_indices(n)] = arrays.pop("matrix")
    rates = arrays.pop("learning_rates") if matrix is None else np.ones(n)
    workload = Workload(learning_rates=rates, matrix=matrix, **described)
    multipliers = arrays.pop("multipliers").astype(np.float64)
    if not (np.isfinite(multipliers) & (multipliers > 0)).all():
        raise _corrupt(path, f"its multipliers are not {n} positive numbers")
    coefficients = {name.removeprefix("strategy."): array for name, array in arrays.items()}
    strategy = _strategy(spec["strategy"]["kind"], coefficients, workload)
    participation = Participation(**spec["participation"])
    certificate = _certificate(spec["certificate"], workload, path)
    _check_figures(certificate, strategy, workload, participation, path)
    return Artifact(
        workload=workload,
        participation=participation,
        strategy=strategy,
        certificate=certificate,
        multipliers=multipliers,
        provenance=dict(spec["provenance"]),
        digest=digest,
        schema_version=spec["schema_version"],
        path=path,
    )


def _strategy(kind: str, arrays: dict[str, npt.NDArray[Any]], workload: Workload) -> Strategy:
    if kind == "dense":
        return DenseStrategy(**arrays)
    if kind == "buffered":
        return BufferedStrategy(**arrays)
    nothing = np.zeros((workload.n, 0), arrays["band"].dtype)
    return BandedLowRankStrategy(**{"left": nothing, "right": nothing, **arrays}, workload=workload)


def _certificate(entry: dict[str, Any], workload: Workload, path: Path) -> Certificate:
    values = {field.name: entry[field.name] for field in fields(Certificate)}
    values |= {field.name: float(values[field.name]) for field in fields(Certificate) if field.type == "float"}
    certificate = Certificate(**values)
    if certificate.n != workload.n:
        raise _corrupt(path, f"its certificate is for {certificate.n} steps but its workload has {workload.n}")
    if not certificate.lower_bound <= certificate.loss:
        raise _corrupt(
            path,
            f"its certificate has a lower bound {certificate.lower_bound!r} above its loss {certificate.loss!r}",
        )
    if entry["excess"] != certificate.excess:
        raise _corrupt(
            path,
            f"its certificate says excess {entry['excess']!r} but its loss and lower bound give {certificate.excess!r}",
        )
    return certificate


def _check_figures(
    certificate: Certificate, strategy: Strategy, workload: Workload, participation: Participation, path: Path
) -> None:
    """Compare the certificate with what the coefficients give, so far as that takes no longer than reading them."""
    with np.errstate(all="ignore"):  # what overflows is refused below
        figures = [("sensitivity", strategy.sensitivity(participation), _ROOM_SENSITIVITY)]
        if _quick(strategy, workload):
            loss, max_error = strategy.errors(workload, participation)
            figures += [("loss", loss, _ROOM_ERRORS), ("max_error", max_error, _ROOM_ERRORS)]
    for name, actual, room in figures:
        stored = getattr(certificate, name)
        if not abs(stored - actual) <= room * actual < math.inf:
            raise _corrupt(
                path, f"its certificate says {name.replace('_', ' ')} {stored!r} but its coefficients have {actual!r}"
            )


def _quick(strategy: Strategy, workload: Workload) -> bool:
    """Whether loss and max error come within a second: by recursion, by a stored decoder, or by small products."""
    if strategy.kind == "buffered" and workload.structured:
        return workload.n * (strategy.buffers + 3) ** 2 <= _QUICK_RECURSION
    return strategy.kind == "banded-low-rank" or workload.n <= _QUICK_DENSE


def _corrupt(path: Path, what: str) -> ArtifactCorrupt:
    return ArtifactCorrupt(
        f"{path} cannot be trusted: {what}. Nothing was used from it; restore the file, or remove it and its ref "
        "and compile again",
        reason=what,
    )
