"""`mmfact selftest`: exit codes, the table, --json, damage and Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mmfact.factorize.participation import single
from mmfact.factorize.strategy.buffered import BufferedStrategy
from mmfact.noise import selftest as module
from mmfact.noise.source import NoiseSource
from mmfact.noise.stepping import BufferedStepper
from mmfact.store.store import ArtifactStore

CHECKS = [
    "horizon", "keystream", "quantiles", "threads", "shards", "restore", "iterate space", "sensitivity",
    "variance", "normality", "tails", "lags of steps", "lags of elements", "pairs of steps", "pairs of elements",
    "repeats",
]  # fmt: skip


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """2^18 values instead of 2^25."""
    monkeypatch.setattr(module, "_DRAWS", 1 << 18)


@pytest.fixture
def too_small(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise from buffers is 5 % too small: far beyond the bound, which is 1.6 % at this size."""
    made = BufferedStepper.__init__

    def init(self: Any, coefficients: Any, scale: float, *rest: Any, **options: Any) -> None:
        made(self, coefficients, scale * 0.95, *rest, **options)

    monkeypatch.setattr(BufferedStepper, "__init__", init)


def test_at_real_size(mmfact: Any, store: Path) -> None:
    """128 steps of 262,144 elements, 2^25 values: exit 0 within a minute, one JSON object of plain values.

    It may fail by chance with probability 1e-6: the key is new in every run, as for a user.
    """
    options = ("--workload", "momentum", "--n", 128, "--lr-schedule", "cooldown", "--name", "ref", "--store", store)
    assert mmfact("compile", *options).code == 0
    begun = time.monotonic()
    ran = mmfact("selftest", "ref", "--json", "--store", store)
    assert time.monotonic() - begun < 60
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    content = ran.json
    assert list(content) == ["ref", "digest", "passed", "steps", "elements", "false_alarm", "checks"]
    assert (content["ref"], content["passed"], content["false_alarm"]) == ("ref", True, 1e-6)
    assert content["steps"] * content["elements"] == 1 << 25
    assert [check["name"] for check in content["checks"]] == CHECKS
    for check in content["checks"]:
        assert list(check) == ["name", "found", "limit", "passed", "rule"]
        assert check["passed"] is True
        assert 0 <= abs(check["found"]) <= check["limit"]
    rules = {check["name"]: check["rule"] for check in content["checks"]}
    assert rules["variance"] == "mean square of 33,554,432 values, less 1"
    assert rules["pairs of steps"].startswith("all pairs among 128 steps")


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("kind", ["prefix", "float32", "buffered", "low-rank", "custom", "ema"])
def test_table(mmfact: Any, vault: Path, kind: str) -> None:
    """Every check on a line, with what it compared; the sample and what a pass means below."""
    ran = mmfact("selftest", kind, "--store", vault)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    lines = ran.out.splitlines()
    assert lines[0].startswith(f"{kind}: ")
    assert lines[1].split() == ["check", "found", "limit", "verdict", "what"]
    assert [line[: line.index("  ")] for line in lines[2:18]] == CHECKS
    assert all(" good " in line for line in lines[2:18])
    assert "FAILS" not in ran.out
    assert "fails with probability 1e-06 at most" in ran.out
    assert lines[-1].startswith("passed: ")


@pytest.mark.usefixtures("few")
def test_json_of_every_kind(mmfact: Any, vault: Path, kinds: list[str]) -> None:
    """No NumPy value reaches the JSON writer, whatever the strategy and workload."""
    for kind in kinds:
        ran = mmfact("selftest", kind, "--json", "--store", vault)
        assert ran.json["passed"] is (ran.code == 0), kind


@pytest.mark.usefixtures("too_small")
def test_a_failure_is_exit_1_and_names_the_check(mmfact: Any, vault: Path) -> None:
    """The table and the JSON are printed all the same; stderr says which check and what to do, in one message."""
    ran = mmfact("selftest", "buffered", "--store", vault)
    assert ran.code == 1
    assert ran.err.startswith("mmfact: buffered fails the self-test on this machine: variance")
    assert "Do not train with it here" in ran.err
    assert ran.err.count("\n") == 1
    (line,) = [line for line in ran.out.splitlines() if line.startswith("variance")]
    assert " FAILS " in line
    assert "passed:" not in ran.out
    as_json = mmfact("selftest", "buffered", "--json", "--store", vault)
    assert (as_json.code, as_json.err.split(":")[0]) == (1, "mmfact")
    content = as_json.json
    assert content["passed"] is False
    assert "variance" in [check["name"] for check in content["checks"] if check["passed"] is False]
    assert "threads" in [check["name"] for check in content["checks"] if check["passed"] is True]


@pytest.mark.usefixtures("few")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(
    "json",
    [(), ("--json",)],
    ids=["table", "json"],
)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rows_that_are_no_numbers_are_a_no(
    mmfact: Any, vault: Path, monkeypatch: pytest.MonkeyPatch, json: tuple[str, ...], value: float
) -> None:
    """A sampler that gives NaN or infinity: exit 1 and one JSON object, no traceback."""
    fill = NoiseSource.fill

    def broken(self: Any, step: int, first: int, out: Any) -> None:
        fill(self, step, first, out)
        out[0] = value

    monkeypatch.setattr(NoiseSource, "fill", broken)
    ran = mmfact("selftest", "buffered", *json, "--store", vault)
    assert ran.code == 1
    assert ran.err.startswith("mmfact: buffered fails the self-test")
    if json:
        assert ran.json["passed"] is False


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_unknown_ref(mmfact: Any, vault: Path, json: tuple[str, ...]) -> None:
    ran = mmfact("selftest", "nothing", *json, "--store", vault)
    assert ran.code == 2
    assert ran.err.startswith("mmfact: ")
    assert "nothing" in ran.err
    assert (ran.json["exit_code"] == 2) if json else (ran.out == "")


@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_damaged_file(mmfact: Any, damaged: Path, json: tuple[str, ...]) -> None:
    """Bad input, as for every command but verify: nothing is streamed from it."""
    ran = mmfact("selftest", "ref", *json, "--store", damaged)
    assert ran.code == 2
    assert ran.err.startswith("mmfact: ")
    assert ran.err.count("\n") == 1
    assert (ran.json["exit_code"] == 2) if json else (ran.out == "")


def test_the_ref_is_asked_for(mmfact: Any) -> None:
    ran = mmfact("selftest")
    assert ran.code == 2
    assert "REF" in ran.err


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_a_strategy_that_float32_cannot_hold(
    mmfact: Any, vault: Path, store: Path, forge: Callable[..., str], json: tuple[str, ...]
) -> None:
    """Somebody's strategy that the stream refuses: said in words, with exit 2."""
    wild = BufferedStrategy(np.ones(24), np.full((24, 3), -4.0), np.zeros((24, 3)), np.ones((24, 3)))
    arrays = {f"strategy.{name}": array for name, array in wild.coefficients().items()}
    sensitivity = wild.sensitivity(single())
    loss, max_error = wild.errors(ArtifactStore(vault).load("buffered-float64").workload, single())

    def stated(spec: dict[str, Any]) -> None:
        certificate = spec["certificate"]
        certificate.update(sensitivity=sensitivity, loss=loss, max_error=max_error)
        certificate["excess"] = loss / certificate["lower_bound"] - 1

    forge(vault, "buffered-float64", store, "wild", stated, arrays)
    ran = mmfact("selftest", "wild", *json, "--store", store)
    assert ran.code == 2
    assert ran.err.startswith("mmfact: in float32 this strategy's rows would be rounded by")
    assert (ran.json["exit_code"] == 2) if json else (ran.out == "")


@pytest.mark.parametrize("until", [rb"streaming", rb"testing: lags of elements"], ids=["streaming", "testing"])
def test_interrupt(script: Path, vault: Path, terminal: Any, until: bytes) -> None:
    """Ctrl-C while rows are made on several threads, or transformed: exit 130 within seconds, one message."""
    begun = time.monotonic()
    code, out, text = terminal((script, "selftest", "buffered", "--store", vault), until)
    assert "Traceback" not in text, text[-400:]
    assert (code, out) == (130, "")
    assert "mmfact: interrupted" in text
    assert time.monotonic() - begun < 60


def test_progress_names_the_stages(script: Path, vault: Path, terminal: Any) -> None:
    """On a terminal, as often as it is redrawn; the object on stdout is not disturbed."""
    code, out, text = terminal((script, "selftest", "sgd", "--json", "--store", vault))
    assert code == 0
    assert out.startswith("{")
    assert "testing sgd: streaming" in text
    assert "testing sgd: testing: " in text
