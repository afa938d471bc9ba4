"""Several epochs: the sensitivity of a strategy when every example takes part again and again in the same order.

With b = ceil(n / epochs) steps an epoch, an example of step s < b also takes part in steps s + b, s + 2b, ... < n. For
X = C'C and contributions g_i of norm at most 1, one for each of its steps,

    normF(sum_i C[:, i] g_i')^2 = sum_ij X[i, j] (g_i . g_j) <= sum_ij abs(X[i, j])         i, j in the pattern of s

and the largest sum over s < b bounds the sensitivity (Choquette-Choo, McMahan, Rush, Thakurta 2023, "Multi-Epoch Matrix
Factorization Mechanisms for Private Machine Learning", section 2). Contributions may be any vectors of norm 1: where no
X[i, j] of that pattern is negative, equal ones attain the sum, and the figure is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from numba import njit
from numba.extending import register_jitable

from mmfact.factorize import double_double as dd
from mmfact.factorize.errors import CapacityError, PrivacyError, SolverError
from mmfact.factorize.participation import single
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.strategy.protocol import Strategy

Array = npt.NDArray[np.float64]
Ball = tuple[float, float, float]

_MOST_PAIRS = 1 << 31  # pairs of steps times buffers of a buffered strategy, n K r / 2: a few minutes

_EPS = float(np.finfo(np.float64).eps)
_MOST_RADII = 1e-9  # of a sum that is exact
_UNIT = 2.0**-100  # above the error of any operation in double-double, 2^-102
_TINY = 2.0**-1000  # above what an operation loses to underflow


@dataclass(frozen=True)
class CyclicSensitivity:
    """What several epochs make of a strategy's sensitivity.

    Attributes
    ----------
    epochs : int
        How often an example takes part, at most.
    separation : int
        b, the steps of an epoch: from one participation of an example to its next.
    sensitivity : float
        Of C G to one example's contributions together, rounded up.
    kind : {"exact", "upper bound"}
        "exact" up to rounding: some example's contributions attain it.
    """

    epochs: int
    separation: int
    sensitivity: float
    kind: str


def cyclic_sensitivity(strategy: Strategy, epochs: int) -> CyclicSensitivity:
    """The sensitivity of the shipped C over `epochs` epochs of ceil(n / epochs) steps, in the same order each.

    It holds as well for an example that leaves out some of its steps, or contributes less in them. One epoch is single
    participation. What a stream makes of C in floating point raises this figure by the same factor as the single one s,
    so noise that was scaled to s is one Gaussian release with mu = (this sensitivity / s) / noise multiplier.

    A buffered strategy takes O(n r (r + epochs)) operations, in double-double with a running bound of their errors; the
    others, up to 8,192 steps, O(n^2 epochs).

    Raises
    ------
    PrivacyError
        `epochs` is not a whole number from 1 to n.
    CapacityError
        A buffered strategy with more epochs than can be gone through in minutes.
    SolverError
        The coefficients are so large that the sums overflow, or the strategy is of a form not known here.
    """
    n = strategy.n
    if isinstance(epochs, bool | np.bool_) or not isinstance(epochs, int | np.integer) or not 1 <= epochs <= n:
        raise PrivacyError(
            f"epochs = {epochs!r:.40} must be a whole number from 1 to the {n} steps of the strategy: an example takes "
            "part at most once in a step"
        )
    if epochs == 1:
        return CyclicSensitivity(1, n, strategy.sensitivity(single()), strategy.sensitivity_kind)
    separation = -(-n // int(epochs))
    if isinstance(strategy, BufferedStrategy):
        squares, loose = _buffered(strategy, separation)
        bounds = np.sqrt(squares) * (1 + 4 * _EPS)
    elif isinstance(strategy, DenseStrategy | BandedLowRankStrategy):
        bounds, loose = _dense(strategy, separation)
    else:
        raise SolverError(
            f"a strategy of kind {strategy.kind!r} has no sensitivity over several epochs yet; use one epoch"
        )
    worst = int(np.argmax(bounds))  # a NaN, if there is one
    if not math.isfinite(bounds[worst]):
        raise SolverError(
            f"the strategy's sensitivity over {epochs} epochs is not finite in float64; normalise its columns to 1"
        )
    kind = "exact" if strategy.sensitivity_kind == "exact" and not loose[worst] else "upper bound"
    return CyclicSensitivity(int(epochs), separation, float(bounds[worst]), kind)


def _dense(strategy: DenseStrategy | BandedLowRankStrategy, separation: int) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Bound, and whether it is loose since an entry of X is negative, for the pattern of every s < separation.

    A computed entry of X is off by at most n eps norm2(C[:, i]) norm2(C[:, j]), a sum of K by K of them by 2 K eps.
    What the strategy raises its column norms by bounds how far a column lies from the computed one; over a pattern it
    adds up.
    """
    C = strategy.to_dense()
    norms = np.linalg.norm(C, axis=0)
    stray = strategy.column_norms() - norms
    bounds, loose = np.empty(separation), np.empty(separation, np.bool_)
    for s in range(separation):
        columns, sizes = C[s:, s::separation], norms[s::separation]
        X, off = columns.T @ columns, (len(C) + 2) * _EPS
        total = np.abs(X).sum(axis=1).sum() * (1 + 2 * (len(sizes) + 2) * _EPS) + off * sizes.sum() ** 2
        bounds[s] = (math.sqrt(total) + stray[s::separation].sum()) * (1 + (len(sizes) + 4) * _EPS)
        loose[s] = np.any(X + off * np.outer(sizes, sizes) < 0)
    return bounds, loose


def _buffered(strategy: BufferedStrategy, separation: int) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Bound of the sum, and whether it is loose, for the pattern of every s < separation.

    With h the buffers that a unit input at step i has left when step j > i begins, and O the observability Gramian,

        X[i, j] = C[j, i] c_j + (decay_j h)' O_(j+1) q_j = h . p_j          p_j = c_j g_j + decay_j O_(j+1) q_j

    and from j to j + b every buffer of h is only multiplied, by its decays from step j to j + b - 1.
    """
    n, r = strategy.g.shape
    pairs = n * -(-n // separation) * r // 2
    if pairs > _MOST_PAIRS:
        raise CapacityError(
            f"{-(-n // separation)} epochs in {n} steps are {pairs // r:.1e} pairs of steps, too many for {r} buffers "
            f"({_MOST_PAIRS // r:.1e} are allowed); ask for fewer epochs, or a shorter horizon"
        )
    c, g, decay, q = (array.astype(np.float64) for array in strategy.coefficients().values())
    squares, readings = _readings(c, g, decay, q)
    return _sums(squares, q, decay, _products(decay, separation), readings, separation)


# A ball (high, low, radius): the true value lies within radius of high + low, whatever was rounded or underflowed.
# Radii are rounded too, some n times by 2^-53: whoever reads one doubles it.


@register_jitable
def _ball(balls: Array, j: int, k: int) -> Ball:
    return balls[j, k, 0], balls[j, k, 1], balls[j, k, 2]


@register_jitable
def _times(a: Ball, b: Ball) -> Ball:
    high, low = dd.multiply(a[0], a[1], b[0], b[1])
    return high, low, abs(a[0]) * b[2] + a[2] * (abs(b[0]) + b[2]) + _UNIT * abs(high) + _TINY


@register_jitable
def _plus(a: Ball, b: Ball) -> Ball:
    high, low = dd.add(a[0], a[1], b[0], b[1])
    return high, low, a[2] + b[2] + _UNIT * (abs(a[0]) + abs(b[0]))


@njit(cache=True, nogil=True)
def _products(decay: Array, b: int) -> Array:
    """decay[j+1] ... decay[j+b-1], b - 1 factors, as balls, for every j < n - b; nothing is divided.

    With the steps cut into blocks of b, it is a product that ends with j's block times one that begins the next.
    """
    n, r = decay.shape
    products = np.zeros((n, r, 3))
    for k in range(r):
        for first in range(0, n - b, b):
            rest = (1.0, 0.0, 0.0)
            for j in range(first + b - 1, first - 1, -1):
                if j < n - b:
                    products[j, k, 0], products[j, k, 1], products[j, k, 2] = rest
                rest = _times(rest, (decay[j, k], 0.0, 0.0))
            head = (1.0, 0.0, 0.0)
            for j in range(first, min(first + b, n - b)):
                products[j, k, 0], products[j, k, 1], products[j, k, 2] = _times(_ball(products, j, k), head)
                head = _times(head, (decay[j + b, k], 0.0, 0.0))
    return products


@njit(cache=True, nogil=True)
def _readings(c: Array, g: Array, decay: Array, q: Array) -> tuple[Array, Array]:
    """X[j, j] = c_j^2 + q_j' O_(j+1) q_j and p_j = c_j g_j + decay_j O_(j+1) q_j as balls, for every j.

    O_j = decay_j O_(j+1) decay_j + g_j g_j'.
    """
    n, r = g.shape
    squares, readings = np.empty((n, 1, 3)), np.empty((n, r, 3))
    gramian = np.zeros((r, r, 3))
    for j in range(n - 1, -1, -1):
        square = _times((c[j], 0.0, 0.0), (c[j], 0.0, 0.0))
        for a in range(r):
            total = (0.0, 0.0, 0.0)
            for o in range(r):
                total = _plus(total, _times(_ball(gramian, max(a, o), min(a, o)), (q[j, o], 0.0, 0.0)))
            square = _plus(square, _times(total, (q[j, a], 0.0, 0.0)))
            total = _times(total, (decay[j, a], 0.0, 0.0))
            total = _plus(total, _times((c[j], 0.0, 0.0), (g[j, a], 0.0, 0.0)))
            readings[j, a, 0], readings[j, a, 1], readings[j, a, 2] = total
        squares[j, 0, 0], squares[j, 0, 1], squares[j, 0, 2] = square
        for a in range(r):
            for o in range(a + 1):
                kept = _times(_times((decay[j, a], 0.0, 0.0), (decay[j, o], 0.0, 0.0)), _ball(gramian, a, o))
                total = _plus(kept, _times((g[j, a], 0.0, 0.0), (g[j, o], 0.0, 0.0)))
                gramian[a, o, 0], gramian[a, o, 1], gramian[a, o, 2] = total
    return squares, readings


@njit(cache=True, nogil=True)
def _sums(
    squares: Array, q: Array, decay: Array, products: Array, readings: Array, b: int
) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Sum of abs(X[i, j]) over the pattern of every s < b, rounded up.

    It is loose where an X[i, j] is negative, or where radii make up much of it.
    """
    n, r = q.shape
    sums, loose = np.zeros(b), np.zeros(b, np.bool_)
    state = np.empty((1, r, 3))
    for s in range(b):
        radii = 0.0
        for i in range(s, n, b):
            row = 0.0
            for j in range(i + b, n, b):
                total = (0.0, 0.0, 0.0)
                for k in range(r):
                    if j == i + b:
                        left = (q[i, k], 0.0, 0.0)
                    else:
                        left = _times(_ball(state, 0, k), (decay[j - b, k], 0.0, 0.0))
                    left = _times(left, _ball(products, j - b, k))
                    state[0, k, 0], state[0, k, 1], state[0, k, 2] = left
                    total = _plus(total, _times(left, _ball(readings, j, k)))
                off = 2.0 * total[2]
                row += abs(total[0]) + off
                radii += off
                if total[0] < -off:
                    loose[s] = True
            off = 2.0 * squares[i, 0, 2]
            sums[s] += squares[i, 0, 0] + off + 2.0 * row
            radii += off
        sums[s] *= 1.0 + 2.0 * (n // b + 8) * 2.0**-52
        if radii > _MOST_RADII * sums[s]:
            loose[s] = True
    return sums, loose
