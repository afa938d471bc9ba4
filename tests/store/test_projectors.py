"""The projector cache: bit for bit, what it depends on, least recently used, damage, and processes that are killed."""

from __future__ import annotations

import dataclasses
import errno
import functools
import hashlib
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.factorize.errors import (
    ArtifactCorrupt,
    ArtifactNotFound,
    ArtifactVersionError,
    ProjectorError,
    ProjectorStale,
    StoreError,
)
from mmfact.store import projectors, publish
from mmfact.store.projectors import ProjectorCache, ProjectorKey, read_projector

HELPER = Path(__file__).with_name("projector_processes.py")
RUN = "0123456789abcdef" * 2


def key(**changes: Any) -> ProjectorKey:
    fields = {
        "scope": RUN,
        "step": 40,
        "part": "0-of-1",
        "kind": "eigen",
        "k": 3,
        "m": 8,
        "p": 20,
        "storage": "float32",
        "public": "1" * 64,
        "parameters": "2" * 64,
    }
    return ProjectorKey(**(fields | changes))


def vectors(key: ProjectorKey, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((key.k, key.p)).astype(key.storage)


def put(cache: ProjectorCache, key: ProjectorKey, seed: int = 1) -> Path:
    return cache.put(key, [vectors(key, seed)], {"eigenvalues": np.arange(key.k, 0.0, -1)}, {"step": key.step})


def held(folder: Path) -> int:
    """Bytes in a folder, each file once under however many names."""
    return sum({path.stat().st_ino: path.stat().st_size for path in folder.iterdir()}.values())


def entries_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


@pytest.fixture
def cache(tmp_path) -> ProjectorCache:
    return ProjectorCache(tmp_path / "cache")


# --- round trips -----------------------------------------------------------------------------------


@pytest.mark.parametrize("storage", ["float32", "float16"])
@pytest.mark.parametrize("cuts", [(), (7,), (1, 1, 8, 19)], ids=["whole", "two parts", "five parts, one empty"])
@pytest.mark.parametrize("order", ["C", "F", "strided"])
def test_round_trip_bit_for_bit(cache, storage, cuts, order):
    """What `get` and h5py itself read is what NumPy puts side by side; signs of zero and subnormals included."""
    wanted = key(storage=storage)
    whole = vectors(wanted)
    whole[0, :4] = [-0.0, np.finfo(storage).smallest_subnormal, np.finfo(storage).max, np.finfo(storage).min]
    parts = [np.array(part) for part in np.split(whole, cuts, axis=1)]
    if order == "F":
        parts = [np.asfortranarray(part) for part in parts]
    elif order == "strided":
        parts = [np.repeat(np.repeat(part, 2, 0), 3, 1)[::2, ::3] for part in parts]
    values = {"eigenvalues": np.array([3.0, 1e-310, -0.0]), "spectrum": np.geomspace(1, 1e-9, 8)}
    record = {"step": 40, "explained": 0.1 + 0.2, "source": "computed", "held_out_error": None, "exact": True}
    path = cache.put(wanted, parts, values, record)
    found = cache.get(wanted)
    assert found.key == wanted
    assert found.path == path
    assert found.basis.dtype == storage
    assert found.basis.tobytes() == whole.tobytes()
    found.basis[:] = 0  # it belongs to the caller
    assert found.record == record
    assert {name: array.tobytes() for name, array in found.values.items()} == {
        n: a.tobytes() for n, a in values.items()
    }
    with h5py.File(path) as file:
        assert set(file) == {"spec", "basis", "values.eigenvalues", "values.spectrum"}
        assert file["basis"][...].tobytes() == whole.tobytes()
        spec = json.loads(file["spec"][...].tobytes())
        for name in set(file) - {"spec"}:
            assert hashlib.sha256(file[name][...].tobytes()).hexdigest() == spec["datasets"][name]["sha256"]
    assert ProjectorKey(**spec["key"]) == wanted
    name = f"{RUN}_40_0-of-1_{hashlib.sha256(path.read_bytes()).hexdigest()}.h5"
    assert path.name == name
    assert stat.S_IMODE(path.stat().st_mode) == 0o444
    assert entries_in(cache.path) == [name]


@settings(max_examples=30)
@given(
    k=st.integers(1, 9),
    widths=st.lists(st.integers(0, 400), min_size=1, max_size=5).filter(any),
    storage=st.sampled_from(["float32", "float16"]),
    shapes=st.dictionaries(
        st.from_regex(r"[a-z][a-z_]{0,30}", fullmatch=True),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
        max_size=12,
    ),
    record=st.dictionaries(
        st.text(max_size=30),
        st.none()
        | st.booleans()
        | st.integers(-(10**30), 10**30)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        max_size=8,
    ),
)
def test_any_shapes_and_records(k, widths, storage, shapes, record):
    """Whatever the sizes, the bytes that HDF5 lays out and those that we write fit together."""
    wanted = key(k=k, p=sum(widths), storage=storage)
    whole = vectors(wanted)
    values = {name: np.random.default_rng(2).standard_normal(shape) for name, shape in shapes.items()}
    with tempfile.TemporaryDirectory() as folder:
        cache = ProjectorCache(folder)
        path = cache.put(wanted, np.split(whole, np.cumsum(widths)[:-1], axis=1), values, record)
        found = cache.get(wanted)
        assert found.basis.tobytes() == whole.tobytes()
        assert found.record == record
        assert list(found.values) == sorted(values)
        for name, array in values.items():
            assert found.values[name].shape == array.shape
            assert found.values[name].tobytes() == array.tobytes()
        assert found.size == path.stat().st_size


def test_memory(cache):
    """A projector of 32 MB is written without another copy of it, and read into one."""
    wanted = key(k=20, p=400_000)
    parts = np.split(vectors(wanted), 4, axis=1)
    parts = [np.ascontiguousarray(part) for part in parts]
    tracemalloc.start()
    try:
        cache.put(wanted, parts, {}, {})
        _, written = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        found = cache.get(wanted)
        _, read = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        list(cache.entries())
        _, listed = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert written < 2e6
    assert read < found.basis.nbytes + 2e6
    assert listed < found.basis.nbytes + 2e6  # the one that is still held


# --- what a projector depends on -------------------------------------------------------------------

OTHER = {
    "kind": "random",
    "k": 4,
    "m": 9,
    "p": 21,
    "storage": "float16",
    "public": "1" * 63 + "3",
    "parameters": "",
}


def test_every_field_is_an_address_or_a_dependency():
    assert {field.name for field in dataclasses.fields(ProjectorKey)} == {"scope", "step", "part", *OTHER}


@pytest.mark.parametrize("field", OTHER)
def test_other_dependency_is_refused_by_name(cache, field):
    """Both ways round, and with everything different at once: the message names what differs and nothing else."""
    there, asked = key(), key(**{field: OTHER[field]})
    put(cache, there)
    with pytest.raises(ProjectorStale) as caught:
        cache.get(asked)
    assert re.findall(r"its (\w+) is", str(caught.value)) == [field]
    for value in (getattr(there, field), OTHER[field]):
        assert (value[:16] if isinstance(value, str) else str(value)) in str(caught.value)
    put(cache, asked)
    with pytest.raises(ProjectorStale, match=f"its {field} is"):
        cache.get(there)
    assert cache.get(asked).key == asked
    with pytest.raises(ProjectorStale) as caught:
        ProjectorCache(cache.path).get(key(**{name: value for name, value in OTHER.items() if name != field}))
    assert re.findall(r"its (\w+) is", str(caught.value)) == list(OTHER)
    assert str(caught.value).endswith("give the cache it was made with, or recompute=True")


@pytest.mark.parametrize(
    "change", [{"scope": "f" * 32}, {"scope": f"tag-{RUN}"}, {"step": 4}, {"part": "0-of-2"}], ids=str
)
def test_another_address_is_another_projector(cache, change):
    """Neither is the other's, and both are kept."""
    put(cache, key())
    assert cache.get(key(**change)) is None
    put(cache, key(**change), seed=2)
    assert cache.get(key(**change)).basis.tobytes() == vectors(key(), 2).tobytes()
    assert cache.get(key()).basis.tobytes() == vectors(key(), 1).tobytes()


def test_nothing_there(cache):
    assert cache.get(key()) is None
    assert list(cache.entries()) == []
    assert not cache.path.exists()
    with pytest.raises(ArtifactNotFound, match="no projector"):
        read_projector(cache.path / "nothing.h5".replace("nothing", f"{RUN}_0_0-of-1_{'0' * 64}"))


def test_replacing_leaves_one(cache):
    put(cache, key())
    put(cache, key(k=4))
    assert len(entries_in(cache.path)) == 1
    assert cache.get(key(k=4)) is not None


@pytest.mark.parametrize("newest", ["right", "wrong", "damaged"])
def test_two_at_one_address(cache, newest):
    """A writer died between publishing and removing what it replaced: the right one is taken, whichever is newer."""
    right = put(cache, key())
    aside = cache.path.parent / right.name
    right.rename(aside)
    other = put(cache, key(k=4))
    aside.rename(right)
    if newest == "damaged":
        damage(other)
    os.utime(right, (1, 1 if newest != "right" else 3))
    os.utime(other, (2, 2))
    assert cache.get(key()).path == right
    if newest != "damaged":
        assert cache.get(key(k=4)).path == other
    put(cache, key(k=5))
    assert len(entries_in(cache.path)) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scope": "run"}, "scope is 'run'"),
        ({"scope": "../" + RUN}, "scope"),
        ({"scope": RUN.upper()}, "scope"),
        ({"scope": RUN + "\n"}, "scope"),
        ({"step": -1}, "step is -1"),
        ({"step": 1.0}, "step is 1.0"),
        ({"step": True}, "step is True"),
        ({"step": 10**18}, "step"),
        ({"part": "2-of-2"}, "0-of-2"),
        ({"part": "00-of-1"}, "part"),
        ({"part": "0/1"}, "part"),
        ({"kind": ""}, "kind"),
        ({"k": 0}, "k is 0"),
        ({"m": 0}, "m is 0"),
        ({"p": None}, "p is None"),
        ({"storage": "float64"}, "float32 or float16"),
        ({"public": ""}, "public"),
        ({"parameters": "2" * 63}, "parameters"),
    ],
    ids=str,
)
def test_keys_that_are_none(change, message):
    with pytest.raises(ProjectorError, match=message):
        key(**change)


@pytest.mark.parametrize(
    ("basis", "values", "record", "message"),
    [
        ([np.zeros((3, 19), "f4")], {}, {}, r"3 vectors of 20 elements .*\(3, 19\)"),
        ([np.zeros((2, 20), "f4")], {}, {}, r"\(2, 20\)"),
        ([np.zeros(20, "f4")], {}, {}, r"\(20,\)"),
        ([], {}, {}, "elements"),
        ([np.zeros((3, 10), "f4"), np.zeros((3, 10))], {}, {}, "float32, float64"),
        ([np.zeros((3, 20), "f2")], {}, {}, "float16 does not fit"),
        ([np.full((3, 20), np.inf, "f4")], {}, {}, "not finite"),
        ([np.zeros((3, 19), "f4"), np.full((3, 1), np.nan, "f4")], {}, {}, "not finite"),
        (None, {"spectrum": np.array([1, np.nan])}, {}, "spectrum.*not finite"),
        (None, {"../x": np.ones(2)}, {}, "small letters"),
        (None, {}, {"gap": np.float32(1)}, "gap"),
        (None, {}, {"gap": float("inf")}, "gap.*inf"),
        (None, {}, {"list": [1]}, "list"),
        (None, {}, {1: 1}, "under names"),
        (None, {}, {"text": "x" * (1 << 20)}, "at most 1048576"),
    ],
    ids=lambda part: part if isinstance(part, str) else "",
)
def test_what_does_not_fit_is_refused_before_anything_is_written(cache, basis, values, record, message):
    with pytest.raises(ProjectorError, match=message):
        cache.put(key(), [vectors(key())] if basis is None else basis, values, record)
    assert not cache.path.exists()


@pytest.mark.parametrize("bound", [0, -1, 1.5, True, "1"])
def test_bounds_that_are_none(tmp_path, bound):
    with pytest.raises(StoreError, match="max_bytes"):
        ProjectorCache(tmp_path, max_bytes=bound)


def test_path_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StoreError, match="is a file"):
        ProjectorCache(tmp_path / "file")
    with pytest.raises(StoreError, match="too long"):
        ProjectorCache("a" * 300)
    with pytest.raises(StoreError):
        put(ProjectorCache(tmp_path / "file" / "below"), key())
    with pytest.raises(StoreError):
        ProjectorCache(tmp_path / "file" / "below").get(key())
    assert (tmp_path / "file").read_text() == "mine"


def test_default_path(monkeypatch, tmp_path):
    """Beside the artifacts."""
    monkeypatch.delenv("MMFACT_STORE", raising=False)
    assert ProjectorCache().path == Path("artifacts/projectors")
    monkeypatch.setenv("MMFACT_STORE", str(tmp_path))
    assert ProjectorCache().path == tmp_path / "projectors"
    assert ProjectorCache().max_bytes == 1 << 30


# --- the bound, and what goes first ----------------------------------------------------------------


@functools.cache
def size_of(wanted: ProjectorKey) -> int:
    """Of the file of this key, from a cache without a bound that matters."""
    with tempfile.TemporaryDirectory() as folder:
        return put(ProjectorCache(folder), wanted).stat().st_size


CHOICES = [key(step=step, p=p) for step in range(6) for p in (20, 300, 900)]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.sampled_from(["put", "put", "get"]), st.sampled_from(CHOICES)), min_size=8, max_size=30),
    st.integers(15_000, 40_000),
)
def test_least_recently_used_goes_first(operations, bound):
    """Random puts and gets against a list of (key, size) in order of use; the bound holds at every moment of a put."""
    seen, model, names = [], [], {}
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        place = Path(folder)
        cache = ProjectorCache(place, max_bytes=bound)

        def watched(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*arguments: Any, **options: Any) -> Any:
                seen.append(held(place))
                result = real(*arguments, **options)
                seen.append(held(place))
                return result

            return call

        for name in ("fsync", "link", "unlink", "fchmod"):  # whole temporary files stand there at each of them
            patch.setattr(os, name, watched(getattr(os, name)))
        for operation, wanted in operations:
            kept = next((known for known in model if known.address == wanted.address), None)
            if operation == "get":
                if kept is not None and kept != wanted:
                    with pytest.raises(ProjectorStale):
                        cache.get(wanted)
                else:
                    assert (cache.get(wanted) is None) == (kept is None)
                    if kept is not None:
                        model.remove(kept)
                        model.append(kept)
            else:
                names[put(cache, wanted).name] = wanted
                if kept != wanted:  # room is made, first from what is to be replaced
                    for old in [*([kept] if kept else []), *(known for known in model if known != kept)]:
                        if sum(size_of(known) for known in model) + size_of(wanted) > bound:
                            model.remove(old)
                if kept in model:
                    model.remove(kept)
                model.append(wanted)
            assert {names[name] for name in entries_in(place)} == set(model)
            assert held(place) <= bound
    assert max(seen, default=0) <= bound


def test_a_use_is_to_be_read(cache):
    """Of three that fill the cache, the one that was read survives the next."""
    keys = [key(step=step) for step in range(4)]
    cache = ProjectorCache(cache.path, max_bytes=3 * size_of(keys[0]) + 100)
    for wanted in keys[:3]:
        put(cache, wanted)
    cache.get(keys[0])
    put(cache, keys[3])
    assert [cache.get(wanted) is not None for wanted in keys] == [True, False, True, True]


def test_use(cache):
    """Of three that fill the cache, the one that is in use survives the next, though nobody has read it."""
    keys = [key(step=step) for step in range(4)]
    cache = ProjectorCache(cache.path, max_bytes=3 * size_of(keys[0]) + 100)
    assert not cache.use(keys[0])
    for wanted in keys[:3]:
        put(cache, wanted)
    assert cache.use(keys[0])
    put(cache, keys[3])
    assert [cache.use(wanted) for wanted in keys] == [True, False, True, True]


@pytest.mark.parametrize("field", OTHER)
def test_what_depends_on_something_else_is_not_in_use(cache, field):
    """Both ways round; it is not touched either."""
    asked = key(**{field: OTHER[field]})
    for there, other in ((key(), asked), (asked, key())):
        path = put(cache, there)
        used = path.stat().st_mtime_ns
        assert not cache.use(other)
        assert path.stat().st_mtime_ns == used
        assert cache.use(there)


def test_a_record_cannot_pass_for_a_key(cache):
    """Text in a record that spells the key's bytes is escaped there."""
    text = '"key":' + json.dumps(dataclasses.asdict(key()), sort_keys=True, separators=(",", ":"))
    there = key(k=4)
    cache.put(there, [vectors(there)], {}, {text: text})
    assert not cache.use(key())
    assert cache.use(there)
    assert text.encode() in put(cache, key()).read_bytes()


def test_use_reads_no_vectors(cache, monkeypatch):
    """It is asked at every step."""
    put(cache, key())
    monkeypatch.setattr(hashlib, "file_digest", lambda *arguments: pytest.fail("a digest was taken"))
    assert cache.use(key())


def test_use_of_what_is_no_plain_file(cache):
    """A link is no entry, whatever it points to; the next put puts a file there."""
    path = put(cache, key())
    aside = cache.path.parent / path.name
    path.rename(aside)
    for target in (aside, aside.with_name("nothing"), Path("/dev/zero")):
        path.symlink_to(target)
        assert not cache.use(key())
        assert cache.get(key()) is None
        assert put(cache, key()) == path
        assert not path.is_symlink()
        assert cache.use(key())
        path.unlink()
    assert aside.exists()
    os.mkfifo(path)
    assert not cache.use(key())


def test_uses_in_quick_succession_are_told_apart(tmp_path):
    """The file system's own clock stands still for milliseconds."""
    first, second = tmp_path / "first", tmp_path / "second"
    for path in (first, second):
        path.touch()
    for _ in range(50):
        projectors._touch(first)
        projectors._touch(second)
        assert first.stat().st_mtime_ns < second.stat().st_mtime_ns


def test_ties_go_by_name(cache):
    keys = [key(step=step) for step in range(4)]
    cache = ProjectorCache(cache.path, max_bytes=3 * size_of(keys[0]) + 100)
    paths = [put(cache, wanted) for wanted in keys[:3]]
    for path in paths:
        os.utime(path, (5, 5))
    put(cache, keys[3])
    assert not min(paths).exists()


def test_larger_than_the_cache(cache):
    """Refused with both sizes; what was there stays."""
    cache = ProjectorCache(cache.path, max_bytes=size_of(key()))
    put(cache, key())
    large = key(step=1, p=300)
    with pytest.raises(StoreError, match=rf"{size_of(large)} bytes .* at most {cache.max_bytes};"):
        put(cache, large)
    assert cache.get(key()) is not None


def test_lower_bound_than_before(cache):
    """The next put brings the cache down to it."""
    for step in range(9):
        put(cache, key(step=step))
    cache = ProjectorCache(cache.path, max_bytes=2 * size_of(key()) + 100)
    put(cache, key(step=9))
    assert held(cache.path) <= cache.max_bytes
    assert [entry.step for entry in cache.entries()] == [8, 9]


def test_the_same_again_writes_nothing(cache, monkeypatch):
    path = put(cache, key())
    before = path.stat()
    monkeypatch.setattr(projectors, "publish_pieces", lambda *arguments: pytest.fail("it was written again"))
    assert put(cache, key()) == path
    assert path.stat().st_ino == before.st_ino
    assert path.stat().st_mtime_ns > before.st_mtime_ns


# --- damage and foreign files ----------------------------------------------------------------------


def damage(path: Path) -> None:
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_every_flipped_byte_is_noticed(cache):
    path = put(cache, key())
    path.chmod(0o644)
    data = path.read_bytes()
    bits = np.random.default_rng(21).integers(0, 8, len(data))
    with path.open("r+b", buffering=0) as file:
        for position, bit in enumerate(bits):
            os.pwrite(file.fileno(), bytes([data[position] ^ (1 << bit)]), position)
            with pytest.raises(ArtifactCorrupt, match="its name says"):
                cache.get(key())
            os.pwrite(file.fileno(), data[position : position + 1], position)
    assert cache.get(key()) is not None


FLIPS = """
import hashlib, sys
from pathlib import Path
import h5py
import numpy as np
from mmfact.factorize.errors import ArtifactCorrupt, ArtifactVersionError
from mmfact.store.projectors import read_projector
path, folder = Path(sys.argv[1]), Path(sys.argv[2])
data, true = path.read_bytes(), read_projector(path)
with h5py.File(path) as file:
    spec = range(file["spec"].id.get_offset(), file["spec"].id.get_offset() + file["spec"].size)
refused = equal = 0
for position, bit in enumerate(np.random.default_rng(22).integers(0, 8, len(data))):
    damaged = bytearray(data)
    damaged[position] ^= 1 << bit
    forged = folder / f"{true.key.address}_{hashlib.sha256(damaged).hexdigest()}.h5"
    forged.write_bytes(damaged)
    try:
        found = read_projector(forged)
    except (ArtifactCorrupt, ArtifactVersionError):
        refused += 1
    else:
        assert position in spec or (found.key == true.key and found.record == true.record), position
        assert found.basis.tobytes() == true.basis.tobytes(), position
        assert found.values["eigenvalues"].tobytes() == true.values["eigenvalues"].tobytes(), position
        assert list(found.values) == list(true.values), position
        equal += 1
    forged.unlink()
print(refused, equal)
"""


def test_flips_past_the_outer_digest_change_nothing_silently(cache, tmp_path, python):
    """Somebody renames the file so that its digest fits: every array is still guarded. Each byte in turn, in a process
    of its own, which the HDF5 library might end; a flip in the spec may make another valid key or record of it."""
    path = put(cache, key())
    (tmp_path / "forged").mkdir()
    out, err = (process := python(FLIPS, path, tmp_path / "forged")).communicate(timeout=120)
    assert process.returncode == 0, err[-1000:]
    refused, equal = map(int, out.split())
    assert refused + equal == path.stat().st_size
    assert refused > 1000


def test_truncation_and_growth_are_noticed(cache):
    path = put(cache, key())
    path.chmod(0o644)
    data = path.read_bytes()
    for damaged in (b"", data[:1], data[:-1], data[: len(data) // 2], data + b"\0"):
        path.write_bytes(damaged)
        with pytest.raises(ArtifactCorrupt, match=f"its {len(damaged)} bytes"):
            cache.get(key())
        forged = path.with_name(f"{key().address}_{hashlib.sha256(damaged).hexdigest()}.h5")
        forged.write_bytes(damaged)
        if len(damaged) < len(data):
            with pytest.raises(ArtifactCorrupt, match="cannot be read as a projector"):
                read_projector(forged)


def test_damaged_entry_is_replaced(cache):
    """By the same projector, whose file has the same name, and by another."""
    for wanted in (key(), key(k=4)):
        path = put(cache, key())
        damage(path)
        with pytest.raises(ArtifactCorrupt):
            cache.get(key())
        put(cache, wanted)
        assert cache.get(wanted).basis.tobytes() == vectors(wanted).tobytes()
        assert len(entries_in(cache.path)) == 1


def test_under_another_name(cache, tmp_path):
    """A copy for another step, and one whose name says nothing."""
    path = put(cache, key())
    digest = path.stem[-64:]
    moved = path.with_name(f"{RUN}_41_0-of-1_{digest}.h5")
    moved.write_bytes(path.read_bytes())
    with pytest.raises(ArtifactCorrupt, match=f"belongs at {RUN}_40_0-of-1"):
        cache.get(key(step=41))
    plain = tmp_path / "projector.h5"
    plain.write_bytes(path.read_bytes())
    with pytest.raises(ArtifactCorrupt, match="not named <scope>"):
        read_projector(plain)


def test_other_files_are_left_alone(cache, store, factorization):
    """Notes, artifacts and folders in the directory are neither read nor evicted."""
    cache = ProjectorCache(cache.path, max_bytes=size_of(key()) + 100)
    artifact = store.save(factorization, "ref").path
    cache.path.mkdir()
    (cache.path / artifact.name).write_bytes(artifact.read_bytes())
    (cache.path / "notes.txt").write_text("x" * 10_000)
    (cache.path / f"{RUN}_40_0-of-1_{'0' * 64}.h5").mkdir()
    for step in range(3):
        put(cache, key(step=step))
    assert cache.get(key(step=2)) is not None
    assert len(list(cache.entries())) == 1
    assert len(entries_in(cache.path)) == 4


@pytest.mark.parametrize("target", ["pipe", "/dev/zero", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path, python, target):
    """A pipe would wait for its writer and a device has no end: in a process of its own, ended if it hangs."""
    path = tmp_path / f"{RUN}_40_0-of-1_{'0' * 64}.h5"
    if target == "pipe":
        os.mkfifo(path)
    elif target == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    reading = "import sys; from mmfact.store.projectors import read_projector; read_projector(sys.argv[1])"
    _, err = python(reading, path).communicate(timeout=20)
    assert ("StoreError" if target == "folder" else "it is no regular file") in err


def test_link_to_a_projector_is_read_by_its_path(cache, tmp_path):
    """Only in the cache's directory it is no entry."""
    path = put(cache, key())
    (tmp_path / path.name).symlink_to(path)
    assert read_projector(tmp_path / path.name).key == key()


def forge(
    folder: Path,
    edit_spec: Callable[[dict[str, Any]], None] = lambda spec: None,
    edit_file: Callable[[h5py.File], None] = lambda file: None,
    text: bytes | None = None,
    **options: Any,
) -> Path:
    """An entry that was put, its spec and file changed, under the name that fits."""
    path = put(ProjectorCache(folder / "honest"), key())
    with h5py.File(path) as file:
        arrays = {name: file[name][...] for name in file}
    spec = json.loads(arrays.pop("spec").tobytes())
    edit_spec(spec)
    text = json.dumps(spec).encode() if text is None else text
    made = folder / "forged"
    with h5py.File(made, "w", **options) as file:
        for name, array in {"spec": np.frombuffer(text, np.uint8), **arrays}.items():
            file.create_dataset(name, data=array)
        edit_file(file)
    return made.rename(folder / f"{key().address}_{hashlib.sha256(made.read_bytes()).hexdigest()}.h5")


def replaced(name: str, **options: Any) -> Callable[[h5py.File], None]:
    def edit(file: h5py.File) -> None:
        data = file[name][...]
        del file[name]
        file.create_dataset(name, **({"data": data} | options))

    return edit


def linked(name: str, link: Any) -> Callable[[h5py.File], None]:
    def edit(file: h5py.File) -> None:
        del file[name]
        file[name] = link

    return edit


def virtual(file: h5py.File) -> None:
    layout = h5py.VirtualLayout((3, 20), "<f4")
    layout[...] = h5py.VirtualSource("/etc/passwd", "x", (3, 20))
    del file["basis"]
    file.create_virtual_dataset("basis", layout)


def external(file: h5py.File) -> None:
    """The right numbers, but in a file beside."""
    beside = Path(file.filename).with_name("beside")
    beside.write_bytes(file["basis"][...].tobytes())
    del file["basis"]
    file.create_dataset("basis", (3, 20), "<f4", external=str(beside))


def as_doubles(file: h5py.File) -> None:
    """The right spec, but as numbers of another kind."""
    text = file["spec"][...].tobytes()
    del file["spec"]
    file["spec"] = np.frombuffer(text + b" " * (-len(text) % 8), "<f8")


def with_digest(name: str, array: np.ndarray) -> tuple[Callable[..., None], Callable[..., None]]:
    """Edits that put an array in the place of another, with the spec to it."""
    entry = {
        "shape": list(array.shape),
        "dtype": array.dtype.str,
        "sha256": hashlib.sha256(array.tobytes()).hexdigest(),
    }
    return lambda spec: spec["datasets"].update({name: entry}), replaced(name, data=array)


def in_key(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda spec: spec["key"].update(changes)


NOTHING = (lambda spec: None, lambda file: None)
SUSPECT = {
    "external link": (NOTHING[0], linked("basis", h5py.ExternalLink("/etc/passwd", "/basis"))),
    "soft link": (NOTHING[0], linked("values.eigenvalues", h5py.SoftLink("/spec"))),
    "soft link for the spec": (NOTHING[0], linked("spec", h5py.SoftLink("/basis"))),
    "virtual": (NOTHING[0], virtual),
    "external": (NOTHING[0], external),
    "chunked": (NOTHING[0], replaced("basis", chunks=(3, 20))),
    "packed": (NOTHING[0], replaced("basis", compression="gzip")),
    "packed spec": (NOTHING[0], replaced("spec", compression="gzip")),
    "group": (NOTHING[0], lambda file: (file.pop("basis"), file.create_group("basis"))),
    "attribute of the file": (NOTHING[0], lambda file: file.attrs.update(x=1)),
    "attribute of the basis": (NOTHING[0], lambda file: file["basis"].attrs.update(x=1)),
    "one more": (NOTHING[0], lambda file: file.create_dataset("more", data=1)),
    "one less": (NOTHING[0], lambda file: file.pop("values.eigenvalues")),
    "no spec": (NOTHING[0], lambda file: file.pop("spec")),
    "no basis": (lambda spec: spec["datasets"].pop("basis"), lambda file: file.pop("basis")),
    "two-dimensional spec": (NOTHING[0], lambda file: replaced("spec", data=file["spec"][...][None])(file)),
    "spec of another type": (NOTHING[0], as_doubles),
    "nothing in the spec": (NOTHING[0], replaced("spec", data=h5py.Empty("u1"))),
    "large spec": (NOTHING[0], replaced("spec", data=np.full((1 << 20) + 1, 32, np.uint8))),
    "big-endian": (NOTHING[0], lambda file: replaced("basis", data=file["basis"][...].astype(">f4"))(file)),
    "not finite": with_digest("basis", np.full((3, 20), np.nan, "<f4")),
    "not finite values": with_digest("values.eigenvalues", np.array([np.inf])),
    "other numbers": (NOTHING[0], replaced("basis", data=np.ones((3, 20), "<f4"))),
    "other shape": with_digest("basis", np.ones((3, 21), "<f4")),
    "other dtype": with_digest("basis", np.ones((3, 20), "<f8")),
    "values in float32": with_digest("values.eigenvalues", np.ones(3, "<f4")),
    "values of a bad name": (
        lambda spec: spec["datasets"].update({"values.A": spec["datasets"].pop("values.eigenvalues")}),
        lambda file: file.move("values.eigenvalues", "values.A"),
    ),
    "never written": (
        in_key(p=10**12),
        lambda file: (file.pop("basis"), file.create_dataset("basis", (3, 10**12), "<f4")),
    ),
    "never written, spec to it": (
        lambda spec: (in_key(p=10**12)(spec), spec["datasets"]["basis"].update(shape=[3, 10**12])),
        lambda file: (file.pop("basis"), file.create_dataset("basis", (3, 10**12), "<f4")),
    ),
    "key of nothing": (lambda spec: spec.update(key={}), NOTHING[1]),
    "key of no dictionary": (lambda spec: spec.update(key=[1]), NOTHING[1]),
    "key with more": (in_key(more=1), NOTHING[1]),
    "key that steers a terminal": (in_key(**{"\x1b[31mevil\x1b]0;x\x07": 1}), NOTHING[1]),
    "key with less": (lambda spec: spec["key"].pop("m"), NOTHING[1]),
    "bad key": (in_key(public="x"), NOTHING[1]),
    "bad key that steers a terminal": (in_key(public="\x1b[2J" * 1000), NOTHING[1]),
    "record that steers a terminal": (
        lambda spec: spec["record"].update({"\x1b[31m": {"\x1b": "\x1b" * 1000}}),
        NOTHING[1],
    ),
    "shape that steers a terminal": (
        lambda spec: spec["datasets"]["basis"].update(dtype="\x1b[2J", shape="\x1b[2J"),
        NOTHING[1],
    ),
    "fields that steer a terminal": (
        NOTHING[0],
        lambda file: replaced("basis", data=np.zeros((3, 20), [("\x1b[2J" * 999, "<f4")]))(file),
    ),
    "dataset that steers a terminal": (
        lambda spec: spec["datasets"].update({"values.\x1b[2J": spec["datasets"].pop("values.eigenvalues")}),
        lambda file: file.move("values.eigenvalues", "values.\x1b[2J"),
    ),
    "another address": (in_key(step=41), NOTHING[1]),
    "record of no dictionary": (lambda spec: spec.update(record=[]), NOTHING[1]),
    "nested record": (lambda spec: spec.update(record={"x": {}}), NOTHING[1]),
    "no datasets": (lambda spec: spec.update(datasets=None), NOTHING[1]),
    "artifact": (lambda spec: spec.update(format="mmfact-artifact"), NOTHING[1]),
    "version 0": (lambda spec: spec.update(schema_version=0), NOTHING[1]),
    "version true": (lambda spec: spec.update(schema_version=True), NOTHING[1]),
}


@pytest.mark.parametrize("what", SUSPECT)
def test_suspect_files_are_refused(tmp_path, what):
    """Whoever made them, with digests that fit: `ArtifactCorrupt`, and no memory for what a file claims to hold."""
    edit_spec, edit_file = SUSPECT[what]
    path = forge(tmp_path, edit_spec, edit_file)
    tracemalloc.start()
    try:
        with pytest.raises(ArtifactCorrupt, match="cannot be trusted") as caught:
            read_projector(path)
        assert str(caught.value).isprintable()  # and so steers no terminal
        assert len(str(caught.value)) < len(str(path)) + 400
        assert tracemalloc.get_traced_memory()[1] < 5e6
    finally:
        tracemalloc.stop()


def test_error_of_the_library_steers_no_terminal(cache, monkeypatch):
    """HDF5 and NumPy may quote a file in what they raise."""
    path = put(cache, key())

    def fail(*arguments, **options):
        raise OSError("\x1b[2J" * 999)

    monkeypatch.setattr(h5py, "File", fail)
    with pytest.raises(ArtifactCorrupt, match=r"\(OSError\('\\x1b\[2J") as caught:
        read_projector(path)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < len(str(path)) + 400


@pytest.mark.parametrize("edit", [in_key(more=1), lambda spec: spec["key"].pop("m")], ids=["more", "less"])
def test_key_with_other_fields(tmp_path, edit):
    with pytest.raises(ArtifactCorrupt, match="its key has other fields than a projector's"):
        read_projector(forge(tmp_path, edit))


def test_sizes_beyond_the_file(tmp_path):
    """HDF5's own tables patched to claim 12 TB, and the spec to agree: refused, here or by a newer HDF5."""
    many = 1 << 40

    def claim(spec):
        spec["key"]["p"] = many
        spec["datasets"]["basis"]["shape"] = [3, many]

    path = forge(tmp_path, claim)
    data = path.read_bytes()
    for old, new in (((3, 20), (3, many)), ((3 * 20 * 4,), (3 * many * 4,))):
        packed = [np.array(numbers, "<u8").tobytes() for numbers in (old, new)]
        assert 1 <= data.count(packed[0]) <= 2  # a dataset's size is there twice: as it is, and as it may become
        data = data.replace(*packed)
    path.write_bytes(data)
    path = path.rename(path.with_name(f"{key().address}_{hashlib.sha256(data).hexdigest()}.h5"))
    with pytest.raises(ArtifactCorrupt, match=r"takes 13194139533312 bytes|invalid dataset size"):
        read_projector(path)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"null",
        b"[" * 100_000,
        b'{"format": "mmfact-projector", "schema_version": 1}',
        b'{"format": "mmfact-projector", "schema_version": 1, "record": NaN}',
        "\N{SNOWMAN}".encode("utf-16"),
    ],
    ids=lambda text: str(text[:20]),
)
def test_specs_that_are_none(tmp_path, text):
    with pytest.raises(ArtifactCorrupt):
        read_projector(forge(tmp_path, text=text or b" "))


def test_infinity_in_the_record(tmp_path):
    """JSON readers make an infinity of 1e999, which JSON writers then refuse."""
    path = forge(tmp_path)
    with h5py.File(path) as file:
        text = file["spec"][...].tobytes()
    changed = text.replace(b'"step": 40}', b'"step": 1e999}')
    assert changed != text
    with pytest.raises(ArtifactCorrupt, match="record"):
        read_projector(forge(tmp_path, text=changed))


def test_user_block(tmp_path):
    with pytest.raises(ArtifactCorrupt, match="user block"):
        read_projector(forge(tmp_path, userblock_size=512))


def test_honest_forgery_is_read(tmp_path):
    """So that the refusals above are not for the forger's way of writing."""
    assert read_projector(forge(tmp_path)).basis.tobytes() == vectors(key()).tobytes()


def test_newer_version(tmp_path, cache):
    """Not damage: the way out is an upgrade. The listing names it too."""
    cache.path.mkdir()
    path = forge(tmp_path, lambda spec: spec.update(schema_version=2))
    path.rename(cache.path / path.name)
    with pytest.raises(ArtifactVersionError, match="Upgrade"):
        cache.get(key())
    assert "Upgrade" in next(cache.entries()).error


def test_entries_are_sorted_and_damage_is_shown(cache):
    paths = {step: put(cache, key(step=step)) for step in (10, 9, 100)}
    paths[3] = put(cache, key(scope="tag-" + "0" * 32, step=3))
    damage(paths[10])
    found = list(cache.entries())
    assert [(entry.scope, entry.step, entry.path) for entry in found] == [
        (RUN, 9, paths[9]),
        (RUN, 10, paths[10]),
        (RUN, 100, paths[100]),
        ("tag-" + "0" * 32, 3, paths[3]),
    ]
    assert ["its name says" in (entry.error or "") for entry in found] == [False, True, False, False]
    assert [entry.projector is None for entry in found] == [False, True, False, False]
    assert found[0].projector.record == {"step": 9}
    assert not hasattr(found[0].projector, "basis")
    assert found[0].size == paths[9].stat().st_size


# --- failures of the machine -----------------------------------------------------------------------


def test_leftovers_of_writers_that_died_are_removed(cache):
    put(cache, key())
    mine, other = (f"{publish.TEMPORARY_PREFIX}{name}" for name in ("projector-abc", "12345678"))
    (cache.path / mine).write_bytes(bytes(10_000))
    (cache.path / f"{mine}-folder").mkdir()
    (cache.path / other).write_bytes(b"an artifact in the writing")
    assert cache.get(key()) is not None
    assert len(list(cache.entries())) == 1
    put(cache, key(step=41))
    left = sorted(name for name in os.listdir(cache.path) if name.startswith(publish.TEMPORARY_PREFIX))
    assert left == [other, f"{mine}-folder"]


def test_a_killed_writer_leaves_what_the_next_one_removes(cache, monkeypatch):
    """The name it is written under is one of those."""
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", lambda path: seen.append(Path(path)))  # that of its temporary file
        put(cache, key())
    (left,) = seen
    assert left.exists()
    put(cache, key(step=41))
    assert not left.exists()


STAGES = [(call, number) for call in ("mkstemp", "fdopen", "fchmod", "fsync", "link") for number in (1,)] + [
    ("fsync", 2)
]


@pytest.mark.parametrize(("call", "number"), STAGES, ids=str)
@pytest.mark.parametrize(
    "failure",
    [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EACCES, "Permission denied"), KeyboardInterrupt()],
    ids=["ENOSPC", "EACCES", "Ctrl-C"],
)
def test_failure_at_each_stage_leaves_what_was(cache, monkeypatch, call, number, failure):
    """Nothing partial; the old ones are whole, and the lock is free again."""
    put(cache, key(step=1))
    put(cache, key())
    before = entries_in(cache.path)
    module = tempfile if call == "mkstemp" else os
    real, calls = getattr(module, call), []

    def fail(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            raise failure
        return real(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, call, fail)
        with pytest.raises(KeyboardInterrupt if isinstance(failure, KeyboardInterrupt) else StoreError):
            put(cache, key(k=4))
    assert len(calls) >= number
    if isinstance(failure, KeyboardInterrupt) and (call, number) == ("fsync", 2):  # the new one has its name by then
        assert {*before} < {*entries_in(cache.path)}
    else:
        assert entries_in(cache.path) == before
    assert cache.get(key()).basis.tobytes() == vectors(key()).tobytes()
    put(cache, key(k=4))
    assert cache.get(key(k=4)) is not None
    assert len(entries_in(cache.path)) == 2


@pytest.mark.parametrize("known", [True, False], ids=["free space is known", "free space lies"])
def test_full_disk(small_disk, monkeypatch, known):
    """ENOSPC of a real file system, before writing or in the middle of the vectors; then space, and it works."""
    cache = ProjectorCache(small_disk / "cache")
    put(cache, key())
    if not known:
        monkeypatch.setattr(
            publish.shutil, "disk_usage", lambda path: publish.shutil._ntuple_diskusage(1 << 40, 0, 1 << 40)
        )
    large = key(step=1, k=20, p=1000)
    filler = small_disk / "filler"
    filler.write_bytes(bytes(80_000))
    with pytest.raises(StoreError, match=r"space|free"):
        put(cache, large)
    assert len(entries_in(cache.path)) == 1
    assert cache.get(key()) is not None
    filler.unlink()
    put(cache, large)
    assert cache.get(large).basis.tobytes() == vectors(large).tobytes()


def test_read_only_file_system(small_disk):
    """Reading goes on, without a trace of the use; writing says why not."""
    cache = ProjectorCache(small_disk / "cache")
    path = put(cache, key())
    used = path.stat().st_mtime_ns
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        assert cache.get(key()).basis.tobytes() == vectors(key()).tobytes()
        assert [entry.error for entry in cache.entries()] == [None]
        assert cache.use(key())
        assert path.stat().st_mtime_ns == used
        with pytest.raises(StoreError, match="Read-only"):
            put(cache, key(step=1))
        with pytest.raises(StoreError, match="Read-only"):
            put(ProjectorCache(small_disk / "new"), key())
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_unreadable_is_no_damage(cache, monkeypatch):
    put(cache, key())

    def fail(*arguments, **options):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "open", fail)
    for ask in (cache.get, cache.use):
        with pytest.raises(StoreError, match="Input/output error"):
            ask(key())
    assert "Input/output error" in next(cache.entries()).error
    monkeypatch.setattr(os, "scandir", fail)
    with pytest.raises(StoreError, match="Input/output error"):
        cache.get(key())


# --- several at a time -----------------------------------------------------------------------------


def test_evicted_between_listing_and_opening(cache, monkeypatch):
    """Not there any more, which is no error."""
    put(cache, key())
    listed = cache._files()
    (path,) = [file.path for file in listed]
    path.unlink()
    monkeypatch.setattr(ProjectorCache, "_files", lambda self: listed)
    assert cache.get(key()) is None
    assert list(cache.entries()) == []


def test_evicted_while_it_is_read(cache, monkeypatch):
    """An open file stays readable: what has been opened is what is read, whatever becomes of its name."""
    path = put(cache, key())
    real = hashlib.file_digest

    def slow(file, kind):
        path.unlink()
        path.write_bytes(b"another file under that name")
        return real(file, kind)

    monkeypatch.setattr(hashlib, "file_digest", slow)
    assert cache.get(key()).basis.tobytes() == vectors(key()).tobytes()


HOLDER = """
import sys, time
from mmfact.store.projectors import ProjectorCache
cache = ProjectorCache(sys.argv[1])
cache.path.mkdir()
with cache._writing():
    print("held", flush=True)
    time.sleep(60)
"""


def test_lock(cache, python, monkeypatch):
    """A second writer waits, gives up after a while and says why; readers do not wait; death gives the lock back."""
    holder = python(HOLDER, cache.path)
    assert holder.stdout.readline() == "held\n"
    assert cache.get(key()) is None
    with monkeypatch.context() as patch:
        patch.setattr(projectors, "_PATIENCE", 0.05)
        with pytest.raises(StoreError, match="another process"):
            put(cache, key())
    begun = time.monotonic()
    with pytest.raises(StoreError, match="another process"):  # who has given up once does not wait again
        put(cache, key())
    assert time.monotonic() - begun < 10
    threading.Timer(0.2, holder.kill).start()
    begun = time.monotonic()
    put(ProjectorCache(cache.path), key())
    assert time.monotonic() - begun > 0.1
    assert cache._gave_up
    put(cache, key())
    assert not cache._gave_up  # it has had the lock since, and would wait again
    holder.communicate()
    assert cache.get(key()) is not None


def test_threads(cache):
    """Writers in one process exclude each other as well."""
    cache = ProjectorCache(cache.path, max_bytes=4 * size_of(key()) + 100)
    problems = []

    def work(number: int) -> None:
        try:
            for turn in range(15):
                put(cache, key(step=(number + turn) % 8))
                found = cache.get(key(step=turn % 8))
                assert found is None or found.basis.tobytes() == vectors(key()).tobytes()
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert len(list(cache.entries())) == 4


@pytest.mark.slow
def test_killed_writers(tmp_path):
    """60 times two writers at once, both ended by SIGKILL, with two readers beside them.

    The readers compare all that they get with what the key stands for; what is left behind is within the bound after
    every kill, and the next put clears it up.
    """
    sys.path.insert(0, str(HELPER.parent))
    try:
        from projector_processes import BOUND
    finally:
        sys.path.pop(0)
    done = subprocess.run(
        [sys.executable, str(HELPER), str(tmp_path / "cache"), "31", "60"], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert report["errors"] == []
    assert report["largest"] <= BOUND
    assert report["held"] <= BOUND
    assert report["cut"] > 10  # so many were in the middle of a file
    assert report["entries"] >= 2
    assert sum(name.endswith(".h5") for name in report["names"]) == len(report["names"]) - 1 == report["entries"]
    for reader in report["readers"]:
        assert min(reader.values()) > 0, reader
