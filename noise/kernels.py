"""Native kernels of the steppers: one step of one block of elements, in one call.

Each call takes white values of its block, moves the state of these elements on by one step, writes their row and counts
the step, all before Python can be interrupted again. Sums are float64 whatever the state's precision. A block is worked
on in chunks that fit the fastest cache, with plain loops over elements inside, so that they become vector code; since
each element is computed by the same operations wherever it lies, neither chunks, blocks nor threads show in the values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Row = npt.NDArray[Any]
Counts = npt.NDArray[np.int64]

_CHUNK = 128


@njit(cache=True, nogil=True, error_model="numpy")
def buffered(
    white: Row, inverse: float, g: Row, decay: Row, q: Row, buffers: Row, first: int, scale: float, out: Row,
    done: Counts, block: int,
) -> None:  # fmt: skip
    """y = (z - g . h) / c, h_k <- decay_k h_k + q_k y; out = scale y."""
    total = np.empty(_CHUNK)
    for start in range(0, len(white), _CHUNK):
        count = min(_CHUNK, len(white) - start)
        _through_buffers(white[start : start + count], inverse, g, decay, q, buffers, first + start, total)
        _store(total, scale, out[start : start + count])
    done[block] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def buffered_iterates(
    white: Row, inverse: float, g: Row, decay: Row, q: Row, buffers: Row, transition: Row, gain: Row, state: Row,
    first: int, scale: float, out: Row, done: Counts, block: int,
) -> None:  # fmt: skip
    """As `buffered`, then x <- transition x + gain y; out = scale times the last of x."""
    total, fresh = np.empty(_CHUNK), np.empty((len(state), _CHUNK))
    for start in range(0, len(white), _CHUNK):
        count = min(_CHUNK, len(white) - start)
        _through_buffers(white[start : start + count], inverse, g, decay, q, buffers, first + start, total)
        _through_optimizer(total[:count], transition, gain, state, first + start, fresh)
        _store(fresh[len(state) - 1], scale, out[start : start + count])
    done[block] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def iterates(
    gradients: Row, transition: Row, gain: Row, state: Row, first: int, out: Row, done: Counts, block: int
) -> None:
    """x <- transition x + gain times the gradients; out = the last of x."""
    fresh = np.empty((len(state), _CHUNK))
    for start in range(0, len(gradients), _CHUNK):
        row = gradients[start : start + _CHUNK]
        _through_optimizer(row, transition, gain, state, first + start, fresh)
        _store(fresh[len(state) - 1], 1.0, out[start : start + len(row)])
    done[block] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def banded(
    white: Row, step: int, band: Row, left: Row, right: Row, ring: Row, sums: Row, first: int, scale: float, out: Row,
    done: Counts, block: int,
) -> None:  # fmt: skip
    """sums_k <- sums_k + right_k z_(step - K); out = scale (sum_k band_k z_(step - k) + left . sums)."""
    total = np.empty(_CHUNK)
    for start in range(0, len(white), _CHUNK):
        count = min(_CHUNK, len(white) - start)
        _through_band(white[start : start + count], step, band, left, right, ring, sums, first + start, total)
        _store(total, scale, out[start : start + count])
    done[block] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def banded_gradients(
    white: Row, step: int, band: Row, left: Row, right: Row, ring: Row, sums: Row, inverse: Row, last: Row, first: int,
    scale: float, out: Row, done: Counts, block: int,
) -> None:  # fmt: skip
    """As `banded`, then out = scale sum_k inverse_k times that of k steps ago, kept in the ring `last`."""
    total, width = np.empty(_CHUNK), len(last)
    for start in range(0, len(white), _CHUNK):
        count = min(_CHUNK, len(white) - start)
        _through_band(white[start : start + count], step, band, left, right, ring, sums, first + start, total)
        newest = last[step % width, first + start : first + start + count]
        for e in range(count):
            newest[e] = total[e]
            total[e] = 0.0
        for k in range(min(width, step + 1)):
            row = last[(step - k) % width, first + start : first + start + count]
            for e in range(count):
                total[e] += inverse[k] * row[e]
        _store(total, scale, out[start : start + count])
    done[block] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def accumulate(weights: Row, rows: Row, first: int, total: Row) -> None:
    """total += the sum of weight_k rows_k, in this order, over the elements from `first` on."""
    for start in range(0, len(total), _CHUNK):
        part = total[start : start + _CHUNK]
        for k in range(len(weights)):
            row, weight = rows[k, first + start : first + start + len(part)], weights[k]
            for e in range(len(part)):
                part[e] += weight * row[e]


@njit(cache=True, nogil=True, error_model="numpy")
def keep(row: Row, history: Row, held: Counts, block: int) -> None:
    """history = row, counted."""
    for e in range(len(row)):
        history[e] = row[e]
    held[block] += 1


@njit(cache=True, nogil=True, error_model="numpy")
def finish(total: Row, out: Row, done: Counts, block: int, to: int) -> None:
    """out = total; `to` steps are done."""
    _store(total, 1.0, out)
    done[block] = to


@njit(cache=True, nogil=True, error_model="numpy")
def _through_buffers(
    white: Row, inverse: float, g: Row, decay: Row, q: Row, buffers: Row, first: int, total: Row
) -> None:
    count = len(white)
    for e in range(count):
        total[e] = white[e]
    for k in range(len(buffers)):
        buffer, weight = buffers[k, first : first + count], g[k]
        for e in range(count):
            total[e] -= weight * buffer[e]
    for e in range(count):
        total[e] *= inverse
    for k in range(len(buffers)):
        buffer, fade, push = buffers[k, first : first + count], decay[k], q[k]
        for e in range(count):
            buffer[e] = fade * buffer[e] + push * total[e]


@njit(cache=True, nogil=True, error_model="numpy")
def _through_optimizer(gradients: Row, transition: Row, gain: Row, state: Row, first: int, fresh: Row) -> None:
    count = len(gradients)
    for a in range(len(state)):
        row = fresh[a]
        for e in range(count):
            row[e] = gain[a] * gradients[e]
        for b in range(len(state)):
            before = state[b, first : first + count]
            for e in range(count):
                row[e] += transition[a, b] * before[e]
    for a in range(len(state)):
        after = state[a, first : first + count]
        for e in range(count):
            after[e] = fresh[a, e]


@njit(cache=True, nogil=True, error_model="numpy")
def _through_band(
    white: Row, step: int, band: Row, left: Row, right: Row, ring: Row, sums: Row, first: int, total: Row
) -> None:
    count, bandwidth = len(white), len(ring)
    newest = ring[step % bandwidth, first : first + count]  # holds the white row of step - bandwidth, or 0
    for k in range(len(sums)):
        row = sums[k, first : first + count]
        for e in range(count):
            row[e] += right[k] * newest[e]
    for e in range(count):
        newest[e] = white[e]
        total[e] = 0.0
    for k in range(min(bandwidth, step + 1)):
        row = ring[(step - k) % bandwidth, first : first + count]
        for e in range(count):
            total[e] += band[k] * row[e]
    for k in range(len(sums)):
        row = sums[k, first : first + count]
        for e in range(count):
            total[e] += left[k] * row[e]


@njit(cache=True, nogil=True, error_model="numpy")
def _store(total: Row, scale: float, out: Row) -> None:
    for e in range(len(out)):
        out[e] = scale * total[e]
