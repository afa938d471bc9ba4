"""From noise multiplier to (epsilon, delta) and back, for one Gaussian release; looser accountants beside it.

A stream with single participation is one Gaussian mechanism with mu = 1 / noise_multiplier, also
when the gradients depend on earlier outputs (Denisov et al. 2022, Theorem 2.1). Neighbouring
relation: one example's contribution replaced by zero.

Every epsilon and every noise multiplier is rounded up, by far more than its arithmetic errs.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr

from mmfact.factorize.errors import PrivacyError

Array = npt.NDArray[np.float64]

# Below the smallest noise multiplier epsilon passes 500,000 and nothing is protected.
SMALLEST_NOISE_MULTIPLIER = 1e-3
EPSILONS = 1e-6, 1e5

# Orders of Renyi divergence: so fine that no others would help, and the whole ones that many papers stop at.
FINE_ORDERS = 1 + np.logspace(-4, 7, 11_001)
INTEGER_ORDERS = np.arange(2.0, 256.0)

_UP = 1 + 1e-9


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The exact delta of a Gaussian release (Balle and Wang 2018, Theorem 8).

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), mu = 1 / noise_multiplier.
    """
    check(noise_multiplier=noise_multiplier)
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise PrivacyError(f"epsilon = {epsilon!r} must be finite and at least 0")
    mu = 1 / noise_multiplier
    delta = float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))
    return max(delta, 0.0)  # the difference of two equal numbers may round below


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact epsilon at `delta`, the root of `gaussian_delta`, rounded up by 1e-9 relative and 1e-12."""
    check(noise_multiplier=noise_multiplier, delta=delta)
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(noise_multiplier, high) > delta:
        high *= 2
    return _root(lambda e: gaussian_delta(noise_multiplier, e) - delta, 0.0, high) * _UP + 1e-12


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier that gives (epsilon, delta), rounded up by 1e-9 relative.

    An epsilon near 1e-6 adds 1e-6 to that margin, for the cancellation in `gaussian_delta`.
    """
    check(epsilon=epsilon, delta=delta)
    low, high = 1e-3, 1.0
    while gaussian_delta(high, epsilon) > delta:
        high *= 2
    return _root(lambda s: gaussian_delta(s, epsilon) - delta, low, high) * (_UP + 1e-12 / epsilon)


def rdp_epsilon(orders: Array, divergences: Array, delta: float) -> float:
    """The smallest epsilon that Renyi divergences at some orders prove at `delta`, rounded up.

    epsilon = D_a + ln(1 - 1/a) - (ln delta + ln a) / (a - 1) for any order a > 1 (Canonne, Kamath, Steinke 2020,
    Proposition 12): the "CKS conversion".
    """
    check(delta=delta)
    found = divergences + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)
    return max(float(np.min(found)), 0.0) * _UP + 1e-12


def gaussian_rdp_epsilon(noise_multiplier: float, delta: float, orders: Array = FINE_ORDERS) -> float:
    """What Renyi DP makes of a Gaussian release: D_a = a mu^2 / 2 and the CKS conversion; above the exact epsilon."""
    check(noise_multiplier=noise_multiplier)
    return rdp_epsilon(orders, orders / (2 * noise_multiplier**2), delta)


def gaussian_zcdp_epsilon(noise_multiplier: float, delta: float) -> float:
    """What zCDP makes of a Gaussian release: rho + 2 sqrt(rho ln 1/delta), rho = mu^2 / 2; above the exact epsilon.

    Bun and Steinke 2016, Proposition 1.3.
    """
    check(noise_multiplier=noise_multiplier, delta=delta)
    rho = 1 / (2 * noise_multiplier**2)
    return (rho + 2 * math.sqrt(rho * -math.log(delta))) * _UP


def check(*, noise_multiplier: float = 1.0, epsilon: float = 1.0, delta: float = 0.5) -> None:
    """Refuse a value that no statement can be made about.

    Raises
    ------
    PrivacyError
    """
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise PrivacyError(f"noise multiplier {noise_multiplier!r} must be positive and finite")
    if noise_multiplier < SMALLEST_NOISE_MULTIPLIER:
        raise PrivacyError(
            f"noise multiplier {noise_multiplier!r} is below {SMALLEST_NOISE_MULTIPLIER:g}: epsilon would pass "
            "500,000, which protects nothing. It is in units of the clip norm; give about 0.3 to 10"
        )
    if not EPSILONS[0] <= epsilon <= EPSILONS[1]:
        raise PrivacyError(f"epsilon = {epsilon!r} must be in [{EPSILONS[0]:g}, {EPSILONS[1]:g}]; usual are 0.1 to 20")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta!r} must be in (0, 1); usual is less than 1 / (number of examples)")


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # only here: the runtime imports this module and does without scipy.optimize

    return float(brentq(function, low, high, xtol=1e-14, rtol=1e-13))
