"""Noise multiplier, epsilon and delta of one Gaussian release, against mpmath and Google's accountant; RDP and zCDP."""

import math

import dp_accounting
import mpmath
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import PrivacyError
from mmfact.factorize.privacy import (
    FINE_ORDERS,
    INTEGER_ORDERS,
    gaussian_delta,
    gaussian_epsilon,
    gaussian_noise_multiplier,
    gaussian_rdp_epsilon,
    gaussian_zcdp_epsilon,
    rdp_epsilon,
)

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


def test_golden_looser_accountants(goldens):
    """Each value of the design under its own accountant's name, to one unit of its last digit."""
    ours = {
        "rdp fine orders, CKS conversion": lambda sigma: gaussian_rdp_epsilon(sigma, 1e-6),
        "rdp integer orders, CKS conversion": lambda sigma: gaussian_rdp_epsilon(sigma, 1e-6, INTEGER_ORDERS),
        "zcdp rho+2sqrt(rho ln 1/delta)": lambda sigma: gaussian_zcdp_epsilon(sigma, 1e-6),
        "zcdp": lambda sigma: gaussian_zcdp_epsilon(sigma, 1e-6),
    }
    compared = 0
    for sigma, row in goldens["gaussian_privacy"]["noise_multiplier"].items():
        for name, value in row.items():
            if name != "exact":
                digits = 2 if value == 18.85 else 3
                assert ours[name](float(sigma)) == pytest.approx(value, abs=10**-digits if digits == 3 else 5e-3), name
                compared += 1
    assert compared == 5


@given(sigma=st.floats(0.01, 300), exponent=st.floats(-14, -1))
@settings(deadline=None, max_examples=60)
def test_exact_is_below_the_looser_accountants(sigma, exponent):
    """RDP and zCDP are upper bounds of the same release: printing one under the other's name would show here."""
    delta = 10**exponent
    fine = gaussian_rdp_epsilon(sigma, delta)
    assert gaussian_epsilon(sigma, delta) <= fine + 1e-9
    assert fine <= gaussian_rdp_epsilon(sigma, delta, INTEGER_ORDERS) * (1 + 1e-5) + 1e-9
    assert fine <= gaussian_zcdp_epsilon(sigma, delta) * (1 + 1e-5)


@pytest.mark.parametrize("sigma", [0.05, 0.341, 2.33, 30.0, 1000.0])
@pytest.mark.parametrize("delta", [1e-12, 1e-6, 1e-2])
def test_fine_orders_are_fine_enough(sigma, delta):
    """mpmath's minimum over all real orders: 1e-5 relative, and never below it."""
    with mpmath.workdps(30):

        def bound(log_excess):  # of the order a over 1
            a = 1 + mpmath.exp(log_excess)
            return a / (2 * mpmath.mpf(sigma) ** 2) + mpmath.log(1 - 1 / a) - mpmath.log(delta * a) / (a - 1)

        grid = [mpmath.mpf(k) / 4 for k in range(-36, 64)]
        best = min(grid, key=bound)
        low, high = best - mpmath.mpf(1) / 4, best + mpmath.mpf(1) / 4
        for _ in range(90):  # ternary search
            third = (high - low) / 3
            low, high = (low + third, high) if bound(low + third) > bound(high - third) else (low, high - third)
        truth = max(bound(low), 0)
    found = gaussian_rdp_epsilon(sigma, delta)
    assert truth <= found
    assert found <= truth * (1 + mpmath.mpf("1e-5")) + 1e-9


def test_fine_orders_agree_with_google():
    """dp-accounting's own CKS conversion at the same orders."""
    from dp_accounting.rdp import compute_epsilon

    for sigma in (0.341, 1.0, 5.0):
        theirs, _ = compute_epsilon(FINE_ORDERS, FINE_ORDERS / (2 * sigma**2), 1e-6)
        assert gaussian_rdp_epsilon(sigma, 1e-6) == pytest.approx(theirs, rel=1e-8)
        assert gaussian_rdp_epsilon(sigma, 1e-6) >= theirs


def test_zcdp_from_its_definition():
    """rho = mu^2 / 2 of the same mu = 1 / sigma."""
    rho = 0.5 / 0.341**2
    assert gaussian_zcdp_epsilon(0.341, 1e-6) == pytest.approx(rho + 2 * math.sqrt(rho * math.log(1e6)), rel=1e-8)
    assert gaussian_zcdp_epsilon(0.341, 1e-6) >= rho + 2 * math.sqrt(rho * math.log(1e6))


def test_no_divergence_proves_an_epsilon_below_zero():
    """At a large delta the conversion of a tiny divergence is negative: it means 0."""
    assert 0 <= rdp_epsilon(INTEGER_ORDERS, INTEGER_ORDERS * 1e-9, 0.5) <= 1e-11


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


@pytest.mark.parametrize("sigma", [0.001, 0.05, 0.341, 1.0, 2.33, 30.0, 1e4, 1e6])
@pytest.mark.parametrize("delta", [1e-30, 1e-12, 1e-6, 1e-3, 0.1])
def test_epsilon_is_safe_and_smallest(sigma, delta):
    """At 60 digits the true delta at the epsilon found is at most delta, and 1e-8 and 1e-11 lower it is not."""
    epsilon = gaussian_epsilon(sigma, delta)
    if epsilon == 0:
        assert _delta(sigma, 0) <= delta
    else:
        assert _delta(sigma, epsilon) <= delta
        assert _delta(sigma, epsilon * (1 - 1e-8) - 1e-11) > delta


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


@pytest.mark.parametrize("epsilon", [1e-6, 1e-4, 1e5])
@pytest.mark.parametrize("delta", [1e-12, 1e-6])
def test_noise_multiplier_at_the_ends(epsilon, delta):
    """Safe where epsilon is all cancellation, and where it is huge; the margin there is 2e-6 at most."""
    sigma = gaussian_noise_multiplier(epsilon, delta)
    assert _delta(sigma, epsilon) <= delta
    assert _delta(sigma * (1 - 3e-6), epsilon) > delta


BAD_POSITIVE = [0.0, -1.0, math.nan, math.inf, -math.inf]


@pytest.mark.parametrize("bad", [*BAD_POSITIVE, 9e-4, 1e-12, 1e-160, 5e-324])
def test_bad_noise_multipliers(bad):
    """No noise, negative noise, NaN; so little that the figures would overflow."""
    with pytest.raises(PrivacyError, match="noise multiplier"):
        gaussian_delta(bad, 1.0)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        gaussian_epsilon(bad, 1e-6)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        gaussian_rdp_epsilon(bad, 1e-6)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        gaussian_zcdp_epsilon(bad, 1e-6)


@pytest.mark.parametrize("bad", BAD_POSITIVE)
def test_bad_epsilons(bad):
    """epsilon 0 is fine for delta, not for calibration."""
    with pytest.raises(PrivacyError, match="epsilon"):
        gaussian_noise_multiplier(bad, 1e-6)
    for beyond in (1e-7, 1.1e5):
        with pytest.raises(PrivacyError, match="epsilon"):
            gaussian_noise_multiplier(beyond, 1e-6)
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
    with pytest.raises(PrivacyError, match="delta"):
        gaussian_rdp_epsilon(1.0, bad)
    with pytest.raises(PrivacyError, match="delta"):
        gaussian_zcdp_epsilon(1.0, bad)
