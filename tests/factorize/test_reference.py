"""The semidefinite program in cvxpy, the one truth here that shares no formula with the solver."""

import numpy as np
import pytest

from mmfact.factorize import schedule
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import CapacityError
from mmfact.factorize.reference import LARGEST_REFERENCE, reference_loss
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd

# The interior-point solver's own accuracy.
ACCURACY = 1e-5


def _agrees(w):
    found = compile(w, Options(strategy="dense"))
    truth = reference_loss(w)
    assert found.certificate.loss == pytest.approx(truth, rel=ACCURACY)
    assert found.certificate.lower_bound <= truth * (1 + ACCURACY)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_prefix_sums(n):
    """The compiled loss is the program's optimum."""
    _agrees(prefix_sum(n))


def test_golden_ratio():
    """The reference itself against a closed form, n = 2: ((1 + sqrt 5) / 2)^2."""
    assert reference_loss(prefix_sum(2)) == pytest.approx((3 + np.sqrt(5)) / 2, rel=1e-6)


@pytest.mark.parametrize(
    "w",
    [
        momentum(12),
        momentum(16, learning_rates=schedule.parse("cooldown:peak=0.1", 16)),
        momentum(8, learning_rates=np.full(8, 0.1), weight_decay=0.5),
        sgd(10, learning_rates=schedule.parse("cosine:peak=0.5", 10), weight_decay=0.2, weight_decay_kind="decoupled"),
        momentum(8, beta=0.5, ema=0.5),
    ],
    ids=lambda w: w.label(),
)
def test_optimizers(w):
    """Momentum, schedules, both weight decays and averages."""
    _agrees(w)


@pytest.mark.parametrize("seed", range(6))
def test_random_triangles(seed, random_triangle):
    """Any lower-triangular matrix, diagonals of either sign, on the dense route."""
    _agrees(custom(random_triangle(seed, 2 + seed)))


def test_scale():
    """The unit of the workload does not reach the interior-point solver."""
    w = custom(1e-6 * np.tri(4))
    assert 1e12 * reference_loss(w) == pytest.approx(reference_loss(prefix_sum(4)), rel=1e-6)


def test_too_large():
    """n = 65 would take minutes and memory; refused by name and number."""
    assert LARGEST_REFERENCE == 64
    with pytest.raises(CapacityError, match="n = 65"):
        reference_loss(prefix_sum(65))
