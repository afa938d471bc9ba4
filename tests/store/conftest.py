"""Helpers for the store's tests: small factorizations, an independent simulator; the forger is in tests/attacks."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from attacks import forgery

from mmfact.factorize import workload
from mmfact.factorize.compiler import Factorization, Options, compile
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
    return forgery.same


@pytest.fixture(scope="session")
def forger() -> forgery.Forger:
    """Of `factorization`."""
    return forgery.dense()


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
