"""Private training on real images: which noise is best at the same epsilon?

A small network learns scikit-learn's bundled digits (1,797 real 8x8 images) in a single pass, with
per-example clipping, four ways at the same (epsilon, delta):

    independent     fresh noise at every step, no amplification
    amplified       DP-SGD with Poisson sampling, accounted with dp-accounting: the rival that matters
    tree            noise of the binary tree, in its best form (Honaker, full)
    mmfact          the compiled optimum for this very optimizer (momentum 0.9)

Every method gets its own learning rate, the best of one grid on validation images that are not in
the test set. Run it with

    python examples/digits.py

(it needs `pip install -e ".[examples]"`). It prints mean and spread of the test accuracy over seeds, whichever wins.
Seeds fix the data order and the start; the noise is fresh at every run, as it must be. The artifacts go to the folder
examples-artifacts.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.mechanism_calibration import calibrate_dp_mechanism
from dp_accounting.pld import PLDAccountant
from sklearn.datasets import load_digits

from mmfact import Artifact, ArtifactStore, NoiseKey, NoiseStream, compile
from mmfact.factorize.compiler import adopt
from mmfact.factorize.privacy import gaussian_noise_multiplier
from mmfact.factorize.strategy.dense import DenseStrategy, lower_triangular
from mmfact.factorize.workload import momentum

BATCH, STEPS, HIDDEN, BETA, CLIP, DELTA = 12, 112, 32, 0.9, 1.0, 1e-5
TRAIN = BATCH * STEPS  # 1,344 private examples, each used once
VALIDATION = 150
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0)

Array = np.ndarray
Batches = Iterator[Array]
Noise = Callable[[], Array]


@dataclass(frozen=True)
class Digits:
    """Images scaled to [0, 1] and their labels, split once and for all."""

    train: tuple[Array, Array]
    validation: tuple[Array, Array]
    test: tuple[Array, Array]


def load() -> Digits:
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order] / 16.0, labels[order]
    a, b = TRAIN, TRAIN + VALIDATION
    return Digits((images[:a], labels[:a]), (images[a:b], labels[a:b]), (images[b:], labels[b:]))


class Network:
    """64 - 32 - 10 with ReLU; parameters as one flat vector."""

    shapes = ((64, HIDDEN), (HIDDEN,), (HIDDEN, 10), (10,))
    size = sum(math.prod(shape) for shape in shapes)

    def initial(self, rng: np.random.Generator) -> Array:
        parts = [rng.normal(size=s).ravel() / math.sqrt(s[0]) if len(s) == 2 else np.zeros(s) for s in self.shapes]
        return np.concatenate(parts)

    def unpack(self, theta: Array) -> list[Array]:
        edges = np.cumsum([math.prod(shape) for shape in self.shapes])[:-1]
        return [part.reshape(shape) for part, shape in zip(np.split(theta, edges), self.shapes, strict=True)]

    def accuracy(self, theta: Array, data: tuple[Array, Array]) -> float:
        W1, b1, W2, b2 = self.unpack(theta)
        scores = np.maximum(data[0] @ W1 + b1, 0) @ W2 + b2
        return float((scores.argmax(axis=1) == data[1]).mean())

    def clipped_sum(self, theta: Array, images: Array, labels: Array) -> Array:
        """Sum over examples of the loss's gradient, each clipped to norm CLIP; an empty batch sums to zero."""
        W1, b1, W2, b2 = self.unpack(theta)
        hidden = np.maximum(images @ W1 + b1, 0)
        scores = hidden @ W2 + b2
        scores -= scores.max(axis=1, keepdims=True)
        p = np.exp(scores)
        p /= p.sum(axis=1, keepdims=True)
        p[np.arange(len(labels)), labels] -= 1
        back = (p @ W2.T) * (hidden > 0)
        squares = (p**2).sum(1) * (1 + (hidden**2).sum(1)) + (back**2).sum(1) * (1 + (images**2).sum(1))
        # A gradient that is not finite counts as zero: nothing about private data may stop the run.
        with np.errstate(divide="ignore", invalid="ignore"):
            weight = np.where(np.isfinite(squares), np.minimum(1, CLIP / np.sqrt(squares)), 0.0)
        p, back = np.nan_to_num(p) * weight[:, None], np.nan_to_num(back) * weight[:, None]
        return np.concatenate([(images.T @ back).ravel(), back.sum(0), (hidden.T @ p).ravel(), p.sum(0)])


def train(network: Network, data: Digits, batches: Batches, noise: Noise, rate: float, seed: int) -> Array:
    """SGD with momentum: noise is added to the SUM of clipped gradients, the divisor is a constant."""
    images, labels = data.train
    theta = network.initial(np.random.default_rng([seed, 1]))
    buffer = np.zeros_like(theta)
    for batch in batches:
        gradient = (network.clipped_sum(theta, images[batch], labels[batch]) + noise()) / BATCH
        buffer = BETA * buffer + gradient
        theta = theta - rate * buffer
    return theta


def single_pass(seed: int) -> Batches:
    """Every example in exactly one step."""
    return iter(np.random.default_rng([seed, 2]).permutation(TRAIN).reshape(STEPS, BATCH))


def poisson(seed: int) -> Batches:
    """Every example in every step with probability BATCH / TRAIN: what the amplified accounting assumes."""
    rng = np.random.default_rng([seed, 2])
    return (np.flatnonzero(rng.random(TRAIN) < BATCH / TRAIN) for _ in range(STEPS))


def compiled(store: ArtifactStore) -> Artifact:
    """The optimum for momentum 0.9, from the store."""
    ref = momentum(STEPS, beta=BETA).label()
    if not store.has(ref):
        store.save(compile(momentum(STEPS, beta=BETA)), ref)
    return store.load(ref)


def tree(store: ArtifactStore) -> Artifact:
    """Binary-tree noise with the best decoder, certified against the same workload."""
    ref = f"tree-{momentum(STEPS, beta=BETA).label()}"
    if not store.has(ref):
        leaves = 1 << (STEPS - 1).bit_length()
        levels = [np.kron(np.eye(leaves >> k), np.ones(1 << k)) for k in range(leaves.bit_length())]
        H = np.concatenate(levels)[:, :STEPS]
        strategy = DenseStrategy.from_matrix(lower_triangular(H))
        store.save(adopt(momentum(STEPS, beta=BETA), strategy), ref)
    return store.load(ref)


def amplified_noise_multiplier(epsilon: float) -> float:
    """The noise multiplier that Poisson-sampled DP-SGD needs, by dp-accounting's PLD accountant."""

    def event(sigma: float) -> SelfComposedDpEvent:
        return SelfComposedDpEvent(PoissonSampledDpEvent(BATCH / TRAIN, GaussianDpEvent(sigma)), STEPS)

    return float(calibrate_dp_mechanism(PLDAccountant, event, epsilon, DELTA, tol=1e-4))


def methods(epsilon: float, store: ArtifactStore) -> dict[str, tuple[float, Callable[[int], tuple[Batches, Noise]]]]:
    """For each method its noise multiplier and, for a seed, its batches and its noise."""
    sigma, sampled = gaussian_noise_multiplier(epsilon, DELTA), amplified_noise_multiplier(epsilon)

    def fresh(scale: float) -> Noise:
        rng = np.random.default_rng()  # white noise for the two rivals that need no artifact
        return lambda: scale * CLIP * rng.standard_normal(Network.size)

    def correlated(artifact: Artifact) -> Noise:
        return NoiseStream(
            artifact, Network.size, noise_multiplier=sigma, clip_norm=CLIP, key=NoiseKey.ephemeral(), name="theta"
        ).next

    optimum, binary_tree = compiled(store), tree(store)
    return {
        "independent": (sigma, lambda seed: (single_pass(seed), fresh(sigma))),
        "amplified": (sampled, lambda seed: (poisson(seed), fresh(sampled))),
        "tree": (sigma, lambda seed: (single_pass(seed), correlated(binary_tree))),
        "mmfact": (sigma, lambda seed: (single_pass(seed), correlated(optimum))),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 1.0, 2.0, 8.0])
    parser.add_argument("--seeds", type=int, default=20, help="runs a method at its chosen rate")
    parser.add_argument("--tuning-seeds", type=int, default=5, help="runs a learning rate")
    parser.add_argument("--store", default="examples-artifacts", help="where the two artifacts are kept")
    options = parser.parse_args()

    data, network, store = load(), Network(), ArtifactStore(options.store)
    optimum, binary_tree = compiled(store).certificate, tree(store).certificate
    print(f"{TRAIN} private images in one pass, {STEPS} steps of {BATCH}, {len(data.test[0])} test images,")
    print(f"{Network.size} parameters, momentum {BETA}, clip norm {CLIP}, delta {DELTA:g}, {options.seeds} seeds")
    print(f"mmfact artifact: {optimum.excess:.1e} from the best possible loss; the tree: {binary_tree.excess:.0%}")
    plain = {
        rate: [_run(network, data, (single_pass(s), lambda: np.zeros(Network.size)), rate, s) for s in range(5)]
        for rate in LEARNING_RATES
    }
    best = max(plain, key=lambda rate: np.mean([validation for validation, _ in plain[rate]]))
    print(f"without noise, still clipped: {np.mean([test for _, test in plain[best]]):.1%} at learning rate {best:g}\n")
    print("epsilon  method       noise multiplier  learning rate  test accuracy (mean +- std)")
    for epsilon in options.epsilons:
        for name, (sigma, start) in methods(epsilon, store).items():
            score = {
                rate: np.mean(
                    [_run(network, data, start(1000 + s), rate, 1000 + s)[0] for s in range(options.tuning_seeds)]
                )
                for rate in LEARNING_RATES
            }
            rate = max(score, key=lambda r: score[r])
            tests = [_run(network, data, start(s), rate, s)[1] for s in range(options.seeds)]
            print(f"{epsilon:7g}  {name:11}  {sigma:16.3f}  {rate:13g}  {np.mean(tests):.1%} +- {np.std(tests):.1%}")


def _run(network: Network, data: Digits, source: tuple[Batches, Noise], rate: float, seed: int) -> tuple[float, float]:
    theta = train(network, data, *source, rate, seed)
    return network.accuracy(theta, data.validation), network.accuracy(theta, data.test)


if __name__ == "__main__":
    main()
