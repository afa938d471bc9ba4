"""`mmfact list`, `inspect`, `export` and `import`: what a store holds, and the way in and out for other programs."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mmfact.cli.main import (
    _KINDS,
    AnswerIsNo,
    Least,
    _check_memory,
    _common,
    _finishing,
    _of_workload,
    _print_json,
    commands,
)
from mmfact.cli.main import _workload as described_workload

if TYPE_CHECKING:
    from mmfact.store.store import Entry

_STEPS = re.compile(r"(\d{1,18})(?:(:)(\d{1,18})?)?|:(\d{1,18})", re.ASCII)


class Steps(click.ParamType):
    """N, A:B, A: or :B, both ends included, as a `range`."""

    name = "steps"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> range:
        found = _STEPS.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r:.100} is not a number of steps or a range of them, as 2048, 512:4096, 512: or :4096")
        single, colon, last, alone = found.groups()
        first = int(single or 0)
        end = first if single and not colon else int(last or alone or sys.maxsize - 1)
        if end < first:
            self.fail(f"{value!r:.100} ends before it begins; give the smaller number first")
        return range(first, end + 1)


# What `--sort` sorts by; None where an artifact is damaged and nobody knows.
_ORDERS: dict[str, Callable[[Entry], Any]] = {
    "name": lambda entry: entry.ref,
    "n": lambda entry: entry.artifact and entry.artifact.n,
    "excess": lambda entry: None if entry.artifact is None else entry.artifact.certificate.excess,
    "created": lambda entry: entry.created or None,
    "size": lambda entry: entry.size or None,
}


@commands.command("list")
@click.option("--workload", "kind", type=_KINDS, help="Only of this kind.")
@click.option(
    "--n", "steps", type=Steps(), metavar="N|A:B", help="Only of N steps, or of A to B; A: and :B are ranges too."
)
@click.option(
    "--strategy", type=click.Choice(["buffered", "banded-low-rank", "dense"]), help="Only those streamed in this form."
)
@click.option(
    "--max-excess",
    type=Least(0),
    metavar="X",
    help="Only those with an excess of at most X, a fraction: 1e-4 is 0.01 %.",
)
@click.option(
    "--sort", "order", type=click.Choice(list(_ORDERS)), default="name", show_default=True, help="Smallest first."
)
@click.option("--reverse", is_flag=True, help="Largest first.")
@_common
def list_command(store: str, as_json: bool, order: str, reverse: bool, **filters: Any) -> None:
    """List the artifacts of the store.

    Damaged ones are always listed, whatever is asked for: nobody knows what they were. Sorted by something that nobody
    knows either, they come last.

    \b
    Example: mmfact list --workload momentum --n 512:4096 --sort excess
             mmfact list --max-excess 1e-6 --json
    """
    from mmfact.cli import render_catalog
    from mmfact.store.store import ArtifactStore

    artifacts = ArtifactStore(store)
    found = list(artifacts.entries())
    kept = [entry for entry in found if _asked_for(entry, **filters)]
    key = _ORDERS[order]
    known = sorted((entry for entry in kept if key(entry) is not None), key=key, reverse=reverse)
    entries = known + [entry for entry in kept if key(entry) is None]
    if as_json:
        _print_json({"store": store, "artifacts": [render_catalog.entry_as_dict(entry) for entry in entries]})
    else:
        render_catalog.listing(artifacts.location, entries, of=len(found))


def _asked_for(
    entry: Entry, kind: str | None, steps: range | None, strategy: str | None, max_excess: float | None
) -> bool:
    artifact = entry.artifact
    return artifact is None or (
        kind in (None, artifact.workload.kind)
        and (steps is None or artifact.n in steps)
        and strategy in (None, artifact.strategy.kind)
        and (max_excess is None or artifact.certificate.excess <= max_excess)
    )


@commands.command("inspect")
@click.argument("ref", required=False)
@click.option("--diff", "pair", nargs=2, metavar="A B", help="Instead of REF: show what differs between two artifacts.")
@_common
def inspect_command(ref: str | None, pair: tuple[str, str] | None, store: str, as_json: bool) -> None:
    """Show an artifact: workload, certificate, strategy, and what made it when; or what differs between two.

    \b
    REF is a name from `mmfact list`, a digest (8 digits or more) or the path of a .h5 file.
    Exit code of --diff: 0 when both have the same content, 1 when something differs.
    Example: mmfact inspect momentum-n2048
             mmfact inspect --diff momentum-n2048 momentum-n2048-buffers3
    """
    from mmfact.cli import render, render_catalog
    from mmfact.store.store import ArtifactStore

    artifacts = ArtifactStore(store)
    if pair is not None and ref is None:
        _diff(artifacts, pair, as_json)
        return
    if ref is None or pair is not None:
        raise click.UsageError("give one REF from `mmfact list`, or two with --diff A B")
    artifact = artifacts.load(ref)
    created = artifacts.created(ref) if ref in artifacts.refs() else None
    if as_json:
        origin = {"created": created, "schema_version": artifact.schema_version}
        _print_json({"ref": ref, **origin, **render.as_dict(artifact)})
    else:
        render_catalog.inspection(ref, artifact, created)


def _diff(artifacts: Any, pair: tuple[str, str], as_json: bool) -> None:
    from mmfact.cli import render_catalog
    from mmfact.store.difference import difference

    first, second = (artifacts.load(ref) for ref in pair)
    found = difference(first, second)
    if as_json:
        _print_json(render_catalog.difference_as_dict(pair, (first, second), found))
    else:
        render_catalog.difference(pair, (first, second), found)
    if not found.equal:
        raise AnswerIsNo(f"{pair[0]} and {pair[1]} differ")


@commands.command("export")
@click.argument("ref")
@click.option("-o", "--output", "path", type=click.Path(), required=True, metavar="FILE.npz", help="Where to write it.")
@click.option(
    "--coefficients", is_flag=True, help="What the strategy is made of, multipliers and rates, instead of A, B and C."
)
@click.option("--force", is_flag=True, help="Replace FILE.npz if it is there.")
@_common
def export_command(ref: str, path: str, coefficients: bool, force: bool, store: str, as_json: bool) -> None:
    """Write an artifact to a .npz file for other programs: A, B and C, float64 of shape (n, n), for n up to 4096.

    With --coefficients, for any n: the arrays strategy.* of docs/format.md, multipliers and learning_rates. Both hold
    the entry `about`, a JSON text: workload, certificate, digest. numpy.load(FILE, allow_pickle=False) reads all.

    \b
    Example: mmfact export momentum-n2048 -o momentum.npz
             mmfact export momentum-n2048 -o momentum.npz --coefficients --force
    """
    from mmfact.cli import render
    from mmfact.store.export import export
    from mmfact.store.store import ArtifactStore

    artifact = ArtifactStore(store).load(ref)
    with _finishing():
        names = export(artifact, Path(path), coefficients=coefficients, replace=force)
    size = Path(path).stat().st_size
    if as_json:
        _print_json({"ref": ref, "digest": artifact.digest, "path": path, "arrays": names, "size_bytes": size})
    else:
        click.echo(f"{path}: {', '.join(names)} of {ref}, {render.size(size)}")


@commands.command("import")
@click.argument("path", metavar="FILE", type=click.Path())
@click.option("--workload", "kind", required=True, type=_KINDS, help="What the optimizer does to the gradients.")
@_of_workload
@click.option("--name", metavar="REF", required=True, help="Ref of the artifact.")
@click.option("--dtype", type=click.Choice(["float32", "float64"]), help="Of the coefficients.  [default: float64]")
@_common
def import_command(path: str, name: str, dtype: str | None, store: str, as_json: bool, **choices: Any) -> None:
    """Bring in a strategy C of your own: certify it against the optimum of a workload, and store it.

    FILE is .npy, .csv or .npz: C alone, n x n or m x n with m > n and of full column rank; or a .npz that holds B and C
    with B C = A, to 1e-5 of A's largest entry; or one that `mmfact export` wrote. C need not be lower-triangular: it is
    brought to that form, which keeps the noise and never raises the sensitivity.

    \b
    Example: mmfact import C.npy --workload momentum --n 2048 --name my-own
             mmfact import factors.npz --workload custom --matrix A.npy --name my-own
    """
    from mmfact.cli import render, render_catalog
    from mmfact.factorize.compiler import Options, adopt
    from mmfact.factorize.estimate import estimate
    from mmfact.factorize.given import read_factors, strategy_of
    from mmfact.store.store import ArtifactStore

    artifacts = ArtifactStore(store)
    taken = artifacts.has(name) and not artifacts.lost(name)  # refuses a ref that no artifact may have
    workload = described_workload(choices)
    given = strategy_of(read_factors(Path(path)), workload, dtype)
    expected = estimate(workload, Options(strategy=given.strategy.kind))
    _check_memory(expected)
    artifacts.prepare()
    with render.working(f"certifying {name} ({render.estimate(expected)})") as on_progress:
        factorization = adopt(workload, given.strategy, on_progress=on_progress)
    with _finishing():
        artifact = artifacts.save(factorization, name)
    if as_json:
        brought = {"already_there": taken, "rotation": given.rotation, "given_sensitivity": given.sensitivity}
        _print_json({"ref": name, **brought, **render.as_dict(artifact)})
    else:
        render.artifact(name, artifact, note="already there" if taken else None)
        render_catalog.rotation(given)
