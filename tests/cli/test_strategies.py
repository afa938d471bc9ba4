"""The three strategies through every command: compile, list, inspect, verify; old files; large n."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from mmfact.store.store import ArtifactStore

GOLDEN = Path(__file__).parents[2] / "artifacts" / "golden"
FORMS = {
    "buffered": (),
    "banded-low-rank": ("--strategy", "banded-low-rank"),
    "dense": ("--strategy", "dense"),
}


def test_the_default_is_buffered_in_float32(mmfact, store):
    """As few buffers as meet the tolerance: one less does not."""
    base = ("compile", "--workload", "prefix-sum", "--n", 100, "--json", "--store", store)
    content = mmfact(*base).json
    strategy = content["strategy"]
    assert (content["ref"], strategy["kind"], strategy["dtype"]) == ("prefix-sum-n100", "buffered", "float32")
    assert content["certificate"]["excess"] <= 1e-4
    fewer = mmfact(*base, "--buffers", strategy["buffers"] - 1)
    assert fewer.code == 1
    assert fewer.json["certificate"]["excess"] > 1e-4


def test_list_shows_every_strategy(mmfact, vault, kinds):
    """In a column of the table, and in the object."""
    artifacts = {kind: ArtifactStore(vault).load(kind) for kind in kinds}
    out = mmfact("list", "--store", vault).out
    for kind, artifact in artifacts.items():
        assert re.search(rf"^{kind} .* {artifact.strategy.kind} ", out, re.M), kind
    content = mmfact("list", "--json", "--store", vault).json["artifacts"]
    assert {row["ref"]: row["strategy"] for row in content} == {k: a.strategy.kind for k, a in artifacts.items()}
    assert {a.strategy.kind for a in artifacts.values()} == {"buffered", "banded-low-rank", "dense"}


def test_inspect_shows_what_streaming_takes(mmfact, vault):
    """Buffers, bytes a parameter, multiply-adds and the amplification, which NumPy gives too."""
    for kind in ("buffered", "buffered-float64"):
        artifact = ArtifactStore(vault).load(kind)
        r, shown = artifact.strategy.buffers, mmfact("inspect", kind, "--store", vault).out
        row = mmfact("inspect", kind, "--json", "--store", vault).json["strategy"]
        assert (row["buffers"], row["bytes_per_parameter"], row["multiply_adds"]) == (r, 4 * r, 3 * r + 1)
        assert row["amplification"] == pytest.approx(amplification(artifact), rel=1e-9)
        assert re.search(rf"^strategy +buffered, {artifact.strategy.dtype.name}; streams with {r} buffers", shown, re.M)
        assert re.search(rf"^streaming +{4 * r} bytes a parameter", shown, re.M)
        assert f"{3 * r + 1} multiply-adds" in shown
        assert f"amplification {row['amplification']:.2g}" in shown
        compiled = mmfact("inspect", kind, "--store", vault)
        assert (compiled.code, compiled.err, compiled.warnings) == (0, "", ())


def amplification(artifact) -> float:
    """max_i sum_k |g[i, k]| std(h_k), the standard deviations from the rows of h as functions of z."""
    of = {name: array.astype(np.float64) for name, array in artifact.strategy.coefficients().items()}
    n, r = of["g"].shape
    h, largest = np.zeros((r, n)), 0.0
    for i in range(n):
        largest = max(largest, float(np.abs(of["g"][i]) @ np.sqrt((h**2).sum(1))))
        y = -of["g"][i] @ h
        y[i] += 1
        h = of["decay"][i][:, None] * h + np.outer(of["q"][i], y / of["c"][i])
    return largest


def test_one_buffer_is_no_plural(mmfact, store):
    """The table is read by people: "1 buffers" is not what they say."""
    out = mmfact("compile", "--workload", "sgd", "--n", 3, "--buffers", 1, "--tolerance", 0.5, "--store", store).out
    assert "1 buffers" not in out


@pytest.mark.parametrize("form", FORMS)
def test_a_matrix_with_each_strategy(mmfact, store, tmp_path, form):
    """Smooth enough for a few buffers; compiled, said to be there, inspected, verified."""
    i = np.arange(30)
    np.save(tmp_path / "m.npy", np.tril(1 / (1 + np.abs(i[:, None] - i[None, :]))))
    command = ("compile", "--workload", "custom", "--matrix", "m.npy", *FORMS[form], "--json", "--store", store)
    ran = mmfact(*command)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    assert ran.json["strategy"]["kind"] == form
    assert ran.json["certificate"]["excess"] <= 1e-4
    assert mmfact(*command).json["already_there"] is True
    artifact = ArtifactStore(store).load(ran.json["ref"])
    assert np.allclose(artifact.B @ artifact.C, artifact.A, rtol=0, atol=1e-12)
    content = mmfact("verify", ran.json["ref"], "--json", "--store", store).json
    assert content["passed"] is True
    assert "the stored matrix A" in content["how"]


def test_a_matrix_with_few_buffers(mmfact, store, tmp_path):
    """The tolerance is out of reach: stored all the same, exit 1, and the excess in words."""
    np.save(tmp_path / "m.npy", np.tril(np.random.default_rng(0).normal(size=(20, 20))) + 4 * np.eye(20))
    command = ("compile", "--workload", "custom", "--matrix", "m.npy", "--buffers", 1, "--store", store)
    ran = mmfact(*command, "--json")
    assert ran.code == 1
    assert f"the excess {ran.json['certificate']['excess']:.3g} is above the tolerance 0.0001" in ran.err
    assert mmfact("verify", ran.json["ref"], "--store", store).code == 0


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("method", ["dense", "structured", "fixed-point"])
def test_every_method_serves_every_strategy(mmfact, store, form, method):
    options = ("--workload", "momentum", "--n", 20, "--tolerance", 1e-3, "--method", method, *FORMS[form])
    ran = mmfact("compile", *options, "--json", "--store", store)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    assert ran.json["certificate"]["method"] == ("dense" if method == "dense" else "structured")
    assert mmfact("verify", ran.json["ref"], "--store", store).code == 0


def test_verify_of_a_large_artifact(mmfact, store):
    """n = 20000: no n x n matrix, other recursions than the compiler's, and the table says so."""
    compiled = mmfact("compile", "--workload", "sgd", "--n", 20_000, "--json", "--store", store)
    assert (compiled.code, compiled.err) == (0, "")
    ran = mmfact("verify", "sgd-n20000", "--store", store)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    assert "FAILS" not in ran.out
    how = " ".join(ran.out.split("how: ")[1].split())
    for text in ("no n x n matrix", "Gramian", "Kalman filters", "no code shared with the compiler"):
        assert text in how
    for check in ("sensitivity", "loss", "max error", "lower bound", "B C = A"):
        assert re.search(rf"^{check} .*agrees", ran.out, re.M)


# --- files of version 1 ----------------------------------------------------------------------------


@pytest.fixture
def golden(tmp_path) -> Path:
    """A copy: the originals must stay as they are."""
    shutil.copytree(GOLDEN, tmp_path / "golden")
    return tmp_path / "golden"


def version_1() -> list[str]:
    return sorted(path.stem for path in (GOLDEN / "refs").glob("v1-*.json"))


def test_old_files_are_listed(mmfact, golden):
    content = mmfact("list", "--json", "--store", golden).json
    rows = {row["ref"]: row for row in content["artifacts"]}
    assert len(version_1()) >= 2
    for ref in version_1():
        assert rows[ref]["error"] is None
        assert rows[ref]["strategy"] == "dense"
    out = mmfact("list", "--store", golden).out
    assert "damaged" not in out
    assert all(re.search(rf"^{ref} .* dense ", out, re.M) for ref in version_1())


@pytest.mark.parametrize("ref", version_1())
def test_old_files_serve_every_command(mmfact, golden, files, ref):
    before = {name: (golden / name).read_bytes() for name in files(golden)}
    for command in ("inspect", "verify", "compare"):
        for json in ((), ("--json",)):
            ran = mmfact(command, ref, *json, "--store", golden)
            assert (ran.code, ran.err, ran.warnings) == (0, "", ()), command
    assert mmfact("inspect", ref, "--json", "--store", golden).json["strategy"]["kind"] == "dense"
    assert {name: (golden / name).read_bytes() for name in files(golden)} == before


def test_an_old_file_answers_the_request_that_made_it(mmfact, golden):
    """Already there, though the options have grown; the new default under that name is something else."""
    command = (
        *("compile", "--workload", "momentum", "--n", 8, "--lr-schedule", "cooldown", "--weight-decay", 0.01),
        *("--name", "v1-dense-momentum", "--store", golden),
    )
    ran = mmfact(*command, "--strategy", "dense")
    assert (ran.code, ran.err) == (0, "")
    assert "already there" in ran.out
    other = mmfact(*command)
    assert other.code == 2
    assert "already names something else" in other.err
