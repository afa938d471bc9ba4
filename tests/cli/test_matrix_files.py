"""Matrix and schedule files of any content: refused in one message or read, never a traceback."""

from __future__ import annotations

import io
import subprocess
import sys
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

GOOD = np.tril(np.random.default_rng(8).uniform(0.5, 1, (5, 5)))


def npy(array) -> bytes:
    out = io.BytesIO()
    np.save(out, array)
    return out.getvalue()


def npz(array, compressed=False) -> bytes:
    out = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(out, matrix=array)
    return out.getvalue()


def headed(header: str, version: int = 1, data: bytes = b"") -> bytes:
    """A .npy file with a header of our own."""
    text = header.encode("latin1")
    return b"\x93NUMPY" + bytes([version, 0]) + len(text).to_bytes(2 if version == 1 else 4, "little") + text + data


def described(shape: str) -> bytes:
    return headed(f"{{'descr': '<f8', 'fortran_order': False, 'shape': {shape}, }}\n", data=bytes(64))


@pytest.fixture
def attempt(mmfact, tmp_path, files):
    """Compile from a file of these bytes; returns the exit code after checking what was said."""

    def run(suffix: str, data: bytes) -> int:
        path = tmp_path / f"matrix{suffix}"
        path.write_bytes(data)
        store = tmp_path / "store"
        ran = mmfact("compile", "--workload", "custom", "--matrix", path, "--store", store)
        assert ran.code in (0, 2), ran.err
        if ran.code:
            assert ran.err.startswith("mmfact: ")
            assert ran.out == ""
        return ran.code

    return run


CASES = {
    "text named npy": (".npy", b"1,2,3\n"),
    "text named npz": (".npz", b"1,2,3\n"),
    "npy named csv": (".csv", npy(GOOD)),
    "empty npy": (".npy", b""),
    "empty npz": (".npz", b""),
    "magic alone": (".npy", b"\x93NUMPY"),
    "header unfinished": (".npy", headed("(((")),
    "header no dictionary": (".npy", headed("5\n")),
    "header of a call": (".npy", headed("__import__('os').getpid()\n")),
    "header with nothing": (".npy", headed("{}\n")),
    "future version": (".npy", headed("{}\n", version=9)),
    "shape immense": (".npy", described("(1000000000000000000000000000000, 2)")),
    "shape of petabytes": (".npy", described("(10000000, 10000000)")),
    "shape of 12 GiB": (".npy", described("(40000, 40000)")),
    "shape negative": (".npy", described("(-3, -3)")),
    "shape true": (".npy", described("(True, 1)")),
    "shape a word": (".npy", described("('a', 1)")),
    "shape no tuple": (".npy", described("3")),
    "data missing": (".npy", npy(GOOD)[:-1]),
    "directory of the zip missing": (".npz", npz(GOOD)[:-10]),
    "zip of a text": (".npz", None),
    "zip of a folder": (".npz", None),
}


def zip_of(name: str, data: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        archive.writestr(name, data)
    return out.getvalue()


CASES["zip of a text"] = (".npz", zip_of("readme.txt", b"hello"))
CASES["zip of a folder"] = (".npz", zip_of("folder/", b""))


@pytest.mark.parametrize("name", CASES)
def test_files_that_hold_something_else(attempt, name):
    assert attempt(*CASES[name]) == 2


@pytest.mark.parametrize(("suffix", "data"), [(".npz", npy(GOOD)), (".npy", npz(GOOD))], ids=["npy", "npz"])
def test_npy_and_npz_under_each_others_name(attempt, suffix, data):
    """NumPy tells them apart by content; refused or read, but not a traceback."""
    attempt(suffix, data)


# VmHWM and not ru_maxrss, which a child inherits from pytest.
MEASURE = r"""
import re, sys
from pathlib import Path
from mmfact.cli.main import main
try: main(["compile", "--workload", "custom", "--matrix", sys.argv[1], "--store", sys.argv[2]])
except SystemExit as end:
    print(end.code, int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) / 1024)
"""


def test_archive_that_unpacks_to_gigabytes(tmp_path):
    """8 MiB of zip that hold 15000 x 15000 zeros: the header says so, before 1.7 GiB are unpacked."""
    header = "{'descr': '<f8', 'fortran_order': False, 'shape': (15000, 15000), }\n"
    with (
        zipfile.ZipFile(tmp_path / "m.npz", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("m.npy", "w", force_zip64=True) as file,
    ):
        file.write(headed(header))
        for _ in range(100):
            file.write(bytes(18 * 10**6))
    assert (tmp_path / "m.npz").stat().st_size < 1 << 23
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path / "m.npz"), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        check=True,
    )
    code, peak = done.stdout.split()
    assert code == "2"
    assert "1.7 GiB" in done.stderr
    assert float(peak) < 500, f"refusing took {peak} MiB"


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("start", [60, 140, 200])
def test_damaged_archive(attempt, compressed, start):
    """A download that went wrong in the middle."""
    data = bytearray(npz(np.tril(np.random.default_rng(0).random((30, 30))) + np.eye(30), compressed))
    for i in range(start, start + 400):
        data[i] ^= 0x55
    assert attempt(".npz", bytes(data)) == 2


@given(data=st.data())
@settings(
    deadline=None, derandomize=True, max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_damaged_matrix_files(attempt, data):
    """Any one byte of an honest file changed: a refusal in words, or a matrix of other numbers."""
    suffix, content = data.draw(
        st.sampled_from(
            [
                (".npy", npy(GOOD)),
                (".npz", npz(GOOD)),
                (".npz", npz(GOOD, compressed=True)),
                (".csv", "\n".join(",".join(f"{x:.17g}" for x in row) for row in GOOD).encode()),
            ]
        )
    )
    position = data.draw(st.integers(0, len(content) - 1))
    value = data.draw(st.integers(0, 255))
    attempt(suffix, content[:position] + bytes([value]) + content[position + 1 :])


@given(header=st.text(st.characters(codec="latin1"), max_size=80), version=st.sampled_from([1, 2]))
@settings(
    deadline=None, derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_header(attempt, header, version):
    assert attempt(".npy", headed(header + "\n", version)) == 2


csv_like = st.text(alphabet="0123456789.,-+eE#\n naif\t;'\"\\\x00é", max_size=40)


@given(text=csv_like)
@settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_csv(attempt, text):
    attempt(".csv", text.encode())


@given(text=csv_like)
@settings(
    deadline=None, derandomize=True, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_schedule_file(mmfact, tmp_path, text):
    (tmp_path / "rates.txt").write_bytes(text.encode())
    ran = mmfact(
        "compile", "--workload", "sgd", "--n", 2, "--lr-schedule", tmp_path / "rates.txt", "--store", tmp_path / "s"
    )
    assert ran.code in (0, 1, 2)
    assert "Traceback" not in ran.err
    if ran.code == 2:
        assert ran.err.startswith("mmfact: ")


@given(text=st.text(alphabet="cooldwnstep:=,.0123456789e-+faictunlervymp/ ", max_size=40))
@settings(
    deadline=None, derandomize=True, max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_any_schedule_name(mmfact, tmp_path, text):
    ran = mmfact("compile", "--workload", "sgd", "--n", 2, f"--lr-schedule={text}", "--store", tmp_path / "s")
    assert ran.code in (0, 1, 2)
    if ran.code == 2:
        assert ran.err.startswith("mmfact: ")
