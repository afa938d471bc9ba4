"""The buffered strategy of an optimum, in time and memory linear in n.

X(v) = sum_j w_j (L L' + s_j D)^-1 is a state space of N w states: with S_j(k) the entries k .. k+w-1 of a column i of
the j-th inverse, S_j(k) = Phi_j(k) S_j(k+1) for k < i, Phi_j(k) a companion block with `transition` in its first row,
and S_j(i) = `inverse`[:, i]. So X[k, i] = p' Phi(k) ... Phi(i-1) s(i), k <= i, where s(i) stacks the blocks times
sqrt(w_j) and p picks the first entry of each block, times sqrt(w_j). The factor C of X = C'C, C LOWER, has the same
p and Phi: C[l, k] = p' Phi(k) ... Phi(l-1) K(l), with

    Pi(l) = Phi(l) (Pi(l+1) + K(l+1) K(l+1)') Phi(l)'
    c_l^2 = p' s(l) - p' Pi(l) p          K(l) = (s(l) - Pi(l) p) / c_l

1. Factor, backward: Pi = E'E has low numerical rank, so E is kept as a few rows, compressed at each step by the left
   singular vectors W of [K'; E']. W is the state space of C, in coordinates in which the observability Gramian is the
   identity. Only what meets a state that can be reached matters, so the singular vectors are those of [K'; E'] times
   the states under a few random input sequences: a randomized range finder (Halko, Martinsson, Tropp 2011, section
   4) for the block of C below and left of the step, whose singular values decay much faster than those of E.
2. Balance, forward: eigenvectors of the controllability Gramian are the coordinates of the balanced truncation; the
   first r of them are the best r, for every r at once.
3. Diagonalise: orthonormal changes of coordinates (QR, forward) make the transitions upper triangular, unit
   triangular ones (backward, stable because the decays come out in order) make them diagonal.
4. Normalise the columns, scale each buffer so that its decays are exact in the shipped precision, cast. What ships
   is judged by its own figures.

For a matrix C without that structure step 1 takes the blocks of C themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from mmfact.factorize.construct import dense
from mmfact.factorize.dual_structured import Sweeps
from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.optimum import Optimum, Progress, silent
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.buffered import BufferedStrategy, largest_buffers
from mmfact.factorize.workload import Workload, check_dense

Array = npt.NDArray[np.float64]
Signs = npt.NDArray[np.int8]

ROWS = 20  # of E; the optimum's blocks have hardly more singular values that the loss would feel
_MOST_ROWS = 64  # beyond the numerical rank of any structured workload
_MOST_SEARCHED = 128  # buffers for a matrix of the user, which may decay slowly; more only when asked for
_OVERSAMPLING = 8
_SPARE_ROWS = 6  # between the buffers asked for and the rows of E
# Rounding errs by about 2^-24 of the amplification in each row that float32 buffers give.
_STEADY = 1e4
_OUT_OF_HAND = 1e8
_FORGOTTEN = 1e-30  # coefficients below this are 0 in effect, and float32 could not hold them
_NEGLIGIBLE = 1e-8  # singular values below this change the loss by less than rounding does


def check_buffers(buffers: int, n: int) -> None:
    """Raise unless n allows that many buffers."""
    if not 1 <= buffers <= largest_buffers(n):
        why = (
            f"no block below the diagonal of an {n} x {n} matrix has a larger rank, so more could not improve anything"
            if largest_buffers(n) == max(1, n // 2)
            else f"more could not be stored or certified for n = {n}, nor would they improve anything"
        )
        raise WorkloadError(f"buffers = {buffers} must be between 1 and {largest_buffers(n)}: {why}")


def build(
    workload: Workload,
    optimum: Optimum,
    participation: Participation,
    *,
    buffers: int | None = None,
    tolerance: float = 1e-4,
    dtype: npt.DTypeLike = np.float32,
    on_progress: Callable[[Progress], None] = silent,
) -> BufferedStrategy:
    """The strategy with `buffers` buffers, or with the fewest whose excess, as shipped, is at most `tolerance`.

    Never more than the numerical rank of the optimum's blocks below the diagonal, nor, unless asked for, than 128.
    If no number reaches the tolerance, the most accurate strategy found.

    Raises
    ------
    WorkloadError
        `buffers` outside what n allows.
    CapacityError
        Neither the workload nor its solver is structured, and n is too large for n x n matrices.
    SolverError
        The multipliers' X(v) is not positive definite to working precision, or so few `buffers` give a strategy whose
        inverse grows without bound.
    """
    n = workload.n
    if buffers is not None:
        check_buffers(buffers, n)
    # A matrix of the user may decay slowly.
    searched = 0 if workload.structured else min(largest_buffers(n), _MOST_SEARCHED)
    rows = max(ROWS, (buffers or searched) + _SPARE_ROWS)
    if optimum.method == "structured":
        rows = min(rows, _MOST_ROWS)
        c, g, F, q = _factor_structured(optimum.evaluation.context, rows, on_progress)
    else:
        check_dense(n, "the buffered strategy of a workload without a banded inverse")
        c, g, F, q = _factor_dense(dense.build(workload, optimum, participation).to_dense(), rows, on_progress)
    if not (np.isfinite(c).all() and np.isfinite(F).all()):
        raise SolverError(
            "the optimum is not positive definite to working precision, so it has no factor to stream; "
            "use a workload with rates that vary less"
        )
    most = min(rows - _SPARE_ROWS, largest_buffers(n))
    g, F, q, hankel = _balance(g, F, q, most)
    most = max(1, min(most, int((hankel > _NEGLIGIBLE * c.max()).sum())))
    tried: dict[int, _Attempt] = {}

    def meets(r: int) -> bool:
        if r not in tried:
            on_progress(Progress(stage=f"{r} buffers"))
            tried[r] = _attempt(c, *_diagonalise(g, F, q, r), np.dtype(dtype), workload, optimum, participation)
        return tried[r].steady and tried[r].excess <= tolerance

    if buffers is not None:
        meets(min(buffers, most))
    else:
        _fewest(meets, most)
    enough = [r for r in tried if meets(r)]
    best = min(enough) if enough else min(tried, key=lambda r: (not tried[r].steady, tried[r].excess))
    shipped = tried[best].strategy
    if shipped is None:
        raise SolverError(
            f"{best} buffers give a strategy whose noise would grow without bound; use more buffers, or leave their "
            "number out to have the fewest that suffice"
        )
    return shipped


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A strategy as it would ship, its excess, and whether float32 buffers hold it."""

    strategy: BufferedStrategy | None
    excess: float = math.inf
    steady: bool = False


def _attempt(
    c: Array,
    g: Array,
    decay: Array,
    q: Array,
    dtype: np.dtype[Any],
    workload: Workload,
    optimum: Optimum,
    participation: Participation,
) -> _Attempt:
    """Too few buffers can give a C whose inverse grows without bound: nothing to stream, and nothing to compute."""
    try:
        strategy = _ship(c, g, decay, q, dtype)
        amplification = strategy.amplification()
        if not amplification <= _OUT_OF_HAND:
            return _Attempt(None)
        loss, _ = strategy.errors(workload, participation)
    except SolverError:  # coefficients beyond the range of the precision
        return _Attempt(None)
    return _Attempt(strategy, loss / optimum.lower_bound - 1, amplification <= _STEADY)


def _fewest(meets: Callable[[int], bool], most: int) -> None:
    """Try 1, 2, 4, .. until the tolerance is met, then bisect; if none of these meets it, the rest."""
    low, high = 0, 1
    while not meets(high):
        if high == most:
            next((r for r in range(1, most) if meets(r)), None)
            return
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if meets(middle):
            high = middle
        else:
            low = middle


def _ship(c: Array, g: Array, decay: Array, q: Array, dtype: np.dtype[np.floating]) -> BufferedStrategy:
    """Columns of norm 1, then the cast.

    A rounded decay would be felt for as long as the buffer remembers, up to n steps. So the buffer's unit changes from
    step to step by what rounding has changed its decay, and only c, g and q, felt once, are really rounded.
    """
    norms = BufferedStrategy(c.copy(), g.copy(), decay.copy(), q.copy()).column_norms()
    decay = np.where(decay < _FORGOTTEN, 0.0, decay)
    shipped = decay.astype(dtype)
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.where(shipped > 0, decay / shipped.astype(np.float64), 1.0)
    unit = np.cumprod(np.vstack([np.ones_like(change[:1]), change]), axis=0)
    g, q = g * unit[:-1], q / norms[:, None] / unit[1:]
    return BufferedStrategy(
        (c / norms).astype(dtype),
        np.where(np.abs(g) < _FORGOTTEN, 0.0, g).astype(dtype),
        shipped,
        np.where(np.abs(q) < _FORGOTTEN, 0.0, q).astype(dtype),
    )


def _signs(n: int, columns: int) -> Signs:
    """Random input sequences, the same at every call."""
    return (2 * np.random.default_rng(0).integers(0, 2, size=(n, columns), dtype=np.int8) - 1).astype(np.int8)


def _factor_structured(
    sweeps: Sweeps, rows: int, on_progress: Callable[[Progress], None]
) -> tuple[Array, Array, Array, Array]:
    """(c, g, F, q) of C: z = c y + g . h, h <- F h + q y, with `rows` states."""
    poles, w, n = sweeps.transition.shape
    root = np.sqrt(sweeps.poles.weights)
    inputs = _signs(n, rows + _OVERSAMPLING)
    # The forward states are wanted backward: keep every `segment`-th and run forward again from there.
    segment = math.isqrt(n - 1) + 1
    starts = range(0, n, segment)
    kept = np.zeros((len(starts), inputs.shape[1], poles * w))
    for part, start in enumerate(starts[:-1]):
        kept[part + 1] = _forward(sweeps.transition, root, inputs, start, segment, kept[part])[segment]
    c, g = np.empty(n), np.empty((n, rows))
    F, q = np.empty((n, rows, rows)), np.empty((n, rows))
    E = np.zeros((rows, poles * w))
    for part in range(len(starts) - 1, -1, -1):
        start = starts[part]
        steps = min(segment, n - start)
        states = _forward(sweeps.transition, root, inputs, start, steps, kept[part])
        _factor_segment(root, sweeps.transition, sweeps.inverse, states, start, E, c, g, F, q)
        on_progress(Progress(stage="strategy", fraction=1 - start / n))
    return c, g, F, q


@njit(cache=True, nogil=True)
def _forward(transition: Array, root: Array, inputs: Signs, first: int, steps: int, initial: Array) -> Array:
    """states[k - first + 1] = Phi(k)' (states[k - first] + p inputs[k]), shape (steps + 1, sequences, N w)."""
    poles, w, _ = transition.shape
    states = np.zeros((steps + 1, *initial.shape))
    states[0] = initial
    for k in range(first, first + steps):
        now, then = states[k - first], states[k - first + 1]
        for e in range(len(initial)):
            for j in range(poles):
                o = j * w
                head = now[e, o] + root[j] * inputs[k, e]
                for a in range(w):
                    then[e, o + a] = transition[j, a, k] * head
                for a in range(w - 1):
                    then[e, o + a] += now[e, o + a + 1]
    return states


@njit(cache=True, nogil=True)
def _factor_segment(
    root: Array,
    transition: Array,
    inverse: Array,
    states: Array,
    start: int,
    E: Array,
    c: Array,
    g: Array,
    F: Array,
    q: Array,
) -> None:
    """Step 1 from step start + len(states) - 2 down to `start`; E comes in as left by the later steps."""
    poles, w, _ = transition.shape
    rows, size = E.shape
    stack = np.zeros((rows + 1, size))
    s = np.empty(size)
    for i in range(start + len(states) - 2, start - 1, -1):
        for j in range(poles):
            o = j * w
            for a in range(w):
                s[o + a] = root[j] * inverse[j, a, i]
            for e in range(rows):  # row e of E times Phi(i)'
                first = 0.0
                for a in range(w):
                    first += transition[j, a, i] * E[e, o + a]
                for a in range(w - 1, 0, -1):
                    stack[e + 1, o + a] = E[e, o + a - 1]
                stack[e + 1, o] = first
        diagonal = 0.0
        for j in range(poles):
            diagonal += root[j] * s[j * w]
        for e in range(rows):
            total = 0.0
            for j in range(poles):
                total += root[j] * stack[e + 1, j * w]
            q[i, e] = total
            diagonal -= total * total
        c[i] = np.sqrt(diagonal)
        for o in range(size):
            total = s[o]
            for e in range(rows):
                total -= q[i, e] * stack[e + 1, o]
            stack[0, o] = total / c[i]
        if not c[i] > 0.0:  # the caller sees it; an SVD of NaN might never end
            return
        W = np.linalg.svd(stack @ states[i - start].T, full_matrices=False)[0]
        basis = np.ascontiguousarray(W[:, :rows].T)
        E[:] = basis @ stack
        for e in range(rows):
            g[i, e] = basis[e, 0]
            for a in range(rows):
                F[i, a, e] = basis[e, 1 + a]


def _factor_dense(C: Array, rows: int, on_progress: Callable[[Progress], None]) -> tuple[Array, Array, Array, Array]:
    """The same from the blocks of C: E holds C[i:, :i] in the basis of its leading left singular vectors."""
    n = len(C)
    rows = min(rows, n)
    inputs = _signs(n, rows + _OVERSAMPLING).astype(np.float64)
    g, F, q = np.empty((n, rows)), np.empty((n, rows, rows)), np.empty((n, rows))
    E = np.zeros((rows, n))
    for i in range(n - 1, -1, -1):
        q[i] = E[:, i]
        stack = np.vstack([C[i, :i], E[:, :i]])
        W = np.linalg.svd(stack @ inputs[:i], full_matrices=False)[0]
        g[i], F[i] = W[0, :rows], W[1:, :rows]
        E = W[:, :rows].T @ stack
        if i % 64 == 0:
            on_progress(Progress(stage="strategy", fraction=1 - i / n))
    return np.diag(C).copy(), g, F, q


@njit(cache=True, nogil=True)
def _balance(g: Array, F: Array, q: Array, keep: int) -> tuple[Array, Array, Array, Array]:
    """The system in the leading eigenvectors of its controllability Gramian, and the largest of each singular value.

    The tiny Gramian at the start keeps directions that cannot be reached yet from turning at every step.
    """
    n, rows = g.shape
    P = np.eye(rows) * 1e-18
    V = np.eye(rows)[:, :keep].copy()
    bg, bF, bq = np.empty((n, keep)), np.empty((n, keep, keep)), np.empty((n, keep))
    hankel = np.zeros(rows)
    for i in range(n):
        bg[i] = V.T @ g[i]
        P = F[i] @ P @ F[i].T + np.outer(q[i], q[i])
        values, vectors = np.linalg.eigh(P)
        for k in range(rows):
            hankel[k] = max(hankel[k], np.sqrt(max(values[rows - 1 - k], 0.0)))
        new = np.empty((rows, keep))
        for k in range(keep):
            sign = 0.0
            for a in range(rows):
                sign += vectors[a, rows - 1 - k] * V[a, k]
            for a in range(rows):
                new[a, k] = vectors[a, rows - 1 - k] if sign >= 0 else -vectors[a, rows - 1 - k]
        bF[i] = new.T @ F[i] @ V
        bq[i] = new.T @ q[i]
        V = new
    return bg, bF, bq, hankel


@njit(cache=True, nogil=True)
def _diagonalise(g: Array, F: Array, q: Array, r: int) -> tuple[Array, Array, Array]:
    """(g, decay, q) of the leading r states with diagonal transitions.

    In the first r steps only as many directions as there were steps have been reached. They come first, so that those
    not yet reached, whose transitions mean nothing, do not disturb them.
    """
    n = len(g)
    T = np.eye(r)
    tg, R, tq = np.empty((n, r)), np.empty((n, r, r)), np.empty((n, r))
    for i in range(n):
        tg[i] = T.T @ g[i, :r]
        moved = np.ascontiguousarray(F[i, :r, :r]) @ T
        reached = min(i, r)
        if reached < r:
            moved[:, reached] = q[i, :r]
        Q, upper = np.linalg.qr(moved)
        for k in range(r):
            sign = -1.0 if upper[k, k] < 0 else 1.0
            for a in range(r):
                R[i, k, a] = sign * upper[k, a] if a < reached else 0.0
                T[a, k] = sign * Q[a, k]
        tq[i] = T.T @ q[i, :r]
    decay = np.empty((n, r))
    later, U = np.eye(r), np.eye(r)  # R_i U_i = U_(i+1) diag(decay_i)
    for i in range(n - 1, -1, -1):
        for k in range(r - 1, -1, -1):  # tq[i] is a state of step i + 1
            for m in range(k + 1, r):
                tq[i, k] -= later[k, m] * tq[i, m]
        for k in range(r):
            decay[i, k] = R[i, k, k]
            for j in range(k - 1, -1, -1):
                total = later[j, k] * R[i, k, k]
                for m in range(j + 1, k + 1):
                    total -= R[i, j, m] * U[m, k]
                # a state that is forgotten at once, as at the last step, has nothing to be separated from
                U[j, k] = total / R[i, j, j] if R[i, j, j] > 1e-12 else 0.0
        tg[i] = U.T @ tg[i]
        later[:] = U
    return tg, decay, tq
