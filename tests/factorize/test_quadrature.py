"""x^(-1/2) as a sum of poles: the claimed error is a claim about every x of the interval, and the certificate's."""

import math

import mpmath
import numpy as np
import pytest

from mmfact.factorize.errors import SolverError
from mmfact.factorize.quadrature import inverse_square_root

CONDITIONS = [1.0, 4.0, 1e3, 1e8, 1e16, 1e24]


def _true_error(poles, points):
    """max |sqrt(x) sum_j w_j / (x + s_j) - 1| over `points` at 40 digits, for the stored float64 values."""
    with mpmath.workdps(40):
        weights, shifts = [list(map(mpmath.mpf, part.tolist())) for part in (poles.weights, poles.shifts)]
        worst = mpmath.mpf(0)
        for x in map(mpmath.mpf, points):
            total = mpmath.fsum(w / (x + s) for w, s in zip(weights, shifts, strict=True))
            worst = max(worst, abs(mpmath.sqrt(x) * total - 1))
        return float(worst)


def _points(lower, upper, count):
    """Both ends, a fine logarithmic grid that shares no point with the checker's, and random ones."""
    rng = np.random.default_rng(0)
    grid = np.geomspace(lower, upper, count)
    inside = np.exp(rng.uniform(math.log(lower), math.log(upper), count)) if upper > lower else grid
    return np.clip(np.concatenate([[lower, upper], grid, inside]), lower, upper).tolist()


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("lower", [1.0, 3.7e-13, 8.1e20])
def test_error_is_as_claimed(condition, lower):
    """If the true error exceeded the claim, a lower bound could sit above the optimum."""
    poles = inverse_square_root(lower, lower * condition)
    assert poles.error <= 1e-13
    assert _true_error(poles, _points(lower, lower * condition, 150)) <= poles.error


@pytest.mark.parametrize("condition", CONDITIONS)
@pytest.mark.parametrize("accuracy", [1e-3, 1e-6, 1e-10])
def test_coarser_rules(condition, accuracy):
    """The claim holds where the approximation error, not rounding, dominates; and it is not grossly too large."""
    poles = inverse_square_root(2.0, 2.0 * condition, accuracy)
    assert poles.error <= accuracy
    true = _true_error(poles, _points(poles.lower, poles.upper, 150))
    assert true <= poles.error
    assert poles.error <= 1.5 * true + 1e-14


@pytest.mark.parametrize("condition", CONDITIONS)
def test_interval_is_covered(condition):
    """Widening is allowed, shrinking is not."""
    poles = inverse_square_root(0.3, 0.3 * condition)
    assert poles.lower <= 0.3
    assert poles.upper >= 0.3 * condition


@pytest.mark.parametrize("condition", CONDITIONS)
def test_weights_and_shifts_are_positive(condition):
    """Each term is then the inverse of a positive definite matrix."""
    poles = inverse_square_root(0.3, 0.3 * condition)
    for part in (poles.weights, poles.shifts):
        assert np.isfinite(part).all()
        assert (part > 0).all()
    assert len(poles.weights) == len(poles.shifts)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_few_poles_do(condition):
    """Hale, Higham and Trefethen: e^(-2 pi^2 N / (log kappa + 6)); three times the poles is three times the time."""
    for accuracy in (1e-6, 1e-13):
        poles = inverse_square_root(1.0, condition, accuracy)
        kappa = max(condition, 4.0)
        needed = (math.log(kappa) + 6) * math.log(4 / accuracy) / (2 * math.pi**2)
        assert len(poles.weights) <= 1.2 * needed + 2


def test_error_equioscillates():
    """Zolotarev's rule reaches its largest error some 2N + 1 times with alternating sign: no better rule of N poles."""
    poles = inverse_square_root(1.0, 1e6, 1e-6)
    x = np.geomspace(1, 1e6, 20_001)
    error = np.sqrt(x) * (poles.weights / (x[:, None] + poles.shifts)).sum(axis=1) - 1
    signs = np.sign(error[np.abs(error) > 0.9 * np.abs(error).max()])
    assert 1 + np.count_nonzero(np.diff(signs)) >= 2 * len(poles.weights)


def test_scale_invariance():
    """Multiplying the interval by 2^k scales shifts by 2^k and weights by 2^(k/2), nothing else."""
    one, other = inverse_square_root(1.0, 1e5), inverse_square_root(2.0**40, 1e5 * 2.0**40)
    np.testing.assert_allclose(other.shifts, one.shifts * 2.0**40, rtol=1e-13)
    np.testing.assert_allclose(other.weights, one.weights * 2.0**20, rtol=1e-13)


@pytest.mark.parametrize(
    ("lower", "upper"),
    [
        (0.0, 1.0),
        (-1.0, 1.0),
        (2.0, 1.0),
        (1.0, math.inf),
        (math.inf, math.inf),
        (math.nan, 1.0),
        (1.0, math.nan),
        (-2.0, -1.0),
    ],
)
def test_bad_intervals(lower, upper):
    """Empty, negative, not finite."""
    with pytest.raises(SolverError, match="interval"):
        inverse_square_root(lower, upper)


def test_an_accuracy_beyond_double_precision_is_refused():
    """No number of poles reaches 1e-17; the message offers the dense method, and no silent approximation comes back."""
    with pytest.raises(SolverError, match="dense"):
        inverse_square_root(1.0, 1e6, 1e-17)
