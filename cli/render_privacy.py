"""What `mmfact privacy` prints: figures rounded up, each with its accountant and who takes part; then that in full."""

from __future__ import annotations

from decimal import ROUND_CEILING, Context
from typing import TYPE_CHECKING

from rich.table import Table

from mmfact.cli.render import _show, describe

if TYPE_CHECKING:
    from mmfact.factorize.accounting import PrivacyStatement
    from mmfact.factorize.regret import RegretBound
    from mmfact.store.artifact import Artifact


def statement(ref: str, artifact: Artifact, made: PrivacyStatement, regret: RegretBound | None) -> None:
    """The figures, the rival's beside them, and the assumptions in full."""
    table = Table(title=f"{ref}: {describe(artifact)}", box=None, pad_edge=False, title_justify="left")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("by", no_wrap=True)
    table.add_column("assumes", overflow="fold")
    ours = made.label
    table.add_row("noise multiplier", up(made.noise_multiplier), "as the runtime takes it", ours)
    for accountant, epsilon in made.epsilons.items():
        table.add_row(f"epsilon at delta {made.delta:g}", up(epsilon), accountant, ours)
    table.add_row("mu", up(made.mu), "Gaussian DP", ours)
    table.add_row("rho", up(made.rho), "zCDP", ours)
    if made.epochs != 1:
        kind = f"sensitivity over that of one participation, {made.sensitivity_kind}"
        table.add_row("sensitivity ratio", up(made.sensitivity_ratio), kind, ours)
    of = f"of an iterate: sigma x the artifact's {artifact.certificate.rmse:.5g}"
    table.add_row("RMSE at clip norm 1", up(made.rmse), of, ours)
    if regret is not None:
        table.add_row("mean regret", up(regret.total), "expected, at most", "convex losses, plain SGD, " + ours)
    if made.rival is not None:
        rival = made.rival
        for accountant, sigma in rival.noise_multipliers.items():
            shown = "none" if sigma is None else up(sigma)
            table.add_row("amplified DP-SGD: sigma", shown, accountant, rival.label)
        table.add_row("amplified DP-SGD: RMSE", up(rival.rmse), "of an iterate, at clip norm 1", rival.label)
    _show(table)
    _show(f"for dp-accounting: {made.event}")
    for assumption in made.assumptions:
        _show(f"assumed: {assumption}")
    if made.rival is not None:
        _show(f"assumed of amplified DP-SGD: {made.rival.assumption}")
    if made.epochs != 1:
        _show(f"note: the runtime cannot issue noise for {made.epochs} passes; this is the price only")
    _show(f"verdict: {made.verdict}")


def up(value: float) -> str:
    """Six significant digits, rounded up."""
    rounded = Context(prec=6, rounding=ROUND_CEILING).create_decimal(repr(value))
    return f"{float(rounded):.6g}"
