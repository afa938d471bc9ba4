"""`mmfact compare`: exact figures of every classic mechanism, the same as the library's and as NumPy's."""

from __future__ import annotations

import re

import numpy as np
import pytest

from mmfact.factorize import baselines
from mmfact.factorize.compiler import Options, compile
from mmfact.factorize.participation import single
from mmfact.factorize.workload import prefix_sum
from mmfact.store.store import ArtifactStore

SGD = ("--workload", "sgd", "--n", 5)
NAMES = {
    "this",
    "identity",
    "tree",
    "honaker-online",
    "honaker-full",
    "sqrt-toeplitz",
    "sqrt-toeplitz, columns normalised",
    "optimal-toeplitz",
    "optimal-toeplitz, columns normalised",
}


def figures(A: np.ndarray, noising: np.ndarray, sensitivity: float) -> tuple[float, float]:
    """(loss, max error) of the noise A noising Z at that sensitivity."""
    B = A @ noising
    return sensitivity**2 * (B**2).sum(), sensitivity * np.sqrt((B**2).sum(1)).max()


def of_strategy(A: np.ndarray, C: np.ndarray) -> tuple[float, float]:
    return figures(A, np.linalg.inv(C), np.sqrt((C**2).sum(0)).max())


def of_tree(A: np.ndarray) -> tuple[float, float]:
    """A prefix is the sum of the fewest nodes: one for each bit of its length. Only completed nodes are released."""
    n = len(A)
    nodes = [(first, first + (1 << k)) for k in range(n.bit_length()) for first in range(0, n - (1 << k) + 1, 1 << k)]
    H = np.array([[first <= j < last for j in range(n)] for first, last in nodes], dtype=float)
    select = np.zeros((n, len(nodes)))
    for t in range(1, n + 1):
        at = 0
        for k in reversed(range(n.bit_length())):
            if t >> k & 1:
                select[t - 1, nodes.index((at, at + (1 << k)))] = 1
                at += 1 << k
    S = np.tril(np.ones((n, n)))
    assert np.array_equal(select @ H, S)
    return figures(A, np.linalg.inv(S) @ select, np.sqrt((H**2).sum(0)).max())


def of_full_tree(A: np.ndarray) -> tuple[float, float]:
    """Least squares on the whole tree of the next power of two, of which the first n steps are used."""
    n, size = len(A), 1 << (len(A) - 1).bit_length()
    levels = size.bit_length()
    nodes = [(first, first + (1 << k)) for k in range(levels) for first in range(0, size, 1 << k)]
    H = np.array([[first <= j < last for j in range(n)] for first, last in nodes], dtype=float)
    return figures(A, np.linalg.pinv(H), np.sqrt(levels))


def of_square_root(A: np.ndarray, normalised: bool) -> tuple[float, float]:
    n = len(A)
    c = np.cumprod([1.0, *((2 * k - 1) / (2 * k) for k in range(1, n))])
    C = np.array([[c[i - j] if i >= j else 0.0 for j in range(n)] for i in range(n)])
    return of_strategy(A, C / np.sqrt((C**2).sum(0)) if normalised else C)


@pytest.fixture(scope="module")
def compared(mmfact, vault, kinds):
    """Each artifact of the vault, compared once."""
    out = {}
    for kind in kinds:
        ran = mmfact("compare", kind, "--json", "--store", vault)
        assert (ran.code, ran.err, ran.warnings) == (0, "", ()), kind
        out[kind] = ran.json, ArtifactStore(vault).load(kind)
    return out


def rows(content) -> dict[str, dict]:
    return {row["name"]: row for row in content["mechanisms"]}


def test_figures_are_those_of_numpy(compared):
    """Dense algebra, n from 8 to 40 and mostly no power of two, to 1e-11."""
    for kind, (content, artifact) in compared.items():
        A, found = artifact.A, rows(content)
        expected = {
            "this": of_strategy(A, artifact.C),
            "identity": of_strategy(A, np.eye(len(A))),
            "tree": of_tree(A),
            "honaker-full": of_full_tree(A),
            "sqrt-toeplitz": of_square_root(A, normalised=False),
            "sqrt-toeplitz, columns normalised": of_square_root(A, normalised=True),
        }
        for name, (loss, max_error) in expected.items():
            rel = 1e-6 if name == "this" else 1e-11
            assert found[name]["loss"] == pytest.approx(loss, rel=rel), (kind, name)
            assert found[name]["max_error"] == pytest.approx(max_error, rel=rel), (kind, name)
            assert found[name]["loss"] >= loss * (1 - 1e-12)


def test_post_processed_prefix_sums_are_those_of_numpy(compared):
    """Somebody else's noise, through this optimizer: C made for prefix sums, B = A C^-1."""
    for kind, (content, artifact) in compared.items():
        found = rows(content)
        assert ("prefix-sum optimum" in found) == (artifact.workload.kind != "prefix-sum"), kind
        if "prefix-sum optimum" in found:
            best = compile(prefix_sum(artifact.n), Options(dtype="float64", tolerance=1e-9)).strategy.to_dense()
            loss, max_error = of_strategy(artifact.A, best)
            assert found["prefix-sum optimum"]["loss"] == pytest.approx(loss, rel=1e-4)
            assert found["prefix-sum optimum"]["max_error"] == pytest.approx(max_error, rel=1e-2)


def test_figures_are_those_of_the_library(compared):
    """To the last digit, under the same names; nothing is left out at these sizes."""
    for content, artifact in compared.values():
        found = rows(content)
        for one in baselines.baselines(artifact.workload, single()):
            row = found.pop(one.name)
            assert (row["how"], row["loss"], row["max_error"], row["rmse"]) == (
                one.how,
                one.loss,
                one.max_error,
                one.rmse,
            )
            assert row["buffers"] == one.buffers
        assert set(found) <= {"this", "prefix-sum optimum"}
        assert (found["this"]["loss"], found["this"]["max_error"]) == (
            artifact.certificate.loss,
            artifact.certificate.max_error,
        )
        assert found["this"]["buffers"] == artifact.strategy.buffers
        assert content["lower_bound"] == artifact.certificate.lower_bound
        assert content["digest"] == artifact.digest
        assert content["workload"] == artifact.workload.spec()
        assert content["left_out"] == {}


def test_rows_are_sorted_and_none_beats_the_bound(compared):
    for content, artifact in compared.values():
        losses = [row["loss"] for row in content["mechanisms"]]
        assert losses == sorted(losses)
        assert losses[0] >= content["lower_bound"]
        assert len(rows(content)) == len(losses), "two rows of one name"
        assert set(rows(content)) - {"prefix-sum optimum"} == NAMES
        for row in content["mechanisms"]:
            assert row["ratio"] == row["loss"] / content["lower_bound"]
            assert row["rmse"] == np.sqrt(row["loss"] / artifact.n)
            memory = artifact.strategy.bytes_per_parameter if row["name"] == "this" else 4 * row["buffers"]
            assert row["bytes_per_parameter"] == memory


def test_table(mmfact, vault, compared):
    """One line a mechanism in the order of --json, the artifact's strategy in words, the bound first."""
    content, _ = compared["buffered"]
    out = mmfact("compare", "buffered", "--store", vault).out
    lines = out.splitlines()
    assert lines[0].startswith("buffered: momentum, beta 0.9, n = 40 steps, schedule cooldown")
    for word in ("mechanism", "RMSE", "max error", "loss", "x bound", "buffers", "bytes/param"):
        assert word in lines[1]
    assert lines[2].startswith("lower bound")
    for line, row in zip(lines[3:], content["mechanisms"], strict=False):
        assert line.startswith(row["name"] + " ")
        assert f"{row['loss']:.9g}" in line
        assert f"{row['ratio']:.6f}" in line
    assert "mmfact, buffered" in out
    assert "left out" not in out
    assert not [line for line in lines if line.endswith(" ")]


def gain(out: str) -> float | None:
    """The gain over post-processed prefix sums, in percent, as printed."""
    match = re.search(r"lowers the loss by (\S+)%", out)
    return None if match is None else float(match[1])


def test_gain_over_prefix_sums(mmfact, vault, compared):
    """Printed for momentum, as large as the figures say; not printed where there is nothing to gain over."""
    for kind in ("momentum", "cooldown", "ema", "buffered", "low-rank"):
        found = rows(compared[kind][0])
        expected = 100 * (1 - found["this"]["loss"] / found["prefix-sum optimum"]["loss"])
        assert gain(mmfact("compare", kind, "--store", vault).out) == pytest.approx(expected, abs=0.051)
        assert expected > 1
    for kind in ("prefix", "buffered-float64"):
        out = mmfact("compare", kind, "--store", vault).out
        assert gain(out) is None
        assert "prefix-sum optimum" not in out


@pytest.mark.parametrize(
    "options",
    [
        ("--workload", "sgd", "--n", 64),
        ("--workload", "momentum", "--n", 1),
        ("--workload", "momentum", "--n", 12, "--beta", 0, "--buffers", 1),
        ("--workload", "sgd", "--n", 12, "--ema", 0.5, "--buffers", 1),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_nothing_is_gained_where_nothing_is(mmfact, options):
    """The same optimum, met less closely: "lowers the loss by -0.0%" is no sentence for a person."""
    found = gain(mmfact("compare", *options).out)
    assert found is None or found > 0 or str(found) == "0.0"


@pytest.mark.parametrize("n", [1, 2, 3, 7, 8, 9, 33])
@pytest.mark.parametrize("kind", ["prefix-sum", "momentum"])
def test_any_number_of_steps(mmfact, n, kind):
    """Powers of two or not; a single step is a comparison too."""
    ran = mmfact("compare", "--workload", kind, "--n", n, "--json")
    assert (ran.code, ran.err, ran.warnings) == (0, "", ())
    found, A = rows(ran.json), np.tril(np.ones((n, n)))
    if kind == "prefix-sum":
        assert found["tree"]["loss"] == pytest.approx(of_tree(A)[0], rel=1e-12)
        assert found["honaker-full"]["loss"] == pytest.approx(of_full_tree(A)[0], rel=1e-12)
    assert set(found) - {"prefix-sum optimum"} == NAMES
    assert found["this"]["ratio"] <= 1 + 1e-4


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--dtype", "float64"),
        ("--buffers", 2),
        ("--strategy", "dense"),
        ("--strategy", "dense", "--method", "dense"),
        ("--strategy", "banded-low-rank", "--bandwidth", 3, "--rank", 2),
        ("--method", "fixed-point", "--tolerance", 1e-3),
    ],
    ids=lambda options: " ".join(map(str, options)),
)
def test_both_forms_say_the_same(mmfact, store, options):
    """A REF and the options that it was compiled from: one object. Without a REF nothing is stored."""
    workload = ("--workload", "momentum", "--n", 11, "--lr-schedule", "cosine:final=0.1", *options)
    fresh = mmfact("compare", *workload, "--json", "--store", store)
    assert (fresh.code, fresh.err) == (0, "")
    assert not store.exists()
    ref = mmfact("compile", *workload, "--json", "--store", store).json["ref"]
    stored = mmfact("compare", ref, "--json", "--store", store)
    assert stored.json == fresh.json
    assert stored.json["ref"] == ref


def test_ref_may_be_a_digest_or_a_path(mmfact, vault, compared):
    content, artifact = compared["momentum"]
    for name in (artifact.digest[:12], str(artifact.path)):
        found = mmfact("compare", name, "--json", "--store", vault).json
        assert found["mechanisms"] == content["mechanisms"]


@pytest.mark.parametrize("strategy", ["buffered", "dense"])
def test_a_workload_that_is_custom(mmfact, store, tmp_path, strategy):
    """A matrix is no optimizer, but all mechanisms meet it; NumPy agrees."""
    A = np.tril(np.random.default_rng(4).uniform(0.1, 1, (11, 11))) + np.eye(11)
    np.save(tmp_path / "m.npy", A)
    workload = ("--workload", "custom", "--matrix", "m.npy", "--strategy", strategy)
    content = mmfact("compare", *workload, "--json").json
    found = rows(content)
    assert set(found) == NAMES | {"prefix-sum optimum"}
    for name, (loss, _) in {
        "identity": of_strategy(A, np.eye(11)),
        "tree": of_tree(A),
        "honaker-full": of_full_tree(A),
        "sqrt-toeplitz, columns normalised": of_square_root(A, normalised=True),
    }.items():
        assert found[name]["loss"] == pytest.approx(loss, rel=1e-12)
    ref = mmfact("compile", *workload, "--json", "--store", store).json["ref"]
    assert mmfact("compare", ref, "--json", "--store", store).json == content


def test_negative_custom_workloads(mmfact, tmp_path):
    """-A has the factorizations of A."""
    A = np.tril(np.random.default_rng(4).uniform(0.1, 1, (9, 9))) + np.eye(9)
    found = []
    for sign in (1, -1):
        np.save(tmp_path / "m.npy", sign * A)
        content = mmfact("compare", "--workload", "custom", "--matrix", "m.npy", "--json").json
        found.append(sorted(row["loss"] for row in content["mechanisms"]))
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_what_is_left_out_is_said(mmfact, store, monkeypatch):
    """In the table and in the object, with the reason. (The limit is lowered, so that this is quick.)"""
    monkeypatch.setattr(baselines, "LARGEST_DENSE_BASELINE", 20)
    for n, missing in ((20, False), (21, True)):
        content = mmfact("compare", "--workload", "prefix-sum", "--n", n, "--json").json
        left_out = {"optimal-toeplitz", "optimal-toeplitz, columns normalised"} if missing else set()
        assert set(content["left_out"]) == left_out
        assert set(rows(content)) == NAMES - left_out
        out = mmfact("compare", "--workload", "prefix-sum", "--n", n).out
        assert len(re.findall(r"^left out: ", out, re.M)) == len(left_out)
        for name in left_out:
            assert "n = 20" in content["left_out"][name]
            assert f"left out: {name} (" in out


def test_neither_or_both(mmfact, vault):
    for arguments in ((), ("--n", 3), ("--json",), ("momentum", *SGD), ("momentum", "--workload", "sgd")):
        ran = mmfact("compare", *arguments, "--store", vault)
        assert ran.code == 2
        assert "either a REF" in ran.err
        if "--json" in arguments:
            assert ran.json["exit_code"] == 2


OF_A_WORKLOAD = [
    ("--n", 16),
    ("--beta", 0.9),
    ("--lr-schedule", "constant"),
    ("--weight-decay", 0.0),
    ("--weight-decay-kind", "coupled"),
    ("--ema", 0),
    ("--matrix", "m.npy"),
    ("--strategy", "buffered"),
    ("--buffers", 2),
    ("--bandwidth", 2),
    ("--rank", 2),
    ("--dtype", "float32"),
    ("--tolerance", 1e-4),
    ("--method", "auto"),
]


@pytest.mark.parametrize("option", OF_A_WORKLOAD, ids=lambda option: option[0])
def test_a_ref_says_already_what_to_compare(mmfact, vault, option):
    """An option that would be ignored is refused, its default too; before or after the ref."""
    for arguments in (("momentum", *option), (*option, "momentum")):
        ran = mmfact("compare", *arguments, "--json", "--store", vault)
        assert ran.code == 2
        assert option[0] in ran.json["error"]
        assert "momentum" in ran.json["error"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--workload", "sgd"), "needs --n"),
        (("--workload", "custom"), "needs --matrix"),
        (("--workload", "sgd", "--n", 0), "n = 0"),
        (("--workload", "prefix-sum", "--n", 4, "--beta", 0.9), "does not apply"),
        (("--workload", "momentum", "--n", 100_000, "--strategy", "dense"), "74.5 GiB"),
        (("--workload", "momentum", "--n", 100_000, "--method", "dense"), "74.5 GiB"),
        ((*SGD, "--tolerance", 0), "tolerance 0.0"),
    ],
    ids=str,
)
def test_workloads_that_cannot_be_compared(mmfact, options, says):
    ran = mmfact("compare", *options, "--json")
    assert ran.code == 2
    assert says in ran.json["error"]


def test_an_artifact_that_is_worse_than_a_baseline(mmfact, store):
    """One buffer for a long run: it is shown where it belongs, and exit 0, for the question was another."""
    ran = mmfact("compare", "--workload", "prefix-sum", "--n", 256, "--buffers", 1, "--json")
    assert ran.code == 0
    assert ran.json["mechanisms"][0]["name"] != "this"
    assert mmfact("compare", "--workload", "prefix-sum", "--n", 256, "--buffers", 1).code == 0


def test_comparing_moves_on_a_terminal(script, terminal):
    """The stages show on stderr, the table goes to stdout alone."""
    code, out, text = terminal((script, "compare", "--workload", "momentum", "--n", 1200, "--json"))
    assert code == 0
    assert out.startswith("{")
    assert "comparing momentum-n1200" in text
    assert "optimal-toeplitz" in text
    assert "Traceback" not in text
