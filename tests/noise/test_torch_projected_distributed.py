"""Projected noise on 2 and 4 processes (gloo): that of one process, to the rounding of float32, and all refuse
together. torch_projected_processes.py has what the processes do; test_torch_projected.py, that one process is right.

Parameters are whole in every process (each projects a slice, which is uneven) or split by rows (FSDP2).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mmfact.factorize.compiler import independent
from mmfact.factorize.workload import prefix_sum
from mmfact.noise import NoiseKey
from mmfact.store.format import encode, from_factorization

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

HELPER = Path(__file__).with_name("torch_projected_processes.py")
WORLDS = (2, 4)

worlds = pytest.mark.parametrize("world", WORLDS)
several = pytest.mark.parametrize("world", [world for world in WORLDS if world > 1])


@pytest.fixture(scope="module")
def folder(built: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all processes have been, and left what they saw; pytest's workers share it, and the first fills it."""
    base = tmp_path_factory.getbasetemp()
    where = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torch_projected_processes"
    with open(f"{where}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not where.exists():
            artifacts = {
                "independent": from_factorization(independent(prefix_sum(20))),
                "correlated": built("buffered").artifact,
            }
            for name, made in artifacts.items():
                (where / name).mkdir(parents=True)
                content = encode(made)
                path = where / name / f"{made.digest}-{hashlib.sha256(content).hexdigest()}.h5"
                path.write_bytes(content)
            NoiseKey.generate(where / "key")
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
            command = [sys.executable, str(HELPER), str(where)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
            assert done.returncode == 0, done.stderr[-4000:]
    return where


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """What the processes of each world saw, in the order of their ranks; of 0, the one without a group."""
    return {
        world: [torch.load(folder / f"{world}-{rank}.pt", weights_only=False) for rank in range(max(world, 1))]
        for world in (0, *WORLDS)
    }


def close(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Parameters and records, to the rounding of float32."""
    parameters = one["values"].keys() == other["values"].keys() and all(
        torch.allclose(part, other["values"][name], rtol=1e-5, atol=1e-5) for name, part in one["values"].items()
    )
    records = len(one["records"]) == len(other["records"]) and all(
        mine[name] == (pytest.approx(value, rel=1e-3, abs=1e-4) if isinstance(value, float) else value)
        for mine, theirs in zip(one["records"], other["records"], strict=True)
        for name, value in theirs.items()
    )
    return parameters and records


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """To the last bit."""
    same = all(torch.equal(part, other["values"][name]) for name, part in one["values"].items())
    return same and one["records"] == other["records"]


@worlds
@pytest.mark.parametrize(
    ("layout", "sort"),
    [
        ("replicated", "eigen"),
        ("split", "eigen"),
        ("split", "float16"),
        ("replicated", "random"),
        ("split", "random-plain"),
        ("replicated", "correlated"),
    ],
)
def test_a_run_is_that_of_one_process(seen: Any, world: int, layout: str, sort: str) -> None:
    for rank in seen[world]:
        assert close(rank[f"run, {layout}, {sort}"], seen[0][0][f"run, {layout}, {sort}"])
        assert equal(rank[f"run, {layout}, {sort}"], seen[world][0][f"run, {layout}, {sort}"])  # the same on all


def test_runs_differ(seen: Any) -> None:
    """That they are near is no matter of course; and the model moves."""
    runs = [seen[0][0][f"run, replicated, {sort}"]["values"] for sort in ("eigen", "random", "correlated")]
    for number, one in enumerate(runs):
        for other in runs[:number]:
            assert max(float((one[name] - other[name]).abs().max()) for name in one) > 0.01


def test_slices_are_uneven_and_may_be_empty(seen: Any) -> None:
    sizes = {layout: [rank[f"run, {layout}, eigen"]["size"] for rank in seen[4]] for layout in ("replicated", "split")}
    assert [sum(held) for held in sizes.values()] == [22, 22]
    assert sizes["split"][3] == 0
    assert len(set(sizes["replicated"])) > 1


@pytest.mark.parametrize("world", [0, *WORLDS])
@pytest.mark.parametrize(
    ("layout", "at", "cached"),
    [("replicated", 3, False), ("replicated", 4, True), ("split", 3, True), ("split", 4, False)],
)
def test_a_restart_changes_nothing(seen: Any, world: int, layout: str, at: int, cached: bool) -> None:
    for rank in seen[world]:
        assert equal(rank[f"resumed, {layout}, {at}, {cached}"], rank[f"run, {layout}, eigen"])


@several
@pytest.mark.parametrize(
    ("check", "own"),
    [
        ("per_example raises", "RuntimeError: out of memory"),
        ("per_example gives less", "ProjectorError: per_example gave the gradients of 8 examples for 9"),
    ],
)
def test_a_process_without_public_gradients_stops_all(seen: Any, world: int, check: str, own: str) -> None:
    *others, last = (rank[check] for rank in seen[world])
    assert last.startswith(own)
    assert all(other.startswith("StateError: another process could not make the public gradients") for other in others)


@several
def test_what_stops_all_costs_no_row(seen: Any, world: int) -> None:
    for rank in seen[world]:
        assert rank["per_example gives NaN"].startswith(
            "ProjectorError: the gradient of public example 5 (of 9, from 0)"
        )
        assert rank["step after that"] == 3
        assert equal(rank["run after that"], rank["run, replicated, eigen"])


@several
@pytest.mark.parametrize(
    ("difference", "named"),
    [
        ("other public", "public"),
        ("other order", "public"),
        ("fewer public", "public"),
        ("k", "k"),
        ("kind", "kind and public"),
        ("refresh", "refresh"),
        ("start", "start_step"),
        ("storage", "storage"),
        ("tag", "tag"),
        ("held out", "held_out"),
        ("no held out", "held_out"),
    ],
)
def test_processes_that_differ_are_refused_everywhere(seen: Any, world: int, difference: str, named: str) -> None:
    messages = {rank[f"differs: {difference}"] for rank in seen[world]}
    assert len(messages) == 1
    assert messages.pop().startswith(f"StateError: the processes do not agree on {named}, and each would project")


@several
@pytest.mark.parametrize(
    ("difference", "own"),
    [
        ("private", "ProjectorError: public example 0 is also private example 0"),
        ("no k", "StateError: k = 0 must be a whole number"),
    ],
)
def test_a_process_that_cannot_begin_keeps_the_others_from_it(seen: Any, world: int, difference: str, own: str) -> None:
    *others, last = (rank[f"differs: {difference}"] for rank in seen[world])
    assert last.startswith(own)
    assert all(other.startswith("StateError: another process could not begin") for other in others)


@several
def test_an_entry_that_one_process_lost(seen: Any, world: int) -> None:
    """All refuse; or all make a new projector, where that was asked for."""
    *others, last = (rank["lost"] for rank in seen[world])
    assert re.match(rf"StateError: the projector of step 3 is not in the cache \(.*cache-lost-{world}\)", last)
    assert all(other.startswith("StateError: another process could not restore its state") for other in others)
    for rank in seen[world]:
        assert rank["projector after that"]
        assert equal(rank["lost, made again"], seen[world][0]["lost, made again"])
        assert [one["step"] for one in rank["lost, made again"]["records"]] == [1, 3, 4, 5]


@several
def test_a_state_that_one_process_cannot_restore_is_refused_everywhere(seen: Any, world: int) -> None:
    *others, last = (rank["wrong state"] for rank in seen[world])
    assert last.startswith("StateError: the state is of step 2, but the GradientNoise is at step 4")
    assert all(other.startswith("StateError: another process could not restore its state") for other in others)


@several
def test_a_process_that_cannot_write_its_part_has_it_in_its_state(seen: Any, world: int) -> None:
    for number, rank in enumerate(seen[world]):
        assert len(rank["full disk"]) == (number == world - 1)
        assert equal(rank["full disk, resumed"], rank["run, replicated, eigen"])
        again = rank["found in part"]
        assert [one["source"] for one in again["records"]] == ["computed"] * 2 + ["cache"]
        assert all(
            torch.equal(part, rank["run, replicated, eigen"]["values"][name]) for name, part in again["values"].items()
        )
