"""`mmfact privacy`: what a stream guarantees, what is assumed, and what amplified DP-SGD would need."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from mmfact.cli.main import _common, _print_json, commands


@commands.command("privacy")
@click.argument("ref")
@click.option("--noise-multiplier", type=float, metavar="S", help="sigma, as the runtime takes it; or give --epsilon.")
@click.option("--epsilon", type=float, metavar="E", help="Find the noise multiplier for it.")
@click.option("--delta", type=float, required=True, metavar="D", help="Less than 1 / (number of examples).")
@click.option(
    "--epochs",
    type=int,
    default=1,
    show_default=True,
    metavar="K",
    help="What K passes in the same order would cost; the runtime is for one.",
)
@click.option("--lipschitz", type=float, metavar="L", help="For a regret bound: of the losses, and the clip norm.")
@click.option("--distance", type=float, metavar="R", help="For a regret bound: from the start to the best point.")
@click.option("--learning-rate", type=float, metavar="ETA", help="For a regret bound: constant.")
@click.option("--dimension", type=int, metavar="P", help="For a regret bound: number of parameters.")
@_common
def privacy_command(ref: str, store: str, as_json: bool, **choices: Any) -> None:
    """State epsilon, or the noise multiplier for it, with what is assumed and what amplified DP-SGD would need.

    \b
    Example: mmfact privacy momentum-n2048 --epsilon 2 --delta 1e-6
             mmfact privacy momentum-n2048 --noise-multiplier 1 --delta 1e-6 --epochs 2 --json
    """
    from mmfact.cli import render_privacy
    from mmfact.factorize.accounting import privacy_statement
    from mmfact.factorize.errors import PrivacyError
    from mmfact.factorize.regret import regret_bound
    from mmfact.store.store import ArtifactStore

    names = ("lipschitz", "distance", "learning_rate", "dimension")
    given = {name: choices.pop(name) for name in names}
    missing = [f"--{name.replace('_', '-')}" for name, value in given.items() if value is None]
    if 0 < len(missing) < len(names):
        raise PrivacyError(f"a regret bound also needs {', '.join(missing)}; give all of its options or none")
    if (choices["noise_multiplier"] is None) == (choices["epsilon"] is None):
        raise PrivacyError(
            "give either --noise-multiplier or --epsilon, not both or neither: one follows from the other"
        )
    artifact = ArtifactStore(store).load(ref)
    described = artifact.workload, artifact.strategy, artifact.certificate, artifact.participation
    statement = privacy_statement(*described, **choices)
    regret = None
    if not missing:
        regret = regret_bound(artifact.workload, artifact.certificate, statement.noise_multiplier, **given)
    if as_json:
        bound = None if regret is None else {"total": regret.total, **asdict(regret)}
        content = {"ref": ref, "digest": artifact.digest, "epsilon": statement.epsilon, **asdict(statement)}
        _print_json({**content, "regret_bound": bound})
    else:
        render_privacy.statement(ref, artifact, statement, regret)
