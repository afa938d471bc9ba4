"""The noise of a model: one run over its named tensors, which share key, step, journal and state."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from mmfact.factorize.errors import StateError
from mmfact.noise import checks
from mmfact.noise.key import NoiseKey
from mmfact.noise.release import Release, Shard, check_out
from mmfact.noise.stepping import Row
from mmfact.store.artifact import Artifact


class ModelNoise(Release):
    """Correlated noise for the named tensors of one model, a row of each a step.

    The tensors are ONE release: clip every example's gradient over all of them together to `clip_norm`. The row of
    tensor `name` is that of a `NoiseStream` of that name under the same key and run, bit for bit.

    Parameters
    ----------
    artifact : Artifact
        From `mmfact.load`.
    tensors : mapping of str to int or Shard
        For each tensor its number of elements, or what of it this process holds. Names must stay the same in every
        process and after every restart.
    noise_multiplier, clip_norm, key, space, run, threads, journal, check_participation
        As for `NoiseStream`. Processes that hold shards of one model share key and run; one of them keeps the journal.

    Raises
    ------
    PrivacyError, CapacityError, StateError
        As for `NoiseStream`; a name is not text.

    References
    ----------
    Denisov, McMahan, Rush, Smith, Guha Thakurta 2022, "Improved Differential Privacy for SGD via Optimal
    Private Linear Operators on Adaptive Streams", Theorem 2.1 (adaptive streams).
    """

    _FIXED = ("run", "artifact", "key", "tensors", "space", "noise_multiplier", "clip_norm")

    def __init__(
        self,
        artifact: Artifact,
        tensors: Mapping[str, int | Shard],
        *,
        noise_multiplier: float,
        clip_norm: float,
        key: NoiseKey | None = None,
        space: str = "gradient",
        run: bytes | None = None,
        threads: int | None = None,
        journal: str | Path | None = None,
        check_participation: bool = False,
    ) -> None:
        self._latched = False
        self.tensors = _named(tensors)
        super().__init__(
            artifact,
            self.tensors,
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            key=key,
            space=space,
            run=run,
            threads=threads,
            journal=journal,
            check_participation=check_participation,
        )

    def next(self, out: Mapping[str, Row] | None = None, *, ids: Sequence[Any] | None = None) -> Mapping[str, Row]:
        """The next row of every tensor, by name: into the arrays of `out` (shape (size,), contiguous) or new ones.

        A row that Ctrl-C or a lack of memory interrupts is lost, and its step spent: it may have been seen in part.

        Parameters
        ----------
        ids : sequence of int or str, optional
            Of the examples (or users) that took part in the step, in all processes; needed if, and only if,
            participation is checked.

        Raises
        ------
        HorizonError, ParticipationError, StateError
            As for `NoiseStream.next`; `out` names other tensors, or two of its arrays share memory.
        """
        if out is None:
            out = {name: np.empty(shard.size, shard.dtype) for name, shard in self.tensors.items()}
        else:
            self._check_outs(out)
        self._issue(out, ids, add=False)
        return out

    def add_to(self, gradients: Mapping[str, Row], *, ids: Sequence[Any] | None = None) -> None:
        """Add the next row of every tensor to sums of clipped gradients in place: as `next`, without its memory.

        If it is interrupted, some elements have their noise and some have not: throw the sums away.
        """
        self._check_outs(gradients)
        self._issue(gradients, ids, add=True)

    @classmethod
    def restore(
        cls,
        artifact: Artifact,
        state: dict[str, Any],
        *,
        key: NoiseKey,
        resume: str | None = None,
        journal: str | Path | None = None,
        threads: int | None = None,
        tensors: Mapping[str, int | Shard] | None = None,
    ) -> ModelNoise:
        """Continue a saved run bit for bit: see `NoiseStream.restore`.

        Parameters
        ----------
        tensors : mapping of str to int or Shard, optional
            What this process now holds of the same tensors. Default: what the process that saved the state held. With
            another split the past rows are drawn again.

        Raises
        ------
        StateError
            As for `NoiseStream.restore`; the tensors are not those of the run.
        """
        return cls._restore(artifact, state, key=key, resume=resume, journal=journal, threads=threads, shards=tensors)

    def __repr__(self) -> str:
        return f"ModelNoise({self.artifact.digest[:12]}, {len(self.tensors)} tensors, {self._described()})"

    def _check_outs(self, outs: Any) -> None:
        if not isinstance(outs, Mapping) or outs.keys() != self.tensors.keys():
            names = sorted(outs, key=str) if isinstance(outs, Mapping) else outs
            raise StateError(f"arrays are needed for the tensors {_some(sorted(self.tensors))}, not for {_some(names)}")
        for name, shard in self.tensors.items():
            self._check_out(name, outs[name], shard)
        arrays = [(out.__array_interface__["data"][0], out.nbytes, name) for name, out in outs.items() if _held(out)]
        for (first, length, name), (second, _, other) in itertools.pairwise(sorted(arrays)):
            if first + length > second:
                raise StateError(
                    f"the arrays of {name!r} and {other!r} share memory, so one row would serve two tensors; give each "
                    "tensor an array of its own"
                )

    def _check_out(self, name: str, out: Any, shard: Shard) -> None:
        check_out(f"the array of {name!r}", out, shard)

    def _fixed(self) -> dict[str, Any]:
        return {
            **self._common(),
            "tensors": {name: [shard.total, shard.dtype] for name, shard in self.tensors.items()},
        }

    @classmethod
    def _remake(
        cls, artifact: Artifact, state: dict[str, Any], shards: Mapping[str, int | Shard] | None, **common: Any
    ) -> ModelNoise:
        known, held = state["tensors"], state["shards"]
        if shards is None:
            shards = {name: _shard(held.get(name, [total, 0]), total, dtype) for name, (total, dtype) in known.items()}
        given = {name: [shard.total, shard.dtype] for name, shard in _named(shards).items()}
        if given != known:
            changed = sorted(name for name in given.keys() | known.keys() if given.get(name) != known.get(name))
            then, now = known.get(changed[0], "nothing"), given.get(changed[0], "nothing")
            raise StateError(
                f"the model is not the one that the state was saved for: {_some(changed)} differ in size or precision, "
                f"or were added or removed ({changed[0]!r} was {then}, is {now}); restore with the model of then, or "
                "start a new run on data that has not been used"
            )
        return cls(artifact, shards, **common)


def _named(tensors: Any) -> Mapping[str, Shard]:
    """Shards by name, for good."""
    if not isinstance(tensors, Mapping) or not tensors:
        raise StateError(f"tensors must name at least one tensor with its size, not {tensors!r:.60}")
    return MappingProxyType(
        {
            checks.text("name", name): shard if isinstance(shard, Shard) else Shard(checks.whole("size", shard, 1))
            for name, shard in tensors.items()
        }
    )


def _held(out: Any) -> bool:
    return isinstance(out, np.ndarray) and out.size > 0


def _shard(held: list[Any], total: int, dtype: str) -> Shard:
    offset, size = held[:2]
    return Shard(size, offset, total, dtype)


def _some(names: Any) -> str:
    if not isinstance(names, list):
        return f"{names!r:.40}"
    return ", ".join(map(repr, names[:3])) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
