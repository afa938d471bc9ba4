"""What is wrong with a damaged artifact: which dataset differs.

The HDF5 library is not made for damaged files, so it meets them in a process of its own, with bounded memory and time.
`python -m mmfact.store.diagnosis FILE NAME` is that process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_SECONDS = 30.0
_MEMORY = 4 << 30  # bytes
_NOTHING = "HDF5 cannot read what is left of it"


def diagnose(path: Path, name: str) -> str:
    """Say which dataset of the artifact file at `path` differs from what its spec and `name` call for."""
    command = [sys.executable, "-m", "mmfact.store.diagnosis", str(path), name]
    try:
        child = subprocess.run(command, capture_output=True, timeout=_SECONDS, check=True)
        found = json.loads(child.stdout[-10_000:])
        return _said(**{kind: [f"{dataset!r:.60}" for dataset in found[kind]] for kind in ("differing", "unreadable")})
    except (OSError, subprocess.SubprocessError, ValueError, KeyError, TypeError):
        return _NOTHING


def _said(differing: list[str], unreadable: list[str]) -> str:
    if "'spec'" in differing + unreadable:
        return "Its spec is damaged, so that the other datasets cannot be compared with it"
    parts = [f"its dataset {dataset} differs from its spec" for dataset in differing]
    parts += [f"its dataset {dataset} cannot be read" for dataset in unreadable]
    text = " and ".join(parts) or "all its datasets are as they were, only HDF5's own structures differ"
    return text[0].upper() + text[1:]


def _examine(data: bytes, logical_digest: str) -> dict[str, list[str]]:
    """Datasets whose values differ from the spec, or that cannot be read."""
    import h5py

    found: dict[str, list[str]] = {"differing": [], "unreadable": []}
    with h5py.File(h5py.h5f.open_file_image(data)) as file:

        def read(name: str) -> Any:
            try:
                return file[name][...].tobytes()
            except (OSError, RuntimeError, KeyError, ValueError, TypeError, AttributeError, MemoryError):
                found["unreadable"].append(name)
                return None

        spec = read("spec")
        if spec is None:
            return found
        if hashlib.sha256(spec).hexdigest() != logical_digest:
            found["differing"].append("spec")
            return found
        for name, entry in json.loads(spec)["datasets"].items():
            values = read(name)
            if values is not None and hashlib.sha256(values).hexdigest() != entry["sha256"]:
                found["differing"].append(name)
    return found


def _limit_memory() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):  # Windows has no such limits
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    from mmfact.store.format import LARGEST_FILE

    _limit_memory()
    file = Path(sys.argv[1])
    if file.stat().st_size > LARGEST_FILE:
        sys.exit(1)
    print(json.dumps(_examine(file.read_bytes(), sys.argv[2][:64])))
