"""Projected DP-SGD in torch: noisy gradients on the top eigenspace of public gradients (Zhou, Wu, Banerjee 2020).

    noise = GradientNoise(model, artifact, noise_multiplier=10.0, clip_norm=1.0, batch_size=250, key=key)
    projected = ProjectedNoise(noise, per_example, (features, targets), k=50, refresh=20)
    for batch in loader:
        projected.clip(per_example(*batch))     # private gradients: clipped and added up
        projected.step()                        # noise, division, and then projection: p.grad
        optimizer.step()

`per_example(*examples)` gives the gradients of examples at the model's current parameters, {name: (examples, *shape)}.
The projection comes after the noise, so it is post-processing: privacy is that of `noise`, whatever the public data.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from mmfact.factorize.errors import ArtifactError, PrivacyError, ProjectorError, StateError
from mmfact.factorize.privacy import gaussian_epsilon
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.factorize.strategy.protocol import Strategy
from mmfact.noise import checks
from mmfact.noise.projector import STORAGES, Array, Projector, explained_energy, random_projector, top_eigenspace
from mmfact.noise.public_examples import check_disjoint, digest, examples
from mmfact.noise.refresh import Refresh, noisy_explained, observe
from mmfact.noise.torch import GradientNoise
from mmfact.noise.torch_share import Share

if TYPE_CHECKING:
    from mmfact.store.projectors import ProjectorCache, ProjectorKey, StoredProjector

KINDS = ("eigen", "random", "random-plain")

_VALUES = ("eigenvalues", "spectrum", "energy", "scale")  # what a stored projector has besides its vectors


@dataclass(frozen=True, eq=False)
class _Held:
    """The projector in use."""

    projector: Projector
    step: int  # of its refresh
    parameters: str  # their digest at that step; "" where none is needed
    stored: bool  # whether the cache has it


class ProjectedNoise:
    """A `GradientNoise` whose noisy means are then projected.

    Parameters
    ----------
    gradients : GradientNoise
        Clips, adds the noise, divides. With correlated noise it must check participation: the artifact's privacy is
        for one pass. Independent noise (`mmfact.factorize.compiler.independent`) may be sampled by Poisson instead.
    per_example : callable
        ``per_example(*public)``: for every parameter the public examples' gradients, shape (m, *shape), at the current
        parameters; for a parameter that is split over processes those of this process's elements.
    public : Tensor, or tuple of Tensor
        m public examples, as (features, targets). Needed by a random projection as little as `per_example`: None.
    k : int
        Vectors, from 1 to the rank of the public gradients.
    kind : {"eigen", "random", "random-plain"}
        See `mmfact.noise.projector`.
    refresh : int or None
        Steps that a projector is used for; None: one for the whole run.
    start_step : int
        Steps before are not projected.
    storage : {"float32", "float16"}
        Of the vectors: k numbers for each parameter.
    held_out : Tensor, or tuple of Tensor, optional
        Other public examples, to see how well the projector fits gradients that did not make it. Costs their gradients
        and another eigenspace at every refresh.
    private : Tensor or sequence of Tensor, optional
        The features of all private examples, in the form of the public ones: looked through once, so that no public
        example is a private one. Nothing of them is kept.
    cache : ProjectorCache, optional
        Keeps projectors over restarts.
    tag : str, optional
        Under this name entries serve all runs that have the very same parameters, public examples and settings, and
        not the run that made them only.

    Attributes
    ----------
    refreshes : list of Refresh
        One for each refresh so far.

    Raises
    ------
    ProjectorError
        Public examples that do not fit, or are private as well; an unknown kind.
    PrivacyError
        Correlated noise without participation check.
    StateError
        Processes with other settings or public examples than the rest; a setting out of range.
    """

    def __init__(
        self,
        gradients: GradientNoise,
        per_example: Callable[..., Mapping[str, Tensor]] | None,
        public: Any,
        k: int,
        *,
        kind: str = "eigen",
        refresh: int | None = 1,
        start_step: int = 0,
        storage: str = "float32",
        held_out: Any = None,
        private: Any = None,
        cache: ProjectorCache | None = None,
        tag: str | None = None,
    ) -> None:
        if not isinstance(gradients, GradientNoise):
            raise ProjectorError(
                f"gradients must be a GradientNoise, which has its noise before it is projected, not "
                f"{type(gradients).__name__}"
            )
        noise = gradients._noise
        self._gradients, self._per_example = gradients, per_example
        self._kind, self._storage = kind, storage
        self._independent = _is_independent(noise.artifact.strategy)
        self._public: tuple[Tensor, ...] = ()
        self._held_out: tuple[Tensor, ...] | None = None
        self._share = Share(gradients)
        # A process that holds no element has nothing to keep there: a few numbers, which its state has.
        self._cache = cache if self._share.size else None
        with self._share.together("begin"):
            if kind not in KINDS or storage not in STORAGES:
                raise ProjectorError(f"kind {kind!r} must be one of {KINDS}, storage {storage!r} one of {STORAGES}")
            if not self._independent and not noise.checks_participation:
                raise PrivacyError(
                    "this artifact's noise is correlated, and its privacy is for a single pass: make the GradientNoise "
                    "with check_participation=True and give ids to step(), or use independent noise "
                    "(mmfact.factorize.compiler.independent)"
                )
            self._k = checks.whole("k", k, 1)
            self._every = None if refresh is None else checks.whole("refresh", refresh, 1)
            self._start = checks.whole("start_step", start_step, 0)
            if self._start >= gradients.horizon:
                raise ProjectorError(
                    f"start_step = {start_step} is past the last of the {gradients.horizon} steps, so nothing would "
                    "ever be projected"
                )
            self._tag = None if tag is None else checks.text("tag", tag)
            if kind == "eigen":
                if per_example is None or public is None:
                    raise ProjectorError("per_example and public examples are needed for kind 'eigen'")
                self._public = examples("public examples", public)
                if self._k > len(self._public[0]):
                    raise ProjectorError(
                        f"k = {k} is above the number of public examples, {len(self._public[0])}: give a smaller k or "
                        "more examples"
                    )
            if held_out is not None:
                if per_example is None:
                    raise ProjectorError("held-out examples need per_example, which gives their gradients")
                self._held_out = examples("held-out examples", held_out)
            self._check_examples(private)
            self._public_digest = digest(self._public)
        settings = {**self._settings(), "part": "", "held_out": self._held_out and digest(self._held_out)}
        differing = self._share.differing(settings)
        if differing:
            raise StateError(
                f"the processes do not agree on {' and '.join(differing)}, and each would project on another subspace: "
                "give all of them the same settings and the same public examples, in the same order"
            )
        self._deviations = noise.artifact.strategy.row_deviations()
        self._held: _Held | None = None
        self._lacks_state = gradients.step_number > self._start  # it may have had a projector before
        self._warned: set[str] = set()
        self.refreshes: list[Refresh] = []

    @property
    def projector(self) -> Projector | None:
        """The one in use; None before start_step."""
        return None if self._held is None else self._held.projector

    @property
    def step_number(self) -> int:
        """The step that `step` takes next, counted from 0."""
        return self._gradients.step_number

    @property
    def horizon(self) -> int:
        """Steps that there is noise for."""
        return self._gradients.horizon

    def clip(self, per_example: Mapping[str, Tensor]) -> None:
        """Private gradients, as for `GradientNoise.clip`."""
        self._gradients.clip(per_example)

    def add(self, sums: Mapping[str, Tensor]) -> None:
        """Sums of clipped private gradients, as for `GradientNoise.add`."""
        self._gradients.add(sums)

    def step(self, *, ids: Sequence[Any] | None = None) -> None:
        """End a step: p.grad = V V'(sum of clipped gradients + noise) / batch_size.

        A projector that is due is made first: if that fails, no noise is used up, and the step's contributions are
        thrown away, as by any step that is refused.

        Raises
        ------
        ProjectorError
            k is above the rank of the public gradients; they are not finite, or all zero.
        MmfactError
            As for `GradientNoise.step`.
        """
        number = self.step_number
        try:
            made = self._refresh(number) if self._is_due(number) else None
        except BaseException:
            self._gradients._taken()  # whoever gives them again must not count twice
            raise
        self._gradients.step(ids=ids)
        if made is not None:
            self._held = made[0]
        if self._held is None:
            return
        projector, explained = self._held.projector, None
        with self._share.exactly():
            mean = self._share.gradient()
            coefficients = projector.coefficients(mean, self._share)
            if made is not None and self._kind != "random-plain":
                explained = self._noisy_explained(number, mean, coefficients)
            self._share.replace_gradient(projector.combine(coefficients, mean))
        if made is not None:
            self._keep(replace(made[1], noisy_explained=explained))

    def epsilon(
        self, delta: float, *, sampling_probability: float | None = None, accountant: str | None = None
    ) -> float:
        """Epsilon of the steps so far; projection costs nothing.

        Parameters
        ----------
        sampling_probability : float, optional
            Of the Poisson sampling that made the batches, for independent noise only. Default: every example took part
            in one step at most, which must have been checked.
        accountant : str, optional
            For Poisson sampling: see `mmfact.factorize.accounting.poisson_dpsgd_epsilon`.

        Raises
        ------
        PrivacyError
            Sampling with correlated noise, which nothing amplifies; no sampling, and nobody checked that there was a
            single pass; parameters out of range.
        """
        sigma = self._gradients._noise.noise_multiplier
        if sampling_probability is None:
            if not self._gradients._noise.checks_participation:
                raise PrivacyError(
                    "nobody checked that each example took part in one step at most, and several passes would cost "
                    "more: give sampling_probability= if batches were sampled by Poisson, or make the GradientNoise "
                    "with check_participation=True"
                )
            return gaussian_epsilon(sigma, delta)
        if not self._independent:
            raise PrivacyError(
                "amplification by Poisson sampling holds for independent noise only; this artifact's is correlated: "
                "leave sampling_probability out, which is the statement for a single pass"
            )
        from mmfact.factorize.accounting import PLD, poisson_dpsgd_epsilon

        steps = max(self.step_number, 1)
        return poisson_dpsgd_epsilon(sigma, sampling_probability, steps, delta, accountant=accountant or PLD)

    def unsafe_private_explained_energy(self, per_example: Mapping[str, Tensor]) -> float:
        """The part of PRIVATE gradients' energy that lies in the subspace. NOT PRIVATE: never publish or act on it.

        For research on data that is not secret. Kept nowhere.
        """
        if self.projector is None:
            raise ProjectorError("there is no projector yet: the first one is made at start_step")
        return explained_energy(self.projector, self._share.slices(per_example), self._share)

    def state_dict(self) -> dict[str, Any]:
        """What `load_state_dict` needs, beside the state of the `GradientNoise`.

        With a cache the projector itself stays there; without one it is in the state, k numbers for each parameter.
        With several processes each has its own.
        """
        held, inside = self._held, None
        if held is not None and self._kind == "eigen" and not self._is_kept(held):
            values = {name: torch.from_numpy(array) for name, array in _values(held.projector).items()}
            inside = {"basis": dict(held.projector.basis), "values": values, "rank": held.projector.rank}
        return {
            "settings": self._settings(),
            "step": self.step_number,
            "refreshed": None if held is None else held.step,
            "parameters": "" if held is None else held.parameters,
            "projector": inside,
            "refreshes": [one.record() for one in self.refreshes],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, recompute: bool = False) -> None:
        """Go on as the saved run would, bit for bit. The `GradientNoise` has been restored from the same checkpoint.

        Parameters
        ----------
        recompute : bool
            If the cache no longer has the projector, or has it no longer whole, or there is another number of
            processes now, make a new one at the next step.

        Raises
        ------
        StateError
            Another run, step, public data or setting; or the cache lacks the projector.
        ProjectorStale, ArtifactCorrupt
            What the cache has is another one, or damaged.
        """
        held = None
        with self._share.together("restore its state"):
            try:
                saved, ours = dict(state["settings"]), self._settings()
                step, refreshed, parameters = state["step"], state["refreshed"], state["parameters"]
                inside, records = state["projector"], [Refresh(**one) for one in state["refreshes"]]
            except (KeyError, TypeError, ValueError) as error:
                raise StateError(
                    f"this is no state of a ProjectedNoise ({error!r}); give what state_dict() made"
                ) from error
            # Projectors fit the elements that a process held; random ones are drawn again for any.
            moved = self._kind == "eigen" and saved.get("part") != ours["part"]
            for name in ours:
                if saved.get(name) != ours[name] and (name != "part" or (moved and not recompute)):
                    raise StateError(
                        f"the state has {name} = {saved.get(name)!r:.60}, here it is {ours[name]!r:.60}; go on with "
                        "what the run began with, or begin a new run"
                    )
            if step != self.step_number:
                raise StateError(
                    f"the state is of step {step}, but the GradientNoise is at step {self.step_number}; restore both "
                    "from one checkpoint"
                )
            if refreshed is not None and self._kind == "eigen" and not moved:
                if inside is not None:
                    held = _Held(self._made(inside), refreshed, parameters, stored=False)
                else:
                    held = self._restored(refreshed, parameters, recompute)
        if refreshed is not None and self._kind != "eigen":
            held = _Held(self._drawn(refreshed), refreshed, parameters, stored=False)
        self._lacks_state = False
        # One process without its part has all of them make a new one.
        self._held = held if self._share.everywhere(held is not None) else None
        self.refreshes = records

    def ledger(self) -> dict[str, Any]:
        """The record of the run so far: that of the noise, and how it is projected."""
        return {**self._gradients.ledger(), "projection": {**self._settings(), "refreshes": len(self.refreshes)}}

    def __repr__(self) -> str:
        return f"ProjectedNoise({self._gradients!r}, kind={self._kind}, k={self._k}, refresh={self._every})"

    def __reduce__(self) -> NoReturn:
        raise StateError("it is never pickled or copied, or two would issue the same rows; use state_dict()")

    def _is_kept(self, held: _Held) -> bool:
        """Whether the cache still has a projector; if so, it counts as used."""
        return held.stored and self._cache is not None and self._cache.use(self._key(held.step, held.parameters))

    def _is_due(self, number: int) -> bool:
        if not self._start <= number < self.horizon:
            return False
        if self._held is None or self._every is None:
            return self._held is None
        return (number - self._start) // self._every > (self._held.step - self._start) // self._every

    def _refresh(self, number: int) -> tuple[_Held, Refresh]:
        """The projector of step `number`: from the cache, or new. Nothing is changed yet: the step may be refused."""
        parameters, stored, source, held_out = "", False, "drawn", None
        forgotten = f"at step {number} of a run a new projector is made: if there was one, call load_state_dict() first"
        self._warn("state", forgotten if self._lacks_state else None)
        if self._kind == "eigen":
            parameters = "" if self._cache is None else self._digest_parameters()
            cached = self._cached(number, parameters)
            if cached is not None:
                projector, stored, source = cached, True, "cache"
            else:
                gradients, source = self._gradients_of(self._public), "computed"
                with self._share.exactly():
                    projector = top_eigenspace(gradients, self._k, storage=self._storage, shards=self._share)
                del gradients
        else:
            projector = self._drawn(number)
        if self._held_out is not None:
            held_out = self._gradients_of(self._held_out)
        with self._share.exactly():
            seen = observe(projector, number, source, previous=self.projector, held_out=held_out, shards=self._share)
        return _Held(projector, number, parameters, stored), seen

    def _keep(self, seen: Refresh) -> None:
        """Record a refresh, and the projector in the cache."""
        self.refreshes.append(seen)
        held, problem = self._held, None
        if self._cache is not None and self._kind == "eigen" and held is not None and not held.stored:
            basis = [held.projector.basis[name].cpu().numpy() for name in self._share.names]
            record = {**seen.record(), "run": self._gradients.run.hex()}
            try:
                self._cache.put(self._key(held.step, held.parameters), basis, _values(held.projector), record)
                self._held = replace(held, stored=True)
            except (ArtifactError, ProjectorError) as error:
                problem = f"the projector stays in memory only, and in checkpoints: {error}"
        self._warn("put", problem)

    def _cached(self, number: int, parameters: str) -> Projector | None:
        """From the cache, if every process finds its part there."""
        found, problem = None, None
        if self._cache is not None:
            try:
                stored = self._cache.get(self._key(number, parameters))
                found = None if stored is None else self._read(stored)
            except (ArtifactError, StateError) as error:
                problem = f"a new projector is made: {error}"
        self._warn("get", problem)
        return found if self._share.everywhere(found is not None) else None

    def _restored(self, number: int, parameters: str, recompute: bool) -> _Held | None:
        """The projector of step `number` from the cache; None if there is none, and a new one may be made."""
        try:
            stored = None if self._cache is None else self._cache.get(self._key(number, parameters))
        except ArtifactError:
            if not recompute:
                raise
            return None
        if stored is not None:
            return _Held(self._read(stored), number, parameters, stored=True)
        if recompute:
            return None
        raise StateError(
            f"the projector of step {number} is not in the cache ("
            f"{'none was given' if self._cache is None else self._cache.path}): give the cache that it was kept in (a "
            "larger max_bytes keeps more), or recompute=True, which goes on with a new projector"
        )

    def _read(self, stored: StoredProjector) -> Projector:
        """A projector as the cache keeps it: parts side by side."""
        basis, first = {}, 0
        for name in self._share.names:
            size = self._share.shards[name].size
            basis[name] = torch.from_numpy(np.ascontiguousarray(stored.basis[:, first : first + size]))
            first += size
        return self._made({"basis": basis, "values": stored.values, "rank": stored.record.get("rank")})

    def _made(self, kept: Mapping[str, Any]) -> Projector:
        """A projector that was kept."""
        try:
            basis, values, rank = kept["basis"], kept["values"], int(kept["rank"])
            arrays = {name: torch.as_tensor(values[name], dtype=torch.float64).numpy() for name in _VALUES}
            eigenvalues, spectrum = arrays["eigenvalues"], arrays["spectrum"]
            energy, scale = (float(arrays[name].item()) for name in ("energy", "scale"))
            shapes = {name: (self._k, self._share.shards[name].size) for name in self._share.names}
            found = {name: tuple(part.shape) for name, part in basis.items()}
            if found != shapes or eigenvalues.shape != (self._k,):
                raise ValueError("its vectors have other shapes")
            held = {name: self._placed(name, basis[name]) for name in self._share.names}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise StateError(f"the saved projector lacks a part ({error!r}); begin with a new one") from error
        return Projector(held, eigenvalues, spectrum, energy, "eigen", len(self._public[0]), rank, scale)

    def _placed(self, name: str, part: Tensor) -> Tensor:
        """Vectors where their parameter is. Copied, so that they lie in memory as torch lays out new ones, and products
        come out the same to the last bit."""
        return part.to(self._gradients._parameters[name].device, copy=True)

    def _drawn(self, number: int) -> Projector:
        """A random projection, the same whenever it is drawn for this run and step."""
        sizes = {name: replace(self._share.shards[name], dtype="float32") for name in self._share.names}
        seed = hashlib.sha256(self._gradients.run + number.to_bytes(8, "big")).digest()
        drawn = random_projector(
            sizes,
            self._k,
            seed=seed,
            plain=self._kind == "random-plain",
            storage=self._storage,
            shards=self._share,
        )
        return replace(
            drawn, basis={name: self._placed(name, torch.from_numpy(part)) for name, part in drawn.basis.items()}
        )

    def _check_examples(self, private: Any) -> None:
        """No public example is a private one, and none of the held-out ones either."""
        known = (("public example", self._public), ("held-out example", self._held_out or ()))
        if self._public and self._held_out:
            check_disjoint("held-out example", self._held_out[0], "public example", self._public[0])
        if isinstance(private, Iterator):
            raise ProjectorError(
                f"private must be a tensor or a sequence of tensors, a row for each example, not a "
                f"{type(private).__name__}: it is looked through more than once"
            )
        for what, some in known if private is not None else ():
            if some:
                check_disjoint(what, some[0], "private example", private)

    def _gradients_of(self, rows: Sequence[Tensor]) -> dict[str, Tensor]:
        """This share of public examples' gradients."""
        return self._share.of(lambda: self._per_example(*rows), len(rows[0]))  # type: ignore[misc]

    def _noisy_explained(self, number: int, mean: Mapping[str, Tensor], coefficients: Array) -> float | None:
        """What the noisy mean of a step tells about the private one."""
        squares = np.array([sum(float(part.double().square().sum()) for part in mean.values())])
        noise = self._gradients._noise
        scale = noise.noise_multiplier * noise.clip_norm * noise.sensitivity / self._gradients._batch_size
        deviation = float(scale * self._deviations[number])
        return noisy_explained(coefficients, float(self._share.sum(squares)[0]), self._share.elements, deviation)

    def _digest_parameters(self) -> str:
        """Of all parameters, frozen ones too. Not of buffers, which may hold what private data left without noise."""
        made = hashlib.sha256()
        for name, part in self._share.parameters().items():
            made.update(name.encode() + b"\0" + digest([part]).encode())
        return made.hexdigest()

    def _key(self, number: int, parameters: str) -> ProjectorKey:
        from mmfact.store.projectors import ProjectorKey

        scope = self._gradients.run.hex()
        if self._tag is not None:  # side by side with what other settings and parameters have made
            described = [self._tag, self._kind, self._k, self._storage, self._public_digest, parameters]
            scope = "tag-" + hashlib.sha256(repr(described).encode()).hexdigest()[:32]
        return ProjectorKey(
            scope=scope,
            step=number,
            part=self._share.part,
            kind=self._kind,
            k=self._k,
            m=len(self._public[0]),
            p=self._share.size,
            storage=self._storage,
            public=self._public_digest,
            parameters=parameters,
        )

    def _settings(self) -> dict[str, Any]:
        """What never changes in a run."""
        return {
            "run": self._gradients.run.hex(),
            "kind": self._kind,
            "k": self._k,
            "refresh": self._every,
            "start_step": self._start,
            "storage": self._storage,
            "public": self._public_digest,
            "tag": self._tag,
            "part": self._share.part,
            "elements": self._share.elements,
        }

    def _warn(self, kind: str, problem: str | None) -> None:
        """Once for each kind in a run: training goes on, or, where warnings are errors, stops in all processes."""
        with self._share.together("go on after a warning"):
            if problem is not None and kind not in self._warned:
                self._warned.add(kind)
                warnings.warn(problem, RuntimeWarning, stacklevel=4)


def _values(projector: Projector) -> dict[str, Array]:
    return {name: np.atleast_1d(np.array(getattr(projector, name), np.float64)) for name in _VALUES}


def _is_independent(strategy: Strategy) -> bool:
    """Whether the noise of a step has nothing of the other steps'."""
    if isinstance(strategy, BufferedStrategy):
        return not (strategy.g.any() and strategy.q.any())
    return not np.tril(strategy.to_dense(), -1).any()
