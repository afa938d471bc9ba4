"""The stream: one row of correlated noise a training step."""

from __future__ import annotations

import contextlib
import copy
import hmac
import math
import numbers
import os
import secrets
import threading
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from mmfact.factorize import machine
from mmfact.factorize.errors import CapacityError, HorizonError, PrivacyError, StateError
from mmfact.noise.journal import History, Journal
from mmfact.noise.key import NoiseKey
from mmfact.noise.source import LARGEST_ROW, NONCE_BYTES, NoiseSource
from mmfact.noise.state import STATE_VERSION, seal, sign, unseal
from mmfact.noise.stepping import BLOCK, Row, Stepping, stepping
from mmfact.noise.workers import MOST_THREADS, Workers
from mmfact.store.artifact import Artifact

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
    ) -> None:
        _check_artifact(artifact)
        self._latched = False
        self.noise_multiplier = _positive("noise multiplier", noise_multiplier)
        self.clip_norm = _positive("clip norm", clip_norm)
        if space not in SPACES:
            raise StateError(f"space {space!r} is not known; use gradient or iterate")
        try:
            precision = np.dtype(dtype).name if dtype is not None else "None"  # which NumPy takes for float64
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
        if journal is not None and not self.key.recoverable:
            raise StateError(
                "this stream would make its own key, which dies with the process, and its journal could serve nobody; "
                "pass key=NoiseKey.generate(path)"
            )
        self._workers = Workers(_threads(threads))
        way = stepping(artifact, space)
        _check_memory(self.size, self.dtype, way.memory(self.dtype), self._workers.threads)
        self.sensitivity = way.sensitivity
        scale = self.noise_multiplier * self.clip_norm * self.sensitivity
        _check_range(scale, way, self.dtype)
        try:
            self._stepper = way.start(scale, self.size, self.dtype)
        except MemoryError as error:
            raise CapacityError(
                f"size = {self.size}: the system does not give the memory for this strategy's buffers; split the "
                "vector into shards with offset and total, or free memory"
            ) from error
        self._lock = threading.Lock()
        self._place = (0, 0)  # (step, steps skipped), replaced as one so that no interruption can part them
        self._saved: list[int] = []  # steps of states, from the last commit on, the latest last
        self._committed = 0
        self._resumes: list[dict[str, Any]] = []
        self._process = os.getpid()
        self._closed = False
        self._journal = None if journal is None else Journal.create(journal, self.key, self._fixed())
        self._latched = True

    def __setattr__(self, name: str, value: Any) -> None:
        if not name.startswith("_") and self._latched:
            raise StateError(
                f"{name} of a running stream cannot be set: it stays as it was made, since noise issued and noise to "
                "come belong together; make a new stream, which is another release"
            )
        super().__setattr__(name, value)

    @property
    def step(self) -> int:
        """The step whose row `next` issues, counted from 0."""
        return self._place[0]

    @property
    def threads(self) -> int:
        """How many threads work on a row together."""
        return self._workers.threads

    @property
    def horizon(self) -> int:
        """Steps that there are rows for."""
        return self.artifact.n

    def next(self, out: Row | None = None) -> Row:
        """The next row, into `out` (same dtype, shape (size,), contiguous) or a new array.

        A row that Ctrl-C or a lack of memory interrupts is lost, and its step spent: it may have been seen in part.

        Raises
        ------
        HorizonError
            The step is at or past the horizon; no row is ever issued twice instead.
        StateError
            `out` does not fit, the journal cannot be written, the stream is closed or was copied by a fork; the step is
            not spent.
        """
        self._check_process()
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
            self._check_open()
            step, skipped = self._place
            if step >= self.horizon:
                raise HorizonError(
                    f"step {step} is at or past the horizon of {self.horizon} steps that this artifact was compiled "
                    "for; stop training, or compile a longer horizon for a new run"
                )
            if self._journal is not None:
                self._journal.issue(step + 1)
            self._place = (step + 1, skipped)  # before anything of the row can be seen
            self._stepper.row(step, self._draw, out, self._workers)
        return out

    def skip_to(self, step: int) -> None:
        """Go forward to `step` without issuing the rows between; they are gone for this run."""
        step = _whole("step", step, 0)
        if step > self.horizon:
            raise HorizonError(f"step {step} is past the horizon of {self.horizon} steps")
        self._check_process()
        with self._lock:
            self._check_open()
            current, skipped = self._place
            if step < current:
                raise StateError(
                    f"step {step} lies before the current step {current}: rows that were issued are not issued again"
                )
            if self._journal is not None:
                self._journal.skip(step)
            self._place = (step, skipped + step - current)

    def commit(self, step: int | None = None) -> None:
        """Say that a checkpoint with this stream's state is durable; call it once the checkpoint is safely on disk.

        Rows before that step are then never issued again, and the journal and the ledger say so.

        Parameters
        ----------
        step : int, optional
            The step of that state. Default: of the latest `state_dict`. Give it when checkpoints are written while
            training goes on.

        Raises
        ------
        StateError
            No state was saved yet, or none of that step since the last commit.
        """
        self._check_process()
        with self._lock:
            self._check_open()
            if not self._saved:
                raise StateError("there is nothing to commit: no state was saved; call state_dict() and write it first")
            step = self._saved[-1] if step is None else _whole("step", step, 0)
            if step not in self._saved:
                raise StateError(
                    f"step {step} cannot be committed: no state of that step was saved since the last commit, of step "
                    f"{self._committed}"
                )
            if self._journal is not None:
                self._journal.commit(step)
            self._committed = step
            self._saved = [saved for saved in self._saved if saved >= step]

    def close(self) -> None:
        """End the stream and let go of its journal, so that the run can be restored elsewhere."""
        if os.getpid() != self._process:
            return  # a copy made by fork, whose lock another thread may have held
        with self._lock:
            self._closed = True
            if self._journal is not None:
                self._journal.close()

    def state_dict(self, *, buffers: bool = True) -> dict[str, Any]:
        """What `restore` needs besides the artifact and the key: plain values, and bytes; never the key.

        Parameters
        ----------
        buffers : bool
            Put in what the strategy keeps between steps, encrypted with the key, since it tells about past noise: as
            many bytes as the stream holds. Without it the state is a few hundred bytes of plain JSON, and a restored
            stream draws all past rows again, in its first `next`, which takes time in proportion to the step.

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
        self._check_process()
        with self._lock:
            self._check_open()
            step, skipped = self._place
            state = {
                "version": STATE_VERSION,
                **self._fixed(),
                "step": step,
                "skipped": skipped,
                "committed": self._committed,
                "resumes": copy.deepcopy(self._resumes),
                "journal": self._journal is not None,
            }
            state["signature"] = sign(self.key, state)
            if buffers:
                self._stepper.catch_up(step, self._draw, self._workers)
                state["buffers"] = seal(self.key, self.run, state["signature"], self._stepper.held)
            if step not in self._saved:
                self._saved.append(step)
        return state

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
        _check_artifact(artifact)
        if not isinstance(key, NoiseKey):
            raise StateError("key must be a NoiseKey: NoiseKey.from_file(path) or from_bytes(32 bytes)")
        if not isinstance(state, dict) or "version" not in state:
            raise StateError(
                f"the state must be the dictionary that state_dict() gave, not {state!r:.40}; if it is one entry of a "
                "checkpoint, give that entry"
            )
        if resume not in (None, "unpublished"):
            raise StateError(f"resume = {resume!r} is not known; the only declaration is 'unpublished'")
        opened: Journal | None = None
        try:
            _check_state(artifact, key, state)
            step = _whole("step", state["step"], 0)
            committed, skipped = _whole("committed", state["committed"], 0), _whole("skipped", state["skipped"], 0)
            if max(committed, skipped) > step:
                raise StateError(
                    f"the state says {committed} rows committed and {skipped} skipped, but only {step} steps"
                )
            reissued = None
            if state["journal"] != (journal is not None):
                raise StateError(
                    "this run keeps a journal of the rows it issued: give its path as journal="
                    if state["journal"]
                    else "this run keeps no journal, and one that begins now could not tell what was issued before; "
                    "leave journal= out"
                )
            if journal is not None:
                opened, said = Journal.reopen(journal, key, {name: state[name] for name in _FIXED})
                if step < said.committed:
                    raise StateError(
                        f"the state is of step {step}, but a checkpoint of step {said.committed} was committed, and "
                        "rows before that are never issued again; restore that checkpoint, or begin a new run on data "
                        "that has not been used"
                    )
                reissued = max(said.issued - step, 0)
                # The latest lines may be missing after a loss of power: only a commit of this very step proves it.
                if said.clean and step == said.committed:
                    resume = None
                elif resume != "unpublished":
                    raise StateError(_undeclared(_evidence(step, said, reissued)))
            elif resume != "unpublished":
                raise StateError(_undeclared("rows that were issued after this state was saved would be issued again"))
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
                threads=threads,
            )
            stream.skip_to(step)
            if "buffers" in state:
                unseal(key, stream.run, state["signature"], state["buffers"], stream._stepper.held)
                stream._stepper.start_at(step)
            # a state that can be restored is durable
            stream._saved, stream._committed, stream._place = [step], step, (step, skipped)
            resumed = {"step": step, "declared": resume, "reissued": reissued}
            earlier = state["resumes"] if opened is None else said.resumes
            stream._resumes = [*copy.deepcopy(earlier), resumed]
            if opened is not None:
                opened.resume(step, resume, reissued or 0)
                stream._journal, opened = opened, None
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(
                f"the state is damaged or not a stream's state ({error!r}); use another checkpoint"
            ) from error
        finally:
            if opened is not None:
                opened.close()
        return stream

    def ledger(self) -> dict[str, Any]:
        """The record of the run so far, for whoever signs the privacy statement."""
        step, skipped = self._place
        return {
            **self._fixed(),
            "workload": self.artifact.workload.spec(),
            "participation": self.artifact.participation.kind,
            "sensitivity": self.sensitivity,
            "issued": step - skipped,
            "skipped": skipped,
            "committed": self._committed,
            "horizon": self.horizon,
            "resumes": copy.deepcopy(self._resumes),
            "versions": {name: version(name) for name in ("mmfact", "numpy", "numba", "cryptography")},
        }

    def __reduce__(self) -> NoReturn:
        raise StateError("a stream is never pickled or copied, or two would issue the same rows; use state_dict()")

    def __repr__(self) -> str:
        closed = ", closed" if self._closed else ""
        return (
            f"NoiseStream({self.artifact.digest[:12]}, size={self.size}, step={self.step}/{self.horizon}, "
            f"space={self.space}, dtype={self.dtype.name}, key={self.key.id}{closed})"
        )

    def _draw(self, step: int, first: int, out: Row) -> None:
        self._source.fill(step, self.offset + first, out)

    def _fixed(self) -> dict[str, Any]:
        """What never changes in a run."""
        return {
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
        }

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                "this stream was copied into another process by fork, which would issue its rows twice; make one "
                "stream in each process, under its own name or as shards of one vector"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this stream was closed; restore it from its state to go on")


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


_FIXED = (
    "run", "artifact", "key", "name", "offset", "size", "total", "space", "dtype", "noise_multiplier", "clip_norm",
)  # fmt: skip


def _check_state(artifact: Artifact, key: NoiseKey, state: dict[str, Any]) -> None:
    """Version, owner and signature."""
    if state["version"] != STATE_VERSION:
        raise StateError(f"the state has version {state['version']!r}; this mmfact restores version {STATE_VERSION}")
    for what, found, needed in (("artifact", artifact.digest, state["artifact"]), ("key", key.id, state["key"])):
        if found != needed:
            raise StateError(
                f"the state belongs to {what} {needed!s:.64}, not to the given {what} {found}; its noise could not "
                "go on"
            )
    fields = {name: value for name, value in state.items() if name not in ("signature", "buffers")}
    if not hmac.compare_digest(sign(key, fields), state["signature"]):
        raise StateError(
            "the state was changed after it was saved: its signature does not fit; use an untouched one, since another "
            "step or scale under the same noise would betray the gradients"
        )


def _evidence(step: int, said: History, reissued: int) -> str:
    """What a journal knows that stands against going on from `step`."""
    damaged = "" if said.intact else "the journal is damaged, so it may lack rows; "
    if reissued:
        return f"{damaged}{reissued} or more rows that were issued after this state was saved would be issued again"
    return (
        f"{damaged}no commit() of step {step} is on record, so the journal cannot show that no row was issued after "
        "this state was saved, and such rows would be issued again"
    )


def _undeclared(reason: str) -> str:
    return (
        f"{reason}. If nothing computed from them was published (no model, metric or log left the "
        'trust boundary), say so with resume="unpublished"; otherwise start a new run from data that has not been used'
    )


def _whole(what: str, value: Any, least: int) -> int:
    if isinstance(value, int) and value.bit_length() > 1024:
        raise CapacityError(f"{what} is a number of {value.bit_length()} bits, more than anything here can hold")
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise StateError(f"{what} = {value!r} must be a whole number of at least {least}")
    return int(value)


def _threads(value: Any) -> int:
    if value is None:
        return min(machine.threads(), MOST_THREADS)
    threads = _whole("threads", value, 1)
    if threads > MOST_THREADS:
        raise StateError(
            f"threads = {threads} is more than {MOST_THREADS}; leave it out for as many as there are cores"
        )
    return threads


def _check_memory(size: int, dtype: np.dtype[Any], held: int, threads: int) -> None:
    """A stream holds `held` bytes an element, a step the output, and each thread what one block is made of."""
    needed = size * (dtype.itemsize + held) + threads * min(size, BLOCK) * (3 * dtype.itemsize + 4)
    available = machine.physical_memory()
    if available is not None and needed > available:
        raise CapacityError(
            f"size = {size} needs {needed / 2**30:.1f} GiB with this strategy's buffers, more than this machine's "
            f"{available / 2**30:.1f} GiB; split the vector into shards with offset and total"
        )
