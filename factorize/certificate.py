"""The certificate: how far the strategy that is shipped is from the best possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mmfact.factorize.errors import SolverError

if TYPE_CHECKING:  # readers of certificates, the runtime among them, do without the solver
    from mmfact.factorize.optimum import Optimum
    from mmfact.factorize.participation import Participation
    from mmfact.factorize.strategy.protocol import Strategy
    from mmfact.factorize.workload import Workload


@dataclass(frozen=True)
class Certificate:
    """Figures of the shipped strategy beside the proof of what is possible.

    Attributes
    ----------
    n : int
        Steps.
    loss : float
        sensitivity^2 normF(B)^2, rounded up.
    lower_bound : float
        No factorization of the workload has a smaller loss; rounded down.
    sensitivity : float
        Of the stored coefficients, rounded up.
    sensitivity_kind : {"exact", "upper bound"}
    max_error : float
        sensitivity max_i norm2(B[i, :]).
    quadrature_error, rounding, residual, iterations, products, method, fell_back
        How the lower bound was found, see `mmfact.factorize.optimum.Optimum`.
    """

    n: int
    loss: float
    lower_bound: float
    sensitivity: float
    sensitivity_kind: str
    max_error: float
    quadrature_error: float
    rounding: float
    residual: float
    iterations: int
    products: int
    method: str
    fell_back: bool

    @property
    def excess(self) -> float:
        """loss / lower_bound - 1: no factorization can beat this one by more."""
        return self.loss / self.lower_bound - 1

    @property
    def rmse(self) -> float:
        """Root mean squared error of an iterate at unit noise, sqrt(loss / n)."""
        return math.sqrt(self.loss / self.n)


def certify(workload: Workload, strategy: Strategy, optimum: Optimum, participation: Participation) -> Certificate:
    """Recompute sensitivity and loss from the strategy's own coefficients and set them beside the bound.

    Raises
    ------
    SolverError
        The loss lies below the lower bound: one of the two is wrong, and nothing may be shipped.
    """
    loss, max_error = strategy.errors(workload, participation)
    if not (math.isfinite(loss) and optimum.lower_bound > 0):
        raise SolverError(
            f"no certificate: loss {loss:g}, lower bound {optimum.lower_bound:g}; the workload is too ill-conditioned"
        )
    if loss < optimum.lower_bound:
        raise SolverError(
            f"no certificate: the loss {loss!r} lies below the lower bound {optimum.lower_bound!r}, which cannot be; "
            "rounding errors have won. Try --method dense, and please report the workload"
        )
    return Certificate(
        n=workload.n,
        loss=loss,
        lower_bound=optimum.lower_bound,
        sensitivity=strategy.sensitivity(participation),
        sensitivity_kind=strategy.sensitivity_kind,
        max_error=max_error,
        quadrature_error=optimum.quadrature_error,
        rounding=optimum.rounding,
        residual=optimum.residual,
        iterations=optimum.iterations,
        products=optimum.products,
        method=optimum.method,
        fell_back=optimum.fell_back,
    )
