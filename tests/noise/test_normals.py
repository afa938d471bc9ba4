"""Words to standard normals: every word of float32, float64 and refined tails against mpmath, and the distribution.

The statistical tests are seeded, so each passes or fails for good; the false-alarm rate is the probability that a right
generator would have failed at a seed chosen blindly.
"""

from __future__ import annotations

import hashlib
import itertools
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import mpmath
import numpy as np
import numpy.typing as npt
import pytest
from numba import njit
from scipy import special, stats

from mmfact.noise import NoiseKey, normal
from mmfact.noise.normal import normals, refine
from mmfact.noise.source import NoiseSource

Array = npt.NDArray[Any]

ALARM = 1e-6
OUTERMOST = {32: 1 << 16, 64: 1 << 32}  # cells below have second words
FULL = 1 << 64


def random(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def exact(tail: mpmath.mpf) -> mpmath.mpf:
    """z > 0 with P(N > z) = tail, by Newton's method: call it in mpmath.workdps(50)."""
    start = float(tail)
    x = mpmath.mpf(-NormalDist().inv_cdf(start)) if start < 0.5 else mpmath.sqrt(2 * mpmath.pi) * (0.5 - tail)
    for _ in range(6):
        x += (mpmath.ncdf(-x) - tail) / mpmath.npdf(x)
    return x


def tail_of(cell: int, bits: int, second: int | None = None) -> mpmath.mpf:
    within = mpmath.mpf(0.5) if second is None else (second + mpmath.mpf(0.5)) / FULL
    return (cell + within) / mpmath.mpf(2) ** bits


def word_of(cell: int, bits: int) -> int:
    """That of a positive normal; the opposite one has all its bits turned."""
    return 2 ** (bits - 1) - 1 - cell


def turned(word: int, bits: int) -> int:
    return 2**bits - 1 - word


def made(words: Array) -> Array:
    out = np.full(len(words), np.nan, f"f{words.itemsize}")
    normals(words, out)
    return out


# -------------------------------------------------------------------------------------------- float32, every word


NODES = 1024  # words between two nodes of the reference


def quantiles(first: int, count: int) -> Array:
    """Normals of float32's words first, first + 1, ... < 2^31 in float64; `first` and `count` are multiples of 1,024.

    Scipy's inverse functions at every 1,024th word (about 4e-16), from there Taylor's polynomial of degree 4, because
    they take 40 ns a value: z' = f = 1 / density(z), z'' = z f^2, z''' = (1 + 2 z^2) f^3, z'''' = (7 z + 6 z^3) f^4.
    """
    q = (first + NODES * np.arange(count // NODES) + NODES / 2) / 2.0**32
    z = np.where(q < 0.3, math.sqrt(2) * special.erfinv(2 * q), -special.ndtri(0.5 - q))
    f = math.sqrt(2 * math.pi) * np.exp(z * z / 2) / 2.0**32  # of a word
    terms = [z, f, z * f**2 / 2, (1 + 2 * z**2) * f**3 / 6, (7 * z + 6 * z**3) * f**4 / 24]
    out = np.empty(count)
    _taylor(np.array(terms).T.copy(), out)
    return out


@njit
def _taylor(terms: Array, out: Array) -> None:
    for node in range(len(terms)):
        a, b, c, d, e = terms[node]
        for i in range(NODES):
            h = i + 0.5 - NODES / 2
            out[NODES * node + i] = a + h * (b + h * (c + h * (d + h * e)))


@njit
def _compare(found: Array, mirrored: Array, expected: Array) -> tuple[float, int]:
    """The largest error in units in the last place of float32, and how many are not opposite when mirrored."""
    worst, wrong = 0.0, 0
    scale = np.empty(1024)
    bits = scale.view(np.int64)
    for start in range(0, len(found), 1024):
        for i in range(1024):
            scale[i] = expected[start + i]
        for i in range(1024):
            # 2^(23 - e) where 2^e is the power of two at or below the expected value.
            bits[i] = ((2 * 1023 + 23) << 52) - (bits[i] & (2047 << 52))
        for i in range(1024):
            error = abs(found[start + i] - expected[start + i]) * scale[i]
            worst = error if not error <= worst else worst
            wrong += mirrored[start + i] != -found[start + i]
    return worst, wrong


def test_the_float64_reference_of_float32_is_the_quantile() -> None:
    """Against 30 digits of mpmath: 1e-11 relative is 1e-4 units of float32. 300 words, more of them at both ends."""
    ends = np.exp2(random(1).uniform(0, 30, 300)).astype(int)
    words = [0, 1, 511, 512, 1023, 2**31 - 2**16 - 1, *ends[:150], *(2**31 - 2**16 - ends[150:])]
    with mpmath.workdps(30):
        for word in map(int, words):
            found = quantiles(word // NODES * NODES, NODES)[word % NODES]
            expected = exact(tail_of(2**31 - 1 - word, 32))
            assert abs(found - expected) <= 1e-11 * expected, word


@pytest.mark.slow
def test_every_float32_word_is_within_two_units_of_the_inverse_cdf() -> None:
    """All 2^32: at most 2 units in the last place, -1 - w the opposite of w exactly, second words asked for where due.

    The largest error is 1.947. An error that grew towards the median or the tail would be a distribution of its own.
    """
    size = 1 << 17
    found, mirrored = np.empty(size, np.float32), np.empty(size, np.float32)
    largest = 0.0
    for first in range(0, 1 << 31, size):
        words = np.arange(first, first + size, dtype=np.uint32)
        at, mirrored_at = normals(words, found), normals(~words, mirrored)
        one_word = min(size, (1 << 31) - OUTERMOST[32] - first)
        assert at == mirrored_at == list(range(one_word, size))
        worst, wrong = _compare(found[:one_word], mirrored[:one_word], quantiles(first, one_word))
        assert wrong == 0, hex(first)
        largest = max(largest, worst)
        assert worst <= 2, hex(first)
    assert largest > 1, "the yardstick moved"


# -------------------------------------------------------------------------------------------- float64


CELLS = {
    "random": random(2).integers(1 << 32, 1 << 63, 300).tolist(),
    "random in the tail": np.exp2(random(3).uniform(32, 63, 300)).astype(np.int64).tolist(),
    "powers of two": [2**k + d for k in range(33, 63) for d in (-1, 0, 1)],
    "towards the median": [2**63 - 2**k - d for k in range(63) for d in (0, 1)],
    "boundaries": [2**32, 2**32 + 1, *(int(0.075 * 2**64) + d for d in range(-5000, 5000, 999)), 2**63 - 1],
}


@pytest.mark.parametrize("cells", CELLS.values(), ids=CELLS)
def test_float64_words_are_the_inverse_cdf_to_1e_15(cells: list[int]) -> None:
    """Relative, to the median and to 6.23; -1 - w the opposite of w exactly.

    A tail cut short, or one computed from 1 - p, would bound the noise where privacy needs it unbounded.
    """
    words = np.array([word_of(cell, 64) for cell in cells], np.uint64)
    found = made(words)
    assert made(~words).tolist() == (-found).tolist()
    with mpmath.workdps(50):
        for cell, value in zip(cells, found.tolist(), strict=True):
            expected = exact(tail_of(cell, 64))
            assert abs(value - expected) <= 1e-15 * expected, hex(cell)


def test_float64_words_are_opposite_when_mirrored_and_monotone() -> None:
    """10^6 sorted words: larger ones never lie nearer to the median, by more than rounding (1e-15 relative)."""
    words = np.sort(random(4).integers(0, 2**63 - 2**32, 1_000_000, dtype=np.uint64))
    found = made(words)
    np.testing.assert_array_equal(made(~words), -found)
    assert (np.diff(found) >= -1e-15 * found[1:]).all()
    assert (found > 0).all()


# -------------------------------------------------------------------------------------------- second words


SECONDS = [0, 1, 2, 3, 2**53 - 1, 2**53 + 1, 2**63 - 1, 2**63, FULL - 2**11, FULL - 2**10, FULL - 2, FULL - 1]
SEAM = int(mpmath.exp(-25) * FULL)  # float64: the cell where one rational function ends and the next begins


def crafted(bits: int) -> list[tuple[int, int]]:
    """Cells and second words."""
    last = OUTERMOST[bits] - 1
    powers = [2**k + d for k in range(bits // 2) for d in (-1, 0, 1) if 2**k + d <= last]
    seam = [SEAM + d for d in (-1, 0, 1)] if bits == 64 else [0]
    cells, seconds = random(5).integers(0, last, 150).tolist(), random(6).integers(0, FULL, 150, np.uint64).tolist()
    return [
        *itertools.product([0, 1, 2, last - 1, last, *seam], SECONDS),
        *((cell, second) for cell in powers for second in (0, 12345 << 48, FULL - 1)),
        *((0, 2**k + d) for k in range(64) for d in (-1, 0)),
        *zip(cells, seconds, strict=True),
    ]


@pytest.mark.parametrize("bits", [32, 64])
def test_refined_normals_are_the_quantiles_of_both_words(bits: int) -> None:
    """Against 50 digits, 1e-15 relative, both signs: a second word put in with the wrong weight or end would show."""
    with mpmath.workdps(50):
        for cell, second in crafted(bits):
            word = word_of(cell, bits)
            found, expected = refine(word, second, bits), exact(tail_of(cell, bits, second))
            assert abs(found - expected) <= 1e-15 * expected, (hex(cell), hex(second))
            assert refine(turned(word, bits), second, bits) == -found


@pytest.mark.parametrize(("bits", "largest", "truncated"), [(32, 11.3034113621, 96), (64, 13.1086261745, 128)])
def test_the_largest_magnitude_and_what_lies_beyond(bits: int, largest: float, truncated: int) -> None:
    """A true normal is beyond it, on either side, with probability 2^-96 or 2^-128: the noise is bounded there."""
    found = refine(word_of(0, bits), 0, bits)
    assert found == pytest.approx(largest, abs=1e-10)
    with mpmath.workdps(50):
        beyond = mpmath.erfc(exact(tail_of(0, bits, 0)) / mpmath.sqrt(2))
        assert abs(beyond * mpmath.mpf(2) ** truncated - 1) < mpmath.mpf("1e-40")


@pytest.mark.parametrize(("bits", "starts"), [(32, 4.169569), (64, 6.230260)])
def test_refined_normals_go_on_where_those_of_one_word_end(bits: int, starts: float) -> None:
    """No gap and no overlap at 4.17 and 6.23; larger second words lie nearer to the median, over every seam."""
    last = OUTERMOST[bits] - 1
    one = float(made(np.array([word_of(last + 1, bits)], f"u{bits // 8}"))[0])
    nearest = refine(word_of(last, bits), FULL - 1, bits)
    assert nearest == pytest.approx(starts, abs=1e-6)
    with mpmath.workdps(30):
        step = exact(tail_of(last, bits, FULL - 1)) - exact(tail_of(last + 1, bits))
    rounding = 2 * float(np.spacing(np.float32(one))) if bits == 32 else 1e-14
    assert 0 < nearest - one <= float(step) + rounding
    ordered = [refine(word_of(cell, bits), second, bits) for cell, second in sorted(crafted(bits))]
    assert (np.diff(ordered) <= 1e-15 * np.array(ordered[1:])).all()


@pytest.mark.parametrize("bits", [32, 64])
def test_exactly_the_outermost_words_are_to_be_refined(bits: int) -> None:
    """Words at both sides of each boundary, all over three chunks and alone: one missed would be a tail cut short."""
    last = OUTERMOST[bits] - 1
    there = [word_of(cell, bits) for cell in (0, 1, last // 2, last - 1, last)]
    not_there = [word_of(cell, bits) for cell in (last + 1, last + 2, 2 * last, 2 ** (bits - 1) - 1)]
    pool = [*there, *(turned(word, bits) for word in there), *not_there, *(turned(word, bits) for word in not_there)]
    picks = np.concatenate([np.arange(18), random(7).integers(0, 18, 3000), np.arange(18)])
    words = np.array(pool, f"u{bits // 8}")[picks]
    out = np.empty(len(words), f"f{bits // 8}")
    assert normals(words, out) == np.flatnonzero(picks < 10).tolist()
    for at in range(18):  # the only one of its chunk
        assert normals(words[at : at + 1], out[:1]) == [0] * (at < 10)


# -------------------------------------------------------------------------------------------- the same everywhere


def mixed(bits: int, count: int) -> Array:
    """Uniform words, and words at all distances from the median and from the end, of both signs."""
    kind, draw = np.dtype(f"u{bits // 8}"), random(8)
    uniform = draw.integers(0, 2**bits, count, dtype=np.uint64).astype(kind)
    near = np.exp2(draw.uniform(0, bits - 1, count)).astype(np.uint64).astype(kind)
    far = kind.type(2 ** (bits - 1) - 1) - near
    words = np.concatenate([uniform, near, ~near, far, ~far])
    return np.array(draw.permutation(words)[:count])


@pytest.mark.parametrize("bits", [32, 64])
def test_a_value_depends_on_its_word_alone(bits: int) -> None:
    """Not on its place in a vector register or a chunk of 1,024, nor on length, in any bit: or shards would differ."""
    words = mixed(bits, 3200)
    whole = made(words)
    alone = np.concatenate([made(words[i : i + 1]) for i in range(len(words))])
    assert alone.tobytes() == whole.tobytes()
    lengths = [*range(1, 71), 1023, 1024, 1025, 2047, 2048, 2049, 3000]
    for first, count in itertools.product([0, 1, 2, 3, 5, 7, 8, 13, 16, 17, 31], lengths):
        out = np.full(count + 2, 7.0, whole.dtype)
        normals(words[first : first + count], out[1:-1])
        assert out[1:-1].tobytes() == whole[first : first + count].tobytes()
        assert out[0] == out[-1] == 7


@pytest.mark.parametrize("bits", [32, 64])
def test_compiled_code_rounds_every_operation_as_written(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """5,000 words, bit for bit as the same lines run by Python, one numpy scalar at a time.

    One IEEE operation after the other is what every platform gives; a fused or reordered one would show in some words.
    """
    words = mixed(bits, 5000)
    compiled, found = made(words), normals(words, np.empty(len(words), f"f{bits // 8}"))
    kernel = normal._normals32 if bits == 32 else normal._normals64
    for name in ("_cell32", "_cell64", "_log", "_ratio"):
        monkeypatch.setattr(normal, name, getattr(normal, name).py_func)
    by_hand, places = np.full(len(words), np.nan, compiled.dtype), np.empty(len(words), np.int32)
    many = kernel.py_func(words, by_hand, places)
    assert by_hand.tobytes() == compiled.tobytes()
    assert places[:many].tolist() == found


def test_compiled_refinement_rounds_every_operation_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for second words: both parts of the far tail, both word lengths."""
    cases = [(word_of(cell, bits), second, bits) for bits in (32, 64) for cell, second in crafted(bits)]
    compiled = [refine(*case) for case in cases]
    for name in ("_log", "_ratio", "_tail"):
        monkeypatch.setattr(normal, name, getattr(normal, name).py_func)
    assert [refine(*case) for case in cases] == compiled


# -------------------------------------------------------------------------------------------- the distribution


REFINED = 4.1696  # just inside what second words make for float32
LAGS = range(1, 17)  # a block of the keystream is 16 elements of float32, 8 of float64
CELL, REACH = 256, 16  # histogram: cells of 1/256, from -16 to 16


@dataclass(frozen=True)
class Draws:
    """What is kept of a row's draws: sums, in float64, of pieces that fit a cache."""

    count: int
    powers: Array  # sums of z, z^2, ..., z^6
    products: Array  # sums of z_i z_(i + lag) within pieces
    squares: Array  # sums of (z_i^2 - 1)(z_(i + lag)^2 - 1) within pieces
    pairs: Array  # terms of those
    histogram: Array
    far: Array  # draws beyond REFINED

    def beyond(self, sigma: int) -> int:
        return int(self.histogram[: (REACH - sigma) * CELL].sum() + self.histogram[(REACH + sigma) * CELL :].sum())


@pytest.fixture(
    scope="module",
    params=[pytest.param(("float32", 100_000_000), marks=pytest.mark.slow), ("float64", 10_000_000)],
    ids=["float32", "float64"],
)
def draws(request: pytest.FixtureRequest) -> Draws:
    """10^8 draws of float32, 10^7 of float64: one row each, filled piece after piece."""
    dtype, count = request.param
    digest = hashlib.sha256(b"distribution").hexdigest()
    source = NoiseSource(NoiseKey.insecure_from_seed(1), bytes(16), digest, "", np.dtype(dtype))
    size = 100_000
    piece = np.empty(size, dtype)
    powers, histogram, far = np.zeros(6), np.zeros(2 * REACH * CELL, np.int64), []
    products, squares, pairs = np.zeros(len(LAGS)), np.zeros(len(LAGS)), np.zeros(len(LAGS))
    for first in range(0, count, size):
        source.fill(3, first, piece)
        z = piece.astype(np.float64)
        z2 = z * z
        z3 = z2 * z
        powers += [z.sum(), z2.sum(), z3.sum(), z2 @ z2, z2 @ z3, z3 @ z3]
        histogram += np.bincount(((z + REACH) * CELL).astype(np.int64), minlength=2 * REACH * CELL)
        far.append(z[np.abs(z) > REFINED])
        z2 -= 1
        for at, lag in enumerate(LAGS):
            products[at] += z[lag:] @ z[:-lag]
            squares[at] += z2[lag:] @ z2[:-lag]
            pairs[at] += size - lag
    return Draws(count, powers, products, squares, pairs, histogram, np.concatenate(far))


def test_moments(draws: Draws) -> None:
    """Means of z, ..., z^6, Gaussian tail (so many draws), union bound over the six: false alarm 1e-6.

    E z^k = (k-1)!! for even k, 0 for odd; Var z^k = (2k-1)!! - (E z^k)^2.
    """
    z = NormalDist().inv_cdf(1 - ALARM / (2 * 6))
    expected = [(0, 1), (1, 2), (0, 15), (3, 96), (0, 945), (15, 10170)]
    for total, (mean, variance) in zip(draws.powers, expected, strict=True):
        assert abs(total / draws.count - mean) <= z * math.sqrt(variance / draws.count), mean


def test_kolmogorov_smirnov(draws: Draws) -> None:
    """Massart 1990: P(sqrt(N) D > c) <= 2 exp(-2 c^2) for every N; c = 2.69 at a false-alarm rate of at most 1e-6.

    D over the multiples of 1/256 only, which is never more than D; between them the histogram tests below.
    """
    edges = np.arange(-REACH * CELL, REACH * CELL) / CELL
    below = np.concatenate([[0], np.cumsum(draws.histogram)[:-1]])
    distance = np.abs(below / draws.count - special.ndtr(edges)).max()
    assert draws.histogram.sum() == draws.count
    assert math.sqrt(draws.count) * distance <= math.sqrt(math.log(2 / ALARM) / 2)


def test_no_cell_of_the_histogram_stands_out(draws: Draws) -> None:
    """Pearson's chi-square over the cells of 1/256 of at least 1,000 expected draws; false alarm 1e-6."""
    edges = np.arange(-REACH * CELL, REACH * CELL + 1) / CELL
    expected = draws.count * np.diff(special.ndtr(edges))
    many = expected >= 1000
    statistic = (((draws.histogram - expected) ** 2)[many] / expected[many]).sum()
    assert many.sum() > 1000
    assert statistic <= stats.chi2.isf(ALARM, many.sum())


@pytest.mark.parametrize("sigma", [3, 4, 5])
def test_tail_counts(draws: Draws, sigma: int) -> None:
    """Draws beyond +-sigma are binomial; exact two-sided interval, false alarm 1e-6.

    10^8 draws have 6,334 and 57 beyond 4 and 5; of 10^7 (6 beyond 5) only too many can be told there.
    """
    low, high = stats.binom.interval(1 - ALARM, draws.count, math.erfc(sigma / math.sqrt(2)))
    assert low <= draws.beyond(sigma) <= high


def test_the_tail_is_right_in_number_sign_and_shape(draws: Draws) -> None:
    """Beyond 4.1696, where float32 begins to refine (3,051 of 10^8, 305 of 10^7): count and sign binomial, p uniform.

    False alarm 1e-6 each: exact binomial intervals, and Massart's bound for Kolmogorov-Smirnov.
    """
    probability = math.erfc(REFINED / math.sqrt(2))
    low, high = stats.binom.interval(1 - ALARM, draws.count, probability)
    assert low <= len(draws.far) <= high
    low, high = stats.binom.interval(1 - ALARM, len(draws.far), 0.5)
    assert low <= (draws.far > 0).sum() <= high
    p = np.sort(2 * special.ndtr(-np.abs(draws.far)) / probability)
    ranks = np.arange(len(p)) / len(p)
    distance = max((p - ranks).max(), (ranks + 1 / len(p) - p).max())
    assert math.sqrt(len(p)) * distance <= math.sqrt(math.log(2 / ALARM) / 2)


def test_neighbours_in_a_row_are_uncorrelated(draws: Draws) -> None:
    """Lags 1 to 16, values and squares (products: variance 1 and 4); Gaussian tail, union over 32: false alarm 1e-6."""
    z = NormalDist().inv_cdf(1 - ALARM / (2 * 2 * len(LAGS)))
    assert (np.abs(draws.products) <= z * np.sqrt(draws.pairs)).all()
    assert (np.abs(draws.squares) <= z * np.sqrt(4 * draws.pairs)).all()
