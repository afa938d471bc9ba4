"""The certificate: definitions of its figures, and no certificate where loss and bound contradict each other."""

import dataclasses
import math

import numpy as np
import pytest

from mmfact.factorize import schedule
from mmfact.factorize.certificate import certify
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import SolverError
from mmfact.factorize.participation import single
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.workload import momentum, prefix_sum


@pytest.fixture(scope="module")
def found():
    return compile(momentum(20, learning_rates=schedule.parse("cooldown:peak=0.1", 20)), Options(strategy="dense"))


def test_definitions(found, simulated):
    """loss = s^2 normF(B)^2, rmse = sqrt(loss / n), max error = s max row norm of B, excess = loss / bound - 1."""
    C = found.strategy.to_dense()
    B = simulated(found.workload) @ np.linalg.inv(C)
    s = np.linalg.norm(C, axis=0).max()
    c = found.certificate
    assert c.n == 20
    assert c.sensitivity == pytest.approx(s, rel=1e-13)
    assert c.sensitivity_kind == "exact"
    assert c.loss == pytest.approx(s**2 * (B**2).sum(), rel=1e-11)
    assert c.rmse == pytest.approx(s * math.sqrt((B**2).sum() / 20), rel=1e-11)
    assert c.max_error == pytest.approx(s * np.sqrt((B**2).sum(axis=1)).max(), rel=1e-11)
    assert c.excess == c.loss / c.lower_bound - 1
    assert c.lower_bound == found.optimum.lower_bound


def test_rmse_is_what_a_simulation_sees(found):
    """Monte Carlo: white noise through B has that root mean squared error, within 1 % at 20 x 20,000 draws."""
    Z = np.random.default_rng(0).normal(size=(20, 20_000))
    noise = found.certificate.sensitivity * found.strategy.decoder(found.workload) @ Z
    assert math.sqrt((noise**2).mean()) == pytest.approx(found.certificate.rmse, rel=0.01)


def test_how_the_bound_was_found_is_recorded(found):
    """Quadrature error, rounding, residual, iterations, products, method: copied from the optimum."""
    for name in ("quadrature_error", "rounding", "residual", "iterations", "products", "method", "fell_back"):
        assert getattr(found.certificate, name) == getattr(found.optimum, name)


@pytest.mark.parametrize("factor", [1 + 1e-9, 1.001, 2.0])
def test_a_loss_below_the_bound_is_no_certificate(found, factor):
    """A negative excess cannot be: it is an error, never clipped to zero."""
    wrong = dataclasses.replace(found.optimum, lower_bound=found.certificate.loss * factor)
    with pytest.raises(SolverError, match="below the lower bound"):
        certify(found.workload, found.strategy, wrong, single())


def test_a_strategy_that_claims_less_than_it_has(found, monkeypatch):
    """If the sensitivity were understated by 7 % (a Cholesky the wrong way round), the bound would catch it."""
    honest = DenseStrategy.sensitivity
    monkeypatch.setattr(DenseStrategy, "sensitivity", lambda self, p: 0.93 * honest(self, p))
    with pytest.raises(SolverError, match="below the lower bound"):
        certify(found.workload, found.strategy, found.optimum, single())


@pytest.mark.parametrize("bound", [0.0, -1.0, math.nan])
def test_no_bound_no_certificate(found, bound):
    """A bound of zero says nothing; NaN passes every careless comparison."""
    with pytest.raises(SolverError, match="no certificate"):
        certify(found.workload, found.strategy, dataclasses.replace(found.optimum, lower_bound=bound), single())


def test_infinite_loss(found):
    """A strategy whose loss overflows gets no certificate."""
    strategy = DenseStrategy.from_matrix(np.diag([1e-160] + 19 * [1.0]))
    with pytest.raises(SolverError, match="no certificate"):
        certify(found.workload, strategy, found.optimum, single())


def test_excess_of_other_strategies():
    """Input perturbation, C = I, at n = 16: its excess is 136 / 45.6653568 - 1, both golden values."""
    w = prefix_sum(16)
    certificate = certify(
        w, DenseStrategy.from_matrix(np.eye(16)), compile(w, Options(strategy="dense")).optimum, single()
    )
    assert certificate.loss == pytest.approx(136, rel=1e-12)
    assert certificate.excess == pytest.approx(136 / 45.66535681198507 - 1, rel=1e-9)


def test_scaling_a_strategy_changes_nothing(found):
    """The loss is invariant under C -> c C: what counts is noise at equal privacy."""
    scaled = DenseStrategy.from_matrix(17 * found.strategy.to_dense())
    certificate = certify(found.workload, scaled, found.optimum, single())
    assert certificate.loss == pytest.approx(found.certificate.loss, rel=1e-12)
    assert certificate.sensitivity == pytest.approx(17 * found.certificate.sensitivity, rel=1e-14)


@pytest.mark.parametrize("n", [1, 2, 3, 8, 16, 57, 58, 59, 100, 128, 200, 256])
@pytest.mark.parametrize("method", ["structured", "dense"])
def test_no_size_has_a_negative_excess(n, method):
    """Computed bounds once sat above computed losses by 9e-16 in 23 of 58 sizes."""
    for w in (prefix_sum(n), momentum(n)):
        assert compile(w, Options(strategy="dense", method=method)).certificate.excess >= 0
