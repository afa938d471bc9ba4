"""Words to standard normals: accuracy against mpmath, and the distribution of what comes out.

The statistical tests are seeded, so each passes or fails for good; the false-alarm rate is the probability that a right
generator would have failed at a seed chosen blindly.
"""

from __future__ import annotations

import hashlib
import math
from statistics import NormalDist

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from mmfact.noise import NoiseKey
from mmfact.noise.source import NoiseSource, normals

DRAWS = 10_000_000
ALARM = 1e-6

RANDOM = np.random.default_rng(11).integers(0, 2**64, 400, dtype=np.uint64).tolist()
EXTREME = [0, 1, 2, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**63 - 2**11, 2**63 - 2**10 - 1, 2**63 + 2**11]
POWERS = [2**k for k in range(64)] + [2**63 - 2**k for k in range(63)] + [2**63 + 2**k for k in range(63)]


@pytest.fixture(scope="module")
def draws() -> np.ndarray:
    """10^7 draws of one row."""
    digest = hashlib.sha256(b"distribution").hexdigest()
    source = NoiseSource(NoiseKey.insecure_from_seed(1), bytes(16), digest, "", np.dtype("float64"))
    return source.row(0, 0, DRAWS)


def exact_normal(word: int) -> mpmath.mpf:
    """The inverse normal CDF of ((low 63 bits) + 1/2) / 2^64, mirrored by the top bit, to 40 digits (Newton)."""
    tail = (mpmath.mpf(word % 2**63) + 0.5) / mpmath.mpf(2) ** 64
    start = float(tail)
    x = mpmath.mpf(NormalDist().inv_cdf(start)) if start < 0.5 else mpmath.mpf(0)
    for _ in range(5):
        x -= (mpmath.ncdf(x) - tail) / mpmath.npdf(x)
    return -x if word >> 63 else x


@pytest.mark.parametrize("words", [RANDOM, EXTREME, POWERS], ids=["random", "extreme", "powers of two"])
def test_normals_are_the_inverse_cdf_of_their_words(words: list[int]) -> None:
    """Relative error at most 1e-15, beside an absolute 1e-16 (words near 2^63 are rounded to 53 bits): deep tails too.

    A tail cut short, or one computed from 1 - p, would bound the noise where privacy needs it unbounded.
    """
    found = normals(np.array(words, dtype=np.uint64))
    with mpmath.workdps(50):
        for word, value in zip(words, found.tolist(), strict=True):
            expected = exact_normal(word)
            assert abs(value - expected) <= 1e-15 * abs(expected) + mpmath.mpf("1e-16"), hex(word)


def test_the_largest_magnitude_is_that_of_the_documentation() -> None:
    """9.15 at words 0 and 2^63; a normal beyond it has probability 6e-20."""
    low, high = normals(np.array([0, 2**63], dtype=np.uint64))
    assert -low == high == pytest.approx(9.15529, abs=1e-5)
    assert math.erfc(high / math.sqrt(2)) == pytest.approx(2.0**-64, rel=1e-12)


def test_the_map_is_symmetric_and_monotone() -> None:
    """The top bit flips the sign and nothing else; larger low bits lie nearer to the median."""
    words = np.sort(np.random.default_rng(5).integers(0, 2**63, 100_000, dtype=np.uint64))
    lower = normals(words)
    np.testing.assert_array_equal(normals(words | np.uint64(2**63)), -lower)
    assert (np.diff(lower) >= 0).all()
    assert np.isfinite(lower).all()


def test_kolmogorov_smirnov(draws: np.ndarray) -> None:
    """Massart 1990: P(sqrt(N) D > c) <= 2 exp(-2 c^2) for every N; c = 2.69 at a false-alarm rate of 1e-6."""
    cdf = special.ndtr(np.sort(draws))
    ranks = np.arange(DRAWS) / DRAWS
    distance = max(float((cdf - ranks).max()), float((ranks + 1 / DRAWS - cdf).max()))
    assert math.sqrt(DRAWS) * distance <= math.sqrt(math.log(2 / ALARM) / 2)


def test_moments(draws: np.ndarray) -> None:
    """Means of z, z^2, z^3, z^4 over 10^7 draws, Gaussian tail, union bound over the four: false alarm 1e-6.

    E z^k = (k-1)!! for even k, 0 for odd; Var z^k = (2k-1)!! - (E z^k)^2.
    """
    z = NormalDist().inv_cdf(1 - ALARM / (2 * 4))
    for k, mean, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((draws**k).mean()) - mean) <= z * math.sqrt(variance / DRAWS), k


@pytest.mark.parametrize("sigma", [3.0, 4.0, 4.5, 5.0])
def test_tail_counts(draws: np.ndarray, sigma: float) -> None:
    """Draws beyond +-sigma are binomial; exact two-sided interval at a false-alarm rate of 1e-6.

    At 5 sigma 5.7 are expected, so only too many can be told there; the exact values far out are tested above.
    """
    probability = math.erfc(sigma / math.sqrt(2))
    low, high = stats.binom.interval(1 - ALARM, DRAWS, probability)
    assert low <= int((np.abs(draws) > sigma).sum()) <= high


def test_neighbours_in_a_row_are_uncorrelated(draws: np.ndarray) -> None:
    """Lags 1 to 16 within a row (a block of ChaCha20 is 8 elements); Gaussian tail, union over 16: false alarm 1e-6."""
    z = NormalDist().inv_cdf(1 - ALARM / (2 * 16))
    for lag in range(1, 17):
        count = DRAWS - lag
        assert abs(float(draws[lag:] @ draws[:-lag]) / count) <= z / math.sqrt(count), lag
