"""Every single bit of a small artifact flipped, and every truncation: as a user meets it, and past the outer digest.

In worker processes: a crash would break the pool and fail the test.
"""

import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import ArtifactCorrupt, ArtifactVersionError
from mmfact.store import format
from mmfact.store.artifact import Artifact
from mmfact.store.store import ArtifactStore, read

pytestmark = pytest.mark.slow

BATCH = 2000  # changes that one worker tries in a row


@pytest.fixture(scope="module", params=["dense", "buffered"])
def saved(request, tmp_path_factory):
    buffers = 1 if request.param == "buffered" else None
    factorization = compile(workload.prefix_sum(4), Options(strategy=request.param, tolerance=0.5, buffers=buffers))
    folder = tmp_path_factory.mktemp("exhaustive")
    yield ArtifactStore(folder).save(factorization, "small").path
    shutil.rmtree(folder)


def changed(data: bytes, change: int) -> bytes:
    """The file with bit `change` flipped; for changes below 0, all but its last -change bytes."""
    if change < 0:
        return data[:change]
    altered = bytearray(data)
    altered[change // 8] ^= 1 << change % 8
    return bytes(altered)


def content(artifact: Artifact) -> tuple[object, ...]:
    """All that anyone reads."""
    arrays = {**artifact.strategy.coefficients(), "v": artifact.multipliers, "eta": artifact.workload.learning_rates}
    return (
        {name: (array.dtype.str, array.shape, array.tobytes()) for name, array in arrays.items()},
        artifact.workload.spec(),
        artifact.certificate,
        artifact.participation,
        artifact.provenance,
        artifact.digest,
    )


def as_a_user(path: Path, changes: range) -> tuple[int, int]:
    """(refused, unchanged): each change on disk under the name that the store gave it."""
    data, truth, counts = path.read_bytes(), content(read(path)), [0, 0]
    copy = path.parent / f"worker-{os.getpid()}" / path.name
    copy.parent.mkdir(exist_ok=True)
    for change in changes:
        copy.write_bytes(changed(data, change))
        try:
            counts[1] += content(read(copy)) == truth or lie(change)
        except ArtifactCorrupt:
            counts[0] += 1
    return counts[0], counts[1]


def past_the_digest(path: Path, changes: range) -> tuple[int, int]:
    """The same as if the file digest were not checked: the bytes go straight to the reader."""
    data, truth, counts = path.read_bytes(), content(read(path)), [0, 0]
    for change in changes:
        try:
            # with the logical digest that the name holds, as `read` passes it on
            counts[1] += content(format.decode(changed(data, change), path, path.name[:64])) == truth or lie(change)
        except (ArtifactCorrupt, ArtifactVersionError):
            counts[0] += 1
    return counts[0], counts[1]


def lie(change: int) -> bool:
    raise AssertionError(f"change {change} gives other numbers and no error")


def everything(way, path: Path) -> np.ndarray:
    size = path.stat().st_size
    changes = range(-size, 8 * size)
    batches = [changes[first : first + BATCH] for first in range(0, len(changes), BATCH)]
    with ProcessPoolExecutor(max_workers=os.cpu_count()) as pool:
        counts = np.sum(list(pool.map(way, [path] * len(batches), batches)), axis=0)
    assert counts.sum() == 9 * size
    return counts


def test_every_bit_and_every_length_as_a_user_meets_it(saved):
    refused, unchanged = everything(as_a_user, saved)
    assert unchanged == 0, "a file that changed in any bit was believed"
    assert refused == 9 * saved.stat().st_size


def test_every_bit_and_every_length_past_the_file_digest(saved):
    """What the inner checks let pass is equal to the original: most of a small HDF5 file is room that nothing uses."""
    refused, _ = everything(past_the_digest, saved)
    assert refused > saved.stat().st_size, "the truncations alone are more"
