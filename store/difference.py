"""What differs between two artifacts, field by field and array by array."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfact.store.artifact import Artifact


@dataclass(frozen=True)
class FieldDifference:
    """A field that has another value in the second artifact; None where an artifact has no such field."""

    name: str
    first: Any
    second: Any


@dataclass(frozen=True)
class ArrayDifference:
    """An array that both or one of the artifacts have, and how far the two are from each other.

    Attributes
    ----------
    name : str
    shapes : pair of tuples
        Of the array in each artifact; None where it has none.
    count : int
        Values in it; those of the larger, if the shapes differ.
    differing : int or None
        How many of them differ; None if the shapes do.
    largest : float or None
        max |a - b| / max(|a|, |b|), 2 at most (values of opposite sign).
    step : int or None
        The first step, row of the array or of its triangle, with a value that differs.
    """

    name: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    count: int
    differing: int | None
    largest: float | None
    step: int | None


@dataclass(frozen=True)
class Difference:
    """What differs, and only that; `equal_arrays` names the arrays that do not."""

    fields: tuple[FieldDifference, ...]
    arrays: tuple[ArrayDifference, ...]
    equal_arrays: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether the two have the same content."""
        return not self.fields and not self.arrays


def difference(first: Artifact, second: Artifact) -> Difference:
    """Compare two artifacts in everything that their digests cover."""
    fields, others = _fields(first), _fields(second)
    changed = tuple(
        FieldDifference(name, fields.get(name), others.get(name))
        for name in dict.fromkeys([*fields, *others])
        if fields.get(name) != others.get(name)
    )
    mine, theirs = _arrays(first), _arrays(second)
    names = list(dict.fromkeys([*mine, *theirs]))
    compared = [_compare(name, mine.get(name), theirs.get(name)) for name in names]
    arrays = tuple(one for one in compared if one.differing != 0)
    equal = tuple(one.name for one in compared if one.differing == 0)
    if not changed and not arrays and first.digest != second.digest:  # the form of a number, or the sign of a zero
        changed = (FieldDifference("digest", first.digest, second.digest),)
    return Difference(changed, arrays, equal)


def _fields(artifact: Artifact) -> dict[str, Any]:
    """Everything but the arrays, by dotted names."""
    nested = {
        "schema_version": artifact.schema_version,
        "workload": artifact.workload.spec(),
        "participation": asdict(artifact.participation),
        "strategy": {
            "kind": artifact.strategy.kind,
            "dtype": artifact.strategy.dtype.name,
            **artifact.strategy.parameters(),
        },
        "certificate": {**asdict(artifact.certificate), "excess": artifact.certificate.excess},
        "provenance": artifact.provenance,
    }
    return dict(_flat("", nested))


def _flat(prefix: str, nested: dict[str, Any]) -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for name, value in nested.items():
        pairs += _flat(f"{prefix}{name}.", value) if isinstance(value, dict) else [(prefix + name, value)]
    return pairs


def _arrays(artifact: Artifact) -> dict[str, npt.NDArray[Any]]:
    workload = artifact.workload
    own = {"learning_rates": workload.learning_rates} if workload.matrix is None else {"matrix": workload.matrix}
    coefficients = {f"strategy.{name}": array for name, array in artifact.strategy.coefficients().items()}
    return {**own, "multipliers": artifact.multipliers, **coefficients}


def _compare(name: str, a: npt.NDArray[Any] | None, b: npt.NDArray[Any] | None) -> ArrayDifference:
    shapes = (None if a is None else a.shape, None if b is None else b.shape)
    if a is None or b is None or a.shape != b.shape:
        count = max(array.size for array in (a, b) if array is not None)
        return ArrayDifference(name, shapes, count, None, None, None)
    where = np.flatnonzero(a != b)
    if not where.size:
        return ArrayDifference(name, shapes, a.size, 0, 0.0, None)
    left, right = a.reshape(-1)[where].astype(np.float64), b.reshape(-1)[where].astype(np.float64)
    # each divided first: a difference of huge values of opposite sign could overflow
    scale = np.maximum(np.abs(left), np.abs(right))
    largest = float(np.abs(left / scale - right / scale).max())
    place = int(where[0])
    step = (math.isqrt(8 * place + 1) - 1) // 2 if name == "strategy.packed" else place // (a.size // len(a))
    return ArrayDifference(name, shapes, a.size, int(where.size), largest, step)
