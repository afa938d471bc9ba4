"""compile, list, inspect: what they print, and that --json says the same as the library."""

from __future__ import annotations

import json
import math
import os
import re

import numpy as np
import pytest

from mmfact.store.store import ArtifactStore

SMALL = ("compile", "--workload", "momentum", "--n", 5)

# Optimal losses from /work/shared/goldens.json: an independent Newton-CG on the dense dual.
GOLDENS = [
    (("prefix-sum", 2), 2.6180339887498953),
    (("prefix-sum", 8), 17.86617733277373),
    (("prefix-sum", 16), 45.66535681198507),
    (("momentum", 16), 654.0398033606745),
]


# How far above the optimum each strategy may be: the default tolerance, what casting to float32 costs, or rounding.
WITHIN = {
    "buffered": ((), 1e-4),
    "buffered, all it can": (("--dtype", "float64", "--tolerance", 1e-9), 1e-9),
    "low rank": (("--strategy", "banded-low-rank"), 1e-4),
    "dense": (("--strategy", "dense"), 1e-9),
    "dense float32": (("--strategy", "dense", "--dtype", "float32"), 1e-6),
}


@pytest.mark.parametrize("strategy", WITHIN)
@pytest.mark.parametrize(("request_", "loss"), GOLDENS, ids=str)
def test_compile_reaches_the_known_optimum(mmfact, store, request_, loss, strategy):
    """To the tolerance, or to 1e-9 where nothing is approximated, with a lower bound that is one."""
    (kind, n), (options, within) = request_, WITHIN[strategy]
    ran = mmfact("compile", "--workload", kind, "--n", n, *options, "--json", "--store", store)
    certificate = ran.json["certificate"]
    assert (ran.code, ran.json["tolerance_reached"]) == (0, True)
    assert -1e-12 <= certificate["loss"] / loss - 1 <= within
    assert loss * (1 - 1e-9) <= certificate["lower_bound"] <= loss * (1 + 1e-12)
    assert 0 <= certificate["excess"] <= within + 1e-9


def test_json_is_one_object_and_nothing_else(mmfact, vault, kinds):
    """A script that parses stdout must not meet a table, a warning or a second object."""
    for command in (("list",), *[(c, kind) for c in ("inspect", "verify") for kind in kinds]):
        ran = mmfact(*command, "--json", "--store", vault)
        assert (ran.code, ran.err, ran.warnings) == (0, "", ()), command
        assert ran.json
        assert ran.out.startswith("{\n")
        assert ran.out.endswith("}\n")


def test_json_before_and_after_the_other_options(mmfact, store):
    assert mmfact(*SMALL, "--json", "--store", store).json["already_there"] is False
    assert mmfact("compile", "--json", "--store", store, *SMALL[1:]).json["already_there"] is True


def test_tables_say_nothing_on_stderr(mmfact, vault, store):
    """Without a terminal there is no progress, and success is silent there."""
    for command in (("list",), ("inspect", "momentum"), ("verify", "momentum")):
        ran = mmfact(*command, "--store", vault)
        assert (ran.code, ran.err, ran.warnings) == (0, "", ())
        assert ran.out
    ran = mmfact(*SMALL, "--store", store)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())


def test_compile_json_agrees_with_the_library(mmfact, store):
    """The object is the certificate of what was stored, to the last digit."""
    content = mmfact(*SMALL, "--json", "--store", store).json
    artifact = ArtifactStore(store).load(content["ref"])
    check(content, artifact)
    assert content["tolerance_reached"] is True
    assert content["already_there"] is False


def test_inspect_json_agrees_with_the_library(mmfact, vault, kinds):
    for kind in kinds:
        content = mmfact("inspect", kind, "--json", "--store", vault).json
        assert content["ref"] == kind
        check(content, ArtifactStore(vault).load(kind))


def check(content, artifact):
    certificate = content["certificate"]
    assert content["digest"] == artifact.digest
    assert content["path"] == str(artifact.path)
    assert content["size_bytes"] == artifact.path.stat().st_size
    assert content["workload"] == artifact.workload.spec()
    assert content["participation"] == "single"
    assert content["provenance"] == json.loads(json.dumps(artifact.provenance))
    strategy, n = artifact.strategy, artifact.n
    r, w = strategy.buffers, {"prefix-sum": 1, "sgd": 1, "momentum": 2}.get(artifact.workload.kind)
    # what streaming keeps, its bytes in float32 (what is differenced, in float64) and the work of a step
    shape = {
        "dense": lambda: ({}, n, 4 * n, n),
        "buffered": lambda: ({"buffers": r}, r, 4 * r, 3 * r + 1),
        "banded-low-rank": lambda: (
            {"bandwidth": strategy.bandwidth, "rank": strategy.rank},
            strategy.bandwidth - 1 + strategy.rank + w,
            4 * (strategy.bandwidth - 1) + 8 * (strategy.rank + w),
            strategy.bandwidth + 2 * strategy.rank + w + 1,
        ),
    }
    parameters, buffers, memory, cost = shape[strategy.kind]()
    assert content["strategy"] == {
        "kind": strategy.kind,
        "dtype": strategy.dtype.name,
        **parameters,
        "buffers": buffers,
        "bytes_per_parameter": memory,
        "multiply_adds": cost,
        "amplification": None if strategy.kind == "dense" else strategy.amplification(),
    }
    for name in ("loss", "lower_bound", "sensitivity", "max_error", "iterations", "method", "n", "residual"):
        assert certificate[name] == getattr(artifact.certificate, name)
    assert certificate["excess"] == artifact.certificate.loss / artifact.certificate.lower_bound - 1
    assert certificate["rmse"] == math.sqrt(artifact.certificate.loss / artifact.n)


def test_list_json_agrees_with_the_library(mmfact, vault, kinds):
    content = mmfact("list", "--json", "--store", vault).json
    rows = {row["ref"]: row for row in content["artifacts"]}
    assert list(rows) == sorted(kinds)
    for entry in ArtifactStore(vault).entries():
        row = rows[entry.ref]
        assert row["digest"] == entry.artifact.digest
        assert row["file"] == entry.artifact.path.name
        assert row["size_bytes"] == entry.artifact.path.stat().st_size
        assert row["excess"] == entry.artifact.certificate.excess
        assert row["rmse"] == entry.artifact.certificate.rmse
        assert row["workload"] == entry.artifact.workload.spec()
        assert row["created"] == entry.created
        assert row["error"] is None


def test_list_of_nothing(mmfact, store):
    assert mmfact("list", "--json", "--store", store).json["artifacts"] == []
    ran = mmfact("list", "--store", store)
    assert ran.code == 0
    assert "mmfact compile" in ran.out
    assert not store.exists()


def test_list_shows_damage_and_goes_on(mmfact, damaged):
    """A damaged artifact is a line of the table, in both forms."""
    assert mmfact("compile", "--workload", "sgd", "--n", 2, "--name", "sound", "--store", damaged).code == 0
    content = mmfact("list", "--json", "--store", damaged).json
    assert [(row["ref"], row["error"] is None) for row in content["artifacts"]] == [("ref", False), ("sound", True)]
    assert "damaged" in content["artifacts"][0]["error"]
    text = mmfact("list", "--store", damaged).out
    assert re.search(r"^ref .*damaged", text, re.M)
    assert re.search(r"^sound +sgd +2 ", text, re.M)


@pytest.mark.parametrize("strategy", ["buffered", "banded-low-rank", "dense"])
def test_table_is_understood_without_the_paper(mmfact, store, strategy):
    """Workload, loss and RMSE, lower bound, excess in words, sensitivity, strategy, size and the whole digest."""
    given = () if strategy == "buffered" else ("--strategy", strategy)
    ran = mmfact(*SMALL, *given, "--store", store)
    ref = "-".join(["momentum-n5", *given[1:]])
    artifact = ArtifactStore(store).load(ref)
    for text in (
        ref,
        "momentum, beta 0.9, n = 5 steps, schedule constant",
        "no factorization can beat this by more",
        "no factorization has a smaller loss",
        f"{artifact.certificate.loss:.10g}",
        f"{artifact.certificate.rmse:.6g}",
        f"{artifact.certificate.sensitivity:.12g}",
        f"{strategy}, {'float64' if strategy == 'dense' else 'float32'}",
        artifact.digest,
        "KiB",
    ):
        assert text in ran.out
    for word in ("excess", "sensitivity", "strategy", "size", "digest", "RMSE", "lower bound", "max error"):
        assert re.search(rf"^{word} ", ran.out, re.M)


def test_inspect_shows_provenance_and_takes_digest_and_path(mmfact, vault):
    artifact = ArtifactStore(vault).load("momentum")
    texts = [
        mmfact("inspect", name, "--store", vault) for name in ("momentum", artifact.digest[:10], str(artifact.path))
    ]
    for ran in texts:
        assert ran.code == 0
        assert "numpy" in ran.out
        assert "tolerance 0.0001" in ran.out
        assert artifact.digest in ran.out


def test_excess_is_never_shown_smaller_than_it_is(mmfact, forge, vault, store):
    """Two digits, but rounded up: "no factorization can beat this by more than" must stay true."""

    def worse(spec):
        bound = spec["certificate"]["loss"] / (1 + 1.449e-6)
        spec["certificate"].update(lower_bound=bound, excess=spec["certificate"]["loss"] / bound - 1)

    forge(vault, "momentum", store, "worse", worse)
    out = mmfact("inspect", "worse", "--store", store).out
    shown = float(re.search(r"^excess +(\S+) %", out, re.M)[1])
    assert 1.449e-4 <= shown <= 1.6e-4


def test_excess_of_a_percent_is_not_shown_smaller_either(mmfact, forge, vault, store):
    def worse(spec):
        bound = spec["certificate"]["loss"] / 1.0123499
        spec["certificate"].update(lower_bound=bound, excess=spec["certificate"]["loss"] / bound - 1)

    forge(vault, "momentum", store, "worse", worse)
    out = mmfact("inspect", "worse", "--store", store).out
    shown = float(re.search(r"^excess +(\S+) %", out, re.M)[1])
    assert 1.23499 <= shown <= 1.3


def test_store_comes_from_option_then_environment_then_default(mmfact, tmp_path, monkeypatch):
    assert mmfact(*SMALL).code == 0
    assert (tmp_path / "artifacts" / "refs" / "momentum-n5.json").is_file()
    monkeypatch.setenv("MMFACT_STORE", str(tmp_path / "b"))
    assert mmfact(*SMALL).code == 0
    assert (tmp_path / "b" / "refs" / "momentum-n5.json").is_file()
    assert mmfact(*SMALL, "--store", tmp_path / "c").code == 0
    assert (tmp_path / "c" / "refs" / "momentum-n5.json").is_file()
    assert mmfact("list", "--json").json["store"] == str(tmp_path / "b")


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(
    "options",
    [
        ("prefix-sum",),
        ("sgd", "--lr-schedule", "cooldown"),
        ("sgd", "--weight-decay", 0.5),
        ("sgd", "--weight-decay", 0.5, "--weight-decay-kind", "decoupled"),
        ("momentum",),
        ("momentum", "--weight-decay", 0.5, "--ema", 0.5),
        ("momentum", "--method", "dense"),
        ("momentum", "--method", "fixed-point"),
        ("momentum", "--dtype", "float32"),
        ("momentum", "--dtype", "float64"),
        ("momentum", "--strategy", "dense"),
        ("momentum", "--strategy", "dense", "--dtype", "float32"),
        ("momentum", "--strategy", "banded-low-rank"),
        ("momentum", "--weight-decay", 0.5, "--ema", 0.5, "--strategy", "banded-low-rank", "--dtype", "float64"),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_very_short_runs(mmfact, store, options, n):
    """One step is a horizon too: compile, verify."""
    kind, *rest = options
    ran = mmfact("compile", "--workload", kind, "--n", n, *rest, "--json", "--store", store)
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    assert mmfact("verify", ran.json["ref"], "--store", store).code == 0


def test_the_options_reach_the_solver(mmfact, store):
    """An option that is parsed and dropped would go unnoticed in the ref."""
    compiled = {}
    for method in ("structured", "dense", "fixed-point"):
        ran = mmfact(*SMALL, "--method", method, "--tolerance", 1e-3, "--json", "--store", store)
        compiled[method] = ran.json
    assert compiled["structured"]["certificate"]["method"] == "structured"
    assert compiled["dense"]["certificate"]["method"] == "dense"
    assert compiled["fixed-point"]["certificate"]["products"] == 0
    assert compiled["fixed-point"]["certificate"]["excess"] > compiled["dense"]["certificate"]["excess"]
    for dtype in ("float32", "float64"):
        for strategy in ("buffered", "banded-low-rank", "dense"):
            chosen = ("--strategy", strategy, "--dtype", dtype)
            content = mmfact(*SMALL, *chosen, "--json", "--store", store).json
            assert (content["strategy"]["kind"], content["strategy"]["dtype"]) == (strategy, dtype)
            stored = ArtifactStore(store).load(content["ref"]).strategy.coefficients()
            assert {array.dtype.name for array in stored.values()} == {dtype}
    content = mmfact(*SMALL, "--buffers", 2, "--tolerance", 0.5, "--json", "--store", store).json
    assert content["strategy"]["buffers"] == 2
    shape = ("--strategy", "banded-low-rank", "--bandwidth", 2, "--rank", 1, "--tolerance", 0.5)
    content = mmfact(*SMALL, *shape, "--json", "--store", store).json
    assert (content["strategy"]["bandwidth"], content["strategy"]["rank"]) == (2, 1)


def test_schedule_file_is_used(mmfact, store, tmp_path):
    """The rates in the artifact are those of the file, in its order; comments and blank lines are not rates."""
    rates = [1.0, 0.5, 0.25, 0.125]
    (tmp_path / "rates.txt").write_text("# peak\n1.0\n0.5  # half\n\n0.25\n1.25e-1\n")
    content = mmfact(
        "compile", "--workload", "sgd", "--n", 4, "--lr-schedule", "rates.txt", "--json", "--store", store
    ).json
    artifact = ArtifactStore(store).load(content["ref"])
    assert artifact.workload.learning_rates.tolist() == rates
    assert np.allclose(artifact.A, np.tril(np.ones((4, 4))) * rates, rtol=1e-15)


@pytest.mark.parametrize("suffix", [".npy", ".npz", ".csv"])
def test_matrix_of_each_format_is_used(mmfact, store, tmp_path, suffix):
    A = np.tril(np.random.default_rng(1).uniform(0.1, 1, (6, 6))) + np.eye(6)
    path = tmp_path / f"matrix{suffix}"
    if suffix == ".npy":
        np.save(path, A)
    elif suffix == ".npz":
        np.savez(path, anything=A)
    else:
        np.savetxt(path, A, delimiter=",", fmt="%.17g")
    for extra in ((), ("--n", 6)):
        ran = mmfact("compile", "--workload", "custom", "--matrix", path, *extra, "--json", "--store", store)
        assert ran.code == 0, ran.err
        assert np.array_equal(ArtifactStore(store).load(ran.json["ref"]).A, A)
    assert ran.json["already_there"] is True


def test_progress_goes_to_a_terminal_only(script, store, terminal):
    """On a terminal the solver's iterations show on stderr; stdout stays the one object."""
    command = (script, "compile", "--workload", "momentum", "--n", 512, "--method", "fixed-point")
    code, out, text = terminal((*command, "--tolerance", "1e-3", "--json", "--store", store))
    assert code == 0
    assert json.loads(out)["tolerance_reached"] is True
    assert "iteration" in text
    assert re.search(r"within \S+ %", text)


def test_a_real_process_prints_one_object_and_no_warnings(process, store):
    """As a user runs it: nothing on stderr, one object on stdout, twice."""
    for there in (False, True):
        ran = process(*SMALL, "--json", "--store", store)
        assert (ran.code, ran.err) == (0, "")
        assert ran.json["already_there"] is there


def test_no_progress_in_a_log_that_likes_colour(process, store):
    """CI services set FORCE_COLOR; stderr is a file all the same, and a spinner in it is noise."""
    environment = {**os.environ, "FORCE_COLOR": "1"}
    ran = process("compile", "--workload", "momentum", "--n", 300, "--json", "--store", store, env=environment)
    assert (ran.code, ran.err) == (0, "")
    assert ran.json["tolerance_reached"] is True
