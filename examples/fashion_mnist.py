"""Private training on all of Fashion-MNIST: which noise is best at the same epsilon?

A small convolutional network (10,554 parameters) learns the 60,000 images in a single pass, with per-example clipping,
at the same (epsilon, delta):

    none            still clipped, but no noise
    amplified       DP-SGD with Poisson sampling, accounted with dp-accounting's PLD: the rival that matters
    independent     fresh noise at every step, no amplification
    tree            noise of the binary tree in its best form (Honaker, full: least squares on all nodes)
    prefix          the compiled optimum for prefix sums; the optimizer then post-processes it
    momentum        the compiled optimum for momentum 0.9
    cooldown        the compiled optimum for momentum 0.9 with a cooldown of the learning rate

All are trained by SGD with momentum 0.9: at a constant learning rate, and with the cooldown (linear over the last
quarter, to 0.05 of the rate), so that what a cooldown brings by itself, all have.

Each method gets its own learning rate for each epsilon and schedule, the best of one grid: trained on five sixths of
the training images, scored on the last sixth, with seeds that are not reported. What is reported are runs on all
training images at that rate, scored on the test images. Run it with

    python examples/fashion_mnist.py --out results.json --plot accuracy.svg

(it needs `pip install -e ".[examples,torch]"`). Every finished run goes to the results at once; started again, the
script goes on from there. The images are those of the Debian package dataset-fashion-mnist, or the four IDX files in
the folder that --data names. Seeds fix the data order and the start; the noise is fresh at every run, as it must be.
(In an experiment the Poisson samples may have a known seed; in earnest they need a secret one too.)
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import itertools
import json
import math
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn

try:
    import torch
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
    from dp_accounting.mechanism_calibration import calibrate_dp_mechanism
    from dp_accounting.pld import PLDAccountant
    from matplotlib.figure import Figure
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise SystemExit(f'fashion_mnist.py: {error}; pip install -e ".[examples,torch]"') from None

from mmfact import Artifact, ArtifactStore, MmfactError, NoiseKey, compile
from mmfact.factorize import schedule
from mmfact.factorize.compiler import Factorization, adopt
from mmfact.factorize.privacy import gaussian_noise_multiplier
from mmfact.factorize.strategy.dense import DenseStrategy, lower_triangular
from mmfact.factorize.workload import momentum, prefix_sum
from mmfact.noise.torch import GradientNoise

BATCH, BETA, CLIP, DELTA = 250, 0.9, 1.0, 1e-6
LEARNING_RATES = (0.025, 0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4)
FIRST_TUNING_SEED = 1000
NO_NOISE = 1e-9  # a noise multiplier that float32 sums do not see
DEBIAN = "/usr/share/datasets/fashion-mnist"

Array = np.ndarray


class ExampleError(MmfactError):
    """Images, options or results that cannot be used as they are."""


# Data


@dataclass(frozen=True)
class Images:
    """Grey images of 28 x 28 bytes, and their labels."""

    pixels: Array
    labels: Array

    def __len__(self) -> int:
        return len(self.labels)

    def batch(self, index: Array | slice) -> tuple[Tensor, Tensor]:
        """Pixels in [-1, 1] of shape (N, 1, 28, 28), and labels."""
        pixels = torch.from_numpy(self.pixels[index]).unsqueeze(1).float() / 127.5 - 1
        return pixels, torch.from_numpy(self.labels[index]).long()


def read_idx(path: Path, shape: tuple[int, ...]) -> Array:
    """The bytes of one IDX file, plain or gzip; `shape` is that of one item.

    The header is 0, 0, 8 (unsigned bytes), the number of dimensions, and each dimension as a big-endian 32-bit integer.
    """
    found = next((p for p in (path, path.with_name(path.name + ".gz")) if p.is_file()), None)
    if found is None:
        raise ExampleError(
            f"there is no {path.name} or {path.name}.gz in {path.parent}; install the Debian package "
            "dataset-fashion-mnist, or give the folder that holds the four IDX files with --data"
        )
    try:
        content = gzip.decompress(found.read_bytes()) if found.suffix == ".gz" else found.read_bytes()
    except (OSError, EOFError, ValueError) as error:
        raise ExampleError(f"{found} cannot be read: {error}") from error
    start = 8 + 4 * len(shape)
    declared = tuple(np.frombuffer(content[4:start].ljust(start - 4, b"\0"), ">u4").tolist())
    whole = declared[1:] == shape and len(content) == start + math.prod(declared)
    if not (whole and content[:4] == bytes([0, 0, 8, len(declared)])):
        raise ExampleError(f"{found} is not a whole IDX file of bytes with items of shape {shape}; fetch it again")
    return np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(declared)


def read_images(folder: Path, part: str) -> Images:
    images = Images(
        read_idx(folder / f"{part}-images-idx3-ubyte", (28, 28)), read_idx(folder / f"{part}-labels-idx1-ubyte", ())
    )
    if len(images.pixels) != len(images.labels) or len(images) < 6 or images.labels.max() > 9:
        raise ExampleError(
            f"{part} in {folder} has {len(images.pixels)} images and {len(images.labels)} labels; "
            "there must be as many of both, 6 at least, and labels from 0 to 9"
        )
    return images


@cache
def data(folder: Path, tuning: bool) -> tuple[Images, Images]:
    """(to train on, to score on): for tuning, the training images split five to one, whole batches first."""
    train = read_images(folder, "train")
    held = len(train) // 6 if tuning else 0
    last = (len(train) - held) // BATCH * BATCH
    if not last:
        raise ExampleError(f"{len(train)} training images are less than a batch of {BATCH}")
    rest = Images(train.pixels[len(train) - held :], train.labels[len(train) - held :])
    return Images(train.pixels[:last], train.labels[:last]), rest if tuning else read_images(folder, "t10k")


# Network


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=4),
        nn.Tanh(),  # clipped and noisy, some five points of accuracy better than ReLU
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(128, 10),
    )


def clipped_sums(model: nn.Sequential, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """For every parameter the sum of the examples' gradients, each clipped to CLIP over all parameters together.

    With X what the positions of a layer's output saw of one example, and Y the loss's gradient at these outputs, the
    gradient of the layer's weights is Y X'. Where positions are few its norm comes cheaper from Y'Y and X'X (ghost
    clipping, Goodfellow 2015), in float64 since terms may cancel; the sum is one product over examples and positions.
    """
    if not len(images):
        return {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    layers, outputs, x = [], [], images
    for name, layer in model.named_children():
        seen, x = x.detach(), layer(x)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layers.append((name, layer, seen))
            outputs.append(x)
    backs = torch.autograd.grad(functional.cross_entropy(x, labels, reduction="sum"), outputs)
    products, squares = [], torch.zeros(len(images), dtype=torch.float64)
    for (name, layer, seen), Y in zip(layers, backs, strict=True):
        if isinstance(layer, nn.Conv2d):
            X = functional.unfold(seen, layer.kernel_size, stride=layer.stride, padding=layer.padding)
            Y = Y.flatten(2)
        else:
            X, Y = seen.unsqueeze(2), Y.unsqueeze(2)
        products.append((name, layer, X, Y))
        if X.shape[2] * (len(X[0]) + len(Y[0])) < len(X[0]) * len(Y[0]):
            x64, y64 = X.double(), Y.double()
            squares += ((x64.mT @ x64) * (y64.mT @ y64)).sum((1, 2))
        else:
            squares += (Y @ X.mT).square().sum((1, 2))
        squares += Y.sum(2).square().sum(1)
    # A gradient that is not finite counts as zero: nothing about private data may stop the run.
    if not (finite := squares.isfinite()).all():
        return clipped_sums(model, images[finite], labels[finite])
    # Float32 rounds by less than 1e-5: no clipped gradient is longer than CLIP.
    weights = (CLIP * (1 - 1e-5) / squares.sqrt()).clamp(max=1).float()
    sums = {}
    for name, layer, X, Y in products:
        Y = Y * weights[:, None, None]
        flat = Y.transpose(0, 1).flatten(1) @ X.transpose(1, 2).flatten(0, 1)
        sums[f"{name}.weight"], sums[f"{name}.bias"] = flat.view_as(layer.weight), Y.sum((0, 2))
    return sums


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    right = 0
    for start in range(0, len(images), 500):
        pixels, labels = images.batch(slice(start, start + 500))
        right += int((model(pixels).argmax(1) == labels).sum())
    return right / len(images)


# Noise


def _independent(steps: int) -> Factorization:
    return adopt(momentum(steps, beta=BETA), DenseStrategy.from_matrix(np.eye(steps)))


def _tree(steps: int) -> Factorization:
    leaves = 1 << (steps - 1).bit_length()
    levels = [np.kron(np.eye(leaves >> k), np.ones(1 << k)) for k in range(leaves.bit_length())]
    H = np.concatenate(levels)[:, :steps]
    return adopt(momentum(steps, beta=BETA), DenseStrategy.from_matrix(lower_triangular(H)))


def _cooldown(steps: int) -> Factorization:
    return compile(momentum(steps, beta=BETA, learning_rates=schedule.named("cooldown", steps)))


STRATEGIES: dict[str, Callable[[int], Factorization]] = {
    "none": _independent,
    "independent": _independent,
    "tree": _tree,
    "prefix": lambda steps: compile(prefix_sum(steps)),
    "momentum": lambda steps: compile(momentum(steps, beta=BETA)),
    "cooldown": _cooldown,
    "amplified": _independent,
}
SCHEDULES = ("constant", "cooldown")


def artifact(method: str, steps: int, store: ArtifactStore) -> Artifact:
    """The method's strategy for that many steps, from the store, or made and kept there."""
    ref = f"fashion-mnist-{method}-n{steps}"
    if not store.has(ref):
        store.save(STRATEGIES[method](steps), ref)
    return store.load(ref)


@cache
def noise_multiplier(method: str, epsilon: float | None, examples: int) -> float:
    """sigma for one pass over `examples` in batches of BATCH: exact for one Gaussian release, amplified by the PLD."""
    if epsilon is None:
        return NO_NOISE
    if method != "amplified":
        return gaussian_noise_multiplier(epsilon, DELTA)

    def event(sigma: float) -> SelfComposedDpEvent:
        return SelfComposedDpEvent(PoissonSampledDpEvent(BATCH / examples, GaussianDpEvent(sigma)), examples // BATCH)

    return float(calibrate_dp_mechanism(PLDAccountant, event, epsilon, DELTA, tol=1e-4))


# Training


@dataclass(frozen=True)
class Run:
    """One training; its seed decides the order of the images and the start, and not the noise."""

    method: str
    schedule: str
    epsilon: float | None  # None: without noise
    rate: float
    seed: int
    tuning: bool


@dataclass(frozen=True)
class Setting:
    """What all runs share: where images and artifacts are; noise is fresh unless it has a seed."""

    data: Path
    store: Path
    insecure_noise_seed: int | None = None


def batches(method: str, examples: int, seed: int) -> Iterator[Array]:
    """Every example in exactly one step; amplified, in every step with probability BATCH / examples."""
    rng, steps = np.random.default_rng(seed), examples // BATCH
    if method == "amplified":
        return (np.flatnonzero(rng.random(examples) < BATCH / examples) for _ in range(steps))
    return iter(rng.permutation(examples).reshape(steps, BATCH))


def train(run: Run, sigma: float, setting: Setting) -> dict[str, Any]:
    """One run with noise multiplier sigma, as the results keep it."""
    began = time.perf_counter()
    images, scored = data(setting.data, run.tuning)
    steps = len(images) // BATCH
    model, noise_seed = network(run.seed), setting.insecure_noise_seed
    gradients = GradientNoise(
        model,
        artifact(run.method, steps, ArtifactStore(setting.store)),
        noise_multiplier=sigma,
        clip_norm=CLIP,
        batch_size=BATCH,
        key=NoiseKey.ephemeral() if noise_seed is None else NoiseKey.insecure_from_seed(noise_seed),
        run=None if noise_seed is None else hashlib.sha256(repr(run).encode()).digest()[:16],
        threads=1,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=run.rate, momentum=BETA)
    rates = run.rate * schedule.named(run.schedule, steps).rates
    for rate, batch in zip(rates, batches(run.method, len(images), run.seed), strict=True):
        gradients.add(clipped_sums(model, *images.batch(batch)))
        gradients.step()
        optimizer.param_groups[0]["lr"] = float(rate)
        optimizer.step()
    return {
        **asdict(run),
        "noise multiplier": sigma,
        "steps": steps,
        "accuracy": accuracy(model, scored),
        "seconds": round(time.perf_counter() - began, 1),
    }


# Results


class Results:
    """The finished runs, in a file that is whole at any time."""

    def __init__(self, path: Path, conditions: dict[str, Any]) -> None:
        self._path, self._conditions = path, conditions
        self._done: dict[Run, dict[str, Any]] = {}
        if not path.exists():
            return
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            known = stored["conditions"]
            self._done = {Run(**{name: run[name] for name in Run.__dataclass_fields__}): run for run in stored["runs"]}
            _ = [run["accuracy"] + run["noise multiplier"] for run in stored["runs"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExampleError(f"{path} holds no results of this script ({error!r}); choose another --out") from error
        if known != conditions:
            raise ExampleError(f"the results in {path} are of {known}, not of {conditions}; choose another --out")

    def __contains__(self, run: Run) -> bool:
        return run in self._done

    def add(self, run: Run, result: dict[str, Any]) -> None:
        self._done[run] = result
        runs = ",\n".join(map(json.dumps, self._done.values()))  # a line for each
        new = self._path.with_name(self._path.name + ".new")
        with open(new, "w", encoding="utf-8") as file:
            file.write(f'{{"conditions": {json.dumps(self._conditions)},\n"runs": [\n{runs}\n]}}\n')
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, self._path)

    def accuracies(self, runs: Sequence[Run]) -> list[float]:
        return [self._done[run]["accuracy"] for run in runs]

    def noise_multiplier(self, run: Run) -> float:
        return float(self._done[run]["noise multiplier"])


@dataclass(frozen=True)
class Cell:
    """One entry of the table: a method at an epsilon, trained with a schedule."""

    method: str
    schedule: str
    epsilon: float | None

    def runs(self, rate: float, seeds: Sequence[int], tuning: bool) -> list[Run]:
        return [Run(self.method, self.schedule, self.epsilon, rate, seed, tuning) for seed in seeds]


@dataclass(frozen=True)
class Score:
    """What the table shows of a cell: mean and sample standard deviation over the seeds."""

    rate: float
    noise_multiplier: float
    mean: float
    spread: float

    def __str__(self) -> str:
        return f"{self.mean:.1%} ± {self.spread:.1%} ({self.rate:g})"


def cells(methods: Sequence[str], epsilons: Sequence[float]) -> list[Cell]:
    """All entries; the noise compiled for the cooldown goes with no other training, and no noise with no epsilon."""
    return [
        Cell(method, kind, epsilon)
        for method, kind in itertools.product(methods, SCHEDULES)
        for epsilon in ([None] if method == "none" else epsilons)
        if method != "cooldown" or kind == "cooldown"
    ]


def complete(runs: Sequence[Run], results: Results, setting: Setting, pool: Executor, label: str) -> None:
    """Train what is not there yet, and keep each result as soon as it is there."""
    missing = [run for run in runs if run not in results]
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (missing and console.is_terminal)) as progress:
        task = progress.add_task(label, total=len(missing))
        futures = {}
        for run in missing:
            images, _ = data(setting.data, run.tuning)
            sigma = noise_multiplier(run.method, run.epsilon, len(images))
            futures[pool.submit(train, run, sigma, setting)] = run
        for future in as_completed(futures):
            results.add(futures[future], future.result())
            progress.advance(task)


def tune(
    all_cells: Sequence[Cell],
    rates: Sequence[float],
    seeds: Sequence[int],
    results: Results,
    train_all: Callable[[Sequence[Run]], None],
) -> dict[Cell, float]:
    """The best rate of each entry: from the middle of the grid to the neighbours of the best, until they are worse."""
    rates = sorted(set(rates))
    tried = {cell: {len(rates) // 2} for cell in all_cells}
    while True:
        train_all([run for cell, some in tried.items() for i in some for run in cell.runs(rates[i], seeds, True)])
        best = {
            cell: max(sorted(some), key=lambda i: np.mean(results.accuracies(cell.runs(rates[i], seeds, True))))
            for cell, some in tried.items()
        }
        ahead = {cell: {i - 1, i + 1} & set(range(len(rates))) - tried[cell] for cell, i in best.items()}
        if not any(ahead.values()):
            return {cell: rates[i] for cell, i in best.items()}
        for cell, more in ahead.items():
            tried[cell] |= more


def score(cell: Cell, rate: float, seeds: Sequence[int], results: Results) -> Score:
    runs = cell.runs(rate, seeds, False)
    found = results.accuracies(runs)
    spread = float(np.std(found, ddof=1)) if len(found) > 1 else 0.0
    return Score(rate, results.noise_multiplier(runs[0]), float(np.mean(found)), spread)


TRAINED = {"constant": "a constant rate", "cooldown": "a rate with cooldown"}
LOOKS = {  # colours of Okabe and Ito, which the colour-blind can tell apart
    "none": ("#000000", "", ":", "no noise, clipped"),
    "amplified": ("#E69F00", "s", "--", "DP-SGD, Poisson-amplified"),
    "independent": ("#999999", "x", "--", "independent noise"),
    "tree": ("#CC79A7", "^", "-", "binary tree (Honaker, full)"),
    "prefix": ("#56B4E9", "v", "-", "mmfact, prefix-sum optimum"),
    "momentum": ("#0072B2", "o", "-", "mmfact, momentum optimum"),
    "cooldown": ("#009E73", "D", "-", "mmfact, momentum + cooldown optimum"),
}


def markdown(scores: dict[Cell, Score], epsilons: Sequence[float]) -> str:
    """The table: a line for each schedule and method, the most accurate private one of a column in bold."""
    lines = [
        f"| trained at | noise | {' | '.join(f'epsilon {epsilon:g}' for epsilon in epsilons)} |",
        "|---" * (2 + len(epsilons)) + "|",
    ]
    best = {e: max((s.mean for c, s in scores.items() if c.epsilon == e), default=None) for e in epsilons}
    for kind, method in itertools.product(SCHEDULES, STRATEGIES):
        row = [(e, scores.get(Cell(method, kind, None if method == "none" else e))) for e in epsilons]
        shown = [f"**{s}**" if method != "none" and s.mean == best[e] else str(s) for e, s in row if s is not None]
        if shown:
            lines.append(f"| {TRAINED[kind]} | {method} | {' | '.join(shown)} |")
    multipliers = {(c.method == "amplified", c.epsilon): s.noise_multiplier for c, s in scores.items() if c.epsilon}
    for amplified, name in ((True, "amplified"), (False, "all others")):
        shown = [f"{multipliers[amplified, e]:.3f}" for e in epsilons if (amplified, e) in multipliers]
        if shown:
            lines.append(f"| | noise multiplier, {name} | {' | '.join(shown)} |")
    return "\n".join(lines)


def plot(scores: dict[Cell, Score], epsilons: Sequence[float], file: Path) -> None:
    """Accuracy over epsilon, a panel for each schedule; bars are one standard deviation over the seeds."""
    figure = Figure(figsize=(10, 5), layout="constrained")
    for axes, kind in zip(figure.subplots(1, len(SCHEDULES), sharey=True), SCHEDULES, strict=True):
        drawn = [method for method in STRATEGIES if any((c.method, c.schedule) == (method, kind) for c in scores)]
        for place, method in enumerate(drawn):
            colour, marker, line, label = LOOKS[method]
            if method == "none":
                without = scores[Cell(method, kind, None)]
                low, high = 100 * (without.mean - without.spread), 100 * (without.mean + without.spread)
                axes.axhspan(low, high, color=colour, alpha=0.15, linewidth=0)
                axes.axhline(100 * without.mean, color=colour, linestyle=line, label=label)
                continue
            aside = 1.02 ** (place - len(drawn) / 2)  # so that bars do not cover each other
            found = [scores[Cell(method, kind, epsilon)] for epsilon in epsilons]
            axes.errorbar(
                [epsilon * aside for epsilon in epsilons],
                [100 * s.mean for s in found],
                [100 * s.spread for s in found],
                color=colour, marker=marker, linestyle=line, capsize=3, label=label,
            )  # fmt: skip
        axes.set_xscale("log")
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons], minor=False)
        axes.set_xticks([], minor=True)
        axes.set(title=f"trained at {TRAINED[kind]}", xlabel=f"epsilon (delta = {DELTA:g}, one pass)")
        axes.grid(alpha=0.3)
        axes.label_outer()
    figure.axes[0].set_ylabel("test accuracy, %")
    handles, labels = figure.axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize="small")
    figure.savefig(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilons", type=_positive, nargs="+", default=[1.0, 2.0, 8.0], metavar="EPSILON")
    parser.add_argument("--seeds", type=_count, default=5, help="runs of an entry at its chosen rate")
    parser.add_argument("--tuning-seeds", type=_count, default=3, help="runs of an entry at each rate that is tried")
    parser.add_argument("--rates", type=_positive, nargs="+", default=LEARNING_RATES, metavar="RATE")
    parser.add_argument("--methods", nargs="+", choices=STRATEGIES, default=list(STRATEGIES), metavar="METHOD")
    parser.add_argument("--out", type=Path, default=Path("fashion-mnist.json"), help="where finished runs are kept")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the accuracies (.svg, .png or .pdf)")
    parser.add_argument("--data", type=Path, default=Path(DEBIAN), help="folder with the four IDX files, .gz or not")
    parser.add_argument("--jobs", type=_count, default=os.cpu_count(), help="runs that go on at the same time")
    parser.add_argument("--store", type=Path, default=Path("examples-artifacts"), help="where the artifacts are kept")
    parser.add_argument("--insecure-noise-seed", type=int, help="repeatable noise, for tests: it protects nothing")
    options = parser.parse_args()
    if options.plot and options.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot {options.plot}: the name must end in .svg, .png or .pdf")
    try:
        compare(options)
    except MmfactError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except OSError as error:
        parser.exit(3, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: stopped; finished runs are in {options.out}, start again to go on\n")


def compare(options: argparse.Namespace) -> None:
    setting = Setting(options.data, options.store, options.insecure_noise_seed)
    images, scored = data(setting.data, tuning=False)
    conditions = {
        "batch": BATCH, "momentum": BETA, "clip norm": CLIP, "delta": DELTA, "train": len(images), "test": len(scored),
        "images": hashlib.sha256(images.pixels.tobytes() + scored.pixels.tobytes()).hexdigest(),
        "parameters": sum(parameter.numel() for parameter in network(0).parameters()),
    }  # fmt: skip
    if setting.insecure_noise_seed is not None:
        conditions["insecure noise seed"] = setting.insecure_noise_seed
    results = Results(options.out, conditions)
    for tuning, method in itertools.product((True, False), options.methods):  # before the workers ask for them
        artifact(method, len(data(setting.data, tuning)[0]) // BATCH, ArtifactStore(setting.store))
    epsilons, entries = options.epsilons, cells(options.methods, options.epsilons)
    tuning_seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + options.tuning_seeds)
    seeds = range(options.seeds)
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(options.jobs, spawn, initializer=_start_worker)  # processes start with the first run
    try:
        rates = tune(
            entries,
            options.rates,
            tuning_seeds,
            results,
            lambda runs: complete(runs, results, setting, pool, "choosing rates"),
        )
        reported = [run for cell in entries for run in cell.runs(rates[cell], seeds, False)]
        complete(reported, results, setting, pool, "training")
    finally:
        pool.shutdown(cancel_futures=True)
    scores = {cell: score(cell, rates[cell], seeds, results) for cell in entries}
    print(
        f"{len(images)} images in one pass, {len(images) // BATCH} steps of {BATCH}, {len(scored)} test images, "
        f"{conditions['parameters']} parameters,\nmomentum {BETA}, clip norm {CLIP:g}, delta {DELTA:g}; "
        f"mean ± standard deviation over {len(seeds)} seeds (learning rate)\n"
    )
    print(markdown(scores, epsilons))
    if options.plot:
        plot(scores, epsilons, options.plot)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends the workers
    torch.set_num_threads(1)


def _positive(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text} must be positive and finite")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return value


if __name__ == "__main__":
    main()
