"""An artifact beside the classic mechanisms, against dense algebra."""

import math

import numpy as np
import pytest

from mmfact.factorize import schedule
from mmfact.factorize.baselines import LARGEST_DENSE_BASELINE
from mmfact.factorize.comparison import compare
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.participation import single
from mmfact.factorize.workload import custom, momentum, prefix_sum


def compared(workload, options=None):
    found = compile(workload, options)
    return found, compare(workload, found.strategy, found.certificate, single())


def by_name(result):
    return {row.name: row for row in result.rows}


@pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank", "dense"])
def test_rows_are_exact_sorted_and_above_the_bound(strategy):
    n = 48
    workload = momentum(n, learning_rates=schedule.parse("cooldown", n))
    found, result = compared(workload, Options(strategy=strategy, tolerance=1e-3))
    rows = by_name(result)
    assert [row.loss for row in result.rows] == sorted(row.loss for row in result.rows)
    assert result.rows[0].name == "this"
    assert rows["this"].loss == found.certificate.loss
    assert rows["this"].bytes_per_parameter == found.strategy.bytes_per_parameter
    A = workload.dense()
    assert rows["identity"].loss == pytest.approx(np.linalg.norm(A) ** 2, rel=1e-9)
    assert rows["identity"].buffers == 0
    for row in result.rows:
        assert row.ratio == pytest.approx(row.loss / result.lower_bound)
        assert row.rmse == pytest.approx(math.sqrt(row.loss / n))
        assert row.ratio >= 1
    assert result.left_out == {}


def test_the_prefix_sum_optimum_is_post_processed():
    """B = M S^-1 B_S with the dense optimum of prefix sums, from scratch."""
    n = 40
    workload = momentum(n)
    _, result = compared(workload)
    S = np.tril(np.ones((n, n)))
    C = compile(prefix_sum(n), Options(strategy="dense")).strategy.to_dense()
    B = workload.dense() @ np.linalg.inv(S) @ (S @ np.linalg.inv(C))
    loss = np.linalg.norm(C, axis=0).max() ** 2 * np.linalg.norm(B) ** 2
    assert by_name(result)["prefix-sum optimum"].loss == pytest.approx(loss, rel=1e-5)


def test_prefix_sums_are_not_compared_with_themselves():
    _, result = compared(prefix_sum(20))
    assert "prefix-sum optimum" not in by_name(result)


def test_custom_matrix():
    n = 24
    A = np.tril(np.random.default_rng(0).uniform(0.5, 1, (n, n))) + np.eye(n)
    _, result = compared(custom(A))
    assert by_name(result)["identity"].loss == pytest.approx(np.linalg.norm(A) ** 2, rel=1e-9)
    assert "prefix-sum optimum" in by_name(result)


def test_a_long_horizon_says_what_is_left_out():
    _, result = compared(momentum(LARGEST_DENSE_BASELINE + 1))
    assert set(result.left_out) == {"optimal-toeplitz", "optimal-toeplitz, columns normalised"}
    assert {"identity", "tree", "honaker-online", "honaker-full", "sqrt-toeplitz"} <= set(by_name(result))
    assert result.rows[0].name == "this"
