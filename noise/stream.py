"""The stream: one row of correlated noise a training step, for one vector."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mmfact.noise import checks
from mmfact.noise.key import NoiseKey
from mmfact.noise.release import Release, Shard, check_out
from mmfact.noise.stepping import Row
from mmfact.store.artifact import Artifact


class NoiseStream(Release):
    """Correlated noise for one vector of parameters, a row a step.

    Each row of ``noise_multiplier * clip_norm * sensitivity * C^-1 Z`` is ADDED TO THE SUM of the
    clipped per-example gradients of a step; divide by a constant afterwards. What the optimizer then
    does with momentum, schedule and weight decay is post-processing, so any trainer works. The
    sensitivity is recomputed from the coefficients that are streamed, never read from the file.

    Parameters
    ----------
    artifact : Artifact
        From `mmfact.load`.
    size : int
        Elements of a row (of this shard, if `total` is given).
    noise_multiplier : float
        sigma > 0: the whole stream is one Gaussian release with mu = 1 / sigma.
    clip_norm : float
        L2 norm to which every example's gradient is clipped, > 0. With several tensors: the norm of the gradient over
        all of them together, clipped once and given to each tensor's stream. If each tensor is clipped on its own, the
        norm to give is the root of the sum of their squares.
    key : NoiseKey, optional
        Default: a new one from the operating system, with which the state cannot be saved.
    name : str
        Which tensor this is: two tensors under one key need two names.
    offset, total : int
        This stream is elements offset .. offset+size-1 of a vector of `total` elements; shards of one
        vector share key, name and `run`. Default: the vector ends with this stream.
    space : {"gradient", "iterate"}
        ``iterate`` gives B Z: add it to the noiseless iterates, theta_0 - (A G + B Z); never feed it back.
    dtype : {"float32", "float64"}
    run : bytes, optional
        The run nonce, 16 bytes, from another shard's `run`. Default: 16 new random bytes. A nonce of an
        earlier run repeats that run's noise: never pass one except to another shard of the same run.
    threads : int, optional
        That work on a row together, at most 64. Default: the cores this process may use. Values do not depend on it.
    journal : path, optional
        A new file that records every row before it leaves the stream, so that `restore` knows after a crash whether
        rows were issued since the last checkpoint. One for each stream.
    check_participation : bool
        Every step then comes with the ids of its examples, and a run in which one takes part more often than the
        artifact allows is refused before its row is drawn (`mmfact.noise.participation`).

    All of these are attributes too (`run` to make other shards with), and latched: none can be set. `step` and
    `horizon` say how far the stream is.

    Raises
    ------
    PrivacyError
        noise_multiplier or clip_norm not positive and finite.
    CapacityError
        A size that memory or the keystream cannot serve; raised before allocating.
    StateError
        size, offset, total, space, dtype, run or threads not as above; the journal exists or cannot be written.

    References
    ----------
    Denisov, McMahan, Rush, Smith, Guha Thakurta 2022, "Improved Differential Privacy for SGD via Optimal
    Private Linear Operators on Adaptive Streams", Theorem 2.1 (adaptive streams).
    """

    _FIXED = (
        "run", "artifact", "key", "name", "offset", "size", "total", "space", "dtype", "noise_multiplier", "clip_norm",
    )  # fmt: skip

    def __init__(
        self,
        artifact: Artifact,
        size: int,
        *,
        noise_multiplier: float,
        clip_norm: float,
        key: NoiseKey | None = None,
        name: str = "",
        offset: int = 0,
        total: int | None = None,
        space: str = "gradient",
        dtype: npt.DTypeLike = "float32",
        run: bytes | None = None,
        threads: int | None = None,
        journal: str | Path | None = None,
        check_participation: bool = False,
    ) -> None:
        self._latched = False
        self._shard = Shard(checks.whole("size", size, 1), offset, total, dtype)  # type: ignore[arg-type]
        self.name = checks.text("name", name)
        self.size, self.offset, self.total = self._shard.size, self._shard.offset, self._shard.total
        self.dtype = np.dtype(self._shard.dtype)
        super().__init__(
            artifact,
            {name: self._shard},
            noise_multiplier=noise_multiplier,
            clip_norm=clip_norm,
            key=key,
            space=space,
            run=run,
            threads=threads,
            journal=journal,
            check_participation=check_participation,
        )

    def next(self, out: Row | None = None, *, ids: Sequence[Any] | None = None) -> Row:
        """The next row, into `out` (same dtype, shape (size,), contiguous) or a new array.

        A row that Ctrl-C or a lack of memory interrupts is lost, and its step spent: it may have been seen in part.

        Parameters
        ----------
        ids : sequence of int or str, optional
            Of the examples (or users) that took part in the step; needed if, and only if, participation is checked.

        Raises
        ------
        HorizonError
            The step is at or past the horizon; no row is ever issued twice instead.
        ParticipationError
            An example took part before; nothing was drawn.
        StateError
            `out` does not fit, the journal cannot be written, the stream is closed or was copied by a fork; the step is
            not spent.
        """
        if out is None:
            out = np.empty(self.size, self.dtype)
        else:
            check_out("out", out, self._shard)
        self._issue({self.name: out}, ids, add=False)
        return out

    def add_to(self, gradients: Row, *, ids: Sequence[Any] | None = None) -> None:
        """Add the next row to a sum of clipped gradients in place: as `next`, without the memory for a row.

        If it is interrupted, some elements have their noise and some have not: throw the sum away.
        """
        check_out("gradients", gradients, self._shard)
        self._issue({self.name: gradients}, ids, add=True)

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
    ) -> NoiseStream:
        """Continue a saved stream bit for bit.

        Rows that the interrupted process issued after the state was saved are issued again, equal. That is
        private only if nothing computed from them left the trust boundary, which only the caller can
        know and must declare. Only a journal can show that there were none.

        Parameters
        ----------
        resume : {"unpublished"}
            The declaration: nothing computed from rows after the saved step was published.
        journal : path
            The run's journal, if it keeps one.
        threads : int, optional
            As for a new stream.

        Raises
        ------
        StateError
            No declaration where one is needed; a state from before the last commit; the state belongs to another
            artifact, key, journal or version, or is damaged.
        """
        return cls._restore(artifact, state, key=key, resume=resume, journal=journal, threads=threads)

    def __repr__(self) -> str:
        return (
            f"NoiseStream({self.artifact.digest[:12]}, size={self.size}, dtype={self.dtype.name}, {self._described()})"
        )

    def _fixed(self) -> dict[str, Any]:
        return {
            **self._common(),
            "name": self.name,
            "offset": self.offset,
            "size": self.size,
            "total": self.total,
            "dtype": self.dtype.name,
        }

    @classmethod
    def _remake(
        cls, artifact: Artifact, state: dict[str, Any], shards: Mapping[str, int | Shard] | None, **common: Any
    ) -> NoiseStream:
        own = {name: state[name] for name in ("name", "offset", "total", "dtype")}
        return cls(artifact, state["size"], **own, **common)
