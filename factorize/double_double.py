"""Double-double arithmetic: a number is hi + lo, about 32 digits.

The functions take floats inside numba kernels and whole arrays in NumPy. The certificate uses them:
one evaluation of the nuclear norm whose rounding errors are out of the way. Algorithms: Dekker
(1971) and Knuth for the exact sum and product; Hida, Li and Bailey (2001, "Library for
double-double and quad-double arithmetic") for the operations; relative error of each at most
4 * UNIT. They rely on IEEE arithmetic as written, so `fastmath` must stay off.
"""

from typing import Any

from numba.extending import register_jitable

UNIT = 2.0**-104

_SPLITTER = 134217729.0  # 2^27 + 1


@register_jitable
def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """a + b = s + e exactly."""
    s = a + b
    t = s - a
    return s, (a - (s - t)) + (b - t)


@register_jitable
def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """a * b = p + e exactly, barring overflow and underflow."""
    p = a * b
    t = _SPLITTER * a
    ah = t - (t - a)
    al = a - ah
    t = _SPLITTER * b
    bh = t - (t - b)
    bl = b - bh
    return p, ((ah * bh - p) + ah * bl + al * bh) + al * bl


@register_jitable
def add(ah: Any, al: Any, bh: Any, bl: Any) -> tuple[Any, Any]:
    """a + b, accurate also when they nearly cancel."""
    s, e = two_sum(ah, bh)
    t, f = two_sum(al, bl)
    e += t
    h = s + e
    e = e - (h - s)
    e += f
    hh = h + e
    return hh, e - (hh - h)


@register_jitable
def multiply(ah: Any, al: Any, bh: Any, bl: Any) -> tuple[Any, Any]:
    """a * b."""
    p, e = two_product(ah, bh)
    e += ah * bl + al * bh
    h = p + e
    return h, e - (h - p)


@register_jitable
def divide(ah: Any, al: Any, bh: Any, bl: Any) -> tuple[Any, Any]:
    """a / b: the quotient of the leading parts, corrected twice."""
    q1 = ah / bh
    ph, pl = multiply(bh, bl, q1, 0.0)
    rh, rl = add(ah, al, -ph, -pl)
    q2 = rh / bh
    ph, pl = multiply(bh, bl, q2, 0.0)
    rh, rl = add(rh, rl, -ph, -pl)
    q3 = rh / bh
    h, e = two_sum(q1, q2)
    return add(h, e, q3, 0.0)
