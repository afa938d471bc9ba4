"""Correlated noise inside an Opacus optimizer: only its noise and its accounting are replaced.

    engine = PrivacyEngine(accountant="mmfact")            # registered by `import mmfact.noise.opacus`
    model, optimizer, loader = engine.make_private(..., noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False)
    noise = correlate(optimizer, model, artifact, data_loader=loader, key=key)
    ...                                                    # train as before, one pass; engine.get_epsilon(delta)

What stays Opacus': per-example gradients, ghost clipping, skipped steps (BatchMemoryManager), the wrapped optimizer,
and the divisor: expected_batch_size (times the processes) for loss_reduction "mean", 1 for "sum". It is one constant
here; Opacus divides by the number of backward passes of each step as well, so for more than one say so with
`accumulation`.

What changes: gradients are summed up, and noise is added, by `GradientNoise`, in float32 whatever the model's
precision; every process adds its own slice of the row before the sums are added up, where Opacus lets process 0 add
all of it.

Ghost clipping never holds a single example's gradient, so an example whose gradient is not finite could only be dropped
by the factor 0, and 0 * inf is not 0. Inputs of layers that are not finite are therefore replaced by zeros, as is what
comes back to them; such an example's factor is 0, and so is all that it sends back. A module of your own that is
clipped as a whole is cleaned at its edges only.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmfact.factorize.errors import (
    AdapterError,
    HorizonError,
    MmfactError,
    ParticipationError,
    PrivacyError,
    StateError,
)
from mmfact.factorize.privacy import gaussian_epsilon
from mmfact.noise import checks
from mmfact.noise.guard import WorkloadMismatch
from mmfact.noise.key import NoiseKey
from mmfact.store.artifact import Artifact

try:
    import torch
    from opacus import optimizers as opacus_optimizers
    from opacus.accountants import IAccountant, register_accountant
    from opacus.data_loader import DPDataLoader
    from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
    from opacus.grad_sample import GradSampleHooksFastGradientClipping
    from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
    from opacus.layers.dp_rnn import RNNLinear
    from opacus.utils.batch_memory_manager import BatchSplittingSampler
    from opacus.utils.uniform_sampler import DistributedUniformWithReplacementSampler, UniformWithReplacementSampler
    from torch import Tensor, nn
    from torch.utils.data import DataLoader, DistributedSampler, RandomSampler, WeightedRandomSampler
except ImportError as error:
    raise AdapterError('mmfact.noise.opacus needs opacus: pip install "mmfact[opacus]"') from error

from mmfact.noise.torch import GradientNoise
from mmfact.noise.torch_parameters import trainable

MECHANISM = "mmfact"  # the name that PrivacyEngine(accountant=...) knows ReleaseAccountant by

_FLAT = (opacus_optimizers.DPOptimizer, opacus_optimizers.DistributedDPOptimizer)
_GHOST = (
    opacus_optimizers.DPOptimizerFastGradientClipping,
    opacus_optimizers.DistributedDPOptimizerFastGradientClipping,
)
_LATCHED = ("noise_multiplier", "max_grad_norm", "expected_batch_size", "loss_reduction")
_GHOST_MARGIN = 1 - 1e-5  # of the clip norm: Opacus finds ghost norms in float32, from products of Gram matrices


def correlate(
    optimizer: opacus_optimizers.DPOptimizer,
    model: Any,
    artifact: Artifact,
    *,
    data_loader: DataLoader | None,
    key: NoiseKey | None = None,
    accumulation: int = 1,
    run: bytes | None = None,
    threads: int | None = None,
    journal: str | Path | None = None,
    check_participation: bool = False,
) -> CorrelatedNoise:
    """Let an Opacus optimizer add the artifact's noise instead of its own, one row for every step that it really takes.

    Parameters
    ----------
    optimizer : DPOptimizer
        From `PrivacyEngine.make_private`, or your own: with flat or ghost clipping, on one process or distributed,
        before its first step. Its noise_multiplier, max_grad_norm, expected_batch_size and loss_reduction are those of
        the run, and stay.
    model : GradSampleModule, GradSampleHooks or nn.Module
        What `make_private` returned first, or the module that it wraps.
    artifact : Artifact
        From `mmfact.load`.
    data_loader : DataLoader or None
        The loader of the one pass, as `make_private` returned it, so that neither Poisson sampling nor a second pass
        goes unnoticed. None: the data come otherwise, and you see to it that every example takes part once.
    key : NoiseKey, optional
        The same in every process. Default: a new one, with which the state cannot be saved (one process only).
    accumulation : int
        Backward passes in a step that you accumulate yourself. Leave it 1 with BatchMemoryManager.
    run, threads, journal, check_participation
        As for `NoiseStream`. With `check_participation`, name the examples of every batch by
        `CorrelatedNoise.took_part`.

    Raises
    ------
    AdapterError
        An optimizer that clips in another way, draws its own noise (secure_mode, generator) or has taken steps; an
        accountant that cannot account for this noise; parameters that are not the model's.
    ParticipationError
        A loader that samples at random, with repetitions, or whose processes share examples.
    HorizonError
        The loader has more steps than the artifact.
    MmfactError
        As for `GradientNoise`.
    """
    checks.check_artifact(artifact)
    trainer = _Trainer(optimizer, model, data_loader, accumulation)
    trainer.check_unused()
    if trainer.steps is not None and trainer.steps < artifact.n:
        warnings.warn(
            f"one pass of the loader has {trainer.steps} steps, and the noise was compiled for {artifact.n}. Privacy "
            f"is unaffected, but the noise is not optimal: compile with --n {trainer.steps}",
            WorkloadMismatch,
            stacklevel=2,
        )
    if trainer.steps is not None and trainer.steps > artifact.n:
        raise HorizonError(
            f"one pass of the loader has {trainer.steps} steps, but this artifact has noise for {artifact.n}: compile "
            f"with --n {trainer.steps}, or give a loader with larger batches or fewer examples"
        )
    gradients = GradientNoise(
        trainer.parameters,
        artifact,
        noise_multiplier=optimizer.noise_multiplier,
        clip_norm=optimizer.max_grad_norm,
        batch_size=trainer.divisor,
        key=key,
        optimizer=optimizer.original_optimizer,
        group=trainer.group,
        run=run,
        threads=threads,
        journal=journal,
        check_participation=check_participation,
    )
    return CorrelatedNoise(trainer, gradients)


def restore(
    optimizer: opacus_optimizers.DPOptimizer,
    model: Any,
    artifact: Artifact,
    state: dict[str, Any],
    *,
    data_loader: DataLoader | None,
    key: NoiseKey,
    accumulation: int = 1,
    resume: str | None = None,
    threads: int | None = None,
    journal: str | Path | None = None,
) -> CorrelatedNoise:
    """Continue a saved run in a new optimizer, before or after that has loaded its own state.

    Parameters
    ----------
    state : dict
        From `CorrelatedNoise.state_dict`.
    data_loader : DataLoader or None
        Of the whole pass, as at the start; going past the batches that were used is up to you.
    resume, threads, journal
        As for `NoiseStream.restore`.

    Raises
    ------
    StateError
        As for `NoiseStream.restore`; the optimizer's noise multiplier or clip norm is not the run's.
    MmfactError
        As for `correlate`.
    """
    trainer = _Trainer(optimizer, model, data_loader, accumulation)
    gradients = GradientNoise.restore(
        trainer.parameters,
        artifact,
        state,
        batch_size=trainer.divisor,
        key=key,
        optimizer=optimizer.original_optimizer,
        group=trainer.group,
        resume=resume,
        threads=threads,
        journal=journal,
    )
    return CorrelatedNoise(trainer, gradients)


class CorrelatedNoise:
    """The noise of an Opacus optimizer: made by `correlate` or `restore`, at work in every `optimizer.step()`."""

    def __init__(self, trainer: _Trainer, gradients: GradientNoise) -> None:
        self._trainer, self._gradients, self._optimizer = trainer, gradients, trainer.optimizer
        recorded = gradients.ledger()
        try:
            trainer.check_run(recorded)
            if trainer.hook is not None:
                trainer.hook.accountant.adopt(recorded, gradients.step_number, trainer.hook.sample_rate)
        except MmfactError:
            gradients.close()
            raise
        self._latched = {name: getattr(self._optimizer, name) for name in _LATCHED}
        self._ids: list[Any] | None = None
        self._ghost = None if trainer.ghost is None else _Ghost(trainer.ghost, recorded["clip_norm"])
        self._optimizer.pre_step = self._pre_step
        if trainer.group is not None:
            self._optimizer.reduce_gradients = _reduced_already

    @property
    def step_number(self) -> int:
        """The step that the optimizer really takes next, counted from 0."""
        return self._gradients.step_number

    @property
    def horizon(self) -> int:
        """Steps that there is noise for."""
        return self._gradients.horizon

    @property
    def run(self) -> bytes:
        """The run nonce, 16 bytes."""
        return self._gradients.run

    def took_part(self, ids: Sequence[Any]) -> None:
        """Name the examples (or users) of a batch, before the optimizer.step() that follows it, skipped or not."""
        self._ids = [*(self._ids or []), *(ids.tolist() if hasattr(ids, "tolist") else ids)]

    def state_dict(self, *, buffers: bool = True) -> dict[str, Any]:
        """What `restore` needs besides the artifact and the key: see `GradientNoise.state_dict`."""
        return self._gradients.state_dict(buffers=buffers)

    def commit(self, step: int | None = None) -> None:
        """Say that a checkpoint with the state is durable: see `NoiseStream.commit`."""
        self._gradients.commit(step)

    def ledger(self) -> dict[str, Any]:
        """The record of the run so far, for whoever signs the privacy statement."""
        return self._gradients.ledger()

    def close(self) -> None:
        """End the run here and let go of its journal; the optimizer takes no further step."""
        self._gradients.close()

    def __repr__(self) -> str:
        return f"CorrelatedNoise({type(self._optimizer).__name__}, {self._gradients!r})"

    def _pre_step(self, closure: Any = None) -> bool:
        """In place of Opacus' clipping, noise and division; False if this call of step() is one to skip."""
        self._check_latched()
        if self._ghost is None:
            self._clip()
        else:
            self._ghost.check_clipped()
            self._gradients.add({name: _gradient(p) for name, p in self._trainer.parameters})
        if self._optimizer._check_skip_next_step():
            self._optimizer._is_last_step_skipped = True
            return False
        self._check_pass()
        ids, self._ids = self._ids, None  # a step that is refused is thrown away as a whole
        self._gradients.step(ids=ids)
        self._optimizer._is_last_step_skipped = False
        if self._optimizer.step_hook:
            self._optimizer.step_hook(self._optimizer)
        return True

    def _clip(self) -> None:
        """Clip and sum up what the backward passes since the last call left, each once."""
        batches = {}
        for name, parameter in self._trainer.parameters:
            found = getattr(parameter, "grad_sample", None)
            batches[name] = found if isinstance(found, list) else [] if found is None else [found]
        count = {len(found) for found in batches.values()}
        if count == {0} or len(count) > 1:
            lacking = min(batches, key=lambda name: len(batches[name]))
            raise AdapterError(
                f"parameter {lacking!r} lacks per-example gradients in this step: call loss.backward() on the output "
                "of the model that make_private() returned, once before every optimizer.step(), with all of its "
                "parameters in use (set requires_grad=False for the others before make_private())"
            )
        if max(count) > self._trainer.accumulation:
            raise AdapterError(
                f"{max(count)} backward passes came before this optimizer.step(), but the gradients are divided as for "
                f"{self._trainer.accumulation}: call optimizer.zero_grad() after every step, use BatchMemoryManager, "
                f"or give accumulation={max(count)}"
            )
        rows, most = sum(map(len, next(iter(batches.values())))), self._trainer.most
        if most is not None and rows > most:
            raise AdapterError(
                f"{rows} per-example gradients came from batches of at most {most} examples: the model folds another "
                "dimension into the batch (or batch_first is wrong), and an example would be clipped in parts"
            )
        for gradients in zip(*batches.values(), strict=True):
            self._gradients.clip(dict(zip(batches, gradients, strict=True)))
        for _, parameter in self._trainer.parameters:
            parameter.grad_sample = None  # used up: no second step can count it again

    def _check_latched(self) -> None:
        for name, value in self._latched.items():
            now = getattr(self._optimizer, name)
            if now != value:
                raise StateError(
                    f"the optimizer's {name} was changed from {value!r} to {now!r}: the noise of a run is one release "
                    "with one noise multiplier and clip norm, and its divisor is a constant; set it back, and use no "
                    "noise or clipping scheduler"
                )
        self._trainer.check_parameters()

    def _check_pass(self) -> None:
        steps = self._trainer.steps
        if steps is not None and self.step_number >= steps:
            raise ParticipationError(
                f"step {self.step_number} would begin a second pass: the loader has {steps} steps, and this artifact's "
                "noise is for every example in at most one step; stop here, or start a new run on data that has not "
                "been used"
            )


class ReleaseAccountant(IAccountant):
    """Opacus' accountant for correlated noise: the run is ONE Gaussian release, whatever the number of its steps.

    Made by ``PrivacyEngine(accountant="mmfact")``. There is no amplification by sampling in it: the sample rate only
    tells how many steps a pass has, and more than one pass is refused. Its epsilon is that of the whole release from
    the start, also before the last step. `make_private_with_epsilon` finds the noise multiplier with it (epochs=1,
    poisson_sampling=False).

    References
    ----------
    Denisov et al. 2022, Theorem 2.1; Balle and Wang 2018, Theorem 8 (the exact epsilon of a Gaussian).
    """

    history: list[tuple[float, float, int]]

    def __init__(self) -> None:
        super().__init__()
        self._release: dict[str, Any] = {}  # run, artifact, noise multiplier and horizon, once they are known

    @classmethod
    def mechanism(cls) -> str:
        return MECHANISM

    def __len__(self) -> int:
        return sum(steps for _, _, steps in self.history)

    def adopt(self, recorded: dict[str, Any], step: int, sample_rate: float) -> None:
        """Account for the run of which `recorded` is the ledger, from `step` on.

        Raises
        ------
        PrivacyError
            Steps of another run, or another number of steps, were counted already.
        """
        release = {name: recorded[name] for name in ("run", "artifact", "noise_multiplier", "horizon")}
        if self._release not in ({}, release) or (self.history and len(self) != step):
            raise PrivacyError(
                f"this accountant has counted {len(self)} steps of run {self._release.get('run', 'unknown')}, not "
                f"{step} of run {release['run']}; one PrivacyEngine accounts for one run: load its checkpoint of that "
                "step, or make a new engine"
            )
        self._release = release
        if step:
            self.history = [(release["noise_multiplier"], sample_rate, step)]

    def step(self, *, noise_multiplier: float, sample_rate: float) -> None:
        """Count a step of the release.

        Raises
        ------
        PrivacyError
            The noise multiplier is not the release's, or no correlated noise was attached.
        ParticipationError
            So many steps are more than one pass at this sample rate.
        """
        known = self._release.get("noise_multiplier")
        if noise_multiplier != known:
            raise PrivacyError(
                f"a step with noise multiplier {noise_multiplier!r} is none of the release that is accounted for: its "
                f"noise multiplier is {'not known before correlate()' if known is None else known}"
            )
        _check_one_pass(len(self) + 1, sample_rate)
        self.history = [(noise_multiplier, sample_rate, len(self) + 1)]

    def get_epsilon(self, delta: float, **kwargs: Any) -> float:
        """The exact epsilon of the whole release at `delta`.

        Raises
        ------
        PrivacyError
            No correlated noise was attached yet; delta is out of range.
        ParticipationError
            More than one pass was counted, or asked about.
        """
        for _, sample_rate, steps in self.history:
            _check_one_pass(steps, sample_rate)
        found = {noise_multiplier for noise_multiplier, _, _ in self.history}
        if self._release:
            found.add(self._release["noise_multiplier"])
        if len(found) != 1:
            raise PrivacyError(
                f"the noise multiplier is not known, or not one: {sorted(found)}; call "
                "mmfact.noise.opacus.correlate(optimizer, ...) first"
            )
        return gaussian_epsilon(found.pop(), delta)

    def get_optimizer_hook_fn(self, sample_rate: float) -> _Hook:
        return _Hook(self, sample_rate)

    def state_dict(self, destination: Any = None) -> Any:
        state = super().state_dict(destination)
        state["release"] = dict(self._release)
        return state

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over a saved count: before `restore`, or after it for the same run and step.

        Raises
        ------
        StateError
            It is none, of another accountant, or does not fit the noise that is attached.
        """
        try:
            mechanism, release = state_dict["mechanism"], dict(state_dict["release"])
            history = [(float(sigma), float(rate), int(steps)) for sigma, rate, steps in state_dict["history"]]
        except (KeyError, TypeError, ValueError) as error:
            mechanism = state_dict.get("mechanism") if isinstance(state_dict, dict) else None
            raise StateError(
                f"the accountant's state is not one that 'mmfact' saved (found {mechanism!r}); use the checkpoint of "
                "this run"
            ) from error
        counted = sum(steps for _, _, steps in history)
        if self._release and (release != self._release or counted != len(self)):
            raise StateError(
                f"the accountant's state is of {counted} steps of run {release.get('run')}, but the noise is at step "
                f"{len(self)} of run {self._release['run']}; load both from one checkpoint"
            )
        self.history, self._release = history, release


register_accountant(MECHANISM, ReleaseAccountant, force=True)


@dataclass(frozen=True)
class _Hook:
    """What `make_private` attaches to the optimizer; by it `correlate` finds the accountant."""

    accountant: ReleaseAccountant
    sample_rate: float

    def __call__(self, optimizer: opacus_optimizers.DPOptimizer) -> None:
        if not _is_correlated(optimizer):
            raise PrivacyError(
                "this optimizer still adds Opacus' independent noise, which the accountant 'mmfact' does not account "
                "for: call correlate(optimizer, ...) of mmfact.noise.opacus before its first step"
            )
        self.accountant.step(noise_multiplier=optimizer.noise_multiplier, sample_rate=self.sample_rate)


class _Trainer:
    """What is known of an optimizer, its model and its loader before any noise: all of it checked."""

    def __init__(self, optimizer: Any, model: Any, data_loader: Any, accumulation: int) -> None:
        if not isinstance(optimizer, opacus_optimizers.DPOptimizer):
            raise AdapterError(
                f"the optimizer is a {type(optimizer).__name__}, not one that PrivacyEngine.make_private() returned; "
                "call correlate(optimizer, model, artifact, ...) with what make_private() returned, in this order"
            )
        if type(optimizer) not in (*_FLAT, *_GHOST):
            raise AdapterError(
                f"the optimizer is a {type(optimizer).__name__}; correlated noise needs one clip norm over all "
                "parameters that stays the same: a DPOptimizer with flat clipping, or ghost clipping, also the "
                "Distributed ones (for fully_shard: mmfact.noise.torch.GradientNoise)"
            )
        if optimizer.secure_mode or optimizer.generator is not None:
            raise AdapterError(
                "secure_mode and noise_generator say how Opacus draws its noise, which is not used here (mmfact draws "
                "from ChaCha20 under `key`): make the PrivacyEngine and the optimizer without them"
            )
        if _is_correlated(optimizer):
            raise AdapterError("this optimizer has correlated noise already, for one run; make a new optimizer")
        self.optimizer, self.accumulation = optimizer, checks.whole("accumulation", accumulation, 1)
        distributed = hasattr(optimizer, "world_size")
        self.group = torch.distributed.group.WORLD if distributed else None
        processes = optimizer.world_size if distributed else 1
        self.ghost = self._ghost_of(model, type(optimizer) in _GHOST)
        self.parameters: list[tuple[str, Any]] = list(trainable(_inside(model, ghost=self.ghost is not None)).items())
        self.check_parameters()
        self.hook = self._hook()
        self.steps = _steps_of_a_pass(data_loader, model, processes, self.accumulation)
        size = getattr(data_loader, "batch_size", None)
        self.most = None if size is None else size * self.accumulation
        mean = optimizer.loss_reduction == "mean"
        self.divisor = optimizer.expected_batch_size * processes * self.accumulation if mean else 1.0

    def check_parameters(self) -> None:
        """What the optimizer trains must be what has noise, and what was clipped."""
        if {id(p) for p in self.optimizer.params} != {id(p) for _, p in self.parameters}:
            raise AdapterError(
                "the optimizer's parameters are not those of the model that require gradients, all of which have noise "
                "and count in an example's norm: give the optimizer all of them, freeze the others with "
                "requires_grad=False before make_private(), and add none during the run"
            )

    def check_unused(self) -> None:
        """A release begins before anything was released."""
        optimizer = self.optimizer
        if optimizer.state or any(p.summed_grad is not None for p in optimizer.params) or optimizer._step_skip_queue:
            raise AdapterError(
                "the optimizer has taken steps with other noise, or is in the middle of one; attach correlated noise "
                "before the first step, or restore() a run that was saved"
            )
        if self.hook is not None and len(self.hook.accountant):
            raise AdapterError(
                f"the engine's accountant has counted {len(self.hook.accountant)} steps already: restore() that run, "
                "or make a new PrivacyEngine for a new one, on data that has not been used"
            )

    def check_run(self, recorded: dict[str, Any]) -> None:
        """The run's scales are the optimizer's, which a restored one was given anew."""
        for name, ours in (("noise_multiplier", "noise_multiplier"), ("max_grad_norm", "clip_norm")):
            if getattr(self.optimizer, name) != recorded[ours]:
                raise StateError(
                    f"the optimizer's {name} is {getattr(self.optimizer, name)!r}, but the run was started with "
                    f"{recorded[ours]!r}, which its noise keeps; make the optimizer with that"
                )

    def _ghost_of(self, model: Any, ghost: bool) -> Any:
        if not ghost:
            return None
        if not isinstance(model, GradSampleHooksFastGradientClipping):
            raise AdapterError(
                "for ghost clipping the model must be what make_private() returned first, which knows the examples' "
                f"norms, not a {type(model).__name__}"
            )
        if self.accumulation != 1:
            raise AdapterError(
                f"accumulation = {self.accumulation}: under ghost clipping every backward pass throws away the one "
                "before; use BatchMemoryManager, with accumulation=1"
            )
        for p in self.optimizer.params:
            if p.dtype not in (torch.float32, torch.float64):
                raise AdapterError(
                    f"under ghost clipping gradients are summed in the precision of the parameters, and {p.dtype} is "
                    'too low to add noise to: use grad_sample_mode="hooks", or float32 parameters'
                )
        return model

    def _hook(self) -> _Hook | None:
        """How the optimizer reports its steps."""
        hook = self.optimizer.step_hook
        if hook is not None and not isinstance(hook, _Hook):
            raise AdapterError(
                "the optimizer reports to an accountant for independent noise under Poisson sampling, whose epsilon "
                'would be wrong: use PrivacyEngine(accountant="mmfact"), and attach other step hooks after correlate()'
            )
        return hook


class _Ghost:
    """The clipping factors of ghost clipping, 0 for an example whose gradient is not finite."""

    def __init__(self, hooks: Any, clip_norm: float) -> None:
        self._hooks, self._clip_norm = hooks, clip_norm
        self._bad: list[Tensor] = []  # by example: whether a layer's input was not finite
        self._clipped = False
        hooks.get_clipping_coef = self._factors
        hooks._module.register_forward_pre_hook(self._begin)
        for module in hooks.iterate_submodules(hooks._module):
            module.register_forward_pre_hook(self._clean_inputs)
            module.register_full_backward_pre_hook(self._clean_returns)

    def check_clipped(self) -> None:
        """Sums that are there were clipped, and are used once."""
        if not self._clipped:
            raise AdapterError(
                "no gradients were clipped since the last optimizer.step(): call backward() on the loss of the "
                "criterion that make_private() returned, once before every step"
            )
        self._clipped = False

    def _factors(self) -> Tensor:
        """In place of Opacus' factors: the clip norm is the latched one, and no factor depends on another example."""
        if self._clipped:
            raise AdapterError(
                "a second backward pass before optimizer.step() throws away the gradients of the first; use "
                "BatchMemoryManager to accumulate under ghost clipping"
            )
        norms = self._hooks.get_norm_sample()
        if self._count is not None and len(norms) != self._count:
            raise AdapterError(
                f"{len(norms)} norms were found for {self._count} examples: the model folds another dimension into the "
                "batch, and an example would be clipped in parts; keep the batch as the first dimension of every layer"
            )
        usable = torch.isfinite(norms)
        for bad in self._bad:
            usable[: len(bad)] &= ~bad[: len(norms)]
        self._clipped = True
        return torch.where(usable, (self._clip_norm * _GHOST_MARGIN / norms).clamp(max=1.0), 0.0)

    def _begin(self, module: nn.Module, inputs: Any) -> None:
        self._bad = []
        first = next((value for value in inputs if torch.is_tensor(value)), None)
        self._count = None if first is None else first.shape[0 if self._hooks.batch_first else 1]

    def _clean_inputs(self, module: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not (module.training and torch.is_grad_enabled() and self._hooks.hooks_enabled):
            return None
        batch = 0 if self._hooks.batch_first or type(module) is RNNLinear else 1
        cleaned = list(inputs)
        for place, value in enumerate(inputs):
            if torch.is_tensor(value) and value.is_floating_point():
                finite = torch.isfinite(value)
                self._bad.append(~finite.movedim(batch, 0).flatten(1).all(dim=1))
                cleaned[place] = torch.where(finite, value, 0.0)
        return tuple(cleaned)

    def _clean_returns(self, module: nn.Module, returned: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if self._hooks.hooks_enabled and self._clipped:
            raise AdapterError(
                "a second backward pass before optimizer.step() is not clipped: put the whole loss into the criterion "
                "that make_private() returned, and call backward() once"
            )
        if self._hooks.hooks_enabled:
            return None  # the first pass, which finds the norms: what is not finite must show there
        return tuple(None if g is None else torch.where(torch.isfinite(g), g, 0.0) for g in returned)


def _inside(model: Any, *, ghost: bool) -> nn.Module:
    """The module that Opacus and data parallelism wrap."""
    while True:
        if isinstance(model, AbstractGradSampleHooks):
            model = model._module
        elif isinstance(model, DifferentiallyPrivateDistributedDataParallel):
            model = model.module
        elif isinstance(model, nn.parallel.DistributedDataParallel):
            if ghost:
                raise AdapterError(
                    "torch's DistributedDataParallel averages gradients during backward, so under ghost clipping they "
                    "come averaged twice; wrap the model in "
                    "opacus.distributed.DifferentiallyPrivateDistributedDataParallel"
                )
            model = model.module
        elif isinstance(model, nn.Module):
            return model
        else:
            raise AdapterError(
                f"the model must be an nn.Module or what make_private() returned first, not {model!r:.60}"
            )


def _steps_of_a_pass(loader: Any, model: Any, processes: int, accumulation: int) -> int | None:
    """How many steps the loader's examples last, each in one of them; None if nobody can know."""
    if not getattr(model, "grad_accumulation_allowed", True):
        raise ParticipationError(
            "make_private() has set the model up for Poisson sampling, where an example takes part a random number of "
            "times: call it with poisson_sampling=False"
        )
    if loader is None:
        return None
    if not isinstance(loader, DataLoader):
        raise AdapterError(
            f"data_loader must be a torch DataLoader, or None for other sources of data, not {loader!r:.60}"
        )
    batches: Any = loader.batch_sampler
    sampler: Any = getattr(batches, "sampler", loader.sampler)
    if isinstance(batches, BatchSplittingSampler):
        raise AdapterError("data_loader must be the loader that BatchMemoryManager was given, not the one that it made")
    poisson = (UniformWithReplacementSampler, DistributedUniformWithReplacementSampler)
    if isinstance(loader, DPDataLoader) or isinstance(batches, poisson) or isinstance(sampler, poisson):
        raise ParticipationError(
            "the loader samples by Poisson, so an example takes part a random number of times: call make_private() "
            "with poisson_sampling=False"
        )
    if getattr(sampler, "replacement", False) and isinstance(sampler, RandomSampler | WeightedRandomSampler):
        raise ParticipationError(
            f"the loader's {type(sampler).__name__} draws with replacement, so an example may take part again; use "
            "shuffle=True"
        )
    drawn_from: Any = getattr(sampler, "data_source", None)
    if isinstance(sampler, RandomSampler) and sampler.num_samples > len(drawn_from):
        raise ParticipationError(
            f"the loader's sampler draws {sampler.num_samples} times from {len(drawn_from)} examples, so some "
            "take part again; use shuffle=True"
        )
    if isinstance(sampler, DistributedSampler):
        count = len(sampler.dataset)  # type: ignore[arg-type, unused-ignore]
        if not sampler.drop_last and count % sampler.num_replicas:
            raise ParticipationError(
                f"DistributedSampler repeats examples where {sampler.num_replicas} processes do not divide "
                f"{count}: make it with drop_last=True"
            )
    elif processes > 1:
        raise ParticipationError(
            f"{processes} processes would each go through all of the loader's examples: use "
            "DistributedSampler(dataset, drop_last=True), or data_loader=None if each process has data of its own"
        )
    try:
        return math.ceil(len(loader) / accumulation)
    except TypeError:
        return None  # an iterable dataset of unknown length


def _check_one_pass(steps: int, sample_rate: float) -> None:
    if not 0 < sample_rate <= 1:
        raise PrivacyError(f"sample rate {sample_rate!r} must be in (0, 1]: the share of the examples in a step")
    most = math.ceil(1 / sample_rate - 1e-6)
    if steps > most:
        raise ParticipationError(
            f"{steps} steps at sample rate {sample_rate:g} are more than one pass of {most} steps, but correlated "
            "noise of one release is for every example in at most one step (epochs=1)"
        )


def _gradient(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach()


def _is_correlated(optimizer: Any) -> bool:
    return "pre_step" in vars(optimizer)


def _reduced_already() -> None:
    """In place of the optimizer's sum over processes: `GradientNoise.step` has made it."""
