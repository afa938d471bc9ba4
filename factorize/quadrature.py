"""x^(-1/2) as a sum of poles, with a bound on its relative error.

On [lower, upper] the best rational approximation is Zolotarev's; Hale, Higham and Trefethen (2008,
"Computing A^alpha, log(A), and related matrix functions by contour integrals", method 3) reach it by
the midpoint rule in the variable of a Jacobi elliptic function:

    x^(-1/2) ~ sum_j w_j / (x + s_j),     s_j = lower sc(t_j)^2,   t_j = (j - 1/2) K' / N
    w_j = 2 K' sqrt(lower) / (pi N) * d sc / dt (t_j)

with sc of modulus sqrt(1 - lower/upper). Its parameter is close to 1, where the usual routines lose
digits, so sc comes from Jacobi's imaginary transformation: sc(t | 1 - m) = -i sn(i t | m), a series
of positive terms in the nome of the small parameter m = lower/upper.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import special

from mmfact.factorize.dual import EPS
from mmfact.factorize.errors import SolverError

# Above this ratio lower/upper the nome series would converge slowly; widening an interval is always allowed.
_LARGEST_RATIO = 0.25
_SERIES_TERMS = 40  # the last is below 1e-20 of the first at the largest ratio
_MOST_POLES = 400


@dataclass(frozen=True)
class PoleSum:
    """x^(-1/2) ~ sum_j weights[j] / (x + shifts[j]) on [lower, upper].

    Attributes
    ----------
    weights, shifts : ndarray, shape (N,)
        All positive.
    error : float
        |sqrt(x) sum_j weights[j] / (x + shifts[j]) - 1| <= error for lower <= x <= upper, for the
        float64 values stored here.
    """

    weights: npt.NDArray[np.float64]
    shifts: npt.NDArray[np.float64]
    lower: float
    upper: float
    error: float


def _nodes(lower: float, upper: float, count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    m = lower / upper
    k = math.sqrt(m)
    K, K_prime = special.ellipk(m), special.ellipkm1(m)
    t = (np.arange(count) + 0.5) * (K_prime / count)
    near = np.minimum(t, K_prime - t)  # sc(K' - t) = 1 / (k sc(t))
    odd = 2 * np.arange(_SERIES_TERMS)[:, None] + 1
    # q^(j/2) sinh(j pi t / 2K), written so that nothing overflows; q = exp(-pi K' / K)
    rise = np.exp(odd * (math.pi / (2 * K)) * (near - K_prime))
    fall = np.exp(odd * (math.pi / (2 * K)) * (-near - K_prime))
    damp = 1 / (1 - np.exp(-math.pi * K_prime / K * odd))
    front = math.pi / (k * K)
    sc = front * ((rise - fall) * damp).sum(axis=0)
    slope = front * ((rise + fall) * damp * odd).sum(axis=0) * (math.pi / (2 * K))
    far = t > K_prime / 2
    slope = np.where(far, slope / (k * sc**2), slope)
    sc = np.where(far, 1 / (k * sc), sc)
    return 2 * K_prime * math.sqrt(lower) / (math.pi * count) * slope, lower * sc**2


def _error(weights: npt.NDArray[np.float64], shifts: npt.NDArray[np.float64], lower: float, upper: float) -> float:
    """The error equioscillates and both ends are extremal points, so the ends give its size; a grid
    finer than the oscillation, a safety factor and the rounding of the check itself are added."""
    x = np.geomspace(lower, upper, 8 * len(shifts) + 1)
    x[0], x[-1] = lower, upper
    value = np.sqrt(x) * (weights / (x[:, None] + shifts)).sum(axis=1)
    return float(1.1 * np.max(np.abs(value - 1)) + 4 * EPS)


def inverse_square_root(lower: float, upper: float, accuracy: float = 1e-13) -> PoleSum:
    """The fewest poles whose error on [lower, upper] is at most `accuracy`.

    Convergence is e^(-2 pi^2 N / (log(upper/lower) + 6)) (Hale, Higham, Trefethen 2008, Theorem 4.1).

    Raises
    ------
    SolverError
        The interval is empty or not finite, or no reasonable number of poles reaches `accuracy`.
    """
    if not (0 < lower <= upper < math.inf):
        raise SolverError(f"the spectrum bounds [{lower!r}, {upper!r}] are not an interval of positive finite numbers")
    upper = max(upper, lower / _LARGEST_RATIO)
    count = max(4, math.ceil((math.log(upper / lower) + 6) * math.log(4 / accuracy) / (2 * math.pi**2)) - 4)
    while count <= _MOST_POLES:
        weights, shifts = _nodes(lower, upper, count)
        error = _error(weights, shifts, lower, upper)
        if error <= accuracy:
            return PoleSum(weights, shifts, lower, upper, error)
        count += 1 + count // 16
    raise SolverError(
        f"{_MOST_POLES} poles do not approximate x^(-1/2) to {accuracy:g} on [{lower:g}, {upper:g}]; "
        "the workload is too ill-conditioned for the structured solver, use --method dense"
    )
