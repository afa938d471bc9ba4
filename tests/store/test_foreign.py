"""Files that mmfact did not write, or that contradict themselves, under names that fit their bytes.

Each is refused with a typed error, quickly and in bounded memory: the store may hold what others put there.
"""

from __future__ import annotations

import hashlib
import io
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
from mmfact.store.store import read

HERE = Path("foreign.h5")
NAN, INF = math.nan, math.inf


def setting(*path_and_value):
    """An edit of the spec: setting("certificate", "loss", 3.0)."""
    *path, last, value = path_and_value

    def edit(spec):
        for key in path:
            spec = spec[key]
        spec[last] = value

    return edit


def removing(*path):
    def edit(spec):
        for key in path[:-1]:
            spec = spec[key]
        del spec[path[-1]]

    return edit


def replacing(name, **options):
    """An edit of the HDF5 file: dataset `name` created again with other options."""

    def edit(file):
        data = options.pop("data", file[name][...])
        del file[name]
        file.create_dataset(name, data=data, **options)

    return edit


def test_the_forger_is_honest_when_nothing_is_forged(forger, same):
    """Otherwise every test below would pass for the wrong reason."""
    data, logical = forger.build()
    assert same(format.decode(data, HERE, logical), forger.artifact)


# --- not such a file -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [b"", b"\0", b"a text file\n" * 50, b"\x89HDF\r\n\x1a\n", b"\x89HDF\r\n\x1a\n" + bytes(4096), b"PK\x03\x04" * 300],
    ids=["empty", "one byte", "text", "signature alone", "signature and zeros", "zip"],
)
def test_no_hdf5_at_all(store, data):
    path = store.path / f"{'0' * 64}-{hashlib.sha256(data).hexdigest()}.h5"
    store.path.mkdir()
    path.write_bytes(data)
    with pytest.raises(ArtifactCorrupt, match="HDF5"):
        read(path)


def test_foreign_hdf5(tmp_path):
    """Somebody's data set with an innocent name."""
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"] = np.arange(10.0)
    with pytest.raises(ArtifactCorrupt):
        read(tmp_path / "data.h5")
    with pytest.raises(ArtifactCorrupt, match="no spec"):
        format.decode((tmp_path / "data.h5").read_bytes(), HERE)


def test_a_foreign_giant_is_refused_unread(python, tmp_path):
    """`mmfact inspect data.h5` on somebody's 64 GiB file (sparse here) must not read it into memory."""
    path = tmp_path / f"{'0' * 64}-{'1' * 64}.h5"
    with path.open("wb") as file:
        file.truncate(64 << 30)
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))\n"
        "from mmfact.store.store import read; from pathlib import Path\n"
        "from mmfact.factorize.errors import ArtifactCorrupt\n"
        "try: read(Path(sys.argv[1]))\n"
        "except ArtifactCorrupt: print('refused')\n"
    )
    process = python(script, path)
    out, err = process.communicate(timeout=60)
    assert out.strip() == "refused", err[-300:]


# --- structure of the HDF5 file --------------------------------------------------------------------


def soft_link(file):
    file.move("multipliers", "elsewhere")
    file["multipliers"] = h5py.SoftLink("/elsewhere")


def soft_link_in_place(file):
    del file["multipliers"]
    file["multipliers"] = h5py.SoftLink("/learning_rates")


def dangling_link(file):
    del file["multipliers"]
    file["multipliers"] = h5py.SoftLink("/nowhere")


def external_link(file):
    del file["multipliers"]
    file["multipliers"] = h5py.ExternalLink("/tmp/other.h5", "/multipliers")


def external_data(file):
    del file["multipliers"]
    file.create_dataset("multipliers", shape=(3,), dtype="<f8", external=[("/etc/passwd", 0, 24)])


def virtual_data(file):
    layout = h5py.VirtualLayout(shape=(3,), dtype="<f8")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "multipliers", shape=(3,))
    del file["multipliers"]
    file.create_virtual_dataset("multipliers", layout)


def group(file):
    del file["multipliers"]
    file.create_group("multipliers")


def named_type(file):
    del file["multipliers"]
    file["multipliers"] = np.dtype("<f8")


def null_data(file):
    del file["multipliers"]
    file.create_dataset("multipliers", data=h5py.Empty("<f8"))


def strings(file):
    del file["multipliers"]
    file.create_dataset("multipliers", data=["1", "2", "3"], dtype=h5py.string_dtype(), chunks=(3,))


STRUCTURES = {
    "soft link beside": soft_link,
    "soft link": soft_link_in_place,
    "dangling link": dangling_link,
    "external link": external_link,
    "external data": external_data,
    "virtual data": virtual_data,
    "group": group,
    "named type": named_type,
    "null data": null_data,
    "object dtype": strings,
    "extra dataset": lambda file: file.create_dataset("extra", data=[1.0], chunks=(1,)),
    "extra group": lambda file: file.create_group("extra"),
    "missing dataset": lambda file: file.__delitem__("multipliers"),
    "attribute": lambda file: file.attrs.__setitem__("note", "hello"),
    "attribute of a dataset": lambda file: file["multipliers"].attrs.__setitem__("note", "hello"),
    "contiguous": replacing("multipliers"),
    "lzf filter": replacing("multipliers", chunks=(3,), compression="lzf"),
    "scale-offset filter": replacing("multipliers", chunks=(3,), scaleoffset=3),
    "big-endian": lambda file: replacing("multipliers", data=file["multipliers"][...].astype(">f8"), chunks=(3,))(file),
    "column": lambda file: replacing("multipliers", data=file["multipliers"][...][:, None], chunks=(3, 1))(file),
    "complex": lambda file: replacing("multipliers", data=np.ones(3, complex), chunks=(3,))(file),
    "compound": lambda file: replacing("multipliers", data=np.zeros(3, "f8,f8"), chunks=(3,))(file),
    "other values": lambda file: replacing("multipliers", data=np.ones(3), chunks=(3,))(file),
    "other length": lambda file: replacing("multipliers", data=np.ones(4), chunks=(4,))(file),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_unexpected_structure(forger, name):
    """Links that lead out of the file, storage and filters that no artifact uses, values swapped under the spec."""
    data, logical = forger.build(file=STRUCTURES[name])
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize("kind", ["soft", "external"])
def test_links_to_the_very_same_values(forger, tmp_path, kind):
    """Refused for being links: what they lead to could change after the check, or be somebody's secret."""
    with h5py.File(tmp_path / "other.h5", "w") as other:
        other.create_dataset("multipliers", data=np.ones(3), chunks=(3,))

    def link(file):
        del file["multipliers"]
        outside = h5py.ExternalLink(str(tmp_path / "other.h5"), "/multipliers")
        file["multipliers"] = h5py.SoftLink("/learning_rates") if kind == "soft" else outside

    data, logical = forger.build(arrays={"multipliers": np.ones(3)})
    assert format.decode(data, HERE, logical).multipliers.tolist() == [1, 1, 1]
    data, logical = forger.build(arrays={"multipliers": np.ones(3)}, file=link)
    with pytest.raises(ArtifactCorrupt, match="link"):
        format.decode(data, HERE, logical)


def test_user_block(forger, tmp_path):
    data, logical = forger.build()
    with h5py.File(tmp_path / "block.h5", "w", userblock_size=512) as file, h5py.File(io.BytesIO(data)) as source:
        for name in source:
            source.copy(name, file)
    with pytest.raises(ArtifactCorrupt, match="user block"):
        format.decode((tmp_path / "block.h5").read_bytes(), HERE, logical)


# --- the spec --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec",
    [
        b" ",
        b"{}",
        b"null",
        b"[]",
        b'"mmfact-artifact"',
        b"\xff\xfe\x00",
        b'{"format": "mmfact-artifact"}',
        b'{"format": "mmfact-artifact", "schema_version": 1}',
        b'{"format": "mmfact-artifact", "schema_version": 1, "datasets": {}}',
        b'{"format": "mmfact-artifact", "schema_version": 1, "datasets": []}',
        b'{"format": "something else", "schema_version": 1, "datasets": {}}',
        b"[" * 500_000,
        b'{"format": "mmfact-artifact", "schema_version": ' + b"1" * 5000 + b"}",
        b" " * (2 << 20),
    ],
    ids=lambda spec: f"{spec[:60]!r}, {len(spec)}",
)
def test_spec_that_is_no_spec(forger, spec):
    with pytest.raises(ArtifactCorrupt):
        format.decode(forger.write(spec, {}), HERE)


@pytest.mark.parametrize("version", [3, 999, 10**30])
def test_newer_schema(forger, store, version):
    """A file of a later mmfact is not damage: the message says to upgrade."""
    data, logical = forger.build(setting("schema_version", version))
    with pytest.raises(ArtifactVersionError, match="Upgrade mmfact"):
        read(forger.place(store, data, logical))


@pytest.mark.parametrize("version", ["1", True, 1.0, 0, -1, None, [1], NAN])
def test_schema_version_that_is_no_version(forger, version):
    data, logical = forger.build(setting("schema_version", version))
    with pytest.raises(ArtifactCorrupt, match=r"schema version|NaN"):
        format.decode(data, HERE, logical)


SPECS = {
    "workload missing": removing("workload"),
    "certificate missing": removing("certificate"),
    "participation missing": removing("participation"),
    "strategy missing": removing("strategy"),
    "provenance missing": removing("provenance"),
    "workload a list": setting("workload", []),
    "unknown workload": setting("workload", "kind", "nesterov"),
    "another workload": setting("workload", "kind", "sgd"),
    "custom without matrix": setting("workload", "kind", "custom"),
    "horizon too long": setting("workload", "n", 4),
    "horizon too short": setting("workload", "n", 2),
    "horizon zero": setting("workload", "n", 0),
    "horizon not whole": setting("workload", "n", 3.0),
    "horizon true": setting("workload", "n", True),
    "horizon immense": setting("workload", "n", 10**400),
    "beta one": setting("workload", "beta", 1.0),
    "beta negative": setting("workload", "beta", -0.1),
    "beta text": setting("workload", "beta", "0.9"),
    "beta immense": setting("workload", "beta", 10**400),
    "weight decay negative": setting("workload", "weight_decay", -1.0),
    "weight decay immense": setting("workload", "weight_decay", 10**400),
    "ema one": setting("workload", "ema", 1.0),
    "schedule no text": setting("workload", "schedule", ["cooldown"]),
    "schedule number": setting("workload", "schedule", 5),
    "unknown decay kind": setting("workload", "weight_decay_kind", "both"),
    "extra parameter": setting("workload", "nesterov", True),
    "matrix smuggled in": setting("workload", "matrix", [[1.0]]),
    "unknown participation": setting("participation", "kind", "cyclic"),
    "participation extra": setting("participation", "separation", 4),
    "unknown strategy": setting("strategy", "kind", "buffered"),
    "strategy text": setting("strategy", "dense"),
    "provenance no object": setting("provenance", 5),
    "dataset without digest": removing("datasets", "multipliers", "sha256"),
    "dataset wrong digest": setting("datasets", "multipliers", "sha256", "0" * 64),
    "dataset wrong shape": setting("datasets", "multipliers", "shape", [4]),
    "dataset no object": setting("datasets", "multipliers", 3),
    "dataset unlisted": removing("datasets", "multipliers"),
    "dataset not there": setting("datasets", "matrix", {"shape": [6], "dtype": "<f8", "sha256": "0" * 64}),
}


@pytest.mark.parametrize("name", SPECS)
def test_spec_that_contradicts_itself_or_its_data(forger, name):
    """Digests that fit prove nothing about sense; a reader that trusts them trains with another workload."""
    data, logical = forger.build(SPECS[name])
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


NUMBERS = [
    ("certificate", "loss"),
    ("certificate", "lower_bound"),
    ("certificate", "excess"),
    ("certificate", "sensitivity"),
    ("certificate", "max_error"),
    ("certificate", "residual"),
    ("certificate", "quadrature_error"),
    ("certificate", "rounding"),
    ("workload", "beta"),
    ("workload", "ema"),
    ("workload", "weight_decay"),
    ("workload", "n"),
    ("provenance", "options"),
]


@pytest.mark.parametrize("value", [NAN, INF, -INF], ids=str)
@pytest.mark.parametrize("where", NUMBERS, ids=".".join)
def test_numbers_that_are_none(forger, where, value):
    """NaN compares false with everything, so it passes checks written the wrong way round (and breaks --json)."""
    data, logical = forger.build(setting(*where, value))
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize("factor", [0.0, 0.5, 1 - 1e-8, 1 + 1e-8, 2.0, -1.0])
def test_wrong_sensitivity(forger, factor):
    """An understated sensitivity would scale the noise down."""
    value = forger.spec["certificate"]["sensitivity"] * factor
    data, logical = forger.build(setting("certificate", "sensitivity", value))
    with pytest.raises(ArtifactCorrupt, match="sensitivity"):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize(
    "certificate",
    [
        {"excess": 0.0},
        {"excess": 1.0},
        {"excess": None},
        {"lower_bound": 1e9},
        {"lower_bound": 0.0},
        {"lower_bound": -1.0},
        {"lower_bound": 5e-324, "excess": INF},
        {"loss": 1.0},
        {"loss": 1e9},
        {"n": 4},
        {"n": 3.0},
        {"loss": "20"},
        {"iterations": 1.5},
        {"iterations": True},
        {"fell_back": 0},
        {"method": 3},
        {"unknown": 3},
    ],
    ids=str,
)
def test_certificate_that_contradicts_itself(forger, certificate):
    """Loss, lower bound and excess belong together; a certificate that disagrees with itself is none."""
    data, logical = forger.build(lambda spec: spec["certificate"].update(certificate))
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize(
    "name",
    ["n", "loss", "lower_bound", "excess", "sensitivity", "sensitivity_kind", "max_error", "residual", "fell_back"],
)
def test_certificate_with_a_gap(forger, name):
    data, logical = forger.build(removing("certificate", name))
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


# --- the arrays ------------------------------------------------------------------------------------

ARRAYS = {
    "zero rate": {"learning_rates": np.array([1.0, 0.0, 1.0])},
    "negative rate": {"learning_rates": np.array([1.0, -1.0, 1.0])},
    "NaN rate": {"learning_rates": np.array([1.0, NAN, 1.0])},
    "infinite rate": {"learning_rates": np.array([1.0, INF, 1.0])},
    "too few rates": {"learning_rates": np.ones(2)},
    "zero multiplier": {"multipliers": np.array([1.0, 0.0, 1.0])},
    "negative multiplier": {"multipliers": np.array([1.0, -1.0, 1.0])},
    "NaN multiplier": {"multipliers": np.array([1.0, NAN, 1.0])},
    "infinite multiplier": {"multipliers": np.array([1.0, INF, 1.0])},
    "too many multipliers": {"multipliers": np.ones(4)},
    "no triangle": {"strategy.packed": np.ones(5)},
    "smaller triangle": {"strategy.packed": np.array([1.0, 0.0, 1.0])},
    "zero diagonal": {"strategy.packed": np.array([1.0, 0.5, 0.0, 0.5, 0.5, 1.0])},
    "negative diagonal": {"strategy.packed": np.array([1.0, 0.5, -1.0, 0.5, 0.5, 1.0])},
    "NaN coefficient": {"strategy.packed": np.array([1.0, NAN, 1.0, 0.5, 0.5, 1.0])},
    "bytes for coefficients": {"strategy.packed": np.ones(6, np.uint8)},
    "no strategy": {"strategy.packed": None},
    "no rates": {"learning_rates": None},
    "no multipliers": {"multipliers": None},
    "both matrix and rates": {"matrix": np.ones(6)},
    "data nothing refers to": {"strategy.lambda": np.ones(3)},
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_make_no_sense(forger, name):
    """Every array is re-validated: a rate of zero divides by zero, a zero on C's diagonal cannot be streamed."""
    data, logical = forger.build(arrays=ARRAYS[name])
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


@pytest.mark.parametrize(
    "matrix",
    [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 1.0, 1.0, 1.0], [1.0, NAN, 1.0, 1.0, 1.0, 1.0], [1.0] * 5],
    ids=["2 x 2", "singular", "NaN", "no triangle"],
)
def test_custom_matrix_that_makes_no_sense(forger, matrix):
    def custom(spec):
        spec["workload"].update(kind="custom", beta=0.0)

    data, logical = forger.build(custom, arrays={"learning_rates": None, "matrix": np.array(matrix)})
    with pytest.raises(ArtifactCorrupt):
        format.decode(data, HERE, logical)


# --- size ------------------------------------------------------------------------------------------

# VmHWM and not ru_maxrss, which a child inherits from pytest.
MEASURE = r"""
import re, sys
from pathlib import Path
def peak(): return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024
from mmfact.factorize.errors import ArtifactCorrupt
from mmfact.store import format
data = Path(sys.argv[1]).read_bytes()
before = peak()
try:
    format.decode(data, Path("bomb.h5"), sys.argv[2])
except ArtifactCorrupt:
    print(peak() - before)
"""


def many_large(file):
    for i in range(4):
        file.create_dataset(f"x{i}", shape=(1 << 25,), dtype="<f8", chunks=(1 << 16,), compression="gzip")


def large_spec_too(spec):
    for i in range(4):
        spec["datasets"][f"x{i}"] = {"shape": [1 << 25], "dtype": "<f8", "sha256": "0" * 64}


def one_huge(file):
    del file["multipliers"]
    file.create_dataset("multipliers", shape=(1 << 40,), dtype="<f8", chunks=(1 << 16,), compression="gzip")


def one_large(file):
    del file["multipliers"]
    file.create_dataset("multipliers", shape=(1 << 25,), dtype="<f8", chunks=(1 << 16,), compression="gzip")


def one_large_chunk(file):
    del file["multipliers"]
    file.create_dataset("multipliers", shape=(1 << 24,), dtype="<f8", chunks=(1 << 24,), compression="gzip")


def gzip_bomb(file):
    del file["multipliers"]
    dataset = file.create_dataset("multipliers", shape=(3,), dtype="<f8", chunks=(3,), compression="gzip")
    squeezed = zlib.compressobj(9)
    block = bytes(1 << 24)
    dataset.id.write_direct_chunk((0,), b"".join(squeezed.compress(block) for _ in range(32)) + squeezed.flush())


def twice_squeezed(file):
    """A chunk that unpacks to 512 KiB, as it should, which a second gzip filter unpacks to 400 MiB."""
    size = file["strategy.packed"].size
    del file["strategy.packed"]
    squeezed = zlib.compressobj(9)
    block = bytes(1 << 20)
    inner = b"".join(squeezed.compress(block) for _ in range(400)) + squeezed.flush()
    properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    properties.set_chunk((1 << 16,))
    properties.set_deflate(4)
    properties.set_deflate(4)
    space = h5py.h5s.create_simple((size,))
    dataset = h5py.h5d.create(file.id, b"strategy.packed", h5py.h5t.IEEE_F64LE, space, properties)
    dataset.write_direct_chunk((0,), zlib.compress(inner.ljust(1 << 19, b"\0"), 9))


BOMBS = {
    "one huge dataset": (one_huge, lambda spec: None),
    "another size than the spec says": (one_large, lambda spec: None),
    "one huge chunk": (one_large_chunk, lambda spec: None),
    "many large datasets, listed": (many_large, large_spec_too),
    "chunk that unpacks to 512 MiB": (gzip_bomb, lambda spec: None),
}


def test_gzip_in_gzip(python, forge_from, tmp_path):
    """A filter that appears twice multiplies its factor of 1,000: 15 KiB would unpack to 400 MiB, thrice to 400 GiB."""
    forger = forge_from(
        compile(workload.sgd(362), Options(strategy="dense"))
    )  # the first whose coefficients fill a chunk
    data, logical = forger.build(file=twice_squeezed)
    assert len(data) < 1 << 15
    (tmp_path / "bomb.h5").write_bytes(data)
    out, err = python(MEASURE, tmp_path / "bomb.h5", logical).communicate(timeout=60)
    assert out, err[-300:]
    assert float(out) < 100, f"refusing took {float(out):.0f} MiB"


@pytest.mark.parametrize("name", BOMBS)
def test_small_file_that_unpacks_to_gigabytes(forger, python, tmp_path, name):
    """Declared sizes are checked before anything is allocated: a file below 2 MiB must not take 100 MiB to refuse."""
    file, spec = BOMBS[name]
    data, logical = forger.build(spec, file=file)
    assert len(data) < 2 << 20
    (tmp_path / "bomb.h5").write_bytes(data)
    process = python(MEASURE, tmp_path / "bomb.h5", logical)
    out, err = process.communicate(timeout=60)
    assert out, err[-300:]
    assert float(out) < 100, f"refusing took {float(out):.0f} MiB"
