"""What the commands print: tables for people, plain values for --json, progress while a solver runs."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from mmfact.factorize.comparison import Comparison
    from mmfact.factorize.estimate import Estimate
    from mmfact.factorize.optimum import Progress
    from mmfact.factorize.strategy.protocol import Strategy
    from mmfact.factorize.verification import Verification
    from mmfact.noise.selftest import Selftest
    from mmfact.store.artifact import Artifact


_WORTH_SAYING = 5e-4  # less than a tenth of a percent is no gain


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[Progress], None]]:
    """Progress of a computation on stderr, only when that is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():  # not rich's is_terminal, which FORCE_COLOR overrules
        yield lambda progress: None
        return
    with Console(stderr=True).status(f"{what}: starting") as status:
        yield lambda progress: status.update(f"{what}: {_progress(progress)}")


def _progress(progress: Progress) -> str:
    text = progress.stage
    if progress.iteration is not None:
        text += f", iteration {progress.iteration}"
    if progress.gap is not None:
        text += f", within {percent(progress.gap)}"
    if progress.fraction is not None:
        text += f", {progress.fraction:.0%} done"
    return text


def estimate(expected: Estimate) -> str:
    """How long and how much memory, in words."""
    seconds = expected.seconds
    time = f"{seconds:.1g} s" if seconds < 1 else f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    return f"about {time} and {size(expected.memory)} of memory"


def estimate_as_dict(expected: Estimate) -> dict[str, Any]:
    """An estimate as plain values."""
    return {"seconds": expected.seconds, "memory_bytes": expected.memory}


def artifact(ref: str, artifact: Artifact, *, note: str | None = None) -> None:
    """The table that a person understands without the paper."""
    table = figures(ref, artifact, note)
    table.add_row("size", size(artifact.path.stat().st_size) if artifact.path else "in memory")
    table.add_row("digest", artifact.digest)
    _show(table)


def figures(ref: str, artifact: Artifact, note: str | None = None) -> Table:
    """What it is for, how good it is, and how it is streamed."""
    certificate, strategy = artifact.certificate, artifact.strategy
    table = _table(f"{ref}" + (f"  ({note})" if note else ""))
    table.add_row("workload", describe(artifact))
    if artifact.workload.kind in ("sgd", "momentum") and artifact.workload.schedule != "constant":
        rates = artifact.workload.learning_rates
        table.add_row(
            "rates", f"{rates[0]:.3g} first, highest {rates.max():.3g} at step {rates.argmax()}, {rates[-1]:.3g} last"
        )
    table.add_row("loss", f"{certificate.loss:.10g}  total squared error at unit noise")
    table.add_row("RMSE", f"{certificate.rmse:.6g}  root mean squared error of an iterate at unit noise")
    table.add_row("max error", f"{certificate.max_error:.6g}  of the worst iterate")
    table.add_row("lower bound", f"{certificate.lower_bound:.10g}  no factorization has a smaller loss")
    table.add_row("excess", f"{percent(certificate.excess)}  no factorization can beat this by more")
    table.add_row("sensitivity", f"{certificate.sensitivity:.12g}  ({certificate.sensitivity_kind}, one participation)")
    table.add_row("strategy", _form(strategy))
    if strategy.kind != "dense":
        table.add_row(
            "streaming",
            f"{strategy.bytes_per_parameter} bytes a parameter, {strategy.cost} multiply-adds a step and "
            f"element, amplification {strategy.amplification():.2g}",
        )
    fallback = ", after the structured solver's error budget was exceeded" if certificate.fell_back else ""
    table.add_row(
        "solver",
        f"{certificate.method}{fallback}: {certificate.iterations} iterations, {certificate.products} products, "
        f"residual {certificate.residual:.1e}, bound's own error "
        f"{certificate.quadrature_error + certificate.rounding:.1e}",
    )
    return table


def as_dict(artifact: Artifact) -> dict[str, Any]:
    """An artifact without its arrays."""
    certificate = artifact.certificate
    return {
        "digest": artifact.digest,
        "path": str(artifact.path),
        "size_bytes": artifact.path.stat().st_size if artifact.path else None,
        "workload": artifact.workload.spec(),
        "participation": artifact.participation.kind,
        "strategy": {
            "kind": artifact.strategy.kind,
            "dtype": artifact.strategy.dtype.name,
            **artifact.strategy.parameters(),
            "buffers": artifact.strategy.buffers,
            "bytes_per_parameter": artifact.strategy.bytes_per_parameter,
            "multiply_adds": artifact.strategy.cost,
            # of the dense strategy it would take an inverse, and nothing is fed back there
            "amplification": None if artifact.strategy.kind == "dense" else artifact.strategy.amplification(),
        },
        "certificate": {**asdict(certificate), "excess": certificate.excess, "rmse": certificate.rmse},
        "provenance": artifact.provenance,
    }


def _form(strategy: Strategy) -> str:
    """A strategy's form in words."""
    if strategy.kind == "dense":
        return f"dense, {strategy.dtype.name}; streams with up to {strategy.buffers} vectors of model size"
    parameters = {name: value for name, value in strategy.parameters().items() if name != "buffers"}
    count = "1 buffer" if strategy.buffers == 1 else f"{strategy.buffers} buffers"
    parts = [strategy.kind, strategy.dtype.name, *(f"{name} {value}" for name, value in parameters.items())]
    return ", ".join(parts) + f"; streams with {count} of model size"


def comparison(ref: str, artifact: Artifact, result: Comparison) -> None:
    """One line a mechanism, best first."""
    table = Table(title=f"{ref}: {describe(artifact)}", box=None, pad_edge=False, title_justify="left")
    for column in ("mechanism", "RMSE", "max error", "loss", "x bound", "buffers", "bytes/param", "what it is"):
        left = column in ("mechanism", "what it is")
        table.add_column(column, justify="left" if left else "right", no_wrap=column != "what it is")
    table.add_row("lower bound", f"{math.sqrt(result.lower_bound / artifact.n):.6g}", "", f"{result.lower_bound:.9g}")
    for row in result.rows:
        table.add_row(
            row.name,
            f"{row.rmse:.6g}",
            f"{row.max_error:.6g}",
            f"{row.loss:.9g}",
            f"{row.ratio:.6f}",
            str(row.buffers),
            str(row.bytes_per_parameter),
            row.how,
            style="bold" if row.name == "this" else None,
        )
    _show(table)
    for name, why in result.left_out.items():
        _show(f"left out: {name} ({why})")
    for other in result.rows:
        saved = 1 - artifact.certificate.loss / other.loss
        if other.name == "prefix-sum optimum" and saved >= _WORTH_SAYING:
            _show(f"optimising for this workload, not for prefix sums, lowers the loss by {saved:.1%}")


def comparison_as_dict(ref: str, artifact: Artifact, result: Comparison) -> dict[str, Any]:
    """The comparison as plain values."""
    return {
        "ref": ref,
        "digest": artifact.digest,
        "workload": artifact.workload.spec(),
        "lower_bound": result.lower_bound,
        "mechanisms": [asdict(row) for row in result.rows],
        "left_out": result.left_out,
    }


def verification(ref: str, artifact: Artifact, result: Verification) -> None:
    """Each comparison of `mmfact verify`, and how it was made."""
    table = Table(title=f"{ref}: {describe(artifact)}", box=None, pad_edge=False, title_justify="left")
    for column in ("check", "in the file", "recomputed", "verdict", "rule"):
        table.add_column(column, justify="right" if column in ("in the file", "recomputed") else "left")
    for check in result.checks:
        verdict = Text("agrees", style="green") if check.passed else Text("FAILS", style="red")
        table.add_row(
            check.name,
            "-" if check.name == "B C = A" else f"{check.stored:.12g}",
            f"{check.recomputed:.12g}",
            verdict,
            check.rule,
        )
    _show(table)
    _show(f"how: {result.how}")
    if result.passed:
        _show(f"verified: within {percent(artifact.certificate.excess)} of the best possible factorization")


def verification_as_dict(ref: str, artifact: Artifact, result: Verification) -> dict[str, Any]:
    """The verification as plain values."""
    return {
        "ref": ref,
        "digest": artifact.digest,
        "passed": result.passed,
        "excess": artifact.certificate.excess,
        "how": result.how,
        "checks": [{name: _finite(value) for name, value in asdict(check).items()} for check in result.checks],
    }


def selftest(ref: str, artifact: Artifact, result: Selftest) -> None:
    """Each check of `mmfact selftest`, and the sample it was made on."""
    table = Table(title=f"{ref}: {describe(artifact)}", box=None, pad_edge=False, title_justify="left")
    for column in ("check", "found", "limit", "verdict", "what"):
        table.add_column(column, justify="right" if column in ("found", "limit") else "left")
    for check in result.checks:
        verdict = Text("good", style="green") if check.passed else Text("FAILS", style="red")
        exact = check.limit == 0
        found, limit = ("-", "-") if exact else (f"{check.found:.3g}", f"{check.limit:.3g}")
        table.add_row(check.name, found, limit, verdict, check.rule)
    _show(table)
    _show(
        f"how: {result.steps:,} steps of {result.elements:,} elements, float32, gradient space, under a key made for "
        f"this test; a right runtime fails with probability {result.false_alarm:g} at most"
    )
    if result.passed:
        _show("passed: on this machine the stream is the noise that the artifact promises")


def selftest_as_dict(ref: str, artifact: Artifact, result: Selftest) -> dict[str, Any]:
    """The self-test as plain values."""
    return {
        "ref": ref,
        "digest": artifact.digest,
        "passed": result.passed,
        "steps": result.steps,
        "elements": result.elements,
        "false_alarm": result.false_alarm,
        "checks": [{name: _finite(value) for name, value in asdict(check).items()} for check in result.checks],
    }


def _finite(value: Any) -> Any:
    """JSON has no infinity: null stands for what could not be recomputed."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(artifact: Artifact) -> str:
    """The workload in words."""
    workload = artifact.workload
    parts = [workload.kind]
    if workload.beta:
        parts.append(f"beta {workload.beta:g}")
    parts.append(f"n = {workload.n} steps")
    if workload.kind in ("sgd", "momentum"):
        parts.append(f"schedule {workload.schedule}")
    if workload.weight_decay:
        parts.append(f"{workload.weight_decay_kind} weight decay {workload.weight_decay:g}")
    if workload.ema:
        parts.append(f"EMA {workload.ema:g} of the iterates")
    return ", ".join(parts)


def percent(value: float) -> str:
    """A relative quantity as a percentage with two or three digits, rounded up: a certificate never flatters."""
    if value <= 0:
        return "0 %"
    hundred = value * 100
    exponent = math.floor(math.log10(hundred))
    unit = 10.0 ** (exponent - (1 if hundred < 1e-2 else 2))
    rounded = math.ceil(hundred / unit) * unit
    return f"{rounded:.2g} %" if hundred < 1e-2 else f"{rounded:.4g} %"


def size(count: int) -> str:
    """Bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1024
    return f"{amount:.3g} GiB"


def _show(*parts: RenderableType) -> None:
    """Print on stdout; when that is no terminal, in whole lines without padding, for grep and diff."""
    if sys.stdout is None:  # closed by the shell: nobody to show anything to
        return
    if sys.stdout.isatty():
        Console(highlight=False, markup=False).print(*parts, sep="\n")
        return
    console = Console(highlight=False, markup=False, width=200, color_system=None)
    with console.capture() as captured:
        console.print(*parts, sep="\n")
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def _table(title: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table
