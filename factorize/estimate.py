"""How long a compilation will take and how much memory, before it starts.

A model of operation counts with the constants that `benchmarks/estimate.py` fits on two cores; on another machine
the time is off by its speed.
"""

from __future__ import annotations

from dataclasses import dataclass

from mmfact.factorize.compiler import Options
from mmfact.factorize.construct.buffered import ROWS
from mmfact.factorize.dual_structured import StructuredDual
from mmfact.factorize.workload import Workload

# Seconds; fitted by benchmarks/estimate.py
_START = 0.5
_SOLVE = 2e-7  # a step, pole and squared bandwidth of A^-1; more with momentum, whose optimum takes more products
_SOLVE_MOMENTUM = 6e-7
_STRATEGY = 1.5e-4  # a step
_DENSE_SOLVE = 8e-11  # a cubed step
_PAIR = 1.5e-9  # a squared step, for each of about a dozen fits and their figures
# Bytes
_BASE = 250 << 20
_MATRICES = 6  # of n x n float64


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
    structured = workload.structured and options.method != "dense"
    if structured:
        dual = StructuredDual(workload.in_own_unit()[1])
        poles, w = len(dual.poles(dual.start()).shifts), len(dual.bands) - 1
        seconds += (_SOLVE if w == 1 else _SOLVE_MOMENTUM) * n * poles * w * w
        memory += 8 * n * (4 * poles * w + 60)
    else:
        seconds += _DENSE_SOLVE * n**3
        memory = max(memory, _BASE + 8.0 * _MATRICES * n * n)
    if options.strategy == "buffered":
        seconds += _STRATEGY * n
        memory += 8 * n * (ROWS * ROWS + 5 * ROWS)
    else:
        memory = max(memory, _BASE + 8.0 * _MATRICES * n * n)
    if options.strategy == "banded-low-rank":
        seconds += 12 * _PAIR * n * n
    return Estimate(seconds, int(memory))
