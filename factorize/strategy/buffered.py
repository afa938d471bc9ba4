"""The buffered strategy: a time-varying state space with a few buffers.

One step, for every element of the model, with h_0 = 0:

    y_i = (z_i - sum_k g[i, k] h_k) / c[i]          h_k <- decay[i, k] h_k + q[i, k] y_i

so C[i, i] = c[i] and C[i, j] = sum_k g[i, k] decay[i-1, k] ... decay[j+1, k] q[j, k] for j < i. A buffered
linear Toeplitz strategy (BLT: McMahan, Xu, Zhang 2024) is the case in which nothing depends on i.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from mmfact.factorize import double_double as dd
from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.protocol import DTYPES
from mmfact.factorize.workload import LARGEST_STRUCTURED, Workload, check_dense

Array = npt.NDArray[np.float64]

# Coefficients in one array (1 GiB in float64), and multiply-adds of a sensitivity's recursion, n r^2 (about a minute).
LARGEST_ARRAY = 1 << 27
_LARGEST_RECURSION = 1 << 33

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class BufferedStrategy:
    """C as a state space with diagonal transitions.

    Attributes
    ----------
    c : ndarray of float32 or float64, shape (n,)
        The diagonal of C, > 0.
    g, decay, q : ndarrays of the same dtype, shape (n, r)
        How a step reads, shrinks and feeds the r buffers.
    """

    c: npt.NDArray[Any] = field(repr=False)
    g: npt.NDArray[Any] = field(repr=False)
    decay: npt.NDArray[Any] = field(repr=False)
    q: npt.NDArray[Any] = field(repr=False)

    kind = "buffered"
    sensitivity_kind = "exact"

    def __post_init__(self) -> None:
        n = len(self.c) if self.c.ndim == 1 else 0
        if not 1 <= n <= LARGEST_STRUCTURED:
            raise SolverError(
                f"c of shape {self.c.shape} is not one coefficient for each of 1..{LARGEST_STRUCTURED} steps"
            )
        if self.g.ndim != 2 or self.g.shape[0] != n or not 1 <= self.g.shape[1] <= largest_buffers(n):
            raise SolverError(f"g has shape {self.g.shape}; it needs n = {n} rows of 1 to {largest_buffers(n)} buffers")
        for name, array in self.coefficients().items():
            if name != "c" and array.shape != self.g.shape:
                raise SolverError(f"{name} has shape {array.shape} but g {self.g.shape}; they belong together")
            if array.dtype != self.c.dtype or array.dtype.name not in DTYPES:
                raise SolverError(f"a buffered strategy holds all of {' or '.join(DTYPES)}; {name} is {array.dtype}")
            if not np.isfinite(array).all():
                raise SolverError(f"a strategy's coefficients must be finite, and {name} is not")
            if np.abs(array).max() > 1e30:
                raise SolverError(f"{name} reaches {np.abs(array).max():.3g}; normalise the strategy to about 1")
            array.flags.writeable = False
        if not (self.c >= 1e-30).all():
            raise SolverError("a strategy's diagonal must be positive (1e-30 or more), or it could not be streamed")

    @property
    def n(self) -> int:
        return len(self.c)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.c.dtype

    @property
    def buffers(self) -> int:
        return self.g.shape[1]

    @property
    def bytes_per_parameter(self) -> int:
        return 4 * self.buffers

    @property
    def cost(self) -> int:
        """3 r + 1: g h, decay h + q y for each buffer, and the division by c."""
        return 3 * self.buffers + 1

    def parameters(self) -> dict[str, int]:
        return {"buffers": self.buffers}

    def coefficients(self) -> dict[str, npt.NDArray[Any]]:
        return {"c": self.c, "g": self.g, "decay": self.decay, "q": self.q}

    def column_norms(self) -> Array:
        """norm2(C[:, j]) for every j, rounded up: in double-double, O(n r^2), with a running bound of its error."""
        square, error = _column_energies(*self._doubles())
        return np.sqrt(square + error) * (1 + 4 * _EPS)

    def sensitivity(self, participation: Participation) -> float:
        return participation.sensitivity(self.column_norms())

    def loss(self, workload: Workload, participation: Participation) -> float:
        return self.errors(workload, participation)[0]

    def max_error(self, workload: Workload, participation: Participation) -> float:
        return self.errors(workload, participation)[1]

    def errors(self, workload: Workload, participation: Participation) -> tuple[float, float]:
        """(loss, max error): the variances of the optimizer's iterates, run over y, by their covariance recursion.

        In double-double, O(n (r + m)^2) for an optimizer of m states; for a custom matrix by dense algebra.
        """
        if workload.n != self.n:
            raise WorkloadError(f"the strategy has {self.n} steps but the workload {workload.n}; they belong together")
        s = self.sensitivity(participation)
        if workload.structured:
            total, largest = _variances(*self._doubles(), *workload.state_space())
            up = 1 + 8 * _EPS
        else:
            rows = np.einsum("ij,ij->i", *(2 * [workload.apply(self.noising())]))
            total, largest, up = math.fsum(rows), float(rows.max()), 1 + (self.n + 2) * _EPS
        return s * s * total * up, s * math.sqrt(largest) * up

    def amplification(self) -> float:
        """max_i sum_k |g[i, k]| std(h_k): what a step subtracts, before cancellation, per unit of white noise."""
        return _streamed(*self._doubles())[0]

    def noise_range(self) -> tuple[float, float]:
        """Of the standard deviations of a row of C^-1 Z: its own fresh part at the least, all of it at the most."""
        return 1.0 / float(self.c.max()), float(self.row_deviations().max())

    def row_deviations(self) -> Array:
        """The standard deviation of every row of C^-1 Z, shape (n,)."""
        return _streamed(*self._doubles())[1]

    def largest_buffer(self) -> float:
        """The largest standard deviation that a buffer reaches."""
        return _streamed(*self._doubles())[2]

    def to_dense(self) -> Array:
        check_dense(self.n, "the matrix C")
        return _dense(*self._doubles())

    def noising(self) -> Array:
        """C^-1, n x n: turns white noise into gradient-space noise."""
        check_dense(self.n, "the matrix C^-1")
        return _inverse(*self._doubles())

    def decoder(self, workload: Workload) -> Array:
        """B = A C^-1, n x n lower-triangular."""
        if workload.n != self.n:
            raise WorkloadError(f"the strategy has {self.n} steps but the workload {workload.n}; they belong together")
        return workload.apply(self.noising())

    def _doubles(self) -> tuple[Array, Array, Array, Array]:
        c, g, decay, q = (array.astype(np.float64) for array in (self.c, self.g, self.decay, self.q))
        return c, g, decay, q


def largest_buffers(n: int) -> int:
    """The largest rank that a block below the diagonal of an n x n matrix can have, where it can be handled at all."""
    return max(1, min(n // 2, LARGEST_ARRAY // n, math.isqrt(_LARGEST_RECURSION // n)))


@njit(cache=True, nogil=True)
def _column_energies(c: Array, g: Array, decay: Array, q: Array) -> tuple[Array, Array]:
    """norm2(C[:, j])^2 = c_j^2 + q_j' O_(j+1) q_j and a bound of its rounding error.

    O_i = diag(decay_i) O_(i+1) diag(decay_i) + g_i g_i' is the observability Gramian, in double-double; the same
    recursion on absolute values carries the error bound, a multiple of the unit roundoff 2^-104 that grows with every
    step (4 operations of relative error 2^-103 at most; 64 is generous) and is added to float64's own. What underflows
    is lost (less than 2^-1000 a step), and grows where transitions do: a third recursion carries that.
    """
    n, r = g.shape
    high, low = np.zeros((r, r)), np.zeros((r, r))
    size, lost = np.zeros((r, r)), np.zeros((r, r))
    square, error = np.empty(n), np.empty(n)
    for j in range(n - 1, -1, -1):
        sh, sl = dd.two_product(c[j], c[j])
        magnitude, vanished = sh, 2.0**-1000
        for a in range(r):
            for b in range(a + 1):
                if high[a, b] != 0.0 or low[a, b] != 0.0:
                    wh, wl = dd.two_product(q[j, a], q[j, b])
                    wh, wl = dd.multiply(wh, wl, high[a, b], low[a, b])
                    if a != b:
                        wh, wl = 2.0 * wh, 2.0 * wl
                    sh, sl = dd.add(sh, sl, wh, wl)
                weight = (1.0 if a == b else 2.0) * abs(q[j, a] * q[j, b])
                magnitude += weight * size[a, b]
                vanished += weight * lost[a, b]
        square[j] = sh + sl
        error[j] = 64.0 * (n - j + r * r) * 2.0**-104 * magnitude + vanished
        for a in range(r):
            for b in range(a + 1):
                dh, dl = dd.two_product(decay[j, a], decay[j, b])
                dh, dl = dd.multiply(dh, dl, high[a, b], low[a, b])
                gh, gl = dd.two_product(g[j, a], g[j, b])
                high[a, b], low[a, b] = dd.add(dh, dl, gh, gl)
                growth = abs(decay[j, a] * decay[j, b])
                size[a, b] = growth * size[a, b] + abs(g[j, a] * g[j, b])
                lost[a, b] = growth * lost[a, b] + 2.0**-1000
    return square, error


@njit(cache=True, nogil=True)
def _variances(c: Array, g: Array, decay: Array, q: Array, Phi: Array, b: Array) -> tuple[float, float]:
    """Sum and maximum over i of the variance of the iterate s_i[-1], s_i = Phi_i s_(i-1) + b_i y_i, for white z.

    The covariance P of (h, s) is carried in double-double. With a = -g / c, t = P[:, h] a and
    vy = a' t[h] + 1 / c^2 (the variance of y): P <- D P D' + f e' + e f', where D = diag(decay, Phi), e = (q, b) and
    f = D t + vy e / 2.
    """
    n, r = g.shape
    m = b.shape[1]
    k = r + m
    ph, pl = np.zeros((k, k)), np.zeros((k, k))
    nh, nl = np.zeros((k, k)), np.zeros((k, k))
    th, tl = np.zeros(k), np.zeros(k)
    fh, fl = np.zeros(k), np.zeros(k)
    ah, al = np.zeros(r), np.zeros(r)
    e = np.zeros(k)
    total_h, total_l, largest = 0.0, 0.0, 0.0
    for i in range(n):
        for a in range(r):
            ah[a], al[a] = dd.divide(-g[i, a], 0.0, c[i], 0.0)
            e[a] = q[i, a]
        for a in range(m):
            e[r + a] = b[i, a]
        vh, vl = dd.divide(1.0, 0.0, c[i], 0.0)
        vh, vl = dd.multiply(vh, vl, vh, vl)
        for a in range(k):
            sh, sl = 0.0, 0.0
            for o in range(r):
                xh, xl = dd.multiply(ph[a, o], pl[a, o], ah[o], al[o])
                sh, sl = dd.add(sh, sl, xh, xl)
            th[a], tl[a] = sh, sl
            if a < r:
                xh, xl = dd.multiply(sh, sl, ah[a], al[a])
                vh, vl = dd.add(vh, vl, xh, xl)
        # D P (rows), D t
        for a in range(r):
            fh[a], fl[a] = dd.multiply(th[a], tl[a], decay[i, a], 0.0)
            for o in range(k):
                nh[a, o], nl[a, o] = dd.multiply(ph[a, o], pl[a, o], decay[i, a], 0.0)
        for a in range(m):
            sh, sl = 0.0, 0.0
            for o in range(m):
                if Phi[i, a, o] != 0.0:
                    xh, xl = dd.multiply(th[r + o], tl[r + o], Phi[i, a, o], 0.0)
                    sh, sl = dd.add(sh, sl, xh, xl)
            fh[r + a], fl[r + a] = sh, sl
            for z in range(k):
                sh, sl = 0.0, 0.0
                for o in range(m):
                    if Phi[i, a, o] != 0.0:
                        xh, xl = dd.multiply(ph[r + o, z], pl[r + o, z], Phi[i, a, o], 0.0)
                        sh, sl = dd.add(sh, sl, xh, xl)
                nh[r + a, z], nl[r + a, z] = sh, sl
        for a in range(k):
            xh, xl = dd.multiply(vh, vl, 0.5 * e[a], 0.0)
            fh[a], fl[a] = dd.add(fh[a], fl[a], xh, xl)
        # (D P) D' + f e' + e f', the lower triangle and its mirror
        for a in range(k):
            for z in range(a + 1):
                if z < r:
                    sh, sl = dd.multiply(nh[a, z], nl[a, z], decay[i, z], 0.0)
                else:
                    sh, sl = 0.0, 0.0
                    for o in range(m):
                        if Phi[i, z - r, o] != 0.0:
                            xh, xl = dd.multiply(nh[a, r + o], nl[a, r + o], Phi[i, z - r, o], 0.0)
                            sh, sl = dd.add(sh, sl, xh, xl)
                xh, xl = dd.multiply(fh[a], fl[a], e[z], 0.0)
                sh, sl = dd.add(sh, sl, xh, xl)
                xh, xl = dd.multiply(fh[z], fl[z], e[a], 0.0)
                sh, sl = dd.add(sh, sl, xh, xl)
                ph[a, z], pl[a, z] = sh, sl
                ph[z, a], pl[z, a] = sh, sl
        total_h, total_l = dd.add(total_h, total_l, ph[k - 1, k - 1], pl[k - 1, k - 1])
        largest = max(largest, ph[k - 1, k - 1])
    return total_h + total_l, largest


@njit(cache=True, nogil=True)
def _streamed(c: Array, g: Array, decay: Array, q: Array) -> tuple[float, Array, float]:
    """Largest amplification, the standard deviation of y at every step, and the largest of a buffer."""
    n, r = g.shape
    P = np.zeros((r, r))
    t = np.zeros(r)
    largest, deviations, buffer = 0.0, np.zeros(n), 0.0
    for i in range(n):
        reach, variance = 0.0, 1.0
        for a in range(r):
            spread = math.sqrt(max(P[a, a], 0.0))
            buffer = max(buffer, spread)
            reach += abs(g[i, a]) * spread
            total = 0.0
            for o in range(r):
                total -= P[a, o] * g[i, o]
            t[a] = total / c[i]
            variance -= total * g[i, a]
        largest = max(largest, reach)
        variance = variance / c[i] ** 2
        deviations[i] = math.sqrt(max(variance, 0.0))
        for a in range(r):
            for o in range(r):
                P[a, o] *= decay[i, a] * decay[i, o]
        for a in range(r):
            for o in range(r):
                P[a, o] += decay[i, a] * t[a] * q[i, o] + q[i, a] * t[o] * decay[i, o] + variance * q[i, a] * q[i, o]
    return largest, deviations, buffer


@njit(cache=True, nogil=True)
def _dense(c: Array, g: Array, decay: Array, q: Array) -> Array:
    n, r = g.shape
    C = np.zeros((n, n))
    state = np.zeros((r, n))
    for i in range(n):
        for k in range(r):
            for j in range(i):
                C[i, j] += g[i, k] * state[k, j]
                state[k, j] *= decay[i, k]
            state[k, i] = q[i, k]
        C[i, i] = c[i]
    return C


@njit(cache=True, nogil=True)
def _inverse(c: Array, g: Array, decay: Array, q: Array) -> Array:
    n, r = g.shape
    Y = np.zeros((n, n))
    state = np.zeros((r, n))
    for i in range(n):
        for k in range(r):
            for j in range(i):
                Y[i, j] -= g[i, k] * state[k, j]
        Y[i, i] = 1.0
        for j in range(i + 1):
            Y[i, j] /= c[i]
        for k in range(r):
            for j in range(i + 1):
                state[k, j] = decay[i, k] * state[k, j] + q[i, k] * Y[i, j]
    return Y
