"""Recompute an artifact's certificate by means that share nothing with the compiler.

The workload is rebuilt by simulating the optimizer, the strategy from its stored coefficients. For
moderate n everything else is dense linear algebra: the lower bound from the multipliers by singular
values of A D^(1/2), sensitivity and loss from C. Beyond, each figure has a second evaluation that is
linear in n and not the compiler's: `mmfact.factorize.verification_large`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.linalg

from mmfact.factorize import verification_large
from mmfact.factorize.certificate import Certificate
from mmfact.factorize.errors import WorkloadError
from mmfact.factorize.reference import LARGEST_REFERENCE, reference_loss
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.workload import Workload

Array = npt.NDArray[np.float64]

# Above this singular values take minutes, and what streams in a few buffers can be much larger than any n x n form.
LARGEST_SVD = 4096

# How far a stored figure may lie on its safe side, for roundings. On the other side it may lie as far as the
# recomputation itself may err: 1e-12 (sensitivity, lower bound) and 1e-10 (errors, which go through C^-1) dense;
# 1e-11 and 1e-10 by recursions, which were 1e-13 off at n = 131072 and 1e-12 at n = 4194304.
_ROOM = 5e-7
_ROOM_SENSITIVITY = 1e-9
_ROOM_BOUND = 1e-2  # beyond it no banded-low-rank strategy is made


@dataclass(frozen=True)
class Check:
    """One comparison: what the file says, what was recomputed, whether they agree, and by which rule."""

    name: str
    stored: float
    recomputed: float
    passed: bool
    rule: str


@dataclass(frozen=True)
class Verification:
    """All comparisons and, in words, how they were made."""

    checks: tuple[Check, ...]
    how: str

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def verify(
    workload: Workload, strategy: Strategy, multipliers: Array, certificate: Certificate, *, reference: bool = False
) -> Verification:
    """Check `certificate` for the strategy and the multipliers.

    Parameters
    ----------
    workload : Workload
    strategy : Strategy
        Only its coefficients are trusted: C is built anew from them, and for a ``buffered`` one of more than
        `LARGEST_SVD` steps never formed.
    multipliers : ndarray, shape (n,)
    certificate : Certificate
    reference : bool
        Also solve the semidefinite program in cvxpy (n <= 64).

    Raises
    ------
    WorkloadError
        Workload, strategy and multipliers do not have the same number of steps.
    CapacityError
        `reference` for n above `LARGEST_REFERENCE`.
    """
    n = workload.n
    if strategy.n != n or multipliers.shape != (n,):
        raise WorkloadError(
            f"the workload has {n} steps, the strategy {strategy.n} and the multipliers shape {multipliers.shape}; "
            "only the parts of one artifact can be verified together"
        )
    optimum = reference_loss(workload) if reference else None  # first, for it refuses a large n
    beyond = workload.structured and n > LARGEST_SVD
    if beyond and strategy.kind == "buffered":
        checks, how = _check_strategy_large(workload, strategy, certificate)
    else:
        A = _simulate(workload)
        checks, how = _check_strategy_dense(A, strategy, certificate)
        how = f"{'the stored matrix A' if workload.matrix is not None else 'A from a simulated optimizer'}; {how}"
    if beyond:
        trace = verification_large.nuclear_norm(workload, multipliers)
        slack = 1e-11
        how += "; nuclear norm of A diag(multipliers)^(1/2) by Kalman filters of the simulated optimizer (innovations)"
    else:
        trace = float(scipy.linalg.svdvals(A * np.sqrt(multipliers), check_finite=False).sum())
        slack = 1e-12
        how += "; singular values of A diag(multipliers)^(1/2)"
    bound = trace * trace / float(multipliers.sum())
    # What the certificate itself took off T as a bound of its errors lowers the bound twice as much.
    room = _ROOM + 2 * (certificate.quadrature_error + certificate.rounding)
    checks.insert(3, _below("lower bound", certificate.lower_bound, bound, slack, room))
    how += "; no code shared with the compiler"
    if optimum is not None:
        gap = max(certificate.lower_bound / optimum - 1, 1 - certificate.loss / optimum)
        within = "within [lower bound, loss] up to 1e-5"
        checks.append(Check("optimum by cvxpy", certificate.loss, optimum, bool(gap <= 1e-5), within))
        how += f"; semidefinite program in cvxpy (n <= {LARGEST_REFERENCE})"
    return Verification(tuple(checks), how)


def _check_strategy_dense(A: Array, strategy: Strategy, certificate: Certificate) -> tuple[list[Check], str]:
    B, C, how = _rebuild(A, strategy)
    product = B @ strategy.to_dense()
    product -= A
    stray = _largest(product) / _largest(A)
    del product  # a matrix may take half a gigabyte
    sensitivity = float(np.sqrt(np.einsum("ij,ij->j", C, C).max()))
    rows = np.einsum("ij,ij->i", B, B)
    rule = "largest entry of B C - A at most 1e-10 of A's largest, C as it is exported"
    return [
        *_check_figures(strategy, certificate, sensitivity, float(rows.sum()), float(np.sqrt(rows.max())), 1e-12),
        Check("B C = A", 0.0, stray, bool(stray <= 1e-10), rule),
    ], f"sensitivity and errors by dense algebra on {how}"


def _check_strategy_large(workload: Workload, strategy: Strategy, certificate: Certificate) -> tuple[list[Check], str]:
    figures = verification_large.figures(workload, strategy)
    stray = verification_large.product_error(workload, strategy)
    rule = "on five gradients, largest entry of (B C - A) G at most 1e-6 of A G's largest"
    return [
        *_check_figures(strategy, certificate, figures.sensitivity, figures.squared_error, figures.largest_row, 1e-11),
        Check("B C = A", 0.0, stray, bool(stray <= 1e-6), rule),
    ], (
        f"n > {LARGEST_SVD}, so no n x n matrix: sensitivity and errors by Gramian recursions over the stored "
        "coefficients and a simulated optimizer"
    )


def _check_figures(
    strategy: Strategy,
    certificate: Certificate,
    sensitivity: float,
    squared_error: float,
    largest_row: float,
    slack: float,
) -> list[Check]:
    """Sensitivity, loss and max error. `slack` is what the recomputed sensitivity itself may err."""
    room, scale = _ROOM_SENSITIVITY, sensitivity
    if strategy.kind == "banded-low-rank":
        # Its sensitivity is stored as a bound that takes in the rounding of B^-1 A, so the errors, which are the exact
        # part, are judged at the sensitivity stated: not even a millionth can be hidden between the two.
        room, scale = _ROOM_BOUND, certificate.sensitivity
    return [
        _above("sensitivity", certificate.sensitivity, sensitivity, slack, room),
        _above("loss", certificate.loss, scale**2 * squared_error, 1e-10, _ROOM),
        _above("max error", certificate.max_error, scale * largest_row, 1e-10, _ROOM),
    ]


def _above(name: str, stored: float, recomputed: float, slack: float, room: float) -> Check:
    passed = bool(recomputed * (1 - slack) <= stored <= recomputed * (1 + room))
    return Check(name, stored, recomputed, passed, f"stored errs high: within [-{slack:g}, +{room:g}] relative")


def _below(name: str, stored: float, recomputed: float, slack: float, room: float) -> Check:
    passed = bool(recomputed * (1 - room) <= stored <= recomputed * (1 + slack))
    return Check(name, stored, recomputed, passed, f"stored errs low: within [-{room:g}, +{slack:g}] relative")


def _rebuild(A: Array, strategy: Strategy) -> tuple[Array, Array, str]:
    """(B, C, what C is in words) from the stored coefficients, by their definition."""
    if strategy.kind == "banded-low-rank":
        band, left, right = (strategy.coefficients()[name].astype(np.float64) for name in ("band", "left", "right"))
        width = band.shape[1]
        B = np.tril(left @ right.T, -width)
        for k in range(width):
            np.einsum("ii->i", B[k:, : len(B) - k])[:] = band[k:, k]
        C = scipy.linalg.solve_triangular(B, A, lower=True, check_finite=False)
        return B, C, "B, rebuilt from the coefficients, and C = B^-1 A"
    if strategy.kind == "buffered":
        C, how = _rebuild_buffered(*(strategy.coefficients()[k].astype(np.float64) for k in ("c", "g", "decay", "q")))
    else:
        C, how = strategy.to_dense(), "the stored C"
    return scipy.linalg.solve_triangular(C, A.T, lower=True, trans="T", check_finite=False).T, C, how


def _rebuild_buffered(c: Array, g: Array, decay: Array, q: Array) -> tuple[Array, str]:
    """Column j begins as q_j; each step reads it by its g, then shrinks it by its decay."""
    n, r = g.shape
    C, columns = np.diag(c), np.zeros((r, n))
    for i in range(n):
        C[i, :i] = g[i] @ columns[:, :i]
        columns[:, :i] *= decay[i][:, None]
        columns[:, i] = q[i]
    return C, "C, rebuilt from the coefficients"


def _largest(matrix: Array) -> float:
    return max(float(matrix.max()), -float(matrix.min()))


def _simulate(workload: Workload) -> Array:
    """A by running the optimizer on unit gradients, as its documentation states it."""
    if workload.matrix is not None:
        return workload.matrix
    n = workload.n
    A = np.empty((n, n))
    iterate, buffer, average = np.zeros(n), np.zeros(n), np.zeros(n)
    coupled = workload.weight_decay_kind == "coupled"
    for i, rate in enumerate(workload.learning_rates):
        buffer *= workload.beta
        buffer[i] += 1
        if coupled:
            buffer -= workload.weight_decay * iterate
        else:
            iterate *= 1 - rate * workload.weight_decay
        iterate = iterate + rate * buffer
        average = workload.ema * average + (1 - workload.ema) * iterate
        A[i] = average
    return A
