"""What does the top eigenspace of public gradients cost, beside Lanczos on the p x p operator and randomized SVD?

For m = 100 float32 gradients of p = 1e6 parameters and k = 50 vectors, the time of `top_eigenspace` on NumPy arrays and
torch tensors, beside the public code's way on the same gradients: scipy's eigsh with the operator v -> P'(P v)/m,

 - stopped after 50 iterations, with the 50 Ritz vectors that it then has (a basis of 51 vectors, one cycle),
 - to convergence, as eigsh is called by default (a basis of 101 vectors).

The rival is treated well: in float32 and in float64, of which the faster one counts, and its product with P'P reads
gradients that are there, where the public code computes them anew, by m backward passes, in each iteration. Then how
far each result is from the others: ||V V' - W W'||, and how much of the gradients' energy it keeps of what the best
subspace keeps. The memory that each takes beside the gradients is the growth of a fresh process's peak.

Then many examples (m up to 6000, p = 20,000, k = 50), where the m x m Gram matrix and its eigenvectors stop being
cheap: `top_eigenspace` by Gram and by Lanczos, scipy's eigsh on the Gram matrix when it is there, and sklearn's
randomized SVD with its default power iterations (4) and with 20.

Last, what one projection costs for each number of parameters, and in memory traffic: V is read twice.

Gradients are Gaussian mixed by a random orthogonal matrix with eigenvalues falling as 1/i, so no subspace is easy.
All entries of a table take turns in every round, in an order drawn anew each round, since others may use the machine
meanwhile. Times are medians of the rounds; a ratio is the median of the rounds' ratios. Processor time, of all threads
together, depends less on others; with more than one thread it includes their waiting. All use the same threads: those
of OMP_NUM_THREADS, or all.

    pip install 'mmfact[torch]' scikit-learn
    python benchmarks/projector.py             # about five minutes on two cores; each table alone: see --help
    python benchmarks/projector.py --quick     # a smoke test
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, eigsh

from mmfact.factorize import machine
from mmfact.noise.projector import Projector, top_eigenspace

K, ITERATIONS = 50, 50
P_LARGE, M_FEW = 1_000_000, 100
P_SMALL, MANY = 20_000, (1000, 2000, 6000)
PROJECTED = (10_000, 100_000, 1_000_000, 4_000_000)
TIME_LIMIT, MEMORY_LIMIT = 0.1, 3.0  # of the rival's time; numbers of 4 bytes for each of the gradients', P included
OURS, TORCH = "mmfact top_eigenspace, numpy", "mmfact top_eigenspace, torch"
TABLES = ("few", "memory", "many", "project")

Array = Any


def gradients(m: int, p: int) -> Array:
    random = np.random.default_rng(0)
    U, _ = np.linalg.qr(random.standard_normal((m, m)))
    mix = (U / np.sqrt(np.arange(1, m + 1))).astype(np.float32)
    return mix @ random.standard_normal((m, p), dtype=np.float32)


@dataclass
class Entry:
    """What is timed, its latest result (p x k, or a projector), and wall and processor seconds of each round."""

    call: Callable[[], Any]
    result: Any = None
    wall: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)

    def turn(self) -> None:
        clocks = time.perf_counter(), time.process_time()
        self.result = self.call()
        self.wall.append(time.perf_counter() - clocks[0])
        self.process.append(time.process_time() - clocks[1])


def take_turns(entries: dict[str, Entry], rounds: int) -> None:
    order, shuffle = list(entries), np.random.default_rng(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            entries[name].turn()


def ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def said(value: float, limit: float) -> str:
    return f"{value:.3f}, " + ("ABOVE" if value > limit else f"{value / limit:.2f} of") + f" the limit of {limit}"


# --- the public code's way -----------------------------------------------------------------------------


class SecondMoment:
    """v -> P'(P v)/m, and how often."""

    def __init__(self, P: Array) -> None:
        self.P, self.products = P, 0

    def __call__(self, v: Array) -> Array:
        self.products += 1
        return (self.P.T @ (self.P @ v.reshape(-1))) / len(self.P)


def lanczos(P: Array, k: int, iterations: int | None) -> tuple[Array, int]:
    """The k leading vectors, p x k, and the number of products; after so many iterations whatever they are by then."""
    operator = SecondMoment(P)
    linear = LinearOperator((P.shape[1],) * 2, matvec=operator, dtype=P.dtype)
    start = np.random.default_rng(1).standard_normal(P.shape[1]).astype(P.dtype)
    if iterations is None:
        _, vectors = eigsh(linear, k, v0=start)
    else:  # a cycle makes ncv products; with this tolerance all of its Ritz vectors pass
        _, vectors = eigsh(linear, k, v0=start, ncv=max(iterations, k + 1), maxiter=1, tol=1e6)
    return vectors, operator.products


# --- how good --------------------------------------------------------------------------------------------


def vectors(result: Any) -> Array:
    """k x p, of a projector or of columns."""
    if isinstance(result, Projector):
        return np.asarray(result.basis[""]) * result.scale
    return (result[0] if isinstance(result, tuple) else result).T


def distance(one: Any, other: Any) -> float:
    """||V V' - W W'||, in float64 pieces, V and W made orthonormal first."""
    V, W = vectors(one), vectors(other)
    grams = [np.zeros((len(V), len(V))) for _ in range(3)]
    for first in range(0, V.shape[1], 1 << 16):
        a, b = (rows[:, first : first + (1 << 16)].astype(np.float64) for rows in (V, W))
        for gram, product in zip(grams, (a @ a.T, b @ b.T, a @ b.T), strict=True):
            gram += product
    L, R = np.linalg.inv(np.linalg.cholesky(grams[0])), np.linalg.inv(np.linalg.cholesky(grams[1]))
    outside = np.zeros_like(grams[0])
    cross = L @ grams[2] @ R.T @ R
    for first in range(0, V.shape[1], 1 << 16):
        a, b = (rows[:, first : first + (1 << 16)].astype(np.float64) for rows in (V, W))
        rest = L @ a - cross @ b
        outside += rest @ rest.T
    return float(np.sqrt(max(0.0, np.linalg.eigvalsh(outside)[-1])))


def kept(result: Any, P: Array) -> float:
    """Sum of |V'g|^2 over the gradients."""
    return float(np.square(np.float64(P @ vectors(result).T)).sum())


# --- tables ----------------------------------------------------------------------------------------------


def few(m: int, p: int, k: int, rounds: int) -> None:
    P = gradients(m, p)
    tensor, double = torch.from_numpy(P), P.astype(np.float64)
    names = {
        (which, data.dtype.name): f"eigsh p x p, {which}, {data.dtype.name}"
        for which in (f"{ITERATIONS} iterations", "converged")
        for data in (P, double)
    }
    entries = {
        OURS: Entry(lambda: top_eigenspace(P, k)),
        TORCH: Entry(lambda: top_eigenspace(tensor, k)),
        names[f"{ITERATIONS} iterations", "float32"]: Entry(lambda: lanczos(P, k, ITERATIONS)),
        names[f"{ITERATIONS} iterations", "float64"]: Entry(lambda: lanczos(double, k, ITERATIONS)),
        names["converged", "float32"]: Entry(lambda: lanczos(P, k, None)),
        names["converged", "float64"]: Entry(lambda: lanczos(double, k, None)),
    }
    for name in (OURS, TORCH):
        entries[name].call()  # the libraries' threads, the first touch of memory
    take_turns(entries, rounds)
    best, most = entries[OURS].result, kept(entries[OURS].result, P)
    print(f"\nm = {m}, p = {p}, k = {k}")
    print(f"{'':44} {'wall':>8} {'processor':>10} {'products':>9} {'distance to ours':>17} {'energy / ours':>14}")
    for name, entry in entries.items():
        products = str(entry.result[1]) if isinstance(entry.result, tuple) else ""
        print(
            f"{name:44} {statistics.median(entry.wall):8.2f} {statistics.median(entry.process):10.2f} {products:>9} "
            f"{distance(entry.result, best):17.1e} "
            f"{kept(entry.result, P) / most:14.6f}"
        )
    for which in (f"{ITERATIONS} iterations", "converged"):
        both = [names[which, dtype] for dtype in ("float32", "float64")]
        for name, clock in itertools.product((OURS, TORCH), ("wall", "process")):
            times = {entry: getattr(entries[entry], clock) for entry in [name, *both]}
            rival = min(both, key=lambda entry: statistics.median(times[entry]))
            print(f"{name} / {rival}, {clock}: {said(ratio(times[name], times[rival]), TIME_LIMIT)}")


def resident(what: str) -> int:
    """VmRSS now, or the most since the peak was reset, VmHWM, in bytes."""
    return int(re.search(rf"{what}:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024  # type: ignore[index]


def alone(way: str, m: int, p: int, k: int) -> float:
    """In this process: what the peak exceeds the gradients by."""
    calls: dict[str, Callable[[Array], Any]] = {
        OURS: lambda P: top_eigenspace(P, k),
        f"{OURS}, float16": lambda P: top_eigenspace(P, k, storage="float16"),
        TORCH: lambda P: top_eigenspace(torch.from_numpy(P), k),
        f"{OURS}, badly conditioned": lambda P: top_eigenspace(P, k),
        f"eigsh p x p, {ITERATIONS} iterations, float32": lambda P: lanczos(P, k, ITERATIONS),
        "eigsh p x p, converged, float32": lambda P: lanczos(P, k, None),
    }
    calls[way](gradients(m, 4 * m))  # libraries' own memory
    P = gradients(m, p)
    if "badly" in way:
        P *= np.geomspace(1, 1e-10, m, dtype=np.float32)[:, None]
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    calls[way](P)
    return resident("VmHWM") - before


def memory(m: int, p: int, k: int) -> None:
    print(f"\nm = {m}, p = {p}, k = {k}: memory at the peak, in numbers of 4 bytes for each of the gradients' m p")
    ways = [OURS, f"{OURS}, float16", f"{OURS}, badly conditioned", TORCH]
    rivals = [f"eigsh p x p, {ITERATIONS} iterations, float32", "eigsh p x p, converged, float32"]
    for way in ways + rivals:
        arguments = [sys.executable, __file__, "--alone", way, str(m), str(p), str(k)]
        found = json.loads(subprocess.run(arguments, check=True, stdout=subprocess.PIPE).stdout)
        value = 1 + found / (4 * m * p)
        print(f"{way:50} {said(value, MEMORY_LIMIT) if way in ways else f'{value:.3f}'}", flush=True)


def many(sizes: tuple[int, ...], p: int, k: int, rounds: int) -> None:
    from sklearn.utils.extmath import randomized_svd

    def randomized(P: Array, power: int | str) -> Array:
        return randomized_svd(P, k, n_iter=power, random_state=0)[2].T

    def on_gram(P: Array) -> Array:
        double = P.astype(np.float64)
        gram = double @ double.T / len(P)
        values, U = eigsh(gram, k + 1, which="LA", v0=np.random.default_rng(1).standard_normal(len(P)))
        return ((U[:, 1:] / np.sqrt(len(P) * values[1:])).T @ double).T

    print(f"\np = {p}, k = {k}: processor seconds, and the distance to the Gram matrix's subspace")
    ways = {
        "gram": lambda P: top_eigenspace(P, k, method="gram"),
        "lanczos": lambda P: top_eigenspace(P, k, method="lanczos"),
        "eigsh on the gram": on_gram,
        "randomized SVD": lambda P: randomized(P, "auto"),
        "randomized SVD, 20 power": lambda P: randomized(P, 20),
    }
    print(f"{'m':>6} " + "".join(f"{name:>26}" for name in ways))
    for m in sizes:
        P = gradients(m, p)
        entries = {name: Entry(functools.partial(way, P)) for name, way in ways.items()}
        take_turns(entries, rounds)
        cells = [
            f"{statistics.median(e.process):.2f} ({distance(e.result, entries['gram'].result):.0e})"
            for e in entries.values()
        ]
        print(f"{m:6} " + "".join(f"{cell:>26}" for cell in cells), flush=True)


def project(sizes: tuple[int, ...], k: int, rounds: int) -> None:
    print(f"\nk = {k}: processor milliseconds of one projection of a float32 gradient, and GB/s of V, read twice")
    names = [f"{library}, {storage}" for library in ("numpy", "torch") for storage in ("float32", "float16")]
    print(f"{'p':>9} " + "".join(f"{name:>20}" for name in names) + f"{'V g alone / numpy, float32':>30}")
    for p in sizes:
        random = np.random.default_rng(0)
        V, g = random.standard_normal((k, p), dtype=np.float32), random.standard_normal(p, dtype=np.float32)
        half = V.astype(np.float16)
        bases = dict(zip(names, (V, half, torch.from_numpy(V), torch.from_numpy(half)), strict=True))
        entries = {"alone": Entry(functools.partial(np.matmul, V, g))}
        for name, basis in bases.items():
            made = Projector({"": basis}, np.ones(k), np.ones(k), float(k), "random", 0, 0)
            gradient = g if isinstance(basis, np.ndarray) else torch.from_numpy(g)
            entries[name] = Entry(functools.partial(made.project, gradient))
        take_turns(entries, 1)  # the first touch of memory
        for entry in entries.values():
            entry.wall.clear()
            entry.process.clear()
        take_turns(entries, rounds)
        cells = []
        for name, basis in bases.items():
            seconds, volume = statistics.median(entries[name].process), 2 * k * p * basis.itemsize
            cells.append(f"{1e3 * seconds:.2f} ({volume / seconds / 1e9:.1f})")
        share = ratio(entries["alone"].process, entries["numpy, float32"].process)
        print(f"{p:9} " + "".join(f"{cell:>20}" for cell in cells) + f"{share:30.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", type=int, default=list(MANY), help="m of the table of many examples")
    parser.add_argument("--quick", action="store_true", help="small gradients, one round")
    parser.add_argument("--alone", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        way, *numbers = options.alone
        print(json.dumps(alone(way, *map(int, numbers))))
        return
    few_size = (40, 20_000, 20) if options.quick else (M_FEW, P_LARGE, K)
    rounds = 1 if options.quick else options.rounds
    print(f"{rounds} rounds; threads: {os.environ.get('OMP_NUM_THREADS', machine.threads())}")
    if "few" in options.tables:
        few(*few_size, rounds)
    if "memory" in options.tables:
        memory(*few_size)
    if "many" in options.tables:
        many((200,) if options.quick else tuple(options.sizes), 2000 if options.quick else P_SMALL, K, rounds)
    if "project" in options.tables:
        project(PROJECTED[:2] if options.quick else PROJECTED, K, 5 * rounds)


if __name__ == "__main__":
    main()
