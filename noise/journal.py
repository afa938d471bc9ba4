"""The journal of a run: a file that says which rows were issued and which are in a durable checkpoint.

One record a line, only ever added: JSON, a tab, and a message authentication code under the run's key. The first line
describes the run; the others are

    {"issued": t}               rows before step t may have left the stream; written before row t - 1 does
    {"committed": t}            a checkpoint of step t is durable
    {"skipped": t}              steps before t will not be issued any more
    {"resumed": t, ...}         the run goes on from a checkpoint of step t; with the caller's declaration

A line is handed to the system before its row is issued, so that a killed process leaves a true journal. A machine that
loses power can lose the last lines, but not the news that there were some: the first row after a commit, and every
other kind of record, is written through to the disk (fsync) before anything else happens.

The journal protects against crashes and mistakes, not against its owner: whoever puts back an older copy of journal and
checkpoint together, or removes whole lines, can have rows issued again.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mmfact.factorize.errors import StateError
from mmfact.noise.key import NoiseKey
from mmfact.store.publish import sync_directory

try:
    import fcntl
except ImportError:  # not a POSIX system: no lock
    fcntl = None  # type: ignore[assignment]

JOURNAL_VERSION = 1


@dataclass(frozen=True)
class History:
    """What a journal says.

    Attributes
    ----------
    issued : int
        Rows before this step may have been issued since the run began or was last resumed.
    committed : int
        The latest step of which a checkpoint is known to be durable.
    intact : bool
        Whether every line since then is whole; otherwise more rows may have been issued than it says.
    resumes : tuple of dict
        Every restart of the run.
    """

    issued: int = 0
    committed: int = 0
    intact: bool = True
    resumes: tuple[dict[str, Any], ...] = ()

    @property
    def clean(self) -> bool:
        """Whether no row was issued after the last durable checkpoint."""
        return self.intact and self.issued <= self.committed


class Journal:
    """An open journal; at most one in any process for one file."""

    _handle = -1

    def __init__(self, path: Path, key: NoiseKey, handle: int) -> None:
        self._process = os.getpid()
        self._path, self._key, self._handle = path, key, handle
        self._run = b""
        self._marked = False  # whether the disk knows that rows were issued since the last commit

    @classmethod
    def create(cls, path: str | Path, key: NoiseKey, run: dict[str, Any]) -> Journal:
        """A new file of mode 0600 for a new run.

        Raises
        ------
        StateError
            The file exists already, which is another run, or cannot be written.
        """
        path = _path(path)
        try:
            journal = cls(path, key, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600))
        except FileExistsError:
            if path.is_dir():
                raise StateError(f"the journal {path} is a folder; give the path of a new file") from None
            raise StateError(
                f"the journal {path} exists, so its run has begun: go on from its checkpoint with restore, "
                "or give another path for a new run"
            ) from None
        except OSError as error:
            raise StateError(f"the journal {path} could not be made: {error.strerror}") from error
        try:
            journal._lock()
            journal._run = _canonical(run)
            journal._write({"version": JOURNAL_VERSION, **run}, durable=True)
            sync_directory(path.parent)
        except BaseException as error:
            journal.close()
            os.unlink(path)  # half a journal must not look like a run
            if isinstance(error, OSError):
                raise StateError(f"the journal {path} could not be made: {error.strerror}") from error
            raise
        return journal

    @classmethod
    def reopen(cls, path: str | Path, key: NoiseKey, run: dict[str, Any]) -> tuple[Journal, History]:
        """The journal of a run that was interrupted, and what it says.

        Raises
        ------
        StateError
            It cannot be read, another stream has it open, or it belongs to another run or key.
        """
        path = _path(path)
        try:
            journal = cls(path, key, os.open(path, os.O_RDWR | os.O_APPEND))
        except OSError as error:
            raise StateError(
                f"the journal {path} cannot be opened: {error.strerror}; without it nobody knows which rows were "
                "issued: find it, or begin a new run on data that has not been used"
            ) from error
        try:
            journal._lock()
            journal._run = _canonical(run)
            return journal, journal._read()
        except OSError as error:
            journal.close()
            raise StateError(f"the journal {path} cannot be read: {error.strerror}") from error
        except BaseException:
            journal.close()
            raise

    def issue(self, step: int) -> None:
        """Rows before `step` may leave from now on."""
        self._write({"issued": step}, durable=not self._marked)
        self._marked = True

    def commit(self, step: int) -> None:
        """A checkpoint of `step` is durable."""
        self._marked = False  # before anything else, so that the next row is written through whatever happens here
        self._write({"committed": step}, durable=True)

    def skip(self, step: int) -> None:
        """Steps before `step` will not be issued."""
        self._write({"skipped": step}, durable=True)

    def resume(self, step: int, declared: str | None, reissued: int) -> None:
        """The run goes on from a checkpoint of `step`."""
        self._write({"resumed": step, "declared": declared, "reissued": reissued}, durable=True)

    def close(self) -> None:
        """Let others open it."""
        if self._handle >= 0:
            handle, self._handle = self._handle, -1
            if fcntl is not None and os.getpid() == self._process:
                with contextlib.suppress(OSError):
                    fcntl.flock(handle, fcntl.LOCK_UN)  # a forked child holds it as well
            os.close(handle)

    def __del__(self) -> None:
        self.close()

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES):
                raise StateError(
                    f"the journal {self._path} cannot be locked: {error.strerror}; put it on a file system with locks"
                ) from error
            raise StateError(
                f"the journal {self._path} is in use by another stream, here or in another process: two would "
                "issue the same rows; close() that stream, or wait until its process has ended"
            ) from error

    def _write(self, record: dict[str, Any], *, durable: bool) -> None:
        """Add one line, or leave the file as it was."""
        if self._handle < 0:
            raise StateError(f"the journal {self._path} was closed; restore the stream to go on")
        text = _canonical(record)
        line = text + b"\t" + self._sign(text) + b"\n"
        try:
            length = os.lseek(self._handle, 0, os.SEEK_END)  # asked, not remembered: an interruption could part them
            if length and os.pread(self._handle, 1, length - 1) != b"\n":
                line = b"\n" + line  # a torn line stays what it is
        except OSError as error:
            raise StateError(
                f"the journal {self._path} cannot be read: {error.strerror}; nothing was issued"
            ) from error
        try:
            if os.write(self._handle, line) != len(line):
                raise OSError(0, "no space left on the device")
            if durable:
                os.fsync(self._handle)
        except OSError as error:
            with contextlib.suppress(OSError):  # a torn line is recognized when it is read
                os.ftruncate(self._handle, length)
            raise StateError(
                f"the journal {self._path} could not be written: {error.strerror}; nothing was issued. Make space and "
                "call again"
            ) from error

    def _read(self) -> History:
        """All that the file says. It stays as it is: what is damaged must be seen again by the next attempt."""
        content = b""
        while piece := os.pread(self._handle, 1 << 20, len(content)):
            content += piece
        lines = content.split(b"\n")
        first = self._record(lines[0]) if len(lines) > 1 else None
        if first is None:
            raise StateError(
                f"{self._path} is not a journal of this run and key; give the one that the run was started with"
            )
        version = first.pop("version", None)
        if version != JOURNAL_VERSION:
            raise StateError(
                f"the journal {self._path} has version {version!r}; this mmfact goes on with version {JOURNAL_VERSION}"
            )
        said = History()
        for line in lines[1:-1]:
            record = self._record(line)
            if record is None:
                said = replace(said, intact=False)
            elif "resumed" in record:
                entry = {"step": record["resumed"], "declared": record["declared"], "reissued": record["reissued"]}
                said = History(record["resumed"], record["resumed"], resumes=(*said.resumes, entry))
            else:
                said = replace(
                    said,
                    issued=max(said.issued, record.get("issued", 0)),
                    committed=max(said.committed, record.get("committed", 0)),
                )
        return replace(said, intact=said.intact and not lines[-1])

    def _record(self, line: bytes) -> dict[str, Any] | None:
        """The record of a line, or None if the run's key did not sign it."""
        text, _, signature = line.partition(b"\t")
        if not hmac.compare_digest(self._sign(text), signature):
            return None
        record: dict[str, Any] = json.loads(text)
        return record

    def _sign(self, text: bytes) -> bytes:
        """The run's description is part of every signature, so that no line fits another run."""
        return self._key.sign("journal", self._run + b"\t" + text).encode()


def _canonical(record: dict[str, Any]) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def _path(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or "\0" in os.fsdecode(path) or not os.fsdecode(path):
        raise StateError(f"journal must be the path of a file, not {path!r:.60}")
    return Path(os.fsdecode(path))
