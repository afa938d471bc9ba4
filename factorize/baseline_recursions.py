"""Linear-time numba kernels: the variances of an optimizer's iterates under a baseline's noise.

All carry the covariance of the optimizer's state h <- Phi h + b u, the iterate its last entry, forward over the steps,
with u the gradient-space noise of a mechanism that remembers: exponentials (`filtered_noise`), tree nodes that merge
(`merging_noise`) or modes that are worked off one by one (`add_modes`).
"""

import numpy as np
import numpy.typing as npt
from numba import njit

Array = npt.NDArray[np.float64]


@njit(cache=True, nogil=True)
def _advance(Phi: Array, b: Array, V: Array, cross: Array, variance: float, work: Array) -> None:
    """Covariance V of the optimizer's state over one step: h <- Phi h + b u, cov(h, u) = cross; cross <- Phi cross."""
    m = len(b)
    for a in range(m):
        for k in range(m):
            work[a, k] = 0.0
            for e in range(m):
                work[a, k] += Phi[a, e] * V[e, k]
        work[a, m] = 0.0
        for e in range(m):
            work[a, m] += Phi[a, e] * cross[e]
    for a in range(m):
        cross[a] = work[a, m]
    for a in range(m):
        for k in range(m):
            total = cross[a] * b[k] + b[a] * cross[k] + b[a] * b[k] * variance
            for e in range(m):
                total += work[a, e] * Phi[k, e]
            V[a, k] = total


@njit(cache=True, nogil=True)
def filtered_noise(Phi: Array, b: Array, scale: Array, decays: Array, weights: Array) -> Array:
    """Variances of the iterates under y = scale (1 - z) c(z) white noise, c_k = sum(weights decays^k), c_0 = 1.

    The filter's state is f <- decays f + white. Its covariance with y, sum over k <= i of decays^k
    (c_k - c_(k-1)), is summed by parts: every term is then positive, where in the plain sum the digits of a
    million terms near 1 would cancel. X is the covariance of the optimizer's state with f.
    """
    n, m = b.shape
    poles = len(decays)
    V, X = np.zeros((m, m)), np.zeros((m, poles))
    cross, work, fresh = np.zeros(m), np.zeros((m, m + 1)), np.zeros(m)
    power, behind = np.ones(poles), np.zeros(poles)  # decays^i; sum over k < i of c_k decays^k
    lost = weights * (decays - 1)
    # var(y) / scale^2, and what rounding took from it: a million steps add up terms far below its last digit
    variance, small = 1.0, 0.0
    out = np.empty(n)
    for i in range(n):
        s = scale[i]
        if i > 0:
            difference = 0.0  # c_i - c_(i-1)
            for p in range(poles):
                difference += lost[p] * power[p]
                power[p] *= decays[p]
            before = variance
            variance += difference * difference
            small += difference * difference - (variance - before)
        c = 0.0
        for p in range(poles):
            c += weights[p] * power[p]
        for a in range(m):
            cross[a] = 0.0
            for p in range(poles):
                cross[a] += lost[p] * X[a, p]
            cross[a] *= s
        _advance(Phi[i], b[i], V, cross, s * s * (variance + small), work)
        out[i] = V[m - 1, m - 1]
        for p in range(poles):
            with_y = s * (power[p] * c + (1 - decays[p]) * behind[p])
            behind[p] += power[p] * c
            for a in range(m):
                fresh[a] = 0.0
                for e in range(m):
                    fresh[a] += Phi[i, a, e] * X[e, p]
            for a in range(m):
                X[a, p] = decays[p] * fresh[a] + b[i, a] * with_y
    return out


@njit(cache=True, nogil=True)
def merging_noise(Phi: Array, b: Array, own: Array, child: Array) -> Array:
    """Variances of the iterates when prefixes are sums of merging estimates E = own z + child (E_left + E_right).

    Step i's gradient noise is u = (the estimate that step i completes) - (those that merged into it).
    """
    n, m = b.shape
    levels = len(own)
    variance = own * own
    for level in range(1, levels):
        variance[level] += 2 * child[level] * child[level] * variance[level - 1]
    V, X = np.zeros((m, m)), np.zeros((levels, m))  # X[l]: covariance with the estimate that stands at level l
    cross, work, merged, moved = np.zeros(m), np.zeros((m, m + 1)), np.zeros(m), np.zeros(m)
    out = np.empty(n)
    for i in range(n):
        top = 0
        merged[:] = 0.0  # cov(h, the new estimate)
        cross[:] = 0.0  # cov(h, u)
        while (i >> top) & 1:
            top += 1
        kept, spread, share = variance[top], variance[top], 1.0  # cov(u, the new estimate), var(u)
        for level in range(top - 1, -1, -1):
            share *= child[level + 1]
            kept -= share * variance[level]
            spread += (1 - 2 * share) * variance[level]
            for a in range(m):
                merged[a] += share * X[level, a]
                cross[a] -= X[level, a]
        for a in range(m):
            cross[a] += merged[a]
        _advance(Phi[i], b[i], V, cross, spread, work)
        out[i] = V[m - 1, m - 1]
        X[top] = merged
        for level in range(top, levels):
            if level == top or (i >> level) & 1:
                for a in range(m):
                    moved[a] = b[i, a] * kept if level == top else 0.0
                    for e in range(m):
                        moved[a] += Phi[i, a, e] * X[level, e]
                X[level] = moved
    return out


@njit(cache=True, nogil=True)
def add_modes(Phi: Array, b: Array, u: Array, width: int, out: Array) -> None:
    """Add to out[i] the sum over blocks of `width` steps of (A[i, block] . u[block])^2."""
    n, m = b.shape
    V, response = np.zeros((m, m)), np.zeros(m)  # of the blocks that are over; to the block that is running
    none, work, fresh = np.zeros(m), np.zeros((m, m + 1)), np.zeros(m)
    for i in range(n):
        if i % width == 0:
            for a in range(m):
                for e in range(m):
                    V[a, e] += response[a] * response[e]
            response[:] = 0.0
        _advance(Phi[i], b[i], V, none, 0.0, work)
        for a in range(m):
            fresh[a] = b[i, a] * u[i]
            for e in range(m):
                fresh[a] += Phi[i, a, e] * response[e]
        response[:] = fresh
        out[i] += V[m - 1, m - 1] + response[m - 1] * response[m - 1]
