"""Artifacts, streams and exact references that the tests of the noise room share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest

from mmfact.factorize import compiler, schedule, workload
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise import source as noise_source
from mmfact.store.artifact import Artifact
from mmfact.store.format import from_factorization

Array = npt.NDArray[Any]

CASES = ("prefix-sum", "momentum", "custom")


@dataclass(frozen=True)
class Case:
    """An artifact, and its workload matrix as simulating the optimizer in the test gives it."""

    artifact: Artifact
    A: Array


def simulate(rates: Array, beta: float) -> Array:
    """A of SGD with momentum, column by column: run the optimizer on unit gradients."""
    n = len(rates)
    A = np.zeros((n, n))
    for j in range(n):
        buffer = position = 0.0
        for i in range(n):
            buffer = beta * buffer + (i == j)
            position += rates[i] * buffer
            A[i, j] = position
    return A


@pytest.fixture(scope="session")
def artifact_of() -> Callable[..., Artifact]:
    """artifact_of(workload, dtype="float64"): compiled in memory."""

    def build(work: workload.Workload, dtype: str = "float64") -> Artifact:
        return from_factorization(
            compiler.compile(work, compiler.Options(strategy="dense", dtype=dtype, tolerance=0.5))
        )

    return build


@pytest.fixture(scope="session")
def case(artifact_of: Callable[..., Artifact]) -> Callable[..., Case]:
    """case(name, n=16, dtype="float64") for a name in CASES; compiled once a session."""
    made: dict[tuple[str, int, str], Case] = {}

    def build(name: str, n: int = 16, dtype: str = "float64") -> Case:
        if (name, n, dtype) not in made:
            if name == "prefix-sum":
                work, A = workload.prefix_sum(n), simulate(np.ones(n), 0.0)
            elif name == "momentum":
                rates = schedule.named("cooldown", n)
                work, A = workload.momentum(n, beta=0.9, learning_rates=rates), simulate(rates.rates, 0.9)
            else:
                random = np.random.default_rng(7)
                A = np.tril(random.standard_normal((n, n)), -1) + np.diag(random.uniform(0.5, 2.0, n))
                work = workload.custom(A)
            made[name, n, dtype] = Case(artifact_of(work, dtype), A)
        return made[name, n, dtype]

    return build


STEPS = 12


@dataclass(frozen=True)
class Built:
    """An artifact of one strategy with the exact matrices of its stored coefficients, each made without mmfact's.

    Rows in gradient space are `noising` @ Z, rows in iterate space `decoder` @ Z, both times sigma, clip norm and the
    sensitivity of C = noising^-1; `A` comes from a simulated optimizer.
    """

    artifact: Artifact
    A: Array
    C: Array
    noising: Array
    decoder: Array

    def matrix(self, space: str) -> Array:
        return self.decoder if space == "iterate" else self.noising


def _workloads(n: int) -> dict[str, workload.Workload]:
    random = np.random.default_rng(7)
    matrix = np.tril(random.standard_normal((n, n)), -1) / 2 + np.diag(random.uniform(0.8, 1.5, n))
    return {
        "prefix": workload.prefix_sum(n),
        "momentum": workload.momentum(n),
        "cooldown": workload.momentum(n, beta=0.95, learning_rates=schedule.named("cooldown", n)),
        "decay": workload.momentum(n, learning_rates=np.geomspace(1, 0.1, n), weight_decay=0.05),
        "ema": workload.sgd(n, learning_rates=np.geomspace(0.1, 1, n), ema=0.8),
        "wide": workload.momentum(n, ema=0.9),
        "custom": workload.custom(matrix),
    }


def _optimizer(work: workload.Workload) -> Array:
    """A from its definition, with coupled weight decay: the optimizer run on unit gradients."""
    if work.matrix is not None:
        return np.array(work.matrix)
    position, buffer, average, rows = np.zeros(work.n), np.zeros(work.n), np.zeros(work.n), []
    for i, eta in enumerate(work.learning_rates):
        buffer = work.beta * buffer + np.eye(work.n)[i] - work.weight_decay * position
        position = position + eta * buffer
        average = work.ema * average + (1 - work.ema) * position
        rows.append(average)
    return np.array(rows)


def _exact(artifact: Artifact, A: Array) -> Built:
    """Entry by entry from the definition of each strategy, then numpy's inverse."""
    n, held = artifact.n, {k: v.astype(np.float64) for k, v in artifact.strategy.coefficients().items()}
    M = np.zeros((n, n))
    if artifact.strategy.kind == "banded-low-rank":
        K = held["band"].shape[1]
        for i in range(n):
            for j in range(i + 1):
                M[i, j] = held["band"][i, i - j] if i - j < K else held["left"][i] @ held["right"][j]
        return Built(artifact, A, np.linalg.solve(M, A), np.linalg.solve(A, M), M)
    for i in range(n):
        for j in range(i + 1):
            if artifact.strategy.kind == "dense":
                M[i, j] = held["packed"][i * (i + 1) // 2 + j]
            elif i == j:
                M[i, i] = held["c"][i]
            else:
                M[i, j] = held["g"][i] @ (held["decay"][j + 1 : i].prod(axis=0) * held["q"][j])
    inverse = np.linalg.inv(M)
    return Built(artifact, A, M, inverse, A @ inverse)


@pytest.fixture(scope="session")
def built() -> Callable[..., Built]:
    """built(strategy, dtype="float64", name="momentum", n=STEPS): compiled once a session, with several buffers."""
    made: dict[tuple[str, str, str, int], Built] = {}
    chosen = {"dense": {}, "buffered": {"buffers": 3}, "banded-low-rank": {"bandwidth": 3, "rank": 2}}

    def build(strategy: str, dtype: str = "float64", name: str = "momentum", n: int = STEPS) -> Built:
        if (strategy, dtype, name, n) not in made:
            work = _workloads(n)[name]
            options = compiler.Options(strategy=strategy, dtype=dtype, tolerance=0.5, **chosen[strategy])
            made[strategy, dtype, name, n] = _exact(
                from_factorization(compiler.compile(work, options)), _optimizer(work)
            )
        return made[strategy, dtype, name, n]

    return build


@pytest.fixture(scope="session")
def fed() -> Callable[[NoiseStream, Array], Array]:
    """fed(stream, Z): the rows that are left, the rows of Z (of the whole vector) in place of the source's."""

    def run(stream: NoiseStream, Z: Array) -> Array:
        def fill(self: Any, step: int, first: int, out: Array) -> None:
            out[:] = Z[step, first : first + len(out)]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(noise_source.NoiseSource, "fill", fill)
            return np.array([stream.next() for _ in range(stream.horizon - stream.step)])

    return run


@pytest.fixture(scope="session")
def key() -> NoiseKey:
    return NoiseKey.insecure_from_seed(2024)


@pytest.fixture(scope="session")
def stream(case: Callable[..., Case], key: NoiseKey) -> Callable[..., NoiseStream]:
    """stream(artifact=<momentum, n = 16>, size=8, **options): a stream with sigma 1.3, clip norm 0.7."""

    def make(artifact: Artifact | None = None, size: Any = 8, **options: Any) -> NoiseStream:
        options = {"noise_multiplier": 1.3, "clip_norm": 0.7, "key": key, **options}
        return NoiseStream(artifact or case("momentum").artifact, size, **options)

    return make


@pytest.fixture(scope="session")
def rows_of() -> Callable[..., Array]:
    """rows_of(stream, count=all that are left): rows as they come, shape (count, size)."""

    def collect(stream: NoiseStream, count: int | None = None) -> Array:
        count = stream.horizon - stream.step if count is None else count
        return np.array([stream.next() for _ in range(count)])

    return collect


@pytest.fixture(scope="session")
def streamed_matrix(fed: Callable[[NoiseStream, Array], Array]) -> Callable[[NoiseStream], Array]:
    """streamed_matrix(float64 stream of size n): M with rows = M Z, by putting Z = identity in place of the source."""

    def measure(stream: NoiseStream) -> Array:
        return fed(stream, np.eye(stream.horizon))

    return measure


@pytest.fixture(scope="session")
def largest_column() -> Callable[..., mpmath.mpf]:
    """largest_column(M, A=identity): max_j norm2((M^-1 A)[:, j]) in 60 digits; M, A lower-triangular."""

    def solve(M: Array, A: Any = None) -> mpmath.mpf:
        n = len(M)
        with mpmath.workdps(60):
            exact = [[mpmath.mpf(float(M[i, j])) for j in range(i + 1)] for i in range(n)]
            largest = mpmath.mpf(0)
            for j in range(n):
                column = [mpmath.mpf(0)] * n
                for i in range(j, n):
                    right = mpmath.mpf(A[i][j]) if A is not None else mpmath.mpf(i == j)
                    column[i] = (right - mpmath.fsum(exact[i][k] * column[k] for k in range(j, i))) / exact[i][i]
                largest = max(largest, mpmath.sqrt(mpmath.fsum(c * c for c in column)))
            return largest

    return solve


@pytest.fixture(scope="session")
def covariance_bound() -> Callable[[Array, int, float], Array]:
    """covariance_bound(Sigma, N, alarm): how far S = R R' / N may lie from Sigma, entry by entry.

    R holds N independent centred Gaussian columns of covariance Sigma. With correlation rho, a product of two
    unit-variance entries is (1+rho)/2 U^2 - (1-rho)/2 V^2, U and V independent standard normals, so S_ij has variance
    (S_ii S_jj + S_ij^2) / N and, by Laurent and Massart 2000 (Lemma 1), for every x > 0

        P(|S_ij - Sigma_ij| > sqrt(S_ii S_jj) (sqrt(2 (1+rho^2) x / N) + (1+|rho|) x / N)) <= 2 exp(-x).

    Its first term is the Gaussian tail; nothing is asymptotic. x = log(2 entries / alarm): a union bound over the
    n (n+1) / 2 entries, so that a right implementation fails with probability at most `alarm`.
    """

    def bound(Sigma: Array, N: int, alarm: float) -> Array:
        n = len(Sigma)
        x = math.log(2 * (n * (n + 1) // 2) / alarm)
        scale = np.sqrt(np.outer(np.diag(Sigma), np.diag(Sigma)))
        rho = Sigma / scale
        return scale * (np.sqrt(2 * (1 + rho**2) * x / N) + (1 + np.abs(rho)) * x / N)

    return bound


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[Array]:
    """Every piece of raw words (float32: of 32 bits, float64: of 64) that the source makes normals of from here on."""
    seen: list[Array] = []
    real = noise_source.normals

    def record(words: Array, out: Array) -> list[int]:
        seen.append(words.copy())
        return real(words, out)

    monkeypatch.setattr(noise_source, "normals", record)
    return seen
