"""This process's share of the vectors of a model whose gradients a `GradientNoise` makes, and sums over all shares."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmfact.factorize.errors import ProjectorError, StateError
from mmfact.noise.projector import Array
from mmfact.noise.release import Shard
from mmfact.noise.torch import GradientNoise
from mmfact.noise.torch_parameters import is_split, local


class Share:
    """The elements whose noise this process adds: a slice of every parameter, or what it holds of a split one.

    As `mmfact.noise.projector.Shards`, with every process of the run taking part in each call.

    Attributes
    ----------
    names : list of str
        Of the parameters, in an order that does not depend on the model's.
    shards : mapping of str to Shard
    size, elements : int
        Of this share, and of all of them together.
    part : str
        Which share this is.
    """

    def __init__(self, gradients: GradientNoise) -> None:
        self._gradients, self._parameters = gradients, gradients._parameters
        self._alone = gradients._processes == 1
        self.shards: Mapping[str, Shard] = gradients._shards
        self.names = sorted(self.shards)
        self.size = sum(shard.size for shard in self.shards.values())
        self.elements = int(self.sum(np.array([float(self.size)]))[0])
        self.part = f"{gradients._rank}-of-{gradients._processes}"

    def sum(self, array: Array) -> Array:
        """The array added up over all processes, the same in each to the last bit."""
        return self._together(array, dist.all_reduce)

    def first(self, array: Array) -> Array:
        """The array of the first process."""
        return self._together(array, lambda shared, group: dist.broadcast(shared, group=group, group_src=0))

    def everywhere(self, true: bool) -> bool:
        """Whether it is true in all processes."""
        return bool(self.sum(np.array([float(not true)]))[0] == 0)

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """What is done inside, without a word to other processes, succeeds in all of them, or raises in all."""
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        if not self.everywhere(failure is None):
            raise failure or StateError(f"another process could not {what} (see its message), so none goes on")

    def differing(self, settings: Mapping[str, Any]) -> list[str]:
        """The names of settings that are not the same in all processes."""
        own = np.array([[*hashlib.sha256(repr(value).encode()).digest()] for value in settings.values()], np.float64)
        differ = self.sum((own != self.first(own)).any(axis=1).astype(np.float64))
        return [name for name, count in zip(settings, differ, strict=True) if count]

    def of(self, make: Callable[[], Any], count: int) -> dict[str, Tensor]:
        """This share's elements of the per-example gradients that `make` gives, (count, size) by name.

        No gradient of the model is touched, and no process goes on if one could not make its own.
        """
        before = {name: parameter.grad for name, parameter in self._parameters.items()}
        found: dict[str, Tensor] = {}
        with self.together("make the public gradients"):
            try:
                for parameter in self._parameters.values():
                    parameter.grad = None  # a backward pass would add to it in place
                found = self.slices(make())
            finally:
                for name, parameter in self._parameters.items():
                    parameter.grad = before[name]
            counts = {len(part) for part in found.values()}
            if counts != {count}:
                raise ProjectorError(
                    f"per_example gave the gradients of {' and '.join(map(str, sorted(counts)))} examples for {count}"
                )
        return found

    def slices(self, per_example: Any) -> dict[str, Tensor]:
        """This share's elements of per-example gradients, by name.

        Raises
        ------
        AdapterError
            A parameter is missing or unknown.
        ProjectorError
            A shape does not fit.
        """
        self._gradients._check_names(per_example)
        found = {}
        for name in self.names:
            parameter, shard, part = self._parameters[name], self.shards[name], per_example[name]
            shape = local(parameter.detach(), parameter).shape
            if part.ndim == 0 or part.shape[1:] != shape:
                raise ProjectorError(
                    f"the public gradients of {name!r} have shape {tuple(part.shape)}; needed is one of shape "
                    f"{tuple(shape)} for each example"
                )
            flat = part.detach().to(parameter.device).reshape(len(part), shape.numel())
            found[name] = flat if is_split(parameter) else flat[:, shard.offset : shard.offset + shard.size]
        return found

    def gradient(self) -> dict[str, Tensor]:
        """This share's elements of the noisy mean that the latest `step` made.

        Raises
        ------
        StateError
            p.grad is something else, which may have no noise.
        """
        given = self._gradients._given
        if any(self._parameters[name].grad is not given.get(name) for name in self.names):
            raise StateError("p.grad is not the noisy mean that step() made, so it cannot be projected; use no other")
        return {name: self._own(name) for name in self.names}

    def replace_gradient(self, made: Mapping[str, Tensor]) -> None:
        """Put this share's elements into p.grad in place; every process gets all of them, the same to the last bit."""
        for name, part in made.items():
            parameter = self._parameters[name]
            own = self._own(name)
            if self._alone or is_split(parameter):
                own.copy_(part)
                continue
            whole: Any = parameter.grad
            whole.zero_()
            own.copy_(part)
            dist.all_reduce(whole, group=self._gradients._group)

    def parameters(self) -> dict[str, Tensor]:
        """What this process holds of every parameter of the model, of those without gradients too."""
        model = self._gradients._model
        pairs = model.named_parameters() if isinstance(model, nn.Module) else model
        return {
            name: local(parameter.detach(), parameter) for name, parameter in sorted(pairs, key=lambda pair: pair[0])
        }

    @contextmanager
    def exactly(self) -> Iterator[None]:
        """Arithmetic as it is written, whatever the caller's autocast says, and without gradients."""
        with torch.no_grad(), torch.autocast(self._gradients._device.type, enabled=False):
            yield

    def _own(self, name: str) -> Tensor:
        parameter, shard = self._parameters[name], self.shards[name]
        flat = local(parameter.grad, parameter).view(-1)
        return flat if is_split(parameter) else flat[shard.offset : shard.offset + shard.size]

    def _together(self, array: Array, exchange: Callable[..., Any]) -> Array:
        if self._alone:
            return array
        shared = torch.from_numpy(np.array(array, order="C")).to(self._gradients._device)  # it is exchanged in place
        exchange(shared, group=self._gradients._group)
        return shared.cpu().numpy()
