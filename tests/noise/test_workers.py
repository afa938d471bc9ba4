"""Threads of a row: each block once, failures pass on, nothing runs on afterwards, and no process or thread hangs."""

from __future__ import annotations

import contextlib
import dis
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.factorize import machine
from mmfact.noise import workers
from mmfact.noise.workers import MOST_THREADS, Workers

PATIENCE = 60  # seconds after which something hangs

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def helping() -> bool:
    """Whether this is not the main thread."""
    return threading.get_ident() != threading.main_thread().ident


@pytest.fixture
def ringing() -> Iterator[Callable[..., None]]:
    """ringing(after, again=0): Ctrl-C after so many seconds, and again after so many more."""

    def handle(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda after, again=0.0: signal.setitimer(signal.ITIMER_REAL, after, again)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# --- the blocks ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 2, 3, 7, MOST_THREADS])
@pytest.mark.parametrize("blocks", [0, 1, 2, 5, 300])
def test_each_block_is_worked_on_once(threads: int, blocks: int) -> None:
    """A block left out is a hole in the noise, one done twice a step too far; 10 runs with one and the same object.

    Never by more threads than there are blocks, nor than were asked for; the caller takes its part.
    """
    crew = Workers(threads)
    for _ in range(10):
        done: list[int] = []
        hands: set[int] = set()

        def work(block: int, done: list[int] = done, hands: set[int] = hands) -> None:
            hands.add(threading.get_ident())
            done.append(block)

        crew.run(work, blocks)
        assert sorted(done) == list(range(blocks))
        assert len(hands) <= min(threads, max(blocks, 1))
    if threads == 1 and blocks:
        assert hands == {threading.get_ident()}


@pytest.mark.parametrize("threads", [2, 4])
def test_blocks_are_worked_on_at_the_same_time(threads: int) -> None:
    """Each block waits until all are being worked on: with one thread fewer nothing would ever end."""
    meeting = threading.Barrier(threads, timeout=PATIENCE)
    Workers(threads).run(lambda block: meeting.wait() and None, threads)


def test_most_threads_at_once_are_those_asked_for() -> None:
    """Three threads, 60 blocks of a millisecond: a fourth would take a core that the trainer counts on."""
    active: list[int] = []
    most = []

    def work(block: int) -> None:
        active.append(block)
        most.append(len(active))
        time.sleep(1e-3)
        active.remove(block)

    Workers(3).run(work, 60)
    assert max(most) <= 3


def test_a_thread_of_the_users_may_call() -> None:
    """A trainer's own thread, not only the main one."""
    done: list[int] = []
    thread = threading.Thread(target=lambda: Workers(3).run(done.append, 50))
    thread.start()
    thread.join(PATIENCE)
    assert sorted(done) == list(range(50))


def test_the_default_is_the_cores_that_may_be_used(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 64; in a container with one core one."""
    for cores, threads in [(1, 1), (3, 3), (64, 64), (65, 64), (500, 64)]:
        monkeypatch.setattr(machine, "threads", lambda cores=cores: cores)
        assert stream().threads == threads
        assert stream(threads=5).threads == 5


# --- failures --------------------------------------------------------------------------------------


class BlockError(Exception):
    pass


@pytest.mark.parametrize("error", [BlockError, MemoryError, IndexError, RuntimeError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("in_helper", [False, True])
def test_a_failure_passes_on_as_itself(error: type[BaseException], in_helper: bool) -> None:
    """In the caller's block and in a helper's, none taken for one of the machinery's own: a hole in a row otherwise.

    The next run is undisturbed.
    """
    crew = Workers(2)
    meeting = threading.Barrier(2, timeout=PATIENCE)

    def work(block: int) -> None:
        meeting.wait()  # so that the helper has one of the two blocks
        if helping() == in_helper:
            raise error("in a block")

    with pytest.raises(error, match="in a block"):
        crew.run(work, 2)
    done: list[int] = []
    crew.run(done.append, 100)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("in_helper", [False, True])
def test_a_failure_ends_the_run(in_helper: bool) -> None:
    """What is not begun is left out: a row that is lost anyway must not keep the caller for seconds.

    3000 blocks of a millisecond, and a failure in the first one of a thread: the other has at most 1000 more.
    """
    done: list[int] = []
    meeting = threading.Barrier(2, timeout=PATIENCE)
    first = threading.local()

    def work(block: int) -> None:
        if not hasattr(first, "met"):
            first.met = True
            meeting.wait()
            if helping() == in_helper:
                raise BlockError
        time.sleep(1e-3)
        done.append(block)

    with pytest.raises(BlockError):
        Workers(2).run(work, 3000)
    assert len(done) < 1000


@pytest.mark.parametrize("in_helper", [False, True])
def test_a_failure_waits_for_the_blocks_that_were_begun(in_helper: bool) -> None:
    """Otherwise a thread writes into the caller's array after the call is over."""
    meeting = threading.Barrier(2, timeout=PATIENCE)
    ended = []

    def work(block: int) -> None:
        meeting.wait()
        if helping() == in_helper:
            raise BlockError
        time.sleep(0.2)
        ended.append(block)

    with pytest.raises(BlockError):
        Workers(2).run(work, 2)
    assert len(ended) == 1


@pytest.mark.parametrize("when", ["at work", "waiting"])
def test_ctrl_c_waits_for_the_blocks_that_were_begun(when: str, ringing: Callable[..., None]) -> None:
    """A real signal while the caller has a block, and while it has none left and waits for its helper."""
    meeting = threading.Barrier(2, timeout=PATIENCE)
    ended = []

    def work(block: int) -> None:
        meeting.wait()
        if helping():
            time.sleep(0.4)
            ended.append(block)
        elif when == "at work":
            time.sleep(PATIENCE)

    ringing(0.1)
    with pytest.raises(KeyboardInterrupt):
        Workers(2).run(work, 2)
    assert len(ended) == 1


def test_a_run_after_two_ctrl_c_waits_for_what_the_first_left(ringing: Callable[..., None]) -> None:
    """The second Ctrl-C ends the waiting; then no thread may still be at a block when the next row is begun."""
    crew = Workers(2)
    meeting = threading.Barrier(2, timeout=PATIENCE)
    ended: list[float] = []
    begun: list[float] = []

    def slow(block: int) -> None:
        meeting.wait()
        time.sleep(0.6 if helping() else PATIENCE)
        ended.append(time.monotonic())

    ringing(0.1, 0.1)
    with pytest.raises(KeyboardInterrupt):
        crew.run(slow, 2)
    ringing(0)
    assert not ended
    crew.run(lambda block: begun.append(time.monotonic()), 4)
    assert len(begun) == 4
    assert len(ended) == 1
    assert ended[0] <= min(begun)


NOP = dis.opmap["NOP"]
SOURCE = Path(str(workers.__file__)).read_text().splitlines()


def test_ctrl_c_at_any_line_leaves_nothing_running() -> None:
    """Raised before every line and at every return of workers.py in the main thread.

    Afterwards no helper is at a block, none begins one, and the next run is whole. Where no signal is ever handled is
    left out, as in test_interruption.py. A helper's block takes 8 ms, so that one that was not waited for is caught.
    """
    active: list[int] = []

    def work(block: int) -> None:
        if helping():
            active.append(block)
            time.sleep(8e-3)
            active.remove(block)
        else:
            time.sleep(1e-3)

    crew = Workers(3)
    misses = at = 0
    while misses < 3:
        at += 1
        points = 0

        def local(frame: types.FrameType, event: str, arg: Any, at: int = at) -> Any:
            nonlocal points
            code = SOURCE[frame.f_lineno - 1]
            idle = frame.f_code.co_code[frame.f_lasti] == NOP
            if event in ("line", "return") and not idle and not code.strip().startswith("with "):
                points += 1
                if points == at:
                    raise KeyboardInterrupt
            return local

        def tracer(frame: types.FrameType, event: str, arg: Any, local: Any = local) -> Any:
            return local if frame.f_code.co_filename == workers.__file__ else None

        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            crew.run(work, 5)
            hit = False
        except KeyboardInterrupt:
            hit = True
        finally:
            sys.settrace(before)
        running = list(active)
        assert not running, f"point {at}: still at {running}"
        misses = 0 if hit else misses + 1
        done: list[int] = []
        crew.run(done.append, 5)
        assert sorted(done) == list(range(5)), f"after point {at}"
    assert at > 20  # the tracer did see the code


# --- many streams, many processes ------------------------------------------------------------------


def test_many_streams_of_many_threads_do_not_wait_for_each_other(
    built: Any, stream: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten user threads, each with two streams of up to 64 threads, switched every 10 microseconds: all rows right."""
    artifact = built("buffered", "float32", "cooldown").artifact
    expected = rows_of(stream(artifact, 50, run=bytes(16)))
    monkeypatch.setattr("mmfact.noise.stepping.BLOCK", 3)
    wrong: list[Any] = []
    ended = []
    start = threading.Barrier(10)

    def train(threads: int) -> None:
        mine = [stream(artifact, 50, run=bytes(16), threads=threads) for _ in range(2)]
        start.wait()
        try:
            for _ in range(4):
                for step, row in enumerate(expected[:3]):
                    wrong.extend((threads, step) for run in mine if (run.next() != row).any())
                mine = [stream(artifact, 50, run=bytes(16), threads=threads) for _ in range(2)]
            ended.append(threads)
        except BaseException as error:
            wrong.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        users = [threading.Thread(target=train, args=(n,), daemon=True) for n in (1, 2, 2, 3, 4, 4, 8, 16, 33, 64)]
        for user in users:
            user.start()
        for user in users:
            user.join(PATIENCE)
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert len(ended) == len(users), "some threads wait for ever"


BEGINNING = """
import os, signal, sys, threading, time
import numpy as np
from mmfact.factorize import compiler, workload
from mmfact.noise import NoiseKey, NoiseStream, stepping
from mmfact.store.format import from_factorization

stepping.BLOCK = 100

def rows(artifact, threads, count=4, **options):
    stream = NoiseStream(artifact, 1000, noise_multiplier=1.0, clip_norm=1.0, key=NoiseKey.insecure_from_seed(1),
                         run=bytes(16), threads=threads, **options)
    return np.array([stream.next() for _ in range(count)])

def compiled():
    return from_factorization(compiler.compile(workload.prefix_sum(4), compiler.Options(buffers=1, tolerance=0.5)))
"""


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """script(code): what it prints after `BEGINNING`, in a process of its own, which must end well within a minute."""

    def run(code: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(BEGINNING + code)
        done = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=PATIENCE, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip() + done.stderr.strip()

    return run


@needs_fork
def test_a_forked_child_has_threads_of_its_own(script: Callable[[str], str]) -> None:
    """Threads do not survive a fork: a child that asked its parent's would wait for ever.

    Forked between two rows and in the middle of one, whose helper is then at a block. The children make new streams,
    compare their rows with those of one thread, and end as any program does, through the exit handlers.
    """
    code = """
artifact = compiled()
alone, together = rows(artifact, 1), rows(artifact, 3)

def child():
    if os.fork() == 0:
        signal.alarm(30)
        good = all((rows(artifact, threads) == alone).all() for threads in (1, 2, 5))
        sys.exit(0 if good else 1)
    return os.waitstatus_to_exitcode(os.wait()[1])

codes = [child(), child()]
busy, go = threading.Event(), threading.Event()
real = stepping.BufferedStepper._take

def slow(*given):
    if threading.get_ident() != threading.main_thread().ident:
        busy.set()
        go.wait(30)
    real(*given)

stepping.BufferedStepper._take = slow
user = threading.Thread(target=lambda: codes.append(int((rows(artifact, 3) != alone).any())))
user.start()
busy.wait(30)
stepping.BufferedStepper._take = real
codes.append(child())
go.set()
user.join()
codes.append(int((together != alone).any() or (rows(artifact, 3) != alone).any()))
print(codes)
"""
    assert script(code) == "[0, 0, 0, 0, 0]"


def test_spawned_processes(script: Callable[[str], str]) -> None:
    """Two processes that a trainer starts with multiprocessing's spawn: the same shards, whatever their threads."""
    code = """
import multiprocessing

def shard(number):
    return rows(compiled(), 1 + number, offset=number, total=2000)

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(shard, [0, 1])
    print((first == rows(compiled(), 3)).all(), (first[:, 1:] == second[:, :-1]).all())
"""
    assert script(code) == "True True"


def test_a_training_thread_outlives_the_main_one(script: Callable[[str], str]) -> None:
    """A script that starts its training in a thread and comes to its end: the rows go on, on several threads."""
    code = """
artifact = compiled()
alone = rows(artifact, 1)
rows(artifact, 2)

def train():
    threading.main_thread().join()
    time.sleep(0.1)
    print((rows(artifact, 2) == alone).all(), (rows(artifact, 4) == alone).all())

threading.Thread(target=train).start()
"""
    assert script(code) == "True True"


def test_no_thread_is_started_before_it_is_needed(script: Callable[[str], str]) -> None:
    """One thread, or one block: nothing to start, and nothing that a fork could lose."""
    code = """
artifact = compiled()
rows(artifact, 1)
stepping.BLOCK = 1000
rows(artifact, 64)
print(threading.active_count())
"""
    assert script(code) == "1"


@pytest.mark.parametrize("allowed", [0, 1, 2])
def test_a_machine_without_more_threads_still_gives_rows(
    allowed: int, built: Any, stream: Any, rows_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Containers limit threads: the caller then works with those there are; the row would be lost for nothing."""
    artifact = built("buffered", "float32", "cooldown").artifact
    expected = rows_of(stream(artifact, 50, run=bytes(16)))
    monkeypatch.setattr("mmfact.noise.stepping.BLOCK", 7)
    started, real = [], workers.start_new_thread

    def start(*given: Any) -> int:
        if len(started) % 3 >= allowed:
            started.append(0)
            raise RuntimeError("can't start new thread")
        started.append(1)
        return real(*given)

    with monkeypatch.context() as patch:
        patch.setattr(workers, "start_new_thread", start)
        np.testing.assert_array_equal(rows_of(stream(artifact, 50, run=bytes(16), threads=4)), expected)
    assert started.count(0) >= 12
    np.testing.assert_array_equal(rows_of(stream(artifact, 50, run=bytes(16), threads=4)), expected)


def test_ctrl_c_while_a_helper_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun, but the call that began it has not come back: it is waited for all the same."""
    real, ended = workers.start_new_thread, []

    def start(*given: Any) -> int:
        real(*given)
        assert begun.wait(PATIENCE)
        raise KeyboardInterrupt

    def work(block: int) -> None:
        begun.set()
        time.sleep(0.2)
        ended.append(block)

    begun = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(workers, "start_new_thread", start)
        with pytest.raises(KeyboardInterrupt):
            Workers(3).run(work, 5)
    assert ended == [0]


@pytest.mark.parametrize("fails", [False, True])
def test_a_late_helper_holds_nothing_of_the_row(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it may be the one to free a tensor, and while the interpreter shuts down that ends the process."""
    late: list[tuple[Any, Any]] = []
    monkeypatch.setattr(workers, "start_new_thread", lambda function, given: late.append((function, given)))

    class Rows:
        """What the rows go into."""

    rows = Rows()
    gone = weakref.ref(rows)

    def work(block: int, rows: Rows = rows) -> None:
        if fails and block == 3:
            raise MemoryError

    with pytest.raises(MemoryError) if fails else contextlib.nullcontext():
        Workers(3).run(work, 5)
    del rows, work
    gc.collect()
    assert gone() is None
    for function, given in late:
        assert function(*given) is None
    assert len(late) == 2
