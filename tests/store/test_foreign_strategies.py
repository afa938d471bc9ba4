"""Forged files of the recursive strategies (schema 2): refused with a typed error, quickly and in bounded memory.

Every forgery carries digests that fit. `format.decode` may raise nothing but ArtifactCorrupt and ArtifactVersionError.
"""

from __future__ import annotations

import math
import zlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import ArtifactCorrupt, ArtifactVersionError
from mmfact.store import format

HERE = Path("foreign.h5")
N, BUFFERS, BAND, RANK = 12, 2, 3, 2
NAN, INF = math.nan, math.inf

recursive = pytest.mark.parametrize("kind", ["buffered", "banded-low-rank"])


@pytest.fixture(scope="module")
def forgers(forge_from):
    work = workload.momentum(N)
    options = {
        "buffered": Options(buffers=BUFFERS, tolerance=0.5, dtype="float64"),
        "banded-low-rank": Options(
            strategy="banded-low-rank", bandwidth=BAND, rank=RANK, tolerance=0.5, dtype="float64"
        ),
    }
    return {kind: forge_from(compile(work, chosen)) for kind, chosen in options.items()}


def refused(data, logical, **options):
    with pytest.raises(ArtifactCorrupt, **options):
        format.decode(data, HERE, logical)


@recursive
def test_the_forger_is_honest_when_nothing_is_forged(forgers, same, kind):
    """Otherwise every test below would pass for the wrong reason."""
    data, logical = forgers[kind].build()
    assert same(format.decode(data, HERE, logical), forgers[kind].artifact)


# --- the strategy's entry --------------------------------------------------------------------------

WRONG = [0, -1, -(10**30), 7, 10**6, 2**63, 10**400, True, False, "2", 2.0, 1.5, None, [2], {"n": 2}, NAN, INF]


@pytest.mark.parametrize("value", WRONG, ids=lambda value: repr(value)[:12])
@pytest.mark.parametrize(
    ("kind", "name"), [("buffered", "buffers"), ("banded-low-rank", "bandwidth"), ("banded-low-rank", "rank")]
)
def test_a_parameter_that_cannot_be(forgers, kind, name, value):
    """Zero, negative, huge, more than n allows (7 buffers for 12 steps; 7 is also no band or rank of the arrays)."""
    data, logical = forgers[kind].build(lambda spec: spec["strategy"].update({name: value}))
    refused(data, logical)


@recursive
@pytest.mark.parametrize(
    "entry",
    [
        None,
        [],
        "buffered",
        5,
        {},
        {"kind": "buffered"},
        {"kind": "banded-low-rank"},
        {"kind": "banded-low-rank", "bandwidth": BAND},
        {"kind": "banded-low-rank", "rank": RANK},
        {"kind": "buffered", "bandwidth": BAND, "rank": RANK},
        {"kind": "banded-low-rank", "buffers": BUFFERS},
        {"kind": "buffered", "buffers": BUFFERS, "rank": 2},
        {"kind": "buffered", "buffers": BUFFERS, "": 2},
        {"kind": "banded-low-rank", "bandwidth": BAND, "rank": RANK, "buffers": 3},
        {"kind": "Buffered", "buffers": BUFFERS},
        {"kind": "banded_low_rank", "bandwidth": BAND, "rank": RANK},
        {"kind": "blt", "buffers": BUFFERS},
        {"kind": ["buffered"], "buffers": BUFFERS},
        {"kind": {"buffered": 1}, "buffers": BUFFERS},
        {"kind": None, "buffers": BUFFERS},
        {"kind": 1, "buffers": BUFFERS},
        {"kind": "", "buffers": BUFFERS},
        {"kind": "dense"},
        {"kind": "dense", "buffers": BUFFERS},
        {"buffers": BUFFERS},
        {"bandwidth": BAND, "rank": RANK},
    ],
    ids=str,
)
def test_a_strategy_entry_that_is_none(forgers, kind, entry):
    """Keys missing, to spare, of another strategy; kinds unknown, or of a type that cannot be looked up."""
    data, logical = forgers[kind].build(lambda spec: spec.update(strategy=entry))
    refused(data, logical)


@recursive
@pytest.mark.parametrize("version", [1, 0, -2, True, "2", 2.0, None])
def test_a_schema_version_that_did_not_have_it(forgers, kind, version):
    """Version 1 knew the dense strategy only: such a file was never written."""
    data, logical = forgers[kind].build(lambda spec: spec.update(schema_version=version))
    refused(data, logical)


@recursive
@pytest.mark.parametrize("version", [3, 10**30])
def test_a_newer_schema(forgers, kind, version):
    data, logical = forgers[kind].build(lambda spec: spec.update(schema_version=version))
    with pytest.raises(ArtifactVersionError, match="Upgrade"):
        format.decode(data, HERE, logical)


def test_version_1_with_the_dense_strategy_is_read(forger, same):
    """Files of yesterday; their bytes are not those of today, their content is."""
    data, logical = forger.build(lambda spec: spec.update(schema_version=1))
    read = format.decode(data, HERE, logical)
    np.testing.assert_array_equal(read.C, forger.artifact.C)
    assert read.digest == logical != forger.artifact.digest


@recursive
def test_a_custom_workload_under_a_spec_for_a_structured_one(forgers, kind):
    def edit(spec):
        spec["workload"].update(kind="custom", beta=0.0)

    data, logical = forgers[kind].build(edit)
    refused(data, logical)


# --- the arrays ------------------------------------------------------------------------------------


def changed(name, change):
    """An edit of one coefficient array of the honest artifact."""

    def edit(arrays):
        array = arrays[f"strategy.{name}"].copy()
        new = change(array)
        return {f"strategy.{name}": array if new is None else new}

    return edit


def put(index, value):
    def change(array):
        array[index] = value

    return change


def every(change):
    return lambda arrays: {k: change(v) for k, v in arrays.items() if k.startswith("strategy.")}


BUFFERED = {
    "g transposed": changed("g", lambda x: x.T),
    "all transposed": every(lambda x: x.T),
    "g flat": changed("g", np.ravel),
    "c a column": changed("c", lambda x: x[:, None]),
    "c a row": changed("c", lambda x: x[None]),
    "g of three dimensions": changed("g", lambda x: x[:, :, None]),
    "one step fewer": every(lambda x: x[:-1]),
    "one step more": every(lambda x: np.concatenate([x, x[-1:]])),
    "q one buffer fewer": changed("q", lambda x: x[:, :1]),
    "decay one buffer more": changed("decay", lambda x: np.column_stack([x, x[:, 0]])),
    "all one buffer more": every(lambda x: x if x.ndim == 1 else np.column_stack([x, x[:, 0]])),
    "c of another precision": changed("c", lambda x: x.astype("<f4")),
    "q of another precision": changed("q", lambda x: x.astype("<f4")),
    "g of whole numbers": changed("g", lambda x: np.ones(x.shape, "<i8")),
    "decay of half precision": changed("decay", lambda x: x.astype("<f2")),
    "g big-endian": changed("g", lambda x: x.astype(">f8")),
    "NaN in c": changed("c", put(3, NAN)),
    "NaN in g": changed("g", put((3, 1), NAN)),
    "NaN in decay": changed("decay", put((N - 1, 0), NAN)),
    "NaN in q": changed("q", put((0, 0), NAN)),
    "infinite decay": changed("decay", put((3, 1), INF)),
    "infinite q": changed("q", put((3, 1), -INF)),
    "c zero": changed("c", put(3, 0.0)),
    "c minus zero": changed("c", put(3, -0.0)),
    "c negative": changed("c", put(N - 1, -1.0)),
    "c denormal": changed("c", put(3, 5e-324)),
    "g huge": changed("g", put((3, 1), 1e300)),
    "c huge": changed("c", put(3, 1e300)),
    "c missing": lambda arrays: {"strategy.c": None},
    "decay missing": lambda arrays: {"strategy.decay": None},
    "packed instead": lambda arrays: {"strategy.c": None, "strategy.packed": np.ones(N * (N + 1) // 2)},
    "packed beside": lambda arrays: {"strategy.packed": np.ones(N * (N + 1) // 2)},
}
BANDED = {
    "band transposed": changed("band", lambda x: x.T),
    "left transposed": changed("left", lambda x: x.T),
    "all transposed": every(lambda x: x.T),
    "band flat": changed("band", np.ravel),
    "one step fewer": every(lambda x: x[:-1]),
    "wider band": changed("band", lambda x: np.column_stack([x, np.zeros(N)])),
    "narrower band": changed("band", lambda x: x[:, :-1]),
    "left of another rank": changed("left", lambda x: x[:, :1]),
    "right of another rank": changed("right", lambda x: np.column_stack([x, x[:, 0]])),
    "band of another precision": changed("band", lambda x: x.astype("<f4")),
    "right of another precision": changed("right", lambda x: x.astype("<f4")),
    "left complex": changed("left", lambda x: x.astype("<c16")),
    "NaN in band": changed("band", put((5, 1), NAN)),
    "NaN in left": changed("left", put((5, 1), NAN)),
    "NaN in right": changed("right", put((0, 1), NAN)),
    "infinite right": changed("right", put((0, 1), INF)),
    "diagonal zero": changed("band", put((5, 0), 0.0)),
    "diagonal negative": changed("band", put((5, 0), -1.0)),
    "left of the matrix": changed("band", put((0, 1), 1e-9)),
    "left of the matrix, at its last": changed("band", put((1, 2), 1.0)),
    "NaN left of the matrix": changed("band", put((0, 1), NAN)),
    "left inside the band": changed("left", put((BAND - 1, 0), 1e-300)),
    "right past the end": changed("right", put((N - BAND, 0), 1.0)),
    "band huge": changed("band", put((5, 1), 1e200)),
    "right huge": changed("right", put((0, 0), 1e200)),
    "left missing": lambda arrays: {"strategy.left": None},
    "c beside": lambda arrays: {"strategy.c": np.ones(N)},
    "other values": changed("right", put((0, 0), 7.0)),
}
BAD = [("buffered", name) for name in BUFFERED] + [("banded-low-rank", name) for name in BANDED]


@pytest.mark.parametrize(("kind", "name"), BAD)
def test_arrays_that_make_no_sense(forgers, kind, name):
    """Shapes that contradict each other or the spec, precisions mixed, values that cannot be streamed."""
    forger = forgers[kind]
    data, logical = forger.build(arrays=(BUFFERED if kind == "buffered" else BANDED)[name](forger.arrays))
    refused(data, logical)


@pytest.mark.parametrize(("kind", "name"), [entry for entry in BAD if "transposed" in entry[1] or "fewer" in entry[1]])
def test_arrays_that_only_their_own_listing_fits(forgers, kind, name):
    """The listing is honest about the wrong arrays and the parameters are made to fit as far as they can."""
    forger = forgers[kind]
    arrays = (BUFFERED if kind == "buffered" else BANDED)[name](forger.arrays)

    def edit(spec):
        shapes = {k: v["shape"] for k, v in spec["datasets"].items()}
        if kind == "buffered":
            spec["strategy"]["buffers"] = shapes["strategy.g"][-1]
        else:
            spec["strategy"].update(bandwidth=shapes["strategy.band"][-1], rank=shapes["strategy.left"][-1])

    data, logical = forger.build(edit, arrays=arrays)
    refused(data, logical)


def test_a_band_and_a_rank_that_do_not_fit_each_other(forgers):
    """R <= n - K: K = 11 leaves one row, K = 12 none."""
    forger = forgers["banded-low-rank"]
    for K, R in [(11, 2), (12, 1), (12, 2), (6, 7), (1, 12)]:
        arrays = {"strategy.band": np.eye(N)[:, :1] * 0 + np.eye(1, K), "strategy.left": np.zeros((N, R))}
        arrays["strategy.right"] = np.zeros((N, R))
        data, logical = forger.build(lambda spec, K=K, R=R: spec["strategy"].update(bandwidth=K, rank=R), arrays=arrays)
        refused(data, logical)


@recursive
@pytest.mark.parametrize("factor", [0.0, 0.5, 1 - 1e-8, 1 + 1e-8, 2.0, -1.0])
def test_wrong_sensitivity(forgers, kind, factor):
    """An understated sensitivity would scale the noise down."""
    value = forgers[kind].spec["certificate"]["sensitivity"] * factor
    data, logical = forgers[kind].build(lambda spec: spec["certificate"].update(sensitivity=value))
    refused(data, logical, match="sensitivity")


@pytest.mark.parametrize("decay", [1e10, 1e30])
def test_a_sensitivity_that_is_not_a_number(forgers, decay):
    """Decays above 1 let C overflow; a NaN passes any comparison written the wrong way round."""
    forger = forgers["buffered"]
    n = 40
    arrays = {
        "learning_rates": np.ones(n),
        "multipliers": np.ones(n),
        "strategy.c": np.ones(n),
        "strategy.g": np.ones((n, 2)),
        "strategy.decay": np.full((n, 2), decay),
        "strategy.q": np.ones((n, 2)),
    }

    def edit(spec):
        spec["workload"]["n"] = spec["certificate"]["n"] = n

    data, logical = forger.build(edit, arrays=arrays)
    refused(data, logical)


def test_a_band_whose_strategy_overflows(forgers):
    """B_hat^-1 A not finite, or only just: a typed error, no warning and no traceback from linear algebra."""
    forger = forgers["banded-low-rank"]
    for diagonal, below in [(1e-90, 1e90), (1e-8, 1.0), (1e-300, 1.0)]:
        band = np.zeros((N, BAND))
        band[:, 0], band[1:, 1] = diagonal, below
        data, logical = forger.build(arrays={"strategy.band": band})
        refused(data, logical)


# --- the HDF5 file ---------------------------------------------------------------------------------


def again(name, **options):
    """An edit of the file: the dataset created again with other properties."""

    def edit(file):
        data = options.pop("data", None)
        data = file[name][...] if data is None else data
        del file[name]
        file.create_dataset(name, data=data, **options)

    return edit


@pytest.mark.parametrize("chunks", [(1, 1), (N, 1), (1, BUFFERS), (5, 2), (7, 1)], ids=str)
def test_chunks_of_another_shape_change_nothing(forgers, same, chunks):
    """Refused, or read as it is: the shape of chunks carries no meaning."""
    forger = forgers["buffered"]
    data, logical = forger.build(file=again("strategy.g", chunks=chunks, compression="gzip", fletcher32=True))
    try:
        read = format.decode(data, HERE, logical)
    except ArtifactCorrupt:
        return
    assert same(read, forger.artifact)


def resizable(chunks):
    """A dataset of the right shape whose chunks are larger than itself; nothing is written into them."""

    def edit(file):
        del file["strategy.g"]
        file.create_dataset(
            "strategy.g", shape=(N, BUFFERS), dtype="<f8", chunks=chunks, maxshape=(None, None), compression="gzip"
        )

    return edit


def squeezed_chunk(length):
    """The honest shape, but the only chunk unpacks to `length` zero bytes."""

    def edit(file):
        shape = file["strategy.q"].shape
        del file["strategy.q"]
        dataset = file.create_dataset("strategy.q", shape=shape, dtype="<f8", chunks=shape, compression="gzip")
        squeezer, block, left = zlib.compressobj(9), bytes(1 << 20), length
        parts = []
        while left > 0:
            parts.append(squeezer.compress(block[: min(left, len(block))]))
            left -= len(block)
        dataset.id.write_direct_chunk((0, 0), b"".join(parts) + squeezer.flush())

    return edit


STRUCTURES = {
    "contiguous": again("strategy.g"),
    "compact filter": again("strategy.g", chunks=(N, BUFFERS), compression="lzf"),
    "scale-offset": again("strategy.g", chunks=(N, BUFFERS), scaleoffset=3),
    "chunk of 2^28 elements": resizable((1 << 14, 1 << 14)),
    "chunk of 2^17 elements in one row": resizable((1, 1 << 17)),
    "chunk of 2^30 elements in one column": resizable((1 << 28, 1)),
    "chunk that unpacks to 512 MiB": squeezed_chunk(512 << 20),
    "chunk that unpacks to one byte more": squeezed_chunk(8 * N * BUFFERS + 1),
    "chunk that unpacks to one byte less": squeezed_chunk(8 * N * BUFFERS - 1),
    "chunk that unpacks to nothing": squeezed_chunk(0),
    "a virtual dataset": lambda file: _virtual(file),
    "a link": lambda file: (
        file.move("strategy.g", "strategy.decay2"),
        file.__setitem__("strategy.g", h5py.SoftLink("/strategy.q")),
    ),
    "an attribute": lambda file: file["strategy.g"].attrs.__setitem__("note", 1),
    "no chunk written": lambda file: (
        file.__delitem__("strategy.g"),
        file.create_dataset("strategy.g", shape=(N, BUFFERS), dtype="<f8", chunks=(N, BUFFERS), compression="gzip"),
    ),
}


def _virtual(file):
    layout = h5py.VirtualLayout(shape=(N, BUFFERS), dtype="<f8")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "strategy.g", shape=(N, BUFFERS))
    del file["strategy.g"]
    file.create_virtual_dataset("strategy.g", layout)


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_that_artifacts_do_not_have(forgers, name):
    data, logical = forgers["buffered"].build(file=STRUCTURES[name])
    assert len(data) < 2 << 20
    refused(data, logical)


# --- size ------------------------------------------------------------------------------------------

# VmHWM and not ru_maxrss, which a child inherits from pytest. One child measures all, each from its own start.
MEASURE = r"""
import re, sys
from pathlib import Path
def peak(): return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
from mmfact.factorize.errors import ArtifactCorrupt
from mmfact.store import format
for name in sys.argv[1:]:
    data = Path(name).read_bytes()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    try:
        format.decode(data, Path("bomb.h5"), Path(name).stem)
    except ArtifactCorrupt:
        print(peak() - before)
    except BaseException as error:
        print(type(error).__name__, error)
"""


def calling_for(n, **strategy):
    """An edit of the spec, listed shapes too: a horizon and parameters that the arrays in the file do not have."""

    def edit(spec):
        spec["workload"]["n"] = n
        spec["strategy"].update(strategy)
        spec["certificate"]["n"] = n
        for name, entry in spec["datasets"].items():
            if len(entry["shape"]) == 1:
                entry["shape"] = [n]
            else:
                width = (
                    strategy["bandwidth" if name.endswith("band") else "rank"]
                    if "rank" in strategy
                    else strategy["buffers"]
                )
                entry["shape"] = [n, width]

    return edit


def unwritten(n, width):
    """An edit of the file: arrays of that shape, of which no element is stored."""

    def edit(file):
        for name in ("strategy.g", "strategy.decay", "strategy.q"):
            del file[name]
            chunks = (max(1, min(n, (1 << 16) // width)), min(width, 1 << 16))
            file.create_dataset(name, shape=(n, width), dtype="<f8", chunks=chunks, compression="gzip", fletcher32=True)

    return edit


BOMBS = {
    "n = 2^24, 2^23 buffers": ("buffered", calling_for(1 << 24, buffers=1 << 23), None),
    "the same, and so in the file": ("buffered", calling_for(1 << 24, buffers=1 << 23), unwritten(1 << 24, 1 << 23)),
    "n = 2^24, 9 buffers": ("buffered", calling_for(1 << 24, buffers=9), unwritten(1 << 24, 9)),
    "n = 2^24, 8 buffers, small arrays": ("buffered", calling_for(1 << 24, buffers=8), None),
    "n = 2^25": ("buffered", calling_for(1 << 25, buffers=1), unwritten(1 << 25, 1)),
    "large in the file only": ("buffered", None, unwritten(1 << 24, 8)),
    "wide in the file only": ("buffered", None, unwritten(N, 1 << 24)),
    "band of 8192 in 8192": ("banded-low-rank", calling_for(8192, bandwidth=8192, rank=8192), None),
    "banded, n = 2^24": ("banded-low-rank", calling_for(1 << 24, bandwidth=1 << 20, rank=1 << 20), None),
    "a chunk of 512 MiB": ("buffered", None, squeezed_chunk(512 << 20)),
}


def test_small_files_that_call_for_terabytes(forgers, python, tmp_path):
    """Declared sizes are checked before anything is allocated: none of them may take 100 MiB to refuse."""
    paths = []
    for kind, spec, file in BOMBS.values():
        edits = {"edit": spec} if spec else {}
        data, logical = forgers[kind].build(**edits, **({"file": file} if file else {}))
        assert len(data) < 2 << 20
        paths.append(tmp_path / f"{logical}")
        paths[-1] = paths[-1].with_name(f"{logical}.{len(paths)}")
        paths[-1].write_bytes(data)
    out, err = python(MEASURE, *paths).communicate(timeout=300)
    lines = out.splitlines()
    assert len(lines) == len(BOMBS), err[-300:]
    for name, line in zip(BOMBS, lines, strict=True):
        assert line.replace(".", "").replace("-", "").isdigit(), f"{name}: {line}"
        assert float(line) < 100, f"{name}: refusing took {line} MiB"


def test_arrays_that_are_not_there_are_refused_before_they_are_made(forgers, python, tmp_path):
    """20 KiB of file whose spec calls, within all limits, for 108 MiB of which no chunk is stored.

    3.4 GiB can be called for so (n = 2^24, 8 buffers); an artifact of mmfact stores every chunk.
    """
    forger, n = forgers["buffered"], 1 << 19

    def file(hdf5):
        unwritten(n, 8)(hdf5)
        for name in ("strategy.c", "learning_rates", "multipliers"):
            del hdf5[name]
            hdf5.create_dataset(name, shape=(n,), dtype="<f8", chunks=(1 << 16,), compression="gzip", fillvalue=1.0)

    data, logical = forger.build(calling_for(n, buffers=8), file=file)
    path = tmp_path / f"{logical}.1"
    path.write_bytes(data)
    assert len(data) < 20_000
    out, err = python(MEASURE, path).communicate(timeout=120)
    assert out, err[-300:]
    assert float(out) < 100, f"refusing took {out.strip()} MiB"


# --- damage ----------------------------------------------------------------------------------------


@recursive
def test_flips_past_the_outer_digest_change_nothing_silently(forgers, same, kind):
    """One bit of 250 bytes in turn: refused by a typed error, or the artifact equals the original."""
    forger = forgers[kind]
    random = np.random.default_rng(17)
    refusals = 0
    for position in random.choice(len(forger.data), 250, replace=False):
        damaged = bytearray(forger.data)
        damaged[position] ^= 1 << random.integers(0, 8)
        try:
            artifact = format.decode(bytes(damaged), HERE, forger.artifact.digest)
        except (ArtifactCorrupt, ArtifactVersionError):
            refusals += 1
        else:
            assert same(artifact, forger.artifact), f"a flip at byte {position} changed what was read"
    assert refusals > 15
