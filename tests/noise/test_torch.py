"""Noise for torch in one process: what is clipped, what lands in p.grad, and that nothing else ever does.

Rows are compared with those of one `NoiseStream` a tensor, whole runs with dense matrices from a simulated optimizer
and white values straight from the source.
"""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import (
    AdapterError,
    HorizonError,
    ParticipationError,
    PrivacyError,
    StateError,
)
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.release import Release
from mmfact.noise.source import NoiseSource

torch = pytest.importorskip("torch")
adapter = pytest.importorskip("mmfact.noise.torch")

GradientNoise = adapter.GradientNoise
nn, func = torch.nn, torch.func

SIGMA, CLIP, BATCH = 1.3, 0.7, 7
RUN = bytes(range(16))
STRATEGIES = ["dense", "buffered", "banded-low-rank"]

strategies = pytest.mark.parametrize("strategy", STRATEGIES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


class Net(nn.Module):
    """Two layers and a parameter without a dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 4), nn.Linear(4, 2)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, features: Any) -> Any:
        return self.second(torch.tanh(self.first(features))) * self.scale


def net(dtype: Any = torch.float32) -> Any:
    torch.manual_seed(5)
    return Net().to(dtype)


def random_gradients(model: Any, *lead: int, seed: int = 0, dtype: Any = None) -> dict[str, Any]:
    """Of all parameters that require them; with `lead` = (examples,) one for each example."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn((*lead, *p.shape), generator=generator, dtype=torch.float64).to(dtype or p.dtype)
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def clipped_sum(gradients: dict[str, Any], examples: list[int]) -> dict[str, np.ndarray]:
    """By its definition, example after example, in float64."""
    parts = {name: part.double().numpy() for name, part in gradients.items()}
    sums = {name: np.zeros(part.shape[1:]) for name, part in parts.items()}
    for k in examples:
        norm = np.sqrt(sum((part[k] ** 2).sum() for part in parts.values()))
        for name, part in parts.items():
            sums[name] += part[k] * min(1, CLIP / norm) if norm else 0
    return sums


def close(found: np.ndarray, expected: np.ndarray, examples: int, rounding: float = 1e-12) -> bool:
    """Equal sums of clipped gradients: each may be clipped to a millionth less than the clip norm, for its rounding."""
    return bool(np.abs(found - expected).max() <= 1.001e-6 * CLIP * examples + rounding)


@pytest.fixture
def noise(built: Any, key: NoiseKey) -> Callable[..., Any]:
    """noise(model, strategy="buffered", **options): with a fixed run."""

    def make(model: Any, strategy: str = "buffered", **options: Any) -> Any:
        options = {"noise_multiplier": SIGMA, "clip_norm": CLIP, "batch_size": BATCH, "key": key, "run": RUN, **options}
        return GradientNoise(model, built(strategy).artifact, **options)

    return make


@pytest.fixture
def rows(built: Any, key: NoiseKey) -> Callable[..., dict[str, np.ndarray]]:
    """rows(model, step=0, strategy="buffered"): by one plain stream for each tensor."""

    def draw(model: Any, step: int = 0, strategy: str = "buffered") -> dict[str, np.ndarray]:
        found = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                dtype = "float64" if p.dtype == torch.float64 else "float32"
                stream = NoiseStream(
                    built(strategy).artifact, p.numel(), noise_multiplier=SIGMA, clip_norm=CLIP, key=key, name=name,
                    run=RUN, dtype=dtype,
                )  # fmt: skip
                stream.skip_to(step)
                found[name] = stream.next().reshape(tuple(p.shape))
        return found

    return draw


@pytest.fixture
def summed(rows: Any) -> Callable[..., dict[str, np.ndarray]]:
    """summed(model, step=0): what was summed up, from p.grad without its row."""

    def undo(model: Any, step: int = 0) -> dict[str, np.ndarray]:
        drawn = rows(model, step)
        return {name: p.grad.double().numpy() * BATCH - drawn[name] for name, p in model.named_parameters()}

    return undo


def grads(model: Any) -> dict[str, Any]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --- clipping --------------------------------------------------------------------------------------


def test_clip_is_a_loop_of_single_examples(noise: Any, summed: Any) -> None:
    model = net(torch.float64)
    features, targets = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    features[::2] *= 0.01  # some lie below the clip norm
    targets[::2] = model(features[::2]).detach() + 0.01

    def loss(parameters: dict[str, Any], x: Any, y: Any) -> Any:
        return ((func.functional_call(model, parameters, x) - y) ** 2).sum()

    each = func.vmap(func.grad(loss), (None, 0, 0))(dict(model.named_parameters()), features, targets)
    expected = {name: np.zeros(tuple(p.shape)) for name, p in model.named_parameters()}
    below = 0
    for x, y in zip(features, targets, strict=True):
        model.zero_grad()
        loss(dict(model.named_parameters()), x, y).backward()
        norm = torch.sqrt(sum((p.grad**2).sum() for p in model.parameters())).item()
        below += norm < CLIP
        for name, p in model.named_parameters():
            expected[name] += p.grad.numpy() * min(1, CLIP / norm)
    assert 0 < below < 9
    gradients = noise(model)
    gradients.clip(each)
    gradients.step()
    for name, found in summed(model).items():
        assert close(found, expected[name], 9)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 1e200])
def test_a_gradient_that_is_not_finite_counts_as_zero(noise: Any, summed: Any, bad: float) -> None:
    """1e200 is finite, its square is not."""
    model = net(torch.float64)
    each = random_gradients(model, 6)
    each["first.weight"][2, 1, 3] = bad
    each["scale"][4] = bad
    gradients = noise(model)
    gradients.clip(each)
    gradients.step()
    expected = clipped_sum(each, [0, 1, 3, 5])
    for name, found in summed(model).items():
        assert close(found, expected[name], 4)


def test_all_examples_may_be_bad(noise: Any, rows: Any) -> None:
    model = net()
    gradients = noise(model)
    gradients.clip({name: torch.full((3, *p.shape), float("nan")) for name, p in model.named_parameters()})
    gradients.step()
    for name, row in rows(model).items():
        assert np.array_equal(model.get_parameter(name).grad.numpy(), row / np.float32(BATCH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("size", "clip_norm"), [(1e-6, 0.7), (0.1, 0.7), (1.0, 0.7), (300.0, 0.7), (1e37, 1e-6)])
def test_contributions_are_never_longer_than_the_clip_norm(
    noise: Any, dtype: Any, size: float, clip_norm: float
) -> None:
    """In exact arithmetic, for single examples of every magnitude, under torch's least exact matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        for seed in range(5):
            gradients = noise(net(), clip_norm=clip_norm)
            each = random_gradients(net(), 1, seed=seed, dtype=dtype)
            gradients.clip({name: part * size for name, part in each.items()})
            values = np.concatenate([total.double().numpy().ravel() for total in gradients._sums.values()])
            length, most = sum(Fraction(float(value)) ** 2 for value in values), Fraction(clip_norm) ** 2
            assert length <= most
            if size >= 1 and not (size == 1e37 and dtype == torch.float16):  # which has no such numbers
                assert length >= most * Fraction(0.99999)
    finally:
        torch.set_float32_matmul_precision(before)


def test_gradients_too_long_for_the_precision_of_the_sums(noise: Any) -> None:
    """In float64, for float32 parameters: short enough once they are clipped."""
    gradients, each = noise(net()), random_gradients(net(), 3, dtype=torch.float64)
    gradients.clip({name: 1e100 * part for name, part in each.items()})
    expected = clipped_sum({name: 1e10 * part for name, part in each.items()}, [0, 1, 2])
    for name, total in gradients._sums.items():
        assert close(total.numpy(), expected[name], 3, rounding=1e-6)


def test_long_gradients_are_clipped_as_exactly(noise: Any) -> None:
    """Norms added up in float32 would be off by 1e-5 here, and in one chain of sums by far more."""
    model = nn.ParameterDict({"long": nn.Parameter(torch.zeros(1_000_003))})
    gradients = noise(model)
    gradients.clip(
        {"long": torch.randn(2, 1_000_003, generator=torch.Generator().manual_seed(1)) * torch.tensor([[1.0], [0.0]])}
    )
    length = np.linalg.norm(gradients._sums["long"].double().numpy())
    assert CLIP * (1 - 1.5e-6) < length <= CLIP * (1 - 0.5e-6)


def test_an_empty_batch_zero_gradients_and_no_contribution_leave_the_noise(noise: Any, rows: Any) -> None:
    model = net()
    gradients = noise(model)
    for step in range(3):
        if step == 0:
            gradients.clip(random_gradients(model, 0))
        elif step == 1:
            gradients.clip({name: torch.zeros(4, *p.shape) for name, p in model.named_parameters()})
        gradients.step()
        for name, row in rows(model, step).items():
            assert np.array_equal(model.get_parameter(name).grad.numpy(), row / np.float32(BATCH))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_gradients_of_another_precision_than_the_parameters(noise: Any, summed: Any, dtype: Any) -> None:
    model = net()
    each = random_gradients(model, 5, dtype=dtype)
    gradients = noise(model)
    gradients.clip(each)
    gradients.step()
    expected = clipped_sum(each, list(range(5)))
    for name, found in summed(model).items():
        assert close(found, expected[name], 5, rounding=1e-6)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda each: each.pop("scale"), "missing 'scale'"),
        (lambda each: each.update(other=torch.zeros(3)), "'other' is none"),
        (lambda each: each.update(scale=torch.zeros(4)), "'first.weight' have shape|'scale' have shape"),
        (lambda each: each.update(scale=torch.tensor(1.0)), "'scale' have shape"),
        (lambda each: each.update({"first.bias": torch.zeros(3, 5)}), "'first.bias' have shape"),
    ],
)
def test_clip_refuses_what_does_not_fit(noise: Any, change: Any, words: str) -> None:
    model = net()
    each = random_gradients(model, 3)
    change(each)
    with pytest.raises(AdapterError, match=words):
        noise(model).clip(each)


def test_an_interrupted_contribution_does_not_count_twice_when_it_is_repeated(
    noise: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step had before is gone too: nobody knows how far the contribution came."""
    model = net(torch.float64)
    gradients, each = noise(model), random_gradients(model, 4)
    gradients.clip(random_gradients(model, 3, seed=1))
    pieces, calls = adapter._pieces, iter(range(100))

    def interrupted(part: Any) -> Iterator[Any]:
        if next(calls) == len(each) + 2:  # norms are known, two tensors are summed up
            raise KeyboardInterrupt
        yield from pieces(part)

    monkeypatch.setattr(adapter, "_pieces", interrupted)
    with pytest.raises(KeyboardInterrupt):
        gradients.clip(each)
    gradients.clip(each)
    gradients.step()
    expected, drawn = clipped_sum(each, list(range(4))), rows(model)
    for name, p in model.named_parameters():
        assert close(p.grad.numpy() * BATCH - drawn[name], expected[name], 4)


# --- what p.grad holds -----------------------------------------------------------------------------


@strategies
@both_dtypes
def test_grad_is_the_noisy_sum_over_the_batch_size(noise: Any, rows: Any, strategy: str, dtype: Any) -> None:
    """Bit for bit, with the rows of one stream a tensor."""
    model = net(dtype)
    gradients = noise(model, strategy)
    for step in range(4):
        sums = random_gradients(model, seed=step)
        gradients.add(sums)
        gradients.step()
        for name, row in rows(model, step, strategy).items():
            expected = (sums[name].numpy() + row) / row.dtype.type(BATCH)
            assert np.array_equal(model.get_parameter(name).grad.numpy(), expected)
        assert gradients.step_number == step + 1


def test_any_number_of_contributions_is_one_step(noise: Any, summed: Any) -> None:
    model = net(torch.float64)
    gradients, each, sums = noise(model), random_gradients(model, 6), random_gradients(model, seed=9)
    gradients.clip({name: part[:2] for name, part in each.items()})
    gradients.add(sums)
    gradients.clip({name: part[2:] for name, part in each.items()})
    gradients.step()
    assert gradients.step_number == 1
    expected = clipped_sum(each, list(range(6)))
    for name, found in summed(model).items():
        assert close(found, expected[name] + sums[name].numpy(), 6)


def test_frozen_parameters_take_no_part(noise: Any, rows: Any) -> None:
    model = net()
    model.first.requires_grad_(False)
    gradients = noise(model)
    with pytest.raises(AdapterError, match=r"'first\.\w+' is none"):
        gradients.clip({name: torch.zeros(2, *p.shape) for name, p in model.named_parameters()})
    gradients.clip(random_gradients(model, 0))
    gradients.step()
    assert model.first.weight.grad is None
    assert set(rows(model)) == {"second.weight", "second.bias", "scale"}
    for name, row in rows(model).items():
        assert np.array_equal(model.get_parameter(name).grad.numpy(), row / np.float32(BATCH))


def test_sums_without_noise_are_never_in_grad(noise: Any) -> None:
    """Whatever an optimizer does between contributions and step, it does without them."""
    model = net()
    gradients = noise(model)
    groups = [{"params": model.first.parameters(), "lr": 3.0}, {"params": [*model.second.parameters(), model.scale]}]
    optimizer = torch.optim.SGD(groups, lr=1.0, momentum=0.9)
    gradients.clip(random_gradients(model, 3))
    gradients.step()
    optimizer.step()
    gradients.clip(random_gradients(model, 3))
    assert all(p.grad is None for p in model.parameters())
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert same(model.state_dict(), before)
    gradients.add(random_gradients(model))
    assert all(p.grad is None for p in model.parameters())
    optimizer.zero_grad(set_to_none=False)
    gradients.step()
    assert all(p.grad is not None for p in model.parameters())


def test_contributions_are_used_once(built: Any, noise: Any, summed: Any) -> None:
    """A step that is refused throws them away: given again with the next ones, they would count twice."""
    model = net(torch.float64)
    gradients = noise(model, check_participation=True)
    first, second = random_gradients(model, 1), random_gradients(model, 1)
    gradients.clip(first)
    gradients.step(ids=["ann"])
    gradients.clip(first)
    with pytest.raises(ParticipationError, match="'ann' of step 1 took part in an earlier step"):
        gradients.step(ids=["ann"])
    assert all(p.grad is None for p in model.parameters())
    assert gradients.state_dict()["step"] == 1  # nothing without noise is held
    gradients.clip(second)
    gradients.step(ids=["ben"])
    norm = np.sqrt(sum(float(part.square().sum()) for part in second.values()))
    for name, found in summed(model, 1).items():
        wanted = second[name][0].numpy() * min(1, CLIP / norm)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-12)


def test_fewer_ids_than_examples_are_refused(noise: Any) -> None:
    """Over all parts of a step; sums that come ready-made are not counted."""
    model = net()
    gradients = noise(model, check_participation=True)
    for part in (2, 3):
        gradients.clip(random_gradients(model, part))
    with pytest.raises(ParticipationError, match="4 ids were given for 5 clipped gradients"):
        gradients.step(ids=range(4))
    assert gradients.step_number == 0
    for part in (2, 3):
        gradients.clip(random_gradients(model, part))
    gradients.step(ids=range(5))
    gradients.add(random_gradients(model))
    gradients.step(ids=[9])


def test_a_gradient_that_somebody_kept_never_shows_a_sum(noise: Any) -> None:
    model = net()
    gradients = noise(model)
    gradients.step()
    kept = {name: p.grad for name, p in model.named_parameters()}
    before = {name: grad.clone() for name, grad in kept.items()}
    gradients.clip(random_gradients(model, 3))
    assert all(torch.equal(kept[name], before[name]) for name in kept)


def test_a_backward_pass_in_place_of_clip_is_noticed(noise: Any) -> None:
    """Its gradients have no noise: the optimizer is refused them; and a step without contributions says so."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = noise(model, optimizer=optimizer)

    def backward() -> None:
        optimizer.zero_grad()
        sum(p.sum() for p in model.parameters()).backward()

    backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(StateError, match="about to use gradients that have no noise"):
        optimizer.step()
    assert same(model.state_dict(), before)
    with pytest.warns(UserWarning, match="filled by a backward pass; that is ignored"):
        gradients.step()
    for p in model.parameters():
        p.grad = p.grad * 0.5  # what is made of a noisy mean is post-processing
    optimizer.step()
    backward()
    with pytest.raises(StateError, match="no noise"):
        optimizer.step()
    gradients.close()  # the run is over: the optimizer is its owner's
    optimizer.step()


def test_the_latest_noise_of_an_optimizer_looks_at_it(noise: Any) -> None:
    """As after a restart within one process, whatever became of the one before."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    earlier = noise(model, optimizer=optimizer)
    later = noise(model, optimizer=optimizer)
    for _ in range(2):
        later.step()
        optimizer.step()
    assert earlier.step_number == 0


def test_parameters_without_noise_are_not_stepped(noise: Any) -> None:
    """Another model's, one that was frozen with a gradient left in it, one that was added on the way."""
    model, extra = net(), nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([*model.parameters(), extra], lr=0.1)
    with pytest.raises(StateError, match="steps parameters that get no noise"):
        noise(model, optimizer=optimizer).step()
    extra.requires_grad_(False)
    gradients = noise(model, optimizer=optimizer)
    gradients.step()
    extra.grad = torch.ones(3)
    with pytest.raises(StateError, match="steps parameters that get no noise"):
        gradients.step()
    assert gradients.step_number == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([torch.zeros(1)], "a mapping of parameter names"),
        ({"scale": np.zeros(1)}, "'scale' is no dense tensor but ndarray"),
        ({"scale": torch.zeros(2).to_sparse()}, "'scale' is no dense tensor but torch.sparse_coo"),
    ],
)
@pytest.mark.parametrize("way", ["clip", "add"])
def test_what_is_no_mapping_of_tensors_is_refused(noise: Any, way: str, given: Any, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        getattr(noise(net()), way)(given)


def test_it_is_not_copied(noise: Any) -> None:
    gradients = noise(net())
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(StateError, match="never pickled or copied"):
            copied(gradients)
    assert repr(GradientNoise.__new__(GradientNoise)) == "GradientNoise(not begun)"


def test_sums_that_arrive_in_the_memory_of_grad_are_not_lost(noise: Any, summed: Any) -> None:
    """As after zero_grad(set_to_none=False) and a backward pass."""
    model = net(torch.float64)
    gradients, sums = noise(model), random_gradients(model)
    gradients.step()
    for name, p in model.named_parameters():
        p.grad.copy_(sums[name])
    gradients.add({name: p.grad for name, p in model.named_parameters()})
    gradients.step()
    for name, found in summed(model, 1).items():
        np.testing.assert_allclose(found, sums[name].numpy(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda sums: sums.pop("scale"), "missing 'scale'"),
        (lambda sums: sums.update(other=torch.zeros(3)), "'other' is none"),
        (lambda sums: sums.update(scale=torch.zeros(1)), r"'scale' has shape \(1,\)"),
        (lambda sums: sums.update(scale=torch.tensor(0.0).bfloat16()), "bfloat16: sums must be float32"),
        (lambda sums: sums.update(scale=torch.tensor(0.0).half()), "float16: sums must be float32"),
        (lambda sums: sums.update(scale=torch.tensor(0)), "int64: sums must be float32"),
    ],
)
def test_add_refuses_what_does_not_fit(noise: Any, change: Any, words: str) -> None:
    model = net()
    gradients, sums = noise(model), random_gradients(model)
    change(sums)
    with pytest.raises(AdapterError, match=words):
        gradients.add(sums)
    assert not gradients._sums


def check_bfloat16(model: Any, gradients: Any, rows: Any) -> None:
    """The released value is the float32 sum with float32 noise, rounded once."""
    sums = random_gradients(model, dtype=torch.float32)
    gradients.add(sums)
    gradients.step()
    for name, row in rows(model).items():
        exact = torch.tensor((sums[name].numpy() + row) / np.float32(BATCH))
        assert torch.equal(model.get_parameter(name).grad, exact.bfloat16())


def cast_first(real: Callable[..., None]) -> Callable[..., None]:
    """Noise in bfloat16, then the sum."""

    def add_to(self: Any, outs: Any, **options: Any) -> None:
        noise = {name: np.zeros_like(out) for name, out in outs.items()}
        real(self, noise, **options)
        for name, out in outs.items():
            out += torch.from_numpy(noise[name]).bfloat16().float().numpy()

    return add_to


def test_bfloat16_parameters_get_noise_and_sum_in_float32(
    noise: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = net(torch.bfloat16)
    check_bfloat16(model, noise(model), rows)
    monkeypatch.setattr(adapter.TensorNoise, "add_to", cast_first(adapter.TensorNoise.add_to))
    with pytest.raises(AssertionError):
        check_bfloat16(model, noise(model), rows)


def test_noise_that_was_cast_first_betrays_the_sum(noise: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who guesses the sum right sees the rest on the grid of bfloat16; so the release must not have that grid."""
    model = nn.ParameterDict({"w": nn.Parameter(torch.zeros(4096, dtype=torch.bfloat16))})
    right, wrong = torch.full((4096,), 0.37), torch.full((4096,), 0.41)

    def on_grid(guess: Any) -> float:
        gradients, noisy = noise(model, batch_size=1), []
        real = gradients._add_noise

        def recording(sums: Any, ids: Any) -> None:
            real(sums, ids)
            noisy.append(sums["w"].clone())

        gradients._add_noise = recording
        gradients.add({"w": right})
        gradients.step()
        rest = noisy[0].double() - guess.double()
        return float(((rest - rest.bfloat16().double()).abs() < 1e-6).double().mean())

    assert abs(on_grid(right) - on_grid(wrong)) < 0.05
    monkeypatch.setattr(adapter.TensorNoise, "add_to", cast_first(adapter.TensorNoise.add_to))
    assert on_grid(right) > 0.99
    assert on_grid(wrong) < 0.2


# --- refusals on the way ---------------------------------------------------------------------------


def _added(model: Any) -> None:
    model.extra = nn.Parameter(torch.zeros(3))


def _removed(model: Any) -> None:
    del model.scale


def _frozen(model: Any) -> None:
    model.first.bias.requires_grad_(False)


def _unfrozen(model: Any) -> None:
    model.second.bias.requires_grad_(True)


def _replaced(model: Any) -> None:
    model.scale = nn.Parameter(torch.tensor(1.5))


def _resized(model: Any) -> None:
    model.first.bias.data = model.first.bias.data[:2]


@pytest.mark.parametrize("change", [_added, _removed, _frozen, _unfrozen, _replaced, _resized])
def test_parameters_that_changed_are_refused_before_the_row_is_spent(noise: Any, change: Any) -> None:
    model = net()
    model.second.bias.requires_grad_(False)
    gradients = noise(model)
    gradients.clip(random_gradients(model, 2))
    gradients.step()
    gradients.clip(random_gradients(model, 2))
    change(model)
    with pytest.raises(StateError, match=r"parameters changed during the run: '(extra|scale|\w+\.bias)'"):
        gradients.step()
    assert gradients.step_number == 1
    assert all(p.grad is None for p in model.parameters())


def test_a_step_past_the_horizon_is_refused_and_leaves_nothing(noise: Any) -> None:
    model = net()
    gradients = noise(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(gradients.horizon):
        gradients.step()
    gradients.clip(random_gradients(model, 2))
    for _ in range(2):
        with pytest.raises(HorizonError, match="horizon of 12"):
            gradients.step()
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    assert same(model.state_dict(), before)
    assert all(p.grad is None for p in model.parameters())


def test_a_row_that_is_spent_takes_the_sums_with_it(noise: Any, rows: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupted in the middle of a row, nobody knows which sums have their noise."""
    model = net()
    gradients = noise(model)
    gradients.add(random_gradients(model))

    def interrupted(self: Any, outs: Any, ids: Any, *, add: bool) -> None:
        real(self, outs, ids, add=add)
        raise KeyboardInterrupt

    real = Release._issue
    with monkeypatch.context() as patch:
        patch.setattr(Release, "_issue", interrupted)
        with pytest.raises(KeyboardInterrupt):
            gradients.step()
    assert all(p.grad is None for p in model.parameters())
    gradients.step()
    assert gradients.step_number == 2
    for name, row in rows(model, 1).items():
        assert np.array_equal(model.get_parameter(name).grad.numpy(), row / np.float32(BATCH))


def test_state_is_refused_while_a_step_is_under_way(noise: Any) -> None:
    model = net()
    gradients = noise(model)
    gradients.state_dict()
    gradients.clip(random_gradients(model, 1))
    with pytest.raises(StateError, match="under way"):
        gradients.state_dict()
    gradients.step()
    gradients.state_dict()


def test_participation_is_checked_through_step(noise: Any, rows: Any) -> None:
    model = net()
    gradients = noise(model, check_participation=True)
    gradients.add(random_gradients(model))
    with pytest.raises(StateError, match="give the ids"):
        gradients.step()
    gradients.step(ids=torch.tensor([1, 2, 3]))
    for ids, words in [([4, 3], "3.*earlier"), (["a", "a"], "twice"), ([1.5], "float")]:
        with pytest.raises(ParticipationError, match=words):
            gradients.step(ids=ids)
    assert gradients.step_number == 1
    gradients.add({name: torch.zeros_like(p) for name, p in model.named_parameters()})
    gradients.step(ids=[4, "a"])
    for name, row in rows(model, 1).items():
        assert np.array_equal(model.get_parameter(name).grad.numpy(), row / np.float32(BATCH))
    assert gradients.ledger()["participation"]["examples"] == 5
    with pytest.raises(StateError, match="does not check participation"):
        noise(net()).step(ids=[1])


@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf"), "7", True, None])
def test_batch_size_is_a_positive_number(noise: Any, value: Any) -> None:
    with pytest.raises(PrivacyError, match="batch size"):
        noise(net(), batch_size=value)


def test_models_that_cannot_have_noise(noise: Any) -> None:
    frozen = net().requires_grad_(False)
    for nothing in (frozen, [], nn.Identity()):
        with pytest.raises(AdapterError, match="no parameter"):
            noise(nothing)
    with pytest.raises(AdapterError, match="only real numbers"):
        noise([("c", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))])
    with pytest.raises(AdapterError, match="two parameters are named 'w'"):
        noise([("w", nn.Parameter(torch.zeros(3))), ("_module.w", nn.Parameter(torch.zeros(3)))])
    stand_in = type("FullyShardedDataParallel", (nn.Linear,), {})
    with pytest.raises(AdapterError, match="fully_shard"):
        noise(nn.Sequential(stand_in(2, 2)))


# --- names -----------------------------------------------------------------------------------------


def test_a_tied_parameter_is_one_parameter(noise: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    plain, doubled = noise(model), noise(model.named_parameters(remove_duplicate=False))
    assert list(plain.ledger()["tensors"]) == list(doubled.ledger()["tensors"]) == ["0.weight", "0.bias", "1.bias"]
    plain.step()
    first = grads(model)
    doubled.step()
    assert same(first, grads(model))


def test_wrappers_and_iterables_give_the_same_noise(noise: Any) -> None:
    model = net()
    noise(model).step()
    expected = grads(model)
    wrapped = [torch.compile(model), list(model.named_parameters()), iter(list(model.named_parameters()))]
    for other in wrapped:
        model.zero_grad()
        noise(other).step()
        assert same(grads(model), expected)


def test_opacus_wrapper_gives_the_same_noise(noise: Any) -> None:
    grad_sample = pytest.importorskip("opacus.grad_sample")
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1))
    noise(model).step()
    expected = grads(model)
    noise(grad_sample.GradSampleModule(model)).step()
    assert same(grads(model), expected)


# --- whole runs ------------------------------------------------------------------------------------


def train(gradients: Any, model: Any, optimizer: Any, scheduler: Any, steps: range) -> None:
    """Real gradients, which depend on all noise so far."""
    loss = lambda parameters, x: (func.functional_call(model, parameters, x) ** 2).sum()  # noqa: E731
    for step in steps:
        features = torch.randn(5, 5, generator=torch.Generator().manual_seed(step)).to(model.scale.dtype)
        gradients.clip(func.vmap(func.grad(loss), (None, 0))(dict(model.named_parameters()), features))
        gradients.step()
        optimizer.step()
        scheduler.step()


def optimizer_of(model: Any, work: Any) -> tuple[Any, Any]:
    """torch's SGD and a scheduler that do what the workload says."""
    rates = [float(rate) for rate in work.learning_rates]
    optimizer = torch.optim.SGD(model.parameters(), lr=rates[0], momentum=work.beta, weight_decay=work.weight_decay)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rates[min(i, len(rates) - 1)] / rates[0])
    return optimizer, scheduler


@pytest.mark.parametrize("name", ["cooldown", "decay"])
@strategies
@both_dtypes
def test_a_whole_run_is_a_matrix_product(built: Any, key: NoiseKey, name: str, strategy: str, dtype: Any) -> None:
    """theta_i = decayed theta_0 - (A G + B Z) / batch size, all dense, Z from the source, G as it was contributed."""
    made, model = built(strategy, name=name), net(dtype)
    work, n = made.artifact.workload, made.artifact.n
    gradients = GradientNoise(
        model, made.artifact, noise_multiplier=SIGMA, clip_norm=CLIP, batch_size=BATCH, key=key, run=RUN,
        optimizer=(pair := optimizer_of(model, work))[0],
    )  # fmt: skip
    start = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    contributed: list[dict[str, np.ndarray]] = []
    real = gradients._accumulate

    def recording(add: Any, examples: Any) -> None:
        real(add, examples)
        contributed.append({name: total.double().numpy().copy() for name, total in gradients._sums.items()})

    gradients._accumulate = recording
    train(gradients, model, *pair, range(n))

    scale = SIGMA * CLIP * np.linalg.norm(made.C, axis=0).max()
    buffer, left = 0.0, 1.0  # of theta_0 under weight decay
    for eta in work.learning_rates:
        buffer = work.beta * buffer + work.weight_decay * left
        left -= eta * buffer
    for name, p in model.named_parameters():
        source = NoiseSource(key, RUN, made.artifact.digest, name, np.dtype(str(dtype).removeprefix("torch.")))
        Z = np.empty((n, p.numel()), str(dtype).removeprefix("torch."))
        for step in range(n):
            source.fill(step, 0, Z[step])
        G = np.array([sums[name].ravel() for sums in contributed])
        end = left * start[name].ravel() - (made.A @ G + scale * made.decoder @ Z)[-1] / BATCH
        found = p.detach().double().numpy().ravel()
        assert np.abs(found - end).max() <= (1e-4 if dtype == torch.float32 else 1e-10) * np.abs(end).max()


@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_checkpoint_in_the_middle_changes_nothing(built: Any, tmp_path: Path, buffers: bool, dtype: Any) -> None:
    """Model, optimizer, schedule and noise through a file that torch loads with weights_only, with a journal."""
    artifact, key = built("buffered", name="cooldown").artifact, NoiseKey.generate(tmp_path / "key")
    whole = net(dtype)
    options = {"noise_multiplier": SIGMA, "clip_norm": CLIP, "batch_size": BATCH, "key": key, "run": RUN}
    pair = optimizer_of(whole, artifact.workload)
    train(GradientNoise(whole, artifact, **options), whole, *pair, range(12))

    model = net(dtype)
    gradients = GradientNoise(model, artifact, journal=tmp_path / "journal", **options)
    pair = optimizer_of(model, artifact.workload)
    train(gradients, model, *pair, range(5))
    parts = {"model": model, "optimizer": pair[0], "scheduler": pair[1]}
    saved = {name: part.state_dict() for name, part in parts.items()}
    torch.save({**saved, "noise": gradients.state_dict(buffers=buffers)}, tmp_path / "checkpoint")
    gradients.commit()
    gradients.close()
    del gradients, model, pair, parts

    model = Net().to(dtype)
    pair = optimizer_of(model, artifact.workload)
    loaded = torch.load(tmp_path / "checkpoint", weights_only=True)
    for name, part in {"model": model, "optimizer": pair[0], "scheduler": pair[1]}.items():
        part.load_state_dict(loaded[name])
    how = {"batch_size": BATCH, "key": key}
    with pytest.raises(StateError, match="journal"):
        GradientNoise.restore(model, artifact, loaded["noise"], **how)
    gradients = GradientNoise.restore(model, artifact, loaded["noise"], journal=tmp_path / "journal", **how)
    train(gradients, model, *pair, range(5, 12))
    assert same(model.state_dict(), whole.state_dict())
    assert gradients.ledger()["issued"] == 12
    assert [resume["declared"] for resume in gradients.ledger()["resumes"]] == [None]
    gradients.close()
    with pytest.raises(StateError, match="issued after this state"):  # seven rows since
        GradientNoise.restore(model, artifact, loaded["noise"], journal=tmp_path / "journal", **how)
    with pytest.raises(StateError, match="added or removed"):
        GradientNoise.restore(
            nn.Sequential(Net(), nn.Linear(2, 2)), artifact, loaded["noise"], journal=tmp_path / "journal",
            resume="unpublished", **how,
        )  # fmt: skip


def test_state_of_a_key_that_dies_is_refused(noise: Any) -> None:
    with pytest.raises(StateError, match="NoiseKey"):
        noise(net(), key=None).state_dict()


def test_ledger_repr_and_copies(noise: Any, key: NoiseKey) -> None:
    gradients = noise(net())
    secret = key.reveal().hex()
    ledger = gradients.ledger()
    assert (ledger["batch_size"], ledger["processes"], ledger["issued"]) == (BATCH, 1, 0)
    for text in (repr(gradients), repr(ledger), repr(vars(gradients))):
        assert secret not in text
        assert repr(key.reveal())[2:-1] not in text
    with pytest.raises(StateError, match="never pickled or copied"):
        copy.deepcopy(gradients)
    assert gradients.run == RUN


def test_the_object_holds_no_more_than_it_needs(noise: Any) -> None:
    """No cycle keeps a model's gradients alive."""
    gradients = noise(net())
    gradients.clip(random_gradients(net(), 2))
    gradients.step()
    gone = weakref.ref(gradients)
    gc.disable()
    try:
        del gradients
        assert gone() is None
    finally:
        gc.enable()


def test_without_torch_the_message_names_the_extra() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from mmfact.factorize.errors import AdapterError\n"
        "try:\n    import mmfact.noise.torch\n"
        "except AdapterError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == 'mmfact.noise.torch needs torch: pip install "mmfact[torch]"'
