"""The banded kernels against dense inverses at 60 digits, on matrices where squaring the condition number is fatal."""

import mpmath
import numpy as np
import pytest

from mmfact.factorize import banded, workload
from mmfact.factorize.double_double import UNIT

N = 10
EPS = np.finfo(float).eps


def _random_bands(seed, w, n=N):
    rng = np.random.default_rng(seed)
    bands = rng.normal(size=(w + 1, n))
    bands[0] = rng.uniform(0.5, 2, n)
    for k in range(1, w + 1):
        bands[k, :k] = 0
    return bands, np.zeros_like(bands)


def _hard(seed, w, n=N):
    """Rates over three decades; w = 1: sgd, 2: beta .99, 3: an average on top."""
    rates = 10 ** np.random.default_rng(seed).uniform(-3, 0, n)
    if w == 1:
        return workload.sgd(n, learning_rates=rates).inverse_bands()
    return workload.momentum(n, beta=0.99, learning_rates=rates, ema=0.9 if w == 3 else 0.0).inverse_bands()


# name -> (bands (hi, lo), v, shift relative to the largest entry of L L', whether plain float64 inversion must fail)
CASES = {f"random, w={w}": (_random_bands(w, w), 1e-2, False) for w in (1, 2, 3)}
CASES |= {f"tiny shift, w={w}": (_random_bands(w + 10, w), 1e-14, False) for w in (1, 2, 3)}
CASES |= {f"three decades, w={w}": (_hard(w, w, 24), 1e-20, w > 1) for w in (1, 2, 3)}
CASES |= {f"huge shift, w={w}": (_hard(w + 5, w), 1e6, False) for w in (1, 2, 3)}
CASES |= {
    f"n = {n}, w={w}": (tuple(part[:, :n] for part in _random_bands(3, w)), 0.1, False)
    for n in (1, 2, 3)
    for w in (1, 2, 3)
}


def _dense(bands):
    return np.array([[bands[i - j, i] if 0 <= i - j < len(bands) else 0.0 for j in range(bands.shape[1])]
                     for i in range(bands.shape[1])])  # fmt: skip


class Problem:
    """T = L L' + s diag(v), its triangle R (T = R'R) and its inverse, all at 60 digits."""

    def __init__(self, name):
        (self.hi, self.lo), relative, self.fatal = CASES[name]
        self.w, self.n = len(self.hi) - 1, self.hi.shape[1]
        rng = np.random.default_rng(len(name))
        self.v = 10 ** rng.uniform(-2, 2, self.n)
        L = _dense(self.hi)
        self.s = relative * float((L @ L.T).max())
        with mpmath.workdps(60):
            exact = mpmath.matrix(L.tolist()) + mpmath.matrix(_dense(self.lo).tolist())
            self.T_float = L @ L.T + self.s * np.diag(self.v)
            T = exact * exact.T
            for i in range(self.n):
                T[i, i] += mpmath.mpf(self.s) * mpmath.mpf(float(self.v[i]))
            R, inverse = mpmath.cholesky(T).T, T**-1
            self.trace = mpmath.fsum(inverse[i, i] * mpmath.mpf(float(self.v[i])) for i in range(self.n))
            self.T, self.R, self.inverse = (np.array(M.tolist(), dtype=float) for M in (T, R, inverse))
        self.scale = np.sqrt(np.outer(np.diag(self.inverse), np.diag(self.inverse)))
        self.transition, self.band = np.full((self.w, self.n), np.nan), np.full((self.w, self.n), np.nan)
        banded.selected_inverse(self.hi, self.v, self.s, self.transition, self.band)


@pytest.fixture(scope="module", params=sorted(CASES))
def problem(request):
    return Problem(request.param)


# Forward errors of the rotations grow with the square root of the condition number of T, that is with the
# condition number of [L'; sqrt(s D)], at most 1e9 here and in practice far below.
SWEEP = 1e-11


def _curvature_tolerance(problem):
    """The squares' recursion loses a little more; only the direction of a Newton step depends on it."""
    return 1e-9 if problem.fatal else 1e-13


def test_selected_inverse(problem):
    """inverse[m, k] = (T^-1)[k+m, k], relative to the diagonals of T^-1; nothing beyond the matrix."""
    for m in range(problem.w):
        for k in range(problem.n):
            truth = problem.inverse[k + m, k] if k + m < problem.n else 0.0
            size = problem.scale[k + m, k] if k + m < problem.n else 1.0
            assert abs(problem.band[m, k] - truth) <= SWEEP * size, (m, k)


def test_transitions(problem):
    """transition[m-1, k] = -R[k, k+m] / R[k, k], and the columns of T^-1 obey the recursion with them."""
    for k in range(problem.n):
        reach = range(1, min(problem.w, problem.n - 1 - k) + 1)
        for m in reach:
            truth = -problem.R[k, k + m] / problem.R[k, k]
            assert problem.transition[m - 1, k] == pytest.approx(truth, rel=1e-8, abs=1e-11)
        for i in range(k + 1, problem.n):
            above = sum(problem.transition[m - 1, k] * problem.inverse[k + m, i] for m in reach)
            size = sum(abs(problem.transition[m - 1, k]) * problem.scale[k + m, i] for m in reach)
            assert abs(above - problem.inverse[k, i]) <= SWEEP * (size + problem.scale[k, i])


@pytest.mark.parametrize("name", [name for name, (_, _, fatal) in CASES.items() if fatal])
def test_hard_cases_are_hard(name):
    """Forming L L' + s D in float64 loses the digits that the sweep keeps: the cases above do discriminate."""
    problem = Problem(name)
    naive = np.diag(np.linalg.inv(problem.T_float))
    assert np.abs(naive / np.diag(problem.inverse) - 1).max() > 100 * SWEEP


@pytest.mark.parametrize("scale", [1.0, 0.37])
def test_squared_inverse_product(problem, scale):
    """out += scale (T^-1 o T^-1) q, the curvature's building block."""
    q = np.random.default_rng(1).normal(size=problem.n)
    begin = np.random.default_rng(2).normal(size=problem.n) * problem.scale.max() ** 2
    out = begin.copy()
    banded.squared_inverse_product(problem.transition, problem.band, q, scale, out)
    squares = problem.inverse**2
    tolerance = _curvature_tolerance(problem) * (problem.scale**2 @ np.abs(q)) + 4 * EPS * np.abs(begin)
    assert (np.abs(out - begin - scale * (squares @ q)) <= tolerance).all()


def test_squared_inverse_product_is_symmetric(problem):
    """p'Kq = q'Kp: conjugate gradients depend on it, and the two sweeps must be each other's adjoint."""
    p, q = np.random.default_rng(3).normal(size=(2, problem.n))
    Kp, Kq = np.zeros(problem.n), np.zeros(problem.n)
    banded.squared_inverse_product(problem.transition, problem.band, p, 1.0, Kp)
    banded.squared_inverse_product(problem.transition, problem.band, q, 1.0, Kq)
    size = np.abs(p) @ problem.scale**2 @ np.abs(q)
    assert abs(p @ Kq - q @ Kp) <= _curvature_tolerance(problem) * size


@pytest.mark.parametrize("first_last", [(0, 1.0), (0, 0.5), (0.4, 0.8), (0.9, 1.0)])
def test_add_inverse(problem, first_last):
    """out += weight T^-1 on and above the diagonal of some columns; every other entry is left alone."""
    first, last = (round(f * problem.n) for f in first_last)
    begin = np.random.default_rng(4).normal(size=(problem.n, problem.n)) * problem.scale.max()
    out = begin.copy()
    banded.add_inverse(problem.transition, problem.band, 0.7, first, last, out)
    expected = np.zeros_like(out)
    expected[:, first:last] = np.triu(0.7 * problem.inverse)[:, first:last]
    touched = np.zeros(out.shape, dtype=bool)
    touched[:, first:last] = np.triu(np.ones(out.shape, dtype=bool))[:, first:last]
    np.testing.assert_array_equal(out[~touched], begin[~touched])
    tolerance = 10 * SWEEP * problem.scale + 4 * EPS * np.abs(begin)
    assert (np.abs(out - begin - expected) <= tolerance).all()


def test_trace_double_double(problem):
    """tr(D T^-1) as good as a float64 can be, and within the error that the certificate takes for it."""
    trace, condition = banded.trace_double_double(problem.hi, problem.lo, problem.v, problem.s)
    with mpmath.workdps(60):
        error = float(abs(trace / problem.trace - 1))
    claimed = 64 * (problem.w + 1) ** 3 * UNIT * condition
    assert error <= claimed + EPS / 2
    assert claimed < 1e-12, "too ill-conditioned to say anything"


def test_condition_is_an_upper_bound(problem):
    """The scaled condition number, up to the largest eigenvalue of a band of unit diagonal, at most 2w + 1."""
    _, condition = banded.trace_double_double(problem.hi, problem.lo, problem.v, problem.s)
    truth = float(np.sum(np.diag(problem.T) * np.diag(problem.inverse)))
    assert condition == pytest.approx(truth, rel=1e-6)
    root = np.sqrt(np.diag(problem.T))
    with mpmath.workdps(60):
        scaled = mpmath.matrix((problem.T / np.outer(root, root)).tolist())
    spectrum = np.linalg.eigvalsh(np.array(scaled.tolist(), dtype=float))
    if spectrum[0] > 1e-10:  # below, float64 eigenvalues say nothing
        assert (2 * problem.w + 1) * condition >= spectrum[-1] / spectrum[0]


def test_trace_uses_the_low_parts():
    """1/eta is not a float64: with the low parts dropped the trace is off by far more than its claim."""
    n = 24
    hi, lo = _hard(2, 2, n)
    v = np.ones(n)
    with mpmath.workdps(60):
        exact = mpmath.matrix(_dense(hi).tolist()) + mpmath.matrix(_dense(lo).tolist())
        s = 1e-12
        T = exact * exact.T + s * mpmath.eye(n)
        truth = mpmath.fsum((T**-1)[i, i] for i in range(n))
        both, _ = banded.trace_double_double(hi, lo, v, s)
        leading, _ = banded.trace_double_double(hi, np.zeros_like(lo), v, s)
        assert abs(both / truth - 1) <= EPS
        assert abs(leading / truth - 1) > 20 * EPS


@pytest.mark.parametrize("w", [1, 2, 3])
def test_long_horizons_keep_their_digits(w):
    """n = 300 against a float64 dense inverse of a well-conditioned T: no error builds up along the sweeps."""
    hi, _ = _random_bands(w, w, 300)
    v = np.random.default_rng(0).uniform(0.5, 2, 300)
    transition, band = np.empty((w, 300)), np.empty((w, 300))
    banded.selected_inverse(hi, v, 3.0, transition, band)
    L = _dense(hi)
    truth = np.linalg.inv(L @ L.T + 3 * np.diag(v))
    np.testing.assert_allclose(band[0], np.diag(truth), rtol=1e-12)
    out, q = np.zeros(300), np.random.default_rng(1).normal(size=300)
    banded.squared_inverse_product(transition, band, q, 1.0, out)
    np.testing.assert_allclose(out, truth**2 @ q, rtol=1e-10, atol=1e-12)
    X = np.zeros((300, 300))
    banded.add_inverse(transition, band, 1.0, 0, 300, X)
    np.testing.assert_allclose(X, np.triu(truth), atol=1e-13)
