"""Bit flips and truncation: a damaged file is refused, or what is read is exactly what was written."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
from attacks.forgery import HONEST

from mmfact.factorize.errors import ArtifactCorrupt, ArtifactVersionError, StoreError
from mmfact.store import format
from mmfact.store.store import read

HERE = Path("damaged.h5")


@pytest.fixture
def saved(store, factorization):
    """A stored artifact, and its file writable so that a test may damage it."""
    artifact = store.save(factorization, "ref")
    artifact.path.chmod(0o644)
    return artifact


def test_every_flipped_byte_is_noticed(saved, monkeypatch):
    """One bit of each byte in turn: a disk or a copy that lies must not reach the trainer."""
    data = saved.path.read_bytes()
    bits = np.random.default_rng(11).integers(0, 8, len(data))
    with monkeypatch.context() as patch:  # a disk that lies: writing 12,000 files would take a minute
        for position, bit in enumerate(bits):
            damaged = bytearray(data)
            damaged[position] ^= 1 << bit
            patch.setattr(Path, "read_bytes", lambda path, damaged=damaged: bytes(damaged))
            with pytest.raises(ArtifactCorrupt, match="damaged"):
                read(saved.path)
    for position in np.random.default_rng(16).integers(0, len(data), 50):
        damaged = bytearray(data)
        damaged[position] ^= 1
        saved.path.write_bytes(damaged)
        with pytest.raises(ArtifactCorrupt, match="damaged"):
            read(saved.path)


def test_every_truncation_is_noticed(saved):
    """A half-written or half-copied file, at 200 lengths and both ends."""
    data = saved.path.read_bytes()
    lengths = np.random.default_rng(12).integers(0, len(data), 200)
    for length in [0, 1, len(data) - 1, *lengths]:
        saved.path.write_bytes(data[:length])
        with pytest.raises(ArtifactCorrupt, match="damaged"):
            read(saved.path)


def test_appended_bytes_are_noticed(saved):
    saved.path.write_bytes(saved.path.read_bytes() + b"\0")
    with pytest.raises(ArtifactCorrupt, match="damaged"):
        read(saved.path)


@pytest.mark.parametrize("name", HONEST)
def test_flips_past_the_outer_digest_change_nothing_silently(same, name):
    """Somebody renames the file so that the outer digest fits: the inner digests still guard every number.

    A byte that HDF5 does not use may differ; then the artifact must equal the original. Nothing but the
    store's own errors may come out.
    """
    forger = HONEST[name]()
    random = np.random.default_rng(13)
    # Half of the sample lies in the unused tails of HDF5's tables; 400 leave a hundred that matter.
    positions = random.choice(len(forger.data), 400, replace=False)
    seen = collections.Counter()
    for position in positions:
        damaged = bytearray(forger.data)
        damaged[position] ^= 1 << random.integers(0, 8)
        try:
            artifact = format.decode(bytes(damaged), HERE, forger.artifact.digest)
        except (ArtifactCorrupt, ArtifactVersionError) as error:
            seen[type(error).__name__] += 1
        else:
            assert same(artifact, forger.artifact), f"a flip at byte {position} changed what was read"
            seen["equal"] += 1
    assert seen["ArtifactCorrupt"] > 25  # the sample did reach the data


def test_truncations_past_the_outer_digest_are_refused(forger):
    random = np.random.default_rng(14)
    for length in [0, 1, 8, 511, 512, len(forger.data) - 1, *random.integers(0, len(forger.data), 150)]:
        with pytest.raises(ArtifactCorrupt):
            format.decode(forger.data[:length], HERE, forger.artifact.digest)


def test_bursts_past_the_outer_digest_change_nothing_silently(forger, same):
    """A lost sector: 512 bytes of zeros or of noise."""
    random = np.random.default_rng(15)
    for start in random.integers(0, len(forger.data) - 512, 150):
        for burst in (bytes(512), random.bytes(512)):
            damaged = bytearray(forger.data)
            damaged[start : start + 512] = burst
            try:
                artifact = format.decode(bytes(damaged), HERE, forger.artifact.digest)
            except (ArtifactCorrupt, ArtifactVersionError):
                continue
            assert same(artifact, forger.artifact)


def test_content_under_another_artifacts_name(store, factorization, other_factorization):
    """Two files swapped, each whole: the logical digest in the name catches it."""
    a, b = store.save(factorization, "a"), store.save(other_factorization, "b")
    logical, _, outer = a.path.stem, None, b.path.stem.split("-")[1]
    swapped = store.path / f"{logical.split('-')[0]}-{outer}.h5"
    swapped.write_bytes(b.path.read_bytes())
    with pytest.raises(ArtifactCorrupt, match="digest"):
        read(swapped)


def test_file_under_a_foreign_name(store, factorization):
    """Without its name the content cannot be checked; the message says to restore it."""
    artifact = store.save(factorization, "ref")
    renamed = artifact.path.rename(store.path / "best-artifact.h5")
    with pytest.raises(ArtifactCorrupt, match="restore the name"):
        read(renamed)


def test_message_says_what_differed(saved):
    """The reader must learn which file, what was found and what was expected."""
    expected = saved.path.stem.split("-")[1]
    saved.path.write_bytes(b"nothing like an artifact")
    with pytest.raises(ArtifactCorrupt) as caught:
        read(saved.path)
    message = str(caught.value)
    assert str(saved.path) in message
    assert expected[:16] in message
    assert "24 bytes" in message


def test_unreadable_file_is_the_machines_failure(saved, monkeypatch):
    """An I/O error is not damage: the file may be fine."""

    def fail(self):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        read(saved.path)


def test_saving_over_a_damaged_file_never_claims_success(saved, store, factorization):
    """`save` finds the name taken by a damaged file; if it returns, what it stored must load."""
    damaged = bytearray(saved.path.read_bytes())
    damaged[2000] ^= 1
    saved.path.write_bytes(damaged)
    for ref in ("ref", "another"):
        try:
            store.save(factorization, ref)
        except (ArtifactCorrupt, StoreError):
            continue
        assert store.load(ref).digest == saved.digest
