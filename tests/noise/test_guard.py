"""Warnings about an optimizer that is not the compiled one: once, clearly, and never about what makes no difference."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from mmfact.factorize import workload
from mmfact.noise import NoiseKey
from mmfact.noise.guard import Guard, WorkloadMismatch

N = 8
RATES = np.linspace(1.0, 0.2, N)


def settings(**other: Any) -> dict[str, Any]:
    """A parameter group of torch's SGD."""
    return {"momentum": 0.9, "dampening": 0, "nesterov": False, "weight_decay": 0, "lr": 1.0, **other}


def compiled(**options: Any) -> workload.Workload:
    return workload.momentum(N, beta=0.9, **{"learning_rates": RATES, **options})


def warned(guard: Guard, groups_of: Any) -> list[tuple[int, str]]:
    """(step, message) of all warnings in a run with the groups of groups_of(step)."""
    found = []
    for step in range(N):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            guard.check(step, groups_of(step))
        assert all(warning.category is WorkloadMismatch for warning in caught)
        found += [(step, str(warning.message)) for warning in caught]
    return found


def at(factor: float = 1.0, **other: Any) -> Any:
    """Rates of the workload times a constant."""
    return lambda step: [settings(lr=factor * RATES[step], **other)]


@pytest.mark.parametrize("factor", [1.0, 1e-4, 37.5])
def test_silent_when_equal_up_to_one_factor_in_the_rate(factor: float) -> None:
    assert warned(Guard(compiled()), at(factor)) == []


def test_silent_where_schedulers_round() -> None:
    """As when a rate is multiplied up step by step in float32."""
    noise = 1 + 1e-6 * np.random.default_rng(0).standard_normal(N)
    assert warned(Guard(compiled()), lambda step: [settings(lr=float(np.float32(RATES[step] * noise[step])))]) == []


def test_silent_about_a_warm_up_from_nothing() -> None:
    """torch's schedulers may start at 0, where no workload can."""
    assert warned(Guard(compiled()), lambda step: [settings(lr=0.1 * RATES[step] if step else 0.0)]) == []


def test_each_group_has_its_own_factor() -> None:
    groups: Any = lambda step: [settings(lr=0.1 * RATES[step]), settings(lr=3 * RATES[step])]  # noqa: E731
    assert warned(Guard(compiled()), groups) == []
    wrong: Any = lambda step: [settings(lr=0.1 * RATES[step]), settings(lr=3.0)]  # noqa: E731
    [(step, message)] = warned(Guard(compiled()), wrong)
    assert step == 1
    assert "the learning rate is 3," in message


def test_silent_about_a_custom_matrix_and_past_the_horizon() -> None:
    anything: Any = lambda step: [settings(lr=step + 1.0, momentum=0.1 * step, nesterov=True)]  # noqa: E731
    assert warned(Guard(workload.custom(np.tril(np.ones((N, N))))), anything) == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Guard(compiled()).check(N, [settings(momentum=0.5)])


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"momentum": 0.95}, "momentum is 0.95, compiled for 0.9"),
        ({"momentum": 0.0}, "momentum is 0, compiled for 0.9"),
        ({"nesterov": True}, "nesterov is on, compiled without"),
        ({"dampening": 0.1}, "dampening is 0.1, compiled without"),
        ({"weight_decay": 0.01}, "weight decay is 0.01 at rate 1, compiled for 0 at rate 1"),
        ({"betas": (0.95, 0.999)}, "momentum is 0.95, compiled for 0.9"),
    ],
)
def test_each_difference_is_named_once(group: dict[str, Any], words: str) -> None:
    [(step, message)] = warned(Guard(compiled()), at(**group))
    assert step == 0
    assert words in message
    assert "Privacy is unaffected" in message
    assert "momentum-n8" in message  # what it was compiled for
    assert "compile the workload" in message


def test_rates_of_another_shape() -> None:
    [(step, message)] = warned(Guard(compiled()), lambda step: [settings(lr=0.5)])
    assert step == 1
    assert f"the learning rate is 0.5, {0.5 / RATES[1]:g} times the compiled one, but it was 0.5 times" in message


def test_several_differences_make_one_warning() -> None:
    [(step, message)] = warned(Guard(compiled()), at(momentum=0.5, nesterov=True, weight_decay=0.1))
    assert step == 0
    assert all(words in message for words in ("momentum is 0.5", "nesterov", "weight decay is 0.1"))


def test_weight_decay_counts_times_the_rate() -> None:
    """The iterates shrink by rate times decay, so a factor in the rate asks for its inverse in the decay."""
    work = compiled(weight_decay=0.02)
    assert warned(Guard(work), at(weight_decay=0.02)) == []
    assert warned(Guard(work), at(0.1, weight_decay=0.2)) == []
    [(_, message)] = warned(Guard(work), at(0.1, weight_decay=0.02))
    assert "weight decay is 0.02 at rate 0.1, compiled for 0.02 at rate 1" in message
    [(_, message)] = warned(Guard(work), at(weight_decay=0.0))
    assert "weight decay is 0 at rate 1" in message


@pytest.mark.parametrize("kind", ["coupled", "decoupled"])
def test_kind_of_weight_decay(kind: str) -> None:
    work, other = compiled(weight_decay=0.02, weight_decay_kind=kind), {"coupled": "decoupled", "decoupled": "coupled"}
    decoupled = {"decoupled_weight_decay": True, "weight_decay": 0.02}
    same, wrong = (decoupled, {"weight_decay": 0.02})[:: 1 if kind == "decoupled" else -1]
    assert warned(Guard(work), at(**same)) == []
    [(_, message)] = warned(Guard(work), at(**wrong))
    assert f"weight decay is {other[kind]}, compiled for {kind}" in message


def test_without_momentum() -> None:
    """Dampening does nothing where there is no buffer; a group may leave out what it does not have."""
    work = workload.sgd(N, learning_rates=RATES)
    assert warned(Guard(work), at(momentum=0, dampening=0.5)) == []
    assert warned(Guard(work), lambda step: [{"lr": RATES[step]}]) == []
    assert warned(Guard(workload.prefix_sum(N)), lambda step: [{"lr": 0.3}]) == []
    assert warned(Guard(work), lambda step: [{}]) == []
    [(_, message)] = warned(Guard(work), at(momentum=0.9))
    assert "momentum is 0.9, compiled for 0" in message


class TestTorch:
    """Settings as torch's own optimizers and schedulers have them, through `GradientNoise`."""

    @pytest.fixture(autouse=True)
    def _needs_torch(self) -> None:
        pytest.importorskip("torch")

    def run(
        self, built: Any, key: NoiseKey, make: Any, name: str = "cooldown", optimizer: bool = True
    ) -> tuple[list[Any], list[Any]]:
        """(warnings, p.grad of every step) of a run with make(parameters, rates)."""
        import torch

        from mmfact.noise.torch import GradientNoise

        artifact = built("buffered", name=name).artifact
        rates = artifact.workload.learning_rates
        model = torch.nn.Linear(3, 2)
        made, scheduler = make(model.parameters(), rates)
        gradients = GradientNoise(
            model, artifact, noise_multiplier=1.0, clip_norm=1.0, batch_size=1, key=key, run=bytes(16),
            optimizer=made if optimizer else None,
        )  # fmt: skip
        rows = []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(artifact.n):
                gradients.step()
                rows.append(model.weight.grad.clone())
                made.step()
                scheduler.step()
        return [warning for warning in caught if warning.category is WorkloadMismatch], rows

    @staticmethod
    def scheduled(optimizer: Any, rates: Sequence[float]) -> tuple[Any, Any]:
        import torch

        last = len(rates) - 1
        return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rates[min(i, last)] / rates[0])

    @pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam"])
    def test_silent_for_the_compiled_optimizer(self, built: Any, key: NoiseKey, name: str) -> None:
        """Adam: its first beta is a momentum, its scale a slowly varying preconditioner."""
        import torch

        own: Mapping[str, Any] = {"momentum": 0.95} if name == "SGD" else {"betas": (0.95, 0.999), "weight_decay": 0}
        make = lambda parameters, rates: self.scheduled(  # noqa: E731
            getattr(torch.optim, name)(parameters, lr=0.01, **own), rates
        )
        assert self.run(built, key, make)[0] == []

    def test_weight_decay_of_adamw_and_sgd(self, built: Any, key: NoiseKey) -> None:
        import torch

        def sgd(parameters: Any, rates: Any) -> Any:
            return self.scheduled(torch.optim.SGD(parameters, lr=1.0, momentum=0.9, weight_decay=0.05), rates)

        def adamw(parameters: Any, rates: Any) -> Any:
            return self.scheduled(torch.optim.AdamW(parameters, lr=1.0, betas=(0.9, 0.99), weight_decay=0.05), rates)

        assert self.run(built, key, sgd, "decay")[0] == []
        [warning] = self.run(built, key, adamw, "decay")[0]
        assert "weight decay is decoupled, compiled for coupled" in str(warning.message)

    def test_points_at_the_training_loop_and_leaves_the_noise_alone(self, built: Any, key: NoiseKey) -> None:
        import torch

        def constant(parameters: Any, rates: Any) -> Any:
            return self.scheduled(torch.optim.SGD(parameters, lr=1.0, momentum=0.5), [1.0])

        caught, rows = self.run(built, key, constant)
        [warning] = caught
        assert warning.filename == __file__
        none, unguarded = self.run(built, key, constant, optimizer=False)
        assert none == []
        assert all(torch.equal(one, other) for one, other in zip(rows, unguarded, strict=True))
