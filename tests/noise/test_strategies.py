"""Every strategy in both spaces: the rows are those of the stored coefficients, in whatever way they are asked for.

The matrices that rows are compared with are built entry by entry in conftest.py (`Built`), n = 12.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize import compiler, schedule, workload
from mmfact.factorize.errors import CapacityError, HorizonError, MmfactError, PrivacyError
from mmfact.factorize.strategy.banded_low_rank import BandedLowRankStrategy
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.noise import NoiseStream
from mmfact.noise.source import NoiseSource
from mmfact.noise.stepping import BLOCK, Stepper, stepping
from mmfact.noise.workers import Workers
from mmfact.store.format import from_factorization

STEPS = 12
SIGMA, CLIP = 1.3, 0.7
STREAMS, ALARM = 20_000, 1e-6
WORKLOADS = ["prefix", "momentum", "cooldown", "decay", "ema", "custom"]
STRATEGIES = ["dense", "buffered", "banded-low-rank"]

both_spaces = pytest.mark.parametrize("space", ["gradient", "iterate"])
both_dtypes = pytest.mark.parametrize("dtype", ["float32", "float64"])
both_precisions = pytest.mark.parametrize("coefficients", ["float32", "float64"])
workloads = pytest.mark.parametrize("name", WORKLOADS)
strategies = pytest.mark.parametrize("strategy", STRATEGIES)
recursive = pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank"])
# A workload with a recursion of its own and one without: every stepper and every pair of them.
two_workloads = pytest.mark.parametrize("name", ["ema", "custom"])


def sums(made: Any, space: str) -> np.ndarray:
    """For each row: the standard deviation of all that is added up for it, before anything cancels, at unit noise.

    A row in a precision of unit roundoff u is off by a small multiple of u times this.
    """
    coefficients = {k: np.abs(v.astype(np.float64)) for k, v in made.artifact.strategy.coefficients().items()}
    y = np.linalg.norm(made.noising, axis=1)
    if made.artifact.strategy.kind == "dense":
        own = y
    elif made.artifact.strategy.kind == "buffered":
        h, own = np.zeros_like(coefficients["g"][0]), np.zeros(len(y))
        for i in range(len(y)):  # an upper bound of the buffers' size, by the triangle inequality
            own[i] = (1 + coefficients["g"][i] @ h) / coefficients["c"][i]
            h = coefficients["decay"][i] * h + coefficients["q"][i] * y[i]
    else:
        reach = np.cumsum(coefficients["right"], axis=0)
        K = coefficients["band"].shape[1]
        own = coefficients["band"].sum(axis=1)
        own[K:] += np.einsum("ik,ik->i", coefficients["left"][K:], reach[:-K])
        return own if space == "iterate" else np.abs(np.linalg.inv(made.A)) @ own
    return np.abs(made.A) @ own if space == "iterate" else own


# --- what the rows are -----------------------------------------------------------------------------


@strategies
@both_precisions
@workloads
@both_spaces
@both_dtypes
def test_rows_are_those_of_the_stored_coefficients(
    strategy: str, coefficients: str, name: str, space: str, dtype: str, built: Any, stream: Any, fed: Any
) -> None:
    """Unit vectors for Z give C^-1 or A C^-1: to 1e-9 in float64, in float32 to 16 roundings of what is added up.

    In one block; and, bit for bit, in blocks of 5, 5 and 2 elements by two threads.
    """
    made = built(strategy, coefficients, name)
    run = stream(made.artifact, STEPS, space=space, dtype=dtype, run=bytes(16))
    expected = SIGMA * CLIP * run.sensitivity * made.matrix(space)
    rows = fed(run, np.eye(STEPS))
    assert rows.dtype == dtype
    assert not np.triu(rows, 1).any()
    if dtype == "float64":
        np.testing.assert_allclose(rows, expected, rtol=0, atol=1e-9 * np.abs(expected).max())
    else:
        off = np.abs(rows - expected).max(axis=1)
        assert (off <= 16 * 2.0**-24 * SIGMA * CLIP * run.sensitivity * sums(made, space)).all()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmfact.noise.stepping.BLOCK", 5)
        again = stream(made.artifact, STEPS, space=space, dtype=dtype, run=bytes(16), threads=2)
        np.testing.assert_array_equal(fed(again, np.eye(STEPS)), rows)


@strategies
@both_precisions
@workloads
def test_iterate_rows_are_the_optimizer_run_over_gradient_rows(
    strategy: str, coefficients: str, name: str, built: Any, stream: Any, rows_of: Any
) -> None:
    """theta_0 - (A G + B Z) and the optimizer fed with G + C^-1 Z are one run: two spaces, the same white rows.

    Up to the sensitivity used, which in one space may have a larger margin for rounding.
    """
    made = built(strategy, coefficients, name)
    gradient = stream(made.artifact, 40, dtype="float64", run=bytes(16))
    iterate = stream(made.artifact, 40, dtype="float64", space="iterate", run=bytes(16))
    expected = made.A @ rows_of(gradient) * (iterate.sensitivity / gradient.sensitivity)
    np.testing.assert_allclose(rows_of(iterate), expected, rtol=0, atol=1e-10 * np.abs(expected).max())


@recursive
@two_workloads
@both_spaces
@both_dtypes
def test_covariance_of_a_long_row(
    strategy: str, name: str, space: str, dtype: str, built: Any, stream: Any, rows_of: Any, covariance_bound: Any
) -> None:
    """20,000 streams with the real source, seeded; false-alarm rate 1e-6 for each test (see `covariance_bound`)."""
    made = built(strategy, "float32", name)
    run = stream(made.artifact, STREAMS, space=space, dtype=dtype, run=bytes(16))
    M = SIGMA * CLIP * run.sensitivity * made.matrix(space)
    rows = rows_of(run).astype(np.float64)
    Sigma = M @ M.T
    assert (np.abs(rows @ rows.T / STREAMS - Sigma) <= covariance_bound(Sigma, STREAMS, ALARM)).all()


@recursive
@both_spaces
def test_the_covariance_test_would_notice(
    strategy: str, space: str, built: Any, stream: Any, rows_of: Any, covariance_bound: Any
) -> None:
    """Noise 10 % too small, the other space's noise and white noise all lie outside the bound."""
    made = built(strategy, "float32", "momentum")
    run = stream(made.artifact, STREAMS, space=space, dtype="float64", run=bytes(16))
    rows = rows_of(run)
    other = "gradient" if space == "iterate" else "iterate"
    scale = SIGMA * CLIP * run.sensitivity
    for wrong in (scale * made.matrix(space) / 0.9, scale * made.matrix(other), scale * np.eye(STEPS)):
        Sigma = wrong @ wrong.T
        assert (np.abs(rows @ rows.T / STREAMS - Sigma) > covariance_bound(Sigma, STREAMS, ALARM)).any()


@recursive
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@both_spaces
def test_the_shortest_horizons(strategy: str, n: int, space: str, stream: Any, fed: Any) -> None:
    """n = 1..4, with whatever the compiler chooses (a band as wide as the matrix leaves no rank), to 1e-12."""
    work = workload.momentum(n, learning_rates=np.linspace(1, 0.5, n), ema=0.5)
    artifact = from_factorization(compiler.compile(work, compiler.Options(strategy=strategy)))
    run = stream(artifact, n, space=space, dtype="float64")
    C, A = artifact.strategy.to_dense(), work.dense()
    expected = SIGMA * CLIP * run.sensitivity * (A if space == "iterate" else np.eye(n)) @ np.linalg.inv(C)
    np.testing.assert_allclose(fed(run, np.eye(n)), expected, rtol=0, atol=1e-12 * np.abs(expected).max())
    with pytest.raises(HorizonError):
        run.next()


# --- however they are asked for --------------------------------------------------------------------


@strategies
@two_workloads
@both_spaces
@both_dtypes
def test_any_shard_has_the_rows_of_the_whole(
    strategy: str, name: str, space: str, dtype: str, built: Any, stream: Any, rows_of: Any
) -> None:
    """Bit for bit, single elements and odd offsets too: loops over elements must not round differently by position."""
    artifact = built(strategy, "float32", name).artifact
    options = {"space": space, "dtype": dtype, "run": bytes(16), "name": "w"}
    whole = rows_of(stream(artifact, 75, **options))
    for first, size in [(0, 1), (1, 1), (74, 1), (3, 2), (5, 7), (13, 62), (0, 64)]:
        shard = rows_of(stream(artifact, size, offset=first, total=75, **options))
        np.testing.assert_array_equal(shard, whole[:, first : first + size])


@strategies
@two_workloads
@both_spaces
@both_dtypes
def test_skipping_is_stepping_without_looking(
    strategy: str, name: str, space: str, dtype: str, built: Any, stream: Any, rows_of: Any
) -> None:
    """From any step to any other, bit for bit, also in several leaps."""
    artifact = built(strategy, "float64", name).artifact
    options = {"space": space, "dtype": dtype, "run": bytes(16)}
    rows = rows_of(stream(artifact, 5, **options))
    for start in range(STEPS):
        for to in range(start, STEPS, 4):
            leaping = stream(artifact, 5, **options)
            rows_of(leaping, start)
            leaping.skip_to(to)
            np.testing.assert_array_equal(leaping.next(), rows[to])
            if to < STEPS - 1:
                leaping.skip_to(STEPS - 1)
                np.testing.assert_array_equal(leaping.next(), rows[STEPS - 1])


@strategies
@two_workloads
@both_spaces
@both_dtypes
def test_a_restored_stream_continues_bit_for_bit(
    strategy: str,
    name: str,
    space: str,
    dtype: str,
    built: Any,
    stream: Any,
    rows_of: Any,
    key: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Saved at every step, with its buffers and as JSON without; restored twice from one state, and again from that.

    Saved by one thread, and restored to other blocks and threads.
    """
    artifact = built(strategy, "float32", name).artifact
    run = stream(artifact, 5, offset=3, total=9, space=space, dtype=dtype, threads=1)
    rows, states = [], []
    for _ in range(STEPS):
        states.append((run.state_dict(), json.dumps(run.state_dict(buffers=False))))
        rows.append(run.next())
    monkeypatch.setattr("mmfact.noise.stepping.BLOCK", 2)
    for step, (sealed, plain) in enumerate(states):
        for state, threads in [(sealed, 2), (json.loads(plain), 1)]:
            for _ in range(2):
                again = NoiseStream.restore(artifact, state, key=key, resume="unpublished", threads=threads)
                np.testing.assert_array_equal(again.next(), rows[step])
            thrice = NoiseStream.restore(artifact, again.state_dict(), key=key, resume="unpublished")
            np.testing.assert_array_equal(rows_of(thrice).reshape(-1, 5), np.array(rows[step + 1 :]).reshape(-1, 5))


def take(stepper: Stepper, step: int, draw: Any, out: Any, workers: Workers) -> None:
    """One row, as a release takes it."""
    workers.run(lambda block: stepper.piece(step, block, draw, out[stepper.span(block)]), stepper.blocks)


@strategies
@two_workloads
@both_spaces
@both_dtypes
def test_a_stepper_catches_up_with_blocks_left_behind(
    strategy: str,
    name: str,
    space: str,
    dtype: str,
    built: Any,
    stream: Any,
    rows_of: Any,
    key: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What recovers from Ctrl-C rests on it: 60 runs with random rows in which some of four blocks fail, and skips.

    Values are those of a stepper that nothing ever happened to, in the rows and in what is held; and a new stepper that
    is given what was held goes on with them.
    """
    artifact = built(strategy, "float64", name).artifact
    source, precision = NoiseSource(key, bytes(16), artifact.digest, "", np.dtype(dtype)), np.dtype(dtype)
    way, alone = stepping(artifact, space), Workers(1)
    whole, out = way.start(0.9, 7, precision), np.empty(7, dtype)
    rows, held = [], [tuple(array.copy() for array in whole.held)]
    for step in range(STEPS):
        whole.piece(step, 0, source.fill, out)
        rows.append(out.copy())
        held.append(tuple(array.copy() for array in whole.held))

    monkeypatch.setattr("mmfact.noise.stepping.BLOCK", 2)
    random = np.random.default_rng(1)
    for _ in range(60):
        stepper, step = way.start(0.9, 7, precision), 0
        assert len(stepper.done) == 4
        while step < STEPS:
            happens = random.choice(["row", "row", "skip", "failure", "failure", "saved", "moved"])
            fails = 2 * random.integers(4)

            def draw(at: int, first: int, white: Any, row: int = step, fails: int = fails) -> None:
                if (at, first) == (row, fails):
                    raise MemoryError
                source.fill(at, first, white)

            out = np.full(7, np.nan, dtype)
            if happens == "row":
                take(stepper, step, source.fill, out, Workers(int(random.integers(1, 4))))
                np.testing.assert_array_equal(out, rows[step])
            elif happens == "failure":
                with pytest.raises(MemoryError):
                    take(stepper, step, draw, out, alone)
                np.testing.assert_array_equal(out[:fails], rows[step][:fails])
            elif happens in ("saved", "moved"):
                stepper.catch_up(step, source.fill, alone)
                assert (stepper.done == step).all()
                for found, wanted in zip(stepper.held, held[step], strict=True):
                    np.testing.assert_array_equal(found, wanted)
                if happens == "moved":
                    kept, stepper = stepper.held, way.start(0.9, 7, precision)
                    for to, of in zip(stepper.held, kept, strict=True):
                        to[:] = of
                    stepper.start_at(step)
            step += happens in ("row", "skip", "failure")


@strategies
@two_workloads
@both_spaces
@both_dtypes
def test_neither_threads_nor_blocks_show(
    strategy: str,
    name: str,
    space: str,
    dtype: str,
    built: Any,
    stream: Any,
    rows_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Bit for bit: blocks of a single element, of odd sizes, as large as the row and larger; 1, 2 and 4 threads.

    Otherwise noise restored on another machine would not be the noise that was issued.
    """
    artifact = built(strategy, "float32", name).artifact
    options = {"space": space, "dtype": dtype, "run": bytes(16), "offset": 5, "total": 90}
    whole = rows_of(stream(artifact, 75, threads=1, **options))
    for block, threads in [(1, 1), (1, 4), (7, 1), (7, 2), (7, 4), (33, 2), (64, 4), (74, 2), (75, 4), (76, 2)]:
        monkeypatch.setattr("mmfact.noise.stepping.BLOCK", block)
        np.testing.assert_array_equal(rows_of(stream(artifact, 75, threads=threads, **options)), whole)


@settings(max_examples=150)
@given(
    strategy=st.sampled_from(STRATEGIES),
    name=st.sampled_from(["ema", "custom"]),
    space=st.sampled_from(["gradient", "iterate"]),
    dtype=st.sampled_from(["float32", "float64"]),
    shard=st.tuples(st.integers(0, 89), st.integers(0, 89)),
    lives=st.lists(
        st.tuples(
            st.integers(1, 40),  # elements of a block
            st.sampled_from([1, 2, 4]),  # threads
            st.booleans(),  # whether the state is saved with its buffers
            st.lists(st.integers(0, 3), max_size=4),  # steps that are skipped before each row
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_any_way_through_a_stream_gives_the_same_rows(
    strategy: str,
    name: str,
    space: str,
    dtype: str,
    shard: tuple[int, int],
    lives: list[Any],
    built: Any,
    stream: Any,
    rows_of: Any,
    key: Any,
) -> None:
    """A shard of any place and size, any blocks, threads, skips and restarts: the very bits of the whole row."""
    artifact = built(strategy, "float32", name).artifact
    options = {"space": space, "dtype": dtype, "run": bytes(16)}
    whole = rows_of(stream(artifact, 90, threads=1, **options))
    first, last = sorted(shard)
    state = None
    with pytest.MonkeyPatch.context() as patch:
        for block, threads, buffers, skips in lives:
            patch.setattr("mmfact.noise.stepping.BLOCK", block)
            if state is None:
                run = stream(artifact, last + 1 - first, offset=first, total=90, threads=threads, **options)
            else:
                run = NoiseStream.restore(artifact, state, key=key, resume="unpublished", threads=threads)
            for skip in skips:
                run.skip_to(min(run.step + skip, STEPS))
                if run.step < STEPS:
                    step = run.step
                    np.testing.assert_array_equal(run.next(), whole[step, first : last + 1])
            state = run.state_dict(buffers=buffers)


@strategies
@both_spaces
@pytest.mark.parametrize(("name", "dtype"), [("ema", "float32"), ("custom", "float64")])
def test_rows_of_several_real_blocks(
    strategy: str,
    space: str,
    name: str,
    dtype: str,
    built: Any,
    stream: Any,
    rows_of: Any,
    key: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three blocks of 65,536 elements and a short one: C^-1 Z or A C^-1 Z, whoever does what; shards over their edges.

    To 1e-12 of the largest in float64, to 16 roundings of what is added up, of 6 standard deviations, in float32.
    """
    made, size, count = built(strategy, "float32", name), 3 * BLOCK + 17, 3
    options = {"space": space, "dtype": dtype, "run": bytes(16)}
    run = stream(made.artifact, size, threads=1, **options)
    whole = rows_of(run, count)
    source, Z = NoiseSource(key, bytes(16), made.artifact.digest, "", np.dtype(dtype)), np.empty((count, size), dtype)
    for step, row in enumerate(Z):
        source.fill(step, 0, row)
    scale = SIGMA * CLIP * run.sensitivity
    expected = scale * made.matrix(space)[:count, :count] @ Z.astype(np.float64)
    bound = np.full(count, 1e-12 * np.abs(expected).max())
    if dtype == "float32":
        bound = 16 * 2.0**-24 * 6 * scale * sums(made, space)[:count]
    assert (np.abs(whole - expected).max(axis=1) <= bound).all()
    for threads in (2, 4):
        np.testing.assert_array_equal(rows_of(stream(made.artifact, size, threads=threads, **options), count), whole)
    skipping = stream(made.artifact, size, threads=2, **options)
    skipping.skip_to(count - 1)
    np.testing.assert_array_equal(skipping.next(), whole[-1])
    for first, length in [(1, BLOCK + 1), (BLOCK - 1, 3), (2 * BLOCK - 5, BLOCK + 22)]:
        shard = stream(made.artifact, length, offset=first, total=size, threads=2, **options)
        np.testing.assert_array_equal(rows_of(shard, count), whole[:, first : first + length])
    monkeypatch.setattr("mmfact.noise.stepping.BLOCK", 50_001)
    np.testing.assert_array_equal(rows_of(stream(made.artifact, size, threads=2, **options), count), whole)


@strategies
@two_workloads
@both_spaces
@both_dtypes
def test_rows_belong_to_the_caller(
    strategy: str, name: str, space: str, dtype: str, built: Any, stream: Any, rows_of: Any
) -> None:
    """A row does not change later, and a caller who writes into it, or into `out`, does not change what follows."""
    artifact = built(strategy, "float64", name).artifact
    options = {"space": space, "dtype": dtype, "run": bytes(16)}
    expected = rows_of(stream(artifact, 5, **options))
    run = stream(artifact, 5, **options)
    kept = [run.next() for _ in range(STEPS)]
    np.testing.assert_array_equal(kept, expected)
    assert not any(np.shares_memory(a, b) for i, a in enumerate(kept) for b in kept[:i])
    run, out = stream(artifact, 5, **options), np.empty(5, dtype)
    for step in range(STEPS):
        row = run.next(out if step % 2 else None)
        assert (row is out) == bool(step % 2)
        np.testing.assert_array_equal(row, expected[step])
        row[:] = np.nan


@strategies
@both_spaces
@pytest.mark.parametrize("helpers", [0, 1])
def test_two_threads_never_share_a_row(
    strategy: str,
    space: str,
    helpers: int,
    built: Any,
    stream: Any,
    rows_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four threads on one stream, switched every 10 microseconds: each row comes out once, whole and right.

    Each row made by its caller alone, and by the caller and a helper in four blocks.
    """
    artifact = built(strategy, "float32", "cooldown", 60).artifact
    size = 2_000
    expected = rows_of(stream(artifact, size, space=space, run=bytes(16)))
    if helpers:
        monkeypatch.setattr("mmfact.noise.stepping.BLOCK", 513)
    run = stream(artifact, size, space=space, run=bytes(16), threads=1 + helpers)
    seen: list[np.ndarray] = []
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        while True:
            try:
                seen.append(run.next())
            except HorizonError:
                return

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    finally:
        sys.setswitchinterval(interval)
    assert len(seen) == 60
    order = {row.tobytes(): step for step, row in enumerate(expected)}
    assert sorted(order[row.tobytes()] for row in seen) == list(range(60))


@strategies
@both_spaces
def test_the_horizon(strategy: str, space: str, built: Any, stream: Any, rows_of: Any) -> None:
    """Step n is refused, by stepping and by skipping, again and again; step n - 1 is served."""
    artifact = built(strategy).artifact
    run = stream(artifact, 5, space=space, run=bytes(16))
    rows = rows_of(run)
    assert len(np.unique(rows, axis=0)) == STEPS
    for _ in range(3):
        with pytest.raises(HorizonError):
            run.next()
        with pytest.raises(HorizonError):
            run.skip_to(STEPS + 1)
    last = stream(artifact, 5, space=space, run=bytes(16))
    last.skip_to(STEPS - 1)
    np.testing.assert_array_equal(last.next(), rows[-1])
    with pytest.raises(HorizonError):
        last.next()


# --- the scale -------------------------------------------------------------------------------------


def exact_sensitivity(made: Any) -> mpmath.mpf:
    """max_j norm2(C[:, j]) of the stored coefficients and, where C depends on it, the float64 matrix A; 50 digits."""
    n, strategy = made.artifact.n, made.artifact.strategy
    with mpmath.workdps(50):
        held = {
            k: [[mpmath.mpf(float(x)) for x in np.atleast_1d(row)] for row in v]
            for k, v in strategy.coefficients().items()
        }
        C = [[mpmath.mpf(0)] * n for _ in range(n)]
        if strategy.kind == "buffered":
            r = strategy.buffers
            for j in range(n):
                C[j][j] = held["c"][j][0]
                h = held["q"][j]
                for i in range(j + 1, n):
                    C[i][j] = mpmath.fsum(held["g"][i][k] * h[k] for k in range(r))
                    h = [held["decay"][i][k] * h[k] for k in range(r)]
        else:
            K, R = strategy.bandwidth, strategy.rank
            B = [
                [
                    held["band"][i][i - j]
                    if i - j < K
                    else mpmath.fsum(held["left"][i][k] * held["right"][j][k] for k in range(R))
                    for j in range(i + 1)
                ]
                for i in range(n)
            ]
            for j in range(n):
                for i in range(j, n):
                    rest = mpmath.fsum(B[i][k] * C[k][j] for k in range(j, i))
                    C[i][j] = (mpmath.mpf(float(made.A[i, j])) - rest) / B[i][i]
        return max(mpmath.sqrt(mpmath.fsum(C[i][j] ** 2 for i in range(n))) for j in range(n))


@recursive
@both_precisions
@workloads
@both_spaces
def test_the_sensitivity_is_that_of_the_stored_coefficients(
    strategy: str, coefficients: str, name: str, space: str, built: Any, stream: Any
) -> None:
    """Never below the exact one in 50 digits, no accuracy thrown away; with a recursion it is the strategy's own."""
    made = built(strategy, coefficients, name)
    run = stream(made.artifact, space=space)
    used = run.sensitivity
    exact = exact_sensitivity(made)
    # A itself is rounded: `made.A` and the optimizer's own A differ in the last place
    below = 0 if strategy == "buffered" else 1e-15
    assert exact * (1 - below) <= used <= exact * (1 + 1e-9)
    assert used >= np.linalg.norm(made.C, axis=0).max() * (1 - 1e-13)
    own = made.artifact.strategy.sensitivity(made.artifact.participation)
    assert used == own if name != "custom" else used >= own * (1 - 1e-13)
    assert run.ledger()["sensitivity"] == used


@recursive
@both_precisions
@workloads
@both_spaces
def test_the_release_is_as_private_as_sigma_says(
    strategy: str, coefficients: str, name: str, space: str, built: Any, stream: Any, fed: Any, largest_column: Any
) -> None:
    """sigma mu of what really comes out, measured with unit vectors and inverted in 60 digits; streamed in float64.

    At most 1 up to the rounding of a float64 recursion, 1e-13; at least 1 - 1e-6, or accuracy is thrown away.
    """
    made = built(strategy, coefficients, name)
    run = stream(made.artifact, STEPS, space=space, dtype="float64")
    M = fed(run, np.eye(STEPS))
    found = SIGMA * CLIP * largest_column(M, made.A if space == "iterate" else None)
    assert 1 - 1e-6 <= found <= 1 + 1e-13


@recursive
@both_spaces
@pytest.mark.parametrize("lie", [1e-6, 0.5, 2.0, 1e6])
def test_a_certificate_that_lies_about_the_sensitivity_changes_nothing(
    strategy: str, space: str, lie: float, built: Any, stream: Any, rows_of: Any
) -> None:
    """A stored figure that scaled the noise would let a bad file switch privacy off."""
    honest = built(strategy).artifact
    lying = dataclasses.replace(honest, certificate=dataclasses.replace(honest.certificate, sensitivity=lie))
    made = stream(lying, space=space, run=bytes(16))
    assert made.sensitivity == stream(honest, space=space).sensitivity
    np.testing.assert_array_equal(rows_of(made), rows_of(stream(honest, space=space, run=bytes(16))))


@recursive
@both_spaces
@pytest.mark.parametrize("factor", [0.125, 3.0])
def test_noise_follows_the_coefficients_and_not_their_unit(
    strategy: str, space: str, factor: float, built: Any, stream: Any, rows_of: Any
) -> None:
    """C scaled by 3 has 3 times the sensitivity and the same noise."""
    artifact = built(strategy).artifact
    held = artifact.strategy
    if strategy == "buffered":
        scaled: Any = BufferedStrategy(factor * held.c, held.g, held.decay.copy(), factor * held.q)
    else:
        scaled = BandedLowRankStrategy(held.band / factor, held.left / factor, held.right.copy(), held.workload)
    made = stream(dataclasses.replace(artifact, strategy=scaled), space=space, dtype="float64", run=bytes(16))
    assert made.sensitivity == pytest.approx(factor, rel=1e-6)
    expected = rows_of(stream(artifact, space=space, dtype="float64", run=bytes(16)))
    np.testing.assert_allclose(rows_of(made), expected, rtol=0, atol=1e-9 * np.abs(expected).max())


@strategies
@both_spaces
@pytest.mark.parametrize(
    ("scale", "dtype"), [(1e-20, "float32"), (1e-152, "float64"), (1e30, "float32"), (1e154, "float64")]
)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_noise_that_the_precision_cannot_hold_is_refused(
    strategy: str, space: str, scale: float, dtype: str, built: Any, stream: Any
) -> None:
    """Too small: no noise, or noise on a grid. Too large: infinite rows destroy the model."""
    with pytest.raises(PrivacyError, match="cannot hold"):
        stream(built(strategy).artifact, space=space, dtype=dtype, noise_multiplier=scale, clip_norm=scale)


@strategies
@pytest.mark.parametrize("rate", [1e-42, 1e30])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_iterates_that_the_precision_cannot_hold_are_refused(
    strategy: str, rate: float, stream: Any, rows_of: Any
) -> None:
    """Iterate-space rows carry the learning rates: at 1e-42 float32 rounds them to 0 or a coarse grid, at 1e30 to inf.

    Refused, or else every element is finite, not 0 and a normal number.
    """
    work = workload.sgd(STEPS, learning_rates=np.full(STEPS, rate))
    options = compiler.Options(strategy=strategy, dtype="float64", tolerance=0.5)
    clip = 1e9 if rate > 1 else 1.0
    try:
        made = stream(from_factorization(compiler.compile(work, options)), 100, space="iterate", clip_norm=clip)
        rows = rows_of(made)
    except MmfactError:
        return
    assert np.isfinite(rows).all()
    assert np.abs(rows).min() > np.finfo(np.float32).tiny


# --- memory ----------------------------------------------------------------------------------------


@recursive
@both_dtypes
def test_buffers_count_as_memory(
    strategy: str, dtype: str, built: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a machine of 1 MiB (so simulated) a size that fits but for its buffers is refused before allocating."""
    artifact = built(strategy).artifact
    width = np.dtype(dtype).itemsize
    size = (1 << 20) // (8 + (1 + artifact.strategy.buffers) * width)
    stream(artifact, size, dtype=dtype)
    monkeypatch.setattr("mmfact.factorize.machine.os.sysconf", lambda name: 1024)
    with pytest.raises(CapacityError, match=r"buffers.*shards"):
        stream(artifact, size, dtype=dtype)
    assert stream(artifact, size // 4, dtype=dtype).next().shape == (size // 4,)


@recursive
@pytest.mark.parametrize("size", [10**15, 2**40])
def test_an_absurd_size_is_refused_before_allocating(strategy: str, size: int, built: Any, stream: Any) -> None:
    artifact = built(strategy).artifact
    stream(artifact)
    tracemalloc.start()
    try:
        with pytest.raises(CapacityError):
            stream(artifact, size, total=size)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def held_by(make: Callable[[], NoiseStream]) -> tuple[NoiseStream, int]:
    """A stream, and the most bytes that were held from its making over five steps into one `out`, that one too."""
    tracemalloc.start()
    try:
        made = make()
        out = np.empty(made.size, made.dtype)
        for _ in range(5):
            made.next(out)
        return made, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@strategies
@both_spaces
@both_dtypes
@pytest.mark.parametrize("threads", [1, 4])
def test_what_the_memory_check_counts_is_what_is_held(
    strategy: str,
    space: str,
    dtype: str,
    threads: int,
    built: Any,
    stream: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The check is there to refuse before the machine swaps, and only then: it may not see less than the true peak.

    Momentum with iterate EMA (three states, three inverse bands). 128 KiB are allowed for what is neither counted nor
    grows with the size; what is counted for a thread's block, 28 bytes an element at the most, need not all be used at
    the same time. White rows that the dense strategy keeps while there is room are left out.
    """
    monkeypatch.setattr("mmfact.noise.stepping.HISTORY_BYTES", 0)
    artifact, size = built(strategy, "float32", "wide").artifact, 500_000
    options = {"space": space, "dtype": dtype, "threads": threads}
    stream(artifact, 8, **options).next()
    counted = []
    monkeypatch.setattr(
        "mmfact.noise.checks.check_memory",
        lambda *given, check=sys.modules["mmfact.noise.checks"].check_memory: (counted.append(given), check(*given)),
    )
    _, peak = held_by(lambda: stream(artifact, size, **options))
    assert len(counted) == 1
    smallest = 1  # bytes of memory for which the check passes, by bisection
    low, high = 1, 1 << 40
    check: Callable[..., None] = sys.modules["mmfact.noise.checks"].check_memory
    while low < high:
        smallest = (low + high) // 2
        monkeypatch.setattr("mmfact.factorize.machine.os.sysconf", lambda name, b=smallest: b if "PAGES" in name else 1)
        try:
            check(*counted[0])
            high = smallest
        except CapacityError:
            low = smallest + 1
    assert peak - (128 << 10) <= low <= peak + 28 * threads * BLOCK, (
        f"counted {low / size:.1f} bytes an element, held {peak / size:.1f}"
    )


@pytest.mark.parametrize("buffers", [1, 3, 6])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_buffered_stream_holds_its_buffers_and_little_more(buffers: int, threads: int, stream: Any) -> None:
    """Float32, gradient space: 4 bytes an element for each buffer and the caller's output, and 1 MiB for each thread.

    500,000 elements, so that a row has 2 MB: one temporary row more would show (and every page of it cost a fault).
    """
    work = workload.momentum(40, beta=0.95, learning_rates=schedule.named("cooldown", 40))
    artifact = from_factorization(compiler.compile(work, compiler.Options(buffers=buffers, tolerance=0.99)))
    assert artifact.strategy.buffers == buffers
    stream(artifact, 8, threads=threads).next()
    made, peak = held_by(lambda: stream(artifact, 500_000, threads=threads))
    assert peak <= (buffers + 1) * 4 * made.size + (threads << 20)


@both_spaces
def test_memory_that_is_not_held_is_not_counted(
    space: str, built: Any, stream: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Banded + low rank of a custom matrix, n = 60: 44 bytes an element in iterate space, not 59 vectors more.

    In gradient space it streams as the dense strategy does, which draws white rows again. A machine of 1 MiB (so
    simulated) has room for 100 bytes an element.
    """
    artifact = built("banded-low-rank", "float32", "custom", 60).artifact
    monkeypatch.setattr("mmfact.factorize.machine.os.sysconf", lambda name: 1024)
    assert stream(artifact, (1 << 20) // 100, space=space).next().shape == ((1 << 20) // 100,)


# --- precision -------------------------------------------------------------------------------------


def spread(rows: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """For each row: root mean square of its error, relative to the row's standard deviation."""
    return np.sqrt(((rows - exact) ** 2).mean(axis=1) / (exact**2).mean(axis=1))


@pytest.mark.parametrize("name", ["prefix", "momentum", "cooldown"])
def test_float32_stays_accurate_over_5000_steps(name: str, stream: Any, fed: Any) -> None:
    """Rows err by 2 u (1 + amplification) of their standard deviation at most, u = 2^-24, to the end."""
    n = 5000
    work = {
        "prefix": workload.prefix_sum(n),
        "momentum": workload.momentum(n),
        "cooldown": workload.momentum(n, beta=0.95, learning_rates=schedule.named("cooldown", n)),
    }[name]
    artifact = from_factorization(compiler.compile(work, compiler.Options(buffers=6, tolerance=1e-3)))
    Z = np.random.default_rng(1).standard_normal((n, 30)).astype(np.float32)
    single = fed(stream(artifact, 30, dtype="float32"), Z)
    double = fed(stream(artifact, 30, dtype="float64"), Z)
    assert np.isfinite(single).all()
    bound = 2 * 2.0**-24 * (1 + artifact.strategy.amplification())
    assert spread(single, double).max() <= bound
    assert bound < 1e-3


@strategies
@workloads
@both_spaces
def test_float32_errs_as_the_amplification_says(
    strategy: str, name: str, space: str, built: Any, stream: Any, fed: Any
) -> None:
    """2 u (1 + amplification) of a row's standard deviation, u = 2^-24; in iterate space what A makes of that."""
    made = built(strategy, "float32", name, 40)
    Z = np.random.default_rng(2).standard_normal((40, 200)).astype(np.float32)
    single = fed(stream(made.artifact, 200, space=space, dtype="float32"), Z)
    double = fed(stream(made.artifact, 200, space=space, dtype="float64"), Z)
    bound = np.full(40, 2 * 2.0**-24 * (1 + made.artifact.strategy.amplification()))
    if space == "iterate" and strategy != "banded-low-rank":
        bound = np.abs(made.A) @ (bound * np.linalg.norm(made.noising, axis=1)) / np.linalg.norm(made.decoder, axis=1)
    assert (spread(single, double) <= bound).all()


@pytest.mark.parametrize("name", ["compiled polynomial schedule", "compiled EMA", "given, nearly cancelling buffers"])
def test_a_precision_that_loses_the_noise_is_refused(name: str, stream: Any, fed: Any) -> None:
    """Refused, or every row within 1 % of its standard deviation (what the dense strategy allows itself).

    Otherwise what is streamed is not C^-1 Z, and the privacy statement is about something else.
    """
    n = 96
    if name == "compiled polynomial schedule":
        work = workload.momentum(n, learning_rates=schedule.named("polynomial:power=3", n))
        options = compiler.Options(strategy="banded-low-rank", bandwidth=2, rank=2, tolerance=0.5)
        artifact = from_factorization(compiler.compile(work, options))
    elif name == "compiled EMA":
        work = workload.momentum(n, learning_rates=schedule.named("cosine", n), ema=0.999)
        options = compiler.Options(strategy="banded-low-rank", bandwidth=4, rank=3, tolerance=0.5)
        artifact = from_factorization(compiler.compile(work, options))
    else:
        large, row = 1e8, np.ones((n, 1))
        given = BufferedStrategy(
            np.ones(n), row * [large, -large], row * [0.9, 0.9 - 1e-2 / large], 0.3 * np.ones((n, 2))
        )
        assert given.amplification() > 1e8
        artifact = from_factorization(compiler.adopt(workload.prefix_sum(n), given))
    Z = np.random.default_rng(3).standard_normal((n, 200)).astype(np.float32)
    double = fed(stream(artifact, 200, dtype="float64"), Z)
    try:
        made = stream(artifact, 200, dtype="float32")
    except MmfactError:
        return
    assert spread(fed(made, Z), double).max() <= 0.01


def test_buffers_that_overflow_their_precision_are_refused(stream: Any, fed: Any) -> None:
    """A buffer of 1e40 under a row of 1e20: float32 holds the row but not the buffer, and the row comes out inf."""
    base = from_factorization(compiler.compile(workload.prefix_sum(2)))
    c, one = np.full(2, 1e-10), np.ones((2, 1))
    artifact = dataclasses.replace(base, strategy=BufferedStrategy(c, 1e-30 * one, one, 1e30 * one))
    try:
        made = stream(artifact, 3, dtype="float32")
    except MmfactError:
        return
    assert np.isfinite(fed(made, np.ones((2, 3)))).all()
