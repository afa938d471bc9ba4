"""A release: the rows of one run, each issued once, over one vector or the tensors of a model.

One run of an artifact is one Gaussian release, whatever the number of tensors and shards. What that takes is here:
the step, the journal, states and their restoration, the participation check and the ledger. `NoiseStream` and
`ModelNoise` are its two faces.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import hmac
import json
import os
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt

from mmfact.factorize.errors import CapacityError, HorizonError, StateError
from mmfact.noise import checks
from mmfact.noise.journal import History, Journal
from mmfact.noise.key import NoiseKey
from mmfact.noise.participation import ParticipationCheck
from mmfact.noise.source import LARGEST_ROW, NONCE_BYTES, NoiseSource
from mmfact.noise.state import STATE_VERSION, seal, sign, unseal
from mmfact.noise.stepping import Row, Stepper, Stepping, stepping
from mmfact.noise.workers import Workers
from mmfact.store.artifact import Artifact

SPACES = ("gradient", "iterate")
DTYPES = ("float32", "float64")


@dataclass(frozen=True)
class Shard:
    """Elements offset .. offset + size - 1 of a tensor of `total` elements, and the precision of their noise.

    Attributes
    ----------
    size : int
        0 where a process holds nothing of a tensor.
    offset, total : int
        Default: the tensor ends with this shard.
    dtype : {"float32", "float64"}

    Raises
    ------
    StateError
        They are not whole numbers, do not fit, or the precision is too low.
    CapacityError
        total is more than the keystream of one row.
    """

    size: int
    offset: int = 0
    total: int = None  # type: ignore[assignment]
    dtype: str = "float32"

    def __post_init__(self) -> None:
        try:
            precision = np.dtype(self.dtype).name if self.dtype is not None else "None"  # which NumPy takes for float64
        except (TypeError, ValueError, SyntaxError):
            precision = str(self.dtype)
        if precision not in DTYPES:
            raise StateError(
                f"dtype {precision} is not allowed: noise is drawn and added in {' or '.join(DTYPES)}, "
                "since a cast before the sum would put the release on a grid; cast the noisy sum instead"
            )
        size, offset = checks.whole("size", self.size, 0), checks.whole("offset", self.offset, 0)
        total = offset + size if self.total is None else checks.whole("total", self.total, 0)
        if offset + size > total:
            raise StateError(f"the shard {offset}..{offset + size - 1} does not fit a vector of total = {total}")
        if total > LARGEST_ROW:
            raise CapacityError(f"total = {total} elements are more than one row's keystream, {LARGEST_ROW}")
        for name, value in (("size", size), ("offset", offset), ("total", total), ("dtype", precision)):
            object.__setattr__(self, name, value)


class _Part:
    """One shard with its noise source and what the strategy keeps for it."""

    def __init__(self, shard: Shard, source: NoiseSource, stepper: Stepper) -> None:
        self.shard, self.source, self.stepper = shard, source, stepper

    def draw(self, step: int, first: int, out: Row) -> None:
        """White values of the tensor, where this shard lies in it."""
        self.source.fill(step, self.shard.offset + first, out)

    def piece(self, step: int, block: int, out: Row, *, add: bool) -> None:
        """Write, or add, one block of row `step`."""
        target = out[self.stepper.span(block)]
        row = np.empty_like(target) if add else target
        self.stepper.piece(step, block, self.draw, row)
        if add:
            np.add(target, row, out=target)


class Release(ABC):
    """What streams share: see `NoiseStream` for the meaning of every argument."""

    _FIXED: tuple[str, ...]
    """The names of what never changes in a run, all of it in every saved state."""

    def __init__(
        self,
        artifact: Artifact,
        shards: Mapping[str, Shard],
        *,
        noise_multiplier: float,
        clip_norm: float,
        key: NoiseKey | None,
        space: str,
        run: bytes | None,
        threads: int | None,
        journal: str | Path | None,
        check_participation: bool,
    ) -> None:
        checks.check_artifact(artifact)
        self._latched = False
        self.noise_multiplier = checks.positive("noise multiplier", noise_multiplier)
        self.clip_norm = checks.positive("clip norm", clip_norm)
        if space not in SPACES:
            raise StateError(f"space {space!r} is not known; use gradient or iterate")
        if key is not None and not isinstance(key, NoiseKey):
            raise StateError("key must be a NoiseKey: NoiseKey.generate(path), from_file(path) or from_bytes(32 bytes)")
        if run is not None and (not isinstance(run, bytes) or len(run) != NONCE_BYTES):
            raise StateError(f"run must be the {NONCE_BYTES} bytes of another shard's run, not {run!r:.60}")
        self.artifact, self.space = artifact, space
        self.key = key if key is not None else NoiseKey(secrets.token_bytes(32), recoverable=False)
        self.run = secrets.token_bytes(NONCE_BYTES) if run is None else run
        if journal is not None and not self.key.recoverable:
            raise StateError(
                "this stream would make its own key, which dies with the process, and its journal could serve nobody; "
                "pass key=NoiseKey.generate(path)"
            )
        self._workers = Workers(checks.thread_count(threads))
        way = stepping(artifact, space)
        held = {name: shards[name] for name in sorted(shards) if shards[name].size}  # saved buffers are in this order
        tensors = [(shard.size, np.dtype(shard.dtype)) for shard in held.values()]
        if tensors:
            checks.check_memory(tensors, way, self._workers.threads)
        self.sensitivity = self._sensitivity(way)
        scale = self.noise_multiplier * self.clip_norm * self.sensitivity
        for dtype in {dtype for _, dtype in tensors}:
            checks.check_range(scale, way, dtype)
        elements = sum(size for size, _ in tensors)
        try:
            self._parts = {
                name: self._part(
                    name,
                    shard,
                    NoiseSource(self.key, self.run, artifact.digest, name, np.dtype(shard.dtype)),
                    scale,
                    replace(way, start=functools.partial(way.start, share=shard.size / elements)),
                )
                for name, shard in held.items()
            }
        except MemoryError as error:
            raise CapacityError(
                f"size = {sum(size for size, _ in tensors)}: the system does not give the memory for this strategy's "
                "buffers; split the vector into shards with offset and total, or free memory"
            ) from error
        self._pieces = [(name, block) for name, part in self._parts.items() for block in range(part.stepper.blocks)]
        self._check = ParticipationCheck(artifact.participation, self.key, self.run) if check_participation else None
        self._lock = threading.Lock()
        self._place = (0, 0)  # (step, steps skipped), replaced as one so that no interruption can part them
        self._saved: list[int] = []  # steps of states, from the last commit on, the latest last
        self._committed = 0
        self._resumes: list[dict[str, Any]] = []
        self._process = os.getpid()
        self._closed = False
        self._journaled = journal is not None  # by this process, or by the first of several
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
        """The step whose row is issued next, counted from 0."""
        return self._place[0]

    @property
    def threads(self) -> int:
        """How many threads work on a row together."""
        return self._workers.threads

    @property
    def horizon(self) -> int:
        """Steps that there are rows for."""
        return self.artifact.n

    @property
    def closed(self) -> bool:
        """Whether it was ended."""
        return self._closed

    @property
    def checks_participation(self) -> bool:
        """Whether every step must come with the ids of its examples."""
        return self._check is not None

    def _issue(self, outs: Mapping[str, Row], ids: Sequence[Any] | None, *, add: bool) -> None:
        """Write the next row into `outs`, or add it: every part of it, in whatever order."""
        self._check_process()
        if (ids is None) != (self._check is None):
            raise StateError(
                "this run checks participation: give the ids of the step's examples, ids=[] if there are none"
                if ids is None
                else "ids were given, but this run does not check participation; make it with check_participation=True"
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
            if self._check is not None and ids is not None:
                try:
                    self._check.admit(step, ids)
                except Exception:
                    self._place = (step, skipped)  # refused as a whole: nothing was drawn
                    raise

            def work(piece: int) -> None:
                name, block = self._pieces[piece]
                self._parts[name].piece(step, block, outs[name], add=add)

            self._workers.run(work, len(self._pieces))

    def skip_to(self, step: int) -> None:
        """Go forward to `step` without issuing the rows between; they are gone for this run."""
        step = checks.whole("step", step, 0)
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
            step = self._saved[-1] if step is None else checks.whole("step", step, 0)
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
            many bytes as the stream holds. Without it the state is a few hundred bytes of plain JSON (and the keyed
            hashes of the ids, if participation is checked), and a restored stream draws all past rows again, in its
            first row, which takes time in proportion to the step.

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
            ids = None if self._check is None else self._check.state()
            state = {
                "version": STATE_VERSION,
                **self._fixed(),
                "shards": self._shards(),
                "step": step,
                "skipped": skipped,
                "committed": self._committed,
                "resumes": copy.deepcopy(self._resumes),
                "journal": self._journaled,
                "participation": None if ids is None else hashlib.sha256(ids).hexdigest(),
            }
            state["signature"] = sign(self.key, state)
            if ids is not None:
                state["ids"] = ids
            if buffers:
                for part in self._parts.values():
                    part.stepper.catch_up(step, part.draw, self._workers)
                state["buffers"] = seal(self.key, self.run, state["signature"], self._held())
            if step not in self._saved:
                self._saved.append(step)
        return state

    @classmethod
    def _restore(
        cls,
        artifact: Artifact,
        state: dict[str, Any],
        *,
        key: NoiseKey,
        resume: str | None,
        journal: str | Path | None,
        threads: int | None,
        shards: Mapping[str, int | Shard] | None = None,
        leading: bool = True,
        **own: Any,
    ) -> Self:
        """`restore`, onto other shards of the same tensors if `shards` says so.

        leading : bool
            False for one of several processes, another of which has the journal and has asked it.
        own
            What else the constructor takes.
        """
        checks.check_artifact(artifact)
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
            step = checks.whole("step", state["step"], 0)
            committed, skipped = (checks.whole(name, state[name], 0) for name in ("committed", "skipped"))
            if max(committed, skipped) > step:
                raise StateError(
                    f"the state says {committed} rows committed and {skipped} skipped, but only {step} steps"
                )
            reissued = None
            if leading and state["journal"] != (journal is not None):
                raise StateError(
                    "this run keeps a journal of the rows it issued: give its path as journal="
                    if state["journal"]
                    else "this run keeps no journal, and one that begins now could not tell what was issued before; "
                    "leave journal= out"
                )
            if journal is not None:
                opened, said = Journal.reopen(journal, key, {name: state[name] for name in cls._FIXED})
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
            elif leading and resume != "unpublished":
                raise StateError(_undeclared("rows that were issued after this state was saved would be issued again"))
            stream = cls._remake(
                artifact,
                state,
                shards,
                noise_multiplier=state["noise_multiplier"],
                clip_norm=state["clip_norm"],
                key=key,
                space=state["space"],
                run=bytes.fromhex(state["run"]),
                threads=threads,
                **own,
            )
            stream.skip_to(step)
            stream._journaled = bool(state["journal"])
            if "buffers" in state and stream._shards() == state["shards"]:
                unseal(key, stream.run, state["signature"], state["buffers"], stream._held())
                for part in stream._parts.values():
                    part.stepper.start_at(step)
            if state["participation"] is not None:
                stream._check = ParticipationCheck.restore(artifact.participation, key, stream.run, state["ids"])
            # a state that can be restored is durable
            stream._saved, stream._committed, stream._place = [step], step, (step, skipped)
            resumed = {"step": step, "declared": resume, "reissued": reissued}
            earlier = state["resumes"] if opened is None else said.resumes
            stream._resumes = [*copy.deepcopy(earlier), resumed]
            if opened is not None:
                opened.resume(step, resume, reissued or 0)
                stream._journal, opened = opened, None
        except (AttributeError, KeyError, TypeError, ValueError) as error:
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
        unchecked = {"schema": self.artifact.participation.kind, "checked": False}
        return {
            **self._fixed(),
            "workload": self.artifact.workload.spec(),
            "participation": unchecked if self._check is None else self._check.result(),
            "sensitivity": self.sensitivity,
            "issued": step - skipped,
            "skipped": skipped,
            "committed": self._committed,
            "horizon": self.horizon,
            "resumes": copy.deepcopy(self._resumes),
            "versions": {name: version(name) for name in ("mmfact", "numpy", "numba", "cryptography")},
        }

    def fingerprint(self) -> str:
        """What processes that share a run must agree on, in 64 hex digits: artifact, key, run, scales and step."""
        shared = {name: value for name, value in self._fixed().items() if name not in ("offset", "size")}
        described = json.dumps([shared, self._place], sort_keys=True).encode()
        return self.key.sign("fingerprint", described)

    def __reduce__(self) -> NoReturn:
        raise StateError("a stream is never pickled or copied, or two would issue the same rows; use state_dict()")

    @abstractmethod
    def _fixed(self) -> dict[str, Any]:
        """What never changes in a run, under the names of `_FIXED`."""

    @classmethod
    @abstractmethod
    def _remake(
        cls, artifact: Artifact, state: dict[str, Any], shards: Mapping[str, int | Shard] | None, **common: Any
    ) -> Self:
        """A stream as `state` describes it, at step 0."""

    def _sensitivity(self, way: Stepping) -> float:
        """Of what is streamed."""
        return way.sensitivity

    def _part(self, name: str, shard: Shard, source: NoiseSource, scale: float, way: Stepping) -> Any:
        """Who makes the rows of a tensor, `scale` times unit noise: like `_Part`, if another one does."""
        return _Part(shard, source, way.start(scale, shard.size, np.dtype(shard.dtype)))

    def _common(self) -> dict[str, Any]:
        return {
            "run": self.run.hex(),
            "artifact": self.artifact.digest,
            "key": self.key.id,
            "space": self.space,
            "noise_multiplier": self.noise_multiplier,
            "clip_norm": self.clip_norm,
        }

    def _shards(self) -> dict[str, list[Any]]:
        """What of each tensor this process holds: saved buffers fit no other split."""
        return {name: [part.shard.offset, part.shard.size] for name, part in self._parts.items()}

    def _held(self) -> tuple[npt.NDArray[Any], ...]:
        return tuple(array for part in self._parts.values() for array in part.stepper.held)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise StateError(
                "this stream was copied into another process by fork, which would issue its rows twice; make one "
                "stream in each process, under its own name or as shards of one vector"
            )

    def _check_open(self) -> None:
        if self._closed:
            raise StateError("this stream was closed; restore it from its state to go on")

    def _described(self) -> str:
        return f"step={self.step}/{self.horizon}, space={self.space}, key={self.key.id}{', closed' * self._closed}"


def check_out(what: str, out: Any, shard: Shard) -> None:
    """Rows are written in place: only into an array that is just right."""
    if not (
        isinstance(out, np.ndarray)
        and out.dtype == shard.dtype
        and out.shape == (shard.size,)
        and out.flags.c_contiguous
        and out.flags.writeable
    ):
        raise StateError(
            f"{what} must be a writeable contiguous {shard.dtype} array of shape ({shard.size},); it is "
            f"{getattr(out, 'dtype', type(out).__name__)} of shape {getattr(out, 'shape', None)}"
        )


def _check_state(artifact: Artifact, key: NoiseKey, state: dict[str, Any]) -> None:
    """Version, owner and signature."""
    if state["version"] != STATE_VERSION:
        raise StateError(f"the state has version {state['version']!r}; this mmfact restores version {STATE_VERSION}")
    for what, found, needed in (("artifact", artifact.digest, state["artifact"]), ("key", key.id, state["key"])):
        if found != needed:
            raise StateError(
                f"the state belongs to {what} {needed!s:.64}, not to the given {what} {found}; its noise could not "
                f"go on: find the {what} of that run, or begin a new run on data that has not been used"
            )
    fields = {name: value for name, value in state.items() if name not in ("signature", "buffers", "ids")}
    ids = state.get("ids")
    if not (
        hmac.compare_digest(sign(key, fields), state["signature"])
        and state["participation"] == (None if ids is None else hashlib.sha256(ids).hexdigest())
    ):
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
