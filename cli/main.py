"""`mmfact`: the commands. Heavy imports happen inside them, so that --help is quick."""

from __future__ import annotations

import contextlib
import io
import json
import math
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from mmfact import __version__

if TYPE_CHECKING:
    from mmfact.factorize.compiler import Options
    from mmfact.factorize.estimate import Estimate
    from mmfact.factorize.workload import Workload
    from mmfact.store.artifact import Artifact

# What a cast of the coefficients to float32 may cost in excess, generously.
_FLOAT32_COSTS = 2e-6

# Seconds beyond which a compilation says beforehand what it will take, terminal or not.
_LONG = 10.0

# Exit codes (design.md, section 8)
ANSWER_NO, BAD_INPUT, MACHINE_FAILED, INTERRUPTED = 1, 2, 3, 130


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="mmfact")
def commands() -> None:
    """Optimal correlated noise for differentially private training, with a proof of how good it is.

    \b
    Example: mmfact compile --workload momentum --n 2048
             mmfact inspect momentum-n2048
    """


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")(
        command
    )
    return click.option(
        "--store",
        type=click.Path(),
        envvar="MMFACT_STORE",
        default="artifacts",
        show_default=True,
        help="Directory of the artifacts (or MMFACT_STORE).",
    )(command)


def _of_workload(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a workload."""
    options = [
        click.option("--n", type=int, help="Training steps; for custom it is the matrix's size."),
        click.option("--beta", type=float, help="Momentum in [0, 1), for momentum.  [default: 0.9]"),
        click.option(
            "--lr-schedule",
            metavar="NAME[:key=value,...]|FILE",
            help="constant, step, cooldown, decay, cosine, polynomial or warmup, or a file with one rate a line; "
            "for sgd and momentum.  [default: constant]",
        ),
        click.option(
            "--weight-decay", type=float, default=0.0, show_default=True, help="lambda >= 0, for sgd and momentum."
        ),
        click.option(
            "--weight-decay-kind",
            type=click.Choice(["coupled", "decoupled"]),
            help="coupled as in torch.optim.SGD, decoupled as in AdamW.  [default: coupled]",
        ),
        click.option(
            "--ema", type=float, default=0.0, metavar="GAMMA", help="Optimize the EMA of the iterates, in [0, 1)."
        ),
        click.option(
            "--matrix", type=click.Path(), help="A lower-triangular matrix in .npy, .npz or .csv, for custom."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def _describing(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that describe a workload and how to compile it."""
    options = [
        click.option(
            "--strategy",
            type=click.Choice(["buffered", "banded-low-rank", "dense"]),
            default="buffered",
            show_default=True,
            help="How C is stored and streamed.",
        ),
        click.option(
            "--buffers", type=int, metavar="R", help="For buffered.  [default: the fewest that meet the tolerance]"
        ),
        click.option(
            "--bandwidth",
            type=int,
            metavar="K",
            help="For banded-low-rank.  [default: the cheapest that meets the tolerance]",
        ),
        click.option("--rank", type=int, metavar="R", help="For banded-low-rank.  [default: as for --bandwidth]"),
        click.option(
            "--dtype",
            type=click.Choice(["float32", "float64"]),
            help="Of the coefficients.  [default: float32; float64 for dense]",
        ),
        click.option(
            "--tolerance",
            type=float,
            default=1e-4,
            show_default=True,
            help="Largest acceptable excess of what is shipped.",
        ),
        click.option(
            "--method",
            type=click.Choice(["auto", "structured", "dense", "fixed-point"]),
            default="auto",
            show_default=True,
            help="Solver; fixed-point is the plain iteration of the paper, for comparison.",
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return _of_workload(command)


class _Kind(click.Choice):  # type: ignore[type-arg, unused-ignore]
    """A workload, not an optimizer."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if str(value).lower() in ("adam", "adamw"):
            self.fail(f"{value!r} is not a workload: for Adam use momentum with --beta at its first beta", param, ctx)
        return super().convert(value, param, ctx)


class Least(click.FloatRange):
    """A finite number of at least some value; click's own range lets NaN pass."""

    def __init__(self, least: float) -> None:
        super().__init__(min=least)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r:.40} is not a finite number", param, ctx)
        return number


_KINDS = _Kind(["prefix-sum", "sgd", "momentum", "custom"])


@commands.command("compile")
@click.option("--workload", "kind", required=True, type=_KINDS, help="What the optimizer does to the gradients.")
@_describing
@click.option("--name", metavar="REF", help="Ref of the artifact.  [default: spells the workload and options]")
@click.option("--dry-run", is_flag=True, help="Only say how long it will take and how much memory.")
@_common
def compile_command(**choices: Any) -> None:
    """Compute the optimal factorization of a workload, certify it and store it.

    \b
    Example: mmfact compile --workload momentum --n 2048 --lr-schedule cooldown
    Exit code 1 when the tolerance was not reached (the artifact is stored all the same).
    """
    from mmfact.cli import render
    from mmfact.factorize.compiler import compile, default_ref
    from mmfact.factorize.estimate import estimate
    from mmfact.store.store import ArtifactStore

    workload, options = _described(choices)
    ref = default_ref(workload, options) if choices["name"] is None else choices["name"]
    store = ArtifactStore(choices["store"])
    taken = store.has(ref)  # refuses a ref that no artifact may have
    if choices["dry_run"]:
        expected = estimate(workload, options)
        if choices["as_json"]:
            _print_json({"ref": ref, **render.estimate_as_dict(expected)})
        else:
            click.echo(f"{ref}: {render.estimate(expected)}")
        return
    artifact = _already_there(store, ref, workload, options) if taken and not store.lost(ref) else None
    fresh = artifact is None
    if artifact is None:
        expected = estimate(workload, options)
        _check_memory(expected)
        if expected.seconds > _LONG:
            click.echo(f"mmfact: {ref} will take {render.estimate(expected)}", err=True)
        store.prepare()
        with render.working(f"{workload.kind}, n = {workload.n} ({render.estimate(expected)})") as on_progress:
            factorization = compile(workload, options, on_progress=on_progress)
        with _finishing():
            artifact = store.save(factorization, ref)
    reached = artifact.certificate.excess <= options.tolerance
    notes = [] if fresh else ["already there, nothing was computed"]
    if options.buffers is not None and artifact.strategy.buffers < options.buffers:
        notes.append(
            f"of {options.buffers} buffers asked for, those beyond {artifact.strategy.buffers} would only add rounding"
        )
    if choices["as_json"]:
        _print_json({"ref": ref, "already_there": not fresh, "tolerance_reached": reached, **render.as_dict(artifact)})
    else:
        render.artifact(ref, artifact, note="; ".join(notes) or None)
    if not reached:
        raise AnswerIsNo(
            f"the excess {artifact.certificate.excess:.3g} is above the tolerance {options.tolerance:g}: the artifact "
            f"is private and usable, but not as accurate as asked; {_advice(options, artifact)}"
        )


def _check_memory(expected: Estimate) -> None:
    """Refuse what this machine would only begin."""
    from mmfact.cli import render
    from mmfact.factorize.errors import CapacityError
    from mmfact.factorize.machine import physical_memory

    available = physical_memory()
    if available is not None and expected.memory > available:
        raise CapacityError(
            f"this needs {render.estimate(expected)}, and the machine has {render.size(available)}; choose a smaller n"
        )


def _advice(options: Options, artifact: Artifact) -> str:
    """What to do about an excess above the tolerance."""
    if options.method == "fixed-point":
        return "use --method auto"
    ways = []
    if options.buffers is not None and artifact.strategy.buffers == options.buffers:
        ways.append("more --buffers (left out, the fewest that suffice are taken)")
    if options.bandwidth is not None or options.rank is not None:
        ways.append("a larger --bandwidth or --rank (left out, the cheapest that suffice are taken)")
    excess = artifact.certificate.excess
    if options.strategy == "buffered" and options.buffers is None and not artifact.workload.structured:
        ways.append("--strategy dense: off its diagonal this matrix is not of low rank")
    elif options.dtype == "float32" and (options.tolerance < _FLOAT32_COSTS or excess < 10 * _FLOAT32_COSTS):
        ways.append(f"--dtype float64 (float32 coefficients alone cost up to {_FLOAT32_COSTS:g})")
    if not ways and options.strategy != "dense" and artifact.n <= 8192:
        ways.append("--strategy dense")
    if not ways:
        return "raise --tolerance: this is as close as double precision comes"
    return f"use {' and '.join(ways)}, or raise --tolerance"


@commands.command("compare")
@click.argument("ref", required=False)
@click.option("--workload", "kind", type=_KINDS, help="Instead of REF: a workload, compiled and not stored.")
@_describing
@_common
def compare_command(ref: str | None, **choices: Any) -> None:
    """Set an artifact (or a workload's) beside every classic mechanism: exact figures at the same privacy.

    \b
    Example: mmfact compare momentum-n2048
             mmfact compare --workload sgd --n 512 --lr-schedule cosine
    """
    from mmfact.cli import render
    from mmfact.factorize.comparison import compare
    from mmfact.factorize.compiler import compile, default_ref
    from mmfact.factorize.errors import WorkloadError
    from mmfact.store.format import from_factorization
    from mmfact.store.store import ArtifactStore

    if (ref is None) == (choices["kind"] is None):
        raise WorkloadError("give either a REF from `mmfact list` or --workload with its options, not both or neither")
    if ref is not None:
        context = click.get_current_context()
        for option in context.command.params:
            if option.name in ("ref", "store", "as_json", "kind") or option.name is None:
                continue
            if context.get_parameter_source(option.name) is click.core.ParameterSource.COMMANDLINE:
                raise WorkloadError(f"{option.opts[0]} describes a workload, but {ref} already says what to compare")
        artifact = ArtifactStore(choices["store"]).load(ref)
    else:
        workload, options = _described(choices)
        ref = default_ref(workload, options)
    with render.working(f"comparing {ref}") as on_progress:
        if choices["kind"] is not None:
            artifact = from_factorization(compile(workload, options, on_progress=on_progress))
        result = compare(
            artifact.workload, artifact.strategy, artifact.certificate, artifact.participation, on_progress=on_progress
        )
    if choices["as_json"]:
        _print_json(render.comparison_as_dict(ref, artifact, result))
    else:
        render.comparison(ref, artifact, result)


def _described(choices: dict[str, Any]) -> tuple[Workload, Options]:
    """The workload and the options that were asked for, checked against each other before anything is computed."""
    from mmfact.factorize.compiler import Options, check

    workload = _workload(choices)
    names = ("strategy", "tolerance", "method", "buffers", "bandwidth", "rank")
    options = Options(dtype=choices["dtype"] or "", **{name: choices[name] for name in names})
    check(workload, options)
    return workload, options


@commands.command("verify")
@click.argument("ref")
@click.option("--reference", is_flag=True, help="Also solve the semidefinite program in cvxpy (n <= 64).")
@_common
def verify_command(ref: str, reference: bool, store: str, as_json: bool) -> None:
    """Recompute the certificate from the file alone, by other means than the compiler's.

    \b
    Exit code 0: everything agrees. 1: something does not, or the file is damaged.
    Example: mmfact verify momentum-n2048
    """
    from mmfact.cli import render
    from mmfact.factorize.errors import ArtifactCorrupt, ArtifactNotFound, ArtifactVersionError
    from mmfact.factorize.verification import verify
    from mmfact.store.store import ArtifactStore

    artifacts = ArtifactStore(store)
    try:
        artifact = artifacts.load(ref)
    except (ArtifactCorrupt, ArtifactVersionError, ArtifactNotFound) as error:
        if isinstance(error, ArtifactNotFound) and not artifacts.lost(ref):
            raise
        if as_json:
            _print_json({"ref": ref, "passed": False, "error": str(error)})
        raise AnswerIsNo(str(error)) from error
    result = verify(
        artifact.workload, artifact.strategy, artifact.multipliers, artifact.certificate, reference=reference
    )
    if as_json:
        _print_json(render.verification_as_dict(ref, artifact, result))
    else:
        render.verification(ref, artifact, result)
    if not result.passed:
        failed = ", ".join(check.name for check in result.checks if not check.passed)
        raise AnswerIsNo(f"{ref} fails verification: {failed}. Do not train with it; compile it again")


@commands.command("selftest")
@click.argument("ref")
@_common
def selftest_command(ref: str, store: str, as_json: bool) -> None:
    """Stream an artifact to its horizon on this machine and test what comes out, in less than a minute.

    \b
    Up to 3e7 values: their covariance between steps and between elements, their distribution, and that
    threads, shards and restarts give the same bits. A right runtime fails with probability 1e-6.
    Exit code 0: everything is as it should be. 1: something is not.
    Example: mmfact selftest momentum-n2048
    """
    from mmfact.cli import render
    from mmfact.noise.selftest import selftest
    from mmfact.store.store import ArtifactStore

    artifact = ArtifactStore(store).load(ref)
    with render.working(f"testing {ref}") as on_progress:
        result = selftest(artifact, on_progress=on_progress)
    if as_json:
        _print_json(render.selftest_as_dict(ref, artifact, result))
    else:
        render.selftest(ref, artifact, result)
    if not result.passed:
        failed = ", ".join(check.name for check in result.checks if not check.passed)
        raise AnswerIsNo(
            f"{ref} fails the self-test on this machine: {failed}. Do not train with it here; run it again, and if it "
            "fails again, reinstall mmfact, numba and cryptography, and tell us"
        )


class AnswerIsNo(Exception):  # noqa: N818
    """The command ran and its answer is no: exit code 1."""


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and exit; every expected failure is one message on stderr."""
    arguments = sys.argv[1:] if arguments is None else arguments
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # names of files may hold what the terminal's encoding has not
            stream.reconfigure(errors="backslashreplace")
    # What Ctrl-C leaves half made inside a library may complain when it is thrown away: heard only without Ctrl-C.
    complaints: list[sys.UnraisableHookArgs] = []
    hook, sys.unraisablehook = sys.unraisablehook, complaints.append
    try:
        _run(arguments)
    except SystemExit as end:
        if end.code == INTERRUPTED:
            complaints.clear()
            hook = _unheard  # more is thrown away while Python ends
        raise
    finally:
        sys.unraisablehook = hook
        for complaint in complaints:
            hook(complaint)


def _unheard(complaint: sys.UnraisableHookArgs) -> None:
    pass


def _run(arguments: list[str]) -> NoReturn:
    from mmfact.factorize.errors import MmfactError, StoreError

    try:
        commands.main(args=arguments, prog_name="mmfact", standalone_mode=False)
        if sys.stdout is not None:  # it is None when the shell has closed it
            sys.stdout.flush()
    except click.ClickException as error:
        error.show()
        if "--json" in arguments:
            _print_json({"error": error.format_message(), "exit_code": BAD_INPUT})
        sys.exit(BAD_INPUT)
    except AnswerIsNo as error:
        _fail(str(error), ANSWER_NO)
    except StoreError as error:
        _fail(str(error), MACHINE_FAILED, arguments)
    except MmfactError as error:
        _fail(str(error), BAD_INPUT, arguments)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; no partial file was left", INTERRUPTED)
    except MemoryError:
        _fail("this machine does not have the memory for it; choose a smaller n", MACHINE_FAILED, arguments)
    except SystemExit:
        # click leaves this way only when the reader of a pipe has gone, which is no failure of ours
        sys.exit(0)
    except OSError as error:
        _fail(f"the machine failed: {error}", MACHINE_FAILED, arguments)
    except (SystemError, ImportError) as error:
        if not _came_from_interrupt(error):
            raise
        _fail("interrupted; no partial file was left", INTERRUPTED)
    sys.exit(0)


def _came_from_interrupt(error: BaseException | None) -> bool:
    """Ctrl-C inside numba's boxing of arrays, or inside an import, comes out as the cause of another error."""
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextlib.contextmanager
def _finishing() -> Iterator[None]:
    """Let a save run to its end before Ctrl-C takes effect: inside the HDF5 library it would get lost."""
    asked: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: asked.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if asked:
        raise KeyboardInterrupt


def _fail(message: str, code: int, arguments: list[str] | None = None) -> NoReturn:
    if arguments and "--json" in arguments:
        with contextlib.suppress(OSError):  # stdout itself may be what failed
            _print_json({"error": message, "exit_code": code})
    click.echo(f"mmfact: {message}", err=True)
    sys.exit(code)


def _print_json(content: dict[str, Any]) -> None:
    click.echo(json.dumps(content, indent=2, allow_nan=False))


def _workload(choices: dict[str, Any]) -> Workload:
    """The workload that the options describe; an option that does not apply is refused, never ignored."""
    from mmfact.factorize import schedule, workload
    from mmfact.factorize.errors import WorkloadError
    from mmfact.factorize.matrix import read_matrix

    kind, n = choices["kind"], choices["n"]
    given = {
        "--beta": choices["beta"] is not None,
        "--lr-schedule": choices["lr_schedule"] is not None,
        "--weight-decay": choices["weight_decay"] != 0,
        "--weight-decay-kind": choices["weight_decay_kind"] is not None,
        "--ema": choices["ema"] != 0,
        "--matrix": choices["matrix"] is not None,
    }
    sgd = {"--lr-schedule", "--weight-decay", "--weight-decay-kind", "--ema"}
    allowed = {"prefix-sum": set(), "sgd": sgd, "momentum": sgd | {"--beta"}, "custom": {"--matrix"}}[kind]
    for option, is_given in given.items():
        if is_given and option not in allowed:
            takers = "sgd or momentum" if option in sgd else "momentum" if option == "--beta" else "custom"
            raise WorkloadError(f"{option} does not apply to --workload {kind}; use it with {takers}, or leave it out")
    if kind == "custom":
        if choices["matrix"] is None:
            raise WorkloadError("--workload custom needs --matrix FILE (.npy, .npz or .csv)")
        found = workload.custom(read_matrix(Path(choices["matrix"])))
        if n is not None and n != found.n:
            raise WorkloadError(f"--n {n} contradicts the matrix, which is {found.n} x {found.n}; leave --n out")
        return found
    if n is None:
        raise WorkloadError(f"--workload {kind} needs --n, the number of training steps")
    workload.check_horizon(n)
    if choices.get("strategy", "buffered") != "buffered":
        workload.check_dense(n, f"the {choices['strategy']} strategy")
    if kind == "prefix-sum":
        return workload.prefix_sum(n)
    if choices["weight_decay_kind"] is not None and not choices["weight_decay"]:
        raise WorkloadError("--weight-decay-kind has no effect without --weight-decay; give both or neither")
    rates = schedule.parse("constant" if choices["lr_schedule"] is None else choices["lr_schedule"], n)
    options = {
        "learning_rates": rates,
        "weight_decay": choices["weight_decay"],
        "weight_decay_kind": choices["weight_decay_kind"] or "coupled",
        "ema": choices["ema"],
    }
    if kind == "sgd":
        return workload.sgd(n, **options)
    beta = workload.DEFAULT_BETA if choices["beta"] is None else choices["beta"]
    return workload.momentum(n, beta=beta, **options)


def _already_there(store: Any, ref: str, workload: Workload, options: Options) -> Any:
    """The artifact that `ref` names, which must be what was asked for; None if it is damaged and has made way."""
    from mmfact.factorize.errors import ArtifactCorrupt, RefError

    try:
        artifact = store.load(ref)
    except ArtifactCorrupt as error:
        if not store.lost(ref):
            raise
        click.echo(f"mmfact: {error}. It is compiled again now", err=True)
        return None
    if not artifact.workload.same_as(workload) or artifact.provenance.get("options") != options.spec():
        raise RefError(
            f"ref {ref!r} already names something else ({artifact.workload.label()}, options "
            f"{artifact.provenance.get('options')}); refs are never moved, choose another name with --name"
        )
    return artifact


# last: they register their commands with the above
from mmfact.cli import catalog as _catalog  # noqa: E402, F401
from mmfact.cli import maintenance as _maintenance  # noqa: E402, F401
from mmfact.cli import privacy as _privacy  # noqa: E402, F401
from mmfact.cli import projector as _projector  # noqa: E402, F401
