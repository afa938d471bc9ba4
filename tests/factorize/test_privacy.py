"""Noise multiplier, epsilon and delta of one Gaussian release, against mpmath and Google's accountant."""

import math

import dp_accounting
import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import PrivacyError
from mmfact.factorize.privacy import gaussian_delta, gaussian_epsilon, gaussian_noise_multiplier

SIGMAS = [0.05, 0.341, 0.682, 1.0, 1.08, 2.33, 10.0, 100.0]


def _delta(sigma, epsilon):
    """Balle and Wang, Theorem 8, at 60 digits."""
    with mpmath.workdps(60):
        mu, epsilon = 1 / mpmath.mpf(sigma), mpmath.mpf(epsilon)
        return mpmath.ncdf(mu / 2 - epsilon / mu) - mpmath.exp(epsilon) * mpmath.ncdf(-mu / 2 - epsilon / mu)


def test_golden_epsilons(goldens):
    """The exact values of the design at delta 1e-6, good to one unit of their last digit (17.6476 is cut to 17.647)."""
    values = goldens["gaussian_privacy"]
    for sigma, row in values["noise_multiplier"].items():
        found = gaussian_epsilon(float(sigma), values["delta"])
        assert found == pytest.approx(row["exact"], abs=1e-3)


def test_golden_noise_multipliers(goldens):
    """And back, again to one unit (.323074 is raised to .32308, the safe way to round a sigma)."""
    values = goldens["gaussian_privacy"]
    for epsilon, sigma in values["inverse exact"].items():
        assert gaussian_noise_multiplier(float(epsilon), values["delta"]) == pytest.approx(sigma, abs=1e-5)


def test_exact_is_below_the_looser_accountants(goldens):
    """RDP and zCDP are upper bounds of the same release: printing one under the other's name would show here."""
    row = goldens["gaussian_privacy"]["noise_multiplier"]["0.341"]
    exact = gaussian_epsilon(0.341, 1e-6)
    assert exact < min(value for name, value in row.items() if name != "exact")
    rho = 0.5 / 0.341**2
    assert row["zcdp rho+2sqrt(rho ln 1/delta)"] == pytest.approx(
        rho + 2 * math.sqrt(rho * math.log(1e6)), abs=1e-3
    )  # the golden is about the same mu = 1 / sigma


@pytest.mark.parametrize("sigma", SIGMAS)
@pytest.mark.parametrize("epsilon", [0.0, 1e-3, 0.1, 1.0, 5.0, 18.9])
def test_delta(sigma, epsilon):
    """The analytic formula where e^epsilon Phi(..) is a product of something huge and something tiny."""
    truth = float(_delta(sigma, epsilon))
    assert gaussian_delta(sigma, epsilon) == pytest.approx(truth, rel=1e-9, abs=1e-300)


def test_delta_at_epsilon_zero_is_the_total_variation():
    """Closed form: 2 Phi(mu / 2) - 1 = erf(mu / (2 sqrt 2))."""
    for sigma in SIGMAS:
        assert gaussian_delta(sigma, 0.0) == pytest.approx(math.erf(1 / (2 * math.sqrt(2) * sigma)), rel=1e-13)


@pytest.mark.parametrize("sigma", [0.05, 0.341, 1.0, 2.33, 30.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-3, 0.1])
def test_epsilon(sigma, delta):
    """The true delta at the epsilon found is delta; where epsilon is 0, delta at 0 is already small enough."""
    epsilon = gaussian_epsilon(sigma, delta)
    if epsilon == 0:
        assert float(_delta(sigma, 0)) <= delta
    else:
        assert float(_delta(sigma, epsilon)) / delta == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 1.0, 2.0, 8.0, 18.9, 100.0])
@pytest.mark.parametrize("delta", [1e-15, 1e-9, 1e-6, 1e-5, 1e-2])
def test_noise_multiplier_is_safe_and_smallest(epsilon, delta):
    """Never less noise than (epsilon, delta) needs, at 60 digits; and not 1e-8 more."""
    sigma = gaussian_noise_multiplier(epsilon, delta)
    assert _delta(sigma, epsilon) <= delta
    assert _delta(sigma * (1 - 1e-8), epsilon) > delta


@given(sigma=st.floats(0.03, 300), exponent=st.floats(-14, -1))
@settings(deadline=None, max_examples=80)
def test_round_trip(sigma, exponent):
    """sigma -> epsilon -> sigma."""
    delta = 10**exponent
    epsilon = gaussian_epsilon(sigma, delta)
    if epsilon > 1e-4:
        assert gaussian_noise_multiplier(epsilon, delta) == pytest.approx(sigma, rel=1e-7)


@given(sigma=st.floats(0.05, 100), factor=st.floats(1.01, 3), epsilon=st.floats(0, 30))
@settings(deadline=None, max_examples=80)
def test_more_noise_is_more_private(sigma, factor, epsilon):
    """delta falls in sigma and in epsilon, and is a probability."""
    here = gaussian_delta(sigma, epsilon)
    assert 0 <= here <= 1
    assert gaussian_delta(sigma * factor, epsilon) <= here * (1 + 1e-9) + 1e-300
    assert gaussian_delta(sigma, epsilon * factor) <= here * (1 + 1e-9) + 1e-300


@pytest.mark.parametrize("sigma", [0.341, 0.682, 1.0, 2.33, 10.0])
def test_google_agrees_on_epsilon(sigma):
    """dp-accounting's exact Gaussian."""
    for delta in (1e-9, 1e-6, 1e-3):
        assert gaussian_epsilon(sigma, delta) == pytest.approx(
            dp_accounting.get_epsilon_gaussian(sigma, delta), rel=1e-6, abs=1e-9
        )


@pytest.mark.parametrize("epsilon", [0.1, 1.0, 2.0, 18.9])
def test_google_agrees_on_sigma(epsilon):
    """And its inverse."""
    for delta in (1e-9, 1e-6, 1e-3):
        assert gaussian_noise_multiplier(epsilon, delta) == pytest.approx(
            dp_accounting.get_sigma_gaussian(epsilon, delta), rel=1e-6
        )


BAD_POSITIVE = [0.0, -1.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", BAD_POSITIVE)
def test_bad_noise_multipliers(bad):
    """No noise, negative noise, NaN."""
    with pytest.raises(PrivacyError, match="noise multiplier"):
        gaussian_delta(bad, 1.0)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        gaussian_epsilon(bad, 1e-6)


@pytest.mark.parametrize("bad", BAD_POSITIVE)
def test_bad_epsilons(bad):
    """epsilon 0 is fine for delta, not for calibration."""
    with pytest.raises(PrivacyError, match="epsilon"):
        gaussian_noise_multiplier(bad, 1e-6)
    if bad != 0:
        with pytest.raises(PrivacyError, match="epsilon"):
            gaussian_delta(1.0, bad)


@pytest.mark.parametrize("bad", [0.0, 1.0, -1e-6, 2.0, math.nan, math.inf])
def test_bad_deltas(bad):
    """A probability strictly between 0 and 1."""
    with pytest.raises(PrivacyError, match="delta"):
        gaussian_epsilon(1.0, bad)
    with pytest.raises(PrivacyError, match="delta"):
        gaussian_noise_multiplier(1.0, bad)
