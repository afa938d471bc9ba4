"""A few seconds of the fuzz that `python tests/attacks/fuzz.py` runs for as long as one likes."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 10


@pytest.mark.slow
def test_fuzz(tmp_path):
    pytest.importorskip("atheris")
    command = [sys.executable, Path(__file__).with_name("fuzz.py"), "--seconds", str(SECONDS)]
    done = subprocess.run(
        [*command, "--corpus", tmp_path / "corpus"], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    runs = int(re.search(r"number_of_executed_units: (\d+)", done.stderr)[1])
    assert runs > 200  # of some 4,000: it did get to work
