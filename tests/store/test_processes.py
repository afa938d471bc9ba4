"""Many processes on one store: killed at random moments, and eight of them doing everything at once."""

import json
import os

import pytest

from mmfact.factorize.verification import verify
from mmfact.store.gc import collect
from mmfact.store.store import ArtifactStore

pytestmark = pytest.mark.slow

COMMON = """
import contextlib, errno, json, os, random, signal, sys, time
from mmfact.factorize import workload
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.errors import ArtifactNotFound, RefError
from mmfact.store.gc import collect
from mmfact.store.store import ArtifactStore, read
if "no links" in sys.argv:
    import fcntl
    def refuse(*arguments, **options): raise OSError(errno.EPERM, "Operation not permitted")
    os.link = fcntl.flock = fcntl.lockf = refuse
store = ArtifactStore(sys.argv[1])
made = [compile(workload.sgd(n), Options(strategy="dense")) for n in range(2, 10)]
"""

# One process imports everything and forks the writers, so that a kill costs milliseconds.
KILLED = (
    COMMON
    + """
warm = ArtifactStore(sys.argv[1] + "-warm")  # everything that is imported late, and compiled
for one in made: warm.save(one, f"n{one.workload.n}")
collect(warm)
kills, draw = int(sys.argv[2]), random.Random(0)
for number in range(kills):
    child = os.fork()
    if child == 0:
        own = random.Random(number)
        while True:
            ref = f"ref{own.randrange(12)}"
            with contextlib.suppress(ArtifactNotFound, RefError):
                if own.random() < 0.6:
                    store.save(own.choice(made), ref)
                elif own.random() < 0.7:
                    store.remove(ref)
                else:
                    collect(store, older_than=0)
    time.sleep(draw.uniform(0, 0.1))
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WTERMSIG(status) != signal.SIGKILL:
        sys.exit(f"writer {number} failed by itself")
print("done")
"""
)

READER = (
    COMMON
    + """
stop, reads = sys.argv[2], 0
print("ready", flush=True)
while not os.path.exists(stop):
    for name in store.files():
        with contextlib.suppress(ArtifactNotFound):
            read(store.path / name)
            reads += 1
    for entry in store.entries():
        if entry.error and "not in the store" not in entry.error and "not there any more" not in entry.error:
            sys.exit(entry.error)
print(reads)
"""
)

MIXED = (
    COMMON
    + """
me, count = sys.argv[2], int(sys.argv[3])
draw, mine, done = random.Random(int(me)), {}, {}
from mmfact.factorize.verification import verify
from mmfact.store.migration import migrate
def save(ref, one): return store.save(one, ref).digest
def whole(ref, one):
    digest = save(ref, one)
    if mine.setdefault(ref, digest) != digest: sys.exit(f"{ref} has moved")
for _ in range(count):
    kind = draw.choice(("save", "own", "load", "check", "list", "remove", "gc", "digest", "verify", "migrate"))
    ref, one = f"shared{draw.randrange(6)}", draw.choice(made)
    try:
        if kind == "save": save(ref, one)
        elif kind == "own": whole(f"own-{me}-{one.workload.n}", one)
        elif kind == "load": store.load(ref)
        elif kind == "check":
            for name, digest in mine.items():
                if store.load(name).digest != digest: sys.exit(f"{name} is another")
        elif kind == "list":
            for entry in store.entries():
                if entry.error is not None and (entry.ref.startswith(f"own-{me}-") or "damaged" in entry.error):
                    sys.exit(entry.error)
        elif kind == "remove": store.remove(ref)
        elif kind == "gc": collect(store, older_than=0)
        elif kind == "digest":
            if mine: store.load(draw.choice(list(mine.values())))
        elif kind == "verify":
            a = store.load(ref)
            if not verify(a.workload, a.strategy, a.multipliers, a.certificate).passed: sys.exit("not verified")
        elif kind == "migrate": migrate(store, ref)
    except (ArtifactNotFound, RefError) as error:  # a shared ref that another has removed, or gave another artifact
        if ref.startswith("own") or kind in ("own", "check", "list", "gc", "digest"): sys.exit(f"{kind}: {error}")
    done[kind] = done.get(kind, 0) + 1
print(json.dumps(mine))
"""
)


def finished(process, seconds=300):
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err[-2000:]
    return out.split("\n")[-2]


def check_order(store):
    """Everything with a name is whole; one collection leaves nothing else."""
    collect(store, older_than=0)
    for entry in store.entries():
        assert entry.error is None
        artifact = entry.artifact
        assert verify(artifact.workload, artifact.strategy, artifact.multipliers, artifact.certificate).passed
    named = {store.load(ref).path.name for ref in store.refs()}
    assert named == set(store.files())
    assert sorted(os.listdir(store.path)) == sorted([*named, "refs"])
    assert sorted(os.listdir(store.path / "refs")) == sorted(f"{ref}.json" for ref in store.refs())


def test_writers_killed_at_200_moments(python, tmp_path):
    """Readers see whole artifacts or none; afterwards the store lists and verifies clean."""
    store, stop = ArtifactStore(tmp_path / "store"), tmp_path / "stop"
    store.prepare()
    readers = [python(READER, store.path, stop) for _ in range(2)]
    for reader in readers:
        assert reader.stdout.readline() == "ready\n"
    assert finished(python(KILLED, store.path, "200")) == "done"
    stop.touch()
    assert all(int(finished(reader)) > 20 for reader in readers)
    assert store.refs()
    check_order(store)


@pytest.mark.parametrize(
    ("locking", "links"), [("TRUE", True), ("FALSE", True), ("TRUE", False)], ids=["locks", "no HDF5 locks", "lockless"]
)
def test_eight_processes_and_a_thousand_operations(python, tmp_path, monkeypatch, locking, links):
    """No error that is not promised, and nothing with a name is ever lost. `lockless`: no locks and no hard links."""
    monkeypatch.setenv("HDF5_USE_FILE_LOCKING", locking)
    store = ArtifactStore(tmp_path / "store")
    more = [] if links else ["no links"]
    processes = [python(MIXED, store.path, str(number), "125", *more) for number in range(8)]
    mine = {}
    for process in processes:
        mine |= json.loads(finished(process))
    assert len(mine) > 30
    for ref, digest in mine.items():
        assert store.load(ref).digest == digest
    check_order(store)
