"""The optimal loss as a semidefinite program in cvxpy: slow, small, and independent of everything else here."""

from __future__ import annotations

import numpy as np

from mmfact.factorize.errors import CapacityError, SolverError
from mmfact.factorize.workload import Workload

LARGEST_REFERENCE = 64


def reference_loss(workload: Workload) -> float:
    """min tr(A'A X^-1) over X > 0 with diag X <= 1, for n <= 64.

    As min tr W over [[W, A], [A', X]] >= 0, which says W >= A X^-1 A' by the Schur complement. The
    solver's own accuracy is about 1e-6 relative. cvxpy is imported only here.

    Raises
    ------
    CapacityError
        n above `LARGEST_REFERENCE`.
    SolverError
        cvxpy's solver did not report an optimum.
    """
    n = workload.n
    if n > LARGEST_REFERENCE:
        raise CapacityError(f"n = {n} is too large for the semidefinite reference; it takes n <= {LARGEST_REFERENCE}")
    import cvxpy as cp

    A = workload.dense()
    scale = float(np.linalg.norm(A))
    joint = cp.Variable((2 * n, 2 * n), symmetric=True)
    constraints = [joint >> 0, joint[:n, n:] == A / scale, cp.diag(joint[n:, n:]) <= 1]
    problem = cp.Problem(cp.Minimize(cp.trace(joint[:n, :n])), constraints)
    problem.solve(solver=cp.CLARABEL)
    if problem.status not in (cp.OPTIMAL, cp.OPTIMAL_INACCURATE) or problem.value is None:
        raise SolverError(f"the semidefinite reference ended with status {problem.status!r}")
    return float(problem.value) * scale**2
