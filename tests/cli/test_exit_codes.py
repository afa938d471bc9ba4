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

import numpy as np
import pytest

from mmfact.store import publish
from mmfact.store import store as stores

SMALL = ("compile", "--workload", "sgd", "--n", 3)
DENSE = ("--strategy", "dense")
DENSE = ("--strategy", "dense")
LOW_RANK = ("--strategy", "banded-low-rank")


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
    for command in (("list",), ("inspect", "sgd-n3"), ("verify", "sgd-n3"), ("compare", "sgd-n3")):
        assert mmfact(*command, "--store", store).code == 0


@pytest.mark.parametrize(
    "strategy",
    [
        (),
        ("--buffers", 1),
        ("--dtype", "float64"),
        DENSE,
        (*DENSE, "--dtype", "float32"),
        LOW_RANK,
        (*LOW_RANK, "--bandwidth", 1, "--rank", 2),
    ],
    ids=str,
)
def test_already_there(mmfact, store, monkeypatch, strategy):
    """The README's command, run twice: 0, says so, and computes nothing."""
    command = ("compile", "--workload", "prefix-sum", "--n", 4, "--tolerance", 0.1, *strategy)
    first = mmfact(*command, "--json", "--store", store).json
    monkeypatch.setattr("mmfact.factorize.compiler.compile", lambda *a, **k: pytest.fail("it was computed again"))
    ran = mmfact(*command, "--store", store)
    assert ran.code == 0
    assert "already there" in ran.out
    again = mmfact(*command, "--json", "--store", store).json
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


UNREACHED = {
    "float32 is too coarse": ("--dtype", "float32", "--tolerance", 1e-10),
    "beyond rounding": ("--dtype", "float64", "--tolerance", 1e-300),
    "too few buffers": ("--buffers", 1, "--tolerance", 1e-6),
    "too little rank": (*LOW_RANK, "--bandwidth", 2, "--rank", 1, "--tolerance", 1e-9),
    "dense in float32": (*DENSE, "--dtype", "float32", "--tolerance", 1e-10),
    "dense beyond rounding": (*DENSE, "--tolerance", 1e-300),
    "low rank in float32": (*LOW_RANK, "--tolerance", 1e-10),
}


@pytest.mark.parametrize("options", UNREACHED.values(), ids=UNREACHED)
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


ADVICE = {
    "too few buffers": (("--buffers", 1, "--tolerance", 1e-5), "--buffers", ()),
    "float32": (("--tolerance", 1e-9), "--dtype float64", ("--dtype", "float64")),
    "float32 with many buffers": (("--buffers", 8, "--tolerance", 1e-9), "--dtype float64", ("--dtype", "float64")),
    "float32 dense": ((*DENSE, "--dtype", "float32", "--tolerance", 1e-9), "--dtype float64", DENSE),
    "too little rank": (
        (*LOW_RANK, "--bandwidth", 2, "--rank", 1, "--tolerance", 1e-7),
        "left out",
        LOW_RANK,
    ),
    "buffers and float32": (("--buffers", 2, "--tolerance", 1e-9), "float64", ("--dtype", "float64")),
    "rank and float32": (
        (*LOW_RANK, "--bandwidth", 4, "--tolerance", 1e-9),
        "float64",
        (*LOW_RANK, "--dtype", "float64"),
    ),
}


@pytest.mark.parametrize("name", ADVICE)
def test_advice_is_a_way_out(mmfact, store, name):
    """The message names the excess and what to do; doing it reaches the tolerance."""
    options, says, better = ADVICE[name]
    command = ("compile", "--workload", "momentum", "--n", 20)
    ran = mmfact(*command, *options, "--json", "--store", store)
    message = complaint(ran, 1)
    excess = ran.json["certificate"]["excess"]
    assert f"the excess {excess:.3g} is above the tolerance {options[-1]:g}" in message
    assert (store / "refs" / f"{ran.json['ref']}.json").is_file()
    assert mmfact("verify", ran.json["ref"], "--store", store).code == 0
    assert says in message
    again = mmfact(*command, *better, "--tolerance", options[-1], "--json", "--store", store)
    assert (again.code, again.err) == (0, "")


def test_advice_is_true_of_a_matrix(mmfact, store, tmp_path):
    """The message must not send to float64 where float64 changes nothing."""
    for seed in range(6):
        np.save(tmp_path / "m.npy", np.tril(np.random.default_rng(seed).normal(size=(7, 7))) + 4 * np.eye(7))
        command = ("compile", "--workload", "custom", "--matrix", "m.npy", "--store", store)
        ran = mmfact(*command)
        if ran.code == 1 and "use --dtype float64" in ran.err:
            assert mmfact(*command, "--dtype", "float64").code == 0


def test_more_buffers_than_help_are_said(mmfact, store):
    """Asked for 16, the numerical rank allows fewer: fewer are stored, and a note says so."""
    command = ("compile", "--workload", "momentum", "--n", 32, "--buffers", 16, "--store", store)
    for _ in range(2):
        ran = mmfact(*command)
        assert ran.code == 0
        assert "of 16 buffers asked for" in ran.out.splitlines()[0]
    assert mmfact(*command, "--json").json["strategy"]["buffers"] < 16


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


@pytest.mark.parametrize("command", ["verify", "inspect", "compare"])
@pytest.mark.parametrize("version", [0, -1, True, "2", None, 2.0])
def test_schema_versions_that_are_none(mmfact, vault, store, forge, command, version):
    forge(vault, "buffered", store, "odd", lambda spec: spec.update(schema_version=version))
    assert "schema version" in complaint(mmfact(command, "odd", "--store", store), 1 if command == "verify" else 2)


def test_version_1_knew_no_buffers(mmfact, vault, store, forge):
    """A file that says it is of version 1 and holds what that version had not."""
    forge(vault, "buffered", store, "odd", lambda spec: spec.update(schema_version=1))
    complaint(mmfact("verify", "odd", "--store", store), 1)


def test_verify_of_a_newer_file(mmfact, vault, store, forge):
    forge(vault, "sgd", store, "newer", lambda spec: spec.update(schema_version=3))
    assert "Upgrade" in complaint(mmfact("verify", "newer", "--store", store), 1)


# --- 2 ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
@pytest.mark.parametrize("command", ["inspect", "compare"])
def test_inspect_of_a_damaged_file(mmfact, damaged, command, json):
    ran = mmfact(command, "ref", *json, "--store", damaged)
    assert "damaged" in complaint(ran, 2)
    if json:
        assert ran.json["exit_code"] == 2
    else:
        assert ran.out == ""


def test_compile_over_a_damaged_file(mmfact, damaged):
    """It is moved away, that is said, and the artifact is made again."""
    ran = mmfact(*SMALL, *DENSE, "--name", "ref", "--store", damaged)
    assert ran.code == 0
    assert "is damaged" in ran.err
    assert "compiled again now" in ran.err
    assert len(list((damaged / "quarantine").iterdir())) == 1
    assert mmfact("verify", "ref", "--store", damaged).code == 0


def test_compile_something_else_over_a_damaged_file(mmfact, damaged):
    """Nobody knows any more what the ref stood for: it is not given to another artifact."""
    assert "mmfact remove ref" in mmfact(*SMALL, "--name", "ref", "--store", damaged).err
    assert mmfact("verify", "ref", "--store", damaged).code == 1
    assert mmfact("remove", "ref", "--store", damaged).code == 0
    assert mmfact(*SMALL, "--name", "ref", "--store", damaged).code == 0


def test_compile_over_a_damaged_file_after_removing_it(mmfact, damaged):
    """The way out, walked: remove the file and the ref, compile again, verify."""
    for path in (*damaged.glob("*.h5"), damaged / "refs" / "ref.json"):
        path.unlink()
    assert mmfact(*SMALL, "--name", "ref", "--store", damaged).code == 0
    assert mmfact("verify", "ref", "--store", damaged).code == 0


def test_compile_under_another_name_over_a_damaged_file(mmfact, damaged):
    """Same content, same file name: exit 0 must mean that it can be loaded."""
    assert mmfact(*SMALL, *DENSE, "--name", "other", "--store", damaged).code == 0
    assert mmfact("verify", "other", "--store", damaged).code == 0
    assert mmfact("verify", "ref", "--store", damaged).code == 0


@pytest.mark.parametrize("command", ["inspect", "verify", "compare"])
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
    "two refs to compare": ("compare", "a", "b"),
    "unknown workload to compare": ("compare", "--workload", "nesterov", "--n", 3),
    "dry run of a comparison": ("compare", *SMALL[1:], "--dry-run"),
    "name of a comparison": ("compare", *SMALL[1:], "--name", "x"),
    "buffers a word": (*SMALL, "--buffers", "few"),
    "buffers a fraction": (*SMALL, "--buffers", 1.5),
    "bandwidth a word": (*SMALL, *LOW_RANK, "--bandwidth", "wide"),
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
    for command in ("inspect", "verify", "compare"):
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


STAGES = {
    "buffered": [
        "estimate.estimate",
        "optimum.solve",
        "compiler.buffered.build",
        "construct.buffered._factor_structured",
        "construct.buffered._factor_segment",
        "construct.buffered._balance",
        "construct.buffered._diagonalise",
        "construct.buffered._ship",
        "certificate.certify",
    ],
    "banded-low-rank": [
        "compiler.banded_low_rank.build",
        "construct.banded_low_rank.fit",
        "construct.banded_low_rank._equalised",
        "construct.banded_low_rank._Search.ship",
        "certificate.certify",
    ],
    "dense": ["optimum.solve", "compiler.dense.build", "certificate.certify"],
}


@pytest.mark.parametrize(
    ("strategy", "where"), [(strategy, where) for strategy, stages in STAGES.items() for where in stages]
)
def test_interrupt_at_any_time(mmfact, store, files, monkeypatch, strategy, where):
    def interrupt(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(f"mmfact.factorize.{where}", interrupt)
    for command in (SMALL, ("compare", *SMALL[1:])):
        ran = mmfact(*command, "--strategy", strategy, "--store", store)
        if command[0] == "compare" and where.startswith("estimate"):
            assert ran.code == 0
            continue
        assert (ran.code, ran.out) == (130, "")
        assert ran.err.strip().startswith("mmfact: interrupted")
        assert ran.err.strip().count("\n") == 0
    assert files(store) == []


@pytest.mark.parametrize("name", ["identity", "honaker-full", "optimal-toeplitz", "sqrt-toeplitz, columns normalised"])
def test_interrupt_of_a_comparison(mmfact, vault, monkeypatch, name):
    """During any of the baselines."""
    from mmfact.factorize import comparison

    def interrupted(workload, participation, *, on_progress):
        def on_name(current):
            if current == name:
                raise KeyboardInterrupt

        return baselines(workload, participation, on_progress=on_name)

    baselines = comparison.baselines.baselines
    monkeypatch.setattr(comparison.baselines, "baselines", interrupted)
    ran = mmfact("compare", "buffered", "--store", vault)
    assert (ran.code, ran.out) == (130, "")
    assert ran.err.strip() == "mmfact: interrupted; no partial file was left"


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
