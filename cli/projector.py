"""`mmfact projector inspect`: the projectors of a cache over time, or one of them with its spectrum."""

from __future__ import annotations

import os
from pathlib import Path

import click

from mmfact.cli.main import _common, _print_json, commands


@commands.group("projector")
def projector_group() -> None:
    """Look at cached projectors of projected DP-SGD.

    \b
    Example: mmfact projector inspect
    """


@projector_group.command("inspect")
@click.argument("path", required=False, type=click.Path())
@_common
def inspect_command(path: str | None, store: str, as_json: bool) -> None:
    """Show how the projectors of a cache developed, or one of them with its spectrum.

    \b
    PATH is a cache's directory or the .h5 file of one projector; by default `projectors` in the store.
    Eigenvalues and gap are in squared units of a gradient, energies and errors parts of 1, and a distance
    between subspaces is from 0 (the same) to 1 (some direction lost).
    Example: mmfact projector inspect
             mmfact projector inspect artifacts/projectors --json
    """
    from mmfact.cli import render_projector
    from mmfact.factorize.errors import ArtifactNotFound
    from mmfact.store.projectors import ProjectorCache, summarize_projector

    place = Path(store) / "projectors" if path is None else Path(path)
    if path is None or os.path.isdir(path):
        cache = ProjectorCache(place)
        entries = list(cache.entries())
        if as_json:
            _print_json(
                {"path": str(place), "projectors": [render_projector.entry_as_dict(entry) for entry in entries]}
            )
        else:
            render_projector.listing(place, entries)
        return
    if not os.path.exists(path):
        raise ArtifactNotFound(f"no projector cache and no projector at {path!r}; give a cache's directory or a file")
    projector = summarize_projector(place)
    if as_json:
        _print_json(render_projector.as_dict(projector))
    else:
        render_projector.projector(projector)
