"""Noise that is made on a device: its code, run on the CPU, since no accelerator is needed to see what it computes.

The same torch expressions run on CUDA tensors; that was not tried here. Values are compared with the native runtime,
whose own truth is elsewhere. float32 keeps 24 bits, and a row has a few terms of the size of the largest value: 2^-20
of it is allowed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmfact.factorize.errors import AdapterError, HorizonError
from mmfact.noise import NoiseKey
from mmfact.noise import torch as adapter
from mmfact.noise import torch_device as device_module

STEPS = 12
KEY = NoiseKey.insecure_from_seed(5)
strategies = pytest.mark.parametrize("strategy", ["dense", "buffered", "banded-low-rank"])


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """on_device(True) makes every parameter look as if it were on a device, for adapters that are made afterwards."""

    def switch(on: bool) -> None:
        monkeypatch.setattr(adapter, "_on_cpu", lambda tensor: not on)

    return switch


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(31, 40), torch.nn.Linear(40, 3, bias=False))


def made(artifact: Any, **options: Any) -> adapter.GradientNoise:
    given = {"noise_multiplier": 1.3, "clip_norm": 0.7, "batch_size": 4, "key": KEY, "run": bytes(16), **options}
    return adapter.GradientNoise(model(), artifact, **given)


def rows(noise: adapter.GradientNoise, steps: int) -> list[torch.Tensor]:
    found = []
    for _ in range(steps):
        noise.step()
        found.append(torch.cat([parameter.grad.flatten() for parameter in noise._parameters.values()]))
    return found


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    most = max(float(row.abs().max()) for row in wanted)
    return len(found) == len(wanted) and all(
        float((one - other).abs().max()) <= 2.0**-20 * most for one, other in zip(found, wanted, strict=True)
    )


@strategies
@pytest.mark.parametrize("piece", [1 << 22, 100])
def test_rows_are_those_of_the_cpu(
    strategy: str, piece: int, built: Any, on_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn at once or 100 elements at a time, which fall across the keystream's blocks of 16."""
    monkeypatch.setattr(device_module, "_PIECE", piece)
    artifact = built(strategy, "float32", "cooldown").artifact
    on_device(False)
    wanted = rows(made(artifact), STEPS)
    on_device(True)
    noise = made(artifact)
    assert close(rows(noise, STEPS), wanted)
    assert not close(rows(made(artifact, run=bytes(15) + b"1"), STEPS), wanted)
    with pytest.raises(HorizonError, match="past the horizon of 12"):
        noise.step()


@strategies
def test_sums_get_the_noise_added(strategy: str, built: Any, on_device: Any) -> None:
    on_device(True)
    artifact = built(strategy, "float32", "momentum").artifact
    alone = rows(made(artifact), 2)
    noise = made(artifact)
    found = []
    for _ in range(2):
        noise.add({name: torch.full(parameter.shape, 2.0) for name, parameter in noise._parameters.items()})
        found += rows(noise, 1)
    assert close(found, [row + 0.5 for row in alone])


@strategies
@pytest.mark.parametrize("buffers", [True, False])
@pytest.mark.parametrize(("before", "after"), [(True, True), (True, False), (False, True)])
def test_a_run_goes_on_where_it_was_saved_and_moves(
    strategy: str, buffers: bool, before: bool, after: bool, built: Any, on_device: Any
) -> None:
    """On a device, and to or from the CPU, where what is kept has another form and past rows are drawn again."""
    artifact = built(strategy, "float32", "cooldown").artifact
    on_device(False)
    wanted = rows(made(artifact), STEPS)
    on_device(before)
    noise = made(artifact)
    found = rows(noise, 5)
    noise.skip_to(6)
    state = noise.state_dict(buffers=buffers)
    on_device(after)
    again = adapter.GradientNoise.restore(model(), artifact, state, batch_size=4, key=KEY, resume="unpublished")
    found += rows(again, STEPS - 6)
    assert close(found, [*wanted[:5], *wanted[6:]])
    if buffers and before is after:  # what was kept came from the state: no row was drawn again
        assert all(part.stepper._at[0] == STEPS for part in again._noise._parts.values())


def test_saved_buffers_are_used(built: Any, on_device: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(True)
    artifact = built("buffered", "float32", "cooldown").artifact
    noise = made(artifact)
    rows(noise, 5)
    state = noise.state_dict()
    drawn: list[int] = []
    real = device_module.DevicePart.white
    monkeypatch.setattr(device_module.DevicePart, "white", lambda self, step: (drawn.append(step), real(self, step))[1])
    again = adapter.GradientNoise.restore(model(), artifact, state, batch_size=4, key=KEY, resume="unpublished")
    rows(again, 1)
    assert set(drawn) == {5}


def test_the_sensitivity_is_that_of_the_coefficients_in_use(built: Any, on_device: Any) -> None:
    """Recomputed densely from what the recursion streams: C is the inverse of the matrix that white rows go through."""
    artifact = built("banded-low-rank", "float32", "cooldown").artifact
    on_device(True)
    noise = made(artifact)
    rule = noise._noise._rule
    streamed = []
    for at in range(STEPS):
        state = rule.start((1,), lambda shape: torch.zeros(shape))
        column = []
        for step in range(STEPS):
            row, state = rule.step(step, torch.tensor([float(step == at)]), state)
            column.append(float(row))
        streamed.append(column)
    C = torch.linalg.inv(torch.tensor(streamed, dtype=torch.float64).T)
    assert float(C.norm(dim=0).max()) <= noise._noise.sensitivity * (1 + 1e-6)
    assert float(C.norm(dim=0).max()) == pytest.approx(noise._noise.sensitivity, rel=1e-5)


def test_float64_on_a_device_is_refused(built: Any, on_device: Any) -> None:
    on_device(True)
    with pytest.raises(AdapterError, match=r"'0\.weight' is float64 on cpu; there noise is float32 only"):
        adapter.GradientNoise(
            model().double(), built("dense", "float32", "momentum").artifact, noise_multiplier=1.0, clip_norm=1.0,
            batch_size=1,
        )  # fmt: skip
