"""What the noise costs an online learner on convex losses: the regret bound that goes with a factorization."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmfact.factorize.certificate import Certificate
from mmfact.factorize.errors import PrivacyError, WorkloadError
from mmfact.factorize.privacy import check
from mmfact.factorize.workload import Workload

_LARGEST_DIMENSION = 10**15


@dataclass(frozen=True)
class RegretBound:
    """An upper bound of the expected average regret, and the three terms it is the sum of.

    Attributes
    ----------
    distance, steps, noise : float
        R^2 / (2 eta n), eta L^2 / 2 and L^2 sigma eta sqrt(d) RMSE.
    """

    distance: float
    steps: float
    noise: float

    @property
    def total(self) -> float:
        """In units of the loss."""
        return self.distance + self.steps + self.noise


def regret_bound(
    workload: Workload,
    certificate: Certificate,
    noise_multiplier: float,
    *,
    lipschitz: float,
    distance: float,
    learning_rate: float,
    dimension: int,
) -> RegretBound:
    """Bound E[(1/n) sum_t f_t(theta_t) - f_t(theta*)] for theta_t = theta_0 - eta (S G + noise)_(t-1).

    For convex f_t, one a step, which may depend on all earlier iterates, with gradients within the clip norm L:

        R^2 / (2 eta n) + eta L^2 / 2 + L^2 sigma eta sqrt(d) sensitivity normF(B) / sqrt(n)

    The first two are those of online gradient descent. The noise moves iterate t by L sigma eta sensitivity
    norm2(B[t]) sqrt(d) in the mean at most, which costs L as much in regret, and the mean of norm2(B[t]) over t is at
    most normF(B) / sqrt(n) (after Denisov et al. 2022). sigma is per coordinate, hence the sqrt(d): the short form
    without it is false for d > 1.

    Parameters
    ----------
    lipschitz : float
        L, of every f_t; the clip norm.
    distance : float
        R, norm2(theta* - theta_0).
    learning_rate : float
        eta, a constant; it multiplies the certificate's RMSE, which is in its units.
    dimension : int
        d, the number of parameters.

    Raises
    ------
    WorkloadError
        The workload is no prefix sum: the argument needs plain gradient descent at a constant rate.
    PrivacyError
        A value out of range.
    """
    if workload.kind != "prefix-sum":
        raise WorkloadError(
            f"the regret bound is about plain gradient descent at a constant rate, a prefix-sum workload, and this one "
            f"is {workload.kind}; leave its options out"
        )
    check(noise_multiplier=noise_multiplier)
    for name, value in {"Lipschitz constant": lipschitz, "learning rate": learning_rate}.items():
        if not (math.isfinite(value) and value > 0):
            raise PrivacyError(f"{name} {value!r} must be positive and finite")
    if not (math.isfinite(distance) and distance >= 0):
        raise PrivacyError(f"distance {distance!r} from theta_0 to theta* must be at least 0 and finite")
    if not 1 <= dimension <= _LARGEST_DIMENSION:
        raise PrivacyError(f"the dimension must be the number of parameters, from 1 to {_LARGEST_DIMENSION:g}")
    spread = noise_multiplier * math.sqrt(dimension) * certificate.rmse
    bound = RegretBound(
        distance=distance * distance / (2 * learning_rate * workload.n),
        steps=learning_rate * lipschitz * lipschitz / 2,
        noise=learning_rate * lipschitz * lipschitz * spread,
    )
    if not math.isfinite(bound.total):
        raise PrivacyError("the regret bound is beyond 1e308; give values of ordinary size")
    return bound
