"""What the room promises about itself: no asserts, no way round to the solver, an empty front door."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import mmfact.factorize

ROOM = Path(mmfact.factorize.__file__).parent
FILES = sorted(ROOM.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_no_asserts_and_no_printing(path):
    """Asserts are gone under python -O; printing belongs to the command line."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Assert), f"{path}:{node.lineno}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{path}:{node.lineno}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOM)))
def test_imports_nothing_of_the_other_rooms(path):
    """factorize -> nothing of ours."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert not name.startswith("mmfact") or name.startswith("mmfact.factorize"), f"{path}: {name}"


def _loaded_by(statement):
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {statement}; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_front_door_is_empty():
    """Importing the package drags in nothing."""
    loaded = _loaded_by("import mmfact.factorize")
    assert not loaded & {"numpy", "scipy", "numba", "cvxpy"}
    assert "mmfact.factorize.optimum" not in loaded


@pytest.mark.parametrize("module", ["strategy.dense", "participation", "privacy", "certificate"])
def test_what_the_runtime_imports_brings_no_solver(module):
    """The training process must not load the solver, scipy.optimize or cvxpy for a sensitivity or an epsilon."""
    loaded = _loaded_by(f"import mmfact.factorize.{module}")
    ours = {name for name in loaded if name.startswith("mmfact.factorize.")}
    assert not ours & {
        "mmfact.factorize.optimum",
        "mmfact.factorize.compiler",
        "mmfact.factorize.construct",
        "mmfact.factorize.dual_structured",
        "mmfact.factorize.reference",
    }
    assert not loaded & {"scipy.optimize", "cvxpy", "click", "torch", "jax", "matplotlib"}


def test_compiler_does_not_import_cvxpy():
    """cvxpy is slow to import and wanted by one function only."""
    assert "cvxpy" not in _loaded_by("import mmfact.factorize.compiler, mmfact.factorize.reference")
