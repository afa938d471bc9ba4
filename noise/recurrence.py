"""Gradient-space rows C^-1 Z as plain array expressions, for NumPy, torch (on any device) and JAX (under jit).

What the native steppers do on the CPU in place, done with the operators that the three libraries share, state in and
state out, everything in the row's own precision. Let h be what is kept and z the white row of step t. Then

    buffered            y = (z - sum_k g[t, k] h_k) / c[t]             h_k <- decay[t, k] h_k + q[t, k] y
    banded-low-rank     h_k <- h_k + right[t - W, k] z_(t-W)           y = sum_(k < W) band[t, k] z_(t-k) + left[t] . h
    dense               y = sum_(j <= t) M[t, j] z_j

The second is not the stored decoder followed by A^-1 (see noise/stepping.py), which subtracts iterates that nearly
cancel and so needs float64. A^-1 times a band of width K plus rank R is itself a band, of width W = K + w, plus rank R,
where A^-1 has w + 1 bands. Its coefficients are made here once, in float64, and the difference is taken on them instead
of on the data.

Rows are at unit noise: multiply by noise_multiplier * clip_norm * sensitivity, where `sensitivity` is that of these
very coefficients, in the precision in which they are used.
"""

from __future__ import annotations

import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import CapacityError, HorizonError, StateError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy, inverse_of_triangle, norm_of_absolute_product
from mmfact.noise import checks
from mmfact.noise.stepping import stepping
from mmfact.store.artifact import Artifact

# White rows that the dense strategy may keep for one tensor.
LARGEST_HISTORY = 1 << 34

_TOGETHER = 64  # rows that are added up at a time

Array = npt.NDArray[np.float64]


class Recurrence(ABC):
    """How one artifact turns white rows into rows of C^-1 Z.

    Attributes
    ----------
    n : int
        The horizon.
    dtype : numpy.dtype
        In which coefficients, state and rows are held.
    sensitivity : float
        Of the strategy with the coefficients as they are used, an upper bound.
    """

    def __init__(self, dtype: np.dtype[Any], sensitivity: float, *tables: npt.NDArray[Any]) -> None:
        self.n, self.dtype, self.sensitivity = len(tables[0]), dtype, sensitivity
        self._tables = tables

    @abstractmethod
    def start(self, shape: tuple[int, ...], zeros: Callable[[tuple[int, ...]], Any]) -> Any:
        """What is kept before the first step, for rows of `shape`: a tuple (nested, perhaps) of arrays.

        Parameters
        ----------
        zeros : callable
            (shape) -> an array of zeros of that shape and of the rows' dtype, in the library and on the device of
            choice. All shapes asked for are `shape`; the dense strategy's has its steps in front.

        Raises
        ------
        CapacityError
            The dense strategy would have to keep more than `LARGEST_HISTORY` bytes.
        """

    def coefficients(self, t: Any, white: Any = None) -> tuple[Any, ...]:
        """Those of step t, for `advance`.

        Plain numbers where t is known. Where JAX traces it, entries of constants, for which `white` says the library;
        they are NaN outside the horizon, since nothing can be raised there, and JAX itself would repeat the last ones.

        Raises
        ------
        HorizonError
            t is known and at or past the horizon.
        """
        try:
            t = operator.index(t)
        except TypeError:
            xp = white.__array_namespace__()
            t = xp.where(t < 0, self.n, t)  # no counting from the end
            return tuple(xp.asarray(table).at[t].get(mode="fill") for table in self._tables)
        if not 0 <= t < self.n:
            raise HorizonError(
                f"step {t} is at or past the horizon of {self.n} steps that this artifact was compiled for; stop "
                "training, or compile a longer horizon for a new run"
            )
        return tuple(table[t].tolist() for table in self._tables)

    @abstractmethod
    def advance(self, coefficients: tuple[Any, ...], white: Any, state: Any) -> tuple[Any, Any]:
        """(row, state) of a step from its coefficients, its white row and the state before it."""

    def step(self, t: Any, white: Any, state: Any) -> tuple[Any, Any]:
        """(row, state) of step t from its white row and the state before it.

        Steps are taken in order, each once. `white` is an array of `dtype` of any library and shape. The state given is
        left as it was, but for the history of the dense strategy in NumPy and torch, which is filled in place.

        Raises
        ------
        StateError
            `white` is of another precision.
        HorizonError
            As `coefficients`.
        """
        if str(white.dtype).removeprefix("torch.") != self.dtype.name:
            raise StateError(f"the white row is {white.dtype}, but this recursion was made for {self.dtype}; cast it")
        return self.advance(self.coefficients(t, white), white, state)


def recurrence(artifact: Artifact, dtype: npt.DTypeLike = "float32") -> Recurrence:
    """The recursion of an artifact's strategy, in float32 or float64.

    Raises
    ------
    PrivacyError
        The rows would be rounded too much in this precision, or do not fit it.
    """
    checks.check_artifact(artifact)
    precision, strategy = np.dtype(dtype), artifact.strategy
    if isinstance(strategy, BufferedStrategy):
        return _Buffers(artifact, strategy, precision)
    if isinstance(strategy, BandedLowRankStrategy) and artifact.workload.structured:
        return _Band(artifact, strategy, precision)
    return _History(artifact, precision)


class _Buffers(Recurrence):
    """One buffer of a row's shape for each k."""

    def __init__(self, artifact: Artifact, strategy: BufferedStrategy, dtype: np.dtype[Any]) -> None:
        used = BufferedStrategy(*(table.astype(dtype) for table in strategy.coefficients().values()))
        checks.check_range(1.0, stepping(artifact, "gradient"), dtype)
        super().__init__(dtype, used.sensitivity(artifact.participation), *used.coefficients().values())
        self._many = used.buffers

    def start(self, shape: tuple[int, ...], zeros: Callable[[tuple[int, ...]], Any]) -> Any:
        return tuple(zeros(shape) for _ in range(self._many))

    def advance(self, coefficients: tuple[Any, ...], white: Any, state: Any) -> tuple[Any, Any]:
        c, g, decay, q = coefficients
        total = white
        for k, held in enumerate(state):
            total = total - g[k] * held
        row = total / c
        return row, tuple(decay[k] * held + q[k] * row for k, held in enumerate(state))


class _Band(Recurrence):
    """The last W white rows, the newest first, and one sum for each rank."""

    def __init__(self, artifact: Artifact, strategy: BandedLowRankStrategy, dtype: np.dtype[Any]) -> None:
        band, left, right = _differenced(strategy, artifact.workload.inverse_bands()[0])
        width = band.shape[1]
        entering = np.zeros_like(right)  # the row of `right` that a step uses
        entering[width:] = right[: len(right) - width]
        tables = [table.astype(dtype) for table in (band, left, entering)]
        variance = np.cumsum(entering**2, axis=0)
        # A sum is rounded at every step, and the roundings add up as its own terms do.
        rounding = (np.abs(left) * np.sqrt(variance + np.cumsum(variance, axis=0))).sum(axis=1)
        way = replace(
            stepping(artifact, "gradient"),
            largest_buffer=max(1.0, math.sqrt(float(variance.max(initial=0.0)))),
            amplification=float(((np.linalg.norm(band, axis=1) + rounding) / np.abs(band[:, 0])).max()),
        )
        checks.check_range(1.0, way, dtype)
        rows = _dense(*(table.astype(np.float64) for table in tables))
        super().__init__(dtype, _sensitivity(rows, artifact.participation), *tables)
        self._width, self._rank = width, left.shape[1]

    def start(self, shape: tuple[int, ...], zeros: Callable[[tuple[int, ...]], Any]) -> Any:
        return tuple(zeros(shape) for _ in range(self._width)), tuple(zeros(shape) for _ in range(self._rank))

    def advance(self, coefficients: tuple[Any, ...], white: Any, state: Any) -> tuple[Any, Any]:
        band, left, entering = coefficients
        ring, sums = state
        sums = tuple(held + entering[k] * ring[-1] for k, held in enumerate(sums))
        ring = (white, *ring[:-1])
        row = band[0] * white
        for k in range(1, len(ring)):
            row = row + band[k] * ring[k]
        for k, held in enumerate(sums):
            row = row + left[k] * held
        return row, (ring, sums)


class _History(Recurrence):
    """Every white row so far: n rows of memory for each tensor."""

    def __init__(self, artifact: Artifact, dtype: np.dtype[Any]) -> None:
        strategy = artifact.strategy
        dense = strategy if isinstance(strategy, DenseStrategy) else DenseStrategy.from_matrix(strategy.to_dense())
        way = replace(stepping(artifact, "gradient"), amplification=dense.amplification() * math.sqrt(dense.n))
        checks.check_range(1.0, way, dtype)
        rows = dense.noising().astype(dtype)
        sensitivity = _sensitivity(rows.astype(np.float64), artifact.participation)
        super().__init__(dtype, sensitivity, rows, np.arange(len(rows), dtype=np.int32))

    def start(self, shape: tuple[int, ...], zeros: Callable[[tuple[int, ...]], Any]) -> Any:
        needed = self.n * math.prod(shape) * self.dtype.itemsize
        if needed > LARGEST_HISTORY:
            raise CapacityError(
                f"this strategy keeps all {self.n} white rows, {needed / 2**30:.1f} GiB for a tensor of shape {shape}, "
                f"and {LARGEST_HISTORY >> 30} GiB is allowed; compile the workload with strategy buffered"
            )
        return zeros((self.n, *shape))

    def advance(self, coefficients: tuple[Any, ...], white: Any, state: Any) -> tuple[Any, Any]:
        weights, t = coefficients
        if hasattr(state, "at"):
            xp = state.__array_namespace__()
            history, weights = state.at[t].set(white), xp.asarray(weights, state.dtype)
        else:
            history = state
            history[t] = white
            weights = state.new_tensor(weights) if hasattr(state, "new_tensor") else np.asarray(weights, state.dtype)
        # Not a matrix product, for which accelerators may use a shorter format.
        weights = weights.reshape(-1, *(1 for _ in white.shape))
        last = t + 1 if isinstance(t, int) else self.n  # beyond it the rows are 0, and the weights too
        pieces = (slice(first, min(first + _TOGETHER, last)) for first in range(0, last, _TOGETHER))
        return sum((weights[piece] * history[piece]).sum(0) for piece in pieces), history


def _differenced(strategy: BandedLowRankStrategy, inverse: Array) -> tuple[Array, Array, Array]:
    """Band, left and right of A^-1 times the decoder, whose band is wider by the bands of A^-1 that it did not have."""
    stored, left, right = (array.astype(np.float64) for array in (strategy.band, strategy.left, strategy.right))
    n, narrow = stored.shape
    width = min(narrow + len(inverse) - 1, n)
    band, lasting = np.zeros((n, width)), np.zeros_like(left)
    for m, weight in enumerate(inverse[:n]):  # row t takes `weight[t]` times row t - m of the decoder
        lasting[m:] += weight[m:, None] * left[: n - m]
        for lag in range(m, width):
            t = np.arange(lag, n)
            within = lag - m < narrow
            entry = stored[t - m, lag - m] if within else np.einsum("tk,tk->t", left[t - m], right[t - lag])
            band[t, lag] += weight[t] * entry
    return band, lasting, right


def _dense(band: Array, left: Array, entering: Array) -> Array:
    """The matrix whose rows a banded recursion streams."""
    n, width = band.shape
    right = np.zeros_like(entering)
    right[: n - width] = entering[width:]
    rows = np.tril(left @ right.T, -width)
    for lag in range(width):
        rows += np.diag(band[lag:, lag], -lag)
    return rows


def _sensitivity(rows: Array, participation: Participation) -> float:
    """Of the inverse of a triangle of rows, raised by the bound for its rounding: see `DenseStrategy.streaming`."""
    strategy = DenseStrategy.from_matrix(inverse_of_triangle(rows))
    eps = float(np.finfo(np.float64).eps)
    slack = 4 * eps + 2 * len(rows) * eps * norm_of_absolute_product([strategy.to_dense(), rows])
    return strategy.sensitivity(participation) * (1 + slack)
