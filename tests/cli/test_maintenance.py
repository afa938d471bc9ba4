"""`mmfact remove`, `gc` and `migrate`."""

import os
import shutil
import time
from pathlib import Path

import pytest

from mmfact.store.store import ArtifactStore

GOLDEN = Path(__file__).parents[2] / "artifacts" / "golden"


@pytest.fixture
def old(tmp_path):
    """A store of our own with the golden files, all two days old."""
    store = tmp_path / "store"
    shutil.copytree(GOLDEN, store)
    (store / "PROTECTED").unlink()
    (store / ".tmp-abc").write_bytes(b"half")
    then = time.time() - 48 * 3600
    for path in store.rglob("*"):
        os.utime(path, (then, then))
    return store


def test_remove_then_gc(mmfact, old):
    store = ArtifactStore(old)
    name = store.load("v2-dense-momentum").path.name
    size = (old / name).stat().st_size + 4
    ran = mmfact("remove", "v2-dense-momentum", "v2-buffered-momentum", "--store", old, "--json")
    assert ran.json["removed"][0] == {"ref": "v2-dense-momentum", "artifact": name}
    assert "v2-dense-momentum" not in store.refs()
    assert (old / name).exists()
    tried = mmfact("gc", "--dry-run", "--store", old, "--json").json
    assert tried["leftovers"] == [".tmp-abc"]
    assert name in tried["unnamed"]
    assert len(tried["unnamed"]) == 2
    assert tried["bytes"] > size
    assert (old / name).exists()
    ran = mmfact("gc", "--store", old)
    assert ran.code == 0
    assert f"removed '{name}'" in ran.out
    assert "3 files removed" in ran.out
    assert not (old / name).exists()
    assert "0 files removed" in mmfact("gc", "--store", old).out
    assert all(entry.error is None for entry in store.entries())


def test_remove_what_is_not_there(mmfact, old):
    ran = mmfact("remove", "v2-dense-momentun", "--store", old)
    assert ran.code == 2
    assert "did you mean v2-dense-momentum" in ran.err
    assert mmfact("remove", "--store", old).code == 2


def test_protected(mmfact):
    for command in (["remove", "v1-dense-momentum"], ["gc", "--older-than", "0"]):
        ran = mmfact(*command, "--store", GOLDEN)
        assert ran.code == 3
        assert "protected" in ran.err


def test_gc_says_what_is_quarantined(mmfact, old):
    path = ArtifactStore(old).load("v2-dense-momentum").path
    path.chmod(0o644)
    path.write_bytes(path.read_bytes()[:-1])
    assert mmfact("inspect", "v2-dense-momentum", "--store", old).code == 2
    ran = mmfact("gc", "--store", old)
    assert ran.code == 0
    assert "1 damaged in" in ran.out
    assert len(list((old / "quarantine").iterdir())) == 1


@pytest.mark.parametrize("hours", ["-1", "nan", "soon"])
def test_ages_that_are_none(mmfact, old, hours):
    ran = mmfact("gc", "--older-than", hours, "--store", old)
    assert ran.code == 2
    assert (old / ".tmp-abc").exists()


def test_compile_brings_back_what_was_damaged(mmfact, tmp_path):
    """The way out that the message names."""
    arguments = ("compile", "--workload", "sgd", "--n", 6, "--strategy", "dense", "--store", tmp_path)
    assert mmfact(*arguments).code == 0
    store = ArtifactStore(tmp_path)
    (ref,) = store.refs()
    path = store.load(ref).path
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[:500] + b"\xff" + data[501:])
    ran = mmfact("verify", ref, "--store", tmp_path)
    assert ran.code == 1
    assert "compile it again under the same name" in ran.err
    assert "quarantine" in ran.err
    ran = mmfact(*arguments, "--json")
    assert ran.code == 0
    assert ran.json["already_there"] is False
    assert path.read_bytes() == data
    assert mmfact("verify", ref, "--store", tmp_path).code == 0


def test_migrate(mmfact, old):
    ran = mmfact("migrate", "--store", old, "--json")
    assert sorted(line["migrated"] for line in ran.json["migrated"]) == [
        "v1-dense-custom-float32-v2",
        "v1-dense-momentum-v2",
    ]
    assert mmfact("verify", "v1-dense-momentum-v2", "--store", old).code == 0
    ran = mmfact("migrate", "v1-dense-momentum", "--name", "new", "--store", old)
    assert "v1-dense-momentum is now also new, in version 2" in ran.out
    assert "nothing to do" in mmfact("migrate", "v2-dense-momentum", "--store", old).out
    assert "nothing to do" in mmfact("migrate", "--store", old).out
    ran = mmfact("migrate", "--name", "new", "--store", old)
    assert ran.code == 2
    assert "give one REF" in ran.err


def test_one_failure_does_not_stop_a_migration(mmfact, old):
    (old / "refs" / "aaa.json").write_text("{")
    ran = mmfact("migrate", "--store", old)
    assert ran.code == 2
    assert "aaa" in ran.err
    assert "migrated: v1-dense-custom-float32, v1-dense-momentum" in ran.err
    assert mmfact("verify", "v1-dense-momentum-v2", "--store", old).code == 0


def test_remove_all_or_none(mmfact, old):
    digest = ArtifactStore(old).load("v2-dense-momentum").digest  # an artifact's, but no ref's
    for wrong in ("nothing", digest):
        assert mmfact("remove", "v2-dense-momentum", wrong, "--store", old).code == 2
        assert ArtifactStore(old).has("v2-dense-momentum")


def test_names_that_a_terminal_would_obey(mmfact, old):
    """A leftover's name is anybody's text."""
    (old / ".tmp-\x1b[31mEVIL\x07\udcff").touch()
    ran = mmfact("gc", "--older-than", "0", "--store", old)
    assert ran.code == 0
    assert "EVIL" in ran.out
    assert not set("\x1b\x07\udcff") & set(ran.out)
