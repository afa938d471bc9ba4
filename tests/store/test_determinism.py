"""The same request gives the same file: in other processes, at other times, with other hash seeds and languages."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, json
import numpy as np
from mmfact.factorize import schedule, workload
from mmfact.factorize.compiler import Options, compile
from mmfact.store.format import encode, from_factorization
n = 200
matrix = np.tril(np.random.default_rng(0).uniform(0.5, 1, (60, 60))) + 20 * np.eye(60)
requests = {
    "buffered": (workload.momentum(n, learning_rates=schedule.parse("cooldown", n)), Options()),
    "buffered, ema": (workload.momentum(n, ema=0.9), Options(dtype="float64")),
    "banded": (workload.prefix_sum(n), Options(strategy="banded-low-rank", bandwidth=8, rank=3, tolerance=0.1)),
    "dense": (workload.momentum(n), Options(strategy="dense")),
    "dense method": (workload.sgd(n), Options(strategy="dense", method="dense")),
    "custom": (workload.custom(matrix), Options(tolerance=0.1)),
}
made = {name: from_factorization(compile(*request)) for name, request in requests.items()}
print(json.dumps({name: (a.digest, hashlib.sha256(encode(a)).hexdigest()) for name, a in made.items()}))
"""


def digests(threads, **more):
    variables = {f"{library}_NUM_THREADS": str(threads) for library in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
    environment = {**os.environ, **variables, **more}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def first():
    return digests(1, PYTHONHASHSEED="1")


def test_same_digest_in_another_process(first):
    assert digests(1, PYTHONHASHSEED="2", TZ="Asia/Tokyo", LC_ALL="C", HOME="/nowhere") == first


@pytest.mark.slow
def test_buffered_strategies_do_not_depend_on_the_threads(first):
    """Those of structured workloads use no linear algebra that rounds differently with its number of threads."""
    other = digests(2)
    for name in ("buffered", "buffered, ema"):
        assert other[name] == first[name]
