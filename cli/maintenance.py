"""`mmfact remove`, `gc` and `migrate`: what keeps a store in order."""

from __future__ import annotations

from typing import Any

import click

from mmfact.cli.main import Least, _common, _print_json, commands


@commands.command("remove")
@click.argument("refs", metavar="REF...", nargs=-1, required=True)
@_common
def remove_command(refs: tuple[str, ...], store: str, as_json: bool) -> None:
    """Remove refs; `mmfact gc` then removes artifacts that no ref names.

    \b
    Example: mmfact remove momentum-n2048
    """
    from mmfact.store.store import ArtifactStore

    artifacts, removed = ArtifactStore(store), []
    artifacts.check_removable()
    for ref in refs:  # all are there, or none is removed
        if not artifacts.has(ref):
            artifacts.remove(ref)  # says what it looks like
    for ref in refs:
        removed.append({"ref": ref, "artifact": artifacts.remove(ref) or None})
        if not as_json:
            click.echo(f"removed the ref {ref}")
    if as_json:
        _print_json({"removed": removed})
    else:
        click.echo("The artifacts are still there; `mmfact gc` removes those that no ref names.")


@commands.command("gc")
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option(
    "--older-than",
    type=Least(0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Leave what is younger: a writer may be at work on it.",
)
@_common
def gc_command(dry_run: bool, older_than: float, store: str, as_json: bool) -> None:
    """Remove what killed writers left behind, and artifacts that no ref names.

    \b
    Damaged artifacts in the store's quarantine stay, and so do cached projectors.
    Example: mmfact gc --dry-run
             mmfact gc --older-than 1
    """
    from mmfact.cli import render
    from mmfact.store.gc import collect
    from mmfact.store.schema import shown
    from mmfact.store.store import ArtifactStore

    found = collect(ArtifactStore(store), older_than=older_than, dry_run=dry_run)
    if as_json:
        _print_json(
            {
                "store": store,
                "dry_run": dry_run,
                "leftovers": list(found.leftovers),
                "unnamed": list(found.unnamed),
                "bytes": found.size,
                "quarantined": list(found.quarantined),
            }
        )
        return
    for name in (*found.leftovers, *found.unnamed):
        click.echo(f"{'would remove' if dry_run else 'removed'} {shown(name, 200)}")
    count = len(found.leftovers) + len(found.unnamed)
    done = "would be removed" if dry_run else "removed"
    click.echo(f"{count} file{'s' * (count != 1)} {done}, {render.size(found.size)}")
    if found.quarantined:
        click.echo(f"{len(found.quarantined)} damaged in {store}/quarantine: restore them from copies, or delete them")


@commands.command("migrate")
@click.argument("refs", metavar="[REF]...", nargs=-1)
@click.option("--name", metavar="REF", help="Ref of the new artifact, for one REF.  [default: REF-v<version>]")
@_common
def migrate_command(refs: tuple[str, ...], name: str | None, store: str, as_json: bool) -> None:
    """Write artifacts of earlier format versions again in the newest one; without REF, all of them.

    \b
    The old ones stay: they are read for ever, and runs that began with one go on with that one only.
    Example: mmfact migrate
             mmfact migrate momentum-n2048 --name momentum-new
    """
    from mmfact.factorize.errors import ArtifactError, RefError
    from mmfact.store.artifact import SCHEMA_VERSION
    from mmfact.store.migration import migrate, migrated_ref
    from mmfact.store.store import ArtifactStore

    if name is not None and len(refs) != 1:
        raise RefError(f"--name {name!r} is for one artifact; give one REF, or leave --name out")
    artifacts = ArtifactStore(store)
    lines: list[dict[str, Any]] = []
    failed: list[str] = []
    for ref in refs or artifacts.refs():
        try:
            made = migrate(artifacts, ref, name)
        except ArtifactError as error:  # the others are none the worse for it
            failed.append(str(error))
            continue
        if made is not None:
            lines.append({"ref": ref, "migrated": name or migrated_ref(ref), "digest": made.digest})
    if failed:
        done = f"; migrated: {', '.join(line['ref'] for line in lines)}" if lines else ""
        raise ArtifactError(f"{'; '.join(failed)}{done}")
    if as_json:
        _print_json({"store": store, "schema_version": SCHEMA_VERSION, "migrated": lines})
        return
    for line in lines:
        click.echo(f"{line['ref']} is now also {line['migrated']}, in version {SCHEMA_VERSION}")
    if not lines:
        click.echo(f"nothing to do: all have version {SCHEMA_VERSION}, the newest, or are migrated already")
