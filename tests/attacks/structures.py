"""Attacks by the structure of the HDF5 file: links, storage, types, shapes, filters, chunks and sizes."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import h5py
import numpy as np

from attacks.forgery import STEPS, buffered, dense, form, packed, replacing
from attacks.generators import attack

Built = tuple[bytes, str | None]


def without(file: h5py.File, name: str = "multipliers") -> h5py.File:
    del file[name]
    return file


# --- links and storage -----------------------------------------------------------------------------


@attack("'multipliers' is a link to somewhere else")
def soft_link() -> Built:
    """What it leads to could change after the check."""
    return buffered().build(
        file=lambda file: without(file).__setitem__("multipliers", h5py.SoftLink("/learning_rates"))
    )


@attack("'learning_rates' is a link to somewhere else")
def soft_link_to_nowhere() -> Built:
    return buffered().build(
        file=lambda file: without(file, "learning_rates").__setitem__("learning_rates", h5py.SoftLink("/nowhere"))
    )


@attack("its root group holds links in a newer form")
def external_link() -> Built:
    """What it leads to could be somebody's secret."""
    return buffered().build(
        file=lambda file: without(file, "strategy.c").__setitem__("strategy.c", h5py.ExternalLink("/etc/passwd", "/x"))
    )


@attack("its root group holds links in a newer form")
def spec_linked_from_another_file() -> Built:
    return buffered().build(
        file=lambda file: without(file, "spec").__setitem__("spec", h5py.ExternalLink("/tmp/other.h5", "/spec"))
    )


@attack("'multipliers' holds values in other files")
def external_storage() -> Built:
    """Numbers taken from any file that the reader may read."""
    return buffered().build(
        file=lambda file: without(file).create_dataset(
            "multipliers", shape=(STEPS,), dtype="<f8", external=[("/etc/passwd", 0, 8 * STEPS)], track_times=False
        )
    )


@attack("'multipliers' keeps its values in other datasets")
def virtual_dataset() -> Built:
    space = h5py.h5s.create_simple((STEPS,))
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_obj_track_times(False)
    properties.set_virtual(space, b"/tmp/other.h5", b"multipliers", space)
    return buffered().build(
        file=lambda file: h5py.h5d.create(
            without(file).id, b"multipliers", h5py.h5t.IEEE_F64LE, space, properties
        ).flush()
    )


@attack("'learning_rates' keeps its values in one piece")
def contiguous_dataset() -> Built:
    return buffered().build(file=replacing("learning_rates"))


@attack("'spec' keeps its values in the header")
def compact_spec() -> Built:
    """Kept in the object's header, where no filter and no checksum applies."""

    def edit(file: h5py.File) -> None:
        data = file["spec"][...]
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_layout(h5py.h5d.COMPACT)
        properties.set_obj_track_times(False)
        space = h5py.h5s.create_simple(data.shape)
        made = h5py.h5d.create(without(file, "spec").id, b"spec", h5py.h5t.STD_U8LE, space, properties)
        made.write(h5py.h5s.ALL, h5py.h5s.ALL, data)

    return buffered().build(file=edit)


@attack("it has a user block")
def user_block() -> Built:
    """Anything may stand before the HDF5 file in the file: another program would see another file."""
    data, logical = buffered().build()
    made = io.BytesIO()
    with h5py.File(made, "w", userblock_size=512) as file, h5py.File(io.BytesIO(data)) as source:
        for name in source:
            source.copy(name, file)
    return made.getvalue(), logical


@attack("it should have 12648 bytes by its HDF5 superblock but has 13648")
def something_behind_the_end() -> Built:
    """Room for another file in the file."""
    return dense().data + bytes(1000), dense().artifact.digest


# --- names and kinds of objects ----------------------------------------------------------------------


@attack(r"calls for: \['extra'\]")
def unknown_dataset() -> Built:
    return dense().build(file=lambda file: packed(file, "extra", data=np.ones(1)))


@attack("'nested' holds a group")
def unknown_group() -> Built:
    return dense().build(file=lambda file: file.create_group("nested"))


@attack("'dtype' holds (a time|a message twice or shared)")
def committed_datatype() -> Built:
    return dense().build(file=lambda file: file.__setitem__("dtype", np.dtype("<f8")))


@attack(r"calls for: \['\\x1b\[2J\\x07evil\\n'\]")
def name_that_steers_a_terminal() -> Built:
    return dense().build(file=lambda file: packed(file, "\x1b[2J\x07evil\n", data=np.ones(1)))


@attack("it holds more objects than an artifact does")
def fifty_thousand_names() -> Built:
    def edit(file: h5py.File) -> None:
        for i in range(50_000):
            file.id.links.create_soft(b"x%d" % i, b"y")

    return dense().build(file=edit)


@attack(r"calls for: \['multipliers'\]")
def missing_dataset() -> Built:
    return dense().build(file=without)


@attack("'multipliers' holds a group")
def group_for_a_dataset() -> Built:
    return dense().build(file=lambda file: without(file).create_group("multipliers"))


@attack("'learning_rates' holds (a time|a message twice or shared)")
def named_type_for_a_dataset() -> Built:
    return dense().build(
        file=lambda file: without(file, "learning_rates").__setitem__("learning_rates", np.dtype("<f8"))
    )


@attack("its root group holds attributes")
def attribute_of_the_file() -> Built:
    return dense().build(file=lambda file: file.attrs.__setitem__("note", "hello"))


@attack("'multipliers' holds attributes")
def attribute_of_a_dataset() -> Built:
    return dense().build(file=lambda file: file["multipliers"].attrs.__setitem__("note", "hello"))


@attack("holds no spec")
def no_spec() -> Built:
    return dense().build(file=lambda file: without(file, "spec"))


# --- types and shapes ----------------------------------------------------------------------------------


def typed(dtype: Any, name: str = "multipliers", data: Any = None) -> Built:
    """A dataset of another type under a spec that promises the usual one."""
    values = np.ones(3, dtype) if data is None else data
    return dense().build(file=replacing(name, data=values, dtype=dtype, **form((len(values),))))


@attack("'multipliers' has floats of HDF5 type 1121")
def big_endian() -> Built:
    return typed(">f8")


@attack("'multipliers' has variable lengths")
def variable_length_strings() -> Built:
    """Their values are pointers into another part of the file, which no checksum covers."""
    return dense().build(
        file=lambda file: without(file).create_dataset(
            "multipliers", data=["1", "2", "3"], dtype=h5py.string_dtype(), chunks=(3,), track_times=False
        )
    )


@attack("'learning_rates' has variable lengths")
def variable_length_arrays() -> Built:
    return dense().build(
        file=lambda file: without(file, "learning_rates").create_dataset(
            "learning_rates", shape=(3,), dtype=h5py.vlen_dtype(np.float64), chunks=(3,), track_times=False
        )
    )


@attack("'strategy.packed' has references")
def references() -> Built:
    return dense().build(
        file=lambda file: without(file, "strategy.packed").create_dataset(
            "strategy.packed", shape=(6,), dtype=h5py.ref_dtype, chunks=(6,), track_times=False
        )
    )


@attack("'multipliers' has compounds of HDF5 type 1602000010000000(66|30)")
def compound() -> Built:
    return typed("f8,f8")


@attack("'multipliers' has compounds of HDF5 type 160200001000000072")
def complex_numbers() -> Built:
    return typed(complex)


@attack("'multipliers' has floats of HDF5 type 1120")
def double_of_another_layout() -> Built:
    """NumPy would call it float64, too, but the bits of its exponent are biased otherwise."""

    def edit(file: h5py.File) -> None:
        odd = h5py.h5t.IEEE_F64LE.copy()
        odd.set_ebias(1022)
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((3,))
        properties.set_obj_track_times(False)
        h5py.h5d.create(without(file).id, b"multipliers", odd, h5py.h5s.create_simple((3,)), properties)

    return dense().build(file=edit)


@attack("'strategy.packed' holds a message twice or shared")
def committed_type_of_a_dataset() -> Built:
    """Kept in another object of the file."""

    def edit(file: h5py.File) -> None:
        kind = h5py.h5t.IEEE_F64LE.copy()
        kind.commit(file.id, b"kind", None)
        data = file["strategy.packed"][...]
        del file["strategy.packed"]
        file.create_dataset("strategy.packed", data=data, dtype=h5py.Datatype(kind), **form(data.shape))
        del file["kind"]

    return dense().build(file=edit)


@attack("its spec has shape")
def spec_of_two_dimensions() -> Built:
    def edit(file: h5py.File) -> None:
        data = file["spec"][...][:, None]
        packed(without(file, "spec"), "spec", data=data)

    return dense().build(file=edit)


@attack(r"'multipliers' has shape \(3, 1\)")
def another_rank() -> Built:
    return dense().build(file=lambda file: packed(without(file), "multipliers", data=np.ones((3, 1))))


@attack(r"'multipliers' has shape \(4,\)")
def another_length() -> Built:
    return dense().build(file=lambda file: packed(without(file), "multipliers", data=np.ones(4)))


@attack("'strategy.packed' may grow")
def dataset_that_may_grow() -> Built:
    def edit(file: h5py.File) -> None:
        data = file["strategy.packed"][...]
        without(file, "strategy.packed").create_dataset(
            "strategy.packed", data=data, maxshape=(None,), **form(data.shape)
        )

    return dense().build(file=edit)


# --- filters -------------------------------------------------------------------------------------------


def filtered(*filters: int, shape: tuple[int, ...] = (3,), name: str = "multipliers") -> Any:
    """An edit of the file: the dataset with a pipeline of these filters."""

    def edit(file: h5py.File) -> None:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk(form(shape)["chunks"])
        properties.set_obj_track_times(False)
        for number in filters:
            parameters = {h5py.h5z.FILTER_DEFLATE: (4,), h5py.h5z.FILTER_SZIP: (141, 32)}.get(number, ())
            properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, parameters)
        space = h5py.h5s.create_simple(shape)
        h5py.h5d.create(without(file, name).id, name.encode(), h5py.h5t.IEEE_F64LE, space, properties)

    return edit


SHUFFLE, GZIP, FLETCHER = h5py.h5z.FILTER_SHUFFLE, h5py.h5z.FILTER_DEFLATE, h5py.h5z.FILTER_FLETCHER32


@attack(r"'multipliers' has the HDF5 filters \[32000\]")
def lzf() -> Built:
    return dense().build(file=replacing("multipliers", chunks=(3,), compression="lzf"))


@attack(r"'multipliers' has the HDF5 filters \[6\]")
def scale_offset() -> Built:
    """Lossy: other numbers would come out than went in."""
    return dense().build(file=replacing("multipliers", chunks=(3,), scaleoffset=3))


@attack(r"'multipliers' has the HDF5 filters \[2, 5, 3\]")
def n_bit() -> Built:
    def edit(file: h5py.File) -> None:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((3,))
        properties.set_obj_track_times(False)
        for number in (SHUFFLE, h5py.h5z.FILTER_NBIT, FLETCHER):
            properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, ())
        space = h5py.h5s.create_simple((3,))
        h5py.h5d.create(without(file).id, b"multipliers", h5py.h5t.IEEE_F64LE, space, properties)

    return dense().build(file=edit)


@attack(r"'learning_rates' has the HDF5 filters \[2, 32001, 3\]")
def unknown_filter() -> Built:
    """A plugin's number: HDF5 would look for it and load it as code."""
    return renumbered(32001)


@attack(r"'learning_rates' has the HDF5 filters \[2, 4, 3\]")
def szip() -> Built:
    return renumbered(h5py.h5z.FILTER_SZIP)


def renumbered(number: int) -> Built:
    """An honest file whose gzip filters have another number (one parameter, a name of 8 bytes)."""
    data, logical = dense().data, dense().artifact.digest
    return data.replace(
        struct.pack("<4H", GZIP, 8, 1, 1) + b"deflate\0", struct.pack("<4H", number, 8, 1, 1) + b"deflate\0"
    ), logical


@attack(r"'multipliers' has the HDF5 filters \[\]")
def no_filter() -> Built:
    return dense().build(file=replacing("multipliers", chunks=(3,)))


@attack(r"'multipliers' has the HDF5 filters \[2, 1\]")
def no_checksum() -> Built:
    return dense().build(file=replacing("multipliers", chunks=(3,), shuffle=True, compression="gzip"))


@attack(r"'multipliers' has the HDF5 filters \[2, 1, 1, 3\]")
def gzip_in_gzip() -> Built:
    """A filter that appears twice multiplies its factor of 1,000."""
    squeezed = zlib.compress(zlib.compress(bytes(16 << 20), 9), 9)

    def edit(file: h5py.File) -> None:
        filtered(SHUFFLE, GZIP, GZIP, FLETCHER)(file)
        file["multipliers"].id.write_direct_chunk((0,), squeezed + bytes(4))

    return dense().build(file=edit)
