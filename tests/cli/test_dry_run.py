"""`mmfact compile --dry-run`: an answer before anything is computed, and nothing written."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mmfact.factorize.compiler import Options
from mmfact.factorize.estimate import estimate
from mmfact.factorize.workload import momentum

DENSE = ("--strategy", "dense")
LOW_RANK = ("--strategy", "banded-low-rank")


@pytest.fixture
def dry(mmfact, store, monkeypatch):
    """Run a dry run, which may neither solve nor touch the store."""

    def run(*arguments):
        monkeypatch.setattr("mmfact.factorize.optimum.solve", lambda *a, **k: pytest.fail("it solved"))
        ran = mmfact("compile", *arguments, "--dry-run", "--store", store)
        assert not store.exists()
        assert ran.warnings == ()
        return ran

    return run


@pytest.mark.parametrize("n", [1, 2, 100, 2048, 8192])
@pytest.mark.parametrize("options", [(), DENSE, LOW_RANK, ("--method", "dense"), ("--method", "fixed-point")], ids=str)
def test_says_how_long_and_how_much(dry, n, options):
    """In words and as one object, whose ref is the one that compile would give."""
    command = ("--workload", "momentum", "--n", n, *options)
    content = dry(*command, "--json").json
    assert set(content) >= {"ref", "seconds", "memory_bytes"}
    assert content["seconds"] > 0
    assert isinstance(content["memory_bytes"], int)
    assert content["memory_bytes"] > 1 << 20
    ran = dry(*command)
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.count("\n") == 1
    assert content["ref"] in ran.out
    for word in ("about", "memory", "iB"):
        assert word in ran.out


def test_a_million_steps_in_a_few_seconds(dry):
    """It is asked before the machine is chosen: the answer itself must need no large machine."""
    begun = time.process_time()
    content = dry("--workload", "momentum", "--n", 1_000_000, "--json").json
    assert time.process_time() - begun < 4
    assert content["seconds"] > 60
    assert content["memory_bytes"] > 1 << 30


def test_a_matrix(dry, tmp_path):
    np.save(tmp_path / "m.npy", np.tril(np.ones((6, 6))))
    ran = dry("--workload", "custom", "--matrix", "m.npy", "--json")
    assert ran.code == 0
    assert ran.json["ref"].startswith("custom-n6-")


def test_the_library_says_the_same(dry):
    content = dry("--workload", "momentum", "--n", 500, "--json").json
    expected = estimate(momentum(500), Options())
    assert (content["seconds"], content["memory_bytes"]) == (expected.seconds, expected.memory)


def test_ref_is_the_one_that_compile_gives(mmfact, store):
    command = ("compile", "--workload", "sgd", "--n", 6, "--buffers", 2, "--dtype", "float64", "--json")
    dry = mmfact(*command, "--dry-run", "--store", store).json
    assert mmfact(*command, "--store", store).json["ref"] == dry["ref"]
    assert mmfact(*command, "--dry-run", "--name", "mine", "--store", store).json["ref"] == "mine"


def test_a_store_is_left_as_it_is(mmfact, vault, files):
    """Neither a new file nor a refusal: nothing of the store is looked at."""
    before = {name: (vault / name).stat().st_mtime_ns for name in files(vault)}
    command = ("compile", "--workload", "momentum", "--n", 16, *DENSE, "--name", "momentum", "--store", vault)
    assert mmfact(*command, "--dry-run").code == 0
    assert {name: (vault / name).stat().st_mtime_ns for name in files(vault)} == before


@pytest.mark.parametrize("ref", ["../up", "a b", ""])
def test_names_that_compile_would_refuse(dry, ref):
    """A dry run that is content with a command which compile then refuses has said nothing."""
    ran = dry("--workload", "sgd", "--n", 3, f"--name={ref}")
    assert ran.code == 2
    assert "cannot be a ref" in ran.err


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--workload", "momentum", "--n", 0), "n = 0"),
        (("--workload", "momentum", "--n", 10**12), "GiB"),
        (("--workload", "momentum"), "needs --n"),
        (("--workload", "momentum", "--n", 100_000, *DENSE), "74.5 GiB"),
        (("--workload", "momentum", "--n", 100_000, *LOW_RANK), "74.5 GiB"),
        (("--workload", "momentum", "--n", 100_000, "--method", "dense"), "74.5 GiB"),
        (("--workload", "momentum", "--n", 10, "--buffers", 6), "between 1 and 5"),
        (("--workload", "momentum", "--n", 10, "--beta", 1), "beta"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled_is_refused(dry, options, says):
    ran = dry(*options, "--json")
    assert ran.code == 2
    assert says in ran.json["error"]


@pytest.mark.parametrize(
    "options",
    [(), DENSE, (*DENSE, "--method", "dense"), (*LOW_RANK, "--bandwidth", 16, "--rank", 3), LOW_RANK],
    ids=str,
)
def test_the_estimate_is_of_the_right_size(mmfact, store, options):
    """Within a factor of ten of the processor time here, start-up left out: more would be no estimate."""
    command = ("compile", "--workload", "momentum", "--n", 384, *options, "--json", "--store", store)
    assert mmfact("compile", "--workload", "momentum", "--n", 24, *options, "--store", store).code in (0, 1)
    expected = mmfact(*command, "--dry-run").json["seconds"]
    begun = time.process_time()
    assert mmfact(*command).code in (0, 1)
    assert time.process_time() - begun < 10 * expected


def test_memory_is_written_as_a_person_would(dry):
    """1.02e+03 MiB is 1 GiB."""
    for n in range(3900, 4200, 20):
        assert "e+" not in dry("--workload", "momentum", "--n", n, *DENSE).out


def test_more_memory_than_there_is_is_refused_before_anything_is_computed(mmfact, store, monkeypatch):
    """The figure and the way out, exit code 2, nothing written."""
    monkeypatch.setattr("mmfact.factorize.machine.physical_memory", lambda: 1 << 26)
    ran = mmfact("compile", "--workload", "prefix-sum", "--n", 5000, "--store", store)
    assert ran.code == 2
    assert "MiB" in ran.err
    assert "smaller n" in ran.err
    assert not store.exists()
