"""Workloads: A, n x n lower-triangular, as data.

A is what the optimizer does to the gradients, iterates = A G. Structured workloads come in two
equivalent shapes, both exact in the learning rates, neither an n x n matrix:

 - a state space, h_i = Phi_i h_(i-1) + b_i g_i, iterate_i = c . h_i: the optimizer itself;
 - the lower bands of L = A^-1, ``inverse_bands[k, i] = L[i, i - k]``, in double-double.

With S = tril(ones), Z the down-shift and eta the learning rates (design.md, section 3):

    prefix-sum          L = I - Z
    sgd, momentum       L = (I - beta Z) diag(1/eta) (I - Z)
      decoupled decay   L = (I - beta Z) diag(1/eta) (I - diag(1 - eta lambda) Z)
      coupled decay     L = (I - beta Z) diag(1/eta) (I - Z) + lambda Z
    iterate EMA         L (I - gamma Z) / (1 - gamma) on the left: B = EMA of the iterates
"""

from __future__ import annotations

import hashlib
import math
import numbers
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit
from scipy.linalg import lapack

from mmfact.factorize import double_double as dd
from mmfact.factorize import schedule
from mmfact.factorize.errors import CapacityError, WorkloadError

Array = npt.NDArray[np.float64]

KINDS = ("prefix-sum", "sgd", "momentum", "custom")
DECAY_KINDS = ("coupled", "decoupled")

# Dense forms hold a few n x n matrices; at this n one of them is 512 MiB.
LARGEST_DENSE = 8192
# The structured form holds a few dozen numbers a step.
LARGEST_STRUCTURED = 1 << 24


@dataclass(frozen=True, eq=False)
class Workload:
    """One workload. Build it with `prefix_sum`, `sgd`, `momentum` or `custom`.

    Attributes
    ----------
    kind : {"prefix-sum", "sgd", "momentum", "custom"}
    n : int
        Steps.
    learning_rates : ndarray, shape (n,)
        eta, one a step; ones for prefix-sum and custom.
    schedule : str
        Canonical name of the learning rates, see `mmfact.factorize.schedule`.
    beta : float
        Momentum, in [0, 1). eta multiplies outside the momentum buffer, as in torch.optim.SGD.
    weight_decay : float
        lambda >= 0.
    weight_decay_kind : {"coupled", "decoupled"}
        Coupled: added to the gradient, as in torch.optim.SGD; decoupled: AdamW style.
    ema : float
        gamma in [0, 1); > 0 replaces the iterates by e_i = gamma e_(i-1) + (1 - gamma) x_i, e_(-1) = 0.
    matrix : ndarray, shape (n, n), or None
        A itself, for custom.
    """

    kind: str
    n: int
    learning_rates: Array = field(repr=False)
    schedule: str = "constant"
    beta: float = 0.0
    weight_decay: float = 0.0
    weight_decay_kind: str = "coupled"
    ema: float = 0.0
    matrix: Array | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise WorkloadError(f"workload kind {self.kind!r} is not known; use one of {', '.join(KINDS)}")
        check_horizon(self.n)
        object.__setattr__(self, "n", int(self.n))
        for name in ("beta", "weight_decay", "ema"):
            object.__setattr__(self, name, _real(name.replace("_", " "), getattr(self, name)))
        if not isinstance(self.schedule, str):
            raise WorkloadError(f"schedule {self.schedule!r} must be a name; see mmfact.factorize.schedule")
        object.__setattr__(self, "learning_rates", schedule.check_rates(self.learning_rates, self.n))
        if not 0 <= self.beta < 1:
            raise WorkloadError(f"beta = {self.beta!r} must be in [0, 1); 0 means no momentum")
        if not (math.isfinite(self.weight_decay) and self.weight_decay >= 0):
            raise WorkloadError(f"weight decay {self.weight_decay!r} must be finite and at least 0")
        if self.schedule == "constant":  # by whatever way the rates came in, the name must tell them apart
            object.__setattr__(self, "schedule", schedule.from_rates(self.learning_rates, self.n).name)
        if self.weight_decay_kind not in DECAY_KINDS:
            raise WorkloadError(
                f"weight decay kind {self.weight_decay_kind!r} is not known; "
                "use coupled (torch.optim.SGD) or decoupled (AdamW)"
            )
        if not 0 <= self.ema < 1:
            raise WorkloadError(f"ema = {self.ema!r} must be in [0, 1); 0 means the iterates themselves")
        if not self.weight_decay:
            object.__setattr__(self, "weight_decay_kind", "coupled")  # the kind of no decay is no difference
        else:
            shrink = self.weight_decay * self.learning_rates
            if shrink.max() >= 1:
                step = int(np.argmax(shrink))
                raise WorkloadError(
                    f"weight decay {self.weight_decay:g} times learning rate {self.learning_rates[step]:g} "
                    f"at step {step} is 1 or more, which would throw the iterate away; both act at the same scale as "
                    "in the optimizer, so give the schedule its real peak (for one: cooldown:peak=0.1)"
                )
        allowed = {"prefix-sum": (), "sgd": ("learning_rates", "weight_decay", "ema")}
        allowed["custom"] = ()
        allowed["momentum"] = ("beta", *allowed["sgd"])
        given = {
            "learning_rates": bool(np.any(self.learning_rates != 1)),
            "beta": self.beta != 0,
            "weight_decay": self.weight_decay != 0,
            "ema": self.ema != 0,
        }
        for name, is_given in given.items():
            if is_given and name not in allowed[self.kind]:
                raise WorkloadError(
                    f"{name.replace('_', ' ')} does not apply to workload {self.kind}; it would be ignored. "
                    + ("Put it into the matrix." if self.kind == "custom" else "Use sgd or momentum.")
                )
        if (self.kind == "custom") != (self.matrix is not None):
            raise WorkloadError("a matrix belongs to workload custom, and custom needs one")
        if self.matrix is not None:
            object.__setattr__(self, "matrix", _check_matrix(self.matrix))
            if len(self.matrix) != self.n:
                raise WorkloadError(
                    f"n = {self.n} contradicts the matrix, which is {len(self.matrix)} x {len(self.matrix)}"
                )

    @property
    def structured(self) -> bool:
        """Whether A^-1 is banded, so that the linear-time solver applies."""
        return self.matrix is None

    def spec(self) -> dict[str, Any]:
        """Kind and parameters, without arrays; JSON-ready."""
        return {
            "kind": self.kind,
            "n": self.n,
            "schedule": self.schedule,
            "beta": self.beta,
            "weight_decay": self.weight_decay,
            "weight_decay_kind": self.weight_decay_kind,
            "ema": self.ema,
        }

    def label(self) -> str:
        """A name that spells every parameter that is not the default; the default ref."""
        parts = [self.kind, f"n{self.n}"]
        if self.kind == "momentum" and self.beta != DEFAULT_BETA:
            parts.append(f"beta{self.beta!r}")
        if self.schedule != "constant":
            parts.append(self.schedule.replace(":", "-").replace(",", "-").replace("=", ""))
        if self.weight_decay:
            parts.append(f"wd{self.weight_decay!r}" + ("" if self.weight_decay_kind == "coupled" else "-decoupled"))
        if self.ema:
            parts.append(f"ema{self.ema!r}")
        if self.matrix is not None:
            parts.append(hashlib.sha256(self.matrix.astype("<f8").tobytes()).hexdigest()[:16])
        return "-".join(parts)

    def same_as(self, other: Workload) -> bool:
        """Whether both describe the very same matrix in the same words."""
        if self.spec() != other.spec() or not np.array_equal(self.learning_rates, other.learning_rates):
            return False
        return self.matrix is None or (other.matrix is not None and np.array_equal(self.matrix, other.matrix))

    def in_own_unit(self) -> tuple[float, Workload]:
        """(unit, workload of A / unit), the unit a power of two near A's largest step: exact, and the same strategy.

        Solvers square and invert; in their own unit the rates' magnitude cannot make them overflow.
        """
        largest = float(np.abs(self.learning_rates if self.matrix is None else self.matrix).max())
        unit = 2.0 ** round(math.log2(largest))
        if self.matrix is not None:
            return unit, replace(self, matrix=self.matrix / unit)
        return unit, replace(self, learning_rates=self.learning_rates / unit, weight_decay=self.weight_decay * unit)

    def state_space(self) -> tuple[Array, Array]:
        """(Phi, b) of shapes (n, m, m) and (n, m): h_i = Phi_i h_(i-1) + b_i g_i; the iterate is h_i[-1].

        The state is (momentum buffer, iterate, average), each only where there is one.
        """
        if self.matrix is not None:
            raise WorkloadError("a custom matrix has no state space; use dense()")
        eta, lam, n = self.learning_rates, self.weight_decay, self.n
        names = (["m"] if self.beta else []) + ["x"] + (["e"] if self.ema else [])
        size, x = len(names), names.index("x")
        Phi, b = np.zeros((n, size, size)), np.zeros((n, size))
        Phi[:, x, x] = 1 - eta * lam
        b[:, x] = eta
        if self.beta:
            b[:, 0] = 1
            Phi[:, 0, 0] = self.beta
            Phi[:, x, 0] = eta * self.beta
            if self.weight_decay_kind == "coupled":
                Phi[:, 0, x] = -lam
        if self.ema:
            Phi[:, -1, :] = (1 - self.ema) * Phi[:, x, :]
            Phi[:, -1, -1] = self.ema
            b[:, -1] = (1 - self.ema) * b[:, x]
        return Phi, b

    def apply(self, rows: Array) -> Array:
        """A @ rows, for rows of shape (n, d), by running the optimizer over them."""
        rows = np.ascontiguousarray(rows, dtype=np.float64)
        if rows.ndim != 2 or rows.shape[0] != self.n:
            raise WorkloadError(f"rows have shape {rows.shape}; A is {self.n} x {self.n}, give shape ({self.n}, d)")
        if self.matrix is not None:
            return self.matrix @ rows
        return _run(*self.state_space(), rows)

    def dense(self) -> Array:
        """A as an n x n array."""
        check_dense(self.n, "the matrix A")
        return self.matrix.copy() if self.matrix is not None else self.apply(np.eye(self.n))

    def column_energies(self) -> Array:
        """norm2(A[:, j])^2 for every j, shape (n,); linear in n for structured workloads."""
        if self.matrix is not None:
            return np.einsum("ij,ij->j", self.matrix, self.matrix)
        return _column_energies(*self.state_space())

    def inverse_bands(self) -> tuple[Array, Array]:
        """Bands of L = A^-1 as a double-double pair, each of shape (w + 1, n).

        The first array alone is L rounded to float64.
        """
        if self.matrix is not None:
            raise WorkloadError("a custom matrix has no banded inverse; the dense solver applies")
        n, eta, lam = self.n, self.learning_rates, self.weight_decay
        keep = np.ones(n), np.zeros(n)
        if lam and self.weight_decay_kind == "decoupled":
            shrink = dd.two_product(eta, lam)
            keep = dd.add(1.0, 0.0, -shrink[0], -shrink[1])
        L = _bidiagonal(n, dd.divide(np.ones(n), 0.0, eta, 0.0))
        L = _product(L, _bidiagonal(n, 1.0, keep))
        if self.beta:
            L = _product(_bidiagonal(n, 1.0, (self.beta, 0.0)), L)
        if lam and self.weight_decay_kind == "coupled" and n > 1:
            L[:, 1, 1:] = dd.add(L[0, 1, 1:], L[1, 1, 1:], lam, 0.0)
        if self.ema:
            scale = dd.divide(1.0, 0.0, *dd.two_sum(1.0, -self.ema))
            L = _product(L, _bidiagonal(n, 1.0, (self.ema, 0.0)))
            L = _product(L, _bidiagonal(n, scale))
        return L[0], L[1]


# The momentum that `--beta` and `momentum` stand for when nothing is said.
DEFAULT_BETA = 0.9


def prefix_sum(n: int) -> Workload:
    """A = S: plain sums of the gradients."""
    check_horizon(n)
    return Workload("prefix-sum", n, np.ones(n))


def sgd(n: int, *, learning_rates: schedule.Schedule | npt.ArrayLike | None = None, **options: Any) -> Workload:
    """SGD without momentum: A = S diag(eta), with weight decay and iterate EMA as options of `Workload`."""
    check_horizon(n)
    rates = _rates(learning_rates, n)
    return Workload("sgd", n, rates.rates, rates.name, **options)


def momentum(
    n: int,
    *,
    beta: float = DEFAULT_BETA,
    learning_rates: schedule.Schedule | npt.ArrayLike | None = None,
    **options: Any,
) -> Workload:
    """SGD with momentum: A[i, j] = sum_(k=j..i) eta_k beta^(k-j), the rate applied outside the buffer.

    The rate inside the buffer, Nesterov momentum and dampening are other workloads: pass their
    matrix to `custom`.
    """
    check_horizon(n)
    rates = _rates(learning_rates, n)
    return Workload("momentum", n, rates.rates, rates.name, beta=beta, **options)


def custom(matrix: npt.ArrayLike) -> Workload:
    """Any full-rank lower-triangular matrix.

    Raises
    ------
    WorkloadError
        Not square, not lower-triangular, a zero on the diagonal (the step is named), numerically
        singular, not finite, or not real numbers.
    CapacityError
        n above `LARGEST_DENSE`.
    """
    A = _check_matrix(matrix)
    return Workload("custom", len(A), np.ones(len(A)), matrix=A)


def check_horizon(n: int) -> None:
    """Raise unless n is a whole number of steps that any form can hold."""
    if isinstance(n, bool) or not isinstance(n, int | np.integer) or n < 1:
        raise WorkloadError(f"n = {n!r} must be a whole number of steps, at least 1")
    if n > LARGEST_STRUCTURED:
        raise CapacityError(
            f"n = {n} is above the largest horizon of this version, {LARGEST_STRUCTURED} steps "
            f"(its multipliers and learning rates alone would take {-(-16 * n >> 30):,} GiB); choose a smaller n"
        )


def check_dense(n: int, what: str) -> None:
    """Raise `CapacityError`, with the memory it would take, when an n x n form of `what` is too large."""
    if n > LARGEST_DENSE:
        raise CapacityError(
            f"{what} for n = {n} is dense: {8 * n * n / 2**30:,.1f} GiB for one matrix, about "
            f"{6 * 8 * n * n / 2**30:,.1f} GiB to compile; the limit is n = {LARGEST_DENSE}. Choose a smaller n"
        )


def _real(what: str, value: Any) -> float:
    if isinstance(value, bool | np.bool_) or not isinstance(value, numbers.Real):
        raise WorkloadError(f"{what} = {value!r} must be a real number")
    try:
        return float(value)
    except OverflowError:
        raise WorkloadError(f"{what} must be finite, not a number of {len(str(value))} digits") from None


def _rates(given: schedule.Schedule | npt.ArrayLike | None, n: int) -> schedule.Schedule:
    if given is None:
        return schedule.named("constant", n)
    return given if isinstance(given, schedule.Schedule) else schedule.from_rates(given, n)


def _check_matrix(matrix: npt.ArrayLike) -> Array:
    try:
        A = np.asarray(matrix)
    except ValueError as error:
        raise WorkloadError(f"the matrix is not an array of numbers ({error})") from error
    if A.dtype.kind not in "fiu":
        raise WorkloadError(
            f"the matrix holds {A.dtype}, but a workload is made of real numbers; convert it to float64"
        )
    if A.ndim != 2 or A.shape[0] != A.shape[1] or A.size == 0:
        raise WorkloadError(f"the matrix has shape {A.shape}; a workload is square, one row and column a step")
    check_dense(len(A), "a custom matrix")
    A = np.array(A, dtype=np.float64)
    if not np.isfinite(A).all():
        i, j = np.argwhere(~np.isfinite(A))[0]
        raise WorkloadError(f"the matrix holds {A[i, j]} at row {i}, column {j}; every entry must be finite")
    upper = np.triu(A, 1)
    if upper.any():
        i, j = np.argwhere(upper)[0]
        raise WorkloadError(
            f"the matrix holds {A[i, j]:g} at row {i}, column {j}, above the diagonal: an iterate cannot depend on a "
            "later gradient. Give a lower-triangular matrix (perhaps the transpose of this one)"
        )
    diagonal = np.abs(np.diag(A))
    if not diagonal.all():
        raise WorkloadError(
            f"the matrix has a zero on its diagonal at step {int(np.argmin(diagonal))}: it is singular, and the step's "
            "gradient would not be used at once. Give a matrix of full rank"
        )
    largest = float(np.abs(A).max())
    if not schedule.SMALLEST_RATE <= largest <= schedule.LARGEST_RATE:
        raise WorkloadError(
            f"the matrix's largest entry is {largest:.3g}; scale it to lie between {schedule.SMALLEST_RATE:g} and "
            f"{schedule.LARGEST_RATE:g} (a constant factor changes no strategy, only the unit of the loss)"
        )
    rcond, _ = lapack.dtrcon(A, norm="1", uplo="L")
    if rcond < np.finfo(float).eps:
        raise WorkloadError(
            f"the matrix is singular to working precision (reciprocal condition {rcond:.1e}, at least "
            f"{np.finfo(float).eps:.1e} is needed); rescale its rows or columns or remove dependent steps"
        )
    A.flags.writeable = False
    return A


def _bidiagonal(n: int, diagonal: Any, minus_below: Any = None) -> Array:
    """diag(diagonal) - diag(minus_below) Z as bands in double-double, shape (2, 1 or 2, n)."""
    bands = np.zeros((2, 1 if minus_below is None else 2, n))
    bands[0, 0], bands[1, 0] = diagonal if isinstance(diagonal, tuple) else (diagonal, 0.0)
    if minus_below is not None:
        for part in range(2):
            bands[part, 1, 1:] = -np.broadcast_to(minus_below[part], n)[1:]
    return bands


def _product(F: Array, G: Array) -> Array:
    """Bands of F G, both lower-banded, in double-double."""
    p, q, n = F.shape[1] - 1, G.shape[1] - 1, F.shape[2]
    out = np.zeros((2, min(p + q, n - 1) + 1, n))
    for a in range(p + 1):
        for b in range(q + 1):
            k = a + b
            if k < n:  # entry (i, i-k) collects F[i, i-a] G[i-a, i-k]
                term = dd.multiply(F[0, a, k:], F[1, a, k:], G[0, b, b : n - a], G[1, b, b : n - a])
                out[:, k, k:] = dd.add(out[0, k, k:], out[1, k, k:], *term)
    return out


@njit(cache=True, nogil=True)
def _run(Phi: Array, b: Array, rows: Array) -> Array:
    n, size = b.shape
    d = rows.shape[1]
    state, fresh = np.zeros((size, d)), np.zeros((size, d))
    out = np.empty((n, d))
    for i in range(n):
        for a in range(size):
            for e in range(d):
                fresh[a, e] = b[i, a] * rows[i, e]
            for c in range(size):
                if Phi[i, a, c] != 0.0:
                    for e in range(d):
                        fresh[a, e] += Phi[i, a, c] * state[c, e]
        state, fresh = fresh, state
        out[i] = state[size - 1]
    return out


@njit(cache=True, nogil=True)
def _column_energies(Phi: Array, b: Array) -> Array:
    """b_j' O_j b_j with the observability Gramian O_j = c c' + Phi_(j+1)' O_(j+1) Phi_(j+1)."""
    n, size = b.shape
    gramian = np.zeros((size, size))
    out = np.empty(n)
    for j in range(n - 1, -1, -1):
        if j < n - 1:
            gramian = Phi[j + 1].T @ gramian @ Phi[j + 1]
        gramian[size - 1, size - 1] += 1.0
        out[j] = b[j] @ (gramian @ b[j])
    return out
