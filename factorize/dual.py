"""What the dual solver needs to know about a workload, in either of two ways.

The problem (Denisov et al. 2022, Theorem 3.2): minimise tr(A'A X^-1) over X > 0 with diag X <= 1. For
multipliers v > 0, D = diag(v) and M = A D^(1/2):

    S(v) = (M'M)^(1/2),    T(v) = tr S(v) = nuclear norm of M,    phi(v) = diag S(v)
    X(v) = D^(-1/2) S(v) D^(-1/2),    diag X(v) = phi / v
    g(v) = T(v)^2 / sum(v) <= loss of every factorization of A          (for any v > 0)

`dual_structured` evaluates these in linear time, `dual_dense` by a singular value decomposition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """T, phi and whatever the derivatives at the same v need."""

    v: Array
    trace: float
    phi: Array
    context: Any

    @property
    def bound(self) -> float:
        """g(v), without its error terms."""
        return self.trace * (self.trace / float(self.v.sum()))

    @property
    def gap(self) -> float:
        """T max(phi/v) / g - 1: X(v) scaled to be feasible loses at most this; first order in the residual."""
        return float((self.phi / self.v).max()) * float(self.v.sum()) / self.trace - 1

    @property
    def residual(self) -> float:
        """max |log(phi / v)| at the scale of v that makes it smallest in the mean: the paper's fixed point is 0."""
        logs = np.log(self.phi / self.v)
        return float(np.abs(logs - np.log(self.trace / self.v.sum())).max())


@dataclass(frozen=True)
class CertifiedTrace:
    """T(v) with proven errors: the true value is at least trace (1 - quadrature_error - rounding)."""

    trace: float
    quadrature_error: float
    rounding: float

    @property
    def error(self) -> float:
        return self.quadrature_error + self.rounding


class Dual(Protocol):
    """One workload's dual function and its derivatives in u = log v.

    With K = D H D, H[i, k] = -d(phi_i / v_i) / dv_k: the Newton direction p for the dual solves
    K p = phi - v (up to the scale of v), and K 1 = phi / 2.
    """

    name: str

    def start(self) -> Array:
        """Multipliers to begin with, shape (n,)."""
        ...

    def evaluate(self, v: Array) -> Evaluation: ...

    def curvature_product(self, at: Evaluation, q: Array) -> Array:
        """K q."""
        ...

    def curvature_diagonal(self, at: Evaluation) -> Array:
        """diag K."""
        ...

    def certify(self, v: Array) -> CertifiedTrace:
        """T(v), slower than `evaluate` if need be, with its errors bounded."""
        ...
