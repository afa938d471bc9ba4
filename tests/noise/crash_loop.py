"""What test_crash.py kills: a training loop that writes checkpoints, run in forks of this process.

    python crash_loop.py FOLDER MODE SEED ROUNDS

FOLDER holds an artifact and a key. Each life of the run is a fork that restores the last checkpoint (or begins) and
says what it does in lines of the file `observed`, each before it goes on:

    new RUN                     a new run begins, its first checkpoint is written
    try S                       a checkpoint of step S is about to be restored
    refused                     not without the declaration
    start S HOW N               restored: HOW is `clean` or `declared`, N the restarts in the ledger
    row S HEX                   row S was issued
    skip S                      the next step is S
    saved S / committed S       a checkpoint of step S is on the disk / the stream was told so
    end LEDGER                  the run is over

MODE says when a life ends: `kill`, by SIGKILL at a random moment; `power`, the same, and the journal loses a random
part of what was not written through to the disk; `points`, before each line of the journal's and the stream's code in
turn, each time in a copy of one run; ROUNDS says then how many lines apart.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import pickle
import random
import shutil
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import mmfact
from mmfact.factorize.errors import StateError
from mmfact.noise import NoiseKey, NoiseStream, journal, release, stream

SIZE = 4
MAIN = ("next", "add_to", "_issue", "piece", "skip_to", "commit", "restore", "_restore")
ROWS_A_LIFE = 18  # then it waits for its end, so that the horizon lasts for all rounds


class Life:
    """One process of the run: what it has, and where it says what it does."""

    def __init__(self, artifact: Any, key: NoiseKey, folder: Path, tell: int = -1) -> None:
        self.artifact, self.key, self.folder, self._tell = artifact, key, folder, tell
        self.journal, self.checkpoint = folder / "journal", folder / "checkpoint"
        self._log = os.open(folder / "observed", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self.pause: Callable[[], None] = lambda: None

    def say(self, text: str) -> None:
        os.write(self._log, text.encode() + b"\n")
        if self._tell >= 0:
            os.write(self._tell, b".")
        self.pause()

    def begin(self) -> NoiseStream:
        """A stream that goes on from the checkpoint, declared if it must be, or a new one."""
        options: dict[str, Any] = {"key": self.key, "journal": self.journal, "threads": 1}
        if not self.checkpoint.exists():  # so no row was issued
            self.journal.unlink(missing_ok=True)
            made = NoiseStream(self.artifact, SIZE, noise_multiplier=1.3, clip_norm=0.7, **options)
            self.save(made)
            self.say(f"new {made.run.hex()}")
            return made
        state = pickle.loads(self.checkpoint.read_bytes())
        self.say(f"try {state['step']}")
        how = "clean"
        try:
            made = NoiseStream.restore(self.artifact, state, **options)
        except StateError:
            self.say("refused")
            how = "declared"
            made = NoiseStream.restore(self.artifact, state, resume="unpublished", **options)
        self.say(f"start {made.step} {how} {len(made.ledger()['resumes'])}")
        return made

    def row(self, made: NoiseStream) -> None:
        """Every other one added to a sum, of zeros."""
        step = made.step
        if step % 2:
            row = np.zeros(SIZE, np.float32)
            made.add_to(row)
        else:
            row = made.next()
        self.say(f"row {step} {row.tobytes().hex()}")

    def save(self, made: NoiseStream) -> None:
        """The checkpoint is replaced as a whole, and on the disk afterwards."""
        temporary = self.folder / "checkpoint.new"
        with open(temporary, "wb") as file:
            file.write(pickle.dumps(made.state_dict()))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.checkpoint)

    def train(self, chance: random.Random, rows: int | None) -> None:
        """Rows, and a checkpoint now and then, until the horizon or for so many rows."""
        made = self.begin()
        while made.step < made.horizon and rows != 0:
            self.row(made)
            rows = None if rows is None else rows - 1
            if chance.random() < 0.25:
                self.save(made)
                self.say(f"saved {made.step}")
                if chance.random() < 0.8:
                    made.commit()
                    self.say(f"committed {made.step}")
        if rows == 0:
            time.sleep(60)
            os._exit(1)  # nobody killed it
        self.end(made)

    def end(self, made: NoiseStream) -> None:
        self.save(made)
        made.commit()
        self.say(f"end {json.dumps(made.ledger())}")
        made.close()


def forked(work: Callable[[int], None]) -> tuple[int, int]:
    """(process, pipe) of a child that does `work` with the pipe's other end and exits."""
    ours, theirs = os.pipe()
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BrokenPipeError):
            os.close(ours)
            work(theirs)
            os._exit(0)
        os._exit(1)
    os.close(theirs)
    return process, ours


def lives(artifact: Any, key: NoiseKey, folder: Path, rounds: int, chance: random.Random, power: bool) -> None:
    """So many lives that are killed, and one that reaches the horizon."""
    for number in range(rounds + 1):
        last = number == rounds
        own = random.Random(chance.random())

        def work(pipe: int, own: random.Random = own, last: bool = last) -> None:
            life = Life(artifact, key, folder, pipe)
            if not last:
                life.pause = lambda: time.sleep(own.random() * 4e-4)
            if power:
                os.fsync = keeping(folder / "journal", folder / "kept")  # type: ignore[assignment]
            life.train(own, None if last else ROWS_A_LIFE)

        process, pipe = forked(work)
        events, delay = chance.randint(1, 22), chance.random() * 2e-3
        while chunk := os.read(pipe, 1 if not last else 1 << 16):
            events -= len(chunk)
            if events <= 0 and not last:
                time.sleep(delay)
                os.kill(process, signal.SIGKILL)
                break
        os.close(pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code != (0 if last else -signal.SIGKILL):
            raise SystemExit(f"life {number} ended with {code}")
        if power and not last:
            lose(folder / "journal", folder / "kept", chance)


def keeping(path: Path, note: Path) -> Callable[[int], None]:
    """os.fsync that notes how long the journal was; it is on the disk only once that is noted."""

    def fsync(handle: int) -> None:
        found = os.fstat(handle)
        if path.exists() and path.stat().st_ino == found.st_ino:
            note.with_suffix(".new").write_text(f"{found.st_ino} {found.st_size}")
            os.replace(note.with_suffix(".new"), note)

    return fsync


def lose(path: Path, note: Path, chance: random.Random) -> None:
    """Cut the journal anywhere between what was on the disk and all of it."""
    if not path.exists():
        return
    inode, kept = map(int, note.read_text().split()) if note.exists() else (0, 0)
    found = path.stat()
    os.truncate(path, chance.randint(kept if inode == found.st_ino else 0, found.st_size))


def killing(at: int) -> Callable[..., Any]:
    """A tracer that ends the process before the `at`-th line of journal.py, or of the stream's main methods."""
    left = [at]

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        if event in ("line", "return"):
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return local

    def tracer(frame: types.FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename == journal.__file__:
            return local if code.co_name not in ("_record", "_sign", "_canonical") else None  # they change nothing
        main = code.co_filename in (release.__file__, stream.__file__)
        return local if main and code.co_name in MAIN else None

    return tracer


def points(artifact: Any, key: NoiseKey, folder: Path, stride: int) -> None:
    """One life after a crash, killed before each line in turn (every `stride`-th of them); then another to the end."""
    os.fsync = lambda handle: None  # nothing here loses power, and there are many files
    base = folder / "base"
    base.mkdir()
    first = Life(artifact, key, base)
    made = first.begin()
    first.row(made)
    first.row(made)
    first.save(made)
    made.commit()
    first.row(made)
    made.close()

    def work(pipe: int, place: Path, at: int) -> None:
        life = Life(artifact, key, place, pipe)
        sys.settrace(killing(at))
        made = life.begin()
        life.row(made)
        life.save(made)
        life.say(f"saved {made.step}")
        made.commit()
        life.say(f"committed {made.step}")
        life.row(made)
        made.skip_to(6)
        life.say("skip 6")
        life.save(made)
        made.commit()
        life.row(made)

    for at in range(1, 100_000, stride):
        place = folder / f"point{at}"
        shutil.copytree(base, place)
        process, pipe = forked(lambda pipe, place=place, at=at: work(pipe, place, at))
        while os.read(pipe, 1 << 16):
            pass
        os.close(pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if code not in (0, -signal.SIGKILL):
            raise SystemExit(f"point {at} ended with {code}")
        life = Life(artifact, key, place)
        made = life.begin()
        for _ in range(3):
            life.row(made)
        life.end(made)
        if code == 0:
            return


def main() -> None:
    folder, mode, seed, rounds = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    artifact, key = mmfact.load(next(folder.glob("*.h5"))), NoiseKey.from_file(folder / "key")
    NoiseStream(artifact, SIZE, noise_multiplier=1.3, clip_norm=0.7, key=key, threads=1).next()  # kernels are loaded
    gc.freeze()  # forks are quicker
    gc.disable()
    if mode == "points":
        points(artifact, key, folder, rounds)
    else:
        lives(artifact, key, folder, rounds, random.Random(seed), power=mode == "power")


if __name__ == "__main__":
    main()
