"""The parameters of a torch model: their names, and what of each a process holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmfact.factorize.errors import AdapterError

_WRAPPERS = ("_orig_mod", "_module", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")  # of compile, Opacus, torch


def trainable(model: Any) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by names that no wrapper changes."""
    while isinstance(model, nn.Module):
        inner = (
            model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model._modules.get("_orig_mod")
        )
        if inner is None:
            break
        model = inner
    if isinstance(model, nn.Module) and any(
        type(part).__name__ == "FullyShardedDataParallel" for part in model.modules()
    ):
        raise AdapterError(
            "FullyShardedDataParallel hides which elements a process holds; use torch.distributed.fsdp.fully_shard"
        )
    pairs = model.named_parameters() if isinstance(model, nn.Module) else model
    found: dict[str, nn.Parameter] = {}
    seen: set[int] = set()  # a tied parameter goes by its first name
    for name, parameter in pairs:
        name = ".".join(part for part in str(name).split(".") if part not in _WRAPPERS)
        if name in found and found[name] is not parameter:
            raise AdapterError(f"two parameters are named {name!r}; the noise of each needs a name of its own")
        if parameter.requires_grad and id(parameter) not in seen:
            found[name] = parameter
            seen.add(id(parameter))
    if not found:
        raise AdapterError("the model has no parameter that requires gradients; there is nothing to add noise to")
    return found


def kind(parameter: Tensor) -> tuple[Any, ...]:
    """What a parameter must keep in a run besides its identity."""
    return parameter.shape, parameter.device


def is_split(parameter: Tensor) -> bool:
    return hasattr(parameter, "placements")  # a DTensor, without an import of what not every torch has


def spread(parameter: Any) -> int:
    """How many processes a split parameter is on."""
    return int(parameter.device_mesh.size())


def rows(name: str, parameter: Any) -> tuple[int, int]:
    """(elements, first element) of what this process holds of a parameter that is split by rows."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor import Shard as Split

    splits = [placement for placement in parameter.placements if not isinstance(placement, Replicate)]
    if len(splits) != 1 or type(splits[0]) is not Split or splits[0].dim != 0:
        raise AdapterError(
            f"parameter {name!r} is split as {parameter.placements}; only a split by rows is supported (fully_shard "
            "makes that)"
        )
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    row = parameter.numel() // max(len(parameter), 1)
    local = parameter.to_local().numel()
    return local, offset[0] * row if local else 0


def local(tensor: Any, parameter: Any) -> Tensor:
    """This process's part of `tensor`, split as the parameter is."""
    if not is_split(tensor):
        return tensor
    if tensor.placements != parameter.placements:
        tensor = tensor.redistribute(parameter.device_mesh, parameter.placements)
    return tensor.to_local()


def like(local: Tensor, parameter: Any) -> Tensor:
    """A gradient of the parameter's own kind."""
    if not is_split(parameter):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, shape=parameter.shape, stride=parameter.stride()
    )
