"""Damaged artifacts: moved away, never deleted, and the message says what differs."""

import os
from pathlib import Path

import h5py
import pytest

from mmfact.factorize.errors import ArtifactCorrupt, ArtifactNotFound, StoreError
from mmfact.store.store import ArtifactStore, read


def damage(path, offset, length=1):
    data = bytearray(path.read_bytes())
    for i in range(offset, offset + length):
        data[i] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)
    return bytes(data)


def chunk(path, name):
    """Where the dataset's first chunk lies, by the HDF5 library."""
    with h5py.File(path) as file:
        found = file[name].id.get_chunk_info(0)
    return found.byte_offset, found.size


@pytest.mark.parametrize("name", ["strategy.packed", "multipliers", "learning_rates", "spec"])
def test_message_names_the_dataset(store, factorization, name):
    path = store.save(factorization, "ref").path
    offset, size = chunk(path, name)
    data = damage(path, offset + size // 2, 2)
    with pytest.raises(ArtifactCorrupt, match="is damaged") as caught:
        store.load("ref")
    said = str(caught.value)
    assert f"'{name}' has a damaged chunk" in said
    others = {"strategy.packed", "multipliers", "learning_rates"} - {name}
    assert not any(f"'{other}'" in said for other in others)
    assert not path.exists()
    (moved,) = (store.path / "quarantine").iterdir()
    assert moved.name.startswith(path.name)
    assert moved.read_bytes() == data, "what is damaged is kept as it was"
    assert str(moved.parent) in said


def test_values_changed_under_a_true_checksum(forger, store, factorization):
    """HDF5 is content with it, the spec is not."""
    saved = store.save(factorization, "ref")

    def change(file):
        file["multipliers"][...] = 1.5

    data, _ = forger.build(file=change)
    saved.path.chmod(0o644)
    saved.path.write_bytes(data)
    with pytest.raises(ArtifactCorrupt, match="the values of 'multipliers' have changed"):
        store.load("ref")


def test_only_structures_differ(store, factorization):
    """A byte that nothing depends on, in the room of a name that is not used: no dataset is accused."""
    path = store.save(factorization, "ref").path
    data = path.read_bytes()
    heap = data.index(b"HEAP")
    segment = int.from_bytes(data[heap + 24 : heap + 32], "little")
    damage(path, segment + int.from_bytes(data[heap + 8 : heap + 16], "little") - 1)
    with pytest.raises(ArtifactCorrupt, match="only what HDF5 keeps about them differs"):
        store.load("ref")


@pytest.mark.parametrize("data", [b"", b"x", b"\x89HDF\r\n\x1a\n" + b"\xff" * 500], ids=["empty", "text", "head"])
def test_what_is_no_hdf5_any_more(store, factorization, data):
    path = store.save(factorization, "ref").path
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(ArtifactCorrupt, match="What differs: it"):
        store.load("ref")
    (moved,) = (store.path / "quarantine").iterdir()
    assert moved.read_bytes() == data


def test_compiled_again_under_the_same_name(store, factorization):
    saved = store.save(factorization, "ref")
    for number in range(3):
        damage(saved.path, 1000 + number)
        with pytest.raises(ArtifactCorrupt):
            store.load("ref")
        assert store.lost("ref")
        with pytest.raises(ArtifactNotFound, match="compile it again"):
            store.load("ref")
        assert store.save(factorization, "ref").digest == saved.digest
        assert not store.lost("ref")
        assert store.load("ref").digest == saved.digest
    assert len(os.listdir(store.path / "quarantine")) == 3


def test_a_save_mends_what_stands_in_its_way(store, factorization):
    saved = store.save(factorization, "ref")
    data = damage(saved.path, 1000)
    assert store.save(factorization, "other").digest == saved.digest
    (moved,) = (store.path / "quarantine").iterdir()
    assert moved.read_bytes() == data
    assert store.load("other").digest == store.load("ref").digest == saved.digest


def test_a_reading_that_fails_once_is_no_damage(store, factorization, monkeypatch):
    saved = store.save(factorization, "ref")
    whole, turns = Path.read_bytes, []

    def flaky(path):
        turns.append(path)
        data = whole(path)
        return data[:-1] if len(turns) == 1 else data

    monkeypatch.setattr(Path, "read_bytes", flaky)
    assert store.load("ref").digest == saved.digest
    assert saved.path.exists()


def test_mended_by_another_process_meanwhile(store, factorization, monkeypatch):
    """Between the look and the move somebody puts the right file there: it must not be taken away."""
    saved = store.save(factorization, "ref")
    data = saved.path.read_bytes()
    damage(saved.path, 1000)

    def mend(*arguments):
        saved.path.write_bytes(data)
        return "."

    monkeypatch.setattr("mmfact.store.store._difference", mend)
    with pytest.raises(ArtifactCorrupt, match="whole again"):
        store.load("ref")
    assert store.load("ref").digest == saved.digest


def test_quarantined_and_saved_again_between_the_look_and_the_move(store, factorization, monkeypatch):
    """Another process is faster at both: what this one then takes away is the good file, and it comes back."""
    saved = store.save(factorization, "ref")
    damage(saved.path, 1000)
    rename = os.rename

    def late(source, target):
        monkeypatch.setattr(os, "rename", rename)
        saved.path.unlink()
        store.save(factorization, "ref")
        rename(source, target)

    monkeypatch.setattr(os, "rename", late)
    with pytest.raises(ArtifactCorrupt, match="whole again"):
        store.load("ref")
    assert store.load("ref").digest == saved.digest


def test_what_is_no_file_does_not_wait_for_ever(store, factorization):
    saved = store.save(factorization, "ref")
    saved.path.unlink()
    saved.path.mkdir()
    with pytest.raises(StoreError, match="is no file; remove it"):
        store.load("ref")
    with pytest.raises(StoreError, match="is no file; remove it"):
        store.save(factorization, "ref")
    ref = store.path / "refs" / "ref.json"
    for make, said in ((os.mkfifo, "is no file"), (lambda path: path.symlink_to("nowhere"), "is a broken link")):
        ref.unlink()
        make(ref)
        with pytest.raises(StoreError, match=f"{said}; remove it"):
            store.load("ref")


def test_a_store_that_cannot_be_written(store, factorization, monkeypatch):
    """The answer is the same, the file stays where it is."""
    path = store.save(factorization, "ref").path
    damage(path, 1000)

    def refuse(source, target):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "rename", refuse)
    with pytest.raises(ArtifactCorrupt, match="could not be moved"):
        store.load("ref")
    assert path.exists()


def test_listing_and_reading_by_path_move_nothing(store, factorization):
    path = store.save(factorization, "ref").path
    damage(path, 1000)
    (entry,) = store.entries()
    assert "damaged" in entry.error
    with pytest.raises(ArtifactCorrupt, match="damaged"):
        read(path)
    with pytest.raises(ArtifactCorrupt, match="damaged"):
        ArtifactStore(store.path / "elsewhere").load(path)
    assert path.exists()


def test_a_forged_file_stays(forger, store):
    """It is what its name says: not damaged but wrong, and refused for what is in it."""

    def wrong(spec):
        spec["certificate"]["sensitivity"] *= 2

    forger.place(store, *forger.build(wrong), "ref")
    with pytest.raises(ArtifactCorrupt, match="sensitivity"):
        store.load("ref")
    assert len(store.files()) == 1
