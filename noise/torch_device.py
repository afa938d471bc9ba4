"""Rows on the device where the gradients are: the same white values, drawn and correlated by torch there.

For tensors that are not in the CPU's memory. White values and recursion are array expressions (`chacha`, `recurrence`),
so a row is that of the CPU to float32 rounding: float32 only, and a run that moves between the two draws its past rows
again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mmfact.noise import chacha
from mmfact.noise.model import ModelNoise
from mmfact.noise.recurrence import Recurrence, recurrence
from mmfact.noise.release import Shard
from mmfact.noise.source import NoiseSource
from mmfact.noise.stepping import Stepping
from mmfact.store.artifact import Artifact

_PIECE = 1 << 22  # elements drawn at a time: what a draw needs beside them is some tens of bytes for each


class DevicePart:
    """One shard of a tensor on a device, and what the strategy keeps for it there. As `release._Part`."""

    def __init__(self, shard: Shard, source: NoiseSource, rule: Recurrence, scale: float, device: torch.device) -> None:
        self.shard, self.source, self.stepper = shard, source, _DeviceStepper(self)
        self._rule, self._scale, self._device = rule, scale, device

    def start(self) -> Any:
        """What is kept before the first step."""
        return self._rule.start((self.shard.size,), lambda shape: torch.zeros(shape, device=self._device))

    def white(self, step: int) -> Tensor:
        """The shard's elements of a white row."""
        subkeys = torch.frombuffer(bytearray(self.source.subkeys(step)), dtype=torch.int32).to(self._device)
        row = torch.empty(self.shard.size, device=self._device)
        for first in range(0, len(row), _PIECE):
            part = row[first : first + _PIECE]
            part.copy_(chacha.white(subkeys, self.shard.offset + first, len(part), torch))
        return row

    def draw(self, step: int, first: int, out: Any) -> None:
        """Rows are drawn as a whole."""
        raise NotImplementedError

    def piece(self, step: int, block: int, out: Tensor, *, add: bool) -> None:
        """Write, or add, row `step`."""
        row = self.stepper.take(step)
        if add:
            out.add_(row, alpha=self._scale)
        else:
            torch.mul(row, self._scale, out=out)

    def take(self, step: int, state: Any) -> tuple[Tensor, Any]:
        """(row at unit noise, state) of a step."""
        return self._rule.step(step, self.white(step), state)


class _DeviceStepper:
    """As `stepping.Stepper`, with one block."""

    blocks = 1

    def __init__(self, part: DevicePart) -> None:
        self._part = part
        self._at: tuple[int, Any] | None = None  # (steps taken, what is kept), replaced as one; None before the first
        self._mirror: list[npt.NDArray[Any]] = []

    def take(self, step: int) -> Tensor:
        """The row of `step`, those before it made and forgotten."""
        done, state = self._at or (0, self._part.start())
        for past in range(done, step + 1):
            row, state = self._part.take(past, state)
            self._at = (past + 1, state)
        return row

    def catch_up(self, step: int, draw: Any, workers: Any) -> None:
        """Bring what is kept to `step`."""
        if step > (self._at or (0,))[0]:
            self.take(step - 1)

    @property
    def held(self) -> tuple[npt.NDArray[Any], ...]:
        """What is kept, copied to the CPU; `start_at` copies back what was written into it."""
        _, state = self._at or (0, self._part.start())
        self._mirror = [np.ascontiguousarray(kept.cpu().numpy()) for kept in _leaves(state)]
        return tuple(self._mirror)

    def start_at(self, step: int) -> None:
        """Go on from `step` with what was written into `held`."""
        state = self._part.start()
        for kept, mirror in zip(_leaves(state), self._mirror, strict=True):
            kept.copy_(torch.from_numpy(mirror))
        self._at, self._mirror = (step, state), []


def _leaves(state: Any) -> list[Tensor]:
    if isinstance(state, Tensor):
        return [state]
    return [leaf for part in state for leaf in _leaves(part)] if isinstance(state, tuple | list) else []


class TensorNoise(ModelNoise):
    """Noise for tensors, some of them on devices other than the CPU, where their rows are then made."""

    def __init__(
        self, artifact: Artifact, tensors: Mapping[str, Shard], *, devices: Mapping[str, torch.device], **common: Any
    ) -> None:
        self._latched = False
        self._devices = devices
        if devices:
            self._rule = recurrence(artifact)
        super().__init__(artifact, tensors, **common)

    def _sensitivity(self, way: Stepping) -> float:
        own = super()._sensitivity(way)
        return max(own, self._rule.sensitivity) if self._devices else own  # C differs in its last digits

    def _part(self, name: str, shard: Shard, source: NoiseSource, scale: float, way: Stepping) -> Any:
        if name not in self._devices:
            return super()._part(name, shard, source, scale, way)
        return DevicePart(shard, source, self._rule, scale, self._devices[name])

    def _check_out(self, name: str, out: Any, shard: Shard) -> None:
        if name not in self._devices:
            super()._check_out(name, out, shard)

    def _shards(self) -> dict[str, list[Any]]:
        return {name: [*held, "device"] if name in self._devices else held for name, held in super()._shards().items()}
