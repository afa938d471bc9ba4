"""The dense strategy of an optimum: C lower-triangular with C'C = X(v), columns of norm 1."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import scipy.linalg

from mmfact.factorize.dual import Array, Evaluation
from mmfact.factorize.dual_dense import DenseDual
from mmfact.factorize.dual_structured import dense_inverse_sum
from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.optimum import Optimum
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.dense import DenseStrategy, lower_triangular
from mmfact.factorize.workload import Workload, check_dense

# Near the optimum normalising the columns always lowers the loss; beyond this residual both are tried.
_CLEARLY_OPTIMAL = 1e-3


def build(
    workload: Workload, optimum: Optimum, participation: Participation, dtype: npt.DTypeLike = np.float64
) -> DenseStrategy:
    """C from the multipliers: normalised, then cast; its figures are those of the cast coefficients.

    Raises
    ------
    CapacityError
        n too large for n x n matrices.
    SolverError
        X(v) is not positive definite to working precision.
    """
    check_dense(workload.n, "the dense strategy")
    if optimum.method == "structured":
        try:
            C = _from_sum_of_inverses(optimum.evaluation)
        except np.linalg.LinAlgError:
            # X itself is too ill-conditioned for a Cholesky factorization; the SVD avoids forming it
            C = _from_singular_values(DenseDual(workload).evaluate(optimum.multipliers))
    else:
        C = _from_singular_values(optimum.evaluation)
    if not np.isfinite(C).all():
        raise SolverError("the strategy C is not finite; the workload is too ill-conditioned")
    normalised = DenseStrategy.from_matrix(C / np.linalg.norm(C, axis=0), dtype)
    if optimum.residual <= _CLEARLY_OPTIMAL:
        return normalised
    plain = DenseStrategy.from_matrix(C / np.linalg.norm(C, axis=0).max(), dtype)
    return min(normalised, plain, key=lambda strategy: strategy.loss(workload, participation))


def _from_sum_of_inverses(at: Evaluation) -> Array:
    """X = C'C with C LOWER: a Cholesky factorization of X with its rows and columns reversed.

    (A plain Cholesky gives X = C C', another matrix with another sensitivity.)
    """
    X = dense_inverse_sum(at)
    reversed_factor = scipy.linalg.cholesky(X[::-1, ::-1], lower=True, check_finite=False)
    return np.ascontiguousarray(reversed_factor.T[::-1, ::-1])


def _from_singular_values(at: Evaluation) -> Array:
    """X = Y'Y with Y = S^(1/2) D^(-1/2) from the decomposition of M = A D^(1/2); X is never formed."""
    sigma, Vt = at.context
    try:
        return lower_triangular(np.sqrt(sigma)[:, None] * Vt / np.sqrt(at.v))
    except WorkloadError as error:
        raise SolverError(
            "the optimum is singular to working precision, so nothing could be streamed; "
            "use a workload with rates that vary less"
        ) from error
