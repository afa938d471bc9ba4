"""What every room's tests share.

Property tests draw the same examples at every run: a red run means a change, not luck.
Two workers share the tests (pytest-xdist; `-n 0` for one process, with a debugger), so:

- BLAS has one thread in each, set here before NumPy is loaded;
- every worker but the first has a kernel cache of its own. numba writes a cache's index before the code that it
  points to: of two processes that compile at once, one could load what the other has just replaced;
- what takes a minute comes first, so that it is not begun when the other worker has nothing left to do.

Tests marked slow are left out; `pytest -m slow` runs them, as .ci/run does.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ.setdefault(f"{library}_NUM_THREADS", "1")
worker = os.environ.get("PYTEST_XDIST_WORKER", "gw0")
if worker != "gw0":
    os.environ["NUMBA_CACHE_DIR"] = str(Path(__file__).parents[1] / ".pytest_cache" / f"numba-{worker}")

sys.path.append(str(Path(__file__).parent))  # the package `attacks`: forgeries, for tests elsewhere too

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name != "test_readme.py")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB; skipped where this user may not mount one."""
    where = tmp_path / "disk"
    where.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(where)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip("mounting a tmpfs is not allowed here")
    yield where
    subprocess.run(["umount", str(where)], check=True)
