"""The dual of a workload whose inverse L is banded, in time and memory linear in n.

    X(v) = sum_j w_j (L L' + s_j D)^-1,        phi = v * diag X,      T = sum(phi)

with x^(-1/2) ~ sum_j w_j / (x + s_j) on the spectrum of the pencil (L L', D). Each term is the
inverse of a banded matrix: its diagonal costs O(n w^2) (`mmfact.factorize.banded`), and so does
the product with the curvature, K = sum_j w_j s_j D ((L L' + s_j D)^-1)^(elementwise 2) D.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from mmfact.factorize import banded
from mmfact.factorize.double_double import UNIT
from mmfact.factorize.dual import EPS, Array, CertifiedTrace, Evaluation
from mmfact.factorize.errors import SolverError
from mmfact.factorize.machine import threads
from mmfact.factorize.quadrature import PoleSum, inverse_square_root
from mmfact.factorize.workload import Workload

# Poles are dealt to this many groups whatever the number of threads, so that sums round alike everywhere.
_GROUPS = 8


@dataclass(frozen=True, eq=False)
class Sweeps:
    """For each pole what `banded.selected_inverse` leaves: two arrays of shape (N, w, n)."""

    poles: PoleSum
    transition: Array
    inverse: Array


class StructuredDual:
    """`Dual` in O(n N w^2) for N poles and bandwidth w."""

    name = "structured"

    def __init__(self, workload: Workload) -> None:
        hi, lo = workload.inverse_bands()
        if len(hi) == 1:  # n = 1: one empty band keeps the kernels free of special cases
            hi, lo = (np.vstack([part, np.zeros_like(part)]) for part in (hi, lo))
        self.bands, self.bands_lo = np.ascontiguousarray(hi), np.ascontiguousarray(lo)
        self.column_energies = workload.column_energies()
        self.absolute_product = _absolute_product(self.bands)
        if not (np.isfinite(self.absolute_product).all() and np.isfinite(self.column_energies).all()):
            raise SolverError("the workload overflows double precision; bring its learning rates closer to 1")

    def start(self) -> Array:
        return np.sqrt(self.column_energies)

    def poles(self, v: Array) -> PoleSum:
        """Poles for a proven enclosure of the spectrum of D^(-1/2) L L' D^(-1/2).

        Its smallest eigenvalue is 1 / norm2(A D^(1/2))^2 >= 1 / normF(A D^(1/2))^2, its largest at most
        the largest absolute row sum (Gershgorin). The margins cover the rounding of both sums.
        """
        lower = (1 - 1e-6) / float((v * self.column_energies).sum())
        w, n = len(self.absolute_product) - 1, len(v)
        root = 1 / np.sqrt(v)
        rows = self.absolute_product[0] * root
        for k in range(1, w + 1):
            entries = self.absolute_product[k, k:]
            rows[k:] += entries * root[: n - k]
            rows[: n - k] += entries * root[k:]
        return inverse_square_root(lower, (1 + 1e-6) * float((rows * root).max()))

    def evaluate(self, v: Array) -> Evaluation:
        poles = self.poles(v)
        w, n = len(self.bands) - 1, len(v)
        shape = (len(poles.shifts), w, n)
        sweeps = Sweeps(poles, np.empty(shape), np.empty(shape))

        def sweep(group: int) -> None:
            for j in range(group, shape[0], _GROUPS):
                banded.selected_inverse(self.bands, v, poles.shifts[j], sweeps.transition[j], sweeps.inverse[j])

        in_groups(sweep)
        phi = v * np.einsum("j,ji->i", poles.weights, sweeps.inverse[:, 0])
        if not (np.isfinite(phi).all() and (phi > 0).all()):
            raise SolverError("the structured solver lost all digits on this workload; use --method dense")
        return Evaluation(v, float(phi.sum()), phi, sweeps)

    def curvature_product(self, at: Evaluation, q: Array) -> Array:
        sweeps: Sweeps = at.context
        scale = sweeps.poles.weights * sweeps.poles.shifts
        out, vq = np.zeros((_GROUPS, len(q))), at.v * q

        def product(group: int) -> None:
            for j in range(group, len(scale), _GROUPS):
                banded.squared_inverse_product(sweeps.transition[j], sweeps.inverse[j], vq, scale[j], out[group])

        in_groups(product)
        return at.v * out.sum(axis=0)

    def curvature_diagonal(self, at: Evaluation) -> Array:
        sweeps: Sweeps = at.context
        return at.v**2 * np.einsum("j,ji->i", sweeps.poles.weights * sweeps.poles.shifts, sweeps.inverse[:, 0] ** 2)

    def certify(self, v: Array) -> CertifiedTrace:
        """T(v) with the traces in double-double.

        The factorization and the inverse's band have relative errors of at most a small multiple of
        the unit roundoff times the condition number of the scaled matrix (Higham, Accuracy and
        Stability, Theorem 10.6 and section 14); 64 (w+1)^3 is a generous multiple, and it is taken
        of a computed upper bound of the condition number. The last term is the final sum's.
        """
        poles = self.poles(v)
        traces, conditions = np.empty(len(poles.shifts)), np.empty(len(poles.shifts))

        def trace(group: int) -> None:
            for j in range(group, len(traces), _GROUPS):
                traces[j], conditions[j] = banded.trace_double_double(self.bands, self.bands_lo, v, poles.shifts[j])

        in_groups(trace)
        terms = poles.weights * traces
        if not (np.isfinite(terms).all() and (terms > 0).all()):
            return CertifiedTrace(0.0, poles.error, math.inf)
        total = math.fsum(terms)
        per_pole = 64 * len(self.bands) ** 3 * UNIT * conditions
        rounding = float(terms @ per_pole) / total + 4 * EPS
        return CertifiedTrace(total, poles.error, rounding)


def dense_inverse_sum(at: Evaluation) -> Array:
    """X(v) = sum_j w_j (L L' + s_j D)^-1 as a symmetric n x n array, from the sweeps of an evaluation."""
    sweeps: Sweeps = at.context
    n = len(at.v)
    X = np.zeros((n, n))
    # Columns are independent; narrow blocks keep the running rows in cache and the threads evenly loaded.
    edges = np.unique(np.linspace(0, n, max(_GROUPS, n // 256) + 1).astype(int))

    def block(first: int, last: int) -> None:
        for j, weight in enumerate(sweeps.poles.weights):
            banded.add_inverse(sweeps.transition[j], sweeps.inverse[j], weight, first, last, X)

    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(block, edges[:-1], edges[1:]))
    X += np.triu(X, 1).T
    return X


def in_groups(work: Callable[[int], None]) -> None:
    """Run `work` on every group of poles, in threads (the kernels release the interpreter lock)."""
    with ThreadPoolExecutor(threads()) as pool:
        list(pool.map(work, range(_GROUPS)))


def _absolute_product(bands: Array) -> Array:
    """Bands of |L L'|, for Gershgorin's theorem."""
    w, n = len(bands) - 1, bands.shape[1]
    out = np.zeros_like(bands)
    for k in range(w + 1):
        for m in range(w + 1 - k):  # (L L')[i, i-k] = sum_m L[i, i-k-m] L[i-k, i-k-m]
            start = k + m
            if start < n:
                out[k, start:] += bands[k + m, start:] * bands[m, m : n - k]
    return np.abs(out)
