"""What a refresh records: its figures against dense arithmetic, and what it estimates against known signals."""

from __future__ import annotations

import json
import math
import warnings
from typing import Any

import numpy as np
import pytest
from scipy import stats

from mmfact.noise.projector import Projector, _Whole, random_projector, top_eigenspace
from mmfact.noise.refresh import Refresh, noisy_explained, observe

Array = np.ndarray

P_SIZE, K = 60, 4
ALARM = 5.4  # standard deviations, which each of the ten means here exceeds with probability 7e-8


def gradients(m: int, seed: int) -> Array:
    random = np.random.default_rng(seed)
    return random.standard_normal((m, P_SIZE)) * np.geomspace(1, 0.1, P_SIZE)


def dense(P: Array, k: int) -> Array:
    return np.linalg.svd(P, full_matrices=False)[2][:k].T


def seen(projector: Projector, **options: Any) -> Refresh:
    return observe(projector, 7, "computed", **{"previous": None, "held_out": None, "shards": _Whole(), **options})


def test_figures_are_the_dense_ones() -> None:
    P, before, held_out = gradients(12, 0), gradients(12, 1), gradients(9, 2)
    V, W, H = dense(P, K), dense(before, K), dense(held_out, K)
    found = seen(
        top_eigenspace({"a": P[:, :20], "b": P[:, 20:]}, K),
        previous=top_eigenspace({"a": before[:, :20], "b": before[:, 20:]}, K),
        held_out={"a": held_out[:, :20], "b": held_out[:, 20:]},
    )
    values = np.linalg.svd(P, compute_uv=False) ** 2 / 12
    inside = held_out @ V
    errors = [np.linalg.norm(g - V @ (V.T @ g)) / np.linalg.norm(g) for g in held_out]
    wanted = {
        "step": 7,
        "source": "computed",
        "explained": values[:K].sum() / values.sum(),
        "gap": values[K - 1] - values[K],
        "rank": 12,
        "held_out_explained": np.square(inside).sum() / np.square(held_out).sum(),
        "held_out_error": np.mean(errors),
        "distance_to_held_out": np.linalg.norm(V @ V.T - H @ H.T, 2),
        "distance_to_previous": np.linalg.norm(V @ V.T - W @ W.T, 2),
        "noisy_explained": None,
    }
    record = found.record()
    assert record.keys() == wanted.keys()
    for name, value in wanted.items():
        assert record[name] == (pytest.approx(value, rel=1e-5) if isinstance(value, float) else value), name
    assert json.loads(json.dumps(record)) == record


def test_what_was_not_asked_for_is_not_there() -> None:
    found = seen(top_eigenspace(gradients(12, 0), K))
    assert found.held_out_explained is found.held_out_error is found.distance_to_held_out is None
    assert found.distance_to_previous is None


def test_held_out_gradients_of_too_small_a_rank() -> None:
    """They have no subspace to compare with, of as many dimensions; their energy is seen all the same."""
    P, few = gradients(12, 0), gradients(K - 1, 2)
    for held_out in (few, np.concatenate([few, few])):
        found = seen(top_eigenspace(P, K), held_out=held_out)
        assert found.distance_to_held_out is None
        V = dense(P, K)
        wanted = np.square(held_out @ V).sum() / np.square(held_out).sum()
        assert found.held_out_explained == pytest.approx(wanted, rel=1e-5)


def test_random_projection_has_no_spectrum() -> None:
    """And is compared with no other subspace: two random ones are nearly orthogonal."""
    drawn, before = (random_projector(P_SIZE, K, seed=seed) for seed in (b"one", b"two"))
    held_out = gradients(9, 2)
    found = observe(drawn, 7, "drawn", previous=before, held_out=held_out, shards=_Whole())
    assert found.explained is found.gap is found.distance_to_held_out is found.distance_to_previous is None
    assert found.rank == 0
    V = drawn.basis[""].T.astype(float)
    errors = [np.linalg.norm(g - V @ (V.T @ g)) / np.linalg.norm(g) for g in held_out]
    assert found.held_out_error == pytest.approx(np.mean(errors), rel=1e-5)
    assert found.held_out_explained == pytest.approx(
        np.square(held_out @ V).sum() / np.square(held_out).sum(), rel=1e-5
    )


def test_every_sum_is_over_the_shards() -> None:
    """Figures of one process's elements alone would differ between processes. A sum that doubles everything shows."""

    class Twice(_Whole):
        def sum(self, array: Array) -> Array:
            return 2 * array

    P, other = gradients(12, 0), gradients(9, 2)
    twin = top_eigenspace(np.concatenate([P, P], axis=1), K)  # of which each of two processes has a half
    half = Projector({"": twin.basis[""][:, :P_SIZE]}, twin.eigenvalues, twin.spectrum, twin.energy, "eigen", 12, 12)
    before = top_eigenspace(np.concatenate([other, other], axis=1), K)
    half_before = Projector(
        {"": before.basis[""][:, :P_SIZE]}, before.eigenvalues, before.spectrum, before.energy, "eigen", 9, 9
    )
    one = seen(twin, previous=before, held_out=np.concatenate([other, other], axis=1)).record()
    two = seen(half, previous=half_before, held_out=other, shards=Twice()).record()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert two[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), name


def test_held_out_gradients_that_are_not_finite_stop_no_training() -> None:
    """They are looked at, not used."""
    held_out = gradients(9, 2)
    held_out[3, 3] = np.nan
    found = seen(top_eigenspace(gradients(12, 0), K), held_out=held_out)
    assert (found.held_out_explained, found.held_out_error, found.distance_to_held_out) == (None, None, None)
    assert found.explained is not None


# --- the private gradient's energy, from the noisy one --------------------------------------------------


def signal(p: int, k: int, part: float, energy: float) -> tuple[Array, Array]:
    """V, p x k, and a gradient of this energy with this part of it in V's space."""
    random = np.random.default_rng(5)
    V = np.linalg.qr(random.standard_normal((p, k)))[0]
    inside = V @ random.standard_normal(k)
    outside = random.standard_normal(p)
    outside -= V @ (V.T @ outside)
    inside *= math.sqrt(part * energy) / np.linalg.norm(inside)
    outside *= math.sqrt((1 - part) * energy) / np.linalg.norm(outside)
    return V, inside + outside


def estimates(V: Array, g: Array, deviation: float, runs: int, seed: int = 0) -> tuple[Array, Array]:
    """Of `runs` noisy gradients: the estimates (nan: None), and the squared norms."""
    p = len(V)
    random = np.random.default_rng(seed)
    found, norms = np.empty(runs), np.empty(runs)
    for run in range(runs):
        noisy = g + deviation * random.standard_normal(p)
        norms[run] = noisy @ noisy
        value = noisy_explained(V.T @ noisy, float(norms[run]), float(p), deviation)
        found[run] = np.nan if value is None else value
    return found, norms


@pytest.mark.parametrize("part", [0.0, 0.3, 0.9])
def test_private_energy_is_estimated_without_bias(part: float) -> None:
    """20,000 noisy gradients, energy E = 40 deviations of the noise's: sqrt(2 p) s^2 each, so that none is hidden.

    Numerator N and denominator S are unbiased. The ratio's bias, to second order, is
    N/S (var S / S^2 - cov(N, S) / (N S)) = 2 s^4 (part p - k) / E^2 = (part - k/p) / 1600; 1e-4 is for the rest.
    Without the noise's subtraction it would be k s^2 / E = 0.018 too high.
    """
    p, k, s, runs = 400, 20, 0.7, 20_000
    energy = 40 * math.sqrt(2 * p) * s**2
    V, g = signal(p, k, part, energy)
    found, norms = estimates(V, g, s, runs)
    assert not np.isnan(found).any()
    wanted = part + (part - k / p) / 1600
    assert abs(found.mean() - wanted) <= ALARM * found.std() / math.sqrt(runs) + 1e-4
    assert found.std() / math.sqrt(runs) < 3e-4
    # Times what it was divided by it is the energy inside, with no bias at all.
    inside = found * (norms - p * s**2)
    assert abs(inside.mean() - part * energy) <= ALARM * inside.std() / math.sqrt(runs)


@pytest.mark.parametrize("size", [0.0, 2.0, 4.0, 8.0])
def test_energy_that_the_noise_hides(size: float) -> None:
    """A signal of this many deviations of the noise's energy is shown as often as its noisy energy exceeds four.

    |noisy|^2 / s^2 is noncentral chi-squared of p degrees: of 2000 the number shown is binomial. False alarm 1e-7 each.
    """
    p, s, runs = 1000, 0.3, 2000
    V, g = signal(p, 5, 0.5, size * math.sqrt(2 * p) * s**2)
    found, _ = estimates(V, g, s, runs)
    chance = stats.ncx2.sf(p + 4 * math.sqrt(2 * p), p, size * math.sqrt(2 * p))
    low, high = stats.binom.ppf(5e-8, runs, chance), stats.binom.isf(5e-8, runs, chance)
    assert low <= (~np.isnan(found)).sum() <= high
    assert high < 0.01 * runs if size == 0 else low > 0.99 * runs if size == 8 else True


def test_energy_that_just_shows() -> None:
    """At the threshold, four deviations: below it None, above it the ratio of what remains."""
    p, s = 200, 0.5
    edge = p * s**2 + 4 * s**2 * math.sqrt(2 * p)
    c = np.array([3.0, 4.0])
    assert noisy_explained(c, edge * (1 - 1e-9), p, s) is None
    assert noisy_explained(c, edge * (1 + 1e-9), p, s) == pytest.approx((25 - 2 * s**2) / (edge - p * s**2), rel=1e-6)


def test_energy_without_noise() -> None:
    """A plain ratio; of a gradient of zeros there is none."""
    V, g = signal(100, 3, 0.25, 2.0)
    assert noisy_explained(V.T @ g, float(g @ g), 100, 0.0) == pytest.approx(0.25, rel=1e-12)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert noisy_explained(np.zeros(3), 0.0, 100, 0.0) is None
        assert noisy_explained(np.full(3, np.nan), math.nan, 100, 1.0) is None
