"""The stream: one row of correlated noise a training step."""

from __future__ import annotations

import math
import os
import secrets
from importlib.metadata import version
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from numba import njit

from mmfact.factorize.errors import CapacityError, HorizonError, PrivacyError, StateError
from mmfact.noise.key import NoiseKey
from mmfact.noise.source import LARGEST_ROW, NONCE_BYTES, NoiseSource
from mmfact.store.artifact import Artifact

STATE_VERSION = 1
SPACES = ("gradient", "iterate")
DTYPES = ("float32", "float64")

# White rows are kept up to this much memory; beyond it they are drawn again at every step.
HISTORY_BYTES = 1 << 30

Row = npt.NDArray[Any]


class NoiseStream:
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
        L2 norm to which every example's gradient is clipped, > 0.
    key : NoiseKey, optional
        Default: a new one from the operating system, with which the state cannot be saved.
    name : str
        Which tensor this is: two tensors under one key need two names.
    offset, total : int
        This stream is elements offset .. offset+size-1 of a vector of `total` elements; shards of one
        vector share key, name and `run`.
    space : {"gradient", "iterate"}
        ``iterate`` gives B Z: add it to the noiseless iterates, theta_0 - (A G + B Z); never feed it back.
    dtype : {"float32", "float64"}
    run : bytes, optional
        The run nonce, 16 bytes, from another shard's `run`. Default: 16 new random bytes. A nonce of an
        earlier run repeats that run's noise: never pass one except to another shard of the same run.

    Raises
    ------
    PrivacyError
        noise_multiplier or clip_norm not positive and finite.
    CapacityError
        A size that memory or the keystream cannot serve; raised before allocating.
    StateError
        size, offset, total, space, dtype or run not as above.

    References
    ----------
    Denisov, McMahan, Rush, Smith, Guha Thakurta 2022, "Improved Differential Privacy for SGD via Optimal
    Private Linear Operators on Adaptive Streams", Theorem 2.1 (adaptive streams).
    """

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
    ) -> None:
        self.noise_multiplier = _positive("noise multiplier", noise_multiplier)
        self.clip_norm = _positive("clip norm", clip_norm)
        if space not in SPACES:
            raise StateError(f"space {space!r} is not known; use gradient or iterate")
        try:
            precision = np.dtype(dtype).name
        except TypeError:
            precision = str(dtype)
        if precision not in DTYPES:
            raise StateError(
                f"dtype {precision} is not allowed: noise is drawn and added in {' or '.join(DTYPES)}, "
                "since a cast before the sum would put the release on a grid; cast the noisy sum instead"
            )
        self.size = _whole("size", size, 1)
        self.offset = _whole("offset", offset, 0)
        self.total = self.offset + self.size if total is None else _whole("total", total, 1)
        if self.offset + self.size > self.total:
            raise StateError(
                f"the shard {self.offset}..{self.offset + self.size - 1} does not fit a vector of total = {self.total}"
            )
        if self.total > LARGEST_ROW:
            raise CapacityError(f"total = {self.total} elements are more than one row's keystream, {LARGEST_ROW}")
        self.artifact, self.name, self.space, self.dtype = artifact, str(name), space, np.dtype(precision)
        _check_memory(self.size, self.dtype)
        self.key = key if key is not None else NoiseKey(secrets.token_bytes(32), recoverable=False)
        self.run = secrets.token_bytes(NONCE_BYTES) if run is None else bytes(run)
        self._source = NoiseSource(self.key, self.run, artifact.digest, self.name, self.dtype)
        streaming = artifact.strategy.streaming(artifact.workload, artifact.participation, space)
        self.sensitivity = streaming.sensitivity
        self._rows = streaming.rows * (self.noise_multiplier * self.clip_norm * self.sensitivity)
        self._history: list[Row] = []
        self._step = 0
        self._committed = 0
        self._resumes: list[dict[str, Any]] = []
        self._process = os.getpid()

    @property
    def step(self) -> int:
        """The step whose row `next` issues, counted from 0."""
        return self._step

    @property
    def horizon(self) -> int:
        """Steps that there are rows for."""
        return self.artifact.n

    def next(self, out: Row | None = None) -> Row:
        """The next row, into `out` (same dtype, shape (size,), contiguous) or a new array.

        Raises
        ------
        HorizonError
            The step is at or past the horizon; no row is ever issued twice instead.
        StateError
            `out` does not fit; the step is not consumed.
        """
        if os.getpid() != self._process:
            raise StateError(
                "this stream was copied into another process by fork, which would issue its rows twice; make one "
                "stream in each process, under its own name or as shards of one vector"
            )
        if self._step >= self.horizon:
            raise HorizonError(
                f"step {self._step} is at or past the horizon of {self.horizon} steps that this artifact was compiled "
                "for; stop training, or compile a longer horizon for a new run"
            )
        if out is None:
            out = np.empty(self.size, self.dtype)
        elif not (
            isinstance(out, np.ndarray)
            and out.dtype == self.dtype
            and out.shape == (self.size,)
            and out.flags.c_contiguous
            and out.flags.writeable
        ):
            raise StateError(
                f"out must be a writeable contiguous {self.dtype} array of shape ({self.size},); it is "
                f"{getattr(out, 'dtype', type(out).__name__)} of shape {getattr(out, 'shape', None)}"
            )
        total = np.zeros(self.size)
        for step in range(self._step + 1):
            _accumulate(self._rows[self._step, step], self._white(step), total)
        self._step += 1  # before the row leaves: an interruption here loses a row but never repeats one
        out[:] = total
        return out

    def skip_to(self, step: int) -> None:
        """Go forward to `step` without issuing the rows between; they are gone for this run."""
        step = _whole("step", step, 0)
        if step < self._step:
            raise StateError(
                f"step {step} lies before the current step {self._step}: rows that were issued are not issued again"
            )
        if step > self.horizon:
            raise HorizonError(f"step {step} is past the horizon of {self.horizon} steps")
        self._step = step

    def commit(self) -> None:
        """Say that a checkpoint with this stream's state is durable: rows so far will not be asked for again."""
        self._committed = self._step

    def state_dict(self) -> dict[str, Any]:
        """What `restore` needs besides the artifact and the key; plain values, without the key.

        Raises
        ------
        StateError
            The key lives only in this stream, so nobody could restore: pass a persisted key, or
            ``NoiseKey.ephemeral()`` to say that the state need not outlive the process.
        """
        if not self.key.recoverable:
            raise StateError(
                "this stream made its own key, which is lost with the process, so a saved state could not go on; pass "
                "key=NoiseKey.generate(path), or key=NoiseKey.ephemeral() if the state need not outlive the process"
            )
        return {
            "version": STATE_VERSION,
            "step": self._step,
            "committed": self._committed,
            "run": self.run.hex(),
            "artifact": self.artifact.digest,
            "key": self.key.id,
            "name": self.name,
            "offset": self.offset,
            "size": self.size,
            "total": self.total,
            "space": self.space,
            "dtype": self.dtype.name,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
            "resumes": list(self._resumes),
        }

    @classmethod
    def restore(
        cls, artifact: Artifact, state: dict[str, Any], *, key: NoiseKey, resume: str | None = None
    ) -> NoiseStream:
        """Continue a saved stream bit for bit.

        Rows that the interrupted process issued after the state was saved are issued again, equal. That is
        private only if nothing computed from them left the trust boundary, which only the caller can
        know and must declare.

        Parameters
        ----------
        resume : {"unpublished"}
            The declaration: nothing computed from rows after the saved step was published.

        Raises
        ------
        StateError
            No declaration; or the state belongs to another artifact, key or version, or is damaged.
        """
        if resume != "unpublished":
            raise StateError(
                "rows issued after this state was saved would be issued again. If nothing computed from them was "
                'published (no model, metric or log left the trust boundary), say so with resume="unpublished"; '
                "otherwise start a new run from data that has not been used"
            )
        try:
            if state["version"] != STATE_VERSION:
                raise StateError(
                    f"the state has version {state['version']!r}; this mmfact restores version {STATE_VERSION}"
                )
            for what, found, needed in (
                ("artifact", artifact.digest, state["artifact"]),
                ("key", key.id, state["key"]),
            ):
                if found != needed:
                    raise StateError(
                        f"the state belongs to {what} {str(needed)[:16]}, not to the given {what} {found[:16]}; "
                        "its noise could not go on"
                    )
            stream = cls(
                artifact,
                state["size"],
                noise_multiplier=state["noise_multiplier"],
                clip_norm=state["clip_norm"],
                key=key,
                name=state["name"],
                offset=state["offset"],
                total=state["total"],
                space=state["space"],
                dtype=state["dtype"],
                run=bytes.fromhex(state["run"]),
            )
            step, committed = _whole("step", state["step"], 0), _whole("committed", state["committed"], 0)
            if committed > step:
                raise StateError(f"the state says that {committed} rows are committed but only {step} issued")
            stream.skip_to(step)
            stream._committed = committed
            stream._resumes = [*state["resumes"], {"step": step, "declared": resume}]
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the state is damaged or not a stream's state ({error!r}); use another checkpoint"
            ) from error
        return stream

    def ledger(self) -> dict[str, Any]:
        """The record of the run so far, for whoever signs the privacy statement."""
        return {
            "artifact": self.artifact.digest,
            "workload": self.artifact.workload.spec(),
            "participation": self.artifact.participation.kind,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
            "sensitivity": self.sensitivity,
            "space": self.space,
            "name": self.name,
            "run": self.run.hex(),
            "key": self.key.id,
            "issued": self._step,
            "committed": self._committed,
            "horizon": self.horizon,
            "resumes": list(self._resumes),
            "versions": {name: version(name) for name in ("mmfact", "numpy", "scipy", "cryptography")},
        }

    def __reduce__(self) -> NoReturn:
        raise StateError("a stream is never pickled or copied, or two would issue the same rows; use state_dict()")

    def __repr__(self) -> str:
        return (
            f"NoiseStream({self.artifact.digest[:12]}, size={self.size}, step={self._step}/{self.horizon}, "
            f"space={self.space}, dtype={self.dtype.name}, key={self.key.id})"
        )

    def _white(self, step: int) -> Row:
        if step < len(self._history):
            return self._history[step]
        row = self._source.row(step, self.offset, self.size)
        if step == len(self._history) and (step + 1) * row.nbytes <= HISTORY_BYTES:
            self._history.append(row)
        return row


@njit(cache=True, nogil=True)
def _accumulate(weight: float, row: Row, total: Row) -> None:
    for e in range(len(total)):
        total[e] += weight * row[e]


def _positive(what: str, value: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise PrivacyError(f"{what} {value!r} must be positive and finite; without it there is no privacy")
    return number


def _whole(what: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise StateError(f"{what} = {value!r} must be a whole number of at least {least}")
    return int(value)


def _check_memory(size: int, dtype: np.dtype[Any]) -> None:
    """A step holds the output, its float64 sum and one white row."""
    needed = size * (8 + 2 * dtype.itemsize)
    try:
        available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return
    if needed > available:
        raise CapacityError(
            f"size = {size} needs {needed / 2**30:.1f} GiB a step, more than this machine's "
            f"{available / 2**30:.1f} GiB; split the vector into shards with offset and total"
        )
