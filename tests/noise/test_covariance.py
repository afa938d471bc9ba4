"""What the rows are: sigma clip s C^-1 Z exactly, and its covariance over 20,000 streams.

N = 20,000 streams of n = 16 steps; each test's false-alarm rate is 1e-6 (see `covariance_bound` in conftest.py). C is
read from the artifact and inverted by numpy; A comes from a simulated optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.noise import NoiseKey
from mmfact.noise.source import NoiseSource

STREAMS = 20_000
ALARM = 1e-6
SIGMA, CLIP = 1.3, 0.7

everything = pytest.mark.parametrize("name", ["prefix-sum", "momentum", "custom"])
both_spaces = pytest.mark.parametrize("space", ["gradient", "iterate"])
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])


def noise_matrix(case: Any, space: str, sensitivity: float | None = None) -> np.ndarray:
    """sigma clip s C^-1, or times A: by numpy from the stored C and the simulated A; s by default that of C."""
    C = case.artifact.C
    s = np.linalg.norm(C, axis=0).max() if sensitivity is None else sensitivity
    M = SIGMA * CLIP * s * np.linalg.inv(C)
    return case.A @ M if space == "iterate" else M


@everything
@both_spaces
@both_dtypes
def test_covariance_of_a_long_row(
    name: str, space: str, dtype: str, case: Any, stream: Any, rows_of: Any, covariance_bound: Any
) -> None:
    """Elements of a row are independent streams: under-scaled, transposed or uncorrelated noise shows here."""
    subject = case(name, dtype=dtype)
    rows = rows_of(
        stream(subject.artifact, STREAMS, space=space, dtype=dtype, run=bytes(16), key=NoiseKey.insecure_from_seed(3))
    ).astype(np.float64)
    M = noise_matrix(subject, space)
    S, Sigma = rows @ rows.T / STREAMS, M @ M.T
    assert (np.abs(S - Sigma) <= covariance_bound(Sigma, STREAMS, ALARM)).all()


@everything
def test_the_covariance_test_would_notice(
    name: str, case: Any, stream: Any, rows_of: Any, covariance_bound: Any
) -> None:
    """The usual faults lie outside the bound: C for C^-1, the transpose, white noise, a variance 10 % too small."""
    subject = case(name)
    rows = rows_of(stream(subject.artifact, STREAMS, dtype="float64", run=bytes(16)))
    S, C = rows @ rows.T / STREAMS, subject.artifact.C
    M = noise_matrix(subject, "gradient")
    scale = (SIGMA * CLIP) ** 2
    wrongs = {"C": scale * C @ C.T, "transposed": M.T @ M, "white": scale * np.eye(len(M)), "small": 0.9 * M @ M.T}
    for fault, Sigma in wrongs.items():
        assert (np.abs(S - Sigma) > covariance_bound(Sigma, STREAMS, ALARM)).any(), fault


@both_spaces
def test_covariance_over_keys_and_runs(space: str, case: Any, stream: Any, rows_of: Any, covariance_bound: Any) -> None:
    """500 streams of 40 elements, each with its own key and run: no correlation may hide in what they share."""
    subject = case("momentum")
    blocks = [
        rows_of(
            stream(
                subject.artifact,
                40,
                space=space,
                dtype="float64",
                key=NoiseKey.insecure_from_seed(seed),
                run=seed.to_bytes(16, "big"),
            )
        )
        for seed in range(500)
    ]
    rows = np.concatenate(blocks, axis=1)
    assert rows.shape == (16, STREAMS)
    M = noise_matrix(subject, space)
    Sigma = M @ M.T
    assert (np.abs(rows @ rows.T / STREAMS - Sigma) <= covariance_bound(Sigma, STREAMS, ALARM)).all()
    # Two streams have nothing in common: 250 pairs of streams give N = 10,000 pairs of columns a lag apart.
    first, second = np.concatenate(blocks[::2], axis=1), np.concatenate(blocks[1::2], axis=1)
    both = np.concatenate([first, second])
    Sigma = np.kron(np.eye(2), M @ M.T)
    N = first.shape[1]
    assert (np.abs(both @ both.T / N - Sigma) <= covariance_bound(Sigma, N, ALARM)).all()


def test_neighbouring_rows_are_correlated_as_the_strategy_says(
    case: Any, stream: Any, rows_of: Any, covariance_bound: Any
) -> None:
    """The trap of fresh draws per row: rows t and t+1 of a prefix sum must cancel (correlation below -0.25)."""
    subject = case("prefix-sum")
    rows = rows_of(stream(subject.artifact, STREAMS, dtype="float64", run=bytes(16)))
    M = noise_matrix(subject, "gradient")
    Sigma = M @ M.T
    bound = covariance_bound(Sigma, STREAMS, ALARM)
    for t in range(15):
        assert Sigma[t, t + 1] < -0.25 * np.sqrt(Sigma[t, t] * Sigma[t + 1, t + 1]) < -bound[t, t + 1]
        assert abs(rows[t] @ rows[t + 1] / STREAMS - Sigma[t, t + 1]) <= bound[t, t + 1]


@everything
@both_spaces
@both_dtypes
def test_rows_are_exactly_the_strategy_times_white_rows(
    name: str, space: str, dtype: str, case: Any, stream: Any, rows_of: Any, key: NoiseKey
) -> None:
    """Row t is (sigma clip s [A] C^-1 Z)[t], s the sensitivity used: to 1e-12 in float64, one rounding in float32."""
    subject = case(name, dtype=dtype)
    made = stream(subject.artifact, 200, space=space, dtype=dtype, name="w", offset=3, total=500)
    source = NoiseSource(key, made.run, subject.artifact.digest, "w", np.dtype(dtype))
    Z = np.empty((16, 200), dtype)
    for t, row in enumerate(Z):
        source.fill(t, 3, row)
    expected = noise_matrix(subject, space, made.sensitivity) @ Z.astype(np.float64)
    rows = rows_of(made)
    assert rows.dtype == dtype
    tolerance = 1e-12 if dtype == "float64" else 2.0**-23
    np.testing.assert_allclose(rows, expected, rtol=tolerance, atol=1e-12 * np.abs(expected).max())


@everything
def test_iterate_rows_are_the_optimizer_run_over_gradient_rows(name: str, case: Any, stream: Any, rows_of: Any) -> None:
    """theta_0 - (A G + B Z) and the optimizer fed with G + C^-1 Z are the same run, to 1e-12.

    Up to the sensitivity used, whose margin for rounding is larger in iterate space.
    """
    subject = case(name)
    gradient = stream(subject.artifact, 50, dtype="float64")
    iterate = stream(subject.artifact, 50, dtype="float64", space="iterate", run=gradient.run)
    expected = subject.A @ rows_of(gradient) * (iterate.sensitivity / gradient.sensitivity)
    np.testing.assert_allclose(rows_of(iterate), expected, rtol=0, atol=1e-12 * np.abs(expected).max())


@pytest.mark.parametrize(("noise_multiplier", "clip_norm"), [(2.6, 0.7), (1.3, 1.4), (5.2, 0.35)])
def test_the_scale_is_the_product_of_sigma_and_clip_norm(
    noise_multiplier: float, clip_norm: float, stream: Any, rows_of: Callable[..., np.ndarray]
) -> None:
    """Either one forgotten or squared would change epsilon."""
    one = stream(dtype="float64", run=bytes(16))
    two = stream(dtype="float64", run=bytes(16), noise_multiplier=noise_multiplier, clip_norm=clip_norm)
    np.testing.assert_allclose(rows_of(two), 2 * rows_of(one), rtol=1e-12)


@pytest.mark.parametrize("factor", [0.125, 3.0])
def test_noise_follows_the_coefficients_and_not_their_unit(factor: float, case: Any, stream: Any, rows_of: Any) -> None:
    """C scaled by 3 has 3 times the sensitivity and the same noise; the trap: noise halved by an old sensitivity."""
    artifact = case("momentum").artifact
    scaled = dataclasses.replace(artifact, strategy=DenseStrategy.from_matrix(factor * artifact.C))
    made = stream(scaled, dtype="float64", run=bytes(16))
    assert made.sensitivity == pytest.approx(factor, rel=1e-9)
    np.testing.assert_allclose(rows_of(made), rows_of(stream(artifact, dtype="float64", run=bytes(16))), rtol=1e-9)
