"""Publication: a file appears whole or not at all, whatever fails and whoever looks or writes at the same time."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import StoreError
from mmfact.store import format, publish
from mmfact.store.store import ArtifactStore, read


def files(store: ArtifactStore) -> list[str]:
    return sorted(str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file())


def failing(real, number, error):
    """`real`, but its call number `number` (1 is the first) raises `error`."""
    calls = []

    def call(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            raise error
        return real(*arguments, **options)

    call.calls = calls
    return call


def no_space() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


# Every system call between the bytes and the ref: (module attribute, which call of it in one `save`).
STAGES = [
    ("tempfile.mkstemp", 1),
    ("os.fdopen", 1),
    ("os.fchmod", 1),
    ("os.fsync", 1),
    ("os.link", 1),
    ("os.fsync", 2),
    ("tempfile.mkstemp", 2),
    ("os.fdopen", 2),
    ("os.fsync", 3),
    ("os.link", 2),
    ("os.fsync", 4),
]


@pytest.mark.parametrize(("call", "number"), STAGES, ids=lambda part: str(part))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO, errno.EACCES], ids=["ENOSPC", "EIO", "EACCES"])
def test_failure_at_each_stage_leaves_nothing_partial(store, factorization, monkeypatch, call, number, code):
    """StoreError, no temporary file, and whatever stands under a final name reads back whole; a retry succeeds."""
    module, name = call.split(".")
    real = getattr(getattr(publish, module), name)
    replacement = failing(real, number, OSError(code, os.strerror(code)))
    with monkeypatch.context() as patch:
        patch.setattr(getattr(publish, module), name, replacement)
        with pytest.raises(StoreError, match=os.strerror(code)):
            store.save(factorization, "ref")
    assert len(replacement.calls) >= number
    assert not [name for name in files(store) if publish.TEMPORARY_PREFIX in name]
    for path in store.path.glob("*.h5"):
        read(path)
    for ref in store.refs():
        store.load(ref)
    assert store.load(store.save(factorization, "ref").digest).n == 3


@pytest.mark.parametrize(("call", "number"), STAGES, ids=lambda part: str(part))
def test_failed_save_stores_nothing_as_it_says(store, factorization, monkeypatch, call, number):
    """`save` promises that nothing is left behind and its message says "Nothing was stored": both must be true."""
    module, name = call.split(".")
    real = getattr(getattr(publish, module), name)
    with monkeypatch.context() as patch:
        patch.setattr(getattr(publish, module), name, failing(real, number, no_space()))
        with pytest.raises(StoreError, match="Nothing was stored"):
            store.save(factorization, "ref")
    assert files(store) == []


def test_failed_save_does_not_take_away_what_another_saved(store, factorization, monkeypatch):
    """Cleaning up after a failed ref must spare the file that another process has meanwhile named."""
    link = os.link

    def full_for_us(source, target):
        if target.suffix == ".json" and target.stem == "ours":
            ArtifactStore(store.path).save(factorization, "theirs")
            raise no_space()
        link(source, target)

    monkeypatch.setattr(os, "link", full_for_us)
    with pytest.raises(StoreError):
        store.save(factorization, "ours")
    assert store.refs() == ["theirs"]
    assert store.load("theirs").n == 3


def test_write_that_fails_half_way(store, factorization, monkeypatch):
    """The disk fills up in the middle of the bytes."""
    real = os.fdopen

    class HalfWritten:
        def __init__(self, handle, mode):
            self.file = real(handle, mode)

        def __enter__(self):
            return self

        def __exit__(self, *error):
            self.file.close()

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            raise no_space()

    monkeypatch.setattr(os, "fdopen", HalfWritten)
    with pytest.raises(StoreError, match="No space left"):
        store.save(factorization, "ref")
    assert files(store) == []


@pytest.mark.parametrize("call", ["fdopen", "fchmod", "fsync", "link"])
def test_interrupt_at_each_stage_leaves_no_temporary(store, factorization, monkeypatch, call):
    """Ctrl-C while the file is written."""
    monkeypatch.setattr(os, call, failing(getattr(os, call), 1, KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        store.save(factorization, "ref")
    assert files(store) == []


def test_too_little_space_is_seen_before_writing(store, factorization, monkeypatch):
    store.prepare()
    monkeypatch.setattr(publish.shutil, "disk_usage", lambda path: _usage(1000))
    monkeypatch.setattr(publish.tempfile, "mkstemp", lambda **options: pytest.fail("a file was begun"))
    with pytest.raises(StoreError, match="1000 are free"):
        store.save(factorization, "ref")


def test_synced_before_it_gets_its_name(store, factorization, monkeypatch):
    """A crash must find the name absent or the content complete: file synced, then linked, then directory synced."""
    events = []
    sync, link = os.fsync, os.link

    def record_sync(handle):
        events.append("directory" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        sync(handle)

    def record_link(source, target):
        events.append("name")
        assert Path(source).parent == Path(target).parent
        assert not Path(target).exists()
        link(source, target)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "link", record_link)
    store.save(factorization, "ref")
    assert events == ["file", "name", "directory"] * 2


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_existing_file_is_never_overwritten(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", without_links)
    path = tmp_path / "taken"
    assert publish.publish(path, b"first")
    before = path.stat()
    assert not publish.publish(path, b"second")
    assert path.read_bytes() == b"first"
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert os.listdir(tmp_path) == ["taken"]


def test_dangling_symbolic_link_in_place_of_the_file(tmp_path):
    """A planted link must not lead the bytes elsewhere."""
    (tmp_path / "name").symlink_to(tmp_path / "elsewhere")
    assert not publish.publish(tmp_path / "name", b"data")
    assert not (tmp_path / "elsewhere").exists()


# --- file systems without hard links ---------------------------------------------------------------


def without_links(*arguments):
    raise OSError(errno.EPERM, "Operation not permitted")


def test_without_hard_links(store, factorization, monkeypatch):
    """exFAT and some network mounts have none: another way, the same result."""
    monkeypatch.setattr(os, "link", without_links)
    saved = store.save(factorization, "ref")
    assert store.load("ref").digest == saved.digest
    assert stat.S_IMODE(saved.path.stat().st_mode) == 0o444
    assert len(files(store)) == 2
    assert store.save(factorization, "ref").path == saved.path


@pytest.mark.parametrize("failure", [no_space(), KeyboardInterrupt()], ids=["ENOSPC", "crash"])
def test_without_hard_links_the_name_is_never_there_empty(store, factorization, monkeypatch, failure):
    """An empty file under the final name would be taken for the artifact for ever after."""
    monkeypatch.setattr(os, "link", without_links)
    seen = []

    def replace(source, target):
        seen.append(Path(target).exists())
        raise failure

    with monkeypatch.context() as patch:
        for name in ("replace", "rename"):
            patch.setattr(os, name, replace)
        with pytest.raises((StoreError, KeyboardInterrupt)):
            store.save(factorization, "ref")
    assert not any(seen), "readers saw the name before its content"
    assert files(store) == []
    store.save(factorization, "ref")
    store.load("ref")


# --- a disk that is really full, or read-only ------------------------------------------------------


def fill(directory: Path, leave: int) -> None:
    free = os.statvfs(directory)
    (directory / "filler").write_bytes(bytes(max(0, free.f_bavail * free.f_frsize - leave)))


@pytest.mark.parametrize("leave", [0, 4096, 8192])
@pytest.mark.parametrize("warned", [True, False], ids=["free space is known", "free space lies"])
def test_full_disk(small_disk, factorization, monkeypatch, leave, warned):
    """ENOSPC from a real file system, met before writing or in the middle of it (quotas do not show as free space)."""
    store = ArtifactStore(small_disk / "store")
    store.prepare()
    fill(small_disk, leave)
    if not warned:
        monkeypatch.setattr(publish.shutil, "disk_usage", lambda path: _usage(1 << 40))
    with pytest.raises(StoreError, match=r"space|free"):
        store.save(factorization, "ref")
    assert files(store) == []
    (small_disk / "filler").unlink()
    assert store.load(store.save(factorization, "ref").digest).n == 3


def test_read_only_file_system(small_disk, factorization):
    """Root ignores permission bits, but not a read-only mount."""
    store = ArtifactStore(small_disk / "store")
    store.save(factorization, "ref")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    try:
        with pytest.raises(StoreError, match=r"not writable|Read-only"):
            store.prepare()
        with pytest.raises(StoreError, match=r"not writable|Read-only"):
            store.save(factorization, "other")
        with pytest.raises(StoreError, match=r"created|Read-only"):
            ArtifactStore(small_disk / "new").prepare()
        assert store.load("ref").n == 3  # reading goes on
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)


def test_directory_without_permission(store, factorization, monkeypatch):
    store.prepare()
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(StoreError, match="not writable"):
        store.save(factorization, "ref")
    assert files(store) == []


def test_store_path_that_is_a_file(tmp_path, factorization):
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(StoreError, match="is a file"):
        ArtifactStore(tmp_path / "file")
    with pytest.raises(StoreError):
        ArtifactStore(tmp_path / "file" / "below").save(factorization, "ref")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "refs").write_text("not a directory")
    with pytest.raises(StoreError):
        ArtifactStore(tmp_path / "store").save(factorization, "ref")
    assert (tmp_path / "file").read_text() == "not a directory"


# --- many processes --------------------------------------------------------------------------------

READER = """
import sys, time
from pathlib import Path
from mmfact.store.store import ArtifactStore, read
store, stop, seen, reads = ArtifactStore(sys.argv[1]), Path(sys.argv[2]), set(), 0
print("ready", flush=True)
last = False
while not last:
    last = stop.exists()
    for path in store.path.glob("*.h5"):
        if path.name not in seen or reads % 7 == 0:
            read(path); reads += 1
        seen.add(path.name)
    for entry in store.entries():
        assert entry.error is None, entry.error
print(len(seen), reads)
"""


def test_readers_never_see_a_partial_file(store, python, tmp_path):
    """Two processes read everything in the store again and again while 25 artifacts are published."""
    store.prepare()
    factorizations = [
        compile(workload.sgd(24, learning_rates=np.linspace(1, 0.5 + i / 50, 24)), Options(strategy="dense"))
        for i in range(25)
    ]
    stop = tmp_path / "stop"
    readers = [python(READER, store.path, stop) for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    for i, factorization in enumerate(factorizations):
        store.save(factorization, f"ref{i}")
    time.sleep(0.2)
    stop.touch()
    for reader in readers:
        out, err = reader.communicate(timeout=60)
        assert reader.returncode == 0, err[-500:]
        assert out.split()[0] == "25"


WRITER = """
import sys, time
from pathlib import Path
from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, compile
from mmfact.store.store import ArtifactStore
if len(sys.argv) > 3:
    import errno, os
    def link(*arguments): raise OSError(errno.EPERM, "no links")
    os.link = link
store, go = ArtifactStore(sys.argv[1]), Path(sys.argv[2])
made = [compile(workload.sgd(n)) for n in range(2, 8)]
print("ready", flush=True)
while not go.exists(): time.sleep(0.0005)
print(*[store.save(f, f"ref{f.workload.n}").path.name for f in made])
"""


@pytest.mark.parametrize("links", [True, False], ids=["hard links", "no hard links"])
def test_concurrent_writers_of_the_same_refs(store, python, tmp_path, links):
    """Three jobs of one sweep compile the same workloads into one store: one file and one ref each, nobody fails."""
    go = tmp_path / "go"
    writers = [python(WRITER, store.path, go, *([] if links else ["no links"])) for _ in range(3)]
    for writer in writers:
        assert writer.stdout.readline() == "ready\n"
    go.touch()
    names = set()
    for writer in writers:
        out, err = writer.communicate(timeout=60)
        assert writer.returncode == 0, err[-500:]
        names.add(out)
    assert len(names) == 1
    assert len(list(store.path.glob("*.h5"))) == 6
    assert len(store.refs()) == 6
    assert len(files(store)) == 12
    for ref in store.refs():
        store.load(ref)


def test_killed_writer_leaves_a_store_that_works(store, factorization, monkeypatch):
    """SIGKILL between writing and linking leaves a temporary file; nobody takes it for an artifact."""
    store.prepare()
    data = format.encode(format.from_factorization(factorization))
    (store.path / f"{publish.TEMPORARY_PREFIX}abc").write_bytes(data[:1000])
    (store.path / "refs" / f"{publish.TEMPORARY_PREFIX}abc").write_bytes(b"{")
    saved = store.save(factorization, "ref")
    assert store.load("ref").digest == saved.digest
    assert [entry.error for entry in store.entries()] == [None]
    assert saved.path.name.endswith(f"{hashlib.sha256(data).hexdigest()}.h5")


def _usage(free: int):
    return publish.shutil._ntuple_diskusage(free, 0, free)
