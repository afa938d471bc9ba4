"""Workload and options in, certified factorization out."""

from __future__ import annotations

import hashlib
import numbers
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mmfact.factorize import certificate as certificates
from mmfact.factorize import optimum as optima
from mmfact.factorize.certificate import Certificate
from mmfact.factorize.construct import banded_low_rank, buffered, dense
from mmfact.factorize.errors import CapacityError, WorkloadError
from mmfact.factorize.optimum import METHODS, Optimum, Progress
from mmfact.factorize.participation import Participation, single
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.protocol import DTYPES, Strategy
from mmfact.factorize.workload import Workload, check_dense

STRATEGIES = ("buffered", "banded-low-rank", "dense")
DEFAULT_TOLERANCE = 1e-4

_LONGEST_REF = 150  # file systems allow names of 255 bytes


@dataclass(frozen=True)
class Options:
    """What the user chose; part of the artifact's provenance.

    Attributes
    ----------
    strategy : {"buffered", "banded-low-rank", "dense"}
    buffers : int, optional
        Of the buffered strategy. Default: the fewest, up to 128, whose excess is within `tolerance`.
    bandwidth, rank : int, optional
        Of the banded + low-rank strategy. Default: the cheapest pair whose excess is within `tolerance`.
    dtype : {"float32", "float64"}
        Of the stored coefficients. Default: float32, and float64 for the dense strategy, where a cast of each of its
        n (n+1) / 2 coefficients to float32 alone costs an excess of order 1e-7.
    tolerance : float
        Largest acceptable excess of what is shipped. The solver goes to min(1e-10, tolerance / 100).
    method : {"auto", "structured", "dense", "fixed-point"}
        See `mmfact.factorize.optimum.solve`.
    """

    strategy: str = "buffered"
    dtype: str = ""
    tolerance: float = DEFAULT_TOLERANCE
    method: str = "auto"
    buffers: int | None = None
    bandwidth: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise WorkloadError(f"strategy {self.strategy!r} is not known; use one of {', '.join(STRATEGIES)}")
        if not self.dtype:
            object.__setattr__(self, "dtype", default_dtype(self.strategy))
        if self.dtype not in DTYPES:
            raise WorkloadError(f"dtype {self.dtype!r} is not allowed; use one of {', '.join(DTYPES)}")
        if self.method not in METHODS:
            raise WorkloadError(f"method {self.method!r} is not known; use one of {', '.join(METHODS)}")
        object.__setattr__(self, "tolerance", float(self.tolerance))
        if not 0 < self.tolerance < 1:
            raise WorkloadError(f"tolerance {self.tolerance!r} must be in (0, 1): it is the largest acceptable excess")
        for name, strategy in (
            ("buffers", "buffered"),
            ("bandwidth", "banded-low-rank"),
            ("rank", "banded-low-rank"),
        ):
            value = getattr(self, name)
            if value is None:
                continue
            if strategy != self.strategy:
                raise WorkloadError(f"{name} does not apply to strategy {self.strategy}; use it with {strategy}")
            if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
                raise WorkloadError(f"{name} = {value!r} must be a whole number of at least 1")
            object.__setattr__(self, name, int(value))

    @property
    def solver_tolerance(self) -> float:
        """Where the solver stops; the plain fixed point, which is slow, only as far as asked."""
        return self.tolerance if self.method == "fixed-point" else min(1e-10, self.tolerance / 100)

    def label(self) -> str:
        """The part of a default ref that spells every option that is not the default."""
        default, parts = Options(), []
        if self.strategy != default.strategy:
            parts.append(self.strategy)
        for name in ("buffers", "bandwidth", "rank"):
            if getattr(self, name) is not None:
                parts.append(f"{name}{getattr(self, name)}")
        if self.dtype != default_dtype(self.strategy):
            parts.append(self.dtype)
        if self.tolerance != default.tolerance:
            parts.append(f"tolerance{self.tolerance!r}")
        if self.method != default.method:
            parts.append(f"method-{self.method}" if self.method in STRATEGIES else self.method)
        return "".join(f"-{part}" for part in parts)

    def spec(self) -> dict[str, Any]:
        """The options that were chosen as plain values; JSON-ready."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def default_dtype(strategy: str) -> str:
    """The precision of a strategy's coefficients when nothing is said."""
    return "float64" if strategy == "dense" else "float32"


def check(workload: Workload, options: Options) -> None:
    """Raise, before anything large is allocated, unless the options fit the workload and its size."""
    n = workload.n
    if options.strategy == "buffered":
        if options.buffers is not None:
            buffered.check_buffers(options.buffers, n)
        if not workload.structured:
            check_dense(n, "the buffered strategy of a workload without a banded inverse")
        if options.method == "dense":
            check_dense(n, "the dense solver, asked for by method dense (auto is linear for this workload),")
    else:
        try:
            check_dense(n, f"the {options.strategy} strategy")
        except CapacityError as error:
            if not workload.structured:
                raise
            raise CapacityError(f"{error}, or use strategy buffered, whose time and memory are linear in n") from None
    if options.strategy == "banded-low-rank":
        banded_low_rank.check_pair(options.bandwidth, options.rank, n)


def default_ref(workload: Workload, options: Options) -> str:
    """The name of an artifact whose user gave none: it spells every parameter that is not the default.

    A very long name keeps its beginning and ends in a digest of the whole.
    """
    name = workload.label() + options.label()
    if len(name) <= _LONGEST_REF:
        return name
    return f"{name[: _LONGEST_REF - 17]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


@dataclass(frozen=True, eq=False)
class Factorization:
    """A workload with its certified strategy: A = B C, B = A C^-1.

    `tolerance_reached` says whether the certificate's excess is within the options' tolerance; `origin` whether the
    strategy was compiled here or given by the user.
    """

    workload: Workload
    participation: Participation
    options: Options
    strategy: Strategy
    optimum: Optimum
    certificate: Certificate
    origin: str = "compiled"

    @property
    def tolerance_reached(self) -> bool:
        return self.certificate.excess <= self.options.tolerance


def compile(
    workload: Workload,
    options: Options | None = None,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Factorization:
    """Compute the optimal factorization of `workload` and certify it.

    Raises
    ------
    WorkloadError, CapacityError
        The options do not fit the workload or its size; raised before anything large is allocated.
    SolverError
        No certificate could be had.
    """
    options = options or Options()
    check(workload, options)
    participation = single()
    found = optima.solve(workload, method=options.method, tolerance=options.solver_tolerance, on_progress=on_progress)
    strategy = _construct(workload, found, participation, options, on_progress)
    return Factorization(
        workload,
        participation,
        options,
        strategy,
        found,
        certificates.certify(workload, strategy, found, participation),
    )


def _construct(
    workload: Workload,
    found: Optimum,
    participation: Participation,
    options: Options,
    on_progress: Callable[[Progress], None],
) -> Strategy:
    if options.strategy == "dense":
        return dense.build(workload, found, participation, options.dtype)
    if options.strategy == "buffered":
        return buffered.build(
            workload,
            found,
            participation,
            buffers=options.buffers,
            tolerance=options.tolerance,
            dtype=options.dtype,
            on_progress=on_progress,
        )
    return banded_low_rank.build(
        workload,
        found,
        participation,
        bandwidth=options.bandwidth,
        rank=options.rank,
        tolerance=options.tolerance,
        dtype=options.dtype,
        on_progress=on_progress,
    )


def adopt(
    workload: Workload,
    strategy: Strategy,
    options: Options | None = None,
    *,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Factorization:
    """Certify a strategy that somebody else made: how far is it from the optimum of `workload`?

    For factors in another shape see `lower_triangular` and `lower_triangular_pair` in
    `mmfact.factorize.strategy.dense`.

    Raises
    ------
    WorkloadError
        The strategy has another number of steps than the workload.
    SolverError
        No certificate could be had.
    """
    options = options or Options(strategy=strategy.kind, dtype=strategy.dtype.name)
    participation = single()
    found = optima.solve(workload, method=options.method, tolerance=options.solver_tolerance, on_progress=on_progress)
    certificate = certificates.certify(workload, strategy, found, participation)
    return Factorization(workload, participation, options, strategy, found, certificate, origin="given")


def independent(workload: Workload) -> Factorization:
    """Fresh noise at every step, C = I, certified for `workload`: O(n) to store, for any horizon.

    The mechanism of DP-SGD as an artifact: each step is a Gaussian release of its own with mu = 1 / sigma, so that
    Poisson sampling amplifies it (`mmfact.factorize.accounting.poisson_dpsgd_epsilon`).
    """
    nothing = np.zeros((workload.n, 1), np.float32)
    return adopt(workload, BufferedStrategy(c=np.ones(workload.n, np.float32), g=nothing, decay=nothing, q=nothing))
