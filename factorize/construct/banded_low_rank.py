"""A band and a low rank in place of the optimum's decoder, by alternating least squares.

The band of B = A C^-1 is kept as it is; below it, ``left[i] . right[j]`` is fitted to the entries with
i - j >= K and to nothing else (Denisov et al. 2022, section 4.2). With `right` held, every row of `left` is a small
least-squares problem whose Gram matrix is the running sum of the outer products of right[0], right[1], ...; with
`left` held the same is true from the other end. A sweep costs O(n R^3 + n^2 R).

What is shipped is C_hat = B_hat^-1 A, whose columns are no longer of norm 1, and the longest of them sets the
sensitivity. They are made equal again without leaving the form: multiplying the columns of B_hat by N divides the rows
of C_hat by N, and the squared column norms of C_hat are linear in 1 / N^2. (Dividing the columns of C_hat instead would
leave A N A^-1 B_hat for a decoder, which is no band + low rank.)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from mmfact.factorize.construct import dense
from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.optimum import Optimum, Progress, silent
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.banded_low_rank import Array, BandedLowRankStrategy, bands_of
from mmfact.factorize.strategy.protocol import DTYPES
from mmfact.factorize.workload import Workload, check_dense

SWEEPS = 40
LARGEST_SEARCHED_RANK = 32  # beyond it a wider band is the cheaper way

_FIRST_BANDWIDTH = 32
_SEARCH_SWEEPS = 10  # enough to tell pairs apart; those within this factor of the tolerance get all
_UNDECIDED = 2.0
_SETTLED = 2e-3  # relative fall of the objective in one sweep below which sweeping stops
_PENALTY = 1e-9  # a hundredth or a hundred times that cost accuracy or cancellation (n = 512, prefix sum, momentum)
_RIDGE = 1e-15  # keeps the Gram matrices regular where an accumulator is still empty
_ROWS = 256  # at a time
_SCALING_STEPS = 100


@dataclass(frozen=True, eq=False)
class Fit:
    """``left[i] . right[j]`` for i - j >= bandwidth.

    Attributes
    ----------
    left, right : ndarray, shape (n, rank)
        0 in the rows that no entry uses.
    objectives : tuple of float
        What is minimised, at the start (`right` = 0) and after every half sweep. It never rises.
    """

    left: Array = field(repr=False)
    right: Array = field(repr=False)
    objectives: tuple[float, ...] = field(repr=False)


def fit(B: Array, bandwidth: int, rank: int, sweeps: int = SWEEPS, start: Array | None = None) -> Fit:
    """Fit the entries of B at and below its `bandwidth`-th subdiagonal by alternating least squares.

    What is minimised is the sum of their squared errors plus 1e-9 sum_ik left[i, k]^2 std_ik^2, std_ik being the
    standard deviation of accumulator k at step i. Without that, terms grow that cancel each other, and with them what
    float32 coefficients and float32 streaming lose.

    Parameters
    ----------
    B : ndarray, shape (n, n)
        Only the entries with i - j >= bandwidth are read.
    bandwidth, rank : int
        1 <= bandwidth <= n and 0 <= rank <= n - bandwidth.
    sweeps : int
        At most; fewer when a sweep lowers the objective by less than 0.2 %.
    start : ndarray, shape (n, rank), optional
        A first `left`. Default: leading singular vectors of the largest square block that has only entries to fit.
    """
    if rank == 0:
        return Fit(np.zeros((len(B), 0)), np.zeros((len(B), 0)), ())
    left = _start(B, bandwidth, rank) if start is None else np.array(start, dtype=np.float64)
    left = np.linalg.qr(left)[0]
    left[:bandwidth] = 0
    right = np.zeros_like(left)
    best, objectives = (left, right), list[float]()
    for half in range(2 * sweeps + 1):
        # the update of one side is that of the other in the mirror of the antidiagonal
        if half % 2 == 0:
            update, objective = _update(B.T[::-1, ::-1], right[::-1], left[::-1], bandwidth)
            following = left, update[::-1]
        else:
            update, objective = _update(B, left, right, bandwidth)
            following = update, right
        if not math.isfinite(objective) or (objectives and objective > objectives[-1]):
            break  # rounding errors have the word: what came before is as good as it gets
        best, (left, right) = (left, right), _tempered(*following, bandwidth)
        objectives.append(objective)
        if len(objectives) > 3 and objective > (1 - _SETTLED) * objectives[-3]:
            break
    return Fit(*best, tuple(objectives))


def check_pair(bandwidth: int | None, rank: int | None, n: int) -> None:
    """Raise `WorkloadError` unless a decoder of n steps can have this band and this rank (None: ours to choose)."""
    for name, value in (("bandwidth", bandwidth), ("rank", rank)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
            raise WorkloadError(
                f"{name} = {value!r} must be a whole number, at least 1; leave it out to have it chosen"
            )
    if bandwidth is not None and bandwidth > n:
        raise WorkloadError(f"bandwidth = {bandwidth} is wider than n = {n} steps; give at most {n}, the whole decoder")
    most = n - (bandwidth or 1)
    if rank is not None and rank > most:
        raise WorkloadError(
            f"rank = {rank} is above {most}, the order of what a band of {bandwidth or 1} leaves of n = {n} steps; "
            + ("give a smaller rank, or leave it out" if most else "leave the rank out, nothing is left to approximate")
        )


def build(
    workload: Workload,
    optimum: Optimum,
    participation: Participation,
    bandwidth: int | None = None,
    rank: int | None = None,
    tolerance: float = 1e-4,
    dtype: npt.DTypeLike = "float32",
    on_progress: Callable[[Progress], None] = silent,
) -> BandedLowRankStrategy:
    """Fit the optimum's decoder, equalise the columns of C_hat where that lowers the loss, cast.

    Parameters
    ----------
    bandwidth, rank : int, optional
        K and R. What is not given is chosen: the cheapest, by the K + 2 R multiply-adds of a step, whose excess (that
        of the cast coefficients) is within `tolerance`, or else the best that was found. Bandwidths are chosen among
        the powers of two and the largest possible. A bandwidth of n leaves nothing for a rank, which is then 0, and
        B_hat is the optimum's decoder.

    Raises
    ------
    WorkloadError
        A bandwidth below 1 or above n, a rank below 1 or above n - bandwidth, a tolerance or dtype that is none.
    CapacityError
        n too large for n x n matrices.
    SolverError
        No strategy came out that float64 (or `dtype`) can hold.
    """
    n = workload.n
    check_dense(n, "the banded-low-rank strategy")
    check_pair(bandwidth, rank, n)
    if not 0 < tolerance < 1:
        raise WorkloadError(f"tolerance {tolerance!r} must be in (0, 1): it is the largest acceptable excess")
    if np.dtype(dtype).name not in DTYPES:
        raise WorkloadError(f"dtype {dtype!r} is not allowed; use one of {', '.join(DTYPES)}")
    search = _Search(workload, optimum, participation, tolerance, np.dtype(dtype), on_progress)
    if bandwidth is not None and (rank is not None or bandwidth == n):
        return search.ship(search.attempt(bandwidth, rank or 0, SWEEPS)).strategy
    if bandwidth is not None:
        most = min(n - bandwidth, LARGEST_SEARCHED_RANK)
        _least(lambda R: search.meets(bandwidth, R), 1, most, first=1)
    elif rank is not None:
        bandwidths = _powers_of_two(n - rank)
        _least(lambda e: search.meets(bandwidths[e], rank), 0, len(bandwidths) - 1, first=0)
    else:
        _walk(n, search.meets)
    return search.cheapest()


@dataclass(frozen=True, eq=False)
class _Attempt:
    """A decoder in float64, its columns scaled; excess is infinite where the numbers gave out."""

    band: Array
    left: Array
    right: Array
    fitted: Fit
    excess: float

    @property
    def cost(self) -> int:
        return self.band.shape[1] + 2 * self.left.shape[1]


@dataclass(frozen=True, eq=False)
class _Shipped:
    strategy: BandedLowRankStrategy
    excess: float


class _Search:
    """Attempts at one decoder, and which of them were within the tolerance."""

    def __init__(
        self,
        workload: Workload,
        optimum: Optimum,
        participation: Participation,
        tolerance: float,
        dtype: np.dtype[Any],
        on_progress: Callable[[Progress], None],
    ) -> None:
        self._workload, self._optimum, self._participation = workload, optimum, participation
        self._tolerance, self._dtype, self._on_progress = tolerance, dtype, on_progress
        on_progress(Progress(stage="optimal decoder"))
        noising = dense.build(workload, optimum, participation, "float64").noising()
        B = workload.apply(noising)
        del noising
        # The sign of a column of white noise is nobody's business; it makes the diagonal positive for any A.
        B *= np.sign(np.diag(B))
        # Misfits in columns of B that are long cost the loss more. Weighing them so lowers the excess by 20 to 40 %
        # (prefix sum and momentum, n = 1024; other powers and weights of rows did not do better).
        norms = np.linalg.norm(B, axis=0)
        self._weights = norms / norms.max()
        B *= self._weights
        self._weighted = B
        self._attempts: list[_Attempt] = []

    def attempt(self, bandwidth: int, rank: int, sweeps: int, start: Array | None = None) -> _Attempt:
        """Fit and scale."""
        self._on_progress(Progress(stage=f"bandwidth {bandwidth}, rank {rank}"))
        fitted = fit(self._weighted, bandwidth, rank, sweeps, start)
        n, weights = len(self._weights), self._weights
        source = _source(n, bandwidth)
        band = bands_of(self._weighted, bandwidth) / weights[source]
        left, right = fitted.left, fitted.right / weights[:, None]
        try:
            plain = BandedLowRankStrategy(band, left, right, self._workload)
            energies = np.einsum("ij,ij->j", *(2 * [plain.dense_decoder()]))
            C = plain.to_dense()
            scale, loss = _equalised(np.square(C, out=C), energies)
        except SolverError:  # not finite somewhere
            return _Attempt(band, left, right, fitted, math.inf)
        excess = loss / self._optimum.lower_bound - 1
        return _Attempt(band * scale[source], left, right * scale[:, None], fitted, excess)

    def ship(self, attempt: _Attempt) -> _Shipped:
        """Cast, and figures of the cast coefficients."""
        with np.errstate(over="ignore"):  # refused by the strategy
            band, left, right = (array.astype(self._dtype) for array in (attempt.band, attempt.left, attempt.right))
        strategy = BandedLowRankStrategy(band, left, right, self._workload)
        loss, _ = strategy.errors(self._workload, self._participation)
        return _Shipped(strategy, loss / self._optimum.lower_bound - 1)

    def meets(self, bandwidth: int, rank: int) -> bool:
        """Whether the pair is within the tolerance, remembering the attempt."""
        attempt = self.attempt(bandwidth, rank, _SEARCH_SWEEPS)
        if self._tolerance < attempt.excess <= _UNDECIDED * self._tolerance and rank:
            attempt = self.attempt(bandwidth, rank, SWEEPS - _SEARCH_SWEEPS, attempt.fitted.left)
        self._attempts.append(attempt)
        return attempt.excess <= self._tolerance

    def cheapest(self) -> BandedLowRankStrategy:
        """The cheapest attempt that is within the tolerance when shipped, or else the best."""
        shipped = []
        within = [attempt for attempt in self._attempts if attempt.excess <= self._tolerance]
        best = min(self._attempts, key=lambda attempt: attempt.excess)
        for attempt in sorted(within, key=lambda attempt: attempt.cost) or [best]:
            bandwidth, rank = attempt.band.shape[1], attempt.left.shape[1]
            polished = self.attempt(bandwidth, rank, SWEEPS, attempt.fitted.left)
            shipped.append(self.ship(min(attempt, polished, key=lambda each: each.excess)))
            if shipped[-1].excess <= self._tolerance:
                return shipped[-1].strategy
        return min(shipped, key=lambda each: each.excess).strategy


def _powers_of_two(most: int) -> list[int]:
    """1, 2, 4, ... and `most` itself."""
    return [1 << e for e in range(most.bit_length()) if 1 << e < most] + [most]


def _least(meets: Callable[[int], bool], low: int, high: int, first: int) -> int | None:
    """The least value from low to high that meets the tolerance, if any, supposing that larger ones do too.

    `first` is tried first; the distance to it is doubled until a value meets, then the last gap halved.
    """
    at, step, failed = min(max(first, low), high), 1, low - 1
    while not meets(at):
        failed = at
        if at == high:
            return None
        at, step = min(at + step, high), 2 * step
    while at - failed > 1:
        middle = (at + failed) // 2
        at, failed = (middle, failed) if meets(middle) else (at, middle)
    return at


def _walk(n: int, meets: Callable[[int, int], bool]) -> None:
    """Try pairs towards the cheapest that meets: narrower bands at higher ranks while that pays, then wider ones.

    A staircase: at each bandwidth only the ranks that would be cheaper than the best so far and, going down, no lower
    than the wider band needed. The whole decoder, of cost n, is the one to beat.
    """
    cheapest, found = n, False

    def improve(bandwidth: int, low: int) -> int | None:
        nonlocal cheapest, found
        most = min(n - bandwidth, (cheapest - 1 - bandwidth) // 2, LARGEST_SEARCHED_RANK)
        if most < low:
            return None
        # once there is a best, the highest rank that is cheaper tells at once whether the bandwidth can improve on it
        rank = _least(lambda R: meets(bandwidth, R), low, most, first=most if found else 4)
        if rank is not None:
            cheapest, found = bandwidth + 2 * rank, True
        return rank

    middle = min(_FIRST_BANDWIDTH, 1 << max(n // 4, 1).bit_length() - 1)
    rank = improve(middle, 1)
    if found or n < 3 * _FIRST_BANDWIDTH:  # below that even the whole decoder is cheap, and leaves few ranks to try
        bandwidth = middle // 2
        while bandwidth and (rank := improve(bandwidth, rank or 1)) is not None:
            bandwidth //= 2
    bandwidth = 2 * middle
    while bandwidth < n and (improve(bandwidth, 1) is not None or not found):
        bandwidth *= 2
    if not found:
        meets(n, 0)


def _equalised(squares: Array, energies: Array) -> tuple[Array, float]:
    """(N, loss): B_hat N with the least loss, from C_hat's entries squared and energies[i] = norm2(B_hat[:, i])^2.

    With m = 1 / N^2 the squared column norms of N^-1 C_hat are squares' m, and normF(B_hat N)^2 is the sum of
    energies / m: a convex problem, solved by squares' m = 1 where that m and the multipliers w of the columns,
    squares w = energies / m^2, are positive (near the optimum they are). Elsewhere w is scaled step by step.
    """
    ones = np.ones(len(energies))
    best = ones, _loss(ones, squares, energies)
    with np.errstate(all="ignore"):  # what overflows is not taken
        m = scipy.linalg.solve_triangular(squares, ones, lower=True, trans=1, check_finite=False)
        w = ones
        if m.min() > 0:
            best = min(best, (m, _loss(m, squares, energies)), key=lambda each: each[1])
            w = scipy.linalg.solve_triangular(squares, energies / m**2, lower=True, check_finite=False)
        if not (m.min() > 0 and w.min() >= 0):
            w = ones
            for _ in range(_SCALING_STEPS):
                m = np.sqrt(energies / (squares @ w))
                best = min(best, (m, _loss(m, squares, energies)), key=lambda each: each[1])
                w = w * (m @ squares)
                w /= w.mean()
        m, loss = best
        scale = np.sqrt((m @ squares).max() / m)
    if not (math.isfinite(loss) and np.isfinite(scale).all()):
        raise SolverError("the columns of the strategy have no finite norms")
    return scale, loss


def _loss(m: Array, squares: Array, energies: Array) -> float:
    loss = float((m @ squares).max() * (energies / m).sum())
    return loss if math.isfinite(loss) else math.inf


def _source(n: int, bandwidth: int) -> npt.NDArray[np.int64]:
    """The column that ``band[i, k]`` belongs to (0 where there is none: its entry is 0)."""
    return np.maximum(np.arange(n)[:, None] - np.arange(bandwidth), 0)


def _start(B: Array, bandwidth: int, rank: int) -> Array:
    """A first `left`: the leading left singular space of B[h:, :h-K+1], all of whose entries are to be fitted.

    By subspace iteration from a fixed draw, so that a compilation can be repeated. Ranks that the block does not have
    stay random.
    """
    n = len(B)
    h = (n + bandwidth) // 2
    block = np.ascontiguousarray(B[h:, : h - bandwidth + 1])
    random = np.random.default_rng(0)
    left = random.standard_normal((n, rank))
    space = block @ random.standard_normal((block.shape[1], min(rank, *block.shape)))
    for _ in range(3):
        space = block @ (block.T @ np.linalg.qr(space)[0])
    left[:h, : space.shape[1]] = 0
    left[h:, : space.shape[1]] = space
    return left


def _update(B: Array, left: Array, right: Array, bandwidth: int) -> tuple[Array, float]:
    """(`left` that is best beside `right`, objective of the `left` given)."""
    n, rank = left.shape
    out, gram, objectives = left.copy(), np.zeros((rank, rank)), []
    ridge = _RIDGE * np.eye(rank) * (float(np.vdot(right, right)) or 1.0)
    rows = max(1, min(_ROWS, 2**22 // rank**2))
    for first in range(bandwidth, n, rows):
        last = min(first + rows, n)
        width, known = last - bandwidth, first - bandwidth  # row i reads the columns up to i - bandwidth
        error = B[first:last, :width] - left[first:last] @ right[:width].T
        error[:, known:] = np.tril(error[:, known:])
        added = right[known:width]
        grams = gram + np.cumsum(added[:, :, None] * added[:, None, :], axis=0)
        gram = grams[-1].copy()
        # by the correction of `left`, which is more accurate, and stays put where `right` says nothing
        diagonal = np.einsum("ikk->ik", grams)
        penalty = _PENALTY * diagonal
        objectives += [float(np.vdot(error, error)), float((penalty * left[first:last] ** 2).sum())]
        gradient = error @ right[:width] - penalty * left[first:last]
        diagonal += penalty
        out[first:last] += np.linalg.solve(grams + ridge, gradient[:, :, None])[:, :, 0]
    return out, math.fsum(objectives)


def _tempered(left: Array, right: Array, bandwidth: int) -> tuple[Array, Array]:
    """The same product from other accumulators, whichever need less cancellation: as they are, or singular vectors."""
    Q, S = np.linalg.qr(left)
    P, T = np.linalg.qr(right)
    U, sigma, Vt = np.linalg.svd(S @ T.T)
    root = np.sqrt(sigma)
    singular = Q @ U * root, P @ Vt.T * root
    singular[0][:bandwidth] = 0
    singular[1][len(right) - bandwidth :] = 0
    return min(singular, _balanced(left, right), key=lambda each: _cancellation(each[0], each[1], bandwidth))


def _cancellation(left: Array, right: Array, bandwidth: int) -> float:
    """sum_ik left[i, k]^2 std_ik^2, std_ik being the standard deviation of accumulator k at step i."""
    return float(np.vdot(left[bandwidth:] ** 2, np.cumsum(right[: len(right) - bandwidth] ** 2, axis=0)))


def _balanced(left: Array, right: Array) -> tuple[Array, Array]:
    """The same products, column by column, with columns of the same norm on both sides."""
    a, b = np.linalg.norm(left, axis=0), np.linalg.norm(right, axis=0)
    scale = np.sqrt(np.where(a > 0, a, 1) / np.where(b > 0, b, 1))
    return left / scale, right * scale
