"""The reader of HDF5 that shares no code with the HDF5 library: h5py writes, and finds the same."""

from __future__ import annotations

import io
from pathlib import Path

import h5py
import numpy as np
import pytest
from attacks import forgery
from attacks.forgery import HONEST, form
from hypothesis import given, settings
from hypothesis import strategies as st

from mmfact.store import hdf5

GOLDEN = sorted((Path(__file__).parents[2] / "artifacts" / "golden").glob("*.h5"))


def equal_to_h5py(data: bytes, hallmark: str = "spec") -> bool:
    with h5py.File(io.BytesIO(data)) as file:
        theirs = {name: file[name][...] for name in file}
    ours = {name: hdf5.read(data, found) for name, found in hdf5.datasets(data, hallmark).items()}
    return list(ours) == list(theirs) and all(
        ours[name].dtype == array.dtype and ours[name].shape == array.shape and ours[name].tobytes() == array.tobytes()
        for name, array in theirs.items()
    )


def written(array: np.ndarray, **options: object) -> bytes:
    """One dataset x, by h5py."""
    with h5py.File("x", "w", driver="core", backing_store=False) as file:
        file.create_dataset("x", data=array, **{**form(array.shape), **options})
        file.flush()
        return bytes(file.id.get_file_image())


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name[:8])
def test_golden_files_hold_what_h5py_finds(path):
    assert equal_to_h5py(path.read_bytes())


@pytest.mark.parametrize("name", HONEST)
def test_artifacts_hold_what_h5py_finds(name):
    assert equal_to_h5py(HONEST[name]().data)


@settings(max_examples=150)
@given(
    shape=st.one_of(st.tuples(st.integers(1, 300)), st.tuples(st.integers(1, 90), st.integers(1, 9))),
    dtype=st.sampled_from(["u1", "<f4", "<f8"]),
    rows=st.integers(1, 90),
    level=st.integers(0, 9),
    seed=st.integers(0, 2**32),
)
def test_any_shape_and_chunks(shape, dtype, rows, level, seed):
    """Last chunks that are not full, chunks of one element, bytes of every kind, zeros."""
    random = np.random.default_rng(seed)
    array = np.frombuffer(random.bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), dtype).reshape(shape)
    array = np.where(random.integers(0, 2, shape), array, np.zeros_like(array))
    chunks = (min(rows, shape[0]), *shape[1:])
    assert equal_to_h5py(written(array, chunks=chunks, compression_opts=level), "x")


@pytest.mark.parametrize(("n", "chunk"), [(64, 1), (65, 1), (4500, 1), (6000, 7)])
def test_an_index_of_several_levels(n, chunk):
    """64 chunks fit into one node, 4,096 into two levels."""
    assert equal_to_h5py(written(np.arange(float(n)), chunks=(chunk,)), "x")


def test_two_chunks_of_full_size():
    assert equal_to_h5py(written(np.random.default_rng(1).normal(size=(12_000, 6)).astype("<f4")), "x")


def test_an_h5py_of_another_default_is_told():
    """The newer forms of HDF5, which no artifact has, are refused by name."""
    with h5py.File("x", "w", driver="core", backing_store=False, libver="latest") as file:
        file["x"] = np.ones(3)
        file.flush()
        data = bytes(file.id.get_file_image())
    with pytest.raises(hdf5.LayoutError, match="superblock has version 3"):
        hdf5.datasets(data, "x")


def test_every_byte_of_a_chunk_is_under_its_checksum():
    """One bit of each byte of a packed chunk in turn; HDF5's own fletcher32 would notice them all."""
    data = forgery.dense().data
    with h5py.File(io.BytesIO(data)) as file:
        chunk = file["multipliers"].id.get_chunk_info(0)
    found = hdf5.datasets(data, "spec")["multipliers"]
    hdf5.read(data, found)
    for position in range(chunk.byte_offset, chunk.byte_offset + chunk.size):
        damaged = bytearray(data)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(hdf5.LayoutError, match="fletcher32"):
            hdf5.read(bytes(damaged), found)


def test_a_header_of_many_messages():
    """They may be listed in a circle: refused by their number, before the first one is followed."""
    data = bytearray(GOLDEN[0].read_bytes())
    header = int.from_bytes(data[64:72], "little")
    data[header + 2 : header + 4] = (65535).to_bytes(2, "little")
    with pytest.raises(hdf5.LayoutError, match="65535 HDF5 header messages"):
        hdf5.datasets(bytes(data), "spec")
