"""Ctrl-C at any point of a step: no row comes twice, none is wrong afterwards, and the stream's lock is free.

Two ways: an exception raised before every line and at every return of stepping.py, stream.py and source.py in turn (as
the interpreter does for a signal), and real signals at random moments.
"""

from __future__ import annotations

import inspect
import signal
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.noise import NoiseStream, source, stepping
from mmfact.noise import stream as stream_module
from mmfact.noise.source import NoiseSource

STEPS = 12
FILES = {
    module.__file__: Path(str(module.__file__)).read_text().splitlines() for module in (stepping, stream_module, source)
}

strategies = pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])
two_workloads = pytest.mark.parametrize("name", ["ema", "custom"])
both_spaces = pytest.mark.parametrize("space", ["gradient", "iterate"])


def interrupted(at: int, call: Callable[[], Any]) -> tuple[bool, Any]:
    """(whether `call` was interrupted at its `at`-th point, its result).

    The `with` line is left out: a tracer sees it again between body and release, where no signal is ever handled.
    """
    points = 0

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal points
        code = FILES[frame.f_code.co_filename][frame.f_lineno - 1]
        if event in ("line", "return") and not code.strip().startswith("with "):
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
def test_interrupted_before_each_line(
    strategy: str, name: str, space: str, way: str, built: Any, stream: Any, rows_of: Any
) -> None:
    """A row is delivered or its step still to come, never both; all later rows are those of an undisturbed stream."""
    artifact = built(strategy, "float32", name).artifact
    options = {"space": space, "run": bytes(16)}
    expected = rows_of(stream(artifact, 3, **options))
    for at in range(1, 10_000):
        run = advanced(stream(artifact, 3, **options), way)
        step, out = run.step, np.full(3, np.nan, np.float32)
        hit, _ = interrupted(at, lambda run=run, out=out: run.next(out))
        assert not run._lock.locked()
        if not hit:
            break
        assert run.step in (step, step + 1)
        delivered = not np.isnan(out).all()
        assert not (delivered and run.step == step), f"point {at}: the row is out, and would be issued again"
        if delivered:
            np.testing.assert_array_equal(out, expected[step])
        following = run.step
        np.testing.assert_array_equal(rows_of(run), expected[following:])
    assert at > 15  # the tracer did see the code


@strategies
@two_workloads
@both_spaces
def test_interrupted_again_and_again(
    strategy: str, name: str, space: str, built: Any, stream: Any, rows_of: Any, key: Any
) -> None:
    """Many interruptions of one stream, with skips and restarts between: what is delivered is right and comes once."""
    artifact = built(strategy, "float32", name).artifact
    random = np.random.default_rng(5)
    run = stream(artifact, 3, space=space)
    expected = rows_of(stream(artifact, 3, space=space, run=run.run))
    for _ in range(25):
        run = stream(artifact, 3, space=space, run=run.run)
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
            if random.random() < 0.1:
                run = NoiseStream.restore(artifact, run.state_dict(), key=key, resume="unpublished")
            hit, row = interrupted(int(random.integers(1, 600)), run.next)
            assert not run._lock.locked()
            if not hit:
                np.testing.assert_array_equal(row, expected[step])
                delivered.append(step)
        assert run.step == STEPS
        assert delivered == sorted(set(delivered))


@strategies
@both_spaces
@pytest.mark.parametrize("call", range(1, 6))
def test_a_source_that_fails_loses_nothing(
    strategy: str, space: str, call: int, built: Any, stream: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for a white row (after a skip, so several are drawn): the step is still to come."""
    artifact = built(strategy, "float64", "cooldown").artifact
    expected = rows_of(stream(artifact, 3, space=space, run=bytes(16)))
    run = stream(artifact, 3, space=space, run=bytes(16))
    run.next()
    run.skip_to(7)
    left = [call]
    real = NoiseSource.row

    def row(self: NoiseSource, *given: int) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise MemoryError
        return real(self, *given)

    monkeypatch.setattr(NoiseSource, "row", row)
    with pytest.raises(MemoryError):
        run.next()
    assert run.step == 7
    assert not run._lock.locked()
    np.testing.assert_array_equal(rows_of(run), expected[7:])


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
def test_real_signals(
    strategy: str, space: str, built: Any, stream: Any, rows_of: Any, pressing: Callable[[float], None]
) -> None:
    """At moments that the interpreter chooses, inside the lock's own code too; 200 of them reach a step."""
    artifact = built(strategy, "float32", "ema", 40).artifact
    expected = rows_of(stream(artifact, 50, space=space, run=bytes(16)))
    random = np.random.default_rng(6)
    reached = 0
    for _ in range(400):
        run = stream(artifact, 50, space=space, run=bytes(16))
        run.skip_to(int(random.integers(0, 30)))
        for _ in range(10):
            step, row = run.step, None
            out = np.full(50, np.nan, np.float32)
            pressing(float(random.uniform(1e-6, 6e-4)))
            try:
                row = run.next(out)
            except KeyboardInterrupt:
                reached += 1
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


def test_the_tracer_sees_every_line() -> None:
    """Every line of a stepper with something to do is a point: otherwise the tests above prove little."""
    body, first = inspect.getsourcelines(stepping.Optimizer.row)
    assert any("_optimizer_step(row" in line for line in body)
    assert FILES[stepping.__file__][first - 1 : first - 1 + len(body)] == [line.rstrip("\n") for line in body]
