"""What test_torch_projected_distributed.py judges: the same projected training on several processes.

    python torch_projected_processes.py FOLDER

FOLDER holds artifacts and a key. One after the other, 4, 2 and 1 forks of this process join a group and go through
`everything`; a last one, the process 0 of 0, trains without a group. Each puts what it saw into FOLDER/WORLD-RANK.pt:
names of checks with tensors, messages of refusals, or plain values.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import func, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import mmfact
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise.torch import GradientNoise
from mmfact.noise.torch_projected import ProjectedNoise
from mmfact.store import projectors
from mmfact.store.projectors import ProjectorCache

WORLDS = (4, 2)
STEPS, EXAMPLES, PUBLIC, K = 6, 10, 9, 4
RUN = bytes(range(16))


def data(count: int, seed: int) -> tuple[Any, Any]:
    made = torch.Generator().manual_seed(seed)
    return torch.randn(count, 5, generator=made), torch.randn(count, 1, generator=made)


def plain() -> Any:
    """Rows that 2 and 4 processes cannot share evenly, and fewer than there are processes."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 3), nn.Tanh(), nn.Linear(3, 1))


def whole(tensor: Any) -> Any:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def values(model: Any) -> dict[str, Any]:
    return {name.removeprefix("module."): whole(p) for name, p in model.named_parameters()}


def per_example(model: Any, features: Any, targets: Any) -> dict[str, Any]:
    """Whole gradients, at the whole parameters."""
    template = plain()

    def one(parameters: Any, x: Any, y: Any) -> Any:
        return ((func.functional_call(template, parameters, x) - y) ** 2).sum()

    return func.vmap(func.grad(one), (None, 0, 0))(values(model), features, targets)


class Rank:
    """One process."""

    def __init__(self, folder: Path, world: int, rank: int) -> None:
        self.folder, self.world, self.rank = folder, world, rank
        self.key = NoiseKey.from_file(folder / "key")
        self.seen: dict[str, Any] = {}

    @property
    def last(self) -> bool:
        return self.rank == self.world - 1

    def artifact(self, name: str = "independent") -> Any:
        return mmfact.load(str(next((self.folder / name).glob("*.h5"))))

    def model(self, layout: str) -> Any:
        model = plain()
        if layout == "replicated" and self.world:
            return nn.parallel.DistributedDataParallel(model)
        if layout == "split" and self.world:
            mesh = init_device_mesh("cpu", (self.world,))
            fully_shard(model[0], mesh=mesh)
            return fully_shard(model, mesh=mesh)
        return model

    def refusal(self, act: Callable[[], Any]) -> str:
        try:
            act()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"

    def cache(self, name: str) -> ProjectorCache:
        return ProjectorCache(self.folder / f"cache-{name}-{self.world}")


class Training:
    """A run of one process or of all of them."""

    def __init__(
        self, me: Rank, layout: str = "replicated", *, artifact: str = "independent", state: Any = None,
        recompute: bool = False, **options: Any,
    ) -> None:  # fmt: skip
        self.me, self.model = me, me.model(layout)
        self.split = layout == "split" and me.world > 0
        self.checked = artifact == "correlated"
        how: dict[str, Any] = {"batch_size": 7, "key": me.key, "threads": 1}
        chosen = me.artifact(artifact)
        if state is None:
            how |= {"noise_multiplier": 1.3, "clip_norm": 0.7, "run": RUN, "check_participation": self.checked}
            self.noise = GradientNoise(self.model, chosen, **how)
        else:
            for name, p in self.model.named_parameters():
                fill(p.data, state["model"][name.removeprefix("module.")])
            self.noise = GradientNoise.restore(self.model, chosen, state["noise"], resume="unpublished", **how)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        options = {"refresh": 2, "start_step": 1, "held_out": data(6, 2), "public": data(PUBLIC, 1), "k": K, **options}
        public, k = options.pop("public"), options.pop("k")
        self.projected = ProjectedNoise(self.noise, options.pop("each", self.each), public, k, **options)
        if state is not None:
            self.projected.load_state_dict(state["projected"], recompute=recompute)

    def each(self, features: Any, targets: Any) -> dict[str, Any]:
        """As ProjectedNoise wants them: of the elements that this process holds."""
        found = per_example(self.model, features, targets)
        return {name: self.own(part, 1) for name, part in found.items()} if self.split else found

    def own(self, part: Any, axis: int) -> Any:
        """This process's rows, as torch.chunk deals them out."""
        chunks = part.chunk(self.me.world, axis)
        return chunks[self.me.rank] if self.me.rank < len(chunks) else part.narrow(axis, 0, 0)

    def step(self) -> None:
        me, step = self.me, self.noise.step_number
        each = per_example(self.model, *data(EXAMPLES, 100 + step))
        mine = np.array_split(np.arange(EXAMPLES), max(me.world, 1))[me.rank]
        if self.split:
            norms = torch.sqrt(sum((part.flatten(1) ** 2).sum(1) for part in each.values()))
            sums = {name: torch.tensordot(torch.clamp(0.7 / norms, max=1), part, 1) for name, part in each.items()}
            self.projected.add({name: self.own(part, 0) for name, part in sums.items()})
        else:
            self.projected.clip({name: part[mine] for name, part in each.items()})
        self.projected.step(ids=[1000 * step + int(i) for i in mine] if self.checked else None)
        self.optimizer.step()

    def go(self, until: int) -> Training:
        while self.noise.step_number < until:
            self.step()
        return self

    def state(self) -> dict[str, Any]:
        where = self.me.folder / f"state-{self.me.world}-{self.me.rank}"
        torch.save(
            {
                "model": values(self.model),
                "noise": self.noise.state_dict(),
                "projected": self.projected.state_dict(),
            },
            where,
        )
        return torch.load(where, weights_only=True)

    def result(self) -> dict[str, Any]:
        return {
            "values": values(self.model),
            "records": [one.record() for one in self.projected.refreshes],
            "size": self.projected._share.size,
        }


def fill(tensor: Any, values: Any) -> None:
    if isinstance(tensor, DTensor):
        values = distribute_tensor(values, tensor.device_mesh, tensor.placements)
    tensor.copy_(values)


# --- checks ----------------------------------------------------------------------------------------

SORTS: dict[tuple[str, str], dict[str, Any]] = {
    ("replicated", "eigen"): {},
    ("split", "eigen"): {},
    ("split", "float16"): {"storage": "float16"},
    ("replicated", "random"): {"kind": "random"},
    ("split", "random-plain"): {"kind": "random-plain", "held_out": None},
    ("replicated", "correlated"): {"artifact": "correlated"},
}
RESTARTS = ("replicated", 3, False), ("replicated", 4, True), ("split", 3, True), ("split", 4, False)


def whole_runs(me: Rank) -> None:
    for (layout, sort), options in SORTS.items():
        me.seen[f"run, {layout}, {sort}"] = Training(me, layout, **options).go(STEPS).result()


def restarts(me: Rank) -> None:
    """Between refreshes and at one, with a cache and without."""
    for layout, at, cached in RESTARTS:
        cache = me.cache(f"restart-{layout}-{at}") if cached else None
        state = Training(me, layout, cache=cache).go(at).state()
        resumed = Training(me, layout, cache=cache, state=state).go(STEPS)
        me.seen[f"resumed, {layout}, {at}, {cached}"] = resumed.result()


def failures(me: Rank) -> None:
    """One process cannot make its public gradients: nobody goes on, and no row is used."""
    training = Training(me).go(3)

    def broken(*rows: Any) -> Any:
        if me.last:
            raise RuntimeError("out of memory")
        return training.each(*rows)

    training.projected._per_example = broken
    me.seen["per_example raises"] = me.refusal(training.step)
    me.seen["step after that"] = training.noise.step_number
    training.projected._per_example = lambda *rows: {
        name: part[me.last :] for name, part in training.each(*rows).items()
    }
    me.seen["per_example gives less"] = me.refusal(training.projected.step)
    nan = torch.tensor(float("nan"))
    training.projected._per_example = lambda *rows: {
        name: torch.where(torch.arange(len(part)).view(-1, *[1] * (part.ndim - 1)) == 5, nan, part) if me.last else part
        for name, part in training.each(*rows).items()
    }
    me.seen["per_example gives NaN"] = me.refusal(training.projected.step)
    training.projected._per_example = training.each
    training.step()  # its contributions, which were thrown away, are given again
    me.seen["run after that"] = training.go(STEPS).result()


def disagreements(me: Rank) -> None:
    """One process differs: all refuse."""
    features, targets = data(PUBLIC, 1)
    differences: dict[str, dict[str, Any]] = {
        "other public": {"public": data(PUBLIC, 11)},
        "other order": {"public": (features.flip(0), targets.flip(0))},
        "fewer public": {"public": data(PUBLIC - 1, 1)},
        "k": {"k": K - 1},
        "kind": {"kind": "random"},
        "refresh": {"refresh": 3},
        "start": {"start_step": 0},
        "storage": {"storage": "float16"},
        "tag": {"tag": "mine"},
        "held out": {"held_out": data(6, 22)},
        "no held out": {"held_out": None},
        "private": {"private": data(PUBLIC, 1)[0]},
        "no k": {"k": 0},
    }
    for name, options in differences.items():
        me.seen[f"differs: {name}"] = me.refusal(lambda o=options: Training(me, **(o if me.last else {})))


def lost_entries(me: Rank) -> None:
    """One process's entry is gone from the cache, or it cannot write its own."""
    cache = me.cache("lost")
    state = Training(me, cache=cache).go(4).state()
    dist.barrier()
    if me.last:
        for path in cache.path.glob(f"*_{me.rank}-of-{me.world}_*.h5"):
            path.unlink()
    dist.barrier()
    me.seen["lost"] = me.refusal(lambda: Training(me, cache=cache, state=state))
    again = Training(me, cache=cache, state=state, recompute=True)
    me.seen["projector after that"] = again.projected.projector is None
    me.seen["lost, made again"] = again.go(STEPS).result()
    wrong = {**state, "projected": {**state["projected"], "step": 2}} if me.last else state
    me.seen["wrong state"] = me.refusal(lambda: Training(me, cache=cache, state=wrong))

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    real = projectors.publish_pieces
    projectors.publish_pieces = full if me.last else real
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        training = Training(me, cache=me.cache("full")).go(4)
    projectors.publish_pieces = real
    me.seen["full disk"] = [str(one.message) for one in said if "memory" in str(one.message)]
    resumed = Training(me, cache=me.cache("full"), state=training.state()).go(STEPS)
    me.seen["full disk, resumed"] = resumed.result()
    # the same steps again: what not every process finds, all make again
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        me.seen["found in part"] = Training(me, cache=me.cache("full")).go(STEPS).result()


def everything(me: Rank) -> None:
    whole_runs(me)
    restarts(me)
    if me.world > 1:
        failures(me)
        disagreements(me)
        lost_entries(me)


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
    # What takes a second to load, once for all forks: kernels, and what torch's optimizers import.
    NoiseStream(Rank(folder, 0, 0).artifact(), 3, noise_multiplier=1.0, clip_norm=1.0).next()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])
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
