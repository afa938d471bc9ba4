"""No noise value serves two releases: keystream bytes never meet across keys, runs, artifacts, names, dtypes, steps.

Two searches. By construction: every read of the keystream is recorded, with its subkey and place, and no two may touch
the same byte. By content: any 8 bytes that begin at a multiple of 4 (two words of float32, one of float64 or half of
two, one second word) must be different from all others. Single words of float32 do meet by chance, 8 bytes do not: N
places that should be independent have an equal pair with probability below N^2 / 2^65, for the largest search here
(N = 840,000) 1.9e-8, so any pair means reuse.
"""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from mmfact.noise import NoiseKey
from mmfact.noise import source as noise_source
from mmfact.noise.source import LARGEST_ROW, NoiseSource

Array = npt.NDArray[Any]

DIGESTS = ["00" * 32, "00" * 31 + "01"]
NAMES = ["", "w", "w\x00", "\x00w", "wb", " float32", "w float64", "é", unicodedata.normalize("NFD", "é"), "w" * 300]
SECONDS = 32  # second words that each row is made to ask for


@dataclass(frozen=True)
class Read:
    subkey: bytes
    start: int
    found: Array


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Read]:
    """Every read of a keystream from here on; the first elements of each piece ask for second words."""
    seen: list[Read] = []
    keystream, normals = noise_source.keystream, noise_source.normals

    def record(subkey: bytes, start: int, count: int) -> Array:
        found = keystream(subkey, start, count)
        seen.append(Read(subkey, start, found.copy()))
        return found

    def refined(words: Array, out: Array) -> list[int]:
        return sorted({*normals(words, out), *range(min(len(words), SECONDS))})

    monkeypatch.setattr(noise_source, "keystream", record)
    monkeypatch.setattr(noise_source, "normals", refined)
    return seen


def overlaps(reads: list[Read]) -> int:
    """Reads that begin before an earlier one of the same subkey has ended."""
    found, ends = 0, dict[bytes, int]()
    for read in sorted(reads, key=lambda read: (read.subkey, read.start)):
        found += read.start < ends.get(read.subkey, 0)
        ends[read.subkey] = max(ends.get(read.subkey, 0), read.start + len(read.found))
    return found


def repeats(reads: list[Read]) -> int:
    """8 bytes from a multiple of 4 on that came before."""
    halves = [read.found.view("<u4").astype(np.uint64) for read in reads]
    eights = np.concatenate([half[:-1] << np.uint64(32) | half[1:] for half in halves])
    return int(eights.size - np.unique(eights).size)


def all_different(reads: list[Read], rows: int, elements: int) -> bool:
    """Rows of so many elements in all, and nothing met; the first and the second words of a row have a subkey each."""
    first = [read for read in reads if len(read.found) > 8]
    assert len({read.subkey for read in reads}) == 2 * rows
    assert sum(len(read.found) for read in first) == elements
    assert len(reads) - len(first) >= rows * SECONDS
    return overlaps(reads) == repeats(reads) == 0


def fill(source: NoiseSource, step: int, size: int, dtype: str, first: int = 0) -> Array:
    out = np.empty(size, dtype)
    source.fill(step, first, out)
    return out


def test_no_two_contexts_share_a_byte(reads: list[Read]) -> None:
    """2 keys x 2 runs x 2 artifacts x 2 dtypes x 8 steps x 4,096 elements."""
    keys = [NoiseKey.insecure_from_seed(0), NoiseKey.insecure_from_seed(1)]
    runs = [bytes(16), bytes(15) + b"\x01"]
    for key, run, digest, dtype in itertools.product(keys, runs, DIGESTS, ["float32", "float64"]):
        source = NoiseSource(key, run, digest, "w", np.dtype(dtype))
        for step in (0, 1, 2, 255, 256, 65536, 2**32, 2**63):
            fill(source, step, 4096, dtype)
    assert all_different(reads, 16 * 8, 8 * 8 * 4096 * (4 + 8))


def test_no_two_names_share_a_byte(reads: list[Read], key: NoiseKey) -> None:
    """Names that read the same when glued to dtype or step: 'w' and 'w\\0', 'w float64'; Unicode look-alikes."""
    for name, dtype in itertools.product(NAMES, ["float32", "float64"]):
        source = NoiseSource(key, bytes(16), DIGESTS[0], name, np.dtype(dtype))
        for step in (0, 1, 0x20666C6F61743634):  # the last spells " float64"
            fill(source, step, 1000, dtype)
    assert all_different(reads, len(NAMES) * 2 * 3, len(NAMES) * 3 * 1000 * (4 + 8))


def test_a_row_shares_no_byte_with_itself(reads: list[Read], key: NoiseKey) -> None:
    """Both ends of the longest row, of its middle and of where counters of 31 bits would end: 9 x 4,096 elements."""
    for dtype in ("float32", "float64"):
        source = NoiseSource(key, bytes(16), DIGESTS[0], "w", np.dtype(dtype))
        for middle in (LARGEST_ROW // 8, LARGEST_ROW // 4, LARGEST_ROW // 2):
            fill(source, 0, 4096, dtype, middle - 4096)
            fill(source, 0, 4096, dtype, middle)
        for first in (0, 4096, LARGEST_ROW - 4096):
            fill(source, 0, 4096, dtype, first)
    assert all_different(reads, 2, 9 * 4096 * (4 + 8))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_stream_uses_every_byte_once(threads: int, dtype: str, reads: list[Read], stream: Any, rows_of: Any) -> None:
    """3 steps of a stream of 140,000 elements, in three blocks: 3 white rows, no byte twice, whichever thread draws."""
    rows_of(stream(size=140_000, threads=threads, dtype=dtype), 3)
    assert all_different(reads, 3, 3 * 140_000 * np.dtype(dtype).itemsize)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({}, {}),
        ({"run": bytes(16), "name": "a"}, {"run": bytes(16), "name": "b"}),
        ({"run": bytes(16)}, {"run": bytes([1] * 16)}),
        ({"run": bytes(16)}, {"run": bytes(16), "key": NoiseKey.insecure_from_seed(9)}),
        ({"run": bytes(16), "dtype": "float32"}, {"run": bytes(16), "dtype": "float64"}),
    ],
    ids=["fresh runs", "names", "runs", "keys", "dtypes"],
)
def test_two_streams_share_no_byte(
    one: dict[str, Any], two: dict[str, Any], reads: list[Read], stream: Any, rows_of: Any
) -> None:
    """The trap: the same key for two tensors or two runs, so that a difference of releases shows the data bare."""
    rows_of(stream(size=2000, **one))
    rows_of(stream(size=2000, **two))
    assert all_different(reads, 2 * 16, 16 * 2000 * (4 + (8 if "dtype" in two else 4)))


def test_two_shards_share_no_byte(reads: list[Read], stream: Any, rows_of: Any) -> None:
    """Elements 0 to 2,000 and 2,001 to 4,000 of one vector: one pair of subkeys a step, other places."""
    rows_of(stream(size=2001, total=4001, run=bytes(16)))
    rows_of(stream(size=2000, offset=2001, total=4001, run=bytes(16)))
    assert all_different(reads, 16, 16 * 4001 * 4)


def test_what_is_shared_is_found(reads: list[Read], stream: Any, rows_of: Any) -> None:
    """Shards that overlap in two elements of a row. A search that found nothing here would prove nothing."""
    rows_of(stream(size=2001, total=4001, run=bytes(16)), 1)
    rows_of(stream(size=2000, offset=1999, total=4001, run=bytes(16)), 1)
    assert overlaps(reads) == 1
    assert repeats(reads) == 1


def test_two_artifacts_share_no_byte(reads: list[Read], case: Callable[..., Any], stream: Any, rows_of: Any) -> None:
    """One key and run with two compiled artifacts, also when they differ in the dtype of the coefficients only."""
    artifacts = [case("momentum").artifact, case("prefix-sum").artifact, case("momentum", dtype="float32").artifact]
    for artifact in artifacts:
        rows_of(stream(artifact, 2000, run=bytes(16)))
    assert all_different(reads, 3 * 16, 3 * 16 * 2000 * 4)


def test_two_runs_under_one_key_file_share_no_row(reads: list[Read], tmp_path: Path, stream: Any, rows_of: Any) -> None:
    """A script that is run twice, unchanged: other keystreams, and no row of one run resembles any of the other.

    Two float32 normals are equal by chance with probability 1.4e-8: two or more at equal places in any of the 256 pairs
    of rows of 2,000 with probability 1e-7.
    """
    NoiseKey.generate(tmp_path / "key")
    streams = [stream(size=2000, key=NoiseKey.from_file(tmp_path / "key")) for _ in range(2)]
    one, two = (rows_of(made) for made in streams)
    assert streams[0].key.id == streams[1].key.id
    assert streams[0].run != streams[1].run
    assert all_different(reads, 2 * 16, 2 * 16 * 2000 * 4)
    assert max((a == b).sum() for a, b in itertools.product(one, two)) <= 1


ROWS: dict[str, dict[str, Any]] = {
    "a row": {},
    "another step": {"step": 8},
    "another name": {"name": "v"},
    "another run": {"run": bytes(15) + b"\x01"},
    "another key": {"key": NoiseKey.insecure_from_seed(2)},
    "another artifact": {"digest": DIGESTS[1]},
    "float64": {"dtype": "float64"},
    "another shard": {"first": 1 << 20},
}


def test_rows_are_uncorrelated_at_every_shift() -> None:
    """8 rows of 2^18 that differ in one thing each, values and squares: 28 pairs, every circular shift.

    Gaussian tail of the sum of products of unit variance, union over 28 x 2^18 x 2, and a factor of 2 because products
    of squares are skewed: false alarm 1e-6. Values that came again at another place would stand out 69-fold.
    """
    size, white = 1 << 18, []
    for changed in ROWS.values():
        c = {"key": NoiseKey.insecure_from_seed(1), "run": bytes(16), "digest": DIGESTS[0], "name": "w", **changed}
        dtype = c.get("dtype", "float32")
        source = NoiseSource(c["key"], c["run"], c["digest"], c["name"], np.dtype(dtype))
        white.append(fill(source, c.get("step", 7), size, dtype, c.get("first", 0)).astype(np.float64))
    allowed = -NormalDist().inv_cdf(1e-6 / (2 * 28 * size * 2 * 2)) * size**0.5
    for rows in (white, [(row**2 - 1) / 2**0.5 for row in white]):
        spectra = [np.fft.rfft(row) for row in rows]
        for a, b in itertools.combinations(spectra, 2):
            assert np.abs(np.fft.irfft(a * b.conj(), size)).max() <= allowed
    assert np.fft.irfft(spectra[0] * spectra[0].conj(), size)[0] > 60 * allowed


def test_fresh_streams_never_share_a_run(stream: Any) -> None:
    """1,000 streams under one key: 1,000 nonces of 128 bits (a chance pair has probability 1.5e-33)."""
    runs = {stream(size=1).run for _ in range(1000)}
    assert len(runs) == 1000
    assert {len(run) for run in runs} == {16}


def test_nothing_random_comes_from_a_seedable_generator(case: Any, stream: Any, rows_of: Any) -> None:
    """The trap: a training script seeds numpy and random, and every run repeats its noise."""
    rows, ids = [], []
    for _ in range(2):
        np.random.seed(0)
        random.seed(0)
        made = stream(key=None)
        ids.append((made.key.id, made.run, NoiseKey.ephemeral().id))
        rows.append(rows_of(made))
    assert not set(ids[0]) & set(ids[1])
    assert not np.isin(rows[0], rows[1]).all(axis=1).any()


def test_the_same_seed_gives_the_same_key_and_another_another() -> None:
    """insecure_from_seed is for tests: reproducible, and it says so in its name."""
    ids = [NoiseKey.insecure_from_seed(seed).id for seed in (0, 0, 1, -1, 2**31, 2**64)]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 5
