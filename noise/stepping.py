"""Steppers: what turns white rows into rows of correlated noise, one for each form of strategy and space.

A stepper works block by block: BLOCK elements that fit a cache are drawn, stepped and written before the next ones are
touched, on several threads at once. Each block counts its own steps, inside the native call that changes its state, so
that whatever happens between two statements - Ctrl-C above all - a block's count and state stay together, and a block
that was left behind catches up at the next row. Steppers only go forward.
"""

from __future__ import annotations

import functools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import StateError
from mmfact.factorize.participation import Participation
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.workload import Workload
from mmfact.noise import kernels
from mmfact.noise.workers import Workers
from mmfact.store.artifact import Artifact

# Elements of a block: what is between drawing and writing stays in the second-level cache, and there are few enough
# blocks that Python's time for each does not count.
BLOCK = 1 << 16

# White rows are kept up to this much memory; beyond it they are drawn again at every step.
HISTORY_BYTES = 1 << 30

Array = npt.NDArray[np.float64]
Row = npt.NDArray[Any]
Draw = Callable[[int, int, Row], None]
"""(step, first element, where to): white values."""


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
        (dtype) -> bytes an element that are kept between steps. Histories that are drawn again where memory ends are
        not counted.
    start : callable
        (scale, size, dtype, share=1.0) -> Stepper; rows are multiplied by `scale`, buffers are held in `dtype`, and
        white rows are kept in that share of `HISTORY_BYTES`. Steppers of one artifact share its coefficients.
    """

    sensitivity: float
    smallest: float
    largest: float
    largest_buffer: float
    amplification: float
    memory: Callable[[np.dtype[Any]], int]
    start: Callable[..., Stepper]


# A model has many tensors, each with a stream of one artifact: what is computed from its coefficients, which cannot
# change, is computed once.
_known: weakref.WeakKeyDictionary[Artifact, dict[str, Stepping]] = weakref.WeakKeyDictionary()


def stepping(artifact: Artifact, space: str) -> Stepping:
    """How to stream `artifact` in `space`: with its strategy's own recursion wherever there is one."""
    known = _known.setdefault(artifact, {})
    if space not in known:
        known[space] = _stepping(artifact, space)
    return known[space]


def _stepping(artifact: Artifact, space: str) -> Stepping:
    workload, strategy = artifact.workload, artifact.strategy
    if isinstance(strategy, BufferedStrategy) and (space == "gradient" or workload.structured):
        way = _by_buffers(strategy, artifact.participation)
        return way if space == "gradient" else _optimized(way, strategy, artifact)
    if isinstance(strategy, BandedLowRankStrategy) and (space == "iterate" or workload.structured):
        way = _by_band(strategy, artifact.participation)
        return way if space == "iterate" else _differenced(way, strategy, workload)
    if isinstance(strategy, DenseStrategy) and space == "iterate" and workload.structured:
        return _by_rows_optimized(strategy, artifact)
    if isinstance(strategy, DenseStrategy | BufferedStrategy | BandedLowRankStrategy):
        return _by_rows(artifact, space)
    raise StateError(f"a strategy of kind {strategy.kind} has no recursion that could be streamed")


def _by_rows(artifact: Artifact, space: str) -> Stepping:
    """Without a recursion: rows of C^-1, or of A C^-1."""
    strategy = artifact.strategy
    dense = strategy if isinstance(strategy, DenseStrategy) else DenseStrategy.from_matrix(strategy.to_dense())
    streaming = dense.streaming(artifact.participation, artifact.workload.matrix if space == "iterate" else None)
    rows = streaming.rows
    return Stepping(
        sensitivity=streaming.sensitivity,
        smallest=float(np.abs(np.diag(rows)).min()),
        largest=float(np.sqrt(np.einsum("ij,ij->i", rows, rows).max())),
        largest_buffer=0.0,
        amplification=dense.amplification(),  # of a row when it is rounded at last
        memory=lambda dtype: 0,
        start=functools.partial(DenseStepper, rows),
    )


def _by_rows_optimized(strategy: DenseStrategy, artifact: Artifact) -> Stepping:
    """Iterate-space rows: the optimizer run over the rows of C^-1, which is post-processing."""
    streaming = strategy.streaming(artifact.participation)
    transition, gain = artifact.workload.state_space()
    _, max_error = strategy.errors(artifact.workload, artifact.participation)
    return Stepping(
        sensitivity=streaming.sensitivity,
        smallest=float(np.abs(np.diag(streaming.rows)).min() * np.abs(gain[:, -1]).min()),
        largest=max_error / streaming.sensitivity,
        largest_buffer=0.0,
        amplification=strategy.amplification(),
        memory=lambda dtype: 8 * gain.shape[1],
        start=functools.partial(DenseOptimizerStepper, streaming.rows, transition, gain),
    )


def _by_buffers(strategy: BufferedStrategy, participation: Participation) -> Stepping:
    smallest, largest = strategy.noise_range()
    return Stepping(
        sensitivity=strategy.sensitivity(participation),
        smallest=smallest,
        largest=largest,
        largest_buffer=strategy.largest_buffer(),
        amplification=strategy.amplification(),
        memory=lambda dtype: strategy.buffers * dtype.itemsize,
        start=functools.partial(BufferedStepper, _widened(strategy)),
    )


def _by_band(strategy: BandedLowRankStrategy, participation: Participation) -> Stepping:
    norms = np.linalg.norm(strategy.dense_decoder(), axis=1)
    return Stepping(
        sensitivity=strategy.sensitivity(participation),
        smallest=float(strategy.band[:, 0].min()),
        largest=float(norms.max()),
        largest_buffer=1.0,
        amplification=0.0,  # its sums are float64 whatever the stream's precision
        memory=lambda dtype: strategy.bandwidth * dtype.itemsize + 8 * strategy.rank,
        start=functools.partial(BandedStepper, _widened(strategy)),
    )


def _optimized(way: Stepping, strategy: BufferedStrategy, artifact: Artifact) -> Stepping:
    """Iterate-space rows: the optimizer run over the gradient-space rows of `way`, which is post-processing."""
    transition, gain = artifact.workload.state_space()
    _, max_error = strategy.errors(artifact.workload, artifact.participation)
    return replace(
        way,
        smallest=way.smallest * float(np.abs(gain[:, -1]).min()),
        largest=max_error / way.sensitivity,
        memory=lambda dtype: way.memory(dtype) + 8 * gain.shape[1],
        start=functools.partial(OptimizerStepper, _widened(strategy), transition, gain),
    )


def _differenced(way: Stepping, strategy: BandedLowRankStrategy, workload: Workload) -> Stepping:
    """Gradient-space rows: A^-1, banded, applied to the last few of the iterate-space rows of `way`."""
    bands = workload.inverse_bands()[0]
    smallest, largest = strategy.noise_range()
    return replace(
        way,
        smallest=smallest,
        largest=largest,
        memory=lambda dtype: way.memory(dtype) + 8 * len(bands),
        start=functools.partial(DifferenceStepper, _widened(strategy), np.ascontiguousarray(bands.T)),
    )


def _widened(strategy: BufferedStrategy | BandedLowRankStrategy) -> tuple[Array, ...]:
    """The stored coefficients, exactly, in the precision in which steps compute."""
    return tuple(array.astype(np.float64) for array in strategy.coefficients().values())


class Stepper(ABC):
    """Correlated rows of one stream.

    Attributes
    ----------
    done : int64 array
        For each block, how many steps it has taken.
    held : tuple of arrays
        What a saved stream keeps, elements along the last axis; zero before the first step.
    """

    held: tuple[Row, ...] = ()

    def __init__(self, size: int, dtype: np.dtype[Any]) -> None:
        self._size, self._dtype, self._block = size, dtype, BLOCK
        self.done = np.zeros(-(-size // BLOCK), np.int64)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self.done)

    def span(self, block: int) -> slice:
        """The elements of a block."""
        return slice(block * self._block, min((block + 1) * self._block, self._size))

    def piece(self, step: int, block: int, draw: Draw, out: Row) -> None:
        """Write one block's piece of row `step` into `out`; the block may not have taken that step yet."""
        self._advance(block, block * self._block, step + 1, draw, out)

    def catch_up(self, step: int, draw: Draw, workers: Workers) -> None:
        """Bring every block to `step`, the rows before it made and forgotten."""

        def work(block: int) -> None:
            first = block * self._block
            if self.done[block] < step:
                unseen = np.empty(min(self._block, self._size - first), self._dtype)
                self._advance(block, first, step, draw, unseen)

        workers.run(work, len(self.done))

    def start_at(self, step: int) -> None:
        """Go on from `step`: `held` has been filled with what was kept before it."""
        self.done[:] = step

    @abstractmethod
    def _advance(self, block: int, first: int, to: int, draw: Draw, out: Row) -> None:
        """Take the steps up to `to` with one block; its row of the last of them goes into `out`."""


class RecursiveStepper(Stepper):
    """Each step needs its own white row only, and what is held."""

    def _advance(self, block: int, first: int, to: int, draw: Draw, out: Row) -> None:
        white = np.empty(len(out), self._dtype)
        for step in range(int(self.done[block]), to):
            draw(step, first, white)
            self._take(step, block, first, white, out)

    @abstractmethod
    def _take(self, step: int, block: int, first: int, white: Row, out: Row) -> None:
        """One step of one block: one native call that also counts it."""


class BufferedStepper(RecursiveStepper):
    """The recursion of the buffered strategy: buffers in the stream's precision."""

    def __init__(
        self, coefficients: tuple[Array, ...], scale: float, size: int, dtype: np.dtype[Any], share: float = 1.0
    ) -> None:
        super().__init__(size, dtype)
        self._c, *self._rest = coefficients
        self._scale = scale
        self._buffers = np.zeros((self._rest[0].shape[1], size), dtype)
        self.held = (self._buffers,)

    def _take(self, step: int, block: int, first: int, white: Row, out: Row) -> None:
        g, decay, q = self._rest
        kernels.buffered(
            white, 1 / self._c[step], g[step], decay[step], q[step], self._buffers, first, self._scale, out,
            self.done, block,
        )  # fmt: skip


class OptimizerStepper(BufferedStepper):
    """Its iterate-space rows: the optimizer run over them, its state in float64."""

    def __init__(
        self, coefficients: tuple[Array, ...], transition: Array, gain: Array, scale: float, size: int,
        dtype: np.dtype[Any], share: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(coefficients, scale, size, dtype)
        self._transition, self._gain = transition, gain
        self._state = np.zeros((gain.shape[1], size))
        self.held = (self._buffers, self._state)

    def _take(self, step: int, block: int, first: int, white: Row, out: Row) -> None:
        g, decay, q = self._rest
        kernels.buffered_iterates(
            white, 1 / self._c[step], g[step], decay[step], q[step], self._buffers, self._transition[step],
            self._gain[step], self._state, first, self._scale, out, self.done, block,
        )  # fmt: skip


class BandedStepper(RecursiveStepper):
    """Iterate-space rows of a banded + low-rank decoder: a ring of white rows and one sum for each rank.

    The sums are float64: `DifferenceStepper` would show what a shorter format rounds away.
    """

    def __init__(
        self, coefficients: tuple[Array, ...], scale: float, size: int, dtype: np.dtype[Any], share: float = 1.0
    ) -> None:
        super().__init__(size, dtype)
        self._band, self._left, self._right = coefficients
        self._scale = scale
        self._ring = np.zeros((self._band.shape[1], size), dtype)
        self._sums = np.zeros((self._left.shape[1], size))
        self.held = (self._ring, self._sums)

    def _take(self, step: int, block: int, first: int, white: Row, out: Row) -> None:
        right = self._right[max(step - len(self._ring), 0)]
        kernels.banded(
            white, step, self._band[step], self._left[step], right, self._ring, self._sums, first, self._scale, out,
            self.done, block,
        )  # fmt: skip


class DifferenceStepper(BandedStepper):
    """Its gradient-space rows: A^-1, banded, applied to the last few, which are kept in float64."""

    def __init__(
        self, coefficients: tuple[Array, ...], bands: Array, scale: float, size: int, dtype: np.dtype[Any],
        share: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(coefficients, scale, size, dtype)
        self._bands = bands
        self._last = np.zeros((bands.shape[1], size))
        self.held = (self._ring, self._sums, self._last)

    def _take(self, step: int, block: int, first: int, white: Row, out: Row) -> None:
        right = self._right[max(step - len(self._ring), 0)]
        kernels.banded_gradients(
            white, step, self._band[step], self._left[step], right, self._ring, self._sums, self._bands[step],
            self._last, first, self._scale, out, self.done, block,
        )  # fmt: skip


class DenseStepper(Stepper):
    """Rows of a matrix times all white rows so far, which are kept while memory lasts and else drawn again."""

    def __init__(self, rows: Array, scale: float, size: int, dtype: np.dtype[Any], share: float = 1.0) -> None:
        super().__init__(size, dtype)
        self._rows, self._scale = rows, scale
        kept = int(HISTORY_BYTES * share) // (size * dtype.itemsize)
        self._history = np.empty((min(len(rows), kept), size), dtype)
        self._kept = np.zeros(len(self.done), np.int64)  # white rows in the history, for each block

    def catch_up(self, step: int, draw: Draw, workers: Workers) -> None:
        """Nothing is carried from step to step."""
        self.start_at(step)

    def _advance(self, block: int, first: int, to: int, draw: Draw, out: Row) -> None:
        kernels.finish(self._sum(block, first, to - 1, draw, len(out)), out, self.done, block, to)

    def _sum(self, block: int, first: int, step: int, draw: Draw, count: int) -> Array:
        """Row `step` of one block, in float64."""
        white, total, weights = np.empty((1, count), self._dtype), np.zeros(count), self._rows[step] * self._scale
        kept = min(int(self._kept[block]), step + 1)
        kernels.accumulate(weights[:kept], self._history, first, total)
        for past in range(kept, step + 1):
            draw(past, first, white[0])
            if past < len(self._history):
                kernels.keep(white[0], self._history[past, first : first + count], self._kept, block)
            kernels.accumulate(weights[past : past + 1], white, 0, total)
        return total


class DenseOptimizerStepper(DenseStepper):
    """Its iterate-space rows: the optimizer run over them, its state in float64."""

    def __init__(
        self, rows: Array, transition: Array, gain: Array, scale: float, size: int, dtype: np.dtype[Any],
        share: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__(rows, scale, size, dtype, share)
        self._transition, self._gain = transition, gain
        self._state = np.zeros((gain.shape[1], size))
        self.held = (self._state,)

    def catch_up(self, step: int, draw: Draw, workers: Workers) -> None:
        Stepper.catch_up(self, step, draw, workers)

    def _advance(self, block: int, first: int, to: int, draw: Draw, out: Row) -> None:
        for step in range(int(self.done[block]), to):
            gradients = self._sum(block, first, step, draw, len(out))
            kernels.iterates(
                gradients, self._transition[step], self._gain[step], self._state, first, out, self.done, block
            )
