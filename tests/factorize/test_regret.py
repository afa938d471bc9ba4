"""The regret bound: simulated online learners keep it, and break the short form without sqrt(d)."""

import math

import numpy as np
import pytest

from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import PrivacyError, WorkloadError
from mmfact.factorize.regret import regret_bound
from mmfact.factorize.workload import momentum, prefix_sum, sgd

N = 64


@pytest.fixture(scope="module")
def made():
    return compile(prefix_sum(N), Options(dtype="float64"))


def _simulated(made, sigma, lipschitz, start, learning_rate, targets, runs=40):
    """Mean over runs of (1/n) sum_t f_t(theta_t) - f_t(0), f_t(theta) = L norm2(theta - target_t) up to a constant.

    theta_t = start - eta (prefix sum of gradients + sigma L sensitivity (B Z))_(t-1), in plain NumPy; theta* = 0.
    """
    rng = np.random.default_rng(5)
    S = np.tril(np.ones((N, N)))
    C = made.strategy.to_dense()
    B = S @ np.linalg.inv(C)
    sensitivity = np.linalg.norm(C, axis=0).max()
    regrets = []
    for _ in range(runs):
        noise = sigma * lipschitz * sensitivity * B @ rng.normal(size=(N, len(start)))
        theta, total, regret = start, np.zeros_like(start), 0.0
        for t in range(N):
            away = theta - targets[t]
            regret += lipschitz * (np.linalg.norm(away) - np.linalg.norm(targets[t]))
            total = total + lipschitz * away / max(np.linalg.norm(away), 1e-300)
            theta = start - learning_rate * (total + noise[t])
        regrets.append(regret / N)
    return float(np.mean(regrets))


@pytest.mark.parametrize("d", [1, 2, 30, 400])
@pytest.mark.parametrize("sigma", [0.3, 3.0])
@pytest.mark.parametrize("moving", [False, True])
def test_simulated_learners_keep_it(made, d, sigma, moving):
    """Fixed and moving targets; 40 runs, seeded: the mean regret lies below the bound."""
    rng = np.random.default_rng(d)
    lipschitz, learning_rate = 0.7, 0.05
    start = rng.normal(size=d) / math.sqrt(d)
    targets = rng.normal(size=(N, d)) / math.sqrt(d) if moving else np.zeros((N, d))
    found = _simulated(made, sigma, lipschitz, start, learning_rate, targets)
    options = {"lipschitz": lipschitz, "distance": float(np.linalg.norm(start)), "learning_rate": learning_rate}
    assert found <= regret_bound(made.workload, made.certificate, sigma, **options, dimension=d).total


def test_the_short_form_is_false(made):
    """d = 400: a simulated learner's regret is twice what the bound would be without sqrt(d), and keeps ours."""
    d, sigma, lipschitz, learning_rate = 400, 3.0, 1.0, 0.05
    found = _simulated(made, sigma, lipschitz, np.zeros(d), learning_rate, np.zeros((N, d)))
    options = {"lipschitz": lipschitz, "distance": 0.0, "learning_rate": learning_rate, "dimension": d}
    bound = regret_bound(made.workload, made.certificate, sigma, **options)
    short = bound.distance + bound.steps + bound.noise / math.sqrt(d)
    assert 2 * short < found <= bound.total


def test_its_terms_by_hand(made):
    """R^2 / (2 eta n) + eta L^2 / 2 + L^2 sigma eta sqrt(d) sensitivity normF(B) / sqrt(n), from the dense matrices."""
    C = made.strategy.to_dense()
    B = np.tril(np.ones((N, N))) @ np.linalg.inv(C)
    error = np.linalg.norm(C, axis=0).max() * np.linalg.norm(B) / math.sqrt(N)
    found = regret_bound(
        made.workload, made.certificate, 1.3, lipschitz=0.7, distance=2.0, learning_rate=0.05, dimension=9
    )
    assert found.distance == pytest.approx(2.0**2 / (2 * 0.05 * N), rel=1e-14)
    assert found.steps == pytest.approx(0.05 * 0.7**2 / 2, rel=1e-14)
    assert found.noise == pytest.approx(0.7**2 * 1.3 * 0.05 * 3 * error, rel=1e-9)
    assert found.total == found.distance + found.steps + found.noise


@pytest.mark.parametrize("workload", [momentum(8), sgd(8, learning_rates=np.linspace(1, 2, 8))])
def test_other_workloads_are_refused(workload):
    certificate = compile(workload, Options(strategy="dense")).certificate
    with pytest.raises(WorkloadError, match="prefix"):
        regret_bound(workload, certificate, 1.0, lipschitz=1, distance=1, learning_rate=1, dimension=1)


BAD = [0.0, -1.0, math.nan, math.inf]


@pytest.mark.parametrize(
    ("name", "value"),
    [("lipschitz", bad) for bad in BAD]
    + [("learning_rate", bad) for bad in BAD]
    + [("distance", bad) for bad in (-1.0, math.nan, math.inf, 1e200)]
    + [("dimension", bad) for bad in (0, -3, 10**400)]
    + [("noise_multiplier", bad) for bad in BAD],
)
def test_bad_values(made, name, value):
    given = {"lipschitz": 1.0, "distance": 1.0, "learning_rate": 1.0, "dimension": 1, "noise_multiplier": 1.0}
    given[name] = value
    with pytest.raises(PrivacyError):
        regret_bound(made.workload, made.certificate, **given)
