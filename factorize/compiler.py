"""Workload and options in, certified factorization out."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mmfact.factorize import certificate as certificates
from mmfact.factorize import optimum as optima
from mmfact.factorize.certificate import Certificate
from mmfact.factorize.construct import dense
from mmfact.factorize.errors import WorkloadError
from mmfact.factorize.optimum import METHODS, Optimum, Progress
from mmfact.factorize.participation import Participation, single
from mmfact.factorize.strategy.dense import DTYPES, DenseStrategy
from mmfact.factorize.workload import Workload, check_dense

STRATEGIES = ("dense",)
DEFAULT_TOLERANCE = 1e-4

_LONGEST_REF = 150  # file systems allow names of 255 bytes


@dataclass(frozen=True)
class Options:
    """What the user chose; part of the artifact's provenance.

    Attributes
    ----------
    strategy : {"dense"}
    dtype : {"float32", "float64"}
        Of the stored coefficients. float64 by default for the dense strategy: a cast of each of its
        n (n+1) / 2 coefficients to float32 alone costs an excess of order 1e-7.
    tolerance : float
        Largest acceptable excess of what is shipped. The solver goes to min(1e-10, tolerance / 100).
    method : {"auto", "structured", "dense", "fixed-point"}
        See `mmfact.factorize.optimum.solve`.
    """

    strategy: str = "dense"
    dtype: str = "float64"
    tolerance: float = DEFAULT_TOLERANCE
    method: str = "auto"

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise WorkloadError(f"strategy {self.strategy!r} is not known; use one of {', '.join(STRATEGIES)}")
        if self.dtype not in DTYPES:
            raise WorkloadError(f"dtype {self.dtype!r} is not allowed; use one of {', '.join(DTYPES)}")
        if self.method not in METHODS:
            raise WorkloadError(f"method {self.method!r} is not known; use one of {', '.join(METHODS)}")
        object.__setattr__(self, "tolerance", float(self.tolerance))
        if not 0 < self.tolerance < 1:
            raise WorkloadError(f"tolerance {self.tolerance!r} must be in (0, 1): it is the largest acceptable excess")

    @property
    def solver_tolerance(self) -> float:
        """Where the solver stops; the plain fixed point, which is slow, only as far as asked."""
        return self.tolerance if self.method == "fixed-point" else min(1e-10, self.tolerance / 100)

    def label(self) -> str:
        """The part of a default ref that spells every option that is not the default."""
        default, parts = Options(), []
        if self.dtype != default.dtype:
            parts.append(self.dtype)
        if self.tolerance != default.tolerance:
            parts.append(f"tolerance{self.tolerance!r}")
        if self.method != default.method:
            parts.append(self.method)
        return "".join(f"-{part}" for part in parts)

    def spec(self) -> dict[str, Any]:
        """The options as plain values; JSON-ready."""
        return {"strategy": self.strategy, "dtype": self.dtype, "tolerance": self.tolerance, "method": self.method}


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
    strategy: DenseStrategy
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
    check_dense(workload.n, f"the {options.strategy} strategy")
    participation = single()
    found = optima.solve(workload, method=options.method, tolerance=options.solver_tolerance, on_progress=on_progress)
    strategy = dense.build(workload, found, participation, options.dtype)
    return Factorization(
        workload,
        participation,
        options,
        strategy,
        found,
        certificates.certify(workload, strategy, found, participation),
    )


def adopt(
    workload: Workload,
    strategy: DenseStrategy,
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
    options = options or Options(dtype=strategy.dtype.name)
    participation = single()
    found = optima.solve(workload, method=options.method, tolerance=options.solver_tolerance, on_progress=on_progress)
    certificate = certificates.certify(workload, strategy, found, participation)
    return Factorization(workload, participation, options, strategy, found, certificate, origin="given")
