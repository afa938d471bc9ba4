"""Every strategy over every workload: what is stored, what is streamed and what is claimed are one thing."""

import numpy as np
import pytest

from mmfact.factorize import schedule
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.workload import custom, momentum, prefix_sum, sgd
from mmfact.noise import NoiseStream
from mmfact.noise.source import NoiseSource
from mmfact.store.format import from_factorization

N = 24


def rates(name):
    return schedule.parse(name, N)


def random_matrix():
    rng = np.random.default_rng(3)
    return np.tril(rng.normal(size=(N, N))) + 4 * np.eye(N)


WORKLOADS = {
    "prefix-sum": lambda: prefix_sum(N),
    "sgd cosine": lambda: sgd(N, learning_rates=rates("cosine:warmup=3")),
    "sgd decay": lambda: sgd(N, learning_rates=rates("decay:peak=0.1"), weight_decay=0.5),
    "momentum": lambda: momentum(N),
    "momentum cooldown": lambda: momentum(N, learning_rates=rates("cooldown")),
    "momentum coupled": lambda: momentum(N, learning_rates=rates("step:every=10,factor=0.5"), weight_decay=0.1),
    "momentum decoupled": lambda: momentum(N, beta=0.5, weight_decay=0.1, weight_decay_kind="decoupled"),
    "momentum ema": lambda: momentum(N, learning_rates=rates("polynomial:power=2,final=0.1"), ema=0.8),
    "momentum .99": lambda: momentum(N, beta=0.99, learning_rates=rates("warmup:fraction=0.5")),
    "custom": lambda: custom(random_matrix()),
}
STRATEGIES = {
    "buffered float32": Options(),
    "buffered float64": Options(dtype="float64", tolerance=1e-7),
    "banded-low-rank float32": Options(strategy="banded-low-rank", bandwidth=6, rank=4),
    "banded-low-rank float64": Options(strategy="banded-low-rank", dtype="float64", tolerance=1e-3),
    "dense float64": Options(strategy="dense"),
    "dense float32": Options(strategy="dense", dtype="float32"),
}
# What each may exceed the lower bound by; a float32 cast moves a column norm by up to 2^-24, the loss by about twice
# that; a low rank may be too low for a random matrix.
EXCESS = {
    "buffered float32": 1e-4,
    "buffered float64": 1e-7,
    "banded-low-rank float32": 0.5,
    "banded-low-rank float64": 1e-3,
    "dense float64": 1e-8,
    "dense float32": 1e-6,
}


@pytest.fixture(scope="module")
def compiled():
    """Each pair compiled once."""
    return {
        (w, s): from_factorization(compile(make(), options))
        for w, make in WORKLOADS.items()
        for s, options in STRATEGIES.items()
    }


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("workload", WORKLOADS)
class TestGrid:
    def test_streaming_unit_vectors_gives_the_inverse_of_the_stored_c(self, compiled, workload, strategy, monkeypatch):
        artifact = compiled[workload, strategy]

        def fill(self, step, first, out):
            out[:] = np.eye(N)[step, first : first + len(out)]

        monkeypatch.setattr(NoiseSource, "fill", fill)
        for space in ("gradient", "iterate"):
            stream = NoiseStream(artifact, N, noise_multiplier=1.0, clip_norm=1.0, space=space, dtype="float64")
            streamed = np.array([stream.next() for _ in range(N)]) / stream.sensitivity
            C_hat = np.linalg.solve(streamed, np.eye(N) if space == "gradient" else artifact.A)
            np.testing.assert_allclose(C_hat, artifact.C, rtol=0, atol=1e-9 * np.abs(artifact.C).max())

    def test_figures_equal_the_dense_computation_and_err_high(self, compiled, workload, strategy):
        artifact = compiled[workload, strategy]
        C, A, certificate = artifact.C, artifact.A, artifact.certificate
        B = A @ np.linalg.inv(C)
        sensitivity = np.linalg.norm(C, axis=0).max()
        loss = sensitivity**2 * np.linalg.norm(B) ** 2
        # the float64 sums of the dense forms have a rounding of their own; strictness is tested in exact arithmetic
        slack = 1e-13 if strategy.startswith("buffered") else 0
        assert sensitivity * (1 - slack) <= certificate.sensitivity <= sensitivity * (1 + 1e-9)
        assert loss * (1 - 1e-12) <= certificate.loss <= loss * (1 + 1e-9)
        assert certificate.max_error == pytest.approx(sensitivity * np.linalg.norm(B, axis=1).max(), rel=1e-9)

    def test_row_deviations_are_row_norms_of_the_inverse(self, compiled, workload, strategy):
        artifact = compiled[workload, strategy]
        norms = np.linalg.norm(np.linalg.inv(artifact.C), axis=1)
        np.testing.assert_allclose(artifact.strategy.row_deviations(), norms, rtol=1e-9)

    def test_b_c_equals_a(self, compiled, workload, strategy):
        artifact = compiled[workload, strategy]
        np.testing.assert_allclose(artifact.B @ artifact.C, artifact.A, rtol=0, atol=1e-10 * np.abs(artifact.A).max())

    def test_lower_bound_holds_and_is_nearly_reached(self, compiled, workload, strategy):
        certificate = compiled[workload, strategy].certificate
        assert 0 <= certificate.excess <= EXCESS[strategy]

    def test_other_factorizations_are_worse(self, compiled, workload, strategy):
        """Independent noise, output noise and the square root are factorizations too: none beats the lower bound."""
        artifact = compiled[workload, strategy]
        A, bound = artifact.A, artifact.certificate.lower_bound
        U, sigma, Vt = np.linalg.svd(A)
        rivals = {
            "independent": (A, np.eye(N)),
            "output": (np.eye(N), A),
            "root": (U * np.sqrt(sigma), np.sqrt(sigma)[:, None] * Vt),
        }
        for B, C in rivals.values():
            assert np.linalg.norm(C, axis=0).max() ** 2 * np.linalg.norm(B) ** 2 >= bound
