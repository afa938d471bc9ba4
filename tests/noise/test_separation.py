"""No noise value serves two releases: keystream words never meet across keys, runs, artifacts, names, dtypes, steps.

The search is for equal 64-bit words. N words that should be independent have an equal pair with probability below
N^2 / 2^65: for the largest search here (N = 524,288) 7.5e-9, so any pair means reuse.
"""

from __future__ import annotations

import itertools
import random
import unicodedata
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mmfact.noise import NoiseKey
from mmfact.noise.source import NoiseSource

DIGESTS = ["00" * 32, "00" * 31 + "01"]
NAMES = ["", "w", "w\x00", "\x00w", "wb", " float32", "w float64", "é", unicodedata.normalize("NFD", "é"), "w" * 300]


def all_different(words: list[np.ndarray], expected: int) -> bool:
    together = np.concatenate(words)
    assert together.size == expected
    return np.unique(together).size == expected


def test_no_two_contexts_share_a_word(words: list[np.ndarray]) -> None:
    """2 keys x 2 runs x 2 artifacts x 2 dtypes x 8 steps x 4,096 elements."""
    keys = [NoiseKey.insecure_from_seed(0), NoiseKey.insecure_from_seed(1)]
    runs = [bytes(16), bytes(15) + b"\x01"]
    for key, run, digest, dtype in itertools.product(keys, runs, DIGESTS, ["float32", "float64"]):
        source = NoiseSource(key, run, digest, "w", np.dtype(dtype))
        for step in (0, 1, 2, 255, 256, 65536, 2**32, 2**63):
            source.row(step, 0, 4096)
    assert all_different(words, 16 * 8 * 4096)


def test_no_two_names_share_a_word(words: list[np.ndarray], key: NoiseKey) -> None:
    """Names that read the same when glued to dtype or step: 'w' and 'w\\0', 'w float64'; Unicode look-alikes."""
    for name, dtype in itertools.product(NAMES, ["float32", "float64"]):
        source = NoiseSource(key, bytes(16), DIGESTS[0], name, np.dtype(dtype))
        for step in (0, 1, 0x20666C6F61743634):  # the last spells " float64"
            source.row(step, 0, 1000)
    assert all_different(words, len(NAMES) * 2 * 3 * 1000)


def test_a_stream_uses_every_word_once_per_step(words: list[np.ndarray], stream: Any, rows_of: Any) -> None:
    """One stream of 16 steps: 16 white rows, no word twice."""
    rows_of(stream(size=5000))
    assert all_different(words, 16 * 5000)


@pytest.mark.parametrize(
    ("one", "two"),
    [
        ({}, {}),
        ({"run": bytes(16), "name": "a"}, {"run": bytes(16), "name": "b"}),
        ({"run": bytes(16)}, {"run": bytes([1] * 16)}),
        ({"run": bytes(16)}, {"run": bytes(16), "key": NoiseKey.insecure_from_seed(9)}),
        ({"run": bytes(16), "dtype": "float32"}, {"run": bytes(16), "dtype": "float64"}),
        ({"run": bytes(16)}, {"run": bytes(16), "offset": 2000}),
    ],
    ids=["fresh runs", "names", "runs", "keys", "dtypes", "shards"],
)
def test_two_streams_share_no_word(
    one: dict[str, Any], two: dict[str, Any], words: list[np.ndarray], stream: Any, rows_of: Any
) -> None:
    """The trap: the same key for two tensors or two runs, so that a difference of releases shows the data bare."""
    rows_of(stream(size=2000, **one))
    rows_of(stream(size=2000, **two))
    assert all_different(words, 2 * 16 * 2000)


def test_two_artifacts_share_no_word(
    words: list[np.ndarray], case: Callable[..., Any], stream: Any, rows_of: Any
) -> None:
    """One key and run with two compiled artifacts, also when they differ in the dtype of the coefficients only."""
    artifacts = [case("momentum").artifact, case("prefix-sum").artifact, case("momentum", dtype="float32").artifact]
    for artifact in artifacts:
        rows_of(stream(artifact, 2000, run=bytes(16)))
    assert all_different(words, 3 * 16 * 2000)


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
