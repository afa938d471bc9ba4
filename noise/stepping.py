"""Steppers: what turns white rows into rows of correlated noise, one for each form of strategy and space.

A stepper serves the rows of one stream in the order of its steps; an earlier step than the last is served by
starting again, which gives the same values, since white rows depend on nothing but their position. Whatever happens
between two statements - Ctrl-C above all - a stepper's position and state stay together: they change inside one
kernel or by one assignment.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from mmfact.factorize.errors import StateError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.workload import Workload
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
    """How an artifact is streamed in one space: the stepper's maker, and what a stream must know beforehand.

    Attributes
    ----------
    sensitivity : float
        Of what is streamed.
    smallest, largest : float
        Of the standard deviations of a row at unit noise, in this space: its own fresh part at the least, all of it at
        the most.
    largest_buffer : float
        The largest standard deviation of what is kept between steps in the stream's precision.
    amplification : float
        Rounding in the stream's precision moves a row by about that precision times this; 0 if it does not.
    memory : callable
        (dtype) -> bytes an element that are kept between and during steps, beside white row and output. Histories
        that are drawn again where memory ends are not counted.
    start : callable
        (scale, size, dtype) -> Stepper; rows are multiplied by `scale`, buffers are held in `dtype`.
    """

    sensitivity: float
    smallest: float
    largest: float
    largest_buffer: float
    amplification: float
    memory: Callable[[np.dtype[Any]], int]
    start: Callable[[float, int, np.dtype[Any]], Stepper]


def stepping(artifact: Artifact, space: str) -> Stepping:
    """How to stream `artifact` in `space`: with its strategy's own recursion wherever there is one."""
    workload, strategy = artifact.workload, artifact.strategy
    own_space = "iterate" if isinstance(strategy, BandedLowRankStrategy) else "gradient"
    if isinstance(strategy, DenseStrategy) or (space != own_space and not workload.structured):
        way = _by_rows(artifact, space)
        if space == own_space or not workload.structured:
            return way
    elif isinstance(strategy, BufferedStrategy):
        way = _by_buffers(strategy, artifact.participation)
    elif isinstance(strategy, BandedLowRankStrategy):
        way = _by_band(strategy, artifact.participation)
    else:
        raise StateError(f"a strategy of kind {strategy.kind} has no recursion that could be streamed")
    if space == own_space:
        return way
    if isinstance(strategy, BandedLowRankStrategy):
        return _differenced(way, strategy, workload)
    return _optimized(way, artifact)


def _by_rows(artifact: Artifact, space: str) -> Stepping:
    """Without a recursion: rows of C^-1, or of A C^-1 for a workload that is itself a matrix."""
    strategy = artifact.strategy
    dense = strategy if isinstance(strategy, DenseStrategy) else DenseStrategy.from_matrix(strategy.to_dense())
    streaming = dense.streaming(artifact.participation, artifact.workload.matrix if space == "iterate" else None)
    rows = streaming.rows
    return Stepping(
        sensitivity=streaming.sensitivity,
        smallest=float(np.abs(np.diag(rows)).min()),
        largest=float(np.sqrt(np.einsum("ij,ij->i", rows, rows).max())),
        largest_buffer=0.0,
        amplification=0.0,
        memory=lambda dtype: 8,
        start=lambda scale, size, dtype: Rows(rows * scale, size),
    )


def _by_buffers(strategy: BufferedStrategy, participation: Participation) -> Stepping:
    smallest, largest = strategy.noise_range()
    return Stepping(
        sensitivity=strategy.sensitivity(participation),
        smallest=smallest,
        largest=largest,
        largest_buffer=strategy.largest_buffer(),
        amplification=strategy.amplification(),
        memory=lambda dtype: strategy.buffers * dtype.itemsize + 8,
        start=lambda scale, size, dtype: Buffers(strategy, scale, size, dtype),
    )


def _by_band(strategy: BandedLowRankStrategy, participation: Participation) -> Stepping:
    norms = np.linalg.norm(strategy.dense_decoder(), axis=1)
    return Stepping(
        sensitivity=strategy.sensitivity(participation),
        smallest=float(strategy.band[:, 0].min()),
        largest=float(norms.max()),
        largest_buffer=1.0,
        amplification=0.0,  # its sums are float64 whatever the stream's precision
        memory=lambda dtype: strategy.bandwidth * dtype.itemsize + 8 * strategy.rank + 8,
        start=lambda scale, size, dtype: Band(strategy, scale, size, dtype),
    )


def _optimized(way: Stepping, artifact: Artifact) -> Stepping:
    """Iterate-space rows of `way`, whose rows are gradient-space: the optimizer run over them."""
    transition, gain = artifact.workload.state_space()
    _, max_error = artifact.strategy.errors(artifact.workload, artifact.participation)
    return replace(
        way,
        smallest=way.smallest * float(np.abs(gain[:, -1]).min()),
        largest=max_error / way.sensitivity,
        memory=lambda dtype: way.memory(dtype) + 8 * gain.shape[1],
        start=lambda scale, size, dtype: Optimizer(transition, gain, way.start(scale, size, dtype), size),
    )


def _differenced(way: Stepping, strategy: BandedLowRankStrategy, workload: Workload) -> Stepping:
    """Gradient-space rows of `way`, whose rows are iterate-space: A^-1, banded, applied to the last few."""
    bands = workload.inverse_bands()[0]
    smallest, largest = strategy.noise_range()
    return replace(
        way,
        smallest=smallest,
        largest=largest,
        memory=lambda dtype: way.memory(dtype) + 8 * len(bands) + 8,
        start=lambda scale, size, dtype: Difference(bands, way.start(scale, size, dtype), size),
    )


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
        self._state = np.zeros((gain.shape[1], size))
        self._done = np.zeros(1, np.int64)

    def row(self, step: int, draw: Draw) -> Row:
        if self._done[0] > step:
            self._done[0] = 0
        for past in range(int(self._done[0]), step + 1):
            row = self._gradients.row(past, draw)
            _optimizer_step(row, self._transition[past], self._gain[past], self._state, self._done)
        return self._state[-1]


class Difference:
    """Gradient-space rows from iterate-space ones: A^-1, banded, applied to the last few."""

    def __init__(self, bands: npt.NDArray[np.float64], iterates: Stepper, size: int) -> None:
        self._bands, self._iterates = np.ascontiguousarray(bands.T), iterates
        self._last = np.zeros((len(bands), size))  # newest first
        self._done = np.zeros(1, np.int64)
        self._out = np.empty(size)

    def row(self, step: int, draw: Draw) -> Row:
        if self._done[0] > step:
            self._done[0] = 0
        for past in range(int(self._done[0]), step + 1):
            row = self._iterates.row(past, draw)
            _difference_step(row, self._bands[past], self._last, self._done, self._out)
        return self._out


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


@njit(cache=True, nogil=True)
def _optimizer_step(row: Row, transition: Row, gain: Row, state: Row, done: npt.NDArray[np.int64]) -> None:
    m, size = state.shape
    if done[0] == 0:
        state[:] = 0.0
    fresh = np.empty(m)
    for e in range(size):
        for a in range(m):
            total = gain[a] * row[e]
            for b in range(m):
                total += transition[a, b] * state[b, e]
            fresh[a] = total
        for a in range(m):
            state[a, e] = fresh[a]
    done[0] += 1


@njit(cache=True, nogil=True)
def _difference_step(row: Row, bands: Row, last: Row, done: npt.NDArray[np.int64], out: Row) -> None:
    width, size = last.shape
    if done[0] == 0:
        last[:] = 0.0
    for e in range(size):
        for k in range(width - 1, 0, -1):
            last[k, e] = last[k - 1, e]
        last[0, e] = row[e]
        total = 0.0
        for k in range(width):
            total += bands[k] * last[k, e]
        out[e] = total
    done[0] += 1
