"""Does the installed runtime stream what the artifact promises? A statistical test that any user can run.

The whole stream of the artifact is drawn, under a key made for the test, and C, from its definition, is applied to the
rows: what comes out must be white standard normals, independent between steps and between elements. Every bound below
holds for the sample size at hand, not in the limit of large ones, and together they raise a false alarm with a
probability of `FALSE_ALARM` at most: of a quadratic form x' A x - tr A in standard normals x (Laurent and Massart 2000,
Lemma 1, whose proof holds for weights of either sign)

    P(|x' A x - tr A| > 2 |A|_F sqrt(u) + 2 |A|_2 u) <= 2 exp(-u)

and of the distance D of an empirical distribution (Massart 1990) P(sqrt(N) D > c) <= 2 exp(-2 c^2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.fft
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from mmfact.factorize import machine
from mmfact.factorize.errors import HorizonError, PrivacyError, SolverError
from mmfact.factorize.optimum import Progress, silent
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.factorize.verification_large import column_energies
from mmfact.noise import source
from mmfact.noise.key import NoiseKey
from mmfact.noise.normal import normals, refine
from mmfact.noise.stepping import BLOCK
from mmfact.noise.stream import NoiseStream
from mmfact.store.artifact import Artifact

FALSE_ALARM = 1e-6  # of all statistical checks together, for a runtime that is right

_DRAWS = 1 << 25
_FEWEST, _MOST = 32, 1 << 18  # elements of the tested vector
_PRODUCTS = 5e9  # multiply-adds of a dense strategy, which sums up all past rows at every step
_ITERATES = 4096  # steps compared between the two spaces
_PAIRS = 2048  # steps or elements of which all pairs are compared

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Check:
    """One question to the stream.

    Attributes
    ----------
    name : str
    found, limit : float
        The largest deviation seen, and how far it may go.
    passed : bool
    rule : str
        What was compared.
    """

    name: str
    found: float
    limit: float
    passed: bool
    rule: str


@dataclass(frozen=True)
class Selftest:
    """All checks, and the sample they were made on."""

    steps: int
    elements: int
    false_alarm: float
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)


def selftest(artifact: Artifact, *, on_progress: Callable[[Progress], None] = silent) -> Selftest:
    """Stream `artifact` to its horizon and test what comes out.

    Parameters
    ----------
    artifact : Artifact
    on_progress : callable
        Called with a `Progress` now and then.

    Returns
    -------
    Selftest
        On up to 3e7 values, float32 in gradient space, in less than a minute for horizons up to 2^17.
    """
    elements = _elements(artifact)
    stream = _stream(artifact, elements)
    rows = np.empty((artifact.n, elements), np.float32)
    for step in range(artifact.n):
        stream.next(rows[step])
        if step % 1024 == 0:
            on_progress(Progress("streaming", fraction=step / artifact.n))
    checks = [*_runtime(artifact, stream)]
    on_progress(Progress("undoing the correlation"))
    white = _whiten(artifact.strategy, rows.astype(np.float64) / stream.sensitivity)
    del rows
    statistics = (
        _energy,
        _distances,
        _tails,
        _lags_of_steps,
        _lags_of_elements,
        _pairs_of_steps,
        _pairs_of_elements,
    )
    for statistic in statistics:
        on_progress(Progress(f"testing: {statistic.__name__[1:].replace('_', ' ')}"))
        checks.append(statistic(white, FALSE_ALARM / len(statistics)))
    checks.append(_repeats(white))
    return Selftest(artifact.n, elements, FALSE_ALARM, tuple(checks))


def _elements(artifact: Artifact) -> int:
    """Enough for a sharp test, few enough for a minute."""
    most = _DRAWS // artifact.n
    if artifact.strategy.kind == "dense":
        most = min(most, int(2 * _PRODUCTS / artifact.n**2))
    return max(_FEWEST, min(most, _MOST))


def _stream(artifact: Artifact, size: int, **options: Any) -> NoiseStream:
    """At unit noise: a row is `sensitivity` times a row of C^-1 Z."""
    options = {"key": NoiseKey.ephemeral(), **options}
    return NoiseStream(artifact, size, noise_multiplier=1.0, clip_norm=1.0, **options)


def _whiten(strategy: Strategy, rows: Array) -> Array:
    """C times the rows, from the definition of C."""
    if not isinstance(strategy, BufferedStrategy):
        return np.asarray(strategy.to_dense() @ rows)
    c, g, decay, q = (array.astype(np.float64) for array in strategy.coefficients().values())
    state = np.zeros((strategy.buffers, rows.shape[1]))
    white = np.empty_like(rows)
    for i, row in enumerate(rows):
        white[i] = c[i] * row + g[i] @ state
        state = decay[i][:, None] * state + np.multiply.outer(q[i], row)
    return white


# --- the runtime itself: no statistics, exact ------------------------------------------------------


def _runtime(artifact: Artifact, finished: NoiseStream) -> Iterator[Check]:
    yield _exact("horizon", _refuses(finished), "a step past the horizon is refused")
    yield _exact("keystream", _keystream_is_right(), "ChaCha20 of the installed library gives RFC 8439's test vector")
    yield _quantiles()
    key = NoiseKey.ephemeral()
    size, steps = 2 * BLOCK + 17, min(artifact.n, 4)
    whole = _stream(artifact, size, key=key, threads=1)
    expected = np.array([whole.next() for _ in range(steps)])
    several = _stream(artifact, size, key=key, run=whole.run, threads=max(2, min(4, machine.threads())))
    same = all(np.array_equal(several.next(), row) for row in expected)
    yield _exact("threads", same, f"one thread and {several.threads} give the same bits")
    cut = BLOCK + 3
    shard = _stream(artifact, size - cut, key=key, run=whole.run, offset=cut, total=size)
    same = all(np.array_equal(shard.next(), row[cut:]) for row in expected)
    yield _exact("shards", same, "a shard of the vector has the bits of the whole")
    saved = _stream(artifact, 100, key=key)
    saved.skip_to(artifact.n // 2)
    state = saved.state_dict()
    again = NoiseStream.restore(artifact, state, key=key, resume="unpublished")
    same = all(np.array_equal(again.next(), saved.next()) for _ in range(min(steps, artifact.n - artifact.n // 2)))
    yield _exact("restore", same, "a stream restored from its state goes on with the same bits")
    yield _iterates(artifact)
    yield _sensitivity(artifact, finished)


def _iterates(artifact: Artifact) -> Check:
    """Iterate space is the optimizer run over gradient space: float64, a few elements, the first steps."""
    key, steps = NoiseKey.ephemeral(), min(artifact.n, _ITERATES)
    gradient = _stream(artifact, 3, key=key, dtype="float64")
    try:
        iterate = _stream(artifact, 3, key=key, dtype="float64", run=gradient.run, space="iterate")
    except (SolverError, PrivacyError) as refusal:
        return _exact("iterate space", True, f"refused, as it should be: {refusal}")
    rows = np.zeros((artifact.n, 3))
    rows[:steps] = [gradient.next() for _ in range(steps)]
    expected = artifact.workload.apply(rows)[:steps] * (iterate.sensitivity / gradient.sensitivity)
    found = np.array([iterate.next() for _ in range(steps)])
    off = float(np.abs(found - expected).max() / np.abs(expected).max())
    return Check(
        "iterate space", off, 1e-9, off <= 1e-9, f"{steps:,} rows against the optimizer run over gradient space"
    )


def _exact(name: str, passed: bool, rule: str) -> Check:
    return Check(name, 0.0 if passed else 1.0, 0.0, passed, rule)


def _refuses(stream: NoiseStream) -> bool:
    try:
        stream.next()
    except HorizonError:
        return True
    except Exception:
        return False
    return False


def _keystream_is_right() -> bool:
    """RFC 8439, appendix A.1, numbers 1 and 2, as the source asks for them."""
    return source.keystream(bytes(32), 0, 128).tobytes().hex() == (
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
    )


def _quantiles() -> Check:
    """The compiled sampler on this machine, against the standard library's inverse CDF."""
    exact = NormalDist().inv_cdf
    cells = np.linspace(1 << 16, (1 << 31) - 1, 1000).astype(np.int64)  # from 4 sigma to the centre
    found = np.empty(len(cells), np.float32)
    normals(((1 << 31) - 1 - cells).astype(np.uint32), found)
    expected = np.array([-exact((cell + 0.5) / 2**32) for cell in cells.tolist()])
    worst = float((np.abs(found - expected) / np.spacing(expected.astype(np.float32))).max())
    for cell, second in ((0, 0), (0, 1 << 63), (1, 1), (40, 1 << 62), ((1 << 16) - 1, (1 << 64) - 1)):
        tail = -exact((cell + (second + 0.5) / 2**64) / 2**32)
        off = abs(refine((1 << 31) - 1 - cell, second, 32) - tail)
        worst = max(worst, off / float(np.spacing(np.float32(tail))))
    return Check("quantiles", worst, 2.0, worst <= 2.0, "normals of 1,005 words, units in the last place of float32")


def _sensitivity(artifact: Artifact, stream: NoiseStream) -> Check:
    """From columns of C, by running its definition backward. Less would not be private; more pays for rounding."""
    off = stream.sensitivity / _largest_column(artifact.strategy) - 1
    rule = "used for the scale / largest column norm of C, less 1; never below"
    return Check("sensitivity", off, 1e-2, -1e-11 <= off <= 1e-2, rule)


def _largest_column(strategy: Strategy) -> float:
    if not isinstance(strategy, BufferedStrategy):
        return float(np.linalg.norm(strategy.to_dense(), axis=0).max())
    energies = column_energies(*(np.asarray(array, np.float64) for array in strategy.coefficients().values()))
    return math.sqrt(float(energies.max()))


# --- statistics ------------------------------------------------------------------------------------


def _energy(white: Array, alarm: float) -> Check:
    """The scale of the noise, over all of it."""
    count, u = white.size, math.log(2 / alarm)
    found = abs(float(np.vdot(white, white)) / count - 1)
    limit = 2 * math.sqrt(u / count) + 2 * u / count
    return Check("variance", found, limit, found <= limit, f"mean square of {count:,} values, less 1")


def _distances(white: Array, alarm: float) -> Check:
    """Kolmogorov-Smirnov, on a grid: the distance there is at most that over all of the line."""
    edges = ndtri(np.arange(1, 4096) / 4096)
    count = white.size
    cumulated = np.cumsum(np.histogram(white, np.concatenate([[-np.inf], edges, [np.inf]]))[0])[:-1]
    found = float(np.abs(cumulated / count - ndtr(edges)).max())
    limit = math.sqrt(math.log(2 / alarm) / (2 * count))
    return Check("normality", found, limit, found <= limit, "distance of the distribution (Kolmogorov-Smirnov)")


def _tails(white: Array, alarm: float) -> Check:
    """How many lie beyond 4 standard deviations, exactly binomial."""
    count = white.size
    probability = math.erfc(4 / math.sqrt(2))
    low, high = binom.interval(1 - alarm, count, probability)
    seen, expected = int((np.abs(white) > 4).sum()), count * probability
    found, limit = abs(seen - expected), float(high - expected if seen > expected else expected - low)
    rule = f"values beyond 4 sigma: {seen:,}, against {expected:,.0f} expected"
    return Check("tails", found, limit, bool(low <= seen <= high), rule)


def _lags_of_steps(white: Array, alarm: float) -> Check:
    return _lags("lags of steps", white, alarm, "steps")


def _lags_of_elements(white: Array, alarm: float) -> Check:
    return _lags("lags of elements", white.T, alarm, "elements")


def _lags(name: str, white: Array, alarm: float, what: str) -> Check:
    """Products of values a lag apart along the first axis, added up over everything, for every lag."""
    n, columns = white.shape
    if n == 1:
        return Check(name, 0.0, 0.0, True, f"a single one of the {what}: no lags")
    length, total = scipy.fft.next_fast_len(2 * n, real=True), np.zeros(n)
    wide = max(1, (1 << 22) // length)
    for first in range(0, columns, wide):
        spectrum = scipy.fft.rfft(white[:, first : first + wide], length, axis=0, workers=machine.threads())
        power = (spectrum.real**2 + spectrum.imag**2).sum(axis=1)
        total += scipy.fft.irfft(power, length)[:n]
    u = math.log(2 * (n - 1) / alarm)
    products = columns * np.arange(n - 1, 0, -1)
    ratio = np.abs(total[1:]) / (np.sqrt(2 * products * u) + 2 * u)
    worst = int(ratio.argmax())
    found, limit = float(ratio[worst]), 1.0
    return Check(name, found, limit, found <= limit, f"all lags 1..{n - 1} of {what}, the worst in units of its bound")


def _pairs_of_steps(white: Array, alarm: float) -> Check:
    return _pairs("pairs of steps", white, alarm, "steps")


def _pairs_of_elements(white: Array, alarm: float) -> Check:
    return _pairs("pairs of elements", white.T, alarm, "elements")


def _pairs(name: str, white: Array, alarm: float, what: str) -> Check:
    """The covariance matrix of the first, the last and evenly chosen ones between, entry by entry."""
    chosen = white[np.unique(np.linspace(0, len(white) - 1, min(len(white), _PAIRS)).astype(int))]
    m, count = chosen.shape
    u = math.log(m * (m + 1) / alarm)
    off = np.abs(chosen @ chosen.T - count * np.eye(m))
    own = float(np.diag(off).max()) / (2 * math.sqrt(count * u) + 2 * u)
    np.fill_diagonal(off, 0)
    found = max(own, float(off.max()) / (math.sqrt(2 * count * u) + u))
    return Check(name, found, 1.0, found <= 1, f"all pairs among {m:,} {what}, the worst in units of its bound")


def _repeats(white: Array) -> Check:
    """Steps or elements that look alike in eight places: by chance with a probability below 1e-10."""
    found = 0
    for rows in (white, white.T):
        cells = np.floor(rows[:, :: max(1, rows.shape[1] // 8)][:, :8] * 200)  # of width 5e-3
        if cells.shape[1] == 8:
            found += len(cells) - len(np.unique(cells, axis=0))
    return Check("repeats", float(found), 0.0, found == 0, "steps or elements that carry the noise of another")
