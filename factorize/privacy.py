"""From noise multiplier to (epsilon, delta) and back, for one Gaussian release.

A stream with single participation is one Gaussian mechanism with mu = 1 / noise_multiplier, also
when the gradients depend on earlier outputs (Denisov et al. 2022, Theorem 2.1). Neighbouring
relation: one example's contribution replaced by zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy.special import log_ndtr, ndtr

from mmfact.factorize.errors import PrivacyError


def gaussian_delta(noise_multiplier: float, epsilon: float) -> float:
    """The exact delta of a Gaussian release (Balle and Wang 2018, Theorem 8).

    delta = Phi(mu/2 - epsilon/mu) - e^epsilon Phi(-mu/2 - epsilon/mu), mu = 1 / noise_multiplier.
    """
    _check(noise_multiplier=noise_multiplier)
    if not (math.isfinite(epsilon) and epsilon >= 0):
        raise PrivacyError(f"epsilon = {epsilon!r} must be finite and at least 0")
    mu = 1 / noise_multiplier
    delta = float(ndtr(mu / 2 - epsilon / mu) - math.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))
    return max(delta, 0.0)  # the difference of two equal numbers may round below


def gaussian_epsilon(noise_multiplier: float, delta: float) -> float:
    """The exact epsilon at `delta`, the root of `gaussian_delta`."""
    _check(noise_multiplier=noise_multiplier, delta=delta)
    if gaussian_delta(noise_multiplier, 0.0) <= delta:
        return 0.0
    high = 1.0
    while gaussian_delta(noise_multiplier, high) > delta:
        high *= 2
    return _root(lambda e: gaussian_delta(noise_multiplier, e) - delta, 0.0, high)


def gaussian_noise_multiplier(epsilon: float, delta: float) -> float:
    """The smallest noise multiplier that gives (epsilon, delta), rounded up by 1e-9 relative.

    The margin covers the cancellation in `gaussian_delta` down to epsilon and delta of about 1e-6 and 1e-12.
    """
    _check(delta=delta)
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise PrivacyError(f"epsilon = {epsilon!r} must be positive and finite")
    low, high = 1e-3, 1.0
    while gaussian_delta(high, epsilon) > delta:
        high *= 2
    while gaussian_delta(low, epsilon) < delta:
        low /= 2
    return _root(lambda s: gaussian_delta(s, epsilon) - delta, low, high) * (1 + 1e-9)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    from scipy.optimize import brentq  # only here: the runtime imports this module and does without scipy.optimize

    return float(brentq(function, low, high, xtol=1e-14, rtol=1e-13))


def _check(noise_multiplier: float = 1.0, delta: float = 0.5) -> None:
    if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
        raise PrivacyError(f"noise multiplier {noise_multiplier!r} must be positive and finite")
    if not 0 < delta < 1:
        raise PrivacyError(f"delta = {delta!r} must be in (0, 1)")
