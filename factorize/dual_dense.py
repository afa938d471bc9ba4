"""The dual of any lower-triangular matrix, by a singular value decomposition of M = A D^(1/2).

Not by an eigendecomposition of M'M: that squares the condition number and loses the small
components of phi.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.linalg

from mmfact.factorize.dual import EPS, Array, CertifiedTrace, Evaluation
from mmfact.factorize.errors import SolverError
from mmfact.factorize.workload import Workload


class DenseDual:
    """`Dual` in O(n^3) an evaluation and O(n^3) a curvature product."""

    name = "dense"

    def __init__(self, workload: Workload) -> None:
        self.A = workload.dense()

    def start(self) -> Array:
        return np.sqrt(np.einsum("ij,ij->j", self.A, self.A))

    def evaluate(self, v: Array) -> Evaluation:
        try:
            _, sigma, Vt = scipy.linalg.svd(
                self.A * np.sqrt(v), full_matrices=False, overwrite_a=True, check_finite=False
            )
        except np.linalg.LinAlgError as error:
            raise SolverError(f"the singular value decomposition of the workload failed: {error}") from error
        return Evaluation(v, float(sigma.sum()), sigma @ (Vt * Vt), (sigma, Vt))

    def curvature_product(self, at: Evaluation, q: Array) -> Array:
        sigma, Vt = at.context
        W = (Vt * q) @ Vt.T
        W *= _divided_difference(sigma)
        return np.einsum("ai,ai->i", Vt, W @ Vt)

    def curvature_diagonal(self, at: Evaluation) -> Array:
        sigma, Vt = at.context
        squares = Vt * Vt
        return np.einsum("ai,ai->i", squares, _divided_difference(sigma) @ squares)

    def certify(self, v: Array) -> CertifiedTrace:
        """The rounding term: a computed SVD is exact for M + E with normF(E) <= 8 eps normF(M), and the
        nuclear norm moves by at most sqrt(n) normF(E). (Golub and Van Loan, section 8.6, for the form;
        8 is a generous constant for the LAPACK driver, whose measured errors are far below it.)
        """
        M = self.A * np.sqrt(v)
        sigma = scipy.linalg.svdvals(M, overwrite_a=False, check_finite=False)
        trace = math.fsum(sigma)
        rounding = 8 * EPS * math.sqrt(len(v)) * float(np.linalg.norm(sigma)) / trace
        return CertifiedTrace(trace, 0.0, rounding)


def _divided_difference(sigma: Array) -> Array:
    """sigma_a sigma_b / (sigma_a + sigma_b), the derivative of the square root in its eigenbasis."""
    total = np.add.outer(sigma, sigma)
    return np.divide(np.multiply.outer(sigma, sigma), total, out=np.zeros_like(total), where=total > 0)
