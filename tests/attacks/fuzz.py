"""A coverage-guided fuzz of the artifact reader: whatever the bytes, a typed error or right numbers.

    python tests/attacks/fuzz.py --seconds 600 --corpus /tmp/corpus

Seeds are small artifacts of each strategy. Half of the mutations are of the bytes; the others take a file apart, change
its spec or one of its datasets, make digests and shapes fit again (mostly) and put it together, so that the checks
behind the digests are reached. A failure ends the run with a file `crash-*` beside the corpus: an error that is no
`MmfactError`, a message that could steer a terminal, numbers that h5py does not find in the same bytes, a file under an
original's digest that does not equal it, more than 10 s or 2 GiB for one file, or the end of the process.
Needs atheris (`pip install atheris`).
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import io
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

import atheris
import h5py
import numpy as np

sys.path.append(str(Path(__file__).parents[1]))

import mmfact.factorize.compiler  # noqa: F401 - before them: numba cannot compile what atheris has instrumented
from mmfact.factorize.errors import MmfactError

with atheris.instrument_imports():
    from mmfact.store import format, hdf5, schema
from attacks import forgery
from attacks.forgery import Forger
from mmfact.store.artifact import Artifact

HERE = Path("fuzz.h5")
ORIGINALS: dict[str, Forger] = {}
LARGEST = 1 << 17  # bytes of a mutated file
_NUMBERS = [0, 1, -1, 2, 3, 12, 2**24, 2**31, 2**53, 2**63 - 1, 0.0, -0.0, 0.5, 1.0, 1e-300, 1e300, 1e-9]
_VALUES = [
    *_NUMBERS,
    True,
    False,
    None,
    "",
    "dense",
    "buffered",
    "banded-low-rank",
    "custom",
    "x" * 400,
    [],
    {},
    [12, 2],
]
_FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-30, 1e30, 1e300, 5e-324, np.inf, -np.inf, np.nan]


def read(data: bytes) -> None:
    """One run of the reader, and what has to hold whatever comes out."""
    try:
        artifact = format.decode(data, HERE)
    except MmfactError as error:
        if not str(error).isprintable() or len(str(error)) > 2000:
            raise RuntimeError(f"a message that could steer a terminal, or too long: {str(error)!r:.300}") from error
        return
    if artifact.digest in ORIGINALS:
        if not forgery.same(artifact, ORIGINALS[artifact.digest].artifact):
            raise RuntimeError("another artifact under an original's digest")
        return
    _compare(artifact, data)


def _compare(artifact: Artifact, data: bytes) -> None:
    """A forged file that was believed: its numbers must be those that h5py finds, and its certificate theirs."""
    try:
        with h5py.File(io.BytesIO(data)) as file:
            stored = {name: file[name][...] for name in file}
    except (OSError, RuntimeError, KeyError, ValueError):  # it also minds damage to what no value depends on
        return
    if hashlib.sha256(stored["spec"].tobytes()).hexdigest() != artifact.digest:
        raise RuntimeError("h5py finds another spec")
    held = {f"strategy.{name}": array for name, array in artifact.strategy.coefficients().items() if array.size}
    held["multipliers"] = artifact.multipliers
    if artifact.workload.matrix is None:
        held["learning_rates"] = artifact.workload.learning_rates
    for name, array in held.items():
        if stored[name].tobytes() != array.tobytes():
            raise RuntimeError(f"h5py finds other values in {name}")
    sensitivity = float(np.linalg.norm(artifact.C, axis=0).max())
    certificate = artifact.certificate
    room = 1e-2 if artifact.strategy.kind == "banded-low-rank" else 1e-8
    if not sensitivity * (1 - 1e-8) <= certificate.sensitivity <= sensitivity * (1 + room):
        raise RuntimeError(f"sensitivity {certificate.sensitivity}, but NumPy finds {sensitivity}")
    if not 0 < certificate.lower_bound <= certificate.loss:
        raise RuntimeError("a certificate that contradicts itself")


def mutate(data: bytes, most: int, seed: int) -> bytes:
    """libFuzzer's mutation of the bytes, or one of the content."""
    chance = random.Random(seed)
    if chance.random() < 0.5:
        return atheris.Mutate(data, most)
    try:
        found = {name: hdf5.read(data, stored) for name, stored in hdf5.datasets(data, "spec").items()}
        spec = schema.parse(found.pop("spec").tobytes())
        text = _changed(spec, found, chance, most)
        made = Forger.write(text, found)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError):
        made = chance.choice(list(ORIGINALS.values())).data  # not to be taken apart: begin anew
    return made if len(made) <= most else data


def _changed(spec: Any, arrays: dict[str, np.ndarray], chance: random.Random, most: int) -> bytes:
    """The text of a changed spec; `arrays` is changed in place."""
    for _ in range(chance.choice([1, 1, 2, 3])):
        if chance.random() < 0.5:
            _change_spec(spec, chance)
        else:
            _change_arrays(arrays, chance)
    if chance.random() < 0.8 and isinstance(spec.get("datasets"), dict):
        for name, array in arrays.items():
            entry = {"shape": list(array.shape), "dtype": array.dtype.str}
            spec["datasets"][name] = {**entry, "sha256": hashlib.sha256(array.tobytes()).hexdigest()}
    text = json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()
    return atheris.Mutate(text, most) if chance.random() < 0.1 else text


def _change_spec(spec: Any, chance: random.Random) -> None:
    where = spec
    while True:
        if not isinstance(where, dict | list) or not where:
            return
        key = chance.choice(list(where)) if isinstance(where, dict) else chance.randrange(len(where))
        if not isinstance(where[key], dict | list) or chance.random() < 0.15:
            break
        where = where[key]
    kind = chance.randrange(4)
    if kind == 0 and isinstance(where[key], int | float):
        where[key] = where[key] * chance.choice([2, 0.5, -1, 1 + 1e-9, 1 - 1e-7, 1.001])
    elif kind == 1 and isinstance(where, dict):
        del where[key]
    elif kind == 2 and isinstance(where, dict):
        where[chance.choice(["n", "rank", "buffers", "matrix", "x", "\x1b"])] = copy.deepcopy(chance.choice(_VALUES))
    else:
        where[key] = copy.deepcopy(chance.choice(_VALUES))


def _change_arrays(arrays: dict[str, np.ndarray], chance: random.Random) -> None:
    name = chance.choice(list(arrays))
    array = arrays[name].copy()
    kind = chance.randrange(5)
    if kind == 0 and array.size:
        array.flat[chance.randrange(array.size)] = chance.choice(_FLOATS)
    elif kind == 1 and array.size:
        array.flat[chance.randrange(array.size)] *= chance.choice([2, 0.5, -1, 1 + 1e-9, 1 + 1e-5])
    elif kind == 2 and len(array) > 1:
        array = array[:-1]
    elif kind == 3:
        array = np.concatenate([array, array[-1:]])
    else:
        array = array.astype(chance.choice(["<f4", "<f8", ">f8", "<i8"]))
    arrays[name] = array


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=600, help="how long, in seconds")
    parser.add_argument(
        "--corpus", type=Path, help="folder of files that reached something new; default: a temporary one"
    )
    arguments = parser.parse_args()
    corpus = arguments.corpus or Path(tempfile.mkdtemp(prefix="fuzz-"))
    corpus.mkdir(parents=True, exist_ok=True)
    for name, make in forgery.HONEST.items():
        ORIGINALS[make().artifact.digest] = make()
        (corpus / f"honest-{name}").write_bytes(make().data)
    options = [f"-max_total_time={arguments.seconds}", f"-max_len={LARGEST}", "-timeout=10", "-rss_limit_mb=2048"]
    options.append(f"-artifact_prefix={corpus.parent}/")
    atheris.Setup([sys.argv[0], str(corpus), *options, "-print_final_stats=1"], read, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
