"""Every snippet of the README and of the how-to pages runs: a reader who copies one must not be the first to try it.

The first two sh blocks, which make a virtual environment, are run word for word by `.ci/run`.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall(README)
SHELL = [text for language, text in BLOCKS if language == "sh"]
NUMBER = r"\d+(?:\.\d+)?"
PYTHON = [text for language, text in BLOCKS if language == "python"]
PAGES = ("training", "opacus", "jax", "privacy", "projection", "store")


def run(command, folder):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path}
    environment.pop("MMFACT_STORE", None)
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A working directory in which the README's commands have been typed in order."""
    where = tmp_path_factory.mktemp("readme")
    (where / "examples").symlink_to(ROOT / "examples")
    (where / "benchmarks").symlink_to(ROOT / "benchmarks")
    return where


def test_first_two_shell_blocks_are_the_two_commands():
    assert all(block.startswith("python3 -m venv .venv") for block in SHELL[:2])
    assert "mmfact compile" in SHELL[0]
    assert "pytest" in SHELL[1]


def test_all_blocks_have_a_language_that_is_tested_or_is_plain_output():
    assert {language for language, _ in BLOCKS} <= {"sh", "python", "text"}


def test_snippets_run_in_the_order_of_the_page(folder):
    assert len(SHELL) > 2
    assert PYTHON
    run(["bash", "-euc", "mmfact compile --workload momentum --n 2048"], folder)  # the first block without its install
    for language, text in BLOCKS:
        if language == "sh" and not text.startswith("python3 -m venv"):
            quick = text.replace("examples/digits.py", "examples/digits.py --epsilons 8 --seeds 2 --tuning-seeds 1")
            if "benchmarks/" in text or ".ci/" in text:
                continue  # measured by hand, recorded with their command; .ci/run runs lint and types
            run(["bash", "-euo", "pipefail", "-c", quick], folder)
        elif language == "python":
            run([sys.executable, "-c", text], folder)


def test_what_the_first_command_prints_is_what_the_page_shows(folder):
    """Up to what depends on library versions: the last digits, and excess, solver, size and digest."""
    printed = run(
        ["mmfact", "compile", "--workload", "momentum", "--n", "2048", "--name", "again"], folder
    ).splitlines()
    shown = next(text for language, text in BLOCKS if language == "text").splitlines()
    names = [line.split("  ")[0] for line in shown[1:]]
    assert names == [line.split("  ")[0] for line in printed[1:]]
    stable = {"workload", "loss", "RMSE", "max error", "lower bound", "sensitivity", "strategy"}
    for line, page in zip(printed[1:], shown[1:], strict=True):
        if line.split("  ")[0] in stable:
            assert re.sub(NUMBER, "#", line) == re.sub(NUMBER, "#", page)
            numbers, on_page = (list(map(float, re.findall(NUMBER, text))) for text in (line, page))
            assert numbers == pytest.approx(on_page, rel=1e-6)


@pytest.mark.parametrize("page", PAGES)
def test_the_snippets_of_a_how_to_page_run(page, tmp_path):
    """Commands first, then what is Python, joined: a reader types a page's snippets one after another."""
    blocks = FENCE.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    assert {language for language, _ in blocks} <= {"sh", "python", "text"}
    run(["mmfact", "compile", "--workload", "momentum", "--n", "2048"], tmp_path)
    for language, text in blocks:
        if language == "sh" and not re.search(r"pip install|python |torchrun", text):
            run(["bash", "-euo", "pipefail", "-c", text], tmp_path)
    script = "".join(text for language, text in blocks if language == "python")
    if script:
        run([sys.executable, "-c", script], tmp_path)
