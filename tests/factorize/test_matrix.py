"""Custom matrices from files: what is read is what was saved, and every other file is refused in one line."""

import io
import re
import tracemalloc
import zipfile

import numpy as np
import pytest

from mmfact.factorize.errors import CapacityError, WorkloadError
from mmfact.factorize.matrix import read_matrix
from mmfact.factorize.workload import custom


def _header(shape):
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": "<f8", "fortran_order": False, "shape": shape})
    return buffer.getvalue()


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int64, ">f8"])
@pytest.mark.parametrize("suffix", ["npy", "npz", "csv"])
def test_round_trip(tmp_path, random_triangle, suffix, dtype):
    """The numbers come back exactly, in all three formats, whatever the dtype and memory order."""
    A = np.asfortranarray((8 * random_triangle(0, 6)).astype(dtype))
    path = tmp_path / f"A.{suffix}"
    if suffix == "npy":
        np.save(path, A)
    elif suffix == "npz":
        np.savez_compressed(path, A=A)
    else:
        np.savetxt(path, A, delimiter=",", fmt="%.17g")
    np.testing.assert_array_equal(read_matrix(path), A)
    np.testing.assert_array_equal(custom(read_matrix(path)).dense(), A)


def test_one_step_csv(tmp_path):
    """A single number is a 1 x 1 matrix, not a scalar; a single row is not a column."""
    path = tmp_path / "A.csv"
    path.write_text("2.5\n", encoding="utf-8")
    assert read_matrix(path).shape == (1, 1)
    path.write_text("1,0\n", encoding="utf-8")
    assert read_matrix(path).shape == (1, 2)


def _bad_files():
    """Name -> content of files that hold no matrix."""
    whole, two, named = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(whole, np.tri(4))
    np.savez(two, A=np.tri(4), B=np.tri(4))
    np.savez_compressed(named, A=np.random.default_rng(0).normal(size=(40, 40)))
    objects, text = io.BytesIO(), io.BytesIO()
    np.save(objects, np.array([{}], dtype=object))
    with zipfile.ZipFile(text, "w") as archive:
        archive.writestr("A.txt", b"1")
    return {
        "empty.npy": b"",
        "empty.npz": b"",
        "garbage.npy": b"1,0\n1,1\n",
        "garbage.npz": b"PK\x03\x04 and nothing more",
        "cut.npy": whole.getvalue()[:-8],
        "cut.npz": named.getvalue()[:-100],
        "objects.npy": objects.getvalue(),
        "two.npz": two.getvalue(),
        "text.npz": text.getvalue(),
        "really-npz.npy": two.getvalue(),
        "really-npy.npz": whole.getvalue(),
        "words.csv": b"a,b\nc,d\n",
        "header.csv": b"x,y\n1,0\n1,1\n",
        "ragged.csv": b"1\n1,1\n",
        "binary.csv": b"\xff\xfe\x00",
        "matrix.txt": b"1\n",
        "matrix": b"1\n",
    }


@pytest.mark.parametrize("name", list(_bad_files()))
def test_files_that_hold_no_matrix(tmp_path, name):
    """Cut short, mislabelled, pickled, several arrays, words: a WorkloadError with the path in it."""
    path = tmp_path / name
    path.write_bytes(_bad_files()[name])
    with pytest.raises(WorkloadError, match=re.escape(str(path))):
        read_matrix(path)


@pytest.mark.filterwarnings("error")
def test_empty_csv(tmp_path):
    """No line at all: refused here or by the workload, without a warning from NumPy."""
    path = tmp_path / "A.csv"
    path.write_text("", encoding="utf-8")
    with pytest.raises(WorkloadError):
        custom(read_matrix(path))


def test_damaged_archives(tmp_path):
    """One byte flipped anywhere in an archive: read as it was, or refused; no other error and no other matrix."""
    A = np.random.default_rng(0).normal(size=(12, 12))
    whole = io.BytesIO()
    np.savez_compressed(whole, A=A)
    path = tmp_path / "A.npz"
    for position in range(0, len(whole.getvalue()), 7):
        damaged = bytearray(whole.getvalue())
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        try:
            found = read_matrix(path)
        except WorkloadError:
            continue
        np.testing.assert_array_equal(found, A)


@pytest.mark.parametrize("suffix", ["npy", "npz"])
@pytest.mark.parametrize("n", [20_000, 10**6])
def test_files_that_claim_too_much(tmp_path, suffix, n):
    """A header of a gigantic shape is refused before the memory for it is asked for."""
    path = tmp_path / f"A.{suffix}"
    if suffix == "npy":
        path.write_bytes(_header((n, n)) + bytes(64))
    else:
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("A.npy", _header((n, n)) + bytes(64))
    tracemalloc.start()
    try:
        with pytest.raises((WorkloadError, CapacityError)):
            read_matrix(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 26


def test_a_file_larger_than_any_matrix(tmp_path):
    """Refused by its size alone (a sparse file: nothing is written)."""
    path = tmp_path / "A.csv"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CapacityError, match="8192"):
        read_matrix(path)


def test_paths_that_are_no_files(tmp_path):
    """Missing, a directory, a name too long, a null character."""
    (tmp_path / "folder.npy").mkdir()
    for path in (tmp_path / "missing.npy", tmp_path / "folder.npy", tmp_path / ("a" * 5000 + ".npy")):
        with pytest.raises(WorkloadError):
            read_matrix(path)
    with pytest.raises(WorkloadError):
        read_matrix(tmp_path / "a\0.npy")
