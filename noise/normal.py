"""Keystream words to standard normals: the inverse normal CDF, in arithmetic that is the same on every platform.

A word w of b = 32 bits (float32) or 64 bits (float64), read as a signed integer, is a sign and a cell k of the tail,

    k = 2^(b-1) - 1 - (w or -1 - w, whichever is not negative)          tail probability  p = (k + 1/2) / 2^b
    normal = +-(the z > 0 with P(N > z) = p), + for w >= 0

so that -1 - w has the opposite normal. In the outermost cells (p < 2^-16, or 2^-32 for float64; beyond 4.17 and 6.23
standard deviations) one word no longer resolves the tail: a second word of 64 bits, from another keystream, says where
in its cell p lies, p = (k + (second + 1/2) / 2^64) / 2^b. Magnitudes end at 11.3 and 13.1, beyond which a true normal
lies with probability 2^-96 and 2^-128.

Only + - * / and square roots are used, each rounded once as IEEE 754 says (numba without `fastmath` neither
reassociates nor contracts them), so values depend on neither vector width nor position nor C library.

float64 follows Wichura 1988 (algorithm AS 241, PPND16; relative error about 1e-16), with a logarithm of our own.
float32 has fits of our own to the same function, in the ranges that one word reaches (least squares, reweighted until
the largest relative errors were equal, below 2^-25), arranged so that what is rounded is small beside an exact term:
within 2 units in the last place of float32, shown for every word by tests/noise/test_normals.py.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Words = npt.NDArray[Any]
Row = npt.NDArray[Any]

_f32 = np.float32
_i32 = np.int32
_f64 = np.float64
_i64 = np.int64

# AS 241: numerators and denominators, highest power first.
_CENTRAL = (
    (2.5090809287301226727e3, 3.3430575583588128105e4, 6.7265770927008700853e4, 4.5921953931549871457e4,
     1.3731693765509461125e4, 1.9715909503065514427e3, 1.3314166789178437745e2, 3.3871328727963666080e0),
    (5.2264952788528545610e3, 2.8729085735721942674e4, 3.9307895800092710610e4, 2.1213794301586595867e4,
     5.3941960214247511077e3, 6.8718700749205790830e2, 4.2313330701600911252e1, 1.0),
)  # fmt: skip
_MIDDLE = (
    (7.74545014278341407640e-4, 2.27238449892691845833e-2, 2.41780725177450611770e-1, 1.27045825245236838258e0,
     3.64784832476320460504e0, 5.76949722146069140550e0, 4.63033784615654529590e0, 1.42343711074968357734e0),
    (1.05075007164441684324e-9, 5.47593808499534494600e-4, 1.51986665636164571966e-2, 1.48103976427480074590e-1,
     6.89767334985100004550e-1, 1.67638483018380384940e0, 2.05319162663775882187e0, 1.0),
)  # fmt: skip
_FAR = (
    (2.01033439929228813265e-7, 2.71155556874348757815e-5, 1.24266094738807843860e-3, 2.65321895265761230930e-2,
     2.96560571828504891230e-1, 1.78482653991729133580e0, 5.46378491116411436990e0, 6.65790464350110377720e0),
    (2.04426310338993978564e-15, 1.42151175831644588870e-7, 1.84631831751005468180e-5, 7.86869131145613259100e-4,
     1.48753612908506148525e-2, 1.36929880922735805310e-1, 5.99832206555887937690e-1, 1.0),
)  # fmt: skip

# For float32, |q| <= .425: z = 2.5 q + q (sqrt(2 pi) - 2.5 + q^2 N(y) / D(y)), y = .425^2 - q^2.
_REST = _f32(math.sqrt(2 * math.pi) - 2.5)
_N3, _N2, _N1, _N0 = map(_f32, (25.929102434476953, 197.66477964742927, 69.73075353054096, 4.8747658505777025))
_D3, _D2, _D1 = map(_f32, (145.94953014147845, 111.52014861512265, 20.328724275879956))
# Beyond, r = sqrt(-log p) up to 3.33: z = r + N(r - 1.6) / D(r - 1.6).
_T3, _T2, _T1, _T0 = map(_f32, (0.05735258808704658, 0.4033049444337054, 0.5703798089107124, -0.17656286115212333))
_U2, _U1 = map(_f32, (0.13750864941343863, 0.7780079984250158))
# 1 / (2 r) lies between .31 and .15: this much of a Newton step for the root is enough.
_STEP = _f32(0.3)
# log(1 + x) = x - x^2 / 2 + x^3 L(x) for sqrt(1/2) - 1 <= x <= sqrt(2) - 1.
_L6, _L5, _L4, _L3, _L2, _L1, _L0 = map(
    _f32,
    (0.08672071511998462, -0.14379026170493892, 0.14978033332048624, -0.16564421966969636, 0.1995487205477018,
     -0.2500169897470276, 0.3333416599495032),
)  # fmt: skip
_ONE, _HALF, _TWO, _FIVE_HALVES = map(_f32, (1, 0.5, 2, 2.5))
_Q_SCALE, _Q_CENTRAL, _Y_CENTRAL, _R_CENTRAL = map(_f32, (2.0**-32, 0.425, 0.180625, 1.6))
_LN2 = math.log(2)
_LN2_HIGH = _f32(math.floor(_LN2 * 2**16) / 2**16)  # 16 bits: its multiples by small integers are exact
_LN2_LOW = _f32(_LN2 - float(_LN2_HIGH))
_SPLIT = _f32(4097)  # Dekker's constant: halves of 12 bits
_ROOT_HALF = math.sqrt(0.5)
_ROOT_HALF_32, _ROOT_HALF_64 = _i32(0x3F3504F3), _i64(0x3FE6A09E667F3BCD)  # their bits

_CHUNK = 1024  # elements worked on at a time: what is between two loops stays in the fastest cache


def normals(words: Words, out: Row) -> list[int]:
    """Standard normals of keystream words, one each.

    Parameters
    ----------
    words : uint32 or uint64 array
    out : float32 or float64 array of the same length, of the same width
        Where they go.

    Returns
    -------
    list of int
        Positions of those in the outermost cells, each of which is yet to be made by `refine`.
    """
    found = np.empty(len(words), np.int32)
    many = (_normals32 if words.itemsize == 4 else _normals64)(words, out, found)
    return found[:many].tolist()


def refine(word: int, second: int, bits: int) -> float:
    """The normal of a word in an outermost cell, given its second word of 64 bits.

    Parameters
    ----------
    word, second : int
        Unsigned.
    bits : {32, 64}
        Of `word`.
    """
    half = 1 << (bits - 1)
    positive = word < half
    cell = half - 1 - word if positive else word - half
    z = _tail((cell + (second + 0.5) * 2.0**-64) * 2.0**-bits)
    return z if positive else -z


@njit(cache=True, nogil=True, error_model="numpy")
def _normals32(words: Words, out: Row, found: Row) -> int:
    signed = words.view(_i32)
    mantissa, exponent = np.empty(_CHUNK, _f32), np.empty(_CHUNK, _f32)
    bits = mantissa.view(_i32)
    many = 0
    for start in range(0, len(words), _CHUNK):
        w, z = signed[start : start + _CHUNK], out[start : start + _CHUNK]
        here = _i32(0)
        for i in range(len(w)):
            cell = _cell32(w[i])
            here += _i32(cell < _i32(65536))
            mantissa[i] = _f32(cell) + _HALF  # p 2^32
        for i in range(len(w)):
            power = (bits[i] - _ROOT_HALF_32) >> _i32(23)
            bits[i] -= power << _i32(23)  # mantissa[i] now in [sqrt(1/2), sqrt(2))
            exponent[i] = _f32(power - _i32(32))
        if here:
            for i in range(len(w)):
                if _cell32(w[i]) < _i32(65536):
                    found[many] = start + i
                    many += 1
        for i in range(len(w)):
            folded = w[i] ^ (w[i] >> _i32(31))
            high = _f32(folded & _i32(-2048)) * _Q_SCALE  # |q| = high + low, and 2.5 high is exact
            low = (_f32(folded & _i32(2047)) + _HALF) * _Q_SCALE
            q = high + low
            square = q * q
            y = _Y_CENTRAL - square
            over = square * (((_N3 * y + _N2) * y + _N1) * y + _N0)
            under = ((_D3 * y + _D2) * y + _D1) * y + _ONE

            x = mantissa[i] - _ONE
            log = x * x * x * ((((((_L6 * x + _L5) * x + _L4) * x + _L3) * x + _L2) * x + _L1) * x + _L0)
            log = x - (_HALF * (x * x) - log)
            large, small = -exponent[i] * _LN2_HIGH, -exponent[i] * _LN2_LOW - log
            rounded = large + small  # -log p, and what its rounding leaves
            left = small - (rounded - large)
            r = np.sqrt(rounded)
            split = _SPLIT * r
            upper = split - (split - r)
            lower = r - upper
            left += ((rounded - upper * upper) - _TWO * upper * lower) - lower * lower
            s = r - _R_CENTRAL
            inner = q <= _Q_CENTRAL
            over = over if inner else ((_T3 * s + _T2) * s + _T1) * s + _T0
            ratio = over / (under if inner else (_U2 * s + _U1) * s + _ONE)
            central = _FIVE_HALVES * high + (_FIVE_HALVES * low + q * (_REST + ratio))
            magnitude = central if inner else r + (ratio + _STEP * left)
            z[i] = magnitude if w[i] >= 0 else -magnitude
    return many


@njit(cache=True, nogil=True, error_model="numpy")
def _normals64(words: Words, out: Row, found: Row) -> int:
    signed = words.view(_i64)
    mantissa, exponent = np.empty(_CHUNK), np.empty(_CHUNK)
    bits = mantissa.view(_i64)
    many = 0
    for start in range(0, len(words), _CHUNK):
        w, z = signed[start : start + _CHUNK], out[start : start + _CHUNK]
        here = _i32(0)
        for i in range(len(w)):
            cell = _cell64(w[i])
            here += _i32(cell < _i64(4294967296))
            mantissa[i] = _f64(cell) + 0.5
        for i in range(len(w)):
            power = (bits[i] - _ROOT_HALF_64) >> _i64(52)
            bits[i] -= power << _i64(52)
            exponent[i] = _f64(power - _i64(64))
        if here:
            for i in range(len(w)):
                if _cell64(w[i]) < _i64(4294967296):
                    found[many] = start + i
                    many += 1
        for i in range(len(w)):
            q = (_f64(w[i] ^ (w[i] >> _i64(63))) + 0.5) * 2.0**-64
            central = q * _ratio(_CENTRAL, 0.180625 - q * q)
            r = math.sqrt(-_LN2 * exponent[i] - _log(mantissa[i]))
            magnitude = central if q <= 0.425 else _ratio(_MIDDLE, r - 1.6)
            z[i] = magnitude if w[i] >= 0 else -magnitude
    return many


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _cell32(word: Any) -> Any:
    return _i32(2147483647) - (word ^ (word >> _i32(31)))


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _cell64(word: Any) -> Any:
    return _i64(9223372036854775807) - (word ^ (word >> _i64(63)))


@njit(cache=True, nogil=True, error_model="numpy")
def _tail(p: float) -> float:
    """z > 0 with P(N > z) = p, for 0 < p < .075."""
    mantissa, power = math.frexp(p)
    if mantissa < _ROOT_HALF:
        mantissa, power = 2 * mantissa, power - 1
    r = math.sqrt(-_LN2 * power - _log(mantissa))
    return _ratio(_MIDDLE, r - 1.6) if r <= 5.0 else _ratio(_FAR, r - 5.0)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _ratio(coefficients: Any, x: float) -> float:
    """A ratio of two polynomials of degree 7."""
    (a, b, c, d, e, f, g, h), (k, l, m, n, o, p, q, r) = coefficients  # noqa: E741
    over = ((((((a * x + b) * x + c) * x + d) * x + e) * x + f) * x + g) * x + h
    return over / (((((((k * x + l) * x + m) * x + n) * x + o) * x + p) * x + q) * x + r)


@njit(cache=True, nogil=True, error_model="numpy", inline="always")
def _log(m: float) -> float:
    """log m for sqrt(1/2) <= m < sqrt(2): 2 artanh((m - 1) / (m + 1)), its series to s^21."""
    s = (m - 1.0) / (m + 1.0)
    t = s * s
    series = 1 / 19 + t * (1 / 21)
    series = 1 / 15 + t * (1 / 17 + t * series)
    series = 1 / 11 + t * (1 / 13 + t * series)
    series = 1 / 7 + t * (1 / 9 + t * series)
    series = 1 / 3 + t * (1 / 5 + t * series)
    return 2 * s + 2 * s * t * series
