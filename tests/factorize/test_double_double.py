"""Double-double arithmetic against exact fractions: the certificate's digits come from here.

The module states a relative error of at most 4 * 2^-104 an operation. That holds for `add` under
cancellation too (Joldes, Muller and Popescu 2017, "Tight and rigorous error bounds for basic building
blocks of double-word arithmetic", Theorem 3.1: 3 * 2^-106 whatever the signs) as long as the operands
are normalised, |lo| <= ulp(hi) / 2. Magnitudes stay within 1e-60 .. 1e60, the limits that the schedules
set, so that no low part underflows.
"""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numba import njit

from mmfact.factorize import double_double as dd

BOUND = 4 * Fraction(dd.UNIT)

_leading = st.one_of(st.floats(1e-60, 1e60), st.floats(-1e60, -1e-60), st.floats(0.5, 2), st.integers(1, 9).map(float))


@st.composite
def numbers(draw):
    """A normalised pair hi + lo, lo anything up to half a unit in the last place of hi."""
    hi = draw(_leading)
    lo = hi * 2.0**-53 * draw(st.one_of(st.just(0.0), st.floats(-1, 1)))
    total = hi + lo
    return total, float(Fraction(hi) + Fraction(lo) - Fraction(total))


@st.composite
def nearly_opposite(draw):
    """Two numbers whose sum loses anything from a few bits to nearly all of them."""
    hi, lo = draw(numbers())
    other = -(hi + draw(st.integers(-4, 4)) * np.spacing(hi)) * draw(st.sampled_from([1.0, 1 + 2.0**-20]))
    rest = draw(st.one_of(st.just(-lo), st.floats(-0.5, 0.5).map(lambda x: x * np.spacing(abs(other)))))
    total = other + rest
    return (hi, lo), (float(total), float(Fraction(float(other)) + Fraction(float(rest)) - Fraction(float(total))))


def value(pair):
    return Fraction(float(pair[0])) + Fraction(float(pair[1]))


def check(result, truth):
    hi, lo = result
    assert hi == hi + lo, "not normalised"
    assert abs(value(result) - truth) <= BOUND * abs(truth)


many = settings(deadline=None, max_examples=400)


def test_unit_is_the_double_double_roundoff():
    """Error bounds in the certificate are multiples of it."""
    assert Fraction(dd.UNIT) == Fraction(1, 2**104)


@given(a=_leading, b=_leading)
@many
def test_two_sum_is_exact(a, b):
    """a + b = s + e without any error."""
    s, e = dd.two_sum(a, b)
    assert Fraction(s) + Fraction(e) == Fraction(a) + Fraction(b)
    assert s == a + b


@given(a=_leading, b=_leading)
@many
def test_two_product_is_exact(a, b):
    """a b = p + e without any error."""
    p, e = dd.two_product(a, b)
    assert Fraction(p) + Fraction(e) == Fraction(a) * Fraction(b)
    assert p == a * b


@given(a=numbers(), b=numbers())
@many
def test_add(a, b):
    """Four units of relative error at most, any signs."""
    check(dd.add(*a, *b), value(a) + value(b))


@given(pair=nearly_opposite())
@example(pair=((1.0, 2.0**-54), (-1.0, 2.0**-55)))
@example(pair=((1.0, 2.0**-54), (-(1 + 2.0**-52), 2.0**-54)))
@many
def test_add_under_cancellation(pair):
    """Still relative to the (tiny) sum: the sloppy addition of two low parts would fail here."""
    a, b = pair
    assume(abs(b[1]) <= np.spacing(abs(b[0])) / 2)
    check(dd.add(*a, *b), value(a) + value(b))


@given(a=numbers())
@many
def test_add_of_the_opposite_is_zero(a):
    """x - x = 0 exactly."""
    assert value(dd.add(*a, -a[0], -a[1])) == 0


@given(a=numbers(), b=numbers())
@many
def test_multiply(a, b):
    """Four units of relative error at most."""
    check(dd.multiply(*a, *b), value(a) * value(b))


@given(a=numbers(), b=numbers())
@many
def test_divide(a, b):
    """Four units of relative error at most."""
    check(dd.divide(*a, *b), value(a) / value(b))


@given(eta=st.floats(1e-60, 1e60))
@many
def test_reciprocal_of_a_rate(eta):
    """1 / eta, the entry that every band starts from."""
    check(dd.divide(1.0, 0.0, eta, 0.0), 1 / Fraction(eta))


def test_zero_operands():
    """Structured zeros stay zero."""
    assert dd.add(0.0, 0.0, 0.0, 0.0) == (0.0, 0.0)
    assert dd.add(0.0, 0.0, 1.5, 2.0**-60) == (1.5, 2.0**-60)
    assert dd.multiply(0.0, 0.0, 1.5, 2.0**-60) == (0.0, 0.0)
    assert dd.divide(0.0, 0.0, 1.5, 2.0**-60) == (0.0, 0.0)


@njit
def _add(ah, al, bh, bl, out):
    for i in range(len(ah)):
        out[0, i], out[1, i] = dd.add(ah[i], al[i], bh[i], bl[i])


@njit
def _multiply(ah, al, bh, bl, out):
    for i in range(len(ah)):
        out[0, i], out[1, i] = dd.multiply(ah[i], al[i], bh[i], bl[i])


@njit
def _divide(ah, al, bh, bl, out):
    for i in range(len(ah)):
        out[0, i], out[1, i] = dd.divide(ah[i], al[i], bh[i], bl[i])


@pytest.mark.parametrize(("name", "compiled"), [("add", _add), ("multiply", _multiply), ("divide", _divide)])
def test_compiled_arithmetic_is_the_same(name, compiled):
    """Bit for bit what Python floats and NumPy arrays give: no reassociation, no fused multiply-add."""
    rng = np.random.default_rng(5)
    hi = rng.choice([-1, 1], (2, 2000)) * 10 ** rng.uniform(-30, 30, (2, 2000))
    lo = hi * 2.0**-53 * rng.uniform(-0.5, 0.5, hi.shape)
    hi[1, :300] = -hi[0, :300] * (1 + 2.0**-52)
    total = hi + lo
    lo = lo - (total - hi)
    hi = total
    out = np.empty((2, hi.shape[1]))
    compiled(hi[0], lo[0], hi[1], lo[1], out)
    operation = getattr(dd, name)
    np.testing.assert_array_equal(out, operation(hi[0], lo[0], hi[1], lo[1]))
    one_by_one = [operation(*map(float, four)) for four in zip(hi[0], lo[0], hi[1], lo[1], strict=True)]
    np.testing.assert_array_equal(out, np.transpose(one_by_one))
