"""Writers of one projector cache, killed at random moments, with readers beside them; run by test_projectors.py.

    python projector_processes.py FOLDER SEED ROUNDS

Each round forks two writers and ends both with SIGKILL. What an entry must hold follows from its key. Prints counts as
JSON; any surprise ends it with exit code 1 and its traceback.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np

from mmfact.factorize.errors import ProjectorStale
from mmfact.store.projectors import ProjectorCache, ProjectorKey

BOUND = 700_000  # about seven entries of the sixteen that are asked for
STEPS = 16


def key(step: int, variant: int) -> ProjectorKey:
    sizes = {"k": 5 + step % 3, "m": 9, "p": 3000 + 100 * step}
    return ProjectorKey(
        "c" * 32, step, "0-of-1", "eigen", **sizes, storage="float32", public=f"{variant:064x}", parameters=""
    )


def basis(key: ProjectorKey) -> np.ndarray:
    """The same for the same key, different for different ones."""
    random_numbers = np.random.default_rng([key.step, int(key.public, 16)])
    return random_numbers.standard_normal((key.k, key.p)).astype(np.float32)


def held(folder: Path) -> int:
    """Bytes in a folder that nobody writes into, each file once under however many names."""
    return sum({path.stat().st_ino: path.stat().st_size for path in folder.iterdir()}.values())


def write(folder: Path, seed: int) -> None:
    chance, cache = random.Random(seed), ProjectorCache(folder, max_bytes=BOUND)
    while True:
        wanted = key(chance.randrange(STEPS), chance.randrange(3))
        vectors = basis(wanted)
        cache.put(wanted, [vectors[:, :1000], vectors[:, 1000:]], {"spectrum": vectors[0, :9]}, {"step": wanted.step})


def read(folder: Path, seed: int, stop: Path) -> None:
    chance, cache = random.Random(seed), ProjectorCache(folder, max_bytes=BOUND)
    counts = {"hits": 0, "misses": 0, "stale": 0, "listed": 0}
    while not stop.exists():
        wanted = key(chance.randrange(STEPS), chance.randrange(3))
        try:
            found = cache.get(wanted)
        except ProjectorStale:
            counts["stale"] += 1
            continue
        if found is None:
            counts["misses"] += 1
            continue
        expected = basis(wanted)
        if found.key != wanted or found.basis.tobytes() != expected.tobytes():
            raise RuntimeError(f"another projector than was asked for at {found.path}")
        if found.values["spectrum"].tolist() != expected[0, :9].tolist() or found.record != {"step": wanted.step}:
            raise RuntimeError(f"other values at {found.path}")
        counts["hits"] += 1
        if counts["hits"] % 10 == 0:
            for entry in cache.entries():
                counts["listed"] += 1
                if entry.error is not None:
                    raise RuntimeError(entry.error)
    (folder.parent / f"reader{seed}").write_text(json.dumps(counts))


def wait_for_progress(folder: Path) -> None:
    """Until an entry has been published: on a busy machine writers that are killed too soon would only evict."""
    before = {path.name for path in folder.glob("*.h5")}
    end = time.monotonic() + 5
    while time.monotonic() < end and {path.name for path in folder.glob("*.h5")} <= before:
        time.sleep(0.002)


def forked(work: Callable[[], None]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        work()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(folder: Path, seed: int, rounds: int) -> None:
    chance, stop = random.Random(seed), folder.parent / "stop"
    cache = ProjectorCache(folder, max_bytes=BOUND)
    readers = [forked(lambda number=number: read(folder, number, stop)) for number in range(2)]
    cut, largest = 0, 0
    folder.mkdir()
    for number in range(rounds):
        writers = [forked(lambda n=n: write(folder, n)) for n in (seed + 2 * number, seed + 2 * number + 1)]
        wait_for_progress(folder)
        time.sleep(chance.uniform(0, 0.03))
        for writer in writers:
            os.kill(writer, signal.SIGKILL)
            _, status = os.waitpid(writer, 0)
            if not os.WIFSIGNALED(status):
                raise RuntimeError("a writer ended by itself")
        largest = max(largest, held(folder))
        cut += any(path.name.startswith(".tmp-") for path in folder.iterdir())
    stop.touch()
    for reader in readers:
        _, status = os.waitpid(reader, 0)
        if status:
            raise RuntimeError("a reader failed")
    last = key(0, 0)
    cache.put(last, [basis(last)], {}, {})
    entries = list(cache.entries())
    report = {
        "cut": cut,
        "largest": largest,
        "errors": [entry.error for entry in entries if entry.error is not None],
        "entries": len(entries),
        "names": sorted(path.name for path in folder.iterdir()),
        "held": held(folder),
        "readers": [json.loads((folder.parent / f"reader{number}").read_text()) for number in range(2)],
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
