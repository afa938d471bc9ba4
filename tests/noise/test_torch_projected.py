"""Projected noise for torch in one process: what lands in p.grad, when projectors are made, kept and refused.

Whole runs are compared with dense NumPy: rows of one `NoiseStream` a tensor, gradients by a backward pass for each
example, V from numpy's SVD, and V V'(sum + noise) / batch.
"""

from __future__ import annotations

import copy
import errno
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.factorize import accounting, privacy
from mmfact.factorize.compiler import adopt, independent
from mmfact.factorize.errors import (
    ArtifactCorrupt,
    HorizonError,
    ParticipationError,
    PrivacyError,
    ProjectorError,
    ProjectorStale,
    StateError,
    StoreError,
)
from mmfact.factorize.strategy.dense import DenseStrategy
from mmfact.factorize.workload import prefix_sum
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.store import projectors as store_projectors
from mmfact.store.format import from_factorization
from mmfact.store.projectors import ProjectorCache, read_projector

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("mmfact.noise.torch")
projected = pytest.importorskip("mmfact.noise.torch_projected")

GradientNoise, ProjectedNoise = adapter.GradientNoise, projected.ProjectedNoise
nn, func = torch.nn, torch.func
Array = np.ndarray

SIGMA, CLIP, BATCH, RATE = 0.9, 0.7, 7, 0.2
RUN = bytes(range(16))
EXAMPLES, PUBLIC, K = 6, 9, 4  # private ones a step; public ones; vectors
HORIZON = 64
KEY = NoiseKey.insecure_from_seed(2024)
INDEPENDENT = from_factorization(independent(prefix_sum(HORIZON)))


class Net(nn.Module):
    """Two layers and a parameter without a dimension: 35 elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Any) -> Any:
        return self.second(torch.tanh(self.first(features))) * self.scale


def net(dtype: Any = torch.float32, seed: int = 5) -> Any:
    torch.manual_seed(seed)
    return Net().to(dtype)


def data(count: int, seed: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(seed)
    return tuple(torch.randn((count, size), generator=made, dtype=torch.float64).to(dtype) for size in (5, 2))


def public(dtype: Any = torch.float32) -> tuple[Any, Any]:
    return data(PUBLIC, 1, dtype)


def held_out(dtype: Any = torch.float32) -> tuple[Any, Any]:
    return data(7, 2, dtype)


def private(step: int, dtype: Any = torch.float32) -> tuple[Any, Any]:
    return data(EXAMPLES, 100 + step, dtype)


def loss(prediction: Any, target: Any) -> Any:
    return ((prediction - target) ** 2).sum()


def trained(model: Any) -> dict[str, Any]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


class PerExample:
    """What a user would write; counts its calls."""

    def __init__(self, model: Any) -> None:
        self.model, self.calls = model, 0

    def __call__(self, features: Any, targets: Any) -> dict[str, Any]:
        def one(parameters: dict[str, Any], x: Any, y: Any) -> Any:
            return loss(func.functional_call(self.model, parameters, x), y)

        self.calls += 1
        parameters = {name: p.detach() for name, p in trained(self.model).items()}
        return func.vmap(func.grad(one), (None, 0, 0))(parameters, features, targets)


def by_loop(model: Any, features: Any, targets: Any) -> Array:
    """A backward pass for each example: (examples, p) in float64, parameters in the order of their names."""
    kept, rows = {p: p.grad for p in model.parameters()}, []
    for x, y in zip(features, targets, strict=True):
        for p in model.parameters():
            p.grad = None
        loss(model(x), y).backward()
        rows.append(flat({name: p.grad for name, p in trained(model).items()}))
    for p, gradient in kept.items():
        p.grad = gradient
    return np.array(rows)


def flat(parts: dict[str, Any]) -> Array:
    return np.concatenate([parts[name].detach().double().numpy().ravel() for name in sorted(parts)])


def gradient(model: Any) -> Array:
    return flat({name: p.grad for name, p in trained(model).items()})


def values(model: Any) -> Array:
    return flat(trained(model))


def clipped(rows: Array) -> Array:
    norms = np.linalg.norm(rows, axis=1)
    return (rows * np.minimum(1, CLIP / norms)[:, None]).sum(axis=0)


def leading(rows: Array, k: int = K) -> Array:
    """The k leading right singular vectors, (k, p)."""
    return np.linalg.svd(rows, full_matrices=False)[2][:k]


def dense(projector: Any) -> Array:
    """V', (k, p)."""
    parts = [projector.basis[name].double().numpy() for name in sorted(projector.basis)]
    return projector.scale * np.hstack(parts)


def noise_rows(model: Any, artifact: Any, steps: int, sigma: float = SIGMA) -> Array:
    """(steps, p), by one plain stream for each tensor."""
    parts = []
    for name, p in sorted(trained(model).items()):
        dtype = "float64" if p.dtype == torch.float64 else "float32"
        options = {"noise_multiplier": sigma, "clip_norm": CLIP, "key": KEY, "name": name, "run": RUN, "dtype": dtype}
        stream = NoiseStream(artifact, p.numel(), **options)
        parts.append(np.array([stream.next() for _ in range(steps)], np.float64))
    return np.hstack(parts)


class Run:
    """Plain SGD with projected noise."""

    def __init__(
        self, *, model: Any = None, noise: dict[str, Any] | None = None, examples: Any = None, state: Any = None,
        recompute: bool = False, k: int = K, **options: Any,
    ) -> None:  # fmt: skip
        self.model = net() if model is None else model
        self.dtype = next(self.model.parameters()).dtype
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=RATE)
        given = {"artifact": INDEPENDENT, "optimizer": self.optimizer, "key": KEY, "batch_size": BATCH, **(noise or {})}
        artifact = given.pop("artifact")
        if state is None:
            self.noise = GradientNoise(
                self.model, artifact, **{"noise_multiplier": SIGMA, "clip_norm": CLIP, "run": RUN, **given}
            )
        else:
            self.model.load_state_dict(state["model"])
            self.noise = GradientNoise.restore(self.model, artifact, state["noise"], resume="unpublished", **given)
        self.per_example = PerExample(self.model)
        shown = options.pop("public", public(self.dtype))
        self.projected = ProjectedNoise(self.noise, options.pop("per_example", self.per_example), shown, k, **options)
        if state is not None:
            self.projected.load_state_dict(state["projected"], recompute=recompute)

    def step(self) -> None:
        number = self.noise.step_number
        self.projected.clip(PerExample(self.model)(*private(number, self.dtype)))
        checked = self.noise._noise.checks_participation
        self.projected.step(ids=[f"{number}-{i}" for i in range(EXAMPLES)] if checked else None)
        self.optimizer.step()

    def go(self, until: int) -> Run:
        while self.noise.step_number < until:
            self.step()
        return self

    def state(self) -> Any:
        """A checkpoint through a file, of plain types and tensors only."""
        parts = {"model": self.model, "noise": self.noise, "projected": self.projected}
        file = io.BytesIO()
        torch.save({name: part.state_dict() for name, part in parts.items()}, file)
        return torch.load(io.BytesIO(file.getvalue()), weights_only=True)

    @property
    def refreshes(self) -> list[Any]:
        return self.projected.refreshes


def equal(one: Run, other: Run) -> bool:
    """Their parameters, to the last bit."""
    return all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


@pytest.fixture
def solves(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry, k, for each eigenspace of the public gradients that is computed."""
    seen: list[int] = []
    real = projected.top_eigenspace

    def counted(gradients: Any, k: int, **options: Any) -> Any:
        seen.append(k)
        return real(gradients, k, **options)

    monkeypatch.setattr(projected, "top_eigenspace", counted)
    return seen


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(store_projectors, "publish_pieces", refuse)


# --- what p.grad holds -----------------------------------------------------------------------------


@pytest.mark.parametrize("correlated", [False, True])
@pytest.mark.parametrize(
    ("dtype", "storage", "tolerance"),
    [("float32", "float32", 1e-5), ("float64", "float32", 1e-5), ("float32", "float16", 2e-3)],
)
def test_a_run_is_that_of_dense_numpy(built: Any, correlated: bool, dtype: str, storage: str, tolerance: float) -> None:
    """Refreshed at steps 2, 5, 8 and 11 of 12; the steps before are not projected."""
    artifact = built("buffered").artifact if correlated else INDEPENDENT
    kind, refresh, start, steps = getattr(torch, dtype), 3, 2, 12
    noise = {"artifact": artifact, "optimizer": None, "check_participation": correlated}
    run = Run(model=net(kind), noise=noise, refresh=refresh, start_step=start, storage=storage)
    reference, V = net(torch.float64), None
    rows = noise_rows(run.model, artifact, steps)
    for step in range(steps):
        run.step()
        if step >= start and (step - start) % refresh == 0:
            V = leading(by_loop(reference, *public(torch.float64)))
        mean = (clipped(by_loop(reference, *private(step, torch.float64))) + rows[step]) / BATCH
        expected = mean if V is None else V.T @ (V @ mean)
        assert (V is None) == (step < start)
        np.testing.assert_allclose(gradient(run.model), expected, atol=tolerance * np.linalg.norm(mean))
        first = 0
        for _, p in sorted(trained(reference).items()):
            p.data -= RATE * torch.from_numpy(expected[first : first + p.numel()]).reshape(p.shape)
            first += p.numel()
    np.testing.assert_allclose(values(run.model), values(reference), atol=3 * tolerance)
    assert [one.step for one in run.refreshes] == [2, 5, 8, 11]


@pytest.mark.parametrize("kind", ["random", "random-plain"])
def test_a_random_projection_is_drawn_for_run_and_step(kind: str) -> None:
    """New at every refresh, the same for everybody in the run, whatever the public data."""
    rows = noise_rows(net(), INDEPENDENT, 5)
    run, other = (Run(kind=kind, refresh=2, public=None, per_example=None) for _ in range(2))
    elsewhere = Run(kind=kind, refresh=2, noise={"run": bytes(16)}).go(1)
    bases = []
    for step in range(5):
        sums = clipped(by_loop(run.model, *private(step)))
        run.step(), other.step()
        V = dense(run.projected.projector)
        bases.append(V)
        assert np.array_equal(V, dense(other.projected.projector))
        assert V.shape == (K, 35)
        np.testing.assert_allclose(gradient(run.model), V.T @ (V @ (sums + rows[step])) / BATCH, atol=1e-6)
    assert np.array_equal(bases[0], bases[1])
    assert not np.isclose(bases[1], bases[2]).any()
    assert not np.isclose(bases[0], dense(elsewhere.projected.projector)).any()
    assert [(one.step, one.source) for one in run.refreshes] == [(0, "drawn"), (2, "drawn"), (4, "drawn")]
    assert run.refreshes[0].explained is run.refreshes[0].gap is None
    assert np.allclose(bases[0] @ bases[0].T, np.eye(K), atol=1e-5) == (kind == "random")


def test_noise_is_projected_too() -> None:
    """Public gradients of one tensor only: of the noise, as large in all others, nothing is left there."""
    model = net()

    def only_the_scale(features: Any, targets: Any) -> dict[str, Any]:
        found = PerExample(model)(features, targets)
        return {name: part * (name == "scale") for name, part in found.items()}

    run = Run(model=model, k=1, per_example=only_the_scale)
    rows = noise_rows(model, INDEPENDENT, 3)
    assert np.abs(rows).min() > 1e-6
    for step in range(3):
        run.projected.step()  # noise alone
        for name, p in model.named_parameters():
            assert p.grad.any() == (name == "scale")
        place = sum(p.numel() for name, p in model.named_parameters() if name < "scale")
        np.testing.assert_allclose(model.scale.grad, rows[step, place] / BATCH, rtol=1e-5)


def test_what_is_clipped_or_added_is_not_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    """The noise is added to the very sums that were given; the projection sees the noisy mean only."""
    run = Run().go(1)
    sums = {name: torch.randn(p.shape) for name, p in run.model.named_parameters()}
    taken = []
    real = run.noise._add_noise

    def watched(parts: Any, ids: Any) -> None:
        taken.append({name: part.clone() for name, part in parts.items()})
        real(parts, ids)

    monkeypatch.setattr(run.noise, "_add_noise", watched)
    run.projected.add(sums)
    run.projected.step()
    assert all(torch.equal(taken[0][name], part) for name, part in sums.items())
    each = PerExample(run.model)(*private(2))
    run.projected.clip(each)
    run.projected.step()
    np.testing.assert_allclose(flat(taken[1]), clipped(by_loop(run.model, *private(2))), atol=1e-5)


def test_a_gradient_that_step_did_not_make_is_not_projected(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    real = run.noise.step

    def replaced(**options: Any) -> None:
        real(**options)
        run.model.scale.grad = run.model.scale.grad.clone()

    monkeypatch.setattr(run.noise, "step", replaced)
    with pytest.raises(StateError, match=r"p.grad is not the noisy mean that step.. made"):
        run.projected.step()


def test_gradients_are_projected_in_place_and_the_optimizer_takes_them() -> None:
    """The optimizer's own check, that nothing but noisy means is used, goes on."""
    run = Run().go(2)
    assert all(p.grad is run.noise._given[name] for name, p in run.model.named_parameters())
    loss(run.model(private(3)[0]), private(3)[1]).backward()  # adds to p.grad
    run.model.scale.grad = torch.tensor(3.0)
    with pytest.raises(StateError, match="gradients that have no noise"):
        run.optimizer.step()


def test_past_the_horizon_nothing_is_made(solves: list[int]) -> None:
    run = Run().go(HORIZON)
    with pytest.raises(HorizonError):
        run.projected.step()
    assert len(solves) == HORIZON == len(run.refreshes)
    assert run.projected.horizon == run.projected.step_number == HORIZON


# --- when projectors are made ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refresh", "start", "expected"),
    [
        (1, 0, range(60)),
        (20, 0, [0, 20, 40]),
        (20, 7, [7, 27, 47]),
        (None, 3, [3]),
        (100, 0, [0]),
        (1, 58, [58, 59]),
        (1, 60, []),
    ],
)
def test_refreshes_and_eigen_work_are_counted(solves: list[int], refresh: Any, start: int, expected: Any) -> None:
    """Every 20 steps: a twentieth of the work."""
    run = Run(refresh=refresh, start_step=start).go(60)
    assert [one.step for one in run.refreshes] == list(expected)
    assert solves == [K] * len(expected)
    assert run.per_example.calls == len(expected)
    assert run.projected.ledger()["projection"]["refreshes"] == len(expected)
    assert (run.projected.projector is None) == (not expected)


def test_skipped_steps_do_not_skip_a_refresh() -> None:
    run = Run(refresh=4).go(2)
    run.noise.skip_to(6)  # past the refresh at 4
    run.go(10)
    assert [one.step for one in run.refreshes] == [0, 6, 8]


def test_a_step_that_is_refused_has_no_refresh(tmp_path: Path) -> None:
    """The next one makes the projector, records it and keeps it, as if nothing had been."""
    cache = ProjectorCache(tmp_path)
    run = Run(noise={"check_participation": True}, refresh=2, cache=cache).go(2)
    before = run.projected.projector
    run.projected.clip(PerExample(run.model)(*private(2)))
    with pytest.raises(ParticipationError):
        run.projected.step(ids=[f"1-{i}" for i in range(EXAMPLES)])
    assert run.projected.step_number == 2
    assert run.projected.projector is before
    state = run.state()
    straight = Run(noise={"check_participation": True}, refresh=2).go(4)
    for again in (run, Run(noise={}, refresh=2, cache=cache, state=state)):
        again.go(4)
        assert equal(again, straight)
        assert [one.step for one in again.refreshes] == [0, 2]
    assert [entry.step for entry in cache.entries()] == [0, 2]


# --- parameters of all kinds -----------------------------------------------------------------------


def test_parameters_in_bfloat16() -> None:
    """The noisy mean, in bfloat16, is projected, and the result rounded once more."""
    run = Run(model=net(torch.bfloat16), refresh=2)
    rows = noise_rows(run.model, INDEPENDENT, 4)
    for step in range(4):
        sums = clipped(by_loop(run.model, *private(step, torch.bfloat16)))
        run.step()
        assert all(p.grad.dtype == torch.bfloat16 for p in run.model.parameters())
        V = dense(run.projected.projector)
        mean = (sums + rows[step]) / BATCH
        # Gradients themselves are rounded to 2^-9 in each of several operations.
        np.testing.assert_allclose(gradient(run.model), V.T @ (V @ mean), atol=2**-6 * np.linalg.norm(mean))
    V = leading(by_loop(net(torch.bfloat16), *public(torch.bfloat16)))
    first = dense(Run(model=net(torch.bfloat16)).go(1).projected.projector)
    assert np.linalg.norm(V.T @ V - first.T @ first, 2) < 0.05


def test_bfloat16_gradients_are_projected_as_exactly_as_they_can_be() -> None:
    run = Run(model=net(torch.bfloat16), start_step=1).go(1)
    other = Run(model=net(torch.bfloat16)).go(1)
    mean, V = gradient(run.model), dense(other.projected.projector)
    expected = V.T @ (V @ mean)
    np.testing.assert_allclose(gradient(other.model), expected, rtol=2**-8, atol=1e-6)


class Mixed(nn.Module):
    """Tied, frozen, of two precisions."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 2, dtype=torch.float64)
        self.b.weight = self.a.weight
        self.a.bias.requires_grad_(False)

    def forward(self, features: Any) -> Any:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(features)))).double())


def test_tied_and_frozen_parameters_of_two_precisions() -> None:
    torch.manual_seed(0)
    model = Mixed()
    frozen = model.a.bias.clone()
    run = Run(model=model, noise={"optimizer": None}, refresh=2)
    run.dtype = torch.float32
    rows = noise_rows(model, INDEPENDENT, 4)
    assert rows.shape == (4, 25 + 5 + 10 + 2)
    for step in range(4):
        if step % 2 == 0:
            V = leading(by_loop(model, *public()))
        mean = (clipped(by_loop(model, *private(step))) + rows[step]) / BATCH
        run.step()
        assert model.a.bias.grad is None
        assert model.c.weight.grad.dtype == torch.float64
        np.testing.assert_allclose(gradient(model), V.T @ (V @ mean), atol=1e-5)
    assert torch.equal(frozen, model.a.bias)
    assert set(run.projected.projector.basis) == {"a.weight", "b.bias", "c.weight", "c.bias"}


# --- per_example -----------------------------------------------------------------------------------


def by_backward(model: Any, *, clear: bool = False) -> Callable[..., dict[str, Any]]:
    """Per-example gradients as `backward` leaves them in p.grad."""

    def each(features: Any, targets: Any) -> dict[str, Any]:
        rows = []
        for x, y in zip(features, targets, strict=True):
            model.zero_grad(set_to_none=not clear)
            loss(model(x), y).backward()
            rows.append({name: p.grad.clone() for name, p in model.named_parameters()})
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    return each


@pytest.mark.parametrize("clear", [False, True])
def test_per_example_may_call_backward(clear: bool) -> None:
    model = net()
    run, plain = Run(model=model, per_example=by_backward(model, clear=clear)).go(3), Run().go(3)
    np.testing.assert_allclose(values(run.model), values(plain.model), atol=1e-6)


@pytest.mark.parametrize("fails", [False, True])
def test_per_example_leaves_gradients_as_they_were(fails: bool) -> None:
    """Between two steps p.grad is the latest noisy mean, whatever per_example adds to it or clears; a step that is
    refused leaves none."""
    model = net()
    run = Run(model=model, per_example=by_backward(model)).go(1)
    before = {name: (p.grad, p.grad.clone()) for name, p in model.named_parameters()}
    seen = []

    def watched(features: Any, targets: Any) -> Any:
        seen.extend(p.grad for p in model.parameters())
        found = by_backward(model, clear=True)(features, targets)
        if fails:
            raise RuntimeError("no gradients today")
        return found

    run.projected._per_example = watched
    if fails:
        with pytest.raises(RuntimeError, match="no gradients today"):
            run.projected.step()
    else:
        run.projected._refresh(1)
    assert seen == [None] * 5
    for name, p in model.named_parameters():
        assert p.grad is (None if fails else before[name][0])
        assert fails or torch.equal(p.grad, before[name][1])


BAD = {
    "raises": (lambda found: 1 / 0, ZeroDivisionError, "division"),
    "one example less": (
        lambda found: {name: part[1:] for name, part in found.items()}, ProjectorError, "of 8 examples for 9"
    ),
    "one example less in one": (
        lambda found: {**found, "scale": found["scale"][1:]}, ProjectorError, "of 8 and 9 examples for 9"
    ),
    "another shape": (
        lambda found: {**found, "first.weight": found["first.weight"].mT}, ProjectorError,
        r"'first.weight' have shape \(9, 5, 4\); needed is one of shape \(4, 5\) for each",
    ),
    "means": (
        lambda found: {name: part.mean(0) for name, part in found.items()}, ProjectorError, "have shape .* for each"
    ),
    "one missing": (lambda found: {"scale": found["scale"]}, Exception, "missing 'first.weight'"),
    "one too many": (lambda found: {**found, "x": found["scale"]}, Exception, "'x' is none of them"),
    "an array": (lambda found: {**found, "scale": found["scale"].numpy()}, Exception, "'scale' is no dense tensor"),
    "nothing": (lambda found: None, Exception, "a mapping of parameter names"),
    "NaN": (
        lambda found: {**found, "scale": torch.where(torch.arange(9) == 4, float("nan"), found["scale"])},
        ProjectorError, r"gradient of public example 4 \(of 9, from 0\) is not finite",
    ),
    "zeros": (
        lambda found: {name: 0 * part for name, part in found.items()}, ProjectorError, "9 public gradients are zero"
    ),
    "rank 3": (
        lambda found: {name: part[[0, 1, 2] * 3] for name, part in found.items()}, ProjectorError,
        "k = 4 is above the rank of the 9 public gradients, 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("bad", BAD)
def test_public_gradients_that_do_not_fit_cost_no_noise(bad: str) -> None:
    """Contributions are thrown away, so that they count once when given again; the rest is as it would have been."""
    change, error, words = BAD[bad]
    straight = Run().go(2)
    run = Run().go(1)
    run.projected._per_example = lambda *rows: change(PerExample(run.model)(*rows))
    run.projected.clip(PerExample(run.model)(*private(1)))
    with pytest.raises(error, match=words):
        run.projected.step()
    assert run.projected.step_number == 1
    assert len(run.refreshes) == 1
    run.projected._per_example = run.per_example
    run.step()
    assert equal(run, straight)
    assert run.refreshes == straight.refreshes


# --- what is recorded ------------------------------------------------------------------------------


def test_records_are_what_dense_numpy_finds() -> None:
    model = net(torch.float64)
    run = Run(model=model, refresh=2, held_out=held_out(torch.float64))
    before = None
    for step in range(6):
        P, H = (by_loop(model, *rows(torch.float64)) for rows in (public, held_out))
        run.step()
        if step % 2:
            continue
        seen, V = run.refreshes[-1], leading(P)
        eigenvalues = np.linalg.svd(P, compute_uv=False) ** 2 / PUBLIC
        W = leading(H)
        inside = H @ V.T
        expected = {
            "step": step,
            "rank": PUBLIC,
            "explained": eigenvalues[:K].sum() / eigenvalues.sum(),
            "gap": eigenvalues[K - 1] - eigenvalues[K],
            "held_out_explained": (inside**2).sum() / (H**2).sum(),
            "held_out_error": np.mean(np.linalg.norm(H - inside @ V, axis=1) / np.linalg.norm(H, axis=1)),
            "distance_to_held_out": np.linalg.norm(V.T @ V - W.T @ W, 2),
        }
        if before is not None:
            expected["distance_to_previous"] = np.linalg.norm(V.T @ V - before.T @ before, 2)
            assert expected["distance_to_previous"] > 1e-3
        for name, value in expected.items():
            np.testing.assert_allclose(getattr(seen, name), value, rtol=1e-5, err_msg=name)
        assert seen.source == "computed"
        np.testing.assert_allclose(run.projected.projector.spectrum, eigenvalues, rtol=1e-8)
        before = V
    assert run.refreshes[0].distance_to_previous is None
    assert len(run.refreshes) == 3


def test_held_out_examples_change_nothing_else() -> None:
    assert equal(Run(held_out=held_out(), refresh=2).go(5), Run(refresh=2).go(5))


def test_fewer_held_out_examples_than_vectors_have_no_subspace() -> None:
    seen = Run(held_out=data(K - 1, 2)).go(1).refreshes[0]
    assert seen.distance_to_held_out is None
    assert 0 < seen.held_out_explained < 1


@pytest.mark.parametrize("correlated", [False, True])
def test_explained_energy_of_the_private_mean_is_told_from_the_noisy_one(built: Any, correlated: bool) -> None:
    """With little noise, the exact part; with much, nothing."""
    noise = {"noise_multiplier": 0.01, "optimizer": None}
    if correlated:
        noise |= {"artifact": built("buffered").artifact, "check_participation": True}
    run = Run(noise=noise)
    for step in range(4):
        sums, V = clipped(by_loop(run.model, *private(step))), leading(by_loop(run.model, *public()))
        run.step()
        # noise of norm 0.04 beside sums of norm 2
        exact = np.square(V @ sums).sum() / np.square(sums).sum()
        assert abs(run.refreshes[step].noisy_explained - exact) < 0.1 * exact + 0.01
        assert 0.1 < exact < 0.99
    noise["noise_multiplier"] = 50.0
    assert [one.noisy_explained for one in Run(noise=noise).go(4).refreshes] == [None] * 4


@pytest.mark.parametrize("scaled", [False, True])
def test_the_noise_that_is_subtracted_is_the_noise_that_is_there(
    built: Any, monkeypatch: pytest.MonkeyPatch, scaled: bool
) -> None:
    """Its standard deviation at every step, against the rows of the exact matrix times sigma, clip and sensitivity."""
    if scaled:  # a sensitivity of 3
        C = np.diag([3.0, 1.0, 1.5, 3.0, 2.0, 1.0])
        artifact = from_factorization(adopt(prefix_sum(6), DenseStrategy.from_matrix(C)))
    else:
        artifact, C = built("buffered").artifact, built("buffered").C
    run = Run(noise={"artifact": artifact, "check_participation": True, "optimizer": None})
    seen: list[float] = []
    real = projected.noisy_explained

    def watched(coefficients: Array, squared_norm: float, elements: float, deviation: float) -> Any:
        seen.append(deviation)
        assert elements == 35
        return real(coefficients, squared_norm, elements, deviation)

    monkeypatch.setattr(projected, "noisy_explained", watched)
    run.go(6)
    sensitivity = np.linalg.norm(C, axis=0).max()
    expected = SIGMA * CLIP * sensitivity / BATCH * np.linalg.norm(np.linalg.inv(C), axis=1)[:6]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


def test_the_unsafe_value_is_that_of_a_loop_and_is_kept_nowhere(tmp_path: Path) -> None:
    run = Run(cache=ProjectorCache(tmp_path))
    with pytest.raises(ProjectorError, match="no projector yet"):
        run.projected.unsafe_private_explained_energy({})
    run.go(3)
    each = PerExample(run.model)(*private(3))
    V, G = dense(run.projected.projector), by_loop(run.model, *private(3))
    before = run.state()["projected"]
    value = run.projected.unsafe_private_explained_energy(each)
    np.testing.assert_allclose(value, np.square(G @ V.T).sum() / np.square(G).sum(), rtol=1e-6)
    after = run.state()["projected"]
    assert str(after) == str(before)
    stored = [read_projector(path) for path in tmp_path.glob("*.h5")]
    assert len(stored) == 3
    texts = [str(after), repr(run.projected), json.dumps(run.projected.ledger()), *(str(one.record) for one in stored)]
    assert not any(repr(value)[:9] in text for text in texts)


# --- restart ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("at", [1, 4, 5, 6])  # before the start; within a projector's steps; at a refresh; after it
@pytest.mark.parametrize(
    ("kind", "storage"),
    [("eigen", "float32"), ("eigen", "float16"), ("random", "float32"), ("random-plain", "float32")],
)
def test_a_restart_changes_nothing(tmp_path: Path, kind: str, storage: str, at: int, cached: bool) -> None:
    def run(where: str, **more: Any) -> Run:
        cache = ProjectorCache(tmp_path / where) if cached else None
        options = {"refresh": 3, "start_step": 2, "kind": kind, "storage": storage, "held_out": held_out()}
        return Run(cache=cache, **options, **more)

    straight = run("straight").go(10)
    state = run("restart").go(at).state()
    assert (state["projected"]["projector"] is not None) == (kind == "eigen" and not cached and at > 2)
    state = run("restart", state=state).state()  # and at once again
    resumed = run("restart", state=state).go(10)
    assert equal(resumed, straight)
    assert resumed.refreshes == straight.refreshes
    assert [one.step for one in resumed.refreshes] == [2, 5, 8]
    assert resumed.state()["projected"]["refreshes"] == straight.state()["projected"]["refreshes"]


def test_a_run_that_crashed_later_finds_its_projectors_again(tmp_path: Path, solves: list[int]) -> None:
    """Steps after the checkpoint are repeated with what the cache has of them."""
    cache = ProjectorCache(tmp_path)
    state = Run(refresh=2, cache=cache).go(3).state()
    crashed = Run(refresh=2, cache=cache, state=state).go(9)
    assert len(solves) == 5
    resumed = Run(refresh=2, cache=cache, state=state).go(11)
    assert len(solves) == 6
    straight = Run(refresh=2).go(11)
    assert equal(resumed, straight)
    assert [one.source for one in resumed.refreshes] == ["computed"] * 2 + ["cache"] * 3 + ["computed"]
    assert [one.record() | {"source": ""} for one in resumed.refreshes] == [
        one.record() | {"source": ""} for one in straight.refreshes
    ]
    assert crashed.refreshes == straight.refreshes[:5]


def test_a_projector_in_the_state_needs_no_cache_and_goes_into_none() -> None:
    state = Run(refresh=4).go(2).state()
    held = state["projected"]["projector"]
    assert {name: tuple(part.shape) for name, part in held["basis"].items()} == {
        name: (K, p.numel()) for name, p in net().named_parameters()
    }
    resumed = Run(refresh=4, state=state)
    held["basis"]["scale"].zero_()  # the state is the caller's
    assert equal(resumed.go(4), Run(refresh=4).go(4))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("kind", {"kind": "random"}),
        ("k", {"k": K + 1}),
        ("refresh", {"refresh": 4}),
        ("refresh", {"refresh": None}),
        ("start_step", {"start_step": 1}),
        ("storage", {"storage": "float16"}),
        ("public", {"public": data(PUBLIC, 11)}),
        ("public", {"public": tuple(part.flip(0) for part in public())}),
        ("public", {"public": public()[0], "per_example": lambda features: {}}),
        ("tag", {"tag": "pretrained"}),
    ],
)
def test_a_state_of_other_settings_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    state = Run(refresh=3).go(4).state()
    with pytest.raises(StateError, match=rf"the state has {name} = .*, here it is .*; go on with what the run began"):
        Run(**{"refresh": 3, **options}, state=state)


def test_a_state_of_another_run_model_or_step_is_refused() -> None:
    state = Run().go(4).state()
    other = Run(noise={"run": bytes(16)}).go(4)
    with pytest.raises(StateError, match=r"the state has run = '000102.*, here it is '0000"):
        other.projected.load_state_dict(state["projected"])
    later = Run().go(5)
    with pytest.raises(StateError, match="of step 4, but the GradientNoise is at step 5; restore both from one"):
        later.projected.load_state_dict(state["projected"])
    wider = Run(model=nn.Linear(5, 2)).go(4)
    with pytest.raises(StateError, match="the state has elements = 35, here it is 12"):
        wider.projected.load_state_dict(state["projected"])


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.clear(),
        lambda state: state.pop("settings"),
        lambda state: state.pop("projector"),
        lambda state: state.update(settings=7),
        lambda state: state.update(refreshes=[{"step": 1}]),
        lambda state: state.update(refreshes=[{"colour": 1}]),
        lambda state: state.update(refreshes=3),
        lambda state: state["projector"].pop("values"),
        lambda state: state["projector"].pop("rank"),
        lambda state: state["projector"].update(rank=None),
        lambda state: state["projector"].update(basis=None),
        lambda state: state["projector"]["basis"].pop("scale"),
        lambda state: state["projector"]["basis"].update({"first.bias": torch.zeros(K, 5)}),
        lambda state: state["projector"]["basis"].update({"first.bias": torch.zeros(K - 1, 4)}),
        lambda state: state["projector"]["values"].pop("energy"),
        lambda state: state["projector"]["values"].update(scale=torch.ones(2)),
        lambda state: state["projector"]["values"].update(eigenvalues=torch.ones(K + 1)),
    ],
)
def test_what_is_no_state_is_refused(spoil: Any) -> None:
    state = Run().go(2).state()
    spoil(state["projected"])
    with pytest.raises(StateError, match=r"no state of a ProjectedNoise|lacks a part"):
        Run(state=state)


# --- the cache -------------------------------------------------------------------------------------


def test_a_projector_that_the_cache_has_lost(tmp_path: Path) -> None:
    cache = ProjectorCache(tmp_path)
    state = Run(refresh=4, cache=cache).go(6).state()
    for given in (None, ProjectorCache(tmp_path / "elsewhere")):
        where = "none was given" if given is None else "elsewhere"
        with pytest.raises(StateError, match=rf"step 4 is not in the cache \(.*{where}\): .*max_bytes.*recompute=True"):
            Run(refresh=4, cache=given, state=state)
        again = Run(refresh=4, cache=given, state=state, recompute=True).go(9)
        assert [one.step for one in again.refreshes] == [0, 4, 6, 8]  # a new one at once, then as before
    assert equal(Run(refresh=4, cache=cache, state=state, recompute=True).go(9), Run(refresh=4).go(9))  # not lost


def test_a_projector_that_is_damaged_or_another(tmp_path: Path) -> None:
    """Restored, it is refused with what differs; made new only where the caller says so."""
    cache = ProjectorCache(tmp_path)
    run = Run(refresh=4, cache=cache).go(6)
    state = run.state()
    (path,) = tmp_path.glob("*_4_*.h5")
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:-9] + b"\1" * 9)
    with pytest.raises(ArtifactCorrupt, match="SHA-256"):
        Run(refresh=4, cache=cache, state=state)
    again = Run(refresh=4, cache=cache, state=state, recompute=True).go(7)
    assert [one.step for one in again.refreshes] == [0, 4, 6]
    path.write_bytes(content)
    state["projected"]["parameters"] = "ab" * 32
    with pytest.raises(ProjectorStale, match=r"its parameters is .*, not abab"):
        Run(refresh=4, cache=cache, state=state)


def changed_model(run: Run) -> None:
    with torch.no_grad():
        run.model.scale.add_(1e-3)


@pytest.mark.parametrize(
    ("options", "change", "differs"),
    [
        ({"k": K - 1}, None, "its k is 4, not 3"),
        ({"public": data(PUBLIC, 5)}, None, "its public is .*, not"),
        ({"public": data(PUBLIC - 1, 5)}, None, "its m is 9, not 8; its public is"),
        ({"storage": "float16"}, None, "its storage is 'float32', not 'float16'"),
        ({}, changed_model, "its parameters is .*, not"),
    ],
)
def test_a_stale_entry_is_not_used_and_replaced(
    tmp_path: Path, solves: list[int], options: dict[str, Any], change: Any, differs: str
) -> None:
    """The run goes on, and says what differs."""
    cache = ProjectorCache(tmp_path)
    Run(cache=cache).go(1)
    runs = [Run(**options), Run(cache=cache, **options)]
    for run in runs:
        if change:
            change(run)
    runs[0].go(1)
    with pytest.warns(RuntimeWarning, match=f"a new projector is made: .*{differs}"):
        runs[1].go(1)
    assert equal(*runs)
    assert len(solves) == 3
    (entry,) = cache.entries()
    assert entry.projector.key.storage == options.get("storage", "float32")
    assert entry.projector.key.k == options.get("k", K)


def test_a_damaged_entry_is_not_used_and_replaced(tmp_path: Path) -> None:
    cache = ProjectorCache(tmp_path)
    Run(cache=cache).go(1)
    (path,) = tmp_path.glob("*.h5")
    content = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(content[:2000])
    with pytest.warns(RuntimeWarning, match="a new projector is made: .*cannot be trusted"):
        assert equal(Run(cache=cache).go(1), Run().go(1))
    assert path.read_bytes() == content


def test_a_full_disk_does_not_stop_the_run(tmp_path: Path, full_disk: None) -> None:
    """Said once; projectors are then in checkpoints."""
    cache = ProjectorCache(tmp_path)
    run = Run(refresh=2, cache=cache)
    with pytest.warns(RuntimeWarning) as said:
        run.go(7)
    assert [str(one.message).split(":")[0] for one in said] == [
        "the projector stays in memory only, and in checkpoints"
    ]
    assert "No space left on device" in str(said[0].message)
    state = run.state()
    assert state["projected"]["projector"] is not None
    assert list(cache.entries()) == []
    straight = Run(refresh=2).go(7)
    assert equal(run, straight)
    assert run.refreshes == straight.refreshes
    assert equal(Run(refresh=2, cache=None, state=state).go(11), straight.go(11))


def test_a_disk_that_has_room_again_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProjectorCache(tmp_path)
    run = Run(refresh=2, cache=cache)

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store_projectors, "publish_pieces", refuse)
        with pytest.warns(RuntimeWarning, match="No space left"):
            run.go(3)
    run.go(5)
    assert run.state()["projected"]["projector"] is None
    assert [entry.step for entry in cache.entries()] == [4]


def test_a_projector_larger_than_the_cache_stays_in_memory(tmp_path: Path) -> None:
    run = Run(cache=ProjectorCache(tmp_path, max_bytes=100))
    with pytest.warns(RuntimeWarning, match="in memory only.*holds at most 100"):
        run.go(2)
    assert equal(run, Run().go(2))


def test_a_cache_that_cannot_be_read_does_not_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = ProjectorCache(tmp_path)
    Run(cache=cache, refresh=2).go(5)

    def refuse(*_: Any) -> None:
        raise StoreError("the disk does not answer")

    monkeypatch.setattr(cache, "get", refuse)
    run = Run(cache=cache, refresh=2)
    with pytest.warns(RuntimeWarning) as said:
        run.go(5)
    assert [str(one.message) for one in said] == ["a new projector is made: the disk does not answer"]
    assert equal(run, Run(refresh=2).go(5))


def test_old_entries_make_room_and_the_run_goes_on(tmp_path: Path) -> None:
    run = Run(cache=ProjectorCache(tmp_path / "first")).go(1)
    (path,) = (tmp_path / "first").glob("*.h5")
    cache = ProjectorCache(tmp_path / "second", max_bytes=int(2.5 * path.stat().st_size))
    run = Run(cache=cache).go(6)
    assert [entry.step for entry in cache.entries()] == [4, 5]
    assert equal(Run(cache=cache, state=run.state()).go(8), Run().go(8))


def test_an_entry_holds_what_was_made(tmp_path: Path) -> None:
    run = Run(cache=ProjectorCache(tmp_path), held_out=held_out(), refresh=None).go(3)
    (path,) = tmp_path.glob("*.h5")
    found, projector = read_projector(path), run.projected.projector
    assert np.array_equal(found.basis, np.hstack([projector.basis[n].numpy() for n in sorted(projector.basis)]))
    assert np.array_equal(found.values["eigenvalues"], projector.eigenvalues)
    assert np.array_equal(found.values["spectrum"], projector.spectrum)
    assert found.record == {**run.refreshes[0].record(), "run": RUN.hex()}
    key = found.key
    assert (key.scope, key.step, key.part, key.kind) == (RUN.hex(), 0, "0-of-1", "eigen")
    assert (key.k, key.m, key.p, key.storage) == (K, PUBLIC, 35, "float32")


def test_random_projections_are_drawn_not_kept(tmp_path: Path) -> None:
    Run(kind="random", cache=ProjectorCache(tmp_path)).go(2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("tag", ["pretrained", None])
def test_runs_of_one_tag_share_an_entry(tmp_path: Path, solves: list[int], tag: str | None) -> None:
    """Others do not, though all else is the same."""
    cache = ProjectorCache(tmp_path)
    nonces = [bytes([number]) * 16 for number in range(3)]
    runs = [Run(noise={"run": nonce}, cache=cache, tag=tag, refresh=None).go(3) for nonce in nonces]
    assert len(solves) == len(list(cache.entries())) == (1 if tag else 3)
    assert [run.refreshes[0].source for run in runs] == ["computed"] + ["cache" if tag else "computed"] * 2
    assert equal(runs[2], Run(noise={"run": nonces[2]}, refresh=None).go(3))
    if tag:
        resumed = Run(noise={}, cache=cache, tag=tag, refresh=None, state=runs[1].state())
        assert equal(resumed.go(5), Run(noise={"run": nonces[1]}, refresh=None).go(5))
        Run(noise={"run": bytes(16)}, cache=cache, tag="another", refresh=None).go(1)
        assert len(solves) == 4  # of the tag, twice without a cache, and of the other tag
        Run(model=net(seed=6), noise={"run": bytes(16)}, cache=cache, tag=tag, refresh=None).go(1)
        Run(noise={"run": bytes(16)}, cache=cache, tag=tag, refresh=None, k=K - 1).go(1)
        assert len(solves) == 6  # other parameters, another k: entries of their own, side by side with the first
        assert Run(cache=cache, tag=tag, refresh=None).go(1).refreshes[0].source == "cache"
        assert not any("pretrained" in path.name or RUN.hex() in path.name for path in tmp_path.iterdir())


# --- refusals --------------------------------------------------------------------------------------


def test_correlated_noise_needs_the_participation_check(built: Any) -> None:
    for strategy in ("buffered", "dense", "banded-low-rank"):
        noise = {"artifact": built(strategy).artifact, "optimizer": None}
        with pytest.raises(PrivacyError, match=r"correlated.*check_participation=True.*independent noise"):
            Run(noise=noise)
        Run(noise={**noise, "check_participation": True}).go(2)


def test_independent_noise_is_known_whatever_strategy_holds_it() -> None:
    strategy = DenseStrategy.from_matrix(np.diag([1.0, 0.5, 0.8, 1.0]))
    run = Run(noise={"artifact": from_factorization(adopt(prefix_sum(4), strategy))}).go(2)
    assert run.projected.epsilon(1e-5, sampling_probability=0.1) > 0


SHARED = torch.cat([data(30, 9)[0], public()[0][[6]]])


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"private": SHARED}, ProjectorError, "public example 6 is also private example 30: .*take it out"),
        ({"private": held_out()[0], "held_out": held_out()}, ProjectorError, "held-out example 0 is also private"),
        ({"private": held_out()[0], "held_out": held_out(), "kind": "random"}, ProjectorError, "held-out example 0"),
        ({"held_out": SHARED}, ProjectorError, "held-out example 30 is also public example 6"),
        ({"private": SHARED.double()}, ProjectorError, "private example 0 is torch.float64"),
        ({"private": SHARED[:, :4]}, ProjectorError, r"of shape \(4,\), the public example"),
        ({"public": None}, ProjectorError, "per_example and public examples are needed"),
        ({"per_example": None}, ProjectorError, "per_example and public examples are needed"),
        ({"per_example": None, "kind": "random", "held_out": held_out()}, ProjectorError, "held-out examples need"),
        ({"public": (torch.zeros(3, 5), torch.zeros(4, 2))}, ProjectorError, "public examples have 3 and 4 rows"),
        ({"held_out": (torch.zeros(3, 5), torch.zeros(4, 2))}, ProjectorError, "held-out examples have 3 and 4 rows"),
        ({"public": torch.zeros(0, 5)}, ProjectorError, "0 rows"),
        ({"kind": "lanczos"}, ProjectorError, "kind 'lanczos' must be one of"),
        ({"storage": "bfloat16"}, ProjectorError, "storage 'bfloat16' one of"),
        ({"k": 0}, StateError, "k = 0 must be a whole number of at least 1"),
        ({"k": 2.0}, StateError, "k = 2.0 must be"),
        ({"refresh": 0}, StateError, "refresh = 0 must be"),
        ({"refresh": True}, StateError, "refresh = True must be"),
        ({"start_step": -1}, StateError, "start_step = -1 must be"),
        ({"tag": 7}, StateError, "tag = 7 must be text"),
    ],
)
def test_what_does_not_fit_is_refused_at_the_start(options: dict[str, Any], error: Any, words: str) -> None:
    with pytest.raises(error, match=words):
        Run(**options)


def test_only_a_gradient_noise_is_projected() -> None:
    model = net()
    with pytest.raises(ProjectorError, match=r"must be a GradientNoise, which has its noise before .*, not Net"):
        ProjectedNoise(model, PerExample(model), public(), K)


def test_private_examples_that_are_others_are_fine() -> None:
    assert equal(Run(private=SHARED[:30], held_out=held_out()).go(2), Run().go(2))


@pytest.mark.parametrize(
    ("k", "words"),
    [
        (PUBLIC + 1, "k = 10 is above the number of public examples, 9: give a smaller k or more examples"),
        (36, "above the number of public examples"),
    ],
)
def test_k_above_what_the_public_gradients_span(k: int, words: str) -> None:
    with pytest.raises(ProjectorError, match=words):
        Run(k=k)
    with pytest.raises(ProjectorError, match="from 1 to the number of elements, 35"):
        Run(k=36, kind="random").step()


def test_it_is_never_pickled_or_copied() -> None:
    run = Run().go(1)
    for act in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(StateError, match="never pickled or copied"):
            act(run.projected)


# --- privacy ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", [None, accounting.PLD, accounting.RDP, accounting.RDP_CLASSIC])
def test_epsilon_under_sampling_is_that_of_dp_sgd(accountant: str | None) -> None:
    run = Run(refresh=None).go(5)
    found = run.projected.epsilon(1e-5, sampling_probability=0.03, accountant=accountant)
    expected = accounting.poisson_dpsgd_epsilon(SIGMA, 0.03, 5, 1e-5, accountant=accountant or accounting.PLD)
    assert found == expected > 0


def test_epsilon_of_a_single_pass_is_exact_and_the_same_at_every_step(built: Any) -> None:
    correlated = {"artifact": built("buffered").artifact, "check_participation": True, "optimizer": None}
    for noise in ({"check_participation": True}, correlated):
        run = Run(noise=noise, refresh=None)
        for _ in range(2):
            assert run.projected.epsilon(1e-5) == privacy.gaussian_epsilon(SIGMA, 1e-5)
            run.go(3)


def test_a_single_pass_that_nobody_checked_has_no_epsilon() -> None:
    """Five passes over the data would look like one."""
    with pytest.raises(PrivacyError, match=r"nobody checked.*sampling_probability="):
        Run(refresh=None).go(3).projected.epsilon(1e-5)


def test_another_number_of_processes_needs_a_new_projector_but_for_random_ones() -> None:
    """As if the state were that of one of two processes."""
    states = {}
    for kind in ("eigen", "random"):
        run = Run(kind=kind, refresh=5).go(3)
        states[kind] = {
            "model": run.model.state_dict(),
            "noise": run.noise.state_dict(),
            "projected": run.projected.state_dict(),
        }
        states[kind]["projected"]["settings"]["part"] = "0-of-2"
    with pytest.raises(StateError, match="the state has part = '0-of-2'"):
        Run(kind="eigen", refresh=5, state=states["eigen"])
    moved = Run(kind="eigen", refresh=5, state=states["eigen"], recompute=True)
    assert moved.projected.projector is None
    assert [one.step for one in moved.go(4).projected.refreshes] == [0, 3]
    same = Run(kind="random", refresh=5, state=states["random"])
    whole = Run(kind="random", refresh=5).go(7)
    assert all(torch.equal(a, b) for a, b in zip(same.go(7).model.parameters(), whole.model.parameters(), strict=True))


def test_sampling_amplifies_no_correlated_noise(built: Any) -> None:
    run = Run(noise={"artifact": built("buffered").artifact, "check_participation": True, "optimizer": None})
    with pytest.raises(PrivacyError, match=r"independent noise only.*leave sampling_probability out"):
        run.projected.epsilon(1e-5, sampling_probability=0.01)


@pytest.mark.parametrize(("delta", "q"), [(0.0, None), (1.0, 0.1), (1e-5, 0.0), (1e-5, 1.5), (1e-5, float("nan"))])
def test_no_epsilon_of_nonsense(delta: float, q: float | None) -> None:
    with pytest.raises(PrivacyError):
        Run().projected.epsilon(delta, sampling_probability=q)


def test_no_key_and_no_private_gradient_is_kept(tmp_path: Path) -> None:
    """In no state, representation, ledger or cache file: not the key, not 8 bytes of a private gradient or sum."""
    key = NoiseKey.from_bytes(bytes(range(101, 133)))
    run = Run(noise={"key": key}, cache=ProjectorCache(tmp_path / "cache"), refresh=2, held_out=held_out())
    full = Run(noise={"key": key}, refresh=2)
    secrets = [bytes(range(101, 133)), bytes(range(101, 133)).hex().encode()]
    for step in range(5):
        each = PerExample(run.model)(*private(step))
        rows = [row for part in each.values() for row in part] + [part.sum(0) for part in each.values()]
        secrets += [row.flatten()[:2].numpy().tobytes() for row in rows if row.numel() > 1 and row.flatten()[:2].all()]
        run.step(), full.step()
    assert len(secrets) > 50
    files = [path.read_bytes() for path in (tmp_path / "cache").glob("*.h5")]
    assert len(files) == 3
    kept = list(files)
    for one in (run, full):
        file = io.BytesIO()
        torch.save(one.projected.state_dict(), file)
        said = f"{one.projected!r} {one.refreshes!r} {one.projected.projector!r} {json.dumps(one.projected.ledger())}"
        kept += [file.getvalue(), said.encode()]
    # the search finds what is there
    assert any(run.projected.projector.basis["scale"].numpy().tobytes()[:4] in content for content in files)
    assert not any(secret in content for secret in secrets for content in kept)


def test_the_ledger_says_how_it_was_projected() -> None:
    run = Run(k=3, refresh=2, start_step=1, tag="pretrained").go(4)
    ledger = run.projected.ledger()
    assert {name: value for name, value in ledger.items() if name != "projection"} == run.noise.ledger()
    said = ledger["projection"]
    expected = {"kind": "eigen", "k": 3, "refresh": 2, "start_step": 1, "storage": "float32", "tag": "pretrained"}
    assert {name: said[name] for name in expected} == expected
    assert said["refreshes"] == 2
    json.dumps(ledger)


def test_a_refresh_that_is_interrupted_lets_no_example_count_twice() -> None:
    """The breaker's: Ctrl-C while the public gradients are made, and then the same batch again."""
    sums, run = [], Run(refresh=1).go(1)
    add_noise = run.noise._add_noise
    run.noise._add_noise = lambda given, ids: (
        sums.append({n: part.clone() for n, part in given.items()}) or add_noise(given, ids)
    )
    given, run.projected._per_example = run.per_example, interrupted
    with pytest.raises(KeyboardInterrupt):
        run.step()
    run.projected._per_example = given
    run.step()
    straight = PerExample(Run(refresh=1).go(1).model)(*private(1))
    norms = torch.stack([part.reshape(len(part), -1).norm(dim=1) for part in straight.values()]).norm(dim=0)
    for name, part in straight.items():
        clipped = (part.reshape(len(part), -1) * (CLIP / norms).clamp(max=1)[:, None]).sum(0)
        torch.testing.assert_close(sums[0][name].flatten(), clipped, rtol=1e-4, atol=1e-5)


def interrupted(*rows: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_changes_nothing(dtype: torch.dtype) -> None:
    straight = Run(refresh=2, held_out=held_out()).go(3)
    run = Run(refresh=2, held_out=held_out())
    for step in range(3):
        run.projected.clip(PerExample(run.model)(*private(step)))
        run.projected._per_example = lambda *rows: without_autocast(run, rows)
        with torch.autocast("cpu", dtype):
            run.projected.step()
        run.optimizer.step()
    assert equal(run, straight)
    assert run.refreshes == straight.refreshes


def without_autocast(run: Run, rows: Any) -> Any:
    """The user's own gradients may be cast; here they are to be the same."""
    with torch.autocast("cpu", enabled=False):
        return run.per_example(*rows)


def test_a_state_that_was_forgotten_is_asked_for() -> None:
    """With refresh=None the run would go on with another projector, without a word."""
    state = Run(refresh=None).go(3).state()
    model = net()
    model.load_state_dict(state["model"])
    noise = GradientNoise.restore(model, INDEPENDENT, state["noise"], batch_size=BATCH, key=KEY, resume="unpublished")
    projected = ProjectedNoise(noise, PerExample(model), public(), K, refresh=None)
    with pytest.warns(RuntimeWarning, match=r"at step 3 of a run a new projector is made.*load_state_dict\(\) first"):
        projected.step()


def test_public_examples_are_copied() -> None:
    features, targets = public()
    run = Run(public=(features, targets)).go(1)
    features.zero_()
    assert equal(run.go(3), Run().go(3))


def test_private_examples_that_can_be_seen_once_only_are_refused() -> None:
    with pytest.raises(ProjectorError, match=r"not a generator: it is looked through more than once"):
        Run(private=(row for row in private(0)[0]), held_out=held_out())


def test_no_step_to_project_is_refused() -> None:
    with pytest.raises(ProjectorError, match="start_step = 64 is past the last of the 64 steps"):
        Run(start_step=64)


def test_directions_that_are_not_orthonormal_have_no_figures() -> None:
    seen = Run(kind="random-plain", held_out=held_out()).go(1).refreshes[0]
    assert (seen.held_out_explained, seen.held_out_error, seen.noisy_explained) == (None, None, None)


def test_frozen_parameters_belong_to_the_key_and_buffers_do_not(tmp_path: Path) -> None:
    """A buffer may hold what private data left there without noise, and not even its digest may be stored."""
    digests = []
    for weight, mean in ((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)):
        model = net()
        model.add_module("frozen", torch.nn.BatchNorm1d(3))
        model.frozen.requires_grad_(False)
        model.frozen.weight.data.fill_(weight)
        model.frozen.running_mean.fill_(mean)
        digests.append(Run(model=model, cache=ProjectorCache(tmp_path)).projected._digest_parameters())
    assert digests[0] == digests[2] != digests[1]


def test_a_projector_that_was_evicted_is_in_the_state(tmp_path: Path) -> None:
    """The only copy is then in memory."""
    cache = ProjectorCache(tmp_path)
    run = Run(cache=cache, refresh=None).go(3)
    assert run.state()["projected"]["projector"] is None
    for path in tmp_path.glob("*.h5"):
        path.unlink()
    state = run.state()
    assert state["projected"]["projector"] is not None
    assert equal(Run(noise={}, cache=cache, refresh=None, state=state).go(6), Run(refresh=None).go(6))


def test_a_record_that_the_cache_refuses_stops_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any) -> None:
        raise ProjectorError("a record of nan")

    monkeypatch.setattr(ProjectorCache, "put", refuse)
    with pytest.warns(RuntimeWarning, match="stays in memory only"):
        run = Run(cache=ProjectorCache(tmp_path)).go(2)
    assert run.state()["projected"]["projector"] is not None
