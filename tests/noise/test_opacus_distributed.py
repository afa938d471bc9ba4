"""Opacus on two processes (gloo): the steps of one process, one journal, and refusals that all of them share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("opacus")
adapter = pytest.importorskip("mmfact.noise.opacus")

sys.path.insert(0, str(Path(__file__).parent))
import opacus_process as process  # noqa: E402

sys.path.pop(0)

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG"),
    pytest.mark.filterwarnings("ignore:Full backward hook"),
]

PROCESSES = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the processes left."""
    where = tmp_path_factory.mktemp("opacus")
    script = str(Path(__file__).with_name("opacus_process.py"))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    started = [
        subprocess.Popen(
            [sys.executable, script, str(rank), str(PROCESSES), str(where)],
            env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(PROCESSES)
    ]  # fmt: skip
    try:
        complaints = [one.communicate(timeout=240)[1] for one in started]
    finally:
        for one in started:
            one.kill()
    assert [one.returncode for one in started] == [0] * PROCESSES, "\n".join(complaints)
    return where


@pytest.fixture(scope="module")
def left(folder: Path) -> list[dict[str, Any]]:
    return [dict(np.load(folder / f"left {rank}.npz")) for rank in range(PROCESSES)]


def alone(mode: str, reduction: str) -> tuple[Any, Any]:
    """(parameters after the whole run, its epsilon) of one process with the same key and run."""
    loader = torch.utils.data.DataLoader(process.examples(), batch_size=process.BATCH)
    engine, model, optimizer, criterion, loader = process.private(mode, reduction, loader)
    adapter.correlate(optimizer, model, process.artifact(), data_loader=loader, key=process.KEY, run=process.RUN)
    list(process.train(model, optimizer, criterion, loader))
    return process.parameters(model), engine.get_epsilon(1e-5)


@pytest.mark.parametrize("name", process.RUNS)
def test_two_processes_take_the_steps_of_one(left: list[dict[str, Any]], name: str) -> None:
    mode, reduction, _ = process.RUNS[name]
    expected, epsilon = alone(mode, reduction)
    for found in left:
        np.testing.assert_allclose(found[name], expected, rtol=2e-5, atol=1e-6)
        assert np.isfinite(found[name]).all()
        assert dict(found["refused"])[f"epsilon {name}"] == repr(epsilon)
    np.testing.assert_array_equal(left[0][name], left[1][name])


def test_the_first_process_keeps_the_journal(folder: Path, left: list[dict[str, Any]]) -> None:
    for name in process.RUNS:
        assert (folder / f"journal {name} 0").exists()
        assert not (folder / f"journal {name} 1").exists()


def test_a_state_of_two_processes_goes_on_in_one(folder: Path, left: list[dict[str, Any]]) -> None:
    saved = torch.load(folder / "state 0", weights_only=True)
    loader = torch.utils.data.DataLoader(process.examples(), batch_size=process.BATCH)
    _, model, optimizer, criterion, loader = process.private("hooks", "mean", loader)
    model._module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    noise = adapter.restore(
        optimizer, model, process.artifact(), saved["noise"], data_loader=loader, key=process.KEY,
        journal=folder / "journal flat mean 0", resume="unpublished",
    )  # fmt: skip
    assert noise.step_number == 5
    list(process.train(model, optimizer, criterion, list(loader)[5:]))
    np.testing.assert_allclose(process.parameters(model), left[0]["flat mean"], rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("key", "StateError: processes 1 do not agree with process 0"),
        ("no key", "StateError: 2 processes share this run"),
        ("ids", "ParticipationError: the id 0 is there twice in step 0"),
        ("sampler", "ParticipationError: 2 processes would each go through all"),
        ("averaged twice", "AdapterError: torch's DistributedDataParallel averages"),
    ],
)
def test_all_processes_refuse_together(left: list[dict[str, Any]], name: str, reason: str) -> None:
    for found in left:
        assert dict(found["refused"])[name].startswith(reason)
