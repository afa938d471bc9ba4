"""The runtime is light: a trainer that imports it gets no solver, no command line and no other framework."""

from __future__ import annotations

import json
import subprocess
import sys

HEAVY = ("scipy.optimize", "cvxpy", "click", "torch", "jax", "matplotlib", "rich", "sklearn", "dp_accounting")


def run(code: str, *flags: str) -> str:
    done = subprocess.run([sys.executable, *flags, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_room_loads_nothing_heavy() -> None:
    """Every worker of a training job imports this; the solver's dependencies would cost it seconds and memory."""
    loaded = set(json.loads(run("import sys, json, mmfact.noise; print(json.dumps(sorted(sys.modules)))")))
    assert "mmfact.noise.stream" in loaded
    assert not [name for name in HEAVY if name in loaded]
    assert not [name for name in loaded if name.startswith(("mmfact.cli", "mmfact.factorize.construct"))]
    assert not {"mmfact.factorize.optimum", "mmfact.factorize.compiler", "mmfact.factorize.reference"} & loaded


def test_the_face_gives_the_same_classes() -> None:
    """mmfact.NoiseStream is mmfact.noise.NoiseStream."""
    import mmfact
    from mmfact import noise

    assert mmfact.NoiseStream is noise.NoiseStream
    assert mmfact.NoiseKey is noise.NoiseKey


def test_checks_do_not_go_away_under_python_minus_o() -> None:
    """The trap: asserts that `python -O` removes, and a stream that runs on past its horizon or on a bad key."""
    code = """
import pickle, numpy as np
from mmfact.factorize import compiler, workload
from mmfact.factorize.errors import HorizonError, MmfactError, PrivacyError, StateError
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.store.format import from_factorization

artifact = from_factorization(compiler.compile(workload.prefix_sum(2)))
make = lambda **options: NoiseStream(artifact, 4, **{"noise_multiplier": 1.0, "clip_norm": 1.0, **options})
stream = make()
stream.next(), stream.next()
attempts = [stream.next, stream.state_dict, lambda: pickle.dumps(stream), lambda: stream.skip_to(0)]
attempts += [lambda: make(noise_multiplier=0), lambda: make(dtype="float16"), lambda: make(run=b"")]
attempts += [lambda: make().next(np.zeros(3)), lambda: NoiseKey.from_bytes(b""), lambda: make(threads=0)]
attempts += [lambda: setattr(stream, "noise_multiplier", 0.1), stream.commit]
closed = make(key=NoiseKey.ephemeral())
state = closed.state_dict()
closed.close()
attempts += [closed.next, lambda: NoiseStream.restore(artifact, state, key=closed.key)]
attempts += [
    lambda: NoiseStream.restore(artifact, {**state, "clip_norm": 0.1}, key=closed.key, resume="unpublished"),
]
refused = 0
for attempt in attempts:
    try:
        attempt()
    except MmfactError:
        refused += 1
print(__debug__, refused, len(attempts))
"""
    debug, refused, attempts = run(code, "-O").split()
    assert debug == "False"
    assert refused == attempts
