"""Classic mechanisms, each with its exact loss on any workload: what a compiled artifact is set beside.

Every one of them is a gradient-space noising N (what is added to the gradients is N Z, Z white) with a
sensitivity; on a workload A its decoder is B = A N, loss = sensitivity^2 normF(B)^2. With S = tril(ones):

    identity            N = I: independent noise at every step
    tree                N = S^-1 B_S: a prefix is the sum of the fewest completed nodes of the binary tree
                        (Dwork, Naor, Pitassi, Rothblum 2010; Chan, Shi, Song 2011)
    honaker-online      the same with each node's sum estimated from all nodes below it (Honaker 2015)
    honaker-full        N = H^+, the least squares on the whole tree matrix H
    sqrt-toeplitz       N = C^-1, C Toeplitz with the coefficients of (1 - z)^(-1/2) (Fichtenberger, Henzinger,
                        Upadhyay 2023)
    optimal-toeplitz    N = C^-1, C the lower-triangular Toeplitz of the smallest loss on this very workload

and both Toeplitz ones with the columns of C scaled to norm 1. Mechanisms made for prefix sums meet another
workload by post-processing: their noise goes through the optimizer.

Structured workloads are linear in time, up to a logarithm: the covariance of (optimizer, what the mechanism
remembers) runs forward and gives the variance of each iterate. Custom matrices go row by row. Only the optimal
Toeplitz needs n x n matrices, and is left out above `LARGEST_DENSE_BASELINE`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy.fft
import scipy.linalg.lapack
import scipy.optimize
import scipy.signal

from mmfact.factorize.baseline_recursions import add_modes, filtered_noise, merging_noise
from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.participation import Participation
from mmfact.factorize.workload import Workload

Array = npt.NDArray[np.float64]

# The optimal Toeplitz holds three n x n matrices and takes n^3 / 3 multiply-adds, a few seconds here.
LARGEST_DENSE_BASELINE = 4096

_EPS = float(np.finfo(np.float64).eps)
_ROWS = 256  # rows of A at a time
_TOO_FAR = 2000.0  # above any log(loss) that is finite; a line search interpolates it, as it would not infinity

NORMALISED = ", columns normalised"


@dataclass(frozen=True)
class Baseline:
    """A mechanism's figures on one workload.

    Attributes
    ----------
    name, how : str
        What it is called and, in one line, what it is.
    n : int
        Steps.
    loss, max_error : float
        sensitivity^2 normF(B)^2 and sensitivity max_i norm2(B[i, :]), rounded up by the bound of their sums
        (linear-time recursions err by up to about 1e-10 at a million steps themselves).
    sensitivity : float
        Rounded up.
    buffers : int or None
        Vectors of model size that streaming keeps (n: no short recursion gives this very mechanism); None
        where nobody said.
    """

    name: str
    how: str
    n: int
    loss: float
    max_error: float
    sensitivity: float
    buffers: int | None

    @property
    def rmse(self) -> float:
        """sqrt(loss / n)."""
        return math.sqrt(self.loss / self.n)


@dataclass(frozen=True, eq=False)
class _Mechanism:
    """A mechanism before it meets a workload: norm2(B[i, :])^2 from A's state space or from rows of A."""

    name: str
    how: str
    buffers: int
    column_norms: Array
    by_rows: Callable[[Array], Array]
    by_steps: Callable[[Array, Array], Array] | None = None


def baselines(
    workload: Workload, participation: Participation, *, on_progress: Callable[[str], None] = lambda name: None
) -> list[Baseline]:
    """All baselines that can be had for `workload`; `left_out` names the others.

    Parameters
    ----------
    on_progress : callable, optional
        Is given each baseline's name before it is computed.
    """
    return [_on_workload(m, workload, participation) for m in _mechanisms(workload, on_progress)]


def left_out(workload: Workload) -> dict[str, str]:
    """The baselines that `baselines` does not compute for `workload`: name -> why."""
    if workload.n <= LARGEST_DENSE_BASELINE:
        return {}
    why = f"needs n x n matrices; computed up to n = {LARGEST_DENSE_BASELINE}"
    return dict.fromkeys(("optimal-toeplitz", "optimal-toeplitz" + NORMALISED), why)


def _on_workload(mechanism: _Mechanism, workload: Workload, participation: Participation) -> Baseline:
    if workload.structured and mechanism.by_steps is not None:
        rows = mechanism.by_steps(*workload.state_space())
    else:
        A = workload.dense() if workload.matrix is None else workload.matrix
        blocks = range(0, workload.n, _ROWS)
        rows = np.concatenate([mechanism.by_rows(A[start : start + _ROWS]) for start in blocks])
    sensitivity = participation.sensitivity(mechanism.column_norms)
    return _figures(mechanism.name, mechanism.how, mechanism.buffers, sensitivity, rows)


def _figures(name: str, how: str, buffers: int | None, sensitivity: float, rows: Array) -> Baseline:
    if not (math.isfinite(sensitivity) and sensitivity > 0):
        raise SolverError(
            f"the sensitivity of {name} is {sensitivity!r}; it must be positive and finite, so give that of the "
            "strategy whose noise this is"
        )
    n, up = len(rows), 1 + (len(rows) + 2) * _EPS
    loss = sensitivity * sensitivity * math.fsum(rows) * up
    return Baseline(name, how, n, loss, sensitivity * math.sqrt(float(rows.max())) * up, sensitivity, buffers)


def _energies(rows: Array) -> Array:
    return np.einsum("ij,ij->i", rows, rows)


def _mechanisms(workload: Workload, on_progress: Callable[[str], None]) -> Iterator[_Mechanism]:
    n = workload.n
    cheap: dict[str, Callable[[], _Mechanism]] = {
        "identity": lambda: _identity(n),
        "tree": lambda: _tree(n),
        "honaker-online": lambda: _honaker_online(n),
        "honaker-full": lambda: _honaker_full(n),
        "sqrt-toeplitz": lambda: _square_root_toeplitz(n, False),
        "sqrt-toeplitz" + NORMALISED: lambda: _square_root_toeplitz(n, True),
    }
    for name, build in cheap.items():
        on_progress(name)
        yield build()
    if n <= LARGEST_DENSE_BASELINE:
        on_progress("optimal-toeplitz")
        c = optimal_toeplitz(workload)
        how = "the Toeplitz strategy of the smallest loss on this workload"
        yield _toeplitz("optimal-toeplitz", how, c, False)
        on_progress("optimal-toeplitz" + NORMALISED)
        yield _toeplitz("optimal-toeplitz", how, c, True)


# --- identity ---------------------------------------------------------------------------------------------------


def _identity(n: int) -> _Mechanism:
    one = np.ones(1)  # 1 = (1 - z) times 1 / (1 - z), whose coefficients are one exponential that does not decay

    def by_steps(Phi: Array, b: Array) -> Array:
        return filtered_noise(Phi, b, np.ones(n), one, one)

    return _Mechanism("identity", "independent noise at every step, as in DP-SGD", 0, np.ones(n), _energies, by_steps)


# --- binary trees -----------------------------------------------------------------------------------------------


def _tree(n: int) -> _Mechanism:
    levels = n.bit_length()
    how = "binary tree: a prefix is the sum of the fewest completed nodes"
    return _merging("tree", how, n, np.ones(levels), np.zeros(levels))


def _honaker_online(n: int) -> _Mechanism:
    """A node's sum is known from itself (variance 1) and from its two children's estimates (variance 2 v)."""
    levels = n.bit_length()
    own, child, v = np.ones(levels), np.zeros(levels), 1.0
    for level in range(1, levels):
        own[level], child[level] = 2 * v / (2 * v + 1), 1 / (2 * v + 1)
        v = own[level]  # the variance of the best combination: 1 / (1 + 1 / (2 v))
    how = "binary tree: each prefix from all nodes completed so far, at minimum variance"
    return _merging("honaker-online", how, n, own, child)


def _merging(name: str, how: str, n: int, own: Array, child: Array) -> _Mechanism:
    """Completed subtrees whose estimates merge like a binary counter: E = own z + child (E_left + E_right).

    A prefix is the sum of the estimates that stand, one for each bit of its length. n need not be a power of two:
    nodes that are not complete after n steps are never released, so that step j is in as many nodes as there
    are levels l with its interval of 2^l steps inside [0, n), and step 0 in floor(log2 n) + 1.
    """
    steps = np.arange(n)
    nodes = np.sum([((steps >> level) + 1) << level <= n for level in range(len(own))], axis=0)

    def by_rows(A: Array) -> Array:
        # B's column of a node is own R, with R = D + child R_parent and D = A[:, the step at which the node's
        # estimate joins the prefix] - A[:, the step at which it leaves again]
        energies, above = np.zeros(len(A)), np.zeros((len(A), 0))
        for level in reversed(range(len(own))):
            ends = np.arange((1 << level) - 1, n, 1 << level)  # the steps that complete a node
            lefts, rights = ends[::2], ends[1::2]
            R = np.zeros((len(A), len(ends)))
            R[:, ::2] = A[:, lefts]  # a left node stands from its completion to its sibling's,
            R[:, : 2 * len(rights) : 2] -= A[:, rights]  # a right one merges at once
            if level + 1 < len(own):
                R[:, : 2 * len(rights)] += child[level + 1] * np.repeat(above, 2, axis=1)
            energies += own[level] ** 2 * _energies(R)
            above = R
        return energies

    def by_steps(Phi: Array, b: Array) -> Array:
        return merging_noise(Phi, b, own, child)

    return _Mechanism(name, how, len(own), np.nextafter(np.sqrt(nodes), np.inf), by_rows, by_steps)


def _honaker_full(n: int) -> _Mechanism:
    """H is the tree of the next power of two, its first n columns; each of them is in every level."""

    def by_rows(A: Array) -> Array:
        energies = np.zeros(len(A))
        for u, width in _tree_modes(n):
            energies += _energies(np.add.reduceat(A * u, np.arange(0, n, width), axis=1))
        return energies

    def by_steps(Phi: Array, b: Array) -> Array:
        energies = np.zeros(n)
        for u, width in _tree_modes(n):
            add_modes(Phi, b, u, width, energies)
        return energies

    norm = np.nextafter(math.sqrt((n - 1).bit_length() + 1), np.inf)
    how = "binary tree: each prefix by least squares on all nodes, the tree of the next power of two"
    return _Mechanism("honaker-full", how, n, np.full(n, norm), by_rows, by_steps)


def _tree_modes(n: int) -> Iterator[tuple[Array, int]]:
    """Vectors u and widths with (H'H)^-1 = sum over (u, width) and blocks of that width of u_block u_block'.

    Every node above the leaves adds 1 1' to K = blockdiag(K_left, K_right), its children's part of H'H. With
    w = K^-1 1 and t = 1'w of each, so that K^-1 = (modes of its own) + w w' / t, Sherman and Morrison give

        w_left w_left' / t_left + w_right w_right' / t_right = (w w' / t of both) + u u',
        u = (t_right w_left - t_left w_right) / sqrt(t_left t_right (t_left + t_right)),
        and with the node itself w <- w / (1 + t), t <- t / (1 + t):

    nothing but sums of squares, where the plain formula subtracts what may be nearly all.

    For n a power of two these are the Haar wavelets.
    """
    w, half = np.ones(n), 1
    while half < n:
        t = np.add.reduceat(w, np.arange(0, n, half))
        both, paired = np.add.reduceat(t, np.arange(0, len(t), 2)), len(t) // 2 * 2
        left, right, u = t[:paired:2], t[1::2], np.zeros(len(t))
        u[:paired:2] = np.sqrt(right / (left * both[: len(right)]))
        u[1::2] = -np.sqrt(left / (right * both[: len(right)]))  # a last node without a right child has no mode
        yield w * np.repeat(u, half)[:n], 2 * half
        half *= 2
        w = w / np.repeat(1 + both, half)[:n]
    yield w / math.sqrt(math.fsum(w)), half  # what is left at the root: w w' / t


# --- Toeplitz ---------------------------------------------------------------------------------------------------


def square_root_toeplitz(n: int) -> Array:
    """The first n coefficients of (1 - z)^(-1/2), binom(2k, k) / 4^k."""
    return np.cumprod(np.concatenate([[1.0], 1 - 0.5 / np.arange(1, n)]))


def optimal_toeplitz(workload: Workload) -> Array:
    """The first column c, c[0] = 1, of the lower-triangular Toeplitz C that minimises norm2(c)^2 normF(A C^-1)^2.

    By L-BFGS from the square root. In c itself the curvature is that of norm2(c)^2 plus something
    compact: fifteen to twenty-five iterations at any n, where d = 1/c needs hundreds.

    Raises
    ------
    WorkloadError
        n is above `LARGEST_DENSE_BASELINE`.
    """
    n = workload.n
    if n > LARGEST_DENSE_BASELINE:
        raise WorkloadError(
            f"the optimal Toeplitz strategy for n = {n} needs n x n matrices and is computed up to "
            f"n = {LARGEST_DENSE_BASELINE}; compare with the square-root Toeplitz, or at a smaller n"
        )
    start = square_root_toeplitz(n)
    if n == 1:
        return start
    Q = _lag_energies(workload.dense())
    found = scipy.optimize.minimize(
        lambda x: _log_loss(x, Q),
        start[1:],
        jac=True,
        method="L-BFGS-B",
        # log(loss) is of order 10: the last relative step of 1e-14 is a relative 1e-13 of the loss
        options={"maxcor": 20, "maxiter": 500, "ftol": 1e-14, "gtol": 1e-10},
    )
    return np.concatenate([[1.0], found.x])


def _lag_energies(A: Array) -> Array:
    """Q with normF(A T(d))^2 proportional to d'Q d for the Toeplitz T(d): Q[k, l] = sum_j (A'A)[j + k, j + l]."""
    A = A / np.abs(A).max()
    upper, _ = scipy.linalg.lapack.dlauum(A.T, lower=0)  # (A'A)'s upper triangle, at a sixth of the full product
    Q = np.ascontiguousarray(upper.T)
    for k in range(len(Q) - 2, -1, -1):
        Q[k, : k + 1] += Q[k + 1, 1 : k + 2]
    Q = np.tril(Q)
    return (Q + np.tril(Q, -1).T) / Q[0, 0]


def _log_loss(x: Array, Q: Array) -> tuple[float, Array]:
    """log(c'c d'Qd) with c = (1, x) and d = 1/c as a power series, and its gradient in x."""
    c = np.concatenate([[1.0], x])
    with np.errstate(over="ignore", invalid="ignore"):  # a step too long has no loss
        d = _reciprocal(c)
        q, energy = Q @ d, float(c @ c)
        rest = float(d @ q)
        if not (math.isfinite(energy) and math.isfinite(rest) and rest > 0):
            return _TOO_FAR, np.zeros_like(x)
        # d changes by -d * d * (change of c)
        gradient = 2 * c / energy - 2 * _correlate(q[None], _convolve(d, d))[0] / rest
    return math.log(energy) + math.log(rest), gradient[1:]


def _reciprocal(c: Array) -> Array:
    """1 / c as a power series of as many terms."""
    one = np.zeros(len(c))
    one[0] = 1.0
    return scipy.signal.lfilter([1.0], c, one)


def _convolve(x: Array, y: Array) -> Array:
    """The product of two power series of as many terms."""
    size = scipy.fft.next_fast_len(2 * len(x), real=True)
    return scipy.fft.irfft(scipy.fft.rfft(x, size) * scipy.fft.rfft(y, size), size)[: len(x)]


def _correlate(rows: Array, d: Array) -> Array:
    """rows @ T(d), T(d) lower-triangular Toeplitz of first column d."""
    n = len(d)
    size = scipy.fft.next_fast_len(2 * n, real=True)
    return scipy.fft.irfft(scipy.fft.rfft(rows, size) * np.conj(scipy.fft.rfft(d, size)), size)[:, :n]


def _toeplitz(
    name: str,
    how: str,
    c: Array,
    normalised: bool,
    by_steps: Callable[[Array, Array, Array], Array] | None = None,
) -> _Mechanism:
    """C = T(c) or, with normalised columns, T(c) diag(1/s): B = A diag(s) T(1/c).

    `by_steps` has s as its third argument.
    """
    n, up = len(c), 1 + (len(c) + 2) * _EPS
    norms = np.sqrt(np.cumsum(c * c)[::-1])
    s = norms if normalised else np.ones(n)

    def by_rows(A: Array) -> Array:
        return _energies(_correlate(A * s, _reciprocal(c)))

    return _Mechanism(
        name + NORMALISED * normalised,
        how + NORMALISED * normalised,
        n,
        (np.ones(n) if normalised else norms) * up,
        by_rows,
        None if by_steps is None else lambda Phi, b: by_steps(Phi, b, s),
    )


def _square_root_toeplitz(n: int, normalised: bool) -> _Mechanism:
    """The noising (1 - z)^(1/2) is a sum of exponentials to 1e-14, so that its noise has a short state."""

    def by_steps(Phi: Array, b: Array, s: Array) -> Array:
        return filtered_noise(Phi, b, s, *_exponentials(n))

    how = "Toeplitz strategy with the coefficients of (1 - z)^(-1/2)"
    return _toeplitz("sqrt-toeplitz", how, square_root_toeplitz(n), normalised, by_steps)


def _exponentials(n: int) -> tuple[Array, Array]:
    """(decays, weights) with sum(weights decays^k) the k-th coefficient of (1 - z)^(-1/2), 0 <= k < n.

    The coefficient is 1/pi times the integral over t > 0 of exp(-k t) / sqrt(exp(t) - 1), here by the trapezoidal
    rule in log t: the integrand is analytic up to t = 2 pi i, so that a step h errs by about exp(-pi^2 / h). Where
    exp(-k t) is 1 for all k < n, the rest is one constant: what the sum lacks to the first coefficient, 1.
    """
    step = 0.25
    t = np.exp(np.arange(math.log(80), math.log(1e-12 / n), -step))
    weights = step / math.pi * t * np.exp(-t / 2) / np.sqrt(-np.expm1(-t))
    return np.append(np.exp(-t), 1.0), np.append(weights, 1 - math.fsum(weights))
