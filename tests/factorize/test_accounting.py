"""Privacy statements and subsampled DP-SGD: goldens, integrals on a grid, dense sensitivities, a library's trap."""

import math
import re
import subprocess
import sys

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from mmfact.factorize.accounting import (
    EXACT,
    PLD,
    RDP,
    RDP_CLASSIC,
    RDP_FINE,
    ZCDP,
    poisson_dpsgd_epsilon,
    poisson_dpsgd_noise_multiplier,
    privacy_statement,
)
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import PrivacyError
from mmfact.factorize.privacy import gaussian_delta, gaussian_epsilon, gaussian_noise_multiplier
from mmfact.factorize.workload import momentum, prefix_sum


@pytest.fixture(scope="module")
def compiled():
    """(workload, strategy, certificate, participation) of a small momentum artifact and of 240 prefix sums."""

    def parts(workload, **options):
        made = compile(workload, Options(**options))
        return made.workload, made.strategy, made.certificate, made.participation

    return {"momentum": parts(momentum(30), strategy="dense"), "prefix": parts(prefix_sum(240))}


# --- subsampled DP-SGD ---------------------------------------------------------------------------------------------


# Zhou, Wu, Banerjee: q = .025 for 1,200 steps, delta 1e-5; their table, recomputed (goldens of the design)
PDP_SGD = {2: 2.4106, 4: 1.0981, 6: 0.716, 8: 0.5319, 10: 0.4232, 14: 0.3006, 18: 0.2331}


@pytest.mark.parametrize(("sigma", "golden"), PDP_SGD.items())
def test_golden_pdp_sgd(sigma, golden):
    """Classic RDP to a unit of the golden's last digit; then the CKS conversion, then PLD, each lower than the last."""
    classic, rdp, pld = (
        poisson_dpsgd_epsilon(sigma, 0.025, 1200, 1e-5, accountant=name) for name in (RDP_CLASSIC, RDP, PLD)
    )
    assert classic == pytest.approx(golden, abs=1e-4)
    assert 0 < pld < rdp < classic


def test_design_numbers_of_the_amplified_rival():
    """One pass of 240 steps at delta 1e-6: 1.06, .81, .50 are RDP's at integer orders; PLD needs less."""
    pairs = {}
    for epsilon in (1, 2, 8):
        pairs[epsilon] = [
            poisson_dpsgd_noise_multiplier(epsilon, 1e-6, 1 / 240, 240, accountant=name) for name in (RDP, PLD)
        ]
    assert [round(rdp, 2) for rdp, pld in pairs.values()] == [1.06, 0.81, 0.50]
    assert all(pld < rdp for rdp, pld in pairs.values())
    assert [round(gaussian_noise_multiplier(e, 1e-6), 2) for e in (1, 2, 8)] == [4.22, 2.23, 0.65]


def _mixture(sigma, q):
    """Cells of N(0, s^2) on a fine grid, and the density ratio of (1 - q) N(0, s^2) + q N(1, s^2) to it."""
    x = np.linspace(-9 * sigma, 1 + 9 * sigma, 2001)
    return norm.pdf(x, 0, sigma) * (x[1] - x[0]), 1 - q + q * np.exp((2 * x - 1) / (2 * sigma**2))


def _divergence(cells, ratio, epsilon):
    """The larger of both hockey-stick divergences at e^epsilon."""
    grow = math.exp(epsilon)
    return max((cells * np.maximum(ratio - grow, 0)).sum(), (cells * np.maximum(1 - grow * ratio, 0)).sum())


@pytest.mark.parametrize(("sigma", "q"), [(0.6, 0.01), (1.0, 0.2), (2.0, 0.5)])
def test_one_step_by_a_grid(sigma, q):
    """PLD: never below the truth, and 5 % above at most; RDP above it."""
    truth = brentq(lambda e: _divergence(*_mixture(sigma, q), e) - 1e-4, 1e-3, 20)
    assert truth - 1e-3 <= poisson_dpsgd_epsilon(sigma, q, 1, 1e-4) <= 1.05 * truth + 1e-3
    assert poisson_dpsgd_epsilon(sigma, q, 1, 1e-4, accountant=RDP) >= truth - 1e-3


def test_two_steps_by_a_grid():
    """Both participations of one example: a two-dimensional mixture."""
    cells, ratio = _mixture(0.8, 0.1)
    cells, ratio = np.outer(cells, cells), np.outer(ratio, ratio)
    truth = brentq(lambda e: _divergence(cells, ratio, e) - 1e-3, 1e-3, 20, xtol=1e-4)
    assert truth - 1e-3 <= poisson_dpsgd_epsilon(0.8, 0.1, 2, 1e-3) <= 1.05 * truth


def test_sampling_everything_is_the_gaussian():
    """q = 1 over T steps is one Gaussian release with sigma / sqrt(T)."""
    for steps in (1, 9):
        exact = gaussian_epsilon(3.0 / math.sqrt(steps), 1e-6)
        assert exact - 1e-4 <= poisson_dpsgd_epsilon(3.0, 1.0, steps, 1e-6) <= 1.03 * exact


@pytest.mark.parametrize("accountant", [PLD, RDP])
@pytest.mark.parametrize(
    ("epsilon", "delta", "epochs", "n"),
    [(1.0, 1e-6, 1, 240), (0.05, 1e-5, 1, 2048), (8.0, 1e-9, 3, 2048), (300.0, 1e-6, 1, 100), (0.5, 1e-6, 20, 5000)],
)
def test_back_and_forth(accountant, epsilon, delta, epochs, n):
    """The noise multiplier found keeps epsilon by dp-accounting on a finer grid; 3 % less noise does not."""
    found = poisson_dpsgd_noise_multiplier(epsilon, delta, epochs / n, n, accountant=accountant)

    def google(sigma):
        orders = range(2, 256)
        fresh = (
            PLDAccountant(value_discretization_interval=5e-4 * epsilon) if accountant == PLD else RdpAccountant(orders)
        )
        event = dp_accounting.PoissonSampledDpEvent(epochs / n, dp_accounting.GaussianDpEvent(sigma))
        return fresh.compose(dp_accounting.SelfComposedDpEvent(event, n)).get_epsilon(delta)

    assert google(found) <= epsilon
    assert google(found * 0.97) > epsilon


def test_epsilon_zero_by_rounding_is_not_believed():
    """Where a divergence comes out negative, dp-accounting 0.6.0 says epsilon 0. Here it is false.

    All steps together are nearly a Gaussian release with mu = sqrt(n) q / sigma, and delta at epsilon 0 is .4 mu.
    """
    n, sigma, delta = 131072, 10**4.75, 1e-9
    event = dp_accounting.PoissonSampledDpEvent(1 / n, dp_accounting.GaussianDpEvent(sigma))
    google = RdpAccountant(range(2, 256)).compose(dp_accounting.SelfComposedDpEvent(event, n))
    assert google.get_epsilon(delta) == 0, "the trap is gone: drop the guard"
    assert gaussian_delta(sigma * math.sqrt(n), 0.0) > 10 * delta
    assert poisson_dpsgd_epsilon(sigma, 1 / n, n, delta, accountant=RDP) > 0.01


def test_rdp_cannot_show_a_tiny_epsilon():
    """Its orders end at 255: no noise gets below ln(1/delta) / 254 or so."""
    assert poisson_dpsgd_noise_multiplier(0.05, 1e-9, 1 / 100, 100, accountant=RDP) is None
    assert poisson_dpsgd_noise_multiplier(0.05, 1e-9, 1 / 100, 100, accountant=PLD) > 1


BAD_RUNS = [
    ({"noise_multiplier": 0.0}, "noise multiplier"),
    ({"noise_multiplier": math.nan}, "noise multiplier"),
    ({"noise_multiplier": 0.005}, "noise multiplier"),
    ({"sampling_probability": 0.0}, "sampling probability"),
    ({"sampling_probability": 1.1}, "sampling probability"),
    ({"sampling_probability": math.nan}, "sampling probability"),
    ({"steps": 0}, "steps"),
    ({"steps": 2.5}, "steps"),
    ({"delta": 1e-15}, "delta"),
    ({"delta": 1e-10}, "delta"),
    ({"delta": math.nan}, "delta"),
    ({"accountant": "prv"}, "accountant"),
]


@pytest.mark.parametrize(("bad", "match"), BAD_RUNS)
def test_bad_runs(bad, match):
    run = {"noise_multiplier": 1.0, "sampling_probability": 0.1, "steps": 10, "delta": 1e-6, **bad}
    with pytest.raises(PrivacyError, match=match):
        poisson_dpsgd_epsilon(**run)
    if "noise_multiplier" not in bad:
        run["epsilon"] = run.pop("noise_multiplier")
        with pytest.raises(PrivacyError, match=match):
            poisson_dpsgd_noise_multiplier(**run)


@pytest.mark.parametrize("epsilon", [0.0, 0.009, 1001.0, -1.0, math.nan, math.inf])
def test_epsilons_that_cannot_be_searched_for(epsilon):
    with pytest.raises(PrivacyError, match="epsilon"):
        poisson_dpsgd_noise_multiplier(epsilon, 1e-6, 0.1, 10)


# --- the exact Gaussian against PLD ---------------------------------------------------------------------------------


@given(sigma=st.floats(0.05, 50), exponent=st.floats(-12, -1))
@settings(max_examples=60)
def test_pld_of_the_gaussian_is_within_its_grid(sigma, exponent):
    """PLD is an upper bound: never below the exact epsilon (to both margins), and above by one grid step at most."""
    delta = 10**exponent
    exact = gaussian_epsilon(sigma, delta)
    grid = 1e-4 * max(1.0, exact)
    pld = PLDAccountant(value_discretization_interval=grid)
    found = pld.compose(dp_accounting.GaussianDpEvent(sigma)).get_epsilon(delta)
    assert exact * (1 - 2e-9) - 2e-12 <= found <= exact + grid


# --- statements ----------------------------------------------------------------------------------------------------


def test_golden_statement(goldens, compiled):
    """The design's table, each value under its accountant's name, to a unit of the last digit quoted."""
    row = goldens["gaussian_privacy"]["noise_multiplier"]["0.341"]
    made = privacy_statement(*compiled["momentum"], delta=1e-6, noise_multiplier=0.341)
    assert list(made.epsilons) == [EXACT, PLD, RDP_FINE, RDP, ZCDP]
    assert made.epsilons[EXACT] == pytest.approx(row["exact"], abs=1e-3) == made.epsilon
    assert made.epsilons[PLD] == pytest.approx(row["exact"], abs=2e-3)
    assert made.epsilons[RDP_FINE] == pytest.approx(row["rdp fine orders, CKS conversion"], abs=1e-3)
    assert made.epsilons[RDP] == pytest.approx(row["rdp integer orders, CKS conversion"], abs=5e-3)
    assert made.epsilons[ZCDP] == pytest.approx(row["zcdp rho+2sqrt(rho ln 1/delta)"], abs=1e-3)
    assert made.mu >= 1 / 0.341 == pytest.approx(made.mu, rel=1e-15)
    assert made.rho == pytest.approx(0.5 / 0.341**2, rel=1e-14)


@pytest.mark.parametrize("epsilon", [0.05, 1.0, 18.9])
def test_from_epsilon(compiled, epsilon):
    """The noise multiplier is the exact one, the other accountants claim no less, and the event is that release."""
    made = privacy_statement(*compiled["momentum"], delta=1e-6, epsilon=epsilon)
    assert made.epsilon == epsilon
    assert made.noise_multiplier == gaussian_noise_multiplier(epsilon, 1e-6)
    assert all(value >= epsilon * (1 - 1e-8) for value in made.epsilons.values())
    event = eval(made.event, {"GaussianDpEvent": dp_accounting.GaussianDpEvent})
    assert event == dp_accounting.GaussianDpEvent(made.noise_multiplier)


@pytest.mark.parametrize("kind", ["dense", "buffered", "banded-low-rank"])
@pytest.mark.parametrize("epochs", [2, 5])
def test_several_epochs_from_the_dense_matrix(kind, epochs):
    """mu, epsilon and sigma from |X| of the shipped C, summed over every pattern by hand."""
    options = {"bandwidth": 8, "rank": 6} if kind == "banded-low-rank" else {}
    made = compile(momentum(30), Options(strategy=kind, **options))
    parts = made.workload, made.strategy, made.certificate, made.participation
    C = made.strategy.to_dense()
    X, b = np.abs(C.T @ C), -(-30 // epochs)
    ratio = math.sqrt(max(X[s::b, s::b].sum() for s in range(b)) / X.diagonal().max())
    found = privacy_statement(*parts, delta=1e-6, noise_multiplier=2.0, epochs=epochs)
    assert found.mu == pytest.approx(ratio / 2, rel=1e-5 if kind == "banded-low-rank" else 1e-9)
    assert found.mu >= ratio / 2 * (1 - 1e-12)
    assert gaussian_delta(1 / found.mu, found.epsilon) <= 1e-6
    assert found.separation == b
    assert f"at most {epochs} steps" in found.participation
    assert found.label == f"{epochs} steps an example, {b} apart"
    back = privacy_statement(*parts, delta=1e-6, epsilon=1.5, epochs=epochs)
    assert back.noise_multiplier == pytest.approx(ratio * gaussian_noise_multiplier(1.5, 1e-6), rel=1e-5)
    assert gaussian_delta(back.noise_multiplier / back.sensitivity_ratio, 1.5) <= 1e-6
    assert back.rmse == back.noise_multiplier * made.certificate.rmse


def test_one_epoch_is_single_participation(compiled):
    made = privacy_statement(*compiled["prefix"], delta=1e-6, noise_multiplier=1.0, epochs=1)
    assert (made.epochs, made.separation, made.sensitivity_ratio) == (1, 240, 1.0)
    assert "at most one step" in made.participation
    assert any("Poisson" not in a and "in at most one step" in a for a in made.assumptions)


@pytest.mark.parametrize("name", ["momentum", "prefix"])
@pytest.mark.parametrize("epochs", [1, 3])
def test_the_rival(compiled, name, epochs):
    """q = epochs / n, the smaller of its noise multipliers times normF(A) / sqrt(n) from the dense matrix."""
    workload = compiled[name][0]
    made = privacy_statement(*compiled[name], delta=1e-6, epsilon=2.0, epochs=epochs)
    rival = made.rival
    assert rival.sampling_probability == epochs / workload.n
    assert list(rival.noise_multipliers) == [PLD, RDP]
    assert rival.noise_multipliers[PLD] == poisson_dpsgd_noise_multiplier(
        2.0, 1e-6, epochs / workload.n, workload.n, accountant=PLD
    )
    independent = np.linalg.norm(workload.dense()) / math.sqrt(workload.n)
    assert rival.rmse == pytest.approx(min(rival.noise_multipliers.values()) * independent, rel=1e-12)


def test_the_verdict_follows_the_error(compiled):
    """Prefix sums over 240 steps: amplification wins at epsilon 1 (by PLD), correlated noise at 8."""
    low, high = (privacy_statement(*compiled["prefix"], delta=1e-6, epsilon=e) for e in (1.0, 8.0))
    assert low.rmse > low.rival.rmse
    assert "DP-SGD amplified by Poisson sampling wins" in low.verdict
    assert f"{low.rmse / low.rival.rmse:.3g} times" in low.verdict
    assert high.rmse < high.rival.rmse
    assert "this artifact wins" in high.verdict
    assert f"{high.rival.rmse / high.rmse:.3g} times" in high.verdict


def test_of_several_epochs_no_artifact_wins(compiled):
    """The runtime refuses such a run: the verdict is what would be."""
    made = privacy_statement(*compiled["prefix"], delta=1e-6, epsilon=8.0, epochs=3)
    assert made.rmse < made.rival.rmse
    assert "would win, if the runtime supported 3 passes" in made.verdict
    assert "wins" not in made.verdict


def test_no_rival_where_none_can_be_accounted_for(compiled):
    """Epsilon 0 (this delta alone allows the noise), epsilons without end, and tiny ones at a tiny delta."""
    for options, why in (
        ({"noise_multiplier": 100.0, "delta": 0.1}, "only for epsilon 0.01 to 1000, and this is 0"),
        ({"epsilon": 0.001, "delta": 1e-6}, "only for epsilon 0.01 to 1000, and this is 0.001"),
        ({"noise_multiplier": 0.002, "delta": 1e-6}, "only for epsilon 0.01 to 1000, and this is 12"),
        ({"epsilon": 0.02, "delta": 1e-12}, "epsilon 0.02 at delta 1e-12"),
    ):
        made = privacy_statement(*compiled["momentum"], **options)
        assert made.rival is None
        assert made.verdict.startswith("none; ")
        assert why in made.verdict
    by_rdp = privacy_statement(*compiled["momentum"], epsilon=1.0, delta=1e-12).rival
    assert list(by_rdp.noise_multipliers) == [RDP]


def test_assumptions_are_all_there(compiled):
    said = " ".join(privacy_statement(*compiled["momentum"], delta=1e-6, epsilon=1.0).assumptions)
    for what in ("at most one step", "replaced by zero", "clip norm", "Theorem 2.1", "Gaussian", "floating point"):
        assert what in said


BAD_STATEMENTS = [
    ({}, "either"),
    ({"noise_multiplier": 1.0, "epsilon": 1.0}, "either"),
    ({"epsilon": 0.0}, "epsilon"),
    ({"epsilon": -1.0}, "epsilon"),
    ({"epsilon": math.nan}, "epsilon"),
    ({"epsilon": math.inf}, "epsilon"),
    ({"noise_multiplier": 0.0}, "noise multiplier"),
    ({"noise_multiplier": 1e-9}, "noise multiplier"),
    ({"noise_multiplier": math.inf}, "noise multiplier"),
    ({"epsilon": 1.0, "delta": 0.0}, "delta"),
    ({"epsilon": 1.0, "delta": 1.0}, "delta"),
    ({"epsilon": 1.0, "delta": math.nan}, "delta"),
    ({"epsilon": 1.0, "delta": 1e-15}, "delta"),
    ({"epsilon": 1.0, "epochs": 0}, "epochs"),
    ({"epsilon": 1.0, "epochs": 31}, "epochs"),
    ({"epsilon": 1.0, "epochs": 1.5}, "epochs"),
    ({"epsilon": 1.0, "epochs": math.nan}, "epochs"),
]


def test_a_noise_multiplier_that_counts_for_too_little_is_refused_as_it_was_given(compiled):
    """Its message has the figure that was asked about, what it counts as, and figures that are large enough."""
    with pytest.raises(PrivacyError, match=r"noise multiplier 0\.0015 over 30 passes counts as") as caught:
        privacy_statement(*compiled["momentum"], delta=1e-6, noise_multiplier=0.0015, epochs=30)
    enough = float(re.search(r"give about (\S+) to", str(caught.value))[1])
    privacy_statement(*compiled["momentum"], delta=1e-6, noise_multiplier=enough, epochs=30)


@pytest.mark.parametrize(("bad", "match"), BAD_STATEMENTS)
def test_bad_statements(compiled, bad, match):
    with pytest.raises(PrivacyError, match=match):
        privacy_statement(*compiled["momentum"], **{"delta": 1e-6, **bad})


def test_importing_it_loads_no_accountant():
    """dp_accounting takes most of a second: only who asks for a statement pays for it."""
    code = "import sys, mmfact.factorize.accounting; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"dp_accounting", "scipy.optimize", "cvxpy"} & set(done.stdout.split())
