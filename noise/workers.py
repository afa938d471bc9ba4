"""Threads for one row: its blocks are worked on in no particular order, by the caller and its helpers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

MOST_THREADS = 64


class Workers:
    """Run a function over numbered blocks, `threads` of them at a time.

    An exception, Ctrl-C above all, ends a run after the blocks that have been begun; what is not begun is left out.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._helping: list[Future[None]] = []

    def run(self, work: Callable[[int], None], blocks: int) -> None:
        """work(0), ..., work(blocks - 1), each once, in any order."""
        self._finish()  # what a second Ctrl-C may have left running
        left = deque(range(blocks))

        def help_out() -> None:
            while True:
                try:
                    block = left.popleft()
                except IndexError:
                    return
                work(block)

        try:
            for _ in range(min(self.threads, blocks) - 1):
                self._helping.append(_pool().submit(help_out))
            help_out()
        finally:
            left.clear()
            failures = self._finish()
        if failures:
            raise failures[0]

    def _finish(self) -> list[BaseException]:
        """Wait for the helpers that have begun; what went wrong in them."""
        begun = [helper for helper in self._helping if not helper.cancel()]
        wait(begun)
        self._helping = []
        return [failure for failure in (helper.exception() for helper in begun) if failure is not None]


_pools: dict[int, ThreadPoolExecutor] = {}  # by process: threads do not survive a fork


def _pool() -> ThreadPoolExecutor:
    process = os.getpid()
    if process not in _pools:
        _pools.clear()
        _pools[process] = ThreadPoolExecutor(MOST_THREADS, "mmfact-noise")
    return _pools[process]
