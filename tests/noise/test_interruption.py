"""Ctrl-C at any point of a step: no row comes twice, none is wrong afterwards, and the stream's lock is free.

The row is lost and its step spent, or neither has happened. Two ways: an exception raised before every line and at
every return of release.py, stream.py, stepping.py, source.py, workers.py and journal.py in turn (as the interpreter
does for a signal), and real signals at random moments. Rows are one block, or several that two threads share.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import StateError
from mmfact.noise import NoiseStream, journal, release, source, stepping, workers
from mmfact.noise import stream as stream_module
from mmfact.noise.source import NoiseSource

STEPS = 12
NOP = dis.opmap["NOP"]
FILES = {
    module.__file__: Path(str(module.__file__)).read_text().splitlines()
    for module in (stepping, release, stream_module, source, workers, journal)
}

strategies = pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])
two_workloads = pytest.mark.parametrize("name", ["ema", "custom"])
both_spaces = pytest.mark.parametrize("space", ["gradient", "iterate"])
one_block_and_several = pytest.mark.parametrize(
    ("size", "threads"), [(3, 1), (7, 2)], ids=["one block", "four blocks, two threads"], indirect=["threads"]
)


@pytest.fixture
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """With more than one, blocks have two elements."""
    if request.param > 1:
        monkeypatch.setattr(stepping, "BLOCK", 2)
    return request.param


@pytest.fixture
def helpers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The threads besides the main one that are drawing or stepping at this moment."""
    active: list[int] = []
    real = stepping.Stepper.piece

    def piece(self: Any, step: int, block: int, draw: Any, out: Any) -> None:
        def counted(*given: Any) -> None:
            if threading.get_ident() == threading.main_thread().ident:
                return draw(*given)
            active.append(threading.get_ident())
            try:
                return draw(*given)
            finally:
                active.remove(threading.get_ident())

        real(self, step, block, counted, out)

    monkeypatch.setattr(stepping.Stepper, "piece", piece)
    return active


def interrupted(at: int, call: Callable[[], Any]) -> tuple[bool, Any]:
    """(whether `call` was interrupted at its `at`-th point, its result).

    Left out is where a tracer stops but no signal is ever handled: the `with` line, seen again between body and
    release, and lines that do nothing (`try:`, `pass`), which may lie outside the range that `finally` guards.
    """
    points = 0

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal points
        code = FILES[frame.f_code.co_filename][frame.f_lineno - 1]
        idle = frame.f_code.co_code[frame.f_lasti] == NOP
        if event in ("line", "return") and not idle and not code.strip().startswith("with "):
            points += 1
            if points == at:
                raise KeyboardInterrupt
        return local

    def tracer(frame: types.FrameType, event: str, arg: Any) -> Any:
        return local if frame.f_code.co_filename in FILES else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        return False, call()
    except KeyboardInterrupt:
        return True, None
    finally:
        sys.settrace(before)


def advanced(run: NoiseStream, way: str) -> NoiseStream:
    """The stream at a step at which `next` has a different amount to do."""
    if way == "stepped":
        for _ in range(5):
            run.next()
    elif way == "skipped":
        run.next()
        run.skip_to(4)
    return run


@strategies
@two_workloads
@both_spaces
@pytest.mark.parametrize("way", ["fresh", "stepped", "skipped"])
@one_block_and_several
def test_interrupted_before_each_line(
    strategy: str,
    name: str,
    space: str,
    way: str,
    size: int,
    threads: int,
    built: Any,
    stream: Any,
    rows_of: Any,
    helpers: list[int],
) -> None:
    """A row is delivered or lost, and never still to come once any of it is out; all later rows are undisturbed.

    What a lost row leaves in `out` are elements of that step or of those that were skipped just before it, which will
    not be issued either. With two threads, where points move anyway, every third one.
    """
    artifact = built(strategy, "float32", name).artifact
    options = {"space": space, "run": bytes(16)}
    expected = rows_of(stream(artifact, size, threads=1, **options))
    misses = 0
    for at in range(threads, 10_000, 1 if threads == 1 else 3):
        run = advanced(stream(artifact, size, threads=threads, **options), way)
        step, out = run.step, np.full(size, np.nan, np.float32)
        hit, _ = interrupted(at, lambda run=run, out=out: run.next(out))
        assert not helpers, f"point {at}: a helper is still at work"
        assert not run._lock.locked()
        if not hit:
            assert run.step == step + 1
            np.testing.assert_array_equal(out, expected[step])
            misses += 1  # how many points there are depends on how the threads share the blocks
            if misses == threads:
                break
        assert run.step in (step, step + 1)
        seen = ~np.isnan(out)
        assert not (seen.any() and run.step == step), f"point {at}: the row is out, and would be issued again"
        first = 1 if way == "skipped" else step
        assert (out == expected[first : step + 1]).any(axis=0)[seen].all()
        following = run.step
        np.testing.assert_array_equal(rows_of(run), expected[following:])
    assert at > 15  # the tracer did see the code


@strategies
@both_spaces
@pytest.mark.parametrize("way", ["fresh", "skipped"])
@one_block_and_several
def test_a_sum_is_interrupted_before_each_line(
    strategy: str,
    space: str,
    way: str,
    size: int,
    threads: int,
    built: Any,
    stream: Any,
    rows_of: Any,
    helpers: list[int],
) -> None:
    """`add_to`: every element of the sum has its own noise of this very step or none, never any other, and never twice.

    Once one has, the step is spent; all later rows are undisturbed.
    """
    artifact = built(strategy, "float32", "ema").artifact
    options = {"space": space, "run": bytes(16)}
    expected = rows_of(stream(artifact, size, threads=1, **options))
    sums = np.random.default_rng(3).standard_normal(size).astype(np.float32) * 100
    misses = partly = 0
    for at in range(threads, 10_000, 1 if threads == 1 else 3):
        run = advanced(stream(artifact, size, threads=threads, **options), way)
        step, noisy = run.step, sums.copy()
        hit, _ = interrupted(at, lambda run=run, noisy=noisy: run.add_to(noisy))
        assert not helpers, f"point {at}: a helper is still at work"
        assert not run._lock.locked()
        assert run.step in (step, step + 1)
        done = noisy == sums + expected[step]
        assert (done | (noisy == sums)).all()
        assert not (done.any() and run.step == step), f"point {at}: noise is out, and would be issued again"
        partly += hit and done.any()
        following = run.step
        np.testing.assert_array_equal(rows_of(run), expected[following:])
        if not hit:
            assert done.all()
            misses += 1
            if misses == threads:
                break
    assert at > 15
    assert partly


@strategies
@two_workloads
@both_spaces
@one_block_and_several
def test_interrupted_again_and_again(
    strategy: str, name: str, space: str, size: int, threads: int, built: Any, stream: Any, rows_of: Any, key: Any
) -> None:
    """Many interruptions of one stream, with skips and restarts between: what is delivered is right and comes once.

    Restarted from a state with its buffers and from one without.
    """
    artifact = built(strategy, "float32", name).artifact
    random = np.random.default_rng(5)
    run = stream(artifact, size, space=space)
    expected = rows_of(stream(artifact, size, space=space, run=run.run))
    for _ in range(25 if threads == 1 else 10):
        run = stream(artifact, size, space=space, run=run.run, threads=threads)
        delivered: list[int] = []
        for _ in range(1000):
            step = run.step
            if step == STEPS:
                break
            if random.random() < 0.1:
                to = min(step + 2, STEPS)
                interrupted(int(random.integers(1, 6)), lambda run=run, to=to: run.skip_to(to))
                assert step <= run.step <= step + 2
                continue
            if random.random() < 0.2:
                state = run.state_dict(buffers=random.random() < 0.5)
                run = NoiseStream.restore(artifact, state, key=key, resume="unpublished", threads=threads)
                assert run.step == step
            hit, row = interrupted(int(random.integers(1, 600)), run.next)
            assert not run._lock.locked()
            assert run.step in (step, step + 1)
            if not hit:
                np.testing.assert_array_equal(row, expected[step])
                delivered.append(step)
        assert run.step == STEPS
        assert delivered == sorted(set(delivered))


@strategies
@both_spaces
@one_block_and_several
@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_source_that_fails_costs_one_row(
    strategy: str,
    space: str,
    at: int,
    size: int,
    threads: int,
    built: Any,
    stream: Any,
    rows_of: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No memory for white values (after a skip, so 7 are drawn for a block): that error comes out, the step is spent.

    With two threads it is the helper that fails, in its first, second or third block, while the main thread is at the
    fourth. Rows after that one are undisturbed: some blocks have taken the step and some have not.
    """
    artifact = built(strategy, "float64", "cooldown").artifact
    expected = rows_of(stream(artifact, size, space=space, run=bytes(16)))
    run = stream(artifact, size, space=space, run=bytes(16), threads=threads)
    run.next()
    run.skip_to(7)
    real, draws, failed = NoiseSource.fill, itertools.count(1), threading.Event()

    def fill(self: NoiseSource, *given: Any) -> None:
        if threads == 2 and threading.get_ident() == threading.main_thread().ident:
            assert failed.wait(20)
        elif next(draws) == (3 * at if threads == 2 else at):
            failed.set()
            raise MemoryError("no memory")
        real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "fill", fill)
        with pytest.raises(MemoryError, match="no memory"):
            run.next()
    assert run.step == 8
    assert not run._lock.locked()
    np.testing.assert_array_equal(rows_of(run), expected[8:])


@pytest.fixture
def pressing() -> Iterator[Callable[[float], None]]:
    """pressing(seconds): Ctrl-C after that time, if `NoiseStream.next` is running then."""

    def handle(number: int, frame: types.FrameType | None) -> None:
        while frame is not None:
            if frame.f_code is NoiseStream.next.__code__:
                raise KeyboardInterrupt
            frame = frame.f_back

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@strategies
@both_spaces
@pytest.mark.parametrize(("size", "threads"), [(50, 1), (7, 2)], indirect=["threads"])
def test_real_signals(
    strategy: str,
    space: str,
    size: int,
    threads: int,
    built: Any,
    stream: Any,
    rows_of: Any,
    pressing: Callable[[float], None],
    helpers: list[int],
) -> None:
    """At moments that the interpreter chooses, inside the lock's own code too; 200 of them reach a step."""
    artifact = built(strategy, "float32", "ema", 40).artifact
    expected = rows_of(stream(artifact, size, space=space, run=bytes(16)))
    random = np.random.default_rng(6)
    reached = 0
    for _ in range(4000):
        run = stream(artifact, size, space=space, run=bytes(16), threads=threads)
        run.skip_to(int(random.integers(0, 30)))
        for _ in range(10):
            step, row = run.step, None
            out = np.full(size, np.nan, np.float32)
            pressing(float(random.uniform(1e-6, 4e-4)))
            try:
                row = run.next(out)
            except KeyboardInterrupt:
                reached += 1
                assert not helpers
                assert not run._lock.locked()
                assert run.step == step + 1 or np.isnan(out).all()
            pressing(0)
            if row is not None:
                np.testing.assert_array_equal(row, expected[step])
        if reached >= 200:
            break
    assert reached >= 200


def test_an_interrupted_skip_keeps_its_count(built: Any, stream: Any, rows_of: Any, key: Any) -> None:
    """issued + skipped = step, whatever happens: else the ledger is wrong, and the state cannot be restored."""
    artifact = built("buffered").artifact
    for at in range(1, 1000):
        run = stream(artifact, 3)
        rows_of(run, 2)
        hit, _ = interrupted(at, lambda run=run: run.skip_to(9))
        if not hit:
            break
        ledger = run.ledger()
        assert (ledger["issued"], ledger["skipped"]) == (2, run.step - 2)
        again = NoiseStream.restore(artifact, run.state_dict(), key=key, resume="unpublished")
        again.skip_to(9)
        assert (again.ledger()["issued"], again.ledger()["skipped"]) == (2, 7)
    assert at > 5


@strategies
@both_spaces
@one_block_and_several
def test_an_interrupted_state_changes_nothing(
    strategy: str, space: str, size: int, threads: int, built: Any, stream: Any, rows_of: Any, key: Any
) -> None:
    """Saving makes blocks catch up with skipped steps: interrupted anywhere in it, rows and later states are right."""
    artifact = built(strategy, "float32", "ema").artifact
    expected = rows_of(stream(artifact, size, space=space, run=bytes(16)))
    misses = 0
    for at in range(1, 10_000, 2 if threads == 1 else 5):
        run = advanced(stream(artifact, size, space=space, run=bytes(16), threads=threads), "skipped")
        hit, _ = interrupted(at, run.state_dict)
        assert not run._lock.locked()
        assert run.step == 4
        again = NoiseStream.restore(artifact, run.state_dict(), key=key, resume="unpublished", threads=threads)
        np.testing.assert_array_equal(again.next(), expected[4])
        np.testing.assert_array_equal(rows_of(run), expected[4:])
        misses += not hit
        if misses == threads:
            break
    assert at > 15


def test_what_is_seen_of_a_row_is_in_the_journal(
    built: Any, stream: Any, rows_of: Any, key: Any, tmp_path: Path
) -> None:
    """A row of which anything is out needs the declaration before it comes again, wherever `next` was interrupted.

    A checkpoint of step 2 is committed; the row after that is interrupted, at every second point.
    """
    artifact = built("buffered").artifact
    expected = rows_of(stream(artifact, 3, run=bytes(16)))
    out_and_lost = 0
    for at in range(1, 1000, 2):
        path = tmp_path / f"{at}"
        run = stream(artifact, 3, run=bytes(16), journal=path)
        rows_of(run, 2)
        state = run.state_dict()
        run.commit()
        out = np.full(3, np.nan, np.float32)
        hit, _ = interrupted(at, lambda run=run, out=out: run.next(out))
        run.close()
        if not np.isnan(out).all():
            out_and_lost += hit
            with pytest.raises(StateError, match="unpublished"):
                NoiseStream.restore(artifact, state, key=key, journal=path)
        again = NoiseStream.restore(artifact, state, key=key, journal=path, resume="unpublished")
        np.testing.assert_array_equal(rows_of(again), expected[2:])
        if not hit:
            break
    assert at > 30
    assert out_and_lost


def test_what_is_committed_stays_so(built: Any, stream: Any, rows_of: Any, key: Any, tmp_path: Path) -> None:
    """`commit` interrupted at every second point, then called again: older checkpoints are refused, that one goes on.

    Restored before the second call, it goes on as well, with the declaration: whether the first one worked is unknown.
    """
    artifact = built("buffered").artifact
    expected = rows_of(stream(artifact, 3, run=bytes(16)))
    for at in range(1, 1000, 2):
        for repeat in (True, False):
            path = tmp_path / f"{at} {repeat}"
            run = stream(artifact, 3, run=bytes(16), journal=path)
            rows_of(run, 2)
            older = run.state_dict()
            rows_of(run, 2)
            state = run.state_dict()
            hit, _ = interrupted(at, run.commit)
            assert not run._lock.locked()
            if repeat:
                run.commit()
            committed = repeat or not hit
            run.close()
            if committed:
                with pytest.raises(StateError, match="committed"):
                    NoiseStream.restore(artifact, older, key=key, journal=path, resume="unpublished")
            again = NoiseStream.restore(
                artifact, state, key=key, journal=path, resume=None if committed else "unpublished"
            )
            np.testing.assert_array_equal(rows_of(again), expected[4:])
        if not hit:
            break
    assert at > 5


def test_the_tracer_sees_every_line(built: Any, stream: Any) -> None:
    """Every line of a stepper with something to do is a point: otherwise the tests above prove little."""
    body, first = inspect.getsourcelines(stepping.OptimizerStepper._take)
    assert any("kernels.buffered_iterates(" in line for line in body)
    assert FILES[stepping.__file__][first - 1 : first - 1 + len(body)] == [line.rstrip("\n") for line in body]
    run, seen = stream(built("buffered").artifact, 3, space="iterate"), set()

    def tracer(frame: types.FrameType, event: str, arg: Any) -> Any:
        seen.add((frame.f_code.co_filename, frame.f_code.co_name))
        return None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        run.next()
    finally:
        sys.settrace(before)
    wanted = [
        (stream_module, "next"),
        (release, "_issue"),
        (release, "piece"),
        (release, "draw"),
        (stepping, "piece"),
        (stepping, "_take"),
        (workers, "run"),
        (source, "fill"),
    ]
    assert {(module.__file__, name) for module, name in wanted} <= seen
