"""How quickly the command line answers, and what imports pull in."""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys

import numpy as np
import pytest


def modules_after(statement: str) -> set[str]:
    """The modules loaded by a statement in a fresh interpreter, beyond those of an empty one."""
    script = f"import sys; before = set(sys.modules)\n{statement}\nprint(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def loaded(modules: set[str], *names: str) -> list[str]:
    return [name for name in names if any(m == name or m.startswith(name + ".") for m in modules)]


def test_help_is_quick(script):
    """Under 0.3 s, median of 5 (the issue): --help is what a newcomer types first.

    In seconds of its own: it waits for nothing, but other tests run beside it.
    """
    times = []
    for _ in range(5):
        begun = os.times()
        done = subprocess.run([str(script), "--help"], capture_output=True, text=True, check=True)
        ended = os.times()
        times.append(ended.children_user + ended.children_system - begun.children_user - begun.children_system)
        assert "Usage: mmfact" in done.stdout
    assert statistics.median(times) < 0.3, times


def test_help_loads_no_numerics():
    """Why it is quick, checked without a clock."""
    modules = modules_after(
        "from mmfact.cli.main import main\n"
        "import contextlib, io\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main(['--help'])"
    )
    assert "click" in modules
    assert not loaded(modules, "numpy", "scipy", "numba", "h5py", "rich", "cvxpy", "cryptography")


COMMANDS = ["compile", "compare", "list", "inspect", "verify", "selftest", "privacy", "projector inspect"]
COMMANDS += ["export", "import", "gc", "migrate", "remove"]


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_every_command_has_an_example(mmfact, command):
    """An example that names the command itself, and every option explained."""
    ran = mmfact(*command.split(), "--help")
    assert ran.code == 0
    assert ran.err == ""
    assert re.search(rf"Example: mmfact {command}\b", ran.out)
    assert "--json" in ran.out
    assert "--store" in ran.out
    assert mmfact(*command.split(), "-h").out == ran.out


def test_help_lists_every_command(mmfact):
    out = mmfact("--help").out
    assert "Example: mmfact compile" in out
    for command in COMMANDS:
        assert re.search(rf"^  {command.split()[0]} +\S", out, re.M)


def test_examples_in_the_help_work(mmfact, tmp_path):
    """Every line of help that starts with an example is a command that runs (n made small)."""
    np.save("C.npy", np.eye(8))
    store = ("--store", tmp_path / "s")
    for command in COMMANDS:
        example = re.search(rf"Example: mmfact ({command}.*)", mmfact(*command.split(), "--help").out)[1].split()
        if command in ("compile", "import"):
            example[example.index("2048")] = "8"
            ran = mmfact(*example, *store)
            assert ran.code == 0
            if command == "compile":
                assert mmfact(*example, "--name", "momentum-n2048", *store).code == 0
        else:
            assert mmfact(*example, *store).code == 0, example


def test_version(mmfact):
    import mmfact as package

    assert mmfact("--version").out.split() == ["mmfact,", "version", package.__version__]


def test_importing_the_runtime_loads_no_solver():
    """A trainer imports this: no optimizers, no command line, no frameworks (the issue)."""
    modules = modules_after("import mmfact.noise, mmfact; mmfact.NoiseStream")
    assert "mmfact.noise.stream" in modules
    assert loaded(modules, "scipy.optimize", "cvxpy", "click", "rich", "matplotlib", "sklearn", "dp_accounting") == []
    assert loaded(modules, "torch", "opacus", "jax", "optax", "jax_privacy") == []
    assert loaded(modules, "mmfact.factorize.optimum", "mmfact.factorize.compiler", "mmfact.cli") == []


def test_importing_the_package_loads_nearly_nothing():
    modules = modules_after("import mmfact")
    assert loaded(modules, "numpy", "scipy", "numba", "h5py", "click", "rich", "cryptography") == []
    assert {m for m in modules if m.startswith("mmfact")} == {"mmfact"}


def test_loading_an_artifact_loads_no_solver(vault):
    """`mmfact.load` in a trainer."""
    modules = modules_after(f"import mmfact; mmfact.load('momentum', store={str(vault)!r})")
    assert loaded(modules, "scipy.optimize", "cvxpy", "click", "rich", "torch", "jax", "matplotlib") == []
    assert loaded(modules, "mmfact.factorize.optimum", "mmfact.factorize.compiler", "mmfact.cli") == []


def test_compiling_does_not_load_cvxpy():
    """The reference solver takes a second to import; only `verify --reference` pays for it."""
    modules = modules_after("import mmfact; mmfact.compile, mmfact.ArtifactStore; import mmfact.factorize.verification")
    assert "mmfact.factorize.compiler" in modules
    assert loaded(modules, "cvxpy", "click", "rich", "matplotlib") == []
