"""How long does opening an artifact take, with every check of the store?

For the buffered artifacts of momentum at n = 2048 and n = 131072, warm, on one thread: the file's digest, its layout,
the schema, the digests of all datasets, sensitivity, loss and max error recomputed; beside the limits of 50 ms and 1 s,
and beside h5py, which reads the same datasets and checks fletcher32 only.

    python benchmarks/store.py
    python benchmarks/store.py --store DIR      that holds them already, as momentum-n2048 and momentum-n131072
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import h5py

from mmfact.factorize import workload
from mmfact.factorize.compiler import compile
from mmfact.store.store import ArtifactStore, read

LIMITS = {2048: 0.05, 131072: 1.0}  # seconds, by steps


def median(run: Callable[[], object], repeats: int) -> float:
    """Seconds, after one run that is not counted."""
    run()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def bare(path: Path) -> dict[str, object]:
    with h5py.File(path) as file:
        return {name: file[name][...] for name in file}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--store", help="a store that holds the artifacts; default: they are compiled")
    arguments = parser.parse_args()
    print(f"medians of {arguments.repeats}, warm")
    with tempfile.TemporaryDirectory() as folder:
        store = ArtifactStore(arguments.store or folder)
        for n, limit in LIMITS.items():
            ref = f"momentum-n{n}"
            path = store.resolve(ref) if arguments.store else store.save(compile(workload.momentum(n)), ref).path
            if path is None:
                raise RuntimeError(f"{ref} was not stored")
            checked = median(lambda path=path: read(path), arguments.repeats)
            unchecked = median(lambda path=path: bare(path), arguments.repeats)
            print(
                f"n = {n}: {path.stat().st_size / 1024:.0f} KiB, open and check {checked * 1e3:.1f} ms "
                f"({checked / limit:.2f} of the limit {limit * 1e3:.0f} ms); h5py alone, unchecked, "
                f"{unchecked * 1e3:.1f} ms (ratio {checked / unchecked:.1f})"
            )


if __name__ == "__main__":
    main()
