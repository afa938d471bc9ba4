"""Steps: each row once, none past the horizon, none lost to an error that the caller can mend beforehand."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import numpy as np
import pytest

from mmfact.factorize import workload
from mmfact.factorize.errors import HorizonError, MmfactError, StateError
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.source import NoiseSource


def test_step_n_is_refused_for_ever(stream: Any, rows_of: Any) -> None:
    """The trap: a step past n that re-issues row n - 1."""
    made = stream()
    assert made.horizon == 16
    assert len(np.unique(rows_of(made))) == 16 * 8
    out = np.full(8, 7, np.float32)
    for _ in range(3):
        with pytest.raises(HorizonError, match="horizon of 16"):
            made.next()
        with pytest.raises(HorizonError):
            made.next(out)
    assert made.step == 16
    assert (out == 7).all()


def test_skipping_does_not_pass_the_horizon(stream: Any) -> None:
    """skip_to(n) ends the stream; skip_to(n + 1) is refused and moves nothing."""
    made = stream()
    with pytest.raises(HorizonError):
        made.skip_to(17)
    assert made.step == 0
    made.skip_to(16)
    with pytest.raises(HorizonError):
        made.next()
    with pytest.raises(HorizonError):
        made.skip_to(10**30)


def test_restoring_does_not_pass_the_horizon(stream: Any, key: NoiseKey) -> None:
    """An exhausted stream stays exhausted, and a state that claims more steps than there are is refused."""
    made = stream()
    made.skip_to(16)
    again = NoiseStream.restore(made.artifact, made.state_dict(), key=key, resume="unpublished")
    with pytest.raises(HorizonError):
        again.next()
    with pytest.raises(MmfactError):
        NoiseStream.restore(made.artifact, {**made.state_dict(), "step": 17}, key=key, resume="unpublished")


def test_a_horizon_of_one_step(artifact_of: Any, stream: Any) -> None:
    """n = 1: one row, and then no more."""
    made = stream(artifact_of(workload.prefix_sum(1)))
    assert np.isfinite(made.next()).all()
    with pytest.raises(HorizonError):
        made.next()


@pytest.mark.parametrize("space", ["gradient", "iterate"])
@pytest.mark.parametrize("step", [0, 1, 9, 15])
def test_skipping_equals_stepping(space: str, step: int, stream: Any, rows_of: Any) -> None:
    """Rows after a skip are those that stepping would have given, bit for bit."""
    stepped, skipped = stream(space=space, run=bytes(16)), stream(space=space, run=bytes(16))
    rows_of(stepped, step)
    skipped.skip_to(step)
    assert skipped.step == step
    np.testing.assert_array_equal(rows_of(skipped), rows_of(stepped))


def test_skipping_in_the_middle_with_gaps(stream: Any, rows_of: Any) -> None:
    """Gaps leave holes in what is kept of the white rows; the rows must not notice."""
    whole, made = rows_of(stream(run=bytes(16))), stream(run=bytes(16))
    for step in (2, 3, 7, 15):
        made.skip_to(step)
        np.testing.assert_array_equal(made.next(), whole[step])


@pytest.mark.parametrize("step", [2, 0, -1, True, 2.0, "3", None])
def test_skipping_backward_or_nowhere_is_refused(step: Any, stream: Any, rows_of: Any) -> None:
    """Going back would issue a row twice."""
    made = stream()
    rows_of(made, 3)
    with pytest.raises(StateError):
        made.skip_to(step)
    assert made.step == 3


def test_out_is_filled_and_returned(stream: Any) -> None:
    """next(out) writes into out, so that a trainer need not touch 16 MB of fresh memory a step."""
    made, reference = stream(run=bytes(16)), stream(run=bytes(16))
    out = np.empty(8, np.float32)
    for _ in range(16):
        assert made.next(out) is out
        np.testing.assert_array_equal(out, reference.next())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_an_out_that_does_not_fit_is_refused_and_costs_no_step(dtype: str, stream: Any) -> None:
    """A silent cast, a row written beside the buffer, or a row lost to the error would break the run."""
    made, reference = stream(dtype=dtype, run=bytes(16)), stream(dtype=dtype, run=bytes(16))
    read_only = np.zeros(8, dtype)
    read_only.flags.writeable = False
    other = "float64" if dtype == "float32" else "float32"
    misfits: list[Any] = [
        np.zeros(8, other),
        np.zeros(8, np.float16),
        np.zeros(8, np.dtype(dtype).newbyteorder()),
        np.zeros(8, int),
        np.zeros(7, dtype),
        np.zeros(9, dtype),
        np.zeros((8, 1), dtype),
        np.zeros((1, 8), dtype),
        np.zeros((), dtype),
        np.zeros(16, dtype)[::2],
        np.zeros(8, dtype)[::-1],
        np.broadcast_to(np.zeros(1, dtype), 8),
        read_only,
        [0.0] * 8,
        memoryview(np.zeros(8, dtype)),
        bytearray(8 * np.dtype(dtype).itemsize),
        0.0,
    ]
    for misfit in misfits:
        with pytest.raises(StateError, match=r"out must be .*shape \(8,\)"):
            made.next(misfit)
        assert made.step == 0
    np.testing.assert_array_equal(made.next(), reference.next())


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_failure_while_drawing_costs_that_row_only(
    error: type[BaseException], at: int, stream: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C or no memory in the middle of a row: its step is spent, so that no part comes twice; the rest is right.

    The ledger counts it as issued, since it may have been seen.
    """
    whole, made = rows_of(stream(run=bytes(16))), stream(run=bytes(16))
    rows_of(made, at)

    def fail(*args: Any) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(NoiseSource, "fill", fail)
        with pytest.raises(error):
            made.next()
    assert made.step == made.ledger()["issued"] == at + 1
    np.testing.assert_array_equal(rows_of(made), whole[at + 1 :])


def test_rows_do_not_alias_each_other_or_the_state(stream: Any, rows_of: Any) -> None:
    """A trainer that scales a row in place must not change the rows to come."""
    whole, made = rows_of(stream(run=bytes(16))), stream(run=bytes(16))
    for expected in whole:
        row = made.next()
        np.testing.assert_array_equal(row, expected)
        row[:] = np.nan


@pytest.mark.parametrize("limit", [0, 8 * 4 * 3, 8 * 4 * 3 + 1])
def test_rows_do_not_depend_on_how_many_white_rows_are_kept(
    limit: int, stream: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large model keeps none and draws again; a small machine must not get other noise than a large one."""
    whole = rows_of(stream(run=bytes(16)))
    monkeypatch.setattr("mmfact.noise.stepping.HISTORY_BYTES", limit)
    made = stream(run=bytes(16))
    np.testing.assert_array_equal(rows_of(made, 9), whole[:9])
    made.skip_to(12)
    np.testing.assert_array_equal(rows_of(made), whole[12:])


@pytest.mark.parametrize(("limit", "draws"), [(1 << 20, 16), (0, 136), (8 * 4 * 3, 3 + 13 * 14 // 2)])
def test_white_rows_are_kept_up_to_the_limit(
    limit: int, draws: int, words: list[np.ndarray], stream: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the limit each row is drawn once; beyond it, again at each step, so that memory stays bounded."""
    monkeypatch.setattr("mmfact.noise.stepping.HISTORY_BYTES", limit)
    rows_of(stream())
    assert len(words) == draws


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("issued", [0, 5])
@pytest.mark.parametrize("call", ["next", "skip_to", "commit", "state_dict"])
def test_a_forked_child_issues_nothing(issued: int, call: str, stream: Any, rows_of: Any, tmp_path: Any) -> None:
    """A data loader that forks with the stream inside would issue its rows a second time, or vouch for what it lacks.

    Refused before anything else, an exhausted horizon for one; and its end, or close() there, ends nothing here.
    """
    whole, made = rows_of(stream(run=bytes(16))), stream(run=bytes(16), journal=tmp_path / "journal")
    rows_of(made, issued)
    made.state_dict()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            getattr(made, call)(*([16] if call == "skip_to" else []))
        except StateError as error:
            code = 0 if "fork" in str(error) else 2
        except BaseException:
            code = 3
        finally:
            made.close()
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    np.testing.assert_array_equal(rows_of(made), whole[issued:])
    made.state_dict()
    made.commit()
    assert made.ledger()["committed"] == 16


def test_a_closed_stream_does_nothing_more(stream: Any, rows_of: Any, key: NoiseKey, tmp_path: Any) -> None:
    """Its run may go on in another stream: a row from both would be issued twice. Its record can still be read."""
    path = tmp_path / "journal"
    made = stream(run=bytes(16), journal=path)
    rows = rows_of(stream(run=bytes(16)))
    rows_of(made, 3)
    state = made.state_dict()
    made.commit()
    ledger = made.ledger()
    out = np.full(8, 7, np.float32)
    for _ in range(2):
        made.close()
        for refused in (made.next, lambda: made.next(out), lambda: made.skip_to(5), made.commit, made.state_dict):
            with pytest.raises(StateError, match="closed"):
                refused()
        assert (out == 7).all()
        assert made.step == 3
        assert made.ledger() == ledger
    again = NoiseStream.restore(made.artifact, state, key=key, journal=path)
    np.testing.assert_array_equal(rows_of(again), rows[3:])


def test_two_threads_never_get_the_same_row(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both threads meet inside next(), if it lets them: they must get different rows, or one an error."""
    made, meeting, rows = stream(), threading.Barrier(2), []
    real = NoiseSource.fill

    def meet(self: NoiseSource, *given: Any) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(timeout=1)
        real(self, *given)

    monkeypatch.setattr(NoiseSource, "fill", meet)

    def work() -> None:
        with contextlib.suppress(MmfactError):
            rows.append(made.next().tobytes())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert rows
    assert len(set(rows)) == len(rows)
