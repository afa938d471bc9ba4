"""Files of earlier versions in the newest one: the same numbers, another digest, the old file untouched."""

import shutil
from pathlib import Path

import pytest

from mmfact.factorize.errors import ArtifactNotFound, RefError, StoreError
from mmfact.factorize.verification import verify
from mmfact.store.gc import collect
from mmfact.store.migration import migrate
from mmfact.store.store import ArtifactStore

GOLDEN = Path(__file__).parents[2] / "artifacts" / "golden"


@pytest.fixture
def old(tmp_path):
    shutil.copytree(GOLDEN, tmp_path / "store")
    (tmp_path / "store" / "PROTECTED").unlink()
    return ArtifactStore(tmp_path / "store")


def files(store):
    return {path.name: path.read_bytes() for path in store.path.rglob("*") if path.is_file()}


@pytest.mark.parametrize("ref", ["v1-dense-momentum", "v1-dense-custom-float32"])
def test_version_1(old, ref):
    before = files(old)
    source = old.load(ref)
    assert source.schema_version == 1
    made = migrate(old, ref)
    assert made.schema_version == 2
    assert made.provenance["migrated_from"] == {"digest": source.digest, "schema_version": 1}
    loaded = old.load(f"{ref}-v2")
    assert loaded.digest == made.digest != source.digest
    assert {name: array.tobytes() for name, array in loaded.strategy.coefficients().items()} == {
        name: array.tobytes() for name, array in source.strategy.coefficients().items()
    }
    assert loaded.multipliers.tobytes() == source.multipliers.tobytes()
    assert loaded.workload.same_as(source.workload)
    assert loaded.certificate == source.certificate
    assert verify(loaded.workload, loaded.strategy, loaded.multipliers, loaded.certificate).passed
    assert before.items() <= files(old).items(), "what was there is as it was"
    assert migrate(old, ref) is None
    assert migrate(old, f"{ref}-v2") is None


def test_the_newest_needs_nothing(old):
    before = files(old)
    assert migrate(old, "v2-buffered-momentum") is None
    assert files(old) == before


def test_names(old):
    assert migrate(old, "v1-dense-momentum", "new").digest == old.load("new").digest
    with pytest.raises(RefError, match="already names another"):
        migrate(old, "v1-dense-momentum", "v2-dense-momentum")
    with pytest.raises(ArtifactNotFound):
        migrate(old, "nothing")


def test_golden_files_are_protected():
    """No command takes them away, however old and whoever asks."""
    golden = ArtifactStore(GOLDEN)
    before = files(golden)
    with pytest.raises(StoreError, match="protected"):
        golden.remove("v1-dense-momentum")
    with pytest.raises(StoreError, match="protected"):
        collect(golden, older_than=0)
    collect(ArtifactStore(GOLDEN.parent), older_than=0, dry_run=True)
    assert files(golden) == before
