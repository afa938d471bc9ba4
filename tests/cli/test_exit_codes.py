"""design.md section 8: 0 done, 1 the answer is no, 2 bad input, 3 the machine failed, 130 Ctrl-C."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mmfact.store import publish
from mmfact.store import store as stores

SMALL = ("compile", "--workload", "sgd", "--n", 3)


def complaint(ran, code: int) -> str:
    """The one message of a failure; fails unless it is one line on stderr that begins with our name."""
    assert ran.code == code, (ran.code, ran.err)
    assert ran.err.startswith("mmfact: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    return ran.err


# --- 0 ---------------------------------------------------------------------------------------------


def test_done(mmfact, store):
    assert mmfact(*SMALL, "--store", store).code == 0
    for command in (("list",), ("inspect", "sgd-n3"), ("verify", "sgd-n3")):
        assert mmfact(*command, "--store", store).code == 0


def test_already_there(mmfact, store, monkeypatch):
    """The README's command, run twice: 0, says so, and computes nothing."""
    first = mmfact(*SMALL, "--json", "--store", store).json
    monkeypatch.setattr("mmfact.factorize.compiler.compile", lambda *a, **k: pytest.fail("it was computed again"))
    ran = mmfact(*SMALL, "--store", store)
    assert ran.code == 0
    assert "already there" in ran.out
    again = mmfact(*SMALL, "--json", "--store", store).json
    assert again.pop("already_there") is True
    first.pop("already_there")
    assert again == first


def test_already_there_under_another_name(mmfact, store, files):
    """A second ref to the same content: one file, two refs."""
    assert mmfact(*SMALL, "--store", store).code == 0
    assert mmfact(*SMALL, "--name", "mine", "--store", store).code == 0
    assert len([name for name in files(store) if name.endswith(".h5")]) == 1


def test_two_requests_at_the_same_time(script, store):
    """Four shells, one command, different thread settings: as if run one after the other, all succeed.

    The last digits of a solve depend on how BLAS splits its sums; the second to finish must not be told that
    the ref "names something else" when it names what was asked for.
    """
    command = [str(script), "compile", "--workload", "momentum", "--n", "300", "--store", str(store)]
    started = [
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OPENBLAS_NUM_THREADS": threads, "OMP_NUM_THREADS": threads},
        )
        for threads in ("1", "2", "1", "2")
    ]
    for one in started:
        _, err = one.communicate(timeout=120)
        assert one.returncode == 0, err


def test_reader_that_goes_away(script, vault):
    """`mmfact list | head -1` is no failure."""
    reader = subprocess.Popen(["true"], stdin=subprocess.PIPE)
    reader.wait()
    ran = subprocess.run(
        [str(script), "list", "--json", "--store", str(vault)],
        stdout=reader.stdin,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    reader.stdin.close()
    assert ran.returncode == 0
    assert "Traceback" not in ran.stderr
    assert "Error" not in ran.stderr


# --- 1 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [("--dtype", "float32", "--tolerance", 1e-10), ("--tolerance", 1e-300)],
    ids=["float32 is too coarse", "beyond rounding"],
)
def test_tolerance_not_reached(mmfact, store, options):
    """The artifact is stored all the same; asked again, the answer is the same."""
    command = ("compile", "--workload", "momentum", "--n", 12, *options, "--store", store)
    for there in (False, True):
        ran = mmfact(*command, "--json")
        assert "above the tolerance" in complaint(ran, 1)
        content = ran.json
        assert content["tolerance_reached"] is False
        assert content["already_there"] is there
        assert content["certificate"]["excess"] > options[-1]
    assert mmfact("verify", content["ref"], "--store", store).code == 0
    assert "above the tolerance" in complaint(mmfact(*command), 1)


def test_tolerance_not_reached_by_few_iterations(mmfact, store, monkeypatch):
    """The plain fixed point, stopped early: its excess is what it is, and the exit code says so."""
    monkeypatch.setattr("mmfact.factorize.optimum._FIXED_POINT_STEPS", 2)
    ran = mmfact("compile", "--workload", "momentum", "--n", 64, "--method", "fixed-point", "--json", "--store", store)
    assert "above the tolerance" in complaint(ran, 1)
    assert ran.json["certificate"]["excess"] > 1e-4
    assert ran.json["certificate"]["iterations"] == 2


def test_advice_does_not_repeat_what_was_done(mmfact, store):
    """ "Use --method auto" is no way out for somebody who did."""
    ran = mmfact(*SMALL, "--tolerance", 1e-300, "--method", "auto", "--store", store)
    assert "--method auto" not in complaint(ran, 1)


def test_verify_of_a_damaged_file(mmfact, damaged):
    ran = mmfact("verify", "ref", "--store", damaged)
    assert "damaged" in complaint(ran, 1)
    assert ran.out == ""
    ran = mmfact("verify", "ref", "--json", "--store", damaged)
    complaint(ran, 1)
    assert ran.json["passed"] is False
    assert "damaged" in ran.json["error"]


def test_verify_of_a_damaged_ref(mmfact, damaged):
    (damaged / "refs" / "ref.json").chmod(0o644)
    (damaged / "refs" / "ref.json").write_text("{")
    assert "damaged" in complaint(mmfact("verify", "ref", "--store", damaged), 1)


def test_verify_of_a_newer_file(mmfact, vault, store, forge):
    forge(vault, "sgd", store, "newer", lambda spec: spec.update(schema_version=3))
    assert "Upgrade" in complaint(mmfact("verify", "newer", "--store", store), 1)


# --- 2 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_inspect_of_a_damaged_file(mmfact, damaged, json):
    ran = mmfact("inspect", "ref", *json, "--store", damaged)
    assert "damaged" in complaint(ran, 2)
    if json:
        assert ran.json["exit_code"] == 2
    else:
        assert ran.out == ""


def test_compile_over_a_damaged_file(mmfact, damaged):
    """The message must name a way out that is not what was just done: "compile it again"."""
    message = complaint(mmfact(*SMALL, "--name", "ref", "--store", damaged), 2)
    assert "remove" in message
    assert "compile the artifact again or restore" not in message


def test_compile_over_a_damaged_file_after_removing_it(mmfact, damaged):
    """The way out, walked: remove the file and the ref, compile again, verify."""
    for path in (*damaged.glob("*.h5"), damaged / "refs" / "ref.json"):
        path.unlink()
    assert mmfact(*SMALL, "--name", "ref", "--store", damaged).code == 0
    assert mmfact("verify", "ref", "--store", damaged).code == 0


def test_compile_under_another_name_over_a_damaged_file(mmfact, damaged):
    """Same content, same file name: exit 0 must mean that it can be loaded."""
    ran = mmfact(*SMALL, "--name", "other", "--store", damaged)
    assert ran.code != 0 or mmfact("verify", "other", "--store", damaged).code == 0


@pytest.mark.parametrize("command", ["inspect", "verify"])
def test_unknown_ref(mmfact, vault, command):
    ran = mmfact(command, "momentm", "--store", vault)
    assert "did you mean momentum" in complaint(ran, 2)
    ran = mmfact(command, "momentm", "--json", "--store", vault)
    assert ran.json == {"error": ran.err.removeprefix("mmfact: ").strip(), "exit_code": 2}


def test_ref_that_names_something_else(mmfact, store, files):
    assert mmfact(*SMALL, "--name", "ref", "--store", store).code == 0
    before = files(store)
    for other in (
        ("compile", "--workload", "sgd", "--n", 4),
        (*SMALL, "--tolerance", 1e-3),
        (*SMALL, "--dtype", "float64"),
        (*SMALL, "--method", "dense"),
        (*SMALL, "--strategy", "dense"),
        (*SMALL, "--strategy", "dense", "--dtype", "float32"),
        (*SMALL, "--strategy", "banded-low-rank"),
        (*SMALL, "--buffers", 1),
        ("compile", "--workload", "prefix-sum", "--n", 3),
    ):
        ran = mmfact(*other, "--name", "ref", "--store", store)
        assert "already names something else" in complaint(ran, 2)
    assert files(store) == before


@pytest.mark.parametrize("ref", ["../up", "a/b", "-", "..", ".x", "a b", "", "a" * 300])
def test_refused_names(mmfact, store, files, ref):
    """Before the solve, not after; an empty one is refused too, not taken for none."""
    ran = mmfact(*SMALL, f"--name={ref}", "--store", store)
    assert "cannot be a ref" in complaint(ran, 2)
    assert not store.exists()


@pytest.mark.parametrize("ref", ["x" * 300 + ".h5", "y/" * 3000 + "z.h5"], ids=["long name", "long path"])
def test_long_paths_are_not_found(mmfact, store, ref):
    """Not the machine's failure."""
    assert "no artifact" in complaint(mmfact("inspect", ref, "--store", store), 2)


USAGE = {
    "no command": (),
    "unknown command": ("frobnicate",),
    "unknown option": ("list", "--frobnicate"),
    "no workload": ("compile", "--n", 3),
    "unknown workload": ("compile", "--workload", "nesterov", "--n", 3),
    "n a word": ("compile", "--workload", "sgd", "--n", "many"),
    "n a fraction": ("compile", "--workload", "sgd", "--n", 1.5),
    "unknown strategy": (*SMALL, "--strategy", "magic"),
    "unknown dtype": (*SMALL, "--dtype", "float16"),
    "unknown method": (*SMALL, "--method", "magic"),
    "tolerance a word": (*SMALL, "--tolerance", "small"),
    "ref missing": ("inspect",),
    "two refs": ("verify", "a", "b"),
}


@pytest.mark.parametrize("name", USAGE)
def test_bad_usage(mmfact, name):
    """click's own message, on stderr, exit code 2."""
    ran = mmfact(*USAGE[name])
    assert ran.code == 2
    assert ran.out == ""
    assert "Usage: mmfact" in ran.err
    assert "Traceback" not in ran.err


# --- 3 ---------------------------------------------------------------------------------------------


def test_store_that_is_a_file(mmfact, tmp_path):
    (tmp_path / "file").write_text("mine")
    for command in (SMALL, ("list",), ("inspect", "x"), ("verify", "x")):
        ran = mmfact(*command, "--store", tmp_path / "file")
        assert "is a file" in complaint(ran, 3)
    ran = mmfact(*SMALL, "--json", "--store", tmp_path / "file" / "below")
    assert "Not a directory" in complaint(ran, 3)
    assert ran.json["exit_code"] == 3
    assert (tmp_path / "file").read_text() == "mine"


def test_unwritable_store_before_the_solve(mmfact, store, monkeypatch):
    """After an hour of solving it would be too late to find out."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("mmfact.factorize.compiler.compile", lambda *a, **k: pytest.fail("it solved first"))
    assert "not writable" in complaint(mmfact(*SMALL, "--store", store), 3)


def test_read_only_file_system(mmfact, small_disk):
    """Root ignores permission bits, not a read-only mount."""
    assert mmfact(*SMALL, "--store", small_disk / "store").code == 0
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        ran = mmfact("compile", "--workload", "sgd", "--n", 4, "--store", small_disk / "store")
        assert "not writable" in complaint(ran, 3)
        assert mmfact("verify", "sgd-n3", "--store", small_disk / "store").code == 0
        assert mmfact(*SMALL, "--store", small_disk / "store").code == 0  # already there: nothing to write
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_full_disk(mmfact, small_disk, files):
    """A real one. Nothing partial is left, and with space again the same command succeeds."""
    store = small_disk / "store"
    store.mkdir()
    space = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(space.f_bavail * space.f_frsize - 8192))
    ran = mmfact(*SMALL, "--json", "--store", store)
    assert "space" in complaint(ran, 3)
    assert ran.json["exit_code"] == 3
    assert files(store) == []
    (small_disk / "filler").unlink()
    assert mmfact(*SMALL, "--store", store).code == 0


def test_disk_that_fills_up_while_writing(mmfact, store, files, monkeypatch):
    def full(handle):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(publish.os, "fsync", full)
        assert "No space left" in complaint(mmfact(*SMALL, "--store", store), 3)
    assert files(store) == []
    assert mmfact(*SMALL, "--store", store).code == 0


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_stdout_on_a_full_disk(script, vault, json):
    """`mmfact list --json > report.json` where the disk is full: 3 and a message, no traceback."""
    with open("/dev/full", "w") as full:
        ran = subprocess.run(
            [str(script), "list", *json, "--store", str(vault)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ran.returncode == 3
    assert "No space left" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_file_that_cannot_be_read(mmfact, vault, monkeypatch):
    """An I/O error is the machine's failure, not the artifact's."""

    def fail(self):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "read_bytes", fail)
    for command in ("inspect", "verify"):
        assert "Input/output error" in complaint(mmfact(command, "momentum", "--store", vault), 3)


def test_too_little_memory(mmfact, store, monkeypatch):
    def exhaust(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("mmfact.factorize.optimum.solve", exhaust)
    assert "memory" in complaint(mmfact(*SMALL, "--store", store), 3)


# --- 130 -------------------------------------------------------------------------------------------


def test_interrupt_in_the_middle_of_a_solve(script, store, files):
    """A real Ctrl-C, sent once the solver has reported progress on the terminal."""
    leader, follower = pty.openpty()
    started = subprocess.Popen(
        [
            *(str(script), "compile", "--workload", "prefix-sum", "--n", "8192", "--method", "fixed-point"),
            *("--tolerance", "1e-12", "--store", str(store)),
        ],
        stdout=subprocess.PIPE,
        stderr=follower,
        text=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(follower)
    shown = b""
    while b"iteration" not in shown:
        shown += os.read(leader, 4096)
    started.send_signal(signal.SIGINT)
    sent = time.monotonic()
    while True:
        try:
            part = os.read(leader, 4096)
        except OSError:
            break
        shown += part
    out, _ = started.communicate(timeout=60)
    os.close(leader)
    assert started.returncode == 130
    assert time.monotonic() - sent < 10
    text = shown.decode()
    assert "mmfact: interrupted" in text
    assert "Traceback" not in text
    assert out == ""
    assert files(store) == []


@pytest.mark.parametrize("where", ["optimum.solve", "certificate.certify", "compiler.dense.build"])
def test_interrupt_at_any_time(mmfact, store, files, monkeypatch, where):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mmfact.factorize.{where}", interrupt)
    ran = mmfact(*SMALL, "--store", store)
    assert ran.code == 130
    assert ran.err.strip().startswith("mmfact: interrupted")
    assert files(store) == []


def test_interrupt_while_the_file_is_written(mmfact, store, files, monkeypatch):
    def interrupt(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    assert mmfact(*SMALL, "--store", store).code == 130
    assert files(store) == []


# --- checks are raise, never assert ----------------------------------------------------------------

OPTIMIZED = """
import sys
assert False, "python -O was not in force"
from mmfact.cli.main import main
def code(*arguments):
    try: main(list(arguments))
    except SystemExit as end: return end.code
store = ["--store", sys.argv[1]]
print("codes", code("compile", "--workload", "momentum", "--n", "3", "--beta", "1", *store),
      code("compile", "--workload", "sgd", "--n", "0", *store),
      code("compile", "--workload", "sgd", "--n", "3", "--name", "../x", *store),
      code("inspect", "ref", *store), code("verify", "ref", *store), code("verify", "wrong", *store))
"""


def test_optimized_python_checks_the_same(mmfact, damaged, vault, forge):
    """PYTHONOPTIMIZE strips asserts; a check that was one would be gone."""

    def wrong(spec):
        certificate = spec["certificate"]
        certificate.update(loss=certificate["loss"] * 0.9, lower_bound=certificate["lower_bound"] * 0.9)
        certificate["excess"] = certificate["loss"] / certificate["lower_bound"] - 1

    forge(vault, "sgd", damaged, "wrong", wrong)
    ran = subprocess.run(
        [sys.executable, "-O", "-c", OPTIMIZED, str(damaged)], capture_output=True, text=True, check=False
    )
    assert "codes 2 2 2 2 1 1" in ran.stdout, ran.stderr


def test_every_error_of_the_store_has_its_code(mmfact, vault, monkeypatch):
    """StoreError is the machine's (3); every other of ours is 2."""
    from mmfact.factorize import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.MmfactError)]
    assert len(kinds) > 10
    for kind in kinds:

        def fail(self, ref, kind=kind):
            raise kind("told you")

        monkeypatch.setattr(stores.ArtifactStore, "load", fail)
        ran = mmfact("inspect", "momentum", "--store", vault)
        assert ran.code == (3 if kind is errors.StoreError else 2)
        assert ran.err == "mmfact: told you\n"
