"""Correlated noise for the gradients of a torch model, on one process or many.

    gradients = GradientNoise(model, artifact, noise_multiplier=1.0, clip_norm=1.0, batch_size=256, key=key)
    for features, targets in loader:                       # every example in one step only
        gradients.clip(per_example(model, features, targets))      # {name: tensor of shape (examples, *shape)}
        gradients.step()                                   # p.grad = (sum of clipped gradients + noise) / batch_size
        optimizer.step()

Sums are kept, and noise is added to them, in float32 (float64 for float64 parameters); only the noisy mean is cast to
the parameter's own precision, since noise that was cast first would put the release on a grid that betrays gradients.

Processes: where torch.distributed runs, every process of `group` calls each method at the same time. Parameters that
are whole in every process (DDP): each adds its own slice of the row to its local sum, and the sums are then added up.
Parameters that are split over processes (FSDP2's `fully_shard`): each draws the noise of its own elements, and nothing
is sent. Either way the noise is that of a single process under the same key and run.
"""

from __future__ import annotations

import secrets
import struct
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mmfact.factorize.errors import AdapterError, ParticipationError, StateError
from mmfact.noise import checks
from mmfact.noise.guard import Guard
from mmfact.noise.key import NoiseKey
from mmfact.noise.participation import listed
from mmfact.noise.release import Shard
from mmfact.noise.source import NONCE_BYTES
from mmfact.store.artifact import Artifact

try:
    import torch
    import torch.distributed as dist
    from torch import Tensor, nn
except ImportError as error:
    raise AdapterError('mmfact.noise.torch needs torch: pip install "mmfact[torch]"') from error

from mmfact.noise.torch_device import TensorNoise
from mmfact.noise.torch_parameters import is_split, kind, like, local, rows, spread, trainable

_MARGIN = 1 - 1e-6  # of the clip norm, for the rounding of what is clipped to it
_PIECE = 1 << 19  # elements of gradients that are clipped at a time
_WORLD: Any = object()


class GradientNoise:
    """The noisy mean gradient of a torch model: clips, sums up, adds correlated noise, divides.

    Between `step` and the next contribution `p.grad` is the noisy mean; from the first contribution to `step` it is
    None. Contributions are used once: a step that is refused or interrupted throws them away. Only parameters that
    require gradients take part.

    Parameters
    ----------
    model : nn.Module, or iterable of (name, parameter)
        After DDP, `fully_shard` or torch.compile. Wrappers do not change the names.
    artifact : Artifact
        From `mmfact.load`.
    noise_multiplier : float
        sigma > 0: the whole run is one Gaussian release with mu = 1 / sigma.
    clip_norm : float
        L2 norm of an example's gradient over all parameters together, > 0.
    batch_size : float
        The constant by which noisy sums are divided, in all processes together: the intended batch size, however many
        examples a step has. Division happens here and nowhere else: let the loss of an example be its own, not a mean.
    key : NoiseKey, optional
        The same in every process. Default: a new one, with which the state cannot be saved (one process only).
    optimizer : torch.optim.Optimizer, optional
        Compared with the artifact's workload at every step: see `mmfact.noise.guard`. It must step no other
        parameters, and is refused a step on gradients of a backward pass that `step` did not make.
    group : process group, optional
        Default: all processes, if torch.distributed was initialized; None for a run of this process alone.
    run, threads, journal, check_participation
        As for `NoiseStream`. The journal is kept by the first process of the group.

    Raises
    ------
    AdapterError
        Nothing to train; a parameter that is split otherwise than by rows; a device that is not supported.
    StateError
        Processes disagree on artifact, key or step.
    MmfactError
        As for `NoiseStream`.
    """

    def __init__(
        self,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        artifact: Artifact,
        *,
        noise_multiplier: float,
        clip_norm: float,
        batch_size: float,
        key: NoiseKey | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        group: Any = _WORLD,
        run: bytes | None = None,
        threads: int | None = None,
        journal: str | Path | None = None,
        check_participation: bool = False,
    ) -> None:
        self._join(group)
        run = self._agreed_run(run)

        def make() -> TensorNoise:
            self._scan(model, batch_size, optimizer)
            if key is None and self._processes > 1:
                raise StateError(
                    f"{self._processes} processes share this run: give every one of them the same key, "
                    "NoiseKey.generate(path) once and NoiseKey.from_file(path) in each"
                )
            noise = TensorNoise(
                artifact,
                self._shards,
                devices=self._devices,
                noise_multiplier=noise_multiplier,
                clip_norm=clip_norm,
                key=key,
                run=run,
                threads=threads,
                journal=journal if self._rank == 0 else None,
                check_participation=check_participation,
            )
            noise._journaled = journal is not None  # whichever process's state is restored
            return noise

        self._start(make)

    @classmethod
    def restore(
        cls,
        model: nn.Module | Iterable[tuple[str, nn.Parameter]],
        artifact: Artifact,
        state: dict[str, Any],
        *,
        batch_size: float,
        key: NoiseKey,
        optimizer: torch.optim.Optimizer | None = None,
        group: Any = _WORLD,
        resume: str | None = None,
        threads: int | None = None,
        journal: str | Path | None = None,
    ) -> GradientNoise:
        """Continue a saved run bit for bit, on as many processes as there are now: see `NoiseStream.restore`.

        A state that another process saved, or the same before the number of processes changed, serves as well; past
        rows are then drawn again.

        Raises
        ------
        StateError
            As for `NoiseStream.restore`; the model is not the one that the state was saved for.
        """
        made = cls.__new__(cls)
        made._join(group)

        def make() -> TensorNoise:
            made._scan(model, batch_size, optimizer)
            return TensorNoise._restore(
                artifact,
                state,
                key=key,
                resume=resume,
                journal=journal if made._rank == 0 else None,
                threads=threads,
                shards=made._shards,
                devices=made._devices,
                leading=made._rank == 0,
            )

        made._start(make)
        return made

    def _join(self, group: Any) -> None:
        """Which processes share the run."""
        if group is _WORLD:
            group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self._group = group
        self._processes = 1 if group is None else dist.get_world_size(group)
        self._rank = 0 if group is None else dist.get_rank(group)

    def _scan(self, model: Any, batch_size: float, optimizer: Any) -> None:
        """Which parameters there are, and what of each this process holds."""
        self._model = model if isinstance(model, nn.Module) else list(model)
        self._parameters = trainable(self._model)
        self._kinds = {name: kind(parameter) for name, parameter in self._parameters.items()}
        self._batch_size = checks.positive("batch size", batch_size, "every noisy sum is divided by it")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            raise AdapterError(f"optimizer must be one of torch.optim, or left out, not {type(optimizer).__name__}")
        self._optimizer = optimizer
        # Where there is a device, noise is made there.
        self._devices = {
            name: parameter.device for name, parameter in self._parameters.items() if not _on_cpu(parameter)
        }
        self._shards = {name: self._shard(name, parameter) for name, parameter in self._parameters.items()}
        self._device = next(iter(self._parameters.values())).device  # where the group's backend finds its tensors
        self._sums: dict[str, Tensor] = {}  # contributions that no step has used, if there are any
        self._examples: int | None = 0  # how many; None where only their sum was given
        self._given: dict[str, Any] = {}  # the latest noisy means
        self._stepped = False  # whether the optimizer has not used them yet

    def _start(self, make: Callable[[], TensorNoise]) -> None:
        """Have noise in every process, or in none: one that could not begin must not leave the others waiting."""
        noise, failure = None, None
        try:
            noise = make()
        except Exception as error:
            failure = error
        try:
            if self._processes > 1:
                for rank, refusal in enumerate(self._gathered(None if failure is None else str(failure))):
                    if refusal is not None and failure is None:
                        raise StateError(f"process {rank} of {self._processes} could not begin: {refusal}")
            if noise is None:
                raise failure  # type: ignore[misc]
            self._noise = noise
            if self._optimizer is not None:
                _watch(self._optimizer, self)
            self._guard = Guard(noise.artifact.workload)
            self._agree()
        except BaseException:
            if noise is not None:
                noise.close()
            raise

    @property
    def step_number(self) -> int:
        """The step that `step` takes next, counted from 0."""
        return self._noise.step

    @property
    def horizon(self) -> int:
        """Steps that there is noise for."""
        return self._noise.horizon

    @property
    def run(self) -> bytes:
        """The run nonce, 16 bytes."""
        return self._noise.run

    def clip(self, per_example: Mapping[str, Tensor]) -> None:
        """Clip the gradients of this process's examples to the clip norm, over all tensors together, and sum them up.

        May be called several times before a `step` (gradient accumulation). A gradient that is not finite counts as
        zero, since nothing about the data may stop the run.

        Parameters
        ----------
        per_example : mapping of str to Tensor
            For every parameter its gradients, shape (examples, *shape of the parameter), as
            ``torch.func.vmap(torch.func.grad(loss))`` gives them. No mean over the examples has been taken.

        Raises
        ------
        AdapterError
            A parameter is missing or unknown, a shape does not fit, or parameters are split over processes.
        """
        self._check_names(per_example)
        if any(is_split(parameter) for parameter in self._parameters.values()):
            raise AdapterError(
                "parameters are split over processes, so no process sees an example's whole gradient; clip where the "
                "gradients arise (ghost clipping) and give the sums to add()"
            )
        count = {gradients.shape[:1] for gradients in per_example.values()}
        for name, gradients in per_example.items():
            shape = self._parameters[name].shape
            if gradients.ndim == 0 or gradients.shape[1:] != shape or len(count) != 1:
                raise AdapterError(
                    f"the gradients of {name!r} have shape {tuple(gradients.shape)}; needed is one of shape "
                    f"{tuple(shape)} for each example, and as many for every parameter"
                )
        with torch.no_grad():
            flat = {
                name: gradients.detach().reshape(len(gradients), self._parameters[name].numel())
                for name, gradients in per_example.items()
            }
            each = [torch.stack([_norms(piece) for _, piece in _pieces(part)]) for part in flat.values()]
            norms = _norms(torch.cat([squares.to(each[0].device) for squares in each]).T)
            usable = torch.isfinite(norms)
            factors = torch.where(usable, (self._noise.clip_norm * _MARGIN / norms).clamp(max=1.0), 0.0)
            clean = bool(usable.all())

            def add(name: str, total: Tensor) -> None:
                factor = factors.to(total.device)
                for columns, piece in _pieces(flat[name]):
                    if not clean:
                        piece = torch.where(usable.to(total.device)[:, None], piece, 0.0)
                    total.view(-1)[columns].add_(factor @ piece)

            self._accumulate(add, len(norms))

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Add sums of gradients that are clipped already to `clip_norm`, over all tensors together.

        Parameters
        ----------
        sums : mapping of str to Tensor
            For every parameter a SUM (no mean) over this process's examples, in float32 or float64. For a parameter
            that is split over processes: this process's part of the sum over all processes' examples, or a DTensor.

        Raises
        ------
        AdapterError
            A parameter is missing or unknown, a shape does not fit, or the precision is too low.
        """
        self._check_names(sums)
        with torch.no_grad():
            own = {name: local(part.detach(), self._parameters[name]) for name, part in sums.items()}
            for name, part in own.items():
                shape = local(self._parameters[name].detach(), self._parameters[name]).shape
                if part.shape != shape:
                    raise AdapterError(f"the sum of {name!r} has shape {tuple(part.shape)}; {tuple(shape)} is needed")
                if part.dtype not in (torch.float32, torch.float64):
                    raise AdapterError(
                        f"the sum of {name!r} is {part.dtype}: sums must be float32 or float64, since one that is "
                        "rounded before the noise is added no longer has the sensitivity of the clip norm"
                    )
            self._accumulate(lambda name, total: total.add_(own[name]), None)

    def step(self, *, ids: Sequence[Any] | None = None) -> None:
        """End a step: p.grad = (sum of all contributions in all processes + this step's noise) / batch_size.

        Call the optimizer's step next. A step without contributions still has its noise.

        Parameters
        ----------
        ids : sequence of int or str, optional
            Of the examples (or users) of this process that took part; needed if, and only if, participation is checked.

        Raises
        ------
        HorizonError
            The artifact's steps are used up.
        ParticipationError
            An example took part before; nothing was drawn.
        StateError
            The model's parameters are not those of the start; processes disagree; as for `NoiseStream`.
        """
        if not self._sums and any(self._is_strange(name) for name in self._parameters):
            warnings.warn(
                "this step has no contributions, but p.grad was filled by a backward pass; that is ignored: give "
                "per-example gradients to clip(), or a sum of clipped gradients to add()",
                stacklevel=2,
            )
        with torch.no_grad():
            sums, examples = self._taken()  # whatever happens from here on, they are used once
            self._agree(self._changed())
            if self._noise.checks_participation:
                ids = self._all_ids(ids, examples)
            number = self._noise.step
            self._add_noise(sums, ids)
            for name, total in sums.items():
                parameter = self._parameters[name]
                if self._processes > 1 and not is_split(parameter):
                    dist.all_reduce(total, group=self._group)
                parameter.grad = like(total.div_(self._batch_size).to(parameter.dtype), parameter)
                self._given[name] = parameter.grad
            self._stepped = True
        if self._optimizer is not None:
            self._guard.check(number, self._optimizer.param_groups)

    def skip_to(self, step: int) -> None:
        """Go forward to `step` without using the noise between; it is gone for this run."""
        self._noise.skip_to(step)

    def state_dict(self, *, buffers: bool = True) -> dict[str, Any]:
        """What `restore` needs besides the artifact and the key: see `NoiseStream.state_dict`.

        With several processes each has its own buffers; without buffers the first one's state serves all.

        Raises
        ------
        StateError
            There are contributions without noise, which are never stored: call `step` first.
        """
        if self._sums:
            raise StateError(
                "a step is under way, and its sums have no noise yet, so they are not stored: call step() first"
            )
        return self._noise.state_dict(buffers=buffers)

    def commit(self, step: int | None = None) -> None:
        """Say that a checkpoint with the state is durable: see `NoiseStream.commit`."""
        self._noise.commit(step)

    def ledger(self) -> dict[str, Any]:
        """The record of the run so far, for whoever signs the privacy statement."""
        return {**self._noise.ledger(), "batch_size": self._batch_size, "processes": self._processes}

    def close(self) -> None:
        """End the run here and let go of its journal."""
        self._noise.close()

    def __repr__(self) -> str:
        if not hasattr(self, "_noise"):
            return "GradientNoise(not begun)"
        return f"GradientNoise({self._noise!r}, batch_size={self._batch_size:g}, processes={self._processes})"

    def __reduce__(self) -> NoReturn:
        raise StateError("it is never pickled or copied, or two would issue the same rows; use state_dict()")

    def _add_noise(self, sums: Mapping[str, Tensor], ids: Sequence[Any] | None) -> None:
        """This process's part of the row; no process goes on if one could not."""
        failure = None
        try:
            self._noise.add_to({name: self._slice(name, total) for name, total in sums.items()}, ids=ids)
        except Exception as error:
            failure = error
        if self._processes > 1:
            failed = torch.tensor([failure is not None], dtype=torch.int32, device=self._device)
            dist.all_reduce(failed, group=self._group)
            if failed.item() and failure is None:
                raise StateError(
                    f"{failed.item()} of {self._processes} processes could not add their noise (see their messages), "
                    "so the step's sums are thrown away everywhere; restore all processes from one checkpoint"
                )
        if failure is not None:
            raise failure

    def _all_ids(self, ids: Sequence[Any] | None, examples: int | None) -> Sequence[Any] | None:
        """The ids of the step in all processes, one for each example clipped; None if a process gave none."""
        try:
            own: Any = None if ids is None else listed(ids)
            if own is not None and examples is not None and len(own) < examples:
                raise ParticipationError(
                    f"{len(own)} ids were given for {examples} clipped gradients; give one for each, of every part of "
                    "the step"
                )
        except ParticipationError as error:
            own = error
        except Exception as error:  # of the caller's own: no process may wait for one that has left
            own = ParticipationError(f"the ids could not be read: {error!r:.200}")
        every = self._gathered(own) if self._processes > 1 else [own]
        for part in every:
            if isinstance(part, ParticipationError):
                raise part
        return None if None in every else [one for part in every for one in part]

    def _gathered(self, own: Any) -> list[Any]:
        """What every process gives, in the order of their ranks."""
        every: list[Any] = [None] * self._processes
        dist.all_gather_object(every, own, group=self._group)
        return every

    def _accumulate(self, add: Callable[[str, Tensor], object], examples: int | None) -> None:
        """add(name, sum) for every tensor. If that is interrupted, all sums of the step are thrown away: an example
        whose gradients are given again must not count twice."""
        sums, before = self._taken()
        for name, total in sums.items():
            add(name, total)
        self._examples = None if before is None or examples is None else before + examples
        self._sums = sums

    def _taken(self) -> tuple[dict[str, Tensor], int | None]:
        """The sums of the step under way, or new ones, and of how many examples; they are no longer kept here.

        No p.grad stays, since a backward pass may have left a sum without noise there.
        """
        for parameter in self._parameters.values():
            parameter.grad = None
        self._given.clear()
        sums, examples = self._sums, self._examples
        self._sums, self._examples = {}, 0
        if not sums:
            sums = {
                name: torch.zeros_like(
                    local(parameter.detach(), parameter),
                    dtype=getattr(torch, self._shards[name].dtype),
                    memory_format=torch.contiguous_format,
                )
                for name, parameter in self._parameters.items()
            }
        return sums, examples

    def _is_strange(self, name: str) -> bool:
        """Whether a gradient is there that no step made."""
        gradient = self._parameters[name].grad
        return gradient is not None and gradient is not self._given.get(name)

    def _before_optimizer(self) -> None:
        """Refuse an optimizer's step on gradients of a backward pass: `step` was forgotten. What was made of a noisy
        mean since is as good as the mean."""
        if not self._stepped and any(self._is_strange(name) for name in self._parameters):
            raise StateError(
                "the optimizer is about to use gradients that have no noise: they are not what step() made; call "
                "clip() and step() before the optimizer's step"
            )
        self._stepped = False

    def _shard(self, name: str, parameter: nn.Parameter) -> Shard:
        """The elements whose noise this process adds."""
        if not parameter.dtype.is_floating_point:
            raise AdapterError(f"parameter {name!r} is {parameter.dtype}; only real numbers can have Gaussian noise")
        dtype = "float64" if parameter.dtype == torch.float64 else "float32"
        if dtype == "float64" and name in self._devices:
            raise AdapterError(f"parameter {name!r} is float64 on {parameter.device}; there noise is float32 only")
        total = parameter.numel()
        if is_split(parameter):
            among = spread(parameter)
            if among != self._processes:
                raise AdapterError(
                    f"parameter {name!r} is split over {among} processes, but {self._processes} share this run: each "
                    "part of them would release the same row with sums of its own; use one mesh over all processes, or "
                    "give its group as group="
                )
            return Shard(*rows(name, parameter), total, dtype)
        # Nearly equal slices: the noise of a parameter is drawn once in all, a part of it by each process.
        first, last = (total * rank // self._processes for rank in (self._rank, self._rank + 1))
        return Shard(last - first, first, total, dtype)

    def _slice(self, name: str, total: Tensor) -> Any:
        """The elements of a sum that get this process's noise."""
        flat, shard = total.view(-1), self._shards[name]
        if not is_split(self._parameters[name]):
            flat = flat[shard.offset : shard.offset + shard.size]
        return flat if name in self._devices else flat.numpy()

    def _agreed_run(self, run: bytes | None) -> bytes | None:
        """The first process's run nonce."""
        if self._processes == 1:
            return run
        drawn = [secrets.token_bytes(NONCE_BYTES) if run is None else run]
        dist.broadcast_object_list(drawn, group=self._group, group_src=0)
        return drawn[0] if run is None else run

    def _agree(self, failure: StateError | None = None) -> None:
        """Every process must be about to add the same row of the same release; one that cannot tells the others."""
        if self._processes == 1:
            if failure is not None:
                raise failure
            return
        agreed = bytearray.fromhex(self._noise.fingerprint()) + struct.pack("<d?", self._batch_size, failure is None)
        own = torch.frombuffer(agreed, dtype=torch.uint8).to(self._device)
        every = [torch.empty_like(own) for _ in range(self._processes)]
        dist.all_gather(every, own, group=self._group)
        if failure is not None:
            raise failure
        differing = [rank for rank, other in enumerate(every) if not torch.equal(other, every[0])]
        if differing:
            raise StateError(
                f"processes {', '.join(map(str, differing))} do not agree with process 0 on artifact, key, run, noise "
                f"multiplier, clip norm, parameters, batch size or step (here: {self._noise!r}); their noise would not "
                "add up to one release: start all of them with the same, or restore all from one checkpoint"
            )

    def _changed(self) -> StateError | None:
        """Adding, removing, freezing or replacing parameters would change what is released."""
        now = trainable(self._model)
        changed = sorted(
            name
            for name in now.keys() | self._parameters.keys()
            if now.get(name) is not self._parameters.get(name) or kind(now[name]) != self._kinds[name]
        )
        if changed:
            return StateError(
                f"the model's parameters changed during the run: {changed[0]!r}"
                f"{f' and {len(changed) - 1} more' if len(changed) > 1 else ''} was added, removed, frozen, unfrozen, "
                "moved or replaced; the noise of a run belongs to the parameters it began with: restore them, or begin "
                "a new run on data that has not been used"
            )
        ours = {id(parameter) for parameter in self._parameters.values()}
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        others = [p for group in groups for p in group["params"] if id(p) not in ours]
        if any(p.requires_grad or p.grad is not None for p in others):
            return StateError(
                "the optimizer steps parameters that get no noise: give GradientNoise all of them, or give the "
                "optimizer only the model's; a frozen one must have p.grad = None"
            )
        return None

    def _check_names(self, given: Any) -> None:
        if not isinstance(given, Mapping):
            raise AdapterError(f"a mapping of parameter names to tensors is needed, not {type(given).__name__}")
        for name, tensor in given.items():
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                raise AdapterError(
                    f"{name!r} is no dense tensor but {getattr(tensor, 'layout', type(tensor).__name__)}"
                )
        missing = [name for name in self._parameters if name not in given]
        unknown = [name for name in given if name not in self._parameters]
        if missing or unknown:
            raise AdapterError(
                f"gradients are needed for exactly the parameters that require them: "
                f"{f'missing {missing[0]!r}' if missing else f'{unknown[0]!r} is none of them'}"
            )


_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, weakref.ref[GradientNoise]] = weakref.WeakKeyDictionary()


def _watch(optimizer: torch.optim.Optimizer, noise: GradientNoise) -> None:
    """Have the latest noise of an optimizer look at its gradients before every step."""
    if optimizer not in _watched:
        optimizer.register_step_pre_hook(_look)
    _watched[optimizer] = weakref.ref(noise)


def _look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    reference = _watched.get(optimizer)
    noise = None if reference is None else reference()
    if noise is not None and not noise._noise.closed:
        noise._before_optimizer()


def _on_cpu(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _pieces(gradients: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """(columns, the same columns in float64), few enough at a time for a cache.

    So norms are exact enough to clip by, and no setting of torch can have a product done in a shorter format.
    """
    examples, elements = gradients.shape
    width = max(_PIECE // max(examples, 1), 1)
    for first in range(0, max(elements, 1), width):
        columns = slice(first, first + width)
        yield columns, gradients[:, columns].double()


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1)
