"""Workload and options in, certified factorization out: the contract of `compile` and `adopt`."""

import dataclasses
import json
import math
import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import schedule
from mmfact.factorize.compiler import Options, adopt, compile
from mmfact.factorize.errors import CapacityError, SolverError, WorkloadError
from mmfact.factorize.optimum import METHODS
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd


def _one_step_workloads():
    yield prefix_sum(1), 1.0
    yield sgd(1, learning_rates=[0.25]), 0.0625
    yield sgd(1, learning_rates=[0.25], weight_decay=0.5), 0.0625
    yield sgd(1, learning_rates=[0.25], weight_decay=0.5, weight_decay_kind="decoupled"), 0.0625
    yield momentum(1), 1.0
    yield momentum(1, weight_decay=0.5), 1.0
    yield momentum(1, weight_decay=0.5, weight_decay_kind="decoupled", ema=0.5), 0.25
    yield momentum(1, weight_decay=0.5, ema=0.5), 0.25
    yield custom([[-3.0]]), 9.0


@pytest.mark.parametrize(
    ("w", "loss", "method"),
    [
        pytest.param(w, loss, method, id=f"{w.label()}-{method}")
        for w, loss in _one_step_workloads()
        for method in METHODS
        if w.structured or method != "structured"
    ],
)
def test_one_step(w, loss, method):
    """n = 1: C = 1, the loss is A^2, whatever the workload and method."""
    found = compile(w, Options(strategy="dense", method=method))
    assert found.strategy.to_dense() == pytest.approx(1.0, rel=1e-15)
    assert found.certificate.loss == pytest.approx(loss, rel=1e-12)
    assert found.certificate.excess <= 1e-11


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "w",
    [
        prefix_sum(100),
        momentum(100, learning_rates=schedule.parse("cooldown:peak=0.1", 100), weight_decay=0.1),
        custom(np.tri(30) + np.diag(np.arange(30.0))),
    ],
    ids=lambda w: w.kind,
)
def test_factors_multiply_to_a(w, dtype):
    """B C = A to 1e-10, for the very C that is stored, float32 or not."""
    strategy = compile(w, Options(strategy="dense", dtype=dtype)).strategy
    A = w.dense()
    assert np.abs(strategy.decoder(w) @ strategy.to_dense() - A).max() <= 1e-10 * np.abs(A).max()


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 24),
    beta=st.sampled_from([0.0, 0.9, 0.99]),
    decay=st.sampled_from([(0.0, "coupled"), (0.3, "coupled"), (0.3, "decoupled")]),
    ema=st.sampled_from([0.0, 0.9]),
    dtype=st.sampled_from(["float32", "float64"]),
)
@settings(deadline=None, max_examples=60)
def test_any_workload_compiles_to_a_sound_factorization(seed, n, beta, decay, ema, dtype, simulated):
    """Lower-triangular, positive diagonal, B C = A, figures recomputed, a bound below a loss close to it."""
    rates = 10 ** np.random.default_rng(seed).uniform(-2, 0, n)
    w = momentum(n, beta=beta, learning_rates=rates, weight_decay=decay[0], weight_decay_kind=decay[1], ema=ema)
    found = compile(w, Options(strategy="dense", dtype=dtype))
    C = found.strategy.to_dense()
    assert not np.triu(C, 1).any()
    assert (np.diag(C) > 0).all()
    A = simulated(w)
    B = A @ np.linalg.inv(C)
    loss = np.linalg.norm(C, axis=0).max() ** 2 * (B**2).sum()
    assert found.certificate.loss == pytest.approx(loss, rel=1e-8)
    assert found.certificate.lower_bound <= found.certificate.loss
    assert found.certificate.excess <= (1e-8 if dtype == "float64" else 1e-3)
    assert found.tolerance_reached == (found.certificate.excess <= 1e-4)


def test_float32_costs_what_the_cast_costs():
    """Casting each coefficient costs an excess near 1e-6 of its own, and it shows in the certificate."""
    w = prefix_sum(128)
    double, single = (compile(w, Options(strategy="dense", dtype=dtype)) for dtype in ("float64", "float32"))
    assert double.certificate.excess <= 1e-11
    assert 1e-9 < single.certificate.excess <= 1e-5
    assert single.certificate.lower_bound == double.certificate.lower_bound
    assert single.strategy.dtype == np.float32
    assert double.strategy.dtype == np.float64
    np.testing.assert_allclose(single.strategy.to_dense(), double.strategy.to_dense(), atol=1e-7)


def test_compiling_again_gives_the_same_bits():
    """Digests of artifacts depend on it."""
    w = momentum(200, learning_rates=schedule.parse("cosine:peak=0.1", 200))
    one, other = compile(w, Options(strategy="dense")), compile(w, Options(strategy="dense"))
    np.testing.assert_array_equal(one.strategy.packed, other.strategy.packed)
    assert one.certificate == other.certificate


def test_tolerance_is_about_what_is_shipped():
    """The float32 cast alone misses a tolerance of 1e-9: the answer is no, whatever the solver reached."""
    w = prefix_sum(64)
    assert compile(w, Options(strategy="dense", tolerance=1e-9)).tolerance_reached
    assert compile(w, Options(strategy="dense", tolerance=1e-4, dtype="float32")).tolerance_reached
    assert not compile(w, Options(strategy="dense", tolerance=1e-9, dtype="float32")).tolerance_reached


@pytest.mark.parametrize(
    ("tolerance", "method", "expected"),
    [(1e-4, "auto", 1e-10), (1e-2, "dense", 1e-10), (1e-9, "structured", 1e-11), (1e-3, "fixed-point", 1e-3)],
)
def test_solver_tolerance(tolerance, method, expected):
    """min(1e-10, tolerance / 100), but the plain fixed point goes only as far as asked."""
    assert Options(strategy="dense", tolerance=tolerance, method=method).solver_tolerance == pytest.approx(
        expected, rel=1e-12, abs=0
    )


@pytest.mark.parametrize("method", METHODS)
def test_methods(method):
    """Every method ships within its tolerance, and the certificate says how the bound came about."""
    found = compile(prefix_sum(48), Options(strategy="dense", method=method, tolerance=1e-3))
    assert found.tolerance_reached
    assert found.certificate.method == ("dense" if method == "dense" else "structured")
    assert found.optimum.fixed_point == (method == "fixed-point")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"strategy": "sparse"}, "strategy"),
        ({"strategy": None}, "strategy"),
        ({"dtype": "float16"}, "dtype"),
        ({"dtype": "f4"}, "dtype"),
        ({"method": "newton"}, "method"),
        ({"tolerance": 0.0}, "tolerance"),
        ({"tolerance": -1e-4}, "tolerance"),
        ({"tolerance": 1.0}, "tolerance"),
        ({"tolerance": math.nan}, "tolerance"),
        ({"tolerance": math.inf}, "tolerance"),
    ],
)
def test_options_are_checked(options, named):
    """Each bad option is named; the known values are in the message."""
    with pytest.raises(WorkloadError, match=named):
        Options(**options)


def test_options_spec_and_label():
    """Spec is JSON and enough to rebuild; the label spells what is not the default."""
    assert Options().label() == ""
    assert Options(strategy="buffered", dtype="float32").label() == ""
    assert Options(strategy="dense", dtype="float64").label() == "-dense"
    several = [
        Options(),
        Options(dtype="float64"),
        Options(tolerance=1e-6),
        Options(method="dense"),
        Options(buffers=3),
        Options(strategy="dense"),
        Options(strategy="dense", dtype="float32"),
        Options(strategy="banded-low-rank"),
        Options(strategy="banded-low-rank", bandwidth=3),
        Options(strategy="banded-low-rank", rank=3),
        Options(strategy="banded-low-rank", bandwidth=3, rank=3),
    ]
    assert len({options.label() for options in several}) == len(several)
    for options in several:
        assert Options(**json.loads(json.dumps(options.spec()))) == options


@pytest.mark.parametrize("n", [8193, 10**6])
@pytest.mark.parametrize("method", METHODS)
def test_dense_strategy_is_refused_before_allocating(n, method):
    """8 TB for a million steps: an error at once, with the limit in it."""
    w = prefix_sum(n)
    tracemalloc.start()
    begin = time.process_time()
    try:
        with pytest.raises(CapacityError, match="8192"):
            compile(w, Options(strategy="dense", method=method))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
    assert time.process_time() - begin < 1


def test_structured_method_of_a_custom_matrix():
    """Refused by the solver with the way out."""
    with pytest.raises(WorkloadError, match="dense"):
        compile(custom(np.tri(4)), Options(strategy="dense", method="structured"))


def test_progress_is_reported():
    """A long compile is not silent."""
    gaps = []
    found = compile(prefix_sum(32), Options(strategy="dense"), on_progress=lambda progress: gaps.append(progress.gap))
    assert len(gaps) == found.optimum.iterations
    assert gaps[-1] < gaps[0]


def test_custom_matrix_equals_its_optimizer():
    """The same A as a matrix and as an optimizer: one optimum, one strategy, two routes."""
    w = momentum(32, learning_rates=schedule.parse("cooldown", 32))
    one, other = compile(w, Options(strategy="dense")), compile(custom(w.dense()), Options(strategy="dense"))
    assert one.certificate.method == "structured"
    assert other.certificate.method == "dense"
    assert one.certificate.loss == pytest.approx(other.certificate.loss, rel=1e-10)
    np.testing.assert_allclose(one.strategy.to_dense(), other.strategy.to_dense(), atol=1e-6)


def test_signs_of_a_do_not_matter():
    """Flipping the sign of rows of A changes neither the loss nor C."""
    A = np.tri(12) + np.diag(np.arange(12.0))
    one, other = (
        compile(custom(A), Options(strategy="dense")),
        compile(custom(A * np.where(np.arange(12) % 3 == 0, -1.0, 1.0)[:, None]), Options(strategy="dense")),
    )
    assert one.certificate.loss == pytest.approx(other.certificate.loss, rel=1e-12)
    np.testing.assert_allclose(one.strategy.to_dense(), other.strategy.to_dense(), atol=1e-9)


def test_adopted_strategies_get_a_certificate():
    """Somebody else's C: its own figures beside the true optimum's bound."""
    w = prefix_sum(16)
    found = adopt(w, DenseStrategy.from_matrix(np.eye(16)))
    assert found.origin == "given"
    assert compile(w, Options(strategy="dense")).origin == "compiled"
    assert found.certificate.loss == pytest.approx(136.0, rel=1e-12)
    assert found.certificate.lower_bound == pytest.approx(45.66535681198507, rel=1e-9)
    assert not found.tolerance_reached
    best = adopt(w, compile(w, Options(strategy="dense", dtype="float32")).strategy)
    assert best.tolerance_reached
    assert best.options.dtype == "float32"


def test_adopting_a_strategy_of_another_horizon():
    """Refused, with both numbers."""
    with pytest.raises(WorkloadError, match="16"):
        adopt(prefix_sum(15), DenseStrategy.from_matrix(np.eye(16)))


def test_results_are_frozen():
    """A factorization is a record."""
    found = compile(prefix_sum(3), Options(strategy="dense"))
    for record, name in ((found, "strategy"), (found.certificate, "loss"), (found.optimum, "lower_bound")):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(record, name, None)


def test_workloads_that_overflow():
    """Rates at the limit of what is allowed end in a certificate or a SolverError, never in NaN."""
    with pytest.raises(WorkloadError, match="factor"):
        momentum(3, learning_rates=[1e60, 1e-60, 1.0])
    for rates in ([1e20, 1e-20, 1.0], [1e-60] * 3, [1e60] * 3, [1.0, 1e-24, 1e24]):
        try:
            certificate = compile(momentum(3, learning_rates=rates), Options(strategy="dense")).certificate
        except SolverError:
            continue
        assert math.isfinite(certificate.loss)
        assert 0 < certificate.lower_bound <= certificate.loss
