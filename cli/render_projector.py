"""What `mmfact projector inspect` prints: one line a refresh for each run, or one projector with its spectrum."""

from __future__ import annotations

from dataclasses import asdict
from datetime import UTC, datetime
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from mmfact.cli.render import _show, _table, size

if TYPE_CHECKING:
    from mmfact.store.projectors import ProjectorEntry, ProjectorSummary

# What a record may hold, by the heading of its column.
_MEASURED = {
    "explained": "explained",
    "gap": "gap",
    "held-out explained": "held_out_explained",
    "held-out error": "held_out_error",
    "to previous": "distance_to_previous",
}
_SHOWN = (1, 2, 3, 5, 10, 20, 30, 50, 70, 100, 150, 200, 300, 500, 1000)  # of a spectrum


def listing(place: Path, entries: list[ProjectorEntry]) -> None:
    """One table for each run or tag, one line a projector, in the order of steps."""
    if not entries:
        below = place / "projectors"
        hint = f"; there is a cache at {below}" if below.is_dir() else ""
        _show(f"no projectors in {place.absolute()}{hint}")
        return
    for scope, group in groupby(entries, key=lambda entry: entry.scope):
        lines = list(group)
        parted = any(line.part != "0-of-1" for line in lines)
        table = Table(title=_whose(scope), box=None, pad_edge=False, title_justify="left")
        for column in ("step", *(["part"] if parted else []), "kind", "k", "m", "p", *_MEASURED, "size", "last used"):
            table.add_column(column, justify="left" if column in ("part", "kind", "last used") else "right")
        for line in lines:
            first = [str(line.step), *([line.part] if parted else [])]
            last = [size(line.size), _time(line.used)]
            if line.projector is None:
                nothing = [""] * (3 + len(_MEASURED))
                table.add_row(*first, Text("damaged", style="red"), *nothing, *last)
                continue
            key, record = line.projector.key, line.projector.record
            measured = [_plain(record.get(name)) for name in _MEASURED.values()]
            table.add_row(*first, key.kind, str(key.k), str(key.m), str(key.p), *measured, *last)
        _show(table)
        for line in lines:
            if line.error is not None:
                _show(f"damaged: {line.error}")
    _show(f"{len(entries)} projectors, {size(sum(line.size for line in entries))}")


def projector(stored: ProjectorSummary) -> None:
    """One projector: what it depends on, what was measured, and its spectrum."""
    key = stored.key
    table = _table(f"{_whose(key.scope)}, step {key.step}")
    table.add_row("vectors", f"{key.k} of {key.p} elements, {key.storage}, {key.kind}, part {key.part}")
    table.add_row("public", f"{key.m} examples, SHA-256 {key.public}")
    table.add_row("parameters", f"SHA-256 {key.parameters}" if key.parameters else "whatever the tag stands for")
    for name, value in stored.record.items():
        table.add_row(_plain(name.replace("_", " ")), _plain(value))
    table.add_row("size", size(stored.size))
    table.add_row("last used", _time(stored.used))
    _show(table)
    spectrum = stored.values.get("spectrum", stored.values.get("eigenvalues"))
    if spectrum is None or spectrum.ndim != 1 or not spectrum.size:
        return
    lines = Table(title="spectrum", box=None, pad_edge=False, title_justify="left")
    for column in ("number", "eigenvalue", "of the first", ""):
        lines.add_column(column, justify="left" if not column else "right")
    largest = float(spectrum[0])
    for number in sorted({*_SHOWN, key.k, key.k + 1, spectrum.size}):
        if number <= spectrum.size:
            value = float(spectrum[number - 1])
            note = "the last vector" if number == key.k else "the first left out" if number == key.k + 1 else ""
            lines.add_row(str(number), f"{value:.4g}", f"{value / largest:.3g}" if largest > 0 else "-", note)
    _show(lines)


def as_dict(stored: ProjectorSummary) -> dict[str, Any]:
    """A projector without its vectors."""
    values = {name: array.tolist() for name, array in stored.values.items()}
    return {**_summary(stored), "path": str(stored.path), "size_bytes": stored.size, "values": values}


def entry_as_dict(entry: ProjectorEntry) -> dict[str, Any]:
    """One line of the listing in JSON."""
    content = {"file": entry.path.name, "scope": entry.scope, "step": entry.step, "part": entry.part}
    content |= {"size_bytes": entry.size, "last_used": _time(entry.used), "error": entry.error}
    return content | ({} if entry.projector is None else _summary(entry.projector))


def _summary(stored: ProjectorSummary) -> dict[str, Any]:
    return {**asdict(stored.key), "last_used": _time(stored.used), "record": stored.record}


def _whose(scope: str) -> str:
    return scope.replace("-", " ", 1) if scope.startswith("tag-") else f"run {scope}"


def _time(seconds: float) -> str:
    """A file may claim any time; before year 1 and after 9999 there is no date for it."""
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return "-"


def _plain(value: Any) -> str:
    """A record's value for a table: whoever wrote the file, nothing in it steers a terminal."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}"
    return "".join(sign if sign.isprintable() else "?" for sign in str(value))[:200]
