"""Rows as array expressions in NumPy, torch and JAX: against dense C^-1, and against the native steppers."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mmfact.factorize import compiler, workload
from mmfact.factorize.errors import CapacityError, HorizonError, PrivacyError, StateError
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.noise import recurrence as module
from mmfact.noise.recurrence import Recurrence, recurrence
from mmfact.store.format import from_factorization

Array = Any

STRATEGIES = ("buffered", "banded-low-rank", "dense")
WORKLOADS = ("prefix", "cooldown", "decay", "wide", "custom")
LIBRARIES = ("numpy", "torch", "jax")


def run(rule: Recurrence, Z: Array, library: str = "numpy") -> Array:
    """The rows of white rows Z, step by step; for JAX under jit and scan, the step index traced."""
    if library == "jax":
        jax = pytest.importorskip("jax")
        jnp = jax.numpy

        def body(carry: Any, white: Any) -> Any:
            row, state = rule.step(carry[0], white, carry[1])
            return (carry[0] + 1, state), row

        start = rule.start(Z[0].shape, lambda shape: jnp.zeros(shape, rule.dtype))
        return np.asarray(jax.jit(lambda Z: jax.lax.scan(body, (0, start), Z)[1])(jnp.asarray(Z)))
    if library == "torch":
        torch = pytest.importorskip("torch")
        state = rule.start(Z[0].shape, lambda shape: torch.zeros(shape, dtype=getattr(torch, rule.dtype.name)))
        Z = torch.from_numpy(Z)
    else:
        state = rule.start(Z[0].shape, lambda shape: np.zeros(shape, rule.dtype))
    rows = []
    for t, white in enumerate(Z):
        row, state = rule.step(t, white, state)
        rows.append(np.asarray(row))
    return np.array(rows)


def white(n: int, dtype: str, shape: tuple[int, ...] = (50,)) -> Array:
    return np.random.default_rng(n).standard_normal((n, *shape)).astype(dtype)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_are_the_dense_inverse_times_white_rows(strategy: str, name: str, library: str, built: Any) -> None:
    """Float64, 1e-10 of the largest value; the matrix is NumPy's inverse of the definition of C. Rows of two axes."""
    made = built(strategy, "float64", name)
    Z = white(made.artifact.n, "float64", (5, 4))
    rows = run(recurrence(made.artifact, "float64"), Z, library)
    expected = np.einsum("ij,jkl->ikl", made.noising, Z)
    assert rows.dtype == np.float64
    np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_rows_are_those_of_the_native_stepper(
    strategy: str, library: str, built: Any, stream: Callable[..., Any], fed: Callable[..., Array]
) -> None:
    """Float32, 40 steps of momentum with iterate EMA, where rounding is worst: 5e-6 of a row's standard deviation."""
    artifact = built(strategy, "float32", "wide", 40).artifact
    Z = white(40, "float32", (200,))
    native = stream(artifact, 200)
    rule = recurrence(artifact)
    rows = run(rule, Z, library) * native.noise_multiplier * native.clip_norm * rule.sensitivity
    expected = fed(native, Z)
    error = np.sqrt(((rows - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1))
    assert rows.dtype == np.float32
    assert error.max() < 5e-6


def test_float32_sums_do_not_drift_over_1000_steps(stream: Callable[..., Any], fed: Callable[..., Array]) -> None:
    """Banded + low rank, whose sums the native stepper keeps in float64: 2e-6 of a row's standard deviation."""
    options = compiler.Options(strategy="banded-low-rank", bandwidth=8, rank=3, tolerance=0.5)
    artifact = from_factorization(compiler.compile(workload.momentum(1000), options))
    Z = white(1000, "float32", (100,))
    expected = fed(stream(artifact, 100, dtype="float64"), Z.astype(np.float64)) / (1.3 * 0.7)
    rule = recurrence(artifact)
    rows = run(rule, Z) * rule.sensitivity
    assert np.sqrt(((rows - expected) ** 2).mean(axis=1) / (expected**2).mean(axis=1)).max() < 2e-6


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_sensitivity_is_that_of_the_rounded_coefficients(
    strategy: str, built: Any, largest_column: Callable[..., Any]
) -> None:
    """A float64 artifact in float32: against 60 digits of the matrix that identity rows show, never below, 1e-12 above.

    In the sums of the banded form a product of two coefficients is rounded once more by showing it: 1e-7 there.
    """
    artifact = built(strategy, "float64", "cooldown").artifact
    rule = recurrence(artifact)
    if strategy == "buffered":
        c, g, decay, q = (table.astype(np.float32).astype(float) for table in artifact.strategy.coefficients().values())
        C = np.diag(c)
        for i in range(len(c)):
            for j in range(i):
                C[i, j] = g[i] @ (decay[j + 1 : i].prod(axis=0) * q[j])
        exact = float(np.linalg.norm(C, axis=0).max())
    else:
        exact = float(largest_column(run(rule, np.eye(artifact.n, dtype=np.float32)).astype(float)))
    below, above = {"buffered": (1e-15, 1e-12), "dense": (0, 1e-12), "banded-low-rank": (1e-7, 1e-7)}[strategy]
    assert exact * (1 - below) <= rule.sensitivity <= exact * (1 + above)
    assert abs(rule.sensitivity / recurrence(artifact, "float64").sensitivity - 1) > 1e-11  # it was rounded


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_known_step_outside_the_horizon_is_refused(strategy: str, built: Any) -> None:
    rule = recurrence(built(strategy, "float32").artifact)
    state = rule.start((3,), lambda shape: np.zeros(shape, np.float32))
    for t in (rule.n, rule.n + 7, -1, np.int64(rule.n)):
        with pytest.raises(HorizonError, match=rf"step {t} is at or past the horizon of {rule.n}"):
            rule.step(t, np.ones(3, np.float32), state)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_traced_step_outside_the_horizon_gives_nan(strategy: str, built: Any) -> None:
    """JAX clips indices and would repeat the last coefficients; the last step in the horizon is finite."""
    jax = pytest.importorskip("jax")
    rule = recurrence(built(strategy, "float32").artifact)
    state = rule.start((3,), lambda shape: jax.numpy.zeros(shape, np.float32))
    step = jax.jit(lambda t: rule.step(t, jax.numpy.ones(3, np.float32), state)[0])
    assert np.isfinite(step(rule.n - 1)).all()
    for t in (rule.n, rule.n + 7, -1):
        assert np.isnan(step(t)).all()


@pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank"])
def test_the_state_that_was_given_is_left_as_it_was(strategy: str, built: Any) -> None:
    def arrays(state: Any) -> Iterator[Array]:
        for part in state:
            yield from (part,) if isinstance(part, np.ndarray) else arrays(part)

    rule = recurrence(built(strategy, "float32").artifact)
    state = rule.start((3,), lambda shape: np.zeros(shape, np.float32))
    _, state = rule.step(0, np.ones(3, np.float32), state)
    before = [array.copy() for array in arrays(state)]
    first, _ = rule.step(1, np.ones(3, np.float32), state)
    again, _ = rule.step(1, np.ones(3, np.float32), state)
    assert len(before) > 2
    np.testing.assert_array_equal(before, list(arrays(state)))
    np.testing.assert_array_equal(first, again)


def test_a_history_that_is_too_large_is_refused(built: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LARGEST_HISTORY", 12 * 100 * 4)
    rule = recurrence(built("dense", "float32").artifact)
    rule.start((100,), lambda shape: np.zeros(shape, np.float32))
    with pytest.raises(CapacityError, match=r"all 12 white rows.*strategy buffered"):
        rule.start((101,), lambda shape: pytest.fail("nothing may be allocated"))


@pytest.mark.parametrize(("library", "short"), [("numpy", "float16"), ("torch", "bfloat16"), ("jax", "bfloat16")])
def test_white_rows_of_another_precision_are_refused(library: str, short: str, built: Any) -> None:
    rule = recurrence(built("buffered", "float32").artifact)
    arrays = pytest.importorskip({"jax": "jax.numpy"}.get(library, library))
    state = rule.start((3,), lambda shape: arrays.zeros(shape, dtype=arrays.float32))
    with pytest.raises(StateError, match=f"{short}, but this recursion was made for float32"):
        rule.step(0, arrays.ones(3, dtype=getattr(arrays, short)), state)


def test_a_precision_that_loses_the_noise_is_refused() -> None:
    """Two buffers of 1e8 that nearly cancel."""
    n, large = 96, 1e8
    row = np.ones((n, 1))
    given = BufferedStrategy(np.ones(n), row * [large, -large], row * [0.9, 0.9 - 1e-2 / large], 0.3 * np.ones((n, 2)))
    artifact = from_factorization(compiler.adopt(workload.prefix_sum(n), given))
    with pytest.raises(PrivacyError, match="nearly cancel"):
        recurrence(artifact)


def test_sums_that_cancel_are_refused_in_float32(built: Any) -> None:
    """Banded + low rank whose two ranks are opposite but for one part in 1e6: float64 streams it, float32 would not."""
    made = built("banded-low-rank", "float64", "prefix")
    left, right = 1e6 * white(12, "float64", (2,)), np.ones((12, 2))
    left[:, 1] = 1 - left[:, 0]
    left[:3], right[-3:] = 0, 0
    strategy = dataclasses.replace(made.artifact.strategy, left=left, right=right)
    artifact = dataclasses.replace(made.artifact, strategy=strategy)
    recurrence(artifact, "float64")
    with pytest.raises(PrivacyError, match="float32"):
        recurrence(artifact)


def test_no_accelerator_library_is_imported() -> None:
    source = importlib.util.find_spec("mmfact.noise.recurrence").loader.get_source("mmfact.noise.recurrence")
    assert "import jax" not in source
    assert "import torch" not in source
