"""Attacks by chunks and sizes: bombs, holes, loops, and shapes that no memory could hold."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Callable
from typing import Any

import h5py
import numpy as np

from attacks.forgery import BUFFERS, Edit, buffered, custom, dense, form, packed
from attacks.generators import attack

Built = tuple[bytes, str | None]


def emptied(file: h5py.File, n: int, name: str = "multipliers", **options: Any) -> h5py.Dataset:
    """A dataset of n numbers of which no chunk is stored, in the form that artifacts have but for `options`."""
    del file[name]
    return file.create_dataset(name, shape=(n,), dtype="<f8", **{**form((n,)), **options})


def chunk(content: bytes, mask: int = 0) -> Callable[[h5py.File], None]:
    """An edit of the file: the only chunk of the multipliers holds these bytes, and skips the filters of the mask."""

    def edit(file: h5py.File) -> None:
        emptied(file, 3).id.write_direct_chunk((0,), content, mask)

    return edit


def shuffled(array: np.ndarray) -> bytes:
    return np.frombuffer(array.tobytes(), np.uint8).reshape(array.size, -1).T.tobytes()


def summed(content: bytes) -> bytes:
    """The content of a chunk with its fletcher32 behind it, as textbooks have it."""
    first = second = 0
    for high, low in zip(content[::2], content[1::2] + bytes(len(content) % 2), strict=True):
        first = (first + (high << 8 | low)) % 65535
        second = (second + first) % 65535
    return content + struct.pack("<HH", first, second)


def squeezed(size: int) -> bytes:
    """Zeros as a chunk holds them."""
    return summed(zlib.compress(bytes(size), 9))


def sized(n: int) -> dict[str, np.ndarray | None]:
    """Arrays for n steps that are cheap to keep."""
    nothing = np.zeros((n, BUFFERS))
    rows = dict.fromkeys(("learning_rates", "multipliers", "strategy.c"), np.ones(n))
    return {**rows, **dict.fromkeys(("strategy.g", "strategy.decay", "strategy.q"), nothing)}


def calling_for(n: int, buffers: int = BUFFERS) -> Edit:
    """An edit of the spec, its listed shapes too: a horizon and buffers that the file does not have."""

    def edit(spec: dict[str, Any]) -> None:
        spec["workload"]["n"] = spec["certificate"]["n"] = n
        spec["strategy"]["buffers"] = buffers
        for entry in spec["datasets"].values():
            entry["shape"] = [n] if len(entry["shape"]) == 1 else [n, buffers]

    return edit


# --- one chunk -----------------------------------------------------------------------------------------


@attack(r"'multipliers' has a chunk that skips filters \(mask 4\)")
def chunk_without_its_checksum() -> Built:
    """The dataset promises fletcher32, its chunk says that it was left out."""
    return dense().build(file=chunk(zlib.compress(shuffled(np.ones(3))), mask=4))


@attack(r"'multipliers' has a chunk that skips filters \(mask 7\)")
def chunk_without_any_filter() -> Built:
    return dense().build(file=chunk(np.ones(3).tobytes(), mask=7))


@attack("'multipliers' has a chunk that unpacks to another size than 24 bytes")
def chunk_that_unpacks_to_a_megabyte() -> Built:
    return dense().build(file=chunk(squeezed(1 << 20)))


@attack("'multipliers' has a chunk of 65[0-9]{3} bytes, packed; 24 unpacked are expected")
def chunk_that_unpacks_to_64_megabytes() -> Built:
    return dense().build(file=chunk(squeezed(64 << 20)))


@attack("'multipliers' has a chunk that unpacks to another size than 524288 bytes")
def full_chunk_that_unpacks_to_256_megabytes() -> Built:
    """No more bytes, packed, than an honest one may have."""
    n = 1 << 16

    def edit(file: h5py.File) -> None:
        emptied(file, n).id.write_direct_chunk((0,), squeezed(256 << 20))

    return buffered().build(calling_for(n), arrays=sized(n), file=edit)


@attack("'multipliers' has a chunk that unpacks to another size than 24 bytes")
def chunk_that_unpacks_to_a_byte_more() -> Built:
    return dense().build(file=chunk(squeezed(25)))


@attack("'multipliers' has a chunk that unpacks to another size than 24 bytes")
def chunk_that_unpacks_to_a_byte_less() -> Built:
    return dense().build(file=chunk(squeezed(23)))


@attack("'multipliers' has a chunk that unpacks to another size than 24 bytes")
def chunk_that_unpacks_to_nothing() -> Built:
    return dense().build(file=chunk(squeezed(0)))


@attack("'multipliers' has a chunk that is not packed by gzip")
def chunk_that_is_no_gzip() -> Built:
    return dense().build(file=chunk(summed(b"no gzip at all")))


@attack("'multipliers' has a damaged chunk: its fletcher32")
def chunk_with_a_wrong_checksum() -> Built:
    return dense().build(file=chunk(zlib.compress(shuffled(np.ones(3))) + b"\1\2\3\4"))


@attack("the values of 'multipliers' have changed")
def other_values_under_the_same_spec() -> Built:
    def edit(file: h5py.File) -> None:
        del file["multipliers"]
        packed(file, "multipliers", data=np.full(3, 1.5))

    return dense().build(file=edit)


@attack("'multipliers' lacks some of its 1 chunks")
def fill_value_for_a_missing_chunk() -> Built:
    """Numbers that no file holds: HDF5 makes them up from the fill value."""
    return dense().build(file=lambda file: emptied(file, 3))


@attack("'multipliers' holds a fill value of its own")
def fill_value() -> Built:
    return dense().build(file=lambda file: emptied(file, 3, fillvalue=1.0))


# --- several chunks ------------------------------------------------------------------------------------


def of_two_chunks() -> tuple[bytes, str, list[Any]]:
    """65,537 steps: (bytes, digest, the chunks of the multipliers)."""
    n = (1 << 16) + 1
    data, logical = buffered().build(calling_for(n), arrays=sized(n))
    found: list[Any] = []
    with h5py.File(io.BytesIO(data)) as file:
        file["multipliers"].id.chunk_iter(found.append)
    return data, logical, found


def index_entry(place: Any) -> bytes:
    """How the B-tree of a dataset's chunks has one: packed size, filter mask, place in elements and in a number's
    bytes, address (HDF5 file format, III.A.1)."""
    return struct.pack("<IIQQQ", place.size, place.filter_mask, place.chunk_offset[0], 0, place.byte_offset)


def patched(data: bytes, old: bytes, new: bytes) -> bytes:
    if data.count(old) != 1:
        raise ValueError(f"{data.count(old)} places for a patch")
    return data.replace(old, new)


@attack("'multipliers' has chunks that overlap")
def two_chunks_at_one_address() -> Built:
    data, logical, (first, second) = of_two_chunks()
    entry = index_entry(second)
    return patched(data, entry, entry[:24] + struct.pack("<Q", first.byte_offset)), logical


@attack("'multipliers' lacks some of its 2 chunks, or has others")
def one_chunk_twice() -> Built:
    """The count is right, and the other chunk's numbers would be fill values."""
    data, logical, (_, second) = of_two_chunks()
    entry = index_entry(second)
    return patched(data, entry, entry[:8] + bytes(8) + entry[16:]), logical


@attack("'multipliers' lacks some of its 2 chunks, or has others")
def one_chunk_more() -> Built:
    """A second place for the same numbers: which of the two is read?"""
    data, logical, (first, second) = of_two_chunks()
    node, entry = node_of(data, index_entry(first)), index_entry(second)
    at = data.index(entry) + len(entry)
    more = bytearray(data)
    more[node + 6 : node + 8] = b"\3\0"
    more[at : at + len(entry)] = entry[:24] + struct.pack("<Q", first.byte_offset)
    return bytes(more), logical


@attack("'multipliers' has a chunk of [0-9]+ bytes at byte 1099511627776, where the file has none")
def chunk_past_the_end_of_the_file() -> Built:
    data, logical, (_, second) = of_two_chunks()
    entry = index_entry(second)
    return patched(data, entry, entry[:24] + struct.pack("<Q", 1 << 40)), logical


def node_of(data: bytes, entry: bytes) -> int:
    """Where the B-tree node begins that holds an entry."""
    return data.rindex(b"TREE\1", 0, data.index(entry))


@attack("'multipliers' has a chunk index that does not get lower on its way down")
def index_that_contains_itself() -> Built:
    """The root of the chunks' B-tree, one level higher, has itself for a child: HDF5 2.0 overflows the stack."""
    data, logical, (first, _) = of_two_chunks()
    node = node_of(data, index_entry(first))
    entry = index_entry(first)
    looped = bytearray(patched(data, entry, entry[:24] + struct.pack("<Q", node)))
    looped[node + 5 : node + 8] = b"\1\1\0"  # level 1, one child
    return bytes(looped), logical


@attack("'multipliers' has a chunk index of more nodes than chunks")
def index_of_many_paths() -> Built:
    """A node whose 64 children are all one node, and so on: as many visits as paths, to a leaf without a chunk."""
    data, logical, (first, _) = of_two_chunks()
    start, size = len(data), 24 + 65 * 32
    nodes = bytearray()
    for level in (3, 2, 1, 0):
        child = start + size * (4 - level)
        nodes += struct.pack("<4sBBHQQ", b"TREE", 1, level, 64 if level else 0, 2**64 - 1, 2**64 - 1)
        nodes += 64 * struct.pack("<IIQQQ", 0, 0, 0, 0, child) + bytes(32)
    where = struct.pack("<QII", node_of(data, index_entry(first)), 1 << 16, 8)  # in the layout message, with the chunks
    grown = bytearray(patched(data, where, struct.pack("<QII", start, 1 << 16, 8)) + nodes)
    grown[40:48] = struct.pack("<Q", len(grown))
    return bytes(grown), logical


@attack("'multipliers' has a damaged chunk: its fletcher32")
def index_that_contains_itself_as_a_leaf() -> Built:
    """A chunk of which the index itself is the content."""
    data, logical, (first, _) = of_two_chunks()
    entry = index_entry(first)
    return patched(data, entry, entry[:24] + struct.pack("<Q", node_of(data, entry))), logical


@attack("it holds more objects than an artifact does")
def group_that_contains_itself() -> Built:
    """The root group's B-tree of names has itself for a child: HDF5 2.0 overflows the stack."""
    data, logical = dense().build()
    node = data.index(b"TREE\0")
    looped = bytearray(data)
    looped[node + 5] = 1
    looped[node + 32 : node + 40] = struct.pack("<Q", node)
    return bytes(looped), logical


# --- sizes ---------------------------------------------------------------------------------------------


@attack(r"'multipliers' has chunks of \(1,\)")
def a_chunk_for_every_number() -> Built:
    """16,384 chunks: HDF5 finds the k-th by walking over k of them."""
    n = 1 << 14

    def edit(file: h5py.File) -> None:
        emptied(file, n, chunks=(1,))[...] = 1.0

    return buffered().build(calling_for(n), arrays=sized(n), file=edit)


@attack(r"'learning_rates' has chunks of \(16777216,\)")
def a_chunk_of_128_megabytes() -> Built:
    n = 1 << 24
    return buffered().build(calling_for(n), file=lambda file: emptied(file, n, "learning_rates", chunks=(n,)))


@attack(r"'multipliers' has shape \(1099511627776,\)")
def eight_terabytes_in_the_file() -> Built:
    return dense().build(file=lambda file: emptied(file, 1 << 40))


@attack(r"its spec at '\$.datasets.multipliers.shape\[0\]' is 1099511627776, against the rule maximum")
def eight_terabytes_in_the_file_and_in_the_spec() -> Built:
    def edit(spec: dict[str, Any]) -> None:
        spec["datasets"]["multipliers"]["shape"] = [1 << 40]

    return dense().build(edit, file=lambda file: emptied(file, 1 << 40))


@attack("its buffers is 8388608; with 16777216 steps at most 8 is possible")
def a_petabyte_of_buffers() -> Built:
    return buffered().build(calling_for(1 << 24, buffers=1 << 23))


@attack("its horizon is 16777216; with its workload and strategy at most 8192")
def a_custom_matrix_of_a_petabyte() -> Built:
    n = 1 << 24

    def edit(spec: dict[str, Any]) -> None:
        spec["workload"]["n"] = spec["certificate"]["n"] = n
        spec["datasets"]["matrix"]["shape"] = [1 << 27]

    return custom().build(edit)


@attack(r"'learning_rates' has shape \(12,\) .*does not fit its spec: \[16777216\]")
def gigabytes_in_the_spec_only() -> Built:
    return buffered().build(calling_for(1 << 24, buffers=8))


@attack("'learning_rates' lacks some of its 256 chunks")
def gigabytes_of_which_no_chunk_is_stored() -> Built:
    """20 KiB that call for 3.4 GiB within all limits."""
    n, buffers = 1 << 24, 8

    def edit(file: h5py.File) -> None:
        for name in list(file):
            if name != "spec":
                shape = (n,) if file[name].ndim == 1 else (n, buffers)
                del file[name]
                file.create_dataset(name, shape=shape, dtype="<f8", **form(shape))

    return buffered().build(calling_for(n, buffers), file=edit)


@attack("its spec has shape")
def a_spec_of_more_than_a_megabyte() -> Built:
    return dense().build(text=lambda text: text + b" " * (1 << 20))


@attack("its spec has shape")
def a_spec_of_a_terabyte() -> Built:
    def edit(file: h5py.File) -> None:
        del file["spec"]
        file.create_dataset("spec", shape=(1 << 40,), dtype="u1", **form((1 << 40,)))

    return dense().build(file=edit)
