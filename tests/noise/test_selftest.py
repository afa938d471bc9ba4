"""`mmfact.noise.selftest`: what is right passes, what is wrong is caught by a check with a name, its bounds are true.

Whole self-tests run seeded, on fewer values than a user's (`draws`), with its own false-alarm rate of 1e-6. Bounds are
held against exact distributions (chi-square, Kolmogorov's, binomial, products of normals) and against matrices of
NumPy's normals. What a self-test cannot see, at its real size of 2^25 values: truncation at 4.5 standard deviations or
more, a keystream whose period is longer than what is drawn, one wrong pair among steps or elements that are not among
the 2,048 compared.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import mpmath
import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from scipy.special import ndtr

from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, adopt, compile
from mmfact.factorize.errors import PrivacyError
from mmfact.factorize.participation import single
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise import release as stream_module
from mmfact.noise import selftest as module
from mmfact.noise import source as source_module
from mmfact.noise import stepping as stepping_module
from mmfact.noise.release import _Part
from mmfact.noise.selftest import Check, selftest
from mmfact.noise.source import NoiseSource
from mmfact.noise.stepping import BLOCK, BandedStepper, BufferedStepper, DenseStepper, OptimizerStepper
from mmfact.store.artifact import Artifact
from mmfact.store.format import from_factorization

ALARM = 1e-6
STATISTICS = {
    "variance": module._energy,
    "normality": module._distances,
    "tails": module._tails,
    "lags of steps": module._lags_of_steps,
    "lags of elements": module._lags_of_elements,
    "pairs of steps": module._pairs_of_steps,
    "pairs of elements": module._pairs_of_elements,
}
EXACT = ("horizon", "keystream", "quantiles", "threads", "shards", "restore", "iterate space", "sensitivity")

# The workloads and strategies of the grid that the other rooms' pieces are held together by.
_spec = importlib.util.spec_from_file_location("grid", Path(__file__).parents[1] / "test_grid.py")
grid = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(grid)


@pytest.fixture(autouse=True)
def seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every key and every run nonce the same in each run of the test."""
    seeds, nonces = itertools.count(), itertools.count()
    monkeypatch.setattr(stepping_module, "_known", weakref.WeakKeyDictionary())  # faults must reach what was computed
    monkeypatch.setattr(NoiseKey, "ephemeral", lambda: NoiseKey.insecure_from_seed(next(seeds)))
    drawn = SimpleNamespace(token_bytes=lambda count: next(nonces).to_bytes(count, "big"))
    monkeypatch.setattr(stream_module, "secrets", drawn)


@pytest.fixture
def failed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., set[str]]:
    """failed(artifact, draws=2^20): names of the checks that fail."""

    def run(artifact: Artifact, draws: int = 1 << 20) -> set[str]:
        monkeypatch.setattr(module, "_DRAWS", draws)
        result = selftest(artifact)
        assert [check.name for check in result.checks] == [*EXACT, *STATISTICS, "repeats"]
        assert result.passed == all(check.passed for check in result.checks)
        return {check.name for check in result.checks if not check.passed}

    return run


@pytest.fixture(scope="module")
def compiled() -> Callable[..., Artifact]:
    """compiled(workload, **options): in memory."""

    def build(work: workload.Workload, **options: Any) -> Artifact:
        return from_factorization(compile(work, Options(**options)))

    return build


def random_matrix(n: int, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    return np.tril(random.normal(size=(n, n)), -1) + np.diag(1.5 * random.uniform(0.8, 3, n))


# --- what is right passes --------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", grid.STRATEGIES)
@pytest.mark.parametrize("name", grid.WORKLOADS)
def test_every_strategy_passes_on_every_workload(name: str, strategy: str, compiled: Any, failed: Any) -> None:
    """2^17 values of 24 steps each, seeded; a check that fails here would send users away from right artifacts."""
    options = grid.STRATEGIES[strategy]
    artifact = from_factorization(compile(grid.WORKLOADS[name](), options))
    assert failed(artifact, 1 << 17) == set()


HARD = {
    "ema .99": lambda n: workload.momentum(n, ema=0.99),
    "beta .999 ema .9999": lambda n: workload.momentum(n, beta=0.999, ema=0.9999),
    "rates down to 1e-8": lambda n: workload.sgd(n, learning_rates=np.geomspace(1, 1e-8, n)),
    "rates up from 1e-8": lambda n: workload.sgd(n, learning_rates=np.geomspace(1e-8, 1, n)),
    "one rate of 1e6": lambda n: workload.sgd(n, learning_rates=np.where(np.arange(n) == n // 2, 1e6, 1.0)),
    "every other rate 1e-6": lambda n: workload.sgd(n, learning_rates=np.where(np.arange(n) % 2, 1.0, 1e-6)),
    "condition 2^n": lambda n: workload.custom(np.eye(n) - 2 * np.eye(n, k=-1)),
    "hilbert": lambda n: workload.custom(np.tril(1 / (1 + np.add.outer(np.arange(n), np.arange(n))))),
}


@pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank", "dense"])
@pytest.mark.parametrize("name", HARD)
def test_hard_workloads_pass(name: str, strategy: str, compiled: Any, failed: Any) -> None:
    """20 steps of what is steep or ill-conditioned, float32 coefficients; 2^17 values."""
    assert failed(compiled(HARD[name](20), strategy=strategy, dtype="float32", tolerance=0.5), 1 << 17) == set()


@pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank", "dense"])
@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_shortest_horizons_pass(n: int, strategy: str, compiled: Any, failed: Any) -> None:
    """No lags, no past, half the horizon rounded to nothing: none of it is a failure, or an exception."""
    assert failed(compiled(workload.momentum(n), strategy=strategy, tolerance=0.5), 1 << 17) == set()


def test_float32_rows_of_a_strategy_that_cancels_pass(compiled: Any, failed: Any) -> None:
    """Rows are rounded to float32 before C is applied, which cancels by a factor of 9,000 here; 2^22 values."""
    artifact = compiled(workload.custom(random_matrix(64, 12)), dtype="float64", tolerance=1e-7)
    assert artifact.strategy.amplification() > 9e3
    assert failed(artifact, 1 << 22) - {"sensitivity"} == set()


def test_sensitivity_of_a_strategy_that_cancels() -> None:
    """The largest column, which every right artifact is measured by, to 1e-12 of 60 digits; amplification 9,000."""
    strategy = compile(workload.custom(random_matrix(64, 0)), Options(dtype="float64", tolerance=1e-7)).strategy
    c, g, decay, q = strategy.coefficients().values()
    with mpmath.workdps(60):
        largest = mpmath.mpf(0)
        for j in range(strategy.n):
            h, energy = [mpmath.mpf(float(x)) for x in q[j]], mpmath.mpf(float(c[j])) ** 2
            for i in range(j + 1, strategy.n):
                energy += mpmath.fdot(zip(map(float, g[i]), h, strict=True)) ** 2
                h = [float(fade) * x for fade, x in zip(decay[i], h, strict=True)]
            largest = max(largest, energy)
        largest = mpmath.sqrt(largest)
    assert strategy.sensitivity(single()) == pytest.approx(float(largest), rel=1e-14)
    assert module._largest_column(strategy) == pytest.approx(float(largest), rel=1e-12)


def test_an_artifact_whose_iterates_cannot_be_streamed_passes(compiled: Any, failed: Any) -> None:
    """A of condition 2^40: gradient space streams, iterate space is refused, which is no fault of what is streamed."""
    assert failed(compiled(workload.custom(np.eye(40) - 2 * np.eye(40, k=-1))), 1 << 17) == set()


def test_an_artifact_that_float32_cannot_hold_is_refused_or_passes(failed: Any) -> None:
    """C = A with entries of C^-1 up to 2^26: float32 rounds by more than the fresh noise, which buffers may not."""
    n = 28
    matrix = np.eye(n) - np.tril(np.ones((n, n)), -1)
    given = DenseStrategy.from_matrix(matrix / np.linalg.norm(matrix, axis=0).max())
    artifact = from_factorization(adopt(workload.custom(matrix), given))
    try:
        found = failed(artifact, 1 << 17)
    except PrivacyError:
        return
    assert found == set()


@pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_whitening_undoes_the_noise(strategy: str, dtype: str, built: Any) -> None:
    """C^-1, by NumPy from the definition of each strategy, whitened: the identity, to 1e-9."""
    made = built(strategy, dtype)
    np.testing.assert_allclose(module._whiten(made.artifact.strategy, made.noising), np.eye(12), rtol=0, atol=1e-9)
    largest = np.linalg.norm(made.C, axis=0).max()
    assert module._largest_column(made.artifact.strategy) == pytest.approx(largest, rel=1e-9)


@pytest.mark.parametrize(
    ("n", "kind", "elements"),
    [
        (1, "buffered", 262_144),
        (1, "dense", 262_144),
        (128, "banded-low-rank", 262_144),
        (129, "buffered", 260_111),
        (2048, "buffered", 16_384),
        (2048, "dense", 2_384),
        (8192, "dense", 149),
        (1 << 17, "buffered", 256),
        (1 << 24, "buffered", 32),
    ],
)
def test_elements(n: int, kind: str, elements: int) -> None:
    """2^25 values between 32 and 2^18 elements; for a dense strategy 5e9 multiply-adds of a triangle."""
    assert module._elements(SimpleNamespace(n=n, strategy=SimpleNamespace(kind=kind))) == elements


def test_the_result_is_plain_and_progress_is_shown(compiled: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own bools and floats, since --json cannot write NumPy's; every stage is announced."""
    monkeypatch.setattr(module, "_DRAWS", 1 << 16)
    stages: list[Any] = []
    for artifact in (
        compiled(workload.prefix_sum(8)),
        compiled(workload.prefix_sum(8), strategy="dense"),
        compiled(workload.momentum(8), strategy="banded-low-rank", tolerance=0.5),
    ):
        for check in selftest(artifact, on_progress=stages.append).checks:
            assert (type(check.found), type(check.limit), type(check.passed)) == (float, float, bool), check
    said = {progress.stage for progress in stages}
    assert {"streaming", "undoing the correlation", "testing: energy", "testing: pairs of elements"} <= said


# --- what is wrong is caught -----------------------------------------------------------------------

FAULTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], set[str], str, int]] = {}


def fault(*caught: str, strategy: str = "buffered", draws: int = 1 << 20) -> Callable[..., Any]:
    """A function that plants a fault, and the checks that must fail; the docstring names it."""

    def register(plant: Callable[[pytest.MonkeyPatch], None]) -> Callable[[pytest.MonkeyPatch], None]:
        FAULTS[plant.__name__.replace("_", " ")] = (plant, set(caught), strategy, draws)
        return plant

    return register


def after(patch: pytest.MonkeyPatch, kind: type, change: Callable[[Any], None]) -> None:
    """`change` every stepper of a kind when it has been made."""
    made = kind.__init__

    def init(self: Any, *arguments: Any, **options: Any) -> None:
        copied = [  # coefficients belong to the artifact, not to the stepper that is changed
            tuple(part.copy() for part in given) if isinstance(given, tuple) else given for given in arguments
        ]
        made(self, *copied, **options)
        change(self)

    patch.setattr(kind, "__init__", init)


def bend(patch: pytest.MonkeyPatch, change: Callable[..., None]) -> None:
    """change(fill, step, first, out) in place of the source's fill(step, first, out)."""
    fill = NoiseSource.fill
    patch.setattr(NoiseSource, "fill", lambda self, step, first, out: change(fill.__get__(self), step, first, out))


def reshaped(patch: pytest.MonkeyPatch, shape: Callable[[np.ndarray], Any]) -> None:
    """White values of another distribution, each a function of a normal."""

    def change(fill: Any, step: int, first: int, out: Any) -> None:
        fill(step, first, out)
        out[:] = shape(out.astype(np.float64))

    bend(patch, change)


@fault("sensitivity")
def sensitivity_1e_6_too_small(patch: pytest.MonkeyPatch) -> None:
    right = BufferedStrategy.sensitivity
    patch.setattr(BufferedStrategy, "sensitivity", lambda self, how: right(self, how) * (1 - 1e-6))


@fault("sensitivity")
def sensitivity_1_percent_too_small(patch: pytest.MonkeyPatch) -> None:
    right = BufferedStrategy.sensitivity
    patch.setattr(BufferedStrategy, "sensitivity", lambda self, how: right(self, how) * 0.99)


@fault("sensitivity")
def sensitivity_2_percent_too_large(patch: pytest.MonkeyPatch) -> None:
    right = BufferedStrategy.sensitivity
    patch.setattr(BufferedStrategy, "sensitivity", lambda self, how: right(self, how) * 1.02)


@fault("variance")
def noise_1_percent_too_small(patch: pytest.MonkeyPatch) -> None:
    after(patch, BufferedStepper, lambda stepper: vars(stepper).update(_scale=stepper._scale * 0.99))


@fault("variance", "pairs of steps")
def one_row_without_noise(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(NoiseStream, "next", changed_next(lambda stream, row: row.fill(0) if stream.step == 6 else None))


def changed_next(change: Callable[[NoiseStream, Any], None]) -> Callable[..., Any]:
    issue = NoiseStream.next

    def next_(self: NoiseStream, out: Any = None) -> Any:
        row = issue(self, out)
        change(self, row)
        return row

    return next_


@fault("pairs of steps")
def a_row_repeated(patch: pytest.MonkeyPatch) -> None:
    def change(stream: Any, row: Any) -> None:
        if stream.step == 5:
            stream._before = row.copy()
        elif stream.step == 6 and hasattr(stream, "_before"):
            row[:] = stream._before

    patch.setattr(NoiseStream, "next", changed_next(change))


@fault("pairs of steps")
def two_white_rows_equal(patch: pytest.MonkeyPatch) -> None:
    right = NoiseSource.subkeys
    patch.setattr(NoiseSource, "subkeys", lambda self, step: right(self, 4 if step == 7 else step))


@fault("pairs of steps", "lags of steps")
def all_white_rows_equal(patch: pytest.MonkeyPatch) -> None:
    right = NoiseSource.subkeys
    patch.setattr(NoiseSource, "subkeys", lambda self, step: right(self, 0))


@fault("shards", "lags of elements")
def every_block_of_elements_the_first(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Part, "draw", lambda self, step, first, out: self.source.fill(step, self.shard.offset, out))


@fault("shards")
def offset_of_a_shard_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Part, "draw", lambda self, step, first, out: self.source.fill(step, first, out))


@fault("shards", "lags of elements")
def every_piece_of_the_keystream_the_first(patch: pytest.MonkeyPatch) -> None:
    piece = source_module._PIECE // 4

    def change(fill: Any, step: int, first: int, out: Any) -> None:
        for start in range(0, len(out), piece):
            fill(step, first, out[start : start + piece])

    bend(patch, change)


@fault("lags of elements")
def a_counter_that_wraps(patch: pytest.MonkeyPatch) -> None:
    """After 12 bits: consistent over shards and threads, but elements 65,536 apart are equal."""

    def change(fill: Any, step: int, first: int, out: Any) -> None:
        start = 0
        while start < len(out):
            place = (first + start) % BLOCK
            count = min(BLOCK - place, len(out) - start)
            fill(step, place, out[start : start + count])
            start += count

    bend(patch, change)


@fault("threads")
def several_threads_give_one_last_bit_more(patch: pytest.MonkeyPatch) -> None:
    def change(stream: NoiseStream, row: Any) -> None:
        if stream.threads > 1:
            row[-1] = np.nextafter(row[-1], row.dtype.type(9))

    patch.setattr(NoiseStream, "next", changed_next(change))


def white(self: Any, block: int, first: int, to: int, draw: Any, out: Any) -> None:
    draw(to - 1, first, out)
    out *= getattr(self, "_scale", 1) * (self._rows[0, 0] if isinstance(self, DenseStepper) else 1)


@fault("lags of steps", "pairs of steps")
def white_noise_from_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BufferedStepper, "_advance", white)


@fault("variance", "lags of steps", "pairs of steps", strategy="dense")
def white_noise_from_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DenseStepper, "_advance", white)


@fault("lags of steps", "pairs of steps", strategy="banded-low-rank")
def white_noise_from_a_band(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BandedStepper, "_advance", white)


@fault("lags of steps", "pairs of steps")
def the_other_sign_of_what_buffers_give(patch: pytest.MonkeyPatch) -> None:
    after(patch, BufferedStepper, lambda stepper: np.negative(stepper._rest[0], out=stepper._rest[0]))


@fault("pairs of steps")
def the_other_sign_of_one_coefficient_of_a_buffer(patch: pytest.MonkeyPatch) -> None:
    def change(stepper: Any) -> None:
        stepper._rest[0][5, 0] *= -1

    after(patch, BufferedStepper, change)


@fault("pairs of steps", strategy="dense")
def the_other_sign_of_one_coefficient_of_a_row(patch: pytest.MonkeyPatch) -> None:
    def change(stepper: Any) -> None:
        stepper._rows = stepper._rows.copy()
        stepper._rows[5, 4] *= -1

    after(patch, DenseStepper, change)


@fault("variance", "pairs of steps", strategy="dense")
def c_in_place_of_its_inverse(patch: pytest.MonkeyPatch) -> None:
    def change(stepper: Any) -> None:
        scale = float(np.diag(stepper._rows).mean())
        stepper._rows = np.linalg.inv(stepper._rows) * scale**2

    after(patch, DenseStepper, change)


@fault("pairs of steps", strategy="dense")
def the_rows_of_the_transpose(patch: pytest.MonkeyPatch) -> None:
    """Upper rows turned round: the same spectrum, other steps."""

    def change(stepper: Any) -> None:
        stepper._rows = np.ascontiguousarray(stepper._rows.T[::-1, ::-1])

    after(patch, DenseStepper, change)


@fault("variance", "lags of steps", "pairs of steps", strategy="dense")
def white_rows_drawn_afresh_for_every_row(patch: pytest.MonkeyPatch) -> None:
    """No white row twice, so that nothing cancels."""
    right = DenseStepper._advance

    def advance(self: Any, block: int, first: int, to: int, draw: Any, out: Any) -> None:
        self._kept[block] = 0
        right(self, block, first, to, lambda step, start, row: draw(1000 * to + step, start, row), out)

    patch.setattr(DenseStepper, "_advance", advance)


@fault("pairs of steps", strategy="banded-low-rank")
def the_low_rank_part_dropped(patch: pytest.MonkeyPatch) -> None:
    after(patch, BandedStepper, lambda stepper: stepper._left.fill(0))


@fault("pairs of steps", strategy="banded-low-rank")
def the_last_diagonal_of_the_band_dropped(patch: pytest.MonkeyPatch) -> None:
    after(patch, BandedStepper, lambda stepper: stepper._band[:, -1].fill(0))


@fault("iterate space")
def an_optimizer_of_another_momentum(patch: pytest.MonkeyPatch) -> None:
    def change(stepper: Any) -> None:
        stepper._transition = stepper._transition * (1 - 1e-6)

    after(patch, OptimizerStepper, change)


@fault("normality", "tails")
def uniform_noise(patch: pytest.MonkeyPatch) -> None:
    reshaped(patch, lambda z: (ndtr(z) - 0.5) * math.sqrt(12))


@fault("normality", "tails")
def laplace_noise(patch: pytest.MonkeyPatch) -> None:
    reshaped(patch, lambda z: np.sign(z) * -np.log(np.minimum(2 * ndtr(-np.abs(z)), 1)) / math.sqrt(2))


@fault("tails", draws=1 << 22)
def noise_truncated_at_4_standard_deviations(patch: pytest.MonkeyPatch) -> None:
    """Rounding puts about half of the values at 4 beyond it."""
    reshaped(patch, lambda z: np.clip(z, -4, 4))


@fault("tails", draws=1 << 22)
def outermost_cells_that_are_never_refined(patch: pytest.MonkeyPatch) -> None:
    """Nothing is beyond 4.17, and there is half of what is beyond 4."""
    patch.setattr(source_module, "refine", lambda word, second, bits: 0.0)


@fault("variance", "normality")
def coin_flips(patch: pytest.MonkeyPatch) -> None:
    reshaped(patch, lambda z: np.sign(z) * 0.99)


@fault("lags of elements", draws=1 << 22)
def neighbouring_elements_correlated_by_1_percent(patch: pytest.MonkeyPatch) -> None:
    def change(fill: Any, step: int, first: int, out: Any) -> None:
        wide = np.empty(len(out) + 1, out.dtype)
        fill(step, first, wide)
        out[:] = math.sqrt(1 - 1e-4) * wide[:-1] + 1e-2 * wide[1:]

    bend(patch, change)


@fault("lags of steps", draws=1 << 22)
def neighbouring_steps_correlated_by_1_percent(patch: pytest.MonkeyPatch) -> None:
    def change(fill: Any, step: int, first: int, out: Any) -> None:
        before = np.empty_like(out)
        fill(step, first, out)
        fill(step + 1000, first, before)  # its own past, which nobody sees
        if step:
            fill(step - 1, first, before)
        out *= math.sqrt(1 - 1e-4)
        out += 1e-2 * before

    bend(patch, change)


@fault("restore")
def a_restored_stream_a_step_too_early(patch: pytest.MonkeyPatch) -> None:
    restore = NoiseStream.restore.__func__

    def early(cls: Any, *arguments: Any, **options: Any) -> Any:
        stream = restore(cls, *arguments, **options)
        stream._place = (stream.step - 1, 0)
        stream._parts[""].stepper.start_at(stream.step)
        return stream

    patch.setattr(NoiseStream, "restore", classmethod(early))


@fault("restore")
def a_restored_stream_with_empty_buffers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(stream_module, "unseal", lambda *arguments: None)


@fault("restore")
def a_restored_stream_under_a_new_nonce(patch: pytest.MonkeyPatch) -> None:
    restore = NoiseStream.restore.__func__

    def other(cls: Any, *arguments: Any, **options: Any) -> Any:
        stream = restore(cls, *arguments, **options)
        stream._parts[""].source = NoiseSource(stream.key, bytes(16), "00" * 32, stream.name, stream.dtype)
        return stream

    patch.setattr(NoiseStream, "restore", classmethod(other))


@fault("horizon")
def a_step_past_the_horizon_repeats_the_last_row(patch: pytest.MonkeyPatch) -> None:
    issue = NoiseStream.next

    def next_(self: Any, out: Any = None) -> Any:
        if self.step < self.horizon:
            self._last = issue(self, out)
        return self._last

    patch.setattr(NoiseStream, "next", next_)


@fault("keystream")
def a_keystream_library_wrong_by_one_bit(patch: pytest.MonkeyPatch) -> None:
    right = source_module.Cipher

    def cipher(*arguments: Any, **options: Any) -> Any:
        encryptor = right(*arguments, **options).encryptor()

        def update_into(data: Any, out: Any) -> None:
            encryptor.update_into(data, out)
            out[len(out) - 1] ^= 1

        return SimpleNamespace(encryptor=lambda: SimpleNamespace(update=encryptor.update, update_into=update_into))

    patch.setattr(source_module, "Cipher", cipher)


@fault("quantiles")
def a_compiler_that_rounds_loosely(patch: pytest.MonkeyPatch) -> None:
    """Normals 1e-6 too large: 8 to 16 units in the last place of float32."""
    right = source_module.normals

    def normals(words: Any, out: Any) -> list[int]:
        found = right(words, out)
        out *= out.dtype.type(1 + 1e-6)
        return found

    for each in (source_module, module):
        patch.setattr(each, "normals", normals)


@fault("variance", "lags of steps", "lags of elements", "pairs of steps", "pairs of elements", "iterate space")
def rows_that_are_no_numbers(patch: pytest.MonkeyPatch) -> None:
    """One NaN fails what it reaches; it is no exception."""

    def change(fill: Any, step: int, first: int, out: Any) -> None:
        fill(step, first, out)
        out[0] = np.nan

    bend(patch, change)


@pytest.fixture(scope="module")
def twelve(compiled: Any) -> dict[str, Artifact]:
    """12 steps of momentum by each strategy, which at 2^20 values are 87,381 elements: more than a block."""
    work = workload.momentum(12)
    return {
        "buffered": compiled(work),
        "dense": compiled(work, strategy="dense"),
        "banded-low-rank": compiled(work, strategy="banded-low-rank", bandwidth=3, rank=2, tolerance=0.5),
    }


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_name(name: str, twelve: Any, failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the runtime, each fails at least the checks that are named with it."""
    plant, caught, strategy, draws = FAULTS[name]
    plant(monkeypatch)
    found = failed(twelve[strategy], draws)
    assert caught <= found, found


@pytest.mark.parametrize("strategy", ["buffered", "dense", "banded-low-rank"])
def test_without_a_fault_the_same_artifacts_pass(strategy: str, twelve: Any, failed: Any) -> None:
    """2^22 values: what the faults are caught by is the faults."""
    assert failed(twelve[strategy], 1 << 22) == set()


def test_one_buffer_too_few_is_caught(compiled: Any, failed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The README's artifact with its weakest of 4 buffers never filled: at 512 steps and 2^22 values."""
    artifact = compiled(workload.momentum(512), buffers=4)
    after(monkeypatch, BufferedStepper, lambda stepper: stepper._rest[2][:, -1].fill(0))
    assert "pairs of steps" in failed(artifact, 1 << 22)


# --- how sharp it is at the size that users run ----------------------------------------------------


def test_what_is_noticed_at_real_size() -> None:
    """NumPy's normals with faults that a self-test of 2,048 steps and 2^25 values must see, by 4 sigma or more.

    0.2 % of scale; 2e-3 of correlation between neighbours; 0.12 between two steps; 0.3 between two of the elements
    compared; truncation at 4 by clipping, at 4.35 by drawing again (a truncation at 5 takes 19 of 3e7 values: unseen).
    """
    alarm = ALARM / len(STATISTICS)
    white = np.random.default_rng(7).standard_normal((2048, 16384))
    assert not module._energy(white * 0.998, alarm).passed
    near = white.copy()
    near[1:] += 2e-3 * white[:-1]
    assert not module._lags_of_steps(near, alarm).passed
    near[:] = white
    near[:, 1:] += 2e-3 * white[:, :-1]
    assert not module._lags_of_elements(near, alarm).passed
    near[:] = white
    near[900] = math.sqrt(1 - 0.12**2) * white[900] + 0.12 * white[17]
    assert not module._pairs_of_steps(near, alarm).passed
    near[:, -1] = math.sqrt(1 - 0.3**2) * white[:, -1] + 0.3 * white[:, 0]
    assert not module._pairs_of_elements(near, alarm).passed
    assert not module._tails(np.clip(white, -4, 4), alarm).passed
    far = np.abs(white) > 4.35
    white[far] = 0.5  # drawn again, it would nearly always lie inside
    assert not module._tails(white, alarm).passed


# --- the bounds ------------------------------------------------------------------------------------

MATRICES = 2000
LOOSE = 0.05


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (2, 300), (300, 2)], ids=str)
def test_false_alarms_over_many_matrices(shape: tuple[int, int]) -> None:
    """2,000 matrices of NumPy's normals at alarm 0.05: no statistic fails more often (binomial, 1e-6 each).

    And none is idle: its bound is at most 1.6 times the 95 % quantile of what is seen, 2.2 times where the sums are of
    few products.
    """
    random = np.random.default_rng(11)
    seen = {name: np.empty(MATRICES) for name in STATISTICS if name != "tails"}
    fails = dict.fromkeys(seen, 0)
    for k in range(MATRICES):
        white = random.standard_normal(shape)
        for name in seen:
            check = STATISTICS[name](white, LOOSE)
            seen[name][k] = check.found / check.limit
            fails[name] += not check.passed
            assert check.passed == (check.found <= check.limit)
    most = scipy.stats.binom.isf(1e-6, MATRICES, LOOSE)
    few = 2.2 if min(shape) == 2 else 1.6
    for name in seen:
        assert fails[name] <= most, name
        assert 1 / np.quantile(seen[name], 0.95) <= few, (name, 1 / np.quantile(seen[name], 0.95))


@pytest.mark.parametrize("alarm", [LOOSE, ALARM / 7])
@pytest.mark.parametrize("count", [1, 10, 1000, 1 << 25])
def test_variance_against_chi_square(count: int, alarm: float) -> None:
    """The exact probability is at most `alarm`, and the bound within 1.5 of the exact quantile (3 for few values)."""
    u = math.log(2 / alarm)
    limit = 2 * math.sqrt(u / count) + 2 * u / count
    if count <= 1000:
        assert module._energy(np.ones((count, 1)), alarm).limit == pytest.approx(limit, rel=1e-12)
    chi = scipy.stats.chi2(count)
    assert chi.sf(count * (1 + limit)) + chi.cdf(count * (1 - limit)) <= alarm
    assert limit <= (1.5 if count >= 1000 else 3) * max(chi.isf(alarm / 2) / count - 1, 1 - chi.ppf(alarm / 2) / count)


@pytest.mark.parametrize("alarm", [LOOSE, ALARM / 7])
@pytest.mark.parametrize("count", [10, 300, 10_000])
def test_normality_against_the_exact_distribution(count: int, alarm: float) -> None:
    """Kolmogorov's exact distribution at the bound: at most `alarm`, at least half of it beyond 10 values."""
    limit = module._distances(np.zeros((count, 1)), alarm).limit
    exact = scipy.stats.kstwo.sf(limit, count)
    assert exact <= alarm * (1 + 1e-9)
    assert count == 10 or exact >= alarm / 2


def test_normality_finds_the_distance() -> None:
    """On its grid it sees SciPy's distance, to the 1/4096 between two points of it and the values there (1e-3)."""
    values = np.random.default_rng(5).standard_normal((50, 40)) * 1.1 + 0.05
    exact = scipy.stats.kstest(values.ravel(), "norm").statistic
    assert exact - 1 / 4096 - 1e-3 <= module._distances(values, 0.01).found <= exact + 1e-12


@pytest.mark.parametrize("alarm", [LOOSE, ALARM / 7])
def test_tails_are_exactly_binomial(alarm: float) -> None:
    """Which counts of 2^20 pass: together they have probability 1 - alarm, and not much more."""
    white = np.zeros((1024, 1024))
    passing = []
    for count in range(200):
        white.flat[:count] = 4.5 * (-1) ** count
        if module._tails(white, alarm).passed:
            passing.append(count)
    assert passing == list(range(passing[0], passing[-1] + 1))
    with mpmath.workdps(40):
        p = mpmath.erfc(4 / mpmath.sqrt(2))
        inside = mpmath.fsum(mpmath.binomial(1 << 20, k) * p**k * (1 - p) ** ((1 << 20) - k) for k in passing)
        assert alarm / 4 <= 1 - inside <= alarm


def products_beyond(count: int, limit: float) -> float:
    """P(|sum of x_k y_k| > limit) for `count` pairs of independent normals: given x, the sum is normal."""

    def inside(square: float) -> float:
        return 2 * ndtr(-limit / math.sqrt(square)) * scipy.stats.chi2.pdf(square, count)

    middle = count + 4 * math.sqrt(count) * np.arange(-3, 8) + 40 * (count < 20) * np.arange(11)
    return float(scipy.integrate.quad(inside, 0, middle[-1] * 4, points=middle[middle > 0], limit=400)[0])


@pytest.mark.parametrize("u", [3.0, 10.0, 20.0, 31.0])
@pytest.mark.parametrize("count", [1, 2, 10, 100, 4096])
def test_the_inequality_for_forms_that_are_not_positive(count: int, u: float) -> None:
    """Sums of products of independent normals lie beyond sqrt(2 m u) + u with probability <= 2 exp(-u), exactly.

    Laurent and Massart state it for positive forms; their bound of the logarithm of the moment generating function
    holds for any sign.
    """
    assert products_beyond(count, math.sqrt(2 * count * u) + u) <= 2 * math.exp(-u)


def brute(white: np.ndarray, form: np.ndarray, u: float) -> float:
    """|x' A x - tr A| over its bound, from the matrix of the form itself."""
    x = white.ravel()
    singular = np.linalg.svd(form, compute_uv=False)
    return abs(x @ form @ x - np.trace(form)) / (2 * math.sqrt(u * (singular**2).sum()) + 2 * u * singular[0])


@pytest.mark.parametrize("shape", [(2, 1), (5, 3), (3, 5), (1, 4), (6, 1)], ids=str)
def test_lags_are_these_quadratic_forms(shape: tuple[int, int]) -> None:
    """Every lag's matrix written out: never above the bound used, which is at most twice it (|A|_2 <= 1)."""
    n, columns = shape
    white, alarm = np.random.default_rng(2).standard_normal(shape), 1e-3
    check = module._lags_of_steps(white, alarm)
    assert check == module._lags("lags of steps", white, alarm, "steps")
    turned = module._lags_of_elements(white.T.copy(), alarm)
    assert turned.found == pytest.approx(check.found, rel=1e-12)
    if n == 1:
        assert (check.passed, check.found) == (True, 0.0)
        return
    u = math.log(2 * (n - 1) / alarm)
    worst = max(brute(white, np.kron((np.eye(n, k=lag) + np.eye(n, k=-lag)) / 2, np.eye(columns)), u)
                for lag in range(1, n))  # fmt: skip
    assert worst / 2 <= check.found <= worst * (1 + 1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 1), (5, 3), (3, 5)], ids=str)
def test_pairs_are_these_quadratic_forms(shape: tuple[int, int]) -> None:
    """Every pair's matrix written out, its own with itself too: the same figure, to 1e-12."""
    m, columns = shape
    white, alarm = np.random.default_rng(3).standard_normal(shape), 1e-3
    u = math.log(2 * (m * (m + 1) / 2) / alarm)
    worst = 0.0
    for i in range(m):
        for j in range(i + 1):
            unit = np.zeros((m, m))
            unit[i, j] += 0.5
            unit[j, i] += 0.5
            worst = max(worst, brute(white, np.kron(unit, np.eye(columns)), u))
    assert module._pairs_of_steps(white, alarm).found == pytest.approx(worst, rel=1e-12)
    assert module._pairs_of_elements(white.T.copy(), alarm).found == pytest.approx(worst, rel=1e-12)


@pytest.mark.parametrize(("m", "columns"), [(2048, 16384), (2048, 2048), (24, 40)])
def test_pairs_against_the_exact_distribution(m: int, columns: int) -> None:
    """The union over all entries, each with its exact probability: at most `alarm`; off the diagonal within 1.5."""
    alarm = ALARM / 7
    u = math.log(m * (m + 1) / alarm)
    chi, own = scipy.stats.chi2(columns), 2 * math.sqrt(columns * u) + 2 * u
    limit = math.sqrt(2 * columns * u) + u
    diagonal = m * (chi.sf(columns + own) + chi.cdf(columns - own))
    assert diagonal + m * (m - 1) / 2 * products_beyond(columns, limit) <= alarm
    assert m * (m - 1) / 2 * products_beyond(columns, limit / 1.5) > alarm


def test_of_many_steps_the_ends_and_those_between_are_compared() -> None:
    """2,048 of 5,000: first and last among them, and a pair of equal rows there is found."""
    white = np.random.default_rng(4).standard_normal((5000, 300))
    check = module._pairs_of_steps(white, 1e-3)
    assert check.passed
    assert "2,048 steps" in check.rule
    white[-1] = white[0]
    assert not module._pairs_of_steps(white, 1e-3).passed


def test_a_check_that_fails_makes_the_answer_no() -> None:
    """`passed` is all of them, each of which says how far it went and how far it may."""
    good, bad = Check("a", 0.0, 0.0, True, ""), Check("b", 2.0, 1.0, False, "")
    assert module.Selftest(3, 4, ALARM, (good,)).passed
    assert not module.Selftest(3, 4, ALARM, (good, bad)).passed
