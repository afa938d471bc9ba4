"""Refs: which names are allowed, what they point to, and what happens when they are damaged."""

from __future__ import annotations

import io
import json
from pathlib import Path

import h5py
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import ArtifactCorrupt, ArtifactNotFound, MmfactError, RefError
from mmfact.store.store import ArtifactStore, check_ref

BAD = [
    "",
    ".",
    "..",
    "../up",
    "../../etc/passwd",
    "a/b",
    "/etc/passwd",
    "a\\b",
    "-n",
    "--help",
    ".hidden",
    "+x",
    "_x",
    "a b",
    "a\n",
    "a\0b",
    "a:b",
    "é",
    "a" * 201,
    "a" * 300,
    "\ud800",
    "*",
    "~root",
]
GOOD = ["a", "0", "momentum-n2048", "a..b", "x.json", "A+B_c-1.5e-05", "a" * 200]


@pytest.mark.parametrize("ref", BAD, ids=ascii)
def test_names_that_are_refused(store, factorization, ref):
    """A ref becomes a file name: nothing in it may lead out of the store or look like an option."""
    with pytest.raises(RefError, match="cannot be a ref"):
        store.save(factorization, ref)
    with pytest.raises(RefError):
        store.has(ref)
    assert not store.path.exists()


@pytest.mark.parametrize("ref", GOOD)
def test_names_that_are_allowed(store, factorization, ref):
    saved = store.save(factorization, ref)
    assert store.refs() == [ref]
    assert store.load(ref).digest == saved.digest
    assert store.has(ref)


anything = (
    st.text(max_size=60) | st.text(alphabet="ab./\\-+_~:\0\n ", max_size=12) | st.from_regex(r"[a-z0-9.+_-]{1,9}")
)


@given(ref=anything)
@settings(deadline=None, derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_name_writes_outside_the_store(tmp_path_factory, factorization, ref):
    """Whatever the name, it is refused or it lands in refs/ and loads."""
    base = tmp_path_factory.mktemp("refs")
    store = ArtifactStore(base / "inner" / "store")
    store.prepare()
    try:
        store.save(factorization, ref)
    except RefError:
        assert not [path for path in base.rglob("*") if path.is_file()]
        return
    assert store.refs() == [ref]
    assert store.load(ref).n == 3
    outside = [path for path in base.rglob("*") if path.is_file() and store.path not in path.parents]
    assert outside == []
    assert len([path for path in base.rglob("*") if path.is_file()]) == 2


@given(ref=anything)
@settings(deadline=None, derandomize=True, max_examples=300)
def test_valid_names_are_plain_file_names(ref):
    try:
        check_ref(ref)
    except RefError:
        return
    assert Path(ref).name == ref
    assert ref.isascii()
    assert ref.isprintable()
    assert len(ref) <= 200
    assert ref[0].isalnum()


@given(ref=anything)
@settings(
    deadline=None, derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_looking_for_anything_fails_in_words(tmp_path_factory, ref):
    with pytest.raises(ArtifactNotFound, match="no artifact"):
        ArtifactStore(tmp_path_factory.getbasetemp() / "empty").load(ref)


def test_looking_for_a_very_long_path_fails_in_words(store):
    """The file system answers such a path with another error than 'not there'."""
    for ref in ("x" * 300 + ".h5", "y/" * 3000 + "z.h5"):
        with pytest.raises(ArtifactNotFound):
            store.load(ref)


def test_ref_that_names_something_else(store, factorization, other_factorization):
    """Refs are never moved: a paper that cites one must find the same artifact."""
    first = store.save(factorization, "ref")
    before = (store.path / "refs" / "ref.json").read_bytes()
    with pytest.raises(RefError, match="already names another artifact"):
        store.save(other_factorization, "ref")
    assert (store.path / "refs" / "ref.json").read_bytes() == before
    assert store.load("ref").digest == first.digest


def test_ref_of_an_artifact_without_the_usual_provenance(forger, store, factorization):
    """Somebody else's file under the ref: refused in words, whatever its provenance lacks."""

    def bare(spec):
        spec["provenance"] = {}

    forger.place(store, *forger.build(bare), "ref")
    with pytest.raises(MmfactError):
        store.save(factorization, "ref")


def test_refused_ref_leaves_no_file_behind(store, factorization, other_factorization):
    """What was refused must not stay in the store under no name, where `list` does not show it."""
    store.save(factorization, "ref")
    with pytest.raises(RefError):
        store.save(other_factorization, "ref")
    assert len(list(store.path.glob("*.h5"))) == 1


def test_same_content_in_other_bytes_is_the_same_artifact(forger, store, factorization):
    """Another h5py or zlib compresses differently: same logical digest, other file. It still is the same artifact."""
    data, logical = forger.build()
    with h5py.File(io.BytesIO(data)) as file:
        arrays = {name: file[name][...] for name in file}
    other = forger.write(arrays.pop("spec").tobytes(), arrays, level=9)
    assert other != data
    forger.place(store, other, logical, "ref")
    assert store.save(factorization, "ref").digest == logical
    assert store.load(logical).digest == logical


# --- looking up ------------------------------------------------------------------------------------


def test_load_by_digest(store, factorization, other_factorization):
    a, b = store.save(factorization, "a"), store.save(other_factorization, "b")
    for saved in (a, b):
        for length in (8, 12, 63, 64):
            assert store.load(saved.digest[:length]).digest == saved.digest
        with pytest.raises(ArtifactNotFound):
            store.load(saved.digest[:7])
        with pytest.raises(ArtifactNotFound):
            store.load(saved.digest.upper())


def test_ambiguous_digest(store):
    """Two artifacts that begin alike: neither is taken."""
    store.prepare()
    for end in "01":
        (store.path / f"{'ab' * 31}a{end}-{'0' * 64}.h5").write_bytes(b"")
    with pytest.raises(ArtifactNotFound, match="fits 2 artifacts"):
        store.load("abababab")
    with pytest.raises(ArtifactCorrupt):  # unique now, and read
        store.load("ab" * 31 + "a1")


def test_load_by_path(store, factorization, tmp_path):
    saved = store.save(factorization, "ref")
    elsewhere = ArtifactStore(tmp_path / "elsewhere")
    assert elsewhere.load(str(saved.path)).digest == saved.digest
    with pytest.raises(ArtifactNotFound):
        elsewhere.load(str(saved.path.with_name("no.h5")))


def test_did_you_mean(store, factorization):
    """A typo is answered with what was meant."""
    store.save(factorization, "momentum-n2048")
    store.save(factorization, "prefix-sum-n64")
    with pytest.raises(ArtifactNotFound, match="did you mean momentum-n2048"):
        store.load("momentm-n2048")
    with pytest.raises(ArtifactNotFound, match="mmfact list"):
        store.load("qqqqqqqqq")


def test_refs_are_sorted_and_foreign_files_ignored(store, factorization):
    for ref in ("b", "a", "c"):
        store.save(factorization, ref)
    (store.path / "refs" / "README").write_text("")
    (store.path / "refs" / ".hidden.json").write_text("")
    (store.path / "refs" / "bad name.json").write_text("")
    (store.path / "notes.txt").write_text("")
    assert store.refs() == ["a", "b", "c"]
    assert [entry.ref for entry in store.entries()] == ["a", "b", "c"]


# --- damage ----------------------------------------------------------------------------------------

NAME = f"{'a' * 64}-{'b' * 64}.h5"
DAMAGED_REFS = {
    "empty": b"",
    "cut off": b'{"artifact": "' + NAME.encode()[:30],
    "no object": b"[]",
    "null": b"null",
    "no name": b"{}",
    "no time": json.dumps({"artifact": NAME}).encode(),
    "time a number": json.dumps({"artifact": NAME, "created": 5}).encode(),
    "name a number": b'{"artifact": 5, "created": ""}',
    "leads out": b'{"artifact": "../../etc/passwd", "created": ""}',
    "absolute": b'{"artifact": "/etc/passwd", "created": ""}',
    "not text": b"\xff\xfe\xfa",
    "binary": bytes(range(256)),
    "deeply nested": b"[" * 100_000,
}


@pytest.mark.parametrize("name", DAMAGED_REFS)
def test_damaged_ref_file(store, factorization, name):
    """A typed error that says which file and what to do; the listing goes on."""
    store.save(factorization, "good")
    path = store.path / "refs" / "bad.json"
    path.write_bytes(DAMAGED_REFS[name])
    with pytest.raises(ArtifactCorrupt, match=r"remove it .mmfact remove bad. and compile again") as caught:
        store.load("bad")
    assert str(path) in str(caught.value)
    entries = {entry.ref: entry for entry in store.entries()}
    assert entries["good"].error is None
    assert entries["bad"].artifact is None
    assert "damaged" in entries["bad"].error


def test_damaged_ref_is_mended_as_the_message_says(store, factorization):
    store.save(factorization, "ref")
    path = store.path / "refs" / "ref.json"
    path.chmod(0o644)
    path.write_bytes(b"")
    with pytest.raises(MmfactError):
        store.save(factorization, "ref")
    path.unlink()
    store.save(factorization, "ref")
    assert store.load("ref").n == 3


def test_ref_to_a_missing_file(store, factorization):
    """The message names what is missing; compiling again brings it back."""
    saved = store.save(factorization, "ref")
    saved.path.unlink()
    with pytest.raises(ArtifactNotFound, match="not in the store") as caught:
        store.load("ref")
    assert saved.digest[:16] in str(caught.value)
    assert "mmfact remove ref" in str(caught.value)
    (entry,) = store.entries()
    assert entry.artifact is None
    assert "not in the store" in entry.error
    store.save(factorization, "ref")
    assert store.load("ref").digest == saved.digest


def test_ref_to_a_damaged_file(store, factorization, other_factorization):
    """The listing shows it with its error and goes on."""
    bad = store.save(factorization, "a-bad")
    good = store.save(other_factorization, "b-good")
    bad.path.chmod(0o644)
    bad.path.write_bytes(bad.path.read_bytes()[:-1])
    with pytest.raises(ArtifactCorrupt, match="damaged"):
        store.load("a-bad")
    entries = list(store.entries())
    assert [entry.ref for entry in entries] == ["a-bad", "b-good"]
    assert entries[0].artifact is None
    assert "damaged" in entries[0].error
    assert entries[0].file == bad.path.name
    assert entries[1].artifact.digest == good.digest
    assert entries[1].size == good.path.stat().st_size


def test_one_forged_artifact_does_not_hide_the_others(forger, store, factorization):
    """Every artifact is reachable whatever somebody put beside it."""

    def immense(spec):
        spec["workload"]["n"] = 10**400

    store.save(factorization, "good")
    forger.place(store, *forger.build(immense), "forged")
    errors = {entry.ref: entry.error for entry in store.entries()}
    assert errors["good"] is None
    assert errors["forged"]
