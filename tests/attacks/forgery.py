"""Artifact files with chosen contents and digests that fit them, for tests of the reader and for its fuzzer."""

from __future__ import annotations

import copy
import hashlib
import io
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from mmfact.factorize import workload
from mmfact.factorize.compiler import Factorization, Options, compile
from mmfact.store import format
from mmfact.store.artifact import Artifact
from mmfact.store.store import ArtifactStore

Edit = Callable[[dict[str, Any]], None]
Arrays = Mapping[str, np.ndarray | None]

STEPS, BUFFERS, BAND, RANK = 12, 2, 3, 2  # of the honest artifacts that forgeries start from


@dataclass(frozen=True)
class Forger:
    """`spec` and `arrays` are those of an honest artifact, which every forgery starts from."""

    artifact: Artifact
    data: bytes
    spec: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def spec_bytes(self, edit: Edit, arrays: dict[str, np.ndarray]) -> bytes:
        spec = copy.deepcopy(self.spec)
        spec["datasets"] = {
            name: {
                "shape": list(array.shape),
                "dtype": array.dtype.str,
                "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
            }
            for name, array in sorted(arrays.items())
        }
        edit(spec)
        return json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()

    def build(
        self,
        edit: Edit = lambda spec: None,
        arrays: Arrays | None = None,
        file: Callable[[h5py.File], Any] = lambda file: None,
        text: Callable[[bytes], bytes] = lambda spec: spec,
    ) -> tuple[bytes, str]:
        """(bytes, logical digest): `arrays` replaces datasets (None removes one), `edit` changes the spec, `text` its
        JSON, and `file` the HDF5 file."""
        chosen = {k: v for k, v in {**self.arrays, **(arrays or {})}.items() if v is not None}
        spec = text(self.spec_bytes(edit, chosen))
        return self.write(spec, chosen, file), hashlib.sha256(spec).hexdigest()

    @staticmethod
    def write(
        spec: bytes,
        arrays: dict[str, np.ndarray],
        edit: Callable[[h5py.File], Any] = lambda file: None,
        level: int = 4,
    ) -> bytes:
        with h5py.File("forged", "w", driver="core", backing_store=False) as file:
            for name, array in {"spec": np.frombuffer(spec, np.uint8), **arrays}.items():
                packed(file, name, data=array, level=level)
            edit(file)
            file.flush()
            return bytes(file.id.get_file_image())

    @staticmethod
    def place(store: ArtifactStore, data: bytes, logical: str, ref: str | None = None) -> Path:
        """Put the bytes into a store under the name that fits them, and a ref to it."""
        store.prepare()
        path = store.path / f"{logical}-{hashlib.sha256(data).hexdigest()}.h5"
        path.write_bytes(data)
        if ref is not None:
            entry = {"artifact": path.name, "created": "2024-02-03T04:05:06+00:00"}
            (store.path / "refs" / f"{ref}.json").write_text(json.dumps(entry))
        return path


def packed(file: h5py.File, name: str, *, data: np.ndarray, level: int = 4) -> h5py.Dataset:
    """A dataset with the chunks and filters that artifacts have."""
    return file.create_dataset(name, data=data, compression_opts=level, **form(data.shape))


def form(shape: tuple[int, ...]) -> dict[str, Any]:
    """The options of such a dataset."""
    row = max(1, int(np.prod(shape[1:], dtype=np.int64)))
    chunks = (min(shape[0], max(1, (1 << 16) // row)), *shape[1:])
    return {"chunks": chunks, "shuffle": True, "compression": "gzip", "fletcher32": True, "track_times": False}


def forge(factorization: Factorization) -> Forger:
    """A forger that starts from this factorization's artifact."""
    artifact = format.from_factorization(factorization)
    data = format.encode(artifact)
    with h5py.File(io.BytesIO(data)) as file:
        arrays = {name: file[name][...] for name in file}
    spec = json.loads(arrays.pop("spec").tobytes())
    return Forger(artifact, data, spec, arrays)


@cache
def dense() -> Forger:
    return forge(compile(workload.momentum(3), Options(strategy="dense")))


@cache
def buffered() -> Forger:
    return forge(compile(workload.momentum(STEPS), Options(buffers=BUFFERS, tolerance=0.5, dtype="float64")))


@cache
def banded() -> Forger:
    options = Options(strategy="banded-low-rank", bandwidth=BAND, rank=RANK, tolerance=0.5, dtype="float64")
    return forge(compile(workload.momentum(STEPS), options))


@cache
def custom() -> Forger:
    return forge(compile(workload.custom(np.tril(np.ones((4, 4))) + np.eye(4)), Options(strategy="dense")))


HONEST: dict[str, Callable[[], Forger]] = {"dense": dense, "buffered": buffered, "banded": banded, "custom": custom}


def same(a: Artifact, b: Artifact) -> bool:
    """Whether two artifacts hold the same, bit for bit."""
    held, other = a.strategy.coefficients(), b.strategy.coefficients()
    if a.strategy.kind != b.strategy.kind or list(held) != list(other):
        return False
    bits = [
        *zip(held.values(), other.values(), strict=True),
        (a.multipliers, b.multipliers),
        (a.workload.learning_rates, b.workload.learning_rates),
        (np.asarray(a.workload.matrix, float), np.asarray(b.workload.matrix, float)),
    ]
    return (
        all(x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes() for x, y in bits)
        and a.workload.spec() == b.workload.spec()
        and a.certificate == b.certificate
        and a.participation == b.participation
        and a.provenance == b.provenance
        and a.digest == b.digest
    )


def setting(*path_and_value: Any) -> Edit:
    """An edit of the spec: setting("certificate", "loss", 3.0)."""
    *path, last, value = path_and_value

    def edit(spec: dict[str, Any]) -> None:
        for key in path:
            spec = spec[key]
        spec[last] = value

    return edit


def removing(*path: str) -> Edit:
    def edit(spec: dict[str, Any]) -> None:
        for key in path[:-1]:
            spec = spec[key]
        del spec[path[-1]]

    return edit


def replacing(name: str, **options: Any) -> Callable[[h5py.File], None]:
    """An edit of the HDF5 file: dataset `name` created again with other options."""

    def edit(file: h5py.File) -> None:
        data = options["data"] if "data" in options else file[name][...]
        del file[name]
        file.create_dataset(name, **{"data": data, "track_times": False, **options})

    return edit
