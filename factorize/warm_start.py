"""A start for the dual solver from the optimum of a shorter horizon.

The multipliers near both ends of the run depend on the distance from that end alone, those far from both on the
relative position. So step i of n is taken to a step of m < n that is i itself near the start, as far from the end near
the end, and in between interpolated in the logarithm of the distance from the nearer end. The shorter workload
samples the learning rates at the corresponding steps and decays as much over its whole run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from mmfact.factorize.dual import Array
from mmfact.factorize.errors import MmfactError
from mmfact.factorize.workload import Workload

SHRINK = 8
SMALLEST = 64  # horizons below are solved from scratch in no time
_END = 1 / 16  # of the shorter horizon on each side is taken over step by step
_LARGEST_DECAY = 0.5  # of an iterate in one step


def multipliers(workload: Workload, solve: Callable[[Workload], Array]) -> Array | None:
    """Multipliers of `workload` from those that `solve` finds for a horizon SHRINK times shorter.

    None where there is nothing to be gained or the shorter workload cannot be solved.
    """
    m = workload.n // SHRINK
    if m < SMALLEST:
        return None
    positions = _positions(workload.n, m)
    steps = np.arange(m)
    nearest = np.clip(np.rint(np.interp(steps, positions, np.arange(workload.n))).astype(int), 0, workload.n - 1)
    rates = workload.learning_rates[nearest]
    decay = min(workload.weight_decay * workload.n / m, _LARGEST_DECAY / float(rates.max()))
    try:
        shorter = replace(workload, n=m, learning_rates=rates, schedule="constant", weight_decay=decay)
        return np.exp(np.interp(positions, steps, np.log(solve(shorter))))
    except MmfactError:
        return None


def _positions(n: int, m: int) -> Array:
    """Increasing, from 0 to m - 1: the step of the shorter horizon for each of n steps."""
    end = max(1.0, m * _END)
    distance = np.arange(1.0, n // 2 + n % 2 + 1)
    stretch = np.log((m + 1) / 2 / end) / np.log((n + 1) / 2 / end)
    half = np.where(distance <= end, distance, end * np.exp(np.log(np.maximum(distance, end) / end) * stretch))
    out = np.empty(n)
    out[n - len(half) :] = (m - half)[::-1]
    out[: len(half)] = half - 1
    return out
