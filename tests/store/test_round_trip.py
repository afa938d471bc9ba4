"""What is saved comes back bit for bit, and the file's name proves it."""

from __future__ import annotations

import hashlib
import json
import os
import stat
import time
from pathlib import Path

import h5py
import numpy as np
import pytest

import mmfact
from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, compile
from mmfact.store import format
from mmfact.store.store import ArtifactStore, read

NAMES = [
    "prefix-sum",
    "sgd",
    "momentum",
    "coupled",
    "decoupled",
    "ema",
    "custom",
    "one step",
    "float32",
    "custom float32",
]


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_are_equal_bit_for_bit(everything, store, same, name):
    """A coefficient changed on its way to disk would make the certificate speak of another strategy."""
    factorization = everything[name]
    saved = store.save(factorization, "ref")
    loaded = store.load("ref")
    assert same(saved, loaded)
    assert loaded.strategy.packed.tobytes() == factorization.strategy.packed.tobytes()
    assert loaded.strategy.dtype == factorization.strategy.dtype
    assert loaded.multipliers.tobytes() == factorization.optimum.multipliers.tobytes()
    assert loaded.certificate == factorization.certificate
    assert loaded.workload.same_as(factorization.workload)
    assert loaded.path == saved.path
    assert loaded.n == factorization.workload.n


@pytest.mark.parametrize("name", NAMES)
def test_stored_factors_multiply_to_the_simulated_optimizer(everything, store, simulate, name):
    """B C = A to 1e-10 of A's largest entry, with A from an optimizer simulated here."""
    store.save(everything[name], "ref")
    loaded = store.load("ref")
    A = simulate(loaded.workload)
    assert np.abs(loaded.A - A).max() <= 1e-12 * np.abs(A).max()
    assert np.abs(loaded.B @ loaded.C - A).max() <= 1e-10 * np.abs(A).max()
    assert not np.triu(loaded.C, 1).any()


@pytest.mark.parametrize("name", NAMES)
def test_stored_certificate_is_true_of_the_stored_coefficients(everything, store, simulate, name):
    """Sensitivity and loss of what is in the file, recomputed here; both may only err high, the bound only low."""
    store.save(everything[name], "ref")
    loaded = store.load("ref")
    C, A = loaded.C, simulate(loaded.workload)
    sensitivity = np.linalg.norm(C, axis=0).max()
    B = np.linalg.solve(C.T, A.T).T
    loss = sensitivity**2 * np.linalg.norm(B) ** 2
    bound = np.linalg.svd(A * np.sqrt(loaded.multipliers), compute_uv=False).sum() ** 2 / loaded.multipliers.sum()
    certificate = loaded.certificate
    assert sensitivity * (1 - 1e-15) <= certificate.sensitivity <= sensitivity * (1 + 1e-12)
    assert loss * (1 - 1e-11) <= certificate.loss <= loss * (1 + 1e-10)
    assert bound * (1 - 1e-9) <= certificate.lower_bound <= bound * (1 + 1e-12)


def test_file_is_named_by_the_digests_of_its_content(everything, store):
    """name = SHA-256 of the spec - SHA-256 of the bytes, and the spec holds the SHA-256 of every array."""
    for number, factorization in enumerate(everything.values()):
        saved = store.save(factorization, f"ref{number}")
        data = saved.path.read_bytes()
        with h5py.File(saved.path, "r") as file:
            arrays = {name: file[name][...] for name in file}
        spec = arrays.pop("spec").tobytes()
        assert saved.path.name == f"{hashlib.sha256(spec).hexdigest()}-{hashlib.sha256(data).hexdigest()}.h5"
        assert saved.digest == hashlib.sha256(spec).hexdigest()
        listed = json.loads(spec)["datasets"]
        assert set(listed) == set(arrays)
        for name, array in arrays.items():
            assert listed[name]["sha256"] == hashlib.sha256(array.tobytes()).hexdigest()
            assert listed[name]["dtype"] == array.dtype.str
            assert listed[name]["dtype"] in ("<f8", "<f4")


def test_arrays_are_stored_checksummed_and_little_endian(store, factorization):
    """design.md section 7: shuffle, gzip and fletcher32, no attributes, nothing outside the file."""
    saved = store.save(factorization, "ref")
    with h5py.File(saved.path, "r") as file:
        assert not len(file.attrs)
        for dataset in file.values():
            assert dataset.shuffle
            assert dataset.fletcher32
            assert dataset.compression == "gzip"
            assert dataset.external is None
            assert not dataset.is_virtual


def test_bytes_do_not_depend_on_time(factorization):
    """HDF5 writes times (in seconds) unless told not to; then the same artifact would get a new name each time."""
    first = format.encode(format.from_factorization(factorization))
    time.sleep(1.2)
    assert format.encode(format.from_factorization(factorization)) == first


def test_digest_is_that_of_the_content(everything):
    """The same content twice: the same digest. Any other content: another."""
    digests = {name: format.from_factorization(f).digest for name, f in everything.items()}
    assert len(set(digests.values())) == len(digests)
    again = format.from_factorization(compile(everything["momentum"].workload, Options(strategy="dense")))
    assert again.digest == digests["momentum"]


def test_digest_covers_what_was_asked():
    """Options are part of what a reviewer signs."""
    w = workload.sgd(3)
    digests = {
        format.from_factorization(compile(w, Options(**options))).digest
        for options in ({}, {"tolerance": 1e-3}, {"method": "dense"}, {"dtype": "float64"}, {"strategy": "dense"})
    }
    assert len(digests) == 5


def test_file_cannot_be_written_to_by_accident(store, factorization):
    """Mode 0444 whatever the umask, and one link: the temporary name is gone."""
    old = os.umask(0o077)
    try:
        saved = store.save(factorization, "ref")
    finally:
        os.umask(old)
    for path in (saved.path, store.path / "refs" / "ref.json"):
        status = path.stat()
        assert stat.S_IMODE(status.st_mode) == 0o444
        assert status.st_nlink == 1


def test_saved_again_is_no_error_and_writes_nothing(store, factorization):
    """Compiling again what the store has leaves one file, one ref, untouched."""
    first = store.save(factorization, "ref")
    before = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in store.path.rglob("*") if p.is_file()}
    again = store.save(factorization, "ref")
    after = {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in store.path.rglob("*") if p.is_file()}
    assert again.path == first.path
    assert before == after
    assert len(before) == 2


def test_two_refs_share_one_file(store, factorization):
    assert store.save(factorization, "a").path == store.save(factorization, "b").path
    assert store.refs() == ["a", "b"]
    assert len(list(store.path.glob("*.h5"))) == 1


def test_ref_carries_the_time_and_the_file_does_not(store, factorization):
    saved = store.save(factorization, "ref")
    entry = json.loads((store.path / "refs" / "ref.json").read_text())
    assert entry["artifact"] == saved.path.name
    assert entry["created"].startswith("20")
    with h5py.File(saved.path, "r") as file:
        spec = file["spec"][...].tobytes().decode()
    assert entry["created"][:10] not in spec


def test_loaded_artifact_outlives_its_file(store, factorization):
    """Everything is in memory and the handle closed: a store may be unmounted while training goes on."""
    store.save(factorization, "ref")
    loaded = store.load("ref")
    open_files = {os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _exists(fd)}
    assert not any(name.endswith(".h5") for name in open_files)
    loaded.path.unlink()
    assert np.isfinite(loaded.B).all()


def test_loaded_coefficients_cannot_be_changed(store, factorization):
    """A trainer that scales C in place would break the sensitivity."""
    store.save(factorization, "ref")
    loaded = store.load("ref")
    with pytest.raises(ValueError, match="read-only"):
        loaded.strategy.packed[0] = 2.0


def test_whole_numbers_of_numpy_are_numbers(store):
    """n often comes from len of an array or arange; `check_horizon` takes it, so the store must write it."""
    saved = store.save(compile(workload.sgd(np.int64(3)), Options(strategy="dense")), "ref")
    assert store.load("ref").n == 3
    assert (
        store.load("ref").digest
        == saved.digest
        == format.from_factorization(compile(workload.sgd(3), Options(strategy="dense"))).digest
    )


def test_default_store_and_environment(tmp_path, monkeypatch, factorization):
    """`mmfact.load(ref)` looks into MMFACT_STORE, or `artifacts` of the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MMFACT_STORE", raising=False)
    here = ArtifactStore().save(factorization, "here")
    assert here.path == Path("artifacts") / here.path.name
    assert mmfact.load("here").digest == here.digest
    monkeypatch.setenv("MMFACT_STORE", str(tmp_path / "elsewhere"))
    assert ArtifactStore().path == tmp_path / "elsewhere"
    with pytest.raises(mmfact.MmfactError):
        mmfact.load("here")
    assert mmfact.load("here", store=tmp_path / "artifacts").digest == here.digest


def test_making_a_store_object_creates_nothing(tmp_path):
    """A mistyped --store on `list` must not leave a directory."""
    store = ArtifactStore(tmp_path / "absent")
    assert store.refs() == []
    assert list(store.entries()) == []
    assert not (tmp_path / "absent").exists()


def test_read_by_path_from_anywhere(store, factorization, tmp_path, monkeypatch):
    saved = store.save(factorization, "ref")
    monkeypatch.chdir(tmp_path)
    elsewhere = tmp_path / saved.path.name
    elsewhere.write_bytes(saved.path.read_bytes())
    assert read(elsewhere).digest == saved.digest
    assert ArtifactStore(tmp_path / "none").load(saved.path.name).digest == saved.digest


def _exists(fd: str) -> bool:
    return os.path.islink(f"/proc/self/fd/{fd}")
