"""Steppers: what turns white rows into rows of correlated noise, one for each form of strategy and space.

A stepper serves the rows of one stream in the order of its steps; an earlier step than the last is served by
starting again, which gives the same values, since white rows depend on nothing but their position. Whatever happens
between two statements - Ctrl-C above all - a stepper's position and state stay together: they change inside one
kernel or by one assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from mmfact.factorize.errors import StateError
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.store.artifact import Artifact

# White rows are kept up to this much memory; beyond it they are drawn again at every step.
HISTORY_BYTES = 1 << 30

Row = npt.NDArray[Any]
Draw = Callable[[int], Row]


class Stepper(Protocol):
    """Correlated rows of one stream."""

    def row(self, step: int, draw: Draw) -> Row:
        """Row `step`, of float64; `draw` gives white rows. Valid until the next call."""
        ...


@dataclass(frozen=True)
class Stepping:
    """How an artifact is streamed in one space: the stepper's maker, and the sensitivity of what it streams.

    Attributes
    ----------
    sensitivity : float
    smallest, largest : float
        Of the standard deviations of a gradient-space row at unit noise: its own fresh part, all of it.
    start : callable
        (scale, size, dtype) -> Stepper; rows are multiplied by `scale`, buffers are held in `dtype`.
    """

    sensitivity: float
    smallest: float
    largest: float
    start: Callable[[float, int, np.dtype[Any]], Stepper]


def stepping(artifact: Artifact, space: str) -> Stepping:
    """How to stream `artifact` in `space`: with its strategy's own recursion wherever there is one."""
    workload, strategy = artifact.workload, artifact.strategy
    own_space = "iterate" if isinstance(strategy, BandedLowRankStrategy) else "gradient"
    if isinstance(strategy, DenseStrategy) or (space != own_space and not workload.structured):
        # Without a recursion: rows of C^-1, or of A C^-1 for a workload that is itself a matrix.
        dense = strategy if isinstance(strategy, DenseStrategy) else DenseStrategy.from_matrix(strategy.to_dense())
        decode = workload.matrix if space == "iterate" else None
        streaming = dense.streaming(artifact.participation, decode)
        smallest, largest = _row_range(streaming.rows)
        sensitivity = streaming.sensitivity

        def leaf(scale: float, size: int, dtype: np.dtype[Any]) -> Stepper:
            return Rows(streaming.rows * scale, size)

        direct = space == "gradient" or decode is not None
    else:
        sensitivity = strategy.sensitivity(artifact.participation)
        smallest, largest = strategy.noise_range()
        direct = space == own_space

        def leaf(scale: float, size: int, dtype: np.dtype[Any]) -> Stepper:
            if isinstance(strategy, BandedLowRankStrategy):
                return Band(strategy, scale, size, dtype)
            if isinstance(strategy, BufferedStrategy):
                return Buffers(strategy, scale, size, dtype)
            raise StateError(f"a strategy of kind {strategy.kind} has no recursion that could be streamed")

    def start(scale: float, size: int, dtype: np.dtype[Any]) -> Stepper:
        stepper = leaf(scale, size, dtype)
        if direct:
            return stepper
        if space == "iterate":
            return Optimizer(*workload.state_space(), stepper, size)
        return Difference(workload.inverse_bands()[0], stepper, size)

    return Stepping(sensitivity, smallest, largest, start)


class Rows:
    """Rows of a matrix times all white rows so far: any step at any time."""

    def __init__(self, rows: npt.NDArray[np.float64], size: int) -> None:
        self._rows = rows
        self._size = size
        self._history: list[Row] = []

    def row(self, step: int, draw: Draw) -> Row:
        total = np.zeros(self._size)
        for past in range(step + 1):
            _accumulate(self._rows[step, past], self._white(past, draw), total)
        return total

    def _white(self, step: int, draw: Draw) -> Row:
        if step < len(self._history):
            return self._history[step]
        row = draw(step)
        if step == len(self._history) and (step + 1) * row.nbytes <= HISTORY_BYTES:
            self._history.append(row)
        return row


class Buffers:
    """The recursion of the buffered strategy: buffers in the stream's precision, sums in float64."""

    def __init__(self, strategy: BufferedStrategy, scale: float, size: int, dtype: np.dtype[Any]) -> None:
        self._arrays = tuple(array.astype(np.float64) for array in strategy.coefficients().values())
        self._scale = scale
        self._buffers = np.zeros((strategy.buffers, size), dtype)
        self._done = np.zeros(1, np.int64)  # steps that the buffers have taken, counted inside the kernel
        self._out = np.empty(size)

    def row(self, step: int, draw: Draw) -> Row:
        if self._done[0] > step:
            self._done[0] = 0
        for past in range(int(self._done[0]), step + 1):
            c, g, decay, q = self._arrays
            _buffered_step(
                draw(past), c[past], g[past], decay[past], q[past], self._scale, self._buffers, self._done, self._out
            )
        return self._out


class Band:
    """Iterate-space rows of a banded + low-rank decoder: a ring of white rows and one sum for each rank.

    The sums are float64: `Difference` would show what a shorter format rounds away.
    """

    def __init__(self, strategy: BandedLowRankStrategy, scale: float, size: int, dtype: np.dtype[Any]) -> None:
        self._band, self._left, self._right = (
            array.astype(np.float64) for array in (strategy.band, strategy.left, strategy.right)
        )
        self._scale = scale
        self._ring = np.zeros((strategy.bandwidth, size), dtype)
        self._sums = np.zeros((strategy.rank, size))
        self._done = np.zeros(1, np.int64)
        self._out = np.empty(size)

    def row(self, step: int, draw: Draw) -> Row:
        if self._done[0] > step:
            self._done[0] = 0
        bandwidth = len(self._ring)
        for past in range(int(self._done[0]), step + 1):
            _banded_step(
                draw(past),
                past,
                self._band[past],
                self._left[past],
                self._right[max(past - bandwidth, 0)],
                self._scale,
                self._ring,
                self._sums,
                self._done,
                self._out,
            )
        return self._out


class Optimizer:
    """Iterate-space rows: the optimizer run over gradient-space rows, which is post-processing."""

    def __init__(
        self, transition: npt.NDArray[np.float64], gain: npt.NDArray[np.float64], gradients: Stepper, size: int
    ) -> None:
        self._transition, self._gain, self._gradients = transition, gain, gradients
        self._start = (0, np.zeros((gain.shape[1], size)))
        self._state = self._start  # (rows seen, optimizer's state), replaced as one

    def row(self, step: int, draw: Draw) -> Row:
        if self._state[0] > step:
            self._state = self._start
        for past in range(self._state[0], step + 1):
            # not a matrix product: BLAS may round differently for another shard's size
            carried = (self._transition[past][:, :, None] * self._state[1]).sum(axis=1)
            row = self._gradients.row(past, draw)
            self._state = (past + 1, carried + self._gain[past][:, None] * row)
        return self._state[1][-1]


class Difference:
    """Gradient-space rows from iterate-space ones: A^-1, banded, applied to the last few."""

    def __init__(self, bands: npt.NDArray[np.float64], iterates: Stepper, size: int) -> None:
        self._bands, self._iterates = bands, iterates
        self._start = (0, np.zeros((len(bands), size)))
        self._state = self._start  # (rows seen, the last of them, newest first), replaced as one

    def row(self, step: int, draw: Draw) -> Row:
        if self._state[0] > step:
            self._state = self._start
        for past in range(self._state[0], step + 1):
            row = self._iterates.row(past, draw)
            self._state = (past + 1, np.vstack([row[None], self._state[1][:-1]]))
        return (self._bands[:, step, None] * self._state[1]).sum(axis=0)


@njit(cache=True, nogil=True)
def _accumulate(weight: float, row: Row, total: Row) -> None:
    for e in range(len(total)):
        total[e] += weight * row[e]


@njit(cache=True, nogil=True)
def _buffered_step(
    white: Row,
    c: float,
    g: Row,
    decay: Row,
    q: Row,
    scale: float,
    buffers: Row,
    done: npt.NDArray[np.int64],
    out: Row,
) -> None:
    r, size = buffers.shape
    if done[0] == 0:
        buffers[:] = 0
    for e in range(size):
        total = float(white[e])
        for k in range(r):
            total -= g[k] * buffers[k, e]
        y = total / c
        for k in range(r):
            buffers[k, e] = decay[k] * buffers[k, e] + q[k] * y
        out[e] = scale * y
    done[0] += 1


@njit(cache=True, nogil=True)
def _banded_step(
    white: Row,
    step: int,
    band: Row,
    left: Row,
    right: Row,
    scale: float,
    ring: Row,
    sums: Row,
    done: npt.NDArray[np.int64],
    out: Row,
) -> None:
    bandwidth, size = ring.shape
    if done[0] == 0:
        ring[:] = 0
        sums[:] = 0
    place = step % bandwidth
    reach = min(bandwidth, step + 1)
    for e in range(size):
        leaving = float(ring[place, e])  # the white row of step - bandwidth, or 0
        ring[place, e] = white[e]
        total = 0.0
        for k in range(reach):
            total += band[k] * ring[(step - k) % bandwidth, e]
        for k in range(len(sums)):
            sums[k, e] += right[k] * leaving
            total += left[k] * sums[k, e]
        out[e] = scale * total
    done[0] += 1


def _row_range(rows: npt.NDArray[np.float64]) -> tuple[float, float]:
    """(smallest diagonal entry, largest row norm)."""
    return float(np.abs(np.diag(rows)).min()), float(np.sqrt(np.einsum("ij,ij->i", rows, rows).max()))
