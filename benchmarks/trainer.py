"""What does correlated noise cost in a torch training loop, beside torch's own independent noise?

For a transformer of 4e6 parameters in 49 tensors, float32, on one thread and on all that this process may use: the time
of `GradientNoise.step`, which adds a row of the default artifact (momentum, n = 2048) to the sums of clipped gradients,
divides by the batch size and puts the result into p.grad; beside torch doing the same with independent noise,

 - as written anywhere: p.grad.add_(torch.randn_like(p), alpha=std).div_(batch_size) for each parameter,
 - as fast as it goes: one flat normal_() into memory that is kept, then the same sums by torch's foreach kernels.

Sums are there before the clock starts, in all of them. The limit holds against the faster one, in the same rounds.
torch's normals run on one thread whatever torch.set_num_threads says. Then what `clip` adds to a step: norms in float64
and the sum of the clipped gradients.

All entries take turns in every round, in an order drawn anew each round, since others may use the machine meanwhile.
Times are medians of the rounds, in milliseconds; a ratio is the median of the rounds' ratios. Processor time, of all
threads together, depends less on others.

    pip install 'mmfact[torch]'
    python benchmarks/trainer.py             # about a minute
    python benchmarks/trainer.py --quick     # a smoke test
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from mmfact.factorize import machine
from mmfact.factorize.compiler import compile
from mmfact.factorize.workload import momentum
from mmfact.noise import NoiseKey
from mmfact.noise.torch import GradientNoise
from mmfact.store.artifact import Artifact
from mmfact.store.format import from_factorization

N, WIDTH, LAYERS, WORDS = 2048, 256, 4, 3300
QUICK_WIDTH, QUICK_WORDS = 32, 400
EXAMPLES, BATCH, STD = 16, 256, 0.7
LIMIT = 1.5
OURS, PLAIN, FLAT = (
    "mmfact GradientNoise.step",
    "torch randn_like, a parameter at a time",
    "torch flat normal_, foreach",
)
PAUSE = 2e-3  # seconds before each call: the threads of the call before may still wait in a loop for more work


def shapes(width: int, words: int) -> dict[str, tuple[int, ...]]:
    """A transformer's, its embedding tied to its output."""
    found: dict[str, tuple[int, ...]] = {"embedding": (words, width)}
    for layer in range(LAYERS):
        for name, rows, columns in (("qkv", 3, 1), ("out", 1, 1), ("up", 4, 1), ("down", 1, 4)):
            found[f"{layer}.{name}.weight"] = (rows * width, columns * width)
            found[f"{layer}.{name}.bias"] = (rows * width,)
        for name in ("norm1", "norm2"):
            found[f"{layer}.{name}.weight"] = found[f"{layer}.{name}.bias"] = (width,)
    return found


@dataclass
class Entry:
    """What is done before the clock starts, and what is timed; wall and processor seconds of each round."""

    prepare: Callable[[], object]
    call: Callable[[], object]
    wall: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)

    def turn(self) -> None:
        self.prepare()
        time.sleep(PAUSE)
        clocks = time.perf_counter(), time.process_time()
        self.call()
        self.wall.append(time.perf_counter() - clocks[0])
        self.process.append(time.process_time() - clocks[1])


def take_turns(entries: dict[str, Entry], rounds: int) -> None:
    for entry in entries.values():  # compilation, the first touch of memory
        entry.turn()
        entry.turn()
        entry.wall.clear()
        entry.process.clear()
    order, shuffle = list(entries), np.random.default_rng(0)
    for _ in range(rounds):
        shuffle.shuffle(order)
        for name in order:
            entries[name].turn()


def ratio(one: list[float], other: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(one, other, strict=True))


def parameters(model: dict[str, tuple[int, ...]]) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(torch.zeros(shape))) for name, shape in model.items()]


def ours(artifact: Artifact, model: dict[str, tuple[int, ...]], sums: dict[str, Tensor], threads: int) -> Entry:
    gradients = GradientNoise(
        parameters(model), artifact, noise_multiplier=STD, clip_norm=1.0, batch_size=BATCH, key=NoiseKey.ephemeral(),
        threads=threads,
    )  # fmt: skip
    return Entry(lambda: gradients.add(sums), gradients.step)


def clipping(artifact: Artifact, model: dict[str, tuple[int, ...]], threads: int) -> Entry:
    gradients = GradientNoise(
        parameters(model), artifact, noise_multiplier=STD, clip_norm=1.0, batch_size=BATCH, key=NoiseKey.ephemeral(),
        threads=threads,
    )  # fmt: skip
    each = {name: torch.randn(EXAMPLES, *shape) for name, shape in model.items()}
    return Entry(gradients.step, lambda: gradients.clip(each))


def theirs(model: dict[str, tuple[int, ...]], sums: dict[str, Tensor], *, flat: bool) -> Entry:
    grads = [torch.zeros(shape) for shape in model.values()]
    sizes = [grad.numel() for grad in grads]
    noise = torch.empty(sum(sizes))
    views = [part.view_as(grad) for part, grad in zip(noise.split(sizes), grads, strict=True)]

    def prepare() -> None:
        for grad, total in zip(grads, sums.values(), strict=True):
            grad.copy_(total)

    def plainly() -> None:
        for grad in grads:
            grad.add_(torch.randn_like(grad), alpha=STD).div_(BATCH)

    def at_once() -> None:
        noise.normal_()
        torch._foreach_add_(grads, views, alpha=STD)
        torch._foreach_div_(grads, BATCH)

    return Entry(prepare, at_once if flat else plainly)


def table(artifact: Artifact, model: dict[str, tuple[int, ...]], threads: int, rounds: int) -> None:
    torch.set_num_threads(threads)
    sums = {name: torch.randn(shape) for name, shape in model.items()}
    clip = f"mmfact GradientNoise.clip, {EXAMPLES} examples"
    entries = {
        OURS: ours(artifact, model, sums, threads),
        PLAIN: theirs(model, sums, flat=False),
        FLAT: theirs(model, sums, flat=True),
        clip: clipping(artifact, model, threads),
    }
    take_turns(entries, rounds)
    count = sum(int(np.prod(shape)) for shape in model.values())
    print(f"\n{count} parameters in {len(model)} tensors, {threads} thread{'s' * (threads > 1)}: wall, processor [ms]")
    for name, entry in entries.items():
        print(f"{name:45} {1e3 * statistics.median(entry.wall):8.2f} {1e3 * statistics.median(entry.process):8.2f}")
    step = entries[OURS]
    for name in (PLAIN, FLAT):
        print(
            f"step / {name}: {ratio(step.wall, entries[name].wall):.2f} wall, "
            f"{ratio(step.process, entries[name].process):.2f} processor"
        )
    fastest = min((PLAIN, FLAT), key=lambda name: statistics.median(entries[name].wall))
    value = ratio(step.wall, entries[fastest].wall)
    said = f"{value / LIMIT:.2f} of" if value <= LIMIT else f"ABOVE, {value / LIMIT:.2f} of"
    print(f"against the faster one: {value:.2f}, {said} the limit of {LIMIT}")
    both = [a + b for a, b in zip(step.wall, entries[clip].wall, strict=True)]
    print(
        f"clip's share of clip + step: {ratio(entries[clip].wall, both):.2f}, "
        f"{1e3 * statistics.median(entries[clip].wall) / EXAMPLES:.2f} ms an example"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--quick", action="store_true", help="a small model, a few rounds")
    options = parser.parse_args()
    model = shapes(QUICK_WIDTH, QUICK_WORDS) if options.quick else shapes(WIDTH, WORDS)
    rounds = min(5, options.rounds) if options.quick else options.rounds
    artifact = from_factorization(compile(momentum(N)))
    cores = machine.threads()
    print(f"{artifact.strategy.kind}, {artifact.strategy.buffers} buffers; {rounds} rounds; {cores} cores allowed")
    for threads in sorted({1, cores}):
        table(artifact, model, threads, rounds)


if __name__ == "__main__":
    main()
