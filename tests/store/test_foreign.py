"""Files that are none of mmfact's, under the names of artifacts. Crafted ones are in tests/attacks."""

from __future__ import annotations

import hashlib
from pathlib import Path

import h5py
import numpy as np
import pytest

from mmfact.factorize.errors import ArtifactCorrupt
from mmfact.store import format
from mmfact.store.store import read

HERE = Path("foreign.h5")


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
