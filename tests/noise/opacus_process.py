"""One of several processes that train with Opacus together: `opacus_process.py RANK PROCESSES FOLDER`.

Leaves in FOLDER what process RANK ended with: parameters of every run, refusals, and a state of step 5.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from opacus import PrivacyEngine
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import data

from mmfact.factorize import compiler, workload
from mmfact.factorize.errors import MmfactError
from mmfact.noise import NoiseKey
from mmfact.noise.opacus import correlate
from mmfact.store.format import from_factorization

STEPS, BATCH, SIGMA, CLIP = 12, 4, 1.3, 0.4
RUN = bytes(range(16))
KEY = NoiseKey.insecure_from_seed(2024)
RUNS = {
    "flat mean": ("hooks", "mean", DifferentiallyPrivateDistributedDataParallel),
    "flat sum": ("hooks", "sum", DifferentiallyPrivateDistributedDataParallel),
    "ghost mean": ("ghost", "mean", DifferentiallyPrivateDistributedDataParallel),
    "ghost sum": ("ghost", "sum", DifferentiallyPrivateDistributedDataParallel),
    "torch's DDP": ("hooks", "mean", DistributedDataParallel),
}


def artifact() -> Any:
    options = compiler.Options(strategy="buffered", buffers=3, tolerance=0.5)
    return from_factorization(compiler.compile(workload.momentum(STEPS), options))


def examples() -> data.TensorDataset:
    random = torch.Generator().manual_seed(5)
    features = torch.randn(STEPS * BATCH, 6, generator=random)
    features[7] = float("nan")  # of one process only
    return data.TensorDataset(features, torch.randint(0, 3, (STEPS * BATCH,), generator=random))


def private(mode: str, reduction: str, loader: Any, wrap: Any = lambda net: net) -> tuple[Any, ...]:
    """(engine, model, optimizer, criterion, loader)"""
    torch.manual_seed(0)
    net = wrap(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)))
    engine, criterion = PrivacyEngine(accountant="mmfact"), nn.CrossEntropyLoss(reduction=reduction)
    rate = 0.1 if reduction == "mean" else 0.1 / BATCH
    model, optimizer, *wrapped, loader = engine.make_private(
        module=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9),
        criterion=criterion,
        data_loader=loader,
        noise_multiplier=SIGMA,
        max_grad_norm=CLIP,
        loss_reduction=reduction,
        grad_sample_mode=mode,
        poisson_sampling=False,
    )
    return engine, model, optimizer, *(wrapped or [criterion]), loader


def train(model: Any, optimizer: Any, criterion: Any, batches: Any) -> Iterator[int]:
    for step, (features, labels) in enumerate(batches):
        criterion(model(features), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield step


def parameters(model: Any) -> Any:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().copy()


def main(rank: int, processes: int, folder: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
    made, dataset, left, refused = artifact(), examples(), {}, {}

    def loader() -> Any:
        sampler = data.DistributedSampler(dataset, shuffle=False, drop_last=True)
        return data.DataLoader(dataset, batch_size=BATCH // processes, sampler=sampler)

    for name, (mode, reduction, wrap) in RUNS.items():
        engine, model, optimizer, criterion, batches = private(mode, reduction, loader(), wrap)
        journal = folder / f"journal {name} {rank}"
        noise = correlate(optimizer, model, made, data_loader=batches, key=KEY, run=RUN, journal=journal)
        for step in train(model, optimizer, criterion, batches):
            if name == "flat mean" and step == 4:
                torch.save(
                    {
                        "noise": noise.state_dict(buffers=False),
                        "model": model._module.module.state_dict(),
                        "optimizer": optimizer.state_dict(),
                    },
                    folder / f"state {rank}",
                )
                noise.commit()
        left[name] = parameters(model)
        refused[f"epsilon {name}"] = repr(engine.get_epsilon(1e-5))

    def refusal(name: str, mode: str = "hooks", wrap: Any = DifferentiallyPrivateDistributedDataParallel) -> Any:
        options: dict[str, Any] = {"key": KEY, "run": RUN}
        _, model, optimizer, criterion, batches = private(mode, "mean", loader(), wrap)
        if name == "key" and rank:
            options["key"] = NoiseKey.insecure_from_seed(1)
        if name == "no key":
            options["key"] = None
        if name == "ids":
            options["check_participation"] = True
        if name == "sampler":
            batches = data.DataLoader(dataset, batch_size=BATCH)
        try:
            noise = correlate(optimizer, model, made, data_loader=batches, **options)
            if name == "ids":
                noise.took_part([0, 1 + rank])  # 0 on every process
            next(train(model, optimizer, criterion, batches))
        except MmfactError as error:
            refused[name] = f"{type(error).__name__}: {error}"

    for name in ("key", "no key", "ids", "sampler"):
        refusal(name)
    refusal("averaged twice", "ghost", DistributedDataParallel)
    np.savez(folder / f"left {rank}.npz", **left, refused=np.array(sorted(refused.items())))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
