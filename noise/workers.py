"""Threads for one row: its blocks are worked on in no particular order, by the caller and its helpers.

Ctrl-C may come between any two statements here. What the standard library's pools share between threads is guarded by
locks in Python, which an interrupt can leave locked for ever; so helpers are threads that live for one row, started and
waited for by single native calls.
"""

from __future__ import annotations

import contextlib
from _thread import LockType, allocate_lock, start_new_thread
from collections import deque
from collections.abc import Callable

MOST_THREADS = 64


class Workers:
    """Run a function over numbered blocks, `threads` of them at a time.

    An exception, Ctrl-C above all, ends a run after the blocks that have been begun; what is not begun is left out.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._busy: list[LockType] = []  # one for each helper, locked while it has a block

    def run(self, work: Callable[[int], None], blocks: int) -> None:
        """work(0), ..., work(blocks - 1), each once, in any order."""
        self._wait()  # for what a second Ctrl-C may have left running
        left = deque(range(blocks))
        failures: list[BaseException] = []
        # Emptied at the end. A helper that starts late, or is at its last line, must not be the last to hold what the
        # rows go into: a tensor that is freed while the interpreter shuts down ends the process.
        task = [work]

        def help_out(busy: LockType) -> None:
            while True:
                with busy:
                    try:
                        block = left.popleft()
                    except IndexError:
                        return
                    try:
                        task[0](block)
                    except BaseException as failure:  # raised below, in the caller's thread
                        failures.append(failure)
                        left.clear()

        self._busy = [allocate_lock() for _ in range(min(self.threads, blocks) - 1)]
        try:
            try:
                with contextlib.suppress(RuntimeError):  # no more threads to be had: fewer will do
                    for busy in self._busy:
                        start_new_thread(help_out, (busy,))
                while True:
                    try:
                        block = left.popleft()
                    except IndexError:
                        break
                    work(block)
            finally:
                left.clear()
                self._wait()
        finally:  # once more: the first may have been interrupted
            left.clear()
            self._wait()
            task.clear()
        if failures:
            first = failures[0]
            failures.clear()
            raise first

    def _wait(self) -> None:
        """Until no helper has a block; one that has not begun will find none left."""
        for busy in self._busy:
            with busy:
                pass
