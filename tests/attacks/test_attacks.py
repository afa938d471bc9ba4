"""Every attack is refused in its own words, in bounded memory, in under a second, and none ends the process."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from attacks import chunks, forgery, structures, texts
from attacks.forgery import HONEST
from attacks.generators import ATTACKS
from mmfact.store import format

# In one child, which may have 8 GiB of addresses. VmHWM and not ru_maxrss, which it would inherit from pytest; each
# attack's peak is counted from where it began. The first, honest, file takes the time of imports and kernels.
CHILD = r"""
import json, re, resource, sys, time
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
from mmfact.factorize.errors import MmfactError
from mmfact.store import format
status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
def peak(): return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) / 1024
for line in sys.stdin:
    name, digest = json.loads(line)
    data = Path(name).read_bytes()
    clear.write_text("5")
    before, start, outcome = peak(), time.process_time(), ("", "read")
    try:
        format.decode(data, Path("attack.h5"), digest)
    except Exception as error:
        outcome = (type(error).__name__, str(error))
    print(json.dumps([*outcome, time.process_time() - start, peak() - before]), flush=True)
"""
MODULES = (structures, chunks, texts)  # which declare them

LARGEST_FILE = 8 << 20  # bytes: an attack costs its author little
LARGEST_PEAK = 64.0  # MiB
LONGEST = 1.0  # seconds of processor time


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """By attack: [error, message, seconds, MiB]; attacks that ended the process have none."""
    folder: Path = tmp_path_factory.mktemp("attacks")
    files = [(name, maker().data, maker().artifact.digest) for name, maker in HONEST.items()]
    files += [(name, *one.build()) for name, one in ATTACKS.items()]
    lines = []
    for number, (_, data, digest) in enumerate(files):
        path = folder / str(number)
        path.write_bytes(data)
        lines.append(json.dumps([str(path), digest]))
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input="\n".join(lines), capture_output=True, text=True, timeout=300, check=False
    )
    found = [json.loads(line) for line in done.stdout.splitlines()]
    names = [name for name, _, _ in files]
    result = dict(zip(names, found, strict=False))
    result |= {
        name: [f"the process ended with {done.returncode}", done.stderr[-500:], 0, 0] for name in names[len(found) :]
    }
    result["sizes"] = {name: len(data) for name, data, _ in files}
    return result


@pytest.mark.parametrize("name", HONEST)
def test_the_forger_is_honest_when_nothing_is_forged(outcomes, name):
    """Otherwise every attack could be refused for the wrong reason."""
    assert outcomes[name][1] == "read"
    forger = HONEST[name]()
    data, logical = forger.build()
    assert forgery.same(format.decode(data, Path("honest.h5"), logical), forger.artifact)


@pytest.mark.parametrize("name", ATTACKS)
def test_attack_is_refused(outcomes, name):
    error, message, seconds, peak = outcomes[name]
    assert error == ATTACKS[name].error.__name__, message
    assert re.search(ATTACKS[name].words, message), message
    assert message.isprintable()
    assert len(message) < 1000
    assert outcomes["sizes"][name] < LARGEST_FILE
    assert seconds < LONGEST
    assert peak < LARGEST_PEAK
