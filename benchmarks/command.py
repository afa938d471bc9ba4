"""How long does a user wait for `mmfact compile`, and how much memory does it take?

Runs the whole command in fresh processes, each with an empty store, after one run that fills numba's
cache, and prints the median wall time and peak memory beside the limits: 15 s and 1.5 GiB for
n = 2048 with the dense strategy, with an excess of at most 1e-8.

    python benchmarks/command.py
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = (
    ("--workload", "momentum", "--n", "2048", "--strategy", "dense"),
    ("--workload", "momentum", "--n", "2048", "--lr-schedule", "cooldown", "--strategy", "dense"),
)
MAIN = "from mmfact.cli.main import main; main()"
SECONDS, GIBIBYTES, EXCESS = 15.0, 1.5, 1e-8


def run(arguments: tuple[str, ...]) -> tuple[float, float, float]:
    """Wall seconds, peak GiB and excess of one process."""
    with tempfile.TemporaryDirectory() as store:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", MAIN, "compile", *arguments, "--store", store, "--json"],
            stdout=subprocess.PIPE,
        )
        if process.stdout is None:
            raise RuntimeError("no pipe to the command")
        output = process.stdout.read()
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - start
    if status != 0:
        raise RuntimeError(f"the command failed with status {status}")
    return seconds, usage.ru_maxrss / 2**20, json.loads(output)["certificate"]["excess"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print(f"medians of {repeats}; limits: {SECONDS:g} s, {GIBIBYTES:g} GiB, excess {EXCESS:g}")
    for arguments in COMMANDS:
        run(arguments)
        runs = [run(arguments) for _ in range(repeats)]
        seconds, memory, excess = (statistics.median(column) for column in zip(*runs, strict=True))
        print(
            f"mmfact compile {' '.join(arguments)}: {seconds:.2f} s ({seconds / SECONDS:.2f} of the limit), "
            f"{memory:.2f} GiB ({memory / GIBIBYTES:.2f}), excess {excess:.1e} ({excess / EXCESS:.1e})"
        )


if __name__ == "__main__":
    main()
