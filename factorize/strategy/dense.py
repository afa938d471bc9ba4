"""The dense strategy: C as it is, n (n+1) / 2 coefficients."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.linalg

from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.protocol import DTYPES
from mmfact.factorize.workload import Workload, check_dense

Array = npt.NDArray[np.float64]

_EPS = float(np.finfo(np.float64).eps)


@dataclass(frozen=True, eq=False)
class StreamingRows:
    """Row t of the noise is ``rows[t, : t + 1] @ Z[: t + 1]``; `sensitivity` is that of these very rows."""

    rows: Array
    sensitivity: float


@dataclass(frozen=True, eq=False)
class DenseStrategy:
    """C lower-triangular with a positive diagonal.

    Attributes
    ----------
    packed : ndarray of float32 or float64, shape (n (n+1) / 2,)
        Row i is ``packed[i (i+1) / 2 : (i+1) (i+2) / 2]``: an entry above the diagonal cannot be
        written down.
    """

    packed: npt.NDArray[Any] = field(repr=False)

    kind = "dense"
    sensitivity_kind = "exact"

    def __post_init__(self) -> None:
        n = order(self.packed)
        check_dense(n, "the dense strategy")
        if self.packed.dtype.name not in DTYPES:
            raise SolverError(f"a dense strategy holds float32 or float64, not {self.packed.dtype}")
        if not np.isfinite(self.packed).all():
            raise SolverError("a strategy's coefficients must be finite")
        if not (self.packed[_diagonal(n)] > 0).all():
            raise SolverError("a strategy's diagonal must be positive, or it could not be streamed")
        largest = float(np.abs(self.packed).max())
        if not 1e-100 <= largest <= 1e100:  # squares must neither vanish nor overflow
            raise SolverError(f"a strategy's largest coefficient is {largest:.3g}; normalise it to about 1")
        self.packed.flags.writeable = False

    @classmethod
    def from_matrix(cls, C: npt.ArrayLike, dtype: npt.DTypeLike = np.float64) -> DenseStrategy:
        """The strategy of a lower-triangular matrix, cast to `dtype`."""
        C = np.asarray(C, dtype=np.float64)
        if C.ndim != 2 or C.shape[0] != C.shape[1] or np.triu(C, 1).any():
            raise WorkloadError("C must be square and lower-triangular; see lower_triangular for other factors")
        return cls(C[np.tril_indices(len(C))].astype(dtype))

    @property
    def n(self) -> int:
        return order(self.packed)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.packed.dtype

    @property
    def buffers(self) -> int:
        return self.n

    @property
    def bytes_per_parameter(self) -> int:
        return 4 * self.n

    @property
    def cost(self) -> int:
        return self.n

    def parameters(self) -> dict[str, int]:
        return {}

    def noise_range(self) -> tuple[float, float]:
        noising = self.noising()
        return float(np.diag(noising).min()), float(np.linalg.norm(noising, axis=1).max())

    def row_deviations(self) -> Array:
        """The standard deviation of every row of C^-1 Z, shape (n,)."""
        return np.linalg.norm(self.noising(), axis=1)

    def amplification(self) -> float:
        """max_i of the standard deviation of the largest row sum, per unit of its own fresh white noise.

        Rows are sums of white rows, in float64; nothing is fed back.
        """
        noising = self.noising()
        return float((np.linalg.norm(noising, axis=1) / np.diag(noising)).max())

    def coefficients(self) -> dict[str, npt.NDArray[Any]]:
        return {"packed": self.packed}

    def to_dense(self) -> Array:
        C = np.zeros((self.n, self.n))
        C[np.tril_indices(self.n)] = self.packed
        return C

    def column_norms(self) -> Array:
        """norm2(C[:, j]) for every j, rounded up by the error bound of a sum of n squares."""
        return np.linalg.norm(self.to_dense(), axis=0) * (1 + (self.n + 2) * _EPS)

    def sensitivity(self, participation: Participation) -> float:
        return participation.sensitivity(self.column_norms())

    def noising(self) -> Array:
        """C^-1, n x n: turns white noise into gradient-space noise."""
        return inverse_of_triangle(self.to_dense())

    def decoder(self, workload: Workload) -> Array:
        """B = A C^-1, n x n lower-triangular."""
        if workload.n != self.n:
            raise WorkloadError(f"the strategy has {self.n} steps but the workload {workload.n}; they belong together")
        return workload.apply(self.noising())

    def streaming(self, participation: Participation, decode: Array | None = None) -> StreamingRows:
        """What a runtime streams: row t of noise is ``rows[t] @ Z``, Z white.

        Parameters
        ----------
        decode : ndarray, shape (n, n), optional
            A: stream the rows of A C^-1 instead of C^-1. Only for a workload that is a matrix; the noise of
            the others' iterates is their optimizer run over the rows of C^-1, which is post-processing.

        The rows are computed in float64, so the strategy that they really stream is not C but
        (I + E)^-1 C, with E bounded entrywise by n eps |C| |C^-1| for the inverse (Higham, Accuracy and
        Stability, section 14.2) and by n eps |B^-1| |A| |C^-1| for the product A C^-1. The sensitivity
        returned is raised by the norm of twice that bound.

        Raises
        ------
        SolverError
            The bound is above 1 %: the workload or strategy is too ill-conditioned to stream.
        """
        noising = rows = self.noising()
        bounds = [[self.to_dense(), noising]]
        if decode is not None:
            rows = decode @ noising
            bounds.append([inverse_of_triangle(rows), decode, noising])
        slack = 4 * _EPS + 2 * self.n * _EPS * sum(norm_of_absolute_product(factors) for factors in bounds)
        if not slack <= 1e-2:
            raise SolverError(
                f"the strategy is too ill-conditioned to stream in this space (its noise would be uncertain by "
                f"{slack:.1e}, 0.01 is allowed); compile a workload with rates that vary less"
            )
        return StreamingRows(rows, self.sensitivity(participation) * (1 + slack))

    def loss(self, workload: Workload, participation: Participation) -> float:
        return self.errors(workload, participation)[0]

    def max_error(self, workload: Workload, participation: Participation) -> float:
        return self.errors(workload, participation)[1]

    def errors(self, workload: Workload, participation: Participation) -> tuple[float, float]:
        """(loss, max error) from one decoder."""
        rows = np.einsum("ij,ij->i", *(2 * [self.decoder(workload)]))
        s, up = self.sensitivity(participation), 1 + (self.n + 2) * _EPS
        return s * s * math.fsum(rows) * up, s * math.sqrt(float(rows.max())) * up


def order(packed: npt.NDArray[Any]) -> int:
    """n from the length n (n+1) / 2 of a packed triangle."""
    n = (math.isqrt(8 * packed.size + 1) - 1) // 2
    if packed.ndim != 1 or packed.size == 0 or n * (n + 1) // 2 != packed.size:
        raise SolverError(f"{packed.shape} coefficients are not a packed triangle, whose length is n (n+1) / 2")
    return n


def inverse_of_triangle(triangle: Array) -> Array:
    """The inverse of a lower-triangular matrix, or `SolverError` where it is singular to working precision."""
    inverse, info = scipy.linalg.lapack.dtrtri(triangle, lower=1)
    if info != 0 or not np.isfinite(inverse).all():
        raise SolverError("the strategy is singular to working precision and cannot be streamed")
    return np.tril(inverse)


def norm_of_absolute_product(factors: list[Array]) -> float:
    """An upper bound of norm2(|F_1| |F_2| ...): the root of its largest row sum times its largest column sum."""
    rows = columns = np.ones(len(factors[0]))
    for factor in reversed(factors):
        rows = np.abs(factor) @ rows
    for factor in factors:
        columns = columns @ np.abs(factor)
    return math.sqrt(float(rows.max()) * float(columns.max()))


def _diagonal(n: int) -> npt.NDArray[np.int64]:
    i = np.arange(n)
    return i * (i + 3) // 2


def lower_triangular(C: npt.ArrayLike) -> Array:
    """The lower-triangular C_hat, positive diagonal, with C_hat' C_hat = C' C, by a QL factorization.

    For any C of shape (m, n), m >= n, of full rank: C = Q C_hat, so every column keeps its norm and the
    best decoder A C^+ becomes A C_hat^-1 with the same loss. (An LQ factorization would keep C C'
    instead, and with it understate the sensitivity.)

    Raises
    ------
    WorkloadError
        C is not finite or not of full column rank.
    """
    C = np.asarray(C, dtype=np.float64)
    if C.ndim != 2 or C.shape[0] < C.shape[1] or C.size == 0:
        raise WorkloadError(f"C has shape {C.shape}; it needs a column for each step and at least as many rows")
    if not np.isfinite(C).all():
        raise WorkloadError("C must be finite")
    R = scipy.linalg.qr(C[:, ::-1], mode="r", check_finite=False)[0][: C.shape[1]]
    C_hat = np.tril(R[::-1, ::-1])
    diagonal = np.diag(C_hat)
    if np.abs(diagonal).min() <= C.shape[0] * _EPS * np.abs(C_hat).max():
        raise WorkloadError("C does not have full column rank, so some gradient could not be recovered from C G")
    return C_hat * np.sign(diagonal)[:, None]


def lower_triangular_pair(B: npt.ArrayLike, C: npt.ArrayLike) -> tuple[Array, Array]:
    """(B_hat, C_hat), both lower-triangular, from any B (n x m) and C (m x n) with B C lower-triangular.

    By an LQ factorization of the decoder: B = B_hat Q, C_hat = Q C. The loss of B is kept, no column of C grows.

    Raises
    ------
    WorkloadError
        Shapes that do not fit, B not of full row rank, or B C not lower-triangular.
    """
    B, C = np.asarray(B, dtype=np.float64), np.asarray(C, dtype=np.float64)
    if B.ndim != 2 or B.shape != C.shape[::-1] or B.shape[0] > B.shape[1]:
        raise WorkloadError(f"B has shape {B.shape} and C {C.shape}; give B as n x m and C as m x n with m >= n")
    if not (np.isfinite(B).all() and np.isfinite(C).all()):
        raise WorkloadError("B and C must be finite")
    Q, R = scipy.linalg.qr(B.T, mode="economic", check_finite=False)
    sign = np.sign(np.diag(R))
    if np.abs(np.diag(R)).min() <= B.shape[1] * _EPS * np.abs(R).max():
        raise WorkloadError("B does not have full row rank; some iterate is a combination of the others")
    B_hat, C_hat = np.tril(R.T * sign), (Q * sign).T @ C
    stray = np.abs(np.triu(C_hat, 1)).max(initial=0.0)
    if stray > 1e-9 * np.abs(C_hat).max():
        raise WorkloadError(
            f"B C is not lower-triangular (an entry of {stray:.1e} remains above the diagonal of C), "
            "so these factors do not belong to a workload"
        )
    return B_hat, np.tril(C_hat)
