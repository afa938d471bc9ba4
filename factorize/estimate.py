"""How long a compilation will take and how much memory, before it starts.

A model of operation counts with the constants that `benchmarks/estimate.py` fits on two cores; on another machine
the time is off by its speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmfact.factorize.compiler import Options
from mmfact.factorize.construct.buffered import ROWS
from mmfact.factorize.dual_structured import StructuredDual
from mmfact.factorize.errors import SolverError
from mmfact.factorize.workload import Workload

# Seconds; fitted by benchmarks/estimate.py
_START = 1.0
_SOLVE = 4.0e-7  # a step, pole and squared bandwidth of A^-1, without momentum
_SOLVE_MOMENTUM = 7.5e-7  # with it the optimum takes more products
_STRATEGY = 1.2e-4  # a step
_CUBED = 1.0e-10  # a cubed step, for each product or solve with dense triangles
_DENSE_SOLVER = 125  # of them: about a dozen singular value decompositions
_FITS = 12  # pairs of bandwidth and rank that are tried, two each
# Bytes
_BASE = 185 << 20
_MATRICES = 6  # of n x n float64
_SOLVER_MATRICES = 12


@dataclass(frozen=True)
class Estimate:
    """What a compilation will take.

    Attributes
    ----------
    seconds : float
        On two cores of the machine on which the model was fitted.
    memory : int
        Bytes, at the peak.
    """

    seconds: float
    memory: int


def estimate(workload: Workload, options: Options) -> Estimate:
    """The time and memory that `compile` will take."""
    n = workload.n
    seconds, memory = _START, float(_BASE)
    dense = not workload.structured or options.method == "dense"
    if not dense:
        try:
            dual = StructuredDual(workload.in_own_unit()[1])
            poles, w = len(dual.poles(dual.start()).shifts), len(dual.bands) - 1
            seconds += (_SOLVE if w == 1 else _SOLVE_MOMENTUM) * n * poles * w * w
            memory += 8 * n * (4 * poles * w + 60)
        except SolverError:  # the compiler will go the dense way too
            dense = True
    cubes, matrices = (_DENSE_SOLVER, _SOLVER_MATRICES) if dense else (0, _MATRICES)
    if options.strategy == "buffered":
        seconds += _STRATEGY * n
        memory += 8 * n * (ROWS * ROWS + 5 * ROWS)
    else:
        fits = 0 if options.strategy == "dense" else 1 if options.bandwidth and options.rank else _FITS
        cubes += 1 + 2 * fits
    seconds += cubes * _CUBED * n**3
    if cubes:
        memory = max(memory, _BASE + 8.0 * matrices * n * n)
    return Estimate(seconds, int(memory))
