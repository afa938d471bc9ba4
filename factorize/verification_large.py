"""A certificate's figures in time linear in n, by means that share nothing with the compiler.

The nuclear norm T of M = A diag(v)^(1/2), which proves the lower bound, is here an integral over
Kalman filters. For every singular value sigma the integral of log(1 + sigma^2 / s^2) over s > 0 is
pi sigma, hence

    T = (1/pi) integral_0^inf log det(I + M M' / s^2) ds

and the determinant is that of the covariance of the iterates x = M w, w white, when each is observed
under noise of variance s^2: the product of the innovation variances of the filter that tracks the
optimizer's own state (momentum buffer, iterate, average). Not one line of the compiler's way (poles
of x^(-1/2), banded factors of A^-1, selected inversion) is on this one.

Sensitivity and loss are those of the state space that streams the strategy, by factors of its Gramians, so
that no variance is a difference of large numbers.
"""

from __future__ import annotations

import math
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from mmfact.factorize.workload import Workload

Array = npt.NDArray[np.float64]

# Trapezoidal rule in t = log s, the same relative error for every singular value: with |F| the Fourier
# transform of e^t log(1 + e^(-2t)), which is pi / (|1 + i omega| cosh(pi omega / 2)), it is at most
# 2 sum_k |F(2 pi k / h)| / pi < 4 e^(-pi^2 / h) / (2 pi / h) = 3e-14 for h = 1/3.
_STEP = 1 / 3
# What the nodes left out on either side may add up to, relative to T.
_TAIL = 1e-14
# Logarithms are summed in runs of this length, and the runs then summed.
_RUN = 256
# Averaging with a smaller ema changes no singular value by more than twice its own size, relatively.
_SMALLEST_EMA = 2.0**-60
_SEED = 20220215


class StateSpace(Protocol):
    """What this file asks of a strategy: arrays c (n,), g, decay and q (n, r)."""

    def coefficients(self) -> dict[str, npt.NDArray[Any]]: ...


@dataclass(frozen=True)
class Figures:
    """What the coefficients of a streamed strategy amount to.

    Attributes
    ----------
    sensitivity : float
        max_j norm2(C[:, j]).
    squared_error : float
        normF(B)^2.
    largest_row : float
        max_i norm2(B[i, :]).
    """

    sensitivity: float
    squared_error: float
    largest_row: float


def nuclear_norm(workload: Workload, v: Array) -> float:
    """T(v), the nuclear norm of A diag(v)^(1/2), of a structured workload; O(n) for each of some 220 nodes.

    Relative error: 3e-14 by the rule, 2e-14 by what it leaves out at both ends, and rounding; measured 1e-13 at
    n = 1048576. NaN where v or the rates leave nothing to compute.
    """
    unit, rates, coupled, decoupled = _optimizer(workload)
    scale = float(v.max())
    if not 0 < scale < math.inf:
        return math.nan
    weights, n = v / scale, workload.n
    ema = workload.ema if workload.ema >= _SMALLEST_EMA else 0.0

    def log_determinant(s: float) -> float:
        return float(_filter(rates, weights, workload.beta, coupled, decoupled, ema, s * s)[0])

    energy = float(_filter(rates, weights, workload.beta, coupled, decoupled, ema, math.inf)[1])
    with np.errstate(invalid="ignore", divide="ignore"):
        mean_log = float(np.log(np.sqrt(weights) * rates * (1 - ema)).mean())
    if not (0 < energy < math.inf and math.isfinite(mean_log)):
        return math.nan
    # T is at least normF(M), and at least n times the geometric mean of the singular values, |det M|^(1/n).
    least = max(math.sqrt(energy), n * math.exp(mean_log))
    first, last = _ends(n, energy * (1 + 1e-6), least * (1 - 1e-6))
    nodes = np.exp(_STEP * np.arange(math.floor(first / _STEP), math.ceil(last / _STEP) + 1))
    with ThreadPoolExecutor(_threads()) as pool:
        terms = [s * value for s, value in zip(nodes, pool.map(log_determinant, nodes), strict=True)]
    return math.fsum(terms) * _STEP / math.pi * unit * math.sqrt(scale) if np.isfinite(terms).all() else math.nan


def figures(workload: Workload, strategy: StateSpace) -> Figures:
    """Sensitivity, squared error and largest row of a streamed strategy, O(n (r + 3)^3).

    Measured against double-double: 2e-14 relative at n = 131072, 1e-12 at n = 4194304.
    """
    c, g, decay, q = _arrays(strategy)
    unit, rates, coupled, decoupled = _optimizer(workload)
    rows = _error_energies(c, g, decay, q, rates, workload.beta, coupled, decoupled, workload.ema)
    columns = column_energies(c, g, decay, q)
    return Figures(
        sensitivity=math.sqrt(float(columns.max())),
        squared_error=float(rows.sum()) * unit * unit,
        largest_row=math.sqrt(float(rows.max())) * unit,
    )


def product_error(workload: Workload, strategy: StateSpace) -> float:
    """How far B C is from A on a handful of gradients: max |(B C - A) G| / max |A G|, the largest.

    Each G goes through the recursion of C, then of C^-1, then of the optimizer. They are unit vectors
    (the first step, and a random one at the start, in the middle and at the end), and one of random normals.
    """
    c, g, decay, q = _arrays(strategy)
    _, rates, coupled, decoupled = _optimizer(workload)
    n = workload.n
    rng = np.random.default_rng(_SEED)
    steps = [0, *(int(rng.integers(n * k // 3, max(n * (k + 1) // 3, n * k // 3 + 1))) for k in range(3))]
    worst = 0.0
    for step in [*steps, None]:
        gradients = rng.standard_normal(n) if step is None else np.zeros(n)
        if step is not None:
            gradients[step] = 1.0
        iterates, strays = _round_trip(
            c, g, decay, q, gradients, rates, workload.beta, coupled, decoupled, workload.ema
        )
        worst = float(np.maximum(worst, strays / iterates))  # keeps a NaN
    return worst


def _optimizer(workload: Workload) -> tuple[float, Array, float, float]:
    """(unit, rates / unit, coupled decay, decoupled decay) with the unit the largest rate: nothing overflows.

    A is proportional to the rates where the decay is inversely so; a power of two makes it exact.
    """
    unit = math.ldexp(1.0, math.frexp(float(workload.learning_rates.max()))[1])
    decay, coupled = workload.weight_decay * unit, workload.weight_decay_kind == "coupled"
    return unit, workload.learning_rates / unit, decay if coupled else 0.0, 0.0 if coupled else decay


def _arrays(strategy: StateSpace) -> tuple[npt.NDArray[Any], ...]:
    found = strategy.coefficients()
    return tuple(np.ascontiguousarray(found[name]) for name in ("c", "g", "decay", "q"))


def _threads() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _ends(n: int, energy: float, least: float) -> tuple[float, float]:
    """(first, last) value of log s outside of which the nodes add up to at most 2 `_TAIL` `least`.

    With E = normF(M)^2: log det(I + M M' / s^2) <= E / s^2, so the nodes above s add at most E / (pi s). It is
    also at most n log(1 + E / s^2), and s log(1 + E / s^2) rises while s < sqrt(E) / 2: the nodes below s add
    at most n s (log(1 + E / s^2) + 2) / pi.
    """
    last = math.log(energy / (math.pi * _TAIL * least))
    s = math.sqrt(energy) / 2
    while n * s * (math.log1p(energy / s / s) + 2) > math.pi * _TAIL * least:
        s /= 2
    return math.log(s), last


@njit(cache=True, nogil=True, error_model="numpy")
def _filter(
    rates: Array, v: Array, beta: float, coupled: float, decoupled: float, ema: float, noise: float
) -> tuple[float, float]:
    """(sum_i log(innovation variance_i / noise), sum_i predicted variance_i) for observations of variance `noise`.

    The covariance of the state (average a, iterate x, buffer m) is kept as L diag(d) L', L unit lower
    triangular, in this order. Observing a then only scales the first term, d_a <- d_a noise / (d_a + noise).
    The optimizer's step turns the columns of L into (A_k, X_k, M_k), the last one taking up the fresh
    gradient; they are made triangular again by weighted orthogonalisation, whose remainders come as 2 x 2
    minors: those of the step itself, products of its coefficients. So every variance is a sum of positive terms
    and a small one keeps its digits: no difference of large numbers is ever taken for it.
    """
    d_a = d_x = d_m = x_a = m_a = m_x = 0.0
    fresh = 1.0 - ema
    total = run = energy = 0.0
    for i in range(len(rates)):
        rate, keep = rates[i], 1.0 - decoupled * rates[i]
        w = beta * beta * d_m + v[i]  # the buffer's own term and the gradient have the same direction from here on
        if ema == 0.0:  # a = x
            M = beta * m_x - coupled
            X = keep + rate * M
            predicted = d_x * X * X + rate * rate * w
            m_x = (d_x * X * M + rate * w) / predicted
            d_m = keep * keep * d_x * w / predicted
            ratio = predicted / noise
            d_x = predicted / (1.0 + ratio)
        else:
            M1, M2 = beta * m_a - coupled * x_a, beta * m_x - coupled
            X1, X2 = keep * x_a + rate * M1, keep + rate * M2
            A1, A2, A3 = ema + fresh * X1, fresh * X2, fresh * rate
            predicted = d_a * A1 * A1 + d_x * A2 * A2 + w * A3 * A3
            within = d_x * X2 * X2 + w * rate * rate
            slope = d_x * X2 * (ema * M2 + fresh * keep * beta * (x_a * m_x - m_a))
            slope += w * rate * (ema + fresh * keep * x_a)
            x_a = (d_a * A1 * X1 + d_x * A2 * X2 + w * A3 * rate) / predicted
            m_a = (d_a * A1 * M1 + d_x * A2 * M2 + w * A3) / predicted
            m_x = slope / (ema * within)
            d_m = keep * keep * d_x * w / within
            d_x = ema * ema * d_a * within / predicted
            ratio = predicted / noise
            d_a = predicted / (1.0 + ratio)
        energy += predicted
        run += math.log1p(ratio)
        if i % _RUN == 0:
            total += run
            run = 0.0
    return total + run, energy


@njit(cache=True, nogil=True, error_model="numpy")
def _error_energies(
    c: npt.NDArray[Any],
    g: npt.NDArray[Any],
    decay: npt.NDArray[Any],
    q: npt.NDArray[Any],
    rates: Array,
    beta: float,
    coupled: float,
    decoupled: float,
    ema: float,
) -> Array:
    """norm2(B[i, :])^2: the variances of the iterates when C^-1 and the optimizer run on white noise.

    F diag(d) F' is the covariance of the state (average, iterate, buffer, the r buffers h); a step appends the
    fresh noise as a column, and `_triangle` takes it in.
    """
    n, r = g.shape
    F, d, y = np.eye(r + 3, r + 4), np.zeros(r + 4), np.empty(r + 4)
    out = np.empty(n)
    for i in range(n):
        scale, rate = np.float64(c[i]), rates[i]
        keep = 1.0 - decoupled * rate
        y[:] = 0.0
        for k in range(r):
            y -= np.float64(g[i, k]) * F[3 + k]
        y[r + 3] = d[r + 3] = 1.0
        y /= scale
        for k in range(r):
            F[3 + k] = np.float64(decay[i, k]) * F[3 + k] + np.float64(q[i, k]) * y
        F[2] = beta * F[2] + y - coupled * F[1]
        F[1] = keep * F[1] + rate * F[2]
        F[0] = ema * F[0] + (1.0 - ema) * F[1]
        _triangle(F, d)
        out[i] = d[0]
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def column_energies(c: npt.NDArray[Any], g: npt.NDArray[Any], decay: npt.NDArray[Any], q: npt.NDArray[Any]) -> Array:
    """norm2(C[:, j])^2 = c_j^2 + q_j' O_(j+1) q_j, with O_j = diag(decay_j) O_(j+1) diag(decay_j) + g_j g_j'.

    O = F diag(d) F'.
    """
    n, r = g.shape
    F, d, seen = np.eye(r, r + 1), np.zeros(r + 1), np.empty(r + 1)
    out = np.empty(n)
    for j in range(n - 1, -1, -1):
        seen[:] = 0.0
        for k in range(r):
            seen += np.float64(q[j, k]) * F[k]
        out[j] = np.float64(c[j]) ** 2 + (seen * seen * d).sum()
        for k in range(r):
            F[k] *= np.float64(decay[j, k])
            F[k, r] = g[j, k]
        d[r] = 1.0
        _triangle(F, d)
    return out


@njit(cache=True, nogil=True, error_model="numpy")
def _triangle(F: Array, d: Array) -> None:
    """F, shape (k, k + 1), to unit lower triangular and a column of zeros, with F diag(d) F' unchanged.

    Modified weighted Gram-Schmidt on the rows (Thornton's time update). A weight only collects positive terms: the
    variance of a plain sum is the plain sum that it should be, where reflections of a square root drift by
    0.1 eps a step.
    """
    rows, columns = F.shape
    lower, weights = np.eye(rows, columns), np.zeros(columns)
    for j in range(rows):
        scaled = d * F[j]
        for col in range(columns):
            weights[j] += scaled[col] * F[j, col]
        if weights[j] == 0.0:
            continue
        for row in range(j + 1, rows):
            along = 0.0
            for col in range(columns):
                along += scaled[col] * F[row, col]
            lower[row, j] = along / weights[j]
            for col in range(columns):
                F[row, col] -= lower[row, j] * F[j, col]
    F[:] = lower
    d[:] = weights


@njit(cache=True, nogil=True, error_model="numpy")
def _round_trip(
    c: npt.NDArray[Any],
    g: npt.NDArray[Any],
    decay: npt.NDArray[Any],
    q: npt.NDArray[Any],
    gradients: Array,
    rates: Array,
    beta: float,
    coupled: float,
    decoupled: float,
    ema: float,
) -> tuple[float, float]:
    """(max |A G|, max |A (C^-1 C G - G)|); the second is infinite where a number is not finite."""
    n, r = g.shape
    encode, decode = np.zeros(r), np.zeros(r)
    state = np.zeros((3, 2))  # buffer, iterate, average; of G and of what the round trip adds to it
    largest = stray = 0.0
    for i in range(n):
        total = np.float64(c[i]) * gradients[i]
        for k in range(r):
            total += np.float64(g[i, k]) * encode[k]
        returned = total
        for k in range(r):
            returned -= np.float64(g[i, k]) * decode[k]
        returned /= np.float64(c[i])
        for k in range(r):
            encode[k] = np.float64(decay[i, k]) * encode[k] + np.float64(q[i, k]) * gradients[i]
            decode[k] = np.float64(decay[i, k]) * decode[k] + np.float64(q[i, k]) * returned
        for which in range(2):
            gradient = gradients[i] if which == 0 else returned - gradients[i]
            state[0, which] = beta * state[0, which] + gradient - coupled * state[1, which]
            state[1, which] = (1.0 - decoupled * rates[i]) * state[1, which] + rates[i] * state[0, which]
            state[2, which] = ema * state[2, which] + (1.0 - ema) * state[1, which]
        if not (math.isfinite(state[2, 0]) and math.isfinite(state[2, 1])):
            return 1.0, math.inf
        largest, stray = max(largest, abs(state[2, 0])), max(stray, abs(state[2, 1]))
    return largest, stray
