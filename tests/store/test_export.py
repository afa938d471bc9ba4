"""Artifacts as .npz files: what NumPy alone reads from them, and files that appear whole or not at all."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from mmfact.factorize.compiler import Options, compile, independent
from mmfact.factorize.errors import ArtifactError, CapacityError, StoreError
from mmfact.factorize.given import read_factors, strategy_of
from mmfact.factorize.workload import custom, momentum, prefix_sum
from mmfact.store import export as exporting
from mmfact.store.export import export
from mmfact.store.format import from_factorization

REQUESTS = {
    "dense": (momentum(8), Options(strategy="dense")),
    "buffered": (prefix_sum(9), Options(buffers=2)),
    "low rank": (momentum(10), Options(strategy="banded-low-rank", bandwidth=3, rank=2)),
    "wide band": (prefix_sum(4), Options(strategy="banded-low-rank", bandwidth=4)),
    "custom": (custom(np.tri(6) + np.eye(6)), Options(strategy="dense")),
}


@pytest.fixture(scope="module", params=REQUESTS)
def artifact(request):
    return from_factorization(compile(*REQUESTS[request.param]))


@pytest.fixture(scope="module")
def small():
    return from_factorization(compile(prefix_sum(3)))


def test_matrices(artifact, tmp_path):
    """A = B C to 1e-12, C that of the artifact, and the figures recomputed from the file by NumPy alone, to 1e-6."""
    names = export(artifact, tmp_path / "a.npz")
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert list(file) == names == ["A", "B", "C", "about"]
        A, B, C, about = file["A"], file["B"], file["C"], json.loads(str(file["about"]))
    assert {array.dtype for array in (A, B, C)} == {np.dtype("float64")}
    np.testing.assert_array_equal(C, artifact.C)
    np.testing.assert_allclose(B @ C, A, atol=1e-12 * np.abs(A).max())
    np.testing.assert_array_equal(A, artifact.workload.dense())
    sensitivity = np.linalg.norm(C, axis=0).max()
    assert about["certificate"]["sensitivity"] == pytest.approx(sensitivity, rel=1e-6)
    assert about["certificate"]["loss"] == pytest.approx(sensitivity**2 * (B**2).sum(), rel=1e-6)
    assert about["digest"] == artifact.digest
    assert about["workload"] == artifact.workload.spec()
    assert about["strategy"]["kind"] == artifact.strategy.kind
    assert about["certificate"]["excess"] == artifact.certificate.excess


def test_coefficients(artifact, tmp_path):
    """The very arrays, and a file from which the very strategy is made again."""
    names = export(artifact, tmp_path / "a.npz", coefficients=True)
    with np.load(tmp_path / "a.npz", allow_pickle=False) as file:
        assert list(file) == names
        arrays = {name: file[name] for name in file}
    stored = {f"strategy.{name}": array for name, array in artifact.strategy.coefficients().items() if array.size}
    stored |= {"multipliers": artifact.multipliers, "learning_rates": artifact.workload.learning_rates}
    assert set(arrays) == {*stored, "about"}
    for name, array in stored.items():
        assert arrays[name].dtype == array.dtype
        np.testing.assert_array_equal(arrays[name], array)
    again = strategy_of(read_factors(tmp_path / "a.npz"), artifact.workload).strategy
    for name, array in artifact.strategy.coefficients().items():
        np.testing.assert_array_equal(again.coefficients()[name], array)


def test_matrices_come_back_as_the_dense_strategy(artifact, tmp_path):
    export(artifact, tmp_path / "a.npz")
    found = strategy_of(read_factors(tmp_path / "a.npz"), artifact.workload)
    assert found.rotation == "none"
    np.testing.assert_array_equal(found.strategy.to_dense(), artifact.C)


def test_equal_artifacts_give_equal_bytes(small, tmp_path):
    export(small, tmp_path / "a.npz")
    export(small, tmp_path / "b.npz")
    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_matrices_too_large(tmp_path):
    """Refused with the size that they would have; coefficients have no such limit."""
    artifact = from_factorization(independent(prefix_sum(exporting.LARGEST_MATRICES + 1)))
    with pytest.raises(CapacityError, match="--coefficients"):
        export(artifact, tmp_path / "a.npz")
    assert not (tmp_path / "a.npz").exists()
    export(artifact, tmp_path / "a.npz", coefficients=True)
    assert (tmp_path / "a.npz").exists()


def test_an_existing_file_stays(small, tmp_path):
    path = tmp_path / "a.npz"
    path.write_text("mine")
    with pytest.raises(ArtifactError, match="--force"):
        export(small, path)
    assert path.read_text() == "mine"
    export(small, path, replace=True)
    assert np.load(path)["C"].shape == (3, 3)
    export(small, path, replace=True, coefficients=True)  # also over one of its own, which is read-only
    assert "C" not in np.load(path)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("name", ["a.npy", "a", "a.npz/", "folder.npz", "nowhere/a.npz"])
def test_places_where_no_file_can_be(small, tmp_path, name, replace):
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(ArtifactError):
        export(small, tmp_path / name if name != "a.npz/" else tmp_path / "folder.npz", replace=replace)
    assert list(tmp_path.iterdir()) == [tmp_path / "folder.npz"]


@pytest.mark.parametrize("replace", [False, True])
def test_a_full_disk_leaves_nothing(small_disk, replace):
    """What was there before is there afterwards, and nothing else."""
    artifact = from_factorization(compile(prefix_sum(100)))  # 240 KB of matrices
    path = small_disk / "a.npz"
    if replace:
        path.write_text("mine")
    with pytest.raises(StoreError):
        export(artifact, path, replace=replace)
    assert [file.read_text() for file in small_disk.iterdir()] == ["mine"] * replace


def test_a_failure_while_replacing_leaves_the_old_file(small, tmp_path, monkeypatch):
    path = tmp_path / "a.npz"
    path.write_text("mine")

    def failing(source, target):
        raise PermissionError(1, "not permitted")

    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(StoreError, match="not permitted"):
        export(small, path, replace=True)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["mine"]
