"""What `mmfact list`, `inspect` and `import` print."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from mmfact.cli.render import _show, figures, percent, size

if TYPE_CHECKING:
    from mmfact.factorize.given import Given
    from mmfact.store.artifact import Artifact
    from mmfact.store.difference import ArrayDifference, Difference
    from mmfact.store.store import Entry

_ROTATIONS = {
    "QL of C": (
        "C was not lower-triangular with a positive diagonal, so it was rotated: C = Q C_hat by a QL factorization, "
        "and C_hat is stored. Every column keeps its norm: the sensitivity is unchanged, that of C as it was given"
    ),
    "LQ of B": (
        "C has more rows than steps, so B was rotated: B = B_hat Q by an LQ factorization, and C_hat = Q C is stored. "
        "No column grows, and B's error is kept: the sensitivity was {:.12g}"
    ),
}


def listing(store: str, entries: list[Entry], of: int) -> None:
    """One line an artifact; `of` says how many there were before any filter."""
    if not entries:
        if of:
            _show(f"none of the {of} artifacts in {store} is what was asked for; mmfact list shows them all")
        else:
            _show(f"no artifacts in {store}; make one with: mmfact compile --workload momentum --n 2048")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("ref", "workload", "n", "excess", "RMSE", "strategy", "size", "created"):
        right = column in ("n", "excess", "RMSE", "size")
        table.add_column(column, justify="right" if right else "left", overflow="fold")
    for entry in entries:
        if entry.artifact is None:
            table.add_row(
                entry.ref, Text("damaged: see mmfact verify", style="red"), "", "", "", "", size(entry.size), ""
            )
            continue
        certificate = entry.artifact.certificate
        table.add_row(
            entry.ref,
            entry.artifact.workload.kind,
            str(entry.artifact.n),
            percent(certificate.excess),
            f"{certificate.rmse:.4g}",
            entry.artifact.strategy.kind,
            size(entry.size),
            entry.created,
        )
    _show(table)


def entry_as_dict(entry: Entry) -> dict[str, Any]:
    """One line of `mmfact list --json`."""
    content: dict[str, Any] = {
        "ref": entry.ref,
        "created": entry.created,
        "file": entry.file,
        "size_bytes": entry.size,
        "error": entry.error,
    }
    if entry.artifact is not None:
        certificate = entry.artifact.certificate
        content |= {
            "digest": entry.artifact.digest,
            "workload": entry.artifact.workload.spec(),
            "strategy": entry.artifact.strategy.kind,
            "excess": certificate.excess,
            "rmse": certificate.rmse,
        }
    return content


def inspection(ref: str, artifact: Artifact, created: str | None) -> None:
    """The table of an artifact, with what made it, when, and where it lies."""
    table = figures(ref, artifact)
    for name, value in artifact.provenance.items():
        shown = ", ".join(f"{key} {item}" for key, item in value.items()) if isinstance(value, dict) else str(value)
        table.add_row(name.replace("_", " "), shown)
    if created is not None:
        table.add_row("created", created)
    if artifact.path is not None:
        table.add_row("file", f"{artifact.path.parent}, {size(artifact.path.stat().st_size)}")
        table.add_row("file digest", artifact.path.stem[65:])
    table.add_row("digest", artifact.digest)
    table.add_row("format", f"schema version {artifact.schema_version}")
    _show(table)


def difference(refs: tuple[str, str], artifacts: tuple[Artifact, Artifact], found: Difference) -> None:
    """One line a field or array that differs, then the names of the arrays that do not."""
    if found.equal:
        _show(f"{refs[0]} and {refs[1]} have the same content, digest {artifacts[0].digest}")
        return
    table = Table(box=None, pad_edge=False)
    for column in ("what", *refs):
        table.add_column(column, overflow="fold")
    for field in found.fields:
        table.add_row(field.name, _value(field.first), _value(field.second))
    for array in found.arrays:
        if array.differing is None:
            table.add_row(array.name, *("none" if shape is None else f"shape {shape}" for shape in array.shapes))
    if table.row_count:
        _show(table)
    for array in found.arrays:
        if array.differing is not None:
            _show(f"{array.name}: {_amount(array)}")
    if found.equal_arrays:
        _show(f"equal: {', '.join(found.equal_arrays)}")


def _value(value: Any) -> str:
    return "none" if value is None else str(value)  # of a float all digits: it may be the last that differs


def _amount(array: ArrayDifference) -> str:
    return (
        f"{array.differing} of {array.count} values differ, by a relative {array.largest:.3g} at most, the first at "
        f"step {array.step}"
    )


def difference_as_dict(
    refs: tuple[str, str], artifacts: tuple[Artifact, Artifact], found: Difference
) -> dict[str, Any]:
    """What differs as plain values."""
    return {
        "artifacts": [{"ref": ref, "digest": artifact.digest} for ref, artifact in zip(refs, artifacts, strict=True)],
        "equal": found.equal,
        "fields": [asdict(field) for field in found.fields],
        "arrays": [asdict(array) for array in found.arrays],
        "equal_arrays": list(found.equal_arrays),
    }


def rotation(given: Given) -> None:
    """What was done to a C that somebody gave."""
    if given.rotation in _ROTATIONS:
        _show(_ROTATIONS[given.rotation].format(given.sensitivity))
