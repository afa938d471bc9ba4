"""Garbage collection: what it takes, what it leaves, and that a save beside it never loses anything."""

import itertools
import os
import time

import pytest

from mmfact.factorize.errors import ArtifactCorrupt, ArtifactNotFound, StoreError
from mmfact.store.folder import Directory
from mmfact.store.gc import collect
from mmfact.store.publish import TEMPORARY_PREFIX
from mmfact.store.store import ASIDE, ArtifactStore


def age(path, hours):
    then = time.time() - 3600 * hours
    os.utime(path, (then, then))


def everything(store):
    return sorted(str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file())


@pytest.fixture
def littered(store, factorization, other_factorization):
    """One artifact with a name, one without, and what two killed writers left: all two days old."""
    store.save(factorization, "kept")
    store.save(other_factorization, "dropped")
    store.remove("dropped")
    for below in (store.path, store.path / "refs"):
        (below / f"{TEMPORARY_PREFIX}abc").write_bytes(b"half")
    for name in everything(store):
        age(store.path / name, 48)
    return store


def test_takes_leftovers_and_what_no_ref_names(littered, factorization):
    kept = littered.load("kept").path.name
    (unnamed,) = set(littered.files()) - {kept}
    size = (littered.path / unnamed).stat().st_size
    before = everything(littered)
    expected = {f"{TEMPORARY_PREFIX}abc", f"refs/{TEMPORARY_PREFIX}abc"}
    tried = collect(littered, dry_run=True)
    assert everything(littered) == before
    assert (set(tried.leftovers), tried.unnamed, tried.size) == (expected, (unnamed,), size + 8)
    assert collect(littered) == tried
    assert everything(littered) == sorted([kept, "refs/kept.json"])
    assert collect(littered).size == 0
    assert littered.load("kept").digest


def test_leftovers_are_no_artifacts(littered):
    assert [entry.ref for entry in littered.entries()] == ["kept"]
    assert len(littered.files()) == 2
    with pytest.raises(ArtifactNotFound):
        littered.load(TEMPORARY_PREFIX + "abc")


def test_leaves_what_is_young(littered):
    for name in everything(littered):
        age(littered.path / name, 23.9)
    before = everything(littered)
    assert collect(littered).size == 0
    assert everything(littered) == before
    assert collect(littered, older_than=23.8).size > 0
    for wrong in (-1.0, float("nan")):
        with pytest.raises(StoreError, match="at least 0"):
            collect(littered, older_than=wrong)


def test_a_damaged_ref_stops_it(littered):
    """What it named must not be taken for garbage."""
    (littered.path / "refs" / "bad.json").write_text("{")
    before = everything(littered)
    with pytest.raises(ArtifactCorrupt, match="mmfact remove bad"):
        collect(littered)
    assert everything(littered) == before
    littered.remove("bad")
    assert collect(littered).unnamed


def test_a_protected_store_loses_nothing(littered):
    (littered.path / "PROTECTED").mkdir()  # whatever it is
    before = everything(littered)
    with pytest.raises(StoreError, match="delete its file PROTECTED"):
        collect(littered)
    with pytest.raises(StoreError, match="protected"):
        littered.remove("kept")
    assert everything(littered) == before
    assert collect(littered, dry_run=True).unnamed


def test_quarantine_and_cached_projectors_stay(littered):
    for name in ("quarantine/x.h5", "projectors/.tmp-projector-1", "projectors/p.h5", "notes.txt"):
        (littered.path / name).parent.mkdir(exist_ok=True)
        (littered.path / name).write_bytes(b"x")
        age(littered.path / name, 48)
    found = collect(littered)
    assert found.quarantined == ("x.h5",)
    left = everything(littered)
    assert {"quarantine/x.h5", "projectors/.tmp-projector-1", "projectors/p.h5", "notes.txt"} <= set(left)


def test_removed_refs_say_what_else_there_is(store, factorization):
    name = store.save(factorization, "momentum").path.name
    with pytest.raises(ArtifactNotFound, match="did you mean momentum"):
        store.remove("momentun")
    with pytest.raises(ArtifactNotFound):
        store.remove("../momentum")
    assert store.remove("momentum") == name
    assert store.refs() == []


# --- a save beside it ------------------------------------------------------------------------------


class Watched(Directory):
    """Calls `before(number, what)` in front of every operation."""

    def __init__(self, path, before):
        super().__init__(path)
        self.count, self.before = itertools.count(), before

    def _step(self, what):
        self.before(next(self.count), what)

    def publish(self, name, data):
        self._step("publish")
        return super().publish(name, data)

    def fetch(self, name, sha256, fresh=False):
        self._step("fetch")
        return super().fetch(name, sha256, fresh)

    def read(self, name):
        self._step("read")
        return super().read(name)

    def names(self, below=""):
        self._step("names")
        return super().names(below)

    def stat(self, name):
        self._step("stat")
        return super().stat(name)

    def exists(self, name):
        self._step("exists")
        return super().exists(name)

    def take(self, name, target):
        self._step("take")
        super().take(name, target)

    def put_back(self, name, target):
        self._step("put back")
        super().put_back(name, target)

    def remove(self, name):
        self._step("remove")
        super().remove(name)


def watched(store, before):
    other = ArtifactStore(store.path)
    other.folder = Watched(store.path, before)
    return other


def steps(action, store):
    """How many operations it takes."""
    last = [0]
    other = watched(store, lambda number, what: last.__setitem__(0, number))
    action(other)
    return last[0] + 1


@pytest.fixture
def unnamed(store, factorization):
    """A store whose one artifact has no ref any more, as new before every trial."""

    def make():
        for path in store.path.rglob("*"):
            if path.is_file():
                path.unlink()
        store.save(factorization, "old")
        store.remove("old")

    make()
    return make


def test_a_save_in_the_middle_of_a_collection(store, factorization, unnamed):
    """At every one of its steps somebody saves the artifact that it is about to remove."""
    for number in range(steps(lambda s: collect(s, older_than=0), store)):
        unnamed()

        def save(at, what, number=number):
            if at == number:
                store.save(factorization, "new")

        collect(watched(store, save), older_than=0)
        assert store.load("new").n == 3, f"lost by a save before step {number}"
        assert store.refs() == ["new"]
        collect(store, older_than=0)
        assert len(everything(store)) == 2


def test_a_collection_in_the_middle_of_a_save(store, factorization, unnamed):
    for number in range(steps(lambda s: s.save(factorization, "new"), store)):
        unnamed()

        def gather(at, what, number=number):
            if at == number:
                collect(store, older_than=0)

        watched(store, gather).save(factorization, "new")
        assert store.load("new").n == 3, f"lost by a collection before step {number}"


def test_a_collection_killed_at_every_step(store, factorization, other_factorization, unnamed):
    """Whatever it leaves, a save of the same and the next collection put it in order."""
    for number in range(steps(lambda s: collect(s, older_than=0), store)):
        unnamed()
        store.save(other_factorization, "other")

        def die(at, what, number=number):
            if at == number:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            collect(watched(store, die), older_than=0)
        assert [entry.error for entry in store.entries()] == [None]
        store.save(factorization, "new")
        collect(store, older_than=0)
        assert store.load("new").n == 3
        assert store.load("other").n == 3
        assert len(everything(store)) == 4


def test_two_collections_and_a_save_between_any_two_steps(store, factorization, unnamed):
    """One collector stops at each of its steps while another runs to its end, and then somebody saves."""
    for number in range(steps(lambda s: collect(s, older_than=0), store)):
        unnamed()

        def interfere(at, what, number=number):
            if at == number:
                collect(store, older_than=0)
                store.save(factorization, "new")

        collect(watched(store, interfere), older_than=0)
        assert store.load("new").n == 3, f"lost before step {number}"


def test_an_artifact_left_aside_comes_back_if_it_has_a_name(store, factorization):
    """A collector is killed after somebody has named what it had put aside."""
    name = store.save(factorization, "ref").path.name
    (store.path / name).rename(store.path / (ASIDE + "0123-" + name))
    collect(store, older_than=0)
    assert store.load("ref").n == 3
    assert len(everything(store)) == 2


def test_a_reader_waits_for_what_is_put_back(store, factorization, monkeypatch):
    name = store.save(factorization, "ref").path.name
    (store.path / name).rename(store.path / (ASIDE + "0123-" + name))
    monkeypatch.setattr("mmfact.store.store.time.sleep", lambda seconds: collect(store, older_than=0))
    assert store.load("ref").n == 3


def test_a_remove_in_the_middle_of_a_save(store, factorization):
    """The ref that a save has just written is removed: the save says so by writing it again, or it is gone."""
    for number in range(steps(lambda s: s.save(factorization, "new"), store)):
        if store.has("new"):
            store.remove("new")
        collect(store, older_than=0)

        def remove(at, what, number=number):
            if at == number and store.has("new"):
                store.remove("new")

        assert watched(store, remove).save(factorization, "new").n == 3
        assert all(entry.error is None for entry in store.entries())
