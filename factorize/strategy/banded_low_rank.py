"""The banded + low-rank strategy of Denisov et al. 2022 (section 4.2): the decoder is what is stored and streamed.

B_hat is a band of width K and, below it, the lower-triangular part of a matrix of rank R:

    B_hat[i, j] = band[i, i - j]          0 <= i - j < K
    B_hat[i, j] = left[i] . right[j]      i - j >= K

and the strategy is by definition C_hat = B_hat^-1 A, so B_hat C_hat = A holds exactly whatever B_hat approximates:
the sensitivity is that of C_hat, not of the C that B_hat came from. Streaming, for every element of the model:

    x_t = sum_(k < K) band[t, k] z_(t-k) + left[t] . h_t          h_t = sum_(j <= t-K) right[j] z_j
    y_t = sum_m L[t, t-m] x_(t-m)          L = A^-1, banded

x_t is the noise of iterate t and y_t the noise of gradient t.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.dense import inverse_of_triangle, norm_of_absolute_product
from mmfact.factorize.strategy.protocol import DTYPES
from mmfact.factorize.workload import Workload, check_dense

Array = npt.NDArray[np.float64]

_EPS = float(np.finfo(np.float64).eps)
_BLOCK = 512  # rows of B_hat or columns of C_hat at a time
_LARGEST_SLACK = 1e-2


@dataclass(frozen=True, eq=False)
class BandedLowRankStrategy:
    """C_hat = B_hat^-1 A with B_hat = band + low rank, its diagonal positive.

    (C_hat's diagonal then has the signs of A's, all positive for the structured workloads.)

    Attributes
    ----------
    band : ndarray of float32 or float64, shape (n, K)
        ``band[i, k] = B_hat[i, i - k]``; 0 where i < k.
    left, right : ndarrays of the same dtype, shape (n, R)
        The rest, ``left[i] . right[j]`` for i - j >= K. No entry uses the first K rows of `left` and the last K of
        `right`: they are 0. R <= n - K, so a band as wide as the matrix leaves R = 0.
    workload : Workload
        A, which C_hat depends on.
    """

    band: npt.NDArray[Any] = field(repr=False)
    left: npt.NDArray[Any] = field(repr=False)
    right: npt.NDArray[Any] = field(repr=False)
    workload: Workload

    kind = "banded-low-rank"
    sensitivity_kind = "upper bound"

    def __post_init__(self) -> None:
        n = self.workload.n
        check_dense(n, "the banded-low-rank strategy")
        if self.band.ndim != 2 or self.band.shape[0] != n or not 1 <= self.band.shape[1] <= n:
            raise SolverError(
                f"band has shape {self.band.shape}; the workload's n = {n} steps need ({n}, K) with K from 1 to {n}"
            )
        most = n - self.bandwidth
        for name, array in (("left", self.left), ("right", self.right)):
            if array.ndim != 2 or array.shape[0] != n or array.shape[1] > most:
                raise SolverError(
                    f"{name} has shape {array.shape}; beside a band of {self.bandwidth} in {n} steps it needs "
                    f"({n}, R) with R at most {most}"
                )
        if self.left.shape != self.right.shape:
            raise SolverError(f"left has shape {self.left.shape} but right {self.right.shape}; they belong together")
        for name, array in self.coefficients().items():
            if array.dtype != self.band.dtype or array.dtype.name not in DTYPES:
                raise SolverError(
                    f"a banded-low-rank strategy holds all of {' or all of '.join(DTYPES)}; {name} is {array.dtype}"
                )
            if not np.isfinite(array).all():
                raise SolverError(
                    f"a strategy's coefficients must be finite, and {name} is not; float64, or a workload whose unit "
                    "is nearer to 1, may help"
                )
        if not (self.band[:, 0] > 0).all():
            step = int(np.argmin(self.band[:, 0]))
            raise SolverError(
                f"the decoder's diagonal is {self.band[step, 0]} at step {step}; it must be positive, or the step's "
                "gradient would go without noise (change the sign of a column, or use float64 for tiny numbers)"
            )
        for name, array in self.coefficients().items():  # squares must neither vanish nor overflow
            largest = float(np.abs(array).max(initial=0.0))
            if largest > 1e100 or (name == "band" and largest < 1e-100):
                raise SolverError(
                    f"a strategy's largest coefficient is {largest:.3g} in {name}; it must lie between 1e-100 and "
                    "1e100, so express the learning rates in another unit"
                )
        beyond = {
            "band": self.band[: self.bandwidth][~np.tri(self.bandwidth, dtype=bool)],
            "left": self.left[: self.bandwidth],
            "right": self.right[most:],
        }
        for name, entries in beyond.items():
            if np.any(entries != 0):
                raise SolverError(
                    f"{name} holds {np.max(np.abs(entries)):.3g} where there is no entry of an {n} x {n} "
                    f"lower-triangular matrix with a band of {self.bandwidth}; it must be exactly 0 there"
                )
        for array in self.coefficients().values():
            array.flags.writeable = False

    @property
    def n(self) -> int:
        return self.workload.n

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.band.dtype

    @property
    def bandwidth(self) -> int:
        """K."""
        return self.band.shape[1]

    @property
    def rank(self) -> int:
        """R."""
        return self.left.shape[1]

    @property
    def buffers(self) -> int:
        """K - 1 + R + w: past rows of Z, the accumulators, and in gradient space the past w rows of iterate noise.

        w + 1 is the number of bands of A^-1, so iterate space keeps w fewer. For a custom matrix, whose inverse is
        not known to be banded, w = n - 1.
        """
        return self.bandwidth - 1 + self.rank + self._inverse_width

    @property
    def bytes_per_parameter(self) -> int:
        """White rows in float32; sums and rows of iterate noise, which are differenced, in float64."""
        return 4 * (self.bandwidth - 1) + 8 * (self.rank + self._inverse_width)

    @property
    def cost(self) -> int:
        """K + 2 R + w + 1: the band, the accumulators read and fed, and the bands of A^-1 (gradient space only)."""
        return self.bandwidth + 2 * self.rank + self._inverse_width + 1

    def parameters(self) -> dict[str, int]:
        return {"bandwidth": self.bandwidth, "rank": self.rank}

    def coefficients(self) -> dict[str, npt.NDArray[Any]]:
        return {"band": self.band, "left": self.left, "right": self.right}

    def dense_decoder(self) -> Array:
        """B_hat as an n x n float64 array."""
        return assemble(*(array.astype(np.float64) for array in self.coefficients().values()))

    def to_dense(self) -> Array:
        """C_hat = B_hat^-1 A."""
        C = np.zeros((self.n, self.n))
        for first, last, A in self._blocks_of_workload():
            C[first:, first:last] = A
        return _solve(self.dense_decoder(), C)

    def noising(self) -> Array:
        """C_hat^-1 = A^-1 B_hat, n x n: turns white noise into gradient-space noise."""
        B = self.dense_decoder()
        if self.workload.matrix is not None:
            return np.tril(scipy.linalg.solve_triangular(self.workload.matrix, B, lower=True, check_finite=False))
        return _banded_times(self.workload.inverse_bands()[0], B)

    def decoder(self, workload: Workload) -> Array:
        """A C_hat^-1, n x n lower-triangular; for the strategy's own workload B_hat itself."""
        if workload.n != self.n:
            raise WorkloadError(f"the strategy has {self.n} steps but the workload {workload.n}; they belong together")
        if workload is self.workload or workload.same_as(self.workload):
            return self.dense_decoder()
        return workload.apply(self.noising())

    def column_norms(self) -> Array:
        """norm2(C_hat[:, j]) for every j, rounded up; valid in both spaces.

        What bounds the rounding errors (Higham, Accuracy and Stability, sections 3.1 and 8.1):

        - a computed column of B_hat^-1 A solves (B_hat + E) c = a with E at most n eps |B_hat| entry by entry, and
          the products left . right add R eps |left| |right| to that: a relative error of norm2(|B_hat^-1| |B_hat|);
        - A is computed, by running the optimizer, and gradient space streams with L = A^-1 rounded to float64. With
          the residual T = |L A - I| + (w + 3) eps |L| |A|, which covers both, the column is off by C_hat T[:, j].

        Each is doubled, which covers what the bounds themselves lack to their second order.

        Raises
        ------
        SolverError
            The bounds come to more than 1 %: the workload or the strategy is too ill-conditioned.
        """
        return self._column_norms

    def sensitivity(self, participation: Participation) -> float:
        return participation.sensitivity(self.column_norms())

    def loss(self, workload: Workload, participation: Participation) -> float:
        return self.errors(workload, participation)[0]

    def max_error(self, workload: Workload, participation: Participation) -> float:
        return self.errors(workload, participation)[1]

    def errors(self, workload: Workload, participation: Participation) -> tuple[float, float]:
        """(loss, max error) of `decoder`, rounded up by the bounds of their sums and of the products left . right."""
        if workload is self.workload or workload.same_as(self.workload):
            rows = self._iterate_stds**2
        else:
            rows = np.einsum("ij,ij->i", *(2 * [self.decoder(workload)]))
        # the products are off by R eps |left| |right|, whose row norms `amplification` bounds
        up = 1 + (self.n + 2 + 2 * (self.rank + 1) * self._iterate_amplification()) * _EPS
        s = self.sensitivity(participation)
        return s * s * math.fsum(rows) * up, s * math.sqrt(float(rows.max())) * up

    def amplification(self) -> float:
        """The larger of `amplifications`."""
        return max(self.amplifications().values())

    def amplifications(self) -> dict[str, float]:
        """By space: what a step adds up, before cancellation, relative to the noise that is left of it.

        iterate: S_t / std(x_t) at its largest, S_t = std of the band's part + sum_k abs(left[t, k]) std(h_t[k]).
        gradient: sum_m abs(L[t, t-m]) S_(t-m) / std(y_t) at its largest; for a custom matrix, whose inverse is not
        known to be banded, sum_m abs(L[t, t-m]) runs over all steps.
        """
        sums = self._sums()
        if self.workload.matrix is not None:
            spread = np.abs(inverse_of_triangle(self.workload.matrix)) @ sums
        else:
            spread = _banded_times(np.abs(self.workload.inverse_bands()[0]), sums[:, None])[:, 0]
        gradient = float((spread / self._gradient_stds[0]).max())
        return {"iterate": self._iterate_amplification(), "gradient": gradient}

    def noise_range(self) -> tuple[float, float]:
        """Of the standard deviations of a row of C_hat^-1 Z: its own fresh part at the least, all of it at the most."""
        stds, fresh = self._gradient_stds
        return float(fresh.min()), float(stds.max())

    def row_deviations(self) -> Array:
        """The standard deviation of every row of C_hat^-1 Z, shape (n,)."""
        return self._gradient_stds[0]

    @cached_property
    def _inverse_width(self) -> int:
        """w, where A^-1 has w + 1 bands."""
        return self.n - 1 if self.workload.matrix is not None else len(self.workload.inverse_bands()[0]) - 1

    def _iterate_amplification(self) -> float:
        return float((self._sums() / self._iterate_stds).max())

    def _sums(self) -> Array:
        """S_t of `amplifications`."""
        band, left, right = (array.astype(np.float64) for array in self.coefficients().values())
        sums = np.linalg.norm(band, axis=1)
        stds = np.sqrt(np.cumsum(right**2, axis=0))  # of the accumulators
        sums[self.bandwidth :] += np.einsum("ik,ik->i", np.abs(left[self.bandwidth :]), stds[: self.n - self.bandwidth])
        return sums

    @cached_property
    def _iterate_stds(self) -> Array:
        """Of x_t for every t."""
        return np.linalg.norm(self.dense_decoder(), axis=1)

    @cached_property
    def _gradient_stds(self) -> tuple[Array, Array]:
        """Of y_t, and of what z_t itself adds to it, for every t."""
        noising = self.noising()
        return np.linalg.norm(noising, axis=1), np.abs(np.diag(noising))

    @cached_property
    def _column_norms(self) -> Array:
        n = self.n
        B = self.dense_decoder()
        absolute = assemble(*(np.abs(array.astype(np.float64)) for array in self.coefficients().values()))
        slack = 2 * (n + self.rank + 4) * _EPS * norm_of_absolute_product([inverse_of_triangle(B), absolute])
        del absolute
        norms, stray, column_sums, row_sums = np.empty(n), np.zeros(n), np.empty(n), np.zeros(n)
        L = None if self.workload.matrix is not None else self.workload.inverse_bands()[0]
        for first, last, A in self._blocks_of_workload():
            if L is not None:
                stray[first:last] = _residual(L[:, first:], A)
            C = _solve(B[first:, first:], A)
            norms[first:last] = np.linalg.norm(C, axis=0) * (1 + (n + 2) * _EPS)
            C = np.abs(C, out=C)
            column_sums[first:last] = C.sum(axis=0)
            row_sums[first:] += C.sum(axis=1)
        bounds = norms * (1 + slack) + 2 * math.sqrt(float(row_sums.max()) * float(column_sums.max())) * stray
        if not bounds.max() <= norms.max() * (1 + _LARGEST_SLACK):
            raise SolverError(
                f"the sensitivity of the banded-low-rank strategy is uncertain by {bounds.max() / norms.max() - 1:.1e} "
                f"in float64, {_LARGEST_SLACK} is allowed; compile a workload with rates that vary less, or take the "
                "dense strategy"
            )
        bounds.flags.writeable = False
        return bounds

    def _blocks_of_workload(self) -> Iterator[tuple[int, int, Array]]:
        """(first, last, A[first:, first:last]) for blocks of columns."""
        for first in range(0, self.n, _BLOCK):
            last = min(first + _BLOCK, self.n)
            if self.workload.matrix is not None:
                yield first, last, self.workload.matrix[first:, first:last]
            else:
                unit = np.zeros((self.n, last - first))
                unit[np.arange(first, last), np.arange(last - first)] = 1
                yield first, last, self.workload.apply(unit)[first:]


def assemble(band: Array, left: Array, right: Array) -> Array:
    """The n x n matrix of a band, ``band[i, k]`` its entry (i, i - k), and ``left @ right.T`` below the band."""
    n, bandwidth = band.shape
    out = np.zeros((n, n))
    for first in range(bandwidth, n, _BLOCK):
        last = min(first + _BLOCK, n)
        width = last - bandwidth
        rows = left[first:last] @ right[:width].T
        rows[:, first - bandwidth :] = np.tril(rows[:, first - bandwidth :])
        out[first:last, :width] = rows
    for k in range(bandwidth):
        np.einsum("ii->i", out[k:, : n - k])[:] = band[k:, k]
    return out


def bands_of(matrix: Array, bandwidth: int) -> Array:
    """``band[i, k] = matrix[i, i - k]`` for k < bandwidth, 0 where there is no such entry."""
    n = len(matrix)
    band = np.zeros((n, bandwidth))
    for k in range(bandwidth):
        band[k:, k] = np.diag(matrix, -k)
    return band


def _banded_times(bands: Array, rows: Array) -> Array:
    """L @ rows for ``bands[m, t] = L[t, t - m]``."""
    out = bands[0][:, None] * rows
    for m in range(1, len(bands)):
        out[m:] += bands[m, m:][:, None] * rows[: len(rows) - m]
    return out


def _residual(L: Array, A: Array) -> Array:
    """norm2 of every column of |L A - I| + (w + 3) eps |L| |A|, the second part being the rounding of the first."""
    exact = _banded_times(L, A)
    np.einsum("ii->i", exact[: A.shape[1]])[:] -= 1
    return np.linalg.norm(np.abs(exact) + (len(L) + 2) * _EPS * _banded_times(np.abs(L), np.abs(A)), axis=0)


def _solve(B: Array, rows: Array) -> Array:
    """B^-1 rows for lower-triangular B, lower-triangular where `rows` is."""
    with np.errstate(over="ignore", invalid="ignore"):
        out: Array = scipy.linalg.solve_triangular(B, rows, lower=True, check_finite=False)
    if not np.isfinite(out).all():
        raise SolverError("the strategy B_hat^-1 A is not finite; the decoder is singular to working precision")
    return np.tril(out)
