"""Opacus with correlated noise: its optimizers' steps against dense algebra, one big batch, and each other.

White values come straight from the source, matrices from a simulated optimizer and numpy's inverse, gradients from
torch.func, and the epsilon of one Gaussian release from mpmath.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest

from mmfact.factorize.errors import (
    AdapterError,
    HorizonError,
    MmfactError,
    ParticipationError,
    PrivacyError,
    StateError,
)
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.source import NoiseSource

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
adapter = pytest.importorskip("mmfact.noise.opacus")

from opacus import PrivacyEngine, optimizers, schedulers  # noqa: E402
from opacus.utils.batch_memory_manager import BatchMemoryManager  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils import data  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
    pytest.mark.filterwarnings("ignore::mmfact.noise.guard.WorkloadMismatch"),
]

SIGMA, CLIP, BATCH, STEPS = 1.3, 0.4, 4, 12
RUN = bytes(range(16))
STRATEGIES = ["dense", "buffered", "banded-low-rank"]
MODES = ["hooks", "ghost"]

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
modes = pytest.mark.parametrize("mode", MODES)


def examples(count: int = BATCH * STEPS, dtype: Any = torch.float32) -> data.TensorDataset:
    random = torch.Generator().manual_seed(5)
    features = torch.randn(count, 6, generator=random, dtype=torch.float64).to(dtype)
    return data.TensorDataset(features, torch.randint(0, 3, (count,), generator=random))


def network(dtype: Any = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


@dataclass
class Loop:
    """What `make_private` gave, and a criterion that can be called either way."""

    engine: Any
    model: Any
    optimizer: Any
    criterion: Any
    loader: Any

    def train(self, batches: Any, each: Callable[[], None] = lambda: None) -> None:
        for features, labels in batches:
            self.criterion(self.model(features), labels).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            each()

    def parameters(self) -> Any:
        inner = getattr(self.model, "_module", self.model)
        return torch.cat([p.detach().flatten() for p in inner.parameters()]).clone()


def private(
    mode: str = "hooks",
    net: Any = None,
    loader: Any = None,
    *,
    sigma: float = SIGMA,
    clip: Any = CLIP,
    reduction: str = "mean",
    accountant: str = "mmfact",
    rate: float = 0.1,
    momentum: float = 0.9,
    **options: Any,
) -> Loop:
    engine = PrivacyEngine(accountant=accountant)
    net = network() if net is None else net
    criterion = nn.CrossEntropyLoss(reduction=reduction)
    made = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=rate, momentum=momentum),
        criterion=criterion,
        data_loader=data.DataLoader(examples(), batch_size=BATCH) if loader is None else loader,
        noise_multiplier=sigma,
        max_grad_norm=clip,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        **{"poisson_sampling": False, **options},
    )
    model, optimizer, *wrapped, loader = made
    return Loop(engine, model, optimizer, *(wrapped or [criterion]), loader)


@pytest.fixture
def attach(built: Callable[..., Any], key: NoiseKey) -> Callable[..., Any]:
    """attach(loop, strategy="buffered", **options): the loop's optimizer with the noise of RUN."""

    def run(loop: Loop, strategy: str = "buffered", **options: Any) -> Any:
        options = {"data_loader": loop.loader, "key": key, "run": RUN, **options}
        return adapter.correlate(loop.optimizer, loop.model, built(strategy, "float64").artifact, **options)

    return run


@pytest.fixture(autouse=True)
def no_noise_of_opacus(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(*args: Any, **options: Any) -> None:
        raise RuntimeError("Opacus drew noise of its own")

    monkeypatch.setattr("opacus.optimizers.optimizer._generate_noise", draw)
    monkeypatch.setattr("opacus.optimizers.optimizer_fast_gradient_clipping._generate_noise", draw)


def white(artifact: Any, key: NoiseKey, names: dict[str, int], dtype: str) -> Any:
    """Z of all tensors side by side, shape (n, elements)."""
    rows = []
    for name, size in names.items():
        source = NoiseSource(key, RUN, artifact.digest, name, np.dtype(dtype))
        drawn = np.empty((artifact.n, size), dtype)
        for step in range(artifact.n):
            source.fill(step, 0, drawn[step])
        rows.append(drawn.astype(np.float64))
    return np.hstack(rows)


def clipped_sum(net: nn.Module, features: Any, labels: Any, clip: float) -> Any:
    """The sum of clipped gradients, example by example, in float64."""
    total = 0.0
    for one, label in zip(features, labels, strict=True):
        grads = torch.autograd.grad(nn.functional.cross_entropy(net(one[None]), label[None]), list(net.parameters()))
        flat = torch.cat([g.flatten() for g in grads]).double().numpy()
        total = total + flat * min(1.0, clip / np.linalg.norm(flat))
    return total


@modes
@strategies
@pytest.mark.parametrize(
    ("dtype", "clip", "tolerance"),
    [("float32", CLIP, 1e-4), ("float64", 50.0, 1e-10)],  # in float64 nothing is clipped: its margin is wider
)
def test_a_whole_run_is_that_of_dense_algebra(
    built: Callable[..., Any], key: NoiseKey, strategy: str, mode: str, dtype: str, clip: float, tolerance: float
) -> None:
    """theta_n = theta_0 - rate / batch * (A G + sigma clip sensitivity A C^-1 Z), A from a simulated optimizer."""
    case = built(strategy, "float64", "cooldown")
    kind = getattr(torch, dtype)
    loader = data.DataLoader(examples(dtype=kind), batch_size=BATCH)
    sigma = SIGMA * CLIP / clip
    loop = private(mode, network(kind), loader, sigma=sigma, clip=clip, momentum=0.95)
    adapter.correlate(loop.optimizer, loop.model, case.artifact, data_loader=loop.loader, key=key, run=RUN)
    rates = case.artifact.workload.learning_rates
    schedule = torch.optim.lr_scheduler.LambdaLR(
        loop.optimizer.original_optimizer, lambda step: rates[min(step, STEPS - 1)]
    )
    twin, sums, start = network(kind), [], loop.parameters().double().numpy()
    for features, labels in loop.loader:
        twin.load_state_dict(loop.model._module.state_dict())
        sums.append(clipped_sum(twin, features, labels, clip))
        loop.train([(features, labels)], schedule.step)
    names = {name: p.numel() for name, p in twin.named_parameters()}
    Z = white(case.artifact, key, names, dtype)
    sensitivity = np.linalg.norm(case.C, axis=0).max()
    noise = sigma * clip * sensitivity * case.noising @ Z
    expected = start - 0.1 / BATCH * (case.A @ (np.array(sums) + noise))[-1]
    found = loop.parameters().double().numpy()
    assert np.linalg.norm(found - expected) <= tolerance * np.linalg.norm(expected)
    assert np.linalg.norm(found - start) > 0.1 * np.linalg.norm(start)


@modes
@strategies
def test_rows_are_those_of_a_noise_stream(
    built: Callable[..., Any], attach: Callable[..., Any], key: NoiseKey, strategy: str, mode: str
) -> None:
    """Batches of examples that count as zero: what is left is the row, bit for bit."""
    features, labels = examples().tensors
    loader = data.DataLoader(data.TensorDataset(features * float("nan"), labels), batch_size=BATCH)
    loop = private(mode, loader=loader, reduction="sum")
    attach(loop, strategy)
    streams = {
        name: NoiseStream(
            built(strategy, "float64").artifact, p.numel(), noise_multiplier=SIGMA, clip_norm=CLIP, key=key, name=name,
            run=RUN,
        )
        for name, p in loop.model._module.named_parameters()
    }  # fmt: skip
    rows = []
    loop.optimizer.original_optimizer.register_step_pre_hook(
        lambda *_: rows.append({n: p.grad.flatten().numpy().copy() for n, p in loop.model._module.named_parameters()})
    )
    loop.train(loader)
    assert len(rows) == STEPS
    for row in rows:
        for name, stream in streams.items():
            np.testing.assert_array_equal(row[name], stream.next())


@modes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_batch_memory_manager_gives_the_steps_of_the_big_batches(
    attach: Callable[..., Any], mode: str, reduction: str
) -> None:
    rate = 0.1 if reduction == "mean" else 0.1 / BATCH
    whole, parts = (private(mode, reduction=reduction, rate=rate) for _ in range(2))
    attach(whole)
    noise = attach(parts)
    whole.train(whole.loader)
    with BatchMemoryManager(data_loader=parts.loader, max_physical_batch_size=3, optimizer=parts.optimizer) as small:
        counts: list[int] = []
        skipped: list[bool] = []
        parts.train(
            small,
            lambda: (counts.append(noise.step_number), skipped.append(parts.optimizer._is_last_step_skipped)),
        )
    assert counts == [step // 2 for step in range(1, 2 * STEPS + 1)]  # 4 = 2 + 2: every second call is a step
    assert skipped == [True, False] * STEPS  # which loops ask before they move a learning-rate scheduler
    torch.testing.assert_close(parts.parameters(), whole.parameters(), rtol=1e-5, atol=1e-6)
    assert len(parts.engine.accountant) == STEPS


def test_accumulation_by_hand_is_one_step_with_one_divisor(attach: Callable[..., Any]) -> None:
    whole = private()
    attach(whole)
    whole.train(whole.loader)
    loop = private(loader=data.DataLoader(examples(), batch_size=BATCH // 2))
    noise = attach(loop, accumulation=2)
    for number, (features, labels) in enumerate(loop.loader):
        loop.criterion(loop.model(features), labels).backward()
        if number % 2:
            loop.optimizer.step()
            loop.optimizer.zero_grad()
    assert noise.step_number == STEPS
    torch.testing.assert_close(loop.parameters(), whole.parameters(), rtol=1e-5, atol=1e-6)


def test_more_backward_passes_than_were_announced_are_refused_before_a_row_is_spent(attach: Callable[..., Any]) -> None:
    loop = private()
    noise = attach(loop)
    for features, labels in list(loop.loader)[:2]:
        loop.criterion(loop.model(features), labels).backward()
    with pytest.raises(AdapterError, match=r"2 backward passes .* accumulation=2"):
        loop.optimizer.step()
    assert noise.step_number == 0


def test_gradients_that_were_not_cleared_count_once(attach: Callable[..., Any]) -> None:
    cleared, kept = private(), private()
    attach(cleared)
    attach(kept)
    cleared.train(cleared.loader)
    kept.optimizer.zero_grad = lambda *_: None
    kept.train(kept.loader)
    assert torch.equal(kept.parameters(), cleared.parameters())


class Root(nn.Module):
    """Its derivative is infinite at 0 and NaN below, though it has no parameter."""

    def forward(self, values: Any) -> Any:
        return torch.sqrt(values)


def _bad_features(kind: str) -> Any:
    features = examples().tensors[0].abs()
    bad = torch.zeros(len(features), dtype=torch.bool)
    bad[1::BATCH], bad[6] = True, True
    features[bad, 2] = {"nan": float("nan"), "inf": float("inf"), "overflow": 3e38, "derivative": 0.0}[kind]
    return features, bad


@modes
@pytest.mark.parametrize("kind", ["nan", "inf", "overflow", "derivative"])
def test_examples_without_a_finite_gradient_count_as_zero(attach: Callable[..., Any], mode: str, kind: str) -> None:
    """The run is that of the other examples alone, under the same divisor."""
    features, bad = _bad_features(kind)
    labels = examples().tensors[1]

    def net() -> nn.Module:
        torch.manual_seed(0)
        first = nn.Linear(6, 6, bias=False)
        with torch.no_grad():
            first.weight.copy_((10.0 if kind == "overflow" else 1.0) * torch.eye(6))
        return nn.Sequential(first, Root() if kind == "derivative" else nn.LeakyReLU(), nn.Linear(6, 3))

    def run(batches: list[Any]) -> Loop:
        loop = private(mode, net(), data.DataLoader(data.TensorDataset(features, labels), batch_size=BATCH))
        attach(loop)
        loop.train(batches)
        return loop

    steps = 1 if kind == "derivative" else 4  # after a step its zeros are gone
    parts = [slice(first, first + BATCH) for first in range(0, steps * BATCH, BATCH)]
    found = run([(features[rows], labels[rows]) for rows in parts])
    alone = run([(features[rows][~bad[rows]], labels[rows][~bad[rows]]) for rows in parts])
    assert torch.isfinite(found.parameters()).all()
    torch.testing.assert_close(found.parameters(), alone.parameters(), rtol=1e-5, atol=1e-6)


@modes
def test_one_example_moves_the_released_sum_by_the_clip_norm_at_most(attach: Callable[..., Any], mode: str) -> None:
    features, labels = examples().tensors
    features = features * torch.logspace(-3, 4, len(features))[:, None]

    def released(rows: Any) -> Any:
        loader = data.DataLoader(data.TensorDataset(features, labels), batch_size=len(features))
        loop = private(mode, loader=loader, reduction="sum", rate=1.0, momentum=0.0)
        attach(loop)
        start = loop.parameters().double()
        loop.train([(features[rows], labels[rows])])
        return start - loop.parameters().double()

    everyone = torch.arange(len(features))
    base = released(everyone)
    moved = [float((base - released(everyone[everyone != left_out])).norm()) for left_out in everyone[::6]]
    assert max(moved) <= CLIP * (1 + 1e-5)  # rounding of two float32 parameter vectors
    assert max(moved) > 0.99 * CLIP


def test_bf16_models_get_the_noisy_float32_sum_cast_once(
    attach: Callable[..., Any], built: Callable[..., Any], key: NoiseKey
) -> None:
    net = network().to(torch.bfloat16)
    loop = private("hooks", net, reduction="sum", clip=50.0)
    attach(loop)
    features, labels = next(iter(loop.loader))
    loop.criterion(loop.model(features.to(torch.bfloat16)), labels).backward()
    sums = {name: p.grad_sample.float().sum(0) for name, p in net.named_parameters()}
    loop.optimizer.pre_step()
    artifact = built("buffered", "float64").artifact
    lies_on_a_grid = 0
    for name, p in net.named_parameters():
        row = torch.from_numpy(
            NoiseStream(artifact, p.numel(), noise_multiplier=SIGMA, clip_norm=50.0, key=key, name=name, run=RUN).next()
        ).view_as(p)
        assert torch.equal(p.grad, (sums[name] + row).to(torch.bfloat16))
        lies_on_a_grid += int((p.grad == sums[name].to(torch.bfloat16) + row.to(torch.bfloat16)).sum())
    assert lies_on_a_grid < sum(p.numel() for p in net.parameters())


@modes
def test_a_checkpoint_of_the_engine_resumes_bit_for_bit(
    attach: Callable[..., Any], built: Callable[..., Any], key: NoiseKey, tmp_path: Path, mode: str
) -> None:
    whole = private(mode)
    attach(whole)
    whole.train(whole.loader)

    loop = private(mode)
    noise = attach(loop, journal=tmp_path / "journal")
    batches = list(loop.loader)
    loop.train(batches[:5])
    loop.engine.save_checkpoint(
        path=tmp_path / "checkpoint", module=loop.model, optimizer=loop.optimizer,
        checkpoint_dict={"noise": noise.state_dict()},
    )  # fmt: skip
    noise.commit()
    noise.close()

    later = private(mode, network())
    found = later.engine.load_checkpoint(path=tmp_path / "checkpoint", module=later.model, optimizer=later.optimizer)
    again = adapter.restore(
        later.optimizer, later.model, built("buffered", "float64").artifact, found["noise"], data_loader=later.loader,
        key=key, journal=tmp_path / "journal",
    )  # fmt: skip
    assert again.step_number == len(later.engine.accountant) == 5
    later.train(batches[5:])
    assert torch.equal(later.parameters(), whole.parameters())
    assert len(later.engine.accountant) == STEPS
    with pytest.raises(ParticipationError, match="second pass"):
        later.train(batches[:1])


def test_a_state_is_restored_only_with_its_scales_and_its_count(
    attach: Callable[..., Any], built: Callable[..., Any], key: NoiseKey
) -> None:
    loop = private()
    noise = attach(loop)
    loop.train(list(loop.loader)[:3])
    state, counted = noise.state_dict(), loop.engine.accountant.state_dict()

    def restored(fresh: Loop) -> Any:
        return adapter.restore(
            fresh.optimizer, fresh.model, built("buffered", "float64").artifact, state, data_loader=fresh.loader,
            key=key, resume="unpublished",
        )  # fmt: skip

    for wrong in ({"sigma": SIGMA / 2}, {"clip": 2 * CLIP}):
        with pytest.raises(StateError, match="the run was started with"):
            restored(private(**wrong))
    fresh = private()
    fresh.engine.accountant.load_state_dict({**counted, "history": [(SIGMA, 1 / STEPS, 2)]})
    with pytest.raises(PrivacyError, match="counted 2 steps"):
        restored(fresh)
    fresh = private()
    restored(fresh)
    assert len(fresh.engine.accountant) == 3  # known from the noise, with no state of its own
    fresh.engine.accountant.load_state_dict(counted)
    fresh.train(list(loop.loader)[3:4])
    with pytest.raises(StateError, match=r"of 3 steps .* at step 4"):
        fresh.engine.accountant.load_state_dict(counted)
    with pytest.raises(StateError, match="not one that 'mmfact' saved"):
        fresh.engine.accountant.load_state_dict({"mechanism": "rdp", "history": []})


def _epsilon(sigma: float, delta: float) -> float:
    """Theorem 8 of Balle and Wang 2018, solved in 40 digits."""
    with mpmath.workdps(40):
        mu, low, high = 1 / mpmath.mpf(sigma), mpmath.mpf(0), mpmath.mpf(60)
        while high - low > 1e-20:
            eps = (low + high) / 2
            found = mpmath.ncdf(mu / 2 - eps / mu) - mpmath.exp(eps) * mpmath.ncdf(-mu / 2 - eps / mu)
            low, high = (eps, high) if found > mpmath.mpf(delta) else (low, eps)
        return float(high)


def test_epsilon_is_that_of_one_gaussian_release_at_every_step(attach: Callable[..., Any]) -> None:
    loop = private()
    with pytest.raises(PrivacyError, match=r"correlate\(optimizer"):
        loop.engine.get_epsilon(1e-5)
    attach(loop)
    seen: list[float] = []
    loop.train(loop.loader, lambda: seen.append(loop.engine.get_epsilon(1e-5)))
    exact = _epsilon(SIGMA, 1e-5)
    assert len(seen) == STEPS
    assert all(exact <= epsilon <= exact * (1 + 1e-7) for epsilon in seen)
    with pytest.raises(PrivacyError, match="delta"):
        loop.engine.get_epsilon(0.0)


def test_the_engine_finds_the_noise_multiplier_for_one_pass_and_no_more() -> None:
    net = network()
    options: dict[str, Any] = {
        "module": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1),
        "data_loader": data.DataLoader(examples(), batch_size=BATCH),
        "target_epsilon": 2.0,
        "target_delta": 1e-5,
        "max_grad_norm": 1.0,
        "poisson_sampling": False,
    }
    _, optimizer, _ = PrivacyEngine(accountant="mmfact").make_private_with_epsilon(epochs=1, **options)
    assert 1.98 <= _epsilon(optimizer.noise_multiplier, 1e-5) <= 2.0
    with pytest.raises(ParticipationError, match="more than one pass"):
        PrivacyEngine(accountant="mmfact").make_private_with_epsilon(epochs=2, **options)


def test_the_accountant_refuses_what_is_not_its_release(attach: Callable[..., Any]) -> None:
    loop = private()
    attach(loop)
    accountant = loop.engine.accountant
    with pytest.raises(PrivacyError, match=r"noise multiplier 0\.5 is none of the release"):
        accountant.step(noise_multiplier=0.5, sample_rate=1 / STEPS)
    with pytest.raises(PrivacyError, match="sample rate"):
        accountant.step(noise_multiplier=SIGMA, sample_rate=0.0)
    for _ in range(STEPS):
        accountant.step(noise_multiplier=SIGMA, sample_rate=1 / STEPS)
    with pytest.raises(ParticipationError, match="more than one pass"):
        accountant.step(noise_multiplier=SIGMA, sample_rate=1 / STEPS)


def test_the_accountant_refuses_independent_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "opacus.optimizers.optimizer._generate_noise", lambda reference, **_: torch.zeros_like(reference)
    )
    loop = private()
    start = loop.parameters()
    with pytest.raises(PrivacyError, match="independent noise"):
        loop.train(loop.loader)
    assert torch.equal(loop.parameters(), start)


@pytest.mark.parametrize("accountant", ["rdp", "prv", "gdp"])
@pytest.mark.filterwarnings("ignore:GDP accounting")
def test_an_accountant_for_other_noise_is_refused(attach: Callable[..., Any], accountant: str) -> None:
    with pytest.raises(AdapterError, match='PrivacyEngine\\(accountant="mmfact"\\)'):
        attach(private(accountant=accountant))


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction"])
def test_what_the_release_rests_on_stays_as_it_was(attach: Callable[..., Any], name: str) -> None:
    loop = private()
    noise = attach(loop)
    start = loop.parameters()
    setattr(loop.optimizer, name, "sum" if name == "loss_reduction" else 0.9 * getattr(loop.optimizer, name))
    with pytest.raises(StateError, match=name):
        loop.train(loop.loader)
    assert noise.step_number == 0
    assert torch.equal(loop.parameters(), start)


@modes
@pytest.mark.parametrize("kind", ["ExponentialNoise", "ExponentialGradClip"])
def test_schedulers_of_noise_and_clipping_are_refused(attach: Callable[..., Any], mode: str, kind: str) -> None:
    loop = private(mode)
    noise = attach(loop)
    scheduler = getattr(schedulers, kind)(loop.optimizer, gamma=0.99)
    loop.train(list(loop.loader)[:1])
    scheduler.step()
    with pytest.raises(StateError, match="scheduler"):
        loop.train(list(loop.loader)[1:])
    assert noise.step_number == 1


def test_ghost_clipping_keeps_the_latched_clip_norm(attach: Callable[..., Any]) -> None:
    loops = [private("ghost") for _ in range(2)]
    for loop in loops:
        attach(loop)
    loops[0].model.max_grad_norm = 100 * CLIP
    for loop in loops:
        loop.train(loop.loader)
    assert torch.equal(loops[0].parameters(), loops[1].parameters())


def _loader(sampler: Any = None, **options: Any) -> Any:
    return data.DataLoader(examples(), sampler=sampler, **{"batch_size": BATCH, **options})


REPEATING = {
    "with replacement": lambda: _loader(data.RandomSampler(examples(), replacement=True)),
    "weighted": lambda: _loader(data.WeightedRandomSampler(torch.ones(BATCH * STEPS), BATCH * STEPS)),
    "too many": lambda: _loader(data.RandomSampler(examples(), num_samples=2 * BATCH * STEPS)),
    "padded": lambda: _loader(
        data.DistributedSampler(examples(BATCH * STEPS - 1), num_replicas=2, rank=0), batch_size=2 * BATCH
    ),
    "in a batch sampler": lambda: data.DataLoader(
        examples(), batch_sampler=data.BatchSampler(data.RandomSampler(examples(), replacement=True), BATCH, False)
    ),
}


@pytest.mark.parametrize("kind", REPEATING)
def test_loaders_that_repeat_examples_are_refused(attach: Callable[..., Any], kind: str) -> None:
    with pytest.raises(ParticipationError, match=r"again|repeats"):
        attach(private(), data_loader=REPEATING[kind]())


def test_poisson_sampling_is_refused(attach: Callable[..., Any]) -> None:
    for mode in MODES:
        loop = private(mode, poisson_sampling=True)
        with pytest.raises(ParticipationError, match="poisson_sampling=False"):
            attach(loop)
        with pytest.raises(ParticipationError, match="poisson_sampling=False"):
            attach(loop, data_loader=None)  # the model says so too
    with pytest.raises(ParticipationError, match="poisson_sampling=False"):
        attach(private(), data_loader=loop.loader)


def test_a_second_pass_is_refused_at_the_steps_that_the_loader_has(attach: Callable[..., Any]) -> None:
    loop = private(loader=data.DataLoader(examples(3 * BATCH + 1), batch_size=BATCH))
    noise = attach(loop)
    loop.train(loop.loader)
    before = loop.parameters()
    with pytest.raises(ParticipationError, match="the loader has 4 steps"):
        loop.train(loop.loader)
    assert noise.step_number == 4
    assert torch.equal(loop.parameters(), before)


def test_a_loader_that_is_longer_than_the_horizon_is_refused_at_the_start(
    attach: Callable[..., Any], tmp_path: Path
) -> None:
    loop = private(loader=data.DataLoader(examples(), batch_size=BATCH - 1))
    with pytest.raises(HorizonError, match=r"16 steps.* for 12: compile with --n 16"):
        attach(loop, journal=tmp_path / "journal")
    assert not (tmp_path / "journal").exists()


@pytest.mark.filterwarnings("always::mmfact.noise.guard.WorkloadMismatch")
def test_a_loader_that_is_shorter_than_the_horizon_is_told_of_once(attach: Callable[..., Any]) -> None:
    """Its noise is private and not optimal; one of the compiled length, or of none, says nothing."""
    for batch, told in ((BATCH + 2, True), (BATCH, False)):
        loop = private(loader=data.DataLoader(examples(), batch_size=batch), momentum=0.9)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            attach(loop)
            loop.train(list(loop.loader)[:2])
            attach(private(), data_loader=None)
        found = [str(warning.message) for warning in caught if "one pass of the loader" in str(warning.message)]
        assert len(found) == told
        assert all("8 steps" in message and "for 12" in message and "--n 8" in message for message in found)


def test_past_the_horizon_no_step_is_taken(attach: Callable[..., Any]) -> None:
    loop = private()
    attach(loop, data_loader=None)
    loop.train(loop.loader)
    before = loop.parameters()
    with pytest.raises(HorizonError):
        loop.train(loop.loader)
    assert torch.equal(loop.parameters(), before)


def test_ids_are_checked_over_the_batches_of_a_step(attach: Callable[..., Any]) -> None:
    loop = private()
    noise = attach(loop, check_participation=True)
    batches, ids = list(loop.loader), torch.arange(BATCH * STEPS).split(BATCH)
    for number in range(2):
        noise.took_part(ids[number])
        loop.train(batches[number : number + 1])
    with BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=2, optimizer=loop.optimizer) as small:
        for number, (features, labels) in enumerate(small):
            noise.took_part([100 + 2 * number, 101 + 2 * number] if number != 3 else [106, 0])
            if number == 3:
                break
            loop.train([(features, labels)])
        assert noise.step_number == 3
        with pytest.raises(ParticipationError, match="the id 0 of step 3"):
            loop.train([(features, labels)])
    assert noise.step_number == 3
    assert noise.ledger()["participation"]["examples"] == 12


def test_after_a_refused_step_the_next_one_has_its_own_ids(attach: Callable[..., Any]) -> None:
    """The refused batch is thrown away as a whole: its sums and its ids."""
    loop, alone = private(), private()
    noise, other = attach(loop, check_participation=True), attach(alone)
    batches = list(loop.loader)
    for number, ids in enumerate(([0, 1, 2, 3], [4, 5, 0, 6], [7, 8, 9, 10])):
        noise.took_part(ids)
        if number == 1:
            with pytest.raises(ParticipationError, match="the id 0 of step 1"):
                loop.train(batches[1:2])
            loop.optimizer.zero_grad()
        else:
            loop.train(batches[number : number + 1])
            alone.train(batches[number : number + 1])
    assert noise.step_number == other.step_number == 2
    assert noise.ledger()["participation"]["examples"] == 8
    assert torch.equal(loop.parameters(), alone.parameters())


def test_ids_are_needed_when_they_are_checked(attach: Callable[..., Any]) -> None:
    loop = private()
    attach(loop, check_participation=True)
    with pytest.raises(StateError, match="give the ids"):
        loop.train(loop.loader)


def _own(kind: type, **options: Any) -> Any:
    net = network()
    settings = {"noise_multiplier": SIGMA, "max_grad_norm": CLIP, "expected_batch_size": BATCH, **options}
    return net, kind(torch.optim.SGD(net.parameters(), lr=0.1), **settings)


def test_optimizers_that_clip_otherwise_are_refused(built: Callable[..., Any], key: NoiseKey) -> None:
    class Mine(optimizers.DPOptimizer):
        pass

    adaptive = {
        "target_unclipped_quantile": 0.5, "clipbound_learning_rate": 0.2, "max_clipbound": 10.0, "min_clipbound": 0.1,
        "unclipped_num_std": 5.0,
    }  # fmt: skip
    kinds = [
        (optimizers.AdaClipDPOptimizer, adaptive),
        (optimizers.DPPerLayerOptimizer, {"max_grad_norm": [CLIP] * 4}),
        (Mine, {}),
    ]
    for kind, options in kinds:
        net, optimizer = _own(kind, **options)
        with pytest.raises(AdapterError, match=f"{kind.__name__}.*one clip norm"):
            adapter.correlate(optimizer, net, built("buffered", "float64").artifact, data_loader=None, key=key)
    for first, second in ((torch.optim.SGD(net.parameters(), lr=0.1), net), (net, optimizer)):  # plain; swapped
        with pytest.raises(
            AdapterError, match=rf"is a {type(first).__name__}, not one that .*correlate\(optimizer, mo"
        ):
            adapter.correlate(first, second, built("buffered", "float64").artifact, data_loader=None, key=key)


@pytest.mark.parametrize("options", [{"secure_mode": True}, {"generator": torch.Generator()}])
def test_settings_of_the_noise_that_is_replaced_are_refused(built: Callable[..., Any], options: dict[str, Any]) -> None:
    net, optimizer = _own(optimizers.DPOptimizer, **options)
    with pytest.raises(AdapterError, match="secure_mode and noise_generator"):
        adapter.correlate(optimizer, net, built("buffered", "float64").artifact, data_loader=None)


def test_an_optimizer_is_taken_over_once_and_before_its_first_step(attach: Callable[..., Any]) -> None:
    loop = private()
    attach(loop)
    with pytest.raises(AdapterError, match="already"):
        attach(loop)
    used = private()
    used.optimizer.state[next(iter(used.model.parameters()))] = {"momentum_buffer": torch.ones(1)}
    with pytest.raises(AdapterError, match="has taken steps"):
        attach(used)
    counted = private()
    counted.engine.accountant.history = [(SIGMA, 1 / STEPS, 1)]
    with pytest.raises(AdapterError, match="counted 1 steps"):
        attach(counted)


def test_the_optimizer_and_the_model_have_the_same_parameters(attach: Callable[..., Any]) -> None:
    net = network()
    loop = private(net=net)
    loop.optimizer.param_groups[0]["params"].pop()
    with pytest.raises(AdapterError, match="optimizer's parameters"):
        attach(loop)
    frozen = network()
    frozen[0].requires_grad_(False)
    loop = private(net=frozen)
    noise = attach(loop)
    loop.train(list(loop.loader)[:2])
    frozen[0].requires_grad_(True)
    with pytest.raises(MmfactError, match="parameters"):
        loop.train(list(loop.loader)[2:])
    assert noise.step_number == 2


def test_a_step_without_gradients_is_refused(attach: Callable[..., Any]) -> None:
    for mode, reason in (("hooks", "lacks per-example gradients"), ("ghost", "no gradients were clipped")):
        loop = private(mode)
        noise = attach(loop)
        with pytest.raises(AdapterError, match=reason):
            loop.optimizer.step()
        assert noise.step_number == 0


def test_ghost_clipping_refuses_gradients_that_were_not_clipped(attach: Callable[..., Any]) -> None:
    loop = private("ghost")
    noise = attach(loop)
    features, labels = next(iter(loop.loader))
    nn.functional.cross_entropy(loop.model(features), labels).backward()  # not the criterion of make_private
    with pytest.raises(AdapterError, match="no gradients were clipped"):
        loop.optimizer.step()
    loop = private("ghost")
    attach(loop)
    loop.criterion(loop.model(features), labels).backward()
    with pytest.raises(AdapterError, match="second backward pass"):
        loop.criterion(loop.model(features), labels).backward()
    assert noise.step_number == 0


def test_ghost_clipping_refuses_a_second_backward_pass_of_a_plain_loss(attach: Callable[..., Any]) -> None:
    """Its gradients would come to those that were clipped, not clipped themselves."""
    loop = private("ghost")
    noise = attach(loop)
    features, labels = next(iter(loop.loader))
    loop.criterion(loop.model(features), labels).backward()
    with pytest.raises(AdapterError, match=r"second backward pass .* is not clipped"):
        (100 * loop.model(features).square().sum()).backward()
    assert noise.step_number == 0


class Folding(nn.Module):
    """Every example is three rows of the one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 3)

    def forward(self, features: Any) -> Any:
        return self.layer(features.reshape(-1, 2)).reshape(len(features), 3, 3).sum(1)


@modes
def test_a_model_that_folds_a_dimension_into_the_batch_is_refused(attach: Callable[..., Any], mode: str) -> None:
    """An example would be clipped in three parts, and move the sum by three times the clip norm."""
    loop = private(mode, Folding())
    noise = attach(loop)
    before = loop.parameters()
    with pytest.raises(AdapterError, match=r"12 .*folds another dimension into the batch"):
        loop.train(list(loop.loader)[:1])
    assert noise.step_number == 0
    assert torch.equal(loop.parameters(), before)


def test_ghost_clipping_asks_for_its_module_its_precision_and_one_backward_pass(attach: Callable[..., Any]) -> None:
    loop = private("ghost")
    with pytest.raises(AdapterError, match="accumulation"):
        attach(loop, accumulation=2)
    loop.model = loop.model._module
    with pytest.raises(AdapterError, match="what make_private"):
        attach(loop)
    with pytest.raises(AdapterError, match='grad_sample_mode="hooks"'):
        attach(private("ghost", network().to(torch.bfloat16)))


@modes
def test_a_model_that_is_not_wrapped_gives_the_same_run(attach: Callable[..., Any], mode: str) -> None:
    wrapped = private(mode)
    attach(wrapped)
    wrapped.train(wrapped.loader)
    net = network()
    bare = private(mode, net, wrap_model=False)
    attach(bare)  # bare.model is Opacus' hooks object here
    bare.model = net
    bare.train(bare.loader)
    assert torch.equal(bare.parameters(), wrapped.parameters())


def test_arguments_of_the_wrong_kind_are_refused(
    attach: Callable[..., Any], built: Callable[..., Any], key: NoiseKey
) -> None:
    loop, artifact = private(), built("buffered", "float64").artifact
    with pytest.raises(AdapterError, match="torch DataLoader"):
        attach(loop, data_loader=[1, 2])
    with pytest.raises(StateError, match="artifact"):
        adapter.correlate(loop.optimizer, loop.model, "momentum-n2048", data_loader=None, key=key)
    with pytest.raises(AdapterError, match=r"nn\.Module"):
        adapter.correlate(loop.optimizer, 3, artifact, data_loader=None, key=key)
    small = BatchMemoryManager(data_loader=loop.loader, max_physical_batch_size=2, optimizer=loop.optimizer).__enter__()
    with pytest.raises(AdapterError, match="BatchMemoryManager was given"):
        attach(private(), data_loader=small)
    with pytest.raises(PrivacyError, match="noise multiplier"):
        attach(private(sigma=0.0))


def test_the_key_is_in_no_repr_and_a_closed_run_takes_no_step(attach: Callable[..., Any], key: NoiseKey) -> None:
    loop = private()
    noise = attach(loop)
    shown = repr(noise) + repr(noise.ledger()) + repr(loop.engine.accountant.state_dict())
    assert key.reveal().hex() not in shown
    noise.close()
    with pytest.raises(StateError, match="closed"):
        loop.train(loop.loader)


def test_a_missing_opacus_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "mmfact.noise.opacus")
    monkeypatch.setitem(sys.modules, "opacus", None)
    with pytest.raises(AdapterError) as caught:
        importlib.import_module("mmfact.noise.opacus")
    assert str(caught.value) == 'mmfact.noise.opacus needs opacus: pip install "mmfact[opacus]"'
