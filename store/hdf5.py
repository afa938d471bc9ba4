"""The part of HDF5 that artifacts use, read in Python.

The HDF5 library believes what a file says about its own structures: given a B-tree that contains itself, 1.14 and
2.0 overflow the stack and end the process. So it writes artifacts and never reads one. What is read here has a fixed
depth and a known form (HDF5 File Format Specification, version 3.0; the sections are in parentheses): superblock
version 0 (II.A), one group in a symbol table (III.A-D), object headers of version 1 (IV.A.1), chunks in a B-tree of
version 1 (III.A.1), packed by shuffle, gzip and fletcher32. Anything else is refused before a value is read.
"""

from __future__ import annotations

import itertools
import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfact.store.schema import shown

_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_SHUFFLE, _GZIP, _FLETCHER = 2, 1, 3
_CHECKSUM = 4  # bytes that fletcher32 puts behind a chunk
_MOST_OBJECTS = 64  # an artifact has 7 datasets at most
_MOST_MESSAGES = 32  # of a header; artifacts have 6
_LONGEST_NAME = 64
_DEEPEST = 3  # levels of a B-tree: one of two has room for 4,096 chunks

# Datatype messages (IV.A.2.d): class and version, bits, size, and for floats where sign, exponent and mantissa stand.
_TYPES = {
    bytes.fromhex("1000000001000000 00000800"): "|u1",
    bytes.fromhex("11201f0004000000 00002000170800177f000000"): "<f4",
    bytes.fromhex("11203f0008000000 00004000340b0034ff030000"): "<f8",
}
_CLASSES = (
    *("integers", "floats", "times", "text", "bits", "opaque bytes", "compounds", "references", "an enumeration"),
    *("variable lengths", "arrays"),
)

# Header messages (IV.A.2): those of a dataset or group, and names of some that tell what was tried.
_NOTHING, _SPACE, _TYPE, _FILL, _LAYOUT, _FILTERS, _CONTINUATION, _SYMBOLS = 0x0, 0x1, 0x3, 0x5, 0x8, 0xB, 0x10, 0x11
_CONSTANT = 1  # the flag of a message that never changes
_LINK = 2  # the kind of a symbol that is a soft link (III.C)
_FOREIGN = {
    0x2: "links in a newer form",
    0x4: "a fill value of its own",
    0x6: "a link in a newer form",
    0x7: "values in other files",
    0xA: "a group in a newer form",
    0xC: "attributes",
    0xE: "a time",
    0x11: "a group",
    0x12: "a time",
    0x15: "attributes",
}


class LayoutError(ValueError):
    """Bytes that are not laid out as artifacts are; the message says where and how."""


@dataclass(frozen=True)
class Dataset:
    """Where a dataset's values stand, and how; nothing of them has been read."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: tuple[int, ...]
    index: int  # address of the B-tree

    @property
    def count(self) -> int:
        """How many chunks it takes."""
        return math.prod(-(-size // chunk) for size, chunk in zip(self.shape, self.chunks, strict=True))


@dataclass(frozen=True)
class _Chunk:
    place: tuple[int, ...]
    address: int
    size: int
    mask: int


def datasets(data: bytes, hallmark: str) -> dict[str, Dataset]:
    """All datasets of a file; it holds nothing else, and the one that is named `hallmark`.

    Raises
    ------
    LayoutError
        It is no HDF5 file, or one of another form than artifacts have.
    """
    if not data.startswith(_SIGNATURE):
        if any(data.startswith(_SIGNATURE, 512 << i) for i in range(24)):
            raise LayoutError("it has a user block, which no artifact has")
        raise LayoutError("it is not an HDF5 file")
    versions, base, end = _unpack(data, 8, "8s"), _unpack(data, 24, "Q"), _unpack(data, 40, "Q")
    if versions[0][:1] != b"\0":
        raise LayoutError(f"its HDF5 superblock has version {versions[0][0]}; artifacts have 0")
    if versions[0] != bytes.fromhex("0000000000080800") or base != (0,):
        raise LayoutError("its HDF5 superblock has another form than artifacts have")
    if end != (len(data),):
        raise LayoutError(f"it should have {end[0]} bytes by its HDF5 superblock but has {len(data)}")
    (root,) = _unpack(data, 64, "Q")
    messages = _messages(data, root, "its root group", {_SYMBOLS})
    tree, heap = _unpack(messages.get(_SYMBOLS, b""), 0, "QQ")
    headers: dict[str, int] = {}
    for name, header, cached in _symbols(data, tree, heap):
        if cached == _LINK:
            raise LayoutError(f"{shown(name)} is a link to somewhere else")
        if name in headers:
            raise LayoutError(f"{shown(name)} is there twice")
        headers[name] = header
    if hallmark not in headers:
        raise LayoutError(f"it is an HDF5 file but holds no {hallmark}; mmfact did not write it")
    return {name: _dataset(data, name, header) for name, header in headers.items()}


def read(data: bytes, dataset: Dataset) -> npt.NDArray[Any]:
    """The values of a dataset of `datasets`, whose shape and chunks the caller has accepted.

    Raises
    ------
    LayoutError
        A chunk is missing, damaged, or not packed as artifacts have it.
    """
    name, dtype = shown(dataset.name), np.dtype(dataset.dtype)
    length = math.prod(dataset.chunks) * dtype.itemsize
    found = list(_chunks(data, dataset))
    needed = set(itertools.product(*(range(0, s, c) for s, c in zip(dataset.shape, dataset.chunks, strict=True))))
    if len(found) != len(needed) or {chunk.place for chunk in found} != needed:
        raise LayoutError(f"{name} lacks some of its {len(needed)} chunks, or has others")
    found.sort(key=lambda chunk: chunk.address)
    if any(chunk.address + chunk.size > after.address for chunk, after in itertools.pairwise(found)):
        raise LayoutError(f"{name} has chunks that overlap")
    array = np.empty(dataset.shape, dtype)
    for chunk in found:
        values = np.frombuffer(_unpacked(data, chunk, length, name), np.uint8).reshape(dtype.itemsize, -1).T
        block = np.ascontiguousarray(values).view(dtype).reshape(dataset.chunks)
        part = array[tuple(slice(at, at + size) for at, size in zip(chunk.place, dataset.chunks, strict=True))]
        part[...] = block[tuple(slice(size) for size in part.shape)]
    return array


def _unpack(data: bytes, address: int, form: str) -> tuple[Any, ...]:
    try:
        return struct.unpack_from(f"<{form}", data, address)
    except (struct.error, OverflowError) as error:
        raise LayoutError(f"its HDF5 structures point past its end, to byte {address}") from error


def _block(data: bytes, address: int, signature: bytes) -> None:
    if not data.startswith(signature, address):
        raise LayoutError(f"its HDF5 structures are broken: no {signature.decode()} at byte {address}")


def _symbols(data: bytes, tree: int, heap: int) -> Iterator[tuple[str, int, int]]:
    """(name, address of the object's header, kind of what is cached) of every object in the group."""
    _block(data, heap, b"HEAP")
    size, _, names = _unpack(data, heap + 8, "QQQ")
    _block(data, tree, b"TREE")
    kind, level, nodes = _unpack(data, tree + 4, "BBH")
    if (kind, level) != (0, 0) or nodes > _MOST_OBJECTS:
        raise LayoutError("it holds more objects than an artifact does")
    seen = 0
    for node in range(nodes):
        (leaf,) = _unpack(data, tree + 32 + 16 * node, "Q")
        _block(data, leaf, b"SNOD")
        _, symbols = _unpack(data, leaf + 4, "HH")
        seen += symbols
        if seen > _MOST_OBJECTS:
            raise LayoutError("it holds more objects than an artifact does")
        for symbol in range(symbols):
            offset, header, cached = _unpack(data, leaf + 8 + 40 * symbol, "QQI")
            if offset >= size:
                raise LayoutError("its HDF5 structures are broken: a name lies outside their heap")
            text = data[names + offset : names + min(size, offset + _LONGEST_NAME)]
            yield text.partition(b"\0")[0].decode("ascii", "backslashreplace"), header, cached


def _messages(data: bytes, address: int, name: str, known: set[int]) -> dict[int, bytes]:
    """The messages of an object header, by type; one of another type than those known is refused."""
    version, _, count, _, size = _unpack(data, address, "BBHII")
    if version != 1:
        raise LayoutError(f"{name} has an HDF5 object header of version {version}; artifacts have 1")
    if count > _MOST_MESSAGES:  # they may be listed in a circle
        raise LayoutError(f"{name} has {count} HDF5 header messages; artifacts have 6")
    found: dict[int, bytes] = {}
    place, end = address + 16, address + 16 + size
    blocks: list[tuple[int, int]] = []
    for _ in range(count):
        if place + 8 > end and blocks:
            place, end = blocks.pop(0)
        if place + 8 > min(end, len(data)):
            raise LayoutError(f"{name} has a broken HDF5 object header")
        kind, length, flags = _unpack(data, place, "HHB")
        message = data[place + 8 : min(place + 8 + length, end)]
        place += 8 + length
        if kind == _CONTINUATION:
            start, more = _unpack(message, 0, "QQ")
            blocks.append((start, start + more))
        elif kind in known and kind not in found and flags in (0, _CONSTANT):
            found[kind] = message
        elif kind != _NOTHING:
            what = "a message twice or shared with others" if kind in known else _FOREIGN.get(kind, "what is not known")
            raise LayoutError(
                f"{name} holds {what} (HDF5 header message {kind}); an artifact holds plain datasets only"
            )
    return found


def _dataset(data: bytes, name: str, header: int) -> Dataset:
    quoted = shown(name)
    messages = _messages(data, header, quoted, {_SPACE, _TYPE, _FILL, _LAYOUT, _FILTERS})
    if not {_SPACE, _TYPE, _LAYOUT} <= set(messages):
        raise LayoutError(f"{quoted} is not a plain dataset")
    version, kind, dimensions, index = _unpack(messages[_LAYOUT].ljust(11, b"\0"), 0, "BBBQ")
    if version != 3 or kind != 2:
        kept = {0: "in the header", 1: "in one piece", 2: "in chunks of another form", 3: "in other datasets"}
        raise LayoutError(
            f"{quoted} keeps its values {kept.get(kind, 'in an unknown form')} (HDF5 layout {version}, {kind}); "
            "artifacts have them in chunks"
        )
    dtype = _TYPES.get(messages[_TYPE][:20]) or _TYPES.get(messages[_TYPE][:12])
    if dtype is None:
        number = messages[_TYPE][:1].ljust(1, b"\0")[0] & 15
        what = _CLASSES[number] if number < len(_CLASSES) else "values"
        raise LayoutError(
            f"{quoted} has {what} of HDF5 type {messages[_TYPE][:20].hex()}; artifacts have little-endian f4 and f8"
        )
    version, rank, flags = _unpack(messages[_SPACE], 0, "BBB")
    if version != 1 or rank not in (1, 2) or flags not in (0, 1):
        raise LayoutError(f"{quoted} has a shape of {rank} dimensions; artifacts have 1 or 2")
    shape = _unpack(messages[_SPACE], 8, f"{rank}Q")
    if flags and _unpack(messages[_SPACE], 8 + 8 * rank, f"{rank}Q") != shape:
        raise LayoutError(f"{quoted} may grow, which no dataset of an artifact does")
    if dimensions != rank + 1:
        raise LayoutError(f"{quoted} has chunks of {dimensions - 1} dimensions in a shape of {rank}")
    *chunks, itemsize = _unpack(messages[_LAYOUT], 11, f"{dimensions}I")
    if itemsize != np.dtype(dtype).itemsize or 0 in chunks:
        raise LayoutError(f"{quoted} has chunks of {shown(chunks)} elements of {itemsize} bytes")
    filters = list(_filters(messages.get(_FILTERS, b"\1\0")))
    if filters != [_SHUFFLE, _GZIP, _FLETCHER]:
        raise LayoutError(
            f"{quoted} has the HDF5 filters {shown(filters)}; artifacts have "
            f"{[_SHUFFLE, _GZIP, _FLETCHER]}: shuffle, gzip, fletcher32"
        )
    return Dataset(name, shape, dtype, tuple(chunks), index)


def _filters(message: bytes) -> Iterator[int]:
    """Their numbers (IV.A.2.l)."""
    version, count = _unpack(message, 0, "BB")
    if version != 1:
        raise LayoutError(f"its HDF5 filters are described in version {version}; artifacts have 1")
    place = 8
    for _ in range(count):
        number, name, _, parameters = _unpack(message, place, "HHHH")
        yield number
        place += 8 + -(-name // 8) * 8 + 4 * (parameters + parameters % 2)


def _chunks(data: bytes, dataset: Dataset) -> Iterator[_Chunk]:
    """The chunks that the B-tree lists; of more than there should be, one too many."""
    rank, left = len(dataset.shape), dataset.count
    step = 8 + 8 * (rank + 1) + 8  # a key and a child
    nodes = [(dataset.index, _DEEPEST)]
    room = left + _DEEPEST  # no node of a tree is without children
    while nodes:
        address, highest = nodes.pop()
        room -= 1
        if room < 0:
            raise LayoutError(f"{shown(dataset.name)} has a chunk index of more nodes than chunks")
        if address == 2**64 - 1:  # no chunk was ever written
            return
        _block(data, address, b"TREE")
        kind, level, entries = _unpack(data, address + 4, "BBH")
        if kind != 1 or level > highest:
            raise LayoutError(f"{shown(dataset.name)} has a chunk index that does not get lower on its way down")
        for entry in range(entries):
            size, mask, *place, _, child = _unpack(data, address + 24 + step * entry, f"II{rank}QQQ")
            if level:
                nodes.append((child, level - 1))
            elif left < 0:
                return
            else:
                left -= 1
                yield _Chunk(tuple(place), child, size, mask)


def _unpacked(data: bytes, chunk: _Chunk, length: int, name: str) -> bytes:
    if chunk.mask:
        raise LayoutError(f"{name} has a chunk that skips filters (mask {chunk.mask})")
    packed = data[chunk.address : chunk.address + chunk.size]
    if len(packed) != chunk.size or chunk.size <= _CHECKSUM:
        raise LayoutError(f"{name} has a chunk of {chunk.size} bytes at byte {chunk.address}, where the file has none")
    if chunk.size > length + length // 100 + 1024:
        raise LayoutError(f"{name} has a chunk of {chunk.size} bytes, packed; {length} unpacked are expected")
    packed, checksum = packed[:-_CHECKSUM], _unpack(packed, chunk.size - _CHECKSUM, "I")[0]
    if _fletcher32(packed) != checksum:
        raise LayoutError(f"{name} has a damaged chunk: its fletcher32 checksum is another")
    try:
        values = zlib.decompressobj().decompress(packed, length + 1)
    except zlib.error as error:
        raise LayoutError(f"{name} has a chunk that is not packed by gzip ({error})") from error
    if len(values) != length:
        raise LayoutError(f"{name} has a chunk that unpacks to another size than {length} bytes")
    return values


def _fletcher32(packed: bytes) -> int:
    """HDF5's checksum: sums modulo 65535 of big-endian 16-bit words and of their running sums, 0 only for zeros."""
    words = np.frombuffer(packed + bytes(len(packed) % 2), ">u2").astype(np.int64)
    first, second = int(words.sum()), int(words @ np.arange(len(words), 0, -1))
    low, high = (total and (total - 1) % 65535 + 1 for total in (first, second))
    return high << 16 | low
