"""Helpers for the store's tests: small factorizations, an independent simulator and a forger of artifact files."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from mmfact.factorize import workload
from mmfact.factorize.compiler import Factorization, Options, compile
from mmfact.store import format
from mmfact.store.artifact import Artifact
from mmfact.store.store import ArtifactStore


@pytest.fixture(scope="session")
def factorization() -> Factorization:
    """A small one, for tests that do not care which."""
    return compile(workload.momentum(3), Options(strategy="dense"))


@pytest.fixture(scope="session")
def other_factorization() -> Factorization:
    return compile(workload.prefix_sum(3), Options(strategy="dense"))


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(tmp_path / "store")


@pytest.fixture(scope="session")
def everything() -> dict[str, Factorization]:
    """One factorization of each kind of workload and option, n = 7."""
    n = 7
    rates = np.geomspace(1, 0.03, n)
    matrix = np.tril(np.random.default_rng(5).uniform(0.1, 1, (n, n))) + np.eye(n)
    workloads = {
        "prefix-sum": workload.prefix_sum(n),
        "sgd": workload.sgd(n, learning_rates=rates),
        "momentum": workload.momentum(n, beta=0.95),
        "coupled": workload.momentum(n, learning_rates=rates, weight_decay=0.01),
        "decoupled": workload.momentum(n, learning_rates=rates, weight_decay=0.01, weight_decay_kind="decoupled"),
        "ema": workload.momentum(n, learning_rates=rates, ema=0.8),
        "custom": workload.custom(matrix),
        "one step": workload.sgd(1),
    }
    built = {name: compile(w, Options(strategy="dense")) for name, w in workloads.items()}
    built["float32"] = compile(workloads["momentum"], Options(strategy="dense", dtype="float32"))
    built["custom float32"] = compile(workloads["custom"], Options(strategy="dense", dtype="float32"))
    return built


@pytest.fixture(scope="session")
def simulate() -> Callable[[workload.Workload], np.ndarray]:
    """A from its definition: the optimizer run on unit gradients, nothing of mmfact's used but the parameters."""

    def run(w: workload.Workload) -> np.ndarray:
        if w.matrix is not None:
            return np.array(w.matrix)
        iterate, buffer, average, rows = np.zeros(w.n), np.zeros(w.n), np.zeros(w.n), []
        for i, eta in enumerate(w.learning_rates):
            gradient = np.eye(w.n)[i]
            if w.weight_decay_kind == "coupled":
                gradient = gradient - w.weight_decay * iterate
                shrink = 1.0
            else:
                shrink = 1 - eta * w.weight_decay
            buffer = w.beta * buffer + gradient
            iterate = shrink * iterate + eta * buffer
            average = w.ema * average + (1 - w.ema) * iterate
            rows.append(average)
        return np.array(rows)

    return run


@pytest.fixture(scope="session")
def same() -> Callable[[Artifact, Artifact], bool]:
    """Whether two artifacts hold the same, bit for bit."""

    def compare(a: Artifact, b: Artifact) -> bool:
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

    return compare


@dataclass(frozen=True)
class Forger:
    """Artifact files with chosen contents and digests that fit them.

    `spec` and `arrays` are those of an honest artifact, which every forgery starts from.
    """

    artifact: Artifact
    data: bytes
    spec: dict[str, Any]
    arrays: dict[str, np.ndarray]

    def spec_bytes(self, edit: Callable[[dict[str, Any]], None], arrays: dict[str, np.ndarray]) -> bytes:
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
        edit: Callable[[dict[str, Any]], None] = lambda spec: None,
        arrays: dict[str, np.ndarray | None] | None = None,
        file: Callable[[h5py.File], None] = lambda file: None,
    ) -> tuple[bytes, str]:
        """(bytes, logical digest): `arrays` replaces datasets (None removes one), `edit` the spec, `file` the HDF5."""
        chosen = {k: v for k, v in {**self.arrays, **(arrays or {})}.items() if v is not None}
        spec = self.spec_bytes(edit, chosen)
        return self.write(spec, chosen, file), hashlib.sha256(spec).hexdigest()

    @staticmethod
    def write(
        spec: bytes,
        arrays: dict[str, np.ndarray],
        edit: Callable[[h5py.File], None] = lambda file: None,
        level: int = 4,
    ) -> bytes:
        with h5py.File("forged", "w", driver="core", backing_store=False) as file:
            for name, array in {"spec": np.frombuffer(spec, np.uint8), **arrays}.items():
                file.create_dataset(
                    name,
                    data=array,
                    chunks=(min(len(array), max(1, (1 << 16) // max(1, array[0].size))), *array.shape[1:]),
                    shuffle=True,
                    compression="gzip",
                    compression_opts=level,
                    fletcher32=True,
                    track_times=False,
                )
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


@pytest.fixture(scope="session")
def forge_from() -> Callable[[Factorization], Forger]:
    """A forger that starts from this factorization's artifact."""

    def make(factorization: Factorization) -> Forger:
        artifact = format.from_factorization(factorization)
        data = format.encode(artifact)
        with h5py.File(io.BytesIO(data)) as file:
            arrays = {name: file[name][...] for name in file}
        spec = json.loads(arrays.pop("spec").tobytes())
        return Forger(artifact, data, spec, arrays)

    return make


@pytest.fixture(scope="session")
def forger(forge_from: Callable[[Factorization], Forger], factorization: Factorization) -> Forger:
    return forge_from(factorization)


@pytest.fixture
def python() -> Callable[..., subprocess.Popen[str]]:
    """Start a Python process on a script; its arguments are sys.argv[1:]."""

    def start(script: str, *arguments: str | Path) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start
