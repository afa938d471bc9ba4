"""The optimal factorization's multipliers and the lower bound that they prove.

Two ways to the maximum of the dual g(v) (`mmfact.factorize.dual`):

 - Newton's method in u = log v with conjugate gradients on the curvature, preconditioned by its
   diagonal; quadratic at the end, a handful of steps in all;
 - the fixed point v <- phi(v) of Denisov et al. 2022 (section 3), as published: linear, and slow for
   workloads whose A grows with n. Kept to be compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from mmfact.factorize import warm_start
from mmfact.factorize.dual import EPS, Array, Dual, Evaluation
from mmfact.factorize.dual_dense import DenseDual
from mmfact.factorize.dual_structured import StructuredDual
from mmfact.factorize.errors import SolverError, WorkloadError
from mmfact.factorize.workload import LARGEST_DENSE, Workload, check_dense

METHODS = ("auto", "structured", "dense", "fixed-point")

# An error budget (quadrature and rounding) of the structured path above this sends `auto` to the dense one.
ERROR_BUDGET = 1e-10

_FIRST_STEPS = 3  # fixed-point steps before Newton; they bring any start into its region
_ROUGHLY = 1e-6  # how far a shorter horizon is solved
_NEWTON_STEPS = 60
_CG_STEPS = 300
_FIXED_POINT_STEPS = 20_000
_LONGEST_STEP = 3.0  # in log v
_FLAT = 1e-9  # predicted relative improvement of the bound below which its rounding begins to show


@dataclass(frozen=True, eq=False)
class Optimum:
    """The best multipliers found and what they prove.

    Attributes
    ----------
    multipliers : ndarray, shape (n,)
        v > 0.
    lower_bound : float
        No factorization of A has a smaller loss; quadrature and rounding errors are already taken off.
    trace : float
        T(v), the nuclear norm of A diag(v)^(1/2).
    quadrature_error, rounding : float
        Relative error bounds of T that went into `lower_bound`.
    residual : float
        max |log(phi / v)|, 0 at the optimum.
    gap : float
        First-order bound on the excess of X(v), free with every evaluation; the true excess of the
        strategy built from v is of second order in the residual.
    iterations, products : int
        Evaluations of the dual, and curvature products inside conjugate gradients; those of the shorter horizons
        that the start comes from are not counted.
    method : {"structured", "dense"}
        What evaluated the final multipliers.
    fixed_point : bool
        Whether the plain fixed point was run instead of Newton's method.
    converged : bool
        Whether the tolerance asked for was reached.
    fell_back : bool
        Whether the structured path's error budget sent the problem to the dense one.
    history : tuple of float
        `gap` at each evaluation.
    """

    multipliers: Array = field(repr=False)
    lower_bound: float
    trace: float
    quadrature_error: float
    rounding: float
    residual: float
    gap: float
    iterations: int
    products: int
    method: str
    fixed_point: bool
    converged: bool
    fell_back: bool
    history: tuple[float, ...] = field(repr=False)
    evaluation: Evaluation = field(repr=False)


@dataclass(frozen=True)
class Progress:
    """What a running compilation reports.

    Attributes
    ----------
    stage : str
        What is being done: "optimum" here; "strategy" and others where strategies are built.
    iteration, gap : int, float or None
        Evaluations of the dual so far and the current first-order gap.
    fraction : float or None
        Of the stage, where its end is known.
    """

    stage: str
    iteration: int | None = None
    gap: float | None = None
    fraction: float | None = None


def silent(progress: Progress) -> None:
    """Report to nobody."""
    del progress


def solve(
    workload: Workload,
    *,
    method: str = "auto",
    tolerance: float = 1e-10,
    on_progress: Callable[[Progress], None] = silent,
) -> Optimum:
    """Maximise the dual of `workload`.

    Parameters
    ----------
    workload : Workload
    method : {"auto", "structured", "dense", "fixed-point"}
        ``auto``: structured where A^-1 is banded, dense otherwise or where the structured error
        budget exceeds `ERROR_BUDGET` and n allows.
    tolerance : float
        Relative distance from the optimal loss at which to stop. Newton stops when the predicted
        improvement of a step that it has taken is below it; the fixed point when its first-order
        `gap` is.
    on_progress : callable
        Called with a `Progress` after every evaluation.

    Raises
    ------
    WorkloadError, CapacityError
        The method does not apply to the workload or its size.
    SolverError
        The iteration broke down.
    """
    if method not in METHODS:
        raise WorkloadError(f"method {method!r} is not known; use one of {', '.join(METHODS)}")
    if not 0 < tolerance < 1:
        raise WorkloadError(f"tolerance {tolerance!r} must be in (0, 1)")
    if method == "structured" and not workload.structured:
        raise WorkloadError("method structured needs a banded inverse, which a custom matrix does not have; use dense")
    dense = method == "dense" or not workload.structured
    if dense:
        check_dense(workload.n, "the dense solver")
    unit, workload = workload.in_own_unit()
    if method == "auto" and not dense and workload.n <= LARGEST_DENSE:
        try:
            return _solve(workload, unit, method, False, tolerance, on_progress)
        except SolverError:  # no poles for so large a condition number, or digits lost on the way
            return replace(_solve(workload, unit, method, True, tolerance, on_progress), fell_back=True)
    return _solve(workload, unit, method, dense, tolerance, on_progress)


def _solve(
    workload: Workload,
    unit: float,
    method: str,
    dense: bool,
    tolerance: float,
    on_progress: Callable[[Progress], None],
) -> Optimum:
    dual: Dual = DenseDual(workload) if dense else StructuredDual(workload)
    if method == "fixed-point":
        run = _fixed_point(dual, dual.start(), tolerance, on_progress)
    elif dense:
        run = _newton(dual, dual.start(), tolerance, on_progress)
    else:
        start = warm_start.multipliers(workload, _roughly)
        run = _newton(dual, dual.start() if start is None else start, tolerance, on_progress)
    found = _certified(dual, run, unit, method == "fixed-point")
    budget = found.quadrature_error + found.rounding
    if method == "auto" and not dense and budget > ERROR_BUDGET and workload.n <= LARGEST_DENSE:
        dual = DenseDual(workload)
        again = _newton(dual, found.multipliers, tolerance, on_progress)
        return replace(_certified(dual, again, unit, False), fell_back=True)
    return found


def _roughly(workload: Workload) -> Array:
    """Multipliers to start a longer horizon from."""
    dual = StructuredDual(workload)
    start = warm_start.multipliers(workload, _roughly)
    return _newton(dual, dual.start() if start is None else start, _ROUGHLY, silent).at.v


@dataclass(frozen=True, eq=False)
class _Run:
    at: Evaluation
    converged: bool
    products: int
    history: tuple[float, ...]


def _certified(dual: Dual, run: _Run, unit: float, fixed_point: bool) -> Optimum:
    v = run.at.v
    certified = dual.certify(v)
    low = certified.trace * max(0.0, 1 - certified.error)
    lower_bound = low * (low / math.fsum(v)) * (1 - 4 * EPS)
    return Optimum(
        multipliers=v,
        lower_bound=lower_bound * unit * unit,
        trace=certified.trace * unit,
        quadrature_error=certified.quadrature_error,
        rounding=certified.rounding,
        residual=run.at.residual,
        gap=run.at.gap,
        iterations=len(run.history),
        products=run.products,
        method=dual.name,
        fixed_point=fixed_point,
        converged=run.converged,
        fell_back=False,
        history=run.history,
        evaluation=run.at,
    )


def _fixed_point(dual: Dual, v: Array, tolerance: float, on_progress: Callable[[Progress], None]) -> _Run:
    history: list[float] = []
    while True:
        at = dual.evaluate(v)
        history.append(at.gap)
        on_progress(Progress("optimum", len(history), at.gap))
        if at.gap <= tolerance or len(history) >= _FIXED_POINT_STEPS:
            return _Run(at, at.gap <= tolerance, 0, tuple(history))
        v = at.phi


def _newton(dual: Dual, v: Array, tolerance: float, on_progress: Callable[[Progress], None]) -> _Run:
    history: list[float] = []

    def evaluate(v: Array) -> Evaluation:
        at = dual.evaluate(v)
        history.append(at.gap)
        on_progress(Progress("optimum", len(history), at.gap))
        return at

    at = evaluate(v)
    for _ in range(_FIRST_STEPS):
        at = evaluate(at.phi)
    products = 0
    for _ in range(_NEWTON_STEPS):
        gradient = at.phi - at.v * (at.trace / float(at.v.sum()))
        step, used = _conjugate_gradients(dual, at, gradient)
        products += used
        improvement = 0.5 * _dot(gradient, step) / at.trace
        length, better = 1.0, None
        while length > 1e-3:
            trial = evaluate(at.v * np.exp(np.clip(length * step, -_LONGEST_STEP, _LONGEST_STEP)))
            climbs = trial.bound >= at.bound * (1 - 1e-14)
            # Where the bound is flat to rounding, steps are judged by what they are still for: the
            # residual of multipliers so small that the bound hardly feels them.
            settles = improvement <= _FLAT and trial.residual < at.residual
            if climbs or settles:
                better = trial
                break
            length /= 2
        if better is None:
            if improvement <= tolerance and at.residual <= math.sqrt(tolerance):
                break
            better = evaluate(at.phi)  # never descends, however bad the quadratic model
        at = better
        # The bound is flat in v_i where v_i is small, but the strategy's loss is not: both must have settled.
        if length == 1.0 and improvement <= tolerance and at.residual <= math.sqrt(tolerance):
            return _Run(at, True, products, tuple(history))
    settled = improvement <= tolerance and at.residual <= math.sqrt(tolerance)
    return _Run(at, settled, products, tuple(history))


def _conjugate_gradients(dual: Dual, at: Evaluation, gradient: Array) -> tuple[Array, int]:
    """Solve (K + E) p = gradient to a relative accuracy that shrinks with the gap, so that Newton stays fast.

    The Hessian in u is -(K - diag(gradient)). E keeps the part of it that adds curvature,
    max(-gradient, 0): multipliers that must fall a long way are then not sent down too far.
    """
    extra = np.maximum(-gradient, 0.0)
    diagonal = dual.curvature_diagonal(at) + extra
    accuracy = min(0.03, math.sqrt(max(at.gap, 1e-16)))
    p = np.zeros_like(gradient)
    residual = gradient.copy()
    z = residual / diagonal
    q = z.copy()
    rz = first = _dot(residual, z)
    used = 0
    while used < _CG_STEPS and rz > accuracy**2 * first and first > 0:
        Kq = dual.curvature_product(at, q) + extra * q
        alpha = rz / _dot(q, Kq)
        p += alpha * q
        residual -= alpha * Kq
        z = residual / diagonal
        previous, rz = rz, _dot(residual, z)
        q = z + (rz / previous) * q
        used += 1
    return p, used


def _dot(x: Array, y: Array) -> float:
    """Not x @ y: on long vectors BLAS would start threads that then spin on the cores of the sweeps."""
    return float((x * y).sum())
