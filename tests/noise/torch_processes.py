"""What test_torch_distributed.py judges: the same training on several processes, and refusals that all of them share.

    python torch_processes.py FOLDER

FOLDER holds an artifact and a key. One after the other, 4, 2 and 1 forks of this process join a group and go through
`everything`; a last one, the process 0 of 0, trains without a group. Each puts what it saw into FOLDER/WORLD-RANK.pt:
names of checks with tensors, messages of refusals, or plain values.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import mmfact
from mmfact.factorize.errors import MmfactError, StateError
from mmfact.noise import NoiseKey
from mmfact.noise.torch import GradientNoise

WORLDS = (4, 2, 1)
STEPS, BATCH, EXAMPLES = 12, 7, 10
RUN = bytes(range(16))


class Rank:
    """One process."""

    def __init__(self, folder: Path, world: int, rank: int) -> None:
        self.folder, self.world, self.rank = folder, world, rank
        self.artifact = mmfact.load(str(next(folder.glob("*.h5"))))
        self.key = NoiseKey.from_file(folder / "key")
        self.seen: dict[str, Any] = {}

    @property
    def last(self) -> bool:
        return self.rank == self.world - 1

    def noise(self, model: Any, **options: Any) -> GradientNoise:
        artifact = options.pop("artifact", self.artifact)
        options = {
            "noise_multiplier": 1.3,
            "clip_norm": 0.7,
            "batch_size": BATCH,
            "key": self.key,
            "run": RUN,
            **options,
        }
        return GradientNoise(model, artifact, threads=1, **options)

    def model(self, kind: str = "plain") -> Any:
        """Rows that 2 and 4 processes cannot share evenly, and fewer than there are processes."""
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))
        if kind == "replicated" and self.world:
            return nn.parallel.DistributedDataParallel(model)
        if kind == "split" and self.world:
            mesh = init_device_mesh("cpu", (self.world,))
            fully_shard(model[0], mesh=mesh)
            return fully_shard(model, mesh=mesh)
        return model

    def refusal(self, act: Callable[[], Any]) -> str:
        try:
            act()
        except MmfactError as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"


def per_example(model: Any, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    names = [(name.removeprefix("module."), p) for name, p in model.named_parameters()]
    return {name: torch.randn((EXAMPLES, *p.shape), generator=generator) for name, p in names}


def clipped(each: dict[str, Any]) -> dict[str, Any]:
    norms = torch.sqrt(sum((part.flatten(1) ** 2).sum(1) for part in each.values()))
    return {name: torch.tensordot(torch.clamp(0.7 / norms, max=1), part, 1) for name, part in each.items()}


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def grads(model: Any) -> dict[str, Any]:
    return {name.removeprefix("module."): whole(p.grad) for name, p in model.named_parameters()}


def values(model: Any) -> dict[str, Any]:
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def sgd(model: Any) -> Any:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(me: Rank, kind: str, model: Any, gradients: GradientNoise, optimizer: Any, steps: range) -> None:
    """Each process its share of the examples, or of the sum of all."""
    for step in steps:
        each = per_example(model, step)
        if kind == "replicated" or not me.world:
            mine = np.array_split(np.arange(EXAMPLES), max(me.world, 1))[me.rank]
            for half in np.array_split(mine, 2):  # accumulated; one half may be empty
                gradients.clip({name: part[half] for name, part in each.items()})
        else:
            sums, parameters = clipped(each), dict(model.named_parameters())
            if step % 2:
                sums = {
                    name: distribute_tensor(part, parameters[name].device_mesh, parameters[name].placements)
                    for name, part in sums.items()
                }
            else:
                sums = {name: local(part, me) for name, part in sums.items()}
            gradients.add(sums)
        gradients.step()
        optimizer.step()


def local(part: Any, me: Rank) -> Any:
    """This process's rows, as torch.chunk deals them out."""
    chunks = part.chunk(me.world)
    return chunks[me.rank] if me.rank < len(chunks) else part[:0]


# --- checks ----------------------------------------------------------------------------------------


def noise_alone(me: Rank) -> None:
    for kind in ("replicated", "split"):
        model = me.model(kind)
        gradients = me.noise(model)
        rows = []
        for _ in range(STEPS):
            gradients.step()
            rows.append(grads(model))
        me.seen[f"noise, {kind}"] = rows
        me.seen[f"horizon, {kind}"] = me.refusal(gradients.step)


def whole_runs(me: Rank) -> None:
    for kind in ("replicated", "split"):
        model = me.model(kind)
        train(me, kind, model, me.noise(model), sgd(model), range(STEPS))
        me.seen[f"run, {kind}"] = values(model)


def backward_pass(me: Rank) -> None:
    """Sums as FSDP's own backward pass leaves them."""
    model = me.model("split")
    gradients, optimizer = me.noise(model), sgd(model)
    for step in range(3):
        features = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
        (model(features) ** 2).sum().backward()
        gradients.add({name: p.grad for name, p in model.named_parameters()})
        gradients.step()
        optimizer.step()
    me.seen["backward"] = values(model)


def disagreements(me: Rank) -> None:
    """One process differs: all refuse."""
    model = me.model("replicated")
    other = mmfact.load(str(next((me.folder / "other").glob("*.h5"))))
    differences: dict[str, dict[str, Any]] = {
        "key": {"key": NoiseKey.ephemeral()},
        "artifact": {"artifact": other},
        "sigma": {"noise_multiplier": 1.31},
        "clip norm": {"clip_norm": 0.71},
        "batch size": {"batch_size": BATCH + 1},
        "run": {"run": bytes(16)},
        "no sigma": {"noise_multiplier": float("nan")},
        "no key": {"key": None},
    }
    for name, options in differences.items():
        me.seen[f"differs: {name}"] = me.refusal(lambda o=options: me.noise(model, **(o if me.last else {})))
    smaller = nn.Linear(5, 2) if me.last else nn.Linear(5, 3)
    me.seen["differs: model"] = me.refusal(lambda: me.noise(smaller))
    gradients = me.noise(model)
    if me.last:
        gradients.skip_to(3)
    me.seen["differs: step"] = me.refusal(gradients.step)
    me.seen["step after that"] = gradients.step_number
    journal = me.folder / f"taken-{me.world}"
    if me.rank == 0:
        journal.write_text("")
    me.seen["differs: journal"] = me.refusal(lambda: me.noise(model, journal=journal))
    nonce = me.noise(model, run=None).run
    me.seen["run nonce"] = nonce
    frozen = nn.Linear(5, 3)
    gradients = me.noise(frozen)
    if me.last:
        frozen.bias.requires_grad_(False)
    me.seen["frozen on one"] = me.refusal(gradients.step)
    if me.world == 4:  # pairs that share parameters, in a run of all: each pair would release the same row
        layer = nn.Linear(5, 4)
        fully_shard(layer, mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("pair", "place"))["place"])
        me.seen["submesh"] = me.refusal(lambda: me.noise(layer))


def participation(me: Rank) -> None:
    model = me.model("replicated")
    gradients = me.noise(model, check_participation=True)
    own = [10 * me.rank, 10 * me.rank + 1]
    gradients.step(ids=torch.tensor(own) if me.last else own)
    refused = {
        "on two processes": [77],
        "of an earlier step elsewhere": [10 * ((me.rank + 1) % me.world)] if me.rank == 0 else [],
        "given by some only": None if me.last else [200 + me.rank],
        "no ids at all": "abc" if me.last else [300 + me.rank],
    }
    for name, ids in refused.items():
        me.seen[f"ids {name}"] = me.refusal(lambda ids=ids: gradients.step(ids=ids))
        assert gradients.step_number == 1
    gradients.step(ids=[1000 + me.rank])
    me.seen["after refused ids"] = grads(model)
    me.seen["examples"] = gradients.ledger()["participation"]["examples"]


def failing_journal(me: Rank) -> None:
    """The first process cannot write: nobody goes on."""
    model = me.model("replicated")
    gradients = me.noise(model, journal=me.folder / f"failing-{me.world}")

    def full(step: int) -> None:
        raise StateError("the disk is full")

    if me.rank == 0:
        gradients._noise._journal.issue = full  # type: ignore[union-attr, method-assign]
    gradients.clip({name: part[:1] for name, part in per_example(model, 0).items()})
    me.seen["full disk"] = me.refusal(gradients.step)
    me.seen["grad after that"] = all(p.grad is None for p in model.parameters())
    me.seen["the next step"] = me.refusal(gradients.step)
    gradients.close()


def checkpoints(me: Rank) -> None:
    """Saved by 4 processes, one time replicated and one time split; continued by 4, 2, 1, and 1 without a group."""
    for kind in ("replicated", "split"):
        where = me.folder / f"checkpoint-{kind}"
        if me.world == WORLDS[0]:
            model = me.model(kind)
            gradients, optimizer = me.noise(model, journal=where.with_suffix(f".{me.rank}")), sgd(model)
            train(me, kind, model, gradients, optimizer, range(5))
            saved = {"model": values(model), "noise": gradients.state_dict()}
            saved["momentum"] = [whole(optimizer.state[p]["momentum_buffer"]) for p in model.parameters()]
            own, lean = saved["noise"], gradients.state_dict(buffers=False)
            dist.barrier()
            gradients.commit()
            gradients.close()
            me.seen[f"journals, {kind}"] = where.with_suffix(f".{me.rank}").exists()
            me.seen[f"journal in the state, {kind}"] = own["journal"] and lean["journal"]
            if me.rank == 0:
                torch.save(saved, where)
                torch.save({**saved, "noise": lean}, where.with_suffix(".lean"))
                for world in (*WORLDS, 0):
                    shutil.copy(where.with_suffix(".0"), where.with_suffix(f".for-{world}"))
                    shutil.copy(where.with_suffix(".0"), where.with_suffix(f".lean-for-{world}"))
            dist.barrier()
        for lean_state in (False, True):
            then = "split" if me.world == 2 else "replicated"  # also from one kind to the other
            saved = torch.load(where.with_suffix(".lean") if lean_state else where, weights_only=True)
            state = own if me.world == WORLDS[0] and not lean_state else saved["noise"]
            model = me.model(then)
            for name, p in model.named_parameters():
                fill(p.data, saved["model"][name.removeprefix("module.")])
            optimizer = sgd(model)
            for p, buffer in zip(model.parameters(), saved["momentum"], strict=True):
                optimizer.state[p]["momentum_buffer"] = fill(torch.zeros_like(p.data), buffer)
            journal = where.with_suffix(f".{'lean-' * lean_state}for-{me.world}")
            bad = {**state, "step": 4} if me.last or not me.world else state
            how: dict[str, Any] = {"batch_size": BATCH, "key": me.key, "journal": journal, "threads": 1}
            if me.world > 1:
                me.seen["a changed state"] = me.refusal(
                    lambda b=bad, h=how, m=model: GradientNoise.restore(m, me.artifact, b, **h)
                )
            gradients = GradientNoise.restore(model, me.artifact, state, **how)
            train(me, then, model, gradients, optimizer, range(5, STEPS))
            me.seen[f"resumed, {kind}, {lean_state}"] = values(model)
            gradients.close()


def fill(tensor: Any, values: Any) -> Any:
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
    return tensor.copy_(values)


def everything(me: Rank) -> None:
    noise_alone(me)
    whole_runs(me)
    backward_pass(me)
    if me.world > 1:
        disagreements(me)
        participation(me)
        failing_journal(me)
    checkpoints(me)


def process(folder: Path, world: int, rank: int) -> None:
    me = Rank(folder, world, rank)
    if world:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/join-{world}", rank=rank, world_size=world,
            timeout=timedelta(seconds=60),
        )  # fmt: skip
    everything(me)
    torch.save(me.seen, folder / f"{world}-{rank}.pt")
    if world:
        dist.barrier()
        dist.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    for world in (*WORLDS, 0):
        children = []
        for rank in range(max(world, 1)):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    process(folder, world, rank)
                    code = 0
                except BaseException:
                    import traceback

                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(code)
            children.append(child)
        failed = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        if any(failed):
            raise SystemExit(f"of {world} processes some failed: {failed}")


if __name__ == "__main__":
    main()
