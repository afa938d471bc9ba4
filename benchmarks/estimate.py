"""How far are the estimates of `mmfact compile --dry-run` from what a compilation then takes?

For each request, in a fresh process each: the estimate, the measured wall time of the warm `mmfact compile` and its
peak memory, and their ratios. The constants of factorize/estimate.py are set so that these ratios straddle 1.

    python benchmarks/estimate.py [--long]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SHORT = (
    "--workload prefix-sum --n 2048",
    "--workload momentum --n 2048",
    "--workload prefix-sum --n 16384",
    "--workload momentum --n 16384 --lr-schedule cooldown",
    "--workload sgd --n 8192 --ema 0.9",
    "--workload momentum --n 2048 --strategy dense",
    "--workload prefix-sum --n 1024 --strategy banded-low-rank",
    "--workload momentum --n 1024 --method dense",
)
LONG = (
    "--workload prefix-sum --n 131072",
    "--workload momentum --n 131072 --lr-schedule cooldown",
    "--workload momentum --n 4096 --strategy dense",
)


def mmfact(*arguments: str) -> tuple[str, float, int]:
    """(stdout, wall seconds, peak bytes) of one command."""
    script = Path(sys.executable).parent / "mmfact"
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen([str(script), *arguments], stdout=out)
        _, status, usage = os.wait4(process.pid, 0)  # the peak of this very process
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode != 0:
            raise RuntimeError(f"mmfact {' '.join(arguments)} failed")
        out.seek(0)
        return out.read(), seconds, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--long", action="store_true", help="also horizons that take a minute or more")
    arguments = parser.parse_args()
    print(f"{'request':<62}{'estimate':>10}{'took, s':>9}{'ratio':>7}{'estimate':>11}{'peak, GiB':>11}{'ratio':>7}")
    for request in SHORT + (LONG if arguments.long else ()):
        words = request.split()
        expected = json.loads(mmfact("compile", *words, "--dry-run", "--json")[0])
        took, peak = [], []
        for _ in range(1 if "131072" in request else 3):
            with tempfile.TemporaryDirectory() as store:
                _, seconds, memory = mmfact("compile", *words, "--store", store)
            took.append(seconds)
            peak.append(memory)
        seconds, memory = sorted(took)[len(took) // 2], max(peak)
        print(
            f"{request:<62}{expected['seconds']:>10.1f}{seconds:>9.1f}{seconds / expected['seconds']:>7.2f}"
            f"{expected['memory_bytes'] / 2**30:>11.2f}{memory / 2**30:>11.2f}"
            f"{memory / expected['memory_bytes']:>7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
