"""The white rows of noise/source.py and noise/normal.py on an accelerator: the same Z from the same subkeys.

ChaCha20 (RFC 8439) and the map from words to float32 normals in array operators only, which mean the same in NumPy,
torch (on any device) and JAX (under jit): + wraps around in int32, << drops what leaves, >> is masked. The subkeys of a
step are an argument, so that no trace and no compiled program has a secret in it. Words are those of
`source.keystream`, bit for bit; normals are those of `NoiseSource.fill` within 2 units in the last place of float32,
and equal where the library contracts no multiplication with an addition.

There is no float64 here: JAX has it only when asked, and few accelerators compute with it at a useful speed.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import numpy as np

from mmfact.factorize.errors import CapacityError
from mmfact.noise import normal

# Elements that one call can draw: positions are int32.
LARGEST_PIECE = (1 << 31) - 64

_CONSTANT = tuple(np.frombuffer(b"expand 32-byte k", "<i4").tolist())
_DOUBLE_ROUNDS = 10
_OUTERMOST = 1 << 16  # cells below have second words

# The fits of noise/normal.py, highest power first.
_CENTRAL = tuple(map(float, (normal._N3, normal._N2, normal._N1, normal._N0)))
_UNDER_CENTRAL = (*map(float, (normal._D3, normal._D2, normal._D1)), 1.0)
_TAIL = tuple(map(float, (normal._T3, normal._T2, normal._T1, normal._T0)))
_UNDER_TAIL = (*map(float, (normal._U2, normal._U1)), 1.0)
_LOG = tuple(map(float, (normal._L6, normal._L5, normal._L4, normal._L3, normal._L2, normal._L1, normal._L0)))
_REST, _STEP, _SPLIT = map(float, (normal._REST, normal._STEP, normal._SPLIT))
_LN2_HIGH, _LN2_LOW = float(normal._LN2_HIGH), float(normal._LN2_LOW)
_Y_CENTRAL, _Q_CENTRAL, _R_CENTRAL = map(float, (normal._Y_CENTRAL, normal._Q_CENTRAL, normal._R_CENTRAL))
_ROOT_HALF = int(normal._ROOT_HALF_32)

# In the outermost cells, r = sqrt(-log p) from 3.32 to 8.25: z = r + N(r - 3.25) / D(r - 3.25). A fit of our own to the
# quantile (least squares, reweighted until the largest errors relative to z were equal, below 2^-26).
_FAR = (0.013343667084930287, 0.20066709842364464, 0.8269116248331901, 0.7976420990325901)
_UNDER_FAR = (0.03217226118450032, 0.38242430724094195, 1.0)
_R_FAR = 3.25


def white(subkeys: Any, first: int, count: int, xp: ModuleType) -> Any:
    """Elements first .. first + count - 1 of the white row of a step, float32.

    Parameters
    ----------
    subkeys : int32 array of shape (16,)
        The step's 64 bytes from `NoiseSource`, read as little-endian words. A secret; it says where to compute.
    first, count : int
        Numbers, even where JAX traces.
    xp : module
        numpy, torch or jax.numpy, whose array the subkeys are.

    Raises
    ------
    CapacityError
        count is above `LARGEST_PIECE`.
    """
    if count > LARGEST_PIECE:
        raise CapacityError(f"count = {count} is more than the {LARGEST_PIECE} elements of one piece; draw several")
    block, lead = divmod(first, 16)
    words = blocks(subkeys[:8], _counters(block, -(-(lead + count) // 16), subkeys, xp), xp)
    words = words.reshape(-1)[lead : lead + count]
    cell = 2147483647 - _folded(words)
    outermost = cell < _OUTERMOST
    values = _normals(words, cell, xp)
    start, skew = divmod(first, 8)

    def refined(at: Any) -> Any:
        """The normals of outermost cells from their second words, two of the eight pairs of a block each."""
        place = skew + at
        pairs = blocks(subkeys[8:], (place >> 3) + _wrapped(start), xp).reshape(-1)
        low = 16 * _counters(0, len(at), subkeys, xp) + 2 * (place & 7)
        magnitude = _far(cell[at], pairs[low], pairs[low + 1], xp)
        return xp.where(words[at] >= 0, magnitude, -magnitude)

    if hasattr(values, "at"):
        return _replaced(values, outermost, refined, xp)
    at = xp.asarray(xp.where(outermost)[0], dtype=xp.int32)
    values[at] = refined(at)
    return values


def blocks(key: Any, counters: Any, xp: ModuleType) -> Any:
    """ChaCha20's blocks of 16 words under a zero nonce, one row for each counter.

    Parameters
    ----------
    key : int32 array of shape (8,)
    counters : int32 array of shape (m,)
    xp : module
        As for `white`.
    """
    place = _place(key)
    column = xp.asarray([[1], [0], [0], [0]], dtype=xp.int32, **place)
    constant = xp.asarray(_CONSTANT, dtype=xp.int32, **place)
    start = tuple(words.reshape(4, 1) + 0 * counters for words in (constant, key[:4], key[4:]))
    start = (*start, column * counters)
    if hasattr(key, "at"):  # JAX would unroll the rounds, and compile them for a minute
        from jax import lax

        end = lax.fori_loop(0, _DOUBLE_ROUNDS, lambda _, state: _double_round(state, xp), start)
    else:
        end = start
        for _ in range(_DOUBLE_ROUNDS):
            end = _double_round(end, xp)
    return xp.concatenate([now + then for now, then in zip(end, start, strict=True)]).T


def _double_round(state: tuple[Any, ...], xp: ModuleType) -> tuple[Any, ...]:
    """On the columns of the 4 x 4 words, then on their diagonals, which are turned into columns for it."""
    a, b, c, d = _quarters(*state)
    a, b, c, d = _quarters(a, xp.roll(b, -1, 0), xp.roll(c, -2, 0), xp.roll(d, -3, 0))
    return a, xp.roll(b, 1, 0), xp.roll(c, 2, 0), xp.roll(d, 3, 0)


def _quarters(a: Any, b: Any, c: Any, d: Any) -> tuple[Any, Any, Any, Any]:
    """Four quarter rounds at once, on the rows of (4, m) arrays."""
    for left, right in ((16, 12), (8, 7)):
        a = a + b
        d = _rotated(d ^ a, left)
        c = c + d
        b = _rotated(b ^ c, right)
    return a, b, c, d


def _rotated(word: Any, by: int) -> Any:
    return (word << by) | ((word >> (32 - by)) & ((1 << by) - 1))


def _folded(word: Any) -> Any:
    """word or -1 - word, whichever is not negative."""
    return word ^ (word >> 31)


def _normals(words: Any, cell: Any, xp: ModuleType) -> Any:
    """As normal._normals32: the outermost cells are yet to be replaced."""
    folded = _folded(words)
    high = _float(folded & -2048, xp) * 2.0**-32  # |q| = high + low, and 2.5 high is exact
    low = (_float(folded & 2047, xp) + 0.5) * 2.0**-32
    q = high + low
    square = q * q
    y = _Y_CENTRAL - square
    r, left = _root_of_log(_float(cell, xp) + 0.5, xp)
    inner = q <= _Q_CENTRAL
    s = r - _R_CENTRAL
    over = xp.where(inner, square * _horner(_CENTRAL, y), _horner(_TAIL, s))
    ratio = over / xp.where(inner, _horner(_UNDER_CENTRAL, y), _horner(_UNDER_TAIL, s))
    central = 2.5 * high + (2.5 * low + q * (_REST + ratio))
    magnitude = xp.where(inner, central, r + (ratio + _STEP * left))
    return xp.where(words >= 0, magnitude, -magnitude)


def _far(cell: Any, low: Any, high: Any, xp: ModuleType) -> Any:
    """As normal.refine, for the magnitude: p 2^32 = cell + (second + 1/2) / 2^64, rounded once for each addition."""
    within = _float((high >> 16) & 65535, xp) * 2.0**-16 + (
        _float(high & 65535, xp) * 2.0**-32
        + (_float((low >> 16) & 65535, xp) * 2.0**-48 + (_float(low & 65535, xp) + 0.5) * 2.0**-64)
    )
    r, left = _root_of_log(_float(cell, xp) + within, xp)
    s = r - _R_FAR
    return r + (_horner(_FAR, s) / _horner(_UNDER_FAR, s) + left / (r + r))


def _root_of_log(scaled: Any, xp: ModuleType) -> tuple[Any, Any]:
    """r = sqrt(-log p) of p = scaled / 2^32, and by how much -log p exceeds the square of the rounded r."""
    bits = scaled.view(xp.int32)
    power = (bits - _ROOT_HALF) >> 23
    x = (bits - (power << 23)).view(xp.float32) - 1.0  # scaled = (1 + x) 2^power, 1 + x in [sqrt(1/2), sqrt(2))
    exponent = _float(32 - power, xp)
    log = x - (0.5 * (x * x) - x * x * x * _horner(_LOG, x))
    large, small = exponent * _LN2_HIGH, exponent * _LN2_LOW - log
    rounded = large + small
    left = small - (rounded - large)
    r = xp.sqrt(rounded)
    split = _SPLIT * r
    upper = split - (split - r)
    lower = r - upper
    return r, left + (((rounded - upper * upper) - 2.0 * upper * lower) - lower * lower)


def _horner(coefficients: tuple[float, ...], x: Any) -> Any:
    value = coefficients[0] * x + coefficients[1]
    for coefficient in coefficients[2:]:
        value = value * x + coefficient
    return value


def _replaced(values: Any, where: Any, refined: Any, xp: ModuleType) -> Any:
    """For JAX, whose shapes are fixed: so many at a time as there nearly always are, until none is left."""
    from jax import lax

    count = len(values)
    expected = count / (1 << 15)
    many = min(count, math.ceil(expected + 6 * math.sqrt(expected) + 4))

    def some(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        values, where = carry
        at = xp.nonzero(where, size=many, fill_value=count)[0].astype(xp.int32)
        return values.at[at].set(refined(at), mode="drop"), where.at[at].set(False, mode="drop")

    return lax.while_loop(lambda carry: carry[1].any(), some, (values, where))[0]


def _counters(first: int, count: int, beside: Any, xp: ModuleType) -> Any:
    return xp.arange(count, dtype=xp.int32, **_place(beside)) + _wrapped(first)


def _wrapped(number: int) -> int:
    """The int32 of the same 32 bits."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)


def _float(whole: Any, xp: ModuleType) -> Any:
    return xp.asarray(whole, dtype=xp.float32)


def _place(array: Any) -> dict[str, Any]:
    """Where torch is to make a new tensor; JAX and NumPy need not be told."""
    return {"device": array.device} if hasattr(array, "new_tensor") else {}
