"""Helpers for the command line's tests: run it in process or as a real process, forge artifacts, a small disk."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from attacks.forgery import form

from mmfact.cli.main import main

WORD = re.compile(rb"\x1b\[[0-9;?]*[A-Za-z]|[\r\n]")

SCRIPT = Path(sys.executable).parent / "mmfact"


@dataclass(frozen=True)
class Ran:
    """What a command did: exit code, what it printed, and Python warnings (which a user would see on stderr)."""

    code: int
    out: str
    err: str
    warnings: tuple[str, ...] = ()

    @property
    def json(self) -> dict[str, Any]:
        """The one JSON object on stdout; fails on anything beside it, NaN included."""

        def refuse(name: str) -> None:
            raise AssertionError(f"{name} is no JSON")

        content = json.loads(self.out, parse_constant=refuse)
        assert isinstance(content, dict)
        return content


@pytest.fixture(scope="session")
def mmfact() -> Callable[..., Ran]:
    """Run a command in this process. Any exception but SystemExit goes through: a user would see a traceback."""

    def run(*arguments: object) -> Ran:
        out, err = io.StringIO(), io.StringIO()
        with (
            contextlib.redirect_stdout(out),
            contextlib.redirect_stderr(err),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("default")
            try:
                main([str(argument) for argument in arguments])
            except SystemExit as end:
                code = end.code
        return Ran(code, out.getvalue(), err.getvalue(), tuple(str(one.message) for one in caught))

    return run


@pytest.fixture(scope="session")
def process() -> Callable[..., Ran]:
    """Run the installed script as a process of its own, without a terminal."""

    def run(*arguments: object, **options: Any) -> Ran:
        done = subprocess.run(
            [str(SCRIPT), *map(str, arguments)], capture_output=True, text=True, timeout=120, check=False, **options
        )
        return Ran(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture(scope="session")
def terminal() -> Callable[..., tuple[int, str, str]]:
    """Run a command with a pseudo-terminal for its stderr."""

    def run(command: Any, until: bytes | None = None, sending: int = signal.SIGINT) -> tuple[int, str, str]:
        """(exit code, stdout, what the terminal showed) of a process; a signal is sent once `until` has been shown."""
        leader, follower = pty.openpty()
        started = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            stderr=follower,
            text=True,
            env={**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"},
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job ignores it
        )
        os.close(follower)
        shown, sent = b"", until is None
        while True:
            try:
                part = os.read(leader, 4096)
            except OSError:
                break
            if not part:
                break
            shown += part
            if not sent and re.search(until, shown):
                started.send_signal(sending)
                sent = True
        out, _ = started.communicate(timeout=60)
        os.close(leader)
        assert sent, f"{until!r} was never shown"
        return started.returncode, out, WORD.sub(b" ", shown).decode()

    return run


@pytest.fixture(scope="session")
def script() -> Path:
    return SCRIPT


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """A path for a store; nothing is there yet."""
    return tmp_path / "store"


@pytest.fixture(scope="session")
def files() -> Callable[[Path], list[str]]:
    """Every file below a store's path."""

    def find(store: Path) -> list[str]:
        return sorted(str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())

    return find


DENSE = ("--strategy", "dense")
KINDS = {
    "prefix": ("--workload", "prefix-sum", "--n", 9, *DENSE),
    "sgd": ("--workload", "sgd", "--n", 12, "--lr-schedule", "cosine", *DENSE),
    "momentum": ("--workload", "momentum", "--n", 16, *DENSE),
    "cooldown": ("--workload", "momentum", "--n", 12, "--beta", 0.95, "--lr-schedule", "cooldown", *DENSE),
    "coupled": ("--workload", "momentum", "--n", 10, "--weight-decay", 0.02, *DENSE),
    "decoupled": ("--workload", "sgd", "--n", 10, "--weight-decay", 0.02, "--weight-decay-kind", "decoupled", *DENSE),
    "ema": ("--workload", "momentum", "--n", 10, "--ema", 0.9, "--lr-schedule", "warmup:fraction=0.3", *DENSE),
    "float32": ("--workload", "momentum", "--n", 10, "--dtype", "float32", *DENSE),
    "dense": ("--workload", "sgd", "--n", 10, "--method", "dense", *DENSE),
    "buffered": ("--workload", "momentum", "--n", 40, "--lr-schedule", "cooldown"),
    "buffered-float64": ("--workload", "prefix-sum", "--n", 24, "--dtype", "float64", "--buffers", 3),
    "low-rank": ("--workload", "momentum", "--n", 40, "--strategy", "banded-low-rank", "--bandwidth", 8, "--rank", 6),
}


@pytest.fixture(scope="session")
def vault(tmp_path_factory: pytest.TempPathFactory, mmfact: Callable[..., Ran]) -> Path:
    """A store with one artifact of each kind; tests only read it."""
    base = tmp_path_factory.mktemp("vault")
    store = base / "store"
    for name, options in KINDS.items():
        assert mmfact("compile", *options, "--name", name, "--store", store).code == 0
    np.save(base / "matrix.npy", np.tril(np.random.default_rng(3).uniform(0.2, 1, (8, 8))) + np.eye(8))
    custom = ("--workload", "custom", "--matrix", base / "matrix.npy", "--name", "custom", *DENSE)
    assert mmfact("compile", *custom, "--store", store).code == 0
    return store


@pytest.fixture(scope="session")
def kinds() -> list[str]:
    return [*KINDS, "custom"]


@pytest.fixture(scope="session")
def forge() -> Callable[..., str]:
    """Write a changed copy of an artifact into a store, with digests that fit, under a ref.

    forge(source store, source ref, store, ref, edit of the spec, {array name: values}) returns the logical digest.
    """

    def build(
        source: Path,
        name: str,
        store: Path,
        ref: str,
        edit: Callable[[dict[str, Any]], None] = lambda spec: None,
        arrays: dict[str, np.ndarray] | None = None,
    ) -> str:
        entry = json.loads((source / "refs" / f"{name}.json").read_text())
        with h5py.File(source / entry["artifact"], "r") as file:
            chosen = {key: file[key][...] for key in file}
        spec = copy.deepcopy(json.loads(chosen.pop("spec").tobytes()))
        chosen.update(arrays or {})
        for key, array in chosen.items():
            digest = hashlib.sha256(array.tobytes()).hexdigest()
            spec["datasets"][key] = {"shape": list(array.shape), "dtype": array.dtype.str, "sha256": digest}
        edit(spec)
        text = json.dumps(spec, sort_keys=True, separators=(",", ":")).encode()
        with h5py.File("forged", "w", driver="core", backing_store=False) as file:
            for key, array in {"spec": np.frombuffer(text, np.uint8), **chosen}.items():
                file.create_dataset(key, data=array, **form(array.shape))
            file.flush()
            data = bytes(file.id.get_file_image())
        logical = hashlib.sha256(text).hexdigest()
        artifact = f"{logical}-{hashlib.sha256(data).hexdigest()}.h5"
        (store / "refs").mkdir(parents=True, exist_ok=True)
        (store / artifact).write_bytes(data)
        (store / "refs" / f"{ref}.json").write_text(json.dumps({"artifact": artifact, "created": "2024-01-01T00:00"}))
        return logical

    return build


@pytest.fixture
def damaged(mmfact: Callable[..., Ran], store: Path) -> Path:
    """A store whose only artifact, ref `ref`, has one flipped bit."""
    assert mmfact("compile", "--workload", "sgd", "--n", 3, "--name", "ref", "--store", store, *DENSE).code == 0
    (path,) = store.glob("*.h5")
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[3000] ^= 4
    path.write_bytes(data)
    return store


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test in a directory of its own, without the user's MMFACT_STORE."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MMFACT_STORE", raising=False)
    os.environ.pop("COLUMNS", None)
