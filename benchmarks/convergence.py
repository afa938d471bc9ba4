"""How many iterations do the paper's fixed point and Newton's method take, and does n matter?

For each workload and n: iterations of v <- phi(v) (Denisov et al. 2022) until its first-order gap is below
1e-2, 1e-4 and 1e-6, its contraction rate (the factor by which the gap shrinks per step, at the end), and
beside it Newton's evaluations and curvature products to 1e-10. Where A and its inverse are bounded (weight
decay) the fixed point's iterations do not grow with n; for prefix sums and momentum they do.

    python benchmarks/convergence.py
"""

from __future__ import annotations

from mmfact.factorize import optimum
from mmfact.factorize.workload import Workload, momentum, prefix_sum, sgd

SIZES = (64, 256, 1024, 4096)
GAPS = (1e-2, 1e-4, 1e-6)


def workloads(n: int) -> dict[str, Workload]:
    return {
        "sgd, weight decay .1": sgd(n, weight_decay=0.1, weight_decay_kind="decoupled"),
        "prefix-sum": prefix_sum(n),
        "momentum .9": momentum(n),
    }


def main() -> None:
    print(f"{'workload':21} {'n':>5}  fixed point to" + "".join(f" {gap:7.0e}" for gap in GAPS), end="")
    print(f" {'contraction':>12} {'Newton: evaluations, products':>31}")
    for name in workloads(SIZES[0]):
        for n in SIZES:
            workload = workloads(n)[name]
            history = optimum.solve(workload, method="fixed-point", tolerance=GAPS[-1]).history
            steps = [next((k for k, gap in enumerate(history, 1) if gap <= target), None) for target in GAPS]
            newton = optimum.solve(workload)
            line = f"{name:21} {n:5d}  " + " " * 14 + "".join(f" {step:7d}" for step in steps if step is not None)
            print(f"{line} {history[-1] / history[-2]:12.3f} {newton.iterations:20d} {newton.products:10d}", flush=True)


if __name__ == "__main__":
    main()
