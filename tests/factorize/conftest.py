"""Independent truths that the tests of this room share: golden values, an optimizer run by hand, exact arithmetic."""

import json
from fractions import Fraction
from pathlib import Path

import mpmath
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from mmfact.factorize import schedule, workload


@pytest.fixture(scope="module", autouse=True)
def one_blas_thread():
    """Matrices here are small: BLAS threads that spin on cores shared with other work cost forty times the time."""
    with threadpool_limits(1, "blas"):
        yield


@pytest.fixture(scope="session")
def goldens():
    return json.loads((Path(__file__).parent / "goldens.json").read_text(encoding="utf-8"))


def _optimizer_matrix(w, number=float):
    """A of a structured workload by running its optimizer on unit gradients, theta starting at 0.

    torch.optim.SGD written out (d = g + wd theta; buf = beta buf + d; theta -= eta buf), or with the
    decay decoupled as in AdamW (theta = theta (1 - eta wd) - eta buf); the iterate is -theta, and an
    exponential moving average of the iterates where the workload asks for one. `number` is float, or
    Fraction for the exact matrix of the float parameters.
    """
    n, beta, wd, gamma = w.n, number(w.beta), number(w.weight_decay), number(w.ema)
    rates = [number(float(eta)) for eta in w.learning_rates]
    A = [[number(0)] * n for _ in range(n)]
    for j in range(n):
        theta = buf = average = number(0)
        for i in range(n):
            gradient = number(1 if i == j else 0)
            if w.weight_decay_kind == "coupled":
                buf = beta * buf + (gradient + wd * theta)
                theta = theta - rates[i] * buf
            else:
                buf = beta * buf + gradient
                theta = theta * (1 - rates[i] * wd) - rates[i] * buf
            average = gamma * average + (1 - gamma) * -theta
            A[i][j] = average if w.ema else -theta
    return A


@pytest.fixture(scope="session")
def simulated():
    """Workload -> A as a float array, from an optimizer run by hand."""
    return lambda w: np.array(_optimizer_matrix(w))


@pytest.fixture(scope="session")
def exact_matrix():
    """Workload -> A as rows of Fractions, exact for the float parameters."""
    return lambda w: _optimizer_matrix(w, Fraction)


@pytest.fixture(scope="session")
def exact_figures():
    """(rows of Fractions of A, float C) -> (sensitivity^2, normF(A C^-1)^2, max row norm^2), exactly."""

    def figures(A, C):
        n = len(A)
        C = [[Fraction(float(x)) for x in row] for row in C]
        rows = []
        for i in range(n):
            b = [Fraction(0)] * n  # b C = A[i], solved from the last column back
            for j in range(i, -1, -1):
                b[j] = (A[i][j] - sum(b[k] * C[k][j] for k in range(j + 1, i + 1))) / C[j][j]
            rows.append(sum(x * x for x in b))
        return max(sum(C[i][j] ** 2 for i in range(n)) for j in range(n)), sum(rows), max(rows)

    return figures


@pytest.fixture(scope="session")
def nuclear_norm():
    """(rows of Fractions of A, float v) -> nuclear norm of A diag(v)^(1/2), by mpmath at 60 digits."""

    def norm(A, v):
        with mpmath.workdps(60):
            n = len(A)
            M = mpmath.zeros(n)
            for i in range(n):
                for j in range(i + 1):
                    a = mpmath.mpf(A[i][j].numerator) / A[i][j].denominator
                    M[i, j] = a * mpmath.sqrt(mpmath.mpf(float(v[j])))
            return mpmath.fsum(mpmath.svd_r(M, compute_uv=False))

    return norm


@pytest.fixture(scope="session")
def golden_workload():
    """An entry of the goldens' "optimal" list -> its Workload."""

    def build(entry):
        if entry["workload"] == "prefix-sum":
            return workload.prefix_sum(entry["n"])
        rates = schedule.parse(entry["schedule"], entry["n"])
        if entry["workload"] == "sgd":
            return workload.sgd(entry["n"], learning_rates=rates)
        return workload.momentum(entry["n"], beta=entry["beta"], learning_rates=rates)

    return build


@pytest.fixture(scope="session")
def random_triangle():
    """(seed, n) -> a well-conditioned random lower-triangular matrix with a diagonal of either sign."""

    def build(seed, n, positive=False):
        rng = np.random.default_rng(seed)
        A = np.tril(rng.normal(size=(n, n)), -1) / np.sqrt(n) + np.diag(rng.uniform(0.5, 2, n))
        return A if positive else A * rng.choice([-1.0, 1.0], n)

    return build


@pytest.fixture(scope="session")
def hard_workload():
    """(seed, n, beta) -> momentum with random rates over three decades: condition numbers that punish squaring."""

    def build(seed, n, beta):
        rates = 10 ** np.random.default_rng(seed).uniform(-3, 0, n)
        return workload.momentum(n, beta=beta, learning_rates=rates)

    return build
