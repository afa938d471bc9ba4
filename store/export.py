"""An artifact as a .npz file for other programs; `mmfact.factorize.given` reads it back."""

from __future__ import annotations

import io
import json
import os
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import ArtifactError, CapacityError, StoreError
from mmfact.factorize.given import ABOUT
from mmfact.store.artifact import Artifact
from mmfact.store.publish import TEMPORARY_PREFIX, publish, sync_directory

LARGEST_MATRICES = 4096  # steps: 384 MiB for A, B and C


def export(artifact: Artifact, path: Path, *, coefficients: bool = False, replace: bool = False) -> list[str]:
    """Write an artifact to `path`, whole or not at all.

    The file holds A, B and C, float64 of shape (n, n); or, with `coefficients`, ``strategy.*`` as in an artifact
    (docs/format.md), ``multipliers`` (n,) and ``learning_rates`` (n,). The entry ``about`` is a JSON text: workload,
    strategy, certificate, provenance and digest. ``numpy.load(path, allow_pickle=False)`` reads all of it.

    Returns
    -------
    list of str
        The names of its entries.

    Raises
    ------
    CapacityError
        More than `LARGEST_MATRICES` steps, and not `coefficients`.
    ArtifactError
        `path` does not end in .npz, or is there already and `replace` is not set.
    StoreError
        The file system failed; nothing is left behind.
    """
    if path.suffix != ".npz":
        raise ArtifactError(f"{str(path)!r:.300} must end in .npz, which is what is written")
    if path.is_dir() or (path.exists() and not replace):
        raise ArtifactError(f"{path} is there already; choose another name, or replace a file with --force")
    if not path.parent.is_dir():
        raise ArtifactError(f"there is no directory {path.parent} to write {path.name} in; create it first")
    entries: dict[str, Any] = dict(sorted((_coefficients if coefficients else _matrices)(artifact).items()))
    entries[ABOUT] = np.array(json.dumps(about(artifact), sort_keys=True))
    buffer = io.BytesIO()
    np.savez(buffer, **entries)
    if replace:
        _replace(path, buffer.getvalue())
    elif not publish(path, buffer.getvalue()):
        raise ArtifactError(f"{path} has appeared meanwhile; choose another name, or replace the file with --force")
    return list(entries)


def about(artifact: Artifact) -> dict[str, Any]:
    """All of an artifact but its arrays, as plain values."""
    return {
        "digest": artifact.digest,
        "workload": artifact.workload.spec(),
        "participation": asdict(artifact.participation),
        "strategy": {"kind": artifact.strategy.kind, **artifact.strategy.parameters()},
        "certificate": {**asdict(artifact.certificate), "excess": artifact.certificate.excess},
        "provenance": artifact.provenance,
    }


def _matrices(artifact: Artifact) -> dict[str, npt.NDArray[Any]]:
    if artifact.n > LARGEST_MATRICES:
        raise CapacityError(
            f"A, B and C of {artifact.n} steps would take {3 * 8 * artifact.n**2 / 2**30:,.1f} GiB; they are written "
            f"up to n = {LARGEST_MATRICES}. Export what the strategy is made of instead, with --coefficients"
        )
    return {"A": artifact.A, "B": artifact.B, "C": artifact.C}


def _coefficients(artifact: Artifact) -> dict[str, npt.NDArray[Any]]:
    own = {f"strategy.{name}": array for name, array in artifact.strategy.coefficients().items() if array.size}
    return {**own, "multipliers": artifact.multipliers, "learning_rates": artifact.workload.learning_rates}


def _replace(path: Path, data: bytes) -> None:
    """Publish in a directory of its own beside `path`, then take its place."""
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=TEMPORARY_PREFIX) as aside:
            publish(Path(aside, path.name), data)
            os.replace(Path(aside, path.name), path)
        sync_directory(path.parent)
    except OSError as error:
        raise StoreError(f"{path} could not be replaced: {error.strerror or error}; it is as it was") from error
