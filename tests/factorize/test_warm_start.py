"""A start from a shorter horizon: it saves work and changes nothing else."""

import numpy as np
import pytest

from mmfact.factorize import optimum, schedule, warm_start
from mmfact.factorize.dual_structured import StructuredDual
from mmfact.factorize.errors import SolverError
from mmfact.factorize.workload import momentum, prefix_sum, sgd


def rates(name, n):
    return schedule.parse(name, n)


WORKLOADS = {
    "prefix": prefix_sum(1600),
    "momentum": momentum(1600),
    "cooldown": momentum(1600, beta=0.95, learning_rates=rates("cooldown", 1600)),
    "decay": sgd(1600, learning_rates=rates("cosine:peak=0.5,warmup=100", 1600), weight_decay=0.01),
    "ema": momentum(1600, ema=0.99),
}


@pytest.mark.parametrize("n", [512, 513, 4000, 4001])
def test_positions_keep_both_ends_and_stretch_the_middle(n):
    m = n // 8
    positions = warm_start._positions(n, m)
    end = m // 16
    np.testing.assert_allclose(positions[:end], np.arange(end))
    np.testing.assert_allclose(positions[n - end :], np.arange(m - end, m))
    assert (np.diff(positions) > 0).all()
    np.testing.assert_allclose(positions + positions[::-1], m - 1)


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_optimum_is_the_same_and_had_for_less(name, monkeypatch):
    workload = WORKLOADS[name]
    warm = optimum.solve(workload)
    monkeypatch.setattr(warm_start, "multipliers", lambda workload, solve: None)
    cold = optimum.solve(workload)
    assert warm.lower_bound == pytest.approx(cold.lower_bound, rel=1e-9)
    assert warm.converged
    assert warm.products <= cold.products


@pytest.mark.parametrize("name", WORKLOADS)
def test_the_start_is_near(name):
    """Its bound is within 10 % of the best one."""
    workload = WORKLOADS[name].in_own_unit()[1]
    best = optimum.solve(workload).lower_bound
    start = warm_start.multipliers(workload, lambda shorter: optimum.solve(shorter).multipliers)
    assert 0 <= best / StructuredDual(workload).evaluate(start).bound - 1 < 0.1


def test_short_horizons_have_no_shorter_one():
    def never(workload):
        raise AssertionError(workload)

    assert warm_start.multipliers(prefix_sum(8 * warm_start.SMALLEST - 1), never) is None


def test_a_shorter_horizon_that_cannot_be_solved_is_no_harm():
    def fails(workload):
        raise SolverError("no")

    assert warm_start.multipliers(momentum(4000), fails) is None


def test_the_shorter_horizon_keeps_its_kind_and_decays_as_much():
    seen = []
    workload = WORKLOADS["decay"]

    def note(shorter):
        seen.append(shorter)
        return np.ones(shorter.n)

    warm_start.multipliers(workload, note)
    (shorter,) = seen
    assert (shorter.kind, shorter.n) == ("sgd", 200)
    assert shorter.learning_rates.max() == pytest.approx(workload.learning_rates.max(), rel=1e-2)
    whole, part = (w.weight_decay * w.learning_rates.sum() for w in (workload, shorter))
    assert part == pytest.approx(whole, rel=0.2)


def test_a_decay_too_strong_for_the_shorter_horizon_is_capped():
    """lambda eta of .3 a step would be 2.4; the iterate must not be thrown away."""
    found = optimum.solve(sgd(2000, weight_decay=0.3))
    assert found.converged
