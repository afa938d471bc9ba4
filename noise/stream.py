"""The stream: one row of correlated noise a training step."""

from __future__ import annotations

import contextlib
import copy
import hmac
import json
import math
import numbers
import os
import secrets
import threading
from importlib.metadata import version
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import CapacityError, HorizonError, PrivacyError, StateError
from mmfact.factorize.machine import physical_memory
from mmfact.noise.key import NoiseKey
from mmfact.noise.source import LARGEST_ROW, NONCE_BYTES, NoiseSource
from mmfact.noise.stepping import Row, Stepping, stepping
from mmfact.store.artifact import Artifact

STATE_VERSION = 1
SPACES = ("gradient", "iterate")
_LARGEST_ROUNDING = 2e-3  # of a row's white noise; the compiler stays below it
DTYPES = ("float32", "float64")


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
        _check_artifact(artifact)
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
        if not isinstance(name, str) or any("\ud800" <= letter <= "\udfff" for letter in name):
            raise StateError(f"name = {name!r} must be text (no lone surrogates): it tells tensors under one key apart")
        if key is not None and not isinstance(key, NoiseKey):
            raise StateError("key must be a NoiseKey: NoiseKey.generate(path), from_file(path) or from_bytes(32 bytes)")
        if run is not None and not isinstance(run, bytes):
            raise StateError(f"run must be the {NONCE_BYTES} bytes of another shard's run, not {type(run).__name__}")
        self.size = _whole("size", size, 1)
        self.offset = _whole("offset", offset, 0)
        self.total = self.offset + self.size if total is None else _whole("total", total, 1)
        if self.offset + self.size > self.total:
            raise StateError(
                f"the shard {self.offset}..{self.offset + self.size - 1} does not fit a vector of total = {self.total}"
            )
        if self.total > LARGEST_ROW:
            raise CapacityError(f"total = {self.total} elements are more than one row's keystream, {LARGEST_ROW}")
        self.artifact, self.name, self.space, self.dtype = artifact, name, space, np.dtype(precision)
        self.key = key if key is not None else NoiseKey(secrets.token_bytes(32), recoverable=False)
        self.run = secrets.token_bytes(NONCE_BYTES) if run is None else run
        self._source = NoiseSource(self.key, self.run, artifact.digest, self.name, self.dtype)
        way = stepping(artifact, space)
        _check_memory(self.size, self.dtype, way.memory(self.dtype))
        self.sensitivity = way.sensitivity
        scale = self.noise_multiplier * self.clip_norm * self.sensitivity
        _check_range(scale, way, self.dtype)
        self._stepper = way.start(scale, self.size, self.dtype)
        self._lock = threading.Lock()
        self._place = (0, 0)  # (step, steps skipped), replaced as one so that no interruption can part them
        self._committed = 0
        self._resumes: list[dict[str, Any]] = []
        self._process = os.getpid()

    @property
    def step(self) -> int:
        """The step whose row `next` issues, counted from 0."""
        return self._step

    @property
    def _step(self) -> int:
        return self._place[0]

    @property
    def _skipped(self) -> int:
        return self._place[1]

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
        with self._lock:  # two threads must not enter the same step
            step = self._step
            if step >= self.horizon:
                raise HorizonError(
                    f"step {step} is at or past the horizon of {self.horizon} steps that this artifact was compiled "
                    "for; stop training, or compile a longer horizon for a new run"
                )
            total = self._stepper.row(step, self._white)
            # before the row leaves: an interruption here loses a row but never repeats one
            self._place = (step + 1, self._skipped)
            out[:] = total  # inside the lock: the stepper will use its array again
        return out

    def skip_to(self, step: int) -> None:
        """Go forward to `step` without issuing the rows between; they are gone for this run."""
        step = _whole("step", step, 0)
        if step > self.horizon:
            raise HorizonError(f"step {step} is past the horizon of {self.horizon} steps")
        with self._lock:
            if step < self._step:
                raise StateError(
                    f"step {step} lies before the current step {self._step}: rows that were issued are not issued again"
                )
            self._place = (step, self._skipped + step - self._step)

    def commit(self) -> None:
        """Say that a checkpoint with this stream's state is durable; call it after each one is safely on disk.

        The count goes into state and ledger, where a reviewer sees how far published checkpoints reached.
        """
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
        state = {
            "version": STATE_VERSION,
            "step": self._step,
            "skipped": self._skipped,
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
            "resumes": copy.deepcopy(self._resumes),
        }
        return {**state, "signature": self.key.sign(_canonical(state))}

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
        _check_artifact(artifact)
        if not isinstance(key, NoiseKey):
            raise StateError("key must be a NoiseKey: NoiseKey.from_file(path) or from_bytes(32 bytes)")
        if not isinstance(state, dict):
            raise StateError(
                f"the state must be the dictionary that state_dict() gave (json.loads of its JSON), not {state!r:.40}"
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
            unsigned = {name: value for name, value in state.items() if name != "signature"}
            if not hmac.compare_digest(key.sign(_canonical(unsigned)), state["signature"]):
                raise StateError(
                    "the state was changed after it was saved: its signature does not fit; use an untouched one, "
                    "since another step or scale under the same noise would betray the gradients"
                )
            if resume != "unpublished":
                raise StateError(
                    "rows issued after this state was saved would be issued again. If nothing computed from them was "
                    'published (no model, metric or log left the trust boundary), say so with resume="unpublished"; '
                    "otherwise start a new run from data that has not been used"
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
            step = _whole("step", state["step"], 0)
            committed, skipped = _whole("committed", state["committed"], 0), _whole("skipped", state["skipped"], 0)
            if max(committed, skipped) > step:
                raise StateError(
                    f"the state says {committed} rows committed and {skipped} skipped, but only {step} steps"
                )
            stream.skip_to(step)
            stream._committed, stream._place = committed, (step, skipped)
            stream._resumes = [*copy.deepcopy(state["resumes"]), {"step": step, "declared": resume}]
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
            "issued": self._step - self._skipped,
            "skipped": self._skipped,
            "committed": self._committed,
            "horizon": self.horizon,
            "resumes": copy.deepcopy(self._resumes),
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
        return self._source.row(step, self.offset, self.size)


def _check_artifact(artifact: Any) -> None:
    if not isinstance(artifact, Artifact):
        raise StateError(f"the artifact must come from mmfact.load(ref) or ArtifactStore.save, not {artifact!r:.60}")


def _positive(what: str, value: Any) -> float:
    number = math.nan
    if isinstance(value, numbers.Real) and not isinstance(value, bool | np.bool_):
        with contextlib.suppress(OverflowError):
            number = float(value)
    if not (math.isfinite(number) and number > 0):
        raise PrivacyError(f"{what} {value!r:.40} must be a positive finite number; without it there is no privacy")
    return number


def _check_range(scale: float, way: Stepping, dtype: np.dtype[Any]) -> None:
    """Noise must neither vanish nor overflow in `dtype`, in any row: 64 standard deviations up, 2^-24 of one down."""
    tiny, most = float(np.finfo(dtype).tiny), float(np.finfo(dtype).max)
    if not (scale * way.smallest * 2.0**-24 > tiny and scale * way.largest * 64 < most):
        raise PrivacyError(
            f"noise_multiplier * clip_norm * sensitivity = {scale:.3g} gives noise that {dtype} cannot hold; "
            "rescale the gradients and the clip norm, or use dtype float64"
        )
    if not way.largest_buffer * 64 < most:
        raise PrivacyError(
            f"the strategy's buffers reach {way.largest_buffer:.3g}, which {dtype} cannot hold; use dtype float64"
        )
    error = way.amplification * float(np.finfo(dtype).eps)
    if not error <= _LARGEST_ROUNDING:
        raise PrivacyError(
            f"in {dtype} this strategy's rows would be rounded by about {error:.1g} of their white noise "
            f"({_LARGEST_ROUNDING:g} is allowed): it subtracts numbers that nearly cancel. "
            + ("Use dtype float64" if dtype == np.float32 else "Compile the workload instead of giving its strategy")
        )


def _canonical(state: dict[str, Any]) -> bytes:
    return json.dumps(state, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _whole(what: str, value: Any, least: int) -> int:
    if isinstance(value, int) and value.bit_length() > 1024:
        raise CapacityError(f"{what} is a number of {value.bit_length()} bits, more than anything here can hold")
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise StateError(f"{what} = {value!r} must be a whole number of at least {least}")
    return int(value)


def _check_memory(size: int, dtype: np.dtype[Any], held: int) -> None:
    """A step holds the output, one white row with what it is drawn from, and `held` bytes an element of the stepper."""
    needed = size * (2 * dtype.itemsize + held)
    available = physical_memory()
    if available is not None and needed > available:
        raise CapacityError(
            f"size = {size} needs {needed / 2**30:.1f} GiB with this strategy's buffers, more than this machine's "
            f"{available / 2**30:.1f} GiB; split the vector into shards with offset and total"
        )
