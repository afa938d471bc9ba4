"""Estimates: their order and their scale; how close they come is printed by benchmarks/estimate.py."""

import numpy as np
import pytest

from mmfact.factorize.compiler import Options
from mmfact.factorize.estimate import estimate
from mmfact.factorize.workload import custom, momentum, prefix_sum


@pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank", "dense"])
def test_longer_takes_longer_and_more_memory(strategy):
    found = [estimate(momentum(n), Options(strategy=strategy)) for n in (100, 1000, 4000, 8000)]
    assert [each.seconds for each in found] == sorted(each.seconds for each in found)
    assert [each.memory for each in found] == sorted(each.memory for each in found)


def test_linear_and_quadratic_memory():
    long, longer = (estimate(prefix_sum(n), Options()).memory for n in (1 << 18, 1 << 20))
    assert longer / long < 5
    assert estimate(prefix_sum(8192), Options(strategy="dense")).memory > 3 * 8 * 8192**2


def test_a_custom_matrix_takes_the_dense_way():
    A = custom(np.tri(200))
    assert estimate(A, Options()).memory < 1 << 29
    assert estimate(momentum(8192), Options(method="dense")).seconds > 10
