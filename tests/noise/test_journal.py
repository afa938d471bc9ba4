"""The journal: written before a row leaves, true after every accident, and the only proof that none was issued."""

from __future__ import annotations

import errno
import functools
import hmac
import json
import os
import re
import signal
import stat
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.errors import HorizonError, MmfactError, StateError
from mmfact.noise import NoiseKey, NoiseStream
from mmfact.noise import journal as journal_module
from mmfact.noise import release as release_module
from mmfact.noise import stream as stream_module
from mmfact.noise.source import NoiseSource
from mmfact.noise.stepping import Stepper

STEPS = 12
SIZE = 5
Record = dict[str, Any]
RUN_FIELDS = (
    "run", "artifact", "key", "name", "offset", "size", "total", "space", "dtype", "noise_multiplier", "clip_norm",
)  # fmt: skip


def canonical(record: Record) -> bytes:
    return json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def signed_line(key: NoiseKey, run: Record, record: Record) -> bytes:
    """A line as the docstrings of journal.py and key.py say, HMAC-SHA256 over run and record."""
    text = canonical(record)
    message = b"mmfact journal" + canonical(run) + b"\t" + text
    return text + b"\t" + hmac.digest(key.reveal(), message, "sha256").hex().encode() + b"\n"


LINE = re.compile(rb"(\{[^\t]*\})\t[0-9a-f]{64}")


def records(path: Path) -> list[Record]:
    """What the file's whole lines say after the first."""
    lines = path.read_bytes().split(b"\n")[1:-1]
    return [json.loads(whole[1]) for line in lines if (whole := LINE.fullmatch(line))]


class Disk:
    """What would be left of a file after a loss of power: at least what was there at the last fsync of it."""

    def __init__(self) -> None:
        self.syncs = 0
        self._kept: dict[int, int] = {}

    def fsync(self, handle: int) -> None:
        """In place of os.fsync, and much faster."""
        found = os.fstat(handle)
        if stat.S_ISREG(found.st_mode):
            self.syncs += 1
            self._kept[found.st_ino] = found.st_size

    def kept(self, path: Path) -> int:
        return self._kept.get(path.stat().st_ino, 0)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    disk = Disk()
    monkeypatch.setattr(os, "fsync", disk.fsync)
    return disk


class Runs:
    """Runs of one artifact with journals in one folder."""

    def __init__(self, artifact: Any, stream: Any, key: NoiseKey, folder: Path) -> None:
        self.artifact, self.key, self.path = artifact, key, folder / "journal"
        self._stream = stream

    def start(self, **options: Any) -> NoiseStream:
        made: NoiseStream = self._stream(self.artifact, SIZE, **{"journal": self.path, "threads": 1, **options})
        return made

    def restore(self, state: Record, resume: str | None = None, **options: Any) -> NoiseStream:
        options = {"key": self.key, "journal": self.path, "threads": 1, **options}
        return NoiseStream.restore(options.pop("artifact", self.artifact), state, resume=resume, **options)

    def rows(self, run: bytes) -> Any:
        """The rows of an undisturbed stream that keeps no journal."""
        plain = self._stream(self.artifact, SIZE, run=run)
        return np.array([plain.next() for _ in range(STEPS)])


@pytest.fixture
def runs(built: Any, stream: Any, key: NoiseKey, tmp_path: Path) -> Runs:
    return Runs(built("buffered", "float32").artifact, stream, key, tmp_path)


def saved(made: NoiseStream, rows: int) -> Record:
    """The state after so many more rows, and its step committed."""
    for _ in range(rows):
        made.next()
    state = made.state_dict()
    made.commit()
    return state


# The file.


def test_a_run_as_its_journal_tells_it(runs: Runs) -> None:
    """Every row, commit, skip and restart has its line; the first line names the run."""
    made = runs.start(name="w", offset=3, total=20)
    state = saved(made, 3)
    made.next()
    made.skip_to(7)
    made.close()
    runs.restore(state, "unpublished").close()
    expected: list[Record] = [{"issued": 1}, {"issued": 2}, {"issued": 3}, {"committed": 3}, {"issued": 4}]
    expected += [{"skipped": 7}, {"resumed": 3, "declared": "unpublished", "reissued": 1}]
    assert records(runs.path) == expected
    lines = runs.path.read_bytes().splitlines(keepends=True)
    run = {name: state[name] for name in RUN_FIELDS}
    assert lines == [signed_line(runs.key, run, record) for record in ({"version": 1, **run}, *expected)]


def test_only_the_owner_may_read_it(runs: Runs) -> None:
    """Mode 0600 whatever the umask: it tells how far a run is."""
    for number, mask in enumerate((0, 0o022, 0o077)):
        path = runs.path.with_name(f"journal{number}")
        before = os.umask(mask)
        try:
            runs.start(journal=path)
        finally:
            os.umask(before)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_existing_file_is_another_run(runs: Runs, tmp_path: Path) -> None:
    """Neither overwritten nor continued by a new stream; the message says what to do. Links are not followed."""
    runs.start().close()
    content = runs.path.read_bytes()
    for path in (runs.path, str(runs.path)):
        with pytest.raises(StateError, match=r"restore.*another path"):
            runs.start(journal=path)
    assert runs.path.read_bytes() == content
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "link", tmp_path / "pipe"):
        with pytest.raises(StateError, match=str(path)):
            runs.start(journal=path)
    assert not (tmp_path / "nowhere").exists()


def test_a_path_that_cannot_be_written(runs: Runs, tmp_path: Path) -> None:
    """A missing folder, a file in place of one, a name too long: one clear error of ours that names it."""
    (tmp_path / "file").touch()
    made = runs.start()
    state = made.state_dict()
    made.close()
    for path in (tmp_path / "none" / "journal", tmp_path / "file" / "journal", tmp_path / ("x" * 300)):
        with pytest.raises(StateError, match=str(path)):
            runs.start(journal=path)
        with pytest.raises(StateError, match=str(path)):
            runs.restore(state, journal=path)


@pytest.mark.parametrize("path", [5, 1.5, True, [], {}, "a\0b"])
def test_what_is_no_path(path: Any, runs: Runs) -> None:
    """An error of ours that speaks of the journal, both from a new stream and from a restored one."""
    with pytest.raises(StateError, match="journal"):
        runs.start(journal=path)
    state = runs.start().state_dict()
    with pytest.raises(StateError, match="journal"):
        runs.restore(state, journal=path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"noise_multiplier": 0},
        {"clip_norm": float("nan")},
        {"noise_multiplier": 1e300},
        {"space": "both"},
        {"dtype": "float16"},
        {"offset": 1, "total": 2},
        {"threads": 0},
        {"run": b"short"},
        {"name": 5},
        {"key": "key"},
        {"total": 1 << 60},
    ],
)
def test_a_stream_that_is_not_made_leaves_no_file(wrong: Record, runs: Runs) -> None:
    """The corrected second attempt must not be told that its run has begun."""
    with pytest.raises(MmfactError):
        runs.start(**wrong)
    assert not runs.path.exists()
    runs.start()


def test_a_size_beyond_memory_leaves_no_file(runs: Runs, stream: Any) -> None:
    """It is refused before anything is allocated or written."""
    with pytest.raises(MmfactError, match="GiB"):
        stream(runs.artifact, 1 << 34, journal=runs.path)
    assert not runs.path.exists()


def full(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def short(real: Callable[[int, bytes], int], count: int) -> Callable[[int, bytes], int]:
    """os.write that takes only `count` bytes, as it does where a file system fills up in the middle."""
    return lambda handle, data: real(handle, bytes(data)[:count])


def disk_errors() -> list[Any]:
    write = os.write
    return [
        pytest.param("write", full, id="no space"),
        pytest.param("write", short(write, 0), id="nothing"),
        pytest.param("write", short(write, 1), id="a byte"),
        pytest.param("write", short(write, 40), id="half a line"),
        pytest.param("write", short(write, -1), id="all but the last byte"),
        pytest.param("fsync", full, id="not synced"),
    ]


@pytest.mark.parametrize(("call", "failing"), disk_errors())
def test_a_journal_that_cannot_begin_leaves_no_file(
    call: str, failing: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a first line would block the path for the second attempt."""
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(StateError, match="journal"):
            runs.start()
    assert not runs.path.exists()
    runs.start().next()


def test_a_folder_that_cannot_be_synced(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that a loss of power may remove is no journal: an error of ours, and no file."""
    monkeypatch.setattr(journal_module, "sync_directory", full)
    with pytest.raises(StateError, match="journal"):
        runs.start()
    assert not runs.path.exists()


# When it is written.


def test_the_line_comes_before_the_row(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the moment a row begins to be made, its line is in the file and the step is spent."""
    seen: list[tuple[int, int, int]] = []
    real = Stepper.piece

    def piece(self: Any, step: int, block: int, draw: Any, out: Any) -> None:
        assert np.isnan(out).all()
        seen.append((step, records(runs.path)[-1]["issued"], made.step))
        real(self, step, block, draw, out)

    monkeypatch.setattr(Stepper, "piece", piece)
    made = runs.start()
    for _ in range(STEPS):
        made.next(np.full(SIZE, np.nan, np.float32))
    assert seen == [(step, step + 1, step + 1) for step in range(STEPS)]


def test_what_is_written_through_to_the_disk(runs: Runs, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first row after a commit before it leaves, and every other record; but not every row, which would be slow."""
    made = runs.start()
    assert disk.syncs == 1
    at_row: list[int] = []
    real = Stepper.piece

    def piece(self: Any, *given: Any) -> None:
        at_row.append(disk.kept(runs.path))
        real(self, *given)

    monkeypatch.setattr(Stepper, "piece", piece)

    def syncs(call: Callable[[], Any]) -> int:
        before = disk.syncs
        call()
        if disk.syncs > before:
            assert disk.kept(runs.path) == runs.path.stat().st_size
        return disk.syncs - before

    assert [syncs(made.next) for _ in range(3)] == [1, 0, 0]
    assert at_row[0] == at_row[2]  # the first row's line was on the disk before its row was made
    size = runs.path.stat().st_size
    assert syncs(made.state_dict) == 0
    assert runs.path.stat().st_size == size
    assert syncs(made.commit) == 1
    assert [syncs(made.next) for _ in range(3)] == [1, 0, 0]
    made.state_dict()
    assert syncs(made.next) == 0
    assert syncs(made.commit) == 1  # of a step before the latest row
    assert syncs(made.next) <= 1
    assert syncs(made.next) == 0
    assert syncs(lambda: made.skip_to(10)) == 1
    state = made.state_dict()
    made.close()
    before = disk.syncs
    again = runs.restore(state, "unpublished")
    assert disk.syncs == before + 1
    assert [syncs(again.next) for _ in range(2)] == [1, 0]


# Going on.


def test_only_a_durable_state_without_rows_since_is_clean(runs: Runs) -> None:
    """Saved, committed, nothing issued since: no declaration, and none goes on record, even if one is given."""
    made = runs.start()
    expected = runs.rows(made.run)
    state = saved(made, 3)
    made.close()
    for resume in (None, "unpublished"):
        made = runs.restore(state, resume)
        assert made.ledger()["resumes"][-1] == {"step": 3, "declared": None, "reissued": 0}
        made.close()
    made = runs.restore(state)
    np.testing.assert_array_equal([made.next() for _ in range(STEPS - 3)], expected[3:])
    with pytest.raises(HorizonError):
        made.next()


def test_a_run_that_issued_nothing_is_clean(runs: Runs) -> None:
    """Step 0, never committed: there is nothing that could come twice."""
    made = runs.start()
    state = made.state_dict()
    made.close()
    assert runs.restore(state).step == 0


def unclean(made: NoiseStream, what: str) -> Record:
    """A state after which `what` happened."""
    state = saved(made, 3)
    if what == "a row":
        made.next()
    elif what == "many rows":
        for _ in range(5):
            made.next()
    elif what == "no commit":
        made.next()
        state = made.state_dict()
    elif what == "a commit of an earlier state":
        made.next()
        state = made.state_dict()
        made.commit(3)
    elif what == "a skip, not committed":
        made.skip_to(6)
        state = made.state_dict()
    elif what == "a row that failed":
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NoiseSource, "fill", full)
            with pytest.raises(OSError, match="space"):
                made.next()
    return state


@pytest.mark.parametrize(
    ("what", "step", "reissued"),
    [
        ("a row", 3, 1),
        ("many rows", 3, 5),
        ("no commit", 4, 0),
        ("a commit of an earlier state", 4, 0),
        ("a skip, not committed", 6, 0),
        ("a row that failed", 3, 1),
    ],
)
@pytest.mark.parametrize("wrong", [None, "", "published", "UNPUBLISHED", True, b"unpublished"])
def test_anything_else_needs_the_declaration(what: str, step: int, reissued: int, wrong: Any, runs: Runs) -> None:
    """Rows may come twice: refused as often as it is tried, then allowed with the declaration, which is on record."""
    made = runs.start()
    expected = runs.rows(made.run)
    state = unclean(made, what)
    made.close()
    content = runs.path.read_bytes()
    for _ in range(3):
        reason = f"{reissued} or more rows" if reissued else rf"no commit\(\) of step {step}"
        refusal = f'{reason}.*resume="unpublished"' if wrong is None else "only declaration is 'unpublished'"
        with pytest.raises(StateError, match=refusal):
            runs.restore(state, wrong)
        assert runs.path.read_bytes() == content
    made = runs.restore(state, "unpublished")
    entry = {"step": step, "declared": "unpublished", "reissued": reissued}
    assert made.ledger()["resumes"] == [entry]
    assert records(runs.path)[-1] == {"resumed": step, "declared": "unpublished", "reissued": reissued}
    np.testing.assert_array_equal([made.next() for _ in range(STEPS - step)], expected[step:])


def test_only_a_step_that_was_saved_can_be_committed(runs: Runs) -> None:
    """A commit of a step without a checkpoint would leave the run nothing to go on from."""
    made = runs.start()
    with pytest.raises(StateError, match="state_dict"):
        made.commit()
    for _ in range(2):
        made.next()
        made.next()
        made.state_dict()
    made.next()
    for step in (0, 1, 3, 5):
        with pytest.raises(StateError, match=f"step {step} cannot be committed"):
            made.commit(step)
    made.commit(2)
    made.commit()
    with pytest.raises(StateError, match="step 2 cannot be committed"):
        made.commit(2)
    assert made.ledger()["committed"] == 4


def test_a_journal_needs_a_key_that_outlives_the_process(runs: Runs, stream: Any) -> None:
    """With a key of the stream's own nobody could go on, whatever the journal says."""
    with pytest.raises(StateError, match="generate"):
        stream(key=None, journal=runs.path)
    assert not runs.path.exists()


def test_a_state_from_before_the_last_commit_is_never_used(runs: Runs) -> None:
    """Its rows were said to be final: refused with the declaration as well, and after a restart too."""
    made = runs.start()
    first, second = saved(made, 2), saved(made, 2)
    made.close()
    for _ in range(2):
        for resume in (None, "unpublished"):
            with pytest.raises(StateError, match=r"step 2.*step 4 was committed"):
                runs.restore(first, resume)
        made = runs.restore(second)
        made.next()
        made.close()
        runs.restore(second, "unpublished").close()


def test_a_restored_state_is_a_commit(runs: Runs) -> None:
    """Saved but not committed, and restored: earlier states are too old from then on."""
    made = runs.start()
    first = saved(made, 2)
    made.next()
    second = made.state_dict()
    made.close()
    runs.restore(second, "unpublished").close()
    with pytest.raises(StateError, match=r"step 2.*step 3 was committed"):
        runs.restore(first, "unpublished")
    made = runs.restore(second)
    assert made.ledger()["committed"] == 3


def test_checkpoints_written_while_training_goes_on(runs: Runs) -> None:
    """commit(step) says which state is durable; rows after that step need the declaration, however late it came."""
    made = runs.start()
    states = {}
    for step in (2, 4, 6):
        made.next()
        made.next()
        states[step] = made.state_dict()
    made.next()
    made.commit(4)
    assert records(runs.path)[-1] == {"committed": 4}
    made.close()
    with pytest.raises(StateError, match="was committed"):
        runs.restore(states[2], "unpublished")
    for step in (4, 6):
        with pytest.raises(StateError, match="unpublished"):
            runs.restore(states[step])
    made = runs.restore(states[4], "unpublished")
    assert made.ledger()["resumes"] == [{"step": 4, "declared": "unpublished", "reissued": 3}]


def test_every_restart_is_in_the_ledger(runs: Runs) -> None:
    """Also those of processes that died before they saved a state: a signer must see every declaration."""
    made = runs.start()
    state = saved(made, 3)
    made.next()
    made.next()
    made.close()
    expected: list[Record] = []
    for rows, entry in (
        (1, {"step": 3, "declared": "unpublished", "reissued": 2}),
        (0, {"step": 3, "declared": "unpublished", "reissued": 1}),
        (0, {"step": 3, "declared": None, "reissued": 0}),
    ):
        made = runs.restore(state, "unpublished")
        expected.append(entry)
        assert made.ledger()["resumes"] == made.state_dict()["resumes"] == expected
        for _ in range(rows):
            made.next()
        made.close()


def test_skipped_rows_stay_skipped(runs: Runs) -> None:
    """Saved after a skip: the restored run goes on after it."""
    made = runs.start()
    expected = runs.rows(made.run)
    made.next()
    made.skip_to(5)
    state = saved(made, 0)
    made.close()
    made = runs.restore(state)
    assert (made.step, made.ledger()["skipped"], made.ledger()["issued"]) == (5, 4, 1)
    np.testing.assert_array_equal(made.next(), expected[5])


# Journals and states that do not belong together.


def test_a_run_keeps_its_journal(runs: Runs, tmp_path: Path) -> None:
    """Not given, nobody would know; and one that begins later could not tell what was issued before."""
    made = runs.start()
    state = saved(made, 2)
    made.close()
    for resume in (None, "unpublished"):
        with pytest.raises(StateError, match="journal="):
            runs.restore(state, resume, journal=None)
    plain = runs.start(journal=None)
    plain.next()
    other = plain.state_dict()
    for path in (runs.path, tmp_path / "new"):
        with pytest.raises(StateError, match="keeps no journal"):
            runs.restore(other, "unpublished", journal=path)
    assert not (tmp_path / "new").exists()
    assert runs.restore(state).step == 2


@pytest.mark.parametrize("resume", [None, "unpublished"])
def test_the_journal_of_another_run(resume: str | None, runs: Runs, tmp_path: Path) -> None:
    """Another nonce, key, tensor, shard, size, scale, space or dtype: its rows say nothing about this run's."""
    made = runs.start()
    state = saved(made, 2)
    made.close()
    differences: list[Record] = [
        {},
        {"run": made.run, "name": "v"},
        {"run": made.run, "offset": 1},
        {"run": made.run, "total": 20},
        {"run": made.run, "noise_multiplier": 1.4},
        {"run": made.run, "clip_norm": 0.8},
        {"run": made.run, "space": "iterate"},
        {"run": made.run, "dtype": "float64"},
        {"run": made.run, "key": NoiseKey.insecure_from_seed(5)},
    ]
    for number, options in enumerate(differences):
        path = tmp_path / f"other{number}"
        runs.start(journal=path, **options).close()
        content = path.read_bytes()
        with pytest.raises(StateError, match="not a journal of this run and key"):
            runs.restore(state, resume, journal=path)
        assert path.read_bytes() == content
    assert runs.restore(state).step == 2


def test_another_artifact_or_key_is_refused_before_the_journal_is_touched(runs: Runs, case: Any) -> None:
    """What does not belong to the state is the first thing to say, and the journal stays free."""
    made = runs.start()
    state = saved(made, 2)
    made.close()
    content = runs.path.read_bytes()
    with pytest.raises(StateError, match="artifact"):
        runs.restore(state, artifact=case("momentum").artifact)
    with pytest.raises(StateError, match="key"):
        runs.restore(state, key=NoiseKey.insecure_from_seed(5))
    with pytest.raises(StateError, match="signature"):
        runs.restore({**state, "step": 1}, "unpublished")
    assert runs.path.read_bytes() == content
    assert runs.restore(state).step == 2


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"\t\n", b"\n\n\n", b"text\n", b"{}\t\n", b"\x00" * 1000, b"\xff\n" * 100, b"[1]\t00\n"]
)
def test_what_is_no_journal(content: bytes, runs: Runs, tmp_path: Path) -> None:
    """Another file under its name: refused and left as it is, for it may be somebody's."""
    made = runs.start()
    state = saved(made, 2)
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(StateError, match="not a journal"):
        runs.restore(state, "unpublished", journal=tmp_path / "other")
    assert (tmp_path / "other").read_bytes() == content


def test_a_journal_that_is_gone_or_no_file(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without it nobody knows which rows were issued; nothing is made in its place, and nothing hangs."""
    made = runs.start()
    state = saved(made, 2)
    made.close()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "none", tmp_path, tmp_path / "pipe"):
        with pytest.raises(StateError, match=str(path)):
            runs.restore(state, "unpublished", journal=path)
    assert not (tmp_path / "none").exists()
    with monkeypatch.context() as patch:
        patch.setattr(os, "pread", lambda *_: (_ for _ in ()).throw(OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(StateError, match=str(runs.path)):
            runs.restore(state, "unpublished")
    assert runs.restore(state).step == 2


@pytest.mark.parametrize("version", [0, 2, "1", None, 1.5])
def test_another_version_is_refused(version: Any, runs: Runs) -> None:
    """A later layout must not be guessed at, even where the key's holder wrote it."""
    made = runs.start()
    state = saved(made, 2)
    made.close()
    run = {name: state[name] for name in RUN_FIELDS}
    lines = runs.path.read_bytes().splitlines(keepends=True)
    assert lines[0] == signed_line(runs.key, run, {"version": 1, **run})
    content = signed_line(runs.key, run, {"version": version, **run}) + b"".join(lines[1:])
    runs.path.write_bytes(content)
    for resume in (None, "unpublished"):
        with pytest.raises(StateError, match="version"):
            runs.restore(state, resume)
    assert runs.path.read_bytes() == content


# Damage.


@pytest.fixture
def damaged(runs: Runs) -> tuple[Record, bytes, int]:
    """(state of step 3, the journal of a run that issued 3 rows since, where the first of their lines ends)."""
    made = runs.start()
    saved(made, 2)
    state = saved(made, 1)
    made.next()
    first = runs.path.stat().st_size
    made.next()
    made.next()
    made.close()
    return state, runs.path.read_bytes(), first


def refused(runs: Runs, state: Record, content: bytes) -> bool:
    """Whether a journal of this content keeps refusing the state without the declaration: two attempts."""
    with open(runs.path, "r+b") as file:  # in place: to begin anew makes some file systems wait for the disk
        file.write(content)
        file.truncate()
    for _ in range(2):
        try:
            runs.restore(state).close()
        except StateError:
            continue
        return False
    return True


def test_a_journal_cut_anywhere_is_no_proof(damaged: Any, runs: Runs, disk: Disk) -> None:
    """Rows were issued: cut at any byte, however often it is tried. The one exception is where it was clean once.

    There the journal ends with the commit, whole: no loss of power leaves that, since the line that follows was on the
    disk before its row left.
    """
    state, content, first = damaged
    clean = first - len(content[:first].splitlines(keepends=True)[-1])
    assert clean < first
    assert [cut for cut in range(len(content) + 1) if not refused(runs, state, content[:cut])] == [clean]


def test_every_flipped_byte_is_noticed(damaged: Any, runs: Runs, disk: Disk) -> None:
    """One bit of each byte (drawn with a seed), and each byte turned into a newline, one at a time."""
    state, content, _ = damaged
    random = np.random.default_rng(11)
    for at in range(len(content)):
        for other in {content[at] ^ 1 << int(random.integers(8)), 10} - {content[at]}:
            changed = bytearray(content)
            changed[at] = other
            assert refused(runs, state, bytes(changed)), (at, other)


def test_a_lost_or_foreign_piece_is_noticed(damaged: Any, runs: Runs, disk: Disk, tmp_path: Path) -> None:
    """Zeros at the end (a file system that lost the last blocks), garbage, a piece missing, another run's lines."""
    state, content, first = damaged
    runs.start(journal=tmp_path / "other").next()
    foreign = (tmp_path / "other").read_bytes()
    clean = first - len(content[:first].splitlines(keepends=True)[-1])
    for tail in (b"\0" * 80, b"garbage", b"garbage\n", b"\n", b"\n\n", content[first:][:-1], b"\xff" * 80, foreign):
        assert refused(runs, state, content[:clean] + tail), tail
        assert refused(runs, state, content + tail), tail
    for start in range(0, first, 7):
        assert refused(runs, state, content[:start] + content[start + 5 :]), start


@pytest.mark.parametrize("tail", [b"", b'{"issu', b"garbage\n", b"\0" * 80, b"\n", b'{"issued":7}\t00\n'])
def test_a_declared_restart_goes_on_with_a_damaged_journal(tail: bytes, damaged: Any, runs: Runs) -> None:
    """The declaration covers what was lost; what is written afterwards is believed, and a later crash is noticed."""
    state, content, _ = damaged
    expected = runs.rows(bytes.fromhex(state["run"]))
    runs.path.write_bytes(content + tail)
    made = runs.restore(state, "unpublished")
    np.testing.assert_array_equal(made.next(), expected[3])
    made.close()
    for _ in range(2):
        with pytest.raises(StateError, match="1 or more"):
            runs.restore(state)
    made = runs.restore(state, "unpublished")
    later = saved(made, 2)
    made.close()
    with pytest.raises(StateError, match="was committed"):
        runs.restore(state, "unpublished")
    made = runs.restore(later)
    np.testing.assert_array_equal(made.next(), expected[5])


def test_a_damaged_line_does_not_hide_a_later_commit(damaged: Any, runs: Runs) -> None:
    """A flipped bit early in the file: what comes after it is still signed, so too old a state is still refused."""
    state, content, _ = damaged
    older = runs.start(run=bytes.fromhex(state["run"]), journal=runs.path.with_name("other"))
    older.next()
    early = older.state_dict()
    lines = content.splitlines(keepends=True)
    lines[1] = b"x" + lines[1][1:]
    runs.path.write_bytes(b"".join(lines))
    with pytest.raises(StateError, match="step 3 was committed"):
        runs.restore(early, "unpublished")
    with pytest.raises(StateError, match="3 or more"):
        runs.restore(state)


# One stream at a time.


def test_two_streams_never_share_a_journal(runs: Runs) -> None:
    """Two would issue the same rows: refused until the first is closed, with and without the declaration."""
    made = runs.start()
    state = saved(made, 2)
    for resume in (None, "unpublished"):
        with pytest.raises(StateError, match=r"in use.*close\(\)"):
            runs.restore(state, resume)
    made.close()
    again = runs.restore(state)
    with pytest.raises(StateError, match="in use"):
        runs.restore(state)
    again.next()
    del again  # not closed, but gone
    runs.restore(state, "unpublished")


def test_a_refused_restart_leaves_the_journal_free(runs: Runs) -> None:
    """A declaration that was forgotten is given in the second attempt, in the same process."""
    made = runs.start()
    state = saved(made, 2)
    made.next()
    made.close()
    caught = []
    for broken in ({}, {"buffers": []}):
        with pytest.raises(StateError) as error:
            runs.restore({**state, **broken}, "unpublished" if broken else None)
        caught.append(error)  # its traceback holds every frame
    assert runs.restore(state, "unpublished").step == 2


def test_a_closed_stream_issues_nothing(runs: Runs) -> None:
    """Another stream may have its journal by now; what it did can still be read."""
    made = runs.start()
    state = saved(made, 2)
    made.close()
    made.close()
    content = runs.path.read_bytes()
    for call in (made.next, made.state_dict, made.commit, functools.partial(made.skip_to, 5)):
        with pytest.raises(StateError, match="closed"):
            call()
    del call
    assert runs.path.read_bytes() == content
    assert (made.step, made.ledger()["committed"]) == (2, 2)
    again = runs.restore(state)
    made.close()
    del made
    with pytest.raises(StateError, match="in use"):
        runs.restore(state)
    again.next()


class Child:
    """A fork that does `work` with one end of a pipe, and the pipe's other end."""

    def __init__(self, work: Callable[[int], None]) -> None:
        self.pipe, theirs = os.pipe()
        self.process = os.fork()
        if self.process == 0:
            code = 1
            try:
                os.close(self.pipe)
                work(theirs)
                code = 0
            finally:
                os._exit(code)
        os.close(theirs)

    def end(self, number: int | None = None) -> int:
        """Its exit status, after a signal if one is given."""
        if self.process == 0:
            return 0
        if number is not None:
            os.kill(self.process, number)
        os.close(self.pipe)
        process, self.process = self.process, 0
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@pytest.fixture
def fork() -> Iterator[Callable[[Callable[[int], None]], Child]]:
    """fork(work): a Child, which ends with the test at the latest."""
    children: list[Child] = []

    def make(work: Callable[[int], None]) -> Child:
        children.append(Child(work))
        return children[-1]

    yield make
    for child in children:
        child.end(signal.SIGKILL)


def test_another_process_is_kept_out(runs: Runs, fork: Any) -> None:
    """It is told so, with and without the declaration, and writes nothing."""
    made = runs.start()
    state = saved(made, 2)

    def work(pipe: int) -> None:
        for resume in (None, "unpublished"):
            with pytest.raises(StateError, match="in use"):
                runs.restore(state, resume)
        os.write(pipe, b"x")

    content = runs.path.read_bytes()
    child = fork(work)
    assert os.read(child.pipe, 1) == b"x"
    assert child.end() == 0
    assert runs.path.read_bytes() == content
    made.next()


def test_a_process_that_was_killed_leaves_the_journal_free(runs: Runs, fork: Any) -> None:
    """While it lives it is in the way; after kill -9 the run goes on at once, and its row is known."""
    made = runs.start()
    state = saved(made, 2)
    made.close()

    def work(pipe: int) -> None:
        theirs = runs.restore(state)
        os.write(pipe, theirs.next().tobytes())
        time.sleep(60)

    child = fork(work)
    row = os.read(child.pipe, 4 * SIZE)
    with pytest.raises(StateError, match="in use"):
        runs.restore(state, "unpublished")
    assert child.end(signal.SIGKILL) == -signal.SIGKILL
    with pytest.raises(StateError, match="1 or more"):
        runs.restore(state)
    assert runs.restore(state, "unpublished").next().tobytes() == row


def test_a_child_process_does_not_hold_the_journal(runs: Runs, fork: Any) -> None:
    """Workers of a data loader inherit every open file: close() in the parent must let go all the same."""
    made = runs.start()
    state = saved(made, 2)

    def work(pipe: int) -> None:
        os.write(pipe, b"x")
        time.sleep(60)

    child = fork(work)
    assert os.read(child.pipe, 1) == b"x"
    made.close()
    runs.restore(state).next()
    assert child.end(signal.SIGKILL) == -signal.SIGKILL  # it lived until now


def test_a_child_process_cannot_let_go_of_the_journal(runs: Runs, fork: Any) -> None:
    """A fork that closes or drops its copy of the stream must leave the parent's lock in place."""
    held = [runs.start()]
    state = saved(held[0], 2)

    def work(pipe: int) -> None:
        for call in (held[0].next, held[0].state_dict, held[0].commit):
            with pytest.raises(StateError, match="fork"):
                call()
        held[0].close()
        held.clear()
        os.write(pipe, b"x")

    child = fork(work)
    assert os.read(child.pipe, 1) == b"x"
    assert child.end() == 0
    with pytest.raises(StateError, match="in use"):
        runs.restore(state)
    assert records(runs.path)[-1] == {"committed": 2}
    held[0].next()


def test_threads_share_a_stream(runs: Runs) -> None:
    """Four threads draw the rows of one stream: each step once, and its lines in order."""
    made = runs.start()
    expected = runs.rows(made.run)
    rows: list[Any] = []

    def work() -> None:
        for _ in range(STEPS // 4):
            rows.append(made.next())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(row.tobytes() for row in rows) == sorted(row.tobytes() for row in expected)
    assert records(runs.path) == [{"issued": step} for step in range(1, STEPS + 1)]


# A disk that is full, and other failures.


@pytest.mark.parametrize(("call", "failing"), disk_errors())
def test_a_row_without_its_line_is_not_issued(
    call: str, failing: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """StateError, the step unspent, `out` untouched and the file as before; with space again it goes on."""
    made = runs.start()
    expected = runs.rows(made.run)
    saved(made, 2)
    for step in (2, 3):
        content = runs.path.read_bytes()
        out = np.full(SIZE, np.nan, np.float32)
        if step == 2 or call == "write":  # the second row after a commit is not synced
            with monkeypatch.context() as patch:
                patch.setattr(os, call, failing)
                for _ in range(2):
                    with pytest.raises(StateError, match=r"journal.*nothing was issued"):
                        made.next(out)
        assert made.step == step
        assert np.isnan(out).all()
        assert runs.path.read_bytes() == content
        np.testing.assert_array_equal(made.next(out), expected[step])
    assert records(runs.path) == [{"issued": 1}, {"issued": 2}, {"committed": 2}, {"issued": 3}, {"issued": 4}]


@pytest.mark.parametrize(("call", "failing"), disk_errors())
def test_what_is_not_recorded_has_not_happened(
    call: str, failing: Any, runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit, a skip and a restart that cannot be written: refused, all as before, and fine afterwards."""
    made = runs.start()
    saved(made, 2)
    made.next()
    state = made.state_dict()
    content = runs.path.read_bytes()
    before = made.ledger()
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        for attempt in (made.commit, lambda: made.skip_to(6)):
            with pytest.raises(StateError, match="journal"):
                attempt()
        assert made.ledger() == before
        made.close()
        with pytest.raises(StateError, match="journal"):
            runs.restore(state, "unpublished")
    assert runs.path.read_bytes() == content
    for _ in range(2):
        with pytest.raises(StateError, match=r"or more rows|no commit"):
            runs.restore(state)
    made = runs.restore(state, "unpublished")
    made.skip_to(6)
    saved(made, 1)
    assert made.ledger()["committed"] == 7


def test_a_commit_that_failed_may_be_on_the_disk(runs: Runs, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of fsync does not say what was written: the next row's line must replace it before the row leaves."""
    made = runs.start()
    saved(made, 2)
    made.next()
    made.next()
    state = made.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StateError):
            made.commit()
    synced = disk.syncs
    made.next()
    assert disk.syncs > synced
    made.close()
    assert refused(runs, state, runs.path.read_bytes())


def test_a_failure_that_cannot_be_undone(runs: Runs, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line cannot be taken back either (the disk is failing): whatever is written later, no row is forgotten."""
    made = runs.start()
    saved(made, 2)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        patch.setattr(os, "ftruncate", full)
        with pytest.raises(StateError):
            made.next()
    made.next()
    state = saved(made, 0)
    made.next()  # after the last commit
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StateError):
            made.next()
    made.close()
    assert refused(runs, state, runs.path.read_bytes())


# Ctrl-C.

FILES = {
    module.__file__: Path(str(module.__file__)).read_text().splitlines()
    for module in (journal_module, release_module, stream_module)
}


def dying(frame: types.FrameType | None) -> bool:
    """In a finalizer, whose exceptions go nowhere."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False


def interrupted(at: int, call: Callable[[], Any]) -> bool:
    """Whether `call` was interrupted before its `at`-th line, or return, in journal.py, release.py and stream.py.

    `with` lines are left out: a tracer sees them again between body and release, where no signal is ever handled.
    """
    points = 0

    def local(frame: types.FrameType, event: str, arg: Any) -> Any:
        nonlocal points
        code = FILES[frame.f_code.co_filename][frame.f_lineno - 1]
        if event in ("line", "return") and not code.strip().startswith("with "):
            points += 1
            if points == at:
                raise KeyboardInterrupt
        return local

    def tracer(frame: types.FrameType, event: str, arg: Any) -> Any:
        ours = frame.f_code.co_filename in FILES and not dying(frame)
        return local if ours else None

    before = sys.gettrace()
    sys.settrace(tracer)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@pytest.mark.parametrize("action", ["next", "commit", "skip", "state"])
@pytest.mark.parametrize("accident", ["killed", "power lost", "disk full"])
def test_interrupted_before_each_line_of_an_action(action: str, accident: str, runs: Runs, disk: Disk) -> None:
    """The run goes on after Ctrl-C, commits, issues one more row and dies: that row is never forgotten.

    The journal must hold for a row whose line is written but which was interrupted before it left, and its bookkeeping
    for every later accident: kill -9, the loss of all that was not synced, a write that fails.
    """
    expected = None
    for at in range(1, 1000):
        path = runs.path.with_name(f"journal{at}")
        made = runs.start(journal=path, run=bytes(16))
        expected = runs.rows(made.run) if expected is None else expected
        saved(made, 2)
        if action != "next":
            made.next()
            made.state_dict()
        skip = functools.partial(made.skip_to, 5)
        hit = interrupted(
            at, {"next": made.next, "commit": made.commit, "skip": skip, "state": made.state_dict}[action]
        )
        assert not made._lock.locked()
        ledger = made.ledger()
        assert ledger["issued"] + ledger["skipped"] == made.step
        # going on: a row whose line was written twice, and then a clean point
        step = made.step
        np.testing.assert_array_equal(made.next(), expected[step])
        state = made.state_dict()
        made.commit()
        np.testing.assert_array_equal(made.next(), expected[step + 1])
        if accident == "disk full":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(os, "write", full)
                with pytest.raises(StateError):
                    made.next()
        made.close()
        content = path.read_bytes()
        if accident == "power lost":
            content = content[: disk.kept(path)]
        path.write_bytes(content)
        for _ in range(2):
            with pytest.raises(StateError, match=r"or more rows|no commit"):
                runs.restore(state, journal=path)
        made = runs.restore(state, "unpublished", journal=path)
        np.testing.assert_array_equal(made.next(), expected[step + 1])
        made.close()
        if not hit:
            break
    assert at > 10  # the tracer did see the code


@pytest.mark.parametrize("accident", ["killed", "power lost"])
def test_interrupted_before_each_line_of_a_commit_and_no_other(accident: str, runs: Runs, disk: Disk) -> None:
    """Ctrl-C in the commit, another row, and the end: whether or not the commit counts, the row does."""
    for at in range(1, 1000):
        path = runs.path.with_name(f"journal{at}")
        made = runs.start(journal=path, run=bytes(16))
        saved(made, 2)
        made.next()
        state = made.state_dict()
        hit = interrupted(at, made.commit)
        made.next()
        made.close()
        content = path.read_bytes()
        path.write_bytes(content[: disk.kept(path)] if accident == "power lost" else content)
        for _ in range(2):
            with pytest.raises(StateError, match=r"or more rows|no commit"):
                runs.restore(state, journal=path)
        if not hit:
            break
    assert at > 10


def test_interrupted_before_each_line_of_a_restart(runs: Runs, disk: Disk) -> None:
    """A restart that was interrupted issued nothing and can be made again; the journal is free."""
    for at in range(1, 1000):
        path = runs.path.with_name(f"journal{at}")
        made = runs.start(journal=path, run=bytes(16))
        state = saved(made, 2)
        made.next()
        made.close()
        hit = interrupted(at, lambda state=state, path=path: runs.restore(state, "unpublished", journal=path))
        again = runs.restore(state, "unpublished", journal=path)
        assert again.step == 2
        assert any(record.get("declared") == "unpublished" for record in records(path) if "resumed" in record)
        again.close()
        if not hit:
            break
    assert at > 30


# Everything in any order, against a model.


class Model:
    """What may happen to a run, in plain Python: the journal as a list of records, and who saw which row."""

    def __init__(self) -> None:
        self.records: list[tuple[str, int]] = []
        self.intact = True
        self.resumes: list[Record] = []
        self.exposed: set[int] = set()
        """Rows that were issued and that no later declaration says were kept inside."""
        self.begin(0, 0)

    def begin(self, step: int, skipped: int) -> None:
        self.step, self.skipped, self.committed = step, skipped, step
        self.saved = [step]

    def said(self) -> tuple[int, int]:
        """(issued, committed) of the journal since the last restart."""
        issued = committed = 0
        for kind, step in self.records:
            if kind == "resumed":
                issued = committed = step
            elif kind == "issued":
                issued = step
            else:
                committed = step
        return issued, committed

    def issue(self) -> None:
        assert self.step not in self.exposed, f"row {self.step} serves two releases, and nobody declared it"
        self.exposed.add(self.step)
        self.records.append(("issued", self.step + 1))
        self.step += 1

    def allows(self, step: int, declared: bool) -> bool:
        issued, committed = self.said()
        clean = self.intact and issued <= committed and step == committed
        return step >= committed and (declared or clean)

    def resume(self, step: int, skipped: int) -> None:
        """A restart that was allowed."""
        issued, committed = self.said()
        clean = self.intact and issued <= committed and step == committed
        declared = None if clean else "unpublished"
        self.resumes.append({"step": step, "declared": declared, "reissued": max(issued - step, 0)})
        if clean:
            assert not any(row >= step for row in self.exposed), "a clean restart, but rows were issued since"
        else:
            self.exposed = {row for row in self.exposed if row < step}
        self.records.append(("resumed", step))
        self.intact = True
        self.begin(step, skipped)


@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_events(seed: int, runs: Runs, disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """20 runs of 60 events a seed: rows, skips, states, commits, full disks, crashes, lost power, restarts of any kind.

    Every row is that of an undisturbed stream, none comes twice without a declaration on record, what is allowed is
    what the model allows, and the ledger says what happened.
    """
    monkeypatch.setattr(release_module, "version", lambda name: name)  # for the ledger; to look it up takes longest
    random = np.random.default_rng(seed)
    restarts = {"clean": 0, "declared": 0, "refused": 0}
    expected = None
    for number in range(20):
        path = runs.path.with_name(f"journal{seed}-{number}")
        made: NoiseStream | None = runs.start(journal=path, run=bytes(16))
        expected = runs.rows(made.run) if expected is None else expected
        model = Model()
        states = [(made.state_dict(), 0, 0)]
        for _ in range(60):
            event = str(random.choice(EVENTS, p=CHANCES)) if made is not None else "restore"
            if event == "restore":
                if made is not None:
                    continue
                state, step, skipped = states[int(random.integers(len(states)))]
                if random.random() < 0.7:
                    state, step, skipped = states[-1]
                declared = bool(random.random() < 0.5)
                if not model.allows(step, declared):
                    with pytest.raises(StateError):
                        runs.restore(state, "unpublished" if declared else None, journal=path)
                    restarts["refused"] += 1
                    continue
                made = runs.restore(state, "unpublished" if declared else None, journal=path)
                model.resume(step, skipped)
                restarts["clean" if model.resumes[-1]["declared"] is None else "declared"] += 1
            elif made is None:
                raise AssertionError
            elif event == "next" and model.step == STEPS:
                with pytest.raises(HorizonError):
                    made.next()
            elif event == "next":
                np.testing.assert_array_equal(made.next(), expected[model.step])
                model.issue()
            elif event == "full":
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(os, "write", short(os.write, int(random.integers(60))))
                    for call in (made.next, lambda made=made: made.skip_to(STEPS)):
                        with pytest.raises(MmfactError):
                            call()
            elif event == "skip":
                to = min(model.step + int(random.integers(3)), STEPS)
                made.skip_to(to)
                model.skipped += to - model.step
                model.step = to
            elif event == "save":
                states.append((made.state_dict(buffers=bool(random.random() < 0.5)), model.step, model.skipped))
                model.saved.append(model.step)
            elif event == "commit":
                step = int(random.integers(STEPS + 1)) if random.random() < 0.3 else max(model.saved)
                if step in model.saved and step >= model.committed:
                    made.commit(step)
                    model.committed = step
                    model.records.append(("committed", step))
                else:
                    with pytest.raises(StateError):
                        made.commit(step)
            else:
                made.close()
                made = None
                if event == "power":
                    cut = int(random.integers(disk.kept(path), path.stat().st_size + 1))
                    content = path.read_bytes()[:cut]
                    path.write_bytes(content)
                    whole = [record for record in records(path) if "skipped" not in record]
                    model.records = model.records[: len(whole)]
                    model.intact = model.intact and content.endswith(b"\n")
            if made is not None:
                ledger = made.ledger()
                assert (made.step, ledger["issued"]) == (model.step, model.step - model.skipped)
                assert (ledger["skipped"], ledger["committed"]) == (model.skipped, model.committed)
                assert ledger["resumes"] == model.resumes
        if made is not None:
            made.close()
    assert min(restarts.values()) >= 15, restarts


EVENTS = ("next", "save", "commit", "skip", "full", "crash", "power")
CHANCES = (0.36, 0.15, 0.19, 0.04, 0.04, 0.12, 0.10)
