"""Is the structured solver fast, and does its time grow linearly in n?

Prints, in one run: median times of the structured solver (multipliers and certified lower bound) for
n = 256 ... 16384; for n <= --largest-dense the time of the paper's own iteration (Denisov et al. 2022:
v <- diag (D^(1/2) A'A D^(1/2))^(1/2), one dense eigendecomposition a step) until its strategy, columns
normalised, is within 1e-3 of the optimum, and the ratio; and the growth exponent of the structured
solver's time between 2048 and 16384, with its limit of 1.3.

The rival is treated well: its clock runs only during eigendecompositions and the update of v, not
while its distance from the optimum is measured, and it stops at 1e-3 where ours goes on to 1e-10.

    python benchmarks/solve.py
"""

from __future__ import annotations

import argparse
import math
import statistics
import time

import numpy as np
import scipy.linalg

from mmfact.factorize import optimum, schedule
from mmfact.factorize.workload import Workload, momentum, prefix_sum

SIZES = (256, 512, 1024, 2048, 4096, 8192, 16384)
GAP = 1e-3
EXPONENT_LIMIT = 1.3


def workloads(n: int) -> dict[str, Workload]:
    return {
        "prefix-sum": prefix_sum(n),
        "momentum .9": momentum(n),
        "momentum .9 cooldown": momentum(n, learning_rates=schedule.named("cooldown", n)),
    }


def structured_seconds(workload: Workload, repeats: int) -> tuple[float, optimum.Optimum]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        found = optimum.solve(workload, method="structured")
        times.append(time.perf_counter() - start)
    return statistics.median(times), found


def paper_seconds(workload: Workload, best: float, limit: float) -> tuple[float, int, float]:
    """Seconds and steps of the paper's iteration until within GAP of `best`, and where it stood at the end."""
    A = workload.dense()
    gram = A.T @ A
    v, seconds, steps = np.ones(workload.n), 0.0, 0
    while True:
        start = time.perf_counter()
        root = np.sqrt(v)
        values, vectors = scipy.linalg.eigh(root[:, None] * gram * root, driver="evd", check_finite=False)
        sigma = np.sqrt(np.maximum(values, values[-1] * 1e-18))
        phi = (vectors * vectors) @ sigma
        seconds += time.perf_counter() - start
        steps += 1
        # loss of X(v) with its columns normalised: tr(A'A X^-1), untimed
        half = A @ ((root * np.sqrt(phi / v))[:, None] * (vectors / np.sqrt(sigma)))
        excess = float((half * half).sum()) / best - 1
        if excess <= GAP or seconds > limit:
            return seconds, steps, excess
        v = phi


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--largest-dense", type=int, default=2048)
    parser.add_argument("--dense-limit", type=float, default=600.0, help="give up on the rival after so many seconds")
    options = parser.parse_args()
    for n in (16, 64):  # fills numba's cache
        for workload in workloads(n).values():
            optimum.solve(workload, method="structured")
    columns = f"{'workload':21} {'n':>6} {'ours, s':>9} {'gap':>8}"
    print(f"{columns} {'paper, s':>9} {'steps':>6} {'its excess':>11} {'ratio':>8}")
    times: dict[tuple[str, int], float] = {}
    for n in SIZES:
        for name, workload in workloads(n).items():
            times[name, n], found = structured_seconds(workload, options.repeats)
            line = f"{name:21} {n:6d} {times[name, n]:9.3f} {found.gap:8.0e}"
            if n <= options.largest_dense:
                seconds, steps, excess = paper_seconds(workload, found.lower_bound, options.dense_limit)
                line += f" {seconds:9.2f} {steps:6d} {excess:11.1e} {seconds / times[name, n]:7.0f}x"
            print(line, flush=True)
    for name in workloads(16):
        growth = math.log(times[name, 16384] / times[name, 2048]) / math.log(8)
        verdict = "within" if growth <= EXPONENT_LIMIT else "ABOVE"
        print(f"growth from 2048 to 16384, {name}: n^{growth:.2f} ({verdict} the limit of n^{EXPONENT_LIMIT})")


if __name__ == "__main__":
    main()
