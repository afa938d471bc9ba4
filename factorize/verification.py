"""Recompute an artifact's certificate by means that share nothing with the compiler.

The workload is rebuilt by simulating the optimizer in plain NumPy, the lower bound from the
multipliers by singular values of A D^(1/2), sensitivity and loss from the coefficients by dense
linear algebra. Only n x n work, so for moderate n.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.linalg

from mmfact.factorize.certificate import Certificate
from mmfact.factorize.dual_structured import StructuredDual
from mmfact.factorize.reference import LARGEST_REFERENCE, reference_loss
from mmfact.factorize.workload import Workload

Array = npt.NDArray[np.float64]

# Above this the singular values take minutes; the linear-time recomputation takes their place.
LARGEST_SVD = 4096


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
    workload: Workload, C: Array, multipliers: Array, certificate: Certificate, *, reference: bool = False
) -> Verification:
    """Check `certificate` for the strategy C and the multipliers.

    Parameters
    ----------
    reference : bool
        Also solve the semidefinite program in cvxpy (n <= 64).

    Raises
    ------
    CapacityError
        `reference` for n above `LARGEST_REFERENCE`.
    """
    A = _simulate(workload)
    B = scipy.linalg.solve_triangular(C, A.T, lower=True, trans="T", check_finite=False).T
    product = float(np.abs(B @ C - A).max() / np.abs(A).max())
    sensitivity = float(np.sqrt((C * C).sum(axis=0).max()))
    loss = sensitivity**2 * float((B * B).sum())
    max_error = sensitivity * float(np.sqrt((B * B).sum(axis=1).max()))
    dense = workload.n <= LARGEST_SVD or not workload.structured
    if dense:
        trace = float(scipy.linalg.svdvals(A * np.sqrt(multipliers), check_finite=False).sum())
        source = "the stored matrix A" if workload.matrix is not None else "A from a simulated optimizer"
        how = f"{source}; singular values of A diag(multipliers)^(1/2); no code shared with the compiler"
    else:
        trace = StructuredDual(workload).certify(multipliers).trace
        how = (
            f"n > {LARGEST_SVD}: the lower bound in double-double by the linear-time recursion (the compiler's own); "
            "sensitivity, loss and the workload by dense algebra that shares no code with it"
        )
    bound = trace * trace / float(multipliers.sum())
    checks = [
        _above("sensitivity", certificate.sensitivity, sensitivity, 1e-12, 1e-9),
        _above("loss", certificate.loss, loss, 1e-10, 1e-6),
        _above("max error", certificate.max_error, max_error, 1e-10, 1e-6),
        _below("lower bound", certificate.lower_bound, bound, 1e-12, 1e-6),
        Check("B C = A", 0.0, product, bool(product <= 1e-10), "largest entry of B C - A at most 1e-10 of A's largest"),
    ]
    if reference:
        value = reference_loss(workload)
        gap = max(certificate.lower_bound / value - 1, 1 - certificate.loss / value)
        checks.append(
            Check(
                "optimum by cvxpy", certificate.loss, value, bool(gap <= 1e-5), "within [lower bound, loss] up to 1e-5"
            )
        )
        how += f"; semidefinite program in cvxpy (n <= {LARGEST_REFERENCE})"
    return Verification(tuple(checks), how)


def _above(name: str, stored: float, recomputed: float, slack: float, room: float) -> Check:
    passed = bool(recomputed * (1 - slack) <= stored <= recomputed * (1 + room))
    return Check(name, stored, recomputed, passed, f"stored errs high: within [-{slack:g}, +{room:g}] relative")


def _below(name: str, stored: float, recomputed: float, slack: float, room: float) -> Check:
    passed = bool(recomputed * (1 - room) <= stored <= recomputed * (1 + slack))
    return Check(name, stored, recomputed, passed, f"stored errs low: within [-{room:g}, +{slack:g}] relative")


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
