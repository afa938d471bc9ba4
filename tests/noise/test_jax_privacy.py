"""The artifact as jax_privacy's StreamingMatrix, and our noise among its privatizers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import AdapterError, HorizonError, PrivacyError
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.model import ModelNoise

jax = pytest.importorskip("jax")
noise_addition = pytest.importorskip("jax_privacy.noise_addition")

from mmfact.noise.jax_privacy import privatizer, stddev, streaming_matrix  # noqa: E402
from mmfact.noise.optax import tensors  # noqa: E402

jnp = jax.numpy

STRATEGIES = ("buffered", "banded-low-rank", "dense")
strategies = pytest.mark.parametrize("strategy", STRATEGIES)


@strategies
def test_the_matrix_is_the_inverse_of_the_strategy(strategy: str, built: Any) -> None:
    """Against NumPy's inverse, to float32 rounding: 5e-6 of the largest entry. C itself would be far off."""
    made = built(strategy, "float32", "cooldown")
    found = streaming_matrix(made.artifact).materialize(made.artifact.n)
    np.testing.assert_allclose(found, made.noising, rtol=0, atol=5e-6 * np.abs(made.noising).max())
    assert np.abs(made.noising - made.C).max() > 0.1


def test_the_privatizer_adds_its_noise_times_the_inverse(built: Any) -> None:
    """jax_privacy's own draws Z, seen by giving it the identity, come out as stddev * C^-1 Z on a tree, under jit."""
    made = built("buffered", "float32", "cooldown")
    n, sums = made.artifact.n, {"w": jnp.zeros((4, 3)), "b": jnp.zeros(5)}
    scale = stddev(made.artifact, noise_multiplier=1.3, clip_norm=0.7)

    def rows(matrix: Any, scale: float) -> Any:
        chosen = noise_addition.matrix_factorization_privatizer(matrix, stddev=scale, prng_key=jax.random.key(3))
        update, state, out = jax.jit(chosen.update), chosen.init(sums), []
        for _ in range(n):
            noisy, state = update(sums, state)
            out.append(np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(noisy)]))
        return np.array(out)

    Z = rows(noise_addition.streaming_matrix.identity(), 1.0)
    expected = 1.3 * 0.7 * np.linalg.norm(made.C, axis=0).max() * made.noising @ Z
    np.testing.assert_allclose(
        rows(streaming_matrix(made.artifact), scale), expected, rtol=0, atol=5e-6 * np.abs(expected).max()
    )


@strategies
def test_the_standard_deviation_is_rounded_up(strategy: str, built: Any) -> None:
    """A float32 number not below the exact one of the stored coefficients, and at most 1e-6 above it."""
    made = built(strategy, "float64", "cooldown")
    exact = 1.3 * 0.7 * np.linalg.norm(made.C, axis=0).max()
    found = stddev(made.artifact, noise_multiplier=1.3, clip_norm=0.7)
    assert found == np.float32(found)
    assert exact <= found <= exact * (1 + 1e-6)
    if strategy == "buffered":  # 2 C, since what is compiled has sensitivity 1
        held = made.artifact.strategy
        twice = dataclasses.replace(made.artifact, strategy=dataclasses.replace(held, c=2 * held.c, q=2 * held.q))
        assert stddev(twice, noise_multiplier=1.3, clip_norm=0.7) == 2 * found


@pytest.mark.parametrize("given", [{"noise_multiplier": 0}, {"clip_norm": float("nan")}, {"clip_norm": -1}])
def test_scales_without_privacy_are_refused(given: dict[str, float], built: Any) -> None:
    with pytest.raises(PrivacyError, match="must be a positive finite number"):
        stddev(built("buffered", "float32").artifact, **{"noise_multiplier": 1.0, "clip_norm": 1.0, **given})


def test_a_scale_that_float32_cannot_hold_is_refused(built: Any) -> None:
    with pytest.raises(PrivacyError, match="float32 cannot hold"):
        stddev(built("buffered", "float32").artifact, noise_multiplier=1e30, clip_norm=1e30)


@strategies
def test_a_step_past_the_horizon_has_no_noise_that_repeats(strategy: str, built: Any) -> None:
    """Raised where the index is known; under jit and scan the rows are NaN from the horizon on, and only there."""
    matrix, n = streaming_matrix(built(strategy, "float32").artifact), 12
    white, state = jnp.ones(3), matrix.init_multiply(jnp.ones(3))
    for _ in range(n):
        _, state = matrix.multiply_next(white, state)
    with pytest.raises(HorizonError, match="step 12 is at or past the horizon of 12"):
        matrix.multiply_next(white, state)
    rows = np.asarray(jax.jit(matrix.__matmul__)(jnp.ones((n + 3, 3))))
    assert np.isfinite(rows[:n]).all()
    assert np.isnan(rows[n:]).all()


def test_noise_of_low_precision_is_refused(built: Any) -> None:
    """For bf16 gradients the privatizer would draw bf16 noise; told to draw float32, it does."""
    matrix = streaming_matrix(built("buffered", "float32").artifact)
    sums = jnp.zeros(3, jnp.bfloat16)
    chosen = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=0)
    with pytest.raises(AdapterError, match=r"dtype=jnp\.float32"):
        chosen.update(sums, chosen.init(sums))
    chosen = noise_addition.matrix_factorization_privatizer(matrix, stddev=1.0, prng_key=0, dtype=jnp.float32)
    noisy, _ = jax.jit(chosen.update)(sums, chosen.init(sums))
    assert noisy.dtype == jnp.bfloat16


def test_our_privatizer_stands_where_theirs_do(built: Any, key: NoiseKey) -> None:
    """Called by jax_privacy's argument names: rows of mmfact's own key, bit for bit those of a stream."""
    artifact = built("buffered", "float32").artifact
    scales = {"noise_multiplier": 1.3, "clip_norm": 0.7, "key": key, "run": bytes(16)}
    stream = NoiseStream(artifact, 6, name="['w']", **scales)
    params = {"w": jnp.zeros((2, 3))}
    chosen = privatizer(ModelNoise(artifact, tensors(params), **scales))
    state = chosen.init(params)
    for _ in range(3):
        noisy, state = chosen.update(sum_of_clipped_grads=params, noise_state=state)
        np.testing.assert_array_equal(np.ravel(noisy["w"]), stream.next())


@pytest.mark.parametrize("hidden", ["jax", "jax_privacy"])
def test_a_missing_package_is_named_with_its_extra(hidden: str) -> None:
    code = f"import sys; sys.modules[{hidden!r}] = None\nimport mmfact.noise.jax_privacy"
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd="/")
    assert (
        child.stderr.strip()
        .splitlines()[-1]
        .endswith('AdapterError: mmfact.noise.jax_privacy needs jax_privacy: pip install "mmfact[jax-privacy]"')
    )
