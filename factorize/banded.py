"""Numba kernels, linear in n, on pencils L L' + s D with L lower-banded and D = diag(v) > 0.

Bands are stored as ``bands[k, i] = L[i, i - k]``, shape (w + 1, n); entries left of the matrix are 0.

Throughout, T = L L' + s D and T = R'R with R upper-banded, from a QR factorization of the stacked
matrix [L'; sqrt(s) D^(1/2)]: forming L L' would square the condition number. Two arrays hold what
the sweeps need:

    transition[m - 1, k] = -R[k, k + m] / R[k, k],     m = 1..w
    inverse[m, k]        = (T^-1)[k + m, k],           m = 0..w-1

since column i of T^-1 above its diagonal obeys (T^-1)[k, i] = sum_m transition[m-1, k] (T^-1)[k+m, i]
for k < i.
"""

import math

import numpy as np
import numpy.typing as npt
from numba import njit

from mmfact.factorize import double_double as dd

Array = npt.NDArray[np.float64]


@njit(cache=True, nogil=True)
def _length(x: float, y: float) -> float:
    """norm2 of (x, y), also where the squares would vanish."""
    square = x * x + y * y
    return math.sqrt(square) if square > 1e-280 else math.hypot(x, y)


@njit(cache=True, nogil=True)
def selected_inverse(bands: Array, v: Array, s: float, transition: Array, inverse: Array) -> None:
    """Fill `transition` and `inverse` (both (w, n)) for T = L L' + s diag(v).

    Forward: rows of [L'; sqrt(s) D^(1/2)] enter a triangle of w + 1 rows by Givens rotations.
    Backward: row k of R^-1 is e_k / R[k, k] + sum_m transition[m-1, k] row_(k+m); only the Gram
    matrix of w successive rows matters, so they are kept in an orthonormal basis of w dimensions
    (again by rotations, never by squares).
    """
    w, n = transition.shape
    triangle = np.zeros((w + 1, w + 1))
    row = np.empty(w + 1)
    pivot = np.empty(n)
    for k in range(n):
        for source in range(2):
            for m in range(w + 1):
                row[m] = 0.0
            if source == 0:
                for m in range(min(w + 1, n - k)):
                    row[m] = bands[m, k + m]
            else:
                row[0] = math.sqrt(s * v[k])
            for c in range(w + 1):
                b = row[c]
                if b == 0.0:
                    continue
                a = triangle[c, c]
                r = _length(a, b)
                cosine, sine = a / r, b / r
                triangle[c, c] = r
                for m in range(c + 1, w + 1):
                    a = triangle[c, m]
                    b = row[m]
                    triangle[c, m] = cosine * a + sine * b
                    row[m] = cosine * b - sine * a
        pivot[k] = triangle[0, 0]
        for m in range(1, w + 1):
            transition[m - 1, k] = -triangle[0, m] / triangle[0, 0]
        for c in range(w):  # the remaining rows move up; the new last row and column are empty
            for m in range(c, w):
                triangle[c, m] = triangle[c + 1, m + 1]
            triangle[c, w] = 0.0
        triangle[w, w] = 0.0

    factor = np.zeros((w, w + 1))  # rows k, k+1, .. of R^-1 in the current basis, lower-triangular
    fresh = np.empty(w + 1)
    for k in range(n - 1, -1, -1):
        fresh[0] = 1.0 / pivot[k]
        for b in range(w):
            total = 0.0
            for a in range(b, w):
                total += transition[a, k] * factor[a, b]
            fresh[b + 1] = total
        for a in range(w - 1, 0, -1):
            for b in range(a):
                factor[a, b + 1] = factor[a - 1, b]
            factor[a, 0] = 0.0
        for b in range(w + 1):
            factor[0, b] = fresh[b]
        for b in range(w, 0, -1):  # in this order row a fills no further than column a
            y = factor[0, b]
            if y == 0.0:
                continue
            x = factor[0, 0]
            r = _length(x, y)
            cosine, sine = x / r, y / r
            factor[0, 0] = r
            factor[0, b] = 0.0
            for a in range(b, w):
                x = factor[a, 0]
                y = factor[a, b]
                factor[a, 0] = cosine * x + sine * y
                factor[a, b] = cosine * y - sine * x
        for m in range(w):
            inverse[m, k] = factor[0, 0] * factor[m, 0]


@njit(cache=True, nogil=True)
def squared_inverse_product(transition: Array, inverse: Array, q: Array, scale: float, out: Array) -> None:
    """out[k] += scale * sum_i ((T^-1)[k, i])^2 q[i], in O(n w^2).

    A column of T^-1 is a w-state recursion; the elementwise square of its outer product is a
    w(w+1)/2-state recursion, run backward for i >= k and, as its adjoint, forward for i < k.
    """
    w, n = transition.shape
    moment = np.zeros((w, w))
    u = np.empty(w)
    mu = np.empty(w)
    for k in range(n - 1, -1, -1):
        for a in range(w):
            u[a] = transition[a, k]
        corner = 0.0
        for a in range(w):
            total = 0.0
            for b in range(w):
                total += moment[a, b] * u[b]
            mu[a] = total
            corner += u[a] * total
        for a in range(w - 1, 0, -1):
            for b in range(w - 1, 0, -1):
                moment[a, b] = moment[a - 1, b - 1]
        for a in range(1, w):
            moment[0, a] = mu[a - 1]
            moment[a, 0] = mu[a - 1]
        moment[0, 0] = corner
        for a in range(w):
            for b in range(w):
                moment[a, b] += q[k] * inverse[a, k] * inverse[b, k]
        out[k] += scale * moment[0, 0]

    form = np.zeros((w + 1, w + 1))  # one spare row and column of zeros
    updated = np.zeros((w, w))
    for k in range(n):
        total = 0.0
        for a in range(w):
            for b in range(w):
                total += inverse[a, k] * form[a, b] * inverse[b, k]
        out[k] += scale * total
        form[0, 0] += q[k]
        for a in range(w):
            for b in range(w):
                updated[a, b] = (
                    transition[a, k] * form[0, 0] * transition[b, k]
                    + transition[a, k] * form[0, b + 1]
                    + form[a + 1, 0] * transition[b, k]
                    + form[a + 1, b + 1]
                )
        for a in range(w):
            for b in range(w):
                form[a, b] = updated[a, b]


@njit(cache=True, nogil=True)
def add_inverse(transition: Array, inverse: Array, weight: float, first: int, last: int, out: Array) -> None:
    """out[k, i] += weight * (T^-1)[k, i] for k <= i, columns first <= i < last."""
    w = transition.shape[0]
    state = np.zeros((w, last - first))  # rows k .. k+w-1 of the columns; row i sits at i % w
    for k in range(last - 1, -1, -1):
        row = state[k % w]  # row k takes the place of row k + w, which this step is the last to need
        start = max(k + 1, first) - first
        for i in range(start, last - first):
            row[i] *= transition[w - 1, k]
        for m in range(1, w):
            other = state[(k + m) % w]
            for i in range(start, last - first):
                row[i] += transition[m - 1, k] * other[i]
        if k >= first:
            for m in range(w):
                state[(k + m) % w, k - first] = inverse[m, k]
        for i in range(max(k, first) - first, last - first):
            out[k, first + i] += weight * row[i]


@njit(cache=True, nogil=True)
def trace_double_double(bands_hi: Array, bands_lo: Array, v: Array, s: float) -> tuple[float, float]:
    """tr(D T^-1) in double-double, and the condition that its rounding error is proportional to.

    With 32 digits squaring is harmless up to condition numbers of about 1e20, so this is the
    plain T = l E l' (l unit lower-banded) with the backward recurrence for the inverse's band.

    Returns
    -------
    (trace, condition) : floats
        2 w + 1 times `condition` = sum_i T[i, i] (T^-1)[i, i] bounds the condition number of T
        scaled to unit diagonal, whose norm is at most its bandwidth.
    """
    w = bands_hi.shape[0] - 1
    n = bands_hi.shape[1]
    lh = np.zeros((w + 1, n))  # row 0 holds E, row m holds l[i, i - m]
    ll = np.zeros((w + 1, n))
    diagonal = np.empty(n)
    for i in range(n):
        for m in range(min(w, i), -1, -1):
            j = i - m
            ah, al = 0.0, 0.0
            for c in range(max(0, i - w), j + 1):
                ph, pl = dd.multiply(bands_hi[i - c, i], bands_lo[i - c, i], bands_hi[j - c, j], bands_lo[j - c, j])
                ah, al = dd.add(ah, al, ph, pl)
            if m == 0:
                ph, pl = dd.two_product(s, v[i])
                ah, al = dd.add(ah, al, ph, pl)
                diagonal[i] = ah
            for c in range(max(0, i - w), j):
                ph, pl = dd.multiply(lh[i - c, i], ll[i - c, i], lh[0, c], ll[0, c])
                ph, pl = dd.multiply(ph, pl, lh[j - c, j], ll[j - c, j])
                ah, al = dd.add(ah, al, -ph, -pl)
            if m > 0:
                ah, al = dd.divide(ah, al, lh[0, j], ll[0, j])
            lh[m, i], ll[m, i] = ah, al

    zh = np.zeros((w + 1, n))  # (T^-1)[k + m, k]
    zl = np.zeros((w + 1, n))
    th, tl = 0.0, 0.0
    condition = 0.0
    for k in range(n - 1, -1, -1):
        reach = min(w, n - 1 - k)
        for m in range(reach, -1, -1):
            ah, al = 0.0, 0.0
            if m == 0:
                ah, al = dd.divide(1.0, 0.0, lh[0, k], ll[0, k])
            for c in range(1, reach + 1):
                low = k + min(m, c)
                gap = abs(m - c)
                ph, pl = dd.multiply(lh[c, k + c], ll[c, k + c], zh[gap, low], zl[gap, low])
                ah, al = dd.add(ah, al, -ph, -pl)
            zh[m, k], zl[m, k] = ah, al
        ph, pl = dd.multiply(zh[0, k], zl[0, k], v[k], 0.0)
        th, tl = dd.add(th, tl, ph, pl)
        condition += diagonal[k] * zh[0, k]
    return th + tl, condition
