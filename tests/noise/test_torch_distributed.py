"""Noise for torch on 1, 2 and 4 processes (gloo): the result is that of one process, and all refuse together.

Parameters are whole in every process (DDP) or split by rows (FSDP2); torch_processes.py has what the processes do.
Noise is the same bit for bit; runs differ by the order in which gradients are added up in float32.
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

import numpy as np
import pytest

from mmfact.noise import NoiseKey, NoiseStream
from mmfact.store.format import encode

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.slow

HELPER = Path(__file__).with_name("torch_processes.py")
WORLDS, STEPS, BATCH = (1, 2, 4), 12, 7
RUN = bytes(range(16))

worlds = pytest.mark.parametrize("world", WORLDS)
several = pytest.mark.parametrize("world", [world for world in WORLDS if world > 1])
kinds = pytest.mark.parametrize("kind", ["replicated", "split"])


@pytest.fixture(scope="module")
def artifact(built: Any) -> Any:
    return built("buffered").artifact


@pytest.fixture(scope="module")
def folder(artifact: Any, built: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all processes have been, and left what they saw; pytest's workers share it, and the first fills it."""
    base = tmp_path_factory.getbasetemp()
    where = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "torch_processes"
    with open(f"{where}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not where.exists():
            (where / "other").mkdir(parents=True)
            for place, made in ((where, artifact), (where / "other", built("buffered", name="prefix").artifact)):
                content = encode(made)
                (place / f"{made.digest}-{hashlib.sha256(content).hexdigest()}.h5").write_bytes(content)
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
    """To the rounding of a dozen float32 sums in another order."""
    return one.keys() == other.keys() and all(
        torch.allclose(one[name], other[name], rtol=1e-5, atol=1e-6) for name in one
    )


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@worlds
@kinds
def test_noise_is_that_of_one_stream_a_tensor(folder: Path, artifact: Any, seen: Any, world: int, kind: str) -> None:
    key = NoiseKey.from_file(folder / "key")
    names = seen[world][0][f"noise, {kind}"][0]
    assert set(names) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    for name, first in names.items():
        stream = NoiseStream(
            artifact, first.numel(), noise_multiplier=1.3, clip_norm=0.7, key=key, name=name, run=RUN
        )  # fmt: skip
        for step in range(STEPS):
            row = stream.next().reshape(tuple(first.shape)) / np.float32(BATCH)
            for rank in seen[world]:
                assert np.array_equal(rank[f"noise, {kind}"][step][name].numpy(), row)


@worlds
@kinds
def test_a_run_is_that_of_one_process(seen: Any, world: int, kind: str) -> None:
    for rank in seen[world]:
        assert close(rank[f"run, {kind}"], seen[0][0]["run, replicated"])
        assert equal(rank[f"run, {kind}"], seen[world][0][f"run, {kind}"])  # and on every process the same


@worlds
def test_sums_of_a_backward_pass_that_is_split(seen: Any, world: int) -> None:
    for rank in seen[world]:
        assert close(rank["backward"], seen[0][0]["backward"])


@worlds
@kinds
def test_horizon_on_every_process(seen: Any, world: int, kind: str) -> None:
    for rank in seen[world]:
        assert rank[f"horizon, {kind}"].startswith("HorizonError: step 12")


@several
@pytest.mark.parametrize("difference", ["key", "artifact", "sigma", "clip norm", "batch size", "run", "model", "step"])
def test_processes_that_differ_are_refused_everywhere(seen: Any, world: int, difference: str) -> None:
    """With one message but for what each is itself."""
    messages = {re.sub(r"\(here: .*?\)\)", "", rank[f"differs: {difference}"]) for rank in seen[world]}
    assert len(messages) == 1
    assert messages.pop().startswith(f"StateError: processes {world - 1} do not agree with process 0")


@several
def test_a_step_that_is_refused_spends_no_row(seen: Any, world: int) -> None:
    assert [rank["step after that"] for rank in seen[world]] == [0] * (world - 1) + [3]


@several
@pytest.mark.parametrize(
    ("difference", "culprit", "own"),
    [
        ("no sigma", -1, "PrivacyError: noise multiplier nan"),
        ("no key", -1, "StateError: . processes share this run"),
        ("journal", 0, "StateError: the journal .* exists"),
    ],
)
def test_a_process_that_cannot_begin_keeps_the_others_from_it(
    seen: Any, world: int, difference: str, culprit: int, own: str
) -> None:
    culprit %= world
    for number, rank in enumerate(seen[world]):
        reason = own.split(": ", 1)[1]
        wanted = own if number == culprit else f"StateError: process {culprit} of {world} could not begin: {reason}"
        assert re.match(wanted, rank[f"differs: {difference}"])


@several
def test_a_process_whose_parameters_changed_leaves_no_other_waiting(seen: Any, world: int) -> None:
    *others, changed = (rank["frozen on one"] for rank in seen[world])
    assert changed.startswith("StateError: the model's parameters changed during the run: 'bias'")
    assert all(other.startswith(f"StateError: processes {world - 1} do not agree") for other in others)


def test_parameters_split_over_some_processes_only_are_refused(seen: Any) -> None:
    assert all(
        "AdapterError: parameter 'weight' is split over 2 processes, but 4" in rank["submesh"] for rank in seen[4]
    )


@several
def test_processes_share_a_run_nonce_that_is_new(seen: Any, world: int) -> None:
    assert len({rank["run nonce"] for rank in seen[world]}) == 1
    assert seen[world][0]["run nonce"] != seen[4 if world == 2 else 2][0]["run nonce"]


@several
@pytest.mark.parametrize(
    ("ids", "refusal"),
    [
        ("on two processes", "ParticipationError: the id 77 is there twice"),
        ("of an earlier step elsewhere", "ParticipationError: the id 10 .*earlier step"),
        ("given by some only", "StateError: .*give the ids"),
        ("no ids at all", "ParticipationError: ids must be a list"),
    ],
)
def test_participation_is_checked_over_all_processes(seen: Any, world: int, ids: str, refusal: str) -> None:
    messages = {rank[f"ids {ids}"] for rank in seen[world]}
    assert len(messages) == 1
    assert re.match(refusal, messages.pop())


@several
def test_refused_ids_cost_no_row(seen: Any, world: int) -> None:
    """The step after them has the next row, and all processes count all examples."""
    for rank in seen[world]:
        assert equal(rank["after refused ids"], rank["noise, replicated"][1])
        assert rank["examples"] == 3 * world


@several
def test_a_process_that_cannot_write_its_journal_stops_all(seen: Any, world: int) -> None:
    for number, rank in enumerate(seen[world]):
        own = "the disk is full" if number == 0 else f"1 of {world} processes could not add their noise"
        assert rank["full disk"].startswith(f"StateError: {own}")
        assert rank["grad after that"]
        assert "do not agree" in rank["the next step"]


@kinds
def test_one_journal_a_run(seen: Any, kind: str) -> None:
    assert [rank[f"journals, {kind}"] for rank in seen[4]] == [True, False, False, False]
    # whichever process's state is restored, the run's journal is asked
    assert all(rank[f"journal in the state, {kind}"] for rank in seen[4])


@pytest.mark.parametrize("world", [0, *WORLDS])
@kinds
@pytest.mark.parametrize("lean", [True, False])
def test_a_checkpoint_of_four_processes_goes_on_anywhere(seen: Any, world: int, kind: str, lean: bool) -> None:
    """On 4, 2 and 1, from replicated to split and back, with buffers and without."""
    for rank in seen[world]:
        assert close(rank[f"resumed, {kind}, {lean}"], seen[0][0]["run, replicated"])
        if world == 4 and kind == "replicated":  # as it began: the sums are added up in the same order
            assert equal(rank[f"resumed, {kind}, {lean}"], rank["run, replicated"])


@several
def test_a_state_that_one_process_cannot_restore_is_refused_everywhere(seen: Any, world: int) -> None:
    for rank in seen[world]:
        assert "the state was changed after it was saved" in rank["a changed state"]
