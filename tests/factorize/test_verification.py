"""`verify` recomputes a certificate from the coefficients: it passes what is right and catches each wrong figure."""

import dataclasses
import math

import numpy as np
import pytest

from mmfact.factorize import schedule
from mmfact.factorize.compiler import Options, adopt, compile
from mmfact.factorize.errors import CapacityError
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.verification import verify
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd


def _check(found, **changes):
    certificate = dataclasses.replace(found.certificate, **changes.pop("certificate", {}))
    C = changes.pop("C", found.strategy.to_dense())
    v = changes.pop("multipliers", found.optimum.multipliers)
    return verify(changes.pop("workload", found.workload), C, v, certificate, **changes)


def _failed(verification):
    return {check.name for check in verification.checks if not check.passed}


@pytest.fixture(scope="module")
def found():
    return compile(momentum(24, learning_rates=schedule.parse("cooldown:peak=0.1", 24)))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "w",
    [
        prefix_sum(1),
        prefix_sum(200),
        momentum(64, learning_rates=schedule.parse("cosine:peak=0.1", 64), weight_decay=0.5),
        momentum(
            64,
            learning_rates=schedule.parse("cosine:peak=0.1", 64),
            weight_decay=0.5,
            weight_decay_kind="decoupled",
            ema=0.9,
        ),
        sgd(64, ema=0.5),
        custom(np.tri(20) + np.diag(np.arange(20.0))),
    ],
    ids=lambda w: w.label(),
)
def test_what_is_right_passes(w, dtype):
    """Whatever the compiler ships passes, structured or dense, cast or not."""
    found = compile(w, Options(dtype=dtype))
    verification = _check(found)
    assert verification.passed, verification
    assert not _failed(verification)


def test_with_the_semidefinite_program(found):
    """cvxpy as one more comparison; refused for n > 64."""
    verification = _check(found, reference=True)
    assert verification.passed, verification
    assert any("cvxpy" in check.name for check in verification.checks)
    assert "cvxpy" in verification.how
    with pytest.raises(CapacityError, match="65"):
        _check(compile(prefix_sum(65)), reference=True)


@pytest.mark.parametrize(
    ("name", "factor"),
    [
        ("sensitivity", 0.999999),
        ("sensitivity", 1.001),
        ("loss", 0.999999),
        ("loss", 1.001),
        ("max_error", 0.999999),
        ("max_error", 1.001),
        ("lower_bound", 1.000001),
        ("lower_bound", 0.9),
        ("loss", math.nan),
        ("sensitivity", math.nan),
        ("lower_bound", math.nan),
    ],
)
def test_a_wrong_figure_is_caught(found, name, factor):
    """Understated by a millionth, overstated by a thousandth, a bound too high or far too low, NaN: just that one."""
    verification = _check(found, certificate={name: getattr(found.certificate, name) * factor})
    assert _failed(verification) == {name.replace("_", " ")}
    assert not verification.passed


def test_a_changed_coefficient_is_caught(found):
    """One entry of C moved by a part in a thousand changes loss and sensitivity."""
    C = found.strategy.to_dense()
    C[20, 3] += 1e-3
    assert not _check(found, C=C).passed


def test_the_transposed_orientation_is_caught(found):
    """C of the wrong Cholesky (C C' = X): its column norms are not 1."""
    X = found.strategy.to_dense().T @ found.strategy.to_dense()
    assert "sensitivity" in _failed(_check(found, C=np.linalg.cholesky(X)))


def test_other_multipliers_do_not_prove_the_bound(found):
    """Multipliers are the proof: those of another problem give another, smaller bound."""
    v = found.optimum.multipliers[::-1].copy()
    assert _failed(_check(found, multipliers=v)) == {"lower bound"}


def test_another_workload_is_caught(found):
    """The same C under a workload with another momentum."""
    other = momentum(24, beta=0.8, learning_rates=found.workload.learning_rates)
    failed = _failed(_check(found, workload=other))
    assert {"loss", "max error", "lower bound"} <= failed


def test_the_program_lies_between_bound_and_loss():
    """An adopted strategy far from optimal passes, for its certificate is honest; a bound above the program fails."""
    given = adopt(prefix_sum(8), DenseStrategy.from_matrix(np.eye(8)))
    honest = _check(given, reference=True)
    assert honest.passed
    values = [check.recomputed for check in honest.checks if "cvxpy" in check.name]
    assert values == [pytest.approx(17.86617733277373, rel=1e-5)]
    wrong = _check(given, certificate={"lower_bound": 17.8662 * 1.001}, reference=True)
    assert {name for name in _failed(wrong) if "cvxpy" in name}
    wrong = _check(given, certificate={"loss": 17.8662 * 0.999}, reference=True)
    assert {name for name in _failed(wrong) if "cvxpy" in name}
