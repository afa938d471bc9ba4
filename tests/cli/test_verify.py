"""`mmfact verify`: passes what is true, by numbers that NumPy gives too; fails what is not."""

from __future__ import annotations

import numpy as np
import pytest

from mmfact.factorize import verification
from mmfact.store.store import ArtifactStore


def simulate(workload) -> np.ndarray:
    """A from its definition: the optimizer run on unit gradients."""
    if workload.matrix is not None:
        return workload.matrix
    n, lam = workload.n, workload.weight_decay
    x, m, e, rows = np.zeros(n), np.zeros(n), np.zeros(n), []
    for gradient, eta in zip(np.eye(n), workload.learning_rates, strict=True):
        coupled = workload.weight_decay_kind == "coupled"
        m = workload.beta * m + gradient + (lam * -x if coupled else 0)
        x = (x if coupled else (1 - eta * lam) * x) + eta * m
        e = workload.ema * e + (1 - workload.ema) * x
        rows.append(e)
    return np.array(rows)


def coefficients(artifact) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in artifact.strategy.coefficients().items()}


def stored_strategy(artifact) -> np.ndarray:
    """C from what the file holds, by the definition of each strategy in docs/format.md."""
    n, of = artifact.n, coefficients(artifact)
    C = np.zeros((n, n))
    if artifact.strategy.kind == "dense":
        C[np.tril_indices(n)] = of["packed"]
    elif artifact.strategy.kind == "buffered":
        for j in range(n):
            h = of["q"][j]
            for i in range(j + 1, n):
                C[i, j] = of["g"][i] @ h
                h = of["decay"][i] * h
        C += np.diag(of["c"])
    else:
        width = of["band"].shape[1]
        B = np.tril(of["left"] @ of["right"].T, -width)
        for i in range(n):
            for j in range(max(0, i - width + 1), i + 1):
                B[i, j] = of["band"][i, i - j]
        C = np.linalg.solve(B, simulate(artifact.workload))
    return C


def test_every_kind_passes_and_the_numbers_are_numpys(mmfact, vault, kinds):
    """The recomputed figures are those of plain dense algebra, to 1e-11 relative."""
    for kind in kinds:
        content = mmfact("verify", kind, "--json", "--store", vault).json
        artifact = ArtifactStore(vault).load(kind)
        A, C, v = simulate(artifact.workload), stored_strategy(artifact), artifact.multipliers
        assert np.allclose(C, artifact.C, rtol=0, atol=1e-12)
        B = A @ np.linalg.inv(C)
        sensitivity = np.sqrt((C**2).sum(0)).max()
        nuclear = np.sqrt(np.linalg.eigvalsh(np.diag(v**0.5) @ A.T @ A @ np.diag(v**0.5)).clip(0)).sum()
        expected = {
            "sensitivity": sensitivity,
            "loss": sensitivity**2 * (B**2).sum(),
            "max error": sensitivity * np.sqrt((B**2).sum(1)).max(),
            "lower bound": nuclear**2 / v.sum(),
        }
        assert content["passed"] is True
        assert content["digest"] == artifact.digest
        assert content["excess"] == artifact.certificate.excess
        checks = {check["name"]: check for check in content["checks"]}
        assert set(checks) == {*expected, "B C = A"}
        for name, value in expected.items():
            assert checks[name]["recomputed"] == pytest.approx(value, rel=1e-11)
            assert checks[name]["stored"] == pytest.approx(value, rel=1e-8)
        assert checks["loss"]["stored"] == artifact.certificate.loss
        assert checks["lower bound"]["stored"] == artifact.certificate.lower_bound
        assert checks["B C = A"]["recomputed"] <= 1e-13
        assert "no code shared with the compiler" in content["how"]


@pytest.mark.parametrize("kind", ["prefix", "cooldown", "coupled", "custom", "buffered-float64"])
def test_reference_passes(mmfact, vault, kind):
    """The semidefinite program in cvxpy agrees to 1e-5."""
    content = mmfact("verify", kind, "--reference", "--json", "--store", vault).json
    (check,) = [check for check in content["checks"] if "cvxpy" in check["name"]]
    assert content["passed"] is True
    certificate = ArtifactStore(vault).load(kind).certificate
    assert check["recomputed"] == pytest.approx(certificate.loss, rel=1e-5)
    assert "cvxpy" in content["how"]


def test_reference_of_a_low_rank(mmfact, store):
    options = ("--strategy", "banded-low-rank", "--bandwidth", 3, "--rank", 2, "--tolerance", 0.1, "--name", "small")
    assert mmfact("compile", "--workload", "momentum", "--n", 8, *options, "--store", store).code == 0
    content = mmfact("verify", "small", "--reference", "--json", "--store", store).json
    (check,) = [check for check in content["checks"] if "cvxpy" in check["name"]]
    certificate = ArtifactStore(store).load("small").certificate
    assert content["passed"] is True
    assert certificate.lower_bound * (1 - 1e-5) <= check["recomputed"] <= certificate.loss * (1 + 1e-5)


def test_reference_notices_a_false_optimum(mmfact, vault, monkeypatch):
    """If cvxpy finds something better than the lower bound allows, the answer is no."""
    monkeypatch.setattr(
        verification, "reference_loss", lambda workload: ArtifactStore(vault).load("prefix").certificate.loss * 0.999
    )
    ran = mmfact("verify", "prefix", "--reference", "--store", vault)
    assert ran.code == 1
    assert "cvxpy" in ran.err


def test_table_says_what_was_compared_and_how(mmfact, vault):
    ran = mmfact("verify", "momentum", "--store", vault)
    for text in ("sensitivity", "loss", "max error", "lower bound", "B C = A", "agrees", "singular values", "verified"):
        assert text in ran.out
    assert "FAILS" not in ran.out


def test_shares_no_code_with_the_compiler(vault, kinds, monkeypatch):
    """With every piece of the compiler broken, the recomputation still runs and still agrees."""
    artifacts = [ArtifactStore(vault).load(kind) for kind in kinds]
    inputs = [(a.workload, a.strategy, a.multipliers, a.certificate) for a in artifacts]
    # C as it is exported is what is judged against the coefficients, so this one thing of the compiler's stays
    exported = {id(a.strategy): a.C for a in artifacts}
    for kind in ("buffered.Buffered", "banded_low_rank.BandedLowRank", "dense.Dense"):
        monkeypatch.setattr(
            f"mmfact.factorize.strategy.{kind}Strategy.to_dense", lambda strategy: exported[id(strategy)]
        )

    def broken(*arguments, **options):
        raise AssertionError("the compiler's code was called")

    for name in (
        "workload.Workload.state_space",
        "workload.Workload.apply",
        "workload.Workload.dense",
        "workload.Workload.inverse_bands",
        "workload.Workload.column_energies",
        "optimum.solve",
        "dual_dense.DenseDual.__init__",
        "dual_structured.StructuredDual.__init__",
        "construct.dense.build",
        "construct.buffered.build",
        "construct.banded_low_rank.build",
        "certificate.certify",
        "strategy.dense.DenseStrategy.noising",
        "strategy.dense.DenseStrategy.decoder",
        "strategy.dense.DenseStrategy.errors",
        "strategy.dense.DenseStrategy.sensitivity",
        "strategy.dense.DenseStrategy.column_norms",
        "strategy.buffered.BufferedStrategy.noising",
        "strategy.buffered.BufferedStrategy.decoder",
        "strategy.buffered.BufferedStrategy.errors",
        "strategy.buffered.BufferedStrategy.sensitivity",
        "strategy.buffered.BufferedStrategy.column_norms",
        "strategy.buffered._column_energies",
        "strategy.buffered._variances",
        "strategy.buffered._inverse",
        "strategy.banded_low_rank.BandedLowRankStrategy.noising",
        "strategy.banded_low_rank.BandedLowRankStrategy.decoder",
        "strategy.banded_low_rank.BandedLowRankStrategy.dense_decoder",
        "strategy.banded_low_rank.BandedLowRankStrategy.errors",
        "strategy.banded_low_rank.BandedLowRankStrategy.sensitivity",
        "strategy.banded_low_rank.BandedLowRankStrategy.column_norms",
        "strategy.banded_low_rank.assemble",
        "reference.reference_loss",
    ):
        monkeypatch.setattr(f"mmfact.factorize.{name}", broken)
    for each in inputs:
        assert verification.verify(*each).passed


# --- what is not true ------------------------------------------------------------------------------


def scaled(**factors):
    """Certificate figures multiplied by factors, the excess made to fit."""

    def edit(spec):
        certificate = spec["certificate"]
        for name, factor in factors.items():
            certificate[name] *= factor
        certificate["excess"] = certificate["loss"] / certificate["lower_bound"] - 1

    return edit


# By less than the millionth that a reader leaves to other linear algebra: only `verify` sees it.
FALSE = {
    "loss a little low": (scaled(loss=1 - 5e-7, lower_bound=1 - 5e-7), "loss"),
    "loss a little high": (scaled(loss=1 + 8e-7), "loss"),
    "bound above the optimum": (scaled(loss=1 + 8e-7, lower_bound=1 + 4e-7), "lower bound"),
    "bound too low": (scaled(lower_bound=0.99), "lower bound"),
    "bound of nothing": (scaled(lower_bound=1e-12), "lower bound"),
    "max error a little low": (scaled(max_error=1 - 5e-7), "max error"),
    "max error a little high": (scaled(max_error=1 + 8e-7), "max error"),
}


@pytest.mark.parametrize("name", FALSE)
@pytest.mark.parametrize("kind", ["momentum", "custom", "buffered", "low-rank"])
def test_false_certificate(mmfact, vault, store, forge, kind, name):
    """Digests that fit do not make it true: exit 1, the failed check named, in the table and in --json."""
    edit, failed = FALSE[name]
    forge(vault, kind, store, "false", edit)
    ran = mmfact("verify", "false", "--store", store)
    assert ran.code == 1
    assert ran.err.startswith("mmfact: false fails verification: ")
    assert failed in ran.err
    assert "FAILS" in ran.out
    as_json = mmfact("verify", "false", "--json", "--store", store)
    assert as_json.code == 1
    assert as_json.json["passed"] is False
    assert failed in [check["name"] for check in as_json.json["checks"] if not check["passed"]]


GROSSLY_FALSE = {
    "loss too high": (scaled(loss=1.001), "loss"),
    "loss halved, bound too": (scaled(loss=0.5, lower_bound=0.5), "loss"),
    "max error too low": (scaled(max_error=0.999), "max error"),
    "max error too high": (scaled(max_error=1.001), "max error"),
    "max error negative": (scaled(max_error=-1.0), "max_error"),
}


@pytest.mark.parametrize("name", GROSSLY_FALSE)
@pytest.mark.parametrize("kind", ["momentum", "custom", "buffered", "low-rank"])
def test_grossly_false_certificate(mmfact, vault, store, forge, kind, name):
    """It does not even load; `verify` answers no all the same, and the figure is named."""
    edit, failed = GROSSLY_FALSE[name]
    forge(vault, kind, store, "false", edit)
    for json in ((), ("--json",)):
        ran = mmfact("verify", "false", *json, "--store", store)
        assert ran.code == 1
        assert failed in ran.err
        assert "cannot be trusted" in ran.err
    assert ran.json["passed"] is False
    assert mmfact("inspect", "false", "--store", store).code == 2


def test_false_multipliers(mmfact, vault, store, forge):
    """The multipliers are the proof; others prove another bound."""
    v = ArtifactStore(vault).load("momentum").multipliers * np.linspace(1, 3, 16)
    forge(vault, "momentum", store, "false", arrays={"multipliers": v})
    ran = mmfact("verify", "false", "--store", store)
    assert ran.code == 1
    assert "lower bound" in ran.err


def test_false_workload(mmfact, vault, store, forge):
    """Other learning rates under the same certificate."""
    forge(vault, "cooldown", store, "false", arrays={"learning_rates": np.linspace(1, 0.5, 12)})
    ran = mmfact("verify", "false", "--store", store)
    assert ran.code == 1
    assert "loss" in ran.err


def test_false_strategy(mmfact, vault, store, forge):
    """Another C with the right sensitivity: the identity."""
    packed = np.eye(16)[np.tril_indices(16)]
    forge(
        vault,
        "momentum",
        store,
        "false",
        lambda spec: spec["certificate"].update(sensitivity=1.0),
        {"strategy.packed": packed},
    )
    ran = mmfact("verify", "false", "--store", store)
    assert ran.code == 1
    assert "loss" in ran.err


EXTREME = {
    "a coefficient that overflows": {"strategy.packed": np.array([1e-310, 0.0, 1, 0, 0, 1])},
    "a coefficient whose square vanishes": {"strategy.packed": np.array([1e-170, 0.0, 1, 0, 0, 1])},
    "immense multipliers": {"multipliers": np.full(3, 1e308)},
    "tiny multipliers": {"multipliers": np.full(3, 5e-324)},
    "immense rates": {"learning_rates": np.full(3, 1e60)},
    "tiny rates": {"learning_rates": np.full(3, 1e-60)},
}


@pytest.mark.parametrize("name", EXTREME)
@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_extreme_numbers_are_a_no_and_no_traceback(mmfact, store, forge, tmp_path, name, json):
    """Recomputed figures may be infinite or NaN: still one object, still exit 1."""
    source = ("compile", "--workload", "sgd", "--n", 3, "--strategy", "dense", "--name", "source")
    assert mmfact(*source, "--store", tmp_path / "source").code == 0
    forge(
        tmp_path / "source",
        "source",
        store,
        "extreme",
        lambda spec: spec["certificate"].update(sensitivity=1.0) if "strategy.packed" in EXTREME[name] else None,
        EXTREME[name],
    )
    ran = mmfact("verify", "extreme", *json, "--store", store)
    assert ran.code == 1
    assert ran.err.startswith("mmfact: ")
    if json:
        assert ran.json["passed"] is False


ODD = {
    "NaN in the provenance": lambda spec: spec["provenance"].update(note=float("nan")),
    "NaN in the certificate": lambda spec: spec["certificate"].update(residual=float("nan")),
    "immense n": lambda spec: spec["workload"].update(n=10**400),
    "schedule no text": lambda spec: spec["workload"].update(schedule=["x"]),
}


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("command", ["inspect", "verify", "list", "compile"])
@pytest.mark.parametrize("json", [(), ("--json",)], ids=["table", "json"])
def test_odd_files_do_not_break_any_command(mmfact, vault, store, forge, command, json, name):
    """Somebody else's file in a shared store: each command answers in words."""
    forge(vault, "sgd", store, "odd", ODD[name])
    arguments = {
        "list": (),
        "compile": ("--workload", "sgd", "--n", 3, "--name", "odd"),
    }.get(command, ("odd",))
    ran = mmfact(command, *arguments, *json, "--store", store)
    assert ran.code == {"list": 0, "inspect": 2, "verify": 1, "compile": 2}[command]
    if json:
        assert ran.json
